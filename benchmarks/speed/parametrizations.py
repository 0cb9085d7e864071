"""One orthogonal weight from free parameters, forward and backward, against other packages.

Every contestant is a module with one parametrized weight; timed is ``module.weight`` alone and
together with ``weight.backward(G)``, G Gaussian, in float32. Orthonormality error, max |W'W - I| in
float64, and the peak of temporary memory stand beside the times. Sizes are N x N for N = 64 ...
2048, as in figure 1c of the CWY paper, with a chart; at N = 1024 also 128 reflections, at once and
one by one.

Our free numbers, those of torch_householder and of "torch matrix_exp, random" are drawn from
N(0, 1). Torch's other maps and geotorch are timed as registration of an orthonormal weight leaves
them: their base is the weight, and what they map is zero; the series of a matrix exponential is
shortest there.

A contestant whose second call takes longer than `SLOW` seconds is timed by that call alone (in the
file on hand by the first); one that would take longer than `LIMIT`, judged by a smaller size, or
hold more than `ROOM` is not run.
Rows are written as they come; the other rows of the file stay.

    python -m benchmarks.speed.parametrizations --threads 1
    python -m benchmarks.speed.parametrizations --threads 1 --sizes 64 128
    python -m benchmarks.speed.parametrizations --device cuda --output cuda.json
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is chatty otherwise

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import stiefel_opt as so
from benchmarks.common import figures, harness

try:
    import geotorch
except ImportError as error:
    raise SystemExit(f"{error}; pip install --no-deps geotorch torch_householder") from error
try:
    from torch_householder import torch_householder_orgqr
except ImportError:  # it has to be compiled: elsewhere its column is missing
    torch_householder_orgqr = None

SECONDS = 0.1  # that a timing lasts at least: a rival that fills memory cools the caches
SLOW = 1.0  # seconds of a call that is timed once
LIMIT = 30.0  # seconds of a call that is not made
ROOM = 8 * 2**30  # bytes that a graph may hold
SIZES = (64, 128, 256, 512, 1024, 2048)
HR = "sequential HR"


class Orgqr(nn.Module):
    """The parametrization in the README of torch_householder."""

    def forward(self, free: Tensor) -> Tensor:
        eye = torch.eye(*free.shape[-2:], device=free.device)
        result: Tensor = torch_householder_orgqr(free.tril(-1) + eye)
        return result


def weight(*shape: int) -> nn.Module:
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    # Already orthonormal: what registration costs is not the question here.
    module.weight = nn.Parameter(torch.linalg.qr(values).Q.contiguous())
    return module


def drawn(module: nn.Module) -> nn.Module:
    """The module with parameters drawn from N(0, 1)."""
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def ours(name: str, **options: Any) -> Callable[..., nn.Module]:
    return lambda *shape: drawn(so.orthogonal(weight(*shape), "weight", name, **options))


def torchs(name: str) -> Callable[..., nn.Module]:
    return lambda *shape: parametrizations.orthogonal(weight(*shape), orthogonal_map=name)


def geotorchs(*shape: int) -> nn.Module:
    module = weight(*shape)
    geotorch.orthogonal(module, "weight")
    return module


def orgqrs(*shape: int) -> nn.Module:
    module = weight(*shape)
    nn.init.normal_(module.weight)
    parametrize.register_parametrization(module, "weight", Orgqr())
    return module


SQUARE: dict[str, Callable[..., nn.Module]] = {
    "CWY": ours("cwy"),
    "Cayley by solve": ours("cayley"),
    "exponential": ours("matrix_exp"),
    HR: ours("householder"),
    **{f"torch {name}": torchs(name) for name in ("householder", "matrix_exp", "cayley")},
    "torch matrix_exp, random": lambda *shape: drawn(torchs("matrix_exp")(*shape)),
    "geotorch": geotorchs,
    **({"torch_householder": orgqrs} if torch_householder_orgqr else {}),
}
FEW = {
    "CWY, L = 128": ours("cwy", reflections=128),
    HR: ours("householder", reflections=128),
}


@dataclass
class Result:
    """What one contestant did in one row; times in seconds, None where it was not run."""

    name: str
    forward: float | None = None
    both: float | None = None
    error: float | None = None
    memory: int | None = None
    rounds: int = 0
    note: str = ""


class Entry:
    """A module with its two timed calls."""

    def __init__(
        self,
        name: str,
        build: Callable[..., nn.Module],
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.name = name
        self.module = build(*shape).to(device)
        generator = torch.Generator().manual_seed(1)
        self.grad = torch.randn(shape, generator=generator).to(device)

    def forward(self) -> Tensor:
        result: Tensor = self.module.weight
        return result

    def both(self) -> None:
        self.forward().backward(self.grad)

    def prepare(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def error(self) -> float:
        with torch.no_grad():
            return so.orthonormality_error(self.module.weight).item()


def measure(
    title: str,
    builds: dict[str, Callable[..., nn.Module]],
    shape: tuple[int, ...],
    rounds: int,
    expected: dict[str, float],
    device: torch.device,
) -> dict[str, Any]:
    """Time one row; ``expected`` are seconds guessed from smaller rows, updated here."""
    entries: list[Entry] = []
    results: dict[str, Result] = {}
    for name, build in builds.items():
        results[name] = Result(name)
        if expected.get(name, 0.0) > LIMIT:
            results[name].note = f"over {LIMIT:g} s by a smaller size"
            continue
        if name == HR and (held := 4 * math.prod(shape) * shape[-1]) > ROOM:
            results[name].note = f"autograd would hold {held / 2**30:.0f} GiB"
            continue
        entry = Entry(name, build, shape, device)
        entry.both()  # the first call of all loads libraries
        first = harness.seconds_per_call(harness.Contestant(name, entry.both), 1, device)
        results[name].error = entry.error()
        if first > SLOW:
            results[name].both, results[name].rounds, results[name].note = first, 1, "one call"
            forward = harness.Contestant(name, entry.forward)
            results[name].forward = harness.seconds_per_call(forward, 1, device)
        else:
            entries.append(entry)
    contestants = [
        harness.Contestant(f"{entry.name}, {what}", call, entry.prepare)
        for entry in entries
        for what, call in (("forward", entry.forward), ("both", entry.both))
    ]
    timings = harness.interleave(contestants, rounds=rounds, device=device, seconds=SECONDS)
    for entry in entries:
        found = results[entry.name]
        found.forward = timings.median(f"{entry.name}, forward")
        found.both = timings.median(f"{entry.name}, both")
        found.rounds = rounds
        found.memory = harness.step_memory(entry.both, device, entry.prepare).peak
    for name, found in results.items():
        expected[name] = math.inf if found.both is None else 8.0 * found.both
    first = next(iter(builds))
    print(title, *(f"{name} {found.both or math.nan:.3g} s" for name, found in results.items()))
    return {
        "row": title,
        "shape": shape,
        "threads": torch.get_num_threads(),
        "results": [vars(found) for found in results.values()],
        "timings": {name: timings.summary(name) for name in timings.seconds},
        "ratios": {name: ratio(timings, results, name, first) for name in builds},
    }


def ratio(
    timings: harness.Timings, results: dict[str, Result], name: str, other: str
) -> float | None:
    """Time of ``name`` over time of ``other``, forward and backward; inside rounds if it can be."""
    if f"{name}, both" in timings.seconds and f"{other}, both" in timings.seconds:
        return timings.ratio(f"{name}, both", f"{other}, both")
    mine, theirs = results[name].both, results[other].both
    return None if mine is None or theirs is None else mine / theirs


def of_figure(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of squares, as many reflections as columns."""
    return [row for row in rows if row["row"] == "{0} x {0}".format(row["shape"][0])]


def summary(rows: list[dict[str, Any]]) -> str:
    """Forward and backward of every square size, one column for each map."""
    lines = []
    for row in of_figure(rows):
        times = {found["name"]: found["both"] for found in row["results"]}
        known = [times.get(name) for name in SQUARE]
        lines.append([row["row"], *("-" if t is None else f"{1e3 * t:.3g}" for t in known)])
    return harness.markdown_table(["ms, forward and backward", *SQUARE], lines)


def run(sizes: Sequence[int], rounds: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure one row after the other."""
    expected: dict[str, float] = {}
    for size in sizes:
        yield measure(f"{size} x {size}", SQUARE, (size, size), rounds, expected, device)
        if size == 1024:
            yield measure("1024 x 1024, L = 128", FEW, (size, size), rounds, {}, device)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen sections, print and write."""
    parser = harness.flags(__doc__, "parametrizations", rounds=9)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="geotorch")
    about = harness.machine(arguments.device, ("geotorch", "torch_householder"))
    print(f"{about['device_name']}, {about['cores']} cores, {arguments.threads} thread(s)\n")
    rows: dict[str, dict[str, Any]] = {}
    if arguments.output.exists():
        stored = json.loads(arguments.output.read_text())
        if stored["machine"]["device"] != about["device"]:
            parser.error(f"--output must be another file, got one of {stored['machine']['device']}")
        rows = {row["row"]: row for row in stored["rows"]}
    settings = {"dtype": "float32", "rounds": arguments.rounds, "threads": arguments.threads}
    for row in run(arguments.sizes, arguments.rounds, arguments.device):
        rows[row["row"]] = row
        known = list(rows.values())
        content = {"machine": about, "settings": settings, "rows": known}
        content["tables"] = {"squares": summary(known)}
        harness.write_json(arguments.output, content)
    if arguments.device.type == "cpu":  # as the picture says
        figures.parametrizations(arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
