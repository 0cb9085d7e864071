"""A compiled step does what the eager one does, also when gradients, rates or values change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
    backward,
    constrained,
    fill,
    model,
    optimizer,
    train,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import stiefel_opt as so

QUICK = ("sgd",)
slow = pytest.mark.slow
# Tracing takes its time: what is alike in all rules is tried with one, the others by name.
some_rules = pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=slow) for name in RULES]
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Profiler record function"),
    pytest.mark.filterwarnings("ignore:.*lru_cache"),
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),  # it saw no eager one
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch about itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def few() -> list[nn.Parameter]:
    """Two equal weights, joined in a step, and two plain ones of other shapes."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    found = [so.ManifoldParameter(torch.linalg.qr(value).Q) for value in values]
    return [*found, nn.Parameter(torch.ones(5).double()), nn.Parameter(torch.ones(3, 5).double())]


class Both:
    """The same training twice: compiled, and eager. `check` compares all values."""

    def __init__(
        self,
        name: str,
        make: Callable[[], list[Any]] = few,
        groups: Callable[[list[Any]], list[Any]] = list,
        **options: Any,
    ) -> None:
        self.params, self.others = make(), make()
        self.opt = optimizer(name, groups(self.params), **options)
        self.eager = optimizer(name, groups(self.others), **copy.deepcopy(options))
        self.call: Callable[[], Any] = self.opt.step

    def compile(self, **options: Any) -> None:
        self.call = torch.compile(self.opt.step, **{"backend": "eager", **options})

    def step(self, number: int, without: tuple[int, ...] = ()) -> list[bool]:
        """Take a step; say which parameters have moved."""
        before = [p.detach().clone() for p in self.params]
        fill(self.params, number, without)
        fill(self.others, number, without)
        self.call()
        self.eager.step()
        moved = [not torch.equal(p, b) for p, b in zip(self.params, before, strict=True)]
        assert moved == [p.grad is not None for p in self.params]
        self.check()
        return moved

    def check(self, bound: float = 1e-5) -> None:  # torch's own Adam takes powers in float32
        for index, (one, two) in enumerate(zip(self.params, self.others, strict=True)):
            constrained = isinstance(one, so.ManifoldParameter)
            exact = min(bound, 1e-10) if one.dtype == torch.float64 else bound
            atol = exact if constrained else bound
            torch.testing.assert_close(one, two, rtol=0, atol=atol, msg=f"{index}")
            assert (
                not constrained or so.orthonormality_error(one) < 100 * torch.finfo(one.dtype).eps
            )


# ---- sets of gradients ---------------------------------------------------------------------------


# Parameters without a gradient, in each step; the first one is eager but with groups.
SETS = {  # a bias that is left out leaves no other one paired with its gradient
    "appears later": [(1, 3), (1, 3), (1,), (), ()],
    "becomes None": [(), (), (2,), (0, 3), ()],
    "groups with rates of their own": [()] * 4,
    "comes and goes": [(1,), (1,), (), (0, 3), ()],
}


def two_groups(params: list[Any]) -> list[Any]:
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 1e-3}]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "eager") for case in list(SETS)[:3]),
        pytest.param("comes and goes", "inductor", marks=slow),
    ],
)
@some_rules
def test_gradients_may_come_and_go(name: str, case: str, backend: str) -> None:
    """Unfrozen layers, experts reached for the first time: as torch's compiled SGD does."""
    in_groups = case.startswith("groups")
    both = Both(name, groups=two_groups if in_groups else list, weight_decay=0)
    for step, without in enumerate(SETS[case]):
        if step == (not in_groups):
            both.compile(backend=backend)
        both.step(step, without)


@slow
@pytest.mark.parametrize("foreach", [None, False])
def test_plain_parameters_of_one_shape_keep_their_gradients(foreach: bool | None) -> None:
    def make() -> list[nn.Parameter]:
        plain = [nn.Parameter(torch.full((3, 2), float(i)).double()) for i in range(3)]
        return [so.ManifoldParameter(torch.eye(4, 2).double()), *plain]

    both = Both("sgd", make, momentum=0.0, weight_decay=0, foreach=foreach)
    both.step(0)
    both.compile()
    for missing in (1, 2, 3):
        both.step(missing, without=(missing,))


@slow
@some_rules
def test_two_sets_that_alternate_are_compiled_once_each(name: str) -> None:
    counter = CompileCounterWithBackend("eager")
    both = Both(name, weight_decay=0)
    both.step(0)
    both.compile(backend=counter)
    for step in range(1, 5):
        both.step(step, without=(0, 2) if step % 2 else (3,))
    early = counter.frame_count
    for step in range(5, 9):
        both.step(step, without=(0, 2) if step % 2 else (3,))
    assert counter.frame_count == early


# ---- gradients that are not finite ---------------------------------------------------------------


@pytest.mark.parametrize("position", [0, pytest.param(1, marks=slow)])
@some_rules
def test_raise_lets_nothing_in(name: str, position: int) -> None:
    both = Both(name, nonfinite="raise", weight_decay=0)
    both.step(0)
    both.compile()
    both.step(1)
    fill(both.params, 2)
    both.params[position].grad[0, 0] = torch.nan
    before = [(p.detach().clone(), copy.deepcopy(dict(both.opt.state[p]))) for p in both.params]
    with pytest.raises(Exception, match=r"must be finite"):
        both.call()
    assert torch.is_grad_enabled()  # which the graph had turned off
    for index, (parameter, (value, state)) in enumerate(zip(both.params, before, strict=True)):
        assert torch.equal(parameter, value), index
        for key, tensor in state.items():
            assert torch.equal(both.opt.state[parameter][key], tensor), (index, key)
    both.step(3)
    both.step(4)


# ---- other options, and tags ---------------------------------------------------------------------


RATES = (0.05, 0.04, 0.02, 0.01, 0.001)


@pytest.mark.parametrize(
    ("name", "option", "values", "own"),
    [
        *(
            pytest.param(name, "lr", RATES, {}, marks=() if name in QUICK else slow)
            for name in RULES
        ),
        pytest.param("sgd", "lr", RATES, {"nesterov": True, "metric": 0.3}, marks=slow),
        pytest.param("sgd", "lr", RATES, {"metric": "euclidean", "momentum": 0.0}, marks=slow),
        ("sgd", "momentum", (0.5, 0.6, 0.7, 0.8, 0.9), {}),
        ("adam", "betas", ((0.5, 0.99), (0.6, 0.98), (0.7, 0.97), (0.8, 0.96), (0.9, 0.95)), {}),
        pytest.param("adam", "radius", (1.0, 2.0, 3.0, 4.0, 5.0), {}, marks=slow),
        pytest.param("adam", "amsgrad", (False, False, True, True, False), {}, marks=slow),
        ("adamw", "weight_decay", (0.1, 1.0, 2.0, 4.0, 8.0), {}),
        *(
            pytest.param(name, "momentum", (0.5, 0.6, 0.7, 0.8, 0.9), {}, marks=slow)
            for name in RULES
            if TABLE[name].may_forget
        ),
        pytest.param(
            "sgd", "nonfinite", ("skip", "ignore", "raise", "skip", "skip"), {}, marks=slow
        ),
    ],
)
def test_an_option_may_change_in_every_step(
    name: str, option: str, values: Any, own: dict[str, Any]
) -> None:
    """The compiler looks at the first change, and takes numbers for variables from then on."""
    both = Both(name, **own, **({} if option == "weight_decay" else {"weight_decay": 0}))
    both.compile(fullgraph=option == "lr")
    for step, value in enumerate(values):
        for rule in (both.opt, both.eager):
            rule.param_groups[0][option] = value
        both.step(step)


def divided(net: nn.Sequential) -> None:
    so.constrain(net[2], heads=2)


def released(net: nn.Sequential) -> None:
    so.release(net[2])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=slow)])
@pytest.mark.parametrize("change", [divided, released])
def test_a_tag_may_change_between_steps(change: Any, backend: str) -> None:
    found = []
    for is_compiled in (False, True):
        net = network()
        opt = so.StiefelAdam(net.parameters(), lr=0.01)
        step = torch.compile(opt.step, backend=backend) if is_compiled else opt.step
        for number in range(8):
            if number == 4:
                change(net)
            opt.zero_grad()
            net(torch.linspace(-1, number, 24).view(2, 12)).square().sum().backward()
            step()
        found.append([parameter.detach() for parameter in net.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "backend"), [("sgd", "eager"), pytest.param("adam", "aot_eager", marks=slow)]
)
def test_a_constraint_where_nothing_constrained_moved_is_followed(name: str, backend: str) -> None:
    """It is seen behind the next step: the compiler has no reason to trace that one anew."""
    net = network()
    opt = optimizer(name, net.parameters(), weight_decay=0)
    for layer in (net[0], net[2]):
        layer.weight.requires_grad_(False)
    step = torch.compile(opt.step, backend=backend, fullgraph=True)
    for number in range(8):
        if number == 2:
            so.constrain(net[3])
        opt.zero_grad()
        net(torch.linspace(-1, number, 24).view(2, 12)).square().sum().backward()
        step()
        assert number < 3 or so.orthonormality_error(net) < 1e-5


def test_without_momentum_a_step_is_traced_once() -> None:
    counter = CompileCounterWithBackend("eager")
    both = Both("sgd", weight_decay=0, momentum=0.0)
    both.compile(backend=counter, fullgraph=True)
    for step in range(10):
        both.step(step)
    assert counter.frame_count <= 2


# ---- a whole training step -----------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        so.constrain(nn.Linear(12, 8), "weight"),
        nn.Tanh(),
        so.constrain(nn.Linear(8, 8), "weight"),
        nn.Linear(8, 1),
    )


@pytest.mark.parametrize("eager_first", [False, pytest.param(True, marks=slow)])
@some_rules
def test_a_whole_training_step_is_compiled(name: str, eager_first: bool) -> None:
    """Forward, backward and step in one function; also where no eager step was taken before."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(4, 5, 12, generator=generator)
    found = []
    for compiled in (True, False):
        net = network()
        opt = optimizer(name, net.parameters(), weight_decay=0)

        def step(x: Tensor, net: nn.Module = net, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        call = step
        for number, x in enumerate(batches):
            if compiled and number == int(eager_first):
                call = torch.compile(step, backend="eager")
            call(x)
        assert so.orthonormality_error(net) < 1e-5
        found.append(list(net.parameters()))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)


def test_the_precision_that_a_user_has_lowered_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code that runs in TF32 would give X'X = I to three digits."""
    seen: list[str] = []

    product = torch.baddbmm

    def spy(*args: Any, **options: Any) -> Tensor:
        seen.append(torch.get_float32_matmul_precision())
        return product(*args, **options)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        weight = so.ManifoldParameter(torch.eye(6, 3))
        opt = so.StiefelSGD([weight], lr=0.1)
        weight.grad = torch.ones(6, 3).cumsum(0)
        opt.step()
        call = torch.compile(opt.step, backend="eager")
        call()
        monkeypatch.setattr(torch, "baddbmm", spy)
        call()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen
    assert set(seen) == {"highest"}


def compiled(fast: str) -> pytest.MarkDecorator:
    """Tracing takes its time: one optimizer by default, the others by name."""
    slow = (pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != fast)
    return pytest.mark.parametrize("name", [fast, *slow])


def prepared(name: str, **options: Any) -> tuple[nn.Module, Any]:
    net = model().double()
    so.retag(net)
    opt = optimizer(name, net.named_parameters(), **options)
    train(net, opt, 0, 2)  # a step makes the state
    return net, opt


@compiled("sgd")
def test_one_graph_serves_every_rate_and_step(name: str) -> None:
    lr = torch.tensor(0.05, dtype=torch.float64)
    net, opt = prepared(name, lr=lr)
    twin, twin_opt = copy.deepcopy((net, opt))
    counter, early = CompileCounterWithBackend("aot_eager"), 0
    compiled = torch.compile(opt.step, fullgraph=True, backend=counter)
    for step in range(2, 12):
        backward(twin, step)
        for own, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            own.grad = theirs.grad.clone()
        for rule in (opt, twin_opt):
            for group in rule.param_groups:
                group["lr"].fill_(0.05 + 0.01 * step)
        compiled()
        twin_opt.step()
        if step == 4:
            early = counter.frame_count
    assert counter.frame_count == early  # whatever the rate and the step
    assert early <= 2
    for key, weight in net.named_parameters():
        # torch's own compiled Adam takes powers of beta in float32
        plain = key.startswith("fused") or key not in constrained(net)
        bound = 1e-5 if plain else 1e-12
        torch.testing.assert_close(weight, twin.get_parameter(key), rtol=0, atol=bound)
        assert plain or opt.state[weight]["step"] == 12
    assert so.orthonormality_error(net) < 1e-12
    train(net, opt, 12, 14)  # and eager steps go on from there
    assert so.orthonormality_error(net) < 1e-12


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@compiled("sgd")
def test_small_steps_of_half_precision_add_up(
    name: str, backend: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Each is lost in the rounding of the parameter, not in that of its master."""
    wide, rows = so.Stiefel(), so.Stiefel(rows=((0, 4), (6, 10)))
    values = [torch.randn(shape, generator=generator) for shape in ((6, 4), (6, 4), (12, 5))]
    both = []
    for _ in range(2):
        params = [
            so.ManifoldParameter(value.to(dtype), manifold)
            for value, manifold in zip(values, (wide, wide, rows), strict=True)
        ]
        both.append((params, optimizer(name, params, lr=torch.tensor(1e-5), weight_decay=0)))
    (params, opt), (others, eager) = both
    steps = [opt.step, eager.step]
    for number in range(21):
        for own, theirs in zip(params, others, strict=True):
            own.grad = theirs.grad = torch.randn(own.shape, generator=generator).add_(2.0).to(dtype)
        for step in steps:
            step()
        if number == 0:
            starts = [opt.state[own]["master"].clone() for own in params]
            steps[0] = torch.compile(opt.step, fullgraph=True, backend=backend)
    for own, theirs, start in zip(params, others, starts, strict=True):
        master, expected = opt.state[own]["master"], eager.state[theirs]["master"]
        torch.testing.assert_close(master, expected, rtol=0, atol=2e-6)
        assert (master - start).abs().max() > 2e-5
        assert torch.equal(master.to(dtype), own)
        assert so.orthonormality_error(master, own.manifold) < 2e-6


def test_groups_that_are_taken_and_put_back_stay_in_one_graph():
    """The list itself is edited, as torch allows: the step is traced anew, without a break."""
    found = []
    for backend in (None, "eager"):
        torch.manual_seed(0)
        layers = [so.constrain(nn.Linear(6, 4)) for _ in range(2)]
        opt = so.StiefelSGD([{"params": list(each.parameters())} for each in layers], lr=0.1)
        step = opt.step
        if backend is not None:
            step = torch.compile(opt.step, backend=backend, fullgraph=True)
        for number in range(6):
            if number == 2:
                group = opt.param_groups.pop(0)
            if number == 4:
                opt.param_groups.append(group)
            for layer in layers:
                layer.zero_grad()
                layer(torch.linspace(-1, number, 6)).square().sum().backward()
            step()
        found.append([p.detach() for layer in layers for p in layer.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
