"""What the steepest tangent direction under the spectral norm costs, and who finds it.

    maximise <M, D>   subject to   |D|_2 <= 1,   X'D + D'X = 0

Rivals, all written here from their formulas: *dual ascent* (Bernstein, Thinking Machines, 2025), up
to 100 steps with the polar factor by ten polynomials, in float32 and in bfloat16, and *module-wise*
(Yoshihara, 2026), 20 steps of 0.1; *ADMM* (Buchanan, 2025), 10 steps, and as many as the value
needs to reach 0.9999 of the optimum; *SPEL* (NVIDIA's Emerging-Optimizers), Muon's step
pulled back by Muon's polynomials, without a tangent space; *torch.optim.Muon*, whose weights are
not constrained, as the floor; and *StiefelSGD*, another direction altogether.

A layer with orthonormal weights learns a teacher of the same shape from minibatches; after a
few steps every contestant gets the same X, momentum and state. For square matrices the direction
is a polar factor: no loop runs there. Everybody's direction is judged in float64: made tangent and
of spectral norm 1, its value over the optimum; and the residual |X'D + D'X|_F / m before that. Time
is that of the processor on one thread; rivals take turns, and ratios are of the same round.

    python -m benchmarks.speed.muon                 # six shapes, some minutes on one core
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common.harness import (
    RESULTS,
    Contestant,
    interleave,
    machine,
    markdown_table,
    write_json,
)
from stiefel_opt.methods import muon, spectral_direction, spectral_gap

SHAPES = ((256, 64), (512, 128), (3072, 128), (256, 256), (2048, 256), (768, 768))
LR = 0.02
MOMENTUM = 0.95
WARM_STEPS = 12
STEPS = (20, 25, 30, 35, 40, 50, 60, 80, 100, 150, 200, 300)
OURS = "stiefel_opt.muon"
AMBIENT = "momentum_ambient"

# Polar Express (Amsel et al. 2025), table of the paper: degree 5, for singular values from 1e-3;
# all but the last are shrunk by 1.01 against rounding.
_EXPRESS = [
    (8.28721201814563 / 1.01, -23.595886519098837 / 1.01**3, 17.300387312530933 / 1.01**5),
    (4.107059111542203 / 1.01, -2.9478499167379106 / 1.01**3, 0.5448431082926601 / 1.01**5),
    (3.9486908534822946 / 1.01, -2.908902115962949 / 1.01**3, 0.5518191394370137 / 1.01**5),
    (3.3184196573706015 / 1.01, -2.488488024314874 / 1.01**3, 0.51004894012372 / 1.01**5),
    (2.300652019954817 / 1.01, -1.6689039845747493 / 1.01**3, 0.4188073119525673 / 1.01**5),
    (1.891301407787398 / 1.01, -1.2679958271945868 / 1.01**3, 0.37680408948524835 / 1.01**5),
    (1.8750014808534479 / 1.01, -1.2500016453999487 / 1.01**3, 0.3750001645474248 / 1.01**5),
    *[(1.875, -1.25, 0.375)] * 3,
]
_MUON = [(3.4445, -4.775, 2.0315)] * 5  # Jordan et al. 2024: only about the polar factor


Directions = Callable[[], Tensor]


def polynomials(matrix: Tensor, table: list[tuple[float, float, float]]) -> Tensor:
    """Odd polynomials of degree 5 of a matrix of norm 1 at most, on the wide side."""
    tall = matrix.size(-2) > matrix.size(-1)
    result = matrix.mT if tall else matrix
    for first, third, fifth in table:
        own = result @ result.mT
        factor = own * fifth
        factor.diagonal().add_(third)
        factor = factor @ own
        factor.diagonal().add_(first)
        result = factor @ result
    return result.mT if tall else result


def msign(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The polar factor by ten polynomials."""
    small = matrix.to(dtype)
    return polynomials(small / (small.norm() * 1.01).clamp(min=1e-30), _EXPRESS).to(matrix.dtype)


def dual_ascent(
    point: Tensor, moving: Tensor, dtype: torch.dtype, steps: int = 100, rate: float = 0.01
) -> Tensor:
    """The direction of the published loop."""
    inner = point.mT @ moving
    shift = -(inner + inner.mT) / 4
    direction = moving
    for number in range(steps):
        direction = msign(moving + 2 * point @ shift, dtype=dtype)
        error = point.mT @ direction
        error = error + error.mT
        if float(error.norm()) / error.size(-1) < 1e-6:
            break
        shift = shift - rate * (1 - number / steps) * error
    return direction


def admm(point: Tensor, moving: Tensor, rho: float = 2.0, steps: int = 10) -> Tensor:
    """The direction by alternating directions; M is scaled to mean singular value near 1."""
    moving = moving * (math.sqrt(moving.size(-1)) / moving.norm())
    inner = point.mT @ moving
    shift = -(inner + inner.mT) / 4
    split, price = moving + 2 * point @ shift, torch.zeros_like(moving)
    identity = torch.eye(moving.size(-1), dtype=moving.dtype)
    for _ in range(steps):
        inner = point.mT @ (split + price / rho - moving)
        shift = (inner + inner.mT) / 4
        target = moving + 2 * point @ shift - price / rho
        above = (identity + msign(target.mT @ target - identity / rho**2)) / 2
        split = (target - msign(target) / rho) @ above
        price = price + rho * (split - moving - 2 * point @ shift)
    return msign(moving + 2 * point @ shift)


def steps_enough(point: Tensor, moving: Tensor) -> int:
    """Steps of ADMM to 0.9999 of the optimum, or the most of the list."""
    best = optimum(point, moving)
    for steps in STEPS:
        if value_of(point, moving, admm(point, moving, steps=steps))[0] >= 0.9999 * best:
            break
    return steps


def spel(point: Tensor, moving: Tensor) -> Tensor:
    """The new point of Muon's step, pulled back by Muon's polynomials."""
    return five_steps(point - LR * five_steps(moving))


def five_steps(matrix: Tensor) -> Tensor:
    """Muon's polynomials in float32."""
    return polynomials(matrix / matrix.norm().clamp(min=1e-7), _MUON)


class Layer:
    """ReLU features of an orthonormal layer, a fixed head on top, and a teacher of that kind."""

    def __init__(self, n: int, m: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        draw: dict[str, Any] = {"generator": self.generator}
        self.scales = torch.arange(1, n + 1) ** -0.5
        self.scales *= math.sqrt(n) / self.scales.norm()
        self.teacher = torch.linalg.qr(torch.randn(n, m, **draw)).Q
        self.labels = torch.randn(m, 10, **draw)
        self.head = 3 * torch.randn(m, 10, **draw) / math.sqrt(m)
        self.point = torch.linalg.qr(torch.randn(1, n, m, **draw)).Q
        self.state = {AMBIENT: torch.zeros(1, n, m)}

    def gradient(self, batch: int = 512) -> Tensor:
        inputs = torch.randn(batch, self.scales.numel(), generator=self.generator) * self.scales
        labels = (torch.relu(inputs @ self.teacher) @ self.labels).argmax(dim=-1)
        point = self.point[0].clone().requires_grad_()
        outputs = torch.relu(inputs @ point) @ self.head
        (grad,) = torch.autograd.grad(torch.nn.functional.cross_entropy(outputs, labels), point)
        return grad.unsqueeze(0)


def looked_ahead(layer: Layer, grad: Tensor) -> Tensor:
    """Nesterov's momentum, for which the direction is asked."""
    return grad.lerp(layer.state[AMBIENT].lerp(grad, 1 - MOMENTUM), MOMENTUM)


def value_of(point: Tensor, moving: Tensor, direction: Tensor) -> tuple[float, float]:
    """Value of D made feasible, and the residual before."""
    point, moving, direction = point.double(), moving.double(), direction.double()
    inner = point.mT @ direction
    inner = (inner + inner.mT) / 2
    residual = 2 * float(inner.norm()) / inner.size(-1)
    tangent = direction - point @ inner
    tangent = tangent / torch.linalg.matrix_norm(tangent, 2)
    return float((moving * tangent).sum()), residual


def optimum(point: Tensor, moving: Tensor) -> float:
    """The optimal value, or what weak duality leaves above it."""
    point, moving = point.double()[None], moving.double()[None]
    best = spectral_direction(point, moving)
    gap = float(spectral_gap(point, moving, best))
    return float((moving * best).sum()) / (1 - gap)


def contestants(layer: Layer, grad: Tensor) -> tuple[list[Contestant], dict[str, Directions]]:
    """Whole steps from here, and what finds the directions alone."""
    moving = looked_ahead(layer, grad)
    flat, flat_moving = layer.point[0], moving[0]
    free = torch.nn.Parameter(flat.clone())
    held = so.ManifoldParameter(flat.clone(), manifold=so.Stiefel())
    free.grad, held.grad = grad[0].clone(), grad[0].clone()
    floor = torch.optim.Muon([free], lr=LR, weight_decay=0.0)
    other = so.StiefelSGD([held], lr=LR)
    is_square = flat.size(0) == flat.size(1)
    enough = 0 if is_square else steps_enough(flat, flat_moving)

    def retracted(find: Directions) -> Callable[[], Tensor]:
        return lambda: msign(flat - LR * find())

    rivals: dict[str, Directions] = {
        "dual ascent, float32": lambda: dual_ascent(flat, flat_moving, torch.float32),
        "dual ascent, bfloat16": lambda: dual_ascent(flat, flat_moving, torch.bfloat16),
        "module-wise": lambda: dual_ascent(flat, flat_moving, torch.bfloat16, 20, 0.1),
        "ADMM, 10 steps": lambda: admm(flat, flat_moving),
        "ADMM to 0.9999": lambda: admm(flat, flat_moving, steps=enough),
    }
    rivals = {} if is_square else rivals
    searches: dict[str, Directions] = {
        OURS: lambda: spectral_direction(layer.point, moving)[0],
        **rivals,
        "SPEL": lambda: (flat - spel(flat, flat_moving)) / LR,
    }
    steps = [
        Contestant(OURS, lambda: muon(layer.point, grad, layer.state, lr=LR, momentum=MOMENTUM)),
        *[Contestant(name, retracted(find)) for name, find in rivals.items()],
        Contestant("SPEL", lambda: spel(flat, flat_moving)),
        Contestant("torch.optim.Muon", floor.step),
        Contestant("StiefelSGD", other.step),
    ]
    return steps, searches


def measure(n: int, m: int, rounds: int) -> list[dict[str, Any]]:
    """Times and values at one shape after some steps of training, a row for each contestant."""
    layer = Layer(n, m)
    for _ in range(WARM_STEPS):
        grad = layer.gradient()
        layer.point, layer.state, _ = muon(layer.point, grad, layer.state, lr=LR, momentum=MOMENTUM)
    grad = layer.gradient()
    steps, searches = contestants(layer, grad)
    point, moving = layer.point[0], looked_ahead(layer, grad)[0]
    best = optimum(point, moving)
    cpu = torch.device("cpu")
    found = interleave(steps, rounds=rounds, device=cpu, seconds=0.0, clock=time.process_time)
    rows = []
    for name, seconds in found.seconds.items():
        ratios = [own / ours for own, ours in zip(seconds, found.seconds[OURS], strict=True)]
        row: dict[str, Any] = {
            "name": name,
            "median_ms": 1e3 * found.median(name),
            "over_ours": found.ratio(name, OURS),
            "least_and_most": [min(ratios), max(ratios)],
        }
        if name in searches:
            value, row["worst_residual"] = value_of(point, moving, searches[name]())
            row["worst_value"] = value / best
        rows.append(row)
    return rows


def table_of(rows: list[dict[str, Any]]) -> str:
    """One row for each contestant."""
    cells = [
        [row["name"], f"{row['median_ms']:.2f}", f"{row['over_ours']:.2f}",
         "{:.2f} to {:.2f}".format(*row["least_and_most"]),
         f"{row['worst_value']:.5f}" if "worst_value" in row else "",
         f"{row['worst_residual']:.0e}" if "worst_residual" in row else ""]
        for row in rows
    ]  # fmt: skip
    header = ["", "ms", "over ours", "of all rounds", "value / optimum", "residual"]
    return markdown_table(header, cells)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "muon.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    content: dict[str, Any] = {"machine": machine(), "tables": {}, "shapes": {}}
    for n, m in SHAPES:
        name, rows = f"{n} x {m}", measure(n, m, arguments.rounds)
        table = table_of(rows)
        print(f"\n{name}\n\n{table}", flush=True)
        content["tables"][name] = table
        content["shapes"][name] = {"rows": rows, "rounds": arguments.rounds}
        write_json(arguments.output, content)


if __name__ == "__main__":
    main()
