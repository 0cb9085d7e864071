"""Checkpoints of options that are classes of their own now."""

import copy
from typing import Any

import pytest
import torch
from training import closure_of

import stiefel_opt as so

# Class of today, its options, and those that the class of before had.
CASES = {
    "adaptive SGD": (so.AdaptiveSGD, {"momentum": 0.9}, {"transport": "isometric"}),
    "adaptive Adam": (so.AdaptiveAdam, {"radius": "virtual"}, {"transport": "isometric"}),
    "published SGD": (so.PublishedSGD, {"momentum": 0.9}, {"transport": "published"}),
    "published Adam": (
        so.PublishedAdam,
        {"rotation": "cayley"},
        {"transport": "published", "radius": None, "nesterov": None},
    ),
}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 4))
    so.constrain(net[0])
    return net


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs = torch.arange(48.0).view(8, 6).sin()

    closure = closure_of(optimizer, lambda: net(inputs).square().mean())

    for _ in range(steps):
        optimizer.step(closure)


def as_before(state_dict: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint that the class of before wrote."""
    earlier = copy.deepcopy(state_dict)
    for group in earlier["param_groups"]:
        rotation = group.get("rotation")
        is_adaptive = group["rule"].startswith("Adaptive")
        group["rule"] = "Stiefel" + group["rule"].removeprefix("Adaptive").removeprefix("Published")
        group |= {"adaptive": is_adaptive, "rotation": None if rotation == "euler" else rotation}
        group |= options
    return earlier


@pytest.mark.parametrize("case", CASES)
def test_state_goes_on_bit_for_bit_in_the_class_of_today(case: str) -> None:
    kind, options, before = CASES[case]
    whole, parts = model(), model()
    optimizer = kind(whole.parameters(), lr=0.02, **options)
    train(whole, optimizer, 3)
    parts.load_state_dict(whole.state_dict())
    resumed = kind(parts.parameters(), lr=0.5)
    resumed.load_state_dict(as_before(optimizer.state_dict(), before))
    assert resumed.param_groups[0].keys() == optimizer.param_groups[0].keys()
    train(whole, optimizer, 3)
    train(parts, resumed, 3)
    for found, wanted in zip(parts.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", CASES)
def test_another_class_refuses_it_by_name(case: str) -> None:
    kind, options, before = CASES[case]
    net = model()
    optimizer = kind(net.parameters(), lr=0.02, **options)
    train(net, optimizer, 1)
    saved = as_before(optimizer.state_dict(), before)
    other = so.StiefelSGD if "SGD" in case else so.StiefelAdam
    with pytest.raises(ValueError, match=f"got one of {kind.__name__}; load it into"):
        other(net.parameters(), lr=0.02).load_state_dict(saved)
