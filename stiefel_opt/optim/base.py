"""The only step(): closure, gathering, lazy state, stacking, checkpoints, plain parameters."""

from __future__ import annotations

import operator
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt._checks import check_dtype, fail
from stiefel_opt.geometry import gram_error, orthonormality_tolerance, polar_factor
from stiefel_opt.manifold import Stiefel, manifold_of
from stiefel_opt.optim.stack import Batch, Stack, state_shapes

__all__ = ["StiefelOptimizer"]

Group = dict[str, Any]

# Rounding in X'X and X'U is measured and removed every so many steps where reading the count is
# free, and in every step elsewhere.
_CORRECTION_PERIOD = 8


@dataclass
class Gathered:
    """What one step of one group works on; kept while the same parameters have gradients."""

    active: list[Tensor]
    tags: list[Any]
    stiefel: Any
    plain: list[Tensor] = field(default_factory=list)
    equals: list[tuple[Stiefel, list[Tensor]]] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)  # one for each of ``equals``, once built

    def fits(self, active: list[Tensor], stiefel: Any) -> bool:
        """Say whether this still describes the group."""
        return (
            len(active) == len(self.active)
            and all(map(operator.is_, active, self.active))
            and all(map(operator.is_, map(manifold_of, active), self.tags))
            and stiefel is self.stiefel
            and all(stack.intact() for stack in self.stacks)
        )


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
        super().__init__(params, defaults)
        self._warn_if_nothing_is_constrained()

    # ---- what a subclass says ------------------------------------------------------------------

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """Raise unless the options of a group make sense."""

    @abstractmethod
    def _state_names(self, group: Group) -> tuple[list[str], list[str], list[str]]:
        """Return the names of m x m state, of m x m state of tall matrices only, of tall state."""

    @abstractmethod
    def _move(
        self,
        group: Group,
        point: Tensor,
        grad: Tensor,
        batch: Batch,
        lr: float | Tensor,
        correct: bool,
    ) -> Tensor:
        """Return the new point of a batch and update its state."""

    @abstractmethod
    def _is_stale(self, point: Tensor, batch: Batch) -> bool:
        """Say whether the normal momentum of a batch belongs to another point."""

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
        group["stiefel"] = _as_plain_data(group["stiefel"])
        if isinstance(group["params"], Tensor):
            group["params"] = [group["params"]]
        elif not isinstance(group["params"], set):  # a set is refused by torch
            group["params"] = list(group["params"])
        self._check_options(group)
        self._check_parameters(group)
        super().add_param_group(group)

    def _check_parameters(self, group: Group) -> None:
        """Raise for what torch would accept but cannot be constrained."""
        seen = {id(parameter) for other in self.param_groups for parameter in other["params"]}
        for index, item in enumerate(group["params"]):
            name, parameter = item if isinstance(item, tuple) else (None, item)
            if not isinstance(parameter, Tensor):
                continue  # refused by torch
            label = _label(name, index, len(self.param_groups))
            if id(parameter) in seen:
                raise ValueError(
                    fail(label, "appear once", "it twice", "list every parameter in one group only")
                )
            seen.add(id(parameter))
            manifold = _reading(parameter, group)
            if manifold is not None:
                manifold.check(parameter.shape, label)
                check_dtype(label, parameter.dtype)
                if not (parameter.is_meta or bool(torch.isfinite(parameter).all())):
                    raise ValueError(
                        fail(label, "be finite", "NaN or inf", "initialise it before optimizing")
                    )

    def _warn_if_nothing_is_constrained(self) -> None:
        groups = self.param_groups
        parameters = [p for group in groups for p in group["params"]]
        if (
            all(group["stiefel"] is None for group in groups)
            and all(manifold_of(p) is None for p in parameters)
            and any(p.ndim >= 2 for p in parameters)
        ):
            warnings.warn(
                f"{type(self).__name__}: no parameter is constrained, all of them are plain. Tag "
                "some with stiefel_opt.constrain(module, 'weight'), or pass stiefel=True for a "
                "group; stiefel=False says that this is intended.",
                stacklevel=4,
            )

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
        states = self.state.values()
        if len(states) != len(self._known_states) or not all(
            map(operator.is_, states, self._known_states)
        ):
            self._gathered = {}  # somebody dropped or replaced the state of a parameter
        gathered = [self._gather(i, group) for i, group in enumerate(self.param_groups)]
        for work in gathered:
            self._check_gradients(work)
        for group, work in zip(self.param_groups, gathered, strict=True):
            self._init_group(group, work)
        for group, work in zip(self.param_groups, gathered, strict=True):
            if work.plain:
                self._step_plain(group, work.plain)
            for stack in work.stacks:
                self._step_stack(group, stack)
        self._known_states = list(self.state.values())
        return loss

    def _gather(self, number: int, group: Group) -> Gathered:
        """Split the parameters that have a gradient into plain ones and lists of equals."""
        active = [p for p in group["params"] if p.grad is not None]
        work = self._gathered.get(number)
        if work is not None and work.fits(active, group["stiefel"]):
            return work
        work = Gathered(active, list(map(manifold_of, active)), group["stiefel"])
        equals: dict[Any, tuple[Stiefel, list[Tensor]]] = {}
        for parameter in active:
            manifold = _reading(parameter, group)
            if manifold is None:
                work.plain.append(parameter)
                continue
            alone = id(parameter) if manifold.rows is not None else None
            key = (parameter.shape, parameter.dtype, parameter.device, manifold, alone)
            equals.setdefault(key, (manifold, []))[1].append(parameter)
        work.equals = list(equals.values())
        self._gathered[number] = work
        return work

    def _init_group(self, group: Group, work: Gathered) -> None:
        """Make the state that is still missing, and stack it."""
        if len(work.stacks) == len(work.equals):
            return
        work.stacks = [
            Stack(members, manifold, [self._init_state(p, manifold, group) for p in members])
            for manifold, members in work.equals
        ]
        for stack in work.stacks:
            stack.grads = [p.grad for p in stack.parameters]  # type: ignore[misc]

    def _init_state(self, parameter: Tensor, manifold: Stiefel, group: Group) -> dict[str, Tensor]:
        """Return the state of a constrained parameter, with what is missing made."""
        state: dict[str, Tensor] = self.state[parameter]
        if "momentum_skew" not in state:  # a first step, or state of a plain parameter
            state.clear()
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        small, small_of_tall, tall_names = self._state_names(group)
        ranges, needs_tall = state_shapes(manifold, parameter.shape)
        expected = {}
        for index, (shape, is_tall) in enumerate(ranges):
            suffix = f".{index}" if index else ""
            names = small + small_of_tall if is_tall else small
            expected.update({name + suffix: shape for name in names})
        if needs_tall:
            expected.update(dict.fromkeys(tall_names, parameter.shape))
        for name, shape in expected.items():
            if name not in state:
                state[name] = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
                if name.startswith("deferred_factor"):
                    state[name].diagonal(dim1=-2, dim2=-1).fill_(1.0)
            elif state[name].shape != shape:
                raise ValueError(
                    fail(
                        f"{name} of {self._name(parameter)}",
                        f"have shape {tuple(shape)}",
                        f"shape {tuple(state[name].shape)}",
                        "load the state of a parameter of the same shape and reading",
                    )
                )
        for name in state.keys() - expected.keys() - {"step"}:
            del state[name]
        return state

    def _step_stack(self, group: Group, stack: Stack) -> None:
        """Move all parameters of a stack."""
        manifold = stack.manifold
        lr = group["lr"]
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            lr = float(lr)
        frozen = not isinstance(lr, Tensor) and lr == 0
        on_cpu = stack.parameters[0].device.type == "cpu"
        stack.advance()
        due = not on_cpu or stack.due(_CORRECTION_PERIOD)
        for batch in stack.batches:
            point, grad = batch.point(), batch.grad()
            if manifold.scale != 1.0:
                point = point / manifold.scale
            correct = due
            if stack.fresh or (due and on_cpu):  # writes through ``.data`` show only here
                point, correct = self._settle(point, batch, due)
            new_point = self._move(group, point, grad, batch, lr / manifold.scale, correct)
            if frozen:
                continue  # the parameter keeps its bits, also where X C would differ in the last
            if isinstance(lr, Tensor):
                new_point = torch.where(lr == 0, point, new_point)
            batch.write(new_point if manifold.scale == 1.0 else new_point.mul_(manifold.scale))
        if manifold.rows is not None:
            self._step_rows(group, stack)
        stack.finish(written=not frozen)

    def _settle(self, point: Tensor, batch: Batch, due: bool) -> tuple[Tensor, bool]:
        """Project matrices that are off the manifold; say whether U must be projected as well."""
        error = gram_error(point)
        tolerance = orthonormality_tolerance(point.dtype, point.size(-2))
        off = (error > 10 * tolerance) & error.isfinite()
        if bool(off.any()):
            point = point.clone()
            point[off] = polar_factor(point[off])
            return point, True
        return point, due or bool((error > tolerance).any()) or self._is_stale(point, batch)

    def _step_rows(self, group: Group, stack: Stack) -> None:
        """Move the plain rows of parameters that are constrained in part."""
        split = stack.manifold.plain_parts
        parameters = [part for p in stack.parameters for part in split(p)]
        grads = [part for grad in stack.grads for part in split(grad)]
        states = []
        for state, parameter in zip(stack.states, stack.parameters, strict=True):
            rows = {n: split(t) for n, t in state.items() if t.shape == parameter.shape}
            for index in range(len(split(parameter))):
                states.append({n: parts[index] for n, parts in rows.items()})
                states[-1]["step"] = state["step"] - 1  # torch counts this step itself
        if parameters and not group["fused"]:
            self._step_plain_rows(group, parameters, grads, states)
        elif parameters:  # fused kernels read memory straight through, also where rows are columns
            dense = [part.contiguous() for part in parameters]
            dense_states = [{n: t.contiguous() for n, t in state.items()} for state in states]
            dense_grads = [grad.contiguous() for grad in grads]
            self._step_plain_rows(group, dense, dense_grads, dense_states)
            for state, dense_state in zip(states, dense_states, strict=True):
                parameters, dense = [*parameters, *state.values()], [*dense, *dense_state.values()]
            for part, copy in zip(parameters, dense, strict=True):
                if part is not copy:
                    part.copy_(copy)

    # ---- checks before a step ------------------------------------------------------------------

    def _check_gradients(self, work: Gathered) -> None:
        """Raise naming the parameter where a gradient, or a value about to be projected, is bad."""
        for parameter in work.plain:
            grad: Tensor = parameter.grad  # type: ignore[assignment]
            if grad.is_sparse and not self._sparse_allowed:
                self._refuse_sparse(parameter)
            if grad.shape != parameter.shape:  # torch would broadcast it
                self._refuse_gradient(parameter)
        for index, (_, members) in enumerate(work.equals):
            shape, dtype = members[0].shape, members[0].dtype
            grads: list[Tensor] = [p.grad for p in members]  # type: ignore[misc]
            for parameter, grad in zip(members, grads, strict=True):
                if grad.layout is not torch.strided:
                    self._refuse_sparse(parameter)
                if grad.shape != shape or grad.dtype is not dtype:
                    self._refuse_gradient(parameter)
            stack = work.stacks[index] if work.stacks else None
            if stack is not None:
                stack.grads = grads
            if stack is None or not stack.untouched():
                for parameter in members:
                    self._check_finite(parameter)

    def _refuse_gradient(self, parameter: Tensor) -> None:
        grad = parameter.grad
        raise ValueError(
            fail(
                f"grad of {self._name(parameter)}",
                f"have shape {tuple(parameter.shape)} and dtype {parameter.dtype}",
                f"shape {tuple(grad.shape)} and dtype {grad.dtype}",  # type: ignore[union-attr]
                "set it to None and run backward again",
            )
        )

    def _refuse_sparse(self, parameter: Tensor) -> None:
        raise TypeError(
            fail(
                f"grad of {self._name(parameter)}",
                "be dense",
                f"one of shape {tuple(parameter.shape)} that is sparse",
                "use sparse=False in the layer that produces it",
            )
        )

    def _check_finite(self, parameter: Tensor) -> None:
        if not bool(torch.isfinite(parameter).all()):
            raise ValueError(
                fail(
                    self._name(parameter),
                    "be finite",
                    f"NaN or inf in a tensor of shape {tuple(parameter.shape)}",
                    "initialise it, or load a good checkpoint",
                )
            )

    def _name(self, parameter: Tensor) -> str:
        """Return the name of a parameter, or its place in the groups."""
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is parameter:
                    names = group.get("param_names")
                    return _label(names[index] if names else None, index, number)
        raise ValueError(fail("parameter", "belong to this optimizer", "one of no group"))

    # ---- checkpoints ---------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, with the reading of each parameter beside it."""
        packed = super().state_dict()
        for group, saved in zip(self.param_groups, packed["param_groups"], strict=True):
            readings = [_reading(parameter, group) for parameter in group["params"]]
            if any(reading is not None for reading in readings):
                saved["readings"] = [r if r is None else r.as_dict() for r in readings]
        return packed

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, here or from torch's own optimizer.

        The readings of this optimizer's parameters stay as they are.

        Raises:
            ValueError: if a parameter was saved under another reading, naming it.
        """
        saved_groups = [dict(saved) for saved in state_dict["param_groups"]]
        for number, (group, saved) in enumerate(
            zip(self.param_groups, saved_groups, strict=False)  # torch checks the numbers
        ):
            names = group.get("param_names")
            for index, (parameter, reading) in enumerate(
                zip(group["params"], _saved_readings(saved), strict=False)
            ):
                current = _reading(parameter, group)
                if reading is not None and (current is None or current.as_dict() != reading):
                    label = _label(names[index] if names else None, index, number)
                    raise ValueError(
                        fail(
                            f"reading of {label}",
                            f"be the saved one, {Stiefel.from_dict(reading)}",
                            current,
                            "constrain it as it was when the checkpoint was written",
                        )
                    )
            saved["stiefel"] = group["stiefel"]
            for name in self.defaults:  # a checkpoint of torch lacks our options
                saved.setdefault(name, group[name])
        super().load_state_dict({**state_dict, "param_groups": saved_groups})

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gathered, self._known_states = {}, []
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # ---- what a user may ask -------------------------------------------------------------------

    def velocity(self, parameter: Tensor) -> tuple[Any, Any]:
        """Return the momentum (Z, U) of a constrained parameter, in the notation of its rule.

        Z, skew, has shape ``(..., m, m)``; U, normal to the point, ``(..., n, m)``, with the batch
        and head dimensions of the reading in front. U is zero for square matrices. For a reading
        with several ranges of rows each of the two is a tuple, one tensor for each range. Before
        the first step both are zero.
        """
        skews, normals = [], []
        for suffix, point, state, window in self._ranges(parameter):
            skew = state.get("momentum_skew" + suffix)
            m = point.size(-1)
            skews.append(point.new_zeros(*point.shape[:-2], m, m) if skew is None else skew.clone())
            normals.append(self._normal_momentum(point, window, state, suffix))
        if len(skews) == 1:
            return skews[0], normals[0]
        return tuple(skews), tuple(normals)

    def set_velocity(self, parameter: Tensor, skew: Any, normal: Any) -> None:
        """Set the momentum (Z, U) of a constrained parameter; shapes as :meth:`velocity` gives.

        Of Z the skew part is taken, of U the part that is normal to the point.
        """
        several = isinstance(skew, tuple)
        values = zip(skew, normal, strict=True) if several else ((skew, normal),)
        ranges = self._ranges(parameter, make=True)
        for (suffix, point, state, window), (new_skew, new_normal) in zip(
            ranges, values, strict=True
        ):
            state["momentum_skew" + suffix].copy_((new_skew - new_skew.mT) / 2)
            if window is None:
                continue
            window.copy_(new_normal - point @ (point.mT @ new_normal))
            if "deferred_shift" + suffix in state:
                state["deferred_shift" + suffix].zero_()
                state["deferred_factor" + suffix].zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)

    @torch.no_grad()
    def _ranges(
        self, parameter: Tensor, make: bool = False
    ) -> list[tuple[str, Tensor, dict[str, Tensor], Tensor | None]]:
        """Return, for each range, its suffix, the point, all state, and the window on the tall."""
        for group in self.param_groups:
            manifold = _reading(parameter, group)
            if manifold is not None and any(parameter is other for other in group["params"]):
                break
        else:
            raise ValueError(
                fail("parameter", "be constrained in this optimizer", "one that is not")
            )
        state = self.state.get(parameter, {})
        if make:
            state = self._init_state(parameter, manifold, group)
        found = []
        for index, part in enumerate(manifold.parts(parameter.detach())):
            point = manifold.matrices(part, index) / manifold.scale
            window = None
            if "momentum_normal" in state and point.size(-2) > point.size(-1):
                tall_part = manifold.parts(state["momentum_normal"])[index]
                window = manifold.matrices(tall_part, index)
            found.append((f".{index}" if index else "", point, state, window))
        return found

    def _normal_momentum(
        self, point: Tensor, window: Tensor | None, state: dict[str, Tensor], suffix: str
    ) -> Tensor:
        """Return U of one range: what is kept, put together with what is deferred."""
        if window is None:
            return torch.zeros_like(point)
        if "deferred_factor" + suffix not in state:
            return window.clone()
        deferred = point @ state["deferred_shift" + suffix]
        return window @ state["deferred_factor" + suffix] - deferred

    @override
    def __repr__(self) -> str:
        tensors, matrices, plain = 0, 0, 0
        for group in self.param_groups:
            for parameter in group["params"]:
                manifold = _reading(parameter, group)
                if manifold is None:
                    plain += 1
                else:
                    tensors += 1
                    matrices += manifold.count(parameter.shape)
        header = (
            f"{matrices} matrices in {tensors} parameters are constrained, and weight decay does "
            f"not touch them; {plain} parameters are plain."
        )
        return f"{super().__repr__()}\n{header}"


def _reading(parameter: Tensor, group: Group) -> Stiefel | None:
    """Return how a group reads a parameter: the group's key if it has one, else the tag."""
    key = group["stiefel"]
    if key is None:
        return manifold_of(parameter)
    if key is False:
        return None
    if key is True:
        return manifold_of(parameter) or Stiefel()
    return Stiefel.from_dict(key)


def _saved_readings(saved: Group) -> list[Any]:
    """Take the readings out of a saved group, in the order of its ``params``.

    ``torch.distributed.checkpoint`` replaces numbers by names and may reorder ``params``, but not
    what else is listed; a reading whose parameter cannot be told any more is not compared.
    """
    readings: list[Any] = saved.pop("readings", [])
    if all(isinstance(number, int) for number in saved["params"]):
        return readings
    named = dict(zip(saved.pop("param_names", ()), readings, strict=False))
    return [named.get(name) for name in saved["params"]]


def _as_plain_data(stiefel: Any) -> Any:
    """Return the option ``stiefel`` as None, a bool, or a dict of numbers and lists."""
    if stiefel is None or isinstance(stiefel, bool):
        return stiefel
    if isinstance(stiefel, Stiefel):
        return stiefel.as_dict()
    if isinstance(stiefel, Mapping):
        return Stiefel.from_dict(stiefel).as_dict()
    raise TypeError(fail("stiefel", "be None, True, False or a Stiefel", repr(stiefel)))


def _label(name: str | None, index: int, group_number: int) -> str:
    return f"parameter {index} of group {group_number}" if name is None else name
