"""What the orthogonal vision transformer leaves behind: finished runs, tables, plots."""

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.common.programs import (
    History,
    Panel,
    figures,
    machine,
    markdown_table,
    plot_curves,
    require,
    write_json,
    write_text,
)
from benchmarks.common.training import Record
from benchmarks.papers.kong.vit_methods import PUBLISHED, ROWS

HEADER = ["Method", "Test error %", "Deviation", "Range", "Seeds", "Training loss", "Largest logit"]
HEADER += ["Orthonormality", "Images/s"]
PUBLISHED_HEADER = ["Published CIFAR-10 %", "CIFAR-100 %"]
PANELS = [
    Panel("test_error", "test error (%)", "Test error after each epoch", "log"),
    Panel("orthonormality_error", "max |W W' - I|", "Orthonormality of queries and keys", "log"),
]


def by_title(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The runs of each method, over the seeds."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["title"], []).append(record)
    return groups


def published(record: Record) -> tuple[str, str]:
    """Test errors of this method in the paper, or dashes."""
    name = ROWS.get(record["optimizer"], record["optimizer"])
    return PUBLISHED.get(f"{name}:{record['constraint']}", ("-", "-"))


def published_table(records: Sequence[Record]) -> str:
    """Mean and spread of the test error after the last epoch, beside the paper's."""
    rows = [
        [*row(title, [run["history"] for run in runs]), *published(runs[0])]
        for title, runs in by_title(records).items()
    ]
    return markdown_table([*HEADER, *PUBLISHED_HEADER], rows)


def row(title: str, runs: Sequence[History]) -> list[str]:
    """What the last epochs of a method's runs gave."""
    last = [run[-1] for run in runs]
    errors = [entry["test_error"] for entry in last]
    speed = statistics.median(epoch["images_per_second"] for run in runs for epoch in run)
    return [
        title,
        f"{statistics.fmean(errors):.2f}",
        f"{statistics.stdev(errors):.2f}" if len(errors) > 1 else "-",
        f"{min(errors):.2f} to {max(errors):.2f}",
        str(len(errors)),
        f"{statistics.fmean(entry['train_loss'] for entry in last):.3f}",
        f"{max(entry['largest_logit'] for entry in last):.1f}",
        f"{max(entry['orthonormality_error'] for entry in last):.1e}",
        f"{speed:.0f}",
    ]


def final_table(histories: Mapping[str, Sequence[History]]) -> tuple[str, str]:
    """Table of the test errors after the last epoch, and a sentence that names the winner."""
    table = markdown_table(HEADER, [row(title, runs) for title, runs in histories.items()])
    errors = {t: [run[-1]["test_error"] for run in runs] for t, runs in histories.items()}
    ranked = sorted(errors, key=lambda title: statistics.fmean(errors[title]))
    winner = f"Lowest mean test error: {ranked[0]}, {statistics.fmean(errors[ranked[0]]):.2f} %"
    if len(ranked) > 1:
        first, second = errors[ranked[0]], errors[ranked[1]]
        gap = statistics.fmean(second) - statistics.fmean(first)
        apart = "do not overlap" if max(first) < min(second) else "overlap"
        seeds = "one seed only" if len(first) == 1 else f"their ranges over the seeds {apart}"
        winner += f", {gap:.2f} points below {ranked[1]} ({seeds})"
    return table, winner + "."


def plot_table(path: Path, title: str, records: Sequence[Record]) -> None:
    """One line a method: test error of each seed, and the mean."""
    require("matplotlib")
    figures.errors(path, {title: records})


def summary(record: Record) -> Record:
    """A run without its history but for the test errors and the last epoch: 48 runs fit a file."""
    names = ["optimizer", "constraint", "lr", "constrained_lr", "title", "seed"]
    errors = [round(epoch["test_error"], 3) for epoch in record["history"]]
    return {
        **{name: record[name] for name in names},
        "last_epoch": record["history"][-1],
        "test_errors": " ".join(f"{error:g}" for error in errors),
    }


def write_results(options: Namespace, records: Sequence[Record], plots: bool) -> None:
    """Write table (text, Markdown), results (JSON) and plots of the finished runs."""
    histories = {name: [run["history"] for run in runs] for name, runs in by_title(records).items()}
    title = (
        f"{options.data}: ViT of {options.layers} layers x {options.width}, {options.heads} heads, "
        f"{options.epochs} epochs, seeds {', '.join(map(str, options.seeds))}"
    )
    table, winner = final_table(histories)
    results: Record = {"title": title, "winner": winner, "machine": machine()}
    if options.table:
        table = published_table(records)
        results["settings"] = {
            key: value
            for key, value in records[0].items()
            if key not in summary(records[0]) and key not in ("history", "machine")
        } | {"penalty": options.penalty}
    text = f"{title}\n\n{table}\n\n{winner}\n"
    results["tables"] = [text]
    results["runs"] = [summary(record) for record in records] if options.table else list(records)
    write_text(options.output / "table.txt", text)
    write_text(options.output / "table.md", f"## {text}")
    write_json(options.output / "results.json", results)
    if plots and not options.table:
        plot_curves(options.output / "curves.png", title, histories, PANELS)
    elif plots:
        plot_table(options.output / "table.png", title, records)
        for place in {record["constraint"]: None for record in records}:
            names = {record["title"] for record in records if record["constraint"] == place}
            few = {name: runs for name, runs in histories.items() if name in names}
            plot_curves(options.output / f"curves-{place}.png", title, few, PANELS)
