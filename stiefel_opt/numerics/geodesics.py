r"""Geodesics: exponential, logarithm and distance, on batches ``(..., n, m)`` of tall matrices.

A tangent vector at X is :math:`X A + Q B`, Q an orthonormal basis beside X. With :math:`\beta` = 1
for the Euclidean and 1/2 for the canonical metric its square norm is
:math:`\beta |A|^2 + |B|^2`, and the geodesic

.. math:: [X \; Q] \exp \begin{pmatrix} 2 \beta A & -B' \\ B & 0 \end{pmatrix}
    \begin{pmatrix} I \\ 0 \end{pmatrix} \exp((1 - 2 \beta) A).

Reference: Edelman, Arias & Smith (SIAM J. Matrix Anal. Appl. 1998); Zimmermann & Hueper (2022),
Computing the Riemannian logarithm on the Stiefel manifold.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

from stiefel_opt.errors import counted, fail, users_level
from stiefel_opt.numerics.device import exact_products, finest_dtype, values_of
from stiefel_opt.numerics.geometry import newton_schulz, orientation, polar_factor, tangent_part
from stiefel_opt.numerics.linalg import exponential, skew

#: beta of each metric.
METRICS: Final[Mapping[str, float]] = MappingProxyType({"euclidean": 1.0, "canonical": 0.5})

_MOST: Final = 200  # evaluations of a fixed point
_DEPTH: Final = 10  # of its memory
_DEEP: Final = 40  # where the map turns more than it contracts
_TRIES: Final = 5  # starts at random, where the first one has led nowhere
_PATH: Final = (0.6, 0.7, 0.8, 0.9)  # beta on the way from the canonical metric to the Euclidean
_FOUND: Final = 1e-6  # a larger residual is no solution
_SMALL: Final = 1e-2  # square of an angle below which a series is exact to rounding


# ---- square matrices -----------------------------------------------------------------------------


def logarithm(point: Tensor) -> Tensor:
    r"""Return the skew-Hermitian A with exp(A) = Q and angles in [-pi, pi], for square Q.

    The Hermitian part C and -i times the skew part S of Q commute, so an eigenbasis of C + t S,
    t no particular number, is one of both: cos and sin of the angles. Real Q with determinant 1 has
    the eigenvalue -1 an even number of times: its space is paired into half turns. Real 3 x 3
    matrices go through their quaternions.

    Args:
        point: Orthogonal or unitary matrices ``(..., n, n)``, real ones of determinant 1.

    Returns: A. At a half turn it is one of several.
    Raises:
        ValueError: for matrices that are not square, and real ones of determinant -1, naming the
            first and how many there are.

    Note: Two Hermitian eigendecompositions of n x n; differentiable once, of 3 x 3 any number of
        times. At half turns, where A jumps, the derivative is one of a branch.
    """
    if point.size(-2) != point.size(-1):
        raise ValueError(fail("point", "be square", point))
    if not point.is_complex() and (values := values_of(point)) is not None:
        turned_over = orientation(values) < 0
        if bool(turned_over.any()):
            given = f"-1{counted(turned_over)}"
            raise ValueError(fail("determinant", "be 1 for a real logarithm", given))
    return principal_logarithm(point)[0]


def principal_logarithm(point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the :func:`logarithm` of any matrices, and where it is one of several.

    That is where an angle is pi. For a determinant of -1 its exponential is another matrix.
    """
    is_of_three = point.size(-1) == 3 and not point.is_complex()
    rule: Any = _LogarithmOfThree if is_of_three else _Logarithm
    logarithm, turns = rule.apply(point)
    return logarithm, turns


class _Logarithm(torch.autograd.Function):
    r"""The logarithm: :math:`dA = U (\gamma \circ (U' Q' dQ \, U)) U'`.

    U has the eigenvectors, gamma = (d/2) / sin(d/2) exp(id/2) for a difference d of angles.
    """

    @staticmethod
    @override
    def forward(ctx: Any, point: Tensor) -> tuple[Tensor, Tensor]:
        logarithm, turns = _logarithm(point)
        ctx.save_for_backward(point, logarithm)
        ctx.mark_non_differentiable(turns)
        return logarithm, turns

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        point, logarithm = ctx.saved_tensors
        angles, basis = torch.linalg.eigh(logarithm * -1j)
        half = (angles.unsqueeze(-1) - angles.unsqueeze(-2)) / 2
        sine = half.sin()
        is_turn = (sine.abs() < 1e-6) & (half.abs() > 1)  # by +-pi: another branch
        ratio = torch.where(is_turn, 0.0, 1 / torch.sinc(half / math.pi).masked_fill(is_turn, 1))
        inner = basis.mH @ skew(grads[0]).to(basis.dtype) @ basis
        back = basis @ (inner * ratio * torch.exp(-1j * half)) @ basis.mH
        grad: Tensor = point @ skew(back if point.is_complex() else back.real)
        return grad


class _LogarithmOfThree(torch.autograd.Function):
    """That of real 3 x 3 matrices, by products only.

    dA = W + [A, W] / 2 + c [A, [A, W]] for W = Q'dQ, c = (1 - (t/2) cot(t/2)) / t^2, t the angle.
    """

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(point: Tensor) -> tuple[Tensor, Tensor]:
        return _logarithm_of_three(point)

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs, output[0])

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        point, logarithm = ctx.saved_tensors
        square = logarithm.square().sum((-2, -1), keepdim=True) / 2
        is_small = square < _SMALL
        angle = square.masked_fill(is_small, 1.0).sqrt()
        factor = torch.where(
            is_small,
            1 / 12 + square / 720 + square**2 / 30240 + square**3 / 1209600,
            (1 - angle / 2 / (angle / 2).tan()) / angle.square(),
        )
        own = skew(grads[0])
        first = 2 * skew(logarithm @ own)
        second = 2 * skew(logarithm @ first)
        grad: Tensor = point @ (own - first / 2 + factor * second)
        return grad


def _logarithm_of_three(point: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithm of rotations ``(..., 3, 3)``, exact at small and at half turns.

    A quaternion (w, u) of Q, from the largest of its four entries; the angle is 2 atan2(|u|, w).
    """
    a, b, c, d, e, f, g, h, i = point.flatten(-2).unbind(-1)
    x, y, z = h - f, c - g, d - b
    columns = [
        torch.stack((1 + a + e + i, x, y, z), -1),
        torch.stack((x, 1 + a - e - i, b + d, c + g), -1),
        torch.stack((y, b + d, 1 + e - a - i, f + h), -1),
        torch.stack((z, c + g, f + h, 1 + i - a - e), -1),
    ]
    squares = torch.stack([column[..., k] for k, column in enumerate(columns)], -1)
    largest = squares.argmax(-1)[..., None, None].expand(*point.shape[:-2], 1, 4)
    own = torch.stack(columns, -2).gather(-2, largest).squeeze(-2)
    own = torch.where(own[..., :1] < 0, -own, own)
    cosine, sine = own[..., :1], torch.linalg.vector_norm(own[..., 1:], dim=-1, keepdim=True)
    tiny = torch.finfo(point.dtype).tiny
    factor = torch.where(sine > tiny, 2 * torch.atan2(sine, cosine) / sine.clamp(min=tiny), 2.0)
    u, v, w = (own[..., 1:] * factor).unbind(-1)
    zero = torch.zeros_like(u)
    entries = torch.stack((zero, -w, v, w, zero, -u, -v, u, zero), -1)
    return entries.view(point.shape), (cosine < _rounding(point) * sine).squeeze(-1)


def _rounding(tensor: Tensor) -> float:
    """Return the distance to half a turn below which its plane is lost in rounding."""
    return float(torch.finfo(tensor.dtype).eps ** 0.5)


def _logarithm(point: Tensor) -> tuple[Tensor, Tensor]:
    adjoint = point.mH
    cosine, sine = (point + adjoint) / 2, (point - adjoint) / 2
    mixed = cosine + sine * -0.7320508j
    basis = torch.linalg.eigh(mixed).eigenvectors
    cosines = (basis.conj() * (cosine.to(basis.dtype) @ basis)).sum(-2).real
    sines = (basis.conj() * (sine.to(basis.dtype) @ basis)).sum(-2).imag
    angles = torch.atan2(sines, cosines)
    if point.is_complex():
        unitary: Tensor = (basis * (1j * angles).unsqueeze(-2)) @ basis.mH
        return unitary, (math.pi - angles.abs() < _rounding(angles)).any(-1)
    half_turn = math.pi - angles.abs() < _rounding(angles)
    # The two eigenvectors of +-(pi - d) are known to eps / d only, each as a real and an imaginary
    # part that should be orthonormal; made so, their rotation is off by eps / d * d.
    near = ~half_turn & (math.pi - angles.abs() < 1e-2)
    turns = torch.where(half_turn | near, 0.0, angles)
    result: Tensor = ((basis * (1j * turns).unsqueeze(-2)) @ basis.mH).real
    if bool(near.any()):
        columns = math.sqrt(2) * basis * (near & (angles > 0)).unsqueeze(-2)
        pair = newton_schulz(torch.cat([columns.real, columns.imag], dim=-1))
        left, right = pair.chunk(2, dim=-1)
        turned = left * angles.unsqueeze(-2) @ right.mT
        result = result + turned - turned.mT
    if bool(half_turn.any()):
        projector = (basis * half_turn.unsqueeze(-2)) @ basis.mH
        values, vectors = torch.linalg.eigh(projector.real)
        vectors = vectors.flip(-1) * (values.flip(-1) > 0.5).unsqueeze(-2)
        pairs = vectors.size(-1) // 2 * 2
        left, right = vectors[..., 0:pairs:2], vectors[..., 1:pairs:2]
        half = math.pi * left @ right.mT
        result = result + half - half.mT
    return (result - result.mT) / 2, half_turn.any(-1)


def _exponential(turn: Tensor) -> Tensor:
    """Return exp(A), of real 3 x 3 matrices by the formula of Rodrigues."""
    if turn.size(-1) != 3 or turn.is_complex():
        return exponential(turn)
    square = turn.square().sum((-2, -1), keepdim=True) / 2
    is_small = square < _SMALL
    half = square.masked_fill(is_small, 1.0).sqrt() / 2
    sine = half.sin() / half
    first = torch.where(
        is_small,
        1 - square / 6 + square**2 / 120 - square**3 / 5040 + square**4 / 362880,
        sine * half.cos(),
    )
    second = torch.where(
        is_small,
        0.5 - square / 24 + square**2 / 720 - square**3 / 40320 + square**4 / 3628800,
        sine.square() / 2,
    )
    eye = torch.eye(3, dtype=turn.dtype, device=turn.device)
    return eye + first * turn + second * (turn @ turn)


# ---- geodesics -----------------------------------------------------------------------------------


def shoot(point: Tensor, tangent: Tensor, beta: float) -> Tensor:
    r"""Return the end of the geodesic from ``point`` with the velocity ``tangent``.

    By :math:`[X \; N]` for the normal part N, without a basis of it, so that it has derivatives of
    any order wherever N has no full rank.
    """
    size = point.size(-1)
    turn = skew(point.mH @ tangent)
    if point.size(-2) == size:
        return point @ _exponential(turn)
    normal = tangent - point @ (point.mH @ tangent)
    # similar for any length; balanced for this one
    length = torch.linalg.vector_norm(normal.detach(), dim=(-2, -1), keepdim=True).clamp(min=1e-3)
    normal = normal / length
    below = length * torch.eye(size, dtype=turn.dtype, device=turn.device)
    upper = torch.cat([2 * beta * turn, -length * (normal.mH @ normal)], -1)
    lower = torch.cat([below, torch.zeros_like(turn)], -1)
    curve = exponential(torch.cat([upper, lower], -2))[..., :size]
    if beta != 0.5:
        curve = curve @ exponential((1 - 2 * beta) * turn)
    return newton_schulz(torch.cat([point, normal], -1) @ curve)


def lift(point: Tensor, other: Tensor, beta: float) -> Tensor:
    """Return the tangent vector at ``point`` whose geodesic ends at ``other``; all are points."""
    if point.size(-2) == point.size(-1):
        turn, several = principal_logarithm(point.mH @ other)
        tangent = point @ turn
    else:
        tangent, several = _Lift.apply(point, other, beta)  # type: ignore[no-untyped-call]
    if (values := values_of(several)) is not None and bool(values.any()):
        warnings.warn(
            f"the geodesic is not unique{counted(values)}: the points are half a turn apart, and "
            "one of the shortest is returned",
            stacklevel=users_level(),
        )
    return tangent


def separation(point: Tensor, other: Tensor, beta: float) -> Tensor:
    """Return the length of the geodesic, ``(...)``; infinite between two components."""
    if point.size(-2) != point.size(-1):
        between: Tensor = _Separation.apply(point, other, beta)  # type: ignore[no-untyped-call]
        return between
    product = point.mH @ other
    apart = torch.zeros(product.shape[:-2], dtype=torch.bool, device=product.device)
    if not product.is_complex():
        apart = orientation(product.detach()) < 0
        eye = torch.eye(point.size(-1), dtype=point.dtype, device=point.device)
        product = torch.where(apart[..., None, None], eye, product)
    turn: Tensor = torch.linalg.vector_norm(principal_logarithm(product)[0], dim=(-2, -1))
    return (math.sqrt(beta) * turn).masked_fill(apart, math.inf)


class _Separation(torch.autograd.Function):
    """The distance; its gradient is the unit vector that leads away from the other point."""

    @staticmethod
    @override
    def forward(ctx: Any, point: Tensor, other: Tensor, beta: float) -> Tensor:
        there = _solution(point, other, beta)
        tangent, speed = there.tangent(), there.speed()
        inside = point.mH @ tangent
        normal = tangent - point @ inside
        norms = (torch.linalg.vector_norm(each, dim=(-2, -1)) for each in (inside, normal))
        own, beside = norms
        length: Tensor = (beta * own.square() + beside.square()).sqrt()
        ctx.save_for_backward(point, other, tangent, speed, length)
        ctx.beta = beta
        return length

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        point, other, tangent, speed, length = ctx.saved_tensors
        # a shorter one is rounding, and its direction, too
        least = 16 * torch.finfo(length.dtype).eps * math.sqrt(point.size(-2))
        scale = torch.where(length > least, grads[0] / length, 0.0)[..., None, None]

        def lowered(at: Tensor, vector: Tensor) -> Tensor:
            lower: Tensor = vector - (1 - ctx.beta) * at @ (at.mH @ vector)
            return lower

        return -scale * lowered(point, tangent), scale * lowered(other, speed), None


class _Lift(torch.autograd.Function):
    """The logarithm of tall matrices; its derivative inverts that of the exponential."""

    @staticmethod
    @override
    def forward(ctx: Any, point: Tensor, other: Tensor, beta: float) -> tuple[Tensor, Tensor]:
        there = _solution(point, other, beta)
        tangent = there.tangent()
        ctx.save_for_backward(point, other, tangent)
        ctx.mark_non_differentiable(there.several)
        ctx.there, ctx.beta = there, beta
        return tangent, there.several

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        point, other, tangent = ctx.saved_tensors
        fine = finest_dtype(point)
        start, velocity, grad = (each.detach().to(fine) for each in (point, tangent, grads[0]))
        wanted = tangent_part(start, grad)
        with torch.enable_grad():
            leaves = start.requires_grad_(), velocity.requires_grad_()
            end = shoot(start, tangent_part(start, velocity), ctx.beta)

        def back(weight: Tensor) -> tuple[Tensor, Tensor]:
            return torch.autograd.grad(end, leaves, weight, retain_graph=True)  # type: ignore[return-value]

        def residual(flat: Tensor) -> tuple[Tensor, Tensor]:
            missing = wanted - back(flat.view_as(end))[1]
            error = torch.linalg.vector_norm(missing, dim=(-2, -1)).reshape(-1)
            moved = tangent_part(end.detach(), ctx.there.carried(missing))
            return moved.reshape(flat.shape), error

        size = torch.linalg.vector_norm(wanted, dim=(-2, -1)).reshape(-1)
        first = tangent_part(end.detach(), ctx.there.carried(wanted))
        goal = 8 * torch.finfo(fine).eps * size
        flat = first.reshape(-1, end.size(-2) * end.size(-1))
        weight = _accelerated(residual, flat, goal, _DEEP)[0].view_as(end)
        inside = start.detach().mH @ grad
        by_start = -back(weight)[0] - velocity.detach() @ (inside + inside.mH) / 2
        return by_start.to(point.dtype), weight.to(other.dtype), None


def barycentre(points: Tensor, weights: Tensor, beta: float) -> Tensor:
    """Return the mean of ``(k, ..., n, m)``: where the weighted sum of tangent vectors vanishes."""
    mean: Tensor = _Barycentre.apply(points, weights, beta)  # type: ignore[no-untyped-call]
    return mean


class _Barycentre(torch.autograd.Function):
    """The mean M with F(M) = sum of w log_M(Y) = 0; its derivative is that of this equation."""

    @staticmethod
    @override
    def forward(ctx: Any, points: Tensor, weights: Tensor, beta: float) -> Tensor:
        shares = weights.reshape(-1, *[1] * (points.ndim - 1))
        mean = _chordal(points, shares)
        tolerance = 8 * torch.finfo(points.dtype).eps * math.sqrt(points.size(-2))
        least, stalled = math.inf, 0
        for _ in range(_MOST):
            step = _tangent_sum(mean, points, shares, beta)
            length = float(torch.linalg.vector_norm(step, dim=(-2, -1)).amax())
            stalled = 0 if length < 0.9 * least else stalled + 1
            least = min(least, length)
            mean = shoot(mean, step, beta)
            if length <= tolerance or stalled > 3:
                break
        if not least <= math.sqrt(tolerance):
            raise RuntimeError(
                f"no mean was found, the tangent vectors add up to {least:.1e}: the points are "
                "spread too far to have a unique one; so.polar(points.mean(0)) always has a value"
            )
        ctx.save_for_backward(points, shares, mean)
        ctx.beta = beta
        return mean

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        points, shares, mean = ctx.saved_tensors
        with torch.enable_grad():
            leaves = mean.detach().requires_grad_(), points.detach().requires_grad_()
            projected = newton_schulz(leaves[0])
            total = _tangent_sum(projected, leaves[1], shares, ctx.beta)
        grad = tangent_part(mean, grads[0])

        def back(flat: Tensor) -> tuple[Tensor, Tensor]:
            weight = flat.view_as(mean)
            return torch.autograd.grad(total, leaves, weight, retain_graph=True)  # type: ignore[return-value]

        def residual(flat: Tensor) -> tuple[Tensor, Tensor]:
            missing = tangent_part(mean, grad + back(flat)[0])
            error = torch.linalg.vector_norm(missing, dim=(-2, -1)).reshape(-1)
            return missing.reshape(flat.shape), error

        start = grad.reshape(-1, mean.size(-2) * mean.size(-1))
        goal = torch.linalg.vector_norm(start, dim=-1) * 8 * torch.finfo(start.dtype).eps
        weight = _accelerated(residual, start, goal)[0]
        return back(weight)[1], None, None


def _chordal(points: Tensor, shares: Tensor) -> Tensor:
    """Return the nearest point to the mean of the entries, in the components of real squares."""
    determinant = None
    if points.size(-2) == points.size(-1) and not points.is_complex():
        determinant = orientation(points[0])
    return polar_factor((shares * points).sum(0), determinant)


def _tangent_sum(mean: Tensor, points: Tensor, shares: Tensor, beta: float) -> Tensor:
    return (shares * lift(mean.expand_as(points), points, beta)).sum(0)


# ---- the logarithm of tall matrices --------------------------------------------------------------


class _There:
    """A geodesic: blocks A and B of its velocity, a basis of the span, the frame at its end."""

    def __init__(
        self, basis: Tensor, turn: Tensor, lift: Tensor, beta: float, several: Tensor
    ) -> None:
        self.basis, self.turn, self.lift, self.beta = basis, turn, lift, beta
        self.several = several  # where others are as short
        self.frame = _frame(turn, lift, beta)

    def tangent(self) -> Tensor:
        """Return the velocity at the start."""
        return self.basis @ torch.cat([self.turn, self.lift], -2).to(self.basis.dtype)

    def speed(self) -> Tensor:
        """Return the velocity at the end."""
        size = self.turn.size(-1)
        across = self.lift @ exponential((1 - 2 * self.beta) * self.turn)
        speed = self.frame[..., :size] @ self.turn + self.frame[..., size:] @ across
        return self.basis @ speed.to(self.basis.dtype)

    def carried(self, vector: Tensor) -> Tensor:
        """Return a vector turned as the frame is turned from the start to the end."""
        inside = self.basis.mH.to(vector.dtype) @ vector
        moved = self.basis.to(vector.dtype) @ (self.frame @ inside - inside)
        return vector + moved


def _frame(turn: Tensor, lift: Tensor, beta: float) -> Tensor:
    """Return the orthonormal matrix whose first columns are the end of the geodesic."""
    size, zero = turn.size(-1), lift.new_zeros(*lift.shape[:-1], lift.size(-2))
    upper = torch.cat([2 * beta * turn, -lift.mH], -1)
    frame = exponential(torch.cat([upper, torch.cat([lift, zero], -1)], -2))
    if beta == 0.5:
        return frame
    own = frame[..., :size] @ exponential((1 - 2 * beta) * turn)
    return torch.cat([own, frame[..., size:]], -1)


@torch.no_grad()
def _solution(point: Tensor, other: Tensor, beta: float) -> _There:
    """Return the geodesic from ``point`` to ``other``, both tall and no squares.

    In the span of both, in the finest precision: for the canonical metric an orthogonal completion
    of both is turned until its logarithm has no block beside A and B; from there beta is moved, and
    the velocity corrected by what is missing at the end.

    Raises:
        RuntimeError: where none is found, naming the first and how many there are.
    """
    with exact_products(point):
        batch, (n, m) = point.shape[:-2], point.shape[-2:]
        start, end = (each.reshape(-1, n, m) for each in (point, other))
        if n >= 2 * m:
            beside = end - start @ (start.mH @ end)
            basis = torch.linalg.qr(torch.cat([start, beside], -1)).Q[..., m:]
        else:
            basis = torch.linalg.qr(start, mode="complete").Q[..., m:]
        basis = torch.cat([start, basis], -1)
        inner = newton_schulz((basis.mH @ end).to(finest_dtype(point)), 2)
        turn, lift, several, error = _canonical(inner)
        is_far = bool(torch.linalg.vector_norm(turn, dim=(-2, -1)).max() > 1)
        path = (*(_PATH if is_far else ()), beta)
        for each in path if beta != 0.5 else ():
            turn, lift, error = _corrected(inner, turn, lift, each, is_last=each == beta)
        lost = ~(error <= _FOUND)
        if bool(lost.any()):
            where = counted(lost.reshape(batch))
            raise RuntimeError(
                f"no geodesic was found{where}: they are far apart, and a shortest one need not be "
                "unique; go by a point between them, such as so.polar(point + other)"
            )
        parts = (basis, turn, lift)
        basis, turn, lift = (each.reshape(*batch, *each.shape[1:]) for each in parts)
        return _There(basis, turn, lift, beta, several.reshape(batch))


def _canonical(inner: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A and B of the canonical logarithm of ``inner``, where it is one of several, and its
    error.

    The columns beside it start at the nearest to the identity; each step turns them by a solution
    of a Lyapunov equation, see Zimmermann & Hueper (2022), section 4.
    """
    size = inner.size(-1)
    beside = torch.linalg.qr(inner, mode="complete").Q[..., size:]
    left, _, right = torch.linalg.svd(beside[:, size:])
    signs = torch.ones_like(left[:, 0].real)
    if not inner.is_complex():
        whole = torch.cat([inner, beside @ right.mH @ left.mH], -1)
        signs[:, -1] = orientation(whole)
    beside = beside @ (right.mH * signs.unsqueeze(-2)) @ left.mH
    count = beside.size(-1)

    def completed(flat: Tensor) -> tuple[Tensor, Tensor]:
        gauge = beside @ exponential(skew(flat.view(-1, count, count)))
        return principal_logarithm(torch.cat([inner, gauge], -1))

    def residual(flat: Tensor) -> tuple[Tensor, Tensor]:
        whole = completed(flat)[0]
        lift, rest = whole[:, size:, :size], whole[:, size:, size:]
        values, basis = torch.linalg.eigh(lift @ lift.mH)
        values = (values / 12 - 0.5).clamp(max=-0.05)
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        step = basis @ (basis.mH @ rest @ basis / sums) @ basis.mH
        return step.reshape(flat.shape), torch.linalg.vector_norm(rest, dim=(-2, -1))

    goal = torch.finfo(inner.dtype).eps * 16 * math.sqrt(inner.size(-2))
    flat = inner.new_zeros(inner.size(0), count * count)
    goals = torch.full_like(flat[:, 0].real, goal)
    flat, error = _accelerated(residual, flat, goals)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIES):
        lost = ~(error <= _FOUND)
        if not bool(lost.any()):
            break
        drawn = torch.randn(flat.shape, generator=generator, dtype=flat.dtype).to(flat.device)
        start = torch.where(lost.unsqueeze(-1), drawn, flat)
        other, less = _accelerated(residual, start, goals)
        flat = torch.where((less < error).unsqueeze(-1), other, flat)
        error = torch.minimum(error, less)
    whole, several = completed(flat)
    return whole[:, :size, :size], whole[:, size:, :size], several, error


def _corrected(
    inner: Tensor, turn: Tensor, lift: Tensor, beta: float, *, is_last: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return A and B whose geodesic for ``beta`` ends at ``inner``, roughly unless ``is_last``."""
    size = inner.size(-1)

    def residual(flat: Tensor) -> tuple[Tensor, Tensor]:
        velocity = flat.view_as(inner)
        seen = _frame(velocity[:, :size], velocity[:, size:], beta).mH @ inner
        step = torch.cat([skew(seen[:, :size]), seen[:, size:]], -2)
        eye = torch.eye(size, dtype=seen.dtype, device=seen.device)
        away = torch.cat([seen[:, :size] - eye, seen[:, size:]], -2)
        return step.reshape(flat.shape), torch.linalg.vector_norm(away, dim=(-2, -1))

    goal = torch.finfo(inner.dtype).eps * 16 * math.sqrt(inner.size(-2)) if is_last else 1e-3
    flat = torch.cat([turn, lift], -2).reshape(inner.size(0), -1)
    flat, error = _accelerated(residual, flat, torch.full_like(flat[:, 0].real, goal), _DEEP)
    velocity = flat.view_as(inner)
    return skew(velocity[:, :size]), velocity[:, size:], error


def _accelerated(
    residual: Callable[[Tensor], tuple[Tensor, Tensor]],
    flat: Tensor,
    goal: Tensor,
    depth: int = _DEPTH,
) -> tuple[Tensor, Tensor]:
    """Return x with f(x) = 0 and its error, one problem in each row; ``residual`` returns both.

    By Anderson's acceleration of x <- x + f(x): the mix of the last values whose residuals, to
    first order, cancel best.
    """
    best, least = flat, torch.full_like(goal, math.inf)
    values: list[Tensor] = []
    steps: list[Tensor] = []
    stalled = 0
    for _ in range(_MOST):
        step, error = residual(flat)
        is_better = error < least
        stalled = 0 if bool((error < 0.9 * least).any()) else stalled + 1
        best = torch.where(is_better.unsqueeze(-1), flat, best)
        least = torch.where(is_better, error, least)
        if bool((least <= goal).all()) or stalled > 2 * depth:
            break
        values, steps = [*values, flat][-depth:], [*steps, step][-depth:]
        flat = flat + step
        if len(values) > 1:
            moves = torch.stack([b - a for a, b in itertools.pairwise(values)], -1)
            changes = torch.stack([b - a for a, b in itertools.pairwise(steps)], -1)
            weights = _least_squares(_real(changes), _real(step.unsqueeze(-1)))
            flat = flat - ((moves + changes) @ weights.to(flat.dtype)).squeeze(-1)
        flat = torch.where((least <= goal).unsqueeze(-1), best, flat)
    return best, least


def _least_squares(matrix: Tensor, right: Tensor) -> Tensor:
    left, sizes, basis = torch.linalg.svd(matrix, full_matrices=False)
    floor = sizes[:, :1] * torch.finfo(sizes.dtype).eps * 10
    inverse = torch.where(sizes > floor, 1 / sizes, 0.0).unsqueeze(-1)
    solution: Tensor = basis.mT @ (inverse * (left.mT @ right))
    return solution


def _real(columns: Tensor) -> Tensor:
    """Return columns of twice the height for complex ones: mixing must keep matrices skew."""
    return torch.cat([columns.real, columns.imag], -2) if columns.is_complex() else columns
