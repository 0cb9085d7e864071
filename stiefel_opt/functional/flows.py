"""The moves that a step of momentum is made of, in m x m matrices; notation of stiefel_sgd.py.

X turns within its span by D = rot(eta Z) and moves along a normal direction V by the polar
retraction, R = (I + eta^2 V'V)^(-1/2). Both roots are worked out together, as small differences
from I, so that X'X = I suffers one rounding of X a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.device import Reader, reader_for
from stiefel_opt.linalg import (
    RowSum,
    add_product,
    add_to_diagonal_,
    infinity_norm,
    largest_bound,
    largest_stretch,
    own_gram,
    plus_identity,
    polar_rotation,
    sums,
    symmetric_product,
)
from stiefel_opt.roots import roots

Scalar = float | Tensor

METRICS: Final = {"canonical": 0.5, "euclidean": 0.0}

# An angle atan(eta sigma) gains nothing beyond this, while I + eta^2 U'U becomes ill-conditioned.
_SATURATION: Final = 4.0
# Where bounds are those of the step before: steps below the root of the first, 14 degrees, cost
# hardly less if more is known; longer ones may grow by the root of the second from step to step.
_SHORT: Final = 0.06
_MARGIN: Final = 4.0
# Squares of numbers beyond this may overflow.
_LARGE: Final = 2.0**60
# Beyond this step times gradient the rounding in X'X is taken out after every step.
_STEEP: Final = 0.26
_VERY_STEEP: Final = 100.0


class Setting(NamedTuple):
    """How a step is worked out, beside what it works out: the same for every rule.

    Attributes:
        ok: Which matrices move, ``(k, 1, 1)``; the others, whose gradient may be anything, stay as
            they are, and so does their state. None: all of them move.
        correct: Measure X'X and X'U and remove what rounding left there; or X'X, if known.
        row_sum: Sum over the processes that share the rows. None: all rows are here.
        reader: Who may read bounds. None: whoever can, of this step only.
        length: A bound on the length of all gradients together, if somebody has read it.
    """

    ok: Tensor | None = None
    correct: bool | Tensor = True
    row_sum: RowSum | None = None
    reader: Reader | None = None
    length: float = math.inf


def metric_parameter(metric: str | float) -> float:
    """Return a of the metric tr(D1'(I - a XX')D2): 1/2 is canonical, 0 Euclidean."""
    return METRICS[metric] if isinstance(metric, str) else float(metric)


# ---- rounding ----------------------------------------------------------------------------------


def mend(own: Tensor) -> Tensor:
    """Turn ``own`` = X'X into M = (I - X'X)/2, in its memory: X + X M is orthonormal again.

    One Newton-Schulz step, enough to take rounding out.
    """
    return add_to_diagonal_(own.mul_(-0.5), 0.5)


def mended(mending: Tensor | None, small: Tensor) -> Tensor:
    """Return (I + M) small; None stands for M = 0."""
    return small if mending is None else torch.baddbmm(small, mending, small)


def mend_point(point: Tensor, row_sum: RowSum | None, passes: int = 1) -> Tensor:
    """Return X made orthonormal again."""
    for _ in range(passes):
        (own,) = sums(row_sum, (point, point))
        point = add_product(point, point, mend(own))
    return point


def mend_after(
    new_point: Tensor, normal: Tensor, row_sum: RowSum | None, passes: int
) -> tuple[Tensor, Tensor]:
    """Return X made orthonormal again, and X'B for it: a long step amplifies rounding."""
    new_point = mend_point(new_point, row_sum, passes - 1)
    own, overlap = sums(row_sum, (new_point, new_point), (new_point, normal))
    mending = mend(own)
    return add_product(new_point, new_point, mending), mended(mending, overlap)


def passes_after(inner: Tensor, lr: Scalar, setting: Setting) -> int:
    """Return how often rounding is to be taken out of X'X after a step, if that can be known.

    For S = X'G the normal part of the gradient overlaps with X by X'(G - X S) = (I - X'X) S: one
    step multiplies the error by 1 + 2 eta |S|, and momentum does so again. Below the first limit
    eight steps cost two digits at the most; beyond the second an error may grow to 1.
    """
    reader = setting.reader or reader_for(inner)
    if reader.is_blind:
        return 0
    if isinstance(lr, Tensor):
        stretch = reader.number("stretch of a step", lambda: largest_stretch(inner * lr))
    else:
        if lr * setting.length <= _STEEP:  # |X'G| <= |G|
            return 0
        if reader.is_exact and lr * float(torch.linalg.vector_norm(inner)) <= _STEEP:
            return 0
        stretch = lr * reader.number("stretch", lambda: largest_stretch(inner))
    if stretch <= _STEEP:
        return 0
    return 1 if stretch <= _VERY_STEEP else 5


# ---- moves -------------------------------------------------------------------------------------


class Moves(NamedTuple):
    """Turn and move in m x m matrices, for a direction V with W = V'V."""

    within: Tensor  # D R - I: X + X within + eta V R is the new point, and what is added is small
    inverse_root: Tensor  # R
    rotation: Tensor  # D - I
    companion: Tensor | None  # R (I + R)^(-1), if asked for
    excess: tuple[Tensor, float]  # W and eta^2, or eta^2 W and 1
    step: Scalar  # eta, shortened where it saturates
    limit: float  # a bound on K'K and eta^2 W


def moves_of(
    skew: Tensor, gram_normal: Tensor, lr: Scalar, reader: Reader, *, companion: bool = False
) -> Moves:
    """Return the turn along ``skew`` = K / eta and the move along a direction V with W = V'V.

    Both need (I + E)^(-1/2), for E = K'K and for E = eta^2 W: one batch of 2k does it. Beyond
    eta sigma = 4, or what the reader allows, a step saturates. ``companion``: also R (I + R)^(-1).
    """
    count = skew.size(0)
    squares, second, scale, limit, turn_step, step = _spectra(skew, gram_normal, lr, reader)
    found = roots(squares, limit, scale=scale, companions=count if companion else 0, square=second)
    of_turn, of_move = found.difference.unsafe_chunk(2)
    rotation = polar_rotation(skew, of_turn, turn_step)
    inverse_root = plus_identity(of_move)
    within = torch.baddbmm(of_move, rotation, inverse_root)  # D R - I, without forming D
    excess = (squares[count:], scale) if scale == 1.0 else (gram_normal, scale)
    return Moves(within, inverse_root, rotation, found.companion, excess, step, limit)


def rotation_of_square(compute: Callable[[], Tensor], lr: Scalar, reader: Reader) -> Tensor:
    """Return D - I for square matrices: X D is the whole move.

    For a square matrix every m x m is as large as the parameter: Z is what ``compute`` returns, and
    not kept while the roots are worked out.
    """
    difference, step = _of_square(compute, lr, reader)
    return polar_rotation(compute(), difference, step)


def turned_square(
    point: Tensor, compute: Callable[[], Tensor], lr: Scalar, reader: Reader
) -> Tensor:
    """Return X D = (X + X K)(I + S), two products as D takes, and fewer passes over memory."""
    difference, step = _of_square(compute, lr, reader)
    turn, step = (compute() * step, 1.0) if isinstance(step, Tensor) else (compute(), step)
    moved = add_product(point, point, turn, alpha=step)
    del turn
    return add_product(moved, moved, difference)


def _of_square(compute: Callable[[], Tensor], lr: Scalar, reader: Reader) -> tuple[Tensor, Scalar]:
    """Return S = (I + K'K)^(-1/2) - I for K along ``compute()``, and the length of the step."""
    square, second, scale, limit, step, _ = _spectra(compute(), None, lr, reader)
    return roots(square, limit, scale=scale, overwrite=True, square=second).difference, step


def _spectra(
    skew: Tensor, normal: Tensor | None, lr: Scalar, reader: Reader
) -> tuple[Tensor, Tensor | None, float, float, Scalar, Scalar]:
    """Measure a step, and shorten it where it saturates or outgrows what the reader knows.

    Returns: E / s for K'K, and behind it for eta^2 W if there is a W, its square if it is known, s,
        a bound on E, and eta of the turn and of the move.
    """
    count, size, most = skew.size(0), skew.size(-1), _SATURATION**2
    squares = own_gram(skew)  # -Z^2: its bound is the sharper one
    if normal is not None:
        squares = torch.cat([squares, normal])
    scale, limit = 1.0, math.inf
    if reader.is_exact and isinstance(lr, float):
        scale = lr * lr
        limit = scale * largest_bound(squares)
    # Infinity norms saturate, at most m times the eigenvalue of K'K and sqrt(m) times that of W.
    is_short = size * limit <= most or (
        limit < math.inf
        and (normal is None or math.sqrt(size) * limit <= most)
        and scale * float(infinity_norm(skew).max()) ** 2 <= most
    )
    if is_short:
        if limit > _LARGE * scale:  # their squares would overflow
            squares, scale = squares * scale, 1.0
        return squares, None, scale, limit, lr, lr
    turn_step, step, second = shortened(infinity_norm(skew), lr), lr, None
    squares[:count] *= turn_step * turn_step
    if normal is not None:
        step = shortened(infinity_norm(normal).sqrt(), lr)
        squares[count:] *= step * step
    if reader.is_exact:
        return squares, None, 1.0, min(_bound_of_finite(squares, reader), most), turn_step, step
    second = symmetric_product(squares, squares)
    bound = infinity_norm(second).sqrt()  # |E|^2 <= |E^2|
    limit = _longest(lr, reader, lambda: bound if isinstance(lr, Tensor) else bound / (lr * lr))
    shorter = (limit / bound).clamp(max=1.0)
    squares, second, shorter = squares * shorter, second * shorter.square(), shorter.sqrt()
    if normal is not None:
        step = step * shorter[count:]
    return squares, second, 1.0, limit, turn_step * shorter[:count], step


def _bound_of_finite(matrices: Tensor, reader: Reader) -> float:
    """Return a bound on the eigenvalues of the matrices of a batch that are finite."""
    bound = largest_bound(matrices)
    if not bound < math.inf:
        reader.is_lost = True
        sound = matrices[matrices.isfinite().all(dim=-1).all(dim=-1)]
        bound = largest_bound(sound) if sound.numel() else 0.0
    return bound


def coupling(skew: Tensor, momentum: float, lr: Scalar, a: float, reader: Reader) -> Tensor | None:
    """Return M of U <- U M, momentum rot((2a - 1) eta Z); None where it is the number."""
    if momentum == 0 or a == METRICS["canonical"]:
        return None
    rotation = rotation_of_square(lambda: skew, lr * (2 * a - 1), _Apart(reader))
    return add_to_diagonal_(rotation, 1.0).mul_(momentum)


def after(left: Tensor, right: Tensor) -> Tensor:
    """Return (I + left)(I + right) - I without forming the two factors."""
    return torch.baddbmm(left, left, right).add_(right)


def cut(step: Scalar, size: Tensor, longest: float, reader: Reader) -> tuple[Scalar, float]:
    """Return the step, shortened so that step^2 xi'xi is at most ``longest``^2, and a bound on it.

    Beyond ``longest`` a step gains nothing; ``size`` is xi'xi, ``(k, m, m)``.
    """
    bound = most = longest * longest
    if isinstance(step, float) and reader.is_exact:
        bound = step * step * _bound_of_finite(size, reader)
        if bound <= most:
            return step, bound
    norm = infinity_norm(size)
    if not reader.is_exact:
        most = _longest(step, reader, lambda: norm, most)
    shorter = (most / (norm * (step * step))).clamp(max=1.0)
    return step * shorter.sqrt(), most


class _Apart(Reader):
    """A reader that keeps the numbers of a second turn in a step apart from those of the first."""

    def __init__(self, reader: Reader) -> None:
        self.is_exact, self.is_blind, self._reader = reader.is_exact, reader.is_blind, reader

    @override
    def number(self, name: str, value: Callable[[], Tensor]) -> float:
        return self._reader.number("coupling " + name, value)


def _longest(
    lr: Scalar, reader: Reader, value: Callable[[], Tensor], most: float = _SATURATION**2
) -> float:
    """Return up to where roots are worked out, for lr^2 ``value()`` as far as it is known.

    A rate that is a tensor is part of ``value()`` already.
    """
    if reader.is_exact or (not isinstance(lr, Tensor) and lr == 0):
        return most
    known = _MARGIN * reader.number("length", value)
    if not isinstance(lr, Tensor):  # it may be another than in the step before
        known *= lr * lr
    return min(most, max(_SHORT, known)) if known == known else most


def shortened(norm: Tensor, lr: Scalar, most: float = _SATURATION) -> Tensor:
    """Return eta, ``(k, 1, 1)``, shortened so that eta ``norm`` is at most ``most``."""
    longest = (most / norm).clamp(max=1e30)  # 4 / 0 would make 0 * inf of a lr of 0
    if isinstance(lr, Tensor):
        return torch.copysign(torch.minimum(lr.abs().to(norm.dtype), longest), lr)
    return longest.clamp(max=abs(lr)) * math.copysign(1.0, lr)
