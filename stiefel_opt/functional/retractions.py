r"""Tangent projections and retractions of batches, by products: how a step ends.

For a tangent vector xi = XT + V, T skew and X'V = 0, at the point X the retractions are

    polar    (X + xi) (I + xi'xi)^(-1/2)
    qr       qf(X + xi) = (X + xi) L^(-T) with LL' = I + xi'xi
    cayley   cay(W) X for the skew W = P xi X' - X xi'P, P = I - XX'/2,

cay(W) = (I - W/2)^(-1) (I + W/2). As W has rank 2m, cay(W) X needs a system of 2m x 2m; one half of
that is diagonal, and what remains once it is eliminated is of m x m:

    cay(W) X = (X + V/2) Q + V/2,   Q = K^(-1) (2I - K),   K = I - T/2 + V'V/4.

K + K' >= 2I, so it is never singular; for square matrices, V = 0, Q is the Cayley map of T. Batches
are ``(k, n, m)`` with n >= m.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stiefel_opt.functional.flows import Length, Scalar, limited
from stiefel_opt.numerics.device import Reader, reader_for
from stiefel_opt.numerics.linalg import (
    LOCAL_SUMS,
    Sums,
    add_product,
    add_to_diagonal_,
    cayley,
    cholesky_factor,
    polar_rotation,
    product,
    sym,
)
from stiefel_opt.numerics.roots import roots

# A step as long as this turns by atan(64), 89 degrees; what is longer only worsens conditions.
_LONGEST: Final = 64.0


def project_tangent(X: Tensor, D: Tensor, *, sums: Sums = LOCAL_SUMS) -> Tensor:
    """Return D - X sym(X'D), the tangent vector at X nearest to D, for batches ``(k, n, m)``.

    Note: Two products of n x m by m x m.
    """
    (inner,) = sums((X, D))
    return add_product(D, X, sym(inner), alpha=-1.0)


def retract(
    X: Tensor,
    xi: Tensor,
    *,
    lr: Scalar = 1.0,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> tuple[Tensor, Length]:
    """Return the polar retraction (X + lr xi)(I + lr^2 xi'xi)^(-1/2), and the length of the step.

    Args:
        X: Points, orthonormal, ``(k, n, m)``.
        xi: Tangent vectors at X, same shape.
        lr: A number or ``(k, 1, 1)``; a step is cut where a bound on its length is over 64. Off a
            CPU, where nothing waits for it, also where it is over 0.24 and over twice the length of
            the step before: ``BlindReader()`` of ``stiefel_opt.numerics`` as ``reader`` does not.
        sums, reader: as in :func:`stiefel_opt.functional.sgd`.

    Note: Two products of n x m by m x m, three where a step is cut and off a CPU, and no
        factorisation. The root is that of the Gram matrix of X + lr xi as it is, so that rounding
        of X'X is removed and not multiplied.
    """
    reader = reader or reader_for(X)
    moved, excess = _moved_by(X, xi, lr, sums)
    factor, limit = limited(1.0, excess, _LONGEST, reader)
    if isinstance(factor, Tensor):
        moved, excess = _moved_by(X, xi, factor * lr, sums)
    root = roots(excess, 1.01 * limit, reads=reader.is_exact).inverse_root
    return product(moved, root), Length(excess, 1.0, limit)


def _moved_by(X: Tensor, xi: Tensor, step: Scalar, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return X + step xi, and how far its Gram matrix is from I."""
    moved = X + xi * step
    return moved, add_to_diagonal_(sums((moved, moved))[0], -1.0)


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


def retract_along(
    X: Tensor,
    turn: Tensor,
    direction: Tensor | None,
    step: Scalar,
    retraction: str,
    sums: Sums,
    reader: Reader,
    inner: Tensor | None = None,
) -> tuple[Tensor, Length]:
    """Return R_X(step xi) and its length: T and, unless X is square, V or, not for Cayley, xi.

    ``inner``: X'G, in which a step may be too steep.
    """
    if direction is None:
        size = torch.bmm(turn.mH, turn)
        step, limit = limited(step, size, _LONGEST, reader)
        new_X = product(X, _turn(turn, size, step, limit, retraction))
        return new_X, _length(size, step, limit)
    (own,) = sums((direction, direction))
    size = torch.baddbmm(own, turn.mH, turn) if retraction == "cayley" else own
    step, limit = limited(step, size, _LONGEST, reader, inner)
    if retraction == "cayley":
        new_X = move_along_cayley(X, turn, direction, own, step)
    else:
        excess = own * (step * step)
        if retraction == "polar":
            factor = roots(excess, limit, reads=reader.is_exact).inverse_root
        else:
            factor = cholesky_factor(add_to_diagonal_(excess, 1.0))
        new_X = product(X + direction * step, factor)
    return new_X, _length(size, step, limit)


def _length(size: Tensor, step: Scalar, limit: float) -> Length:
    """Return the length of step xi for xi'xi = ``size``."""
    if isinstance(step, Tensor):
        return Length(size * (step * step), 1.0, limit)
    return Length(size, step * step, limit)


def _turn(turn: Tensor, size: Tensor, step: Scalar, limit: float, retraction: str) -> Tensor:
    """Return R_I(step T), orthogonal; ``size`` is T'T."""
    if isinstance(step, Tensor):
        turn, size, step = turn * step, size * (step * step), 1.0
    if retraction == "cayley":
        return cayley(turn * step)
    if retraction == "polar":
        difference = roots(size * (step * step), limit).difference  # roots squares its argument
        return add_to_diagonal_(polar_rotation(turn, difference, step), 1.0)
    moved = add_to_diagonal_(turn * step, 1.0)
    return torch.bmm(moved, cholesky_factor(add_to_diagonal_(size * (step * step), 1.0)))
