"""Laws of exp, log, distance, interpolate and mean, and the conventions of other packages."""

import math
import warnings

import pytest
import torch
from cases import in_turn
from torch.autograd import gradcheck, gradgradcheck

import stiefel_opt as so

METRICS = ["euclidean", "canonical"]
BETA = {"euclidean": 1.0, "canonical": 0.5}
DTYPES = [torch.float64, torch.complex128]
SHAPES = [(3, 3), (5, 5), (2, 2), (4, 1), (1, 4), (6, 2), (2, 6), (5, 3), (4, 3), (2, 3, 7, 3)]


def point_of(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return so.random_point(*shape, generator=generator, dtype=dtype)


def tangent_at(point, length, metric="euclidean", seed=1):
    """A tangent vector of this length in the metric for each matrix."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(point.shape, generator=generator, dtype=point.dtype)
    tangent = so.project_tangent(point, vector)
    return tangent * (length / norm_of(point, tangent, metric))[..., None, None]


def norm_of(point, tangent, metric):
    X, xi = (each if each.size(-2) >= each.size(-1) else each.mT for each in (point, tangent))
    inside = torch.linalg.vector_norm(X.mH @ xi, dim=(-2, -1)).square()
    whole = torch.linalg.vector_norm(xi, dim=(-2, -1)).square()
    return (whole - (1 - BETA[metric]) * inside).sqrt()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES))
@pytest.mark.parametrize("length", [0.0, 1e-8, 0.7, 2.5])
def test_the_logarithm_inverts_the_exponential_within_the_injectivity_radius(
    shape, dtype, metric, length
):
    if (shape[-1] == shape[-2] or dtype.is_complex) and metric == "canonical":
        length /= math.sqrt(2)  # turns within the columns are shorter by that
    point = point_of(*shape, dtype=dtype)
    tangent = tangent_at(point, length, metric)
    end = so.exp(point, tangent, metric=metric)
    assert so.orthonormality_error(end) < 1e-14
    torch.testing.assert_close(so.log(point, end, metric=metric), tangent, rtol=0, atol=1e-11)
    wanted = torch.full(shape[:-2], length, dtype=torch.float64)
    away = so.distance(point, end, metric=metric)
    torch.testing.assert_close(away, wanted, rtol=0, atol=1e-11)
    back = so.distance(end, point, metric=metric)
    torch.testing.assert_close(back, away, rtol=0, atol=1e-11)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by torch
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", [(4, 2), (5, 3), (3, 3)])
def test_the_exponential_solves_the_equation_of_geodesics(shape, metric):
    """Euclidean: X'' + X (X'' X')... = 0; canonical: Edelman, Arias & Smith, 2.41."""
    point = point_of(*shape)
    tangent = tangent_at(point, 1.3, metric)

    def at(t):
        return so.exp(point, t * tangent, metric=metric)

    zero = torch.zeros((), dtype=torch.float64)
    for t in (zero, zero + 0.6):
        X, speed = torch.func.jvp(at, (t,), (torch.ones_like(t),))
        second = torch.func.jvp(
            lambda s: torch.func.jvp(at, (s,), (torch.ones_like(s),))[1],
            (t,),
            (torch.ones_like(t),),
        )[1]
        inner = speed.mT @ speed
        if metric == "euclidean":
            rest = second + X @ inner
        else:
            rest = second + speed @ speed.mT @ X
            rest = rest + X @ ((X.mT @ speed) @ (X.mT @ speed) + inner)
        assert rest.abs().max() < 1e-10
    torch.testing.assert_close(torch.func.jvp(at, (zero,), (zero + 1,))[1], tangent)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn([(3, 3), (2, 2), (2, 3), (4, 1), (4, 2)], DTYPES)
)
def test_all_have_their_derivatives(shape, dtype, metric):
    point = point_of(*shape, dtype=dtype)
    tangent = tangent_at(point, 0.8)
    other = so.exp(point, tangent, metric=metric).requires_grad_()
    point.requires_grad_()
    tangent.requires_grad_()
    t = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    is_fast = {"fast_mode": True}
    assert gradcheck(lambda x, v: so.exp(x, v, metric=metric), (point, tangent), **is_fast)
    assert gradgradcheck(lambda x, v: so.exp(x, v, metric=metric), (point, tangent), **is_fast)
    assert gradcheck(lambda x, y: so.log(x, y, metric=metric), (point, other), **is_fast)
    assert gradcheck(lambda x, y: so.distance(x, y, metric=metric), (point, other), **is_fast)
    assert gradcheck(
        lambda x, y, s: so.interpolate(x, y, s, metric=metric), (point, other, t), **is_fast
    )
    assert gradcheck(
        lambda x, y: so.mean([x, y], weights=[1, 2], metric=metric), (point, other), **is_fast
    )


@pytest.mark.parametrize("shape", [(3, 3), (4, 4), (4, 2)])
def test_derivatives_at_no_distance_are_finite(shape):
    point = point_of(*shape).requires_grad_()
    zero = torch.zeros_like(point).requires_grad_()
    assert gradcheck(so.exp, (point, zero))
    other = point.detach().clone().requires_grad_()
    assert gradcheck(so.log, (point, other), atol=1e-4)
    so.distance(point, other).sum().backward()
    assert point.grad.abs().max() == 0


# ---- rotations -----------------------------------------------------------------------------------

HALF_TURNS = {
    "two axes": torch.diag(torch.tensor([-1.0, -1.0, 1.0])),
    "swapped": torch.tensor([[-1.0, 0, 0], [0, 0, 1], [0, 1, 0]]),
    "in four": torch.diag(torch.tensor([-1.0, -1.0, -1.0, -1.0])),
    "in five": torch.diag(torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0])),
}


@pytest.mark.parametrize("name", HALF_TURNS)
def test_half_a_turn_has_a_logarithm_and_says_that_it_is_one_of_several(name):
    rotation = HALF_TURNS[name].double()
    eye = torch.eye(len(rotation), dtype=torch.float64)
    with pytest.warns(UserWarning, match="the geodesic is not unique"):
        tangent = so.log(eye, rotation)
    torch.testing.assert_close(so.exp(eye, tangent), rotation, rtol=0, atol=1e-14)
    torch.testing.assert_close(so.distance(eye, rotation), tangent.norm(), rtol=0, atol=1e-14)
    turn = so.functional.logarithm(rotation)
    torch.testing.assert_close(torch.matrix_exp(turn), rotation, rtol=0, atol=1e-14)
    assert (turn + turn.mT).abs().max() == 0


@pytest.mark.parametrize("metric", METRICS)
def test_opposite_points_of_a_sphere_are_half_a_turn_apart(metric):
    points = point_of(3, 4, 1)
    others = points.clone()
    others[1] = -points[1]
    with pytest.warns(UserWarning, match="in 1 of 3 matrices, the first at index 1"):
        tangent = so.log(points, others, metric=metric)
    torch.testing.assert_close(so.exp(points, tangent, metric=metric), others, rtol=0, atol=1e-14)
    away = so.distance(points, others, metric=metric)
    torch.testing.assert_close(away, torch.tensor([0, math.pi, 0]).double(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-5, 1e-7, 1e-9])
@pytest.mark.parametrize("angle", [0.0, math.pi])
def test_three_by_three_are_exact_near_no_and_near_half_a_turn(gap, angle, dtype):
    """The closed form beside float64 eigenvectors, of the same matrix as the corner of 4 x 4."""
    axis = torch.tensor([0.48, -0.6, 0.64], dtype=torch.float64)
    cross = torch.linalg.cross(axis.expand(3, 3), torch.eye(3, dtype=torch.float64), dim=-1)
    turn = (abs(angle - gap)) * cross.mT
    rotation = torch.matrix_exp(turn).to(dtype)
    found = so.functional.logarithm(rotation)
    eps = torch.finfo(dtype).eps
    again = torch.matrix_exp(found.double()).to(dtype)
    torch.testing.assert_close(again, rotation, rtol=0, atol=20 * eps)
    torch.testing.assert_close(found.norm().double(), turn.norm(), rtol=0, atol=50 * eps)
    if angle == 0.0:
        torch.testing.assert_close(found.double(), turn, rtol=0, atol=10 * eps)


def test_derivatives_of_the_logarithm_near_half_a_turn():
    for size in (3, 4):
        turn = torch.zeros(size, size, dtype=torch.float64)
        turn[0, 1], turn[1, 2] = math.pi - 1e-2, 0.3
        turn = turn - turn.mT
        turn *= (math.pi - 1e-2) * math.sqrt(2) / turn.norm()
        rotation = torch.matrix_exp(turn).requires_grad_()
        assert gradcheck(lambda R: so.functional.logarithm(so.polar(R)), (rotation,), rtol=1e-3)
    three = point_of(3, 3)
    three = (three * torch.linalg.det(three)).requires_grad_()
    assert gradgradcheck(lambda R: so.functional.logarithm(so.polar(R)), (three,))


def test_components_are_infinitely_far_apart_and_no_geodesic_leads_across():
    points = point_of(4, 3, 3)
    points[:, 0] *= torch.linalg.det(points)[:, None]
    others = points.clone()
    others[2, 0] *= -1
    away = so.distance(points, others)
    assert away[2] == math.inf
    assert away[[0, 1, 3]].max() < 1e-7
    for call in (so.log, lambda x, y: so.interpolate(x, y, 0.5), lambda x, y: so.mean([x, y])):
        with pytest.raises(ValueError, match=r"`determinant of other` must be .* index"):
            call(points, others)
    with pytest.raises(ValueError, match="got -1 in 1 of 2 matrices, the first at index 1"):
        so.functional.logarithm(torch.diag_embed(torch.tensor([[1.0, 1], [1, -1]])))


def test_the_metric_of_square_matrices_is_a_factor_and_the_angle_of_rotations():
    points = point_of(5, 3, 3)
    others = so.exp(points, tangent_at(points, 1.7, seed=3))
    trace = (points.mT @ others).diagonal(dim1=-2, dim2=-1).sum(-1)
    angle = ((trace - 1) / 2).acos()
    torch.testing.assert_close(so.distance(points, others, metric="canonical"), angle)
    torch.testing.assert_close(so.distance(points, others), math.sqrt(2) * angle)


# ---- paths and means -----------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (2, 2, 4, 3)])
def test_an_interpolation_has_constant_speed(shape, metric):
    point = point_of(*shape)
    other = so.exp(point, tangent_at(point, 1.2, metric), metric=metric)
    times = torch.tensor([[0.0, 0.25], [0.5, 1.0]], dtype=torch.float64)
    path = so.interpolate(point, other, times, metric=metric)
    assert path.shape == (2, 2, *shape)
    away = so.distance(point, path, metric=metric)
    wanted = 1.2 * times.reshape(2, 2, *[1] * (len(shape) - 2)).expand(away.shape)
    torch.testing.assert_close(away, wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(path[1, 1], other, rtol=0, atol=1e-12)
    assert so.interpolate(point, other, 0.5, metric=metric).shape == shape


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("shape", "dtype"), in_turn([(3, 3), (4, 4), (5, 2), (2, 3, 2)], DTYPES))
def test_a_mean_is_where_tangent_vectors_add_up_to_zero(shape, dtype, metric):
    centre = point_of(*shape, dtype=dtype)
    around = [so.exp(centre, tangent_at(centre, 0.4, seed=s), metric=metric) for s in range(5)]
    weights = [1.0, 2.0, 0.0, 1.0, 3.0]
    mean = so.mean(torch.stack(around), weights=weights, metric=metric)
    logs = torch.stack([so.log(mean, each, metric=metric) for each in around])
    total = torch.einsum("k,k...->...", torch.tensor(weights).to(dtype), logs)
    assert total.abs().max() < 1e-12
    two = so.mean(around[:2], metric=metric)
    half = so.interpolate(around[0], around[1], 0.5, metric=metric)
    torch.testing.assert_close(two, half, rtol=0, atol=1e-12)
    torch.testing.assert_close(so.mean(around[:1]), around[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("size", [3, 4])
def test_a_mean_of_a_batch_keeps_the_component_of_each_matrix(size):
    points = torch.cat(
        [so.random_point(2, size, size, manifold=so.Stiefel(determinant=d)) for d in (1, -1)]
    ).double()
    points = so.project_(points)
    torch.testing.assert_close(so.mean(torch.stack([points, points])), points)


def test_a_mean_of_points_that_are_spread_too_far_is_told_of():
    turns = torch.diag_embed(torch.tensor([[1.0, 1, 1], [-1, -1, 1], [-1, 1, -1], [1, -1, -1]]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mean = so.mean(turns.double())
        except RuntimeError as error:
            assert "no mean was found" in str(error)  # noqa: PT017
        else:  # a stationary point
            assert so.orthonormality_error(mean) < 1e-13


# ---- readings, precision, refusals ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "reading"),
    [
        ((8, 3), so.Stiefel(heads=2, scale=2.0)),
        ((3, 2, 2, 2), so.Stiefel(flatten=True)),
        ((4, 9), so.Stiefel(transposed=True, heads=3)),
        ((9, 3), so.Stiefel(rows=((0, 4), (5, 9)), scale=0.5)),
    ],
)
def test_readings(shape, reading):
    point = so.random_point(*shape, manifold=reading, dtype=torch.float64)
    vector = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tangent = so.project_tangent(point, 0.2 * reading.scale * vector, reading)
    other = so.exp(point, tangent, reading)
    assert so.orthonormality_error(other, reading) < 1e-14
    torch.testing.assert_close(so.log(point, other, reading), tangent, rtol=0, atol=1e-12)
    away = so.distance(point, other, reading)
    parts = zip(reading.parts(point), reading.parts(tangent), strict=True)
    norms = [
        torch.linalg.vector_norm(reading.matrices(t, i), dim=(-2, -1)).reshape(-1)
        for i, (_, t) in enumerate(parts)
    ]
    torch.testing.assert_close(away.reshape(-1), torch.cat(norms), rtol=0, atol=1e-12)
    half = so.interpolate(point, other, 0.5, reading)
    torch.testing.assert_close(half, so.exp(point, tangent / 2, reading), rtol=0, atol=1e-12)
    path = so.interpolate(point, other, torch.tensor([0.0, 0.5, 1.0]), reading)
    torch.testing.assert_close(path[1], half, rtol=0, atol=1e-12)
    middle = so.mean([point, other], reading)
    torch.testing.assert_close(middle, half, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 3, 3), (4, 6, 2)])
def test_other_precisions(shape, dtype):
    wide = point_of(*shape)
    tangent = tangent_at(wide, 0.5)
    near = so.exp(wide, tangent)
    point, other = wide.to(dtype), near.to(dtype)
    eps = torch.finfo(dtype).eps
    found = so.log(point, other)
    assert found.dtype == so.distance(point, other).dtype == dtype
    assert so.mean([point, other]).dtype == so.interpolate(point, other, 0.5).dtype == dtype
    assert so.exp(point, tangent.to(dtype)).dtype == dtype
    assert (found.double() - tangent).abs().max() < 50 * eps
    assert (so.distance(point, other).double() - 0.5).abs().max() < 50 * eps
    assert (so.exp(point, tangent.to(dtype)).double() - near).abs().max() < 50 * eps


def test_shapes_broadcast():
    points, one = point_of(4, 5, 2), point_of(5, 2, seed=9)
    near = so.exp(one, 0.3 * so.log(one, points, metric="canonical"), metric="canonical")
    assert so.distance(near[:, None], near[None], metric="canonical").shape == (4, 4)
    tangents = so.log(one, near, metric="canonical")
    torch.testing.assert_close(so.exp(one, tangents, metric="canonical"), near)


def test_far_points_have_a_canonical_geodesic():
    points, others = point_of(100, 6, 3), point_of(100, 6, 3, seed=1)
    tangent = so.log(points, others, metric="canonical")
    ends = so.exp(points, tangent, metric="canonical")
    torch.testing.assert_close(ends, others, rtol=0, atol=1e-10)


EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: so.log(EYE, EYE, metric="flat"), ValueError, "`metric` must be one of"),
        (lambda: so.log([1], EYE), TypeError, "`point` must be a tensor, got list"),
        (lambda: so.exp(EYE, 1.0), TypeError, "`other` must be a tensor"),
        (lambda: so.log(EYE, EYE.double()), TypeError, "`other` must be of torch.float32"),
        (lambda: so.log(EYE, EYE[:, :2]), ValueError, "`other` must be matrices as the point"),
        (
            lambda: so.log(EYE.expand(2, 3, 3), EYE.expand(4, 3, 3)),
            ValueError,
            "`other` must broadcast with the point",
        ),
        (
            lambda: so.distance(EYE, torch.stack([EYE, 2 * EYE])),
            ValueError,
            r"`other` must be on the manifold, got .* in 1 of 2 matrices, the first at index 1",
        ),
        (lambda: so.log(EYE * torch.nan, EYE), ValueError, "`point` must be on the manifold"),
        (
            lambda: so.mean([EYE, 2 * EYE]),
            ValueError,
            r"`points` must be on the manifold, got .* in 1 of 2 matrices, the first at index 1",
        ),
        (lambda: so.mean([]), TypeError, "`points` must be a tensor"),
        (lambda: so.mean([1.0]), TypeError, "`points` must be tensors"),
        (lambda: so.mean([EYE, EYE[:2]]), ValueError, "`points` must have one shape"),
        (lambda: so.mean([EYE], weights=[1, 2]), ValueError, "`weights` must have one number"),
        (lambda: so.mean([EYE], weights=[-1.0]), ValueError, "`weights` must be finite"),
        (lambda: so.functional.logarithm(EYE[:2]), ValueError, "`point` must be square"),
    ],
)
def test_what_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
