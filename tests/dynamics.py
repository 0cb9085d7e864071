"""A problem of damped dynamics, and its step as a discretisation, by the package and by a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from cases import Array
from reference import (
    SGDReference,
    canonical_geodesic,
    euclidean_geodesic,
    momentum_dynamics,
    polar_factor,
)
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
    problem: Problem,
    grad: Callable[[Array], Array],
    steps: int,
    c: float,
    reference: Any = SGDReference,
    **options: Any,
) -> State:
    loop = reference(problem.X, **options)
    loop.Z, loop.U = problem.Y / c, problem.V / c
    for _ in range(steps):
        loop.step(grad(loop.X))
    return loop.X, c * loop.Z, c * loop.U


def run_optimizer(
    problem: Problem,
    grad: Callable[[Array], Array],
    steps: int,
    c: float,
    rule: Any = so.StiefelSGD,
    **options: Any,
) -> State:
    param = so.ManifoldParameter(torch.tensor(problem.X))
    optimizer = rule([param], **options)
    optimizer.set_velocity(param, torch.tensor(problem.Y / c), torch.tensor(problem.V / c))
    for _ in range(steps):
        param.grad = torch.tensor(grad(param.detach().numpy()))
        optimizer.step()
    Z, U = optimizer.velocity(param)
    return param.detach().numpy(), c * Z.numpy(), c * U.numpy()


STEPPERS = pytest.mark.parametrize("run", [run_reference, run_optimizer])


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


GEODESICS = pytest.mark.parametrize(
    ("metric", "geodesic"),
    [("canonical", canonical_geodesic), ("euclidean", euclidean_geodesic)],
)


def free_errors(
    run: Stepper, problem: Problem, expected: Array, metric: str, **options: Any
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
            **options,
        )
        errors.append(np.linalg.norm(X - expected))
    return np.array(errors)
