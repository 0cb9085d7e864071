"""Steps that a bad gradient cannot spoil: such a parameter is left as it was, the others move."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from stiefel_opt.functional.finite import UnsafeSumError, Watch, largest_safe
from stiefel_opt.linalg import reads
from stiefel_opt.optim.batch import Batch
from stiefel_opt.optim.master import state_dtype
from stiefel_opt.optim.readings import Group, name_of
from stiefel_opt.optim.stack import Stack

__all__ = ["is_safe", "step_safely", "warn_of_skipped", "warn_of_tallies"]


class Move(Protocol):
    """The rule: returns the new matrices of a batch and updates its state."""

    def __call__(self, batch: Batch, watch: Watch | None = None) -> Tensor: ...


def is_safe(grad: Tensor) -> bool:
    """Say whether a gradient is finite and its square as well; waits for the device."""
    dtype = state_dtype(grad.dtype)
    return bool(torch.linalg.vector_norm(grad, dtype=dtype) <= largest_safe(dtype))


def step_safely(
    stack: Stack, move: Move, move_rows: Callable[[], None] | None, *, write: bool
) -> list[Tensor]:
    """Move a stack; return the parameters that were left as they were, where that may be read.

    What is looked at are sums that the step needs anyway. Where they can be read they stop it
    before anything has changed; elsewhere it is undone for the matrices that they condemn.

    Args:
        stack: The parameters.
        move: The rule for batches of matrices.
        move_rows: The rule for plain rows, where there are any.
        write: Whether parameters change.
    """
    readable = reads(stack.steps)
    if not readable or (stack.scattered and stack.row_sum is not None):
        bad = _step_and_undo(stack, move, move_rows, write)
        # Without a look a start that is not projected would be taken for one that is.
        looks = readable or (stack.fresh and not torch.compiler.is_compiling())
        return _listed(stack, bad) if looks else []
    if stack.scattered and not is_safe(stack.grads[0]):  # no batch tells about the others
        return _skip(stack, slice(0, 1), torch.ones(1, dtype=torch.bool))
    skipped: list[Tensor] = []
    moved: list[tuple[Batch, Tensor]] = []
    for batch in stack.batches:
        try:
            moved.append((batch, move(batch, Watch(reads=True))))
        except UnsafeSumError as error:
            if move_rows is not None:  # ranges of one parameter: none of them is written
                moved = []
                skipped = _restart(stack, stack.batches)
                break
            if error.changed:
                skipped += _restart(stack, [batch])
            else:
                skipped += _step_the_others(stack, batch, move, write)
        if move_rows is None:
            _write(moved, write)
    _write(moved, write)
    if move_rows is not None and not skipped:
        move_rows()
    return skipped


def _write(moved: list[tuple[Batch, Tensor]], write: bool) -> None:
    while moved:
        batch, new_point = moved.pop()
        if write:
            batch.write(new_point)


def _restart(stack: Stack, batches: list[Batch]) -> list[Tensor]:
    """Return the parameters for which a step overflowed after it had changed their momenta.

    These start again from none. The others have theirs, at a point that this step leaves.
    """
    members = batches[0].members
    bad = _unsafe_members(stack, batches[0])
    for batch in batches:
        finite = batch.finite_members()
        if batch.row_sum is not None:
            finite = batch.row_sum((~finite).float()) == 0
        bad |= ~finite
    if not bool(bad.any()):  # nobody is to blame alone
        bad = torch.ones_like(bad)
    for batch in batches:
        batch.restart(bad)
    return _skip(stack, members, bad)


def _unsafe_members(stack: Stack, batch: Batch) -> Tensor:
    """Say for each parameter of a batch whether its gradient is not safe; processes agree."""
    bad = torch.tensor([not is_safe(grad) for grad in stack.grads[batch.members]])
    return bad if batch.row_sum is None else batch.row_sum(bad.float()) > 0


def _step_the_others(stack: Stack, batch: Batch, move: Move, write: bool) -> list[Tensor]:
    """Move a batch but for the parameters whose gradient is not safe; return those."""
    grads = stack.grads[batch.members]
    bad = _unsafe_members(stack, batch)
    if not bool(bad.any()):  # the point is to blame: published flows may leave the manifold far
        bad = torch.ones_like(bad)
    if not bool(bad.all()):
        for index in bad.nonzero().flatten().tolist():
            stack.grads[batch.members.start + index] = torch.zeros_like(grads[index])
        kept = {name: tensor.clone() for name, tensor in batch.state.items()}
        point, theirs = batch.point(), batch.of_each(bad)
        new_point = torch.where(theirs, point, move(batch))
        for name, tensor in batch.state.items():
            tensor.copy_(torch.where(theirs, kept[name], tensor))
        if write:
            batch.write(new_point)
    return _skip(stack, batch.members, bad)


def _step_and_undo(
    stack: Stack, move: Move, move_rows: Callable[[], None] | None, write: bool
) -> Tensor:
    """Move a stack, undo it for the parameters whose sums were not finite, and return which.

    No value is read for it.
    """
    whole: list[tuple[Tensor, Tensor]] = []  # what else changes where rows are plain
    if move_rows is not None:
        tensors = [stack.parameters[0], *(t for n, t in stack.states[0].items() if n != "step")]
        whole = [(tensor, tensor.clone()) for tensor in tensors]
    moved, found = [], []
    for batch in stack.batches:
        kept = {name: tensor.clone() for name, tensor in batch.state.items()}
        watch = Watch(reads=False)
        moved.append((batch, kept, move(batch, watch)))
        if watch.finite is not None:
            found.append(watch.finite.view(batch.count, -1).all(dim=-1))
    if not found:  # none of the matrices is here
        if move_rows is not None:
            move_rows()
        return torch.zeros_like(stack.skipped, dtype=torch.bool)
    # Batches hold other parameters each, or parts of the same one.
    good = torch.stack(found).all(dim=0) if stack.scattered else torch.cat(found)
    if move_rows is not None and stack.row_sum is None:  # the plain rows are in no sum
        size = torch.linalg.vector_norm(stack.grads[0], dtype=state_dtype(stack.grads[0].dtype))
        good = good & (size <= largest_safe(size.dtype))
    for batch, kept, new_point in moved:
        ours = batch.of_each(good[batch.members])
        for name, tensor in batch.state.items():
            tensor.copy_(torch.where(ours, tensor, kept[name]))
        if write:
            batch.write(torch.where(ours, new_point, batch.point()))
    if move_rows is not None:
        move_rows()
        for tensor, earlier in whole:
            tensor.copy_(torch.where(good, tensor, earlier))
    stack.skip(slice(0, len(stack.owners)), ~good)
    return ~good


def _skip(stack: Stack, members: slice, which: Tensor) -> list[Tensor]:
    stack.skip(members, which)
    return _listed(stack, which, members)


def _listed(stack: Stack, which: Tensor, members: slice = slice(None)) -> list[Tensor]:
    return [p for p, missed in zip(stack.owners[members], which.tolist(), strict=True) if missed]


def warn_of_skipped(parameters: list[Tensor], groups: list[Group]) -> None:
    """Say which parameters were left as they were."""
    for parameter in parameters:
        _warn(f"{name_of(parameter, groups)} of shape {tuple(parameter.shape)}")


def warn_of_tallies(tallies: Mapping[str, int], told: int) -> int:
    """Say which parameters missed steps if some did since ``told`` steps; return their number."""
    total = sum(tallies.values())
    if total > told:
        _warn(", ".join(f"{name} ({count} steps)" for name, count in tallies.items()))
    return total


def _warn(who: str) -> None:
    warnings.warn(
        f"The gradient of {who}, or the step it made, was not finite: point, momentum and step "
        "stay as they were, or the momentum starts again if it overflowed. "
        "Look for its cause; nonfinite='raise' stops there, 'ignore' looks at nothing.",
        stacklevel=4,
    )
