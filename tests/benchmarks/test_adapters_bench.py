"""What the comparison of adapters counts, and what its tables say where runs are missing."""

from __future__ import annotations

import math
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
