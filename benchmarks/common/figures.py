"""Every picture of `results`, drawn from the JSON beside it.

A method looks the same in all of them.

    python -m benchmarks.common.figures                     # all
    python -m benchmarks.common.figures copying video       # some
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.harness import RESULTS, atomic, final_value, final_values

DPI = 160
# Colours that colour-blind readers can tell apart (Okabe & Ito, and two more); one a family.
LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text())
COLOURS = tuple(LOOKS["colours"].values())
BLUE, RED, GREEN, PINK, ORANGE, SKY, BROWN, BLACK, GREY = COLOURS
BLUES = ("#BFDBEE", "#99C6E3", "#6CAED6", "#3D93C6", "#0072B2")  # few to many reflections
STYLES = {  # colour, marker and, where curves of one colour must be told apart, dashes
    name: (LOOKS["colours"][colour], *look) for name, (colour, *look) in LOOKS["styles"].items()
}
CELLS, PLAYS = LOOKS["cells"], LOOKS["plays"]
MARKERS = "os^vDdPX"
OPEN = {"fillstyle": "none", "linestyle": "--"}  # the other of two curves of one method
PRINTED = "StiefelAdam(radius=1.0, nesterov=False)"
EQUAL = ", also T-CWY and HR"
MORE, FEWER = ", three times the steps", ", loss kl, fewer steps"


class Panel(NamedTuple):
    """One diagram of `curves`: which entry of the history, its label and scale."""

    key: str
    label: str
    title: str = ""
    scale: str = "linear"
    levels: Mapping[str, float] = {}  # horizontal lines with their names
    x: str = "epoch"
    range: tuple[float | None, float | None] = (None, None)


def style(name: str, index: int = 0) -> dict[str, Any]:
    """Colour, marker and dashes of a method, whatever stands around its name, or by ``index``."""
    plain = name.removeprefix("constrained, ").partition(", learning rate ")[0]
    for end in (
        " within heads",
        " across heads",
        EQUAL,
        ", default",
        ", published",
        ", tuned",
        MORE,
        FEWER,
    ):
        plain = plain.removesuffix(end)
    if plain.startswith("CWY L="):  # more reflections, darker
        count, _, parts = plain[6:].partition("/")  # a number, N or N/2
        shade = 4 - math.log2(int(parts or 1)) if count == "N" else math.log2(int(count)) - 2
        return {"color": BLUES[min(max(int(shade), 0), 4)], "marker": "^"}
    other = COLOURS[index % 8], MARKERS[index % 8]
    colour, marker, *dashes = STYLES.get(name) or STYLES.get(plain, other)
    look = {"color": colour, "marker": marker, "linestyle": dashes[0] if dashes else "-"}
    return look | (OPEN if name.endswith("across heads") else {})


def start(columns: int, size: tuple[float, float], rows: int = 1, **options: Any) -> Any:
    """A figure and its axes, an array of rows and columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.titlesize": 11, "figure.titlesize": 12})

    return pyplot.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, **options
    )


def plain_ticks(axis: Any) -> None:
    """Numbers as one writes them, 0.5 and 20, on a logarithmic axis of few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs: tuple[float, ...] = (1.0, 2.0, 5.0)
    if high < 10 * low:
        subs = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    elif high > 1000 * low:
        subs = (1.0,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(figure: Any, *axes: Any) -> None:
    """Beside the diagrams, where it covers nothing."""
    lines = {}
    for axis in axes:
        handles, names = axis.get_legend_handles_labels()
        lines |= dict(zip(names, handles, strict=True))
    beside = {"loc": "outside right upper", "fontsize": 8, "handlelength": 3}  # shows dashes
    figure.legend(lines.values(), lines, **beside)


def save(figure: Any, path: Path) -> None:
    """Replace the file at once, in at most 256 colours, which are a third of the bytes."""
    from matplotlib import pyplot
    from PIL import Image

    with atomic(path) as temporary:
        figure.savefig(temporary, dpi=DPI)
        with Image.open(temporary) as image:
            few = image.convert("RGB").quantize(dither=Image.Dither.NONE)
        few.save(temporary, optimize=True)
    pyplot.close(figure)


# ---- curves of training ----


def plot_curves(
    path: Path,
    title: str,
    histories: Mapping[str, Sequence[Sequence[Mapping[str, float]]]],
    panels: Sequence[Panel],
) -> None:
    """One diagram a panel, of the methods that have what it shows."""
    figure, (axes,) = start(len(panels), (4.3 * len(panels) + 1.8, 3.8))
    for axis, panel in zip(axes, panels, strict=True):
        curves(axis, histories, panel)
    legend(figure, *axes)
    if len(panels) > 1:
        figure.suptitle(title, fontsize=10)
    else:
        axes[0].set_title(title, fontsize=10)
    save(figure, path)


def curves(
    axis: Any, histories: Mapping[str, Sequence[Sequence[Mapping[str, float]]]], panel: Panel
) -> None:
    """Each method's mean over seeds as a line, with the range as a band."""
    from matplotlib.ticker import MaxNLocator

    for index, (name, runs) in enumerate(histories.items()):
        runs = [run for run in runs if run and panel.key in run[0]]
        if not runs:
            continue
        look = style(name, index)
        points = list(zip(*runs, strict=False))  # a run that is not over yet is shorter
        places = [entries[0][panel.x] for entries in points]
        values = [[entry[panel.key] for entry in entries] for entries in points]
        means = [statistics.fmean(v) for v in values]
        every = max(1, len(places) // 4)
        shift = every * index // len(histories)  # equal curves show their markers in turn
        axis.plot(
            places, means, label=name, markevery=(shift, every), markersize=5, linewidth=1.4, **look
        )
        low, high = [min(v) for v in values], [max(v) for v in values]
        axis.fill_between(places, low, high, color=look["color"], alpha=0.2, linewidth=0)
    for name, level in panel.levels.items():
        axis.axhline(level, color="0.4", linewidth=1, linestyle=":")
        beside = {"xycoords": ("axes fraction", "data"), "va": "center"}  # where no curve goes
        axis.annotate(name, (1.01, level), fontsize=8, color="0.3", **beside)
    axis.set(xlabel=panel.x, ylabel=panel.label, yscale=panel.scale)
    axis.set_title(panel.title, fontsize=10)
    axis.set_ylim(*panel.range)
    low, high = axis.get_ylim()
    if panel.scale == "log" and high < 1000 * low:
        plain_ticks(axis.yaxis)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)


def read(path: Path, name: str | None = None) -> dict[str, Any]:
    """The JSON beside the picture, of its name or another."""
    found: dict[str, Any] = json.loads(path.with_name(f"{name or path.stem}.json").read_text())
    return found


def histories(runs: Sequence[Mapping[str, Any]], key: str, **titles: str) -> dict[str, Any]:
    """The histories of the runs of each method, in the order of the file."""
    found: dict[str, Any] = {}
    for run in runs:
        found.setdefault(titles.get(run[key], run[key]), []).append(run["history"])
    return found


def number_of_seeds(found: Mapping[str, Sequence[Any]]) -> str:
    """3 seeds, or 3 to 5 seeds where methods differ."""
    fewest, most = (pick(map(len, found.values())) for pick in (min, max))
    return f"{'' if fewest == most else f'{fewest} to '}{most} seed{'' if most == 1 else 's'}"


CASES = {
    "as it is": "standard settings", "both": "no warm-up, four times the learning rates",
    "learned factor": "learned singular value a layer",
}  # fmt: skip
SITES = {"stream": "residual stream", "values": "values"}
METHODS = {"attention": "orthonormal in attention", "all": "all orthonormal"}


def copying(path: Path) -> None:
    """Loss over the baseline and digits repeated, for one length of the pause."""
    runs = read(path)["runs"]
    for entry in itertools.chain(*(run["history"] for run in runs)):
        entry["right"] = 100 * entry["digits_right"]
        entry["training step"] = entry["step"]
    levels = {"no memory": 1.0, "a tenth": 0.1}
    panels = [
        Panel("of_baseline", "test loss / loss without memory", "", "log", levels, "training step"),
        Panel("right", "digits right (%)", levels={"guessing": 12.5}, x="training step"),
    ]
    # T-CWY and reflections one by one compute the matrix of CWY: their curves would lie on its own.
    alike = {cell for cell in ("tcwy", "hr") if any(run["cell"] == cell for run in runs)}
    names = CELLS | ({"cwy": f"CWY{EQUAL}"} if alike else {})
    found = histories([run for run in runs if run["cell"] not in alike], "cell", **names)
    size = f"{runs[0]['length']:,} steps, {runs[0]['hidden']} units"
    plot_curves(path, f"Copying over {size}, {number_of_seeds(found)}", found, panels)


def pixel_digits(path: Path) -> None:
    """Test accuracy in order and permuted."""
    runs, panels = [], []
    for part, title in {"": "pixels in order", "_permuted": "pixels in one shuffled order"}.items():
        own = read(path, f"pixel_digits{part}")["runs"]
        for entry in itertools.chain(*(run["history"] for run in own)):
            entry[title] = 100 - entry["test_error"]
        named = f"{title}, {number_of_seeds(histories(own, 'cell'))}"
        panels.append(Panel(title, "test accuracy (%)", named, range=(None, 100)))
        runs += own
    title = "8 x 8 digits pixel by pixel, 64 units"
    plot_curves(path, title, histories(runs, "cell", **CELLS), panels)


def translation(path: Path) -> None:
    """2^loss, as the paper has it, of every recurrence and seed."""
    sets: dict[str, dict[str, list[float]]] = {}
    for run in (run for run in read(path)["runs"] if len(run["history"]) > 1):
        number = f"{run['limit']:,}" if run["limit"] else "all"
        pairs = "generated phrases" if run["pairs"] is None else f"{number} pairs of sentences"
        cell, _, count = run["cell"].partition(" L=")
        if count:  # the same share of N has the same look in every set
            cell = f"{cell} L=N/{run['hidden'] // int(count)}".removesuffix("/1")
        kept = sets.setdefault(f"{pairs}, N = {run['hidden']}", {})
        kept.setdefault(cell, []).extend(2**loss for loss in final_values([run], "loss"))
    figure, (axes,) = start(len(sets), (5.6 * len(sets), 4.4))
    for axis, (title, found) in zip(axes, sets.items(), strict=True):
        ranked = sorted(found, key=lambda name: statistics.fmean(found[name]))
        dots(axis, {name: found[name] for name in ranked}, "2^loss of a test word")
        axis.set_title(title)
    figure.suptitle("2^loss of translations after the last epoch, the lowest on top")
    save(figure, path)


def video(path: Path) -> None:
    """Test error of every recurrent unit and seed."""
    content = read(path)
    found = histories(content["runs"], "method")
    figure, ((axis,),) = start(1, (8, 4))
    dots(
        axis, {method: [run[-1]["test"] for run in runs] for method, runs in found.items()},
        "summed |error| of a test frame (grey levels 0 to 1)",
    )  # fmt: skip
    still = f"showing the last frame again: {content['last_frame']:.1f}"
    axis.set_title(f"Next video frame, 32 x 32 pixels; {still}", fontsize=10)
    save(figure, path)


def muon_transformer(path: Path) -> None:
    """Loss on held-out text, of each method at its best learning rate."""
    content, found = read(path), {}
    for key, run in content["runs"].items():
        method, rate, _ = key.split()
        if float(rate) == content["rates"][method]:
            history = [{"step": step, "loss": loss} for step, loss in run["curve"]]
            found.setdefault(METHODS.get(method, method), []).append(history)
    panel = Panel("loss", "held-out loss (nats a character)", scale="log", x="step")
    plot_curves(path, f"Character transformer, {number_of_seeds(found)}", found, [panel])


def manifold_muon(path: Path) -> None:
    """Loss and accuracy over the learning rates; the best one of each method with all its seeds."""
    runs, methods = read(path)["runs"], {}
    rates = sorted({float(key.split()[1]) for key in runs})
    for key, (loss, right, *_) in runs.items():
        method, rate, _ = key.split()
        place = rates.index(float(rate))
        kept = methods.setdefault(
            method, {entry: [[] for _ in rates] for entry in ("loss", "right")}
        )
        kept["loss"][place].append(loss)
        kept["right"][place].append(100 * right)
    figure, (axes,) = start(2, (9, 3.6))
    labels = ("training loss (nats)", "test images right (%)")
    for axis, key, label in zip(axes, ("loss", "right"), labels, strict=True):
        over_rates(axis, rates, methods, key)
        axis.set(xlabel="learning rate", ylabel=label)
    plain_ticks(axes[0].yaxis)
    legend(figure, axes[0])
    figure.suptitle("Perceptron, five epochs of 16,000 CIFAR-10 images", fontsize=10)
    save(figure, path)


# ---- points, one row a method ----


def rows(axis: Any, names: Sequence[str]) -> None:
    """One row for each name, the first on top."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(alpha=0.3)


def vit_table(path: Path) -> None:
    """Test errors of every seed of the methods that both data sets have."""
    titles = {"": "8 x 8 digits, 25 epochs", "_cifar10": "CIFAR-10, 8 epochs"}
    sets = {title: read(path, f"{path.stem}{end}")["runs"] for end, title in titles.items()}
    both = set.intersection(*({run["title"] for run in runs} for runs in sets.values()))
    errors(path, {t: [r for r in runs if r["title"] in both] for t, runs in sets.items()})


def vit_long(path: Path) -> None:
    """Test error of every seed at the end of the longest training, from two files."""
    files = (read(path, f"{path.stem}{end}") for end in ("", "_sgd"))
    found = final_test_errors([run for file in files for run in file["runs"]])
    figure, ((axis,),) = start(1, (10, 3.6))
    dots(axis, found, "test error (%)")
    rows(axis, [title.replace("StiefelAdam ", f"{PRINTED} ") for title in found])
    axis.set_title(f"CIFAR-10 after 100 epochs, 16,000 images, {number_of_seeds(found)}")
    save(figure, path)


def final_test_errors(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Those of each method, of whole runs or of summaries, which have no history."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if "history" in run:
            errors = [entry["test_error"] for entry in run["history"]]
        else:
            errors = [float(error) for error in run["test_errors"].split()]
        found.setdefault(run["title"], []).append(final_value(errors))
    return found


def dots(axis: Any, found: Mapping[str, Sequence[float]], label: str) -> None:
    """One row a method: every seed, and their mean."""
    for place, (method, values) in enumerate(found.items()):
        look = style(method) | {"linestyle": ""}
        axis.plot(values, [place] * len(values), markersize=5, **look)
        if len(values) > 1:
            axis.plot(statistics.fmean(values), place, "|", color=BLACK, markersize=14)
    rows(axis, list(found))
    axis.set_xlabel(f"{label}; every seed, and the mean" if label else "")


def errors(path: Path, sets: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """One diagram a set of runs: the test errors of every seed, and their mean."""
    count = len({run["title"] for runs in sets.values() for run in runs})
    size = (3.2 * len(sets) + 3, 1.2 + 0.23 * count)
    figure, axes = start(len(sets), size, sharey=True)
    for axis, (title, runs) in zip(axes[0], sets.items(), strict=True):
        dots(axis, final_test_errors(runs), "")
        axis.set_title(title, fontsize=10)
    figure.supxlabel("test error (%); every seed, and the mean", fontsize=10)
    save(figure, path)


def attention(path: Path) -> None:
    """Test errors and largest logits of every case, method and seed, or that it overflowed."""
    runs = read(path)["runs"]
    cases, methods = (list(dict.fromkeys(run[key] for run in runs)) for key in ("case", "method"))
    figure, (axes,) = start(2, (9.5, 1.6 + 0.42 * len(cases)), sharey=True)
    labels = {"test_error": "test error (%), every seed", "largest_logit": "largest logit"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for number, method in enumerate(methods):
            shift = 0.18 * (number - (len(methods) - 1) / 2)
            look = style(method, number) | {"linestyle": "", "markersize": 4}
            places = {case: place + shift for place, case in enumerate(cases)}
            own = [run for run in runs if run["method"] == method]
            fine = [run for run in own if run["largest_logit"] is not None]
            axis.plot([run[key] for run in fine], [places[run["case"]] for run in fine],
                      label=method, **look)  # fmt: skip
            for case in {run["case"] for run in own if run["largest_logit"] is None}:
                axis.annotate(
                    "overflow", (0.99, places[case]), xycoords=("axes fraction", "data"),
                    ha="right", va="center", fontsize=7, color=look["color"],
                )  # fmt: skip
        rows(axis, [CASES.get(case, case) for case in cases])
        axis.set_xlabel(label)
    axes[1].set_xscale("log")
    plain_ticks(axes[1].xaxis)
    legend(figure, axes[0])
    save(figure, path)


def eigen_methods(path: Path) -> None:
    """Time to the target over that of StiefelSGD, and what did not arrive."""
    content = read(path)
    groups = [name for name in content["results"] if name.endswith(", methods")]
    figure, axes = start(len(groups), (4.2 * len(groups) + 2.6, 4.6), sharey=True)
    for axis, group in zip(axes[0], groups, strict=True):
        found = content["results"][group]
        unit = statistics.median(s for s in found["StiefelSGD"]["seconds"] if s is not None)
        times = [s / unit for each in found.values() for s in each["seconds"] if s is not None]
        most = max(times)
        for place, (name, result) in enumerate(found.items()):
            look = style(name) | {"linestyle": ""}
            arrived = [seconds / unit for seconds in result["seconds"] if seconds is not None]
            missing = len(result["seconds"]) - len(arrived)
            axis.plot(arrived, [place] * len(arrived), markersize=6, **look)
            if missing:
                gap = max(gap for gap in result["final_gap"] if gap is not None)
                text = f"{missing} of {len(result['seconds'])}: gap <= {gap:.0e}"
                axis.annotate(text, (1.5 * most, place), va="center", fontsize=7, color="0.3")
        rows(axis, list(found))
        axis.set(xscale="log", xlim=(0.05, 40 * most), title=f"n x m = {group.split(',')[0]}")
        axis.set_xlabel("time to a gap of 1e-8, over StiefelSGD's median")
        axis.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
        axis.minorticks_off()
    save(figure, path)


def prw(path: Path) -> None:
    """Mean gap of every method from each initialisation, on both sets of pairs."""
    sets = read(path, "prw_starts")["sets"]
    titles = {"mnist": "pairs of digits", "shakespeare": "pairs of plays"}
    means = {
        name: {method: row["mean"] for method, row in sets[name]["rows"].items()} for name in titles
    }
    ranked = sorted(means["mnist"], key=means["mnist"].__getitem__)
    figure, (axes,) = start(len(titles), (5 * len(titles) + 3.2, 5.6), sharey=True)
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        found = {method: sets[name]["rows"][method]["means_of_starts"] for method in ranked}
        dots(axis, found, "")
        rows(axis, [method.replace("Momentumless", "without momentum") for method in ranked])
        axis.set(xscale="log", title=f"{sets[name]['pairs']} {title}")
        axis.set_xlabel("mean gap to the best value known (%)")
        plain_ticks(axis.xaxis)
    text = "Projection-robust Wasserstein distances: five initialisations of each method"
    figure.suptitle(f"{text}, and their mean")
    save(figure, path)


def prw_plays(path: Path) -> None:
    """The reference distances between the plays."""
    content = read(path, "prw")["sets"]["shakespeare"]
    names = list(PLAYS)
    distances = np.full((len(names), len(names)), np.nan)
    for pair, value in zip(content["pairs"].split(), content["reference"].split(), strict=True):
        i, j = (names.index(part) for part in pair.split("-"))
        distances[i, j] = distances[j, i] = float(value)
    figure, axes = start(1, (7.5, 6.2))
    axis, titles = axes[0][0], list(PLAYS.values())
    image = axis.imshow(distances, cmap="viridis")
    axis.set_xticks(range(len(titles)), titles, rotation=90)
    axis.set_yticks(range(len(titles)), titles)
    middle = (np.nanmin(distances) + np.nanmax(distances)) / 2
    for (row, column), value in np.ndenumerate(distances):
        if not math.isnan(value):
            shown = f"{value:.3g}" if value >= 1 else f"{value:.3f}".lstrip("0")
            look = {"ha": "center", "va": "center", "fontsize": 7}
            axis.text(column, row, shown, color="white" if value < middle else "black", **look)
    figure.colorbar(image, shrink=0.8, label="transport cost (squared distance)")
    title = "Word vectors of the plays, each pair under the projection of largest distance"
    axis.set_title(title, fontsize=10)
    save(figure, path)


# ---- others ----


def state_tracking(path: Path) -> None:
    """Accuracy of every task and number of reflections."""
    theory = {"parity": 1, "S3": 2, "S4": 2, "S5": 4}
    accuracies(path, read(path)["runs"], range(1, 6), (32, 128), theory)


def accuracies(
    path: Path,
    runs: Sequence[Mapping[str, Any]],
    factors: Sequence[int],
    lengths: tuple[int, int],
    theory: Mapping[str, int],
) -> None:
    """One map a length: mean over the seeds, the worst seed below, theory's number framed."""
    measured = {
        "accuracy": f"up to length {lengths[0]}, as trained",
        "accuracy_longer": f"at length {lengths[1]}",
    }
    size = 2 * (0.75 * len(factors) + 0.9), 0.62 * len(theory) + 1.4
    figure, axes = start(len(measured), size, sharey=True)
    for axis, (key, title) in zip(axes[0], measured.items(), strict=True):
        means = np.full((len(theory), len(factors)), math.nan)
        for (row, task), (column, count) in itertools.product(
            enumerate(theory), enumerate(factors)
        ):
            chosen = [run for run in runs if (run["task"], run["factors"]) == (task, count)]
            values = [100 * run["history"][-1][key] for run in chosen]
            means[row, column] = statistics.fmean(values) if values else math.nan
            text = f"{means[row, column]:.0f}\n" if values else "not\nrun"
            dark = means[row, column] > 60
            axis.annotate(text, (column, row), ha="center", va="center", fontsize=9,
                          color="white" if dark else "black")  # fmt: skip
            if values:
                axis.annotate(f"{min(values):.0f}", (column, row + 0.22), ha="center", va="center",
                              fontsize=7, color="white" if dark else "0.3")  # fmt: skip
            if count == theory[task]:
                left, right, top, bottom = column - 0.48, column + 0.48, row - 0.46, row + 0.46
                corners = [left, right, right, left, left], [top, top, bottom, bottom, top]
                axis.plot(*corners, color=ORANGE, linewidth=2)
        axis.imshow(means, cmap="Blues", vmin=0, vmax=110, aspect="auto")
        axis.set_xticks(range(len(factors)), [str(count) for count in factors])
        axis.set_yticks(range(len(theory)), list(theory))
        axis.set_xlabel("reflections a token")
        axis.set_title(title, fontsize=10)
    text = "accuracy (%): mean of the seeds, the worst one below; framed: needed by theory"
    figure.suptitle(text, fontsize=10)
    save(figure, path)


def convergence(path: Path) -> None:
    """The running minimum of the squared gradient beside the rate of the theorem."""
    figure, axes = start(1, (6.5, 3.8))
    axis = axes[0][0]
    known = set()
    for result in read(path)["results"]:
        method = result["case"].partition(",")[0]
        label = f"{result['case']}: slope {result['slope']:.2f}"
        fewer = OPEN if method in known else {}
        axis.loglog(result["K"], result["running_minimum"], **style(method) | fewer,
                    markersize=4, markevery=6, label=label)  # fmt: skip
        known.add(method)
    steps = np.array(result["K"])
    axis.loglog(steps, 4 * steps**-0.5, ":", color="0.4", label="slope -0.5")
    axis.set(xlabel="steps", ylabel="smallest squared gradient norm so far")
    axis.set_title("Gradients of CWY vanish faster than the theorem's slope of -0.5")
    for each in (axis.xaxis, axis.yaxis):
        plain_ticks(each)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="lower left")
    save(figure, path)


def flows(path: Path) -> None:
    """The largest momentum over the learning rates, up to where no finite number is left."""
    figure, ((axis,),) = start(1, (8.5, 4.4))
    ends = {"isometric": "", "published": ", published flows"}
    for kind, (form, end) in itertools.product(("SGD", "Adam"), ends.items()):
        chosen = [
            run for run in read(path)["blow_up"] if (run["optimizer"], run["form"]) == (kind, form)
        ]
        fine = [run for run in chosen if run["broke_at"] is None]
        look = style(f"Stiefel{kind}{end}" if kind == "SGD" else f"Stiefel{kind}")
        look |= OPEN if end else {}
        lr, most = [run["lr"] for run in fine], [run["largest_momentum"] for run in fine]
        axis.loglog(lr, most, label=f"Stiefel{kind}{end}", markersize=5, **look)
        if len(fine) < len(chosen):
            beside = {"textcoords": "offset points", "xytext": (10, -18), "color": look["color"]}
            axis.annotate("diverges beyond", (lr[-1], most[-1]), **beside)
    axis.set(xlabel="learning rate", ylabel="largest momentum (Frobenius norm)", ylim=(60, 2000))
    axis.set_title("Random gradients: the isometric flows stay bounded at every learning rate")
    axis.grid(alpha=0.3)
    legend(figure, axis)
    save(figure, path)


def parametrizations(path: Path) -> None:
    """Forward and backward of an N x N matrix against N."""
    figure, axes = start(1, (8, 4.2))
    axis = axes[0][0]
    points: dict[str, list[tuple[int, float]]] = {}
    for row in read(path)["rows"]:
        shape = row["shape"]
        if len(shape) == 2 and shape[0] == shape[1] and "L =" not in row["row"]:
            for found in row["results"]:
                if found["both"] is not None:
                    points.setdefault(found["name"], []).append((shape[0], 1e3 * found["both"]))
    for name, line in points.items():
        label = name.replace("torch_", "package torch_")
        axis.plot(*zip(*line, strict=True), label=label, linewidth=1.4, markersize=5, **style(name))
    sizes = [size for size, _ in points["CWY"]]
    axis.set(xscale="log", yscale="log", xlabel="N", ylabel="forward and backward (ms)")
    axis.set_title(
        "One N x N orthogonal matrix from unconstrained numbers, float32, CPU", fontsize=10
    )
    axis.minorticks_off()
    axis.set_xticks(sizes, [str(size) for size in sizes])
    plain_ticks(axis.yaxis)
    axis.grid(alpha=0.3)
    legend(figure, axis)
    save(figure, path)


def eigen_methods_scaling(path: Path) -> None:
    """Milliseconds of a step against m and against n."""
    figure, axes = start(2, (11, 4.2), sharey=True)
    for axis, (letter, entries) in zip(
        axes[0],
        read(path, path.stem.removesuffix("_scaling"))["results"]["scaling"].items(),
        strict=True,
    ):
        for index, (name, entry) in enumerate(entries.items()):
            along = [n if letter == "n" else m for n, m in entry["sizes"]]
            axis.loglog(
                along, entry["ms"], label=name, linewidth=1.4, markersize=5, **style(name, index)
            )
        n, m = entry["sizes"][0]
        axis.set(xlabel=letter, title=f"m = {m}" if letter == "n" else f"n = {n}")
        axis.minorticks_off()
        axis.set_xticks(along, [str(value) for value in along])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("one step without the gradient (ms)")
    plain_ticks(axes[0][0].yaxis)
    legend(figure, axes[0][0])
    save(figure, path)


def over_rates(axis: Any, rates: list[float], methods: Mapping[str, Any], key: str) -> None:
    """A line a method: the mean of shares, the median of all else; bands hold all seeds.

    Less than `DEAD` is drawn as that.
    """
    for name, kept in methods.items():
        seeds = [[math.nan if v is None else max(v, DEAD) for v in values] for values in kept[key]]
        centre = statistics.fmean if key == "right" else statistics.median
        look = style(name)
        axis.plot(rates, [centre(v) for v in seeds], label=named(name), markersize=4, **look)
        low, high = [min(v) for v in seeds], [max(v) for v in seeds]
        axis.fill_between(rates, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axis.set_xscale("log")
    axis.set_yscale("linear" if key in ("right", "noise over signal") else "log")
    axis.grid(alpha=0.3)


DEAD = 1e-40  # a singular value below it need not be told apart from zero


def named(method: str) -> str:
    """The method with its options, where they are not the default, in short lines."""
    if method.endswith("StiefelAdam"):
        return f"{method},\nradius=1.0, nesterov=False"
    return re.sub(", (?=[^,]*, [^,]*$)", ",\n", method)


BY_DEFAULT = "constrained, StiefelAdam by default"  # in the table alone
ASIDE = ("LSTM", "CWY", "unconstrained, same initialisation, clipped")


def why_panels() -> dict[str, list[tuple[str, str, str, str, str, tuple[Any, Any]]]]:
    """By picture: title, label, task, its size, what is shown, and the limits of its axis."""
    answers, images = "digits right (%)", "test images right (%)"
    share, part = (-3, 103), (60, 101)
    return {
        "why": [
            ("memory: a pause of 100 steps", answers, "copying", "100", "right", share),
            ("depth: 50 layers", images, "deep", "50", "right", share),
            ("attention: largest logit", "largest |logit|", "queries", "2", "largest logit",
             (1, None)),
        ],
        "why_copying": [
            (f"a pause of {size} steps", answers, "copying", size, "right", share)
            for size in ("100", "300")
        ],
        "why_deep": [
            ("20 layers", images, "deep", "20", "right", share),
            ("50 layers", images, "deep", "50", "right", share),
            ("50 layers: Jacobian, trained", "median singular value",
             "deep", "50", "median at the end", (1e-42, 10)),
        ],
        "why_attention": [
            ("accuracy", images, "queries", "2", "right", part),
            ("largest logit", "largest |logit|", "queries", "2", "largest logit", (1, None)),
            ("noise over signal, gradient of logits", "noise over signal", "queries", "2",
             "noise over signal", (0, None)),
        ],
    }  # fmt: skip


def why(path: Path) -> None:
    """What the constraint changes: all three tasks in one picture, and each by itself."""
    found = read(path, "why")
    for name, panels in why_panels().items():
        panels = [panel for panel in panels if panel[3] in found["values"].get(panel[2], {})]
        figure, axes = start(len(panels), (3.3 * len(panels), 3.4 if name != "why" else 3.8))
        lines = {}
        for axis, (title, label, kind, size, key, limits) in zip(axes[0], panels, strict=True):
            methods = found["values"][kind][size]
            methods = {m: kept for m, kept in methods.items() if m != BY_DEFAULT}
            if name == "why":  # the first picture of a reader: as few lines as make the point
                methods = {
                    m: kept for m, kept in methods.items() if not m.endswith((*ASIDE, "adaptive"))
                }
            over_rates(axis, found["setting"]["rates"], methods, key)
            swept = "learning rate" + " of queries and keys" * (kind == "queries")
            axis.set(xlabel=swept, ylabel=label, ylim=limits)
            if key == "largest logit":
                plain_ticks(axis.yaxis)
            axis.set_title(title, fontsize=10)
            if kind == "copying":
                guess = {"color": "0.4", "linewidth": 1, "linestyle": ":", "label": "guessing"}
                axis.axhline(100 / 8, **guess)
            handles, names = axis.get_legend_handles_labels()
            lines |= dict(zip(names, handles, strict=True))
            if name == "why":  # its panels have different lines
                below = {"loc": "upper left", "bbox_to_anchor": (-0.1, -0.23), "fontsize": 8}
                axis.legend(**below)
        if name == "why":
            save(figure, path)
            continue
        most = min(2 * len(panels), 5)  # names of two rows fit side by side
        columns = math.ceil(len(lines) / math.ceil(len(lines) / most))
        below = {"loc": "outside lower center", "ncols": columns, "fontsize": 8}
        names = [line.replace(", same", ",\nsame") for line in lines]
        figure.legend(lines.values(), names, **below)
        save(figure, path.with_name(f"{name}.png"))


def rotations(path: Path) -> None:
    """Divergence at the end, every seed; kurtosis by layer, with and without rotation."""
    content = read(path)
    figure, (axes,) = start(3, (15, 4.2))
    found: dict[str, list[float]] = {}
    for row in content["rows"]:
        name = f"{row['method']}, learning rate {row['rate']:g}" if "method" in row else "Hadamard"
        if "method" in row or row["row"].startswith("Hadamard"):
            found.setdefault(name, []).append(row["held_out"]["topics"]["kl"])
    ranked = sorted(found, key=lambda name: statistics.fmean(found[name]))
    dots(axes[0], {name: found[name] for name in ranked}, "KL from full precision (nats)")
    axes[0].set_title("4-bit activations, held-out text")
    looks = {"Hadamard": (SKY, "v"), "learned": (RED, "s")}
    for name, values in content["kurtosis"].items():
        kind, _, turned = name.partition(", ")
        colour, marker = looks.get(turned.split(" ")[0], (GREY, "o"))
        axis = axes[1 if kind == "stream" else 2]
        axis.plot(
            values, label=turned or "without rotation", color=colour, marker=marker, markersize=4
        )
        axis.set(xlabel="layer", ylabel=f"kurtosis of the {SITES[kind]}", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    for axis in axes[1:]:
        axis.axhline(3, color="0.4", linewidth=1, linestyle=":", label="a Gaussian's")
        plain_ticks(axis.yaxis)
        axis.legend(fontsize=9)
    save(figure, path)


def when_to_constrain(path: Path) -> None:
    """Test error over the learning rate; bands hold all seeds."""
    from benchmarks.accuracy.when_to_constrain import unpacked

    found = unpacked(read(path, "when_to_constrain_runs")["parts"]["figure"])
    figure, (axes,) = start(len(found), (3.6 * len(found), 3.4))
    for axis, (title, arms) in zip(axes, found.items(), strict=True):
        for place, (name, kept) in enumerate(arms.items()):
            label = "constrained, learned scale" if name.startswith("learned") else name
            look = style(label, place)
            errors = [[100 - share for share in seeds] for seeds in kept["right"]]
            centre = [statistics.fmean(seeds) for seeds in errors]
            axis.plot(kept["rates"], centre, label=label, markersize=4, **look)
            low, high = ([end(seeds) for seeds in errors] for end in (min, max))
            axis.fill_between(kept["rates"], low, high, color=look["color"], alpha=0.15, lw=0)
        axis.set(xscale="log", yscale="log", xlabel="learning rate", title=title)
        axis.grid(alpha=0.3)
        plain_ticks(axis.yaxis)
    axes[0].set_ylabel("test error (%)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    save(figure, path)


DRAWN: dict[str, Callable[[Path], None]] = dict.fromkeys(
    ("copying", "copying_1000", "copying_2000"), copying
) | {
    draw.__name__: draw
    for draw in (
        pixel_digits, translation, video, vit_table, vit_long, attention,
        eigen_methods, eigen_methods_scaling, prw,
        prw_plays, state_tracking, convergence, flows, parametrizations, rotations, why,
        muon_transformer, manifold_muon, when_to_constrain,
    )
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the pictures asked for, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWN))
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of JSON and pictures")
    options = parser.parse_args(argv)
    unknown = set(options.names) - set(DRAWN)
    if unknown:
        parser.error(f"NAME must be one of {', '.join(DRAWN)}, got {', '.join(sorted(unknown))}")
    for name in options.names or DRAWN:
        DRAWN[name](options.folder / f"{name}.png")


if __name__ == "__main__":
    main()
