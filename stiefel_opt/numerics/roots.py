"""Square roots of A = I + E by products only: polynomials, sharpened by Newton-Schulz.

The cost is known beforehand from a bound on E, without a factorisation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefel_opt.numerics.device import is_compiling
from stiefel_opt.numerics.linalg import (
    FEW,
    MEDIUM,
    add_to_diagonal_,
    identity_for,
    largest_bound,
    plus_identity,
    symmetric_product,
)

# Power series of (1 + x)^(-1/2) and (1 + x)^(1/2); the first bounds the coefficients of both.
_INVERSE_ROOT = (1.0, -1.0 / 2.0, 3.0 / 8.0, -5.0 / 16.0, 35.0 / 128.0, -63.0 / 256.0)
_ROOT = (1.0, 1.0 / 2.0, -1.0 / 8.0, 1.0 / 16.0, -5.0 / 128.0, 7.0 / 256.0)
_DEGREE = 3
# What is left of x^2, x^3 and x^4 without Chebyshev's polynomial on [-1, 1], by powers of x:
# x^2 = 1/2 + T2/2, x^3 = 3/4 x + T3/4, x^4 = x^2 - 1/8 + T4/8.
_LEFT_OF_NEXT = {1: {0: 1.0 / 2.0}, 2: {1: 3.0 / 4.0}, 3: {2: 1.0, 0: -1.0 / 8.0}}


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
    companions: int = 0,
    overwrite: bool = False,
    square: Tensor | None = None,
    reads: bool = False,
) -> Roots:
    r"""Return :math:`S = (I + E)^{-1/2} - I` and its companion, E symmetric, 0 <= E <= limit.

    S without I: a rounded 1 on the diagonal would be off by as much in every step.

    Both are polynomials about the middle of the spectrum, power series economized by Chebyshev's
    polynomials, up to degree 3. Where that does not reach rounding the coupled
    Newton-Schulz iteration :math:`T = (3I - RQ)/2,\; Q \leftarrow QT,\; R \leftarrow TR`
    with R = I + S sharpens them. As I + E >= I, the number of iterations follows from ``limit``.

    Args:
        matrix: M = E / scale, shape ``(k, m, m)``; memory to use if ``overwrite``.
        square: M^2, where somebody has it already.
        reads: Whether a number may be read that sharpens ``limit`` and may save products.
        companions: Of how many of the last matrices (I + Q)^(-1) is wanted.

    Note: 0 to 2 products of m x m for |E| up to 0.06 in float32, 5 to 17 up to 16, with a companion
        at most 6 more; no host sync.
    Reference: Higham (1997), Stable iterations for the matrix square root, eq. (2.6).
    """
    plan = _plan(limit, matrix)
    few = matrix.numel() <= FEW
    powers = [matrix]
    if plan.degree > 2 and not few:
        powers.append(symmetric_product(matrix, matrix) if square is None else square)
        is_wide = plan.iterations or matrix.size(-1) > MEDIUM
        if square is None and is_wide and reads:  # |E|^2 <= |E^2|
            limit = min(limit, scale * largest_bound(powers[1]) ** 0.5)
            plan = _plan(limit, matrix)
    if plan.iterations == 0:
        companion = None
        if companions:
            companion = _polynomial(
                [power[-companions:] for power in powers], plan.companion, scale
            )
        out = matrix if overwrite and not few else None
        return Roots(_polynomial(powers, plan.difference, scale, out=out), companion)
    difference = _polynomial(powers, plan.difference, scale)
    powers.clear()
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
    if not companions:
        return Roots(difference, None)
    # r / (1 + r) = 1 - 1 / (1 + r)
    inverse_root = plus_identity(difference[-companions:])
    companion = _inverse_of_one_plus(inverse_root, limit).neg_()
    return Roots(difference, add_to_diagonal_(companion, 1.0))


def _polynomial(
    powers: list[Tensor], coefficients: Sequence[float], scale: float, out: Tensor | None = None
) -> Tensor:
    """Return c0 I + c1 E + c2 E^2 + ... for E = scale M and the powers of M at hand."""
    matrix = powers[0]
    if matrix.numel() <= FEW and len(coefficients) > 2:  # Horner with I: one call a degree
        identity = identity_for(matrix)
        # For bounds beyond 1e100 the coefficients vanish, the last one first.
        ratio = coefficients[-1] * scale / coefficients[-2] if coefficients[-2] else 0.0
        result = torch.add(identity, matrix, alpha=ratio)
        factor = coefficients[-2] * scale
        for coefficient in coefficients[-3:0:-1]:
            result = torch.baddbmm(identity, matrix, result, beta=coefficient, alpha=factor)
            factor = scale
        return torch.baddbmm(identity, matrix, result, beta=coefficients[0], alpha=factor, out=out)
    first = coefficients[1] * scale
    if len(coefficients) == 3 and len(powers) == 1:
        result = torch.baddbmm(matrix, matrix, matrix, beta=first, alpha=coefficients[2] * scale**2)
    elif len(coefficients) == 4 and len(powers) == 2:  # (c2 + c3 E) E^2
        outer = add_to_diagonal_(matrix * (coefficients[3] * scale), coefficients[2])
        target = matrix if out is matrix else matrix.clone()
        result = symmetric_product(powers[1], outer, into=target, beta=first, alpha=scale**2)
    else:
        result = torch.mul(matrix, first, out=out)
        for order, coefficient in enumerate(coefficients[2:], start=2):
            result.add_(powers[order - 1], alpha=coefficient * scale**order)
    return add_to_diagonal_(result, coefficients[0])


class _Plan(NamedTuple):
    """How far the series of :func:`roots` go, and their coefficients in powers of E."""

    degree: int
    iterations: int
    difference: list[float]
    companion: list[float]


def _plan(limit: float, matrix: Tensor) -> _Plan:
    """Return the plan for a bound rounded up to one of four numbers an octave."""
    size, dtype, least = matrix.size(-1), matrix.dtype, 1 + (matrix.numel() <= FEW)
    make = _plan_for.__wrapped__ if is_compiling() else _plan_for
    if not 0.0 < limit < math.inf:  # the result is I, or not finite
        return make(0.0, dtype, size, least)
    mantissa, exponent = math.frexp(limit)
    return make(math.ldexp(math.ceil(8.0 * mantissa) / 8.0, exponent), dtype, size, least)


@functools.lru_cache(maxsize=1024)
def _plan_for(limit: float, dtype: torch.dtype, size: int, least: int) -> _Plan:
    centre, radius = 1.0 + limit / 2.0, limit / (2.0 + limit)
    # A product of m x m matrices rounds by about sqrt(m) eps; stay an order below.
    tolerance = torch.finfo(dtype).eps * max(0.5, math.sqrt(size) / 16.0)
    degree = least
    while degree < _DEGREE and _remainder(radius, degree) > tolerance:
        degree += 1
    inverse_root = _economized(_INVERSE_ROOT, degree, radius)
    difference = _shifted(inverse_root, centre, centre**-0.5)
    shift = 1.0 / centre - 1.0
    total = sum(c * shift**k for k, c in enumerate(inverse_root[1:], start=1))
    total += inverse_root[0] - 1.0
    less = math.expm1(-0.5 * math.log1p(limit / 2.0))  # centre^(-1/2) - 1
    difference[0] = less * (1.0 + total) + total  # what is left without the 1, to all its digits
    divisor = [centre**0.5 * c for c in _ROOT]
    divisor[0] += 1.0
    return _Plan(
        degree,
        _iterations(inverse_root, radius, degree, tolerance),
        difference,
        _shifted(_economized(_reciprocal(divisor), degree, radius), centre, 1.0),
    )


def _remainder(radius: float, degree: int) -> float:
    """Bound the error of the economized series of ``degree`` on [-radius, radius]."""
    first = abs(_INVERSE_ROOT[degree + 1]) * radius ** (degree + 1)
    second = abs(_INVERSE_ROOT[degree + 2]) * radius ** (degree + 2)
    return float(first / 2**degree + second / max(1.0 - radius, 1e-9))


def _economized(series: Sequence[float], degree: int, radius: float) -> list[float]:
    """Return the coefficients up to ``degree`` of a series on [-radius, radius], the next term
    replaced by what it leaves once its Chebyshev polynomial is dropped: an error 2^degree smaller.
    """
    terms, following = list(series[: degree + 1]), series[degree + 1]
    for power, share in _LEFT_OF_NEXT[degree].items():
        terms[power] += following * share * radius ** (degree + 1 - power)
    return terms


def _shifted(series: Sequence[float], centre: float, factor: float) -> list[float]:
    """Return factor * sum_k s_k ((1 + e) / centre - 1)^k as coefficients of powers of e."""
    shift, scale = 1.0 / centre - 1.0, 1.0 / centre
    return [
        factor
        * scale**power
        * sum(
            series[k] * math.comb(k, power) * shift ** (k - power)
            for k in range(power, len(series))
        )
        for power in range(len(series))
    ]


def _reciprocal(divisor: Sequence[float]) -> list[float]:
    """Return the power series of 1 / d(x)."""
    series = [1.0 / divisor[0]]
    for k in range(1, len(divisor)):
        series.append(-sum(divisor[j] * series[k - j] for j in range(1, k + 1)) / divisor[0])
    return series


def _iterations(series: Sequence[float], radius: float, degree: int, tolerance: float) -> int:
    """Newton-Schulz steps from the series of ``degree`` to rounding; 0 if it is there already."""
    if _remainder(radius, degree) <= tolerance:
        return 0
    residual = max(
        abs(1.0 - sum(c * x**j for j, c in enumerate(series)) ** 2 * (1.0 + x))
        for x in (-radius, radius)
    )
    count = 0
    while residual > tolerance and count < 60:
        residual = 0.75 * residual**2 + 0.25 * residual**3
        count += 1
    return count


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
