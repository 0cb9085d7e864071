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
import os
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
    nn,
    ot,
    parametrizations,
    rotations,
)
from stiefel_opt.report import Report

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


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")  # torch 2.9
@pytest.mark.parametrize(("page", "source"), sections())
def test_section_runs(
    page: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for package in re.findall(r"^import (geo\w+)$", source, re.MULTILINE):
        pytest.importorskip(package)  # ported from, not needed
    exec(compile(source, str(DOCS / page), "exec"), {"__name__": "docs"})


def test_scripts_run_on_two_processes(tmp_path: Path) -> None:
    """The block of the README that stands as ``py``, then whole pages: most time is the start."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    # A file for each process: what two processes print may end up in one line.
    error = "open(f'error{dist.get_rank()}', 'w').write(str(float(so.orthonormality_error(model))))"
    # One group serves both: a second one, made where the first has been, can meet its leavings.
    start = 'dist.init_process_group("gloo")\n'
    assert 'dist.init_process_group("gloo")' in block
    pages = [code(text) for text in PAGES.values() if PROCESSES.match(text)]
    pages = [page.replace(start, "") for page in pages]
    parts = [block, error, "dist.barrier()", *pages]
    script = tmp_path / "train.py"
    script.write_text("\n".join(parts), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "constrained" in done.stdout
    errors = [float(path.read_text(encoding="utf-8")) for path in tmp_path.glob("error*")]
    assert len(errors) == 2
    assert max(errors) < 1e-5


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
def test_measurements_stand_in_tables_with_a_source() -> None:
    unit = r"(?:ms|µs|s|seconds|minutes|hours|%|KB|MB|GB|times|x (?:faster|slower)|images/s)"
    for page in sorted(PAGES.keys() - {"gallery.md"}):
        text = FIGURES.sub("", PAGES[page])
        text = re.sub(r"^```.*?^```$|`[^`]*`|\$[^$]*\$", "", text, flags=re.MULTILINE | re.DOTALL)
        found = re.findall(rf"\d[\d.,]*(?:e-?\d+)?\s*{unit}(?!\w)|\de-\d+", text)
        assert not found, page


def test_links_lead_somewhere() -> None:
    for page, text in PAGES.items():
        targets = re.findall(r"\]\(([^)#\s]+)", text)
        missing = [t for t in targets if "://" not in t and not (DOCS / t).exists()]
        assert not missing, page


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
    assert id(Report) in objects


def resolve(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(sys.modules[module], leaf)
