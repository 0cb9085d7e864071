"""A convolutional recurrent unit whose hidden images cannot explode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_counts, check_flags, fail
from stiefel_opt.nn._transition import (
    check_transition,
    draw_uniform,
    project_on_load,
    set_transition,
)

# All with |s(x)| <= |x|, as the bound on the hidden images needs.
NONLINEARITIES = {"abs": torch.abs, "relu": torch.relu, "tanh": torch.tanh}


class ConvNERU(nn.Module):
    r"""Convolutional non-exploding recurrent unit: an RNN whose states are images.

    .. math::
        G_t = \sigma(K * G_{t-1} + b + K_{in} * X_t), \qquad
        q \hat K \in \mathrm{St}(q^2 f, f)

    for kernels of side q, f hidden channels and :math:`\hat K` the kernel as a matrix with one row
    for each offset and input channel. With zero padding :math:`|K * G| \le |G|`: without input and
    bias neither the state nor a gradient on its way back can grow.

    Args:
        in_channels, hidden_channels: Channels of an input image and of a hidden one, f.
        kernel_size: Side of both kernels, q, odd. Default: 3.
        nonlinearity: ``"relu"``, ``"tanh"`` or ``"abs"``. Default: ``"relu"``.
        bias: Whether there is a bias, one number for each hidden channel. Default: yes.
        batch_first: Whether sequences come as ``(batch, T, ...)``. Default: no.
        device, dtype: Of the parameters.
        transition: How K is kept: ``"tagged"`` for an optimizer of this package; the name of a
            map of :func:`stiefel_opt.orthogonal` for any optimizer; None: unconstrained.
        generator: Source of the initial K, uniform on the manifold. Default: torch's global one.
            The input kernel is initialised as in ``nn.Conv2d``.
        options: Of the transition.

    Raises:
        ValueError: for unknown names, sizes below 1, an even ``kernel_size``, and input that does
            not fit.
        TypeError: for unknown options, and for ``scale``, which is 1/q.
    Note: Two convolutions a step; the input's are computed for all steps at once. The
        constrained weight is ``hidden_conv.weight``, 1/q times a matrix with orthonormal rows once
        flattened. For q = 1 it is square, of one determinant with ``"tcwy"`` and ``"cwy"``.
    Reference: Likhosherstov et al. (AISTATS 2021), section 3.4 and appendix B.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        kernel_size: int = 3,
        nonlinearity: str = "relu",
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        transition: str | None = "tcwy",
        generator: torch.Generator | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "hidden_channels": hidden_channels}
        check_counts(or_none=False, **sizes, kernel_size=kernel_size)
        if kernel_size % 2 == 0:
            raise ValueError(fail("kernel_size", "be odd", kernel_size))
        check_choice("nonlinearity", nonlinearity, NONLINEARITIES)
        check_transition(transition)
        check_flags(bias=bias, batch_first=batch_first)
        if "scale" in options:
            condition = "not be given: K is 1 / kernel_size times an orthonormal matrix"
            raise TypeError(fail("scale", condition, options["scale"]))
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.kernel_size = kernel_size
        self.nonlinearity = nonlinearity
        self.batch_first = batch_first
        self.transition = transition
        layout: Any = {"padding": kernel_size // 2, "device": device, "dtype": dtype}
        self.input_conv = nn.Conv2d(in_channels, hidden_channels, kernel_size, bias=bias, **layout)
        square = hidden_channels, hidden_channels, kernel_size
        self.hidden_conv = nn.Conv2d(*square, bias=False, **layout)
        weight = self.hidden_conv.weight
        draw_uniform(weight, generator)
        with torch.no_grad():
            weight.div_(kernel_size)
        if transition is not None:
            options["scale"] = 1.0 / kernel_size
        set_transition(self.hidden_conv, "weight", transition, generator=generator, **options)
        project_on_load(self)

    @override
    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return all hidden images and the last one.

        Args:
            input: ``(T, batch, in_channels, height, width)``, ``(batch, T, ...)`` with
                ``batch_first``, or without batch ``(T, in_channels, height, width)``.
            hx: First hidden image, ``(batch, hidden_channels, height, width)`` or without batch.
                Default: zero.

        Returns: Hidden images like ``input`` with ``hidden_channels``, and the last, like ``hx``.
        """
        if input.ndim not in (4, 5) or input.size(-3) != self.in_channels or 0 in input.shape:
            condition = f"have shape (T, batch, {self.in_channels}, height, width), none of them 0"
            raise ValueError(fail("input", condition, input))
        if input.ndim == 4:
            outputs, last = self._rollout(input.unsqueeze(1), None if hx is None else hx[None])
            return outputs.squeeze(1), last.squeeze(0)
        steps = input.transpose(0, 1) if self.batch_first else input
        outputs, last = self._rollout(steps, hx)
        return (outputs.transpose(0, 1) if self.batch_first else outputs), last

    def _rollout(self, steps: Tensor, hx: Tensor | None) -> tuple[Tensor, Tensor]:
        length, batch = steps.shape[:2]
        entering = self.input_conv(steps.flatten(0, 1)).unflatten(0, (length, batch))
        shape = entering.shape[1:]
        if hx is None:
            hx = entering.new_zeros(shape)
        if hx.shape != shape:
            raise ValueError(fail("hx", f"have shape {tuple(shape)}", hx))
        activate = NONLINEARITIES[self.nonlinearity]
        weight, padding = self.hidden_conv.weight, self.kernel_size // 2
        hidden, outputs = hx, []
        for image in entering.unbind():
            turned = nn.functional.conv2d(hidden, weight, padding=padding)
            hidden = activate(turned + image)
            outputs.append(hidden)
        return torch.stack(outputs), hidden

    @override
    def extra_repr(self) -> str:
        return (
            f"nonlinearity={self.nonlinearity!r}, batch_first={self.batch_first}, "
            f"transition={self.transition!r}"
        )
