"""A character transformer with no, some or all hidden matrices orthonormal, by three rules.

The text is Python's own help topics (`pydoc_data.topics`, 0.46 million characters with 3.11), which
every Python brings. Two layers of width 96, a quarter of a million parameters, 300 steps: small
enough for minutes on a CPU, and so a hint only. `StiefelMuon` trains every network by itself, its
groups say how:

- *AdamW*: every parameter by AdamW.
- *Muon*: hidden matrices by Muon, embeddings, gains and head by AdamW; nothing is constrained.
- *attention*: the matrices of attention orthonormal by spectral steps, those of the MLPs by Muon.
- *all*: all hidden matrices orthonormal.

The learning rate of the hidden matrices comes from a grid, by the loss on held-out text with the
first seed; the others have 3e-3. Time is that of the processor, of a few steps taken apart from the
trainings, methods in turn. A stopped run goes on where it was.

    python -m benchmarks.accuracy.muon_transformer --seeds 3  # about half an hour on one core
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json

LAYERS, WIDTH, HEADS, LENGTH, BATCH, STEPS = 2, 96, 4, 64, 16, 300
PLAIN_RATE, EVERY, TIMED = 3e-3, 30, 12
GRIDS = {
    "AdamW": (3e-3, 1e-2, 3e-2),
    "Muon": (1e-2, 3e-2, 1e-1),
    "attention": (3e-2, 1e-1, 3e-1),
    "all": (3e-2, 1e-1, 3e-1),
}
FILE = RESULTS / "muon_transformer.json"


class Block(nn.Module):
    """Attention and an MLP, each behind a norm with gains; matrices without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        parts = (self.query(normed), self.key(normed), self.value(normed))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """Logits of the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places(torch.arange(text.size(1)))
        return self.head(self.norm(self.blocks(x)))


def read_text() -> tuple[Tensor, Tensor, int]:
    """Training text, held-out text, number of characters."""
    text = "\n".join(topics[name] for name in sorted(topics))
    known = sorted(set(text))
    codes = torch.tensor([known.index(character) for character in text])
    split = len(codes) * 9 // 10
    return codes[:split], codes[split:], len(known)


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of text, and the same one character on."""
    starts = torch.randint(len(text) - LENGTH - 1, (count, 1), generator=generator)
    pieces = text[starts + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def optimizer_for(model: Transformer, method: str, rate: float) -> so.StiefelMuon:
    """Hidden matrices move by the method at learning rate ``rate``, all else by AdamW."""
    attention = [layer for b in model.blocks for layer in (b.query, b.key, b.value, b.output)]
    others = [layer for b in model.blocks for layer in (b.up, b.down)]
    for layer in {"attention": attention, "all": attention + others}.get(method, []):
        so.constrain(layer)
    hidden = [layer.weight for layer in attention + others]
    known = {id(weight) for weight in hidden}
    rest = [p for p in model.parameters() if id(p) not in known]
    plain = "adamw" if method == "AdamW" else "muon"
    stiefel = False if method in ("AdamW", "Muon") else None
    groups = [
        {"params": hidden, "lr": rate, "plain": plain, "stiefel": stiefel},
        {"params": rest, "lr": PLAIN_RATE, "stiefel": False},
    ]
    return so.StiefelMuon(groups)


def train(method: str, rate: float, seed: int, steps: int) -> dict[str, Any]:
    """One run; the learning rate rises over 5 % of the steps and falls to zero."""
    train_text, held_out, characters = read_text()
    torch.manual_seed(seed)
    model = Transformer(characters)
    optimizer = optimizer_for(model, method, rate)
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), 1 - step / steps)
    )
    generator = torch.Generator().manual_seed(seed)
    test = windows(held_out, 256, torch.Generator().manual_seed(0))
    curve, spent, whole = [], 0.0, time.process_time()
    for step in range(1, steps + 1):
        inputs, wanted = windows(train_text, BATCH, generator)
        optimizer.zero_grad()
        cross_entropy(model(inputs).flatten(0, 1), wanted.flatten()).backward()
        start = time.process_time()
        optimizer.step()
        spent += time.process_time() - start
        plan.step()
        if step % EVERY == 0 or step == steps:
            held = time.process_time()
            with torch.no_grad():
                loss = cross_entropy(model(test[0]).flatten(0, 1), test[1].flatten())
            curve.append([step, float(loss)])
            whole += time.process_time() - held  # no part of a training step
    constrained = [p for p in model.parameters() if isinstance(p, so.ManifoldParameter)]
    return {
        "loss": curve[-1][1],
        "curve": curve,
        "ms": [1e3 * spent / steps, 1e3 * (time.process_time() - whole) / steps],
        "error": float(so.orthonormality_error(model)) if constrained else None,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1, help="at the best learning rate")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [LAYERS, WIDTH, HEADS, LENGTH, BATCH, arguments.steps]
    content: dict[str, Any] = {"python": platform.python_version(), "sizes": sizes, "runs": {}}
    if FILE.exists() and (earlier := json.loads(FILE.read_text()))["sizes"] == sizes:
        content = earlier
    runs = content["runs"]

    def once(method: str, rate: float, seed: int) -> dict[str, Any]:
        key = f"{method} {rate} {seed}"
        if key not in runs:
            runs[key] = train(method, rate, seed, arguments.steps)
            write_json(FILE, content)
            print(f"{key}: {runs[key]['loss']:.4f}", flush=True)
        return runs[key]

    rates = {
        method: min(grid, key=lambda rate: once(method, rate, 0)["loss"])
        for method, grid in GRIDS.items()
    }
    seeds = range(arguments.seeds)
    best = {method: [once(method, rate, seed) for seed in seeds] for method, rate in rates.items()}
    timed: dict[str, list[list[float]]] = {method: [] for method in rates}
    for _ in range(3):
        for method, rate in rates.items():
            timed[method].append(train(method, rate, 0, TIMED)["ms"])
    table = []
    for method, found in best.items():
        losses = [run["loss"] for run in found]
        times = [statistics.median(each) for each in zip(*timed[method], strict=True)]
        spread = f" +- {(max(losses) - min(losses)) / 2:.3f}" if len(losses) > 1 else ""
        loss = f"{statistics.mean(losses):.3f}{spread}"
        table.append([method, f"{rates[method]:g}", loss, f"{times[0]:.1f}", f"{times[1]:.1f}"])
    header = ["hidden matrices", "learning rate", "held-out loss", "optimizer, ms a step"]
    header.append("all, ms a step")
    tables = [markdown_table(header, table)]
    content |= {"rates": rates, "machine": machine(), "tables": tables}
    write_json(FILE, content)
    print(tables[0])


if __name__ == "__main__":
    main()
