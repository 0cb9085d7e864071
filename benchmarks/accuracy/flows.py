"""Isometric and published flows side by side: order, error constant, and what blows up when.

**Order.** The optimizer and `scipy.integrate.solve_ivp` start from the same point with the same
nonzero velocity; see `flow_order.py`. Printed are order and error constant (error at T over h) of
position and velocity, once driven and once coasting (little friction, no gradient).

**Blow-up.** 2,000 steps of random gradients of Frobenius norm 1, every seventh of norm 1000, at
learning rates up to 100: the largest |U| and the largest |X'X - I| on the way.

    python -m benchmarks.accuracy.flows  # about three minutes; JSON and PNG in benchmarks/results
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

import stiefel_opt as so
from benchmarks.accuracy.flow_order import SETTINGS, Order, measure_orders
from benchmarks.common import figures
from benchmarks.common.harness import PRINTED, RESULTS, machine, markdown_table, write_json

MOMENTUM = 0.9
BLOW_UP_SHAPE = (40, 7)
SIZES = (1.0, 1000.0)  # of the ordinary and of every seventh gradient


@dataclass(frozen=True)
class BlowUp:
    """What a run at one learning rate came to; the step of the first non-finite number, if any."""

    optimizer: str
    form: str
    lr: float
    largest_momentum: float
    largest_error: float
    broke_at: int | None


OF_SGD = {"momentum": MOMENTUM, "nonfinite": "ignore"}
RULES: dict[tuple[str, str], tuple[Any, dict[str, Any]]] = {
    ("SGD", "isometric"): (so.StiefelSGD, OF_SGD),
    ("SGD", "published"): (so.PublishedSGD, OF_SGD),
    ("Adam", "isometric"): (PRINTED, {}),
    ("Adam", "published"): (so.PublishedAdam, {}),
}


def run_blow_up(kind: str, form: str, lr: float, steps: int) -> BlowUp:
    """Random gradients of norm 1, every seventh of norm 1000, from a random point."""
    generator = torch.Generator().manual_seed(3)
    shape = BLOW_UP_SHAPE
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
    parameter = so.ManifoldParameter(torch.linalg.qr(gaussian).Q)
    rule, options = RULES[kind, form]
    optimizer: Any = rule([parameter], lr=lr, **options)
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
    work = [(*row, lr) for row in RULES for lr in rates]
    return [
        run_blow_up(kind, form, lr, steps)
        for kind, form, lr in tqdm(work, desc="blow-up", unit="run")
    ]


def momentum_bound(kind: str) -> float:
    """max|g|/(1 - mu) for SGD; Adam averages its gradients, so max|g|."""
    return max(SIZES) / (1 - MOMENTUM) if kind == "SGD" else max(SIZES)


def report_orders(orders: list[Order]) -> str:
    rows = []
    for curve in orders:
        position, velocity = curve.position_error, curve.velocity_error
        rows.append([
            curve.setting, curve.form, curve.metric, curve.against,
            f"{curve.order(position):.3f}", f"{curve.order(velocity):.3f}",
            *(f"{curve.constant(errors):.3f}" if curve.against == "own" else "-"
              for errors in (position, velocity)),
        ])  # fmt: skip
    header = ["setting", "flows", "a", "dynamics", "order X", "order Q"]
    return markdown_table([*header, "error X / h", "error Q / h"], rows)


def report_blow_up(runs: list[BlowUp]) -> str:
    rows = [
        [f"Stiefel{run.optimizer}, {run.form}", f"{run.lr:.3g}", f"{run.largest_momentum:.3g}",
         f"{run.largest_error:.1e}", "-" if run.broke_at is None else str(run.broke_at)]
        for run in runs
    ]  # fmt: skip
    header = ("optimizer", "lr", "norm of U", "max abs(X'X - I)", "not finite at step")
    return markdown_table(header, rows)


def described(curve: Order) -> dict[str, Any]:
    """A curve with its order and its error constant, of position and velocity."""
    errors = curve.position_error, curve.velocity_error
    order, constant = map(curve.order, errors), map(curve.constant, errors)
    return {**asdict(curve), "order": list(order), "constant": list(constant)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rates", type=int, default=13, help="learning rates from 1e-4 to 100")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each blow-up run")
    parser.add_argument("--output", type=Path, default=RESULTS / "flows.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run both studies, print them, write JSON and PNG beside each other."""
    arguments = parse(argv)
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    orders = measure_orders()
    print("\n" + report_orders(orders))
    rates = [float(rate) for rate in np.logspace(-4, 2, arguments.rates)]
    runs = measure_blow_up(rates, arguments.steps)
    print("\n" + report_blow_up(runs))
    content = {
        "machine": machine(),
        "settings": [asdict(setting) for setting in SETTINGS],
        "orders": [described(curve) for curve in orders],
        "blow_up": [asdict(run) for run in runs],
        "blow_up_steps": arguments.steps,
        "momentum_bound": {kind: momentum_bound(kind) for kind in ("SGD", "Adam")},
    }
    write_json(arguments.output, content)
    picture = arguments.output.with_suffix(".png")
    figures.flows(picture)
    print(f"\nResults in {arguments.output.name}, plot in {picture.name}")


if __name__ == "__main__":
    main()
