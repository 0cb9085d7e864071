"""Products, bounds and rotations are what they say; what is kept between calls harms nobody."""

import math

import pytest
import torch
from cases import in_turn, mixed
from torch._subclasses import FakeTensorMode

from stiefel_opt.numerics.linalg import (
    FEW,
    cayley,
    exponential,
    gram,
    infinity_norm,
    largest_bound,
    largest_stretch,
    plus_identity,
    polar_rotation,
    symmetric_product,
)
from stiefel_opt.numerics.roots import roots

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("size", "kind", "dtype"),
    mixed(8, [1, 2, 16, 64, 200], ["skew", "gram", "identity", "rank one"], DTYPES),
)
def test_bounds_are_bounds(size, kind, dtype, generator):
    factor = torch.randn((5, 2 * size, size), generator=generator, dtype=dtype)
    if kind == "skew":
        factor = factor[:, :size] - factor[:, :size].mT
    elif kind == "rank one":
        factor = factor[:, :1]
    matrix = factor.mT @ factor
    if kind == "identity":
        matrix = 3 * torch.eye(size, dtype=dtype).expand(5, size, size).contiguous()
    largest = float(torch.linalg.eigvalsh(matrix.double()).max())
    for bound in (largest_bound(matrix), float(infinity_norm(matrix).max())):
        assert largest * (1 - 1e-6) <= bound <= 10 * math.sqrt(size) * largest


@pytest.mark.parametrize(("size", "angle"), [(2, 1.0), (5, 1e-3), (40, 0.1), (5, 1.0)])
def test_rotations_agree_to_second_order_and_are_orthogonal(size, angle, generator):
    skew = torch.randn((3, size, size), generator=generator, dtype=torch.float64)
    skew = skew - skew.mT
    skew *= angle / torch.linalg.matrix_norm(skew, ord=2, keepdim=True)
    square = skew.mT @ skew
    identity = torch.eye(size, dtype=torch.float64)
    polar = identity + polar_rotation(skew, roots(square, largest_bound(square)).difference)
    for rotation in (polar, cayley(skew), exponential(skew)):
        torch.testing.assert_close(
            rotation.mT @ rotation, identity.expand_as(rotation), rtol=0, atol=1e-14 * size
        )
        assert (rotation - exponential(skew)).abs().max() <= angle**3 + 1e-15


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_exponential_of_one_small_matrix_is_as_exact_as_of_several(size, generator):
    for spread in torch.linspace(0.01, 1.0, 40):
        gaussian = spread * torch.randn(1, size, size, generator=generator)
        skew = gaussian - gaussian.mT
        exact = exponential(skew.double())
        assert (exponential(skew) - exact).abs().max() < 3e-6


@pytest.mark.parametrize(
    ("size", "dtype"), in_turn([1, 40, 300, 517], [torch.float64, torch.complex128])
)
def test_half_a_symmetric_product_gives_all_of_it(size, dtype, generator):
    tall = torch.randn(2, size + 9, size, generator=generator, dtype=dtype)
    expected = tall.mH @ tall
    torch.testing.assert_close(gram(tall), expected, rtol=1e-12, atol=1e-10)
    both = torch.bmm(expected, expected)
    torch.testing.assert_close(symmetric_product(expected, expected), both, rtol=1e-11, atol=1e-5)
    into = expected.clone()
    found = symmetric_product(expected, expected, into=into, beta=0.5)
    assert found.data_ptr() == into.data_ptr()
    torch.testing.assert_close(found, 0.5 * expected + both, rtol=1e-11, atol=1e-5)


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_identity_is_added_to_every_matrix_of_a_batch(size, generator):
    matrices = torch.randn(3, size, size, generator=generator)
    expected = matrices + torch.eye(size)
    torch.testing.assert_close(plus_identity(matrices), expected, rtol=0, atol=0)


def test_what_is_kept_between_calls_serves_autograd_and_inference(generator):
    """Identities are cached; one made in inference mode could not be saved for a backward."""
    matrices = torch.randn(2, 3, 3, generator=generator)
    square = matrices.mT @ matrices / 100
    with torch.inference_mode():
        roots(square.to(torch.float64), 1.0)
    leaf = square.double().requires_grad_()
    roots(leaf, 1.0).difference.sum().backward()
    assert bool(leaf.grad.isfinite().all())


def test_transforms_leave_nothing_behind():
    """Identities are kept; one of a transform would break every later call."""
    matrices = torch.randn(2, 11, 11)
    torch.func.functionalize(plus_identity)(matrices)
    with FakeTensorMode(allow_non_fake_inputs=True):
        plus_identity(matrices)
    torch.testing.assert_close(plus_identity(matrices), matrices + torch.eye(11))


@pytest.mark.parametrize(
    ("size", "kind"), mixed(6, [1, 2, 16, 100], ["random", "radial", "low rank"])
)
def test_the_stretch_is_nearly_the_largest_singular_value(size, kind, generator):
    matrices = torch.randn(5, size, size, generator=generator, dtype=torch.float64)
    if kind == "radial":
        matrices = 3.0 * torch.eye(size, dtype=torch.float64) + 0.01 * matrices
    elif kind == "low rank":
        matrices = matrices[..., :1] @ matrices[..., :1, :] + 0.01 * matrices
    largest = float(torch.linalg.matrix_norm(matrices, 2).max())
    is_bound = matrices.numel() <= FEW
    low, high = (0.999, 1.001 * size**0.25) if is_bound else (0.6, 1.001)
    assert low * largest < largest_stretch(matrices).max() < high * largest
