"""The parameters of a group that have a gradient: plain ones, and equal constrained ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from stiefel_opt.manifold import Stiefel, manifold_of
from stiefel_opt.optim.readings import Group, reading
from stiefel_opt.optim.shards import Shards, shards_of
from stiefel_opt.optim.stack import Stack
from stiefel_opt.optim.state import StateNames

__all__ = ["Gathered", "gather"]


@dataclass
class Gathered:
    """What one step of one group works on; kept while the same parameters have gradients."""

    active: list[Tensor]
    tags: list[Any]
    stiefel: Any
    names: StateNames
    plain: list[Tensor] = field(default_factory=list)
    equals: list[tuple[Stiefel, list[Tensor], Shards | None]] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)  # one for each of ``equals``, once built

    def fits(self, active: list[Tensor], stiefel: Any, names: StateNames) -> bool:
        """Say whether this still describes the group."""
        return (
            len(active) == len(self.active)
            and all(map(operator.is_, active, self.active))
            and all(map(operator.is_, map(manifold_of, active), self.tags))
            and stiefel is self.stiefel
            and names == self.names
            and all(stack.intact() for stack in self.stacks)
        )


def gather(active: list[Tensor], group: Group, names: StateNames) -> Gathered:
    """Split the parameters of a group that have a gradient; ``names``: the state they have."""
    work = Gathered(active, list(map(manifold_of, active)), group["stiefel"], names)
    equals: dict[Any, tuple[Stiefel, list[Tensor], Shards | None]] = {}
    for parameter in active:
        manifold = reading(parameter, group)
        if manifold is None:
            work.plain.append(parameter)
            continue
        alone = id(parameter) if manifold.rows is not None else None
        layout = None
        if isinstance(parameter, DTensor):
            layout = (parameter.device_mesh, tuple(parameter.placements))
        key = (parameter.shape, parameter.dtype, parameter.device, manifold, alone, layout)
        if key not in equals:
            equals[key] = (manifold, [], shards_of(parameter, manifold))
        equals[key][1].append(parameter)
    work.equals = list(equals.values())
    return work
