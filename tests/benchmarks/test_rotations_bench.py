"""`accuracy/rotations.py` adds held-out sets and seeds to what is there, and repeats nothing."""

import argparse
import gzip
import importlib
import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoder import VOCABULARY, TinyDecoder

from stiefel_opt import rotations


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script with a tiny model whose tokens are letters, and its results in a folder."""
    found = importlib.import_module("benchmarks.accuracy.rotations")

    def tokenizer(text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[ord(c) % VOCABULARY for c in text[:4000]]]))

    def load(dtype: torch.dtype) -> tuple[Any, Any]:
        return rotations.prepare_(TinyDecoder().to(dtype)), tokenizer

    monkeypatch.setattr(found, "load", load)
    monkeypatch.setattr(found, "LENGTH", 16)
    monkeypatch.setattr(found.harness, "RESULTS", tmp_path / "results")
    return found


def test_sets_and_seeds_are_added(bench: ModuleType, tmp_path: Path) -> None:
    options = argparse.Namespace(folder=tmp_path / "rows", data_dir=None, pieces=2, seeds=[0])
    options.rows, options.rates, options.steps = ["StiefelAdam"], [0.1], 3
    options.tokens, options.repeats = 8, 2
    bench.Bench(options).run()
    row = options.folder / "StiefelAdam-rate-0.1-seed-0.json"
    first = json.loads(row.read_text())
    trained = options.folder / "StiefelAdam-rate-0.1-seed-0-training.json"
    before = trained.read_bytes()

    with gzip.open(tmp_path / "eng_spa.tsv.gz", "wt") as file:
        file.writelines(f"the cat of number {i} sleeps\tel gato\n" for i in range(99))
    options.data_dir, options.seeds = tmp_path, [0, 1]
    bench.Bench(options).run()
    second = json.loads(row.read_text())
    assert list(first["held_out"]) == ["topics"]
    assert list(second["held_out"]) == ["topics", "English"]
    assert second["held_out"]["topics"] == first["held_out"]["topics"]
    assert trained.read_bytes() == before

    options.tokens = 9
    with pytest.raises(ValueError, match=r"must hold runs of .*'tokens': 8"):
        bench.Bench(options)

    bench.merge(options)
    content = json.loads((tmp_path / "results/rotations.json").read_text())
    lines = [line.split("|")[1:3] for line in content["tables"]["rows"].splitlines()[2:]]
    cells = [tuple(cell.strip() for cell in line) for line in lines]
    assert cells[:2] == [("full precision", "-"), ("no rotation", "-")]
    assert cells[2:] == [("Hadamard", "0, 1"), ("StiefelAdam", "0, 1")]
    assert (tmp_path / "results/rotations.png").exists()
    row = next(row for row in content["rows"] if row.get("method"))
    repeated = row["held_out"]["topics"]["perplexities"]
    assert row["held_out"]["topics"]["perplexity"] == pytest.approx(math.sqrt(math.prod(repeated)))
    assert repeated == pytest.approx([repeated[0]] * 2, rel=1e-2)
