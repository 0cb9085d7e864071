"""Textbook loops that have what the optimizers of the package leave out on purpose.

Inner iterations that stop early with their error left in X (figure 5 of Kong, Wang & Tao, 2023),
phi_2 by the matrix exponential and by the Cayley map (their appendix M.2), and a momentum that is
left where it was when X moves on (their figure 6); the step of Wen & Yin (2013) as its authors
write it. One tall matrix a parameter; the sign is that of `stiefel_opt.methods.published`, but
for ``printed``.
"""

from __future__ import annotations

from collections.abc import Callable
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


def cayley(step: Tensor) -> Tensor:
    identity = identity_like(step)
    return torch.linalg.solve(identity - step / 2, identity + step / 2)


MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "euler": lambda step: identity_like(step) + step,
    "cayley": cayley,
    "expm": torch.linalg.matrix_exp,
}


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
    """Algorithm 1 of Kong et al. with a choice of the metric a, of phi_1, phi_2 and of how many
    iterations the inverse root gets.

    ``printed``: line 3 with the sign, line 4 with the Z that Algorithm 1 prints.
    """

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        momentum: float = 0.9,
        a: float = 0.5,
        rotation: str = "euler",
        coupling: str = "euler",
        iterations: int = 100,
        printed: bool = False,
    ) -> None:
        choice = {"a": a, "rotation": rotation, "coupling": coupling, "iterations": iterations}
        super().__init__(params, {"lr": lr, "momentum": momentum, "printed": printed, **choice})

    def move(self, X: Tensor, G: Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Tensor:
        lr, momentum, a = group["lr"], group["momentum"], group["a"]
        inner = X.T @ G
        U = state.get("U", torch.zeros_like(X))
        Z = state.get("Z", torch.zeros_like(inner))
        turn = (3 * a - 2) / 2 * lr * (-Z if group["printed"] else Z)
        before = Z
        if group["coupling"] == "euler":
            U = momentum * U + U @ turn
        else:
            U = momentum * U @ MAPS[group["coupling"]](turn)
        U = U - (G - X @ inner)
        Z = momentum * Z - (inner - inner.T) / (2 * (1 - a))
        moved = X @ MAPS[group["rotation"]](lr * (before if group["printed"] else Z))
        ahead = moved + lr * U @ (moved.T @ moved)
        state["U"], state["Z"] = U - lr * moved @ (U.T @ U), Z
        return ahead @ inverse_root(ahead.T @ ahead, group["iterations"])


class CayleyLoop(Loop):
    """Cayley SGD of Li et al. (2020) with ``iterations`` of the fixed point and nothing mended.

    ``every``: X is replaced by its QR factor after so many steps; 0: never.
    """

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        momentum: float = 0.9,
        iterations: int = 5,
        every: int = 0,
    ) -> None:
        choice = {"iterations": iterations, "every": every}
        super().__init__(params, {"lr": lr, "momentum": momentum, **choice})

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
        state["number"] = state.get("number", 0) + 1
        if group["every"] and state["number"] % group["every"] == 0:
            factor = torch.linalg.qr(Y)
            Y = factor.Q * factor.R.diagonal().sign()
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


class PolarLoop(Loop):
    """Heavy ball with the polar factor as retraction; the momentum M stays as X moves on.

    ``tangent``: what is projected onto the tangent space of X. "gradient": M collects projected
    gradients; "direction": M collects plain ones, the step is along its projection; "nothing".
    """

    def __init__(
        self, params: list[Tensor], lr: float, momentum: float = 0.9, tangent: str = "direction"
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "tangent": tangent})

    def move(self, X: Tensor, G: Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Tensor:
        def projected(matrix: Tensor) -> Tensor:
            inner = X.T @ matrix
            return matrix - X @ (inner + inner.T) / 2

        if group["tangent"] == "gradient":
            G = projected(G)
        M = state["M"] = group["momentum"] * state.get("M", torch.zeros_like(X)) - G
        step = projected(M) if group["tangent"] == "direction" else M
        left, _, right = torch.linalg.svd(X + group["lr"] * step, full_matrices=False)
        return left @ right
