"""The published flows, and steps whose friction follows the slope, as slow loops in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from reference import AdamReference, Matrix, SGDReference, divide, expm, polar_factor


def cayley(skew: Matrix) -> Matrix:
    """(I - K/2)^(-1)(I + K/2)."""
    identity = np.eye(len(skew))
    return np.linalg.solve(identity - skew / 2, identity + skew / 2)


class Published:
    """The flows of Kong, Wang & Tao; `printed` with the sign and the corrections as they stand."""

    default_radius, is_nesterov = 1.0, False

    def __init__(
        self, point: Matrix, *, rotation: str = "euler", printed: bool = False, **options: Any
    ) -> None:
        super().__init__(point, **options)
        self.rotation, self.printed = rotation, printed

    def couple(self, mu: float, skew: Matrix) -> Matrix:
        kappa = (3 * self.a - 2) / (-2 if self.printed else 2)
        return mu * self.U + kappa * self.lr * self.U @ skew if mu else np.zeros_like(self.U)

    def coupling(self) -> Matrix:
        return self.Z

    def limited(self, quotient: Matrix, *_: Any) -> Matrix:
        return quotient

    def move(
        self, X: Matrix, U: Matrix, skew: Matrix, V: Matrix, Z: Matrix
    ) -> tuple[Matrix, Matrix]:
        eta = self.lr
        K = eta * skew
        turned = {"cayley": cayley, "expm": expm, "euler": lambda K: np.eye(len(K)) + K}
        Xh = X @ turned[self.rotation](K)
        if self.n == self.m:
            self.X = polar_factor(Xh)
            return self.U, Z
        self.X = polar_factor(Xh + eta * V @ (Xh.conj().T @ Xh))
        return U - eta * Xh @ (V.conj().T @ U), Z


class PublishedSGDReference(Published, SGDReference):
    def move(
        self, X: Matrix, U: Matrix, skew: Matrix, V: Matrix, Z: Matrix
    ) -> tuple[Matrix, Matrix]:
        takes_the_last = (
            self.printed and self.n > self.m
        )  # Algorithm 4, of squares, has the new one
        return super().move(X, U, self.Z if takes_the_last else skew, V, Z)


class PublishedAdamReference(Published, AdamReference):
    def precondition(self, first: Matrix, second: Matrix, steps: int, **ahead: bool) -> Matrix:
        if not self.printed:
            return super().precondition(first, second, steps, **ahead)
        return np.sqrt(1 - self.betas[1] ** steps) * divide(first, np.sqrt(second) + self.eps)


def followed(w: float, b: float, s: float, momentum: float) -> tuple[float, float, float]:
    """What the step's length is multiplied by, mu, and -<F, v> of the new v; w was the last."""
    if w == 0:
        return 1.0, momentum, b - momentum * s
    mu = min(momentum, b / (w + s)) if w + s > 0 else momentum
    return float(np.exp(0.2 * min(max(-s / w, -0.7), 0.7))), mu, b - mu * s


class AdaptiveSGDReference(SGDReference):
    """Momentum SGD whose friction and length follow the slope."""

    def __init__(self, point: Matrix, **options: Any) -> None:
        super().__init__(point, **options)
        self.largest_lr, self.slope, self.factor = self.lr, 0.0, 1.0

    def friction(self, f: Matrix, g: Matrix) -> float:
        """Dai and Yuan's factor where it is less than the momentum; sets the learning rate."""

        def inner(Z: Matrix, U: Matrix) -> float:
            return float(((1 - self.a) * (f.conj() * Z).sum() + (g.conj() * U).sum()).real)

        b, s = inner(f, g), inner(self.Z, self.U)
        if self.steps == 0:
            self.lr = self.largest_lr * np.sqrt(self.m / b)
        ratio, mu, self.slope = followed(self.slope, b, s, self.momentum)
        self.factor, self.lr = self.factor * ratio, self.lr * ratio
        return mu


class AdaptiveAdamReference(AdamReference):
    """Momentum of divided forces; its friction and length follow the slope."""

    default_radius, is_nesterov = 1.0, False

    def __init__(self, point: Matrix, **options: Any) -> None:
        super().__init__(point, **options)
        self.slope, self.factor = 0.0, 1.0

    def step(self, grad: Matrix) -> None:
        X, f, g = self.split_gradient(grad)
        self.set_lr()
        p, q = self.second_moments(f, g)
        beta1, beta2 = self.betas
        c2 = 1 - beta2**self.steps
        turn = divide(f, np.sqrt(p / c2) + self.eps)
        V = divide(g, np.sqrt(q / c2) + self.eps)
        V = V - X @ (X.conj().T @ V)

        def inner(Z: Matrix, U: Matrix) -> float:
            return float(((1 - self.a) * (f.conj() * Z).sum() + (g.conj() * U).sum()).real)

        ratio, mu, self.slope = followed(self.slope, inner(turn, V), inner(self.Z, self.U), beta1)
        self.factor *= ratio
        self.lr *= self.factor * (1 - beta1) / (1 - beta1 ** (self.steps + self.nesterov))
        U, Z = self.couple(mu, self.Z) - V, mu * self.Z - turn
        if self.nesterov:
            self.U, self.Z = self.move(X, U, mu * Z - turn, mu * U - V, Z)
        else:
            self.U, self.Z = self.move(X, U, Z, U, Z)
