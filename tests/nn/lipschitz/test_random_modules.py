"""No bound is below the largest singular value of the Jacobian of a module drawn at random."""

from __future__ import annotations

import contextlib

import pytest
from random_modules import drawn, steepest

import stiefel_opt as so

MANY, FEW, AT_ONCE = 10_000, 150, 50


def check(seed: int) -> float:
    """How near the bound comes; without the size of the input too, where that is proven."""
    model, size = drawn(seed)
    found = steepest(model, size)
    bound = so.lipschitz_bound(model, size)
    assert found <= bound * (1 + 1e-9), (seed, model)
    with contextlib.suppress(ValueError):  # for what needs the size
        assert found <= so.lipschitz_bound(model) * (1 + 1e-9), (seed, model)
    return found / bound if bound else 1.0


@pytest.mark.parametrize("start", range(0, FEW, AT_ONCE))
def test_of_a_few(start):
    near = [check(seed) for seed in range(start, start + AT_ONCE)]
    assert max(near) > 0.9  # and the bound is no mere number


@pytest.mark.slow
@pytest.mark.parametrize("start", range(FEW, MANY, AT_ONCE))
def test_of_ten_thousand(start):
    for seed in range(start, start + AT_ONCE):
        check(seed)
