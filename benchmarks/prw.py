"""Projection-robust Wasserstein distances: digits of MNIST and plays of Shakespeare, all pairs.

    export OMP_NUM_THREADS=1
    python benchmarks/prw.py --data-dir DIR                     # resumes where it was stopped
    python benchmarks/prw.py --data-dir DIR --authors CHECKOUT  # with the code of Lin et al. (2020)
    python benchmarks/prw.py --data-dir DIR --limit 3           # three pairs of each set

DIR holds mnist_features.npz (digit_0 ... digit_9: points x 128) and shakespeare_w2v.npz (for each
play NAME_x: words x 200 and NAME_w: their weights). The reference of a pair is the best of ten
starts of our own solver at relative gradient 1e-6; gaps are (reference - objective) / reference of
the entropic objective under a converged plan. Everything runs in one thread, and times are those
of the processor, which a busy machine stretches less than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
from harness import RESULTS, machine, markdown_table, version, write_json
from prw_contestants import (
    ITERATIONS,
    MULTIPLES,
    RATES,
    TUNING_PAIRS,
    Pair,
    Run,
    compare_transport,
    load_pairs,
    run_authors,
    run_fixed,
    run_ours,
    run_pot,
    time_iterations,
)
from tqdm import tqdm

STARTS = 10
TOL = 1e-6
SETS = ("mnist", "shakespeare")
TITLES = {"mnist": "digits of MNIST", "shakespeare": "plays of Shakespeare"}
TIMED = {"mnist": "4-9", "shakespeare": "H5-Ham"}
OURS = "StiefelSGD, default"
SAME_START = "StiefelSGD, default, random start"
RESTARTED = "StiefelSGD, default, restarts=4"


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
    """Ten starts: the default one and nine random ones."""
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
    """Choose the multiple of each published rate whose runs end with the largest objectives."""
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
                runs = [run_pot(pair, lr, (ITERATIONS,)) for pair in selected]
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


def contest(pair: Pair, dataset: str, tuned: dict[str, float]) -> dict[str, Any]:
    """Our solver and POT's on one pair, one after the other in the same minute."""
    runs: dict[str, Run] = {
        OURS: run_ours(pair),
        SAME_START: run_ours(pair, init=pair.start()),
        RESTARTED: run_ours(pair, restarts=4, seed=0),
        "POT, published": run_pot(pair, RATES[dataset]["POT"], (ITERATIONS,)),
        "POT, tuned": run_pot(pair, tuned["POT"]),
    }
    for kind, rates in (("published", RATES[dataset]), ("tuned", tuned)):
        for rule in ("RGAS", "RAGAS", "StiefelSGD"):
            runs[f"{rule}, {kind}"] = run_fixed(pair, rule, rates[rule], dataset)
    return {name: run.record() for name, run in runs.items()}


def contest_of_authors(
    pair: Pair, dataset: str, tuned: dict[str, float], folder: Path
) -> dict[str, Any]:
    """The code of Lin et al. (2020) on one pair."""
    return {
        f"{rule} by its authors, {kind}": run_authors(
            folder, pair, rule, rates[rule], dataset
        ).record()
        for kind, rates in (("published", RATES[dataset]), ("tuned", tuned))
        for rule in ("RGAS", "RAGAS")
    }


# ---- summary ----


def summarize(store: Store, dataset: str) -> dict[str, Any]:
    """Gaps, failures, seconds by method; which bars hold."""
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
        sound = np.isfinite(gaps)
        methods[method] = {
            "pairs": len(runs),
            "failed": int((~sound).sum()),
            "mean_gap_percent": float(gaps[sound].mean()) if sound.any() else None,
            "median_gap_percent": float(np.median(gaps[sound])) if sound.any() else None,
            "largest_gap_percent": float(gaps[sound].max()) if sound.any() else None,
            "converged": sum(run["converged"] for run in runs),
        }
        for kind in ("seconds", "processor_seconds"):
            seconds = np.array([run[kind] for run in runs])
            methods[method][f"median_{kind}"] = float(np.median(seconds))
            methods[method][f"largest_{kind}"] = float(seconds.max())
        methods[method]["gaps_percent"] = " ".join(f"{gap:.4f}" for gap in gaps)
    return {
        "pairs": " ".join(names),
        "reference": " ".join(f"{best[name]:.8g}" for name in names),
        "starts_within_1e-4": " ".join(
            str(sum(v > best[name] * (1 - 1e-4) for v in references[name]["objectives"]))
            for name in names
        ),
        "reference_all_starts_converged": sum(all(references[n]["converged"]) for n in names),
        "largest_gradient_of_a_reference": max(references[n]["gradient"] for n in names),
        "methods": methods,
        "time_to_POT_over_time_of_POT": overtaking(contests, names),
    }


def results(store: Store, dataset: str) -> dict[str, dict[str, Any]]:
    """Runs by pair and method."""
    extra = store.get("authors", dataset)
    return {
        name: {**runs, **extra.get(name, {})}
        for name, runs in store.get("contest", dataset).items()
    }


def processor_curve(run: dict[str, Any]) -> list[tuple[float, float]]:
    """The curve of a run in processor time: its wall times, shrunk by what the whole run waited."""
    factor = run["processor_seconds"] / run["seconds"]
    return [(factor * seconds, value) for seconds, value in run["curve"]]


def overtaking(contests: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Our time to what POT ends with, from the same start, over POT's time for that.

    For each pair the better of POT's two rates counts; values within 1e-6 of each other are equal.
    """
    ratios, missed = [], []
    for name in names:
        runs = contests[name]
        finished = [
            run for method, run in runs.items()
            if method.startswith("POT") and np.isfinite(run["objective"])
        ]  # fmt: skip
        rival = max(finished, key=lambda run: run["objective"])
        curve = processor_curve(runs[SAME_START])
        times = [seconds for seconds, value in curve if value >= rival["objective"] * (1 - 1e-6)]
        if times:
            ratios.append(times[0] / rival["processor_seconds"])
        else:
            missed.append(name)
    return {
        "median": float(np.median(ratios)),
        "largest": float(np.max(ratios)),
        "above_one_quarter": int(np.sum(np.array(ratios) > 0.25)),
        "never_reached": missed,
    }


def bars(content: dict[str, Any]) -> list[str]:
    """The verdicts, one line each."""
    lines = []

    def say(passed: bool, text: str) -> None:
        lines.append(f"{'PASS' if passed else 'FAIL'}  {text}")

    for dataset, rows in content["iteration"].items():
        row = rows["StiefelSGD, one Sinkhorn iteration"]
        say(
            row["over_POT"] <= 0.2,
            f"{dataset}: an iteration with one Sinkhorn iteration over POT's: "
            f"{row['over_POT']:.3f} (bar 0.2)",
        )
    for dataset, found in content["sets"].items():
        over = found["time_to_POT_over_time_of_POT"]
        say(
            over["above_one_quarter"] == 0 and not over["never_reached"],
            f"{dataset}: time to POT's end over POT's time: median {over['median']:.3f}, largest "
            f"{over['largest']:.3f} (bar 0.25); never reached on {len(over['never_reached'])}",
        )
        for method, bar in ((OURS, 0.5), (SAME_START, 0.5), (RESTARTED, 0.1)):
            gap = found["methods"][method]["mean_gap_percent"]
            say(gap < bar, f"{dataset}: {method}: mean gap {gap:.4f} % (bar {bar} %)")
        own = found["methods"][OURS]
        say(
            own["largest_processor_seconds"] < 2.0,
            f"{dataset}: default call: median {own['median_processor_seconds']:.2f} s, largest "
            f"{own['largest_processor_seconds']:.2f} s of processor time (bar 2 s)",
        )
        failed = sum(found["methods"][name]["failed"] for name in (OURS, SAME_START, RESTARTED))
        say(failed == 0, f"{dataset}: failures of ours: {failed} (bar 0)")
    return lines


def table(found: dict[str, Any]) -> str:
    header = ["Method", "Pairs", "Failed", "Mean gap %", "Median", "Largest", "CPU s", "Largest"]
    rows = []
    for method, row in found["methods"].items():
        gaps = [row[f"{kind}_gap_percent"] for kind in ("mean", "median", "largest")]
        rows.append(
            [
                method,
                str(row["pairs"]),
                str(row["failed"]),
                *("-" if gap is None else f"{gap:.3f}" for gap in gaps),
                f"{row['median_processor_seconds']:.2f}",
                f"{row['largest_processor_seconds']:.2f}",
            ]
        )
    return markdown_table(header, rows)


def iteration_table(content: dict[str, Any]) -> str:
    """One iteration of POT's function and of ours, by data set."""
    rows = []
    for dataset, methods in content["iteration"].items():
        for method, row in methods.items():
            low, high = row["quartiles"]
            rows.append(
                [
                    f"{TIMED[dataset]}, {method}",
                    f"{row['ms_per_iteration']:.2f}",
                    f"{low:.2f} - {high:.2f}",
                    f"{row['over_POT']:.3f}",
                ]
            )
    return markdown_table(["Pair, method", "ms", "Quartiles", "Over POT"], rows)


def transport_table(content: dict[str, Any]) -> str:
    """One transport from nothing: POT's solvers and ours."""
    rows = []
    for pair, methods in content["transport"].items():
        for method, row in methods.items():
            error = row.get("marginal_error")
            rows.append(
                [
                    f"{pair}, {method}",
                    f"{1e3 * row['processor_seconds']:.1f}",
                    "-" if error is None else f"{error:.0e}",
                    f"{row['cost']:.6g}",
                ]
            )
    return markdown_table(["One transport", "CPU ms", "Marginal error", "Cost"], rows)


# ---- main ----


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--limit", type=int, help="only the first pairs of each set")
    parser.add_argument("--authors", type=Path, help="a checkout of the code of Lin et al. (2020)")
    parser.add_argument("--authors-every", type=int, default=3, help="of so many pairs, one")
    parser.add_argument("--rounds", type=int, default=9, help="of the timing of iterations")
    parser.add_argument(
        "--store",
        type=Path,
        default=Path("runs") / "prw" / "pairs.json",
        help="where pairs that are done are kept",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "prw.json")
    return parser.parse_args(argv)


def fill(store: Store, sets: dict[str, list[Pair]], arguments: argparse.Namespace) -> None:
    """Do what is missing: references of all pairs, rates, contests, the authors' code."""
    for dataset, pairs in sets.items():
        wanted = [
            pair
            for number, pair in enumerate(pairs)
            if arguments.limit is None
            or number < arguments.limit
            or pair.name in TUNING_PAIRS[dataset]
        ]
        found = store.get("reference", dataset)
        for pair in tqdm([p for p in wanted if p.name not in found], desc=f"{dataset}: reference"):
            found[pair.name] = reference(pair)
            store.save()
        tune(pairs, dataset, store)
    for dataset, pairs in sets.items():
        chosen, tuned = pairs[: arguments.limit], store.get("tuned", dataset)
        found = store.get("contest", dataset)
        for pair in tqdm([p for p in chosen if p.name not in found], desc=f"{dataset}: contest"):
            found[pair.name] = contest(pair, dataset, tuned)
            store.save()
    for dataset, pairs in sets.items():
        chosen, tuned = (
            pairs[: arguments.limit : arguments.authors_every],
            store.get("tuned", dataset),
        )
        found = store.get("authors", dataset)
        if arguments.authors is None:
            continue
        for pair in tqdm([p for p in chosen if p.name not in found], desc=f"{dataset}: authors"):
            found[pair.name] = contest_of_authors(pair, dataset, tuned, arguments.authors)
            store.save()


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the store, then print tables and bars; the exit status is 1 if a bar is missed."""
    arguments = parse(argv)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit("OMP_NUM_THREADS must be 1, so that everybody has one thread; export it")
    torch.set_num_threads(1)
    store = Store(arguments.store)
    sets = {name: load_pairs(name, arguments.data_dir) for name in arguments.sets}
    timed = {
        name: next(pair for pair in pairs if pair.name == TIMED[name])
        for name, pairs in sets.items()
    }
    for pair in timed.values():
        pair.solve(max_iter=3)  # the first optimizer of a process imports torch's compiler
        run_pot(pair, 1e-9, (1,))
    fill(store, sets, arguments)
    measured = store.get("single")
    for dataset, pair in timed.items():
        if dataset not in measured:
            measured[dataset] = {
                "iteration": time_iterations({dataset: pair}, arguments.rounds)[dataset],
                "transport": compare_transport({dataset: pair}),
            }
            store.save()
    summaries = {dataset: summarize(store, dataset) for dataset in sets}
    content: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "threads": 1,
        "iterations_of_fixed_rates": ITERATIONS,
        "published_rates": RATES,
        "tuned_rates": store.get("tuned"),
        "tuning_gap_percent": store.get("tuning"),
        "iteration": {dataset: measured[dataset]["iteration"] for dataset in sets},
        "transport": {k: v for name in sets for k, v in measured[name]["transport"].items()},
        "sets": summaries,
    }
    content["machine"]["versions"]["pot"] = version("pot")
    content["bars"] = bars(content)
    content["tables"] = {
        **{dataset: table(found) for dataset, found in summaries.items()},
        "iteration": iteration_table(content),
        "transport": transport_table(content),
    }
    write_json(arguments.output, content)
    figures.prw(arguments.output.with_suffix(".png"))
    if "shakespeare" in sets:
        figures.prw_plays(arguments.output.with_name(f"{arguments.output.stem}_plays.png"))
    for dataset, found in summaries.items():
        print(f"\n{len(found['pairs'].split())} pairs of {TITLES[dataset]}\n\n{table(found)}")
    print("\n" + "\n".join(content["bars"]))
    return 0 if all(line.startswith("PASS") for line in content["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
