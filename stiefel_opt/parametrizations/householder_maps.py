"""Products of reflections as parametrizations: CWY, T-CWY and Householder."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack, override

from stiefel_opt.errors import check_count, fail
from stiefel_opt.parametrizations.base import BaseOptions, Free, Parametrization
from stiefel_opt.parametrizations.init import gaussian, householder_vectors, reflections_of
from stiefel_opt.parametrizations.reflections import cwy, generalized_householder, householder, tcwy


class _Reflecting(Parametrization):
    """A product of a number of factors."""

    def __init__(self, reflections: int | None = None, **base: Unpack[BaseOptions]) -> None:
        super().__init__(**base)
        check_count("reflections", reflections, or_none=True)
        self.reflections = reflections


class CWY(_Reflecting):
    r"""Products of L Householder reflections, compact: :math:`Q = I - V S^{-1} V'`.

    Free: nonzero columns V, ``(..., n, L)``. A tall matrix is always reached, a square one with
    L = N if its determinant is (-1)^N, with L < N if I - Q has rank at most L and the determinant
    is (-1)^L. Registration negates the last row of a square matrix with the wrong determinant, and
    initialises at random for L < N. Complex reflections miss the phases of the columns: for L >= m
    these are a fixed diagonal factor, set on registration and assignment, and every matrix is
    reached; for L < N there is none, and own products are reached.

    Args:
        reflections: L. Default: m, the number of columns. A tall matrix needs at least m.
        manifold, generator: as in :class:`Parametrization`.

    Raises:
        ValueError: for L > N, or L < m with m < n.
    Note: 2.5 products of N x N, backward 5.5, for L = N. No factorisation.
    Reference: Likhosherstov et al. (AISTATS 2021).
    """

    phases: Tensor | None
    columns: int | None = None
    buffer_names = ("phases",)

    @override
    def reach(self) -> str:
        count = self.reflections or "n"
        return f"a product of {count} reflections (determinant (-1)^{count} if square)"

    @override
    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        count = self.reflections or m
        if count > n:
            raise ValueError(fail("reflections", f"be at most {n}, the length of a column", count))
        if count < m < n:
            condition = f"be at least {m}, the columns of a tall matrix"
            raise ValueError(fail("reflections", condition, count))
        self.reflections, self.columns = count, m

    @override
    def starts_at_random(self, m: int) -> bool:
        return (self.reflections or m) < m

    @override
    def point(self, *free: Tensor) -> Tensor:
        (vectors,) = free
        return self._turned(cwy(vectors, self.columns))

    @override
    def free(self, point: Tensor) -> Free:
        m, count = point.size(-1), self.reflections or point.size(-1)
        if count < m:
            return reflections_of(point, count)
        vectors = householder_vectors(point)
        if point.is_complex():
            overlap = (tcwy(vectors).conj() * point).sum(-2)
            self._set_buffer("phases", overlap / overlap.abs())
        if count == m:
            return vectors
        # Reflections of the last axis, first to act, do not change the leading columns.
        idle = torch.zeros(*point.shape[:-1], count - m, dtype=point.dtype, device=point.device)
        idle[..., -1, :] = 1
        return torch.cat([vectors, idle], dim=-1)

    def _turned(self, point: Tensor) -> Tensor:
        if self.phases is None:
            return point
        # sgn: of length 1 to rounding, also after a change of dtype
        return point * self.phases.unsqueeze(-2).to(point.dtype).sgn()

    @override
    def determinant(self, n: int) -> int | None:
        return -1 if (self.reflections or n) % 2 else 1

    @override
    def start(self, point: Tensor) -> Free:
        if (count := self.reflections or point.size(-1)) < point.size(-1):
            return gaussian((*point.shape[:-1], count), point, self.generator)
        return super().start(point)


class Householder(CWY):
    r"""Products of L Householder reflections, one after the other: the reference for :class:`CWY`.

    Args:
        reflections, manifold, generator: as in :class:`CWY`, which is the same map and faster.
    Raises:
        ValueError: as :class:`CWY`.
    Note: L passes over the matrix, 4 L n m flops.
    Reference: Mhammedi et al. (ICML 2017).
    """

    @override
    def point(self, *free: Tensor) -> Tensor:
        (vectors,) = free
        return self._turned(householder(vectors, self.columns))


class TCWY(CWY):
    r"""Truncated CWY, :math:`[I; 0] - V S^{-1} V_1'`: m reflections for m columns, onto St(n, m).

    Free: nonzero columns V, ``(..., n, m)``, as many numbers as the weight has. Every tall matrix
    is reached, a square one if its determinant is (-1)^n.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Note: 4 n m^2 + m^3 flops, the least of the maps of tall matrices; backward 8 n m^2.
    Reference: Likhosherstov et al. (AISTATS 2021), Theorem 3.
    """

    def __init__(self, **base: Unpack[BaseOptions]) -> None:
        super().__init__(**base)

    @override
    def point(self, *free: Tensor) -> Tensor:
        return self._turned(tcwy(*free))


class GeneralizedHouseholder(_Reflecting):
    r"""Products :math:`H_n \cdots H_1` of :math:`I - b_j k_j k_j' / |k_j|^2`, b in (0, 2).

    Free: keys ``(..., N, n)`` and gates ``(..., n)`` with b = 2 sigmoid(gate). Square matrices of
    norm at most 1, not orthogonal. The map has no inverse: registration takes random keys with
    b = 1, assignment is an error.

    Args:
        reflections: n, the number of factors. Default: N.
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for a weight that is not square.
    Note: 2 N^2 n + 3 N n^2 flops, a triangular solve among them.
    Reference: Siems et al., DeltaProduct (2025).
    """

    orthonormal = False

    @override
    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        if n != m:
            raise ValueError(fail("weight", "be square", f"{n} x {m}"))

    @override
    def point(self, *free: Tensor) -> Tensor:
        keys, gates = free
        return generalized_householder(keys, 2 * torch.sigmoid(gates))

    @override
    def start(self, point: Tensor) -> Free:
        count = self.reflections or point.size(-1)
        keys = gaussian((*point.shape[:-1], count), point, self.generator)
        return keys, torch.zeros_like(keys[..., 0, :].real)
