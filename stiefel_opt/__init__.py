"""Orthonormal weights: optimizers for tagged parameters, and parametrizations.

What belongs to a client of the core (other methods, maps, tools, applications) is imported at its
first use.
"""

import importlib as _importlib
import sys as _sys
import typing as _typing

from stiefel_opt import errors, functional, numerics, optim, tags
from stiefel_opt.optim import StiefelAdam, StiefelAdamW, StiefelSGD
from stiefel_opt.tags.between import distance, exp, interpolate, log, mean
from stiefel_opt.tags.constraints import constrain, param_groups, project_, release, retag
from stiefel_opt.tags.foreign import trust
from stiefel_opt.tags.manifold import Stiefel
from stiefel_opt.tags.parameter import ManifoldParameter
from stiefel_opt.tags.points import orthogonal_, polar, project_tangent, random_point, retract
from stiefel_opt.tags.watch import LostTagWarning

if _typing.TYPE_CHECKING:
    from stiefel_opt import compat, methods, nn, ot, parametrizations, rotations, tools
    from stiefel_opt.methods import (
        AdaptiveAdam,
        AdaptiveSGD,
        CayleyAdam,
        CayleySGD,
        Minimum,
        ProjectedRGD,
        PublishedAdam,
        PublishedSGD,
        StiefelLBFGS,
        StiefelMuon,
        minimize,
    )
    from stiefel_opt.nn.lipschitz import (
        certified_accuracy,
        certified_radius,
        lipschitz_bound,
        lipschitz_rule,
        lipschitz_table,
    )
    from stiefel_opt.parametrizations import orthogonal
    from stiefel_opt.tools import (
        clip_grad_norm_,
        constrain_adapters,
        constrain_attention,
        constrain_transformer,
        export_adapters,
        from_geoopt,
        from_geotorch,
        from_torch_orthogonal,
        log_orthonormality,
        orthonormality_errors,
    )
    from stiefel_opt.tools.any_optimizer import on_manifold
    from stiefel_opt.tools.averaging import averaged
    from stiefel_opt.tools.peft_parts import StellaConfig as StellaConfig
    from stiefel_opt.tools.penalty import orthonormality_penalty
    from stiefel_opt.tools.report import orthonormality_error, report
    from stiefel_opt.tools.versions import show_versions

__version__ = "0.1.0"

_ROOMS = ("compat", "methods", "nn", "ot", "parametrizations", "rotations", "tools")
_NAMES = {
    "methods": (
        "AdaptiveAdam", "AdaptiveSGD", "CayleyAdam", "CayleySGD", "Minimum", "ProjectedRGD",
        "PublishedAdam", "PublishedSGD", "StiefelLBFGS", "StiefelMuon", "minimize",
    ),
    "nn.lipschitz": (
        "certified_accuracy", "certified_radius", "lipschitz_bound", "lipschitz_rule",
        "lipschitz_table",
    ),
    "parametrizations": ("orthogonal",),
    "tools": (
        "clip_grad_norm_", "constrain_adapters", "constrain_attention", "constrain_transformer",
        "export_adapters", "from_geoopt", "from_geotorch", "from_torch_orthogonal",
        "log_orthonormality", "orthonormality_errors",
    ),
    "tools.any_optimizer": ("on_manifold",),
    "tools.averaging": ("averaged",),
    "tools.peft_parts": ("StellaConfig",),
    "tools.penalty": ("orthonormality_penalty",),
    "tools.report": ("orthonormality_error", "report"),
    "tools.versions": ("show_versions",),
}  # fmt: skip
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = [
    "AdaptiveAdam", "AdaptiveSGD", "CayleyAdam", "CayleySGD", "LostTagWarning", "ManifoldParameter",
    "Minimum", "ProjectedRGD", "PublishedAdam", "PublishedSGD", "Stiefel", "StiefelAdam",
    "StiefelAdamW", "StiefelLBFGS", "StiefelMuon", "StiefelSGD", "__version__", "averaged",
    "certified_accuracy", "certified_radius", "clip_grad_norm_", "compat", "constrain",
    "constrain_adapters", "constrain_attention", "constrain_transformer", "distance", "errors",
    "exp", "export_adapters", "from_geoopt", "from_geotorch", "from_torch_orthogonal", "functional",
    "interpolate", "lipschitz_bound", "lipschitz_rule", "lipschitz_table", "log",
    "log_orthonormality", "mean", "methods", "minimize", "nn", "numerics", "on_manifold", "optim",
    "orthogonal", "orthogonal_", "orthonormality_error", "orthonormality_errors",
    "orthonormality_penalty", "ot", "param_groups", "parametrizations", "polar", "project_",
    "project_tangent", "random_point", "release", "report", "retag", "retract", "rotations",
    "show_versions", "tags", "tools", "trust",
]  # fmt: skip


def __getattr__(name: str) -> _typing.Any:
    """Import what few programs need, or what needs more packages, at its first use."""
    if name in _ROOMS:
        return _importlib.import_module(f"stiefel_opt.{name}")
    if name in _HOMES:
        value = getattr(_importlib.import_module(f"stiefel_opt.{_HOMES[name]}"), name)
        return globals().setdefault(name, value)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message, name=name, obj=_sys.modules[__name__])  # "Did you mean ...?"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
