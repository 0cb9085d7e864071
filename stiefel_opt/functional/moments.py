"""Adam's moments of f and g, elementwise: updated, corrected for their start at zero, divided.

Operation by operation, or by torch's fused kernel, which passes over memory once.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.functional.flows import Scalar
from stiefel_opt.linalg import absolute_square, reads

__all__ = [
    "Moments",
    "bias_correction",
    "fused_moments_",
    "gain",
    "may_fuse",
    "precondition",
    "second_moment_",
]

# Below it eps may round to 0 in float32, and 0/0, on the diagonal of p, would be NaN.
_LEAST_EPS: Final = 1e-30

# New value, first moment, second moment, and the running maximum of that or None.
Moments = tuple[Tensor, Tensor, Tensor, Tensor | None]


def bias_correction(beta: float, step: Scalar, dtype: torch.dtype) -> Scalar:
    """Return 1 - beta^step, without the cancellation that a step in float32 would suffer."""
    if isinstance(step, Tensor):
        return -torch.expm1(step.to(dtype) * (math.log(beta) if beta > 0 else -math.inf))
    return 1.0 - float(beta**step)


def second_moment_(square: Tensor, largest: Tensor | None, value: Tensor, beta2: float) -> Tensor:
    """square <- b2 square + (1 - b2) |value|^2; return what divides: it, or its running maximum."""
    if value.is_complex():
        square.mul_(beta2).add_(absolute_square(value), alpha=1 - beta2)
    else:
        square.mul_(beta2).addcmul_(value, value, value=1 - beta2)
    return square if largest is None else largest.copy_(torch.maximum(largest, square))


def precondition(
    first: Tensor,
    second: Tensor,
    step: Scalar,
    betas: tuple[float, float],
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return D with gamma D = (first/c1) / (sqrt(second/c2) + eps), ci = 1 - bi^step.

    0/0 counts as 0. The factor gamma of :func:`gain` is left to the learning rate.
    """
    if first.is_complex() or torch.compiler.is_compiling():
        # The denominator is real; a compiler places results itself.
        denominator, result = torch.sqrt(second), None
    else:
        denominator = result = torch.sqrt(second, out=out)
    denominator.add_(bias_correction(betas[1], step, second.dtype) ** 0.5 * eps)
    if eps < _LEAST_EPS:
        denominator.masked_fill_(denominator == 0, 1.0)
    return torch.div(first, denominator, out=result)


def gain(betas: tuple[float, float], step: Scalar, dtype: torch.dtype) -> Scalar:
    """Return gamma = sqrt(c2) / c1."""
    first, second = (bias_correction(beta, step, dtype) for beta in betas)
    return second**0.5 / first


def may_fuse(moments: Moments, eps: float) -> bool:
    """Say whether torch's fused Adam may work out the moments: in eager mode on a CPU, for real
    tensors that have their numbers in one order in memory, without gaps."""
    value, *others = (tensor for tensor in moments if tensor is not None)
    return (
        reads(value)
        and value.is_floating_point()
        and eps >= _LEAST_EPS
        and (value.is_contiguous() or value.mT.is_contiguous())
        and all(other.stride() == value.stride() for other in others)
    )


def fused_moments_(moments: Moments, step: float, betas: tuple[float, float], eps: float) -> Tensor:
    """Update first and second moment; return what :func:`precondition` does.

    One pass over memory where single operations need five: Adam's own step, from zero. Not for
    skew matrices: the kernel rounds the last few numbers differently, and the m x m would not stay
    skew.
    """
    value, first, second, largest = moments
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
