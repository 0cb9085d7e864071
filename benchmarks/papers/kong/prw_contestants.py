"""Projection-robust Wasserstein distances: the pairs, and who maximises how.

Everybody is scored alike: by the objective of the projection it ends with, under a plan converged
to 1e-8. What a rival reports by itself is not used: its plans are far from converged.
"""

from __future__ import annotations

import importlib
import json
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
from benchmarks.common.harness import PRINTED, RESULTS

Array = np.ndarray
ITERATIONS = 50
TITLES = {"mnist": "digits", "shakespeare": "eight plays"}
EIGHT = {"H5", "Ham", "JC", "MV", "Oth", "Rom", "Lr", "Mac"}  # the plays of Lin et al. (2020)

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


def compared_pairs(name: str, folder: Path) -> list[Pair]:
    """All pairs of digits; of the plays those of the eight that others compare."""
    pairs = load_pairs(name, folder)
    return [p for p in pairs if name == "mnist" or set(p.name.split("-")) <= EIGHT]


def references(name: str) -> dict[str, float]:
    """The best objective that `prw` knows, by pair."""
    found = json.loads((RESULTS / "prw.json").read_text())["sets"][name]
    return dict(zip(found["pairs"].split(), map(float, found["reference"].split()), strict=True))


# Rates for projection-robust Wasserstein distances by Kong, Wang & Tao (ICLR 2023), table 3. POT
# has none for these data: those of the code of Huang, Ma & Lai (2021) for digits, the rate of RGAS
# for plays. Momentum and beta are the published ones.
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
        "Algorithm 1": (so.PublishedSGD, {"momentum": 0.5}),
        "StiefelAdam": (PRINTED, {}),
        "Algorithm 2": (so.PublishedAdam, {}),
    }
    build, options = rules[rule]
    return partial(build, lr=lr, **options)


def pot_objective(pair: Pair, tau: float, iterations: int, start: Array) -> float:
    """What POT's own solver reaches without its early stop; NaN where it fails."""
    projection = pot_run(pair, tau, iterations, start)
    return float("nan") if projection is None else pair.objective(projection)


def pot_run(pair: Pair, tau: float, iterations: int, start: Array) -> Array | None:
    """The projection at which POT's own solver ends, without its early stop."""
    reduction = importlib.import_module("ot.dr")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, projection = reduction.projection_robust_wasserstein(
                pair.x, pair.y, pair.a, pair.b, tau=tau, U0=start, reg=pair.reg, k=2,
                stopThr=0.0, maxiter=iterations,
            )  # fmt: skip
    except np.linalg.LinAlgError:  # its QR refuses what overflowed
        return None
    return np.asarray(projection)
