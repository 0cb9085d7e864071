"""What each piece of the step is worth, on 25 small problems: radius, friction and length.

    python -m benchmarks.accuracy.learning_rates --data-dir DIR          # goes on where it stopped
    python -m benchmarks.accuracy.learning_rates --data-dir DIR --methods "StiefelAdam" "free, Adam"
    python -m benchmarks.accuracy.learning_rates --tables                # from what has been run

This was written down before the runs.

**Problems**, :mod:`benchmarks.accuracy.small_problems`: 15 that are trained on batches (perceptrons
with all or some weights constrained, eight layers, fine-tuning, recurrent networks, convolutions,
attention, an autoencoder, a character model, copying, streaming PCA and dictionary), 10 without
noise (leading eigenvalues with and without weights, with small gaps and of condition 1e4,
Procrustes of condition 1e3, joint diagonalisation, independent components, dictionary, completion,
projection-robust transport). They contain the ten of ``benchmarks/benchopt_stiefel``, most of them
smaller.

**Runs.** Problems with batches are trained short (50 steps, copying 80) and ten times as long, at
a constant rate and with one that falls linearly to 0 (the five costly ones are trained long with
the falling rate alone); those without noise for 300 steps at a constant rate. One learning rate
serves constrained and plain parameters, which follow the rule of torch that belongs to the
optimizer. Rates: 0.001, 0.003, 0.01, 0.03, 0.1, for SGD and where all parameters are constrained
ten times as much (there the smaller ones had been planned; the first runs ended at the largest).
Every rate and seed has the same starts and batches for every method.

**Score**, smaller is better. With batches: the mean loss of the last tenth of the steps, of the
two streaming problems the excess of the expected loss; what is below 0.01 counts as 0.01. Without
noise: the steps until the Riemannian gradient is a thousandth of that at the start, for good
(Procrustes: a hundredth), twice the length of the run if never. What is not finite counts as 1e3.

**Rates are chosen** for each method, problem, length and schedule by the geometric mean of the
scores of seeds 100 and 101; seeds 0 to 2 are reported, by their geometric mean. *One rate for all*
is, for each method, the rate with the least geometric mean over all problems with plain parameters,
or over all without.

**Decision.** A piece becomes the default if, against the same method without it and each at its
chosen rates, the geometric mean over the runs of a problem is at most 1.02 (level or better) on
four fifths of the problems, no run of any problem is worse by more than a tenth except where the
documentation says so, and a step takes at most a tenth longer. The figures for one rate for all
are shown beside it.

**Left out**, for want of time: more seeds, fine-tuning a pretrained transformer, rotations of a
language model, Prodigy and schedule-free AdamW through ``so.orthogonal``, networks that take longer
than seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.accuracy.small_problems import WITHOUT_PLAIN, Problem, problems
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
CHOOSING, SEEDS = (100, 101), (0, 1, 2)
RUNS = {
    "train": (("short", "constant"), ("short", "decay"), ("long", "decay"), ("long", "constant")),
    "solve": (("", "constant"),),
}
PLAIN, NO_PLAIN = "with plain parameters", "all constrained"
LEAST, WORST = 0.01, 1e3

Rows = list[list[Tensor]]  # for each rate the parameters of all seeds
Build = Callable[[Sequence[float], Rows, Rows], list[torch.optim.Optimizer]]


def ours(cls: type[torch.optim.Optimizer], **options: Any) -> Build:
    """One optimizer of this package."""

    def build(rates: Sequence[float], points: Rows, plain: Rows) -> list[torch.optim.Optimizer]:
        for tensors in points:
            tensors[:] = [so.ManifoldParameter(tensor.detach()) for tensor in tensors]
        return [cls(groups_of(rates, points, plain), **options)]

    return build


def groups_of(rates: Sequence[float], points: Rows, plain: Rows) -> list[dict[str, Any]]:
    """Return a group for each rate."""
    triples = zip(rates, points, plain, strict=True)
    return [
        {"params": [*tagged, *others], "lr": rate, "first_lr": rate}
        for rate, tagged, others in triples
    ]


def unconstrained(cls: type[torch.optim.Optimizer], **options: Any) -> Build:
    """The control: torch's own on all parameters, from the same orthonormal start."""

    def build(rates: Sequence[float], points: Rows, plain: Rows) -> list[torch.optim.Optimizer]:
        return [cls(groups_of(rates, points, plain), **options)]

    return build


def geoopt(name: str, **options: Any) -> Build:
    """One optimizer of geoopt, its Euclidean metric."""

    def build(rates: Sequence[float], points: Rows, plain: Rows) -> list[torch.optim.Optimizer]:
        import geoopt

        for tensors in points:
            for place, tensor in enumerate(tensors):
                manifold = geoopt.EuclideanStiefel()
                tensors[place] = geoopt.ManifoldParameter(tensor.detach(), manifold=manifold)
        groups = groups_of(rates, points, plain)
        return [getattr(geoopt.optim, name)(groups, lr=rates[0], **options)]

    return build


METHODS: dict[str, Build] = {
    "StiefelAdam": ours(so.StiefelAdam, radius=1.0),
    "StiefelAdam, virtual radius": ours(so.StiefelAdam, radius="virtual"),
    "unconstrained, Adam": unconstrained(torch.optim.Adam),
    "StiefelSGD": ours(so.StiefelSGD),
    "StiefelSGD, adaptive": ours(so.StiefelSGD, adaptive=True, transport="projected"),
    "StiefelAdam, angle": ours(so.StiefelAdam, radius="angle"),
    "StiefelSGD, Nesterov": ours(so.StiefelSGD, nesterov=True),
    "StiefelSGD, adaptive, Nesterov": ours(
        so.StiefelSGD, adaptive=True, nesterov=True, transport="projected"
    ),
    "geoopt Adam": geoopt("RiemannianAdam"),
    "geoopt SGD": geoopt("RiemannianSGD", momentum=0.9),
    "geoopt SGD, Nesterov": geoopt("RiemannianSGD", momentum=0.9, nesterov=True),
    "unconstrained, NAdam": unconstrained(torch.optim.NAdam),
    "unconstrained, SGD": unconstrained(torch.optim.SGD, momentum=0.9),
    "StiefelAdam, virtual radius, projected": ours(
        so.StiefelAdam, radius="virtual", transport="projected"
    ),
}


def rates_of(method: str, problem: str) -> list[float]:
    """Return the learning rates: of SGD, and without plain parameters, ten times as large."""
    is_large = "SGD" in method or problem in WITHOUT_PLAIN
    return [rate * 10 if is_large else rate for rate in RATES]


def run(
    problem: Problem, method: str, rates: list[float], length: str, schedule: str
) -> dict[str, Any]:
    """Train all copies at once and return their scores, a list over seeds for each rate."""
    seeds, steps = (*CHOOSING, *SEEDS), problem.steps * (10 if length == "long" else 1)
    begun = time.perf_counter()
    starts = [problem.start(seed) for seed in seeds]
    points, plain = (
        [[torch.nn.Parameter(torch.stack(same)) for same in zip(*kind, strict=True)] for _ in RATES]
        for kind in zip(*starts, strict=True)
    )
    optimizers = METHODS[method](rates, points, plain)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    measured, lengths, kept = 0.0, [], max(1, steps // 10)
    data: list[Tensor] = []
    for step in range(steps):
        if problem.kind == "train" or step == 0:
            batches = [problem.data(seed, step) for seed in seeds]
            data = [
                torch.stack(same).repeat(len(RATES), *[1] * same[0].ndim)
                for same in zip(*batches, strict=True)
            ]
        factor = 1 - step / steps if schedule == "decay" else 1.0
        for group in groups:
            group["lr"] = group["first_lr"] * factor
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = [torch.cat(same) for same in zip(*points, strict=True)]
        losses = problem.loss(whole, [torch.cat(same) for same in zip(*plain, strict=True)], *data)
        losses.sum().backward()
        with torch.no_grad():
            if problem.kind == "solve":
                lengths.append(gradient_length(points))
            if step >= steps - kept:
                measured = measured + problem.measured(whole, losses.detach()) / kept
        for optimizer in optimizers:
            optimizer.step()
    if problem.kind == "solve":
        scores = steps_to(torch.stack(lengths), problem.target)
    else:
        scores = torch.as_tensor(measured).clamp(min=LEAST)
    scores = torch.where(scores < WORST, scores, WORST).view(len(RATES), len(seeds))
    return {
        "rates": rates,
        "scores": [[float(f"{score:.5g}") for score in row] for row in scores.tolist()],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def gradient_length(points: Rows) -> Tensor:
    """Length of the Riemannian gradient of each copy, canonical metric."""
    found = []
    for (parameter,) in points:
        x, gradient = parameter.detach(), parameter.grad
        inner = x.mT @ gradient
        normal = gradient - x @ inner
        found.append(normal.square().sum((1, 2)) + (inner - inner.mT).square().sum((1, 2)) / 2)
    return torch.cat(found).sqrt()


def steps_to(lengths: Tensor, target: float) -> Tensor:
    """Steps until a column of ``(steps, k)`` stays below ``target`` times its first number."""
    away = ~(lengths < target * lengths[0])
    numbers = torch.arange(1.0, len(lengths) + 1).unsqueeze(1)
    last = (away * numbers).amax(0)
    return torch.where(last < len(lengths), last, 2.0 * len(lengths))


# ---- what came out -----------------------------------------------------------------------------

Key = tuple[str, str, str, str]  # problem, method, length, schedule
Store = dict[Key, dict[str, Any]]


def read(path: Path) -> Store:
    """Return what has been run: one JSON object in a line each."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (line["problem"], line["method"], line["length"], line["schedule"]): line for line in lines
    }


def means(found: dict[str, Any], seeds: Sequence[int]) -> list[float]:
    """Return the geometric mean of the scores of these seeds, for each rate."""
    places = [(*CHOOSING, *SEEDS).index(seed) for seed in seeds]
    return [statistics.geometric_mean(row[place] for place in places) for row in found["scores"]]


def tuned(found: dict[str, Any]) -> float:
    """Return the score at the rate that the other seeds have chosen."""
    chosen = means(found, CHOOSING)
    return means(found, SEEDS)[chosen.index(min(chosen))]


def one_rate(store: Store, keys: Sequence[Key]) -> int:
    """Return the place of the rate that suits these runs of one method best."""
    logs = [[math.log(mean) for mean in means(store[key], CHOOSING)] for key in keys]
    totals = [sum(column) for column in zip(*logs, strict=True)]
    return totals.index(min(totals))


def compared(store: Store, new: str, old: str) -> dict[str, Any]:
    """Return the ratios new/old of every run that both have, and what the rule of decision says."""
    pairs = [(key, (key[0], old, key[2], key[3])) for key in store if key[1] == new]
    pairs = [pair for pair in pairs if pair[1] in store]
    at_best = {key: tuned(store[key]) / tuned(store[other]) for key, other in pairs}
    at_one, rates = {}, {}
    kinds = {pair: NO_PLAIN if pair[0][0] in WITHOUT_PLAIN else PLAIN for pair in pairs}
    for kind in dict.fromkeys(kinds.values()):
        own = [pair for pair in pairs if kinds[pair] == kind]
        places = [one_rate(store, keys) for keys in zip(*own, strict=True)]
        for key, place in zip(own[0], places, strict=True):
            rates[f"{key[1]}, {kind}"] = store[key]["rates"][place]
        for pair in own:
            values = [means(store[k], SEEDS)[p] for k, p in zip(pair, places, strict=True)]
            at_one[pair[0]] = values[0] / values[1]
    best, one = by_problem(at_best), by_problem(at_one)
    return {
        "problems": len(best),
        "level or better": sum(ratio <= 1.02 for ratio in best.values()),
        "better by a tenth": sum(ratio < 0.9 for ratio in best.values()),
        "level or better, one rate": sum(ratio <= 1.02 for ratio in one.values()),
        "worse by a tenth": {name_of(key): r for key, r in at_best.items() if r > 1.1},
        "mean": statistics.geometric_mean(best.values()),
        "mean, one rate": statistics.geometric_mean(one.values()),
        "one rate for all": rates,
        "by problem": best,
        "by problem, one rate": one,
    }


def by_problem(ratios: dict[Key, float]) -> dict[str, float]:
    """Return the geometric mean over the runs of each problem."""
    found: dict[str, list[float]] = {}
    for key, ratio in ratios.items():
        found.setdefault(key[0], []).append(ratio)
    return {problem: statistics.geometric_mean(all_of) for problem, all_of in found.items()}


def name_of(key: Key) -> str:
    """Return what a run is called in a table."""
    problem, _, length, schedule = key
    return f"{problem}, {length}, {schedule}" if length else problem


PAIRS = (
    ("StiefelAdam, virtual radius", "StiefelAdam"),
    ("StiefelAdam, angle", "StiefelAdam"),
    ("StiefelAdam, virtual radius", "unconstrained, Adam"),
    ("StiefelAdam", "unconstrained, Adam"),
    ("StiefelAdam, virtual radius, projected", "StiefelAdam, virtual radius"),
    ("StiefelSGD, adaptive", "StiefelSGD"),
    ("StiefelSGD, adaptive, Nesterov", "StiefelSGD, Nesterov"),
    ("StiefelSGD, Nesterov", "StiefelSGD"),
    ("StiefelAdam, virtual radius", "geoopt Adam"),
    ("StiefelSGD, adaptive", "geoopt SGD"),
    ("StiefelSGD, adaptive", "geoopt SGD, Nesterov"),
)


def tables(store: Store) -> dict[str, str]:
    """Return the tables in Markdown: each run by method, and the comparisons."""
    methods = [method for method in METHODS if any(key[1] == method for key in store)]
    runs = {name_of(key): key for key in store}
    rows = [
        [name, *(cell(store.get((key[0], method, key[2], key[3]))) for method in methods)]
        for name, key in sorted(runs.items(), key=lambda item: not item[1][2])
    ]
    verdicts = [
        [
            name,
            f"{found['level or better']} of {found['problems']}",
            str(found["better by a tenth"]),
            str(len(found["worse by a tenth"])),
            f"{found['mean']:.3f}",
            f"{found['level or better, one rate']} of {found['problems']}",
            f"{found['mean, one rate']:.3f}",
        ]
        for name, found in all_compared(store).items()
    ]
    header = ["new / old", "level or better", "better by 0.1", "runs worse by 0.1", "mean"]
    header += ["level or better, one rate", "mean, one rate"]
    ratios = {
        f"ratios, {name}": markdown_table(
            ["problem", "tuned", "one rate for all", "runs"],
            [
                [
                    problem,
                    f"{ratio:.2f}",
                    f"{found['by problem, one rate'][problem]:.2f}",
                    runs_of(store, name, problem),
                ]
                for problem, ratio in found["by problem"].items()
            ],
        )
        for name, found in all_compared(store).items()
    }
    return {
        "scores": markdown_table(["problem", *methods], rows),
        **ratios,
        "verdicts": markdown_table(header, verdicts),
    }


def runs_of(store: Store, name: str, problem: str) -> str:
    """Return how many runs of a problem the two methods of a comparison have in common."""
    new, old = name.split(" / ")
    keys = [key for key in store if key[:2] == (problem, new)]
    return str(sum((problem, old, key[2], key[3]) in store for key in keys))


def cell(found: dict[str, Any] | None) -> str:
    """Return a score and the rate that was chosen."""
    if found is None:
        return ""
    chosen = means(found, CHOOSING)
    return f"{tuned(found):.3g} ({found['rates'][chosen.index(min(chosen))]:g})"


def all_compared(store: Store) -> dict[str, dict[str, Any]]:
    """Return the comparisons of all pairs that have runs in common."""
    has = {
        pair: any((k[0], pair[1], *k[2:]) in store for k in store if k[1] == pair[0])
        for pair in PAIRS
    }
    return {f"{new} / {old}": compared(store, new, old) for (new, old), both in has.items() if both}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="a folder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--problems", nargs="+", help="default: all")
    parser.add_argument("--lengths", nargs="+", default=["", "short", "long"])
    parser.add_argument("--store", type=Path, default=Path("runs") / "learning_rates.jsonl")
    parser.add_argument("--tables", action="store_true", help="only write what has been run")
    parser.add_argument("--output", type=Path, default=RESULTS / "learning_rates.json")
    options = parser.parse_args(argv)
    store = read(options.store)
    options.store.parent.mkdir(parents=True, exist_ok=True)
    if not options.tables:
        everything = problems(options.data_dir)
        for method in options.methods:
            for name, problem in everything.items():
                if options.problems is None or name in options.problems:
                    measure(store, options, method, name, problem)
    content = {
        "machine": machine(torch.device("cpu")),
        "seeds": list(SEEDS),
        "seeds_of_the_rates": list(CHOOSING),
        "compared": all_compared(store),
        "runs": [
            {"problem": key[0], "method": key[1], "length": key[2], "schedule": key[3]}
            | {"rates": found["rates"], "means": means(found, SEEDS)}
            | {"means_of_the_choice": means(found, CHOOSING)}
            for key, found in store.items()
        ],
    }
    write_json(options.output, content | {"tables": tables(store)})
    print("\n\n".join(tables(store).values()))
    return 0


def measure(store: Store, options: Any, method: str, name: str, problem: Problem) -> None:
    """Run what is missing of one method and problem; each run is written when it has ended."""
    for length, schedule in RUNS[problem.kind]:
        key = name, method, length, schedule
        if key in store or length not in options.lengths or key[2:] in problem.left_out:
            continue
        found = run(problem, method, rates_of(method, name), length, schedule)
        store[key] = {
            "problem": name,
            "method": method,
            "length": length,
            "schedule": schedule,
        } | found
        with options.store.open("a") as file:
            file.write(json.dumps(store[key]) + "\n")
        row = " ".join(f"{score:.4g}" for score in means(found, SEEDS))
        print(f"{name}, {method}, {length} {schedule}: {row}; {found['seconds']} s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
