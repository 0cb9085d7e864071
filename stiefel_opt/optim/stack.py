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
from stiefel_opt.optim.batch import Batch, aliases, as_batch
from stiefel_opt.optim.master import MASTER, follow_
from stiefel_opt.optim.shards import Shards
from stiefel_opt.optim.state import State, is_small

__all__ = ["Stack"]

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
        self._shape = parameters[0].shape  # and p.data = ... this
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
            if torch.compiler.is_compiling():  # it must see one tensor for each memory
                for master, parameter in zip(self.parameters, found, strict=True):
                    follow_(master, parameter)
            else:
                follow_(self.masters, torch.stack(found))
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
        first = self.owners[0]
        return same and first.dtype is self._dtype and first.shape == self._shape

    # ---- building ------------------------------------------------------------------------------

    def _range_state(self, index: int) -> State:
        """Return the state of one range of rows as flat batches, and put windows into states."""
        flat = {}
        for name in [name for name in self.states[0] if name not in ("step", MASTER)]:
            tensors = [state[name] for state in self.states]
            if is_small(name):
                base, _, suffix = name.partition(".")
                if int(suffix or 0) == index:
                    flat[base] = as_batch(_stacked(tensors, self.states, name))
            elif self.manifold.rows is None:
                whole = self._tall_state(tensors, name)
                flat[name] = as_batch(whole.mT if self.wide[index] else whole)
            else:
                window = self.matrices(self.manifold.parts(tensors[0])[index], index)
                if self.sizes[index][0] > self.sizes[index][1]:
                    flat[name] = as_batch(window)
                    if not aliases(flat[name], window):
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
                as_batch(self.matrices(self.manifold.parts(whole[name])[index], index))[share], name
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


def _stacked(tensors: list[Tensor], states: list[State], name: str) -> Tensor:
    """Stack ``tensors`` and leave windows on the stack in ``states``."""
    whole = torch.stack(tensors)
    for state, window in zip(states, _windows(whole), strict=True):
        state[name] = window
    return whole


def _windows(whole: Tensor) -> list[Tensor]:
    """Return ``whole[i]`` for each i as a tensor whose storage ends where it ends."""
    storage = whole.untyped_storage()
    size = storage.nbytes() // whole.size(0)
    return [
        whole.new_empty(0).set_(storage[i * size : (i + 1) * size], 0, item.shape, item.stride())
        for i, item in enumerate(whole)
    ]
