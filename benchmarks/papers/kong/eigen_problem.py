"""Problems of leading eigenvalues, and how a method is run on one of them, step by step."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigsh, lobpcg
from torch import Tensor

from benchmarks.common.harness import orthonormality_error

TARGET = 1e-8
DIVERGED = 100.0  # relative gap; an orthonormal X has none above a few

# Seconds are those of the processor: everybody has one thread, and what else a machine does then
# counts less than by the clock on the wall.
clock = time.process_time

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """Maximise tr(X'AX): the exact maximum, and the start that all methods share.

    ``matrix`` is A; or its eigenvalues as a column, for the same problem in the basis of its
    eigenvectors.
    """

    matrix: Tensor
    maximum: float
    start: Tensor

    def image(self, point: Tensor) -> Tensor:
        """AX."""
        if self.matrix.size(1) == 1:
            return self.matrix * point
        return self.matrix @ point

    def gap(self, value: float) -> float:
        return (self.maximum - value) / abs(self.maximum)


@dataclass
class Run:
    """Where a run has got to: products with A, seconds, relative gap and |X'X - I|.

    The product at the initial point is counted for pymanopt only.
    """

    products: int = 0
    seconds: float = 0.0
    gap: float = math.inf
    error: float = math.nan

    @property
    def reached(self) -> bool:
        return abs(self.gap) <= TARGET and self.error <= TARGET

    @property
    def iterations(self) -> float:
        return self.products if self.reached else math.inf

    @property
    def time(self) -> float:
        return self.seconds if self.reached else math.inf

    @property
    def final_gap(self) -> float:
        return abs(self.gap) if self.error <= TARGET and abs(self.gap) < 1 else math.inf


@dataclass(frozen=True)
class Limit:
    """A run ends at the target, or after so many iterations."""

    iterations: float
    target: float = TARGET


def draw_problem(n: int, m: int, number: int) -> tuple[Problem, Problem]:
    """A = (Xi + Xi')/2/sqrt(n), and the same problem in the basis of its eigenvectors."""
    generator = torch.Generator().manual_seed(1000 * m + number)
    gaussian = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = (gaussian + gaussian.T) / (2 * math.sqrt(n))
    start = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64)).Q
    values, vectors = torch.linalg.eigh(matrix)
    maximum = float(values[-m:].sum())
    turned = torch.linalg.qr(vectors.T @ start)  # orthonormal to rounding again
    turned_start = turned.Q * turned.R.diagonal().sign()
    return Problem(matrix, maximum, start), Problem(values[:, None], maximum, turned_start)


def optimize(
    problem: Problem,
    options: Options,
    limit: Limit,
    *,
    tag: Callable[[Tensor], Tensor],
    build: Callable[..., torch.optim.Optimizer],
    wide: bool = False,
) -> Run:
    """Minimise -tr(X'AX) with one parameter; value and next gradient share the product AX."""
    start = problem.start.clone()
    parameter = tag(start.mT.unsqueeze(0).contiguous() if wide else start)
    optimizer = build([parameter], **options)
    run, spent = Run(), 0.0
    point = problem.start
    began = clock()
    image = problem.image(point)
    while run.products < limit.iterations:
        grad = -2 * image
        parameter.grad = grad.mT.unsqueeze(0) if wide else grad
        optimizer.step()
        point = parameter.detach()[0].mT if wide else parameter.detach()
        image = problem.image(point)
        value = float((point * image).sum())
        spent += clock() - began
        gap = problem.gap(value)
        if not abs(gap) < DIVERGED:  # also NaN
            break
        run.products, run.seconds, run.gap = run.products + 1, spent, gap
        if gap <= limit.target:  # far below -target: no orthonormal X has such a value
            break
        began = clock()
    run.error = orthonormality_error(point)
    return run


class Reached(Exception):  # noqa: N818
    """Ends a run of pymanopt, at the target or at the limit."""


def pymanopt_run(problem: Problem, _: Options, limit: Limit, *, second_order: bool) -> Run:
    """Counts each product AX or AD that it needs; cost and gradient at X share theirs."""
    import pymanopt
    from pymanopt.manifolds import Stiefel
    from pymanopt.optimizers import ConjugateGradient, TrustRegions

    A = problem.matrix.numpy()
    manifold = Stiefel(*problem.start.shape)
    run = Run()
    last: list[Any] = [None, None]
    began = clock()

    def multiplied(factor: Any) -> Any:
        result = A @ factor
        run.products, run.seconds = run.products + 1, clock() - began
        if run.products >= limit.iterations:
            raise Reached
        return result

    def product(X: Any) -> Any:
        if last[0] is None or not np.array_equal(X, last[0]):
            last[:] = X.copy(), multiplied(X)
        return last[1]

    @pymanopt.function.numpy(manifold)
    def cost(X: Any) -> float:
        nonlocal began
        value = float(np.sum(X * product(X)))
        if problem.gap(value) < run.gap:
            paused = clock()
            run.gap, run.seconds = problem.gap(value), paused - began
            run.error = orthonormality_error(torch.from_numpy(X))
            began += clock() - paused  # this look was ours
            if run.gap <= TARGET:
                raise Reached
        return -value

    @pymanopt.function.numpy(manifold)
    def gradient(X: Any) -> Any:
        return -2 * product(X)

    @pymanopt.function.numpy(manifold)
    def hessian(X: Any, direction: Any) -> Any:  # noqa: ARG001
        return -2 * multiplied(direction)

    task = pymanopt.Problem(manifold, cost, euclidean_gradient=gradient, euclidean_hessian=hessian)
    rule = TrustRegions if second_order else ConjugateGradient
    solver = rule(max_iterations=100_000, max_time=math.inf, verbosity=0)
    with contextlib.suppress(Reached):
        solver.run(task, initial_point=problem.start.numpy())
    return run


def eigensolver_run(problem: Problem, options: Options, _: Limit, *, iterative: bool) -> Run:
    """LOBPCG or Lanczos with a tolerance; all of its products count as one."""
    A, start = problem.matrix.numpy(), problem.start.numpy()
    tolerance = options["tolerance"]
    began = clock()
    if iterative:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where it stops above its tolerance
            _, vectors = lobpcg(A, start, largest=True, tol=tolerance, maxiter=2000)
    else:
        _, vectors = eigsh(A, k=start.shape[1], which="LA", tol=tolerance, v0=start[:, 0])
    seconds = clock() - began
    X = torch.from_numpy(np.ascontiguousarray(vectors))
    value = float((X * problem.image(X)).sum())
    return Run(1, seconds, problem.gap(value), orthonormality_error(X))
