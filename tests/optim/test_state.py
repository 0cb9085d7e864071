"""State and checkpoints: whose tensors, under which names, and that training continues alike."""

import copy
import io
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
from cases import in_turn
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
    assert_same,
    assert_same_training,
    backward,
    constrained,
    every_rule,
    large_eps,
    model,
    on_machines,
    optimizer,
    snapshot,
    through_file,
    train,
    trained,
    tried_with,
)
from optimizers import CLIENTS
from torch import nn

import stiefel_opt as so


def saved_size(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


# ---- names and shapes ----------------------------------------------------------------------------

STATE = {  # of m x m, of one number a matrix, of n x m
    "sgd": ({"momentum_skew", "momentum_factor", "momentum_overlap"}, (), {"momentum_unprojected"}),
    "sgd-nesterov": ({"momentum_skew"}, (), {"momentum_normal"}),
    "adam": (
        {"momentum_skew", "exp_avg_sq_skew"},
        {"radius_growth"},
        {"momentum_normal", "exp_avg_sq_normal"},
    ),
    "adam-amsgrad": (
        {"momentum_skew", "exp_avg_sq_skew", "max_exp_avg_sq_skew"},
        {"radius_growth"},
        {"momentum_normal", "exp_avg_sq_normal", "max_exp_avg_sq_normal"},
    ),
}
for client in CLIENTS:
    STATE |= client.STATE


@pytest.mark.parametrize(("name", "steps"), in_turn(STATE, [1, 3]))
def test_state_has_full_names_and_the_leading_shape_of_the_parameter(name, steps):
    net, opt = trained(name, steps)
    sizes = {  # of the m x m state
        "q.weight": (2, 3, 3),
        "k.weight": (2, 3, 3),
        "up.weight": (6, 6),
        "filter.weight": (2, 2),
    }
    named = dict(net.named_parameters())
    small_ones, norms, tall_ones = STATE[name]
    square = {small for small in small_ones if small.endswith("skew")}
    rows = {"momentum_buffer"}  # torch's own, of each part of the plain rows
    if TABLE[name].adaptive:
        rows = {"exp_avg", "exp_avg_sq", "step", *(["max_exp_avg_sq"] * opt.defaults["amsgrad"])}
    for key, size in sizes.items():
        state = opt.state[named[key]]
        assert set(state) == {"step", *small_ones, *tall_ones, *norms}
        assert all(state[norm].shape == (*size[:-2], 1, 1) for norm in norms)
        assert all(tuple(state[small].shape) == size for small in small_ones)
        assert all(state[tall].shape == named[key].shape for tall in tall_ones)
    turn = opt.state[net.turn.weight]
    assert set(turn) == {"step", *square, *norms}
    assert all(tuple(turn[small].shape) == (10, 10) for small in square)
    fused = opt.state[net.fused.weight]
    own = {*small_ones, *norms, *tall_ones, *(f"rows.{word}" for word in rows)}
    assert set(fused) == {"step", *own, *(f"{key}.1" for key in own)}
    for tall in tall_ones:  # each range has its own, of its shape
        assert fused[tall].shape == (4, 10)
        assert fused[f"{tall}.1"].shape == (6, 10)
    for word in rows - {"step"}:
        assert fused[f"rows.{word}"].shape == fused[f"rows.{word}.1"].shape == (2, 10)
    for key, size in [("momentum_skew", (4, 4)), ("momentum_skew.1", (2, 3, 3))]:
        assert tuple(fused[key].shape) == size
    for p in constrained(net).values():
        step = opt.state[p]["step"]
        assert step.shape == ()
        assert step.dtype == torch.float32
        assert step == steps
        tensors = [value for key, value in opt.state[p].items() if key != "step"]
        assert all(value.dtype == p.dtype for value in tensors)


@on_machines(cpu="sgd", as_accelerator="adam-amsgrad")
def test_state_is_the_parameter_s_own(name):
    """Views into one stack are fine: they must not overlap, and a file holds its own bytes only."""
    params = [so.ManifoldParameter(torch.eye(64, 8)) for _ in range(40)]
    opt = optimizer(name, params)
    for p in params:
        p.grad = torch.randn(p.shape)
    opt.step()
    own = sum(value.numel() * 4 for value in opt.state[params[3]].values())
    overhead = saved_size({key: torch.zeros(1) for key in opt.state[params[3]]})
    for p in (params[0], params[3], params[-1]):
        assert saved_size(opt.state[p]) < own + overhead + 1000
        assert saved_size(opt.state[p]["momentum_skew"]) < 64 * 4 + 2500
    spans = sorted(
        (value.untyped_storage().data_ptr(), value.untyped_storage().nbytes())
        for p in params
        for value in opt.state[p].values()
    )
    for (start, size), (after, _) in itertools.pairwise(spans):
        assert start + size <= after


@on_machines(cpu="sgd adam", as_accelerator="sgd-nesterov", slowly_compiled="sgd")
def test_writing_to_the_state_of_one_parameter_reaches_the_next_step(name):
    """`optimizer.state[p]` is where the state is, not a copy of it."""
    nets = [model() for _ in range(2)]
    opts = [optimizer(name, net.parameters()) for net in nets]
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 0, 2)
    word = TABLE[name].state
    opts[0].state[nets[0].k.weight][word].zero_()
    state = opts[1].state[nets[1].k.weight]
    state[word] = torch.zeros_like(state[word])
    before = nets[0].k.weight.detach().clone()
    for net, opt in zip(nets, opts, strict=True):
        train(net, opt, 2, 3)
    for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(p, q)
    other, _ = trained(name)
    assert not torch.equal(other.k.weight - before, nets[0].k.weight - before)


FORGET = {
    "clear": lambda opt, _: opt.state.clear(),
    "a new dict": lambda opt, _: setattr(opt, "state", type(opt.state)(dict)),
    "pop": lambda opt, net: [opt.state.pop(p) for p in net.parameters() if p in opt.state],
}


@pytest.mark.parametrize(("name", "forget"), in_turn(RULES, FORGET))
def test_forgotten_state_starts_anew(name, forget):
    net, opt = trained(name)
    FORGET[forget](opt, net)
    other = copy.deepcopy(net)
    other_opt = optimizer(name, other.parameters())
    train(net, opt, 3, 5)
    train(other, other_opt, 3, 5)
    assert_same_training((net, opt), (other, other_opt))


# ---- checkpoints ---------------------------------------------------------------------------------


CPU = ["cpu"]


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "steps", "listed", "dtype", "machine"),
    [
        *in_turn(OPTIMIZERS, [0, 3, 8], ["parameters", "named_parameters"], [torch.float32], CPU),
        *in_turn(RULES, [3], ["parameters"], [torch.bfloat16, torch.float16], CPU),
        *in_turn(["sgd", "adam-amsgrad"], [9], ["parameters"], [torch.complex64], CPU),
        pytest.param("adam", 3, "parameters", torch.float32, "compiled", marks=pytest.mark.slow),
    ],
    indirect=["machine"],
)
def test_a_saved_state_dict_continues_bit_for_bit(name, steps, listed, dtype):
    eps = large_eps(name) if dtype.itemsize == 2 else {}
    net = so.retag(model().to(dtype))
    opt = optimizer(name, getattr(net, listed)(), **eps)
    train(net, opt, 0, steps)
    saved = through_file({"model": net.state_dict(), "optimizer": opt.state_dict()})
    fresh = so.retag(model(5).to(dtype))
    fresh.load_state_dict(saved["model"])
    fresh_opt = optimizer(name, getattr(fresh, listed)(), lr=1.0, **eps)
    fresh_opt.load_state_dict(copy.deepcopy(saved["optimizer"]))
    train(net, opt, steps, steps + 6)
    train(fresh, fresh_opt, steps, steps + 6)
    assert_same_training((net, opt), (fresh, fresh_opt))
    net.load_state_dict(saved["model"])  # and back again
    opt.load_state_dict(saved["optimizer"])
    train(net, opt, steps, steps + 6)
    assert_same_training((net, opt), (fresh, fresh_opt))


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}


@pytest.mark.parametrize(("name", "way"), in_turn(OPTIMIZERS, COPIES))
def test_copies_continue_bit_for_bit_and_share_nothing(name, way):
    net, opt = trained(name)
    other, other_opt = COPIES[way]((net, opt))
    held = {id(p) for group in other_opt.param_groups for p in group["params"]}
    assert held == {id(p) for p in other.parameters()}
    assert isinstance(other.q.weight, so.ManifoldParameter)
    before = snapshot(net, opt)
    train(other, other_opt, 3, 9)
    assert_same(snapshot(net, opt), before)
    train(net, opt, 3, 9)
    assert_same_training((net, opt), (other, other_opt))


def test_a_state_dict_loads_where_we_were_never_imported(tmp_path):
    net = model()
    opt = so.StiefelAdam(so.param_groups(net, names=True))
    train(net, opt, 0, 1)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    code = (
        "import sys, torch; state = torch.load(sys.argv[1], weights_only=True);"
        "assert not any(name.startswith('stiefel_opt') for name in sys.modules);"
        "print(len(state['state']), state['param_groups'][1]['stiefel']['heads'])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "state.pt"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [str(len(opt.state)), "2"]


# ---- readings in checkpoints ---------------------------------------------------------------------


@tried_with("sgd")
def test_the_current_key_wins_on_load(name):
    """A tag in one process and a group's key in another describe the same reading."""
    layer = so.constrain(torch.nn.Linear(8, 8, bias=False), heads=2)
    opt = optimizer(name, layer.parameters())
    layer(torch.ones(1, 8)).sum().backward()
    opt.step()
    plain = torch.nn.Linear(8, 8, bias=False)
    key = so.Stiefel(heads=2)
    other = optimizer(name, plain.parameters(), stiefel=key)
    other.load_state_dict(through_file(opt.state_dict()))
    assert other.param_groups[0]["stiefel"] == key.as_dict()
    assert "4 matrices" not in repr(other)
    assert "2 matrices" in repr(other)


@every_rule
def test_state_that_stays_empty_is_not_kept(name: str) -> None:
    """As torch's SGD without momentum."""
    plain, theirs, row = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5)), TABLE[name]
    none = {"momentum": 0.0, "nesterov": False} if row.of_torch and not row.adaptive else {}
    opt = optimizer(name, [plain], stiefel=False, **none)
    other = row.plain([theirs], lr=0.05, **{**row.plain_options, **none})
    for _ in range(2):
        plain.grad, theirs.grad = torch.ones(5), torch.ones(5)
        opt.step()
        other.step()
    assert opt.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    assert all(opt.state.values())


@every_rule
def test_a_first_step_in_inference_mode_is_a_step(name: str) -> None:
    net, twin = model(), model()
    opt, other = (optimizer(name, each.parameters()) for each in (net, twin))
    backward(net, 0)
    backward(twin, 0)
    with torch.inference_mode():
        opt.step()
    other.step()
    train(net, opt, 1, 4)
    train(twin, other, 1, 4)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert not p.is_inference()
        assert not any(t.is_inference() for t in opt.state[p].values())
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(net, opt, 4, 5)
