"""The one base class, and the only step(): a gradient becomes a block, passes a rule, is written.

A step gathers the gradients of every group and looks at them before anything changes. Plain
parameters then follow torch's own function, constrained ones the rule of the subclass.
"""

from __future__ import annotations

import itertools
import math
import numbers
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt._checks import fail
from stiefel_opt.device import exact_products, is_compiling, is_free_to_read
from stiefel_opt.distributed import is_sharded
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.angles import angles_of, longest_step
from stiefel_opt.optim.blocks import Owner
from stiefel_opt.optim.checkpoint import (
    check_plain_rule,
    check_saved_readings,
    check_state_dict,
    check_states,
    keep_precision,
    mark,
    take_marks,
    without_plain,
)
from stiefel_opt.optim.checks import (
    as_plain_data,
    check_finite,
    check_new_group,
    check_options,
    listed,
    name_of,
    names_of,
    reading,
    refuse_gradient,
    refuse_nonfinite,
    refuse_other_precision,
    refuse_overflow,
    refuse_sparse,
    warn_if_nothing_is_constrained,
)
from stiefel_opt.optim.constrained import TALLIES, Constrained, Given
from stiefel_opt.optim.plain import Group, step_rows
from stiefel_opt.optim.safety import warn_of_skipped, warn_of_tallies
from stiefel_opt.optim.sharding import Shards, shards_of
from stiefel_opt.optim.state import State, StateNames, complete_state, forget_constrained
from stiefel_opt.optim.traced import in_graph, remember
from stiefel_opt.optim.velocity import set_velocity_, velocity_of
from stiefel_opt.parameter import has_lost_tag, tag

# A turn is complete long before; the square of the rate must be a number of float32.
_LONGEST_RATE: Final = 2.0**50

_GRAD = operator.attrgetter("grad")
_KIND = operator.attrgetter("shape", "dtype", "layout")


class Members:
    """The parameters of a group, told apart: plain ones, and constrained ones that have state.

    Lists hold places in the group: of plain ones, and of those ``waiting`` for a first gradient.
    """

    def __init__(self, group: Group, names: StateNames, options: list[Any]) -> None:
        self._params = list(group["params"])
        self._tags = _tags_of(self._params)
        self._stiefel, self._names, self._options = group["stiefel"], names, options
        self.readings = [reading(parameter, group) for parameter in self._params]
        self.plain = [i for i, found in enumerate(self.readings) if found is None]
        self.waiting = [i for i, found in enumerate(self.readings) if found is not None]
        self.constrained: list[Constrained] = []

    def fit(self, group: Group, options: list[Any], names: Callable[[Group], StateNames]) -> bool:
        """Say whether this still describes the group, and the state that its options ask for."""
        params = group["params"]
        if options != self._options:
            if names(group) != self._names:
                return False
            self._options = options
        return (
            len(params) == len(self._params)
            and all(map(operator.is_, params, self._params))
            and all(map(operator.is_, _tags_of(params), self._tags))
            and group["stiefel"] is self._stiefel
        )


def _tags_of(parameters: list[Tensor]) -> list[Any]:
    """Return the attribute ``manifold`` of each parameter, or None, whatever it is."""
    return list(map(getattr, parameters, itertools.repeat("manifold"), itertools.repeat(None)))


class StiefelOptimizer(Optimizer, ABC):
    """Base of all optimizers here: a group holds constrained and plain parameters side by side.

    A subclass declares its options, the state of a matrix (:meth:`_state_names`), how a batch of
    matrices moves (:meth:`_move`), and which function of torch moves plain tensors
    (:meth:`_step_plain`).
    """

    rule: str = ""  # whose state a checkpoint holds
    _sparse_allowed: bool = False  # gradients of plain parameters

    def __init__(self, params: Any, defaults: Group) -> None:
        self._handle = remember(self)
        self._members: list[Members | None] = []
        self._tallies: dict[Tensor, State] = {}  # windows on the steps that each has missed
        self._tags: dict[Tensor, Any] = {}  # as they were last seen
        self._told = 0  # how many skipped steps a warning has told
        super().__init__(params, defaults)
        warn_if_nothing_is_constrained(self.param_groups)

    # ---- what a subclass says ------------------------------------------------------------------

    def _check_options(self, group: Group) -> None:
        """Raise unless the options of a group make sense."""
        check_options(group, self.defaults)

    @abstractmethod
    def _state_names(self, group: Group) -> StateNames:
        """Return what a group keeps for each matrix, which may depend on its options."""

    @abstractmethod
    def _move(self, group: Group, given: Given) -> Tensor:
        """Return the new point of a batch and update its state."""

    @abstractmethod
    def _step_plain(self, *arguments: Any, **options: Any) -> None:
        """Apply torch's own rule; arguments as of :func:`stiefel_opt.optim.plain.step_sgd`."""

    def _adapt(self, owner: Owner, names: StateNames) -> None:
        """Turn momentum that other options have left in the state into that of these."""

    def _longest_step(self, group: Group, parameter: Tensor, manifold: Stiefel) -> float | None:
        """Return the largest singular value of the last step, or None; for :meth:`angles_of`."""
        return longest_step(self, group, parameter, manifold)

    def _step_along(self, eta: float, turn: Tensor, size: Tensor) -> float | Tensor:  # noqa: ARG002
        """Return what the rule makes of eta for a step X Z + U: ``turn`` is Z'Z, ``size`` U'U."""
        return eta

    # ---- groups --------------------------------------------------------------------------------

    @override
    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as ``torch.optim.Optimizer``; a refused group leaves no trace."""
        if not isinstance(param_group, dict):
            raise TypeError(fail("param_group", "be a dict", type(param_group).__name__))
        group = {**self.defaults, **param_group}
        group["stiefel"] = as_plain_data(group["stiefel"])
        group["params"] = listed(group["params"])
        for name, value in group.items():  # numpy's: a checkpoint holds plain numbers
            plain = type(value) in (bool, int, float)
            if isinstance(value, numbers.Real) and not plain:
                group[name] = int(value) if isinstance(value, numbers.Integral) else float(value)
        self._check_options(group)
        check_new_group(group, self.param_groups)
        super().add_param_group(group)
        self._members.append(None)
        self._recall(group)

    def _recall(self, group: Group) -> None:
        """Remember tags, and restore those that a swap took along: the objects stay the same."""
        for parameter, found in zip(group["params"], _tags_of(group["params"]), strict=True):
            known = self._tags.get(parameter)
            if isinstance(known, Stiefel) and has_lost_tag(parameter):
                tag(parameter, known)
            else:
                self._tags[parameter] = found

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
        if is_compiling():
            self._step_traced()
            return loss
        missed: tuple[list[Tensor], list[Tensor]] = [], []
        prepared = [self._prepare(*item) for item in enumerate(self.param_groups)]
        for (group, everyone), plain in zip(self._constrained(), prepared, strict=True):
            if plain:
                grads: list[Tensor] = [p.grad for p in plain]  # type: ignore[misc]
                try:
                    self._step_plain(group, plain, grads, [self.state[p] for p in plain])
                except RuntimeError as error:
                    refuse_other_precision(plain, self.state, self.param_groups, error)
                    raise
            found = self._move_all(group, everyone, group["lr"])
            missed[group["nonfinite"] == "raise"].extend(found)
        if any(missed):  # last: it may be an error
            self._tell(*missed)
        return loss

    def _step_traced(self) -> None:
        """The same for ``torch.compile``: the constrained part is one operation of the graph."""
        for group in self.param_groups:
            self._init_group(group)
        lrs = [group["lr"] for group in self.param_groups]
        in_graph(self._handle, self.all_constrained(), lrs)
        for group, members in zip(self.param_groups, self._members, strict=True):
            params, places = group["params"], members.plain if members else ()
            plain = [params[place] for place in places if params[place].grad is not None]
            if plain:
                grads = [p.grad for p in plain]
                self._step_plain(group, plain, grads, [self.state[p] for p in plain])

    def _init_group(self, group: Group) -> None:  # noqa: ARG002
        """Make missing state: ``torch.compile`` calls it, and guards on who has a gradient.

        Of all groups: the compiler looks at the state after the first call, and what it has not
        seen there it would write over.
        """
        for index, each in enumerate(self.param_groups):
            for place in self._init(index, each).plain:
                parameter = each["params"][place]
                if parameter.grad is not None:
                    self.state[parameter]
                    self._init_plain(each, parameter)

    def _init_plain(self, group: Group, parameter: Tensor) -> None:
        """Make the state that a traced step needs of a plain parameter beforehand."""

    def _init(self, index: int, group: Group) -> Members:
        """Make the state of constrained parameters that have a gradient for the first time."""
        members = self._members[index]
        if (
            members is None
            or not members.fit(group, self._options_of(group), self._state_names)
            or not all(map(operator.methodcaller("is_intact", self.state), members.constrained))
        ):
            members = self._renew(index, group)
        params = group["params"]
        late = members.waiting and [i for i in members.waiting if params[i].grad is not None]
        if late:
            self._admit(members, group, late)
        return members

    def _options_of(self, group: Group) -> list[Any]:
        """Return what decides which state a group keeps, and more, but nothing that a step sets."""
        return [group[name] for name in self.defaults if name != "lr"]

    def _renew(self, index: int, group: Group) -> Members:
        """Tell the parameters of a group apart anew; those that have state are admitted."""
        earlier = self._members[index]
        for constrained in earlier.constrained if earlier else ():
            constrained.recover()
        self._recall(group)
        members = Members(group, self._state_names(group), self._options_of(group))
        self._members[index] = members
        for place in members.plain:
            forget_constrained(self.state, group["params"][place])
        known = [i for i in members.waiting if self.state.get(group["params"][i])]
        if known:
            self._admit(members, group, known)
        for constrained in earlier.constrained if earlier else ():
            constrained.release()
        alive = {id(parameter) for each in self.param_groups for parameter in each["params"]}
        self._tallies = {p: tally for p, tally in self._tallies.items() if id(p) in alive}
        self._tags = {p: found for p, found in self._tags.items() if id(p) in alive}
        return members

    def _admit(self, members: Members, group: Group, late: list[int]) -> None:
        """Stack the state of these parameters together with that of the ones before."""
        names = self._state_names(group)
        for constrained in members.constrained:
            constrained.recover()
        waiting = set(members.waiting).difference(late)
        layouts: dict[Any, Shards | None] = {}
        owners: dict[torch.device, list[Owner]] = {}
        for place, manifold in enumerate(members.readings):
            if manifold is None or place in waiting:
                continue
            parameter, key = group["params"][place], None
            if is_sharded(parameter):
                key = parameter.shape, manifold, parameter.device_mesh, parameter.placements
            if key not in layouts:
                layouts[key] = shards_of(parameter, manifold)
            called = partial(name_of, parameter, self.param_groups)
            state: State = self.state[parameter]
            together = owners.setdefault(parameter.device, [])
            owner = Owner(parameter, manifold, state, layouts[key], len(together))
            self._adapt(owner, names)
            complete_state(state, names, parameter, manifold, called, layouts[key])
            together.append(owner)
            none = torch.zeros((), dtype=torch.int64, device=parameter.device)
            tally = self._tallies.setdefault(parameter, dict.fromkeys(TALLIES, none))
            tally.update({name: count.to(parameter.device) for name, count in tally.items()})
        members.constrained = [
            Constrained(together, [self._tallies[owner.parameter] for owner in together])
            for together in owners.values()
        ]
        members.waiting = sorted(waiting)

    def _prepare(self, index: int, group: Group) -> list[Tensor]:
        """Look at the gradients of a group before anything changes; return who is plain."""
        lr, groups, members = group["lr"], self.param_groups, self._init(index, group)
        if not ((isinstance(lr, Tensor) and not is_free_to_read(lr)) or math.isfinite(lr)):
            raise ValueError(fail("lr", "be finite", float(lr), "look at its schedule"))
        params, plain = group["params"], []
        for place in members.plain:
            grad = params[place].grad
            if grad is None:
                continue
            if grad.is_sparse and not self._sparse_allowed:
                refuse_sparse(params[place], groups)
            if grad.shape != params[place].shape:
                refuse_gradient(params[place], groups)
            plain.append(params[place])
        for constrained in members.constrained:
            grads = list(map(_GRAD, constrained.parameters))
            for owner, grad in zip(constrained.owners, grads, strict=True):
                if grad is None or _KIND(grad) == owner.kind:
                    continue
                if grad.layout is not torch.strided:
                    refuse_sparse(owner.parameter, groups)
                if owner.is_same() or grad.shape != owner.parameter.shape:
                    refuse_gradient(owner.parameter, groups)
                self._renew(index, group)
                return self._prepare(index, group)
            changed = constrained.take(grads, group["nonfinite"])
            if changed or constrained.missed or constrained.overflowed:
                self._refuse(group, constrained, changed)
        return plain

    def step_in_graph(self, grads: list[Tensor | None], lrs: list[Tensor]) -> None:
        """Do what :func:`in_graph` stands for: the step of all constrained parameters.

        They are in the order of :meth:`all_constrained`, rates that are tensors in that of groups.
        """
        first, rates = 0, iter(lrs)
        for group, everyone in self._constrained():
            for constrained in everyone:
                last = first + len(constrained.owners)
                ours, first = grads[first:last], last
                changed = constrained.take(ours, group["nonfinite"], in_graph=True)
                self._refuse(group, constrained, changed)
        missed: tuple[list[Tensor], list[Tensor]] = [], []
        for group, everyone in self._constrained():
            lr = next(rates) if isinstance(group["lr"], Tensor) else group["lr"]
            missed[group["nonfinite"] == "raise"].extend(self._move_all(group, everyone, lr))
        self._tell(*missed)

    def _refuse(self, group: Group, constrained: Constrained, changed: list[Owner]) -> None:
        """Raise for gradients and points that no step could use, and for what is told late."""
        told = (constrained.missed, refuse_nonfinite), (constrained.overflowed, refuse_overflow)
        for places, refuse in told if group["nonfinite"] == "raise" else ():
            if places:
                refuse(constrained.owners[places[0]].parameter, self.param_groups)
        check_finite([owner.parameter for owner in changed], self.param_groups)

    def _move_all(
        self, group: Group, everyone: list[Constrained], lr: float | Tensor
    ) -> list[Tensor]:
        """Move the constrained parameters of a group; return those that were left as they were."""
        if not isinstance(lr, Tensor) or is_free_to_read(lr):
            lr = min(float(lr), _LONGEST_RATE)
        move = partial(self._move, group)
        missed: list[Tensor] = []
        move_rows = partial(step_rows, self._step_plain, group)
        for constrained in everyone:
            with exact_products(constrained.steps):
                constrained.step(move, move_rows, lr, group["nonfinite"])
            places = [*constrained.missed, *constrained.overflowed]
            missed += map(constrained.parameters.__getitem__, places)
        return missed

    def _tell(self, skipped: list[Tensor], overflowed: list[Tensor]) -> None:
        """Warn of steps that were missed; raise for those that were to raise."""
        if skipped:
            warn_of_skipped(names_of(skipped, self.param_groups), skipped)
        if overflowed:
            refuse_overflow(overflowed[0], self.param_groups)

    # ---- checkpoints ---------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with the reading of each parameter beside it."""
        with torch.no_grad():
            for constrained in self.all_constrained():
                constrained.recover()
        packed = super().state_dict()
        if any(not is_free_to_read(found.skipped) for found in self.all_constrained()):
            self._told = warn_of_tallies(self.skipped_steps(), self._told)
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            readings = [reading(parameter, group) for parameter in group["params"]]
            if any(found is not None for found in readings):
                saved["readings"] = [r if r is None else r.as_dict() for r in readings]
        mark(packed["param_groups"], self.rule)
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
        of_torch = take_marks(saved_groups, self.rule)
        if of_torch:
            check_plain_rule(state_dict["state"], saved_groups, self.defaults)
        check_saved_readings(self.param_groups, saved_groups)
        for group, saved in zip(self.param_groups, saved_groups, strict=False):
            saved["stiefel"] = group["stiefel"]
            for name in self.defaults:  # a checkpoint of torch lacks our options
                saved.setdefault(name, group[name])
        final: dict[str, Any] = {}

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

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._members = [None] * len(self.param_groups)
        if "_handle" not in self.__dict__:
            self._handle = remember(self)
        self.__dict__.setdefault("_tallies", {})  # counts and tags outlive what is loaded
        self.__dict__.setdefault("_tags", {})
        self.__dict__.setdefault("_told", 0)
        for kept in self.state.values():  # as torch: old checkpoints count in integers
            if "step" in kept and not isinstance(kept["step"], Tensor):
                kept["step"] = torch.tensor(float(kept["step"]))
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._recall(group)

    # ---- what a user may ask -------------------------------------------------------------------

    def skipped_steps(self) -> dict[str, int]:
        """Return how many steps each parameter has missed because its gradient was not finite.

        Parameters that missed none are left out. Counted since this optimizer was made, under
        ``nonfinite="skip"``. Waits for an accelerator.
        """
        counts = self.skipped_steps_of()
        return dict(zip(names_of(list(counts), self.param_groups), counts.values(), strict=True))

    def skipped_steps_of(self) -> dict[Tensor, int]:
        """Return what :meth:`skipped_steps` does, by parameter."""
        devices: dict[torch.device, list[Tensor]] = {}
        for parameter, tally in self._tallies.items():
            devices.setdefault(tally["skipped"].device, []).append(parameter)
        counts: dict[Tensor, int] = {}
        for parameters in devices.values():  # one read of each device
            tallies = torch.stack([self._tallies[parameter]["skipped"] for parameter in parameters])
            counts |= zip(parameters, tallies.tolist(), strict=True)
        return {parameter: count for parameter, count in counts.items() if count}

    def angles_of(self) -> dict[Tensor, float]:
        """Return by how much, in radians, the last step has turned each constrained parameter."""
        return angles_of(self)

    def velocity(self, parameter: Tensor) -> tuple[Any, Any]:
        """Return the momentum (Z, U) of a constrained parameter, in the notation of its rule.

        Z, skew, has shape ``(..., m, m)``; U, normal to the point, ``(..., n, m)``, with the batch
        and head dimensions of the reading in front. U is zero for square matrices. For a reading
        with several ranges of rows each of the two is a tuple, one tensor for each range. Before
        the first step both are zero. A sharded parameter is gathered: every process must call.
        """
        return velocity_of(self, parameter)

    def set_velocity(self, parameter: Tensor, skew: Any, normal: Any) -> None:
        """Set the momentum (Z, U) of a constrained parameter; shapes as :meth:`velocity` gives.

        Of Z the skew part is taken, of U the part that is normal to the point.

        Raises:
            TypeError: for sharded parameters, whose momentum can only be read, and for what is no
                tensor.
            ValueError: for tensors of another shape, and values that are not finite. Nothing has
                changed then.
        """
        set_velocity_(self, parameter, skew, normal)

    def all_constrained(self) -> list[Constrained]:
        """Return the constrained parameters of all groups that have state, by group and device."""
        return [found for _, everyone in self._constrained() for found in everyone]

    def _constrained(self) -> list[tuple[Group, list[Constrained]]]:
        everyone = ([] if members is None else members.constrained for members in self._members)
        return list(zip(self.param_groups, everyone, strict=False))

    @override
    def __repr__(self) -> str:
        pairs = [(p, reading(p, group)) for group in self.param_groups for p in group["params"]]
        counts = [manifold.count(p.shape) for p, manifold in pairs if manifold is not None]
        matrices = _counted(sum(counts), "matrix", "matrices")
        return (
            f"{super().__repr__()}\nConstrained: {matrices} in {_counted(len(counts))}; "
            f"weight decay does not touch them. Plain: {_counted(len(pairs) - len(counts))}."
        )


def _counted(number: int, one: str = "parameter", several: str = "parameters") -> str:
    return f"{number} {one if number == 1 else several}"
