"""Steps that a bad gradient cannot spoil: such a parameter is left as it was, the others move."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from stiefel_opt.functional.finite import UnsafeSumError, Watch, largest_safe
from stiefel_opt.linalg import reads
from stiefel_opt.optim.master import state_dtype
from stiefel_opt.optim.readings import Group, name_of
from stiefel_opt.optim.stack import Batch, Stack

__all__ = ["is_safe", "step_safely", "warn_of_skipped", "warn_of_tallies"]


class Move(Protocol):
    """The rule: returns the new matrices of a batch and updates its state."""

    def __call__(self, batch: Batch, watch: Watch | None = None) -> Tensor: ...


def is_safe(grad: Tensor) -> bool:
    """Say whether a gradient is finite and its square as well; waits for the device."""
    dtype = state_dtype(grad.dtype)
    return bool(torch.linalg.vector_norm(grad, dtype=dtype) <= largest_safe(dtype))


def step_safely(stack: Stack, move: Move, *, write: bool) -> list[Tensor]:
    """Move a stack; return the parameters that were left as they were, where that may be read.

    What is looked at are sums that the step needs anyway. Where they can be read they stop it
    before anything has changed; elsewhere it is undone for the matrices that they condemn.
    """
    if not reads(stack.steps):
        _step_and_undo(stack, move, write)
        return []
    if stack.scattered:  # no batch tells about the others
        (grad,) = stack.grads
        safe = is_safe(grad)
        if not (safe if stack.shards is None else not stack.shards.any(not safe)):
            return _skip(stack, slice(0, 1), torch.ones(1, dtype=torch.bool))
    skipped: list[Tensor] = []
    for batch in stack.batches:
        try:
            new_point = move(batch, None if stack.scattered else Watch(reads=True))
        except UnsafeSumError as error:
            if error.changed:
                batch.restart()
                skipped += _skip(stack, batch.members, torch.ones(batch.count, dtype=torch.bool))
            else:
                skipped += _step_the_others(stack, batch, move, write)
            continue
        if write:
            batch.write(new_point)
    return skipped


def _step_the_others(stack: Stack, batch: Batch, move: Move, write: bool) -> list[Tensor]:
    """Move a batch but for the parameters whose gradient is not safe; return those."""
    grads = stack.grads[batch.members]
    bad = torch.tensor([not is_safe(grad) for grad in grads])
    if batch.row_sum is not None:
        bad = batch.row_sum(bad.float()) > 0
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


def _step_and_undo(stack: Stack, move: Move, write: bool) -> None:
    """Move a stack, and undo it for the parameters whose sums were not finite: no value is read."""
    moved, found = [], []
    for batch in stack.batches:
        kept = {name: tensor.clone() for name, tensor in batch.state.items()}
        watch = Watch(reads=False)
        moved.append((batch, kept, move(batch, watch)))
        if watch.finite is not None:
            found.append(watch.finite.view(batch.count, -1).all(dim=-1))
    if not found:  # none of the matrices is here
        return
    # Batches hold other parameters each, or parts of the same one.
    good = torch.stack(found).all(dim=0) if stack.scattered else torch.cat(found)
    for batch, kept, new_point in moved:
        ours = batch.of_each(good[batch.members])
        for name, tensor in batch.state.items():
            tensor.copy_(torch.where(ours, tensor, kept[name]))
        if write:
            batch.write(torch.where(ours, new_point, batch.point()))
    stack.skip(slice(0, len(stack.owners)), ~good)


def _skip(stack: Stack, members: slice, which: Tensor) -> list[Tensor]:
    stack.skip(members, which)
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
        f"The gradient of {who} was not finite: point, momentum and step stay as they were. "
        "Look for its cause; nonfinite='raise' stops there, 'ignore' looks at nothing.",
        stacklevel=4,
    )
