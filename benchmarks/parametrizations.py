"""One orthonormal weight from free parameters, forward and backward, against other packages.

Every contestant is a module with one parametrized weight; timed is ``module.weight`` alone and
together with ``weight.backward(G)``, G Gaussian, in float32. Orthonormality error, max |W'W - I| in
float64, and the peak of temporary memory stand beside the times. Questions, one section each:

    squares   N x N for N = 64 ... 2048, as in figure 1c of the CWY paper, with a chart
    few       CWY with L reflections, N = 1024, L from 16 to 1024
    tall      4096 x 256 and 30000 x 50
    batch     512 matrices of 32 x 32

A contestant whose first call takes longer than `SLOW` seconds is timed by that call alone; one
that would take longer than `LIMIT`, judged by a smaller size, or that forms an n x n matrix for a
tall weight, is not run.

    python benchmarks/parametrizations.py --threads 1
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is chatty otherwise

import matplotlib as mpl
import torch
from harness import (
    RESULTS,
    Contestant,
    Timings,
    check_step_memory,
    interleave,
    machine,
    markdown_table,
    step_memory,
    version,
    write_json,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import stiefel_opt as so

try:
    import geotorch
    from torch_householder import torch_householder_orgqr
except ImportError as error:
    raise SystemExit(f"{error}; pip install --no-deps geotorch torch_householder") from error

mpl.use("Agg")
from matplotlib import pyplot as plt

SLOW = 3.0  # seconds of a call that is timed once
LIMIT = 60.0  # seconds of a call that is not made
SIZES = (64, 128, 256, 512, 1024, 2048)
COUNTS = (16, 64, 128, 256, 512, 1024)

CWY, TCWY, OWN, EXP, CAYLEY = "CWY", "T-CWY", "OWN", "exponential", "Cayley by solve"
HR = "sequential HR"
TORCH = {name: f"torch {name}" for name in ("householder", "matrix_exp", "cayley")}
GEOTORCH, ORGQR, PRODUCT = "geotorch", "torch_householder", "one product"
CPU = torch.device("cpu")


class Orgqr(nn.Module):
    """The parametrization in the README of torch_householder."""

    def forward(self, free: Tensor) -> Tensor:
        eye = torch.eye(*free.shape[-2:])
        result: Tensor = torch_householder_orgqr(free.tril(-1) + eye)
        return result


def weight(*shape: int) -> nn.Module:
    module = nn.Module()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    # Already orthonormal: what registration costs is not the question here.
    module.weight = nn.Parameter(torch.linalg.qr(values).Q.contiguous())
    return module


def ours(name: str, *, gaussian: bool = True, **options: Any) -> Callable[..., nn.Module]:
    def build(*shape: int) -> nn.Module:
        module = so.orthogonal(weight(*shape), "weight", name, **options)
        if gaussian:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.normal_()
        return module

    return build


def torchs(name: str) -> Callable[..., nn.Module]:
    def build(*shape: int) -> nn.Module:
        result: nn.Module = parametrizations.orthogonal(weight(*shape), orthogonal_map=name)
        return result

    return build


def geotorchs(*shape: int) -> nn.Module:
    module = weight(*shape)
    geotorch.orthogonal(module, "weight")
    return module


def orgqrs(*shape: int) -> nn.Module:
    module = weight(*shape)
    with torch.no_grad():
        module.weight.normal_()
    parametrize.register_parametrization(module, "weight", Orgqr())
    return module


SQUARE: dict[str, Callable[..., nn.Module]] = {
    CWY: ours("cwy"),
    CAYLEY: ours("cayley"),
    EXP: ours("matrix_exp"),
    HR: ours("householder"),
    TORCH["householder"]: torchs("householder"),
    TORCH["matrix_exp"]: torchs("matrix_exp"),
    TORCH["cayley"]: torchs("cayley"),
    GEOTORCH: geotorchs,
    ORGQR: orgqrs,
}
TALL: dict[str, Callable[..., nn.Module]] = {
    TCWY: ours("tcwy"),
    OWN: ours("own"),
    CAYLEY: ours("cayley"),
    EXP: ours("matrix_exp"),
    TORCH["householder"]: torchs("householder"),
    ORGQR: orgqrs,
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

    def __init__(self, name: str, build: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
        self.name = name
        self.module = build(*shape)
        generator = torch.Generator().manual_seed(1)
        self.grad = torch.randn(shape, generator=generator)

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


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    title: str,
    builds: dict[str, Callable[..., nn.Module]],
    shape: tuple[int, ...],
    rounds: int,
    expected: dict[str, float],
    products: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Time one row; ``expected`` are seconds guessed from smaller rows, updated here."""
    entries: list[Entry] = []
    results: dict[str, Result] = {}
    for name, build in builds.items():
        results[name] = Result(name)
        if expected.get(name, 0.0) > LIMIT:
            results[name].note = f"over {LIMIT:g} s by a smaller size"
            continue
        entry = Entry(name, build, shape)
        first = seconds(entry.both)
        results[name].error = entry.error()
        if first > SLOW:
            results[name].both, results[name].rounds, results[name].note = first, 1, "one call"
            results[name].forward = seconds(entry.forward)
        else:
            entries.append(entry)
    contestants = []
    for entry in entries:
        contestants.append(Contestant(f"{entry.name}, forward", entry.forward, entry.prepare))
        contestants.append(Contestant(f"{entry.name}, both", entry.both, entry.prepare))
    if products is not None:
        contestants.append(Contestant(PRODUCT, products))
    timings = interleave(contestants, rounds=rounds, device=CPU, seconds=0.01)
    for entry in entries:
        found = results[entry.name]
        found.forward = timings.median(f"{entry.name}, forward")
        found.both = timings.median(f"{entry.name}, both")
        found.rounds = rounds
        found.memory = step_memory(entry.both, CPU, entry.prepare).peak
    for name, found in results.items():
        expected[name] = math.inf if found.both is None else 8.0 * found.both
    show(title, results, timings, next(iter(builds)))
    return {
        "row": title,
        "shape": shape,
        "threads": torch.get_num_threads(),
        "results": [vars(found) for found in results.values()],
        "timings": {name: timings.summary(name) for name in timings.seconds},
        "ratios": {name: ratio(timings, results, name, next(iter(builds))) for name in builds},
        "products": timings.ratio(f"{next(iter(builds))}, both", PRODUCT) if products else None,
    }


def ratio(timings: Timings, results: dict[str, Result], name: str, other: str) -> float | None:
    """Time of ``name`` over time of ``other``, forward and backward; inside rounds if it can be."""
    if f"{name}, both" in timings.seconds and f"{other}, both" in timings.seconds:
        return timings.ratio(f"{name}, both", f"{other}, both")
    mine, theirs = results[name].both, results[other].both
    return None if mine is None or theirs is None else mine / theirs


def show(title: str, results: dict[str, Result], timings: Timings, first: str) -> None:
    rows = []
    for name, found in results.items():
        if found.both is None or found.forward is None:
            rows.append([name, "-", "-", "-", "-", "-", "-", found.note])
            continue
        times = ratio(timings, results, name, first)
        spread = ""
        if f"{name}, both" in timings.seconds:
            low, high = timings.quartiles(f"{name}, both")
            spread = f"{1e3 * low:.2f}-{1e3 * high:.2f}"
        rows.append(
            [
                name,
                f"{1e3 * found.forward:.2f}",
                f"{1e3 * (found.both - found.forward):.2f}",
                spread,
                "" if times is None else f"{times:.2f}",
                f"{found.error:.1e}",
                "" if found.memory is None else f"{found.memory / 2**20:.1f}",
                found.note,
            ]
        )
    header = [title, "forward ms", "backward ms", "both, quartiles", f"x {first}", "error",
              "MiB", ""]  # fmt: skip
    print(markdown_table(header, rows) + "\n", flush=True)


@dataclass(frozen=True)
class Bar:
    """A ratio of times, forward and backward, with a limit; ``least`` says which side is good."""

    what: str
    value: float | None
    limit: float
    least: bool = True

    @property
    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.least else self.value <= self.limit


def bars(rows: dict[str, dict[str, Any]]) -> Iterator[Bar]:
    if tall := rows.get("4096 x 256"):
        ratios = tall["ratios"]
        yield Bar("T-CWY over torch's default, 4096 x 256", ratios[TORCH["householder"]], 300.0)
        yield Bar("T-CWY over OWN, 4096 x 256", ratios[OWN], 1.5)
    if few := rows.get("1024 x 1024, L = 128"):
        yield Bar("CWY over sequential HR, L = 128", few["ratios"][HR], 50.0)
        yield Bar("CWY, L = 128, over torch matrix_exp", few["ratios"][TORCH["matrix_exp"]], 100.0)
    if square := rows.get("1024 x 1024"):
        inverse = square["ratios"][CAYLEY]
        yield Bar("CWY, L = N, in Cayley by solve", inverse and 1 / inverse, 1.1, least=False)
        counted = square["products"]
        yield Bar("CWY, L = N, in its 7 products", counted and counted / 7, 1.4, least=False)
    if batch := rows.get("512 x 32 x 32"):
        peers = [value for name, value in batch["ratios"].items() if name != CWY and value]
        yield Bar("the nearest peer over CWY, 512 x 32 x 32", min(peers), 1.0)


def summary(rows: list[dict[str, Any]]) -> str:
    """Forward and backward of every square size, one column for each map."""
    squares = [row for row in rows if row["products"] is not None]
    lines = []
    for row in squares:
        times = {found["name"]: found["both"] for found in row["results"]}
        known = [times.get(name) for name in SQUARE]
        lines.append([row["row"], *("-" if t is None else f"{1e3 * t:.3g}" for t in known)])
    return markdown_table(["ms, forward and backward", *SQUARE], lines)


def bar_table(judged: list[Bar]) -> str:
    """What was asked for beside what was measured."""
    lines = [
        [
            bar.what,
            "not run" if bar.value is None else f"{bar.value:.2f}",
            f"{'at least' if bar.least else 'at most'} {bar.limit:g}",
            "yes" if bar.met else "no",
        ]
        for bar in judged
    ]
    return markdown_table(["ratio of times, forward and backward", "measured", "bar", "met"], lines)


def chart(rows: list[dict[str, Any]], path: Path) -> None:
    """Forward and backward against N, both axes logarithmic, as figure 1c of the CWY paper."""
    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for name in SQUARE:
        points = [
            (row["shape"][0], 1e3 * found["both"])
            for row in rows
            for found in row["results"]
            if found["name"] == name and found["both"] is not None
        ]
        if points:
            style = {"linewidth": 2.5, "color": "black"} if name == CWY else {"linewidth": 1.2}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name, **style)
    axes.set(
        xscale="log", yscale="log", xlabel="N", ylabel="forward and backward, ms",
        title="one N x N orthogonal matrix from free parameters, float32",
    )  # fmt: skip
    axes.set_xticks(SIZES, [str(size) for size in SIZES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def product_of(size: int) -> Callable[[], object]:
    left, right = torch.randn(size, size), torch.randn(size, size)
    return lambda: left @ right


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    rounds = arguments.rounds
    if "squares" in arguments.sections:
        expected: dict[str, float] = {}
        for size in arguments.sizes:
            shape = (size, size)
            title = f"{size} x {size}"
            rows.append(measure(title, SQUARE, shape, rounds, expected, product_of(size)))
    if "few" in arguments.sections:
        for count in COUNTS:
            builds = {f"CWY, L = {count}": ours("cwy", reflections=count)}
            if count == 128:
                builds[HR] = ours("householder", reflections=count)
                builds[TORCH["matrix_exp"]] = torchs("matrix_exp")
            rows.append(measure(f"1024 x 1024, L = {count}", builds, (1024, 1024), rounds, {}))
    if "tall" in arguments.sections:
        for shape in ((4096, 256), (30000, 50)):
            builds = dict(TALL)
            if shape == (30000, 50):
                # torch keeps an n x n base: 3.6 GB
                del builds[TORCH["householder"]]
            rows.append(measure(f"{shape[0]} x {shape[1]}", builds, shape, rounds, {}))
    if "batch" in arguments.sections:
        rows.append(measure("512 x 32 x 32", SQUARE, (512, 32, 32), rounds, {}))
    return rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    sections = ["squares", "few", "tall", "batch"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default 9)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "parametrizations.json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen sections; the exit status is 1 if a bar fails."""
    arguments = parse(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="geotorch")
    check_step_memory()
    about = machine(CPU)
    for package in ("geotorch", "torch_householder"):
        about["versions"][package] = version(package)
    print(f"{about['processor']}, {about['cores']} cores, {arguments.threads} thread(s)\n")
    rows = run(arguments)
    judged = list(bars({row["row"]: row for row in rows}))
    for bar in judged:
        verdict = "PASS" if bar.met else "FAIL"
        value = "not run" if bar.value is None else f"{bar.value:.2f}"
        sign = ">=" if bar.least else "<="
        print(f"  {verdict}  {bar.what}: {value} (bar {sign} {bar.limit:g})")
    content = {
        "machine": about,
        "settings": {"dtype": "float32", "rounds": arguments.rounds, "threads": arguments.threads},
        "tables": {"squares": summary(rows), "bars": bar_table(judged)},
        "bars": [{**vars(bar), "met": bar.met} for bar in judged],
        "rows": rows,
    }
    write_json(arguments.output, content)
    squares = [row for row in rows if row["products"] is not None]
    if squares:
        chart(squares, arguments.output.with_suffix(".png"))
    return 0 if all(bar.met for bar in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
