"""Fake tensors, by which programs plan memory: models are built, constrained and trained."""

from __future__ import annotations

import warnings

import pytest
import torch
from contract import RULES
from contract import optimizer as make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from training import closure_of

import stiefel_opt as so
from stiefel_opt.numerics.roots import roots


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_of_fake_tensors_reads_nothing(name: str, dtype: torch.dtype) -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        net = nn.Sequential(*(nn.Linear(a, b, dtype=dtype) for a, b in ((8, 8), (8, 12), (12, 4))))
        so.constrain(net[0], heads=2)
        so.constrain(net[1], rows=((0, 3), (5, 12)))
        opt = make(name, net.parameters())
        for _ in range(2):
            closure_of(opt, lambda: net(torch.randn(2, 8, dtype=dtype)).sum())()
            opt.step()
        with torch.no_grad():
            net(torch.randn(2, 8, dtype=dtype))
        so.project_(net)
        assert str(so.report(net)).count("meta") == 2
        state = opt.state_dict()["state"]
    assert all(isinstance(p, FakeTensor) for p in net.parameters())
    assert state


def test_what_needs_a_value_says_so() -> None:
    with FakeTensorMode():
        layer = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="`scale` must be a number on the meta device, and fo"):
            so.constrain(layer, scale="keep")


def test_a_fake_step_leaves_no_trace():
    with FakeTensorMode():
        roots(torch.zeros(1, 3, 3), 0.1)
    assert roots(torch.zeros(1, 3, 3), 0.1).difference.abs().max() < 1e-7
