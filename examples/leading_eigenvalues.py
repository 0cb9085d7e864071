"""Leading eigenvalues by StiefelSGD: how much faster are the isometric flows than the published?

Maximise tr(X'AX) over St(n, m); the maximum is the sum of the m largest eigenvalues. A is
(Xi + Xi')/2/sqrt(n) with a Gaussian Xi, as in the experiments of Kong, Wang & Tao (ICLR 2023), in
float64. Counted are the iterations and seconds until (f* - f)/|f*| <= 1e-8, with f* from
`torch.linalg.eigvalsh`, momentum 0.9, for

    isometric   StiefelSGD's default,
    published   transport="published", rotation="euler": the algorithm of the paper.

Both search one grid of learning rates. On the first draw every rate runs until it needs `CLOSE`
times the iterations of the best rate so far; those which get there compete on the other draws,
where a rate of the published flows is dropped once it has lost most draws. The median counts. The
published flows may take another rate for every size; the isometric ones must do with one for all.

    python examples/leading_eigenvalues.py             # five draws of both sizes, a few minutes
    python examples/leading_eigenvalues.py --smoke     # seconds
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _common import COLOURS, atomic, machine, markdown_table, require, write_text
from torch import Tensor

import stiefel_opt as so

MOMENTUM = 0.9
TARGET = 1e-8
GRID = (0.05, 0.1, 0.13, 0.15, 0.2, 0.3, 0.4)
CLOSE = 1.3
ITERATION_LIMIT = 5000
FLOWS: dict[str, dict[str, Any]] = {
    "isometric": {},
    "published": {"transport": "published", "rotation": "euler"},
}


@dataclass(frozen=True)
class Size:
    """Matrices n x m, and the bar: isometric over published iterations (None: no bar)."""

    n: int
    m: int
    bar: float | None

    @property
    def title(self) -> str:
        return f"n = {self.n}, m = {self.m}"


SIZES = (Size(1000, 10, 0.7), Size(2000, 50, 0.4))
SMOKE_SIZES = (Size(60, 3, None), Size(100, 5, None))


@dataclass(frozen=True)
class Problem:
    """One draw: the matrix, the exact maximum and the start all runs share."""

    matrix: Tensor
    maximum: float
    start: Tensor


@dataclass
class Run:
    """One optimization: relative gap and seconds after every iteration."""

    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: float = math.nan  # of orthonormality, at the end

    @property
    def reached(self) -> bool:
        return bool(self.gaps) and abs(self.gaps[-1]) <= TARGET and self.error <= TARGET

    @property
    def iterations(self) -> float:
        """Iterations to the target; infinite if it was not reached."""
        return len(self.gaps) if self.reached else math.inf


def draw_problem(size: Size, number: int) -> Problem:
    generator = torch.Generator().manual_seed(1000 * size.m + number)
    gaussian = torch.randn(size.n, size.n, generator=generator, dtype=torch.float64)
    matrix = (gaussian + gaussian.T) / (2 * math.sqrt(size.n))
    maximum = float(torch.linalg.eigvalsh(matrix)[-size.m :].sum())
    start = torch.randn(size.n, size.m, generator=generator, dtype=torch.float64)
    return Problem(matrix, maximum, torch.linalg.qr(start).Q)


def maximize(problem: Problem, flow: str, lr: float, limit: float) -> Run:
    """Run one flow until the target, ``limit`` iterations, or until it leaves the manifold."""
    point = so.ManifoldParameter(problem.start.clone())
    optimizer = so.StiefelSGD([point], lr=lr, momentum=MOMENTUM, maximize=True, **FLOWS[flow])
    run = Run()
    began = time.perf_counter()
    image = problem.matrix @ point.detach()
    while len(run.gaps) < limit:
        point.grad = 2 * image
        optimizer.step()
        image = problem.matrix @ point.detach()  # value now, gradient of the next iteration
        value = float((point.detach() * image).sum())
        if not math.isfinite(value):
            break
        run.gaps.append((problem.maximum - value) / abs(problem.maximum))
        run.seconds.append(time.perf_counter() - began)
        if run.gaps[-1] <= TARGET:  # far below -TARGET: no orthonormal X has such a value
            break
    run.error = float(so.orthonormality_error(point))
    return run


Runs = dict[float, list[Run]]  # learning rate -> one run per draw


def explore(problem: Problem, flow: str, rates: Sequence[float], progress: Any) -> Runs:
    """Every rate on one draw, the largest first; slow ones are cut short."""
    limit: float = ITERATION_LIMIT
    runs: Runs = {}
    for lr in sorted(rates, reverse=True):
        progress.set_postfix_str(f"{flow}, lr {lr:g}")
        run = maximize(problem, flow, lr, limit)
        limit = min(limit, CLOSE * run.iterations)
        runs[lr] = [run]
        progress.update()
    return runs


def promising(runs: Runs) -> list[float]:
    """The rates whose first run is at most `CLOSE` times worse than the best one, best first."""
    first = {lr: trials[0].iterations for lr, trials in runs.items()}
    close = [lr for lr in first if first[lr] <= CLOSE * min(first.values()) < math.inf]
    return sorted(close, key=lambda lr: first[lr])


def complete(problems: Sequence[Problem], flow: str, lr: float, runs: Runs, progress: Any) -> None:
    """Run a rate on the draws it has not seen."""
    if not runs[lr][0].reached:
        runs[lr].clear()  # was cut short by the search: give it the full limit
    for problem in problems[len(runs[lr]) :]:
        progress.set_postfix_str(f"{flow}, lr {lr:g}")
        runs[lr].append(maximize(problem, flow, lr, ITERATION_LIMIT))
        progress.update()


def compare(problems: Sequence[Problem], flow: str, runs: Runs, progress: Any) -> list[float]:
    """Run the promising rates on all draws; a rate that lost most draws is dropped at once."""
    first, *others = promising(runs) or [max(runs)]
    complete(problems, flow, first, runs, progress)
    finished = [first]
    for lr in others:
        losses = 0
        for number, problem in enumerate(problems):
            best = min(runs[rate][number].iterations for rate in finished)
            if number > 0:
                progress.set_postfix_str(f"{flow}, lr {lr:g}")
                runs[lr].append(maximize(problem, flow, lr, min(ITERATION_LIMIT, CLOSE * best)))
                progress.update()
            losses += runs[lr][number].iterations > best
            if 2 * losses > len(problems):
                break
        else:
            finished.append(lr)
    return finished


def all_reached(runs: Sequence[Run]) -> bool:
    return all(run.reached for run in runs)


def median_iterations(runs: Sequence[Run]) -> float:
    """Median iterations to the target, a draw that missed it counting as infinite."""
    return statistics.median(run.iterations for run in runs)


def best_rate(scores: dict[float, float]) -> float:
    if not scores or math.isinf(min(scores.values())):
        raise RuntimeError("no rate of the grid reached the target; give others by --rates")
    return min(scores, key=lambda lr: (scores[lr], lr))


def solve(
    sizes: Sequence[Size], draws: int, rates: Sequence[float]
) -> tuple[dict[str, dict[Size, Runs]], dict[str, dict[Size, float]]]:
    """All runs by flow and size, and the chosen rate of each."""
    tqdm = require("tqdm").tqdm
    with tqdm(total=len(sizes) * draws, desc="exact eigenvalues", unit="draw") as progress:
        problems: dict[Size, list[Problem]] = {}
        for size in sizes:
            problems[size] = []
            for number in range(draws):
                problems[size].append(draw_problem(size, number))
                progress.update()
    runs: dict[str, dict[Size, Runs]] = {flow: {} for flow in FLOWS}
    chosen: dict[str, dict[Size, float]] = {flow: {} for flow in FLOWS}
    with tqdm(total=len(sizes) * len(FLOWS) * len(rates), desc="search", unit="run") as progress:
        for flow in FLOWS:
            for size in sizes:
                runs[flow][size] = explore(problems[size][0], flow, rates, progress)
    with tqdm(desc="all draws", unit="run") as progress:
        for size in sizes:
            table = runs["published"][size]
            rates = compare(problems[size], "published", table, progress)
            chosen["published"][size] = best_rate(
                {lr: median_iterations(table[lr]) for lr in rates}
            )
        # One rate for all sizes: the smallest product of medians of those that always arrive.
        mine = runs["isometric"]
        candidates = {lr for size in sizes for lr in promising(mine[size])}
        joint = {}
        for lr in sorted(candidates):
            for size in sizes:
                complete(problems[size], "isometric", lr, mine[size], progress)
            if all(all_reached(mine[size][lr]) for size in sizes):
                joint[lr] = math.prod(median_iterations(mine[size][lr]) for size in sizes)
        chosen["isometric"] = dict.fromkeys(sizes, best_rate(joint))
    return runs, chosen


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
            line = f"{'PASS' if passed else 'FAIL'}  {line} (bar {size.bar})"
        verdicts.append(line)
    return markdown_table(header, rows) + "\n\n" + "\n".join(verdicts), records, met


def plot(
    runs: dict[str, dict[Size, Runs]],
    chosen: dict[str, dict[Size, float]],
    sizes: Sequence[Size],
    path: Path,
) -> None:
    """Relative gap of every draw, against iterations (above) and seconds (below)."""
    require("matplotlib").use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(sizes), figsize=(6 * len(sizes), 8), layout="constrained", squeeze=False
    )
    colours = dict(zip(FLOWS, COLOURS, strict=False))
    for column, size in enumerate(sizes):
        for flow in FLOWS:
            lr = chosen[flow][size]
            for number, run in enumerate(runs[flow][size][lr]):
                label = f"{flow}, lr = {lr:g}" if number == 0 else None
                style = {"color": colours[flow], "label": label, "alpha": 0.8, "linewidth": 1.2}
                axes[0][column].semilogy(range(1, len(run.gaps) + 1), run.gaps, **style)
                axes[1][column].semilogy(run.seconds, run.gaps, **style)
        axes[0][column].set_title(size.title)
        axes[0][column].set_xlabel("iterations")
        axes[1][column].set_xlabel("time (s)")
        for row in range(2):
            axes[row][column].axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
            axes[row][column].set_ylabel("relative gap (f* - f) / f*")
            axes[row][column].grid(alpha=0.3)
            axes[row][column].legend()
    figure.suptitle("Leading eigenvalues, float64, momentum 0.9: one line per draw")
    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=130)
    pyplot.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="tiny matrices, one draw, no bars")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=GRID, help="the grid")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs") / "leading_eigenvalues",
        help="folder of table.md, results.json and gap.png",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Search, run, print the table and the bars; the exit status is 1 if a bar is missed."""
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    sizes = SMOKE_SIZES if arguments.smoke else SIZES
    draws = 1 if arguments.smoke else arguments.draws
    print("grid of learning rates:", " ".join(f"{rate:g}" for rate in arguments.rates))
    began = time.perf_counter()
    runs, chosen = solve(sizes, draws, arguments.rates)
    text, records, met = report(runs, chosen, sizes)
    print(f"\n{text}\n\n{draws} draw(s), {arguments.threads} thread(s), "
          f"{time.perf_counter() - began:.0f} s in all")  # fmt: skip
    content = {
        "machine": machine(), "dtype": "float64", "momentum": MOMENTUM, "target": TARGET,
        "grid": list(arguments.rates), "tables": [text], "results": records,
    }  # fmt: skip
    write_text(arguments.output / "results.json", json.dumps(content, indent=1) + "\n")
    write_text(arguments.output / "table.md", f"{text}\n")
    plot(runs, chosen, sizes, arguments.output / "gap.png")
    print(f"Plot: {arguments.output / 'gap.png'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
