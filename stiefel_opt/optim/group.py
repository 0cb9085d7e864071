"""A step of all groups: whether all is as before, which parameters move, and as which batches.

All gradients are looked at before anything moves. A parameter whose gradient is missing or not
finite keeps its value and its state. A parameter that several batches or several processes share is
judged as a whole.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.numerics.device import (
    address_for,
    exact_products,
    has_values,
    index_on,
    is_cpu,
    reader_for,
    working_dtype,
)
from stiefel_opt.numerics.distributed import local_part
from stiefel_opt.numerics.linalg import Packed
from stiefel_opt.optim import checks
from stiefel_opt.optim.blocks import (
    ConstrainedParameter,
    StateViews,
    join_masters,
    joined,
    move_rows,
    plain_rows_of,
    stacks_of,
)
from stiefel_opt.optim.commit import (
    LARGEST_SAFE,
    Batch,
    Moved,
    StepOptions,
    Task,
    take_step,
)
from stiefel_opt.optim.records import Records, gained_by
from stiefel_opt.optim.sharding import Shards
from stiefel_opt.optim.state import START, State, follow_
from stiefel_opt.optim.torch_rules import Group, step_rows
from stiefel_opt.tags.parameter import mark_unconstrained

# A weight that each of MANY_STEPS steps in a row has turned by more than _LONG radians
# is named in a warning, once.
MANY_STEPS: Final = 100
_LONG: Final = math.pi / 4
# Rounding in X'X and X'U is measured and removed once in so many steps.
_CORRECTION_PERIOD: Final = 8
_LAST_COUNT: Final = 2.0**24  # float32 counts no further

_GRAD = operator.attrgetter("grad")
_VERSION = operator.attrgetter("_version")
_TAG, _NONE = itertools.repeat("manifold"), itertools.repeat(None)
_KIND = operator.attrgetter("shape", "dtype", "layout")


def step_all(optimizer: Any) -> None:
    """Look at the gradients of every group, then move every group."""
    if len(optimizer._indices) != len(optimizer.param_groups):
        optimizer._count_groups()
    groups = optimizer.param_groups
    plain = [_prepare(optimizer, place, group) for place, group in enumerate(groups)]
    if any(plain):
        for group, parameters in zip(groups, plain, strict=True):
            if parameters:
                optimizer._move_plain(group, parameters)
    move_constrained(optimizer, [group["lr"] for group in groups])


def index_for(optimizer: Any, place: int, group: Group) -> GroupIndex:
    """Return what is known of a group, made anew where something is not as before.

    Parameters that have a gradient for the first time are stacked with the others.
    """
    index: GroupIndex | None = optimizer._indices[place]
    if index is None or not index.describes(optimizer, group):
        index = optimizer._renew(place, group)
    if index.waiting:
        params = group["params"]
        if late := [i for i in index.waiting if params[i].grad is not None]:
            optimizer._admit(index, group, late)
    return index


def _prepare(optimizer: Any, place: int, group: Group) -> list[Tensor]:
    """Look at the gradients of a group before anything changes; return the plain parameters."""
    if type(lr := group["lr"]) is not float or not abs(lr) <= checks.LARGEST_LR:
        checks.usable_lr(lr)
    index = index_for(optimizer, place, group)
    for weights in index.device_groups:
        grads = list(map(_GRAD, weights.parameters))
        if not weights.check_gradients(grads, optimizer.param_groups):
            optimizer._renew(place, group)
            return _prepare(optimizer, place, group)
        changed = weights.set_gradients(grads, group["nonfinite"])
        if changed or weights.unsafe or weights.overflowed:
            optimizer._refuse(group, weights, changed)
    return index.plain_with_gradient(optimizer, group) if index.plain else []


def move_constrained(optimizer: Any, lrs: Sequence[float | Tensor]) -> None:
    """Move the constrained parameters of every group; last, warn or raise for missed steps."""
    missed: dict[bool, list[Tensor]] = {False: [], True: []}
    for group, index, lr in zip(optimizer.param_groups, optimizer._indices, lrs, strict=True):
        if index is None:
            continue
        if index.options.lr is not lr:
            index.options = index.options._replace(lr=checks.usable_lr(lr))
        for weights, capture in zip(index.device_groups, index.captures, strict=True):
            options = index.options
            if weights.rows:  # not kept: it may hold the optimizer
                rule_of_rows = partial(step_rows, optimizer._step_plain, group)
                options = options._replace(move_rows=rule_of_rows)
            with exact_products(weights.steps):
                turning = (capture or weights).step(options)
            if weights.unsafe or weights.overflowed:
                places = [*weights.unsafe, *weights.overflowed]
                missed[options.nonfinite == "raise"] += map(weights.parameters.__getitem__, places)
            if turning:
                checks.warn_of_long_steps(turning, optimizer.param_groups, MANY_STEPS)
    if missed[False]:
        checks.warn_of_skipped(missed[False], optimizer.param_groups)
    if missed[True]:
        checks.refuse_overflow(missed[True][0], optimizer.param_groups)


def _found_in(group: Group) -> list[Any]:
    """Return the parameters of a group and their tags."""
    params = group["params"]
    return [group["stiefel"], *params, *map(getattr, params, _TAG, _NONE)]


class GroupIndex:
    """Which parameters of a group are plain, and which are constrained and have state.

    ``plain`` and ``waiting`` hold places in the group. A constrained parameter is waiting until it
    has a first gradient.
    """

    def __init__(self, optimizer: Any, group: Group) -> None:
        params, self._found = list(group["params"]), _found_in(group)
        self.device_groups: list[DeviceGroup] = []
        self.captures: list[Any] = []
        mark_unconstrained(params, group["stiefel"] is False)
        self._bind(optimizer, group)
        self.readings = [checks.reading(parameter, group) for parameter in params]
        checks.check_shapes(params, self.readings, optimizer.param_groups)
        checks.check_learned_scale(group, optimizer)
        self.plain = [i for i, manifold in enumerate(self.readings) if manifold is None]
        self.waiting = [i for i, manifold in enumerate(self.readings) if manifold is not None]

    def _bind(self, optimizer: Any, group: Group) -> None:
        optimizer.check_options(group)
        names = [name for name in optimizer.defaults if name != "lr"]
        self._options_of = operator.itemgetter(*names)
        self._options = self._options_of(group)
        self.declared = optimizer.declared_for(group)
        rules = optimizer.rule_for(group), optimizer.correction_for(group)
        scale_rule, nonfinite = optimizer.scale_rule_for(group), group["nonfinite"]
        self.options = StepOptions(*rules, None, 0.0, nonfinite, scale_rule)
        optimizer._allow_captures(self, group)

    def describes(self, optimizer: Any, group: Group) -> bool:
        """Say whether parameters, tags and state are as they were; bind options that are new."""
        if self._options_of(group) != self._options:
            declared = self.declared
            self._bind(optimizer, group)
            if declared != self.declared:
                return False
        found, states = _found_in(group), itertools.repeat(optimizer.state)
        return (
            len(found) == len(self._found)
            and all(map(operator.is_, found, self._found))
            and all(map(DeviceGroup.is_intact, self.device_groups, states))
        )

    def plain_with_gradient(self, optimizer: Any, group: Group) -> list[Tensor]:
        """Return the plain parameters that move; raise for gradients that cannot be used."""
        params = group["params"]
        plain = [params[place] for place in self.plain if params[place].grad is not None]
        for parameter in plain:
            if parameter.grad.is_sparse and not optimizer._sparse_allowed:
                checks.refuse_sparse(parameter, optimizer.param_groups)
            if parameter.grad.shape != parameter.shape:
                checks.refuse_gradient(parameter, optimizer.param_groups)
        return plain


class DeviceGroup:
    """The constrained parameters of a group on one device that have had a gradient.

    The tensors in their state and in the counts of their skipped steps are replaced by views.
    """

    def __init__(
        self, weights: list[ConstrainedParameter], records: Records, declared: Sequence[State]
    ) -> None:
        skip_counts = [records.skip_counts_of(weight.parameter) for weight in weights]
        self.weights = weights
        self.parameters = [weight.parameter for weight in weights]
        self._states = [weight.state for weight in weights]
        self.is_shared = any(weight.shards is not None for weight in weights)
        self._address = address_for(self.parameters)
        counters = [(weight.state, "step") for weight in weights]
        counters += [(counts, "skipped") for counts in skip_counts]
        self._counts = joined(counters).view(2, -1)
        self.steps, self.skips = self._counts
        self.reads = is_cpu(self.steps)
        self._everywhere, self._all = list(range(len(weights))), set(range(len(weights)))
        self._pending_overflows = joined([(counts, "pending_overflows") for counts in skip_counts])
        self._local = torch.tensor([w.shards is None for w in weights], device=self.steps.device)
        self.masters = join_masters(weights)
        values = [weight.moving() for weight in weights]
        stacks = stacks_of(weights, values, declared)
        self.batches = [Batch(stack, *piece) for stack in stacks for piece in stack.pieces]
        self.rows = plain_rows_of(weights, values)
        # what moves, if it is the parameters; masters and shards are looked up in every step
        self._values = None if self.is_shared or self.masters else values
        self._joint = self._find_joint()
        self._is_forgotten = False
        self.views = StateViews(weights, {state.name for state in declared}, self.forget)
        # the step under way: gradients, places of skipped weights, a mask of those that move
        self._grads: list[Tensor | None] = []
        self._skipped: set[int] = set()
        self._ok: Tensor | None = None
        self.is_judged, self.is_traced = True, False
        self.is_due: bool | None = None  # whether a captured step removes rounding
        # indices of weights with unsafe gradients or overflow; empty where reading would wait
        self.unsafe: list[int] = []
        self.overflowed: list[int] = []
        # versions and addresses of the parameters: now, and after our last write
        self._now = self._look()
        self._seen = [-1] * len(weights), [-1] * len(weights)
        self._changed: set[int] = set()  # places that somebody else has written to
        self._numbers: float | Tensor | None = None  # where they may be read

    def _find_joint(self) -> list[int]:
        """Return the places of weights that no single batch can judge, and of their neighbours."""
        batches = Counter(place for batch in self.batches for place in batch.places)
        joint = {weight.place for weight, _ in self.rows}
        for weight in self.weights:
            if batches[weight.place] != 1 or weight.shards is not None:
                joint.add(weight.place)
        for batch in self.batches:
            batch.is_joint = not joint.isdisjoint(batch.places)
        return sorted(joint.union(*(batch.places for batch in self.batches if batch.is_joint)))

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step writes except parameters, without duplicates."""
        changed = [self._counts, self._pending_overflows]
        changed += [whole for whole, _ in self.masters]
        for batch in self.batches:
            state = batch.state
            changed += [state.flat] if isinstance(state, Packed) else list(state.values())
        for _, states in self.rows:
            changed += [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return changed

    def forget(self) -> None:
        """Let go of all state: a user has dropped a view, perhaps to free its memory."""
        for batch in self.batches:
            batch.state = {}
        self.masters = []
        self._is_forgotten = True

    def is_intact(self, states: Any) -> bool:
        """Say whether this was built of these parameters and of the tensors in ``states``."""
        slots: list[Any] = list(itertools.starmap(dict.get, self.views.slots))
        if (
            self._is_forgotten
            or not all(map(operator.is_, map(states.get, self.parameters), self._states))
            or list(map(id, slots)) != self.views.ids
            or list(map(self.views.address, slots)) != self.views.memory
        ):
            return False
        self._now = self._look()
        return self._now[1] == self._seen[1] or all(
            seen == now or weight.is_same()
            for seen, now, weight in zip(self._seen[1], self._now[1], self.weights, strict=True)
        )

    def angles(self) -> dict[Tensor, float]:
        """Return the largest angle of the last step in radians, by parameter."""
        angles: dict[int, float] = {}
        for place, angle in itertools.chain(*(batch.angles().items() for batch in self.batches)):
            angles[place] = max(angle, angles.get(place, 0.0))
        for shards, places in self._layouts(range(len(self.weights))):
            own = self.steps.new_tensor([angles.get(place, -1.0) for place in places])
            largest = zip(places, shards.largest(own).tolist(), strict=True)
            angles |= {place: angle for place, angle in largest if angle >= 0}
        return {self.parameters[place]: angle for place, angle in angles.items()}

    def _layouts(self, places: Iterable[int]) -> list[tuple[Shards, list[int]]]:
        """Return which of these weights share a layout over processes."""
        layouts: dict[int, tuple[Shards, list[int]]] = {}
        for place in places:
            if (shards := self.weights[place].shards) is not None:
                layouts.setdefault(id(shards), (shards, []))[1].append(place)
        return list(layouts.values())

    # ---- before anything changes ---------------------------------------------------------------

    def check_gradients(self, grads: list[Tensor | None], groups: list[Group]) -> bool:
        """Raise for gradients of another kind; return False if a parameter has changed its kind."""
        for weight, grad in zip(self.weights, grads, strict=True):
            if grad is None or _KIND(grad) == weight.kind:
                continue
            if grad.layout is not torch.strided:
                checks.refuse_sparse(weight.parameter, groups)
            if weight.is_same() or grad.shape != weight.parameter.shape:
                checks.refuse_gradient(weight.parameter, groups)
            return False
        return True

    def set_gradients(
        self, grads: list[Tensor | None], nonfinite: str, *, in_graph: bool = False
    ) -> list[Tensor]:
        """Set and judge the gradients of this step, one for each parameter, already checked.

        Returns: The parameters written to from outside; writes of a compiled graph are ignored.
        """
        self._grads, self._skipped, self._changed = grads, set(), set()
        self.unsafe, self.overflowed, self._ok = [], [], None
        self.is_traced = in_graph
        if self.is_shared:
            self._grads = [
                grad if grad is None or weight.shards is None else weight.shards.local(grad)
                for weight, grad in zip(self.weights, grads, strict=True)
            ]
        if not all(map(operator.is_not, grads, _NONE)):
            self._skipped = {place for place, grad in enumerate(grads) if grad is None}
        if self._now != self._seen:
            now, seen = (list(zip(*look, strict=True)) for look in (self._now, self._seen))
            self._changed = {
                place
                for place in range(len(now))
                if now[place] != seen[place] and not (in_graph and seen[place][0] >= 0)
            }
        self.is_judged = self.reads or self.is_shared or nonfinite != "skip"
        is_ours = nonfinite == "raise" or bool(nonfinite == "skip" and self._joint)
        if self.is_judged and (is_ours or self.is_shared):  # else each batch judges its own
            self._judge(nonfinite)
        if not self._changed:
            return []
        return [self.parameters[place] for place in sorted(self._changed - self._skipped)]

    def _look(self) -> tuple[list[int], list[int]]:
        """Return what changes when a parameter is written to, or its ``.data`` replaced."""
        local = list(map(local_part, self.parameters)) if self.is_shared else self.parameters
        return self._versions(), list(map(self._address, local))

    def _versions(self) -> list[int]:
        """Return the versions: an operation on a DTensor counts there, or at its local tensor."""
        own = list(map(_VERSION, self.parameters))
        if not self.is_shared:
            return own
        return list(map(operator.add, own, map(_VERSION, map(local_part, self.parameters))))

    def _judge(self, nonfinite: str) -> None:
        """Find the parameters with unsafe gradients; processes that share one agree."""
        places = list(range(len(self.weights)))
        if nonfinite == "skip":  # each batch judges the others
            if not self._joint:
                return
            places = self._joint
        present = [place for place in places if place not in self._skipped]
        ok = torch.ones(len(self.weights), dtype=torch.bool, device=self.steps.device)
        kinds: dict[torch.dtype, list[int]] = {}
        if nonfinite != "ignore":
            for place in present:
                kinds.setdefault(self._grads[place].dtype, []).append(place)  # type: ignore[union-attr]
        for dtype, members in kinds.items():
            lengths = _lengths_of([self._grads[place] for place in members])  # type: ignore[misc]
            safe = (lengths <= LARGEST_SAFE[dtype]).to(ok.device)
            ok = safe if members == self._everywhere else ok.index_copy(0, self._at(members), safe)
        if self.is_shared:
            ok = self._agreed(ok)
        if not self.reads:
            self._ok = ok if nonfinite == "skip" else None
        if self.reads or nonfinite == "raise":
            self.unsafe = [place for place in present if not ok[place]] if not ok.all() else []
            self._skipped.update(self.unsafe)

    def _agreed(self, ok: Tensor) -> Tensor:
        """All-reduce (MIN) three flags over processes: safe, not written to, no overflow before."""
        present = [place for place in range(len(self.weights)) if place not in self._skipped]
        for shards, places in self._layouts(present):
            same = torch.tensor([place not in self._changed for place in places], device=ok.device)
            flags = torch.cat([ok[places], same, self._pending_overflows[places] == 0])
            ok[places], same, sound = shards.agree(flags).tensor_split(3)
            self._changed.update(itertools.compress(places, (~same).tolist()))
            self.overflowed += itertools.compress(places, (~sound).tolist())
        if self.overflowed:
            self.skips[self.overflowed] += 1
            self._pending_overflows[self.overflowed] = 0
        return ok

    # ---- the step ------------------------------------------------------------------------------

    def step(self, options: StepOptions) -> list[Tensor]:
        """Move the parameters that have a gradient, count the step; return who always turns far."""
        for batch in self.batches:
            batch.last = None
        if len(self._skipped) == len(self.weights):
            self.skips[self.unsafe] += 1
            self._grads = []
            return []
        if not self.is_judged:  # nobody reads the verdict before the step
            self._judge(options.nonfinite)
        values = self._values or [weight.moving() for weight in self.weights]
        lr = options.lr
        if self._changed and isinstance(lr, Tensor) and lr == 0:  # a look waits in any case
            lr, options = 0.0, options._replace(lr=0.0)  # nothing is projected
        for whole, members in self.masters:
            follow_(whole, torch.stack([weight.local() for weight in members]))
        if self.reads:
            counts = self.steps.tolist()
            self._numbers = counts[0] + 1.0 if len(set(counts)) == 1 else self.steps + 1.0
        moved: Moved = {}
        turning: list[Tensor] = []
        overflows: list[tuple[list[int], Tensor]] = []
        try:
            for batch in self.batches:
                task = self._task_for(batch, options, values, moved)
                if task is None:
                    continue
                unsafe, overflowed = take_step(task)
                self.unsafe += unsafe
                self._skipped.update(unsafe)
                if overflowed is not None:
                    overflows.append((task.places, overflowed))
                if batch.long_steps == MANY_STEPS:
                    far = [place for place, angle in batch.angles().items() if angle > _LONG]
                    turning += [self.parameters[place] for place in far]
            if self.rows and self.is_due is None:
                self.move_rows(values, options)
            # even if this process has no matrices of one
            moved[None] = self._everywhere, None
        finally:
            self._finish(values, moved, isinstance(lr, Tensor) or lr != 0)
        if overflows:
            self._count(overflows, options.nonfinite)
        return turning

    def move_rows(self, values: list[Tensor], options: StepOptions) -> None:
        """Move the plain rows of the parameters that have a gradient."""
        own = [pair for pair in self.rows if pair[0].place not in self._skipped]
        move_rows(own, self._grads, values, self._ok, self.reads, options.move_rows)

    def _at(self, places: Sequence[int]) -> Tensor:
        """Return the index of these weights."""
        return index_on(self.steps.device, places)

    def _of(self, numbers: Tensor, places: list[int]) -> Tensor:
        """Return one number for each of these weights."""
        return numbers if places == self._everywhere else numbers[self._at(places)]

    def _task_for(
        self, batch: Batch, options: StepOptions, values: list[Tensor], done: Moved
    ) -> Task | None:
        """Return the step of a batch; None if none of its weights moves."""
        places, chosen, grads = batch.places, None, self._grads
        if self._skipped and not self._skipped.isdisjoint(places):
            chosen = [i for i, place in enumerate(places) if place not in self._skipped]
            places = [places[i] for i in chosen]
            if not chosen:
                return None
        number, is_due = _number(self, batch, places, options.rule)
        return Task(
            batch,
            options,
            chosen,
            places,
            values if places == self._everywhere else list(map(values.__getitem__, places)),
            grads if places == self._everywhere else list(map(grads.__getitem__, places)),  # type: ignore[arg-type]
            number,
            None
            if self._ok is None or not batch.is_joint
            else batch.of_each(self._of(self._ok, places)),
            is_due,
            bool(self._changed) and not self._changed.isdisjoint(places),
            done,
        )

    def _count(self, overflows: list[tuple[list[int], Tensor]], nonfinite: str) -> None:
        """Count overflows; those of weights that processes share are reported by the next step."""
        counts = torch.zeros_like(self.skips)
        for places, mask in overflows:
            lost = mask.view(len(places), -1).sum(dim=1)
            counts.index_add_(0, self._at(places), lost.to(counts))
        some = counts > 0
        self._pending_overflows += some & ~self._local
        self.skips += some & self._local
        if self.reads or nonfinite == "raise":
            self.overflowed += (some & self._local).nonzero().flatten().tolist()

    def _finish(self, values: list[Tensor], done: Moved, is_written: bool) -> None:
        """Write masters and shards into their parameters, and count the step."""
        moved = self._all
        if self._skipped or None not in done:
            moved = set(itertools.chain(*(places for places, _ in done.values()))) - self._skipped
        if None not in done:  # interrupted: what matrices have in common is to be read again
            for batch in self.batches:
                batch.lagged.part(may_wait=True)
        counts = _counted(self, moved) if self.reads else None
        gained = None if self.reads else gained_by(self, moved, done)
        written = values if is_written else []
        try:
            self._write(written, counts)
        except BaseException:  # an interrupted write is completed
            self._write(written, counts)
            raise
        finally:
            if gained is not None:  # not to be repeated
                self._counts.add_(gained)
        if is_written:
            remember_what_was_written(self, moved, gained)
            for place in self._changed:
                state = self._states[place]
                if START in state and self._seen[0][place] >= 0:
                    state[START] = abs(state[START])
        self._grads = []

    def _write(self, values: list[Tensor], counts: Tensor | float | None) -> None:
        """Write ``values``, if there are any, into their parameters; can be repeated."""
        for whole, members in self.masters if values else ():
            if members[0].shards is None:
                torch._foreach_copy_([w.parameter for w in members], list(whole.unbind()))
        if self.is_shared:
            for weight, value in zip(self.weights, values, strict=False):
                if weight.shards is not None and weight.place not in self._skipped:
                    weight.shards.write(weight.parameter, value)
        if isinstance(counts, float):
            self.steps.fill_(counts)
        elif counts is not None:
            self._counts.copy_(counts)


def remember_what_was_written(
    weights: DeviceGroup, moved: set[int], gained: Tensor | None = None
) -> None:
    """Note the versions of parameters that have moved: their values are on the manifold."""
    earlier, weights._seen = weights._seen, (weights._versions(), weights._now[1])
    if moved is weights._all and not (weights._changed and gained is not None):
        return
    weights._seen, skipped = (weights._seen[0], list(weights._seen[1])), weights._skipped
    if len(moved) < len(weights.weights):
        skipped = skipped | set(range(len(weights.weights))).difference(moved)
    # the look has waited already
    if gained is not None and weights._changed and has_values(gained):
        taken = gained[0].tolist()
        skipped = skipped | {place for place in weights._changed if not taken[place]}
    for place in skipped:
        for now, then in zip(weights._seen, earlier, strict=True):
            now[place] = then[place]


def _number(
    weights: DeviceGroup, batch: Batch, places: list[int], rule: Any
) -> tuple[float | Tensor, bool]:
    """Return the number of this step for a batch, and whether rounding is to be removed.

    Off a CPU it is a number of the host if all of the batch have it in common, and the host will
    learn of one that stays: by the bound of its step.
    """
    if isinstance(weights._numbers, float):
        return weights._numbers, _is_due(weights._numbers)
    if weights._numbers is None:
        batch.begun += 1
        is_due = batch.begun % _CORRECTION_PERIOD == 0
        is_due = is_due if weights.is_due is None else weights.is_due
        is_told = batch.bounded_by is rule and not batch.is_joint and places == batch.places
        reader, steps = reader_for(weights.steps, batch.lagged), weights._of(weights.steps, places)
        if not is_told:
            batch.lagged.part(may_wait=batch.is_new)
        same = reader.same("step", steps) if is_told else None
        if same is None:
            return batch.of_each(steps + 1.0), is_due
        reader.keep("step", same + 1.0)
        return same + 1.0, is_due
    numbers = weights._of(weights._numbers, places)
    each = set(numbers.tolist())
    is_due = any(map(_is_due, each))
    return (each.pop() if len(each) == 1 else batch.of_each(numbers)), is_due


def _counted(weights: DeviceGroup, moved: set[int]) -> Tensor | float:
    """Return the counts of steps, taken and skipped, after this one."""
    numbers = weights._numbers
    if isinstance(numbers, float) and len(moved) == len(weights.weights):
        return numbers
    counts = weights._counts.clone()
    counts[0, weights._at(sorted(moved))] += 1
    counts[1, weights.unsafe] += 1
    return counts


def _is_due(number: float) -> bool:
    """Say whether a step removes rounding: every one does where the count stands still."""
    return number % _CORRECTION_PERIOD == 0 or number > _LAST_COUNT


def _lengths_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the length of each of several gradients of one dtype and device, without waiting."""
    dtype = working_dtype(grads[0].dtype)
    wide = None if dtype == grads[0].dtype else dtype
    return torch.stack(torch._foreach_norm(list(grads), 2, wide))
