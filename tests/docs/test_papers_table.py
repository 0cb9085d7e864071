"""What is said about the two papers is what stands in them.

`PLACES` lists their sections, tables, figures, algorithms, theorems and equations. Citations are
looked for in every docstring and comment of the package and the benchmarks, and in the table of
docs/papers.md. Presets called "paper" have the published settings.
"""

import ast
import functools
import importlib
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("stiefel_opt", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)
OWN = {ROOT / "docs" / "papers.md", ROOT / "docs" / "theory.md"}  # the second counts its theorems
PAGES = sorted({*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")} - OWN)
TABLE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "benchmarks" / "papers" / "README.md").read_text(encoding="utf-8")

# Sections, tables, ... by number; of the papers that nobody has read whole, those that are cited.
NUMBERED = {
    "kong": {
        "section": "2 3 3.1 3.2", "remark": "1", "algorithm": "1 2 3 4 5",
        "theorem": "1 2 3 4 5 6 7", "table": "1 2 3 4 5", "figure": "1 2 3 4 5 6",
        "eq.": "7 8 12 13 14 21 34", "appendix": "c f m.1 m.2 m.4 m.5 p.3",
    },
    "likhosherstov": {
        "section": "1 2.2.1 2.2.2 2.3 3.1 3.2 3.3 3.4 4.1 4.2 4.3", "theorem": "1 2 3 4",
        "lemma": "1", "eq.": "3", "table": "1 2 3 4 5", "figure": "1 2 3 4 5",
        "appendix": "a b c d e",
    },
    "generalized": {},  # the note on Householder products numbers nothing
    "absil": {"section": "2 4 4.1"},
    "arjovsky": {"eq.": "6 8"},
    "hager": {"section": "2"},
    "higham": {"eq.": "2.6"},
    "huang": {"eq.": "5"},
    "jing": {"eq.": "6"},
    "li, li": {"algorithm": "1 2"},
    "lin, fan": {"algorithm": "1 2", "eq.": "3"},
    "nocedal": {"algorithm": "7.4", "eq.": "3.1"},
    "wolkowicz": {"theorem": "2.1"},
    "yang": {"section": "3"},
}  # fmt: skip
PLACES = {
    paper: {f"{kind} {number}" for kind, numbers in kinds.items() for number in numbers.split()}
    for paper, kinds in NUMBERED.items()
}
READ = ("kong", "likhosherstov", "generalized")
PAPERS = "|".join(["cwy paper", *(name for name in PLACES if name != "generalized")])
KINDS = "section|table|figure|algorithm|theorem|lemma|appendix|remark|equation|eq\\."
PLACE = re.compile(rf"\b({KINDS})s?\s+\(?((?:\d+[a-d]?|[a-z])(?:\.\d+)*)\b(?!-)", re.IGNORECASE)
MORE = re.compile(r"(?:,| and| to|, and) \(?((?:\d+[a-d]?)(?:\.\d+)*|[a-z]\.\d+)\b(?!\s?[a-z%])")


def texts(path: Path) -> Iterator[str]:
    """Docstrings and runs of comments, or sections of a page, in lower case, on one line each."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from (" ".join(part.lower().split()) for part in source.split("\n#"))
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield " ".join(text.lower().split())
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    last, run = -2, ""
    for token in tokens:
        if token.type == tokenize.COMMENT:
            run = f"{run} {token.string[1:]}" if token.start[0] == last + 1 else token.string[1:]
            last = token.start[0]
            yield " ".join(run.lower().split())


def places(text: str) -> Iterator[tuple[int, str]]:
    """Where a numbered place is cited, and which: "figures 3 and 4" are two."""
    for found in PLACE.finditer(text):
        kind, number = found[1].lower(), found[2].lower()
        kind = "eq." if kind.startswith("eq") else kind
        if (kind == "appendix") != number[0].isalpha():
            continue
        whole = number if kind == "eq." else re.sub(r"(\d)[a-d]$", r"\1", number)
        yield found.start(), f"{kind} {whole}"
        end = found.end()
        while more := MORE.match(text, end):
            yield found.start(), f"{kind} " + re.sub(r"(\d)[a-d]$", r"\1", more[1])
            end = more.end()


def source_of(text: str, at: int) -> str | None:
    """The paper named last before ``at``, else first after it in the same text."""
    named = [*re.finditer(PAPERS, text)]
    before = [name for name in named if name.start() < at]
    chosen = before[-1] if before else named[0] if named else None
    return None if chosen is None else chosen[0].replace("cwy paper", "likhosherstov")


@functools.cache
def citations() -> list[tuple[str, str, int, str]]:
    """Every numbered place that is cited: its file, the text, where in it, and which place."""
    return [
        (str(path.relative_to(ROOT)), text, at, place)
        for path in (*SOURCES, *PAGES)
        for text in dict.fromkeys(texts(path))
        for at, place in places(text)
        if source_of(text, at) is not None
    ]


def test_citations_are_found() -> None:
    found = [place for _, place in places("figures 3 to 6, eq. (2.6), appendix M.2, table 4b")]
    assert found == ["figure 3", "figure 6", "eq. 2.6", "appendix m.2", "table 4"]
    assert len(citations()) > 50


def test_cited_places_exist() -> None:
    for path, text, at, place in citations():
        paper = source_of(text, at)
        assert place in PLACES[str(paper)], f"{path}: {place} of {paper} is not listed"


def rows(first: str, page: str = TABLE) -> Iterator[list[str]]:
    """The cells of every row of the tables whose header begins with ``first``."""
    table = ""
    for line in page.splitlines():
        if not line.startswith("|"):
            table = ""
        elif not table:
            table = line
        elif table.startswith(f"| {first} |") and not line.startswith("|-"):
            yield [cell.strip() for cell in line[1:-1].split(" | ")]


def numbered(cell: str) -> Iterator[str]:
    """Rows that a cell names: "K3 to K6, K8" are five."""
    for part in cell.split(", "):
        first, _, last = part.partition(" to ")
        stop = int((last or first)[1:])
        yield from (f"{first[0]}{number}" for number in range(int(first[1:]), stop + 1))


def test_every_row_of_the_page_has_a_place_and_a_verdict() -> None:
    papers = {name[0].upper(): name for name in ("kong", "likhosherstov")} | {"N": "generalized"}
    found: dict[str, set[str]] = {paper: set() for paper in READ}
    for row, claim, verdict, ours, _ in rows("Row"):
        assert verdict in ("reproduced", "partly", "not", "not tried"), claim
        assert all((claim, ours)), row
        assert (ours == "-") <= (verdict == "not tried"), claim
        paper = papers[row[0]]
        cited = {name for _, name in places(claim)}
        assert cited <= PLACES[paper], (claim, cited)
        assert cited or paper == "generalized", claim
        found[paper] |= cited
    for paper in READ:
        experiments = {name for name in PLACES[paper] if name.split()[0] in ("table", "figure")}
        missing = experiments - found[paper] - {"figure 5"}
        assert not missing, f"{paper}: no row for {missing}"


def test_the_verdict_stands_before_what_needs_width() -> None:
    """A reader with 1300 pixels sees it: only the claim stands before it, and no cell is code."""
    for row, claim, _, ours, more in rows("Row"):
        assert len(claim) < 140, row
        assert len(ours) < 320, row
        assert len(more) < 90, row


def test_what_is_missing_has_a_price() -> None:
    """Every claim that is seen in part or not tried, and no reproduced one."""
    prices = COMMANDS.split("\n## ")[-1]
    priced = {name for cell, *_ in rows("Rows", prices) for name in numbered(cell)}
    verdicts = {row: verdict for row, _, verdict, *_ in rows("Row")}
    assert priced <= verdicts.keys()
    for row, verdict in verdicts.items():
        assert (row in priced) >= (verdict in ("partly", "not tried")), row
        assert (row in priced) <= (verdict != "reproduced"), row


def module_of(program: str) -> str:
    """S.kong.attention is benchmarks.papers.kong.attention."""
    return re.sub(r"^B\b", "benchmarks", re.sub(r"^S\b", "benchmarks.papers", program))


def test_every_row_has_a_command_that_exists() -> None:
    """Behind an @ stands a program of the commit that a file of results names."""
    folders: dict[str, str] = {}
    files = (ROOT / "benchmarks" / "results").glob("*.json")
    kept = {json.loads(file.read_text(encoding="utf-8")).get("program") for file in files}
    claims = {row for row, *_ in rows("Row")}
    commands = [*rows("Rows", COMMANDS.split("\n## ")[1])]
    commanded = {name for cell, _ in commands for name in numbered(cell)}
    assert commanded == claims
    for _, command in commands:
        assert re.search(r"`(@?[SB](\.\w+)+|pytest )", command), command
        for tests in re.findall(r"`pytest ([\w/.]+)", command):
            assert (ROOT / tests).exists(), tests
        for earlier in re.findall(r"`@([SB](?:\.\w+)+)", command):
            assert module_of(earlier) in kept, earlier
        for program, flags in re.findall(r"`([SB](?:\.\w+)+)([^`]*)`", command):
            path = ROOT / f"{module_of(program).replace('.', '/')}.py"
            assert path.exists(), program
            shared = ROOT / "benchmarks" / "common"
            known = " ".join(
                file.read_text(encoding="utf-8")
                for file in (*path.parent.glob("*.py"), *shared.glob("*.py"))
            )
            for flag in re.findall(r"--[\w-]+", flags):
                assert f'"{flag}"' in known, (program, flag)
            named = re.search(r"--output (\S+)", flags)
            if named or program.startswith("S."):
                folder = named[1] if named else program  # its own
                first = folders.setdefault(folder, f"{program}{flags}")
                assert f"{program}{flags}" == first, f"two commands write to {folder}"


@pytest.mark.parametrize(
    ("program", "published"),
    [
        (
            "kong.orthogonal_vit",
            {"layers": 7, "width": 384, "feed_forward": 384, "heads": 12, "patch": 4}
            | {"warmup": 5, "smoothing": 0.1, "augment": "auto", "penalty": 1e-6},
        ),
        ("likhosherstov.copying", {"length": 1000, "hidden": 190, "start": "henaff"}),
        ("likhosherstov.pixel_mnist", {"data": "mnist", "side": None, "start": "helfrich"}),
    ],
)
def test_the_preset_of_the_paper_has_its_settings(program: str, published: dict[str, Any]) -> None:
    options = importlib.import_module(f"benchmarks.papers.{program}").parse_arguments(
        ["--preset", "paper"]
    )
    assert {key: getattr(options, key) for key in published} == published


def test_nothing_else_is_called_as_published() -> None:
    for path in SOURCES:
        assert "(as published)" not in path.read_text(encoding="utf-8"), path
