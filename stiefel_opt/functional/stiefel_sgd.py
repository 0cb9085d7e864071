r"""Momentum on the Stiefel manifold by isometric flows: the rule of StiefelSGD.

Notation of Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023, arXiv 2205.14173): X is the
point, G the Euclidean gradient, Z the skew and U the normal part of the velocity (X'U = 0), eta the
learning rate, mu the momentum, a < 1 the parameter of the metric tr(D1'(I - a XX')D2). One step is

    f = (X'G - G'X) / (2 (1 - a)),   g = (I - XX') G                 force
    U <- mu U rot((2a - 1) eta Z) - g                                phi_2, coupling
    Z <- mu Z - f,  D = rot(eta Z)                                   phi_1, turn
    R = (I + eta^2 U'U)^(-1/2)
    X <- (X D + eta U) R,  U <- (U - eta X D U'U) R                  phi_3, both by one rotation

with rot(K) = (I + K)(I - K^2)^(-1/2). The published flows are in
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

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stiefel_opt.device import reader_for
from stiefel_opt.functional.flows import (
    Scalar,
    Setting,
    after,
    coupling,
    mend,
    mend_after,
    mend_point,
    mended,
    metric_parameter,
    moves_of,
    passes_after,
    rotation_of_square,
    turned_square,
)
from stiefel_opt.linalg import (
    BLOCKED,
    add_product,
    add_product_,
    keep_,
    product,
    sums,
    zeroed,
)


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


def velocity_in(state: Mapping[str, Tensor], suffix: str = "") -> Velocity:
    """Return the velocity in the state of a batch, or of a range, in any form that a rule keeps."""
    skew, base = state.get("momentum_skew" + suffix), state.get("deferred_base" + suffix)
    if base is not None:
        factor, shift = state.get("deferred_factor" + suffix), state["deferred_shift" + suffix]
        return Velocity(skew, Deferred(base, factor, shift))
    base = state.get("momentum_normal" + suffix)
    return Velocity(skew, None if base is None else Deferred(base))


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
    Reference: after Kong et al., Algorithm 1, with other maps and the geometry corrected.
    """
    (X, G), (Z, U), ok = (point, grad), velocity, setting.ok
    reader = setting.reader or reader_for(point)
    # a square matrix measures X'X when it has moved, even if that of X is known: less memory
    all_here = X.size(-1) == X.size(-2) and setting.row_sum is None
    square = U is None and (Z is not None or all_here)
    S, M, overlap = measure(X, G, U, setting._replace(correct=False) if square else setting)  # 1
    a = metric_parameter(metric)
    ahead = torque = torque_of(S, a, force)  # -f, along which X turns
    coupled = None if Z is None or square or a == 0.5 else coupling(Z, momentum, lr, a, reader)
    if Z is not None:  # Z <- mu Z - f
        accumulate_(torque, Z, momentum, Z, ok)
        ahead = torch.add(torque, Z, alpha=momentum) if nesterov else Z
    if square:
        del S, torque
        return turn_square_(X, lambda: ahead, Z, lr, transport, setting)
    S = S if isinstance(force, float) and force == 1.0 else S * force
    S = S if M is None else mended(M, S)
    if U is None or U.shift is None:
        force_normal = normal_force(X, S, G, force, ok)
        passes = passes_after(S, lr * (1 + momentum * nesterov), setting)
        if U is None:
            V = force_normal
        else:
            if overlap is not None:
                correct_normal_(U.base, X, M, zeroed(overlap, ok))
            earlier, mu = (U.base, momentum) if coupled is None else (product(U.base, coupled), 1.0)
            accumulate_(force_normal, earlier, mu, U.base, ok)
            V = force_normal.add_(U.base, alpha=momentum) if nesterov else U.base.clone()
        base = None if U is None else U.base
        return advance_(X, V, base, ahead, Z, M, lr, transport, setting, passes)

    B, L, N = U.base, U.factor, U.shift
    if overlap is not None and M is not None:  # X'U = 0 again
        N = mended(M, mended(M, overlap if L is None else torch.bmm(overlap, L)))
    earlier, mu = B if L is None else product(B, L), momentum
    if coupled is not None:
        earlier, mu, N = product(earlier, coupled), 1.0, torch.bmm(N, coupled)
    # B itself is still to be written, and Nesterov's direction needs it as it was
    combine = add_product if nesterov or earlier is B else add_product_
    pending = combine(earlier, X, torch.sub(S, N, alpha=mu), beta=mu)
    if not nesterov:
        del earlier
        subtract_(pending, G, force, B, ok)  # 2, 3  B <- B (mu L) + X (S - mu N) - G
        (W,) = sums(setting.row_sum, (B, B))  # 4  W = B'B
        V, C, across = B, W, None
    else:  # V = mu B - g: of (1 + mu) B - mu (B - X N) the part X (mu N) joins the turn
        subtract_(pending, G, force, pending, None)
        V = zeroed(pending * (1 + momentum), ok).sub_(zeroed(earlier, ok), alpha=mu)
        keep_(B, pending, ok)
        across = zeroed(N * mu, ok)
        W, C = sums(setting.row_sum, (V, V), (V, B))
        W = torch.baddbmm(W, across.mH, across, alpha=-1.0)
    passes = passes_after(S, lr * (1 + momentum * nesterov), setting)
    del pending, S, torque  # whatever is of no more use gives its memory back
    moves = moves_of(ahead, W, lr, reader)
    R, eta = moves.inverse_root, moves.step
    new_point = _moved(X, V, moves.within, R, eta, across, M)  # 5, 6  X <- X (D R) + B (eta R)
    root, (excess, scale) = None, moves.excess
    if L is not None:  # L = R^(-1) = (I + eta^2 W) R
        root = torch.baddbmm(R, excess, R, alpha=scale, out=L if ok is None else None)
    shift = torch.bmm(R, C) * eta if root is None else W * eta  # N = eta W
    passes = 0 if reader.is_blind else max(passes, moves.limit > 1)
    if passes:
        new_point, shift = mend_after(new_point, B, setting.row_sum, passes)
        shift = shift if root is None else torch.bmm(shift, root)
    if L is not None and root is not None and ok is not None:
        keep_(L, root, ok)
    keep_(U.shift, shift, ok)
    if L is None and Z is not None:
        keep_(Z, project_skew(Z, moves.rotation), ok)
    return new_point


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
    passes: int = 0,
    *,
    is_normal: bool = True,
) -> Tensor:
    r"""Turn along ``ahead`` and move along V = ``direction``: return the new point, carry U and Z.

    With C = V'U and P = I - X_new X_new' the transport of U is

        isometric: T U = U + eta^2 V R (I + R)^(-1) C - eta X_new C,     projected: P U

    and X_new'U = eta R C. Without ``normal`` there is no momentum to carry. If ``direction`` is not
    normal to X, its part along X is taken out of the turn instead, which saves a product.
    """
    ok, reader = setting.ok, setting.reader or reader_for(point)
    isometric = transport == "isometric"
    pairs = [(direction, direction)] + ([] if normal is None else [(direction, normal)])
    own, *crosses = sums(setting.row_sum, *pairs, *([] if is_normal else [(point, direction)]))
    inner = None if is_normal else mended(mending, crosses.pop())
    if inner is not None:
        own = torch.baddbmm(own, inner.mH, inner, alpha=-1.0)
    within, R, rotation, companion, excess, step, limit = moves_of(
        ahead, own, lr, reader, companion=isometric and normal is not None
    )
    passes = 0 if reader.is_blind else max(passes, limit > 1)
    if normal is not None and companion is not None:
        bent = torch.bmm(companion, zeroed(crosses[0], ok))
        add_product_(normal, direction, bent, alpha=step * step)
        del bent
    del own, companion, excess
    across = None if inner is None else -inner
    new_point = _moved(point, direction, within, R, step, across, mending)
    if normal is None:
        return mend_point(new_point, setting.row_sum, passes)
    cross = zeroed(crosses[0], ok)
    if not isometric:
        cross = torch.bmm(R, cross)
        if skew is not None:
            keep_(skew, project_skew(skew, rotation), ok)
    add_product_(normal, new_point, cross, alpha=-step)
    if passes:
        new_point, overlap = mend_after(new_point, normal, setting.row_sum, passes)
        add_product_(normal, new_point, zeroed(overlap, ok), alpha=-1.0)
    return new_point


def _moved(
    point: Tensor,
    direction: Tensor,
    within: Tensor,
    root: Tensor,
    step: Scalar,
    across: Tensor | None,
    mending: Tensor | None,
) -> Tensor:
    """Return (X + X M)(I + ``within`` + eta ``across`` R) + eta V R."""
    if across is not None:
        within = within + torch.bmm(across, root) * step
    new_point = add_product(point, point, within if mending is None else after(mending, within))
    return add_product_(new_point, direction, root, alpha=step)


# ---- pieces, in the order of a step ------------------------------------------------------------


def measure(
    point: Tensor, grad: Tensor, normal: Deferred | None, setting: Setting
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return X'G, and to correct M = (I - X'X)/2 and X'B, so that X + X M is orthonormal.

    X'G is then that of X + X M, and zero for the matrices that do not move.
    """
    ok, correct, pairs = setting.ok, setting.correct, [(point, grad)]
    if correct is True:
        pairs.append((point, point))
    if correct is not False and normal is not None:
        pairs.append((point, normal.base))
    inner, *others = sums(setting.row_sum, *pairs)
    inner = inner if ok is None else zeroed(inner, ok)
    if correct is False:
        return inner, None, None
    mending = mend(correct.clone() if isinstance(correct, Tensor) else others.pop(0))
    return mended(mending, inner), mending, others[0] if others else None


def torque_of(inner: Tensor, a: float, force: Scalar) -> Tensor:
    """-f = force (S' - S) / (2 (1 - a)) for S = X'G."""
    # in the memory order of S, which is also the faster one
    difference = torch.sub(inner.mH, inner, out=torch.empty_like(inner))
    factor = force / (2 * (1 - a))
    return difference if isinstance(factor, float) and factor == 1.0 else difference * factor


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


def project_skew(skew: Tensor, rotation: Tensor) -> Tensor:
    """Return the skew part of D'Z: what projection onto the tangent space at X D leaves of X Z."""
    carried = torch.baddbmm(skew, rotation.mH, skew)
    return (carried - carried.mH) / 2


def correct_normal_(normal: Tensor, point: Tensor, mending: Tensor | None, overlap: Tensor) -> None:
    """Make U normal to X + X M again, for X'U = ``overlap``."""
    add_product_(normal, point, mended(mending, mended(mending, overlap)), alpha=-1.0)


def accumulate_(
    value: Tensor, earlier: Tensor, factor: float, target: Tensor, ok: Tensor | None
) -> Tensor:
    """target = value + factor earlier for the matrices that move."""
    if ok is None:
        return torch.add(value, earlier, alpha=factor, out=target)
    return keep_(target, torch.add(value, earlier, alpha=factor), ok)


def turn_square_(
    point: Tensor,
    ahead: Callable[[], Tensor],
    skew: Tensor | None,
    lr: Scalar,
    transport: str,
    setting: Setting,
) -> Tensor:
    """X <- X rot(eta ``ahead()``), and Z carried if it is projected; rounding is taken out of X."""
    reader = setting.reader or reader_for(point)
    carried = None if transport == "isometric" else skew
    if carried is None and point.size(-1) < BLOCKED:
        new_point = turned_square(point, ahead, lr, reader)
    else:  # a product of the rotation is symmetric, and large ones are cheaper then
        rotation = rotation_of_square(ahead, lr, reader)
        new_point = add_product(point, point, rotation)
        if carried is not None:
            keep_(carried, project_skew(carried, rotation), setting.ok)
    return new_point if setting.correct is False else mend_point(new_point, setting.row_sum)
