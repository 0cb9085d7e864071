"""Optimizers for models in which some parameters stay orthonormal."""

from stiefel_opt.functional.flows import Length as Length
from stiefel_opt.optim.base import StiefelOptimizer as StiefelOptimizer
from stiefel_opt.optim.commit import Rule as Rule
from stiefel_opt.optim.commit import ScaleRule as ScaleRule
from stiefel_opt.optim.families import SCALE_MOMENTS as SCALE_MOMENTS
from stiefel_opt.optim.families import AdamLike as AdamLike
from stiefel_opt.optim.families import SGDLike as SGDLike
from stiefel_opt.optim.state import State as State
from stiefel_opt.optim.stiefel import StiefelAdam as StiefelAdam
from stiefel_opt.optim.stiefel import StiefelAdamW as StiefelAdamW
from stiefel_opt.optim.stiefel import StiefelSGD as StiefelSGD
