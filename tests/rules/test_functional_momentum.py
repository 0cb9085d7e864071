"""What is peculiar to the rules of momentum: moments, and a momentum that is not evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import METRICS, TRANSPORTS, in_turn, pairwise
from rule_cases import (
    ADAM,
    AMSGRAD,
    DEFERRED,
    MOMENTUM,
    SHAPES,
    SKEW,
    RuleCase,
    by_columns,
    problem,
    tensors,
)
from torch import Tensor

from stiefel_opt.functional import adam, evaluated, sgd
from stiefel_opt.functional.flows import corrected
from stiefel_opt.geometry import random_point
from stiefel_opt.linalg import LOCAL_SUMS, own_gram

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
    assert (own_gram(point) - torch.eye(m)).abs().max() < 4e-6


# ---- a normal momentum that is not evaluated -----------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "metric", "shape", "force"),
    [
        (*flow, shape, force)
        for flow, shape, force in in_turn(
            [(transport, metric) for transport in TRANSPORTS for metric in METRICS],
            [(9, 4), (7, 1), (40, 20)],
            [1.0, -0.5],
        )
    ],
)
def test_a_momentum_that_is_not_evaluated_is_the_one_that_is(
    transport, metric, shape, force, generator
):
    """Step by step: the same points, the same Z and U, though B is never normal to X."""
    names = (SKEW, *DEFERRED) if transport == "isometric" else (SKEW, DEFERRED[0], DEFERRED[2])
    options = {"lr": 0.1, "momentum": 0.8, "transport": transport, "metric": metric}
    case = RuleCase(sgd, {**options, "force": force}, names)
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
    assert (point.mT @ state[DEFERRED[0]]).abs().max() > 1e-3


@pytest.mark.parametrize("names", [(), (SKEW,), MOMENTUM], ids=str)
def test_what_is_kept_evaluated_or_not_at_all_is_returned_as_it_is(names, generator):
    point, _, state = problem(RuleCase(sgd, {}, names), (9, 4), generator)
    found = evaluated(point, state)
    assert all(have is state.get(name) for have, name in zip(found, MOMENTUM, strict=True))
