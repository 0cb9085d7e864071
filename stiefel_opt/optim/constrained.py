"""The constrained parameters of a group: what one step does with them, from gradients to points.

A gradient is looked at before anything moves: without one, or with one that is not finite or whose
square would not be, a parameter stays as it is, and so does its state. Where values may be read it
is left out of its batch; elsewhere a mask keeps the old numbers. A step that an exception ends
halfway leaves every block as it was or as it shall be, and the next step puts the books in order.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.device import exact_products, is_cpu, reader_for
from stiefel_opt.distributed import local_part
from stiefel_opt.functional.flows import Setting
from stiefel_opt.optim.blocks import Batch, Block, Owner, Stack, blocks_of, windows_on
from stiefel_opt.optim.safety import largest_safe, lengths_of, settle
from stiefel_opt.optim.state import MASTER, ROWS, State, follow_, is_kept

__all__ = ["Constrained", "Given", "Move", "MoveRows"]

# Rounding in X'X and X'U is measured and removed every so many steps; in every step where nothing
# is known of how long steps are.
_CORRECTION_PERIOD = 8

_VERSION = operator.attrgetter("_version")


@dataclass
class Given:
    """What a step gives a rule for a batch of matrices.

    Attributes:
        point, grad: X and G, ``(k, n, m)``; only read.
        state: ``(k, n, m)`` or ``(k, m, m)`` for each name; updated by the rule.
        lr: eta for orthonormal X.
        step: This step's number, from 1: one for all, or ``(k, 1, 1)``.
        setting: How the step is worked out.
        is_judged: Whether numbers that are not finite are to leave their matrix as it was.
        overflowed: Set by a rule: which matrices left floating point, ``(k, 1, 1)``. The rule has
            left them where they were, and started their momentum again.
    """

    point: Tensor
    grad: Tensor
    state: State
    lr: float | Tensor
    step: float | Tensor
    setting: Setting
    is_judged: bool = True
    overflowed: Tensor | None = None


Move = Callable[[Given], Tensor]
# parameters, gradients, states, and whether to leave them, as the kernels of torch want to know it
MoveRows = Callable[[list[Tensor], list[Tensor], list[State], Tensor | None], None]


class Constrained:
    """The constrained parameters of a group on one device that have ever had a gradient.

    Args:
        owners: The parameters, with complete state; its tensors are replaced by windows.

    Attributes:
        skipped: How many steps each has missed because of its gradient.
        missed: Places of those that miss this step for it, where that can be read.
    """

    def __init__(self, owners: list[Owner]) -> None:
        self.owners = owners
        self.parameters = [owner.parameter for owner in owners]
        self._states = [owner.state for owner in owners]
        self.steps = self._joined([owner.state for owner in owners], "step")
        self.skipped = torch.zeros(len(owners), dtype=torch.int64, device=self.steps.device)
        self.missed: list[int] = []
        self.masters = self._join_masters()
        self.is_shared = any(owner.shards is not None for owner in owners)
        values = [owner.moving() for owner in owners]
        self.stacks = self._stack_blocks(values)
        self._rows = self._find_rows(values)
        # what else moves than a parameter itself is looked up in every step
        is_plain = not self.is_shared and not self.masters
        self._values: list[Tensor] | None = values if is_plain else None
        self._joint = self._find_joint()
        self._grads: list[Tensor | None] = [None] * len(owners)
        self._out: set[int] = set()  # places of those that do not move in this step
        self._ok: Tensor | None = None  # the same as a mask, where it is not read
        self._changed: set[int] = set()  # places of those that somebody else has written to
        self._versions: list[int] | None = None  # of the parameters after our last write
        self._pointers: list[int] | None = None
        self._now = self._look()
        self._turns = 0
        self._is_gone = False
        self._uncounted = 0  # the version of the counts before a step
        self._busy: tuple[Batch, list[int] | None, int] | None = None
        self._done: list[int] | None = None  # places that have moved in a step under way
        self._remember()

    # ---- building ------------------------------------------------------------------------------

    def _joined(self, states: list[State], name: str) -> Tensor:
        tensors = [local_part(state[name]) for state in states]
        whole = torch.stack([tensor.to(tensors[0]) for tensor in tensors])
        for state, window in zip(states, windows_on(whole), strict=True):
            state[name] = window
        return whole

    def _join_masters(self) -> list[tuple[Tensor, list[Owner]]]:
        kinds: dict[Any, list[Owner]] = {}
        for owner in self.owners:
            if MASTER in owner.state:
                shape, layout = local_part(owner.state[MASTER]).shape, id(owner.shards)
                key = shape, owner.parameter.dtype, layout
                kinds.setdefault(key, []).append(owner)
        masters = []
        for members in kinds.values():
            shown = [owner.state[MASTER] for owner in members]
            whole = self._joined([owner.state for owner in members], MASTER)
            for owner, earlier in zip(members, shown, strict=True):
                if owner.shards is not None:
                    owner.state[MASTER] = owner.shards.like(owner.state[MASTER], earlier)
            masters.append((whole, members))
        return masters

    def _stack_blocks(self, values: list[Tensor]) -> list[Stack]:
        kinds: dict[Any, tuple[list[Block], list[str]]] = {}
        for owner, value in zip(self.owners, values, strict=True):
            for block in blocks_of(owner):
                names = [
                    name.partition(".")[0]
                    for name in owner.state
                    if is_kept(name)
                    and name != MASTER
                    and not name.startswith(ROWS)
                    and int(name.partition(".")[2] or 0) == block.index
                ]
                shape, layout = block.part(value).shape, id(owner.shards)
                key = shape, block.reading, block.wide, value.dtype, layout, tuple(sorted(names))
                kinds.setdefault(key, ([], names))[0].append(block)
        return [Stack(*kind) for kind in kinds.values()]

    def _find_rows(self, values: list[Tensor]) -> list[tuple[Owner, list[State]]]:
        """Return the parameters of which some rows are plain, and torch's state of each part."""
        found = []
        for owner, value in zip(self.owners, values, strict=True):
            if parts := owner.local_manifold.plain_parts(value):
                states: list[State] = [{} for _ in parts]
                for name, tensor in owner.state.items():
                    if name.startswith(ROWS):
                        _, word, index = f"{name}.0".split(".")[:3]
                        states[int(index)][word] = owner.local_rows(tensor)
                found.append((owner, states))
        return found

    def _find_joint(self) -> list[int]:
        """Return the places of those whose gradient no single batch can judge."""
        batches = [0] * len(self.owners)
        for stack in self.stacks:
            for batch in stack.batches:
                for place in batch.places:
                    batches[place] += 1
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
        gone = functools.partial(_forget, weakref.ref(self))
        self._windows: list[Any] = [weakref.ref(window, gone) for window in windows]

    def tensors(self) -> list[Tensor]:
        """Return all that a step changes beside the parameters, each memory once."""
        found = [self.steps, self.skipped, *(whole for whole, _ in self.masters)]
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
        for stack in self.stacks:
            stack.forget()
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
        earlier, self._now = self._pointers, self._look()
        if earlier == self._now[1]:
            return True
        pairs = zip(earlier or [-1] * len(self.owners), self._now[1], self.owners, strict=True)
        return all(then == now or owner.is_same() for then, now, owner in pairs)

    # ---- before anything changes ---------------------------------------------------------------

    def take(
        self, grads: list[Tensor | None], nonfinite: str, *, in_graph: bool = False
    ) -> list[Owner]:
        """Set the gradients of this step; return the parameters that others have written to.

        Args:
            grads: One for each parameter, already checked.
            nonfinite: "skip" and "raise" judge them, "ignore" does not.
            in_graph: Whether a compiled graph calls, which writes to parameters itself.
        """
        if self._done is not None:
            self._recover()
        shared = self.is_shared
        self._grads = grads
        if shared:
            self._grads = [
                grad if grad is None or owner.shards is None else owner.shards.local(grad)
                for owner, grad in zip(self.owners, grads, strict=True)
            ]
        self._out = set()
        if not all(map(operator.is_not, grads, itertools.repeat(None))):
            self._out = {place for place, grad in enumerate(grads) if grad is None}
        self.missed, self._ok = [], None
        versions, pointers = self._now
        is_known = self._versions is not None and in_graph
        if is_known or (versions == self._versions and pointers == self._pointers):
            self._changed = set()
        elif self._versions is None or self._pointers is None:
            self._changed = set(range(len(self.owners)))
        else:
            earlier = zip(self._versions, self._pointers, strict=True)
            pairs = zip(zip(versions, pointers, strict=True), earlier, strict=True)
            self._changed = {place for place, (now, then) in enumerate(pairs) if now != then}
        if nonfinite != "ignore" or shared:
            self._judge(nonfinite)
        return [self.owners[place] for place in sorted(self._changed - self._out)]

    def _look(self) -> tuple[list[int], list[int]]:
        """Return what changes when a parameter is written to, or its ``.data`` replaced."""
        tensors = self._local_parameters()
        return list(map(_VERSION, tensors)), list(map(torch.Tensor.data_ptr, tensors))

    def _local_parameters(self) -> list[Tensor]:
        return list(map(local_part, self.parameters)) if self.is_shared else self.parameters

    def _judge(self, nonfinite: str) -> None:
        """Find the parameters whose gradient is not safe: all processes that have a part agree."""
        is_read = is_cpu(self.steps)
        places = list(range(len(self.owners)))
        if is_read and nonfinite == "skip":  # each batch judges the others
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
            ok[members] = (lengths <= largest_safe(dtype)).to(ok.device)
        if self.is_shared:
            ok = self._agreed(ok)
        if not is_read:
            self._ok = ok if nonfinite == "skip" else None
        if is_read or nonfinite == "raise":
            self.missed = [place for place in present if not ok[place]] if not ok.all() else []
            self._out.update(self.missed)

    def _agreed(self, ok: Tensor) -> Tensor:
        """Let processes agree on who moves, and on whose point somebody else has written to."""
        layouts: dict[int, list[Owner]] = {}
        for owner in self.owners:
            if owner.shards is not None and owner.place not in self._out:
                layouts.setdefault(id(owner.shards), []).append(owner)
        for members in layouts.values():
            places = [owner.place for owner in members]
            alone = torch.tensor([place not in self._changed for place in places])
            shards = members[0].shards
            if shards is None:
                continue
            both = shards.agree(torch.cat([ok[places], alone.to(ok.device)]))
            ok[places] = both[: len(places)]
            for place, is_untouched in zip(places, both[len(places) :].tolist(), strict=True):
                if not is_untouched:
                    self._changed.add(place)
        return ok

    # ---- the step ------------------------------------------------------------------------------

    def step(self, move: Move, move_rows: MoveRows, lr: float | Tensor, nonfinite: str) -> None:
        """Move the parameters that have a gradient, and count the step.

        Args:
            move: The rule for matrices.
            move_rows: The rule for the plain rows of parameters that are constrained in part.
            lr: The learning rate.
            nonfinite: "skip" leaves out those whose gradient is not safe.
        """
        if len(self._out) == len(self.owners):
            self.skipped[self.missed] += 1
            return
        values = self._values or [owner.moving() for owner in self.owners]
        is_read = is_cpu(self.steps)
        self._uncounted = self.steps._version
        self._done = []
        with exact_products(self.steps):
            for whole, members in self.masters:
                follow_(whole, torch.stack([owner.local() for owner in members]))
            self._turns += 1
            numbers = self.steps.tolist() if is_read else None
            number = None
            if numbers is not None and min(numbers) == max(numbers):
                number = numbers[0]
            for stack in self.stacks:
                for batch in stack.batches:
                    counts = numbers if number is None else number
                    self._move_batch(batch, values, move, lr, counts, nonfinite == "skip")
            self._move_rows(move_rows, values)
        self._finish(values, is_written=not _is_zero(lr))

    def _move_batch(
        self,
        batch: Batch,
        values: list[Tensor],
        move: Move,
        lr: float | Tensor,
        numbers: list[float] | float | None,
        judges: bool,
    ) -> None:
        """Move the blocks of a batch that have a gradient."""
        places, chosen = batch.places, None
        if self._out:
            chosen = [index for index, place in enumerate(places) if place not in self._out]
            places = [places[index] for index in chosen]
            if not chosen:
                return
            if len(chosen) == len(batch.places):
                chosen = None
        tensors = [values[place] for place in places]
        point = stored = batch.read(tensors, chosen)
        grad = batch.read([self._grads[place] for place in places], chosen)  # type: ignore[misc]
        if grad.dtype != point.dtype:
            grad = grad.to(point.dtype)
        length = math.inf
        if judges and numbers is not None:
            length, most = float(torch.linalg.vector_norm(grad)), largest_safe(grad.dtype)
            if not length <= most and places[0] not in self._joint:  # NaN is not either
                blocks = grad.reshape(len(places), -1)
                good = (torch.linalg.vector_norm(blocks, dim=1) <= most).tolist()
                if not all(good):
                    found = [p for p, is_good in zip(places, good, strict=True) if not is_good]
                    self.missed += found
                    self._out.update(found)
                    self._move_batch(batch, values, move, lr, numbers, judges)
                    return
        step: float | Tensor
        if isinstance(numbers, float):
            step = numbers + 1.0
            due = step % _CORRECTION_PERIOD == 0
        elif numbers is not None:
            counts = [numbers[place] + 1.0 for place in places]
            step = counts[0]
            due = any(count % _CORRECTION_PERIOD == 0 for count in set(counts))
            if min(counts) != max(counts):
                step = batch.of_each(torch.tensor(counts, device=self.steps.device))
        else:
            step = batch.of_each(self.steps[places] + 1.0)
            due = self._turns % _CORRECTION_PERIOD == 0
        reader = reader_for(point, batch.lagged)
        due = due or reader.is_blind
        scale, correct = batch.blocks[0].reading.scale, due
        if scale != 1.0:
            point = point / scale
        index, state = None, batch.state
        if chosen is not None:
            index, state = batch.picked(chosen, self.steps.device)
        # Writes through ``.data`` show only here; rows that are shared are not added up for it.
        looks = due and batch.row_sum is None and reader.is_exact
        settled: bool | Tensor = correct
        if looks or (self._changed and not self._changed.isdisjoint(places)):
            # without a force nothing moves, not even by a correction
            if looks and (length if judges else float(torch.linalg.vector_norm(grad))) == 0.0:
                due = False
            point, settled = settle(point, state, batch.row_sum, batch.row_count, due)
        ok = None if self._ok is None else batch.of_each(self._ok[places])
        base = batch.state.get("deferred_base")
        self._busy = batch, chosen, -1 if base is None else base._version
        if batch.row_sum is not None:  # our rows only: all processes must decide alike
            length = math.inf
        setting = Setting(ok, settled, batch.row_sum, reader, length)
        given = Given(point, grad, state, lr / scale, step, setting, judges)
        new_point = move(given)
        if reader.is_lost and judges:
            overflowed = _start_again(state, new_point)  # X was far off, and nobody saw it
            new_point = torch.where(overflowed, stored / scale, new_point)
            given.overflowed = overflowed
        if isinstance(lr, Tensor):
            new_point = torch.where(lr == 0, point, new_point)
        if scale != 1.0:
            new_point = new_point.mul_(scale)
        if ok is not None:
            new_point = torch.where(ok, new_point, stored)
        if not _is_zero(lr):  # else it keeps its bits, also where X C would differ in the last
            batch.write(tensors, new_point, chosen, stored)
        if index is not None:
            batch.put_back(index, state)
        if given.overflowed is not None:
            self._count_overflow(given.overflowed.view(len(places), -1).any(dim=1), places)
        if self._done is not None:
            self._done += places
        self._busy = None

    def _count_overflow(self, of_blocks: Tensor, places: list[int]) -> None:
        """Tally the parameters whose step left floating point."""
        if is_cpu(of_blocks):
            missed = [p for p, bad in zip(places, of_blocks.tolist(), strict=True) if bad]
            self.missed += missed
            self._out.update(missed)
        else:
            self.skipped[places] += of_blocks

    def _move_rows(self, move_rows: MoveRows, values: list[Tensor]) -> None:
        """Move the plain rows of parameters that are constrained in part, by torch's own rule."""
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        states: list[State] = []
        owners: list[tuple[Owner, list[State]]] = []
        for owner, own in self._rows:
            grad = self._grads[owner.place]
            if grad is None or owner.place in self._out:
                continue
            split, value = owner.local_manifold.plain_parts, values[owner.place]
            parts = [part.to(value.dtype).resolve_conj() for part in split(grad)]
            if not is_cpu(value):  # its kernels take a verdict, but only one
                left = grad.new_zeros((), dtype=torch.float32)
                if self._ok is not None:
                    left = (~self._ok[owner.place]).float()
                move_rows(list(split(value)), parts, own, left)
            parameters += split(value)
            grads += parts
            states += own
            owners.append((owner, own))
        if parameters and is_cpu(self.steps):
            move_rows(parameters, grads, states, None)
        for owner, own in owners:
            for index, state in enumerate(own):
                for word, tensor in state.items():
                    name = ROWS + word + (f".{index}" if index else "")
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
            if self._ok is not None:
                self.skipped[moved] += ~self._ok[moved]
        elif self._ok is None:
            self.steps.add_(1.0)
        else:
            self.steps.add_(self._ok)
            self.skipped.add_(~self._ok)
        if self.missed:
            self.skipped[self.missed] += 1
        if is_written:
            versions, pointers = list(map(_VERSION, self._local_parameters())), self._now[1]
            left = self._out | set(self.missed)
            if left and self._versions is not None and self._pointers is not None:
                pointers = list(pointers)
                for place in left:
                    versions[place] = self._versions[place]
                    pointers[place] = self._pointers[place]
            elif left:
                for place in left:
                    versions[place] = -1
            self._versions, self._pointers = versions, pointers
        self._grads, self._done = [None] * len(self.owners), None

    def _recover(self) -> None:
        """Put the books in order after a step that an exception has ended halfway.

        Blocks that had moved count their step. That under way has its momentum at the point where
        it was: a base that was written since holds it all. Nobody's point is taken for granted.
        """
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
        done = sorted(set(self._done or ()))
        if done and self.steps._version == self._uncounted:
            self.steps[done] += 1.0
        self._busy, self._done, self._versions, self._pointers = None, None, None, None


def _start_again(state: State, new_point: Tensor) -> Tensor:
    """Start the momentum of matrices again whose step left floating point; return which."""
    overflowed = ~new_point.isfinite().all(dim=-1).all(dim=-1)[:, None, None]
    for name, tensor in state.items():
        tensor.masked_fill_(overflowed, 0.0)
        if name == "deferred_factor":
            tensor.diagonal(dim1=-2, dim2=-1).masked_fill_(overflowed[..., 0], 1.0)
    return overflowed


def _is_zero(lr: float | Tensor) -> bool:
    return not isinstance(lr, Tensor) and lr == 0


def _forget(reference: weakref.ref[Constrained], _: Any) -> None:
    """A window is gone: what it belonged to lets go of its memory."""
    constrained = reference()
    if constrained is not None:
        constrained.forget()
