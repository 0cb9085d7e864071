"""torch.compile: one graph for the whole step, the same numbers, no recompilation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract import OPTIMIZERS, backward, constrained, model, optimizer, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import stiefel_opt as so

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Profiler record function"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch about itself
]


def compiled(fast: str) -> pytest.MarkDecorator:
    """Tracing takes its time: one optimizer by default, the others by name."""
    slow = (pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != fast)
    return pytest.mark.parametrize("name", [fast, *slow])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


@compiled("adam")
def test_a_compiled_step_leaves_what_has_a_bad_gradient(name: str) -> None:
    net, opt = prepared(name)
    compiled = torch.compile(opt.step, fullgraph=True, backend="eager")
    backward(net, 2)
    compiled()
    backward(net, 3)
    for bad in (net.q.weight, net.turn.weight):
        bad.grad.view(-1)[1] = torch.nan
    before = copy.deepcopy(
        {n: (p.detach(), dict(opt.state[p])) for n, p in constrained(net).items()}
    )
    with pytest.warns(UserWarning, match=r"gradient of q\.weight .*, turn\.weight .* not finite"):
        compiled()
    for key, weight in constrained(net).items():
        value, state = before[key]
        skipped = key in ("q.weight", "turn.weight")
        assert torch.equal(weight, value) == skipped, key
        for part, tensor in opt.state[weight].items():
            assert not skipped or torch.equal(tensor, state[part]), (key, part)
        assert weight.isfinite().all(), key
    assert opt.skipped_steps() == {"q.weight": 1, "turn.weight": 1}
    backward(net, 4)
    net.fused.weight.grad[5, 0] = torch.nan  # a plain row of a constrained parameter
    before = net.fused.weight.detach().clone()
    with pytest.warns(UserWarning, match=r"gradient of fused\.weight"):
        compiled()
    assert torch.equal(net.fused.weight, before)


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
