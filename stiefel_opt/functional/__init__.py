"""Pure update rules on batches of matrices: tensors in, tensors out, no parameters."""

from stiefel_opt.functional.momentum import adam_, metric_parameter, normal_part, sgd_

__all__ = ["adam_", "metric_parameter", "normal_part", "sgd_"]
