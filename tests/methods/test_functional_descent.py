"""The rules of gradient descent, Cayley SGD and Adam against dense loops and their own laws."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import in_turn, mixed
from reference import canonical_geodesic, euclidean_geodesic, orthonormality_error, polar_factor
from reference_descent import (
    CayleyAdamReference,
    CayleySGDReference,
    DescentReference,
    dense_cayley,
    low_rank_cayley,
    positive_qr,
    retract,
)
from rule_cases import MOMENTUM, NORMAL, RuleCase, tensors
from torch import Tensor

import stiefel_opt as so
from stiefel_opt.functional.flows import corrected
from stiefel_opt.methods import cayley_adam, cayley_sgd, rgd
from stiefel_opt.methods.descent import RETRACTIONS
from stiefel_opt.methods.retractions import cholesky_factor
from stiefel_opt.numerics.geometry import random_point
from stiefel_opt.numerics.linalg import LOCAL_SUMS

SHAPES = [(9, 4), (5, 4), (7, 1), (4, 4), (1, 1), (12, 6), (6, 5)]
LARGE = (200, 20)
TOLERANCE = 1e-12

every_shape = pytest.mark.parametrize("shape", SHAPES)


def start(rng: np.random.Generator, n: int, m: int) -> np.ndarray:
    return polar_factor(rng.standard_normal((n, m)))


def tangent(rng: np.random.Generator, point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T, skew, and V, normal to the point."""
    n, m = point.shape
    skew, normal = rng.standard_normal((m, m)), rng.standard_normal((n, m)) / np.sqrt(n)
    return (skew - skew.T) / np.sqrt(4 * m), normal - point @ (point.T @ normal)


def batched(*arrays: np.ndarray) -> list[Tensor]:
    return [torch.tensor(array).unsqueeze(0) for array in arrays]


def along(point: np.ndarray, skew: np.ndarray, normal: np.ndarray, retraction: str) -> np.ndarray:
    """R_X(XT + V), as the step of a momentum without force."""
    X, T, V = batched(point, skew, normal)
    state = {"momentum_skew": T}
    if point.shape[0] > point.shape[1]:
        state[NORMAL] = V
    moved, *_ = rgd(X, X * 0, state, lr=1.0, momentum=1.0, retraction=retraction)
    return moved[0].numpy()


# ---- retractions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "retraction", "length"), mixed(9, SHAPES, RETRACTIONS, [0.3, 3.0])
)
def test_retractions_are_those_of_the_dense_formulas(shape, retraction, length, rng):
    X = start(rng, *shape)
    T, V = tangent(rng, X)
    expected = retract(X, length * (X @ T + V), retraction)
    found = along(X, length * T, length * V, retraction)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@every_shape
def test_systems_of_m_2m_3m_and_n_give_one_cayley_map(shape, rng):
    """The one of m x m that is solved, and those of Lemma 1 for both metrics."""
    X, G = start(rng, *shape), rng.standard_normal(shape) / 3
    E = G.T @ X - X.T @ G
    canonical = low_rank_cayley(np.hstack([G, X]), np.hstack([X, -G]), X)
    np.testing.assert_allclose(
        canonical, dense_cayley(X @ G.T - G @ X.T, X), rtol=0, atol=TOLERANCE
    )
    P = G - X @ (X.T @ G) / 2
    twice = low_rank_cayley(np.hstack([P, X]), np.hstack([X, -P]), X)
    thrice = low_rank_cayley(np.hstack([G, X, X @ E / 2]), np.hstack([X, -G, X]), X)
    np.testing.assert_allclose(thrice, twice, rtol=0, atol=TOLERANCE)
    for metric, expected in [("canonical", canonical), ("euclidean", twice)]:
        point, grad = batched(X, G)
        found = rgd(point, grad, {}, lr=1.0, metric=metric)[0][0].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_cholesky_qr_has_a_positive_diagonal_and_a_second_pass_takes_the_rest(condition, generator):
    left = torch.linalg.qr(torch.randn(2, 30, 6, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)).Q
    matrix = left * torch.logspace(0, -np.log10(condition), 6, dtype=torch.float64) @ right.mT
    first = matrix @ cholesky_factor(matrix.mT @ matrix)
    second = first @ cholesky_factor(first.mT @ first)
    for index in range(2):
        expected = positive_qr(matrix[index].numpy())
        np.testing.assert_allclose(second[index].numpy(), expected, rtol=0, atol=1e-10)
    eps = torch.finfo(torch.float64).eps
    assert orthonormality_error(first[0].numpy()) < 100 * eps * condition**2
    assert orthonormality_error(second[0].numpy()) < 10 * eps


def slope(times: np.ndarray, errors: list[float]) -> float:
    return float(np.polyfit(np.log(times), np.log(errors), 1)[0])


TIMES = np.array([0.04, 0.02, 0.01, 0.005])


@pytest.mark.parametrize(
    ("shape", "retraction"), in_turn([(9, 4), (4, 4), (7, 1), (6, 5)], RETRACTIONS)
)
def test_a_retraction_is_right_to_first_order(shape, retraction, rng):
    X = start(rng, *shape)
    T, V = tangent(rng, X)
    errors = [
        np.linalg.norm(along(X, t * T, t * V, retraction) - X - t * (X @ T + V)) for t in TIMES
    ]
    assert slope(TIMES, errors) >= 1.9


@pytest.mark.parametrize(
    ("shape", "retraction", "geodesic"),
    [
        ((9, 4), "polar", euclidean_geodesic),
        ((4, 4), "polar", euclidean_geodesic),
        ((7, 1), "cayley", canonical_geodesic),
        ((12, 6), "cayley", canonical_geodesic),
    ],
)
def test_polar_and_cayley_are_right_to_second_order(shape, retraction, geodesic, rng):
    X = start(rng, *shape)
    T, V = tangent(rng, X)
    if shape[0] == shape[1] and retraction == "cayley":
        V = V * 0  # Q of its normal part would not exist
    errors = [
        np.linalg.norm(along(X, t * T, t * V, retraction) - geodesic(X, T, V, t)) for t in TIMES
    ]
    assert slope(TIMES, errors) >= 2.8


# ---- whole steps against the loops ---------------------------------------------------------------

KINDS = [(9, 4), (4, 4), (7, 1), (6, 5)]
METRICS = ("canonical", "euclidean", -1.0, 0.3)
MOMENTA = ({}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True})
SQUARED = (*MOMENTUM, "exp_avg_sq_norm")
CAYLEY_RULES: list[tuple[Any, Any, dict[str, Any]]] = [
    *((cayley_sgd, CayleySGDReference, {"steps": steps}) for steps in (0, 1, 2, 5)),
    *((cayley_adam, CayleyAdamReference, {"steps": steps}) for steps in (0, 1, 2, 5)),
    (cayley_sgd, CayleySGDReference, {"exact": True}),
    (cayley_sgd, CayleySGDReference, {"momentum": 0.8, "nesterov": True}),
    (cayley_sgd, CayleySGDReference, {"momentum": 0.0}),
    (cayley_adam, CayleyAdamReference, {"exact": True}),
    (cayley_adam, CayleyAdamReference, {"betas": (0.0, 0.5), "eps": 0.1}),
]
RULES = [
    (shape, rgd, DescentReference, {"retraction": retraction, "metric": metric, **momentum})
    for shape, retraction, metric, momentum in mixed(12, KINDS, RETRACTIONS, METRICS, MOMENTA)
] + [(shape, *rule) for rule, shape in in_turn(CAYLEY_RULES, KINDS)]


class Force:
    """Noisy gradients of -tr(X'AX)/2 + <C, X>; the quadratic part keeps two runs together."""

    def __init__(self, rng: np.random.Generator, k: int, n: int, m: int, length: int) -> None:
        factors = rng.standard_normal((k, n, n)) / np.sqrt(n)
        self.cost = factors @ factors.swapaxes(-1, -2) / 2
        self.linear = 0.3 * rng.standard_normal((k, n, m))
        self.noise = 0.2 * rng.standard_normal((length, k, n, m))

    def __call__(self, points: np.ndarray, step: int) -> np.ndarray:
        return self.linear - self.cost @ points + self.noise[step]


@pytest.mark.parametrize(("shape", "rule", "reference", "options"), RULES)
def test_every_rule_follows_its_dense_loop(shape, rule, reference, options, rng):
    k, (n, m), lr, length = 2, shape, 0.1, 25
    force = Force(rng, k, n, m, length)
    start_points = np.stack([start(rng, n, m) for _ in range(k)])
    loops = [reference(point, lr=lr, **options) for point in start_points]
    point = torch.tensor(start_points)
    keeps = SQUARED if rule is cayley_adam else MOMENTUM
    has_momentum = rule is not rgd or "momentum" in options
    case = RuleCase(rule, {"lr": lr, **options}, keeps if has_momentum else ())
    state = case.state(point, torch.Generator(), zero=True)
    for step in range(length):
        grads = torch.tensor(force(point.numpy(), step))
        number = {"step": step + 1.0} if rule is cayley_adam else {}
        if step % 8 == 7:
            point, fixed = corrected(point, state, LOCAL_SUMS, normal=(NORMAL,))
            state |= fixed
        point, new, _ = case(point, grads, state, **number)
        state |= new
        expected = force(np.stack([loop.X for loop in loops]), step)
        for loop, grad in zip(loops, expected, strict=True):
            loop.step(grad)
    for index, loop in enumerate(loops):
        np.testing.assert_allclose(point[index].numpy(), loop.X, rtol=0, atol=TOLERANCE)
        assert orthonormality_error(point[index].numpy()) < 1e-13
        for name, expected in (("momentum_skew", loop.Z), (NORMAL, loop.U)):
            if name in state:
                found = state[name][index].numpy()
                np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


ALL = {
    **{
        f"descent-{name}": RuleCase(rgd, {"retraction": name, "momentum": 0.9}, MOMENTUM)
        for name in RETRACTIONS
    },
    "cayley-sgd": RuleCase(cayley_sgd, {}, MOMENTUM),
    "cayley-sgd-exact": RuleCase(cayley_sgd, {"exact": True}, MOMENTUM),
}


# ---- long steps ----------------------------------------------------------------------------------


OPTIMIZERS = {
    **{f"descent-{name}": partial(so.ProjectedRGD, retraction=name) for name in RETRACTIONS},
    "cayley-sgd": so.CayleySGD,
    "cayley-sgd-exact": partial(so.CayleySGD, exact=True),
}


@pytest.mark.parametrize(
    ("name", "shape", "size", "dtype"),
    mixed(
        10, ALL, [(8, 3), (5, 4), (6, 6), LARGE], [1e6, 1e3, 1.0], [torch.float32, torch.float64]
    ),
)
def test_no_gradient_is_too_large(name, shape, size, dtype, generator):
    """For an optimizer, which removes rounding after long steps."""
    n, m = shape
    weight = so.ManifoldParameter(random_point(2, n, m, generator=generator, dtype=dtype))
    optimizer = OPTIMIZERS[name]([weight], lr=1.0, momentum=0.9)
    for _ in range(12):
        weight.grad = size * torch.randn(2, n, m, generator=generator, dtype=dtype)
        weight.grad[1, 2:] = 0  # of low rank
        optimizer.step()
    point, (_, normal) = weight.detach(), optimizer.velocity(weight)
    error = (point.mT @ point - torch.eye(m, dtype=dtype)).abs().max()
    assert error < 20 * n**0.5 * torch.finfo(dtype).eps
    assert (point.mT @ normal).abs().max() < 1e2 * torch.finfo(dtype).eps * weight.grad.norm()


@pytest.mark.parametrize(("name", "shape"), in_turn([*ALL, "cayley-adam"], [(8, 3), (4, 4)]))
def test_a_tensor_of_another_dtype_as_learning_rate_keeps_that_of_the_point(name, shape, generator):
    n, m = shape
    case = ALL.get(name, RuleCase(cayley_adam, {"step": 1.0}, SQUARED))
    point = torch.linalg.qr(torch.randn(2, n, m, generator=generator)).Q
    grad = torch.randn(2, n, m, generator=generator)
    state = case.state(point, generator, zero=True)
    lrs = 0.1, torch.tensor(0.1, dtype=torch.float64)
    number, tensor = (tensors(case(point, grad, state, lr=lr)) for lr in lrs)
    for key, found in tensor.items():
        assert found.dtype is torch.float32
        # a momentum of length 10 turns with the point
        torch.testing.assert_close(found, number[key], rtol=0, atol=1e-6 if key == "X" else 1e-5)
