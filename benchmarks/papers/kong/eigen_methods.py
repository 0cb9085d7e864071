"""Leading eigenvalues: which method reaches the exact sum first, and at what price?

Maximise tr(X'AX) over St(n, m), A = (Xi + Xi')/2/sqrt(n) with Gaussian Xi, in float64: figure 3
and table 5 of Kong, Wang & Tao (ICLR 2023). The maximum is the sum of the m largest eigenvalues. A
method has arrived when its relative gap is 1e-8 with |X'X - I| below that too.

Everybody is tuned on the same grid of learning rates and momenta, plain and Nesterov's: all
settings run on the first draw, the best four within `CLOSE` of the fewest iterations on all draws,
and the lowest median counts. A larger size tries what came within `KEPT` of the fewest before.
Then all methods run on all draws, in turns, three times if they arrive: the fastest of three
counts, and the median of the draws. Products end a run, not a clock.
Groups of methods:

    published    the published algorithms at the published rates, ours beside them        (table 5)
    methods      every optimizer here, geoopt, pogo-torch, pymanopt, lobpcg and eigsh  (figure 3)

The file also holds the groups "variants", "weighted", "retractions", "inner" and "scaling" of the
program at its ``commit``.

    export OMP_NUM_THREADS=1
    python -m benchmarks.papers.kong.eigen_methods  # some hours; resumes by group
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import figures
from benchmarks.common.harness import (
    RESULTS,
    machine,
    markdown_table,
    middle_and_range,
    one_thread,
    write_json,
)

try:
    from tqdm import tqdm

    from benchmarks.papers.kong.eigen_contestants import (
        ADAM_RATES,
        GROUPS,
        MOMENTA,
        SGD_RATES,
        STIEFEL_SGD,
        Method,
    )
    from benchmarks.papers.kong.eigen_problem import (
        TARGET,
        Limit,
        Options,
        Problem,
        Run,
        draw_problem,
    )
except ImportError as error:
    raise SystemExit(f"{error}; run: pip install geoopt pogo-torch tqdm") from error

SIZES = ((1000, 10), (2000, 50))
REPEATS = 3  # the fastest counts
CLOSE, KEPT, MOST_KEPT = 1.2, 1.5, 4
TUNING = Limit(1500)
MOST = Limit(3000)
COUNTED = Limit(6000)  # where only products count

Draw = tuple[Problem, Problem]  # as it is, and in the basis of the eigenvectors


def tune(
    method: Method, draws: Sequence[Draw], before: dict[str, Any], known: dict[str, Any]
) -> tuple[Options, dict[str, Any]]:
    """The setting with the lowest median iterations over the draws, and what was tried.

    ``before``: what was tried at a smaller size. ``known``: what has been tried at this one.
    """
    side = 0 if method.elementwise or method.kind != "torch" else 1
    settings = candidates(method, before)
    if len(settings) == 1:
        return settings[0], {}
    best, scores = min((count for count in known.values() if count), default=math.inf), []
    for setting in settings:
        if name(setting) in known and math.isfinite(best):
            scores.append((known[name(setting)] or math.inf, math.inf, setting))
            continue
        limit = Limit(min(TUNING.iterations, CLOSE * best))
        run = method.run(draws[0][side], setting, limit)
        cost = run.time if method.kind == "eigensolver" else run.iterations
        best = min(best, cost)
        scores.append((cost, run.final_gap, setting))
    scores.sort(key=lambda score: score[:2])
    close = [score for score in scores if score[0] <= CLOSE * best][:MOST_KEPT]
    chosen = close[0] if close else scores[0]
    if math.isfinite(best) and len(close) > 1:
        medians = []
        for cost, _, setting in close:
            others = [method.run(draw[side], setting, MOST) for draw in draws[1:]]
            costs = [run.time if method.kind == "eigensolver" else run.iterations for run in others]
            medians.append((statistics.median([cost, *costs]), setting))
        chosen = (0.0, 0.0, min(medians, key=lambda pair: pair[0])[1])
    tried = {name(setting): cost if math.isfinite(cost) else None for cost, _, setting in scores}
    return chosen[2], tried


def candidates(method: Method, before: dict[str, Any]) -> list[dict[str, Any]]:
    """All settings, or those that came within `KEPT` of the best ``before``."""
    counts = [count for count in before.values() if count is not None]
    if not counts:
        return method.settings
    most = KEPT * min(counts)
    return [s for s in method.settings if (before.get(name(s)) or math.inf) <= most]


def name(options: Options) -> str:
    """Momentum, N for Nesterov's, betas."""
    parts = []
    for key, value in options.items():
        if key == "betas":
            parts.append(f"{value[0]:g}/{value[1]:g}")
        elif key == "nesterov":
            parts += ["N"] if value else []
        else:
            parts.append(f"{value:g}")
    return " ".join(parts)


def compete(
    methods: Sequence[Method], settings: dict[str, Options], draws: Sequence[Draw], label: str,
    limit: Limit,
) -> dict[str, list[Run]]:  # fmt: skip
    """Run all methods on every draw, in an order that rotates; the fastest repeat counts."""
    runs: dict[str, list[Run]] = {method.name: [] for method in methods}
    for number, (problem, _) in enumerate(tqdm(draws, desc=f"{label}: draws")):
        found: dict[str, list[Run]] = {method.name: [] for method in methods}
        for repeat in range(REPEATS):
            shift = (number + repeat) % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                earlier = found[method.name]
                if repeat == 0 or earlier[0].reached:
                    earlier.append(method.run(problem, settings[method.name], limit))
        for method in methods:
            runs[method.name].append(min(found[method.name], key=lambda run: run.time))
    return runs


def count(
    methods: Sequence[Method], settings: dict[str, Options], draws: Sequence[Draw]
) -> dict[str, list[Run]]:
    """Run all methods on every draw, in the cheaper basis where iterations are the same there."""
    return {
        method.name: [
            method.run(draw[0 if method.elementwise else 1], settings[method.name], COUNTED)
            for draw in draws
        ]
        for method in methods
    }


def table(
    methods: Sequence[Method], settings: dict[str, Options], runs: dict[str, list[Run]]
) -> str:
    lines = []
    ours = runs[STIEFEL_SGD.name]
    for method in methods:
        own = runs[method.name]
        pairs = zip(own, ours, strict=True)
        ratio = statistics.median(run.time / mine.time for run, mine in pairs if mine.reached)
        direct = method.kind == "eigensolver"
        lines.append([
            method.name,
            name(settings[method.name]) or "-",
            f"{sum(run.reached for run in own)}/{len(own)}",
            "-" if direct else middle_and_range([run.iterations for run in own], ".0f"),
            middle_and_range([run.time for run in own], ".3g"),
            f"{ratio:.2f}",
            f"{statistics.median(run.final_gap for run in own):.0e}",
            f"{max(run.error for run in own):.0e}",
        ])  # fmt: skip
    header = (
        "Method", "Setting", "Arrived", "Products with A", "Seconds", "Seconds / StiefelSGD",
        "Final gap", "Orthonormality",
    )  # fmt: skip
    return markdown_table(header, lines)


def record(settings: dict[str, Options], tried: Any, runs: dict[str, list[Run]]) -> dict[str, Any]:
    return {
        method: {
            "setting": settings[method],
            "tried_on_first_draw": tried[method],
            "iterations": [run.iterations if run.reached else None for run in own],
            "seconds": [run.time if run.reached else None for run in own],
            "final_gap": [run.final_gap if math.isfinite(run.final_gap) else None for run in own],
            "orthonormality_error": [run.error for run in own],
        }
        for method, own in runs.items()
    }


def solve_group(
    group: str, n: int, m: int, draws: Sequence[Draw], content: dict[str, Any], folder: Path
) -> None:
    """Tune unless that has been done, run, and write table, record and plot."""
    label = f"{n} x {m}, {group}"
    methods = GROUPS[group]
    tuned = content["tuned"].setdefault(label, {})
    for method in tqdm(methods, desc=f"{label}: settings"):
        small = content["tuned"].get(f"{SIZES[0][0]} x {SIZES[0][1]}, {group}", {})
        before = small.get(method.name, ({}, {}))[1] if small is not tuned else {}
        known = tuned.get(method.name, ({}, {}))[1]
        missing = any(name(s) not in known for s in candidates(method, before))
        if method.name not in tuned or (known and missing):
            tuned[method.name] = tune(method, draws, before, known)
            write_json(folder, content)
    settings = {method.name: tuned[method.name][0] for method in methods}
    if group == "published":
        runs = count(methods, settings, draws)
    else:
        runs = compete(methods, settings, draws, label, MOST)
    text = table(methods, settings, runs)
    print(f"\n{label}\n{text}\n", flush=True)
    content["tables"][label] = text
    tried = {method.name: tuned[method.name][1] for method in methods}
    content["results"][label] = record(settings, tried, runs)


def size(text: str) -> tuple[int, int]:
    n, m = (int(part) for part in text.split(","))
    return n, m


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES, help="n,m ...")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--again", action="store_true", help="also what has been done")
    parser.add_argument("--output", type=Path, default=RESULTS / "eigen_methods.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Do what is missing."""
    arguments = parse(argv)
    one_thread()
    path = arguments.output
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for key in ("tuned", "tables", "results"):
        content.setdefault(key, {})
    content["settings"] = {
        "dtype": "float64", "target": TARGET, "threads": 1, "draws": arguments.draws,
        "repeats": REPEATS, "rates": SGD_RATES, "rates_of_adams": ADAM_RATES,
        "momenta": MOMENTA, "betas_2": [0.999, 0.99], "limit": MOST.iterations,
        "counted": COUNTED.iterations,
    }  # fmt: skip
    for (rows, columns), group in itertools.product(arguments.sizes, arguments.groups):
        again = group == "published" and (rows, columns) != arguments.sizes[0]
        if not again and (
            f"{rows} x {columns}, {group}" not in content["results"] or arguments.again
        ):
            draws = [draw_problem(rows, columns, number) for number in range(arguments.draws)]
            content["machine"] = machine()
            solve_group(group, rows, columns, draws, content, path)
            write_json(path, content)
            if group == "methods":
                figures.eigen_methods(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
