r"""Exponential and Cayley transform of skew matrices, acting on a base point.

A free matrix P of the shape of the base point X0 gives the skew-Hermitian

    A = P X0' - X0 P' = B C',   B = [P, X0],   C = [X0, -P],

of rank 2m. Without base X0 = [I; 0], so that A = P - P' for square P. A tall result never forms an
n x n matrix: exp(A) X0 = X0 + B phi(C'B) C'X0 with phi(z) = (e^z - 1)/z, and the Cayley transform
has (I - C'B/2)^{-1} in the place of phi (Sherman-Morrison-Woodbury).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.errors import fail
from stiefel_opt.numerics.device import finest_dtype, full_precision, readable
from stiefel_opt.numerics.geometry import newton_schulz
from stiefel_opt.numerics.linalg import exponential, solution

# eps |P| from which rounding is removed from a point, and from which nothing else is left.
_ROUNDING: Final = 1e-5
_LOST: Final = 0.12


@full_precision
def exponential_map(free: Tensor, base: Tensor | None = None) -> Tensor:
    r"""Return :math:`\exp(P X_0' - X_0 P') X_0`, the exponential map of the canonical metric.

    Args:
        free: P, any matrices ``(..., n, m)`` with n >= m.
        base: X0, orthonormal, same shape. Default: the first m columns of I.

    Returns: Matrices with orthonormal columns, ``(..., n, m)``.
    Raises:
        ValueError: for wide matrices, a base of another shape, and, where looking is free, for P
            so long that its exponential is rounding: above 1e6 in float32.
    Note: The exponential of an n x n matrix, or of a 3m x 3m one and four products n x m by m x m
        where 2m < n.
    Reference: Lezcano-Casado & Martinez-Rubio (ICML 2019); Edelman, Arias & Smith (SIMAX 1998).
    """
    _check(free, base)
    n, m = free.shape[-2:]
    if 2 * m >= n:
        return _settled(_apply(exponential(_skew(free, base)), base, m), free)
    left, core, image = _factors(free, base)
    # The upper right block of exp([[Z, Y], [0, 0]]) is phi(Z) Y.
    padded = torch.cat([core, image], dim=-1)
    padded = torch.cat([padded, torch.zeros_like(padded[..., :m, :])], dim=-2)
    phi = exponential(padded)[..., : 2 * m, 2 * m :]
    return _settled(_base(free, base) + left @ phi, free)


@full_precision
def cayley_map(free: Tensor, base: Tensor | None = None) -> Tensor:
    r"""Return :math:`(I - A/2)^{-1} (I + A/2) X_0` for :math:`A = P X_0' - X_0 P'`.

    Args:
        free, base: as in :func:`exponential_map`.

    Returns: Matrices with orthonormal columns, ``(..., n, m)``.
    Raises:
        ValueError: as :func:`exponential_map`.
    Note: One LU solve of n x n, or of 2m x 2m and four products n x m by m x m where 2m < n.
    Reference: Helfrich, Willmott & Ye (ICML 2018); Likhosherstov et al. (AISTATS 2021), Lemma 1.
    """
    _check(free, base)
    n, m = free.shape[-2:]
    if 2 * m >= n:
        half = _skew(free, base) / 2
        eye = torch.eye(n, dtype=free.dtype, device=free.device)
        return _settled(solution(eye - half, _apply(eye + half, base, m)), free)
    left, core, image = _factors(free, base)
    eye = torch.eye(2 * m, dtype=free.dtype, device=free.device)
    return _settled(_base(free, base) + left @ solution(eye - core / 2, image), free)


def _settled(point: Tensor, free: Tensor) -> Tensor:
    """Remove from X'X = I what a long P makes of rounding, about eps |P|; raise where it is all.

    Where looking costs nothing: a CPU, not traced.
    """
    values = readable(free)
    if values is None or values.is_meta:
        return point
    eps, precise = torch.finfo(free.dtype).eps, finest_dtype(values)
    rounding = eps * float(torch.linalg.vector_norm(values, dim=(-2, -1), dtype=precise).amax())
    if _LOST < rounding < math.inf:
        remedy = "take a smaller learning rate, or set it anew"
        longest = _LOST / eps
        raise ValueError(
            fail("free parameter of the map", f"be shorter than {longest:.0e}", free, remedy)
        )
    return newton_schulz(point, 2) if rounding > _ROUNDING else point


def _skew(free: Tensor, base: Tensor | None) -> Tensor:
    """Return A, n x n."""
    if base is not None:
        product = free @ base.mH
    else:
        product = torch.nn.functional.pad(free, (0, free.size(-2) - free.size(-1)))
    return product - product.mH


def _apply(matrix: Tensor, base: Tensor | None, columns: int) -> Tensor:
    return matrix[..., :columns] if base is None else matrix @ base


def _base(free: Tensor, base: Tensor | None) -> Tensor:
    if base is not None:
        return base
    return torch.eye(*free.shape[-2:], dtype=free.dtype, device=free.device).expand(free.shape)


def _factors(free: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return B, C'B and C'X0 for B = [P/s, X0], C = [s X0, -P]; s near |P| balances C'B."""
    point = _base(free, base)
    m = free.size(-1)
    inner = free[..., :m, :] if base is None else base.mH @ free
    square = free.mH @ free
    norm = square.detach().abs().sum(-1, keepdim=True).amax(-2, keepdim=True).sqrt()
    size = torch.where(norm > 0, norm, 1.0)
    eye = torch.eye(m, dtype=free.dtype, device=free.device).expand(square.shape)
    top = torch.cat([inner, size * eye], dim=-1)
    bottom = torch.cat([-square / size, -inner.mH], dim=-1)
    left = torch.cat([free / size, point], dim=-1)
    image = torch.cat([size * eye, -inner.mH], dim=-2)
    return left, torch.cat([top, bottom], dim=-2), image


def _check(free: Tensor, base: Tensor | None) -> None:
    shape = tuple(free.shape)
    if free.ndim < 2 or 0 in shape[-2:] or shape[-1] > shape[-2]:
        raise ValueError(fail("free", "be tall or square matrices (..., n, m)", f"shape {shape}"))
    if base is not None and base.shape != free.shape:
        raise ValueError(fail("base", f"have the shape {shape} of free", tuple(base.shape)))
