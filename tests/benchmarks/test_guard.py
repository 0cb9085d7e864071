"""The guard measures what is on file, and complains of what has become slower or inexact."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the rivals import
    pytest.importorskip("geoopt")
    pytest.importorskip("pogo.base")

from benchmarks import guard
from benchmarks.common.harness import RESULTS

STORED: dict[str, Any] = json.loads((RESULTS / "guard.json").read_text(encoding="utf-8"))
NAMES = [pair.name for pair in guard.PAIRS]
ROW = {"ratio": 0.5, "quartiles": [0.4, 0.6], "tolerance": 1.3, "error": 1e-7, "rival_error": None}


def test_the_file_has_every_pair_with_its_error_and_tolerance() -> None:
    assert list(STORED["results"]) == NAMES
    for pair in guard.PAIRS:
        row = STORED["results"][pair.name]
        assert row["tolerance"] == pair.tolerance
        assert row["quartiles"][0] <= row["ratio"] <= row["quartiles"][1]
        assert guard.complaints(row, row) == []
    assert "versions" in STORED["machine"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ratio": 0.64}, []),
        ({"ratio": 0.66}, ["ratio 0.66 > 0.65"]),
        ({"error": 2e-5}, ["error 2.0e-05 > 1e-05"]),
        ({"error": float("nan")}, ["error nan > 1e-05"]),
        ({"error": None, "ratio": 0.1}, []),
    ],
)
def test_what_is_slower_or_inexact_is_said(change: dict[str, Any], said: list[str]) -> None:
    assert guard.complaints(ROW | change, ROW) == said
    assert guard.complaints(ROW, None) == ["not on file: run --update"]


def test_a_check_fails_by_its_exit_status_and_measures_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds: list[int] = []

    def measured(_: guard.Pair, count: int) -> dict[str, Any]:
        rounds.append(count)
        return ROW

    monkeypatch.setattr(guard, "measure", measured)
    monkeypatch.setattr(guard, "PAIRS", guard.PAIRS[:1])
    monkeypatch.setattr(guard.torch, "set_num_threads", lambda _: None)
    file = ["--file", str(tmp_path / "guard.json"), "--rounds", "3"]
    assert guard.main([*file, "--check"]) == 1
    assert rounds == [3, 6]
    assert f"{NAMES[0]}: not on file" in capsys.readouterr().err
    assert guard.main([*file, "--update"]) == 0
    assert guard.main([*file, "--check"]) == 0
    on_file = json.loads((tmp_path / "guard.json").read_text(encoding="utf-8"))["results"]
    assert on_file == {NAMES[0]: ROW}


@pytest.mark.parametrize("pair", guard.PAIRS, ids=lambda pair: pair.name)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:geoopt")
def test_both_sides_of_a_pair_step_and_are_exact(pair: guard.Pair) -> None:
    for side in pair.build():
        for _ in range(2):
            side.contestant.prepare()
            side.contestant.call()
        assert side.matrices is None or side.error() < guard.MOST
