"""Decoders of transformers beside Llama's, rotated by the description of their family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stiefel_opt import rotations
from stiefel_opt.rotations.description import FAMILIES

VOCABULARY = 41
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {"num_key_value_heads": 1}
HEAD = {**GROUPED, "head_dim": 8}
EXPERTS = {**HEAD, "num_experts_per_tok": 1, "moe_intermediate_size": 12}
LATENT = {
    "num_key_value_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 3,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
NAMED: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": HEAD,
    "smollm3": GROUPED,
    "granite": {**GROUPED, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "ministral": HEAD,
    "helium": HEAD,
    "gemma": HEAD,
    "phi": {},
    "phi3": GROUPED,
    "olmo": GROUPED,
    "cohere": GROUPED,
    "stablelm": {"num_key_value_heads": 3, "use_qkv_bias": True},
    "starcoder2": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 3},
    "qwen3_moe": {**EXPERTS, "num_experts": 3},
    "deepseek_v3": LATENT,
    "gpt2": {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": False, "bias": True},
    "opt": {"ffn_dim": 40, "word_embed_proj_dim": 24},
    "glm": HEAD,
    "nemotron": GROUPED,
}
SANDWICHED = {"gemma2": HEAD, "gemma3_text": HEAD, "olmo2": GROUPED}
SHIFTED = {"gemma", "gemma2", "gemma3_text", "nemotron"}  # gains are 1 + weight


def build(name: str) -> PreTrainedModel:
    """A model whose gains and biases are random, too."""
    torch.manual_seed(0)
    options = COMMON | (NAMED | SANDWICHED)[name]
    if name == "gpt2":
        options = {key: options[key] for key in ("vocab_size", *NAMED["gpt2"])}
    config = AutoConfig.for_model(name, **options)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter, value in model.named_parameters():
        if value.ndim == 1:
            is_gain = "bias" not in parameter and name not in SHIFTED
            torch.nn.init.normal_(value, mean=float(is_gain), std=0.3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(tokens()).logits


def assert_same(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    assert float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


def test_every_family_is_tested() -> None:
    assert FAMILIES.keys() <= NAMED.keys() | SANDWICHED.keys()
    assert len(NAMED) == 24


@pytest.mark.parametrize("name", NAMED)
def test_a_family_is_rotated_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = build(name)
    expected = logits(model)
    rotations.prepare_(model, verify=tokens())
    assert_same(logits(model), expected)
    weight = model.get_input_embeddings().weight.detach().clone()
    start = rotations.hadamard(model)
    rotations.fold_(model, start, verify=tokens())
    assert_same(logits(model), expected)
    assert float((model.get_input_embeddings().weight - weight).abs().max()) > 1e-3
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    if start.online:
        with pytest.raises(ValueError, match=r"call rotations\.load_online_"):
            rotations.hadamard(loaded)
    assert_same(logits(rotations.load_online_(loaded)), expected)


@pytest.mark.parametrize("name", SANDWICHED)
def test_a_gain_between_writer_and_stream_leaves_heads_and_products(name: str) -> None:
    model = build(name)
    expected = logits(model)
    with pytest.raises(ValueError, match=r"stream that can be rotated, .* between each writer"):
        rotations.prepare_(model)
    start = rotations.hadamard(model, residual=False)
    assert start.online == ("R4",)
    assert len(start.heads) == 2
    rotations.fold_(model, start, verify=tokens())
    assert_same(logits(model), expected)


@pytest.mark.parametrize("name", [name for name in NAMED if name in FAMILIES])
def test_a_family_learns_or_says_why_not(name: str) -> None:
    model = rotations.prepare_(build(name))
    options = {"steps": 3, "progress": False, "weight_bits": 4}
    if name in ("mixtral", "qwen3_moe", "deepseek_v3"):
        with pytest.raises(ValueError, match="must have a module for each linear layer"):
            rotations.learn(model, [tokens()], **options)
        return
    found = rotations.learn(model, [tokens()], **options)
    assert found.log[0]["loss"] != found.log[-1]["loss"]
    assert max(entry["orthonormality"] for entry in found.log) < 1e-6
    expected = logits(model)
    bits = {"activation_bits": 4, "weight_bits": 4}
    with rotations.quantized(model, rotations=found, **bits):
        rounded = logits(model)
    rotations.fold_(model, found, verify=tokens())
    assert_same(logits(model), expected)
    with rotations.quantized(model, **bits):
        assert_same(logits(model), rounded, 0.02)  # a number may round to the other side


def test_an_attention_of_its_own_takes_no_r3() -> None:
    model = rotations.prepare_(build("falcon"))
    with pytest.raises(ValueError, match=r"transformers' attention, got R3 .*TurnedCache"):
        rotations.hadamard(model, online=("R3",))
    for name in ("phi", "gpt2", "gpt_neox", "opt", "glm"):
        other = rotations.prepare_(build(name))
        expected = logits(other)
        rotations.fold_(other, rotations.hadamard(other, online=("R3", "R4")), verify=tokens())
        assert_same(logits(other), expected)


def test_a_description_of_ones_own_survives_saving(tmp_path: Path) -> None:
    model = build("gpt_neox")
    expected = logits(model)
    description = rotations.describe(
        layers="gpt_neox.layers",
        embeddings=["gpt_neox.embed_in"],
        final="gpt_neox.final_layer_norm",
        norms={
            "input_layernorm": ["attention.query_key_value"],
            "post_attention_layernorm": ["mlp.dense_h_to_4h"],
        },
        writers=["attention.dense", "mlp.dense_4h_to_h"],
        norm="layer",
    )
    rotations.prepare_(model, description=description, verify=tokens())
    prepared = copy.deepcopy(model)
    prepared.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    start = rotations.hadamard(loaded)
    assert start.online == ()  # the family's own description has R4
    rotations.fold_(loaded, start, verify=tokens())
    assert_same(logits(loaded), expected)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("falcon", {"parallel_attn": False}),
        ("falcon", {"new_decoder_architecture": True}),
        ("stablelm", {"use_parallel_residual": True}),
    ],
)
def test_a_variant_of_a_family_with_other_norms_is_refused(
    name: str, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMED, name, NAMED[name] | variant)
    model = build(name)
    expected = logits(model)
    with pytest.raises(ValueError, match=r"have the norms .* of its family and no other"):
        rotations.prepare_(model)
    assert torch.equal(logits(model), expected)
