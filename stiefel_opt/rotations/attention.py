"""Functions of queries and keys, applied after the rotary embedding in transformers' models."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.decoder import Decoder, own_config

Turn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # queries and keys, (..., tokens, head)
TURNS = "_stiefel_turns"  # attribute of an attention module: list of functions
PREFIX = "stiefel_"  # of the name under which the model's attention is registered again


def add_turn(decoder: Decoder, turn: Turn | Mapping[str, Turn]) -> None:
    """Apply ``turn`` to queries and keys of every layer, behind the functions added before.

    A dict has one for each layer, by name.
    """
    config = own_config(decoder.model)
    base = getattr(config, "_attn_implementation", None)
    if not isinstance(base, str) or not chooses_attention(decoder):
        remedy = "leave kv_bits=None and R3 out"
        given = f"a {type(decoder.model).__name__} that does not"
        raise ValueError(fail("model", "choose its attention by its config", given, remedy))
    for layer in decoder.layers:
        own = turn[layer.name] if isinstance(turn, Mapping) else turn
        layer.attention.__dict__.setdefault(TURNS, []).append(own)
        if _keep_turns not in layer.attention._forward_pre_hooks.values():
            layer.attention.register_forward_pre_hook(_keep_turns)
    _register(config)


def _register(config: Any) -> None:
    """Make the attention that ``config`` names one that turns."""
    base = config._attn_implementation
    if base.startswith(PREFIX):
        return
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    masks = importlib.import_module("transformers.masking_utils").ALL_MASK_ATTENTION_FUNCTIONS
    functions.register(PREFIX + base, functools.partial(_attend, base))
    if base in masks:
        masks.register(PREFIX + base, masks[base])
    config._attn_implementation = PREFIX + base


def _keep_turns(attention: nn.Module, _: Any) -> None:
    """Pre-hook: ``set_attn_implementation`` may have named another attention meanwhile."""
    if attention.__dict__.get(TURNS):
        _register(attention.config)


def chooses_attention(decoder: Decoder) -> bool:
    """Say whether every layer takes its attention from transformers' registry."""
    return all(
        any(
            hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")
            for kind in type(layer.attention).__mro__
        )
        for layer in decoder.layers
    )


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
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    attend = functions.get_interface(base, _eager(module))
    return attend(module, query, key, *others, **options)


def _eager(module: nn.Module) -> Callable[..., Any] | None:
    """Return the eager attention in the file of the module's class, if there is one."""
    for kind in type(module).__mro__:
        eager = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
        if eager is not None:
            return cast("Callable[..., Any]", eager)
    return None
