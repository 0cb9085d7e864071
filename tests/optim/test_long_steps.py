"""A learning rate at which every step turns a weight by more than half a right angle is told."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from optimizers import OPTIMIZERS
from torch import nn

import stiefel_opt as so


@pytest.mark.parametrize(
    ("name", "lr"), [*((name, 100.0) for name in OPTIMIZERS), ("sgd", 1e-3), ("adam", 1e-3)]
)
def test_a_hundred_long_steps_are_told_once(name: str, lr: float) -> None:
    rule, options = OPTIMIZERS[name]
    layer = so.constrain(nn.Linear(3, 7, bias=False))
    optimizer = rule(layer.named_parameters(), **{**options, "lr": lr})
    generator = torch.Generator().manual_seed(0)
    in_a_row, longest = 0, 0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(130):
            layer.weight.grad = torch.randn(7, 3, generator=generator)
            optimizer.step()
            is_long = optimizer.angles_of()[layer.weight] > math.pi / 4
            in_a_row = in_a_row + 1 if is_long else 0
            longest = max(longest, in_a_row)
    messages = [str(warning.message) for warning in told]
    assert len(messages) == (longest >= 100)
    for message in messages:
        assert "weight by more than 45 degrees" in message
        assert "tenth of lr" in message
