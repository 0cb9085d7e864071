"""Every process takes the same decision, in every layout: faults, counts, and where rows are."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import in_turn
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
)
from optimizers import ANY, OF_EACH_KIND, PROPORTIONAL
from processes import assert_equal_on_all, part, run
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import stiefel_opt as so

STEPS = 5
# name: shape, reading, sharded dimension; whole matrices on every process
WHOLE = {"batch": ((4, 6, 3), {}, 0), "heads": ((6, 7), {"heads": 2}, 0)}
# rows that do not divide, and a process without any
UNEVEN = {"uneven": ((7, 3), {}, 0), "without rows": ((5, 2), {}, 0), "wide": ((3, 7), {}, 1)}
EVERY = (*WHOLE, *UNEVEN)
EVERY_OTHER = (EVERY[::2], EVERY[1::2])


def value(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype)


def frame(shape, reading, seed, dtype=torch.float64):
    """A parameter on the manifold, with its tag."""
    holder = nn.ParameterDict({"w": nn.Parameter(value(shape, seed, dtype))})
    return so.constrain(holder, "w", **{"flatten": False, **reading})["w"]


def shard_of(whole, mesh, placements):
    shard = nn.Parameter(part(whole.detach(), mesh, placements))
    shard.manifold = whole.manifold
    return shard


def fill(whole, shard, step, spoilt=None):
    grad = value(whole.shape, 1000 + step, whole.dtype)
    if spoilt is not None:
        grad.view(-1)[spoilt] = torch.nan
    whole.grad = grad
    shard.grad = part(grad, shard.device_mesh, shard.placements)


def local_part(tensor, shard):
    """The rows of a whole tensor that this process holds of it."""
    return part(tensor.detach(), shard.device_mesh, shard.placements).to_local()


def optimizers(name, whole, shard, **options):
    rule, defaults = OPTIMIZERS[name]
    options = {**defaults, "weight_decay": 0, **options}
    return rule([("w", whole)], **options), rule([("w", shard)], **copy.deepcopy(options))


def assert_as_alone(alone_opt, opt, whole, shard, described, bound=1e-10):
    """Values and step numbers equal those of one process, on every process."""
    worst = (shard.detach().to_local() - local_part(whole, shard)).abs()
    bound = max(bound, TABLE[described[0]].rounding)
    assert not worst.numel() or float(worst.max()) < bound, described
    steps = [opt.state[shard]["step"], alone_opt.state[whole]["step"]]
    assert float(steps[0]) == float(steps[1]), described
    assert_equal_on_all([steps[0].double()])
    assert opt.skipped_steps() == alone_opt.skipped_steps(), described


# ---- one NaN on one process ----------------------------------------------------------------------


@torch.no_grad()
def all_skip_what_one_cannot_use(name, layouts):
    """In the last entry, so on the last process; and in the first."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layout in layouts:
        shape, reading, dim = {**WHOLE, **UNEVEN}[layout]
        whole = frame(shape, reading, 1)
        shard = shard_of(whole, mesh, [Shard(dim)])
        alone_opt, opt = optimizers(name, whole, shard)
        for step in range(STEPS):
            spoilt = {2: -1, 3: 0}.get(step)
            fill(whole, shard, step, spoilt)
            before = shard.to_local().clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alone_opt.step()
                opt.step()
            if spoilt is not None:
                assert torch.equal(shard.to_local(), before), (layout, step)
        assert float(opt.state[shard]["step"]) == STEPS - 2, layout
        assert_as_alone(alone_opt, opt, whole, shard, (name, layout))


@torch.no_grad()
def all_raise_what_one_cannot_use(name):
    """None may go on alone: it would wait for the others for ever."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layout, (shape, reading, dim) in WHOLE.items():
        whole = frame(shape, reading, 1)
        shard = shard_of(whole, mesh, [Shard(dim)])
        alone_opt, opt = optimizers(name, whole, shard, nonfinite="raise")
        for step in range(STEPS):
            fill(whole, shard, step, -1 if step == 2 else None)
            if step == 2:
                before = shard.to_local().clone()
                for rule in (alone_opt, opt):
                    with pytest.raises(ValueError, match="`grad of w` must be finite"):
                        rule.step()
                assert torch.equal(shard.to_local(), before), layout
                dist.barrier()  # all are here
            else:
                alone_opt.step()
                opt.step()
        assert_as_alone(alone_opt, opt, whole, shard, (name, layout))


@torch.no_grad()
def all_tell_an_overflow_of_one(name, choice):
    """No gradient shows it: momentum on the last process alone whose square is no number.

    All hear of it in the agreement of the next step, and nobody waits for one that has raised.
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layout, (shape, reading, dim) in {**WHOLE, "rows": ((8, 3), {}, 0)}.items():
        shard = shard_of(frame(shape, reading, 1, torch.float32), mesh, [Shard(dim)])
        other = shard_of(frame((6, 3), {}, 2, torch.float32), mesh, [Shard(0)])
        rule, options = OPTIMIZERS[name]
        opt = rule([("w", shard), ("v", other)], **{**options, "nonfinite": choice})
        told = []
        for step in range(6):
            for parameter in (shard, other):
                grad = value(parameter.shape, 1000 + step, torch.float32)
                parameter.grad = part(grad, mesh, parameter.placements)
            if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
                names = {"momentum_unprojected", "momentum_normal"} & opt.state[shard].keys()
                opt.state[shard][names.pop()].to_local()[-1:].mul_(1e20)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                try:
                    opt.step()
                except ValueError as error:
                    told += [step] * ("`step of w` must be finite" in str(error))
            told += [step for each in heard if "w of shape" in str(each.message)]
        assert told == [3], (layout, choice, told)
        assert opt.skipped_steps() == {"w": 1}, (layout, choice)
        steps = [opt.state[parameter]["step"] for parameter in (shard, other)]
        assert [float(each) for each in steps] == [6.0 - (choice == "raise")] * 2, layout
        small = [t for t in opt.state[shard].values() if isinstance(t, DTensor)]
        replicated = [t.to_local() for t in small if t.placements[0].is_replicate()]
        assert_equal_on_all([*steps, *replicated])
        for parameter, manifold in ((shard, so.Stiefel(**reading)), (other, None)):
            gathered = parameter.detach().full_tensor()
            assert so.orthonormality_error(gathered, manifold) < 1e-5, layout


# ---- layouts -------------------------------------------------------------------------------------


@torch.no_grad()
def complex_rows_move_as_alone(name):
    """Complex weights whose rows lie on several processes, evenly and not."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for shape in ((8, 3), (7, 2)):
        whole = frame(shape, {}, 2, torch.complex128)
        shard = shard_of(whole, mesh, [Shard(0)])
        alone_opt, opt = optimizers(name, whole, shard)
        for step in range(9):  # past a step that corrects rounding
            fill(whole, shard, step)
            alone_opt.step()
            opt.step()
        assert_as_alone(alone_opt, opt, whole, shard, (name, shape))
        gathered = shard.detach().full_tensor()
        error = gathered.mH @ gathered - torch.eye(shape[1])
        assert float(error.abs().max()) < 1e-13, (name, shape)


@torch.no_grad()
def replicas_of_shards_move_as_alone(name, sizes):
    """HSDP: the first dimension of the mesh replicates, the second one shards."""
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    for shape, reading, dim in (*UNEVEN.values(), *WHOLE.values()):
        whole = frame(shape, reading, 4)
        shard = shard_of(whole, mesh, [Replicate(), Shard(dim)])
        alone_opt, opt = optimizers(name, whole, shard)
        for step in range(STEPS):
            fill(whole, shard, step, -1 if step == 2 else None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                alone_opt.step()
                opt.step()
        assert float(opt.state[shard]["step"]) == STEPS - 1, (name, shape)
        assert_as_alone(alone_opt, opt, whole, shard, (name, shape))


class Block(nn.Module):
    """Two constrained layers, as tensor parallelism splits them: heads up, and back down."""

    def __init__(self, heads):
        super().__init__()
        self.up = so.constrain(nn.Linear(6, 8, bias=False), **({"heads": heads} if heads else {}))
        self.down = so.constrain(nn.Linear(8, 6, bias=False))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def tensor_parallel_layers_move_as_alone(name, heads):
    """ColwiseParallel and RowwiseParallel of two `nn.Linear`; heads lie whole on a process."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    alone = Block(heads).double()
    net = copy.deepcopy(alone)
    so.retag(alone)
    so.retag(net)
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    assert all(isinstance(p, DTensor) for p in net.parameters())
    rule, options = OPTIMIZERS[name]
    found = [(n, rule(so.param_groups(n), **{**options, "weight_decay": 0})) for n in (alone, net)]
    for step in range(STEPS):
        x = value((5, 6), step)
        for model, opt in found:
            opt.zero_grad()
            (model(x) - x.roll(1, dims=1)).square().mean().backward()
            opt.step()
    for (key, whole), shard in zip(alone.named_parameters(), net.parameters(), strict=True):
        gathered = shard.detach().full_tensor()
        worst = float((gathered - whole).detach().abs().max())
        assert worst < TABLE[name].rounding, (name, heads, key, worst)
        assert so.orthonormality_error(gathered, whole.manifold) < 1e-13, (name, heads, key)


# ---- one start of processes for each size --------------------------------------------------------


def test_two_processes_agree():
    calls = [(all_skip_what_one_cannot_use, ANY, EVERY)]
    calls += [(all_skip_what_one_cannot_use, *row) for row in in_turn(RULES[1:], EVERY_OTHER)]
    calls += [(replicas_of_shards_move_as_alone, ANY, sizes) for sizes in ((2, 1), (1, 2))]
    run(2, *calls)


def test_two_processes_raise_together():
    calls = [(all_raise_what_one_cannot_use, name) for name in OF_EACH_KIND]
    calls += [
        (all_tell_an_overflow_of_one, *row) for row in in_turn(PROPORTIONAL, ["raise", "skip"])
    ]
    run(2, *calls)


def test_two_processes_share_complex_rows():
    run(2, *((complex_rows_move_as_alone, name) for name in RULES))


def test_two_processes_are_tensor_parallel():
    run(
        2,
        *((tensor_parallel_layers_move_as_alone, name, 0) for name in OF_EACH_KIND),
        *((tensor_parallel_layers_move_as_alone, name, 2) for name in PROPORTIONAL),
    )


def test_four_processes_agree():
    calls = [(replicas_of_shards_move_as_alone, name, (2, 2)) for name in OF_EACH_KIND]
    run(4, *calls, (all_skip_what_one_cannot_use, ANY, EVERY))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rule_agrees_in_every_layout(size):
    calls = []
    for name in RULES:
        calls += [(all_skip_what_one_cannot_use, name, EVERY), (complex_rows_move_as_alone, name)]
        calls.append((all_raise_what_one_cannot_use, name))
        if 6 % size == 0 or size == 4:
            calls.append((tensor_parallel_layers_move_as_alone, name, 4))
    run(size, *calls)
