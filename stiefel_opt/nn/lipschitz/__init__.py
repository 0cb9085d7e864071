"""Proven Lipschitz constants of networks, and what they certify."""

from stiefel_opt.nn.lipschitz.bounds import lipschitz_bound, lipschitz_table
from stiefel_opt.nn.lipschitz.certificates import certified_accuracy, certified_radius
from stiefel_opt.nn.lipschitz.rules import lipschitz_rule

__all__ = [
    "certified_accuracy",
    "certified_radius",
    "lipschitz_bound",
    "lipschitz_rule",
    "lipschitz_table",
]
