"""Rotations learned by several processes: one result, that of one process with all the text."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import assert_equal_on_all, run
from tiny_decoder import TinyDecoder, tokens
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stiefel_opt import rotations
from stiefel_opt.rotations import Rotations

STEPS = 12


def learn(model: torch.nn.Module, data: list[torch.Tensor], **options: object) -> Rotations:
    return rotations.learn(model, data, steps=STEPS, lr=0.05, progress=False, **options)


def work(path: str, cover: str) -> None:
    data = tokens(STEPS, batch=2)
    model = rotations.prepare_(TinyDecoder())
    start = rotations.hadamard(model, seed=dist.get_rank())  # the first one's counts
    learned_from = model
    if cover == "DistributedDataParallel":
        learned_from = DistributedDataParallel(model)
    elif cover.startswith("fully_shard"):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    mine = [batch[dist.get_rank()][None] for batch in data]
    options = {"gradient_checkpointing": True} if "checkpointing" in cover else {}
    options["loss"] = "noise" if "noise" in cover else "kl"
    found = learn(learned_from, mine, start=start, **options)
    assert_equal_on_all([found.residual, *found.heads])
    losses = torch.tensor([entry["loss"] for entry in found.log])
    assert_equal_on_all([losses])
    reference = torch.load(path, weights_only=True)["noise" if "noise" in cover else "kl"]
    torch.testing.assert_close(losses[:3], reference[:3], rtol=1e-4, atol=1e-5)


COVERS = (
    "bare",
    "DistributedDataParallel",
    "fully_shard",
    "fully_shard, checkpointing",
    "fully_shard, noise",
)


def test_processes_learn_what_one_does_with_all_the_text(tmp_path) -> None:
    alone = {}
    for loss in ("kl", "noise"):
        found = learn(rotations.prepare_(TinyDecoder()), tokens(STEPS, batch=2), loss=loss)
        alone[loss] = torch.tensor([entry["loss"] for entry in found.log])
    path = str(tmp_path / "losses.pt")
    torch.save(alone, path)
    run(2, *[(work, path, cover) for cover in COVERS])


def refuse() -> None:
    model = TinyDecoder()
    fully_shard(model)
    with pytest.raises(TypeError, match=r"must not be sharded, got a DTensor; .* before"):
        rotations.prepare_(model)


def test_sharded_models_are_not_prepared() -> None:
    run(1, (refuse,))
