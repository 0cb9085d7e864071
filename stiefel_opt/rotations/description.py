"""Descriptions: names of a decoder's modules that read, write and normalise its residual stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stiefel_opt.errors import check_choice, check_range, fail

NORMS = {"rms": "x / rms(x)", "layer": "(x - mean(x)) / std(x)"}


@dataclasses.dataclass(frozen=True)
class Description:
    """What :func:`describe` returns: names, and nothing of a model."""

    layers: str
    embeddings: tuple[str, ...]
    final: str
    head: str
    norms: Mapping[str, tuple[str, ...]]
    writers: tuple[str, ...]
    norm: str = "rms"
    gain_offset: float = 0.0
    values: str | None = None
    output: str | None = None
    down: str | None = None
    refusal: str | None = None  # why the stream cannot be rotated

    def as_dict(self) -> dict[str, Any]:
        """Return it for a config that is written as JSON."""
        norms = {name: list(readers) for name, readers in self.norms.items()}
        content = {**dataclasses.asdict(self), "norms": norms}
        content |= {"embeddings": list(self.embeddings), "writers": list(self.writers)}
        return {name: value for name, value in content.items() if value is not None}


def describe(
    *,
    layers: str,
    embeddings: Sequence[str],
    final: str,
    norms: Mapping[str, Sequence[str]],
    writers: Sequence[str],
    head: str = "lm_head",
    norm: str = "rms",
    gain_offset: float = 0.0,
    values: str | None = None,
    output: str | None = None,
    down: str | None = None,
) -> Description:
    r"""Describe a decoder by the names of its modules, for :func:`prepare_` to rotate its stream.

    With x a row of the residual stream, n a norm and R the rotation,

    .. math::
        x \leftarrow x + f(n(x)) \quad\text{becomes}\quad
        x R \leftarrow x R + f(n(x R) R^\top) R

    where the layers that read n(x) take up its gain and :math:`R^\top`, and those that write f
    take up R.

    Args:
        layers: The list of blocks, as "model.layers".
        embeddings: Of tokens, and of positions where these are learned.
        final: The norm in front of the head.
        norms: In a block, by norm, all that read it: linear layers, fused or not, transformers'
            ``Conv1D``, routers, and parameters of experts. A block may lack some of them.
        writers: In a block, all that add to the stream.
        head: The layer of logits. Default: "lm_head".
        norm: "rms", x / rms(x), or "layer", (x - mean) / std: there R keeps the vector of ones.
        gain_offset: A norm multiplies by its weight plus this; 1 for Gemma and Nemotron.
        values, output: In a block the layer of values and the writer that reads the heads, for R2.
            Default: without R2.
        down: In a block the writer behind the product of the MLP, for R4. Default: without R4.

    Returns: Names only; which modules they are is looked up when a model is given.
    Raises:
        ValueError, TypeError: for names that are no strings, an unknown ``norm``, ``values``
            without ``output``, and ``output`` or ``down`` that is no writer.
    Note: A reader that is left out changes the function: pass ``verify`` to :func:`prepare_` and
        :func:`fold_`. A gain between a writer and the stream, as in Gemma 2 and OLMo 2, cannot be
        described: there take ``hadamard(model, residual=False)``.
    """
    needed = {"layers": layers, "final": final, "head": head}
    for name, leaf in {**needed, "values": values, "output": output, "down": down}.items():
        if not isinstance(leaf, str) and (leaf is not None or name in needed):
            raise TypeError(fail(name, "be the name of a module", repr(leaf)))
    if not isinstance(norms, Mapping):
        remedy = "pass {norm: [layers that read it]}"
        raise TypeError(fail("norms", "be a dict", type(norms).__name__, remedy))
    listed = {"embeddings": embeddings, "writers": writers}
    listed |= {f"norms[{name!r}]": readers for name, readers in norms.items()}
    for name, given in listed.items():
        if isinstance(given, str) or not given or not all(isinstance(x, str) for x in given):
            raise TypeError(fail(name, "be a list of names", repr(given)))
    check_choice("norm", norm, NORMS)
    check_range("gain_offset", gain_offset, -1.0, 2.0)
    if (values is None) != (output is None):
        raise ValueError(fail("output", "be given together with values", repr(output)))
    for name, writer in (("output", output), ("down", down)):
        if writer is not None and writer not in writers:
            raise ValueError(fail(name, f"be one of the writers {list(writers)}", repr(writer)))
    return Description(
        layers,
        tuple(embeddings),
        final,
        head,
        {name: tuple(readers) for name, readers in norms.items()},
        tuple(writers),
        norm,
        float(gain_offset),
        values,
        output,
        down,
    )


def from_dict(content: Mapping[str, Any]) -> Description:
    """Read what :meth:`Description.as_dict` wrote into a config."""
    refusal = content.get("refusal")
    names = {name: value for name, value in content.items() if name != "refusal"}
    return dataclasses.replace(describe(**names), refusal=refusal)


# ---- families of transformers --------------------------------------------------------------------

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = ("mlp.gate_proj", "mlp.up_proj")
_HEADS = {"values": "self_attn.v_proj", "output": "self_attn.o_proj"}


def _like_llama(**changed: Any) -> Description:
    """The names of Llama, but for those that are given."""
    names: dict[str, Any] = {
        "layers": "model.layers",
        "embeddings": ("model.embed_tokens",),
        "final": "model.norm",
        "head": "lm_head",
        "norms": {"input_layernorm": _QKV, "post_attention_layernorm": _GATED},
        "writers": ("self_attn.o_proj", "mlp.down_proj"),
        "down": "mlp.down_proj",
        **_HEADS,
    }
    return Description(**names | changed)


def _mixture(readers: tuple[str, ...], **changed: Any) -> Description:
    return _like_llama(
        norms={"input_layernorm": _QKV, "post_attention_layernorm": readers},
        writers=("self_attn.o_proj", "mlp.experts.down_proj"),
        down=None,
        **changed,
    )


_FUSED = {"values": None, "output": None}
_SANDWICHED = "its blocks have a norm, with a gain, between each writer and the stream"
LLAMA = _like_llama()
FAMILIES: dict[str, Description] = {  # by `config.model_type`
    "gemma": _like_llama(gain_offset=1.0),
    "gemma2": _like_llama(refusal=_SANDWICHED),
    "gemma3_text": _like_llama(refusal=_SANDWICHED),
    "olmo2": _like_llama(refusal=_SANDWICHED),
    "phi": _like_llama(
        norm="layer",
        final="model.final_layernorm",
        norms={"input_layernorm": (*_QKV, "mlp.fc1")},
        writers=("self_attn.dense", "mlp.fc2"),
        output="self_attn.dense",
        down="mlp.fc2",
    ),
    "phi3": _like_llama(
        norms={
            "input_layernorm": ("self_attn.qkv_proj",),
            "post_attention_layernorm": ("mlp.gate_up_proj",),
        },
        **_FUSED,
    ),
    "olmo": _like_llama(norm="layer"),
    "cohere": _like_llama(norm="layer", norms={"input_layernorm": (*_QKV, *_GATED)}),
    "stablelm": _like_llama(norm="layer"),
    "starcoder2": _like_llama(
        norm="layer",
        norms={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.c_fc",)},
        writers=("self_attn.o_proj", "mlp.c_proj"),
        down="mlp.c_proj",
    ),
    "mixtral": _mixture(("mlp.gate", "mlp.experts.gate_up_proj")),
    "qwen3_moe": _mixture(("mlp.gate", "mlp.experts.gate_up_proj")),
    "deepseek_v3": _like_llama(
        norms={
            "input_layernorm": (
                "self_attn.q_proj",
                "self_attn.q_a_proj",
                "self_attn.kv_a_proj_with_mqa",
            ),
            "post_attention_layernorm": (
                *_GATED,
                "mlp.gate",
                "mlp.experts.gate_up_proj",
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
            ),
        },
        writers=(
            "self_attn.o_proj",
            "mlp.down_proj",
            "mlp.experts.down_proj",
            "mlp.shared_experts.down_proj",
        ),
        down=None,
        **_FUSED,
    ),
    "gpt2": Description(
        layers="transformer.h",
        embeddings=("transformer.wte", "transformer.wpe"),
        final="transformer.ln_f",
        head="lm_head",
        norms={"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)},
        writers=("attn.c_proj", "mlp.c_proj"),
        norm="layer",
        down="mlp.c_proj",
    ),
    "gpt_neox": Description(
        layers="gpt_neox.layers",
        embeddings=("gpt_neox.embed_in",),
        final="gpt_neox.final_layer_norm",
        head="lm_head",
        norms={
            "input_layernorm": ("attention.query_key_value",),
            "post_attention_layernorm": ("mlp.dense_h_to_4h",),
        },
        writers=("attention.dense", "mlp.dense_4h_to_h"),
        norm="layer",
        down="mlp.dense_4h_to_h",
    ),
    "falcon": Description(
        layers="transformer.h",
        embeddings=("transformer.word_embeddings",),
        final="transformer.ln_f",
        head="lm_head",
        norms={"input_layernorm": ("self_attention.query_key_value", "mlp.dense_h_to_4h")},
        writers=("self_attention.dense", "mlp.dense_4h_to_h"),
        norm="layer",
        down="mlp.dense_4h_to_h",
    ),
    "opt": Description(
        layers="model.decoder.layers",
        embeddings=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        final="model.decoder.final_layer_norm",
        head="lm_head",
        norms={"self_attn_layer_norm": _QKV, "final_layer_norm": ("fc1",)},
        writers=("self_attn.out_proj", "fc2"),
        norm="layer",
        values="self_attn.v_proj",
        output="self_attn.out_proj",
        down="fc2",
    ),
    "glm": _like_llama(
        norms={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.gate_up_proj",)}
    ),
    "nemotron": _like_llama(
        norm="layer",
        gain_offset=1.0,
        norms={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.up_proj",)},
    ),
}
