r"""Steepest descent under the spectral norm on the Stiefel manifold: the rule of StiefelMuon.

X is the point, M the momentum, n x m with n >= m. The direction D solves

    maximise <M, D>   subject to   |D|_2 <= 1,   X'D + D'X = 0.

Iterations for its dual problem, min |M - X L|_* over symmetric L, are published (Bernstein 2025,
Su 2025). **None is needed.** Let M = X B + N with X'N = 0, K = (B - B')/2 and N = E C for an E with
orthonormal columns. A tangent D is X A + E F with a skew A, and

    <M, D> = <K, A> + <C, F> = <W, Z>,   W = [[K, -C'/2], [C/2, 0]],   Z = [[A, -F'], [F, *]],

whatever the skew block * is. [A; F] is no longer than 1, and neither is [A, -F'] = -[A; F]'. So
some * makes |Z| <= 1 (Parrott 1978), as does its skew part. The maximum is therefore that over all
skew Z with |Z| <= 1: the polar factor of W, which is skew itself, and its value is |W|_*. A and F
are blocks of that. In other words: of the skew n x n matrices that turn X as M asks, take the polar
factor; W has rank 2m at most.

Every matrix here is of m x m or 2m x 2m and comes from X'M, M'M and X'X; besides these three only
two products after them grow with n. C is the Cholesky factor of Q = N'N, and E F = N C^(-1) F.

**Smoothing.** Q + delta^2 I stands for Q. So C is regular for every M, D is a smooth function of M,
0 for M = 0, and D'D = I - delta^2 R^(-2) for R = F^(-1) C, symmetric, whose trace is the smoothed
value. Its eigenvalues r add (r^2 - delta^2)/r to <M, D>, within 0.31 delta of their roots
(r^2 - delta^2)^(1/2), whose sum is no less than the optimum, and that no less than
|M_T|_F^2 / |M_T|_2 for the tangent part M_T of M, as M_T / |M_T|_2 is feasible. With u >= |M_T|_2,
u^4 the sum of the fourth powers of its singular values, delta = smoothing |M_T|_F^2 / (m u) leaves
at least 1 - 0.31 smoothing of the optimum, whatever M is. Polar factors come from odd polynomials,
which leave singular values below 1 where they are that small. **Square matrices** have no N: D is X
times the polar factor of K.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_flag, check_range, fail
from stiefel_opt.functional import PULL, Length, Move, Scalar, Tensors, adam_scale
from stiefel_opt.methods.plain_muon import MuonLike
from stiefel_opt.numerics import (
    BLOCKED,
    LOCAL_SUMS,
    BlindReader,
    Reader,
    Sums,
    add_product,
    add_product_,
    add_to_diagonal_,
    are_finite,
    cross_gram,
    defect,
    finest_dtype,
    gram,
    identity_for,
    inner_product,
    product,
    reader_for,
    roots,
    skew,
    square_norm,
    sym,
    symmetric_product,
    trace_of,
)
from stiefel_opt.optim import SCALE_MOMENTS, Group, Rule, ScaleRule, State, options_of, with_factor
from stiefel_opt.tags import Stiefel

# Name of state: B.
AMBIENT: Final = "momentum_ambient"

_COARSE: Final = 3e-3  # least smoothing of Q where rounding by a large C^(-1) cannot be seen
_RADIAL: Final = 1e-4  # share of |M|^2 below which M_T is worked out by itself
_ROUNDING: Final = 4.0  # times eps |M|: what of M may be rounding
_NOISE: Final = 64.0  # times eps |M|^2: what rounding leaves in Q
_ILL: Final = 16.0  # mean condition of Z from which tall products in float32 lose too much
_FEW_SMALL: Final = 0.035  # where a square matrix is cut off at first, over its mean singular value
_SPREAD: Final = 0.05  # smallest over largest singular value from which a factorisation pays
_STEEP: Final = 0.02  # 2 eta^2 from which square matrices take one product more
_LONGEST: Final = 4.0  # atan(4) is 76 degrees
_ROUGHEST: Final = 0.03  # rounding that one correction takes out of X'X


@torch.no_grad()
def spectral_direction(
    point: Tensor,
    grad: Tensor,
    *,
    tolerance: float | None = None,
    smoothing: float | None = None,
    sums: Sums = LOCAL_SUMS,
) -> Tensor:
    r"""Return the steepest tangent direction of spectral norm 1.

    D maximises <M, D> over :math:`|D|_2 \le 1` with X'D skew. It is P X for the polar factor P of
    the skew n x n matrix that turns X as M asks, :math:`W = X K X^\top + (N X^\top - X N^\top) / 2`
    with :math:`K = \mathrm{skew}(X^\top M)` and :math:`N = M - X X^\top M`.

    Args:
        point: X, orthonormal, ``(k, n, m)``, n >= m, real or complex.
        grad: M, the gradient or the momentum, same shape.
        tolerance: The largest distance from 1 of the singular values of D that count. Default:
            5e-5, and 1e-10 in float64.
        smoothing: The largest distance of the value from the optimum, relative to it. Where numbers
            cannot be read (accelerators, compiled) it may be 1e-3 in any case. Default: 1e-4.
        sums: Products of tall matrices, summed over the rows. Default: all rows are here.

    Returns: D ``(k, n, m)``, without a history for backward; 0 where M is 0 or not finite, and for
        n > m where squares of M over- or underflow in the dtype of the sums.
    Raises:
        ValueError: for shapes that do not fit, or numbers out of range.
        TypeError: for a real point with a complex gradient, and for integers.
    Note: One product of n x m by m x m and two symmetric halves before, two after; for square
        matrices one and one. One sum of 3 m^2 numbers over the rows. Between them a Cholesky
        factor of m x m and 12 to 43 products of 2m x 2m, for square matrices of m x m, each at
        about half of its flops by symmetry. The smaller the singular values that count, the more
        there are; where nothing can be read there are 27 to 41. Sums over the rows and the Cholesky
        factor are in float64 where the device has it, and so are, on a CPU, the last tall products
        of an ill-conditioned M. Where M is all but radial, one more product and the sums again.
    Reference: Bernstein, Modular Manifolds (Thinking Machines, 2025), for the problem; Parrott
        (1978), On a quotient norm and the Sz.-Nagy-Foias lifting theorem, for the missing block.
    """
    accuracy = _accuracy(point, tolerance, smoothing)
    _check(point, grad, sums)
    if _is_empty(point):
        return torch.zeros_like(point)
    reads = reader_for(point).is_exact
    solved = _solve(point, grad, accuracy, sums, reads)
    if solved.along is None:
        direction = product(point, solved.within)
    else:
        dtype = _tall_dtype(point, solved, reads)
        direction = product(point.to(dtype), solved.within.to(dtype))
        direction = add_product_(direction, solved.moving.to(dtype), solved.along.to(dtype))
        direction = direction.to(point.dtype)
    return torch.where(solved.sound, direction, 0.0)


@torch.no_grad()
def spectral_gap(
    point: Tensor, grad: Tensor, direction: Tensor, *, sums: Sums = LOCAL_SUMS
) -> Tensor:
    r"""Return the distance of a direction from the optimal value, relative to it, ``(k,)``.

    The optimal value is the nuclear norm of the W of :func:`spectral_direction`; the gap is
    1 - <M, D> / (that norm max(1, |D|_2)).

    Args:
        point, grad, sums: as in :func:`spectral_direction`.
        direction: D, ``(k, n, m)``, tangent.

    Returns: The gap of every matrix; 0 where the gradient has no tangent part beyond rounding, NaN
        where it is not finite or too large to be squared.
    Raises:
        ValueError: for shapes that do not fit.
    Note: Eigenvalues of two m x m matrices and singular values of one of 2m x 2m, sums of 4 m^2
        numbers over the rows. Rounding makes it as large as the root of eps in the dtype of the
        m x m work.
    """
    _check(point, grad, sums)
    if direction.shape != point.shape:
        shape = tuple(point.shape)
        raise ValueError(fail("direction", f"have the shape {shape}", tuple(direction.shape)))
    if _is_empty(point):
        return point.real.new_zeros(len(point))
    _, parts = _tangent_parts(point, grad, sums, reader_for(point).is_exact)
    work = parts.skew.dtype
    tall = direction.to(work)
    value = (grad.to(work).conj() * tall).sum(dim=(-2, -1)).real
    (own,), value = sums((tall, tall)), sums.add(value)
    length = torch.linalg.eigvalsh(own)[:, -1].clamp(min=1.0).sqrt()
    finite = are_finite(parts.square + parts.skew)[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, parts.square, 0.0))
    root = values.clamp(min=0.0).sqrt().unsqueeze(-1) * vectors.mH
    best = torch.linalg.svdvals(_completed(torch.where(finite, parts.skew, 0.0), root)).sum(dim=-1)
    gap = 1.0 - value / (best * length)
    rounding = (parts.noise.flatten() * point.size(-1)).sqrt()
    gap = torch.where(best > rounding, gap, 0.0)
    return torch.where(finite.flatten(), gap, math.nan).to(point.real.dtype)


def muon(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar = 1.0,
    momentum: float = 0.95,
    nesterov: bool = True,
    tolerance: float | None = None,
    smoothing: float | None = None,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of StiefelMuon.

    .. math:: B \leftarrow \mu B + (1 - \mu) G, \qquad M = \mu B + (1 - \mu) G \text{ or } B,
        \qquad X \leftarrow (X - \eta D)(I + \eta^2 D^\top D)^{-1/2}

    with D of :func:`spectral_direction` for M. Where D'D = I the root is the number
    :math:`\sqrt{1 + \eta^2}`, and the angle between X v and the new X v is atan eta for every v;
    so it is if N has full rank.
    For n > m what rounding left in X'X is measured with the other sums and taken out with the step.

    Args:
        X: The point, orthonormal, ``(k, n, m)``.
        G: The gradient, same shape.
        state: ``momentum_ambient`` B, same shape. Empty: M = G.
        lr: eta, a number or ``(k, 1, 1)``; acts as at most 4, an angle of 76 degrees.
        step: The number of this step; it makes no difference.
        momentum: mu.
        nesterov: M is a lookahead, as above; else the buffer.
        tolerance, smoothing, sums: as in :func:`spectral_direction`.
        reader: Whether numbers of this step may be read. Default: where that is free.

    Raises:
        ValueError: as :func:`spectral_direction`.
    Note: As :func:`spectral_direction`, and 1 to 25 products of m x m, 10 up to ``lr`` of 0.4.
        Tensors as ``lr`` may cost those of the longest step. Where rounding in M'M would show in
        X'X, as in float64 it does, and on accelerators, one more sum of m^2 and two products.
        Where this step's numbers cannot be read, it is cut where rounding would exceed 3 per cent.
    """
    accuracy = _accuracy(X, tolerance, smoothing)
    _check(X, G, sums)
    if _is_empty(X):
        return X, {}, 0.0
    B = state.get(AMBIENT)
    buffer = M = G
    if B is not None:
        buffer = B.lerp(G, 1 - momentum)
        M = G.lerp(buffer, momentum) if nesterov else buffer
    reader = reader or reader_for(X)
    reads, is_blind = reader.is_exact, type(reader) is BlindReader
    if is_blind:  # D grows with what an unseen write to X has left
        (own,) = sums((X, X))
        X = add_product(X, X, _correction_of(own))
    solved = _solve(X, M, accuracy, sums, reads)
    new = {} if B is None else {AMBIENT: torch.where(solved.finite, buffer, B)}
    step, limit = _step_of(lr, solved.length)
    if solved.along is not None and not reads:  # a gradient that is all but normal is not seen
        rounding = solved.gain * (X.size(-1) * torch.finfo(X.dtype).eps)
        step = (_ROUGHEST / rounding).clamp(max=1.0) * step
    length = Length(solved.length * (step * step), 1.0, limit)
    difference = roots(length.squares, limit, reads=reads).difference
    if solved.along is None:
        return _turned(X, solved, step, difference, limit), new, length
    dtype = _tall_dtype(X, solved, reads)
    new_X = _moved(X, solved, solved.along, step, difference, dtype)
    # behind a step that reads nothing rounding is removed anyway, what there is of it in float32
    unread = X.real.dtype == torch.float64 or not is_blind
    if _is_rough(X, solved, step) if reads else unread:
        (own,) = sums((new_X, new_X))
        new_X = add_product(new_X, new_X, _correction_of(own))
    return new_X, new, length


def _moved(
    X: Tensor,
    solved: _Direction,
    along: Tensor,
    step: Scalar,
    difference: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return (X c - eta (X w + M a)) (I + difference) of a tall matrix X."""
    # less X: what is added to it is small
    moved = solved.correction - solved.within * step
    within = moved.baddbmm(add_to_diagonal_(moved.clone(), 1.0), difference)
    within = torch.where(solved.sound, within, solved.correction)
    M = torch.where(solved.sound, solved.moving, 0.0)  # 0 along whatever is not finite
    along = along * -step
    along = along.baddbmm(along, difference)
    tall = X.to(dtype)
    new_X = add_product(tall, tall, within.to(dtype))
    return add_product_(new_X, M.to(dtype), along.to(dtype)).to(X.dtype)


def _turned(
    X: Tensor, solved: _Direction, step: Scalar, difference: Tensor, limit: float
) -> Tensor:
    """Return X (I - eta P) (I + difference) of a square matrix X."""
    turn = solved.within * -step
    if limit > _STEEP:  # X P stands for X c P, which leaves eta of what X is off by
        turn = turn.baddbmm(turn, difference)
    else:  # turn and difference commute
        turn = symmetric_product(turn, difference, turn.clone(), beta=1.0, sign=-1)
    within = torch.where(solved.sound, turn.add_(difference), 0.0)
    return add_product(X, X, within.to(X.dtype))


class _Direction(NamedTuple):
    """D = X within + M along, in m x m matrices, and what goes with it.

    Attributes:
        within, along: ``(k, m, m)``; ``along`` is None for square matrices.
        moving: M, or what is left of it.
        correction: c - I for X c nearest to X on the manifold.
        length: D'D.
        finite: Whether M is, and its square, ``(k, 1, 1)``.
        sound: Whether D is other than 0, ``(k, 1, 1)``.
        gain: How much the sum of the two products amplifies rounding, ``(k, 1, 1)``.
    """

    within: Tensor
    along: Tensor | None
    moving: Tensor
    correction: Tensor
    length: Tensor
    finite: Tensor
    sound: Tensor
    gain: Tensor


class _Parts(NamedTuple):
    """M = X c B + N in m x m: K = skew B, Q = N'N; X c is X made orthonormal.

    ``noise`` is what rounding may have left in Q.
    """

    inner: Tensor
    skew: Tensor
    square: Tensor
    correction: Tensor
    noise: Tensor


def _solve(
    point: Tensor, moving: Tensor, accuracy: tuple[float, float], sums: Sums, reads: bool
) -> _Direction:
    """Find the direction, in small matrices, by tolerance and smoothing."""
    tolerance, smoothing = accuracy
    if sums.are_square(point):
        # nothing else is lost
        return _solve_square(point, moving, tolerance, 3.0 * smoothing, reads)
    moving, parts = _tangent_parts(point, moving, sums, reads)
    m, single = point.size(-1), torch.promote_types(point.dtype, torch.float32)
    scale, spread = _scale_of(parts.square + gram(parts.skew))
    scale = (scale.square() + parts.noise).sqrt()  # M_T may be no more than rounding
    limits = torch.finfo(scale.dtype)
    sound = (scale > (limits.tiny / limits.eps) ** 0.5) & scale.isfinite()
    factor = torch.where(sound, scale.reciprocal(), 0.0)  # M = 0 has C = delta and K = 0
    spread = torch.where(sound, spread, 1.0)
    turn = torch.where(sound, parts.skew * factor, 0.0)
    own = torch.where(sound, parts.square * factor.square(), 0.0)
    noise = torch.where(sound, parts.noise * factor.square(), 0.0)
    coarse = smoothing if reads else max(smoothing, _COARSE)
    floor = (coarse / m * spread).square() + noise
    upper, _ = torch.linalg.cholesky_ex(own + identity_for(own) * floor, upper=True)
    completed = _completed(turn, upper).to(single)
    polar, _ = _polar_factor(completed, tolerance, 2.0 * smoothing, reads)
    inner = skew(polar[:, :m, :m]).to(own.dtype)
    outer = polar[:, m:, :m].to(own.dtype)
    inverse: Tensor = torch.linalg.solve_triangular(upper, outer, upper=True)
    length = sym(gram(inner) + torch.bmm(inverse.mH, torch.bmm(own, inverse)))
    along = inverse * factor
    # What M is multiplied by must fit into the dtype of M; where M is too small for that, D = 0.
    largest = along.abs().amax(dim=(-2, -1), keepdim=True)
    sound = sound & (largest < torch.finfo(single).max / 4)
    along, length = (torch.where(sound, matrix, 0.0) for matrix in (along, length))
    # N = M - X c B
    within = torch.baddbmm(inner, parts.inner, along, alpha=-1.0)
    within = within.baddbmm(parts.correction, within)
    within = torch.where(sound, within, 0.0)
    gain = (parts.noise / (_NOISE * torch.finfo(own.dtype).eps) * square_norm(along)).sqrt() / m
    finite = parts.noise.isfinite()
    return _Direction(within, along, moving, parts.correction, length, finite, sound, gain)


def _completed(turn: Tensor, root: Tensor) -> Tensor:
    """Return W of K and C, ``(k, 2m, 2m)``."""
    half = root / 2
    columns = torch.cat([turn, half], dim=-2), torch.cat([-half.mH, half * 0], dim=-2)
    return torch.cat(columns, dim=-1)


def _solve_square(
    point: Tensor, moving: Tensor, tolerance: float, smoothing: float, reads: bool
) -> _Direction:
    """Find P with D = X P: the polar factor of K."""
    inner = cross_gram(point, moving)
    largest = inner.abs().amax(dim=(-2, -1), keepdim=True)
    finite = largest.isfinite()
    sound = (largest > 0) & finite
    inner = torch.where(sound, inner / largest, 0.0)  # squares must neither over- nor underflow
    size = square_norm(inner)
    inner = skew(inner)
    # the skew part of what is all but symmetric is rounding
    trace = square_norm(inner)
    share = trace / (trace + size * (_ROUNDING * torch.finfo(inner.dtype).eps) ** 2)
    share = torch.where(sound & (trace > 0), share, 0.0)
    polar, square = _polar_factor(inner, tolerance, smoothing, reads)
    zero, polar, square = torch.zeros_like(polar), polar * share, square * share.square()
    sound = sound & (trace > 0)
    return _Direction(polar, None, moving, zero, square, finite, sound, torch.ones_like(trace))


def _polar_factor(
    matrix: Tensor, tolerance: float, smoothing: float, reads: bool
) -> tuple[Tensor, Tensor]:
    """Return the polar factor P of a skew matrix K and P'P, by odd functions of K.

    The first, x / (1 + c x^2), brings the small singular values near the large; then polynomials.
    Functions that take [l, 1] to 1 leave a singular value s < l of K / u at d >= s / l. What that
    costs is at most the sum of l d (1 - d) <= l (1 - d^2) (0.28 + 0.27 d^2), known from P'P. So l
    starts near what random matrices need, and falls only where a larger part of K is small.
    """
    square = gram(matrix)
    trace = trace_of(square)
    # u^2; singular values of real skew matrices other than 0 come in pairs
    share = 1.0 if matrix.is_complex() else 0.5**0.5
    fourth = share * torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True)
    sound = fourth > 0  # 0/0 where K is 0
    polar = matrix * torch.where(sound, fourth.rsqrt(), 0.0)
    scaled = polar
    square = square / torch.where(sound, fourth, 1.0)
    # |s|_1 >= |s|_2^3 / |s|_4^2, over m
    m = matrix.size(-1)
    mean = torch.where(sound, (trace / fourth) ** 1.5 * (share / m), math.inf)
    low = least = smoothing / m  # of any K
    # no guess in float64: a direction does not depend on the others of its batch then
    if reads and matrix.dtype.to_real() != torch.float64:
        least = min(max(low, smoothing * float(mean.min())), 1.0)
        low = max(least, min(_FEW_SMALL * float(mean.min()), 1.0))
    eps = torch.finfo(matrix.dtype).eps
    pulls: list[float] = []
    can_pull = reads and m >= BLOCKED  # else products are faster
    while can_pull and (lower := _pulled(low, pulls)) < _SPREAD:
        pulls.append(min(1.0 / lower, eps**-0.5))
        regular = add_to_diagonal_(square * pulls[-1], 1.0)
        solved = torch.cholesky_solve(polar, torch.linalg.cholesky_ex(regular).L)  # they commute
        polar = skew(solved).mul_(2.0 * pulls[-1] ** 0.5)
        square = gram(polar)
    factors: list[float] = []
    while True:
        lower = _pulled(low, pulls)
        for factor in factors:
            lower *= factor * (3.0 - (factor * lower) ** 2) / 2.0
        for factor in _schedule(lower, max(tolerance, eps)):
            # f K (3 - f^2 K'K) / 2, skew but for rounding
            into, cubic = polar * (1.5 * factor), -0.5 * factor**3
            polar = symmetric_product(polar, square, into, beta=1.0, alpha=cubic, sign=-1)
            factors.append(factor)
            if len(factors) % 3 == 0:  # what is not skew grows as small singular values do
                polar = skew(polar)
            square = gram(polar)
        if low <= least:
            break
        lost = (0.28 * m - 0.01 * trace_of(square) - 0.27 * square_norm(square)) * low
        if bool((lost <= 0.31 * smoothing * inner_product(scaled, polar)).all()):
            break
        low = max(low / 30, least)
    return skew(polar), square


def _schedule(lower: float, tolerance: float) -> list[float]:
    """Return the factors f of x <- f x (3 - f^2 x^2) / 2 that take [lower, 1] to 1.

    f^2 = 3 / (1 + l + l^2) gives both ends the same value, the next l, at the maximum 1: for small
    l 2.6 times as much, where f = 1 gives 1.5. Rounding must not take what is near 1 below zero, so
    l counts as at least 1e-3 there.

    Reference: Chen & Chow (2014), A stable scaling of Newton-Schulz.
    """
    factors = []
    while 1.0 - lower > tolerance:
        least = max(lower, 1e-3)
        factors.append(math.sqrt(3.0 / (1.0 + least + least * least)))
        end = factors[-1] * lower
        lower = end * (3.0 - end * end) / 2.0
    return factors


def _pulled(value: float, pulls: list[float]) -> float:
    """Return what x <- 2 c^(1/2) x / (1 + c x^2), for one c after the other, makes of a value."""
    for pull in pulls:
        value = 2.0 * pull**0.5 * value / (1.0 + pull * value * value)
    return value


def _scale_of(square: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and |A|_F^2 / u^2 >= 1 for A'A: u^4 = |A'A|_F^2, the sum of all s^4, >= |A|_2^4."""
    trace = trace_of(square)
    share = torch.linalg.vector_norm(square / trace, dim=(-2, -1), keepdim=True)  # 1/m to 1
    return (trace * share).sqrt(), share.reciprocal()


def _tangent_parts(point: Tensor, moving: Tensor, sums: Sums, reads: bool) -> tuple[Tensor, _Parts]:
    """Return M and its parts; of M only M_T, in the dtype of the work, where that is all but lost.

    Q = M'M - B'B is off by eps |M|^2, more than M_T if that is shorter than the root of eps |M|.
    """
    work = finest_dtype(point)
    tall, other = point.to(work), moving.to(work)
    parts = _parts_of(tall, other, sums)
    size = parts.noise / (_NOISE * torch.finfo(work).eps)
    if not reads:
        return moving, parts
    is_cancelled = trace_of(parts.square) + square_norm(parts.skew) < _RADIAL * size
    if not bool(is_cancelled.any()):
        return moving, parts
    normal = sym(parts.inner)
    moving = add_product(other, tall, normal.baddbmm(parts.correction, normal), alpha=-1.0)
    parts = _parts_of(tall, torch.where(is_cancelled, moving, other), sums)
    lost = _ROUNDING * torch.finfo(point.dtype).eps
    noise = torch.where(is_cancelled, parts.noise + lost**2 * size, parts.noise)
    return torch.where(is_cancelled, moving, other), parts._replace(noise=noise)


def _parts_of(tall: Tensor, other: Tensor, sums: Sums) -> _Parts:
    """Return the parts, from X'M, M'M and X'X."""
    inner, own, point_own = sums((tall, other), (other, other), (tall, tall))
    correction = _correction_of(point_own)  # exactly: Q may be far smaller than |M|^2
    inner = inner.baddbmm(correction, inner)
    square = sym(own - gram(inner))
    noise = trace_of(own) * (_NOISE * torch.finfo(own.dtype).eps)
    return _Parts(inner, skew(inner), square, correction, noise)


def _correction_of(own: Tensor) -> Tensor:
    """Return (X'X)^(-1/2) - I = D/2 + 3/8 D^2 for X'X = I - D near I."""
    error = defect(own)
    return torch.baddbmm(error, error, error, beta=0.5, alpha=0.375)


def _is_empty(point: Tensor) -> bool:
    """Say whether no process has anything; one without rows must still take part in the sums."""
    return 0 in (point.size(0), point.size(-1))


def _accuracy(
    point: Tensor, tolerance: float | None, smoothing: float | None
) -> tuple[float, float]:
    """Return tolerance and smoothing: what is given, or what suits the dtype."""
    if tolerance is None:
        tolerance = 1e-10 if point.dtype.to_real() == torch.float64 else 5e-5
    else:
        check_range("tolerance", tolerance, 0.0)
    if smoothing is None:
        smoothing = 1e-4
    else:
        check_range("smoothing", smoothing, 0.0, 1.0, open_low=True)
    return tolerance, smoothing


def _check(point: Tensor, grad: Tensor, sums: Sums) -> None:
    shape = tuple(point.shape)
    if point.ndim != 3 or (sums.are_local and shape[-2] < shape[-1]):
        raise ValueError(fail("point", "be tall matrices (k, n, m)", f"shape {shape}"))
    if grad.shape != point.shape:
        raise ValueError(fail("grad", f"have the shape {shape} of point", tuple(grad.shape)))
    is_float = point.is_floating_point() or point.is_complex()
    if not is_float or (grad.is_complex() and not point.is_complex()):
        kind = f"fit into the dtype of `point`, floating-point or complex, {point.dtype}"
        raise TypeError(fail("grad", kind, grad.dtype))


def _tall_dtype(point: Tensor, solved: _Direction, reads: bool) -> torch.dtype:
    """Return the dtype of the last tall products: more digits than the point has, if they count."""
    is_ill = reads and bool((solved.gain > _ILL).any())
    return solved.within.dtype if is_ill else torch.promote_types(point.dtype, torch.float32)


def _is_rough(point: Tensor, solved: _Direction, step: Scalar) -> bool:
    """Say whether rounding in Q, eps |M|^2 |R^(-1)|^2 in D'D, shows in X'X of the new point."""
    noise = torch.finfo(solved.length.dtype).eps * (solved.gain * (step * point.size(-1))).square()
    return bool((noise > torch.finfo(point.dtype).eps).any())


def _step_of(lr: Scalar, length: Tensor) -> tuple[Scalar, float]:
    """Return eta and a bound on eta^2 D'D: |2Y| and |N R^(-1)| are at most 1 each."""
    if isinstance(lr, Tensor):
        return lr.to(length.real.dtype).clamp(-_LONGEST, _LONGEST), 2 * _LONGEST**2
    lr = max(-_LONGEST, min(lr, _LONGEST))
    return lr, 2 * lr * lr


# ---- the optimizer -----------------------------------------------------------------------------


PLAIN: Final = ("adamw", "muon")


class StiefelMuon(MuonLike):
    r"""Muon that keeps constrained parameters orthonormal; plain ones get torch's AdamW or Muon.

    The steepest tangent direction of spectral norm 1 for the mean B of the gradients,

    .. math::
        B \leftarrow \mu B + (1 - \mu) G,\quad
        D = \arg\max \{\langle M, D\rangle : |D|_2 \le 1,\ X^\top D \text{ skew}\},\quad
        X \leftarrow (X - \eta D)(I + \eta^2 D^\top D)^{-1/2},

    with M = mu B + (1 - mu) G, or B without ``nesterov``. Where D'D = I, as is usual, the angle
    between X v and the new X v is atan eta for every v, so that the learning rate needs no scaling
    by shape or by the size of the gradient; see :func:`stiefel_opt.methods.muon`.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor. Constrained parameters turn by at most
            atan(lr / scale) and 76 degrees; plain ones usually want another learning rate.
        momentum, nesterov: As in ``torch.optim.Muon``, for constrained parameters and those that
            follow Muon. ``OneCycleLR`` and ``CyclicLR`` change ``betas`` instead.
        weight_decay: For plain parameters, decoupled. It cannot move a constrained one.
        betas, eps: As in ``torch.optim.AdamW``, for the others.
        plain: Rule of plain parameters: "adamw", or "muon" for those that are real and have two
            dimensions, at the other defaults of ``torch.optim.Muon``; the others, and plain rows of
            constrained parameters, get AdamW. Groups may differ.
        maximize: Ascend.
        foreach, fused, capturable: For AdamW, as in torch.
        differentiable: Must be False.
        scale_pull, nonfinite, stiefel, cuda_graph: As in :class:`StiefelSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Five products of n x m by m x m a step, and for n > m a Cholesky factor of m x m in float64
        and 12 to 43 products of 2m x 2m, for n = m about as many of m x m. State is one tensor like
        the parameter. Rows shared by several processes are added up once, 3 m^2 numbers for each
        matrix.

    Reference:
        Bernstein, Modular Manifolds (Thinking Machines, 2025), for the problem; Jordan et al., Muon
        (2024).
    """

    rule = "StiefelMuon"
    sums_over_rows = True
    capturable = True
    learns_scale = True
    velocity_names = (AMBIENT,)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        plain: str = "adamw",
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        options = options_of(locals())
        super().__init__(params, {**options, "amsgrad": False, "decoupled_weight_decay": True})

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_range("momentum", group["momentum"], 0.0, 1.0)
        check_flag("nesterov", group["nesterov"])
        check_choice("plain", group["plain"], PLAIN)

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return () if group["momentum"] == 0 else (State(AMBIENT),)

    @override
    def rule_for(self, group: Group) -> Rule:
        rule = partial(muon, momentum=group["momentum"], nesterov=group["nesterov"])
        return with_factor(rule, group["maximize"])

    @override
    def scale_rule_for(self, group: Group) -> ScaleRule:
        betas = group["momentum"], group["betas"][1]
        options = {"betas": betas, "eps": group["eps"], "pull": group["scale_pull"]}
        rule: Any = partial(adam_scale, spectral=True, **options)
        return ScaleRule(with_factor(rule, group["maximize"]), SCALE_MOMENTS)

    @override
    def velocity_in(self, X: Tensor, state: Tensors) -> tuple[Tensor | None, Tensor | None]:
        if (B := state.get(AMBIENT)) is None:  # -(X Z + U)
            return None, None
        inner = X.mH @ B
        return (inner.mH - inner) / 2, X @ inner - B

    @override
    def state_of_velocity(self, X: Tensor, Z: Tensor, U: Tensor) -> Tensors:
        return {AMBIENT: -(X @ Z + U)}
