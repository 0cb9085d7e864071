"""Bring the tables of the README and of docs/ up to date with the files of results.

    python -m benchmarks.common.publish            # rewrite what differs
    python -m benchmarks.common.publish --check    # only say which pages differ

Below a comment that names a file of results and, where it holds several, one of its tables,

    <!-- figures: benchmarks/results/NAME.json TABLE -->

a page chooses: its header which columns to show, its first cells which rows. The numbers are
copied from the file; `front_page.py` in its place gathers those of several. Run this after a
measurement.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import front_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FIGURES = re.compile(r"(^<!-- figures: (\S+) ?(.*?) -->\n+)((?:^\|.*\n)+)", re.MULTILINE)
BAR = re.compile(r"(?<=\s)\|(?=\s)")  # between cells: that of |X'X - I| touches a letter

Row = list[str]


def rows_of(table: str) -> list[Row]:
    """The rows of a markdown table, its header first, without the line below it."""
    lines = [line.strip() for line in table.splitlines() if line.strip().startswith("|")]
    lines = [line for line in lines if not set(line) <= set("|-: ")]
    return [[cell.strip().replace(r"\|", "|") for cell in BAR.split(line[1:-1])] for line in lines]


def stored_table(source: str, name: str) -> list[Row]:
    """The table ``name`` in a file, or its only one."""
    if source == "benchmarks/common/front_page.py":
        return front_page.tables()[name]
    tables = json.loads((ROOT / source).read_text(encoding="utf-8"))["tables"]
    items = tables.items() if isinstance(tables, dict) else enumerate(tables)
    named = {str(key): table for key, table in items}
    if not name and len(named) == 1:
        (name,) = named
    if name not in named:
        raise ValueError(f"{source} has tables {sorted(named)}, got {name!r}; name one of them")
    return rows_of(named[name])


def columns_of(header: Row, shown: Row) -> list[int]:
    """Where the columns ``shown`` stand in ``header``; of equal names the first is taken first."""
    found: list[int] = []
    for name in shown:
        places = [i for i, known in enumerate(header) if known == name and i not in found]
        if not places:
            raise ValueError(f"columns must be among {header}, got {name!r}")
        found.append(places[0])
    return found


def row_like(shown: Row, known: list[Row]) -> Row:
    """The row of ``known`` that begins as ``shown`` does."""
    for length in range(len(shown), 0, -1):
        found = [row for row in known if row[:length] == shown[:length]]
        if found and all(row == found[0] for row in found):
            return found[0]
        if found:
            break
    raise ValueError(f"a row must begin like one of the file, got {shown}")


def drawn(table: str, rows: list[Row]) -> str:
    """``rows`` as markdown, columns aligned as in ``table``."""
    divider = next(line for line in table.splitlines() if set(line) <= set("|-: "))
    right = [cell.strip().endswith(":") for cell in divider.strip().strip("|").split("|")]
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        for row in rows
    ]
    rules = ["-" * (w + 2 - r) + ":" * r for w, r in zip(widths, right, strict=True)]
    text = ["| " + " | ".join(line) + " |\n" for line in lines]
    return "".join([text[0], "|" + "|".join(rules) + "|\n", *text[1:]])


def published(text: str) -> str:
    """The page ``text`` with the numbers of the files of results."""

    def fresh(found: re.Match[str]) -> str:
        comment, source, name, table = found.groups()
        header, *stored = stored_table(source, name)
        shown_header, *shown = rows_of(table)
        try:
            columns = columns_of(header, shown_header)
            known = [[row[column] for column in columns] for row in stored]
            rows = [shown_header, *(row_like(row, known) for row in shown)]
        except ValueError as error:
            raise ValueError(f"{source} {name}: {error}") from None
        return comment + drawn(table, rows)

    return FIGURES.sub(fresh, text)


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(arguments)
    differing = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fresh = published(text)
        if fresh != text:
            differing.append(page.relative_to(ROOT).as_posix())
            if not options.check:
                page.write_text(fresh, encoding="utf-8")
    print("\n".join(differing) or "Every table shows what its file holds.")
    return 1 if differing and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
