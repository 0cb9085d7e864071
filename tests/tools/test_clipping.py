"""Clipping by the Riemannian norm of the gradients."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import stiefel_opt as so


def constrained_model():
    return nn.Sequential(
        so.constrain(nn.Linear(6, 4)),
        so.constrain(nn.Linear(4, 8), heads=2, scale=2.0),
        so.constrain(nn.Linear(8, 10), rows=((0, 4), (5, 7))),
        so.constrain(nn.Conv2d(2, 3, 2)),
        nn.Linear(3, 2),
    )


def filled(model: nn.Module, generator: torch.Generator) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def tangent_norm(point: Tensor, grad: Tensor) -> Tensor:
    """By a basis of the tangent space: the gradient minus its part along X S, S symmetric."""
    X, G = (point, grad) if point.size(0) >= point.size(1) else (point.T, grad.T)
    overlap = X.T @ G
    return (G - X @ (overlap + overlap.T) / 2).norm()


def expected_norm(model: nn.Sequential) -> Tensor:
    first, heads, rows, conv = (layer.weight.detach() for layer in model[:4])
    grads = [layer.weight.grad for layer in model]
    norms = [tangent_norm(first, grads[0])]
    norms += [tangent_norm(heads[i : i + 4] / 2, grads[1][i : i + 4]) for i in (0, 4)]
    norms += [tangent_norm(rows[i:j], grads[2][i:j]) for i, j in ((0, 4), (5, 7))]
    norms += [grads[2][[4, 7, 8, 9]].norm()]
    norms += [tangent_norm(conv.flatten(1), grads[3].flatten(1)), grads[4].norm()]
    norms += [layer.bias.grad.norm() for layer in model]
    return torch.stack(norms).norm()


def test_norm_is_that_of_the_tangent_parts_and_all_gradients_get_one_factor(generator):
    model = filled(constrained_model().double(), generator)
    expected = expected_norm(model)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    objects = [parameter.grad for parameter in model.parameters()]
    found = so.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(found, expected)
    for parameter, grad, old in zip(model.parameters(), objects, before, strict=True):
        assert parameter.grad is grad
        torch.testing.assert_close(grad, old * (0.5 / (expected + 1e-6)))
    torch.testing.assert_close(expected_norm(model), torch.tensor(0.5).double())


def test_gradients_below_the_bound_keep_their_bits(generator):
    model = filled(constrained_model(), generator)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    so.clip_grad_norm_(model.parameters(), 1e6)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_in_half_precision_is_that_of_exact_products(dtype, generator):
    weight = so.constrain(nn.Linear(64, 256, bias=False, dtype=dtype)).weight
    normal = torch.randn(64, 64, generator=generator)
    skewed = 1e-2 * torch.randn(256, 64, generator=generator)
    weight.grad = (weight.detach().float() @ (normal + normal.T) + skewed).to(dtype)
    point, grad = weight.detach().double(), weight.grad.double()
    expected = tangent_norm(point, grad)
    torch.testing.assert_close(
        so.clip_grad_norm_(weight, 1e9).double(), expected, rtol=0.01, atol=0
    )


def test_a_call_of_torchs_function_needs_no_change(generator):
    model = filled(constrained_model(), generator)
    norm = so.clip_grad_norm_(model.parameters(), 1e9, 2.0, False, foreach=None)
    torch.testing.assert_close(norm, expected_norm(model))
    for wrong in (1.0, math.inf, True):
        with pytest.raises(ValueError, match="`norm_type` must be 2, got"):
            so.clip_grad_norm_(model.parameters(), 1.0, norm_type=wrong)


WAYS = ["on_manifold", "on_manifold, off", "edited on", "edited off", "copied"]


@pytest.mark.parametrize("way", WAYS)
def test_what_clipping_counts_is_what_the_latest_group_says(way: str) -> None:
    layer = so.constrain(nn.Linear(4, 4, bias=False))
    key = None if way == "edited off" else False
    if way != "on_manifold, off":
        optimizer = so.StiefelSGD([{"params": [layer.weight], "stiefel": key}], lr=1e-3)
    if way == "on_manifold":
        so.on_manifold(torch.optim.SGD(layer.parameters(), lr=1.0))
    elif way == "on_manifold, off":
        so.on_manifold(torch.optim.SGD([{"params": [layer.weight], "stiefel": False}], lr=1.0))
    elif way == "copied":
        layer = copy.deepcopy(layer)
    else:
        for now in (key, False if key is None else None):
            optimizer.param_groups[0]["stiefel"] = now
            layer.weight.grad = layer.weight.detach().clone()
            optimizer.step()
    layer.weight.grad = layer.weight.detach().clone()
    is_tangent = way in ("on_manifold", "edited on")
    wanted = 0.0 if is_tangent else float(layer.weight.grad.norm())
    norm = float(so.clip_grad_norm_(layer.parameters(), math.inf))
    assert norm == pytest.approx(wanted, abs=1e-5)


def test_plain_parameters_are_clipped_as_by_torch(generator):
    ours, theirs = filled(nn.Linear(5, 3), generator), nn.Linear(5, 3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        q.grad = p.grad.clone()
    found = so.clip_grad_norm_(ours.parameters(), 0.1)
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_sparse_plain_gradients_and_missing_ones():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    unused = so.constrain(nn.Linear(3, 3)).weight
    found = so.clip_grad_norm_([unused, *table.parameters()], 1.0)
    torch.testing.assert_close(found, torch.tensor(12.0).sqrt())
    assert unused.grad is None
    torch.testing.assert_close(table.weight.grad.to_dense().norm(), torch.tensor(1.0))
    assert so.clip_grad_norm_([unused], 1.0) == 0


def test_bad_norms():
    weight = so.constrain(nn.Linear(3, 3)).weight
    weight.grad = torch.full((3, 3), math.inf)
    with pytest.raises(ValueError, match="`norm of the gradients` must be finite"):
        so.clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    assert weight.grad.isinf().all()
    assert not so.clip_grad_norm_(weight, 1.0).isfinite()
    with pytest.raises(ValueError, match=r"`max_norm` must be in \(0, inf\), got 0"):
        so.clip_grad_norm_(weight, 0)
    with pytest.raises(TypeError, match=r"got Linear; pass model\.parameters"):
        so.clip_grad_norm_(nn.Linear(2, 2), 1.0)
