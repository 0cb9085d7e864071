"""Square roots of A = I + E by products only: polynomials, sharpened by Newton-Schulz.

The cost is known beforehand from a bound on E, without a factorisation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.numerics.device import is_compiling
from stiefel_opt.numerics.linalg import (
    FEW,
    MEDIUM,
    add_to_diagonal_,
    largest_bound,
    plus_identity,
    symmetric_product,
)

_DEGREE: Final = 3
# Up to here a polynomial that is 0 at 0 is near enough for Newton-Schulz.
_LONG: Final = 16.0
_SAMPLES: Final = 48  # at which its error is measured
# Cubes of scales beyond these may leave float32.
_SCALES: Final = (1e-8, 1e8)


class Roots(NamedTuple):
    """Functions of A = I + E: S = A^(-1/2) - I, and (I + A^(1/2))^(-1)."""

    difference: Tensor
    companion: Tensor | None

    @property
    def inverse_root(self) -> Tensor:
        """R = I + S."""
        return plus_identity(self.difference)


def roots(
    matrix: Tensor,
    limit: float,
    *,
    scale: float = 1.0,
    last: Tensor | None = None,
    square: Tensor | None = None,
    reads: bool = False,
    out: Tensor | None = None,
) -> Roots:
    r"""Return :math:`S = (I + E)^{-1/2} - I` and its companion, E symmetric, 0 <= E <= limit.

    S without I: a rounded 1 on the diagonal would be off by as much in every step.

    Both are polynomials up to degree 3 that interpolate at the zeros of Chebyshev's on the
    spectrum; that of S has no constant term, so that E = 0 gives S = 0. Where they do not reach
    rounding the coupled Newton-Schulz iteration
    :math:`T = (3I - RQ)/2,\; Q \leftarrow QT,\; R \leftarrow TR` with R = I + S sharpens them. As
    I + E >= I, the number of iterations follows from ``limit``.

    Args:
        matrix: M = E / scale, shape ``(k, m, m)``.
        square: M^2, if it is known already.
        reads: Whether a number may be read that sharpens ``limit`` and may save products.
        last: The last of the matrices, of which (I + Q)^(-1) is wanted.
        out: Memory for S; it may be left unused.

    Note: 0 to 2 products of m x m for |E| up to 0.06 in float32, 5 to 17 up to 16, with a companion
        at most 6 more; no host sync.
    Reference: Higham (1997), Stable iterations for the matrix square root, eq. (2.6).
    """
    if not _SCALES[0] < scale < _SCALES[1]:
        matrix, scale, square = matrix * scale, 1.0, None
        last = None if last is None else matrix[-last.size(0) :]
    plan = _plan(limit, matrix)
    is_large = matrix.size(-1) > MEDIUM
    if square is None and plan.degree > 2 - is_large:
        square = symmetric_product(matrix, matrix)
        if reads and plan.degree > 2 and (plan.iterations or is_large):  # |E|^2 <= |E^2|
            limit = min(limit, scale * largest_bound(square) ** 0.5)
            plan = _plan(limit, matrix)
    difference = _polynomial(matrix, square, plan.difference, scale / plan.limit, out)
    if plan.iterations == 0:
        if last is None:
            return Roots(difference, None)
        square = square if square is None else square[-last.size(0) :]
        return Roots(difference, _polynomial(last, square, plan.companion, scale / plan.limit))
    del square
    # P = Q - I for Q = A^(1/2), and Q must be exactly A R, or the iteration drifts.
    grow = symmetric_product(matrix, difference, into=difference.clone(), beta=1.0, alpha=scale)
    grow.add_(matrix, alpha=scale)
    for remaining in reversed(range(plan.iterations)):
        residual = symmetric_product(difference, grow, into=grow.clone(), beta=1.0).add_(difference)
        difference = symmetric_product(
            residual, difference, into=difference.clone(), beta=1.0, alpha=-0.5
        )
        difference.add_(residual, alpha=-0.5)  # residual is R Q - I
        if remaining:
            grow = symmetric_product(grow, residual, into=grow.clone(), beta=1.0, alpha=-0.5)
            grow.add_(residual, alpha=-0.5)
    if last is None:
        return Roots(difference, None)
    # r / (1 + r) = 1 - 1 / (1 + r)
    inverse_root = plus_identity(difference[-last.size(0) :])
    companion = _inverse_of_one_plus(inverse_root, limit).neg_()
    return Roots(difference, add_to_diagonal_(companion, 1.0))


def _polynomial(
    matrix: Tensor,
    square: Tensor | None,
    coefficients: Sequence[float],
    unit: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return c0 I + c1 E + c2 E^2 + c3 E^3 for E = unit M; ``square`` is M^2."""
    constant, first, *higher = coefficients
    first *= unit
    if not higher:
        result = torch.mul(matrix, first, out=out)
    elif square is None:
        second = higher[0] * unit * unit  # unit**2 would raise where it is too large
        result = torch.baddbmm(matrix, matrix, matrix, beta=first, alpha=second, out=out)
    else:
        ratio = higher[0] * unit * unit / first
        result = torch.add(matrix, square, alpha=ratio, out=out)
        if len(higher) == 1:
            result.mul_(first)
        else:
            third = higher[1] * unit * unit * unit
            symmetric_product(matrix, square, into=result, beta=first, alpha=third)
    return add_to_diagonal_(result, constant) if constant else result


class _Plan(NamedTuple):
    """How far the polynomials of :func:`roots` go, their coefficients in powers of E / limit."""

    limit: float
    degree: int
    iterations: int
    difference: list[float]
    companion: list[float]


def rounded_up(limit: float) -> float:
    """Return a bound rounded up to one of eight numbers an octave: few plans serve all."""
    mantissa, exponent = math.frexp(limit)
    return math.ldexp(math.ceil(8.0 * mantissa) / 8.0, exponent)


def _plan(limit: float, matrix: Tensor) -> _Plan:
    """Return the plan for a bound, rounded up."""
    make = _plan_for.__wrapped__ if is_compiling() else _plan_for
    # A caller's E may be off by rounding, far beyond a smaller bound. Not finite: so is the result.
    least_limit = torch.finfo(matrix.dtype).eps
    limit = rounded_up(max(limit, least_limit)) if limit < math.inf else least_limit
    least = 1 + (matrix.numel() <= FEW)
    return make(limit, matrix.dtype, matrix.size(-1), least)


@functools.lru_cache(maxsize=1024)
def _plan_for(limit: float, dtype: torch.dtype, size: int, least: int) -> _Plan:
    # A product of m x m matrices rounds by about sqrt(m) eps; stay an order below.
    tolerance = torch.finfo(dtype).eps * max(0.5, math.sqrt(size) / 16.0)
    shares = [j / _SAMPLES for j in range(_SAMPLES + 1)]
    degree, count = least - 1, 0
    error = residual = math.inf
    difference: list[float] = []
    while error > tolerance and degree < _DEGREE:
        degree += 1
        difference = _interpolated(_difference, limit, degree, through_zero=limit <= _LONG)
        pairs = [(_value(difference, share), limit * share) for share in shares]
        error = max(abs(value - _difference(e)) for value, e in pairs)
        residual = max(abs(1 - (1 + value) ** 2 * (1 + e)) for value, e in pairs)
    while error > tolerance and residual > tolerance and count < 60:
        residual, count = 0.75 * residual**2 + 0.25 * residual**3, count + 1
    companion = _interpolated(lambda e: 1 / (1 + math.sqrt(1 + e)), limit, degree)
    return _Plan(limit, degree, count, difference, companion)


def _difference(e: float) -> float:
    """(1 + e)^(-1/2) - 1, to all its digits."""
    return math.expm1(-0.5 * math.log1p(e))


def _value(coefficients: Sequence[float], u: float) -> float:
    return sum(c * u**power for power, c in enumerate(coefficients))


def _interpolated(
    function: Callable[[float], float], limit: float, degree: int, *, through_zero: bool = False
) -> list[float]:
    """Return the coefficients in powers of e / limit of a polynomial that interpolates.

    Its nodes are the zeros of Chebyshev's polynomial on [0, limit], or on the longer interval for
    which the first of them is 0: an error at most 1.3 times as large.
    """
    angles = [math.pi * (2 * j + 1) / (2 * degree + 2) for j in range(degree + 1)]
    nodes = [math.sin(angle / 2) ** 2 for angle in angles]
    if through_zero:
        nodes = [(node - nodes[0]) / (1 - nodes[0]) for node in nodes]
    table = [function(limit * node) for node in nodes]
    for order in range(1, degree + 1):  # differences, as Newton divides them
        for j in range(degree, order - 1, -1):
            table[j] = (table[j] - table[j - 1]) / (nodes[j] - nodes[j - order])
    coefficients = [0.0] * (degree + 1)
    for node, value in zip(reversed(nodes), reversed(table), strict=True):
        lower = [0.0, *coefficients[:-1]]
        coefficients = [low - node * c for low, c in zip(lower, coefficients, strict=True)]
        coefficients[0] += value
    return coefficients


def _inverse_of_one_plus(root: Tensor, limit: float) -> Tensor:
    """Return (I + R)^(-1) for symmetric R with eigenvalues in [(1 + limit)^(-1/2), 1].

    Two terms of the Neumann series about the middle of the spectrum, then Newton's iteration
    Y <- Y (2I - (I + R) Y), at most four times.
    """
    low = 1.0 + 1.0 / math.sqrt(1.0 + limit)
    centre = (low + 2.0) / 2.0
    residual = ((2.0 - low) / (2.0 + low)) ** 2
    inverse = add_to_diagonal_(root * -(centre**-2), 2.0 / centre - centre**-2)
    while residual > torch.finfo(root.dtype).eps / 2.0:
        correction = torch.baddbmm(inverse, root, inverse, beta=-1.0, alpha=-1.0)
        inverse = torch.bmm(inverse, add_to_diagonal_(correction, 2.0))
        residual *= residual
    return inverse
