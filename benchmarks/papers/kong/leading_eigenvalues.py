"""Leading eigenvalues by StiefelSGD: how much faster are the isometric flows than the published?

Maximise tr(X'AX) over St(n, m); the maximum is the sum of the m largest eigenvalues. A is
(Xi + Xi')/2/sqrt(n) with a Gaussian Xi, as in the experiments of Kong, Wang & Tao (ICLR 2023), in
float64. Counted are the iterations and seconds until (f* - f)/|f*| <= 1e-8, with f* from
`torch.linalg.eigh`, momentum 0.9, for

    isometric   StiefelSGD's default,
    published   transport="published", rotation="euler": Algorithm 1 of the paper, but for the lines
                that `stiefel_opt.functional.published` names.

Both search one grid of learning rates. On the first draw every rate runs until it needs `CLOSE`
times the iterations of the best rate so far; those which get there compete on all draws, and the
lowest median counts. The published flows may take another rate for every size; the isometric ones
must do with one for all.

    python -m benchmarks.papers.kong.leading_eigenvalues  # five draws of both sizes, a few minutes
    python -m benchmarks.papers.kong.leading_eigenvalues --smoke  # seconds
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import stiefel_opt as so
from benchmarks.common import programs
from benchmarks.common.harness import markdown_table, middle_and_range
from benchmarks.papers.kong.eigen_problem import TARGET, Limit, Problem, Run, draw_problem, optimize

MOMENTUM = 0.9
GRID = (0.05, 0.1, 0.13, 0.15, 0.2, 0.3, 0.4)
CLOSE = 1.3
MOST = Limit(5000)
SIZES, SMOKE_SIZES = ((1000, 10), (2000, 50)), ((60, 3), (100, 5))
FLOWS: dict[str, dict[str, Any]] = {
    "isometric": {},
    "published": {"transport": "published", "rotation": "euler"},
}
Size = tuple[int, int]
Runs = dict[float, list[Run]]  # learning rate -> one run per draw


def solve(problem: Problem, flow: str, lr: float, limit: Limit = MOST) -> Run:
    """One run; a rate at which a flow blows up has lost, so nothing is skipped."""
    options = {"lr": lr, "momentum": MOMENTUM, "nonfinite": "ignore", **FLOWS[flow]}
    return optimize(problem, options, limit, tag=so.ManifoldParameter, build=so.StiefelSGD)


def promising(problem: Problem, flow: str, rates: Sequence[float]) -> list[float]:
    """The rates that need at most `CLOSE` times the iterations of the best, the largest first."""
    counts: dict[float, float] = {}
    for lr in sorted(rates, reverse=True):
        most = min(MOST.iterations, CLOSE * min(counts.values(), default=math.inf))
        counts[lr] = solve(problem, flow, lr, Limit(most)).iterations
    close = [lr for lr in counts if counts[lr] <= CLOSE * min(counts.values()) < math.inf]
    if not close:
        raise RuntimeError("no rate of the grid reached the target; give others by --rates")
    return close


def median(runs: Sequence[Run]) -> float:
    """Median iterations to the target, a draw that missed it counting as infinite."""
    return statistics.median(run.iterations for run in runs)


def compete(
    problems: dict[Size, list[Problem]], rates: Sequence[float]
) -> tuple[dict[str, dict[Size, Runs]], dict[str, dict[Size, float]]]:
    """All runs by flow and size, and the chosen rate of each."""
    tqdm = programs.require("tqdm").tqdm
    runs: dict[str, dict[Size, Runs]] = {flow: {} for flow in FLOWS}
    chosen: dict[str, dict[Size, float]] = {flow: {} for flow in FLOWS}
    for flow in FLOWS:
        close = {size: promising(draws[0], flow, rates) for size, draws in problems.items()}
        if flow == "isometric":
            close = dict.fromkeys(problems, sorted(set().union(*close.values())))
        for size, draws in problems.items():
            for lr in tqdm(close[size], desc=f"{flow}, n = {size[0]}", unit="rate"):
                runs[flow].setdefault(size, {})[lr] = [solve(one, flow, lr) for one in draws]
            chosen[flow][size] = min(close[size], key=lambda lr: median(runs[flow][size][lr]))
    mine = runs["isometric"]
    joint = {
        lr: math.prod(median(mine[size][lr]) for size in problems) for lr in close_to_all(mine)
    }
    chosen["isometric"] = dict.fromkeys(problems, min(joint, key=lambda lr: (joint[lr], lr)))
    return runs, chosen


def close_to_all(runs: dict[Size, Runs]) -> list[float]:
    """The rates at which every draw of every size arrived, or all where there is none."""
    rates = list(next(iter(runs.values())))
    return [lr for lr in rates if all(r.reached for of in runs.values() for r in of[lr])] or rates


def record(size: Size, flow: str, lr: float, runs: Runs) -> dict[str, Any]:
    own = runs[lr]
    return {
        "n": size[0],
        "m": size[1],
        "flows": flow,
        "lr": lr,
        "iterations": [run.iterations if run.reached else None for run in own],
        "seconds": [run.seconds for run in own],
        "orthonormality_error": [run.error for run in own],
        "median_iterations_by_rate": {
            f"{rate:g}": median(tried)
            for rate, tried in sorted(runs.items())
            if math.isfinite(median(tried))
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Search, run, print the table and draw the iterations of every draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", type=float, nargs="+", default=GRID, help="the grid")
    programs.add_flags(parser, Path("runs") / "leading_eigenvalues", seeds=5)
    if parser.parse_known_args(argv)[0].smoke:
        parser.set_defaults(seeds=[1])
    options = programs.finish_flags(parser, parser.parse_args(argv))
    rates = " ".join(f"{rate:g}" for rate in options.rates)
    draws = programs.listed(options.seeds, "draw")
    what = f"StiefelSGD with isometric and published flows, {draws}, rates {rates}"
    programs.announce(options, what, 5 if options.smoke else 60 * len(options.seeds))
    sizes = SMOKE_SIZES if options.smoke else SIZES
    problems = {
        size: [draw_problem(*size, number)[0] for number in options.seeds] for size in sizes
    }
    runs, chosen = compete(problems, options.rates)
    rows, records = [], []
    for size in sizes:
        for flow in FLOWS:
            lr = chosen[flow][size]
            own = runs[flow][size][lr]
            title = f"n = {size[0]}, m = {size[1]}"
            row = [title, flow, f"{lr:g}", middle_and_range([r.iterations for r in own], ".0f")]
            row += [middle_and_range([r.seconds for r in own], ".2f")]
            rows.append([*row, f"{max(r.error for r in own):.1e}"])
            records.append(record(size, flow, lr, runs[flow][size]))
    header = ["Size", "Flows", "Rate", "Iterations", "Seconds", "Orthonormality"]
    count = programs.plural(len(options.seeds), "draw")
    title = f"Leading eigenvalues, float64, momentum {MOMENTUM}, {count}"
    content = {"target": TARGET, "grid": list(options.rates), "results": records}
    print("\n" + programs.write_table(options.output, title, markdown_table(header, rows), content))
    programs.figures.leading_eigenvalues(options.output / "results.png")
    print(f"Plot: {options.output / 'results.png'}")


if __name__ == "__main__":
    programs.run(main)
