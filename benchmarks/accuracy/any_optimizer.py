"""What it costs that `so.on_manifold` does not carry momentum: four problems, two rules.

pca          the ten leading eigenvectors of a 200 x 200 matrix with eigenvalues from 0.01 to 1
procrustes   |A X - B| for X of 60 x 8, A of condition 30
sparse       the rotation of 30 x 30 under which sums of |.|_4^4 are largest: sources of a mixture
digits       a network of two tagged layers of 64 x 64, batches of 64 of scikit-learn's digits

Each method trains for the same number of steps at five learning rates, which fall linearly to zero,
and at up to two more while the best is the outermost; shown is the best of them by the median over
the seeds: for pca and procrustes the gap to the best value, relative to it or to |B|^2, for the
others the loss, for digits on all of the training set. float32.

Last the time of a step of 48 weights of 384 x 32, interleaved, on one thread.

    python -m benchmarks.accuracy.any_optimizer
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import stiefel_opt as so
from benchmarks.common.harness import (
    PRINTED,
    RESULTS,
    Contestant,
    interleave,
    machine,
    markdown_table,
    write_json,
)

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
METHODS: dict[str, tuple[Callable[[Any, float], Any], float]] = {  # and a factor of the rates
    "StiefelAdam": (so.StiefelAdam, 0.3),
    "StiefelAdam, as printed": (PRINTED, 0.3),
    "on_manifold(Adam)": (lambda p, lr: so.on_manifold(torch.optim.Adam(p, lr)), 0.3),
    "StiefelSGD": (lambda p, lr: so.StiefelSGD(p, lr, momentum=0.9), 1.0),
    "on_manifold(SGD)": (
        lambda p, lr: so.on_manifold(torch.optim.SGD(p, lr, momentum=0.9)),
        1.0,
    ),
}
Problem = tuple[Any, Callable[[], Tensor], Callable[[], float]]


def rotation(size: int) -> Tensor:
    return so.random_point(size, size)


def pca() -> Problem:
    values = torch.linspace(1.0, 0.01, 200)
    basis = rotation(200)
    matrix = (basis * values) @ basis.T
    point = so.ManifoldParameter(so.random_point(200, 10))
    best = float(values[:10].sum())

    def loss() -> Tensor:
        return -(point * (matrix @ point)).sum()

    return [point], loss, lambda: (best + loss().item()) / best


def procrustes() -> Problem:
    left = (rotation(60) * torch.logspace(0, -1.477, 60)) @ rotation(60)
    target = so.random_point(60, 8)
    point = so.ManifoldParameter(so.random_point(60, 8))
    wanted = left @ target
    size = float(wanted.square().sum())

    def loss() -> Tensor:
        return 10 * (left @ point - wanted).square().sum()

    return [point], loss, lambda: loss().item() / 10 / size


def sparse() -> Problem:
    sources = torch.distributions.Laplace(0.0, 0.7071).sample((4000, 30))
    white = torch.linalg.qr(sources - sources.mean(0)).Q * 4000**0.5
    mixed = white @ rotation(30)
    point = so.ManifoldParameter(rotation(30))

    def kurtosis(turned: Tensor) -> Tensor:
        return turned.pow(4).mean(0).sum()

    def loss() -> Tensor:
        return -kurtosis(mixed @ point) / 30

    return [point], loss, lambda: loss().item()


def digits() -> Problem:
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    layers = [so.constrain(nn.Linear(64, 64)) for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), nn.Linear(64, 10))
    generator = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (64,), generator=generator)
        return cross_entropy(model(images[chosen]), labels[chosen])

    @torch.no_grad()
    def final() -> float:
        return float(cross_entropy(model(images), labels))

    return list(model.parameters()), loss, final


PROBLEMS = {"pca": pca, "procrustes": procrustes, "sparse": sparse, "digits": digits}


def train(problem: str, method: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    parameters, loss, final = PROBLEMS[problem]()
    build, factor = METHODS[method]
    optimizer = build(parameters, factor * rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        schedule.step()
    tagged = [p for p in parameters if isinstance(p, so.ManifoldParameter)]
    error = max(float(so.orthonormality_error(p)) for p in tagged)
    return {"lr": factor * rate, "seed": seed, "final": final(), "error": error}


def tried(problem: str, method: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs at all learning rates."""
    runs: list[dict[str, Any]] = []
    rates = list(RATES)
    while rates:
        for rate in rates:
            runs += [
                train(problem, method, rate, s, arguments.steps) for s in range(arguments.seeds)
            ]
        known = medians(runs)
        best, factor = min(known, key=known.__getitem__), METHODS[method][1]
        rates = []
        if len(known) < len(RATES) + 2 and best in (max(known), min(known)):
            rates = [best / factor * (3.0 if best == max(known) else 1 / 3)]
    return runs


def medians(runs: Sequence[dict[str, Any]]) -> dict[float, float]:
    """Of the seeds at each learning rate."""
    rates = {run["lr"] for run in runs}
    return {x: statistics.median(r["final"] for r in runs if r["lr"] == x) for x in rates}


def times(rounds: int) -> str:
    """Milliseconds of a step of many equal weights, and beside those of `StiefelAdam`."""
    contestants = []
    for name in METHODS:
        weights = [so.ManifoldParameter(so.random_point(384, 32)) for _ in range(48)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        contestants.append(Contestant(name, METHODS[name][0](weights, 1e-3).step))
    found = interleave(contestants, rounds=rounds, device=torch.device("cpu"))
    rows = []
    for name in METHODS:
        shown = found.summary(name)
        low, high = shown["quartiles_ms"]
        time = f"{shown['median_ms']:.1f} ({low:.1f} - {high:.1f})"
        rows.append([name, time, f"{found.ratio(name, 'StiefelAdam'):.2f}"])
    return markdown_table(["Optimizer", "ms a step", "beside StiefelAdam"], rows)


def row(problem: str, method: str, runs: Sequence[dict[str, Any]]) -> list[str]:
    known = medians(runs)
    rate = min(known, key=known.__getitem__)
    found = [run["final"] for run in runs if run["lr"] == rate]
    spread = f"({min(found):.2g} - {max(found):.2g})"
    error = max(run["error"] for run in runs)
    return [
        problem,
        method,
        f"{rate:g}",
        f"{statistics.median(found):.2g} {spread}",
        f"{error:.0e}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "any_optimizer.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    about = machine(torch.device("cpu"))
    results: list[dict[str, Any]] = []
    for problem in PROBLEMS:
        for method in METHODS:
            runs = tried(problem, method, arguments)
            results.append({"problem": problem, "method": method, "runs": runs})
            print(" | ".join(row(problem, method, runs)), flush=True)
    rows = [row(found["problem"], found["method"], found["runs"]) for found in results]
    header = ["Problem", "Optimizer", "Learning rate", "Gap or loss", "|X'X - I|"]
    table = markdown_table(header, rows)
    settings = {"steps": arguments.steps, "seeds": arguments.seeds, "threads": 1}
    tables = {"cost": table, "time": times(15)}
    content = {"machine": about, "settings": settings, "tables": tables}
    write_json(arguments.output, content | {"results": results})
    print("\n\n".join(tables.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
