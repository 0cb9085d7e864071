"""What the orthogonal vision transformer leaves behind: table, results, plots."""

import itertools
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence

from benchmarks.common.harness import final_values, markdown_table
from benchmarks.common.programs import Panel, figures, plot_curves, write_table
from benchmarks.common.training import Record
from benchmarks.papers.kong.vit_methods import PUBLISHED, ROWS

HEADER = ["Method", "Test error %", "Deviation", "Range", "Seeds", "Training loss", "Largest logit"]
HEADER += ["Orthonormality", "Images/s", "Published CIFAR-10 %", "CIFAR-100 %"]
PANELS = [
    Panel("test_error", "test error (%)", "Test error after each epoch", "log"),
    Panel("orthonormality_error", "max |W W' - I|", "Orthonormality of queries and keys", "log"),
]
KEPT = ("optimizer", "constraint", "lr", "constrained_lr", "title", "seed")


def row(title: str, runs: Sequence[Record]) -> list[str]:
    """What a method's runs end with, beside the test errors of the paper."""
    last = [run["history"][-1] for run in runs]
    errors = final_values(runs, "test_error")
    rule, constraint = (runs[0][key] for key in ("optimizer", "constraint"))
    speed = statistics.median(entry["images_per_second"] for entry in last)
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
        *PUBLISHED.get(f"{ROWS.get(rule, rule)}:{constraint}", ("-", "-")),
    ]


def summary(record: Record) -> Record:
    """A run without its history but for the test errors and the last epoch: 90 runs fit a file.

    ``constrained_lr`` stands where it differs from ``lr``; epoch and step are those of all runs.
    """
    errors = [round(epoch["test_error"], 3) for epoch in record["history"]]
    kept = {name: record[name] for name in KEPT}
    if kept["constrained_lr"] == kept["lr"]:
        del kept["constrained_lr"]
    last = {name: x for name, x in record["history"][-1].items() if name not in ("epoch", "step")}
    return {**kept, "last_epoch": last, "test_errors": " ".join(f"{error:g}" for error in errors)}


def write_results(options: Namespace, groups: Mapping[str, Sequence[Record]]) -> None:
    """Table, results and plots of the finished runs; of a whole table without the histories."""
    title = (
        f"{options.data}: ViT of {options.layers} layers x {options.width}, {options.heads} heads, "
        f"{options.epochs} epochs, seeds {', '.join(map(str, options.seeds))}"
    )
    table = markdown_table(HEADER, [row(name, runs) for name, runs in groups.items()])
    records = sorted(
        itertools.chain(*groups.values()), key=lambda run: options.seeds.index(run["seed"])
    )
    results: Record = {"machine": records[0]["machine"], "runs": records}
    if options.table:
        left_out = {*KEPT, "history", "machine"}
        settings = {key: value for key, value in records[0].items() if key not in left_out}
        results["settings"] = settings | {"penalty": options.penalty}
        results["runs"] = [summary(record) for record in records]
    write_table(options.output, title, table, results)
    if options.table:
        figures.errors(options.output / "table.png", {title: records})
    else:
        histories = {name: [run["history"] for run in runs] for name, runs in groups.items()}
        plot_curves(options.output / "curves.png", title, histories, PANELS)
