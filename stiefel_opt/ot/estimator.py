"""The projection-robust distance as an estimator of scikit-learn, imported where it is used."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, override

from stiefel_opt.errors import ProgressBar, check_flag, check_integer, check_range, fail, imported
from stiefel_opt.ot.clouds import read_clouds, read_projection
from stiefel_opt.ot.exact import exact_plan, projected_wasserstein
from stiefel_opt.ot.projection import PRWResult, projection_robust_wasserstein

_PACKAGE: Final = "'scikit-learn>=1.6'"
_base = imported("sklearn.base", _PACKAGE)
_utils = imported("sklearn.utils", _PACKAGE)
_validation = imported("sklearn.utils.validation", _PACKAGE)
_multiclass = imported("sklearn.utils.multiclass", _PACKAGE)
_NamedFeatures: Any = _base.ClassNamePrefixFeaturesOutMixin
_Transformer: Any = _base.TransformerMixin
_Estimator: Any = _base.BaseEstimator

Array = NDArray[np.float64]
_Clouds = tuple[Array, Array]
_TIED: Final = 1e-6  # of a value: exchanged clouds have the same one, but for the search
_LINES: Final = 1e-3  # of the heaviest entry of a plan: a fainter line is not drawn


@dataclass(frozen=True)
class PermutationTest:
    """Result of :meth:`ProjectionRobustWasserstein.permutation_test`.

    Attributes:
        value: The statistic of the clouds as they are.
        pvalue: (1 + how many permuted values reach ``value``) / (1 + permutations).
        permuted: The statistic under each permutation of the labels.
    """

    value: float
    pvalue: float
    permuted: Array


@dataclass(frozen=True)
class ProjectionPath:
    """Result of :meth:`ProjectionRobustWasserstein.path`, an entry for each dimension.

    Attributes:
        n_components: The dimensions k.
        values: Exact squared distances of the projected clouds.
        shares: ``values`` over the squared distance without projection; 1 for equal clouds.
        components: Projections, ``(k, features)``.
    """

    n_components: tuple[int, ...]
    values: Array
    shares: Array
    components: list[Array]


class ProjectionRobustWasserstein(_NamedFeatures, _Transformer, _Estimator):  # type: ignore[misc]
    """Projection under which transport between two clouds costs most, for scikit-learn.

    Two clouds are the rows of ``X`` under the two labels of ``y``, or ``X`` and ``Y``; points weigh
    equally. Distances are squared and exact: entropy is in the search for the projection alone.

    Args:
        n_components: Dimension k of the projection, 1 to the number of features. Default: 2.
        reg, restarts, max_iter, tol: As in :func:`projection_robust_wasserstein`.
        random_state: Seed, ``RandomState`` or None, of the starting points and of resampling.

    Attributes:
        components_: Orthonormal rows, ``(k, features)``.
        value_: Squared distance of the projected clouds. It is the largest over projections, so
            that it overestimates: see ``score``, ``permutation_test`` and ``interval``.
        result_: The :class:`PRWResult` of the search.
        n_iter_: Iterations of the search, the evaluation of the start among them.
        classes_: The two labels; 0 and 1 if the second cloud was given as ``Y``.
        n_features_in_, feature_names_in_: As in scikit-learn.

    Raises:
        ImportError: without scikit-learn 1.6 or POT; ``pip install scikit-learn pot``.
        ValueError, TypeError: for clouds, labels or options that cannot be used, naming them.
    Warns: as :func:`projection_robust_wasserstein`; not for the fits of resampled clouds.
    Note: A fit costs one call of :func:`projection_robust_wasserstein` and one exact transport,
        about cubic in the number of points.
    Reference: Paty & Cuturi (ICML 2019); Lin, Fan, Ho, Cuturi & Jordan (NeurIPS 2020).
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        reg: float | None = None,
        restarts: int = 1,
        random_state: Any = None,
        max_iter: int = 500,
        tol: float = 1e-4,
    ) -> None:
        self.n_components = n_components
        self.reg = reg
        self.restarts = restarts
        self.random_state = random_state
        self.max_iter = max_iter
        self.tol = tol

    @override
    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.classifier_tags = _utils.ClassifierTags(multi_class=False)
        return tags

    classes_: Any

    def fit(self, X: Any, y: Any = None, *, Y: Any = None) -> Self:
        """Find the projection. ``y``: labels, two different ones; or ``Y``: the second cloud."""
        clouds = self._read(X, y, Y, fits=True)
        self.result_ = self._search(clouds, self._seed())
        self.components_, self.n_iter_ = self.result_.projection.T, len(self.result_.log)
        self.value_ = _value(clouds, self.result_)
        return self

    def transform(self, X: Any) -> Array:
        """Return the points ``(n, k)`` under the projection."""
        _validation.check_is_fitted(self)
        points = _validation.validate_data(self, X, dtype=np.float64, reset=False)
        projected: Array = points @ self.components_.T
        return projected

    def score(self, X: Any, y: Any = None, *, Y: Any = None) -> float:
        """Return the squared distance of other points under the fitted projection.

        Points that were not seen by ``fit`` give a value without its optimism.
        """
        _validation.check_is_fitted(self)
        clouds = self._read(X, y, Y)
        return projected_wasserstein(*clouds, self.components_.T)

    def permutation_test(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        permutations: int = 199,
        held_out: float | None = None,
        progress: bool = False,
    ) -> PermutationTest:
        """Test that both clouds have one law, by fits under random labels; nothing is kept.

        Args:
            X, y, Y: As in ``fit``.
            permutations: Default: 199; p-values are multiples of 1 / (permutations + 1).
            held_out: The share of both clouds whose distance under the projection of the others is
                the statistic. Default: None, the value of a fit to all points.
            progress: Show a bar; needs tqdm. Default: no.
        Note: permutations + 1 fits.
        """
        check_integer("permutations", permutations, 1)
        check_flag("progress", progress)
        if held_out is not None:
            check_range("held_out", held_out, 0.0, 1.0, open_low=True)
        random = _utils.check_random_state(self.random_state)
        first, second = self._resampled(X, y, Y)
        points, size = np.concatenate((first, second)), len(first)
        values = []
        with ProgressBar(permutations + 1, progress) as bar:
            for number in range(permutations + 1):
                order = random.permutation(len(points)) if number else np.arange(len(points))
                drawn = points[order[:size]], points[order[size:]]
                values.append(self._statistic(drawn, held_out, random))
                bar.update()
        value, permuted = values[0], np.array(values[1:])
        reached = int((permuted >= value * (1 - _TIED)).sum())
        return PermutationTest(value, (1 + reached) / (1 + permutations), permuted)

    def interval(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        level: float = 0.9,
        resamples: int = 199,
        progress: bool = False,
    ) -> tuple[float, float]:
        """Return a bootstrap interval for the value on fresh points of the same laws and numbers.

        That is the ``score`` of the fitted projection, without the optimism of ``value_``. A
        resampled cloud is to the cloud as the cloud to its law: quantiles of the values of
        resampled clouds are reflected about ``value_``. Their optimism comes off with it, so that
        the interval need not contain ``value_``. With few points it covers less often than
        ``level`` where the farthest ones carry the value, as between laws of different spread.

        Args:
            X, y, Y: As in ``fit``.
            level: How often the interval should cover. Default: 0.9.
            resamples: Default: 199.
            progress: Show a bar; needs tqdm. Default: no.
        Note: resamples + 1 fits.
        Reference: Davison & Hinkley, Bootstrap methods (1997), section 5.2, the basic interval.
        """
        check_range("level", level, 0.0, 1.0, open_low=True)
        check_integer("resamples", resamples, 1)
        check_flag("progress", progress)
        random = _utils.check_random_state(self.random_state)
        clouds = self._resampled(X, y, Y)
        values = []
        with ProgressBar(resamples + 1, progress) as bar:
            for number in range(resamples + 1):
                first, second = (_resample(each, random) if number else each for each in clouds)
                values.append(self._statistic((first, second), None, random))
                bar.update()
        tails = [(1 + level) / 2, (1 - level) / 2]
        low, high = 2 * values[0] - np.quantile(values[1:], tails)
        return max(float(low), 0.0), max(float(high), 0.0)

    def path(
        self,
        X: Any,
        y: Any = None,
        *,
        Y: Any = None,
        k: Iterable[int] | None = None,
        progress: bool = False,
    ) -> ProjectionPath:
        """Fit rising dimensions, each from the last projection and one more direction.

        The new direction is orthogonal to the projection and has the largest cost under the plan.

        Args:
            X, y, Y: As in ``fit``.
            k: Dimensions, rising. Default: 1 to the number of features.
            progress: Show a bar; needs tqdm. Default: no.
        Note: A fit for each dimension; d x d matrices.
        """
        check_flag("progress", progress)
        clouds = self._resampled(X, y, Y)
        features = clouds[0].shape[1]
        if k is not None and not isinstance(k, Iterable):
            raise TypeError(fail("k", "be dimensions that rise", repr(k), f"pass k=[{k}]"))
        wanted = tuple(range(1, features + 1) if k is None else k)
        for each, former in zip(wanted, (0, *wanted), strict=False):
            check_integer("k", each, former + 1, features)
        whole = projected_wasserstein(*clouds, np.eye(features))
        seed, values, components = self._seed(), [], []
        found: PRWResult | None = None
        with ProgressBar(len(wanted), progress) as bar:
            for each in wanted:
                init = None if found is None else _extended(clouds, found, each)
                found = self._search(clouds, seed, k=each, init=init)
                values.append(_value(clouds, found))
                components.append(found.projection.T)
                bar.update()
        shares = np.array(values) / whole if whole > 0 else np.ones(len(values))
        return ProjectionPath(wanted, np.array(values), shares, components)

    def plot(self, X: Any, y: Any = None, *, Y: Any = None, ax: Any = None) -> Any:
        """Draw both clouds under the first two components, and the exact plan as thin lines.

        With one component the clouds are drawn on two lines.

        Args:
            X, y, Y: As in ``score``.
            ax: Axes of matplotlib. Default: new ones.
        Returns: The axes.
        """
        _validation.check_is_fitted(self)
        clouds = self._read(X, y, Y)
        pyplot = imported("matplotlib.pyplot", "matplotlib")
        collections = imported("matplotlib.collections", "matplotlib")
        if ax is not None and not hasattr(ax, "add_collection"):
            raise TypeError(fail("ax", "be axes of matplotlib", type(ax).__name__))
        axes = pyplot.figure().add_subplot() if ax is None else ax
        plan = _exact_plan(clouds, self.components_.T)
        drawn = [_in_plane(cloud @ self.components_.T, row) for row, cloud in enumerate(clouds)]
        rows, columns = np.nonzero(plan > _LINES * plan.max())
        lines = np.stack((drawn[0][rows], drawn[1][columns]), axis=1)
        axes.add_collection(collections.LineCollection(lines, colors="0.8", linewidths=0.5))
        for points, label in zip(drawn, self.classes_, strict=True):
            axes.scatter(*points.T, s=12, label=str(label))
        axes.set_xlabel("component 1")
        axes.set_ylabel("component 2" if len(self.components_) > 1 else "cloud")
        axes.legend()
        return axes

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

    def _read(self, X: Any, y: Any, Y: Any, *, fits: bool = False) -> _Clouds:
        """Check both clouds by scikit-learn's rules; if it ``fits``, learn features and labels."""
        if y is not None and Y is not None:
            raise ValueError(fail("Y", "be left out beside `y`", "both", "pass one of them"))
        if Y is not None:
            first = _validation.validate_data(self, X, dtype=np.float64, reset=fits)
            _validation.validate_data(self, Y, reset=False, skip_check_array=True)
            second = _utils.check_array(Y, dtype=np.float64, input_name="Y")
            labels = np.arange(2)
        else:
            shape = np.shape(y)
            if len(shape) > 1 and shape[1] > 1:
                raise ValueError(
                    fail("y", "be labels (n,)", f"shape {shape}", "pass a cloud as Y=")
                )
            points, y = _validation.validate_data(self, X, y, dtype=np.float64, reset=fits)
            _multiclass.check_classification_targets(y)
            labels = np.unique(y)
            if len(labels) != 2:
                given, remedy = f"{len(labels)} classes", "or pass the second cloud as Y="
                if len(labels) == 1:
                    given, remedy = "1 class", f"{remedy}; in cross-validation StratifiedKFold"
                raise ValueError(fail("y", "hold two labels", given, remedy))
            if not fits and not np.array_equal(labels, self.classes_):
                known = " and ".join(map(str, self.classes_))
                raise ValueError(
                    fail("y", f"hold the labels {known}", " and ".join(map(str, labels)))
                )
            first, second = points[y == labels[0]], points[y == labels[1]]
        if fits:
            self.classes_ = labels
            k = check_integer("n_components", self.n_components, 1)
            if k > first.shape[1]:
                bound = f"be at most n_features = {first.shape[1]}"
                raise ValueError(fail("n_components", bound, k))
        return first, second

    def _resampled(self, X: Any, y: Any, Y: Any) -> _Clouds:
        """Return the clouds of other fits than that of this estimator, which stays as it is."""
        other: ProjectionRobustWasserstein = _base.clone(self)
        return other._read(X, y, Y, fits=True)

    def _seed(self) -> int:
        return int(_utils.check_random_state(self.random_state).randint(2**31 - 1))

    def _search(
        self, clouds: _Clouds, seed: int, *, k: int | None = None, init: Array | None = None
    ) -> PRWResult:
        return projection_robust_wasserstein(
            *clouds,
            k=self.n_components if k is None else k,
            reg=self.reg,
            restarts=self.restarts,
            max_iter=self.max_iter,
            tol=self.tol,
            seed=seed,
            init=init,
        )

    def _statistic(self, clouds: _Clouds, held_out: float | None, random: Any) -> float:
        """Return the value of a fit to resampled clouds, or of its projection on a part of them."""
        fitted = other = clouds
        if held_out is not None:
            parts = [_split(cloud, held_out, random) for cloud in clouds]
            fitted, other = (parts[0][0], parts[1][0]), (parts[0][1], parts[1][1])
        with warnings.catch_warnings():  # a fit that has not converged is a statistic as well
            warnings.filterwarnings("ignore", "projection_robust_wasserstein has not converged")
            found = self._search(fitted, int(random.randint(2**31 - 1)))
        return _value(other, found)


def _value(clouds: _Clouds, found: PRWResult) -> float:
    return projected_wasserstein(*clouds, found.projection)


def _exact_plan(clouds: _Clouds, projection: Array) -> Array:
    read = read_clouds(*clouds, None, None)
    plan, _ = exact_plan(read, read_projection("projection", projection, read.dimension))
    whole: Array = read.full_plan(plan).numpy()
    return whole


def _extended(clouds: _Clouds, found: PRWResult, k: int) -> Array:
    """Return the projection with k columns: the added directions cost most under the plan."""
    (first, second), plan, point = clouds, found.plan, found.projection
    across = first.T @ plan @ second
    moment = (first.T * plan.sum(1)) @ first + (second.T * plan.sum(0)) @ second - across - across.T
    rest = np.eye(len(point)) - point @ point.T
    _, directions = np.linalg.eigh(rest @ moment @ rest)
    extended: Array = np.linalg.qr(np.hstack((point, directions[:, point.shape[1] - k :]))).Q
    return extended


def _resample(cloud: Array, random: Any) -> Array:
    """Return as many points, drawn with replacement."""
    drawn: Array = cloud[random.randint(len(cloud), size=len(cloud))]
    return drawn


def _split(cloud: Array, share: float, random: Any) -> _Clouds:
    """Return a cloud without a random share of its points, and these points."""
    size = round(share * len(cloud))
    if not 0 < size < len(cloud):
        condition = f"leave points on both sides in a cloud of {len(cloud)}"
        raise ValueError(fail("held_out", condition, share))
    order = random.permutation(len(cloud))
    return cloud[order[size:]], cloud[order[:size]]


def _in_plane(points: Array, row: int) -> Array:
    """Return two columns of projected points; those on a line get the number of their cloud."""
    if points.shape[1] == 1:
        return np.hstack((points, np.full_like(points, row)))
    return points[:, :2]
