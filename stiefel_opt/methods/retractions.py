r"""Polar, QR and Cayley retractions of batches along a turn and a direction, by products.

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

import torch
from torch import Tensor

from stiefel_opt.functional import LONGEST, Length, Scalar, limited
from stiefel_opt.numerics import (
    Reader,
    Sums,
    add_to_diagonal_,
    cayley,
    identity_for,
    polar_rotation,
    product,
    roots,
)


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
        step, limit = limited(step, size, LONGEST, reader)
        new_X = product(X, _turn(turn, size, step, limit, retraction))
        return new_X, _length(size, step, limit)
    (own,) = sums((direction, direction))
    size = torch.baddbmm(own, turn.mH, turn) if retraction == "cayley" else own
    step, limit = limited(step, size, LONGEST, reader, inner)
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


def cholesky_factor(own: Tensor) -> Tensor:
    """Return R^(-1) for ``own`` = A'A: A R^(-1) is the Q of A = QR with a positive diagonal of R.

    A product with R^(-1) takes a quarter of the time of a triangular solve with a tall A. X'X - I
    of the result is eps times the condition of ``own``; a second pass removes it while below 1.
    """
    upper, _ = torch.linalg.cholesky_ex(own, upper=True)
    factor: Tensor = torch.linalg.solve_triangular(upper, identity_for(own), upper=True)
    return factor
