r"""Steepest descent under the spectral norm on the Stiefel manifold: the rule of StiefelMuon.

X is the point, M the momentum, n x m with n >= m. The direction D solves

    maximise <M, D>   subject to   |D|_2 <= 1,   X'D + D'X = 0.

With multipliers L of the second and R >= 0 of the first constraint, both symmetric of m x m, the
optimum has D R = Z for Z = M - X L, so that R = (Z'Z)^(1/2) and D is the polar factor of Z; the
dual problem is to minimise the nuclear norm |M - X L|_* (Bernstein 2025, Su 2025). Its
joint form in L and R is convex, and L can be eliminated. With M = X B + N, X'N = 0, Q = N'N and
K = (B - B')/2 what is left is a problem in R alone:

    minimise   g(R) = tr R / 2 + tr(Q R^(-1)) / 2 + <K, Y>,   R Y + Y R = K,
    D(R) = 2 X Y + N R^(-1),     grad g = (I - D'D) / 2,   D'D = 4 Y'Y + R^(-1) Q R^(-1).

Y is skew, so D(R) is tangent for every R: a search that stops early is still on the manifold. Every
matrix here is of m x m and comes from X'M and M'M; nothing grows with n but two products before
and two after.

**Smoothing.** Q + delta^2 I stands for Q. So R >= delta exists for every M, D is a smooth function
of M, 0 for M = 0, and D'D = I - delta^2 R^(-2). No singular value s of Z loses more than 0.31 delta
of the optimal value, the sum of all s. That is at least |M_T|_F^2 / |M_T|_2 for the tangent part
M_T of M, as M_T / |M_T|_2 is feasible. With u >= |M_T|_2, u^4 the sum of the fourth powers of its
singular values, delta = smoothing |M_T|_F^2 / (m u) leaves at least 1 - 0.31 smoothing of the
optimum, whatever M is.

**Where values can be read** the search is over the dual variable, one eigenvalue decomposition of
m x m an iteration, until a bound says that D is good enough: see
:mod:`stiefel_opt.functional.spectral_search`. **Elsewhere** a fixed number of Newton steps for g,
by products: R and R^(-1) by polynomials, and the equations R Y + Y R = K by doubling. What is kept
between steps is T = -Lambda, of L = sym B + Lambda: R is the root of Q + (T + K)'(T + K). **Square
matrices** have Lambda = 0: D is X times the polar factor of K, by polynomials.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt._checks import check_range, fail
from stiefel_opt.device import finest_dtype, is_free_to_read
from stiefel_opt.functional.flows import Scalar, Setting, mend
from stiefel_opt.functional.spectral_search import (
    fits,
    fixed_steps,
    inner_product,
    schedule,
    search,
    square_norm,
    trace_of,
)
from stiefel_opt.linalg import (
    RowSum,
    add_product,
    add_product_,
    add_to_diagonal_,
    gram,
    keep_,
    own_gram,
    product,
    skew,
    sym,
    symmetric_product,
    zeroed,
)
from stiefel_opt.roots import roots

# Dual steps where nothing can be read: from a multiplier, and without one.
_WARM: Final = 2
_COLD: Final = 6
_COARSER: Final = 30.0  # times smoothing, for fixed steps: rounding in D goes as its inverse
_RADIAL: Final = 1e-4  # share of |M|^2 below which M_T is worked out by itself
_ROUNDING: Final = 4.0  # times eps |M|: what of M may be rounding
_NOISE: Final = 64.0  # times eps |M|^2: what rounding leaves in Q
_ILL: Final = 16.0  # mean condition of Z from which tall products in float32 lose too much
_FEW_SMALL: Final = 0.035  # where a square matrix is cut off at first, over its mean singular value
_STEEP: Final = 0.02  # 2 eta^2 from which square matrices take one product more
_LONGEST: Final = 4.0  # atan(4) is 76 degrees


@torch.no_grad()
def spectral_direction(
    point: Tensor,
    grad: Tensor,
    multiplier: Tensor | None = None,
    *,
    steps: int | None = None,
    tolerance: float = 5e-5,
    smoothing: float = 1e-4,
    row_sum: RowSum | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return the steepest tangent direction of spectral norm 1, and its multiplier.

    D maximises <M, D> over :math:`|D|_2 \le 1` with X'D skew. It is the polar factor of
    :math:`M_T - X \Lambda` for the tangent part :math:`M_T = M - X\,\mathrm{sym}(X^\top M)`; the
    multiplier :math:`\Lambda` minimises the nuclear norm of that.

    Args:
        point: X, orthonormal, ``(k, n, m)``, n >= m, real or complex.
        grad: M, the gradient or the momentum, same shape.
        multiplier: Lambda of a similar problem, ``(k, m, m)``, as a start; zero is no start.
        steps: Dual steps, a fixed number, by products alone. Default: where values can be read as
            many iterations as ``tolerance`` asks for, elsewhere 2 with a multiplier and 6 without.
        tolerance: What the value may lack of an upper bound, relative to it, beside smoothing.
        smoothing: What the value may lack of the optimum by itself, relative to it, at the most;
            fixed steps use 30 times as much.
        row_sum: Sum over the processes that share the rows. Default: all rows are here.

    Returns: D ``(k, n, m)`` and Lambda ``(k, m, m)``, without a history for backward; 0 where M is
        0, not finite, or too large or too small for its square, which for n = m it may be.
    Raises:
        ValueError: for shapes that do not fit, or numbers out of range.
        TypeError: for a real point with a complex gradient, and for integers.
    Note: Two products of n x m by m x m and two symmetric halves before, two after; for square
        matrices one and one. One sum of m (2m + 1) numbers over the rows. The m x m work is in
        float64 where the device has it, as are the tall products of the sums, and on a CPU those
        of an ill-conditioned M; where M is all but radial, one more product and the sums again.
        Without ``steps`` matrices with n >= 4m take 5 to 12 eigenvalue decompositions, those with n
        below 2m about 20 and up to 110, where n = m + 1 may end at 0.997 of the optimum. A fixed
        step is about 240 products of m x m, and 40 for the roots at the end; where it has not
        converged D is shortened to norm 1, and with n below 2m the default number of them may lack
        a tenth of the optimum.
    Reference: Bernstein, Modular Manifolds (Thinking Machines, 2025), for the problem and its dual.
    """
    _check(point, grad, multiplier, steps, tolerance, smoothing, row_sum)
    if _is_empty(point):
        return torch.zeros_like(point), point.new_zeros(len(point), *point.shape[-1:] * 2)
    found = _solve(point, grad, multiplier, steps, tolerance, smoothing, row_sum)
    if found.along is None:
        direction = product(point, found.within)
    else:
        dtype = _tall_dtype(point, found)
        direction = product(*_same(point, found.within, dtype))
        direction = add_product_(direction, *_same(found.moving, found.along, dtype))
        direction = direction.to(point.dtype)
    return torch.where(found.sound, direction, 0.0), found.multiplier.to(point.dtype)


@torch.no_grad()
def spectral_gap(
    point: Tensor,
    grad: Tensor,
    direction: Tensor,
    multiplier: Tensor,
    *,
    row_sum: RowSum | None = None,
) -> Tensor:
    r"""Return how much the direction may lack of the optimal value, relative to it, ``(k,)``.

    By weak duality no tangent direction of spectral norm 1 has a value beyond the nuclear norm of
    :math:`M_T - X\Lambda`, whatever Lambda is: the gap is 1 - <M, D> / (that norm max(1, |D|_2)).

    Args:
        point, grad, row_sum: as in :func:`spectral_direction`.
        direction: D, ``(k, n, m)``, tangent.
        multiplier: Lambda, symmetric, ``(k, m, m)``.

    Returns: The gap of every matrix; 0 where the gradient has no tangent part beyond rounding, NaN
        where it is not finite or too large to be squared.
    Raises:
        ValueError: for shapes that do not fit.
    Note: Eigenvalues of two m x m matrices, sums of 3 m^2 numbers over the rows. Rounding makes it
        as large as the root of eps in the dtype of the m x m work.
    """
    _check(point, grad, multiplier, None, 0.0, 0.5, row_sum)
    if direction.shape != point.shape:
        shape = tuple(point.shape)
        raise ValueError(fail("direction", f"have the shape {shape}", tuple(direction.shape)))
    if _is_empty(point):
        return point.real.new_zeros(len(point))
    _, parts = _tangent_parts(point, grad, row_sum)
    work = parts.skew.dtype
    tall = direction.to(work)
    value = (grad.to(work).conj() * tall).sum(dim=(-2, -1)).real[:, None, None]
    packed = torch.cat([own_gram(tall), value.expand(-1, tall.size(-1), 1).to(work)], dim=-1)
    packed = packed if row_sum is None else row_sum(packed)
    length = torch.linalg.eigvalsh(packed[..., :-1])[:, -1].clamp(min=1.0).sqrt()
    inner = parts.skew - sym(multiplier.to(work))
    own = sym(parts.square + own_gram(inner))
    finite = own.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    own = torch.where(finite, own, 0.0)
    bound = torch.linalg.eigvalsh(own).clamp(min=0.0).sqrt().sum(dim=-1)
    gap = 1.0 - packed[:, 0, -1].real / (bound * length)
    rounding = (parts.noise.flatten() * point.size(-1)).sqrt()
    gap = torch.where(bound > rounding, gap, 0.0)
    return torch.where(finite.flatten(), gap, math.nan).to(point.real.dtype)


def muon_(
    point: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    multiplier: Tensor | None,
    *,
    lr: Scalar,
    momentum: float = 0.95,
    nesterov: bool = True,
    maximize: bool = False,
    steps: int | None = None,
    tolerance: float = 5e-5,
    smoothing: float = 1e-4,
    setting: Setting = Setting(),  # noqa: B008
) -> Tensor:
    r"""One step of StiefelMuon; returns the new point and updates the state in place.

    .. math:: B \leftarrow \mu B + (1 - \mu) G, \qquad M = \mu B + (1 - \mu) G \text{ or } B,
        \qquad X \leftarrow (X - \eta D)(I + \eta^2 D^\top D)^{-1/2}

    with D of :func:`spectral_direction` for M. Where D'D = I the root is the number
    :math:`\sqrt{1 + \eta^2}`, and the principal angles between old and new point are all atan eta.
    What rounding left in X'X is measured with the other sums and taken out with the step.

    Args:
        point: X, orthonormal, ``(k, n, m)``.
        grad: G, same shape.
        momentum_buffer: B, same shape, updated. None: M = G.
        multiplier: Lambda, ``(k, m, m)``, updated; zero at the start. None: every step is a start.
        lr: eta, a number or ``(k, 1, 1)``; acts as at most 4, an angle of 76 degrees.
        momentum: mu.
        nesterov: M is a lookahead, as above; else the buffer.
        maximize: X moves along D.
        steps, tolerance, smoothing: as in :func:`spectral_direction`.
        setting: How the step is worked out; of it ``ok`` and ``row_sum``.

    Returns: The new point, ``(k, n, m)``.
    Raises:
        ValueError: as :func:`spectral_direction`.
    Note: As :func:`spectral_direction`, and 1 to 10 products of m x m. Tensors as ``lr`` cost the
        products of the longest step. Where rounding in M'M would show in X'X, as in float64 it
        does, one more sum of m^2 and two products: on a CPU only.
    """
    row_sum = setting.row_sum
    _check(point, grad, multiplier, steps, tolerance, smoothing, row_sum)
    if _is_empty(point):
        return point.clone()
    buffer = moving = grad = zeroed(grad, setting.ok)
    if momentum_buffer is not None:
        buffer = momentum_buffer.lerp(grad, 1 - momentum)
        moving = grad.lerp(buffer, momentum) if nesterov else buffer
    found = _solve(point, moving, multiplier, steps, tolerance, smoothing, row_sum)
    ok = found.finite if setting.ok is None else found.finite & setting.ok
    for state, new in ((momentum_buffer, buffer), (multiplier, found.multiplier)):
        if state is not None:
            keep_(state, new, ok)
    step, limit = _step_of(lr, found.length)
    difference = roots(found.length * (step * step), limit).difference
    step = -step if maximize else step
    if found.along is None and setting.correct is not False:
        mending, within = mend(own_gram(point)), found.within
        if limit > _STEEP:  # X P stands for X c P, which leaves eta of what X is off by
            within = within.baddbmm(mending, within)
        found = found._replace(mending=mending, within=within)
    # X c + (X w + M a) (-eta), times I + difference, less X: what is added is small.
    moved = found.mending - found.within * step
    within = moved.baddbmm(add_to_diagonal_(moved.clone(), 1.0), difference)
    within = torch.where(found.sound, within, found.mending)
    if found.along is None:
        return add_product(point, *_same(point, within, point.dtype))
    moving = torch.where(found.sound, found.moving, 0.0)  # 0 along whatever is not finite
    along = found.along * -step
    along = along.baddbmm(along, difference)
    dtype = _tall_dtype(point, found)
    tall, within = _same(point, within, dtype)
    new = add_product_(add_product(tall, tall, within), *_same(moving, along, dtype))
    new = new.to(point.dtype)
    if _is_rough(point, found, step):
        own = own_gram(new) if row_sum is None else row_sum(own_gram(new))
        half = mend(own)  # H of X'X = I - 2H; its inverse root is I + H + 3/2 H^2
        new = add_product(new, new, torch.baddbmm(half, half, half, alpha=1.5))
    return new


class _Found(NamedTuple):
    """D = X within + M along, in m x m matrices, and what goes with it.

    Attributes:
        within, along: ``(k, m, m)``; ``along`` is None for square matrices.
        moving: M, or what is left of it.
        mending: c - I for X c nearest to X on the manifold.
        length: D'D.
        multiplier: Lambda.
        finite: Whether M is, and its square, ``(k, 1, 1)``.
        sound: Whether D is other than 0, ``(k, 1, 1)``.
        gain: How much the sum of the two products amplifies rounding, ``(k, 1, 1)``.
    """

    within: Tensor
    along: Tensor | None
    moving: Tensor
    mending: Tensor
    length: Tensor
    multiplier: Tensor
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
    mending: Tensor
    noise: Tensor


def _solve(
    point: Tensor,
    moving: Tensor,
    multiplier: Tensor | None,
    steps: int | None,
    tolerance: float,
    smoothing: float,
    row_sum: RowSum | None,
) -> _Found:
    """Find the direction, in m x m matrices."""
    if row_sum is None and point.size(-2) == point.size(-1):
        return _solve_square(point, moving, tolerance, 3.0 * smoothing)  # nothing else is lost
    is_fixed = steps is not None or not is_free_to_read(point)
    smoothing = smoothing * _COARSER if is_fixed else smoothing
    moving, parts = _tangent_parts(point, moving, row_sum)
    m = point.size(-1)
    scale, spread = _scale_of(parts.square + own_gram(parts.skew))
    limits = torch.finfo(scale.dtype)
    sound = (scale > (limits.tiny / limits.eps) ** 0.5) & scale.isfinite()
    factor = torch.where(sound, scale.reciprocal(), 0.0)  # M = 0 has R = delta and Y = 0
    spread = torch.where(sound, spread, 1.0)
    turn = torch.where(sound, parts.skew * factor, 0.0)
    own = torch.where(sound, parts.square * factor.square(), 0.0)
    noise = torch.where(sound, parts.noise * factor.square(), 0.0)
    floor = (smoothing / m * spread).square() + noise
    start = None if multiplier is None else _start(multiplier, turn, factor)
    if is_fixed:
        count = (_COLD if multiplier is None else _WARM) if steps is None else steps
        inverse, half, shift, length = fixed_steps(turn, own, start, floor, count, smoothing / m)
    else:
        inverse, half, shift, length = search(turn, own, start, floor, tolerance)
    along = inverse * factor
    # What M is multiplied by must fit into the dtype of M; where M is too small for that, D = 0.
    largest = along.abs().amax(dim=(-2, -1), keepdim=True)
    sound = sound & (largest < torch.finfo(_at_least_single(point)).max / 4)
    along, length = (torch.where(sound, matrix, 0.0) for matrix in (along, length))
    # N = M - X c B
    within = torch.baddbmm(half, parts.inner, along, beta=2.0, alpha=-1.0)
    within = within.baddbmm(parts.mending, within)
    shift = torch.where(sound, shift * scale, 0.0)
    within = torch.where(sound, within, 0.0)
    gain = (parts.noise / (_NOISE * torch.finfo(own.dtype).eps) * square_norm(along)).sqrt() / m
    finite = parts.noise.isfinite()
    return _Found(within, along, moving, parts.mending, length, -shift, finite, sound, gain)


def _solve_square(point: Tensor, moving: Tensor, tolerance: float, smoothing: float) -> _Found:
    """Find P with D = X P: the polar factor of K, by odd polynomials of K.

    Polynomials that take [l, 1] to 1 leave a singular value s < l of K / u at d >= s / l. What that
    costs is at most the sum of l d (1 - d) <= l (1 - d^2) (0.28 + 0.27 d^2), known from P'P. So l
    starts near what random matrices need, and falls only where a larger part of K is small.
    """
    inner = gram(point, moving)
    largest = inner.abs().amax(dim=(-2, -1), keepdim=True)
    finite = largest.isfinite()
    sound = (largest > 0) & finite
    inner = torch.where(sound, inner / largest, 0.0)  # squares must neither over- nor underflow
    size = square_norm(inner)
    inner = skew(inner)
    square = own_gram(inner)
    trace = trace_of(square)
    # the skew part of what is all but symmetric is rounding
    share = trace / (trace + size * (_ROUNDING * torch.finfo(inner.dtype).eps) ** 2)
    share = torch.where(sound, share, 0.0)
    fourth = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True)  # u^2
    sound = sound & (fourth > 0)  # 0/0 where K is 0
    inner = inner * torch.where(sound, fourth.rsqrt(), 0.0)
    square = square / torch.where(sound, fourth, 1.0)
    # |s|_1 >= |s|_2^3 / |s|_4^2, over m
    m = point.size(-1)
    mean = torch.where(sound, (trace / fourth) ** 1.5 / m, math.inf)
    low = least = smoothing / m  # of any K
    if is_free_to_read(point):
        least = min(smoothing * float(mean.min()), 1.0)
        low = max(least, _FEW_SMALL * float(mean.min())) if least < 1.0 else 1.0
    polar, eps = inner, torch.finfo(inner.dtype).eps
    factors: list[float] = []
    while True:
        lower = low
        for factor in factors:
            lower *= factor * (3.0 - (factor * lower) ** 2) / 2.0
        for factor in schedule(lower, max(tolerance, eps)):
            polar = _odd(polar, square, factor)
            factors.append(factor)
            if len(factors) % 3 == 0:  # what is not skew grows as small singular values do
                polar = skew(polar)
            square = own_gram(polar)
        if low <= least:
            break
        lost = (0.28 * m - 0.01 * trace_of(square) - 0.27 * square_norm(square)) * low
        if bool((lost <= 0.31 * smoothing * inner_product(inner, polar)).all()):
            break
        low = max(low / 30, least)
    zero, polar, square = torch.zeros_like(polar), skew(polar) * share, square * share.square()
    return _Found(polar, None, moving, zero, square, zero, finite, sound, torch.ones_like(mean))


def _odd(matrix: Tensor, square: Tensor, factor: float) -> Tensor:
    """Return f K (3 - f^2 K'K) / 2 for skew K and the square K'K: skew but for rounding."""
    into = matrix * (1.5 * factor)
    return symmetric_product(matrix, square, into, beta=1.0, alpha=-0.5 * factor**3, sign=-1)


def _scale_of(square: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and |A|_F^2 / u^2 >= 1 for A'A: u^4 = |A'A|_F^2, the sum of all s^4, >= |A|_2^4."""
    trace = trace_of(square)
    share = torch.linalg.vector_norm(square / trace, dim=(-2, -1), keepdim=True)  # 1/m to 1
    return (trace * share).sqrt(), share.reciprocal()


def _tangent_parts(point: Tensor, moving: Tensor, row_sum: RowSum | None) -> tuple[Tensor, _Parts]:
    """Return M and its parts; of M only M_T, in the dtype of the work, where that is all but lost.

    Q = M'M - B'B is off by eps |M|^2, more than M_T if that is shorter than the root of eps |M|.
    """
    work = finest_dtype(point)
    tall, other = point.to(work), moving.to(work)
    parts = _parts_of(tall, other, row_sum)
    size = parts.noise / (_NOISE * torch.finfo(work).eps)
    if not is_free_to_read(point):
        return moving, parts
    is_lost = trace_of(parts.square) + square_norm(parts.skew) < _RADIAL * size
    if not bool(is_lost.any()):
        return moving, parts
    normal = sym(parts.inner)
    moving = add_product(other, tall, normal.baddbmm(parts.mending, normal), alpha=-1.0)
    parts = _parts_of(tall, torch.where(is_lost, moving, other), row_sum)
    lost = _ROUNDING * torch.finfo(point.dtype).eps
    noise = torch.where(is_lost, parts.noise + lost**2 * size, parts.noise)
    return torch.where(is_lost, moving, other), parts._replace(noise=noise)


def _parts_of(tall: Tensor, other: Tensor, row_sum: RowSum | None) -> _Parts:
    """Sum over the rows: X'M, and the triangles of X'X and M'M, which are symmetric."""
    inner, own, point_own = gram(tall, other), own_gram(other), own_gram(tall)
    if row_sum is not None:
        diagonal = point_own.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        triangles = own.triu() + point_own.tril(-1)
        m = inner.size(-1)
        packed = row_sum(torch.cat([inner, triangles, diagonal], dim=-1))
        inner, triangles, diagonal = packed[..., :m], packed[..., m:-1], packed[..., -1:]
        lower = triangles.tril(-1)
        point_own = lower + lower.mH + torch.diag_embed(diagonal.squeeze(-1))
        own = triangles.triu() + triangles.triu(1).mH
    mending = mend(point_own)
    inner = inner.baddbmm(mending, inner)
    square = sym(own - own_gram(inner))
    noise = trace_of(own) * (_NOISE * torch.finfo(own.dtype).eps)
    return _Parts(inner, skew(inner), square, mending, noise)


def _is_empty(point: Tensor) -> bool:
    """Say whether no process has anything; one without rows must still take part in the sums."""
    return 0 in (point.size(0), point.size(-1))


def _start(multiplier: Tensor, turn: Tensor, factor: Tensor) -> Tensor:
    """Return T of the multiplier; the optimal T is never longer than K."""
    return fits(sym(multiplier.to(turn.dtype)) * -factor, turn)


def _check(
    point: Tensor,
    grad: Tensor,
    multiplier: Tensor | None,
    steps: int | None,
    tolerance: float,
    smoothing: float,
    row_sum: RowSum | None,
) -> None:
    shape = tuple(point.shape)
    if point.ndim != 3 or (row_sum is None and shape[-2] < shape[-1]):
        raise ValueError(fail("point", "be tall matrices (k, n, m)", f"shape {shape}"))
    if grad.shape != point.shape:
        raise ValueError(fail("grad", f"have the shape {shape} of point", tuple(grad.shape)))
    is_float = point.is_floating_point() or point.is_complex()
    if not is_float or (grad.is_complex() and not point.is_complex()):
        kind = f"fit into the dtype of `point`, floating-point or complex, {point.dtype}"
        raise TypeError(fail("grad", kind, grad.dtype))
    small = (shape[0], shape[-1], shape[-1])
    if multiplier is not None and multiplier.shape != small:
        raise ValueError(fail("multiplier", f"have the shape {small}", tuple(multiplier.shape)))
    if steps is not None:
        check_range("steps", steps, 0)
    check_range("tolerance", tolerance, 0.0)
    check_range("smoothing", smoothing, 0.0, 1.0, open_low=True)


def _tall_dtype(point: Tensor, found: _Found) -> torch.dtype:
    """Return the dtype of the last tall products: more digits than the point has, if they count."""
    is_ill = is_free_to_read(point) and bool((found.gain > _ILL).any())
    return found.within.dtype if is_ill else _at_least_single(point)


def _at_least_single(point: Tensor) -> torch.dtype:
    return torch.promote_types(point.dtype, torch.float32)


def _is_rough(point: Tensor, found: _Found, step: Scalar) -> bool:
    """Say whether rounding in Q, eps |M|^2 |R^(-1)|^2 in D'D, shows in X'X of the new point."""
    if not is_free_to_read(point):  # the next step takes it out
        return False
    noise = torch.finfo(found.length.dtype).eps * (found.gain * (step * point.size(-1))).square()
    return bool((noise > torch.finfo(point.dtype).eps).any())


def _same(tall: Tensor, small: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return both in one dtype."""
    return tall.to(dtype), small.to(dtype)


def _step_of(lr: Scalar, length: Tensor) -> tuple[Scalar, float]:
    """Return eta and a bound on eta^2 D'D: |2Y| and |N R^(-1)| are at most 1 each."""
    if isinstance(lr, Tensor):
        return lr.to(length.real.dtype).clamp(-_LONGEST, _LONGEST), 2 * _LONGEST**2
    lr = max(-_LONGEST, min(lr, _LONGEST))
    return lr, 2 * lr * lr
