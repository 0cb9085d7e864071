"""A small model with every kind of parameter, its optimizers, and bit-for-bit comparison.

What the tests of the optimizers' contract share: everything a user of torch may do to them.
"""

from __future__ import annotations

import copy
import io
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from optimizers import OF_CORE
from optimizers import OPTIMIZERS as OPTIMIZERS
from optimizers import PUBLISHED as PUBLISHED
from optimizers import RULES as RULES
from optimizers import TABLE as TABLE
from torch import Tensor, nn

import stiefel_opt as so

Step = Callable[[], None]

# What of the package's inside is patched to make a CPU look like an accelerator.
IS_ON_CPU = "stiefel_opt.numerics.device._is_on_cpu"

every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
every_rule = pytest.mark.parametrize("name", RULES)


def of_clients(test: Any, count: int = 1) -> list[str]:
    """As many rules of clients, if there are any: others for each law, by its name."""
    names = [name for name in RULES if name not in OF_CORE and not TABLE[name].searches]
    first = zlib.crc32(test.__name__.encode())
    return [names[(first + index) % len(names)] for index in range(count)] if names else []


def tried_with(*names: str) -> Callable[[Any], Any]:
    """Try a law of the one base class with these rules of the core, and with one of a client."""

    def mark(test: Any) -> Any:
        return pytest.mark.parametrize("name", [*names, *of_clients(test)])(test)

    return mark


def on_machines(**rules: str) -> Callable[[Any], Any]:
    """Try a law of the one base class with other optimizers on each machine of `conftest.py`.

    ``on_machines(cpu="sgd", compiled="adam")`` runs the test with ``name="sgd"`` on the CPU, ...
    Each machine but the compiled ones tries a rule of a client, too. Tracing takes seconds:
    ``slowly_compiled="adam"`` is marked slow.
    """

    def mark(test: Any) -> Any:
        rows, others = [], of_clients(test, 2)
        for machine, names in rules.items():
            marks = [pytest.mark.slow] if machine.startswith("slowly_") else []
            chosen = [*names.split(), *([] if "compiled" in machine else others[:1])]
            others = others[1:]
            machine = machine.removeprefix("slowly_")
            rows += [pytest.param(name, machine, marks=marks) for name in chosen]
        parametrized = pytest.mark.parametrize(("name", "machine"), rows, indirect=["machine"])
        return pytest.mark.usefixtures("machine")(parametrized(test))

    return mark


class Model(nn.Module):
    """Two equal wide weights with heads, a tall, a square and a convolution, rows, and plain ones.

    `fused` is constrained in two ranges of rows; its other rows, `out` and all biases are plain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q = so.constrain(nn.Linear(8, 6), heads=2)
        self.k = so.constrain(nn.Linear(8, 6), heads=2)
        self.up = so.constrain(nn.Linear(6, 10), scale=2.0)
        self.turn = so.constrain(nn.Linear(10, 10, bias=False))
        self.fused = so.constrain(nn.Linear(10, 14), rows=((0, 4), (6, 12)), heads=(1, 2))
        self.filter = so.constrain(nn.Conv1d(1, 2, 3))
        self.out = nn.Linear(14, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.turn(self.up(torch.tanh(self.q(x)) * self.k(x)))
        filtered = self.filter(self.fused(hidden).unsqueeze(1)).mean(1)
        return self.out(torch.nn.functional.pad(filtered, (0, 2)))


def model(seed: int = 0) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model()


def warnings_of(action: Callable[[], Any]) -> list[str]:
    """The texts of the warnings of an action."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


def optimizer(name: str, params: Any, **options: Any) -> Any:
    if name in PUBLISHED:
        return PUBLISHED[name].optimizer(params, **{"lr": 0.05, **options})
    rule, defaults = OPTIMIZERS[name]
    return rule(params, **{**defaults, **options})


def large_eps(name: str) -> dict[str, Any]:
    """The eps of torch's Adam, which moves plain parameters in their own dtype, is 0 in float16."""
    return {"eps": 1e-3} if TABLE[name].adaptive else {}


def backward(net: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    """Fill the gradients of step number `step`, the same for the same model; return the loss."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(5, 8, generator=generator, dtype=next(net.parameters()).dtype)
    for parameter in net.parameters():
        parameter.grad = None
    found = net(x)
    error = found - x[:, : found.size(-1)]
    loss = factor * (error.abs() if error.is_complex() else error).square().mean()
    loss.backward()
    return loss.detach()


def train(net: nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        backward(net, step)
        opt.step()


def trained(name: str = "sgd", steps: int = 3, **options: Any) -> tuple[Model, Any]:
    """A model and its optimizer after a few steps."""
    net = model()
    opt = optimizer(name, net.named_parameters(), **options)
    train(net, opt, 0, steps)
    return net, opt


def twins(name: str, **options: Any) -> list[tuple[Model, Any]]:
    """Two equal models, and the same optimizer of each."""
    nets = [model(), model()]
    return [(net, optimizer(name, net.parameters(), **options)) for net in nets]


def step_and_tell(opt: torch.optim.Optimizer) -> None:
    """An accelerator, for which nobody waits, tells of skipped steps no later than this."""
    opt.step()
    opt.state_dict()


def constrained(net: nn.Module) -> dict[str, so.ManifoldParameter]:
    return {n: p for n, p in net.named_parameters() if isinstance(p, so.ManifoldParameter)}


def through_file(value: Any, weights_only: bool = True) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=weights_only)


def snapshot(net: nn.Module, opt: torch.optim.Optimizer) -> Any:
    """A copy of all that an optimizer may change: values, gradients, state, groups."""
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in opt.param_groups]
    values = [(p.detach(), p.grad, dict(opt.state.get(p, {}))) for p in net.parameters()]
    return copy.deepcopy((values, groups, len(opt.state)))


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Compare nested dicts, lists and tensors bit for bit."""
    assert type(left) is type(right), path
    if isinstance(left, Tensor):
        assert left.shape == right.shape, path
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), f"{path}: {(left - right).abs().max()}"
    elif isinstance(left, dict):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert left == right, path


def assert_same_training(left: Any, right: Any) -> None:
    """Compare the values and all state of two (model, optimizer) pairs bit for bit."""
    for (net, opt), (other_net, other_opt) in [(left, right)]:
        for (name, p), q in zip(net.named_parameters(), other_net.parameters(), strict=True):
            assert_same(p.detach(), q.detach(), name)
            mine, theirs = dict(opt.state.get(p, {})), dict(other_opt.state.get(q, {}))
            assert_same(dict(sorted(mine.items())), dict(sorted(theirs.items())), name)


def fill(params: Iterable[Any], step: int, without: tuple[int, ...] = ()) -> None:
    """Give each parameter the gradient of a step, but for those in some places."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(params):
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = None if index in without else grad.to(parameter.dtype)


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
