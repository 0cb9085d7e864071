"""`accuracy/rotated_weights.py`: rounding of weights, and rows that are measured once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoder import VOCABULARY, TinyDecoder, tokens

from benchmarks.accuracy import rotated_weights as bench


@pytest.mark.parametrize("group", [4, 12])
def test_gptq_is_nearer_in_the_outputs_and_on_the_grid(group: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 12) @ torch.randn(12, 12)  # correlated inputs
    weight = torch.randn(9, 12)
    by_nearest, found = bench.nearest(weight, group), bench.gptq(weight, x.mT @ x, group)
    errors = [float(((each - weight) @ x.mT).square().mean()) for each in (found, by_nearest)]
    assert errors[0] < 0.9 * errors[1]
    assert torch.equal(bench.nearest(by_nearest, group), by_nearest)
    levels = found.unflatten(-1, (-1, group)) / bench.steps_of(found.unflatten(-1, (-1, group)))
    white = bench.gptq(weight, torch.eye(12), group)  # nothing to move an error to
    torch.testing.assert_close(white, by_nearest)
    assert float(levels.abs().max()) <= 7.001


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def load(_: Any) -> Any:
        torch.manual_seed(0)
        return TinyDecoder(), tokens()[0], torch.randint(VOCABULARY, (500,))

    monkeypatch.setattr(bench.Bench, "load", load)
    monkeypatch.setattr(bench, "CALIBRATED", 8)
    monkeypatch.setitem(bench.LEARNED, "kv_bits", None)
    monkeypatch.setattr(bench.harness, "RESULTS", tmp_path / "results")
    monkeypatch.setitem(bench.SETTINGS, "W4 A4 KV4", {"activation_bits": 4, "kv_bits": None})
    hadamard = bench.rotations.hadamard

    def without_r3(model: Any, *, seed: int, **_: Any) -> Any:  # heads of 6 have no such matrix
        return hadamard(model, seed=seed)

    monkeypatch.setattr(bench.rotations, "hadamard", without_r3)
    return tmp_path


def test_rows_are_measured_once_and_merged(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--folder", str(tiny / "rows"), "--groups", "4", "--steps", "2", "--calibration", "2"]
    given += ["--tokens", "8", "--pieces", "2"]
    options = bench.parse_arguments([*given, "--seeds", "0", "--settings", "W4 A16"])
    bench.Bench(options).run()
    files = {path: path.read_bytes() for path in (tiny / "rows").glob("*.json")}
    rows = [json.loads(content) for content in files.values()]
    named = [row for row in rows if "basis" in row]
    assert len(named) == 8
    assert all(row["perplexity"] > 1 for row in named)
    options = bench.parse_arguments([*given, "--seeds", "0", "1"])
    bench.Bench(options).run()
    assert all(path.read_bytes() == content for path, content in files.items())
    capsys.readouterr()
    bench.merge(options)
    printed = capsys.readouterr().out
    assert printed.count("±") == 16  # two seeds of Hadamard and learned, at four settings
    content = json.loads((tiny / "results" / "rotated_weights.json").read_text())
    assert "| W4 A16" in content["tables"]["rows"]
    with pytest.raises(ValueError, match="must hold runs of"):
        bench.Bench(bench.parse_arguments([*given, "--pieces", "9"]))
