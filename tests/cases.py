"""The table of cases that the tests of the momentum optimizers walk through.

A `Reading` is a parameter shape with its tag and, written out by hand, the tall matrices in it.
An `OptimizerCase` is one rule with one set of options.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from grids import METRICS, TRANSPORTS
from grids import in_turn as in_turn
from grids import mixed as mixed
from grids import pairwise as pairwise
from numpy.typing import NDArray
from optimizers import CLIENTS, PUBLISHED, TABLE, Rule
from reference import polar_factor

import stiefel_opt as so

Array = NDArray[np.float64]


def _tall(tensor: Array) -> Array:
    return tensor


def _wide(tensor: Array) -> Array:
    return tensor.swapaxes(-1, -2)


@dataclass(frozen=True)
class Reading:
    """A parameter's shape and tag; `matrices` gives a view (..., n, m) of the constrained part."""

    name: str
    shape: tuple[int, ...]
    matrices: Callable[[Array], Array] = _tall
    manifold: dict[str, Any] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        return float(self.manifold.get("scale", 1.0))

    def start(self, rng: np.random.Generator) -> Array:
        """A tensor whose constrained part lies on the manifold."""
        return self.on_the_manifold(rng.standard_normal(self.shape))

    def on_the_manifold(self, tensor: Array) -> Array:
        """Put the constrained part of a tensor there."""
        matrices = self.matrices(tensor)
        for index in np.ndindex(matrices.shape[:-2]):
            matrices[index] = self.scale * polar_factor(matrices[index])
        return tensor

    def parameter(self, value: Array, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
        manifold = so.Stiefel(**self.manifold)
        return so.ManifoldParameter(
            torch.tensor(value, dtype=dtype), manifold=manifold, project=False
        )


READINGS = {
    reading.name: reading
    for reading in (
        Reading("tall", (9, 4)),
        Reading("nearly-square", (5, 4)),
        Reading("vector", (7, 1)),
        Reading("wide", (3, 8), _wide),
        Reading("square", (4, 4)),
        Reading("batch-tall", (2, 3, 6, 2)),
        Reading("batch-wide", (2, 3, 7), _wide),
        Reading("batch-square", (2, 3, 3)),
        Reading("heads-wide", (6, 9), lambda w: _wide(w.reshape(2, 3, 9)), {"heads": 2}),
        Reading("heads-tall", (16, 3), lambda w: w.reshape(2, 8, 3), {"heads": 2}),
        Reading(
            "transposed",
            (9, 6),
            lambda w: w.reshape(9, 2, 3).swapaxes(0, 1),
            {"heads": 2, "transposed": True},
        ),
        Reading("conv", (4, 2, 3, 2), lambda w: _wide(w.reshape(4, 12)), {"flatten": True}),
        Reading(
            "batch-inside",
            (5, 2, 3),
            lambda w: w.swapaxes(0, 1),
            {"row_dims": 0, "column_dims": 2},
        ),
        Reading("scaled", (6, 3), _tall, {"scale": 2.5}),
        Reading(
            "some-rows",
            (9, 7),
            lambda w: _wide(w[2:8].reshape(2, 3, 7)),
            {"rows": (2, 8), "heads": 2},
        ),
    )
}


@dataclass(frozen=True)
class OptimizerCase:
    """One rule with its options; `lr` is mild enough that rounding is not amplified."""

    name: str
    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def lr(self) -> float:
        if "lr" in self.options:
            return float(self.options["lr"])
        return self.row.mild_lr

    @property
    def row(self) -> Rule:
        return (TABLE | PUBLISHED)[self.algorithm]

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return self.row.optimizer(params, **{"lr": self.lr, **self.options})

    def reference(self, point: Array, scale: float = 1.0) -> Any:
        # Weight decay has no tangent part; of Adam's radius it takes a part if it is decoupled.
        dropped = ("lr", "weight_decay", "decoupled_weight_decay")
        options = {key: value for key, value in self.options.items() if key not in dropped}
        if self.options.get("decoupled_weight_decay"):
            options["decay"] = self.lr * self.options["weight_decay"]
        row = self.row
        is_angle = any(self.options.get(name) == value for name, value in row.angle.items())
        is_angle |= row.lr_is_angle
        lr = self.lr if is_angle else self.lr / scale
        return row.reference(point, lr=lr, **options)


def of_clients(name: str) -> list[OptimizerCase]:
    """The cases that clients bring for one of the lists below."""
    return [OptimizerCase(*row) for client in CLIENTS for row in getattr(client, name)]


OPTION_GRID = [
    OptimizerCase(
        f"{algorithm}-{metric}-{transport}",
        algorithm,
        {"metric": metric, "transport": transport},
    )
    for algorithm, metric, transport in itertools.product(("sgd", "adam"), METRICS, TRANSPORTS)
] + of_clients("OPTION_GRID")

PROJECTED = {"transport": "projected"}

READING_CASES = [
    *(
        OptimizerCase(name, name)
        for name, rule in TABLE.items()
        if rule.reference is not None and not rule.variant
    ),
    OptimizerCase("sgd-projected", "sgd", {"metric": 0.3, **PROJECTED}),
    OptimizerCase("adam-euclidean", "adam", {"metric": "euclidean"}),
    OptimizerCase("adam-decoupled", "adam", {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    OptimizerCase("adam-projected", "adam", PROJECTED),
    OptimizerCase("adam-not-nesterov", "adam", {"nesterov": False, "metric": 0.3}),
    *of_clients("READING_CASES"),
]

# Options of plain parameters, and of rows that a reading leaves plain, which torch has, too.
PLAIN_SGD: list[dict[str, Any]] = [
    {"momentum": 0.0},
    {"momentum": 0.0, "dampening": 0.4, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "dampening": 0.4},
    {"momentum": 0.9, "maximize": True, "foreach": True},
    {"momentum": 0.9, "foreach": False, "weight_decay": 0.1},
    {"momentum": 0.9, "fused": True, "nesterov": True},
    {"momentum": 0.9, "lr": torch.tensor(0.02), "foreach": False},
]
PLAIN_ADAM: list[dict[str, Any]] = [
    {},
    {"betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.1},
    {"amsgrad": True},
    {"amsgrad": True, "maximize": True, "foreach": False},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"maximize": True},
    {"foreach": True, "weight_decay": 0.1},
    {"fused": True, "amsgrad": True},
    {"lr": torch.tensor(0.02), "foreach": False},
]
PLAIN_ADAMW: list[dict[str, Any]] = [
    {},
    {"lr": 0.05, "weight_decay": 0.3},
    {"betas": (0.5, 0.7), "eps": 1e-4, "amsgrad": True, "maximize": True},
    {"weight_decay": 0.0, "foreach": False},
    {"fused": True},
]
PLAIN: list[tuple[Any, Any, dict[str, Any]]] = [
    *((so.StiefelSGD, torch.optim.SGD, options) for options in PLAIN_SGD),
    *((so.StiefelAdam, torch.optim.Adam, options) for options in PLAIN_ADAM),
    *((so.StiefelAdamW, torch.optim.AdamW, options) for options in PLAIN_ADAMW),
    *(
        (so.StiefelAdam, torch.optim.AdamW, {"weight_decay": 0.01, **options})
        for options in PLAIN_ADAMW[:1]
    ),
    *(row for client in CLIENTS for row in client.PLAIN),
]

VARIANTS = [
    OptimizerCase("sgd-momentumless", "sgd", {"momentum": 0.0}),
    OptimizerCase("sgd-momentumless-dampened", "sgd", {"momentum": 0.0, "dampening": 0.4}),
    OptimizerCase("sgd-nesterov", "sgd", {"nesterov": True}),
    OptimizerCase("sgd-nesterov-euclidean", "sgd", {"nesterov": True, "metric": "euclidean"}),
    OptimizerCase("sgd-nesterov-projected", "sgd", {"nesterov": True, **PROJECTED}),
    OptimizerCase(
        "sgd-nesterov-projected-metric", "sgd", {"nesterov": True, "metric": 0.3, **PROJECTED}
    ),
    OptimizerCase("sgd-momentumless-projected", "sgd", {"momentum": 0.0, **PROJECTED}),
    OptimizerCase("sgd-dampened-projected", "sgd", {"dampening": 0.4, "metric": -1.0, **PROJECTED}),
    OptimizerCase("sgd-dampened", "sgd", {"dampening": 0.4}),
    OptimizerCase("sgd-maximize", "sgd", {"maximize": True}),
    OptimizerCase("sgd-tensor-lr", "sgd", {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    OptimizerCase("sgd-weight-decay", "sgd", {"weight_decay": 0.3}),
    OptimizerCase("adam-amsgrad", "adam", {"amsgrad": True, "betas": (0.9, 0.8)}),
    OptimizerCase(
        "adam-amsgrad-metric", "adam", {"amsgrad": True, "betas": (0.9, 0.8), "metric": 0.3}
    ),
    OptimizerCase(
        "adam-amsgrad-projected",
        "adam",
        {"amsgrad": True, "betas": (0.9, 0.8), "metric": 0.3, **PROJECTED},
    ),
    OptimizerCase("adam-maximize", "adam", {"maximize": True}),
    OptimizerCase("adam-tensor-lr", "adam", {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    OptimizerCase("adam-weight-decay", "adam", {"weight_decay": 0.3}),
    OptimizerCase("adam-decoupled", "adam", {"weight_decay": 0.3, "decoupled_weight_decay": True}),
    OptimizerCase("adam-as-printed", "adam", {"radius": 1.0, "nesterov": False}),
    OptimizerCase("adam-large-radius", "adam", {"radius": 3, "metric": 0.3}),
    OptimizerCase("adam-angle", "adam", {"radius": "angle", "metric": 0.3}),
    OptimizerCase("adam-virtual", "adam", {"radius": "virtual", **PROJECTED}),
    *(
        OptimizerCase(
            f"adam-not-nesterov-{metric}-{transport}{'-amsgrad' * amsgrad}",
            "adam",
            {"nesterov": False, "metric": metric, "transport": transport, "amsgrad": amsgrad},
        )
        for metric, transport, amsgrad in pairwise(METRICS, TRANSPORTS, (False, True))
    ),
    OptimizerCase("adam-no-first-moment", "adam", {"betas": (0.0, 0.99), "metric": "euclidean"}),
    OptimizerCase("adam-short-memory", "adam", {"betas": (0.5, 0.7), "metric": 0.3}),
    OptimizerCase("adam-large-eps", "adam", {"eps": 0.1, "metric": 0.3}),
    OptimizerCase("adam-tiny-eps", "adam", {"eps": 1e-30, "metric": 0.3}),
    OptimizerCase("adam-zero-eps", "adam", {"eps": 0.0, "metric": "euclidean"}),
    *of_clients("VARIANTS"),
]
