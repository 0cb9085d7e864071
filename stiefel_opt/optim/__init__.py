"""Optimizers for models in which some parameters stay orthonormal."""

from stiefel_opt.optim.momentum import StiefelAdam, StiefelSGD

__all__ = ["StiefelAdam", "StiefelSGD"]
