"""The one base class, and the only step(): a batch of gradients goes through a rule.

A step gathers the gradients of every group and looks at them before anything changes. Plain
parameters then follow the plain rule of the subclass, constrained ones its rule.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt.errors import check_type
from stiefel_opt.functional.flows import Tensors, corrected
from stiefel_opt.functional.momentum import NORMAL, SKEW
from stiefel_opt.numerics.device import is_compiling
from stiefel_opt.numerics.distributed import is_sharded
from stiefel_opt.optim import checkpoint, checks
from stiefel_opt.optim.blocks import ConstrainedParameter
from stiefel_opt.optim.capture import captures_of, check_wanted, how_stepped
from stiefel_opt.optim.group import (
    DeviceGroup,
    GroupIndex,
    index_for,
    move_constrained,
    step_all,
)
from stiefel_opt.optim.moves import Correction, Rule, ScaleRule
from stiefel_opt.optim.records import Records
from stiefel_opt.optim.sharding import Shards, shards_of
from stiefel_opt.optim.state import START, State, StateDict, complete_state, declared_once
from stiefel_opt.optim.tagged import TaggedOptimizer
from stiefel_opt.optim.torch_rules import Group, step_unless
from stiefel_opt.optim.traced import beside, in_graph, remember
from stiefel_opt.optim.velocity import keep_velocity, set_velocity_, velocity_of
from stiefel_opt.tags.parameter import project_untagged

# Attributes of a class that speak of a method: who overrides the method says them again.
_SAID_OF: Final = {
    "sums_over_rows": "rule_for",
    "capturable": "rule_for",
    "learns_scale": "rule_for",
    "plain_is_elementwise": "update_plain",
}


def restore(optimizer: StiefelOptimizer) -> None:
    """Complete options, tags and records where state has come from a copy or a checkpoint."""
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
        optimizer.records.recall(group["params"])
    optimizer.records.made_by = {
        parameter: (checks.reading(parameter, group), optimizer.declared_for(group))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if optimizer.state.get(parameter)
    }


def drop_unfit(optimizer: StiefelOptimizer) -> None:
    """Drop state that today's options and readings give another meaning, as a step would."""
    restarted: list[Tensor] = []
    for group in optimizer.param_groups:
        group = {**optimizer.defaults, **group}
        declared = optimizer.declared_for(group)
        for parameter in filter(optimizer.state.__contains__, group["params"]):
            manifold = checks.reading(parameter, group)
            if optimizer.records.drop_unfit(optimizer.state, parameter, manifold, declared):
                restarted.append(parameter)
    checks.warn_of_restarts(restarted, optimizer.param_groups)


class StiefelOptimizer(TaggedOptimizer, ABC):
    """Base of all optimizers here: a group holds constrained and plain parameters side by side.

    A subclass has three parts: the state of a matrix (:meth:`state_for`), a pure rule that moves a
    batch of matrices (:meth:`rule_for`), and the rule of plain tensors (:meth:`update_plain`).
    Everything else is done here for every rule alike: shapes, heads and ranges of rows, half
    precision, gradients and steps that are not finite, rounding, shards, checkpoints,
    ``torch.compile``.

    Args:
        params: Parameters, named parameters or groups, as in torch. A step needs their values: not
            on the meta device.
        defaults: Options of the groups; ``nonfinite``, ``stiefel`` and ``cuda_graph`` are added.

    Attributes:
        rule: The name under which a checkpoint is saved. Default: that of the class.
        sums_over_rows: Whether the rule forms products over rows only by ``sums``, so that
            rows may be shared by several processes. A class that overrides :meth:`rule_for` must
            say it again. Default: False, and such weights are refused.
        plain_is_elementwise: Whether :meth:`update_plain` treats entries independently of each
            other. Processes that share the plain rows of a constrained weight then pass only their
            own rows. A class that overrides that method must say it again. Default: False, and such
            weights are refused.
        capturable: Whether a step on a GPU may be captured, ``cuda_graph``: the rule decides by no
            number of a tensor but what ``reader`` returns, and by no number that changes from step
            to step but ``lr`` and ``step``, which are tensors then. A class that overrides
            :meth:`rule_for` must say it again. Default: False, and its steps are eager.
        learns_scale: Whether the rule moves Q of a learned scale as well,
            ``Stiefel(learn_scale=True)``: g is moved by the rule of its family. A class that
            overrides :meth:`rule_for` must say it again. Default: False, and such weights are
            refused.
        velocity_names: The state from which :meth:`velocity` is read. A rule that keeps its
            momentum otherwise than as ``momentum_skew`` and ``momentum_normal`` names it here, and
            overrides :meth:`velocity_in` and :meth:`state_of_velocity`.
    """

    sums_over_rows: bool = False
    plain_is_elementwise: bool = False
    capturable: bool = False
    velocity_names: tuple[str, ...] = (SKEW, NORMAL)
    _torch_rule: checkpoint.TorchRule | None = None  # whose state of plain parameters can be loaded
    _sparse_allowed: bool = False  # gradients of plain parameters
    _options_of_torch: ClassVar[Group] = {}  # of the plain rule, where a subclass names none
    _declared: ClassVar[dict[str, State]]  # every declaration so far, by whatever options

    @override
    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        family = next(each for each in cls.__mro__ if "_step_plain" in vars(each))
        if family is not StiefelOptimizer:
            checks.check_family(cls, family)
        cls._declared = {}
        for name, function in _SAID_OF.items():  # what a class inherits was said of another one
            if function in vars(cls):
                setattr(cls, name, bool(vars(cls).get(name)))

    def __init__(self, params: Any, defaults: Group) -> None:
        self._indices: list[GroupIndex | None] = []
        defaults = {"nonfinite": "skip", "stiefel": None, "cuda_graph": None, **defaults}
        self._handle, self.records = remember(self), Records()
        super().__init__(params, {**defaults, **self._options_of_torch, **defaults})
        # known from now on: every group has been looked at, and weights may be written to
        self._completes = self.register_state_dict_post_hook(checkpoint.complete).id
        self._admit_groups(self.param_groups)
        self.warn_if_nothing_is_constrained()

    # ---- what a subclass says ------------------------------------------------------------------

    @override
    def check_options(self, group: Group) -> None:
        """Raise unless the options of a group make sense; call ``super().check_options`` too."""
        checks.check_common_options(group, self)

    def state_for(self, group: Group) -> tuple[State, ...]:  # noqa: ARG002
        """Return the state of a matrix, which may depend on the options of its group.

        Default: none.
        """
        return ()

    @abstractmethod
    def rule_for(self, group: Group) -> Rule:
        """Return the pure rule of a group, with its options bound: see :class:`Rule`.

        Asked again when an option other than ``lr`` has changed.
        """

    @abstractmethod
    def update_plain(
        self,
        group: Group,
        parameters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[StateDict],
    ) -> None:
        """Move plain tensors in place; ``states`` holds a dict for each, see :meth:`init_plain`."""

    def declared_for(self, group: Group) -> tuple[State, ...]:
        """Return the declarations of :meth:`state_for`, and remember them by name.

        When options change, state that an earlier declaration made is recognised and dropped.
        """
        declared = (*self.state_for(group), *self.scale_rule_for(group).state)
        self._declared.update(declared_once(declared))
        return declared

    def scale_rule_for(self, group: Group) -> ScaleRule:  # noqa: ARG002
        """Return how a learned scale moves, by default not at all."""
        return ScaleRule()

    def correction_for(self, group: Group) -> Correction:
        """Return what removes rounding from X'X = I, and from X'U = 0 of normal state."""
        normal = tuple(state.name for state in self.state_for(group) if state.symmetry == "normal")
        return partial(corrected, normal=normal)

    def velocity_in(
        self,
        X: Tensor,  # noqa: ARG002
        state: Tensors,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return Z and U of the momentum X Z + U at X; None for a part that is missing."""
        return state.get(SKEW), state.get(NORMAL)

    def state_of_velocity(self, X: Tensor, Z: Tensor, U: Tensor) -> Tensors:  # noqa: ARG002
        """Return the state that keeps a momentum X Z + U."""
        return {SKEW: Z, NORMAL: U}

    # ---- plain tensors -------------------------------------------------------------------------

    def init_plain(self, group: Group, parameter: Tensor, state: StateDict) -> None:
        """Make the state of a plain tensor, as far as it is missing, before its first step."""

    def _step_plain(
        self,
        group: Group,
        parameters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[StateDict],
        found_inf: Tensor | None = None,
    ) -> None:
        """Move plain tensors unless ``found_inf``, a number on their device, is not 0."""
        for parameter, state in zip(parameters, states, strict=True):
            self.init_plain(group, parameter, state)
        step_unless(found_inf, partial(self.update_plain, group), parameters, grads, states)

    # ---- groups --------------------------------------------------------------------------------

    @override
    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as ``torch.optim.Optimizer``; a refused group leaves no trace."""
        check_type("param_group", param_group, dict, "be a dict")
        count = len(self.param_groups)
        try:
            for part in self._parts(param_group):
                super().add_param_group(self.admitted(part))
                self._indices.append(None)
            if hasattr(self, "_completes"):
                self._admit_groups(self.param_groups[count:])
        except Exception:
            del self.param_groups[count:]
            raise

    def _parts(self, group: Group) -> list[Group]:
        """Return the groups that are added for one."""
        return [group]

    def _admit_groups(self, groups: list[Group]) -> None:
        """Constrain what the key ``stiefel`` says, and remember the tags."""
        self.check_memory()
        for group in groups:
            project_untagged(group["params"], group["stiefel"])
            self.records.recall(group["params"])

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
        elif torch.is_inference_mode_enabled():  # state is for later steps, too
            with torch.inference_mode(mode=False), torch.no_grad():
                step_all(self)
        else:
            step_all(self)
        return loss

    def _step_traced(self) -> None:
        """The same for ``torch.compile``: the constrained part is one operation of the graph."""
        for group in self.param_groups:
            self._init_group(group)
        if any(weights.is_shared for weights in self.all_constrained()):
            beside(partial(step_all, self))
            return
        in_graph(self._handle, self.all_constrained(), self.param_groups)
        for group, index in zip(self.param_groups, self._indices, strict=True):
            if index is not None and (plain := index.plain_with_gradient(self, group)):
                self._move_plain(group, plain)

    def _count_groups(self) -> None:
        """Divide all groups anew where one was added to, or taken from, ``param_groups`` itself."""
        if len(self._indices) != len(self.param_groups):
            for device_group in self.all_constrained():
                device_group.views.release()
            self._indices = [None] * len(self.param_groups)

    def _init_group(self, group: Group) -> None:  # noqa: ARG002
        """Make missing state: ``torch.compile`` calls it, and guards on who has a gradient.

        The first call makes the state of all groups: the compiler would overwrite state that is
        made later.
        """
        self._count_groups()
        for place, each in enumerate(self.param_groups):
            for plain in index_for(self, place, each).plain:
                parameter = each["params"][plain]
                if parameter.grad is not None:
                    self.init_plain(each, parameter, self.state[parameter])

    def _renew(self, place: int, group: Group) -> GroupIndex:
        """Divide the parameters of a group anew, plain from constrained; admit those with state."""
        earlier = self._indices[place]
        if self.records.recall(group["params"]) or earlier:
            self.check_memory()
        index = self._indices[place] = GroupIndex(self, group)
        for plain in index.plain:
            self.records.drop_unfit(self.state, group["params"][plain], None, ())
        states = [self.state.get(parameter, {}).keys() for parameter in group["params"]]
        if with_state := [i for i in index.waiting if states[i] - {START}]:
            self._admit(index, group, with_state)
        for device_group in earlier.device_groups if earlier else ():
            device_group.views.release()
        self.records.keep_only([p for each in self.param_groups for p in each["params"]])
        return index

    def _admit(self, index: GroupIndex, group: Group, late: list[int]) -> None:
        """Stack all state anew: the parameters at ``late`` have joined the others."""
        waiting = set(index.waiting).difference(late)
        layouts: dict[Any, Shards | None] = {}
        weights: dict[torch.device, list[ConstrainedParameter]] = {}
        restarted: list[Tensor] = []
        for place, manifold in enumerate(index.readings):
            if manifold is None or place in waiting:
                continue
            parameter, key = group["params"][place], None
            if is_sharded(parameter):
                key = parameter.shape, manifold, parameter.device_mesh, parameter.placements
            if key not in layouts:
                layouts[key] = shards_of(parameter, manifold)
            called = partial(checks.name_of, parameter, self.param_groups)
            if (shards := layouts[key]) is not None:
                checks.check_sharing(shards, parameter, self, index.declared)
            states, records = self.state, self.records
            if records.drop_unfit(states, parameter, manifold, index.declared):
                restarted.append(parameter)
            state: StateDict = states[parameter]
            if manifold.learn_scale:  # a checkpoint may have brought another start
                manifold = replace(manifold, scale=abs(state.setdefault(START, -manifold.scale)))
            together = weights.setdefault(parameter.device, [])
            weight = ConstrainedParameter(parameter, manifold, state, shards, len(together))
            keep_velocity(self, weight, index.declared)
            complete_state(
                state, index.declared, parameter, manifold, called, self._declared, shards
            )
            together.append(weight)
        index.device_groups = [
            DeviceGroup(each, self.records, index.declared) for each in weights.values()
        ]
        index.waiting = sorted(waiting)
        checks.warn_of_restarts(restarted, self.param_groups)
        index.captures = captures_of(index.device_groups, self.records.of_graphs)
        self._allow_captures(index, group)

    def _allow_captures(self, index: GroupIndex, group: Group) -> None:
        check_wanted(index.device_groups, group)
        for capture in index.captures:
            if capture is not None:
                capture.allow(group, is_capturable=self.capturable)

    def step_in_graph(self, grads: Mapping[Tensor, Tensor], lrs: list[Tensor]) -> None:
        """Step all parameters that were constrained when the graph was traced.

        Options and tags may have changed since, which the compiler does not see. A parameter that
        was plain then moves as a plain one once more.

        Args:
            grads: Gradients by parameter.
            lrs: Learning rates that are tensors, in the order of groups.
        """
        tensors, released = iter(lrs), []
        for place, group in enumerate(self.param_groups):
            if self._indices[place] is None:
                continue
            checks.usable_lr(group["lr"])
            index = index_for(self, place, group)
            for weights in index.device_groups:
                ours = list(map(grads.get, weights.parameters))
                changed = weights.set_gradients(ours, group["nonfinite"], in_graph=True)
                self._refuse(group, weights, changed)
            plain = [p for p in map(group["params"].__getitem__, index.plain) if p in grads]
            released += [(group, plain)] if plain else []
        for group, own in released:
            self._step_plain(group, own, [grads[p] for p in own], [self.state[p] for p in own])
        lrs_now = (group["lr"] for group in self.param_groups)
        move_constrained(self, [next(tensors) if isinstance(lr, Tensor) else lr for lr in lrs_now])

    def _refuse(self, group: Group, weights: DeviceGroup, changed: list[Tensor]) -> None:
        """Raise for gradients and points that no step could use, and for earlier overflows."""
        if group["nonfinite"] == "raise" and weights.unsafe:
            checks.refuse_nonfinite(weights.parameters[weights.unsafe[0]], self.param_groups)
        if group["nonfinite"] == "raise" and weights.overflowed:
            checks.refuse_overflow(weights.parameters[weights.overflowed[0]], self.param_groups)
        self.check_finite(changed)

    def _move_plain(self, group: Group, parameters: list[Tensor]) -> None:
        """Move the plain parameters of a group that have a gradient."""
        grads: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
        try:
            self._step_plain(group, parameters, grads, [self.state[p] for p in parameters])
        except RuntimeError as error:
            checks.refuse_other_precision(parameters, self.state, self.param_groups, error)
            raise
        # torch's SGD has none without momentum; the compiler would trace anew after a change here
        for parameter in [p for p in parameters if not (self.state[p] or is_compiling())]:
            del self.state[parameter]

    # ---- checkpoints ---------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with the reading of each parameter beside it."""
        if any(not weights.reads for weights in self.all_constrained()):
            reported = self.records.reported
            self.records.reported = checks.warn_of_skip_counts(self.skipped_steps(), reported)
            for weights in self.all_constrained():  # the host has waited already
                for batch in weights.batches:
                    batch.lagged.part(may_wait=True)
        drop_unfit(self)
        checkpoint.warn_if_nonfinite(self)
        # before all hooks of users: they see what is saved, and what they return counts
        self._optimizer_state_dict_post_hooks.move_to_end(self._completes, last=False)
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or from the same rule of torch.

        The readings of this optimizer's parameters stay as they are, and the state of constrained
        half-precision ones stays in float32. Of a checkpoint of ``torch.optim.SGD`` or ``Adam`` the
        options and the state of plain parameters are taken; that of constrained ones starts anew.

        Raises:
            ValueError: if a parameter was saved under another reading or its state has another
                shape or dtype or is not finite, naming it; for the state of another rule, of a
                newer version, and options that make no sense. Nothing has changed then.
            TypeError: for what is no state_dict.
        """
        check_type("state_dict", state_dict, Mapping, "be a dict")
        final: dict[str, Any] = {}

        def examine(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:  # behind other hooks
            final.update(checkpoint.examined(given, self))
            return dict(final)

        handle = self.register_load_state_dict_pre_hook(examine)
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            handle.remove()
        checkpoint.keep_precision(self.state, self.param_groups, final)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or pickle needs, without state that other options have made."""
        drop_unfit(self)
        return super().__getstate__()

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._indices = [None] * len(self.param_groups)
        if "_handle" not in self.__dict__:
            self._handle, self.records = remember(self), Records()
            self._completes = self.register_state_dict_post_hook(checkpoint.complete).id
        self.rule = self.rule or type(self).__name__
        checkpoint.count_by_tensors(self.state.values())
        restore(self)

    # ---- what a user may ask -------------------------------------------------------------------

    @override
    def skipped_steps_of(self) -> dict[Tensor, int]:
        """Return the counts of :meth:`skipped_steps` by parameter."""
        return self.records.skipped()

    def starts_of(self) -> dict[Tensor, float]:
        """Return the start to which each learned scale is pulled, of parameters with state."""
        return {parameter: abs(s[START]) for parameter, s in self.state.items() if START in s}

    def angles_of(self) -> dict[Tensor, float]:
        r"""Return the largest angle, in radians, by which the last step turned each weight.

        The largest angle between a vector X v and its place before the step: the arc tangent of the
        largest singular value of the step's tangent vector, to first order. Parameters that have
        not moved since this optimizer was made or loaded are left out. Waits for an accelerator.
        Processes that share a parameter agree on the largest angle: every one must call.
        """
        angles = [weights.angles() for weights in self.all_constrained()]
        return dict(itertools.chain(*map(dict.items, angles)))

    how_stepped = how_stepped

    def velocity(self, parameter: Tensor) -> tuple[Any, Any]:
        """Return the momentum (Z, U) of a constrained parameter, in the notation of its rule.

        Z, skew, has shape ``(..., m, m)``; U, normal to the point, ``(..., n, m)``, with the batch
        and head dimensions of the reading in front. U is zero for square matrices. For a reading
        with several ranges of rows each of the two is a tuple, one tensor for each range. Before
        the first step both are zero. A sharded parameter is gathered: every process must call.

        Raises:
            ValueError: for a rule of one's own that keeps its momentum otherwise.
        """
        return velocity_of(self, parameter)

    def set_velocity(self, parameter: Tensor, skew: Any, normal: Any) -> None:
        """Set the momentum (Z, U) of a constrained parameter; shapes as :meth:`velocity` gives.

        Of Z the skew part is taken, of U the part that is normal to the point.

        Raises:
            TypeError: for sharded parameters, whose momentum can only be read, and for what is no
                tensor.
            ValueError: for tensors of another shape, values that are not finite, and rules that
                keep no momentum. Nothing has changed then.
        """
        set_velocity_(self, parameter, skew, normal)

    def all_constrained(self) -> list[DeviceGroup]:
        """Return the constrained parameters of all groups that have state, by group and device."""
        return [weights for index in self._indices if index for weights in index.device_groups]

    @override
    def __repr__(self) -> str:
        return checks.described(self, self.how_stepped())
