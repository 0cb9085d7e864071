"""What holds on every device: the accelerator of this machine, or the toy one.

    python -m pytest tests/devices/laws.py

A GPU copies numbers to the host in its own time; from the toy device nothing is ever read. Where a
law is about steps, they are eager ones and then captured ones; on the toy device a double takes the
place of a graph.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract import Model, constrained, every_optimizer, every_rule, model, optimizer, through_file
from graph_double import doubled
from map_cases import MAPS, MapCase, gaussian
from optimizers import TABLE
from torch import Tensor, nn
from toy_device import register
from training import closure_of

import stiefel_opt as so
from stiefel_opt.optim import capture

HAS_ACCELERATOR = torch.accelerator.is_available()
WAITS: Callable[[], int] | None = None if HAS_ACCELERATOR else register()
DEVICE = torch.accelerator.current_accelerator() if HAS_ACCELERATOR else torch.device("toy", 0)


@contextlib.contextmanager
def nobody_waits() -> Iterator[None]:
    """Raise where the host waits for the device: for a number, or until one has been sent."""
    if WAITS is not None:
        before = WAITS()
        yield
        assert WAITS() == before
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_device(net: nn.Module) -> nn.Module:
    return so.retag(net.to(DEVICE))  # torch replaces the parameters on a device of its own kind


def pair(dtype: torch.dtype = torch.float64) -> tuple[Model, nn.Module]:
    """The same model on the CPU and on the device."""
    return model().to(dtype), on_device(model().to(dtype))


def fill(net: nn.Module, step: int, without: tuple[str, ...] = ()) -> None:
    """The gradients of step number ``step``, those of the CPU on every device."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in net.named_parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if name in without else grad.to(parameter.device)


def train(net: nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        fill(net, step)
        opt.step()


def assert_near(net: nn.Module, other: nn.Module, difference: float) -> None:
    others = dict(other.named_parameters())
    for name, parameter in net.named_parameters():
        given = parameter.detach().cpu()
        torch.testing.assert_close(given, others[name].detach().cpu(), rtol=0, atol=difference)


def assert_at_home(opt: torch.optim.Optimizer) -> None:
    """State lives where its parameter lives, but for the steps that torch counts on the host."""
    for parameter, state in opt.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                assert value.device == parameter.device, name


# ---- steps ---------------------------------------------------------------------------------------


@pytest.fixture(params=["eager", "captured"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are taken one by one, or captured after the first."""
    is_captured = request.param == "captured"
    monkeypatch.setattr(capture, "BY_DEFAULT", is_captured)
    with doubled(DEVICE.type) if is_captured and not HAS_ACCELERATOR else contextlib.nullcontext():
        yield


taken_both_ways = pytest.mark.usefixtures("steps")


@taken_both_ways
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_is_that_of_the_cpu_and_waits_for_nothing(name: str, dtype: torch.dtype) -> None:
    host, net = pair(dtype)
    of_host, opt = (optimizer(name, each.parameters()) for each in (host, net))
    train(host, of_host, 0, 6)
    train(net, opt, 0, 2)  # the first looks at everything
    for step in range(2, 6):
        fill(net, step)
        with nobody_waits():
            opt.step()
    assert_at_home(opt)
    if dtype is torch.float64:
        assert_near(net, host, TABLE[name].unread)
    eps = torch.finfo(dtype).eps
    errors = {name: float(error) / eps for name, error in so.orthonormality_errors(net).items()}
    assert max(errors.values()) < 30, errors


@taken_both_ways
@every_rule
def test_nobody_waits_for_whoever_has_no_gradient(name: str) -> None:
    host, net = pair()
    of_host, opt = (optimizer(name, each.parameters()) for each in (host, net))
    for each, own in ((host, of_host), (net, opt)):
        train(each, own, 0, 2)
    for step, without in enumerate([("q.weight",), ("k.weight", "up.weight"), ("fused.weight",)]):
        for each in (host, net):
            fill(each, step, without)
        of_host.step()
        with nobody_waits():
            opt.step()
    assert_near(net, host, TABLE[name].unread)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs are of CUDA")
@every_optimizer
def test_a_step_in_a_graph_is_replayed(name: str) -> None:
    net, graph = on_device(model().double()), torch.cuda.CUDAGraph()
    captured = copy.deepcopy(net)
    capturable = {"capturable": True} if TABLE[name].adaptive and TABLE[name].of_torch else {}
    opt, own = (optimizer(name, each.parameters(), **capturable) for each in (net, captured))
    with torch.cuda.stream(torch.cuda.Stream()):  # as torch asks for before a capture
        train(captured, own, 0, 3)
    train(net, opt, 0, 3)
    with torch.cuda.graph(graph):
        own.step()
    for step in range(3, 12):
        fill(net, step)
        for mine, other in zip(captured.parameters(), net.parameters(), strict=True):
            mine.grad.copy_(other.grad)
        graph.replay()
        opt.step()
    assert_near(captured, net, TABLE[name].unread)
    assert float(so.orthonormality_error(captured)) < 1e-13


@taken_both_ways
@every_rule
def test_some_gradients_are_missing_and_one_is_not_finite(name: str) -> None:
    host, net = pair()
    of_host, opt = (optimizer(name, each.parameters()) for each in (host, net))
    for each, own in ((host, of_host), (net, opt)):
        train(each, own, 0, 2)
        for step, without in enumerate([("q.weight",), ("k.weight", "up.weight"), ()], 2):
            fill(each, step, without)
            if not without:
                each.turn.weight.grad[0, 0] = math.nan
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*was not finite")
                own.step()
    assert_near(net, host, TABLE[name].unread)


@taken_both_ways
@every_rule
def test_a_checkpoint_goes_from_one_device_to_the_other_and_back(name: str) -> None:
    host, net = pair()
    of_host, opt = (optimizer(name, each.parameters()) for each in (host, net))
    train(host, of_host, 0, 3)
    net.load_state_dict(through_file(host.state_dict()))
    opt.load_state_dict(through_file(of_host.state_dict()))
    train(net, opt, 3, 6)
    assert_at_home(opt)
    back = model().double()
    of_back = optimizer(name, back.parameters())
    back.load_state_dict(through_file(net.state_dict()))
    of_back.load_state_dict(through_file(opt.state_dict()))
    train(back, of_back, 6, 9)
    train(host, of_host, 3, 9)
    assert_near(back, host, TABLE[name].unread)


@taken_both_ways
@every_rule
def test_a_learning_rate_may_be_a_tensor_of_the_device(name: str) -> None:
    host, net = pair()
    lr = torch.tensor(0.05, dtype=torch.float64)
    of_host = optimizer(name, host.parameters(), lr=lr)
    opt = optimizer(name, net.parameters(), lr=lr.to(DEVICE))
    for own in (of_host, opt):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(own, 8)
        for step in range(6):
            fill(host if own is of_host else net, step)
            own.step()
            schedule.step()
    assert_near(net, host, max(TABLE[name].unread, 1e-7))  # fused kernels read it in float32


@taken_both_ways
@every_rule
def test_gradients_of_any_length_leave_the_weights_orthonormal(name: str) -> None:
    net = on_device(model())
    opt = optimizer(name, net.parameters())
    for step in range(8):
        fill(net, step)
        for parameter in net.parameters():
            parameter.grad *= 10.0 ** (step - 2)
        opt.step()
    assert float(so.orthonormality_error(net)) < 1e-5


CAPTURABLE = [name for name in TABLE if TABLE[name].adaptive and TABLE[name].of_torch]


@pytest.mark.parametrize("name", CAPTURABLE)
@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}, {"foreach": False}])
def test_the_kernels_of_torch_move_plain_parameters(name: str, options: dict[str, Any]) -> None:
    host, net = pair()
    of_host = optimizer(name, host.parameters())
    opt = optimizer(name, net.parameters(), **options)
    for each, own in ((host, of_host), (net, opt)):
        train(each, own, 0, 4)
    assert_near(net, host, max(TABLE[name].unread, 1e-4))  # capturable steps count in float32
    assert_at_home(opt)


OF_TORCH = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.ASGD, torch.optim.Rprop),
)


@pytest.mark.parametrize("rule", OF_TORCH)
def test_any_optimizer_of_torch_keeps_weights_orthonormal(rule: Any) -> None:
    host, net = pair()
    for each in (host, net):
        train(each, so.on_manifold(rule(each.parameters(), lr=0.01)), 0, 6)
    assert_near(net, host, 1e-9)
    assert float(so.orthonormality_error(net)) < 1e-13


def test_lbfgs_finds_leading_eigenvectors() -> None:
    matrix = gaussian(12, 12)
    matrix = (matrix + matrix.mT).to(DEVICE)
    point = so.ManifoldParameter(so.random_point(12, 3, dtype=torch.float64).to(DEVICE))
    opt = so.StiefelLBFGS([point])
    closure = closure_of(opt, lambda: -(point * (matrix @ point)).sum())
    for _ in range(5):
        opt.step(closure)
    largest = torch.linalg.eigvalsh(matrix.cpu())[-3:].sum()
    torch.testing.assert_close(-closure().detach().cpu(), largest, rtol=1e-9, atol=0)


# ---- around a step -------------------------------------------------------------------------------


@taken_both_ways
def test_the_report_projection_and_release() -> None:
    net = on_device(model())
    opt = optimizer("adam", net.parameters())
    train(net, opt, 0, 3)
    assert all(name in str(so.report(net, opt)) for name in constrained(net))
    with torch.no_grad():
        net.up.weight.mul_(1.5)
    so.project_(net)
    assert float(so.orthonormality_error(net)) < 1e-5
    loss = so.orthonormality_penalty(net)
    loss.backward()
    assert loss.device == net.up.weight.device
    so.clip_grad_norm_(net.parameters(), 1.0)
    so.release(net, "up.weight")
    assert "up.weight" not in constrained(net)


@taken_both_ways
def test_averages() -> None:
    net = on_device(model())
    opt = optimizer("adam", net.parameters())
    average = so.averaged(net, 0.9)
    waits = 0
    for step in range(3):
        train(net, opt, step, step + 1)
        before = WAITS() if WAITS else 0
        average.update_parameters(net)
        waits = WAITS() - before if WAITS else 0
    assert waits <= 2  # one is torch's, which asks whether it is the first
    assert float(so.orthonormality_error(average.module)) < 1e-5


@pytest.mark.parametrize("retraction", ["polar", "qr", "cayley"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_retractions(retraction: str, dtype: torch.dtype) -> None:
    point = so.random_point(7, 3, dtype=dtype)
    ends = []
    for device in ("cpu", DEVICE):
        at = point.to(device)
        tangent = so.project_tangent(at, gaussian(7, 3, dtype=dtype).to(device))
        tangent.requires_grad_()
        end = so.retract(at, tangent, retraction=retraction)
        (grad,) = torch.autograd.grad(end[0].abs().sum(), tangent)
        ends.append([end.detach().cpu(), grad.cpu()])
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=1e-12)


# ---- maps and modules ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", MAPS.values(), ids=MAPS.keys())
def test_a_map_is_that_of_the_cpu(case: MapCase) -> None:
    found = []
    for device in ("cpu", DEVICE):
        net = case.registered().to(device)
        opt = torch.optim.Adam(net.parameters(), lr=0.01)
        for _ in range(3):
            opt.zero_grad()
            factor = gaussian(*case.shape, dtype=case.dtype).to(device)
            on_toy = WAITS is not None and device != "cpu"  # on a GPU some of torch's kernels wait
            with nobody_waits() if on_toy else contextlib.nullcontext():
                (net.weight * factor).sum().abs().backward()
            opt.step()
        found.append(net.weight.detach().cpu())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-9)


def delta(**where: Any) -> nn.Module:
    return so.constrain(so.nn.DeltaProduct(8, 2, **where), "out_proj.weight")


MODULES: dict[str, tuple[Callable[..., nn.Module], tuple[tuple[int, ...], ...]]] = {
    "rnn": (
        lambda **where: so.nn.OrthogonalRNN(3, 6, nonlinearity="modrelu", **where),
        ((5, 2, 3),),
    ),
    "attention": (lambda **where: so.nn.MultiheadAttention(8, 2, **where), ((5, 2, 8),) * 3),
    "delta": (delta, ((2, 5, 8),)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_that_of_the_cpu(name: str) -> None:
    make, shapes = MODULES[name]
    host = make(dtype=torch.float64)
    net = make(dtype=torch.float64, device=DEVICE)
    net.load_state_dict(host.state_dict())
    for each in (host, net):
        opt = so.StiefelAdam(each.parameters(), lr=0.01)
        for step in range(3):
            opt.zero_grad()
            where = next(each.parameters()).device
            inputs = [gaussian(*shape, seed=step).to(where) for shape in shapes]
            output = each(*inputs)
            (output[0] if isinstance(output, tuple) else output).square().sum().backward()
            opt.step()
    assert_near(net, host, 1e-7)


def test_transport_of_clouds() -> None:
    x, y = gaussian(12, 5), gaussian(10, 5, seed=1) * torch.linspace(1, 3, 5)
    results = [
        so.ot.projection_robust_wasserstein(x.to(device), y.to(device), k=2, reg=2.0, seed=0)
        for device in ("cpu", DEVICE)
    ]
    assert results[1].projection.device.type == DEVICE.type
    assert results[1].value == pytest.approx(results[0].value, rel=1e-6)
