"""The function whose gradient rounding has: x + s r, where r is recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stiefel_opt.rotations import quantizers


def step_of(x: Tensor, bits: int, symmetric: bool) -> Tensor:
    if symmetric:
        return x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1)


def assert_its_gradients(
    loss: Callable[[], Tensor], matrices: list[Tensor], patch: pytest.MonkeyPatch, rel: float
) -> int:
    """It is smooth, so that differences say the same. Return how many tensors were rounded."""
    loss().backward()
    real = quantizers.fake_quantize
    recorded: list[Tensor] = []
    replayed: list[Tensor] = []

    def record(x: Tensor, bits: int, symmetric: bool = False) -> Tensor:
        rounded = real(x, bits, symmetric)
        recorded.append(((rounded - x) / step_of(x, bits, symmetric)).detach())
        return rounded

    def replay(x: Tensor, bits: int, symmetric: bool = False) -> Tensor:
        replayed.append(x)
        return x + step_of(x, bits, symmetric) * recorded[len(replayed) - 1]

    with torch.no_grad():
        patch.setattr(quantizers, "fake_quantize", record)
        loss()
        patch.setattr(quantizers, "fake_quantize", replay)
        for matrix in matrices:
            direction, values = torch.randn(matrix.shape, dtype=matrix.dtype), []
            for step in (1e-6, -1e-6):
                matrix += step * direction
                replayed.clear()
                values.append(float(loss()))
                matrix -= step * direction
            slope = float((matrix.grad * direction).sum())
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=rel)
    assert len(replayed) == len(recorded)
    return len(recorded)
