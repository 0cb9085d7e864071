"""What limits each row of `step_time.py`: products, memory traffic, or everything around them.

    python -m benchmarks.speed.step_profile  # all rows, then the vision transformer
    python -m benchmarks.speed.step_profile \\
        --what counts  # no times: runs on a busy machine as well
    python -m benchmarks.speed.step_profile --rows one-4096x512 --what times

**Counts** hold on every machine. Every operator of a usual step and of a correcting one (each
eighth on a CPU) passes a counter. Tall products are those with a side of n: their flops, by torch's
own formulas, over those of one n x m by m x m product of all matrices. Small ones, m x m by m x m,
are counted likewise over m x m by m x m. Bytes are those that the other operators read and write,
each tensor once an operator, in multiples of the parameters; views and empty tensors are free.

**Times** are medians over steps without a profiler and, in turns with them, of what the kernels of
products and the other kernels take themselves under `torch.profiler`. From each kernel the time is
taken off that its kind takes on single numbers: that is calling it, not work. "around" is the rest
of the undisturbed step: Python, dispatch, allocation. The largest of the three limits the row.

**A training step** of the paper's vision transformer (7 layers of width 384, 12 heads of 32,
batches of 32 images of 32 x 32): the step is timed apart from forward and backward; the bar for the
optimizer is a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler is chatty otherwise

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json
from benchmarks.speed.contestants import ADAM, SGD, Entry, Row, ours
from benchmarks.speed.step_time import ROWS

CPU = torch.device("cpu")
PERIOD = 8  # every so many steps rounding is taken out, where reading the count is free
PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm",
            "aten::baddbmm_")  # fmt: skip
IN_PLACE = {  # which torch's table of flops lacks
    torch.ops.aten.addmm_: torch.ops.aten.addmm,
    torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm,
}
SHARE = 0.1  # of a training step, for the optimizer
PATH = RESULTS / "step_profile.json"


class Counter(TorchDispatchMode):
    """Flops of products with a side of n and of others, and bytes that other operators move."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.tall = self.small = 0
        self.bytes = self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        returns = function._schema.returns
        written = [r.alias_info is not None and r.alias_info.is_write for r in returns]
        views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
        packet = IN_PLACE.get(function.overloadpacket, function.overloadpacket)
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            shapes = [tensor.shape for tensor in tensors_in((args, result))]
            if any(self.n in shape[-2:] for shape in shapes):
                self.tall += flops
            else:
                self.small += flops
            self.calls += 1
        elif not any(views) and "empty" not in str(packet):
            moved = tensors_in((args, kwargs))
            if not any(written):
                moved += tensors_in(result)
            self.bytes += sum(tensor.nbytes for tensor in moved)
            self.bytes += sum(t.nbytes for t in tensors_in(result)) if any(written) else 0
            self.calls += 1
        return result


def tensors_in(found: Any) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(found, Tensor):
        return [found]
    inner = found.values() if isinstance(found, dict) else found
    if not isinstance(found, (dict, list, tuple)):
        return []
    return [tensor for item in inner for tensor in tensors_in(item)]


def advance(entry: Entry, steps: int) -> None:
    for _ in range(steps):
        entry.contestant.prepare()
        entry.contestant.call()


def count(entry: Entry, row: Row) -> dict[str, Any]:
    """Products, calls and bytes of step 10, a usual one, and of step 16, which corrects."""
    one_tall = 2 * row.matrices * row.n * row.m**2
    one_small = 2 * row.matrices * row.m**3
    size = 4 * row.matrices * row.n * row.m
    record: dict[str, Any] = {}
    advance(entry, PERIOD + 1)
    for name, number in (("usual", PERIOD + 2), ("correcting", 2 * PERIOD)):
        entry.contestant.prepare()
        with Counter(row.n) as counter:
            entry.contestant.call()
        record[name] = {
            "tall_products": counter.tall / one_tall,
            "small_products": counter.small / one_small,
            "bytes": counter.bytes,
            "bytes_over_parameters": counter.bytes / size,
            "operators": counter.calls,
        }
        if name == "usual":
            advance(entry, 2 * PERIOD - number - 1)
    return record


def kernel_times(call: Callable[[], object], idle: dict[bool, float]) -> tuple[float, float]:
    """Milliseconds that products and other kernels of a call take, less what they cost on nothing.

    ``idle`` is what a product, and another operator, takes on single numbers: calling, not work.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    found = {True: 0.0, False: 0.0}
    for event in profiler.events():
        if event.name.startswith("aten::"):
            kind = event.name in PRODUCTS
            found[kind] += max(0.0, event.self_cpu_time_total - idle[kind])
    return found[True] / 1e3, found[False] / 1e3


def idle_times() -> dict[bool, float]:
    """Microseconds that the profiler sees for a product, and for a sum, of single numbers."""
    one = torch.ones(1, 1, 1)
    result = torch.empty_like(one)

    def call() -> None:
        for _ in range(200):
            torch.bmm(one, one, out=result)
            one.add_(0.0)

    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    found: dict[bool, list[float]] = {True: [], False: []}
    for event in profiler.events():
        if event.name in ("aten::bmm", "aten::add_"):
            found[event.name in PRODUCTS].append(event.self_cpu_time_total)
    return {kind: statistics.median(values) for kind, values in found.items()}


def timed(entry: Entry, seconds: float) -> dict[str, Any]:
    """Milliseconds of a step, and of its kernels; what is around them is the rest.

    Undisturbed and profiled steps take turns, so that a slow moment hits both.
    """
    idle = idle_times()
    one = entry.contestant
    kernel_times(one.call, idle)  # the first profile of a process is slow
    advance(entry, 3)
    walls: list[float] = []
    kernels: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(walls) < 5 or (len(walls) < 40 and time.perf_counter() - began < seconds):
        one.prepare()
        start = time.perf_counter()
        one.call()
        walls.append(1e3 * (time.perf_counter() - start))
        one.prepare()
        kernels.append(kernel_times(one.call, idle))
    products, others = (statistics.median(column) for column in zip(*kernels, strict=True))
    wall = statistics.median(walls)
    shares = {"products": products, "memory traffic": others}
    shares["around"] = max(0.0, wall - products - others)
    limit = max(shares, key=lambda kind: shares[kind])
    return {"wall_ms": wall, **shares, "limit": limit, "idle_us": [idle[True], idle[False]]}


# ---- a whole training step ---------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm transformer block whose query and key heads have orthonormal rows."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k = (so.constrain(nn.Linear(width, width), heads=heads) for _ in range(2))
        self.v, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.forward_part = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norms[0](tokens)
        parts = [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for f in (self.q, self.k, self.v)]  # fmt: skip
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = tokens + self.forward_part(self.norms[1](tokens))
        return result


def transformer_step(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of forward and backward, and of the optimizer, in steps of one training."""
    torch.manual_seed(0)
    width, heads, tokens, images = 384, 12, 64, 32
    model = nn.Sequential(
        nn.Linear(48, width), *(Block(width, heads) for _ in range(7)), nn.LayerNorm(width)
    )
    classifier = nn.Linear(width, 10)
    positions = nn.Parameter(0.02 * torch.randn(1, tokens, width))
    parameters = [*model.parameters(), *classifier.parameters(), positions]
    optimizer = {
        SGD: lambda: so.StiefelSGD(parameters, lr=0.1, weight_decay=5e-5),
        ADAM: lambda: so.StiefelAdam(parameters, lr=1e-3, weight_decay=5e-5),
    }[name]()
    learning, moving = [], []
    for number in range(rounds + 2):
        patches, labels = torch.randn(images, tokens, 48), torch.randint(10, (images,))
        start = time.perf_counter()
        optimizer.zero_grad()
        found = model[0](patches) + positions
        logits = classifier(model[1:](found).mean(1))
        nn.functional.cross_entropy(logits, labels).backward()
        middle = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        if number >= 2:
            learning.append(1e3 * (middle - start))
            moving.append(1e3 * (end - middle))
    shares = [m / (m + t) for m, t in zip(moving, learning, strict=True)]
    return {
        "forward_backward_ms": statistics.median(learning),
        "optimizer_ms": statistics.median(moving),
        "share": statistics.median(shares),
        "shares": shares,
        "met": statistics.median(shares) <= SHARE,
        "orthonormality_error": float(so.orthonormality_error(model)),
    }


# ---- tables ------------------------------------------------------------------------------------


def tables(content: dict[str, Any]) -> dict[str, str]:
    found = {}
    lines, limits = [], []
    for row in ROWS:
        for name in (SGD, ADAM):
            record = content["rows"].get(f"{row.name}, {name}", {})
            if "counts" in record:
                usual, due = record["counts"]["usual"], record["counts"]["correcting"]
                lines.append([
                    f"{row.label}, {name}",
                    *(f"{c['tall_products']:.1f}" for c in (usual, due)),
                    f"{usual['small_products']:.0f}",
                    *(f"{c['bytes_over_parameters']:.1f}" for c in (usual, due)),
                    f"{usual['operators']}",
                ])  # fmt: skip
            if "times" in record:
                times = record["times"]
                parts = ("wall_ms", "products", "memory traffic", "around")
                cells = [f"{times[part]:.3f}" for part in parts]
                limits.append([f"{row.label}, {name}", *cells, times["limit"]])
    header = ("a step", "tall products", "correcting", "m x m products", "bytes / parameters",
              "correcting", "operators")  # fmt: skip
    found["counts"] = markdown_table(header, lines)
    header = ("ms a step", "whole", "products", "memory traffic", "around", "limited by")
    found["limits"] = markdown_table(header, limits)
    lines = [
        [name, f"{one['forward_backward_ms']:.0f}", f"{one['optimizer_ms']:.1f}",
         f"{100 * one['share']:.1f} %"]
        for name, one in content["transformer"].items()
    ]  # fmt: skip
    header = ("vision transformer, ms", "forward and backward", "optimizer", "its share")
    found["training step"] = markdown_table(header, lines)
    return found


def keep(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what there is so far: a run that is stopped leaves its rows."""
    for what in options.what:
        content["machine"][what] = {"threads": options.threads, **machine(CPU)}
    content["tables"] = tables(content)
    if not options.smoke:
        write_json(PATH, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="*", choices=names, default=names)
    parser.add_argument("--what", choices=("counts", "times", "transformer"), nargs="+",
                        default=["counts", "times", "transformer"])  # fmt: skip
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for one row and optimizer")
    parser.add_argument("--rounds", type=int, default=8, help="steps of the transformer")
    parser.add_argument("--smoke", action="store_true", help="nothing is written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    content: dict[str, Any] = {"rows": {}, "transformer": {}, "machine": {}}
    if PATH.exists() and not options.smoke:
        content = json.loads(PATH.read_text())
    for row in ROWS:
        wanted = set(options.what) & {"counts", "times"}
        for entry in ours(row, CPU) if row.name in options.rows and wanted else ():
            record = content["rows"].setdefault(f"{row.name}, {entry.contestant.name}", {})
            if "counts" in wanted:
                record["counts"] = count(entry, row)
            if "times" in wanted:
                record["times"] = timed(entry, options.seconds)
        print(row.name, flush=True)
        keep(content, options)
    if "transformer" in options.what:
        content["transformer"] = {n: transformer_step(n, options.rounds) for n in (SGD, ADAM)}
        keep(content, options)
    print("", *content["tables"].values(), sep="\n\n")


if __name__ == "__main__":
    main()
