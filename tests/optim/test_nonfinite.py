"""Gradients that are not finite: the parameter stays as it was, or the error names it."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from cases import in_turn, mixed
from contract import (
    OPTIMIZERS,
    PUBLISHED,
    RULES,
    TABLE,
    assert_same,
    backward,
    on_machines,
    optimizer,
    step_and_tell,
    train,
    trained,
)
from optimizers import PROPORTIONAL
from torch import nn

import stiefel_opt as so

KINDS = ["q", "k", "up", "turn", "fused", "filter"]  # heads, tall, square, rows, convolution
VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "overflow": 1e30}
BAD = [(kind, "nan") for kind in KINDS] + [("k", value) for value in list(VALUES)[1:]]


def spoil(net: nn.Module, kind: str, value: float) -> nn.Parameter:
    weight = getattr(net, kind).weight
    weight.grad.view(-1)[3] = value  # among the constrained rows of each
    return weight


def everything(opt: Any, parameter: nn.Parameter) -> Any:
    return copy.deepcopy((parameter.detach(), dict(opt.state[parameter])))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("bad", "name", "machine"),
    [
        *mixed(10, BAD, OPTIMIZERS, ["cpu", "as_accelerator"]),
        (("fused", "nan"), "sgd", "compiled"),
        (("q", "nan"), "adam", "compiled"),
        pytest.param(("k", "overflow"), "adam-amsgrad", "compiled", marks=pytest.mark.slow),
    ],
    indirect=["machine"],
)
def test_skip_keeps_one_parameter_and_moves_the_others(bad: tuple[str, str], name: str) -> None:
    kind, value = bad
    net, opt = trained(name)
    backward(net, 3)
    weight = spoil(net, kind, VALUES[value])
    before, grad = everything(opt, weight), weight.grad.clone()
    others = {n: p.detach().clone() for n, p in net.named_parameters() if p is not weight}
    twin, twin_opt = copy.deepcopy((net, opt))
    for parameter, own in zip(twin.parameters(), net.parameters(), strict=True):
        parameter.grad = None if own is weight else own.grad.clone()
    twin_opt.step()
    with pytest.warns(UserWarning, match=rf"gradient of {kind}\.weight .* not finite"):
        step_and_tell(opt)
    assert_same(everything(opt, weight), before)
    assert torch.equal(weight.grad, grad) or value == "nan"  # never written to
    for other, earlier in others.items():
        now = net.get_parameter(other)
        assert now.isfinite().all(), other
        assert not torch.equal(now, earlier), other
        expected = twin.get_parameter(other)  # as if the bad one had no gradient
        torch.testing.assert_close(now, expected, rtol=1e-5, atol=1e-6, msg=other)
    assert opt.skipped_steps() == {f"{kind}.weight": 1}
    train(net, opt, 4, 8)  # as if nothing had happened
    assert so.orthonormality_error(net) < 1e-5


def test_one_warning_names_eight_and_counts_the_others() -> None:
    params = [(f"w{i}", so.ManifoldParameter(torch.eye(4, 2))) for i in range(12)]
    opt = so.StiefelAdam([*params, ("bias", nn.Parameter(torch.ones(3)))], lr=0.1)
    for number, (_, parameter) in enumerate(params):
        parameter.grad = torch.full((4, 2), math.nan if number < 11 else 1.0)
    with pytest.warns(UserWarning, match=r"gradient of w0 .*, w7 .* and 3 more") as caught:
        opt.step()
    assert len(caught) == 1
    assert "w8" not in str(caught[0].message)
    assert opt.skipped_steps() == {f"w{i}": 1 for i in range(11)}
    assert not torch.equal(params[11][1], torch.eye(4, 2))


@pytest.mark.parametrize("equal", [False, True])
def test_each_gradient_is_judged_by_its_own_length(equal: bool) -> None:
    """Four hundred of nearly the longest that is safe have a common length that is not."""
    params = [so.ManifoldParameter(torch.eye(4 + (i % 5) * (not equal), 2)) for i in range(400)]
    opt = so.StiefelSGD(params, lr=1e-13)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter).cumsum(0)
        parameter.grad *= 1.5e13 / parameter.grad.norm()
    opt.step()
    assert opt.skipped_steps() == {}
    params[300].grad *= 2
    with pytest.warns(UserWarning, match="gradient of parameter 300 of group 0"):
        opt.step()
    assert opt.skipped_steps() == {"parameter 300 of group 0": 1}


@on_machines(cpu="adam", as_accelerator="sgd-nesterov", compiled="sgd")
def test_ignore_looks_at_nothing(name: str) -> None:
    net, opt = trained(name, nonfinite="ignore")
    backward(net, 3)
    bad = spoil(net, "turn", math.nan)
    opt.step()
    assert bool(bad.isfinite().all()) == TABLE[name].searches  # and has no direction then


@on_machines(cpu="sgd", as_accelerator="adam")
def test_finite_gradients_move_alike_under_every_choice(name: str) -> None:
    reference, *nets = (trained(name, nonfinite=c)[0] for c in ("skip", "raise", "ignore"))
    for net in nets:
        for left, right in zip(net.parameters(), reference.parameters(), strict=True):
            assert torch.equal(left, right)


@on_machines(cpu="sgd", as_accelerator="adam", compiled="adam")
def test_plain_parameters_keep_what_torch_does(name: str) -> None:
    net, opt = trained(name)
    backward(net, 3)
    net.out.weight.grad[0, 0] = math.nan
    opt.step()
    assert net.out.weight[0, 0].isnan()
    assert opt.skipped_steps() == {}


@on_machines(cpu="sgd", as_accelerator="adam-amsgrad", compiled="sgd-nesterov")
def test_a_bad_first_gradient_starts_nothing(name: str) -> None:
    """Not even the projection of a start off the manifold."""
    start = 3 * torch.eye(5, 2)
    weight = so.ManifoldParameter(start.clone(), project=False)
    opt = optimizer(name, [weight])
    weight.grad = torch.full((5, 2), math.nan)
    with pytest.warns(UserWarning, match="not finite"):
        step_and_tell(opt)
    assert torch.equal(weight, start)
    assert opt.state[weight]["step"] == 0
    weight.grad = torch.randn(5, 2)
    opt.step()  # projects it
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize("shape", [(40, 64, 96), (3000, 16, 24)])
def test_a_parameter_spread_over_batches_is_kept_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = so.ManifoldParameter(torch.linalg.qr(torch.randn(shape).mT).Q.mT.contiguous())
    opt = so.StiefelAdam([weight], lr=0.1)
    weight.grad = torch.randn(shape)
    opt.step()
    before = everything(opt, weight)
    weight.grad = torch.randn(shape)
    weight.grad[-1, 0, 0] = math.nan
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    assert_same(everything(opt, weight), before)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "dtype", "machine"),
    in_turn(
        OPTIMIZERS,
        [torch.bfloat16, torch.float16, torch.complex64, torch.float64],
        ["cpu", "as_accelerator", "as_accelerator"],
    ),
    indirect=["machine"],
)
def test_every_dtype(name: str, dtype: torch.dtype) -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3, dtype=dtype))
    opt = optimizer(name, [weight])
    weight.grad = torch.ones(6, 3, dtype=dtype)
    opt.step()
    before = everything(opt, weight)
    weight.grad[2, 1] = math.inf
    with pytest.warns(UserWarning, match="not finite"):
        step_and_tell(opt)
    assert_same(everything(opt, weight), before)


def test_report_shows_the_steps_that_each_parameter_has_missed_and_loading_keeps_them() -> None:
    net, opt = trained("adam")
    backward(net, 3)
    spoil(net, "k", math.nan)
    with pytest.warns(UserWarning, match="not finite"):
        opt.step()
    lines = {line.name: line.skipped for line in so.report(net, opt).lines}
    assert lines == {f"{kind}.weight": int(kind == "k") for kind in KINDS}
    assert "skipped steps" in str(so.report(net, opt))
    assert "skipped" not in str(so.report(net))
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.skipped_steps() == {"k.weight": 1}


@pytest.mark.filterwarnings("ignore:The gradient of")
@pytest.mark.parametrize("nonfinite", ["skip", "ignore"])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_report_works_after_a_gradient_that_is_not_finite(value: float, nonfinite: str) -> None:
    for name in OPTIMIZERS:
        net = so.constrain(nn.Linear(4, 6, bias=False))
        opt = optimizer(name, net.parameters(), nonfinite=nonfinite)
        for size in (1.0, value):
            net.weight.grad = torch.full_like(net.weight, size)
            opt.step()
        (line,) = so.report(net, opt).lines
        if nonfinite == "skip":  # it has not moved in the last step
            assert line.angle is None


def test_report_tells_the_angle_of_half_precision_without_momentum() -> None:
    net = so.constrain(nn.Linear(4, 6, bias=False)).bfloat16()
    opt = so.StiefelSGD(net.parameters(), lr=0.1, momentum=0.0)
    net.weight.grad = torch.randn_like(net.weight)
    opt.step()
    angle = so.report(net, opt).lines[0].angle
    assert angle is not None
    assert 0 < angle < math.pi / 2


def fused_beside_others(name: str, **options: Any) -> tuple[list[nn.Parameter], Any]:
    """A square and two tall ranges and plain rows, a weight equal to the tall ones, a plain one."""
    torch.manual_seed(0)
    layer = so.constrain(nn.Linear(6, 27, bias=False), rows=((0, 6), (6, 15), (15, 24)))
    weights = [so.ManifoldParameter(torch.randn(9, 6)), layer.weight, nn.Parameter(torch.ones(3))]
    opt = optimizer(name, weights, weight_decay=0, **options)
    for step in range(3):
        fill(weights, step)
        opt.step()
    return weights, opt


def fill(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


ROWS = ((0, 6), (6, 15), (15, 24), (24, 27))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "bad", "at", "choice", "machine"),
    mixed(
        12,
        RULES,
        [math.nan, math.inf, 3e13, 3e38],
        range(-1, len(ROWS)),
        ["skip", "raise"],
        ["cpu", "as_accelerator"],
    ),
    indirect=["machine"],
)
def test_a_bad_range_of_a_fused_weight_is_that_of_its_parameter(
    name: str, bad: float, at: int, choice: str
) -> None:
    """Whichever range or, for -1, the separate weight has it: all or nothing of it moves."""
    weights, opt = fused_beside_others(name, nonfinite=choice)
    before = [everything(opt, weight) for weight in weights]
    fill(weights, 3)
    spoilt = weights[0] if at < 0 else weights[1]
    spoilt.grad[0 if at < 0 else ROWS[at][1] - 1, 2] = bad
    if choice == "raise":
        named = f"`grad of parameter {int(at >= 0)} of group 0` must be finite .* shape"
        with pytest.raises(ValueError, match=named):
            opt.step()
    else:
        with pytest.warns(UserWarning, match=f"parameter {int(at >= 0)} .* not finite"):
            step_and_tell(opt)
        assert opt.skipped_steps() == {f"parameter {int(at >= 0)} of group 0": 1}
    for weight, earlier in zip(weights, before, strict=True):
        if choice == "raise" or weight is spoilt:
            assert_same(everything(opt, weight), earlier)
        else:
            assert not torch.equal(weight, earlier[0])
    assert max(map(so.orthonormality_error, weights[:2])) < 1e-5


@pytest.mark.parametrize("choice", ["skip", "raise"])
@pytest.mark.parametrize(("name", "at"), in_turn([*PROPORTIONAL, *PROPORTIONAL[:1]], [0, 1, 2, 2]))
def test_an_overflow_of_a_step_restarts_its_matrix_and_no_other(
    name: str, at: int, choice: str
) -> None:
    """No gradient shows it: a momentum of 1e20 whose square is not a number of float32."""
    weights, opt = fused_beside_others(name, nonfinite=choice)
    twins, other = fused_beside_others(name)
    kept = twins[1].detach()[slice(*ROWS[at])].clone()
    velocity = [list(parts) for parts in opt.velocity(weights[1])]
    for parts in velocity:
        parts[at] *= 1e20
    opt.set_velocity(weights[1], *map(tuple, velocity))
    fill(weights, 3)
    fill(twins, 3)
    other.step()
    if choice == "raise":
        with pytest.raises(ValueError, match="`step of parameter 1 of group 0` must be finite"):
            opt.step()
    else:
        with pytest.warns(UserWarning, match="parameter 1 of .* not finite"):
            opt.step()
    assert torch.equal(weights[1][slice(*ROWS[at])], kept)
    with torch.no_grad():  # and the others move as ever
        twins[1][slice(*ROWS[at])] = kept
    for weight, twin in zip(weights, twins, strict=True):
        torch.testing.assert_close(weight, twin, rtol=0, atol=1e-5)
    pairs = zip(opt.velocity(weights[1]), other.velocity(twins[1]), strict=True)
    for parts, expected in pairs:
        for index, (part, twin) in enumerate(zip(parts, expected, strict=True)):
            torch.testing.assert_close(part, twin * (index != at), rtol=0, atol=1e-5)
    assert opt.skipped_steps() == {"parameter 1 of group 0": 1}
    for step in range(4, 8):
        fill(weights, step)
        opt.step()
    assert max(map(so.orthonormality_error, weights[:2])) < 1e-5


@pytest.mark.parametrize(
    ("name", "dtype", "choice", "options"),
    [
        *mixed(12, OPTIMIZERS, [torch.float32, torch.float64], ["skip", "raise"], [{}]),
        *((name, torch.float32, "raise", {}) for name in PUBLISHED),
        *((name, torch.float64, "skip", {}) for name in PUBLISHED),
    ],
)
def test_gradients_of_any_size_leave_points_and_state_sound(
    name: str, dtype: torch.dtype, choice: str, options: dict[str, Any], generator: torch.Generator
) -> None:
    exponents = (10, 13, 20, 30, 38) if dtype == torch.float32 else (30, 147, 150, 230, 307)
    for exponent in exponents:
        shapes = ((12, 4), (4, 20), (6, 6), (10, 9))
        starts = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
        weights = [so.ManifoldParameter(start) for start in starts]
        opt = optimizer(name, weights, weight_decay=0, nonfinite=choice, **options)
        refused = 0
        for step in range(8):
            size = 10.0**exponent if 2 < step < 6 else 1.0
            for weight in weights:
                grad = torch.randn(weight.shape, generator=generator, dtype=dtype)
                weight.grad = grad * (size / grad.norm())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    opt.step()
                except ValueError:
                    refused += 1
        for weight in weights:
            assert so.orthonormality_error(weight) < 1e3 * torch.finfo(dtype).eps, exponent
            assert all(tensor.isfinite().all() for tensor in opt.state[weight].values()), exponent
        if name not in PUBLISHED:  # the published flows overflow by themselves
            unsafe = 3 * (exponent > exponents[1])
            assert refused == unsafe * (choice == "raise"), exponent
            assert sum(opt.skipped_steps().values()) == 4 * unsafe * (choice == "skip"), exponent


@pytest.mark.parametrize("scheduled", [False, True])
def test_warnings_show_the_line_of_the_user(scheduled: bool) -> None:
    """However many functions of torch lie between: a scheduler puts one more around the step."""
    with pytest.warns(UserWarning, match="no parameter is constrained") as heard:
        so.StiefelAdamW([nn.Parameter(torch.eye(3)) for _ in range(2)])
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = so.StiefelSGD([weight], lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(opt, 1)
    weight.grad = torch.full_like(weight, math.nan)
    with pytest.warns(UserWarning, match="was not finite") as skipped:
        opt.step()
    assert {warning.filename for warning in (*heard, *skipped)} == {__file__}


def test_a_point_far_off_the_manifold_is_not_spoilt(generator: torch.Generator) -> None:
    """X'G is too large to be safe although G is not: the step is missed, and the next one heals."""
    weight = so.ManifoldParameter(torch.linalg.qr(torch.randn(40, 39, generator=generator)).Q)
    opt = so.StiefelSGD([weight], lr=0.05)
    weight.grad = torch.randn(40, 39, generator=generator)
    opt.step()
    weight.data.mul_(1e10)  # unseen: neither the version nor the memory is another
    before = weight.detach().clone()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(8):
            opt.step()
            if not torch.equal(weight, before):
                break
    assert any("was not finite" in str(warning.message) for warning in heard)
    assert opt.skipped_steps()
    assert all(tensor.isfinite().all() for tensor in opt.state[weight].values())
    for _ in range(3):
        opt.step()
    assert so.orthonormality_error(weight) < 1e-6


@on_machines(cpu="sgd adam-amsgrad", as_accelerator="adam", compiled="adam")
def test_a_spike_that_the_point_does_not_show_is_left_out(name: str) -> None:
    """X'G = 0 exactly, and the squares of G overflow: no state may become infinite."""
    weight, other = so.ManifoldParameter(torch.eye(6, 3)), so.ManifoldParameter(torch.eye(6, 3))
    opt = optimizer(name, [("spiked", weight), ("quiet", other)], weight_decay=0)
    weight.grad, other.grad = torch.zeros(6, 3), torch.zeros(6, 3)
    weight.grad[3:], other.grad[3:] = 1e25, 1e-2
    with pytest.warns(UserWarning, match="gradient of spiked .* not finite"):
        step_and_tell(opt)
    assert opt.skipped_steps() == {"spiked": 1}
    assert torch.equal(weight, torch.eye(6, 3))
    assert not torch.equal(other, torch.eye(6, 3))
    for parameter in (weight, other):
        assert all(tensor.isfinite().all() for tensor in opt.state[parameter].values())
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        weight.grad = torch.randn(6, 3, generator=generator)
        opt.step()
    assert float(weight.detach()[3:].abs().max()) > 1e-2


@pytest.mark.filterwarnings("ignore:The gradient of", "ignore:A step of")
@pytest.mark.parametrize("factor", [10.0, 30.0, 100.0])
def test_a_write_to_data_that_makes_a_step_steep_leaves_the_point_finite(factor: float) -> None:
    """Corrections of a point that is so far off diverge; the step that sees it projects it."""
    torch.manual_seed(0)
    parameter = so.ManifoldParameter(torch.linalg.qr(torch.randn(30, 4))[0])
    opt = so.StiefelSGD([parameter], lr=1e-2)
    for _ in range(9):
        parameter.grad = torch.randn(30, 4)
        opt.step()
    parameter.data.mul_(factor)
    for _ in range(8):
        parameter.grad = 10 * parameter.detach()
        opt.step()
        assert parameter.isfinite().all()
    assert float(so.orthonormality_error(parameter)) < 1e-5


def test_a_learning_rate_whose_square_underflows_judges_gradients_as_others() -> None:
    parameter = so.ManifoldParameter(torch.eye(30, 4))
    opt = so.StiefelSGD([parameter], lr=1e-24)
    for size in (*[1.0] * 12, 1e18):
        parameter.grad = size * torch.randn(30, 4)
        parameter.grad[:4] = 0  # normal to the point: only the step's length shows it
        if size > 1:
            with pytest.warns(UserWarning, match="The gradient of"):
                opt.step()
        else:
            opt.step()
    assert list(opt.skipped_steps_of().values()) == [1]
