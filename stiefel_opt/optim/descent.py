"""ProjectedRGD: Riemannian gradient descent, every metric with every retraction."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt._checks import check_choice
from stiefel_opt.functional.descent import RETRACTIONS, descend_
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.batch import Batch, Given
from stiefel_opt.optim.options import check_metric, check_sgd, force_of
from stiefel_opt.optim.plain import step_sgd, step_sgd_rows
from stiefel_opt.optim.readings import Group
from stiefel_opt.optim.state import StateNames
from stiefel_opt.optim.velocity import VelocityOptimizer

__all__ = ["ProjectedRGD"]


class ProjectedRGD(VelocityOptimizer):
    r"""Riemannian gradient descent with projected momentum; plain parameters get torch's SGD.

    .. math::
        M \leftarrow \mu M - \mathrm{grad} f(X),\quad X_+ = R_X(\eta M),\quad
        M \leftarrow M - X_+ \mathrm{sym}(X_+^\top M)

    The gradient is that of a metric, R a retraction, and the last step projects the momentum onto
    the tangent space at the new point. Without momentum ``metric="canonical"`` with
    ``retraction="cayley"`` is the curvilinear step of Wen & Yin (2013).

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor.
        momentum, dampening, nesterov, maximize: As in ``torch.optim.SGD``, for both kinds.
        weight_decay: For plain parameters. It cannot move a constrained one.
        foreach, fused: For plain parameters, as in torch.
        differentiable: Must be False.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0), or any float a < 1.
        retraction: "cayley", "qr" or "polar".
        nonfinite, stiefel: As in :class:`StiefelSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Four products of n x m by m x m a step, seven with momentum, batched over equal matrices,
        and one factorisation of m x m: the Cayley map too is reduced to a system of that size. No
        state without momentum, else one tensor like the parameter and one of m x m.

    Reference:
        Wen & Yin, A feasible method for optimization with orthogonality constraints (2013), and
        Likhosherstov et al. (AISTATS 2021), section 2.3, where they are RGD-{C,E}-{C,QR}.
    """

    _sparse_allowed = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        metric: str | float = "canonical",
        retraction: str = "cayley",
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
            "retraction": retraction,
            "nonfinite": nonfinite,
            "stiefel": stiefel,
        }
        super().__init__(params, defaults)

    @override
    def _check_options(self, group: Group) -> None:
        check_sgd(group)
        check_metric(group)
        check_choice("retraction", group["retraction"], RETRACTIONS)

    @override
    def _state_names(self, group: Group) -> StateNames:
        if group["momentum"] == 0:
            return StateNames([], [], [])
        return StateNames(["momentum_skew"], [], ["momentum_normal"])

    @override
    def _move(self, group: Group, batch: Batch, given: Given) -> Tensor:
        return descend_(
            given.point,
            given.grad,
            batch.state.get("momentum_skew"),
            batch.state.get("momentum_normal"),
            lr=given.lr,
            momentum=group["momentum"],
            force=force_of(group, batch),
            nesterov=group["nesterov"],
            metric=group["metric"],
            retraction=group["retraction"],
            correct=given.correct,
            row_sum=batch.row_sum,
            watch=given.watch,
        )

    @override
    def _step_plain(self, group: Group, parameters: list[Tensor]) -> None:
        step_sgd(group, parameters, self.state)

    @override
    def _step_plain_rows(
        self, group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[Group]
    ) -> None:
        step_sgd_rows(group, parameters, grads, states)
