"""Barycenters: POT's at k = d, fixed points, symmetries, a falling value, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import stiefel_opt as so

ot = pytest.importorskip("ot")
Array = np.ndarray
solve = so.ot.prw_barycenter


def corners(d: int = 6, points: int = 20) -> list[Array]:
    """Three clouds around the corners of a triangle in the first two directions."""
    rng = np.random.default_rng(0)
    angles = np.arange(3) * 2 * np.pi / 3
    centres = np.zeros((3, d))
    centres[:, :2] = 3 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return [centre + 0.5 * rng.standard_normal((points, d)) for centre in centres]


def first_points(d: int = 6, points: int = 15) -> Array:
    return np.random.default_rng(1).standard_normal((points, d))


@pytest.mark.parametrize("weights", [None, [0.2, 0.3, 0.5]])
def test_in_all_dimensions_it_is_the_free_support_barycenter_of_pot(weights: Any) -> None:
    clouds, init = corners(d=3), first_points(d=3)
    equal = [np.full(20, 1 / 20)] * 3
    given = None if weights is None else np.array(weights)
    theirs, log = ot.lp.free_support_barycenter(
        clouds, equal, init.copy(), weights=given, numItermax=200, stopThr=1e-20, log=True
    )
    ours = solve(clouds, given, k=3, init=init, max_iter=200, tol=1e-12)
    np.testing.assert_allclose(ours.points, theirs, atol=1e-9)
    assert ours.converged
    assert len(ours.values) <= len(log["displacement_square_norms"]) + 1
    shares = np.full(3, 1 / 3) if given is None else given
    distances = [ot.emd2(np.full(15, 1 / 15), equal[0], ot.dist(theirs, each)) for each in clouds]
    assert ours.value == pytest.approx(shares @ distances, rel=1e-9)


def test_the_value_falls_to_where_the_mean_is_in_the_middle() -> None:
    found = solve(corners(), init=first_points() + 2.0)
    assert found.converged
    assert found.value < 0.8 * found.values[0]
    np.testing.assert_allclose(found.points[:, :2].mean(0), 0.0, atol=0.3)
    expected = np.mean(
        [
            so.ot.projected_wasserstein(cloud, found.points, projection)
            for cloud, projection in zip(corners(), found.projections, strict=True)
        ]
    )
    assert found.value == pytest.approx(expected, rel=1e-9)


def test_equal_clouds_are_their_own_barycenter() -> None:
    cloud = corners()[0]
    found = solve([cloud, cloud], k=2, init=cloud)
    assert found.converged
    assert found.value == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(found.points, cloud, atol=1e-12)


def test_the_order_of_clouds_and_a_common_shift_change_nothing() -> None:
    clouds, init = corners(), first_points()
    plain = solve(clouds, np.array([0.5, 0.3, 0.2]), init=init, max_iter=15, tol=0.0)
    other = solve(clouds[::-1], np.array([0.2, 0.3, 0.5]), init=init, max_iter=15, tol=0.0)
    moved = solve([each + 5 for each in clouds], np.array([0.5, 0.3, 0.2]), init=init + 5,
                  max_iter=15, tol=0.0)  # fmt: skip
    assert plain.value == pytest.approx(other.value, rel=1e-6)
    assert plain.value == pytest.approx(moved.value, rel=1e-6)
    np.testing.assert_allclose(plain.points, other.points, atol=1e-4)
    np.testing.assert_allclose(plain.points + 5, moved.points, atol=1e-4)


def test_one_seed_gives_the_same_bits_and_results_are_of_the_kind_of_clouds() -> None:
    clouds = [torch.tensor(each, dtype=torch.float32) for each in corners()]
    first, second = (solve(clouds, points=12, seed=4, max_iter=5, tol=0.0) for _ in range(2))
    assert torch.equal(first.points, second.points)
    assert first.points.dtype == torch.float32
    assert first.points.shape == (12, 6)
    assert [each.shape for each in first.projections] == [(6, 2)] * 3
    assert "points 12 x 6" in repr(first)
    many = solve(
        corners(points=4), points=30, seed=0, max_iter=2, tol=0.0
    )  # more than all clouds have
    assert many.points.shape == (30, 6)


def test_a_cloud_without_weight_draws_nothing() -> None:
    clouds = corners()
    found = solve(clouds, np.array([1.0, 0.0, 0.0]), k=6, points=20, seed=0)
    np.testing.assert_allclose(found.points.mean(0), clouds[0].mean(0), atol=1e-9)


def test_one_point_in_all_dimensions_is_the_mean() -> None:
    clouds = corners()
    found = solve(clouds, k=6, points=1, seed=0)
    assert found.converged
    np.testing.assert_allclose(found.points[0], np.mean(clouds, axis=(0, 1)), atol=1e-9)


def test_what_has_not_converged_says_so() -> None:
    message = r"its points move by .* of the spread of the clouds after 1 iterations, tol=0.001"
    with pytest.warns(UserWarning, match=message):
        found = solve(corners(), init=first_points(), max_iter=1)
    assert not found.converged


def test_progress_shows_a_bar(capsys: Any) -> None:
    solve(corners(), points=5, seed=0, max_iter=2, tol=0.0, progress=True)
    assert "step" in capsys.readouterr().err


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"clouds": np.ones((3, 2))}, "`clouds` must be a list of .* array, got ndarray"),
    "none": ({"clouds": []}, "`clouds` must be a list of at least one array, got none"),
    "kind": ({"clouds": ["x"]}, r"`clouds\[0\]` must be an array, a list or a tensor, got str"),
    "X_init": ({"X_init": None}, "`X_init` must be left out, got a keyword of POT; pass init"),
    "typo": ({"point": 3}, r"prw_barycenter\(\) got an unexpected keyword argument 'point'"),
    "columns": (
        {"clouds": [np.ones((3, 2)), np.ones((3, 4))]},
        r"`clouds\[1\]` must have 2 columns like `clouds\[0\]`, got shape \(3, 4\)",
    ),
    "weights": ({"weights": np.ones(2) / 2}, "`weights` must have one weight for each of the 3 cl"),
    "sum": ({"weights": np.ones(3)}, "`weights` must sum to one, got a sum of 3"),
    "points": ({"points": 0}, "`points` must be at least 1, got 0"),
    "k": ({"k": 7}, r"`k` must be in \[1, 6\], got 7"),
    "reg": ({"reg": -1.0}, r"`reg` must be in \(0, inf\), got -1"),
    "max_iter": ({"max_iter": 0}, "`max_iter` must be at least 1, got 0"),
    "tol": ({"tol": -1.0}, r"`tol` must be in \[0, inf\), got -1"),
    "init": ({"init": np.ones((4, 3))}, "`init` must have 6 columns like the clouds"),
    "seed": ({"seed": -1}, "`seed` must be in"),
    "progress": ({"progress": 1}, "`progress` must be True or False, got 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_inputs_are_named(name: str) -> None:
    options, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        solve(**{"clouds": corners(), **options})
