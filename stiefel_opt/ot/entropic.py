r"""Entropic transport between two weighted clouds of a few dimensions, solved again and again.

The plan is :math:`\pi_{ij} = a_i b_j \exp((f_i + g_j - |x_i - y_j|^2) / \epsilon)` and the dual

.. math:: D(f, g) = \langle a, f \rangle + \langle b, g \rangle + \epsilon (1 - \textstyle\sum \pi)

is a lower bound of the entropic cost for every f and g, converged or not. Between two
solutions the potentials f and g are stored, not their exponentials: these diverge, and only their
product matters. Sinkhorn's iteration alone, as POT has it, does not arrive where the regularization
is a thousandth of the squared distance or less (`benchmarks.speed.entropic`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# exp(100) times itself is far from overflow, and an entry that underflowed in the kernel stays
# negligible after scaling by it.
_SAFE_EXPONENT = 100.0
_ANNEALING_FACTOR = 4.0
_ANNEALING_ERROR = 0.1
_ANNEALING_PRODUCTS = 200
_CONJUGATE_GRADIENT_LIMIT = 60


class EntropicTransport:
    """Potentials, scalings and one n x m kernel, reused for the next projection.

    Whoever projects the clouds sets ``x`` and ``y``, ``(n, k)`` and ``(m, k)``. The plan is
    ``(a * u)[:, None] * kernel * (b * v)``; its column sums are b, to rounding.

    Args:
        a, b: Positive weights of the clouds, ``(n,)`` and ``(m,)``, float64, summing to one.
        reg: Regularization, in units of squared distance.
    """

    def __init__(self, a: Tensor, b: Tensor, reg: float) -> None:
        self.a, self.b, self.reg = a, b, reg
        self.x = self.y = a.new_empty(0, 0)  # the projected clouds
        self.f, self.g = torch.zeros_like(a), torch.zeros_like(b)  # potentials, <a, f> = <b, g>
        self.kernel = a.new_empty(a.numel(), b.numel())  # the only array of this size
        self.u, self.v, self.rows = torch.ones_like(a), torch.ones_like(b), a
        self.error = math.inf  # |rows - a|_1 for the row sums of the plan
        self.objective = -math.inf  # the dual value
        self.products = 0  # products of the kernel with a vector so far

    def forget(self) -> None:
        """Go back to a plan that is the kernel of the cost, without weights."""
        self.f, self.g = -self.reg * self.a.log(), -self.reg * self.b.log()

    def anneal(self, last: int) -> None:
        """Find rough potentials from nothing, by regularizations that fall to the wanted one.

        No step begins when ``last`` products have been taken.
        """
        self.f, self.g = torch.zeros_like(self.a), torch.zeros_like(self.b)
        squares = self.x.square().sum(1).mean() + self.y.square().sum(1).mean()
        largest = float(squares.clamp_min(self.reg))
        for power in range(math.ceil(math.log(largest / self.reg, _ANNEALING_FACTOR)), 0, -1):
            reg = self.reg * _ANNEALING_FACTOR**power
            self._build(reg)
            limit = min(_ANNEALING_PRODUCTS, last - self.products)
            self._balance(reg, _ANNEALING_ERROR, limit)

    def solve(self, tolerance: float, limit: int, iterations: int | None = None) -> None:
        """Continue from the potentials at hand; those too far away to help are annealed anew.

        Args:
            tolerance: Bound on the L1 error of the row sums.
            limit: Most products with the kernel; ``error`` is the error reached.
            iterations: That many plain Sinkhorn iterations instead, rows and then columns;
                ``tolerance`` is ignored.
        """
        fits = self._build(self.reg)
        if iterations is not None:
            self.v = torch.ones_like(self.b)  # rows come first
            self._balance(self.reg, 0.0, 2 * iterations, newton=False)
            return
        last = self.products + limit
        if not fits:
            self.anneal(last)
            self._build(self.reg)
        self._balance(self.reg, tolerance, last - self.products)

    def transported(self) -> tuple[Tensor, Tensor]:
        """Return plan @ y and plan' @ x, without forming the plan."""
        row, column = (self.a * self.u)[:, None], (self.b * self.v)[:, None]
        # A few rows times a matrix: faster than a matrix times a few columns.
        to_y, to_x = (column * self.y).T @ self.kernel.T, (row * self.x).T @ self.kernel
        return row * to_y.T, column * to_x.T

    def plan(self) -> Tensor:
        """Turn the kernel into the plan, in place; the next solution builds its own."""
        return self.kernel.mul_((self.a * self.u)[:, None]).mul_(self.b * self.v)

    # ---- inside ----------------------------------------------------------------------------------

    def _build(self, reg: float) -> bool:
        """Write exp((f + g - C) / reg) into the kernel: one product of inner size k + 2, one exp.

        Returns: Whether the potentials fit the cost. If not, they are now the largest ones with
            f + g <= C, so that the largest entry of each row and column is one.
        """
        self._write_exponent(reg)
        if float(self.kernel.amax()) < _SAFE_EXPONENT:
            self.kernel.exp_()
            columns, rows = self.a @ self.kernel, self.kernel @ self.b
            smallest = float(torch.minimum(columns.amin(), rows.amin()))
            if smallest > math.exp(-_SAFE_EXPONENT):
                self.u = torch.ones_like(self.a)
                self.v = columns.reciprocal_()
                return True
            self._write_exponent(reg)
        top = self.kernel.amax(1)
        self.f = self.f.sub(top, alpha=reg)
        top = self.kernel.sub_(top[:, None]).amax(0)
        self.g = self.g.sub(top, alpha=reg)
        self.kernel.sub_(top).exp_()
        self.u = torch.ones_like(self.a)
        self.v = (self.a @ self.kernel).reciprocal_()
        return False

    def _write_exponent(self, reg: float) -> None:
        f = ((self.f - self.x.square().sum(1)) / reg)[:, None]
        g = ((self.g - self.y.square().sum(1)) / reg)[:, None]
        left = torch.cat((self.x * (2 / reg), f, torch.ones_like(f)), 1)
        right = torch.cat((self.y, torch.ones_like(g), g), 1)
        torch.mm(left, right.T, out=self.kernel)

    def _balance(self, reg: float, tolerance: float, limit: int, *, newton: bool = True) -> None:
        """Scale rows and columns until ``tolerance`` or until ``limit`` products have been taken.

        Sinkhorn's iteration while it halves the error, Newton's on f otherwise: its Hessian
        diag(rows) - plan diag(1/b) plan' needs two products with the kernel per conjugate gradient.
        """
        previous, last = math.inf, self.products + limit
        while True:
            image = self.kernel @ (self.b * self.v)
            self.rows = self.a * self.u * image
            self.error = float((self.rows - self.a).abs().sum())
            if self.error <= tolerance or self.products >= last:
                break
            slow = self.error > 0.5 * previous
            previous = self.error
            if not (newton and slow and self._newton_step(last)):
                self.u = image.reciprocal_()
                self.v = self._column_scaling(self.u)
                self.products += 1
            largest = float(torch.maximum(self.u.log().abs().amax(), self.v.log().abs().amax()))
            if not largest < _SAFE_EXPONENT:
                if math.isfinite(largest):
                    self._absorb(reg)
                self._build(reg)
        self._absorb(reg)

    def _column_scaling(self, u: Tensor) -> Tensor:
        """Return v that gives the plan the column sums b."""
        self.products += 1
        return ((self.a * u) @ self.kernel).reciprocal_()

    def _newton_step(self, last: int) -> bool:
        """Ascend the dual as a function of f, with g eliminated; False if it did not rise."""
        residual = self.a - self.rows
        direction = self._newton_direction(residual, last)
        slope = float(residual @ direction)
        value = self._value(self.u, self.v)
        step = min(1.0, 20.0 / max(float(direction.abs().amax()), 1e-300))
        for _ in range(6):
            u = self.u * (step * direction).exp_()
            v = self._column_scaling(u)
            if self._value(u, v) >= value + 1e-4 * step * slope - 1e-14 * abs(value):
                self.u, self.v = u, v
                return True
            step *= 0.3
        return False

    def _value(self, u: Tensor, v: Tensor) -> float:
        """Return the dual over reg, up to a constant, where the columns are right."""
        return float(self.a @ u.log() + self.b @ v.log())

    def _newton_direction(self, residual: Tensor, last: int) -> Tensor:
        """Solve (diag(rows) - plan diag(1/b) plan') d = a - rows by conjugate gradients."""
        row, column = self.a * self.u, self.b * self.v.square()
        accuracy = min(0.1, self.error) ** 2
        solution = torch.zeros_like(residual)
        scaled = residual / self.rows
        search, size = scaled.clone(), float(residual @ scaled)
        goal = accuracy * size
        for _ in range(_CONJUGATE_GRADIENT_LIMIT):
            image = self.kernel @ (column * ((row * search) @ self.kernel))
            image = torch.addcmul(self.rows * search, row, image, value=-1)
            self.products += 2
            curvature = float(search @ image)
            if curvature <= 0:  # rounding: the Hessian is only semidefinite
                break
            solution.add_(search, alpha=size / curvature)
            residual = residual.sub(image, alpha=size / curvature)
            scaled = residual / self.rows
            former, size = size, float(residual @ scaled)
            if size <= goal or self.products >= last:
                break
            search = torch.add(scaled, search, alpha=size / former)
        return solution

    def _absorb(self, reg: float) -> None:
        """Move the scalings into the potentials, with f and g centred against each other."""
        f = self.f.add(self.u.log(), alpha=reg)
        g = self.g.add(self.v.log(), alpha=reg)
        left, right = self.a @ f, self.b @ g
        shift = (left - right) / 2
        self.f, self.g = f - shift, g + shift
        self.objective = float(left + right)
