"""Large and many: the time of a step as counts and sizes grow.

    python -m benchmarks.speed.scale  # everything; some minutes on two cores

Four families grow to 20,000 matrices of 16 x 16, as separate parameters and as one batch, to one of
200,000 x 64, and to one of 8192 x 2048. Each is timed at three sizes, whole steps in float32 with
gradients in place that change their sign (`step_time.py` says how the steps shrink), beside six
bare products of n x m by m x m of all matrices, which is what a step of StiefelSGD costs on paper.
Contestants of a size are timed in turns, and each family is written when it is done.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks.common import harness
from benchmarks.speed.contestants import ADAM, SGD, SIX, Row, ours, products

FAMILIES = {  # name: (parameters, matrices of each, n, m)
    "separate": ((1250, 1, 16, 16), (5000, 1, 16, 16), (20000, 1, 16, 16)),
    "batch": ((1, 1250, 16, 16), (1, 5000, 16, 16), (1, 20000, 16, 16)),
    "tall": ((1, 1, 12500, 64), (1, 1, 50000, 64), (1, 1, 200000, 64)),
    "large": ((1, 1, 2048, 512), (1, 1, 4096, 1024), (1, 1, 8192, 2048)),
}


def label(size: tuple[int, int, int, int]) -> str:
    parameters, batch, n, m = size
    if parameters > 1:
        return f"{parameters:,} separate {n} x {m}"
    return f"one batch of {batch:,} x {n} x {m}" if batch > 1 else f"one {n:,} x {m}"


def times(size: tuple[int, int, int, int], rounds: int, device: torch.device) -> dict[str, Any]:
    """Seconds of a step of each contestant, their errors after it, and ratios to the products."""
    row = Row(label(size), *size)
    entries = list(ours(row, device))
    contestants = [*(entry.contestant for entry in entries), products(row, device)]
    timings = harness.interleave(contestants, rounds=rounds, device=device)
    record: dict[str, Any] = {one.name: timings.summary(one.name) for one in contestants}
    for entry in entries:
        found = record[entry.contestant.name]
        found["over_six_products"] = timings.ratio(entry.contestant.name, SIX)
        found["orthonormality_error"] = harness.orthonormality_error(entry.matrices())
    return record


def table(rows: dict[str, Any]) -> str:
    """Times of every size that was measured, and the worse error."""
    lines = []
    for key, sizes in FAMILIES.items():
        for size in sizes:
            if found := rows.get(key, {}).get(label(size), {}).get("times"):
                mine = [found[name] for name in (SGD, ADAM)]
                cells = [f"{found[name]['median_ms']:,.2f}" for name in (SGD, ADAM, SIX)]
                cells += [f"{one['over_six_products']:.2f}" for one in mine]
                cells.append(f"{max(one['orthonormality_error'] for one in mine):.0e}")
                lines.append([label(size), *cells])
    header = ("ms a step", SGD, ADAM, SIX, f"{SGD} / {SIX}", f"{ADAM} / {SIX}", "max abs(X'X - I)")
    return harness.markdown_table(header, lines)


def main() -> None:
    parser = harness.flags(__doc__, "scale", rounds=5, threads=torch.get_num_threads())
    parser.add_argument("--smoke", action="store_true", help="smallest sizes, nothing written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content: dict[str, Any] = {"rows": {}, "runs": {}}
    if options.output.exists() and not options.smoke:
        content = json.loads(options.output.read_text())
    for key, sizes in FAMILIES.items():
        for size in sizes[: 1 if options.smoke else None]:
            found = {"times": times(size, options.rounds, options.device)}
            content["rows"].setdefault(key, {})[label(size)] = found
            print(label(size), "measured", flush=True)
        about = harness.machine(options.device)
        content["runs"][key] = {"threads": options.threads, "machine": about}
        content["tables"] = {"time": table(content["rows"])}
        if not options.smoke:
            harness.write_json(options.output, content)
    print(f"\n{content['tables']['time']}")


if __name__ == "__main__":
    main()
