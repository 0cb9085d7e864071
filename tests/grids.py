"""How columns of values are joined to rows of cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

METRICS = ("canonical", "euclidean", -1.0, 0.3)
TRANSPORTS = ("isometric", "projected")


def in_turn(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many rows as the longest column has values; the others start again."""
    values = [list(column) for column in columns]
    rows = range(max(map(len, values)))
    return [tuple(column[row % len(column)] for column in values) for row in rows]


def pairwise(*columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows in which any two values of different columns meet: those with most new pairs first."""
    values = [list(column) for column in columns]
    rows = {
        row: set(itertools.combinations(enumerate(row), 2))
        for row in itertools.product(*(range(len(column)) for column in values))
    }
    missing: set[Any] = set().union(*rows.values())
    chosen = []
    while missing:
        chosen.append(max(rows, key=lambda row: len(rows[row] & missing)))
        missing -= rows[chosen[-1]]
    return [tuple(map(list.__getitem__, values, row)) for row in chosen]


def mixed(count: int, *columns: Iterable[Any]) -> list[tuple[Any, ...]]:
    """At least `count` rows, none left out: each value of a column equally often, by chance."""
    generator, found = random.Random(0), []
    table = list(map(list, columns))
    count = max(count, *map(len, table))
    for values in table:
        repeated = (values * (count // len(values) + 1))[:count]
        generator.shuffle(repeated)
        found.append(repeated)
    return list(zip(*found, strict=True))
