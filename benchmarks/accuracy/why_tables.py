"""What `why.py` keeps of its runs, and the tables that the documentation quotes."""

import math
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common import harness

METHODS = {
    "tagged": "constrained, StiefelAdam",
    "virtual": "constrained, StiefelAdam by default",
    "adaptive": "constrained, StiefelAdam, adaptive",
    "cwy": "CWY",
    "free": "unconstrained, same initialisation",
    "clipped": "unconstrained, same initialisation, clipped",
    "free-adaptive": "unconstrained, same initialisation, adaptive",
    "lstm": "LSTM",
    "gaussian": "unconstrained, Gaussian initialisation",
    "default": "unconstrained, torch's initialisation",
}
SIZES = {"copying": "T", "deep": "layers", "queries": "blocks"}
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
    found = {"right": 100 * run["accuracy"]}
    if run["picture"] == "deep":
        found["median at the end"] = run["jacobian"][1]
    if run["picture"] == "queries":
        found |= logits(run)
    return {key: float(f"{v:.4g}") if math.isfinite(v) else None for key, v in found.items()}


def collect(runs: list[Run], rates: list[float]) -> dict[str, Any]:
    """Values by picture, size, name of the method and measure: a list by rate of lists by seed.

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
            found.setdefault(name, {}).setdefault(str(size), {})[METHODS[method]] = {
                key: [[entry[key] for entry in entries] for entries in kept] for key in kept[0][0]
            }
    return found


def centre(values: list[float | None], key: str) -> float:
    """The mean of shares, the median of all else."""
    known = [math.inf if value is None else value for value in values]
    return statistics.fmean(known) if key == "right" else statistics.median(known)


def each(values: dict[str, Any], picture: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for size, methods in values.get(picture, {}).items():
        for title, kept in methods.items():
            yield size, title, kept


def tables(values: dict[str, Any], rates: list[float]) -> dict[str, str]:
    """Shares in short, and logits by learning rate: what the documentation quotes."""
    written = {}
    for picture, unit in SIZES.items():
        rows = []
        for size, title, kept in each(values, picture):
            shares = kept["right"]
            means = [centre(entries, "right") for entries in shares]
            best = means.index(max(means))
            spread = f"{means[best]:.1f} ({min(shares[best]):.1f} to {max(shares[best]):.1f})"
            enough = str(sum(mean >= 80 for mean in means))
            rows.append([title, size, str(len(shares[0])), f"{rates[best]:g}", spread, enough])
        header = ["method", unit, "seeds", "best learning rate", "% right there (seeds)"]
        header.append("learning rates with 80 % right")
        written[picture] = harness.markdown_table(header, rows)
    forms = {"right": ".1f", "loss": ".2f", "largest logit": ".0f", "noise over signal": ".1f"}
    rows = []
    for _, title, kept in each(values, "queries"):
        for place, rate in enumerate(rates[4:], start=4):
            cells = [f"{centre(kept[key][place], key):{form}}" for key, form in forms.items()]
            rows.append([title, str(len(kept["right"][place])), f"{rate:g}", *cells])
    header = ["method", "seeds", "learning rate", "% right", *list(forms)[1:]]
    written["queries, logits"] = harness.markdown_table(header, rows)
    return written
