"""Copying and pixel-by-pixel digits, at small sizes."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks.papers.likhosherstov import cells, copying, pixel_mnist
from benchmarks.papers.siems import state_tracking

PAPERS = Path(__file__).parents[2] / "benchmarks" / "papers"
FILES = [  # of programs whose runs have a folder
    path
    for path in sorted(PAPERS.rglob("*.py"))
    if re.search(r"^    (programs\.)?add_flags\(", path.read_text(encoding="utf-8"), re.MULTILINE)
]
PROGRAMS = [f"benchmarks.papers.{path.parent.name}.{path.stem}" for path in FILES]
TASKS = {"copying": copying, "pixel_mnist": pixel_mnist}
pytestmark = pytest.mark.usefixtures("example")


# ---- every program ----


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_takes_the_common_flags(name, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--device", "--seed", "--threads", "--smoke", "--output"))


@pytest.mark.parametrize("name", TASKS)
def test_smoke_writes_table_results_and_plot(name, tmp_path, capsys) -> None:
    TASKS[name].main(["--smoke", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.index("; results in ") < printed.index("epoch 1")
    table = (tmp_path / "table.md").read_text()
    assert table in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["tables"][0] in table
    for run in results["runs"]:
        cell, last = cells.CELLS[run["cell"]], run["history"][-1]
        assert f"| {cell.title} " in table
        assert math.isfinite(last["train_loss"])
        (line,) = (line for line in table.splitlines() if line.startswith(f"| {cell.title} "))
        if cell.transition is None:  # an LSTM has no matrix that could be orthogonal
            assert last["orthonormality_error"] is None
            assert line.split("|")[-2].strip() == "-"
        else:
            assert last["orthonormality_error"] > 0
            assert (last["orthonormality_error"] < 1e-4) == (cell.transition != cells.FREE)
    if name == "copying":
        assert len(results["runs"]) == len(cells.CELLS)


def test_a_run_can_be_made_longer_but_not_shorter(tmp_path) -> None:
    flags = ["--smoke", "--cells", "cwy", "--output", str(tmp_path), "--resume"]
    histories = []
    for iterations in ("4", "6"):
        copying.main([*flags, "--iterations", iterations])
        (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
        histories.append(run["history"])
    assert histories[1][:2] == histories[0]
    assert len(histories[1]) == 3
    with pytest.raises(ValueError, match="must keep epochs = 3"):
        copying.main([*flags, "--iterations", "4"])


# ---- copying ----


def test_the_answer_repeats_the_digits_and_the_baseline_guesses_them() -> None:
    length = 7
    sequence, answer = copying.draw(400, length, torch.Generator().manual_seed(0))
    assert sequence.shape == answer.shape == (length + 20, 400)
    assert torch.equal(sequence[:10], answer[-10:])
    assert set(sequence[:10].unique().tolist()) == set(range(1, 9))
    assert (sequence[10 : length + 10] == 0).all()
    assert (sequence[length + 10] == 9).all()
    assert (sequence[length + 11 :] == 0).all()
    assert (answer[:-10] == 0).all()
    probabilities = torch.zeros(length + 20, 9)
    probabilities[:-10, 0], probabilities[-10:, 1:] = 1, 1 / 8
    guessed = -probabilities[:, None].expand(-1, 400, -1).gather(2, answer[..., None]).log().mean()
    assert float(guessed) == pytest.approx(copying.baseline(length))


# ---- pixels ----


@pytest.mark.usefixtures("drawn")
def test_smoke_prints_what_it_does_and_writes_table_and_picture(tmp_path, capsys) -> None:
    arguments = ["--smoke", "--output", str(tmp_path)]
    state_tracking.main(arguments)
    printed = capsys.readouterr().out
    assert printed.index("; results in ") < printed.index("epoch 1")
    results = json.loads((tmp_path / "results.json").read_text())
    (table,) = results["tables"]
    assert table in printed
    assert (tmp_path / "table.md").read_text() == f"## {table}"
    entries = [entry for run in results["runs"] for entry in run["history"]]
    assert all(math.isfinite(value) for entry in entries for value in entry.values())
    for name in state_tracking.parse_arguments(arguments).tasks:
        assert f"\n| {name} " in table
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    before = (tmp_path / "results.json").read_bytes()
    state_tracking.main([*arguments, "--resume"])  # everything is there: nothing is trained again
    assert "epoch 1" not in capsys.readouterr().out
    assert (tmp_path / "results.json").read_bytes() == before
    with pytest.raises(ValueError, match="--resume must keep lr"):
        state_tracking.main([*arguments, "--resume", "--lr", "0.5"])


def test_answers_are_the_products_so_far() -> None:
    table = state_tracking.multiplication_table(4)
    elements, products = state_tracking.draw(table, 5, 7, torch.Generator().manual_seed(0))
    expected = torch.zeros(5, dtype=torch.int64)
    for each, product in zip(elements.T, products.T, strict=True):
        expected = table[each, expected]
        assert torch.equal(product, expected)
