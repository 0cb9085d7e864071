"""Captured steps: the work of a step on a device, recorded as a graph and repeated by one call.

A graph keeps the addresses that it reads and writes, and freezes every number of the host. So its
gradients lie in memory of its own, and one that is missing is NaN: its weight stays. The learning
rate is a number of the device. What the host decides by earlier numbers is the key of a graph:
whether rounding is removed, and what readers have answered. A step whose key is new runs as it is,
is captured at the second time, and is repeated from then on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import fail, users_level
from stiefel_opt.numerics.device import (
    LaggedReader,
    PlannedReader,
    Recorder,
    reader_for,
    recorder_for,
)
from stiefel_opt.optim.commit import LastStep, StepOptions
from stiefel_opt.optim.group import (
    _CORRECTION_PERIOD,
    DeviceGroup,
    remember_what_was_written,
)
from stiefel_opt.optim.torch_rules import Group

# What ``cuda_graph=None`` means: True in a version that `benchmarks.speed.step_time_gpu` has passed
# on a GPU.
BY_DEFAULT: Final = False
# Eager steps before the first that is captured: they make state, and load kernels.
_WARM: Final = 3
# Graphs of a group; what was not used for longest is dropped.
_MOST_GRAPHS: Final = 8
# What graphs keep for good, over the bytes of the weights; and the most of it under None.
_MEMORY: Final = 8
_MOST_BYTES: Final = 2**30


@dataclass
class _Plan:
    """A step that can be repeated where its key is the same, and its readers would answer alike."""

    key: Any
    readers: list[PlannedReader]
    replay: Callable[[], None] | None = None  # None: it has run once
    last: tuple[LastStep | None, ...] = ()

    def serves(self, key: Any, lr: float | None) -> bool:
        return bool(self.key == key) and all(reader.still_hold(lr) for reader in self.readers)


class Capture:
    """The steps of some weights: by a graph where that is wanted and possible.

    Args:
        weights: Whose steps.
        make: What captures work on their device.
        shared: What all captures of an optimizer share: memory for temporaries.
    """

    def __init__(self, weights: DeviceGroup, make: type[Recorder], shared: dict[Any, Any]) -> None:
        self._weights, self._make, self._shared = weights, make, shared
        size = sum(weight.parameter.nbytes for weight in weights.weights)
        self._is_large = _MEMORY * size > _MOST_BYTES
        self._recorder: Recorder | None = None
        self._grads: list[Tensor] = []  # where graphs read them
        self._plans: list[_Plan] = []  # the one that was used last comes first
        self._addresses: list[int] = []  # of the parameters
        self._bound: Any = None  # options of the step before
        self._corrected: list[int] = []  # steps that each batch had begun at its last correction
        self._eager_steps = 0
        self._refusal: str | None = None
        self._failure: str | None = None
        self._why_eager: str | None = "before the first step"

    @override
    def __str__(self) -> str:
        """How the last step was taken."""
        if self._why_eager is not None:
            return f"eager, {self._why_eager}"
        count = sum(plan.replay is not None for plan in self._plans)
        return f"captured, {count} CUDA graph{'s' * (count != 1)}" if count else "to be captured"

    # ---- whether -------------------------------------------------------------------------------

    def allow(self, group: Group, *, is_capturable: bool) -> None:
        """Note whether steps may be captured, by the options of their group."""
        wanted = group["cuda_graph"]
        reason = None
        if wanted is False:
            reason = "cuda_graph=False"
        elif wanted is None and not BY_DEFAULT:
            reason = "cuda_graph=None captures nothing in this version"
        elif not is_capturable:
            reason = "the rule does not say that it is capturable"
        elif group["nonfinite"] == "raise":
            reason = "nonfinite='raise'"
        elif wanted is None and self._is_large:
            reason = "graphs would keep more than 1 GiB: cuda_graph=True allows it"
        self._refusal = obstacle(self._weights) or reason

    def _obstacle_now(self, options: StepOptions) -> str | None:
        """Return why this step is eager."""
        weights, before = self._weights, self._bound
        self._bound = options.rule, options.correct, options.scale_rule, options.nonfinite
        if before != self._bound and self._eager_steps >= _WARM:
            self._plans = []
            return "an option has changed since the step before"
        if self._eager_steps < _WARM:
            return f"as are the first {_WARM} steps"
        if torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms"
        if weights.is_traced:
            return "a compiler has traced it"
        if weights._changed:
            return "somebody else has written to a weight"
        if len(weights._skipped) == len(weights.parameters):
            return "no weight has a gradient"
        if weights._skipped and options.nonfinite == "ignore":
            return "a gradient is missing, and nonfinite='ignore'"
        if self._make.is_busy():
            return "somebody else captures it"
        return None

    # ---- the step ------------------------------------------------------------------------------

    def step(self, options: StepOptions) -> list[Tensor]:
        """Take a step as :meth:`DeviceGroup.step`."""
        weights, lr = self._weights, options.lr
        self._why_eager = self._refusal or self._failure or self._obstacle_now(options)
        if self._why_eager is not None:
            self._eager_steps += 1
            return weights.step(options)
        host_lr = None if isinstance(lr, Tensor) else lr
        key = self._key()
        found = next((plan for plan in self._plans if plan.serves(key, host_lr)), None)
        is_new = found is None or found.replay is None
        if weights._skipped and is_new:  # torch would count a write to every weight
            self._why_eager = "a gradient is missing in a step that is not captured yet"
            return weights.step(options)
        if weights.rows:  # by torch, before a step of the others
            weights._judge(options.nonfinite)
            weights.move_rows([weight.moving() for weight in weights.weights], options)
        number = self._send(lr, host_lr)
        if found is not None and found.replay is not None:
            found.replay()
            _note_repeated(weights, found.last, is_written=host_lr != 0)
            plan = found
        else:
            plan = _Plan(key, self._readers(host_lr))
            self._begin(plan, options._replace(lr=number), found is not None)
        others = [other for other in self._plans if other is not found]
        self._plans = [plan, *others][:_MOST_GRAPHS] if self._failure is None else []
        for reader in plan.readers:
            reader.pass_on()
        if key[-1]:
            self._corrected = [batch.begun for batch in weights.batches]
        return []

    def _key(self) -> tuple[Any, bool]:
        """Return what the host decides about a step: its options, and whether rounding goes."""
        weights = self._weights
        if weights._now[1] != self._addresses:
            self._plans, self._addresses = [], list(weights._now[1])
        if not self._corrected:
            self._corrected = [b.begun - b.begun % _CORRECTION_PERIOD for b in weights.batches]
        is_due = any(
            batch.begun + 1 - corrected >= _CORRECTION_PERIOD
            for batch, corrected in zip(weights.batches, self._corrected, strict=True)
            if not weights._skipped.issuperset(batch.places)
        )
        return self._bound, is_due

    def _send(self, lr: Tensor | float, host_lr: float | None) -> Tensor:
        """Put gradients and the learning rate where graphs read them; return the latter.

        A gradient that is missing is NaN.
        """
        weights = self._weights
        if self._recorder is None:
            self._recorder = self._make(weights.steps.device, self._shared)
            self._grads = [torch.zeros_like(p.detach()) for p in weights.parameters]
        self._recorder.follow()
        if isinstance(lr, Tensor):
            self._recorder.number.copy_(lr.view(()))
        self._recorder.send(host_lr)
        pairs = zip(self._grads, weights._grads, strict=True)
        given = [(own, grad) for own, grad in pairs if grad is not None]
        torch._foreach_copy_([own for own, _ in given], [grad for _, grad in given])
        if weights._skipped:
            for place in weights._skipped:
                self._grads[place].fill_(math.nan)
        return self._recorder.number

    def _readers(self, host_lr: float | None) -> list[PlannedReader]:
        """Return a reader for each batch; none where nothing is ever read."""
        batches = self._weights.batches
        if any(reader_for(self._weights.steps, b.lagged) is not b.lagged for b in batches):
            return []
        return [PlannedReader(batch.lagged, host_lr) for batch in batches]

    def _begin(self, made: _Plan, options: StepOptions, is_captured: bool) -> None:
        """Run a step that is new as it is, or capture it and run that."""
        weights, is_due = self._weights, made.key[-1]

        def work() -> None:
            _step_for_all(weights, self._grads, is_due, made.readers, options)

        begun = [batch.begun for batch in weights.batches]
        if is_captured and self._recorder is not None:
            try:
                made.replay = self._recorder.record(work)
            except Exception as error:  # nothing has run
                self._fail(error)
                for batch, count in zip(weights.batches, begun, strict=True):
                    batch.begun = count
            else:
                made.replay()
                made.last = tuple(batch.last for batch in weights.batches)
        if made.replay is None:
            work()

    def _fail(self, error: Exception) -> None:
        """Go on without graphs, and say so."""
        self._plans, self._failure = [], f"a capture failed: {error}"
        warnings.warn(
            f"a step could not be captured as a CUDA graph and is taken without one: {error}; "
            "say cuda_graph=False",
            stacklevel=users_level(),
        )


def _step_for_all(
    weights: DeviceGroup,
    grads: Sequence[Tensor],
    is_due: bool,
    readers: Sequence[LaggedReader],
    options: StepOptions,
) -> None:
    """Take a step of all weights with these gradients."""
    weights._grads, weights._skipped = list(grads), set()
    weights.is_due, weights.is_judged = is_due, options.nonfinite == "ignore"
    earlier = [batch.lagged for batch in weights.batches]
    try:
        for batch, reader in zip(weights.batches, readers, strict=False):
            batch.lagged = reader
        weights.step(options)
    finally:
        weights.is_due = None
        for batch, lagged in zip(weights.batches, earlier, strict=True):
            batch.lagged = lagged


def _note_repeated(
    weights: DeviceGroup, last: Sequence[LastStep | None], *, is_written: bool
) -> None:
    """Keep account of a step that a graph has taken, which leaves no trace on the host."""
    for batch, each in zip(weights.batches, last, strict=True):
        batch.last = each
        batch.begun += not weights._skipped.issuperset(batch.places)
    if is_written:
        moved = set(range(len(weights.parameters))) - weights._skipped
        torch.autograd.graph.increment_version([weights.parameters[place] for place in moved])
        remember_what_was_written(weights, moved)
    if weights._skipped:  # no gradient is not one that is not finite
        weights.skips[weights._at(sorted(weights._skipped))] -= 1
    weights._grads = []


def captures_of(groups: list[DeviceGroup], shared: dict[Any, Any]) -> list[Capture | None]:
    """Return who captures the steps of each; None: nobody can on their device."""
    makes = [recorder_for(weights.steps) for weights in groups]
    pairs = zip(groups, makes, strict=True)
    return [None if make is None else Capture(weights, make, shared) for weights, make in pairs]


def obstacle(weights: DeviceGroup) -> str | None:
    """Return why no step of these weights can be captured."""
    if recorder_for(weights.steps) is None:
        return f"there are no CUDA graphs on the device of its weights, {weights.steps.device}"
    if weights.is_shared:
        return "processes share a weight"
    if weights.masters and weights.rows:
        return "a weight in half precision has plain rows"
    return None


def check_wanted(groups: list[DeviceGroup], group: Group) -> None:
    """Raise for ``cuda_graph=True`` where no step of some weights can be captured."""
    for weights in groups if group["cuda_graph"] else ():
        if (reason := obstacle(weights)) is not None:
            raise ValueError(fail("cuda_graph", "be None or False", True, reason))


def how_stepped(optimizer: Any) -> str:
    """Return how the last step of constrained parameters on a GPU was taken; else nothing.

    "captured, 2 CUDA graphs", or "eager" and why; several texts for several groups.
    """
    captures = [each for index in optimizer._indices if index for each in index.captures]
    return "; ".join(dict.fromkeys(str(each) for each in captures if each is not None))
