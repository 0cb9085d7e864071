r"""Orthogonal weight normalization: the polar factor of centred columns.

Reference: Huang et al., Orthogonal Weight Normalization (AAAI 2018).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stiefel_opt.errors import fail
from stiefel_opt.numerics import (
    finest_dtype,
    full_precision,
    no_autocast,
    polar,
    polar_factor,
    readable,
)
from stiefel_opt.parametrizations.base import Free, Parametrization

# Rounding: the smallest singular value of the centred columns over the largest; these over V.
_LEAST: Final = 1e-6
_CENTRED: Final = 1e-9


@full_precision
def own_map(free: Tensor) -> Tensor:
    r"""Return :math:`V (V'V)^{-1/2}` for the columns of ``free`` less their means.

    Args:
        free: Matrices ``(..., n, m)`` with m <= n - 1 whose centred columns are independent.

    Returns: Matrices with orthonormal columns that sum to zero, ``(..., n, m)``.
    Raises:
        ValueError: for m >= n: centred columns span at most n - 1 dimensions; on a CPU, for
            centred columns that are dependent.
    Note: One singular value decomposition, in float64 where the device has it, which waits for the
        device; the derivative is that of :func:`stiefel_opt.polar`.
    Reference: Huang et al. (AAAI 2018), eq. (5).
    """
    if free.ndim < 2 or not 1 <= free.size(-1) < free.size(-2):
        condition = "have more rows than columns: OWN centres the columns"
        remedy = "use another map for square matrices"
        raise ValueError(fail("free", condition, free, remedy))
    precise = free.to(finest_dtype(free))
    centred = precise - precise.mean(dim=-2, keepdim=True)
    point, gap = polar(centred)
    _check_rank(gap, centred, precise)
    return point.to(free.dtype)


def _check_rank(gap: Tensor, centred: Tensor, free: Tensor) -> None:
    """Raise where the centred columns are dependent, if looking costs nothing: on a CPU."""
    size, whole = torch.linalg.matrix_norm(centred), torch.linalg.matrix_norm(free)
    is_independent = readable((gap > 2 * _LEAST) & (size > _CENTRED * whole))
    if is_independent is None or is_independent.is_meta:
        return
    if not bool(is_independent.all()):
        wanted = "have independent columns that are not constant"
        remedy = "set it anew, or take another map: map='tcwy'"
        raise ValueError(fail("free parameter of the map 'own'", wanted, "dependent ones", remedy))


# ---- the module -----------------------------------------------------------------------------


class OWN(Parametrization):
    r"""Polar factor of centred columns, :math:`V (V'V)^{-1/2}`: columns that sum to zero.

    Free: V, of the shape of the matrices. Reached are the matrices whose columns sum to zero;
    registration centres the columns and takes the polar factor.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for a square weight: centred columns are dependent.
    Note: One singular value decomposition of n x m.
    Reference: Huang et al. (AAAI 2018).
    """

    @override
    def reach(self) -> str:
        return "orthonormal with columns (wide: rows) that sum to zero"

    @override
    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        if n == m:
            condition = "not be square: OWN centres the columns, which makes them dependent"
            raise ValueError(fail("weight", condition, f"{n} x {m}", "use 'tcwy'"))

    @override
    def point(self, *free: Tensor) -> Tensor:
        return own_map(*free)

    @override
    def free(self, point: Tensor) -> Free:
        return point

    @override
    def start(self, point: Tensor) -> Free:
        # In a basis that a reflection takes (1, ..., 1) out of: columns of zero may be completed.
        n = point.size(-2)
        mirror = point.new_full((n, 1), n**-0.5)
        mirror[0] += 1
        mirror = mirror / torch.linalg.vector_norm(mirror)

        def reflected(matrices: Tensor) -> Tensor:
            image: Tensor = matrices - 2 * mirror @ (mirror.mH @ matrices)
            return image

        with no_autocast(point):
            centred = polar_factor(reflected(point)[..., 1:, :])
            return reflected(nn.functional.pad(centred, (0, 0, 1, 0)))
