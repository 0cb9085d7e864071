"""What a rule works on: some matrices of a stack, their gradients and windows on their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.functional.finite import Watch
from stiefel_opt.linalg import reads
from stiefel_opt.optim.state import State

if TYPE_CHECKING:
    from stiefel_opt.optim.stack import Stack

__all__ = ["Batch", "Given", "aliases", "as_batch"]


class Given(NamedTuple):
    """What one step gives a rule for a batch of matrices, beside their state and the options.

    Attributes:
        point, grad: X and G, ``(k, n, m)``; only read.
        lr: eta for orthonormal X.
        correct: Whether rounding in X'X and X'U is to be removed; or X'X, if known.
        watch: Looks at the sums of the step; None: nobody does.
    """

    point: Tensor
    grad: Tensor
    lr: float | Tensor
    correct: bool | Tensor
    watch: Watch | None


class Batch:
    """Some matrices of a stack, ``(k, n, m)``, with windows on their state.

    Attributes:
        state: ``(k, n, m)`` or ``(k, m, m)`` for each name.
        deferred: Whether the normal momentum may be one that still has to be put together.
        row_sum: Sum over the processes that share the rows; None: all rows are here.
        members: Whose matrices, of the parameters of the stack.
        row_count: n of the whole matrices.
        matrix_count: k.
    """

    def __init__(
        self, stack: Stack, index: int, members: slice, share: slice, state: State
    ) -> None:
        self._stack, self._index = stack, index
        self.members = members
        self._parameters = stack.parameters[members]
        self.row_sum = stack.row_sum
        self.row_count = stack.sizes[index][0]
        part = stack.manifold.parts(self._parameters[0])[index]
        self._lead = stack.matrices(part, index).shape[:-2]
        self._each = self._lead.numel()
        self._single = len(self._parameters) == 1
        self._share = share  # of the matrices of a single parameter
        self._whole = share == slice(0, self._each)
        start = members.start * self._each + share.start
        stop = start + (len(self._parameters) - 1) * self._each + share.stop - share.start
        self._state = {name: tensor[start:stop] for name, tensor in state.items()}
        self.matrix_count = stop - start
        self.deferred = True
        self._window: Tensor | None = None  # on the matrices of a single parameter
        self._copied = False  # channels_last, or batches of rows: what is read of it is a copy
        self._strides: tuple[int, ...] = ()  # of that parameter

    def renew(self) -> None:
        """Take the parameters of the stack, which are other tensors now."""
        self._parameters = self._stack.parameters[self.members]

    @property
    def state(self) -> State:
        """Return the state of these matrices."""
        if torch.compiler.is_compiling() and self._stack.manifold.rows is not None:
            return self._stack.retraced(self._index, self._share, self._state)
        return self._state

    @property
    def count(self) -> int:
        """How many parameters it holds matrices of."""
        return len(self._parameters)

    def of_each(self, members: Tensor) -> Tensor:
        """Return ``(k, 1, 1)``: for each matrix what ``members`` says of its parameter."""
        return members.repeat_interleave(self.matrix_count // self.count).view(-1, 1, 1)

    def finite_members(self) -> Tensor:
        """Say for each parameter whether its state is finite."""
        finite = torch.ones(self.count, dtype=torch.bool, device=self._parameters[0].device)
        for tensor in self.state.values():  # none for descent without momentum
            finite &= tensor.isfinite().all(dim=-1).all(dim=-1).view(self.count, -1).all(dim=-1)
        return finite

    def restart(self, members: Tensor) -> None:
        """Make the state of these parameters that of a first step.

        A rule that was stopped has left the new momentum as it is; nothing of it is deferred.
        """
        self._stack.steps[self.members] = torch.where(members, 1, self._stack.steps[self.members])
        theirs = self.of_each(members)
        for name, tensor in self.state.items():
            if name.startswith("deferred"):
                tensor.zero_()
            else:
                tensor.masked_fill_(theirs, 0.0)
            if name == "deferred_factor":
                tensor.diagonal(dim1=-2, dim2=-1).fill_(1.0)

    def step_number(self) -> float | Tensor:
        """Return the number of this step: one for all, or ``(k, 1, 1)``."""
        if self._stack.number is not None:
            return self._stack.number
        numbers = self._stack.steps[self.members]
        return numbers.repeat_interleave(1 if self._single else self._each).view(-1, 1, 1)

    def point(self) -> Tensor:
        """Return the matrices of the parameters."""
        if torch.compiler.is_compiling():
            return self._read(self._parameters)
        window = self._window
        if window is not None and self._fits(window):
            return window
        matrices = self._read(self._parameters)
        parameter = self._parameters[0]
        if self._single and self._whole and aliases(matrices, parameter):
            self._window, self._strides = matrices, parameter.stride()
        return matrices

    def grad(self) -> Tensor:
        """Return the matrices of their gradients."""
        grad = self._stack.grads[self.members.start]
        window = None if torch.compiler.is_compiling() else self._window
        if window is not None and grad.stride() == self._strides and not grad.is_complex():
            # as the window lies in the parameter, from its first number on
            matrices: Tensor = grad.as_strided(window.size(), window.stride())
        else:
            matrices = self._read(self._stack.grads[self.members])
        return matrices if self._stack.masters is None else matrices.float()

    def write(self, matrices: Tensor) -> None:
        """Put new ``matrices`` into the parameters."""
        manifold, index, targets = self._stack.manifold, self._index, self._parameters
        compiling = torch.compiler.is_compiling()
        if not compiling and self._window is not None and self._fits(self._window):
            self._window.copy_(matrices)
            return
        if self._single:
            part = manifold.parts(targets[0])[index]
            whole = self._stack.matrices(part, index)
            target = as_batch(whole)
            (target if self._whole else target[self._share]).copy_(matrices)
            if not compiling:
                self._copied = not aliases(target, part)
            if self._copied:
                back = manifold.stored(
                    target.view(whole.shape), part.shape, index, wide=self._stack.wide[index]
                )
                part.copy_(back)
            return
        count = len(targets)
        batch = matrices.reshape(count, *self._lead, *matrices.shape[1:])
        shape = torch.Size((count, *targets[0].shape))
        stored = manifold.stored(batch, shape, stacked=True, wide=self._stack.wide[index])
        if reads(stored):
            torch.unbind_copy(stored, out=targets)
        else:
            torch._foreach_copy_(targets, list(stored.unbind()))

    def _fits(self, window: Tensor) -> bool:
        """Say whether the window still shows the parameter, whose ``.data`` may be another."""
        parameter = self._parameters[0]
        return aliases(window, parameter) and parameter.stride() == self._strides

    def _read(self, tensors: list[Tensor]) -> Tensor:
        stack, index = self._stack, self._index
        if self._single:
            part = stack.manifold.parts(tensors[0])[index]
            matrices = as_batch(stack.matrices(part, index))
            return matrices if self._whole else matrices[self._share]
        joined = torch.cat(tensors).reshape(len(tensors), *tensors[0].shape)
        return as_batch(stack.matrices(joined, index, stacked=True))


def as_batch(matrices: Tensor) -> Tensor:
    """Return ``(..., n, m)`` as ``(k, n, m)``: a view where strides allow."""
    if matrices.ndim == 2:
        return matrices.unsqueeze(0)
    return matrices if matrices.ndim == 3 else matrices.flatten(0, -3)


def aliases(tensor: Tensor, other: Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr()
