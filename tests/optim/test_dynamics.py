"""The step as a discretisation: damped dynamics with force, and geodesics without.

With friction gamma and time step h the optimizer has momentum mu = exp(-gamma h), learning rate
c h and momenta Z = Y/c, U = V/c, where c = (1 - mu)/gamma. The slow reference is held to the same
laws, so that the loops everything else is compared with are themselves right.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cases import Array
from dynamics import (
    COLUMNS,
    FRICTION,
    GEODESICS,
    STEPPERS,
    Problem,
    State,
    Stepper,
    damped_errors,
    exact,
    free_errors,
    integrate,
    orders,
)
from dynamics import problem as problem
from grids import TRANSPORTS
from reference import (
    momentum_dynamics,
)


@pytest.mark.parametrize("flow", ["whole", "first", "second", "third"])
@pytest.mark.parametrize("coefficient", [(3 * 0.25 - 2) / 2, 2 * 0.25 - 1])
def test_the_exact_dynamics_and_each_split_flow_stay_on_the_manifold(
    problem: Problem, flow: str, coefficient: float
) -> None:
    """Theorems 2 to 4 of Kong, Wang & Tao, and the same with the corrected coefficient."""
    metric = 0.25
    options = {"friction": FRICTION, "metric": metric, "kappa": coefficient}

    def rates(X: Array, Y: Array, V: Array) -> State:
        whole = momentum_dynamics(X, Y, V, problem.grad(X), **options)
        first = (X @ Y, whole[1], 0 * V)
        third = (V, 0 * Y, -X @ (V.T @ V))
        second = (0 * X, 0 * Y, whole[2] - third[2])
        return {"whole": whole, "first": first, "second": second, "third": third}[flow]

    X, Y, V = integrate(problem, rates)
    moved = zip((X, Y, V), (problem.X, problem.Y, problem.V), strict=True)
    assert max(np.abs(end - start).max() for end, start in moved) > 0.1
    np.testing.assert_allclose(X.T @ X, np.eye(COLUMNS), atol=1e-9)
    np.testing.assert_allclose(X.T @ V, 0 * Y, atol=1e-9)
    np.testing.assert_allclose(Y, -Y.T, atol=1e-9)


@STEPPERS
@pytest.mark.parametrize(
    ("transport", "metric"),
    [
        *(("isometric", metric) for metric in (0.5, -1.0)),
        *(("projected", metric) for metric in (0.0, -1.0)),
    ],
)
def test_each_transport_converges_to_its_own_dynamics_with_order_one(
    run: Stepper, transport: str, metric: float, problem: Problem
) -> None:
    expected = exact(problem, metric, 2 * metric - 1)
    for errors in damped_errors(run, problem, expected, metric, transport=transport):
        assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@GEODESICS
def test_the_closed_forms_solve_the_free_dynamics(
    metric: str, geodesic: Callable[..., Array], problem: Problem
) -> None:
    a = {"canonical": 0.5, "euclidean": 0.0}[metric]
    X, _, _ = exact(problem, a, 2 * a - 1, friction=0.0)
    assert np.abs(X - geodesic(problem.X, problem.Y, problem.V, 1.0)).max() < 1e-9


@STEPPERS
@GEODESICS
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_without_friction_and_force_the_flows_follow_the_geodesic(
    run: Stepper,
    transport: str,
    metric: str,
    geodesic: Callable[..., Array],
    problem: Problem,
) -> None:
    expected = geodesic(problem.X, problem.Y, problem.V, 1.0)
    errors = free_errors(run, problem, expected, metric, transport=transport)
    assert errors[-1] < 0.01
    assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@STEPPERS
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_free_motion_keeps_every_singular_value_of_the_velocity_or_projects_it_to_smaller_ones(
    run: Stepper, transport: str, problem: Problem
) -> None:
    options = {"lr": 0.05, "momentum": 1.0, "metric": -1.0, "transport": transport}
    _, Y, V = run(problem, np.zeros_like, 50, 1.0, **options)
    for carried, start in ((Y, problem.Y), (V, problem.V)):
        values, start_values = (np.linalg.svd(part, compute_uv=False) for part in (carried, start))
        if transport == "isometric":
            assert np.abs(values - start_values).max() < 1e-12
        else:
            assert (values < start_values + 1e-12).all()
            assert values[0] < 0.999 * start_values[0]
