"""Corners where a step could go wrong quietly: long turns, batch-mates, replaced data, overflow."""

import pytest
import torch
from cases import READING_CASES, in_turn, pairwise
from torch import nn
from torch._subclasses import FakeTensorMode

import stiefel_opt as so
from stiefel_opt.numerics.roots import roots

RULES = [so.StiefelSGD, so.StiefelAdam]


def orthonormal(shape, generator, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(shape, generator=generator, dtype=dtype))[0]


@pytest.mark.filterwarnings("ignore:Each of the last")
@pytest.mark.parametrize(
    ("transport", "lr", "dtype"),
    pairwise(["isometric", "projected"], [1.0, 100.0], [torch.float32, torch.float64]),
)
def test_a_force_within_the_span_turns_exactly(transport, lr, dtype, generator):
    """|eta Z| is long here while U is nearly zero: each has to be saturated by itself."""
    start = orthonormal((64, 16), generator, dtype)
    target = start @ orthonormal((16, 16), generator, dtype)
    weight = so.ManifoldParameter(start)
    optimizer = so.StiefelSGD([weight], lr=lr, transport=transport)
    for _ in range(100):
        weight.grad = weight.detach() - target
        optimizer.step()
        assert so.orthonormality_error(weight) < 100 * 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("rule", RULES)
def test_transposed_data_is_another_point(rule, generator):
    first = so.ManifoldParameter(orthonormal((4, 4), generator))
    second = so.ManifoldParameter(first.detach().clone())
    optimizers = rule([first], lr=0.1), rule([second], lr=0.1)
    for step in range(6):
        if step == 3:
            first.data = first.data.mT
            second.data = second.data.mT.clone()
        grad = torch.randn((4, 4), generator=generator, dtype=torch.float64)
        for weight, optimizer in zip((first, second), optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(first.detach(), second.detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("eps", [0.0, 1e-45, 1e-44, 1e-38])
def test_an_eps_that_rounds_to_zero_divides_nothing(eps, generator):
    weight = so.ManifoldParameter(orthonormal((7, 3), generator, torch.float32))
    optimizer = so.StiefelAdam([weight], lr=0.1, eps=eps)
    for _ in range(5):
        weight.grad = torch.randn((7, 3), generator=generator)
        optimizer.step()
    assert weight.isfinite().all()
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize("betas", [(0.9, 0.0), (0.9, 0.1)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_bound_beyond_float32_bounds_nothing(betas, nesterov, generator):
    """beta1^2 > beta2: the first moment may be any number of times the root of the second."""
    weight = so.ManifoldParameter(orthonormal((7, 3), generator, torch.float32))
    optimizer = so.StiefelAdam([weight], lr=0.01, betas=betas, nesterov=nesterov)
    for _ in range(140):
        weight.grad = torch.randn((7, 3), generator=generator)
        optimizer.step()
    assert so.orthonormality_error(weight) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_rounding_is_removed_where_the_count_of_steps_stands_still(rule, generator):
    """float32 counts to 2^24; a write that no version shows is found when rounding is removed."""
    weights = [so.ManifoldParameter(orthonormal((12, 4), generator, torch.float32))]
    weights.append(so.ManifoldParameter(orthonormal((12, 4), generator, torch.float32)))
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


@pytest.mark.parametrize(("rule", "shape"), in_turn(RULES, [(9, 4), (3, 4, 4), (2, 30, 40)]))
def test_without_a_force_nothing_moves(rule, shape, generator):
    weight = so.ManifoldParameter(torch.randn(shape, generator=generator), project=False)
    optimizer = rule([weight], lr=0.1)
    weight.grad = torch.zeros(shape)
    optimizer.step()  # projects the start
    settled = weight.detach().clone()
    for _ in range(20):
        optimizer.step()
    assert torch.equal(weight, settled)


def test_one_head_is_no_head():
    assert so.Stiefel(heads=1) == so.Stiefel()
    assert so.Stiefel(rows=((0, 4), (4, 8)), heads=(1, 1)) == so.Stiefel(rows=((0, 4), (4, 8)))


def test_huge_values_are_projected(generator):
    layer = nn.Linear(4, 9)
    layer.weight.data.mul_(1e20)
    assert so.orthonormality_error(so.constrain(layer).weight) < 1e-5
    value = 1e30 * torch.randn((9, 4), generator=generator)
    weight = so.ManifoldParameter(value, project=False)
    weight.grad = torch.randn((9, 4), generator=generator)
    so.StiefelSGD([weight], lr=0.1).step()
    assert so.orthonormality_error(weight) < 1e-5


def test_a_fake_step_leaves_no_trace():
    with FakeTensorMode():
        roots(torch.zeros(1, 3, 3), 0.1)
    assert roots(torch.zeros(1, 3, 3), 0.1).difference.abs().max() < 1e-7


def test_a_velocity_is_a_number_not_a_graph(generator):
    weight = so.ManifoldParameter(orthonormal((5, 2), generator))
    optimizer = so.StiefelSGD([weight])
    optimizer.set_velocity(weight, torch.zeros(2, 2), torch.ones(5, 2, requires_grad=True).double())
    assert not any(kept.requires_grad for kept in optimizer.state[weight].values())


READABLE = [
    ((12, 4), so.Stiefel()),
    ((4, 12), so.Stiefel()),
    ((3, 12, 4), so.Stiefel()),
    ((12, 12), so.Stiefel(heads=3)),
    ((12, 12), so.Stiefel(heads=3, transposed=True)),
    ((4, 2, 3, 3), so.Stiefel(flatten=True)),
    ((12, 8), so.Stiefel(rows=(2, 8))),
    ((12, 4), so.Stiefel(scale=2.0)),
]


@pytest.mark.parametrize(
    ("shape", "manifold", "rule"), [(*row, rule) for row, rule in in_turn(READABLE, RULES)]
)
def test_the_memory_order_of_a_gradient_does_not_matter(rule, shape, manifold, generator):
    """A gradient may be a transposed tensor, a part of another, or overlap itself."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    parameters = [so.ManifoldParameter(values.clone(), manifold) for _ in range(4)]
    parameters.append(so.ManifoldParameter(values.mT.contiguous().mT.clone(), manifold))
    so.project_(nn.ParameterList(parameters))
    optimizers = [rule([parameter], lr=0.1) for parameter in parameters]
    for _ in range(10):
        grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        whole = torch.randn((3, *shape), generator=generator, dtype=torch.float64)
        whole[1] = grad
        gaps = grad.repeat_interleave(2, dim=-1)[..., ::2]
        grads = grad, grad.mT.contiguous().mT, whole[1], gaps, grad
        for parameter, own, optimizer in zip(parameters, grads, optimizers, strict=True):
            parameter.grad = own
            optimizer.step()
    for parameter in parameters[1:]:
        torch.testing.assert_close(parameter, parameters[0], rtol=0, atol=1e-13)
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        parameter.grad = torch.ones((), dtype=torch.float64).expand(shape)
        optimizer.step()
        torch.testing.assert_close(parameter, parameters[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", RULES)
def test_plain_rows_take_a_conjugated_gradient(rule, generator):
    """torch hands out conjugates as views that have not been worked out yet."""
    values = torch.randn(8, 6, generator=generator, dtype=torch.complex128)
    parameters = [so.ManifoldParameter(values.clone(), so.Stiefel(rows=(2, 6))) for _ in range(2)]
    grad = torch.randn(8, 6, generator=generator, dtype=torch.complex128)
    parameters[0].grad, parameters[1].grad = grad.conj(), grad.conj().resolve_conj()
    for parameter in parameters:
        rule([parameter], lr=0.1).step()
    torch.testing.assert_close(*parameters, rtol=0, atol=0)


@pytest.mark.parametrize("lr", [1e-8, 1e7])
def test_neither_rate_nor_gradient_has_to_be_of_size_one(lr, generator):
    weight = so.ManifoldParameter(orthonormal((128, 64), generator, torch.float32))
    optimizer = so.StiefelSGD([weight], lr=lr, momentum=0.0)
    for _ in range(3):
        weight.grad = torch.randn(128, 64, generator=generator) * 0.02 / lr
        optimizer.step()
    assert not optimizer.skipped_steps()
    assert so.orthonormality_error(weight) < 5e-6


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        *((case, (3, 8, 3)) for case in READING_CASES),
        *in_turn(READING_CASES, [(4, 17, 16), (3, 3, 3), (40, 9, 8), (6, 64, 16)]),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_matrices_move_together_as_each_for_itself(case, shape, generator):
    """Where k = m a batch of matrices could be taken for one of vectors, or the other way."""
    count, *shape = shape
    starts = [orthonormal(shape, generator) for _ in range(count)]
    together = [so.ManifoldParameter(start) for start in starts]
    alone = [so.ManifoldParameter(start.clone()) for start in starts]
    optimizers = [case.optimizer(together), *(case.optimizer([weight]) for weight in alone)]
    for _ in range(12 if count == 3 else 4):
        for weight, own in zip(together, alone, strict=True):
            weight.grad = own.grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.step()
    for weight, own in zip(together, alone, strict=True):
        torch.testing.assert_close(weight, own, rtol=0, atol=1e-12 if count == 3 else 1e-9)
        assert so.orthonormality_error(weight) < 1e-12


def test_an_edit_is_seen_beside_a_neighbour_with_a_large_momentum(generator):
    """In float32 its U, tangent elsewhere, would be taken for rounding of the large one."""
    starts = [orthonormal((50, 5), generator, torch.float32) for _ in range(3)]
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
