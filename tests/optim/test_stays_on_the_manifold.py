"""No learning rate, gradient, start or number of steps leaves the manifold."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    READINGS,
    TRANSPORTS,
    Array,
    OptimizerCase,
    in_turn,
    mixed,
    pairwise,
)
from contract import (
    OPTIMIZERS,
    TABLE,
    every_optimizer,
    go_on,
    optimizer,
    stepped,
)
from optimizers import CLIENTS, OF_CORE
from reference import polar_factor
from torch import Tensor, nn

import stiefel_opt as so

DTYPES = [torch.float32, torch.float64]
BOTH = [so.StiefelSGD, so.StiefelAdam]
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
    """Gradients of size 1, every seventh of size 1000, for each rate and shape."""
    choices, steps = (FINE, 2000) if is_fine else (COARSE[dtype], 200)
    groups = [
        {"params": [random_point(generator, *shape, dtype=dtype)], "lr": rate}
        for rate, shape in choices
    ]
    params = [param for group in groups for param in group["params"]]
    optimizer: Any = TABLE[algorithm].optimizer(groups, transport=transport)
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
        for param in params if long else ():
            tolerance = 100 * torch.finfo(dtype).eps * max(param.shape[-2:])
            Z, U = optimizer.velocity(param)
            assert gram_error(param, param) < tolerance
            assert bool(Z.isfinite().all())
            if param.size(-1) != param.size(-2):
                norm = spectral_norm(U)
                assert norm < factor * largest[param] * (1 + tolerance)
                assert gram_error(param, U) < tolerance * norm


# ---- the scale of the loss ----------------------------------------------------------------------


NAMED = ["canonical", "euclidean"]


def adam_trajectory(factor: float, eps: float, metric: str, amsgrad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
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


@pytest.mark.parametrize(
    ("factor", "eps", "metric", "amsgrad", "bound"),
    [
        *((1000.0, 1e-30, metric, metric == "canonical", 1e-6) for metric in NAMED),
        *((1.0, 0.0, metric, False, 1e-12) for metric in NAMED),  # no zero by zero
    ],
)
def test_a_constant_factor_on_the_loss_and_no_eps_leave_adam_unchanged(
    factor: float, eps: float, metric: str, amsgrad: bool, bound: float
) -> None:
    usual = adam_trajectory(1.0, 1e-30, metric, amsgrad)
    for point, other in zip(usual, adam_trajectory(factor, eps, metric, amsgrad), strict=True):
        assert (point - other).abs().max() < bound


# ---- starts -------------------------------------------------------------------------------------


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


EXTREME = [  # an eps that rounds to zero; beta1^2 > beta2 makes a quotient of any size
    *({"eps": eps} for eps in (0.0, 1e-45, 1e-44, 1e-38)),
    *(
        {"betas": (0.9, beta), "nesterov": nesterov}
        for beta in (0.0, 0.1)
        for nesterov in (False, True)
    ),
]


@pytest.mark.parametrize("options", EXTREME)
def test_adam_divides_by_nothing_that_rounds_to_zero(options, generator):
    weight = random_point(generator, 7, 3, dtype=torch.float32)
    optimizer = so.StiefelAdam([weight], lr=0.1 if "eps" in options else 0.01, **options)
    for _ in range(5 if "eps" in options else 140):
        weight.grad = torch.randn((7, 3), generator=generator)
        optimizer.step()
    assert weight.isfinite().all()
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize("rule", BOTH)
def test_rounding_is_removed_where_the_count_of_steps_stands_still(rule, generator):
    """float32 counts to 2^24; a write that no version shows is found when rounding is removed."""
    weights = [random_point(generator, 12, 4, dtype=torch.float32)]
    weights.append(random_point(generator, 12, 4, dtype=torch.float32))
    optimizer = rule(weights, lr=1e-3)
    for step in range(20):
        for weight in weights:
            weight.grad = torch.randn((12, 4), generator=generator)
        optimizer.step()
        if step == 0:
            for weight in weights:
                optimizer.state[weight]["step"].fill_(2.0**24)
        if step == 5:
            weights[0].detach().numpy()[0] += 1e-3
    assert max(map(so.orthonormality_error, weights)) < 1e-6


@pytest.mark.parametrize(("rule", "shape"), in_turn(BOTH, [(9, 4), (3, 4, 4), (2, 30, 40)]))
def test_without_a_force_nothing_moves(rule, shape, generator):
    weight = so.ManifoldParameter(torch.randn(shape, generator=generator), project=False)
    optimizer = rule([weight], lr=0.1)
    weight.grad = torch.zeros(shape)
    optimizer.step()  # projects the start
    settled = weight.detach().clone()
    for _ in range(20):
        optimizer.step()
    assert torch.equal(weight, settled)


def test_huge_values_are_projected(generator):
    layer = nn.Linear(4, 9)
    layer.weight.data.mul_(1e20)
    assert so.orthonormality_error(so.constrain(layer).weight) < 1e-5
    value = 1e30 * torch.randn((9, 4), generator=generator)
    weight = so.ManifoldParameter(value, project=False)
    weight.grad = torch.randn((9, 4), generator=generator)
    so.StiefelSGD([weight], lr=0.1).step()
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize("lr", [1e-8, 1e7])
def test_neither_rate_nor_gradient_has_to_be_of_size_one(lr, generator):
    weight = random_point(generator, 128, 64, dtype=torch.float32)
    optimizer = so.StiefelSGD([weight], lr=lr, momentum=0.0)
    for _ in range(3):
        weight.grad = torch.randn(128, 64, generator=generator) * 0.02 / lr
        optimizer.step()
    assert not optimizer.skipped_steps()
    assert so.orthonormality_error(weight) < 5e-6


@every_optimizer
@pytest.mark.parametrize("shape", [(16, 4), (4, 16), (5, 5)])
def test_a_loaded_momentum_is_made_tangent(name: str, shape: tuple[int, int]) -> None:
    """Noise on what was saved, finite and of the right shape: the weight stays orthonormal."""
    weight = so.ManifoldParameter(so.random_point(*shape, dtype=torch.float64))
    opt = stepped(name, weight, 3)
    saved = copy.deepcopy(opt.state_dict())
    for key, tensor in saved["state"][0].items():
        if key != "step":
            noise = torch.randn_like(tensor)
            tensor.add_(noise if "momentum" in key else noise.abs())
    opt.load_state_dict(saved)
    for step in range(24):
        go_on(opt, weight, 3 + step, 4 + step)
        assert so.orthonormality_error(weight) < 1e-12, step
    for key, tensor in opt.state[weight].items():
        if key.endswith("momentum_skew"):
            assert torch.equal(tensor, -tensor.mT)
        if key.endswith("sq_skew"):
            assert torch.equal(tensor, tensor.mT)


@every_optimizer
@pytest.mark.parametrize("lr", [1.0, 10.0])
def test_a_schedule_that_falls_below_zero_stays_on_the_manifold(name: str, lr: float) -> None:
    weight = so.ManifoldParameter(so.random_point(20, 5, dtype=torch.float64))
    opt = optimizer(name, [weight], lr=lr, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 - step / 10)
    for step in range(26):
        go_on(opt, weight, step, step + 1)
        schedule.step()
        assert so.orthonormality_error(weight) < 1e-11, step
    assert not opt.skipped_steps()


@pytest.mark.parametrize(("name", "lr"), in_turn([*OPTIMIZERS, "sgd"], [1e15, 1e20, 1e30, 1e200]))
def test_an_absurd_rate_is_no_fault_of_the_gradient(name: str, lr: float) -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = optimizer(name, [weight], lr=lr)
    for _ in range(3):
        weight.grad = torch.ones_like(weight).cumsum(0)
        opt.step()
    assert so.orthonormality_error(weight) < 1e-5
    assert opt.skipped_steps() == {}


@pytest.mark.parametrize(
    ("name", "kind", "shape", "dtype"),
    mixed(
        14,
        OPTIMIZERS,
        ["along", "against", "alternating", "constant"],
        [(6, 3), (40, 39)],
        [torch.float32, torch.float64],
    ),
)
def test_a_force_that_dwarfs_its_tangent_part_costs_no_digits(
    name: str,
    shape: tuple[int, int],
    kind: str,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """A step multiplies rounding in X'X by eta X'G, which its length does not show."""
    weight = so.ManifoldParameter(
        torch.linalg.qr(torch.randn(shape, generator=generator, dtype=dtype)).Q
    )
    opt = optimizer(name, [weight], lr=0.05)
    fixed = torch.randn(shape, generator=generator, dtype=dtype)
    for size in (1.0, 10.0, 100.0):
        for step in range(15):
            noise = torch.randn(shape, generator=generator, dtype=dtype) / 20
            force = {
                "along": weight.detach() + noise,
                "against": noise - weight.detach(),
                "alternating": (-1) ** step * fixed,
                "constant": fixed,
            }
            weight.grad = size * force[kind]
            opt.step()
        assert so.orthonormality_error(weight) < 40 * torch.finfo(dtype).eps
    assert opt.skipped_steps() == {}


# A tall, a wide and a square one, and a single column.
SHAPES = [(48, 20), (6, 30), (12, 12), (90, 1)]
RATES = (0.03, 15.0)
ROUNDS = 8

Gradient = Callable[[Tensor, Tensor, int, torch.Generator], Tensor]


def _radial(X: Tensor, A: Tensor, step: int, _: Any) -> Tensor:
    return X + 10.0 ** -(1 + step % 8) * A


def _symmetric(X: Tensor, A: Tensor, step: int, generator: torch.Generator) -> Tensor:
    S = torch.randn(X.size(1), X.size(1), generator=generator)
    return 10.0 ** (step % 7) * X @ (S + S.mT) + A


def _spikes(X: Tensor, _: Tensor, step: int, generator: torch.Generator) -> Tensor:
    return torch.randn(X.shape, generator=generator) * (1e9 if step % 4 == 3 else 1e-6)


def _halved(X: Tensor, A: Tensor, step: int, _: Any) -> Tensor:
    return X if step < ROUNDS else A


def _one_column(X: Tensor, A: Tensor, step: int, _: Any) -> Tensor:
    return 1e3 * X + A * (torch.arange(X.size(1)) == step % X.size(1))


def _within(X: Tensor, A: Tensor, *_: Any) -> Tensor:
    """Long turns beside hardly any move out of the span."""
    return X @ (A[: X.size(1)] - A[: X.size(1)].mT)


KINDS = (_radial, _symmetric, _spikes, _halved, _one_column, _within)
CASES = dict(OPTIMIZERS)
for client in CLIENTS:
    CASES |= client.STEEP


def _largest_error(make: Any, options: dict[str, Any], gradient: Gradient, lr: float) -> float:
    generator = torch.Generator().manual_seed(5)
    holder = nn.ParameterList()
    for shape in SHAPES:
        holder.append(so.ManifoldParameter(torch.randn(shape, generator=generator)))
    noise = [torch.randn(max(s), min(s), generator=generator) for s in SHAPES]
    optimizer = make(holder.parameters(), **{**options, "lr": lr})
    worst = 0.0
    for step in range(2 * ROUNDS):
        for weight, A in zip(holder, noise, strict=True):
            is_wide = weight.size(0) < weight.size(1)
            X = weight.detach().mT if is_wide else weight.detach()
            grad = gradient(X, A / A.norm(), step, generator)
            weight.grad = (grad.mT if is_wide else grad).contiguous()
        optimizer.step()
        worst = max(worst, *(float(so.orthonormality_error(weight)) for weight in holder))
    return worst


MACHINES = ("cpu", "as_accelerator")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "gradient", "machine"),
    [
        *itertools.product(sorted(OF_CORE), KINDS, MACHINES),
        *in_turn([name for name in CASES if name not in OF_CORE] * len(KINDS), KINDS, MACHINES),
    ],
    indirect=["machine"],
)
def test_every_point_is_orthonormal(name: str, gradient: Gradient) -> None:
    """Also where the length of a step is known too late, and for rules that choose it."""
    rule, options = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of long steps
        assert max(_largest_error(rule, options, gradient, lr) for lr in RATES) < 1e-4
