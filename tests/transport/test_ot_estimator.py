"""The estimator: scikit-learn's own checks, exact values, levels of tests and intervals."""

from __future__ import annotations

import copy
import re
import sys
import warnings
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

import stiefel_opt as so

ot = pytest.importorskip("ot")
pytest.importorskip("sklearn", minversion="1.6")

Array = np.ndarray
QUICK: dict[str, Any] = {"max_iter": 20, "tol": 1e-2}


def prw(k: int = 2, **options: Any) -> Any:
    return so.ot.ProjectionRobustWasserstein(k, **{"random_state": 0, **options})


def two_clouds(n: int = 25, m: int = 20, d: int = 6, shift: float = 3.0) -> tuple[Array, Array]:
    """Gaussian clouds that differ along the first axis."""
    rng = np.random.default_rng(n + m + d)
    x, y = rng.standard_normal((n, d)), rng.standard_normal((m, d))
    y[:, 0] += shift
    return x, y


def labelled(x: Array, y: Array) -> tuple[Array, Array]:
    return np.concatenate((x, y)), np.repeat(["a", "b"], (len(x), len(y)))


# Checks of scikit-learn that the estimator does not pass, each with the reason: none.
EXEMPT: dict[str, str] = {}


@pytest.mark.filterwarnings("ignore:projection_robust_wasserstein has not converged")
@pytest.mark.filterwarnings("ignore:Can't check dok sparse matrix")
def test_it_passes_the_checks_of_scikit_learn() -> None:
    from sklearn.utils.estimator_checks import check_estimator

    results = check_estimator(prw(), expected_failed_checks=EXEMPT, on_skip=None)
    states = {result["check_name"]: result["status"] for result in results}
    assert len(states) > 40
    skipped = {name for name, state in states.items() if state == "skipped"}
    assert skipped <= {"check_array_api_input", "check_estimators_dtypes_array_api"}


def test_labels_and_a_second_cloud_are_the_same_problem() -> None:
    x, y = two_clouds()
    first, second = prw().fit(*labelled(x, y)), prw().fit(x, Y=y)
    np.testing.assert_array_equal(first.components_, second.components_)
    assert first.value_ == second.value_ == first.score(x, Y=y)
    assert list(first.classes_) == ["a", "b"]
    assert list(second.classes_) == [0, 1]
    assert first.result_.converged
    np.testing.assert_array_equal(first.transform(x), x @ first.components_.T)
    result = so.ot.projection_robust_wasserstein(x, y, k=2, seed=0)
    assert first.result_.objective == result.objective
    exact = so.ot.projected_wasserstein(x, y, first.components_.T)
    assert first.value_ == exact


def test_the_value_in_all_dimensions_is_the_wasserstein_distance() -> None:
    x, y = two_clouds(d=4)
    fitted = prw(4).fit(x, Y=y)
    expected = ot.emd2(np.full(25, 1 / 25), np.full(20, 1 / 20), ot.dist(x, y))
    assert fitted.value_ == pytest.approx(expected, rel=1e-9)
    assert fitted.path(x, Y=y).values[-1] == pytest.approx(expected, rel=1e-9)


def test_one_seed_gives_the_same_bits() -> None:
    clouds = labelled(*two_clouds(12, 12, 4))
    for seed in (3, np.random.RandomState(3)):

        def make(seed: Any = seed) -> Any:
            return prw(restarts=2, random_state=copy.deepcopy(seed), **QUICK)

        first, second = make().fit(*clouds), make().fit(*clouds)
        np.testing.assert_array_equal(first.components_, second.components_)
        options: dict[str, Any] = {"permutations": 3, "held_out": 0.5}
        one, other = (make().permutation_test(*clouds, **options) for _ in range(2))
        np.testing.assert_array_equal(one.permuted, other.permuted)
        assert make().interval(*clouds, resamples=5) == make().interval(*clouds, resamples=5)


def test_a_common_shift_changes_nothing() -> None:
    x, y = two_clouds()
    plain, moved = prw().fit(x, Y=y), prw().fit(x + 5, Y=y + 5)
    np.testing.assert_allclose(plain.components_, moved.components_, atol=1e-8)
    assert plain.value_ == pytest.approx(moved.value_, rel=1e-9)


def test_equal_clouds_have_no_distance_and_the_largest_p() -> None:
    x, _ = two_clouds(10, 10, 3)
    assert prw().fit(x, Y=x).value_ == pytest.approx(0.0, abs=1e-12)
    assert prw(**QUICK).permutation_test(x, Y=x, permutations=5).pvalue == 1.0
    path = prw(**QUICK).path(x, Y=x)
    np.testing.assert_array_equal(path.shares, 1.0)


@pytest.mark.parametrize("held_out", [None, 0.5])
def test_clouds_that_differ_have_the_smallest_p(held_out: float | None) -> None:
    x, y = two_clouds(20, 20, 4, shift=5.0)
    found = prw(1, **QUICK).permutation_test(x, Y=y, permutations=9, held_out=held_out)
    assert found.pvalue == 0.1
    assert len(found.permuted) == 9
    assert found.value > found.permuted.max()


def test_permutations_that_only_exchange_the_clouds_are_ties() -> None:
    """Two of the six ways to halve four points, so that a third of the permutations reach it."""
    x, y = np.array([[0.0, 1.0], [1.0, 3.0]]), np.array([[20.0, 0.0], [22.0, 1.5]])
    found = prw(1, **QUICK).permutation_test(x, Y=y, permutations=60)
    assert 0.2 < found.pvalue < 0.5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:projection_robust_wasserstein has not converged")
def test_p_values_are_uniform_where_both_clouds_have_one_law() -> None:
    """A multiple of 1 / 40 each; a random part of a step makes them continuous."""
    values = []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x, y = rng.standard_normal((2, 20, 3))
        found = prw(1, random_state=seed, **QUICK).permutation_test(x, Y=y, permutations=39)
        values.append(found.pvalue - rng.uniform() / 40)
    assert kstest(values, "uniform").pvalue > 0.01


def ring(rng: np.random.Generator, n: int, d: int) -> tuple[Array, Array]:
    """Two Gaussian clouds, the second one on a ring of radius three in two directions."""
    x, y = rng.standard_normal((2, n, d))
    angles = rng.uniform(0, 2 * np.pi, n)
    y[:, :2] += 3 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return x, y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:projection_robust_wasserstein has not converged")
def test_intervals_cover_the_value_on_fresh_samples() -> None:
    """Of 100 draws; the 5 and 95 % quantiles of 90 successes of 100 are 85 and 95."""
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        x, y = ring(rng, 40, 8)
        low, high = prw(random_state=seed, **QUICK).interval(x, Y=y, level=0.9, resamples=39)
        fitted = prw(random_state=seed, **QUICK).fit(x, Y=y)
        fresh = (ring(rng, 40, 8) for _ in range(20))
        covered += low <= np.mean([fitted.score(one, Y=other) for one, other in fresh]) <= high
    assert 82 <= covered <= 97


def test_the_path_is_that_of_single_fits() -> None:
    x, y = two_clouds(30, 30, 5)
    y *= np.linspace(0.3, 2.0, 5)
    path = prw(reg=0.5).path(x, Y=y, k=(1, 2, 4))
    assert path.n_components == (1, 2, 4)
    for k, value, components in zip(path.n_components, path.values, path.components, strict=True):
        assert components.shape == (k, 5)
        objectives = [
            so.ot.projection_robust_wasserstein(x, y, k=k, reg=0.5, **options).objective
            for options in ({"seed": 0}, {"init": components.T.copy(), "max_iter": 0})
        ]
        assert objectives[1] >= objectives[0] * (1 - 1e-3)
        assert value == so.ot.projected_wasserstein(x, y, components.T)
    assert (np.diff(path.values) > 0).all()
    whole = so.ot.projected_wasserstein(x, y, np.eye(5))
    np.testing.assert_allclose(path.shares, path.values / whole)


def test_other_fits_leave_the_estimator_as_it_is() -> None:
    x, y = two_clouds(12, 12, 4)
    fitted = prw(**QUICK).fit(x, Y=y)
    before = dict(vars(fitted))
    other = x[:, :3], y[:, :3]
    fitted.path(other[0], Y=other[1], k=[1])
    fitted.permutation_test(*labelled(*other), permutations=1)
    fitted.interval(other[0], Y=other[1], resamples=2)
    assert vars(fitted) == before


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_plot_has_all_points_and_a_line_for_each_entry_of_the_plan(k: int) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    x, y = two_clouds(12, 12, 4)
    fitted = prw(k, **QUICK).fit(*labelled(x, y))
    axes = fitted.plot(*labelled(x, y))
    lines, *clouds = axes.collections
    assert [len(cloud.get_offsets()) for cloud in clouds] == [12, 12]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    segments = lines.get_segments()
    assert len(segments) == 12  # equal clouds of equal weights: an assignment
    if k > 1:
        squares = [np.square(one - other).sum() for one, other in segments]
        flat = so.ot.projected_wasserstein(x, y, fitted.components_[:2].T)
        assert np.mean(squares) >= flat * (1 - 1e-9)
    assert fitted.plot(x, Y=y, ax=axes) is axes
    sys.modules["matplotlib.pyplot"].close("all")


def test_long_work_shows_a_bar(capsys: Any) -> None:
    x, y = two_clouds(8, 8, 3)
    estimator = prw(1, **QUICK)
    for work in (
        lambda: estimator.permutation_test(x, Y=y, permutations=2, progress=True),
        lambda: estimator.interval(x, Y=y, resamples=2, progress=True),
        lambda: estimator.path(x, Y=y, progress=True),
    ):
        work()
        assert "3/3" in capsys.readouterr().err


def test_fits_of_resampled_clouds_do_not_warn_and_a_fit_does() -> None:
    x, y = two_clouds(15, 15, 6, shift=0.0)
    hasty = prw(max_iter=1, tol=1e-9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hasty.permutation_test(x, Y=y, permutations=2)
        hasty.interval(x, Y=y, resamples=2)
    with pytest.warns(UserWarning, match="has not converged: its relative gradient"):
        hasty.fit(x, Y=y)


X, Y = two_clouds(6, 6, 3)
BAD = {
    "three labels": (lambda: prw().fit(X, [0, 1, 2, 0, 1, 2]), "`y` must hold two labels, got 3 c"),
    "both": (lambda: prw().fit(X, [0, 1] * 3, Y=Y), "`Y` must be left out beside `y`, got both"),
    "neither": (lambda: prw().fit(X), "requires y to be passed, but the target y is None"),
    "features": (lambda: prw().fit(X, Y=Y[:, :2]), "X has 2 features, but .* expecting 3"),
    "k": (lambda: prw(4).fit(X, Y=Y), "`n_components` must be at most n_features = 3, got 4"),
    "NaN": (lambda: prw().fit(X, Y=np.full((6, 3), np.nan)), "Input Y contains NaN"),
    "cloud for labels": (lambda: prw().fit(X, Y), r"`y` must be labels \(n,\), got shape \(6, 3\)"),
    "one label": (
        lambda: prw().fit(*labelled(X, Y)).score(X, ["a"] * 6),
        "`y` must hold two labels, got 1 class; .*; in cross-validation StratifiedKFold",
    ),
    "no list": (lambda: prw().path(X, Y=Y, k=3), r"`k` must be dimensions that rise, got 3; pass"),
    "axes": (
        lambda: prw().fit(X, Y=Y).plot(X, Y=Y, ax=3),
        "`ax` must be axes of matplotlib, got int",
    ),
    "other labels": (
        lambda: prw().fit(*labelled(X, Y)).score(X, [0, 1] * 3),
        "`y` must hold the labels a and b, got 0 and 1",
    ),
    "permutations": (
        lambda: prw().permutation_test(X, Y=Y, permutations=0),
        "`permutations` must be at least 1, got 0",
    ),
    "held out": (
        lambda: prw().permutation_test(X, Y=Y, held_out=0.01),
        r"`held_out` must leave points on both sides in a cloud of 6, got 0.01",
    ),
    "share": (
        lambda: prw().permutation_test(X, Y=Y, held_out=1.0),
        r"`held_out` must be in \(0, 1\), got 1",
    ),
    "level": (lambda: prw().interval(X, Y=Y, level=1.0), r"`level` must be in \(0, 1\), got 1"),
    "resamples": (lambda: prw().interval(X, Y=Y, resamples=0), "`resamples` must be at least 1"),
    "falling": (lambda: prw().path(X, Y=Y, k=[2, 2]), r"`k` must be in \[3, 3\], got 2"),
    "beyond": (lambda: prw().path(X, Y=Y, k=[4]), r"`k` must be in \[1, 3\], got 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_inputs_are_named(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_without_scikit_learn_the_rest_works_and_the_error_says_what_to_install(
    monkeypatch: Any,
) -> None:
    monkeypatch.delitem(sys.modules, "stiefel_opt.ot.estimator", raising=False)
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    message = re.escape("run: pip install 'scikit-learn>=1.6'")
    with pytest.raises(ImportError, match=message):
        _ = so.ot.ProjectionRobustWasserstein
    assert so.ot.projection_robust_wasserstein(X, Y, reg=1.0).converged
    with pytest.raises(AttributeError, match="no attribute 'Estimator'"):
        _ = so.ot.Estimator
