"""The commit: correct a batch, run its rule, judge the result, write it. The same for every rule.

A rule is pure: it reads a point, a gradient and a state, and returns new ones. What may go wrong
is handled here. A matrix moves if its gradient is safe, so that its squares are finite, and if its
new point is finite; otherwise its point and state stay. Where numbers may be read only the batch
with an unsafe gradient has a mask; elsewhere every batch has. A write can be repeated: one that an
exception interrupts is completed before the exception goes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from stiefel_opt._checks import CONSTRAINABLE
from stiefel_opt.device import Reader, reader_for
from stiefel_opt.functional.flows import Length, Move, Scalar, Tensors, corrections_after
from stiefel_opt.geometry import identity_error, orthonormality_tolerance, polar_factor
from stiefel_opt.linalg import Sums
from stiefel_opt.optim.blocks import Batch, LastStep
from stiefel_opt.optim.state import working_dtype

# The longest gradient that is safe, 2e13 in float32 and 1e148 in float64: a millionth of the root
# of the largest number leaves room for momenta and sums of squares. Half precision is summed in
# float32.
LARGEST_SAFE: Final = {
    dtype: math.sqrt(torch.finfo(working_dtype(dtype)).max) * 2.0**-20 for dtype in CONSTRAINABLE
}


class Step(NamedTuple):
    """What a rule is given beside point, gradient and state.

    Attributes:
        lr: The learning rate eta for orthonormal X, a number or a tensor.
        number: t >= 1, the number of this step: one for all, or ``(k, 1, 1)``.
        sums: ``sums((A, B), ...)`` returns A'B, ``(k, m, m)``, for each pair: the only products
            over rows that a rule may form, as some rows may be on other processes.
        reader: Who may read a number that decides how much work a step does.
    """

    lr: Scalar
    number: Scalar
    sums: Sums
    reader: Reader


class Rule(Protocol):
    """The part of an optimizer that moves a batch."""

    def __call__(self, X: Tensor, G: Tensor, state: Tensors, step: Step, /) -> Move:
        """Return the new point, the new state and the length of the step."""


class Correction(Protocol):
    """The part of an optimizer that removes rounding from a batch."""

    def __call__(
        self, X: Tensor, state: Mapping[str, Tensor], sums: Sums, own: Tensor | None = None, /
    ) -> tuple[Tensor, Tensors]:
        """Return the corrected point, and the state that has changed; ``own`` is X'X if known."""


class Task(NamedTuple):
    """What one step asks of a batch.

    Attributes:
        batch: The matrices.
        chosen: Its blocks that take part; None: all.
        places: Their weights.
        tensors, grads: What moves, and its gradient, for each of these.
        lr, number: As in :class:`Step`, for the tensors as they are scaled.
        ok: Which matrices have safe gradients, ``(k, 1, 1)``. None: all, or not known yet.
        is_due: Whether rounding is removed in this step.
        is_changed: Whether somebody else has written to one of the tensors.
        nonfinite: The option of this name.
        reads: Whether numbers may be read without waiting.
        done: Takes the places of what has been written.
    """

    batch: Batch
    chosen: list[int] | None
    places: list[int]
    tensors: list[Tensor]
    grads: list[Tensor]
    lr: Scalar
    number: Scalar
    ok: Tensor | None
    is_due: bool
    is_changed: bool
    nonfinite: str
    reads: bool
    done: set[int]


class Verdict(NamedTuple):
    """What became of a batch.

    Attributes:
        unsafe: Places of weights that stay because of their gradients; on a CPU only.
        overflowed: Which matrices left floating point, ``(k, 1, 1)``. None: none.
    """

    unsafe: list[int]
    overflowed: Tensor | None = None


def take_step(task: Task, rule: Rule, correct: Correction) -> Verdict:
    """Correct the batch, run its rule, judge what it returned, and write it."""
    batch, chosen, sums = task.batch, task.chosen, task.batch.sums
    stored = batch.read(task.tensors, chosen)
    grad = batch.read(task.grads, chosen).to(stored.dtype)
    reader = batch.now if task.reads else reader_for(stored, batch.lagged)
    reader.is_lost = False
    unsafe: list[int] = []
    ok, length = task.ok, math.inf
    if task.nonfinite == "skip" and task.reads:
        ok, length, unsafe = _judge(grad, task)
        if len(unsafe) == len(task.places):
            return Verdict(unsafe)
    if ok is not None:
        grad = torch.where(ok, grad, 0.0)
    index = batch.index_of(chosen)
    state = batch.state if index is None else {n: t[index] for n, t in batch.state.items()}
    unscaled = stored if batch.scale == 1.0 else stored / batch.scale
    known = math.inf if sums.row_sum is not None else length  # all processes must decide alike
    X, fixed = _on_manifold(unscaled, state, grad, task, known, reader, correct)
    lr = task.lr if batch.scale == 1.0 else task.lr / batch.scale
    new_X, new, moved = rule(X, grad, {**state, **fixed}, Step(lr, task.number, sums, reader))
    new = {**fixed, **new}
    for _ in range(corrections_after(moved, lr, known, reader)):
        new_X, again = correct(new_X, {**state, **new}, sums)
        new |= again
    overflowed = None
    if task.nonfinite != "ignore" and _may_have_overflowed(moved, reader):
        overflowed = _overflowed(new_X, sums, ok)
        new_X = torch.where(overflowed, unscaled, new_X)
        for name, tensor in new.items():
            start = batch.declared[name].fill_(torch.empty_like(tensor))
            new[name] = torch.where(overflowed, start, tensor)
    new_X = new_X if batch.scale == 1.0 else new_X * batch.scale
    if isinstance(lr, Tensor):
        new_X = torch.where(lr == 0, stored, new_X)
    is_moving = isinstance(lr, Tensor) or lr != 0  # else bits stay, also where X C would differ

    def write() -> None:
        for name, tensor in new.items():
            _write(batch.state[name], tensor, state[name], index, ok)
        if is_moving:
            moved_X = new_X if ok is None else torch.where(ok, new_X, stored)
            batch.write(task.tensors, moved_X, chosen, stored)
        task.done.update(place for place in task.places if place not in unsafe)

    complete(write)
    batch.last = LastStep(task.places, moved.kept() if isinstance(moved, Length) else moved, ok)
    return Verdict(unsafe, overflowed)


def complete(write: Callable[[], None]) -> None:
    """Run a write that can be repeated, again if an exception interrupts it."""
    try:
        write()
    except BaseException:
        write()
        raise


def _write(
    target: Tensor, value: Tensor, earlier: Tensor, index: Tensor | None, ok: Tensor | None
) -> None:
    """Write new state where matrices move; ``index`` says of which rows ``earlier`` is."""
    if index is not None:
        target[index] = value if ok is None else torch.where(ok, value, earlier)
    elif ok is None:
        target.copy_(value)
    else:
        target.copy_(torch.where(ok, value, earlier))


# ---- before the rule -----------------------------------------------------------------------------


def _judge(grad: Tensor, task: Task) -> tuple[Tensor | None, float, list[int]]:
    """Return which matrices have safe gradients, the length of those, and the other weights."""
    length, most = float(torch.linalg.vector_norm(grad)), LARGEST_SAFE[grad.dtype]
    if length <= most:  # False for NaN
        return task.ok, length, []
    lengths = torch.linalg.vector_norm(grad.reshape(len(task.places), -1), dim=1)
    safe = lengths <= most
    length = float(torch.linalg.vector_norm(lengths[safe]))
    unsafe = list(itertools.compress(task.places, (~safe).tolist()))
    return task.batch.of_each(safe), length, unsafe


def _on_manifold(
    point: Tensor,
    state: Tensors,
    grad: Tensor,
    task: Task,
    length: float,
    reader: Reader,
    correct: Correction,
) -> tuple[Tensor, Tensors]:
    """Return the point with rounding removed if that is due, and the state that has changed.

    A point that is off the manifold is projected. That shows where somebody else has written to a
    parameter, and, where numbers may be read, once in a while: writes to ``.data`` leave no trace.
    """
    batch, sums = task.batch, task.batch.sums
    is_due = task.is_due or reader.is_blind
    looks = is_due and reader.is_exact
    if not (looks or task.is_changed):
        return correct(point, state, sums) if is_due else (point, {})
    if looks:  # without a gradient nothing moves, not even by a correction
        size = length if length < math.inf else float(sums.add(grad.norm().square()))
        is_due = is_due and size != 0.0
    (own,) = sums((point, point))
    error, tolerance = identity_error(own), orthonormality_tolerance(point.dtype, batch.row_count)
    worst = float(error.amax())
    if worst <= 10 * tolerance:
        new_point, fixed = correct(point, state, sums, own)
        if is_due or worst > tolerance or _is_stale(state, fixed, sums):
            return new_point, fixed
        return point, {}
    off = ~(error <= 10 * tolerance)
    if sums.row_sum is None:  # X'X may overflow where X does not
        off &= point.isfinite().all(dim=-1).all(dim=-1)
    point = point.clone()
    project = polar_factor
    if sums.row_sum is not None:
        project = partial(sums.row_sum.with_all_rows, polar_factor)  # type: ignore[attr-defined]
    if bool(off.any()):
        point[off] = project(point[off])
    return correct(point, state, sums)


def _is_stale(state: Tensors, fixed: Tensors, sums: Sums) -> bool:
    """Say whether a momentum is off its tangent space by more than rounding: of another point."""
    tall = list(state.values()) if fixed else []
    if not tall:
        return False
    squares = [torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True).square() for t in tall]
    size = sums.add(torch.stack(squares).sum(dim=0)).sqrt()
    eps = torch.finfo(size.dtype).eps
    changes = [(state[name] - tensor).abs() > 1e3 * eps * size for name, tensor in fixed.items()]
    return any(bool(change.any()) for change in changes)


# ---- behind it -----------------------------------------------------------------------------------


def _may_have_overflowed(moved: Length | Tensor | float, reader: Reader) -> bool:
    """Say whether the new point has to be looked at: a bound on the step is not finite or unknown.

    On an accelerator the flows of this package saturate and are not looked at.
    """
    if not isinstance(moved, Length):
        return True
    return reader.is_lost or (not moved.limit < math.inf)


def _overflowed(new_X: Tensor, sums: Sums, ok: Tensor | None) -> Tensor:
    """Return which matrices are not finite, ``(k, 1, 1)``."""
    lost: Tensor = ~torch.linalg.vector_norm(new_X, dim=(-2, -1), keepdim=True).isfinite()
    if sums.row_sum is not None:  # in the rows of any process; all come here alike
        lost = sums.add(lost.float()) > 0
    return lost if ok is None else lost & ok
