"""The README runs, its links lead somewhere, and its figures come from files of results.

Every python block is executed, each in a namespace of its own; the one that wants two processes,
which stands as ``py``, in `test_docs.py`. A table that reports measurements stands below a comment
that names its source,

    <!-- figures: benchmarks/results/NAME.json -->

and its rows are rows of the tables which the script that measured stored in that file, as text,
under the key "tables".
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    (README.count("\n", 0, found.start(1)), found.group(1))
    for found in re.finditer(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
]
MARK = re.compile(r"^<!-- figures: (\S+) -->\n+((?:^\|.*\n?)+)", re.MULTILINE)
TABLES = [(found.group(1), found.group(2)) for found in MARK.finditer(README)]


def cells(row: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in row.strip().strip("|").split("|"))


def rows(table: str) -> list[tuple[str, ...]]:
    """The rows of a markdown table without the line below its header."""
    lines = [line for line in table.splitlines() if line.strip().startswith("|")]
    return [cells(line) for line in lines if not set(line) <= set("|-: ")]


def texts(content: Any) -> list[str]:
    """Every string in ``content``, however deep."""
    if isinstance(content, str):
        return [content]
    inner = content.values() if isinstance(content, dict) else content
    return [text for item in inner for text in texts(item)]


def test_there_is_something_to_run() -> None:
    assert BLOCKS
    assert README.count("```python") == len(BLOCKS)
    assert README.count("<!-- figures:") == len(TABLES)


@pytest.mark.parametrize(("line", "code"), BLOCKS, ids=[f"line {line + 1}" for line, _ in BLOCKS])
def test_block_runs(line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # The blank lines make a traceback point at the line in the README.
    exec(compile("\n" * line + code, str(ROOT / "README.md"), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(("source", "table"), TABLES, ids=[source for source, _ in TABLES])
def test_figures_come_from_their_file(source: str, table: str) -> None:
    content = json.loads((ROOT / source).read_text(encoding="utf-8"))
    assert "tables" in content, f"{source}: the script must store its tables under 'tables'"
    stored = {row for text in texts(content["tables"]) for row in rows(text)}
    for row in rows(table):
        assert row in stored, f"{row} is not in {source}; run its script and copy its table"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", README) + re.findall(r'src="([^"]+)"', README)
    local = [target for target in targets if "://" not in target]
    missing = [target for target in local if not (ROOT / target).exists()]
    assert not missing
