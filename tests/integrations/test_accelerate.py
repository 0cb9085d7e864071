"""accelerate: prepared objects, accumulated gradients, saved and loaded state."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from loops import HALF, STEPS, assert_equal, assert_trained, batches, images
from torch import nn

import stiefel_opt as so


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        so.constrain(nn.Linear(768, 32)),
        nn.Tanh(),
        so.constrain(nn.Linear(32, 32), heads=4),
        nn.Linear(32, 4),
    )
    opt = so.StiefelAdam(so.param_groups(model, stiefel={"lr": 0.02}, plain={"lr": 0.005}))
    return model, opt, torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def accelerated(data, *, load: Path | None = None, save: Path | None = None):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, opt, scheduler = accelerator.prepare(*build())
    if load is not None:
        accelerator.load_state(str(load))
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            opt.step()
            scheduler.step()
            opt.zero_grad()
    if save is not None:
        accelerator.save_state(str(save))
    return accelerator.unwrap_model(model)


def test_accelerate_trains_as_a_plain_loop_and_resumes_bit_for_bit(tmp_path):
    data = batches(images()) * 2  # two batches for each step
    plain, opt, scheduler = build()
    for first in range(0, len(data), 2):
        opt.zero_grad()
        for batch in data[first : first + 2]:
            (loss_of(plain, batch) / 2).backward()
        opt.step()
        scheduler.step()
    assert len(data) == 2 * STEPS
    assert_trained(plain, build()[0])
    assert_equal(accelerated(data), plain)
    accelerated(data[: 2 * HALF], save=tmp_path)
    assert_equal(accelerated(data[2 * HALF :], load=tmp_path), plain)
