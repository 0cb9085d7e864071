"""Ways to a start: rotations as in the literature, reflections and logarithm of a given matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel_opt._checks import check_choice, fail
from stiefel_opt.functional.reflections import cwy_factors

__all__ = [
    "cayley_signs",
    "helfrich",
    "henaff",
    "householder_vectors",
    "logarithm",
    "reflections_of",
]

_PANEL = 32  # columns eliminated one by one before the others see them as one product


# ---- random rotations --------------------------------------------------------------------------


def henaff(
    size: int,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return rotations of the planes (0, 1), (2, 3), ... by angles uniform in (-pi, pi).

    Args:
        size: N; for odd N the last diagonal entry is 1.
        generator: Source of the angles. Default: torch's global one.
        dtype, device: Default: torch's.

    Returns: ``(N, N)``, determinant 1.
    Raises:
        ValueError: for a size that is not a positive integer.
    Reference: Henaff, Szlam & LeCun (ICML 2016).
    """
    draw = _uniform(size, generator, dtype, device)
    return _block_rotation((2 * draw - 1) * math.pi, size)


def helfrich(
    size: int,
    *,
    through: str = "exponential",
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Return rotations of the planes (0, 1), (2, 3), ... by angles in the first quadrant.

    With t uniform in (0, pi/2) the skew entries are s = sqrt((1 - cos t) / (1 + cos t)) = tan(t/2).
    Through the Cayley transform (I + A)^{-1}(I - A) they turn by t, through the exponential by s.

    Args:
        size, generator, dtype, device: as in :func:`henaff`.
        through: "exponential" (EXPRNN, CWY) or "cayley" (SCORNN). Default: "exponential".

    Returns: ``(N, N)``, determinant 1.
    Raises:
        ValueError: for a size that is not a positive integer, or another map.
    Reference: Helfrich, Willmott & Ye (ICML 2018).
    """
    check_choice("through", through, ("cayley", "exponential"))
    angles = _uniform(size, generator, dtype, device) * (math.pi / 2)
    return _block_rotation(angles if through == "cayley" else (angles / 2).tan(), size)


def _uniform(
    size: int,
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Tensor:
    if type(size) is not int or size < 1:
        raise ValueError(fail("size", "be a positive integer", repr(size)))
    draw_on = None if generator is None else generator.device
    return torch.rand(size // 2, generator=generator, dtype=dtype, device=draw_on or device).to(
        device or draw_on
    )


def _block_rotation(angles: Tensor, size: int) -> Tensor:
    cosine, sine = angles.cos(), angles.sin()
    diagonal = torch.ones(size, dtype=angles.dtype, device=angles.device)
    diagonal[: 2 * len(angles)] = cosine.repeat_interleave(2)
    beside = torch.zeros(max(size - 1, 0), dtype=angles.dtype, device=angles.device)
    beside[: 2 * len(angles) : 2] = sine
    return torch.diag(diagonal) + torch.diag(beside, -1) - torch.diag(beside, 1)


# ---- from a given matrix -----------------------------------------------------------------------


def householder_vectors(point: Tensor) -> Tensor:
    r"""Return vectors with ``tcwy(vectors) == point``, by elimination of one column after another.

    For the current column q, :math:`s_2 = |q_{2:}|^2`, the vector is q - e_1; its first entry is
    :math:`-s_2/(1 + q_1)` for positive q_1, where the difference would cancel. They have length 1.

    Args:
        point: Orthonormal columns, ``(..., n, m)``, n >= m.

    Returns: ``(..., n, m)``. What cannot be reached is missed by the sign (complex: the phase) of
        columns: a square matrix with determinant -(-1)^n in its last one, a complex matrix where
        the current q_1 is not real.
    Note: 2 n m^2 flops, m steps one after the other: for starts.
    Reference: Likhosherstov et al. (AISTATS 2021), Theorems 1 and 3.
    """
    work, vectors = point.clone(), torch.zeros_like(point)
    columns = point.size(-1)
    for start in range(0, columns, _PANEL):
        stop = min(start + _PANEL, columns)
        for column in range(start, stop):
            vector = _reflector(work[..., column:, column])
            vectors[..., column:, column] = vector
            rest = work[..., column:, column + 1 : stop]
            rest -= 2 * vector.unsqueeze(-1) * (vector.unsqueeze(-2).conj() @ rest)
        if stop < columns:
            unit, half_gram = cwy_factors(vectors[..., start:, start:stop])
            rest = work[..., start:, stop:]
            rest -= unit @ torch.linalg.solve_triangular(half_gram.mH, unit.mH @ rest, upper=False)
    return vectors


def _reflector(column: Tensor) -> Tensor:
    """Return the unit vector that reflects ``column``, of length 1, to the first axis."""
    column = column / torch.linalg.vector_norm(column, dim=-1, keepdim=True)
    first = column[..., :1]
    if column.is_complex():
        phase = torch.where(first.real < 0, -first, first) / first.abs()
        column = column * torch.where(first == 0, 1, phase).conj()
        first = column[..., :1].real
    below = column[..., 1:].abs().square().sum(-1, keepdim=True)
    head = torch.where(first > 0, -below / (1 + first), first - 1)
    vector = torch.cat([head.to(column.dtype), column[..., 1:]], dim=-1)
    # The column is the axis already: reflect in a direction that leaves it alone.
    idle = (first > 0) & (below < torch.finfo(below.dtype).tiny ** 0.5)
    last = torch.zeros_like(vector)
    last[..., -1] = 1
    vector = torch.where(idle, last, vector)
    unit: Tensor = vector / torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return unit


def reflections_of(point: Tensor, count: int) -> Tensor:
    """Return ``count`` < n vectors of reflections whose product is the square ``point``.

    They span the range of I - Q, which has at most ``count`` dimensions if such a product exists;
    if not, the product of the vectors is another matrix.

    Note: a singular value decomposition of n x n.
    """
    eye = torch.eye(point.size(-1), dtype=point.dtype, device=point.device)
    span = torch.linalg.svd(eye - point).U[..., :count]
    vectors: Tensor = span @ householder_vectors(span.mH @ point @ span)
    return vectors


def cayley_signs(top: Tensor) -> Tensor:
    """Return signs d with X1 + diag(d) well conditioned, X1 the m x m top of orthonormal columns.

    Elimination with d_j the sign of the j-th pivot makes every pivot at least 1 in absolute value.

    Reference: Ballard et al. (IPDPS 2014); O'Dorney (2014).
    """
    work = top.clone()
    signs = []
    for column in range(top.size(-1)):
        pivot = work[..., column, column]
        sign = torch.where(pivot.real < 0, -1.0, 1.0).to(pivot.real.dtype)
        signs.append(sign)
        below = work[..., column + 1 :, column] / (pivot + sign).unsqueeze(-1)
        row = work[..., column, column + 1 :]
        work[..., column + 1 :, column + 1 :] -= below.unsqueeze(-1) * row.unsqueeze(-2)
    return torch.stack(signs, dim=-1)


def logarithm(point: Tensor) -> Tensor:
    r"""Return skew-Hermitian A with exp(A) = Q and angles in [-pi, pi], for square orthogonal Q.

    The Hermitian part C and -i times the skew part S of Q commute, so an eigenbasis of C + t S,
    t no particular number, is one of both: cos and sin of the angles. Real Q with determinant 1 has
    the eigenvalue -1 an even number of times: its space is paired into half turns.

    Note: two Hermitian eigendecompositions of n x n; for starts.
    """
    adjoint = point.mH
    cosine, sine = (point + adjoint) / 2, (point - adjoint) / 2
    mixed = cosine + sine * -0.7320508j
    basis = torch.linalg.eigh(mixed).eigenvectors
    cosines = (basis.conj() * (cosine.to(basis.dtype) @ basis)).sum(-2).real
    sines = (basis.conj() * (sine.to(basis.dtype) @ basis)).sum(-2).imag
    angles = torch.atan2(sines, cosines)
    if point.is_complex():
        unitary: Tensor = (basis * (1j * angles).unsqueeze(-2)) @ basis.mH
        return unitary
    half_turn = math.pi - angles.abs() < 1e-6
    turns = torch.where(half_turn, 0.0, angles)
    result: Tensor = ((basis * (1j * turns).unsqueeze(-2)) @ basis.mH).real
    if bool(half_turn.any()):
        projector = (basis * half_turn.unsqueeze(-2)) @ basis.mH
        values, vectors = torch.linalg.eigh(projector.real)
        vectors = vectors.flip(-1) * (values.flip(-1) > 0.5).unsqueeze(-2)
        pairs = vectors.size(-1) // 2 * 2
        left, right = vectors[..., 0:pairs:2], vectors[..., 1:pairs:2]
        half = math.pi * left @ right.mT
        result = result + half - half.mT
    return (result - result.mT) / 2
