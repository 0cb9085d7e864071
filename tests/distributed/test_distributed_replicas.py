"""Replicated models on real processes: DistributedDataParallel and ZeroRedundancyOptimizer."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import in_turn
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
    model,
)
from processes import assert_equal_on_all, run
from torch.nn.parallel import DistributedDataParallel

import stiefel_opt as so

RANKS = 2
STEPS = 10  # past a step that corrects rounding


def batch(step):
    """Inputs and targets of a step for all ranks together."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * RANKS, 8, generator=generator, dtype=torch.float64)


def loss_of(net, x):
    return (net(x) - x[:, :2]).square().mean()


def shares(x, pieces):
    """What this rank takes of a step, in ``pieces`` parts of equal size."""
    return x.chunk(RANKS)[dist.get_rank()].chunk(pieces)


def same_as_alone(name, net, alone):
    for p, q in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=TABLE[name].rounding)
    assert so.orthonormality_error(net) < 1e-14
    assert_equal_on_all(list(net.parameters()))


def train_replicas(name, pieces, shares_state=False):
    """Accumulate ``pieces`` backward passes a step, all but the last without communication."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns

    rule, options = OPTIMIZERS[name]
    net = model().double()
    alone = copy.deepcopy(net)
    replica = DistributedDataParallel(net)
    kind = partial(ZeroRedundancyOptimizer, optimizer_class=rule) if shares_state else rule
    opt, alone_opt = kind(net.parameters(), **options), rule(alone.parameters(), **options)
    for step in range(STEPS):
        opt.zero_grad()
        alone_opt.zero_grad()
        parts = shares(batch(step), pieces)
        for number, part in enumerate(parts, start=1):
            with nullcontext() if number == pieces else replica.no_sync():
                (loss_of(replica, part) / pieces).backward()
        loss_of(alone, batch(step)).backward()
        opt.step()
        alone_opt.step()
    same_as_alone(name, net, alone)
    if shares_state:
        share_state(name, net, opt, alone_opt)


def share_state(name, net, opt, alone_opt):
    """Each process keeps some of it; the first one is sent all."""
    kept = {id(p) for p in net.parameters()} & {id(p) for p in opt.optim.state}
    assert 0 < len(kept) < len(list(net.parameters()))
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        whole = opt.state_dict()["state"]
        for index, state in alone_opt.state_dict()["state"].items():
            for key, value in state.items():
                torch.testing.assert_close(
                    whole[index][key], value, rtol=0, atol=TABLE[name].rounding
                )


def keep_bits(name, steps):
    rule, options = OPTIMIZERS[name]
    net = model()
    replica = DistributedDataParallel(net)
    opt = rule(net.parameters(), **options)
    for step in range(steps):
        opt.zero_grad()
        loss_of(replica, shares(batch(step).float(), 1)[0]).backward()
        opt.step()
        if step % 20 == 19:
            state = [t for kept in opt.state.values() for t in kept.values()]
            assert_equal_on_all([*net.parameters(), *state])


def test_replicas_train_as_one_process_and_stay_equal_to_the_bit():
    """Also with accumulated gradients."""
    calls = [(train_replicas, *row) for row in in_turn(RULES, [1, 2])]
    run(RANKS, *calls, *((keep_bits, name, 20) for name in RULES))


def test_sharing_the_state_of_the_optimizer_trains_as_one_process():
    run(RANKS, *((train_replicas, name, 1, True) for name in RULES))


@pytest.mark.slow
def test_replicas_with_every_option():
    calls = [(train_replicas, name, pieces) for name in OPTIMIZERS for pieces in (1, 2)]
    run(RANKS, *calls, *((keep_bits, name, 200) for name in OPTIMIZERS))
