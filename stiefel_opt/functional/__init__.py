"""Pure update rules on batches of matrices: tensors in, tensors out, no parameters."""

from stiefel_opt.functional.cayley import cayley_adam_, cayley_sgd_
from stiefel_opt.functional.descent import descend_
from stiefel_opt.functional.momentum import adam_, metric_parameter, normal_part, sgd_

__all__ = [
    "adam_",
    "cayley_adam_",
    "cayley_sgd_",
    "descend_",
    "metric_parameter",
    "normal_part",
    "sgd_",
]
