"""Projection-robust Wasserstein distance: function, estimator of scikit-learn, baselines."""

import importlib as _importlib
import sys as _sys
import typing as _typing

from stiefel_opt.ot.ascent import Iteration as Iteration
from stiefel_opt.ot.barycenter import BarycenterResult as BarycenterResult
from stiefel_opt.ot.barycenter import prw_barycenter as prw_barycenter
from stiefel_opt.ot.baselines import RAGAS as RAGAS
from stiefel_opt.ot.baselines import RGAS as RGAS
from stiefel_opt.ot.discriminant import DiscriminantResult as DiscriminantResult
from stiefel_opt.ot.discriminant import wasserstein_discriminant as wasserstein_discriminant
from stiefel_opt.ot.exact import projected_wasserstein as projected_wasserstein
from stiefel_opt.ot.projection import PRWResult as PRWResult
from stiefel_opt.ot.projection import projection_robust_wasserstein as projection_robust_wasserstein

if _typing.TYPE_CHECKING:
    from stiefel_opt.ot.estimator import PermutationTest as PermutationTest
    from stiefel_opt.ot.estimator import ProjectionPath as ProjectionPath
    from stiefel_opt.ot.estimator import ProjectionRobustWasserstein as ProjectionRobustWasserstein

_OF_THE_ESTIMATOR = ("PermutationTest", "ProjectionPath", "ProjectionRobustWasserstein")


def __getattr__(name: str) -> _typing.Any:
    """Import what needs scikit-learn at its first use."""
    if name in _OF_THE_ESTIMATOR:
        return getattr(_importlib.import_module("stiefel_opt.ot.estimator"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=_sys.modules[__name__])  # "Did you mean ...?"
