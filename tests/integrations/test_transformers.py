"""The Trainer of transformers with an optimizer and with a class: a ViT, GPT-2 with its Conv1D."""

from __future__ import annotations

from typing import Any

import pytest
from loops import (
    HALF,
    assert_equal,
    assert_trained,
    batches,
    code_of,
    images,
    loop,
    loss_of_output,
    tokens,
)
from tiny import gpt2, vit
from trainers import linear, trainer

import stiefel_opt as so


def orthogonal(model):
    so.constrain_attention(model, "within")
    return model


def orthogonal_vit():
    return orthogonal(vit())


def orthogonal_gpt2():
    model = orthogonal(gpt2())
    for block in model.transformer.h:
        so.constrain(block.mlp.c_fc, transposed=True)
    return model


@pytest.mark.parametrize(
    ("build", "items", "rule", "lr"),
    [
        (orthogonal_vit, images, so.StiefelSGD, 0.05),
        (orthogonal_vit, images, so.StiefelAdam, 0.005),
        (orthogonal_gpt2, tokens, so.StiefelSGD, 0.2),
        (orthogonal_gpt2, tokens, so.StiefelAdam, 0.005),
    ],
    ids=["ViT, SGD", "ViT, Adam", "GPT-2, SGD", "GPT-2, Adam"],
)
def test_the_trainer_trains_as_a_plain_loop_and_resumes_bit_for_bit(
    build, items, rule, lr, tmp_path
):
    plain = build()
    opt = rule(plain.parameters(), lr=lr)
    losses = loop(plain, opt, batches(items()), loss_of_output, linear(opt))
    assert losses[-1] < losses[0]
    assert_trained(plain, build())

    undisturbed = build()
    opt = rule(undisturbed.parameters(), lr=lr)
    trainer(undisturbed, opt, items(), tmp_path).train()
    assert_equal(undisturbed, plain, tolerance=2e-5)  # the Trainer averages in another order

    checkpoint = tmp_path / f"checkpoint-{HALF}"
    resumed = build()
    if build is orthogonal_vit:
        # The Trainer saves this model under its former names, and finds none of them when it loads
        # them again, whatever the optimizer; `from_pretrained` translates.
        resumed = orthogonal(type(resumed).from_pretrained(checkpoint))
    opt = rule(resumed.parameters(), lr=lr)
    again = trainer(resumed, opt, items(), tmp_path / "resumed")
    again.train(resume_from_checkpoint=str(checkpoint))
    assert_equal(resumed, undisturbed)
    assert_trained(resumed, build())


def test_the_trainer_builds_the_optimizer_by_its_class_and_resumes_bit_for_bit(tmp_path):
    options = {"lr": 0.005, "betas": (0.9, 0.99)}
    chosen = {"optimizer_cls_and_kwargs": (so.StiefelAdamW, options), "weight_decay": 0.1}

    plain = orthogonal_gpt2()
    decayed = [p for p in plain.parameters() if p.ndim > 1]
    others = [p for p in plain.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    opt = so.StiefelAdamW(groups, **options)
    loop(plain, opt, batches(tokens()), loss_of_output, linear(opt))

    undisturbed = orthogonal_gpt2()
    first = trainer(undisturbed, None, tokens(), tmp_path, **chosen)
    first.train()
    assert isinstance(getattr(first.optimizer, "optimizer", first.optimizer), so.StiefelAdamW)
    assert_trained(undisturbed, orthogonal_gpt2())
    assert_equal(undisturbed, plain, tolerance=2e-5)

    resumed = orthogonal_gpt2()
    again = trainer(resumed, None, tokens(), tmp_path / "resumed", **chosen)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_equal(resumed, undisturbed)


def test_the_page_of_the_trainer_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = [block for section in code_of("trainer.md") for block in section]
    space: dict[str, Any] = {"__name__": "docs"}  # the second block goes on where the first ends
    for block in blocks:
        exec(block, space)
    assert len(blocks) == 2
    assert "orthonormality_error/transformer.h.0.attn.c_attn.weight" in capsys.readouterr().out
