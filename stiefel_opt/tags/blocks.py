"""Constrained ranges of equal shape in several tensors: one batch of matrices, read and written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.tags.manifold import Stiefel


class Block:
    """One constrained range of one of several tensors.

    Args:
        tensor: One like those that are read later.
        manifold: The reading of all of it.
        index: Of the range.
        place: Of the tensor among the others.
        wide: Whether the whole matrices are wide, which the shape of a shard does not say.

    Attributes:
        reading: Of the range by itself.
        is_all: Whether the range is the whole tensor.
        part_shape: Of the range as it is stored.
        lead, shape: Of its matrices, ``(*lead, n, m)``.
    """

    def __init__(
        self, tensor: Tensor, manifold: Stiefel, index: int, place: int, wide: bool | None = None
    ) -> None:
        self.place, self.index, self.is_all = place, index, manifold.rows is None
        part, self.reading = manifold.blocks(tensor)[index]
        self.wide = self.reading.is_wide(part.shape) if wide is None else wide
        if not self.is_all:
            start, stop = manifold.rows[index]  # type: ignore[index, misc]
            self._narrow = manifold.dims(tensor.ndim).rows[0], start, stop - start
        self.part_shape = part.shape
        *lead, n, m = self.matrices(part).shape
        self.lead, self.shape = torch.Size(lead), (n, m)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this range of a tensor, as it is stored."""
        return tensor if self.is_all else tensor.narrow(*self._narrow)

    def matrices(self, part: Tensor, *, stacked: bool = False) -> Tensor:
        """Read the range as tall matrices ``(..., n, m)``, or as our rows of them."""
        return self.reading.matrices(part, stacked=stacked, wide=self.wide)

    def stored(self, matrices: Tensor, shape: torch.Size, *, stacked: bool = False) -> Tensor:
        """Undo :meth:`matrices`."""
        return self.reading.stored(matrices, shape, stacked=stacked, wide=self.wide)

    def read(self, tensor: Tensor) -> Tensor:
        """Return the matrices ``(k, n, m)`` of a tensor: a view where strides allow."""
        return as_batch(self.matrices(self.part(tensor)))

    def as_stored(self, matrices: Tensor) -> Tensor:
        """Undo :meth:`read`, for the range."""
        return self.stored(matrices.reshape(*self.lead, *self.shape), self.part_shape)

    def write(self, tensor: Tensor, matrices: Tensor) -> None:
        """Write matrices ``(k, n, m)`` into a tensor."""
        self.part(tensor).copy_(self.as_stored(matrices))


class Stack:
    """Blocks of ``tensors`` of equal shape, dtype, device, determinant and scale."""

    def __init__(self, blocks: list[Block], tensors: Sequence[Tensor]) -> None:
        self.blocks, reading = blocks, blocks[0].reading
        self.determinant, self.scale = reading.determinant, reading.scale
        # Reading takes several calls: views on these very tensors are kept, where strides allow it.
        own = [tensors[block.place] for block in blocks]
        views = [block.read(tensor) for block, tensor in zip(blocks, own, strict=True)]
        self._views = [
            (tensor if shares_memory(view, tensor) else None, view)
            for tensor, view in zip(own, views, strict=True)
        ]

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the matrices of the blocks in new memory, ``(k, n, m)``; each has its tensor."""
        return torch.cat(
            [
                view if tensors[block.place] is tensor else block.read(tensors[block.place])
                for block, (tensor, view) in zip(self.blocks, self._views, strict=True)
            ]
        )

    def write(self, tensors: Sequence[Tensor], matrices: Tensor) -> None:
        """Write matrices into the tensors of their blocks."""
        for (block, piece), (tensor, view) in zip(self.pieces(matrices), self._views, strict=True):
            if tensors[block.place] is tensor:
                view.copy_(piece)
            else:
                block.write(tensors[block.place], piece)

    def pieces(self, values: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Return each block with its part of a batch."""
        counts = [block.lead.numel() for block in self.blocks]
        return zip(self.blocks, values.split_with_sizes(counts), strict=True)


def stacks_of(tensors: Sequence[Tensor], readings: Sequence[Stiefel | None]) -> list[Stack]:
    """Return the constrained ranges of tensors, those of one kind together."""
    alike: dict[Any, list[Block]] = {}
    for place, (tensor, reading) in enumerate(zip(tensors, readings, strict=True)):
        if reading is None:
            continue
        for index, _ in enumerate(reading.parts(tensor)):
            block = Block(tensor, reading, index, place)
            key = block.shape, tensor.dtype, tensor.device, reading.determinant, reading.scale
            alike.setdefault(key, []).append(block)
    return [Stack(blocks, tensors) for blocks in alike.values()]


def as_batch(matrices: Tensor) -> Tensor:
    """Return ``(..., n, m)`` as ``(k, n, m)``: a view where strides allow."""
    return matrices.unsqueeze(0).flatten(0, -3)


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Say whether one tensor is a view on the memory of the other."""
    return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
