"""Parameters of one shape and reading, stacked, so that one batch of products serves them all."""

from __future__ import annotations

import functools
import math
import operator
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stiefel_opt.linalg import reads
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.master import MASTER, follow_
from stiefel_opt.optim.shards import Shards
from stiefel_opt.optim.state import State, is_small

__all__ = ["Batch", "Stack"]

# On a CPU a batch should stay in the last-level cache together with its temporaries; on an
# accelerator launches cost more than memory.
_BYTES_ON_CPU: Final = 2**22
_BYTES_ELSEWHERE: Final = 2**28
# Above this a stack is cut so that temporaries stay below three times its parameters.
_BYTES_WITHOUT_CARE: Final = 2**20
# On a CPU, joining parameters of at least this size costs more than calling the rule for each.
_BYTES_ALONE: Final = 2**20


class Stack:
    """Parameters of one shape, dtype, device and reading, and their state.

    Half-precision parameters are only what a step shows; in it their masters stand for them.

    The state of all of them lies in one tensor for each name: one batch of matrices in memory.
    ``optimizer.state`` holds windows on it, shaped like the parameter and with storages of their
    own, so that saving one parameter's state writes only its bytes. A reading that leaves rows
    plain mixes two rules in one tensor: such a parameter is a stack of its own.

    Args:
        parameters: The parameters.
        manifold: How each is read.
        states: ``optimizer.state[p]`` for each; their tensors are replaced by windows.
        shards: How the parameters are shared out over processes. What is stacked is then our part
            of parameters, gradients and state.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        manifold: Stiefel,
        states: list[State],
        shards: Shards | None = None,
    ) -> None:
        if parameters[0].device.type == "cpu":
            _settle_allocator()
        self.owners = parameters  # what the user sees
        self._dtype = parameters[0].dtype  # model.to(dtype) may change it
        self.sizes = [size for size, _ in _sizes(manifold, parameters[0].shape)]  # of all rows
        self.wide = [wide for _, wide in _sizes(manifold, parameters[0].shape)]
        self.manifold = manifold
        self.shards = shards
        self.row_sum = None if shards is None else shards.row_sum
        shown = states
        if shards is not None:
            self.manifold = manifold = shards.manifold
            parameters = [shards.local(parameter) for parameter in parameters]
            states = [{name: _own(tensor) for name, tensor in state.items()} for state in shown]
        self.states = states
        self.masters = None  # half-precision parameters round what moves: (count, *shape)
        if MASTER in states[0]:
            self.masters = _stacked([state[MASTER] for state in states], states, MASTER)
            parameters = [state[MASTER] for state in states]
        self.parameters = parameters  # what moves
        self.grads: list[Tensor] = []
        self.versions: list[int] | None = None  # of the parameters after our last write
        self.fresh = True  # somebody else wrote to the parameters since then
        self.steps = _stacked([state["step"] for state in states], states, "step")
        self.number: float | None = None  # the step's number where all have the same, on a CPU
        self._one = torch.ones_like(self.steps[0])  # a number costs five times as much to add
        self.skipped = torch.zeros(len(states), dtype=torch.int64, device=self.steps.device)
        self._windowed: set[tuple[str, int]] = set()  # state of ranges that is a window on it
        self._apart: list[tuple[Tensor, Tensor]] = []  # state that is no batch in memory, its copy
        self.batches: list[Batch] = []
        for index in range(len(manifold.parts(parameters[0]))):
            self.batches.extend(self._cut(index, self._range_state(index)))
        if shards is not None:
            for state, others in zip(shown, states, strict=True):
                for name, window in others.items():
                    state[name] = shards.like(window, state[name])
        self._names = list(shown[0])
        self._windows = [state[name] for state in shown for name in self._names]
        self._shown = shown

    # ---- one step ------------------------------------------------------------------------------

    def skip(self, members: slice, which: Tensor) -> None:
        """Take back the count of this step for ``which`` of the members, and tally it."""
        self.steps[members].sub_(which.to(self.steps.dtype))
        self.skipped[members].add_(which)

    @property
    def scattered(self) -> bool:
        """Whether one parameter, then the only one, is spread over several batches."""
        return len(self.parameters) == 1 and (
            len(self.batches) > 1 or self.manifold.rows is not None
        )

    def take(self, grads: list[Tensor]) -> None:
        """Set the gradients of this step."""
        self.grads = grads
        if self.shards is not None:
            self.grads = [self.shards.local(grad) for grad in grads]

    def advance(self) -> None:
        """Count a step."""
        found = self.owners
        if self.shards is not None:
            found = [self.shards.local(parameter) for parameter in found]
        if self.masters is not None:
            follow_(self.masters, found)
        elif self.shards is not None:
            self.parameters = found
            for batch in self.batches:
                batch.renew()
        self.steps.add_(self._one)
        for window, copy in self._apart:
            copy.copy_(window.reshape(copy.shape))
        self.number = None
        if reads(self.steps):
            if len(self.states) == 1:
                self.number = self.steps.item()
            else:
                numbers = self.steps.tolist()
                self.number = numbers[0] if min(numbers) == max(numbers) else None

    def due(self, period: int) -> bool:
        """Say whether some parameter takes its step number 0 modulo ``period``."""
        if self.number is not None:
            return self.number % period == 0
        return bool((self.steps.remainder(period) == 0).any())

    def finish(self, *, written: bool, all_of_them: bool = True) -> None:
        """End a step; ``written``: the parameters, or not ``all_of_them``, are what it wrote."""
        for window, copy in self._apart:
            window.copy_(copy.view(window.shape))
        self.grads = []
        if not written:
            return
        if self.masters is not None and self.shards is None:
            torch._foreach_copy_(self.owners, self.parameters)
        if self.shards is not None:
            for owner, parameter in zip(self.owners, self.parameters, strict=True):
                self.shards.write(owner, parameter)
        if not torch.compiler.is_compiling():
            # One that was left as it was may still be off the manifold.
            self.versions = self._versions() if all_of_them else None

    def untouched(self) -> bool:
        """Say whether nobody wrote to the parameters since our last write, and remember it."""
        self.fresh = self.versions != self._versions()
        if self.shards is not None and not self.shards.alike:
            self.fresh = self.shards.any(self.fresh)  # a process without rows sees no change
        return not self.fresh

    def _versions(self) -> list[int]:
        """Return what changes when a parameter is written to, or its ``.data`` replaced."""
        tensors = list(map(_own, self.owners)) if self.shards is not None else self.owners
        versions = [tensor._version for tensor in tensors]
        return versions + [tensor.data_ptr() for tensor in tensors]

    def intact(self) -> bool:
        """Say whether the states still hold the tensors that this stack gave them."""
        try:
            found = [state[name] for state in self._shown for name in self._names]
        except KeyError:
            return False
        same = all(map(operator.is_, found, self._windows))
        return same and self.owners[0].dtype is self._dtype

    # ---- building ------------------------------------------------------------------------------

    def _range_state(self, index: int) -> State:
        """Return the state of one range of rows as flat batches, and put windows into states."""
        flat = {}
        for name in [name for name in self.states[0] if name not in ("step", MASTER)]:
            tensors = [state[name] for state in self.states]
            if is_small(name):
                base, _, suffix = name.partition(".")
                if int(suffix or 0) == index:
                    flat[base] = _flat(_stacked(tensors, self.states, name))
            elif self.manifold.rows is None:
                whole = self._tall_state(tensors, name)
                flat[name] = _flat(whole.mT if self.wide[index] else whole)
            else:
                window = self.matrices(self.manifold.parts(tensors[0])[index], index)
                if self.sizes[index][0] > self.sizes[index][1]:
                    flat[name] = _flat(window)
                    if not _aliases(flat[name], window):
                        self._apart.append((window, flat[name]))
                    else:
                        self._windowed.add((name, index))
                    flat[name] = self._as_moment(flat[name], name)
        return flat

    def _as_moment(self, tensor: Tensor, name: str) -> Tensor:
        """Return second moments as real numbers: torch keeps complex ones for complex rows."""
        return tensor.real if "exp_avg_sq" in name else tensor

    def retraced(self, index: int, share: slice, state: State) -> State:
        """Return ``state`` of a share of a range with windows on the parameter's state made again.

        A compiler is told of one tensor for each memory that it writes to.
        """
        (whole,) = self.states
        return {
            name: self._as_moment(
                _flat(self.matrices(self.manifold.parts(whole[name])[index], index))[share], name
            )
            if (name, index) in self._windowed
            else tensor
            for name, tensor in state.items()
        }

    def _tall_state(self, tensors: list[Tensor], name: str) -> Tensor:
        """Lay tall state out as (count, ..., heads, rows, columns), the order of its matrices."""
        manifold, shape = self.manifold, tensors[0].shape
        matrices = [self.matrices(tensor) for tensor in tensors]
        wide = self.wide[0]
        whole = torch.stack([matrix.mT if wide else matrix for matrix in matrices])
        for state, window in zip(self.states, _windows(whole), strict=True):
            state[name] = manifold.stored(window.mT if wide else window, shape, wide=wide)
        return whole

    def matrices(self, part: Tensor, index: int = 0, *, stacked: bool = False) -> Tensor:
        """Read range ``index`` as tall matrices ``(..., n, m)``, or as our rows of such."""
        return self.manifold.matrices(part, index, stacked=stacked, wide=self.wide[index])

    def _cut(self, index: int, flat: State) -> list[Batch]:
        """Cut a range into batches: some whole parameters, or some matrices of a single one."""
        part = self.manifold.parts(self.parameters[0])[index]
        lead = self.matrices(part, index).shape[:-2]
        count, each = len(self.parameters), lead.numel()
        if self.row_sum is not None:  # one sum for all, and as many on every process
            return [Batch(self, index, slice(0, count), slice(0, each), flat)]
        if part.numel() == 0:
            return []
        on_cpu = part.device.type == "cpu"
        size = part.numel() * part.element_size()
        if on_cpu and count > 1 and size >= _BYTES_ALONE:
            members = [slice(i, i + 1) for i in range(count)]
        elif count > 1:
            members = _slices(count, self._length(index, count * size, count, on_cpu))
        else:
            shares = _slices(each, self._length(index, size, each, on_cpu))
            return [Batch(self, index, slice(0, 1), share, flat) for share in shares]
        return [Batch(self, index, member, slice(0, each), flat) for member in members]

    def _length(self, index: int, size: int, count: int, on_cpu: bool) -> int:
        """Return how many of ``count`` things of ``size`` bytes in all make one batch."""
        n, m = self.sizes[index]
        pieces = -(-size // (_BYTES_ON_CPU if on_cpu else _BYTES_ELSEWHERE))
        if size > _BYTES_WITHOUT_CARE:  # measured in steps of Adam; joining copies X and G
            joined = len(self.parameters) > 1
            alone = 4 if n == m else 3 + 8 * m / n
            temporaries = alone + (3 if n == m else 2) * joined
            pieces = max(pieces, math.ceil(temporaries / 3))
        return -(-count // min(pieces, count))


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
        found = [
            tensor.isfinite().all(dim=-1).all(dim=-1).view(self.count, -1).all(dim=-1)
            for tensor in self.state.values()
        ]
        return torch.stack(found).all(dim=0)

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
        if self._single and self._whole and _aliases(matrices, parameter):
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
            target = _flat(whole)
            (target if self._whole else target[self._share]).copy_(matrices)
            if not compiling:
                self._copied = not _aliases(target, part)
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
        return _aliases(window, parameter) and parameter.stride() == self._strides

    def _read(self, tensors: list[Tensor]) -> Tensor:
        stack, index = self._stack, self._index
        if self._single:
            part = stack.manifold.parts(tensors[0])[index]
            matrices = _flat(stack.matrices(part, index))
            return matrices if self._whole else matrices[self._share]
        joined = torch.cat(tensors).reshape(len(tensors), *tensors[0].shape)
        return _flat(stack.matrices(joined, index, stacked=True))


def _sizes(manifold: Stiefel, shape: torch.Size) -> list[tuple[tuple[int, int], bool]]:
    """Return for each range of rows n and m of its matrices, and whether they are wide."""
    found = []
    for index, part in enumerate(manifold.parts(torch.empty(shape, device="meta"))):
        n, m = manifold.matrices(part, index).shape[-2:]
        found.append(((n, m), manifold.is_wide(part.shape, index)))
    return found


def _own(tensor: Tensor) -> Tensor:
    """Return our part of a tensor, which may be all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _slices(count: int, length: int) -> list[slice]:
    """Cut ``range(count)`` into slices of ``length``; the last may be shorter."""
    return [slice(low, min(low + length, count)) for low in range(0, count, length)]


@functools.lru_cache(maxsize=1)
def _settle_allocator() -> None:
    """Let glibc keep blocks of a few MB instead of returning them to the system at every free.

    It raises its threshold when a larger block is freed; without that each temporary of a step is
    faulted in page by page again, which for small matrices costs more than the arithmetic.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def _flat(matrices: Tensor) -> Tensor:
    """Return ``(..., n, m)`` as ``(k, n, m)``: a view where strides allow."""
    if matrices.ndim == 2:
        return matrices.unsqueeze(0)
    return matrices if matrices.ndim == 3 else matrices.flatten(0, -3)


def _stacked(tensors: list[Tensor], states: list[State], name: str) -> Tensor:
    """Stack ``tensors`` and leave windows on the stack in ``states``."""
    whole = torch.stack(tensors)
    for state, window in zip(states, _windows(whole), strict=True):
        state[name] = window
    return whole


def _aliases(tensor: Tensor, other: Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr()


def _windows(whole: Tensor) -> list[Tensor]:
    """Return ``whole[i]`` for each i as a tensor whose storage ends where it ends."""
    storage = whole.untyped_storage()
    size = storage.nbytes() // whole.size(0)
    return [
        whole.new_empty(0).set_(storage[i * size : (i + 1) * size], 0, item.shape, item.stride())
        for i, item in enumerate(whole)
    ]
