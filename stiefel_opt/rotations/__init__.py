"""Rotations of a language model that make its activations survive few bits, learned and folded."""

from stiefel_opt.rotations.description import describe as describe
from stiefel_opt.rotations.folding import fold_ as fold_
from stiefel_opt.rotations.folding import load_online_ as load_online_
from stiefel_opt.rotations.learning import learn as learn
from stiefel_opt.rotations.preparation import prepare_ as prepare_
from stiefel_opt.rotations.quantizers import quantized as quantized
from stiefel_opt.rotations.result import Rotations as Rotations
from stiefel_opt.rotations.starts import hadamard as hadamard
