"""What programs that train share: optional packages, flags, reports of runs."""

import statistics
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import figures as figures
from benchmarks.common.figures import Panel as Panel
from benchmarks.common.figures import plot_curves as plot_curves
from benchmarks.common.harness import machine, markdown_table, write_json, write_text

# ---- flags ----


def add_flags(parser: ArgumentParser, output: Path, seeds: int = 1) -> None:
    """Add the flags of every program; ``finish_flags`` must follow ``parse_args``."""
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


def parsed(
    parser: ArgumentParser,
    argv: Sequence[str] | None,
    smoke: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]] | None = None,
) -> Namespace:
    """Flags over the smoke sizes over presets over defaults."""
    if presets:
        add_preset(parser, presets, argv)
    if parser.parse_known_args(argv)[0].smoke:
        parser.set_defaults(**smoke)
    return finish_flags(parser, parser.parse_args(argv))


def announce(options: Namespace, what: str) -> None:
    """Say what will be done and where the results go."""
    threads = plural(torch.get_num_threads(), "thread")
    print(f"{what}\nOn {options.device} with {threads}; results in {options.output}.", flush=True)


def run(main: Callable[[], object]) -> None:
    """Call the program; Ctrl-C ends it with one line instead of a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print("\nInterrupted; finished epochs are kept: the same command with --resume goes on.")
        sys.exit(130)


# ---- tables and plots ----


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
    """Write table.md and results.json, which keeps the table as text under "tables".

    The machine is that of the first run that names one.
    """
    text = f"{title}\n\n{table}\n"
    write_text(folder / "table.md", f"## {text}")
    named = [run["machine"] for run in results.get("runs", ()) if "machine" in run]
    head = {"title": title, "machine": (named or [machine()])[0], "tables": [text]}
    write_json(folder / "results.json", head | dict(results), exact=True)
    return text


def write_report(
    options: Namespace,
    title: str,
    table: tuple[Sequence[str], Sequence[Sequence[str]]],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    panels: Sequence[Panel],
    short: str | None = None,
    **results: Any,
) -> None:
    """Table, results and curves of the runs by method; ``short`` is the title of the picture."""
    runs = [run for group in records.values() for run in group]
    seeds = f"seeds {', '.join(map(str, options.seeds))}"
    title = f"{title}, {seeds}"
    write_table(options.output, title, markdown_table(*table), results | {"runs": runs})
    histories = {name: [run["history"] for run in group] for name, group in records.items()}
    plot_curves(options.output / "curves.png", short or title, histories, panels)
