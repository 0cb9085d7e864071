"""Blocks of many families of transformers and timm: taken, trained, saved; fused weights as apart.

Every model is tiny and drawn at random. What is fused is compared with the same model whose weights
are apart, and the order of its rows with what the model itself does.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import training
from tiny import family
from torch import Tensor, nn

import stiefel_opt as so

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about tokens and kernels

# matrices of all blocks; what is left out, by the ends of its names
FAMILIES: dict[str, tuple[int, str]] = {
    # encoders
    "albert": (18, ""),
    "bert": (36, ""),
    "camembert": (36, ""),
    "convbert": (18, "conv_kernel_layer conv_out_layer depthwise pointwise"),
    "deberta": (36, ""),
    "deberta-v2": (36, "pos_key_proj pos_query_proj"),
    "distilbert": (36, ""),
    "electra": (36, ""),
    "flaubert": (36, ""),
    "longformer": (36, "key_global query_global value_global"),
    "modernbert": (38, ""),
    "mpnet": (36, ""),
    "roberta": (36, ""),
    "roformer": (36, ""),
    "xlm": (36, ""),
    # decoders
    "bloom": (36, ""),
    "codegen": (36, ""),
    "ctrl": (36, ""),
    "deepseek_v3": (57, ""),
    "falcon": (24, ""),
    "gemma": (38, ""),
    "gemma2": (30, ""),
    "glm": (30, ""),
    "gpt2": (36, ""),
    "gpt_bigcode": (24, ""),
    "gpt_neo": (36, ""),
    "gpt_neox": (36, ""),
    "gpt_oss": (34, "gate_up_proj"),
    "gptj": (36, ""),
    "llama": (38, ""),
    "mistral": (30, ""),
    "mixtral": (50, ""),
    "mpt": (36, ""),
    "olmo2": (38, ""),
    "opt": (36, ""),
    "persimmon": (36, ""),
    "phi": (36, ""),
    "phi3": (38, ""),
    "qwen2": (38, ""),
    "qwen3": (38, ""),
    "qwen3_moe": (50, ""),
    "qwen3_next": (50, "conv1d in_proj_ba in_proj_qkvz out_proj"),
    "starcoder2": (28, ""),
    # encoders and decoders
    "bart": (104, ""),
    "m2m_100": (104, ""),
    "pegasus": (104, ""),
    "prophetnet": (104, "relative_pos_embeddings"),
    "t5": (104, ""),
    # images
    "beit": (36, ""),
    "deit": (36, ""),
    "dinov2": (36, ""),
    "siglip_vision_model": (52, ""),
    "vit": (36, ""),
    "yolos": (36, ""),
    # sound
    "audio-spectrogram-transformer": (36, ""),
    "hubert": (36, ""),
    "wav2vec2": (36, ""),
    "wav2vec2-bert": (40, "depthwise_conv pointwise_conv1 pointwise_conv2"),
    "wavlm": (36, "gru_rel_pos_linear"),
    "whisper": (104, ""),
}


def inputs_of(model: nn.Module) -> dict[str, Tensor]:
    """Something of the kind that a model reads."""
    generator = torch.Generator().manual_seed(1)
    name = model.main_input_name
    words = torch.randint(3, 40, (2, 6), generator=generator)
    shapes = {"pixel_values": (2, 3, 32, 32), "input_values": (2, 800)}
    if name == "input_ids":
        inputs = {"input_ids": words}
    elif model.config.model_type == "audio-spectrogram-transformer":
        inputs = {name: torch.randn(2, 64, 32, generator=generator)}
    elif name == "input_features":
        frames = (2, 80, 128) if model.config.model_type == "whisper" else (2, 12, 16)
        inputs = {name: torch.randn(frames, generator=generator)}
    else:
        inputs = {name: torch.randn(shapes[name], generator=generator)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = words
    if model.config.model_type in ("xlm", "flaubert"):
        inputs["attention_mask"] = torch.ones_like(words)
    return inputs


def loss_of(model: nn.Module) -> Tensor:
    inputs = inputs_of(model)
    dtype = next(model.parameters()).dtype
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    (output, *_) = model(**inputs, return_dict=False)
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return (output - target.to(dtype)).square().mean()


def train(model: nn.Module, steps: int = 3) -> None:
    opt = so.StiefelAdamW(model.parameters(), lr=1e-2)
    assert all(map(math.isfinite, training.train(opt, lambda: loss_of(model), steps)))


def count(model: nn.Module, report: Any) -> int:
    weights = [model.get_parameter(line[0]) for line in report.lines]
    return sum(weight.manifold.count(weight.shape) for weight in weights)


def ends(report: Any) -> set[str]:
    return {re.sub(r"^.*\.(?=\w+$)", "", path) for path, _ in report.skipped}


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_taken_trained_and_saved(kind, tmp_path):
    matrices, left_out = FAMILIES[kind]
    model = family(kind).eval()
    report = so.constrain_transformer(model)
    assert (count(model, report), ends(report)) == (matrices, set(left_out.split()))
    found = [re.match(r"(.*?)\.\d+\.", line[0]) for line in report.lines]
    lists = {match[1] for match in found if match}
    known = {line[0] for line in report.lines} | {path for path, _ in report.skipped}
    for name, weight in model.named_parameters():
        in_block = any(name.startswith(f"{each}.") for each in lists)
        is_matrix = sum(size > 1 for size in weight.shape) > 1
        if in_block and is_matrix and "bias" not in name and "norm" not in name:
            owner = name.rpartition(".")[0]
            is_table = isinstance(model.get_submodule(owner), nn.Embedding)
            assert is_table or any(name.startswith(each) for each in known), name
    train(model)
    assert float(so.orthonormality_error(model)) < 1e-5
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    so.constrain_transformer(again)
    train(again)


# ---- fused weights -----------------------------------------------------------------------------

# family, options, name of the fused layer, heads of keys, whether one head is behind the other
FUSED: list[tuple[str, dict[str, Any], str, int, bool]] = [
    ("bloom", {}, "query_key_value", 4, True),
    ("deberta", {}, "in_proj", 4, True),
    ("falcon", {}, "query_key_value", 1, False),
    ("falcon", {"multi_query": False}, "query_key_value", 4, True),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "query_key_value",
        2,
        True,
    ),
    ("gpt_bigcode", {}, "c_attn", 1, False),
    ("gpt_bigcode", {"multi_query": False}, "c_attn", 4, True),
    ("gpt_neox", {}, "query_key_value", 4, True),
    ("mpt", {}, "Wqkv", 4, False),
    ("persimmon", {}, "query_key_value", 4, True),
    ("phi3", {"num_key_value_heads": 2}, "qkv_proj", 2, False),
]
IDS = [f"{kind} {list(options)[:1]}" for kind, options, *_ in FUSED]


def apart(rows: Tensor, keys: int, in_turn: bool) -> list[Tensor]:
    """Take rows, or what belongs to rows, apart: of 4 heads of queries, of keys, of values."""
    width = len(rows) // (4 + 2 * keys)
    if not in_turn:
        return list(rows.split([4 * width, keys * width, keys * width]))
    groups = rows.unflatten(0, (keys, -1)).split([4 // keys * width, width, width], dim=1)
    return [group.flatten(0, 1) for group in groups]


@pytest.mark.parametrize(("kind", "options", "name", "keys", "in_turn"), FUSED, ids=IDS)
def test_rows_of_queries_and_keys_are_those_of_the_model(kind, options, name, keys, in_turn):
    """Without queries no key matters, and the other way round: their slopes are exactly zero."""
    model = family(kind, **options).eval()
    rows = {}
    for letter in "qk":
        tagged = copy.deepcopy(model)
        so.constrain_attention(tagged, which=letter)
        weight = next(m for p, m in tagged.named_modules() if p.endswith(f".{name}")).weight
        places = torch.arange(len(weight))[:, None].expand_as(weight)
        parts = weight.manifold.parts(places)
        rows[letter] = torch.cat([part[:, 0] for part in parts]).tolist()
    expected = apart(torch.arange(len(places)), keys, in_turn)
    assert [rows["q"], rows["k"]] == [part.tolist() for part in expected[:2]]
    for zeroed, idle in ("qk", "kq"):
        changed = copy.deepcopy(model)
        layers = [m for p, m in changed.named_modules() if p.endswith(f".{name}")]
        with torch.no_grad():
            for layer in layers:
                layer.weight[rows[zeroed]] = 0.0
                if layer.bias is not None:
                    layer.bias[rows[zeroed]] = 0.0
        loss_of(changed).backward()
        for layer in layers:
            still = (layer.weight.grad.abs().amax(1) == 0).nonzero()[:, 0].tolist()
            assert still == sorted(rows[idle])


def test_gates_beside_queries_are_matrices_of_their_own():
    model = family("qwen3_next").eval()
    weight = model.layers[1].self_attn.q_proj.weight
    gates = weight.detach().unflatten(0, (4, 2, 8))[:, 1].clone()
    so.constrain_attention(model, which="q")
    queries = weight.detach().unflatten(0, (4, 2, 8))
    assert float(error_of(queries[:, 0])) < 1e-5
    assert torch.equal(queries[:, 1], gates)
    with torch.no_grad():
        queries[:, 0] = 0.0  # then no key matters
    loss_of(model).backward()
    assert not model.layers[1].self_attn.k_proj.weight.grad.any()
    assert model.layers[1].self_attn.v_proj.weight.grad.any()
    so.constrain_transformer(model)
    assert float(error_of(weight.detach().unflatten(0, (8, 8)))) < 1e-5


def error_of(matrices: Tensor) -> Tensor:
    tall = matrices if matrices.size(-2) >= matrices.size(-1) else matrices.mT
    return (tall.mT @ tall - torch.eye(tall.size(-1))).abs().max()
