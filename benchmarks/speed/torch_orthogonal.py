"""One orthonormal linear layer in training: torch's parametrization and what stands in its place.

Forward of 256 rows (64 where the row says so; of the matrix itself for a batch), backward and a
step of AdamW with its default decay, in float32 on one thread of the CPU, contestants in turn;
times are processor times.
Beside them stand what registration takes, the bytes of the checkpoint, those that the graph keeps
between forward and backward (beyond parameters, buffers and the input), and max |X'X - I| in
float64 after all these steps.

torch has three maps, each with a base (``use_trivialization``, its default) and without; its own
choice is matrix_exp for square weights and householder for others. A first step longer than `SLOW`
seconds is the only one; a contestant that would take over `LIMIT` by the flops of its map is not
run.

    python -m benchmarks.speed.torch_orthogonal --threads 1
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import geotorch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import stiefel_opt as so
from benchmarks.common.harness import (
    Contestant,
    flags,
    interleave,
    kept_bytes,
    machine,
    markdown_table,
    orthonormality_error,
    write_json,
)
from stiefel_opt import compat

SHAPES = ((576, 576), (64, 64, 64), (2048, 16), (2048, 128), (4096, 4))
MAPS = ("householder", "matrix_exp", "cayley")
ROWS, FEW_ROWS = 256, 64  # of the input
CASES = (*((shape, ROWS) for shape in SHAPES), ((4096, 4), FEW_ROWS))
SLOW = 1.0  # seconds of a step that is made once
LIMIT = 90.0  # seconds of a step that is not made
# n x n by n x n, that forward and backward take at least
PRODUCTS = {"torch matrix_exp": 150, "torch cayley": 6, "geotorch": 150}
CPU = torch.device("cpu")
TAG, OURS, COMPAT = "so.constrain, StiefelAdamW", "so.orthogonal", "compat.orthogonal"


class Layer(nn.Module):
    """A linear layer without bias; a batch of matrices stands for itself."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(so.random_point(*shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.weight.ndim == 2 else self.weight


def torchs(name: str, base: bool) -> Callable[[Layer], Any]:
    def register(layer: Layer) -> None:
        parametrizations.orthogonal(layer, orthogonal_map=name, use_trivialization=base)

    return register


def contestants() -> dict[str, Callable[[Layer], Any]]:
    found: dict[str, Callable[[Layer], Any]] = {
        TAG: lambda layer: so.constrain(layer, flatten=False),
        OURS: so.orthogonal,
        COMPAT: compat.orthogonal,
        "geotorch": lambda layer: geotorch.orthogonal(layer, "weight"),
    }
    for base in (True, False):
        for name in MAPS:
            found[f"torch {name}" + ("" if base else ", no base")] = torchs(name, base)
    return found


class Training:
    """One contestant at one shape."""

    def __init__(
        self, shape: tuple[int, ...], inputs: int, register: Callable[[Layer], Any]
    ) -> None:
        layer = Layer(shape)
        start = time.process_time()
        register(layer)
        self.registration = time.process_time() - start
        self.layer = layer
        tagged = hasattr(getattr(layer, "weight", None), "manifold")
        rule = so.StiefelAdamW if tagged else torch.optim.AdamW
        self.rule = rule(layer.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(inputs, shape[-2], generator=generator)
        columns = (inputs, shape[-1]) if len(shape) == 2 else shape
        self.target = torch.randn(columns, generator=generator)

    def loss(self) -> Tensor:
        return (self.layer(self.x) - self.target).square().mean()

    def step(self) -> None:
        self.loss().backward()
        self.rule.step()
        self.rule.zero_grad()

    def checkpoint(self) -> int:
        return sum(value.nbytes for value in self.layer.state_dict().values())

    def first_step(self) -> int:
        """Make a step; return the bytes of all that its graph holds and nobody else."""
        others = [self.x, self.target, *self.layer.parameters(), *self.layer.buffers()]
        kept, loss = kept_bytes(self.loss, others)
        loss.backward()
        self.rule.step()
        self.rule.zero_grad()
        return kept

    def error(self) -> float:
        return orthonormality_error(self.layer.weight.detach().double())


def flops_rate() -> float:
    """Flops a second of one large product."""
    matrix = torch.randn(1024, 1024)
    matrix @ matrix
    start = time.process_time()
    matrix @ matrix
    return float(2 * 1024**3 / (time.process_time() - start))


def title_of(shape: tuple[int, ...], inputs: int) -> str:
    return " x ".join(map(str, shape)) + ("" if inputs == ROWS else f", {inputs} rows")


def measure(shape: tuple[int, ...], inputs: int, rounds: int) -> dict[str, Any]:
    """Time all contestants at one shape."""
    results: dict[str, dict[str, Any]] = {}
    timed: list[Contestant] = []
    trainings: dict[str, Training] = {}
    rate = flops_rate()
    for name, register in contestants().items():
        count = next((PRODUCTS[each] for each in PRODUCTS if name.startswith(each)), 0)
        expected = count * 2 * shape[-2] ** 3 * (shape[0] if len(shape) > 2 else 1) / rate
        if expected > LIMIT:
            results[name] = {"ms": None, "note": f"over {LIMIT:g} s by its flops"}
            continue
        training = Training(shape, inputs, register)
        trainings[name] = training
        start = time.process_time()
        kept = training.first_step()
        first = time.process_time() - start
        results[name] = {
            "registration_ms": 1e3 * training.registration,
            "checkpoint_bytes": training.checkpoint(),
            "kept_bytes": kept,
            "note": "",
        }
        if first > SLOW:
            results[name] |= {"ms": 1e3 * first, "note": "one step"}
        else:
            timed.append(Contestant(name, training.step))
    clock = time.process_time  # what else runs on the machine does not count
    timings = interleave(timed, rounds=rounds, device=CPU, seconds=0.05, clock=clock)
    for name in timings.seconds:
        found = timings.summary(name)
        results[name] |= {"ms": found["median_ms"], "quartiles_ms": found["quartiles_ms"]}
        results[name]["to_tag"] = timings.ratio(name, TAG)
    for name, training in trainings.items():
        results[name]["error"] = training.error()
        if "to_tag" not in results[name]:
            results[name]["to_tag"] = results[name]["ms"] / results[TAG]["ms"]
    title = title_of(shape, inputs)
    table = table_of(title, results)
    print(table + "\n", flush=True)
    return {"row": title, "shape": shape, "results": results, "table": table}


def table_of(title: str, results: dict[str, dict[str, Any]]) -> str:
    header = [title, "ms a step", "times the tag", "registration, ms", "checkpoint, MB"]
    header += ["kept for backward, MB", "off after decay"]
    rows = []
    for name, found in results.items():
        if found["ms"] is None:
            rows.append([name, found["note"], *["-"] * 5])
            continue
        low, high = found.get("quartiles_ms", (None, None))
        spread = found["note"] if low is None else f"{number(low)} - {number(high)}"
        rows.append(
            [
                name,
                f"{number(found['ms'])} ({spread})",
                number(found["to_tag"]),
                number(found["registration_ms"]),
                number(found["checkpoint_bytes"] / 1e6),
                number(found["kept_bytes"] / 1e6),
                f"{found['error']:.0e}",
            ]
        )
    return markdown_table(header, rows)


def number(value: float) -> str:
    """Two digits, without an exponent."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One row for each shape, as a first table wants it."""
    header = ["ms of forward, backward and step", "torch, its default", "torch cayley", "geotorch"]
    header += [OURS, TAG, "file, torch", "file, so.constrain"]
    header += ["error, torch", "error, so.constrain"]
    lines = []
    for row in rows:
        found, square = row["results"], row["shape"][-1] == row["shape"][-2]
        torchs_own = found["torch matrix_exp" if square else "torch householder"]
        chosen = [torchs_own, found["torch cayley"], found["geotorch"], found[OURS], found[TAG]]
        times = ["-" if each["ms"] is None else number(each["ms"]) for each in chosen]
        pair = torchs_own, found[TAG]
        sizes = [f"{number(each['checkpoint_bytes'] / 1e6)} MB" for each in pair]
        lines.append([row["row"], *times, *sizes, *(f"{each['error']:.0e}" for each in pair)])
    return markdown_table(header, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = flags(__doc__, "torch_orthogonal", rounds=5, device=False)
    parser.add_argument("--add", action="store_true", help="only the shapes that the file misses")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="geotorch")
    about = machine(CPU, packages=("geotorch",))
    settings = {"dtype": "float32", "rounds": arguments.rounds, "threads": arguments.threads}
    rows: list[dict[str, Any]] = []
    tables: dict[str, str] = {}
    if arguments.add and arguments.output.exists():
        stored = json.loads(arguments.output.read_text())
        rows, tables = stored["rows"], stored["tables"]
    for shape, inputs in CASES:
        if title_of(shape, inputs) in tables:
            continue
        row = measure(shape, inputs, arguments.rounds)
        tables[row["row"]] = row.pop("table")
        rows.append(row)
        tables["summary"] = summary(rows)
        content = {"machine": about, "settings": settings, "tables": tables, "rows": rows}
        write_json(arguments.output, content)
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
