"""Laws of the manifold: what a tangent vector, a gradient, a nearest and a random point must be."""

from functools import partial

import numpy as np
import pytest
import scipy.linalg
import torch
from cases import in_turn
from torch.autograd import gradcheck, gradgradcheck

import stiefel_opt as so
from stiefel_opt.numerics.geometry import (
    RETRACTIONS,
    gram_error,
    orthonormality_tolerance,
    polar_factor,
    random_point,
    riemannian_gradient,
    tangent_part,
)

SHAPES = [(7, 3), (5, 5), (4, 1), (3, 6, 2), (2, 3, 8, 4), (200, 60)]
every_shape = pytest.mark.parametrize(
    ("shape", "dtype"),
    [*in_turn(SHAPES, [torch.float64]), *in_turn(SHAPES[:4], [torch.complex128])],
)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def point_of(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return random_point(*shape, generator=generator, dtype=dtype)


def inner(left, right):
    return (left.conj() * right).real.sum(dim=(-2, -1))


def test_tolerance_follows_dtype_and_size():
    assert orthonormality_tolerance(torch.float64, 100) == 100 * torch.finfo(torch.float64).eps
    assert orthonormality_tolerance(torch.float32, 4) == 20 * torch.finfo(torch.float32).eps


def test_gram_error_is_the_largest_entry_for_each_matrix():
    point = point_of(3, 6, 2)
    point[1, :, 0] *= 2.0
    error = gram_error(point)
    assert error.shape == (3,)
    assert error[0] < 1e-14
    assert error[2] < 1e-14
    assert error[1] == pytest.approx(3.0)


@every_shape
def test_projection_is_tangent_idempotent_and_orthogonal(shape, dtype):
    point = point_of(*shape, dtype=dtype)
    vector, other = (gaussian(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    tangent = tangent_part(point, vector)
    product = point.mH @ tangent
    assert (product + product.mH).abs().max() < 1e-13
    torch.testing.assert_close(tangent_part(point, tangent), tangent, rtol=0, atol=1e-13)
    inside = point.mH @ other
    for along in (tangent_part(point, other), point @ (inside - inside.mH)):
        assert inner(vector - tangent, along).abs().max() < 1e-11


@every_shape
@pytest.mark.parametrize("a", [0.5, 0.0, -1.0, 0.9])
def test_riemannian_gradient_represents_the_differential(shape, dtype, a):
    """For every tangent xi: <grad, xi> in the metric is the directional derivative tr(G'xi)."""
    point, grad = point_of(*shape, dtype=dtype), gaussian(*shape, seed=1, dtype=dtype)
    direction = tangent_part(point, gaussian(*shape, seed=2, dtype=dtype))
    gradient = riemannian_gradient(point, grad, a=a)
    product = point.mH @ gradient
    assert (product + product.mH).abs().max() < 1e-12
    weighted = gradient - a * point @ (point.mH @ gradient)
    torch.testing.assert_close(
        inner(weighted, direction), inner(grad, direction), rtol=1e-10, atol=1e-10
    )


def test_riemannian_gradient_refuses_a_metric_that_is_none():
    with pytest.raises(ValueError, match=r"`a` must be below 1, got 1.0"):
        riemannian_gradient(point_of(4, 2), gaussian(4, 2), a=1.0)


@every_shape
def test_polar_factor_is_scipys(shape, dtype):
    matrices = gaussian(*shape, dtype=dtype)
    flat = matrices.reshape(-1, *shape[-2:]).numpy()
    expected = np.stack([scipy.linalg.polar(matrix)[0] for matrix in flat]).reshape(shape)
    np.testing.assert_allclose(polar_factor(matrices).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float64, 1e-6), (torch.float32, 1e-3)])
def test_polar_factor_of_an_ill_conditioned_matrix_is_orthonormal_to_rounding(dtype, ratio):
    spectrum = torch.logspace(0, np.log10(ratio), 60, dtype=dtype)
    left, right = point_of(200, 60, dtype=dtype), point_of(60, 60, seed=1, dtype=dtype)
    nearest = polar_factor(left * spectrum @ right.mT)
    assert gram_error(nearest) < orthonormality_tolerance(dtype, 200)
    expected = left.double() @ right.double().mT
    error = (nearest.double() - expected).abs().max()
    assert error < 10 * torch.finfo(dtype).eps / ratio  # the condition number of the polar factor


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn(
        [(384, 32), (300, 300), (200, 200), (1000, 5), (50, 16, 16)], [torch.float32, torch.float64]
    ),
)
def test_polar_factor_beats_the_tolerance_tenfold(shape, dtype):
    error = gram_error(polar_factor(gaussian(*shape, dtype=dtype))).max()
    assert error < orthonormality_tolerance(dtype, shape[-2]) / 10


@pytest.mark.parametrize("rank", [0, 1])
def test_polar_factor_of_a_deficient_matrix_is_a_nearest_one(rank):
    matrix = gaussian(6, 1) @ gaussian(1, 3, seed=1) * rank
    nearest = polar_factor(matrix)
    assert gram_error(nearest) < 1e-14
    distance = (nearest - matrix).norm()
    singular_values = torch.linalg.svdvals(matrix)
    assert distance == pytest.approx((singular_values - 1).norm().item(), rel=1e-12)


def test_polar_factor_refuses_wide_matrices():
    with pytest.raises(ValueError, match=r"`matrices` must be tall, got shape \(2, 3\)"):
        polar_factor(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn(SHAPES, [torch.float32, torch.float64, torch.complex64])
)
def test_random_point_is_orthonormal_and_reproducible(shape, dtype):
    point = point_of(*shape, dtype=dtype)
    assert point.shape == shape
    assert point.dtype == dtype
    assert gram_error(point).max() < orthonormality_tolerance(dtype, shape[-2])
    assert torch.equal(point, point_of(*shape, dtype=dtype))
    assert not torch.equal(point, point_of(*shape, seed=1, dtype=dtype))
    wide = point_of(*shape[:-2], shape[-1], shape[-2], dtype=dtype)
    assert wide.is_contiguous()
    assert gram_error(wide if wide.size(-2) > wide.size(-1) else wide.mH).max() < 1e-5


def test_random_point_is_uniform():
    """Moments of the trace on O(3): 0, 1, 0, 3 for tr Q and 1 for tr Q^2 (bounds: 4 deviations).

    Without the sign of diag(R) the mean of tr Q is far off.
    """
    draws = point_of(20000, 3, 3, seed=5)
    trace = draws.diagonal(dim1=-2, dim2=-1).sum(-1)
    square = (draws @ draws).diagonal(dim1=-2, dim2=-1).sum(-1)
    for values, expected in [(trace, 0), (trace**2, 1), (trace**3, 0), (trace**4, 3), (square, 1)]:
        deviation = values.std().item() / len(values) ** 0.5
        assert abs(values.mean().item() - expected) < 4 * deviation


def test_random_point_is_invariant_under_rotation_of_its_rows():
    """E[x x'] of a column is I / n: no direction is preferred."""
    column = point_of(20000, 4, 2, seed=6)[..., 0]
    covariance = column.mT @ column / len(column)
    assert (covariance - torch.eye(4, dtype=torch.float64) / 4).abs().max() < 0.01


def test_random_unitary_matrices_are_uniform():
    """Entries have mean square 1/n, and phases of all directions: not so with LAPACK's own R."""
    points = point_of(20_000, 3, 3, dtype=torch.complex128)
    assert (points.abs().square().mean(0) - 1 / 3).abs().max() < 0.01
    assert points.mean(0).abs().max() < 0.02
    trace = points.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert abs(trace.abs().square().mean() - 1) < 0.05
    assert trace.square().mean().abs() < 0.05


@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (3, 2, 0)])
def test_random_point_refuses_what_is_no_matrix(shape):
    with pytest.raises(ValueError, match="`shape` must be at least two positive sizes"):
        random_point(*shape)


# ---- retractions ---------------------------------------------------------------------------------

STORED = [(3, 3), (4, 2), (2, 4), (2, 3, 2), (1, 2, 2, 2)]
DTYPES = [torch.float64, torch.complex128]


def stored_point(*shape, dtype=torch.float64):
    return so.random_point(*shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def stored_tangents(point):
    """None, along which the singular values of X + xi are equal, and a random one."""
    vector = gaussian(*point.shape, seed=1, dtype=point.dtype)
    return torch.zeros_like(point), so.project_tangent(point, vector)


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize(("shape", "dtype"), in_turn(STORED, DTYPES))
def test_a_retraction_has_its_derivatives_at_every_tangent(shape, dtype, retraction):
    def end(point, tangent):
        return so.retract(point, tangent, retraction=retraction)

    point = stored_point(*shape, dtype=dtype)
    for tangent in stored_tangents(point):
        pair = point.clone().requires_grad_(), tangent.requires_grad_()
        assert gradcheck(end, pair, check_batched_grad=True)
        assert gradgradcheck(end, pair, fast_mode=retraction != "polar" or dtype.is_complex)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
@pytest.mark.parametrize("in_dims", [(0, 0), (None, 0), (0, None)])
def test_points_and_vectors_are_mapped_one_or_both(shape, in_dims):
    """``torch.vmap`` over points, vectors or both is the loop over them."""
    points = stored_point(3, *shape)
    vectors = so.project_tangent(points, gaussian(3, *shape, seed=1))
    pairs = [(points, in_dims[0]), (vectors, in_dims[1])]
    given = [batch if dim == 0 else batch[0] for batch, dim in pairs]
    one_by_one = [[batch[0 if dim is None else i] for batch, dim in pairs] for i in range(3)]
    functions = [so.project_tangent]
    functions += [partial(so.retract, retraction=retraction) for retraction in RETRACTIONS]
    for function in functions:
        mapped = torch.vmap(function, in_dims)(*given)
        wanted = torch.stack([function(*pair) for pair in one_by_one])
        torch.testing.assert_close(mapped, wanted, rtol=0, atol=1e-14)
        assert mapped.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_polar_retraction_has_derivatives_of_any_order(dtype):
    """Of third order at a tangent of zero, against those beside it."""
    point = stored_point(4, 3, dtype=dtype)
    direction, weight = (gaussian(4, 3, seed=seed, dtype=dtype) for seed in (1, 2))

    def third(offset):
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = (so.retract(point, offset * weight + t * direction) * weight.conj()).real.sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value, t, create_graph=True)
        return value.item()

    assert third(0.0) == pytest.approx(third(1e-7), rel=1e-4)


def test_a_retraction_of_what_is_not_finite_is_refused_by_name():
    points = so.random_point(3, 4, 2)
    tangents = torch.zeros(3, 4, 2)
    tangents[1, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"`point \+ tangent` must be finite, .* 1 of 3 matrices"):
        so.retract(points, tangents)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch
def test_the_polar_retraction_is_mapped_and_traced():
    point = stored_point(5, 3)

    def slope(tangent):
        return torch.func.grad(lambda vector: (so.retract(point, vector) ** 3).sum())(tangent)

    zero, tangent = stored_tangents(point)
    several = torch.stack([zero, tangent])
    expected = torch.stack([slope(zero), slope(tangent)])
    torch.testing.assert_close(torch.vmap(slope)(several), expected)
    leaf = tangent.clone().requires_grad_()
    traced = torch.compile(lambda v: so.retract(point, v), backend="aot_eager", fullgraph=True)
    (traced(leaf) ** 3).sum().backward()
    torch.testing.assert_close(leaf.grad, expected[1])


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0.0, 1.0, 1e3])
def test_a_retraction_in_half_precision_is_that_of_float32_rounded(length, dtype, retraction):
    point = stored_point(6, 4, dtype=torch.float32).to(dtype)
    tangent = (length * gaussian(6, 4, seed=1, dtype=torch.float32)).to(dtype)
    end = so.retract(point, tangent, retraction=retraction)
    wide = so.retract(point.float(), tangent.float(), retraction=retraction)
    assert torch.equal(end, wide.to(dtype))
    assert end.dtype == dtype


@pytest.mark.parametrize("retraction", ["polar", "qr"])
@pytest.mark.parametrize("length", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_retraction_of_any_length_is_orthonormal_to_rounding(length, dtype, retraction):
    point = stored_point(20, 6, dtype=dtype)
    tangent = length * stored_tangents(point)[1]
    end = so.retract(point, tangent, retraction=retraction)
    assert gram_error(end) < orthonormality_tolerance(dtype, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("retraction", [*RETRACTIONS, "of rules"])
@pytest.mark.parametrize(("shape", "size"), [((9, 5), 0.4), ((7, 7), 0.4), ((30, 1), 1.0)])
def test_hundreds_of_retractions_multiply_no_rounding(shape, size, retraction, dtype):
    """Towards a fixed matrix: the part of it that is normal to the manifold does not grow in X."""
    point = point_of(*shape, dtype=dtype)
    target = gaussian(*shape, seed=1, dtype=dtype)
    for _ in range(400):
        tangent = tangent_part(point, size * target)
        if retraction == "of rules":
            point = so.functional.retract(point[None], tangent[None])[0][0]
        else:
            point = so.retract(point, tangent, retraction=retraction)
    assert gram_error(point) < orthonormality_tolerance(dtype, shape[0])
