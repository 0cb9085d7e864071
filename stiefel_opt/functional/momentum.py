r"""Momentum on the Stiefel manifold by isometric flows: the rules of StiefelSGD and StiefelAdam.

Notation of Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023, arXiv 2205.14173): X is the
point, G the Euclidean gradient, Z the skew and U the normal part of the velocity (X'U = 0), eta the
learning rate, mu the momentum, a < 1 the parameter of the metric tr(D1'(I - a XX')D2). One step is

    f = (X'G - G'X) / (2 (1 - a)),   g = (I - XX') G                 force
    U <- mu U rot((2a - 1) eta Z) - g                                phi_2, coupling
    Z <- mu Z - f,  Xh = X rot(eta Z)                                phi_1, turn
    R = (I + eta^2 U'U)^(-1/2)
    X <- (Xh + eta U) R,  U <- (U - eta Xh U'U) R                    phi_3, both by one rotation

with rot(K) = (I + K)(I - K^2)^(-1/2). The published flows differ in phi_2 and phi_3; their printed
signs and coefficient are corrected here. Functions ending in ``_`` update the momenta in place and
return the new point; ``point`` and ``grad`` are only read. All batches are ``(k, n, m)`` with
n >= m, or ``(k, m, m)``; for complex ones ' is the conjugate transpose. Sums over rows go through
``row_sum``, once a stage with the matrices packed side by side, so that rows may live on several
processes.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.functional.finite import Watch
from stiefel_opt.functional.flows import (
    CANONICAL,
    RowSum,
    Scalar,
    after,
    coupling,
    is_steep,
    isometric_moves,
    mend_long_step,
    mended,
    move_along_,
    published_root,
    published_turn,
    sum_rows,
    sums,
)
from stiefel_opt.functional.moments import (
    fused_moments_,
    gain,
    may_fuse,
    precondition,
    second_moment_,
)
from stiefel_opt.functional.phases import (
    advance_,
    carry_,
    measure,
    momentum_of_square_,
    scaled,
    subtract_gradient_,
    times_gram,
    torque_of,
    turn_point,
    watch_result,
)
from stiefel_opt.linalg import (
    add_product,
    add_product_,
    add_to_diagonal_,
    own_gram,
    product,
    reads,
)

__all__ = [
    "METRICS",
    "ROTATIONS",
    "TRANSPORTS",
    "adam_",
    "metric_parameter",
    "normal_part",
    "sgd_",
]

METRICS: Final = {"canonical": 0.5, "euclidean": 0.0}
TRANSPORTS: Final = ("isometric", "published")
ROTATIONS: Final = ("polar", "euler", "cayley", "expm")


def metric_parameter(metric: str | float) -> float:
    """Return a of the metric tr(D1'(I - a XX')D2): 1/2 is canonical, 0 Euclidean."""
    return METRICS[metric] if isinstance(metric, str) else float(metric)


def normal_part(point: Tensor, normal: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """Return U = B L - X N, which :func:`sgd_` leaves unevaluated between steps."""
    return add_product_(product(normal, factor), point, -shift)


def sgd_(
    point: Tensor,
    grad: Tensor,
    skew: Tensor,
    normal: Tensor | None = None,
    factor: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    lr: Scalar,
    momentum: float = 0.9,
    force: Scalar = 1.0,
    nesterov: bool = False,
    metric: str | float = "canonical",
    transport: str = "isometric",
    rotation: str = "polar",
    correct: bool | Tensor = True,
    row_sum: RowSum | None = None,
    watch: Watch | None = None,
) -> Tensor:
    r"""One step of StiefelSGD; returns the new point and updates the momenta in place.

    The normal momentum is kept as U = B L - X N with B tall and L, N of m x m, so that neither the
    projection of G nor the transport of U ever becomes a tall product of its own: six in all.

    Args:
        point: X, orthonormal, ``(k, n, m)``.
        grad: G, same shape.
        skew: Z, ``(k, m, m)``, updated.
        normal: B, ``(k, n, m)``, updated; None for square matrices, which have no normal part.
        factor: L, ``(k, m, m)``, starts as I, updated. None (with ``nesterov``): U is B itself.
        shift: N, ``(k, m, m)``, starts as 0, updated.
        lr: eta, a number or ``(k, 1, 1)``.
        momentum: mu.
        force: Factor on f and g: 1 - dampening, negative to maximise; a number or ``(k, 1, 1)``.
        nesterov: X moves along mu U - g and mu Z - f.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0) or any a < 1.
        transport: "isometric" or "published".
        rotation: phi_1: "polar", "euler", "cayley" or "expm". Isometric flows need Xh'Xh = I, so
            there "euler" is followed by its polar factor, which makes it "polar".
        correct: Measure X'X and X'U and remove what rounding left there; or X'X, if known.
        row_sum: Sum over the processes that share the rows. Default: all rows are here.
        watch: Looks at the sums of the step, before anything has changed. Default: nobody.

    Returns: The new point, ``(k, n, m)``.
    Note: 6 products of n x m by m x m, 8 with ``correct``, 8 with ``nesterov``, three more in a
        step so long, or a gradient so large, that rounding would be amplified.
    Reference: Kong et al., Algorithm 1, with the geometry corrected.
    """
    a = metric_parameter(metric)
    if normal is None:
        ahead = momentum_of_square_(point, grad, skew, momentum, force, nesterov, a, row_sum, watch)
        return turn_point(point, lambda: ahead, lr, rotation, correct, row_sum)
    inner, mending, overlap = measure(point, grad, normal, correct, row_sum)
    length = None if watch is None else watch.begin(inner)
    steep = is_steep(inner, lr * (1 + momentum * nesterov), length)
    torque = torque_of(inner, a, force)
    matrix = coupling(skew, momentum, lr, a, transport)
    torch.add(torque, skew, alpha=momentum, out=skew)
    ahead = torch.add(torque, skew, alpha=momentum) if nesterov else skew
    if factor is None or shift is None:
        inner = mended(mending, scaled(inner, force))
        force_normal = subtract_gradient_(product(point, inner), grad, force)  # -g
        if overlap is not None and mending is not None:
            add_product_(normal, point, mended(mending, mended(mending, overlap)), alpha=-1.0)
        carry_(normal, momentum, matrix).add_(force_normal)
        direction = force_normal.add_(normal, alpha=momentum) if nesterov else normal
        return advance_(
            point, direction, normal, ahead, mending, lr, transport, rotation, row_sum, watch, steep
        )

    if overlap is not None and mending is not None:
        shift.copy_(mended(mending, mended(mending, torch.bmm(overlap, factor))))
    inner = mended(mending, scaled(inner, force))
    if matrix is None:
        pending = product(normal, factor)
        inner = torch.sub(inner, shift, alpha=momentum)
        add_product_(pending, point, inner, beta=momentum)
    else:
        pending = product(normal, torch.bmm(factor, matrix))
        add_product_(pending, point, torch.baddbmm(inner, shift, matrix, alpha=-1.0))
    subtract_gradient_(pending, grad, force, out=normal)  # B is the U of phi_3 from here on
    del pending

    gram_normal = sum_rows(row_sum, own_gram(normal))
    if transport == "isometric":
        moves = isometric_moves(ahead, gram_normal, lr, rotation, root=factor)
        frame, along, step, limit = moves.frame, moves.inverse_root, moves.step, moves.limit
        torch.mul(gram_normal, step, out=shift)
    else:
        turn, turn_gram = published_turn(ahead, lr, rotation)
        shrink, pulled, limit = published_root(gram_normal, turn_gram, lr, root=factor)
        torch.mul(torch.bmm(factor, gram_normal), lr, out=shift)
        add_to_diagonal_(torch.mul(pulled, lr * lr, out=factor), 1.0)
        frame, step = after(turn, shrink), lr
        along = times_gram(turn_gram, add_to_diagonal_(shrink, 1.0))
    if watch is not None:
        watch.go_on(gram_normal, limit)
    if mending is not None:
        frame = after(mending, frame)
    new_point = add_product(point, point, frame)
    move_along_(new_point, normal, along, step)
    if steep or (limit > 1 and reads(point)):
        new_point, overlap = mend_long_step(new_point, normal, row_sum)
        torch.bmm(overlap, factor, out=shift)
    if watch is not None and transport == "published":
        watch_result(watch, new_point, row_sum)
    return new_point


def adam_(
    point: Tensor,
    grad: Tensor,
    skew: Tensor,
    square_skew: Tensor,
    normal: Tensor | None = None,
    square_normal: Tensor | None = None,
    max_square_skew: Tensor | None = None,
    max_square_normal: Tensor | None = None,
    *,
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    force: Scalar = 1.0,
    metric: str | float = "canonical",
    transport: str = "isometric",
    rotation: str = "polar",
    correct: bool | Tensor = True,
    row_sum: RowSum | None = None,
    watch: Watch | None = None,
) -> Tensor:
    r"""One step of StiefelAdam; returns the new point and updates the momenta in place.

    Second moments p of f and q of g are elementwise; both moments are corrected as in Adam. X turns
    by rot(eta Zp) and moves along V, and U is carried by the rotation that V makes:

        U <- b1 U rot((2a - 1) eta Zp) - (1 - b1) g,   Z <- b1 Z - (1 - b1) f
        Zp = (Z/c1) / (sqrt(p/c2) + eps),   V = (I - XX') (U/c1) / (sqrt(q/c2) + eps)

    Args:
        point, grad, skew, normal, lr, metric, transport, rotation, correct, row_sum, watch: as in
            :func:`sgd_`; ``normal`` is U itself here.
        square_skew: p, ``(k, m, m)``, updated.
        square_normal: q, ``(k, n, m)``, updated; None for square matrices.
        max_square_skew, max_square_normal: Running maxima of p and q (amsgrad), updated. None: off.
        step: t >= 1, this step's number, a number or ``(k, 1, 1)``.
        betas: b1 and b2.
        eps: Added to the denominator; with 0, 0/0 counts as 0.
        force: Sign of the gradient: 1, or -1 to maximise.

    Returns: The new point, ``(k, n, m)``.
    Note: 10 products of n x m by m x m, one more off the canonical metric, two with ``correct``,
        three in a step so long that rounding would be amplified.
    Reference: Kong et al., Algorithm 2, with both moments corrected for their start at zero.
    """
    a = metric_parameter(metric)
    beta1, beta2 = betas
    inner, mending, overlap = measure(point, grad, normal, correct, row_sum)
    if watch is not None:
        watch.begin(inner)
    torque = torque_of(inner, a, force)
    matrix = None
    if normal is not None and (transport == "published" or a != CANONICAL):
        earlier, earlier_lr = skew, lr
        if transport == "isometric":  # the preconditioned Z of the step before; 0 at the first
            square = square_skew if max_square_skew is None else max_square_skew
            before = step - 1.0
            counted = _at_least_one(before)
            earlier = precondition(skew, square, counted, betas, eps)
            earlier_lr = lr * gain(betas, counted, square.dtype) * (before > 0)
        matrix = coupling(earlier, beta1, earlier_lr, a, transport)
    skew.lerp_(torque, 1 - beta1)
    square = second_moment_(square_skew, max_square_skew, torque, beta2)
    if normal is None or square_normal is None:
        del inner, torque
        again = partial(precondition, skew, square, step, betas, eps)
        if point.size(0) > 1:  # a single matrix cannot be cut into batches that need less memory
            kept = again()
            again = partial(_itself, kept)
        lr = lr * gain(betas, step, square_skew.dtype)
        return turn_point(point, again, lr, rotation, correct, row_sum)
    ahead = precondition(skew, square, step, betas, eps, out=torque)

    inner = mended(mending, scaled(inner, force))
    force_normal = subtract_gradient_(product(point, inner), grad, force)  # -g
    if overlap is not None and mending is not None:
        add_product_(normal, point, mended(mending, mended(mending, overlap)), alpha=-1.0)
    moments = force_normal, normal, square_normal, max_square_normal
    if matrix is None and not isinstance(step, Tensor) and may_fuse(moments, eps):
        direction = fused_moments_(moments, step, betas, eps)
    else:
        square = second_moment_(square_normal, max_square_normal, force_normal, beta2)
        if matrix is None:
            normal.lerp_(force_normal, 1 - beta1)
        else:
            carry_(normal, beta1, matrix).add_(force_normal, alpha=1 - beta1)
        direction = precondition(normal, square, step, betas, eps, out=force_normal)
    lr = lr * gain(betas, step, square_skew.dtype)
    del force_normal, moments
    (inner,) = sums(row_sum, (point, direction))
    add_product_(direction, point, mended(mending, mended(mending, inner)), alpha=-1.0)
    del inner
    return advance_(
        point, direction, normal, ahead, mending, lr, transport, rotation, row_sum, watch
    )


def _at_least_one(number: Scalar) -> Scalar:
    return number.clamp(min=1.0) if isinstance(number, Tensor) else max(number, 1.0)


def _itself(tensor: Tensor) -> Tensor:
    return tensor
