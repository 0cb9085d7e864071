"""Captured steps are the eager ones, whatever happens between two of them.

A double takes the place of a CUDA graph, see `graph_double.py`: a CPU counts as an accelerator.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import (
    IS_ON_CPU,
    TABLE,
    constrained,
    every_optimizer,
    model,
    optimizer,
    through_file,
    warnings_of,
)
from graph_double import Double, Tape, doubled
from optimizers import OPTIMIZERS
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.numerics import device
from stiefel_opt.optim import capture

pytestmark = pytest.mark.usefixtures("as_accelerator")
STEPS = 50
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def tapes() -> Iterator[list[Tape]]:
    with doubled("cpu") as made:
        yield made


def fill(net: nn.Module, step: int, without: tuple[str, ...] = (), size: float = 0.05) -> None:
    """The gradients of step number ``step``, short ones, at a new address."""
    generator = torch.Generator().manual_seed(step)
    for name, parameter in net.named_parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if name in without else grad * size


class Small(nn.Module):
    """Two equal wide weights with heads, a tall one with a scale, and plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.q = so.constrain(nn.Linear(8, 6), heads=2)
        self.k = so.constrain(nn.Linear(8, 6), heads=2)
        self.up = so.constrain(nn.Linear(6, 10, bias=False), scale=2.0)


def pair(name: str, net: nn.Module | None = None, **options: Any) -> list[tuple[nn.Module, Any]]:
    """A model with eager steps and a copy with captured ones."""
    net = Small().double() if net is None else net
    nets = net, copy.deepcopy(net)
    return [
        (each, optimizer(name, each.parameters(), cuda_graph=graph, **options))
        for each, graph in zip(nets, (False, True), strict=True)
    ]


def difference(net: nn.Module, other: nn.Module) -> float:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


def status(opt: Any) -> list[str]:
    return [str(each) for index in opt._indices for each in index.captures]


def assert_captured(opt: Any) -> None:
    assert all("captured, " in each for each in status(opt)), status(opt)


# ---- the same numbers ----------------------------------------------------------------------------

Event = Callable[[int, nn.Module, Any], None]


def nothing(step: int, net: nn.Module, _: Any) -> None:
    fill(net, step)


def schedule(step: int, net: nn.Module, opt: Any) -> None:
    fill(net, step)
    for group in opt.param_groups:
        group["lr"] = 0.03 * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))


def to_zero_and_back(step: int, net: nn.Module, opt: Any) -> None:
    fill(net, step)
    for group in opt.param_groups:
        group["lr"] = 0.0 if 20 <= step < 23 else 0.05


def some_are_missing(step: int, net: nn.Module, _: Any) -> None:
    names = {20: ("q.weight",), 21: ("k.weight", "up.weight"), 33: tuple(constrained(net))}
    fill(net, step, names.get(step, ()))


def one_is_not_finite(step: int, net: nn.Module, _: Any) -> None:
    fill(net, step)
    if step in (20, 35):
        net.up.weight.grad[0, 0] = math.nan if step == 20 else 1e300


def other_memory(step: int, net: nn.Module, _: Any) -> None:
    fill(net, step)
    if step % 7 == 3:
        net.up.weight.data = net.up.weight.data.clone()


def other_values(step: int, net: nn.Module, _: Any) -> None:
    fill(net, step)
    if step == 25:
        with torch.no_grad():
            net.up.weight.mul_(-1.0)


def a_checkpoint(step: int, net: nn.Module, opt: Any) -> None:
    fill(net, step)
    if step == 25:
        saved = through_file(opt.state_dict())
        for group in saved["param_groups"]:
            group["cuda_graph"] = None  # of another machine
        opt.load_state_dict(saved)


def accumulated(step: int, net: nn.Module, _: Any) -> None:
    fill(net, step)
    for parameter in net.parameters():
        parameter.grad += 0.5 * parameter.grad


def other_options(step: int, net: nn.Module, opt: Any) -> None:
    fill(net, step)
    for group in opt.param_groups if step == 25 else ():
        group["maximize"] = True


EVENTS = (
    *(nothing, schedule, to_zero_and_back, some_are_missing, one_is_not_finite, other_memory),
    *(other_values, a_checkpoint, accumulated, other_options),
)


def run(name: str, event: Event, steps: int, *given: Any) -> list[tuple[nn.Module, Any]]:
    """Eager steps of a CPU, where every number is that of its step, and captured ones."""
    pairs = pair(name, *given)
    for (net, opt), is_on_cpu in zip(pairs, (True, False), strict=True):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(IS_ON_CPU, [lambda _: False, lambda _: True][is_on_cpu])
            warnings.filterwarnings("ignore", message=".*was not finite")
            for step in range(steps):
                event(step, net, opt)
                opt.step()
    return pairs


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_captured_steps_are_the_eager_ones(name: str, event: Event) -> None:
    (eager, of_eager), (net, opt) = run(name, event, STEPS)
    assert difference(eager, net) < 1e-10
    assert_captured(opt)
    assert opt.skipped_steps() == of_eager.skipped_steps()
    for mine, other in zip(constrained(net).values(), constrained(eager).values(), strict=True):
        assert float(opt.state[mine]["step"]) == float(of_eager.state[other]["step"])
        assert opt.angles_of()[mine] == pytest.approx(of_eager.angles_of()[other], rel=1e-6)


@every_optimizer
def test_every_rule_can_be_captured(name: str) -> None:
    if not OPTIMIZERS[name][0].capturable:
        pytest.skip("its rule searches")
    (eager, _), (net, opt) = run(name, one_is_not_finite, 22, model().double())
    assert difference(eager, net) < TABLE[name].unread
    assert "captur" in status(opt)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_of_every_precision(dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    weights = [so.random_point(9, 3, dtype=wide) for _ in range(2)]
    pairs = []
    for graph in (False, True):
        own = [so.ManifoldParameter(each.to(dtype)) for each in weights]
        pairs.append((own, so.StiefelSGD(own, lr=0.05, cuda_graph=graph)))
    for own, opt in pairs:
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for each in own:
                each.grad = torch.randn(9, 3, generator=generator, dtype=torch.float64).to(dtype)
                each.grad *= 0.1
            opt.step()
    assert_captured(pairs[1][1])
    for mine, other in zip(*(own for own, _ in pairs), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(mine, other, rtol=0, atol=20 * eps)


def test_a_learning_rate_of_the_device_is_read_by_nobody() -> None:
    lr = torch.tensor(0.05, dtype=torch.float64)
    (eager, of_eager), (net, opt) = pair("adam", lr=lr, foreach=False)
    for step in range(20):
        lr.fill_(0.05 / (1 + step))
        for each, own in ((eager, of_eager), (net, opt)):
            fill(each, step)
            own.step()
    assert difference(eager, net) < 1e-10
    assert_captured(opt)


def test_groups_have_graphs_of_their_own() -> None:
    net = model().double()
    twin = copy.deepcopy(net)
    for each, graph in ((net, True), (twin, False)):
        groups = [{"params": [each.q.weight, each.k.weight], "lr": 0.01, "cuda_graph": graph}]
        groups += [{"params": [each.turn.weight]}]
        opt = so.StiefelSGD(groups, lr=0.05, cuda_graph=False)
        for step in range(20):
            fill(each, step)
            opt.step()
        if graph:
            assert ["captured" in text for text in status(opt)] == [True, False]
    assert difference(net, twin) < 1e-10


# ---- the double ----------------------------------------------------------------------------------


def test_the_double_runs_nothing_freezes_numbers_and_refuses_reads() -> None:
    number, tensor, found = 2.0, torch.ones(3), torch.zeros(3)
    recorder = Double(torch.device("cpu"), {})
    repeat = recorder.record(lambda: found.copy_(tensor * number).add_(1.0))
    version = found._version
    assert found.tolist() == [0.0] * 3
    number = 5.0
    tensor.fill_(10.0)
    repeat()
    assert found.tolist() == [21.0] * 3
    assert found._version == version
    with pytest.raises(RuntimeError, match="reads a number"):
        recorder.record(lambda: float(tensor.sum()))


# ---- what a graph must not break -----------------------------------------------------------------


def test_hooks_and_closures_run_beside_a_graph() -> None:
    _, (net, opt) = pair("sgd")
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> float:
        fill(net, len(calls))
        return 1.0

    for _ in range(10):
        assert opt.step(closure) == 1.0
    assert calls == ["before", "after"] * 10
    assert_captured(opt)


def test_autograd_sees_that_a_weight_has_changed() -> None:
    _, (net, opt) = pair("sgd")
    for step in range(12):
        fill(net, step)
        opt.step()
    x = torch.ones(1, 6, dtype=torch.float64, requires_grad=True)
    loss, still = net.up(x).sum(), net.q(torch.ones(1, 8, dtype=torch.float64)).sum()
    fill(net, 12, without=("q.weight",))
    opt.step()
    assert_captured(opt)
    still.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_is_flat(tapes: list[Tape]) -> None:
    _, (net, opt) = pair("adam")

    def train(first: int, last: int) -> int:
        for step in range(first, last):
            fill(net, step)
            opt.step()
        gc.collect()
        return sum(isinstance(each, Tensor) for each in gc.get_objects())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what `gc` finds
        before = train(0, 30)
        assert train(30, 200) <= before
    assert_captured(opt)
    assert len(tapes) == 2  # with and without a correction


def test_a_capture_that_fails_leaves_the_step_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    (eager, of_eager), (net, opt) = pair("sgd")

    def fail(_: Double, work: Callable[[], object]) -> Any:
        count = 0

        class Broken(Tape):
            def __torch_dispatch__(self, *given: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count > 100:
                    raise RuntimeError("the stream is used elsewhere")
                return super().__torch_dispatch__(*given, **options)

        with Broken():
            work()

    monkeypatch.setattr(Double, "record", fail)
    texts: list[str] = []
    for step in range(12):
        for each, own in ((eager, of_eager), (net, opt)):
            fill(each, step)
            texts += warnings_of(own.step)
    assert len(texts) == 1
    assert "stream is used elsewhere; say cuda_graph=False" in texts[0]
    assert difference(eager, net) < 1e-10
    assert status(opt) == ["eager, a capture failed: the stream is used elsewhere"]


SENT = ("_foreach_copy_", "copy_", "_local_scalar_dense", "_to_copy")


def test_the_host_reads_and_sends_nothing_in_vain() -> None:
    _, (net, opt) = pair("adam", net=so.constrain(nn.Linear(6, 10, bias=False)).double())
    for step in range(12):
        fill(net, step)
        opt.step()
    names: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in SENT:
                names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    fill(net, 13)
    (each,) = opt._indices[0].captures
    for plan in each._plans:
        plan.replay = lambda: None
    with Names():
        opt.step()
    assert names == ["_foreach_copy_", "copy_"]  # gradients; a number for the next step


# ---- who is captured -----------------------------------------------------------------------------


def test_none_captures_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = so.constrain(nn.Linear(6, 10, bias=False))

    def said() -> str:
        opt = so.StiefelSGD(layer.parameters())
        for step in range(6):
            fill(layer, step)
            opt.step()
        return status(opt)[0]

    assert "captured" in said()
    monkeypatch.setattr(capture, "_MOST_BYTES", 8)
    assert said() == "eager, graphs would keep more than 1 GiB: cuda_graph=True allows it"
    monkeypatch.setattr(capture, "BY_DEFAULT", False)
    assert said() == "eager, cuda_graph=None captures nothing in this version"


def test_the_report_and_the_optimizer_say_how_a_step_was_taken() -> None:
    (eager, of_eager), (net, opt) = pair("sgd")
    for step in range(6):
        for each, own in ((eager, of_eager), (net, opt)):
            fill(each, step)
            own.step()
    assert str(so.report(net, opt)).endswith("\nlast step: captured, 1 CUDA graph")
    assert str(opt).endswith("\nLast step: captured, 1 CUDA graph.")
    assert so.report(eager, of_eager).how_stepped == "eager, cuda_graph=False"
    assert not so.report(net).how_stepped


def test_none_is_false_until_a_gpu_has_passed_the_check() -> None:
    results = json.loads((RESULTS / "step_time_gpu.json").read_text(encoding="utf-8"))
    has_passed = results.get("failed") == []
    assert ("BY_DEFAULT: Final = True" in inspect.getsource(capture)) <= has_passed


@pytest.mark.parametrize("mode", [True, False])
def test_deterministic_algorithms_are_eager(mode: bool) -> None:
    _, (net, opt) = pair("sgd")
    torch.use_deterministic_algorithms(mode)
    try:
        for step in range(8):
            fill(net, step)
            opt.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert ("deterministic" in status(opt)[0]) == mode


def test_an_option_that_changes_in_every_step_is_not_captured(tapes: list[Tape]) -> None:
    (eager, of_eager), (net, opt) = pair("sgd")
    for step in range(12):
        for each, own in ((eager, of_eager), (net, opt)):
            fill(each, step)
            own.param_groups[0]["momentum"] = 0.9 - 0.01 * step
            own.step()
    assert difference(eager, net) == 0
    assert status(opt) == ["eager, an option has changed since the step before"]
    assert not tapes


def test_a_refusal_names_the_option_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = so.constrain(nn.Linear(6, 10))
    with pytest.raises(ValueError, match=r"`cuda_graph` must be None or False.*nonfinite"):
        so.StiefelSGD(layer.parameters(), nonfinite="raise", cuda_graph=True)
    with pytest.raises(TypeError, match=r"`cuda_graph` must be"):
        so.StiefelSGD(layer.parameters(), cuda_graph="yes")

    class Strange(so.StiefelSGD):
        def rule_for(self, group: Any) -> Any:
            return super().rule_for(group)

    with pytest.raises(ValueError, match="Strange does not say that its rule is capturable"):
        Strange(layer.parameters(), cuda_graph=True)
    assert "captured" not in str(Strange(layer.parameters()))
    monkeypatch.delitem(device.RECORDERS, "cpu")
    opt = so.StiefelSGD(layer.parameters(), cuda_graph=True)
    fill(layer, 0)
    with pytest.raises(ValueError, match=r"`cuda_graph` must be.*device of its weights, cpu"):
        opt.step()
