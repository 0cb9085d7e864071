"""ProjectedRGD: Riemannian gradient descent, every metric with every retraction."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_choice
from stiefel_opt.functional.descent import RETRACTIONS, descend
from stiefel_opt.optim.checks import check_metric
from stiefel_opt.optim.commit import Rule
from stiefel_opt.optim.families import SGDLike, options_of
from stiefel_opt.optim.state import State
from stiefel_opt.optim.stiefel import U_STATE, Z_STATE
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.manifold import Stiefel


class ProjectedRGD(SGDLike):
    r"""Riemannian gradient descent with projected momentum; plain parameters get torch's SGD.

    .. math::
        M \leftarrow \mu M - \mathrm{grad} f(X),\quad X_+ = R_X(\eta M),\quad
        M \leftarrow M - X_+ \mathrm{sym}(X_+^\top M)

    The gradient is that of a metric, R a retraction, and the last step projects the momentum onto
    the tangent space at the new point. Without momentum ``metric="canonical"`` with
    ``retraction="cayley"`` is the curvilinear step of Wen & Yin (2013).

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused,
            differentiable, metric, nonfinite, stiefel: As in :class:`StiefelSGD`.
        retraction: "cayley", "qr" or "polar".

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Four products of n x m by m x m a step, seven or eight with momentum, batched over equal
        matrices, and one factorisation of m x m: the Cayley map too is reduced to a system of that
        size. No state without momentum, else one tensor like the parameter and one of m x m.

    Reference:
        Wen & Yin, A feasible method for optimization with orthogonality constraints (2013), and
        Likhosherstov et al. (AISTATS 2021), section 2.2.2; their table 2 names RGD-{C,E}-{C,QR}.
    """

    rule = "ProjectedRGD"
    sums_over_rows = True
    learns_scale = True

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
        super().__init__(params, options_of(locals()))

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_metric(group)
        check_choice("retraction", group["retraction"], RETRACTIONS)

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return () if group["momentum"] == 0 else (Z_STATE, U_STATE)

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, descend, "metric", "retraction")
