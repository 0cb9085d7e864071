"""Orthonormal weights: optimizers for tagged parameters, and parametrizations."""

from stiefel_opt.constraints import LostTagWarning as LostTagWarning
from stiefel_opt.constraints import constrain as constrain
from stiefel_opt.constraints import param_groups as param_groups
from stiefel_opt.constraints import retag as retag
from stiefel_opt.manifold import ManifoldParameter as ManifoldParameter
from stiefel_opt.manifold import Stiefel as Stiefel
from stiefel_opt.monitor import orthonormality_error as orthonormality_error
from stiefel_opt.monitor import report as report
from stiefel_opt.optim import CayleyAdam as CayleyAdam
from stiefel_opt.optim import CayleySGD as CayleySGD
from stiefel_opt.optim import ProjectedRGD as ProjectedRGD
from stiefel_opt.optim import StiefelAdam as StiefelAdam
from stiefel_opt.optim import StiefelSGD as StiefelSGD
from stiefel_opt.parametrizations import orthogonal as orthogonal
from stiefel_opt.penalty import orthonormality_penalty as orthonormality_penalty

__version__ = "0.1.0"
