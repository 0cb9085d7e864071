"""Textbook loops that have what the optimizers of the package leave out on purpose.

Inner iterations that stop early with their error left in X (figure 5 of Kong, Wang & Tao, 2023),
and the step of Wen & Yin (2013) as its authors write it. One tall matrix a parameter; the sign is
that of `stiefel_opt.methods.published`, but for ``printed``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.size(1), dtype=matrix.dtype)


def inverse_root(matrix: Tensor, iterations: int) -> Tensor:
    """A^(-1/2) by coupled Newton-Schulz iterations (Higham 1997, equation 2.6), as published."""
    scale = torch.linalg.matrix_norm(matrix)
    identity = identity_like(matrix)
    root, inverse = matrix / scale, identity
    for _ in range(iterations):
        middle = (3 * identity - inverse @ root) / 2
        root, inverse = root @ middle, middle @ inverse
    return inverse / scale.sqrt()


class Loop(torch.optim.Optimizer):
    """One parameter after the other; ``move`` returns the new point."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                parameter.copy_(self.move(parameter.detach(), parameter.grad, state, group))

    def move(self, X: Tensor, G: Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class PublishedLoop(Loop):
    """Algorithm 1 of Kong et al., SGD with momentum, the inverse root by ``iterations`` of Newton.

    ``printed``: line 3 with the sign, line 4 with the Z that Algorithm 1 prints.
    """

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        momentum: float = 0.9,
        iterations: int = 100,
        printed: bool = False,
    ) -> None:
        choice = {"iterations": iterations, "printed": printed}
        super().__init__(params, {"lr": lr, "momentum": momentum, **choice})

    def move(self, X: Tensor, G: Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Tensor:
        lr, momentum = group["lr"], group["momentum"]
        inner = X.T @ G
        U = state.get("U", torch.zeros_like(X))
        Z = state.get("Z", torch.zeros_like(inner))
        turn = -lr / 4 * (-Z if group["printed"] else Z)
        before = Z
        U = momentum * U + U @ turn - (G - X @ inner)
        Z = momentum * Z - (inner - inner.T)
        moved = X + lr * X @ (before if group["printed"] else Z)
        ahead = moved + lr * U @ (moved.T @ moved)
        state["U"], state["Z"] = U - lr * moved @ (U.T @ U), Z
        return ahead @ inverse_root(ahead.T @ ahead, group["iterations"])


class CayleyLoop(Loop):
    """Cayley SGD of Li et al. (2020) with ``iterations`` of the fixed point and nothing mended."""

    def __init__(
        self, params: list[Tensor], lr: float, momentum: float = 0.9, iterations: int = 5
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "iterations": iterations})

    def move(self, X: Tensor, G: Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Tensor:
        M = group["momentum"] * state.get("M", torch.zeros_like(X)) - G
        inner = X.T @ M
        left = M - X @ inner / 2  # W = left X' - X left'

        def turn(Y: Tensor) -> Tensor:
            return left @ (X.T @ Y) - X @ (left.T @ Y)

        state["M"] = velocity = turn(X)
        norm = (2 * ((left.T @ left) @ (X.T @ X) - (left.T @ X) @ (left.T @ X)).trace()).sqrt()
        step = min(group["lr"], 1.0 / (float(norm) + 1e-8))
        Y = X + step * velocity
        for _ in range(group["iterations"]):
            Y = X + step / 2 * turn(X + Y)
        return Y


class WenYinLoop(Loop):
    """Gradient descent by the Cayley map of Wen & Yin (2013), with their system of 2m x 2m."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def move(self, X: Tensor, G: Tensor, _: dict[Any, Any], group: dict[str, Any]) -> Tensor:
        left, right = torch.cat([G, X], dim=1), torch.cat([X, -G], dim=1)
        small = group["lr"] / 2 * (right.T @ left)
        system = small + identity_like(small)
        return X - group["lr"] * (left @ torch.linalg.solve(system, right.T @ X))
