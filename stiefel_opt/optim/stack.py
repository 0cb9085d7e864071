"""Parameters of one shape and reading, stacked, so that one batch of products serves them all."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stiefel_opt.manifold import Stiefel, tall

__all__ = ["Batch", "Stack", "is_small", "state_shapes"]

State = dict[str, Tensor]

# On a CPU a batch should stay in the last-level cache together with its temporaries; on an
# accelerator launches cost more than memory.
_BYTES_ON_CPU: Final = 2**21
_BYTES_ELSEWHERE: Final = 2**28


class Stack:
    """Parameters of one shape, dtype, device and reading, and their state.

    The state of all of them lies in one tensor for each name: one batch of matrices in memory.
    ``optimizer.state`` holds windows on it, shaped like the parameter and with storages of their
    own, so that saving one parameter's state writes only its bytes. A reading that leaves rows
    plain mixes two rules in one tensor: such a parameter is a stack of its own.

    Args:
        parameters: The parameters.
        manifold: How each is read.
        states: ``optimizer.state[p]`` for each; their tensors are replaced by windows.
    """

    def __init__(self, parameters: list[Tensor], manifold: Stiefel, states: list[State]) -> None:
        self.parameters = parameters
        self.manifold = manifold
        self.states = states
        self.versions: list[int] | None = None  # of the parameters after our last write
        self.steps = _stacked([state["step"] for state in states], states, "step")
        self._first = {}
        self.batches: list[Batch] = []
        for index in range(len(manifold.parts(parameters[0]))):
            whole = self._range_state(index)
            self.batches.extend(self._share(index, whole))
        self._first = dict(states[0])

    def intact(self) -> bool:
        """Say whether the states still hold the tensors that this stack gave them."""
        state = self.states[0]
        return state.keys() == self._first.keys() and all(
            state[name] is tensor for name, tensor in self._first.items()
        )

    def untouched(self) -> bool:
        """Say whether nobody wrote to the parameters since our last write."""
        return self.versions == [parameter._version for parameter in self.parameters]

    def note_versions(self) -> None:
        """Remember the parameters as they are now."""
        self.versions = [parameter._version for parameter in self.parameters]

    def _range_state(self, index: int) -> State:
        """Return the state of one range of rows as flat batches, and put windows into states."""
        first = self.states[0]
        flat = {}
        for name in [name for name in first if name != "step"]:
            tensors = [state[name] for state in self.states]
            if is_small(name):
                base, _, suffix = name.partition(".")
                if int(suffix or 0) == index:
                    flat[base] = _flat(_stacked(tensors, self.states, name))
            elif self.manifold.rows is not None:
                part = self.manifold.parts(tensors[0])[index]
                matrices = self.manifold.matrices(part, index)
                if matrices.size(-2) > matrices.size(-1):
                    flat[name] = _flat(matrices)
            else:
                flat[name] = _flat(tall(self._tall_state(tensors, name)))
        return flat

    def _tall_state(self, tensors: list[Tensor], name: str) -> Tensor:
        """Lay tall state out as (count, ..., heads, rows, columns), the order of its matrices."""
        manifold, shape = self.manifold, tensors[0].shape
        matrices = [manifold.matrices(tensor) for tensor in tensors]
        wide = manifold.is_wide(shape)
        whole = torch.stack([matrix.mT if wide else matrix for matrix in matrices])
        windows = [
            manifold.stored(matrix.mT if wide else matrix, shape) for matrix in _windows(whole)
        ]
        for state, window in zip(self.states, windows, strict=True):
            state[name] = window
        return whole

    def _share(self, index: int, flat: State) -> list[Batch]:
        """Cut a range into batches: whole parameters, or some matrices of a single one."""
        part = self.manifold.parts(self.parameters[0])[index]
        matrices = self.manifold.matrices(part, index)
        each = matrices.numel() // (matrices.size(-1) * matrices.size(-2))  # matrices a parameter
        count = len(self.parameters)
        unit = 1 if count == 1 else each
        limit = _BYTES_ON_CPU if part.device.type == "cpu" else _BYTES_ELSEWHERE
        size = unit * matrices.size(-1) * matrices.size(-2) * part.element_size()
        total = each if count == 1 else count
        pieces = -(-total * size // max(limit, size))
        length = -(-total // pieces)
        shares = []
        for low in range(0, total, length):
            high = min(low + length, total)
            state = {name: tensor[low * unit : high * unit] for name, tensor in flat.items()}
            shares.append(Batch(self, index, low, high, state, each))
        return shares


class Batch:
    """Some matrices of a stack, ``(k, n, m)``, with windows on their state.

    Attributes:
        state: ``(k, n, m)`` or ``(k, m, m)`` for each name.
    """

    def __init__(
        self, stack: Stack, index: int, low: int, high: int, state: State, each: int
    ) -> None:
        self._stack, self._index, self._low, self._high = stack, index, low, high
        self._each = each
        self.state = state

    def steps(self) -> Tensor:
        """Return the number of this step for each matrix, ``(k, 1, 1)`` or ``(1, 1, 1)``."""
        steps = self._stack.steps
        if steps.numel() > 1:
            steps = steps[self._low : self._high].repeat_interleave(self._each)
        return steps.view(-1, 1, 1)

    def parameters(self) -> list[Tensor]:
        """Return the parameters that this batch is part of."""
        parameters = self._stack.parameters
        return parameters if len(parameters) == 1 else parameters[self._low : self._high]

    def read(self, tensors: list[Tensor]) -> Tensor:
        """Return the matrices in ``tensors``, one for each of :meth:`parameters`."""
        manifold, index = self._stack.manifold, self._index
        if len(self._stack.parameters) == 1:
            part = manifold.parts(tensors[0])[index]
            return _flat(manifold.matrices(part, index))[self._low : self._high]
        joined = torch.cat(tensors).view(len(tensors), *tensors[0].shape)
        return _flat(manifold.matrices(joined, index, stacked=True))

    def write(self, tensors: list[Tensor], matrices: Tensor) -> None:
        """Put ``matrices`` where :meth:`read` found them."""
        manifold, index = self._stack.manifold, self._index
        if len(self._stack.parameters) == 1:
            part = manifold.parts(tensors[0])[index]
            whole = manifold.matrices(part, index)
            target = _flat(whole)
            target[self._low : self._high].copy_(matrices)
            if target.data_ptr() != part.data_ptr():  # channels_last: no matrix in memory
                part.copy_(manifold.stored(target.view(whole.shape), part.shape, index))
            return
        shape = tensors[0].shape
        lead = manifold.matrices(tensors[0]).shape[:-2]
        batch = matrices.unflatten(0, (len(tensors), *lead))
        stored = manifold.stored(batch, torch.Size((len(tensors), *shape)), stacked=True)
        if stored.device.type == "cpu":
            torch.unbind_copy(stored, out=tensors)
        else:
            torch._foreach_copy_(tensors, list(stored.unbind()))


def state_shapes(
    manifold: Stiefel, shape: torch.Size
) -> tuple[dict[str, torch.Size], torch.Size | None]:
    """Return the shape of the m x m state of each range, by suffix, and that of the tall state.

    Tall state has the shape of the parameter; its plain rows serve the plain rule. It is None where
    every matrix is square and no row is plain: nothing is normal to the point then.
    """
    model = torch.empty(shape, device="meta")
    small, needed = {}, bool(manifold.plain_parts(model))
    for index, part in enumerate(manifold.parts(model)):
        size = manifold.matrices(part, index).shape
        small[f".{index}" if index else ""] = torch.Size((*size[:-2], size[-1], size[-1]))
        needed = needed or size[-2] > size[-1]
    return small, shape if needed else None


def is_small(name: str) -> bool:
    """Say whether state of this name is m x m for each matrix, by the last word of its name."""
    return name.partition(".")[0].endswith(("skew", "factor", "shift"))


def _flat(matrices: Tensor) -> Tensor:
    """Return ``(..., n, m)`` as ``(k, n, m)``: a view where strides allow."""
    return matrices if matrices.ndim == 3 else matrices.reshape(-1, *matrices.shape[-2:])


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
