"""Make a decoder's norms commute with rotations: gains into their readers, embeddings untied."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.decoder import (
    Decoder,
    Norm,
    check_sharing,
    mark,
    quantization_of,
    read_decoder,
    require_values,
    state_of,
)
from stiefel_opt.rotations.description import NORMS, Description
from stiefel_opt.rotations.verification import float32_copy, verified

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def prepare_(
    model: ModelT, *, description: Description | None = None, verify: Tensor | None = None
) -> ModelT:
    r"""Fuse the gain of every norm into the layers that read it, and untie the embeddings.

    .. math::
        W \leftarrow W\,\mathrm{diag}(g), \qquad b \leftarrow b / g, \qquad g \leftarrow 1

    with b the bias of a LayerNorm, which stays with it. The function stays, and its norms commute
    with every rotation of the residual stream; LayerNorms with those that keep the vector of ones.
    ``model.config`` says that it was done.

    Args:
        model: A decoder of transformers: of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM,
            Granite, Ministral, Helium), another one that is known (Gemma, GLM, Phi, Phi-3, OLMo,
            Cohere, StableLM, StarCoder2, Nemotron, Mixtral, Qwen3-MoE, DeepSeek-V3, GPT-2,
            GPT-NeoX, Falcon, OPT), or any with ``description``; in any floating-point dtype.
        description: From :func:`describe`; kept in the config. Default: that of the family.
        verify: Token ids, ``(batch, tokens)``, on which outputs before and after are compared;
            where they differ by more than 1e-4 of the largest, everything is put back to the bit. A
            model in half precision is changed if a float32 copy passes. Default: no comparison.

    Returns: The model.
    Raises:
        ValueError: for another family, naming what was looked for; for a norm of another kind, a
            gain of 0 in front of a bias, a gain between the blocks and the stream (Gemma 2 and 3,
            OLMo 2), a weight that is shared with something else than the head, and a model that is
            prepared already; for weights that are constrained; for outputs that differ.
        TypeError: for weights that are quantised or sharded, or a ``model`` that is no module.
    Note: One product for each weight, rounded once to its dtype; untying adds one embedding.
        ``verify`` takes two forward passes and a copy of the weights, in half precision four
        passes and a float32 copy with a copy of its own.
    """
    decoder = read_decoder(model, description=description)
    if state := state_of(decoder.model).get("state"):
        is_half = state.startswith("half")
        remedy = "load the original" if is_half else "go on with rotations.learn or load_online_"
        raise ValueError(fail("model", "not be prepared yet", f"a model that is {state}", remedy))
    if decoder.description.refusal is not None:
        remedy = "rotate heads and caches by rotations.hadamard(model, residual=False)"
        given = f"a {type(decoder.model).__name__}: {decoder.description.refusal}"
        raise ValueError(fail("model", "have a stream that can be rotated", given, remedy))
    check_sharing(decoder)
    for norm in decoder.norms():
        _check_norm(norm, decoder.description)
        for reader in norm.readers:
            if getattr(reader.parameter, "manifold", None) is not None:
                remedy = "call so.release: the gains of the norm would move it off the manifold"
                raise ValueError(
                    fail(f"weight behind {norm.name}", "be plain", "constrained", remedy)
                )
            require_values(reader.name, reader.parameter)
    if (wide := float32_copy(decoder.model, verify)) is not None:
        prepare_(wide, description=description, verify=verify)
    with verified(decoder.model, verify, "prepared"):
        mark(decoder.model, "half prepared")  # an interrupted model cannot be used
        _untie(decoder)
        for norm in decoder.norms():
            _fuse(norm, decoder.description.gain_offset)
        if quantization_of(decoder.model) is not None:  # the weights are no longer of its file
            decoder.model.hf_quantizer.remove_quantization_config(decoder.model)  # type: ignore[operator, union-attr]
        mark(decoder.model, "prepared", description=description)
    return model


def _fuse(norm: Norm, offset: float) -> None:
    """Move the gain of a norm into the layers that read it."""
    weight, bias = (getattr(norm.module, name, None) for name in ("weight", "bias"))
    if weight is None:
        return
    gain = weight + offset
    for reader in norm.readers:
        reader.weight.mul_(gain.to(reader.weight.device))
    if bias is not None:
        bias.copy_(torch.where(bias == 0, bias, bias / gain))
    weight.fill_(1 - offset)


def _check_norm(norm: Norm, description: Description) -> None:
    """Raise unless the module is the norm of the description on a random input."""
    module, kind, offset = norm.module, description.norm, description.gain_offset
    named = dict(module.named_parameters())
    allowed = {"weight", "bias"} if kind == "layer" else {"weight"}
    if not named.keys() <= allowed or (kind == "rms" and not named):
        wanted = "be an RMSNorm with one weight" if kind == "rms" else "be a LayerNorm"
        raise ValueError(fail(norm.name, wanted, ", ".join(named) or "none"))
    for each in named.values():
        require_values(norm.name, each)
    width = norm.readers[0].weight.size(-1)
    like = next(iter(named.values()), norm.readers[0].parameter)
    gain = named["weight"].float() + offset if "weight" in named else torch.ones(width)
    bias = named["bias"].float() if "bias" in named else torch.zeros(width)
    if bool(((gain.to(bias) == 0) & (bias != 0)).any()):
        raise ValueError(fail(norm.name, "have no gain of 0 in front of a bias", "some"))
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(0)).to(like)
    y = x.float() if kind == "rms" else x.float() - x.float().mean(-1, keepdim=True)
    expected = y * y.square().mean(-1, keepdim=True).rsqrt() * gain.to(y) + bias.to(y)
    error = float((module(x).float() - expected).abs().max())
    if not error <= 0.03 * float(expected.abs().max()) + 1e-6:  # its eps, and bfloat16
        formula = "divide by the root mean square" if kind == "rms" else f"be {NORMS[kind]}"
        wanted = f"multiply by its weight{f' + {offset:g}' if offset else ''} and {formula}"
        remedy = "pass a description from rotations.describe, with norm= and gain_offset="
        raise ValueError(
            fail(norm.name, wanted, f"a {type(module).__name__} that does not", remedy)
        )


def _untie(decoder: Decoder) -> None:
    """Give the head a weight of its own, and tell transformers to save and load it."""
    head, model = decoder.head, decoder.model
    if head.weight is not decoder.embeddings[0][1].weight:
        return
    head.weight = nn.Parameter(head.weight.clone(), requires_grad=head.weight.requires_grad)
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.tie_word_embeddings = False
    if getattr(model, "all_tied_weights_keys", None):
        model.all_tied_weights_keys = {}  # type: ignore[assignment]
