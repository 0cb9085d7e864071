"""URNN and EURNN as parametrizations of complex square weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import check_count, fail
from stiefel_opt.functional import eurnn, urnn
from stiefel_opt.parametrizations.base import Free, Parametrization
from stiefel_opt.parametrizations.init import gaussian, pair_rotations
from stiefel_opt.tags import Stiefel


class _Unitary(Parametrization):
    """Complex square weights from angles; a given matrix need not have any."""

    @override
    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        if not dtype.is_complex:
            raise TypeError(fail("weight", "be complex for URNN and EURNN", dtype, "use 'cwy'"))
        if n != m or n < 2:
            raise ValueError(fail("weight", "be square, 2 x 2 or larger", f"{n} x {m}"))

    @override
    def starts_at_random(self, m: int) -> bool:
        return True

    def _angles(self, like: Tensor, *shape: int) -> Tensor:
        device = like.device if self.generator is None else self.generator.device
        draw = torch.rand(shape, generator=self.generator, dtype=torch.float64, device=device)
        return ((2 * draw - 1) * math.pi).to(like.device, like.real.dtype)


class URNN(_Unitary):
    r"""Unitary :math:`D_3 H_2 F^{-1} D_2 \Pi H_1 F D_1` with 7N numbers.

    Free: phases ``(..., 3, N)`` and complex vectors ``(..., N, 2)``; the permutation is a buffer.
    Reached is a small part of the unitary matrices, and no inverse is known: registration
    initialises at random, and assignment is an error.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        TypeError: for a real weight.
        ValueError: for a weight that is not square.
    Note: O(N^2 log N) flops.
    Reference: Arjovsky, Shah & Bengio (ICML 2016).
    """

    permutation: Tensor | None
    buffer_names = ("permutation",)

    @override
    def point(self, *free: Tensor) -> Tensor:
        phases, vectors = free
        permutation = self.permutation
        if permutation is None:
            permutation = torch.arange(vectors.size(-2), device=vectors.device)
        return urnn(phases, vectors, permutation)

    @override
    def start(self, point: Tensor) -> Free:
        *lead, n, _ = point.shape
        device = point.device if self.generator is None else self.generator.device
        permutation = torch.randperm(n, generator=self.generator, device=device)
        self.permutation = permutation.to(point.device)
        vectors = gaussian((*lead, n, 2), point, self.generator)
        return self._angles(point, *lead, 3, n), vectors


class EURNN(_Unitary):
    r"""Unitary :math:`D F_1 \cdots F_L`, layers of rotations of neighbouring pairs.

    Free: phases ``(..., N)`` and angles ``(..., L, 2, N // 2)``. L = N reaches all unitary
    matrices. Registration initialises at random; ``start`` and assignment need L >= N: with fewer
    layers no inverse is known.

    Args:
        layers: L. Default: N.
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        TypeError: for a real weight.
        ValueError: for a weight that is not square, or layers < 1.
    Note: L passes over N x N, one after the other.
    Reference: Jing et al. (ICML 2017).
    """

    def __init__(
        self,
        layers: int | None = None,
        *,
        manifold: Stiefel | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(manifold=manifold, generator=generator)
        check_count("layers", layers, or_none=True)
        self.layers = layers

    @override
    def point(self, *free: Tensor) -> Tensor:
        return eurnn(*free)

    @override
    def starts_at_random(self, m: int) -> bool:
        return self.layers is not None and self.layers < m

    @override
    def free(self, point: Tensor) -> Free | None:
        n = point.size(-1)
        layers = self.layers or n
        if layers < n:
            return None
        phases, angles = pair_rotations(point)
        idle = angles.new_zeros(*angles.shape[:-3], layers - n, *angles.shape[-2:])
        return phases, torch.cat([angles, idle], dim=-3)

    @override
    def start(self, point: Tensor) -> Free:
        *lead, n, _ = point.shape
        layers = self.layers or n
        return self._angles(point, *lead, n), self._angles(point, *lead, layers, 2, n // 2)
