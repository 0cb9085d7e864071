"""Large and many: time and memory of a step as counts and sizes grow, with fitted exponents.

    python -m benchmarks.speed.scale  # everything; some minutes on two cores
    python -m benchmarks.speed.scale --families tall --what time
    python -m benchmarks.speed.scale --smoke  # the smallest sizes, nothing written

Four families grow to 20,000 matrices of 16 x 16, as separate parameters and as one batch, to one of
200,000 x 64, and to one of 8192 x 2048. Each is timed at three sizes, whole steps in float32 with
gradients in place that change their sign (as in `step_time.py`), beside six bare products of n x m
by m x m of all matrices, which is what a step of StiefelSGD costs on paper. Contestants of a size
are timed in turns. Exponents are slopes of least squares of log time over log size: 1 in the count
and in n, 3 in m at constant n/m are what products alone would give; "last" is that of the last two
sizes. Memory is what the tensors of one step take at their highest above its start
(`harness.step_memory`), and what the optimizer keeps; neither needs a quiet machine, so that times
and memory can be measured one after the other, and each family is written when it is done.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is chatty otherwise

import numpy as np
import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common.harness import (
    RESULTS,
    Contestant,
    Timings,
    held_bytes,
    machine,
    markdown_table,
    seconds_per_call,
    step_memory,
    write_json,
)

CPU = torch.device("cpu")
SIX = "six products"
RULES: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "StiefelSGD": lambda params: so.StiefelSGD(params, lr=0.1),
    "StiefelAdam": lambda params: so.StiefelAdam(params, lr=1e-3),
}
STEP_SIZE = 0.1  # of StiefelSGD: the largest singular value of a step, in radians
PATH = RESULTS / "scale.json"


@dataclass(frozen=True)
class Family:
    """``sizes`` of (parameters, matrices of each, n, m); ``grows`` is what the exponent is of."""

    title: str
    grows: str
    sizes: tuple[tuple[int, int, int, int], ...]
    rounds: int = 5


FAMILIES = {
    "separate": Family(
        "separate parameters of 16 x 16", "count",
        ((1250, 1, 16, 16), (5000, 1, 16, 16), (20000, 1, 16, 16)),
    ),
    "batch": Family(
        "one batch of 16 x 16", "count",
        ((1, 1250, 16, 16), (1, 5000, 16, 16), (1, 20000, 16, 16)),
    ),
    "tall": Family(
        "one n x 64", "n", ((1, 1, 12500, 64), (1, 1, 50000, 64), (1, 1, 200000, 64)),
    ),
    "large": Family(
        "one 4m x m", "m", ((1, 1, 2048, 512), (1, 1, 4096, 1024), (1, 1, 8192, 2048)), rounds=3,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """An optimizer with parameters of its own."""

    contestant: Contestant
    parameters: list[Tensor]
    optimizer: torch.optim.Optimizer


def start(size: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Orthonormal matrices and Gaussian gradients, ``(parameters, batch, n, m)``."""
    generator = torch.Generator().manual_seed(7)
    points = torch.linalg.qr(torch.randn(size, generator=generator)).Q.contiguous()
    gradients = torch.randn(size, generator=generator)
    return points, gradients * (1.9 * STEP_SIZE / 0.1 / (math.sqrt(size[2]) + math.sqrt(size[3])))


def entries(points: Tensor, gradients: Tensor) -> list[Entry]:
    """StiefelSGD and StiefelAdam on copies of the same matrices."""
    found = []
    for name, rule in RULES.items():
        pieces = [points] if points.size(0) == 1 else points.flatten(0, 1).unbind()
        slopes = [gradients] if points.size(0) == 1 else gradients.flatten(0, 1).unbind()
        parameters: list[Tensor] = []
        for piece, slope in zip(pieces, slopes, strict=True):
            parameters.append(so.ManifoldParameter(piece.squeeze().clone()))
            parameters[-1].grad = slope.squeeze().clone()
        optimizer = rule(parameters)

        def flip(parameters: list[Tensor] = parameters) -> None:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.neg_()

        step: Callable[[], object] = optimizer.step
        found.append(Entry(Contestant(name, step, flip), parameters, optimizer))
    return found


def six_products(points: Tensor) -> Contestant:
    """Six products of all matrices, as one batch."""
    tall = points.flatten(0, 1)
    small = torch.randn(tall.size(0), tall.size(2), tall.size(2)) / math.sqrt(tall.size(2))
    result = torch.empty_like(tall)

    def call() -> None:
        for _ in range(6):
            torch.bmm(tall, small, out=result)

    return Contestant(SIX, call)


def interleaved(contestants: list[Contestant], rounds: int) -> Timings:
    """Warm up, then ``rounds`` turns; what takes below 20 ms is averaged over some calls."""
    for contestant in contestants:
        once = seconds_per_call(contestant, 1, CPU)
        if once < 1.0:
            once = seconds_per_call(contestant, 2, CPU)
        contestant.repetitions = max(1, min(50, math.ceil(0.02 / once)))
    timings = Timings({contestant.name: [] for contestant in contestants})
    for number in range(rounds):
        shift = number % len(contestants)
        for one in (*contestants[shift:], *contestants[:shift]):
            timings.seconds[one.name].append(seconds_per_call(one, one.repetitions, CPU))
    return timings


def error_of(parameters: list[Tensor]) -> float:
    """The largest max |X'X - I| of all."""
    return max(float(so.orthonormality_error(parameter)) for parameter in parameters)


def times(size: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Seconds of a step of each contestant, their errors after it, and ratios to the products."""
    points, gradients = start(size)
    ours = entries(points, gradients)
    contestants = [*(entry.contestant for entry in ours), six_products(points)]
    timings = interleaved(contestants, rounds)
    record: dict[str, Any] = {one.name: timings.summary(one.name) for one in contestants}
    for entry in ours:
        name = entry.contestant.name
        record[name]["over_six_products"] = timings.ratio(name, SIX)
        record[name]["orthonormality_error"] = error_of(entry.parameters)
    return record


def memory(size: tuple[int, int, int, int]) -> dict[str, Any]:
    """Bytes at the highest point of a step, bytes of state, and of the parameters themselves."""
    points, gradients = start(size)
    record: dict[str, Any] = {"parameter_bytes": points.nbytes}
    for entry in entries(points, gradients):
        one = entry.contestant
        one.call()  # makes the state
        found = step_memory(one.call, CPU, one.prepare)
        outside = [*entry.parameters, *(p.grad for p in entry.parameters if p.grad is not None)]
        state = held_bytes(entry.optimizer, outside)
        record[one.name] = {"temporary_bytes": found.peak, "state_bytes": state}
    record["process_peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return record


def label(size: tuple[int, int, int, int]) -> str:
    parameters, batch, n, m = size
    if parameters > 1:
        return f"{parameters:,} separate {n} x {m}"
    return f"one batch of {batch:,} x {n} x {m}" if batch > 1 else f"one {n:,} x {m}"


def exponents(family: Family, record: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Slope of log time over log size, of all sizes and of the last two."""
    place = {"count": 0, "n": 2, "m": 3}[family.grows]
    measured = [size for size in family.sizes if "times" in record.get(label(size), {})]
    sizes = [size[0] * size[1] if place == 0 else size[place] for size in measured]
    found = {}
    for name in (*RULES, SIX):
        logs = np.log([record[label(size)]["times"][name]["median_ms"] for size in measured])
        slope = float(np.polyfit(np.log(sizes), logs, 1)[0])
        last = float((logs[-1] - logs[-2]) / math.log(sizes[-1] / sizes[-2]))
        found[name] = (slope, last)
    return found


def tables(rows: dict[str, Any]) -> dict[str, str]:
    """Times of every size, memory of every size, and the exponents of each family."""
    lines, held, fits = [], [], []
    for key, family in FAMILIES.items():
        record = rows.get(key, {})
        for size in family.sizes:
            found = record.get(label(size), {}).get("times")
            if found:
                cells = [f"{found[name]['median_ms']:,.2f}" for name in (*RULES, SIX)]
                cells += [f"{found[name]['over_six_products']:.2f}" for name in RULES]
                cells.append(f"{max(found[name]['orthonormality_error'] for name in RULES):.0e}")
                lines.append([label(size), *cells])
            found = record.get(label(size), {}).get("memory")
            if found:
                parts = [
                    found[name][f"{p}_bytes"] for p in ("temporary", "state") for name in RULES
                ]
                cells = [f"{number / 1e6:,.1f}" for number in (found["parameter_bytes"], *parts)]
                held.append([label(size), *cells])
        if all("times" in record.get(label(size), {}) for size in family.sizes):
            fitted = exponents(family, record)
            cells = [f"{slope:.2f} ({last:.2f})" for slope, last in fitted.values()]
            fits.append([f"{family.title}, in {family.grows}", *cells])
    ratios = [f"{name} / {SIX}" for name in RULES]
    columns = [f"{what} of {name}" for what in ("temporaries", "state") for name in RULES]
    return {
        "time": markdown_table(("ms a step", *RULES, SIX, *ratios, "max abs(X'X - I)"), lines),
        "memory": markdown_table(("MB at the peak of a step", "parameters", *columns), held),
        "exponents": markdown_table(("exponent of time (last two sizes)", *RULES, SIX), fits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--what", choices=("time", "memory", "both"), default="both")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content: dict[str, Any] = {"rows": {}}
    for key in options.families:
        family = FAMILIES[key]
        measured: dict[str, dict[str, Any]] = {}
        for size in family.sizes[:1] if options.smoke else family.sizes:
            one = measured.setdefault(label(size), {})
            if options.what != "memory":
                one["times"] = times(size, family.rounds)
            if options.what != "time":
                one["memory"] = memory(size)
            print(label(size), "measured", flush=True)
        if PATH.exists() and not options.smoke:  # times and memory may come from two runs
            content = json.loads(PATH.read_text())
        record = content["rows"].setdefault(key, {})
        for name, one in measured.items():
            record.setdefault(name, {}).update(one)
        about = {"threads": options.threads, "what": options.what, "machine": machine(CPU)}
        content.setdefault("runs", {})[f"{key}, {options.what}"] = about
        content["tables"] = tables(content["rows"])
        if not options.smoke:
            write_json(PATH, content)
    print("", *content["tables"].values(), sep="\n\n")


if __name__ == "__main__":
    main()
