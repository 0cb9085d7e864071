"""Initialisation: random rotations of the literature, and inverses of the maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel_opt.errors import check_choice, check_count
from stiefel_opt.numerics import logarithm as logarithm
from stiefel_opt.numerics import orientation
from stiefel_opt.parametrizations.reflections import cwy_factors

_PANEL = 32  # columns eliminated one by one before the others see them as one product


# ---- random initialisation ---------------------------------------------------------------------


def gaussian(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return Gaussian numbers of the kind of ``like``, drawn on the device of the generator."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


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


def draw_rotation(
    start: str, size: int, generator: torch.Generator | None, through: str = "exponential"
) -> Tensor:
    """Return the random initialisation of this name."""
    check_choice("start", start, ("helfrich", "henaff"))
    if start == "henaff":
        return henaff(size, generator=generator)
    return helfrich(size, through=through, generator=generator)


def _uniform(
    size: int,
    generator: torch.Generator | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Tensor:
    check_count("size", size)
    draw_on = None if generator is None else generator.device
    draw = torch.rand(size // 2, generator=generator, dtype=dtype, device=draw_on or device)
    return draw.to(device or draw_on)


def _block_rotation(angles: Tensor, size: int) -> Tensor:
    cosine, sine = angles.cos(), angles.sin()
    blocks = torch.stack([cosine, -sine, sine, cosine], dim=-1).view(-1, 2, 2)
    rest = angles.new_ones(size % 2, size % 2)
    rotation: Tensor = torch.block_diag(*blocks, rest)  # type: ignore[no-untyped-call]
    return rotation


# ---- from a given matrix -----------------------------------------------------------------------


def with_determinant(point: Tensor, sign: int) -> Tensor:
    """Return square real ``point``, its last row negated where the determinant is not ``sign``."""
    point, wrong = point.clone(), orientation(point) * sign < 0
    point[..., -1, :] *= torch.where(wrong, -1.0, 1.0).unsqueeze(-1)
    return point


def householder_vectors(point: Tensor) -> Tensor:
    r"""Vectors of the reflections with ``tcwy(vectors) == point``, by elimination of columns.

    For the current column q the vector is q - e_1 at length 1; its first entry is
    :math:`-|q_{2:}|^2 / (1 + q_1)` for positive q_1, where the difference would cancel.

    Args:
        point: Orthonormal columns, ``(..., n, m)``, n >= m.

    Returns: ``(..., n, m)``. What cannot be reached is missed by the sign (complex: the phase) of
        columns: a square matrix with determinant -(-1)^n in its last one, a complex matrix where
        the current q_1 is not real.
    Note: 2 n m^2 flops, m steps one after the other: for initial values.
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
    # The column is the axis already: reflect along an axis orthogonal to it.
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
    small = span.mH @ point @ span
    vectors = householder_vectors(small)
    if point.is_complex():
        solution, is_known = _complex_reflections(small)
        vectors = torch.where(is_known, solution, vectors)
    result: Tensor = span @ vectors
    return result


def _complex_reflections(point: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return m vectors whose reflections have the unitary m x m ``point`` as product, if any have.

    :math:`Q = I - V S^{-1} V'` with an invertible V says that S = V'MV is upper triangular with a
    real diagonal, for :math:`M = (I - Q)^{-1} = I/2 + iH`. So the next vector v has v'Hv = 0, and
    those after it are orthogonal to Mv.

    Returns: The vectors, ``(..., m, m)``, and where M exists, ``(..., 1, 1)``.
    Note: m Hermitian eigendecompositions, one after the other: for assignments.
    """
    size = point.size(-1)
    eye = torch.eye(size, dtype=point.dtype, device=point.device).expand(point.shape)
    solved = torch.linalg.solve_ex(eye - point, eye).result
    largest = solved.abs().amax(dim=(-2, -1), keepdim=True)
    known = largest < torch.finfo(largest.dtype).eps ** -0.5
    matrix, basis = torch.where(known, solved, eye), eye
    vectors = []
    for _ in range(size):
        values, directions = torch.linalg.eigh((matrix - matrix.mH) / 2j)
        high, low = values[..., -1:].clamp(min=0.0).sqrt(), (-values[..., :1]).clamp(min=0.0).sqrt()
        vector = high * directions[..., 0] + low * directions[..., -1]
        length = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
        vector = torch.where(length > 0, vector / length, directions[..., -1]).unsqueeze(-1)
        vectors.append(basis @ vector)
        rest = torch.linalg.qr(matrix @ vector, mode="complete").Q[..., 1:]
        matrix, basis = rest.mH @ matrix @ rest, basis @ rest
    return torch.cat(vectors, dim=-1), known


def pair_rotations(point: Tensor) -> tuple[Tensor, Tensor]:
    """Return phases and angles with ``eurnn(phases, angles) == point``, for square unitary points.

    Anti-diagonals of the lower triangle are nulled from the corner on, by turns from both sides;
    the turns from the left then move through the diagonal matrix that remains.

    Note: N^2 / 2 rotations of two rows or columns, one after the other: for assignments.
    Reference: Clements et al. (Optica 2016).
    """
    work, n = point.clone(), point.size(-1)
    lefts: list[tuple[int, Tensor, Tensor]] = []
    rights: list[tuple[int, Tensor, Tensor]] = []
    for diagonal in range(1, n):
        if diagonal % 2 != n % 2:  # the first turn belongs to the first (N even) or last layer
            for column in range(diagonal):
                row = n - diagonal + column
                pair = work[..., row - 1 : row + 1, :]
                high, low = pair[..., :1, column], pair[..., 1:, column]
                turn, phase = torch.atan2(low.abs(), high.abs()), (-low).angle() - high.angle()
                work[..., row - 1 : row + 1, :] = _pair_block(turn, phase) @ pair
                lefts.append((row - 1, turn, phase))
        else:
            for column in range(diagonal - 1, -1, -1):
                row = n - diagonal + column
                pair = work[..., column : column + 2]
                first, second = pair[..., row, :1], pair[..., row, 1:]
                turn, phase = torch.atan2(first.abs(), second.abs()), first.angle() - second.angle()
                work[..., column : column + 2] = pair @ _pair_block(turn, phase).mH
                rights.append((column, turn, phase))
    phases = work.diagonal(dim1=-2, dim2=-1).angle().clone()
    factors = []
    for first_row, turn, phase in reversed(lefts):  # F^H D = D' F'
        above, below = phases[..., first_row].clone(), phases[..., first_row + 1]
        phases[..., first_row] = math.pi - phase[..., 0] + below
        factors.append((first_row, turn[..., 0], math.pi + above - below))
    factors.reverse()
    factors += [(column, turn[..., 0], phase[..., 0]) for column, turn, phase in reversed(rights)]
    angles = phases.new_zeros(*point.shape[:-2], n, 2, n // 2)
    free_from = [0] * n  # the first layer in which a row is not turned yet
    for start, turn, phase in factors:
        layer = max(free_from[start], free_from[start + 1])
        layer += (layer - start) % 2
        free_from[start] = free_from[start + 1] = layer + 1
        angles[..., layer, 0, start // 2], angles[..., layer, 1, start // 2] = turn, phase
    return phases, angles


def _pair_block(turn: Tensor, phase: Tensor) -> Tensor:
    """Return [[e^{ip} cos t, -sin t], [e^{ip} sin t, cos t]] for angles ``(..., 1)``."""
    factor = torch.polar(torch.ones_like(phase), phase)
    top = torch.cat([factor * turn.cos(), -turn.sin()], dim=-1)
    return torch.stack([top, torch.cat([factor * turn.sin(), turn.cos() + 0j], dim=-1)], dim=-2)


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
