"""Equal blocks of the parameters of a group, stacked: one batch of products serves them all.

A block is one constrained range of one parameter. The state of a stack lies in one tensor for each
name; ``optimizer.state`` holds views on it, shaped like the range and with storages of their own,
so that saving one parameter's state writes only its bytes. A stack belongs to the group, not to the
gradients of one step: blocks without a gradient are left out of a step by an index.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.functional.flows import Tensors
from stiefel_opt.numerics.device import (
    for_device,
    has_values,
    is_cpu,
    settle_allocator,
)
from stiefel_opt.numerics.distributed import local_address_for, local_part
from stiefel_opt.numerics.linalg import Packed, Sums
from stiefel_opt.optim.sharding import Shards
from stiefel_opt.optim.state import MASTER, ROWS, State, StateDict, is_declared, key_of
from stiefel_opt.tags.blocks import Block, as_batch
from stiefel_opt.tags.manifold import Stiefel

# On a CPU a batch should stay in the last-level cache together with its temporaries; on an
# accelerator launches cost more than memory, and temporaries are about ten times a batch.
_BYTES_ON_CPU: Final = 2**21
_BYTES_ELSEWHERE: Final = 2**25
# On a CPU, above this a stack is divided so that temporaries stay below one and a half times its
# parameters.
_BYTES_WITHOUT_CARE: Final = 2**20
_TEMPORARIES: Final = 1.5
# On a CPU, joining blocks of at least this size costs more than calling the rule for each.
_BYTES_ALONE: Final = 2**20
# Numbers of state up to which a call on a CPU costs more than its arithmetic.
_FEW_ON_CPU: Final = 2**14


@dataclass(eq=False)
class ConstrainedParameter:
    """A constrained parameter."""

    parameter: Tensor
    manifold: Stiefel  # reading of the whole parameter
    state: StateDict  # of the optimizer, complete
    shards: Shards | None  # layout over processes; None: all of it is here
    place: int  # its index among the constrained parameters of its group and device

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
        """The reading of the part that this process has."""
        return self.manifold if self.shards is None else self.shards.manifold

    def local(self) -> Tensor:
        """Return the parameter, or our shard of it in the layout in which a step works."""
        return self.parameter if self.shards is None else self.shards.local(self.parameter)

    def local_rows(self, tensor: Any) -> Any:
        """Return our part of the state of plain rows; a number is the same everywhere."""
        if self.shards is None or not isinstance(tensor, Tensor) or tensor.ndim == 0:
            return tensor
        return local_part(self.shards.placed(tensor, self.shards.working))

    def shown_rows(self, tensor: Any, index: int) -> Any:
        """Return state of plain rows as the user sees it, of the shape of those rows."""
        if self.shards is None or not isinstance(tensor, Tensor) or tensor.ndim == 0:
            return tensor
        model = self.manifold.plain_parts(torch.empty(self.shape, device="meta"))[index]
        return self.shards.as_dtensor(tensor, model.contiguous(), self.shards.working)

    def moving(self) -> Tensor:
        """Return the tensor that moves: the parameter, our shard of it, or its master."""
        if MASTER in self.state:
            return local_part(self.state[MASTER])
        return self.local()


class StateBlock(Block):
    """A constrained range of a parameter, which has state; ``value`` is the tensor that moves."""

    def __init__(self, weight: ConstrainedParameter, value: Tensor, index: int) -> None:
        wide = None if weight.shards is None else weight.shards.wide[index]
        super().__init__(value, weight.local_manifold, index, weight.place, wide)
        self.weight = weight


class StateStack:
    """Blocks of one shape, dtype, device and reading, and their ``declared`` state.

    The state lies in tensors ``(blocks, ..., n, m)`` or ``(blocks, ..., m, m)``, tall or as the
    matrices are stored. ``pieces`` says what one call of a rule works on: some whole blocks, or
    some matrices of a single block; see :meth:`_divided`.
    """

    def __init__(self, blocks: list[StateBlock], value: Tensor, declared: Sequence[State]) -> None:
        first = blocks[0]
        settle_allocator(value)
        self.blocks, self.reads = blocks, is_cpu(value)
        # of the whole matrices, wherever their rows are
        model = torch.empty(first.weight.parameter.shape, device="meta")
        part, reading = first.weight.manifold.blocks(model)[first.index]
        self.row_count, self.column_count = reading.matrices(part).shape[-2:]
        shards = first.weight.shards
        row_sum = None if shards is None else shards.row_sum
        self.sums = Sums(row_sum, self.row_count, first.reading.scale)
        self.declared = {
            declaration.name: declaration
            for declaration in declared
            if declaration.exists_for(self.row_count, self.column_count, first.reading.learn_scale)
        }
        self._whole: Tensors = {}
        self._flat = self._pack()
        self.each = first.lead.numel()  # matrices of a block
        self.pieces = self._divided(first.part(value))

    def state_of(self, rows: slice) -> Tensors:
        """Return the state of some matrices, ``(k, n, m)`` and ``(k, m, m)``, as views."""
        wide = self.blocks[0].wide
        state = {
            name: as_batch(tensor.mT if wide and self.declared[name].is_tall else tensor)[rows]
            for name, tensor in self._whole.items()
        }
        count = len(self.blocks) * self.each
        if self._flat is None or rows != slice(0, count):
            return state
        # processes that share rows must round alike, however many each has
        few = _FEW_ON_CPU if self.sums.are_local else -1
        if self._flat.numel() > for_device(self._flat, few, math.inf):
            return state
        return Packed(self._flat, state, is_kept=self.reads)

    def _pack(self) -> Tensor | None:
        """Join all state, one name behind the other in one tensor where they have one dtype."""
        joined = [self._stacked(declaration) for declaration in self.declared.values()]
        alike = len({whole.dtype for whole, _ in joined}) == 1 and has_values(joined[0][0])
        flat = torch.cat([whole.flatten() for whole, _ in joined]) if alike else None
        start = 0
        for name, (whole, show) in zip(self.declared, joined, strict=True):
            if flat is not None:
                whole = flat[start : start + whole.numel()].view(whole.shape)
                start += whole.numel()
            self._whole[name] = whole
            show(whole)
        return flat

    def _stacked(self, declaration: State) -> tuple[Tensor, Callable[[Tensor], None]]:
        """Join one state of all blocks; also return what leaves views of a copy in its place."""
        keys = [key_of(declaration.name, block.index) for block in self.blocks]
        shown = [block.weight.state[key] for block, key in zip(self.blocks, keys, strict=True)]
        tensors = [local_part(tensor).detach() for tensor in shown]
        first, shape = self.blocks[0], tensors[0].shape
        if declaration.is_tall:  # laid out in the order of the matrices
            matrices = [block.matrices(t) for block, t in zip(self.blocks, tensors, strict=True)]
            tensors = [matrix.mT if first.wide else matrix for matrix in matrices]

        def show(whole: Tensor) -> None:
            for block, key, earlier, view in zip(
                self.blocks, keys, shown, views_of(whole), strict=True
            ):
                if declaration.is_tall:
                    view = block.stored(view.mT if first.wide else view, shape)
                if block.weight.shards is not None:
                    view = block.weight.shards.like(view, earlier)
                block.weight.state[key] = view

        return declaration.part_of(torch.stack(tensors)), show

    def _divided(self, part: Tensor) -> list[tuple[int, int, slice]]:
        """Divide the stack into batches: some whole blocks, or some matrices of a single block.

        Returns: Start and stop of the blocks of each batch, and the slice of matrices in a block.
        """
        count, everything = len(self.blocks), slice(0, self.each)
        if not self.sums.are_local:  # one sum for all, and as many on every process
            return [(0, count, everything)]
        size = part.numel() * part.element_size()
        if size == 0:
            return []
        if count == 1:
            length = self._length(part, size, self.each)
            starts = range(0, self.each, length)
            return [(0, 1, slice(low, min(low + length, self.each))) for low in starts]
        length = 1
        if size < for_device(part, _BYTES_ALONE, math.inf):
            length = self._length(part, count * size, count)
        return [(low, min(low + length, count), everything) for low in range(0, count, length)]

    def _length(self, part: Tensor, size: int, count: int) -> int:
        """Return how many of ``count`` things of ``size`` bytes in all make one batch."""
        pieces = -(-size // int(for_device(part, _BYTES_ON_CPU, _BYTES_ELSEWHERE)))
        # in steps of Adam; joining copies X and G
        if size > for_device(part, _BYTES_WITHOUT_CARE, math.inf):
            is_square, joined = self.row_count == self.column_count, len(self.blocks) > 1
            temporaries = 5 if is_square else 5 + 8 * self.column_count / self.row_count
            temporaries += (3 if is_square else 2) * joined
            pieces = max(pieces, math.ceil(temporaries / _TEMPORARIES))
        return -(-count // min(pieces, count))


def joined(slots: list[tuple[StateDict, str]], shards: Shards | None = None) -> Tensor:
    """Join state of several parameters, and leave views in its place."""
    shown = [state[name] for state, name in slots]
    tensors = [local_part(tensor) for tensor in shown]
    whole = torch.stack([tensor.to(tensors[0]) for tensor in tensors])
    for (state, name), earlier, view in zip(slots, shown, views_of(whole), strict=True):
        state[name] = view if shards is None else shards.like(view, earlier)
    return whole


def join_masters(
    weights: list[ConstrainedParameter],
) -> list[tuple[Tensor, list[ConstrainedParameter]]]:
    """Join the masters of parameters that are alike."""
    kinds: dict[Any, list[ConstrainedParameter]] = {}
    for weight in weights:
        if MASTER in weight.state:
            shape = local_part(weight.state[MASTER]).shape
            kinds.setdefault((shape, weight.dtype, id(weight.shards)), []).append(weight)
    return [
        (joined([(weight.state, MASTER) for weight in members], members[0].shards), members)
        for members in kinds.values()
    ]


def stacks_of(
    weights: list[ConstrainedParameter], values: list[Tensor], declared: Sequence[State]
) -> list[StateStack]:
    """Stack the blocks of parameters; ``values`` are the tensors that move."""
    kinds: dict[Any, list[StateBlock]] = {}
    for weight, value in zip(weights, values, strict=True):
        for index, part in enumerate(weight.local_manifold.parts(value)):
            block = StateBlock(weight, value, index)
            key = part.shape, block.reading, block.wide, value.dtype, id(weight.shards)
            kinds.setdefault(key, []).append(block)
    return [StateStack(blocks, values[blocks[0].place], declared) for blocks in kinds.values()]


def plain_rows_of(
    weights: list[ConstrainedParameter], values: list[Tensor]
) -> list[tuple[ConstrainedParameter, list[StateDict]]]:
    """Return the parameters with plain rows, and torch's state of each of their ranges."""
    pairs = []
    for weight, value in zip(weights, values, strict=True):
        if parts := weight.local_manifold.plain_parts(value):
            states: list[StateDict] = [{} for _ in parts]
            for name, tensor in weight.state.items():
                if name.startswith(ROWS):
                    _, word, index = f"{name}.0".split(".")[:3]
                    states[int(index)][word] = weight.local_rows(tensor)
            pairs.append((weight, states))
    return pairs


def move_rows(
    moving: list[tuple[ConstrainedParameter, list[StateDict]]],
    all_grads: Sequence[Tensor | None],
    values: Sequence[Tensor],
    verdicts: Tensor | None,
    reads: bool,
    move: Callable[[list[Tensor], list[Tensor], list[StateDict], Tensor | None], None],
) -> None:
    """Move the plain rows of parameters that are constrained in part, by the plain rule.

    ``move`` takes parameters, gradients, states, and a number: unless it is 0, nothing moves.
    """
    parameters: list[Tensor] = []
    grads: list[Tensor] = []
    states: list[StateDict] = []
    for weight, own in moving:
        grad: Tensor = all_grads[weight.place]  # type: ignore[assignment]
        split, value = weight.local_manifold.plain_parts, values[weight.place]
        parts = [part.to(value.dtype).resolve_conj() for part in split(grad)]
        if not reads:  # a kernel takes one verdict for all that it moves
            found_inf = grad.new_zeros((), dtype=torch.float32)
            if verdicts is not None:
                found_inf = (~verdicts[weight.place]).float()
            move(list(split(value)), parts, own, found_inf)
            continue
        parameters += split(value)
        grads += parts
        states += own
    if parameters:
        move(parameters, grads, states, None)
    for weight, own in moving:
        for index, state in enumerate(own):
            for word, tensor in state.items():
                key = key_of(ROWS + word, index)
                is_replaced = weight.shards is None or not isinstance(tensor, Tensor)
                if key not in weight.state or is_replaced:
                    weight.state[key] = weight.shown_rows(tensor, index)


def views_of(whole: Tensor) -> list[Tensor]:
    """Return ``whole[i]`` for each i as a tensor whose storage ends where it ends."""
    if not has_values(whole):
        return list(whole)
    storage, width = whole.untyped_storage(), whole.element_size()
    size = width * whole[:1].numel()
    starts = [size * i + width * int(whole.storage_offset()) for i in range(len(whole))]
    return [
        whole.new_empty(0).set_(storage[start : start + size], 0, item.shape, item.stride())
        for start, item in zip(starts, whole, strict=True)
    ]


class StateViews:
    """The state that a user sees: views on the state of a stack, watched for replacement.

    Attributes:
        slots: Each dictionary and its key.
        ids: Of the tensors there, which are alive: else ``forget`` has been called.
        address: Says where one of them lies.
        memory: Where they were.
    """

    def __init__(
        self, weights: list[ConstrainedParameter], names: Container[str], forget: Callable[[], None]
    ) -> None:
        self.slots = [
            (weight.state, key)
            for weight in weights
            for key in weight.state
            if (is_declared(key, names) or key == "step") and isinstance(weight.state[key], Tensor)
        ]
        views = [state[key] for state, key in self.slots]
        self.ids = list(map(id, views))
        self.address = local_address_for(views)
        self.memory = list(map(self.address, views))
        method = weakref.WeakMethod(forget)

        def gone(_: Any) -> None:
            if (release := method()) is not None:
                release()

        self._views: list[Any] = [weakref.ref(view, gone) for view in views]

    def release(self) -> None:
        """Give a copy of their state to parameters that have left the stack."""
        for (state, key), view in zip(self.slots, self._views, strict=True):
            is_ours = not key.startswith(ROWS) and key in state  # rows have no views
            if is_ours and state[key] is view():
                state[key] = state[key].clone()
