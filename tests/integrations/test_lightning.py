"""PyTorch Lightning: `configure_optimizers` with a scheduler, and a resumed checkpoint."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from loops import HALF, STEPS, assert_equal, assert_trained, batches, images, loop
from torch import Tensor, nn

import stiefel_opt as so

RULES = {"sgd": so.StiefelSGD, "adam": so.StiefelAdam}


class Classifier(lightning.LightningModule):
    def __init__(self, rule: str) -> None:
        super().__init__()
        self.rule = rule
        torch.manual_seed(0)
        self.net = nn.Sequential(
            so.constrain(nn.Conv2d(3, 8, 4, stride=4)),
            nn.ReLU(),
            nn.Flatten(),
            so.constrain(nn.Linear(128, 16), heads=2),
            nn.Tanh(),
            nn.Linear(16, 4),
        )

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch["pixel_values"]), batch["labels"])

    def configure_optimizers(self) -> dict:
        optimizer = RULES[self.rule](self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def fit(module: Classifier, folder: Path, epochs: int, checkpoint: Path | None = None) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    loader = torch.utils.data.DataLoader(images()[: HALF * 4], batch_size=4)  # half of the steps
    trainer.fit(module, loader, ckpt_path=checkpoint)


@pytest.mark.parametrize("rule", RULES)
def test_lightning_trains_as_a_plain_loop_and_resumes_bit_for_bit(rule, tmp_path):
    plain = Classifier(rule)
    found = plain.configure_optimizers()
    data = batches(images())[:HALF] * 2
    scheduler = found["lr_scheduler"]["scheduler"]
    losses = loop(
        plain, found["optimizer"], data, lambda net, batch: net.training_step(batch), scheduler
    )
    assert losses[-1] < losses[0]
    assert_trained(plain, Classifier(rule))

    undisturbed = Classifier(rule)
    fit(undisturbed, tmp_path, epochs=2)
    assert_equal(undisturbed, plain)
    stopped = Classifier(rule)
    fit(stopped, tmp_path / "stopped", epochs=1)
    resumed = Classifier(rule)
    with torch.no_grad():
        resumed.net[-1].weight.zero_()
    fit(resumed, tmp_path / "resumed", epochs=2, checkpoint=tmp_path / "stopped" / "epoch=0.ckpt")
    assert resumed.trainer.global_step == STEPS
    assert_equal(resumed, plain)
