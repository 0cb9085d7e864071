"""Projection-robust Wasserstein distances: digits of MNIST and plays of Shakespeare, all pairs.

    export OMP_NUM_THREADS=1
    python -m benchmarks.papers.kong.prw --data-dir DIR  # resumes where it was stopped
    python -m benchmarks.papers.kong.prw --data-dir DIR \\
        --authors CHECKOUT  # with the code of Lin et al. (2020)
    python -m benchmarks.papers.kong.prw --data-dir DIR \\
        --limit 3  # three pairs of each set; 0: tables

DIR holds mnist_features.npz (digit_0 ... digit_9: points x 128) and shakespeare_w2v.npz (for each
play NAME_x: words x 200 and NAME_w: their weights). The reference of a pair is the best of ten
initialisations of our own solver at relative gradient 1e-6; gaps are (reference - objective) /
reference of the entropic objective under a converged plan. From one random initialisation every
rule gets the same number of iterations, and then as many as fit into the same processor time. Times
are those of the processor, in one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.common import figures
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json
from benchmarks.papers.kong.prw_contestants import (
    ITERATIONS,
    MULTIPLES,
    RATES,
    RULES,
    TUNING_PAIRS,
    Pair,
    Run,
    load_pairs,
    run_authors,
    run_fixed,
    run_ours,
    run_pot,
)

STARTS = 10
TOL = 1e-6
SETS = ("mnist", "shakespeare")
TITLES = {"mnist": "digits of MNIST", "shakespeare": "plays of Shakespeare"}
SECONDS = 0.15  # of the processor, for each rule on a pair
EIGHT = ("H5", "Ham", "JC", "MV", "Oth", "Rom", "Lr", "Mac")
SEARCH = "line search, 50 steps"
SAME_START = "line search, to its end"
OURS = "line search, from eigenvectors"
RESTARTED = "line search, from four starts"


class Store:
    """What has been measured, in a file that fills pair by pair."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, *keys: str) -> dict[str, Any]:
        item = self.content
        for key in keys:
            item = item.setdefault(key, {})
        return item

    def save(self) -> None:
        write_json(self.path, self.content)


def reference(pair: Pair) -> dict[str, Any]:
    """Ten initialisations: the default one and nine random ones."""
    starts = [None, *(pair.start(number) for number in range(STARTS - 1))]
    results = [pair.solve(init=start, tol=TOL, max_iter=2000) for start in starts]
    best = max(results, key=lambda result: result.objective)
    return {
        "objective": best.objective,
        "value": best.value,
        "gradient": best.gradient,
        "converged": [result.converged for result in results],
        "objectives": [result.objective for result in results],
    }


def tune(pairs: Sequence[Pair], dataset: str, store: Store) -> None:
    """The multiples of published learning rates whose runs end with the largest objectives."""
    chosen = store.get("tuned", dataset)
    scores = store.get("tuning", dataset)
    selected = [pair for pair in pairs if pair.name in TUNING_PAIRS[dataset]] or pairs[:1]
    for rule in tqdm(RATES[dataset], desc=f"{dataset}: rates"):
        if rule in chosen:
            continue
        means = {}
        for multiple in MULTIPLES:
            lr = multiple * RATES[dataset][rule]
            if rule == "POT":
                runs = [run_pot(pair, lr) for pair in selected]
            else:
                runs = [run_fixed(pair, rule, lr, dataset) for pair in selected]
            relative = [
                run.objective / store.get("reference", dataset)[pair.name]["objective"]
                for run, pair in zip(runs, selected, strict=True)
            ]
            mean = float(np.mean(relative))
            means[lr] = mean if np.isfinite(mean) else 0.0
        chosen[rule] = max(means, key=lambda lr: means[lr])
        scores[rule] = {f"{lr:g}": 100 * (1 - mean) for lr, mean in means.items()}
        store.save()


def pace(pairs: Sequence[Pair], dataset: str, store: Store) -> None:
    """How many iterations of each rule, at its tuned learning rate, fit into `SECONDS`."""
    found, tuned = store.get("iterations", dataset), store.get("tuned", dataset)
    selected = [pair for pair in pairs if pair.name in TUNING_PAIRS[dataset]] or pairs[:1]
    for rule in ("line search", *RULES):
        if rule not in found:
            runs = [
                run_ours(pair, init=pair.start(), max_iter=ITERATIONS, tol=0.0)
                if rule == "line search"
                else run_fixed(pair, rule, tuned[rule], dataset)
                for pair in selected
            ]
            seconds = float(np.median([run.processor_seconds for run in runs])) / ITERATIONS
            found[rule] = max(round(SECONDS / seconds), 1)
            store.save()


def contest(
    pair: Pair, dataset: str, tuned: dict[str, float], iterations: dict[str, int]
) -> dict[str, Callable[[], Run]]:
    """Every rule on one pair from one random initialisation: equal iterations, equal seconds."""
    start = {"init": pair.start(), "tol": 0.0}
    jobs: dict[str, Callable[[], Run]] = {}
    for rule in RULES:
        fixed = partial(run_fixed, pair, rule, dataset=dataset)
        jobs[f"{rule}, published"] = partial(fixed, lr=RATES[dataset][rule])
        jobs[f"{rule}, tuned"] = partial(fixed, lr=tuned[rule])
        jobs[f"{rule}, tuned, seconds"] = partial(
            fixed, lr=tuned[rule], iterations=iterations[rule]
        )
    search = partial(run_ours, pair, **start)
    jobs[SEARCH] = partial(search, max_iter=ITERATIONS)
    jobs[f"{SEARCH}, seconds"] = partial(search, max_iter=iterations["line search"])
    jobs[SAME_START] = partial(run_ours, pair, init=pair.start())
    jobs[OURS] = partial(run_ours, pair)
    jobs[RESTARTED] = partial(run_ours, pair, restarts=4, seed=0)
    return jobs


def contest_of_pot(pair: Pair, dataset: str, tuned: dict[str, float]) -> dict[str, Any]:
    """POT's function, which makes a tenth as many iterations in the same time."""
    rates = {"published": RATES[dataset]["POT"], "tuned": tuned["POT"]}
    return {f"POT, {kind}": asdict(run_pot(pair, rate)) for kind, rate in rates.items()}


def contest_of_authors(
    pair: Pair, dataset: str, tuned: dict[str, float], folder: Path
) -> dict[str, Any]:
    """The code of Lin et al. (2020) on one pair."""
    kinds = {"published": RATES[dataset], "tuned": tuned}
    return {
        f"{rule} by its authors, {kind}": asdict(
            run_authors(folder, pair, rule, rates[rule], dataset)
        )
        for kind, rates in kinds.items()
        for rule in ("RGAS", "RAGAS")
    }


# ---- summary ----


def summarize(store: Store, dataset: str) -> dict[str, Any]:
    """Gaps, failures, seconds by method."""
    references, contests = store.get("reference", dataset), results(store, dataset)
    names = [name for name in contests if name in references]
    best = {name: references[name]["objective"] for name in names}
    methods: dict[str, Any] = {}
    for method in dict.fromkeys(method for name in names for method in contests[name]):
        tried = [name for name in names if method in contests[name]]
        runs = [contests[name][method] for name in tried]
        gaps = np.array(
            [100 * (1 - run["objective"] / best[n]) for run, n in zip(runs, tried, strict=True)]
        )
        methods[method] = {
            **gap_statistics(gaps),
            "median_processor_seconds": float(np.median([r["processor_seconds"] for r in runs])),
            "gaps_percent": " ".join(f"{gap:.4f}" for gap in gaps),
        }
        if dataset == "shakespeare":
            among = [set(name.split("-")) <= set(EIGHT) for name in tried]
            methods[method]["eight_plays"] = gap_statistics(gaps[among])
    return {
        "pairs": " ".join(names),
        "reference": " ".join(f"{best[name]:.8g}" for name in names),
        "methods": methods,
    }


def gap_statistics(gaps: np.ndarray) -> dict[str, Any]:
    sound = gaps[np.isfinite(gaps)]
    return {
        "pairs": len(gaps),
        "failed": len(gaps) - len(sound),
        "mean_gap_percent": float(sound.mean()) if len(sound) else None,
        "largest_gap_percent": float(sound.max()) if len(sound) else None,
    }


def results(store: Store, dataset: str) -> dict[str, dict[str, Any]]:
    """Runs by pair and method."""
    found = {name: dict(runs) for name, runs in store.get("contest", dataset).items()}
    for extra in ("pot", "authors"):
        for name, runs in store.get(extra, dataset).items():
            found.setdefault(name, {}).update(runs)
    return found


def table(found: dict[str, Any], eight: bool = False) -> str:
    """The rules from one initialisation: gaps after equal iterations and after equal seconds."""
    gaps = ["Gap % after 50 steps", "Largest", "Gap % after 0.15 s", "Largest"]
    header = ["Method, learning rate", *gaps]
    methods = {
        method: row["eight_plays"] if eight else row for method, row in found["methods"].items()
    }
    whole = max(row["pairs"] for row in methods.values())
    rows = []
    for method in (*(f"{r}, {k}" for k in ("published", "tuned") for r in RULES), SEARCH):
        cells = []
        for name in (method, f"{method}, seconds"):
            row = methods.get(name, {"pairs": 0})
            keys = ("mean_gap_percent", "largest_gap_percent")
            cells += [percent(row[key] if row["pairs"] == whole else None) for key in keys]
        rows.append([method, *cells])
    return markdown_table(header, rows)


def other_table(found: dict[str, Any]) -> str:
    """Other initialisations, our whole call, and other implementations."""
    header, rows = ["Method", "Pairs", "Failed", "Gap %", "Largest", "CPU s"], []
    for method, row in found["methods"].items():
        if not method.startswith((*RULES, SEARCH)) or "authors" in method:
            gaps = [percent(row[key]) for key in ("mean_gap_percent", "largest_gap_percent")]
            seconds = f"{row['median_processor_seconds']:.2f}"
            rows.append([method, str(row["pairs"]), str(row["failed"]), *gaps, seconds])
    return markdown_table(header, rows)


def percent(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.3f}"


# ---- main ----


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--limit", type=int, help="only the first pairs of each set")
    parser.add_argument("--authors", type=Path, help="a checkout of the code of Lin et al. (2020)")
    parser.add_argument("--authors-every", type=int, default=3, help="of so many pairs, one")
    parser.add_argument("--store", type=Path, default=Path("runs") / "prw" / "pairs.json")
    parser.add_argument("--output", type=Path, default=RESULTS / "prw.json")
    return parser.parse_args(argv)


def fill(store: Store, sets: dict[str, list[Pair]], arguments: argparse.Namespace) -> None:
    """Do what is missing: references of all pairs, rates, contests, the authors' code."""
    limit, folder = arguments.limit, arguments.authors
    for dataset, pairs in sets.items():
        tuning = [
            pair for pair in pairs[len(pairs[:limit]) :] if pair.name in TUNING_PAIRS[dataset]
        ]
        each(store, "reference", dataset, [*pairs[:limit], *tuning], reference)
        tune(pairs, dataset, store)
        pace(pairs, dataset, store)
    for dataset, pairs in sets.items():
        chosen, tuned = pairs[:limit], store.get("tuned", dataset)
        iterations = store.get("iterations", dataset)
        found = store.get("contest", dataset)
        for pair in tqdm(chosen, desc=f"{dataset}: contest"):
            known = found.setdefault(pair.name, {})
            jobs = contest(pair, dataset, tuned, iterations)
            missing = {name: job for name, job in jobs.items() if name not in known}
            if missing:
                known |= {name: asdict(job()) for name, job in missing.items()}
                store.save()
        each(store, "pot", dataset, chosen, partial(contest_of_pot, dataset=dataset, tuned=tuned))
    for dataset, pairs in sets.items() if folder is not None else ():
        work = partial(
            contest_of_authors, dataset=dataset, tuned=store.get("tuned", dataset), folder=folder
        )
        each(store, "authors", dataset, pairs[: limit : arguments.authors_every], work)


def each(
    store: Store, kind: str, dataset: str, pairs: Sequence[Pair], work: Callable[[Pair], Any]
) -> None:
    """Do the pairs that the store does not have, one after the other."""
    found = store.get(kind, dataset)
    for pair in tqdm([p for p in pairs if p.name not in found], desc=f"{dataset}: {kind}"):
        found[pair.name] = work(pair)
        store.save()


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the store, then print tables."""
    arguments = parse(argv)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit("OMP_NUM_THREADS must be 1, so that everybody has one thread; export it")
    torch.set_num_threads(1)
    store = Store(arguments.store)
    sets = {name: load_pairs(name, arguments.data_dir) for name in arguments.sets}
    first = next(iter(sets.values()))[0]
    first.solve(max_iter=3)  # the first optimizer of a process imports torch's compiler
    run_pot(first, 1e-9, 1)
    fill(store, sets, arguments)
    summaries = {dataset: summarize(store, dataset) for dataset in sets}
    content: dict[str, Any] = {
        "machine": machine(packages=["pot"]),
        "threads": 1,
        "steps": ITERATIONS,
        "seconds": SECONDS,
        "iterations_in_these_seconds": store.get("iterations"),
        "published_rates": RATES,
        "tuned_rates": store.get("tuned"),
        "tuning_gap_percent": store.get("tuning"),
        "sets": summaries,
    }
    content["tables"] = {
        **{dataset: table(found) for dataset, found in summaries.items()},
        **{f"{dataset}, other": other_table(found) for dataset, found in summaries.items()},
    }
    if "shakespeare" in sets:
        content["tables"]["eight plays"] = table(summaries["shakespeare"], eight=True)
    write_json(arguments.output, content)
    if "shakespeare" in sets:
        figures.prw_plays(arguments.output.with_name(f"{arguments.output.stem}_plays.png"))
    for dataset, found in summaries.items():
        print(f"\n{len(found['pairs'].split())} pairs of {TITLES[dataset]}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
