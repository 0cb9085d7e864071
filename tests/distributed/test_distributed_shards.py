"""Sharded parameters on real processes take the steps of one process, and send little."""

import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
)
from optimizers import ANY, OF_EACH_KIND, PROPORTIONAL
from processes import assert_equal_on_all, part, run
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode

import stiefel_opt as so

STEPS = 9  # past a step that corrects rounding

# name: shape, reading, sharded dimension, whether anything but sums may be sent, or nothing at all
LAYOUTS = {
    "tall": ((24, 4), {}, 0, "sums"),
    "tall, uneven": ((13, 3), {}, 0, "sums"),
    "tall, some without rows": ((5, 4), {}, 0, "sums"),
    "wide, uneven": ((4, 23), {}, 1, "sums"),
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
    "filters in groups": ((8, 3, 2), {"flatten": True, "heads": 4}, 0, "nothing"),
    "heads, some without": ((9, 7), {"heads": 3}, 0, "nothing"),
    "heads, fewer on the last of four": ((14, 9), {"heads": 7}, 0, "nothing"),
    "transposed heads": ((9, 12), {"heads": 4, "transposed": True}, 1, "nothing"),
    "wide by rows": ((4, 24), {}, 0, "moves"),
    "tall by columns": ((24, 4), {}, 1, "moves"),
    "square by columns": ((6, 6), {}, 1, "moves"),
    "batch by columns": ((4, 7, 3), {}, 2, "moves"),
    "wide heads cut by borders": ((15, 16), {"heads": 3}, 0, "moves"),
    "tall heads cut by borders": ((27, 4), {"heads": 3}, 0, "moves"),
    "ranges by rows": ((9, 12), {"rows": (2, 8), "heads": 2}, 0, "moves"),
    "filters": ((4, 3, 3), {"flatten": True}, 0, "moves"),
    "by the first of two dimensions": ((6, 2, 3), {"row_dims": (0, 1)}, 0, "sums"),
    "by the second of two dimensions": ((3, 5, 2), {"row_dims": (0, 1)}, 1, "sums"),
    "by one of two columns": ((2, 4, 6), {"row_dims": 0, "column_dims": (2, 1)}, 2, "sums"),
    "batch inside": ((5, 3, 2), {"row_dims": 0, "column_dims": 2}, 1, "nothing"),
    "batch at the end": ((3, 2, 4), {"row_dims": 1, "column_dims": 0}, 2, "nothing"),
    "two dimensions by columns": ((3, 2, 4), {"row_dims": (1, 0)}, 2, "moves"),
}

LEARNED = {  # scales that are learned: a number for each matrix, the same on every process
    "learned, tall": ((13, 3), {"learn_scale": True}, 0, "sums"),
    "learned, wide": ((4, 24), {"learn_scale": True, "scale": 2.5}, 1, "sums"),
    "learned, ranges": (
        (9, 12),
        {"learn_scale": True, "rows": ((0, 4), (5, 8)), "heads": (2, 1)},
        1,
        "sums",
    ),
    "learned, heads": ((12, 9), {"learn_scale": True, "heads": 4}, 0, "nothing"),
    "learned, batch": ((3, 2, 5), {"learn_scale": True}, 0, "nothing"),
    "learned, by columns": ((24, 4), {"learn_scale": True}, 1, "moves"),
}
ALL = LAYOUTS | LEARNED


# One of each kind, for what every optimizer must do by default.
KINDS = (
    "tall, uneven",
    "tall, some without rows",
    "batch of wide",
    "ranges by columns",
    "batch, some without",
    "heads",
    "wide by rows",
    "tall heads cut by borders",
)
# Half precision: masters move in float32, where sums over rows depend on how these are cut.
BOUNDS = {torch.float64: 1e-10, torch.bfloat16: 2e-5}


def value(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def pairs(layouts, dtype, off=False):
    """Parameters of all layouts, two of each that is stacked: whole ones and our parts of them."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for layout in layouts:
        shape, reading, dim, kind = ALL[layout]
        for number in range(2 if kind == "sums" else 1):
            whole = so.ManifoldParameter(value(shape, 100 + number).to(dtype), project=False)
            whole.manifold = so.Stiefel(**reading)
            if not off:
                holder = torch.nn.ParameterDict({"w": whole})
                so.constrain(holder, "w", **{"flatten": False, **reading})
                whole = holder["w"]
            shard = torch.nn.Parameter(part(whole.detach(), mesh, [Shard(dim)]))
            shard.manifold = whole.manifold
            found.append((layout, whole, shard))
    return found


def fill_grads(found, step, size=1.0):
    for number, (_, whole, shard) in enumerate(found):
        whole.grad = (size * value(whole.shape, 1000 * step + number)).to(whole.dtype)
        shard.grad = part(whole.grad, shard.device_mesh, shard.placements)


@torch.no_grad()
def compare(name, layouts, dtype=torch.float64):
    """Train parameters of all layouts in one optimizer, sharded and alone, from off the manifold.

    Compared are values and state: our parts with the same parts of what one process computes.
    """
    rule, options = OPTIMIZERS[name]
    if not rule.plain_is_elementwise:  # refused: optim/test_own_rule.py
        layouts = [layout for layout in layouts if "rows" not in ALL[layout][1]]
    found = pairs(layouts, dtype, off=True)
    alone_opt = rule([whole for _, whole, _ in found], **options)
    opt = rule([shard for *_, shard in found], **options)
    for step in range(STEPS):
        fill_grads(found, step)
        alone_opt.step()
        opt.step()
    replicated = []
    alone_angles, angles = alone_opt.angles_of(), opt.angles_of()  # of all heads, everywhere
    for layout, whole, shard in found:
        if dtype is torch.float64:
            assert angles[shard] == pytest.approx(alone_angles[whole], rel=1e-5), layout
        wanted, kept = alone_opt.state[whole], opt.state[shard]
        assert kept.keys() == wanted.keys(), f"{name}: {layout}"
        if dtype.itemsize == 2:
            own = kept["master"].redistribute(placements=shard.placements)
            assert torch.equal(own.to_local().to(dtype), shard.to_local()), f"{name}: {layout}"
        else:
            wanted, kept = {**wanted, "point": whole}, {**kept, "point": shard}
        for key, tensor in kept.items():
            own, expected = tensor, wanted[key]
            if not isinstance(own, torch.Tensor):
                assert own == expected, f"{name}: {layout}: {key}"
                continue
            assert own.dtype == expected.dtype, f"{name}: {layout}: {key}"
            if isinstance(tensor, DTensor):
                own = tensor.to_local()
                expected = part(expected, tensor.device_mesh, tensor.placements).to_local()
            if not isinstance(tensor, DTensor) or tensor.placements[0].is_replicate():
                replicated.append(own.to(torch.float64))
            assert own.shape == expected.shape, f"{name}: {layout}: {key}"
            worst = float((own - expected).abs().max()) if own.numel() else 0.0
            assert worst < max(BOUNDS[dtype], TABLE[name].searches * TABLE[name].rounding), (
                f"{name}: {layout}: {key} off by {worst}"
            )
    assert_equal_on_all(replicated)


@torch.no_grad()
def keep_what_is_spoilt(name, layouts):
    """One entry that is not finite, on one process: all of them leave that parameter as it was."""
    rule, options = OPTIMIZERS[name]
    found = pairs(layouts, torch.float64)
    opt = rule([shard for *_, shard in found], **options)
    fill_grads(found, 0)
    opt.step()
    fill_grads(found, 1)
    spoilt = found[::2]
    for layout, whole, shard in spoilt:
        first = ALL[layout][1].get("rows", [(0, 1)])[0][0]
        whole.grad[..., first, 0] = torch.nan
        shard.grad = part(whole.grad, shard.device_mesh, shard.placements)
    before = {s: (s.to_local().clone(), dict_of_locals(opt.state[s])) for *_, s in found}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    for index, (layout, _, shard) in enumerate(found):
        value_before, state_before = before[shard]
        same = torch.equal(shard.to_local(), value_before)
        if index % 2 == 0:
            assert same, f"{name}: {layout} moved"
            for key, tensor in dict_of_locals(opt.state[shard]).items():
                assert torch.equal(tensor, state_before[key]), f"{name}: {layout}: {key}"
        else:
            assert not same or not shard.to_local().numel(), f"{name}: {layout} stayed"
            assert shard.to_local().isfinite().all(), f"{name}: {layout}"


@torch.no_grad()
def go_on_with(change, dtype, options):
    """Momentum that an option keeps in another form is the same one, as in one process."""
    found = pairs(tuple(LAYOUTS), dtype)
    alone_opt = so.StiefelSGD([whole for _, whole, _ in found], lr=0.05, **options)
    opt = so.StiefelSGD([shard for *_, shard in found], lr=0.05, **options)
    for step in range(4):
        if step == 2:
            for each in (alone_opt, opt):
                each.param_groups[0].update(change)
        fill_grads(found, step, size=0.1)
        alone_opt.step()
        opt.step()
    for layout, whole, shard in found:
        expected = part(whole.detach(), shard.device_mesh, shard.placements).to_local()
        off = (shard.to_local() - expected).abs().max() if expected.numel() else 0.0
        assert off <= (1e-12 if dtype is torch.float64 else 1e-2), (
            f"{change}: {layout} off by {off}"
        )
        assert opt.state[shard].keys() == alone_opt.state[whole].keys()


@torch.no_grad()
def agree_on_an_overflow(name):
    """X'G = 0 and the gradient is huge in rows of one process: all leave the same parameter."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    wholes = [torch.eye(12, 4), torch.linalg.qr(torch.randn(12, 4)).Q]
    found = []
    for whole in wholes:
        shard = torch.nn.Parameter(part(whole, mesh, [Shard(0)]))
        shard.manifold = so.Stiefel()
        found.append(shard)
    rule, options = OPTIMIZERS[name]
    opt = rule(found, **options)
    for step in range(3):
        grads = [torch.zeros(12, 4), value((12, 4), step).float()]
        if step == 2:
            grads[0][11, 0] = 1e25
        for shard, grad in zip(found, grads, strict=True):
            shard.grad = part(grad, mesh, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step()
    assert list(opt.skipped_steps_of()) == [found[0]], name
    steps = [opt.state[shard]["step"] for shard in found]
    assert [float(step) for step in steps] == [2.0, 3.0], name
    assert_equal_on_all([opt.state[shard][TABLE[name].state] for shard in found] + steps)


def clip(layouts):
    """Norm and gradients are those of one process, a plain parameter among them."""
    found = pairs(layouts, torch.float64)
    fill_grads(found, 0)
    plain = [torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2)]
    for parameter in plain:
        parameter.grad = torch.ones(3, dtype=torch.float64)
    for layout, whole, shard in found:
        norm = so.clip_grad_norm_([shard], torch.inf)
        torch.testing.assert_close(norm, so.clip_grad_norm_([whole], torch.inf), msg=layout)
    norm = so.clip_grad_norm_([shard for *_, shard in found] + plain[:1], 0.1)
    alone = so.clip_grad_norm_([whole for _, whole, _ in found] + plain[1:], 0.1)
    torch.testing.assert_close(norm, alone)
    torch.testing.assert_close(plain[0].grad, plain[1].grad)
    for layout, whole, shard in found:
        mine = part(whole.grad, shard.device_mesh, shard.placements).to_local()
        torch.testing.assert_close(shard.grad.to_local(), mine, msg=layout)


def compile_a_step(name):
    """Sharded weights move beside the graph, a plain one within it or beside it."""
    rule, options = OPTIMIZERS[name]
    ends = []
    for compiled in (False, True):
        found = pairs(("tall", "wide by rows"), torch.float64)
        plain = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        opt = rule([*(shard for *_, shard in found), plain], **options)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        for number in range(3):
            fill_grads(found, number)
            plain.grad = torch.ones(3, dtype=torch.float64)
            step()
        ends.append([plain.detach(), *(shard.to_local().detach() for *_, shard in found)])
    for eager, other in zip(*ends, strict=True):
        torch.testing.assert_close(other, eager, rtol=0, atol=1e-12)


def dict_of_locals(state):
    tensors = {k: t for k, t in state.items() if isinstance(t, torch.Tensor)}
    return {k: (t.to_local() if isinstance(t, DTensor) else t).clone() for k, t in tensors.items()}


HALF = tuple(name for name in RULES if not TABLE[name].searches)
COUNTED = tuple(name for name in RULES if TABLE[name].sums)


def test_shards_train_as_one_process_alone():
    run(1, (clip, KINDS), *((compare, name, KINDS[at % 4 :: 4]) for at, name in enumerate(RULES)))


def test_shards_train_as_one_process_on_two():
    """All layouts with momentum, one of each kind with every rule; half precision as well."""
    calls = [(compare, name, (*KINDS, "square")) for name in RULES if name != ANY]
    calls.append((compare, ANY, tuple(LAYOUTS)))
    shared = [layout for layout, (*_, kind) in LAYOUTS.items() if kind == "sums"]
    spoilt = [(keep_what_is_spoilt, name, tuple(shared)) for name in OF_EACH_KIND]
    spoilt += [(agree_on_an_overflow, name) for name in PROPORTIONAL]
    low = [(compare, name, KINDS[start::3], torch.bfloat16) for start, name in enumerate(HALF)]
    changes = [
        (go_on_with, {"nesterov": True}, torch.float64, {}),
        (go_on_with, {"transport": "projected"}, torch.float64, {"nesterov": True}),
    ]
    compiled = [(compile_a_step, name) for name in OF_EACH_KIND[:1]]
    run(2, *calls, *spoilt, *low, *changes, (clip, tuple(LAYOUTS)), *compiled)


def test_learned_scales_train_as_one_process_on_two():
    layouts = tuple(LEARNED)
    calls = [(compare, name, layouts) for name in OF_EACH_KIND]
    calls += [
        (compare, OF_EACH_KIND[1], layouts, torch.bfloat16),
        (keep_what_is_spoilt, OF_EACH_KIND[1], layouts),
    ]
    run(2, *calls, (clip, layouts))


@pytest.mark.slow
def test_other_kinds_of_rules_compile_beside_shards_on_two():
    run(2, *((compile_a_step, name) for name in OF_EACH_KIND[1:]))


def test_shards_train_as_one_process_on_four():
    """One of each kind with momentum, and two with each other rule, all of which two try."""
    calls = [(compare, name, KINDS[at % 4 :: 4]) for at, name in enumerate(RULES) if name != ANY]
    run(4, (compare, ANY, (*KINDS, "heads, fewer on the last of four")), *calls)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float64) for name in OPTIMIZERS), *((name, torch.bfloat16) for name in HALF)],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_layout_with_every_option_trains_as_one_process(size, name, dtype):
    run(size, (compare, name, tuple(LAYOUTS), dtype))


# ---- what is sent ------------------------------------------------------------------------------


def sent(counts):
    """The number of sums and of other calls."""
    names = Counter({str(name): count for name, count in counts.items()})
    sums = sum(
        count for name, count in names.items() if "all_reduce" in name or "allreduce" in name
    )
    return sums, sum(names.values()) - sums


@torch.no_grad()
def count(name, layout):
    """Count the calls of each step: at most two sums for SGD, none for whole matrices.

    One more, of a number for each parameter, lets all processes agree on who moves.
    """
    rule, options = OPTIMIZERS[name]
    found = pairs((layout,), torch.float64)
    opt = rule([shard for *_, shard in found], **options)
    _, reading, _, kind = LAYOUTS[layout]
    # Parameters with plain rows are not stacked: two of them, with two ranges each.
    ranges = 2 * len(reading["rows"]) if reading.get("rows") else 1
    for step in range(STEPS):
        # Where sums are counted steps are short: a long one takes rounding out by a third.
        fill_grads(found, step, size=0.05)
        with CommDebugMode() as counted:
            opt.step()
        if step == 0:
            continue  # X'X of a start is measured
        sums, others = sent(counted.get_comm_counts())
        described = f"{name}: {layout}: step {step}: {sums} sums, {others} others"
        assert others == 0, described
        assert (sums == 1) is (kind == "nothing"), described
        most = TABLE[name].sums
        if most is not None:  # X'X and X'U are measured once in eight steps
            assert sums <= most * ranges * (2 if step % 8 == 7 else 1) + 1, described


def test_what_is_sent():
    layouts = [layout for layout, (*_, kind) in LAYOUTS.items() if kind != "moves"]
    for name in ("heads, some without", "heads, fewer on the last of four"):
        layouts.remove(name)  # two processes would cut a head
    first, *others = COUNTED
    run(2, *((count, first, layout) for layout in layouts), *((count, o, "tall") for o in others))


@pytest.mark.slow
def test_what_four_processes_send():
    layouts = [layout for layout in LAYOUTS if "some without" in layout]
    run(4, *((count, COUNTED[0], layout) for layout in layouts))
