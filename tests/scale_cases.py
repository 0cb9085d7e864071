"""Weights whose scale is learned: layouts, rules, targets, and what is measured of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from optimizers import CLIENTS
from torch import Tensor, nn
from training import train as descend

import stiefel_opt as so

RULES: dict[str, Any] = {
    "sgd": (so.StiefelSGD, {"lr": 0.05}),
    "adam": (so.StiefelAdam, {"lr": 0.03}),
    "adamw": (so.StiefelAdamW, {"lr": 0.03}),
}


MORE: dict[str, Any] = {  # of every other rule that moves one weight after the other
    "projected": (so.StiefelSGD, {"lr": 0.05, "transport": "projected", "nesterov": True}),
}
for client in CLIENTS:
    MORE |= client.LEARNED_SCALE
    RULES |= client.LEARNED_SCALE_TOO


LAYOUTS: dict[str, Any] = {
    "tall": ((24, 8), {}),
    "wide": ((8, 24), {}),
    "square": ((12, 12), {}),
    "heads": ((24, 16), {"heads": 4}),
    "tall heads": ((24, 4), {"heads": 2}),
    "rows": ((20, 12), {"rows": ((0, 8), (10, 20)), "heads": (2, 1)}),
    "transposed": ((16, 24), {"transposed": True, "heads": 3}),
    "flatten": ((6, 3, 3), {"flatten": True}),
    "batch": ((3, 10, 4), {}),
    "start": ((24, 8), {"scale": 2.5}),
    "complex": ((12, 5), {"dtype": torch.complex128}),
    "half": ((24, 8), {"dtype": torch.bfloat16}),
}


def weight(layout: str, **more: Any) -> so.ManifoldParameter:
    shape, options = LAYOUTS[layout]
    reading = {**options, "learn_scale": True, **more}
    value = torch.randn(shape, dtype=reading.pop("dtype", torch.float64))
    return so.ManifoldParameter(value, so.Stiefel(**reading))


def each_matrix(value: Tensor, reading: so.Stiefel) -> list[Tensor]:
    """All matrices of a value, tall, each by itself."""
    found: list[Tensor] = []
    for index, part in enumerate(reading.parts(value.detach())):
        matrices = reading.matrices(part, index)
        found += list(matrices.reshape(-1, *matrices.shape[-2:]))
    return found


def scales(value: Tensor, reading: so.Stiefel) -> Tensor:
    """The mean singular value of each matrix."""
    matrices = [matrix.to(torch.complex128) for matrix in each_matrix(value, reading)]
    return torch.stack([torch.linalg.svdvals(matrix).mean() for matrix in matrices])


def target_of(parameter: so.ManifoldParameter) -> tuple[Tensor, Tensor]:
    """A tensor near the weight whose matrices are 0.6 to 1.7 times as long, and these numbers."""
    reading = parameter.manifold
    target = so.project_(parameter.detach() + 0.05 * torch.randn_like(parameter.detach()), reading)
    count = reading.count(parameter.shape)
    factors = torch.linspace(0.6, 1.7, count, dtype=torch.float64)
    start = 0
    for index, part in enumerate(reading.parts(target)):
        own = reading.matrices(part, index)
        number = own.shape[:-2].numel()
        factor = factors[start : start + number].reshape(*own.shape[:-2], 1, 1)
        own = own * (reading.scale * factor / reading.scale_of(own))
        part.copy_(reading.stored(own.to(part.dtype), part.shape, index))
        start += number
    return target, factors * reading.scale


def fit(parameter: so.ManifoldParameter, opt: Any, target: Tensor, steps: int = 150) -> None:
    first = opt.param_groups[0]["lr"]
    for step in range(steps):
        opt.param_groups[0]["lr"] = first * (1 - step / steps)
        parameter.grad = (parameter.detach() - target).to(parameter.dtype)
        opt.step()


def g_of(parameter: Tensor) -> Tensor:
    return torch.linalg.vector_norm(parameter.detach()) / math.sqrt(min(parameter.shape))


def net(start: Any = 1.0, learn: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    so.constrain(model[0], heads=2, scale=start, learn_scale=learn)
    return so.constrain(model, "2.weight", scale=start, learn_scale=learn)


def train(model: nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
        descend(opt, lambda x=inputs: (model(x) - 2.0).square().mean())
