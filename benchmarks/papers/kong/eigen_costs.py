"""What a step costs by size, and what inner iterations are worth, for `eigen_methods.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import geoopt
import numpy as np
import torch

import stiefel_opt as so
from benchmarks.common.harness import markdown_table
from benchmarks.papers.kong.eigen_contestants import geoopt_method, loop, ours
from benchmarks.papers.kong.eigen_loops import CayleyLoop, PublishedLoop, WenYinLoop
from benchmarks.papers.kong.eigen_problem import Limit, Problem, clock
from benchmarks.speed.contestants import pogo_sgd

SIZES = {
    "m": [(2000, m) for m in (4, 8, 16, 32, 64, 128)],
    "n": [(n, 16) for n in (500, 1000, 2000, 4000, 8000, 16000)],
}
STEPS, ROUNDS = 10, 7
BESIDE = ((2000, 32), (2000, 128), (16000, 16))
BESIDE_ROUNDS = 48
WEN_YIN = "Wen & Yin as published"
COMPARED = ("StiefelSGD", "RGD-C-C (ours)", "Kong et al. as published")
# The largest sizes: below them calls cost more than arithmetic.
FITTED = 3
STEP = 0.05

ITERATIONS = 3999  # with one more, QR every 10 or 100 steps would have taken the error out
CAYLEY = (1, 2, 4, 6, 8, 12, 16)
RATE = {"lr": 0.1, "momentum": 0.9}


def contestants() -> dict[str, tuple[Any, Any, bool]]:
    """How a parameter is tagged, its optimizer at momentum 0.9, and whether it is wide."""
    heavy = {"lr": STEP, "momentum": 0.9}
    stiefel = partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel(canonical=False))
    plain = torch.nn.Parameter
    return {
        "StiefelSGD": (so.ManifoldParameter, partial(so.StiefelSGD, **heavy), False),
        "RGD-C-C (ours)": (so.ManifoldParameter, partial(so.ProjectedRGD, lr=STEP), False),
        WEN_YIN: (plain, partial(WenYinLoop, lr=STEP), False),
        "CayleySGD": (so.ManifoldParameter, partial(so.CayleySGD, **heavy), False),
        "Li et al. as published": (plain, partial(CayleyLoop, **heavy), False),
        "Kong et al. as published": (plain, partial(PublishedLoop, iterations=8, **heavy), False),
        "geoopt SGD": (stiefel, partial(geoopt.optim.RiemannianSGD, **heavy), False),
        "POGO": (plain, partial(pogo_sgd, **heavy), True),
    }


def rounds_of(names: Sequence[str], n: int, m: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of `optimizer.step()` alone, in rounds that take turns, without the first."""
    generator = torch.Generator().manual_seed(n + m)
    start = torch.linalg.qr(torch.randn(n, m, generator=generator).double()).Q
    grad = torch.randn(n, m, generator=generator).double() / n**0.5
    rivals, known = [], contestants()
    for name in names:
        tag, build, wide = known[name]
        own, slope = (start.T[None], grad.T[None]) if wide else (start, grad)
        parameter = tag(own.clone().contiguous())
        rivals.append((parameter, build([parameter]), slope.contiguous(), []))
    for number in range(rounds + 1):
        for parameter, optimizer, slope, found in rivals:
            spent = 0.0
            for step in range(STEPS):
                # The sign alternates: the point does not run off, but steps grow shorter.
                parameter.grad = slope * (-1) ** step
                began = clock()
                optimizer.step()
                spent += clock() - began
            if number:
                found.append(1e3 * spent / STEPS)
    return {name: found for name, (*_, found) in zip(names, rivals, strict=True)}


def scaling() -> dict[str, Any]:
    """Medians at every size, and exponents."""
    result: dict[str, Any] = {}
    for letter, sizes in SIZES.items():
        for n, m in sizes:
            for name, found in rounds_of(list(contestants()), n, m, ROUNDS).items():
                entry = result.setdefault(letter, {}).setdefault(name, {"sizes": sizes, "ms": []})
                entry["ms"].append(statistics.median(found))
        for entry in result[letter].values():
            along = [n if letter == "n" else m for n, m in sizes][-FITTED:]
            fit = np.polyfit(np.log(along), np.log(entry["ms"][-FITTED:]), 1)
            entry["exponent"] = float(fit[0])
    return result


def beside() -> dict[str, dict[str, list[float]]]:
    """Time of a step over that of Wen & Yin in the same round: quartiles by size and method."""
    result: dict[str, dict[str, list[float]]] = {}
    for n, m in BESIDE:
        found = rounds_of([WEN_YIN, *COMPARED], n, m, BESIDE_ROUNDS)
        for name in COMPARED:
            ratios = [a / b for a, b in zip(found[name], found[WEN_YIN], strict=True)]
            result.setdefault(name, {})[f"{n} x {m}"] = statistics.quantiles(ratios)
    return result


def beside_table(found: dict[str, dict[str, list[float]]]) -> str:
    rows = [
        [name, *(f"{middle:.2f} ({low:.2f} - {high:.2f})" for low, middle, high in own.values())]
        for name, own in found.items()
    ]
    header = ["Time over that of Wen & Yin", *(f"{n} x {m}" for n, m in BESIDE)]
    return markdown_table(header, rows)


def scaling_table(found: dict[str, Any]) -> str:
    """Both sweeps, one below the other."""
    tables = []
    for letter, sizes in SIZES.items():
        n, m = sizes[0]
        own = [f"{letter} = {size[0] if letter == 'n' else size[1]}" for size in sizes]
        header = [f"ms of a step, {f'm = {m}' if letter == 'n' else f'n = {n}'}", *own, "Exponent"]
        rows = [
            [name, *(f"{ms:.2f}" for ms in entry["ms"]), f"{entry['exponent']:.2f}"]
            for name, entry in found[letter].items()
        ]
        tables.append(markdown_table(header, rows))
    return "\n\n".join(tables)


def inner_iterations(problems: Sequence[Problem]) -> dict[str, Any]:
    """Gaps and |X'X - I| after `ITERATIONS` steps, published learning rate, by inner iterations."""
    limit = Limit(ITERATIONS, target=-math.inf)
    cases = {f"Cayley map, {k} iterations": loop(CayleyLoop, iterations=k) for k in CAYLEY}
    for k in (1, 10, 100):
        title = f"Cayley map, 2 iterations, QR every {k} steps"
        cases[title] = loop(CayleyLoop, iterations=2, every=k)
    for k in (2, 4, 6, 8, 100):
        cases[f"inverse root, {k} iterations"] = loop(PublishedLoop, iterations=k)
    cases |= {
        "CayleySGD": ours(so.CayleySGD),
        "StiefelSGD": ours(so.StiefelSGD),
        "geoopt SGD": geoopt_method(geoopt.optim.RiemannianSGD),
    }
    result: dict[str, Any] = {}
    for name, method in cases.items():
        runs = [method(problem, RATE, limit) for problem in problems]
        result[name] = {
            "gaps": [run.gap if run.products == ITERATIONS else None for run in runs],
            "errors": [run.error for run in runs],
        }
    return result


def inner_table(found: dict[str, Any]) -> str:
    """The draw that is worst."""
    rows = []
    for name, entry in found.items():
        ends = ["diverged", "diverged"]
        if None not in entry["gaps"]:
            ends = [f"{max(entry['gaps'], key=abs):.0e}", f"{max(entry['errors']):.0e}"]
        rows.append([name, *ends])
    return markdown_table([f"After {ITERATIONS} steps", "Relative gap", "Orthonormality"], rows)
