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
    "absolute_square",
    "add_product",
    "add_product_",
    "add_to_diagonal_",
    "cayley",
    "cholesky_factor",
    "exponential",
    "gram",
    "infinity_norm",
    "largest_bound",
    "own_gram",
    "plus_identity",
    "polar_rotation",
    "product",
    "reads",
    "roots",
    "skew",
    "sym",
    "symmetric_product",
]

# Power series of (1 + x)^(-1/2) and (1 + x)^(1/2); the first bounds the coefficients of both.
_INVERSE_ROOT = (1.0, -1.0 / 2.0, 3.0 / 8.0, -5.0 / 16.0, 35.0 / 128.0, -63.0 / 256.0)
_ROOT = (1.0, 1.0 / 2.0, -1.0 / 8.0, 1.0 / 16.0, -5.0 / 128.0, 7.0 / 256.0)
_DEGREE = 3

# Where calls cost more than arithmetic (numbers in all), up to where sums of squares bound
# eigenvalues best (m), and from where norms of rows should need no temporary (m).
_FEW = 1024
_MEDIUM = 64
_LARGE = 256
# From here on (m) a symmetric product is worked out by half.
_BLOCKED = 256


def reads(tensor: Tensor) -> bool:
    """Say whether the values of ``tensor`` can be read without waiting: on a CPU, not compiled."""
    return tensor.is_cpu and not torch.compiler.is_compiling()


def sym(matrix: Tensor) -> Tensor:
    """Return (A + A') / 2; A' is the conjugate transpose, here and everywhere."""
    return (matrix + matrix.mH) / 2


def skew(matrix: Tensor) -> Tensor:
    """Return (A - A') / 2."""
    return (matrix - matrix.mH) / 2


def absolute_square(tensor: Tensor) -> Tensor:
    """Return |a|^2 of every entry, real."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).square().sum(dim=-1)
    return tensor.square()


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Return left' right, small, for two tall batches ``(k, n, m)``."""
    return torch.bmm(left.mH, right)


def own_gram(tall: Tensor) -> Tensor:
    """Return A'A for a tall batch ``(k, n, m)``."""
    return symmetric_product(tall.mH, tall)


def symmetric_product(
    left: Tensor,
    right: Tensor,
    into: Tensor | None = None,
    *,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> Tensor:
    """Return left @ right, ``(k, m, n)`` by ``(k, n, m)``, where it is known to be symmetric.

    If it is large only the blocks on and above the diagonal are worked out: with four blocks a side
    5/8 of the flops.

    Args:
        into: Symmetric; then the result is beta into + alpha left @ right, in its memory.
        beta, alpha: Factors, for use with ``into``.
    """
    size = right.size(-1)
    if size < _BLOCKED:
        if into is None:
            return torch.bmm(left, right)
        return into.baddbmm_(left, right, beta=beta, alpha=alpha)
    result = right.new_empty(right.size(0), size, size) if into is None else into
    width = max(-(-size // 4), _BLOCKED // 2)
    for start in range(0, size, width):
        stop = min(start + width, size)
        rows = result[:, start:stop, start:]
        rows.baddbmm_(left[:, start:stop], right[..., start:], beta=beta, alpha=alpha)
        result[:, stop:, start:stop] = rows[..., stop - start :].mH
    return result


def product(tall: Tensor, small: Tensor) -> Tensor:
    """Return tall @ small in the memory order of ``tall``, all ``(k, ., .)``."""
    if tall.stride(-1) == 1:
        return torch.bmm(tall, small)
    return torch.bmm(small.mT, tall.mT).mT


def add_product(
    target: Tensor, tall: Tensor, small: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return beta target + alpha tall @ small in the memory order of ``target``."""
    if target.stride(-1) == 1:
        return torch.baddbmm(target, tall, small, beta=beta, alpha=alpha)
    return torch.baddbmm(target.mT, small.mT, tall.mT, beta=beta, alpha=alpha).mT


def add_product_(
    target: Tensor, tall: Tensor, small: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """target = beta target + alpha tall @ small in place, all ``(k, ., .)``; returns it."""
    if target.stride(-1) == 1:
        return target.baddbmm_(tall, small, beta=beta, alpha=alpha)
    return target.mT.baddbmm_(small.mT, tall.mT, beta=beta, alpha=alpha).mT


def infinity_norm(matrix: Tensor) -> Tensor:
    """Return the largest absolute row sum, ``(..., 1, 1)``: a bound on the spectral norm.

    Symmetric and skew matrices only: their columns say the same.
    """
    if matrix.size(-1) > _LARGE:  # needs no temporary, but is slow for short rows
        rows: Tensor = torch.linalg.vector_norm(matrix, ord=1, dim=-1, keepdim=True)
        return rows.amax(dim=-2, keepdim=True)
    return matrix.abs().sum(dim=-2, keepdim=True).amax(dim=-1, keepdim=True)


def largest_bound(matrix: Tensor, cap: float) -> float:
    """Return a bound on the eigenvalues of a batch where reading it is free (CPU), else ``cap``.

    Positive semidefinite matrices only, symmetric or Hermitian. With the mean c and the deviation s
    of the eigenvalues, both from sums of entries, none exceeds c + s sqrt(m - 1); for large m the
    largest infinity norm is sharper. For a few numbers, where calls cost more than the products
    that a sharper bound saves, m times the largest entry.

    Reference: Wolkowicz & Styan (1980), Bounds for eigenvalues using traces, Theorem 2.1.
    """
    if not reads(matrix):
        return cap
    size = matrix.size(-1)
    if matrix.numel() <= _FEW:
        return size * float(matrix.real.max())
    if size > _MEDIUM:
        return float(infinity_norm(matrix).max())
    mean = matrix.diagonal(dim1=-2, dim2=-1).real.mean(dim=-1)
    square = torch.linalg.vector_norm(matrix.flatten(1), dim=-1).square_().div_(size)
    deviation = square.addcmul_(mean, mean, value=-1.0).clamp_(min=0.0).sqrt_()
    # 1 % for the rounding of the difference
    return 1.01 * float(mean.add_(deviation, alpha=math.sqrt(size - 1)).max())


def add_to_diagonal_(matrix: Tensor, value: float) -> Tensor:
    """matrix += value I in place."""
    if matrix.size(-1) > _MEDIUM or torch.compiler.is_compiling():
        matrix.diagonal(dim1=-2, dim2=-1).add_(value)
        return matrix
    return matrix.add_(_identity_for(matrix), alpha=value)


def plus_identity(matrix: Tensor) -> Tensor:
    """Return A + I."""
    if matrix.size(-1) > _MEDIUM or torch.compiler.is_compiling():
        return add_to_diagonal_(matrix.clone(), 1.0)
    return torch.add(matrix, _identity_for(matrix))


class Roots(NamedTuple):
    """Functions of A = I + E: S = A^(-1/2) - I, and (I + A^(1/2))^(-1)."""

    shrink: Tensor
    bend: Tensor | None

    @property
    def inverse_root(self) -> Tensor:
        """R = I + S."""
        return plus_identity(self.shrink)


def roots(
    matrix: Tensor,
    limit: float,
    *,
    scale: float = 1.0,
    bend: int = 0,
    overwrite: bool = False,
) -> Roots:
    r"""Return :math:`S = (I + E)^{-1/2} - I` and its companion, E symmetric, 0 <= E <= limit.

    S alone, without I: a rounded 1 on the diagonal would be off by as much in every step.

    Both are polynomials about the middle of the spectrum, power series economized by Chebyshev's
    polynomials, up to degree 3. Where that does not reach rounding the coupled
    Newton-Schulz iteration :math:`T = (3I - RQ)/2,\; Q \leftarrow QT,\; R \leftarrow TR`
    with R = I + S sharpens them. As I + E >= I, the number of iterations follows from ``limit``.

    Args:
        matrix: E / scale, shape ``(k, m, m)``.
        limit: Upper bound of every E, a number: it sets the cost.
        scale: Factor of E.
        bend: Of how many of the last matrices (I + Q)^(-1) is wanted.
        overwrite: Whether ``matrix`` may be used as memory.

    Returns: :class:`Roots`.
    Note: 0 to 2 products of m x m for |E| up to 0.06 in float32, 6 to 20 beyond; no host sync.
    Reference: Higham (1997), Stable iterations for the matrix square root, eq. (2.6).
    """
    plan = _plan(limit, matrix)
    few = matrix.numel() <= _FEW
    powers = [matrix]
    if plan.degree > 2 and not few:
        powers.append(symmetric_product(matrix, matrix))
        if plan.iterations or matrix.size(-1) > _MEDIUM:
            # |E|^2 <= |E^2| sharpens the bound, and may save products
            limit = min(limit, scale * largest_bound(powers[1], math.inf) ** 0.5)
            plan = _plan(limit, matrix)
    if plan.iterations == 0:
        bent = None
        if bend:
            bent = _polynomial([power[-bend:] for power in powers], plan.bend, scale)
        out = matrix if overwrite and not few else None
        return Roots(_polynomial(powers, plan.shrink, scale, out=out), bent)
    shrink = _polynomial(powers, plan.shrink, scale)
    powers.clear()
    # P = Q - I for Q = A^(1/2), and Q must be exactly A R, or the iteration drifts.
    grow = torch.baddbmm(shrink, matrix, shrink, alpha=scale).add_(matrix, alpha=scale)
    for _ in range(plan.iterations):
        residual = torch.baddbmm(grow, shrink, grow).add_(shrink)  # R Q - I
        grow, shrink = (
            torch.baddbmm(grow, grow, residual, alpha=-0.5).add_(residual, alpha=-0.5),
            torch.baddbmm(shrink, residual, shrink, alpha=-0.5).add_(residual, alpha=-0.5),
        )
    if not bend:
        return Roots(shrink, None)
    # r / (1 + r) = 1 - 1 / (1 + r)
    inverse_root = plus_identity(shrink[-bend:])
    bent = _inverse_of_one_plus(inverse_root, limit).neg_()
    return Roots(shrink, add_to_diagonal_(bent, 1.0))


def _polynomial(
    powers: list[Tensor], coefficients: Sequence[float], scale: float, out: Tensor | None = None
) -> Tensor:
    """Return c0 I + c1 E + c2 E^2 + ... for E = scale M and the powers of M at hand."""
    matrix = powers[0]
    if matrix.numel() <= _FEW and len(coefficients) > 2:  # Horner with I: one call a degree
        identity = _identity_for(matrix)
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


_IDENTITIES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _identity_for(matrix: Tensor) -> Tensor:
    """Return I like the matrices of a batch, ``(m, m)``; it is kept for the next call."""
    key = (matrix.size(-1), matrix.dtype, matrix.device)
    if torch.compiler.is_compiling() or type(matrix) is not Tensor:
        return torch.eye(key[0], dtype=key[1], device=key[2])
    found = _IDENTITIES.get(key)
    if found is None:
        with torch.inference_mode(mode=False):  # what is kept must serve everybody
            found = torch.eye(key[0], dtype=key[1], device=key[2])
        if _is_ordinary(found):
            if len(_IDENTITIES) >= 64:
                _IDENTITIES.clear()
            _IDENTITIES[key] = found
    return found


def _is_ordinary(tensor: Tensor) -> bool:
    """Say whether a tensor is what it seems: no fake one, and none that a transform made."""
    return type(tensor) is Tensor and not torch._is_functional_tensor(tensor)


class _Plan(NamedTuple):
    """How far the series of :func:`roots` go, and their coefficients in powers of E."""

    degree: int
    iterations: int
    shrink: list[float]
    bend: list[float]


def _plan(limit: float, matrix: Tensor) -> _Plan:
    """Return the plan for a bound rounded up to one of four numbers an octave."""
    size, dtype, least = matrix.size(-1), matrix.dtype, 1 + (matrix.numel() <= _FEW)
    make = _plan_for.__wrapped__ if torch.compiler.is_compiling() else _plan_for
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
    shrink = _shifted(inverse_root, centre, centre**-0.5)
    shift = 1.0 / centre - 1.0
    total = sum(c * shift**k for k, c in enumerate(inverse_root[1:], start=1))
    total += inverse_root[0] - 1.0
    less = math.expm1(-0.5 * math.log1p(limit / 2.0))  # centre^(-1/2) - 1
    shrink[0] = less * (1.0 + total) + total  # what is left without the 1, to all its digits
    divisor = [centre**0.5 * c for c in _ROOT]
    divisor[0] += 1.0
    return _Plan(
        degree,
        _iterations(inverse_root, radius, degree, tolerance),
        shrink,
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
    kept, following = list(series[: degree + 1]), series[degree + 1]
    square = radius * radius
    if degree == 1:  # x^2 = r^2/2 + T2 / 2
        kept[0] += following * square / 2
    elif degree == 2:  # x^3 = 3/4 r^2 x + T3 / 4
        kept[1] += following * square * 3 / 4
    else:  # x^4 = r^2 x^2 - r^4/8 + T4 / 8
        kept[2] += following * square
        kept[0] -= following * square * square / 8
    return kept


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


def polar_rotation(matrix: Tensor, shrink: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    r"""Return rot(K) - I for rot(K) = (I + K)(I - K^2)^(-1/2), the polar factor of I + K, K skew.

    Args:
        matrix: M = K / scale, shape ``(k, m, m)``.
        shrink: S = (I + K'K)^(-1/2) - I, from :func:`roots`.
        scale: Factor of K.

    Returns: S + K + K S; rot(K) is orthogonal and equal to exp(K) to second order.
    """
    if isinstance(scale, Tensor):
        matrix, scale = matrix * scale, 1.0
    return torch.baddbmm(matrix, matrix, shrink, beta=scale, alpha=scale).add_(shrink)


def exponential(step: Tensor) -> Tensor:
    """Return expm(K) for ``(k, m, m)``, orthogonal for skew K."""
    # For a single matrix torch 2.13 stops the series at an error near 1e-11 in float64.
    alone = step.size(0) == 1 and step.dtype in (torch.float64, torch.complex128)
    batch = step.expand(2, -1, -1) if alone else step
    rotation: Tensor = torch.linalg.matrix_exp(batch)
    return rotation[: step.size(0)]


def cayley(step: Tensor) -> Tensor:
    """Return (I - K/2)^(-1) (I + K/2), orthogonal for skew K; one LU solve without host sync."""
    half = step / 2
    left = add_to_diagonal_(-half, 1.0)
    rotation: Tensor = torch.linalg.solve_ex(left, add_to_diagonal_(half, 1.0)).result
    return rotation


def cholesky_factor(own: Tensor) -> Tensor:
    """Return R^(-1), for which A R^(-1) is the Q of A = QR with a positive diagonal of R.

    Args:
        own: A'A, positive definite, ``(k, m, m)``.

    Note: One Cholesky factorisation and one triangular solve of m x m, no host sync. A product with
        R^(-1) takes a quarter of the time of a triangular solve with a tall A. X'X - I of the
        result is eps times the condition of ``own``; a second pass removes it while it is below 1.
    """
    upper, _ = torch.linalg.cholesky_ex(own, upper=True)
    factor: Tensor = torch.linalg.solve_triangular(upper, _identity_for(own), upper=True)
    return factor
