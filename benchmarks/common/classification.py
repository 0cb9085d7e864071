"""Classification of images: epochs in random order, label smoothing, test error."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.images import Images, auto_augment, crop_flip
from benchmarks.common.training import Trainer, rate_factor

Batch = tuple[Tensor, Tensor]  # uint8 images and their labels


class Classification:
    """Epochs over images; a ``penalty`` is added to the loss minimised, not to the one recorded.

    ``measure`` gives what else is recorded after a test; ``settings`` holds ``batch_size``,
    ``smoothing`` and ``augment``.
    """

    def __init__(
        self,
        model: nn.Module,
        images: Images,
        settings: dict[str, Any],
        measure: Callable[[], dict[str, float | None]],
        penalty: Callable[[], Tensor] | None = None,
    ) -> None:
        self.model, self.images, self.settings = model, images, settings
        self.measure, self.penalty = measure, penalty
        self.batch_size: int = settings["batch_size"]
        self.steps = len(images.train_images) // self.batch_size  # the rest is left out
        if self.steps == 0:
            raise ValueError(
                f"--batch-size must be at most the {len(images.train_images)} training images, "
                f"got {self.batch_size}"
            )

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """One pass over the training images in random order."""
        order = torch.randperm(len(self.images.train_images), generator=generator)
        order = order[: self.steps * self.batch_size].to(self.images.mean.device)
        for picked in order.split(self.batch_size):
            batch = self.images.train_images[picked]
            if self.settings["augment"] != "none":
                batch = crop_flip(batch, generator)
            if self.settings["augment"] == "auto":
                batch = auto_augment(batch, generator)
            yield batch, self.images.train_labels[picked]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy with label smoothing; the accuracy is recorded as well."""
        images, labels = batch
        logits = self.model(self.images.normalize(images))
        smoothing = self.settings["smoothing"]
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        right = (logits.detach().argmax(1) == labels).float().mean()
        measures = {"train_loss": loss.detach(), "train_accuracy": right}
        return (loss if self.penalty is None else loss + self.penalty()), measures

    def evaluate(self) -> dict[str, float | None]:
        """Per cent of the test images that are classified wrongly."""
        images, labels = self.images.test_images, self.images.test_labels
        wrong = [
            (self.model(self.images.normalize(batch)).argmax(1) != answers).sum()
            for batch, answers in zip(images.split(500), labels.split(500), strict=True)
        ]
        return {"test_error": 100 * float(torch.stack(wrong).sum()) / len(labels)} | self.measure()


def classification_trainer(
    task: Classification,
    optimizer: torch.optim.Optimizer,
    configuration: dict[str, Any],
    path: Path,
) -> Trainer:
    """A trainer with warm-up and cosine over ``epochs``, ``warmup`` of them rising.

    With a ``decay`` of "none" the rates stay as they are.
    """
    factor = partial(
        rate_factor,
        warmup_steps=round(configuration["warmup"] * task.steps),
        total_steps=configuration["epochs"] * task.steps,
    )
    constant = configuration.get("decay") == "none"
    scheduler = None if constant else torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    counted = ("images", task.batch_size)
    return Trainer(task.model, optimizer, task, configuration, path, scheduler, counted)
