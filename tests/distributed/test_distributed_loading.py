"""Values that are loaded into sharded weights are looked at as on one process."""

import warnings

import pytest
import torch
from processes import run
from torch import distributed as dist
from torch import nn

import stiefel_opt as so

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no processes")


def load(dim: int, off: bool, full: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    layer = so.constrain(nn.Linear(6, 12))
    fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(dim % p.ndim))
    so.retag(layer)
    weight = torch.randn(12, 6) if off else so.random_point(12, 6)
    dist.broadcast(weight, 0)
    state = {"weight": weight, "bias": torch.zeros(12)}
    if not full:
        places = {"weight": [Shard(dim)], "bias": [Shard(0)]}
        state = {name: distribute_tensor(state[name], mesh, places[name]) for name in state}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_model_state_dict(layer, state, options=StateDictOptions(full_state_dict=full))
    texts = [str(warning.message) for warning in caught if "manifold" in str(warning.message)]
    assert len(texts) == off, texts
    assert all("`weight` is loaded with values that are off the manifold" in text for text in texts)


def test_values_off_the_manifold_are_told_on_every_rank() -> None:
    calls = [(load, dim, off, full) for dim in (0, 1) for off in (0, 1) for full in (0, 1)]
    run(2, *calls)
