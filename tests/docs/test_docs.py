"""The documentation runs, its figures have a source, and it misses no public name.

A section (from one ``##`` to the next) can be copied alone: its python blocks are executed one
after the other in one namespace. A page that begins with

    <!-- torchrun: 2 -->

is one script instead, executed by that many processes, and one that begins with

    <!-- transformers: executed by make test-integrations -->

is left to tests/integrations. Figures stand in tables below a comment that names their source:
`test_publish.py` compares them.
"""

import importlib.util
import itertools
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_script
from tiny_decoder import TinyDecoder

import stiefel_opt
from stiefel_opt import (
    compat,
    functional,
    nn,
    optim,
    ot,
    parametrizations,
    rotations,
    tools,
)
from stiefel_opt.tools.report import Report

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
PAGES["contributing.md"] = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FRONT = {page.name: page.read_text(encoding="utf-8") for page in ROOT.glob("[RS]*.md")}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROCESSES = re.compile(r"\A<!-- torchrun: (\d+) -->\n")
ELSEWHERE = re.compile(r"\A<!-- (?:torchrun|transformers): ")
PROGRAMS, SUFFIXES = ("stiefel_opt", "examples", "benchmarks", "docs"), (".py", ".md", ".rst")
EXAMPLE = re.compile(r"^( *)\.\. code-block:: python\n\n((?:\1   .*\n|\n(?=\1   ))+)", re.MULTILINE)
DOCUMENTED = re.compile(r"^\.\. auto\w+:: (\S+)\n((?:   .*\n|\n(?=   ))*)", re.MULTILINE)
FIGURES = re.compile(r"^<!-- (?:figures|values): .*\n+(?:^\|.*\n?)+", re.MULTILINE)


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


def test_there_is_something_to_run() -> None:
    assert len(sections()) > 30
    assert sum(PROCESSES.match(text) is not None for text in PAGES.values()) == 1
    for name, text in PAGES.items():
        assert text.count("```python") == len(BLOCK.findall(text)), name


@pytest.mark.filterwarnings(r"ignore:.torch.jit.script\w*. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use the new API settings:UserWarning")  # torch 2.9
@pytest.mark.parametrize(("page", "source"), sections())
def test_section_runs(
    page: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    others = r"^(?:import|from) (geo\w+|sklearn|skorch|pyro)\b"
    for package in re.findall(others, source, re.MULTILINE):
        pytest.importorskip(package)  # ported from, used beside it, or for its data; not needed
    exec(compile(source, str(DOCS / page), "exec"), {"__name__": "docs"})


def test_script_runs_on_two_processes(tmp_path: Path) -> None:
    (page,) = (code(text) for text in PAGES.values() if PROCESSES.match(text))
    script = tmp_path / "train.py"
    # A file for each process: what two processes print may end up in one line.
    error = "open(f'error{rank}', 'w').write(str(float(so.orthonormality_error(model))))"
    script.write_text(page + error, encoding="utf-8")
    run_script(2, script)
    errors = [float(path.read_text(encoding="utf-8")) for path in tmp_path.glob("error*")]
    assert len(errors) == 2
    assert max(errors) < 1e-5


# The gallery and the page of the papers quote published figures and say what came out.
def test_measurements_stand_in_tables_with_a_source() -> None:
    unit = r"(?:ms|µs|s|seconds|minutes|hours|%|KB|MB|GB|times|x (?:faster|slower)|images/s)"
    for page in sorted(PAGES.keys() - {"gallery.md", "papers.md"}):
        text = FIGURES.sub("", PAGES[page])
        text = re.sub(r"^```.*?^```$|`[^`]*`|\$[^$]*\$", "", text, flags=re.MULTILINE | re.DOTALL)
        found = re.findall(rf"\d[\d.,]*(?:e-?\d+)?\s*{unit}(?!\w)|\de-\d+", text)
        assert not found, page


def test_links_lead_somewhere() -> None:
    for page, text in PAGES.items():
        folder = ROOT if page == "contributing.md" else DOCS
        targets = re.findall(r"\]\(([^)#\s]+)", text)
        missing = [t for t in targets if "://" not in t and not (folder / t).exists()]
        assert not missing, page


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings of three levels, as GitHub and MyST name them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", [*sorted(PAGES), *sorted(FRONT)])
def test_anchors_exist(page: str) -> None:
    text = PAGES.get(page) or FRONT[page]
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", text):
        if "://" not in target and (not target or target.endswith(".md")):
            name = Path(target).name if target else page
            assert anchor in anchors(PAGES.get(name) or FRONT[name]), f"{target}#{anchor}"


def test_no_line_of_a_formula_begins_like_an_item_of_a_list() -> None:
    """Markdown would end the paragraph there and show the formula as text."""
    aside = re.compile(r"^```.*?^```|\$\$.*?\$\$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
    for page, text in PAGES.items():
        for paragraph in aside.sub("", text).split("\n\n"):
            formulas = re.findall(r"\$[^$]+\$", paragraph)
            broken = [formula for formula in formulas if re.search(r"\n\s*[-+*] ", formula)]
            assert not broken, page


def test_the_layout_names_every_room() -> None:
    drawn = set(re.findall(r"^[├└]── ([\w.]+)", PAGES["contributing.md"], re.MULTILINE))
    package = Path(stiefel_opt.__file__).parent
    rooms = {path.name for path in package.iterdir() if not path.name.startswith("__")}
    assert drawn == {room for room in rooms if room != "py.typed"}


def test_every_page_is_in_the_contents() -> None:
    listed = set(re.findall(r"^([\w/]+)$", PAGES["index.md"], re.MULTILINE))
    assert {name.removesuffix(".md") for name in PAGES} - {"index"} <= listed


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.rst"))
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    objects = {id(resolve(name)) for name in documented}
    packages = (stiefel_opt, compat, functional, nn, optim, ot, tools)
    packages += (parametrizations, rotations)
    for package in packages:
        names = getattr(package, "__all__", vars(package))
        for name in names:
            value = getattr(package, name)
            public = not name.startswith("_") and callable(value)
            assert not public or id(value) in objects, f"{package.__name__}.{name}"
    assert id(Report) in objects


REFERENCE = sorted((DOCS / "api").glob("[!i]*.rst"))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # geotorch's
@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_the_examples_of_the_reference_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two lines below the title to the last: one program a page."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    examples = list(EXAMPLE.finditer(text))
    assert re.match(r".*\n=+\n\n\Z", text[: examples[0].start()])
    assert examples[0].group(2).count("\n") == 2
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(64, 128), torch.nn.ReLU(), linear(128, 10), linear(10, 10))
    stiefel_opt.constrain(model[3])
    given = {
        "torch": torch,
        "so": stiefel_opt,
        "model": TinyDecoder() if page.stem == "rotations" else model,
        "decoder": TinyDecoder(),
        "ids": torch.arange(16).reshape(2, 8),
        "optimizer": stiefel_opt.StiefelAdam(model.parameters()),
        "point": torch.eye(8, 3)[None],
        "x": torch.randn(12, 4, dtype=torch.float64),
        "y": torch.randn(15, 4, dtype=torch.float64),
    }
    for example in examples:
        block = textwrap.dedent(example.group(2))
        other = re.match(r"import (geoopt|geotorch|peft)\n", block)
        if other is None or importlib.util.find_spec(other.group(1)):
            lines = "\n" * text.count("\n", 0, example.start(2))
            exec(compile(lines + block, str(page), "exec"), given)


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_every_name_of_the_reference_has_an_example(page: Path) -> None:
    if page.stem == "rooms":
        pytest.skip("these names are for rules and clients of somebody else")
    text = page.read_text(encoding="utf-8")
    title = EXAMPLE.search(text)
    for found in DOCUMENTED.finditer(text):
        name = found.group(1).rpartition(".")[2]
        shown = "\n".join(each.group(2) for each in EXAMPLE.finditer(found.group(2)))
        assert shown or re.search(rf"\b{name}\b", title.group(2)), name


def test_the_support_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(\w+/(?:test_\w+\.py)?)`", PAGES["support.md"])
    assert len(named) > 10
    assert all((ROOT / "tests" / path).exists() for path in named)


def test_tests_that_pages_name_exist() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in files)
    known = {path.stem for path in files} | set(
        re.findall(r"^def (test_\w+)", sources, re.MULTILINE)
    )
    for page, text in PAGES.items():
        named = set(re.findall(r"`(test_\w+)(?:\.py)?`", text))
        assert named <= known, f"{page}: {named - known}"


def test_pages_that_need_another_package_say_how_to_get_it() -> None:
    pages = {name: text for name, text in PAGES.items() if text.startswith("<!-- transformers: ")}
    assert len(pages) >= 4
    assert not [name for name, text in pages.items() if "    pip install " not in text]


def test_a_recipe_has_at_most_fifteen_lines() -> None:
    blocks = BLOCK.findall(PAGES["problems.md"])
    assert len(blocks) > 12
    assert max(sum(bool(line) for line in block.splitlines()) for block in blocks) <= 15


def test_the_page_of_decisions_fits_on_few_screens() -> None:
    assert len(PAGES["choosing.md"].splitlines()) <= 250


def test_the_pages_stay_short() -> None:
    """Words with code, tables and proofs, as `wc -w docs/*.md` counts."""
    total = sum(len(page.read_text(encoding="utf-8").split()) for page in DOCS.glob("*.md"))
    assert total <= 24_000, "say it once and link to it; drop history and asides"


def resolve(name: str) -> Any:
    module, _, leaf = name.rpartition(".")
    return getattr(sys.modules[module], leaf)


def test_nothing_says_to_install_the_package_from_an_index():
    """It is on none: remedies name the packages that are missing."""
    files = [path for part in PROGRAMS for path in (ROOT / part).rglob("*.*")]
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in SUFFIXES}
    assert len(texts) > 200
    assert not [path for path, text in texts.items() if re.search(r"install\W+stiefel.opt", text)]
