"""Rows that a reading leaves plain get bit for bit what torch gives a parameter of their own."""

import copy

import pytest
import torch
from cases import mixed
from torch import nn

import stiefel_opt as so

SGD = [
    {},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"momentum": 0.9, "dampening": 0.4},
    {"nesterov": True, "weight_decay": 0.1},
    {"maximize": True, "foreach": True},
    {"foreach": False, "lr": torch.tensor(0.02)},
    {"fused": True},
]
ADAM = [
    {},
    {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-3},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"amsgrad": True, "maximize": True},
    {"foreach": True},
    {"foreach": False, "lr": torch.tensor(0.02)},
    {"fused": True, "amsgrad": True},
]
CASES = [
    *((so.StiefelSGD, torch.optim.SGD, {"momentum": 0.9, **options}) for options in SGD),
    *((so.StiefelAdam, torch.optim.Adam, options) for options in ADAM),
]
CASES += [
    (so.ProjectedRGD, torch.optim.SGD, {"weight_decay": 0.1}),
    (so.ProjectedRGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
    (so.CayleySGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (so.CayleyAdam, torch.optim.Adam, {"weight_decay": 0.1}),
    (so.CayleyAdam, torch.optim.Adam, {"fused": True, "amsgrad": True}),
]
READINGS = {
    "one range": (so.Stiefel(rows=(2, 8), heads=2), [(0, 2), (8, 11)], 0),
    "two ranges": (so.Stiefel(rows=((6, 10), (0, 3))), [(3, 6), (10, 11)], 0),
    "columns": (so.Stiefel(rows=(0, 8), transposed=True), [(8, 11)], 1),
    "square, no rows of U": (so.Stiefel(rows=(0, 7)), [(7, 11)], 0),
}


ROWS = [(*rule, case) for rule, case in mixed(20, CASES, READINGS)]


@pytest.mark.parametrize(("rule", "torch_rule", "options", "case"), ROWS)
def test_plain_rows_take_the_steps_of_torch(rule, torch_rule, options, case, generator):
    manifold, plain, dim = READINGS[case]
    shape = (11, 7) if dim == 0 else (7, 11)
    fused = so.ManifoldParameter(torch.randn(shape, generator=generator), manifold)
    twin = nn.Parameter(fused.detach().clone())
    parts = [nn.Parameter(part.detach().clone()) for part in manifold.plain_parts(fused)]
    assert [part.size(dim) for part in parts] == [high - low for low, high in plain]
    options = {"lr": 0.02, **options}
    opt = rule([fused], **copy.deepcopy(options))
    torch_opt = torch_rule(parts, **copy.deepcopy(options))
    for step in range(9):
        grad = torch.randn(shape, generator=generator)
        if step == 3:  # a late or missing gradient counts no step
            fused.grad = None
            opt.step()
        fused.grad = grad
        for part, (low, high) in zip(parts, plain, strict=True):
            part.grad = grad.narrow(dim, low, high - low).clone()
        if step == 6:  # and a checkpoint in between changes nothing
            saved = copy.deepcopy(opt.state_dict())
            opt = rule([fused], **copy.deepcopy(options))
            opt.load_state_dict(saved)
        opt.step()
        torch_opt.step()
        for part, (low, high) in zip(parts, plain, strict=True):
            assert torch.equal(fused.narrow(dim, low, high - low), part)
    assert so.orthonormality_error(fused) < 1e-5
    assert not torch.equal(fused, twin)
