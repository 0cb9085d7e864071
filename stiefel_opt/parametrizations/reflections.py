r"""Products of Householder reflections: one by one, compact (CWY), truncated, generalized.

With the vectors :math:`v_1, ..., v_L` as the columns of V and :math:`H(v) = I - 2 v v' / |v|^2`,

    H(v_1) ... H(v_L) = I - V S^{-1} V',   S = diag(V'V) / 2 + striu(V'V).

with ' the conjugate transpose. The identity needs S + S' = V'V and nothing else: vectors need not
have unit length (between 1e-15 and 1e15: squares must not under- or overflow), and the diagonal
from the same Gram matrix keeps its rounding out of the result.

In float32, max abs of Q'Q - I is 1e-7 for L = 16 and 5e-7 for L = N = 256 at Gaussian vectors, 1e-6
at vectors made from a given Q (N = 128); trainings of hundreds or thousands of steps of SGD, Adam
or RMSprop leave it at 1e-6 to 1e-5. For T-CWY with 16 to 256 columns it is 1e-7 to 4e-7, after
1,000 steps at most 5e-7. What grows with L is the rounding E of the Gram matrix, which comes back
as W'EW with W = S^{-1} V'. A diagonal of exactly 1/2 for unit vectors would add the error of their
lengths.

Reference: Likhosherstov et al., CWY Parametrization (AISTATS 2021, arXiv 2004.08675).
"""

from __future__ import annotations

import torch
from torch import Tensor

from stiefel_opt.errors import counted, fail
from stiefel_opt.numerics import full_precision, readable


@full_precision
def householder(vectors: Tensor, columns: int | None = None, *, skip_zeros: bool = False) -> Tensor:
    r"""Return :math:`H(v_1) \cdots H(v_L)`, one reflection after the other: slow, as :func:`cwy`.

    Args:
        vectors: Nonzero columns, ``(..., N, L)``.
        columns: M, return only the first M columns of the product. Default: all N.
        skip_zeros: Leave zero vectors out: their factor is the identity, their gradient zero.

    Returns: Orthogonal (complex: unitary) matrices, ``(..., N, M)``.
    Raises:
        ValueError: for L > N, or a zero vector (looked at on the CPU only).
    Note: L passes over N x M, 4 L N M flops.
    Reference: Mhammedi et al. (ICML 2017).
    """
    columns = _check_vectors(vectors, columns)
    lengths = (vectors.conj() * vectors).real.sum(-2)  # abs has no curvature at 0
    result = _leading_columns(vectors, columns)
    scaled = vectors * (2 / _nonzero(lengths, skip_zeros)).unsqueeze(-2)
    for index in reversed(range(vectors.size(-1))):
        vector = vectors[..., index : index + 1]
        result = result - scaled[..., index : index + 1] @ (vector.mH @ result)
    return result


@full_precision
def cwy(vectors: Tensor, columns: int | None = None, *, skip_zeros: bool = False) -> Tensor:
    r"""Return :math:`H(v_1) \cdots H(v_L) = I - V S^{-1} V'` by products and one triangular solve.

    Args:
        vectors: Nonzero columns, ``(..., N, L)`` with L <= N. ``det`` of the result is (-1)^L; all
            such orthogonal matrices are reached with L = N.
        columns: M, return only the first M columns of the product. Default: all N.
        skip_zeros: Leave zero vectors out: their factor is the identity, their gradient zero.

    Returns: Orthogonal (complex: unitary) matrices, ``(..., N, M)``.
    Raises:
        ValueError: for L > N, or a zero vector (looked at on the CPU only).
    Note: 2 N L^2 flops for the Gram matrix, L^2 M for the solve, 2 N L M for the product: for
        L = N 2.5 products of N x N, and 5.5 for the backward.
    Reference: Likhosherstov et al. (AISTATS 2021), Theorem 2.
    """
    return _compact(vectors, _check_vectors(vectors, columns), skip_zeros)


@full_precision
def tcwy(vectors: Tensor, *, skip_zeros: bool = False) -> Tensor:
    r"""Return the first M columns of a product of M reflections, :math:`[I; 0] - V S^{-1} V_1'`.

    Args:
        vectors: Nonzero columns, ``(..., N, M)`` with M <= N; V1 is their top M x M block.
        skip_zeros: As for :func:`cwy`.

    Returns: Matrices with orthonormal columns, ``(..., N, M)``: all of them, if real with M < N.
    Raises:
        ValueError: for M > N, or a zero vector (looked at on the CPU only).
    Note: 4 N M^2 + M^3 flops (published: 7/3 M^3, by an inverse); the backward 8 N M^2 + O(M^3).
    Reference: Likhosherstov et al. (AISTATS 2021), Theorem 3.
    """
    return _compact(vectors, _check_vectors(vectors, int(vectors.size(-1))), skip_zeros)


@full_precision
def cwy_factors(vectors: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return U and S of :math:`H(v_1) \cdots H(v_L) = I - U S^{-1} U'`.

    A rollout turns rows ``h`` (every row becomes Q times itself) without forming Q, by
    ``h - solve_triangular(S, (h @ U.conj()).mT, upper=True).mT @ U.mT``.

    Args:
        vectors: Nonzero columns, ``(..., N, L)`` with L <= N.

    Returns: U, the vectors at unit length, ``(..., N, L)``, and S = I/2 + striu(U'U),
        ``(..., L, L)``; in float32 for half-precision vectors.
    Raises:
        ValueError: for L > N, or a zero vector (looked at on the CPU only).
    Note: 2 N L^2 flops. No solve.
    Reference: Likhosherstov et al. (AISTATS 2021), Theorem 2.
    """
    _check_vectors(vectors)
    lengths = torch.linalg.vector_norm(vectors, dim=-2, keepdim=True)
    check_lengths(lengths.squeeze(-2))
    unit = vectors / lengths
    gram = unit.mH @ unit
    half = gram.diagonal(dim1=-2, dim2=-1) / 2
    return unit, torch.triu(gram, 1) + torch.diag_embed(half)


@full_precision
def generalized_householder(keys: Tensor, betas: Tensor) -> Tensor:
    r"""Return :math:`H_n \cdots H_1` with :math:`H_j = I - b_j k_j k_j' / |k_j|^2`.

    That is :math:`I - K (I + \mathrm{stril}(\mathrm{diag}(c) K'K))^{-1} \mathrm{diag}(c) K'` with
    :math:`c_j = b_j / |k_j|^2`; the first key acts first. Norms are at most 1; b = 2 is a
    reflection, b = 1 a projection, b = 0 the identity.

    Args:
        keys: Nonzero columns, ``(..., N, n)``.
        betas: b in [0, 2], ``(..., n)``.

    Returns: ``(..., N, N)``.
    Raises:
        ValueError: for a zero key, b outside [0, 2] (both looked at on the CPU only), or shapes
            that do not fit.
    Note: 2 N^2 n + 3 N n^2 flops. Nothing is divided by b.
    Reference: Siems et al., DeltaProduct (2025); UT transform of Joffrain et al. (2006).
    """
    _check_vectors(keys, name="keys", limited=False)
    if betas.ndim < 1 or betas.size(-1) != keys.size(-1):
        raise ValueError(
            fail("betas", f"have one number for each of {keys.size(-1)} keys", tuple(betas.shape))
        )
    check_strengths("betas", betas)
    gram = keys.mH @ keys
    lengths = gram.diagonal(dim1=-2, dim2=-1).real
    check_lengths(lengths, "keys")
    weights = (betas / lengths).to(lengths.dtype).unsqueeze(-1)
    # unitriangular leaves the diagonal unread: that is I
    folded: Tensor = torch.linalg.solve_triangular(
        weights * gram, weights * keys.mH, upper=False, unitriangular=True
    )
    return _leading_columns(keys, keys.size(-2)) - keys @ folded


# ---- the compact form --------------------------------------------------------------------------


def _compact(vectors: Tensor, columns: int, skip_zeros: bool) -> Tensor:
    """Return the first ``columns`` columns of I - V S^-1 V'."""
    gram = vectors.mH @ vectors
    lengths = _nonzero(gram.diagonal(dim1=-2, dim2=-1).real, skip_zeros)
    half_gram = torch.triu(gram, 1) + torch.diag_embed(lengths.to(gram.dtype) / 2)
    top = vectors.narrow(-2, 0, columns)
    # From the right: the faster one of the two ways on a CPU, for operands laid out as here.
    solved: Tensor = torch.linalg.solve_triangular(half_gram.mH, top, upper=False, left=False)
    return _leading_columns(vectors, columns) - vectors @ solved.mH


def _leading_columns(vectors: Tensor, columns: int) -> Tensor:
    eye = torch.eye(vectors.size(-2), columns, dtype=vectors.dtype, device=vectors.device)
    return eye.expand(*vectors.shape[:-2], -1, -1)


def _check_vectors(
    vectors: Tensor, columns: int | None = None, *, name: str = "vectors", limited: bool = True
) -> int:
    """Raise unless these are columns that fit; return how many columns the result has."""
    shape = tuple(vectors.shape)
    if vectors.ndim < 2 or 0 in shape[-2:]:
        raise ValueError(fail(name, "be the columns of a matrix (..., N, L)", f"shape {shape}"))
    if limited and shape[-1] > shape[-2]:
        raise ValueError(fail(name, "be at most N columns of length N", f"shape {shape}"))
    columns = shape[-2] if columns is None else columns
    if not 1 <= columns <= shape[-2]:
        raise ValueError(fail("columns", f"lie in [1, {shape[-2]}]", columns))
    return columns


def _nonzero(lengths: Tensor, skip_zeros: bool) -> Tensor:
    """Return squared lengths ``(..., L)`` with ones for zeros; raise for zeros otherwise."""
    if skip_zeros:
        return lengths.masked_fill(lengths == 0, 1.0)
    check_lengths(lengths)
    return lengths


def check_lengths(lengths: Tensor, name: str = "vectors") -> None:
    """Raise where one of the ``lengths``, ``(..., L)``, can be read and is zero."""
    values = readable(lengths)
    if values is not None and bool((values == 0).any()):
        remedy = "a reflection needs a direction; skip_zeros=True leaves zero vectors out"
        remedy = remedy if name == "vectors" else "a reflection needs a direction"
        given = f"a zero vector{counted((values == 0).any(-1))}"
        raise ValueError(fail(name, "be nonzero columns", given, remedy))


def check_strengths(name: str, strengths: Tensor) -> None:
    """Raise where ``strengths`` can be read and lie outside [0, 2]."""
    values = readable(strengths)
    if values is not None and not bool(((values >= 0) & (values <= 2)).all()):
        low, high = float(values.min()), float(values.max())
        interval = f"[{low:g}, {high:g}]"
        raise ValueError(fail(name, "lie in [0, 2]", interval, "use 2 * sigmoid"))
