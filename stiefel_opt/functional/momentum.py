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
n >= m, or ``(k, m, m)``. Sums over rows go through ``row_sum``, once a stage with the matrices
packed side by side, so that rows may live on several processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.linalg import (
    add_product_,
    add_to_diagonal_,
    cayley,
    exponential,
    gram,
    infinity_norm,
    largest_bound,
    polar_rotation,
    product,
    roots,
)

__all__ = ["METRICS", "ROTATIONS", "TRANSPORTS", "adam_", "metric_parameter", "normal_part", "sgd_"]

RowSum = Callable[[Tensor], Tensor]
Scalar = float | Tensor

METRICS: Final = {"canonical": 0.5, "euclidean": 0.0}
TRANSPORTS: Final = ("isometric", "published")
ROTATIONS: Final = ("polar", "euler", "cayley", "expm")

_CANONICAL: Final = 0.5
# An angle atan(eta sigma) gains nothing beyond this, while I + eta^2 U'U becomes ill-conditioned.
_SATURATION: Final = 4.0
# Published flows do not saturate; where bounds cannot be read they get roots good to this bound.
_PUBLISHED_CAP: Final = 1e4


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
    correct: bool = True,
    row_sum: RowSum | None = None,
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
        correct: Measure X'X and X'U and remove what rounding left there.
        row_sum: Sum over the processes that share the rows. Default: all rows are here.

    Returns: The new point, ``(k, n, m)``.
    Note: 6 products of n x m by m x m, 8 with ``correct``, 8 with ``nesterov``, three more in a
        step so long that it would amplify rounding.
    Reference: Kong et al., Algorithm 1, with the geometry corrected.
    """
    a = metric_parameter(metric)
    inner, mend, overlap = _measure(point, grad, normal, correct, row_sum)
    torque = _torque(inner, a, force)
    coupling = None if normal is None else _coupling(skew, momentum, lr, a, transport)
    torch.add(torque, skew, alpha=momentum, out=skew)
    ahead = torch.add(torque, skew, alpha=momentum) if nesterov else skew
    del torque
    if normal is None:
        del inner  # for a square matrix every m x m is as large as the parameter
    turn, turn_gram = _turn(ahead, lr, transport, rotation, normal is None)
    frame = _after(mend, turn)  # Xh = X frame
    if normal is None:
        return product(point, frame)
    if factor is None or shift is None:
        inner = _after(mend, _times(inner, force))
        force_normal = _subtract_(product(point, inner), grad, force)  # -g
        if overlap is not None and mend is not None:
            add_product_(normal, point, -_after(mend, _after(mend, overlap)))
        _scale_(normal, momentum, coupling).add_(force_normal)
        direction = force_normal.add_(normal, alpha=momentum) if nesterov else normal
        return _advance_(point, direction, normal, frame, turn_gram, lr, transport, row_sum=row_sum)

    if overlap is not None and mend is not None:
        shift = _after(mend, _after(mend, torch.bmm(overlap, factor)), out=shift)
    inner = _after(mend, _times(inner, force))
    if coupling is None:
        pending = product(normal, factor)
        inner = torch.sub(inner, shift, alpha=momentum)
        add_product_(pending, point, inner, beta=momentum)
    else:
        pending = product(normal, torch.bmm(factor, coupling))
        add_product_(pending, point, torch.baddbmm(inner, shift, coupling, alpha=-1.0))
    _subtract_(pending, grad, force, out=normal)  # B is the U of phi_3 from here on

    gram_normal = _sum(row_sum, gram(normal, normal))
    if transport == "isometric":
        step, excess, scale, limit = _saturate(gram_normal, lr)
        inverse_root, _ = roots(excess, limit, scale=scale, root=factor)
        torch.mul(gram_normal, step, out=shift)
        along = inverse_root
    else:
        step = lr
        excess, pulled = _published_excess(gram_normal, turn_gram, lr)
        limit = largest_bound(excess, _PUBLISHED_CAP)
        inverse_root, _ = roots(excess, limit, root=factor)
        torch.mul(torch.bmm(factor, gram_normal), lr, out=shift)
        add_to_diagonal_(torch.mul(pulled, lr * lr, out=factor), 1.0)
        along = _after(turn_gram, inverse_root)
    new_point = product(point, torch.bmm(frame, inverse_root))
    _move_along_(new_point, normal, along, step)
    if limit > 1 and point.device.type == "cpu":
        new_point, overlap = _mend_long_step(new_point, normal, row_sum)
        torch.bmm(overlap, factor, out=shift)
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
    correct: bool = True,
    row_sum: RowSum | None = None,
) -> Tensor:
    r"""One step of StiefelAdam; returns the new point and updates the momenta in place.

    Second moments p of f and q of g are elementwise; both moments are corrected as in Adam. X turns
    by rot(eta Zp) and moves along V, and U is carried by the rotation that V makes:

        U <- b1 U rot((2a - 1) eta Zp) - (1 - b1) g,   Z <- b1 Z - (1 - b1) f
        Zp = (Z/c1) / (sqrt(p/c2) + eps),   V = (I - XX') (U/c1) / (sqrt(q/c2) + eps)

    Args:
        point, grad, skew, normal, lr, metric, transport, rotation, correct, row_sum: as in
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
    inner, mend, overlap = _measure(point, grad, normal, correct, row_sum)
    torque = _torque(inner, a, force)
    coupling = None
    if normal is not None and (transport == "published" or a != _CANONICAL):
        earlier = skew
        if transport == "isometric":  # the preconditioned Z of the step before; 0 at the first
            square = square_skew if max_square_skew is None else max_square_skew
            before = step - 1.0
            earlier = _precondition(skew, square, _at_least_one(before), betas, eps)
            earlier = earlier * (before > 0)
        coupling = _coupling(earlier, beta1, lr, a, transport)
    skew.mul_(beta1).add_(torque, alpha=1 - beta1)
    square = _second_moment_(square_skew, max_square_skew, torque, beta2)
    preconditioned = _precondition(skew, square, step, betas, eps)
    turn, turn_gram = _turn(preconditioned, lr, transport, rotation, normal is None)
    frame = _after(mend, turn)
    if normal is None or square_normal is None:
        return product(point, frame)

    inner = _after(mend, _times(inner, force))
    force_normal = _subtract_(product(point, inner), grad, force)  # -g
    if overlap is not None and mend is not None:
        add_product_(normal, point, -_after(mend, _after(mend, overlap)))
    square = _second_moment_(square_normal, max_square_normal, force_normal, beta2)
    _scale_(normal, beta1, coupling).add_(force_normal, alpha=1 - beta1)
    direction = _precondition(normal, square, step, betas, eps, out=force_normal)
    inner = _after(mend, _after(mend, _sum(row_sum, gram(point, direction))))
    add_product_(direction, point, -inner)
    return _advance_(point, direction, normal, frame, turn_gram, lr, transport, row_sum=row_sum)


# ---- the pieces, in the order of a step --------------------------------------------------------


def _measure(
    point: Tensor, grad: Tensor, normal: Tensor | None, correct: bool, row_sum: RowSum | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return X'G, and with ``correct`` C = (3I - X'X)/2 and X'B, so that X C is orthonormal.

    X'G is then that of X C.
    """
    if not correct:
        return _sum(row_sum, gram(point, grad)), None, None
    parts = [gram(point, other) for other in (grad, point, normal) if other is not None]
    packed = _sum(row_sum, torch.cat(parts, dim=-1))
    inner, own, *overlap = torch.split(packed, point.size(-1), dim=-1)
    mend = _mend(own)
    return torch.bmm(mend, inner), mend, overlap[0] if overlap else None


def _mend(own: Tensor) -> Tensor:
    """Return C = (3I - X'X)/2, one Newton-Schulz step: enough to take rounding out of X C."""
    return add_to_diagonal_(own * -0.5, 1.5)


def _torque(inner: Tensor, a: float, force: Scalar) -> Tensor:
    """-f = force (S' - S) / (2 (1 - a)) for S = X'G."""
    return _times(inner.mT - inner, force / (2 * (1 - a)))


def _times(matrix: Tensor, factor: Scalar) -> Tensor:
    return matrix if isinstance(factor, float) and factor == 1.0 else matrix * factor


def _coupling(skew: Tensor, momentum: float, lr: Scalar, a: float, transport: str) -> Tensor | None:
    """phi_2 without the force: U <- U M. Returns M, or None where it is the number ``momentum``."""
    if momentum == 0:
        return None
    if transport == "published":
        return add_to_diagonal_(skew * (lr * (3 * a - 2) / 2), momentum)
    if a == _CANONICAL:
        return None
    return _turn(skew, lr * (2 * a - 1), transport, "polar")[0].mul_(momentum)


def _turn(
    skew: Tensor, lr: Scalar, transport: str, rotation: str, square: bool = False
) -> tuple[Tensor, Tensor | None]:
    """phi_1: return D of Xh = X D for K = lr ``skew``, and Xh'Xh where it is not I.

    Euler's I + K is no rotation: what follows it in the step is a polar retraction, which at once
    makes it rot(K) where nothing is added in between: isometric flows, square matrices.
    """
    isometric = transport == "isometric"
    if isinstance(lr, Tensor):
        skew, lr = skew * lr, 1.0
    square_gram = torch.bmm(skew.mT, skew)  # -Z^2: its bound is the sharper one
    limit = lr * lr * largest_bound(square_gram, math.inf)
    if isometric and not skew.size(-1) * limit <= _SATURATION**2:  # then it may be saturated
        norm = infinity_norm(skew) * abs(lr)
        if norm.device.type != "cpu" or float(norm.max()) > _SATURATION:
            scale = (_SATURATION / norm).clamp(max=1.0)
            skew, square_gram = skew * scale, square_gram * scale.square()
            limit = min(limit, _SATURATION**2)
    limit = min(limit, _PUBLISHED_CAP)
    euler = rotation == "euler" and not isometric and not square
    if rotation == "polar" or (rotation == "euler" and not euler):
        return polar_rotation(skew, square_gram, limit, lr), None
    step = skew * lr
    if rotation == "cayley":
        return cayley(step), None
    if rotation == "expm":
        return exponential(step), None
    eye = torch.eye(step.size(-1), dtype=step.dtype, device=step.device)
    return step + eye, torch.add(eye, square_gram, alpha=lr * lr)


def _saturate(gram_direction: Tensor, lr: Scalar) -> tuple[Scalar, Tensor, float, float]:
    """Return eta, shortened where eta sigma > 4; eta^2 V'V as (E / scale, scale); its bound."""
    most = _SATURATION * _SATURATION
    if isinstance(lr, float):
        limit = lr * lr * largest_bound(gram_direction, math.inf)
        if limit <= most:
            return lr, gram_direction, lr * lr, limit
    excess = gram_direction * (lr * lr)
    shorter = (most / infinity_norm(excess)).clamp(max=1.0)
    return lr * shorter.sqrt(), excess * shorter, 1.0, most


def _move_along_(new_point: Tensor, direction: Tensor, small: Tensor, step: Scalar) -> Tensor:
    """new_point += step V small."""
    if isinstance(step, Tensor):
        return add_product_(new_point, direction, small * step)
    return add_product_(new_point, direction, small, alpha=step)


def _published_excess(
    gram_direction: Tensor, turn_gram: Tensor | None, lr: Scalar
) -> tuple[Tensor, Tensor]:
    """Return Xd'Xd - I = (P - I) + eta^2 P W P and P W, for Xd = Xh + eta V P and P = Xh'Xh."""
    if turn_gram is None:
        return gram_direction * (lr * lr), gram_direction
    pulled = torch.bmm(turn_gram, gram_direction)
    excess = torch.bmm(pulled, turn_gram).mul_(lr * lr).add_(turn_gram)
    return add_to_diagonal_(excess, -1.0), pulled


def _advance_(
    point: Tensor,
    direction: Tensor,
    normal: Tensor,
    frame: Tensor,
    turn_gram: Tensor | None,
    lr: Scalar,
    transport: str,
    row_sum: RowSum | None,
) -> Tensor:
    """phi_3 along V = ``direction``: return the new point, carry U = ``normal`` in place."""
    parts = torch.cat((gram(direction, direction), gram(direction, normal)), dim=-1)
    own, cross = torch.split(_sum(row_sum, parts), point.size(-1), dim=-1)
    if transport == "isometric":
        step, excess, scale, limit = _saturate(own, lr)
        inverse_root, bend = roots(excess, limit, scale=scale, bend=True)
        along = inverse_root
        # T xi = xi - eta^2 V R^2 (I + R)^(-1) V'xi - eta Xh R V'xi
        add_product_(normal, direction, _after(bend, cross).mul_(-step * step))
        back = torch.bmm(frame, torch.bmm(inverse_root, cross) * step)
    else:
        excess, _ = _published_excess(own, turn_gram, lr)
        limit = largest_bound(excess, _PUBLISHED_CAP)
        inverse_root = roots(excess, limit).inverse_root
        step, along = lr, _after(turn_gram, inverse_root)
        back = torch.bmm(frame, cross) * lr
    add_product_(normal, point, back.neg_())
    new_point = product(point, torch.bmm(frame, inverse_root))
    _move_along_(new_point, direction, along, step)
    if limit > 1 and point.device.type == "cpu":
        new_point, overlap = _mend_long_step(new_point, normal, row_sum)
        add_product_(normal, new_point, -overlap)
    return new_point


def _mend_long_step(
    new_point: Tensor, normal: Tensor, row_sum: RowSum | None
) -> tuple[Tensor, Tensor]:
    """Return X made orthonormal again, and X'B for it: a long step amplifies rounding.

    Where bounds cannot be read every step begins with this correction instead.
    """
    parts = torch.cat((gram(new_point, new_point), gram(new_point, normal)), dim=-1)
    own, overlap = torch.split(_sum(row_sum, parts), new_point.size(-1), dim=-1)
    mend = _mend(own)
    return product(new_point, mend), torch.bmm(mend, overlap)


def _precondition(
    first: Tensor,
    second: Tensor,
    step: Scalar,
    betas: tuple[float, float],
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return (first/c1) / (sqrt(second/c2) + eps) with ci = 1 - bi^step; 0/0 counts as 0."""
    correction1, correction2 = (_correction(beta, step, first.dtype) for beta in betas)
    denominator = torch.sqrt(second, out=out).mul_(correction1 / correction2**0.5)
    denominator.add_(correction1 * eps)
    if eps == 0:
        denominator.masked_fill_(denominator == 0, 1.0)
    return torch.div(first, denominator, out=denominator)


def _correction(beta: float, step: Scalar, dtype: torch.dtype) -> Scalar:
    """Return 1 - beta^step, without the cancellation that a step in float32 would suffer."""
    if isinstance(step, Tensor):
        return -torch.expm1(step.to(dtype) * (math.log(beta) if beta > 0 else -math.inf))
    return 1.0 - float(beta**step)


def _second_moment_(square: Tensor, largest: Tensor | None, value: Tensor, beta2: float) -> Tensor:
    """square <- b2 square + (1 - b2) value^2; return what divides: it, or its running maximum."""
    square.mul_(beta2).addcmul_(value, value, value=1 - beta2)
    return square if largest is None else torch.maximum(largest, square, out=largest)


def _at_least_one(number: Scalar) -> Scalar:
    return number.clamp(min=1.0) if isinstance(number, Tensor) else max(number, 1.0)


def _scale_(normal: Tensor, momentum: float, coupling: Tensor | None) -> Tensor:
    """U <- U M in place; M is ``coupling``, or the number ``momentum``."""
    if coupling is None:
        return normal.mul_(momentum)
    return normal.copy_(product(normal, coupling))


def _subtract_(target: Tensor, grad: Tensor, force: Scalar, out: Tensor | None = None) -> Tensor:
    """out = target - force grad; ``out`` defaults to ``target``."""
    out = target if out is None else out
    if isinstance(force, Tensor):
        return torch.addcmul(target, grad, force, value=-1.0, out=out)
    return torch.sub(target, grad, alpha=force, out=out)


def _after(left: Tensor | None, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left @ right; None is the identity."""
    return right if left is None else torch.bmm(left, right, out=out)


def _sum(row_sum: RowSum | None, packed: Tensor) -> Tensor:
    return packed if row_sum is None else row_sum(packed)
