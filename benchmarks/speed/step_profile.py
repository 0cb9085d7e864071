"""How much of a training step the optimizer takes.

A training step of the paper's vision transformer (7 layers of width 384, 12 heads of 32, batches of
32 images of 32 x 32): the step of the optimizer is timed apart from forward and backward.

    python -m benchmarks.speed.step_profile
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from typing import Any

import torch
from torch import nn

import stiefel_opt as so
from benchmarks.common import harness
from benchmarks.common.images import Images
from benchmarks.papers.kong.orthogonal_vit import VisionTransformer, constrain_attention

SGD, ADAM = "StiefelSGD", "StiefelAdam"


def transformer_step(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of forward and backward, and of the optimizer, in steps of one training."""
    torch.manual_seed(0)
    options = Namespace(layers=7, width=384, heads=12, feed_forward=384, patch=4)
    options.scale, options.bfloat16 = 1.0, False
    pixels, labels = torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.int64)
    images = Images(pixels, labels, pixels, labels, 10, pixels, pixels)
    model = VisionTransformer(options, images)
    constrain_attention(model, "within")
    optimizer = {
        SGD: lambda: so.StiefelSGD(model.parameters(), lr=0.1, weight_decay=5e-5),
        ADAM: lambda: so.StiefelAdam(model.parameters(), lr=1e-3, weight_decay=5e-5),
    }[name]()
    learning, moving = [], []
    for number in range(rounds + 2):
        pixels, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels), labels).backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        if number >= 2:
            learning.append(1e3 * (middle - start))
            moving.append(1e3 * (end - middle))
    shares = [m / (m + t) for m, t in zip(moving, learning, strict=True)]
    return {
        "forward_backward_ms": statistics.median(learning),
        "optimizer_ms": statistics.median(moving),
        "share": statistics.median(shares),
        "shares": shares,
        "orthonormality_error": float(so.orthonormality_error(model)),
    }


def main() -> None:
    threads = torch.get_num_threads()
    flags = harness.flags(__doc__, "step_profile", rounds=8, threads=threads, device=False)
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    found = {name: transformer_step(name, options.rounds) for name in (SGD, ADAM)}
    lines = [
        [name, f"{one['forward_backward_ms']:.0f}", f"{one['optimizer_ms']:.1f}",
         f"{100 * one['share']:.1f} %"]
        for name, one in found.items()
    ]  # fmt: skip
    header = ("vision transformer, ms", "forward and backward", "optimizer", "its share")
    tables = {"training step": harness.markdown_table(header, lines)}
    print(tables["training step"])
    about = {"threads": options.threads, **harness.machine()}
    content = {"transformer": found, "machine": {"transformer": about}, "tables": tables}
    harness.write_json(options.output, content)


if __name__ == "__main__":
    main()
