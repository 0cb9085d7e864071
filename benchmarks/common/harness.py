"""What every benchmark here shares: interleaved timing, memory of one step, machine, JSON.

**Timing.** Contestants are timed in rounds. A round times each of them once, in an order that
rotates from round to round, so that a slow moment of the machine hits all of them alike. Ratios
are taken inside a round and only then summarised: the ratio of two medians would mix moments.

**Memory.** See `step_memory`.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stiefel_opt as so

RESULTS = Path(__file__).resolve().parents[1] / "results"
# StiefelAdam without the radius and Nesterov's momentum: the papers' experiments run it.
PRINTED = partial(so.StiefelAdam, radius=1.0, nesterov=False)
PACKAGES = ("torch", "numpy", "scipy", "pogo-torch", "geoopt", "pymanopt")


Clock = Callable[[], float]


class AsPrinted:
    """The sign, the turn and the corrections that are printed."""

    def rule_for(self, group: dict[str, Any]) -> Any:
        return partial(super().rule_for(group), printed=True)  # type: ignore[misc]


class PrintedSGD(AsPrinted, so.PublishedSGD):
    """Algorithm 1."""


class PrintedAdam(AsPrinted, so.PublishedAdam):
    """Algorithm 2."""


def do_nothing() -> None:
    """Default for `Contestant.prepare`."""


@dataclass
class Contestant:
    """One competitor of a timing: what is timed, and what must happen between two timed calls."""

    name: str
    call: Callable[[], object]
    prepare: Callable[[], object] = do_nothing  # before every call, outside the timed region
    repetitions: int = 1  # calls averaged into one timing; set by `calibrate`


@dataclass
class Timings:
    """Seconds per call of every contestant, one entry per round: ``seconds[name][round]``."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return float(np.median(self.seconds[name]))

    def ratio(self, name: str, other: str) -> float:
        """Median over the rounds of time(name) / time(other), both of the same round."""
        return float(np.median(np.divide(self.seconds[name], self.seconds[other])))

    def ratio_quartiles(self, name: str, other: str) -> list[float]:
        ratios = np.divide(self.seconds[name], self.seconds[other])
        return [float(quartile) for quartile in np.percentile(ratios, (25.0, 75.0))]

    def summary(self, name: str) -> dict[str, Any]:
        low, high = np.percentile(self.seconds[name], (25.0, 75.0))
        return {
            "median_ms": 1e3 * self.median(name),
            "quartiles_ms": [1e3 * float(low), 1e3 * float(high)],
            "rounds_ms": [float(f"{1e3 * seconds:.4g}") for seconds in self.seconds[name]],
        }


def flags(
    document: str | None,
    name: str,
    rounds: int,
    threads: int | list[int] = 1,
    *,
    device: bool = True,
) -> ArgumentParser:
    """The flags that programs of timings share; ``name`` is that of the file of results.

    Without ``device`` a program measures on the CPU only.
    """
    parser = ArgumentParser(description=(document or "").splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="interleaved, by default %(default)s"
    )
    several = "+" if isinstance(threads, list) else None
    parser.add_argument("--threads", type=int, nargs=several, default=threads)
    if device:
        parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    return parser


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished; nothing to wait for on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds_per_call(
    contestant: Contestant, repetitions: int, device: torch.device, clock: Clock = time.perf_counter
) -> float:
    """Mean seconds of one call; `prepare` runs before each call and is not counted."""
    total = 0.0
    for _ in range(repetitions):
        contestant.prepare()
        synchronize(device)
        start = clock()
        contestant.call()
        synchronize(device)
        total += clock() - start
    return total / repetitions


def calibrate(
    contestants: Sequence[Contestant],
    device: torch.device,
    seconds: float,
    clock: Clock = time.perf_counter,
) -> None:
    """Warm every contestant up and choose repetitions so that one timing lasts ``seconds``.

    A call that alone takes longer is repeated once per round, which keeps slow rivals affordable.
    """
    for contestant in contestants:
        seconds_per_call(contestant, 2, device)
        once = seconds_per_call(contestant, 1, device, clock)
        if once < seconds:  # short enough for a second look, and for the caches to settle
            once = min(once, seconds_per_call(contestant, 3, device, clock))
        contestant.repetitions = min(1000, max(1, math.ceil(seconds / once)))


def interleave(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    device: torch.device,
    seconds: float = 0.02,
    clock: Clock = time.perf_counter,
) -> Timings:
    """Time all contestants in ``rounds`` interleaved rounds of rotating order, warmed up.

    With ``clock=time.process_time`` other work on the machine does not count.
    """
    calibrate(contestants, device, seconds, clock)
    timings = Timings({contestant.name: [] for contestant in contestants})
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds if contestants else 0):
            gc.collect()
            shift = number % len(contestants)
            for contestant in (*contestants[shift:], *contestants[:shift]):
                measured = seconds_per_call(contestant, contestant.repetitions, device, clock)
                timings.seconds[contestant.name].append(measured)
    finally:
        if collecting:
            gc.enable()
    return timings


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one call: highest point above its start, and what was still held at its end."""

    peak: int
    kept: int


def step_memory(
    call: Callable[[], object], device: torch.device, prepare: Callable[[], object] = do_nothing
) -> StepMemory:
    """Peak of live tensor bytes during ``call`` above those at its start, and bytes kept after.

    On a CPU torch's allocator reports every allocation and every release to the profiler,
    including temporaries inside one operator; the running sum of these signed sizes over the
    span of the call is the number of live bytes above the start, and its maximum is the peak.
    Buffers allocated before the profiler runs are unknown to it and their release would be
    missed, which could only overstate the peak; so the call runs twice under the profiler and
    only the second one is counted. Workspace that a maths library takes from malloc by itself is
    invisible. On CUDA the caching allocator's own statistics are read instead.
    A test checks it against a known answer.
    """
    prepare()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return StepMemory(peak, torch.cuda.memory_allocated(device) - before)
    label = "measured call"
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call()
        prepare()
        with torch.profiler.record_function(label):
            call()
    recorded = profiler.profiler
    if recorded is None or recorded.kineto_results is None:
        raise RuntimeError("the profiler returned no events; torch was built without kineto")
    events = recorded.kineto_results.events()
    span = next(event for event in events if event.name() == label)
    start, end = span.start_ns(), span.start_ns() + span.duration_ns()
    sizes = [
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and start <= event.start_ns() <= end
    ]
    live = peak = 0
    for _, size in sorted(sizes, key=lambda entry: entry[0]):
        live += size
        peak = max(peak, live)
    return StepMemory(peak, live)


def kept_bytes(compute: Callable[[], Any], without: Iterable[torch.Tensor] = ()) -> tuple[int, Any]:
    """Bytes that a forward pass keeps for its backward pass, and what it returns.

    Each storage counts once, those of ``without`` not at all; buffers inside an operation are not
    seen.
    """
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    for tensor in without:
        held.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(held.values()), result


def orthonormality_error(matrices: torch.Tensor) -> float:
    """max |X'X - I| over float64 copies, computed here and not by any contestant."""
    gram = matrices.mT @ matrices
    identity = torch.eye(gram.size(-1), dtype=gram.dtype, device=gram.device)
    return float((gram - identity).abs().max())


def processor_name() -> str:
    """The processor's model as the system calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def one_thread() -> None:
    """Refuse to run unless everybody has one thread, numpy and processes to come included."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        raise SystemExit("OMP_NUM_THREADS must be 1, so that everybody has one thread; export it")
    torch.set_num_threads(1)


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def machine(device: torch.device | str = "cpu", packages: Sequence[str] = ()) -> dict[str, Any]:
    """Processor, cores, device, versions and date; no host name, no path."""
    on_gpu = torch.device(device).type == "cuda"
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average_1_minute": round(os.getloadavg()[0], 2),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor_name(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {
            "stiefel-opt": so.__version__,
            **{package: version(package) for package in (*PACKAGES, *packages)},
        },
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to ``path`` at the end: a kill leaves the old or the new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file at once."""
    with atomic(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, content: Mapping[str, Any], *, exact: bool = False) -> None:
    """Write ``content`` readably and at once, so that a stopped run leaves no half file.

    Six digits of a number are kept, but for ``exact``; a list of numbers stands in one line.
    """
    text = json.dumps(content if exact else _shortened(content), indent=1)
    numbers = re.compile(r"\[\s+((?:-?[\d.e+-]+,?\s+)+)\]")
    text = numbers.sub(lambda found: "[" + " ".join(found.group(1).split()) + "]", text)
    write_text(path, text + "\n")


def keep_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Keep the settings of the runs in a folder; others are refused."""
    path = folder / "settings"
    if not path.exists():
        write_json(path, settings)
    elif (theirs := json.loads(path.read_text())) != settings:
        raise ValueError(
            f"--folder must hold runs of {theirs}, got {settings}; choose another folder"
        )


def _shortened(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shortened(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def lowest(ends: Mapping[float, float]) -> float:
    """The learning rate with the lowest loss that is a number."""
    return min(ends, key=lambda rate: ends[rate] if ends[rate] > 0 else math.inf)


def beyond(rates: Sequence[float], best: float) -> list[float]:
    """The next learning rate past ``best`` where that is the first or last of ``rates``."""
    if best == rates[0]:
        return [float(f"{rates[1] / 10:.1g}")]
    return [float(f"{10 * rates[-2]:.1g}")] if best == rates[-1] else []


def middle_and_range(values: Sequence[float], form: str) -> str:
    """The median, with the range in brackets."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} - {high:{form}})"


def mean_and_deviation(values: Sequence[float], form: str) -> str:
    """The mean, with the standard deviation of several."""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{form}}"


def final_value(values: Sequence[float]) -> float:
    """Where a run ends: the median of the last five measurements, of fewer than 25 the last fifth.

    A single one would tell where a jump left it.
    """
    return statistics.median(values[-min(5, max(1, len(values) // 5)) :])


def final_values(runs: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """That of one entry of the history of each run."""
    return [final_value([entry[key] for entry in run["history"]]) for run in runs]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal; the first column is text."""
    first, *others = (max(map(len, column)) for column in zip(header, *rows, strict=True))
    rule = "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)])
    lines = [
        " | ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)])
        for row in (header, *rows)
    ]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
