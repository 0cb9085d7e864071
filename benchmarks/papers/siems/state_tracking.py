"""State tracking: how many Householder factors does a linear recurrence need for a group?

    python -m benchmarks.papers.siems.state_tracking  # parity and S3, minutes
    python -m benchmarks.papers.siems.state_tracking --tasks all --factors 1 2 3 4 5 --seeds 5 \\
        --iterations 3000 --resume

A sequence names random elements of a group, and after each the answer is the product of all so
far. Elements of S3, S4 and S5 are permutations of 3, 4 and 5 things; parity is S2. `DeltaProduct`
turns its state by n_h generalized Householder factors for each token. One layer with a finite
state can answer exactly if every element is a product of n_h reflections: parity needs 1, S3
needs 2, S4 needs 2 as the rotations of a cube, S5 needs 4 (Siems et al., DeltaProduct, 2025).

Everything is learned from a random initialisation. Lengths grow from 2 up to --length as answers
become right; tested are the places around four times that length. The state starts learned and
is only turned, not written to, and noise on what is read from it during training asks for states
that lie far apart, which is what lasts beyond the trained lengths. A run ends early once other
sequences than the tested ones are answered at these places twice in a row; the runs on file were
ended by the tested ones.
"""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.common import programs
from benchmarks.common.harness import markdown_table
from benchmarks.common.training import Record, Trainer, compare, rate_factor
from stiefel_opt.nn import DeltaProduct

THINGS = {"parity": 2, "S3": 3, "S4": 4, "S5": 5}  # permuted things of each task
THEORY = {"parity": 1, "S3": 2, "S4": 2, "S5": 4}  # factors that suffice, one layer
LONGER = 4  # tested length over trained length
RIGHT = 0.9  # accuracy on a batch that lengthens the sequences
SOLVED = 0.999  # accuracy on the second set, twice in a row, that ends a run
TESTED = 64  # sequences of each set
OPEN = 2.0  # strengths start near 2 sigmoid(2) = 1.76, so that little of the state is lost
# Heads, head_dim and noise: 120 elements need more room, and bear less noise, than 24.
SIZES = {"parity": (2, 4, 1.0), "S3": (2, 4, 1.0), "S4": (8, 4, 1.0), "S5": (4, 8, 0.3)}
SETTINGS = ["layers", "width", "length", "epochs", "every", "batch_size", "lr"]
SMOKE = {"length": 4, "iterations": 4, "every": 2, "batch_size": 8, "tasks": ["parity", "S3"]}
Batch = tuple[Tensor, Tensor]


def multiplication_table(things: int) -> Tensor:
    """Entry (g, h) is the number of the permutation that does h first, then g."""
    group = list(itertools.permutations(range(things)))
    number = {element: index for index, element in enumerate(group)}
    return torch.tensor([[number[tuple(g[i] for i in h)] for h in group] for g in group])


def draw(table: Tensor, count: int, length: int, generator: torch.Generator) -> Batch:
    """Random elements and the products so far, both (count, length)."""
    elements = torch.randint(len(table), (count, length), generator=generator)
    products = [elements[:, 0]]
    for place in range(1, length):
        products.append(table[elements[:, place], products[-1]])
    return elements, torch.stack(products, dim=1)


class Tracker(nn.Module):
    """Embedding, layers of DeltaProduct with a learned first state, a linear answer."""

    length: Tensor
    solved: Tensor

    def __init__(self, task: str, factors: int, options: Namespace) -> None:
        super().__init__()
        elements, width = len(multiplication_table(THINGS[task])), options.width
        heads, size, self.noise = SIZES[task]
        self.embedding = nn.Embedding(elements, width)
        self.layers = nn.ModuleList(
            DeltaProduct(width, heads, factors, head_dim=size, chunk_size=max(2, 8 // factors))
            for _ in range(options.layers)
        )
        states = torch.randn(options.layers, heads, size, size) / size**0.5
        self.first_states = nn.Parameter(states)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(options.layers + 1))
        self.answer = nn.Linear(width, elements)
        for layer in self.layers:
            nn.init.constant_(layer.b_proj.bias, OPEN)
            layer.v_proj.weight.requires_grad_(False).zero_()
        # Where training stands: in the checkpoint, as it decides how training goes on.
        self.register_buffer("length", torch.tensor(min(2, options.length)))
        self.register_buffer("solved", torch.tensor(0))

    def forward(self, elements: Tensor) -> Tensor:
        """Logits (count, length, elements) of the product so far."""
        hidden = self.embedding(elements)
        for number, (layer, norm, state) in enumerate(
            zip(self.layers, self.norms, self.first_states, strict=False)
        ):
            read, _ = layer(norm(hidden), state.expand(len(elements), *state.shape))
            hidden = read if number == 0 else hidden + read
        hidden = self.norms[-1](hidden)
        if self.training:
            hidden = hidden + self.noise * torch.randn_like(hidden)
        return self.answer(hidden)


class Tracking:
    """Fresh sequences in every step, longer ones once the answers are right."""

    def __init__(self, model: Tracker, table: Tensor, options: Namespace) -> None:
        self.model, self.table, self.options = model, table, options
        self.steps = options.every
        self.test, self.second = (
            draw(table, TESTED, LONGER * options.length, torch.Generator().manual_seed(seed))
            for seed in (2**31, 2**31 + 1)
        )
        self.right = torch.zeros(())  # of the last batch
        self.last: dict[str, float] = {}

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        length = int(self.model.length)
        count = max(1, self.options.batch_size * 8 // max(8, length))  # long ones teach more
        for _ in range(self.steps):
            if self.model.solved < 2:  # a solved run spends nothing on its other epochs
                yield draw(self.table, count, length, generator)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        elements, products = (part.to(self.options.device) for part in batch)
        logits = self.model(elements)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), products.flatten())
        self.right = (logits.detach().argmax(-1) == products).float().mean()
        return loss, {"train_loss": loss.detach()}

    def evaluate(self) -> dict[str, float]:
        """Accuracy up to the trained length, and at the places from 3 to 4 times it."""
        if self.last and self.model.solved >= 2:
            return self.last
        length = self.options.length
        near, far = self.accuracies(self.test)
        if float(self.right) > RIGHT:
            self.model.length.mul_(2).clamp_(max=length)
        self.model.solved.add_(1).mul_(int(self.accuracies(self.second)[1] >= SOLVED))
        self.last = {"accuracy": near, "accuracy_longer": far, "length": int(self.model.length)}
        return self.last

    def accuracies(self, batch: Batch) -> tuple[float, float]:
        elements, products = (part.to(self.options.device) for part in batch)
        right = (self.model(elements).argmax(-1) == products).float()
        length = self.options.length
        return float(right[:, :length].mean()), float(right[:, -length:].mean())


def build_trainer(options: Namespace, title: str, seed: int) -> Trainer:
    """Everything one run needs; the title names task and factors, as in "S3 n_h=2"."""
    name, factors = title.split(" n_h=")
    table = multiplication_table(THINGS[name])
    torch.manual_seed(seed)
    model = Tracker(name, int(factors), options).to(options.device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, options.lr, betas=(0.9, 0.99))
    settings = {key: getattr(options, key) for key in SETTINGS}
    settings |= {"task": name, "factors": int(factors), "seed": seed}
    settings |= {"heads": model.layers[0].num_heads, "head_dim": model.layers[0].head_dim}
    settings["noise"] = model.noise
    path = options.output / "checkpoints" / f"{name}-{factors}-{seed}.pt"
    factor = partial(rate_factor, warmup_steps=50, total_steps=options.epochs * options.every)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    task = Tracking(model, table, options)
    counted = ("sequences", options.batch_size)
    return Trainer(model, optimizer, task, settings, path, scheduler, counted, clip=1.0)


def final(runs: Sequence[Record], key: str = "accuracy_longer") -> list[float]:
    return [100 * run["history"][-1][key] for run in runs]


def report(options: Namespace, records: Mapping[str, Sequence[Record]]) -> None:
    """Write the table, tasks by factors, and draw the accuracies."""
    header = ["Task", "Elements", "Theory n_h", *(f"n_h = {n}" for n in options.factors)]
    rows = []
    for task in options.tasks:
        cells = []
        for factors in options.factors:
            runs = records.get(f"{task} n_h={factors}", [])
            cells.append(programs.spread(final(runs), ".1f") if runs else "-")
        elements = len(multiplication_table(THINGS[task]))
        rows.append([task, str(elements), str(THEORY[task]), *cells])
    title = (
        f"Accuracy in % at {LONGER} times the trained length {options.length}, mean (range) over "
        f"seeds {', '.join(map(str, options.seeds))}"
        f"; {programs.plural(options.layers, 'layer')}, "
        f"at most {options.epochs * options.every} steps"
    )
    runs = [run for group in records.values() for run in group]
    programs.write_table(options.output, title, markdown_table(header, rows), {"runs": runs})
    lengths = (options.length, LONGER * options.length)
    theory = {task: THEORY[task] for task in options.tasks}
    path = options.output / "accuracy.png"
    programs.figures.accuracies(path, runs, options.factors, lengths, theory)


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over the smoke sizes over defaults."""
    what = "Word problems of groups, by products of Householder factors."
    parser = ArgumentParser(description=what, formatter_class=programs.Help)
    add = parser.add_argument
    add("--tasks", nargs="+", choices=[*THINGS, "all"], default=["parity", "S3"],
        help="groups whose products are to be followed")  # fmt: skip
    add("--factors", nargs="+", type=int, default=[1, 2], help="n_h, Householder factors a token")
    add("--layers", type=int, default=1, help="DeltaProduct layers")
    add("--width", type=int, default=64, help="of the embedding")
    add("--length", type=int, default=32, help="longest sequences in training")
    add("--iterations", type=int, default=500, help="training steps at most")
    add("--every", type=int, default=25, help="steps between two tests and checkpoints")
    add("--batch-size", type=int, default=128, help="sequences, if short; at length 32 a quarter")
    add("--lr", type=float, default=1e-2, help="of Adam")
    programs.add_flags(parser, Path("runs/state_tracking"), seeds=1)
    options = programs.parsed(parser, argv, SMOKE)
    if options.length < 1 or options.iterations < options.every or min(options.factors) < 1:
        parser.error("--length and --factors must be at least 1, --iterations at least --every")
    options.tasks = list(THINGS) if "all" in options.tasks else options.tasks
    options.epochs = options.iterations // options.every
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train every task with every number of factors; print the table and where the plot is."""
    options = parse_arguments(argv)
    build = partial(build_trainer, options)
    titles = [f"{task} n_h={factors}" for task in options.tasks for factors in options.factors]

    what = (
        f"Word problems of {', '.join(options.tasks)} with {options.factors} factors: at most "
        f"{options.epochs * options.every} steps, less if solved, {programs.listed(options.seeds)}."
    )
    compare(options, titles, build, partial(report, options), what)


if __name__ == "__main__":
    programs.run(main)
