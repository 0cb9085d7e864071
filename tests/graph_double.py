"""A double of a CUDA graph: what a step does on a device is written down, and done again.

As on a GPU nothing runs while it is captured, numbers of the host are frozen, the device is not
read, and a repetition leaves no trace in the versions of tensors. Kernels, memory and streams are
those of the CPU.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stiefel_opt.numerics import device
from stiefel_opt.optim import capture

READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "item")


class Tape(TorchDispatchMode):
    """Writes down every operation that is called; those that write to a tensor are not done."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name in READS:
            raise RuntimeError(f"{name} reads a number while a graph is captured")
        if func.is_view:
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            found = func(*args, **kwargs)
            fresh = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
            for each in fresh:  # nothing has run: its values are those of memory that was there
                if each.is_floating_point() or each.is_complex():
                    each.fill_(math.nan)
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            places = [leaf.device.type for leaf in given if leaf.dim()]
            sources = set(places) or {leaf.device.type for leaf in given}
            if sources and sources != {each.device.type for each in fresh}:
                raise RuntimeError(f"{name} copies between devices while a graph is captured")
            self.calls.append((func, args, kwargs, fresh))
            return found
        self.calls.append((func, args, kwargs, []))
        written = [
            value
            for argument, value in _bound(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        returned = [each for each in written if isinstance(each, Tensor)]
        return returned[0] if len(func._schema.returns) == 1 else tuple(returned) or None

    @torch.no_grad()
    def repeat(self) -> None:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            for func, args, kwargs, fresh in self.calls:
                found = func(*args, **kwargs)
                values = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
                for old, new in zip(fresh, values, strict=False):
                    old.copy_(new)


def _bound(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    arguments = func._schema.arguments
    yield from zip(arguments, args, strict=False)
    for argument in arguments:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


class Double(device.Recorder):
    """Records by a :class:`Tape`."""

    made: list[Tape]

    @staticmethod
    def is_busy() -> bool:
        return False

    def follow(self) -> None:
        pass

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        tape = Tape()
        with tape:
            work()
        Double.made.append(tape)
        return tape.repeat


@contextlib.contextmanager
def doubled(kind: str) -> Iterator[list[Tape]]:
    """Let steps on a type of device be captured; the tapes that are made are returned."""
    Double.made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.RECORDERS, kind, Double)
        patch.setattr(capture, "BY_DEFAULT", True)
        yield Double.made
