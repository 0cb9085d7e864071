"""Slow float64 loops written from the formulas: what the optimizers are measured against.

One matrix at a time, every momentum materialised, every root from LAPACK, nothing rearranged. The
letters are those of Kong, Wang & Tao (ICLR 2023): X is n x m with X'X = I, G the gradient,
Z (m x m, skew) and U (n x m, X'U = 0) the rescaled momenta, eta the learning rate, mu the momentum,
a the metric parameter. ' is the transpose, of complex matrices the conjugate one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm as general_expm

Matrix = NDArray[np.float64]

SATURATION_BOUND = 4.0
METRICS = {"canonical": 0.5, "euclidean": 0.0}


def polar_factor(matrix: Matrix) -> Matrix:
    """The nearest matrix with orthonormal columns."""
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    return left @ right


def orthonormality_error(matrix: Matrix) -> float:
    """The largest entry of |X'X - I|."""
    return float(np.abs(matrix.conj().T @ matrix - np.eye(matrix.shape[1])).max())


def inverse_root(matrix: Matrix) -> Matrix:
    """A^(-1/2) of a symmetric positive definite A."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors / np.sqrt(values)) @ vectors.conj().T


def rot(skew: Matrix) -> Matrix:
    """(I + K)(I - K^2)^(-1/2), the polar factor of I + K."""
    identity = np.eye(len(skew))
    return (identity + skew) @ inverse_root(identity - skew @ skew)


def expm(skew: Matrix) -> Matrix:
    """exp(K) = V exp(-i w) V* from the eigenvalues w of the Hermitian matrix iK."""
    values, vectors = np.linalg.eigh(1j * skew)
    rotation = (vectors * np.exp(-1j * values)) @ vectors.conj().T
    return rotation if np.iscomplexobj(skew) else rotation.real


def cut(*matrices: Matrix) -> float:
    """What a step along K and V is multiplied by: one number, by |E^2|_F of both E = [K'K, V'V]."""
    squares = [matrix.conj().T @ matrix for matrix in matrices]
    most = SATURATION_BOUND**2
    size = np.sqrt(sum(np.linalg.norm(square @ square) ** 2 for square in squares))
    return float(np.sqrt(most / max(np.sqrt(size), most)))


def divide(numerator: Matrix, denominator: Matrix) -> Matrix:
    """Elementwise quotient with 0/0 = 0, which the diagonal of Z needs when eps is zero."""
    quotient = np.zeros_like(numerator)
    np.divide(numerator, denominator, out=quotient, where=denominator != 0)
    return quotient


class StiefelReference:
    """State and flows of one matrix; a subclass says how gradients become momenta."""

    def __init__(
        self,
        point: Matrix,
        *,
        lr: float,
        maximize: bool = False,
        metric: str | float = "canonical",
        transport: str = "isometric",
    ) -> None:
        self.X = np.array(point)
        self.n, self.m = self.X.shape
        self.Z = np.zeros((self.m, self.m), dtype=self.X.dtype)
        self.U = np.zeros_like(self.X)
        self.steps = 0
        self.lr = lr
        self.maximize = maximize
        self.a = METRICS[metric] if isinstance(metric, str) else metric
        self.b = self.a / (self.a - 1)
        self.transport = transport

    def split_gradient(self, grad: Matrix) -> tuple[Matrix, Matrix, Matrix]:
        """The projected point with f = (1-b)/2 (X'G - G'X) and g = (I - XX')G at that point."""
        grad = -grad if self.maximize else grad
        X = self.X if orthonormality_error(self.X) < 1e-13 * self.n else polar_factor(self.X)
        S = X.conj().T @ grad
        f = (1 - self.b) / 2 * (S - S.conj().T)  # one product, so that the diagonal is exactly zero
        g = grad - X @ S
        return X, f, g

    def couple(self, mu: float, skew: Matrix) -> Matrix:
        """phi_2 without its gradient: the decayed U, turned by the skew momentum."""
        if mu == 0:
            return np.zeros_like(self.U)
        kappa = 2 * self.a - 1
        K = kappa * self.lr * skew
        return mu * self.U @ rot(cut(K) * K)

    def move(
        self, X: Matrix, U: Matrix, skew: Matrix, V: Matrix, Z: Matrix
    ) -> tuple[Matrix, Matrix]:
        """phi_1 along `skew` and phi_3 along V; returns the carried momenta U and Z."""
        eta = self.lr
        eta *= cut(eta * skew, *([eta * V] if self.n > self.m else []))
        Xh = X @ rot(eta * skew)
        if self.transport == "projected":  # X Z onto the tangent space at X D: its skew part there
            carried = (X.conj().T @ Xh).conj().T @ Z
            Z = (carried - carried.conj().T) / 2
        if self.n == self.m:
            self.X = polar_factor(Xh)
            return self.U, Z
        W = V.conj().T @ V
        identity = np.eye(self.m)
        R = inverse_root(identity + eta**2 * W)
        self.X = polar_factor(Xh + eta * V)
        if self.transport == "projected":
            return U - self.X @ (self.X.conj().T @ U), Z
        if V is U:
            return (U - eta * Xh @ W) @ R, Z
        C = V.conj().T @ U
        inner = np.linalg.solve(identity + R, C)
        return U - eta**2 * V @ R @ R @ inner - eta * Xh @ R @ C, Z


class SGDReference(StiefelReference):
    """Momentum SGD; momentum, dampening and Nesterov as in `torch.optim.SGD`."""

    def __init__(
        self,
        point: Matrix,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        nesterov: bool = False,
        **options,
    ) -> None:
        super().__init__(point, **options)
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov

    def step(self, grad: Matrix) -> None:
        X, f, g = self.split_gradient(grad)
        mu = self.friction(f, g)
        if self.steps > 0 and mu != 0:
            f, g = (1 - self.dampening) * f, (1 - self.dampening) * g
        U = self.couple(mu, self.Z) - g
        Z = mu * self.Z - f
        if self.nesterov:
            self.U, self.Z = self.move(X, U, mu * Z - f, mu * U - g, Z)
        else:
            self.U, self.Z = self.move(X, U, Z, U, Z)
        self.steps += 1

    def friction(self, f: Matrix, g: Matrix) -> float:  # noqa: ARG002
        return self.momentum


class AdamReference(StiefelReference):
    """Adam with elementwise second moments p of f and q of g."""

    default_radius: str | float = "virtual"
    is_nesterov = True

    def __init__(
        self,
        point: Matrix,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        nesterov: bool | None = None,
        radius: str | float | None = None,
        decay: float = 0.0,
        **options,
    ) -> None:
        super().__init__(point, **options)
        self.nominal_lr, self.squared_radius, self.decay = self.lr, 1.0, decay
        self.radius = radius or self.default_radius
        self.betas = betas
        self.eps = eps
        self.amsgrad = amsgrad
        self.nesterov = self.is_nesterov if nesterov is None else nesterov
        self.p, self.p_max = np.zeros(self.Z.shape), np.zeros(self.Z.shape)
        self.q, self.q_max = np.zeros(self.U.shape), np.zeros(self.U.shape)

    def precondition(
        self, first: Matrix, second: Matrix, steps: int, *, ahead: bool = False
    ) -> Matrix:
        """(M/c1) / (sqrt(v/c2) + eps) with the bias corrections of `steps`; zero before step 1.

        ``ahead``: M is one step ahead.
        """
        if steps == 0:
            return np.zeros_like(first)
        c1, c2 = 1 - self.betas[0] ** (steps + ahead), 1 - self.betas[1] ** steps
        quotient = divide(first / c1, np.sqrt(second / c2) + self.eps)
        return self.limited(quotient, steps, np.sqrt(c2) / c1, ahead)

    def limited(self, quotient: Matrix, steps: int, corrected: float, ahead: bool) -> Matrix:
        # Cauchy and Schwarz: the mean of `steps` numbers beside their mean square
        terms = sum((self.betas[0] ** 2 / self.betas[1]) ** s for s in range(steps))
        largest = (1 - self.betas[0]) * np.sqrt(terms / (1 - self.betas[1]))
        if ahead:
            largest = self.betas[0] * largest + (1 - self.betas[0]) / np.sqrt(1 - self.betas[1])
        largest *= corrected
        return quotient * divide(np.minimum(np.abs(quotient), largest), np.abs(quotient))

    def step(self, grad: Matrix) -> None:
        X, f, g = self.split_gradient(grad)
        beta1 = self.betas[0]
        self.set_lr()
        U = self.couple(beta1, self.coupling()) - (1 - beta1) * g
        Z = beta1 * self.Z - (1 - beta1) * f
        p, q = self.second_moments(f, g)

        ahead_Z, ahead_U = Z, U
        if self.nesterov:
            ahead_Z, ahead_U = beta1 * Z - (1 - beta1) * f, beta1 * U - (1 - beta1) * g
        turn = self.precondition(ahead_Z, p, self.steps, ahead=self.nesterov)
        direction = self.precondition(ahead_U, q, self.steps, ahead=self.nesterov)
        V = direction - X @ (X.conj().T @ direction)
        self.U, self.Z = self.move(X, U, turn, V, Z)

    def coupling(self) -> Matrix:
        """The skew matrix by which U is turned."""
        return self.precondition(self.Z, self.p_max if self.amsgrad else self.p, self.steps)

    def set_lr(self) -> None:
        """Divide the learning rate by the radius."""
        if self.radius == "virtual":
            self.squared_radius *= (1 - self.decay) ** 2
            self.squared_radius += self.nominal_lr**2 * self.n
            self.lr = self.nominal_lr / np.sqrt(self.squared_radius)
        else:
            self.lr = self.nominal_lr / (np.sqrt(self.n) if self.radius == "angle" else self.radius)

    def second_moments(self, f: Matrix, g: Matrix) -> tuple[Matrix, Matrix]:
        """Count the step; return p and q, with amsgrad their maxima."""
        self.steps += 1
        beta2 = self.betas[1]
        self.p = beta2 * self.p + (1 - beta2) * np.abs(f) ** 2
        self.q = beta2 * self.q + (1 - beta2) * np.abs(g) ** 2
        self.p_max, self.q_max = np.maximum(self.p_max, self.p), np.maximum(self.q_max, self.q)
        return (self.p_max, self.q_max) if self.amsgrad else (self.p, self.q)


def momentum_dynamics(
    X: Matrix, Y: Matrix, V: Matrix, grad: Matrix, *, friction: float, metric: float, kappa: float
) -> tuple[Matrix, Matrix, Matrix]:
    """Right-hand side of the damped dynamics with velocity XY + V.

    X. = XY + V,  Y. = -gamma Y - f,  V. = -gamma V + kappa VY - X V'V - g.
    """
    b = metric / (metric - 1)
    f = (1 - b) / 2 * (X.conj().T @ grad - grad.conj().T @ X)
    g = grad - X @ (X.conj().T @ grad)
    return X @ Y + V, -friction * Y - f, -friction * V + kappa * V @ Y - X @ (V.conj().T @ V) - g


def canonical_geodesic(X: Matrix, Y: Matrix, V: Matrix, time: float) -> Matrix:
    """[X Q] exp(t [[Y, -R'], [R, 0]]) [I; 0] with V = QR (Edelman, Arias & Smith, 1998, 2.42)."""
    m = X.shape[1]
    Q, R = np.linalg.qr(V)
    generator = np.block([[Y, -R.conj().T], [R, np.zeros((m, m))]])
    return np.hstack([X, Q]) @ general_expm(time * generator)[:, :m]


def euclidean_geodesic(X: Matrix, Y: Matrix, V: Matrix, time: float) -> Matrix:
    """[X X.] exp(t [[Y, -S], [I, Y]]) [I; 0] exp(-tY), S = X.'X. (Edelman, Arias & Smith, 2.7)."""
    m = X.shape[1]
    velocity = X @ Y + V
    generator = np.block([[Y, -velocity.conj().T @ velocity], [np.eye(m), Y]])
    return np.hstack([X, velocity]) @ general_expm(time * generator)[:, :m] @ expm(-time * Y)
