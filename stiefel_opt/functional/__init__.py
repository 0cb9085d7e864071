"""Pure functions on batches of matrices, tensors in and tensors out: update rules and maps."""

from stiefel_opt.functional.cayley import cayley_adam_, cayley_sgd_
from stiefel_opt.functional.delta import delta_product
from stiefel_opt.functional.descent import descend_
from stiefel_opt.functional.momentum import adam_, metric_parameter, normal_part, sgd_
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
from stiefel_opt.functional.stiefel_muon import muon_, spectral_direction, spectral_gap
from stiefel_opt.functional.unitary import eurnn, urnn

__all__ = [
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
    "normal_part",
    "own",
    "rollout",
    "sgd_",
    "spectral_direction",
    "spectral_gap",
    "tcwy",
    "urnn",
]
