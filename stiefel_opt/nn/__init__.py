"""Modules built on the constraints: recurrent networks, convolutions, attention, isometries."""

from stiefel_opt.nn.attention import MultiheadAttention
from stiefel_opt.nn.conv import ConvNERU
from stiefel_opt.nn.delta import DeltaProduct, delta_product
from stiefel_opt.nn.isometric_conv import IsometricConv2d
from stiefel_opt.nn.isometries import (
    BetaAbs,
    L2Pool2d,
    MarginCrossEntropy,
    MaxMin,
    NormalizedLinear,
    ShiftConv2d,
    SpatialShift,
)
from stiefel_opt.nn.recurrence import rollout
from stiefel_opt.nn.rnn import OrthogonalRNN

__all__ = [
    "BetaAbs",
    "ConvNERU",
    "DeltaProduct",
    "IsometricConv2d",
    "L2Pool2d",
    "MarginCrossEntropy",
    "MaxMin",
    "MultiheadAttention",
    "NormalizedLinear",
    "OrthogonalRNN",
    "ShiftConv2d",
    "SpatialShift",
    "delta_product",
    "rollout",
]
