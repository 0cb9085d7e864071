"""StiefelLBFGS beside solvers of other kinds: evaluations, products and seconds to many digits.

    export OMP_NUM_THREADS=1
    python -m benchmarks.accuracy.lbfgs                # five draws, some minutes
    python -m benchmarks.accuracy.lbfgs --draws 1 --problems "eigenvalues 300 x 5"

Every problem is quadratic: the gradient is L(X) - C for a linear map L. What all solvers have in
common is how often L is applied to n x m numbers: once for a loss with its gradient, once for a
product with the Hessian, once for a block of LOBPCG. Runs end at a relative gap of 1e-12; what a
gap of 1e-8 took is noted on the way. Seconds are of the processor, one thread, numpy's too, up to
1e-8. Solvers take turns within a draw, and ratios are taken within a draw.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pymanopt
import torch
from scipy.sparse.linalg import LinearOperator, lobpcg
from torch import Tensor
from tqdm import tqdm

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json

GAPS = (1e-8, 1e-12)
RATES = (0.2, 0.3, 0.4, 0.6, 0.8, 1.2, 1.6, 2.4, 3.2)
MOST_PRODUCTS = 800
OURS = "StiefelLBFGS"


class Reached(Exception):  # noqa: N818  # no error: the last gap is reached
    """Raised where a run may end."""


class Spent(Exception):  # noqa: N818
    """Raised where a run has used up its products."""


@dataclass
class Problem:
    """Minimise <X, L(X)> / 2 - <C, X> + constant; what solvers spend on it is counted."""

    name: str
    linear: Callable[[Tensor], Tensor]
    shift: Tensor | float
    constant: float
    minimum: float
    start: Tensor
    matrix: Tensor | None = None  # of leading eigenvalues: for LOBPCG
    products: int = 0
    evaluations: int = 0
    began: float = 0.0
    reached: dict[float, tuple[int, int, float]] = field(default_factory=dict)
    scale: float = 0.0  # of gaps

    def __post_init__(self) -> None:
        self.scale = abs(self.minimum) or self.evaluate(self.start)[0]
        self.reset()

    def reset(self) -> None:
        self.products, self.evaluations, self.reached = 0, 0, {}
        self.began = time.process_time()

    def apply(self, vectors: Tensor) -> Tensor:
        self.products += 1
        if self.products > MOST_PRODUCTS:
            raise Spent
        return self.linear(vectors)

    def evaluate(self, point: Tensor) -> tuple[float, Tensor]:
        """Loss and gradient from one product."""
        image = self.apply(point)
        self.evaluations += 1
        loss = float((point * (image / 2 - self.shift)).sum()) + self.constant
        if self.scale:
            self.look(loss)
        return loss, image - self.shift

    def look(self, loss: float) -> None:
        """Note which gaps are reached."""
        for gap in GAPS:
            if gap not in self.reached and loss - self.minimum < gap * self.scale:
                spent = time.process_time() - self.began
                self.reached[gap] = self.evaluations, self.products, spent
        if GAPS[-1] in self.reached:
            raise Reached


def eigenvalues(n: int, m: int, seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    a = (a + a.T) / 2
    a /= torch.linalg.matrix_norm(a, 2)
    best = -float(torch.linalg.eigvalsh(a)[-m:].sum())
    start = so.random_point(n, m, generator=generator, dtype=torch.float64)
    return Problem(
        f"eigenvalues {n} x {m}", lambda x: -2 * (a @ x), 0.0, 0.0, best, start, matrix=a
    )


def weighted(n: int, m: int, seed: int) -> Problem:
    """Components weighted by rank, of a covariance of condition 1e4."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.logspace(0, -4, n, dtype=torch.float64)
    vectors = so.random_point(n, n, generator=generator, dtype=torch.float64)
    a = vectors * values @ vectors.T
    weights = torch.arange(m, 0, -1, dtype=torch.float64) / m
    best = -float((values[:m] * weights).sum())
    start = so.random_point(n, m, generator=generator, dtype=torch.float64)
    return Problem(
        f"weighted components {n} x {m}", lambda x: -2 * (a @ (x * weights)), 0.0, 0.0, best, start
    )


def procrustes(n: int, m: int, seed: int) -> Problem:
    """min |A X - B|^2 / 2 with B = A Y, A of condition about 30."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(400, n, generator=generator, dtype=torch.float64)
    a *= torch.logspace(0, -1.5, n, dtype=torch.float64)
    a /= torch.linalg.matrix_norm(a, 2)
    b = a @ so.random_point(n, m, generator=generator, dtype=torch.float64)
    start = so.random_point(n, m, generator=generator, dtype=torch.float64)
    constant = float(b.square().sum()) / 2
    return Problem(f"Procrustes {n} x {m}", lambda x: a.T @ (a @ x), a.T @ b, constant, 0.0, start)


PROBLEMS = (
    lambda seed: eigenvalues(300, 5, seed),
    lambda seed: eigenvalues(1000, 10, seed),
    lambda seed: weighted(300, 10, seed),
    lambda seed: procrustes(100, 20, seed),
)


# ---- solvers -------------------------------------------------------------------------------------


def by_lbfgs(problem: Problem) -> None:
    parameter = so.ManifoldParameter(problem.start.clone())
    exact = {"tolerance_grad": 0.0, "tolerance_change": 0.0}
    optimizer = so.StiefelLBFGS([parameter], max_iter=MOST_PRODUCTS, **exact)

    def closure() -> float:
        loss, parameter.grad = problem.evaluate(parameter.detach())
        return loss

    optimizer.step(closure)


def by_torch(problem: Problem) -> None:
    """torch's L-BFGS on the unconstrained numbers of a parametrization."""
    n, m = problem.start.shape
    layer = torch.nn.Linear(m, n, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(problem.start)
    so.orthogonal(layer)
    exact = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=MOST_PRODUCTS, **exact)

    def closure() -> float:
        optimizer.zero_grad()
        weight = layer.weight
        loss, grad = problem.evaluate(weight.detach())
        weight.backward(grad)
        return loss

    optimizer.step(closure)


def by_sgd(problem: Problem, rate: float) -> None:
    parameter = so.ManifoldParameter(problem.start.clone())
    optimizer = so.StiefelSGD([parameter], lr=rate, momentum=0.9)
    while True:
        _, parameter.grad = problem.evaluate(parameter.detach())
        optimizer.step()


def by_barzilai_borwein(problem: Problem) -> None:
    """Descent with both step sizes in turn and Zhang & Hager's mean, as in PRW's ascent."""
    parameter = so.ManifoldParameter(problem.start.clone())
    point = parameter.detach()
    optimizer = so.StiefelSGD([parameter], lr=1.0, momentum=0.0, metric="euclidean")
    loss, grad = problem.evaluate(point)
    tangent = so.project_tangent(parameter, grad).detach()
    rate, mean, weight, is_long = 0.1 / float(tangent.norm()), loss, 1.0, False
    while True:
        former, before = point.clone(), tangent
        while True:
            parameter.grad, optimizer.param_groups[0]["lr"] = grad, rate
            optimizer.step()
            loss, new = problem.evaluate(point)
            if loss <= mean - 1e-4 * rate * float(before.square().sum()) or rate < 1e-12:
                break
            rate /= 4
            point.copy_(former)
        grad, tangent = new, so.project_tangent(parameter, new).detach()
        weight, mean = 0.85 * weight + 1, mean + (loss - mean) / (0.85 * weight + 1)
        moved, change = point - former, tangent - before
        across, is_long = abs(float((moved * change).sum())), not is_long
        square = float((moved if is_long else change).square().sum())
        size = (square / across if is_long else across / square) if square * across else 0.0
        rate = min(max(size, 1e-6), 1e4) if math.isfinite(size) and size > 0 else rate


def by_pymanopt(problem: Problem, kind: str) -> None:
    """One product serves the loss and the gradient at one point."""
    n, m = problem.start.shape
    manifold = pymanopt.manifolds.Stiefel(n, m)
    last: dict[str, Any] = {}

    def look(point: Any) -> tuple[float, Any]:
        if "point" not in last or not np.array_equal(last["point"], point):
            last["point"] = point.copy()
            loss, grad = problem.evaluate(torch.from_numpy(point))
            last["found"] = loss, grad.numpy()
        found: tuple[float, Any] = last["found"]
        return found

    @pymanopt.function.numpy(manifold)
    def cost(point: Any) -> float:
        return look(point)[0]

    @pymanopt.function.numpy(manifold)
    def euclidean_gradient(point: Any) -> Any:
        return look(point)[1]

    @pymanopt.function.numpy(manifold)
    def euclidean_hessian(point: Any, vector: Any) -> Any:  # noqa: ARG001
        return problem.apply(torch.from_numpy(np.ascontiguousarray(vector))).numpy()

    solver = getattr(pymanopt.optimizers, kind)(
        max_iterations=10**6, min_gradient_norm=0, min_step_size=0, max_time=600, verbosity=0
    )
    whole = pymanopt.Problem(
        manifold,
        cost,
        euclidean_gradient=euclidean_gradient,
        euclidean_hessian=euclidean_hessian if kind == "TrustRegions" else None,
    )
    solver.run(whole, initial_point=problem.start.numpy())


def by_lobpcg(problem: Problem) -> None:
    """Blocks of the start's size, without a preconditioner; the least iterations that reach it."""
    matrix, (n, m) = problem.matrix, problem.start.shape
    if matrix is None:
        return

    def run(iterations: int) -> float:
        problem.products, problem.began = 0, time.process_time()
        columns = 0

        def product(vectors: Any) -> Any:
            nonlocal columns
            block = torch.from_numpy(np.ascontiguousarray(vectors).reshape(n, -1))
            columns += block.shape[1]
            return (matrix @ block).numpy()

        operator = LinearOperator((n, n), matvec=product, matmat=product, dtype=float)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it stops before its own tolerance
            values, _ = lobpcg(operator, problem.start.numpy(), maxiter=iterations, tol=1e-14)
        problem.products = round(columns / m)
        return -float(values.sum())

    for gap in GAPS:
        low, high = 0, 1
        while run(high) - problem.minimum >= gap * problem.scale:
            low, high = high, 2 * high
            if high > MOST_PRODUCTS:
                return
        while high - low > 1:
            middle = (low + high) // 2
            is_enough = run(middle) - problem.minimum < gap * problem.scale
            low, high = (low, middle) if is_enough else (middle, high)
        run(high)
        spent = time.process_time() - problem.began
        problem.reached[gap] = problem.products, problem.products, spent


SOLVERS: dict[str, Callable[[Problem], None]] = {
    OURS: by_lbfgs,
    "torch LBFGS on so.orthogonal": by_torch,
    "Barzilai-Borwein": by_barzilai_borwein,
    "pymanopt conjugate gradients": lambda problem: by_pymanopt(problem, "ConjugateGradient"),
    "pymanopt trust regions": lambda problem: by_pymanopt(problem, "TrustRegions"),
    "scipy LOBPCG": by_lobpcg,
    **{f"StiefelSGD, learning rate {rate}": lambda p, rate=rate: by_sgd(p, rate) for rate in RATES},
}


# ---- tables --------------------------------------------------------------------------------------


def spend(problem: Problem, solver: Callable[[Problem], None]) -> dict[str, list[float]]:
    """What a solver needed, by gap: evaluations, products, seconds."""
    problem.reset()
    with contextlib.suppress(Reached, Spent):
        solver(problem)
    return {f"{gap:.0e}": list(found) for gap, found in problem.reached.items()}


def measure(problems: list[Callable[[int], Problem]], draws: int) -> dict[str, Any]:
    """``found[problem][solver]``: one entry a draw."""
    found: dict[str, dict[str, list[Any]]] = {}
    names = list(SOLVERS)
    for name in names:  # imports and first calls
        spend(eigenvalues(20, 2, 0), SOLVERS[name])
    with tqdm(total=len(problems) * draws * len(names), unit="run") as bar:
        for make in problems:
            for seed in range(draws):
                problem = make(seed)
                rows = found.setdefault(problem.name, {name: [] for name in names})
                for name in names[seed % len(names) :] + names[: seed % len(names)]:
                    bar.set_description(f"{problem.name}: {name}")
                    rows[name].append(spend(problem, SOLVERS[name]))
                    bar.update()
    return found


def with_best_rate(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The solvers of one problem, of StiefelSGD the learning rate that is fastest in the median."""
    rates = [name for name in rows if name.startswith("StiefelSGD")]
    best = min(rates, key=lambda name: np.median(numbers(rows[name], GAPS[0], 1)))
    kept = {name: entries for name, entries in rows.items() if name not in rates}
    return kept | {"StiefelSGD, tuned": rows[best]}


def numbers(entries: list[Any], gap: float, place: int) -> list[float]:
    """One number of every draw; infinity where the gap was not reached."""
    return [entry.get(f"{gap:.0e}", [math.inf] * 3)[place] for entry in entries]


def spread(values: list[float]) -> str:
    """Median and range."""
    shown = [float(np.median(values)), min(values), max(values)]
    if math.isinf(shown[0]):
        return "not reached"
    digits = 2 if shown[0] < 10 else 0
    middle, low, high = (f"{v:.{digits}f}" if v < math.inf else "never" for v in shown)
    return middle if low == high else f"{middle} ({low} - {high})"


def tables(found: dict[str, dict[str, list[Any]]]) -> dict[str, str]:
    """One table for each problem."""
    header = [
        "Solver", "Evaluations", "Products", "Products to 1e-12", "Seconds / ours",
    ]  # fmt: skip
    made = {}
    for name, rows in found.items():
        lines, ours = [], numbers(rows[OURS], GAPS[0], 2)
        for solver, entries in with_best_rate(rows).items():
            if not any(entries) and solver == "scipy LOBPCG":
                continue
            evaluations, products = (spread(numbers(entries, GAPS[0], i)) for i in (0, 1))
            if solver == "scipy LOBPCG":
                evaluations = "-"
            times = numbers(entries, GAPS[0], 2)
            ratios = [theirs / mine for theirs, mine in zip(times, ours, strict=True)]
            last = spread(numbers(entries, GAPS[1], 1))
            lines.append([solver, evaluations, products, last, spread(ratios)])
        made[name] = markdown_table(header, lines)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--problems", nargs="*", help="of others the file keeps what it has")
    options = parser.parse_args()
    one_thread()
    chosen = [make for make in PROBLEMS if not options.problems or make(0).name in options.problems]
    path = RESULTS / "lbfgs.json"
    earlier = json.loads(path.read_text())["found"] if options.problems and path.exists() else {}
    found = earlier | measure(chosen, options.draws)
    made = tables(found)
    for name, table in made.items():
        print(f"\n{name}: to a relative gap of {GAPS[0]:.0e}\n{table}")
    content = {
        "machine": machine(torch.device("cpu")),
        "command": "OMP_NUM_THREADS=1 python -m benchmarks.accuracy.lbfgs",
        "draws": options.draws,
        "tables": made,
        "found": found,
    }
    write_json(path, content)


if __name__ == "__main__":
    main()
