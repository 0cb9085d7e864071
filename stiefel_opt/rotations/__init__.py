"""Rotations of a language model that make its activations survive few bits, learned and folded."""

import importlib as _importlib
from typing import Any as _Any

from stiefel_opt.rotations.description import describe as describe
from stiefel_opt.rotations.folding import fold_ as fold_
from stiefel_opt.rotations.folding import load_online_ as load_online_
from stiefel_opt.rotations.learning import learn as learn
from stiefel_opt.rotations.preparation import prepare_ as prepare_
from stiefel_opt.rotations.quantizers import quantized as quantized
from stiefel_opt.rotations.result import Rotations as Rotations
from stiefel_opt.rotations.starts import hadamard as hadamard


def __getattr__(name: str) -> _Any:
    """Import what needs transformers at its first use."""
    if name == "TurnedCache":
        return _importlib.import_module("stiefel_opt.rotations.turned_cache").TurnedCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
