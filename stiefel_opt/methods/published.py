r"""Momentum on the Stiefel manifold as Kong, Wang & Tao print it: Algorithms 1, 2, 4 and 5.

Source: Momentum Stiefel Optimizer (ICLR 2023, arXiv 2205.14173). X is the point, G the Euclidean
gradient, Z the skew and U the normal part of the velocity (X'U = 0), eta the learning rate, mu the
momentum, a < 1 the parameter of the metric tr(D1'(I - a XX')D2). One step of Algorithm 1 is

    f = (X'G - G'X) / (2 (1 - a)),   g = (I - XX') G                 line 2
    U <- mu U + (3a - 2)/2 eta U Z - g                               line 3, phi_2
    Z <- mu Z - f,   Xh = X + eta X Z                                line 4, phi_1
    Xd = Xh + eta U Xh'Xh,   U <- U - eta Xh U'U                     line 5, phi_3
    X <- Xd (Xd'Xd)^(-1/2)

"cayley" and "expm" take Xh = X cayley(eta Z) and X expm(eta Z) in line 4 (appendix M.2). Where we
differ from the print, line by line; ``printed=True`` follows it in what stands before a (*):

- **Algorithm 1, line 3; Algorithm 2, line 4; appendix M.5.** Printed: ``- (3a-2)/2 eta U Z``. Here:
  ``+``, as in equations (8), (14), (34) and in appendix M.4. With the printed sign the steps do not
  converge to the paper's own equation of motion as eta tends to 0, with ours they do. The authors'
  released code has the printed sign, too; neither matters where X'G is symmetric, as Z is 0. (*)
  The coefficient stays as printed, (3a-2)/2, although the geodesics of the metric need 2a - 1.
- **Algorithm 1, line 3 and Algorithm 2, line 4, at mu = 0 (beta1 = 0).** Printed: U Z stays. Here:
  dropped, because without momentum no velocity is left that could turn.
- **Algorithm 1, line 4.** Printed: ``X + eta X Z_i``, the old Z. Here: Z_(i+1), as in (12), M.4 and
  Algorithms 2, 4 and 5. (M.4 and M.5 print ``X + eta Z``, which drops an X.) (*)
- **Equation (13)** lacks ``- h X V'V`` in the line of V; Algorithm 1, line 5 and M.4 have it, so do
  we.
- **Algorithm 2, lines 5 and 6; Algorithm 5, line 5.** Printed: the factor sqrt(1 - beta2^t) alone,
  Adam's correction of the second moment. Here: the usual correction of both moments. (*)
- **Algorithm 2, line 6.** Printed: the projection I - Xh (Xh'Xh)^(-1) Xh'. Here: I - XX', the same
  matrix, as Xh and X span the same space.
- **Algorithm 5, line 5.** Printed: ``p^(-1/2)``. Here: p^(1/2), as in Algorithm 2.
- **Algorithms 4 and 5** print expm alone; here all three rotations, each made orthonormal by line 5
  (4) or 6 (5), so that "euler" is the polar factor of X + eta X Z.
- **Algorithm 3**, the inverse root of Xd'Xd, is replaced by :func:`polar_factor_by_sums`: phi_3
  multiplies U'U by I + eta^2 U'U or more, and Xd'Xd soon has no digit of its smallest eigenvalues
  left.
- **Saturation, in no algorithm.** From eta |Z| or eta |U Xh'Xh| = 1e-3 / eps on (5e12 in float64,
  8e3 in float32) the step is shortened to that: rounding would leave less than three digits of X in
  Xd. Below it the printed step is taken, however little sense it makes: momentum that grows without
  bound is what these flows do at large learning rates.

Nothing is read from the device, but by torch's ``matrix_exp``. Sums over rows go through ``sums``,
so that rows may live on several processes. Rules are pure. Batches are ``(k, n, m)`` with n >= m;
for complex ones ' is the conjugate transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_choice
from stiefel_opt.functional import (
    METRICS,
    NORMAL,
    PULL,
    SKEW,
    Length,
    Move,
    Scalar,
    Tensors,
    accumulated,
    bias_correction,
    bias_correction_ratio,
    corrected,
    metric_parameter,
    moments,
    precondition,
    shortened,
    skew_force,
)
from stiefel_opt.numerics import (
    LOCAL_SUMS,
    Reader,
    Sums,
    add_product,
    add_to_diagonal_,
    are_finite,
    cayley,
    exponential,
    identity_for,
    infinity_norm,
    plus_identity,
    product,
)
from stiefel_opt.optim import (
    SECOND_MOMENTS,
    U_STATE,
    Z_STATE,
    AdamLike,
    Group,
    Rule,
    SGDLike,
    State,
    StiefelOptimizer,
    check_metric,
    options_of,
)
from stiefel_opt.tags import Stiefel

ROTATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "euler": plus_identity,
    "cayley": cayley,
    "expm": exponential,
}
# Digits of X that must be left in Xd; what they cost to orthonormalise, in passes and iterations.
_DIGITS: Final = 1e-3
_PASSES: Final = 4
_ITERATIONS: Final = 11


def published_sgd(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar = 1.0,  # noqa: ARG001
    momentum: float = 0.9,
    nesterov: bool = False,
    metric: str | float = "canonical",
    rotation: str = "euler",
    printed: bool = False,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,  # noqa: ARG001
) -> Move:
    """Return the new point, state and length of a step of Algorithm 1, or 4 for square matrices.

    Args:
        X, G, lr, step, momentum, metric, sums, reader: as in
            :func:`stiefel_opt.functional.sgd`; nothing is read.
        state: ``momentum_skew`` Z and, for n > m, ``momentum_normal`` U.
        nesterov: X moves along mu U - g and mu Z - f. Not published.
        rotation: phi_1: "euler", "cayley" or "expm".
        printed: Whether to take the printed sign and, without ``nesterov``, the Z of line 4.

    Returns: As every rule; the point is not finite for matrices whose numbers overflowed.
    Raises:
        ValueError: for an unknown rotation or metric.
    Note: 24 products of n x m by m x m, 13 for square matrices; 4 more with ``nesterov``.
    """
    a, Z, U = _metric_parameter(metric, rotation), state[SKEW], state.get(NORMAL)
    (S,) = sums((X, G))
    new_Z, direction = accumulated(skew_force(S, a), Z, momentum, nesterov=nesterov)
    if U is None:
        turned, _, length = _turned(X, direction, lr, rotation)
        return polar_factor_by_sums(turned, sums), {SKEW: new_Z}, length
    direction = Z if printed and not nesterov else direction
    moved = product(U, _coupling(Z, momentum, lr, a, printed=printed)) - G
    new_U = _normal_part(X, moved, sums)
    V = _normal_part(X, new_U * momentum - G, sums) if nesterov else new_U
    return _flow(X, V, direction, {SKEW: new_Z, NORMAL: new_U}, lr, rotation, sums)


def published_adam(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    metric: str | float = "canonical",
    rotation: str = "euler",
    printed: bool = False,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,  # noqa: ARG001
) -> Move:
    """Return the new point, state and length of a step of Algorithm 2, or 5 for square matrices.

    A constant factor on the loss changes the step, as line 4 has Z and not Z / (sqrt(p) + eps).

    Args:
        X, G, lr, metric, rotation, sums, reader: as in :func:`published_sgd`.
        state, step, betas, eps: as in :func:`stiefel_opt.functional.adam`.
        printed: Whether to take the sign that is printed, and to correct the second moment only.

    Returns: As every rule; the point is not finite for matrices whose numbers overflowed.
    Raises:
        ValueError: for an unknown rotation or metric.
    Note: 32 products of n x m by m x m, 13 for square matrices.
    """
    a, Z, U = _metric_parameter(metric, rotation), state[SKEW], state.get(NORMAL)
    beta1 = betas[0]
    (S,) = sums((X, G))
    new = moments(state, "skew", skew_force(S, a), betas)
    direction = _divided(new, "skew", step, betas, eps, printed=printed)
    if U is None:
        turned, _, length = _turned(X, direction, lr, rotation)
        return polar_factor_by_sums(turned, sums), new, length
    minus_g = _normal_part(X, G, sums).neg_()
    new |= moments(state, "normal", minus_g, betas)
    moved = product(U, _coupling(Z, beta1, lr, a, printed=printed)).add_(minus_g, alpha=1 - beta1)
    new[NORMAL] = _normal_part(X, moved, sums)
    V = _normal_part(X, _divided(new, "normal", step, betas, eps, printed=printed), sums)
    return _flow(X, V, direction, new, lr, rotation, sums)


def polar_factor_by_sums(tall: Tensor, sums: Sums = LOCAL_SUMS) -> Tensor:
    r"""Return A (A'A)^(-1/2) from sums over rows alone, orthonormal for conditions up to 1e-2/eps.

    A = QT with Q orthonormal, by Cholesky factors R of Q'Q + s I with a shift s above its rounding:
    one pass multiplies small singular values by 1/sqrt(s), and T = R .. R is right for any s. Then
    the polar factor of T, m x m in float64, by Newton's iteration T <- (c T + T'^(-1)/c) / 2.

    An inverse root of A'A itself, by Newton-Schulz or by eigenvectors, is lost from a condition of
    1/sqrt(eps) = 7e7 on; a triangular solve rather than a product with R^(-1) keeps the error in A
    at rounding, so that the result is off by about eps times the condition of A, as is an SVD's.

    Args:
        tall: A, ``(k, n, m)``, or the rows of it that are here.
        sums: As in :func:`published_sgd`.

    Note: 11 products of n x m by m x m and 11 inverses of m x m; no host sync.
    Reference: Fukaya et al. (2020), Shifted Cholesky QR; Higham (1986), Computing the polar
        decomposition, for the scaling c.
    """
    wide = _wide(tall.dtype)
    shift = 8.0 * tall.size(-1) * torch.finfo(tall.dtype).eps
    identity, norm = identity_for(tall).to(wide), torch.linalg.matrix_norm
    small = identity = identity.expand(tall.size(0), -1, -1)  # m x m alone may count as vectors
    for _ in range(_PASSES):
        own = sums((tall, tall))[0].to(wide)
        length = own.diagonal(dim1=-2, dim2=-1).real.sqrt().unsqueeze(-2)  # of the columns
        own = add_to_diagonal_(own / length / length.mT, shift)
        upper = torch.linalg.cholesky_ex(own, upper=True).L * length
        tall = torch.linalg.solve_triangular(upper.to(tall.dtype), tall, upper=True, left=False)
        small = upper @ small
    for _ in range(_ITERATIONS):
        inverse = torch.linalg.solve_ex(small, identity).result.mH
        scale = (norm(inverse, keepdim=True) / norm(small, keepdim=True)).sqrt()
        small = (small * scale + inverse / scale) / 2
    return corrected(product(tall, small.to(tall.dtype)), {}, sums)[0]


def _turned(
    X: Tensor, direction: Tensor, lr: Scalar, rotation: str
) -> tuple[Tensor, Tensor, Length]:
    """Return Xh of phi_1 along ``direction``, the factor of X, and the length; in float64."""
    direction = direction.to(_wide(X.dtype))
    turn = direction * shortened(infinity_norm(direction), lr, _DIGITS / torch.finfo(X.dtype).eps)
    rotated = ROTATIONS[rotation](turn)
    # the limit is not known, so that the new point is looked at
    return product(X, rotated.to(X.dtype)), rotated, Length(turn.mH @ turn, 1.0, math.inf)


def _flow(
    X: Tensor, V: Tensor, direction: Tensor, new: Tensors, lr: Scalar, rotation: str, sums: Sums
) -> Move:
    """phi_1 along ``direction`` and phi_3 along V: Xd = Xh + eta V Xh'Xh, U <- U - eta Xh V'U."""
    turned, rotated, length = _turned(X, direction, lr, rotation)  # Xh
    U = new[NORMAL]
    limit = _DIGITS / torch.finfo(X.dtype).eps
    own, cross = sums((V, V), (V, U))
    own = own.to(rotated.dtype)
    turn_gram = torch.bmm(rotated.mH, rotated)  # Xh'Xh
    # |V Xh'Xh| without squares that overflow
    square = infinity_norm(own).clamp(min=torch.finfo(own.dtype).tiny)
    pulled = torch.bmm(torch.bmm(turn_gram, own / square), turn_gram)
    step = shortened((infinity_norm(pulled) * square).sqrt(), lr, limit)
    moved = add_product(turned, V, (turn_gram * step).to(X.dtype))
    new_X = polar_factor_by_sums(moved, sums)
    carried = add_product(U, turned, -(cross * step).to(X.dtype))
    (overlap,) = sums((new_X, carried))
    new_U = add_product(carried, new_X, overlap, alpha=-1.0)
    finite = are_finite(overlap)[:, None, None]
    squares = torch.cat([length.squares, own * (step * step)])
    new_X = torch.where(finite, new_X, torch.nan)
    return new_X, new | {NORMAL: new_U}, length._replace(squares=squares)


def _normal_part(point: Tensor, tall: Tensor, sums: Sums) -> Tensor:
    """Return (I - XX') A, twice: once leaves the rounding of what it takes away."""
    for _ in range(2):
        (overlap,) = sums((point, tall))
        tall = add_product(tall, point, overlap, alpha=-1.0)
    return tall


def _coupling(skew: Tensor, momentum: float, lr: Scalar, a: float, *, printed: bool) -> Tensor:
    """Return M of U <- U M - g: mu I + (3a - 2)/2 eta Z, or 0 without momentum."""
    factor = lr * (3 * a - 2) / (-2 if printed else 2) if momentum else 0.0
    return add_to_diagonal_(skew * factor, momentum)


def _divided(
    state: Tensors,
    part: str,
    step: Scalar,
    betas: tuple[float, float],
    eps: float,
    *,
    printed: bool,
) -> Tensor:
    """Return (Z/c1) / (sqrt(p/c2) + eps), NaN where p has overflowed: it must show.

    ``printed``: sqrt(c2) Z / (sqrt(p) + eps).
    """
    second = state.get("max_exp_avg_sq_" + part, state["exp_avg_sq_" + part])
    root = bias_correction(betas[1], step, second.dtype) ** 0.5
    if printed:
        value = precondition(state, part, 1.0, betas, eps) * root
    else:
        value = precondition(state, part, root, betas, eps)
        value = value * bias_correction_ratio(root, betas[0], step, second.dtype)
    return value + second * 0.0


def _metric_parameter(metric: str | float, rotation: str) -> float:
    check_choice("rotation", rotation, ROTATIONS)
    if isinstance(metric, str):
        check_choice("metric", metric, METRICS)
    return metric_parameter(metric)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float64)


# ---- the optimizers -----------------------------------------------------------------------------


class _Published(StiefelOptimizer):
    """What both classes say of their options."""

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_metric(group)
        check_choice("rotation", group["rotation"], ROTATIONS)


class PublishedSGD(_Published, SGDLike):
    """SGD with momentum by the published flows; plain parameters get torch's SGD.

    :class:`StiefelSGD` corrects them. Momentum that grows without bound is what these flows do at
    large learning rates; :mod:`stiefel_opt.methods.published` says where they differ from the
    print.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused,
            differentiable, metric, scale_pull, nonfinite, stiefel,
            cuda_graph: As in :class:`StiefelSGD`.
        rotation: How X turns within its span: "euler", "cayley" or "expm".

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        24 products of n x m by m x m a step, 4 more with ``nesterov``; state is one tensor like the
        parameter and one of m x m.

    Reference:
        Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 1; of square
        matrices, on SO(n), Algorithm 4.
    """

    rule = "PublishedSGD"
    sums_over_rows = True
    capturable = True
    learns_scale = True

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
        rotation: str = "euler",
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, published_sgd, "metric", "rotation")


class PublishedAdam(_Published, AdamLike):
    """Adam by the published flows; plain parameters get torch's Adam.

    :class:`StiefelAdam` corrects them, and has a radius and Nesterov's momentum by default.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable,
            differentiable, fused, decoupled_weight_decay, metric, scale_pull, nonfinite, stiefel,
            cuda_graph: As in :class:`StiefelAdam`.
        rotation: As in :class:`PublishedSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        State is that of :class:`StiefelAdam`, without its radius.

    Reference:
        Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 2 with Adam's
        moments; of square matrices, on SO(n), Algorithm 5.
    """

    rule = "PublishedAdam"
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
        rotation: str = "euler",
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE, *SECOND_MOMENTS[: 4 if group["amsgrad"] else 2]

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, published_adam, "metric", "rotation")
