"""Contestants of the benchmark of projection-robust Wasserstein: data, rules, how each is run.

Everybody starts at the same random projection, but for two rows that say so. Everybody is scored
alike: by the objective of the projection it ends with, under a plan converged to 1e-8. What a rival
reports by itself is not used: its plans are far from converged.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stiefel_opt as so
from benchmarks.common.harness import PRINTED

Array = np.ndarray
ITERATIONS = 50

# Scale of the plays: with it the mean squared norm of a word is one, that of the published vectors.
PLAYS_SCALE = 9.03907924297


@dataclass(frozen=True)
class Pair:
    """Two clouds with weights, the regularization, and the initialisation that all share."""

    name: str
    x: Array
    y: Array
    a: Array
    b: Array
    reg: float

    def start(self, number: int = 0, k: int = 2) -> Array:
        """Random initialisations; the same for all methods."""
        seed = [zlib.crc32(self.name.encode()), number]
        gaussian = np.random.default_rng(seed).standard_normal((self.x.shape[1], k))
        point, triangular = np.linalg.qr(gaussian)
        return point * np.sign(np.diag(triangular))

    def solve(self, **options: Any) -> so.ot.PRWResult:
        return so.ot.projection_robust_wasserstein(
            self.x, self.y, self.a, self.b, reg=self.reg, **options
        )

    def objective(self, projection: Array) -> float:
        """What the projection is worth; NaN if it is none."""
        gram = projection.T @ projection
        if not np.abs(gram - np.eye(gram.shape[0])).max() < 1e-4:  # also true for NaN
            return float("nan")
        return self.solve(init=projection, max_iter=0).objective


class Clock:
    """Seconds on the wall and of the processor: on a shared machine only the second are ours."""

    def __init__(self) -> None:
        self.began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]


@dataclass
class Run:
    """One method on one pair."""

    objective: float
    seconds: float
    processor_seconds: float
    converged: bool = True


def load_pairs(name: str, folder: Path) -> list[Pair]:
    """All 45 pairs of digits, or all 66 pairs of plays."""
    if name == "mnist":
        with np.load(folder / "mnist_features.npz") as file:
            clouds = {str(digit): file[f"digit_{digit}"].astype(float) for digit in range(10)}
        weights = {key: np.full(len(cloud), 1 / len(cloud)) for key, cloud in clouds.items()}
        reg = 8.0
    else:
        with np.load(folder / "shakespeare_w2v.npz") as file:
            names = sorted(key[:-2] for key in file.files if key.endswith("_x"))
            clouds = {key: file[f"{key}_x"].astype(float) / PLAYS_SCALE for key in names}
            weights = {key: file[f"{key}_w"].astype(float) for key in names}
        weights = {key: weight / weight.sum() for key, weight in weights.items()}
        reg = 0.2
    return [
        Pair(f"{left}-{right}", clouds[left], clouds[right], weights[left], weights[right], reg)
        for left, right in combinations(clouds, 2)
    ]


# ---- settings ----

# Rates for projection-robust Wasserstein distances by Kong, Wang & Tao (ICLR 2023), table 3. POT
# has none for these data: those of the code of Huang, Ma & Lai (2021) for digits, the rate of RGAS
# for plays. `tune` tries multiples of them; momentum and beta are the published ones.
RULES = ("StiefelSGD", "RGAS", "RAGAS", "CayleySGD", "Momentumless")
RATES = {
    "mnist": {
        "StiefelSGD": 1e-3, "RGAS": 8e-4, "RAGAS": 0.01, "CayleySGD": 7e-4, "Momentumless": 6e-4,
        "POT": 4e-3,
    },
    "shakespeare": {
        "StiefelSGD": 2.0, "RGAS": 2.0, "RAGAS": 0.08, "CayleySGD": 15.0, "Momentumless": 2.0,
        "POT": 0.4,
    },
}  # fmt: skip
BETA = {"mnist": 0.8, "shakespeare": 0.9}
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TUNING_PAIRS = {
    "mnist": ("0-1", "2-3", "4-9", "6-7"),
    "shakespeare": ("H5-Ham", "H5-JC", "Oth-Rom"),
}


def factory(rule: str, lr: float, dataset: str) -> Callable[[list[torch.Tensor]], Any]:
    """The optimizer of our own solver, with a fixed learning rate."""
    released = {"momentum": 0.0}  # it stays zero there
    rules: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "RGAS": (so.ot.RGAS, {}),
        "RAGAS": (so.ot.RAGAS, {"beta": BETA[dataset]}),
        "CayleySGD": (so.CayleySGD, {"momentum": 0.5}),
        "CayleySGD as released": (so.CayleySGD, released),
        "Momentumless": (so.ProjectedRGD, {"metric": "canonical", "retraction": "cayley"}),
        "StiefelSGD": (so.StiefelSGD, {"momentum": 0.5}),
        "Algorithm 1": (so.StiefelSGD, {"momentum": 0.5, "transport": "published"}),
        "StiefelAdam": (PRINTED, {}),
        "Algorithm 2": (so.StiefelAdam, {"radius": 1.0, "transport": "published"}),
    }
    build, options = rules[rule]
    return partial(build, lr=lr, **options)


# ---- running ----


def run_ours(pair: Pair, **options: Any) -> Run:
    """Our solver; the time is that of the whole call."""
    clock = Clock()
    result = pair.solve(**options)
    seconds = clock.read()
    return Run(result.objective, *seconds, result.converged)


def run_fixed(pair: Pair, rule: str, lr: float, dataset: str, iterations: int = ITERATIONS) -> Run:
    """Our solver with a fixed learning rate, for as many iterations as everybody has."""
    optimizer = factory(rule, lr, dataset)
    return run_ours(pair, init=pair.start(), optimizer=optimizer, max_iter=iterations, tol=0.0)


def pot_projection(pair: Pair, tau: float, iterations: int, start: Array) -> Array:
    reduction = importlib.import_module("ot.dr")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, projection = reduction.projection_robust_wasserstein(
            pair.x, pair.y, pair.a, pair.b, tau=tau, U0=start, reg=pair.reg, k=2,
            stopThr=0.0, maxiter=iterations,
        )  # fmt: skip
    return projection


def run_pot(
    pair: Pair, tau: float, iterations: int = ITERATIONS, start: Array | None = None
) -> Run:
    """POT's own solver, without its early stop."""
    start = pair.start() if start is None else start
    clock = Clock()
    try:
        projection = pot_projection(pair, tau, iterations, start)
    except np.linalg.LinAlgError:  # its QR refuses what overflowed
        projection = np.full((pair.x.shape[1], 2), np.nan)
    seconds = clock.read()
    objective = pair.objective(projection)
    return Run(objective, *seconds, bool(np.isfinite(objective)))


def run_authors(folder: Path, pair: Pair, rule: str, lr: float, dataset: str) -> Run:
    """The code released with Lin et al. (2020), from our start, never stopping early.

    A run counts as failed if its plan has lost its mass or its projection is no longer orthonormal.
    """
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    solver = importlib.import_module("Optimization.riemann_adap").RiemmanAdaptive(
        reg=pair.reg, step_size_0=None, max_iter=ITERATIONS, threshold=1e-300,
        max_iter_sinkhorn=30, threshold_sinkhorn=1e-3, use_gpu=False,
    )  # fmt: skip
    solver.U = pair.start()
    solver.Omega = solver.U @ solver.U.T
    method = solver.run_riemanngrad if rule == "RGAS" else solver.run_riemannadap
    clock = Clock()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method(pair.a, pair.b, pair.x, pair.y, 2, lr, BETA[dataset])
        except np.linalg.LinAlgError:
            solver.pi = np.full((1, 1), np.nan)
    seconds = clock.read()
    sound = bool(abs(solver.pi.sum() - 1) < 0.5)  # false for NaN
    objective = pair.objective(solver.U) if sound else float("nan")
    return Run(objective, *seconds, bool(np.isfinite(objective)))
