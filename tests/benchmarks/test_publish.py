"""The figures of README and docs are those of the files of results."""

import re
from pathlib import Path

import pytest

from benchmarks.common import publish

ROOT = Path(__file__).parents[2]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in publish.PAGES}
TABLE = "<!-- figures: benchmarks/results/eigen_methods.json 1000 x 10, methods -->\n\n{}"
ROW = "| StiefelSGD | 0.65 0.85 | 5/5 | {} |\n"


def test_every_source_is_understood() -> None:
    for name, text in PAGES.items():
        assert text.count("<!-- figures:") == len(publish.FIGURES.findall(text)), name


@pytest.mark.parametrize("page", [name for name in PAGES if "<!-- figures:" in PAGES[name]])
def test_tables_show_what_their_files_hold(page: str) -> None:
    assert publish.published(PAGES[page]) == PAGES[page], "run python -m benchmarks.common.publish"


def test_publishing_replaces_figures_and_nothing_else() -> None:
    header = "| Method | Setting | Arrived | Products with A |\n|---|---|---:|---|\n"
    stale = "before\n\n" + TABLE.format(header + ROW.format("1")) + "\nafter"
    fresh = publish.published(stale)
    (*_, row) = publish.rows_of(fresh)
    assert row[:3] == ["StiefelSGD", "0.65 0.85", "5/5"]
    assert re.fullmatch(r"\d+ \(\d+ - \d+\)", row[3])
    assert fresh.startswith("before\n\n")
    assert fresh.endswith("\nafter")
    assert publish.published(fresh) == fresh


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("| Method | Pace |\n|---|---|\n| StiefelSGD | 1 |\n", "columns must be among"),
        ("| Method | Arrived |\n|---|---|\n| Newton | 1 |\n", "a row must begin like one"),
        ("| Arrived | Setting |\n|---|---|\n| 5/5 | 1 |\n", "a row must begin like"),
    ],
)
def test_publishing_refuses_what_the_file_does_not_hold(table: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        publish.published(TABLE.format(table))


def test_publishing_asks_which_table() -> None:
    page = "<!-- figures: benchmarks/results/step_time.json -->\n\n| ms a step |\n|---|\n| x |\n"
    with pytest.raises(ValueError, match="name one of them"):
        publish.published(page)


def test_bars_within_a_cell_are_no_borders() -> None:
    (row,) = publish.rows_of("| one | |Q'Q - I| | |\n")
    assert row == ["one", "|Q'Q - I|", ""]
    assert publish.rows_of(publish.drawn("|---|---|---|", [row, row]))[1] == row
