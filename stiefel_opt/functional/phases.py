"""The pieces of a step that StiefelSGD and StiefelAdam share, in the order of a step.

Notation and shapes as in :mod:`stiefel_opt.functional.momentum`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stiefel_opt.functional.finite import Watch
from stiefel_opt.functional.flows import (
    RowSum,
    Scalar,
    after,
    isometric_moves,
    mend_,
    mend_long_step,
    mend_point,
    mended,
    move_along_,
    published_root,
    published_turn,
    sum_rows,
    sums,
    turn_square,
)
from stiefel_opt.linalg import add_product, add_product_, add_to_diagonal_, gram, product, reads

__all__ = [
    "advance_",
    "carry_",
    "measure",
    "momentum_of_square_",
    "scaled",
    "subtract_gradient_",
    "times_gram",
    "torque_of",
    "turn_point",
    "watch_result",
]


def measure(
    point: Tensor,
    grad: Tensor,
    normal: Tensor | None,
    correct: bool | Tensor,
    row_sum: RowSum | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return X'G, and with ``correct`` M = (I - X'X)/2 and X'B, so that X + X M is orthonormal.

    X'G is then that of X + X M. Square matrices are corrected at the end of their step instead.
    """
    if normal is None or correct is False:
        return sum_rows(row_sum, gram(point, grad)), None, None
    if isinstance(correct, Tensor):
        (inner, overlap), own = sums(row_sum, (point, grad), (point, normal)), correct.clone()
    else:
        own, inner, overlap = sums(row_sum, (point, point), (point, grad), (point, normal))
    mending = mend_(own)
    return mended(mending, inner), mending, overlap


def torque_of(inner: Tensor, a: float, force: Scalar) -> Tensor:
    """-f = force (S' - S) / (2 (1 - a)) for S = X'G."""
    # in the memory order of S, which is also the faster one
    difference = torch.sub(inner.mH, inner, out=torch.empty_like(inner))
    return scaled(difference, force / (2 * (1 - a)))


def scaled(matrix: Tensor, factor: Scalar) -> Tensor:
    return matrix if isinstance(factor, float) and factor == 1.0 else matrix * factor


def momentum_of_square_(
    point: Tensor,
    grad: Tensor,
    skew: Tensor,
    momentum: float,
    force: Scalar,
    nesterov: bool,
    a: float,
    row_sum: RowSum | None,
    watch: Watch | None,
) -> Tensor:
    """Z <- mu Z - f of SGD on SO(n); return the direction of X: Z, or Nesterov's."""
    if nesterov:
        (inner,) = sums(row_sum, (point, grad))
        if watch is not None:
            watch.begin(inner)
        torque = torque_of(inner, a, force)
        torch.add(torque, skew, alpha=momentum, out=skew)
        return torque.add_(skew, alpha=momentum)
    factor = force / (2 * (1 - a))
    if row_sum is None and isinstance(factor, float):
        half = torch.baddbmm(skew, grad.mH, point, beta=momentum / 2, alpha=factor)
    else:
        half = sums(row_sum, (grad, point))[0] * factor
        half.add_(skew, alpha=momentum / 2)
    if watch is not None:
        watch.begin(half)
    return torch.sub(half, half.mH, out=skew)  # mu Z - f, as Z itself is skew


def turn_point(
    point: Tensor,
    ahead: Callable[[], Tensor],
    lr: Scalar,
    rotation: str,
    correct: bool | Tensor,
    row_sum: RowSum | None,
) -> Tensor:
    """Return square X turned by eta Z; with ``correct``, rounding is taken out of the result.

    X'X is measured there even if that of X is known: it would take as much memory as X meanwhile.
    """
    new_point = add_product(point, point, turn_square(ahead, lr, rotation))
    return new_point if correct is False else mend_point(new_point, row_sum)


def subtract_gradient_(
    target: Tensor, grad: Tensor, force: Scalar, out: Tensor | None = None
) -> Tensor:
    """out = target - force grad; ``out`` defaults to ``target``."""
    out = target if out is None else out
    if torch.compiler.is_compiling():  # takes no ``out`` with gaps
        return out.copy_(target - grad * force)
    if isinstance(force, Tensor):
        return torch.addcmul(target, grad, force, value=-1.0, out=out)
    return torch.sub(target, grad, alpha=force, out=out)


def carry_(normal: Tensor, momentum: float, coupling: Tensor | None) -> Tensor:
    """U <- U M in place; M is ``coupling``, or the number ``momentum``."""
    if coupling is None:
        return normal.mul_(momentum)
    return normal.copy_(product(normal, coupling))


def advance_(
    point: Tensor,
    direction: Tensor,
    normal: Tensor,
    ahead: Tensor,
    mending: Tensor | None,
    lr: Scalar,
    transport: str,
    rotation: str,
    row_sum: RowSum | None,
    watch: Watch | None,
    steep: bool = False,
) -> Tensor:
    """phi_1 along ``ahead`` and phi_3 along V = ``direction``: return the new point, carry U.

    As Xh R = X_new - eta V R, the transport of U needs no product with Xh:
    T U = U - eta^2 V R^2 (I + R)^(-1) C - eta Xh R C = U + eta^2 V R (I + R)^(-1) C - eta X_new C.
    """
    own, cross = sums(row_sum, (direction, direction), (direction, normal))
    if transport == "isometric":
        moves = isometric_moves(ahead, own, lr, rotation, bend=True)
        frame, along, step, limit = moves.frame, moves.inverse_root, moves.step, moves.limit
        if watch is not None:
            watch.go_on(cross, limit)
        move_along_(normal, direction, times_gram(moves.bend, cross), step * step)
        del moves
    else:
        turn, turn_gram = published_turn(ahead, lr, rotation)
        shrink, _, limit = published_root(own, turn_gram, lr)
        if watch is not None:
            watch.go_on(cross, limit)
        back = torch.baddbmm(cross, turn, cross)
        move_along_(normal, point, mended(mending, back), -lr)
        frame, step = after(turn, shrink), lr
        along = times_gram(turn_gram, add_to_diagonal_(shrink, 1.0))
    del own
    if mending is not None:
        frame = after(mending, frame)
    new_point = add_product(point, point, frame)
    move_along_(new_point, direction, along, step)
    if transport == "isometric":
        move_along_(normal, new_point, cross, -step)
    if steep or (limit > 1 and reads(point)):
        new_point, overlap = mend_long_step(new_point, normal, row_sum)
        add_product_(normal, new_point, -overlap)
    if watch is not None and transport == "published":
        watch_result(watch, new_point, row_sum)
    return new_point


def times_gram(left: Tensor | None, right: Tensor) -> Tensor:
    """Return left @ right; None is the identity."""
    return right if left is None else torch.bmm(left, right)


def watch_result(watch: Watch, new_point: Tensor, row_sum: RowSum | None) -> None:
    """Look at the new point: the published flows may leave floating point in one step."""
    (own,) = sums(row_sum, (new_point, new_point))
    watch.go_on(own, float(own.abs().max()) if reads(own) else 0.0)
