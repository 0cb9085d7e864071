"""What is peculiar to the rules of momentum: moments, and a momentum that is not evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from grids import METRICS, TRANSPORTS, in_turn, pairwise
from rule_cases import (
    ADAM,
    AMSGRAD,
    MOMENTUM,
    SHAPES,
    SKEW,
    UNPROJECTED,
    RuleCase,
    by_columns,
    problem,
    tensors,
)
from torch import Tensor

from stiefel_opt.functional import adam, evaluated, sgd
from stiefel_opt.functional.flows import corrected
from stiefel_opt.functional.momentum import largest_quotient
from stiefel_opt.numerics.geometry import random_point
from stiefel_opt.numerics.linalg import LOCAL_SUMS, gram

FIRST = {"step": 3.0}


def assert_alike(found: list[Any], rtol: float = 1e-13) -> None:
    """Two results of a rule are the same but for rounding."""
    first, second = map(tensors, found)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=rtol, atol=1e-15)


@pytest.mark.parametrize(
    ("shape", "eps", "amsgrad", "columns"),
    pairwise(SHAPES, [1e-8, 0.0], [False, True], [False, True]),
)
def test_one_pass_over_the_moments_gives_what_single_operations_give(
    shape, eps, amsgrad, columns, generator
):
    """A number as ``step`` takes torch's fused kernel, one for each matrix does not."""
    case = RuleCase(adam, {"eps": eps, "lr": 0.1}, AMSGRAD if amsgrad else ADAM)
    point, grad, state = problem(case, shape, generator)
    if columns:  # the memory of wide parameters
        point, grad = by_columns(point), by_columns(grad)
        state = {name: by_columns(tensor) for name, tensor in state.items()}
    steps = 3.0, torch.full((2, 1, 1), 3.0, dtype=torch.float64)
    assert_alike([case(point, grad, state, step=step) for step in steps])


def test_moments_of_another_order_in_memory_are_told_apart(generator):
    case = RuleCase(adam, {"lr": 0.1, **FIRST}, ADAM)
    point, grad, state = problem(case, (9, 4), generator)
    # second moments lie by columns, first ones by rows
    turned = {**state, "exp_avg_sq_normal": by_columns(state["exp_avg_sq_normal"])}
    assert_alike([case(point, grad, each) for each in (state, turned)])


@pytest.mark.parametrize(
    ("shape", "transport", "metric", "dtype", "counted"),
    pairwise(
        [(40, 6), (9, 9)], TRANSPORTS, METRICS, [torch.float64, torch.complex128], [True, False]
    ),
)
def test_without_a_gradient_a_step_of_adam_turns_no_further_than_the_step_before(
    shape, transport, metric, dtype, counted, generator
):
    """Transport turns U and not q: an entry of U may stand over a q that has never seen it."""
    point = random_point(3, *shape, generator=generator, dtype=dtype)
    grad = torch.randn(point.shape, generator=generator, dtype=dtype)
    case = RuleCase(adam, {"transport": transport, "metric": metric, "lr": 0.1}, ADAM)
    state, turns = case.state(point, generator, zero=True), []
    state = {name: t.real if name.startswith("exp_avg_sq") else t for name, t in state.items()}
    for number, gradient in [(1.0, grad), (2.0, grad * 0)]:
        step = number if counted else torch.full((3, 1, 1), number, dtype=torch.float64)
        moved, state, _ = case(point, gradient, state, step=step)
        turns.append(torch.linalg.matrix_norm(moved - point, 2))
        point = moved
    assert bool((turns[1] <= turns[0] * (1 + 1e-12)).all())


@pytest.mark.parametrize(
    "betas", [(0.9, 0.999), (0.0, 0.9), (0.5, 0.25), (0.9, 0.5), (0.9, 0.0), (0.0, 0.0)], ids=str
)
def test_quotients_of_adam_reach_their_bound_and_do_not_exceed_it(betas):
    """Where Cauchy and Schwarz have equality nothing is cut off."""
    mean, square = torch.zeros(2, dtype=torch.float64)
    for step in range(1, 30):
        ratio = betas[0] / max(betas[1], 1e-30)
        grad = torch.tensor(ratio**-step if 0 < ratio < 1e9 else 1.0, dtype=torch.float64)
        mean = betas[0] * mean + (1 - betas[0]) * grad
        square = betas[1] * square + (1 - betas[1]) * grad**2
        counts = float(step), torch.tensor(float(step), dtype=torch.float64)
        bounds = [float(largest_quotient(betas, count, mean.dtype)) for count in counts]
        assert min(bounds[0], 1e30) == pytest.approx(min(bounds[1], 1e30), rel=1e-12)
        assert float(mean / square.sqrt()) <= bounds[0] * (1 + 1e-12)
        if min(betas) > 0:
            assert float(mean / square.sqrt()) == pytest.approx(bounds[0], rel=1e-9)


@pytest.mark.parametrize("shape", [(3, 3), (7, 7), (20, 6), (64, 10)], ids=str)
def test_second_moments_of_the_skew_part_stay_symmetric(shape, generator):
    """A steady torque adds up whatever (i, j) and (j, i) round differently."""
    n, m = shape
    point = random_point(3, n, m, generator=generator)
    torque = torch.randn(3, m, m, generator=generator)
    torque = torque - torque.mT
    state = RuleCase(adam, {}, ADAM).state(point, generator, zero=True)
    for step in range(1, 300):
        if step % 8 == 0:
            point, fixed = corrected(point, state, LOCAL_SUMS, normal=("momentum_normal",))
            state |= fixed
        point, new, _ = adam(point, point @ torque, state, lr=0.1, step=float(step))
        state |= new
    square, skew = state["exp_avg_sq_skew"], state[SKEW]
    torch.testing.assert_close(square, square.mT, rtol=0, atol=0)
    torch.testing.assert_close(skew, -skew.mT, rtol=0, atol=0)
    assert (gram(point) - torch.eye(m)).abs().max() < 4e-6


# ---- a normal momentum that is not evaluated -----------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "metric", "shape"),
    [
        (*flow, shape)
        for flow, shape in in_turn(
            [(transport, metric) for transport in TRANSPORTS for metric in METRICS],
            [(9, 4), (7, 1), (40, 20)],
        )
    ],
)
def test_a_momentum_that_is_not_evaluated_is_the_one_that_is(transport, metric, shape, generator):
    """Step by step: the same points, the same Z and U, though B is never normal to X."""
    names = (SKEW, *UNPROJECTED)
    if transport == "projected":
        names = (SKEW, UNPROJECTED[0], UNPROJECTED[2])
    options = {"lr": 0.1, "momentum": 0.8, "transport": transport, "metric": metric}
    case = RuleCase(sgd, options, names)
    point, _, state = problem(case, shape, generator)
    Z, U = evaluated(point, state)
    plain = {"momentum_skew": Z, "momentum_normal": U}
    other = point
    for _ in range(6):
        grad = torch.randn(point.shape, generator=generator, dtype=point.dtype)
        point, new, _ = case(point, grad, state)
        state = {**state, **new}
        other, new, _ = case(other, grad, plain)
        plain = {**plain, **new}
        torch.testing.assert_close(point, other, rtol=0, atol=1e-12)
        for found, name in zip(evaluated(point, state), MOMENTUM, strict=True):
            assert isinstance(found, Tensor)
            torch.testing.assert_close(found, plain[name], rtol=0, atol=1e-12)
    assert (point.mT @ state[UNPROJECTED[0]]).abs().max() > 1e-3


@pytest.mark.parametrize("names", [(), (SKEW,), MOMENTUM], ids=str)
def test_what_is_kept_evaluated_or_not_at_all_is_returned_as_it_is(names, generator):
    point, _, state = problem(RuleCase(sgd, {}, names), (9, 4), generator)
    found = evaluated(point, state)
    assert all(have is state.get(name) for have, name in zip(found, MOMENTUM, strict=True))
