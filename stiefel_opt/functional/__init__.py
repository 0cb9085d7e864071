"""Pure functions on batches of matrices, tensors in and tensors out: update rules and maps."""

from stiefel_opt.functional.cayley import cayley_adam_, cayley_sgd_
from stiefel_opt.functional.delta import delta_product
from stiefel_opt.functional.descent import descend_
from stiefel_opt.functional.flows import Setting, metric_parameter
from stiefel_opt.functional.own import own
from stiefel_opt.functional.recurrence import rollout
from stiefel_opt.functional.reflections import (
    cwy,
    cwy_factors,
    generalized_householder,
    householder,
    tcwy,
)
from stiefel_opt.functional.skew_maps import cayley_map, exponential_map
from stiefel_opt.functional.stiefel_adam import Moments, adam_
from stiefel_opt.functional.stiefel_muon import muon_, spectral_direction, spectral_gap
from stiefel_opt.functional.stiefel_sgd import Deferred, Velocity, sgd_
from stiefel_opt.functional.unitary import eurnn, urnn

__all__ = [
    "Deferred",
    "Moments",
    "Setting",
    "Velocity",
    "adam_",
    "cayley_adam_",
    "cayley_map",
    "cayley_sgd_",
    "cwy",
    "cwy_factors",
    "delta_product",
    "descend_",
    "eurnn",
    "exponential_map",
    "generalized_householder",
    "householder",
    "metric_parameter",
    "muon_",
    "own",
    "rollout",
    "sgd_",
    "spectral_direction",
    "spectral_gap",
    "tcwy",
    "urnn",
]
