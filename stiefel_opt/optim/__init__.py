"""Optimizers for models in which some parameters stay orthonormal."""

from stiefel_opt.optim.cayley import CayleyAdam, CayleySGD
from stiefel_opt.optim.descent import ProjectedRGD
from stiefel_opt.optim.muon import StiefelMuon
from stiefel_opt.optim.stiefel import StiefelAdam, StiefelAdamW, StiefelSGD

__all__ = [
    "CayleyAdam",
    "CayleySGD",
    "ProjectedRGD",
    "StiefelAdam",
    "StiefelAdamW",
    "StiefelMuon",
    "StiefelSGD",
]
