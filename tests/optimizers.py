"""The table of optimizers: a class with options, and what the tests may expect of it.

A new optimizer is a row here. Tests walk the table and ask a row for its properties, never for its
name: what differs is declared. A client of the core brings its rows: `methods/rows_of_methods.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reference import AdamReference, SGDReference

import stiefel_opt as so

Adaptive = (torch.optim.Adam, torch.optim.AdamW)
FLOWS = {"metric": -1.0, "transport": "projected"}


@dataclass(frozen=True)
class Rule:
    """An optimizer with ``options``; a ``variant`` only has other options than a row above it.

    ``plain`` is torch's optimizer that moves plain parameters alike, ``plain_options`` its options;
    for a rule that torch lacks it is a ``torch.optim.Optimizer`` of the tests, a few slow lines.
    ``reference`` is the slow loop in float64, if it has one, and ``own`` are options that torch
    does not have. In float64, ``rounding`` is the difference that other matrices in a batch may
    make, and ``unread`` that of a machine on which nothing is read.
    """

    optimizer: Any
    options: dict[str, Any]
    plain: Any = torch.optim.SGD
    plain_options: dict[str, Any] = field(default_factory=dict)
    reference: Any = None
    own: dict[str, Any] = field(default_factory=dict)
    variant: bool = False
    momentum: float = 0.9  # by default
    state: str = "momentum_skew"  # that every block has
    searches: bool = False  # for its direction, in every step: many calls, equal to a tolerance
    sums: int | None = None  # over shared rows in a step without corrections, at most; None: any
    mild_lr: float = 0.1  # that does not amplify rounding
    angle: dict[str, Any] = field(default_factory=dict)  # any of them makes lr an angle
    lr_is_angle: bool = False  # always
    follows_slope: bool = False  # momentum and length of a step are chosen
    remembers: bool = False  # keeps a momentum of 0, too

    @property
    def rounding(self) -> float:
        return 1e-5 if self.searches else 1e-10

    @property
    def unread(self) -> float:
        return 1e-2 if self.searches else 1e-10

    @property
    def has_small_state(self) -> bool:
        """State of m x m, whose shape shows how a parameter is read."""
        return self.state == "momentum_skew"

    @property
    def of_torch(self) -> bool:
        """Plain parameters follow torch, with its options, its kernels and its checkpoints."""
        return str(self.plain.__module__).startswith("torch.optim")

    @property
    def may_forget(self) -> bool:
        """It has a momentum, which is not kept where it is 0."""
        return "momentum" in inspect.signature(self.optimizer).parameters and not self.remembers

    @property
    def proportional(self) -> bool:
        """Steps are as long as their gradients."""
        return self.plain is torch.optim.SGD

    @property
    def decay_is_decoupled(self) -> bool:
        """Weight decay is decoupled always, as by torch's AdamW."""
        return self.plain is torch.optim.AdamW

    @property
    def adaptive(self) -> bool:
        """Plain parameters have second moments, and with them betas and eps."""
        return self.plain in Adaptive


SGD = {"momentum": 0.9}
TABLE = {
    "sgd": Rule(
        so.StiefelSGD,
        {"weight_decay": 0.1},
        plain_options=SGD,
        reference=SGDReference,
        own=FLOWS,
        sums=2,
    ),
    "sgd-nesterov": Rule(
        so.StiefelSGD,
        {"nesterov": True, "metric": "euclidean"},
        plain_options={**SGD, "nesterov": True},
        own=FLOWS,
        variant=True,
    ),
    "adam-printed": Rule(
        so.StiefelAdam,
        {"radius": 1.0, "nesterov": False},
        plain=torch.optim.Adam,
        own=FLOWS,
        variant=True,
        sums=3,
    ),
    "adam": Rule(
        so.StiefelAdam,
        {},
        plain=torch.optim.Adam,
        reference=AdamReference,
        own=FLOWS,
        sums=3,
        angle={"radius": "angle"},
    ),
    "adamw": Rule(so.StiefelAdamW, {}, plain=torch.optim.AdamW, own=FLOWS, variant=True),
    "adam-amsgrad": Rule(
        so.StiefelAdam,
        {"amsgrad": True, "metric": 0.3},
        plain=torch.optim.Adam,
        plain_options={"amsgrad": True},
        own=FLOWS,
        variant=True,
    ),
}


def rows_of_clients() -> list[Any]:
    """The modules `rows_of_*` beside the tests of clients whose package is there."""
    paths = sorted(Path(__file__).parent.glob("*/rows_of_*.py"))
    rooms = {path.stem: f"stiefel_opt.{path.parent.name}" for path in paths}
    present = [name for name, room in rooms.items() if importlib.util.find_spec(room)]
    return [importlib.import_module(name) for name in present]


OF_CORE = frozenset(TABLE)
CLIENTS = rows_of_clients()
PUBLISHED: dict[str, Rule] = {}  # beside the table of the generic tests: they blow up early
BY_CLOSURE: dict[str, Any] = {"sgd": lambda params: so.StiefelSGD(params, lr=0.1)}
for client in CLIENTS:
    BY_CLOSURE |= client.BY_CLOSURE
    TABLE.update(client.TABLE)
    PUBLISHED.update(client.BESIDE)
OPTIMIZERS = {name: (rule.optimizer, {"lr": 0.05, **rule.options}) for name, rule in TABLE.items()}
OF_CLASS = {rule.optimizer: rule for rule in reversed(TABLE.values())}  # the first row of each
RULES = tuple(name for name, rule in TABLE.items() if not rule.variant)
# Where the rule hardly matters: any; one for each plain rule; those that a long gradient throws.
ANY = RULES[0]
OF_EACH_KIND = tuple({TABLE[name].plain: name for name in reversed(RULES)}.values())[::-1]
PROPORTIONAL = tuple(name for name in RULES if TABLE[name].proportional)
