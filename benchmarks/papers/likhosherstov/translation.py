"""Translation by an attention seq2seq model: orthogonal recurrences beside RNN, GRU and LSTM.

    python -m benchmarks.papers.likhosherstov.translation  # generated phrases, minutes
    python -m benchmarks.papers.likhosherstov.translation --preset paper \\
        --pairs eng_spa.tsv.gz --device cuda --resume

Pairs are lines source<TAB>target, split by source into training and test. One recurrence reads the
source; another writes the target and attends to all states of the first: by default with the score
of Luong et al. (2015) after the recurrence and gradients clipped at 1, in the preset with the
paper's additive score before it and no clipping; the paper does not mention any. Perplexity means,
as in the table of the paper, 2^loss of a target word, end included, with a loss in nats.
`StiefelAdam` runs with radius=1.0, nesterov=False; ProjectedRGD has Adam's learning rate. After
Likhosherstov et al. (AISTATS 2021), section 4.2, appendix D and table 3.
"""

import itertools
import random
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import stiefel_opt as so
from benchmarks.common.harness import PRINTED, final_values
from benchmarks.common.programs import Help, Panel, add_flags, parsed, run, spread, write_report
from benchmarks.common.training import Record, Trainer, compare
from benchmarks.papers.likhosherstov import phrases
from benchmarks.papers.likhosherstov.cells import by_two_rules
from benchmarks.papers.likhosherstov.translator import FREE, MAPS, Translator

RULES = {"StiefelAdam": PRINTED, "ProjectedRGD": so.ProjectedRGD}
ROWS = [*FREE, "SCORNN", "ProjectedRGD", "EXPRNN", "CWY"]  # of the paper's table 3
# 2^loss, minutes for 10 epochs and millions of parameters; CWY by L / N, N = 1024.
PUBLISHED: Mapping[str | float, str] = {
    "RNN": "1.66, 148, 25", "GRU": "1.47, 173, 32", "LSTM": "1.46, 232, 37",
    "SCORNN": "1.49, 1780, 25", "ProjectedRGD": "4.03, 1780, 25", "EXPRNN": "1.51, 2960, 25",
    1.0: "1.47, 1111, 25", 1 / 2: "1.58, 338, 24", 1 / 4: "1.56, 213, 23",
    1 / 8: "1.41, 198, 23", 1 / 16: "1.52, 175, 23",
}  # fmt: skip
SETTINGS = ["pairs", "limit", "longest", "fewest", "hidden", "embedding", "epochs", "batch_size"]
SETTINGS += ["lr", "attention", "clip"]
PRESETS = {
    "demo": {},
    "paper": {"hidden": 1024, "embedding": 256, "batch_size": 64, "lr": 1e-2, "epochs": 10}
    | {"seeds": [3], "attention": "additive", "clip": 0.0, "cells": ROWS},
}
SMOKE = {"limit": 60, "hidden": 16, "embedding": 8, "epochs": 1, "batch_size": 16}
Batch = tuple[Tensor, Tensor]


class Corpus(NamedTuple):
    """Pairs and the numbers of their words."""

    train: list[phrases.Pair]
    test: list[phrases.Pair]
    sources: dict[str, int]
    targets: dict[str, int]


def load_corpus(options: Namespace) -> Corpus:
    """The generated phrases or the file; the words are those of the training pairs."""
    if options.pairs is None:
        pairs = phrases.generated_pairs(options.limit or 4000)
    else:
        pairs = phrases.read_pairs(Path(options.pairs), options.longest)
        random.Random(0).shuffle(pairs)
        pairs = pairs[: options.limit]
    train, test = phrases.split(pairs)
    sides = [phrases.vocabulary(side, options.fewest) for side in zip(*train, strict=True)]
    return Corpus(train, test, *sides)


class Translation:
    """An epoch is a pass over the training pairs in random order; the rest is left out."""

    def __init__(self, model: Translator, corpus: Corpus, options: Namespace) -> None:
        self.model, self.corpus, self.options = model, corpus, options
        self.numbers = {part: self.encoded(getattr(corpus, part)) for part in ("train", "test")}
        self.steps = len(corpus.train) // options.batch_size
        if self.steps == 0:
            raise SystemExit(
                f"--batch-size must be at most the {len(corpus.train)} training pairs, got "
                f"{options.batch_size}"
            )

    def encoded(self, pairs: Sequence[phrases.Pair]) -> list[Batch]:
        numbers = (self.corpus.sources, self.corpus.targets)
        return [
            tuple(torch.tensor(phrases.encode(s, n)) for s, n in zip(pair, numbers, strict=True))
            for pair in pairs
        ]

    def padded(self, pairs: Sequence[Batch]) -> Batch:
        return tuple(
            pad_sequence(side, padding_value=phrases.PAD) for side in zip(*pairs, strict=True)
        )

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        order = torch.randperm(len(self.numbers["train"]), generator=generator).tolist()
        size = self.options.batch_size
        for step in range(self.steps):
            picked = order[step * size : (step + 1) * size]
            yield self.padded([self.numbers["train"][index] for index in picked])

    def sums(self, batch: Batch) -> tuple[Tensor, int]:
        """Cross entropy of all target words together, and their number."""
        source, target = (side.to(self.options.device) for side in batch)
        begun = torch.cat([torch.full_like(target[:1], phrases.START), target[:-1]])
        words = target != phrases.PAD
        logits = self.model(source, begun, words)
        return nn.functional.cross_entropy(logits, target[words], reduction="sum"), len(logits)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        total, count = self.sums(batch)
        return total / count, {"train_loss": (total / count).detach()}

    def evaluate(self) -> dict[str, float]:
        total, words = 0.0, 0
        for start in range(0, len(self.numbers["test"]), 250):
            loss, count = self.sums(self.padded(self.numbers["test"][start : start + 250]))
            total, words = total + float(loss), words + count
        return {"loss": total / words, "perplexity": 2 ** (total / words)}


def build_trainer(options: Namespace, corpus: Corpus, title: str, seed: int) -> Trainer:
    """Everything one run needs; runs of one seed see the pairs in the same order."""
    torch.manual_seed(seed)
    words = len(corpus.sources), len(corpus.targets)
    model = Translator(title, *words, options.embedding, options.hidden, options.attention)
    model.to(options.device)
    adam = partial(torch.optim.Adam, lr=options.lr)
    if title in RULES:
        tagged = [model.encoder.weight_hh_l0, model.decoder.weight_hh_l0]
        optimizer = by_two_rules(model, tagged, partial(RULES[title], lr=options.lr), adam)
    else:
        optimizer = adam(model.parameters())
    settings = {key: getattr(options, key) for key in SETTINGS} | {"cell": title, "seed": seed}
    settings["pairs"] = None if options.pairs is None else Path(options.pairs).name
    path = options.output / "checkpoints" / f"{title}-{seed}.pt".replace(" ", "-")
    counted = ("pairs", options.batch_size)
    task = Translation(model, corpus, options)
    clip = options.clip or None
    return Trainer(model, optimizer, task, settings, path, counted=counted, clip=clip)


def report(options: Namespace, corpus: Corpus, records: Mapping[str, Sequence[Record]]) -> None:
    """Write the table and draw the curves of the runs that are over."""
    rows = []
    for title, runs in records.items():
        loss = final_values(runs, "loss")
        row = [title, spread([2**value for value in loss], ".3f")]
        row.append(f"{statistics.median(e['seconds'] for r in runs for e in r['history']):.1f}")
        key = title if "L=" not in title else int(title.split("=")[1]) / options.hidden
        rows.append([*row, f"{runs[0]['parameters']:,}", PUBLISHED.get(key, "-")])
    header = ["Recurrence", "2^loss", "s an epoch", "Parameters"]
    header.append("Published, N = 1024: 2^loss, minutes, millions of parameters")
    title = (
        f"Translation: {len(corpus.train)} training and {len(corpus.test)} test pairs of "
        f"{'generated phrases' if options.pairs is None else 'sentences'}, N = {options.hidden}, "
        f"{options.epochs} epochs"
    )
    panels = [Panel("perplexity", "2^loss of a test word", scale="log")]
    write_report(options, title, (header, rows), records, panels, title.split(",")[0])


def parse_arguments(argv: Sequence[str] | None) -> Namespace:
    """Flags over the smoke sizes over defaults."""
    what = "Translate with orthogonal and other recurrences."
    parser = ArgumentParser(description=what, formatter_class=Help)
    add = parser.add_argument
    add("--pairs", help="file of lines source<TAB>target; default: generated phrases")
    add("--limit", type=int, help="pairs used; default: all, or 4000 generated")
    add("--longest", type=int, default=20, help="words of a side")
    add("--fewest", type=int, default=2, help="occurrences of a known word")
    add("--cells", nargs="+", choices=[*FREE, "CWY", *MAPS], default=[*FREE, "CWY"],
        metavar="CELL", help=f"of {', '.join([*FREE, 'CWY', *MAPS])}")  # fmt: skip
    add("--reflections", nargs="+", type=int, help="L of CWY; default: N, N/2, N/4, N/8, N/16")
    add("--hidden", type=int, default=64, help="N")
    add("--embedding", type=int, default=32, help="length of a word's vector")
    add("--epochs", type=int, default=12, help="passes over the pairs")
    add("--batch-size", type=int, default=64, help="pairs in a step")
    add("--lr", type=float, default=3e-3, help="of Adam")
    add("--attention", choices=["luong", "additive"], default="luong", help="additive: the paper's")
    add("--clip", type=float, default=1.0, help="norm of the gradients; 0: as it is")
    add_flags(parser, Path("runs/translation"))
    smoke = {**SMOKE, "cells": ["LSTM", "CWY", "StiefelAdam"], "reflections": [16, 4]}
    options = parsed(parser, argv, smoke, PRESETS)
    sweep = options.reflections or [max(1, options.hidden >> power) for power in range(5)]
    if not 1 <= min(sweep) <= max(sweep) <= options.hidden:
        parser.error(f"--reflections must lie in 1 to --hidden = {options.hidden}, got {sweep}")
    cwy = [f"CWY L={count}" for count in dict.fromkeys(sweep)]
    groups = (cwy if cell == "CWY" else [cell] for cell in options.cells)
    options.methods = list(itertools.chain.from_iterable(groups))
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train every row with every seed; print the table and where the plot is."""
    options = parse_arguments(argv)
    corpus = load_corpus(options)
    build = partial(build_trainer, options, corpus)
    what = f"Translation of {len(corpus.train)} pairs, {options.epochs} epochs: "
    what += f"{', '.join(options.methods)}."
    compare(options, options.methods, build, partial(report, options, corpus), what)


if __name__ == "__main__":
    run(main)
