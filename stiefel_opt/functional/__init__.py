"""Pure functions on batches of matrices, tensors in and tensors out: update rules and maps."""

from stiefel_opt.functional.cayley import cayley_adam_, cayley_sgd_
from stiefel_opt.functional.descent import descend_
from stiefel_opt.functional.momentum import adam_, metric_parameter, normal_part, sgd_
from stiefel_opt.functional.reflections import (
    cwy,
    cwy_factors,
    generalized_householder,
    householder,
    tcwy,
)

__all__ = [
    "adam_",
    "cayley_adam_",
    "cayley_sgd_",
    "descend_",
    "metric_parameter",
    "normal_part",
    "sgd_",
    "cwy",
    "cwy_factors",
    "generalized_householder",
    "householder",
    "metric_parameter",
    "normal_part",
    "sgd_",
    "tcwy",
]
