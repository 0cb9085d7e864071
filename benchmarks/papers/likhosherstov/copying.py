"""The copying task: repeat ten digits after a long pause. Who remembers?

    python -m benchmarks.papers.likhosherstov.copying  # T = 30, three cells, two minutes
    python -m benchmarks.papers.likhosherstov.copying --preset paper --device cuda \\
        --resume  # T = 1000
    python -m benchmarks.papers.likhosherstov.copying --preset paper --batch-size 32 \\
        --grid 3e-4 1e-3 3e-3 --resume  # the rate of each cell by its loss at T = 100

A sequence is ten digits of {1 ... 8}, T zeros, a 9 and nine zeros; the answer is T + 10 zeros and
the ten digits. Without memory the cross entropy cannot fall below 10 log 8 / (T + 20). Task:
Likhosherstov et al. (AISTATS 2021), section 4.1 and appendix C; rates and steps of the preset are
of the code that they run.
"""

import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common import programs
from benchmarks.common.harness import final_values, markdown_table
from benchmarks.common.training import Record, Trainer, compare, rate_factor, train_all
from benchmarks.papers.likhosherstov import cells

DIGITS = 10  # to be remembered
SYMBOLS = 10  # 0 is the pause, 1 to 8 are digits, 9 asks for them
TEST_SEQUENCES = 256
GRID_LENGTH = 100  # T at which rates are compared
INPUT_DEVIATION = math.sqrt(2 / SYMBOLS)
SETTINGS = ["length", "epochs", "every", "batch_size", *cells.CELL_SETTINGS]
SMOKE = {"length": 2, "hidden": 8, "iterations": 6, "every": 2, "batch_size": 4, "cells": ["all"]}
PRESETS = {
    "demo": {},
    "paper": {"length": 1000, "hidden": 190, "batch_size": 128, "iterations": 4000, "lr": 2e-4}
    | {"transition_lr": 2e-5, "decay": "none", "cells": cells.PAPER_CELLS},
}
Batch = tuple[Tensor, Tensor]


def draw(count: int, length: int, generator: torch.Generator) -> Batch:
    """Sequences and answers, (T + 20, count) symbols."""
    digits = torch.randint(1, 9, (DIGITS, count), generator=generator)
    sequence, answer = torch.zeros(2, length + 2 * DIGITS, count, dtype=torch.int64)
    sequence[:DIGITS] = answer[-DIGITS:] = digits
    sequence[-DIGITS] = 9
    return sequence, answer


def baseline(length: int) -> float:
    """Cross entropy of guessing the digits: the best without memory."""
    return DIGITS * math.log(8) / (length + 2 * DIGITS)


class Copying:
    """Fresh sequences in every step; an epoch is ``every`` steps."""

    def __init__(self, model: cells.SequenceModel, options: Namespace) -> None:
        self.model, self.options = model, options
        self.steps = options.every
        held_out = torch.Generator().manual_seed(2**31)
        self.test = draw(TEST_SEQUENCES, options.length, held_out)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        for _ in range(self.steps):
            yield draw(self.options.batch_size, self.options.length, generator)

    def answer(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cross entropy, and the share of the ten digits that are right."""
        sequence, answer = (part.to(self.options.device) for part in batch)
        logits = self.model(nn.functional.one_hot(sequence, SYMBOLS).float())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answer.flatten())
        right = (logits[-DIGITS:].argmax(-1) == answer[-DIGITS:]).float().mean()
        return loss, right

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss, _ = self.answer(batch)
        return loss, {"train_loss": loss.detach()}

    def evaluate(self) -> dict[str, float]:
        loss, right = self.answer(self.test)
        return {
            "loss": float(loss),
            "of_baseline": float(loss) / baseline(self.options.length),
            "digits_right": float(right),
            "orthonormality_error": self.model.orthonormality_error(),
        }


def build_trainer(options: Namespace, title: str, seed: int) -> Trainer:
    """Everything one run needs; runs of one seed see the same sequences."""
    name = cells.TITLES[title]
    options = at_rate(options, options.chosen.get(title))
    torch.manual_seed(seed)
    model = cells.SequenceModel(
        name, SYMBOLS, SYMBOLS - 1, options, deviation=INPUT_DEVIATION, last=False
    ).to(options.device)
    optimizer = cells.build_optimizer(name, model, options.lr, options.transition_lr)
    task = Copying(model, options)
    settings = {key: getattr(options, key) for key in SETTINGS} | {"cell": name, "seed": seed}
    path = options.output / "checkpoints" / f"{name}-{seed}.pt"
    factor = partial(rate_factor, warmup_steps=0, total_steps=options.epochs * options.every)
    constant = options.decay == "none"
    scheduler = None if constant else torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    counted = ("sequences", options.batch_size)
    return Trainer(model, optimizer, task, settings, path, scheduler, counted)


def at_rate(options: Namespace, rate: float | None) -> Namespace:
    """The same with another learning rate, a tenth of it for transitions; None leaves both."""
    rates = {} if rate is None else {"lr": rate, "transition_lr": rate / 10}
    return Namespace(**vars(options) | rates)


def try_rates(options: Namespace) -> dict[str, dict[str, float]]:
    """Loss over the baseline of each cell at T = 100, mean over seeds, by learning rate."""
    tried: dict[str, dict[str, float]] = {title: {} for title in options.methods}
    for rate in options.grid:
        short = at_rate(options, rate)
        short.length = GRID_LENGTH
        short.output = options.output / f"rate-{rate:g}"

        def keep(records: Mapping[str, Sequence[Record]], rate: float = rate) -> None:
            for title, runs in records.items():
                reached = statistics.fmean(final_values(runs, "of_baseline"))
                tried[title][f"{rate:g}"] = reached if math.isfinite(reached) else math.inf

        train_all(short, options.methods, partial(build_trainer, short), keep)
    return tried


def report(options: Namespace, records: Mapping[str, Sequence[Record]]) -> None:
    """Write the table and draw the curves of the runs that are over."""
    header = ["Cell", "Loss / baseline", "Digits right %", "Steps to 1/10", "ms a step"]
    header += ["Parameters", "Orthonormality"]
    rows = []
    for title, runs in records.items():
        last = [run["history"][-1] for run in runs]
        first = [steps_to_a_tenth(run) for run in runs]
        speed = [e["seconds"] / options.every for run in runs for e in run["history"]]
        right = [100 * share for share in final_values(runs, "digits_right")]
        row = [title, programs.spread(final_values(runs, "of_baseline"), ".4f")]
        row.append(programs.spread(right, ".1f"))
        row += [programs.spread(first, ".0f") if math.inf not in first else "not reached"]
        row += [f"{1000 * statistics.median(speed):.0f}", f"{runs[0]['parameters']:,}"]
        rows.append([*row, programs.worst([entry["orthonormality_error"] for entry in last])])
    title = (
        f"Copying task, T = {options.length}: {options.hidden} units, batch {options.batch_size}, "
        f"{options.epochs * options.every} steps"
    )
    levels = {"no memory": 1.0, "a tenth": 0.1}
    panels = [
        programs.Panel(
            "of_baseline", "test loss / no-memory baseline", "Loss", "log", levels, "step"
        ),
        programs.Panel(
            "digits_right", "share of the ten digits", "Digits repeated rightly", x="step"
        ),
    ]
    known = {"baseline": baseline(options.length), "grid": options.tried}
    programs.write_report(options, title, (header, rows), records, panels, **known)


def steps_to_a_tenth(run: Record) -> float:
    """The first measurement below a tenth of the baseline from which on it stays there."""
    below = [entry["of_baseline"] < 0.1 for entry in run["history"]]
    if not below[-1]:
        return math.inf
    start = len(below) - below[::-1].index(False) if False in below else 0
    return run["history"][start]["step"]


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over the smoke sizes over defaults."""
    what = "Repeat ten digits after a pause of T steps."
    parser = ArgumentParser(description=what, formatter_class=programs.Help)
    add = parser.add_argument
    add("--length", type=int, default=30, help="T, the zeros between digits and question")
    add("--iterations", type=int, default=400, help="training steps")
    add("--every", type=int, default=25, help="steps between two measurements and checkpoints")
    add("--batch-size", type=int, default=128, help="sequences in a step")
    add("--grid", type=float, nargs="+", default=[], metavar="LR",
        help=f"choose each cell's learning rates from these, at T = {GRID_LENGTH}")  # fmt: skip
    cells.add_cell_flags(parser, hidden=64, start="henaff")
    programs.add_flags(parser, Path("runs/copying"), seeds=2)
    options = programs.parsed(parser, argv, {"seeds": [1], **SMOKE}, PRESETS)
    if options.length < 1 or options.iterations < options.every:
        parser.error("--length must be at least 1 and --iterations at least --every")
    options.epochs = options.iterations // options.every
    options.methods = cells.parse_cells(options.cells)
    options.tried, options.chosen = {}, {}
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train every cell with every seed; print the table and where the plot is."""
    options = parse_arguments(argv)
    options.tried = try_rates(options) if options.grid else {}
    options.chosen = {
        title: float(min(reached, key=reached.__getitem__))
        for title, reached in options.tried.items()
    }
    if options.tried:
        header = ["Loss / baseline", *(f"{rate:g}" for rate in options.grid)]
        rows = [[n, *(f"{v:.4f}" for v in tried.values())] for n, tried in options.tried.items()]
        print(f"\nRates at T = {GRID_LENGTH}:\n\n{markdown_table(header, rows)}\n", flush=True)
    compare(
        options,
        options.methods,
        partial(build_trainer, options),
        partial(report, options),
        f"Copying ten digits over T = {options.length} steps: {', '.join(options.methods)}; "
        f"{options.epochs * options.every} steps each, {programs.listed(options.seeds)}.",
    )


if __name__ == "__main__":
    programs.run(main)
