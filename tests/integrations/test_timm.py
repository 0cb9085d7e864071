"""timm: `qkv.weight` of its ViT, a scheduler, averaged weights, and its checkpoints.

The vision transformer, the scheduler and the checkpoints are timm's own. Where torchvision has no
build for the installed torch, its compiled operators are missing, and the header of the report says
so; they have no part in this model.
"""

from __future__ import annotations

import pytest
import timm
import torch
from loops import HALF, ROUNDING, STEPS, assert_equal, assert_trained, batches, images, loop
from timm.models import resume_checkpoint
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver, ModelEmaV3
from torch import nn

import stiefel_opt as so

LR, LAST = 0.05, 0.005


def build():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        num_classes=4,
    )
    so.constrain_attention(model, "within")
    return model, so.StiefelSGD(model.parameters(), lr=LR)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def train_with_timm(model, opt, first: int, last: int, average=None) -> None:
    scheduler = CosineLRScheduler(opt, t_initial=STEPS, lr_min=LAST, t_in_epochs=False)
    data = batches(images())
    model.train()
    for step in range(first, last):
        scheduler.step_update(step)
        opt.zero_grad()
        loss_of(model, data[step]).backward()
        opt.step()
        if average is not None:
            average.update(model)


SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
BLOCKS = {  # options, matrices of a block, its parts that are left out
    "vit_tiny_patch16_224": (SMALL, 12 + 4 + 1 + 1, []),
    "deit_tiny_distilled_patch16_224": (SMALL, 12 + 4 + 1 + 1, []),
    "beit_base_patch16_224": (SMALL, 12 + 4 + 1 + 1, []),
    "eva02_tiny_patch14_224": (SMALL, 12 + 4 + 2 + 1, []),  # the gate is a matrix of its own
    "cait_xxs24_224": (SMALL, 12 + 4 + 1 + 1, ["attn.proj_l", "attn.proj_w"]),
    "vit_relpos_small_patch16_224": (
        SMALL, 12 + 4 + 1 + 1, ["attn.rel_pos.mlp.fc1", "attn.rel_pos.mlp.fc2"],
    ),
    "tnt_s_legacy_patch16_224": (
        {"img_size": 32, "embed_dim": 32, "depth": 2, "inner_dim": 16, "num_heads_inner": 2,
         "num_heads_outer": 4},
        (6 + 2 + 2) + 1 + (12 + 4 + 2),
        [],
    ),
    "xcit_nano_12_p8_224": (SMALL, 12 + 4 + 1 + 1, ["local_mp.conv1", "local_mp.conv2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_every_matrix_of_the_blocks(name):
    options, count, left_out = BLOCKS[name]
    model = timm.create_model(name, num_classes=4, **options)
    report = so.constrain_transformer(model)
    for place in range(2):
        block = f"blocks.{place}."
        weights = [line[0] for line in report.lines if line[0].startswith(block)]
        counts = [
            parameter.manifold.count(parameter.shape)
            for parameter in map(model.get_parameter, weights)
        ]
        assert sum(counts) == count
        assert [path for path, _ in report.skipped if path.startswith(block)] == [
            block + path for path in left_out
        ]
    assert all("blocks" in line[0] for line in report.lines)
    assert float(so.orthonormality_error(model)) < 1e-5


IN_TURN = {
    "EfficientFormer": (
        lambda: timm.models.efficientformer.Attention(32, 8, 4, 2, resolution=4), (2, 16, 32),
    ),
    "LeViT": (
        lambda: timm.models.levit.Attention(32, 8, 4, 2.0, resolution=(4, 4)), (2, 16, 32),
    ),
    "MaxViT": (lambda: timm.models.maxxvit.AttentionCl(32, dim_head=8), (2, 16, 32)),
    "TinyViT": (
        lambda: timm.models.tiny_vit.Attention(32, 8, 4, 1, resolution=(4, 4)), (2, 16, 32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_TURN)
def test_rows_of_queries_and_keys_are_those_of_the_module(name):
    """Without queries no key matters: the slopes of keys are exactly zero, and of them alone."""
    make, shape = IN_TURN[name]
    rows = {}
    for letter in "qkv":
        module = make()
        so.constrain_attention(module, which=letter)
        (found,) = [p for p in module.parameters() if isinstance(p, so.ManifoldParameter)]
        places = torch.arange(len(found))[:, None].expand_as(found)
        rows[letter] = torch.cat([part[:, 0] for part in found.manifold.parts(places)])
        assert found.manifold.count(found.shape) == 4
    assert len(torch.cat([*rows.values()]).unique()) == len(places)
    module = make()
    module.eval()
    for norm in (each for each in module.modules() if isinstance(each, nn.BatchNorm1d)):
        nn.init.ones_(norm.weight)  # LeViT's is zero at first
    weight = next(p for p in module.parameters() if p.shape == found.shape)
    bias = module.qkv.bias if hasattr(module.qkv, "bias") else None
    with torch.no_grad():
        weight[rows["q"]] = 0.0
        if bias is not None:
            bias[rows["q"]] = 0.0
    module(torch.randn(shape)).square().sum().backward()
    still = (weight.grad.abs().amax(1) < 1e-9).nonzero()[:, 0]
    assert torch.equal(still, rows["k"])


def test_timm_trains_as_a_plain_loop_and_resumes_bit_for_bit(tmp_path):
    plain, opt = build()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS, eta_min=LAST)
    losses = loop(plain, opt, batches(images()), loss_of, scheduler)
    assert losses[-1] < losses[0]
    assert_trained(plain, build()[0])

    undisturbed, opt = build()
    train_with_timm(undisturbed, opt, 0, STEPS)
    assert_equal(undisturbed, plain, tolerance=1e-5)  # the rates differ in their last digits

    stopped, opt = build()
    train_with_timm(stopped, opt, 0, HALF)
    CheckpointSaver(stopped, opt, checkpoint_dir=str(tmp_path)).save_checkpoint(epoch=0)
    resumed, opt = build()
    (path,) = tmp_path.glob("checkpoint-0*")
    resume_checkpoint(resumed, str(path), optimizer=opt, log_info=False)
    train_with_timm(resumed, opt, HALF, STEPS)
    assert_equal(resumed, undisturbed)


def test_averaged_weights_leave_the_manifold_and_are_projected():
    model, opt = build()
    average = ModelEmaV3(model, decay=0.9)
    train_with_timm(model, opt, 0, STEPS, average)
    assert so.orthonormality_error(average.module) > 1e-4
    so.project_(average.module)
    assert so.orthonormality_error(average.module) < ROUNDING
    assert so.orthonormality_error(model) < ROUNDING
