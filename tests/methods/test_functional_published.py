"""The published flows against the paper's lines in float64, and on the manifold until overflow."""

from __future__ import annotations

import pytest
import torch
from cases import in_turn, mixed, pairwise
from rule_cases import ADAM, AMSGRAD, MOMENTUM, NORMAL, SKEW, SQUARES, state_at
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stiefel_opt.methods import published_adam, published_sgd
from stiefel_opt.methods.published import polar_factor_by_sums
from stiefel_opt.numerics.geometry import gram_error, orthonormality_tolerance, random_point

MAPS = {
    "euler": lambda step: torch.eye(step.size(0), dtype=step.dtype) + step,
    "cayley": lambda step: torch.linalg.solve(MAPS["euler"](-step / 2), MAPS["euler"](step / 2)),
    # a batch, as torch 2.13 stops the series of a single matrix at an error near 1e-11
    "expm": lambda step: torch.matrix_exp(step.expand(2, -1, -1))[0],
}
CASES = [  # shape, dtype, rotation, a, momentum
    ((9, 4), torch.float64, "euler", 0.5, 0.9),
    ((9, 4), torch.float64, "euler", 0.0, 0.0),
    ((6, 5), torch.float64, "cayley", -1.0, 0.5),
    ((9, 4), torch.complex128, "expm", 0.3, 0.9),
    ((7, 1), torch.complex128, "euler", 0.8, 0.9),
    ((5, 5), torch.float64, "euler", 0.5, 0.9),
    ((4, 4), torch.complex128, "expm", 0.0, 0.9),
]


def polar(tall: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(tall.mH @ tall)
    return tall @ (vectors / values.sqrt()) @ vectors.mH


def forces(X, G, a):
    b = a / (a - 1)
    return (1 - b) / 2 * (X.mH @ G - G.mH @ X), G - X @ (X.mH @ G)


def algorithm_1(X, G, Z, U, eta, mu, a, rotation, kind=""):
    f, g = forces(X, G, a)
    sign, before = -1 if kind == "printed" else 1, Z
    coupled = sign * (3 * a - 2) / 2 * eta * U @ Z if mu else 0.0
    U = mu * U + coupled - g
    Z = mu * Z - f
    V, Y = (mu * U - g, mu * Z - f) if kind == "nesterov" else (U, Z)
    if kind == "printed" and X.size(0) > X.size(1):  # Algorithm 4 has the new one
        Y = before
    half = X @ MAPS[rotation](eta * Y)
    dagger = half + eta * V @ half.mH @ half
    return polar(dagger), Z, U - eta * half @ (V.mH @ U)


def algorithm_2(X, G, Z, U, p, q, eta, t, a, rotation, largest, printed):
    (b1, b2), eps = (0.9, 0.999), 1e-8
    f, g = forces(X, G, a)
    p, q = b2 * p + (1 - b2) * f.abs() ** 2, b2 * q + (1 - b2) * g.abs() ** 2
    largest[:] = [torch.maximum(p, largest[0]), torch.maximum(q, largest[1])]
    U = b1 * U + (3 * a - 2) / (-2 if printed else 2) * eta * U @ Z - (1 - b1) * g
    Z = b1 * Z - (1 - b1) * f
    c1, c2, factor = 1 - b1**t, 1 - b2**t, 1.0
    if printed:
        c1, c2, factor = 1.0, 1.0, c2**0.5
    half = X @ MAPS[rotation](eta * factor * Z / c1 / ((largest[0] / c2).sqrt() + eps))
    V = factor * U / c1 / ((largest[1] / c2).sqrt() + eps)
    V = V - half @ torch.linalg.solve(half.mH @ half, half.mH @ V)
    dagger = half + eta * V @ half.mH @ half
    return polar(dagger), Z, U - eta * half @ (V.mH @ U), p, q


def start(shape, dtype, generator, keeps=MOMENTUM, k=3):
    """A point and the state before the first step."""
    point = random_point(k, *shape, generator=generator, dtype=dtype)
    return point, state_at(point, keeps, generator, zero=True)


def gradient(point, generator, scale=1.0):
    return scale * torch.randn(point.shape, dtype=point.dtype, generator=generator)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["", "nesterov", "printed"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sgd_is_algorithm_1_line_by_line(case, kind, generator):
    shape, dtype, rotation, a, momentum = case
    point, state = start(shape, dtype, generator)
    loops = [(x, torch.zeros_like(state[SKEW][0]), torch.zeros_like(x)) for x in point]
    lr = torch.tensor([0.01, 0.02, 0.03], dtype=torch.float64)[:, None, None]
    for _ in range(12):
        grad = gradient(point, generator)
        for i, (x, z, u) in enumerate(loops):
            eta = float(lr[i])
            loops[i] = algorithm_1(x, grad[i], z, u, eta, momentum, a, rotation, kind)
        options = {"momentum": momentum, "metric": a, "rotation": rotation}
        options |= {kind: True} if kind else {}
        point, state, _ = published_sgd(point, grad, state, lr=lr, **options)
    close(point, torch.stack([x for x, _, _ in loops]))
    close(state[SKEW], torch.stack([z for _, z, _ in loops]))
    if NORMAL in state:
        close(state[NORMAL], torch.stack([u for _, _, u in loops]))


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize(("case", "amsgrad"), in_turn([*CASES, CASES[0]], [True, False]), ids=str)
def test_adam_is_algorithm_2_line_by_line(case, amsgrad, printed, generator):
    shape, dtype, rotation, a, _ = case
    point, state = start(shape, dtype, generator, AMSGRAD if amsgrad else ADAM, k=1)
    x, z = point[0], torch.zeros_like(state[SKEW][0])
    u, p, q = torch.zeros_like(x), torch.zeros_like(z.real), torch.zeros_like(x.real)
    running = [p.clone(), q.clone()]
    for t in range(1, 9):
        grad = gradient(point, generator, 3.0 / t)
        if not amsgrad:
            running = [torch.zeros_like(p), torch.zeros_like(q)]
        x, z, u, p, q = algorithm_2(x, grad[0], z, u, p, q, 0.01, t, a, rotation, running, printed)
        step = t if t % 2 else torch.full((1, 1, 1), float(t))
        options = {"lr": 0.01, "step": step, "metric": a, "rotation": rotation, "printed": printed}
        point, state, _ = published_adam(point, grad, state, **options)
    close(point[0], x)
    expected = dict(zip((SKEW, NORMAL, *SQUARES), (z, u, p, q), strict=True))
    if amsgrad:
        expected |= dict(zip(AMSGRAD[-2:], running, strict=True))
    for name, tensor in state.items():
        close(tensor[0], expected[name])


WILD = [(0.15, 0.3), (0.1, 1.0), (1e6, 1.0), (0.1, 1e8), (1e12, 1e-3)]


RULES = [
    (published_sgd, (9, 4), {"rotation": "euler"}),
    (published_sgd, (6, 5), {"rotation": "cayley"}),
    (published_sgd, (5, 5), {"rotation": "euler"}),
    (published_sgd, (9, 4), {"rotation": "expm", "nesterov": True}),
    (published_adam, (9, 4), {"rotation": "euler"}),
    (published_adam, (6, 5), {"rotation": "expm"}),
]


@pytest.mark.parametrize(
    ("rule", "wild", "dtype"),
    mixed(18, RULES, WILD, [torch.float32, torch.float64, torch.complex64]),
)
def test_stays_on_the_manifold_until_it_overflows(rule, wild, dtype, generator):
    (rule, shape, options), (lr, scale) = rule, wild
    adaptive = rule is published_adam
    point, state = start(shape, dtype, generator, ADAM if adaptive else MOMENTUM, k=2)
    for step in range(1, 31):
        grad = gradient(point, generator, scale)
        if step % 3 == 0:  # of rank one
            grad = grad[..., :1].expand(grad.shape)
        counted = {"step": step} if adaptive else {}
        point, state, _ = rule(point, grad, state, lr=lr, **options, **counted)
        if not point.isfinite().all():
            assert step > (1 if dtype != torch.float64 else 3)
            break
        assert gram_error(point).max() <= orthonormality_tolerance(point.real.dtype, shape[0])
        assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.parametrize(
    ("rule", "shape", "huge"),
    [
        (published_sgd, (9, 4), 1e200),
        (published_sgd, (5, 5), float("inf")),  # 1e200 overflows nothing: nothing is squared
        (published_adam, (9, 4), float("nan")),
        (published_adam, (5, 5), 1e200),
    ],
)
def test_only_the_matrix_that_overflows_is_not_finite(rule, shape, huge, generator):
    is_adam = rule is published_adam
    point, state = start(shape, torch.float64, generator, ADAM if is_adam else MOMENTUM)
    grad = gradient(point, generator)
    options = {"lr": 0.1, **({"step": 1} if is_adam else {})}
    calm, *_ = rule(point, grad, state, **options)
    grad[1] *= huge
    found, *_ = rule(point, grad, state, **options)
    assert found.isfinite().all(dim=-1).all(dim=-1).tolist() == [True, False, True]
    torch.testing.assert_close(found[::2], calm[::2], rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("dtype", "shape", "digits"),
    pairwise(
        [torch.float32, torch.float64, torch.complex128],
        [(2, 9, 4), (2, 200, 60), (20, 20, 20), (4, 9, 4)],  # k = m: not a batch of vectors
        [0, 3, 12],
    ),
)
def test_polar_factor_by_sums(dtype, shape, digits, generator):
    """Orthonormal to rounding, and off by the condition times rounding, as an SVD's is."""
    k, n, m = shape
    eps = torch.finfo(dtype).eps
    condition = min(10.0**digits, 1e-3 / eps)
    wide = torch.promote_types(dtype, torch.float64)
    left = random_point(k, n, m, generator=generator, dtype=wide)
    right = random_point(k, m, m, generator=generator, dtype=wide)
    values = condition ** torch.linspace(0, 1, m, dtype=torch.float64)
    tall = (left * values) @ right.mH
    point = polar_factor_by_sums(tall.to(dtype))
    assert gram_error(point).max() <= orthonormality_tolerance(point.real.dtype, n)
    assert (point - left @ right.mH).abs().max() <= 10 * eps * condition


@pytest.mark.parametrize("rotation", ["euler", "cayley"])
def test_nothing_is_read(rotation):
    with FakeTensorMode():
        point, skew = torch.empty(2, 9, 4), torch.empty(2, 4, 4)
        state = {SKEW: skew, NORMAL: point.clone()}
        state |= {SQUARES[0]: skew.clone(), SQUARES[1]: point.clone()}
        options = {"lr": 0.1, "rotation": rotation}
        published_sgd(point, point, state, **options)
        found, *_ = published_adam(point, point, state, step=1, **options)
        assert found.shape == point.shape


def test_zero_steps_and_zero_eps_stay(generator):
    point, state = start((9, 4), torch.float32, generator, ADAM)
    grad = torch.zeros_like(point)
    found, *_ = published_adam(point, grad, state, lr=0.1, step=1, eps=0.0)
    torch.testing.assert_close(found, point, rtol=0, atol=1e-6)
    found, *_ = published_sgd(point, gradient(point, generator), state, lr=0.0)
    torch.testing.assert_close(found, point, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"rotation": "polar"}, {"metric": "flat"}])
def test_unknown_choices_are_refused(wrong, generator):
    point, state = start((9, 4), torch.float64, generator)
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be one of"):
        published_sgd(point, point, state, lr=0.1, **wrong)
