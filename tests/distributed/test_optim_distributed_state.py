"""State dicts by parameter names, as torch.distributed.checkpoint reads and sets them."""

import copy

import pytest
import torch
from cases import in_turn
from contract import (
    OPTIMIZERS,
    assert_same,
    assert_same_training,
    backward,
    constrained,
    large_eps,
    model,
    optimizer,
    through_file,
    train,
)
from optimizers import OF_EACH_KIND, RULES, TABLE
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import stiefel_opt as so

OPTIONS = [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}]


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        *in_turn([*RULES, *OF_EACH_KIND], OPTIONS, [torch.float32]),
        *in_turn(OF_EACH_KIND, OPTIONS, [torch.bfloat16]),
    ],
)
def test_a_state_dict_by_names_continues_bit_for_bit(name, options, dtype):
    """In one process without a process group; the fresh optimizer makes its state by lr = 0."""
    options = dcp.StateDictOptions(**options)
    net = so.retag(model().to(dtype))
    eps = large_eps(name)
    opt = optimizer(name, so.param_groups(net), **eps)
    train(net, opt, 0, 3)
    saved = through_file(dcp.get_optimizer_state_dict(net, opt, options=options))
    if options.flatten_optimizer_state_dict:
        assert f"state.q.weight.{TABLE[name].state}" in saved
    else:
        assert "q.weight" in saved["state"]
    fresh = copy.deepcopy(net)
    before = copy.deepcopy(fresh.state_dict())
    fresh_opt = optimizer(name, so.param_groups(fresh), lr=1.0, **eps)
    dcp.set_optimizer_state_dict(fresh, fresh_opt, saved, options=options)
    assert_same(fresh.state_dict(), before)
    if dtype is torch.bfloat16:
        assert fresh_opt.state[fresh.up.weight]["master"].dtype == torch.float32
    train(net, opt, 3, 9)
    train(fresh, fresh_opt, 3, 9)
    assert_same_training((net, opt), (fresh, fresh_opt))


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_distributed_state_dict_of_an_optimizer_that_never_stepped(name):
    net = model()
    before = copy.deepcopy(net.state_dict())
    opt = optimizer(name, net.parameters())
    saved = dcp.get_optimizer_state_dict(net, opt)
    assert_same(net.state_dict(), before)
    assert set(saved["state"]) >= set(constrained(net))
    assert opt.param_groups[0]["lr"] == OPTIMIZERS[name][1]["lr"]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (name, named)
        for name in OF_EACH_KIND
        for named in (False, True)
        if named or TABLE[name].has_small_state
    ],
)
def test_distributed_state_dict_of_another_reading_is_refused(name, named):
    """By its reading where the optimizers know names, else by the shape of its state."""

    def build(heads):
        net = nn.Sequential(nn.Linear(8, 8), so.constrain(nn.Linear(8, 8), heads=heads))
        opt = optimizer(name, net.named_parameters() if named else net.parameters())
        backward(net, 0)
        opt.step()
        return net, opt

    saved = through_file(dcp.get_optimizer_state_dict(*build(2)))
    net, opt = build(4)
    label = "1.weight" if named else "parameter 2 of group 0"
    message = rf"`reading of {label}` must be the saved one, Stiefel\("
    if not named:
        message = f"of {label}` must have shape"
    with pytest.raises(ValueError, match=message):
        dcp.set_optimizer_state_dict(net, opt, saved)


@pytest.mark.parametrize("name", OF_EACH_KIND)
@pytest.mark.parametrize("listed", ["parameters", "named_parameters"])
def test_names_stay_with_their_parameters_in_another_order(name, listed):
    """Names, not places, say what belongs to which parameter."""
    net = model()
    opt = optimizer(name, getattr(net, listed)())
    train(net, opt, 0, 3)
    saved = through_file(dcp.get_optimizer_state_dict(net, opt))
    fresh = copy.deepcopy(net)
    fresh_opt = optimizer(name, list(getattr(fresh, listed)())[::-1])
    dcp.set_optimizer_state_dict(fresh, fresh_opt, saved)
    (group,) = fresh_opt.param_groups
    if listed == "named_parameters":
        names = {id(p): key for key, p in fresh.named_parameters()}
        assert group["param_names"] == [names[id(p)] for p in group["params"]]
    train(net, opt, 3, 4)
    train(fresh, fresh_opt, 3, 4)
    for p, q in zip(net.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(p, q)
