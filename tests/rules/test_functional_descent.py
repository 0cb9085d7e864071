"""The rules of gradient descent, Cayley SGD and Adam against dense loops and their own laws."""

from __future__ import annotations

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
from torch import Tensor

from stiefel_opt.functional import Setting, cayley_adam_, cayley_sgd_, descend_
from stiefel_opt.functional.descent import RETRACTIONS
from stiefel_opt.linalg import cholesky_factor

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
    square = point.shape[0] == point.shape[1]
    moved = descend_(
        X, X * 0, T, None if square else V, lr=1.0, momentum=1.0, retraction=retraction
    )
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
        found = descend_(point, grad, lr=1.0, metric=metric)[0].numpy()
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
CAYLEY_RULES: list[tuple[Any, Any, dict[str, Any]]] = [
    *((cayley_sgd_, CayleySGDReference, {"steps": steps}) for steps in (0, 1, 2, 5)),
    *((cayley_adam_, CayleyAdamReference, {"steps": steps}) for steps in (0, 1, 2, 5)),
    (cayley_sgd_, CayleySGDReference, {"exact": True}),
    (cayley_sgd_, CayleySGDReference, {"momentum": 0.8, "nesterov": True}),
    (cayley_sgd_, CayleySGDReference, {"momentum": 0.0}),
    (cayley_adam_, CayleyAdamReference, {"exact": True}),
    (cayley_adam_, CayleyAdamReference, {"betas": (0.0, 0.5), "eps": 0.1}),
]
RULES = [
    (shape, descend_, DescentReference, {"retraction": retraction, "metric": metric, **momentum})
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
    has_momentum = rule is not descend_ or "momentum" in options
    skew = torch.zeros(k, m, m).double() if has_momentum else None
    normal = torch.zeros(k, n, m).double() if has_momentum and n > m else None
    state = [skew, normal]
    if rule is cayley_adam_:
        state.append(torch.zeros(k, 1, 1).double())
    for step in range(length):
        grads = torch.tensor(force(point.numpy(), step))
        if rule is cayley_adam_:
            options = {**options, "step": step + 1.0}
        setting = Setting(correct=step % 8 == 7)
        point = rule(point, grads, *state, lr=lr, setting=setting, **options)
        expected = force(np.stack([loop.X for loop in loops]), step)
        for loop, grad in zip(loops, expected, strict=True):
            loop.step(grad)
    for index, loop in enumerate(loops):
        np.testing.assert_allclose(point[index].numpy(), loop.X, rtol=0, atol=TOLERANCE)
        assert orthonormality_error(point[index].numpy()) < 1e-13
        if skew is not None:
            np.testing.assert_allclose(skew[index].numpy(), loop.Z, rtol=0, atol=TOLERANCE)
        if normal is not None:
            np.testing.assert_allclose(normal[index].numpy(), loop.U, rtol=0, atol=TOLERANCE)


def test_options_of_a_batch_may_differ_from_matrix_to_matrix(rng):
    """lr, force and the number of the step as (k, 1, 1), which is what accelerators get."""
    X, G = np.stack([start(rng, 8, 3) for _ in range(3)]), rng.standard_normal((3, 8, 3))
    point, grad = torch.tensor(X), torch.tensor(G)
    column = torch.tensor([0.1, 0.2, 3.0]).double().view(3, 1, 1)

    def state() -> list[Tensor]:
        return [torch.zeros(3, 3, 3).double(), torch.zeros(3, 8, 3).double()]

    for rule, options, more in [
        *((descend_, {"retraction": name, "momentum": 0.5}, 0) for name in RETRACTIONS),
        (cayley_sgd_, {}, 0),
        (cayley_adam_, {"step": 2.0}, 1),
    ]:
        together = state() + [torch.ones(3, 1, 1).double()] * more
        signs = {} if more else {"force": -column}
        found = rule(point, grad, *together, lr=column, **signs, **options)
        for index in range(3):
            alone = [*(part[:1] for part in state())] + [torch.ones(1, 1, 1).double()] * more
            one = slice(index, index + 1)
            value = float(column[index])
            signs = {} if more else {"force": -value}
            expected = rule(point[one], grad[one], *alone, lr=value, **signs, **options)
            torch.testing.assert_close(found[one], expected, rtol=0, atol=1e-13)


ALL = {
    **{f"descent-{name}": (descend_, {"retraction": name}) for name in RETRACTIONS},
    "cayley-sgd": (cayley_sgd_, {}),
    "cayley-sgd-exact": (cayley_sgd_, {"exact": True}),
}


@pytest.mark.parametrize("name", ALL)
def test_rows_may_live_on_several_processes(name, rng):
    """Half of the rows each, with sums over both halves: the same step."""
    rule, options = ALL[name]
    X, G = start(rng, 12, 4), rng.standard_normal((12, 4))
    T, V = tangent(rng, X)
    whole = batched(X, G, T, V)
    expected = rule(*whole, lr=0.3, momentum=0.9, **options)
    queue: list[Tensor] = []

    def run(rows: slice, sums: Any) -> tuple[Tensor, list[Tensor]]:
        point, grad, skew, normal = batched(X[rows], G[rows], T, V[rows])
        setting = Setting(row_sum=sums)
        moved = rule(point, grad, skew, normal, lr=0.3, momentum=0.9, setting=setting, **options)
        return moved, [skew, normal]

    def replay(stage: list[Tensor]) -> Any:
        waiting = iter(stage)
        # A sum is its rule's own, as that of an all-reduce is.
        return lambda packed: next(waiting).clone() if (queue.append(packed) or True) else packed

    totals: list[Tensor] = []
    while True:  # learn the sums one stage at a time
        parts = []
        for rows in (slice(0, 5), slice(5, 12)):
            queue.clear()
            try:
                results = run(rows, replay(totals))
            except StopIteration:
                results = None
            parts.append((results, queue[-1]))
        if parts[0][0] is not None:
            break
        totals.append(parts[0][1] + parts[1][1])
    assert 2 <= len(totals) <= 4
    halves = [part[0] for part in parts]
    torch.testing.assert_close(torch.cat([half[0] for half in halves], dim=1), expected)
    torch.testing.assert_close(halves[0][1][0], whole[2])
    torch.testing.assert_close(torch.cat([half[1][1] for half in halves], dim=1), whole[3])


# ---- long steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "size", "dtype"),
    mixed(
        10, ALL, [(8, 3), (5, 4), (6, 6), LARGE], [1e6, 1e3, 1.0], [torch.float32, torch.float64]
    ),
)
def test_no_gradient_is_too_large(name, shape, size, dtype, generator):
    rule, options = ALL[name]
    n, m = shape
    point = torch.linalg.qr(torch.randn(2, n, m, generator=generator, dtype=dtype)).Q
    skew = torch.zeros(2, m, m, dtype=dtype)
    normal = torch.zeros(2, n, m, dtype=dtype) if n > m else None
    for step in range(12):
        grad = size * torch.randn(2, n, m, generator=generator, dtype=dtype)
        grad[1, 2:] = 0  # of low rank
        setting = Setting(correct=step % 4 == 3)
        point = rule(point, grad, skew, normal, lr=1.0, momentum=0.9, setting=setting, **options)
    error = (point.mT @ point - torch.eye(m, dtype=dtype)).abs().max()
    assert error < 20 * n**0.5 * torch.finfo(dtype).eps
    if normal is not None:
        assert (point.mT @ normal).abs().max() < 1e2 * torch.finfo(dtype).eps * grad.norm()


@pytest.mark.parametrize(("name", "shape"), in_turn([*ALL, "cayley-adam"], [(8, 3), (4, 4)]))
def test_a_tensor_of_another_dtype_as_learning_rate_keeps_that_of_the_point(name, shape, generator):
    rule, options = ALL.get(name, (cayley_adam_, {"step": 1.0}))
    n, m = shape
    point = torch.linalg.qr(torch.randn(2, n, m, generator=generator)).Q
    grad = torch.randn(2, n, m, generator=generator)
    moved = []
    for lr in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        state = [torch.zeros(2, m, m), torch.zeros(2, n, m) if n > m else None]
        state += [torch.zeros(2, 1, 1)] if rule is cayley_adam_ else []
        moved.append(rule(point, grad, *state, lr=lr, **options))
    assert moved[1].dtype is torch.float32
    torch.testing.assert_close(moved[1], moved[0], rtol=0, atol=1e-6)
