"""StiefelMuon: plain parameters as torch moves them, state, angles, and what is refused."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from contract import (
    assert_same,
    backward,
    constrained,
    model,
)
from scale_cases import (
    g_of,
    weight,
)
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.methods import muon
from stiefel_opt.numerics.geometry import random_point

OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.8, "nesterov": False, "weight_decay": 0.1},
    {"lr": torch.tensor(0.02), "eps": 1e-3, "betas": (0.8, 0.9)},
]


def free_copy(net: nn.Module) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A copy without constraints; its matrices and the other parameters."""
    other = copy.deepcopy(net)
    tensors = list(other.parameters())
    return other, [p for p in tensors if p.ndim == 2], [p for p in tensors if p.ndim != 2]


def test_arguments_have_the_order_of_torchs_muon() -> None:
    names = (
        list(inspect.signature(rule).parameters) for rule in (so.StiefelMuon, torch.optim.Muon)
    )
    ours, theirs = (found[:5] for found in names)
    assert ours == theirs == ["params", "lr", "weight_decay", "momentum", "nesterov"]


def test_options_of_a_group_are_the_arguments_and_those_of_adamw() -> None:
    opt = so.StiefelMuon([so.ManifoldParameter(torch.eye(3))])
    arguments = set(inspect.signature(so.StiefelMuon).parameters)
    assert opt.param_groups[0].keys() == arguments | {"amsgrad", "decoupled_weight_decay"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:.*Profiler record function", "ignore:.*lru_cache")
@pytest.mark.parametrize(("options", "compiled"), [(o, False) for o in OPTIONS] + [({}, True)])
def test_plain_matrices_follow_torchs_muon_and_the_others_adamw(options, compiled):
    net = nn.Sequential(nn.Linear(8, 6), nn.Conv1d(5, 4, 1), nn.Linear(6, 3))
    other, matrices, rest = free_copy(net)
    options = {"lr": 0.02, "weight_decay": 0.0, **options}
    ours = so.StiefelMuon(net.parameters(), plain="muon", stiefel=False, **options)
    shared = ("lr", "weight_decay", "momentum", "nesterov")
    muon = torch.optim.Muon(matrices, **{k: v for k, v in options.items() if k in shared})
    adamw = torch.optim.AdamW(
        rest,
        options["lr"],
        betas=options.get("betas", (0.9, 0.95)),
        eps=options.get("eps", 1e-8),
        weight_decay=options["weight_decay"],
        foreach=False,
    )
    if compiled:
        torch._dynamo.reset()
    step = torch.compile(ours.step, backend="eager") if compiled else ours.step
    for _ in range(4):
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        step()
        muon.step()
        adamw.step()
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            if compiled and mine.ndim != 2:  # torch's compiled Adam rounds otherwise
                torch.testing.assert_close(mine, theirs)
            else:
                assert_same(mine.detach(), theirs.detach())
    state = ours.state[net[0].weight]
    assert_same(dict(state), dict(muon.state[matrices[0]]))


def test_each_group_has_its_own_plain_rule_and_plain_rows_follow_adamw():
    net = model()
    out = [net.out.weight, net.out.bias]
    known = {id(p) for p in out}
    rest = [p for p in net.parameters() if id(p) not in known]
    opt = so.StiefelMuon([{"params": out, "plain": "muon"}, {"params": rest}], lr=0.01)
    for step in range(3):
        backward(net, step)
        opt.step()
    backward(twin := copy.deepcopy(net), 0)
    mixed = so.StiefelMuon(twin.parameters(), lr=0.01, plain="muon")
    mixed.step()
    assert set(opt.state[net.out.weight]) == {"momentum_buffer"}
    assert set(opt.state[net.out.bias]) == {"step", "exp_avg", "exp_avg_sq"}
    for optimizer, owner in ((opt, net), (mixed, twin)):
        assert "rows.exp_avg" in optimizer.state[owner.fused.weight]
    assert so.orthonormality_error(net) < 1e-5


def test_the_state_is_one_buffer_like_the_parameter():
    net = model()
    opt = so.StiefelMuon(net.parameters())
    backward(net, 0)
    opt.step()
    for name, parameter in constrained(net).items():
        state = opt.state[parameter]
        ranges = 2 if name == "fused.weight" else 1
        ambient = [state["momentum_ambient" + ("", ".1")[i]] for i in range(ranges)]
        assert sum(map(Tensor.numel, ambient)) == (100 if ranges == 2 else parameter.numel())
        if ranges == 1:
            assert set(state) == {"step", "momentum_ambient"}
    opt = so.StiefelMuon([net.up.weight], momentum=0.0)
    opt.step()
    assert set(opt.state[net.up.weight]) == {"step"}


def test_the_step_is_that_of_the_pure_function(generator):
    weight = so.ManifoldParameter(random_point(2, 20, 6, generator=generator, dtype=torch.float64))
    opt = so.StiefelMuon([weight], lr=0.1, momentum=0.9)
    point, state = weight.detach().clone(), {"momentum_ambient": torch.zeros_like(weight)}
    for _ in range(5):
        weight.grad = torch.randn(2, 20, 6, generator=generator, dtype=torch.float64)
        opt.step()
        point, state, _ = muon(point, weight.grad, state, lr=0.1, momentum=0.9)
    buffer = state["momentum_ambient"]
    torch.testing.assert_close(weight.detach(), point, rtol=0, atol=1e-12)
    torch.testing.assert_close(opt.state[weight]["momentum_ambient"], buffer)
    skews, normals = opt.velocity(weight)
    inner = point.mT @ buffer
    torch.testing.assert_close(skews, (inner.mT - inner) / 2)
    torch.testing.assert_close(normals, point @ inner - buffer)
    opt.set_velocity(weight, -skews, 2 * normals)
    torch.testing.assert_close(opt.velocity(weight), (-skews, 2 * normals))


def test_muon_moves_g_by_lr_whatever_the_size() -> None:
    for layout in ("tall", "square"):
        parameter = weight(layout)
        parameter.grad = -parameter.detach()
        so.StiefelMuon([parameter], lr=1e-3, scale_pull=0.0).step()
        assert float(g_of(parameter)) == pytest.approx(1 + 1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [(so.AdaptiveSGD, "without"), (so.AdaptiveAdam, "without"), (so.StiefelLBFGS, "StiefelSGD")],
)
def test_who_cannot_learn_a_scale_names_the_remedy(rule: Any, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        rule([weight("tall")])
