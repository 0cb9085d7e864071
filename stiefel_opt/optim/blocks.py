"""Equal blocks of the parameters of a group, stacked: one batch of products serves them all.

A block is one constrained range of one parameter. The state of a stack lies in one tensor for each
name; ``optimizer.state`` holds windows on it, shaped like the range and with storages of their own,
so that saving one parameter's state writes only its bytes. A stack belongs to the group, not to the
gradients of one step: blocks without a gradient are left out of a step by an index.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.device import is_cpu
from stiefel_opt.distributed import local_part
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.sharding import Shards, placed
from stiefel_opt.optim.state import MASTER, ROWS, State, is_kept, is_small, suffix_of

# On a CPU a batch should stay in the last-level cache together with its temporaries; on an
# accelerator launches cost more than memory.
_BYTES_ON_CPU: Final = 2**22
_BYTES_ELSEWHERE: Final = 2**28
# Above this a stack is cut so that temporaries stay below one and a half times its parameters.
_BYTES_WITHOUT_CARE: Final = 2**20
_TEMPORARIES: Final = 1.5
# On a CPU, joining blocks of at least this size costs more than calling the rule for each.
_BYTES_ALONE: Final = 2**20


@dataclass(eq=False)
class Owner:
    """A constrained parameter."""

    parameter: Tensor  # what the user sees
    manifold: Stiefel  # how all of it is read
    state: State
    shards: Shards | None  # how it is shared out over processes, if it is
    place: int  # its number among the constrained parameters of the group on its device

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.parameter.shape, self.parameter.dtype
        self.kind = self.shape, self.dtype, torch.strided  # of a gradient
        self._device = self.parameter.device

    def is_same(self) -> bool:
        """Say whether the parameter has the shape, dtype and device that it had."""
        own = self.parameter
        return own.shape == self.shape and own.dtype is self.dtype and own.device == self._device

    @property
    def local_manifold(self) -> Stiefel:
        """How what this process has of it is read."""
        return self.manifold if self.shards is None else self.shards.manifold

    def local(self) -> Tensor:
        """Return the parameter, or our shard of it in the layout in which a step works."""
        return self.parameter if self.shards is None else self.shards.local(self.parameter)

    def local_rows(self, tensor: Tensor) -> Tensor:
        """Return our part of the state of plain rows; a step count is the same everywhere."""
        if self.shards is None or tensor.ndim == 0:
            return tensor
        return local_part(placed(tensor, self.shards.mesh, self.shards.working))

    def shown_rows(self, tensor: Tensor, index: int) -> Tensor:
        """Return state of plain rows as the user sees it, of the shape of those rows."""
        if self.shards is None or tensor.ndim == 0:
            return tensor
        model = torch.empty(self.shape, device="meta")
        return self.shards.like_whole(tensor, self.manifold.plain_parts(model)[index].contiguous())

    def moving(self) -> Tensor:
        """Return the tensor that moves: the parameter, our shard of it, or its master."""
        if MASTER in self.state:
            return local_part(self.state[MASTER])
        return self.local()


@dataclass(eq=False)
class Block:
    """One constrained range of a parameter."""

    owner: Owner
    index: int  # of the range
    reading: Stiefel  # of the range by itself
    wide: bool  # its matrices are, which our shard of it does not tell
    narrow: tuple[int, int, int] | None  # dimension, start and length; None: all of the parameter

    def part(self, tensor: Tensor) -> Tensor:
        """Return this range of a tensor like the parameter, as it is stored."""
        return tensor if self.narrow is None else tensor.narrow(*self.narrow)

    def matrices(self, part: Tensor, *, stacked: bool = False) -> Tensor:
        """Read the range as tall matrices ``(..., n, m)``, or as our rows of such."""
        return self.reading.matrices(part, stacked=stacked, wide=self.wide)

    def stored(self, matrices: Tensor, shape: torch.Size, *, stacked: bool = False) -> Tensor:
        """Undo :meth:`matrices`."""
        return self.reading.stored(matrices, shape, stacked=stacked, wide=self.wide)


def blocks_of(owner: Owner) -> list[Block]:
    """Return the constrained ranges of a parameter."""
    value, manifold = owner.moving(), owner.local_manifold
    dim, blocks = manifold.dimensions(value.ndim)[0], []
    for index, (part, reading) in enumerate(manifold.blocks(value)):
        wide = reading.is_wide(part.shape) if owner.shards is None else owner.shards.wide[index]
        narrow = None
        if manifold.rows is not None:
            start, stop = manifold.rows[index]  # type: ignore[misc]
            narrow = dim, start, stop - start
        blocks.append(Block(owner, index, reading, wide, narrow))
    return blocks


class Stack:
    """Blocks of one shape, dtype, device and reading, and their state of these ``names``.

    ``whole`` is the state by name, ``(blocks, ..., n, m)`` or ``(blocks, ..., m, m)``, tall or as
    the matrices are stored; None once a window is gone. Each of ``cuts`` is what one call of a rule
    works on: the first of its blocks, the one behind its last, and which of the matrices of each.
    """

    def __init__(self, blocks: list[Block], names: Sequence[str]) -> None:
        first = blocks[0]
        value = first.owner.moving()
        if is_cpu(value):
            _settle_allocator()
        self.blocks = blocks
        self.row_sum = None if first.owner.shards is None else first.owner.shards.row_sum
        self.part_shape = first.part(value).shape
        self.lead = first.matrices(first.part(value)).shape[:-2]
        model = torch.empty(first.owner.parameter.shape, device="meta")
        self.row_count = first.matrices(first.part(model)).size(-2)  # of the whole matrices
        self.whole: dict[str, Tensor] | None = {name: self._stacked(name) for name in names}
        self.each = self.lead.numel()  # matrices of a block
        self.cuts = self._cut(value)

    def state_of(self, rows: slice) -> State:
        """Return the state of some matrices, ``(k, n, m)`` and ``(k, m, m)``, as views."""
        whole, wide = self.whole or {}, self.blocks[0].wide
        return {
            name: as_batch(tensor.mT if wide and not is_small(name) else tensor)[rows]
            for name, tensor in whole.items()
        }

    def _stacked(self, name: str) -> Tensor:
        """Join the state ``name`` of all blocks, and leave windows in its place."""
        keys = [name + suffix_of(block.index) for block in self.blocks]
        shown = [block.owner.state[key] for block, key in zip(self.blocks, keys, strict=True)]
        tensors = [local_part(tensor).detach() for tensor in shown]
        first, shape = self.blocks[0], tensors[0].shape
        if not is_small(name):  # laid out in the order of the matrices
            matrices = [block.matrices(t) for block, t in zip(self.blocks, tensors, strict=True)]
            tensors = [matrix.mT if first.wide else matrix for matrix in matrices]
        whole = torch.stack(tensors)
        for block, key, earlier, window in zip(
            self.blocks, keys, shown, windows_on(whole), strict=True
        ):
            if not is_small(name):
                window = block.stored(window.mT if first.wide else window, shape)
            if block.owner.shards is not None:
                window = block.owner.shards.like(window, earlier)
            block.owner.state[key] = window
        return whole

    def _cut(self, value: Tensor) -> list[tuple[int, int, slice]]:
        """Cut the stack into batches: some whole blocks, or some matrices of a single one."""
        count, everything, part = len(self.blocks), slice(0, self.each), self.blocks[0].part(value)
        if self.row_sum is not None:  # one sum for all, and as many on every process
            return [(0, count, everything)]
        size, on_cpu = part.numel() * part.element_size(), is_cpu(part)
        if size == 0:
            return []
        if count == 1:
            length = self._length(size, self.each, on_cpu)
            cuts = range(0, self.each, length)
            return [(0, 1, slice(low, min(low + length, self.each))) for low in cuts]
        length = 1
        if not on_cpu or size < _BYTES_ALONE:
            length = self._length(count * size, count, on_cpu)
        return [(low, min(low + length, count), everything) for low in range(0, count, length)]

    def _length(self, size: int, count: int, on_cpu: bool) -> int:
        """Return how many of ``count`` things of ``size`` bytes in all make one batch."""
        m = int(self.blocks[0].matrices(torch.empty(self.part_shape, device="meta")).size(-1))
        pieces = -(-size // (_BYTES_ON_CPU if on_cpu else _BYTES_ELSEWHERE))
        if size > _BYTES_WITHOUT_CARE:  # measured in steps of Adam; joining copies X and G
            joined = len(self.blocks) > 1
            alone = 4 if self.row_count == m else 3 + 8 * m / self.row_count
            temporaries = alone + (3 if self.row_count == m else 2) * joined
            pieces = max(pieces, math.ceil(temporaries / _TEMPORARIES))
        return -(-count // min(pieces, count))


def joined(states: list[State], name: str) -> Tensor:
    """Join the state ``name`` of several parameters, and leave windows in its place."""
    tensors = [local_part(state[name]) for state in states]
    whole = torch.stack([tensor.to(tensors[0]) for tensor in tensors])
    for state, window in zip(states, windows_on(whole), strict=True):
        state[name] = window
    return whole


def join_masters(owners: list[Owner]) -> list[tuple[Tensor, list[Owner]]]:
    """Join the masters of parameters that are alike."""
    kinds: dict[Any, list[Owner]] = {}
    for owner in owners:
        if MASTER in owner.state:
            shape = local_part(owner.state[MASTER]).shape
            kinds.setdefault((shape, owner.dtype, id(owner.shards)), []).append(owner)
    masters = []
    for members in kinds.values():
        shown = [owner.state[MASTER] for owner in members]
        masters.append((joined([owner.state for owner in members], MASTER), members))
        for owner, earlier in zip(members, shown, strict=True):
            if owner.shards is not None:
                owner.state[MASTER] = owner.shards.like(owner.state[MASTER], earlier)
    return masters


def stacks_of(owners: list[Owner], values: list[Tensor]) -> list[Stack]:
    """Stack the blocks of parameters, of which ``values`` are what moves."""
    kinds: dict[Any, tuple[list[Block], list[str]]] = {}
    for owner, value in zip(owners, values, strict=True):
        kept = [
            name.partition(".")
            for name in owner.state
            if is_kept(name) and name != MASTER and not name.startswith(ROWS)
        ]
        for block in blocks_of(owner):
            names = [word for word, _, index in kept if int(index or 0) == block.index]
            shape, layout = block.part(value).shape, id(owner.shards)
            key = shape, block.reading, block.wide, value.dtype, layout, tuple(sorted(names))
            kinds.setdefault(key, ([], names))[0].append(block)
    return [Stack(*kind) for kind in kinds.values()]


def plain_rows_of(owners: list[Owner], values: list[Tensor]) -> list[tuple[Owner, list[State]]]:
    """Return the parameters of which some rows are plain, and torch's state of each part."""
    found = []
    for owner, value in zip(owners, values, strict=True):
        if parts := owner.local_manifold.plain_parts(value):
            states: list[State] = [{} for _ in parts]
            for name, tensor in owner.state.items():
                if name.startswith(ROWS):
                    _, word, index = f"{name}.0".split(".")[:3]
                    states[int(index)][word] = owner.local_rows(tensor)
            found.append((owner, states))
    return found


def as_batch(matrices: Tensor) -> Tensor:
    """Return ``(..., n, m)`` as ``(k, n, m)``: a view where strides allow."""
    if matrices.ndim == 2:
        return matrices.unsqueeze(0)
    return matrices if matrices.ndim == 3 else matrices.flatten(0, -3)


def shares_memory(tensor: Tensor, other: Tensor) -> bool:
    """Say whether one tensor is a view on the memory of the other."""
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def windows_on(whole: Tensor) -> list[Tensor]:
    """Return ``whole[i]`` for each i as a tensor whose storage ends where it ends."""
    storage = whole.untyped_storage()
    size = storage.nbytes() // max(whole.size(0), 1)
    return [
        whole.new_empty(0).set_(storage[i * size : (i + 1) * size], 0, item.shape, item.stride())
        for i, item in enumerate(whole)
    ]


@functools.lru_cache(maxsize=1)
def _settle_allocator() -> None:
    """Let glibc keep blocks of a few MB instead of returning them to the system at every free.

    It raises its threshold, for the whole process, when a larger block is freed; without that each
    temporary of a step is faulted in page by page again, which for small matrices costs more than
    the arithmetic.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
