"""The published flows against the paper's lines in float64, and on the manifold until overflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import in_turn, mixed, pairwise
from reference_momentum import PublishedAdamReference, PublishedSGDReference
from rule_cases import ADAM, AMSGRAD, MOMENTUM, NORMAL, SKEW, SQUARES, state_at
from torch._subclasses.fake_tensor import FakeTensorMode

from stiefel_opt.methods import published_adam, published_sgd
from stiefel_opt.methods.published import polar_factor_by_sums
from stiefel_opt.numerics.geometry import gram_error, orthonormality_tolerance, random_point

CASES = [  # shape, dtype, rotation, a, momentum
    ((9, 4), torch.float64, "euler", 0.5, 0.9),
    ((9, 4), torch.float64, "euler", 0.0, 0.0),
    ((6, 5), torch.float64, "cayley", -1.0, 0.5),
    ((9, 4), torch.complex128, "expm", 0.3, 0.9),
    ((7, 1), torch.complex128, "euler", 0.8, 0.9),
    ((5, 5), torch.float64, "euler", 0.5, 0.9),
    ((4, 4), torch.complex128, "expm", 0.0, 0.9),
]


def start(shape, dtype, generator, keeps=MOMENTUM, k=3):
    """A point and the state before the first step."""
    point = random_point(k, *shape, generator=generator, dtype=dtype)
    return point, state_at(point, keeps, generator, zero=True)


def gradient(point, generator, scale=1.0):
    return scale * torch.randn(point.shape, dtype=point.dtype, generator=generator)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def stacked(loops, name):
    return torch.tensor(np.stack([getattr(loop, name) for loop in loops]))


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"printed": True}])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sgd_is_algorithm_1(case, options, generator):
    """Each matrix at a learning rate of its own."""
    shape, dtype, rotation, a, momentum = case
    options = {"momentum": momentum, "metric": a, "rotation": rotation, **options}
    point, state = start(shape, dtype, generator)
    lrs = (0.01, 0.02, 0.03)
    loops = [
        PublishedSGDReference(x.numpy(), lr=lr, **options) for x, lr in zip(point, lrs, strict=True)
    ]
    column = torch.tensor(lrs, dtype=torch.float64)[:, None, None]
    for _ in range(12):
        grad = gradient(point, generator)
        for loop, each in zip(loops, grad, strict=True):
            loop.step(each.numpy())
        point, state, _ = published_sgd(point, grad, state, lr=column, **options)
    close(point, stacked(loops, "X"))
    close(state[SKEW], stacked(loops, "Z"))
    if NORMAL in state:
        close(state[NORMAL], stacked(loops, "U"))


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize(("case", "amsgrad"), in_turn([*CASES, CASES[0]], [True, False]), ids=str)
def test_adam_is_algorithm_2(case, amsgrad, printed, generator):
    shape, dtype, rotation, a, _ = case
    options = {"metric": a, "rotation": rotation, "printed": printed}
    point, state = start(shape, dtype, generator, AMSGRAD if amsgrad else ADAM, k=1)
    loop = PublishedAdamReference(point[0].numpy(), lr=0.01, amsgrad=amsgrad, **options)
    for t in range(1, 9):
        grad = gradient(point, generator, 3.0 / t)
        loop.step(grad[0].numpy())
        step = t if t % 2 else torch.full((1, 1, 1), float(t))
        point, state, _ = published_adam(point, grad, state, lr=0.01, step=step, **options)
    close(point, stacked([loop], "X"))
    for name, letter in zip(AMSGRAD, ("Z", "U", "p", "q", "p_max", "q_max"), strict=True):
        if name in state:
            close(state[name], stacked([loop], letter))


WILD = [(0.15, 0.3), (0.1, 1.0), (1e6, 1.0), (0.1, 1e8), (1e12, 1e-3)]


RULES = [
    (published_sgd, (9, 4), {"rotation": "euler"}),
    (published_sgd, (6, 5), {"rotation": "cayley"}),
    (published_sgd, (5, 5), {"rotation": "euler"}),
    (published_sgd, (9, 4), {"rotation": "expm", "nesterov": True}),
    (published_adam, (9, 4), {"rotation": "euler"}),
    (published_adam, (6, 5), {"rotation": "expm"}),
]


@pytest.mark.parametrize(
    ("rule", "wild", "dtype"),
    mixed(18, RULES, WILD, [torch.float32, torch.float64, torch.complex64]),
)
def test_stays_on_the_manifold_until_it_overflows(rule, wild, dtype, generator):
    (rule, shape, options), (lr, scale) = rule, wild
    adaptive = rule is published_adam
    point, state = start(shape, dtype, generator, ADAM if adaptive else MOMENTUM, k=2)
    for step in range(1, 31):
        grad = gradient(point, generator, scale)
        if step % 3 == 0:  # of rank one
            grad = grad[..., :1].expand(grad.shape)
        counted = {"step": step} if adaptive else {}
        point, state, _ = rule(point, grad, state, lr=lr, **options, **counted)
        if not point.isfinite().all():
            assert step > (1 if dtype != torch.float64 else 3)
            break
        assert gram_error(point).max() <= orthonormality_tolerance(point.real.dtype, shape[0])
        assert all(tensor.isfinite().all() for tensor in state.values())


@pytest.mark.parametrize(
    ("dtype", "shape", "digits"),
    pairwise(
        [torch.float32, torch.float64, torch.complex128],
        [(2, 9, 4), (2, 200, 60), (20, 20, 20), (4, 9, 4)],  # k = m: not a batch of vectors
        [0, 3, 12],
    ),
)
def test_polar_factor_by_sums(dtype, shape, digits, generator):
    """Orthonormal to rounding, and off by the condition times rounding, as an SVD's is."""
    k, n, m = shape
    eps = torch.finfo(dtype).eps
    condition = min(10.0**digits, 1e-3 / eps)
    wide = torch.promote_types(dtype, torch.float64)
    left = random_point(k, n, m, generator=generator, dtype=wide)
    right = random_point(k, m, m, generator=generator, dtype=wide)
    values = condition ** torch.linspace(0, 1, m, dtype=torch.float64)
    tall = (left * values) @ right.mH
    point = polar_factor_by_sums(tall.to(dtype))
    assert gram_error(point).max() <= orthonormality_tolerance(point.real.dtype, n)
    assert (point - left @ right.mH).abs().max() <= 10 * eps * condition


@pytest.mark.parametrize("rotation", ["euler", "cayley"])
def test_nothing_is_read(rotation):
    with FakeTensorMode():
        point, skew = torch.empty(2, 9, 4), torch.empty(2, 4, 4)
        state = {SKEW: skew, NORMAL: point.clone()}
        state |= {SQUARES[0]: skew.clone(), SQUARES[1]: point.clone()}
        options = {"lr": 0.1, "rotation": rotation}
        published_sgd(point, point, state, **options)
        found, *_ = published_adam(point, point, state, step=1, **options)
        assert found.shape == point.shape


def test_zero_steps_and_zero_eps_stay(generator):
    point, state = start((9, 4), torch.float32, generator, ADAM)
    grad = torch.zeros_like(point)
    found, *_ = published_adam(point, grad, state, lr=0.1, step=1, eps=0.0)
    torch.testing.assert_close(found, point, rtol=0, atol=1e-6)
    found, *_ = published_sgd(point, gradient(point, generator), state, lr=0.0)
    torch.testing.assert_close(found, point, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"rotation": "polar"}, {"metric": "flat"}])
def test_unknown_choices_are_refused(wrong, generator):
    point, state = start((9, 4), torch.float64, generator)
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be one of"):
        published_sgd(point, point, state, lr=0.1, **wrong)
