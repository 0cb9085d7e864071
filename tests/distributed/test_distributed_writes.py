"""What somebody writes into a sharded weight is seen by the next step, as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import OPTIMIZERS, RULES
from processes import part, run
from torch import Tensor, nn
from torch import distributed as dist

import stiefel_opt as so

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no processes")

SHAPES = (16, 4), (4, 16), (6, 6)
FREE = torch.randn(16, 16, generator=torch.Generator().manual_seed(5))


def by_copy(layer: nn.Module, value: Tensor) -> None:
    weight: Any = layer.weight
    with torch.no_grad():
        weight.copy_(part(value, weight.device_mesh, weight.placements))


def by_multiplication(layer: nn.Module, _: Tensor) -> None:
    with torch.no_grad():
        layer.weight.mul_(3.0)  # type: ignore[union-attr,operator]


def by_load(layer: nn.Module, value: Tensor) -> None:
    weight: Any = layer.weight
    shard = part(value, weight.device_mesh, weight.placements)
    with pytest.warns(UserWarning, match="`weight` is loaded with values that are off"):
        layer.load_state_dict({"weight": shard})


def by_distributed_load(layer: nn.Module, value: Tensor, full: bool = True) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if not full:
        value = part(value, layer.weight.device_mesh, layer.weight.placements)
    with pytest.warns(UserWarning, match="`weight` is loaded with values that are off"):
        set_model_state_dict(
            layer, {"weight": value}, options=StateDictOptions(full_state_dict=full)
        )


def by_distributed_load_of_shards(layer: nn.Module, value: Tensor) -> None:
    by_distributed_load(layer, value, full=False)


def by_data(layer: nn.Module, _: Tensor) -> None:
    layer.weight.data.mul_(1.3)  # type: ignore[union-attr,operator]


WRITES: dict[
    Callable[[nn.Module, Tensor], None], int
] = {  # and when it is seen: with the correction of step 8, or at once
    by_copy: 1,
    by_multiplication: 1,
    by_load: 1,
    by_distributed_load: 1,
    by_distributed_load_of_shards: 1,
    by_data: 5,
}


def sharded(shape: tuple[int, int], dim: int) -> nn.Linear:
    from torch.distributed.tensor import Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layer = so.constrain(nn.Linear(shape[1], shape[0], bias=False))
    layer.weight = nn.Parameter(part(layer.weight.detach(), mesh, [Shard(dim)]))
    return so.retag(layer)


def step(layer: nn.Linear, opt: Any, number: int) -> None:
    weight: Any = layer.weight
    grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    weight.grad = part(grad, weight.device_mesh, weight.placements)
    opt.step()


def error_of(layer: nn.Linear) -> float:
    weight: Any = layer.weight
    return float(so.orthonormality_error(weight.detach().full_tensor()))


def write_and_step(name: str, shape: tuple[int, int], dim: int) -> None:
    rule, options = OPTIMIZERS[name]
    for write, steps in WRITES.items():
        layer = sharded(shape, dim)
        opt = rule(layer.parameters(), **{**options, "lr": 0.01})
        for number in range(3):
            step(layer, opt, number)
        write(layer, FREE[: shape[0], : shape[1]].contiguous())
        assert error_of(layer) > 0.1
        for number in range(steps):
            step(layer, opt, 3 + number)
        assert error_of(layer) <= 1e-6, f"{name} {write.__name__}: {error_of(layer)}"
        for number in range(2):
            step(layer, opt, 10 + number)
            assert error_of(layer) <= 1e-6, f"{name} {write.__name__}: {error_of(layer)}"


def project(shape: tuple[int, int], dim: int) -> None:
    """The nearest point is that of one process, and a point keeps its bits."""
    layer, value = sharded(shape, dim), FREE[: shape[0], : shape[1]].contiguous()
    weight: Any = layer.weight
    by_copy(layer, value)
    expected = so.project_(value.clone())
    assert so.project_(layer) is layer
    assert torch.equal(weight.detach().full_tensor(), expected)
    by_multiplication(layer, value)
    so.project_(layer.weight)
    torch.testing.assert_close(weight.detach().full_tensor(), expected)
    before = weight.detach().full_tensor()
    assert torch.equal(so.project_(layer).weight.detach().full_tensor(), before)


def test_sharded_weights_are_projected() -> None:
    run(2, *[(project, shape, dim) for shape in (*SHAPES, (5, 3)) for dim in (0, 1)])


def test_two_processes_see_what_is_written() -> None:
    run(2, *[(write_and_step, name, SHAPES[i % 3], i % 2) for i, name in enumerate(RULES)])


@pytest.mark.slow
def test_every_rule_sees_what_is_written_in_every_layout() -> None:
    layouts = [(shape, dim) for shape in SHAPES for dim in (0, 1)]
    run(2, *[(write_and_step, name, *layout) for name in OPTIMIZERS for layout in layouts])
