"""The pictures of programs that are here, drawn from the JSON in `results`.

A method looks the same in all of them.

    python -m benchmarks.common.figures                     # all
    python -m benchmarks.common.figures copying prw         # some
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common.harness import RESULTS, atomic, final_value

DPI = 160
# Colours that colour-blind readers can tell apart (Okabe & Ito, and two more); one a family.
LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text())
COLOURS = tuple(LOOKS["colours"].values())
BLUE, RED, GREEN, PINK, ORANGE, SKY, BROWN, BLACK, GREY = COLOURS
BLUES = ("#BFDBEE", "#99C6E3", "#6CAED6", "#3D93C6", "#0072B2")  # few to many reflections
STYLES = {  # colour, marker and, where curves of one colour must be told apart, dashes
    name: (LOOKS["colours"][colour], *look) for name, (colour, *look) in LOOKS["styles"].items()
}
CELLS = LOOKS["cells"]
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


SITES = {"stream": "residual stream", "values": "values"}


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


TITLES = {
    "CNN": "convolutional network, MNIST",
    "tanh RNN, rows": "recurrent network, digits row by row",
    "ViT, all matrices": "vision transformer, digits",
}


def when_to_constrain(path: Path) -> None:
    """Test error over the learning rate, of the networks and arms of the README's picture.

    Bands hold all seeds.
    """
    from benchmarks.accuracy.when_to_constrain import FIGURE, SHOWN, unpacked

    found = unpacked(read(path, "when_to_constrain_runs")["parts"]["figure"])
    figure, (axes,) = start(len(FIGURE), (3.6 * len(FIGURE), 3.4))
    for axis, network in zip(axes, FIGURE, strict=True):
        for name in SHOWN:
            kept, label = found[network][name], name
            if name == "learn_scale=True":
                label = "StiefelAdamW, weights constrained with learn_scale=True"
            look = style(label.partition(", ")[0])
            errors = [[100 - share for share in seeds] for seeds in kept["right"]]
            centre = [statistics.fmean(seeds) for seeds in errors]
            axis.plot(kept["rates"], centre, label=label, markersize=4, **look)
            low, high = ([end(seeds) for seeds in errors] for end in (min, max))
            axis.fill_between(kept["rates"], low, high, color=look["color"], alpha=0.15, lw=0)
        axis.set(xscale="log", yscale="log", xlabel="learning rate", title=TITLES[network])
        axis.set_xticks((0.001, 0.01, 0.1), ("0.001", "0.01", "0.1"))
        axis.grid(alpha=0.3)
        plain_ticks(axis.yaxis)
    axes[0].set_ylabel("test error (%)")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=8)
    save(figure, path)


def when_to_constrain_transfer(path: Path) -> None:
    """The best learning rate over depth and width; lines that meet stand beside each other."""
    from benchmarks.accuracy.when_to_constrain import by_rate, unpacked

    found = unpacked(read(path, "when_to_constrain_runs")["parts"]["transfer"])
    figure, (axes,) = start(2, (7.2, 3.2), sharey=True)
    for axis, kind in zip(axes, ("depth", "width"), strict=True):
        arms = max((kept for name, kept in found.items() if name.startswith(kind)), key=len)
        sizes = sorted(int(name.split()[1]) for name, kept in found.items()
                       if name.startswith(kind) and {*arms} <= {*kept})  # fmt: skip
        for place, arm in enumerate(arms):
            label = "constrained, learned scale" if arm.startswith("learned") else arm
            rates = []
            for size in sizes:
                losses = by_rate(found[f"{kind} {size}"][arm], "test")
                rates.append(min(losses, key=losses.__getitem__) * 1.04 ** (place - 2))
            axis.plot(sizes, rates, label=label, markersize=4, **style(label, place))
        axis.set(xscale="log", yscale="log", xlabel=kind)
        axis.set_xticks(sizes, [f"{size}" for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("best learning rate")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8)
    save(figure, path)


DRAWN: dict[str, Callable[[Path], None]] = dict.fromkeys(
    ("copying", "copying_1000", "copying_2000"), copying
) | {
    draw.__name__: draw
    for draw in (
        pixel_digits, vit_table, vit_long, eigen_methods, prw, state_tracking,
        parametrizations, rotations, when_to_constrain, when_to_constrain_transfer,
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
