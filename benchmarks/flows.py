"""Isometric and published flows side by side: order, error constant, and what blows up when.

**Order.** The momentum dynamics of Kong, Wang & Tao (ICLR 2023, arXiv 2205.14173) with velocity
Q = XY + V, friction gamma and metric parameter a,

    X' = XY + V,   Y' = -gamma Y - f(X),   V' = -gamma V + kappa VY - X V'V - g(X),

f = (X'G - G'X) / (2 (1 - a)), g = (I - XX')G, is integrated by `scipy.integrate.solve_ivp` at tight
tolerances, with kappa = 2a - 1, which is the geodesic coefficient of the metric, for the isometric
flows, and with kappa = (3a - 2)/2, their own coefficient, for the published ones. The optimizer
runs from the same start with nonzero Y and V: mu = exp(-gamma h), c = (1 - mu)/gamma, lr = c h,
Z = Y/c, U = V/c. Printed are the order and the error constant (error at T over h), for position and
velocity; the dashed lines show the published flows against the dynamics of the metric itself.

**Blow-up.** 2,000 steps of random gradients of Frobenius norm 1, every seventh of norm 1000, at
learning rates up to 100: the largest |U| and the largest |X'X - I| on the way. The isometric flows
keep |U| below max|g|/(1 - mu) by construction.

    python benchmarks/flows.py            # about two minutes; JSON and PNG in benchmarks/results
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from harness import RESULTS, machine, markdown_table, write_json
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from torch import Tensor
from tqdm import tqdm

import stiefel_opt as so

mpl.use("Agg")
from matplotlib import pyplot as plt

Matrix = NDArray[np.float64]

FORMS: dict[str, dict[str, Any]] = {
    "isometric": {"transport": "isometric", "rotation": "polar"},
    "published": {"transport": "published", "rotation": "euler"},
}
METRICS = {"1/2": 0.5, "0": 0.0, "-1": -1.0}
FRICTION, DURATION = 1.0, 1.0
ORDER_SHAPE = (8, 3)
MOMENTUM = 0.9
BLOW_UP_SHAPE = (40, 7)
SIZES = (1.0, 1000.0)  # of the ordinary and of every seventh gradient


@dataclass(frozen=True)
class Problem:
    """The smooth cost tr(X'AXN)/2 + tr(B'X) and a start (X, Y, V) with X'V = 0."""

    quadratic: Matrix
    weights: Matrix
    linear: Matrix
    point: Matrix
    skew: Matrix
    normal: Matrix

    def gradient(self, point: Matrix) -> Matrix:
        return self.quadratic @ point @ self.weights + self.linear


def draw_problem(seed: int) -> Problem:
    generator = np.random.default_rng(seed)
    n, m = ORDER_SHAPE
    gaussian = generator.standard_normal((n, n))
    quadratic = (gaussian + gaussian.T) / 2 / math.sqrt(n)
    point = np.linalg.qr(generator.standard_normal((n, m))).Q
    turn = generator.standard_normal((m, m))
    normal = generator.standard_normal((n, m)) / math.sqrt(n)
    return Problem(
        quadratic,
        np.diag(np.arange(m, 0.0, -1.0)),
        generator.standard_normal((n, m)) / math.sqrt(n),
        point,
        (turn - turn.T) / 2,
        normal - point @ (point.T @ normal),
    )


def coupling(form: str, a: float) -> float:
    """kappa of the dynamics a form is meant to follow."""
    return 2 * a - 1 if form == "isometric" else (3 * a - 2) / 2


def exact_end(problem: Problem, a: float, kappa: float) -> Matrix:
    """Position X and velocity XY + V at the end of the exact dynamics, stacked: (2, n, m)."""
    n, m = ORDER_SHAPE

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
            (-FRICTION * normal + bend - force).ravel(),
            (-FRICTION * skew - torque).ravel(),
        ])  # fmt: skip

    begin = np.concatenate([problem.point.ravel(), problem.normal.ravel(), problem.skew.ravel()])
    solution = solve_ivp(slope, (0.0, DURATION), begin, method="DOP853", rtol=1e-12, atol=1e-13)
    if not solution.success:
        raise RuntimeError(f"solve_ivp must reach T = {DURATION}, got {solution.message!r}")
    end = solution.y[:, -1]
    point, normal = end[: n * m].reshape(n, m), end[n * m : 2 * n * m].reshape(n, m)
    return np.stack([point, point @ end[2 * n * m :].reshape(m, m) + normal])


def set_velocity(optimizer: torch.optim.Optimizer, skew: Tensor, normal: Tensor) -> None:
    """Give the only parameter of ``optimizer`` the momenta Z and U, through its state_dict."""
    (group,) = optimizer.param_groups
    (parameter,) = group["params"]
    rate, group["lr"] = group["lr"], 0.0
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # at rate zero this allocates the state and changes nothing else
    group["lr"] = rate
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_skew"] = skew.clone()
    saved["state"][0]["momentum_normal"] = normal.clone()
    optimizer.load_state_dict(saved)


def optimizer_end(problem: Problem, a: float, form: str, steps: int) -> Matrix:
    """Position and velocity after ``steps`` steps of StiefelSGD over the same time."""
    h = DURATION / steps
    mu = math.exp(-FRICTION * h)
    c = (1 - mu) / FRICTION
    parameter = so.ManifoldParameter(torch.from_numpy(problem.point.copy()))
    optimizer = so.StiefelSGD([parameter], lr=c * h, momentum=mu, metric=a, **FORMS[form])
    skew, normal = torch.from_numpy(problem.skew), torch.from_numpy(problem.normal)
    set_velocity(optimizer, skew / c, normal / c)
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


def measure_orders(draws: int, finest: int) -> list[Order]:
    """Errors for step counts 2^4 ... 2^finest, both forms, every metric."""
    problems = [draw_problem(seed) for seed in range(draws)]
    counts = [2**exponent for exponent in range(4, finest + 1)]
    orders = []
    work = [(form, metric) for form in FORMS for metric in METRICS]
    for form, metric in tqdm(work, desc="order", unit="curve"):
        a = METRICS[metric]
        ends = [[optimizer_end(problem, a, form, count) for count in counts]
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
            steps = [DURATION / count for count in counts]
            orders.append(Order(form, metric, against, steps, position.tolist(), velocity.tolist()))
    return orders


@dataclass(frozen=True)
class BlowUp:
    """What a run at one learning rate came to; the step of the first non-finite number, if any."""

    optimizer: str
    form: str
    lr: float
    largest_momentum: float
    largest_error: float
    broke_at: int | None


def run_blow_up(kind: str, form: str, lr: float, steps: int) -> BlowUp:
    """Random gradients of norm 1, every seventh of norm 1000, from a random point."""
    generator = torch.Generator().manual_seed(3)
    shape = BLOW_UP_SHAPE
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
    parameter = so.ManifoldParameter(torch.linalg.qr(gaussian).Q)
    optimizer: Any
    if kind == "SGD":
        optimizer = so.StiefelSGD([parameter], lr=lr, momentum=MOMENTUM, **FORMS[form])
    else:
        optimizer = so.StiefelAdam([parameter], lr=lr, **FORMS[form])
    largest_momentum = largest_error = 0.0
    for step in range(1, steps + 1):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient * (SIZES[step % 7 == 0] / torch.linalg.norm(gradient))
        optimizer.step()
        momentum = float(torch.linalg.norm(optimizer.velocity(parameter)[1]))
        error = float(so.orthonormality_error(parameter))
        if not (math.isfinite(momentum) and math.isfinite(error)):
            return BlowUp(kind, form, lr, largest_momentum, largest_error, step)
        largest_momentum = max(largest_momentum, momentum)
        largest_error = max(largest_error, error)
    return BlowUp(kind, form, lr, largest_momentum, largest_error, None)


def measure_blow_up(rates: Sequence[float], steps: int) -> list[BlowUp]:
    work = [(kind, form, lr) for kind in ("SGD", "Adam") for form in FORMS for lr in rates]
    return [
        run_blow_up(kind, form, lr, steps)
        for kind, form, lr in tqdm(work, desc="blow-up", unit="run")
    ]


def momentum_bound(kind: str) -> float:
    """max|g|/(1 - mu) for SGD; Adam averages its gradients, so max|g|."""
    return max(SIZES) / (1 - MOMENTUM) if kind == "SGD" else max(SIZES)


def plot(orders: list[Order], runs: list[BlowUp], steps: int, path: Path) -> None:
    """Three panels: error against step size, largest |U| and largest |X'X - I| against lr."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 5.4), layout="constrained")
    colours = {"1/2": "tab:blue", "0": "tab:green", "-1": "tab:red"}
    for curve in orders:
        published, own = curve.form == "published", curve.against == "own"
        label = f"{curve.form}, a = {curve.metric}"
        constant = curve.constant(curve.position_error)
        left.loglog(
            curve.h,
            curve.position_error,
            color=colours[curve.metric],
            linestyle="-" if own and not published else ":" if own else "--",
            marker="o" if not published else "s" if own else None,
            markersize=5,
            alpha=1.0 if own else 0.6,
            label=f"{label}: {constant:.2f} h" if own else f"{label}, against the metric's ODE",
        )
    left.set_xlabel("step size h (time units)")
    left.set_ylabel(f"error of X at T = {DURATION:g} (Frobenius norm)")
    left.set_title("Global error against the exact dynamics")
    left.legend(fontsize=8)
    top = 1e30
    marks = {"isometric": "o", "published": "s"}
    for kind, colour in (("SGD", "tab:blue"), ("Adam", "tab:orange")):
        for form in FORMS:
            chosen = [run for run in runs if run.optimizer == kind and run.form == form]
            fine = [run for run in chosen if run.broke_at is None]
            broken = [run for run in chosen if run.broke_at is not None]
            style = "-" if form == "isometric" else ":"
            label = f"Stiefel{kind}, {form}"
            for axis, values in (
                (middle, [run.largest_momentum for run in fine]),
                (right, [run.largest_error for run in fine]),
            ):
                shown = [min(value, top) for value in values]
                rates = [run.lr for run in fine]
                axis.loglog(rates, shown, style, marker=marks[form], color=colour, label=label)
                ceiling = [top if axis is middle else 1e4] * len(broken)
                axis.loglog(
                    [run.lr for run in broken], ceiling, "x", color=colour, markersize=9,
                    markeredgewidth=2, label=f"{label}: not finite" if broken else None,
                )  # fmt: skip
        middle.axhline(momentum_bound(kind), color=colour, linewidth=0.8, linestyle="--",
                       label=f"bound, Stiefel{kind}")  # fmt: skip
    middle.set_title(f"Largest |U| in {steps:,} steps")
    middle.set_ylabel("largest |U| (Frobenius norm)")
    right.set_title(f"Largest |X'X - I| in {steps:,} steps, float64")
    right.set_ylabel("largest entry of |X'X - I|")
    for axis in (middle, right):
        axis.set_xlabel("learning rate")
    middle.legend(fontsize=8)
    right.legend(fontsize=8)
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def report_orders(orders: list[Order]) -> str:
    rows = []
    for curve in orders:
        position, velocity = curve.position_error, curve.velocity_error
        rows.append([
            curve.form, curve.metric, curve.against,
            f"{curve.order(position):.3f}", f"{curve.order(velocity):.3f}",
            f"{curve.constant(position):.3f}", f"{curve.constant(velocity):.3f}",
        ])  # fmt: skip
    header = ("flows", "a", "dynamics", "order X", "order Q", "error X / h", "error Q / h")
    return markdown_table(header, rows)


def report_blow_up(runs: list[BlowUp]) -> str:
    rows = []
    for run in runs:
        broke = "-" if run.broke_at is None else str(run.broke_at)
        rows.append([f"Stiefel{run.optimizer}, {run.form}", f"{run.lr:.3g}",
                     f"{run.largest_momentum:.3g}", f"{momentum_bound(run.optimizer):.3g}",
                     f"{run.largest_error:.1e}", broke])  # fmt: skip
    header = ("optimizer", "lr", "largest |U|", "bound", "largest |X'X - I|", "not finite at step")
    return markdown_table([name.replace("|", "") for name in header], rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--draws", type=int, default=3, help="starts of the order study")
    parser.add_argument("--finest", type=int, default=10, help="smallest h is 2^-FINEST")
    parser.add_argument("--rates", type=int, default=13, help="learning rates from 1e-4 to 100")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each blow-up run")
    parser.add_argument("--output", type=Path, default=RESULTS / "flows.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run both studies, print them, write JSON and PNG beside each other."""
    arguments = parse(argv)
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    orders = measure_orders(arguments.draws, arguments.finest)
    print("\n" + report_orders(orders))
    rates = [float(rate) for rate in np.logspace(-4, 2, arguments.rates)]
    runs = measure_blow_up(rates, arguments.steps)
    print("\n" + report_blow_up(runs))
    content = {
        "machine": machine(torch.device("cpu")),
        "orders": [
            {
                **asdict(curve),
                "order": [curve.order(curve.position_error), curve.order(curve.velocity_error)],
                "constant": [
                    curve.constant(curve.position_error),
                    curve.constant(curve.velocity_error),
                ],
            }
            for curve in orders
        ],
        "blow_up": [asdict(run) for run in runs],
        "blow_up_steps": arguments.steps,
        "momentum_bound": {kind: momentum_bound(kind) for kind in ("SGD", "Adam")},
    }
    write_json(arguments.output, content)
    picture = arguments.output.with_suffix(".png")
    plot(orders, runs, arguments.steps, picture)
    print(f"\nResults in {arguments.output.name}, plot in {picture.name}")


if __name__ == "__main__":
    main()
