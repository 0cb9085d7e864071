"""StiefelAdamW: torch's AdamW for plain weights bit for bit, StiefelAdam for the others."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import stiefel_opt as so


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=generator)).square().sum().backward()
        optimizer.step()


def test_defaults_are_those_of_torch() -> None:
    theirs = inspect.signature(torch.optim.AdamW).parameters
    ours = inspect.signature(so.StiefelAdamW).parameters
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
    assert inspect.signature(so.StiefelSGD).parameters["momentum"].default == 0.9  # torch: 0


def test_constrained_weights_move_as_by_stiefel_adam() -> None:
    models = [net(), net()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        so.constrain(model, "0.weight")
    rules = so.StiefelAdamW, so.StiefelAdam
    options: list[dict[str, Any]] = [{}, {"weight_decay": 0.01, "decoupled_weight_decay": True}]
    for model, rule, chosen in zip(models, rules, options, strict=True):
        train(model, rule(model.parameters(), lr=0.05, **chosen))
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("source", "options"),
    [(so.StiefelAdam, {"stiefel": False}), (torch.optim.AdamW, {}), (torch.optim.Adam, {})],
)
def test_what_is_loaded_decays_decoupled(source: Any, options: dict[str, Any]) -> None:
    first = net()
    earlier = source(first.parameters(), lr=0.02, weight_decay=0.1, **options)
    train(first, earlier)
    twin, saved = copy.deepcopy((first, earlier.state_dict()))
    resumed = so.StiefelAdamW(first.parameters(), stiefel=False)
    resumed.load_state_dict(earlier.state_dict())
    torch_resumed = torch.optim.AdamW(twin.parameters(), lr=0.02, weight_decay=0.1)
    torch_state = torch_resumed.state_dict()
    torch_resumed.load_state_dict(
        {"state": saved["state"], "param_groups": torch_state["param_groups"]}
    )
    train(first, resumed)
    train(twin, torch_resumed)
    for own, other in zip(first.parameters(), twin.parameters(), strict=True):
        assert torch.equal(own, other)
    assert all(group["decoupled_weight_decay"] for group in resumed.param_groups)


def test_plain_state_of_another_precision_is_named_with_the_remedy() -> None:
    model = net()
    so.constrain(model, "0.weight")
    optimizer = so.StiefelAdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer)
    model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(
        ValueError, match=r"exp_avg of .*` must have dtype torch.bfloat16, got torc"
    ):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert so.orthonormality_error(model) < 0.02
