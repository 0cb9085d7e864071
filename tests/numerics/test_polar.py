"""Laws of so.polar: nearest points, rotations too, and their derivatives."""

import warnings

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import stiefel_opt as so

SHAPES = [(3, 3), (4, 2), (2, 4), (2, 3, 2), (2, 2, 3, 3), (1, 1)]
SQUARE = [(3, 3), (1, 1), (5, 2, 2), (2, 2, 4, 4)]


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_values(values, seed=0):
    """A square matrix with these singular values, the sign of the last one that of its det."""
    size = len(values)
    generator = torch.Generator().manual_seed(seed)
    left, right = so.random_point(2, size, size, generator=generator, dtype=torch.float64)
    right[0] *= torch.linalg.det(left @ right).sign()
    return left * torch.tensor(values, dtype=torch.float64) @ right


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_scipys_with_its_factor(shape, dtype):
    tensor = gaussian(*shape, dtype=dtype)
    point, factor = so.polar(tensor, return_factor=True)
    side = "right" if shape[-2] >= shape[-1] else "left"
    for own in np.ndindex(shape[:-2]):
        u, p = scipy.linalg.polar(tensor[own].numpy(), side=side)
        torch.testing.assert_close(point[own], torch.from_numpy(u), rtol=0, atol=1e-12)
        torch.testing.assert_close(factor[own], torch.from_numpy(p), rtol=0, atol=1e-12)
    product = point @ factor if side == "right" else factor @ point
    torch.testing.assert_close(product, tensor, rtol=0, atol=1e-13)


@pytest.mark.parametrize("determinant", [1, -1])
@pytest.mark.parametrize("shape", SQUARE)
def test_with_a_determinant_no_other_rotation_is_nearer(shape, determinant):
    tensor = gaussian(*shape)
    point, factor = so.polar(tensor, determinant=determinant, return_factor=True)
    signs = torch.full(shape[:-2], float(determinant), dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.det(point), signs)
    torch.testing.assert_close(point @ factor, tensor, rtol=0, atol=1e-13)
    values = torch.linalg.svdvals(tensor)
    values[..., -1] *= torch.linalg.det(tensor).sign() * determinant
    nearest = (values - 1).norm(dim=-1)  # by von Neumann's trace inequality
    distance = torch.linalg.vector_norm(tensor - point, dim=(-2, -1))
    torch.testing.assert_close(distance, nearest)
    kept = torch.linalg.det(tensor).sign() == determinant
    torch.testing.assert_close(point[kept], so.polar(tensor)[kept])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_has_its_derivatives(shape, dtype):
    tensor = gaussian(*shape, dtype=dtype).requires_grad_()
    assert gradcheck(so.polar, (tensor,), check_batched_grad=True)
    assert gradcheck(lambda a: so.polar(a, return_factor=True), (tensor,))
    assert gradgradcheck(so.polar, (tensor,), fast_mode=True)


@pytest.mark.parametrize("determinant", [None, 1, -1])
@pytest.mark.parametrize(
    "values",
    [(2.0, 2.0, 2.0), (1.0, 1.0, -0.5), (3.0, 1.0, 0.0), (3.0, 1e-3, 0.0), (2.0, 1.0, -1 + 1e-3)],
    ids=str,
)
def test_it_has_its_derivatives_where_singular_values_meet(values, determinant):
    """Against differences, where there is a derivative; elsewhere finite."""
    matrix = with_values(values)
    sums = [values[-2] + values[-1] * (determinant or 1), 2 * abs(values[-1])]
    if determinant is None:
        sums[0] = values[-2] + abs(values[-1])
    exists = min(sums[:1] if determinant else sums) > 1e-9
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        leaf = matrix.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(
            (so.polar(leaf, determinant=determinant) * gaussian(3, 3, seed=1)).sum(), leaf
        )
        assert gradient.isfinite().all()
    assert bool(caught) == (not exists)
    if exists:
        leaf = matrix.clone().requires_grad_()
        step = 1e-6 * min(1.0, min(sums))
        assert gradcheck(
            lambda a: so.polar(a, determinant=determinant), (leaf,), eps=step or 1e-9, rtol=1e-4
        )


@pytest.mark.parametrize("determinant", [None, 1])
def test_a_matrix_without_a_unique_nearest_point_is_told_of(determinant):
    batch = gaussian(2, 3, 4, 4)
    batch[1, 0] = 0
    batch[1, 2] = gaussian(4, 1) @ gaussian(1, 4)
    leaf = batch.clone().requires_grad_()
    with pytest.warns(UserWarning, match=r"not unique in 2 of 6 matrices, .* index \(1, 0\)"):
        point = so.polar(leaf, determinant=determinant)
    assert so.orthonormality_error(point) < 1e-14
    (point * gaussian(2, 3, 4, 4, seed=1)).sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad[1, 0].abs().max() == 0
    flat = with_values((3.0, 1.0, 0.0)).reshape(1, 3, 3)  # Kabsch: points in a plane
    so.polar(flat, determinant=1)  # unique, no warning
    with pytest.warns(UserWarning, match="in 1 of 1 matrices, the first at index 0"):
        so.polar(flat)


@pytest.mark.parametrize("matrix", [torch.zeros(4, 3), torch.ones(4, 3)], ids=["zero", "rank 1"])
def test_initial_values_without_a_unique_nearest_point_are_told_of(matrix):
    with pytest.warns(UserWarning, match=r"the nearest point to `.*` is not unique"):
        so.ManifoldParameter(matrix)


def test_readings_scale_and_plain_rows():
    weight = gaussian(7, 3)
    reading = so.Stiefel(heads=2, rows=(0, 6), scale=2.0)
    leaf = weight.clone().requires_grad_()
    point = so.polar(leaf, reading)
    torch.testing.assert_close(point, so.project_(weight.clone(), reading), rtol=0, atol=1e-14)
    assert gradcheck(lambda a: so.polar(a, reading), (leaf,))
    heads = so.Stiefel(heads=2, scale=0.5)
    point, factor = so.polar(weight[:6], heads, return_factor=True)
    product = point.unflatten(0, (2, 3)) @ factor
    torch.testing.assert_close(product.flatten(0, 1), weight[:6], rtol=0, atol=1e-14)
    assert (torch.linalg.det(so.polar(weight[:6], heads, determinant=-1)[:3] * 2) < 0).all()
    tagged = so.ManifoldParameter(gaussian(3, 4, 2), so.Stiefel(flatten=True))
    torch.testing.assert_close(so.polar(2 * tagged.detach(), tagged.manifold), tagged.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions(dtype):
    tensor = gaussian(3, 5, 5).to(dtype).requires_grad_()
    point, factor = so.polar(tensor, determinant=1, return_factor=True)
    point.sum().backward()
    assert point.dtype == factor.dtype == tensor.grad.dtype == dtype
    wide = so.polar(tensor.detach().double(), determinant=1)
    eps = torch.finfo(dtype).eps
    assert (point.double() - wide).abs().max() < 100 * eps


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch
def test_it_is_mapped_and_traced():
    tensor = gaussian(4, 5, 3)
    torch.testing.assert_close(torch.vmap(so.polar)(tensor), so.polar(tensor), rtol=0, atol=1e-14)
    bad = tensor.clone()
    bad[2, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="in 1 of 4 matrices, the first at index 2"):
        torch.vmap(so.polar)(bad)
    traced = torch.compile(so.polar, backend="aot_eager", fullgraph=True)
    leaf, same = tensor.clone().requires_grad_(), tensor.clone().requires_grad_()
    (traced(leaf) ** 3).sum().backward()
    (so.polar(same) ** 3).sum().backward()
    torch.testing.assert_close(leaf.grad, same.grad)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: so.polar([1]), TypeError, "`tensor` must be a tensor, got list"),
        (lambda: so.polar(torch.ones(3)), ValueError, "`tensor` must have at least 2 dimensions"),
        (
            lambda: so.polar(torch.eye(2), determinant=2),
            ValueError,
            "`determinant` must be 1, -1 or None, got 2",
        ),
        (
            lambda: so.polar(torch.eye(2), determinant=True),
            ValueError,
            "`determinant` must be 1, -1 or None, got True",
        ),
        (
            lambda: so.polar(torch.ones(2, 3), determinant=1),
            ValueError,
            "where matrices of `tensor` are not square, got 1; they are 2 x 3",
        ),
        (
            lambda: so.polar(torch.eye(2, dtype=torch.complex64), determinant=1),
            ValueError,
            "for the complex matrices of `tensor`, got 1; theirs is a phase",
        ),
        (
            lambda: so.polar(torch.full((3, 2, 2), torch.inf)),
            ValueError,
            "infinities or NaN in 3 of 3 matrices, the first at index 0",
        ),
        (
            lambda: so.polar(torch.eye(2), so.Stiefel(rows=(0, 2)), return_factor=True),
            ValueError,
            "`return_factor` must be False for a reading with rows",
        ),
        (lambda: so.polar(torch.eye(2), return_factor=1), TypeError, "`return_factor` must be"),
    ],
)
def test_what_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_project_tells_of_matrices_without_a_unique_nearest_point():
    batch = gaussian(5, 3, 2)
    batch[3] = 0
    with pytest.warns(UserWarning, match="not unique in 1 of 5 matrices, the first at index 3"):
        so.project_(batch)
    assert so.orthonormality_error(batch) < 1e-14


def test_project_refuses_what_autograd_has_computed_and_takes_views_of_leaves():
    leaf = gaussian(6, 3).requires_grad_()
    for result in (leaf * 1.0, (leaf * 1.0)[:3]):
        with pytest.raises(ValueError, match=r"autograd has computed, .*; call so\.polar\(x\)"):
            so.project_(result)
        with torch.no_grad(), pytest.raises(ValueError, match=r"so\.polar\(x\)"):
            so.project_(result)
    so.project_(leaf[:3])
    assert so.orthonormality_error(leaf[:3]) < 1e-14
    layer = nn.Linear(3, 3)
    so.project_(layer.weight)
    assert so.orthonormality_error(layer.weight) < 1e-6


def test_a_batch_that_is_refused_names_its_first_bad_matrix():
    batch = gaussian(2, 3, 4, 2)
    batch[1, 1, 0, 0], batch[1, 2, 0, 0] = float("nan"), float("inf")
    with pytest.raises(ValueError, match=r"NaN in 2 of 6 matrices, the first at index \(1, 1\)"):
        so.project_(batch)
