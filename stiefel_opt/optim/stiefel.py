"""StiefelSGD and StiefelAdam: momentum by isometric flows, torch's own rules for plain tensors."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_flag
from stiefel_opt.functional.flows import Tensors
from stiefel_opt.functional.learned_scale import PULL
from stiefel_opt.functional.momentum import (
    FACTOR,
    NORMAL,
    OVERLAP,
    SKEW,
    UNPROJECTED,
    adam,
    corrected_unprojected,
    evaluated,
    sgd,
)
from stiefel_opt.functional.radius import GROWTH, with_radius
from stiefel_opt.optim import checks
from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.families import AdamLike, SGDLike, options_of
from stiefel_opt.optim.moves import Correction, Rule
from stiefel_opt.optim.records import largest_of
from stiefel_opt.optim.state import State
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.manifold import Stiefel

Z_STATE: Final = State(SKEW, "mm", symmetry="skew")
U_STATE: Final = State(NORMAL, symmetry="normal")
_UNPROJECTED: Final = (
    State(OVERLAP, "mm", tall_only=True),
    State(FACTOR, "mm", start="I", tall_only=True),
    State(UNPROJECTED, tall_only=True),
)
_GROWTH: Final = State(GROWTH, "1", dtype="real", least=-1.0)
SECOND_MOMENTS: Final = (
    State("exp_avg_sq_skew", "mm", dtype="real", symmetry="symmetric", least=0.0),
    State("exp_avg_sq_normal", dtype="real", tall_only=True, least=0.0),
    State("max_exp_avg_sq_skew", "mm", dtype="real", symmetry="symmetric", least=0.0),
    State("max_exp_avg_sq_normal", dtype="real", tall_only=True, least=0.0),
)


class Flows(StiefelOptimizer):
    """What both classes say of options that they share, and the numbers that a report shows."""

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        checks.check_metric(group)
        checks.check_transport(group)

    def radii_of(self) -> dict[Tensor, float]:
        """Return the largest virtual radius of each weight that has one."""
        growths = largest_of(self.state, GROWTH)
        return {parameter: math.sqrt(1 + growth) for parameter, growth in growths.items()}


class StiefelSGD(Flows, SGDLike):
    r"""SGD with momentum (0.9, torch: 0) that keeps constrained parameters orthonormal.

    With f, g the skew and normal part of the Riemannian gradient, a step with momentum mu is

    .. math::
        U \leftarrow \mu U - g,\quad Z \leftarrow \mu Z - f,\quad
        R = (I + \eta^2 U^\top U)^{-1/2},\\
        X \leftarrow (X\,\mathrm{rot}(\eta Z) + \eta U) R,\quad
        U \leftarrow (U - \eta X\,\mathrm{rot}(\eta Z)\, U^\top U) R

    for the canonical metric; see :func:`stiefel_opt.functional.sgd` for all variants. Constrained
    are parameters with a tag (:func:`stiefel_opt.constrain`, :class:`ManifoldParameter`), or those
    of groups with ``stiefel``. One learning rate serves both kinds.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor, which on an accelerator is never read: NaN passes.
        momentum, dampening, nesterov, maximize: As in ``torch.optim.SGD``, for both kinds.
        weight_decay: For plain parameters. It cannot move a constrained one: X is normal to the
            manifold at X.
        foreach, fused: For plain parameters, as in torch.
        differentiable: Must be False.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0), or any float a < 1.
        transport: How the momentum is carried to the new point: "isometric" turns it with the point
            and keeps its length, "projected" projects each part of it after its own turn, which
            shortens it. Neither can grow. The published flows, which can, are
            :class:`stiefel_opt.PublishedSGD`.
        scale_pull: How strongly a learned scale is pulled back to its start in a step, as a part of
            its learning rate; see :func:`stiefel_opt.functional.sgd_scale`. 0 lets it go.
        nonfinite: What becomes of a constrained parameter whose gradient is not finite, or longer
            than 2e13 in float32: "skip" keeps its point, momentum and step while the others move,
            warns, and counts in :meth:`skipped_steps`; "raise" stops before anything has moved, and
            waits for the device; "ignore" looks at nothing. On an accelerator the warning of "skip"
            waits for :meth:`state_dict`, and from the second step on the step itself is judged: a
            parameter stays, with its state, where its step is not finite or above 4e9 rad in
            float32. A matrix whose step overflows on a CPU although its gradient is safe, as with
            a momentum of 1 or more, stays and starts its momentum again while the others move;
            then "skip" warns and "raise" raises.
        stiefel: Default of the groups: None reads the tags, True constrains every parameter, False
            none, a :class:`Stiefel` reads every parameter so. A group's own key overrides it.
        cuda_graph: Whether steps of constrained parameters on a GPU are captured as CUDA graphs and
            repeated by one call: True, False, or None, which will be True where graphs keep less
            than 1 GiB, and is False in this version. Graphs keep five to eight times the memory of
            the weights. A step that cannot be captured is taken as by False, and ``so.report`` says
            why. True raises for weights on a CPU or on several processes, and for
            ``nonfinite="raise"``.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        A step costs six products of n x m by m x m, five if "projected" at the canonical metric,
        batched over equal matrices, and no factorisation; state is one tensor like the parameter
        and three of m x m, and none without momentum. An initialisation off the manifold is
        projected by the first step with lr > 0. The first step and one after an outside change of a
        parameter may wait for an accelerator.

    Reference:
        After Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 1: other maps of
        the same splitting, with the geometry corrected.
    """

    rule = "StiefelSGD"
    sums_over_rows = True
    capturable = True
    learns_scale = True
    velocity_names = (SKEW, NORMAL, UNPROJECTED, OVERLAP, FACTOR)

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
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        if group["momentum"] == 0:
            return ()
        if group["nesterov"]:
            return Z_STATE, U_STATE
        return Z_STATE, *_UNPROJECTED[:: 2 if group["transport"] == "projected" else 1]

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, sgd, "metric", "transport")

    @override
    def correction_for(self, group: Group) -> Correction:
        return corrected_unprojected

    @override
    def velocity_in(self, X: Tensor, state: Tensors) -> tuple[Tensor | None, Tensor | None]:
        return evaluated(X, state)

    @override
    def state_of_velocity(self, X: Tensor, Z: Tensor, U: Tensor) -> Tensors:
        identity = torch.eye(Z.size(-1), dtype=Z.dtype, device=Z.device).expand_as(Z)
        return {SKEW: Z, NORMAL: U, UNPROJECTED: U, OVERLAP: torch.zeros_like(Z), FACTOR: identity}


class StiefelAdam(Flows, AdamLike):
    r"""Adam that keeps constrained parameters orthonormal; plain ones get torch's Adam.

    First moments are the skew part Z and the normal part U of a velocity, second moments p and q
    those of the two parts of the Riemannian gradient. X turns by rot(eta Zp) and moves along V,

    .. math::
        Z_p = \frac{(\beta_1 Z - (1 - \beta_1) f)/c_1}{\sqrt{p/c_2} + \epsilon},\quad
        V = (I - XX^\top)
        \frac{(\beta_1 U - (1 - \beta_1) g)/c_1}{\sqrt{q/c_2} + \epsilon},\\
        c_1 = 1 - \beta_1^{t+1},\quad c_2 = 1 - \beta_2^t,

    and U is carried by the rotation that V makes. Without ``nesterov`` the quotients are those of Z
    and U, with t in place of t + 1. See :func:`stiefel_opt.functional.adam`. A constant factor on
    the loss changes nothing.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor.
        betas, eps, amsgrad, maximize: As in ``torch.optim.Adam``, for both kinds. On an accelerator
            the host learns of a skipped step one or two late, and counts it in t for so long.
        weight_decay, decoupled_weight_decay: For plain parameters: ``torch.optim.Adam`` or, with
            ``decoupled_weight_decay=True``, ``AdamW``. Constrained ones cannot be moved by it.
        foreach, fused, capturable: For plain parameters, as in torch.
        differentiable: Must be False.
        metric, transport, scale_pull, nonfinite, stiefel, cuda_graph: As in :class:`StiefelSGD`.
        nesterov: Nesterov's momentum for constrained parameters, as in ``torch.optim.NAdam`` with
            constant betas; plain ones follow Adam. False moves along Z and U, as printed. Default:
            None, which is True. Checkpoints from before it was an option go on with False.
        radius: What the learning rate of constrained parameters is divided by. "virtual": r, one
            number for each matrix that starts as 1 and grows as the norm of an unconstrained weight
            would, ``r^2 <- (1 - lr d)^2 r^2 + (lr / s)^2 n`` for matrices of n rows times a scale s
            and the decoupled weight decay d, so that they turn less and less as it does. "angle":
            sqrt(n), so that ``lr`` is about the angle of a step. A number: itself; the step as
            printed has 1. Default: None, which is "virtual". See
            :func:`stiefel_opt.functional.with_radius`. Checkpoints from before there was a radius
            go on with 1.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Nine products of n x m by m x m a step, batched over equal matrices, and no factorisation;
        state is two tensors like the parameter and two of m x m, with ``amsgrad`` three each. With
        ``transport="projected"`` eight products.

    Reference:
        After Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 2: other maps of
        the same splitting, with the geometry corrected, and both moments corrected for their
        initialisation at zero.
    """

    rule = "StiefelAdam"
    sums_over_rows = True
    capturable = True
    learns_scale = True

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
        nesterov: bool | None = None,
        radius: str | float | None = None,
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        checks.check_radius(group)
        if group["nesterov"] is not None:
            check_flag("nesterov", group["nesterov"])

    @override
    def resolved(self, group: Group) -> Group:
        return checks.resolved(super().resolved(group), radius="virtual", nesterov=True)

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE, *self.moments_for(group)

    def moments_for(self, group: Group) -> tuple[State, ...]:
        """Return the second moments of a matrix and, where it has one, its virtual radius."""
        growth = (_GROWTH,) if self.resolved(group)["radius"] == "virtual" else ()
        return *SECOND_MOMENTS[: 4 if group["amsgrad"] else 2], *growth

    @override
    def rule_for(self, group: Group) -> Rule:
        rule = self.bound(self.resolved(group), adam, "nesterov", "metric", "transport")
        return self.by_radius(group, rule)

    def by_radius(self, group: Group, rule: Rule) -> Rule:
        """Return a rule whose learning rate is divided by the radius of a group."""
        radius = self.resolved(group)["radius"]
        if radius == 1:
            return rule
        decay = group["weight_decay"] if group["decoupled_weight_decay"] else 0.0
        return partial(with_radius, rule, radius, weight_decay=decay)


class StiefelAdamW(StiefelAdam):
    """:class:`StiefelAdam` whose plain parameters get ``torch.optim.AdamW``, with its defaults.

    Args:
        params, lr, betas, eps, amsgrad, maximize, foreach, capturable, differentiable, fused: As in
            ``torch.optim.AdamW``.
        weight_decay: Decoupled, for plain parameters. Default: 0.01.
        metric, transport, scale_pull, nonfinite, stiefel, cuda_graph: As in :class:`StiefelSGD`.
        nesterov: As in :class:`StiefelAdam`.
        radius: As in :class:`StiefelAdam`. Of a constrained parameter ``weight_decay`` acts only on
            the virtual radius; the nominal angle of its steps tends to sqrt(2 lr weight_decay).

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Checkpoints are those of :class:`StiefelAdam`; what is loaded here decays decoupled.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        metric: str | float = "canonical",
        transport: str = "isometric",
        nesterov: bool | None = None,
        radius: str | float | None = None,
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(**options_of(locals()), params=params, decoupled_weight_decay=True)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
