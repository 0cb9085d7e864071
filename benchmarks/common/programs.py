"""Shared by the examples: optional packages, atomic files, flags, tables, plots."""

import importlib
import json
import os
import platform
import statistics
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import figures as figures
from benchmarks.common.figures import Panel as Panel

History = Sequence[Mapping[str, float]]  # one entry an epoch


def require(name: str, extra: str = "examples") -> Any:
    """Import an optional package, or say in one line how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"{name} must be installed, got {error}; run: pip install 'stiefel-opt[{extra}]'"
        ) from error


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
    """Replace a text file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def machine() -> dict[str, str | int]:
    """What a reader needs to judge a measured time."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device or platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


# ---- flags ----


def add_flags(parser: ArgumentParser, output: Path, seeds: int = 1) -> None:
    """Add the flags of every example; ``finish_flags`` must follow ``parse_args``."""
    add = parser.add_argument
    add("--device", default="cpu", help="cpu, cuda, cuda:1, mps")
    add("--seed", type=int, default=0, help="the first seed")
    add("--seeds", type=int, nargs="+", default=[seeds], help="one: how many; more: which")
    add("--threads", type=int, default=1, help="CPU threads; 0: torch's choice")
    add("--smoke", action="store_true", help="the smallest run that shows everything: seconds")
    add("--output", type=Path, default=output, help="folder of table, results and plots")
    add("--resume", action="store_true", help="continue unfinished runs, skip finished ones")


class Help(ArgumentDefaultsHelpFormatter):
    """Adds what a flag is by default, unless that is nothing or its text says so."""

    def _get_help_string(self, action: Action) -> str | None:
        told = "default" in (action.help or "") or action.default in (None, False)
        if isinstance(action.default, list) and not told:
            return f"{action.help} (default: {', '.join(map(str, action.default))})"
        return action.help if told else super()._get_help_string(action)


def add_preset(
    parser: ArgumentParser, presets: Mapping[str, Mapping[str, Any]], argv: Sequence[str] | None
) -> None:
    """Add ``--preset``, the first by default; what it sets become the defaults of other flags."""
    usual = next(iter(presets))
    parser.add_argument("--preset", choices=presets, default=usual, help="other flags override it")
    parser.set_defaults(**presets[parser.parse_known_args(argv)[0].preset])


def finish_flags(parser: ArgumentParser, options: Namespace) -> Namespace:
    """Turn the number of seeds into the list of them and set the threads."""
    if len(options.seeds) == 1:
        options.seeds = list(range(options.seed, options.seed + options.seeds[0]))
    if not options.seeds:
        parser.error("--seeds must be at least 1, got 0")
    if options.threads:
        torch.set_num_threads(options.threads)
    return options


def announce(options: Namespace, what: str, seconds: float) -> None:
    """Say what will be done, how long it should take and where the results go."""
    span = f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{max(5, seconds):.0f} seconds"
    print(
        f"{what}\nAbout {span} on {options.device} with {plural(torch.get_num_threads(), 'thread')}"
        f"{', less what is resumed' if options.resume else ''}; results in {options.output}.",
        flush=True,
    )


def run(main: Callable[[], int | None]) -> None:
    """Call the program; Ctrl-C ends it with one line instead of a traceback."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted; finished epochs are kept: the same command with --resume goes on.")
        sys.exit(130)


# ---- tables and plots ----


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table padded so that it also reads as plain text."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(map(str.ljust, line, widths)) + " |"  # one cell per width
        for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Mean over seeds, with the range where there is one."""
    mean = f"{statistics.fmean(values):{form}}"
    return mean if len(values) < 2 else f"{mean} ({min(values):{form}} - {max(values):{form}})"


def worst(errors: Sequence[float | None]) -> str:
    """The largest orthonormality error; "-" where nothing is orthonormal."""
    known = [error for error in errors if error is not None]
    return f"{max(known):.1e}" if known else "-"


def plural(number: int, thing: str) -> str:
    """1 thread, 2 threads."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def listed(seeds: Sequence[int], thing: str = "seed") -> str:
    """Seed 0; seeds 0, 1, 2."""
    return f"{thing}{'' if len(seeds) == 1 else 's'} {', '.join(map(str, seeds))}"


def write_table(folder: Path, title: str, table: str, results: Mapping[str, Any]) -> str:
    """Write table.md and results.json, which keeps the table as text under "tables"."""
    text = f"{title}\n\n{table}\n"
    write_text(folder / "table.md", f"## {text}")
    head = {"title": title, "machine": machine(), "tables": [text]}
    write_json(folder / "results.json", head | dict(results))
    return text


def plot_curves(
    path: Path, title: str, histories: Mapping[str, Sequence[History]], panels: Sequence[Panel]
) -> None:
    """Each method's mean over seeds as a line, with the range as a band; one diagram a panel."""
    require("matplotlib")
    figures.plot_curves(path, title, histories, panels)
