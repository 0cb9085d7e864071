"""The order study of `flows.py`: StiefelSGD against the exact dynamics it discretises.

Velocity Q = XY + V, friction gamma, metric parameter a (Kong, Wang & Tao, ICLR 2023, eq. 8):

    X' = XY + V,   Y' = -gamma Y - f(X),   V' = -gamma V + kappa VY - X V'V - g(X),

f = (X'G - G'X) / (2 (1 - a)), g = (I - XX')G. kappa = 2a - 1 gives the geodesics of the metric and
belongs to the isometric flows; the published flows have (3a - 2)/2, with the opposite sign where
algorithm 1 prints it (the form "printed"). One step of length h is mu = exp(-gamma h),
c = (1 - mu)/gamma, lr = c h, with Z = Y/c and U = V/c.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from tqdm import tqdm

import stiefel_opt as so
from benchmarks.common.harness import PrintedSGD

Matrix = NDArray[np.float64]

OPTIMIZERS = {"isometric": so.StiefelSGD, "published": so.PublishedSGD, "printed": PrintedSGD}
METRICS = {"1/2": 0.5, "0": 0.0, "-1": -1.0}
DURATION = 1.0
SHAPE = (8, 3)
DRAWS = 3
COUNTS = [2**exponent for exponent in range(4, 11)]  # of steps


@dataclass(frozen=True)
class Setting:
    """What moves the point: friction, size of the start's velocity, size of the gradient."""

    name: str
    friction: float
    speed: float
    force: float


SETTINGS = (
    Setting("driven", friction=1.0, speed=1.0, force=1.0),
    Setting("coasting", friction=0.1, speed=2.0, force=0.0),
)


@dataclass(frozen=True)
class Problem:
    """The smooth cost tr(X'AXN)/2 + tr(B'X), a start (X, Y, V) with X'V = 0, and the friction."""

    quadratic: Matrix
    weights: Matrix
    linear: Matrix
    point: Matrix
    skew: Matrix
    normal: Matrix
    friction: float

    def gradient(self, point: Matrix) -> Matrix:
        return self.quadratic @ point @ self.weights + self.linear


def draw_problem(seed: int, setting: Setting) -> Problem:
    generator = np.random.default_rng(seed)
    n, m = SHAPE
    gaussian = generator.standard_normal((n, n))
    quadratic = (gaussian + gaussian.T) / 2 / math.sqrt(n)
    point = np.linalg.qr(generator.standard_normal((n, m))).Q
    turn = generator.standard_normal((m, m))
    normal = generator.standard_normal((n, m)) / math.sqrt(n)
    return Problem(
        setting.force * quadratic,
        np.diag(np.arange(m, 0.0, -1.0)),
        setting.force * generator.standard_normal((n, m)) / math.sqrt(n),
        point,
        setting.speed * (turn - turn.T) / 2,
        setting.speed * (normal - point @ (point.T @ normal)),
        setting.friction,
    )


def coupling(form: str, a: float) -> float:
    """kappa of the dynamics a form is meant to follow."""
    return 2 * a - 1 if form == "isometric" else (3 * a - 2) / 2


def exact_end(problem: Problem, a: float, kappa: float) -> Matrix:
    """Position X and velocity XY + V at the end of the exact dynamics, stacked: (2, n, m)."""
    n, m = SHAPE

    def slope(_time: float, flat: Matrix) -> Matrix:
        point, normal = flat[: n * m].reshape(n, m), flat[n * m : 2 * n * m].reshape(n, m)
        skew = flat[2 * n * m :].reshape(m, m)
        grad = problem.gradient(point)
        inner = point.T @ grad
        torque = (inner - inner.T) / (2 * (1 - a))
        force = grad - point @ inner
        bend = kappa * normal @ skew - point @ (normal.T @ normal)
        return np.concatenate([
            (point @ skew + normal).ravel(),
            (-problem.friction * normal + bend - force).ravel(),
            (-problem.friction * skew - torque).ravel(),
        ])  # fmt: skip

    begin = np.concatenate([problem.point.ravel(), problem.normal.ravel(), problem.skew.ravel()])
    solution = solve_ivp(slope, (0.0, DURATION), begin, method="DOP853", rtol=1e-12, atol=1e-13)
    if not solution.success:
        raise RuntimeError(f"solve_ivp must reach T = {DURATION}, got {solution.message!r}")
    end = solution.y[:, -1]
    point, normal = end[: n * m].reshape(n, m), end[n * m : 2 * n * m].reshape(n, m)
    return np.stack([point, point @ end[2 * n * m :].reshape(m, m) + normal])


def optimizer_end(problem: Problem, a: float, form: str, steps: int) -> Matrix:
    """Position and velocity after ``steps`` steps of StiefelSGD over the same time."""
    h = DURATION / steps
    mu = math.exp(-problem.friction * h)
    c = (1 - mu) / problem.friction
    parameter = so.ManifoldParameter(torch.from_numpy(problem.point.copy()))
    optimizer = OPTIMIZERS[form]([parameter], lr=c * h, momentum=mu, metric=a)
    skew, normal = torch.from_numpy(problem.skew), torch.from_numpy(problem.normal)
    optimizer.set_velocity(parameter, skew / c, normal / c)
    for _ in range(steps):
        point = parameter.detach().numpy()
        parameter.grad = torch.from_numpy(problem.gradient(point))
        optimizer.step()
    end_skew, end_normal = (c * part.numpy() for part in optimizer.velocity(parameter))
    end = parameter.detach().numpy().copy()
    return np.stack([end, end @ end_skew + end_normal])


@dataclass(frozen=True)
class Order:
    """Global errors of one form at one metric, medians over the draws."""

    setting: str
    form: str
    metric: str
    against: str  # whose dynamics: "own" or "metric"
    h: list[float]
    position_error: list[float]
    velocity_error: list[float]

    def order(self, errors: list[float]) -> float:
        """Slope between the two smallest steps."""
        return math.log2(errors[-2] / errors[-1]) / math.log2(self.h[-2] / self.h[-1])

    def constant(self, errors: list[float]) -> float:
        return errors[-1] / self.h[-1]


def measure_orders() -> list[Order]:
    """Errors for every count of steps, every form, every metric."""
    orders = []
    work = itertools.product(SETTINGS, OPTIMIZERS, METRICS)
    for setting, form, metric in tqdm(list(work), desc="order", unit="curve"):
        problems = [draw_problem(seed, setting) for seed in range(DRAWS)]
        a = METRICS[metric]
        ends = [[optimizer_end(problem, a, form, count) for count in COUNTS]
                for problem in problems]  # fmt: skip
        targets = {"own": coupling(form, a)}
        if form == "published" and coupling("isometric", a) != targets["own"]:
            targets["metric"] = coupling("isometric", a)
        for against, kappa in targets.items():
            exact = [exact_end(problem, a, kappa) for problem in problems]
            errors = np.array([
                [np.linalg.norm(end - reached, axis=(1, 2)) for end in row]
                for row, reached in zip(ends, exact, strict=True)
            ])  # fmt: skip
            position, velocity = np.median(errors, axis=0).T
            steps = [DURATION / count for count in COUNTS]
            errors_x, errors_q = position.tolist(), velocity.tolist()
            orders.append(Order(setting.name, form, metric, against, steps, errors_x, errors_q))
    return orders
