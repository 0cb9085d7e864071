"""Small modules drawn at random, and the largest singular value of their Jacobian."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.SELU, nn.CELU),
    *(nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink, nn.Hardtanh, nn.ReLU6),
    *(nn.Hardsigmoid, nn.Hardswish, nn.Softshrink, nn.Identity),
    lambda: nn.GELU(approximate="tanh"),
    lambda: nn.LeakyReLU(1.7),
    lambda: nn.ELU(2.0),
    lambda: nn.PReLU(init=-1.3),
    lambda: nn.Dropout(0.5),
    lambda: so.nn.BetaAbs(0.6),
]


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Both(nn.Module):
    """f(x) beside -g(x), with a constant gain."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([0.7 * self.first(x), -self.second(x)], dim=1).flatten(1)


class Branches(nn.Module):
    """Half the channels through f, the larger of both, minus a constant."""

    def __init__(self, inner: nn.Module, channels: int) -> None:
        super().__init__()
        self.inner = inner
        self.shift = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.maximum(torch.tanh(self.inner(x)), x / 2.0) - self.shift


def convolution(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    groups = rng.choice([1, 1, 2]) if channels % 2 == 0 else 1
    leaving = groups * rng.randint(1, 3)
    kernel = rng.randint(1, 3)
    mode = rng.choice(["zeros", "zeros", "circular", "reflect", "replicate"])
    options: dict[str, Any] = {"stride": rng.randint(1, 3), "dilation": rng.randint(1, 2)}
    layer = nn.Conv2d(
        channels,
        leaving,
        kernel,
        padding=rng.randint(0, 2),
        groups=groups,
        padding_mode=mode,
        **options,
    )
    if rng.random() < 0.3:
        so.constrain(layer, scale=rng.choice([1.0, 1 / kernel]))
    return layer, leaving


def same(rng: random.Random, channels: int) -> nn.Module:
    """A layer that keeps the shape of images of 6 x 6."""
    kind = rng.randrange(5)
    if kind == 0:
        mode = rng.choice(["zeros", "circular", "reflect"])
        return nn.Conv2d(channels, channels, 3, padding="same", padding_mode=mode)
    if kind == 1:
        return so.nn.ShiftConv2d(channels, channels, rng.choice([5, 9]))
    if kind == 2:
        mode = rng.choice(["circular", "zeros"])
        return so.nn.IsometricConv2d(channels, channels, rng.choice([1, 3, 5]), padding_mode=mode)
    if kind == 3:
        norm = nn.BatchNorm2d(channels)
        nn.init.normal_(norm.weight)
        nn.init.uniform_(norm.running_var, 0.3, 2.0)  # type: ignore[arg-type]
        return norm
    return rng.choice(ACTIVATIONS)()


def changing(rng: random.Random, channels: int) -> tuple[nn.Module, int]:
    """A layer that changes the shape of images, and how many channels come out."""
    kind = rng.randrange(6)
    if kind == 0:
        return nn.PixelUnshuffle(2), 4 * channels
    if kind == 1:
        return nn.MaxPool2d(rng.randint(1, 3), rng.randint(1, 3)), channels
    if kind == 2:
        pad = rng.choice([{}, {"padding": 1}, {"padding": 1, "count_include_pad": False}])
        ceil = rng.choice([True, False])
        return nn.AvgPool2d(rng.randint(2, 3), rng.randint(1, 3), ceil_mode=ceil, **pad), channels
    if kind == 3:
        options = {"stride": rng.randint(1, 2), "padding": rng.randint(0, 1)}
        return nn.ConvTranspose2d(channels, 2, rng.randint(2, 3), **options), 2
    if kind == 4:
        return so.nn.IsometricConv2d(channels, 4, 3, rng.choice([1, 2]), "zeros"), 4
    return convolution(rng, channels)


def drawn(seed: int) -> tuple[nn.Module, tuple[int, ...]]:
    """A module in evaluation mode, in float64, and the size of its input."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    channels = rng.randint(1, 3)
    size = (channels, 6, 6)
    layers: list[nn.Module] = []
    for _ in range(rng.randint(1, 2)):
        shape = rng.randrange(4)
        inner = nn.Sequential(same(rng, channels), rng.choice(ACTIVATIONS)())
        if shape == 0:
            layers.append(inner)
        elif shape == 1:
            layers.append(Residual(inner))
        else:
            layers.append(Branches(inner, channels))
    kind = rng.randrange(4)
    if kind == 0:
        layers.append(Both(same(rng, channels), same(rng, channels)))
    else:
        layer, channels = changing(rng, channels)
        layers += [layer, rng.choice(ACTIVATIONS)()]
        layers.append(so.nn.L2Pool2d() if kind == 1 else nn.Flatten())
    return nn.Sequential(*layers).double().eval(), size


def steepest(model: nn.Module, size: tuple[int, ...], points: int = 2) -> float:
    """The largest singular value of the Jacobian at some points: below the constant."""
    found = 0.0
    for place in range(points):
        x = torch.randn(size, dtype=torch.float64) * 10.0**-place
        jacobian = torch.func.jacrev(lambda v: model(v[None]).flatten())(x)
        if jacobian.numel():
            matrix = jacobian.detach().reshape(len(jacobian), -1)
            found = max(found, float(torch.linalg.matrix_norm(matrix, 2)))
    return found
