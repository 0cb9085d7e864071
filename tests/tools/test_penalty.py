"""The soft constraint: its value, its gradient, and what it does to a model."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from training import train

import stiefel_opt as so
from stiefel_opt import orthonormality_penalty


def model():
    net = nn.Sequential(
        so.constrain(nn.Linear(6, 4)),
        so.constrain(nn.Linear(4, 8), heads=2, scale=2.0),
        so.constrain(nn.Linear(8, 10), rows=((0, 4), (5, 7))),
        so.constrain(nn.Conv2d(2, 3, 2)),
        nn.Linear(3, 2),
    ).double()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    return net


def matrices(net):
    """Every constrained matrix, tall, written out by hand."""
    heads = net[1].weight.reshape(2, 4, 4) / 2
    rows = net[2].weight
    return [
        net[0].weight.T,
        heads[0],
        heads[1],
        rows[:4].T,
        rows[5:7].T,
        net[3].weight.flatten(1).T,
    ]


def test_it_is_the_sum_over_all_constrained_matrices():
    net = model()
    expected = sum((X.T @ X - torch.eye(X.size(1)).double()).square().sum() for X in matrices(net))
    torch.testing.assert_close(orthonormality_penalty(net, 0.3), 0.3 * expected)
    torch.testing.assert_close(orthonormality_penalty(net), 1e-6 * expected)


def test_its_gradient_is_4_lambda_x_times_the_error_and_spares_plain_rows():
    net = model()
    orthonormality_penalty(net, 0.5).backward()
    X = net[0].weight.detach().T
    expected = 4 * 0.5 * X @ (X.T @ X - torch.eye(4).double())
    torch.testing.assert_close(net[0].weight.grad.T, expected)
    assert not net[2].weight.grad[[4, 7, 8, 9]].any()
    assert net[2].weight.grad[[0, 1, 2, 3, 5, 6]].any()
    assert net[4].weight.grad is None


def test_an_optimizer_of_torch_brings_it_to_zero():
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    train(opt, lambda: orthonormality_penalty(net, 1.0), 120)
    assert so.orthonormality_error(net) < 1e-6


def test_it_takes_one_product_and_two_backwards():
    layer = so.constrain(nn.Linear(7, 40))
    with FlopCounterMode(display=False) as forward:
        penalty = orthonormality_penalty(layer)
    with FlopCounterMode(display=False) as backward:
        penalty.backward()
    assert forward.get_total_flops() == 2 * 40 * 7 * 7
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_exact_under_autocast_and_for_half_weights(dtype):
    layer = so.constrain(nn.Linear(16, 32, bias=False).to(dtype))
    with torch.no_grad():
        layer.weight.mul_(1.002)
    exact = layer.weight.detach().double()
    error = exact.T @ exact - torch.eye(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = so.orthonormality_penalty(layer, 1.0)
    value.backward()
    torch.testing.assert_close(value.double(), error.square().sum(), rtol=1e-2, atol=0)
    torch.testing.assert_close(layer.weight.grad.double(), 4 * exact @ error, rtol=2e-2, atol=1e-4)


def test_it_has_curvature_where_entries_are_zero():
    layer = so.constrain(nn.Linear(2, 4, bias=False).double())
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4, 2))
    value = so.orthonormality_penalty(layer, 1.0)
    (gradient,) = torch.autograd.grad(value, layer.weight, create_graph=True)
    (product,) = torch.autograd.grad((gradient * torch.eye(4, 2)).sum(), layer.weight)
    torch.testing.assert_close(product, 8 * torch.eye(4, 2).double())


WRONG = [
    ((nn.Linear(3, 2),), ValueError, "`model` must have a constrained parameter, got a Linear"),
    ((torch.ones(3, 2),), TypeError, "`model` must be a torch.nn.Module, got Tensor"),
    ((nn.Linear(3, 2), -1.0), ValueError, r"`weight` must be in \[0, inf\), got -1.0"),
    ((nn.Linear(3, 2), "1"), TypeError, r"`weight` must be a number in \[0, inf\), got '1'"),
]


def test_wrong_arguments_are_named():
    for arguments, error, message in WRONG:
        with pytest.raises(error, match=message):
            orthonormality_penalty(*arguments)


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode, "frozen"])
def test_a_penalty_that_is_only_logged_changes_no_warning(how):
    net = so.constrain(nn.Linear(6, 4))
    if how == "frozen":
        net.weight.requires_grad_(False)
        orthonormality_penalty(net)
        net.weight.requires_grad_(True)
    else:
        with how():
            orthonormality_penalty(net)
    net(torch.ones(2, 6)).sum().backward()
    with pytest.warns(UserWarning, match="`weight` would not stay orthonormal"):
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    with torch.no_grad():
        net.weight.mul_(2)
        with pytest.warns(UserWarning, match="`weight` of Linear is off the manifold"):
            net(torch.ones(2, 6))
    orthonormality_penalty(net).backward()  # in a loss
    torch.optim.SGD(net.parameters(), lr=0.1).step()
