"""The notebooks hold no outputs, run without a warning, and their links lead somewhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
FEWER = ("STEPS = 120", "STEPS = 40")  # for time


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_no_outputs_and_can_be_read(path: Path) -> None:
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    text = "".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    targets = re.findall(r"\]\(([^)#\s]+)", text)
    assert targets
    assert all((path.parent / target).exists() for target in targets)
    assert len(text.split()) < 400


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.close("all")
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells(path, "code"):
        code = "".join(cell["source"]).replace(*FEWER)
        exec(compile(code, f"{path.name}, {cell['id']}", "exec"), names)
    printed = capsys.readouterr().out
    if path.stem == "transformer":
        assert re.search("^constrained .*singular values 1.000 to 1.000$", printed, re.MULTILINE)
    else:
        kept, most = re.findall(r"variance kept: (\S+), at most (\S+)", printed)[0]
        assert kept == most
        pictures = [pyplot.figure(number) for number in pyplot.get_fignums()]
        assert sum(len(picture.axes) for picture in pictures) == 3
        pyplot.close("all")
