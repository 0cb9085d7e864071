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
        return _by_autograd(inputs, start, left, right, nonlinearity, threshold)
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


def _activate_(z: Tensor, nonlinearity: str, threshold: Tensor | None) -> Tensor:
    """Apply the nonlinearity in place."""
    if nonlinearity == "tanh":
        return z.tanh_()
    if nonlinearity == "relu":
        return z.relu_()
    if nonlinearity == "abs":
        return z.abs_()
    size = z.abs() if threshold is None else z.abs().add_(threshold)
    return z.sign_().mul_(size.relu_())


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
        outputs = torch.empty_like(inputs, memory_format=torch.contiguous_format)
        signs = torch.empty_like(outputs, dtype=torch.int8) if nonlinearity == "abs" else None
        inner = None if right is None else inputs.new_empty(*inputs.shape[:2], right.size(0))
        hidden, across = start, left.mT
        for step, (entering, z) in enumerate(zip(inputs.unbind(), outputs.unbind(), strict=True)):
            if right is None or inner is None:
                torch.addmm(entering, hidden, across, out=z)
            else:
                product = torch.mm(hidden, left, out=inner[step])
                torch.add(entering, hidden, out=z).addmm_(product, right, alpha=-1.0)
            if signs is not None:
                signs[step].copy_(z.sign())
            hidden = _activate_(z, nonlinearity, threshold)
        ctx.nonlinearity = nonlinearity
        ctx.save_for_backward(start, left, right, outputs, inner, signs)
        return outputs

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start, left, right, outputs, inner, signs = ctx.saved_tensors
        (grad,) = grads
        wants = ctx.needs_input_grad
        slope = _slope(outputs, signs, ctx.nonlinearity)
        if torch.is_grad_enabled():  # a graph of the backward: the same steps, not in place
            deltas, backs, first = _backward_for_graph(grad, slope, left, right)
        else:
            deltas, backs, first = _backward(grad, slope, left, right)
        grad_left = grad_right = grad_threshold = None
        steps, before = deltas.flatten(0, 1), outputs[:-1].flatten(0, 1)
        if right is None:
            if wants[2]:
                grad_left = deltas[0].mT @ start + deltas[1:].flatten(0, 1).mT @ before
        else:
            if wants[2]:
                grad_left = -(start.mT @ backs[0] + before.mT @ backs[1:].flatten(0, 1))
            if wants[3] and torch.is_grad_enabled():
                inner = torch.cat([(start @ left)[None], outputs[:-1] @ left])
            if wants[3]:
                grad_right = -(inner.flatten(0, 1).mT @ steps)
        if wants[4]:
            grad_threshold = (steps * outputs.sign().flatten(0, 1)).sum(0)
        return deltas, first if wants[1] else None, grad_left, grad_right, grad_threshold, None


def _backward(
    grad: Tensor, slope: Tensor, left: Tensor, right: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dL/dz of all steps, written over ``slope``, times C', and dL/dh of the start."""
    backs = slope if right is None else slope.new_empty(*slope.shape[:2], right.size(0))
    grads, deltas, inner = grad.unbind(), slope.unbind(), backs.unbind()
    arriving = grads[-1]
    for step in range(len(grads) - 1, -1, -1):
        delta = deltas[step].mul_(arriving)
        if right is None:
            arriving = torch.addmm(grads[step - 1], delta, left) if step else delta @ left
        else:
            back = torch.mm(delta, right.mT, out=inner[step])
            arriving = torch.add(grads[step - 1], delta) if step else delta.clone()
            arriving.addmm_(back, left.mT, alpha=-1.0)
    return slope, backs, arriving


def _backward_for_graph(
    grad: Tensor, slope: Tensor, left: Tensor, right: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`_backward` returns by operations that autograd can follow."""
    deltas, backs = [], []
    arriving = torch.zeros_like(grad[0])
    for outer, bend in zip(reversed(grad.unbind()), reversed(slope.unbind()), strict=True):
        deltas.append((outer + arriving) * bend)
        backs.append(deltas[-1] if right is None else deltas[-1] @ right.mT)
        arriving = deltas[-1] @ left if right is None else deltas[-1] - backs[-1] @ left.mT
    return torch.stack(deltas[::-1]), torch.stack(backs[::-1]), arriving


def _by_autograd(
    inputs: Tensor,
    start: Tensor,
    left: Tensor,
    right: Tensor | None,
    nonlinearity: str,
    threshold: Tensor | None,
) -> Tensor:
    """The loop in plain operations: for complex tensors, and for what traces or transforms."""
    hidden, outputs = start, []
    for entering in inputs.unbind():
        turned = hidden @ left.mT if right is None else hidden - (hidden @ left) @ right
        z = entering + turned
        if nonlinearity == "tanh":
            hidden = z.tanh()
        elif nonlinearity == "relu":
            hidden = z.relu()
        elif nonlinearity == "abs":
            hidden = z.abs()
        else:
            size = z.abs() if threshold is None else z.abs() + threshold
            hidden = z.sgn() * size.relu()
        outputs.append(hidden)
    return torch.stack(outputs)
