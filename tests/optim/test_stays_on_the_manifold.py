"""What no learning rate, gradient, start or number of steps may break."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cases import READINGS, TRANSPORTS, Array, OptimizerCase, in_turn, pairwise
from contract import (
    TABLE,
)
from reference import polar_factor
from torch import Tensor

import stiefel_opt as so

DTYPES = [torch.float32, torch.float64]
ALGORITHMS = ["adam", "sgd"]  # which deduce bounds of their momenta


def tall(tensor: Tensor) -> Tensor:
    return tensor if tensor.size(-2) >= tensor.size(-1) else tensor.mT


def gram_error(point: Tensor, other: Tensor) -> float:
    """The largest entry of |X'U|, or of |X'X - I|, computed in float64."""
    X = tall(point.detach()).double()
    if other is point:
        return float((X.mT @ X - torch.eye(X.size(-1), dtype=torch.float64)).abs().max())
    return float((X.mT @ other.double()).abs().max())


def spectral_norm(matrices: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrices.double(), ord=2).max())


def random_point(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Any:
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(gaussian, full_matrices=False)
    return so.ManifoldParameter((left @ right).to(dtype))


def normal_gradient(point: Tensor) -> Tensor:
    X, G = tall(point.detach()).double(), tall(point.grad).double()
    return G - X @ (X.mT @ G)


# ---- it cannot blow up --------------------------------------------------------------------------


def check_survival(
    algorithm: str,
    dtype: torch.dtype,
    choices: list[tuple[float, tuple[int, ...]]],
    generator: torch.Generator,
    steps: int,
    **options: Any,
) -> None:
    """Gradients of size 1, every seventh of size 1000, for each rate and shape."""
    groups = [
        {"params": [random_point(generator, *shape, dtype=dtype)], "lr": rate}
        for rate, shape in choices
    ]
    params = [param for group in groups for param in group["params"]]
    optimizer: Any = TABLE[algorithm].optimizer(groups, **options)
    # With the default momenta |U| <= max|g| / (1 - mu), and |U| <= max|g| for Adam.
    factor = 1.0 if TABLE[algorithm].adaptive else 10.0
    largest = dict.fromkeys(params, 0.0)
    for step in range(steps):
        long = step % 7 == 6
        for param in params:
            grad = torch.randn(param.shape, generator=generator, dtype=dtype)
            param.grad = grad * (1000.0 if long else 1.0)
            if long:
                largest[param] = max(largest[param], spectral_norm(normal_gradient(param)))
        optimizer.step()
        if not long:
            continue
        for param in params:
            tolerance = 100 * torch.finfo(dtype).eps * max(param.shape[-2:])
            Z, U = optimizer.velocity(param)
            assert gram_error(param, param) < tolerance
            assert bool(Z.isfinite().all())
            if param.size(-1) == param.size(-2):
                continue
            norm = spectral_norm(U)
            assert norm < factor * largest[param] * (1 + tolerance)
            assert gram_error(param, U) < tolerance * norm


FINE = list(
    itertools.product(
        (1e-3, 0.1, 1.0, 10.0, 30.0, 100.0),
        ((40, 7), (5, 4), (9, 1), (4, 12), (3, 6, 6), (2, 30, 20)),
    )
)
COARSE = {
    torch.float64: [(100.0, (2, 4, 12)), (3.0, (5, 5))],
    torch.float32: [(100.0, (12, 4)), (100.0, (2, 5, 5))],
}


@pytest.mark.filterwarnings("ignore:Each of the last")  # steps are far too long on purpose
@pytest.mark.parametrize("is_fine", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("algorithm", "transport", "dtype"), pairwise(ALGORITHMS, TRANSPORTS, DTYPES), ids=str
)
def test_no_learning_rate_blows_up(
    algorithm: str, transport: str, dtype: torch.dtype, is_fine: bool, generator: torch.Generator
) -> None:
    choices, steps = (FINE, 2000) if is_fine else (COARSE[dtype], 200)
    check_survival(algorithm, dtype, choices, generator, steps, transport=transport)


# ---- the scale of the loss ----------------------------------------------------------------------


def adam_trajectory(
    factor: float, eps: float, metric: str | float, seed: int, amsgrad: bool = False
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((8, 3), (2, 4, 6), (4, 4))
    params = [random_point(generator, *shape, dtype=torch.float64) for shape in shapes]
    targets = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    optimizer = so.StiefelAdam(params, lr=0.05, eps=eps, metric=metric, amsgrad=amsgrad)
    for _ in range(100):
        for param, target in zip(params, targets, strict=True):
            noise = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = factor * (param.detach() - target + 0.3 * noise)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(("metric", "amsgrad"), [("canonical", True), ("euclidean", False)])
def test_a_constant_factor_on_the_loss_leaves_adam_unchanged(metric: str, amsgrad: bool) -> None:
    trajectories = (adam_trajectory(factor, 1e-30, metric, 1, amsgrad) for factor in (1.0, 1000.0))
    first, *others = trajectories
    for other in others:
        for point, scaled_point in zip(first, other, strict=True):
            assert (point - scaled_point).abs().max() < 1e-6


@pytest.mark.parametrize("metric", ["canonical", "euclidean"])
def test_adam_without_eps_meets_no_zero_by_zero(metric: str) -> None:
    for point, other in zip(
        adam_trajectory(1.0, 0.0, metric, 2), adam_trajectory(1.0, 1e-30, metric, 2), strict=True
    ):
        assert bool(point.isfinite().all())
        assert (point - other).abs().max() < 1e-12


# ---- invariants ---------------------------------------------------------------------------------


def check_invariants(
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    generator: torch.Generator,
    steps: int,
) -> None:
    """Leading eigenvectors in order (Brockett's cost), with fresh noise in each step."""
    n, m = shape[-2:]
    param = random_point(generator, *shape, dtype=dtype)
    cost = torch.randn(n, n, generator=generator, dtype=dtype)
    weights = torch.arange(m, 0, -1, dtype=dtype) / m
    optimizer: Any = TABLE[algorithm].optimizer(
        [param], lr=0.01 if TABLE[algorithm].adaptive else 0.05
    )
    for _ in range(steps):
        noisy = cost + 0.5 * torch.randn(n, n, generator=generator, dtype=dtype)
        param.grad = -((noisy + noisy.mT) @ param.detach()) * weights
        optimizer.step()
    tolerance = 4 * n * torch.finfo(dtype).eps
    Z, U = optimizer.velocity(param)
    assert gram_error(param, param) < tolerance
    assert torch.equal(Z, -Z.mT)
    if m > 1:
        assert float(Z.abs().max()) > 1e-3
    if n > m:
        assert spectral_norm(U) > 1e-3
        assert gram_error(param, U) < tolerance * spectral_norm(U)


OTHER_SHAPES = [(4, 4), (60, 20), (30, 29), (8, 1), (3, 200, 8)]


@pytest.mark.parametrize(
    ("algorithm", "dtype", "shape", "steps"),
    [
        *in_turn(ALGORITHMS, [torch.float64, torch.float32], [(2, 10, 3)], [400]),
        *(
            pytest.param(*row, 10_000, marks=pytest.mark.slow)
            for row in itertools.product(ALGORITHMS, DTYPES, OTHER_SHAPES)
        ),
    ],
)
def test_invariants_hold_after_many_steps(
    algorithm: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    steps: int,
    generator: torch.Generator,
) -> None:
    check_invariants(algorithm, dtype, shape, generator, steps)


STARTS = pairwise(
    ["tall", "wide", "square", "batch-tall"], ["gaussian", "nearly-singular"], DTYPES, ALGORITHMS
)


def start_off_the_manifold(
    kind: str, name: str, dtype: torch.dtype, rng: np.random.Generator
) -> Array:
    """A Gaussian, or the smallest singular value 1e-6 (float32: 1e-3) of the largest."""
    tensor = rng.standard_normal(READINGS[name].shape)
    if kind == "nearly-singular":
        left, values, right = np.linalg.svd(tensor, full_matrices=False)
        smallest = 1e-6 if dtype is torch.float64 else 1e-3
        values = 3 * np.geomspace(1, smallest, values.shape[-1])
        tensor = (left * values) @ right
    return np.asarray(torch.tensor(tensor, dtype=dtype).double().numpy())


@pytest.mark.parametrize(("name", "kind", "dtype", "algorithm"), STARTS)
def test_a_start_off_the_manifold_is_on_it_after_one_step(
    algorithm: str, dtype: torch.dtype, kind: str, name: str, rng: np.random.Generator
) -> None:
    case = OptimizerCase("", algorithm, {"metric": 0.3})
    reading = READINGS[name]
    start = start_off_the_manifold(kind, name, dtype, rng)
    param = reading.parameter(start, dtype)
    optimizer: Any = case.optimizer([param])
    grad = rng.standard_normal(reading.shape)
    param.grad = torch.tensor(grad, dtype=dtype)
    matrices = reading.matrices(start)
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    grads = reading.matrices(param.grad.double().numpy()).reshape(flat.shape)
    references = [case.reference(matrix) for matrix in flat]
    for reference, matrix_grad in zip(references, grads, strict=True):
        reference.step(matrix_grad)
    optimizer.step()

    eps = torch.finfo(dtype).eps
    n, m = flat.shape[-2:]
    condition = max(float(np.linalg.cond(matrix)) for matrix in flat)
    Z, U = (
        part.double().numpy().reshape(-1, *part.shape[-2:]) if part is not None else None
        for part in optimizer.velocity(param)
    )
    assert gram_error(param, param) < 20 * n * eps
    points = reading.matrices(param.detach().double().numpy()).reshape(flat.shape)
    # Rounding of the start moves its polar factor by eps times the condition number.
    tolerance = 50 * condition * eps
    assert np.abs(points - np.stack([r.X for r in references])).max() < tolerance
    assert np.abs(Z - np.stack([r.Z for r in references])).max() < tolerance * 5
    if n > m:
        overlap = np.abs(points.swapaxes(-1, -2) @ U).max()
        assert overlap < 20 * n * eps * np.linalg.norm(U, 2, axis=(-2, -1)).max()
        assert np.abs(U - np.stack([r.U for r in references])).max() < tolerance * 5


# ---- nothing moves ------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_learning_rate_zero_gathers_momentum_as_in_torch(
    algorithm: str, rng: np.random.Generator
) -> None:
    reading = READINGS["tall"]
    case = OptimizerCase("", algorithm, {"lr": 0.0, "metric": 0.3})
    value = reading.start(rng)
    param, reference = reading.parameter(value), case.reference(value)
    optimizer: Any = case.optimizer([param])
    for step in range(30):
        if step == 20:  # the momentum gathered while resting now acts
            optimizer.param_groups[0]["lr"] = reference.lr = reference.nominal_lr = 0.05
        grad = rng.standard_normal(reading.shape)
        param.grad = torch.tensor(grad)
        optimizer.step()
        reference.step(grad)
    Z, U = optimizer.velocity(param)
    assert np.abs(param.detach().numpy() - reference.X).max() < 1e-12
    assert np.abs(Z.numpy() - reference.Z).max() < 1e-12
    assert np.abs(U.numpy() - reference.U).max() < 1e-12


# ---- square matrices ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Each of the last")
@pytest.mark.parametrize(("transport", "algorithm"), [*pairwise(TRANSPORTS, ALGORITHMS)])
def test_square_matrices_keep_their_determinant_and_have_no_normal_momentum(
    algorithm: str, transport: str, rng: np.random.Generator
) -> None:
    start = np.stack([polar_factor(rng.standard_normal((5, 5))) for _ in range(2)])
    start[0] *= np.sign(np.linalg.det(start[0]))
    start[1] *= -np.sign(np.linalg.det(start[1]))
    param = so.ManifoldParameter(torch.tensor(start))
    optimizer: Any = TABLE[algorithm].optimizer([param], lr=0.5, transport=transport)
    for _ in range(100):
        param.grad = torch.tensor(rng.standard_normal(start.shape))
        optimizer.step()
    determinants = np.linalg.det(param.detach().numpy())
    assert np.abs(determinants - [1.0, -1.0]).max() < 1e-12
    assert gram_error(param, param) < 1e-13
    assert not any(key.endswith(("normal", "base")) for key in optimizer.state[param])
