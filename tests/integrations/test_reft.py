"""pyreft and pyvene: the rotation of LoReFT as a tagged parameter; the recipe of docs/reft.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyreft
import pytest
import pyvene
import torch
from loops import code_of
from training import train
from transformers import LlamaConfig, LlamaForCausalLM

import stiefel_opt as so

WIDTH, LAYERS = 24, 3


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=3,
        num_key_value_heads=3,
        vocab_size=50,
    )
    return LlamaForCausalLM(config).eval()


def test_the_page_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama().save_pretrained(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "docs"}
    exec("\n".join("\n".join(section) for section in code_of("reft.md")), space)
    for model in (space["reft_model"], space["loaded"]):
        assert len(so.report(model.interventions).lines) == LAYERS
        assert so.orthonormality_error(model.interventions) < 1e-5
    pairs = zip(
        space["reft_model"].interventions.values(),
        space["loaded"].interventions.values(),
        strict=True,
    )
    for ours, again in pairs:
        torch.testing.assert_close(again.rotate_layer.weight, ours.rotate_layer.weight)


def test_a_tagged_rotation_is_the_same_function_and_learns_as_well() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(
            pyreft.LoreftIntervention(embed_dim=WIDTH, low_rank_dimension=4, dtype=torch.float32)
        )
    theirs, ours = made[0], so.from_torch_orthogonal(made[1])
    states, target = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    torch.testing.assert_close(ours(states), theirs(states))
    last = []
    for module, rule in ((theirs, torch.optim.AdamW), (ours, so.StiefelAdamW)):
        optimizer = rule(module.parameters(), lr=1e-2, weight_decay=0.0)
        losses = train(
            optimizer, lambda module=module: (module(states) - target).square().mean(), 100
        )
        last.append(losses[-1])
        weight = module.rotate_layer.weight.detach()
        torch.testing.assert_close(weight.mT @ weight, torch.eye(4), atol=1e-5, rtol=0)
    assert last[1] < 1.1 * last[0]


@pytest.mark.parametrize("kind", ["RotatedSpaceIntervention", "LowRankRotatedSpaceIntervention"])
def test_interventions_of_pyvene_convert(kind: str) -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(getattr(pyvene, kind)(embed_dim=WIDTH, low_rank_dimension=4))
    theirs, ours = made[0], so.from_torch_orthogonal(made[1])
    base, source = torch.randn(2, 5, WIDTH)
    subspaces = None if kind.startswith("LowRank") else [[0, 1]] * 5
    for module in (theirs, ours):
        if hasattr(module, "interchange_dim"):
            module.set_interchange_dim(4)
    expected = theirs(base, source, subspaces=subspaces)
    torch.testing.assert_close(ours(base, source, subspaces=subspaces), expected)
    assert so.orthonormality_error(ours) < 1e-5
