r"""Riemannian gradient descent on the Stiefel manifold: metrics x retractions, with momentum.

X is the point, G the Euclidean gradient, eta the learning rate, mu the momentum, a < 1 the
parameter of the metric tr(D1'(I - a XX')D2). A tangent vector is XT + V with T skew and X'V = 0;
the gradient has T = (X'G - G'X) / (2 (1 - a)) and V = (I - XX')G. One step is

    M <- mu M - grad,   X+ = R_X(eta M),   M <- M - X+ sym(X+'M)

the last being the projection onto the tangent space at the new point. Of M the parts T and V are
kept. For xi = XT + V the retractions are

    polar    (X + xi) (I + xi'xi)^(-1/2)
    qr       qf(X + xi) = (X + xi) L^(-T) with LL' = I + xi'xi
    cayley   cay(W) X for the skew W = P xi X' - X xi'P, P = I - XX'/2,

cay(W) = (I - W/2)^(-1) (I + W/2). As W has rank 2m, cay(W) X needs a system of 2m x 2m; one half of
that is diagonal, and what remains once it is eliminated is of m x m:

    cay(W) X = (X + V/2) Q + V/2,   Q = K^(-1) (2I - K),   K = I - T/2 + V'V/4.

K + K' >= 2I, so it is never singular; for square matrices, V = 0, Q is the Cayley map of T. For the
gradient of the canonical metric W is GX' - XG'. Batches are ``(k, n, m)`` with n >= m;
sums over rows are those of :class:`stiefel_opt.functional.Setting`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stiefel_opt.device import reader_for
from stiefel_opt.functional import stiefel_sgd
from stiefel_opt.functional.flows import (
    Scalar,
    Setting,
    cut,
    mend_point,
    metric_parameter,
    passes_after,
)
from stiefel_opt.functional.stiefel_sgd import Deferred, accumulate_, normal_force, torque_of
from stiefel_opt.geometry import RETRACTIONS as RETRACTIONS
from stiefel_opt.linalg import (
    add_product,
    add_product_,
    add_to_diagonal_,
    cayley,
    cholesky_factor,
    keep_,
    polar_rotation,
    product,
    sums,
    zeroed,
)
from stiefel_opt.roots import roots

# A step as long as this turns by atan(64), 89 degrees; what is longer only worsens conditions.
_LONGEST: Final = 64.0


def descend_(
    point: Tensor,
    grad: Tensor,
    skew: Tensor | None = None,
    normal: Tensor | None = None,
    *,
    lr: Scalar,
    momentum: float = 0.0,
    force: Scalar = 1.0,
    nesterov: bool = False,
    metric: str | float = "canonical",
    retraction: str = "cayley",
    setting: Setting = Setting(),  # noqa: B008 - it is immutable
) -> Tensor:
    r"""One step of ProjectedRGD; returns the new point and updates the momentum in place.

    Args:
        point, grad, lr, momentum, force, metric, setting: as in
            :func:`stiefel_opt.functional.sgd_`.
        skew: T of the momentum, ``(k, m, m)``, updated. None: there is no momentum.
        normal: V of the momentum, ``(k, n, m)``, updated. None for square matrices.
        nesterov: X moves along mu M - grad.
        retraction: "cayley", "qr" or "polar".

    Returns: The new point, ``(k, n, m)``.
    Note: 4 products of n x m by m x m and one factorisation of m x m; with momentum 7; with
        ``setting.correct`` two more, and two for the momentum; two more in a step that would
        amplify rounding. A step longer than 64 is cut to 64.
    Reference: Edelman, Arias & Smith (1998); Wen & Yin (2013), which is "cayley" with the canonical
        metric and no momentum; Likhosherstov et al. (AISTATS 2021), appendix A.
    """
    ok = setting.ok
    point, inner = measure(point, grad, normal, setting)
    passes = passes_after(inner, lr * (1 + momentum * nesterov), setting)
    turn = torque_of(inner, metric_parameter(metric), force)
    inner = inner * force
    if skew is None:
        square = setting.row_sum is None and point.size(-2) == point.size(-1)
        # V for the Cayley map, XT + V for the others: one product either way.
        inside = inner if retraction == "cayley" else inner + turn
        direction = None if square else normal_force(point, inside, grad, force, ok)
        return _retract(point, turn, direction, lr, retraction, setting, passes)

    accumulate_(turn, skew, momentum, skew, ok)
    ahead = torch.add(turn, skew, alpha=momentum) if nesterov else skew
    direction = None
    if normal is not None:
        own = normal_force(point, inner, grad, force, ok)
        accumulate_(own, normal, momentum, normal, ok)
        direction = own.add_(normal, alpha=momentum) if nesterov else normal
        if retraction != "cayley":
            direction = add_product(direction, point, ahead)
    new_point = _retract(point, ahead, direction, lr, retraction, setting, passes)
    carry_(point, new_point, skew, normal, setting)
    return new_point


def measure(
    point: Tensor, grad: Tensor, normal: Tensor | None, setting: Setting
) -> tuple[Tensor, Tensor]:
    """Return X and X'G, which is zero for the matrices that do not move.

    With ``setting.correct`` X is made orthonormal, and ``normal`` normal to it.
    """
    kept = None if normal is None else Deferred(normal)
    inner, mending, overlap = stiefel_sgd.measure(point, grad, kept, setting)
    if mending is None:
        return point, inner
    if normal is not None and overlap is not None:
        stiefel_sgd.correct_normal_(normal, point, mending, zeroed(overlap, setting.ok))
    return add_product(point, point, mending), inner


def carry_(
    point: Tensor, new_point: Tensor, skew: Tensor, normal: Tensor | None, setting: Setting
) -> None:
    """M <- M - X+ sym(X+'M) for M = XT + V, in place; ``normal`` is None for square matrices."""
    ok = setting.ok
    own = zeroed(skew, ok)
    moved = product(point, own) if normal is None else add_product_(normal, point, own)
    (inner,) = sums(setting.row_sum, (new_point, moved))
    keep_(skew, (inner - inner.mH) / 2, ok)
    if normal is not None:
        add_product_(normal, new_point, zeroed(inner, ok), alpha=-1.0)


def move_along_cayley(
    point: Tensor, turn: Tensor, normal: Tensor, own: Tensor, step: Scalar
) -> Tensor:
    """Return cay(step W) X for xi = X ``turn`` + ``normal`` and ``own`` = V'V."""
    # K^(-1) (2I - K) as it stands: a solve with the tall matrix takes eight times as long.
    half = own * (step * step / 4)
    half = half.sub_(turn * (step / 2))
    turned, _ = torch.linalg.solve_ex(
        add_to_diagonal_(half.clone(), 1.0), add_to_diagonal_(half.neg(), 1.0)
    )
    shift = normal * (step / 2)
    return product(point + shift, turned).add_(shift)


# ---- the pieces --------------------------------------------------------------------------------


def _retract(
    point: Tensor,
    turn: Tensor,
    direction: Tensor | None,
    step: Scalar,
    retraction: str,
    setting: Setting,
    passes: int,
) -> Tensor:
    """Return R_X(step xi) for xi = X T + V: T and, unless X is square, V or, not for Cayley, xi."""
    reader = setting.reader or reader_for(point)
    size = torch.bmm(turn.mH, turn)
    if direction is None:
        step, limit = cut(step, size, _LONGEST, reader)
        new_point = product(point, _turn(turn, size, step, limit, retraction))
    else:
        (own,) = sums(setting.row_sum, (direction, direction))
        size = size.add_(own) if retraction == "cayley" else own
        step, limit = cut(step, size, _LONGEST, reader)
        if retraction == "cayley":
            new_point = move_along_cayley(point, turn, direction, own, step)
        else:
            excess = own * (step * step)
            if retraction == "polar":
                factor = roots(excess, limit).inverse_root
            else:
                factor = cholesky_factor(add_to_diagonal_(excess, 1.0))
            new_point = product(point + direction * step, factor)
    # A long step amplifies rounding. Where that cannot be seen every step begins with this.
    passes = 0 if reader.is_blind else max(passes, limit > 1)
    return mend_point(new_point, setting.row_sum, passes)


def _turn(turn: Tensor, size: Tensor, step: Scalar, limit: float, retraction: str) -> Tensor:
    """Return R_I(step T), orthogonal; ``size`` is T'T."""
    if isinstance(step, Tensor):
        turn, size, step = turn * step, size * (step * step), 1.0
    if retraction == "cayley":
        return cayley(turn * step)
    if retraction == "polar":
        difference = roots(size, limit, scale=step * step).difference
        return add_to_diagonal_(polar_rotation(turn, difference, step), 1.0)
    moved = add_to_diagonal_(turn * step, 1.0)
    return torch.bmm(moved, cholesky_factor(add_to_diagonal_(size * (step * step), 1.0)))
