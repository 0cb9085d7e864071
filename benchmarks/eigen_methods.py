"""The methods of `leading_eigenvalues.py`: what maximises tr(X'AX) over St(n, m), step by step."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from contestants import orthonormality_error
from scipy.sparse.linalg import eigsh, lobpcg
from torch import Tensor

import stiefel_opt as so

try:
    import geoopt
    import pogo
    import pogo.base
    import pymanopt
    from pymanopt.manifolds import Stiefel as PymanoptStiefel
    from pymanopt.optimizers import ConjugateGradient, TrustRegions
except ImportError as error:
    raise SystemExit(
        f"{error}; the rivals come with `pip install 'stiefel-opt[bench]' pymanopt`"
    ) from error

TARGET = 1e-8
MOMENTUM = 0.9
SGD_GRID = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
ADAM_GRID = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
SECOND_ORDER = (math.nan,)  # methods without a rate


@dataclass(frozen=True)
class Problem:
    """One draw of A = (Xi + Xi')/2/sqrt(n): the exact maximum, and the start all methods share."""

    matrix: Tensor
    maximum: float
    start: Tensor

    def gap(self, value: float) -> float:
        return (self.maximum - value) / abs(self.maximum)


@dataclass
class Run:
    """Relative gap and seconds after every iteration; |X'X - I| now and then, and at the end."""

    gaps: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    error: float = math.nan

    @property
    def reached(self) -> bool:
        return bool(self.gaps) and abs(self.gaps[-1]) <= TARGET and self.error <= TARGET

    @property
    def iterations(self) -> float:
        return len(self.gaps) if self.reached else math.inf

    @property
    def time(self) -> float:
        return self.seconds[-1] if self.reached else math.inf


@dataclass(frozen=True)
class Limit:
    """A run ends at the target, after so many iterations, or after so many seconds."""

    iterations: float
    seconds: float


@dataclass(frozen=True)
class Method:
    """A way to run one problem at one rate; ``kind`` says whom it is compared with."""

    name: str
    run: Callable[[Problem, float, Limit], Run]
    rates: tuple[float, ...] = SGD_GRID
    kind: str = "torch"  # or "pymanopt", "eigensolver"


def draw_problem(n: int, m: int, number: int) -> Problem:
    generator = torch.Generator().manual_seed(1000 * m + number)
    gaussian = torch.randn(n, n, generator=generator, dtype=torch.float64)
    matrix = (gaussian + gaussian.T) / (2 * math.sqrt(n))
    maximum = float(torch.linalg.eigvalsh(matrix)[-m:].sum())
    start = torch.randn(n, m, generator=generator, dtype=torch.float64)
    return Problem(matrix, maximum, torch.linalg.qr(start).Q)


Before = Callable[[torch.optim.Optimizer, float, int], None]


def optimize(
    problem: Problem,
    lr: float,
    limit: Limit,
    *,
    tag: Callable[[Tensor], Tensor],
    build: Callable[..., torch.optim.Optimizer],
    wide: bool = False,
    before: Before | None = None,
) -> Run:
    """Minimise -tr(X'AX) with one parameter; value and next gradient share the product AX."""
    start = problem.start.clone()
    parameter = tag(start.mT.unsqueeze(0).contiguous() if wide else start)
    optimizer = build([parameter], lr=lr)
    run = Run()
    began = time.perf_counter()
    point = problem.start
    image = problem.matrix @ point
    while len(run.gaps) < limit.iterations and (not run.seconds or run.seconds[-1] < limit.seconds):
        grad = -2 * image
        parameter.grad = grad.mT.unsqueeze(0) if wide else grad
        if before is not None:
            before(optimizer, lr, len(run.gaps) + 1)
        optimizer.step()
        point = parameter.detach()[0].mT if wide else parameter.detach()
        image = problem.matrix @ point
        value = float((point * image).sum())
        if not math.isfinite(value):
            break
        run.gaps.append(problem.gap(value))
        run.seconds.append(time.perf_counter() - began)
        if run.gaps[-1] <= TARGET:  # far below -TARGET: no orthonormal X has such a value
            break
    run.error = orthonormality_error(point)
    return run


def ours(rule: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Run]:
    return partial(optimize, tag=so.ManifoldParameter, build=partial(rule, **options))


def vanishing_friction(optimizer: torch.optim.Optimizer, lr: float, iteration: int) -> None:
    """Friction 3/t: mu = exp(-3/k) at the k-th iteration, for the same step in time as mu = 0.9."""
    squared_step = lr * -math.log(MOMENTUM) / (1 - MOMENTUM)
    momentum = math.exp(-3 / iteration)
    optimizer.param_groups[0]["momentum"] = momentum
    optimizer.param_groups[0]["lr"] = squared_step * iteration * (1 - momentum) / 3


def geoopt_method(rule: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Run]:
    tag = partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel(canonical=False))
    return partial(optimize, tag=tag, build=partial(rule, **options))


def pogo_sgd(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = pogo.POGO(parameters, pogo.base.SGD(momentum=MOMENTUM), lr)
    return optimizer


class Reached(Exception):  # noqa: N818
    """Ends a run of pymanopt."""


def pymanopt_run(problem: Problem, _: float, limit: Limit, *, second_order: bool) -> Run:
    """One entry for each evaluation of the cost that improves: its line searches count too."""
    A = problem.matrix.numpy()
    manifold = PymanoptStiefel(*problem.start.shape)
    run, best = Run(), [math.inf]
    began = time.perf_counter()

    @pymanopt.function.numpy(manifold)
    def cost(X: Any) -> float:
        value = float(np.sum(X * (A @ X)))
        if problem.gap(value) < best[0]:
            best[0] = problem.gap(value)
            run.gaps.append(best[0])
            run.seconds.append(time.perf_counter() - began)
            run.error = orthonormality_error(torch.tensor(X))
            if best[0] <= TARGET or run.seconds[-1] > limit.seconds:
                raise Reached
        return -value

    @pymanopt.function.numpy(manifold)
    def gradient(X: Any) -> Any:
        return -2 * (A @ X)

    @pymanopt.function.numpy(manifold)
    def hessian(X: Any, direction: Any) -> Any:  # noqa: ARG001
        return -2 * (A @ direction)

    task = pymanopt.Problem(manifold, cost, euclidean_gradient=gradient, euclidean_hessian=hessian)
    rule = TrustRegions if second_order else ConjugateGradient
    solver = rule(max_iterations=100_000, max_time=limit.seconds, verbosity=0)
    with contextlib.suppress(Reached):
        solver.run(task, initial_point=problem.start.numpy())
    return run


def eigensolver_run(problem: Problem, tolerance: float, _: Limit, *, iterative: bool) -> Run:
    """LOBPCG or Lanczos with a tolerance; one entry, at the end."""
    A, start = problem.matrix.numpy(), problem.start.numpy()
    began = time.perf_counter()
    if iterative:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns where it stops above its tolerance
            _, vectors = lobpcg(A, start, largest=True, tol=tolerance, maxiter=2000)
    else:
        _, vectors = eigsh(A, k=start.shape[1], which="LA", tol=tolerance, v0=start[:, 0])
    seconds = time.perf_counter() - began
    X = torch.tensor(np.ascontiguousarray(vectors))
    value = float((X * (problem.matrix @ X)).sum())
    return Run([problem.gap(value)], [seconds], orthonormality_error(X))


HEAVY = {"momentum": MOMENTUM}
PUBLISHED = {"transport": "published", "rotation": "euler"}
TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6)

STIEFEL_SGD = Method("StiefelSGD", ours(so.StiefelSGD, **HEAVY))

GROUPS: dict[str, tuple[Method, ...]] = {
    "methods": (
        STIEFEL_SGD,
        Method("StiefelSGD, published flows", ours(so.StiefelSGD, **HEAVY, **PUBLISHED)),
        Method("StiefelAdam", ours(so.StiefelAdam), ADAM_GRID),
        Method("RGD-C-C (Wen & Yin)", ours(so.ProjectedRGD)),
        Method("RGD-C-QR, momentum", ours(so.ProjectedRGD, retraction="qr", **HEAVY)),
        Method("CayleySGD", ours(so.CayleySGD, **HEAVY)),
        Method("CayleyAdam", ours(so.CayleyAdam), ADAM_GRID),
        Method("geoopt SGD", geoopt_method(geoopt.optim.RiemannianSGD, **HEAVY)),
        Method("geoopt Adam", geoopt_method(geoopt.optim.RiemannianAdam), ADAM_GRID),
        Method(
            "POGO",
            partial(optimize, tag=torch.nn.Parameter, build=pogo_sgd, wide=True),
        ),
        Method(
            "pymanopt conjugate gradient", partial(pymanopt_run, second_order=False),
            SECOND_ORDER, "pymanopt",
        ),
        Method(
            "pymanopt trust regions", partial(pymanopt_run, second_order=True),
            SECOND_ORDER, "pymanopt",
        ),
        Method(
            "scipy lobpcg", partial(eigensolver_run, iterative=True), TOLERANCES, "eigensolver"
        ),
        Method(
            "scipy eigsh", partial(eigensolver_run, iterative=False), TOLERANCES, "eigensolver"
        ),
    ),
    "variants": (
        STIEFEL_SGD,
        Method("Euclidean metric", ours(so.StiefelSGD, metric="euclidean", **HEAVY)),
        Method("metric a = -1", ours(so.StiefelSGD, metric=-1.0, **HEAVY)),
        Method("rotation cayley", ours(so.StiefelSGD, rotation="cayley", **HEAVY)),
        Method("rotation expm", ours(so.StiefelSGD, rotation="expm", **HEAVY)),
        Method("nesterov", ours(so.StiefelSGD, nesterov=True, **HEAVY)),
        Method("friction 3/t", partial(ours(so.StiefelSGD, **HEAVY), before=vanishing_friction)),
        Method("published, expm", ours(so.StiefelSGD, transport="published", rotation="expm")),
        Method("published, cayley", ours(so.StiefelSGD, transport="published", rotation="cayley")),
        Method("published, euler", ours(so.StiefelSGD, **PUBLISHED)),
    ),
    "retractions": (
        STIEFEL_SGD,
        *(
            Method(f"CayleySGD, {steps} iterations", ours(so.CayleySGD, steps=steps, **HEAVY))
            for steps in (0, 1, 2, 5)
        ),
        Method("CayleySGD, exact", ours(so.CayleySGD, exact=True, **HEAVY)),
        Method(
            "CayleySGD's momentum, polar retraction",
            ours(so.ProjectedRGD, metric="euclidean", retraction="polar", **HEAVY),
        ),
        Method(
            "CayleySGD's momentum, QR retraction",
            ours(so.ProjectedRGD, metric="euclidean", retraction="qr", **HEAVY),
        ),
    ),
}  # fmt: skip
