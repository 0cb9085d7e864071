"""Train a Vision Transformer whose attention heads are orthogonal, next to unconstrained baselines.

    python -m benchmarks.papers.kong.orthogonal_vit  # the demo: digits, three methods, two seeds
    python -m benchmarks.papers.kong.orthogonal_vit --preset cpu --data-dir DIR  # without a GPU
    python -m benchmarks.papers.kong.orthogonal_vit --table  # all 16 rows of the paper, on digits
    python -m benchmarks.papers.kong.orthogonal_vit --preset paper --table --seeds 5 \\
        --data-dir DIR --device cuda  # the paper's experiment

Transformer, constraints, rates: Kong, Wang & Tao (ICLR 2023), section 3.2, table 4. "Within heads":
the query and key matrices of each head have orthonormal rows; "across heads": those of all heads
together do. One optimizer moves all weights as SGD or Adam. The preset "paper" takes Algorithms 1
and 2, the coupling of momentum and turn with the sign of equation (8), which is not that of the
authors' code; the others have our own rules in its rows. ``--table`` resumes.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so
from benchmarks.common.classification import Classification, classification_trainer
from benchmarks.common.images import FILES, Images, load_images
from benchmarks.common.programs import Help, add_flags, finish_flags, listed, run
from benchmarks.common.training import Record, Trainer, compare
from benchmarks.papers.kong.vit_methods import (
    OPTIMIZERS,
    Method,
    build_optimizer,
    parse_method,
    rows_of,
)
from benchmarks.papers.kong.vit_results import write_results

PRESETS: dict[str, dict[str, Any]] = {
    "demo": {"threads": 1},  # and the defaults of the flags
    "smoke": {"layers": 1, "width": 32, "heads": 2, "feed_forward": 32}
    | {"epochs": 3, "limit": 512, "warmup": 0.5, "seeds": [1], "threads": 1},
    "cpu": {"data": "cifar10", "layers": 4, "width": 192, "heads": 6, "feed_forward": 192}
    | {"epochs": 15, "batch_size": 64},
    "paper": {"data": "cifar10", "layers": 7, "width": 384, "heads": 12, "feed_forward": 384}
    | {"epochs": 200, "batch_size": 128, "warmup": 5, "augment": "auto"},
}
DEMO = ["adamw:none", "stiefel-adam:within", "stiefel-sgd:within"]
LEARNED = "learned"
ALL = [*DEMO, "stiefel-sgd:across"]
SETTINGS = ["data", "limit", "layers", "width", "heads", "feed_forward", "patch", "batch_size"]
SETTINGS += ["epochs", "warmup", "smoothing", "augment", "scale", "bfloat16"]


class Attention(nn.Module):
    """Multi-head attention; query, key and value are separate so that two can be constrained.

    ``gain`` multiplies the queries, a learned number of each layer; ``largest`` is the largest
    logit since it was set to zero, in evaluation only.
    """

    def __init__(self, width: int, heads: int, gain: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.gain = nn.Parameter(torch.ones(())) if gain else None
        self.largest = torch.zeros(())
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        q, k, v = (
            values.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for values in (self.q(queries), self.k(tokens), self.v(tokens))
        )
        q = q if self.gain is None else q * self.gain
        if not self.training:
            logits = (q @ k.mT).float() * q.size(-1) ** -0.5
            self.largest = self.largest.to(q.device).maximum(logits.abs().max())
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block; returns only the first ``keep`` tokens (all by default)."""

    def __init__(self, width: int, heads: int, feed_forward: int, gain: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, gain=gain)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, feed_forward), nn.GELU(), nn.Linear(feed_forward, width)
        )

    def forward(self, tokens: Tensor, keep: int | None = None) -> Tensor:
        normed = self.norm1(tokens)
        tokens = tokens[:, :keep] + self.attention(normed[:, :keep], normed)
        return tokens + self.feed_forward(self.norm2(tokens))


class VisionTransformer(nn.Module):
    """Linear patch embedding, class token, learned positions, blocks, linear classifier."""

    def __init__(self, options: Namespace, images: Images) -> None:
        super().__init__()
        _, channels, height, side = images.train_images.shape
        self.patch, width, self.half = options.patch, options.width, options.bfloat16
        if width % options.heads or height % self.patch or side % self.patch:
            raise ValueError(
                f"--heads must divide --width and --patch the side of an image, got "
                f"{options.heads}, {width}, {self.patch}, {height} x {side}"
            )
        tokens = (height // self.patch) * (side // self.patch) + 1
        self.embedding = nn.Linear(channels * self.patch**2, width)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
        self.blocks = nn.ModuleList(
            Block(width, options.heads, options.feed_forward, gain=options.scale == LEARNED)
            for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, images.classes)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half):
            return self.logits(images).float()

    def logits(self, images: Tensor) -> Tensor:
        tokens = self.embedding(nn.functional.unfold(images, self.patch, stride=self.patch).mT)
        tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = tokens + self.positions
        for block in self.blocks[:-1]:
            tokens = block(tokens)
        class_token = self.blocks[-1](tokens, keep=1)  # nothing reads the others' last output
        return self.classifier(self.norm(class_token[:, 0]))


def constrain_attention(model: VisionTransformer, constraint: str, scale: float = 1.0) -> None:
    """Put the query and key weights on the Stiefel manifold, per head or as whole matrices."""
    for block in model.blocks if constraint != "none" else []:
        heads = block.attention.heads if constraint == "within" else None
        for layer in (block.attention.q, block.attention.k):
            so.constrain(layer, "weight", heads=heads, scale=scale)


@torch.no_grad()
def measure(model: VisionTransformer, constraint: str, scale: float) -> dict[str, float | None]:
    """Largest |W W' - I| of the queries and keys (of each head where nothing is constrained).

    And the largest logit of attention since the last time.
    """
    attention = [block.attention for block in model.blocks]
    heads = None if constraint == "across" else attention[0].heads
    manifold = so.Stiefel(heads=heads, scale=scale)
    weights = [layer.weight.detach() for each in attention for layer in (each.q, each.k)]
    logits = torch.stack([each.largest for each in attention])
    for each in attention:
        each.largest = torch.zeros(())
    return {
        "orthonormality_error": max(float(so.orthonormality_error(w, manifold)) for w in weights),
        "largest_logit": float(logits.max()),
    }


def build_trainer(options: Namespace, images: Images, method: Method, seed: int) -> Trainer:
    """Everything one run needs; runs of one seed share initial weights and order of the images.

    A soft constraint starts from the same orthonormal weights as a hard one.
    """
    torch.manual_seed(seed)  # initial weights; all later draws come from the trainer's generator
    model = VisionTransformer(options, images)
    scale = 1.0 if options.scale == LEARNED else options.scale
    constrain_attention(model, method.constraint, scale)
    model.to(options.device)
    soft = OPTIMIZERS[method.optimizer].soft == "loss"
    settings = {key: getattr(options, key) for key in SETTINGS}
    settings["penalty"] = options.penalty if OPTIMIZERS[method.optimizer].soft else None
    settings |= method._asdict() | {"seed": seed}
    task = Classification(
        model,
        images,
        settings,
        partial(measure, model, method.constraint, scale),
        partial(so.orthonormality_penalty, model, options.penalty) if soft else None,
    )
    path = options.output / "checkpoints" / f"{method.title} seed {seed}.pt".replace(" ", "-")
    optimizer = build_optimizer(method, model, options.penalty)
    return classification_trainer(task, optimizer, settings, path)


def factor(text: str) -> float | str:
    """A number, or "learned"."""
    return text if text == LEARNED else float(text)


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over preset over defaults (the demo)."""
    parser = ArgumentParser(
        description="Train a Vision Transformer with orthogonal attention heads next to "
        "unconstrained baselines; without flags: three methods on small digits, under a minute.",
        formatter_class=Help,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="demo", help="set all sizes; other flags override it")
    add("--data", choices=["digits", *FILES], default="digits", help="digits needs no files")
    add("--data-dir", type=Path, default=Path("data"), help="folder with the files of the data set")
    add("--limit", type=int, help="use only LIMIT training images")
    add("--methods", nargs="+", metavar="OPTIMIZER:CONSTRAINT[:RATE]", help="runs to compare")
    add("--table", action="store_true", help="all 16 of the paper, beside its results; resumes")
    add("--lr", type=float, help="of all methods; by default as published, SGD's times batch / 128")
    add("--penalty", type=float, default=1e-6, help="weight of a soft constraint")
    add("--epochs", type=int, default=25, help="passes over the training images")
    add("--warmup", type=float, default=1, help="epochs of linear warm-up before the cosine")
    add("--batch-size", type=int, default=32, help="images in a step")
    ways = ["none", "crop-flip", "auto"]
    add("--augment", choices=ways, default="none", help="of photographs; auto: AutoAugment as well")
    add("--layers", type=int, default=2, help="transformer blocks")
    add("--width", type=int, default=64, help="length of a token")
    add("--heads", type=int, default=4, help="attention heads of WIDTH / HEADS rows")
    add("--feed-forward", type=int, default=64, help="hidden width of the feed-forward part")
    add("--patch", type=int, default=4, help="side of a patch in pixels")
    scale = "singular values of constrained weights; learned: 1, and a learned factor a layer"
    add("--scale", type=factor, default=1.0, metavar="C", help=scale)
    add("--bfloat16", action="store_true", help="products in half precision")
    add_flags(parser, Path("runs/orthogonal_vit/demo"), seeds=2)
    parser.set_defaults(threads=0, smoothing=0.1)  # of the labels
    options, _ = parser.parse_known_args(argv)
    preset = "smoke" if options.smoke else options.preset
    folder, usual = preset, DEMO if preset == "demo" else ALL
    if options.table:
        folder, usual = f"{preset}-table", rows_of(preset)
        parser.set_defaults(seeds=[3])
    parser.set_defaults(output=Path("runs/orthogonal_vit") / folder, **PRESETS[preset])
    options = parser.parse_args(argv)
    options.resume |= options.table
    names = options.methods or usual
    try:
        methods = [parse_method(name, options.lr, options.batch_size) for name in names]
    except ValueError as error:
        parser.error(str(error))
    options.methods = list(dict.fromkeys(methods))  # each once
    if options.epochs < 1:
        parser.error("--epochs must be at least 1, got 0")
    return finish_flags(parser, options)


def main(argv: Sequence[str] | None = None) -> list[Record]:
    """Train every method with every seed, print the table and where the plot is; the runs."""
    options = parse_arguments(argv)
    try:
        images = load_images(options.data, options.data_dir, options.limit).to(options.device)
    except FileNotFoundError as error:
        raise SystemExit(f"error: {error}") from None
    methods = {method.title: method for method in options.methods}

    def build(title: str, seed: int) -> Trainer:
        return build_trainer(options, images, methods[title], seed)

    records = compare(
        options,
        list(methods),
        build,
        partial(write_results, options),
        f"{options.data}, {len(images.train_images)} training and {len(images.test_images)} test "
        f"images.\n{len(methods) * len(options.seeds)} runs of {options.epochs} epochs: "
        f"{', '.join(methods)}; {listed(options.seeds)}.",
        tidy=options.table,  # the checkpoints of many runs would fill a disk
    )
    return [run for runs in records.values() for run in runs]


if __name__ == "__main__":
    run(main)
