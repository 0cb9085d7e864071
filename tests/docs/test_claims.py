"""Claims of the sources that no other test checks: counts of products, and identities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.papers.kong.eigen_loops import CayleyLoop, PublishedLoop, WenYinLoop
from stiefel_opt import ManifoldParameter, ProjectedRGD, StiefelSGD
from stiefel_opt.parametrizations import cwy_factors, generalized_householder, tcwy


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def added(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    return 2 * math.prod(left) * int(right[-1])


# Products in place, which torch's counter does not know.
KNOWN = {torch.ops.aten.baddbmm_: added, torch.ops.aten.addmm_: added}


def products(call: Callable[[], object], m: int) -> float:
    """Flops in units of m x m times m: 2 m^3."""
    with FlopCounterMode(display=False, custom_mapping=KNOWN) as counter:
        call()
    return float(counter.get_total_flops() / (2 * m**3))


def of_a_step(build: Callable[..., Any], n: int, m: int, generator: torch.Generator) -> float:
    """The second of two: our optimizers correct rounding in the first, and in every eighth."""
    point = torch.linalg.qr(torch.randn(n, m, generator=generator)).Q
    is_ours = build in {StiefelSGD, ProjectedRGD}
    weight = ManifoldParameter(point) if is_ours else torch.nn.Parameter(point)
    optimizer = build([weight], lr=0.01)
    for _ in range(2):
        weight.grad = torch.randn(n, m, generator=generator) / n
        count = products(optimizer.step, m)
    return count


def of_reflections(n: int, m: int, generator: torch.Generator, *, backward: bool) -> float:
    vectors = torch.randn(n, m, generator=generator).requires_grad_()

    def call() -> None:
        matrix = tcwy(vectors)
        if backward:
            matrix.backward(torch.ones_like(matrix))

    return products(call, m)


EIGHT = {"iterations": 8}
COUNTED = {
    "algorithm 1": (partial(of_a_step, partial(PublishedLoop, **EIGHT)), 10, 24),
    "projected Stiefel SGD": (partial(of_a_step, partial(CayleyLoop, **EIGHT)), 42, 2),
    "Wen & Yin": (partial(of_a_step, WenYinLoop), 8, 0),
    "StiefelSGD": (partial(of_a_step, StiefelSGD), 6, None),
    "RGD-C-C": (partial(of_a_step, ProjectedRGD), 4, None),
    "T-CWY": (partial(of_reflections, backward=False), 2, None),
    "T-CWY, backward": (partial(of_reflections, backward=True), 6, None),
}


@pytest.mark.parametrize("name", COUNTED)
def test_products_of_a_step(name: str, generator: torch.Generator) -> None:
    """Tall ones are counted by how flops grow with n; the rest is of m x m."""
    count, tall, small = COUNTED[name]
    m = 20
    few, many = (count(n, m, generator=generator) for n in (400, 800))
    assert (many - few) / (400 / m) == pytest.approx(tall)
    assert small is None or few - tall * 400 / m == pytest.approx(small)


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
