"""The flows that a step of momentum is made of, on batches ``(k, n, m)``; notation of momentum.py.

phi_1 turns X within its span, phi_2 couples U to the turn, phi_3 moves X along a normal direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.linalg import (
    add_product,
    add_product_,
    add_to_diagonal_,
    cayley,
    exponential,
    gram,
    infinity_norm,
    largest_bound,
    largest_stretch,
    own_gram,
    plus_identity,
    polar_rotation,
    reads,
)
from stiefel_opt.roots import roots

__all__ = [
    "CANONICAL",
    "Moves",
    "RowSum",
    "Scalar",
    "after",
    "coupling",
    "is_steep",
    "isometric_moves",
    "mend_",
    "mend_long_step",
    "mend_point",
    "mended",
    "move_along_",
    "published_root",
    "published_turn",
    "sum_rows",
    "sums",
    "turn_square",
]

RowSum = Callable[[Tensor], Tensor]
Scalar = float | Tensor

CANONICAL: Final = 0.5
# An angle atan(eta sigma) gains nothing beyond this, while I + eta^2 U'U becomes ill-conditioned.
_SATURATION: Final = 4.0
# Beyond this step times gradient the rounding in X'X is taken out after every step.
_STEEP: Final = 0.26
# Published flows do not saturate; where bounds cannot be read they get roots good to this bound.
_PUBLISHED_CAP: Final = 1e4


class Moves(NamedTuple):
    """phi_1 and phi_3 in m x m matrices, for a direction V with W = V'V.

    Attributes:
        frame: D R - I for Xh = X D and R = (I + eta^2 W)^(-1/2): X + X frame + eta V R is the new
            point, and what is added is small, so that X'X = I suffers one rounding of X a step.
        inverse_root: R.
        bend: R (I + R)^(-1), if asked for.
        step: eta, shortened where it saturates.
        limit: A bound on K'K and eta^2 W, or the largest that is possible.
    """

    frame: Tensor
    inverse_root: Tensor
    bend: Tensor | None
    step: Scalar
    limit: float


def isometric_moves(
    skew: Tensor,
    gram_normal: Tensor,
    lr: Scalar,
    rotation: str,
    *,
    root: Tensor | None = None,
    bend: bool = False,
) -> Moves:
    """Return the isometric phi_1 along ``skew`` and phi_3 along a direction V.

    Both need (I + E)^(-1/2), for E = K'K and for E = eta^2 W: one batch of 2k does it.

    Args:
        skew: K / eta, ``(k, m, m)``.
        gram_normal: W = V'V, ``(k, m, m)``.
        lr: eta, a number or ``(k, 1, 1)``.
        rotation: "polar", "euler" (the same here), "cayley" or "expm".
        root: Where to put A^(1/2) = (I + eta^2 W)^(1/2), if wanted.
        bend: Whether R (I + R)^(-1) is wanted.
    """
    polar = rotation in ("polar", "euler")
    # -Z^2: its bound is the sharper one
    squares = torch.cat([own_gram(skew), gram_normal]) if polar else gram_normal
    step, turn, scale, limit = lr, lr, 1.0, math.inf
    if isinstance(lr, float):
        scale = lr * lr
        limit = scale * largest_bound(squares, math.inf)
    # The infinity norm, which saturates, is at most sqrt(m) times the largest eigenvalue.
    short = math.sqrt(skew.size(-1)) * limit <= _SATURATION**2
    if not (short and _is_short(skew, lr, limit if polar else math.inf)):
        gram_normal = gram_normal * (lr * lr)
        shorter = (_SATURATION**2 / infinity_norm(gram_normal)).clamp(max=1.0)
        gram_normal, step = gram_normal * shorter, lr * shorter.sqrt()
        turn, scale = _shortened(skew, lr), 1.0
        own = [squares[: skew.size(0)] * (turn * turn)] if polar else []
        squares = torch.cat([*own, gram_normal])
        limit = largest_bound(squares, _SATURATION**2)
    found = roots(squares, limit, scale=scale, bend=skew.size(0) if bend else 0)
    shrink = found.shrink
    if polar:
        own_shrink, shrink = shrink.unsafe_chunk(2)
        frame = polar_rotation(skew, own_shrink, turn)
    else:
        kept = skew * turn
        frame = _without_identity(kept, rotation)
        limit = max(limit, largest_bound(torch.bmm(kept.mT, kept), limit))
    inverse_root = plus_identity(shrink)
    frame = torch.baddbmm(shrink, frame, inverse_root)  # D R - I, without forming D
    if root is not None:
        torch.baddbmm(inverse_root, gram_normal, inverse_root, alpha=scale, out=root)
    return Moves(frame, inverse_root, found.bend, step, limit)


def turn_square(compute: Callable[[], Tensor], lr: Scalar, rotation: str) -> Tensor:
    """Return D - I of phi_1 for square matrices: X D is the whole move.

    For a square matrix every m x m is as large as the parameter: Z is what ``compute`` returns, and
    not kept while the roots are worked out.
    """
    skew = compute()
    if rotation not in ("polar", "euler"):
        return _without_identity(skew * _shortened(skew, lr), rotation)
    square = own_gram(skew)
    turn, scale, limit = lr, 1.0, math.inf
    if isinstance(lr, float):
        scale = lr * lr
        limit = scale * largest_bound(square, math.inf)
    if not _is_short(skew, lr, limit):
        turn = _shortened(skew, lr)
        square, scale, limit = square * (turn * turn), 1.0, min(limit, _SATURATION**2)
    del skew
    shrink = roots(square, limit, scale=scale, overwrite=True).shrink
    del square
    return polar_rotation(compute(), shrink, turn)


def published_turn(skew: Tensor, lr: Scalar, rotation: str) -> tuple[Tensor, Tensor | None]:
    """Return D - I of Xh = X D for K = lr ``skew``, and Xh'Xh where it is not I: Euler's I + K."""
    step = skew * lr
    if rotation in ("cayley", "expm"):
        return _without_identity(step, rotation), None
    square = torch.bmm(step.mH, step)
    if rotation == "euler":
        return step, add_to_diagonal_(square, 1.0)
    limit = min(largest_bound(square, math.inf), _PUBLISHED_CAP)
    return polar_rotation(step, roots(square, limit).shrink), None


def published_root(
    gram_direction: Tensor, turn_gram: Tensor | None, lr: Scalar, root: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Return R - I for R = (Xd'Xd)^(-1/2), Xd = Xh + eta V P, P = Xh'Xh; P W; the bound used."""
    if turn_gram is None:
        excess, pulled = gram_direction * (lr * lr), gram_direction
    else:  # Xd'Xd - I = (P - I) + eta^2 P W P
        pulled = torch.bmm(turn_gram, gram_direction)
        excess = torch.bmm(pulled, turn_gram).mul_(lr * lr).add_(turn_gram)
        add_to_diagonal_(excess, -1.0)
    limit = largest_bound(excess, _PUBLISHED_CAP)
    shrink = roots(excess, limit).shrink
    if root is not None:  # A R
        torch.baddbmm(shrink, excess, shrink, out=root).add_(excess)
        add_to_diagonal_(root, 1.0)
    return shrink, pulled, limit


def coupling(skew: Tensor, momentum: float, lr: Scalar, a: float, transport: str) -> Tensor | None:
    """phi_2 without the force: U <- U M. Return M, or None where it is the number ``momentum``."""
    if momentum == 0:
        return None
    if transport == "published":
        return add_to_diagonal_(skew * (lr * (3 * a - 2) / 2), momentum)
    if a == CANONICAL:
        return None
    turn = turn_square(lambda: skew, lr * (2 * a - 1), "polar")
    return add_to_diagonal_(turn, 1.0).mul_(momentum)


def mend_long_step(
    new_point: Tensor, normal: Tensor, row_sum: RowSum | None
) -> tuple[Tensor, Tensor]:
    """Return X made orthonormal again, and X'B for it: a long step amplifies rounding.

    Where bounds cannot be read every step begins with this correction instead.
    """
    own, overlap = sums(row_sum, (new_point, new_point), (new_point, normal))
    mending = mend_(own)
    return add_product(new_point, new_point, mending), mended(mending, overlap)


def mend_point(point: Tensor, row_sum: RowSum | None) -> Tensor:
    """Return X made orthonormal again by one Newton-Schulz step."""
    (own,) = sums(row_sum, (point, point))
    return add_product(point, point, mend_(own))


def is_steep(inner: Tensor, lr: Scalar, length: float | None = None) -> bool:
    """Say whether a step amplifies the rounding in X'X, if that may be read.

    For S = X'G the normal part of the gradient overlaps with X by X'(G - X S) = (I - X'X) S: one
    step multiplies the error by 1 + 2 eta |S|, and momentum does so again. Below the limit eight
    steps cost two digits at the most.

    Args:
        inner: S, ``(k, m, m)``.
        lr: eta.
        length: The norm of all of S, if known.
    """
    if isinstance(lr, Tensor) or not reads(inner):
        return False
    if length is None:
        length = float(torch.linalg.vector_norm(inner))
    return lr * length > _STEEP and lr * largest_stretch(inner) > _STEEP


def mend_(own: Tensor) -> Tensor:
    """Turn ``own`` = X'X into M = (I - X'X)/2: one Newton-Schulz step, X + X M, mends X."""
    return add_to_diagonal_(own.mul_(-0.5), 0.5)


def mended(mending: Tensor | None, small: Tensor) -> Tensor:
    """Return (I + M) small; None stands for M = 0."""
    return small if mending is None else torch.baddbmm(small, mending, small)


def after(left: Tensor, right: Tensor) -> Tensor:
    """Return (I + left)(I + right) - I without forming the two factors."""
    return torch.baddbmm(left, left, right).add_(right)


def sums(row_sum: RowSum | None, *pairs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return A'B for each pair, summed over all rows in one call."""
    found = [own_gram(left) if left is right else gram(left, right) for left, right in pairs]
    if row_sum is None:
        return found
    packed = row_sum(torch.cat(found, dim=-1))
    return list(torch.split(packed, found[0].size(-1), dim=-1))


def sum_rows(row_sum: RowSum | None, packed: Tensor) -> Tensor:
    """Sum ``packed`` over the processes that share the rows; None: all rows are here."""
    return packed if row_sum is None else row_sum(packed)


def move_along_(new_point: Tensor, direction: Tensor, small: Tensor, step: Scalar) -> Tensor:
    """new_point += step V small."""
    if isinstance(step, Tensor):
        return add_product_(new_point, direction, small * step)
    return add_product_(new_point, direction, small, alpha=step)


def _is_short(skew: Tensor, lr: Scalar, limit: float) -> bool:
    """Say whether the infinity norm of K is known to be below saturation."""
    if skew.size(-1) * limit <= _SATURATION**2:
        return True
    if isinstance(lr, Tensor) or not reads(skew):
        return False
    return abs(lr) * float(infinity_norm(skew).max()) <= _SATURATION


def _shortened(skew: Tensor, lr: Scalar) -> Tensor:
    """Return eta, ``(k, 1, 1)``, shortened so that the infinity norm of eta Z is at most 4."""
    norm = infinity_norm(skew)
    most = (_SATURATION / norm).clamp(max=1e30)  # 4 / 0 would make 0 * inf of a lr of 0
    if isinstance(lr, Tensor):
        return torch.copysign(torch.minimum(lr.abs().to(norm.dtype), most), lr)
    return most.clamp(max=abs(lr)) * math.copysign(1.0, lr)


def _without_identity(step: Tensor, rotation: str) -> Tensor:
    """Return D - I for the Cayley transform or the exponential of ``step``."""
    rotated = cayley(step) if rotation == "cayley" else exponential(step)
    return add_to_diagonal_(rotated, -1.0)
