"""What a block of code costs: the memory that it holds, by the profiler of torch, and its calls."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class Held:
    """How many bytes more are allocated at the end of a block than at its beginning."""

    bytes: int


@contextmanager
def counted_memory() -> Iterator[Held]:
    """Add up what is allocated and freed inside; nothing that is collected late is forgiven."""
    held = Held()
    gc.collect()
    gc.disable()  # as long trainings do
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            yield held
        events = found.profiler.kineto_results.events()
        held.bytes = sum(event.nbytes() for event in events if event.name() == "[memory]")
    finally:
        gc.enable()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def peak_bytes(action: Callable[[], Any]) -> int:
    """The largest amount of memory that an action holds on top of what was there before."""
    changes: list[tuple[int, int]] = []
    for _ in range(3):  # the profiler loses its events now and then
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            action()
        events = found.profiler.kineto_results.events()
        changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        if changes:
            break
    return max(itertools.accumulate(size for _, size in sorted(changes)), default=0)


class Calls(TorchDispatchMode):
    """Counts calls of torch, those that make views apart, and notes the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.views = self.others = 0
        self.products: list[tuple[Any, Any]] = []  # the shapes of both factors

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.views += func.is_view
        self.others += not func.is_view
        if func.overloadpacket.__name__.rstrip("_") in {"mm", "bmm", "addmm", "baddbmm"}:
            self.products.append((args[-2].shape, args[-1].shape))
        return func(*args, **(kwargs or {}))

    @property
    def multiplications(self) -> int:
        """Those of numbers, in products of matrices."""
        return sum(math.prod(left) * right[-1] for left, right in self.products)
