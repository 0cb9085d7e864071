"""L-BFGS as printed, slowly: full vectors at the point, dense operators, a dense inverse Hessian.

Every matrix is carried by n x n matrices, every pair is an ambient vector at the point that is
transported in each iteration, inner products go through the metric, and the direction is that of
the dense BFGS update. The line search is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.lbfgs import _strong_wolfe

Loss = Callable[[Sequence[Tensor]], Tensor]


class LBFGSReference:
    """Tall float64 matrices X'X = I and plain tensors: ``is_plain`` says which are which."""

    def __init__(self, loss: Loss, start: Sequence[Tensor], is_plain: Sequence[bool]) -> None:
        self.loss, self.points, self.is_plain = loss, [x.clone() for x in start], list(is_plain)
        self.references = [x.clone() for x in start]
        self.sizes = [x.numel() for x in start]
        self.pairs: list[tuple[Tensor, Tensor]] = []

    # vectors are flat, columns of matrices one below the other

    def split(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split(self.sizes)
        return [v.view(x.T.shape).T for v, x in zip(parts, self.points, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([v.T.reshape(-1) for v in tensors])

    def metric(self, points: Sequence[Tensor]) -> Tensor:
        """The matrix of the canonical metric."""
        blocks = []
        for x, plain in zip(points, self.is_plain, strict=True):
            one = torch.eye(x.shape[0], dtype=x.dtype)
            block = one if plain else one - x @ x.T / 2
            blocks += [block] * x.shape[1]
        return torch.block_diag(*blocks)

    def frame(self, points: Sequence[Tensor]) -> Tensor:
        """Orthogonal for the metric: tangent vectors to coordinates."""
        blocks = []
        for x, e, plain in zip(points, self.references, self.is_plain, strict=True):
            one = torch.eye(x.shape[0], dtype=x.dtype)
            small = torch.eye(x.shape[1], dtype=x.dtype)
            block = one
            if not plain:
                v = x + e
                # a square X with E'X = -I has V = 0: the limit is E X'
                map_ = e @ x.T if x.shape[0] == x.shape[1] else (
                    v @ torch.linalg.inv(small + e.T @ x) @ v.T - one
                )  # fmt: skip
                block = map_ @ (one + (0.5**0.5 - 1) * x @ x.T)
            blocks += [block] * x.shape[1]
        return torch.block_diag(*blocks)

    def gradient(self, points: Sequence[Tensor]) -> tuple[float, Tensor]:
        leaves = [x.clone().requires_grad_() for x in points]
        loss = self.loss(leaves)
        grads = torch.autograd.grad(loss, leaves)
        found = [
            g if plain else g - x @ g.T @ x
            for x, g, plain in zip(points, grads, self.is_plain, strict=True)
        ]
        return loss.item(), self.join(found)

    def move(self, direction: Tensor, t: float) -> tuple[list[Tensor], Tensor]:
        """The point at t on the curve, and its velocity."""
        points, velocities = [], []
        for x, d, plain in zip(self.points, self.split(direction), self.is_plain, strict=True):
            if plain:
                points.append(x + t * d)
                velocities.append(d)
                continue
            turn = (x.T @ d - d.T @ x) / 2
            normal = d - x @ (x.T @ d)
            left = t * (normal @ x.T - x @ normal.T)
            left = torch.linalg.matrix_exp(torch.stack([left, left]))[0]
            right = torch.linalg.matrix_exp(torch.stack([t * turn, t * turn]))[0]
            points.append(left @ x @ right)
            velocities.append(left @ d @ right)
        return points, self.join(velocities)

    def transport(self, direction: Tensor, t: float) -> tuple[list[Tensor], Tensor, Tensor]:
        """The point at t, the operator that carries vectors there, and its inverse."""
        points, velocity = self.move(direction, t)
        here, there = self.frame(self.points), self.frame(points)
        length = torch.sqrt(direction @ self.metric(self.points) @ direction)
        a, b = here @ direction / length, there @ velocity / length
        one = torch.eye(len(a), dtype=a.dtype)
        rotation = one - torch.outer(a + b, a + b) / (1 + a @ b) + 2 * torch.outer(b, a)
        carry = torch.linalg.inv(there) @ rotation @ here
        return points, carry, torch.linalg.inv(carry)

    def inverse_hessian(self, metric: Tensor) -> Tensor:
        """Dense, acting on gradients."""
        one = torch.eye(len(metric), dtype=metric.dtype)
        if not self.pairs:
            return one
        s, y = self.pairs[-1]
        found = one * (s @ metric @ y) / (y @ metric @ y)
        for s, y in self.pairs:
            rho = 1 / (s @ metric @ y)
            found = (one - rho * torch.outer(s, metric @ y)) @ found @ (
                one - rho * torch.outer(y, metric @ s)
            ) + rho * torch.outer(s, metric @ s)  # fmt: skip
        return found

    def trial(self, metric: Tensor, t: Any, direction: Tensor) -> tuple[float, Tensor]:
        """The loss at t, and a vector whose dot product with d is the slope there."""
        points, _, back = self.transport(direction, float(t))
        loss, gradient = self.gradient(points)
        return loss, metric @ back @ gradient

    def run(self, iterations: int, history: int, search: str | None, lr: float) -> None:
        loss, gradient = self.gradient(self.points)
        for _ in range(iterations):
            metric = self.metric(self.points)
            direction = -self.inverse_hessian(metric) @ gradient
            t = lr if self.pairs else min(1.0, 1.0 / float(gradient.abs().sum())) * lr
            if search is not None:
                slope = gradient @ metric @ direction

                new, dual, length, _ = _strong_wolfe(
                    self.trial, metric, t, direction, loss, metric @ gradient, slope
                )
                t, loss = float(length), new
                brought = torch.linalg.inv(metric) @ dual
            points, carry, back = self.transport(direction, t)
            if search is None:
                loss, there = self.gradient(points)
                brought = back @ there
            s, y = carry @ (t * direction), carry @ (brought - gradient)
            self.pairs = [(carry @ a, carry @ b) for a, b in self.pairs]
            self.points = points
            if s @ self.metric(points) @ y > 0:
                self.pairs = [*self.pairs, (s, y)][-history:]
            gradient = carry @ brought
