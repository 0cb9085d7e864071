"""Copying and pixel-by-pixel digits, at small sizes."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from benchmarks.common import images as image_files
from benchmarks.common import programs, training
from benchmarks.papers.likhosherstov import cells, copying, pixel_mnist

PAPERS = Path(__file__).parents[2] / "benchmarks" / "papers"
FILES = [  # of programs whose runs have a folder
    path
    for path in sorted(PAPERS.rglob("*.py"))
    if re.search(r"^    (programs\.)?add_flags\(", path.read_text(encoding="utf-8"), re.MULTILINE)
]
PROGRAMS = [f"benchmarks.papers.{path.parent.name}.{path.stem}" for path in FILES]
TASKS = {"copying": copying, "pixel_mnist": pixel_mnist}
pytestmark = pytest.mark.usefixtures("example")
MEASURED = ("seconds", "sequences_per_second", "images_per_second")


def checkpoints(folder: Path) -> dict[str, Any]:
    paths = sorted((folder / "checkpoints").glob("*.pt"))
    return {path.name: torch.load(path, weights_only=True) for path in paths}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a checkpoint but the measured seconds."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, dict | list | tuple):
            yield from leaves(value, f"{path}/{key}")
        elif key not in MEASURED:
            yield f"{path}/{key}", value


# ---- every program ----


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_takes_the_common_flags(name, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(name).main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--device", "--seed", "--threads", "--smoke", "--output"))


def test_no_program_is_long() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lengths.items() if count > 320} == {}


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


def test_cells_are_called_as_in_the_tables() -> None:
    names = ["T-CWY", "StiefelAdam", "exprnn", "LSTM", "lstm"]
    assert cells.parse_cells(names) == ["T-CWY", "constrained, StiefelAdam", "EXPRNN", "LSTM"]
    assert len(cells.parse_cells(["all"])) == len(cells.CELLS)
    with pytest.raises(SystemExit, match=r"--cells must be of CWY, T-CWY, .*, got gru"):
        cells.parse_cells(["gru"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_says_no_none(name, capsys) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(name).main(["--help"])
    assert "None" not in capsys.readouterr().out


@pytest.mark.parametrize("cell", ["cwy", "dtriv", "urnn", "rgd"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(cell, tmp_path, monkeypatch) -> None:
    flags = ["--smoke", "--cells", cell, "--output"]
    copying.main([*flags, str(tmp_path / "whole")])
    save = training.Trainer.save

    def interrupted(trainer: training.Trainer) -> None:
        save(trainer)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            copying.main([*flags, str(tmp_path / "parts"), "--resume"])
    monkeypatch.undo()
    copying.main([*flags, str(tmp_path / "parts"), "--resume"])
    parts, whole = (dict(leaves(checkpoints(tmp_path / name))) for name in ("parts", "whole"))
    assert parts.keys() == whole.keys()
    assert any(isinstance(value, torch.Tensor) for value in whole.values())
    for path, value in whole.items():
        same = torch.equal(parts[path], value) if isinstance(value, torch.Tensor) else None
        assert parts[path] == value if same is None else same, path


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


def test_a_run_made_longer_goes_on_under_the_schedule_of_the_longer_one(tmp_path) -> None:
    flags = ["--smoke", "--cells", "cwy", "--output", str(tmp_path), "--iterations"]
    shorter, longer = (copying.parse_arguments([*flags, count]) for count in ("4", "8"))
    copying.build_trainer(shorter, "CWY", 0).train("shorter")
    resumed, fresh = (copying.build_trainer(longer, "CWY", 0) for _ in range(2))
    resumed.resume()
    for _ in range(4):
        fresh.optimizer.step()
        fresh.scheduler.step()
    for one, other in zip(
        resumed.optimizer.param_groups, fresh.optimizer.param_groups, strict=True
    ):
        assert one["lr"] == other["lr"] > 0.1 * other["initial_lr"]


def test_ctrl_c_ends_with_one_line_and_status_130(capsys) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        programs.run(main)
    assert stopped.value.code == 130
    assert "--resume" in capsys.readouterr().out


def test_seeds_are_a_number_or_a_list(capsys) -> None:
    def seeds(*flags: str) -> list[int]:
        return copying.parse_arguments([*flags]).seeds

    assert seeds() == [0, 1]
    assert seeds("--seed", "5") == [5, 6]
    assert seeds("--seeds", "3", "--seed", "1") == [1, 2, 3]
    assert seeds("--seeds", "7", "4") == [7, 4]
    with pytest.raises(SystemExit):
        seeds("--seeds", "0")
    assert "--seeds must be at least 1" in capsys.readouterr().err


@pytest.mark.usefixtures("drawn")
def test_a_curve_is_the_mean_over_seeds_even_if_one_is_not_over(tmp_path) -> None:
    runs = [[{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0}], [{"epoch": 1, "loss": 4.0}]]
    panel = programs.Panel("loss", "loss", levels={"bar": 0.5})
    programs.plot_curves(tmp_path / "curves.png", "title", {"a": runs}, [panel])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert programs.spread([1.0, 3.0], ".1f") == "2.0 (1.0 - 3.0)"
    assert programs.spread([1.0], ".1f") == "1.0"


# ---- copying ----


def test_the_rate_of_each_cell_is_chosen_on_a_printed_grid(tmp_path, capsys) -> None:
    flags = ["--smoke", "--cells", "CWY", "Free", "--grid", "1e-4", "1e-2", "--output"]
    copying.main([*flags, str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    assert f"Rates at T = {copying.GRID_LENGTH}" in capsys.readouterr().out
    for run in results["runs"]:
        tried = results["grid"][cells.CELLS[run["cell"]].title]
        assert list(tried) == ["0.0001", "0.01"]
        assert run["lr"] == float(min(tried, key=tried.get))
        assert run["transition_lr"] == run["lr"] / 10


@pytest.mark.parametrize("name", ["cwy", "urnn", "free", "lstm"])
def test_what_is_measured_stays_on_the_device_of_the_model(name, monkeypatch) -> None:
    """On a device that is not there: a tensor of the CPU among its fake ones is an error."""
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    options = copying.parse_arguments(["--smoke"])
    model = cells.SequenceModel(name, 4, 3, options, deviation=0.1, last=True)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model.to("lazy")
        assert model(torch.randn(5, 2, 4, device="lazy")).device.type == "lazy"
        if name == "lstm":
            assert model.orthonormality_error() is None
        else:
            with pytest.raises(DataDependentOutputException):  # a fake number has no value
                model.orthonormality_error()


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


@pytest.mark.slow
def test_an_orthogonal_transition_learns_to_copy(tmp_path) -> None:
    flags = ["--length", "4", "--hidden", "48", "--iterations", "160", "--every", "40"]
    flags += ["--seeds", "1", "--cells", "cwy", "adam", "--batch-size", "64"]
    copying.main([*flags, "--output", str(tmp_path)])
    for run in json.loads((tmp_path / "results.json").read_text())["runs"]:
        assert run["history"][-1]["of_baseline"] < 0.5, run["cell"]


@pytest.mark.parametrize(
    ("below", "expected"),
    [((2, 0.5, 0.09, 0.05), 3), ((0.05, 0.2, 0.05), 3), ((0.05,), 1), ((0.05, 0.2), math.inf)],
)
def test_a_tenth_counts_from_where_the_loss_stays_below(below, expected) -> None:
    history = [{"of_baseline": value, "step": k} for k, value in enumerate(below, start=1)]
    assert copying.steps_to_a_tenth({"history": history}) == expected


# ---- pixels ----


def test_pooling_averages_squares_and_normalizes_anew() -> None:
    images = image_files.load_images("digits", Path())
    small = pixel_mnist.pooled(images, 4)
    mean = images.train_images.float().unfold(2, 2, 2).unfold(3, 2, 2).mean((-2, -1))
    assert torch.equal(small.train_images, mean.round().to(torch.uint8))
    pixels = small.normalize(small.train_images)
    assert float(pixels.mean()) == pytest.approx(0, abs=1e-5)
    assert float(pixels.std()) == pytest.approx(1, abs=1e-3)
    assert pixel_mnist.pooled(images, None) is images
    with pytest.raises(SystemExit, match="must divide"):
        pixel_mnist.pooled(images, 3)


def test_one_pixel_a_step_in_the_same_shuffled_order_for_all_seeds() -> None:
    options = pixel_mnist.parse_arguments(["--smoke", "--permuted"])
    images = pixel_mnist.pooled(image_files.load_images("digits", Path(), 64), options.side)
    first, second = (
        pixel_mnist.build_trainer(options, images, "CWY", seed).model for seed in (0, 1)
    )
    assert torch.equal(first.order, second.order)
    assert not torch.equal(first.order, torch.arange(16))
    assert torch.equal(first.order.sort().values, torch.arange(16))
    seen = []
    first.sequence.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    batch = torch.arange(3 * 16.0).view(3, 1, 4, 4)
    first(batch)
    assert torch.equal(seen[0][..., 0].T, batch.flatten(1)[:, first.order])


def test_missing_mnist_says_what_to_put_where(tmp_path) -> None:
    with pytest.raises(SystemExit, match=r"must hold mnist\.npz"):
        pixel_mnist.main(["--data", "mnist", "--data-dir", str(tmp_path)])
