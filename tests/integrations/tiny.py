"""Tiny models of transformers, the same ones at each call."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        num_labels=4,
    )
    return ViTForImageClassification(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


SIZES = {
    "hidden_size d_model n_embd embed_dim embedding_size emb_dim output_hidden_size": 32,
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers": 2,
    "num_encoder_layers num_decoder_layers num_experts_per_tok": 2,
    "num_attention_heads n_head num_heads n_heads num_experts num_local_experts": 4,
    "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads": 4,
    "num_decoder_attention_heads n_routed_experts": 4,
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim": 48,
    "moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size": 48,
    "head_dim d_kv attention_head_size qk_rope_head_dim qk_nope_head_dim v_head_dim": 8,
    "patch_size": 8,
    "image_size max_length": 32,
    "kv_lora_rank q_lora_rank feature_projection_input_dim qk_head_dim": 16,
    "max_position_embeddings n_positions vocab_size max_source_positions": 64,
    "max_target_positions num_mel_bins": 64,
    "n_group topk_group first_k_dense_replace": 1,
    "pad_token_id bos_token_id eos_token_id decoder_start_token_id": 0,
}
OWN: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "whisper": {"num_mel_bins": 80},
}


def family(kind: str, **options: Any) -> PreTrainedModel:
    """Return a tiny model of the family that a config names, whatever it calls its sizes."""
    default = CONFIG_MAPPING[kind]()
    sizes = {name: size for names, size in SIZES.items() for name in names.split()}
    given = {
        name: sizes[name]
        for name, value in vars(default).items()
        if type(value) is int and name in sizes
    }
    for name in ("num_key_value_heads", "num_kv_heads"):
        if type(value := getattr(default, name, None)) is int:
            given[name] = 4 if value == default.num_attention_heads else 2
    if kinds := getattr(default, "layer_types", None):
        given["layer_types"] = [*dict.fromkeys(kinds), kinds[0]][:2]
    torch.manual_seed(0)
    return AutoModel.from_config(type(default)(**{**given, **OWN.get(kind, {}), **options}))
