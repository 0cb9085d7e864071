"""Projection-robust Wasserstein distance, with baselines."""

from stiefel_opt.ot.ascent import Iteration as Iteration
from stiefel_opt.ot.baselines import RAGAS as RAGAS
from stiefel_opt.ot.baselines import RGAS as RGAS
from stiefel_opt.ot.exact import projected_wasserstein as projected_wasserstein
from stiefel_opt.ot.projection import PRWResult as PRWResult
from stiefel_opt.ot.projection import projection_robust_wasserstein as projection_robust_wasserstein
