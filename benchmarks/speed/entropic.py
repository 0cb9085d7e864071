"""Entropic plans over the regularization: ours and POT's Sinkhorn iterations, to one error.

    export OMP_NUM_THREADS=1
    python -m benchmarks.speed.entropic  # three minutes; does what is missing in the file

Two clouds of 300 points in the plane. Ours is `projection_robust_wasserstein(..., max_iter=0)`:
annealing, Sinkhorn's iteration, Newton's where that is slow. POT runs `ot.sinkhorn` in pieces of a
hundred iterations, each from the potentials of the last (`warmstart`); its annealed method in one
piece. All stop at an L1 error of the marginals of 1e-6, POT also after five seconds. The second
number of POT is from the potentials of clouds a hundredth of their size away, as after a step of
the projection; ours begins from nothing. Processor time, medians of three where one takes less than
a second. A cell without a time has the error that was reached.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json

POINTS, ERROR, PIECE, LIMIT, ROUNDS = 300, 1e-6, 100, 5.0, 3
ANNEALED = 800  # values of the regularization, of a hundred iterations each
REGS = (10.0, 1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
METHODS = ("sinkhorn", "sinkhorn_log", "sinkhorn_stabilized", "sinkhorn_epsilon_scaling")

Array = np.ndarray
Potentials = tuple[Array, Array]


def clouds() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, POINTS, 2))
    return x, y * np.array([2.0, 0.5]) + np.array([1.0, 0.0])


def cost_of(x: Array, y: Array) -> Array:
    squares: Array = np.square(x[:, None] - y).sum(2)
    return squares


def error_of(plan: Array) -> float:
    """L1 error of both marginals."""
    errors = [np.abs(plan.sum(axis) - 1 / POINTS).sum() for axis in (0, 1)]
    return float(np.sum(errors))


def by_pot(cost: Array, reg: float, method: str, warm: Potentials | None) -> tuple[Any, ...]:
    """Seconds, error and potentials over `reg`."""
    transport = importlib.import_module("ot")
    weights = np.full(POINTS, 1 / POINTS)
    began, error, plan = time.process_time(), np.inf, None
    while error > ERROR and time.process_time() - began < LIMIT:
        anneals = method == "sinkhorn_epsilon_scaling"
        plan, log = transport.sinkhorn(
            weights, weights, cost, reg, method, numItermax=ANNEALED if anneals else PIECE,
            stopThr=ERROR / POINTS**0.5, log=True, warn=False, warmstart=warm,
        )  # fmt: skip
        error = error_of(plan)
        if anneals or not np.isfinite(error):
            break
        warm = potentials_of(log)
    return time.process_time() - began, error, warm


def potentials_of(log: dict[str, Any]) -> Potentials:
    if "warmstart" in log:
        found: Potentials = log["warmstart"]
        return found
    return (log["log_u"], log["log_v"]) if "log_u" in log else (np.log(log["u"]), np.log(log["v"]))


def by_us(x: Array, y: Array, reg: float) -> tuple[float, float]:
    began = time.process_time()
    found = so.ot.projection_robust_wasserstein(
        x, y, k=2, reg=reg, init=np.eye(2), max_iter=0, max_products=100_000
    )
    return time.process_time() - began, error_of(found.plan)


def middle(call: Callable[[], Sequence[Any]]) -> tuple[float, float]:
    """The median of the seconds, and the largest error."""
    found = [call()]
    if found[0][0] < 1.0:
        found += [call() for _ in range(ROUNDS - 1)]
    return statistics.median(each[0] for each in found), max(each[1] for each in found)


def cell(*found: tuple[float, float]) -> str:
    return " / ".join(
        f"{1000 * seconds:.0f}" if error <= ERROR else f"({error:.0e})" for seconds, error in found
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "entropic.json")
    arguments = parser.parse_args(argv)
    one_thread()
    warnings.simplefilter("ignore")
    x, y = clouds()
    cost, near = cost_of(x, y), cost_of(1.01 * x, y)
    path = arguments.output
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    by_us(x, y, 1.0)  # imports are no part of the times
    for share in REGS:
        reg, name = share * float(cost.mean()), f"{share:g}"
        if name in runs:
            continue
        found = {"ours": [middle(partial(by_us, x, y, reg))]}
        for method in METHODS:
            found[method] = [middle(partial(by_pot, cost, reg, method, None))]
            if found[method][0][1] <= ERROR:
                *_, warm = by_pot(cost, reg, method, None)
                found[method] += [middle(partial(by_pot, near, reg, method, warm))]
        runs[name] = found
        print(name, found, flush=True)
    rows = [
        [name, *(cell(*each) for each in runs[name].values())] for name in map("{:g}".format, REGS)
    ]
    table = markdown_table(["reg / spread, ms", "ours", *METHODS], rows)
    content = {"machine": machine(packages=["pot"]), "runs": runs, "tables": {"ms": table}}
    write_json(path, content)
    print(table)


if __name__ == "__main__":
    main()
