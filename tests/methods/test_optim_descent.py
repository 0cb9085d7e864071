"""ProjectedRGD, CayleySGD and CayleyAdam: where they converge, what they keep, what breaks them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from cases import in_turn, mixed
from held import counted_memory
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.methods.descent import RETRACTIONS
from stiefel_opt.numerics.geometry import random_point

DTYPE = torch.float64

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    f"rgd-{retraction}-{metric}": (so.ProjectedRGD, {"retraction": retraction, "metric": metric})
    for retraction in RETRACTIONS
    for metric in ("canonical", "euclidean")
}
METHODS |= {
    "rgd-momentum": (so.ProjectedRGD, {"momentum": 0.5, "retraction": "qr"}),
    "cayley-sgd": (so.CayleySGD, {"momentum": 0.5}),
    "cayley-sgd-exact": (so.CayleySGD, {"momentum": 0.5, "exact": True, "nesterov": True}),
}
# Shape of the parameter, and its tall matrices.
SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (12, 3),
    "column": (8, 1),
    "wide": (3, 12),
    "batched": (2, 9, 2),
}


def tall(tensor: Tensor) -> Tensor:
    return tensor if tensor.size(-2) >= tensor.size(-1) else tensor.mT


def parameter(shape: tuple[int, ...], generator: torch.Generator) -> so.ManifoldParameter:
    gaussian = torch.randn(shape, generator=generator, dtype=DTYPE)
    return so.ManifoldParameter(gaussian, project=False)  # the first step projects it


def optimizer(method: str, params: Any, lr: float) -> torch.optim.Optimizer:
    rule, options = METHODS[method]
    return rule(params, lr=lr * (1 - options.get("momentum", 0.0)), **options)


def largest_angle(point: Tensor, basis: Tensor) -> float:
    """Sine of the largest principal angle between the spans."""
    residual = point - basis @ (basis.mT @ point)
    return float(torch.linalg.matrix_norm(residual, ord=2).max())


@pytest.mark.parametrize(
    ("method", "shape"),
    in_turn([*METHODS, "cayley-sgd", "rgd-momentum", "cayley-sgd"], SHAPES.values()),
)
def test_the_leading_eigenspace_is_reached_within_150_iterations(method, shape, generator):
    """Eigenvalues 3, 2.8, ... above 1, 0.9, ...: the gap is at least 1."""
    param = parameter(shape, generator)
    *lead, n, m = tall(param).shape
    vectors = torch.linalg.qr(torch.randn(*lead, n, n, generator=generator, dtype=DTYPE)).Q
    values = torch.cat([3.0 - 0.2 * torch.arange(m), 1.0 - 0.1 * torch.arange(n - m)]).to(DTYPE)
    matrix = (vectors * values) @ vectors.mT
    opt = optimizer(method, [param], 0.4)
    for _ in range(150):
        image = matrix @ tall(param.detach())
        param.grad = -image if param.size(-2) >= param.size(-1) else -image.mT
        opt.step()
    assert largest_angle(tall(param.detach()), vectors[..., :m]) < 1e-6
    assert so.orthonormality_error(param) < 1e-13


@pytest.mark.parametrize("exact", [False, True])
def test_cayley_adam_reaches_the_eigenspace_within_300_iterations(exact, generator):
    param = parameter((12, 3), generator)
    vectors = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=DTYPE)).Q
    values = torch.cat([torch.full((3,), 3.0), torch.linspace(1, 0, 9)]).to(DTYPE)
    matrix = (vectors * values) @ vectors.mT
    opt = so.CayleyAdam([param], lr=0.5, exact=exact)
    for _ in range(300):
        param.grad = -(matrix @ param.detach())
        opt.step()
    assert largest_angle(param.detach(), vectors[:, :3]) < 1e-6


# ---- momentum ------------------------------------------------------------------------------------


def test_momentum_may_come_and_go_between_steps(generator):
    """From the step on at which it is set it is kept, and dropped where it is zero again."""
    value = torch.linalg.qr(torch.randn(6, 3, generator=generator, dtype=DTYPE)).Q
    params = [so.ManifoldParameter(value.clone()) for _ in range(2)]
    grads = torch.randn(8, 6, 3, generator=generator, dtype=DTYPE)
    opt = so.ProjectedRGD(params[:1], lr=0.1)
    other: Any = None
    for step, grad in enumerate(grads):
        momentum = 0.9 if 2 <= step < 6 else 0.0
        opt.param_groups[0]["momentum"] = momentum
        if step in (0, 2, 6):
            other = so.ProjectedRGD(params[1:], lr=0.1, momentum=momentum)
        for param in params:
            param.grad = grad.clone()
        opt.step()
        other.step()
        torch.testing.assert_close(params[0], params[1], rtol=0, atol=1e-14)
        assert ("momentum_normal" in opt.state[params[0]]) is (momentum > 0)


@pytest.mark.parametrize(
    ("shape", "metric", "nesterov", "dtype"),
    [
        ((5, 5), "canonical", False, torch.float64),
        ((5, 5), "euclidean", True, torch.complex128),
        ((2, 4, 4), -1.0, True, torch.float64),
        ((12, 4), "euclidean", False, torch.complex128),
        ((3, 12), "euclidean", False, torch.float64),
    ],
    ids=str,
)
def test_projected_transport_is_descent_with_polar_retraction_where_they_coincide(
    dtype, shape, metric, nesterov, generator
):
    """Where Z or U is zero: square matrices, and tr(X'AX)/2, whose X'G is symmetric.

    A turn and a move are then one polar factor of X + eta (XZ + U), and projection by parts is
    projection.
    """
    value = random_point(*shape, generator=generator, dtype=dtype)
    pair = [so.ManifoldParameter(value.clone()) for _ in range(2)]
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": nesterov, "metric": metric}
    opts = [
        so.StiefelSGD(pair[:1], transport="projected", **options),
        so.ProjectedRGD(pair[1:], retraction="polar", **options),
    ]
    n = max(shape[-2:])
    matrix = torch.randn(n, n, generator=generator, dtype=dtype) / 2
    is_square = shape[-1] == shape[-2]
    matrix = matrix if is_square else matrix + matrix.mH
    for step in range(40):
        for param, opt in zip(pair, opts, strict=True):
            point = tall(param.detach())
            grad = matrix @ point + (torch.sin(torch.tensor(step)) if is_square else 0.0)
            param.grad = grad if param.size(-2) >= param.size(-1) else grad.mT
            opt.step()
        torch.testing.assert_close(pair[0], pair[1], rtol=0, atol=1e-12)
        velocities = [opt.velocity(param) for opt, param in zip(opts, pair, strict=True)]
        for own, other in zip(*velocities, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


# ---- what does not break them --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-22, 1e-23, 1e-25])
def test_gradients_whose_squares_are_zero_move_little(size, generator):
    weight = so.ManifoldParameter(random_point(7, 3, generator=generator))
    optimizer, start = so.CayleyAdam([weight], lr=0.1, eps=0.0), weight.detach().clone()
    for _ in range(5):
        weight.grad = size * torch.randn((7, 3), generator=generator)
        optimizer.step()
    assert (weight - start).abs().max() < 1e-5


def test_a_polar_retraction_takes_gradients_that_only_a_small_rate_suits(generator):
    weight = so.ManifoldParameter(random_point(70, 70, generator=generator))
    optimizer = so.ProjectedRGD([weight], lr=1e-10, retraction="polar")
    weight.grad, start = 1e10 * torch.randn((70, 70), generator=generator), +weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, start)
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize(
    ("shape", "retraction", "momentum"),
    mixed(6, [(40, 39), (60, 30), (16, 16), (300, 100)], ["cayley", "qr", "polar"], [0.0, 0.9]),
)
def test_gradients_up_to_the_limit_move(
    shape: tuple[int, int], retraction: str, momentum: float, generator: torch.Generator
) -> None:
    """Bounds on sums take squares of them: |G|^4 leaves float32 long before |G|^2."""
    weight = so.ManifoldParameter(torch.linalg.qr(torch.randn(shape, generator=generator)).Q)
    opt = so.ProjectedRGD([weight], lr=0.1, momentum=momentum, retraction=retraction)
    for size in (1e9, 4e10, 1e13):
        before = weight.detach().clone()
        grad = torch.randn(shape, generator=generator)
        weight.grad = grad * (size / grad.norm())
        opt.step()
        assert not torch.equal(weight, before)
        assert so.orthonormality_error(weight) < 1e-5
    assert opt.skipped_steps() == {}


def test_an_overflow_without_momentum_is_a_skipped_step() -> None:
    weight, plain = so.ManifoldParameter(torch.eye(40, 39)), nn.Parameter(torch.zeros(3))
    opt = so.ProjectedRGD([plain, weight], lr=0.1)
    weight.grad, plain.grad = torch.full((40, 39), 1e15), torch.ones(3)
    with pytest.warns(UserWarning, match="was not finite"):
        opt.step()
    assert torch.equal(weight, torch.eye(40, 39))
    assert opt.state[weight]["step"] == 0


def test_a_momentum_that_has_grown_is_loaded_again():
    """The published transport multiplies it; such a training goes on by skipped steps."""
    torch.manual_seed(0)
    weight, factor = so.ManifoldParameter(torch.randn(12, 4)), torch.randn(12, 12)
    opt = so.PublishedSGD([weight], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):
            weight.grad = factor @ factor.T @ weight.detach()
            opt.step()
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.skipped_steps()
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize("retraction", ["polar", "qr", "cayley"])
def test_nothing_of_a_size_is_held_when_all_is_gone(retraction: str) -> None:
    """An identity of every size ever seen would be: 256 kB here, 67 MB at 4,096 columns."""
    with counted_memory() as held:
        weight = so.ManifoldParameter(torch.eye(300, 256))
        opt = so.ProjectedRGD([weight], lr=0.1, retraction=retraction)
        for sign in (1.0, -1.0):
            weight.grad = sign * torch.linspace(-1, 1, 300 * 256).reshape(300, 256)
            opt.step()
        del weight, opt
    assert held.bytes < 100_000, held.bytes


def test_retractions_are_those_of_projected_rgd() -> None:
    torch.manual_seed(0)
    weight = so.ManifoldParameter(torch.randn(7, 3, dtype=torch.float64))
    weight.grad = torch.randn(7, 3, dtype=torch.float64)
    for retraction in ("polar", "qr", "cayley"):
        twin = copy.deepcopy(weight)
        twin.grad = weight.grad
        step = -0.3 * so.project_tangent(weight, weight.grad)
        options = {"metric": "euclidean", "retraction": retraction}
        so.ProjectedRGD([twin], lr=0.3, **options).step()
        torch.testing.assert_close(twin.detach(), so.retract(weight, step, retraction=retraction))
