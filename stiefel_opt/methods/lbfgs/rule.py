r"""What L-BFGS needs on the Stiefel manifold: curves, an isometric transport, the direction.

Batches are ``(k, n, m)`` with n >= m, the metric is the canonical one. A tangent vector at X is
d = X A + N with A skew and X'N = 0; its length is that of X A / sqrt(2) + N.

**Curve.** With H = N'N, symmetric square roots and the functions of H that belong to them,

    X(t) = (X C + N S) exp(tA),   C = cos(t H^(1/2)),   S = sin(t H^(1/2)) H^(-1/2),

which is exp(tW) X exp(tA) for the skew W = N X' - X N': a product of two groups of isometries of
the manifold. Hence the speed |X'(t)| is constant.

**Frame.** With respect to a reference E of the same shape the n x n matrix

    F = V (I + E'X)^(-1) V' - I,   V = X + E,

is orthogonal and takes X to E, so that it takes tangent vectors at X to tangent vectors at E. For
square matrices it is E X', and X' is what is used, without a reference. The coordinates of d are
F (X A / sqrt(2) + N): their Euclidean inner product is that of the metric. To carry a vector from X
to Y is to give it the same coordinates there.

**Locking.** From X along d to Y = X(t) the transport is that of the frames, preceded by the
rotation, in the plane of both, that takes the coordinates of d to those of X'(t). So it is an
isometry, and T d = X'(t): the curve's own velocity is transported exactly. As all of it is flat
vectors, parameters of any shapes and plain ones are carried together, at the cost of two inner
products a vector.

References: Huang, Gallivan & Absil, A Broyden class of quasi-Newton methods for Riemannian
optimization (SIAM J. Optim. 2015), sections 2 and 4; Huang, Absil & Gallivan, Intrinsic
representation of tangent vectors and vector transports on matrix manifolds (Numer. Math. 2017);
Nocedal & Wright, Numerical optimization (2006), Algorithm 7.4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stiefel_opt.numerics import cross_gram, exponential, gram, plus_identity, skew, sym

# Where the symmetric part of E'X has an eigenvalue below it, E is too far to serve as reference.
FARTHEST_REFERENCE = -0.5


class Curve(NamedTuple):
    """A curve from ``point`` along X A + N; ``values`` and ``axes`` are the spectrum of N'N."""

    point: Tensor
    turn: Tensor
    normal: Tensor
    values: Tensor
    axes: Tensor


def curve(point: Tensor, tangent: Tensor) -> Curve:
    """Return the curve from X = ``point`` along the tangent vector d, both ``(k, n, m)``.

    Note: Three products of n x m by m x m and one symmetric eigendecomposition of m x m.
    """
    product = cross_gram(point, tangent)
    normal = tangent - point @ product
    values, axes = torch.linalg.eigh(gram(normal))
    return Curve(point, skew(product), normal, values.clamp(min=0.0), axes)


def largest_speed(path: Curve) -> float:
    """Return a bound on the radians by which a matrix of the batch turns in a unit of t."""
    turn: Tensor = torch.linalg.matrix_norm(path.turn)
    return float((path.values[..., -1].sqrt() + turn).max())


def along(path: Curve, t: float) -> tuple[Tensor, Tensor]:
    """Return the point X(t) of a curve and the velocity X'(t) there.

    A Newton-Schulz step takes the rounding out of X'X - I; a matrix that does not move keeps its
    bits.

    Note: Six products of n x m by m x m, one matrix exponential of m x m.
    """
    frequencies = path.values.sqrt()
    angles = t * frequencies
    cosine, sine, pull = (
        (path.axes * each.unsqueeze(-2)) @ path.axes.mH
        for each in (angles.cos(), t * torch.sinc(angles / torch.pi), frequencies * angles.sin())
    )
    rotation = exponential(t * path.turn)
    within, across = cosine @ rotation, sine @ rotation
    moved = path.point @ within + path.normal @ across
    moved = 1.5 * moved - moved @ (0.5 * gram(moved))
    velocity = path.point @ (within @ path.turn - pull @ rotation)
    velocity += path.normal @ (within + across @ path.turn)
    still = ~(path.turn.abs().amax((-2, -1), keepdim=True) + path.values[..., -1:, None] > 0)
    return torch.where(still, path.point, moved), torch.where(still, 0.0, velocity)


class Frame(NamedTuple):
    """The point X, and what F consists of: V = X + E and I + X'E, None for square matrices."""

    point: Tensor
    tall: Tensor | None
    small: Tensor | None


def frame(point: Tensor, reference: Tensor) -> Frame:
    """Return the frame at X = ``point`` with respect to E = ``reference``, both ``(k, n, m)``."""
    if point.size(-2) == point.size(-1):
        return Frame(point, None, None)
    return Frame(point, point + reference, plus_identity(cross_gram(point, reference)))


def is_ill_conditioned(at: Frame) -> bool:
    """Say whether the reference is too far from one of the points."""
    if at.small is None:
        return False
    # the symmetric part of X'E + I
    lowest = torch.linalg.eigvalsh(sym(at.small))[..., 0]
    return bool((lowest < 1 + FARTHEST_REFERENCE).any())


def coordinates(at: Frame, vector: Tensor) -> Tensor:
    """Return the coordinates of tangent vectors at X, ``(k, n, m)``.

    Note: Four products of n x m by m x m and one LU solve of m x m.
    """
    within = cross_gram(at.point, vector)
    if at.tall is None or at.small is None:
        return within * math.sqrt(0.5)
    return _turned(
        at.tall, at.small, torch.baddbmm(vector, at.point, within, alpha=math.sqrt(0.5) - 1)
    )


def coordinates_of_gradient(at: Frame, grad: Tensor) -> Tensor:
    """Return those of the gradient X (X'G - G'X) + (I - XX') G, where G is the Euclidean one."""
    product = cross_gram(at.point, grad)
    within = (product - product.mH) * math.sqrt(0.5)
    if at.tall is None or at.small is None:
        return within
    return _turned(at.tall, at.small, torch.baddbmm(grad, at.point, within - product))


def from_coordinates(at: Frame, vector: Tensor) -> Tensor:
    """Return the tangent vectors at X whose :func:`coordinates` are given."""
    if at.tall is None or at.small is None:
        return torch.bmm(at.point, math.sqrt(2.0) * vector)
    solved = torch.linalg.solve_ex(at.small, cross_gram(at.tall, vector)).result
    vector = torch.baddbmm(vector, at.tall, solved, beta=-1)
    return vector.baddbmm_(at.point, cross_gram(at.point, vector), alpha=math.sqrt(2.0) - 1)


def _turned(tall: Tensor, small: Tensor, vector: Tensor) -> Tensor:
    """Return F v of a frame of tall matrices."""
    solved = torch.linalg.solve_ex(small.mH, cross_gram(tall, vector)).result
    return torch.baddbmm(vector, tall, solved, beta=-1)


def rotated_(vectors: Tensor, before: Tensor, after: Tensor) -> Tensor:
    r"""Carry the rows of ``vectors``, in place, by an isometry that takes a to b; return them.

    For unit vectors a = ``before``, b = ``after``, real: the rotation
    :math:`I - (a + b)(a + b)^\top / (1 + a^\top b) + 2 b a^\top` in their plane, or, where they are
    more than a right angle apart, the reflection
    :math:`I - (a - b)(a - b)^\top / (1 - a^\top b)`, which is the better conditioned one.

    Args:
        vectors: Shape ``(h, N)`` or ``(N,)``.
        before, after: Shape ``(N,)``.
    """
    cosine = (before * after).sum()  # a dot product of millions of entries errs by more
    rows = vectors if vectors.ndim == 2 else vectors.unsqueeze(0)
    if cosine >= 0:
        total = before + after
        parts = torch.stack([rows @ total / -(1 + cosine), 2 * (rows @ before)], dim=1)
        rows.addmm_(parts, torch.stack([total, after]))
    else:
        gap = before - after
        rows.addr_(rows @ gap / (cosine - 1), gap)
    return vectors


def quasi_newton_direction(
    gradient: Tensor, steps: Sequence[Tensor], changes: Sequence[Tensor]
) -> Tensor:
    """Return -H g by the two-loop recursion, from pairs (s, y) with s'y > 0, oldest first.

    H starts from (s'y / y'y) I of the last pair; without pairs it is I.

    Args:
        gradient: g, flat and real, ``(N,)``.
        steps, changes: The s and the y, as long.

    Reference: Nocedal & Wright (2006), Algorithm 7.4.
    """
    direction = gradient.neg()
    products: list[tuple[Tensor, Tensor]] = []
    for step, change in zip(reversed(steps), reversed(changes), strict=True):
        curvature = torch.dot(step, change)
        products.append((torch.dot(step, direction) / curvature, curvature))
        direction.addcmul_(change, products[-1][0], value=-1.0)
    if products:
        direction *= products[0][1] / torch.dot(changes[-1], changes[-1])
    for step, change, (factor, curvature) in zip(steps, changes, reversed(products), strict=True):
        direction.addcmul_(step, factor - torch.dot(change, direction) / curvature)
    return direction
