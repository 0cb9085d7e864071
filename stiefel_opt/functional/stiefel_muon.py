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

**Where values can be read** g is minimised by Newton's method in the geometry of positive definite
matrices, R <- R^(1/2) (I + U/2)^2 R^(1/2), where a step is not shortened by singular values of
different size: one eigenvalue decomposition a step, and U by conjugate gradients, three products an
iteration. **Elsewhere** the same steps, a fixed number, without the eigenbasis: R and R^(-1) by
polynomials, and the equations R Y + Y R = K by doubling. What is kept between steps is
T = -Lambda, of L = sym B + Lambda: R is the root of Q + (T + K)'(T + K). **Square matrices** have
Lambda = 0: D is X times the polar factor of K, by polynomials.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt._checks import check_range, fail
from stiefel_opt.device import finest_dtype, is_free_to_read
from stiefel_opt.functional.flows import Setting, keep_, zeroed
from stiefel_opt.linalg import (
    add_product,
    add_product_,
    add_to_diagonal_,
    gram,
    own_gram,
    product,
    skew,
    sym,
    symmetric_product,
)
from stiefel_opt.roots import roots

__all__ = ["muon_", "spectral_direction", "spectral_gap"]

RowSum = Callable[[Tensor], Tensor]
Scalar = float | Tensor

# Dual steps where nothing can be read: from a multiplier, and without one.
_WARM: Final = 2
_COLD: Final = 6
_NEWTON: Final = 60  # the most decompositions; 3 to 17 are usual from a cold start
_CONJUGATE: Final = 30  # the most iterations for one Newton step
_LENGTH: Final = 5e-5  # by which |D'D - I| may exceed what smoothing explains
_SOLVE: Final = 3  # iterations for a Newton step by products alone
_RADIAL: Final = 1e-4  # share of |M|^2 below which M_T is worked out by itself
_ROUNDING: Final = 4.0  # times eps |M|: what of M may be rounding
_NOISE: Final = 64.0  # times eps |M|^2: what rounding leaves in Q
_ILL: Final = 16.0  # mean condition of Z from which tall products in float32 lose too much
_FEW_SMALL: Final = 0.035  # where a square matrix is cut off at first, over its mean singular value
_LONGEST: Final = 4.0  # atan(4) is 76 degrees


def spectral_direction(
    point: Tensor,
    grad: Tensor,
    multiplier: Tensor | None = None,
    *,
    steps: int | None = None,
    tolerance: float = 1e-5,
    smoothing: float = 3e-4,
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
            many Newton steps as ``tolerance`` asks for, elsewhere 2 with a multiplier and 6
            without.
        tolerance: Relative residual at which Newton's method stops.
        smoothing: The value is at least 1 - 0.31 smoothing times the optimum.
        row_sum: Sum over the processes that share the rows. Default: all rows are here.

    Returns: D ``(k, n, m)`` and Lambda ``(k, m, m)``, 0 where M is 0, not finite or too
        large to be squared.
    Raises:
        ValueError: for shapes that do not fit, or numbers out of range.
    Note: Two products of n x m by m x m and two symmetric halves before, two after; for square
        matrices one and one. One sum of m (2m + 1) numbers over the rows. The m x m work is in
        float64 where the device has it, as are the tall products of the sums, and on a CPU those
        of an ill-conditioned M; where M is all but radial, one more product and the sums again.
        Without ``steps`` matrices with n >= 4m take 3 to 10 eigenvalue decompositions, those with n
        below 2m about 12 and up to 60. A fixed step is about 270 products of m x m, and 50 for the
        roots at the end; where it has not converged D is shortened to norm 1.
    Reference: Bernstein, Modular Manifolds (Thinking Machines, 2025), for the problem and its dual.
    """
    _check(point, grad, multiplier, steps, tolerance, smoothing, row_sum)
    found = _solve(point, grad, multiplier, steps, tolerance, smoothing, row_sum)
    if found.along is None:
        direction = product(point, found.within)
    else:
        dtype = _tall_dtype(point, found)
        direction = product(*_same(point, found.within, dtype))
        direction = add_product_(direction, *_same(found.moving, found.along, dtype))
        direction = direction.to(point.dtype)
    return torch.where(found.sound, direction, 0.0), found.multiplier.to(point.dtype)


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

    Returns: The gap of every matrix; 0 where the gradient has no tangent part.
    Raises:
        ValueError: for shapes that do not fit.
    Note: Eigenvalues of two m x m matrices, sums of 3 m^2 numbers over the rows. Rounding makes it
        as large as the root of eps in the dtype of the m x m work.
    """
    _check(point, grad, multiplier, None, 0.0, 0.5, row_sum)
    if direction.shape != point.shape:
        shape = tuple(point.shape)
        raise ValueError(fail("direction", f"have the shape {shape}", tuple(direction.shape)))
    _, parts = _tangent_parts(point, grad, row_sum)
    work = parts.skew.dtype
    tall = direction.to(work)
    value = (grad.to(work).conj() * tall).sum(dim=(-2, -1)).real[:, None, None]
    packed = torch.cat([own_gram(tall), value.expand(-1, tall.size(-1), 1).to(work)], dim=-1)
    packed = packed if row_sum is None else row_sum(packed)
    length = _largest(packed[..., :-1]).clamp(min=1.0).sqrt()
    inner = parts.skew - sym(multiplier.to(work))
    own = parts.square + own_gram(inner)
    bound = torch.linalg.eigvalsh(sym(own)).clamp(min=0.0).sqrt().sum(dim=-1)
    gap = 1.0 - packed[:, 0, -1].real / (bound * length)
    return torch.where(bound > 0, gap, 0.0).to(point.real.dtype)


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
    tolerance: float = 1e-5,
    smoothing: float = 3e-4,
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
        found = found._replace(mending=_mending(own_gram(point)))
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
        new = add_product(new, new, _mending(own))
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
        return _solve_square(point, moving, tolerance, smoothing)
    moving, parts = _tangent_parts(point, moving, row_sum)
    m = point.size(-1)
    scale, spread = _scale_of(parts.square + own_gram(parts.skew))
    sound = (scale > 0) & scale.isfinite()
    factor = torch.where(sound, scale.reciprocal(), 0.0)  # M = 0 has R = delta and Y = 0
    spread = torch.where(sound, spread, 1.0)
    turn = torch.where(sound, parts.skew * factor, 0.0)
    own = torch.where(sound, parts.square * factor.square(), 0.0)
    noise = torch.where(sound, parts.noise * factor.square(), 0.0)
    floor = (smoothing / m * spread).square() + noise
    start = None if multiplier is None else _start(multiplier, turn, factor)
    if steps is None and is_free_to_read(point):
        inverse, half, shift, length = _newton(turn, own, start, floor, tolerance)
    else:
        count = (_COLD if multiplier is None else _WARM) if steps is None else steps
        inverse, half, shift, length = _fixed_steps(turn, own, start, floor, count, smoothing / m)
    along = inverse * factor
    # N = M - X c B
    within = torch.baddbmm(half, parts.inner, along, beta=2.0, alpha=-1.0)
    within = within.baddbmm(parts.mending, within)
    shift = torch.where(sound, shift * scale, 0.0)
    within = torch.where(sound, within, 0.0)
    gain = (parts.noise / (_NOISE * torch.finfo(own.dtype).eps) * _square_norm(along)).sqrt() / m
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
    size = _square_norm(inner)
    inner = skew(inner)
    square = own_gram(inner)
    trace = _trace(square)
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
        for factor in _schedule(lower, max(5 * tolerance, eps)):
            polar = _odd(polar, square, factor)
            square = own_gram(polar)
            factors.append(factor)
        if low <= least:
            break
        lost = (0.28 * m - 0.01 * _trace(square) - 0.27 * _square_norm(square)) * low
        if bool((lost <= 0.31 * smoothing * _inner(inner, polar)).all()):
            break
        low = max(low / 30, least)
    zero, polar, square = torch.zeros_like(polar), polar * share, square * share.square()
    return _Found(polar, None, moving, zero, square, zero, finite, sound, torch.ones_like(mean))


def _odd(matrix: Tensor, square: Tensor, factor: float) -> Tensor:
    """Return f K (3 - f^2 K'K) / 2 for skew K and the square K'K: skew."""
    into = matrix * (1.5 * factor)
    # rounding that is not skew would grow with the small singular values
    return skew(symmetric_product(matrix, square, into, beta=1.0, alpha=-0.5 * factor**3, sign=-1))


def _scale_of(square: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and |A|_F^2 / u^2 >= 1 for A'A: u^4 = |A'A|_F^2, the sum of all s^4, >= |A|_2^4."""
    trace = _trace(square)
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
    is_lost = _trace(parts.square) + _square_norm(parts.skew) < _RADIAL * size
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
    mending = _mending(point_own)
    inner = inner.baddbmm(mending, inner)
    square = sym(own - own_gram(inner))
    noise = _trace(own) * (_NOISE * torch.finfo(own.dtype).eps)
    return _Parts(inner, skew(inner), square, mending, noise)


def _mending(own: Tensor) -> Tensor:
    """Return (I - X'X) / 2, for X + X mending is nearly orthonormal; uses the memory of X'X."""
    return add_to_diagonal_(own.mul_(-0.5), 0.5)


def _start(multiplier: Tensor, turn: Tensor, factor: Tensor) -> Tensor:
    """Return T of the multiplier; the optimal T is never longer than K."""
    return _fits(sym(multiplier.to(turn.dtype)) * -factor, turn)


def _fits(shift: Tensor, turn: Tensor) -> Tensor:
    """Return T, shortened to the length of K; 0 where it is not finite."""
    size, most = _square_norm(shift), _square_norm(turn)
    fits = torch.where(size > most, (most / size).sqrt(), 1.0)
    return torch.where(size.isfinite(), shift * fits, 0.0)


class _Spectrum(NamedTuple):
    """R = V diag(r) V', and in its eigenbasis Y, F = R^(-1) (Q + delta^2) R^(-1), 4Y'Y + F - I.

    ``objective`` is g(R). All are ``(k, ., .)``; r is ``(k, 1, m)``.
    """

    values: Tensor
    vectors: Tensor
    turn: Tensor
    normal: Tensor
    excess: Tensor
    objective: Tensor


def _spectrum(
    values: Tensor, vectors: Tensor, turn: Tensor, own: Tensor, floor: Tensor
) -> _Spectrum:
    values = values.unsqueeze(-2)
    half = torch.bmm(vectors.mH, torch.bmm(turn, vectors)) / (values + values.mT)
    normal = torch.bmm(vectors.mH, torch.bmm(own, vectors)) / (values * values.mT)
    normal.diagonal(dim1=-2, dim2=-1).add_((floor / values.square()).squeeze(-2))
    excess = torch.baddbmm(normal, half.mH, half, alpha=4.0)
    diagonal = excess.diagonal(dim1=-2, dim2=-1).real.unsqueeze(-2)
    objective = (values * (diagonal + 1.0)).sum(dim=-1, keepdim=True) / 2
    return _Spectrum(values, vectors, half, normal, add_to_diagonal_(excess, -1.0), objective)


def _newton(
    turn: Tensor, own: Tensor, start: Tensor | None, floor: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimise g(R); return R^(-1), Y, T and D'D."""
    inner = turn if start is None else turn + start
    values, vectors = torch.linalg.eigh(sym(own + own_gram(inner)))
    whole = _spectrum((values.clamp(min=0.0) + floor.squeeze(-1)).sqrt(), vectors, turn, own, floor)
    radius = torch.full_like(whole.objective, math.inf)
    active = _unfinished(whole, floor, tolerance).nonzero().squeeze(-1)
    for _ in range(_NEWTON):
        if active.numel() == 0:
            break
        old = _Spectrum(*(part[active] for part in whole))
        step = _newton_step(old)
        length = _square_norm(step).sqrt()
        step = step * (radius[active] / length).clamp(max=1.0)
        scale = (old.values * old.values.mT).sqrt()
        half = add_to_diagonal_(step / 2, 1.0)
        moved = own_gram(half) * scale
        moved = torch.bmm(old.vectors, torch.bmm(moved, old.vectors.mH))
        values, vectors = torch.linalg.eigh(sym(moved))
        least = floor[active].squeeze(-1).sqrt() / 8
        new = _spectrum(
            torch.maximum(values, least), vectors, turn[active], own[active], floor[active]
        )
        better = new.objective <= old.objective * (1 + 1e-13)
        for kept, fresh, before in zip(whole, new, old, strict=True):
            kept[active] = torch.where(better, fresh, before)
        radius[active] = torch.where(better, math.inf, torch.minimum(length, radius[active]) / 4)
        gained = old.objective - new.objective
        stuck = (gained < 1e-13 * old.objective) & (better | (radius[active] < 1e-6))
        at = _Spectrum(*(part[active] for part in whole))
        active = active[_unfinished(at, floor[active], tolerance) & ~stuck.flatten()]
    vectors, values = whole.vectors, whole.values
    inverse = torch.bmm(vectors / values, vectors.mH)
    half = torch.bmm(vectors, torch.bmm(whole.turn, vectors.mH))
    shift = torch.bmm(vectors, torch.bmm(whole.turn * (values - values.mT), vectors.mH))
    less = torch.diag_embed((floor / values.square()).squeeze(-2))
    length = torch.bmm(vectors, torch.bmm(whole.excess - less, vectors.mH))
    length = add_to_diagonal_(sym(length), 1.0)
    long = _square_norm(whole.excess) > _LENGTH**2
    if bool(long.any()):  # |D| <= 1 all the same
        most = torch.where(long, _largest(length)[:, None, None].clamp(min=1.0), 1.0)
        inverse, half, length = inverse / most.sqrt(), half / most.sqrt(), length / most
    return inverse, skew(half), sym(shift), length


def _unfinished(at: _Spectrum, floor: Tensor, tolerance: float) -> Tensor:
    """Say which members ``(k,)`` have not converged: R^(1/2) (D'D - I) R^(1/2), and |D|.

    Where R is small D'D may still be off, but then smoothing keeps it below I, and it is enough to
    know that.
    """
    scaled = at.excess * (at.values * at.values.mT).sqrt()
    most = tolerance * at.values.sum(dim=-1, keepdim=True) / math.sqrt(at.values.size(-1))
    far = (_square_norm(scaled).sqrt() > most).flatten()
    unsure = (_square_norm(at.excess).sqrt().flatten() > _LENGTH) & ~far
    if bool(unsure.any()):
        less = (floor[unsure] / at.values[unsure].square()).squeeze(-2)
        far[unsure] = _largest(at.excess[unsure] - torch.diag_embed(less)) > _LENGTH
    return far


def _largest(matrix: Tensor) -> Tensor:
    """Return the largest eigenvalue of symmetric matrices, ``(k,)``."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(matrix)
    return eigenvalues[:, -1]


def _newton_step(at: _Spectrum) -> Tensor:
    """Return U of a Newton step by conjugate gradients, in the eigenbasis of R.

    Along R^(1/2) exp(t U) R^(1/2) the second derivative of g is <U, H U>,

        H U = 2 R^(1/2) (E Y + Y E) R^(1/2) + sym(U Phi),  R E + E R = -(R'Y + Y R'),

    with R' = R^(1/2) U R^(1/2) and Phi = R^(1/2) (I - 4Y'Y + F) R^(1/2) / 2.
    """
    scale = (at.values * at.values.mT).sqrt()
    both = at.values + at.values.mT
    gradient = at.excess * scale * -0.5
    # I - 4Y'Y + F = 2F - (4Y'Y + F - I)
    phi = (at.normal * 2 - at.excess) * scale * 0.5
    weight = at.values * (1 + at.normal.diagonal(dim1=-2, dim2=-1).real.unsqueeze(-2))
    weight = (weight + weight.mT) / 4
    residual = -gradient
    direction = preconditioned = residual / weight
    step = torch.zeros_like(gradient)
    left = first = _inner(residual, preconditioned)
    enough = 1e-2 * (first * 100 / at.objective).clamp(max=1.0) * first
    for _ in range(_CONJUGATE):
        change = torch.bmm(direction * scale, at.turn)
        change = torch.bmm((change.mH - change) / both, at.turn)
        image = 2 * scale * (change + change.mH) + sym(torch.bmm(direction, phi))
        curvature = _inner(direction, image)
        least = 1e-6 * _inner(direction, weight * direction)
        going = (left > enough) & (curvature > least)
        advance = torch.where(going, left / curvature, 0.0)
        step = step + direction * advance
        residual = residual - image * advance
        preconditioned = residual / weight
        new = _inner(residual, preconditioned)
        if not bool((going & (new > enough)).any()):
            break
        direction = torch.where(going, preconditioned + direction * (new / left), direction)
        left = torch.where(going, new, left)
    lost = _square_norm(step) == 0  # no curvature at the very first
    return torch.where(lost, -gradient / weight, step)


def _fixed_steps(
    turn: Tensor, own: Tensor, start: Tensor | None, floor: Tensor, steps: int, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Improve T by ``steps`` Newton steps; return R^(-1), Y, T and D'D, by products alone.

    R is that of T, and the step W that of :func:`_newton_step` for R' = W, without an eigenbasis:

        2 (E Y + Y E) + sym(S W (F + G)) = -G,   R E + E R = -(W Y + Y W),   S = R^(-1),

    G = (I - 4Y'Y - F) / 2. Then T + dT = (Y + E)(R + W) - (R + W)(Y + E).
    """
    shift = torch.zeros_like(turn) if start is None else start
    root, inverse = _roots_at(turn, own, shift, floor, lower)
    for _ in range(steps):
        shift = _fits(_improved(turn, own, root, inverse, floor, lower), turn)
        root, inverse = _roots_at(turn, own, shift, floor, lower)
    half = skew(torch.bmm(turn + shift, inverse)) / 2
    length = sym(own_gram(half) * 4 + torch.bmm(inverse, torch.bmm(own, inverse)))
    # D'D = I - floor R^(-2) + E: what E adds is taken from the length of D
    excess = add_to_diagonal_(length + own_gram(inverse) * floor, -1.0)
    most = 1.0 + torch.linalg.vector_norm(own_gram(excess), dim=(-2, -1), keepdim=True).sqrt()
    return inverse * most.rsqrt(), half * most.rsqrt(), shift, length / most


def _improved(
    turn: Tensor, own: Tensor, root: Tensor, inverse: Tensor, floor: Tensor, lower: float
) -> Tensor:
    """Return T + dT of one Newton step from R."""
    factors = _smith_factors(root, inverse, lower)
    half = skew(_lyapunov(factors, turn))
    normal = torch.bmm(inverse, torch.bmm(own, inverse))
    normal = sym(normal + own_gram(inverse) * floor)
    gradient = add_to_diagonal_((own_gram(half) * 4 + normal) * -0.5, 0.5)
    outer = normal + gradient
    step, along = torch.zeros_like(turn), torch.zeros_like(turn)
    residual = -gradient
    direction, left = residual, None
    for _ in range(_SOLVE):
        scaled = torch.bmm(root, torch.bmm(residual, root))
        preconditioned = sym(_lyapunov(factors, scaled)) * 2
        new = _inner(residual, preconditioned)
        direction = (
            preconditioned if left is None else preconditioned + direction * _ratio(new, left)
        )
        left = new
        change = torch.bmm(direction, half)
        change = _lyapunov(factors, change.mH - change)
        image = torch.bmm(change, half) * 2
        image = image + image.mH + sym(torch.bmm(inverse, torch.bmm(direction, outer)))
        advance = _ratio(new, _inner(direction, image))
        step, along = step + direction * advance, along + change * advance
        residual = residual - image * advance
    moved = torch.bmm(half + along, root + step)
    return moved + moved.mH


def _smith_factors(root: Tensor, inverse: Tensor, lower: float) -> list[Tensor]:
    """Return what :func:`_lyapunov` needs: (2p)^(1/2) J and the powers 2^k of 2pJ - I.

    J = (R + p)^(-1), by Newton's method; p^2 is the product of the largest and smallest eigenvalue.
    """
    size = torch.linalg.vector_norm(root, dim=(-2, -1), keepdim=True)
    middle = (size / torch.linalg.vector_norm(inverse, dim=(-2, -1), keepdim=True)).sqrt()
    whole = torch.zeros_like(root)
    whole.diagonal(dim1=-2, dim2=-1).add_((middle / (size + middle)).squeeze(-1))
    whole = whole + root / (size + middle)
    spread = math.sqrt(2.0 * root.size(-1) ** 0.5 / lower)
    count = math.ceil(math.log2(spread))
    found = add_to_diagonal_(torch.zeros_like(root), 1.0)
    for _ in range(count + 4):
        found = torch.baddbmm(found, found, torch.bmm(whole, found), beta=2.0, alpha=-1.0)
    found = sym(found) / (size + middle)
    power = add_to_diagonal_(found * (2 * middle), -1.0)
    factors = [found * (2 * middle).sqrt()]
    for _ in range(min(count, 10)):
        factors.append(power)
        power = torch.bmm(power, power)
    return factors


def _lyapunov(factors: list[Tensor], right: Tensor) -> Tensor:
    """Return X with R X + X R = ``right`` by Smith's doubling X <- X + A X A, A <- A^2.

    Reference: Smith (1968), Matrix equation XA + BX = C.
    """
    first, *powers = factors
    solution = torch.bmm(first, torch.bmm(right, first))
    for power in powers:
        solution = solution + torch.bmm(power, torch.bmm(solution, power))
    return solution


def _roots_at(
    turn: Tensor, own: Tensor, shift: Tensor, floor: Tensor, lower: float
) -> tuple[Tensor, Tensor]:
    """Return R and R^(-1) for R^2 = Q + delta^2 + (T + K)'(T + K)."""
    square = sym(own + own_gram(turn + shift))
    square.diagonal(dim1=-2, dim2=-1).add_(floor.squeeze(-1))
    return _square_roots(square, lower)


def _square_roots(square: Tensor, lower: float) -> tuple[Tensor, Tensor]:
    """Return W^(1/2) and W^(-1/2) for eigenvalues from lower^2, by coupled odd polynomials."""
    bound = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True)
    root = square / bound
    inverse = add_to_diagonal_(torch.zeros_like(root), 1.0)
    # |W| <= tr W is at most 2 and a little in units of |M_T|_F
    for factor in _schedule(lower / math.sqrt(3.0), torch.finfo(square.dtype).eps):
        near = torch.bmm(inverse, root).mul_(-0.5 * factor**3)
        near = add_to_diagonal_(near, 1.5 * factor)
        root, inverse = torch.bmm(root, near), torch.bmm(near, inverse)
    return sym(root) * bound.sqrt(), sym(inverse) * bound.rsqrt()


def _schedule(lower: float, tolerance: float) -> list[float]:
    """Return the factors f of x <- f x (3 - f^2 x^2) / 2 that take [lower, 1] to 1.

    f^2 = 3 / (1 + l + l^2) gives both ends the same value, the next l, at the maximum 1: for small
    l 2.6 times as much, where f = 1 gives 1.5. Rounding must not take what is near 1 below zero, so
    l counts as at least 1e-3 there.

    Reference: Chen & Chow (2014), A stable scaling of Newton-Schulz.
    """
    factors = []
    while 1.0 - lower > tolerance:
        kept = max(lower, 1e-3)
        factors.append(math.sqrt(3.0 / (1.0 + kept + kept * kept)))
        end = factors[-1] * lower
        lower = end * (3.0 - end * end) / 2.0
    return factors


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
    return found.within.dtype if is_ill else point.dtype


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


def _square_norm(matrix: Tensor) -> Tensor:
    """Return |A|_F^2, ``(k, 1, 1)``."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm.square()


def _trace(matrix: Tensor) -> Tensor:
    """Return the trace of a symmetric matrix, ``(k, 1, 1)``."""
    return matrix.diagonal(dim1=-2, dim2=-1).real.sum(dim=-1)[:, None, None]


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """Return <A, B> of symmetric matrices, ``(k, 1, 1)``."""
    return (left.conj() * right).real.sum(dim=(-2, -1), keepdim=True)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a / b, 0 where b is not positive."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)
