"""What changes between steps: shapes, precision, data, velocity, readings, options."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import (
    RULES,
    TABLE,
    every_rule,
    grads,
    on_machines,
    optimizer,
    stepped,
    through_file,
)
from torch import nn

import stiefel_opt as so
from stiefel_opt.numerics.geometry import random_point


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


BOTH = [so.StiefelSGD, so.StiefelAdam]
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


@pytest.mark.parametrize("rule", BOTH)
def test_transposed_data_is_another_point(rule, generator):
    first = so.ManifoldParameter(random_point(4, 4, generator=generator, dtype=torch.float64))
    second = so.ManifoldParameter(first.detach().clone())
    optimizers = rule([first], lr=0.1), rule([second], lr=0.1)
    for step in range(6):
        if step == 3:
            first.data = first.data.mT
            second.data = second.data.mT.clone()
        grad = torch.randn((4, 4), generator=generator, dtype=torch.float64)
        for weight, opt in zip((first, second), optimizers, strict=True):
            weight.grad = grad.clone()
            opt.step()
    torch.testing.assert_close(first.detach(), second.detach(), rtol=0, atol=1e-13)


def test_a_velocity_is_a_number_not_a_graph(generator):
    weight = so.ManifoldParameter(random_point(5, 2, generator=generator, dtype=torch.float64))
    optimizer = so.StiefelSGD([weight])
    optimizer.set_velocity(weight, torch.zeros(2, 2), torch.ones(5, 2, requires_grad=True).double())
    assert not any(kept.requires_grad for kept in optimizer.state[weight].values())


def test_an_edit_is_seen_beside_a_neighbour_with_a_large_momentum(generator):
    """In float32 its U, tangent elsewhere, would be taken for rounding of the large one."""
    starts = [random_point(50, 5, generator=generator) for _ in range(3)]
    weights = [so.ManifoldParameter(start) for start in starts[:2]]
    optimizer = so.StiefelSGD(weights, lr=2e-7, momentum=0.9)
    grads = [torch.randn(50, 5, generator=generator) for _ in weights]
    for step in range(30):
        if step == 24:
            with torch.no_grad():
                weights[1].copy_(starts[2])
        weights[0].grad, weights[1].grad = 1e5 * grads[0], grads[1]
        optimizer.step()
        if step >= 24:
            _, normal = optimizer.velocity(weights[1])
            overlap = weights[1].detach().mT @ normal
            assert overlap.abs().max() < 1e-5 * normal.norm()


READINGS = [{"heads": 2}, {"rows": (0, 8)}, {"rows": (8, 16)}, {"transposed": True}, {"scale": 2.0}]


@every_rule
@pytest.mark.parametrize("saved", [False, True])
def test_another_reading_starts_the_momentum_again(name: str, saved: bool) -> None:
    for first, then in zip(READINGS, READINGS[1:] + READINGS[:1], strict=True):
        layer = so.constrain(nn.Linear(8, 16, bias=False), **first)
        opt = stepped(name, layer.weight, 5)
        if saved:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        so.release(layer)
        so.constrain(layer, **then)
        twin = copy.deepcopy(layer)
        fresh = optimizer(name, twin.parameters())
        for step in range(2):
            layer.weight.grad = grads(layer.weight, step)
            twin.weight.grad = grads(layer.weight, step)
            opt.step()
            fresh.step()
        assert torch.equal(layer.weight, twin.weight), (first, then)
