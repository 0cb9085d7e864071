"""W = g Q with a number g that is trained: laws of its step, and what may happen to it."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import IS_ON_CPU, assert_same, assert_same_training, through_file, warnings_of
from optimizers import TABLE
from scale_cases import (
    LAYOUTS,
    MORE,
    RULES,
    each_matrix,
    fit,
    g_of,
    net,
    scales,
    target_of,
    train,
    weight,
)
from torch import Tensor, nn
from training import train as descend

import stiefel_opt as so
from stiefel_opt.functional.learned_scale import CAP, PULL


@pytest.mark.parametrize(("layout", "name"), [*in_turn(LAYOUTS, RULES), *in_turn(["heads"], RULES)])
def test_every_matrix_finds_its_own_scale(layout: str, name: str) -> None:
    rule, options = RULES[name]
    parameter = weight(layout)
    if TABLE[name].searches and parameter.is_complex():
        options = {**options, "lr": 0.02}
    target, factors = target_of(parameter)
    opt = rule([parameter], scale_pull=0.0, **options)
    fit(parameter, opt, target)
    is_half = parameter.dtype == torch.bfloat16
    found = scales(parameter, parameter.manifold)
    near = 0.05 if TABLE[name].searches else 0.01  # whose step is as long wherever it is
    torch.testing.assert_close(found, factors, rtol=near, atol=0.0)
    assert float(so.orthonormality_error(parameter)) < (1e-2 if is_half else 1e-12)


@pytest.mark.parametrize("name", MORE)
def test_other_rules_find_it_too(name: str) -> None:
    rule, options = MORE[name]
    parameter = weight("heads")
    target, factors = target_of(parameter)
    fit(parameter, rule([parameter], scale_pull=0.0, **options), target)
    torch.testing.assert_close(scales(parameter, parameter.manifold), factors, rtol=0.02, atol=0.0)
    assert float(so.orthonormality_error(parameter)) < 1e-12


# ---- equality with what it is made of ---------------------------------------------------------


def slopes(seed: int, count: int, shape: torch.Size) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return [draw() for _ in range(count)]


@pytest.mark.parametrize("start", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("maximize", [False, True])
def test_adam_moves_g_by_torchs_rule_and_q_as_it_moves_a_fixed_scale(
    start: float, maximize: bool
) -> None:
    lr = 1e-3
    parameter = weight("tall", scale=start)
    fixed = so.ManifoldParameter(parameter.detach().clone(), so.Stiefel(scale=start))
    options = {"lr": lr, "eps": 1e-12, "maximize": maximize}
    opt, twin = so.StiefelAdam([parameter]), so.StiefelAdam([fixed], **options)
    opt.param_groups[0].update(options)
    g = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    rate = min(lr * math.sqrt(24), CAP * start)
    scalar = torch.optim.Adam([g], lr=rate, eps=1e-12, maximize=maximize)
    for grad in slopes(1, 40, parameter.shape):
        unit = parameter.detach() / g_of(parameter)
        torch.testing.assert_close(unit, fixed.detach() / start, rtol=0, atol=1e-9)
        g.grad = (grad * unit).sum()
        g.data += (start - g.data) * rate * PULL / start
        parameter.grad, fixed.grad = grad, grad.clone()
        opt.step(), twin.step(), scalar.step()
        torch.testing.assert_close(g_of(parameter), g.detach(), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.0}, {"nesterov": True}, {"dampening": 0.3}, {"maximize": True}]
)
def test_sgd_moves_g_by_torchs_rule_and_q_along_the_gradient_over_g(options: Any) -> None:
    lr, start = 0.01, 2.0
    options = {"momentum": 0.9, **options}
    parameter = weight("tall", scale=start)
    fixed = so.ManifoldParameter(parameter.detach().clone(), so.Stiefel(scale=start))
    opt = so.StiefelSGD([parameter], lr=lr, **options)
    twin = so.StiefelSGD([fixed], lr=lr, **options)
    g = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    scalar = torch.optim.SGD([g], lr=lr / 8, **options)
    for grad in slopes(2, 40, parameter.shape):
        unit = parameter.detach() / g_of(parameter)
        torch.testing.assert_close(unit, fixed.detach() / start, rtol=0, atol=1e-9)
        g.grad = (grad * unit).sum()
        parameter.grad, fixed.grad = grad, grad * (start / g.detach())
        g.data += (start - g.data) * lr * PULL
        opt.step(), twin.step(), scalar.step()
        torch.testing.assert_close(g_of(parameter), g.detach(), rtol=1e-9, atol=0)


def test_sgd_moves_the_weight_along_minus_the_tangent_part_of_its_gradient() -> None:
    """To first order, of the set of all g Q as a surface in the space of matrices."""
    parameter = weight("tall", scale=1.7)
    with torch.no_grad():
        parameter.mul_(1.3)
    before, lr = parameter.detach().clone(), 1e-6
    parameter.grad = torch.randn_like(parameter)
    so.StiefelSGD([parameter], lr=lr, momentum=0.0, metric="euclidean", scale_pull=0.0).step()
    tangent = so.project_tangent(before, parameter.grad, parameter.manifold)
    torch.testing.assert_close((before - parameter.detach()) / lr, tangent, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_without_a_slope_g_returns_to_its_start(name: str) -> None:
    rule, options = RULES[name]
    parameter = weight("tall", scale=0.5)
    with torch.no_grad():
        parameter.mul_(1.2)
    parameter.grad = torch.zeros_like(parameter)
    opt = rule([parameter], **options)
    opt.step()
    rate = options["lr"] if TABLE[name].proportional else min(options["lr"] / 0.5, CAP)
    assert float(g_of(parameter)) == pytest.approx(0.5 + 0.1 * (1 - rate * PULL), rel=1e-9)
    for _ in range(3):
        before = abs(float(g_of(parameter)) - 0.5)
        opt.step()
        assert abs(float(g_of(parameter)) - 0.5) < before


def test_a_factorised_layer_trains_its_floating_scale() -> None:
    """Povey et al. (2018): a factor W with W W' = a I, where a is found by the training."""
    target = 3.0 * so.random_point(4, 16, dtype=torch.float64)
    inputs = torch.randn(256, 16, dtype=torch.float64)
    layer = so.constrain(nn.Linear(16, 4, bias=False, dtype=torch.float64), learn_scale=True)
    opt = so.StiefelSGD(layer.parameters(), lr=0.3, scale_pull=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 1e-3, 300)
    for _ in range(300):
        (loss,) = descend(opt, lambda: (layer(inputs) - inputs @ target.T).square().mean())
        schedule.step()
    assert loss < 1e-4
    assert float(g_of(layer.weight)) == pytest.approx(3.0, rel=1e-2)


# ---- safety -----------------------------------------------------------------------------------


def check_sound(parameter: Any, start: float = 1.0) -> None:
    g = g_of(parameter)
    assert start / 1.0001e4 <= float(g) <= start * 1.0001e4
    m = min(parameter.shape)
    tall = parameter.detach() if parameter.size(0) >= m else parameter.detach().mT
    gram = tall.mT.double() @ tall.double() / g.double() ** 2
    assert float((gram - torch.eye(m)).abs().max()) <= 1e-5


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("pull", [0.0, PULL])
def test_nothing_makes_a_scale_vanish_or_overflow(name: str, pull: float) -> None:
    rule, options = RULES[name]
    parameter = nn.Parameter(torch.randn(32, 8))
    so.constrain(holder := nn.ParameterDict({"w": parameter}), "w", learn_scale=True)
    opt = rule(holder.parameters(), scale_pull=pull, **options)
    sizes = (1.0, 1e-20, 0.0, 1e12, 1e25, math.inf, math.nan, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(64):
            opt.param_groups[0]["lr"] = (1e-3, 1e30, 0.0, 1.0)[step % 4]
            sign = (-1.0) ** (step // 16)
            before = float(g_of(parameter))
            parameter.grad = (
                sizes[step % 8] * sign * (parameter.detach() + 0.1 * torch.randn(32, 8))
            )
            opt.step()
            check_sound(parameter)
            assert before / 2.7184 <= float(g_of(parameter)) <= before * 2.7184


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Each of the last 100 steps")  # true, where g is small
@pytest.mark.parametrize("name", RULES)
def test_five_thousand_steps_of_noise(name: str) -> None:
    rule, options = RULES[name]
    parameter = so.ManifoldParameter(torch.randn(32, 8), so.Stiefel(learn_scale=True))
    opt = rule([parameter], scale_pull=0.0, **{**options, "lr": 0.1})
    for _ in range(5000):
        parameter.grad = torch.randn(32, 8)
        opt.step()
    check_sound(parameter)


@pytest.mark.parametrize("name", RULES)
def test_a_weight_that_others_write_to_becomes_the_nearest_multiple(name: str) -> None:
    rule, options = RULES[name]
    parameter = weight("heads")
    opt = rule([parameter], scale_pull=0.0, **options)
    parameter.grad = torch.zeros_like(parameter)
    opt.step()
    for value in (
        torch.randn_like(parameter),
        torch.zeros_like(parameter),
        1e9 * parameter.detach(),
    ):
        parameter.grad = torch.zeros_like(parameter)
        with torch.no_grad():
            parameter.copy_(value)
        means = scales(value, parameter.manifold)
        opt.param_groups[0]["lr"] = 1e-9
        opt.step()
        expected = means.clamp(1e-4, 1e4)
        torch.testing.assert_close(
            scales(parameter, parameter.manifold), expected, rtol=1e-6, atol=0
        )
        assert float(so.orthonormality_error(parameter)) < 1e-12


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", ["cpu", "as_accelerator"], indirect=True)
@pytest.mark.parametrize(("layout", "name"), in_turn(LAYOUTS, RULES))
def test_the_first_step_gives_a_weight_that_was_not_projected_its_start(
    layout: str, name: str
) -> None:
    rule, options = RULES[name]
    reading = (point := weight(layout)).manifold
    value = 1.5 * point.detach()  # multiples of points keep their scales
    matrices = reading.matrices(reading.parts(value)[0])
    matrices[(0,) * (matrices.ndim - 2)] = torch.randn_like(each_matrix(value, reading)[0])
    parameter = so.ManifoldParameter(value, reading, project=False)
    opt = rule([parameter], scale_pull=0.0, **{**options, "lr": 0.0})
    expected = torch.full_like(scales(value, reading), 1.5 * reading.scale)
    expected[0] = reading.scale
    for lr in (0.0, 0.0, 1e-9, 1e-9):  # warmed up from 0, which writes nothing
        parameter.grad = torch.zeros_like(parameter)
        opt.param_groups[0]["lr"] = lr
        opt.step()
        if lr == 0.0:
            assert_same(parameter.detach(), value)
            continue
        near = 5e-3 if parameter.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(scales(parameter, reading), expected, rtol=near, atol=0)
    with torch.no_grad():
        parameter.mul_(2.0).add_(0.1 * torch.randn_like(parameter))  # later on it is measured
    opt.step()
    assert bool((scales(parameter, reading) > 1.9 * expected).all())


def test_a_weight_made_on_the_meta_device_begins_at_its_start() -> None:
    with torch.device("meta"):
        layer = so.constrain(nn.Linear(64, 32), scale=2.0, learn_scale=True)
    layer.to_empty(device="cpu").reset_parameters()
    opt = so.StiefelAdamW(so.retag(layer).parameters(), lr=1e-9)
    layer(torch.randn(4, 64)).square().mean().backward()
    opt.step()
    assert float(g_of(layer.weight)) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("start", [1e-10, 1e10])
def test_the_least_and_the_largest_start_are_trained_in_float32(name: str, start: float) -> None:
    rule, options = RULES[name]
    parameter = so.ManifoldParameter(torch.randn(32, 8), so.Stiefel(learn_scale=True, scale=start))
    opt = rule([parameter], scale_pull=0.0, **options)
    for step in range(
        24
    ):  # the loss is of W over its start: as steep as that of an ordinary weight
        opt.param_groups[0]["lr"] = options["lr"] * (
            start**2 if TABLE[name].proportional else start
        )
        target = (3.0, 0.1)[step % 2]
        parameter.grad = (parameter.detach() / start * (1 - target)) / start
        opt.step()
        check_sound(parameter, start)
    assert float(g_of(parameter)) != pytest.approx(start, rel=1e-4)


@pytest.mark.parametrize("name", RULES)
def test_a_scale_stays_below_what_float16_can_hold(name: str) -> None:
    rule, options = RULES[name]
    point = torch.eye(8, 4, dtype=torch.float16)
    reading = so.Stiefel(learn_scale=True, scale=2e4)
    parameter = so.ManifoldParameter(2e4 * point, reading)
    opt = rule([parameter], scale_pull=0.0, **{**options, "lr": 1e4})
    for _ in range(300):
        parameter.grad = -point  # along g alone
        opt.step()
    torch.testing.assert_close(parameter.detach(), torch.finfo(torch.float16).max * point)


def test_a_gradient_that_is_not_finite_leaves_scale_and_state() -> None:
    ours, other = weight("tall"), weight("tall")
    opt = so.StiefelAdamW([ours, other], lr=0.01)
    for step in range(4):
        for parameter in (ours, other):
            parameter.grad = torch.randn_like(parameter)
        if step == 3:
            ours.grad[0, 0] = math.nan
        before = copy.deepcopy((ours.detach(), dict(opt.state[ours])))
        if step < 3:
            opt.step()
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert_same((ours.detach(), dict(opt.state[ours])), before)


# ---- checkpoints and copies -------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_a_training_goes_on_bit_for_bit(name: str) -> None:
    rule, options = RULES[name]
    model = net()
    opt = rule(model.parameters(), **options)
    train(model, opt, range(5))
    saved = through_file((model.state_dict(), opt.state_dict()))
    again = net()
    so.project_(again)  # the values that are loaded are no points of scale 1
    other = rule(again.parameters(), **options)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    copied, copied_opt = copy.deepcopy((model, opt))
    pickled, pickled_opt = pickle.loads(pickle.dumps((model, opt)))
    trainings = [(model, opt), (again, other), (copied, copied_opt), (pickled, pickled_opt)]
    for each in trainings:
        train(*each, range(5, 9))
    for each in trainings[1:]:
        assert_same_training(trainings[0], each)


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", RULES)
def test_weights_without_a_step_before_the_checkpoint_keep_their_start(
    name: str, steps: int, project: bool
) -> None:
    """Before the first step, frozen, or unused as an expert: as if nobody had interrupted."""
    rule, options = RULES[name]

    def begin() -> tuple[nn.Module, Any]:
        model = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for layer in model:
            so.constrain(layer, scale="keep", learn_scale=True, project=project)
        model[1].weight.requires_grad_(False)
        return model, rule(model.parameters(), **options)

    def go(model: Any, opt: Any, used: Any, count: int) -> None:
        for step in range(count):
            inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            sum((layer(inputs) - 2.0).square().mean() for layer in used(model)).backward()
            opt.step()

    ours, theirs = begin(), begin()
    starts = {name: ours[0].get_parameter(name).manifold.scale for name in ("0.weight", "1.weight")}
    go(*ours, lambda model: model[:1], steps)
    saved = through_file([each.state_dict() for each in ours])
    for index in (steps > 0, steps == 0):  # in either order
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if not project else "error")  # off the manifold: said
            theirs[index].load_state_dict(saved[index])
    again = through_file(theirs[1].state_dict())  # and once more, at once
    theirs[1].load_state_dict(again)
    for model, opt in (ours, theirs):
        model[1].weight.requires_grad_(True)
        go(model, opt, lambda model: model, 4)
    assert_same_training(ours, theirs)
    for name, start in starts.items():
        assert theirs[1].state[theirs[0].get_parameter(name)]["scale_start"] == start
    report = so.report(*theirs)
    assert [line.start for line in report.lines][:2] == list(starts.values())
    assert all(f"learned from {start:g}" in str(report) for start in starts.values())


def test_the_start_is_that_of_the_checkpoint_and_a_model_that_is_loaded_moves_none() -> None:
    model = net("keep")
    opt = so.StiefelAdamW(model.parameters(), lr=0.01)
    start = model[0].weight.manifold.scale
    train(model, opt, range(3))
    again = net("keep")
    other = so.StiefelAdamW(again.parameters(), lr=0.01)
    own = again[0].weight.manifold.scale
    assert own != start
    assert not warnings_of(lambda: again.load_state_dict(model.state_dict()))
    assert again[0].weight.manifold.scale == own
    other.load_state_dict(through_file(opt.state_dict()))
    train(model, opt, range(3, 6))
    train(again, other, range(3, 6))
    assert_same_training((model, opt), (again, other))
    assert other.state[again[0].weight]["scale_start"] == start
    so.retag(again)
    train(model, opt, range(6, 9))
    train(*copy.deepcopy((again, other)), range(6, 9))
    train(again, other, range(6, 9))
    assert_same_training((model, opt), (again, other))


@pytest.mark.parametrize("name", RULES)
def test_a_checkpoint_without_it_begins_at_the_start(name: str) -> None:
    rule, options = RULES[name]
    model, learned = net(learn=False), net()
    opt = rule(model.parameters(), **options)
    train(model, opt, range(3))
    other = rule(learned.parameters(), **options)
    learned.load_state_dict(model.state_dict())
    other.load_state_dict(through_file(opt.state_dict()))
    train(learned, other, range(3, 5))
    state = other.state[learned[0].weight]
    assert state["step"] == 5
    assert state["scale_start"] == 1.0
    if "scale_moments" in state:  # averages of two slopes, whatever the step
        group = other.param_groups[0]
        beta = group["momentum"] if "momentum" in group else group["betas"][0]
        weights = state["scale_moments"][..., 2]
        torch.testing.assert_close(weights, torch.full_like(weights, 1 - beta**2))
    with pytest.raises(ValueError, match="reading of"):  # and not the other way round
        opt.load_state_dict(other.state_dict())


# ---- the rest of the package ------------------------------------------------------------------


def test_points_of_a_learned_scale() -> None:
    reading = so.Stiefel(heads=2, learn_scale=True)
    value = torch.randn(12, 4, dtype=torch.float64)
    means = scales(value, reading)
    point = so.project_(value.clone(), reading)
    torch.testing.assert_close(scales(point, reading), means)
    torch.testing.assert_close(so.polar(value, reading), point)
    assert float(so.orthonormality_error(point, reading)) < 1e-14
    assert_same(so.project_(point.clone(), reading), point)
    vector = torch.randn_like(value)
    tangent = so.project_tangent(point, vector, reading)
    torch.testing.assert_close(so.project_tangent(point, tangent, reading), tangent)
    torch.testing.assert_close(
        (tangent * (vector - tangent)).sum(), torch.zeros((), dtype=value.dtype), atol=1e-12, rtol=0
    )
    for retraction in ("polar", "qr", "cayley"):
        moved = so.retract(point, 1e-5 * tangent, reading, retraction=retraction)
        assert float(so.orthonormality_error(moved, reading)) < 1e-14
        torch.testing.assert_close((moved - point) / 1e-5, tangent, rtol=0, atol=1e-3)
    assert so.Stiefel.from_dict(reading.as_dict()) == reading
    with pytest.raises(TypeError, match="learn_scale"):
        so.Stiefel(learn_scale=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trained_weight_that_is_constrained_again_keeps_its_scales(layout: str) -> None:
    parameter = weight(layout)
    reading, value = parameter.manifold, target_of(parameter)[0]
    options = {"flatten": False, **LAYOUTS[layout][1], "learn_scale": True}
    options.pop("dtype", None)

    def constrained(value: Tensor, scale: Any) -> so.ManifoldParameter:
        holder = nn.ParameterDict({"w": nn.Parameter(value.clone())})
        return so.constrain(holder, "w", **{**options, "scale": scale})["w"]

    assert_same(constrained(value, "keep").detach(), value)
    with pytest.warns(UserWarning, match="seems trained.*scale='keep'"):
        reset = constrained(value, 3.0)
    near = 1e-2 if value.dtype == torch.bfloat16 else 1e-9
    expected = torch.full_like(scales(value, reading), 3.0)
    torch.testing.assert_close(scales(reset, reading), expected, rtol=near, atol=0)

    own = reading.matrices(reading.parts(spoiled := value.clone())[0], 0)
    own[(*(0,) * (own.ndim - 2), slice(None), 0)] *= 1.1  # one column of one matrix
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may seem trained, and moves
        mended = constrained(spoiled, "keep")
    assert_same(each_matrix(mended, reading)[1:], each_matrix(value, reading)[1:])
    assert float(scales(mended, reading)[0]) == pytest.approx(mended.manifold.scale, rel=near)


def test_vectors_and_orthogonal_initialisations_are_not_taken_for_trained_weights() -> None:
    assert not warnings_of(lambda: so.constrain(nn.Linear(64, 1), learn_scale=True))
    nn.init.orthogonal_((layer := nn.Linear(64, 16)).weight)
    assert not warnings_of(lambda: so.constrain(layer, learn_scale=True, scale="rms"))


def test_a_report_shows_the_scales_and_the_error_of_what_they_multiply() -> None:
    model = net()
    opt = so.StiefelAdamW(model.parameters(), lr=0.01)
    assert "scale " not in str(so.report(net(learn=False)))
    train(model, opt, range(3))
    report = so.report(model, opt)
    for line in report.lines:
        parameter = model.get_parameter(line.name)
        found = scales(parameter, parameter.manifold)
        assert line.scale == pytest.approx((float(found.min()), float(found.max())), rel=1e-5)
        assert line.error is not None
        assert line.error < 1e-6
        assert not line.off
    assert "scale learned from 1" in str(report)


@pytest.mark.usefixtures("as_accelerator")
@pytest.mark.parametrize("name", RULES)
def test_on_an_accelerator_it_is_the_same_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, options = RULES[name]
    trained = []
    for machine in (False, True):
        monkeypatch.setattr(IS_ON_CPU, lambda _, cpu=machine: cpu)
        torch.manual_seed(0)
        parameters = [weight(layout) for layout in ("tall", "wide", "heads", "rows", "complex")]
        opt = rule(parameters, **options)
        for step in range(10):
            for number, parameter in enumerate(parameters):
                torch.manual_seed(100 * step + number)
                parameter.grad = 0.01 * torch.randn_like(parameter)
            opt.step()
        trained.append([parameter.detach() for parameter in parameters])
    for ours, theirs in zip(*trained, strict=True):
        bound = 1e-2 if TABLE[name].searches else 1e-8  # an iteration reads how far it has come
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_compiled_step_is_the_same_step(name: str, compiled: None) -> None:  # noqa: ARG001
    rule, options = RULES[name]
    model = net()
    twin = copy.deepcopy(model)
    train(model, rule(model.parameters(), **options), range(4))
    with torch.compiler.set_stance("force_eager"):
        train(twin, rule(twin.parameters(), **options), range(4))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_learning_rate_that_is_a_tensor() -> None:
    for name, (rule, options) in RULES.items():
        ours, theirs = weight("heads", scale=1.5), None
        theirs = copy.deepcopy(ours)
        lr = torch.tensor(options["lr"], dtype=torch.float64)
        opt, other = rule([ours], **options), rule([theirs], **{**options, "lr": lr})
        for grad in slopes(3, 12, ours.shape):
            ours.grad, theirs.grad = grad, grad.clone()
            opt.step(), other.step()
        bound = 1e-5 if TABLE[name].searches else 1e-10
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=0, atol=bound)


def refusals() -> list[Any]:
    def parameter(scale: float = 1.0) -> Any:
        return so.ManifoldParameter(torch.randn(6, 3), so.Stiefel(learn_scale=True, scale=scale))

    return [
        ("without learn_scale", lambda: parameter(0.9e-10)),
        ("without learn_scale", lambda: parameter(1.1e10)),
        ("without", lambda: Unsaid([parameter()], lr=0.1)),
        ("scale_pull", lambda: so.StiefelSGD([parameter()], scale_pull=-1.0)),
    ]


class Unsaid(so.StiefelSGD):
    """A rule of one's own that does not say that a scale may be learned beside it."""

    def rule_for(self, group: Any) -> Any:
        return super().rule_for(group)


@pytest.mark.parametrize(("remedy", "action"), refusals())
def test_who_cannot_learn_a_scale_says_so_and_names_the_remedy(remedy: str, action: Any) -> None:
    with pytest.raises(ValueError, match=remedy):
        action()
