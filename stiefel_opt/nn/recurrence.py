r"""All steps of a simple recurrent network, h <- activation(x + h Q'), and a backward by hand.

The backward keeps one tensor beside the outputs and forms the gradient of the weight once, as one
product over all steps, where autograd would add up a weight-sized product at each step.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import check_choice, fail
from stiefel_opt.numerics import is_followed

COMPLEX_NONLINEARITIES: Final = ("modrelu", "tanh")
NONLINEARITIES: Final = ("abs", "modrelu", "relu", "tanh")


def rollout(
    inputs: Tensor,
    start: Tensor,
    transition: Tensor | tuple[Tensor, Tensor],
    *,
    nonlinearity: str = "tanh",
    threshold: Tensor | None = None,
) -> Tensor:
    r"""Return all hidden states :math:`h_t = \sigma(x_t + h_{t-1} Q^\top)`, one row each sequence.

    Args:
        inputs: x, ``(T, batch, N)`` with T > 0: what enters each step, bias included.
        start: Hidden state before the first step, ``(batch, N)``.
        transition: Q, ``(N, N)``; or factors ``(A, C)`` of shapes ``(N, L)`` and ``(L, N)`` with
            Q' = I - A C, which are multiplied one after the other.
        nonlinearity: ``"tanh"``, ``"relu"``, ``"abs"`` or ``"modrelu"``, sign(z) relu(|z| + b).
        threshold: b of modrelu, ``(N,)``. Default: zero.

    Raises:
        ValueError: for an unknown nonlinearity, or shapes that do not fit.
        TypeError: for tensors of several dtypes.
    Note: 2 batch N^2 flops a step, or 4 batch N L by factors; the backward twice that. Asking for a
        graph of the backward works and takes autograd's time, as do ``torch.compile``, export,
        ``torch.func`` and forward-mode differentiation. Complex tensors use autograd and take tanh
        and modrelu, z / |z| relu(|z| + b).
    Reference: modrelu: Arjovsky, Shah & Bengio (ICML 2016), eq. (8); factors: Likhosherstov et al.
        (AISTATS 2021), section 3.1.
    """
    choices = COMPLEX_NONLINEARITIES if inputs.is_complex() else NONLINEARITIES
    check_choice("nonlinearity", nonlinearity, choices)
    if inputs.ndim != 3 or len(inputs) == 0:
        condition = "have shape (T, batch, N) with T > 0"
        raise ValueError(fail("inputs", condition, inputs))
    left, right = transition if isinstance(transition, tuple) else (transition, None)
    _check(inputs, start, left, right, threshold)
    if inputs.is_complex() or is_followed():
        return _outputs(inputs, start, left, right, nonlinearity, threshold)
    outputs: Tensor = _Rollout.apply(inputs, start, left, right, threshold, nonlinearity)  # type: ignore[no-untyped-call]
    return outputs


def _check(
    inputs: Tensor, start: Tensor, left: Tensor, right: Tensor | None, threshold: Tensor | None
) -> None:
    """Raise unless shapes and dtypes fit those of ``inputs``."""
    size, dtype = inputs.size(-1), inputs.dtype
    inner = size if right is None or left.ndim != 2 else left.size(-1)
    for name, tensor, shape, wanted in (
        ("start", start, tuple(inputs.shape[1:]), dtype),
        ("transition", left, (size, inner), dtype),
        ("transition", right, (inner, size), dtype),
        ("threshold", threshold, (size,), inputs.real.dtype),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            condition = f"have shape {shape} for inputs of shape {tuple(inputs.shape)}"
            raise ValueError(fail(name, condition, tensor))
        if tensor.dtype != wanted:
            condition = f"have dtype {wanted} for inputs of {dtype}"
            raise TypeError(fail(name, condition, tensor.dtype, "convert it"))


def _activated(z: Tensor, nonlinearity: str, threshold: Tensor | None) -> Tensor:
    if nonlinearity == "tanh":
        return z.tanh()
    if nonlinearity == "relu":
        return z.relu()
    if nonlinearity == "abs":
        return z.abs()
    size = z.abs() if threshold is None else z.abs() + threshold
    return z.sgn() * size.relu()


def _slope(outputs: Tensor, signs: Tensor | None, nonlinearity: str) -> Tensor:
    """Return the derivative of the nonlinearity, from its results where they determine it."""
    if nonlinearity == "tanh":
        return 1.0 - outputs * outputs
    if nonlinearity == "relu":
        return (outputs > 0).to(outputs.dtype)
    if nonlinearity == "modrelu":
        return (outputs != 0).to(outputs.dtype)
    return outputs.sign() if signs is None else signs.to(outputs.dtype)


class _Rollout(torch.autograd.Function):
    """Loop over steps with few operations in each, and its backward."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        inputs: Tensor,
        start: Tensor,
        left: Tensor,
        right: Tensor | None,
        threshold: Tensor | None,
        nonlinearity: str,
    ) -> Tensor:
        signs = torch.empty_like(inputs, dtype=torch.int8) if nonlinearity == "abs" else None
        outputs = _outputs(inputs, start, left, right, nonlinearity, threshold, signs)
        ctx.nonlinearity = nonlinearity
        ctx.save_for_backward(start, left, right, outputs, signs)
        return outputs

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start, left, right, outputs, signs = ctx.saved_tensors
        (grad,) = grads
        wants = ctx.needs_input_grad
        slope = _slope(outputs, signs, ctx.nonlinearity)
        deltas, backs, first = _backward(grad, slope, left, right)
        grad_left = grad_right = grad_threshold = None
        steps, before = deltas.flatten(0, 1), torch.cat([start[None], outputs[:-1]]).flatten(0, 1)
        if wants[2] and right is None:
            grad_left = steps.mT @ before
        elif wants[2]:
            grad_left = -(before.mT @ backs.flatten(0, 1))
        if wants[3]:
            grad_right = -((before @ left).mT @ steps)
        if wants[4]:
            grad_threshold = (steps * outputs.sign().flatten(0, 1)).sum(0)
        return deltas, first if wants[1] else None, grad_left, grad_right, grad_threshold, None


def _backward(
    grad: Tensor, slope: Tensor, left: Tensor, right: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dz of all steps, the same times C', and dL/dh of the start."""
    deltas, backs = [], []
    before = [torch.zeros_like(grad[0]), *grad[:-1].unbind()]
    arriving = grad[-1]
    for outer, bend in zip(reversed(before), reversed(slope.unbind()), strict=True):
        deltas.append(arriving * bend)
        if right is None:
            arriving = torch.addmm(outer, deltas[-1], left)
        else:
            backs.append(deltas[-1] @ right.mT)
            arriving = torch.addmm(outer + deltas[-1], backs[-1], left.mT, alpha=-1.0)
    steps = torch.stack(deltas[::-1])
    return steps, steps if right is None else torch.stack(backs[::-1]), arriving


def _outputs(
    inputs: Tensor,
    start: Tensor,
    left: Tensor,
    right: Tensor | None,
    nonlinearity: str,
    threshold: Tensor | None,
    signs: Tensor | None = None,
) -> Tensor:
    """Return all hidden states; write the signs of what the nonlinearity takes into ``signs``."""
    hidden, outputs, across = start, [], left.mT
    for step, entering in enumerate(inputs.unbind()):
        if right is None:
            z = torch.addmm(entering, hidden, across)
        else:
            z = torch.addmm(entering + hidden, hidden @ left, right, alpha=-1.0)
        if signs is not None:
            signs[step].copy_(z.sign())
        hidden = _activated(z, nonlinearity, threshold)
        outputs.append(hidden)
    return torch.stack(outputs)
