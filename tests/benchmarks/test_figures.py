"""Pictures of the benchmarks: one look a method, drawn from the results that are kept."""

import importlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
figures = importlib.import_module("benchmarks.common.figures")


@pytest.fixture
def drawn_figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that is saved."""
    found: list[Any] = []
    save = figures.save
    monkeypatch.setattr(figures, "save", lambda *given: (found.append(given[0]), save(*given)))
    return found


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("name", figures.DRAWN)
def test_a_picture_is_drawn_from_the_results_beside_it(
    name: str, tmp_path: Path, drawn_figures: list[Any]
) -> None:
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    figures.main([name, "--folder", str(tmp_path)])
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp*"))
    for figure in drawn_figures:
        methods_look_as_everywhere(figure)


def methods_look_as_everywhere(figure: Any) -> None:
    """A line whose label begins with the name of a method has its colour and its marker.

    No two curves of one diagram share their colour and their dashes.
    """
    for line in (line for axis in figure.axes for line in axis.lines):
        name = line.get_label().partition(", ")[0]
        for known in (line.get_label(), name):
            if known in figures.STYLES:
                assert (line.get_color(), line.get_marker()) == figures.STYLES[known][:2]
                break
    for axis in figure.axes:
        curves = [line for line in axis.lines if not line.get_label().startswith("_")]
        looks = [(line.get_color(), line.get_linestyle()) for line in curves]
        looks = [look for look in looks if look[1] != "None"]  # dots have a marker only
        assert len(looks) == len(set(looks))


def test_files_of_results_are_small() -> None:
    assert {file.name for file in RESULTS.iterdir() if file.stat().st_size >= 100_000} == set()


def test_pictures_are_shown_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    shown = set(re.findall(r"results/(\w+\.png)", "".join(page.read_text() for page in pages)))
    for file in RESULTS.glob("*.png"):
        assert file.name in shown, file.name
    assert all((RESULTS / name).exists() for name in shown)
