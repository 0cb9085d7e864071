"""Make a decoder's norms commute with rotations: gains into their readers, embeddings untied."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.decoder import (
    check_sharing,
    mark,
    quantization_of,
    read_decoder,
    state_of,
    whole,
)

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def prepare_(model: ModelT) -> ModelT:
    r"""Fuse the gain of every RMSNorm into the layers that read it, and untie the embeddings.

    .. math:: W \leftarrow W\,\mathrm{diag}(g), \qquad g \leftarrow 1

    The function stays, and its norms commute with every rotation of the residual stream.
    ``model.config`` says that it was done.

    Args:
        model: A decoder of transformers' Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM): with
            or without biases, tied embeddings and grouped queries, in any floating-point dtype.

    Returns: The model.
    Raises:
        ValueError: for another family, naming what was looked for; for a norm that is no RMSNorm, a
            weight that is shared with something else than the head, and a model that is prepared
            already; for weights that are constrained.
        TypeError: for weights that are quantised or sharded, or a ``model`` that is no module.
    Note: One product for each weight, rounded once to its dtype; untying adds one embedding.
    """
    decoder = read_decoder(model)
    if state := state_of(decoder.model).get("state"):
        is_half = state.startswith("half")
        remedy = "load the original" if is_half else "go on with rotations.learn or load_online_"
        raise ValueError(fail("model", "not be prepared yet", f"a model that is {state}", remedy))
    check_sharing(decoder)
    for name, norm, readers in decoder.norms():
        _check_norm(name, norm)
        for reader in readers:
            if getattr(reader.weight, "manifold", None) is not None:
                remedy = "call so.release: the gains of the norm would move it off the manifold"
                raise ValueError(fail(f"weight behind {name}", "be plain", "constrained", remedy))
            whole(name, reader.weight)
    mark(decoder.model, "half prepared")  # an interrupted model cannot be used
    if decoder.head.weight is decoder.embedding.weight:
        trained = decoder.head.weight.requires_grad
        decoder.head.weight = nn.Parameter(decoder.head.weight.clone(), requires_grad=trained)
        _untie_config(decoder.model)
    for _, norm, readers in decoder.norms():
        gain: Tensor = norm.weight  # type: ignore[assignment]
        for reader in readers:
            reader.weight.mul_(gain.to(reader.weight.device))
        gain.fill_(1)
    if quantization_of(decoder.model) is not None:  # the weights are no longer those of its file
        decoder.model.hf_quantizer.remove_quantization_config(decoder.model)  # type: ignore[operator, union-attr]
    mark(decoder.model, "prepared")
    return model


def _check_norm(name: str, norm: nn.Module) -> None:
    """Raise unless ``norm`` is x g / rms(x) on a random input."""
    named = dict(norm.named_parameters())
    gain = named.get("weight")
    if gain is None or set(named) != {"weight"} or gain.ndim != 1:
        raise ValueError(fail(name, "be an RMSNorm with one weight", ", ".join(named) or "none"))
    whole(name, gain)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(gain), generator=generator).to(gain)
    expected = x.float() * x.float().square().mean(-1, keepdim=True).rsqrt() * gain.float()
    error = float((norm(x).float() - expected).abs().max())
    if not error <= 0.03 * float(expected.abs().max()) + 1e-6:  # its eps, and bfloat16
        wanted = "multiply by its weight and divide by the root mean square"
        remedy = "only Llama, Mistral, Qwen2, Qwen3 and models built like them can be rotated"
        raise ValueError(fail(name, wanted, f"a {type(norm).__name__} that does not", remedy))


def _untie_config(model: Any) -> None:
    """Tell transformers that the head has a weight of its own, so that it is saved and loaded."""
    if getattr(model, "config", None) is not None:
        model.config.tie_word_embeddings = False
    if getattr(model, "all_tied_weights_keys", None):
        model.all_tied_weights_keys = {}
