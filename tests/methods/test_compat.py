"""Other packages' constructors: their calls run, tensors are read as there, momentum works."""

import copy
import inspect

import pytest
import torch
from cases import in_turn
from torch import nn
from training import train

import stiefel_opt as so
from stiefel_opt.compat import SGDG, AdamG, CaileySGD


def rotations(dtype=torch.float32):
    """Two square rotations, as SpinQuant and Brevitas learn them."""
    return [nn.Parameter(torch.linalg.qr(torch.randn(n, n))[0].to(dtype)) for n in (8, 4)]


def descend(params, opt, targets, steps):
    pairs = [*zip(params, targets, strict=True)]
    return train(opt, lambda: sum((p.float() - aim).square().sum() for p, aim in pairs), steps)


@pytest.mark.parametrize(
    "build",
    [
        lambda params: SGDG(params, lr=0.05, stiefel=True),
        lambda params: SGDG(params, lr=0.05, stiefel=True, momentum=0.5, nesterov=True),
        lambda params: SGDG([{"params": params, "lr": 0.05, "momentum": 0.5, "stiefel": True}], 1),
        lambda params: CaileySGD(params, lr=0.05, stiefel=True),
        lambda params: CaileySGD(params, lr=0.05, stiefel=True, dtype=None),
        lambda params: CaileySGD(params, lr=0.05, stiefel=True, dtype="float32", iters=3),
        lambda params: CaileySGD(params, lr=0.05, stiefel=True, dtype="float"),
        lambda params: AdamG([{"params": params, "momentum": 0.5, "stiefel": True}], lr=0.1),
        lambda params: AdamG(params, lr=0.1, stiefel=True),
    ],
)
def test_their_calls_run_and_descend(build):
    params = rotations()
    turns = [torch.randn(p.shape) / 5 for p in params]
    targets = [
        p.detach() @ torch.linalg.matrix_exp(turn - turn.T)
        for p, turn in zip(params, turns, strict=True)
    ]
    opt = build(params)
    losses = descend(params, opt, targets, 40)
    assert losses[-1] < 0.5 * losses[0]
    for p in params:
        assert so.orthonormality_error(p) < 2e-6


def test_the_positional_order_is_theirs():
    """lr, momentum, dampening, weight_decay, nesterov, stiefel, then what each adds."""
    common = ["lr", "momentum", "dampening", "weight_decay", "nesterov"]
    expected = {
        SGDG: [*common, "stiefel", "omega", "grad_clip"],
        CaileySGD: [*common, "stiefel", "iters", "grad_clip", "dtype"],
        AdamG: [*common, "grassmann", "beta2", "epsilon", "omega", "grad_clip", "stiefel"],
    }
    for rule, names in expected.items():
        assert list(inspect.signature(rule).parameters)[1:] == names


@pytest.mark.parametrize("rule", [SGDG, AdamG])
def test_tensors_are_read_as_rows_and_the_rest_moves_by_sgd(rule):
    """C_out x (C_in k k) with C_out <= C_in k k is constrained; more rows, and vectors, are not."""
    shapes = [(4, 3, 3, 3), (6, 6), (10, 4), (5,)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    twins = [nn.Parameter(p.detach().clone()) for p in params[2:]]
    group = {"params": params, "lr": 0.1, "momentum": 0.9, "nesterov": True, "stiefel": True}
    opt = rule([group], lr=0.1)
    torch_opt = torch.optim.SGD(twins, lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape)
        for p, twin in zip(params[2:], twins, strict=True):
            twin.grad = p.grad.clone()
        opt.step()
        torch_opt.step()
    assert so.orthonormality_error(params[0].flatten(1)) < 2e-6
    assert so.orthonormality_error(params[1]) < 2e-6
    for p, twin in zip(params[2:], twins, strict=True):
        assert torch.equal(p, twin)
    assert all(g["lr"] == 0.1 for g in opt.param_groups)


@pytest.mark.parametrize("rule", [SGDG, CaileySGD, AdamG])
def test_groups_without_the_flag_move_by_sgd(rule):
    params = rotations()
    twins = copy.deepcopy(params)
    opt = rule(params, lr=0.1, momentum=0.9, weight_decay=0.1)
    torch_opt = torch.optim.SGD(twins, lr=0.1, momentum=0.9, weight_decay=0.1)
    for p, twin in zip(params, twins, strict=True):
        p.grad = torch.randn(p.shape)
        twin.grad = p.grad.clone()
    for _ in range(3):
        opt.step()
        torch_opt.step()
    assert all(map(torch.equal, params, twins))


@pytest.mark.parametrize("rule", [SGDG, CaileySGD])
def test_they_are_cayley_sgd_with_momentum(rule):
    params, twins = rotations(), rotations()
    for p, twin in zip(params, twins, strict=True):
        twin.data.copy_(p)
    opt = rule(params, lr=0.1, momentum=0.9, stiefel=True)
    other = so.CayleySGD(twins, lr=0.1, momentum=0.9, steps=5, stiefel=True)
    for _ in range(3):
        for p, twin in zip(params, twins, strict=True):
            p.grad = torch.randn(p.shape)
            twin.grad = p.grad.clone()
        opt.step()
        other.step()
    for p, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(p, twin, rtol=0, atol=1e-6)
    assert all(opt.state[p]["momentum_skew"].any() for p in params)


@pytest.mark.parametrize("copied", [False, True])
def test_rotations_in_bfloat16_are_moved_in_float32(copied):
    """Steps far below the rounding of bfloat16 add up; the parameter is their rounded sum."""
    params = rotations(torch.bfloat16)
    opt = CaileySGD(params, lr=1e-3, stiefel=True, dtype="float32")
    targets = [torch.linalg.qr(torch.randn(p.shape))[0] for p in params]
    before = [p.detach().clone() for p in params]
    losses = descend(params, opt, targets, 10)
    assert all(p is own for p, own in zip(params, opt.param_groups[0]["params"], strict=True))
    if copied:
        params, opt = copy.deepcopy((params, opt))
    losses += descend(params, opt, targets, 90)
    assert losses[-1] < losses[0]
    opt.zero_grad()
    for p, old in zip(params, before, strict=True):
        assert p.grad is None
        assert not torch.equal(p, old)
    for p in params:
        master = opt.state[p]["master"]
        assert master.dtype is torch.float32
        assert torch.equal(p, master.to(torch.bfloat16))
        assert so.orthonormality_error(master, so.Stiefel()) < 2e-6


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (SGDG, {"omega": 0.1}, "`omega` must be 0, got 0.1; it was never used; add so.ortho"),
        (SGDG, {"grad_clip": 1.0}, "`grad_clip` must be None, got 1.0; it was never used; call"),
        (CaileySGD, {"grad_clip": 1.0}, "`grad_clip` must be None, got 1.0"),
        (CaileySGD, {"dtype": "floating"}, "`dtype` must be None or 'float32' for .*'floating'"),
        (CaileySGD, {"dtype": "float64"}, "`dtype` must be .* got 'float64'; convert the param"),
        (CaileySGD, {"dtype": "bfloat16"}, "`dtype` must be .* got 'bfloat16'; convert the param"),
        (CaileySGD, {"iters": -1}, "`steps` must be at least 0, got -1"),
        (AdamG, {"grassmann": True}, "`grassmann` must be False, got True; set stiefel=True"),
        (AdamG, {"beta2": 1.0}, r"`beta2` must be in \[0, 1\), got 1.0"),
        (AdamG, {"momentum": 1.5}, r"`momentum` must be in \[0, 1\), got 1.5"),
        (AdamG, {"epsilon": -1.0}, r"`epsilon` must be in \[0, inf\), got -1.0"),
    ],
)
def test_what_was_ignored_is_refused(rule, options, message):
    with pytest.raises(ValueError, match=message):
        rule(rotations(), lr=0.1, stiefel=True, **options)


@pytest.mark.parametrize(("rule", "stiefel"), in_turn([SGDG, AdamG, CaileySGD], [None, True]))
def test_a_tag_decides_how_its_parameter_is_read(rule, stiefel):
    heads = so.constrain(nn.Linear(6, 12, bias=False), heads=4)
    tall = so.constrain(nn.Linear(3, 6, bias=False))
    plain = nn.Parameter(torch.ones(3))
    options = {} if stiefel is None else {"stiefel": stiefel}
    opt = rule([heads.weight, plain, tall.weight], lr=0.1, momentum=0.9, **options)
    for _ in range(3):
        for parameter in (heads.weight, plain, tall.weight):
            parameter.grad = torch.ones_like(parameter).cumsum(0)
        opt.step()
    assert so.orthonormality_error(heads.weight) < 1e-6
    assert so.orthonormality_error(tall.weight) < 1e-6
    assert not torch.equal(plain, torch.ones(3))


@pytest.mark.parametrize("rule", [SGDG, AdamG, CaileySGD])
def test_a_refused_group_leaves_no_trace(rule):
    first, second = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(7))
    opt, before = rule([second], lr=0.1), first.detach().clone()
    with pytest.raises(ValueError, match="appear once"):
        opt.add_param_group({"params": [first, second], "stiefel": True})
    assert len(opt.param_groups) == 1
    assert not hasattr(first, "manifold")
    assert torch.equal(first, before)
    opt.add_param_group({"params": [first], "stiefel": True})
    assert len(opt.param_groups) == 2
    assert so.orthonormality_error(first) < 1e-6


def test_no_parameter_is_listed_twice():
    weight = nn.Parameter(torch.randn(3, 5).bfloat16())
    groups = [{"params": [weight]}, {"params": [weight]}]
    with pytest.raises(ValueError, match="appear once, got it twice"):
        CaileySGD(groups, lr=0.1, stiefel=True, dtype="float32")
    with pytest.raises(TypeError, match="`param_group` must be a dict, got list"):
        CaileySGD([weight], lr=0.1, stiefel=True).add_param_group([weight])


@pytest.mark.parametrize("stiefel", [None, True, False, so.Stiefel()])
@pytest.mark.parametrize("rule", [SGDG, AdamG, CaileySGD])
def test_a_group_takes_its_parameters_from_an_iterator(rule, stiefel):
    params = rotations()
    opt = rule([{"params": iter(params), "stiefel": stiefel}], lr=0.1)
    listed = [p for group in opt.param_groups for p in group["params"]]
    assert list(map(id, listed)) == list(map(id, params))
