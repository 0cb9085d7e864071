r"""Momentum on the Stiefel manifold by isometric flows: the rule of StiefelSGD.

Notation of Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023, arXiv 2205.14173): X is the
point, G the Euclidean gradient, Z the skew and U the normal part of the velocity (X'U = 0), eta the
learning rate, mu the momentum, a < 1 the parameter of the metric tr(D1'(I - a XX')D2). One step is

    f = (X'G - G'X) / (2 (1 - a)),   g = (I - XX') G                 force
    U <- mu U rot((2a - 1) eta Z) - g                                phi_2, coupling
    Z <- mu Z - f,  D = rot(eta Z)                                   phi_1, turn
    R = (I + eta^2 U'U)^(-1/2)
    X <- (X D + eta U) R,  U <- (U - eta X D U'U) R                  phi_3, both by one rotation

with rot(K) = (I + K)(I - K^2)^(-1/2). The flows as printed are in
:mod:`stiefel_opt.functional.published`. Between steps U = B L - X N is left unevaluated: with

    S = X'G                                                          1
    B <- B (mu L) + X (S - mu N) - G                                 2, 3
    W = B'B,  R = (I + eta^2 W)^(-1/2)                               4
    X <- X (D R) + B (eta R),  L = R^(-1),  N = eta W                5, 6

neither the projection of G nor the transport of U is a tall product of its own: six in all. With
``transport="projected"`` the momentum is what orthogonal projection onto the new tangent space
leaves of each part: U times one more R, so that L = I and N = eta W R, five products, and Z times
(I - eta^2 Z^2)^(-1/2).

Functions ending in ``_`` update the momenta in place and return the new point; ``point`` and
``grad`` are only read. All batches are ``(k, n, m)`` with n >= m, or ``(k, m, m)``; for complex
ones ' is the conjugate transpose.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.functional.flows import (
    Scalar,
    Setting,
    after,
    coupling,
    is_steep,
    keep_,
    mend,
    mend_after,
    mend_point,
    mended,
    metric_parameter,
    move_along_,
    moves_of,
    scaled,
    sums,
    turn_of_square,
    zeroed,
)
from stiefel_opt.linalg import add_product, add_product_, product

__all__ = [
    "TRANSPORTS",
    "Deferred",
    "Velocity",
    "advance_",
    "correct_normal_",
    "measure",
    "normal_force",
    "project_skew",
    "sgd_",
    "torque_of",
]

TRANSPORTS: Final = ("isometric", "projected")


class Deferred(NamedTuple):
    """A normal momentum U = B L - X N that is left unevaluated; only :meth:`value` is U.

    Attributes:
        base: B, ``(k, n, m)``.
        factor: L, ``(k, m, m)``; None is I.
        shift: N, ``(k, m, m)``; None is 0.
    """

    base: Tensor
    factor: Tensor | None = None
    shift: Tensor | None = None

    def value(self, point: Tensor) -> Tensor:
        """Return U at ``point``, the X of the last step."""
        normal = self.base.clone() if self.factor is None else product(self.base, self.factor)
        return normal if self.shift is None else add_product_(normal, point, self.shift, alpha=-1.0)


class Velocity(NamedTuple):
    """The momentum X Z + U of a rule.

    Attributes:
        skew: Z, ``(k, m, m)``. None: there is no momentum.
        normal: U. None for square matrices, which have no normal part, and without momentum.
    """

    skew: Tensor | None = None
    normal: Deferred | None = None


def sgd_(
    point: Tensor,
    grad: Tensor,
    velocity: Velocity,
    *,
    lr: Scalar,
    momentum: float = 0.9,
    force: Scalar = 1.0,
    nesterov: bool = False,
    metric: str | float = "canonical",
    transport: str = "isometric",
    setting: Setting = Setting(),  # noqa: B008 - it is immutable
) -> Tensor:
    r"""One step of StiefelSGD; returns the new point and updates the momentum in place.

    Args:
        point: X, orthonormal, ``(k, n, m)``.
        grad: G, same shape.
        velocity: Z and U. U is deferred: with "isometric" L starts as I and N as 0, with
            "projected" there is no L, and with "isometric" and ``nesterov`` neither.
        lr: eta, a number or ``(k, 1, 1)``.
        momentum: mu.
        force: Factor on f and g: 1 - dampening, negative to maximise; a number or ``(k, 1, 1)``.
        nesterov: X moves along V = mu U - g and mu Z - f.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0) or any a < 1.
        transport: "isometric" or "projected".
        setting: How the step is worked out.

    Returns: The new point, ``(k, n, m)``.
    Note: 6 products of n x m by m x m, 5 if "projected", with ``nesterov`` 8 and 6; 2 more with
        ``setting.correct``, 3 more in a step so long, or a gradient so large, that rounding would
        be amplified.
    Reference: Kong et al., Algorithm 1, with the geometry corrected.
    """
    skew, normal = velocity
    a, reader = metric_parameter(metric), setting.reader_for(point)
    whole = point.size(-1) == point.size(-2) and setting.row_sum is None
    if normal is None and (whole or skew is not None):
        square = point, grad, skew, lr, momentum, force, nesterov, a
        return _sgd_of_square(*square, transport, setting)
    S, mending, overlap = measure(point, grad, normal, setting)  # 1
    steep = is_steep(S, lr * (1 + momentum * nesterov), setting)
    torque = torque_of(S, a, force)
    S = mended(mending, scaled(S, force))
    matrix = None if skew is None else coupling(skew, momentum, lr, a, reader)
    ahead = torque  # Z, along which X turns
    if skew is not None:
        ahead = _receive_skew_(skew, torque, momentum, nesterov, setting.ok)
    if normal is None or normal.shift is None:
        explicit = point, grad, S, normal, momentum, matrix, force, nesterov, setting
        direction, carried = _receive_(*explicit, mending, overlap)
        moved = point, direction, carried, ahead, skew, mending, lr
        return advance_(*moved, transport, setting, steep)

    B, L, N = normal.base, normal.factor, normal.shift
    if overlap is not None and mending is not None:  # X'U = 0 again
        N = mended(mending, mended(mending, overlap if L is None else torch.bmm(overlap, L)))
    if matrix is None:
        earlier, mu = B if L is None else product(B, L), momentum
    else:
        earlier, mu = product(B, matrix if L is None else torch.bmm(L, matrix)), 1.0
        N = torch.bmm(N, matrix)
    pending = add_product(earlier, point, torch.sub(S, N, alpha=mu), beta=mu)
    if nesterov:
        looked = _look_ahead_(B, pending, earlier, N, grad, force, momentum, mu, setting)
        V, across, W, C = looked
    else:
        del earlier
        subtract_(pending, grad, force, B, setting.ok)  # 2, 3  B <- B (mu L) + X (S - mu N) - G
        (W,) = sums(setting.row_sum, (B, B))  # 4  W = B'B
        V, across, C = B, None, W
    del pending
    moves = moves_of(ahead, W, lr, reader)  # R, D R - I
    R, eta, frame = moves.inverse_root, moves.step, moves.frame
    if across is not None:
        frame = frame + torch.bmm(across, R) * eta
    if mending is not None:
        frame = after(mending, frame)
    new_point = add_product(point, point, frame)
    move_along_(new_point, V, R, eta)  # 5, 6  X <- X (D R) + B (eta R)
    out = None if L is None or setting.ok is not None else L
    new_L = None if L is None else moves.root(out)  # L = R^(-1), N = eta W, or N = eta R C
    new_N = W * eta if new_L is not None else torch.bmm(R, C) * eta
    if not reader.is_blind and (steep or moves.limit > 1):
        new_point, new_N = mend_after(new_point, B, setting.row_sum)
        new_N = new_N if new_L is None else torch.bmm(new_N, new_L)
    if L is not None and new_L is not None and out is None:
        keep_(L, new_L, setting.ok)
    keep_(normal.shift, new_N, setting.ok)
    if L is None and skew is not None:
        keep_(skew, project_skew(skew, moves.turn), setting.ok)
    return new_point


def _look_ahead_(
    base: Tensor,
    pending: Tensor,
    earlier: Tensor,
    shift: Tensor,
    grad: Tensor,
    force: Scalar,
    momentum: float,
    mu: float,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """U <- mu U - g and Nesterov's V = (1 + mu) U - mu (B - X N), of which X (mu N) is left out.

    Returns: What is left of V, mu N, which belongs into the frame, W = V'V, and C = V'U.
    """
    ok = setting.ok
    subtract_(pending, grad, force, pending, None)
    left = zeroed(pending * (1 + momentum), ok).sub_(zeroed(earlier, ok), alpha=mu)
    keep_(base, pending, ok)
    across = zeroed(mu * shift, ok)
    gram, cross = sums(setting.row_sum, (left, left), (left, base))
    return left, across, torch.baddbmm(gram, across.mH, across, alpha=-1.0), cross


def advance_(
    point: Tensor,
    direction: Tensor,
    normal: Tensor | None,
    ahead: Tensor,
    skew: Tensor | None,
    mending: Tensor | None,
    lr: Scalar,
    transport: str,
    setting: Setting,
    steep: bool = False,
) -> Tensor:
    r"""Turn along ``ahead`` and move along V = ``direction``: return the new point, carry U and Z.

    With C = V'U and P = I - X_new X_new' the transport of U is

        isometric: T U = U + eta^2 V R (I + R)^(-1) C - eta X_new C,     projected: P U

    and X_new'U = eta R C. Without ``normal`` there is no momentum to carry.
    """
    ok, reader, isometric = setting.ok, setting.reader_for(point), transport == "isometric"
    pairs = (
        [(direction, direction)]
        if normal is None
        else [(direction, direction), (direction, normal)]
    )
    own, *crosses = sums(setting.row_sum, *pairs)
    moves = moves_of(ahead, own, lr, reader, bend=isometric and normal is not None)
    step, again = moves.step, not reader.is_blind and (steep or moves.limit > 1)
    if normal is not None and moves.bend is not None:
        bent = torch.bmm(moves.bend, zeroed(crosses[0], ok))
        move_along_(normal, direction, bent, step * step)
    frame = moves.frame if mending is None else after(mending, moves.frame)
    new_point = add_product(point, point, frame)
    move_along_(new_point, direction, moves.inverse_root, step)
    if normal is None:
        return mend_point(new_point, setting.row_sum) if again else new_point
    cross = zeroed(crosses[0], ok)
    if not isometric:
        cross = torch.bmm(moves.inverse_root, cross)
        if skew is not None:
            keep_(skew, project_skew(skew, moves.turn), ok)
    move_along_(normal, new_point, cross, -step)
    if again:
        new_point, overlap = mend_after(new_point, normal, setting.row_sum)
        add_product_(normal, new_point, zeroed(overlap, ok), alpha=-1.0)
    return new_point


# ---- pieces, in the order of a step ------------------------------------------------------------


def measure(
    point: Tensor, grad: Tensor, normal: Deferred | None, setting: Setting
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return X'G, and to correct M = (I - X'X)/2 and X'B, so that X + X M is orthonormal.

    X'G is then that of X + X M, and zero for the matrices that do not move.
    """
    correct, pairs = setting.correct, [(point, grad)]
    if correct is False:
        (inner,) = sums(setting.row_sum, *pairs)
        return zeroed(inner, setting.ok), None, None
    if correct is True:
        pairs.append((point, point))
    if normal is not None:
        pairs.append((point, normal.base))
    inner, *others = sums(setting.row_sum, *pairs)
    mending = mend(correct.clone() if isinstance(correct, Tensor) else others.pop(0))
    return (
        mended(mending, zeroed(inner, setting.ok)),
        mending,
        others[0] if others else None,
    )


def torque_of(inner: Tensor, a: float, force: Scalar) -> Tensor:
    """-f = force (S' - S) / (2 (1 - a)) for S = X'G."""
    # in the memory order of S, which is also the faster one
    difference = torch.sub(inner.mH, inner, out=torch.empty_like(inner))
    return scaled(difference, force / (2 * (1 - a)))


def normal_force(
    point: Tensor, inner: Tensor, grad: Tensor, force: Scalar, ok: Tensor | None
) -> Tensor:
    """-g = X S - G for S = ``inner``, which has the factor ``force`` already."""
    pending = product(point, inner)
    subtract_(pending, grad, force, pending, None)
    return pending if ok is None else pending.masked_fill_(~ok, 0.0)


def subtract_(
    pending: Tensor, grad: Tensor, force: Scalar, target: Tensor, ok: Tensor | None
) -> None:
    """target = pending - force G for the matrices that move; ``pending`` may be overwritten."""
    out = target if ok is None else pending
    if isinstance(force, Tensor):
        torch.addcmul(pending, grad, force, value=-1.0, out=out)
    else:
        torch.sub(pending, grad, alpha=force, out=out)
    if ok is not None:
        torch.where(ok, pending, target, out=target)


def project_skew(skew: Tensor, turn: Tensor) -> Tensor:
    """Return the skew part of D'Z: what projection onto the tangent space at X D leaves of X Z."""
    carried = torch.baddbmm(skew, turn.mH, skew)
    return (carried - carried.mH) / 2


def _receive_(
    point: Tensor,
    grad: Tensor,
    inner: Tensor,
    normal: Deferred | None,
    momentum: float,
    matrix: Tensor | None,
    force: Scalar,
    nesterov: bool,
    setting: Setting,
    mending: Tensor | None,
    overlap: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """U <- mu U - g for U itself, or no U; return the direction of X and U."""
    direction = normal_force(point, inner, grad, force, setting.ok)
    if normal is None:
        return direction, None
    base = normal.base
    if overlap is not None:
        correct_normal_(base, point, mending, zeroed(overlap, setting.ok))
    earlier, factor = (base, momentum) if matrix is None else (product(base, matrix), 1.0)
    _add_(direction, earlier, factor, base, setting.ok)
    return direction.add_(base, alpha=momentum) if nesterov else base.clone(), base


def correct_normal_(normal: Tensor, point: Tensor, mending: Tensor | None, overlap: Tensor) -> None:
    """Make U normal to X + X M again, for X'U = ``overlap``."""
    add_product_(normal, point, mended(mending, mended(mending, overlap)), alpha=-1.0)


def _receive_skew_(
    skew: Tensor, torque: Tensor, momentum: float, nesterov: bool, ok: Tensor | None
) -> Tensor:
    """Z <- mu Z - f; return the direction of X: Z, or Nesterov's."""
    _add_(torque, skew, momentum, skew, ok)
    return torch.add(torque, skew, alpha=momentum) if nesterov else skew


def _add_(
    value: Tensor, earlier: Tensor, factor: float, target: Tensor, ok: Tensor | None
) -> Tensor:
    """target = value + factor earlier for the matrices that move."""
    if ok is None:
        return torch.add(value, earlier, alpha=factor, out=target)
    return keep_(target, torch.add(value, earlier, alpha=factor), ok)


def _sgd_of_square(
    point: Tensor,
    grad: Tensor,
    skew: Tensor | None,
    lr: Scalar,
    momentum: float,
    force: Scalar,
    nesterov: bool,
    a: float,
    transport: str,
    setting: Setting,
) -> Tensor:
    """Z <- mu Z - f and X <- X rot(eta Z) on SO(m); rounding is taken out of the result.

    X'X is measured there even if that of X is known: it would take as much memory as X meanwhile.
    """
    ok, reader = setting.ok, setting.reader_for(point)
    factor = force / (2 * (1 - a))
    shared = setting.row_sum is not None
    if skew is None or nesterov or shared or isinstance(factor, Tensor) or ok is not None:
        (inner,) = sums(setting.row_sum, (point, grad))
        torque = torque_of(zeroed(inner, ok), a, force)
        ahead = torque
        if skew is not None:
            ahead = _receive_skew_(skew, torque, momentum, nesterov, ok)
    else:  # mu Z - f, as Z itself is skew
        half = torch.baddbmm(skew, grad.mH, point, beta=momentum / 2, alpha=factor)
        ahead = torch.sub(half, half.mH, out=skew)
    turn, _ = turn_of_square(lambda: ahead, lr, reader)
    new_point = add_product(point, point, turn)
    if transport == "projected" and skew is not None:
        keep_(skew, project_skew(skew, turn), ok)
    return new_point if setting.correct is False else mend_point(new_point, setting.row_sum)
