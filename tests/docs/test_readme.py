"""The README is short, it runs, it shows what it prints, and its links lead somewhere.

Every python block is executed, in a namespace of its own. A block of text that follows one is what
it prints, but for the digits that rounding and the draw decide. Tables: `test_publish.py`.
"""

import json
import re
import statistics
from collections import Counter
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


def test_it_is_read_in_two_minutes() -> None:
    assert len(README.splitlines()) <= 200
    assert len(README.encode()) <= 14_000


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
    assert README.count("```python") == len(BLOCKS) == 6
    assert README.count("```text") == sum(block.values[2] is not None for block in BLOCKS) > 0


def test_it_says_what_the_demo_printed() -> None:
    for package in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(package)
    from examples import demo

    path = ROOT / "benchmarks" / "results" / "demo.json"
    measured = json.loads(path.read_text(encoding="utf-8"))
    text = " ".join(README.split())
    for method, rows in measured["errors"].items():
        cells = [method, *(f"{statistics.fmean(row):.1f}" for row in rows)]
        assert f"| {' | '.join(cells)} |" in text
    assert f"| {' | '.join(f'{rate:g}' for rate in demo.RATES)} |" in text
    ratio = statistics.median(demo.faster(measured["seconds"]))
    assert f"{ratio:.1f} times faster than torch's parametrization" in text
    tuned = json.loads((path.parent / "vit_digits.json").read_text(encoding="utf-8"))["methods"]
    for method, entry in tuned.items():
        if not method.endswith("initialisation"):
            assert f"{statistics.fmean(entry['errors']):.1f} % for {method}" in demo.TUNED
    apart = tuned["StiefelAdamW"]
    assert f"{-apart['difference']:.2f} ± {apart['standard_error']:.2f} apart" in demo.TUNED
    assert abs(apart["difference"]) < 2 * apart["standard_error"]  # or they are not level


def test_it_counts_the_learning_rates() -> None:
    path = ROOT / "benchmarks" / "results" / "learning_rates_runs.json"
    runs = json.loads(path.read_text(encoding="utf-8"))
    ours, theirs = runs["StiefelAdam"], runs["unconstrained, AdamW"]
    places = Counter(ours[name][0] - theirs[name][0] for name in theirs)
    most = sum(count for place, count in places.items() if place >= 2)
    higher = f"is three times it in {places[1]}, ten times or more in {most}"
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"{places[0]} of {len(theirs)} trainings, {higher}" in " ".join(README.split())
    assert f"In {len(theirs)} trainings of networks" in page
    assert f"equals AdamW's in {places[0]}, {higher}" in " ".join(page.split())


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
