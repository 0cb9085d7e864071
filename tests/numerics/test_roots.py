"""Square roots agree with eigenvalue decompositions, whatever their bound."""

import math

import pytest
import torch
from cases import mixed

from stiefel_opt.numerics.roots import roots

LIMITS = [0.0, 1e-12, 1e-8, 1e-6, 1e-4, 1e-3, 0.01, 0.03, 0.06, 0.1, 0.3, 1.0, 4.0, 16.0, 64.0]
DTYPES = [torch.float32, torch.float64]


def spectrum(size: int, limit: float, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Eigenvectors and eigenvalues in [0, limit] of 9 symmetric matrices, both ends taken."""
    shape = (9, size, size)
    vectors = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))[0]
    values = torch.rand(shape[:-1], generator=generator, dtype=torch.float64) * limit
    values[:, 0] = limit
    values[:, 1:2] = 0.0
    return vectors, values


@pytest.mark.parametrize(
    ("limit", "size", "dtype"),
    mixed(2 * len(LIMITS), LIMITS, [1, 5, 16, 70], DTYPES),
)
def test_roots_are_exact_to_rounding(limit, size, dtype, generator):
    vectors, values = spectrum(size, limit, generator)
    matrix = ((vectors * values.unsqueeze(-2)) @ vectors.mT / 2).to(dtype)
    matrix = (matrix + matrix.mT) / 2
    expected = (vectors * ((1 + values) ** -0.5 - 1).unsqueeze(-2)) @ vectors.mT
    bent = (vectors * (1 / (1 + (1 + values).sqrt())).unsqueeze(-2)) @ vectors.mT
    found = roots(matrix, limit, scale=2.0, last=matrix[-4:])
    tolerance = 10 * math.sqrt(size) * torch.finfo(dtype).eps
    torch.testing.assert_close(found.difference.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.companion.double(), bent[-4:], rtol=0, atol=tolerance)


@pytest.mark.parametrize("limit", [1e-9, 1e-6])
def test_small_shrinkage_keeps_its_digits(limit, generator):
    vectors, values = spectrum(4, limit, generator)
    matrix = ((vectors * values.unsqueeze(-2)) @ vectors.mT).float()
    expected = (vectors * torch.expm1(-0.5 * torch.log1p(values)).unsqueeze(-2)) @ vectors.mT
    error = (roots(matrix, limit).difference.double() - expected).abs().max()
    assert error < 1e-3 * limit  # 1e-7 times less than the rounding of 1


@pytest.mark.parametrize("scale", [1e-16, 1e-12, 1e10])
def test_a_scale_far_from_one_costs_no_digits(scale, generator):
    factor = torch.randn(1, 64, 64, generator=generator, dtype=torch.float64)
    square = factor.mT @ factor
    square *= 4.0 / torch.linalg.matrix_norm(square, 2).item()
    for part in (1.0, 1e-3):
        root = roots((square * (part / scale)).float(), 4.004 * part, scale=scale).inverse_root
        identity = root.double() @ (square * part + torch.eye(64)) @ root.double()
        assert (identity - torch.eye(64)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_beyond_a_tiny_bound_does_no_harm(dtype, generator):
    """What a caller calls at most 1e-25 has the rounding of the products that made it."""
    eps = torch.finfo(dtype).eps
    noise = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64).to(dtype) * 8 * eps
    matrix = noise + noise.mT
    for limit in (0.0, 1e-30, 1e-25, 1e-17):
        found = roots(matrix, limit).difference
        torch.testing.assert_close(found, -matrix / 2, rtol=1e-3, atol=1e-3 * eps)
