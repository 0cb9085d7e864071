"""Sharded parameters on real processes take the steps of one process, and send little."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from contract import OPTIMIZERS
from processes import assert_equal_on_all, run
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import stiefel_opt as so

STEPS = 11  # past a step that corrects rounding

# name: shape, reading, sharded dimension, whether anything but sums may be sent, or nothing at all
LAYOUTS = {
    "tall": ((24, 4), {}, 0, "sums"),
    "tall, uneven": ((13, 3), {}, 0, "sums"),
    "tall, some without rows": ((5, 4), {}, 0, "sums"),
    "wide": ((4, 24), {}, 1, "sums"),
    "square": ((6, 6), {}, 0, "sums"),
    "vector": ((9, 1), {}, 0, "sums"),
    "scaled": ((12, 3), {"scale": 2.5}, 0, "sums"),
    "transposed": ((4, 12), {"transposed": True}, 1, "sums"),
    "batch of tall": ((2, 3, 10, 2), {}, 2, "sums"),
    "batch of wide": ((3, 2, 8), {}, 2, "sums"),
    "wide heads by columns": ((6, 12), {"heads": 2}, 1, "sums"),
    "ranges by columns": ((9, 12), {"rows": ((0, 4), (5, 8)), "heads": (2, 1)}, 1, "sums"),
    "filters by channels": ((3, 8, 2), {"flatten": True}, 1, "sums"),
    "batch": ((4, 7, 3), {}, 0, "nothing"),
    "batch, some without": ((3, 2, 5), {}, 0, "nothing"),
    "batch with rows": ((4, 9, 5), {"rows": (2, 6)}, 0, "nothing"),
    "heads": ((12, 9), {"heads": 4}, 0, "nothing"),
    "tall heads": ((28, 3), {"heads": 4}, 0, "nothing"),
    "heads, some without": ((9, 7), {"heads": 3}, 0, "nothing"),
    "transposed heads": ((9, 12), {"heads": 4, "transposed": True}, 1, "nothing"),
    "wide by rows": ((4, 24), {}, 0, "moves"),
    "tall by columns": ((24, 4), {}, 1, "moves"),
    "square by columns": ((6, 6), {}, 1, "moves"),
    "batch by columns": ((4, 7, 3), {}, 2, "moves"),
    "wide heads cut by borders": ((15, 16), {"heads": 3}, 0, "moves"),
    "tall heads cut by borders": ((27, 4), {"heads": 3}, 0, "moves"),
    "ranges by rows": ((9, 12), {"rows": (2, 8), "heads": 2}, 0, "moves"),
    "filters": ((4, 3, 3), {"flatten": True}, 0, "moves"),
}


def value(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def part(tensor, mesh, placements):
    """Our share of a tensor that every process has; nothing is sent."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def sent(counts):
    """What was called and how often, and the number of sums."""
    names = Counter({str(name): count for name, count in counts.items()})
    sums = sum(
        count for name, count in names.items() if "all_reduce" in name or "allreduce" in name
    )
    return sums, sum(names.values()) - sums


@torch.no_grad()
def compare(name, layouts, off):
    """Train parameters of all layouts in one optimizer, sharded and alone."""
    rule, options = OPTIMIZERS[name]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    alone, sharded, kinds = [], [], []
    for layout in layouts:
        shape, reading, dim, _ = LAYOUTS[layout]
        for number in range(2):  # a group of equal matrices
            parameter = so.ManifoldParameter(value(shape, 100 + number), so.Stiefel(**reading))
            if not off:
                so.constrain(holder := torch.nn.ParameterDict({"w": parameter}), "w", **reading)
                parameter = holder["w"]
            shard = torch.nn.Parameter(part(parameter.detach(), mesh, [Shard(dim)]))
            shard.manifold = parameter.manifold
            alone.append(parameter)
            sharded.append(shard)
            kinds.append(layout)
    alone_opt, opt = rule(alone, **options), rule(sharded, **options)
    for step in range(STEPS):
        for number, (p, q) in enumerate(zip(alone, sharded, strict=True)):
            p.grad = value(p.shape, 1000 * step + number)
            q.grad = part(p.grad, mesh, q.placements)
        alone_opt.step()
        if len(layouts) > 1:
            opt.step()
            continue
        with CommDebugMode() as counted:
            opt.step()
        if step > 0:
            check_sent(name, LAYOUTS[layouts[0]], counted.get_comm_counts(), step)
    for p, q, kind in zip(alone, sharded, kinds, strict=True):
        described = f"{name}: {kind}"
        whole = q.full_tensor()
        worst = float((whole - p).abs().max())
        assert worst < 1e-10, f"{described}: off by {worst}"
        assert_equal_on_all([whole])
        assert opt.state[q].keys() == alone_opt.state[p].keys(), described
        for key, kept in alone_opt.state[p].items():
            own = opt.state[q][key]
            own = own.full_tensor() if isinstance(own, DTensor) else own
            assert own.shape == kept.shape, f"{described}: {key}"
            worst = float((own - kept).abs().max())
            assert worst < 1e-10, f"{described}: {key} off by {worst}"


def check_sent(name, layout, counts, step):
    sums, others = sent(counts)
    shape, reading, dim, kind = layout
    ranges = len(reading["rows"]) if reading.get("rows") and dim != 0 else 1
    empty = (
        kind == "sums"
        and -(-shape[dim] // dist.get_world_size()) * (dist.get_world_size() - 1) >= shape[dim]
    )
    if kind == "nothing":
        assert sums == others == 0, (name, layout, counts)
    elif kind == "sums":
        assert others == 0, (name, layout, counts)
        assert sums > 0, (name, layout, counts)
        if name == "sgd":
            assert sums <= 2 * ranges + empty, (name, layout, counts, step)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_train_as_one_process(size):
    """Some starts off the manifold; all layouts in one optimizer, state compared as well."""
    run(compare, size, *((name, tuple(LAYOUTS), name != "sgd-nesterov") for name in OPTIMIZERS))


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_sent(size):
    """At most two sums a step of SGD for rows that are shared, nothing for whole matrices."""
    run(
        compare, size, *((name, (layout,), False) for name in ("sgd", "adam") for layout in LAYOUTS)
    )
