"""Orthonormal weights: optimizers for tagged parameters, and parametrizations."""

import importlib
import sys as _sys
from typing import Any as _Any

from stiefel_opt import ot as ot
from stiefel_opt.lipschitz import certified_accuracy as certified_accuracy
from stiefel_opt.lipschitz import certified_radius as certified_radius
from stiefel_opt.lipschitz import lipschitz_bound as lipschitz_bound
from stiefel_opt.lipschitz import lipschitz_rule as lipschitz_rule
from stiefel_opt.lipschitz import lipschitz_table as lipschitz_table
from stiefel_opt.methods import AdaptiveAdam as AdaptiveAdam
from stiefel_opt.methods import AdaptiveSGD as AdaptiveSGD
from stiefel_opt.methods import CayleyAdam as CayleyAdam
from stiefel_opt.methods import CayleySGD as CayleySGD
from stiefel_opt.methods import Minimum as Minimum
from stiefel_opt.methods import ProjectedRGD as ProjectedRGD
from stiefel_opt.methods import PublishedAdam as PublishedAdam
from stiefel_opt.methods import PublishedSGD as PublishedSGD
from stiefel_opt.methods import StiefelLBFGS as StiefelLBFGS
from stiefel_opt.methods import StiefelMuon as StiefelMuon
from stiefel_opt.methods import minimize as minimize
from stiefel_opt.optim import StiefelAdam as StiefelAdam
from stiefel_opt.optim import StiefelAdamW as StiefelAdamW
from stiefel_opt.optim import StiefelSGD as StiefelSGD
from stiefel_opt.parametrizations import orthogonal as orthogonal
from stiefel_opt.tags.between import distance as distance
from stiefel_opt.tags.between import exp as exp
from stiefel_opt.tags.between import interpolate as interpolate
from stiefel_opt.tags.between import log as log
from stiefel_opt.tags.between import mean as mean
from stiefel_opt.tags.constraints import LostTagWarning as LostTagWarning
from stiefel_opt.tags.constraints import constrain as constrain
from stiefel_opt.tags.constraints import param_groups as param_groups
from stiefel_opt.tags.constraints import project_ as project_
from stiefel_opt.tags.constraints import release as release
from stiefel_opt.tags.constraints import retag as retag
from stiefel_opt.tags.foreign import trust as trust
from stiefel_opt.tags.manifold import Stiefel as Stiefel
from stiefel_opt.tags.parameter import ManifoldParameter as ManifoldParameter
from stiefel_opt.tags.points import orthogonal_ as orthogonal_
from stiefel_opt.tags.points import polar as polar
from stiefel_opt.tags.points import project_tangent as project_tangent
from stiefel_opt.tags.points import random_point as random_point
from stiefel_opt.tags.points import retract as retract
from stiefel_opt.tags.report import orthonormality_error as orthonormality_error
from stiefel_opt.tags.report import report as report
from stiefel_opt.tools import clip_grad_norm_ as clip_grad_norm_
from stiefel_opt.tools import constrain_adapters as constrain_adapters
from stiefel_opt.tools import constrain_attention as constrain_attention
from stiefel_opt.tools import constrain_transformer as constrain_transformer
from stiefel_opt.tools import export_adapters as export_adapters
from stiefel_opt.tools import from_geoopt as from_geoopt
from stiefel_opt.tools import from_geotorch as from_geotorch
from stiefel_opt.tools import from_torch_orthogonal as from_torch_orthogonal
from stiefel_opt.tools import log_orthonormality as log_orthonormality
from stiefel_opt.tools import orthonormality_errors as orthonormality_errors
from stiefel_opt.tools.any_optimizer import on_manifold as on_manifold
from stiefel_opt.tools.averaging import averaged as averaged
from stiefel_opt.tools.penalty import orthonormality_penalty as orthonormality_penalty

__version__ = "0.1.0"


def __getattr__(name: str) -> _Any:
    """Import what few programs need, or what needs more packages, at its first use."""
    if name in ("compat", "rotations"):
        return importlib.import_module(f"stiefel_opt.{name}")
    if name == "StellaConfig":
        return importlib.import_module("stiefel_opt.tools.peft_parts").StellaConfig
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=_sys.modules[__name__])  # "Did you mean ...?"
