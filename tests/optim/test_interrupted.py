"""A step that an exception ends anywhere: what was moved is whole, and training goes on."""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    through_file,
    tried_with,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import stiefel_opt as so

STEPS = 3  # before the interrupted one
AFTER = 3

# Joined batches of tall and of square matrices, two ranges of rows, and a plain parameter.
SHAPES: list[tuple[tuple[int, ...], dict[str, Any] | None]] = [
    *(((7, 3), {}),) * 2,
    *(((3, 3), {}),) * 2,
    ((9, 5), {"rows": ((0, 4), (5, 8)), "heads": (2, 1)}),
    ((4,), None),
]


class Interrupt(TorchDispatchMode):
    """Count the calls of torch; raise before or after the one of a given number."""

    def __init__(self, at: int = -1, kind: type[BaseException] = RuntimeError, after: bool = False):
        super().__init__()
        self.at, self.kind, self.after = at, kind, after
        self.calls = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls == self.at and not self.after:
            raise self.kind("interrupted")
        found = func(*args, **(kwargs or {}))
        if self.calls == self.at:
            raise self.kind("interrupted")
        return found


@contextmanager
def interrupted_line(at: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt before line number `at` that the package runs; count the lines."""
    count = [0]

    def local(_: Any, event: str, __: Any) -> Any:
        if event == "line":
            count[0] += 1
            if count[0] == at:
                raise KeyboardInterrupt
        return local

    def trace(frame: Any, *_: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(so.__path__[0]) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


class Training:
    """A few parameters, their optimizer, and the gradients of each step."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.params: list[nn.Parameter] = []
        for shape, options in SHAPES:
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            if options is None:
                self.params.append(nn.Parameter(value))
            else:
                self.params.append(
                    so.ManifoldParameter(value, so.Stiefel(**options), project=False)
                )
        self.opt = optimizer(name, self.params, weight_decay=0)
        for step in range(STEPS):
            self.fill(step)
            self.opt.step()

    def fill(self, step: int) -> None:
        fill(self.params, step)

    def constrained(self) -> list[nn.Parameter]:
        return [p for p in self.params if isinstance(p, so.ManifoldParameter)]

    def lengths(self) -> list[float]:
        """The length of the momentum of each, as that of one vector."""
        return [
            sum(float(t.square().sum()) for t in tree_leaves(self.opt.velocity(p))) ** 0.5
            for p in self.constrained()
        ]

    def steps(self) -> list[float]:
        return [float(self.opt.state[p]["step"]) for p in self.constrained()]


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def matrices_of(parameter: nn.Parameter, value: Tensor | None = None) -> list[Tensor]:
    """The tall points of a parameter, or of a value of it, one tensor for each range."""
    whole = parameter.detach() if value is None else value
    manifold = parameter.manifold
    return [
        manifold.matrices(part, index) / manifold.scale
        for index, part in enumerate(manifold.parts(whole))
    ]


def check_whole(parameter: nn.Parameter, old: Tensor, new: Tensor) -> None:
    """Each matrix is where it was, or where the whole step would have brought it."""
    found, before, after = [parameter.detach()], [old], [new]
    if isinstance(parameter, so.ManifoldParameter):
        found, before, after = (matrices_of(parameter, v) for v in (None, old, new))
    for now, stayed, moved in zip(found, before, after, strict=True):
        dims = (-2, -1) if now.ndim > 1 else (-1,)
        from_old = (now - stayed).abs().amax(dims)
        from_new = (now - moved).abs().amax(dims)
        assert float(torch.minimum(from_old, from_new).max()) < 1e-12, (from_old, from_new)


def check_sound(training: Training, limits: list[float], counts: set[float]) -> None:
    """On the manifold to rounding, momenta tangent and no longer than they can be."""
    for index, parameter in enumerate(training.constrained()):
        assert so.orthonormality_error(parameter) < 1e-13, index
        skews, normals = training.opt.velocity(parameter)
        for point, skew, normal in zip(
            matrices_of(parameter), tree_leaves(skews), tree_leaves(normals), strict=True
        ):
            assert float((skew + skew.mT).abs().max()) < 1e-12, index
            assert float((point.mT @ normal).abs().max()) < 1e-11 * (1 + limits[index]), index
    for length, limit in zip(training.lengths(), limits, strict=True):
        assert length <= 1.001 * limit
    assert set(training.steps()) <= counts


@functools.cache
def undisturbed(name: str) -> tuple[list[Tensor], list[float]]:
    """Where the step leads, and how long the momenta are then."""
    training = Training(name)
    training.fill(STEPS)
    training.opt.step()
    return values(training.params), training.lengths()


def interrupt(name: str, stop: Callable[[Any], Any]) -> None:
    """Interrupt a step, then take ordinary ones; every law holds after each of them."""
    training = Training(name)
    before, lengths = values(training.params), training.lengths()
    new, reached = undisturbed(name)
    training.fill(STEPS)
    stop(training.opt.step)
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    for parameter, old, expected in zip(training.params, before, new, strict=True):
        check_whole(parameter, old, expected)
    assert set(training.steps()) <= {STEPS, STEPS + 1}
    # What a momentum may be: the longer of both, then every gradient in full, Z twice (1 - a).
    limits = [max(pair) for pair in zip(lengths, reached, strict=True)]
    for step in range(STEPS + 1, STEPS + 1 + AFTER):
        training.fill(step)
        grads = [float(p.grad.norm()) for p in training.constrained()]
        limits = [limit + 2 * grad for limit, grad in zip(limits, grads, strict=True)]
        training.opt.step()
        check_sound(training, limits, {step, step + 1.0})
    for parameter, old in zip(training.params, before, strict=True):
        assert not torch.equal(parameter, old)
    assert training.opt.skipped_steps() == {}


def stopped_by(mode: Interrupt) -> Callable[[Any], None]:
    def stop(step: Callable[[], Any]) -> None:
        with pytest.raises(mode.kind, match="interrupted"), mode:
            step()

    return stop


def calls_of(name: str) -> int:
    training = Training(name)
    training.fill(STEPS)
    with Interrupt() as mode:
        training.opt.step()
    return mode.calls


def some_or_all(test: Any) -> Any:
    """Every rule at some places; by name at all of them."""
    rows = [(name, False) for name in RULES]
    slow = [pytest.param(name, True, marks=pytest.mark.slow) for name in (*RULES, "sgd-nesterov")]
    return pytest.mark.parametrize(("name", "everywhere"), [*rows, *slow])(test)


@some_or_all
def test_an_exception_at_a_call_of_torch_leaves_whole_steps(name: str, everywhere: bool) -> None:
    calls = calls_of(name)
    stride = 1 if everywhere else max(1, calls // (4 if TABLE[name].searches else 8))
    for number, at in enumerate(range(2 - everywhere, calls + 1, stride)):
        kind = (KeyboardInterrupt, RuntimeError, MemoryError)[number % 3]
        interrupt(name, stopped_by(Interrupt(at, kind, after=number % 4 > 1)))
    for at in (calls - 1, calls):  # also when the step is just being counted
        interrupt(name, stopped_by(Interrupt(at, KeyboardInterrupt, after=True)))


def lines_of(name: str) -> int:
    for _ in range(2):  # what is found once is known the second time
        training = Training(name)
        training.fill(STEPS)
        with interrupted_line(-1) as count:
            training.opt.step()
    return count[0]


def stopped_at_line(at: int) -> Callable[[Any], None]:
    def stop(step: Callable[[], Any]) -> None:
        with pytest.raises(KeyboardInterrupt), interrupted_line(at):
            step()

    return stop


@some_or_all
def test_a_signal_at_a_line_leaves_whole_steps(name: str, everywhere: bool) -> None:
    """As Ctrl-C does it: between two lines of the package, also where torch is not called."""
    lines = range(1, 9 * lines_of(name) // 10)
    some = random.Random(0).sample(lines, 3 if TABLE[name].searches else 8)
    for at in lines if everywhere else some:
        interrupt(name, stopped_at_line(at))


@tried_with("sgd", "adam")
def test_a_first_step_that_is_interrupted_is_taken_again(name: str) -> None:
    """State that was made and never filled counts as none."""

    def fresh() -> tuple[nn.Parameter, Any]:
        weight = so.ManifoldParameter(torch.eye(6, 3, dtype=torch.float64))
        weight.grad = torch.ones(6, 3, dtype=torch.float64).cumsum(0)
        return weight, optimizer(name, [weight], weight_decay=0)

    weight, opt = fresh()
    with Interrupt() as mode:
        opt.step()
    new, old = weight.detach().clone(), torch.eye(6, 3, dtype=torch.float64)
    for at in range(1, mode.calls + 1, 7):
        weight, opt = fresh()
        stopped_by(Interrupt(at))(opt.step)
        check_whole(weight, old, new)
        for _ in range(AFTER):
            opt.step()
            assert so.orthonormality_error(weight) < 1e-13, at
        assert float(opt.state[weight]["step"]) in (AFTER, AFTER + 1.0), at


@on_machines(cpu="adam", as_accelerator="sgd adam")
@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("heights", [(6, 6), (6, 8)])
def test_what_was_left_out_is_not_counted_by_an_interruption(
    name: str, heights: tuple[int, int]
) -> None:
    """An accelerator leaves it in the batch of the others, behind a mask."""

    def begun() -> tuple[list[nn.Parameter], Any]:
        weights = [so.ManifoldParameter(torch.eye(n, 3)) for n in heights]
        opt = optimizer(name, weights)
        for spoilt in (False, True):
            for weight in weights:
                weight.grad = torch.ones_like(weight).cumsum(0)
            if spoilt:
                weights[1].grad[0, 0] = torch.nan
            else:
                opt.step()
        return weights, opt

    opt = begun()[1]
    with Interrupt() as mode:
        opt.step()
    reached = set()
    for at in [*range(1, mode.calls - 8, 9), *range(mode.calls - 8, mode.calls + 1)]:
        weights, opt = begun()
        stopped_by(Interrupt(at, after=True))(opt.step)
        opt.state_dict()
        reached.add(tuple(float(opt.state[weight]["step"]) for weight in weights))
        assert not opt.skipped_steps() or opt.state[weights[0]]["step"] == 2
    assert reached == {(1.0, 1.0), (2.0, 1.0)}


@pytest.mark.parametrize(
    "transport", ["isometric", pytest.param("projected", marks=pytest.mark.slow)]
)
def test_a_momentum_has_received_the_gradient_or_has_not(transport: str) -> None:
    """Deferred, it is spread over three tensors: all of them are old, or all of them new."""

    def begun() -> tuple[nn.Parameter, Any]:
        generator = torch.Generator().manual_seed(0)
        weight = so.ManifoldParameter(torch.randn(7, 3, generator=generator).double())
        opt = so.StiefelSGD([weight], lr=0.3, transport=transport)
        for _ in range(STEPS):
            weight.grad = torch.randn(7, 3, generator=generator).double()
            opt.step()
        weight.grad = torch.randn(7, 3, generator=generator).double()
        return weight, opt

    weight, opt = begun()
    earlier = opt.velocity(weight)[1]
    with Interrupt() as mode:
        opt.step()
    ends = (earlier, opt.velocity(weight)[1])
    reached = set()
    for at in range(1, mode.calls + 1):
        weight, opt = begun()
        stopped_by(Interrupt(at))(opt.step)
        opt.state_dict()
        away = [float((opt.velocity(weight)[1] - end).abs().max()) for end in ends]
        assert min(away) < 1e-13, at
        reached.add(away.index(min(away)))
    assert reached == {0, 1}


# ---- what is saved afterwards -----------------------------------------------------------------


@every_rule
def test_a_checkpoint_after_an_interrupted_step_continues_alike(name: str) -> None:
    """Written at once, before any other step has put anything in order, and read elsewhere."""
    calls = calls_of(name)
    for number, at in enumerate(
        range(3, calls, max(1, calls // (2 if TABLE[name].searches else 4)))
    ):
        training, fresh = Training(name), Training(name)
        training.fill(STEPS)
        stopped_by(Interrupt(at, KeyboardInterrupt, after=number % 2 > 0))(training.opt.step)
        saved = through_file(training.opt.state_dict())
        with torch.no_grad():
            for own, found in zip(fresh.params, values(training.params), strict=True):
                own.copy_(found)
        fresh.opt.load_state_dict(saved)
        assert set(fresh.steps()) <= {STEPS, STEPS + 1.0}
        for step in range(STEPS + 1, STEPS + 1 + AFTER):
            for each in (training, fresh):
                each.fill(step)
                each.opt.step()
            for one, two in zip(training.params, fresh.params, strict=True):
                torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
            assert max(map(so.orthonormality_error, fresh.constrained())) < 1e-13


@pytest.mark.parametrize(
    ("name", "by_saving"),
    in_turn([*RULES, "sgd"], [False, True]),
)
def test_half_precision_follows_its_master_through_an_interruption(
    name: str, by_saving: bool
) -> None:
    """By the next step, or by a checkpoint, what is seen is the master rounded, bit for bit."""

    def masters(training: Training) -> list[Tensor]:
        return [training.opt.state[p]["master"] for p in training.constrained()]

    half = Training(name, torch.bfloat16)
    old = [master.clone() for master in masters(half)]
    half.fill(STEPS)
    with Interrupt() as mode:
        half.opt.step()
    new = masters(half)
    for at in range(3, mode.calls, max(1, mode.calls // (3 if TABLE[name].searches else 8))):
        training = Training(name, torch.bfloat16)
        training.fill(STEPS)
        stopped_by(Interrupt(at, KeyboardInterrupt))(training.opt.step)
        if by_saving:
            training.opt.state_dict()
        else:
            for parameter in training.params:
                parameter.grad = torch.zeros_like(parameter)
            for group in training.opt.param_groups:
                group["lr"] = 0.0
            training.opt.step()
        for parameter, master, *ends in zip(
            training.constrained(), masters(training), old, new, strict=True
        ):
            assert torch.equal(parameter, master.to(torch.bfloat16)), at
            tags = [matrices_of(parameter, value) for value in (master, *ends)]
            for found, stayed, moved in zip(*tags, strict=True):
                away = [(found - end).abs().amax((-2, -1)) for end in (stayed, moved)]
                assert float(torch.minimum(*away).max()) < 1e-5, at
        for group in training.opt.param_groups:
            group["lr"] = 0.05
        for step in range(STEPS + 1, STEPS + 1 + AFTER):
            training.fill(step)
            training.opt.step()
        for parameter, master in zip(training.constrained(), masters(training), strict=True):
            assert torch.equal(parameter, master.to(torch.bfloat16)), at
            assert so.orthonormality_error(master, parameter.manifold) < 1e-4


# ---- a warning turned into an error --------------------------------------------------------------


@tried_with("sgd", "adam-amsgrad")
def test_a_warning_that_is_an_error_stops_no_other_parameter(name: str) -> None:
    trainings = [Training(name), Training(name)]
    for training in trainings:
        plain = nn.Parameter(torch.ones(3, dtype=torch.float64))
        late = so.ManifoldParameter(torch.eye(8, 2, dtype=torch.float64))
        training.params += [plain, late]
        training.opt.add_param_group({"params": [late, plain]})
        training.fill(STEPS)
        for spoilt in (training.params[0], training.params[2], training.params[4]):
            spoilt.grad.view(-1)[1] = torch.nan
    failing, warned = trainings
    before = values(failing.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="not finite"):
            failing.opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warned.opt.step()
    for index, (one, two, old) in enumerate(
        zip(failing.params, warned.params, before, strict=True)
    ):
        assert torch.equal(one, two), index
        assert torch.equal(one, old) is (index in (0, 2, 4)), index
    assert failing.opt.skipped_steps() == warned.opt.skipped_steps()
    assert len(failing.opt.skipped_steps()) == 3
    for training in trainings:  # and both train on alike
        for step in range(STEPS + 1, STEPS + 4):
            training.fill(step)
            training.opt.step()
    for one, two in zip(failing.params, warned.params, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-13)
