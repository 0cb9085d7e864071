"""Autocast, GradScaler and low matmul precision around float32 parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import (
    OPTIMIZERS,
    assert_same,
    assert_same_training,
    backward,
    model,
    on_machines,
    optimizer,
    snapshot,
    train,
    twins,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stiefel_opt as so
from stiefel_opt.numerics.geometry import random_point

BACKENDS: Any = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def autocast_loss(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(step))
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        return net(x).float().square().mean()  # type: ignore[no-any-return]


# ---- autocast and GradScaler ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overflow", "unscale"),
    in_turn(
        OPTIMIZERS,
        [0, 3, 3, 0],
        [False, True],
    ),
)
def test_an_overflow_leaves_no_trace(name, overflow, unscale):
    """Neither does a scale that is a power of two: the twin trains without one."""
    (net, opt), (other, other_opt) = twins(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(6):
        if step == overflow:
            scaler.scale(autocast_loss(net, step) * float("inf")).backward()
            before = snapshot(net, opt)
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            after = snapshot(net, opt)
            assert_same(after[1:], before[1:])
            for (value, _, state), (old, _, old_state) in zip(after[0], before[0], strict=True):
                assert_same((value, state), (old, old_state))
            scaler.update()
            assert scaler.get_scale() == 2.0**9
            scaler.update(2.0**10)
        scaler.scale(autocast_loss(net, step)).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        autocast_loss(other, step).backward()
        other_opt.step()
    assert_same_training((net, opt), (other, other_opt))
    assert so.orthonormality_error(net) < 5e-6


@on_machines(cpu="sgd adam", as_accelerator="adam-amsgrad", slowly_compiled="sgd-nesterov")
def test_a_step_inside_autocast_is_a_step_outside(name):
    (net, opt), (other, other_opt) = twins(name)
    for step in range(3):
        backward(net, step)
        backward(other, step)
        opt.step()
        with torch.autocast("cpu", torch.bfloat16):
            other_opt.step()
    assert_same_training((net, opt), (other, other_opt))


# ---- matmul precision ----------------------------------------------------------------------------


def legacy(value: str) -> None:
    torch.set_float32_matmul_precision(value)


def every_backend(value: str) -> None:
    torch.backends.fp32_precision = value


def cuda_only(value: str) -> None:
    torch.backends.cuda.matmul.fp32_precision = value


@pytest.fixture
def restored():
    """Go back to how torch starts: legacy names say highest, the newer ones inherit."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    for backend in BACKENDS:
        backend.fp32_precision = "none"


def settings() -> list[str]:
    found = [backend.fp32_precision for backend in BACKENDS]
    with contextlib.suppress(RuntimeError):
        found.append(torch.get_float32_matmul_precision())
    return found


LOW = [(legacy, "high"), (legacy, "medium"), (every_backend, "tf32"), (cuda_only, "tf32")]


@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")  # torch 2.9
@pytest.mark.parametrize(("choose", "value"), LOW)
@pytest.mark.usefixtures("restored")
def test_the_choice_is_suspended_in_a_step_and_then_back(choose, value, monkeypatch):
    net = model()
    opt = optimizer("sgd", net.parameters())
    choose(value)
    before = settings()
    assert "tf32" in before
    seen, failing = [], []
    rule_for = type(opt).rule_for

    def watched_rule_for(self, group):
        rule = rule_for(self, group)

        def watched(*arguments, **options):
            seen.append(settings())
            if failing:
                raise RuntimeError("stop")
            return rule(*arguments, **options)

        return watched

    monkeypatch.setattr(type(opt), "rule_for", watched_rule_for)
    backward(net, 0)
    opt.step()
    assert seen
    assert all(found[:2] == ["ieee", "ieee"] for found in seen)
    assert settings() == before
    failing.append(True)
    with pytest.raises(RuntimeError, match="stop"):
        opt.step()
    assert settings() == before


@pytest.mark.usefixtures("restored")
def test_a_setting_for_all_backends_is_still_inherited_after_a_step():
    net = model()
    opt = optimizer("sgd", net.parameters())
    torch.backends.fp32_precision = "tf32"
    assert settings() == ["tf32", "tf32"]
    train(net, opt, 0, 1)
    torch.backends.fp32_precision = "ieee"
    assert settings()[:2] == ["ieee", "ieee"]


class LowProducts(TorchDispatchMode):
    """Products of float32 as hardware with TF32 or bfloat16 units makes them, where it is asked to.

    Factors are rounded to 8 bits, as for "medium", whenever a setting allows it.
    """

    NAMES = ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_")

    def __init__(self) -> None:
        super().__init__()
        self.rounded = self.exact = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in self.NAMES and args[-1].dtype == torch.float32:
            if set(settings()) <= {"highest", "ieee", "none"}:
                self.exact += 1
            else:
                self.rounded += 1
                factors = [factor.bfloat16().float() for factor in args[-2:]]
                args = (*args[:-2], *factors)
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")  # torch 2.9
@pytest.mark.parametrize(
    ("name", "choose", "value"),
    [(name, *choice) for name, choice in in_turn(OPTIMIZERS, LOW)],
)
@pytest.mark.usefixtures("restored")
def test_errors_stay_at_float32_rounding_where_products_are_rounded(name, choose, value, generator):
    """What hardware would do is done by hand, so that a product outside the guard would show."""
    starts = [random_point(n, m, generator=generator) for n, m in ((64, 16), (24, 24))]
    starts[0] = starts[0] + 0.05 * torch.randn(64, 16, generator=generator)  # is projected
    params = [so.ManifoldParameter(start) for start in starts]
    opt = optimizer(name, params)
    choose(value)
    with LowProducts() as products:
        for _ in range(17):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            opt.step()
        assert products.exact
        assert not products.rounded
        gram: Tensor = params[1].detach().mT @ params[1].detach()
        assert products.rounded == 1  # outside a step the choice of the user holds
    assert (gram - torch.eye(24)).abs().max() > 1e-4
    assert max(float(so.orthonormality_error(p)) for p in params) < 5e-6
