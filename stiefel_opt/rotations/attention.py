"""Functions of queries and keys, applied after the rotary embedding in transformers' models."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.decoder import Decoder, own_config

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys, (..., tokens, head)
TURNS = "_stiefel_turns"  # attribute of an attention module: list of functions
_TABLE = "ALL_ATTENTION_FUNCTIONS"
PREFIX = "stiefel_"  # of the name under which the model's attention is registered again


def add_turn(decoder: Decoder, turn: Turn) -> None:
    """Apply ``turn`` to queries and keys of every layer, behind the functions added before."""
    config = own_config(decoder.model)
    base = getattr(config, "_attn_implementation", None)
    if not isinstance(base, str):
        remedy = "leave kv_bits=None and R3 out"
        given = f"a {type(decoder.model).__name__} that does not"
        raise ValueError(fail("model", "choose its attention by its config", given, remedy))
    check_attention(decoder)
    for layer in decoder.layers:
        layer.attention.__dict__.setdefault(TURNS, []).append(turn)
    if base.startswith(PREFIX):
        return
    functions = getattr(importlib.import_module("transformers.modeling_utils"), _TABLE)
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    functions.register(PREFIX + base, functools.partial(_attend, base))
    masks.register(PREFIX + base, masks[base])
    config._attn_implementation = PREFIX + base


def check_attention(decoder: Decoder) -> None:
    """Raise for an attention of its own: no function of queries and keys would be called."""
    attention = type(decoder.layers[0].attention)
    modules = (sys.modules.get(kind.__module__) for kind in attention.__mro__)
    chooses = isinstance(getattr(getattr(decoder.model, "config", None), "_attn_implementation", None), str)
    if chooses and not any(hasattr(module, _TABLE) for module in modules):
        remedy = "leave kv_bits=None and R3 out"
        wanted = "take its attention from transformers' table"
        raise ValueError(fail("model", wanted, f"a {attention.__name__}", remedy))


def remove_turn(decoder: Decoder, turn: Turn) -> None:
    """Undo :func:`add_turn`."""
    for layer in decoder.layers:
        layer.attention.__dict__[TURNS].remove(turn)
    if not any(layer.attention.__dict__[TURNS] for layer in decoder.layers):
        config: Any = decoder.model.config
        config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)


def _attend(
    base: str, module: nn.Module, query: Tensor, key: Tensor, *others: Any, **options: Any
) -> Any:
    """Apply the turns of a module, then the model's own attention."""
    for turn in module.__dict__.get(TURNS, ()):
        query, key = turn(query, key)
    functions = getattr(importlib.import_module("transformers.modeling_utils"), _TABLE)
    attend = functions.get_interface(base, _eager(module))
    return attend(module, query, key, *others, **options)


def _eager(module: nn.Module) -> Callable[..., Any] | None:
    """Return the eager attention in the file of the module's class, if there is one."""
    for kind in type(module).__mro__:
        eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if eager is not None:
            return cast("Callable[..., Any]", eager)
    return None
