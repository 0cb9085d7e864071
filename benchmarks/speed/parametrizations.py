"""One orthonormal weight from free parameters, forward and backward, against other packages.

Every contestant is a module with one parametrized weight; timed is ``module.weight`` alone and
together with ``weight.backward(G)``, G Gaussian, in float32. Orthonormality error, max |W'W - I| in
float64, and the peak of temporary memory stand beside the times. Questions, one section each:

    squares   N x N for N = 64 ... 2048, as in figure 1c of the CWY paper, with a chart
    few       CWY with L reflections, N = 1024, L from 16 to 1024
    tall      4096 x 256 and 30000 x 50
    batch     512 matrices of 32 x 32

The last column of the table of ratios says how far a perfect implementation of the same formula
could go: the other's time over that of the formula's products alone, at the speed of one product in
the same rounds.

A contestant whose first call takes longer than `SLOW` seconds is timed by that call alone; one
that would take longer than `LIMIT`, judged by a smaller size, or hold more than `ROOM`, or that
forms an n x n matrix for a tall weight, is not run. Rows are written as they come; ``--add`` keeps
the other rows of the file, so that sections can be run one by one.

    python -m benchmarks.speed.parametrizations --threads 1
    python -m benchmarks.speed.parametrizations --threads 1 --sections tall --add
"""

from __future__ import annotations

import json
import math
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is chatty otherwise

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import stiefel_opt as so
from benchmarks.common import figures, harness

try:
    import geotorch
    from torch_householder import torch_householder_orgqr
except ImportError as error:
    raise SystemExit(f"{error}; pip install --no-deps geotorch torch_householder") from error

SECONDS = 0.1  # that a timing lasts at least: a rival that fills memory cools the caches
SLOW = 1.0  # seconds of a call that is timed once
LIMIT = 30.0  # seconds of a call that is not made
ROOM = 8 * 2**30  # bytes that a graph may hold
SIZES = (64, 128, 256, 512, 1024, 2048)
TALL_SHAPES = ((4096, 256), (30000, 50))
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


def ours(name: str, **options: Any) -> Callable[..., nn.Module]:
    def build(*shape: int) -> nn.Module:
        module = so.orthogonal(weight(*shape), "weight", name, **options)
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        return module

    return build


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
    CWY: ours("cwy"),
    CAYLEY: ours("cayley"),
    EXP: ours("matrix_exp"),
    HR: ours("householder"),
    **{title: torchs(name) for name, title in TORCH.items()},
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
        if name == HR and (held := 4 * math.prod(shape) * shape[-1]) > ROOM:
            results[name].note = f"autograd would hold {held / 2**30:.0f} GiB"
            continue
        entry = Entry(name, build, shape)
        first = harness.seconds_per_call(harness.Contestant(name, entry.both), 1, CPU)
        results[name].error = entry.error()
        if first > SLOW:
            results[name].both, results[name].rounds, results[name].note = first, 1, "one call"
            forward = harness.Contestant(name, entry.forward)
            results[name].forward = harness.seconds_per_call(forward, 1, CPU)
        else:
            entries.append(entry)
    contestants = []
    for entry in entries:
        contestants.append(
            harness.Contestant(f"{entry.name}, forward", entry.forward, entry.prepare)
        )
        contestants.append(harness.Contestant(f"{entry.name}, both", entry.both, entry.prepare))
    if products is not None:
        contestants.append(harness.Contestant(PRODUCT, products))
    timings = harness.interleave(contestants, rounds=rounds, device=CPU, seconds=SECONDS)
    for entry in entries:
        found = results[entry.name]
        found.forward = timings.median(f"{entry.name}, forward")
        found.both = timings.median(f"{entry.name}, both")
        found.rounds = rounds
        found.memory = harness.step_memory(entry.both, CPU, entry.prepare).peak
    for name, found in results.items():
        expected[name] = math.inf if found.both is None else 8.0 * found.both
    first = next(iter(builds))
    print(title, *(f"{name} {found.both or math.nan:.3g} s" for name, found in results.items()))
    timed = [entry.name for entry in entries]
    return {
        "row": title,
        "shape": shape,
        "threads": torch.get_num_threads(),
        "results": [vars(found) for found in results.values()],
        "timings": {name: timings.summary(name) for name in timings.seconds},
        "ratios": {name: ratio(timings, results, name, first) for name in builds},
        "products": {name: timings.ratio(f"{name}, both", PRODUCT) for name in timed}
        if products
        else None,
    }


def ratio(
    timings: harness.Timings, results: dict[str, Result], name: str, other: str
) -> float | None:
    """Time of ``name`` over time of ``other``, forward and backward; inside rounds if it can be."""
    if f"{name}, both" in timings.seconds and f"{other}, both" in timings.seconds:
        return timings.ratio(f"{name}, both", f"{other}, both")
    mine, theirs = results[name].both, results[other].both
    return None if mine is None or theirs is None else mine / theirs


class Ratio(NamedTuple):
    """Of times, forward and backward; ``bound``: if the products of the formula took all time."""

    what: str
    value: float | None
    bound: float | None = None


def bound(row: dict[str, Any], rival: str, flops: float, product: float) -> float | None:
    """Time of ``rival`` over that of ``flops`` at the rate of a product of ``product`` flops."""
    over = row["products"].get(rival)
    return None if over is None else over * product / flops


def ratios_of(rows: dict[str, dict[str, Any]]) -> Iterator[Ratio]:
    if tall := rows.get("4096 x 256"):
        n, m = 4096, 256
        ratios = tall["ratios"]
        # Gram matrix (nine sixteenths) and product; three products, two solves, K backward.
        flops = (1.125 + 2 + 6) * n * m**2 + 3.125 * m**3
        most = bound(tall, OWN, flops, 2 * n * m**2)
        yield Ratio("T-CWY over torch's default, 4096 x 256", ratios[TORCH["householder"]])
        yield Ratio("T-CWY over OWN, 4096 x 256", ratios[OWN], most)
    if few := rows.get("1024 x 1024, L = 128"):
        n, count = 1024, 128
        flops = 6 * n**2 * count + 8 * n * count**2
        ratios = few["ratios"]
        most = bound(few, HR, flops, 2 * n**3)
        yield Ratio("CWY over sequential HR, L = 128", ratios[HR], most)
        yield Ratio("CWY, L = 128, over torch matrix_exp", ratios[TORCH["matrix_exp"]])
    if square := rows.get("1024 x 1024"):
        inverse = square["ratios"][CAYLEY]
        yield Ratio("CWY, L = N, in Cayley by solve", inverse and 1 / inverse)
        counted = square["products"].get(CWY)
        yield Ratio("CWY, L = N, in its 7 products", counted and counted / 7)
    if batch := rows.get("512 x 32 x 32"):
        peers = [value for name, value in batch["ratios"].items() if name != CWY and value]
        yield Ratio("the nearest peer over CWY, 512 x 32 x 32", min(peers))


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


def ratio_table(found: Iterable[Ratio]) -> str:
    lines = [[row[0], *("" if v is None else f"{v:.2f}" for v in row[1:])] for row in found]
    header = ["ratio of times, forward and backward", "measured", "if products were all"]
    return harness.markdown_table(header, lines)


def product_of(rows: int, columns: int) -> Callable[[], object]:
    left, right = torch.randn(rows, columns), torch.randn(columns, columns)
    return lambda: left @ right


def run(arguments: Namespace) -> Iterator[dict[str, Any]]:
    """Measure the chosen sections, one row after the other."""
    rounds, sections = arguments.rounds, arguments.sections
    expected: dict[str, float] = {}
    for size in arguments.sizes if "squares" in sections else ():
        product = product_of(size, size)
        yield measure(f"{size} x {size}", SQUARE, (size, size), rounds, expected, product)
    for count in COUNTS if "few" in sections else ():
        builds = {f"CWY, L = {count}": ours("cwy", reflections=count)}
        if count == 128:
            builds[HR] = ours("householder", reflections=count)
            builds[TORCH["matrix_exp"]] = torchs("matrix_exp")
        counted = product_of(1024, 1024) if count == 128 else None
        yield measure(f"1024 x 1024, L = {count}", builds, (1024, 1024), rounds, {}, counted)
    for shape in TALL_SHAPES if "tall" in sections else ():
        builds = dict(TALL)
        if shape == (30000, 50):  # torch keeps an n x n base: 3.6 GB
            del builds[TORCH["householder"]]
        title = f"{shape[0]} x {shape[1]}"
        yield measure(title, builds, shape, rounds, {}, product_of(*shape))
    if "batch" in sections:
        yield measure("512 x 32 x 32", SQUARE, (512, 32, 32), rounds, {})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the chosen sections, print and write."""
    parser = harness.flags(__doc__, "parametrizations", rounds=9)
    sections = ["squares", "few", "tall", "batch"]
    parser.add_argument("--sections", nargs="+", choices=sections, default=sections)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--add", action="store_true", help="keep the other rows of the file")
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore", module="geotorch")
    about = harness.machine(packages=("geotorch", "torch_householder"))
    print(f"{about['processor']}, {about['cores']} cores, {arguments.threads} thread(s)\n")
    rows: dict[str, dict[str, Any]] = {}
    if arguments.add and arguments.output.exists():
        rows = {row["row"]: row for row in json.loads(arguments.output.read_text())["rows"]}
    settings = {"dtype": "float32", "rounds": arguments.rounds, "threads": arguments.threads}
    for row in run(arguments):
        rows[row["row"]] = row
        known = list(rows.values())
        tables = {"squares": summary(known), "bars": ratio_table(ratios_of(rows))}
        content = {"machine": about, "settings": settings, "tables": tables, "rows": known}
        harness.write_json(arguments.output, content)
    if of_figure(list(rows.values())):
        figures.parametrizations(arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
