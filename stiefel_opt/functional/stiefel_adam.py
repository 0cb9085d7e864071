r"""Adam on the Stiefel manifold: the rule of StiefelAdam; notation of stiefel_sgd.py.

First moments are the skew part Z and the normal part U of a velocity; second moments p of f and q
of g are elementwise; both are corrected for their start at zero as in Adam, ci = 1 - bi^t. X turns
by rot(eta Zp) and moves along V, and U is carried by the rotation that V makes:

    U <- b1 U rot((2a - 1) eta Zp) - (1 - b1) g,   Z <- b1 Z - (1 - b1) f
    p <- b2 p + (1 - b2) |f|^2,                    q <- b2 q + (1 - b2) |g|^2
    Zp = (Z/c1) / (sqrt(p/c2) + eps),              V = (I - XX') (U/c1) / (sqrt(q/c2) + eps)
    R = (I + eta^2 V'V)^(-1/2)
    X <- (X rot(eta Zp) + eta V) R,                U <- T U
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.device import is_free_to_read, reader_for
from stiefel_opt.functional.flows import (
    METRICS,
    Scalar,
    Setting,
    coupling,
    mended,
    metric_parameter,
)
from stiefel_opt.functional.stiefel_sgd import (
    Deferred,
    advance_,
    correct_normal_,
    measure,
    normal_force,
    torque_of,
    turn_square_,
)
from stiefel_opt.linalg import absolute_square, keep_, product, sums, zeroed

# Below it eps may round to 0 in float32, and 0/0, on the diagonal of p, would be NaN.
_LEAST_EPS: Final = 1e-30


class Moments(NamedTuple):
    """What StiefelAdam keeps of f, or of g: both moments, and with amsgrad a maximum.

    Attributes:
        first: Z or U.
        second: p or q, real.
        largest: The running maximum of p or q. None: there is none.
    """

    first: Tensor
    second: Tensor
    largest: Tensor | None = None

    @property
    def divisor(self) -> Tensor:
        """What divides: the second moment, or its running maximum."""
        return self.second if self.largest is None else self.largest


def adam_(
    point: Tensor,
    grad: Tensor,
    skew: Moments,
    normal: Moments | None,
    *,
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    force: float = 1.0,
    metric: str | float = "canonical",
    transport: str = "isometric",
    setting: Setting = Setting(),  # noqa: B008 - it is immutable
) -> Tensor:
    r"""One step of StiefelAdam; returns the new point and updates the moments in place.

    Args:
        point, grad, lr, metric, setting: as in :func:`stiefel_opt.functional.sgd_`.
        skew: Z and p, ``(k, m, m)``.
        normal: U and q, ``(k, n, m)``; None for square matrices, which have no normal part.
        step: t >= 1, this step's number, a number or ``(k, 1, 1)``.
        betas: b1 and b2.
        eps: Added to the denominator; with 0, 0/0 counts as 0.
        force: Sign of the gradient: 1, or -1 to maximise.
        transport: "isometric", or "projected": P U for T U.

    Returns: The new point, ``(k, n, m)``.
    Note: 10 products of n x m by m x m, 8 if "projected", one more off the canonical metric, two
        with ``setting.correct``, three in a step so long that rounding would be amplified.
    Reference: after Kong et al., Algorithm 2, with other maps, the geometry corrected, and both
        moments corrected for their start at zero.
    """
    a = metric_parameter(metric)
    ok = setting.ok
    reader = setting.reader or reader_for(point)
    weight: Scalar = 1 - betas[0]
    decay: Scalar = betas[1]
    if ok is not None:  # the gradient of a matrix that does not move is 0 here, and has no weight
        dtype = skew.second.dtype  # two numbers make ``torch.where`` one of float32
        weight = torch.zeros_like(ok, dtype=dtype).masked_fill_(ok, weight).to(skew.first.dtype)
        decay = torch.ones_like(ok, dtype=dtype).masked_fill_(ok, decay)
    kept = None if normal is None else Deferred(normal.first)
    inner, mending, overlap = measure(point, grad, kept, setting)
    torque = torque_of(inner, a, force)
    coupled = None
    if normal is not None and a != METRICS["canonical"]:
        # the preconditioned Z of the step before; 0 at the first
        before = step - 1.0
        counted = before.clamp(min=1.0) if isinstance(before, Tensor) else max(before, 1.0)
        earlier = precondition(skew, counted, betas, eps)
        earlier_lr = lr * gain(betas, counted, skew.second.dtype) * (before > 0)
        coupled = coupling(earlier, betas[0], earlier_lr, a, reader)
    skew.first.lerp_(torque, weight)
    second_moment_(skew, torque, decay, betas[1])
    gained_lr = lr * gain(betas, step, skew.second.dtype)
    if normal is None:
        del inner, torque
        again = partial(precondition, skew, step, betas, eps)
        # a single matrix cannot be cut into batches that need less memory
        turn = again if point.size(0) == 1 else cache(again)
        return turn_square_(point, turn, skew.first, gained_lr, transport, setting)
    ahead = precondition(skew, step, betas, eps, out=torque)
    inner = mended(mending, inner * force)
    force_normal = normal_force(point, inner, grad, force, ok)  # -g
    if overlap is not None:
        correct_normal_(normal.first, point, mending, zeroed(overlap, ok))
    if ok is None and coupled is None and _may_fuse(normal, force_normal, step, eps):
        direction = _fused_moments_(normal, force_normal, float(step), betas, eps)
    else:
        second_moment_(normal, force_normal, decay, betas[1])
        if coupled is None:
            normal.first.lerp_(force_normal, weight)
        else:
            carried = product(normal.first, coupled).add_(force_normal, alpha=1 - betas[0])
            keep_(normal.first, carried, ok)
            del carried
        direction = precondition(normal, step, betas, eps, out=force_normal)
    del force_normal, inner
    is_normal = transport == "isometric"  # whose transport needs V itself
    if is_normal:
        correct_normal_(direction, point, mending, *sums(setting.row_sum, (point, direction)))
    moved = point, direction, normal.first, ahead, skew.first, mending, gained_lr
    return advance_(*moved, transport, setting, is_normal=is_normal)


# ---- moments -----------------------------------------------------------------------------------


def bias_correction(beta: float, step: Scalar, dtype: torch.dtype) -> Scalar:
    """Return 1 - beta^step, without the cancellation that a step in float32 would suffer."""
    if isinstance(step, Tensor):
        return -torch.expm1(step.to(dtype) * (math.log(beta) if beta > 0 else -math.inf))
    return 1.0 - float(beta**step)


def second_moment_(moments: Moments, value: Tensor, decay: Scalar, beta2: float) -> None:
    """p <- b2 p + (1 - b2) |f|^2, and its running maximum; ``decay`` is b2, or 1 beside f = 0."""
    square = moments.second
    if value.is_complex():
        square.mul_(decay).add_(absolute_square(value), alpha=1 - beta2)
    else:
        square.mul_(decay).addcmul_(value, value, value=1 - beta2)
    if moments.largest is not None:
        torch.maximum(moments.largest, square, out=moments.largest)


def precondition(
    moments: Moments,
    step: Scalar,
    betas: tuple[float, float],
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return D with gamma D = (Z/c1) / (sqrt(p/c2) + eps), ci = 1 - bi^step; 0/0 counts as 0.

    The factor gamma of :func:`gain` is left to the learning rate.
    """
    first, second = moments.first, moments.divisor
    # the denominator is real
    denominator = torch.sqrt(second, out=None if first.is_complex() else out)
    denominator.add_(bias_correction(betas[1], step, second.dtype) ** 0.5 * eps)
    if eps < _LEAST_EPS:
        denominator.masked_fill_(denominator == 0, 1.0)
    return torch.div(first, denominator, out=None if first.is_complex() else denominator)


def gain(betas: tuple[float, float], step: Scalar, dtype: torch.dtype) -> Scalar:
    """Return gamma = sqrt(c2) / c1."""
    first, second = (bias_correction(beta, step, dtype) for beta in betas)
    return second**0.5 / first


def _may_fuse(moments: Moments, value: Tensor, step: Scalar, eps: float) -> bool:
    """Say whether torch's fused Adam may work out the moments: on a CPU, for real tensors that have
    their numbers in one order in memory, without gaps."""
    others = (tensor for tensor in moments if tensor is not None)
    return (
        not isinstance(step, Tensor)
        and is_free_to_read(value)
        and value.is_floating_point()
        and eps >= _LEAST_EPS
        and (value.is_contiguous() or value.mT.is_contiguous())
        and all(other.stride() == value.stride() for other in others)
    )


def _fused_moments_(
    moments: Moments, value: Tensor, step: float, betas: tuple[float, float], eps: float
) -> Tensor:
    """Update first and second moment; return what :func:`precondition` does.

    One pass over memory where single operations need five: Adam's own step, from zero. Not for
    skew matrices: the kernel rounds the last few numbers differently, and the m x m would not stay
    skew.
    """
    first, second, largest = moments
    moved = torch.zeros_like(first)
    torch._fused_adam_(
        [moved],
        [value],
        [first],
        [second],
        [] if largest is None else [largest],
        [torch.scalar_tensor(step, dtype=torch.float32, device=first.device)],
        lr=-1.0 / float(gain(betas, step, first.dtype)),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0,
        eps=eps,
        amsgrad=largest is not None,
        maximize=False,
    )
    return moved
