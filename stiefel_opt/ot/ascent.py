"""One ascent from one starting point: transport, gradient, step, and when to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from stiefel_opt.errors import check_type, fail
from stiefel_opt.numerics import gram_error, polar_factor, tangent_part
from stiefel_opt.optim import StiefelSGD
from stiefel_opt.ot.clouds import Clouds
from stiefel_opt.ot.entropic import EntropicTransport
from stiefel_opt.tags import ManifoldParameter

OptimizerFactory = Callable[[list[Tensor]], Optimizer]

# L1 errors of the marginals, and the most products with the kernel to reach them.
_FINAL_ERROR, _FINAL_PRODUCTS = 1e-8, 20_000
ACCEPTED_ERROR = 1e-6
_ROUNDING = 1e-13
_LARGEST_ERROR, _ERROR_BY_GRADIENT, _PRODUCTS = 1e-3, 0.05, 2000

# Default steps, in units of one over the transport cost; the objective's weight in its mean.
_FIRST_STEP, _SMALLEST_STEP, _LARGEST_STEP, _NO_STEP = 0.5, 1e-3, 100.0, 1e-10
_MEMORY = 0.85


@dataclass(frozen=True)
class Iteration:
    """Numbers of one iteration.

    Attributes:
        objective: Dual value: a lower bound of the objective, and equal to it once the marginals
            are right.
        marginal_error: L1 error of the marginals of the plan.
        gradient: Riemannian over Euclidean norm of the gradient.
        seconds: Since the start from this starting point.
    """

    objective: float
    marginal_error: float
    gradient: float
    seconds: float


class Ascent:
    """Maximises the entropic transport cost over the projection, from ``start``."""

    def __init__(
        self,
        clouds: Clouds,
        transport: EntropicTransport,
        start: Tensor,
        tol: float,
        sinkhorn_iterations: int | None,
        last: int,
    ) -> None:
        self.clouds, self.transport = clouds, transport
        self.point = ManifoldParameter(start)  # U, (d, k)
        self.tol, self.sinkhorn_iterations = tol, sinkhorn_iterations
        self.last = last  # no step begins when so many products have been taken
        self.cost, self.objective = 0.0, -float("inf")  # the largest dual value so far
        self.tangent, self.relative = torch.zeros_like(start), 1.0  # over the Euclidean norm
        self.log: list[Iteration] = []
        # below it a gradient is rounding: that of equal clouds is nothing else
        spread = clouds.a @ clouds.x.square().sum(1) + clouds.b @ clouds.y.square().sum(1)
        self._least = _ROUNDING * float(spread)
        self._best = (start, transport.f, transport.g)

    def run(
        self, optimizer: OptimizerFactory | None, max_iter: int, advance: Callable[[], object]
    ) -> None:
        """Step until the gradient is small, no step rises, or ``max_iter``; then keep the best."""
        began = time.perf_counter()
        self._begin(optimizer)
        self.differentiate()
        rule = _ScaledSteps(self) if optimizer is None else _GivenSteps(self, optimizer)
        for number in range(max_iter + 1):
            stationary = self._is_stationary()
            transport = self.transport
            if stationary or transport.objective > self.objective:
                self.objective = transport.objective
                self._best = (self.point.detach().clone(), transport.f, transport.g)
            seconds = time.perf_counter() - began
            self.log.append(Iteration(transport.objective, transport.error, self.relative, seconds))
            if stationary or number == max_iter or self.is_exhausted() or not rule.step():
                return
            self.differentiate()
            advance()

    def finish(self, products: int) -> None:
        """Return to the best projection and converge its plan, as well as ``products`` allow."""
        point, f, g = self._best
        with torch.no_grad():
            self.point.copy_(point)
        self._project()
        self.transport.f, self.transport.g = f, g
        self.last = self.transport.products + products
        self._converge(min(_FINAL_PRODUCTS, products // 2))
        if self.transport.error > ACCEPTED_ERROR:
            reached = self.transport.error, self.transport.f, self.transport.g
            self.transport.anneal(self.last)
            self._converge(self.last - self.transport.products)
            if self.transport.error > reached[0]:
                _, self.transport.f, self.transport.g = reached
                self._converge(0)

    def is_exhausted(self) -> bool:
        """Say whether the products of this ascent have been taken."""
        return self.transport.products >= self.last

    def solve(self) -> None:
        """Transport between the projected clouds, as well as the gradient deserves."""
        self._project()
        tolerance = max(min(_LARGEST_ERROR, _ERROR_BY_GRADIENT * self.relative), _FINAL_ERROR)
        limit = min(_PRODUCTS, self.last - self.transport.products)
        self.transport.solve(tolerance, limit, self.sinkhorn_iterations)

    def differentiate(self) -> None:
        """Cost and gradient 2 [X'(r * XU - plan YU) + Y'(b * YU - plan' XU)], r the row sums.

        It is the derivative of the dual value at any potentials, the plan held fixed.
        """
        clouds, transport = self.clouds, self.transport
        x, y = transport.x, transport.y
        to_y, to_x = transport.transported()
        rows, columns = transport.rows[:, None] * x - to_y, clouds.b[:, None] * y - to_x
        self.cost = max(float((x * rows).sum() + (y * columns).sum()), 0.0)
        gradient = 2 * (rows.T @ clouds.x + columns.T @ clouds.y).T
        self.tangent = tangent_part(self.point.detach(), gradient)
        norm = float(torch.linalg.vector_norm(gradient))
        size = float(torch.linalg.vector_norm(self.tangent))
        self.relative = size / norm if norm > self._least else 0.0
        # Not the gradient itself: near the maximum its part along U is hundreds of times larger,
        # and an optimizer that takes it off multiplies the rounding in U'U - I by as much.
        self.point.grad = -self.tangent

    def _begin(self, optimizer: OptimizerFactory | None) -> None:
        """Transport under the starting point; as published if all else is the caller's."""
        transport = self.transport
        if optimizer is not None and self.sinkhorn_iterations is not None:
            transport.forget()
            return self.solve()
        self._project()
        transport.anneal(self.last)
        return transport.solve(_LARGEST_ERROR, min(_PRODUCTS, self.last - transport.products))

    def _project(self) -> None:
        point, clouds, transport = self.point.detach(), self.clouds, self.transport
        transport.x, transport.y = (point.T @ clouds.x.T).T, (point.T @ clouds.y.T).T

    def _converge(self, limit: int) -> None:
        self.transport.solve(_FINAL_ERROR, limit)
        self.differentiate()

    def _is_stationary(self) -> bool:
        """Say whether the gradient is small enough, with a converged plan if so."""
        if self.relative <= self.tol and self.transport.error > _FINAL_ERROR:
            self._converge(min(_PRODUCTS, self.last - self.transport.products))
        return self.relative <= self.tol


class _GivenSteps:
    """The caller's optimizer."""

    def __init__(self, ascent: Ascent, factory: OptimizerFactory) -> None:
        self.ascent = ascent
        remedy = "for instance `lambda params: StiefelAdam(params, lr=0.1)`"
        self.optimizer = factory([ascent.point])
        wanted = "return a torch.optim.Optimizer"
        check_type("optimizer", self.optimizer, Optimizer, wanted, remedy)

    def step(self) -> bool:
        self.optimizer.step()
        point = self.ascent.point.detach()
        error = float(gram_error(point))
        if not error < 1e-3:
            given = f"|U'U - I| = {error:.1e} from {type(self.optimizer).__name__}"
            remedy = "take an optimizer for orthonormal parameters, or a smaller lr"
            raise ValueError(fail("optimizer", "keep the projection orthonormal", given, remedy))
        if error > 1e-10:  # or the objective would be too large by about this factor
            point.copy_(polar_factor(point))
        self.ascent.solve()
        return True


class _ScaledSteps:
    """StiefelSGD without momentum, its learning rate from the last two gradients.

    The two step sizes of Barzilai & Borwein in turn; a step counts if the dual value is above a
    running mean of its former values (Zhang & Hager 2004), else it is repeated with a quarter of
    the learning rate.
    """

    def __init__(self, ascent: Ascent) -> None:
        self.ascent = ascent
        self.lr = _FIRST_STEP / ascent.cost if ascent.cost > 0 else 1.0
        self.unit = 2.0 ** math.frexp(ascent.cost)[1]  # gradients of small clouds are tiny
        self.optimizer = StiefelSGD([ascent.point], lr=self.lr, momentum=0.0)
        self.former: tuple[Tensor, Tensor] | None = None
        self.mean, self.weight = ascent.transport.objective, 1.0
        self.long = False

    def step(self) -> bool:
        """Take one step that rises enough; False if there is none, with the old point restored."""
        ascent, transport = self.ascent, self.ascent.transport
        point, tangent = ascent.point.detach().clone(), ascent.tangent
        potentials = transport.f, transport.g
        objective = transport.objective
        lr = self._learning_rate(point, tangent)
        self.former = point, tangent
        rise = 1e-4 * float(tangent.square().sum())
        ascent.point.grad = tangent / -self.unit
        while True:
            self.optimizer.param_groups[0]["lr"] = lr * self.unit
            self.optimizer.step()
            ascent.solve()
            if transport.objective >= self.mean + lr * rise - 1e-12 * abs(objective):
                break
            lr /= 4
            with torch.no_grad():
                ascent.point.copy_(point)
            transport.f, transport.g = potentials
            if not lr * ascent.cost > _NO_STEP or ascent.is_exhausted():
                return False
        weight = _MEMORY * self.weight + 1
        self.mean += (transport.objective - self.mean) / weight
        self.weight, self.lr = weight, lr
        return True

    def _learning_rate(self, point: Tensor, tangent: Tensor) -> float:
        if self.former is None:
            return self.lr
        moved, change = point - self.former[0], tangent - self.former[1]
        across = abs(float((moved * change).sum()))
        self.long = not self.long
        above, below = across, float(change.square().sum())
        if self.long:
            above, below = float(moved.square().sum()), across
        cost = self.ascent.cost
        if not (above > 0 and below > 0 and cost > 0):  # a step that rounding swallowed
            return self.lr
        return min(max(above / below, _SMALLEST_STEP / cost), _LARGEST_STEP / cost)
