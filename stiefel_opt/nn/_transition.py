"""How a module puts one of its weights on the manifold, by a tag or by a map."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from stiefel_opt.constraints import constrain, readings

__all__ = ["TAGGED", "factors_or_matrix", "keep_on_load", "set_transition"]

TAGGED: Final = "tagged"

_HALF = (torch.float16, torch.bfloat16)
_TRAINABLE = (torch.float32, torch.float64)


def set_transition(module: nn.Module, name: str, transition: str | None, **options: Any) -> None:
    """Constrain parameter ``name``: by a tag, by a map, or not at all for None."""
    options = {key: value for key, value in options.items() if value is not None}
    if transition == TAGGED:
        options.pop("generator", None)
        constrain(module, name, **options)


def factors_or_matrix(module: nn.Module, name: str) -> tuple[Tensor, Tensor] | tuple[Tensor]:
    """Return (A, C) with Q' = I - A C where that is how Q is stored, else (Q,); never in half."""
    weight: Tensor = getattr(module, name)
    return (weight.float() if weight.dtype in _HALF else weight,)


def keep_on_load(module: nn.Module) -> None:
    """Let the constrained parameters below ``module`` be projected after ``load_state_dict``."""
    module.register_load_state_dict_post_hook(_project_loaded)  # type: ignore[no-untyped-call]


def _project_loaded(module: nn.Module, incompatible_keys: Any) -> None:  # noqa: ARG001
    for name, (parameter, reading) in readings(module).items():
        if reading is not None and parameter.dtype in _TRAINABLE:
            constrain(module, name, **reading.as_dict())
