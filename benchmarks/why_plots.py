"""Tables and pictures of `why.py`, drawn from the values in its file of results.

python benchmarks/why_plots.py    # draws the pictures again
"""

import importlib
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any

import harness

METHODS = {  # name, colour and marker, the same in every picture
    "tagged": ("tagged, StiefelAdam", "#D55E00", "s"),
    "cwy": ("CWY", "#0072B2", "^"),
    "free": ("free, same start", "#6E6E6E", "X"),
    "clipped": ("free, same start, clipped", "#CC79A7", "v"),
    "lstm": ("LSTM", "#000000", "o"),
    "gaussian": ("free, Gaussian start", "#56B4E9", "P"),
    "default": ("free, torch's start", "#8C564B", "d"),
}
SIZES = {"copying": "T", "deep": "layers", "attention": "blocks", "queries": "blocks"}
RIGHT = "share right, %"
Run = dict[str, Any]


def logits(run: Run) -> dict[str, float]:
    """The largest logit of all moments; noise over signal at a quarter of the steps."""
    quarter = run["history"][min(1, len(run["history"]) - 1)]
    return {
        "largest logit": max(moment["largest_logit"] for moment in run["history"]),
        "noise over signal": quarter["noise"] / quarter["signal"],
        "loss": run["history"][-1]["loss"],
    }


def measures(run: Run) -> dict[str, float | None]:
    """What is kept of a run; None for what overflowed."""
    found = {RIGHT: 100 * run["accuracy"]}
    if run["picture"] == "deep":
        for when, key in (("start", "jacobian_at_start"), ("end", "jacobian")):
            for word, value in zip(("smallest", "median", "largest"), run[key], strict=True):
                found[f"{word} at the {when}"] = value
    if run["picture"] in ("attention", "queries"):
        found |= logits(run)
    return {key: float(f"{v:.4g}") if math.isfinite(v) else None for key, v in found.items()}


def collect(runs: list[Run], rates: list[float]) -> dict[str, Any]:
    """Values by picture, size, method and measure: a list by rate of lists by seed.

    Only seeds of which every rate is there count.
    """
    found: dict[str, Any] = {}
    groups: dict[tuple[str, int, str], dict[int, dict[float, Run]]] = {}
    for run in runs:
        group = groups.setdefault((run["picture"], run["size"], run["method"]), {})
        group.setdefault(run["seed"], {})[run["rate"]] = run
    order = {name: place for place, name in enumerate([*SIZES, *METHODS])}
    for name, size, method in sorted(groups, key=lambda k: (order[k[0]], k[1], order[k[2]])):
        seeds = groups[name, size, method]
        whole = [seeds[seed] for seed in sorted(seeds) if set(seeds[seed]) == set(rates)]
        if whole:
            kept = [[measures(seed[rate]) for seed in whole] for rate in rates]
            found.setdefault(name, {}).setdefault(str(size), {})[method] = {
                key: [[entry[key] for entry in entries] for entries in kept] for key in kept[0][0]
            }
    return found


def centre(values: list[float | None], key: str) -> float:
    """The mean of shares, the median of all else."""
    known = [math.inf if value is None else value for value in values]
    return statistics.fmean(known) if key == RIGHT else statistics.median(known)


def each(values: dict[str, Any], picture: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for size, methods in values.get(picture, {}).items():
        for method, kept in methods.items():
            yield size, METHODS[method][0], kept


def tables(values: dict[str, Any], rates: list[float]) -> dict[str, str]:
    """Shares by rate and in short, singular values, logits: what the documentation quotes."""
    written = {}
    for picture, unit in SIZES.items():
        rows, short = [], []
        for size, title, kept in each(values, picture):
            shares = kept[RIGHT]
            means = [centre(entries, RIGHT) for entries in shares]
            best = means.index(max(means))
            rows.append([title, size, *(f"{mean:.0f}" for mean in means)])
            spread = f"{means[best]:.1f} ({min(shares[best]):.1f} to {max(shares[best]):.1f})"
            enough = str(sum(mean >= 80 for mean in means))
            short.append([title, size, str(len(shares[0])), f"{rates[best]:g}", spread, enough])
        header = ["share right, %, at rate", unit, *(f"{rate:g}" for rate in rates)]
        written[f"{picture}, by rate"] = harness.markdown_table(header, rows)
        header = ["method", unit, "seeds", "best rate", "% right there (seeds)"]
        written[picture] = harness.markdown_table([*header, "rates with 80 % right"], short)
    rows = []
    for size, title, kept in each(values, "deep"):
        places = [("start", "start", 0)]
        places += [(f"rate {rates[place]:g}", "end", place) for place in range(3, 8)]
        for label, when, place in places:
            row = [title, size, label]
            for word in ("smallest", "median", "largest"):
                key = f"{word} at the {when}"
                row.append(f"{centre(kept[key][place], key):.0e}")
            rows.append(row)
    header = ["singular values of the Jacobian", "layers", "at", "smallest", "median", "largest"]
    written["jacobian"] = harness.markdown_table(header, rows)
    for picture in ("attention", "queries"):
        rows = [
            [
                title,
                str(len(kept[RIGHT][place])),
                f"{rates[place]:g}",
                *(
                    f"{centre(kept[key][place], key):{form}}"
                    for key, form in (
                        (RIGHT, ".1f"),
                        ("loss", ".2f"),
                        ("largest logit", ".0f"),
                        ("noise over signal", ".1f"),
                    )
                ),
            ]
            for _, title, kept in each(values, picture)
            for place in range(4, len(rates))
        ]
        header = [
            "method",
            "seeds",
            "rate",
            "% right",
            "loss",
            "largest logit",
            "noise over signal",
        ]
        written[f"{picture}, logits"] = harness.markdown_table(header, rows)
    return written


def panel(axis: Any, rates: list[float], methods: dict[str, Any], key: str) -> None:
    """A line a method over the rates, and its seeds as a band."""
    for method, kept in methods.items():
        title, colour, marker = METHODS[method]
        seeds = [[math.nan if v is None else v for v in entries] for entries in kept[key]]
        line = [centre(entries, key) for entries in kept[key]]
        axis.plot(rates, line, color=colour, marker=marker, markersize=4, label=title)
        low, high = [min(entries) for entries in seeds], [max(entries) for entries in seeds]
        axis.fill_between(rates, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set(xscale="log", xlabel="learning rate")
    axis.grid(alpha=0.3)


def picture(name: str, rates: list[float], panels: list[tuple[str, str, Any, str]]) -> None:
    """One row of panels (title, label, methods, measure) with one legend below."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    size = (3.3 * len(panels), 3.4)
    figure, _ = pyplot.subplots(1, len(panels), figsize=size, layout="constrained")
    for axis, (title, label, methods, key) in zip(figure.axes, panels, strict=True):
        panel(axis, rates, methods, key)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(label)
        axis.set_yscale("linear" if key in (RIGHT, "noise over signal") else "log")
        if key == RIGHT:
            lowest = min(min(map(min, kept[RIGHT])) for kept in methods.values())
            axis.set_ylim(-3 if lowest < 60 else 60, 103 if lowest < 60 else 101)
        if key.startswith("median"):
            axis.set_ylim(1e-40, 1e1)  # what has died need not be told apart
    lines = {
        t: line for a in figure.axes for line, t in zip(*a.get_legend_handles_labels(), strict=True)
    }
    columns = min(len(lines), 2 * len(panels))
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=columns, fontsize=8)
    path = harness.RESULTS / f"why{name}.png"
    figure.savefig(path, dpi=160)
    pyplot.close(figure)
    image = importlib.import_module("PIL.Image").open(path).convert("RGB")
    image.quantize(64).save(path, optimize=True)


def draw(values: dict[str, Any], rates: list[float]) -> None:
    """One picture of all three, and one of each with what lies behind it; of what is there."""
    right = "test images right, %"
    shown = {
        "": [
            ("memory: a pause of 100 steps", "digits right, %", "copying", "100", RIGHT),
            ("depth: 50 layers", right, "deep", "50", RIGHT),
            (
                "attention: rate of q and k",
                "largest |logit| in training",
                "queries",
                "2",
                "largest logit",
            ),
        ],
        "_copying": [
            (f"a pause of {size} steps", "digits right, %", "copying", size, RIGHT)
            for size in ("100", "300")
        ],
        "_deep": [
            ("20 layers", right, "deep", "20", RIGHT),
            ("50 layers", right, "deep", "50", RIGHT),
            (
                "50 layers, trained",
                "Jacobian, median singular value",
                "deep",
                "50",
                "median at the end",
            ),
        ],
        "_attention": [
            ("accuracy", right, "queries", "2", RIGHT),
            ("logits", "largest |logit| in training", "queries", "2", "largest logit"),
            ("gradient by the logits", "noise / signal", "queries", "2", "noise over signal"),
        ],
    }
    for name, panels in shown.items():
        there = [
            (title, label, values[kind][size], key)
            for title, label, kind, size, key in panels
            if size in values.get(kind, {})
        ]
        if there:
            picture(name, rates, there)


if __name__ == "__main__":
    content = json.loads((harness.RESULTS / "why.json").read_text())
    draw(content["values"], content["setting"]["rates"])
