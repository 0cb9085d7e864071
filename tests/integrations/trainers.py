"""A Hugging Face Trainer that gives out its data in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loops import BATCH, HALF, STEPS, InOrder
from transformers import Trainer, TrainingArguments


def trainer(
    model: Any,
    optimizer: torch.optim.Optimizer | None,
    items: list[Any],
    folder: Path,
    optimizer_cls_and_kwargs: Any = None,
    **options: Any,
) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_steps=HALF,
        max_grad_norm=0.0,
        lr_scheduler_type="linear",
        logging_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        **options,
    )
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=InOrder(items),
        optimizers=(optimizer, None),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
    )


def linear(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """The Trainer's default: down to zero along a line."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / STEPS))
