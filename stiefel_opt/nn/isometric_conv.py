"""A convolution that is an orthonormal matrix on images, for any odd kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import Self, override

from stiefel_opt.errors import check_choice, check_counts, check_flags, fail
from stiefel_opt.nn._transition import draw_uniform
from stiefel_opt.nn.isometries import check_images
from stiefel_opt.numerics import is_compiling, no_autocast, widened
from stiefel_opt.tags import constrain

NAMES: Final = ("factors", "first", "last")
PADDINGS: Final = ("circular", "zeros")


class IsometricConv2d(nn.Module):
    r"""A k x k convolution all of whose singular values, as a map of images, are 1.

    A product of orthonormal matrices and steps by one pixel, for k = 3 without stride

    .. math::
        K = \Big(\prod_i V_i V_i^\top + z_i\, (I - V_i V_i^\top)\Big)\, Q,
        \qquad V_i \in \mathrm{St}(c, \lfloor c / 2 \rfloor),

    where :math:`z_i` moves an image by one pixel, to the right or down: k - 1 factors for each
    direction. With a stride s the kernel of side k - s + 1 is followed by an orthonormal matrix on
    blocks of s x s pixels. It keeps distances if no dimension is lost, that is, if
    ``out_channels >= in_channels * stride**2``; else its adjoint does, and it enlarges none.

    Args:
        in_channels, out_channels: As in ``nn.Conv2d``.
        kernel_size: Side of the kernel, k, odd. Default: 3.
        stride: s, at most k. Default: 1.
        padding_mode: ``"circular"``, for which the above holds; ``"zeros"``: all singular values
            are at most 1. There are (k - 1) / 2 pixels of padding at each side. Default:
            ``"circular"``.
        groups: As in ``nn.Conv2d``. Default: 1.
        bias: Whether there is a bias, 0 at first. Default: yes.
        device, dtype: Of the parameters.
        generator: Source of the initial factors, uniform. Default: torch's global one.

    Shape: ``(batch, in_channels, height, width)`` to
        ``(batch, out_channels, height / s, width / s)``, rounded up with zeros.
    Raises:
        ValueError: for an even ``kernel_size``, a larger stride, sizes below 1 or that ``groups``
            does not divide, and for images whose sides are no multiples of the stride with
            ``"circular"``.
    Note: The tagged parameters are ``factors``, and ``first``, ``last`` or both: train them with an
        optimizer of this package. In training the kernel is computed in each forward pass, at the
        cost of (3 k^2 - 1) / 2 images of one pixel for each channel; in evaluation without
        gradients once, until a parameter changes.
    Reference: Li et al. (NeurIPS 2019, BCOP); with strides and groups Boissin et al. (2025, AOC);
        one direction: Vaidyanathan, Multirate Systems and Filter Banks (1993), section 14.
    """

    factors: nn.Parameter | None
    first: nn.Parameter | None
    last: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        padding_mode: str = "circular",
        groups: int = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels, groups=groups)
        check_counts(kernel_size=kernel_size, stride=stride)
        if kernel_size % 2 == 0:
            raise ValueError(fail("kernel_size", "be odd", kernel_size))
        if stride > kernel_size:
            remedy = "pixels between the kernels would be lost"
            raise ValueError(fail("stride", f"be at most {kernel_size}", stride, remedy))
        if in_channels % groups or out_channels % groups:
            given = f"{groups} of {in_channels} and {out_channels}"
            raise ValueError(fail("groups", "divide in_channels and out_channels", given))
        check_choice("padding_mode", padding_mode, PADDINGS)
        check_flags(bias=bias)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = kernel_size, stride
        self.padding_mode, self.groups = padding_mode, groups
        entering, leaving = in_channels // groups, out_channels // groups
        inner = max(entering, leaving // stride**2)
        has_last = stride > 1 or leaving < inner
        shapes = {
            "factors": (groups, 2 * (kernel_size - stride), inner, inner // 2),
            # A square matrix beside the factors would be a turn of them: one of the two is enough.
            "first": (groups, inner, entering if inner > entering or not has_last else 0),
            "last": (groups, leaving, inner * stride**2 if has_last else 0),
        }
        for name, shape in shapes.items():
            value = None
            if math.prod(shape):
                value = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                draw_uniform(value, generator, as_rows=False)
            self.register_parameter(name, value)
        names = [name for name, shape in shapes.items() if math.prod(shape)]
        zeros = torch.zeros(out_channels, device=device, dtype=dtype) if bias else None
        self.bias = None if zeros is None else nn.Parameter(zeros)
        constrain(self, names, flatten=False)
        self._cached: tuple[tuple[Any, ...], Tensor] | None = None

    def kernel(self) -> Tensor:
        """Return the kernel, ``(out_channels, in_channels / groups, k, k)``, as of ``nn.Conv2d``.

        It is part of the graph of gradients, if these are enabled.
        """
        weights = self.weights()
        (some, *_) = weights.values()
        wide = {name: widened(weight) for name, weight in weights.items()}
        with no_autocast(some):
            return self.composed(wide).to(some.dtype)

    def composed(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the kernel of other values of :meth:`weights`, in their precision."""
        entering = self.in_channels // self.groups
        sizes = self.kernel_size - self.stride + 1, entering, self.stride
        (factors, first, last) = map(weights.get, NAMES)
        return compose_kernel(factors, first, last, sizes=sizes)

    def weights(self) -> dict[str, Tensor]:
        """Return the tagged parameters by name: "factors", "first", "last", as far as needed."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: weight for name, weight in named.items() if weight is not None}

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return the images of the convolution."""
        check_images(input)
        pad = self.kernel_size // 2
        if self.padding_mode == "circular":
            smallest = max(pad, 1)
            if min(input.shape[2:]) < smallest or any(n % self.stride for n in input.shape[2:]):
                condition = f"have sides of at least {smallest} that {self.stride} divides"
                remedy = 'choose another size, or padding_mode="zeros"'
                raise ValueError(fail("input", condition, input, remedy))
        kernel = self._present_kernel()
        options: Any = {"stride": self.stride, "groups": self.groups}
        if self.padding_mode == "circular" and pad:
            return nn.functional.conv2d(_wrapped(input, pad), kernel, self.bias, **options)
        return nn.functional.conv2d(input, kernel, self.bias, padding=pad, **options)

    def _present_kernel(self) -> Tensor:
        """Return the kernel; in evaluation without gradients the one of the call before."""
        weights = list(self.weights().values())
        is_plain = not (self.training or torch.is_grad_enabled() or is_compiling())
        if not is_plain or any(w.is_inference() for w in weights):
            return self.kernel()
        # The parameters themselves: while they are held, no other tensor has their memory.
        state = [(w, w._version, w.data_ptr(), w.dtype) for w in weights]
        if self._cached is not None:
            known, kernel = self._cached
            pairs = zip(known, state, strict=True)
            if all(old[0] is new[0] and old[1:] == new[1:] for old, new in pairs):
                return kernel
        kernel = self.kernel()
        self._cached = tuple(state), kernel
        return kernel

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the mode; the kernel is computed anew."""
        self._cached = None
        return super().train(mode)

    @override
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__, _cached=None)

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding_mode={self.padding_mode!r}, groups={self.groups}"
        )


def compose_kernel(
    factors: Tensor | None,
    first: Tensor | None,
    last: Tensor | None,
    *,
    sizes: tuple[int, int, int],
) -> Tensor:
    """Return the kernel of side q + s - 1, ``(g out, in, k, k)``, of ``sizes`` (q, in, s).

    ``factors (g, 2 (q - 1), c, r)``, ``first (g, c, in)``, ``last (g, out, c s^2)``; None: the
    identity.
    """
    side, entering, stride = sizes
    some = next(weight for weight in (first, last, factors) if weight is not None)
    if first is None:
        first = torch.eye(entering, dtype=some.dtype, device=some.device)
        first = first.expand(some.size(0), -1, -1)
    kernel = first[..., None, None]  # (g, c, in, down, right)
    if factors is None:
        kernel = nn.functional.pad(kernel, ((side - 1) // 2, side // 2) * 2)
    else:
        for index, factor in enumerate(factors.unbind(1)):
            kept = (factor @ (factor.mT @ kernel.flatten(2))).view_as(kernel)
            still, ahead = ((0, 1), (1, 0)) if index % 2 else ((0, 0, 0, 1), (0, 0, 1, 0))
            moved = nn.functional.pad(kernel - kept, ahead)
            kernel = nn.functional.pad(kept, still) + moved
    if last is None:
        return kernel.flatten(0, 1)
    groups, leaving, _ = last.shape
    blocks = last.view(groups, leaving, -1, stride, stride).transpose(1, 2).flatten(0, 1)
    turned = kernel.flatten(0, 1).transpose(0, 1)  # (in, g c, q, q)
    return nn.functional.conv_transpose2d(turned, blocks, groups=groups).transpose(0, 1)


def _wrapped(images: Tensor, pad: int) -> Tensor:
    """Return the images with ``pad`` pixels from the other side around them."""
    if is_compiling():  # the compiler makes one copy of it
        return nn.functional.pad(images, (pad,) * 4, "circular")
    wrapped: Tensor = _Wrapped.apply(images, pad)  # type: ignore[no-untyped-call]
    return wrapped


class _Wrapped(torch.autograd.Function):
    """As ``pad(mode="circular")``, whose backward pass fills a padded image for each slice."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(images: Tensor, pad: int) -> Tensor:
        shape = (*images.shape[:2], *(size + 2 * pad for size in images.shape[2:]))
        output = images.new_empty(shape)
        output[:, :, pad:-pad, pad:-pad] = images
        output[:, :, pad:-pad, :pad] = images[..., -pad:]
        output[:, :, pad:-pad, -pad:] = images[..., :pad]
        output[:, :, :pad] = output[:, :, -2 * pad : -pad]
        output[:, :, -pad:] = output[:, :, pad : 2 * pad]
        return output

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
        _, ctx.pad = inputs

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _unwrapped(grad, ctx.pad), None

    @staticmethod
    @override
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _wrapped(tangent, ctx.pad)


def _unwrapped(grad: Tensor, pad: int) -> Tensor:
    """Return the adjoint of the padding: what was copied is added up."""
    rows = grad[:, :, pad:-pad].clone()
    rows[:, :, :pad] += grad[:, :, -pad:]
    rows[:, :, -pad:] += grad[:, :, :pad]
    inner = rows[..., pad:-pad].clone(memory_format=torch.preserve_format)
    inner[..., :pad] += rows[..., -pad:]
    inner[..., -pad:] += rows[..., :pad]
    return inner
