"""Figures of `leading_eigenvalues.py`, drawn like those of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from eigen_problem import TARGET, Run
from matplotlib import pyplot

COLOURS = (*pyplot.get_cmap("tab10").colors, *pyplot.get_cmap("Dark2").colors)
DOTS = 60


def plot_runs(runs: Sequence[tuple[str, str, Run]], title: str, path: Path) -> None:
    """Relative gap against iterations and seconds, |X'X - I| against iterations."""
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained")
    for number, (name, kind, run) in enumerate(runs):
        gaps = np.clip(np.abs(run.gaps), 1e-16, 1e3)
        style = {"color": COLOURS[number % len(COLOURS)], "label": name}
        if number >= len(COLOURS) // 2:
            style["linestyle"] = "--"
        steps = np.arange(1, len(gaps) + 1)
        if kind == "eigensolver":
            axes[1].loglog(run.seconds, gaps, "*", markersize=10, **style)
            continue
        axes[0].loglog(steps, gaps, **style)
        axes[1].loglog(run.seconds, gaps, **style)
        if len(run.errors) == len(gaps):
            axes[2].loglog(steps, np.clip(run.errors, 1e-17, 1e3), **style)
    for axis, label in zip(axes, ("iterations", "seconds", "iterations"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    for axis in axes[:2]:
        axis.axhline(TARGET, color="grey", linewidth=0.8, linestyle="--")
        axis.set_ylim(TARGET / 3, 3)
        axis.set_ylabel("relative gap (f* - f) / f*")
    axes[2].set_ylabel("max |X'X - I|")
    handles, labels = axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right", fontsize=9)
    figure.suptitle(f"Leading eigenvalues: {title}")
    save(figure, path)


def plot_scaling(found: dict[str, Any], path: Path) -> None:
    """Milliseconds of a step against m and against n."""
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for axis, (letter, entries) in zip(axes, found.items(), strict=True):
        for number, (name, entry) in enumerate(entries.items()):
            along = [n if letter == "n" else m for n, m in entry["sizes"]]
            label = f"{name}, exponent {entry['exponent']:.2f}"
            axis.loglog(along, entry["ms"], "o-", color=COLOURS[number], label=label)
        n, m = entry["sizes"][0]
        axis.set_title(f"against {letter} at {f'm = {m}' if letter == 'n' else f'n = {n}'}")
        axis.set(xlabel=letter, ylabel="milliseconds of a step, without the gradient")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
    save(figure, path)


def plot_inner(found: dict[str, Any], title: str, path: Path) -> None:
    """Gap (solid) and |X'X - I| (dashed) of the Cayley map, of QR now and then, of the root."""
    figure, axes = pyplot.subplots(1, 3, figsize=(16, 5), layout="constrained", sharey=True)
    groups = ("iterations", "QR", "root")
    for name, entry in found.items():
        which = 2 if "root" in name else 1 if "QR" in name else 0
        targets = [which] if "," in name else ([2] if name == "StiefelSGD" else [0, 1])
        for axis in [axes[index] for index in targets]:
            colour = f"C{len(axis.lines) // 2}"
            steps = 1 + 10 * np.arange(len(entry["gaps"]))
            for key, line in (("gaps", "-"), ("errors", "--")):
                values = np.clip(np.abs(entry[key]), 1e-17, 1e2)
                label = name if key == "gaps" else None
                axis.semilogy(steps, values, line, color=colour, label=label)
    titles = ("Cayley map", "QR retraction now and then", "inverse root of the polar retraction")
    for axis, text, _ in zip(axes, titles, groups, strict=True):
        axis.set(title=text, xlabel="iterations")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("relative gap (solid), max |X'X - I| (dashed)")
    figure.suptitle(f"Inner iterations, {title}, rate 0.1, momentum 0.9")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=55)
    pyplot.close(figure)
