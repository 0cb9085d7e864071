"""What the comparison of adapters counts, and what its tables say where runs are missing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import stiefel_opt as so
from benchmarks.accuracy import adapters

SHAPES = {"columns": (9, 4), "rows": (4, 9), "blocks": (3, 5, 5)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_free_numbers_are_the_dimension_of_the_manifold(shape: tuple[int, ...]) -> None:
    """As many as the constraint's Jacobian leaves: its rank, by finite directions."""
    point = so.ManifoldParameter(so.random_point(*shape).double())
    stored, free = adapters.dimension([point, nn.Parameter(torch.zeros(2, 3))])
    assert stored == math.prod(shape) + 6
    directions = torch.eye(point.numel(), dtype=torch.float64).reshape(-1, *shape)
    tangents = torch.stack([so.project_tangent(point.detach(), each) for each in directions])
    assert free == int(torch.linalg.matrix_rank(tangents.flatten(1))) + 6


def run(method: str, seed: int, value: float, rate: float = 0.1) -> dict[str, Any]:
    line = {"text": "topics", "method": method, "rate": rate, "seed": seed, "seconds": 1.0}
    if seed == adapters.TUNING_SEED:
        return {**line, "validation": value}
    return {**line, "test": value, "english": 2 * value, "stored": 1000, "free": 900}


def test_tables_show_the_seeds_that_there_are_and_leave_out_what_is_missing() -> None:
    lines = [run("StelLA", 1, 12.0), run("StelLA", 0, 10.0), run("LoRA", 0, 11.0)]
    lines += [run("LoRA", 100, 5.0, 0.1), run("LoRA", 100, 4.0, 0.3), run("DoRA", 100, 7.0)]
    rows, rates = adapters.rows_of("topics", lines)
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("LoRA", "0", "11.00"),
        ("StelLA", "0, 1", "11.00 ± 1.41"),
    ]
    assert rows[0][1] == "1,000, 900"
    assert rates == [["LoRA", "0.1, 0.3", "5.00, 4.00", "0.3"], ["DoRA", "0.1", "7.00", "0.1"]]
    assert adapters.rows_of("Spanish", lines) == ([], [])


def bench(path: Path, ends: Callable[[str, float], float] = lambda *_: 1.0) -> adapters.Bench:
    """A bench without a model, whose runs end as told."""
    found = object.__new__(adapters.Bench)
    found.path, found.lines, found.upper = path, [], None
    pieces = [None] * 400
    split = {"training": pieces, "validation": pieces, "test": pieces}
    found.texts = SimpleNamespace(split=lambda _text: split, english=pieces)

    def run(text: str, name: str, rate: float, seed: int) -> dict[str, Any]:
        line = {"text": text, "method": name, "rate": rate, "seed": seed}
        if line not in found.lines:
            found.lines.append(line)
        return {"validation": ends(text, rate)}

    found.run = run
    return found


@pytest.mark.parametrize(
    ("short", "long", "first", "then"),
    [
        (3e-3, 3e-3, [], [1e-3, 3e-3, 1e-2]),
        (3e-3, 1e-3, [], [3e-4, 1e-3, 3e-3, 1e-2]),
        (3e-3, 1e-9, [], [1e-4, 3e-4, 1e-3, 3e-3, 1e-2]),
        (1e-4, 1e-4, [1e-4, 3e-5], [3e-5, 1e-4, 3e-4]),
        (1e-9, 1e-9, [1e-4, 3e-5], [1e-6, 3e-6, 1e-5, 3e-5, 1e-4]),
        (1e9, 1e9, [1e-1, 3e-1], [1e-1, 3e-1, 1.0, 3.0, 10.0]),
    ],
    ids=["inside", "beside", "far", "added", "below all", "above all"],
)
def test_the_search_adds_two_learning_rates_at_most(
    short: float, long: float, first: list[float], then: list[float], tmp_path: Path
) -> None:
    best = {adapters.TEXTS[0]: short, adapters.LONG: long}

    def ends(text: str, rate: float) -> float:
        return 1 + abs(math.log(rate / best[text]))

    found = bench(tmp_path / "runs", ends)
    rate, rates = found.search(adapters.LONG, "LoRA")
    tried = {
        text: sorted(line["rate"] for line in found.lines if line["text"] == text) for text in best
    }
    assert tried[adapters.TEXTS[0]] == sorted([*adapters.MIDDLE, *first])
    assert tried[adapters.LONG] == rates
    assert rate == min(rates, key=lambda each: ends(adapters.LONG, each))
    assert rates == then


def test_seconds_are_those_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Slow:
        model, trained = None, ()

        def __init__(self, *_: object) -> None:
            now[0] += 1000

        def __call__(self, _piece: object) -> float:
            now[0] += 2
            return 1.0

    def measured(*_: object) -> float:
        now[0] += 1000
        return 5.0

    monkeypatch.setattr(adapters, "Training", Slow)
    monkeypatch.setattr(adapters, "perplexity", measured)
    monkeypatch.setattr(adapters, "time", SimpleNamespace(process_time=lambda: now[0]))
    found = bench(tmp_path / "runs")
    del found.run
    assert found.run("topics", "LoRA", 0.1, 0)["seconds"] == 2 * adapters.STEPS
