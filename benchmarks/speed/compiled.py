"""What `torch.compile` gains for the optimizer's step on a CPU, and what it costs to get it.

The rows of `step_time.py`: the same parameters and gradients, eager steps and steps of one compiled
graph (`torch.compile(optimizer.step, fullgraph=True)`, torch's default backend) in turns. The bits
are the same: the step is one operation of the graph, in which the eager step runs.

    python -m benchmarks.speed.compiled                                  # about six minutes
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.speed.contestants import ADAM, SGD, Entry, Row, ours
from benchmarks.speed.step_time import ROWS

DEFAULT = ("latency-128x2", "heads-384x384", "one-2048x256", "batch-2000x16x16")
EAGER_STEPS = 2  # they make the state, which a graph needs


def compiled(entry: Entry) -> tuple[harness.Contestant, float]:
    """The step of ``entry`` as one graph, and the seconds that its first call took."""
    for _ in range(EAGER_STEPS):
        entry.contestant.call()
        entry.contestant.prepare()
    step = torch.compile(entry.optimizer.step, fullgraph=True)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler record function")
        step()
    return harness.Contestant(
        "compiled", step, entry.contestant.prepare
    ), time.perf_counter() - began


def measure(row: Row, name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time one optimizer on one row, eager and compiled."""
    torch.compiler.reset()
    eager, graph = (
        next(entry for entry in ours(row, device) if entry.contestant.name == name)
        for _ in range(2)
    )
    step, seconds = compiled(graph)
    plain = harness.Contestant("eager", eager.contestant.call, eager.contestant.prepare)
    timings = harness.interleave([plain, step], rounds=rounds, device=device)
    saved = timings.median("eager") - timings.median("compiled")
    return {
        "row": row.label, "optimizer": name,
        "eager": timings.summary("eager"), "compiled": timings.summary("compiled"),
        "gain": timings.ratio("eager", "compiled"), "compile_seconds": seconds,
        "steps_to_pay_back": seconds / saved if saved > 0 else math.inf,
        "errors": [harness.orthonormality_error(entry.matrices()) for entry in (eager, graph)],
    }  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    header = ("one step", "optimizer", "eager ms", "compiled ms", "eager / compiled")
    header = (*header, "seconds to compile", "steps to pay back", "error, eager / compiled")
    rows = []
    for found in results:
        steps = found["steps_to_pay_back"]
        times = [f"{found[kind]['median_ms']:.2f}" for kind in ("eager", "compiled")]
        row = [found["row"], found["optimizer"], *times, f"{found['gain']:.2f}"]
        row += [f"{found['compile_seconds']:.0f}"]
        row += [f"{steps:,.0f}" if math.isfinite(steps) else "never"]
        rows.append([*row, " / ".join(f"{error:.0e}" for error in found["errors"])])
    return harness.markdown_table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.flags(__doc__, "compiled", rounds=9, threads=2)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", choices=names, default=DEFAULT)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    results = []
    for row in ROWS:
        for name in (SGD, ADAM) if row.name in arguments.rows else ():
            results.append(measure(row, name, arguments.rounds, arguments.device))
            print(table(results[-1:]), flush=True)
    text = table(results)
    print(f"\n{text}")
    settings = {"dtype": "float32", "rounds": arguments.rounds, "threads": arguments.threads}
    content = {"machine": harness.machine(arguments.device), "settings": settings}
    content |= {"tables": {"compiled": text}, "results": results}
    harness.write_json(arguments.output, content)


if __name__ == "__main__":
    main()
