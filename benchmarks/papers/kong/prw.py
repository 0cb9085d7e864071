"""Projection-robust Wasserstein distances: digits of MNIST and plays of Shakespeare, all pairs.

    export OMP_NUM_THREADS=1
    python -m benchmarks.papers.kong.prw --data-dir DIR --output prw.json  # resumes pair by pair

DIR holds mnist_features.npz (digit_0 ... digit_9: points x 128) and shakespeare_w2v.npz (for each
play NAME_x: words x 200 and NAME_w: their weights). The reference of a pair is the best objective
of ten initialisations of our own solver at relative gradient 1e-6. Beside it the learning rate that
suits the solver of POT: a multiple of the published one, by four pairs of digits and three of
plays, 50 steps from one random initialisation each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common import figures
from benchmarks.common.harness import RESULTS, machine, one_thread, write_json
from benchmarks.papers.kong.prw_contestants import (
    ITERATIONS,
    RATES,
    TITLES,
    Pair,
    load_pairs,
    pot_objective,
)

STARTS = 10
TOL = 1e-6
MULTIPLES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
TUNING_PAIRS = {
    "mnist": ("0-1", "2-3", "4-9", "6-7"),
    "shakespeare": ("H5-Ham", "H5-JC", "Oth-Rom"),
}


def reference(pair: Pair) -> float:
    """The best of ten initialisations: the default one and nine random ones."""
    starts = [None, *(pair.start(number) for number in range(STARTS - 1))]
    return max(pair.solve(init=start, tol=TOL, max_iter=2000).objective for start in starts)


def tune(pairs: Sequence[Pair], rate: float, best: Mapping[str, float]) -> dict[str, float]:
    """Mean gaps in per cent that POT's solver leaves at multiples of a learning rate."""
    gaps = {}
    for multiple in tqdm(MULTIPLES, desc="learning rates of POT"):
        lr = multiple * rate
        reached = [pot_objective(pair, lr, ITERATIONS, pair.start()) for pair in pairs]
        mean = float(np.mean([r / best[p.name] for r, p in zip(reached, pairs, strict=True)]))
        gaps[f"{lr:g}"] = 100 * (1 - mean) if np.isfinite(mean) else 100.0
    return gaps


def main(argv: Sequence[str] | None = None) -> None:
    """Do what is missing; draw the distances of the plays."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=RESULTS / "prw.json")
    arguments = parser.parse_args(argv)
    one_thread()
    path = arguments.output
    content: dict[str, Any] = {"steps": ITERATIONS}
    if path.exists():
        content = json.loads(path.read_text())
    for key in ("tuned_rates", "tuning_gap_percent", "sets"):
        content.setdefault(key, {})
    for dataset in TITLES:
        pairs = load_pairs(dataset, arguments.data_dir)
        known = content["sets"].setdefault(dataset, {"pairs": "", "reference": ""})
        values = map(float, known["reference"].split())
        best = dict(zip(known["pairs"].split(), values, strict=True))
        for pair in tqdm([p for p in pairs if p.name not in best], desc=TITLES[dataset]):
            best[pair.name] = reference(pair)
            known["pairs"] = " ".join(best)
            known["reference"] = " ".join(f"{value:.8g}" for value in best.values())
            write_json(path, content | {"machine": machine(packages=["pot"])})
        if dataset not in content["tuned_rates"]:
            selected = [pair for pair in pairs if pair.name in TUNING_PAIRS[dataset]]
            gaps = tune(selected, RATES[dataset]["POT"], best)
            content["tuning_gap_percent"][dataset] = {"POT": gaps}
            content["tuned_rates"][dataset] = {"POT": float(min(gaps, key=gaps.__getitem__))}
            write_json(path, content | {"machine": machine(packages=["pot"])})
    figures.prw_plays(path.with_name(f"{path.stem}_plays.png"))


if __name__ == "__main__":
    main()
