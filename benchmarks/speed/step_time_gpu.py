"""Steps on a GPU, eager and as CUDA graphs, against the rivals: the check of `cuda_graph`.

First captured steps are compared with eager ones, in float64, over 50 steps with a schedule, a
missing gradient, one that is not finite and a learning rate of 0 in between: the points may differ
by 1e-10. Then steps are timed on the rows of `step_time.py`, with `cuda_graph=True` and False, and
those of POGO and geoopt. The program fails unless every captured step takes at most 0.9 of the time
of the best rival of its kind: SGD beside SGD, Adam beside Adam. Once it has passed, `BY_DEFAULT` in
`stiefel_opt/optim/capture.py` may become True.

    python -m benchmarks.speed.step_time_gpu               # a GPU, about five minutes
    python -m benchmarks.speed.step_time_gpu --device cpu  # tries the program; it cannot pass
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import stiefel_opt as so
from benchmarks.common import harness
from benchmarks.speed import contestants as known
from benchmarks.speed.contestants import ADAM, POGO, SGD, Entry, Row
from benchmarks.speed.step_time import ROWS, SETTLING

CAPTURED = ", captured"
RIVALS = {SGD: (POGO, known.GEOOPT_SGD), ADAM: (known.POGO_ADAM, known.GEOOPT_ADAM)}
BAR = 0.9
NEAR = 1e-10
STEPS = 50


def moved(rule: Any, lr: float, device: torch.device, cuda_graph: bool) -> tuple[Any, str]:
    """Three weights after STEPS steps with something of everything, and how the last was taken."""
    generator = torch.Generator().manual_seed(0)
    points = [
        so.random_point(40, 6, dtype=torch.float64, generator=generator).to(device)
        for _ in range(3)
    ]
    weights = [so.ManifoldParameter(point) for point in points]
    optimizer = rule(weights, lr=lr, cuda_graph=cuda_graph)
    for step in range(STEPS):
        for index, weight in enumerate(weights):  # at another address every time
            grad = 0.02 * torch.randn(40, 6, generator=generator, dtype=torch.float64)
            weight.grad = None if (step, index) == (20, 1) else grad.to(device)
        if step == 25:
            weights[2].grad[0, 0] = math.nan
        for group in optimizer.param_groups:
            schedule = lr * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
            group["lr"] = 0.0 if step == 30 else schedule
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was not finite")
            optimizer.step()
    return torch.stack([weight.detach() for weight in weights]), optimizer.how_stepped()


def differences(device: torch.device) -> dict[str, tuple[float, str]]:
    """How far captured steps lead from eager ones, and how the last of them was taken."""
    found = {}
    for name, rule, lr in ((SGD, so.StiefelSGD, 2e-2), (ADAM, so.StiefelAdam, 1e-3)):
        eager, _ = moved(rule, lr, device, cuda_graph=False)
        captured, how = moved(rule, lr, device, cuda_graph=device.type == "cuda")
        found[name] = float((eager - captured).abs().max()), how
        print(f"{name}, {STEPS} steps: captured - eager {found[name][0]:.1e}; last step: {how}")
    return found


def entries_of(row: Row, device: torch.device) -> list[Entry]:
    """Everybody, after the first steps."""
    entries = [*known.ours(row, device, cuda_graph=False)]
    if device.type == "cuda":
        entries += known.ours(row, device, cuda_graph=True, suffix=CAPTURED)
    entries += [*known.rivals(row, device), known.pogo_adam(row, device)]
    for entry in entries:
        for _ in range(SETTLING):
            entry.contestant.prepare()
            entry.contestant.call()
    return entries


def measure(row: Row, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time one row."""
    entries = entries_of(row, device)
    timings = harness.interleave([e.contestant for e in entries], rounds=rounds, device=device)
    found = {
        entry.contestant.name: {
            **timings.summary(entry.contestant.name),
            "orthonormality_error": harness.orthonormality_error(entry.matrices()),
        }
        for entry in entries
    }
    print(f"{row.label}: " + ", ".join(f"{n} {e['median_ms']:.3f}" for n, e in found.items()))
    return {"row": row.name, "label": row.label, "contestants": found}


def best(result: dict[str, Any], kind: str) -> tuple[float, float]:
    """Milliseconds of our captured step and of the best rival of its kind."""
    times = {name: each["median_ms"] for name, each in result["contestants"].items()}
    return times.get(kind + CAPTURED, math.inf), min(times[name] for name in RIVALS[kind])


def failures(
    results: Sequence[dict[str, Any]], differing: dict[str, tuple[float, str]]
) -> list[str]:
    """What does not hold."""
    failed = [
        f"{name}: captured steps differ by {difference:.1e}, last step {how}"
        for name, (difference, how) in differing.items()
        if not difference < NEAR or not how.startswith("captured")
    ]
    for result in results:
        for kind in RIVALS:
            ours, rival = best(result, kind)
            if not ours <= BAR * rival:
                label = f"{result['label']}, {kind}"
                failed.append(f"{label}: captured {ours:.3f} ms, the best rival {rival:.3f} ms")
    return failed


def summary(results: Sequence[dict[str, Any]]) -> str:
    """One line for each row, a column for everybody."""
    columns = [SGD, SGD + CAPTURED, *RIVALS[SGD], ADAM, ADAM + CAPTURED, *RIVALS[ADAM]]
    lines = []
    for result in results:
        found = result["contestants"]
        cells = [f"{found[name]['median_ms']:.2f}" if name in found else "-" for name in columns]
        lines.append([result["label"], *cells])
    return harness.markdown_table(("ms a step", *columns), lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = harness.flags(__doc__, "step_time_gpu", rounds=7)
    names = [row.name for row in ROWS if row.name != "separate-16x16"]  # rivals take seconds
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.set_defaults(device=torch.device("cuda"))
    arguments = parser.parse_args(argv)
    device = arguments.device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("this check needs a GPU; --device cpu tries the program")
    torch.set_num_threads(arguments.threads)
    about = harness.machine(device)
    print(f"on {about['device_name']}")
    differing = differences(device)
    rows = [row for row in ROWS if row.name in arguments.rows]
    results = [measure(row, arguments.rounds, device) for row in rows]
    table, failed = summary(results), failures(results, differing)
    print(f"\n{table}")
    content = {
        "machine": about,
        "settings": {"dtype": "float32", "rounds": arguments.rounds, "bar": BAR},
        "tables": {"eager and captured": table},
        "differences": {name: difference for name, (difference, _) in differing.items()},
        "failed": failed,
        "results": results,
    }
    if device.type == "cuda":
        harness.write_json(arguments.output, content)
    print("\nfailed: " + "\n        ".join(failed) if failed else "\npassed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
