"""Optimizers side by side on problems that nobody tuned, by benchopt.

    pip install benchopt geoopt pymanopt pogo-torch scikit-learn
    export OMP_NUM_THREADS=1
    python -m benchmarks.benchopt_stiefel.run         # resumes; two problems at a time
    benchopt run benchmarks/benchopt_stiefel             # any other selection, with its plots

Every method has the same initialisations and batches, momentum 0.9 and the same number of steps.
The learning rate is chosen by how five runs end, so that its neighbours, a half decade away, are
worse (CayleyAdam on ICA has the largest): those that miss the target count first, then the mean of
steps or values. Five other seeds are shown, by their median.
One table compares packages, the other the options of StiefelSGD and StiefelAdam; all StiefelAdam
here have radius=1.0, nesterov=False.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.benchopt_stiefel.benchmark_utils import FIRST, RATES
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2, 3, 4, 5)
JOBS = 2  # problems at a time
CHOOSING = (0, 6, 7, 8, 9)  # the seeds of the rates, not shown
# How the table shows a problem: steps to a gap of 1e-6, the gap that is left of that at the start,
# excess over the best value, or the loss.
PROBLEMS = {
    "PCA": ("PCA[weighted=False", "steps"),
    "PCA, weighted": ("PCA[weighted=True", "steps"),
    "Procrustes": ("Procrustes[", "gap"),
    "Joint diagonalisation": ("Joint diagonalisation[", "steps"),
    "ICA": ("ICA[", "excess"),
    "Dictionary": ("Dictionary[", "excess"),
    "PRW": ("PRW[", "excess"),
    "MLP, all": ("Digits[network=all", "loss"),
    "MLP, hidden": ("Digits[network=hidden", "loss"),
    "RNN": ("Digits[network=recurrent", "loss"),
}


class Solver(NamedTuple):
    """How benchopt is asked for one method."""

    name: str
    options: str = ""

    @property
    def key(self) -> str:
        """Under which its runs are kept."""
        return f"{self.name},{self.options}"


def ours(method: str, **options: Any) -> Solver:
    chosen = {"method": method} | options
    return Solver("stiefel-opt", ",".join(f"{key}={value}" for key, value in chosen.items()))


KINDS = list(product(("canonical", "euclidean"), ("isometric", "projected")))
AHEAD = {"": False, ", Nesterov": True}
VARIANTS = {
    f"StiefelSGD, {metric}, {transport}{end}": ours(
        "StiefelSGD", metric=metric, transport=transport, nesterov=nesterov
    )
    for (metric, transport), (end, nesterov) in product(KINDS, AHEAD.items())
} | {
    f"StiefelAdam, {metric}, {transport}": ours("StiefelAdam", metric=metric, transport=transport)
    for metric, transport in KINDS
}
PACKAGES = {
    "StiefelSGD": VARIANTS["StiefelSGD, canonical, isometric"],
    "StiefelSGD, Nesterov": VARIANTS["StiefelSGD, canonical, isometric, Nesterov"],
    "StiefelSGD, Euclidean": VARIANTS["StiefelSGD, euclidean, isometric"],
    "StiefelSGD, published flows": ours("PublishedSGD"),
    "ProjectedRGD": ours("ProjectedRGD"),
    "ProjectedRGD, Nesterov": ours("ProjectedRGD", nesterov=True),
    "CayleySGD": ours("CayleySGD"),
    "CayleySGD, Nesterov": ours("CayleySGD", nesterov=True),
    "geoopt SGD": Solver("geoopt", "method=SGD"),
    "geoopt SGD, Nesterov": Solver("geoopt", "method=SGD,nesterov=True"),
    "geoopt SGD, canonical": Solver("geoopt", "method=SGD,metric=canonical"),
    "POGO, SGD": Solver("POGO"),
    "POGO, SGD, Nesterov": Solver("POGO", "nesterov=True"),
    "landing": Solver("landing"),
    "pymanopt CG": Solver("pymanopt CG"),
    "StiefelAdam": VARIANTS["StiefelAdam, canonical, isometric"],
    "StiefelAdam, Euclidean": VARIANTS["StiefelAdam, euclidean, isometric"],
    "StiefelAdam, published flows": ours("PublishedAdam"),
    "CayleyAdam": ours("CayleyAdam"),
    "geoopt Adam": Solver("geoopt", "method=Adam"),
}
TABLES = {"packages": PACKAGES, "variants": VARIANTS}
SEARCH = PACKAGES["pymanopt CG"]
NO_RATE = (math.nan,)  # of a line search
DEFAULTS = {
    "stiefel-opt": {"metric": "canonical", "transport": "isometric", "nesterov": "False"},
    "geoopt": {"metric": "euclidean", "nesterov": "False"},
    "POGO": {"nesterov": "False"},
}
Run = dict[str, float]
Runs = dict[str, dict[str, Run]]  # by solver, then by "rate seed"


def solve(problem: str, rates: Mapping[Solver, Sequence[float]], seeds: Sequence[int]) -> Runs:
    """Let benchopt run solvers at some learning rates on some seeds."""
    import pandas
    from benchopt import run_benchmark

    names = {}
    for solver, chosen in rates.items():
        rate = f"rate=[{','.join(map(str, chosen))}]" if solver != SEARCH else ""
        options = ",".join(filter(None, [solver.options, rate]))
        names[solver] = f"{solver.name}[{options}]" if options else solver.name
    dataset = PROBLEMS[problem][0]
    dataset += f"{'' if dataset.endswith('[') else ','}seed=[{','.join(map(str, seeds))}]]"
    file = run_benchmark(
        HERE, solver_names=list(names.values()), dataset_names=[dataset], plot_result=False,
        display=False, show_progress=False, no_cache=True,
        output_file=f"{problem}.parquet",  # jobs run side by side
    )  # fmt: skip
    found: Runs = {}
    for row in pandas.read_parquet(file).to_dict("records"):
        solver = next(solver for solver in rates if is_of(row, solver))
        key = key_of(row.get("p_solver_rate", math.nan), row["p_dataset_seed"])
        found.setdefault(solver.key, {})[key] = {
            name.removeprefix("objective_"): value
            for name, value in row.items()
            if name.startswith("objective_") and isinstance(value, (int, float))
        }
    return found


def key_of(rate: float, seed: int) -> str:
    """Under which a run is kept."""
    return f"{rate:g} {seed}"


def is_of(row: Mapping[str, Any], solver: Solver) -> bool:
    """Whether a row of benchopt's table is a run of this solver with these options."""
    given = filter(None, solver.options.split(","))
    wanted = dict(option.split("=") for option in given)
    for key, default in DEFAULTS.get(solver.name, {}).items():
        wanted.setdefault(key, default)
    same = all(str(row.get(f"p_solver_{key}")) == value for key, value in wanted.items())
    return row["solver_name"].split("[")[0] == solver.name and same


def score(run: Mapping[str, float]) -> tuple[float, float]:
    """Smaller is better: sooner at the target, then the lower value at the end."""
    value = run.get("value", math.nan)
    return run.get("reached", math.inf), value if math.isfinite(value) else math.inf


def fill(problem: str, folder: Path) -> Runs:
    """Rates at their seeds, the other seeds at the best of them; goes on with what is there."""
    path = folder / f"{problem}.json"
    known: Runs = json.loads(path.read_text()) if path.exists() else {}
    solvers = dict.fromkeys(solver for table in TABLES.values() for solver in table.values())
    noisy = PROBLEMS[problem][1] == "loss"
    chosen = [solver for solver in solvers if not noisy or solver != SEARCH]

    def run(rates: Mapping[Solver, Sequence[float]], seeds: Sequence[int]) -> bool:
        wanted = {
            solver: left
            for solver, some in rates.items()
            if (left := lacking(known.setdefault(solver.key, {}), some, seeds))
        }
        if wanted:
            for name, runs in solve(problem, wanted, seeds).items():
                known[name].update(runs)
            write_json(path, known, exact=True)  # read again it gives the same tables
            for solver, left in wanted.items():
                if lacking(known[solver.key], left, seeds):
                    raise RuntimeError(f"{problem}: benchopt has not run all of {solver}")
        return bool(wanted)

    run({s: NO_RATE if s == SEARCH else FIRST for s in chosen}, CHOOSING)
    while run({s: next_rates(known[s.key]) for s in chosen}, CHOOSING):
        pass
    run({s: (best_rate(known[s.key]),) for s in chosen}, SEEDS)
    print(f"{problem}: done", flush=True)
    return known


def lacking(
    runs: Mapping[str, Run], rates: Sequence[float], seeds: Sequence[int]
) -> tuple[float, ...]:
    """The learning rates that have not run at all of the seeds."""
    return tuple(r for r in rates if any(key_of(r, seed) not in runs for seed in seeds))


def end(runs: Mapping[str, Run], rate: float) -> tuple[int, float, float]:
    """How a learning rate ends: how many seeds miss the target, means of steps and of values."""
    ends = [score(runs[key_of(rate, seed)]) for seed in CHOOSING]
    arrived = [steps for steps, _ in ends if math.isfinite(steps)]
    steps = statistics.fmean(arrived) if arrived else math.inf
    return len(ends) - len(arrived), steps, statistics.fmean(value for _, value in ends)


def best_rate(runs: Mapping[str, Run]) -> float:
    tried = dict.fromkeys(float(key.split()[0]) for key in runs)
    tried = [rate for rate in tried if not lacking(runs, (rate,), CHOOSING)]
    return min(tried, key=lambda rate: end(runs, rate))


def shown(runs: Mapping[str, Run]) -> dict[str, Run]:
    """The runs at the best learning rate, without the seeds that chose it."""
    rate = best_rate(runs) if runs else math.nan
    keys = [key_of(rate, seed) for seed in SEEDS]
    return {key: runs[key] for key in keys if key in runs}


def next_rates(runs: Mapping[str, Run]) -> tuple[float, ...]:
    """The best learning rate and its neighbours."""
    best = best_rate(runs)
    if math.isnan(best):
        return NO_RATE
    place = RATES.index(best)
    return RATES[max(place - 1, 0) : place + 2]


def rows(store: dict[str, Runs], table: str) -> list[list[str]]:
    cells = {label: [label] for label in TABLES[table]}
    for problem in PROBLEMS:
        best = {}  # the lowest value of a seed, over all methods
        for runs in store[problem].values():
            for key, run in runs.items():
                seed = key.split()[1]
                best[seed] = min(best.get(seed, math.inf), score(run)[1])
        for label, solver in TABLES[table].items():
            runs = store[problem].get(solver.key, {})
            cells[label].append(cell(shown(runs), PROBLEMS[problem][1], best))
    return list(cells.values())


def cell(runs: Mapping[str, Run], kind: str, best: Mapping[str, float]) -> str:
    if not runs:
        return ""
    if kind == "steps":
        middle = statistics.median(run.get("reached", math.inf) for run in runs.values())
        return f"{middle:.0f}" if math.isfinite(middle) else "-"
    values = [score(run)[1] for run in runs.values()]
    if kind == "gap":
        values = [run.get("gap", math.inf) for run in runs.values()]
    if kind == "excess":
        lowest = [best[key.split()[1]] for key in runs]
        values = [
            100 * abs(value - low) / abs(low) for value, low in zip(values, lowest, strict=True)
        ]
    middle = statistics.median(values)
    form = ".1e" if 0 < middle < 1e-3 else ".3g"
    return f"{middle:{form}}" if math.isfinite(middle) else "-"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", type=Path, default=Path("runs") / "benchopt", help="a folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "optimizers.json")
    options = parser.parse_args(argv)
    one_thread()
    options.store.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(JOBS, get_context("spawn")) as pool:
        found = pool.map(partial(fill, folder=options.store), PROBLEMS)
        store = dict(zip(PROBLEMS, found, strict=True))
    units = {"steps": "steps", "gap": "gap left", "excess": "excess %", "loss": "loss"}
    header = ["Method", *(f"{p}: {units[PROBLEMS[p][1]]}" for p in PROBLEMS)]
    tables = {n: markdown_table(header, rows(store, n)) for n in TABLES}
    content: dict[str, Any] = {
        "machine": machine(packages=["benchopt"]),
        "rates": RATES,
        "seeds": SEEDS,
        "seeds_of_the_rates": CHOOSING,
        "tables": tables,
        "runs": {
            problem: {name: summary(runs) for name, runs in store[problem].items()}
            for problem in PROBLEMS
        },
    }
    write_json(options.output, content)
    print("\n\n".join(content["tables"].values()))
    return 0


def summary(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Rate and, for each shown seed, steps to the target or value, and the worst error."""
    found = shown(runs)
    finite = [score(run) for run in found.values()]
    return {
        "rate": next(iter(found), "- -").split()[0],
        "reached": [s if math.isfinite(s) else None for s, _ in finite],
        "value": [v if math.isfinite(v) else None for _, v in finite],
        "error": max((run.get("orthonormality_error", 0.0) for run in found.values()), default=0),
    }


if __name__ == "__main__":
    sys.exit(main())
