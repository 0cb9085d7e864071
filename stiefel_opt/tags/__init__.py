"""Tags: how a tensor is read as matrices, which parameters are constrained, what may go wrong."""

from stiefel_opt.tags.constraints import apply_readings as apply_readings
from stiefel_opt.tags.constraints import check_value as check_value
from stiefel_opt.tags.constraints import project_ as project_
from stiefel_opt.tags.manifold import Stiefel as Stiefel
from stiefel_opt.tags.points import kept_scale as kept_scale
from stiefel_opt.tags.points import mean_singular_value as mean_singular_value
from stiefel_opt.tags.points import rms_scale as rms_scale
from stiefel_opt.tags.points import tangent_part as tangent_part
from stiefel_opt.tags.report import in_words as in_words
from stiefel_opt.tags.report import scales_of as scales_of
from stiefel_opt.tags.report import table as table
