"""The constrained parameters of a group: what one step does with them, from gradients to points.

A gradient is looked at before its parameter moves: without one, or with one that is not finite or
whose square would not be, a parameter stays as it is, and so does its state. Where values may be
read it is left out of its batch; elsewhere a mask keeps the old numbers. A step that an exception
ends halfway leaves every block as it was or as it shall be, and the next step puts the books in
order.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.device import Lagged, Now, Reader, is_cpu, reader_for
from stiefel_opt.distributed import local_part
from stiefel_opt.functional.flows import Setting
from stiefel_opt.linalg import RowSum
from stiefel_opt.optim.blocks import (
    Owner,
    Stack,
    as_batch,
    join_masters,
    joined,
    plain_rows_of,
    shares_memory,
    stacks_of,
)
from stiefel_opt.optim.safety import LARGEST_SAFE, lengths_of, settle
from stiefel_opt.optim.sharding import Shards
from stiefel_opt.optim.state import ROWS, State, follow_, is_kept, suffix_of

# Rounding in X'X and X'U is measured and removed every so many steps; in every step where nothing
# is known of how long steps are.
_CORRECTION_PERIOD = 8

# What is counted for each parameter: steps missed, and overflows that other processes do not know.
TALLIES: Final = ("skipped", "untold")

_VERSION = operator.attrgetter("_version")


@dataclass
class Given:
    """What a step gives a rule for a batch of matrices."""

    point: Tensor  # X, ``(k, n, m)``; only read
    grad: Tensor
    state: State  # ``(k, n, m)`` or ``(k, m, m)`` for each name; updated by the rule
    lr: float | Tensor  # eta for orthonormal X
    step: float | Tensor  # its number, from 1: one for all, or ``(k, 1, 1)``
    setting: Setting
    is_judged: bool = True  # numbers that are not finite are to leave their matrix as it was
    # Set by a rule: which matrices left floating point, ``(k, 1, 1)``. The rule has left them where
    # they were, and started their momentum again.
    overflowed: Tensor | None = None

    def of_sgd(self, group: dict[str, Any], *names: str) -> dict[str, Any]:
        """Return what every rule of SGD takes beside tensors, and the options of these names."""
        options = {name: group[name] for name in ("momentum", "nesterov", *names)}
        return options | {"lr": self.lr, "force": self.force(group), "setting": self.setting}

    def of_adam(self, group: dict[str, Any], *names: str) -> dict[str, Any]:
        """The same for Adam."""
        options = {name: group[name] for name in ("betas", "eps", *names)}
        options |= {"lr": self.lr, "step": self.step, "setting": self.setting}
        return options | {"force": -1.0 if group["maximize"] else 1.0}

    def force(self, group: dict[str, Any]) -> float | Tensor:
        """Return SGD's factor on the gradient: the sign, and dampening from the second step on."""
        sign = -1.0 if group["maximize"] else 1.0
        if group["dampening"] == 0 or group["momentum"] == 0:
            return sign
        damped = sign * (1.0 - group["dampening"])
        if isinstance(self.step, Tensor):
            numbers = self.point.new_tensor([sign, damped])
            return torch.where(self.step == 1, numbers[0], numbers[1])
        return sign if self.step == 1 else damped


Move = Callable[[Given], Tensor]
# parameters, gradients, states, and whether to leave them, as the kernels of torch want to know it
MoveRows = Callable[[list[Tensor], list[Tensor], list[State], Tensor | None], None]


class Batch:
    """Some matrices of a stack, ``(k, n, m)``: what one call of a rule works on.

    They are those of the blocks from ``start`` to ``stop``, or the ``share`` of a single block.
    """

    def __init__(self, stack: Stack, start: int, stop: int, share: slice) -> None:
        self.blocks = stack.blocks[start:stop]
        self.places = [block.owner.place for block in self.blocks]
        self.row_sum, self.row_count = stack.row_sum, stack.row_count
        self.each = share.stop - share.start  # matrices of a block
        low = start * stack.each + share.start
        count = (stop - start - 1) * stack.each + self.each
        self.state = stack.state_of(slice(low, low + count))  # views
        self.scale = self.blocks[0].reading.scale
        self.now, self.lagged = Now(), Lagged()  # who may read, on a CPU and elsewhere
        self._lead, self._part_shape = stack.lead, stack.part_shape
        self._share = None if share == slice(0, stack.each) else share
        self._is_one = stop - start == 1
        self._in_parts = any(block.narrow is not None for block in self.blocks)
        self._views: dict[Any, tuple[torch.Size, tuple[int, ...], int]] = {}  # by strides

    def read(self, tensors: list[Tensor], blocks: list[int] | None = None) -> Tensor:
        """Return the matrices of these ``blocks``, one tensor like the parameter for each."""
        first, tensor = self.blocks[0], tensors[0]
        if not self._is_one:
            parts = self._parts(tensors, blocks)
            joined = torch.cat(parts).reshape(len(parts), *self._part_shape)
            return as_batch(first.matrices(joined, stacked=True))
        if (view := self._views.get(tensor.stride())) is not None:
            return tensor.as_strided(view[0], view[1], tensor.storage_offset() + view[2])
        matrices = as_batch(first.matrices(first.part(tensor)))
        if self._share is not None:
            matrices = matrices[self._share]
        if not tensor.is_complex() and shares_memory(matrices, tensor):
            offset = int(matrices.storage_offset() - tensor.storage_offset())
            self._views[tensor.stride()] = matrices.size(), matrices.stride(), offset
        return matrices

    def write(
        self, tensors: list[Tensor], matrices: Tensor, blocks: list[int] | None, read: Tensor
    ) -> None:
        """Put new ``matrices`` into the tensors of these ``blocks``, from which ``read`` came."""
        first, tensor = self.blocks[0], tensors[0]
        if self._is_one:
            if tensor.stride() in self._views:
                read.copy_(matrices)
                return
            part = first.part(tensor)
            whole = first.matrices(part)
            target = as_batch(whole)
            (target if self._share is None else target[self._share]).copy_(matrices)
            if not shares_memory(target, part):  # channels_last, or batches of rows
                part.copy_(first.stored(target.view(whole.shape), part.shape))
            return
        parts = self._parts(tensors, blocks)
        batch = matrices.reshape(len(parts), *self._lead, *matrices.shape[1:])
        shape = torch.Size((len(parts), *self._part_shape))
        stored = first.stored(batch, shape, stacked=True)
        if is_cpu(stored) and not self._in_parts:
            torch.unbind_copy(stored, out=parts)
        else:
            torch._foreach_copy_(parts, list(stored.unbind()))

    def picked(self, blocks: list[int]) -> tuple[Tensor, State]:
        """Return an index of the matrices of these blocks, and a copy of their state."""
        device = self.blocks[0].owner.parameter.device
        index = torch.tensor(blocks, device=device)
        if self.each > 1:
            first = (index * self.each).unsqueeze(1)
            index = (first + torch.arange(self.each, device=device)).flatten()
        return index, {name: tensor[index] for name, tensor in self.state.items()}

    def put_back(self, index: Tensor, state: State) -> None:
        """Put a copy of the state of some blocks back."""
        for name, tensor in self.state.items():
            tensor[index] = state[name]

    def of_each(self, of_block: Tensor) -> Tensor:
        """Return ``(k, 1, 1)``: for each matrix what ``of_block`` says of its block."""
        return of_block.repeat_interleave(self.each).view(-1, 1, 1)

    def _parts(self, tensors: list[Tensor], blocks: list[int] | None) -> list[Tensor]:
        if not self._in_parts:
            return tensors
        chosen = self.blocks if blocks is None else [self.blocks[i] for i in blocks]
        return [block.part(tensor) for block, tensor in zip(chosen, tensors, strict=True)]


class Constrained:
    """The constrained parameters of a group on one device that have ever had a gradient.

    The tensors in the state of ``owners``, which is complete, and in their tallies, which count
    the steps missed because of a gradient, are replaced by windows.
    """

    def __init__(self, owners: list[Owner], tallies: list[State]) -> None:
        self.owners = owners
        self.parameters = [owner.parameter for owner in owners]
        self._states = [owner.state for owner in owners]
        self.steps = joined(self._states, "step")
        self._reads = is_cpu(self.steps)
        self.skipped, self._untold = (joined(tallies, name) for name in TALLIES)
        alone = [owner.shards is None for owner in owners]
        self._alone = torch.tensor(alone, device=self.steps.device)
        # places, where that is read, of those that miss this step, and of those of which a matrix
        # left floating point, which processes that share it tell each other in the step after it;
        # how many matrices of each did, where any could
        self.missed: list[int] = []
        self.overflowed: list[int] = []
        self._overflows: Tensor | None = None
        self.masters = join_masters(owners)
        self.is_shared = any(owner.shards is not None for owner in owners)
        values = [owner.moving() for owner in owners]
        self.stacks = stacks_of(owners, values)
        self.batches = [Batch(stack, *cut) for stack in self.stacks for cut in stack.cuts]
        self._rows = plain_rows_of(owners, values)
        # what else moves than a parameter itself is looked up in every step
        is_plain = not self.is_shared and not self.masters
        self._values: list[Tensor] | None = values if is_plain else None
        self._joint = self._find_joint()
        self._grads: list[Tensor | None] = [None] * len(owners)
        self._out: set[int] = set()  # places of those that do not move in this step
        self._ok: Tensor | None = None  # the same as a mask, where it is not read
        self._changed: set[int] = set()  # places of those that somebody else has written to
        self._seen = [-1] * len(owners), [-1] * len(owners)  # the parameters after our last write
        self._now = self._look()
        self._steps_begun = 0
        self._is_gone = False
        # the number of this step for each parameter, or for all; a list where it may be read
        self._counts: list[float] | Tensor = []
        self._begun: list[int] = []  # versions of the parameters before a step
        self._busy: tuple[Batch, list[int] | None, int] | None = None
        self._done: list[int] | None = None  # places that have moved in a step under way
        self._remember()

    # ---- building ------------------------------------------------------------------------------

    def _find_joint(self) -> list[int]:
        """Return the places of those whose gradient no single batch can judge."""
        batches = Counter(place for batch in self.batches for place in batch.places)
        with_rows = {owner.place for owner, _ in self._rows}
        return [
            owner.place
            for owner in self.owners
            if batches[owner.place] != 1 or owner.shards is not None or owner.place in with_rows
        ]

    def _remember(self) -> None:
        """Remember the windows, to see whether somebody replaces one or moves its memory."""
        kept = [
            (owner.state, name)
            for owner in self.owners
            for name in owner.state
            if is_kept(name) or name == "step"
        ]
        windows = [state[name] for state, name in kept]
        self._slots = kept
        self._ids = list(map(id, windows))
        self._memory = [local_part(window).data_ptr() for window in windows]
        method = weakref.WeakMethod(self.forget)

        def gone(_: Any) -> None:  # a window is: what it belonged to lets go of its memory
            if (forget := method()) is not None:
                forget()

        self._windows: list[Any] = [weakref.ref(window, gone) for window in windows]

    def tensors(self) -> list[Tensor]:
        """Return all that a step changes beside the parameters, each memory once."""
        found = [self.steps, self.skipped, self._untold, *(whole for whole, _ in self.masters)]
        for stack in self.stacks:
            found += list((stack.whole or {}).values())
        for _, states in self._rows:
            found += [tensor for state in states for tensor in state.values()]
        return found

    def release(self) -> None:
        """Give parameters that are not part of any stack any more state of their own."""
        for (state, name), known in zip(self._slots, self._windows, strict=True):
            is_ours = not name.startswith(ROWS) and name in state  # rows have no windows
            if is_ours and state[name] is known():
                state[name] = state[name].clone()

    def forget(self) -> None:
        """Let go of all state: a window is gone, perhaps so that its memory is freed."""
        for holder in self.stacks:
            holder.whole = None
        for batch in self.batches:
            batch.state = {}
        self.masters, self._is_gone = [], True

    def is_intact(self, states: Any) -> bool:
        """Say whether parameters and state, of all ``states``, are those this was built of."""
        if self._is_gone or not all(
            map(operator.is_, map(states.get, self.parameters), self._states)
        ):
            return False
        try:
            found = [state[name] for state, name in self._slots]
        except KeyError:
            return False
        if list(map(id, found)) != self._ids:
            return False
        tensors = [local_part(t) for t in found] if self.is_shared else found
        if list(map(torch.Tensor.data_ptr, tensors)) != self._memory:
            return False
        self._now = self._look()
        return self._now[1] == self._seen[1] or all(
            seen == now or owner.is_same()
            for seen, now, owner in zip(self._seen[1], self._now[1], self.owners, strict=True)
        )

    # ---- before anything changes ---------------------------------------------------------------

    def take(
        self, grads: list[Tensor | None], nonfinite: str, *, in_graph: bool = False
    ) -> list[Owner]:
        """Set the gradients of this step, one for each parameter and already checked; judge them.

        Return the parameters that others have written to, as a compiled graph does by itself.
        """
        self.recover()
        self._grads = grads
        if self.is_shared:
            self._grads = [
                grad if grad is None or owner.shards is None else owner.shards.local(grad)
                for owner, grad in zip(self.owners, grads, strict=True)
            ]
        self._out = set()
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            self._out = {place for place, grad in enumerate(grads) if grad is None}
        self.missed, self.overflowed, self._overflows, self._ok = [], [], None, None
        self._changed = set()
        if self._now != self._seen:
            now, seen = (list(zip(*look, strict=True)) for look in (self._now, self._seen))
            self._changed = {  # a graph writes to parameters itself
                place
                for place in range(len(now))
                if now[place] != seen[place] and not (in_graph and seen[place][0] >= 0)
            }
        if nonfinite != "ignore" or self.is_shared:
            self._judge(nonfinite)
        return [self.owners[place] for place in sorted(self._changed - self._out)]

    def _look(self) -> tuple[list[int], list[int]]:
        """Return what changes when a parameter is written to, or its ``.data`` replaced."""
        tensors = self._local()
        return list(map(_VERSION, tensors)), list(map(torch.Tensor.data_ptr, tensors))

    def _local(self) -> list[Tensor]:
        return list(map(local_part, self.parameters)) if self.is_shared else self.parameters

    def _judge(self, nonfinite: str) -> None:
        """Find the parameters whose gradient is not safe: all processes that have a part agree."""
        places = list(range(len(self.owners)))
        if self._reads and nonfinite == "skip":  # each batch judges the others
            if not self._joint:
                return
            places = self._joint
        present = [place for place in places if place not in self._out]
        ok = torch.ones(len(self.owners), dtype=torch.bool, device=self.steps.device)
        kinds: dict[torch.dtype, list[int]] = {}
        if nonfinite != "ignore":
            for place in present:
                kinds.setdefault(self._grads[place].dtype, []).append(place)  # type: ignore[union-attr]
        for dtype, members in kinds.items():
            lengths = lengths_of([self._grads[place] for place in members])  # type: ignore[misc]
            ok[members] = (lengths <= LARGEST_SAFE[dtype]).to(ok.device)
        if self.is_shared:
            ok = self._agreed(ok)
        if not self._reads:
            self._ok = ok if nonfinite == "skip" else None
        if self._reads or nonfinite == "raise":
            self.missed = [place for place in present if not ok[place]] if not ok.all() else []
            self._out.update(self.missed)

    def _agreed(self, ok: Tensor) -> Tensor:
        """Let processes agree on who moves, whose point somebody else has written to, and whose
        last step left floating point.
        """
        layouts: dict[int, tuple[Shards, list[int]]] = {}
        for owner in self.owners:
            if owner.shards is not None and owner.place not in self._out:
                layouts.setdefault(id(owner.shards), (owner.shards, []))[1].append(owner.place)
        for shards, places in layouts.values():
            kept = torch.tensor([place not in self._changed for place in places], device=ok.device)
            told = torch.cat([ok[places], kept, self._untold[places] == 0])
            ok[places], kept, told = shards.agree(told).tensor_split(3)
            self._changed.update(itertools.compress(places, (~kept).tolist()))
            self.overflowed += itertools.compress(places, (~told).tolist())
        if self.overflowed:
            self.skipped[self.overflowed] += 1
            self._untold[self.overflowed] = 0
        return ok

    # ---- the step ------------------------------------------------------------------------------

    def step(self, move: Move, move_rows: MoveRows, lr: float | Tensor, nonfinite: str) -> None:
        """Move the parameters that have a gradient, and count the step.

        Matrices follow one rule, the plain rows of parameters that are constrained in part another.
        """
        if len(self._out) == len(self.owners):
            self.skipped[self.missed] += 1
            self._grads = [None] * len(self.owners)
            return
        values = self._values or [owner.moving() for owner in self.owners]
        if self._changed and isinstance(lr, Tensor) and lr == 0:  # a look waits in any case
            lr = 0.0  # nobody is projected
        self._done, self._begun = [], self._now[0]
        for whole, members in self.masters:
            follow_(whole, torch.stack([owner.local() for owner in members]))
        self._steps_begun += 1
        self._counts = self._numbers()
        for batch in self.batches:
            self._move_batch(batch, values, move, lr, nonfinite)
        if self._rows:
            self._move_rows(move_rows, values)
        if self._overflows is not None:
            found = self._overflows > 0
            self._untold += found & ~self._alone
            self.skipped += found & self._alone
            if self._reads or nonfinite == "raise":
                self.overflowed += (found & self._alone).nonzero().flatten().tolist()
        self._finish(values, is_written=isinstance(lr, Tensor) or lr != 0)

    def _move_batch(
        self,
        batch: Batch,
        values: list[Tensor],
        move: Move,
        lr: float | Tensor,
        nonfinite: str,
    ) -> None:
        """Move the blocks of a batch that have a gradient."""
        places, chosen = batch.places, None
        if self._out and not self._out.isdisjoint(places):
            chosen = [index for index, place in enumerate(places) if place not in self._out]
            places = [places[index] for index in chosen]
            if not chosen:
                return
        tensors = [values[place] for place in places]
        stored = batch.read(tensors, chosen)
        grad = batch.read([self._grads[place] for place in places], chosen)  # type: ignore[misc]
        grad, length = grad.to(stored.dtype), math.inf
        if nonfinite == "skip" and self._reads:
            length = self._judge_batch(grad, places)
            if not self._out.isdisjoint(places):  # again, without those that are left out
                self._move_batch(batch, values, move, lr, nonfinite)
                return
        index, state = (None, batch.state) if chosen is None else batch.picked(chosen)
        setting = Setting(length=length)
        given = Given(stored, grad, state, lr, 1.0, setting, nonfinite != "ignore")
        self._complete(given, batch, places)
        base = batch.state.get("deferred_base")
        self._busy = batch, chosen, -1 if base is None else base._version
        new_point = _kept(move(given), given, stored, batch.scale)
        if isinstance(lr, Tensor) or lr != 0:  # else bits stay, also where X C would differ
            batch.write(tensors, new_point, chosen, stored)
        if index is not None:
            batch.put_back(index, state)
        if given.overflowed is not None:
            self._count(given.overflowed, places)
        if self._done is not None:
            self._done += places
        self._busy = None

    def _complete(self, given: Given, batch: Batch, places: list[int]) -> None:
        """Give the rule matrices on the manifold, and say what is to be corrected."""
        given.step, due = self._number(batch, places)
        length, row_sum = given.setting.length, batch.row_sum
        reader: Reader = batch.now if self._reads else reader_for(given.point, batch.lagged)
        reader.is_lost, due = False, due or reader.is_blind
        if batch.scale != 1.0:
            given.point, given.lr = given.point / batch.scale, given.lr / batch.scale
        settled: bool | Tensor = due
        # Writes through ``.data`` show only here; rows that are shared are not added up for it.
        looks = due and row_sum is None and reader.is_exact
        if looks or (self._changed and not self._changed.isdisjoint(places)):
            # without a force nothing moves, not even by a correction
            known = length < math.inf or not looks
            size = length if known else torch.linalg.vector_norm(given.grad)
            due = due and not (looks and float(size) == 0.0)
            given.point, settled = settle(given.point, given.state, row_sum, batch.row_count, due)
        if row_sum is not None:  # our rows only: all processes must decide alike
            length = math.inf
        ok = None if self._ok is None else batch.of_each(self._ok[places])
        given.setting = Setting(ok, settled, row_sum, reader, length)

    def _judge_batch(self, grad: Tensor, places: list[int]) -> float:
        """Return the length of the gradients of a batch; leave out those that are not safe.

        Not of parameters that are judged as a whole: something of them may have moved already.
        """
        length, most = float(torch.linalg.vector_norm(grad)), LARGEST_SAFE[grad.dtype]
        if not length <= most:  # NaN is not either
            lengths = torch.linalg.vector_norm(grad.reshape(len(places), -1), dim=1)
            unsafe = set(itertools.compress(places, (~(lengths <= most)).tolist()))
            self.missed += sorted(unsafe.difference(self._joint))
            self._out.update(self.missed)
        return length

    def _numbers(self) -> list[float] | Tensor:
        """Return the number of this step for each parameter: one if it is the same for all."""
        if not self._reads:
            return self.steps + 1.0
        counts = self.steps.tolist()
        if min(counts) == max(counts):
            counts = counts[:1]
        return [count + 1.0 for count in counts]

    def _number(self, batch: Batch, places: list[int]) -> tuple[float | Tensor, bool]:
        """Return the number of this step for a batch, and whether rounding is to be removed."""
        counts = self._counts
        if isinstance(counts, Tensor):
            due = self._steps_begun % _CORRECTION_PERIOD == 0
            return batch.of_each(counts[places]), due
        each = counts if len(counts) == 1 else [counts[place] for place in places]
        due = any(number % _CORRECTION_PERIOD == 0 for number in set(each))
        if min(each) == max(each):
            return each[0], due
        return batch.of_each(torch.tensor(each, device=self.steps.device)), due

    def _count(self, overflowed: Tensor, places: list[int]) -> None:
        """Count the matrices of each parameter that left floating point."""
        if self._overflows is None:
            self._overflows = torch.zeros_like(self.skipped)
        index = torch.tensor(places, device=overflowed.device)
        self._overflows.index_add_(0, index, overflowed.view(len(places), -1).sum(dim=1))

    def _move_rows(self, move_rows: MoveRows, values: list[Tensor]) -> None:
        """Move the plain rows of parameters that are constrained in part, by torch's own rule."""
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        states: list[State] = []
        owners: list[tuple[Owner, list[State]]] = []
        for owner, own in self._rows:
            if owner.place in self._out:
                continue
            grad: Tensor = self._grads[owner.place]  # type: ignore[assignment]
            split, value = owner.local_manifold.plain_parts, values[owner.place]
            parts = [part.to(value.dtype).resolve_conj() for part in split(grad)]
            if not self._reads:  # its kernels take a verdict, but only one
                left = grad.new_zeros((), dtype=torch.float32)
                if self._ok is not None:
                    left = (~self._ok[owner.place]).float()
                move_rows(list(split(value)), parts, own, left)
            parameters += split(value)
            grads += parts
            states += own
            owners.append((owner, own))
        if parameters and self._reads:
            move_rows(parameters, grads, states, None)
        for owner, own in owners:
            for index, state in enumerate(own):
                for word, tensor in state.items():
                    name = ROWS + word + suffix_of(index)
                    if name not in owner.state:
                        owner.state[name] = owner.shown_rows(tensor, index)

    def _finish(self, values: list[Tensor], *, is_written: bool) -> None:
        """Write what moved for others into the parameters, and count the step."""
        if is_written:
            for whole, members in self.masters:
                if members[0].shards is None:
                    targets = [owner.parameter for owner in members]
                    torch._foreach_copy_(targets, list(whole.unbind()))
            if self.is_shared:
                for owner, value in zip(self.owners, values, strict=True):
                    if owner.shards is not None and owner.place not in self._out:
                        owner.shards.write(owner.parameter, value)
        if self._out:
            moved = [place for place in range(len(self.owners)) if place not in self._out]
            self.steps[moved] += 1.0 if self._ok is None else self._ok[moved]
        else:
            moved = list(range(len(self.owners))) if self._ok is not None else []
            self.steps.add_(1.0 if self._ok is None else self._ok)
        if self._ok is not None:
            self.skipped[moved] += ~self._ok[moved]
        if self.missed:
            self.skipped[self.missed] += 1
        if is_written:
            versions, earlier = list(map(_VERSION, self._local())), self._seen
            self._seen = versions, list(self._now[1])
            left = self._out
            if self._ok is not None and self._changed:  # whoever looked has waited already
                left = left | {place for place in self._changed if not self._ok[place]}
            for place in left:
                for now, then in zip(self._seen, earlier, strict=True):
                    now[place] = then[place]
        self._grads, self._done = [None] * len(self.owners), None

    def recover(self) -> None:
        """Put the books in order if an exception has ended the last step halfway.

        Blocks that had moved count their step. That under way has its momentum at the point where
        it was: a base that was written since holds it all. Nobody's point is taken for granted.
        """
        if self._done is None:
            return
        written = {*self._done, *(self._busy[0].places if self._busy else ())}
        for whole, members in self.masters:  # as long as nobody else has written to them since
            for master, owner in zip(whole, members, strict=True):
                untouched = owner.parameter._version == self._begun[owner.place]
                if owner.place in written and owner.shards is None and untouched:
                    owner.parameter.copy_(master)
        if self._busy is not None:
            batch, chosen, version = self._busy
            base, shift = batch.state.get("deferred_base"), batch.state.get("deferred_shift")
            if base is not None and shift is not None and base._version != version:
                factor = batch.state.get("deferred_factor")
                blocks = slice(None) if chosen is None else chosen
                shift.unflatten(0, (-1, batch.each))[blocks] = 0.0
                if factor is not None:
                    identity = torch.eye(factor.size(-1), dtype=factor.dtype, device=factor.device)
                    factor.unflatten(0, (-1, batch.each))[blocks] = identity
        done = sorted(set(self._done))
        if done:  # set, not added to: whether they have been counted does not matter
            counts = torch.as_tensor(self._counts, dtype=self.steps.dtype, device=self.steps.device)
            counts = counts.expand_as(self.steps)
            if self._ok is not None:
                counts = torch.where(self._ok, counts, self.steps)
            self.steps[done] = counts[done]
        self._busy, self._done = None, None
        self._seen = [-1] * len(self.owners), [-1] * len(self.owners)


def _kept(new_point: Tensor, given: Given, stored: Tensor, scale: float) -> Tensor:
    """Return the new point as it is stored, that of before for matrices that are to stay."""
    ok, row_sum, reader = given.setting.ok, given.setting.row_sum, given.setting.reader
    if reader is not None and reader.is_lost and given.is_judged:  # X was far off
        given.overflowed = _start_again(given.state, new_point, row_sum)
        new_point = torch.where(given.overflowed, stored / scale, new_point)
    if scale != 1.0:
        new_point = new_point.mul_(scale)
    if isinstance(given.lr, Tensor):
        new_point = torch.where(given.lr == 0, stored, new_point)
    return new_point if ok is None else torch.where(ok, new_point, stored)


def _start_again(state: State, new_point: Tensor, row_sum: RowSum | None) -> Tensor:
    """Start the momentum of matrices again whose step left floating point; return which."""
    overflowed = ~new_point.isfinite().all(dim=-1).all(dim=-1)[:, None, None]
    if row_sum is not None:  # of any row; all come here, as what was read is the same everywhere
        overflowed = row_sum(overflowed.float()) > 0
    for name, tensor in state.items():
        tensor.masked_fill_(overflowed, 0.0)
        if name == "deferred_factor":
            tensor.diagonal(dim1=-2, dim2=-1).masked_fill_(overflowed[..., 0], 1.0)
    return overflowed
