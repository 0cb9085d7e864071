"""The pure rules that the tests walk through, and the state to start them from.

Every row of `optimizers.TABLE` that is no variant is here with the state that its class declares;
what stands below are further options.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from grids import METRICS, TRANSPORTS
from optimizers import CLIENTS, TABLE
from optimizers import RULES as NAMES
from torch import Tensor

import stiefel_opt as so
from stiefel_opt import functional
from stiefel_opt.numerics.geometry import random_point

SKEW, NORMAL = "momentum_skew", "momentum_normal"
UNPROJECTED = ("momentum_unprojected", "momentum_factor", "momentum_overlap")
SQUARES = ("exp_avg_sq_skew", "exp_avg_sq_normal")
# How often processes that share the rows of tall matrices talk in a step, of functions of no row.
SUMS: dict[str, int] = {}
SHAPES = [(9, 4), (7, 1), (40, 20), (5, 5), (6, 5), (1, 1)]


@dataclass(frozen=True)
class RuleCase:
    """A rule with one set of options, and the names of its state for tall matrices."""

    rule: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    keeps: tuple[str, ...] = ()

    @property
    def function(self) -> str:
        return getattr(self.rule, "func", self.rule).__name__

    def has(self, option: str) -> bool:
        """Whether the rule has an option of this name."""
        return option in inspect.signature(self.rule).parameters

    @property
    def most_sums(self) -> float:
        return SUMS.get(self.function, math.inf)

    @property
    def name(self) -> str:
        shown = (f"{key}={value}" for key, value in self.options.items() if key != "step")
        kept = ["unprojected"] if UNPROJECTED[0] in self.keeps else []
        kept += ["amsgrad"] if any(name.startswith("max_") for name in self.keeps) else []
        return ",".join([self.function, *kept, *shown])

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self.rule(*arguments, **{**self.options, **more})

    def state(
        self, point: Tensor, generator: torch.Generator, *, zero: bool = False
    ) -> dict[str, Tensor]:
        """The state after a few steps, drawn by chance, or that before the first."""
        return state_at(point, self.keeps, generator, zero=zero)


DECLARED: dict[str, so.optim.State] = {}  # by name, of every rule of the table


def declared_case(name: str) -> RuleCase:
    """The rule of a row of the table of optimizers, with its options and its state."""
    row = TABLE[name]
    optimizer = row.optimizer([so.ManifoldParameter(torch.eye(3, 2))], **row.options)
    (group,) = optimizer.param_groups
    rule, declared = optimizer.rule_for(group), optimizer.state_for(group)
    DECLARED.update({kind.name: kind for kind in declared})
    names = tuple(kind.name for kind in declared)
    function = partial(rule.func, *rule.args) if rule.args else rule.func
    return RuleCase(function, {**FIRST, **rule.keywords}, names)


def drawn(kind: so.optim.State, point: Tensor, make: Callable[..., Tensor]) -> Tensor:
    """A value of a state by its declaration, of the size that a few steps make."""
    k, n, m = point.shape
    value = make(*{"nm": (k, n, m), "mm": (k, m, m), "1": (k, 1, 1)}[kind.shape]) / 4
    if kind.symmetry == "normal":
        value = value - point @ (point.mH @ value)
    if kind.least >= 0:
        value = kind.least + value.square() + 0.01
    return kind.part_of(value)


def state_at(
    point: Tensor, names: tuple[str, ...], generator: torch.Generator, *, zero: bool = False
) -> dict[str, Tensor]:
    """Momenta that are skew, normal or symmetric as they should be."""
    k, n, m = point.shape
    make = partial(torch.randn, generator=generator, dtype=point.dtype)
    skew, base, factor = make(k, m, m) / 4, make(k, n, m) / 4, make(k, m, m) / (4 * m)
    skew = skew - skew.mH
    identity = torch.eye(m, dtype=point.dtype).repeat(k, 1, 1)
    factor = identity + factor @ factor.mH
    if zero:
        skew, base, factor = skew * 0, base * 0, identity
    if UNPROJECTED[1] not in names:
        factor = identity
    normal = base - point @ (point.mH @ base)
    least = 0.0 if zero else 0.01
    squares = skew.abs().square() + least, (normal.abs() + 10 * least).square()
    found = {
        SKEW: skew,
        NORMAL: normal,
        UNPROJECTED[0]: base,  # not normal: its part along X is the overlap
        UNPROJECTED[1]: factor,
        UNPROJECTED[2]: point.mH @ base @ factor,
        SQUARES[0]: squares[0],
        SQUARES[1]: squares[1],
        "max_" + SQUARES[0]: squares[0] * 1.5,
        "max_" + SQUARES[1]: squares[1] * 1.5,
        "exp_avg_sq_norm": squares[0].new_full((k, 1, 1), 50 * least),
        "max_exp_avg_sq_norm": squares[0].new_full((k, 1, 1), 60 * least),
    }
    for name in set(names) - found.keys():
        value = drawn(DECLARED[name], point, make)
        found[name] = DECLARED[name].fill_(value) if zero else value
    tall_only = () if n > m else (NORMAL, *UNPROJECTED, SQUARES[1], "max_" + SQUARES[1])
    return {name: found[name].clone() for name in names if name not in tall_only}


def largest(length: functional.Length | Tensor | float, count: int) -> Tensor:
    """The length of each step as a rule returns it."""
    if isinstance(length, functional.Length):
        return length.tangents(count)
    return torch.as_tensor(length).flatten().expand(count)


def tensors(found: Any) -> dict[str, Tensor]:
    """What a rule returns, by name; of the length the number of each matrix."""
    new_X, new, length = found
    return {"X": new_X, **new, "length": largest(length, new_X.size(0))}


PLAIN, MOMENTUM, FIRST = (), (SKEW, NORMAL), {"step": 3.0}
ADAM = (*MOMENTUM, *SQUARES)
AMSGRAD = (*ADAM, *("max_" + name for name in SQUARES))

SGD = [
    *(RuleCase(functional.sgd, {"metric": metric}) for metric in ("canonical", "euclidean", 0.3)),
    *(
        RuleCase(functional.sgd, {"transport": transport, "metric": metric, **more}, keeps)
        for metric in METRICS
        for transport, keeps, more in [
            ("isometric", (SKEW, *UNPROJECTED), {}),
            ("projected", (SKEW, UNPROJECTED[0], UNPROJECTED[2]), {"momentum": 0.5}),
            *((transport, MOMENTUM, {"nesterov": True}) for transport in TRANSPORTS),
            *((transport, MOMENTUM, {}) for transport in TRANSPORTS),
        ]
    ),
]
ADAMS = [
    RuleCase(functional.adam, {**FIRST, "transport": transport, "metric": metric, **more}, keeps)
    for metric in METRICS
    for transport, keeps, more in [
        *((transport, ADAM, {}) for transport in TRANSPORTS),
        ("isometric", AMSGRAD, {"betas": (0.5, 0.7)}),
        ("projected", AMSGRAD, {"eps": 0.0}),
        ("isometric", ADAM, {"step": 1.0, "eps": 0.1}),
    ]
]
VARIANTS = [name for client in CLIENTS for name in client.VARIANTS_WITH_RULES]
OF_CLIENTS = [RuleCase(*row) for client in CLIENTS for row in client.RULES]
RULES = [*map(declared_case, (*NAMES, *VARIANTS)), *SGD, *ADAMS, *OF_CLIENTS]
for client in CLIENTS:
    SUMS |= client.SUMS
SUMS |= {declared_case(name).function: row.sums for name, row in TABLE.items() if row.sums}


def problem(
    case: RuleCase, shape: tuple[int, int], generator: torch.Generator, k: int = 2
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """A point, a gradient and a state in float64."""
    point = random_point(k, *shape, generator=generator, dtype=torch.float64)
    grad = torch.randn(point.shape, generator=generator, dtype=point.dtype)
    return point, grad, case.state(point, generator)


def by_columns(tensor: Tensor) -> Tensor:
    """The same numbers in the memory of a wide parameter."""
    return tensor.mT.contiguous().mT
