"""Wasserstein discriminant analysis: a slow ratio, POT's, invariances, small `reg`, errors."""

from __future__ import annotations

import contextlib
import io
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import stiefel_opt as so

Array = np.ndarray
solve = so.ot.wasserstein_discriminant


def three_classes(sizes: tuple[int, ...] = (12, 9, 15), d: int = 6) -> tuple[Array, Array]:
    """Means at the corners of a triangle in two of the directions, and wide noise in others."""
    rng = np.random.default_rng(sum(sizes))
    y = np.repeat(np.array(["r", "g", "b"]), sizes)
    means = {"r": [0, 0], "g": [3, 0], "b": [0, 3]}
    x = rng.standard_normal((len(y), d)) * np.linspace(0.5, 3, d)
    x[:, :2] += np.array([means[label] for label in y])
    order = rng.permutation(len(y))
    return x[order], y[order]


def slow_ratio(x: Array, y: Array, projection: Array, reg: float, iterations: int) -> float:
    """Sinkhorn's iterations from ones for one pair of classes after the other."""

    def transported(first: Array, second: Array) -> float:
        cost = np.square(first[:, None] - second).sum(2)
        kernel, u = np.exp(-cost / reg), np.ones(len(first))
        for _ in range(iterations):
            v = 1 / len(second) / (kernel.T @ u)
            u = 1 / len(first) / (kernel @ v)
        return float((u[:, None] * kernel * v * cost).sum())

    classes = [x[y == label] @ projection for label in np.unique(y)]
    within = sum(transported(each, each) for each in classes)
    return within / sum(transported(*pair) for pair in combinations(classes, 2))


@pytest.mark.parametrize("iterations", [1, 2, 10])
@pytest.mark.parametrize(("k", "reg"), [(1, 1.0), (2, 5.0), (6, 20.0)])
def test_the_ratio_is_that_of_a_slow_formula(k: int, reg: float, iterations: int) -> None:
    x, y = three_classes()
    found = solve(x, y, k=k, reg=reg, sinkhorn_iterations=iterations, seed=0)
    assert found.converged
    assert found.projection.shape == (6, k)
    assert np.abs(found.projection.T @ found.projection - np.eye(k)).max() < 1e-12
    expected = slow_ratio(x, y, found.projection, reg, iterations)
    assert found.ratio == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("iterations", [1, 4])
def test_plans_of_logarithms_are_the_same(iterations: int, monkeypatch: Any) -> None:
    x, y = three_classes()
    options = {"reg": 1.0, "sinkhorn_iterations": iterations, "seed": 0, "max_evaluations": 5}
    plain = solve(x, y, tol=0.0, **options)
    monkeypatch.setattr("stiefel_opt.ot.discriminant._SMALLEST_SUM", np.inf)
    slow = solve(x, y, tol=0.0, **options)
    np.testing.assert_allclose(slow.projection, plain.projection, atol=1e-9)
    assert slow.ratio == pytest.approx(plain.ratio, rel=1e-10)


def test_nothing_near_the_result_is_lower() -> None:
    x, y = three_classes()
    found = solve(x, y, reg=5.0, seed=0, tol=1e-7)
    point = torch.tensor(found.projection)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        direction = torch.randn(6, 2, generator=generator, dtype=torch.float64)
        near = so.exp(point, so.project_tangent(point, 0.01 * direction)).numpy()
        assert slow_ratio(x, y, near, 5.0, 10) > found.ratio


def test_the_ratio_is_below_that_of_pot() -> None:
    reduction = pytest.importorskip("ot.dr", exc_type=ImportError)
    x, y = three_classes()
    start = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 2))).Q
    with contextlib.redirect_stdout(io.StringIO()):
        theirs, _ = reduction.wda(x.copy(), y, p=2, reg=5.0, k=10, maxiter=10, P0=start.copy())
    ours = solve(x, y, reg=5.0, init=start)
    assert ours.ratio < slow_ratio(x, y, theirs, 5.0, 10)


def test_inputs_stay_and_results_are_of_their_kind() -> None:
    x, y = three_classes()
    expected = solve(x.copy(), y, reg=5.0, seed=3)
    codes = torch.tensor(np.unique(y, return_inverse=True)[1])
    for points, labels in ((x.astype(np.float32), list(y)), (torch.tensor(x), codes)):
        before = points.copy() if isinstance(points, np.ndarray) else points.clone()
        found = solve(points, labels, reg=5.0, seed=3)
        assert type(found.projection) is type(points)
        assert found.projection.dtype == points.dtype
        assert (points == before).all()
        assert found.ratio == pytest.approx(expected.ratio, rel=1e-4)
    with torch.inference_mode():
        again = solve(x, y, reg=5.0, seed=3)
    np.testing.assert_array_equal(again.projection, expected.projection)
    assert again.evaluations == expected.evaluations


def test_a_shift_and_other_labels_change_nothing() -> None:
    x, y = three_classes()
    plain = solve(x, y, reg=5.0, seed=0)
    other = solve(x + 7, np.char.add("class ", y), reg=5.0, seed=0)
    assert plain.ratio == pytest.approx(other.ratio, rel=1e-9)


def test_more_starting_points_are_never_worse() -> None:
    x, y = three_classes()
    one, five = (solve(x, y, reg=0.5, seed=0, restarts=count) for count in (1, 5))
    assert five.ratio <= one.ratio
    assert five.evaluations > one.evaluations


def test_a_small_reg_is_no_trouble_or_says_so() -> None:
    x, y = three_classes()
    found = solve(x, y, reg=0.2, seed=0, max_evaluations=30, tol=0.0)
    assert 0 < found.ratio < 1
    with pytest.warns(UserWarning, match="leaves classes where they are"):
        found = solve(x, y, reg=1e-3, seed=0, max_evaluations=30, tol=0.0)
    assert found.evaluations > 1  # gradients are finite
    assert 0 <= found.ratio < 1
    assert np.isfinite(found.projection).all()


def test_what_has_not_converged_says_so() -> None:
    x, y = three_classes()
    text = "has not converged: ratio .* after 2 evaluations, max_evaluations is reached; reg=5 is"
    with pytest.warns(UserWarning, match=text) as caught:
        found = solve(x, y, reg=5.0, seed=0, max_evaluations=2)
    assert not found.converged
    assert caught[0].filename == __file__


def test_features_in_large_units_are_told_to_be_standardised() -> None:
    x, y = three_classes()
    text = r"leaves classes where they are: .* of the mean squared distance .* standardise X, raise"
    with pytest.warns(UserWarning, match=text):
        assert solve(x * 1e3, y, seed=0).ratio < 1e-6
    assert solve(x * 1e-3, y, seed=0).ratio > 0.1  # the other way round: nothing to say


def test_a_result_is_printed_in_one_line() -> None:
    text = repr(solve(*three_classes(), reg=5.0, seed=0))
    assert "projection 6 x 2" in text
    assert "\n" not in text


def test_progress_shows_a_bar(capsys: Any) -> None:
    solve(*three_classes(), reg=5.0, seed=0, max_evaluations=3, tol=0.0, progress=True)
    assert "evaluation" in capsys.readouterr().err


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "labels": ({"y": ["a"] * 35}, "`y` must have one label for each of the 36 points of `X`"),
    "one class": ({"y": ["a"] * 36}, "`y` must hold two classes or more, got 1 class"),
    "points": ({"X": "points"}, "`X` must be an array, a list or a tensor, got str"),
    "equal points": ({"X": np.ones((36, 6))}, "`X` must hold points that differ, got equal ones"),
    "NaN": ({"y": np.r_[np.nan, np.ones(35)]}, "`y` must hold no missing labels, got NaN or None"),
    "None": ({"y": [None] + ["a"] * 35}, "`y` must hold no missing labels, got NaN or None"),
    "p": ({"p": 2}, "`p` must be left out, got a keyword of POT; pass k"),
    "P0": ({"P0": None}, "`P0` must be left out, got a keyword of POT; pass init"),
    "maxiter": ({"maxiter": 9}, "`maxiter` must be left out, .*; pass max_evaluations"),
    "typo": ({"regg": 1.0}, r"wasserstein_discriminant\(\) got an unexpected keyword argument"),
    "k": ({"k": 7}, r"`k` must be in \[1, 6\], got 7"),
    "reg": ({"reg": 0}, r"`reg` must be in \(0, inf\), got 0"),
    "sinkhorn": ({"sinkhorn_iterations": 0}, "`sinkhorn_iterations` must be at least 1, got 0"),
    "evaluations": ({"max_evaluations": 0}, "`max_evaluations` must be at least 1, got 0"),
    "tol": ({"tol": -1.0}, r"`tol` must be in \[0, inf\), got -1"),
    "restarts": ({"restarts": 0}, "`restarts` must be at least 1, got 0"),
    "init": ({"init": np.ones((6, 2))}, "`init` must have orthonormal columns"),
    "seed": ({"seed": -1}, r"`seed` must be in \[0, \d+\], got -1"),
    "progress": ({"progress": 1}, "`progress` must be True or False, got 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_inputs_are_named(name: str) -> None:
    options, message = BAD[name]
    x, y = three_classes()
    with pytest.raises((ValueError, TypeError), match=message):
        solve(**{"X": x, "y": y, **options})
