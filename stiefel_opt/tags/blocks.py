"""Constrained ranges of equal shape in several tensors: one batch of matrices, read and written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.numerics.device import has_values
from stiefel_opt.tags.manifold import Stiefel


class Block:
    """A constrained range of one of several tensors: ``count`` matrices, ``(k, n, m)``."""

    def __init__(self, place: int, tensor: Tensor, reading: Stiefel, index: int) -> None:
        self.place = place  # of the tensor among the others
        self.is_all = reading.rows is None  # the range is the whole tensor
        self._reading, self._index = reading, index
        part = self._part(tensor)
        matrices = reading.matrices(part, index)
        self._stored, self._shape = part.shape, matrices.shape
        self.count = math.prod(self._shape[:-2])
        # Reading takes several calls: the view on this very tensor is kept, where strides allow it.
        self._view = as_batch(matrices)
        self._viewed = tensor if shares_memory(self._view, tensor) else None

    def read(self, tensor: Tensor) -> Tensor:
        """Return the matrices of a tensor like the one that it was made of, perhaps as a view."""
        if tensor is self._viewed:
            return self._view
        return as_batch(self._reading.matrices(self._part(tensor), self._index))

    def stored(self, matrices: Tensor) -> Tensor:
        """Undo :meth:`read`, for the range."""
        return self._reading.stored(matrices.reshape(self._shape), self._stored, self._index)

    def write(self, tensor: Tensor, matrices: Tensor) -> None:
        """Write matrices into a tensor like the one that it was made of."""
        if tensor is self._viewed:
            self._view.copy_(matrices)
        else:
            self._part(tensor).copy_(self.stored(matrices))

    def _part(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_all else self._reading.parts(tensor)[self._index]


class Stack:
    """Blocks of equal shape, dtype, device, determinant and scale."""

    def __init__(self, blocks: list[Block], determinant: int | None, scale: float) -> None:
        self.blocks, self.determinant, self.scale = blocks, determinant, scale

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matrices of the blocks in new memory, ``(k, n, m)``; each has its tensor."""
        return torch.cat([block.read(tensors[block.place]) for block in self.blocks])

    def write(self, tensors: Sequence[Tensor], matrices: Tensor) -> None:
        """Write matrices into the tensors of their blocks."""
        for block, piece in self.pieces(matrices):
            block.write(tensors[block.place], piece)

    def pieces(self, values: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Return each block with its part of a batch."""
        counts = [block.count for block in self.blocks]
        return zip(self.blocks, values.split_with_sizes(counts), strict=True)


def stacks_of(tensors: Sequence[Tensor], readings: Sequence[Stiefel | None]) -> list[Stack]:
    """Return the constrained ranges of tensors, those of one kind together."""
    alike: dict[Any, list[Block]] = {}
    for place, (tensor, reading) in enumerate(zip(tensors, readings, strict=True)):
        if reading is None:
            continue
        for index, part in enumerate(reading.parts(tensor)):
            shape = reading.matrices(part, index).shape[-2:]
            key = shape, tensor.dtype, tensor.device, reading.determinant, reading.scale
            alike.setdefault(key, []).append(Block(place, tensor, reading, index))
    return [Stack(blocks, *key[-2:]) for key, blocks in alike.items()]


def as_batch(matrices: Tensor) -> Tensor:
    """Return ``(..., n, m)`` as ``(k, n, m)``: a view where strides allow."""
    if matrices.ndim == 2:
        return matrices.unsqueeze(0)
    return matrices if matrices.ndim == 3 else matrices.flatten(0, -3)


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Say whether one tensor is a view on the memory of the other."""
    if not has_values(tensor):
        return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
