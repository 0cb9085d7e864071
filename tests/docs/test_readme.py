"""The README is short, it runs, it shows what it prints, and its links lead somewhere.

Every python block is executed, in a namespace of its own. A block of text that follows one is what
it prints, but for the digits that rounding and the draw decide. Tables: `test_publish.py`.
"""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
BLOCKS = [
    pytest.param(line, found["code"], found["printed"], id=f"line {line + 1}")
    for found in BLOCK.finditer(README)
    for line in [README.count("\n", 0, found.start("code"))]
]


def without_digits(text: str) -> str:
    return re.sub(r"\d\.\de-\d\d|\d\d%", "#", text)


def prose_of(text: str) -> str:
    """What a reader reads: no code, no tables, no comments; of a link its words."""
    text = re.sub(r"^```.*?^```$|^\|[^\n]*$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def sentences_of(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n|^- |^#.*$", prose_of(text), flags=re.MULTILINE)
    return [s for p in paragraphs for s in re.split(r"(?<=[.!?:])\s+", " ".join(p.split())) if s]


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 130
    assert len(prose_of(README).split()) <= 500
    numbers = re.findall(r"(?<![\w.])\d[\d,.]*", prose_of(README))
    assert len(numbers) <= 25, numbers


def test_its_sentences_are_short() -> None:
    long = [sentence for sentence in sentences_of(README) if len(sentence.split()) > 25]
    assert len(long) <= 3, long
    assert not re.search(r"\bof (those|which)\b", prose_of(README))


def test_what_a_sentence_is() -> None:
    text = "# A\n\nOne [two](x.md). Three\nfour: five\n\n- six `a b`\n\n"
    text += "| 7 |\n| 8 |\n\n```text\n9\n```\n\nTen.\n"
    assert sentences_of(text) == ["One two.", "Three four:", "five", "six code", "Ten."]


def test_the_two_commands_stand_at_the_top() -> None:
    """How to get the package, and each command in a block, with what it prints and its minutes."""
    top = "\n".join(README.splitlines()[:30])
    blocks = re.findall(r"^```bash\n(.*?)^```$", top, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    for command, prints in (("make demo", "table"), ("make test", "passed")):
        (line,) = (line for line in lines if line.split("#")[0].strip() == command)
        assert prints in line
        assert re.search(r"\b(two|three|four|five) minutes\b", line)
    assert "`pip install .`" in top
    assert re.search(r"git clone \S+://|unpack", top)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_there_is_something_to_run() -> None:
    assert README.count("```python") == len(BLOCKS) == 3
    assert sum(block.values[2] is not None for block in BLOCKS) == 1


def test_it_shows_the_table_of_the_demo() -> None:
    for package in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(package)
    from examples import demo

    path = ROOT / "benchmarks" / "results" / "demo.json"
    measured = json.loads(path.read_text(encoding="utf-8"))
    assert tuple(measured["rates"]) == demo.RATES
    (shown,) = re.findall(r"^<!-- demo -->\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert shown == demo.table(measured["errors"]) + "\n"
    networks = len(measured["errors"]) * len(demo.RATES) * len(measured["seeds"])
    assert f"trains {networks} small networks" in README


@pytest.mark.parametrize(("line", "code", "printed"), BLOCKS)
def test_block_runs(
    line: int,
    code: str,
    printed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # The blank lines make a traceback point at the line in the README.
    exec(compile("\n" * line + code, str(ROOT / "README.md"), "exec"), {"__name__": "readme"})
    if printed is not None:
        assert without_digits(capsys.readouterr().out) == without_digits(printed)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    missing = [t for t in targets if "://" not in t and not (ROOT / t).exists()]
    assert not missing
