"""The solver of POT beside ours from equal initialisations: all pairs of digits and of plays.

    export OMP_NUM_THREADS=1
    python -m benchmarks.papers.kong.prw_pot --data-dir DIR  # half an hour; resumes pair by pair
    python -m benchmarks.papers.kong.prw_pot --data-dir DIR --minutes 4

POT's `ot.dr.projection_robust_wasserstein` (Huang, Ma & Lai, 2021) makes 500 iterations, at the
learning rate that `prw` tuned for it; its seconds are ten times those of 50, as each does the same.
Ours is the default call: it stops where the relative gradient is 1e-4; with `restarts=3` it adds
two random initialisations. All begin at the same random projection. Projections are scored by the
objective under a converged plan, gaps are (reference - objective) / reference, and the reference is
the best known. A pair is behind if its objective is below that of POT by more than 1e-4 of it.
Seconds are of the processor; the scoring is not in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json
from benchmarks.papers.kong.prw_contestants import (
    TITLES,
    Pair,
    load_pairs,
    pot_objective,
    pot_run,
    references,
)

STEPS, TIMED, LEVEL = 500, 50, 1e-4
RIVAL = f"POT, {STEPS} steps"
SOLVERS: Mapping[str, Callable[[Pair], so.ot.PRWResult]] = {
    "ours": lambda pair: pair.solve(init=pair.start()),
    "ours, `restarts=3`": lambda pair: pair.solve(init=pair.start(), restarts=3, seed=0),
}


def run(pair: Pair, rate: float, known: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Objective and seconds of every solver; that of POT if it is not known, NaN where it fails."""
    start = pair.start()
    reached = known[RIVAL][0] if known else pot_objective(pair, rate, STEPS, start)
    _, seconds = timed(partial(pot_run, pair, rate, TIMED, start))
    found = {RIVAL: [reached, seconds * STEPS / TIMED]}
    for name, solver in SOLVERS.items():
        result, seconds = timed(partial(solver, pair))
        found[name] = [pair.objective(result.projection), seconds]
    return found


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its seconds; what has not converged is scored as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.process_time()
        result = call()
        return result, time.process_time() - began


def row(
    name: str, found: Sequence[Mapping[str, Sequence[float]]], best: Sequence[float]
) -> list[str]:
    """One solver over all pairs of one data set."""
    gaps = [1 - own[name][0] / top for own, top in zip(found, best, strict=True)]
    behind = [1 - own[name][0] / own[RIVAL][0] for own in found]
    seconds = [own[name][1] for own in found]
    shares = [own[name][1] / own[RIVAL][1] for own in found]
    return [
        name,
        f"{100 * max(statistics.mean(gaps), 0.0):.4f}",  # the file keeps six digits
        f"{100 * max(gaps):.2f}",
        "-" if name == RIVAL else str(sum(gap > LEVEL for gap in behind)),
        "-" if name == RIVAL else str(sum(gap < -LEVEL for gap in behind)),
        f"{statistics.median(seconds):.1f}",
        f"{statistics.median(shares):.2f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Do the pairs that are missing, then write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=RESULTS / "prw_pot.json")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no pair later")
    arguments = parser.parse_args(argv)
    one_thread()
    path, end = arguments.output, time.monotonic() + 60 * arguments.minutes
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    tuned = json.loads((RESULTS / "prw.json").read_text())["tuned_rates"]
    rates = {name: tuned[name]["POT"] for name in TITLES}
    rows = []
    for dataset, title in TITLES.items():
        best, found = references(dataset), runs.setdefault(dataset, {})
        for pair in tqdm(load_pairs(dataset, arguments.data_dir), desc=title, mininterval=30):
            known = found.get(pair.name, {})
            if len(known) <= len(SOLVERS) and time.monotonic() < end:
                found[pair.name] = run(pair, rates[dataset], known)
                content = {"machine": machine(packages=["pot"]), "rates": rates, "runs": runs}
                write_json(path, content)
        done = {name: each for name, each in found.items() if len(each) > 1}
        label, tops = f"{len(done)} of {title.split()[-1]}", [best[name] for name in done]
        solvers = (RIVAL, *SOLVERS) if done else ()
        rows += [[label, *row(name, list(done.values()), tops)] for name in solvers]
    header = ["Pairs", "Solver", "Gap %", "Largest %", "Behind", "Ahead", "Seconds", "Of POT's"]
    table = markdown_table(header, rows)
    write_json(path, json.loads(path.read_text()) | {"tables": {"pairs": table}})
    print(table)


if __name__ == "__main__":
    main()
