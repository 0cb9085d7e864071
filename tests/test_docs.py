"""The documentation runs, its figures come from files of results, and it misses no public name.

A section (from one ``##`` to the next) can be copied alone: its python blocks are executed one
after the other in one namespace. A page that begins with

    <!-- torchrun: 2 -->

is one script instead, executed by that many processes, and one that begins with

    <!-- transformers: executed by make test-integrations -->

is left to tests/integrations. Figures stand in tables below a comment that
names their source: either a file with "tables", of which rows and columns may be left out,

    <!-- figures: benchmarks/results/NAME.json -->

or a list of measurements in a file, of which each row of the table shows one.

    <!-- values: benchmarks/results/NAME.json KEY -->
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stiefel_opt
from stiefel_opt import (
    compat,
    functional,
    integrations,
    monitor,
    nn,
    ot,
    parametrizations,
    rotations,
)

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROCESSES = re.compile(r"\A<!-- torchrun: (\d+) -->\n")
ELSEWHERE = re.compile(r"\A<!-- (?:torchrun|transformers): ")
FIGURES = re.compile(r"^<!-- (figures|values): (\S+) ?(\S*) -->\n+((?:^\|.*\n?)+)", re.MULTILINE)


def code(text: str) -> str:
    """The python blocks of ``text``, at their lines: a traceback points into the page."""
    lines = [""] * text.count("\n")
    for found in BLOCK.finditer(text):
        start = text.count("\n", 0, found.start(1))
        block = found.group(1).splitlines()
        lines[start : start + len(block)] = block
    return "\n".join(lines) + "\n"


def sections() -> list[Any]:
    """Page and code of every section that has code, with its title for a name."""
    found = []
    for name, text in PAGES.items():
        starts = [0, *(m.start() for m in re.finditer(r"^## ", text, re.MULTILINE)), len(text)]
        for start, stop in itertools.pairwise(starts):
            if BLOCK.search(text, start, stop) and not ELSEWHERE.match(text):
                title = text[start:stop].splitlines()[0].strip("# ")
                before = "\n" * text.count("\n", 0, start)
                found.append(pytest.param(name, before + code(text[start:stop]), id=title))
    return found


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def rows(table: str) -> list[list[str]]:
    """The rows of a markdown table, its header first, without the line below it."""
    lines = [line for line in table.splitlines() if line.strip().startswith("|")]
    return [cells(line) for line in lines if not set(line) <= set("|-: ")]


def tables(content: Any) -> list[list[list[str]]]:
    """Every table in the strings of ``content``, however deep."""
    if isinstance(content, str):
        return [rows(content)]
    inner = content.values() if isinstance(content, dict) else content
    return [table for item in inner for table in tables(item)]


def numbers(measurement: Any) -> list[Any]:
    """Every number and string in a measurement, however deep."""
    if isinstance(measurement, dict):
        measurement = list(measurement.values())
    if isinstance(measurement, list):
        return [number for item in measurement for number in numbers(item)]
    return [measurement]


def shows(cell: str, value: Any) -> bool:
    """Whether ``cell`` is ``value``, rounded to the digits of the cell."""
    if isinstance(value, float) and re.fullmatch(r"\d+\.\d+(e[+-]\d+)?", cell):
        digits = len(cell.split("e")[0].split(".")[1])
        return cell == f"{value:.{digits}{'e' if 'e' in cell else 'f'}}"
    return cell == ("never" if value is None else str(value))


def test_there_is_something_to_run() -> None:
    assert len(sections()) > 30
    assert sum(PROCESSES.match(text) is not None for text in PAGES.values()) == 1
    for name, text in PAGES.items():
        assert text.count("```python") == len(BLOCK.findall(text)), name
        assert len(re.findall("<!-- (?:figures|values)", text)) == len(FIGURES.findall(text)), name


@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")  # torch 2.9
@pytest.mark.parametrize(("page", "source"), sections())
def test_section_runs(
    page: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for package in re.findall(r"^import (geo\w+)$", source, re.MULTILINE):
        pytest.importorskip(package)  # ported from, not needed
    exec(compile(source, str(DOCS / page), "exec"), {"__name__": "docs"})


SCRIPTS = [name for name, text in PAGES.items() if PROCESSES.match(text)]


@pytest.mark.parametrize("page", SCRIPTS)
def test_page_runs_on_several_processes(page: str, tmp_path: Path) -> None:
    count = PROCESSES.match(PAGES[page])
    assert count
    script = tmp_path / "train.py"
    script.write_text(code(PAGES[page]), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", count.group(1), str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "constrained" in done.stdout


@pytest.mark.parametrize(
    ("kind", "source", "key", "table"),
    [found.groups() for text in PAGES.values() for found in FIGURES.finditer(text)],
)
def test_figures_come_from_their_file(kind: str, source: str, key: str, table: str) -> None:
    content = json.loads((ROOT / source).read_text(encoding="utf-8"))
    header, *shown = rows(table)
    if kind == "values":
        measured = [numbers(item) for item in content[key]]
        for row in shown:
            fitting = [all(any(shows(c, v) for v in values) for c in row) for values in measured]
            assert any(fitting), f"{row} is not under {key} in {source}"
        return
    stored = [t for t in tables(content["tables"]) if t and set(header) <= set(t[0])]
    assert stored, f"{header} are not columns of a table in {source}"
    known = [[row[t[0].index(name)] for name in header] for t in stored for row in t[1:]]
    for row in shown:
        assert row in known, f"{row} is not in {source}; run its script and copy its table"


# The gallery quotes published figures and says in a sentence what its pictures show.
@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"gallery.md"}))
def test_measurements_stand_in_tables_with_a_source(page: str) -> None:
    text = FIGURES.sub("", PAGES[page])
    text = re.sub(r"^```.*?^```$|`[^`]*`|\$[^$]*\$", "", text, flags=re.MULTILINE | re.DOTALL)
    unit = r"(?:ms|µs|s|seconds|minutes|hours|%|KB|MB|GB|times|x (?:faster|slower)|images/s)"
    found = re.findall(rf"\d[\d.,]*(?:e-?\d+)?\s*{unit}(?!\w)|\de-\d+", text)
    assert not found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", PAGES[page])
    missing = [t for t in targets if "://" not in t and not (DOCS / t).exists()]
    assert not missing


def test_every_page_is_in_the_contents() -> None:
    listed = set(re.findall(r"^([\w/]+)$", PAGES["index.md"], re.MULTILINE))
    assert {name.removesuffix(".md") for name in PAGES} - {"index"} <= listed


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.rst"))
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    objects = {id(resolve(name)) for name in documented}
    packages = (stiefel_opt, compat, functional, integrations, nn, ot, parametrizations, rotations)
    for package in packages:
        names = getattr(package, "__all__", vars(package))
        for name in names:
            value = getattr(package, name)
            public = not name.startswith("_") and callable(value)
            assert not public or id(value) in objects, f"{package.__name__}.{name}"
    assert id(monitor.Report) in objects


def resolve(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(sys.modules[module], leaf)
