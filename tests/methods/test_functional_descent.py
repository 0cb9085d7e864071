"""The rules of gradient descent, Cayley SGD and Adam against dense loops and their own laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import in_turn, mixed
from reference import orthonormality_error, polar_factor
from reference_descent import (
    dense_cayley,
    low_rank_cayley,
    positive_qr,
    retract,
)
from rule_cases import MOMENTUM, NORMAL, RuleCase, tensors
from torch import Tensor

from stiefel_opt.methods import cayley_adam, cayley_sgd, rgd
from stiefel_opt.methods.descent import RETRACTIONS
from stiefel_opt.methods.retractions import cholesky_factor

SHAPES = [(9, 4), (5, 4), (7, 1), (4, 4), (1, 1), (12, 6), (6, 5)]
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


# ---- whole steps against the loops ---------------------------------------------------------------

SQUARED = (*MOMENTUM, "exp_avg_sq_norm")
ALL = {
    **{
        f"descent-{name}": RuleCase(rgd, {"retraction": name, "momentum": 0.9}, MOMENTUM)
        for name in RETRACTIONS
    },
    "cayley-sgd": RuleCase(cayley_sgd, {}, MOMENTUM),
    "cayley-sgd-exact": RuleCase(cayley_sgd, {"exact": True}, MOMENTUM),
}


# ---- long steps ----------------------------------------------------------------------------------


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
