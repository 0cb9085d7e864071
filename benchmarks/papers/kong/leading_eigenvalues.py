"""Leading eigenvalues by StiefelSGD: how much faster are the isometric flows than the published?

Maximise tr(X'AX) over St(n, m); the maximum is the sum of the m largest eigenvalues. A is
(Xi + Xi')/2/sqrt(n) with a Gaussian Xi, as in the experiments of Kong, Wang & Tao (ICLR 2023), in
float64. Counted are the iterations and seconds until (f* - f)/|f*| <= 1e-8, with f* from
`torch.linalg.eigvalsh`, momentum 0.9, for

    isometric   StiefelSGD's default,
    published   transport="published", rotation="euler": Algorithm 1 of the paper, but for the lines
                that `stiefel_opt.functional.published` names.

Both search one grid of learning rates. On the first draw every rate runs until it needs `CLOSE`
times the iterations of the best rate so far; those which get there compete on the other draws,
where a rate of the published flows is dropped once it has lost most draws. The median counts. The
published flows may take another rate for every size; the isometric ones must do with one for all.

    python -m benchmarks.papers.kong.leading_eigenvalues  # five draws of both sizes, a few minutes
    python -m benchmarks.papers.kong.leading_eigenvalues --smoke  # seconds
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.programs import (
    Panel,
    add_flags,
    announce,
    finish_flags,
    listed,
    markdown_table,
    plot_curves,
    plural,
    run,
    write_table,
)
from benchmarks.papers.kong.eigen_search import (
    FLOWS,
    GRID,
    MOMENTUM,
    SIZES,
    SMOKE_SIZES,
    TARGET,
    Runs,
    Size,
    all_reached,
    median_iterations,
    solve,
)


def spread(values: Sequence[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} - {high:{form}})"


def report(
    runs: dict[str, dict[Size, Runs]], chosen: dict[str, dict[Size, float]], sizes: Sequence[Size]
) -> tuple[str, list[dict[str, Any]], bool]:
    """The table, the rows for the JSON file, and whether every bar is met."""
    header = ["Size", "Flows", "Rate", "Iterations", "Seconds", "Orthonormality"]
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    verdicts: list[str] = []
    met = True
    for size in sizes:
        medians = {}
        for flow in FLOWS:
            lr = chosen[flow][size]
            trials = runs[flow][size][lr]
            counts = [run.iterations for run in trials]
            seconds = [run.seconds[-1] for run in trials if run.reached]
            medians[flow] = median_iterations(trials)
            rows.append([
                size.title, flow, f"{lr:g}", spread(counts, ".0f"), spread(seconds, ".2f"),
                f"{max(run.error for run in trials):.1e}",
            ])  # fmt: skip
            records.append({
                "n": size.n, "m": size.m, "flows": flow, "lr": lr,
                "iterations": [run.iterations if run.reached else None for run in trials],
                "seconds": [run.seconds[-1] if run.seconds else None for run in trials],
                "orthonormality_error": [run.error for run in trials],
                "median_iterations_by_rate": {
                    f"{rate:g}": median_iterations(tried)
                    for rate, tried in sorted(runs[flow][size].items())
                    if len(tried) == len(trials) and all_reached(tried)
                },
            })  # fmt: skip
        ratio = medians["isometric"] / medians["published"]
        line = f"{size.title}: isometric / published iterations {ratio:.2f}"
        if size.bar is not None:
            passed = ratio <= size.bar
            met = met and passed
            line += f", {'at most' if passed else 'more than'} {size.bar}"
        verdicts.append(line)
    return markdown_table(header, rows) + "\n\n" + "\n".join(verdicts), records, met


def plot(
    runs: dict[str, dict[Size, Runs]],
    chosen: dict[str, dict[Size, float]],
    size: Size,
    path: Path,
) -> None:
    """Relative gap against iterations: mean of the draws, range as a band."""
    histories = {}
    for flow in FLOWS:
        lr = chosen[flow][size]
        histories[f"{flow}, lr = {lr:g}"] = [
            [
                {"iterations": number, "gap": max(gap, TARGET / 10)}
                for number, gap in enumerate(one.gaps, 1)
            ]
            for one in runs[flow][size][lr]
        ]
    label, levels = "relative gap (f* - f) / f*", {"target": TARGET}
    panel = Panel("gap", label, "", "log", levels, "iterations")
    plot_curves(path, f"Leading eigenvalues, {size.title}, float64", histories, [panel])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", type=float, nargs="+", default=GRID, help="the grid")
    add_flags(parser, Path("runs") / "leading_eigenvalues", seeds=5)
    if parser.parse_known_args(argv)[0].smoke:
        parser.set_defaults(seeds=[1])
    return finish_flags(parser, parser.parse_args(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Search, run, print the table and the bars; the exit status is 1 if a bar is missed."""
    options = parse(argv)
    sizes = SMOKE_SIZES if options.smoke else SIZES
    rates = " ".join(f"{rate:g}" for rate in options.rates)
    draws = listed(options.seeds, "draw")
    what = f"StiefelSGD with isometric and published flows, {draws}, rates {rates}"
    announce(options, what, 5 if options.smoke else 60 * len(options.seeds))
    began = time.perf_counter()
    runs, chosen = solve(sizes, options)
    text, records, met = report(runs, chosen, sizes)
    title = (
        f"Leading eigenvalues, float64, momentum {MOMENTUM}, {plural(len(options.seeds), 'draw')}"
    )
    content = {"target": TARGET, "grid": list(options.rates), "results": records}
    print("\n" + write_table(options.output, title, text, content))
    print(f"{time.perf_counter() - began:.0f} s in all")
    for size in sizes:
        path = options.output / f"gap-{size.n}-{size.m}.png"
        plot(runs, chosen, size, path)
        print(f"Plot: {path}")
    return 0 if met else 1


if __name__ == "__main__":
    run(main)
