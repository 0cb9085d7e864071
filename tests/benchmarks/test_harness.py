"""What all benchmarks measure with: memory of one call, tables, files of results."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.common import harness


def test_the_memory_of_a_call_is_its_peak_and_what_it_keeps() -> None:
    held: list[torch.Tensor] = []
    mebibyte = 1 << 20

    def known() -> None:
        held.clear()  # a buffer of the previous call is released ...
        first = torch.empty(1 << 20)
        second = torch.empty(1 << 19)
        del first  # ... and the peak of 4 + 2 MiB stands before the next 1 MiB
        held.append(torch.empty(1 << 18))
        del second

    found = harness.step_memory(known, torch.device("cpu"))
    # The 1 MiB kept from the call before is released first: 6 - 1 above the start, 1 - 1 kept.
    assert found == harness.StepMemory(peak=5 * mebibyte, kept=0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([4.0], 4.0),
        ([9.0] * 8 + [4.0], 4.0),
        ([9.0] * 9 + [4.0], 6.5),
        ([0.0] * 20 + [5, 9, 1, 7, 3], 5),
    ],
)
def test_a_run_ends_with_the_median_of_its_last_fifth(values, expected) -> None:
    assert harness.final_value(values) == expected
    assert harness.final_value([100.0] * 25 + [5, 9, 1, 7, 3]) == 5


def test_a_table_lines_up_and_its_first_column_is_text() -> None:
    table = harness.markdown_table(["method", "ms"], [["one", "1.5"], ["another", "10"]])
    assert table.splitlines() == [
        "| method  |  ms |",
        "|---------|----:|",
        "| one     | 1.5 |",
        "| another |  10 |",
    ]


def test_results_are_replaced_in_one_move(tmp_path: Path) -> None:
    path = tmp_path / "results" / "one.json"
    harness.write_json(path, {"values": [1.23456789, 2.0], "name": "x"})
    assert json.loads(path.read_text()) == {"values": [1.23457, 2.0], "name": "x"}
    with pytest.raises(TypeError):
        harness.write_json(path, {"values": object()})
    assert json.loads(path.read_text())["name"] == "x"
    assert [file.name for file in path.parent.iterdir()] == ["one.json"]
