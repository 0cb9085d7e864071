"""Projection-robust Wasserstein distance: the projection under which transport costs most."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import (
    ProgressBar,
    check_flag,
    check_integer,
    check_range,
    fail,
    users_level,
)
from stiefel_opt.numerics import random_point
from stiefel_opt.ot.ascent import ACCEPTED_ERROR, Ascent, Iteration, OptimizerFactory
from stiefel_opt.ot.clouds import (
    Clouds,
    generator_of,
    read_clouds,
    read_projection,
    refuse_keywords,
)
from stiefel_opt.ot.entropic import EntropicTransport

# In units of the mean squared distance under the first projection.
_DEFAULT_REG: Final = 0.02
_SMALLEST_REG: Final = 1e-13
# Products with the kernel: for a step, and for how many steps at least; half of them converge the
# plan at the end.
_STEP_PRODUCTS: Final = 500
_LEAST_STEPS: Final = 10
_OF_POT: Final = {
    "tau": "pass optimizer=lambda params: so.ot.RGAS(params, lr=tau / reg), sinkhorn_iterations=1, "
    "tol=0, for steps of POT's, or neither, for steps whose length is chosen",
    "U0": "pass init",
    "maxiter": "pass max_iter",
    "stopThr": "pass tol, which is relative to the gradient",
    "random_state": "pass seed",
    "verbose": "pass progress=True",
    "log": "the result has a log",
}


@dataclass(frozen=True, repr=False)
class PRWResult:
    r"""Result of :func:`projection_robust_wasserstein`; arrays are of the kind of the clouds.

    Attributes:
        value: Cost :math:`\langle \pi, C_U \rangle` of the plan, without the entropy.
        objective: value + reg KL(plan || ab'), the maximised quantity; from the potentials, so that
            the remaining marginal error enters by its square.
        projection: U, ``(d, k)`` with orthonormal columns; any rotation U Q is as good.
        plan: ``(n, m)``, with row sums a and column sums b.
        potentials: f and g with :math:`\pi_{ij} = a_i b_j e^{(f_i + g_j - C_{ij}) / reg}`.
        reg: The regularization.
        converged: Whether the relative gradient fell to ``tol`` and ``marginal_error`` to 1e-6.
        gradient: Riemannian over Euclidean norm of the gradient.
        marginal_error: L1 error of the marginals of the plan.
        log: The iterations from the best starting point.
        objectives: Where each starting point ended.
    """

    value: float
    objective: float
    projection: Any
    plan: Any
    potentials: tuple[Any, Any]
    reg: float
    converged: bool
    gradient: float
    marginal_error: float
    log: list[Iteration]
    objectives: list[float]

    @override
    def __repr__(self) -> str:
        values = f"value={self.value:.6g}, objective={self.objective:.6g}, reg={self.reg:.3g}"
        ended = f"converged={self.converged}, iterations={len(self.log)}"
        shapes = f"projection {_size(self.projection)}, plan {_size(self.plan)}"
        return f"PRWResult({values}, {ended}, {shapes})"


def _size(array: Any) -> str:
    return " x ".join(map(str, array.shape))


def projection_robust_wasserstein(
    x: Any,
    y: Any,
    a: Any = None,
    b: Any = None,
    *tau: Any,
    k: int = 2,
    reg: float | None = None,
    optimizer: OptimizerFactory | None = None,
    max_iter: int = 500,
    tol: float = 1e-4,
    restarts: int = 1,
    init: Any = None,
    seed: int | None = None,
    sinkhorn_iterations: int | None = None,
    max_products: int | None = None,
    progress: bool = False,
    **of_pot: Any,
) -> PRWResult:
    r"""Find the k-dimensional projection under which entropic transport from x to y costs most.

    .. math::
        \max_{U \in \mathrm{St}(d, k)} \min_{\pi \in \Pi(a, b)} \sum_{ij} \pi_{ij}
        |U^\top (x_i - y_j)|^2 + \mathrm{reg}\, \mathrm{KL}(\pi \,\|\, a b^\top)

    Args:
        x, y: Clouds, ``(n, d)`` and ``(m, d)``, arrays, lists or tensors; the result is of the kind
            and dtype of x, computed in float64 on its device.
        a, b: Their weights, ``(n,)`` and ``(m,)``, not negative, summing to one. Default: equal.
        k: Dimension of the projection, 1 to d. Default: 2.
        reg: Regularization, in units of squared distance: smaller is nearer to the distance
            without, and slower. Default: a fiftieth of the mean squared distance between the clouds
            under the first projection. By it ``value`` was 1 to 4 % too large on two Gaussian
            clouds that differ, in at most 60 steps, and 4 to 15 % on pairs of plays (500 words each
            in 200 dimensions), in 25 to 500 steps. Take a tenth of that for another digit, or
            :func:`projected_wasserstein` of the resulting projection for all of them.
        optimizer: Makes the optimizer of the projection from a list of parameters, for instance
            ``lambda params: StiefelAdam(params, lr=0.1)``; it is given the tangent part of the
            gradient of minus the objective. Default: :class:`StiefelSGD` without momentum, its
            learning rate 0.5 / cost at first and set by the last two gradients (Barzilai &
            Borwein) from then on, shortened where the objective falls below a running mean.
        max_iter: Most steps from one starting point; 0 evaluates the starting point. Default: 500.
        tol: Stop where the Riemannian gradient is ``tol`` times the Euclidean one; 0 takes all
            steps. Default: 1e-4.
        restarts: Starting points; the best end is returned. Default: 1.
        init: First starting point, ``(d, k)`` with orthonormal columns. Default: the leading
            eigenvectors of the second moment of x_i - y_j under independent weights.
        seed: For the other starting points, which are random. Default: another one at each call.
        sinkhorn_iterations: So many after a step instead of as many as the gradient asks for, and
            with an ``optimizer`` so many from nothing before the first, as in the published
            algorithms: POT's iteration, y before x from scalings of one. The plan that is returned
            is converged all the same.
        max_products: About the most products of the kernel with a vector, n m operations each, in
            the whole call; a solution that has begun may take a hundred more. No step begins beyond
            half of them. Default: 500 for each of ``max_iter`` steps and starting points, and for
            ten steps at least; more if ``sinkhorn_iterations`` takes more.
        progress: Show a bar; needs tqdm. Default: no.
        tau, of_pot: None. The arguments of ``ot.dr.projection_robust_wasserstein`` are refused with
            ours.

    Returns: See :class:`PRWResult`.
    Raises:
        ValueError, TypeError: for clouds, weights or options that cannot be used, naming them, such
            as a ``reg`` that is lost in the rounding of the distances, and for an optimizer that
            leaves the manifold.
    Warns: where the gradient has not fallen to ``tol``, unless ``max_iter`` or ``tol`` is 0; where
        the marginals of the plan are off by more than 1e-6.
    Note: An iteration costs one n x m exponential and O(n m (k + p)) for p products of the kernel
        with a vector: at the default ``reg`` mostly 5 to 30, hundreds at a thousandth of the mean
        squared distance and below. Nothing of size d x d; the plan is the only n x m array.
    Reference: Paty & Cuturi (ICML 2019); Lin, Fan, Ho, Cuturi & Jordan (NeurIPS 2020), equation 3.
    """
    keywords = {"tau": tau, **of_pot} if tau else of_pot
    refuse_keywords("projection_robust_wasserstein", keywords, _OF_POT)
    published = optimizer is not None and sinkhorn_iterations is not None
    with torch.inference_mode(mode=False):
        clouds = read_clouds(x, y, a, b)
        clouds = replace(read_clouds(y, x, b, a), model=x) if published else clouds
    k = check_integer("k", k, 1, clouds.dimension)
    counts = {"sinkhorn_iterations": sinkhorn_iterations, "max_products": max_products}
    _check_options(reg, max_iter, tol, restarts, counts, progress, optimizer)
    each = max(_STEP_PRODUCTS, 4 * (sinkhorn_iterations or 0))
    most = max_products or each * max(max_iter, _LEAST_STEPS) * restarts
    with torch.inference_mode(mode=False):  # optimizers read version counters
        starts = _starting_points(clouds, k, restarts, init, seed)
        reg = _regularization(reg, clouds.mean_distance(starts[0]))
        transport = EntropicTransport(clouds.a, clouds.b, reg)
        ascents = []
        with ProgressBar(max_iter * restarts, progress) as bar:
            for start in starts:
                last = transport.products + most // (2 * restarts)
                ascent = Ascent(clouds, transport, start, tol, sinkhorn_iterations, last)
                ascent.run(optimizer, max_iter, bar.update)
                ascents.append(ascent)
        best = max(ascents, key=lambda ascent: ascent.objective)
        exhausted = best.is_exhausted()
        best.finish(max(most - transport.products, most // 4))
        result = _result(clouds, best, [ascent.objective for ascent in ascents])
    if published:
        result = replace(result, plan=result.plan.T, potentials=result.potentials[::-1])
    if not result.converged:
        _warn(result, transport.products, most, max_iter, tol, exhausted)
    return result


def _regularization(reg: float | None, spread: float) -> float:
    """Return the regularization for distances of this mean; raise for one below their rounding."""
    if reg is None:
        return _DEFAULT_REG * spread or 1.0
    if reg < _SMALLEST_REG * spread:
        wanted = f"be at least {_SMALLEST_REG * spread:.1e}, the rounding of these distances"
        raise ValueError(fail("reg", wanted, reg, "leave it out for a default"))
    return reg


def _warn(
    result: PRWResult, products: int, most: int, max_iter: int, tol: float, exhausted: bool
) -> None:
    """Warn of a plan or a gradient that has not converged, naming the bound that was in the way."""
    steps, bound = len(result.log) - 1, f"max_products, which is {most}"
    if result.marginal_error > ACCEPTED_ERROR:
        taken = f"after {products} products with the kernel"
        reason = f"the marginals of its plan are off by {result.marginal_error:.1e} {taken}"
    elif max_iter > 0 and tol > 0:
        reason = f"its relative gradient is {result.gradient:.1e} after {steps} steps, tol={tol:g}"
        bound = bound if exhausted and steps < max_iter else f"max_iter, which is {max_iter}"
    else:
        return
    warnings.warn(
        f"projection_robust_wasserstein has not converged: {reason}; raise {bound}, or reg, "
        f"{result.reg:.2g}, which makes the objective smoother",
        stacklevel=users_level(),
    )


def _check_options(
    reg: object,
    max_iter: object,
    tol: object,
    restarts: object,
    counts: Mapping[str, object],
    progress: object,
    optimizer: object,
) -> None:
    if reg is not None:
        check_range("reg", reg, 0.0, open_low=True)
    check_integer("max_iter", max_iter, 0)
    check_range("tol", tol, 0.0)
    check_integer("restarts", restarts, 1)
    for name, count in counts.items():
        if count is not None:
            check_integer(name, count, 1)
    check_flag("progress", progress)
    if optimizer is not None and not callable(optimizer):
        raise TypeError(fail("optimizer", "be a function of parameters", type(optimizer).__name__))


def _result(clouds: Clouds, best: Ascent, objectives: list[float]) -> PRWResult:
    """Return the best ascent, which is finished, in the kind of the clouds."""
    transport = best.transport
    point = best.point.detach()
    f, g = clouds.full_potentials(transport.f, transport.g, point, transport.reg)
    return PRWResult(
        value=best.cost,
        objective=transport.objective,
        projection=clouds.in_kind(point),
        plan=clouds.in_kind(clouds.full_plan(transport.plan())),
        potentials=(clouds.in_kind(f), clouds.in_kind(g)),
        reg=transport.reg,
        converged=best.relative <= best.tol and transport.error <= ACCEPTED_ERROR,
        gradient=best.relative,
        marginal_error=transport.error,
        log=best.log,
        objectives=objectives,
    )


def _starting_points(
    clouds: Clouds, k: int, restarts: int, init: Any, seed: int | None
) -> list[Tensor]:
    shape = clouds.dimension, k
    given = None if init is None else read_projection("init", init, *shape)
    starts = [_leading_directions(clouds, k) if given is None else given]
    generator = generator_of(seed)
    draw = functools.partial(random_point, *shape, generator=generator, dtype=torch.float64)
    starts += [draw() for _ in range(restarts - 1)]
    return [start.to(clouds.x.device) for start in starts]


def _leading_directions(clouds: Clouds, k: int) -> Tensor:
    """Return the k leading eigenvectors of the second moment of x_i - y_j, i and j independent."""
    x, y, a, b = clouds.x, clouds.y, clouds.a, clouds.b
    left, right = a @ x, b @ y
    rows = torch.cat(
        (a.sqrt()[:, None] * (x - left), b.sqrt()[:, None] * (y - right), (left - right)[None])
    )
    if k <= len(rows) < clouds.dimension:  # wide: cheaper, and nothing of size d x d
        directions: Tensor = torch.linalg.svd(rows, full_matrices=False).Vh[:k].T
    else:
        directions = torch.linalg.eigh(rows.T @ rows).eigenvectors[:, -k:]
    return directions.contiguous()
