r"""Unitary matrices as products of cheap factors: URNN and EURNN.

Reference: Arjovsky, Shah & Bengio (ICML 2016); Jing et al. (ICML 2017).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel_opt.errors import fail
from stiefel_opt.functional.reflections import check_lengths


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
