"""What an optimizer knows of each parameter beside its state: it outlives a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.numerics.distributed import whole
from stiefel_opt.optim.group import TALLIES
from stiefel_opt.optim.state import StateDict
from stiefel_opt.tags.manifold import Stiefel
from stiefel_opt.tags.parameter import recalled


class Records:
    """Tags, readings and counts of skipped steps, by parameter.

    Attributes:
        readings: The reading by which state was made; None: as that of a plain parameter.
        reported: How many skipped steps warnings have named.
    """

    def __init__(self) -> None:
        self.readings: dict[Tensor, Stiefel | None] = {}
        self.reported = 0
        self._tags: dict[Tensor, Any] = {}  # as they were last seen
        self._tallies: dict[Tensor, StateDict] = {}  # views on counts

    def recall(self, parameters: list[Tensor]) -> None:
        """Remember the tag of each parameter, and put back a tag that is lost."""
        self._tags |= recalled(parameters, self._tags)

    def drop_other(self, states: Any, parameter: Tensor, manifold: Stiefel | None) -> None:
        """Drop state that was made by another reading; None is that of a plain parameter.

        Readings are compared, as the names of the state may be the same for both.
        """
        if self.readings.setdefault(parameter, manifold) != manifold:
            states.pop(parameter, None)
            self.readings[parameter] = manifold

    def tally_of(self, parameter: Tensor) -> StateDict:
        """Return the counts of a parameter, on its device."""
        none = torch.zeros((), dtype=torch.int64, device=parameter.device)
        tally = self._tallies.setdefault(parameter, dict.fromkeys(TALLIES, none))
        tally.update({name: count.to(parameter.device) for name, count in tally.items()})
        return tally

    def skipped(self) -> dict[Tensor, int]:
        """Return how many steps each parameter has missed; one read of each device."""
        devices: dict[torch.device, list[Tensor]] = {}
        for parameter, tally in self._tallies.items():
            devices.setdefault(tally["skipped"].device, []).append(parameter)
        counts: dict[Tensor, int] = {}
        for parameters in devices.values():
            tallies = torch.stack([self._tallies[parameter]["skipped"] for parameter in parameters])
            counts |= zip(parameters, tallies.tolist(), strict=True)
        return {parameter: count for parameter, count in counts.items() if count}

    def keep_only(self, parameters: list[Tensor]) -> None:
        """Forget every other parameter."""
        alive = {id(parameter) for parameter in parameters}
        for records in (self._tallies, self._tags, self.readings):
            for parameter in [p for p in records if id(p) not in alive]:
                del records[parameter]


def largest_of(states: Mapping[Tensor, StateDict], name: str) -> dict[Tensor, float]:
    """Return the largest number in the state of this name, over matrices and ranges."""
    largest: dict[Tensor, float] = {}
    for parameter, state in states.items():
        values = [whole(t) for key, t in state.items() if key.partition(".")[0] == name]
        if values:
            largest[parameter] = max(float(value.max()) for value in values)
    return largest
