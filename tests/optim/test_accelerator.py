"""The step of an accelerator: nothing waits for it, few products, little memory, the same numbers.

No accelerator is needed: `as_accelerator` makes the package believe that the CPU is one.
"""

from __future__ import annotations

import gc
import math
import warnings
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import (
    IS_ON_CPU,
    RULES,
    TABLE,
    backward,
    constrained,
    every_rule,
    fill,
    model,
    optimizer,
    through_file,
    train,
    tried_with,
)
from held import Calls, bytes_of, peak_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import stiefel_opt as so
from stiefel_opt.numerics.device import index_on

pytestmark = pytest.mark.usefixtures("as_accelerator")

READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")


class Counted(Calls):
    """Also calls that wait for a device.

    Torch's own Adam reads the step numbers of plain parameters, which it keeps on the host.
    """

    def __init__(self, opt: Any) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.on_host = {
            state["step"].data_ptr()
            for parameter, state in opt.state.items()
            if "step" in state and not isinstance(parameter, so.ManifoldParameter)
        }

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READS and args[0].data_ptr() not in self.on_host:
            self.waits.append(name)
        return super().__torch_dispatch__(func, _, args, kwargs)


def steady(
    name: str, shape: tuple[int, ...], reading: so.Stiefel | None = None, **options: Any
) -> tuple[nn.Parameter, Any]:
    """A weight after nine steps along a gradient whose spectral norm is 30."""
    generator = torch.Generator().manual_seed(0)
    value = torch.linalg.qr(torch.randn(shape, generator=generator)).Q
    weight = so.ManifoldParameter(value, reading or so.Stiefel())
    rule = TABLE[name].optimizer
    opt = rule([weight], lr=1e-3, **options)
    grad = torch.randn(shape, generator=generator)
    weight.grad = 30 * grad / torch.linalg.matrix_norm(grad, 2, keepdim=True)
    for _ in range(9):
        opt.step()
    return weight, opt


# ---- what a step costs ---------------------------------------------------------------------------

BARS = [
    ("sgd", (512, 64), 10),
    ("sgd", (512, 256), 14),
    ("sgd", (256, 256), 9.1),
    ("adam", (512, 64), 14),
    ("adam", (512, 256), 18),
    ("adam", (256, 256), 8),
    ("sgd", (128, 2), 7),
    ("adam", (128, 2), 10),
]
# A small weight costs what its calls cost.
CALLS = {"sgd": {"skip": 70, "ignore": 56}, "adam": {"skip": 106, "ignore": 91}}


@pytest.mark.parametrize(
    ("name", "shape", "bar", "nonfinite"),
    [(*row, choice) for row, choice in in_turn(BARS, ["skip", "ignore", "skip"])],
)
def test_a_steady_step_needs_few_products_and_calls(
    name: str, shape: tuple[int, int], bar: float, nonfinite: str
) -> None:
    _, opt = steady(name, shape, nonfinite=nonfinite)
    found = []
    for _ in range(2):
        with Counted(opt) as counted:
            opt.step()
        found.append(counted.multiplications / (shape[0] * shape[1] ** 2))
        assert counted.others <= CALLS[name][nonfinite]
    assert sum(found) / len(found) <= bar


@pytest.mark.parametrize(("name", "more"), [("sgd", 12), ("adam", 14), ("adamw", 14)])
def test_a_learned_scale_needs_few_calls_more(name: str, more: int) -> None:
    found = []
    for learn_scale in (False, True):
        _, opt = steady(name, (64, 8), so.Stiefel(learn_scale=learn_scale))
        with Counted(opt) as counted:
            for _ in range(8):
                opt.step()
        found.append(counted.others)
    assert found[1] - found[0] <= 8 * more


@pytest.mark.parametrize(
    ("name", "nonfinite", "fused"), in_turn(RULES, ["skip", "ignore"], [None, None, False])
)
def test_a_steady_step_waits_for_nothing_and_copies_nothing_to_the_host(
    name: str, nonfinite: str, fused: bool | None
) -> None:
    """Heads, ranges of rows with plain ones, squares, convolutions and plain parameters."""
    net, options = model(), {"fused": fused} if TABLE[name].of_torch else {}
    opt = optimizer(name, net.named_parameters(), nonfinite=nonfinite, **options)
    train(net, opt, 0, 10)  # past two steps that correct rounding
    copied: list[Tensor] = []
    original = Tensor.cpu

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.append(tensor)
        return original(tensor, *args, **kwargs)

    for step in range(10, 13):
        backward(net, step)
        with Counted(opt) as counted, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "cpu", counting)
            opt.step()
        assert counted.waits == []
        assert copied == []


MANY, ALONE = [(512, 64)] * 32, [(512, 64)]  # those of one matrix live at the same time


@pytest.mark.parametrize(
    ("name", "shapes", "bar", "machine"),
    [
        ("sgd", MANY, 1.5, "as_accelerator"),
        ("adam", MANY, 2.0, "as_accelerator"),
        ("sgd", ALONE, 5.1, "as_accelerator"),
        ("adam", ALONE, 8.2, "as_accelerator"),
        ("sgd", ALONE, 3.6, "cpu"),
        ("adam", ALONE, 7.0, "cpu"),
    ],
)
@pytest.mark.parametrize("nonfinite", ["skip", pytest.param("ignore", marks=pytest.mark.slow)])
def test_temporaries_stay_below_the_parameters(
    name: str,
    shapes: list[tuple[int, int]],
    bar: float,
    machine: str,
    nonfinite: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if machine == "cpu":
        monkeypatch.setattr(IS_ON_CPU, lambda _: True)
    monkeypatch.setattr("stiefel_opt.optim.blocks._BYTES_ELSEWHERE", 2**19)  # an eighth of many
    generator = torch.Generator().manual_seed(0)
    start = torch.linalg.qr(torch.randn(shapes[0], generator=generator)).Q
    weights = [so.ManifoldParameter(start.clone()) for _ in shapes]
    rule = TABLE[name].optimizer
    opt = rule(weights, lr=1e-3, nonfinite=nonfinite)
    for weight in weights:
        weight.grad = 0.01 * torch.randn(weight.shape, generator=generator)
    for _ in range(3):
        opt.step()
    peak = peak_bytes(opt.step)
    assert 0 < peak <= bar * bytes_of(weights), peak / bytes_of(weights)
    before = bytes_that_live()
    for _ in range(5):
        opt.step()
    # The length of the last step is kept, two matrices of m x m or less, and of none before it.
    assert bytes_that_live() - before <= 1.5 * 2 * 4 * len(shapes) * shapes[0][1] ** 2


def bytes_that_live() -> int:
    """Bytes of the memory that tensors of Python share."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


# ---- the same numbers ----------------------------------------------------------------------------


def trained(
    name: str,
    dtype: torch.dtype,
    steps: int,
    host: bool,
    spoil: dict[int, str],
    size: float = 1.0,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Train with gradients that depend on the step only; in `spoil` those of a layer are NaN."""
    with pytest.MonkeyPatch.context() as patch:
        if host:
            patch.setattr(IS_ON_CPU, lambda tensor: tensor.device.type == "cpu")
        net = so.retag(model().to(dtype))
        opt = optimizer(name, net.named_parameters(), **{"weight_decay": 0, **options})
        for step in range(steps):
            fill(net.parameters(), step)
            for parameter in net.parameters():
                parameter.grad *= size
            if step in spoil:
                net.get_parameter(spoil[step]).grad.view(-1)[1] = torch.nan
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                opt.step()
                opt.state_dict()  # where skipped steps are told at the latest
    return net, opt


@pytest.mark.parametrize(
    ("name", "nonfinite", "spoil"),
    [
        *((*row, {}) for row in in_turn(RULES, ["skip", "ignore"])),
        *((name, "skip", {5: "up.weight"}) for name in RULES),
    ],
)
def test_the_steps_are_those_of_a_cpu(name: str, nonfinite: str, spoil: dict[int, str]) -> None:
    """Also behind one that was skipped, of which the host learns late: it is not counted."""
    size = 0.05 if spoil else 1.0  # no step is cut
    found = [
        trained(name, torch.float64, 12, host, spoil, size, nonfinite=nonfinite)[0]
        for host in (False, True)
    ]
    for (key, one), two in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=TABLE[name].unread, msg=key)
    assert so.orthonormality_error(found[0]) < 1e-14


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1), "falls"], ids=str)
@pytest.mark.parametrize("shape", [(40, 8), (96, 48)])
def test_every_second_slope_may_be_steep(shape: tuple[int, int], lr: float | Tensor | str) -> None:
    """The slope of a step is known to the next one, which is about another."""
    generator = torch.Generator().manual_seed(0)
    weight = so.ManifoldParameter(torch.linalg.qr(torch.randn(shape, generator=generator)).Q)
    opt = so.StiefelSGD([weight], lr=0.1 if isinstance(lr, str) else lr)
    for step in range(40):
        weight.grad = 1e-2 * torch.randn(shape, generator=generator)
        if isinstance(lr, str):
            opt.param_groups[0]["lr"] = 0.1 if step % 2 else 1e-4
        if step % 2:
            weight.grad += 100 * weight.detach()
        opt.step()
        assert so.orthonormality_error(weight) < (1e-4 if step % 2 else 2e-6), step


@pytest.mark.parametrize("shapes", [((40, 8), (40, 8)), ((40, 8), (30, 8))])
@pytest.mark.parametrize("slopes", [(0.2, 0.2), (10.0, 0.2)])
def test_gradients_may_take_turns(
    shapes: tuple[tuple[int, int], ...], slopes: tuple[float, float]
) -> None:
    """Rounding is removed from each weight after eight of its own steps, by its own slope."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        so.ManifoldParameter(torch.linalg.qr(torch.randn(shape, generator=generator)).Q)
        for shape in shapes
    ]
    opt = so.StiefelSGD(weights, lr=0.1)
    for step in range(160):
        opt.zero_grad()
        weight, slope = weights[step % 2], slopes[step % 2]
        noise = torch.randn(weight.shape, generator=generator)
        weight.grad = slope * weight.detach() + 1e-2 * noise
        opt.step()
        assert all(so.orthonormality_error(w) < 1e-4 for w in weights), step


@tried_with("sgd", "adam")
def test_the_others_move_by_the_same_bits_beside_a_nan(name: str) -> None:
    """In the steps behind it their numbers are those of the device, and of others the longest."""
    for steps in (4, 6):
        spoilt, _ = trained(name, torch.float32, steps, False, {3: "k.weight"})
        clean, _ = trained(name, torch.float32, steps, False, {})
        for (key, one), two in zip(spoilt.named_parameters(), clean.parameters(), strict=True):
            if steps == 4 or key == "k.weight":
                assert torch.equal(one, two) is (key != "k.weight"), key
            else:
                torch.testing.assert_close(one, two, rtol=0, atol=1e-5, msg=key)


@every_rule
def test_gradients_may_come_and_go(name: str) -> None:
    """Which exist is known to the host: no reason to wait."""
    nets = [so.retag(model().double()) for _ in range(2)]
    opts = [optimizer(name, net.named_parameters(), weight_decay=0) for net in nets]
    for step in range(12):
        for index, (net, opt) in enumerate(zip(nets, opts, strict=True)):
            backward(net, step)
            for number, parameter in enumerate(net.parameters()):
                if (number + step) % 3 == 0 and step > 1:
                    parameter.grad = None
            with pytest.MonkeyPatch.context() as patch:
                if index:
                    patch.setattr(IS_ON_CPU, lambda _: True)
                with Counted(opt) as counted:
                    opt.step()
            assert index or step < 10 or counted.waits == []
    for (key, one), two in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=TABLE[name].unread, msg=key)
    rounding = 1e-10 if TABLE[name].searches else 1e-13
    assert all(so.orthonormality_error(p) < rounding for p in constrained(nets[0]).values())


@tried_with("sgd", "adam-amsgrad")
def test_a_checkpoint_continues_the_training(name: str) -> None:
    """To rounding, as the bounds of the step before are not saved; bit for bit if that is asked."""
    for is_exact in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            asked = "are_deterministic_algorithms_enabled"
            patch.setattr(torch, asked, lambda is_exact=is_exact: is_exact)
            net, opt = trained(name, torch.float64, 11, False, {})
            fresh = so.retag(model(5).double())
            fresh_opt = optimizer(name, fresh.named_parameters(), weight_decay=0)
            fresh.load_state_dict(through_file(net.state_dict()))
            fresh_opt.load_state_dict(through_file(opt.state_dict()))
            for step in range(11, 17):  # past a step that removes rounding
                generator = torch.Generator().manual_seed(step)
                for one, two in zip(net.parameters(), fresh.parameters(), strict=True):
                    one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype)
                    two.grad = one.grad
                opt.step()
                fresh_opt.step()
        atol = 0.0 if is_exact else 1e-12
        for (key, one), two in zip(net.named_parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=atol, msg=key)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_rate_that_is_a_tensor_takes_rounding_out_on_steep_slopes_too(nesterov: bool) -> None:
    """Leading eigenvectors: lr |X'G| is above 0.26, where rounding would grow from step to step."""
    slope = torch.diag(torch.linspace(1, 10, 40))
    generator = torch.Generator().manual_seed(0)
    weight = so.ManifoldParameter(torch.randn(40, 5, generator=generator))
    opt = so.StiefelSGD([weight], lr=torch.tensor(0.1), momentum=0.9, nesterov=nesterov)
    for _ in range(60):
        weight.grad = -slope @ weight.detach()
        opt.step()
        assert so.orthonormality_error(weight) < 1e-6


# ---- around a step -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [torch.bfloat16, torch.int64, torch.float64])
def test_rules_may_return_other_dtypes_than_their_state_has(length: torch.dtype) -> None:
    class Wide(so.optim.StiefelOptimizer):
        def state_for(self, _: Any) -> tuple[so.optim.State, ...]:
            return (so.optim.State("mean_grad", "nm"),)

        def rule_for(self, _: Any) -> Any:
            def rule(X: Tensor, G: Tensor, state: Any, *, lr: Any, **__: Any) -> Any:
                mean = state["mean_grad"].double().lerp(G.double(), 0.1)
                size = torch.ones(X.size(0), 1, 1, dtype=length)
                return torch.linalg.qr(X - lr * G).Q, {"mean_grad": mean}, size

            return rule

        def update_plain(self, *_: Any) -> None:
            raise AssertionError

    weights = [so.ManifoldParameter(torch.eye(6, 3)) for _ in range(2)]
    opt = Wide(weights, {"lr": 0.1})
    for step in range(3):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if step == 2:
            weights[1].grad[0, 0] = torch.nan  # type: ignore[index]
        opt.step()
    assert list(opt.skipped_steps().values()) == [1]
    weights[1].grad = None
    opt.step()
    for weight, steps in zip(weights, (4, 2), strict=True):
        expected = torch.full((6, 3), 1 - 0.9**steps)
        torch.testing.assert_close(opt.state[weight]["mean_grad"], expected, rtol=1e-6, atol=0)


def test_an_index_that_is_kept_is_no_fake_and_of_no_transform() -> None:
    elsewhere = torch.device("meta")

    def doubled(x: Tensor) -> Tensor:
        index_on(elsewhere, [7, 3])
        return (2 * x).sum()

    with FakeTensorMode():
        index_on(elsewhere, [7, 3])
    torch.func.grad(doubled)(torch.ones(2))
    torch.func.functionalize(doubled)(torch.ones(2))
    kept = index_on(elsewhere, [7, 3])
    assert type(kept) is Tensor
    assert not torch._is_functional_tensor(kept)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept)
    assert index_on(elsewhere, [7, 3]) is kept
    with torch.inference_mode():
        assert not index_on(elsewhere, [7, 4]).is_inference()


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_checkpoint_ends_what_a_skipped_step_has_cost(name: str) -> None:
    """Numbers that the host has no more are read again where it waits in any case."""
    weight, opt = steady(name, (64, 8))

    def calls() -> int:
        for _ in range(4):
            opt.step()
        with Counted(opt) as counted:
            for _ in range(8):
                opt.step()
        return counted.others

    before = calls()
    good, weight.grad = weight.grad, torch.full_like(weight, math.nan)
    opt.step()
    weight.grad = good
    after_a_skip = calls()
    assert after_a_skip > before
    with pytest.warns(UserWarning, match="not finite"):
        opt.state_dict()
    assert calls() <= before
