"""Fixed rotations that stay in the forward pass of a folded model, and how a checkpoint says so.

R4 turns the product of an MLP on its way into ``down_proj``. It must act outside everything that
wraps this layer: an adapter inside of which W alone is turned cannot be merged into W. So the hook
of R4 belongs to the MLP, and moves to whatever stands in the place of ``down_proj``.

Two notes name the call that is missing after loading: a buffer, which transformers' load report
shows, and a method of quantisation that transformers warns of as unknown. A model that is saved
without the call loses the buffer, not the method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.attention import TURNS, add_turn
from stiefel_opt.rotations.decoder import (
    CALL,
    Decoder,
    Layer,
    Linear,
    own_config,
    quantization_of,
    read_decoder,
    state_of,
)
from stiefel_opt.rotations.hadamard_matrices import rotate_fixed

TURNED = "_stiefel_turned"  # of an MLP: name and module of the layer whose input R4 turns
NOTE = "online_{}_" + CALL


def install(decoder: Decoder, online: tuple[str, ...]) -> None:
    """Put the rotations ``online`` into the forward pass, once, with their notes."""
    for layer in decoder.layers:
        owners = {"R3": layer.attention}
        if layer.down is not None:
            owners["R4"] = layer.down.owner
            if "R4" in online:
                _turn_inputs(layer.down)
        for name, owner in owners.items():
            if name in online:
                owner.register_buffer(NOTE.format(name), torch.ones(()))
    config = own_config(decoder.model)
    if online and config is not None and quantization_of(decoder.model) is None:
        config.quantization_config = {"quant_method": NOTE.format("_".join(online))}
    if "R3" in online and not _turns_keys(decoder.layers[0]):
        turns = {layer.name: _TurnBoth() for layer in decoder.layers}
        add_turn(decoder, turns)
        for layer in decoder.layers:
            hook = turns[layer.name].offer
            layer.attention.register_forward_pre_hook(hook, with_kwargs=True)


def usable_decoder(model: object) -> Decoder:
    """Return the parts of a decoder; raise where the online rotations it needs are not there."""
    decoder = read_decoder(model)
    needed = state_of(decoder.model).get("online", ())
    missing = [name for name in needed if not _installed(name, decoder)]
    if missing:
        names = ", ".join(missing)
        remedy = "call rotations.load_online_(model) after loading"
        raise ValueError(fail("model", f"run its online {names}", "a folded model without", remedy))
    return decoder


# ---- R4 ------------------------------------------------------------------------------------------


def _turn_inputs(down: Linear) -> None:
    owner, leaf = down.owner, down.leaf
    if TURNED not in owner.__dict__:
        owner.__dict__[TURNED] = (leaf, None)
        owner.register_forward_pre_hook(_follow)
    _follow(owner)


def _follow(owner: nn.Module, _: Any = None) -> None:
    """Move the hook of R4 where ``leaf`` of ``owner`` has been replaced, wrapped or unwrapped."""
    leaf, former = owner.__dict__[TURNED]
    current = getattr(owner, leaf)
    if current is former:
        return
    for module in current.modules():
        for key, hook in [*module._forward_pre_hooks.items()] if module is not current else ():
            if hook is _turn_input:
                del module._forward_pre_hooks[key]
    if not _has_turn(current):
        current.register_forward_pre_hook(_turn_input, prepend=True)
    owner.__dict__[TURNED] = (leaf, current)


def _turn_input(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rotate_fixed(inputs[0]), *inputs[1:])


def _has_turn(module: nn.Module) -> bool:
    return _turn_input in module._forward_pre_hooks.values()


def _turns_products(layer: Layer) -> bool:
    if layer.down is None:
        return True
    if TURNED in layer.down.owner.__dict__:
        _follow(layer.down.owner)
    return _has_turn(layer.down.module)


# ---- R3 ------------------------------------------------------------------------------------------


class _TurnedKeys:
    """A cache, for one call of an attention module: its keys are stored turned."""

    def __init__(self, cache: Any) -> None:
        self._cache, self.was_used = cache, False

    def update(self, keys: Tensor, values: Tensor, *others: Any, **options: Any) -> Any:
        self.was_used = True
        return self._cache.update(rotate_fixed(keys), values, *others, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _TurnBoth:
    """R3 of one attention module: of queries, and of keys on their way into the cache."""

    def __init__(self) -> None:
        self.cache: _TurnedKeys | None = None

    def offer(self, _: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """Pre-hook of the module: put a cache that turns keys in the place of the caller's."""
        cache = options.get("past_key_values")
        turns_itself = cache is None or getattr(cache, "turns_keys", False)
        self.cache = None if turns_itself else _TurnedKeys(cache)
        return (
            (inputs, options)
            if turns_itself
            else (inputs, {**options, "past_key_values": self.cache})
        )

    def __call__(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        stored, self.cache = self.cache is not None and self.cache.was_used, None
        return rotate_fixed(queries), keys if stored else rotate_fixed(keys)


def _turns_keys(layer: Layer) -> bool:
    return any(isinstance(turn, _TurnBoth) for turn in layer.attention.__dict__.get(TURNS, ()))


def _installed(name: str, decoder: Decoder) -> bool:
    """Say whether every layer has the rotation; one of another name is nowhere."""
    looks = {"R3": _turns_keys, "R4": _turns_products}
    return name in looks and all(map(looks[name], decoder.layers))
