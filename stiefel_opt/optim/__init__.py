"""Optimizers for models in which some parameters stay orthonormal."""

from stiefel_opt.functional.flows import Length as Length
from stiefel_opt.optim.base import StiefelOptimizer as StiefelOptimizer
from stiefel_opt.optim.checkpoint import check_state_dict as check_state_dict
from stiefel_opt.optim.checks import check_metric as check_metric
from stiefel_opt.optim.checks import resolved as resolved
from stiefel_opt.optim.families import SCALE_MOMENTS as SCALE_MOMENTS
from stiefel_opt.optim.families import AdamLike as AdamLike
from stiefel_opt.optim.families import SGDLike as SGDLike
from stiefel_opt.optim.families import options_of as options_of
from stiefel_opt.optim.families import with_factor as with_factor
from stiefel_opt.optim.moves import Rule as Rule
from stiefel_opt.optim.moves import ScaleRule as ScaleRule
from stiefel_opt.optim.records import largest_of as largest_of
from stiefel_opt.optim.state import State as State
from stiefel_opt.optim.state import StateDict as StateDict
from stiefel_opt.optim.stiefel import SECOND_MOMENTS as SECOND_MOMENTS
from stiefel_opt.optim.stiefel import U_STATE as U_STATE
from stiefel_opt.optim.stiefel import Z_STATE as Z_STATE
from stiefel_opt.optim.stiefel import StiefelAdam as StiefelAdam
from stiefel_opt.optim.stiefel import StiefelAdamW as StiefelAdamW
from stiefel_opt.optim.stiefel import StiefelSGD as StiefelSGD
from stiefel_opt.optim.tagged import TaggedOptimizer as TaggedOptimizer
from stiefel_opt.optim.torch_rules import Group as Group
from stiefel_opt.optim.torch_rules import step_adam as step_adam
