"""``torch.compile``: the constrained part of a step is one operation of the graph.

Within it the step runs as it does without a compiler, with the same bits and the same safety. What
a compiler could fuse there is little beside the products of matrices, and what it must not know,
how long a step is, decides how many of those there are.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from stiefel_opt.optim.base import StiefelOptimizer
    from stiefel_opt.optim.constrained import Constrained

__all__ = ["in_graph", "remember"]

_OPTIMIZERS: weakref.WeakValueDictionary[int, StiefelOptimizer] = weakref.WeakValueDictionary()

_LIBRARY: Any = torch.library.Library("stiefel_opt", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "step(Tensor(a!)[] parameters, Tensor(b!)[] state, Tensor[] grads, int[] places, Tensor? lr, "
    "int handle, int group, int number) -> ()"
)


def remember(optimizer: StiefelOptimizer) -> int:
    """Return the number under which the operation finds an optimizer."""
    handle = max(_OPTIMIZERS.keys(), default=0) + 1
    _OPTIMIZERS[handle] = optimizer
    return handle


def in_graph(
    handle: int, group: int, number: int, constrained: Constrained, lr: float | Tensor
) -> None:
    """Put the step of some constrained parameters into the graph that is being traced."""
    if constrained.is_shared:  # collectives of a step are not for a graph
        torch._dynamo.graph_break()
    parameters = [owner.parameter for owner in constrained.owners]
    places = [place for place, p in enumerate(parameters) if p.grad is not None]
    if places:
        grads: list[Any] = [parameters[place].grad for place in places]
        rate = lr if isinstance(lr, Tensor) else None
        state = constrained.tensors()
        torch.ops.stiefel_opt.step(parameters, state, grads, places, rate, handle, group, number)


@torch.no_grad()
def _step(
    parameters: list[Tensor],
    state: list[Tensor],
    grads: list[Tensor],
    places: list[int],
    lr: Tensor | None,
    handle: int,
    group: int,
    number: int,
) -> None:
    optimizer = _OPTIMIZERS[handle]
    constrained = optimizer.constrained_of(group)[number]
    real = [owner.parameter.detach() for owner in constrained.owners] + constrained.tensors()
    given = [*parameters, *state]
    copies = [
        (own, other)
        for own, other in zip(real, given, strict=False)
        if own.data_ptr() != other.data_ptr()
    ]
    for own, copy in copies:  # a graph that keeps the old values hands out copies to write to
        own.copy_(copy)
    by_place: dict[int, Tensor] = dict(zip(places, grads, strict=True))
    everyone = [by_place.get(place) for place in range(len(parameters))]
    optimizer.step_in_graph(group, number, everyone, lr)
    for own, copy in copies:
        copy.copy_(own)


def _meta(*_: Any) -> None:
    """Nothing comes back: what changes is declared."""


_LIBRARY.impl("step", _step, "CompositeExplicitAutograd")
torch.library.register_fake("stiefel_opt::step", _meta, lib=_LIBRARY)
