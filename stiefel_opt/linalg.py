"""Matrix functions by products alone: no factorisation, no inverse, no host sync on accelerators.

Everything broadcasts over leading dimensions. ``tall`` means ``(..., n, m)`` with n >= m, ``small``
means ``(..., m, m)``. A bound is a tensor ``(..., 1, 1)``, one number for each matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "add_product_",
    "cayley",
    "gram",
    "infinity_norm",
    "inverse_of_one_plus",
    "inverse_sqrt",
    "polar_rotation",
    "product",
    "skew",
    "sym",
    "worst",
]

# Coefficients of (1 + x)^(-1/2) and (1 + x)^(1/2).
_INVERSE_ROOT = (1.0, -1.0 / 2.0, 3.0 / 8.0, -5.0 / 16.0)
_ROOT = (1.0, 1.0 / 2.0, -1.0 / 8.0, 1.0 / 16.0)
_REMAINDER = (1.0 / 2.0, 3.0 / 8.0, 5.0 / 16.0, 35.0 / 128.0)  # next coefficient of either, at most


def sym(matrix: Tensor) -> Tensor:
    """Return (A + A') / 2."""
    return (matrix + matrix.mT) / 2


def skew(matrix: Tensor) -> Tensor:
    """Return (A - A') / 2."""
    return (matrix - matrix.mT) / 2


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Return left' right, small, for two tall batches ``(k, n, m)``."""
    return torch.bmm(left.mT, right)


def product(tall: Tensor, small: Tensor) -> Tensor:
    """Return tall @ small in the memory order of ``tall``, all ``(k, ., .)``."""
    if tall.stride(-1) == 1:
        return torch.bmm(tall, small)
    return torch.bmm(small.mT, tall.mT).mT


def add_product_(target: Tensor, tall: Tensor, small: Tensor) -> Tensor:
    """target += tall @ small in place, all ``(k, ., .)``; returns ``target``."""
    if target.stride(-1) == 1:
        return target.baddbmm_(tall, small)
    return target.mT.baddbmm_(small.mT, tall.mT).mT


def infinity_norm(matrix: Tensor) -> Tensor:
    """Return the largest absolute row sum, ``(..., 1, 1)``: a bound on the spectral norm."""
    return matrix.abs().sum(dim=-1, keepdim=True).amax(dim=-2, keepdim=True)


def worst(bound: Tensor, cap: float) -> float:
    """Return the largest entry of ``bound`` where reading it is free (CPU), else ``cap``."""
    return float(bound.max()) if bound.device.type == "cpu" else cap


def inverse_sqrt(excess: Tensor, bound: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    r"""Return :math:`(I + E)^{-1/2}` and :math:`(I + E)^{1/2}`, E symmetric, 0 <= E <= bound.

    With :math:`I + E = c (I + F)`, c in the middle of the spectrum, both are power series in F up
    to degree 3, sharpened where that does not reach rounding by the coupled Newton-Schulz iteration
    :math:`T = (3I - RQ)/2,\; Q \leftarrow QT,\; R \leftarrow TR`. As I + E >= I, the number of
    iterations follows from ``limit`` alone.

    Args:
        excess: E, shape ``(k, m, m)``.
        bound: Upper bound of each E, shape ``(k, 1, 1)``.
        limit: The largest entry of ``bound``, or a cap on it, as a number: it sets the cost.

    Returns: Both roots, shape ``(k, m, m)``.
    Note: 0 to 2 products of m x m for |E| below 0.04 in float32, 6 to 18 beyond; no host sync.
    Reference: Higham (1997), Stable iterations for the matrix square root, eq. (2.6).
    """
    radius = limit / (2.0 + limit) if math.isfinite(limit) else 0.0
    tolerance = torch.finfo(excess.dtype).eps / 2
    degree = 1
    while degree < 3 and _REMAINDER[degree] * radius ** (degree + 1) > tolerance * (1 - radius):
        degree += 1
    centre = 1.0 + bound / 2.0
    series = excess / centre
    add_to_diagonal_(series, 1.0 / centre - 1.0)
    inverse_root = series * _INVERSE_ROOT[1]
    root = series * _ROOT[1]
    power = series
    for order in range(2, degree + 1):
        power = torch.bmm(power, series)
        inverse_root.add_(power, alpha=_INVERSE_ROOT[order])
        root.add_(power, alpha=_ROOT[order])
    add_to_diagonal_(inverse_root, 1.0)
    add_to_diagonal_(root, 1.0)
    iterations = _iterations(radius, degree, tolerance)
    if iterations:
        root = torch.baddbmm(
            inverse_root, series, inverse_root
        )  # the iteration needs Q = (I + F) R
        for _ in range(iterations):
            correction = torch.bmm(inverse_root, root).mul_(-0.5)
            add_to_diagonal_(correction, 1.5)
            root = torch.bmm(root, correction)
            inverse_root = torch.bmm(correction, inverse_root)
    scale = centre.sqrt()
    return inverse_root.div_(scale), root.mul_(scale)


def add_to_diagonal_(matrix: Tensor, value: Tensor | float) -> Tensor:
    """matrix += value I in place; ``value`` a number or ``(..., 1, 1)``."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(value if isinstance(value, float) else value.squeeze(-1))
    return matrix


def _iterations(radius: float, degree: int, tolerance: float) -> int:
    """Newton-Schulz steps from the series of ``degree`` to rounding; 0 if it is there already."""
    if _REMAINDER[degree] * radius ** (degree + 1) <= tolerance * (1 - radius):
        return 0
    residual = max(
        abs(1 - sum(c * x**j for j, c in enumerate(_INVERSE_ROOT)) ** 2 * (1 + x))
        for x in (-radius, radius)
    )
    count = 0
    while residual > tolerance and count < 60:
        residual = 0.75 * residual**2 + 0.25 * residual**3
        count += 1
    return count


def inverse_of_one_plus(root: Tensor, limit: float) -> Tensor:
    r"""Return :math:`(I + R)^{-1}` for symmetric R with eigenvalues in [(1 + limit)^(-1/2), 1].

    Two terms of the Neumann series about the middle of the spectrum, then Newton's iteration
    :math:`Y \leftarrow Y (2I - (I + R) Y)`, a known number of times.

    Note: 2 products of m x m an iteration, at most 4 iterations; no host sync.
    """
    low = 1.0 + (1.0 / math.sqrt(1.0 + limit) if math.isfinite(limit) else 0.0)
    centre = (low + 2.0) / 2.0
    residual = ((2.0 - low) / (2.0 + low)) ** 2
    shifted = add_to_diagonal_(root.clone(), 1.0)
    inverse = add_to_diagonal_(shifted / -(centre * centre), 2.0 / centre)
    while residual > torch.finfo(root.dtype).eps / 2:
        correction = add_to_diagonal_(torch.bmm(shifted, inverse).neg_(), 2.0)
        inverse = torch.bmm(inverse, correction)
        residual *= residual
    return inverse


def polar_rotation(step: Tensor, bound: Tensor, limit: float) -> Tensor:
    r"""Return rot(K) = (I + K)(I - K^2)^(-1/2), the polar factor of I + K, for skew K.

    Args:
        step: K, shape ``(k, m, m)``.
        bound: Bound on the spectral norm of each K, shape ``(k, 1, 1)``.
        limit: The largest entry of ``bound`` or a cap on it.

    Returns: Orthogonal matrices, equal to exp(K) to second order.
    Note: 2 products of m x m and :func:`inverse_sqrt` of I - K^2.
    """
    inverse_root, _ = inverse_sqrt(torch.bmm(step.mT, step), bound.square(), limit * limit)
    return torch.baddbmm(inverse_root, step, inverse_root)


def cayley(step: Tensor) -> Tensor:
    """Return (I - K/2)^(-1) (I + K/2), orthogonal for skew K; one LU solve of m x m."""
    half = step / 2
    left = add_to_diagonal_(-half, 1.0)
    rotation: Tensor = torch.linalg.solve(left, add_to_diagonal_(half, 1.0))
    return rotation
