"""What options add to the time of a step: ratios within rounds.

    python -m benchmarks.speed.step_options --threads 1

Gradients of step_time.py and, but for adaptive steps, its learning rates, float32: steps shrink, at
each option differently. The ratio is that of one round, in which all contestants step in turn;
printed are its median and, in brackets, its quartiles. The rule of learning_rates.py allows a
tenth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common.harness import (
    PRINTED,
    Timings,
    flags,
    interleave,
    machine,
    markdown_table,
    orthonormality_error,
    write_json,
)
from benchmarks.speed.contestants import LR, Row, adam_lr, enter, single, stacked_heads, tall_batch

ROWS = (
    Row("many separate", 168, 1, 384, 32),
    Row("heads", 14, 12, 384, 32, heads=True),
    Row("tall", 1, 1, 4096, 512),
    Row("square", 1, 1, 512, 512),
    Row("tiny", 1, 1, 128, 2),
)
PAIRS = {  # the step with the option, and without
    "virtual radius": ("StiefelAdam, nesterov=False", "StiefelAdam, as printed"),
    "Nesterov": ("StiefelAdam", "StiefelAdam, nesterov=False"),
    "Nesterov, SGD": ("StiefelSGD, Nesterov", "StiefelSGD"),
    "adaptive Adam": ("StiefelAdam, adaptive", "StiefelAdam"),
    "adaptive": ("StiefelSGD, adaptive", "StiefelSGD"),
    "adaptive, projected": ("StiefelSGD, adaptive, projected", "StiefelSGD, projected"),
}


def rules(row: Row) -> dict[str, Callable[[list[Tensor]], Any]]:
    adam = partial(so.StiefelAdam, lr=adam_lr(row))
    sgd, adaptive = partial(so.StiefelSGD, lr=LR), partial(so.AdaptiveSGD, lr=0.1)
    return {
        "StiefelAdam": adam,
        "StiefelAdam, nesterov=False": partial(adam, nesterov=False),
        "StiefelAdam, adaptive": partial(so.AdaptiveAdam, lr=LR, transport="projected"),
        "StiefelAdam, as printed": partial(PRINTED, lr=adam_lr(row)),
        "StiefelSGD": sgd,
        "StiefelSGD, Nesterov": partial(sgd, nesterov=True),
        "StiefelSGD, projected": partial(sgd, transport="projected"),
        "StiefelSGD, adaptive": adaptive,
        "StiefelSGD, adaptive, projected": partial(adaptive, transport="projected"),
    }


def timed(row: Row, rounds: int, device: torch.device) -> tuple[Timings, float]:
    """Time all rules in turn; return the largest orthonormality error, too."""
    manifold = so.Stiefel(heads=row.batch) if row.heads else so.Stiefel()
    layout = stacked_heads if row.heads else tall_batch if row.batch > 1 else single
    tag = partial(so.ManifoldParameter, manifold=manifold)
    entries = [enter(name, row, device, layout, tag, rule) for name, rule in rules(row).items()]
    timings = interleave([entry.contestant for entry in entries], rounds=rounds, device=device)
    return timings, max(orthonormality_error(entry.matrices()) for entry in entries)


def ratio(timings: Timings, *names: str) -> list[float]:
    """Return the quartiles of the ratio within rounds, the median second."""
    low, high = timings.ratio_quartiles(*names)
    return [low, timings.ratio(*names), high]


def main(argv: list[str] | None = None) -> int:
    options = flags(__doc__, "step_options", rounds=21).parse_args(argv)
    torch.set_num_threads(options.threads)
    ratios: dict[str, dict[str, list[float]]] = {}
    rows = []
    for row in ROWS:
        timings, error = timed(row, options.rounds, options.device)
        found = {name: ratio(timings, *pair) for name, pair in PAIRS.items()}
        ratios[row.label] = found
        cells = [f"{middle:.2f} ({low:.2f} - {high:.2f})" for low, middle, high in found.values()]
        rows.append([row.label, *cells, f"{error:.0e}"])
        print(*rows[-1], sep="   ", flush=True)
    table = markdown_table(["time of a step with / without", *PAIRS, "largest error"], rows)
    content = {"machine": machine(options.device), "rounds": options.rounds, "ratios": ratios}
    write_json(options.output, content | {"tables": [table]})
    print(f"\n{table}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
