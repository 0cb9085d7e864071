"""What a first call of the transport distance needs: a regularization, and what went wrong."""

import re
import time
import warnings
from typing import Any

import numpy as np
import pytest

from stiefel_opt.ot import projected_wasserstein, projection_robust_wasserstein


def clouds(seed: int = 0, shift: float = 4.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(40, 8)), rng.normal(size=(35, 8))
    y[:, :2] += shift
    return x, y


@pytest.mark.parametrize("scale", [1e-60, 1e-9, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_default_regularization_is_a_few_percent_of_the_value(scale: float, seed: int) -> None:
    x, y = clouds(seed)
    result = projection_robust_wasserstein(scale * x, scale * y)
    exact = projected_wasserstein(scale * x, scale * y, result.projection)
    assert exact <= result.value * (1 + 1e-9)
    assert result.value == pytest.approx(exact, rel=0.05)
    assert result.reg == pytest.approx(0.02 * result.value, rel=0.3)
    assert f"reg={result.reg:.3g}" in repr(result)
    assert result.converged
    again = projection_robust_wasserstein(scale * x, scale * y, reg=result.reg)
    assert again.objective == result.objective


def test_what_has_not_converged_is_told_with_a_remedy() -> None:
    x, y = clouds(shift=0.0)
    text = r"has not converged: .* after 2 steps, tol=1e-06; raise max_iter, which is 2, or reg, "
    with pytest.warns(UserWarning, match=text) as caught:
        result = projection_robust_wasserstein(x, y, max_iter=2, tol=1e-6)
    assert not result.converged
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        projection_robust_wasserstein(x, y, max_iter=2, tol=0.0)  # steps are counted
        projection_robust_wasserstein(x, y, max_iter=0)


def test_the_budget_of_products_holds_at_a_small_regularization() -> None:
    with pytest.warns(
        UserWarning, match=r"after \d+ products with the kernel; raise max_"
    ) as caught:
        projection_robust_wasserstein(*clouds(), reg=1e-4, max_products=50)
    taken = re.search(r"after (\d+) products", str(caught[0].message))
    assert taken is not None
    assert int(taken[1]) <= 50 + 125


@pytest.mark.parametrize("reg", [1e-300, 1e-20, 1e-14])
def test_a_regularization_below_rounding_is_refused_at_once(reg: float) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"`reg` must be at least .*the rounding of these dist"):
        projection_robust_wasserstein(*clouds(), reg=reg)
    assert time.process_time() - began < 1.0
