"""Wasserstein discriminant analysis of wine and digits: ours beside POT's `ot.dr.wda`.

    export OMP_NUM_THREADS=1
    python -m benchmarks.accuracy.discriminant  # a minute

One objective, two components, ten Sinkhorn iterations, three random initialisations that all share;
half of the points are fitted. POT runs 20 and 60 iterations of pymanopt's steepest descent, its
default. Ratios are computed anew in float64 from the projection that each returns;
accuracy is that of five nearest neighbours on the other half. Processor seconds; medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json

STARTS, ITERATIONS, NEIGHBOURS = 3, 10, 5
REGS = {"wine": 5.0, "digits 0 to 3": 1.0}

Array = np.ndarray
Solver = Callable[[Array, Array, float, Array], Array]


def load(name: str) -> tuple[Array, Array]:
    """Standardised wine, or thirty images of each of four digits."""
    datasets = importlib.import_module("sklearn.datasets")
    if name == "wine":
        x, y = datasets.load_wine(return_X_y=True)
        return (x - x.mean(0)) / x.std(0), y
    x, y = datasets.load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    kept = [rng.permutation(np.flatnonzero(y == digit))[:30] for digit in range(4)]
    return x[np.concatenate(kept)] / 16, y[np.concatenate(kept)]


def by_us(x: Array, y: Array, reg: float, start: Array) -> Array:
    found = so.ot.wasserstein_discriminant(
        x, y, reg=reg, sinkhorn_iterations=ITERATIONS, init=start
    )
    return np.asarray(found.projection)


def by_pot(x: Array, y: Array, reg: float, start: Array, steps: int) -> Array:
    reduction = importlib.import_module("ot.dr")
    with contextlib.redirect_stdout(io.StringIO()):
        projection, _ = reduction.wda(
            x.copy(), y, p=2, reg=reg, k=ITERATIONS, maxiter=steps, P0=start.copy()
        )
    return np.asarray(projection)


SOLVERS: dict[str, Solver] = {
    "ours": by_us,
    "POT, 20 steps": partial(by_pot, steps=20),
    "POT, 60 steps": partial(by_pot, steps=60),
}


def ratio(x: Array, y: Array, projection: Array, reg: float) -> float:
    """Transport within classes over transport between them, by POT's functions in float64."""
    reduction = importlib.import_module("ot.dr")
    classes, sums = [x[y == label] @ projection for label in np.unique(y)], [0.0, 0.0]
    for number, first in enumerate(classes):
        for second in classes[number:]:
            weights = [np.full(len(each), 1 / len(each)) for each in (first, second)]
            cost = reduction.dist(first, second)
            plan = reduction.sinkhorn(*weights, cost, reg, ITERATIONS)
            sums[second is not first] += float((plan * cost).sum())
    return sums[0] / sums[1]


def runs(name: str) -> dict[str, list[list[float]]]:
    """Ratio, accuracy and seconds from every initialisation."""
    neighbours = importlib.import_module("sklearn.neighbors")
    (x, y), reg = load(name), REGS[name]
    found: dict[str, list[list[float]]] = {solver: [] for solver in SOLVERS}
    for number in range(STARTS):
        rng = np.random.default_rng(number)
        fitted, others = np.array_split(rng.permutation(len(x)), 2)
        start = np.linalg.qr(rng.standard_normal((x.shape[1], 2))).Q
        for solver, call in SOLVERS.items():
            began = time.process_time()
            projection = call(x[fitted], y[fitted], reg, start)
            seconds = time.process_time() - began
            nearest = neighbours.KNeighborsClassifier(NEIGHBOURS)
            nearest.fit(x[fitted] @ projection, y[fitted])
            accuracy = float(nearest.score(x[others] @ projection, y[others]))
            reached = ratio(x[fitted], y[fitted], projection, reg)
            found[solver].append([reached, accuracy, seconds])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "discriminant.json")
    arguments = parser.parse_args(argv)
    one_thread()
    by_us(*load("wine"), 5.0, np.eye(13, 2))  # imports are no part of the times
    found = {name: runs(name) for name in REGS}
    rows = []
    for name, solvers in found.items():
        for solver, reached in solvers.items():
            values = [statistics.median(column) for column in zip(*reached, strict=True)]
            row = f"{values[0]:.4f}", f"{100 * values[1]:.1f}", f"{values[2]:.2f}"
            rows.append([name, solver, *row])
    table = markdown_table(["Data", "Solver", "Ratio", "Accuracy, %", "Seconds"], rows)
    content = {"machine": machine(packages=["pot", "scikit-learn"]), "runs": found}
    write_json(arguments.output, content | {"tables": {"ratios": table}})
    print(table)


if __name__ == "__main__":
    main()
