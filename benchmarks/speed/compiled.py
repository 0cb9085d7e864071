"""What `torch.compile` gains for the optimizer's step, and what it costs; on a GPU also a graph.

The rows of `step_time.py`: the same parameters and gradients, eager steps and steps of one compiled
graph (`torch.compile(optimizer.step, fullgraph=True)`, torch's default backend) in turns. The bits
are the same: the step is one operation of the graph, in which the eager step runs. On a GPU also
the step captured as a CUDA graph, which is launched by one call.

    python -m benchmarks.speed.compiled                                  # about six minutes
    python -m benchmarks.speed.compiled --device cuda --threads 1 --output cuda.json
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


def captured(entry: Entry) -> harness.Contestant:
    """The step of ``entry`` as a CUDA graph."""
    for group in entry.optimizer.param_groups:
        group["capturable"] = True
    with torch.cuda.stream(torch.cuda.Stream()):  # as torch asks for before a capture
        for _ in range(EAGER_STEPS):
            entry.contestant.call()
            entry.contestant.prepare()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        entry.optimizer.step()
    return harness.Contestant("graph", graph.replay, entry.contestant.prepare)


def measure(row: Row, name: str, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time one optimizer on one row, eager and compiled, and on a GPU as a graph."""
    torch.compiler.reset()
    eager, traced, graph = entries = [
        next(entry for entry in ours(row, device) if entry.contestant.name == name)
        for _ in range(3)
    ]
    step, seconds = compiled(traced)
    plain = harness.Contestant("eager", eager.contestant.call, eager.contestant.prepare)
    replayed = [captured(graph)] if device.type == "cuda" else []
    timings = harness.interleave([plain, step, *replayed], rounds=rounds, device=device)
    measured = entries[: 2 + len(replayed)]
    saved = timings.median("eager") - timings.median("compiled")
    return {
        "row": row.label, "optimizer": name,
        "eager": timings.summary("eager"), "compiled": timings.summary("compiled"),
        "gain": timings.ratio("eager", "compiled"), "compile_seconds": seconds,
        "steps_to_pay_back": seconds / saved if saved > 0 else math.inf,
        "errors": [harness.orthonormality_error(entry.matrices()) for entry in measured],
        **{each.name: timings.summary(each.name) for each in replayed},
    }  # fmt: skip


def table(results: Sequence[dict[str, Any]]) -> str:
    header = ("one step", "optimizer", "eager ms", "compiled ms", "eager / compiled")
    header = (*header, "seconds to compile", "steps to pay back", "errors")
    has_graph = any("graph" in found for found in results)
    header = (*header, "graph ms", "eager / graph") if has_graph else header
    rows = []
    for found in results:
        steps = found["steps_to_pay_back"]
        times = [f"{found[kind]['median_ms']:.2f}" for kind in ("eager", "compiled")]
        row = [found["row"], found["optimizer"], *times, f"{found['gain']:.2f}"]
        row += [f"{found['compile_seconds']:.0f}"]
        row += [f"{steps:,.0f}" if math.isfinite(steps) else "never"]
        row += [" / ".join(f"{error:.0e}" for error in found["errors"])]
        if has_graph:
            times = [found[kind]["median_ms"] for kind in ("graph", "eager")]
            row += [f"{times[0]:.2f}", f"{times[1] / times[0]:.2f}"]
        rows.append(row)
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
