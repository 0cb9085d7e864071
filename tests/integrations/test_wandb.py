"""The curves of `so.log_orthonormality`, read back from the file of an offline run of W&B."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import pytest
import torch
from loops import STEPS
from torch import nn
from training import train

import stiefel_opt as so

wandb = pytest.importorskip("wandb")


BLOCK, HEADER = 32768, 7  # bytes, of the log format of LevelDB


def records(file: bytes) -> Iterator[bytes]:
    """The records of a run's file: each in one piece, or in pieces that end with one of kind 4."""
    position, record = HEADER, b""  # the file has a header as long as that of a piece
    while position + HEADER <= len(file):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = struct.unpack("<HB", file[position + 4 : position + HEADER])
        record += file[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):
            yield record
            record = b""


def test_rows_in_a_file(tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    torch.manual_seed(0)
    model = nn.Sequential(so.constrain(nn.Linear(8, 6)), nn.Tanh(), so.orthogonal(nn.Linear(6, 2)))
    opt = so.StiefelAdam(model.parameters(), lr=0.01)
    with wandb.init(
        mode="offline", dir=tmp_path, settings=wandb.Settings(x_disable_stats=True)
    ) as run:
        so.log_orthonormality(opt, model, run, every=8)
        for step in range(STEPS):
            (loss,) = train(opt, lambda: model(torch.randn(5, 8)).square().sum())
            run.log({"loss": loss}, step=step)  # they keep their own steps
    wandb.teardown()  # writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in records(path.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
            )
    tag = "orthonormality_error"
    ours = [row for row in rows if f"{tag}/step" in row]
    assert [row[f"{tag}/step"] for row in ours] == [8, 16, 24]
    last = {name: ours[-1][name] for name in so.orthonormality_errors(model)}
    assert last == pytest.approx(so.orthonormality_errors(model))
    assert last.keys() == {f"{tag}/{name}" for name in ("max", "0.weight", "2.weight")}
    assert [row["_step"] for row in rows if "loss" in row] == list(range(STEPS))
