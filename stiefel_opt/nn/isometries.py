"""Layers that change no distance, or enlarge none: parts of networks with a Lipschitz bound."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_counts, check_flags, check_range, fail
from stiefel_opt.nn._transition import draw_uniform
from stiefel_opt.numerics import is_compiling
from stiefel_opt.tags import constrain

Move = tuple[int, int]  # pixels down and to the right

# The moves of the groups of channels, one after the other; 5: the sides only.
MOVES: Final[dict[int, tuple[Move, ...]]] = {
    5: ((-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)),
    9: tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)),
}


class SpatialShift(nn.Module):
    r"""Moves groups of channels by one pixel, around the edge: an isometry without a weight.

    The channels are divided into as many groups as there are ``neighbours``, of sizes that differ
    by one at most. A 1 x 1 convolution after it, or before it, mixes a pixel with its neighbours.

    Args:
        neighbours: 9: all of them, and the pixel itself; 5: those at its sides. Default: 9.

    Shape: ``(batch, channels, height, width)``, any sizes; the same out.
    Raises:
        ValueError: for other ``neighbours``, and for input of another number of dimensions.
    Note: One copy forward and one backward, none of a product's cost. Channels_last is kept.
    Reference: LipNeXt (ICLR 2026), theorem 1: the only depthwise convolutions of stride 1 that keep
        the 2-norm are moves by whole pixels, up to the sign.
    """

    def __init__(self, neighbours: int = 9) -> None:
        super().__init__()
        if type(neighbours) is not int or neighbours not in MOVES:
            raise ValueError(fail("neighbours", "be 5 or 9", repr(neighbours)))
        self.neighbours = neighbours

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return the moved channels."""
        check_images(input)
        moves = MOVES[self.neighbours]
        if is_compiling():  # the compiler makes one copy of it
            groups = zip(input.tensor_split(len(moves), 1), moves, strict=True)
            return torch.cat([group.roll(move, (2, 3)) for group, move in groups], 1)
        return _moved(input, self.neighbours, 1)

    @override
    def extra_repr(self) -> str:
        return f"neighbours={self.neighbours}"


class _Moved(torch.autograd.Function):
    """The shift in one copy; its derivative is the shift, its adjoint the shift back."""

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(images: Tensor, neighbours: int, sign: int) -> Tensor:
        moves, output = MOVES[neighbours], torch.empty_like(images)
        groups = output.tensor_split(len(moves), 1), images.tensor_split(len(moves), 1)
        for target, source, (down, right) in zip(*groups, moves, strict=True):
            _move_group(target, source, sign * down, sign * right)
        return output

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
        _, ctx.neighbours, ctx.sign = inputs

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _moved(grad, ctx.neighbours, -ctx.sign), None, None

    @staticmethod
    @override
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return _moved(tangent, ctx.neighbours, ctx.sign)


def _moved(images: Tensor, neighbours: int, sign: int) -> Tensor:
    moved: Tensor = _Moved.apply(images, neighbours, sign)  # type: ignore[no-untyped-call]
    return moved


def _move_group(target: Tensor, source: Tensor, down: int, right: int) -> None:
    """Write the moved ``source``: all that stays inside in one piece, then what goes around."""
    height, width = source.shape[2:]
    down, right = (down if height > 1 else 0), (right if width > 1 else 0)
    inner = (height * width, width, 1)
    is_flat = source.stride()[1:] == target.stride()[1:] == inner
    if is_flat:  # a long copy, wrong at the sides only
        places = _pieces(down * width + right)[0]
        target.flatten(1)[:, places[0]] = source.flatten(1)[:, places[1]]
    for number, (rows_to, rows_from) in enumerate(_pieces(down)):
        for place, (columns_to, columns_from) in enumerate(_pieces(right)):
            if not is_flat or number or place:
                target[:, :, rows_to, columns_to] = source[:, :, rows_from, columns_from]


def _pieces(move: int) -> list[tuple[slice, slice]]:
    """Return where the pieces of a row of pixels go, and whence; first what stays inside."""
    if move == 0:
        return [(slice(None), slice(None))]
    if move > 0:
        inner, around = (slice(move, None), slice(0, -move)), (slice(0, move), slice(-move, None))
    else:
        inner, around = (slice(0, move), slice(-move, None)), (slice(move, None), slice(0, -move))
    return [inner, around]


class ShiftConv2d(nn.Module):
    r"""A shift by one pixel, then an orthonormal 1 x 1 convolution: reach of 3 x 3, cost of 1 x 1.

    With as many outputs as inputs it keeps every distance; with more, too; with fewer it enlarges
    none. Train it with an optimizer of this package.

    Args:
        in_channels, out_channels: As in ``nn.Conv2d``.
        neighbours: Of :class:`SpatialShift`. Default: 9.
        bias: Whether there is a bias, 0 at first. Default: yes.
        device, dtype: Of the parameters.
        generator: Source of the initial weight, uniform on the manifold. Default: torch's global
            one.

    Shape: ``(batch, in_channels, height, width)`` to ``(batch, out_channels, height, width)``.
    Raises:
        ValueError: for sizes below 1, and other ``neighbours``.
    Note: ``conv`` is a plain ``nn.Conv2d`` whose weight is tagged; the state_dict holds its weight
        and bias.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        neighbours: int = 9,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, out_channels=out_channels)
        check_flags(bias=bias)
        self.shift = SpatialShift(neighbours)
        layout: Any = {"bias": bias, "device": device, "dtype": dtype}
        self.conv = nn.Conv2d(in_channels, out_channels, 1, **layout)
        draw_uniform(self.conv.weight, generator)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)
        constrain(self.conv)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return the moved channels, mixed."""
        mixed: Tensor = self.conv(self.shift(input))
        return mixed


class MaxMin(nn.Module):
    r"""Maximum and minimum of pairs of channels: (u, v) to (max(u, v), min(u, v)), an isometry
    almost everywhere.

    Args:
        dim: Of the channels, which are paired half by half. Default: 1.

    Raises:
        ValueError: for input with an odd number of channels.
    Reference: Anil, Lucas & Grosse (ICML 2019): GroupSort of groups of two.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return the sorted pairs."""
        if input.size(self.dim) % 2:
            condition = f"have an even number of channels (dimension {self.dim})"
            raise ValueError(fail("input", condition, input))
        first, second = input.chunk(2, self.dim)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], self.dim)

    @override
    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class BetaAbs(nn.Module):
    r"""Absolute value of the first channels; the others pass: an isometry almost everywhere.

    With half of the channels, between orthonormal matrices, it can be :class:`MaxMin`, as
    (max + min, max - min) = (u + v, \|u - v\|), without sorting.

    Args:
        share: How many of the channels, from 0 to 1, rounded down. Default: 0.5.
        dim: Of the channels. Default: 1.

    Raises:
        ValueError: for a share outside [0, 1].
    Reference: LipNeXt (ICLR 2026).
    """

    def __init__(self, share: float = 0.5, dim: int = 1) -> None:
        super().__init__()
        check_range("share", share, 0.0, math.nextafter(1.0, 2.0))
        self.share = share
        self.dim = dim

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return absolute values and channels as they are."""
        size = input.size(self.dim)
        count = int(self.share * size)
        first, rest = torch.split(input, [count, size - count], self.dim)
        return torch.cat([first.abs(), rest], self.dim)

    @override
    def extra_repr(self) -> str:
        return f"share={self.share}, dim={self.dim}"


class L2Pool2d(nn.Module):
    """Root of the sum of squares over all pixels, for each channel: it enlarges no distance.

    Shape: ``(batch, channels, height, width)`` to ``(batch, channels)``.
    Raises:
        ValueError: for input of another number of dimensions.
    Note: The gradient where all pixels are zero is zero.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Return the norm of each channel."""
        check_images(input)
        norms: Tensor = torch.linalg.vector_norm(input, dim=(2, 3))
        return norms


class NormalizedLinear(nn.Linear):
    """``nn.Linear`` whose rows are unit vectors, each stepped on its own sphere.

    For the last layer: each class is 1-Lipschitz, and :func:`stiefel_opt.certified_radius` takes
    the distance of each pair of rows. Train it with an optimizer of this package.

    Args:
        in_features: As in ``nn.Linear``.
        out_features: Classes.
        bias: Whether there is a bias, 0 at first. Default: yes.
        device, dtype: Of the parameters.
        generator: Source of the initial rows, uniform on the sphere. Default: torch's global one.

    Raises:
        ValueError: for sizes below 1.
    Note: A plain ``nn.Linear`` after ``so.constrain(layer, heads=out_features)``, no more; its rows
        need not be orthogonal to one another.
    Reference: last layer normalization: Singla, Singla & Feizi (ICLR 2022).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        check_counts(in_features=in_features, out_features=out_features)
        check_flags(bias=bias)
        super().__init__(in_features, out_features, bias, device, dtype)
        with torch.no_grad():
            self.weight.normal_(generator=generator)
            if self.bias is not None:
                self.bias.zero_()
        constrain(self, heads=out_features)


class MarginCrossEntropy(nn.Module):
    r"""Cross-entropy that asks for a margin, for networks whose logits cannot grow.

    .. math::
        T \cdot \mathrm{CE}\big((z - o\, e_y) / T,\; y\big)

    The offset o is what the right class must be ahead before it counts as right; a low
    temperature T cares little for margins above it.

    Args:
        offset: o >= 0. Default: that of a radius of 36/255, :math:`2 \sqrt 2 \cdot 36 / 255`.
        temperature: T > 0. Default: 1/4.
        reduction: As in ``nn.CrossEntropyLoss``. Default: "mean".

    Shape: logits ``(batch, classes)``, labels ``(batch,)`` of integers.
    Raises:
        ValueError: for an offset below 0, a temperature that is not positive, an unknown reduction.
    Reference: Prach & Lampert (ECCV 2022); defaults of their comparison (CVPR 2024).
    """

    def __init__(
        self,
        offset: float = 2.0 * math.sqrt(2.0) * 36.0 / 255.0,
        temperature: float = 0.25,
        reduction: str = "mean",
    ) -> None:
        super().__init__()
        check_range("offset", offset, 0.0)
        check_range("temperature", temperature, 0.0, open_low=True)
        check_choice("reduction", reduction, ("mean", "sum", "none"))
        self.offset = offset
        self.temperature = temperature
        self.reduction = reduction

    @override
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        ahead = self.offset * nn.functional.one_hot(labels, logits.size(-1))
        shifted = (logits - ahead) / self.temperature
        loss = nn.functional.cross_entropy(shifted, labels, reduction=self.reduction)
        return self.temperature * loss

    @override
    def extra_repr(self) -> str:
        return f"offset={self.offset:.4g}, temperature={self.temperature:g}"


def check_images(images: Tensor) -> None:
    """Raise unless the input is a batch of images."""
    if images.ndim != 4:
        condition = "have shape (batch, channels, height, width)"
        raise ValueError(fail("input", condition, images))
