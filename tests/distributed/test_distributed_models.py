"""Models under fully_shard on real processes: training, precision, checkpoints."""

import pytest
import torch
import torch.distributed as dist
from cases import in_turn
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
    constrained,
    model,
)
from optimizers import ANY, OF_EACH_KIND
from processes import run
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import stiefel_opt as so

STEPS = 9  # past a step that corrects rounding
FLOAT32_ROUNDING = 5e-6
POLICIES = {
    "float32 parameters": MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    ),
    "all in bfloat16": MixedPrecisionPolicy(),
}


class Small(torch.nn.Module):
    """Wide with heads, tall, a fused weight, with plain rows or not, and a plain layer."""

    def __init__(self, plain_rows=True):
        super().__init__()
        self.q = so.constrain(torch.nn.Linear(8, 6), heads=2)
        self.up = so.constrain(torch.nn.Linear(6, 10, bias=False), scale=2.0)
        rows = {"rows": ((0, 4), (6, 12)), "heads": (1, 2)} if plain_rows else {}
        self.fused = so.constrain(torch.nn.Linear(10, 14, bias=False), **rows)
        self.out = torch.nn.Linear(14, 2)

    def forward(self, x):
        return self.out(self.fused(self.up(torch.tanh(self.q(x)))))


def build(name, seed=0, dtype=torch.float64):
    """For the first rule every kind of parameter, filters and a square one too; a few for others.

    What a shard of either kind does with every rule is in test_distributed_shards.py.
    """
    torch.manual_seed(seed)
    shared = OPTIMIZERS[name][0].plain_is_elementwise
    return so.retag((model(seed) if name == RULES[0] else Small(shared)).to(dtype))


def long_side(parameter):
    """Shard wide matrices by columns, all else by rows, as fully_shard does by itself."""
    wide = parameter.ndim == 2 and parameter.size(0) < parameter.size(1)
    even = wide and parameter.size(1) % dist.get_world_size() == 0
    return Shard(1 if even else 0)


def optimizer(name, net):
    rule, options = OPTIMIZERS[name]
    if TABLE[name].adaptive and net.out.weight.dtype == torch.bfloat16:
        options = {**options, "eps": 1e-3}  # of torch's Adam, which moves plain parameters in it
    return rule(so.param_groups(net), **options)


def sharded(name, net, placement=long_side, policy=None):
    fully_shard(net, shard_placement_fn=placement, mp_policy=policy or MixedPrecisionPolicy())
    return optimizer(name, net)


def inputs(step, count=8):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, 8, generator=generator, dtype=torch.float64)


def step_of(net, opt, step, whole=False, count=8):
    """Take a step; return the mean loss over all inputs, before it."""
    x = inputs(step, count).to(net.out.weight.dtype)
    if not whole:
        x = x.chunk(dist.get_world_size())[dist.get_rank()]
    opt.zero_grad()
    loss = (net(x) - x[:, :2]).square().mean()
    loss.backward()
    opt.step()
    mean = loss.detach().double()
    if not whole:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return float(mean)


# ---- training ------------------------------------------------------------------------------------


def train_model(name, placement):
    """A model under fully_shard, each rank with its part of the inputs, against one process."""
    alone, net = build(name), build(name)
    alone_opt, opt = optimizer(name, alone), sharded(name, net, placement)
    bound = TABLE[name].rounding
    for step in range(STEPS):
        expected = step_of(alone, alone_opt, step, whole=True)
        loss = step_of(net, opt, step)
        assert abs(loss - expected) < bound, f"{name}, step {step}: {loss}, {expected}"
    net.reshard()
    assert so.orthonormality_error(net) < 2e-14
    if not TABLE[name].searches:
        check_velocity(alone, alone_opt, net, opt)
    for (key, p), q in zip(alone.named_parameters(), net.parameters(), strict=True):
        assert isinstance(q, DTensor)
        worst = float((q.detach().full_tensor() - p.detach()).abs().max())
        assert worst < bound, f"{name}: {key} off by {worst}"


def check_velocity(alone, alone_opt, net, opt):
    for tall, other in ((alone.up.weight, net.up.weight), (alone.q.weight, net.q.weight)):
        for mine, theirs in zip(opt.velocity(other), alone_opt.velocity(tall), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    with pytest.raises(TypeError, match="not be sharded to be projected"):
        so.constrain(net.up)
    with pytest.raises(TypeError, match="not be sharded to set its velocity"):
        opt.set_velocity(net.up.weight, *opt.velocity(net.up.weight))


def train_in_bfloat16(name, kind, steps):
    """Products in bfloat16; what is constrained stays at float32 rounding, and the loss falls."""
    low = kind == "all in bfloat16"
    net = build(name, dtype=torch.bfloat16 if low else torch.float32)
    opt = sharded(name, net, policy=POLICIES[kind])
    losses = [step_of(net, opt, step % 4) for step in range(steps)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), f"{name}: {losses}"
    net.reshard()
    for key, parameter in constrained(net).items():
        assert parameter.dtype == (torch.bfloat16 if low else torch.float32), key
        state = opt.state[parameter]
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}, key
        assert ("master" in state) is low, key
        tall = [tensor for tensor in state.values() if tensor.shape == parameter.shape]
        assert all(tensor.to_local().numel() < parameter.numel() for tensor in tall), key
        point = state.get("master", parameter).full_tensor()
        error = so.orthonormality_error(point, parameter.manifold)
        assert error < FLOAT32_ROUNDING, f"{name}: {key}: {error}"
        if low:
            assert torch.equal(point.to(torch.bfloat16), parameter.full_tensor()), key


def test_models_under_fully_shard_train():
    """As one process does, for both ways of sharding, and in bfloat16 for both policies."""
    calls = [(train_model, *row) for row in in_turn(RULES, [long_side, None])]
    low = [(train_in_bfloat16, *row, 16) for row in in_turn(OF_EACH_KIND, POLICIES)]
    run(2, *calls, *low)


@pytest.mark.slow
def test_models_under_fully_shard_train_with_every_option():
    calls = [(train_model, name, place) for name in RULES for place in (long_side, None)]
    low = [(train_in_bfloat16, name, kind, 40) for name in OF_EACH_KIND for kind in POLICIES]
    run(2, *calls, *low)


# ---- checkpoints ---------------------------------------------------------------------------------


def prepared(cases, seed, names):
    """Sharded models with their optimizers, and everything there is to save of them."""
    nets = [build(name, seed, dtype) for name, dtype in cases]
    opts = [sharded(name, net) for (name, _), net in zip(cases, nets, strict=True)]
    kept = {}
    for index, net, opt in zip(names, nets, opts, strict=True):
        weights, state = get_state_dict(net, opt)
        kept[str(index)] = {"weights": weights, "state": state}
    return list(zip(nets, opts, strict=True)), kept


def own_bits(net, opt):
    """Our parts of the parameters and of their state."""
    found = {}
    for key, parameter in net.named_parameters():
        for name, tensor in {"": parameter.detach(), **opt.state[parameter]}.items():
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found[f"{key} {name}"] = own.clone()
    return found


def go_on(net, opt):
    """Take three more steps, with inputs that one, two and three processes can share."""
    losses = [step_of(net, opt, step, count=12) for step in range(3, 6)]
    net.reshard()
    return losses, own_bits(net, opt)


def save(cases, folder):
    trainings, _ = prepared(cases, seed=0, names=range(len(cases)))
    for net, opt in trainings:
        for step in range(3):
            step_of(net, opt, step, count=12)
    kept = {}
    for index, training in enumerate(trainings):
        weights, state = get_state_dict(*training)
        kept[str(index)] = {"weights": weights, "state": state}
    checkpoint.save(kept, checkpoint_id=folder)
    torch.save([go_on(*training) for training in trainings], f"{folder}/{dist.get_rank()}.pt")


def load(cases, chosen, folder):
    """Losses go on as they did; to the bit on as many processes as wrote the checkpoint."""
    size = dist.get_world_size()
    trainings, kept = prepared([cases[index] for index in chosen], seed=1, names=chosen)
    checkpoint.load(kept, checkpoint_id=folder)
    earlier = torch.load(f"{folder}/{dist.get_rank() if size == 2 else 0}.pt")
    for index, training in zip(chosen, trainings, strict=True):
        (name, dtype), found = cases[index], kept[str(index)]
        set_state_dict(
            *training, model_state_dict=found["weights"], optim_state_dict=found["state"]
        )
        losses, bits = go_on(*training)
        expected, expected_bits = earlier[index]
        bound = 1e-10 if dtype == torch.float64 else 0.02
        for mine, theirs in zip(losses, expected, strict=True):
            assert abs(mine - theirs) < bound, f"{name} on {size}: {losses}, {expected}"
        for key, tensor in expected_bits.items():
            assert bits[key].dtype == tensor.dtype, f"{name} on {size}: {key}"
            assert size != 2 or torch.equal(bits[key], tensor), f"{name}: {key}"


def go_on_elsewhere(cases, folder):
    """Each case on the two ranks that wrote it, and on either one or three."""
    every = range(len(cases))
    run(2, (save, cases, folder), (load, cases, every, folder))
    for size, chosen in ((1, every[1::2]), (3, every[::2])):
        run(size, (load, cases, chosen, folder))


def test_a_checkpoint_of_two_ranks_continues_on_any_number(tmp_path):
    cases = [(name, torch.float64) for name in RULES]
    go_on_elsewhere([*cases, (ANY, torch.bfloat16)], str(tmp_path))


@pytest.mark.slow
def test_a_checkpoint_of_every_rule_continues_on_any_number(tmp_path):
    cases = [(name, torch.float64) for name in RULES]
    go_on_elsewhere([*cases, *((name, torch.bfloat16) for name in OF_EACH_KIND)], str(tmp_path))
