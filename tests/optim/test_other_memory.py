"""Memory, devices, precision and threads that others set or move: a step uses what is there."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import (
    RULES,
    TABLE,
    every_rule,
    fill,
    on_machines,
    optimizer,
    tried_with,
)
from held import counted_memory
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stiefel_opt as so


def pair(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """Two equal weights, joined in a step, and a plain one."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    found = [so.ManifoldParameter(torch.linalg.qr(value).Q.to(dtype)) for value in values]
    return [*found, nn.Parameter(torch.ones(4, dtype=dtype))]


def train(params: list[Any], opt: Any, first: int, last: int) -> None:
    for step in range(first, last):
        fill(params, step)
        opt.step()


# ---- state and parameters in other memory --------------------------------------------------------


def give_other_data(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.clone()


def share(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.share_memory_()


def set_storage(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.set_(tensor.clone())


MOVES = {"data": give_other_data, "shared": share, "set_": set_storage}


@pytest.mark.parametrize(
    ("name", "move", "of_state"),
    [
        *((*row, True) for row in in_turn([*RULES, "sgd"], MOVES)),
        *((*row, False) for row in in_turn([*RULES, "adam"], ["data", "shared", "data"])),
    ],
)
def test_what_got_other_memory_is_what_the_step_uses(name: str, move: str, of_state: bool) -> None:
    """State or parameters; what they have left is not written to."""
    params, others = pair(), pair()
    opt, other_opt = optimizer(name, params), optimizer(name, others)
    train(params, opt, 0, 5)
    train(others, other_opt, 0, 5)
    state = [tensor for each in opt.state.values() for tensor in each.values()]
    moved = state if of_state else params
    left, kept = [each.detach().clone() for each in moved], [each.data for each in moved]
    with torch.no_grad():
        MOVES[move](moved)
    train(params, opt, 5, 10)
    train(others, other_opt, 5, 10)
    for old, value in zip(kept, left, strict=True):  # what is shared keeps its storage
        assert move != "data" or torch.equal(old, value)
    saved, expected = opt.state_dict()["state"], other_opt.state_dict()["state"]
    for index, each in expected.items():
        assert saved[index].keys() == each.keys()
        for key, tensor in each.items():
            close = {"rtol": 1e-10, "atol": 1e-11}  # other memory, other order of sums
            torch.testing.assert_close(saved[index][key], tensor, **close, msg=f"{index}.{key}")
    assert [float(saved[index]["step"]) for index in (0, 1)] == [10, 10]
    for one, two in zip(params, others, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


@on_machines(cpu="sgd adam", as_accelerator="sgd")
def test_another_value_written_through_data_counts_at_once(name: str) -> None:
    """Without a change of version: what the next step starts from is the new value."""
    params = pair()
    opt = optimizer(name, params)
    train(params, opt, 0, 3)
    start = torch.eye(6, 3, dtype=torch.float64)
    params[0].data = start.clone()
    for group in opt.param_groups:
        group["lr"] = 1e-12
    train(params, opt, 3, 4)
    torch.testing.assert_close(params[0].detach(), start, rtol=0, atol=1e-9)


@pytest.mark.parametrize("offloaded", ["weights", "state"])
@every_rule
def test_what_was_offloaded_is_freed(name: str, offloaded: str) -> None:
    """As torch's optimizers do, after `p.data = p.data.cpu()` or the same for the state."""
    with counted_memory() as held:
        params = [so.ManifoldParameter(torch.eye(2**12, 9)) for _ in range(2)]
        opt = optimizer(name, params)
        for _ in range(2):
            for parameter in params:
                parameter.grad = torch.full_like(parameter, 1e-3)
            opt.step()
        states = [opt.state[parameter] for parameter in params]
        weights = sum(parameter.nbytes for parameter in params)
        kept = sum(tensor.nbytes for state in states for tensor in state.values())
        for parameter, state in zip(params, states, strict=True):
            parameter.grad = None
            if offloaded == "weights":
                parameter.data = torch.zeros(0)
            else:
                state.update({key: torch.zeros(0) for key in state})
    left = kept if offloaded == "weights" else weights
    assert left <= held.bytes < left + 0.1 * weights, (held.bytes, weights, kept)


@pytest.fixture
def _swapping() -> Iterator[None]:
    """Modules swap their parameters instead of setting `.data`."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def convert(net: nn.Module) -> None:
    net.double()


def load(net: nn.Module) -> None:
    net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()})


@pytest.mark.parametrize(
    ("name", "swap", "steps"), in_turn([*RULES, "adam"], [convert, load], [0, 0, 2])
)
@pytest.mark.usefixtures("_swapping")
def test_a_step_before_any_forward_knows_a_parameter_that_was_swapped(
    name: str, swap: Callable[[nn.Module], None], steps: int
) -> None:
    """A swap takes the tag along; the object, which the optimizer holds, is the same."""
    net = nn.Sequential(so.constrain(nn.Linear(4, 3), "weight"), so.constrain(nn.Linear(3, 2)))
    opt = optimizer(name, [p for p in net.parameters() if p.ndim > 1])
    params = [net[0].weight, net[1].weight]
    train(params, opt, 0, steps)
    opt.load_state_dict(opt.state_dict())  # which must not forget
    swap(net)
    assert not hasattr(net[0].weight, "manifold")
    train(params, opt, steps, steps + 3)
    assert so.orthonormality_error(net) < 1e-5
    assert net[0].weight.manifold == so.Stiefel()
    net(torch.ones(2, 4, dtype=params[0].dtype))  # finds its tags: no warning
    so.release(net, "0.weight")
    swap(net)
    train(params, opt, 3, 4)
    assert so.orthonormality_error(params[0].mT) > 1e-3  # free, as it was asked to be
    assert so.orthonormality_error(net) < 1e-5


# ---- what a user puts beside ---------------------------------------------------------------------


@tried_with("sgd")
@pytest.mark.filterwarnings("ignore:.*not finite")
def test_the_default_device_is_not_asked(name: str) -> None:
    params, others = pair(torch.float32), pair(torch.float32)
    with torch.device("meta"):
        opt = optimizer(name, params)
    other_opt = optimizer(name, others)
    for step in range(4):
        for members, rule, device in ((params, opt, "meta"), (others, other_opt, "cpu")):
            generator = torch.Generator().manual_seed(step)
            for parameter in members:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if step == 2:
                members[0].grad[0, 0] = torch.nan
            with torch.device(device):
                rule.step()
    with torch.device("meta"):
        assert list(opt.skipped_steps().values()) == [1]
        opt.state_dict()
    for one, two in zip(params, others, strict=True):
        assert torch.equal(one, two)


# ---- a weight that is edited between steps -------------------------------------------------------


@pytest.mark.parametrize(("size", "nesterov"), in_turn([1e-3, 1e-2, 1e-1, 1e-1], [False, True]))
def test_an_edited_weight_changes_the_momentum_by_no_more_than_its_turn(
    size: float, nesterov: bool, generator: torch.Generator
) -> None:
    """What is deferred belongs to the point that was written: |dU| <= lr |U|^2 |dX|."""
    shape, options = (20, 4), {"generator": generator, "dtype": torch.float64}
    weight = so.ManifoldParameter(torch.linalg.qr(torch.randn(shape, **options)).Q)
    opt = so.StiefelSGD([weight], lr=0.1, nesterov=nesterov)
    for _ in range(10):
        weight.grad = torch.randn(shape, **options)
        opt.step()
    old = weight.detach().clone()
    skew, normal = opt.velocity(weight)
    left, _, right = torch.linalg.svd(
        old + size * torch.randn(shape, **options), full_matrices=False
    )
    point = left @ right
    with torch.no_grad():
        weight.copy_(point)
    change = opt.velocity(weight)[1] - normal
    tangent = change - point @ (point.mT @ change)
    length, edit = (float(torch.linalg.matrix_norm(t, 2)) for t in (normal, point - old))
    relative = float(tangent.norm() / normal.norm())
    assert relative <= 1.05 * 0.1 * length * edit
    torch.testing.assert_close(opt.velocity(weight)[0], skew, rtol=0, atol=1e-12)
    weight.grad = torch.zeros(shape, dtype=torch.float64)
    opt.step()
    assert so.orthonormality_error(weight) < 1e-13
    normal = opt.velocity(weight)[1]
    assert float((weight.detach().mT @ normal).abs().max()) < 1e-12 * float(normal.norm())


# ---- gradients at the edge -----------------------------------------------------------------------


def lines_run(call: Callable[[], Any]) -> int:
    """The number of lines of Python that a call runs."""
    count = 0

    def trace(_: Any, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.filterwarnings("ignore:.*not finite")
@tried_with("sgd")
def test_naming_what_was_skipped_is_linear_in_the_parameters(name: str) -> None:
    found = []
    for number in (150, 300):
        params = [so.ManifoldParameter(torch.eye(4, 2)) for _ in range(number)]
        opt = optimizer(name, [(f"w{i}", p) for i, p in enumerate(params)])
        for parameter in params:
            parameter.grad = torch.ones(4, 2)
        opt.step()
        for parameter in params:
            parameter.grad = torch.full((4, 2), torch.nan)
        with warnings.catch_warnings(record=True):
            found.append([lines_run(opt.step), lines_run(opt.step), lines_run(opt.skipped_steps)])
        assert opt.skipped_steps() == {f"w{i}": 2 for i in range(number)}
    for few, many in zip(*found, strict=True):
        assert many <= 2.2 * few + 500, (few, many)


@tried_with("sgd")
def test_dampening_is_exact_beside_a_first_step(name: str) -> None:
    """Where the members of a batch have different step numbers, as for one alone."""
    together, alone = pair()[:2], pair()[:2]
    options = {"weight_decay": 0, "dampening": 0.3}
    options |= {"nesterov": False} if "nesterov" in TABLE[name].options else {}
    opt = optimizer(name, together, **options)
    own = [optimizer(name, [parameter], **options) for parameter in alone]
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for index in (0, 1):
            grad = torch.randn(6, 3, generator=generator, dtype=torch.float64)
            for parameter in (together[index], alone[index]):
                parameter.grad = None if (index, step) == (1, 0) else grad
        for rule in (opt, *own):
            rule.step()
    for one, two in zip(together, alone, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-13)


# ---- what belongs to the process -----------------------------------------------------------------


class AtProducts(TorchDispatchMode):
    """Call a function at every product of matrices of this thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.rstrip("_") in ("mm", "bmm", "addmm", "baddbmm"):
            self.call()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _lowered_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@tried_with("sgd", "adam")
@pytest.mark.usefixtures("_lowered_precision")
def test_two_threads_step_in_full_precision_and_leave_what_was_set(name: str) -> None:
    """The first waits in the middle of its step until the second is in the middle of its own."""
    entered = {"first": threading.Event(), "second": threading.Event()}
    finished = threading.Event()
    seen: dict[str, set[str]] = {"first": set(), "second": set()}
    failures: list[BaseException] = []

    def work(who: str) -> None:
        try:
            params = pair(torch.float32)
            opt = optimizer(name, params)
            for parameter in params:
                parameter.grad = torch.ones_like(parameter)

            def at_product() -> None:
                first_time = not entered[who].is_set()
                entered[who].set()
                if first_time and who == "first":
                    entered["second"].wait(0.5)  # in vain, if steps wait for each other
                elif first_time:
                    finished.wait(0.5)
                seen[who].add(torch.get_float32_matmul_precision())

            if who == "second":
                entered["first"].wait(5)
            with AtProducts(at_product):
                opt.step()
            if who == "first":
                finished.set()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(who,)) for who in entered]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert seen == {"first": {"highest"}, "second": {"highest"}}
    assert torch.get_float32_matmul_precision() == "high"
