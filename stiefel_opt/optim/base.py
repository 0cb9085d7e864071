"""The only step(): closure, gathering, lazy state, stacking, checkpoints, plain parameters."""

from __future__ import annotations

import math
import numbers
import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt._checks import fail
from stiefel_opt.functional.finite import Watch
from stiefel_opt.functional.precision import exact_products
from stiefel_opt.linalg import reads
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.batch import Batch, Given
from stiefel_opt.optim.faults import step_safely, warn_of_skipped, warn_of_tallies
from stiefel_opt.optim.gathered import Gathered, gather
from stiefel_opt.optim.loading import (
    check_plain_rule,
    check_state_dict,
    check_states,
    mark,
    rule_of,
    take_marks,
    without_plain,
)
from stiefel_opt.optim.master import keep_precision
from stiefel_opt.optim.plain import step_rows
from stiefel_opt.optim.readings import (
    Group,
    as_plain_data,
    check_saved_readings,
    name_of,
    reading,
)
from stiefel_opt.optim.refusals import (
    check_finite,
    check_new_group,
    refuse_gradient,
    refuse_nonfinite,
    refuse_sparse,
    warn_if_nothing_is_constrained,
)
from stiefel_opt.optim.settling import settle
from stiefel_opt.optim.shards import Shards
from stiefel_opt.optim.stack import Stack
from stiefel_opt.optim.state import State, StateNames, complete_state, forget_constrained

__all__ = ["StiefelOptimizer"]

# Rounding in X'X and X'U is measured and removed every so many steps where reading the count is
# free, and in every step elsewhere.
_CORRECTION_PERIOD = 8

# A turn is complete long before; the square of the rate must be a number of float32.
_LONGEST_RATE = 2.0**50


class StiefelOptimizer(Optimizer):
    """Base of all optimizers here: a group holds constrained and plain parameters side by side.

    A subclass says which state it keeps (:meth:`_state_names`), how a batch of matrices moves
    (:meth:`_move`), and which functions of torch move plain parameters (:meth:`_step_plain`,
    :meth:`_step_plain_rows`).
    """

    _sparse_allowed: bool = False  # gradients of plain parameters

    def __init__(self, params: Any, defaults: Group) -> None:
        self._gathered: dict[int, Gathered] = {}
        self._known_states: list[Group] = []  # the state of each parameter, as a step left it
        self._tallies: dict[tuple[int, ...], tuple[list[Tensor], Tensor]] = {}  # of skipped steps
        self._told = 0  # how many of them a warning has told
        super().__init__(params, defaults)
        warn_if_nothing_is_constrained(type(self).__name__, self.param_groups)

    # ---- what a subclass says ------------------------------------------------------------------

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """Raise unless the options of a group make sense."""

    @abstractmethod
    def _state_names(self, group: Group) -> StateNames:
        """Return what a group keeps for each matrix, which may depend on its options."""

    @abstractmethod
    def _move(self, group: Group, batch: Batch, given: Given) -> Tensor:
        """Return the new point of a batch and update its state."""

    @abstractmethod
    def _is_stale(self, point: Tensor, batch: Batch) -> bool:
        """Say whether the momentum of a batch belongs to another point."""

    @abstractmethod
    def _step_plain(self, group: Group, parameters: list[Tensor]) -> None:
        """Apply torch's own rule to whole parameters."""

    @abstractmethod
    def _step_plain_rows(
        self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[Group]
    ) -> None:
        """Apply torch's own rule to views of rows; ``states`` are the same rows of the state."""

    # ---- groups --------------------------------------------------------------------------------

    @override
    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as ``torch.optim.Optimizer``; a refused group leaves no trace."""
        if not isinstance(param_group, dict):
            raise TypeError(fail("param_group", "be a dict", type(param_group).__name__))
        group = {**self.defaults, **param_group}
        group["stiefel"] = as_plain_data(group["stiefel"])
        if isinstance(group["params"], Tensor):
            group["params"] = [group["params"]]
        elif not isinstance(group["params"], set):  # a set is refused by torch
            group["params"] = list(group["params"])
        for name, value in group.items():  # numpy's: a checkpoint holds plain numbers
            plain = type(value) in (bool, int, float)
            if isinstance(value, numbers.Real) and not plain:
                group[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        self._check_options(group)
        check_new_group(group, self.param_groups)
        super().add_param_group(group)

    # ---- the step ------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient.

        Args:
            closure: Evaluates the model again and returns the loss; called once, with grad enabled.

        Returns: What the closure returned, or None.
        Raises:
            ValueError, TypeError: for gradients that cannot be used, naming the parameter and
                before anything has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            self._step_traced()
            return loss
        states = self.state.values()
        if len(states) != len(self._known_states) or not all(
            map(operator.is_, states, self._known_states)
        ):
            self._gathered = {}  # somebody dropped or replaced the state of a parameter
        for group in self.param_groups:  # a schedule may have left the numbers
            if isinstance(group["lr"], float) and not math.isfinite(group["lr"]):
                raise ValueError(fail("lr", "be finite", group["lr"], "look at its schedule"))
        gathered = [self._gather(i, group) for i, group in enumerate(self.param_groups)]
        for group, work in zip(self.param_groups, gathered, strict=True):
            self._check_gradients(work, raises=group["nonfinite"] == "raise")
        for group, work in zip(self.param_groups, gathered, strict=True):
            self._init_group(group, work)
        for group, work in zip(self.param_groups, gathered, strict=True):
            if work.plain:
                self._step_plain(group, work.plain)
            for stack in work.stacks:
                with exact_products(stack.parameters[0]):
                    self._step_stack(group, stack)
        self._known_states = list(self.state.values())
        return loss

    def _step_traced(self) -> None:
        """The same for ``torch.compile``: on what the last eager step gathered."""
        for number, group in enumerate(self.param_groups):
            work = self._gathered.get(number)
            if work is None:
                raise RuntimeError(
                    "`step` must have made its state, got none; run one step before compiling it"
                )
            if work.plain:
                self._step_plain(group, work.plain)
            for stack in work.stacks:
                stack.take([p.grad for p in stack.owners])  # type: ignore[misc]
                with exact_products(stack.parameters[0]):
                    self._step_stack(group, stack)

    def _gather(self, number: int, group: Group) -> Gathered:
        """Return what a step of a group works on; kept while nothing of it has changed."""
        active = [p for p in group["params"] if p.grad is not None]
        names = self._state_names(group)
        work = self._gathered.get(number)
        if work is None or not work.fits(active, group["stiefel"], names):
            work = self._gathered[number] = gather(active, group, names)
            for parameter in work.plain:
                forget_constrained(self.state, parameter, names)
        return work

    def _check_gradients(self, work: Gathered, raises: bool) -> None:
        """Raise naming the parameter where a gradient, or a value about to be projected, is bad."""
        groups = self.param_groups
        for parameter in work.plain:
            plain_grad: Tensor = parameter.grad  # type: ignore[assignment]
            if plain_grad.is_sparse and not self._sparse_allowed:
                refuse_sparse(parameter, groups)
            if plain_grad.shape != parameter.shape:
                refuse_gradient(parameter, groups)
        for index, (_, members, shards) in enumerate(work.equals):
            shape, dtype = members[0].shape, members[0].dtype
            grads: list[Tensor] = [p.grad for p in members]  # type: ignore[misc]
            for parameter, grad in zip(members, grads, strict=True):
                if grad.layout is not torch.strided:
                    refuse_sparse(parameter, groups)
                if grad.shape != shape or grad.dtype is not dtype:
                    refuse_gradient(parameter, groups)
            if raises:
                for parameter in members:
                    refuse_nonfinite(parameter, groups, shards)
            stack = work.stacks[index] if work.stacks else None
            if stack is not None:
                stack.take(grads)
            if stack is None or not stack.untouched():
                for parameter in members:
                    check_finite(parameter, groups, shards)

    def _init_group(self, group: Group, work: Gathered) -> None:
        """Make the state that is still missing, and stack it."""
        if len(work.stacks) == len(work.equals):
            return
        work.stacks = [
            Stack(
                members,
                manifold,
                [self._init_state(p, manifold, group, shards) for p in members],
                shards,
            )
            for manifold, members, shards in work.equals
        ]
        for stack in work.stacks:
            owners = stack.owners
            key = tuple(map(id, owners))
            stack.skipped = self._tallies.setdefault(key, (owners, stack.skipped))[1]
            stack.take([p.grad for p in owners])  # type: ignore[misc]

    def _init_state(
        self, parameter: Tensor, manifold: Stiefel, group: Group, shards: Shards | None = None
    ) -> State:
        """Return the state of a constrained parameter, with what is missing made."""
        names, groups = self._state_names(group), self.param_groups
        state: State = self.state[parameter]
        return complete_state(
            state, names, parameter, manifold, lambda: name_of(parameter, groups), shards
        )

    def _step_stack(self, group: Group, stack: Stack) -> None:
        """Move all parameters of a stack."""
        lr = group["lr"]
        if not isinstance(lr, Tensor) or reads(lr):
            lr = min(float(lr), _LONGEST_RATE)
        frozen = not isinstance(lr, Tensor) and lr == 0
        stack.advance()
        due = not reads(stack.steps) or stack.due(_CORRECTION_PERIOD)
        move = partial(self._moved, group, stack, lr, due)
        move_rows = None
        if stack.manifold.rows is not None:
            move_rows = partial(step_rows, stack, self._step_plain_rows, group)
        skipped: list[Tensor] = []
        if group["nonfinite"] == "skip":
            skipped = step_safely(stack, move, move_rows, write=not frozen)
        else:
            for batch in stack.batches:
                new_point = move(batch)
                if not frozen:  # else it keeps its bits, also where X C would differ in the last
                    batch.write(new_point)
            if move_rows is not None:
                move_rows()
        stack.finish(written=not frozen, all_of_them=not skipped)
        if skipped:
            warn_of_skipped(skipped, self.param_groups)

    def _moved(
        self,
        group: Group,
        stack: Stack,
        lr: float | Tensor,
        due: bool,
        batch: Batch,
        watch: Watch | None = None,
    ) -> Tensor:
        """Return the new matrices of a batch, as they are written; its state changes."""
        scale = stack.manifold.scale
        point, grad = batch.point(), batch.grad()
        if scale != 1.0:
            point = point / scale
        correct: bool | Tensor = due
        # Writes through ``.data`` show only here; rows that are shared are not added up for it.
        looks = due and stack.row_sum is None and reads(point)
        if looks or (stack.fresh and not torch.compiler.is_compiling()):
            # without a force nothing moves, not even by a correction
            due = due and not (looks and float(torch.linalg.vector_norm(grad, ord=math.inf)) == 0.0)
            point, correct = settle(point, batch, due, self._is_stale)
        new_point = self._move(group, batch, Given(point, grad, lr / scale, correct, watch))
        if isinstance(lr, Tensor):
            new_point = torch.where(lr == 0, point, new_point)
        return new_point if scale == 1.0 else new_point.mul_(scale)

    # ---- checkpoints ---------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with the reading of each parameter beside it."""
        packed = super().state_dict()
        if any(not reads(tally) for _, tally in self._tallies.values()):
            self._told = warn_of_tallies(self.skipped_steps(), self._told)
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            readings = [reading(parameter, group) for parameter in group["params"]]
            if any(reading is not None for reading in readings):
                saved["readings"] = [r if r is None else r.as_dict() for r in readings]
        mark(packed["param_groups"], rule_of(type(self)))
        return packed

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or from the same rule of torch.

        The readings of this optimizer's parameters stay as they are, and the state of constrained
        half-precision ones stays in float32. Of a checkpoint of ``torch.optim.SGD`` or ``Adam`` the
        options and the state of plain parameters are taken; that of constrained ones starts anew.

        Raises:
            ValueError: if a parameter was saved under another reading or its state has another
                shape, naming it; for the state of another rule, of a newer version, and options
                that make no sense. Nothing has changed then.
            TypeError: for what is no state_dict.
        """
        check_state_dict(state_dict)
        saved_groups = [dict(saved) for saved in state_dict["param_groups"]]
        of_torch = take_marks(saved_groups, type(self))
        if of_torch:
            check_plain_rule(state_dict["state"], saved_groups, self.defaults)
        check_saved_readings(self.param_groups, saved_groups)
        for group, saved in zip(self.param_groups, saved_groups, strict=False):
            saved["stiefel"] = group["stiefel"]
            for name in self.defaults:  # a checkpoint of torch lacks our options
                saved.setdefault(name, group[name])
        final: dict[str, Any] = {}
        tallies, told = self._tallies, self._told

        def examine(_: Optimizer, found: dict[str, Any]) -> None:  # as other hooks leave it
            groups = self.param_groups, found["param_groups"]
            if of_torch:
                found["state"] = without_plain(found["state"], *groups)
            for group, saved in zip(*groups, strict=False):
                self._check_options({**group, **saved})
            check_states(found["state"], *groups, self._state_names)
            final.update(found)

        handle = self.register_load_state_dict_pre_hook(examine)
        try:
            super().load_state_dict({**state_dict, "param_groups": saved_groups})
        finally:
            handle.remove()
        keep_precision(self.state, self.param_groups, final)
        self._tallies, self._told = tallies, told

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gathered, self._known_states = {}, []
        self._tallies, self._told = {}, 0
        for kept in self.state.values():  # as torch: old checkpoints count in integers
            if "step" in kept and not isinstance(kept["step"], Tensor):
                kept["step"] = torch.tensor(float(kept["step"]))
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # ---- what a user may ask -------------------------------------------------------------------

    def skipped_steps(self) -> dict[str, int]:
        """Return how many steps each parameter has missed because its gradient was not finite.

        Parameters that missed none are left out. Counted since this optimizer was made, under
        ``nonfinite="skip"``. Waits for an accelerator.
        """
        counts = self.skipped_steps_of().items()
        return {name_of(parameter, self.param_groups): count for parameter, count in counts}

    def skipped_steps_of(self) -> dict[Tensor, int]:
        """Return what :meth:`skipped_steps` does, by parameter."""
        found: dict[Tensor, int] = {}
        for owners, tally in self._tallies.values():
            for parameter, count in zip(owners, tally.tolist(), strict=True):
                if count:
                    found[parameter] = found.get(parameter, 0) + count
        return found

    @override
    def __repr__(self) -> str:
        tensors, matrices, plain = 0, 0, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                manifold = reading(parameter, group)
                if manifold is None:
                    plain += 1
                else:
                    tensors += 1
                    matrices += manifold.count(parameter.shape)
        constrained = f"{_counted(matrices, 'matrix', 'matrices')} in {_counted(tensors)}"
        header = (
            f"Constrained: {constrained}; weight decay does not touch them. "
            f"Plain: {_counted(plain)}."
        )
        return f"{super().__repr__()}\n{header}"


def _counted(number: int, one: str = "parameter", several: str = "parameters") -> str:
    return f"{number} {one if number == 1 else several}"
