"""so.minimize beside pymanopt's trust regions and conjugate gradients, to a relative gap of 1e-8.

    export OMP_NUM_THREADS=1
    python -m benchmarks.speed.minimize              # five draws, some minutes
    python -m benchmarks.speed.minimize --draws 1 --problems Brockett

An evaluation is a point at which a solver asks for the loss, with or without its gradient; products
of trust regions with the Hessian count as one each. Seconds are of the processor, one thread, up to
the gap, (f - f*) / (f(start) - f*), with f* the lowest loss that the solver itself reaches: with
local minima solvers may end in different ones. Losses, gradients and products are torch's for all;
pymanopt calls them by numpy. Solvers take turns within a draw; ratios to the better rival are taken
within a draw. Where there are local minima the share of draws that reach the lowest loss known is
shown, of one start and of ten.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pymanopt
import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json

GAP = 1e-8
OURS, TRUST, CONJUGATE = "so.minimize", "trust regions", "conjugate gradients"
MOST = 3000
F64 = torch.float64


@dataclass
class Problem:
    """A loss on points of ``shape``, a start, and whether the determinant is to be 1."""

    name: str
    loss: Callable[[Tensor], Tensor]
    start: Tensor
    is_special: bool = False
    has_local_minima: bool = False


def draw(seed: int) -> tuple[torch.Generator, Callable[..., Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return generator, lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)


def point(generator: torch.Generator, *shape: int) -> Tensor:
    return so.random_point(*shape, generator=generator, dtype=F64)


def pca(seed: int) -> Problem:
    generator, normal = draw(seed)
    data = normal(500, 100) * torch.linspace(3, 1, 100, dtype=F64)
    cov = data.T @ data / 500
    return Problem("PCA", lambda x: -(x * (cov @ x)).sum(), point(generator, 100, 8))


def balanced(seed: int) -> Problem:
    """A and B have one shape, and X is square: the polar factor is known."""
    generator, normal = draw(seed)
    a, noise = normal(80, 20) * torch.logspace(0, -1, 20, dtype=F64), normal(80, 20)
    target = point(generator, 20, 20)
    target[0] *= torch.linalg.det(target)
    b = a @ target + 0.1 * noise
    start = point(generator, 20, 20)
    start[0] *= torch.linalg.det(start)
    return Problem("Procrustes, balanced", lambda x: (a @ x - b).square().sum(), start)


def unbalanced(seed: int) -> Problem:
    generator, normal = draw(seed)
    a, b = normal(100, 40) * torch.logspace(0, -1, 40, dtype=F64), normal(100, 8)
    start = point(generator, 40, 8)
    return Problem(
        "Procrustes, unbalanced",
        lambda x: (a @ x - b).square().sum(),
        start,
        has_local_minima=True,
    )


def special(seed: int) -> Problem:
    """The nearest rotation where the nearest orthogonal matrix is a reflection."""
    generator, normal = draw(seed)
    a = normal(60, 10)
    target = point(generator, 10, 10)
    target[0] *= -torch.linalg.det(target)
    b = a @ target + 0.3 * normal(60, 10)
    start = point(generator, 10, 10)
    start[0] *= torch.linalg.det(start)
    return Problem("Procrustes, +1", lambda x: (a @ x - b).square().sum(), start, is_special=True)


def ica(seed: int) -> Problem:
    """The contrast log cosh of FastICA, on whitened mixtures of Laplacian sources."""
    generator, normal = draw(seed)
    uniform = torch.rand(2000, 8, generator=generator, dtype=F64) - 0.5
    sources = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    mixed = sources @ normal(8, 8)
    mixed -= mixed.mean(0)
    values, vectors = torch.linalg.eigh(mixed.T @ mixed / len(mixed))
    white = mixed @ vectors * values.rsqrt()
    return Problem(
        "ICA",
        lambda w: torch.log(torch.cosh(white @ w)).mean(0).sum(),
        point(generator, 8, 8),
        has_local_minima=True,
    )


def diagonalisation(seed: int) -> Problem:
    """Ten symmetric matrices that are almost diagonal in one basis."""
    generator, normal = draw(seed)
    basis = point(generator, 12, 12)
    noise = normal(10, 12, 12)
    matrices = basis @ torch.diag_embed(normal(10, 12)) @ basis.T + 0.02 * (noise + noise.mT)

    def loss(x: Tensor) -> Tensor:
        rotated = x.T @ matrices @ x
        return rotated.square().sum() - rotated.diagonal(dim1=1, dim2=2).square().sum()

    start = point(generator, 12, 12)
    return Problem("joint diagonalisation", loss, start, has_local_minima=True)


def rayleigh(seed: int) -> Problem:
    """The gap behind the four leading eigenvalues is a thousandth of the spread."""
    generator, _ = draw(seed)
    values = torch.cat([1 + torch.rand(4, generator=generator, dtype=F64) * 0.5, torch.ones(1)])
    rest = torch.rand(95, generator=generator, dtype=F64) * 0.999
    values = torch.cat([values[:4], torch.tensor([0.999], dtype=F64), rest]).double()
    basis = point(generator, 100, 100)
    matrix = basis * values @ basis.T
    start = point(generator, 100, 4)
    return Problem("Rayleigh, small gap", lambda x: -(x * (matrix @ x)).sum(), start)


def brockett(seed: int) -> Problem:
    generator, normal = draw(seed)
    matrix = normal(60, 60)
    matrix = matrix + matrix.T
    weights = torch.arange(1, 7, dtype=F64)
    start = point(generator, 60, 6)
    return Problem("Brockett", lambda x: (x * (matrix @ x) * weights).sum(), start)


def spins(seed: int) -> Problem:
    """Forty spins in O(3) with random couplings."""
    generator, normal = draw(seed)
    couplings = normal(40, 40) / math.sqrt(40)
    couplings = torch.triu(couplings, 1)

    def loss(x: Tensor) -> Tensor:
        flat = x.reshape(40, 9)
        return -(flat * (couplings @ flat)).sum()

    return Problem("spin glass on O(3)", loss, point(generator, 40, 3, 3), has_local_minima=True)


PROBLEMS = (
    *(pca, balanced, unbalanced, special, ica),
    *(diagonalisation, rayleigh, brockett, spins),
)


class Spent(Exception):  # noqa: N818  # no error
    """Raised where a run has used up its evaluations."""


class Counter:
    """The loss of a problem, with its derivatives for pymanopt; what is asked for is noted."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.trace: list[tuple[float, int, float]] = []  # loss, evaluations, seconds
        self.products = 0
        self.began = time.process_time()

    def note(self, loss: float) -> None:
        if len(self.trace) + self.products > MOST:
            raise Spent
        count = len(self.trace) + 1 + self.products
        self.trace.append((loss, count, time.process_time() - self.began))

    def loss(self, x: Tensor) -> Tensor:
        value = self.problem.loss(x)
        self.note(float(value.detach()))
        return value

    def cost(self, x: np.ndarray) -> float:
        value = float(self.problem.loss(torch.from_numpy(x)))
        self.note(value)
        return value

    def gradient(self, x: np.ndarray) -> np.ndarray:
        leaf = torch.from_numpy(x).requires_grad_()
        (grad,) = torch.autograd.grad(self.problem.loss(leaf), leaf)
        return grad.numpy()

    def hessian(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        self.products += 1
        leaf = torch.from_numpy(x).requires_grad_()
        (grad,) = torch.autograd.grad(self.problem.loss(leaf), leaf, create_graph=True)
        (image,) = torch.autograd.grad((grad * torch.from_numpy(v)).sum(), leaf)
        return image.numpy()

    def reached(self, minimum: float) -> tuple[int, float] | None:
        """Evaluations and seconds to the gap."""
        first = self.trace[0][0]
        for loss, count, seconds in self.trace:
            if loss - minimum <= GAP * (first - minimum):
                return count, seconds
        return None


def manifold_of(problem: Problem) -> Any:
    *batch, n, m = problem.start.shape
    if problem.is_special:
        return pymanopt.manifolds.SpecialOrthogonalGroup(n)
    return pymanopt.manifolds.Stiefel(n, m, k=batch[0] if batch else 1)


def by_us(counter: Counter) -> None:
    so.minimize(counter.loss, counter.problem.start, tolerance=1e-11, max_evaluations=MOST)


def by_pymanopt(counter: Counter, optimizer: type) -> None:
    manifold = manifold_of(counter.problem)
    wrap = pymanopt.function.numpy(manifold)
    problem = pymanopt.Problem(
        manifold,
        wrap(lambda x: counter.cost(x)),
        euclidean_gradient=wrap(lambda x: counter.gradient(x)),
        euclidean_hessian=wrap(lambda x, v: counter.hessian(x, v)),
    )
    options = {"max_iterations": 2000, "min_gradient_norm": 1e-10, "verbosity": 0}
    solver = optimizer(**options, min_step_size=1e-14, max_time=60)
    solver.run(problem, initial_point=counter.problem.start.numpy().copy())


SOLVERS: dict[str, Callable[[Counter], None]] = {
    OURS: by_us,
    TRUST: lambda counter: by_pymanopt(counter, pymanopt.optimizers.TrustRegions),
    CONJUGATE: lambda counter: by_pymanopt(counter, pymanopt.optimizers.ConjugateGradient),
}


def run(make: Callable[[int], Problem], seed: int) -> dict[str, Any]:
    """All solvers on one draw; the first of them alternates."""
    names = list(SOLVERS)
    names = names[seed % 3 :] + names[: seed % 3]
    row: dict[str, Any] = {}
    for name in names:
        counter = Counter(make(seed))
        with contextlib.suppress(Spent):
            SOLVERS[name](counter)
        lowest = min(loss for loss, _, _ in counter.trace if math.isfinite(loss))
        spent = counter.reached(lowest)
        row[name] = {"lowest": lowest, "evaluations": spent[0], "seconds": spent[1]}  # type: ignore[index]
    problem = make(seed)
    if problem.has_local_minima:
        several = so.minimize(
            problem.loss,
            problem.start,
            starts=10,
            max_evaluations=MOST,
            generator=torch.Generator().manual_seed(seed),
        )
        row["ten starts"] = {"lowest": several.fun, "evaluations": several.nfev}
    return row


def summary(draws: list[dict[str, Any]], has_local_minima: bool) -> dict[str, Any]:
    """Medians, ratios to the better rival in the same draw, and shares of success."""

    def ratio(key: str) -> float:
        return statistics.median(
            draw[OURS][key] / min(draw[TRUST][key], draw[CONJUGATE][key]) for draw in draws
        )

    found: dict[str, Any] = {"evaluations": ratio("evaluations"), "seconds": ratio("seconds")}
    for name in SOLVERS:
        for key in ("evaluations", "seconds"):
            found[f"{name}, {key}"] = statistics.median(draw[name][key] for draw in draws)
    if has_local_minima:
        for name in (*SOLVERS, "ten starts"):
            lowest = [min(own["lowest"] for own in draw.values()) for draw in draws]
            hits = [
                draw[name]["lowest"] - low <= 1e-6 * max(1e-6, abs(low))
                for draw, low in zip(draws, lowest, strict=True)
            ]
            found[f"{name}, success"] = sum(hits) / len(hits)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--problems", nargs="+", help="by name; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS / "minimize.json")
    options = parser.parse_args()
    one_thread()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs, medians = {}, {}
    for make in PROBLEMS:
        example = make(0)
        if options.problems and example.name not in options.problems:
            continue
        runs[example.name] = [run(make, seed) for seed in range(options.draws)]
        medians[example.name] = summary(runs[example.name], example.has_local_minima)
        print(example.name, medians[example.name], flush=True)
    rows = []
    for name, own in medians.items():
        successes = (
            [f"{own[f'{who}, success']:.0%}" for who in (*SOLVERS, "ten starts")]
            if (f"{OURS}, success" in own)
            else ["-"] * 4
        )
        rows.append(
            [
                name,
                f"{own[f'{OURS}, evaluations']:.0f}",
                f"{own[f'{TRUST}, evaluations']:.0f}",
                f"{own[f'{CONJUGATE}, evaluations']:.0f}",
                f"{own['evaluations']:.2f}",
                f"{own['seconds']:.2f}",
                " / ".join(successes),
            ]
        )
    middle = {
        key: statistics.median(own[key] for own in medians.values())
        for key in ("evaluations", "seconds")
    }
    rows.append(
        ["median", "", "", "", f"{middle['evaluations']:.2f}", f"{middle['seconds']:.2f}", ""]
    )
    header = [
        "Problem",
        "Ours",
        "Trust regions",
        "Conjugate gradients",
        "Evaluations / better",
        "Seconds / better",
        "Lowest loss: ours / TR / CG / ours, ten starts",
    ]
    table = markdown_table(header, rows)
    print(table)
    write_json(
        options.output,
        {
            "machine": machine(),
            "gap": GAP,
            "medians": medians,
            "median": middle,
            "runs": runs,
            "tables": {"minimize": table},
        },
    )


if __name__ == "__main__":
    main()
