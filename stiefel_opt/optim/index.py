"""Which parameters of a group are plain, which are constrained, and which of those have state."""

from __future__ import annotations

import itertools
import operator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from stiefel_opt.distributed import is_sharded
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.blocks import Weight
from stiefel_opt.optim.checks import (
    check_rows_may_be_shared,
    name_of,
    reading,
    refuse_gradient,
    refuse_sparse,
)
from stiefel_opt.optim.commit import Correction, Rule
from stiefel_opt.optim.group import TALLIES, WeightGroup
from stiefel_opt.optim.sharding import Shards, shards_of
from stiefel_opt.optim.state import State, StateDict, complete_state
from stiefel_opt.optim.torch_rules import Group


class Declaration(Protocol):
    """The parts of an optimizer that an index asks for."""

    rule: str
    sums_over_rows: bool
    defaults: Group
    param_groups: list[Group]
    state: Any
    tallies: dict[Tensor, StateDict]
    readings: dict[Tensor, Stiefel | None]

    def state_for(self, group: Group) -> tuple[State, ...]: ...
    def rule_for(self, group: Group) -> Rule: ...
    def correction_for(self, group: Group) -> Correction: ...
    def adapt(self, weight: Weight, declared: tuple[State, ...]) -> None: ...


class GroupIndex:
    """Which parameters of a group are plain, and which are constrained and have state.

    Lists hold places in the group: of plain ones, and of those ``waiting`` for a first gradient.
    """

    def __init__(self, optimizer: Declaration, group: Group) -> None:
        self._params = list(group["params"])
        self._tags = tags_of(self._params)
        self._stiefel = group["stiefel"]
        self._bind(optimizer, group)
        self.readings = [reading(parameter, group) for parameter in self._params]
        self.plain = [i for i, manifold in enumerate(self.readings) if manifold is None]
        self.waiting = [i for i, manifold in enumerate(self.readings) if manifold is not None]
        self.weight_groups: list[WeightGroup] = []

    def _bind(self, optimizer: Declaration, group: Group) -> None:
        self._names = [name for name in optimizer.defaults if name != "lr"]
        self._options = [group[name] for name in self._names]
        self.declared = optimizer.state_for(group)
        self.rule = optimizer.rule_for(group)
        self.correction = optimizer.correction_for(group)

    def describes(self, optimizer: Declaration, group: Group) -> bool:
        """Say whether this still describes the group, and the state that its options ask for."""
        if [group[name] for name in self._names] != self._options:
            declared = self.declared
            self._bind(optimizer, group)
            if declared != self.declared:
                return False
        params = group["params"]
        return (
            len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and all(map(operator.is_, tags_of(params), self._tags))
            and group["stiefel"] is self._stiefel
        )

    def plain_with_gradient(
        self, group: Group, groups: list[Group], *, sparse: bool
    ) -> list[Tensor]:
        """Return the plain parameters that move; raise for gradients that cannot be used."""
        params, plain = group["params"], []
        for place in self.plain:
            grad = params[place].grad
            if grad is None:
                continue
            if grad.is_sparse and not sparse:
                refuse_sparse(params[place], groups)
            if grad.shape != params[place].shape:
                refuse_gradient(params[place], groups)
            plain.append(params[place])
        return plain

    def admit(self, optimizer: Declaration, group: Group, late: list[int]) -> None:
        """Stack the state of these parameters together with that of the ones before."""
        waiting = set(self.waiting).difference(late)
        layouts: dict[Any, Shards | None] = {}
        weights: dict[torch.device, list[Weight]] = {}
        for place, manifold in enumerate(self.readings):
            if manifold is None or place in waiting:
                continue
            parameter, key = group["params"][place], None
            if is_sharded(parameter):
                key = parameter.shape, manifold, parameter.device_mesh, parameter.placements
            if key not in layouts:
                layouts[key] = shards_of(parameter, manifold)
            called = partial(name_of, parameter, optimizer.param_groups)
            if not optimizer.sums_over_rows:
                check_rows_may_be_shared(layouts[key], optimizer.rule, called)
            forget_other(optimizer, parameter, manifold)
            state: StateDict = optimizer.state[parameter]
            together = weights.setdefault(parameter.device, [])
            weight = Weight(parameter, manifold, state, layouts[key], len(together))
            optimizer.adapt(weight, self.declared)
            complete_state(state, self.declared, parameter, manifold, called, layouts[key])
            together.append(weight)
            none = torch.zeros((), dtype=torch.int64, device=parameter.device)
            tally = optimizer.tallies.setdefault(parameter, dict.fromkeys(TALLIES, none))
            tally.update({name: count.to(parameter.device) for name, count in tally.items()})
        self.weight_groups = [
            WeightGroup(each, [optimizer.tallies[w.parameter] for w in each], self.declared)
            for each in weights.values()
        ]
        self.waiting = sorted(waiting)


def forget_other(optimizer: Declaration, parameter: Tensor, manifold: Stiefel | None) -> None:
    """Drop state that was made by another reading, or as that of a plain parameter; None: is one.

    Their names do not tell them apart: a rule may call both alike.
    """
    if optimizer.readings.setdefault(parameter, manifold) != manifold:
        optimizer.state.pop(parameter, None)
        optimizer.readings[parameter] = manifold


def tags_of(parameters: list[Tensor]) -> list[Any]:
    """Return the attribute ``manifold`` of each parameter, or None, whatever it is."""
    return list(map(getattr, parameters, itertools.repeat("manifold"), itertools.repeat(None)))
