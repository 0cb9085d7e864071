"""The step as a discretisation: damped dynamics with force, and geodesics without.

With friction gamma and time step h the optimizer has momentum mu = exp(-gamma h), learning rate
c h and momenta Z = Y/c, U = V/c, where c = (1 - mu)/gamma. The slow reference is held to the same
laws, so that the loops everything else is compared with are themselves right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cases import Array
from grids import TRANSPORTS
from reference import (
    SGDReference,
    canonical_geodesic,
    euclidean_geodesic,
    momentum_dynamics,
    polar_factor,
)
from rows_of_methods import ROTATIONS
from scipy.integrate import solve_ivp

import stiefel_opt as so

FRICTION = 1.3
STEP_COUNTS = (64, 128)
ROWS, COLUMNS = 6, 3

State = tuple[Array, Array, Array]
Stepper = Callable[..., State]
Rates = Callable[[Array, Array, Array], State]


@dataclass(frozen=True)
class Problem:
    """A start with nonzero Y and V, and the force of -tr(X'AX)/2 + <C, X>."""

    X: Array
    Y: Array
    V: Array
    cost: Array = field(repr=False)
    linear: Array = field(repr=False)

    def grad(self, point: Array) -> Array:
        return self.linear - self.cost @ point


@pytest.fixture(scope="module")
def problem() -> Problem:
    rng = np.random.default_rng(0)
    X = polar_factor(rng.standard_normal((ROWS, COLUMNS)))
    K = rng.standard_normal((COLUMNS, COLUMNS))
    V = rng.standard_normal((ROWS, COLUMNS))
    A = rng.standard_normal((ROWS, ROWS))
    linear = rng.standard_normal((ROWS, COLUMNS))
    return Problem(X, (K - K.T) / 2, V - X @ (X.T @ V), (A + A.T) / 2, linear)


def run_reference(
    problem: Problem, grad: Callable[[Array], Array], steps: int, c: float, **options: Any
) -> State:
    loop = SGDReference(problem.X, **options)
    loop.Z, loop.U = problem.Y / c, problem.V / c
    for _ in range(steps):
        loop.step(grad(loop.X))
    return loop.X, c * loop.Z, c * loop.U


def run_optimizer(
    problem: Problem, grad: Callable[[Array], Array], steps: int, c: float, **options: Any
) -> State:
    param = so.ManifoldParameter(torch.tensor(problem.X))
    rule = so.StiefelSGD
    if options.get("transport") == "published":
        rule, options = so.PublishedSGD, {k: v for k, v in options.items() if k != "transport"}
    optimizer = rule([param], **options)
    optimizer.set_velocity(param, torch.tensor(problem.Y / c), torch.tensor(problem.V / c))
    for _ in range(steps):
        param.grad = torch.tensor(grad(param.detach().numpy()))
        optimizer.step()
    Z, U = optimizer.velocity(param)
    return param.detach().numpy(), c * Z.numpy(), c * U.numpy()


STEPPERS = pytest.mark.parametrize("run", [run_reference, run_optimizer])


def kappa(metric: float, transport: str) -> float:
    return (3 * metric - 2) / 2 if transport == "published" else 2 * metric - 1


def integrate(problem: Problem, rates: Rates) -> State:
    """Where the equations (X, Y, V)' = `rates` lead by time 1."""
    shapes = ((ROWS, COLUMNS), (COLUMNS, COLUMNS), (ROWS, COLUMNS))
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def unpack(flat: Array) -> list[Array]:
        return [
            part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)
        ]

    def pack(parts: State) -> Array:
        return np.concatenate([part.ravel() for part in parts])

    def slope(_time: float, flat: Array) -> Array:
        return pack(rates(*unpack(flat)))

    start = pack((problem.X, problem.Y, problem.V))
    solution = solve_ivp(slope, (0, 1), start, method="DOP853", rtol=1e-10, atol=1e-12)
    X, Y, V = unpack(solution.y[:, -1])
    return X, Y, V


def exact(problem: Problem, metric: float, coefficient: float, friction: float = FRICTION) -> State:
    """The dynamics with kappa = `coefficient` at time 1; without force where friction is zero."""

    def rates(X: Array, Y: Array, V: Array) -> State:
        grad = problem.grad(X) if friction else np.zeros_like(X)
        return momentum_dynamics(X, Y, V, grad, friction=friction, metric=metric, kappa=coefficient)

    return integrate(problem, rates)


@pytest.mark.parametrize("flow", ["whole", "first", "second", "third"])
@pytest.mark.parametrize("form", ["published", "isometric"])
def test_the_exact_dynamics_and_each_split_flow_stay_on_the_manifold(
    problem: Problem, flow: str, form: str
) -> None:
    """Theorems 2 to 4 of Kong, Wang & Tao, and the same with the corrected coefficient."""
    metric = 0.25
    options = {"friction": FRICTION, "metric": metric, "kappa": kappa(metric, form)}

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


def damped_errors(
    run: Stepper, problem: Problem, expected: State, metric: float, **options: Any
) -> tuple[Array, Array]:
    """Errors of position and of velocity XY + V at time 1, for each step count."""
    positions, velocities = [], []
    for steps in STEP_COUNTS:
        momentum = math.exp(-FRICTION / steps)
        c = (1 - momentum) / FRICTION
        X, Y, V = run(
            problem,
            problem.grad,
            steps,
            c,
            lr=c / steps,
            momentum=momentum,
            metric=metric,
            **options,
        )
        positions.append(np.linalg.norm(X - expected[0]))
        velocities.append(np.linalg.norm(X @ Y + V - expected[0] @ expected[1] - expected[2]))
    return np.array(positions), np.array(velocities)


def orders(errors: Array) -> Array:
    return np.log2(errors[:-1] / errors[1:])


@STEPPERS
@pytest.mark.parametrize(
    ("transport", "metric"),
    [
        *(("isometric", metric) for metric in (0.5, -1.0)),
        *(("projected", metric) for metric in (0.0, -1.0)),
        ("published", 0.0),
    ],
)
def test_each_transport_converges_to_its_own_dynamics_with_order_one(
    run: Stepper, transport: str, metric: float, problem: Problem
) -> None:
    expected = exact(problem, metric, kappa(metric, transport))
    for errors in damped_errors(run, problem, expected, metric, transport=transport):
        assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@STEPPERS
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_every_rotation_has_order_one(run: Stepper, rotation: str, problem: Problem) -> None:
    expected = exact(problem, 0.3, kappa(0.3, "published"))
    options = {"transport": "published", "rotation": rotation}
    for errors in damped_errors(run, problem, expected, 0.3, **options):
        assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@STEPPERS
def test_the_published_transport_stays_away_from_the_dynamics_of_the_metric(
    run: Stepper, problem: Problem
) -> None:
    expected = exact(problem, 0.5, kappa(0.5, "isometric"))
    positions, _ = damped_errors(run, problem, expected, 0.5, transport="published")
    assert positions.min() > 0.02
    assert abs(orders(positions)[-1]) < 0.3


GEODESICS = pytest.mark.parametrize(
    ("metric", "geodesic"),
    [("canonical", canonical_geodesic), ("euclidean", euclidean_geodesic)],
)


def free_errors(
    run: Stepper, problem: Problem, expected: Array, metric: str, transport: str
) -> Array:
    """Errors of the position at time 1 without friction and force."""
    errors = []
    for steps in STEP_COUNTS:
        X, _, _ = run(
            problem,
            np.zeros_like,
            steps,
            1.0,
            lr=1 / steps,
            momentum=1.0,
            metric=metric,
            transport=transport,
        )
        errors.append(np.linalg.norm(X - expected))
    return np.array(errors)


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
    errors = free_errors(run, problem, expected, metric, transport)
    assert errors[-1] < 0.01
    assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@STEPPERS
def test_the_published_transport_leaves_the_canonical_geodesic(
    run: Stepper, problem: Problem
) -> None:
    expected = canonical_geodesic(problem.X, problem.Y, problem.V, 1.0)
    errors = free_errors(run, problem, expected, "canonical", "published")
    assert errors.min() > 0.05
    assert abs(orders(errors)[-1]) < 0.3


@STEPPERS
def test_the_published_transport_follows_the_euclidean_geodesic(
    run: Stepper, problem: Problem
) -> None:
    expected = euclidean_geodesic(problem.X, problem.Y, problem.V, 1.0)
    errors = free_errors(run, problem, expected, "euclidean", "published")
    assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@STEPPERS
def test_free_motion_keeps_every_singular_value_of_the_velocity(
    run: Stepper, problem: Problem
) -> None:
    _, Y, V = run(
        problem, np.zeros_like, 50, 1.0, lr=0.05, momentum=1.0, metric=-1.0, transport="isometric"
    )
    for carried, start in ((Y, problem.Y), (V, problem.V)):
        values, start_values = (np.linalg.svd(part, compute_uv=False) for part in (carried, start))
        assert np.abs(values - start_values).max() < 1e-12


@STEPPERS
def test_projection_shrinks_every_singular_value_of_a_velocity_that_turns(
    run: Stepper, problem: Problem
) -> None:
    _, Y, V = run(
        problem, np.zeros_like, 50, 1.0, lr=0.05, momentum=1.0, metric=-1.0, transport="projected"
    )
    for carried, start in ((Y, problem.Y), (V, problem.V)):
        values, start_values = (np.linalg.svd(part, compute_uv=False) for part in (carried, start))
        assert (values < start_values + 1e-12).all()
        assert values[0] < 0.999 * start_values[0]
