"""Claims of the sources that no other test checks: counts of products, and identities."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.papers.kong.eigen_loops import CayleyLoop, Loop, PublishedLoop
from stiefel_opt.functional import cwy_factors, generalized_householder


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def products(build: type[Loop], n: int, m: int, generator: torch.Generator) -> float:
    """Flops of a step with momentum, in units of m x m times m: 2 m^3."""
    weight = torch.nn.Parameter(torch.linalg.qr(torch.randn(n, m, generator=generator)).Q)
    optimizer = build([weight], lr=0.01, iterations=8)
    for _ in range(2):
        weight.grad = torch.randn(n, m, generator=generator)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
    return float(counter.get_total_flops() / (2 * m**3))


@pytest.mark.parametrize(("build", "tall", "small"), [(PublishedLoop, 10, 24), (CayleyLoop, 42, 2)])
def test_products_of_a_step_as_printed(
    build: type[Loop], tall: int, small: int, generator: torch.Generator
) -> None:
    """Tall ones are counted by how flops grow with n; the rest is of m x m."""
    m = 20
    few, many = (products(build, n, m, generator) for n in (400, 800))
    assert (many - few) / (400 / m) == pytest.approx(tall)
    assert few - tall * 400 / m == pytest.approx(small)


def test_the_factor_of_a_product_of_reflections(generator: torch.Generator) -> None:
    """S + S' = U'U, and not S^-1 + S^-T."""
    vectors = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    U, S = cwy_factors(vectors)
    torch.testing.assert_close(S + S.mT, U.mT @ U)
    inverse = torch.linalg.inv(S)
    assert float((inverse + inverse.mT - U.mT @ U).abs().max()) > 1


def test_special_cases_of_generalized_products(generator: torch.Generator) -> None:
    """Orthogonal keys: symmetric, with eigenvalues 1 - beta and 1. Equal keys: one factor."""
    keys = torch.linalg.qr(torch.randn(6, 3, generator=generator, dtype=torch.float64)).Q
    beta = torch.tensor([0.3, 1.2, 1.9], dtype=torch.float64)
    product = generalized_householder(keys, beta)
    torch.testing.assert_close(product, product.mT)
    expected = torch.cat([1 - beta, torch.ones(3, dtype=torch.float64)]).sort().values
    torch.testing.assert_close(torch.linalg.eigvalsh(product), expected)
    key = keys[:, :1]
    together = generalized_householder(key.expand(-1, 3), beta)
    factor = 1 - (1 - beta).prod()
    torch.testing.assert_close(together, torch.eye(6, dtype=torch.float64) - factor * key @ key.mT)
