"""How long a step takes in two checkouts of this package, interleaved on one machine.

Each checkout has a process of its own. Turns of about ten milliseconds alternate, and the ratio is
taken turn by turn, so that it holds when the speed of the machine drifts; with one thread it is of
processor time, and other work does not count. Rows and gradients are those of `step_time.py`, and
more: the queries and keys of fused attention weights, torch's SGD under `so.on_manifold`, and
forward passes of a constrained layer.

    python -m benchmarks.speed.two_checkouts --before ../earlier       # about six minutes
"""

from __future__ import annotations

import argparse
import itertools
import math
import operator
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS = {  # name: parameters, leading shape, n, m
    "separate-384x32": (168, (), 384, 32),
    "heads-384x384": (14, "heads", 384, 32),
    "fused-1152x384": (14, "fused", 384, 32),
    "one-4096x512": (1, (), 4096, 512),
    "one-2048x256": (1, (), 2048, 256),
    "one-30000x50": (1, (), 30000, 50),
    "one-1024x1024": (1, (), 1024, 1024),
    "batch-2000x16x16": (1, (2000,), 16, 16),
    "separate-16x16": (2000, (), 16, 16),
    "latency-128x2": (1, (), 128, 2),
}
RULES = ("StiefelSGD", "StiefelAdam", "on_manifold", "on_manifold-long")
PASSES = 50  # forward passes of one time
SETTLING = 12  # steps that are not timed
TURN = 10  # milliseconds
LEAST = 9  # turns of each
FORWARD = {"forward-8x8": 8, "forward-256x256": 256}  # name: size of a layer
GRADIENTS = ("without-gradients", "with-gradients")
CASES = [*itertools.product(ROWS, RULES), *itertools.product(FORWARD, GRADIENTS)]


def build_forward(row: str, kind: str) -> tuple[Any, list[Any]]:
    """Forward passes of a constrained layer, and its weight."""
    import torch

    import stiefel_opt as so

    layer = so.constrain(torch.nn.Linear(FORWARD[row], FORWARD[row]))
    x = torch.randn(1, FORWARD[row])

    def run() -> None:
        with torch.set_grad_enabled(kind == "with-gradients"):
            for _ in range(PASSES):
                layer(x)

    return run, [layer.weight]


def build(row: str, rule: str) -> tuple[Any, list[Any]]:
    """What is timed in a row, a step of an optimizer with gradients in place, and its weights."""
    import torch

    import stiefel_opt as so

    if row in FORWARD:
        return build_forward(row, rule)
    count, lead, n, m = ROWS[row]
    generator = torch.Generator().manual_seed(7)
    size = 0.1 * 1.9 / 0.1 / (math.sqrt(n) + math.sqrt(m))
    params = []
    for _ in range(count):
        reading = so.Stiefel()
        if isinstance(lead, tuple):
            value = torch.linalg.qr(torch.randn(*lead, n, m, generator=generator)).Q.contiguous()
        else:
            rows = 2 * n if lead == "fused" else n
            tall = torch.linalg.qr(torch.randn(rows // m, n, m, generator=generator)).Q
            value = tall.mT.reshape(rows, n)
            reading = so.Stiefel(heads=n // m)
        if lead == "fused":
            value = torch.cat([value, torch.randn(n, n, generator=generator)])
            reading = so.Stiefel(heads=n // m, rows=((0, n), (n, 2 * n)))
        params.append(so.ManifoldParameter(value, reading))
        params[-1].grad = torch.randn(value.shape, generator=generator) * size
    if rule.startswith("on_manifold"):  # steps as usual, or such that each is shortened
        lr = 1e3 if rule.endswith("long") else 0.1
        return so.on_manifold(torch.optim.SGD(params, lr=lr, momentum=0.9)).step, params
    lr = 0.1 if rule == "StiefelSGD" else 0.1 / (0.1 / 1.9 * (math.sqrt(n) + math.sqrt(m)))
    return getattr(so, rule)(params, lr=lr).step, params


def work() -> None:
    """Answer each line ``row rule steps threads`` with milliseconds of a step; of 0, the error."""
    import torch

    import stiefel_opt as so

    def negate(grads: list[Any]) -> None:
        if found := [grad for grad in grads if grad is not None]:
            torch._foreach_neg_(found)

    known: dict[tuple[str, str], Any] = {}
    for line in sys.stdin:
        row, rule, steps, threads = line.split()
        torch.set_num_threads(int(threads))
        clock = time.process_time if threads == "1" else time.perf_counter
        if (row, rule) not in known:
            known.clear()
            known[row, rule] = build(row, rule)
        run, params = known[row, rule]
        times = []
        for _ in range(int(steps)):
            began = clock()
            run()
            times.append(clock() - began)
            negate([p.grad for p in params])
        if times:
            print(statistics.median(times) * 1e3, flush=True)
        else:
            print(max(float(so.orthonormality_error(p)) for p in params[:3]), flush=True)


def main() -> None:
    """Time both checkouts and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=here)
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, *FORWARD))
    parser.add_argument("--rules", nargs="+", choices=(*RULES, *GRADIENTS))
    parser.add_argument("--seconds", type=float, default=4, help="of a row and rule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work()
        return

    from benchmarks.common.harness import markdown_table

    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(path)},
        )
        for path in (options.before, options.after)
    ]

    def ask(worker: Any, row: str, rule: str, steps: int) -> float:
        worker.stdin.write(f"{row} {rule} {steps} {options.threads}\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    cells = []
    for row, rule in CASES:
        if row not in (options.rows or [row]) or rule not in (options.rules or [rule]):
            continue
        for worker in workers:
            ask(worker, row, rule, SETTLING)
        steps = math.ceil(TURN / max(ask(worker, row, rule, 3) for worker in workers))
        found: list[list[float]] = [[], []]
        until = time.perf_counter() + options.seconds
        while time.perf_counter() < until or len(found[0]) < LEAST:
            for i in (0, 1) if len(found[0]) % 2 else (1, 0):
                found[i].append(ask(workers[i], row, rule, steps))
        before, after = map(statistics.median, found)
        low, ratio, high = statistics.quantiles(map(operator.truediv, *found[::-1]))
        far = [ask(worker, row, rule, 0) for worker in workers]
        spread = f"{ratio:.3f} ({low:.2f} - {high:.2f})"
        fastest = f"{min(found[1]) / min(found[0]):.3f}"
        line = f"{before:.3f} {after:.3f} ms, after / before {spread}, fastest {fastest}"
        print(f"{row} {rule}: {line}", flush=True)
        errors = " / ".join(f"{error:.0e}" for error in far)
        cells.append([row, rule, f"{before:.3f}", f"{after:.3f}", spread, fastest, errors])
    header = ("row", "rule", "before, ms", "after, ms", "after / before", "fastest", "errors")
    print(markdown_table(header, cells))


if __name__ == "__main__":
    main()
