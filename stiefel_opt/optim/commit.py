"""The commit: correct a batch, run its rule, judge the result, write it. The same for every rule.

A rule is pure: it reads a point, a gradient and a state, and returns new ones. What may go wrong
is handled here. A gradient is safe if its squares are finite: the point and the state of a matrix
with any other gradient stay. A matrix whose new point is not finite keeps its point, and the state
that the step would have changed starts again. Where numbers may be read, a batch has a mask only if
one of its gradients is unsafe; elsewhere every batch has one. A write that an exception interrupts
is repeated before the exception goes on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.errors import CONSTRAINABLE
from stiefel_opt.functional.flows import Length, Move, Scalar, Tensors, steepest
from stiefel_opt.functional.learned_scale import SCALE, factors_of, norm_at
from stiefel_opt.numerics.device import (
    STEEP,
    BlindReader,
    Hint,
    HostReader,
    LaggedReader,
    Reader,
    has_values,
    index_on,
    reader_for,
    working_dtype,
)
from stiefel_opt.numerics.geometry import (
    FAR,
    identity_error,
    orthonormality_tolerance,
    polar_factor,
)
from stiefel_opt.numerics.linalg import (
    Packed,
    Sums,
    are_finite,
    largest_stretch,
)
from stiefel_opt.optim.blocks import StateStack
from stiefel_opt.optim.moves import (
    Correction,
    Rule,
    ScaleRule,
    check_move,
    is_foreign,
    is_stale,
    refuse_write,
    warn_if_off,
    warn_of_sign,
)
from stiefel_opt.optim.state import START
from stiefel_opt.tags.blocks import as_batch, shares_memory

# The longest gradient that is safe, 2e13 in float32 and 1e148 in float64: a millionth of the root
# of the largest number leaves room for momenta and sums of squares. Half precision is summed in
# float32.
LARGEST_SAFE: Final = {
    dtype: math.sqrt(torch.finfo(working_dtype(dtype)).max) * 2.0**-20 for dtype in CONSTRAINABLE
}


_VERY_STEEP: Final = 100.0
_FLOAT16_MAX: Final = torch.finfo(torch.float16).max
_LEAST_LR: Final = 1e-15  # below, a length, which is of lr^2, may be 0 by underflow


# By batch the places of weights that have been written, and which of them moved; None: all.
Moved = dict[Any, tuple[list[int], Tensor | None]]


class LastStep(NamedTuple):
    """The places of the weights of a batch that moved, its length, and a mask of its matrices.

    Of a :class:`Length` there are the squares, their scale and limit: X'G may be large.
    """

    places: list[int]
    length: Any
    mask: Tensor | None


class Batch:
    """Some matrices of a stack, ``(k, n, m)``: what one call of a rule works on.

    They belong to the blocks from ``start`` to ``stop``; of a single block they may be a slice,
    ``share``.
    """

    def __init__(self, stack: StateStack, start: int, stop: int, share: slice) -> None:
        self.blocks = stack.blocks[start:stop]
        self.places = [block.place for block in self.blocks]
        self.sums, self.row_count, self.declared = stack.sums, stack.row_count, stack.declared
        self.each = share.stop - share.start  # matrices of a block
        low = start * stack.each + share.start
        count = (stop - start - 1) * stack.each + self.each
        self.state = stack.state_of(slice(low, low + count))  # views
        first, reading = self.blocks[0], self.blocks[0].reading
        self.scale, self.learns_scale = reading.scale, reading.learn_scale
        self.in_float16 = any(block.weight.dtype == torch.float16 for block in self.blocks)
        self.determinant = reading.determinant
        # readers of numbers, on a CPU and elsewhere
        self.now, self.lagged = HostReader() if stack.reads else None, LaggedReader()
        self.is_new = True  # nobody has looked at what the rule returns
        self.is_joint = False  # its group judges the gradients
        self.bounded_by: Any = None  # the rule whose steps judge the gradients, off a CPU
        self.quiet: Any = None  # on a CPU the rule whose last step was short, and all was well
        self.is_told = False  # by its length, whether its gradients are safe
        self.is_foreign = False  # whether its rule is not of this package
        self.last: LastStep | None = None
        self.long_steps = 0  # in a row, by the bound on their length
        self.begun = 0  # steps that were begun
        self._lead, self._part_shape = first.lead, first.part_shape
        # shape of the matrices of several blocks, as they lie in memory one behind the other
        shape = first.shape[::-1] if first.wide else first.shape
        in_order = first.reading.is_in_order(len(first.part_shape))
        self._stored_shape = shape if in_order else None
        self._share = None if share == slice(0, stack.each) else share
        self._in_parts = not all(block.is_all for block in self.blocks)
        self._views: dict[Any, tuple[torch.Size, tuple[int, ...], int]] = {}  # by strides

    def read(self, tensors: list[Tensor], blocks: list[int] | None = None) -> Tensor:
        """Return the matrices of these ``blocks``, one tensor like the parameter for each."""
        first, tensor = self.blocks[0], tensors[0]
        if len(self.blocks) > 1:
            parts = self._parts(tensors, blocks)
            joined = torch.cat(parts)
            if self._stored_shape is None:
                joined = joined.reshape(len(parts), *self._part_shape)
                return as_batch(first.matrices(joined, stacked=True))
            joined = joined.reshape(len(parts) * self.each, *self._stored_shape)
            return joined.mT if first.wide else joined
        if (view := self._views.get(tensor.stride())) is not None:
            return tensor.as_strided(view[0], view[1], tensor.storage_offset() + view[2])
        matrices = first.read(tensor)
        if self._share is not None:
            matrices = matrices[self._share]
        if not tensor.is_complex() and shares_memory(matrices, tensor):
            offset = int(matrices.storage_offset() - tensor.storage_offset())
            self._views[tensor.stride()] = matrices.size(), matrices.stride(), offset
        return matrices

    def write(
        self,
        tensors: list[Tensor],
        matrices: Tensor,
        blocks: list[int] | None,
        read: Tensor,
        ok: Tensor | None,
    ) -> None:
        """Put new ``matrices`` into the tensors of these ``blocks``, from which ``read`` came.

        Those that are not ``ok`` stay, ``(k, 1, 1)``; None: all are.
        """
        first, tensor = self.blocks[0], tensors[0]
        is_view = len(self.blocks) == 1 and tensor.stride() in self._views
        if is_view and ok is None:
            read.copy_(matrices)
            return
        if ok is not None:
            matrices = torch.where(ok, matrices, read, out=read if is_view else None)
        if is_view:
            return
        if len(self.blocks) == 1:
            target = first.read(tensor)
            (target if self._share is None else target[self._share]).copy_(matrices)
            if not shares_memory(target, tensor):  # channels_last, or batches of rows
                first.write(tensor, target)
            return
        parts = self._parts(tensors, blocks)
        shape = torch.Size((len(parts), *self._part_shape))
        if self._stored_shape is None:
            batch = matrices.reshape(len(parts), *self._lead, *matrices.shape[1:])
            stored = first.stored(batch, shape, stacked=True)
        else:
            stored = (matrices.mT if first.wide else matrices).reshape(shape)
        if self.now is not None and not self._in_parts:
            torch.unbind_copy(stored, out=parts)
        else:
            torch._foreach_copy_(parts, list(stored.unbind()))

    def may_be_quiet(self) -> bool:
        """Say whether what a rule of this package returns is stored as it is."""
        is_plain = self.scale == 1.0 and not (self.learns_scale or self.is_foreign)
        return is_plain and self.sums.are_local

    def index_of(self, blocks: list[int]) -> Tensor:
        """Return an index of the matrices of these blocks."""
        matrices = [block * self.each + i for block in blocks for i in range(self.each)]
        return index_on(self.blocks[0].weight.parameter.device, matrices)

    def of_each(self, of_block: Tensor) -> Tensor:
        """Return the value of its block for each matrix, ``(k, 1, 1)``; of one ``(1, 1, 1)``."""
        if len(of_block) == 1 or self.each == 1:
            return of_block.view(-1, 1, 1)
        return of_block.view(-1, 1).expand(-1, self.each).reshape(-1, 1, 1)

    def are_unwritten(self, chosen: list[int] | None) -> Tensor:
        """Say of matrices of these blocks, whose scale is learned, which no step has written."""
        blocks = self.blocks if chosen is None else [self.blocks[i] for i in chosen]
        signs = [block.weight.state[START] for block in blocks]
        return self.of_each(torch.tensor(signs, device=blocks[0].weight.parameter.device) < 0)

    def angles(self) -> dict[int, float]:
        """Return the largest angle in radians of the last step, for each weight that moved."""
        if self.last is None:
            return {}
        places, length, mask = self.last
        count = len(places) * self.each
        if isinstance(length, tuple):
            tangents = Length(*length).tangents(count)
        else:
            tangents = torch.as_tensor(length, dtype=torch.float64).expand(count, 1, 1).flatten()
        tangents = tangents if mask is None else tangents.where(mask.flatten(), math.nan)
        largest = tangents.view(len(places), self.each).amax(dim=1).atan().tolist()
        pairs = zip(places, largest, strict=True)
        return {place: angle for place, angle in pairs if math.isfinite(angle)}

    def _parts(self, tensors: list[Tensor], blocks: list[int] | None) -> list[Tensor]:
        if not self._in_parts:
            return tensors
        chosen = self.blocks if blocks is None else [self.blocks[i] for i in blocks]
        return [block.part(tensor) for block, tensor in zip(chosen, tensors, strict=True)]


class StepOptions(NamedTuple):
    """What a group says about a step: its rules, and its options of these names."""

    rule: Rule
    correct: Correction
    move_rows: Any  # the plain rule; None where there are no rows
    lr: Scalar
    nonfinite: str
    scale_rule: ScaleRule


class Task(NamedTuple):
    """One step of a batch.

    Attributes:
        batch: The matrices.
        options: What its group says.
        chosen: Which of its blocks take part; None: all.
        places: Their weights.
        tensors, grads: What moves and its gradient, for each of these weights.
        number: Of this step.
        ok: Which matrices have safe gradients, ``(k, 1, 1)``. None: all, or not judged yet.
        is_due: Whether rounding is removed in this step.
        is_changed: Whether somebody else has written to one of the tensors.
        done: Takes the places of what has been written, and which of them moved.
    """

    batch: Batch
    options: StepOptions
    chosen: list[int] | None
    places: list[int]
    tensors: list[Tensor]
    grads: list[Tensor]
    number: Scalar
    ok: Tensor | None
    is_due: bool
    is_changed: bool
    done: Moved


def take_step(task: Task) -> tuple[list[int], Tensor | None]:
    """Correct the batch, run its rule, judge what it returned, and write it.

    Returns: Places of weights that stay because of their gradients, on a CPU only; and which
        matrices left floating point, ``(k, 1, 1)``, or None: none.
    """
    batch, chosen, (rule, _, _, lr, nonfinite, _) = task.batch, task.chosen, task.options
    stored, grad = batch.read(task.tensors, chosen), batch.read(task.grads, chosen)
    if grad.dtype != stored.dtype:
        grad = grad.to(stored.dtype)
    # numbers of the step before are those of all blocks
    reader = batch.now or reader_for(stored, batch.lagged if chosen is None else None)
    reads, reader.overflowed = reader.is_exact, False
    if batch.quiet is rule and chosen is None and not task.is_changed:
        X, state, number, sums = stored, batch.state, task.number, batch.sums
        fixed: Tensors = {}
        is_safe = not batch.is_told and _length_of(grad) <= LARGEST_SAFE[grad.dtype]
        if task.is_due:
            X, fixed, _ = _on_manifold(stored, grad, state, math.inf, task, reader)
            state = _replaced(state, fixed)
        new_X, new, length = rule(X, grad, state, lr=lr, step=number, sums=sums, reader=reader)
        if _is_quiet(length, grad, lr, reader, is_safe):
            _commit(task, (new_X, _completed(new, fixed), length), stored)
            return [], None
        reader.overflowed = False
    if not reads:  # the host learns too late that a step was steep: the device keeps the limit
        reader = reader.limited(steepest(stored.dtype, batch.row_count))
    ok, grad_length, unsafe, verdict = _judge(grad, task, reader)
    if len(unsafe) == len(task.places):
        return unsafe, None
    if ok is not None:
        grad = torch.where(ok, grad, 0.0)
    index, state = None if chosen is None else batch.index_of(chosen), batch.state
    if index is not None:
        state = {name: tensor[index] for name, tensor in state.items()}
    new_X, new, length, overflowed = _new_point(stored, grad, state, ok, grad_length, task, reader)
    if reads:
        is_safe = grad_length <= LARGEST_SAFE[grad.dtype]
        is_quiet = batch.may_be_quiet() and _is_quiet(length, grad, lr, reader, is_safe)
        batch.quiet = rule if is_quiet else None
        batch.is_told = isinstance(length, Length) and length.steepness is not None
    else:
        is_bounded = isinstance(length, Length) and length.bound is not None
        batch.bounded_by = rule if is_bounded else None
        if is_bounded and nonfinite != "ignore":
            ok, verdict = _sound(length.bound, ok, verdict, task)  # type: ignore[union-attr, arg-type]
    if isinstance(lr, Tensor):
        new_X = torch.where(lr == 0, stored, new_X)
    _commit(task, (new_X, new, length), stored, ok, index, unsafe, verdict)
    return unsafe, overflowed


def _length_of(grad: Tensor) -> float:
    """Return the length of all gradients of a batch together, which is read."""
    return float(torch.linalg.vector_norm(grad))


def _is_quiet(
    length: Length | Tensor | float, grad: Tensor, lr: Scalar, reader: Reader, is_safe: bool
) -> bool:
    """Say whether a step was short and not steep, and all of its gradients are safe.

    Its result can then be written as it is, and the next step takes the short way.

    Args:
        is_safe: Whether the gradients are safe; used if the length has no steepness.
    """
    if not isinstance(length, Length) or not length.limit <= 1:
        return False
    if reader.overflowed or isinstance(lr, Tensor):
        return False
    if length.steepness is None:
        return length.inner is None and is_safe
    most = abs(lr) * LARGEST_SAFE[grad.dtype]
    is_short = length.steepness <= min(STEEP, most) and length.limit <= most * most
    return is_short and abs(lr) > _LEAST_LR


def _commit(
    task: Task,
    move: Move,
    stored: Tensor,
    ok: Tensor | None = None,
    index: Tensor | None = None,
    unsafe: Sequence[int] = (),
    verdict: Tensor | None = None,
) -> None:
    """Write what a rule returned; what an exception interrupts is completed."""
    batch, lr, new_X, new = task.batch, task.options.lr, *move[:2]
    length: Any = move[2]

    def write() -> None:
        _write_state(batch.state, new, index, ok)
        if isinstance(lr, Tensor) or lr != 0:  # else no bit changes
            batch.write(task.tensors, new_X, task.chosen, stored, ok)
        moved = [place for place in task.places if place not in unsafe] if unsafe else task.places
        task.done[batch] = moved, verdict

    try:
        write()
    except BaseException:
        write()
        raise
    is_long = False
    if isinstance(length, Length):
        is_long, length = batch.now is not None and length.limit > 1, length[:3]
    batch.last = LastStep(task.places, length, ok)
    batch.long_steps = batch.long_steps + 1 if is_long else 0


def _write_state(whole: Tensors, new: Tensors, index: Tensor | None, ok: Tensor | None) -> None:
    """Write the new state of the matrices of an index, as far as they are ``ok``; None: all."""
    if isinstance(new, Packed) and isinstance(whole, Packed):
        if ok is None:
            whole.flat.copy_(new.flat)
        elif ok.numel() == 1:
            torch.where(ok.view(1), new.flat, whole.flat, out=whole.flat)
        else:
            for run, before in zip(new.runs(), whole.runs(), strict=True):
                torch.where(ok, run, before, out=before)
    elif new and index is None and ok is None:
        torch._foreach_copy_([whole[name] for name in new], list(new.values()))
    else:
        for name, tensor in new.items():
            old = whole[name]  # a rule may return a wider dtype
            if index is None:
                torch.where(ok, tensor.to(old.dtype), old, out=old)  # type: ignore[arg-type]
            else:  # what is written has no name, so that it is freed at once
                kept = tensor if ok is None else torch.where(ok, tensor, old[index])
                old[index] = kept.to(old)


def _new_point(
    stored: Tensor,
    grad: Tensor,
    state: Tensors,
    ok: Tensor | None,
    grad_length: float,
    task: Task,
    reader: Reader,
) -> tuple[Tensor, Tensors, Length | Tensor | float, Tensor | None]:
    """Return the new point and state, the length of the step, and which matrices overflowed.

    Overflowed matrices keep their point, and the state that the step would have changed starts
    again.
    """
    batch, sums = task.batch, task.batch.sums
    rule, correct, _, lr, nonfinite, scale_rule = task.options
    lr = lr if batch.scale == 1.0 else lr / batch.scale
    if not sums.are_local or batch.learns_scale:  # all processes must decide alike; it is of W
        grad_length = math.inf
    error, reads = None, reader.is_exact
    unscaled, norm = stored, None
    if batch.learns_scale:
        unscaled, norm = factors_of(stored, sums, looks=task.is_changed or reads)
    elif batch.scale != 1.0:
        unscaled = stored / batch.scale
    X, fixed = unscaled, Tensors()
    if task.is_due or task.is_changed or not reads:
        X, fixed, error = _on_manifold(unscaled, grad, state, grad_length, task, reader)
    if norm is not None:
        if error is not None:  # what no step has written yet, and is no multiple, gets its start
            starts = batch.are_unwritten(task.chosen) & ~(error <= FAR).view(-1, 1, 1)
            norm = norm_at(X, unscaled, norm, sums, batch.scale, starts)
        rule = scale_rule.beside(rule, norm)
    is_first, current = batch.is_new, _replaced(state, fixed)
    apply = partial(rule, X, grad, current, step=task.number, sums=sums, reader=reader)
    (new_X, new, length), scale, steepness = _run(apply, lr, grad_length, task, reader)
    new = _completed(new, fixed)
    is_late = task.is_due and not reads
    corrections = max(_corrections_after(length, steepness, reader), is_late)
    for _ in range(corrections):
        new_X, corrected_state = correct(new_X, {**state, **new}, sums)
        new = _put(new, corrected_state)
    if (is_first or batch.is_foreign) and reads and sums.are_local:
        warn_if_off(rule, new_X)
    overflowed = None
    # on an accelerator the flows of this package saturate and are not looked at
    is_known = isinstance(length, Length) and length.limit < math.inf and not reader.overflowed
    # corrections of a point that is far off diverge
    if nonfinite != "ignore" and (not is_known or (reads and corrections)):
        overflowed = _overflowed(new_X, sums, ok)
        new_X, new = torch.where(overflowed, unscaled, new_X), _restarted(new, overflowed, batch)
    if batch.learns_scale:  # in place: only rules that say so learn a scale
        new_X.mul_(scale.clamp(max=_FLOAT16_MAX) if batch.in_float16 else scale)  # type: ignore[union-attr]
        new_X = new_X if overflowed is None else torch.where(overflowed, stored, new_X)
    elif batch.scale != 1.0:
        new_X = new_X * scale
    return new_X, new, length, overflowed


def _run(
    apply: partial[Move], lr: Scalar, grad_length: float, task: Task, reader: Reader
) -> tuple[Move, Scalar, float]:
    """Return what a bound rule returns, the scale beside it, and how steep the step is.

    Where numbers may be read a step that is too steep is taken again, shorter.
    """
    batch, (X, grad, _) = task.batch, apply.args[-3:]
    scale: Scalar = batch.scale
    reads = reader.is_exact
    watched = reads and not X.is_inference()
    versions = (X._version, grad._version) if watched else None
    move = apply(lr=lr)
    if watched and versions != (X._version, grad._version):
        refuse_write(apply)
    if batch.learns_scale:
        scale = move[1].pop(SCALE, scale)
    if batch.is_new:
        check_move(apply, X, batch.declared, move)
        batch.is_new, batch.is_foreign = False, is_foreign(apply)
    steepness = _steepness(move[2], lr, grad_length, reader)
    if reads and _VERY_STEEP < steepness < math.inf:
        most = steepest(X.dtype, batch.row_count)
        if steepness > most:
            move = apply(lr=_shorter(move[2], lr, most))
            scale = move[1].pop(SCALE, scale)
    return move, scale, steepness


def _replaced(state: Tensors, changed: Tensors) -> Tensors:
    """Return a state in which some tensors are others."""
    if not changed or not isinstance(state, Packed):
        return _put(state, changed)
    copy = state.like()
    copy.flat.copy_(state.flat)
    return _put(copy, changed)


def _put(new: Tensors, changed: Tensors) -> Tensors:
    """Put some tensors into a new state; packed, it keeps its memory."""
    if not isinstance(new, Packed):
        return {**new, **changed} if changed else new
    for name, tensor in changed.items():
        new[name].copy_(tensor)
    return new


def _completed(new: Tensors, fixed: Tensors) -> Tensors:
    """Return a new state with what was changed before the rule, unless that has all of it."""
    return new if not fixed or isinstance(new, Packed) else {**fixed, **new}


def _restarted(new: Tensors, overflowed: Tensor, batch: Batch) -> Tensors:
    """Return a new state in which that of some matrices starts again."""
    starts = {name: batch.declared[name].fill_(torch.empty_like(t)) for name, t in new.items()}
    return _put(new, {n: torch.where(overflowed, starts[n], t) for n, t in new.items()})


# ---- before the rule -----------------------------------------------------------------------------


def _sound(
    bound: Tensor, ok: Tensor | None, verdict: Tensor | None, task: Task
) -> tuple[Tensor, Tensor | None]:
    """Return a mask of the matrices that move, ``(k, 1, 1)``, and which of the weights do.

    The bound of a step is not finite where a gradient is not, or where the step leaves floating
    point: such a weight stays as a whole. Of one that several batches share the matrix stays.
    """
    if task.batch.is_joint:
        sound = bound < math.inf
        return sound if ok is None else sound & ok, None
    if task.batch.each > 1:
        bound = bound.view(len(task.places), -1).amax(dim=1)
    sound = bound.view(-1) < math.inf
    verdict = sound if verdict is None else sound & verdict
    return task.batch.of_each(verdict), verdict


def _judge(
    grad: Tensor, task: Task, reader: Reader
) -> tuple[Tensor | None, float, list[int], Tensor | None]:
    """Return a mask of safe gradients, the length of all that are safe, and the unsafe weights.

    Where the rule bounds its steps nothing is looked at; elsewhere off a CPU there is a mask by
    weight in place of these.
    """
    batch, limit, reads = task.batch, LARGEST_SAFE[grad.dtype], reader.is_exact
    is_bounded = not reads and (batch.is_joint or batch.bounded_by is task.options.rule)
    if task.options.nonfinite != "skip" or is_bounded:
        return task.ok, math.inf, [], None
    if reads:
        length = _length_of(grad)
        if length <= limit:  # False for NaN
            return task.ok, length, [], None
    lengths = torch.linalg.vector_norm(grad.reshape(len(task.places), -1), dim=1)
    safe = lengths <= limit
    if not reads:
        return batch.of_each(safe), math.inf, [], safe
    length = float(torch.linalg.vector_norm(lengths[safe]))
    unsafe = list(itertools.compress(task.places, (~safe).tolist()))
    return batch.of_each(safe), length, unsafe, None


def _on_manifold(
    point: Tensor,
    grad: Tensor,
    state: Tensors,
    grad_length: float,
    task: Task,
    reader: Reader,
) -> tuple[Tensor, Tensors, Tensor | None]:
    """Return the point with rounding removed if that is due, and the state that has changed.

    The third value is |X'X - I| of each matrix as it was, ``(k,)``, if one was projected.

    A point that is off the manifold is projected. It is looked at where somebody else has written
    to a parameter, and now and then where numbers may be read: writes to ``.data`` leave no trace.
    """
    batch, sums, correct = task.batch, task.batch.sums, task.options.correct
    # else it is removed behind the step; if the one before was steep, which nobody knew in time,
    # its rounding is still there
    looks = task.is_due and reader.is_exact
    is_due = looks or _VERY_STEEP < reader.steepness < math.inf
    if not (looks or (task.is_changed and has_values(point))):
        return (*(correct(point, state, sums) if is_due else (point, {})), None)
    if looks and sums.are_local:  # with a zero gradient nothing changes: no correction either
        known = grad_length if grad_length < math.inf else float(torch.linalg.vector_norm(grad))
        is_due = known != 0.0
    (gram,) = sums((point, point))
    error, tolerance = identity_error(gram), orthonormality_tolerance(point.dtype, batch.row_count)
    worst = float(error.amax())
    if batch.determinant is not None and task.is_changed and sums.are_local:
        warn_of_sign(point[error <= 10 * tolerance], batch.determinant)
    if worst <= 10 * tolerance:
        new_point, fixed = correct(point, state, sums, gram)
        if is_due or worst > tolerance or is_stale(state, fixed, sums):
            return new_point, fixed, None
        return point, {}, None
    off = ~(error <= 10 * tolerance)
    if sums.are_local:  # X'X may overflow where X does not
        off &= are_finite(point)
    point = point.clone()
    project = partial(polar_factor, determinant=batch.determinant)
    if sums.row_sum is not None:
        project = partial(sums.row_sum.with_all_rows, project)  # type: ignore[attr-defined]
    if bool(off.any()):
        point[off] = project(point[off])
    return (*correct(point, state, sums), error)


# ---- after the rule ------------------------------------------------------------------------------


def _overflowed(new_X: Tensor, sums: Sums, ok: Tensor | None) -> Tensor:
    """Return which matrices are not finite, ``(k, 1, 1)``."""
    lost: Tensor = ~torch.linalg.vector_norm(new_X, dim=(-2, -1), keepdim=True).isfinite()
    if not sums.are_local:  # in the rows of any process; all come here alike
        lost = sums.add(lost.float()) > 0
    return lost if ok is None else lost & ok


def _corrections_after(length: Length | Tensor | float, steepness: float, reader: Reader) -> int:
    """Return how often rounding is to be removed after a step, as far as that can be known."""
    if type(reader) is BlindReader:  # the length of no step is ever known
        return 1
    if isinstance(length, Tensor):
        largest = length
        length = reader.number("length of a step", lambda: largest, Hint(1.0))
    if not isinstance(length, Length):
        return int(not length <= 1)
    if steepness > _VERY_STEEP:
        return 5
    return int(length.limit > 1 or not steepness <= STEEP)  # NaN: such a gradient is discarded


def _shorter(length: Length | Tensor | float, lr: Scalar, most: float) -> Scalar:
    """Return learning rates with eta |X'G| of at most ``most``."""
    if not isinstance(length, Length) or length.inner is None:
        return lr
    size = largest_stretch(length.inner * (lr if length.step is None else length.step))
    return (most / size).clamp(max=1.0) * lr


def _steepness(
    length: Length | Tensor | float, lr: Scalar, grad_length: float, reader: Reader
) -> float:
    """Return about the largest eta |S| of a batch for S = X'G, 0 where it is below a limit.

    The normal part of the gradient overlaps with X by X'(G - X S) = (I - X'X) S: one step
    multiplies the error by 1 + 2 eta |S|, and momentum does so again. Below the first limit eight
    steps cost two digits at the most; beyond the second an error may grow to 1.
    """
    if not isinstance(length, Length) or length.inner is None or type(reader) is BlindReader:
        return 0.0
    inner, step = length.inner, lr if length.step is None else length.step
    bound = length.steepness
    if bound is None and not isinstance(step, Tensor):
        bound = abs(step) * grad_length  # |X'G| <= |G|
    if bound is not None and bound <= STEEP:
        return 0.0
    # Products: the learning rate may be another one when an earlier number is read.
    norm = partial(torch.linalg.vector_norm, inner, dim=(-2, -1), keepdim=True)
    is_sent = not reader.is_exact and length.bound is not None and length.step is None
    hint, sizes = Hint(STEEP), lambda: norm() * abs(step)
    bound = length.steepness
    if bound is None:
        bound = reader.steepness if is_sent else reader.number("norm", sizes, hint)
    if bound <= STEEP:
        reader.forget("stretch")
        return 0.0
    return min(bound, reader.number("stretch", lambda: largest_stretch(inner * step), hint))
