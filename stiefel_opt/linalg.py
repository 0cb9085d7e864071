"""Matrix functions by products alone: no factorisation, no inverse, no host sync on accelerators.

Everything broadcasts over leading dimensions. ``tall`` means ``(..., n, m)`` with n >= m, ``small``
means ``(..., m, m)``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Roots",
    "add_product_",
    "add_to_diagonal_",
    "cayley",
    "exponential",
    "gram",
    "infinity_norm",
    "largest_bound",
    "polar_rotation",
    "product",
    "roots",
    "skew",
    "sym",
]

# Power series of (1 + x)^(-1/2) and (1 + x)^(1/2), and a bound on the next coefficient of either.
_INVERSE_ROOT = (1.0, -1.0 / 2.0, 3.0 / 8.0, -5.0 / 16.0)
_ROOT = (1.0, 1.0 / 2.0, -1.0 / 8.0, 1.0 / 16.0)
_NEXT = (1.0 / 2.0, 3.0 / 8.0, 5.0 / 16.0, 35.0 / 128.0)


def sym(matrix: Tensor) -> Tensor:
    """Return (A + A') / 2."""
    return (matrix + matrix.mT) / 2


def skew(matrix: Tensor) -> Tensor:
    """Return (A - A') / 2."""
    return (matrix - matrix.mT) / 2


_FEW = 1024


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Return left' right, small, for two tall batches ``(k, n, m)``."""
    return torch.bmm(left.mT, right)


def product(tall: Tensor, small: Tensor) -> Tensor:
    """Return tall @ small in the memory order of ``tall``, all ``(k, ., .)``."""
    if tall.stride(-1) == 1:
        return torch.bmm(tall, small)
    return torch.bmm(small.mT, tall.mT).mT


def add_product_(
    target: Tensor, tall: Tensor, small: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """target = beta target + alpha tall @ small in place, all ``(k, ., .)``; returns it."""
    if target.stride(-1) == 1:
        return target.baddbmm_(tall, small, beta=beta, alpha=alpha)
    return target.mT.baddbmm_(small.mT, tall.mT, beta=beta, alpha=alpha).mT


def infinity_norm(matrix: Tensor) -> Tensor:
    """Return the largest absolute row sum, ``(..., 1, 1)``: a bound on the spectral norm."""
    return matrix.abs().sum(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)


def largest_bound(matrix: Tensor, cap: float) -> float:
    """Return a bound on the spectral norms of a batch where reading it is free (CPU), else ``cap``.

    The largest infinity norm; for a few numbers, where two calls cost more than the products that a
    sharper bound saves, m times the largest entry. Skew and positive semidefinite matrices only:
    their largest entry in absolute value is positive.
    """
    if matrix.device.type != "cpu":
        return cap
    if matrix.numel() <= _FEW:
        return matrix.size(-1) * float(matrix.max())
    return float(matrix.abs().sum(dim=-1).max())


def add_to_diagonal_(matrix: Tensor, value: float) -> Tensor:
    """matrix += value I in place."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(value)
    return matrix


class Roots(NamedTuple):
    """Functions of A = I + E: R = A^(-1/2) and R^2 (I + R)^(-1) = (A + A^(1/2))^(-1)."""

    inverse_root: Tensor
    bend: Tensor | None


def roots(
    matrix: Tensor,
    limit: float,
    *,
    scale: float = 1.0,
    root: Tensor | None = None,
    bend: bool = False,
) -> Roots:
    r"""Return :math:`(I + E)^{-1/2}` and on request its companions, E symmetric, 0 <= E <= limit.

    All are power series about the middle of the spectrum, up to degree 3, from the same powers of
    E. Where that does not reach rounding the coupled Newton-Schulz iteration
    :math:`T = (3I - RQ)/2,\; Q \leftarrow QT,\; R \leftarrow TR` sharpens them. As I + E >= I,
    the number of iterations follows from ``limit`` alone.

    Args:
        matrix: E / scale, shape ``(k, m, m)``.
        limit: Upper bound of every E, a number: it sets the cost.
        scale: Factor of E.
        root: Where to put Q, if wanted.
        bend: Whether to return (A + Q)^(-1).

    Returns: :class:`Roots`, each ``(k, m, m)``.
    Note: 0 to 2 products of m x m for |E| up to 0.04 in float32, 6 to 20 beyond; no host sync.
    Reference: Higham (1997), Stable iterations for the matrix square root, eq. (2.6).
    """
    plan = _plan(limit, matrix.dtype)
    powers = [matrix]
    if plan.degree > 1 and matrix.numel() > _FEW:
        powers.append(torch.bmm(matrix, matrix))
        if plan.iterations:  # |E|^2 <= |E^2| sharpens the bound, and may save the iteration
            limit = min(limit, scale * largest_bound(powers[1], math.inf) ** 0.5)
            plan = _plan(limit, matrix.dtype)
        if plan.degree > 2 and (root is not None or bend):
            powers.append(torch.bmm(powers[1], matrix))
    inverse_root = _polynomial(powers, plan.inverse_root, scale)
    if plan.iterations == 0:
        if root is not None:
            _polynomial(powers, plan.root, scale, out=root)
        return Roots(inverse_root, _polynomial(powers, plan.bend, scale) if bend else None)
    powers.clear()
    # Q must be exactly A R, or the iteration drifts.
    square_root = torch.baddbmm(inverse_root, matrix, inverse_root, alpha=scale)
    for _ in range(plan.iterations):
        correction = add_to_diagonal_(torch.bmm(inverse_root, square_root).mul_(-0.5), 1.5)
        square_root = torch.bmm(square_root, correction)
        inverse_root = torch.bmm(correction, inverse_root)
    if root is not None:
        root.copy_(square_root)
    if not bend:
        return Roots(inverse_root, None)
    # r^2 / (1 + r) = r - 1 + 1 / (1 + r)
    bent = _inverse_of_one_plus(inverse_root, limit).add_(inverse_root)
    return Roots(inverse_root, add_to_diagonal_(bent, -1.0))


def _polynomial(
    powers: list[Tensor], coefficients: Sequence[float], scale: float, out: Tensor | None = None
) -> Tensor:
    """Return c0 I + c1 E + c2 E^2 + ... for E = scale M and the powers of M at hand."""
    matrix = powers[0]
    if matrix.numel() <= _FEW:  # Horner with I as a matrix: one call a degree
        identity = _identity(matrix.size(-1), matrix.dtype, matrix.device)
        result = identity if matrix.size(0) == 1 else identity.expand(matrix.shape)
        factor = coefficients[-1] * scale
        for coefficient in coefficients[-2:0:-1]:
            result = torch.baddbmm(identity, matrix, result, beta=coefficient, alpha=factor)
            factor = scale
        return torch.baddbmm(identity, matrix, result, beta=coefficients[0], alpha=factor, out=out)
    if len(coefficients) > len(powers) + 1:  # one more from the square: (c2 + c3 E) E^2 + ...
        outer = add_to_diagonal_(matrix * (coefficients[3] * scale), coefficients[2])
        result = torch.bmm(powers[1], outer).mul_(scale * scale)
        result.add_(matrix, alpha=coefficients[1] * scale)
        return add_to_diagonal_(result, coefficients[0])
    result = torch.mul(matrix, coefficients[1] * scale, out=out)
    for order, coefficient in enumerate(coefficients[2:], start=2):
        result.add_(powers[order - 1], alpha=coefficient * scale**order)
    return add_to_diagonal_(result, coefficients[0])


@functools.lru_cache(maxsize=64)
def _identity(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=dtype, device=device).unsqueeze(0)


class _Plan(NamedTuple):
    """How far the series of :func:`roots` go, and their coefficients in powers of E."""

    degree: int
    iterations: int
    inverse_root: list[float]
    root: list[float]
    bend: list[float]


def _plan(limit: float, dtype: torch.dtype) -> _Plan:
    """Return the plan for a bound rounded up to one of four numbers an octave."""
    if not 0.0 < limit < math.inf:  # the result is I, or not finite
        return _plan_for(0.0, dtype)
    mantissa, exponent = math.frexp(limit)
    return _plan_for(math.ldexp(math.ceil(8.0 * mantissa) / 8.0, exponent), dtype)


@functools.lru_cache(maxsize=1024)
def _plan_for(limit: float, dtype: torch.dtype) -> _Plan:
    centre, radius = 1.0 + limit / 2.0, limit / (2.0 + limit)
    tolerance = torch.finfo(dtype).eps / 2.0
    degree = 1
    while degree < 3 and _NEXT[degree] * radius ** (degree + 1) > tolerance * (1.0 - radius):
        degree += 1
    return _Plan(
        degree,
        _iterations(radius, degree, tolerance),
        _shifted(_INVERSE_ROOT[: degree + 1], centre, centre**-0.5),
        _shifted(_ROOT[: degree + 1], centre, centre**0.5),
        _shifted(_bend_series(centre)[: degree + 1], centre, 1.0),
    )


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


def _bend_series(centre: float) -> list[float]:
    """Return the power series in x of 1 / (a + sqrt(a)) at a = centre (1 + x)."""
    divisor = [centre**0.5 * c for c in _ROOT]
    divisor[0] += centre
    divisor[1] += centre
    series = [1.0 / divisor[0]]
    for k in range(1, len(divisor)):
        series.append(-sum(divisor[j] * series[k - j] for j in range(1, k + 1)) / divisor[0])
    return series


def _iterations(radius: float, degree: int, tolerance: float) -> int:
    """Newton-Schulz steps from the series of ``degree`` to rounding; 0 if it is there already."""
    if _NEXT[degree] * radius ** (degree + 1) <= tolerance * (1.0 - radius):
        return 0
    residual = max(
        abs(1.0 - sum(c * x**j for j, c in enumerate(_INVERSE_ROOT)) ** 2 * (1.0 + x))
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


def polar_rotation(matrix: Tensor, square_gram: Tensor, limit: float, scale: float = 1.0) -> Tensor:
    r"""Return rot(K) = (I + K)(I - K^2)^(-1/2), the polar factor of I + K, for skew K.

    Args:
        matrix: M = K / scale, shape ``(k, m, m)``.
        square_gram: M'M.
        limit: Bound on every K'K.
        scale: Factor of K.

    Returns: Orthogonal matrices, equal to exp(K) to second order.
    Note: 1 product of m x m and those of :func:`roots` of I + K'K.
    """
    inverse_root = roots(square_gram, limit, scale=scale * scale).inverse_root
    return torch.baddbmm(inverse_root, matrix, inverse_root, alpha=scale)


def exponential(step: Tensor) -> Tensor:
    """Return expm(K) for ``(k, m, m)``, orthogonal for skew K."""
    # For a single matrix torch 2.13 stops the series at an error near 1e-11 in float64.
    batch = step.expand(2, -1, -1) if step.size(0) == 1 else step
    rotation: Tensor = torch.linalg.matrix_exp(batch)
    return rotation[: step.size(0)]


def cayley(step: Tensor) -> Tensor:
    """Return (I - K/2)^(-1) (I + K/2), orthogonal for skew K; one LU solve of m x m."""
    half = step / 2
    left = add_to_diagonal_(-half, 1.0)
    rotation: Tensor = torch.linalg.solve(left, add_to_diagonal_(half, 1.0))
    return rotation
