"""The memory that a block of code holds, by the profiler of torch."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.profiler import ProfilerActivity, profile


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
