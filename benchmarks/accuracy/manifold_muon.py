"""The network of `examples/manifold_muon.py`, every run of it kept, with a table.

    python -m benchmarks.accuracy.manifold_muon cifar10.npz    # half an hour on one core
    python -m benchmarks.accuracy.manifold_muon                # digits, some minutes

Training loss after the last epoch, test accuracy and singular values at the learning rate with
the lowest training loss with the first seed, over three seeds. Time is that of the optimizer
alone, of steps taken apart from the trainings, methods in turn. A stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "manifold_muon.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", nargs="*", help="a file of CIFAR images; default: digits")
    parser.add_argument("--rounds", type=int, default=5, help="of the timing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    example = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    data = example.load(*arguments.images)
    name = "manifold_muon" if arguments.images else "manifold_muon_digits"
    file = RESULTS / f"{name}.json"
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    content["images"] = [len(data[0]), len(data[2])]
    runs = content["runs"]

    def once(method: str, rate: float, seed: int) -> list[float]:
        key = f"{method} {rate:g} {seed}"
        if key not in runs:
            runs[key] = example.train(data, method, rate, seed)
            write_json(file, content)
            print(key, runs[key], flush=True)
        found: list[float] = runs[key]
        return found

    best = {}
    for method in example.METHODS:
        rate = min(example.RATES, key=lambda rate: once(method, rate, 0)[0])
        best[method] = rate, [once(method, rate, seed) for seed in range(example.SEEDS)]
    milliseconds: dict[str, list[float]] = {method: [] for method in best}
    for _ in range(arguments.rounds):
        for method, (rate, _) in best.items():
            milliseconds[method].append(example.train(data, method, rate, 0, epochs=1)[-1])
    rows = []
    for method, (rate, found) in best.items():
        losses, right, low, high, _ = zip(*found, strict=True)
        row = [method, f"{rate:g}", f"{statistics.mean(losses):.4f}"]
        row += [f"{(max(losses) - min(losses)) / 2:.4f}", f"{100 * statistics.mean(right):.1f}"]
        row.append(f"{min(low):.3f} to {max(high):.3f}")
        rows.append([*row, f"{statistics.median(milliseconds[method]):.1f}"])
    header = ["", "learning rate", "training loss", "+-", "test (%)", "singular values"]
    header.append("ms a step")
    table = markdown_table(header, rows)
    content |= {"machine": machine(), "ms": milliseconds, "tables": [table]}
    write_json(file, content)
    print(table)


if __name__ == "__main__":
    main()
