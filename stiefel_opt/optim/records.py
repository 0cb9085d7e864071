"""What an optimizer knows of each parameter beside its state: it outlives a load."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.numerics.device import has_values, numbers_on
from stiefel_opt.numerics.distributed import gathered
from stiefel_opt.optim.commit import Moved
from stiefel_opt.optim.state import State, StateDict, restart
from stiefel_opt.tags.manifold import Stiefel
from stiefel_opt.tags.parameter import recalled

# Counts of each parameter: skipped steps, and overflows that other processes do not know of yet.
_SKIP_COUNTS: Final = ("skipped", "pending_overflows")


class Records:
    """Tags, readings and counts of skipped steps, by parameter.

    Attributes:
        made_by: The reading by which state was made, or None for a plain parameter, and how the
            state was declared.
        reported: How many skipped steps warnings have named.
        of_graphs: What all captured steps have in common.
    """

    def __init__(self) -> None:
        self.made_by: dict[Tensor, tuple[Stiefel | None, tuple[State, ...]]] = {}
        self.reported = 0
        self.of_graphs: dict[Any, Any] = {}
        self._tags: dict[Tensor, Any] = {}  # as they were last seen
        self._skip_counts: dict[Tensor, StateDict] = {}  # views on counts

    def recall(self, parameters: list[Tensor]) -> bool:
        """Remember the tags, and put back one that is lost; return whether one is new."""
        before = self._tags
        self._tags = before | recalled(parameters, before)
        return any(self._tags[p] is not before.get(p) for p in parameters)

    def drop_unfit(
        self,
        states: Any,
        parameter: Tensor,
        manifold: Stiefel | None,
        declared: tuple[State, ...],
    ) -> bool:
        """Drop state that means something else by today's reading, or by today's options.

        Readings are compared, as the names of the state may be the same for both; None is that of a
        plain parameter. Return whether options, which ``declared`` it otherwise, dropped some.
        """
        before, earlier = self.made_by.get(parameter, (manifold, declared))
        self.made_by[parameter] = manifold, declared
        if before != manifold:
            states.pop(parameter, None)
            return False
        return manifold is not None and restart(states.get(parameter, {}), earlier, declared)

    def skip_counts_of(self, parameter: Tensor) -> StateDict:
        """Return the counts of a parameter, on its device."""
        none = torch.zeros((), dtype=torch.int64, device=parameter.device)
        counts = self._skip_counts.setdefault(parameter, dict.fromkeys(_SKIP_COUNTS, none))
        counts.update({name: count.to(parameter.device) for name, count in counts.items()})
        return counts

    def skipped(self) -> dict[Tensor, int]:
        """Return how many steps each parameter has missed; one read of each device."""
        devices: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for parameter, counts in self._skip_counts.items():
            if has_values(count := counts["skipped"]):
                devices.setdefault(count.device, []).append((parameter, count))
        skipped: dict[Tensor, int] = {}
        for pairs in devices.values():
            parameters, numbers = zip(*pairs, strict=True)
            skipped |= zip(parameters, map(int, torch.stack(numbers).tolist()), strict=True)
        return {parameter: count for parameter, count in skipped.items() if count}

    def keep_only(self, parameters: list[Tensor]) -> None:
        """Forget every other parameter."""
        alive = {id(parameter) for parameter in parameters}
        for records in (self._skip_counts, self._tags, self.made_by):
            for parameter in [p for p in records if id(p) not in alive]:
                del records[parameter]


def largest_of(states: Mapping[Tensor, StateDict], name: str) -> dict[Tensor, float]:
    """Return the largest number in the state of this name, over matrices and ranges."""
    largest: dict[Tensor, float] = {}
    for parameter, state in states.items():
        values = [gathered(t) for key, t in state.items() if key.partition(".")[0] == name]
        if values:
            largest[parameter] = max(float(value.max()) for value in values)
    return largest


def gained_by(weights: Any, moved: set[int], done: Moved) -> Tensor:
    """Return which steps were taken, and which skipped, ``(2, weights)``, without waiting.

    Args:
        weights: The group that takes the step.
        moved: Places of the parameters that moved, or may have moved.
        done: What a step says of each batch.
    """
    verdicts = [(places, ok) for places, ok in done.values() if ok is not None]
    if weights._ok is not None:
        places = [place for place in weights._joint if place in moved]
        verdicts.append((places, weights._of(weights._ok, places)))
    kinds = numbers_on(weights.steps, 0.0, 1.0).unsqueeze(-1)
    if len(verdicts) == 1 and verdicts[0][0] == weights._everywhere:
        return verdicts[0][1] != kinds
    present = torch.zeros_like(weights.steps)
    present.index_fill_(0, weights._at(sorted(moved)), 1.0)
    if not verdicts:
        return present * (1 - kinds)
    index = weights._at(list(itertools.chain(*(places for places, _ in verdicts))))
    taken = present.index_copy(0, index, torch.cat([ok for _, ok in verdicts]).to(present))
    return (taken != kinds) & (present != 0)
