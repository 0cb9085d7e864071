"""What changes between steps, and numbers at the edge: shapes, precision, velocity, rates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import in_turn, mixed
from contract import OPTIMIZERS, RULES, TABLE, on_machines, optimizer, through_file
from torch import nn

import stiefel_opt as so


@on_machines(cpu="sgd", as_accelerator="adam", slowly_compiled="sgd")
def test_a_group_that_stops_constraining_starts_a_plain_state(name: str) -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = optimizer(name, [weight], weight_decay=0)
    for step in range(4):
        opt.param_groups[0]["stiefel"] = None if step < 2 else False
        weight.grad = torch.ones_like(weight).cumsum(0)
        opt.step()
    assert "momentum_skew" not in opt.state[weight]
    assert so.orthonormality_error(weight) > 1e-3


def test_a_reading_that_does_not_fit_is_refused_by_name_before_anything_moves() -> None:
    layer = so.constrain(nn.Linear(6, 4))
    opt = so.StiefelSGD(layer.named_parameters(), lr=0.1)
    for stiefel in (None, so.Stiefel(heads=2).as_dict()):
        layer(torch.ones(1, 6)).sum().backward()
        before = [p.detach().clone() for p in layer.parameters()]
        opt.param_groups[0]["stiefel"] = stiefel
        if stiefel is None:
            opt.step()
    with pytest.raises(ValueError, match="`bias` must have at least 2 dimensions"):
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))


@pytest.mark.parametrize("name", [name for name in RULES if TABLE[name].may_forget])
def test_a_velocity_needs_a_momentum(name: str) -> None:
    weight = so.ManifoldParameter(torch.eye(4, 2))
    opt = TABLE[name].optimizer([weight], lr=0.1, momentum=0.0)
    skew, normal = opt.velocity(weight)
    assert not skew.any()
    assert not normal.any()
    with pytest.raises(ValueError, match="`optimizer` must keep a momentum"):
        opt.set_velocity(weight, torch.zeros(2, 2), torch.zeros(4, 2))


@on_machines(cpu="adam-amsgrad sgd", as_accelerator="sgd-nesterov")
def test_a_parameter_of_another_shape_is_named_before_anything_moves(name: str) -> None:
    plain, weight = nn.Parameter(torch.zeros(3)), so.ManifoldParameter(torch.eye(4, 2))
    opt = optimizer(name, [("bias", plain), ("weight", weight)])
    plain.grad, weight.grad = torch.ones(3), torch.ones(4, 2).cumsum(0)
    opt.step()
    before = plain.detach().clone()
    weight.data = torch.eye(6, 3)
    weight.grad = torch.ones(6, 3)
    with pytest.raises(ValueError, match=r"of weight.* must have shape .*, got shape"):
        opt.step()
    assert torch.equal(plain, before)


@on_machines(cpu="sgd adam", as_accelerator="sgd-nesterov")
def test_a_model_may_change_its_precision_between_steps(name: str) -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = optimizer(name, [weight])
    for dtype in (torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float64):
        weight.data = weight.data.to(dtype)
        for step in range(10):
            weight.grad = torch.ones_like(weight).cumsum(0) * (-1) ** step
            opt.step()
        eps = torch.finfo(dtype).eps
        assert so.orthonormality_error(weight) < 30 * eps
        kept = torch.float32 if dtype is torch.bfloat16 else dtype
        assert all(t.dtype == kept for key, t in opt.state[weight].items() if key != "step")


@pytest.mark.parametrize(
    ("skew", "normal", "message"),
    [
        (torch.zeros(3, 3), torch.zeros(5, 3), r"`normal` must have shape \(6, 3\), got shape"),
        (torch.zeros(2, 2), torch.zeros(6, 3), r"`skew` must have shape \(3, 3\), got shape"),
        (torch.full((3, 3), torch.nan), torch.zeros(6, 3), "`skew` must be finite"),
        (None, None, r"`skew` must be a tensor of shape \(3, 3\), got NoneType"),
        ((torch.zeros(3, 3),) * 2, (torch.zeros(6, 3),) * 2, "must be tuples of 1 tensors each"),
    ],
)
def test_a_velocity_is_checked_before_it_is_set(skew: Any, normal: Any, message: str) -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = so.StiefelSGD([weight], lr=0.1)
    weight.grad = torch.ones_like(weight).cumsum(0)
    opt.step()
    before = opt.velocity(weight)
    with pytest.raises((ValueError, TypeError), match=message):
        opt.set_velocity(weight, skew, normal)
    for now, then in zip(opt.velocity(weight), before, strict=True):
        assert torch.equal(now, then)


ORDERS = [  # of the options by which the momentum is kept in another way
    ("isometric", "projected", "nesterov", "isometric"),
    ("isometric", "nesterov", "projected", "isometric"),
    ("projected", "isometric", "nesterov"),
    ("projected-nesterov", "isometric", "projected-nesterov", "nesterov"),
]


@pytest.mark.parametrize(("order", "dtype"), in_turn(ORDERS, [torch.float64, torch.bfloat16]))
def test_the_momentum_outlives_a_change_of_the_transport(
    order: tuple[str, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The velocity of before, put into an optimizer that had these options all along."""
    readings = (so.Stiefel(), so.Stiefel(heads=2, scale=2.0), so.Stiefel(rows=((0, 2), (3, 7))))
    shapes = ((9, 4), (6, 9), (8, 5))
    values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    both = [
        [
            so.ManifoldParameter(v.to(dtype, copy=True), r)
            for v, r in zip(values, readings, strict=True)
        ]
        for _ in range(2)
    ]
    params, others = both
    opt, lr, atol = so.StiefelSGD(params, lr=0.02), 0.02, 1e-12 if dtype.itemsize == 8 else 1e-5
    for name in order:
        transport = name.removesuffix("-nesterov").replace("nesterov", "isometric")
        options = {"transport": transport, "nesterov": "nesterov" in name}
        opt.param_groups[0].update(options)
        fresh = so.StiefelSGD(others, lr=lr, **options)
        for param, other in zip(params, others, strict=True):
            other.data.copy_(param)
            for key, kept in opt.state[param].items():
                if key == "master" or key.startswith("rows."):
                    fresh.state[other][key] = kept.clone()
            fresh.set_velocity(other, *opt.velocity(param))
        for _ in range(3):
            for param, other in zip(params, others, strict=True):
                grad = torch.randn(param.shape, generator=generator, dtype=torch.float64) / 4
                param.grad, other.grad = grad.to(dtype), grad.to(dtype)
            opt.step()
            fresh.step()
            for param, other in zip(params, others, strict=True):
                found = opt.state[param].get("master", param)
                expected = fresh.state[other].get("master", other)
                torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        kept = {key for key in opt.state[params[0]] if key not in ("step", "master")}
        assert kept == {key for key in fresh.state[others[0]] if key not in ("step", "master")}


@on_machines(cpu="adam-amsgrad", as_accelerator="sgd", compiled="adam")
def test_what_a_user_keeps_in_the_state_stays(name: str) -> None:
    """Under names of their own, before and after a step, and in a checkpoint."""
    weight, plain = so.ManifoldParameter(torch.eye(6, 3)), nn.Parameter(torch.ones(3))
    opt = optimizer(name, [weight, plain])
    opt.state[weight]["seen"], opt.state[plain]["seen"] = 7, torch.ones(2)
    for step in range(4):
        for parameter in (weight, plain):
            parameter.grad = torch.ones_like(parameter).cumsum(0)
        opt.step()
        assert opt.state[weight]["seen"] == 7
        assert torch.equal(opt.state[plain]["seen"], torch.ones(2))
        if step == 1:
            opt.state[weight]["mask"] = torch.ones(6, 3)
            opt.state[weight]["grad_norm"] = opt.state[plain]["grad_norm"] = torch.tensor(1.0)
        if step == 2:
            opt.load_state_dict(through_file(opt.state_dict()))
    assert torch.equal(opt.state[weight]["mask"], torch.ones(6, 3))
    assert all(opt.state[parameter]["grad_norm"] == 1 for parameter in (weight, plain))
    assert so.orthonormality_error(weight) < 1e-6


@pytest.mark.parametrize(("name", "lr"), in_turn([*OPTIMIZERS, "sgd"], [1e15, 1e20, 1e30, 1e200]))
def test_an_absurd_rate_is_no_fault_of_the_gradient(name: str, lr: float) -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = optimizer(name, [weight], lr=lr)
    for _ in range(3):
        weight.grad = torch.ones_like(weight).cumsum(0)
        opt.step()
    assert so.orthonormality_error(weight) < 1e-5
    assert opt.skipped_steps() == {}


@pytest.mark.parametrize("kind", [float, torch.tensor])
@pytest.mark.parametrize("lr", [math.nan, math.inf])
def test_a_rate_that_is_no_number_is_named_before_anything_moves(lr: float, kind: Any) -> None:
    weight, plain = so.ManifoldParameter(torch.eye(6, 3)), nn.Parameter(torch.ones(3))
    opt = so.StiefelSGD([{"params": [plain]}, {"params": [weight]}], lr=kind(0.1))
    opt.param_groups[1]["lr"] = kind(lr)
    weight.grad, plain.grad = torch.ones_like(weight), torch.ones_like(plain)
    with pytest.raises(ValueError, match=f"`lr` must be finite, got {lr}; look at its schedule"):
        opt.step()
    assert torch.equal(plain, torch.ones(3))
    assert torch.equal(weight, torch.eye(6, 3))


def test_numbers_of_numpy_become_plain_ones() -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = so.StiefelSGD([weight], lr=np.float32(0.5), momentum=np.float64(0.5))
    assert type(opt.param_groups[0]["lr"]) is type(opt.param_groups[0]["momentum"]) is float
    weight.grad = torch.ones_like(weight)
    opt.step()
    through_file(opt.state_dict())


def test_unknown_words_of_a_reading_are_named() -> None:
    with pytest.raises(ValueError, match="`stiefel` must have no other keys than"):
        so.StiefelSGD([nn.Parameter(torch.eye(3))], stiefel={"foo": 2})
    with pytest.raises(TypeError, match="`manifold` must be None or a Stiefel, got 'x'"):
        so.orthonormality_error(torch.eye(3), "x")


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
    """Rounding in X'X comes back times eta X'G, of which the length of a step shows nothing."""
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
