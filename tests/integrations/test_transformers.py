"""The Trainer of transformers with `optimizers=(opt, None)`: a ViT, and GPT-2 with its Conv1D."""

from __future__ import annotations

import pytest
import torch
from loops import (
    HALF,
    assert_equal,
    assert_trained,
    batches,
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


def test_what_is_constrained():
    for block in orthogonal_gpt2().transformer.h:
        reading = block.attn.c_attn.weight.manifold
        assert reading == so.Stiefel(rows=((0, 32), (32, 64)), heads=4, transposed=True)
        head = block.attn.c_attn.weight[:, 8:16]  # 32 features to the 8 of the second head
        torch.testing.assert_close(head.mT @ head, torch.eye(8), atol=1e-5, rtol=0)
    assert len(so.report(orthogonal_vit()).lines) == 4


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
