"""Modules built on the constraints: recurrent networks, convolutions, attention."""

from stiefel_opt.nn.attention import MultiheadAttention
from stiefel_opt.nn.conv import ConvNERU
from stiefel_opt.nn.delta import DeltaProduct
from stiefel_opt.nn.rnn import OrthogonalRNN

__all__ = ["ConvNERU", "DeltaProduct", "MultiheadAttention", "OrthogonalRNN"]
