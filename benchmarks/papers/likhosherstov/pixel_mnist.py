"""Digits read pixel by pixel: one grey level a step, the class after the last.

    python -m benchmarks.papers.likhosherstov.pixel_mnist  # 64 steps, no files
    python -m benchmarks.papers.likhosherstov.pixel_mnist --data mnist --data-dir DIR \\
        --side 14 --resume  # 196 steps
    python -m benchmarks.papers.likhosherstov.pixel_mnist --preset paper --data-dir DIR \\
        --device cuda  # 784 steps

DIR holds mnist.npz, see `common/images.py`. ``--side`` averages squares of pixels; ``--permuted``
shuffles their order, the same for all images. Task: Likhosherstov et al. (AISTATS 2021), section
4.1 and appendix C (784 steps, Helfrich's start); the rest is from the code that they run.
"""

import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common import programs
from benchmarks.common.classification import Classification, classification_trainer
from benchmarks.common.harness import final_values
from benchmarks.common.images import Images, load_images
from benchmarks.common.training import Record, Trainer, compare
from benchmarks.papers.likhosherstov import cells

INPUT_DEVIATION = 0.14  # a sum over hundreds of steps begins near one
SETTINGS = ["data", "limit", "side", "permuted", "epochs", "warmup", "batch_size", "smoothing"]
SETTINGS += ["augment", *cells.CELL_SETTINGS]
PRESETS = {
    "demo": {},
    "paper": {"data": "mnist", "hidden": 170, "batch_size": 128, "epochs": 70, "warmup": 0.0}
    | {"lr": 7e-4, "transition_lr": 7e-5, "decay": "none", "cells": cells.PAPER_CELLS},
}
SMOKE = {"hidden": 12, "epochs": 2, "limit": 64, "side": 4, "cells": ["cwy", "adam", "lstm"]}
PERMUTATION_SEED = 92916  # any; one for all seeds, so that all runs have one task


class PixelModel(nn.Module):
    """A sequence model over the pixels of images ``(batch, 1, side, side)``."""

    def __init__(self, sequence: cells.SequenceModel, order: Tensor) -> None:
        super().__init__()
        self.sequence = sequence
        self.register_buffer("order", order)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)[:, self.order]
        return self.sequence(pixels.T.unsqueeze(-1))


def pooled(images: Images, side: int | None) -> Images:
    """The images with squares of pixels averaged, ``side`` in each direction."""
    size = images.train_images.size(-1)
    if side in (None, size):
        return images
    if side < 1 or size % side:
        raise SystemExit(f"--side must divide the images' side, got {side} for {size}")
    train, test = (
        nn.functional.avg_pool2d(part.float(), size // side).round().to(torch.uint8)
        for part in (images.train_images, images.test_images)
    )
    mean = train.float().mean((0, 2, 3), keepdim=True)[0]
    deviation = train.float().std((0, 2, 3), keepdim=True, correction=0)[0]
    return images._replace(train_images=train, test_images=test, mean=mean, deviation=deviation)


def build_trainer(options: Namespace, images: Images, title: str, seed: int) -> Trainer:
    """Everything one run needs; runs of one seed see the images in the same order."""
    name = cells.TITLES[title]
    torch.manual_seed(seed)
    sequence = cells.SequenceModel(
        name, 1, images.classes, options, deviation=INPUT_DEVIATION, last=True
    )
    order = torch.arange(images.train_images[0].numel())
    if options.permuted:
        shuffled = torch.Generator().manual_seed(PERMUTATION_SEED)
        order = torch.randperm(len(order), generator=shuffled)
    model = PixelModel(sequence, order).to(options.device)
    settings = {key: getattr(options, key) for key in SETTINGS} | {"cell": name, "seed": seed}

    def measure() -> dict[str, float | None]:
        return {"orthonormality_error": sequence.orthonormality_error()}

    task = Classification(model, images, settings, measure)
    optimizer = cells.build_optimizer(name, sequence, options.lr, options.transition_lr)
    path = options.output / "checkpoints" / f"{name}-{seed}.pt"
    return classification_trainer(task, optimizer, settings, path)


def report(options: Namespace, images: Images, records: Mapping[str, Sequence[Record]]) -> None:
    """Write the table and draw the curves of the runs that are over."""
    header = ["Cell", "Test accuracy %", "Training accuracy %", "ms a step", "Parameters"]
    rows = []
    for title, runs in records.items():
        last = [run["history"][-1] for run in runs]
        speed = [options.batch_size / e["images_per_second"] for r in runs for e in r["history"]]
        right = [100 - error for error in final_values(runs, "test_error")]
        learned = [100 * share for share in final_values(runs, "train_accuracy")]
        row = [title, programs.spread(right, ".2f"), programs.spread(learned, ".2f")]
        row += [f"{1000 * statistics.median(speed):.0f}", f"{runs[0]['parameters']:,}"]
        rows.append([*row, programs.worst([entry["orthonormality_error"] for entry in last])])
    side = images.train_images.size(-1)
    title = (
        f"{'Permuted pixels' if options.permuted else 'Pixels'} of {options.data}, "
        f"{side} x {side} = {side**2} steps: {options.hidden} units, batch {options.batch_size}, "
        f"{options.epochs} epochs of {len(images.train_images):,} images"
    )
    panels = [
        programs.Panel("test_error", "test error (%)", "Test error", "log", {"95 % accuracy": 5.0}),
        programs.Panel("train_loss", "cross entropy", "Training loss", "log"),
    ]
    programs.write_report(options, title, ([*header, "Orthonormality"], rows), records, panels)


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over the smoke sizes over defaults."""
    parser = ArgumentParser(
        description="Classify digits pixel by pixel.", formatter_class=programs.Help
    )
    add = parser.add_argument
    add("--data", choices=["digits", "mnist"], default="digits", help="digits needs no files")
    add("--data-dir", type=Path, default=Path("data"), help="folder with the files of MNIST")
    add("--limit", type=int, help="use only LIMIT training images")
    add("--side", type=int, help="pixels in each direction after averaging; by default all")
    add("--permuted", action="store_true", help="shuffle the order of the pixels")
    add("--epochs", type=int, default=20, help="passes over the training images")
    add("--warmup", type=float, default=0.5, help="epochs of linear warm-up before the cosine")
    add("--batch-size", type=int, default=32, help="images in a step")
    parser.set_defaults(smoothing=0.0, augment="none")
    cells.add_cell_flags(parser, hidden=64, start="helfrich")
    programs.add_flags(parser, Path("runs/pixel_mnist"), seeds=2)
    options = programs.parsed(parser, argv, {"seeds": [1], **SMOKE}, PRESETS)
    if options.epochs < 1:
        parser.error("--epochs must be at least 1, got 0")
    options.methods = cells.parse_cells(options.cells)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train every cell with every seed; print the table and where the plot is."""
    options = parse_arguments(argv)
    try:
        images = load_images(options.data, options.data_dir, options.limit)
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    images = pooled(images, options.side).to(options.device)
    steps = images.train_images[0].numel()
    compare(
        options,
        options.methods,
        partial(build_trainer, options, images),
        partial(report, options, images),
        f"{len(images.train_images):,} images of {options.data} in {steps} pixels, one a step: "
        f"{', '.join(options.methods)}; {options.epochs} epochs, {programs.listed(options.seeds)}.",
    )


if __name__ == "__main__":
    programs.run(main)
