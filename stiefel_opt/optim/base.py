"""The only step(): closure, gathering, lazy state, stacking, checkpoints, plain parameters."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt._checks import check_choice, check_dtype, check_flag, fail
from stiefel_opt.functional.momentum import METRICS, ROTATIONS, TRANSPORTS
from stiefel_opt.geometry import gram_error, orthonormality_tolerance, polar_factor
from stiefel_opt.manifold import Stiefel, manifold_of
from stiefel_opt.optim.stack import Batch, Stack, is_small, state_shapes

__all__ = ["StiefelOptimizer", "check_common"]

Group = dict[str, Any]

# Rounding in X'X and X'U is measured and removed every so many steps where reading the count is
# free, and in every step elsewhere.
_CORRECTION_PERIOD = 8


@dataclass
class Gathered:
    """What one step of one group works on; kept while the same parameters have gradients."""

    active: list[Tensor]
    types: list[type]
    stiefel: Any
    plain: list[Tensor] = field(default_factory=list)
    stacks: list[Stack] = field(default_factory=list)

    def fits(self, active: list[Tensor], stiefel: Any) -> bool:
        """Say whether this still describes the group."""
        return (
            len(active) == len(self.active)
            and all(map(_same, active, self.active))
            and list(map(type, active)) == self.types
            and stiefel is self.stiefel
            and all(stack.intact() for stack in self.stacks)
        )


class StiefelOptimizer(Optimizer):
    """Base of all optimizers here: a group holds constrained and plain parameters side by side.

    A subclass says which state it keeps (:meth:`_state_names`), how a batch of matrices moves
    (:meth:`_move`), and which functions of torch move plain parameters (:meth:`_step_plain`,
    :meth:`_step_plain_rows`).
    """

    def __init__(self, params: Any, defaults: Group) -> None:
        self._gathered: dict[int, Gathered] = {}
        super().__init__(params, defaults)
        self._warn_if_nothing_is_constrained()

    # ---- what a subclass says ------------------------------------------------------------------

    @abstractmethod
    def _check_options(self, group: Group) -> None:
        """Raise unless the options of a group make sense."""

    @abstractmethod
    def _state_names(self, group: Group) -> tuple[list[str], list[str]]:
        """Return the names of the m x m state and of the tall state."""

    @abstractmethod
    def _move(
        self, group: Group, point: Tensor, grad: Tensor, batch: Batch, lr: float | Tensor,
        correct: bool,
    ) -> Tensor:
        """Return the new point of a batch and update its state."""

    @abstractmethod
    def _velocity(self, group: Group, point: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (Z, U) of a batch."""

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
        gathered = [self._init_group(i, group) for i, group in enumerate(self.param_groups)]
        for group, work in zip(self.param_groups, gathered, strict=True):
            if work.plain:
                self._step_plain(group, work.plain)
            for stack in work.stacks:
                self._step_stack(group, stack)
        return loss
