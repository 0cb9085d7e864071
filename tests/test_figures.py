"""Pictures of the benchmarks: one look a method, drawn from the results that are kept."""

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

import figures  # noqa: E402

SAME = [  # one method under two names
    {"ProjectedRGD", "ProjectedRGD, cayley"},
    {"RGD-C-C", "RGD-C-C (Wen & Yin)"},
    {"CayleyAdam", "Cayley Adam"},
    {"HR", "sequential HR"},
    {"EXPRNN", "exponential"},
    {"SCORNN", "Cayley by solve"},
    {"StiefelSGD, published flows", "Kong et al. as published"},
    {"SGDG", "Li et al. as published"},
]


def test_no_two_methods_look_alike() -> None:
    names = defaultdict(set)
    for name, look in figures.STYLES.items():
        names[look].add(name)
    assert [alike for alike in names.values() if len(alike) > 1 and alike not in SAME] == []


def test_what_stands_around_a_name_does_not_change_its_colour() -> None:
    for name in ("StiefelAdam", "Tagged StiefelAdam", "StiefelAdam across heads"):
        assert figures.style(name, 3)["color"] == figures.RED


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("name", figures.DRAWN)
def test_a_picture_is_drawn_from_the_results_beside_it(name: str, tmp_path: Path) -> None:
    for file in RESULTS.glob("*.json"):
        shutil.copy(file, tmp_path)
    figures.main([name, "--folder", str(tmp_path)])
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp*"))


@pytest.mark.usefixtures("example", "drawn")
def test_a_saved_picture_keeps_its_colours(tmp_path: Path) -> None:
    from PIL import Image

    figure, axes = figures.start(1, (2, 2))
    for place, colour in enumerate(figures.COLOURS):
        axes[0][0].bar(place, 1, color=colour)
    figures.save(figure, tmp_path / "bars.png")
    with Image.open(tmp_path / "bars.png") as image:
        found = {colour for _, colour in image.convert("RGB").getcolors(10_000)}
    wanted = {tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for c in figures.COLOURS}
    assert wanted | {(255, 255, 255)} <= found


def test_pictures_are_small_and_shown_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    shown = set(re.findall(r"results/(\w+\.png)", "".join(page.read_text() for page in pages)))
    for file in RESULTS.glob("*.png"):
        assert file.stat().st_size < 100_000, file.name
        assert file.name in shown, file.name
    assert all((RESULTS / name).exists() for name in shown)
