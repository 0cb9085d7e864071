"""``torch.compile``: the constrained part of a step is one operation of the graph.

Within it the step runs as it does without a compiler, with the same bits and the same safety. What
a compiler could fuse there is little beside the products of matrices, and what it must not know,
how long a step is, decides how many of those there are: a traced rule takes 0.4 times as long for
one 128 x 2 and 1.7 times as long for one 2048 x 256.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.numerics.distributed import is_sharded
from stiefel_opt.optim.group import DeviceGroup
from stiefel_opt.optim.torch_rules import Group

# Every optimizer of the package by its number; their class imports this file.
_OPTIMIZERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()

_LIBRARY: Any = torch.library.Library("stiefel_opt", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "step(Tensor(a!)[] parameters, Tensor(b!)[] state, Tensor[] grads, int[] places, Tensor[] lrs, "
    "int handle) -> ()"
)


def remember(optimizer: Any) -> int:
    """Return the number under which the operation finds an optimizer."""
    with _LOCK:
        handle = max(_OPTIMIZERS.keys(), default=0) + 1
        _OPTIMIZERS[handle] = optimizer
        return handle


def beside(step: Callable[[], None]) -> None:
    """Take a step that sends something to other processes between two graphs, as eagerly."""
    disable: Any = torch.compiler.disable  # asked for late: it imports the compiler
    disable(step, reason="a step of sharded weights sends sums to other processes")()


def in_graph(handle: int, device_groups: list[DeviceGroup], groups: list[Group]) -> None:
    """Put the step of all constrained parameters into the graph that is being traced.

    Learning rates of ``groups`` that are tensors are read where the graph has them.
    """
    parameters: list[Tensor] = []
    state: list[Tensor] = []
    grads: list[Tensor] = []
    places: list[int] = []
    for weights in device_groups:
        for parameter in weights.parameters:
            if parameter.grad is not None:
                places.append(len(parameters))
                grads.append(parameter.grad)
            parameters.append(parameter)
        state += weights.tensors()
    if not parameters:  # the operation looks for new tags; one that writes to nothing is dropped
        moving = [p for group in groups for p in group["params"] if p.grad is not None]
        state = [p for p in moving if not is_sharded(p)][:1]
    if parameters or state:
        lrs = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
        torch.ops.stiefel_opt.step(parameters, state, grads, places, lrs, handle)


def _step(
    parameters: list[Tensor],
    state: list[Tensor],
    grads: list[Tensor],
    places: list[int],
    lrs: list[Tensor],
    handle: int,
) -> None:
    optimizer = _OPTIMIZERS[handle]
    device_groups: list[DeviceGroup] = optimizer.all_constrained()
    owned = [parameter for each in device_groups for parameter in each.parameters]
    real = [parameter.detach() for parameter in owned]
    real += [tensor for each in device_groups for tensor in each.tensors()]
    copies = [
        (own, given)
        for own, given in zip(real, [*parameters, *state], strict=False)
        if own.data_ptr() != given.data_ptr()
    ]
    for own, copy in copies:  # a graph that keeps the old values hands out copies to write to
        own.copy_(copy)
    moving = map(owned.__getitem__, places)
    try:
        optimizer.step_in_graph(dict(zip(moving, grads, strict=True)), lrs)
    except BaseException:
        torch.set_grad_enabled(True)  # the graph turned it off, and will not come to its end
        raise
    for own, copy in copies:
        copy.copy_(own)


_LIBRARY.impl("step", _step, "CompositeExplicitAutograd")
torch.library.register_fake("stiefel_opt::step", lambda *_: None, lib=_LIBRARY)
