"""Sharded parameters on real processes take the steps of one process, and send little."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from contract import OPTIMIZERS, model
from processes import assert_equal_on_all, run
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import stiefel_opt as so

STEPS = 9  # past a step that corrects rounding

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
    alone, shards, names = [], [], []
    for layout in layouts:
        shape, reading, dim, kind = LAYOUTS[layout]
        for number in range(2 if kind == "sums" else 1):  # a group of equal matrices
            parameter = so.ManifoldParameter(value(shape, 100 + number), so.Stiefel(**reading))
            if not off:
                so.constrain(holder := torch.nn.ParameterDict({"w": parameter}), "w", **reading)
                parameter = holder["w"]
            shard = torch.nn.Parameter(part(parameter.detach(), mesh, [Shard(dim)]))
            shard.manifold = parameter.manifold
            alone.append(parameter)
            shards.append(shard)
            names.append(layout)
    alone_opt, opt = rule(alone, **options), rule(shards, **options)
    for step in range(STEPS):
        for number, (p, q) in enumerate(zip(alone, shards, strict=True)):
            # Where sums are counted steps are short: a long one takes rounding out by a third.
            size = 1.0 if len(layouts) > 1 else 0.05
            p.grad = size * value(p.shape, 1000 * step + number)
            q.grad = part(p.grad, mesh, q.placements)
        alone_opt.step()
        if len(layouts) > 1:
            opt.step()
            continue
        with CommDebugMode() as counted:
            opt.step()
        if step > 0:
            check_sent(name, LAYOUTS[layouts[0]], counted.get_comm_counts(), step)
    for p, q, layout in zip(alone, shards, names, strict=True):
        described = f"{name}: {layout}"
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
    # Parameters with plain rows are not stacked: two of them, with two ranges each.
    ranges = 2 * len(reading["rows"]) if reading.get("rows") else 1
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


EVERY = tuple(OPTIMIZERS)


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ("sgd", "adam", "rgd", "cayley-sgd", "cayley-adam")),
        (4, ("sgd", "adam")),
        *(pytest.param(size, EVERY, marks=pytest.mark.slow) for size in (1, 2, 4)),
    ],
)
def test_shards_train_as_one_process(size, names):
    """Starts off the manifold, all layouts in one optimizer; state is compared as well."""
    run(compare, size, *((name, tuple(LAYOUTS), True) for name in names))


def test_what_is_sent():
    """At most two sums a step of SGD for rows that are shared, nothing for whole matrices."""
    layouts = [layout for layout, (*_, kind) in LAYOUTS.items() if kind != "moves"]
    some_without = [layout for layout in layouts if "some without" in layout]  # of four processes
    layouts.remove("heads, some without")  # two processes would cut a head
    run(compare, 2, *(("sgd", (layout,), False) for layout in layouts))
    run(compare, 4, *(("sgd", (layout,), False) for layout in some_without))


# ---- a model under fully_shard -----------------------------------------------------------------


def build(seed=0):
    """Tall, wide, with heads, filters, a fused weight, and plain ones, in float64."""
    return model(seed).double()


def long_side(parameter):
    """Shard wide matrices by columns, all else by rows, as fully_shard does by itself."""
    wide = parameter.ndim == 2 and parameter.size(0) < parameter.size(1)
    even = wide and parameter.size(1) % dist.get_world_size() == 0
    return Shard(1 if even else 0)


def sharded(net, rule, options, placement):
    fully_shard(net, shard_placement_fn=placement)
    return rule(so.param_groups(net), **options)


def step_of(net, opt, step, whole):
    """Take a step; return the mean loss over all inputs, before it."""
    x = value((8, 8), step)
    if not whole:
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    opt.zero_grad()
    loss = (net(x) - x[:, :2]).square().mean()
    loss.backward()
    opt.step()
    mean = loss.detach().clone()
    if not whole:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


def train_model(name, placement):
    """A model under fully_shard, each rank with its part of the inputs, against one process."""
    rule, options = OPTIMIZERS[name]
    alone, net = build(), build()
    alone_opt, opt = rule(so.param_groups(alone), **options), sharded(net, rule, options, placement)
    for step in range(STEPS):
        expected = step_of(alone, alone_opt, step, whole=True)
        loss = step_of(net, opt, step, whole=False)
        assert abs(loss - expected) < 1e-10, f"{name}, step {step}: {loss}, {expected}"
    net.reshard()
    assert so.orthonormality_error(net) < 1e-14
    for tall, other in ((alone.up.weight, net.up.weight), (alone.q.weight, net.q.weight)):
        for mine, theirs in zip(opt.velocity(other), alone_opt.velocity(tall), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    with pytest.raises(TypeError, match="not be sharded to be projected"):
        so.constrain(net.up)
    with pytest.raises(TypeError, match="not be sharded to set its velocity"):
        opt.set_velocity(net.up.weight, *opt.velocity(net.up.weight))
    for (key, p), q in zip(alone.named_parameters(), net.parameters(), strict=True):
        assert isinstance(q, DTensor)
        worst = float((q.detach().full_tensor() - p.detach()).abs().max())
        assert worst < 1e-10, f"{name}: {key} off by {worst}"


def test_a_model_under_fully_shard_trains_as_one_process():
    names = ("sgd", "adam", "cayley-adam")
    run(train_model, 2, *((name, place) for name in names for place in (None, long_side)))


def save(name, folder):
    rule, options = OPTIMIZERS[name]
    net = build()
    opt = sharded(net, rule, options, long_side)
    for step in range(3):
        step_of(net, opt, step, whole=False)
    weights, state = get_state_dict(net, opt)
    checkpoint.save({"weights": weights, "state": state}, checkpoint_id=f"{folder}/{name}")
    losses = [step_of(net, opt, step, whole=False) for step in range(3, 6)]
    if dist.get_rank() == 0:
        torch.save(losses, f"{folder}/{name}.pt")


def load(name, folder):
    rule, options = OPTIMIZERS[name]
    net = build(seed=1)
    opt = sharded(net, rule, options, long_side)
    weights, state = get_state_dict(net, opt)
    checkpoint.load({"weights": weights, "state": state}, checkpoint_id=f"{folder}/{name}")
    set_state_dict(net, opt, model_state_dict=weights, optim_state_dict=state)
    expected = torch.load(f"{folder}/{name}.pt")
    losses = [step_of(net, opt, step, whole=False) for step in range(3, 6)]
    for mine, theirs in zip(losses, expected, strict=True):
        assert abs(mine - theirs) < 1e-10, f"{name}: {losses}, {expected}"


def test_a_checkpoint_of_two_ranks_continues_on_any_number(tmp_path):
    cases = [(name, str(tmp_path)) for name in ("sgd", "adam", "cayley-adam")]
    run(save, 2, *cases)
    for size in (1, 2):
        run(load, size, *cases)
