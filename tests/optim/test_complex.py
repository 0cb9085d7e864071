"""Complex matrices: the optimizers follow the same loops with conjugate transposes, same laws."""

from __future__ import annotations

import pytest
import torch
from contract import (
    TABLE,
    every_optimizer,
    model,
    on_machines,
    optimizer,
    train,
)
from torch import nn

import stiefel_opt as so
from stiefel_opt.numerics.geometry import (
    random_point,
)

# ---- Hermitian eigenproblems ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lr", "steps", "wide"),
    [
        ("sgd", 0.2, 150, True),
        ("adam", 0.05, 300, False),
    ],
)
def test_leading_eigenvectors_of_a_hermitian_matrix(name, lr, steps, wide, generator):
    """max tr(X'AX); a wide weight holds the transposed X, so that X is conjugated there."""
    n, m = 12, 3
    basis = random_point(n, n, dtype=torch.complex128, generator=generator)
    values = torch.linspace(0.0, 1.0, n, dtype=torch.float64) + (torch.arange(n) >= n - m)
    matrix = (basis * values) @ basis.mH
    start = random_point(n, m, dtype=torch.complex128, generator=generator)
    parameter = so.ManifoldParameter(start.mT.clone() if wide else start)
    opt = optimizer(name, [parameter], lr=lr, weight_decay=0.0)
    for step in range(steps):
        opt.param_groups[0]["lr"] = lr * min(1.0, 3.0 * (1 - step / steps))
        point = parameter.mT if wide else parameter
        loss = -torch.einsum("ij,ik,kj->", point.conj(), matrix, point).real
        (parameter.grad,) = torch.autograd.grad(loss, parameter)
        opt.step()
    point = parameter.detach().mT if wide else parameter.detach()
    expected, vectors = torch.linalg.eigh(matrix)
    found = torch.linalg.eigvalsh(point.mH @ matrix @ point)
    torch.testing.assert_close(found, expected[-m:], rtol=0, atol=1e-6)
    overlap = torch.linalg.svdvals(vectors[:, -m:].mH @ point)
    assert (1 - overlap).abs().max() < 1e-5
    assert so.orthonormality_error(parameter) < 1e-13


# ---- invariants ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@on_machines(cpu="sgd adam-amsgrad", compiled="sgd")
def test_complex_training_stays_on_the_manifold(name):
    net = so.retag(model().to(torch.complex64))
    opt = optimizer(name, net.parameters())
    train(net, opt, 0, 9)
    assert so.orthonormality_error(net) < 5e-6
    for parameter in (net.q.weight, net.up.weight, net.turn.weight):
        for key, value in opt.state[parameter].items():
            real = "exp_avg_sq" in key or key in ("step", "radius_growth")
            assert value.dtype == (torch.float32 if real else torch.complex64), key
    skew, _ = opt.velocity(net.turn.weight)
    assert torch.equal(skew, -skew.mH)


@every_optimizer
def test_plain_rows_move_as_torch_moves_complex_parameters(name, generator):
    start = random_point(8, 5, dtype=torch.complex128, generator=generator)
    mixed = so.ManifoldParameter(start.clone(), so.Stiefel(rows=(3, 8)))
    plain = nn.Parameter(start[:3].clone())
    opt = optimizer(name, [mixed], weight_decay=0.0)
    other = TABLE[name].plain(
        [plain], lr=0.05, **{**TABLE[name].plain_options, "weight_decay": 0.0}
    )
    for _ in range(12):
        mixed.grad = torch.randn(8, 5, dtype=torch.complex128, generator=generator)
        plain.grad = mixed.grad[:3].clone()
        opt.step()
        other.step()
    torch.testing.assert_close(mixed[:3], plain, rtol=0, atol=1e-13)


@on_machines(cpu="sgd adam", as_accelerator="sgd-nesterov")
def test_long_steps_stay_on_the_manifold(name, generator):
    params = [
        so.ManifoldParameter(random_point(*shape, dtype=torch.complex128, generator=generator))
        for shape in ((20, 6), (3, 7), (5, 5), (2, 30, 20))
    ]
    opt = optimizer(name, params, lr=30.0)
    for _ in range(12):
        for p in params:
            p.grad = 100 * torch.randn(p.shape, dtype=torch.complex128, generator=generator)
        opt.step()
    assert max(float(so.orthonormality_error(p)) for p in params) < 1e-13
