r"""Unitary matrices as products of cheap factors: URNN and EURNN.

Reference: Arjovsky, Shah & Bengio (ICML 2016); Jing et al. (ICML 2017).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack, override

from stiefel_opt.errors import check_count, fail
from stiefel_opt.parametrizations.base import BaseOptions, Free, Parametrization
from stiefel_opt.parametrizations.init import gaussian, pair_rotations
from stiefel_opt.parametrizations.reflections import check_lengths


def urnn(phases: Tensor, vectors: Tensor, permutation: Tensor) -> Tensor:
    r"""Return :math:`D_3 H_2 F^{-1} D_2 \Pi H_1 F D_1`.

    D are diagonal phases, H reflections, F the unitary Fourier matrix, Pi a permutation of rows.

    Args:
        phases: Real angles of D1, D2, D3, ``(..., 3, N)``.
        vectors: Nonzero complex columns of H1, H2, ``(..., N, 2)``.
        permutation: Row i of Pi x is row ``permutation[i]`` of x, ``(N,)``.

    Returns: Unitary matrices, ``(..., N, N)``, of the dtype of the vectors.
    Raises:
        ValueError: for shapes that do not fit, or a zero vector (looked at on the CPU only).
        TypeError: for real vectors.
    Note: O(N^2 log N) flops; 7N parameters, a small part of the unitary group.
    Reference: Arjovsky, Shah & Bengio (ICML 2016), eq. (6).
    """
    n = vectors.size(-2) if vectors.ndim > 1 else 0
    if not vectors.is_complex():
        raise TypeError(fail("vectors", "be complex", vectors.dtype))
    if n < 1 or vectors.size(-1) != 2 or phases.shape[-2:] != (3, n) or permutation.shape != (n,):
        shapes = f"{tuple(phases.shape)}, {tuple(vectors.shape)} and {tuple(permutation.shape)}"
        condition = "be (..., 3, N), (..., N, 2) and (N,)"
        raise ValueError(fail("phases, vectors, permutation", condition, shapes))
    lengths = (vectors.conj() * vectors).real.sum(-2)  # abs has no curvature at 0
    check_lengths(lengths)
    phases = phases.to(lengths.dtype)  # converted apart, as by module.double()
    first, second, third = torch.polar(torch.ones_like(phases), phases).unbind(-2)
    scaled = vectors * (2 / lengths).unsqueeze(-2)
    result: Tensor = torch.fft.fft(torch.diag_embed(first), dim=-2, norm="ortho")
    result = result - scaled[..., :1] @ (vectors[..., :1].mH @ result)
    result = second.unsqueeze(-1) * result.index_select(-2, permutation)
    result = torch.fft.ifft(result, dim=-2, norm="ortho")
    result = result - scaled[..., 1:] @ (vectors[..., 1:].mH @ result)
    return third.unsqueeze(-1) * result


def eurnn(phases: Tensor, angles: Tensor) -> Tensor:
    r"""Return :math:`D F_1 \cdots F_L`, layers of rotations of neighbouring pairs.

    The block of a pair is [[e^{ip} cos t, -sin t], [e^{ip} sin t, cos t]]. F1, F3, ... pair
    (0, 1), (2, 3), ..., and F2, F4, ... pair (1, 2), (3, 4), ...

    Args:
        phases: Real angles of D, ``(..., N)``.
        angles: t and p of every pair, ``(..., L, 2, N // 2)``; where N is even the layers F2, F4,
            ... have one pair less and do not read their last column.

    Returns: Unitary matrices, ``(..., N, N)``; L = N reaches all of them but a set of measure zero.
    Raises:
        ValueError: for shapes that do not fit.
    Note: L passes over N x N, one after the other.
    Reference: Jing et al. (ICML 2017), eq. (6), with the phase on the side of the columns.
    """
    n = phases.size(-1) if phases.ndim else 0
    if n < 2 or angles.ndim < 3 or angles.shape[-2:] != (2, n // 2):
        shapes = f"{tuple(phases.shape)} and {tuple(angles.shape)}"
        condition = "be (..., N) and (..., L, 2, N // 2), N >= 2"
        raise ValueError(fail("phases, angles", condition, shapes))
    dtype = torch.promote_types(torch.promote_types(phases.dtype, angles.dtype), torch.float32)
    phases, angles = phases.to(dtype), angles.to(dtype)
    result = torch.diag_embed(torch.polar(torch.ones_like(phases), phases))
    for number, layer in enumerate(angles.unbind(-3)):
        start, count = number % 2, (n - number % 2) // 2
        stop = start + 2 * count
        turn, phase = layer[..., :count].unsqueeze(-3).unbind(-2)
        # F acts on columns: (a, b) -> (e^{ip} (a cos + b sin), b cos - a sin)
        left, right = result[..., start:stop:2], result[..., start + 1 : stop : 2]
        cosine, sine = turn.cos(), turn.sin()
        rotated = torch.polar(torch.ones_like(phase), phase) * (left * cosine + right * sine)
        pairs = torch.stack([rotated, right * cosine - left * sine], dim=-1).flatten(-2)
        result = torch.cat([result[..., :start], pairs, result[..., stop:]], dim=-1)
    return result


# ---- the module -----------------------------------------------------------------------------


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

    def __init__(self, layers: int | None = None, **base: Unpack[BaseOptions]) -> None:
        super().__init__(**base)
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
