"""Slow float64 loops of Riemannian gradient descent and of Cayley SGD and Adam: dense n x n.

The formulas are those of Wen & Yin (2013), Likhosherstov et al. (AISTATS 2021) and Li, Li &
Todorovic (ICLR 2020), with their printed errors corrected. One matrix at a time; X is n x m
with X'X = I.
"""

from __future__ import annotations

import numpy as np
from reference import METRICS, Matrix, orthonormality_error, polar_factor


def sym(matrix: Matrix) -> Matrix:
    return (matrix + matrix.conj().T) / 2


def dense_cayley(generator: Matrix, point: Matrix) -> Matrix:
    """(I - W/2)^(-1) (I + W/2) X with the n x n system."""
    identity = np.eye(len(generator))
    return np.linalg.solve(identity - generator / 2, (identity + generator / 2) @ point)


def low_rank_cayley(left: Matrix, right: Matrix, point: Matrix) -> Matrix:
    """cay(-BC') X = X - B (I + C'B/2)^(-1) C'X (Likhosherstov et al., Lemma 1)."""
    system = np.eye(left.shape[1]) + right.conj().T @ left / 2
    return point - left @ np.linalg.solve(system, right.conj().T @ point)


def generator_of(point: Matrix, tangent: Matrix) -> Matrix:
    """The skew W with WX = xi: P xi X' - X xi'P, P = I - XX'/2."""
    projected = tangent - point @ (point.conj().T @ tangent) / 2
    return projected @ point.conj().T - point @ projected.conj().T


def positive_qr(matrix: Matrix) -> Matrix:
    """The Q factor for which the diagonal of R is positive."""
    orthonormal, upper = np.linalg.qr(matrix)
    return orthonormal * (np.diag(upper) / np.abs(np.diag(upper)))


def retract(point: Matrix, tangent: Matrix, retraction: str) -> Matrix:
    if retraction == "cayley":
        return dense_cayley(generator_of(point, tangent), point)
    moved = point + tangent
    return positive_qr(moved) if retraction == "qr" else polar_factor(moved)


def gradient(point: Matrix, grad: Matrix, a: float) -> Matrix:
    """The Riemannian gradient A X for A_C = GX' - XG' and A_E = PX' - XP', and their relatives.

    A_C and A_E differ in the part within the span of X, which the metric divides by 2 (1 - a).
    """
    canonical = (grad @ point.conj().T - point @ grad.conj().T) @ point
    return canonical - (1 - 1 / (2 * (1 - a))) * point @ (point.conj().T @ canonical)


class DescentReference:
    """Riemannian gradient descent with the momentum of torch, carried by projection.

    M adds gradients up, as in torch; the velocity is XZ + U = -M.
    """

    def __init__(
        self,
        point: Matrix,
        *,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        metric: str | float = "canonical",
        retraction: str = "cayley",
    ) -> None:
        self.X = np.array(point)
        self.n, self.m = self.X.shape
        self.M = np.zeros_like(self.X)
        self.a = METRICS[metric] if isinstance(metric, str) else metric
        self.lr, self.momentum, self.dampening = lr, momentum, dampening
        self.nesterov, self.sign, self.retraction = nesterov, -1.0 if maximize else 1.0, retraction
        self.steps = 0

    @property
    def Z(self) -> Matrix:  # noqa: N802
        return -self.X.conj().T @ self.M

    @property
    def U(self) -> Matrix:  # noqa: N802
        return self.X @ (self.X.conj().T @ self.M) - self.M

    def step(self, grad: Matrix) -> None:
        X = self.X if orthonormality_error(self.X) < 1e-13 * self.n else polar_factor(self.X)
        force = self.force(gradient(X, self.sign * grad, self.a))
        self.M = self.momentum * self.M + force
        direction = force + self.momentum * self.M if self.nesterov else self.M
        self.X = self.move(X, direction)
        self.M = self.M - self.X @ sym(self.X.conj().T @ self.M)
        self.steps += 1

    def force(self, force: Matrix) -> Matrix:
        damped = self.steps > 0 and self.momentum != 0
        return (1 - self.dampening) * force if damped else force

    def move(self, X: Matrix, direction: Matrix) -> Matrix:
        return retract(X, -self.lr * direction, self.retraction)


class CayleySGDReference(DescentReference):
    """Li et al., Algorithm 1, with the momentum kept, |W| Frobenius, X orthonormal after a step."""

    def __init__(
        self,
        point: Matrix,
        *,
        momentum: float = 0.9,
        steps: int = 2,
        exact: bool = False,
        **options,
    ) -> None:
        super().__init__(point, momentum=momentum, metric="euclidean", **options)
        self.iterations, self.exact = steps, exact

    def step(self, grad: Matrix) -> None:
        X = self.X if orthonormality_error(self.X) < 1e-13 * self.n else polar_factor(self.X)
        force = self.force(self.sign * grad)  # not projected: W does that
        self.M = self.momentum * self.M + force
        self.X = self.move(X, force + self.momentum * self.M if self.nesterov else self.M)
        self.M = self.M - X @ sym(X.conj().T @ self.M)  # W X, which the next W projects
        self.M = self.M - self.X @ sym(self.X.conj().T @ self.M)
        self.steps += 1

    def move(self, X: Matrix, direction: Matrix) -> Matrix:
        What = direction @ X.conj().T - X @ (X.conj().T @ direction @ X.conj().T) / 2
        W = What - What.conj().T
        alpha = min(self.lr, 1 / (np.linalg.norm(W) + 1e-8))
        if self.exact:
            return dense_cayley(-alpha * W, X)
        Y = X - alpha * W @ X
        for _ in range(self.iterations):
            Y = X - alpha / 2 * W @ (X + Y)
        return polar_factor(Y)


class CayleyAdamReference(CayleySGDReference):
    """Li et al., Algorithm 2: one second moment for each matrix."""

    def __init__(
        self,
        point: Matrix,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        **options,
    ) -> None:
        super().__init__(point, momentum=betas[0], **options)
        self.betas, self.eps, self.amsgrad = betas, eps, amsgrad
        self.v = self.v_max = 0.0

    def step(self, grad: Matrix) -> None:
        b1, b2 = self.betas
        X = self.X if orthonormality_error(self.X) < 1e-13 * self.n else polar_factor(self.X)
        self.steps += 1
        self.M = b1 * self.M + (1 - b1) * self.sign * grad
        self.v = b2 * self.v + (1 - b2) * float(np.sum(np.abs(grad) ** 2))
        self.v_max = max(self.v, self.v_max)
        v = self.v_max if self.amsgrad else self.v
        r = np.sqrt(v / (1 - b2**self.steps) + self.eps)
        scale = (1 - b1**self.steps) * r
        self.X = self.move(X, self.M / scale)
        self.M = self.M - X @ sym(X.conj().T @ self.M)  # scale W X
        self.M = self.M - self.X @ sym(self.X.conj().T @ self.M)
