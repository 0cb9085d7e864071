"""Models of orthogonium and deel-torchlip, exported as plain layers, are bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import stiefel_opt as so

SIZE = (4, 6, 6)


def steepest(model: nn.Module) -> float:
    x = torch.randn(SIZE)
    jacobian = torch.autograd.functional.jacobian(lambda v: model(v[None]).flatten(), x)
    return float(torch.linalg.matrix_norm(jacobian.flatten(1).double(), 2))


def test_orthogonium() -> None:
    pytest.importorskip("einops")
    layers: Any = pytest.importorskip("orthogonium.layers")
    aoc: Any = pytest.importorskip("orthogonium.layers.conv.AOC").AdaptiveOrthoConv2d
    convolution = aoc(4, 4, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(convolution, layers.MaxMin(), nn.Flatten(), layers.OrthoLinear(144, 5))
    model.train()
    for _ in range(20):
        model(torch.randn(2, *SIZE))
    model.eval()
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, name)
    bound = so.lipschitz_bound(model, SIZE)
    assert steepest(model) <= bound * (1 + 1e-6)
    assert bound < 1.01


def test_torchlip() -> None:
    torchlip: Any = pytest.importorskip("deel.torchlip")
    layers = [
        torchlip.SpectralConv2d(4, 4, 3, padding=1),
        torchlip.GroupSort2(),
        torchlip.InvertibleDownSampling(2),
        torchlip.ScaledL2NormPool2d(3),
        nn.Flatten(),
        torchlip.SpectralLinear(16, 5),
    ]
    model = nn.Sequential(*layers).eval()
    model(torch.randn(2, *SIZE))
    plain = nn.Sequential(
        *(each.vanilla_export() if hasattr(each, "vanilla_export") else each for each in model)
    )
    assert "0" in so.lipschitz_table(plain, SIZE)
    assert steepest(plain) <= so.lipschitz_bound(plain, SIZE) <= 1 + 1e-5
    spectral = torchlip.SpectralConv2d(4, 4, 3, padding=1)
    with pytest.raises((TypeError, ValueError)):
        so.lipschitz_bound(nn.Sequential(spectral.train()))
