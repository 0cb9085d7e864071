"""bfloat16 and float16 parameters: a float32 master on the manifold, and float32 state."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import (
    OPTIMIZERS,
    TABLE,
    assert_same,
    backward,
    constrained,
    large_eps,
    model,
    optimizer,
    train,
    trained,
    tried_with,
)
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.numerics.geometry import random_point

HALVES = [torch.bfloat16, torch.float16]
half = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
HALVES_ON_MACHINES = [
    *in_turn(OPTIMIZERS, HALVES, ["cpu", "as_accelerator", "as_accelerator"]),
    ("sgd", torch.float16, "compiled"),
]


def halves_on_machines(test: Any) -> Any:
    rows = pytest.mark.parametrize(
        ("name", "dtype", "machine"), HALVES_ON_MACHINES, indirect=["machine"]
    )
    return pytest.mark.usefixtures("machine")(rows(test))


FLOAT32_ROUNDING = 5e-6  # 40 eps, for sums of at most 64 products


def pair(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any]:
    net = so.retag(model().to(dtype))
    return net, optimizer(name, net.parameters(), **large_eps(name))


def master_of(opt: Any, parameter: Tensor) -> Tensor:
    return opt.state[parameter]["master"]  # type: ignore[no-any-return]


def assert_on_the_manifold(net: nn.Module, opt: Any) -> None:
    """Errors of the masters at float32 rounding, of parameters at their own, one rounding off."""
    for parameter in constrained(net).values():
        master = master_of(opt, parameter)
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.to(parameter.dtype))
        assert so.orthonormality_error(master, parameter.manifold) < FLOAT32_ROUNDING
        own = 1.01 * torch.finfo(parameter.dtype).eps
        assert so.orthonormality_error(parameter) < own


# ---- the step ------------------------------------------------------------------------------------


@halves_on_machines
def test_every_reading_has_a_master_and_float32_state(name, dtype):
    net, opt = pair(name, dtype)
    train(net, opt, 0, 10)  # past a step that corrects rounding
    assert_on_the_manifold(net, opt)
    for parameter in constrained(net).values():
        state = opt.state[parameter]
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert state["master"].shape == parameter.shape
    for key, value in opt.state.get(net.out.weight, {}).items():
        assert key == "step" or value.dtype == dtype  # plain parameters are torch's


@halves_on_machines
def test_the_master_moves_like_a_float32_parameter(name, dtype):
    """Given the same gradients and the same start, the whole training is that of float32."""
    start = random_point(5, 12, 4, generator=torch.Generator().manual_seed(0))
    full = [
        so.ManifoldParameter(matrix.clone(), project=False) for matrix in start.to(dtype).float()
    ]
    low = [so.ManifoldParameter(matrix.to(dtype), project=False) for matrix in start]
    opts = [optimizer(name, params) for params in (full, low)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        for mine, other in zip(full, low, strict=True):
            other.grad = torch.randn(12, 4, generator=generator).to(dtype)
            mine.grad = other.grad.float()
        for opt in opts:
            opt.step()
    for mine, other in zip(full, low, strict=True):
        assert torch.equal(mine, master_of(opts[1], other))
        state = dict(opts[1].state[other])
        del state["master"]
        assert_same(state, dict(opts[0].state[mine]))


@pytest.mark.parametrize(
    ("name", "lr", "dtype", "steps"),
    [
        ("sgd", 2e-2, torch.bfloat16, 600),
        *(
            pytest.param(*row, 10_000, marks=pytest.mark.slow)
            for row in itertools.product(["sgd"], [1e-3], HALVES)
        ),
        *(
            pytest.param(*row, 10_000, marks=pytest.mark.slow)
            for row in itertools.product(["adam"], [1e-4], HALVES)
        ),
    ],
)
def test_no_drift_in_many_steps(name, lr, dtype, steps, generator):
    """Steps far below the rounding of the parameter add up to where float32 goes."""
    tall = so.ManifoldParameter(random_point(16, 4, generator=generator).to(dtype))
    square = so.ManifoldParameter(random_point(4, 4, generator=generator).to(dtype))
    net = nn.ParameterList([tall, square])
    opt = optimizer(name, [tall, square], lr=lr, weight_decay=0.0)
    cost = torch.diag(torch.linspace(1.0, 2.0, 16)).to(dtype)
    worst = []
    for step in range(steps):
        tall.grad = -cost @ tall.detach()
        square.grad = torch.randn(4, 4, generator=generator).to(dtype)
        opt.step()
        if step % (steps // 10) == steps // 10 - 1:
            errors = [so.orthonormality_error(master_of(opt, p)) for p in (tall, square)]
            worst.append(max(errors))
    assert_on_the_manifold(net, opt)
    assert worst[-1] < 3 * min(worst) + 1e-6
    values = torch.linalg.eigvalsh(tall.float().mT @ cost.float() @ tall.float())
    expected = torch.linspace(1.0, 2.0, 16)[-4:]
    torch.testing.assert_close(values, expected, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_fused_kernels_move_plain_rows_of_the_master():
    nets, opts = [], []
    for fused in (False, True):
        net = so.retag(model().to(torch.bfloat16))
        nets.append(net)
        opts.append(so.StiefelSGD(net.parameters(), lr=0.05, fused=fused))
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 0, 1)
    masters = [master_of(opt, net.fused.weight) for net, opt in zip(nets, opts, strict=True)]
    torch.testing.assert_close(*masters)


# ---- somebody else writes ------------------------------------------------------------------------


def write_in_place(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def write_through_data(parameter: Tensor, value: Tensor) -> None:
    parameter.data.copy_(value)


def replace_data(parameter: Tensor, value: Tensor) -> None:
    parameter.data = value.clone()


WRITES = [write_in_place, write_through_data, replace_data]


@pytest.mark.parametrize(
    ("write", "steps", "name"), in_turn(WRITES * 3, [1, 1, 1, 3, 3, 3, 7, 7, 7], OPTIMIZERS)
)
def test_the_master_follows_an_outside_write(write, steps, name):
    net, opt = pair(name)
    train(net, opt, 0, steps)
    other = so.retag(model(7).to(torch.bfloat16))
    for parameter, value in zip(net.parameters(), other.parameters(), strict=True):
        write(parameter, value.detach())
    for group in opt.param_groups:
        group["lr"] = 1e-6
    train(net, opt, steps, steps + 1)
    for parameter, value in zip(
        constrained(net).values(), constrained(other).values(), strict=True
    ):
        moved = (master_of(opt, parameter) - value.detach().float()).abs().max()
        assert moved < 4 * torch.finfo(torch.bfloat16).eps
    train(net, opt, steps + 1, 12)
    assert_on_the_manifold(net, opt)


def test_a_write_of_the_same_value_leaves_the_master_its_digits():
    nets, opts = zip(*(pair("adam") for _ in range(2)), strict=True)
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 0, 3)
    nets[0].load_state_dict(copy.deepcopy(nets[0].state_dict()))
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 3, 7)
    assert_same(
        [p.detach() for p in nets[0].parameters()], [p.detach() for p in nets[1].parameters()]
    )


# ---- checkpoints ---------------------------------------------------------------------------------


@tried_with("sgd", "adam-amsgrad")
def test_checkpoints_cross_precisions(name):
    """A float32 training may go on in bfloat16 and back; momenta keep their digits."""
    full, full_opt = trained(name)
    net, opt = pair(name)
    net.load_state_dict(full.state_dict())
    opt.load_state_dict(full_opt.state_dict())
    word = TABLE[name].state
    saved = full_opt.state[full.up.weight][word]
    assert torch.equal(opt.state[net.up.weight][word], saved)
    train(net, opt, 3, 12)
    assert_on_the_manifold(net, opt)
    with pytest.warns(UserWarning, match="values in torch.bfloat16 that are off the manifold"):
        full.load_state_dict(net.state_dict())
    full_opt.load_state_dict(opt.state_dict())
    train(full, full_opt, 12, 13)
    assert so.orthonormality_error(full) < FLOAT32_ROUNDING
    assert "master" not in full_opt.state[full.up.weight]


def test_plain_state_of_another_precision_is_named_with_the_remedy():
    net, opt = trained("adam")
    net.to(torch.bfloat16)
    backward(net, 3)
    message = "exp_avg of .*` must have dtype torch.bfloat16, got torch.float32"
    with pytest.raises(ValueError, match=message):
        opt.step()
    opt.load_state_dict(opt.state_dict())
    opt.step()
    assert so.orthonormality_error(net) < 0.02


# ---- before an optimizer -------------------------------------------------------------------------


@half
def test_constrain_projects_in_float32_and_then_keeps_the_bits(dtype):
    layer = so.constrain(nn.Linear(48, 32, dtype=dtype), heads=2, scale=2.5)
    assert so.orthonormality_error(layer) < 1.01 * torch.finfo(dtype).eps
    before = layer.weight.detach().clone()
    so.constrain(layer, heads=2, scale=2.5)
    assert torch.equal(layer.weight, before)


@half
def test_a_float32_point_that_is_rounded_stays_where_it_is(dtype, generator):
    layer = nn.Linear(256, 64, bias=False)
    layer.weight.data = random_point(64, 256, generator=generator)
    layer = layer.to(dtype)
    before = layer.weight.detach().clone()
    so.constrain(layer)
    assert torch.equal(layer.weight, before)
    assert random_point(64, 256, dtype=dtype, generator=generator).dtype == dtype
