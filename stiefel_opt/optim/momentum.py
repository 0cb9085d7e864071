"""StiefelSGD and StiefelAdam: momentum by isometric flows, torch's own rules for plain tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt._checks import check_choice
from stiefel_opt.functional.momentum import (
    ROTATIONS,
    TRANSPORTS,
    adam_,
    normal_part,
    sgd_,
)
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.batch import Batch, Given
from stiefel_opt.optim.options import check_adam, check_metric, check_sgd, force_of
from stiefel_opt.optim.plain import step_adam, step_adam_rows, step_sgd, step_sgd_rows
from stiefel_opt.optim.readings import Group
from stiefel_opt.optim.state import StateNames
from stiefel_opt.optim.velocity import VelocityOptimizer, exceeds_rounding, measure_overlap

__all__ = ["StiefelAdam", "StiefelSGD"]

_SGD_STATE = StateNames(
    ["momentum_skew"], ["deferred_factor", "deferred_shift"], ["momentum_normal"]
)
_ADAM_STATE = StateNames(
    ["momentum_skew", "exp_avg_sq_skew"], [], ["momentum_normal", "exp_avg_sq_normal"]
)
_AMSGRAD_STATE = StateNames(
    [*_ADAM_STATE.small, "max_exp_avg_sq_skew"], [], [*_ADAM_STATE.tall, "max_exp_avg_sq_normal"]
)


class StiefelSGD(VelocityOptimizer):
    r"""SGD with momentum that keeps constrained parameters orthonormal; plain ones get torch's SGD.

    With f, g the skew and normal part of the Riemannian gradient, a step with momentum mu is

    .. math::
        U \leftarrow \mu U - g,\quad Z \leftarrow \mu Z - f,\quad
        R = (I + \eta^2 U^\top U)^{-1/2},\\
        X \leftarrow (X\,\mathrm{rot}(\eta Z) + \eta U) R,\quad
        U \leftarrow (U - \eta X\,\mathrm{rot}(\eta Z)\, U^\top U) R

    for the canonical metric; see :func:`stiefel_opt.functional.sgd_` for all variants. Constrained
    are parameters with a tag (:func:`stiefel_opt.constrain`, :class:`ManifoldParameter`), or those
    of groups with ``stiefel``. One learning rate serves both kinds.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor.
        momentum, dampening, nesterov, maximize: As in ``torch.optim.SGD``, for both kinds.
        weight_decay: For plain parameters. It cannot move a constrained one: X is normal to the
            manifold at X.
        foreach, fused: For plain parameters, as in torch.
        differentiable: Must be False.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0), or any float a < 1.
        transport: "isometric", which cannot blow up, or "published".
        rotation: How X turns within its span: "polar", "euler", "cayley" or "expm". Together with
            ``transport="published"``, "euler" is the published algorithm.
        nonfinite: What becomes of a constrained parameter whose gradient is not finite, or so large
            that its square would not be (2e13 in float32): "skip" keeps its point, momentum and
            step while the others move, warns, and counts in :meth:`skipped_steps`; "raise" stops
            before anything has moved, and waits for the device; "ignore" looks at nothing. On an
            accelerator the warning of "skip" waits for :meth:`state_dict`.
        stiefel: Default of the groups: None reads the tags, True constrains every parameter, False
            none, a :class:`Stiefel` reads every parameter so. A group's own key overrides it.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        A step costs six products of n x m by m x m, batched over equal matrices, and no
        factorisation; state is one tensor like the parameter and three of m x m. A start off the
        manifold is projected by the first step with lr > 0. The first step and one after an
        outside change of a parameter may wait for an accelerator.

    Reference:
        Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 1, with the geometry
        corrected.
    """

    _sparse_allowed = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        metric: str | float = "canonical",
        transport: str = "isometric",
        rotation: str = "polar",
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
            "metric": metric,
            "transport": transport,
            "rotation": rotation,
            "nonfinite": nonfinite,
            "stiefel": stiefel,
        }
        super().__init__(params, defaults)

    @override
    def _check_options(self, group: Group) -> None:
        check_sgd(group)
        _check_flows(group)

    @override
    def _state_names(self, group: Group) -> StateNames:
        return _SGD_STATE

    @override
    def _move(self, group: Group, batch: Batch, given: Given) -> Tensor:
        state = batch.state
        normal = state.get("momentum_normal")
        factor, shift = state.get("deferred_factor"), state.get("deferred_shift")
        if normal is not None and factor is not None and shift is not None:
            if group["nesterov"]:
                if batch.deferred:
                    normal.copy_(normal_part(given.point, normal, factor, shift))
                    factor.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)
                    shift.zero_()
                    batch.deferred = False
                factor = shift = None
            else:
                batch.deferred = True
        return sgd_(
            given.point,
            given.grad,
            state["momentum_skew"],
            normal,
            factor,
            shift,
            lr=given.lr,
            momentum=group["momentum"],
            force=force_of(group, batch),
            nesterov=group["nesterov"],
            metric=group["metric"],
            transport=group["transport"],
            rotation=group["rotation"],
            correct=given.correct,
            row_sum=batch.row_sum,
            watch=given.watch,
        )

    @override
    def _is_stale(self, point: Tensor, batch: Batch) -> bool:
        normal = batch.state.get("momentum_normal")
        if normal is None:
            return False
        overlap, size = measure_overlap(point, normal, batch.row_sum)
        overlap = torch.bmm(overlap, batch.state["deferred_factor"])
        return exceeds_rounding(overlap - batch.state["deferred_shift"], size)

    @override
    def _step_plain(self, group: Group, parameters: list[Tensor]) -> None:
        step_sgd(group, parameters, self.state)

    @override
    def _step_plain_rows(
        self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[Group]
    ) -> None:
        step_sgd_rows(group, parameters, grads, states)


class StiefelAdam(VelocityOptimizer):
    r"""Adam that keeps constrained parameters orthonormal; plain ones get torch's Adam.

    First moments are the skew part Z and the normal part U of a velocity, second moments p and q
    those of the two parts of the Riemannian gradient. X turns by rot(eta Zp) and moves along V,

    .. math::
        Z_p = \frac{Z/c_1}{\sqrt{p/c_2} + \epsilon},\quad
        V = (I - XX^\top) \frac{U/c_1}{\sqrt{q/c_2} + \epsilon},\quad c_i = 1 - \beta_i^t,

    and U is carried by the rotation that V makes; see :func:`stiefel_opt.functional.adam_`. A
    constant factor on the loss changes nothing.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor.
        betas, eps, amsgrad, maximize: As in ``torch.optim.Adam``, for both kinds.
        weight_decay, decoupled_weight_decay: For plain parameters: ``torch.optim.Adam`` or, with
            ``decoupled_weight_decay=True``, ``AdamW``. Constrained ones cannot be moved by it.
        foreach, fused, capturable: For plain parameters, as in torch.
        differentiable: Must be False.
        metric, transport, rotation, nonfinite, stiefel: As in :class:`StiefelSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Ten products of n x m by m x m a step, batched over equal matrices, and no factorisation;
        state is two tensors like the parameter and two of m x m, with ``amsgrad`` three each.

    Reference:
        Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 2, with the geometry and
        the correction of the first moment corrected.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        metric: str | float = "canonical",
        transport: str = "isometric",
        rotation: str = "polar",
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "metric": metric,
            "transport": transport,
            "rotation": rotation,
            "nonfinite": nonfinite,
            "stiefel": stiefel,
        }
        super().__init__(params, defaults)

    @override
    def _check_options(self, group: Group) -> None:
        check_adam(group)
        _check_flows(group)

    @override
    def _state_names(self, group: Group) -> StateNames:
        return _AMSGRAD_STATE if group["amsgrad"] else _ADAM_STATE

    @override
    def _move(self, group: Group, batch: Batch, given: Given) -> Tensor:
        state = batch.state
        return adam_(
            given.point,
            given.grad,
            state["momentum_skew"],
            state["exp_avg_sq_skew"],
            state.get("momentum_normal"),
            state.get("exp_avg_sq_normal"),
            state.get("max_exp_avg_sq_skew"),
            state.get("max_exp_avg_sq_normal"),
            lr=given.lr,
            step=batch.step_number(),
            betas=group["betas"],
            eps=group["eps"],
            force=-1.0 if group["maximize"] else 1.0,
            metric=group["metric"],
            transport=group["transport"],
            rotation=group["rotation"],
            correct=given.correct,
            row_sum=batch.row_sum,
            watch=given.watch,
        )

    @override
    def _step_plain(self, group: Group, parameters: list[Tensor]) -> None:
        step_adam(group, parameters, self.state)

    @override
    def _step_plain_rows(
        self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[Group]
    ) -> None:
        step_adam_rows(group, parameters, grads, states, self._state_names(group).tall)


def _check_flows(group: Group) -> None:
    check_metric(group)
    check_choice("transport", group["transport"], TRANSPORTS)
    check_choice("rotation", group["rotation"], ROTATIONS)
