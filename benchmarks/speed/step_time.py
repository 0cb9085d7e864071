"""How long one `optimizer.step()` takes, against the rivals and against the bare arithmetic.

Whole steps are timed with the gradients already in place, everything in float32, and every
contestant gets its parameters as a model would hold them: what are separate parameters here are
separate parameters there. Rivals get the shape that suits them best (POGO: a leading batch
dimension and wide matrices; geoopt: tall ones; heads as a batch). The floor below everybody is
six bare products of the same shape (one ``torch.bmm`` over all matrices, into a buffer kept from
before), what a step costs on paper.

**What a step is here.** The gradient G is Gaussian and changes its sign after every step, outside
the timed region: it keeps its size. A velocity that nothing projects would settle at |G|/(1 + mu)
with momentum mu, and G and lr are scaled so that this times lr has the largest singular value
`STEP_SIZE` = 0.1; lr of the Adams is that of a direction (1 - b1)/(1 + b1) times the sign matrix
of G. The steps themselves differ and shrink, as every point turns until little of G is tangent. At
384 x 32 the largest singular value of a step, after 30, 100 and 300 steps: StiefelSGD 0.06, 0.04,
below 0.0001; StiefelAdam 0.04, 0.02, 0.01; POGO 0.03 throughout; geoopt's SGD 0.02, 0.002, below
0.0001, its Adam 0.0009 throughout.

    python -m benchmarks.speed.step_time                     # everything, about ten minutes

Every contestant's orthonormality error (max |X'X - I|, evaluated in float64 after the timing) and
the peak temporary memory of one of its steps stand beside its time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is chatty otherwise

import torch

from benchmarks.common import harness
from benchmarks.speed import contestants as known
from benchmarks.speed.contestants import ADAM, POGO, SGD, SIX, Row

ROWS = (
    Row("separate-384x32", 168, 1, 384, 32),
    Row("heads-384x384", 14, 12, 384, 32, heads=True),
    Row("one-4096x512", 1, 1, 4096, 512),
    Row("one-2048x256", 1, 1, 2048, 256),
    Row("one-30000x50", 1, 1, 30000, 50),
    Row("one-1024x1024", 1, 1, 1024, 1024),
    Row("batch-2000x16x16", 1, 2000, 16, 16),
    Row("separate-16x16", 2000, 1, 16, 16),
    Row("latency-128x2", 1, 1, 128, 2),
)
SETTLING = 30  # steps before the first timed one; 0.9^30 is 0.04


def measure(
    row: Row, rounds: int, device: torch.device, memory: dict[str, harness.StepMemory]
) -> dict[str, Any]:
    """Time one row and return all of it for the JSON file.

    ``memory`` does not depend on the number of threads; it is filled at the first time.
    """
    entries = [*known.ours(row, device), *known.rivals(row, device)]
    for entry in entries:  # the first steps are the longest: Adam's is 20 times those that follow
        for _ in range(SETTLING):
            entry.contestant.prepare()
            entry.contestant.call()
    contestants = [*(entry.contestant for entry in entries), known.products(row, device)]
    timings = harness.interleave(contestants, rounds=rounds, device=device)
    size = row.matrices * row.n * row.m * torch.float32.itemsize
    for entry in entries if not memory else ():
        one = entry.contestant
        memory[one.name] = harness.step_memory(one.call, device, one.prepare)
    errors = {e.contestant.name: harness.orthonormality_error(e.matrices()) for e in entries}
    record = {}
    for contestant in contestants:
        name = contestant.name
        record[name] = {
            **timings.summary(name),
            "repetitions": contestant.repetitions,
            "over_products": timings.ratio(name, SIX),
            "over_sgd": timings.ratio(name, SGD),
            "orthonormality_error": errors.get(name),
            "temporary_bytes": memory[name].peak if name in memory else None,
            "temporaries_over_parameters": memory[name].peak / size if name in memory else None,
        }
        print(f"{row.label}, {name}: {record[name]['median_ms']:.3f} ms", flush=True)
    return {"label": row.label, "threads": torch.get_num_threads(), "contestants": record}


def summary(results: Sequence[dict[str, Any]]) -> str:
    """One line for each row: our two optimizers beside the rivals that count."""
    names, lines = (SGD, ADAM, POGO, known.GEOOPT_SGD, known.GEOOPT_ADAM), []
    for result in results:
        found = result["contestants"]
        sgd, adam = found[SGD], found[ADAM]
        line = [result["label"], *(f"{found[name]['median_ms']:.2f}" for name in names)]
        line.append(f"{sgd['over_products']:.2f}")
        for other, key, form in (
            (found[POGO], "orthonormality_error", ".0e"),
            (adam, "temporaries_over_parameters", ".1f"),
        ):
            line.append(f"{sgd[key]:{form}} / {other[key]:{form}}")
        lines.append(line)
    header = ("ms a step", *names, "StiefelSGD / six products")
    header = (*header, "error, ours / POGO", "temporaries, SGD / Adam")
    return harness.markdown_table(header, lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen rows, print and write."""
    parser, names = harness.flags(__doc__, "step_time", 9, [2, 1]), [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    arguments = parser.parse_args(argv)
    about = harness.machine(arguments.device)
    print(f"{about['processor']}, {about['cores']} cores, on {about['device_name']}")
    began, results = time.perf_counter(), []
    memory: dict[str, dict[str, harness.StepMemory]] = {row.name: {} for row in ROWS}
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for row in ROWS:
            if row.name in arguments.rows:
                measured = measure(row, arguments.rounds, arguments.device, memory[row.name])
                results.append({"row": row.name, **measured})
    settings = {"dtype": "float32", "rounds": arguments.rounds, "momentum": known.MOMENTUM}
    settings |= {"betas": known.BETAS, "step_size": known.STEP_SIZE}
    tables = {
        f"{threads} threads": summary([r for r in results if r["threads"] == threads])
        for threads in arguments.threads
    }
    for name, text in tables.items():
        print(f"\n{name}\n{text}")
    content = {"machine": about, "settings": settings, "tables": tables, "results": results}
    harness.write_json(arguments.output, content)
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes in all.")


if __name__ == "__main__":
    main()
