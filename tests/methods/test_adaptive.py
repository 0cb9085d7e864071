"""Steps whose length follows the problem: the virtual radius, and friction with a factor."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from cases import in_turn, pairwise
from optimizers import OF_CLASS
from torch import Tensor, nn
from training import train

import stiefel_opt as so

DECOUPLED = {"decoupled_weight_decay": True, "weight_decay": 0.01}
RULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "radius": (so.StiefelAdam, {"lr": 0.1}),
    "radius, not Nesterov": (so.StiefelAdam, {"lr": 0.1, "nesterov": False}),
    "radius, decay": (so.StiefelAdamW, {"lr": 0.1, "weight_decay": 0.5}),
    "adaptive": (so.AdaptiveSGD, {"lr": 0.2, "transport": "projected"}),
    "adaptive, Nesterov": (so.AdaptiveSGD, {"lr": 0.2, "nesterov": True}),
    "adaptive Adam": (so.AdaptiveAdam, {"lr": 0.1, "transport": "projected"}),
    "adaptive Adam, Nesterov": (so.AdaptiveAdam, {"lr": 0.1, "nesterov": True, **DECOUPLED}),
}
SHAPES = {"tall": (12, 3), "wide": (3, 12), "square": (5, 5), "batch": (2, 9, 3)}
every_rule = pytest.mark.parametrize("name", RULES)
ADAPTIVE = [name for name in RULES if "adaptive" in name]
every_adaptive = pytest.mark.parametrize("name", ADAPTIVE)
either = pytest.mark.parametrize("name", ["adaptive", "adaptive Adam"])


def weight(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> so.ManifoldParameter:
    generator = torch.Generator().manual_seed(1)
    return so.ManifoldParameter(torch.randn(shape, generator=generator, dtype=dtype))


def make(name: str, *parameters: Tensor, **options: Any) -> Any:
    rule, own = RULES[name]
    return rule(list(parameters), **{**own, **options})


def leading(parameter: Tensor, factor: float = 1.0) -> Tensor:
    """Minus the leading eigenvalues of a fixed matrix, weighted; wide ones have rows."""
    x = parameter if parameter.size(-2) >= parameter.size(-1) else parameter.mH
    n, m = x.shape[-2:]
    generator = torch.Generator().manual_seed(n)
    factors = torch.randn(n, n, generator=generator, dtype=torch.float64).to(x.dtype)
    weights = torch.arange(m, 0, -1).to(x.dtype)
    values = ((factors + factors.mH) @ x).conj() * x * weights
    return -factor * values.sum().real / n


def descend(parameter: Tensor, optimizer: Any, steps: int, factor: float = 1.0) -> list[float]:
    return [loss / factor for loss in train(optimizer, lambda: leading(parameter, factor), steps)]


@functools.cache
def optimum(shape: tuple[int, ...]) -> tuple[Tensor, float]:
    parameter = weight(shape)
    best = descend(parameter, make("adaptive", parameter), 250)[-1]
    return parameter.detach(), best


# ---- the radius ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lrs", [(0.1,) * 20, tuple(0.1 / (t + 1) for t in range(20)), (0.0, 0.1)])
def test_the_radius_is_the_norm_that_nominal_steps_would_give(
    shape: tuple[int, ...], lrs: tuple[float, ...]
) -> None:
    parameter = weight(shape)
    optimizer, n = make("radius", parameter), max(shape[-2:])
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        descend(parameter, optimizer, 1)
    expected = math.sqrt(1 + n * sum(lr * lr for lr in lrs))
    assert math.isclose(optimizer.radii_of()[parameter], expected, rel_tol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.2, 5.0])
def test_with_weight_decay_the_angle_of_a_step_has_a_limit(scale: float) -> None:
    lr, decay = 0.05, 0.4
    parameter = weight((16, 2))
    group = {"params": [parameter], "stiefel": so.Stiefel(scale=scale)}
    optimizer = so.StiefelAdamW([group], lr=lr, weight_decay=decay)
    for _ in range(400):  # gradients of one sign: steps of full length
        parameter.grad = torch.randn(16, 2, dtype=torch.float64)
        optimizer.step()
    nominal = lr / scale * 4 / optimizer.radii_of()[parameter]
    assert math.isclose(nominal, math.sqrt(2 * lr * decay), rel_tol=0.02)


@pytest.mark.parametrize("name", ["angle", "adaptive", "adaptive, Nesterov"])
def test_a_learning_rate_that_is_an_angle_is_that_at_every_scale(name: str) -> None:
    angles = []
    for scale in (1.0, 0.1, 5.0):
        parameter = weight((12, 3))
        group = {"params": [parameter], "stiefel": so.Stiefel(scale=scale)}
        rule, options = RULES.get(name, (so.StiefelAdam, {"lr": 0.1, "radius": "angle"}))
        optimizer = rule([group], **options)
        parameter.grad = weight((12, 3)).detach().flip(0)
        optimizer.step()
        angles.append(optimizer.angles_of()[parameter])
    assert angles == pytest.approx([angles[0]] * 3, rel=1e-12)


def test_small_steps_are_not_lost_in_the_rounding_of_the_radius() -> None:
    parameter = weight((8, 2), torch.float32)
    optimizer = make("radius", parameter, lr=1e-5)
    for _ in range(300):
        parameter.grad = torch.ones(8, 2)
        optimizer.step()
    growth = optimizer.state[parameter]["radius_growth"]
    assert math.isclose(float(growth), 300 * 8e-10, rel_tol=1e-3)


def test_only_a_virtual_radius_grows() -> None:
    radii: list[dict[str, Any]] = [{}, {"radius": "virtual"}, {"radius": 1.0}]
    weights = [weight((9, 3)) for _ in radii]
    groups = [{"params": [p], **radius} for p, radius in zip(weights, radii, strict=True)]
    for rule, has_radius in ((so.StiefelAdam, weights[:2]), (so.AdaptiveAdam, weights[1:2])):
        optimizer = rule(groups, lr=0.1)
        sum(leading(p) for p in weights).backward()  # type: ignore[union-attr]
        optimizer.step()
        assert list(optimizer.radii_of()) == has_radius


# ---- friction and factor -------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1e-4, 1e4])
@every_rule
def test_a_constant_factor_on_the_loss_changes_nothing(name: str, factor: float) -> None:
    one, other = weight((12, 3)), weight((12, 3))
    options = {"eps": 0.0} if OF_CLASS[RULES[name][0]].adaptive else {}
    first = descend(one, make(name, one, **options), 25)
    second = descend(other, make(name, other, **options), 25, factor)
    torch.testing.assert_close(first, second, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    ("name", "shape", "lr"), pairwise(ADAPTIVE, SHAPES.values(), [0.02, 0.2, 1.0])
)
def test_adaptive_steps_reach_an_optimum_from_any_first_step(
    name: str, shape: tuple[int, ...], lr: float
) -> None:
    parameter = weight(shape)
    losses = descend(parameter, make(name, parameter, lr=lr), 250)
    x = parameter.detach() if shape[-2] >= shape[-1] else parameter.detach().mH
    n, m = x.shape[-2:]
    factors = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    values = torch.linalg.eigvalsh(factors + factors.mH).flip(0)[:m]
    best = -float((values * torch.arange(m, 0.0, -1)).sum()) / n * max(1, x[..., 0, 0].numel())
    assert losses[-1] - best < 1e-8 * abs(best)
    assert so.orthonormality_error(parameter) < 1e-14


@pytest.mark.parametrize(("name", "shape"), in_turn(ADAPTIVE, SHAPES.values()))
def test_a_run_may_start_at_an_optimum(name: str, shape: tuple[int, ...]) -> None:
    """Its first gradient is rounding, and says nothing of the steps behind the first."""
    point, best = optimum(shape)
    parameter = so.ManifoldParameter(point.clone())
    losses = descend(parameter, make(name, parameter), 250)
    assert max(losses) > best + 1e-4 * abs(best)  # it has left
    assert losses[-1] - best < 1e-8 * abs(best)


@either
def test_a_learning_rate_of_zero_teaches_nothing(name: str) -> None:
    parameter = weight((12, 3))
    optimizer = make(name, parameter)
    descend(parameter, optimizer, 3)
    factor = optimizer.factors_of()[parameter]
    optimizer.param_groups[0]["lr"] = 0.0
    descend(parameter, optimizer, 50)
    assert 0.8 * factor < optimizer.factors_of()[parameter] < 1.2 * factor


def test_a_gradient_whose_square_is_hardly_a_number_of_float32_moves() -> None:
    parameter = weight((8, 2), torch.float32)
    optimizer = make("adaptive", parameter)
    parameter.grad = 1e-20 * weight((8, 2), torch.float32).detach().flip(0)
    optimizer.step()
    assert not optimizer.skipped_steps()
    assert 0.01 < optimizer.angles_of()[parameter] < 0.4


@either
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_step_goes_down_along_the_gradient_at_hand(name: str, shape: tuple[int, ...]) -> None:
    """w > 0 makes every velocity a direction of descent, under noise too."""
    parameter, generator = weight(shape), torch.Generator().manual_seed(0)
    optimizer = make(name, parameter, lr=1e-7)
    for _ in range(300):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        optimizer.step()
        assert float(optimizer.state[parameter]["slope"].min()) > 0
        assert float(((parameter.detach() - before) * parameter.grad).sum((-2, -1)).max()) < 0


@every_adaptive
def test_an_optimum_is_not_left_again(name: str) -> None:
    """Where the gradient is only rounding, no slope may be negative."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(6, 5, 1, generator=generator, dtype=torch.float64)
    parameter = so.ManifoldParameter(torch.randn(6, 5, 1, generator=generator, dtype=torch.float64))
    optimizer, gaps = make(name, parameter), []
    for _ in range(250):
        optimizer.zero_grad()
        losses = -(parameter * target).sum((1, 2))
        losses.sum().backward()
        optimizer.step()
        gaps.append(1 + losses.detach() / target.norm(dim=(1, 2)))
        assert float(optimizer.state[parameter]["slope"].min()) >= 0
    for gap in torch.stack(gaps, 1):
        arrived = int((gap < 1e-13).nonzero()[0])
        assert float(gap[arrived:].max()) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, 0.25])
@every_adaptive
def test_a_hundred_epochs_do_not_stop(name: str, part: float) -> None:
    """Steps of Adam do not become shorter with the gradient, so their factor may fall less."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(400, 16, generator=generator, dtype=torch.float64)
    data *= torch.linspace(2, 0.3, 16, dtype=torch.float64)
    best = torch.linalg.eigvalsh(data.T @ data)[-3:].sum()
    parameter = weight((16, 3))
    optimizer, gaps = make(name, parameter, lr=part * RULES[name][1]["lr"]), []
    for _ in range(100):
        for batch in torch.randperm(400, generator=generator).view(20, 20):
            optimizer.zero_grad()
            (-(data[batch] @ parameter).square().sum() / 20).backward()
            optimizer.step()
        gaps.append(1 - float((data @ parameter.detach()).square().sum() / best))
    middle, end = sum(gaps[10:20]), sum(gaps[90:])
    assert end < max(0.75 * middle, 10 * 1e-3)


@pytest.mark.filterwarnings("ignore:Each of the last")
@either
def test_noise_alone_neither_stops_nor_speeds_steps(name: str) -> None:
    parameter, generator = weight((64, 8, 2)), torch.Generator().manual_seed(0)
    optimizer = make(name, parameter)
    for _ in range(300):
        parameter.grad = torch.randn(64, 8, 2, generator=generator, dtype=torch.float64)
        optimizer.step()
    logs = optimizer.state[parameter]["step_factor"].log()
    assert abs(float(logs.mean())) < math.log(2)


@pytest.mark.parametrize(
    "name", ["adaptive", pytest.param("adaptive Adam", marks=pytest.mark.slow)]
)
def test_batches_without_replacement_do_not_stop_steps_for_good(name: str) -> None:
    """Gradients of one epoch are negatively correlated; the factor has a least value."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randn(5, 8, 2, generator=generator, dtype=torch.float64)
    batches -= batches.mean(0)
    parameter = weight((8, 2))
    optimizer = make(name, parameter)
    for _ in range(100):
        for batch in torch.randperm(5, generator=generator):
            parameter.grad = batches[batch].clone()
            optimizer.step()
    least = optimizer.factors_of()[parameter]
    assert least >= 1e-3 * (1 - 1e-9)
    losses = descend(parameter, optimizer, 150)
    assert losses[-1] < losses[0]
    assert optimizer.factors_of()[parameter] > 3 * least


@pytest.mark.parametrize(("name", "least"), [("adaptive", 1e-3), ("adaptive Adam", 0.1)])
def test_gradients_of_changing_sign_shorten_steps_to_a_limit(name: str, least: float) -> None:
    parameter, gradient = weight((8, 2)), weight((8, 2)).detach().roll(1, 0)
    optimizer, factors = make(name, parameter), []
    for step in range(80):
        parameter.grad = gradient * (-1) ** step
        optimizer.step()
        factors.append(optimizer.factors_of()[parameter])
    assert factors[-1] == min(factors) == pytest.approx(least)


@pytest.mark.parametrize("growth", [1e2, 1e4, 1e8])
def test_a_gradient_that_begins_short_lengthens_steps_little(growth: float) -> None:
    """As that of an adapter does whose other factor begins at zero."""
    parameter, gradient = weight((8, 2)), weight((8, 2)).detach().roll(1, 0)
    optimizer, lengths = make("adaptive", parameter, lr=1e-3), []
    for factor in (1.0, growth):
        before = parameter.detach().clone()
        parameter.grad = factor * gradient
        optimizer.step()
        lengths.append(float((parameter.detach() - before).norm()))
    assert lengths[1] <= 12 * lengths[0]  # the factor grows, too


# ---- what the package promises -------------------------------------------------------------------


@every_rule
def test_the_report_shows_what_divides_or_multiplies_the_learning_rate(name: str) -> None:
    layer = so.constrain(nn.Linear(6, 4, bias=False))
    rule, options = RULES[name]
    optimizer = rule(layer.parameters(), **options)
    leading(layer.weight).backward()
    optimizer.step()
    (line,) = so.report(layer, optimizer).lines
    shown = str(so.report(layer, optimizer))
    is_adaptive = OF_CLASS[rule].follows_slope
    assert (line.radius is None) == ("radius" not in shown) == is_adaptive
    assert (line.factor is None) == ("factor" not in shown) == (not is_adaptive)
    most = 0.9 if line.factor else None  # a first step chooses nothing
    assert line.momentum == (most and pytest.approx(most))


@pytest.mark.parametrize(
    ("rule", "option", "remedy"),
    [
        (so.StiefelSGD, {"adaptive": True}, "so.AdaptiveSGD"),
        (so.StiefelAdamW, {"adaptive": True}, "so.AdaptiveAdam"),
        (so.StiefelAdam, {"rotation": "cayley"}, "so.PublishedAdam"),
    ],
)
def test_options_that_are_classes_name_them(rule: Any, option: Any, remedy: str) -> None:
    with pytest.raises((ValueError, TypeError), match=remedy):
        rule([weight((5, 2))], lr=0.1, **option)


# ---- the aim -------------------------------------------------------------------------------------


def test_a_force_of_rounding_hardly_moves_anything(generator: torch.Generator) -> None:
    weight = so.ManifoldParameter(torch.randn(40, 10, generator=generator))
    begin = weight.detach().clone()
    optimizer = so.AdaptiveSGD([weight], lr=0.01)
    for _ in range(20):
        weight.grad = 7.0 * weight.detach()
        optimizer.step()
        assert max(optimizer.angles_of().values()) < 0.05
    assert (weight.detach() - begin).norm() < 0.1
