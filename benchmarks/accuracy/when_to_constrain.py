"""When to constrain a network, and how: one table decides.

    python -m benchmarks.accuracy.when_to_constrain --data-dir DIR --cache FOLDER --stage 1
    python -m benchmarks.accuracy.when_to_constrain --data-dir DIR --cache FOLDER --transfer
    python -m benchmarks.accuracy.when_to_constrain --cache FOLDER --merge    # the file of results
    python -m benchmarks.accuracy.when_to_constrain --tables    # again, from the file
    python -m benchmarks.accuracy.when_to_constrain --check     # the batch beside so.StiefelAdamW
    python -m benchmarks.accuracy.when_to_constrain --quick     # seconds: every arm, a few steps

A job is a network and some arms; finished ones stay in the cache and are not run again.

**Networks**, :mod:`benchmarks.accuracy.small_networks`: on the 8 x 8 digits of scikit-learn, MNIST
at 14 x 14, English sentences and copied letters. Put aside before anything was run: CIFAR-10 and
Spanish sentences (``ASIDE``), on which only the arms of ``DECIDING`` run, last. An earlier study,
from which the learned scale comes, had one network on CIFAR-10 and none on Spanish.

**Arms**, :mod:`benchmarks.accuracy.small_arms`; "learned" is a learned scale by the chain rule,
"learn_scale=True" what the package does, which leaves g out of the gradient of Q. The arm trains
all weight matrices but the first of residual networks and transformers and the last layer, in a
tanh network over a sequence the recurrent one only; all other weights follow AdamW (NAdam: NAdam)
with decay .01. One learning rate serves both.

**Stage 1**: all arms, two seeds, three learning rates, short, falling to zero along a cosine.
A few arms also at 3e-2 and 1e-1, on the figure's networks at six learning rates, and on other seeds
for three times the steps (``--long``). **Stage 2**: ``BEST``, other seeds, two at first and then
five, five learning rates, short and long, falling and constant. Every arm has the same initial
values and batches.

**Measured**: training and test loss on up to 1,000 examples and the share of right answers, after
the last step. A copy whose loss is not finite counts as one that guesses; losses below .01 count as
.01. **Ratios** are to the better of AdamW and NAdam (torch's with ``momentum_decay=1e4,
decoupled_weight_decay=True``: constant betas), geometric means over seeds and networks: at equal
learning rates, and at the best of each by mean test loss.

**Advice** of a row: of the constrained arms in ``FORMS`` the one with the least product of both
ratios of the test loss. "constrain" if both are at most 1 and one is at most .97; if it is then not
3 % ahead of NAdam from an orthogonal initialisation by either, "orthogonal initialisation is
enough". Else "no difference" if both are at most 1.05, else "do not". Of all runs of a network,
short and long, the most cautious answer. "Muon is best" where its loss at its best learning rate is
at most .97 of the least of all others, in the mean of the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby, product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import stiefel_opt as so
from benchmarks.accuracy import small_arms
from benchmarks.accuracy.small_arms import (
    ARMS,
    BRANCHES,
    DECAYS,
    DECIDING,
    FORMS_OF_SCALE,
    SHIPPED,
    WAYS,
    Arm,
    batch_of,
    begun,
    plain_weights,
)
from benchmarks.accuracy.small_networks import (
    Autoencoder,
    Convolutions,
    Examples,
    Letters,
    Network,
    Perceptron,
    Pixels,
    Recurrent,
    Residual,
    Shifts,
    Tensors,
    Transformer,
    pixels,
    sentences,
)
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json, write_text

FILE = RESULTS / "when_to_constrain.json"
RUNS = RESULTS / "when_to_constrain_runs.json"
LENGTHS = {1: "short", 3: "long"}
RATES, SEEDS = (1e-3, 3e-3, 1e-2), (0, 1)
MORE_RATES, MORE_SEEDS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (10, 11, 12, 13, 14)
WIDE_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
LONGER = max(LENGTHS)
RIVALS = ("AdamW", "NAdam")
INITIAL = "NAdam, orthogonal initialisation"
FORMS = ("fixed 1", "learned, pull .3", "learned, pull 1")
# Of stage 2. Other forms of a learned scale are within .02 of these in the mean of stage 1.
BEST = ("AdamW", "NAdam", "Muon", *FORMS, "learn_scale=True", INITIAL, "sphere, pull .3")
LEAST = 0.01
# Learning rates beyond those of stage 1 for few arms, so that the best of each is not at the edge.
LARGE_RATES = (3e-2, 1e-1)
CONTROLS = ("free, pull .3", "sphere, pull .3")
LARGE = (*RIVALS, "Muon", *FORMS, INITIAL)
MEASURES = ("train", "test", "right")

# ---- networks ----------------------------------------------------------------------------------

Make = Callable[[Path], Network]


def on(make: Callable[..., Network], name: str, count: int, *args: Any, **options: Any) -> Make:
    """A network on ``count`` images: digits 8 x 8, MNIST 14 x 14, CIFAR-10 8 x 8."""
    pool = {"digits": 1, "mnist": 2, "cifar10": 4}[name]
    return lambda folder: make(pixels(name, folder, count, pool), *args, **options)


def reading(make: Callable[..., Network], column: int, *args: Any, **options: Any) -> Make:
    """A network on English or Spanish sentences."""
    return lambda folder: make(sentences(folder, column), *args, **options)


VIT = (2, 24, 4, 32, (16, 4))  # layers, width, heads, batch; tokens and their numbers
CHARACTERS = (4, 32, 4, 8, (24, 0))
NETWORKS: dict[str, Make] = {
    "perceptron, digits": on(Perceptron, "digits", 1400, 250, 3, 48, 64),
    "perceptron, MNIST": on(Perceptron, "mnist", 4000, 250, 2, 48, 196),
    "perceptron, overfitting": on(Perceptron, "mnist", 1000, 600, 3, 48, 196),
    "8 tanh layers": on(Perceptron, "digits", 1400, 250, 8, 24, 64, torch.tanh),
    "20 tanh layers": on(Perceptron, "mnist", 4000, 250, 20, 32, 196, torch.tanh),
    "residual, no norm": on(Residual, "mnist", 4000, 250, 16, 32, 196),
    "residual, pre-norm": on(Residual, "mnist", 4000, 250, 8, 32, 196, norm="pre"),
    "residual, post-norm": on(Residual, "mnist", 4000, 250, 8, 32, 196, norm="post"),
    "autoencoder": on(Autoencoder, "mnist", 4000, 500),
    "CNN": on(Convolutions, "mnist", 4000, 200, 1, 14),
    "CNN of shifts": on(Shifts, "mnist", 4000, 200, 3, 14),
    "tanh RNN, rows": on(Recurrent, "mnist", 4000, 250, "tanh", 40, 14),
    "tanh RNN, copying": lambda _: Recurrent(Letters(), 400, "tanh", 40, 10, size=20),
    "GRU, rows": on(Recurrent, "mnist", 4000, 250, "GRU", 32, 14),
    "LSTM, characters": reading(Recurrent, 0, 250, "LSTM", 40, 24, size=12),
    "ViT, all matrices": on(Transformer, "digits", 1400, 250, *VIT),
    "ViT, queries and keys": on(Transformer, "digits", 1400, 250, *VIT, taken="queries and keys"),
    "character transformer": reading(Transformer, 0, 250, *CHARACTERS),
    "character transformer, queries and keys": reading(
        Transformer, 0, 250, *CHARACTERS, taken="queries and keys"
    ),
}
# The form is not chosen on these.
ASIDE: dict[str, Make] = {
    "perceptron, CIFAR-10": on(Perceptron, "cifar10", 4000, 250, 3, 48, 192),
    "20 tanh layers, CIFAR-10": on(Perceptron, "cifar10", 4000, 250, 20, 32, 192, torch.tanh),
    "residual, no norm, CIFAR-10": on(Residual, "cifar10", 4000, 250, 16, 32, 192),
    "CNN, CIFAR-10": on(Convolutions, "cifar10", 4000, 200, 3, 8),
    "ViT, CIFAR-10": on(Transformer, "cifar10", 4000, 250, 2, 24, 4, 32, (24, 8)),
    "LSTM, Spanish": reading(Recurrent, 1, 250, "LSTM", 40, 24, size=12),
    "character transformer, Spanish": reading(Transformer, 1, 250, *CHARACTERS),
}
WIDE = {  # of the width of the issue of language models, in few arms
    "character transformer, width 128": reading(Transformer, 0, 150, 4, 128, 4, 8, (24, 0)),
}
TRANSFER = {
    **{f"depth {depth}": on(Perceptron, "mnist", 4000, 150, depth, 32, 196, torch.tanh)
       for depth in (2, 4, 8, 16)},
    **{f"width {width}": on(Perceptron, "mnist", 4000, 60, 3, width, 196, torch.tanh)
       for width in (64, 128, 256, 512, 1024)},
}  # fmt: skip
EVERY = NETWORKS | WIDE | ASIDE | TRANSFER
SHOWN = (*RIVALS, "learn_scale=True")  # the picture of the README: what choosing.md recommends
FIGURE = ("CNN", "tanh RNN, rows", "ViT, all matrices")  # and where
# Those with residual branches.
BRANCHED = tuple(name for name in NETWORKS if name.startswith(("residual", "ViT", "character")))
# Where the constraint loses at its best learning rate, and what is tried there at larger ones.
LOSING = ("residual, no norm", "residual, pre-norm", "residual, post-norm", "GRU, rows")
REMEDIES = (*WAYS, "learned from initial, pull .3", "learned from initial, floor")
# A minute and more for a job of stage 2.
COSTLY = tuple(name for name in NETWORKS if name.startswith(("CNN", "ViT", "character")))
QUICK = ("perceptron, digits", "ViT, all matrices", "tanh RNN, copying")

# ---- training ----------------------------------------------------------------------------------


class Job(NamedTuple):
    """Arms of a network that are trained as one batch."""

    part: str  # "stage 1", ...
    network: str
    arms: tuple[str, ...]
    rates: tuple[float, ...] = RATES
    seeds: tuple[int, ...] = SEEDS
    length: float = 1.0  # times the steps of the network
    schedule: str = "falling"

    @property
    def name(self) -> str:
        first = self.arms[0]
        rate = f"{self.rates[0]:g} to {self.rates[-1]:g}"
        words = f"{self.part} {self.network} {first} {rate} {self.length:g} {self.schedule}"
        if self.part == "stage 2":  # in parts
            words += f" seeds {self.seeds[0]} to {self.seeds[-1]}"
        return words.replace(",", "").replace(" ", "_")


def in_order(names: Iterable[str]) -> list[str]:
    """Arms such that those of one kind, and those with NAdam for plain weights, stand together."""
    return sorted(names, key=lambda name: batch_of(ARMS[name]))


class Trained:
    """All copies of a network and their optimizers."""

    def __init__(self, network: Network, arms: Sequence[Arm], rates: Tensor, seeds: Sequence[int]):
        self.network, self.seeds = network, tuple(dict.fromkeys(seeds))
        self.where = torch.tensor([self.seeds.index(seed) for seed in seeds])
        self.rates, copies = rates, len(seeds)
        starts = [network.initial(torch.Generator().manual_seed(seed)) for seed in self.seeds]
        matrices, plain = (
            {name: torch.stack([start[part][name] for start in starts])[self.where]
             for name in starts[0][part]}
            for part in (0, 1)
        )  # fmt: skip
        of_arm = copies // len(arms)

        def spans(key: Callable[[Arm], Any]) -> list[tuple[list[Arm], slice]]:
            """Arms that share a key, which stand together, and where their copies are."""
            found, end = [], 0
            for _, group in groupby(arms, key):
                same, begin = list(group), end
                end = begin + of_arm * len(same)
                found.append((same, slice(begin, end)))
            return found

        of_weights, of_plain = spans(batch_of), spans(attrgetter("nesterov"))
        self.weights, self.halves = ([span for _, span in of] for of in (of_weights, of_plain))
        self.matrices = {
            name: [
                begun(value[span], same, network.heads.get(name, 1)) for same, span in of_weights
            ]
            for name, value in matrices.items()
        }
        self.plain = {
            name: [plain_weights(value[span], same) for same, span in of_plain]
            for name, value in plain.items()
        }
        self.lost = torch.zeros(copies, dtype=torch.bool)

    def values(self) -> tuple[Tensors, Tensors]:
        matrices, plain = (
            {name: torch.cat([one.value() for one in parts]) for name, parts in kept.items()}
            for kept in (self.matrices, self.plain)
        )
        return matrices, plain

    def gathered(self, batches: Sequence[Examples]) -> Examples:
        inputs, wanted = (torch.stack(same)[self.where] for same in zip(*batches, strict=True))
        return inputs, wanted

    def step(self, step: int, factor: float) -> None:
        """Take a step; a copy whose loss or gradient is not finite stands still from then on."""
        matrices, plain = self.values()
        leaves = [*matrices.values(), *plain.values()]
        for leaf in leaves:
            leaf.requires_grad_()
        data, size = self.network.data, self.network.size
        inputs, wanted = self.gathered([data.batch(seed, step, size) for seed in self.seeds])
        losses = self.network.losses(self.network.outputs(matrices, plain, inputs), wanted)
        grads = torch.autograd.grad(losses.sum(), leaves)
        with torch.no_grad():
            sums = torch.stack([losses, *(grad.flatten(1).sum(1) for grad in grads)])
            self.lost |= ~sums.isfinite().all(0)
            if self.lost.any():
                grads = tuple(
                    torch.where(self.lost.view(-1, *[1] * (grad.dim() - 1)), 0.0, grad)
                    for grad in grads
                )
            rates = factor * self.rates
            parts = [(self.weights, kept) for kept in self.matrices.values()]
            parts += [(self.halves, kept) for kept in self.plain.values()]
            for grad, (spans, kept) in zip(grads, parts, strict=True):
                lr = rates.view(-1, *[1] * (grad.dim() - 1))
                for span, one in zip(spans, kept, strict=True):
                    one.step(grad[span], lr[span])

    @torch.no_grad()
    def measured(self) -> dict[str, Tensor]:
        """Losses and right answers of each copy, and the mean scale of its matrices."""
        found: dict[str, Tensor] = {}
        values, network = self.values(), self.network
        for name, test in (("train", False), ("test", True)):
            inputs, wanted = network.data.examples(test=test)
            loss = right = torch.zeros(len(self.where))
            for some, answers in zip(inputs.split(100), wanted.split(100), strict=True):
                every = (part.expand(len(self.where), *part.shape) for part in (some, answers))
                x, y = every
                outputs, share = network.outputs(*values, x), len(some) / len(inputs)
                loss = loss + share * network.losses(outputs, y)
                right = right + share * network.right(outputs, y)
            bad = self.lost | ~loss.isfinite()
            found[name] = torch.where(bad, network.guess, loss)
            found["right"] = torch.where(bad, 100 / network.data.classes, right)
        scales = [torch.cat([one.scale() for one in parts]) for parts in self.matrices.values()]
        found["scale"] = torch.cat([s.reshape(len(self.where), -1) for s in scales], 1).mean(1)
        return found

    def error(self) -> float:
        """The largest orthonormality error."""
        return max(small_arms.error(one) for parts in self.matrices.values() for one in parts)


def factor_of(schedule: str, step: int, steps: int) -> float:
    return 1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps))


def train(network: Network, job: Job) -> list[dict[str, Any]]:
    """A row for each copy."""
    names = in_order(job.arms)
    cells = [(name, rate, seed) for name in names for rate in job.rates for seed in job.seeds]
    rates = torch.tensor([rate for _, rate, _ in cells])
    steps = max(1, round(network.steps * job.length))
    arms = [ARMS[name] for name in names]
    trained = Trained(network, arms, rates, [seed for *_, seed in cells])
    for step in range(steps):
        trained.step(step, factor_of(job.schedule, step, steps))
    found, error = trained.measured(), trained.error()
    return [
        {"arm": arm, "rate": rate, "seed": seed, "error": error,
         **{key: float(f"{float(values[place]):.4g}") for key, values in found.items()}}
        for place, (arm, rate, seed) in enumerate(cells)
    ]  # fmt: skip


# ---- jobs --------------------------------------------------------------------------------------


def stage_one() -> list[Job]:
    """The deciding arms, on what was put aside last; larger learning rates; the other arms."""
    jobs = [Job("stage 1", name, tuple(DECIDING)) for name in (*NETWORKS, *ASIDE)]
    for arms in (LARGE, CONTROLS):
        jobs += [Job("stage 1", name, arms, LARGE_RATES) for name in NETWORKS]
    jobs += [Job("wide", name, LARGE, seeds=SEEDS[:1]) for name in WIDE]
    jobs += [Job("stage 1", name, (INITIAL,)) for name in (*NETWORKS, *ASIDE)]
    groups: list[Iterable[str]] = [SHIPPED, WAYS, BRANCHES, FORMS_OF_SCALE, DECAYS]
    for others in groups:
        names = BRANCHED if others is BRANCHES else NETWORKS
        jobs += [Job("stage 1", name, tuple(others)) for name in names]
    jobs += [Job("stage 1", name, REMEDIES, LARGE_RATES) for name in LOSING]
    return jobs


def long_jobs() -> list[Job]:
    """Few arms for three times the steps, on other seeds."""
    names = (*NETWORKS, *ASIDE)
    return [Job("long", name, LARGE, RATES, MORE_SEEDS[:2], LONGER) for name in names]


def stage_two() -> list[Job]:
    """Two seeds everywhere, the other three; cheap networks first."""
    cheap = [name for name in NETWORKS if name not in COSTLY]
    first, others = MORE_SEEDS[:2], MORE_SEEDS[2:]
    rounds = [
        (cheap, first, 1, "falling"), (COSTLY, first, 1, "falling"),
        (cheap, first, 1, "constant"), (cheap, others, 1, "falling"),
        (COSTLY, first, 1, "constant"), (COSTLY, others, 1, "falling"),
        (cheap, others, 1, "constant"), (cheap, MORE_SEEDS, LONGER, "falling"),
        (cheap, MORE_SEEDS, LONGER, "constant"), (COSTLY, others, 1, "constant"),
        (COSTLY, MORE_SEEDS, LONGER, "falling"), (COSTLY, MORE_SEEDS, LONGER, "constant"),
    ]  # fmt: skip
    return [
        Job("stage 2", name, BEST, MORE_RATES, seeds, length, schedule)
        for names, seeds, length, schedule in rounds
        for name in names
    ]


def figure_jobs() -> list[Job]:
    """Test error over learning rates, for the README."""
    seeds = MORE_SEEDS[:3]
    return [Job("figure", name, SHOWN, WIDE_RATES, seeds) for name in FIGURE]


def transfer_jobs() -> list[Job]:
    """Perceptrons of several widths, and depths: which learning rate is best?"""
    arms = ("AdamW", INITIAL, "Muon", *FORMS[:2])
    wide = ("width 512", "width 1024")
    jobs = [(name, arms) for name in TRANSFER if name not in wide]
    jobs += [(name, (arm,)) for name in wide for arm in arms]
    return [Job("transfer", name, some, WIDE_RATES, SEEDS[:1]) for name, some in jobs]


def run(jobs: Sequence[Job], folder: Path, cache: Path) -> None:
    """Run what is not in the cache; a file a job."""
    cache.mkdir(parents=True, exist_ok=True)
    for place, job in enumerate(jobs):
        path = cache / f"{job.name}.jsonl"
        if path.exists():
            continue
        started = time.process_time()
        rows = train(EVERY[job.network](folder), job)
        seconds = time.process_time() - started
        head = job._asdict() | {"seconds": round(seconds, 1), "machine": machine()}
        write_text(path, "\n".join(map(json.dumps, [head, *rows])) + "\n")
        print(f"{place + 1}/{len(jobs)} {job.name}: {seconds:.0f} s", flush=True)


# ---- the step beside the package's -------------------------------------------------------------


def check(steps: int = 40) -> float:
    """Train a perceptron by the batch and by so.StiefelAdamW; return the largest difference."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 24, generator=generator)
    labels = torch.randint(5, (200,), generator=generator)
    data, rate = Pixels((inputs, labels), (inputs, labels)), 1e-2
    data.classes = 5
    network = Perceptron(data, steps, 2, 12, 24, torch.tanh)
    batch = Trained(network, [ARMS["learn_scale=True"]], torch.tensor([rate]), [3])
    matrices, plain = ({k: v[0].clone() for k, v in part.items()} for part in batch.values())
    model = nn.Sequential(
        nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)
    )
    state = {
        "0.weight": matrices["first"][0], "0.bias": plain["bias"][0],
        "2.weight": matrices["hidden"][0], "2.bias": plain["bias"][1],
        "4.weight": plain["head"], "4.bias": plain["head bias"],
    }  # fmt: skip
    model.load_state_dict(state)
    so.constrain(model, ["0.weight", "2.weight"], learn_scale=True)
    optimizer = so.StiefelAdamW(model.parameters(), lr=rate)
    for step in range(steps):
        batch.step(step, 1.0)
        x, y = data.batch(3, step, network.size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    matrices, _ = batch.values()
    pairs = (("first", "0.weight"), ("hidden", "2.weight"))
    return max(
        float((matrices[ours][0, 0] - model.get_parameter(theirs).detach()).abs().max())
        for ours, theirs in pairs
    )


# ---- what comes out ----------------------------------------------------------------------------

# By measure, for each learning rate the values of all seeds; "rates" are the learning rates.
Values = dict[str, Any]
Runs = dict[str, dict[str, Values]]  # by network and arm


def merged(cache: Path) -> dict[Path, dict[str, Any]]:
    """What the cache holds, by file: the runs of each part, and what they cost."""
    parts: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, str, str, float, int], Any] = {}
    machines, seconds, worst = [], Counter[str](), 0.0
    for path in sorted(cache.glob("*.jsonl")):
        head, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        part, network = head["part"], head["network"]
        if part == "stage 2":
            part += f", {LENGTHS[head['length']]}, {head['schedule']}"
        kept = parts.setdefault(part, {"rates": set(), "seeds": set(), "runs": {}})
        kept["rates"] |= {*head["rates"]}
        kept["seeds"] |= {*head["seeds"]}
        kept["runs"].setdefault(network, {}).update(dict.fromkeys(head["arms"]))
        found |= {(part, network, row["arm"], row["rate"], row["seed"]): row for row in rows}
        machines.append(head["machine"])
        seconds[part] += head["seconds"]
        worst = max(worst, *(row["error"] for row in rows))
    files: dict[Path, dict[str, Any]] = {}
    for part, kept in parts.items():
        kept["core seconds"] = round(seconds[part])
        kept["rates"], kept["seeds"] = sorted(kept["rates"]), sorted(kept["seeds"])
        for network, arms in kept["runs"].items():
            for arm in arms:
                copies = [found[key] for seed, rate in product(kept["seeds"], kept["rates"])
                          if (key := (part, network, arm, rate, seed)) in found]  # fmt: skip
                rows = ([f"{row[name]:.3g}".removeprefix("0") for row in copies]
                        for name in MEASURES)  # fmt: skip
                arms[arm] = " ".join([str(len({row["seed"] for row in copies})), *chain(*rows)])
        file = RUNS.with_stem(f"{FILE.stem}_{part.replace(', ', '_').replace(' ', '_')}")
        files.setdefault(file if part.startswith("stage 2") else RUNS, {})[part] = kept
    common = {
        "machine": max(machines, key=lambda one: one["date"]),
        "largest orthonormality error": worst,
        "measures": MEASURES,
    }
    return {file: {**common, "parts": some} for file, some in files.items()}


def unpacked(kept: Mapping[str, Any]) -> Runs:
    """The runs of a part; in the file an arm is one line: number of seeds, then by measure.

    A measure has the learning rates of the first seed, of the second, and so on. An arm that was
    not run with all seeds or learning rates of the part was run with the first of them.
    """

    def values(line: str) -> Values:
        first, *rest = line.split()
        count, row = int(first), [*map(float, rest)]
        each = len(row) // len(MEASURES)
        rates = kept["rates"][: each // count]
        return {"rates": rates} | {
            name: [row[place * each : (place + 1) * each][start :: len(rates)]
                   for start in range(len(rates))]
            for place, name in enumerate(MEASURES)
        }  # fmt: skip

    return {
        network: {arm: values(row) for arm, row in arms.items()}
        for network, arms in kept["runs"].items()
    }


def mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def by_rate(values: Values, measure: str) -> dict[float, float]:
    """The geometric mean over the seeds at each learning rate, of shares the arithmetic one."""
    pairs = zip(values["rates"], values[measure], strict=True)
    if measure == "right":
        return {rate: statistics.fmean(seeds) for rate, seeds in pairs}
    return {rate: mean(max(value, LEAST) for value in seeds) for rate, seeds in pairs}


def best(values: Values, measure: str = "test") -> float:
    """At the learning rate that is best for this measure."""
    return (max if measure == "right" else min)(by_rate(values, measure).values())


def ratios(arms: Mapping[str, Values], arm: str, measure: str = "test") -> tuple[float, float]:
    """Of an arm to the better of AdamW and NAdam, at equal and at best learning rates.

    The best are searched among those that all of them have.
    """
    ours, *rivals = (by_rate(arms[name], measure) for name in (arm, *RIVALS))
    pairs = {
        rate: (ours[rate], min(rival[rate] for rival in rivals))
        for rate in ours
        if all(rate in rival for rival in rivals)
    }
    equal = mean(a / b for rate, (a, b) in pairs.items() if rate in RATES)
    least, theirs = map(min, zip(*pairs.values(), strict=True))
    return equal, least / theirs


ANSWERS = ("constrain", "orthogonal initialisation is enough", "no difference", "do not")


def best_form(*runs: Mapping[str, Values]) -> str:
    """The constrained arm with the least product of the ratios of the test loss in all runs."""
    return min(FORMS, key=lambda name: math.prod(math.prod(ratios(arms, name)) for arms in runs))


def advice(*runs: Mapping[str, Values]) -> tuple[str, str]:
    """What to do, as the docstring of the program says, and the best constrained arm.

    Of several runs, short and long, the most cautious answer; of Muon their mean.
    """
    form = best_form(*runs)
    says, leads = [], []
    for arms in runs:
        both = ratios(arms, form)
        say = "no difference" if max(both) <= 1.05 else "do not"
        if max(both) <= 1.0 and min(both) <= 0.97:
            begun = ratios(arms, INITIAL) if INITIAL in arms else (math.inf, math.inf)
            is_ahead = min(ours / theirs for ours, theirs in zip(both, begun, strict=True)) <= 0.97
            say = ANSWERS[0] if is_ahead else ANSWERS[1]
        says.append(say)
        others = min(best(arms[name]) for name in (*RIVALS, INITIAL, *FORMS) if name in arms)
        leads.append(best(arms["Muon"]) / others)
    return max(says, key=ANSWERS.index) + "; Muon is best" * (mean(leads) <= 0.97), form


def ratio(both: tuple[float, float]) -> str:
    return " / ".join(f"{number:.2f}" for number in both)


def table_of_networks(runs: Runs) -> str:
    """A row a network: advice, losses at best learning rates, ratios at equal and at best ones."""
    header = [
        *("network", "constrain?", "as", "test loss", "AdamW or NAdam", "orthogonal start"),
        *("Muon", "% right", "AdamW or NAdam", "test loss, ratio", "training loss, ratio"),
    ]
    rows = []
    for name, arms in runs.items():
        say, form = advice(arms)
        rival = min(best(arms[one]) for one in RIVALS)
        begun = [best(arms[INITIAL])] if INITIAL in arms else [math.nan]
        losses = [best(arms[form]), rival, *begun, best(arms["Muon"])]
        rights = [best(arms[form], "right"), max(best(arms[one], "right") for one in RIVALS)]
        both = (ratio(ratios(arms, form, measure)) for measure in ("test", "train"))
        cells = [*(f"{loss:.3f}" for loss in losses), *(f"{share:.1f}" for share in rights)]
        rows.append([name, say, form, *cells, *both])
    return markdown_table(header, rows).replace("nan", "  -")


SOURCES = {  # of the ratios in the table of advice: the first that was run; all of them advise
    "ratio": ("stage 2, short, falling", "stage 1", "wide"),
    "constant": ("stage 2, short, constant",),
    "three times the steps": ("stage 2, long, falling", "long"),
    "constant, three times": ("stage 2, long, constant",),
}


def table_of_advice(parts: Mapping[str, Runs]) -> str:
    """A row a network: advice from all runs, losses and ratios; stage 2 has seeds of its own."""

    def found(part: str, name: str) -> list[Mapping[str, Values]]:
        arms = parts.get(part, {}).get(name, {})
        return [arms] if {*LARGE} <= {*arms} else []

    columns = [
        column
        for column, some in SOURCES.items()
        if any(found(part, name) for part in some for name in NETWORKS)
    ]
    header = [
        *("network", "constrain?", "as", "test loss", "AdamW or NAdam", "orthogonal start", "Muon"),
        *("seeds", *columns),
    ]
    rows = []
    for name in (*NETWORKS, *WIDE):
        every = {
            part: arms for some in SOURCES.values() for part in some for arms in found(part, name)
        }
        if not every:
            continue
        say, form = advice(*every.values())
        shown = [[every[part] for part in SOURCES[column] if part in every] for column in columns]
        arms = shown[0][0]
        rival = min(best(arms[one]) for one in RIVALS)
        losses = [best(arms[form]), rival, best(arms[INITIAL]), best(arms["Muon"])]
        both = [ratio(ratios(one[0], form)) if one else "not run" for one in shown]
        seeds = str(len(arms[form]["test"][0]))
        rows.append([name, say, form, *(f"{loss:.3f}" for loss in losses), seeds, *both])
    return markdown_table(header, rows)


def table_of_rates(runs: Runs) -> str:
    """The best learning rate and the test loss there, by width and depth.

    "one for all": the learning rate whose loss is least above the best of each, and by what factor.
    """
    arms = next(iter(runs.values()))
    losses = {
        arm: {name: by_rate(kept[arm], "test") for name, kept in runs.items() if arm in kept}
        for arm in arms
    }
    rows = []
    for name in runs:
        found = (min((loss, rate) for rate, loss in losses[arm][name].items())
                 if name in losses[arm] else None for arm in arms)  # fmt: skip
        rows.append([name, *(f"{one[1]:g}: {one[0]:.3f}" if one else "not run" for one in found)])
    whole = [name for name, kept in runs.items() if {*arms} <= {*kept}]
    for kind in ("depth", "width"):
        row = [f"{kind}, one for all"]
        for arm in arms:
            each = [losses[arm][name] for name in whole if name.startswith(kind)]
            worst = [(max(kept[rate] / min(kept.values()) for kept in each), rate)
                     for rate in (each[0] if each else ())]  # fmt: skip
            row.append("{1:g}: x {0:.2f}".format(*min(worst)) if worst else "not run")
        rows.append(row)
    return markdown_table(["network", *arms], rows)


def means_of(runs: Runs, arm: str, measure: str, names: Iterable[str]) -> tuple[float, float]:
    """Geometric means over networks of both ratios."""
    both = [ratios(runs[name], arm, measure) for name in names]
    equal, at_best = (mean(values) for values in zip(*both, strict=True))
    return equal, at_best


def table_of_arms(runs: Runs, advised: Sequence[str]) -> str:
    """A row an arm: geometric means over all networks, and over those that are to be constrained.

    Arms that not every network has are compared on those that have them.
    """
    header = ["arm", "networks", "test loss", "training loss",
              "there: test loss", "there: training loss"]  # fmt: skip
    rows = []
    for arm in ARMS:
        names = [name for name, arms in runs.items() if arm in arms]
        if not names:
            continue
        cells = [ratio(means_of(runs, arm, measure, names)) for measure in ("test", "train")]
        some = [name for name in names if name in advised]
        cells += [
            ratio(means_of(runs, arm, measure, some)) if some else "-"
            for measure in ("test", "train")
        ]
        rows.append([arm, str(len(names)), *cells])
    return markdown_table(header, rows)


def table_by_network(runs: Runs, measure: str = "test") -> str:
    """Both ratios of every arm on every network."""
    shown = [arm for arm in ARMS if any(arm in arms for arms in runs.values())]
    rows = [
        [name, *(ratio(ratios(arms, arm, measure)) if arm in arms else "-"
                 for arm in shown)]
        for name, arms in runs.items()
    ]  # fmt: skip
    return markdown_table(["network", *shown], rows)


def summary(parts: Mapping[str, Runs]) -> dict[str, Any]:
    """Tables, and the numbers that were asked for."""
    tables, bars = {}, {}
    for part, every in parts.items():
        if part == "transfer":
            tables[part] = table_of_rates({name: every[name] for name in TRANSFER if name in every})
        if part in ("transfer", "figure"):
            continue
        runs = {name: every[name] for name in EVERY if name in every}
        runs = {name: arms for name, arms in runs.items() if {*RIVALS, "Muon", *FORMS} <= {*arms}}
        for end, group in (("", NETWORKS), (", put aside", ASIDE), (", wide", WIDE)):
            title, some = (
                part if part == "wide" else part + end,
                {name: runs[name] for name in runs if name in group},
            )
            if not some:
                continue
            said = {name: advice(arms) for name, arms in some.items()}
            advised = [name for name, (say, _) in said.items() if say.startswith("constrain")]
            tables[title] = table_of_networks(some)
            tables[f"{title}: arms"] = table_of_arms(some, advised)
            if len(some) > 1 and not part.startswith("long"):
                tables[f"{title}: ratios"] = table_by_network(some)
            chosen = [ratios(some[n], said[n][1]) for n in advised]
            bars[title] = {
                "networks": len(some),
                "to be constrained": len(advised),
                "there": [mean(v) for v in zip(*chosen, strict=True)] if chosen else None,
                **{name: means_of(some, name, "test", some) for name in FORMS},
                "training loss": means_of(some, "learned, pull .3", "train", some),
            }
    tables["advice"] = table_of_advice(parts)
    return {"bars": bars, "tables": tables}


# ---- program -----------------------------------------------------------------------------------


def stored_summary() -> dict[str, Any]:
    """The summary of the runs on file."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in files_of_runs()]
    parts = {part: kept for file in files for part, kept in file["parts"].items()}
    return {
        "machine": max((file["machine"] for file in files), key=lambda one: one["date"]),
        "core seconds": {part: kept["core seconds"] for part, kept in parts.items()},
        "largest orthonormality error": files[0]["largest orthonormality error"],
        **summary({part: unpacked(kept) for part, kept in parts.items()}),
    }


def files_of_runs() -> list[Path]:
    """Stage 2 has a file for each length and schedule, all else is in one."""
    return [RUNS, *sorted(RUNS.parent.glob(f"{FILE.stem}_stage_2_*.json"))]


def quick(folder: Path) -> dict[str, Any]:
    """Every arm for a few steps on three networks that need no download, with all tables."""
    kept: Runs = {}
    for name in QUICK:
        network = NETWORKS[name](folder)
        network.steps = 3
        job = Job("stage 1", name, tuple(ARMS), RATES[1:], SEEDS[:1])
        found = {(row["arm"], row["rate"]): row for row in train(network, job)}
        kept[name] = {
            arm: {"rates": job.rates}
            | {key: [[found[arm, rate][key]] for rate in job.rates] for key in MEASURES}
            for arm in job.arms
        }
    return summary({"stage 1": kept, "long": kept})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data-dir", type=Path, default=Path(), help="of MNIST, CIFAR-10 and the sentences")
    add("--cache", type=Path, default=Path("runs/when_to_constrain"), help="a file a job")
    add("--stage", type=int, choices=(1, 2), help="run its jobs")
    add("--long", action="store_true", help="run few arms for longer")
    add("--figure", action="store_true", help="run the jobs of the figure")
    add("--transfer", action="store_true", help="run widths and depths")
    add("--only", default="", help="jobs whose name contains this")
    add("--merge", action="store_true", help="write the file of results from the cache")
    add("--tables", action="store_true", help="make its tables again")
    add("--check", action="store_true", help="the batch beside so.StiefelAdamW")
    add("--quick", action="store_true", help="seconds: every arm, a few steps")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    folder = options.data_dir
    if options.check:
        print(f"largest difference of a weight: {check():.1e}")
    if options.quick:
        print(*quick(folder)["tables"].values(), sep="\n\n")
    jobs = stage_one() if options.stage == 1 else []
    jobs += stage_two() if options.stage == 2 else []
    jobs += long_jobs() if options.long else []
    jobs += figure_jobs() if options.figure else []
    jobs += transfer_jobs() if options.transfer else []
    run([job for job in jobs if options.only in job.name], folder, options.cache)
    if options.merge or options.tables:
        if options.merge:
            for file, runs in merged(options.cache).items():
                write_json(file, runs)
        results = stored_summary()
        write_json(FILE, results)
        print(*results["tables"].values(), sep="\n\n")


if __name__ == "__main__":
    main()
