"""Every statement of docs/theory.md, checked by numbers.

The rules are those of the package; what they are compared with is written from the page: the
Lagrangian, a direct integration of the equations, the published step, completions, duality.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases import pairwise
from held import Calls
from torch import Tensor

import stiefel_opt as so
from stiefel_opt.methods import spectral_direction

METRICS = (0.5, 0.0, -1.0, 0.7)
ALPHA = 0.30028311  # of theorem 19
State = tuple[Tensor, Tensor, Tensor]


class Source(torch.Generator):
    """Random numbers, real or complex: the statements are about both."""

    dtype = torch.float64


@pytest.fixture(params=[torch.float64, torch.complex128], ids=["real", "complex"])
def generator(request: pytest.FixtureRequest) -> Source:
    source = Source()
    source.manual_seed(7)
    source.dtype = request.param
    return source


def gaussian(*shape: int, generator: Source) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=generator.dtype)


def point(n: int, m: int, generator: Source) -> Tensor:
    return torch.linalg.qr(gaussian(n, m, generator=generator)).Q


def skew(matrix: Tensor) -> Tensor:
    return (matrix - matrix.mH) / 2


def normal(X: Tensor, matrix: Tensor) -> Tensor:
    return matrix - X @ (X.mH @ matrix)


def inner(A: Tensor, B: Tensor) -> Tensor:
    return (A.conj() * B).real.sum()


def nuclear(A: Tensor) -> float:
    return float(torch.linalg.svdvals(A).sum())


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors / values.sqrt()) @ vectors.mH


def rot(K: Tensor) -> Tensor:
    identity = torch.eye(len(K), dtype=K.dtype)
    return (identity + K) @ inverse_root(identity - K @ K)


def squared(Y: Tensor, V: Tensor, a: float) -> float:
    """|XY + V|^2 in the metric a."""
    return float((1 - a) * inner(Y, Y) + inner(V, V))


def gradient(X: Tensor, G: Tensor, a: float) -> tuple[Tensor, Tensor]:
    """The skew part F and the normal part g of the Riemannian gradient."""
    return skew(X.mH @ G) / (1 - a), normal(X, G)


class Weighted:
    """f = -tr(X'AXN), whose gradient has both parts; ``slope`` is its largest gradient."""

    def __init__(self, n: int, m: int, generator: Source) -> None:
        matrix = gaussian(n, n, generator=generator)
        self.A = (matrix + matrix.mH) / (2 * math.sqrt(n))
        self.N = torch.linspace(0.3, 1, m, dtype=torch.float64).diag().to(matrix.dtype)
        self.slope = 2 * float(torch.linalg.matrix_norm(self.A, 2))  # l and C of the page
        self.least = -float((torch.linalg.eigvalsh(self.A)[-m:] * self.N.diagonal().real).sum())

    def __call__(self, X: Tensor) -> float:
        return -float(inner(X, self.A @ X @ self.N))

    def gradient(self, X: Tensor) -> Tensor:
        return -2 * self.A @ X @ self.N

    def smoothness(self, a: float) -> float:
        """L of lemma 9."""
        return 2 * self.slope * max(1.0, 1 / (1 - a))

    def transported(self, a: float) -> float:
        """L_T of lemma 12."""
        kappa = 2 * a - 1
        first = (2 * self.slope) ** 2 / (1 - a)
        second = (self.slope * (1 + 2 * math.sqrt(2) + abs(kappa))) ** 2
        return math.sqrt(max(1.0, 1 / (1 - a)) * (first + second))


class Signs(Weighted):
    """f = -tr(X'AX) where the eigenvalues of A are 1 and -1: some bounds are reached."""

    def __init__(self, n: int, m: int) -> None:
        signs = torch.ones(n, dtype=torch.float64)
        signs[m:] = -1
        self.A, self.N = signs.diag(), torch.eye(m, dtype=torch.float64)
        self.slope, self.least = 2.0, -float(m)

    def almost_least(self, distance: float) -> Tensor:
        """A point as far from the minimum as that, in every direction."""
        n, m = len(self.A), len(self.N)
        away = torch.eye(n, dtype=torch.float64)[:, m : 2 * m]
        return (torch.eye(n, m, dtype=torch.float64) + distance * away) / math.hypot(1, distance)


def draw(a: float, generator: Source, n: int = 9, m: int = 4) -> State:
    X = point(n, m, generator)
    Y = skew(gaussian(m, m, generator=generator))
    return X, Y, normal(X, gaussian(n, m, generator=generator)) * (1 + abs(a))


# ---- the equations of motion ---------------------------------------------------------------------


def motion(f: Weighted | None, a: float, kappa: float, gamma: float) -> Callable[[State], State]:
    def rates(state: State) -> State:
        X, Y, V = state
        G = torch.zeros_like(X) if f is None else f.gradient(X)
        F, g = gradient(X, G, a)
        turned = kappa * V @ Y - X @ (V.mH @ V)
        return X @ Y + V, -gamma * Y - F, -gamma * V + turned - g

    return rates


def integrate(
    rates: Callable[[State], State], state: State, time: float, steps: int
) -> list[State]:
    """The classical method of Runge and Kutta."""

    def ahead(state: State, rate: State, h: float) -> State:
        X, Y, V = (x + h * k for x, k in zip(state, rate, strict=True))
        return X, Y, V

    h, path = time / steps, [state]
    for _ in range(steps):
        k1 = rates(state)
        k2 = rates(ahead(state, k1, h / 2))
        k3 = rates(ahead(state, k2, h / 2))
        k4 = rates(ahead(state, k3, h))
        for rate, weight in ((k1, 1), (k2, 2), (k3, 2), (k4, 1)):
            state = ahead(state, rate, weight * h / 6)
        path.append(state)
    return path


def angular(state: State, a: float) -> Tensor:
    X, Y, V = state
    P = (1 - a) * X @ Y + V
    return P @ X.mH - X @ P.mH


def skew_basis(n: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """The skew matrices with two entries, and the imaginary ones of skew-Hermitian matrices."""
    for row, column in itertools.combinations_with_replacement(range(n), 2):
        for factor in (1.0, 1j) if dtype.is_complex else (1.0,):
            Omega = torch.zeros(n, n, dtype=dtype)
            Omega[row, column] = factor
            if row != column or factor == 1j:
                yield Omega - Omega.mH


def variation(path: list[State], f: Weighted, a: float, gamma: float, time: float) -> float:
    """How fast the action changes when the curve is bent, over all skew matrices of a basis.

    The action is integrated from the Lagrangian of bent curves, and differentiated by torch.
    """
    n, steps = len(path[0][0]), len(path) - 1
    X, Q = (torch.stack(x) for x in zip(*((X, X @ Y + V) for X, Y, V in path), strict=True))
    t = torch.linspace(0, time, steps + 1, dtype=torch.float64)[:, None, None]
    bump, slope = (
        torch.sin(math.pi * t / time) ** 2,
        math.pi / time * torch.sin(2 * math.pi * t / time),
    )
    weights = torch.ones_like(t)
    weights[1:-1:2], weights[2:-1:2] = 4, 2  # Simpson's rule
    worst = 0.0
    for Omega in skew_basis(n, X.dtype):
        bend = torch.zeros((), dtype=torch.float64, requires_grad=True)
        turn = torch.linalg.matrix_exp(bend * bump * Omega)
        bent, velocity = turn @ X, turn @ (Q + bend * slope * (Omega @ X))
        along = bent.mH @ velocity
        kinetic = (velocity.abs().square().sum((1, 2)) - a * along.abs().square().sum((1, 2))) / 2
        value = -((bent.conj() * (f.A @ bent @ f.N)).real.sum((1, 2)))
        integrand = (gamma * t[:, 0, 0]).exp() * (kinetic - value) * weights[:, 0, 0]
        (derivative,) = torch.autograd.grad(integrand.sum() * time / steps / 3, bend)
        worst = max(worst, abs(float(derivative)))
    return worst


@pytest.mark.parametrize("a", METRICS)
def test_the_action_is_stationary(a: float, generator: Source) -> None:
    """Theorem 1."""
    f, gamma, time = Weighted(6, 3, generator), 0.4, 1.0
    start = draw(a, generator, 6, 3)
    path = integrate(motion(f, a, 2 * a - 1, gamma), start, time, 100)
    assert variation(path, f, a, gamma, time) < 1e-5
    other = integrate(motion(f, a, (3 * a - 2) / 2, gamma), start, time, 100)
    error = variation(other, f, a, gamma, time)
    assert error < 1e-5 if a == 0 else error > 1e-2


@pytest.mark.parametrize("a", METRICS)
def test_the_published_equation_lost_half_a_term(a: float, generator: Source) -> None:
    """The derivative of the Hamiltonian by torch, and which factor follows from which term."""
    b = a / (a - 1)
    X, Y, V = draw(a, generator, 7, 3)
    P = (1 - a) * X @ Y + V
    free = X.clone().requires_grad_()
    H = (inner(P, P) - b * inner(free.mH @ P, free.mH @ P)) / 2
    (derivative,) = torch.autograd.grad(H, free)
    correct, printed = b * P @ P.mH @ X, b / 2 * (P @ P.mH @ X + X @ P.mH @ P)
    torch.testing.assert_close(-derivative, correct)
    Q = X @ Y + V
    for term, kappa in ((correct, 2 * a - 1), (printed, (3 * a - 2) / 2)):
        # d/dt of Q = (I - b XX')P; what is X times a symmetric matrix has no normal part
        rate = term - b * X @ (X.mH @ term) - b * (Q @ X.mH @ P + X @ Q.mH @ P)
        torch.testing.assert_close(normal(X, rate), (1 + kappa) * V @ Y)
        torch.testing.assert_close((1 + kappa) * V @ Y, -(1 + kappa) * normal(X, Q @ Q.mH @ X))


@pytest.mark.parametrize("a", METRICS)
def test_angular_momentum_is_kept(a: float, generator: Source) -> None:
    """Which coupling keeps the angular momentum of a free motion."""
    start = draw(a, generator)
    before = angular(start, a)
    for kappa in (2 * a - 1, (3 * a - 2) / 2):
        after = angular(integrate(motion(None, a, kappa, 0.0), start, 1.0, 100)[-1], a)
        drift = float((after - before).norm() / before.norm())
        assert drift < 1e-5 if kappa == 2 * a - 1 else drift > 0.02, kappa


@pytest.mark.parametrize("kappa", [0.0, -0.25, 3.0])
def test_energy_falls_for_every_coupling(kappa: float, generator: Source) -> None:
    """Corollary 3."""
    f, a, gamma = Weighted(9, 4, generator), 0.5, 0.7
    steps, time = 200, 1.0
    path = integrate(motion(f, a, kappa, gamma), draw(a, generator), time, steps)
    speeds = torch.tensor([squared(Y, V, a) for _, Y, V in path], dtype=torch.float64)
    values = torch.tensor([f(X) for X, _, _ in path], dtype=torch.float64)
    energy = speeds / 2 + values
    lost = gamma * torch.trapezoid(speeds, dx=time / steps)
    torch.testing.assert_close(energy[0] - energy[-1], lost, rtol=1e-3, atol=0.0)
    assert (energy.diff() < 0).all()
    gaps = energy - f.least
    times = torch.linspace(0, time, len(path), dtype=torch.float64)
    assert (gaps[1:] > gaps[0] * (-2 * gamma * times[1:]).exp()).all()


@pytest.mark.parametrize("options", [
    {"metric": "euclidean"}, {"metric": -1.0},
    {"rotation": "euler"}, {"rotation": "cayley", "metric": "euclidean"}, {"rotation": "expm"},
])  # fmt: skip
def test_functions_of_the_span_do_not_see_the_metric(
    options: dict[str, object], generator: Source
) -> None:
    """Proposition 4: Z stays 0; the variants differ by the map of the normal part alone."""
    f = Weighted(9, 4, generator)
    f.N = torch.eye(4, dtype=generator.dtype)
    start = point(9, 4, generator)
    rule = so.PublishedSGD if "rotation" in options else so.StiefelSGD
    ends = []
    for chosen in (options, {}):
        weight = so.ManifoldParameter(start.clone())
        optimizer = rule([weight], lr=0.02, momentum=0.9, **chosen)
        for _ in range(20):
            weight.grad = f.gradient(weight.detach())
            optimizer.step()
        turn, _ = optimizer.velocity(weight)
        assert float(turn.abs().max()) < 1e-13
        ends.append(weight.detach())
    assert float((ends[0] - start).norm()) > 0.1
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


# ---- the step ------------------------------------------------------------------------------------


def stepped(state: State, G: Tensor, eta: float, mu: float, a: float, **options: object) -> State:
    """One step of the package from a state of the page."""
    X, Z, U = state
    weight = so.ManifoldParameter(X.clone())
    optimizer = so.StiefelSGD([weight], lr=eta, momentum=mu, metric=a, **options)
    optimizer.set_velocity(weight, Z, U)
    weight.grad = G
    optimizer.step()
    Z, U = optimizer.velocity(weight)
    return weight.detach(), Z, U


def carried(X: Tensor, K: Tensor, V: Tensor, w: Tensor) -> Tensor:
    """T w of theorem 5, for a turn K and a move V."""
    identity = torch.eye(V.size(1), dtype=V.dtype)
    R = inverse_root(identity + V.mH @ V)
    along = V.mH @ w
    return w - V @ R @ R @ torch.linalg.inv(identity + R) @ along - X @ rot(K) @ R @ along


@pytest.mark.parametrize("eta", [0.1, 1.0, 2.0])
@pytest.mark.parametrize("a", METRICS)
def test_the_step_is_a_rotation(a: float, eta: float, generator: Source) -> None:
    """Theorem 5."""
    X, Z, U = draw(0.0, generator)
    Z, U, G, mu = Z / 4, U / 4, gaussian(9, 4, generator=generator) / 8, 0.8
    F, g = gradient(X, G, a)
    before = mu * U @ rot((2 * a - 1) * eta * Z) - g
    X1, Z1, U1 = stepped((X, Z, U), G, eta, mu, a)
    identity = torch.eye(4, dtype=generator.dtype)
    torch.testing.assert_close(X1.mH @ X1, identity)
    torch.testing.assert_close(X1.mH @ U1, 0 * identity, rtol=0, atol=1e-13)
    torch.testing.assert_close(Z1, mu * Z - F)
    values = torch.linalg.svdvals(before)
    torch.testing.assert_close(torch.linalg.svdvals(U1), values)
    cosines = torch.linalg.svdvals(X.mH @ X1).flip(0)
    torch.testing.assert_close(cosines, torch.cos(torch.atan(eta * values)))
    torch.testing.assert_close(U1, carried(X, eta * Z1, eta * before, before))
    w, v = (normal(X, gaussian(9, 5, generator=generator)) for _ in range(2))
    Tw, Tv = carried(X, eta * Z1, eta * before, w), carried(X, eta * Z1, eta * before, v)
    torch.testing.assert_close(Tw.mH @ Tv, w.mH @ v)
    torch.testing.assert_close(
        X1.mH @ Tw, torch.zeros(4, 5, dtype=generator.dtype), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("a", METRICS)
def test_momentum_is_bounded(a: float, generator: Source) -> None:
    """Corollary 6, at a learning rate that makes no sense."""
    weight = so.ManifoldParameter(point(9, 4, generator))
    optimizer = so.StiefelSGD([weight], lr=7.0, momentum=0.8, metric=a)
    longest = [0.0, 0.0]
    for _ in range(60):
        weight.grad = gaussian(9, 4, generator=generator)
        parts = gradient(weight.detach(), weight.grad, a)
        longest = [max(most, float(part.norm())) for most, part in zip(longest, parts, strict=True)]
        optimizer.step()
        for momentum, most in zip(optimizer.velocity(weight), longest, strict=True):
            assert float(momentum.norm()) <= most / (1 - 0.8) * (1 + 1e-12)


@pytest.mark.parametrize("mu", [pytest.param(0.5, marks=pytest.mark.slow), 0.9])
def test_where_the_published_transport_blows_up(mu: float, generator: Source) -> None:
    """Proposition 7, with forces just below and just above the limit."""
    s = torch.linspace(0, 3, 300_001, dtype=torch.float64)
    limit = float((s * (1 - mu * (1 + s * s).sqrt())).max())
    if mu == 0.9:
        assert limit == pytest.approx(0.0183, abs=5e-5)
    cases = ((0.98, so.PublishedSGD), (1.05, so.PublishedSGD), (1.05, so.StiefelSGD))
    for factor, rule in cases:
        weight = so.ManifoldParameter(torch.eye(3, 1, dtype=generator.dtype))
        optimizer = rule([weight], lr=1.0, momentum=mu)
        along, longest = normal(weight.detach(), gaussian(3, 1, generator=generator)), 0.0
        along /= along.norm()
        for _ in range(200):
            weight.grad = -factor * limit * along
            optimizer.step()
            _, momentum = optimizer.velocity(weight)
            longest = max(longest, float(momentum.norm()))
            along = momentum / momentum.norm()
            if longest > 1e3:
                break
        if rule is so.StiefelSGD:
            assert longest <= factor * limit / (1 - mu) * (1 + 1e-12)
        else:
            assert longest < 2.0 if factor < 1 else longest > 1e3


@pytest.mark.parametrize("turns", [False, True])
def test_the_published_transport_lengthens(turns: bool, generator: Source) -> None:
    """Before proposition 7; at this metric momentum does not couple to the turn."""
    eta, mu = 0.7, 0.9
    weight = so.ManifoldParameter(draw(0.0, generator)[0])
    turn = turns * gaussian(4, 4, generator=generator)
    U = normal(weight.detach(), gaussian(9, 4, generator=generator))
    optimizer = so.PublishedSGD([weight], lr=eta, momentum=mu, metric=2 / 3)
    optimizer.set_velocity(weight, turn - turn.mH, U)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    sizes = mu * torch.linalg.svdvals(U)
    grown = sizes * (1 + (eta * sizes).square()).sqrt()
    found = torch.linalg.svdvals(optimizer.velocity(weight)[1])
    if turns:
        assert bool((found > grown).all())
    else:
        torch.testing.assert_close(found, grown, rtol=1e-12, atol=0)


# ---- descent and convergence ---------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(9, 4), (5, 4), (4, 4)])
def test_a_step_is_smooth_however_long(
    shape: tuple[int, int], scale: float, generator: Source
) -> None:
    """Lemma 9. The map is written out here: the package shortens what is so long."""
    n, m = shape
    f = Weighted(n, m, generator)
    for a in METRICS:
        X, K, V = draw(0.0, generator, n, m)
        K, V = scale * K, scale * V
        xi = X @ K + V
        R = inverse_root(torch.eye(m, dtype=generator.dtype) + V.mH @ V)
        X1 = (X @ rot(K) + V) @ R
        assert float((X1 - X).norm()) <= float(xi.norm()) * (1 + 1e-12)
        assert nuclear(X1 - X - xi) <= float(inner(xi, xi)) / 2 * (1 + 1e-12)
        F, g = gradient(X, f.gradient(X), a)
        linear = float((1 - a) * inner(F, K) + inner(g, V))
        torch.testing.assert_close(linear, float(inner(f.gradient(X), xi)))
        assert f(X1) <= f(X) + linear + f.smoothness(a) / 2 * squared(K, V, a) + 1e-12
        if scale == 0.1:  # the package's own step is this map
            still = torch.zeros_like(X)
            torch.testing.assert_close(stepped((X, K, V), still, 1.0, 1.0, 0.5)[0], X1)


def test_the_constant_of_a_smooth_step_is_sharp() -> None:
    """Lemma 9 at the Euclidean metric, for a short step away from the minimum."""
    f, s = Signs(2, 1), 0.01
    bound = f.smoothness(0.0) / 2 * s * s
    assert 0.999 * bound <= f(f.almost_least(s)) - f.least <= bound


def descent(
    f: Weighted, X: Tensor, eta: float, mu: float, a: float, transport: str = "isometric"
) -> Iterator[tuple[float, float, float]]:
    """E of theorem 10 before and after each of sixty steps, and the squared gradient before it."""
    weight = so.ManifoldParameter(X.clone())
    optimizer = so.StiefelSGD([weight], lr=eta, momentum=mu, metric=a, transport=transport)
    energy = f(X)
    for _ in range(60):
        weight.grad = f.gradient(weight.detach())
        square = squared(*gradient(weight.detach(), weight.grad, a), a)
        optimizer.step()
        moved = squared(*optimizer.velocity(weight), a) if mu else 0.0
        before, energy = energy, f(weight.detach()) + eta * mu * mu / 2 * moved
        yield before, energy, square


@pytest.mark.parametrize(
    ("a", "mu", "transport"), pairwise(METRICS, [0.0, 0.5, 0.9], ["isometric", "projected"])
)
def test_energy_falls_in_every_step(a: float, mu: float, transport: str, generator: Source) -> None:
    """Theorem 10, at the largest rate that it allows."""
    f = Weighted(9, 4, generator)
    eta = (1 - mu * mu) / f.smoothness(a)
    X = point(9, 4, generator)
    start = f(X)
    squares = []
    for before, after, square in descent(f, X, eta, mu, a, transport):
        squares.append(square)
        assert after <= before - eta / 2 * square + 1e-13
        assert min(squares) <= 2 * (start - f.least) / (eta * len(squares))
    assert after < start - 0.1


@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_the_largest_learning_rate_is_sharp(mu: float) -> None:
    """Theorem 10 fails at 1.05 times it, near the minimum, at the Euclidean metric."""
    f = Signs(2, 1)
    excess = []
    for factor in (1.0, 1.05):
        eta = factor * (1 - mu * mu) / f.smoothness(0.0)
        steps = descent(f, f.almost_least(0.05), eta, mu, 0.0)
        excess.append(max(after - before + eta / 2 * square for before, after, square in steps))
    assert excess[0] <= 1e-13
    assert excess[1] > 1e-5


@pytest.mark.parametrize("mu", [0.0, 0.6])
def test_linear_rate_under_a_gradient_inequality(mu: float, generator: Source) -> None:
    """Linear convergence, with the constant of the inequality as it is along the way."""
    f = Weighted(7, 2, generator)
    L, a = f.smoothness(0.5), 0.5
    eta = 0.5 * (1 - mu * mu) / L
    weight = so.ManifoldParameter(point(7, 2, generator))
    optimizer = so.StiefelSGD([weight], lr=eta, momentum=mu)
    gaps, ratios = [], []
    for _ in range(300):
        X = weight.detach().clone()
        weight.grad = f.gradient(X)
        gaps.append(f(X) - f.least)
        ratios.append(squared(*gradient(X, weight.grad, a), a) / (2 * gaps[-1]))
        optimizer.step()
    nu = min(ratios)
    rho = max(1 - eta * nu, mu * mu / (1 - eta * L))
    assert nu > 1e-3
    assert rho < 1
    for number, gap in enumerate(gaps):
        assert gap <= rho**number * gaps[0] + 1e-12, number


@pytest.mark.parametrize("scale", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("a", METRICS)
def test_the_gradient_changes_slowly_along_the_transport(
    a: float, scale: float, generator: Source
) -> None:
    """Lemma 12, whose bound is loose, and the identities in its proof and in that of theorem 13."""
    f, kappa = Weighted(9, 4, generator), 2 * a - 1
    identity, small = (torch.eye(n, dtype=generator.dtype) for n in (9, 4))
    for _ in range(5):
        X, K, V = draw(0.0, generator)
        K, V = scale * K, scale * V
        X1 = (X @ rot(K) + V) @ inverse_root(small + V.mH @ V)
        F, g = gradient(X, f.gradient(X), a)
        F1, g1 = gradient(X1, f.gradient(X1), a)
        coupling = rot(kappa * K)
        moved = carried(X, K, V, g) @ coupling
        assert squared(F1 - F, g1 - moved, a) <= f.transported(a) ** 2 * squared(K, V, a)
        torch.testing.assert_close(X1.mH @ moved, torch.zeros_like(K), rtol=0, atol=1e-12)
        other = carried(X, K, V, V) @ coupling
        torch.testing.assert_close(inner(moved, other), inner(g, V))
        assert float((small - coupling).norm()) <= abs(kappa) * float(K.norm()) * (1 + 1e-12)
        angles = torch.linalg.svdvals(V).atan()
        spans = X1 @ X1.mH - X @ X.mH
        torch.testing.assert_close(spans.norm(), math.sqrt(2) * angles.sin().norm())
        rotation = carried(X, K, V, identity - X @ X.mH) + X1 @ (X @ rot(K)).mH
        chord = 2 * math.sqrt(2) * (angles / 2).sin().norm()
        torch.testing.assert_close((identity - rotation).norm(), chord)


@pytest.mark.parametrize("a", METRICS)
def test_expected_decrease_with_noise(a: float, generator: Source) -> None:
    """Theorem 13: the decrease in one step, and the bound on a whole run.

    The noise is +e or -e, so that a mean is that of two steps. m_k has not been coupled yet in what
    the package stores, the page's has; the coupling and a tenth of the constants are not seen here.
    """
    f, mu, kappa = Weighted(9, 4, generator), 0.8, 2 * a - 1
    weight = f.smoothness(a) / 2 + mu * f.transported(a) / (1 - mu)
    eta = (1 - mu) / (2 * weight)

    def lookahead(state: State) -> float:
        X, Z, U = state
        F, g = gradient(X, f.gradient(X), a)
        product = (1 - a) * inner(F, Z) + inner(g, U @ rot(kappa * eta * Z))
        return f(X) + eta * mu / (1 - mu) * float(product)

    state = draw(0.0, generator)
    total, squares, noise, steps = f(state[0]), [], 0.0, 40
    state = (state[0], 0 * state[1], 0 * state[2])
    for _ in range(steps):
        X, G = state[0], f.gradient(state[0])
        e = 3 * gaussian(9, 4, generator=generator)
        branches = [stepped(state, G + sign * e, eta, mu, a) for sign in (1, -1)]
        mean = sum(lookahead(branch) for branch in branches) / 2
        moved = sum(squared(*branch[1:], a) for branch in branches) / 2
        slope = squared(*gradient(X, G, a), a)
        bound = lookahead(state) - eta / (1 - mu) * slope + eta**2 * weight * moved
        assert mean <= bound + 1e-12
        squares.append(slope)
        noise = max(noise, squared(*gradient(X, e, a), a))
        assert moved <= mu * squared(*state[1:], a) + slope / (1 - mu) + noise + 1e-9
        state = branches[0]
    B = math.sqrt(max(squares))
    c = mu * B / (1 - mu) * math.sqrt(B * B / (1 - mu) ** 2 + noise / (1 - mu))
    bound = 2 * (1 - mu) * (total - f.least + eta * c) / (eta * steps) + 2 * eta * weight * noise
    assert sum(squares) / steps <= bound


# ---- six products --------------------------------------------------------------------------------


@pytest.mark.parametrize("a", METRICS)
def test_six_products(a: float, generator: Source) -> None:
    """Theorem 14: the step of the package and that of the page, by the formulas that defer U."""
    X, Z, U = draw(0.0, generator)
    Z, U, mu, eta = Z / 4, U / 4, 0.9, 0.3
    state = (X, Z, U)
    identity = torch.eye(4, dtype=generator.dtype)
    B, L, N = U, identity, 0 * identity
    for _ in range(20):
        G = gaussian(9, 4, generator=generator) / 4
        state = stepped(state, G, eta, mu, a)
        S = X.mH @ G  # 1
        coupling = rot((2 * a - 1) * eta * Z)
        B = B @ (mu * L @ coupling) + X @ (S - mu * N @ coupling) - G  # 2, 3
        W = B.mH @ B  # 4
        Z = mu * Z - skew(S) / (1 - a)
        R = inverse_root(identity + eta**2 * W)
        X = X @ (rot(eta * Z) @ R) + B @ (eta * R)  # 5, 6
        L, N = torch.linalg.inv(R), eta * W
        torch.testing.assert_close(state, (X, Z, B @ L - X @ N), rtol=0, atol=1e-12)


def counted(optimizer: Any, weight: Tensor, slope: Callable[[Tensor], Tensor]) -> list[float]:
    """The tall products of the last 17 of 60 steps. Every eighth step corrects rounding."""
    counts, (n, m) = [], weight.shape
    for _ in range(60):
        weight.grad = slope(weight.detach())
        with Calls() as calls:
            optimizer.step()
        tall = [(x, y) for x, y in calls.products if n in {*x[-2:], y[-1]}]
        counts.append(sum(math.prod(x) * y[-1] for x, y in tall) / (n * m * m))
    return counts[-17:]


@pytest.mark.parametrize(("rule", "options", "products"), [
    (so.StiefelSGD, {}, 6), (so.StiefelSGD, {"nesterov": True}, 7),
    (so.StiefelSGD, {"metric": "euclidean"}, 6), (so.StiefelSGD, {"metric": -1.0}, 6),
    (so.StiefelSGD, {"transport": "projected"}, 5),
    (so.AdaptiveSGD, {"transport": "projected"}, 8),
    (so.StiefelSGD, {"transport": "projected", "nesterov": True}, 8),
    (so.StiefelAdam, {}, 9), (so.StiefelAdam, {"radius": 1.0, "nesterov": False}, 9),
    # A coupling costs one more, but in the default step.
    (so.StiefelSGD, {"metric": "euclidean", "nesterov": True}, 8),
    (so.StiefelSGD, {"metric": "euclidean", "transport": "projected"}, 6),
    (so.StiefelAdam, {"metric": "euclidean"}, 10),
])  # fmt: skip
def test_products_are_counted(
    rule: Any, options: dict[str, Any], products: int, generator: Source
) -> None:
    """Of theorem 14 and its variants."""
    n, m = 90, 3
    weight = so.ManifoldParameter(point(n, m, generator))
    optimizer = rule([weight], lr=1e-3, **options)
    counts = counted(optimizer, weight, lambda X: gaussian(*X.shape, generator=generator) / n)
    assert counts.count(products) in {14, 15}
    assert max(counts) <= products + 4


@pytest.mark.parametrize(("rule", "options", "products"), [
    (so.AdaptiveSGD, {"lr": 0.2, "transport": "projected"}, 12),
    (so.StiefelSGD, {"lr": 0.1, "transport": "projected"}, 8),
    (so.StiefelSGD, {"lr": 0.1}, 9), (so.StiefelSGD, {"lr": 0.1, "nesterov": True}, 11),
])  # fmt: skip
def test_steep_slopes_cost_three_or_four_more(
    rule: Any, options: dict[str, Any], products: int, generator: Source
) -> None:
    """Leading eigenvalues, at the learning rates of the page on choosing: each step corrects."""
    matrix = gaussian(90, 90, generator=generator)
    matrix = (matrix + matrix.mH) / (2 * math.sqrt(90))
    weight = so.ManifoldParameter(point(90, 3, generator))
    counts = counted(rule([weight], **options), weight, lambda X: -2 * matrix @ X)
    assert sorted(counts)[8] == products


# ---- spectral steepest descent -------------------------------------------------------------------

SHAPES = ((12, 4), (9, 4), (6, 4), (5, 4), (4, 4), (5, 5), (7, 1))


def closed_form(X: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W, P and D = P X of theorem 15."""
    W = (M @ X.mH - X @ M.mH) / 2
    left, values, right = torch.linalg.svd(W)
    kept = values > 1e-10 * values[0]
    P = left[:, kept] @ right[kept]
    return W, P, P @ X


def dual_bound(X: Tensor, M: Tensor) -> float:
    """The least |M - X L|_* over symmetric L, from above, by quasi-Newton steps on a smooth one."""
    multiplier = torch.zeros(X.size(1), X.size(1), dtype=X.dtype, requires_grad=True)
    best = math.inf
    for smoothing in (1e-2, 1e-4, 1e-6):
        search = torch.optim.LBFGS(
            [multiplier], max_iter=300, line_search_fn="strong_wolfe", tolerance_change=1e-14
        )

        def residual() -> Tensor:
            return M - X @ (multiplier + multiplier.mH) / 2

        def closure() -> Tensor:
            search.zero_grad()  # noqa: B023
            identity = torch.eye(X.size(1), dtype=X.dtype)
            square = residual().mH @ residual() + smoothing**2 * identity  # noqa: B023
            loss = torch.linalg.eigvalsh(square).sqrt().sum()
            loss.backward()
            return loss

        search.step(closure)
        best = min(best, nuclear(residual().detach()))
    return best


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tangent_contraction_extends_to_a_skew_one(
    shape: tuple[int, int], generator: Source
) -> None:
    """Lemma 16, by its formula; also for a D that is as long as it may be in one direction."""
    n, m = shape
    X = point(n, m, generator)
    complement = torch.linalg.qr(X, mode="complete").Q[:, m:]
    D = X @ skew(gaussian(m, m, generator=generator)) + normal(
        X, gaussian(n, m, generator=generator)
    )
    D = D / (1.000001 * torch.linalg.matrix_norm(D, 2))
    A, H = X.mH @ D, complement.mH @ D
    Delta = torch.linalg.inv(inverse_root(torch.eye(m, dtype=generator.dtype) + A @ A))
    Gamma = torch.linalg.solve(Delta, H.mH).mH
    frame = torch.cat([X, complement], dim=1)
    upper = torch.cat([A, -Delta @ Gamma.mH], dim=1)
    Omega = torch.cat([upper, torch.cat([Gamma @ Delta, -Gamma @ A @ Gamma.mH], dim=1)])
    Omega = frame @ Omega @ frame.mH
    torch.testing.assert_close(Omega, -Omega.mH, rtol=0, atol=1e-9)
    torch.testing.assert_close(Omega @ X, D, rtol=0, atol=1e-9)
    assert float(torch.linalg.matrix_norm(Omega, 2)) <= 1 + 1e-9


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_closed_form_is_optimal(shape: tuple[int, int], generator: Source) -> None:
    """Theorem 15: D is feasible and has the value |W|_*, which is that of the dual problem, too."""
    n, m = shape
    X, M = point(n, m, generator), gaussian(n, m, generator=generator)
    W, _, D = closed_form(X, M)
    torch.testing.assert_close(X.mH @ D, -(X.mH @ D).mH, rtol=0, atol=1e-12)
    assert float(torch.linalg.matrix_norm(D, 2)) <= 1 + 1e-12
    assert float(inner(M, D)) == pytest.approx(nuclear(W), rel=1e-12)
    assert dual_bound(X, M) == pytest.approx(nuclear(W), rel=1e-5)
    found = spectral_direction(X[None], M[None])[0]
    assert float(inner(M, found)) == pytest.approx(nuclear(W), rel=1e-4)


@pytest.mark.parametrize(("shape", "rank", "turns"), [
    ((12, 4), 4, True), ((12, 4), 3, False), ((12, 4), 2, True), ((12, 4), 1, False),
    ((6, 4), 2, True), ((5, 4), 1, False), ((7, 5), 2, False), ((8, 5), 3, True), ((4, 4), 0, True),
    ((5, 5), 0, False),
])  # fmt: skip
def test_which_directions_do_not_turn_fully(
    shape: tuple[int, int], rank: int, *, turns: bool, generator: Source
) -> None:
    """Proposition 18, and the other maximisers of theorem 17.

    General complex matrices turn fully, also where real ones cannot. Real ones in a complex space
    do as before, but a kernel of dimension 1 moves there.
    """
    n, m = shape
    field, cases = generator.dtype, {torch.float64: turns}
    if field.is_complex:
        cases[field] = True
    for drawn, turned in cases.items():
        generator.dtype = drawn
        X = point(n, m, generator).to(field)
        within = gaussian(m, m, generator=generator).to(field)
        column, row = gaussian(n, rank, generator=generator), gaussian(rank, m, generator=generator)
        M = X @ within + normal(X, (column @ row).to(field))
        generator.dtype = field
        check_turns(X, M, turned, generator)


def check_turns(X: Tensor, M: Tensor, turns: bool, generator: Source) -> None:
    n, m = X.shape
    W, P, D = closed_form(X, M)
    values = torch.linalg.svdvals(D)
    assert (float(values[-1]) > 1 - 1e-9) == turns
    _, sizes, basis = torch.linalg.svd(normal(X, M))
    kernel = basis[int((sizes > 1e-10).sum()) :].mH
    compressed = kernel.mH @ skew(X.mH @ M) @ kernel
    singular = bool(len(compressed)) and float(torch.linalg.svdvals(compressed)[-1]) < 1e-9
    assert singular != turns
    eta = 0.3
    identity = torch.eye(n, dtype=X.dtype)
    moved = (X - eta * D) @ inverse_root(identity[:m, :m] + eta**2 * D.mH @ D)
    v = gaussian(m, generator=generator)
    cosine = float(inner(X @ v, moved @ v) / inner(v, v))
    assert (abs(math.acos(cosine) - math.atan(eta)) < 1e-9) == turns
    missing = identity - P.mH @ P
    other = missing @ skew(gaussian(n, n, generator=generator)) @ missing
    size = float(torch.linalg.matrix_norm(other, 2))
    least = 0.5 if X.is_complex() else 1.5  # of the dimension of the kernel of W that moves
    assert (size < 1e-9) == (float(missing.diagonal().real.sum()) < least)
    if size > 1e-9:
        changed = D + other @ X / size
        assert float(torch.linalg.matrix_norm(changed, 2)) <= 1 + 1e-9
        assert float(inner(M, changed)) == pytest.approx(nuclear(W), rel=1e-9)
        assert (float((changed - D).norm()) > 1e-6) == (not turns)


def test_the_direction_jumps_where_it_is_not_unique(generator: Source) -> None:
    """Why smoothing: v is in the kernel of M = EC, and y is normal to X and E."""
    basis = point(9, 8, generator)
    X, E, y = basis[:, :4], basis[:, 4:7], basis[:, 7:]
    C = gaussian(3, 4, generator=generator)
    v = torch.linalg.svd(C).Vh[3:].mH
    for tiny in (1e-5, -1e-5):
        turned = closed_form(X, E @ C + tiny * y @ v.mH)[2] @ v
        torch.testing.assert_close(turned, math.copysign(1.0, tiny) * y, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("delta", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_smoothing_costs(shape: tuple[int, int], delta: float, generator: Source) -> None:
    """Theorem 19, for a general M, one whose normal part has rank 1, and the one that is worst."""
    n, m = shape
    s = torch.linspace(1e-3, 10, 100_000, dtype=torch.float64)
    loss, place = ((1 - (1 + s * s).rsqrt()) / s).max(0)
    assert float(loss) == pytest.approx(ALPHA, abs=1e-7)
    X = point(n, m, generator)
    column, row = gaussian(n, 1, generator=generator), gaussian(1, m, generator=generator)
    thin = X @ skew(gaussian(m, m, generator=generator)) + normal(X, column @ row)
    cases = [gaussian(n, m, generator=generator), thin]
    if n >= 2 * m:  # the worst one
        outside = torch.linalg.qr(normal(X, gaussian(n, m, generator=generator))).Q
        cases.append(outside * delta / s[place])
    for number, M in enumerate(cases):
        padded = torch.cat([X, torch.zeros(m, m, dtype=generator.dtype)])
        below = delta * torch.eye(m, dtype=generator.dtype)
        _, _, D = closed_form(padded, torch.cat([M, below]))
        torch.testing.assert_close(D.mH @ D, torch.eye(m, dtype=generator.dtype))
        D = D[:n]
        torch.testing.assert_close(X.mH @ D, -(X.mH @ D).mH, rtol=0, atol=1e-11)
        best = nuclear(closed_form(X, M)[0])
        value = float(inner(M, D))
        least = best - ALPHA * m * delta
        assert least - 1e-9 <= value <= best + 1e-9
        if number == 2:
            assert value == pytest.approx(least, abs=1e-7 * m * delta)


@pytest.mark.parametrize("eta", [0.01, 0.3])
def test_spectral_steps_descend(eta: float, generator: Source) -> None:
    """Corollary 20."""
    f = Weighted(9, 4, generator)
    X = point(9, 4, generator)
    start, values = f(X), []
    for number in range(1, 40):
        W, _, D = closed_form(X, f.gradient(X))
        root = inverse_root(torch.eye(4, dtype=generator.dtype) + eta**2 * D.mH @ D)
        after = (X - eta * D) @ root
        bound = eta**2 * 4 * f.slope
        assert f(after) <= f(X) - eta * nuclear(W) + bound + 1e-12
        values.append(nuclear(W))
        assert min(values) <= (start - f.least) / (eta * number) + bound / eta
        X = after
    stationary = torch.linalg.eigh(f.A).eigenvectors[:, :4]
    assert nuclear(closed_form(stationary, f.gradient(stationary))[0]) < 1e-12


def test_the_bound_on_spectral_steps_is_sharp() -> None:
    """Corollary 20, for a short step from almost the minimum."""
    f, eta = Signs(4, 2), 0.01
    X = f.almost_least(1e-6)
    W, _, D = closed_form(X, f.gradient(X))
    root = inverse_root(torch.eye(2, dtype=torch.float64) + eta**2 * D.mH @ D)
    bound = eta**2 * 2 * f.slope
    assert 0.99 * bound <= f((X - eta * D) @ root) - f(X) + eta * nuclear(W) <= bound
