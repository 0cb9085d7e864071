r"""Riemannian gradient descent on the Stiefel manifold: metrics x retractions, with momentum.

X is the point, G the Euclidean gradient, eta the learning rate, mu the momentum, a < 1 the
parameter of the metric tr(D1'(I - a XX')D2). A tangent vector is XT + V with T skew and X'V = 0;
the gradient has T = (X'G - G'X) / (2 (1 - a)) and V = (I - XX')G. One step is

    M <- mu M - grad,   X+ = R_X(eta M),   M <- M - X+ sym(X+'M)

the last being the projection onto the tangent space at the new point. Of M the parts T and V are
kept; the retractions are those of :mod:`stiefel_opt.functional.retractions`. For the gradient of
the canonical metric the W of "cayley" is GX' - XG'. Two misprints of the source: in g(eta) the
factor Omega stands inside the Cayley map, and the argument of qf lacks the summand Omega. Batches
are ``(k, n, m)`` with n >= m.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_choice
from stiefel_opt.functional import (
    NORMAL,
    PULL,
    SKEW,
    Move,
    Scalar,
    Tensors,
    accumulated,
    metric_parameter,
    normal_force,
    skew_force,
)
from stiefel_opt.methods.retractions import retract_along
from stiefel_opt.numerics import (
    LOCAL_SUMS,
    Reader,
    Sums,
    add_product,
    add_product_,
    product,
    reader_for,
)
from stiefel_opt.numerics import RETRACTIONS as RETRACTIONS
from stiefel_opt.optim import (
    U_STATE,
    Z_STATE,
    Group,
    Rule,
    SGDLike,
    State,
    check_metric,
    options_of,
)
from stiefel_opt.tags import Stiefel


def rgd(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar = 1.0,  # noqa: ARG001
    momentum: float = 0.0,
    nesterov: bool = False,
    metric: str | float = "canonical",
    retraction: str = "cayley",
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of ProjectedRGD.

    Args:
        X, G, lr, step, momentum, metric, sums, reader: as in
            :func:`stiefel_opt.functional.sgd`.
        state: T and, for n > m, V of the momentum as ``momentum_skew``, ``(k, m, m)``, and
            ``momentum_normal``, ``(k, n, m)``. Empty: there is no momentum.
        nesterov: X moves along mu M - grad.
        retraction: "cayley", "qr" or "polar".

    Note: 4 products of n x m by m x m and, but for "polar", one factorisation of m x m; with
        momentum 7 for "cayley", 8 for the others. A step is cut where a bound on its length is over
        64.
    Reference: Edelman, Arias & Smith (1998); Wen & Yin (2013), which is "cayley" with the canonical
        metric and no momentum; Likhosherstov et al. (AISTATS 2021), appendix A.
    """
    reader, T, V = reader or reader_for(X), state.get(SKEW), state.get(NORMAL)
    (S,) = sums((X, G))
    turn = skew_force(S, metric_parameter(metric))
    if T is None:
        direction = None
        if not sums.are_square(X):
            # V for the Cayley map, XT + V for the others: one product either way
            inside = S if retraction == "cayley" else S + turn
            direction = normal_force(X, inside, G)
        new_X, length = retract_along(X, turn, direction, lr, retraction, sums, reader, S)
        return new_X, {}, length._replace(inner=S)
    new_T, turn = accumulated(turn, T, momentum, nesterov=nesterov)
    new_V = direction = None
    if V is not None:
        minus_g = normal_force(X, S, G)
        new_V, direction = accumulated(minus_g, V, momentum, nesterov=nesterov)
        if retraction != "cayley":
            direction = add_product(direction, X, turn)
    new_X, length = retract_along(X, turn, direction, lr, retraction, sums, reader, S)
    return new_X, carried(X, new_X, new_T, new_V, sums), length._replace(inner=S)


def carried(X: Tensor, new_X: Tensor, T: Tensor, V: Tensor | None, sums: Sums) -> Tensors:
    """Return the parts of M - X+ sym(X+'M) for M = XT + V; V is None for square matrices."""
    M = product(X, T) if V is None else add_product(V, X, T)
    (inner,) = sums((new_X, M))
    new = {SKEW: (inner - inner.mH) / 2}
    return new if V is None else new | {NORMAL: add_product_(M, new_X, inner, alpha=-1.0)}


# ---- the optimizer -----------------------------------------------------------------------------


class ProjectedRGD(SGDLike):
    r"""Riemannian gradient descent with projected momentum; plain parameters get torch's SGD.

    .. math::
        M \leftarrow \mu M - \mathrm{grad} f(X),\quad X_+ = R_X(\eta M),\quad
        M \leftarrow M - X_+ \mathrm{sym}(X_+^\top M)

    The gradient is that of a metric, R a retraction, and the last step projects the momentum onto
    the tangent space at the new point. Without momentum ``metric="canonical"`` with
    ``retraction="cayley"`` is the curvilinear step of Wen & Yin (2013).

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused,
            differentiable, metric, scale_pull, nonfinite, stiefel,
            cuda_graph: As in :class:`StiefelSGD`.
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
    capturable = True
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
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
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
        return self.bound(group, rgd, "metric", "retraction")
