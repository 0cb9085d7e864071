"""The search of `leading_eigenvalues.py`: problems, runs, rates that compete on all draws."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common.programs import require

MOMENTUM = 0.9
TARGET = 1e-8
GRID = (0.05, 0.1, 0.13, 0.15, 0.2, 0.3, 0.4)
CLOSE = 1.3
ITERATION_LIMIT = 5000
FLOWS: dict[str, dict[str, Any]] = {
    "isometric": {},
    # They may blow up, which is what the search has to see.
    "published": {"transport": "published", "rotation": "euler", "nonfinite": "ignore"},
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


def draw_problem(size: Size, number: int, device: str) -> Problem:
    generator = torch.Generator().manual_seed(1000 * size.m + number)
    gaussian = torch.randn(size.n, size.n, generator=generator, dtype=torch.float64)
    matrix = (gaussian + gaussian.T) / (2 * math.sqrt(size.n))
    maximum = float(torch.linalg.eigvalsh(matrix)[-size.m :].sum())
    start = torch.randn(size.n, size.m, generator=generator, dtype=torch.float64)
    return Problem(matrix.to(device), maximum, torch.linalg.qr(start).Q.to(device))


def maximize(problem: Problem, flow: str, lr: float, limit: float) -> Run:
    """Run one flow until the target, ``limit`` iterations, or until it leaves the manifold."""
    point = so.ManifoldParameter(problem.start.clone())
    options = FLOWS[flow] | {"nonfinite": "ignore"}  # a rate at which a flow blows up has lost
    optimizer = so.StiefelSGD([point], lr=lr, momentum=MOMENTUM, maximize=True, **options)
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
    sizes: Sequence[Size], options: argparse.Namespace
) -> tuple[dict[str, dict[Size, Runs]], dict[str, dict[Size, float]]]:
    """All runs by flow and size, and the chosen rate of each."""
    tqdm, rates = require("tqdm").tqdm, options.rates
    with tqdm(
        total=len(sizes) * len(options.seeds), desc="exact eigenvalues", unit="draw"
    ) as progress:
        problems: dict[Size, list[Problem]] = {}
        for size in sizes:
            problems[size] = []
            for number in options.seeds:
                problems[size].append(draw_problem(size, number, options.device))
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
            finished = compare(problems[size], "published", table, progress)
            chosen["published"][size] = best_rate(
                {lr: median_iterations(table[lr]) for lr in finished}
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
