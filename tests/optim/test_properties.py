"""Laws of every optimizer over drawn shapes, readings, options, strides and gradients.

`pytest tests/optim/test_properties.py --hypothesis-profile=thorough` tries 80 times as many.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from contract import (
    IS_ON_CPU,
    OPTIMIZERS,
    assert_same,
    constrained,
    model,
    on_machines,
    optimizer,
    train,
)
from held import peak_bytes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from optimizers import OF_CLASS, PUBLISHED, RULES, TABLE
from torch import Tensor

import stiefel_opt as so

settings.register_profile("short", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
# Where the environment says CI, hypothesis chooses a profile of its own: other examples than here.
if settings.get_current_profile_name() in ("default", "ci"):
    settings.load_profile("short")

DRIFT_STEPS = 100_000

# ---- what is drawn -----------------------------------------------------------------------------

FLAG = st.booleans()
METRIC = st.sampled_from(["canonical", "euclidean", -1.0, 0.3])
TRANSPORT = st.sampled_from(["isometric", "projected"])
BETA = st.sampled_from([0.0, 0.5, 0.9, 0.999])
OWN = {  # options that torch does not have, of the rules whose row in the table lists them
    "metric": METRIC,
    "transport": TRANSPORT,
    "retraction": st.sampled_from(["cayley", "qr", "polar"]),
    "steps": st.integers(1, 5),
    "exact": FLAG,
}


@st.composite
def sgd_momentum(draw: Any) -> dict[str, Any]:
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(FLAG)
    dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.4]))
    return {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}


@st.composite
def rules(draw: Any) -> tuple[Any, dict[str, Any]]:
    """An optimizer class with options; every learning rate is mild enough to compare results."""
    # a search ends at a tolerance, a chosen length multiplies rounding: they have laws of their own
    rows = [OF_CLASS[r.optimizer] for r in TABLE.values() if not (r.searches or r.follows_slope)]
    rule = draw(st.sampled_from(rows))
    options = {
        "lr": draw(st.sampled_from([1e-4, 1e-2, 0.1])),
        "maximize": draw(FLAG),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
    }
    if rule.adaptive:
        options |= {"betas": (draw(BETA), draw(st.sampled_from([0.9, 0.999])))}
        options |= {"amsgrad": draw(FLAG)}
        if not rule.decay_is_decoupled:
            options |= {"decoupled_weight_decay": draw(FLAG)}
    else:
        options |= draw(sgd_momentum())
    options |= {name: draw(values) for name, values in OWN.items() if name in rule.own}
    return rule.optimizer, options


@dataclass(frozen=True)
class Drawn:
    """A shape with its reading, and what the values and gradients are made of."""

    shape: tuple[int, ...]
    manifold: so.Stiefel
    dtype: torch.dtype
    layout: str
    grad_layout: str
    grad_kind: str
    grad_size: float
    seed: int

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def parameter(self) -> so.ManifoldParameter:
        value = torch.randn(self.shape, generator=self.generator(), dtype=self.dtype)
        parameter = so.ManifoldParameter(laid_out(value, self.layout), self.manifold, project=False)
        holder = torch.nn.Module()
        holder.weight = parameter
        with warnings.catch_warnings():  # a drawn weight may have the shape of a fused projection
            warnings.filterwarnings("ignore", ".*three times as many rows as columns")
            so.constrain(holder, **dataclasses.asdict(self.manifold))
        return parameter

    def grad(self, parameter: Tensor, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1 + step)
        grad = torch.randn(self.shape, generator=generator, dtype=self.dtype)
        if self.grad_kind == "zero" or (self.grad_kind == "zero at first" and step == 0):
            grad = torch.zeros_like(grad)
        elif self.grad_kind == "of rank one":
            grad = grad[..., :1] * grad[..., :1, :]
        elif self.grad_kind == "normal":
            grad = parameter.detach() * grad.mean()
        return laid_out(self.grad_size * grad, self.grad_layout)

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """Every constrained matrix of a tensor like the parameter, tall."""
        parts = enumerate(self.manifold.parts(tensor))
        read = [self.manifold.matrices(part, index) for index, part in parts]
        return [matrix for batch in read for matrix in batch.reshape(-1, *batch.shape[-2:])]


def laid_out(value: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides."""
    if layout == "transposed":
        return value.mT.contiguous().mT
    if layout == "with gaps":
        return torch.stack((value, value), dim=-1)[..., 0]
    if layout == "channels last" and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value.contiguous()


LAYOUT = st.sampled_from(["contiguous", "transposed", "with gaps", "channels last"])


@st.composite
def drawn_parameters(draw: Any, dtypes: tuple[torch.dtype, ...]) -> Drawn:
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    heads = draw(st.integers(1, 3))
    transposed, flatten = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    options: dict[str, Any] = {"heads": heads, "scale": draw(st.sampled_from([1.0, 2.5]))}
    plain = draw(st.integers(0, 2)) if not flatten else 0
    count = heads * rows + plain
    if plain:
        options["rows"] = (plain - 1, count - 1)
    if flatten:
        shape = (count, columns, *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    elif transposed:
        shape = (*lead, columns, count)
    else:
        shape = (*lead, count, columns)
    kinds = ["gaussian", "zero", "zero at first", "of rank one"]
    if not plain:
        kinds.append("normal")
    return Drawn(
        shape,
        so.Stiefel(flatten=flatten, transposed=transposed, **options),
        draw(st.sampled_from(dtypes)),
        draw(LAYOUT),
        draw(LAYOUT),
        draw(st.sampled_from(kinds)),
        draw(st.sampled_from([1e-12, 1.0, 1e3])),
        draw(st.integers(0, 10**6)),
    )


def train_alone(
    rule: Any, options: dict[str, Any], drawn: Drawn, parameter: Tensor, steps: int
) -> torch.optim.Optimizer:
    opt: torch.optim.Optimizer = rule([parameter], **options)
    for step in range(steps):
        parameter.grad = drawn.grad(parameter, step)
        opt.step()
    return opt


def tolerance(dtype: torch.dtype) -> float:
    return 1000 * torch.finfo(dtype).eps


# ---- laws --------------------------------------------------------------------------------------


BOTH = (torch.float32, torch.float64)


def check_a_training(rule: Any, drawn: Drawn, faster: float) -> None:
    kind, options = rule
    options["lr"] *= faster
    parameter = drawn.parameter()
    before = parameter.data_ptr(), parameter.stride(), parameter.dtype
    start = parameter.detach().clone()
    opt = kind([parameter], **options)
    for step in range(3):
        grad = drawn.grad(parameter, step)
        parameter.grad, kept = grad, grad.clone()
        opt.step()
        assert parameter.grad is grad
        assert torch.equal(grad, kept)
        assert so.orthonormality_error(parameter) < tolerance(drawn.dtype)
        assert parameter.isfinite().all()
    assert before == (parameter.data_ptr(), parameter.stride(), parameter.dtype)
    if drawn.grad_kind == "zero":
        for old, new in zip(drawn.matrices(start), drawn.matrices(parameter), strict=True):
            torch.testing.assert_close(new, old, rtol=0, atol=tolerance(drawn.dtype))


@given(rules(), drawn_parameters(BOTH), st.sampled_from([1.0, 1e3]))
def test_it_stays_on_the_manifold_and_leaves_all_else_alone(rule, drawn, faster):
    """Also for rates far too large."""
    check_a_training(rule, drawn, faster)


@settings(max_examples=10)
@given(rules(), drawn_parameters(BOTH))
def test_an_accelerator_does_so_too(rule, drawn):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IS_ON_CPU, lambda _: False)
        check_a_training(rule, drawn, 1.0)


@pytest.mark.usefixtures("compiled")
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules(), drawn_parameters(BOTH))
def test_a_compiled_step_does_so_too(rule, drawn):
    torch._dynamo.reset()
    check_a_training(rule, drawn, 1.0)


@given(rules(), drawn_parameters((torch.float64,)))
def test_strides_change_nothing_but_rounding(rule, drawn):
    kind, options = rule
    plain_layout = copy.copy(drawn)
    object.__setattr__(plain_layout, "layout", "contiguous")
    object.__setattr__(plain_layout, "grad_layout", "contiguous")
    found, expected = drawn.parameter(), plain_layout.parameter()
    train_alone(kind, options, drawn, found, 3)
    train_alone(kind, options, plain_layout, expected, 3)
    torch.testing.assert_close(found.data, expected.data, rtol=1e-6, atol=1e-7)


@given(rules(), drawn_parameters((torch.float64,)))
def test_every_matrix_moves_as_if_it_were_alone(rule, drawn):
    """The reading is a way to write many parameters as one; a scale divides the learning rate.

    The radius decays by 1 - lr d at any scale, so d is multiplied where lr is divided. A gradient
    normal to one point has, at another a rounding away, a tangent part that Adam makes a step of.
    """
    assume(drawn.grad_kind != "normal")
    kind, options = rule
    parameter, scale = drawn.parameter(), drawn.manifold.scale
    alone = [so.ManifoldParameter(matrix.detach() / scale) for matrix in drawn.matrices(parameter)]
    opt = kind([parameter], **options)
    scaled = {"lr": options["lr"] / scale, "weight_decay": options["weight_decay"] * scale}
    others = [kind([matrix], **{**options, **scaled}) for matrix in alone]
    for step in range(3):
        parameter.grad = drawn.grad(parameter, step)
        for matrix, grad, other in zip(alone, drawn.matrices(parameter.grad), others, strict=True):
            matrix.grad = grad.contiguous()
            other.step()
        opt.step()
    for found, expected in zip(drawn.matrices(parameter), alone, strict=True):
        torch.testing.assert_close(found / scale, expected.data, rtol=1e-6, atol=1e-7)


# ---- threads -----------------------------------------------------------------------------------


@on_machines(cpu="sgd adam", as_accelerator="adam-amsgrad")
def test_two_optimizers_in_two_threads_do_not_meet(name):
    nets = {seed: model(seed) for seed in (0, 1)}  # in turns; building draws from the global state
    for net in nets.values():
        train(net, optimizer(name, net.parameters()), 0, 10)
    results: dict[Any, Any] = {}
    barrier = threading.Barrier(2, timeout=600)
    prepared = {seed: model(seed) for seed in (0, 1)}

    count = torch.get_num_threads()  # a sum depends on it, and each thread has its own

    def together(seed: int) -> None:
        torch.set_num_threads(count)
        net = prepared[seed]
        opt = optimizer(name, net.parameters())
        barrier.wait()
        train(net, opt, 0, 10)
        results[seed] = net.state_dict()

    threads = [threading.Thread(target=together, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    for seed, net in nets.items():
        assert_same(results[seed], net.state_dict())


# ---- memory and drift --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RULES, "sgd-nesterov", "adam-amsgrad"])
def test_a_step_needs_memory_for_a_few_copies_and_never_n_by_n(name):
    n, m = 4000, 10
    parameter = so.ManifoldParameter(torch.linalg.qr(torch.randn(n, m))[0])
    opt = optimizer(name, [parameter])
    for _ in range(2):
        parameter.grad = torch.randn(n, m)
        opt.step()
    parameter.grad = torch.randn(n, m)
    size = 4 * n * m
    assert size / 4 < peak_bytes(opt.step) < 8 * size


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Each of the last")  # no loss falls here: steps may grow
@pytest.mark.parametrize(
    ("algorithm", "own"),
    [
        *((algorithm, {"lr": 0.01}) for algorithm in OPTIMIZERS),
        *((algorithm, {"lr": 0.001}) for algorithm in PUBLISHED),
    ],
)
def test_a_hundred_thousand_steps_in_float32_do_not_drift(algorithm, own):
    net = model()
    opt = optimizer(algorithm, net.parameters(), **own)
    largest = 0.0
    generator = torch.Generator().manual_seed(0)
    matrices = list(constrained(net).values())
    for step in range(DRIFT_STEPS):
        for parameter in matrices:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        opt.step()
        if step % 1000 == 999:
            largest = max(largest, so.orthonormality_error(net).item())
    assert largest < 1e-5
