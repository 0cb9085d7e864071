"""Tangent projection and polar retraction of batches ``(k, n, m)``, n >= m: how a step ends."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from stiefel_opt.functional.flows import Length, Scalar, limited
from stiefel_opt.numerics.device import Reader, reader_for
from stiefel_opt.numerics.linalg import (
    LOCAL_SUMS,
    Sums,
    add_product,
    add_to_diagonal_,
    product,
    sym,
)
from stiefel_opt.numerics.roots import roots

# A step as long as this turns by atan(64), 89 degrees; what is longer only worsens conditions.
LONGEST: Final = 64.0


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
    factor, limit = limited(1.0, excess, LONGEST, reader)
    if isinstance(factor, Tensor):
        moved, excess = _moved_by(X, xi, factor * lr, sums)
    root = roots(excess, 1.01 * limit, reads=reader.is_exact).inverse_root
    return product(moved, root), Length(excess, 1.0, limit)


def _moved_by(X: Tensor, xi: Tensor, step: Scalar, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return X + step xi, and how far its Gram matrix is from I."""
    moved = X + xi * step
    return moved, add_to_diagonal_(sums((moved, moved))[0], -1.0)
