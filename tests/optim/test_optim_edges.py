"""What used to leave the manifold, lose state or tell a wrong number, one law each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract import (
    TABLE,
    backward,
    every_optimizer,
    every_rule,
    optimizer,
    train,
)
from contract import model as whole_model
from torch import Tensor, nn

import stiefel_opt as so


def grads(parameter: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def stepped(name: str, weight: Any, steps: int, first: int = 0, **options: Any) -> Any:
    return go_on(optimizer(name, [weight], **options), weight, first, first + steps)


def go_on(opt: Any, weight: Any, first: int, last: int) -> Any:
    for step in range(first, last):
        weight.grad = grads(weight, step)
        opt.step()
    return opt


# ---- state that is loaded ----------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (5, 5)])
def test_a_loaded_momentum_is_made_tangent(name: str, shape: tuple[int, int]) -> None:
    """Noise on what was saved, finite and of the right shape: the weight stays orthonormal."""
    weight = so.ManifoldParameter(so.random_point(*shape, dtype=torch.float64))
    opt = stepped(name, weight, 3)
    saved = copy.deepcopy(opt.state_dict())
    for key, tensor in saved["state"][0].items():
        if key != "step":
            noise = torch.randn_like(tensor)
            tensor.add_(noise if "momentum" in key else noise.abs())
    opt.load_state_dict(saved)
    for step in range(24):
        go_on(opt, weight, 3 + step, 4 + step)
        assert so.orthonormality_error(weight) < 1e-12, step
    for key, tensor in opt.state[weight].items():
        if key.endswith("momentum_skew"):
            assert torch.equal(tensor, -tensor.mT)
        if key.endswith("sq_skew"):
            assert torch.equal(tensor, tensor.mT)


# ---- a weight that is constrained anew ---------------------------------------------------------


READINGS = [{"heads": 2}, {"rows": (0, 8)}, {"rows": (8, 16)}, {"transposed": True}, {"scale": 2.0}]


@every_rule
@pytest.mark.parametrize("saved", [False, True])
def test_another_reading_starts_the_momentum_again(name: str, saved: bool) -> None:
    for first, then in zip(READINGS, READINGS[1:] + READINGS[:1], strict=True):
        layer = so.constrain(nn.Linear(8, 16, bias=False), **first)
        opt = stepped(name, layer.weight, 5)
        if saved:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        so.release(layer)
        so.constrain(layer, **then)
        twin = copy.deepcopy(layer)
        fresh = optimizer(name, twin.parameters())
        for step in range(2):
            layer.weight.grad = grads(layer.weight, step)
            twin.weight.grad = grads(layer.weight, step)
            opt.step()
            fresh.step()
        assert torch.equal(layer.weight, twin.weight), (first, then)


# ---- the report --------------------------------------------------------------------------------


# ---- rates and steps at the edge ---------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize("lr", [1.0, 10.0])
def test_a_schedule_that_falls_below_zero_stays_on_the_manifold(name: str, lr: float) -> None:
    weight = so.ManifoldParameter(so.random_point(20, 5, dtype=torch.float64))
    opt = optimizer(name, [weight], lr=lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / 10)
    for step in range(26):
        go_on(opt, weight, step, step + 1)
        schedule.step()
        assert so.orthonormality_error(weight) < 1e-11, step
    assert not opt.skipped_steps()


@every_rule
def test_state_that_stays_empty_is_not_kept(name: str) -> None:
    """As torch's SGD without momentum."""
    plain, theirs, row = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5)), TABLE[name]
    none = {"momentum": 0.0, "nesterov": False} if row.of_torch and not row.adaptive else {}
    opt = optimizer(name, [plain], stiefel=False, **none)
    other = row.plain([theirs], lr=0.05, **{**row.plain_options, **none})
    for _ in range(2):
        plain.grad, theirs.grad = torch.ones(5), torch.ones(5)
        opt.step()
        other.step()
    assert opt.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    assert all(opt.state.values())


@every_rule
def test_a_first_step_in_inference_mode_is_a_step(name: str) -> None:
    net, twin = whole_model(), whole_model()
    opt, other = (optimizer(name, each.parameters()) for each in (net, twin))
    backward(net, 0)
    backward(twin, 0)
    with torch.inference_mode():
        opt.step()
    other.step()
    train(net, opt, 1, 4)
    train(twin, other, 1, 4)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not p.is_inference()
        assert not any(t.is_inference() for t in opt.state[p].values())
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(net, opt, 4, 5)


@every_optimizer
def test_a_momentum_of_another_point_is_made_tangent(name: str) -> None:
    """Another orthonormal matrix is written: the momentum follows, however small it is."""
    weight = so.ManifoldParameter(so.random_point(20, 5))
    opt = optimizer(name, [weight])
    for step in range(8):
        if step == 3:
            with torch.no_grad():
                weight.copy_(torch.eye(20, 5).flip(0))  # orthonormal to the last bit
        weight.grad = 1e-3 * grads(weight, step)
        opt.step()
        assert so.orthonormality_error(weight) < 2e-6, step
