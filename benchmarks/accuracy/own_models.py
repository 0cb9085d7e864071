"""A GRU and a convolution network, constrained and unconstrained.

    python -m benchmarks.accuracy.own_models --folder DIR  # resumes; writes what is there
    python -m benchmarks.accuracy.own_models  # the tables again, when another file has changed

Each classifies the 8 x 8 digits of scikit-learn, pixel by pixel or as an image. Per model: weights
from torch's initialisation, the same weights from an orthogonal initialisation, and the same
weights constrained, with one change each that says what the constraint costs. Four learning
rates, which fall to zero along a cosine; Adam, or, where weights are constrained, StiefelAdam with
its defaults, Nesterov's momentum and the virtual radius. Gradients are clipped at norm 1. Seeds are
paired: equal data in equal order. Three choose the learning rate, others are reported, both by the
same 360 test images.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so
from benchmarks.accuracy import why_tables
from benchmarks.accuracy.why import accuracy, images
from benchmarks.common import harness, publish

LEARNING_RATES = (3e-3, 1e-2, 3e-2, 1e-1)
LAYER = "so.constrain, StiefelAdamW"
FILE = harness.RESULTS / "own_models.json"
CHOOSING = (0, 1, 2)
ROOT_OF_TWO = 2**0.5  # what ReLU takes of the length of a random vector


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.gru(pixels[..., None])[0][:, -1])


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        channels, layers = (1, 32, 64, 64), []
        for stride, (before, after) in zip((1, 2, 2), itertools.pairwise(channels), strict=True):
            layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.ReLU()]
        super().__init__(nn.Unflatten(1, (1, 8, 8)), *layers, nn.Flatten(), nn.Linear(256, 10))


def gates(model: nn.Module, **reading: object) -> None:
    so.constrain(model, "gru.weight_hh_l*", **reading)


def kernels(model: nn.Module, **reading: object) -> None:
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            so.constrain(layer, **reading)


def candidate(model: nn.Module) -> None:
    gates(model, rows=(128, 192))


def longer_kernels(model: nn.Module) -> None:
    kernels(model, scale=ROOT_OF_TWO)


Change = Callable[[nn.Module], object]
# Model: its class, epochs, how it is constrained, and one change with its name.
MODELS: dict[str, tuple[type[nn.Module], int, Change, str, Change | None]] = {
    "GRU": (Recurrent, 12, gates, "candidate gate only", candidate),
    "CNN": (Convolutions, 6, kernels, "scale of sqrt(2)", longer_kernels),
}
METHODS = ("unconstrained", "unconstrained, orthogonal initialisation", "constrained")


def build(name: str, method: str) -> nn.Module:
    kind, _, constrain, changed, change = MODELS[name]
    model = kind()
    if method == changed and change is not None:
        change(model)
    elif method != "unconstrained":
        constrain(model)
    if method.startswith("unconstrained"):
        plain = kind()
        plain.load_state_dict(model.state_dict())
        return plain
    return model


def train(name: str, method: str, rate: float, seed: int) -> float:
    """Share of 360 test images that are recognised after the last epoch."""
    torch.manual_seed(seed)
    model = build(name, method)
    inputs, labels, test, answers = images()
    kind = torch.optim.Adam if method.startswith("unconstrained") else so.StiefelAdam
    optimizer = kind(model.parameters(), lr=rate)
    epochs, batch = MODELS[name][1], 100
    steps = epochs * -(-len(labels) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=order).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return accuracy(model.eval(), test, answers)


def tables(runs: dict[str, float], seeds: int) -> dict[str, str]:
    """Accuracy at the chosen learning rate, mean and range of seeds 3 on, and at every one."""
    best, by_rate, every = [], [], range(len(CHOOSING) + seeds)
    for name, (*_, changed, change) in MODELS.items():
        for method in (*METHODS, *([changed] if change else [])):
            right = {
                rate: [100 * runs[f"{name}, {method}, {rate:g}, {seed}"] for seed in every]
                for rate in LEARNING_RATES
            }
            rate = max(right, key=lambda rate: statistics.mean(right[rate][: len(CHOOSING)]))
            shown = {rate: values[len(CHOOSING) :] for rate, values in right.items()}
            means = {rate: statistics.mean(values) for rate, values in shown.items()}
            cell = f"{means[rate]:.1f} ({min(shown[rate]):.1f} to {max(shown[rate]):.1f})"
            best.append([name, method, f"{rate:g}", cell])
            by_rate.append([name, method, *(f"{mean:.1f}" for mean in means.values())])
    header = ["model", "weights", "learning rate", "% right (seeds)"]
    rates = ["model", "weights", *(f"{rate:g}" for rate in LEARNING_RATES)]
    return {
        "best": harness.markdown_table(header, best),
        "rates": harness.markdown_table(rates, by_rate),
    }


def cell(source: str, table: str, column: str, *row: str) -> str:
    """What a table of a results file holds in the row that begins with ``row``."""
    header, *rows = publish.stored_table(f"benchmarks/results/{source}.json", table)
    return publish.row_like(list(row), rows)[header.index(column)]


def share(shown: str) -> str:
    """The mean of "92.8 (86.3 to 95.8)"."""
    return shown.split(" ")[0]


def right(source: str, table: str, column: str, *methods: str) -> list[str]:
    """What a table of errors in per cent leaves for each method, with the digits of its cell."""
    errors = (cell(source, table, column, method) for method in methods)
    return [f"{100 - float(error):.{len(error.partition('.')[2])}f}" for error in errors]


# Should I constrain it? What you have, the answer, and what says so, with numbers of `measured`.
ADVICE = (
    ("principal components, alignment, transport", "yes: the problem asks for it",
     "[small problems](measured.md#packages-side-by-side)"),
    ("torch's orthogonal parametrization", "yes: replace it",
     "2048 x 16: [{layer[0]} ms a step, not {layer[1]} ms](doors.md#beside-torch)"),
    ("a plain recurrent network, memory over 100 steps", "yes, with modReLU",
     "{early[0]} % right, unconstrained {early[2]} %: [digits recalled](why.md#memory)"),
    ("the same, over 300 steps",
     'yes, by `so.orthogonal(map="cwy")`; no method has learned the task',
     "{late[1]} % right, tagged {late[0]} %, unconstrained {late[2]} %: "
     "[digits recalled](why.md#memory)"),
    ("a deep network without normalisation", "if you cannot tune the learning rate",
     "80 % right at {rates[0]} of 9 learning rates, unconstrained at {rates[1]}: "
     "[50 layers](why.md#depth)"),
    ("a deep network, tuned", "no",
     "{deep[0]} % right, unconstrained {deep[1]} %: [50 layers](why.md#depth)"),
    ("a GRU or an LSTM", "no: gates must saturate",
     "{gru[0]} % right, unconstrained {gru[1]} %: "
     "[GRU, digits by pixel](measured.md#a-gru-and-a-cnn)"),
    ("a convolution network",
     "no gain; if it must be Lipschitz, [with a certified bound](certified.md)",
     "{cnn[0]} % right, unconstrained {cnn[1]} %: [digits](measured.md#a-gru-and-a-cnn)"),
    ("attention, little data", "if you cannot tune the learning rate",
     "at a learning rate of 0.1 {fast[0]} % right, unconstrained {fast[1]} %: "
     "[attention](why.md#attention)"),
    ("the same, tuned", "no significant gain",
     "{vit[0]} % right, unconstrained {vit[1]} %: "
     "[1,200 digits](measured.md#a-vision-transformer-of-few-digits)"),
    ("attention, longer training", "no significant gain",
     "{longer[0]} % right, unconstrained {longer[1]} %: "
     "[CIFAR-10](measured.md#orthogonal-vision-transformer)"),
    ("a pretrained model", "no: constrain new adapters",
     "[fine-tuning](recipes.md#fine-tune-a-trained-model)"),
)  # fmt: skip


def measured(best: str) -> dict[str, Sequence[Any]]:
    """The numbers of `ADVICE`, from the files of results: constrained first."""
    own = {(row[0], row[1]): share(row[3]) for row in publish.rows_of(best)[1:]}
    known, enough = "% right there (seeds)", "learning rates with 80 % right"
    tagged, cwy, free = (why_tables.METHODS[name] for name in ("tagged", "cwy", "free"))

    def copying(size: str) -> list[str]:
        return [share(cell("why", "copying", known, name, size)) for name in (tagged, cwy, free)]

    names = (LAYER, "torch, its default")
    return {
        "layer": [cell("torch_orthogonal", "summary", name, "2048 x 16") for name in names],
        "early": copying("100"),
        "late": copying("300"),
        "rates": [cell("why", "deep", enough, name, "50") for name in (tagged, free)],
        "deep": [share(cell("why", "deep", known, name, "50")) for name in (tagged, free)],
        # Unconstrained from an orthogonal initialisation: the constraint and its step differ.
        **{name.lower(): [own[name, METHODS[place]] for place in (2, 1)] for name in MODELS},
        "fast": [
            cell("why", "queries, logits", "% right", name, "5", "0.1")
            for name in (tagged, "unconstrained, same initialisation")
        ],
        "vit": right("vit_digits", "ten seeds", "test error, %", "StiefelAdamW", "AdamW"),
        "longer": right("vit_long", "0", "Test error %", "StiefelAdamW within heads", "AdamW"),
    }


def decisions(best: str) -> str:
    """Advice, with what is right in per cent, or what else was measured."""
    numbers = measured(best)
    rows = [[have, answer, text.format(**numbers)] for have, answer, text in ADVICE]
    return harness.markdown_table(["You have", "Constrain it?", "Measured"], rows)


def write(runs: dict[str, float], seeds: int, machine: dict[str, Any]) -> None:
    shown = tables(runs, seeds)
    shown["decisions"] = decisions(shown["best"])
    harness.write_json(FILE, {"machine": machine, "seeds": seeds, "runs": runs, "tables": shown})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where finished runs are kept")
    parser.add_argument("--seeds", type=int, default=5, help="that are reported")
    options = parser.parse_args()
    if options.folder is None:
        stored = json.loads(FILE.read_text(encoding="utf-8"))
        write(stored["runs"], stored["seeds"], stored["machine"])
        return
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    kept = options.folder / "runs.json"
    runs = json.loads(kept.read_text()) if kept.exists() else {}
    seeds = range(len(CHOOSING) + options.seeds)
    for seed, (name, model) in itertools.product(seeds, MODELS.items()):
        methods = (*METHODS, *([model[3]] if model[4] else []))
        for method, rate in itertools.product(methods, LEARNING_RATES):
            key = f"{name}, {method}, {rate:g}, {seed}"
            if key not in runs:
                runs[key] = train(name, method, rate, seed)
                harness.write_json(kept, runs, exact=True)
                print(f"{key}: {100 * runs[key]:.1f} %", flush=True)
    write(runs, options.seeds, harness.machine())


if __name__ == "__main__":
    main()
