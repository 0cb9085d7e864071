"""Orthogonal weight normalization as a parametrization."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from stiefel_opt.errors import fail
from stiefel_opt.functional import own
from stiefel_opt.numerics import no_autocast, polar_factor
from stiefel_opt.parametrizations.base import Free, Parametrization


class OWN(Parametrization):
    r"""Polar factor of centred columns, :math:`V (V'V)^{-1/2}`: columns that sum to zero.

    Free: V, of the shape of the matrices. Reached are the matrices whose columns sum to zero;
    registration centres the columns and takes the polar factor.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for a square weight: centred columns are dependent.
    Note: 4 n m^2 flops and an eigendecomposition of m x m.
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
        return own(*free)

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
