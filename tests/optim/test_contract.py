"""What code written for torch's optimizers may do: closures, groups, schedulers, hooks, edits."""

import copy
import inspect

import pytest
import torch
from cases import in_turn, mixed
from contract import (
    OPTIMIZERS,
    PUBLISHED,
    RULES,
    TABLE,
    assert_same,
    assert_same_training,
    backward,
    every_optimizer,
    model,
    on_machines,
    optimizer,
    train,
    trained,
    twins,
)
from optimizers import CLIENTS
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook

import stiefel_opt as so

# ---- closure, parameters, gradients -------------------------------------------------------------


@on_machines(cpu="sgd", as_accelerator="adam-amsgrad", slowly_compiled="sgd")
def test_closure_is_called_once_with_grad_enabled_and_its_loss_returned(name):
    (net, opt), (other, other_opt) = twins(name)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        return backward(net, len(calls) - 1)

    with torch.no_grad():
        losses = [opt.step(closure) for _ in range(3)]
    assert calls == [True] * 3
    for step, loss in enumerate(losses):
        assert_same(loss, backward(other, step))
        assert other_opt.step() is None
    assert_same_training((net, opt), (other, other_opt))


LISTED = {
    "generator": lambda net: iter(net.parameters()),
    "named": lambda net: net.named_parameters(),
    "named list": lambda net: list(net.named_parameters()),
    "group": lambda net: [{"params": net.parameters()}],
    "param_groups": so.param_groups,
    "with names": lambda net: so.param_groups(net, names=True),
}


@pytest.mark.parametrize(("name", "listed"), in_turn(OPTIMIZERS, LISTED))
def test_every_way_to_list_parameters_gives_the_same_training(name, listed):
    net = model()
    other = copy.deepcopy(net)
    opt, other_opt = optimizer(name, list(net.parameters())), optimizer(name, LISTED[listed](other))
    train(net, opt, 0, 3)
    train(other, other_opt, 0, 3)
    assert_same_training((net, opt), (other, other_opt))


@on_machines(cpu="adam sgd-nesterov", as_accelerator="sgd", slowly_compiled="sgd-nesterov")
@pytest.mark.parametrize("maximize", [False, True])
def test_gradients_keep_their_bits_and_their_objects(name, maximize):
    """Torch's foreach kernels add Nesterov's momentum to gradients in place: ours are copies."""
    net = model()
    options = {"maximize": maximize, "foreach": True, "weight_decay": 0.1 * maximize}
    opt = optimizer(name, net.parameters(), **options)
    for step in range(3):
        backward(net, step)
        grads = [p.grad for p in net.parameters()]
        before = copy.deepcopy(grads)
        opt.step()
        assert all(p.grad is grad for p, grad in zip(net.parameters(), grads, strict=True))
        assert_same(grads, before)


@every_optimizer
def test_to_maximize_a_loss_is_to_minimize_its_negative(name):
    """The momentum, too: a velocity points to where a parameter moves."""
    net = model().double()
    other = copy.deepcopy(net)
    opt, up = optimizer(name, net.parameters()), optimizer(name, other.parameters(), maximize=True)
    for step in range(3):
        backward(net, step)
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            q.grad = -p.grad
        opt.step()
        up.step()
    for (path, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-9, rtol=0, msg=path)
    for left, right in zip(opt.velocity(net.up.weight), up.velocity(other.up.weight), strict=True):
        torch.testing.assert_close(left, right, atol=1e-9, rtol=0)


def taken(opt, group):
    opt.param_groups.remove(group)


def appended(opt, group):
    opt.param_groups.remove(group)
    opt.step()
    opt.param_groups.append(group)


def replaced(opt, group):
    opt.param_groups = [opt.param_groups[1], {**group}]


def cleared(opt, group):
    kept = opt.param_groups[-1]
    assert kept is not group
    opt.param_groups.clear()
    opt.add_param_group(kept)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "edit", "machine"),
    [
        *mixed(9, RULES, [taken, appended, replaced, cleared], ["cpu"]),
        ("adam", taken, "as_accelerator"),
    ],
    indirect=["machine"],
)
def test_the_list_of_groups_may_be_edited(name, edit):
    """As in torch: groups that are there move, with their state, and others stay."""
    torch.manual_seed(0)
    net, other = (so.constrain(nn.Linear(6, 4).double()) for _ in range(2))
    together, alone = copy.deepcopy([net, other]), copy.deepcopy(other)
    opt = optimizer(name, [{"params": list(each.parameters())} for each in together])
    its_own = optimizer(name, alone.parameters())
    for step in range(6):
        if step == 3:
            first = opt.param_groups[0]
            for p in (*together[0].parameters(), *together[1].parameters()):
                p.grad = None
            edit(opt, first)
        for each in (*together, alone):
            each.zero_grad()
            each(torch.linspace(-1, 1, 6 + step).double()[step:]).square().sum().backward()
        before = [p.detach().clone() for p in together[0].parameters()]
        opt.step()
        its_own.step()
        moves = step < 3 or edit in (appended, replaced)
        assert all(
            torch.equal(p, q) != moves
            for p, q in zip(together[0].parameters(), before, strict=True)
        )
    for p, q in zip(together[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-14, rtol=0)


@on_machines(cpu="sgd", as_accelerator="adam-amsgrad", slowly_compiled="sgd")
def test_moving_a_parameter_to_another_group_keeps_its_state(name):
    (net, opt), (other, other_opt) = twins(name)
    train(net, opt, 0, 3)
    train(other, other_opt, 0, 3)
    other_opt.load_state_dict(copy.deepcopy(other_opt.state_dict()))
    params = other_opt.param_groups[0]["params"]
    places = [i for i, p in enumerate(params) if p is other.k.weight or p is other.out.bias]
    moved = [params.pop(place) for place in reversed(places)]
    other_opt.add_param_group({"params": moved})
    train(net, opt, 3, 6)
    train(other, other_opt, 3, 6)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
        assert opt.state[p].get("step") == other_opt.state[q].get("step")


# ---- learning rates ------------------------------------------------------------------------------

SCHEDULERS = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.9**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda _: 0.9},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 3]},
    "ConstantLR": {"total_iters": 2},
    "LinearLR": {"total_iters": 3},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "PolynomialLR": {"total_iters": 4},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "ReduceLROnPlateau": {"patience": 0, "factor": 0.5},
}
COMPOSED = {
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(opt, 0.1, 1.0, 4), lr_scheduler.ExponentialLR(opt, 0.9)]
    ),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=0.01, anneal_epochs=3),
}


def scheduler(kind, opt):
    if kind in COMPOSED:
        return COMPOSED[kind](opt)
    return getattr(lr_scheduler, kind)(opt, **SCHEDULERS[kind])


def test_the_list_of_schedulers_is_complete():
    assert {*SCHEDULERS, *COMPOSED} == {*lr_scheduler.__all__, "SWALR"} - {"LRScheduler"}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *in_turn([*SCHEDULERS, *COMPOSED], ["sgd", "adam"]),
        ("CyclicLR", "adam"),  # moves betas, too
        ("OneCycleLR", "sgd"),  # moves the momentum, too
    ],
)
def test_every_scheduler_drives_the_step(kind, name):
    """Under a scheduler each step is the one of its learning rate and momentum set by hand."""
    (net, opt), (other, other_opt) = twins(name)
    plan = scheduler(kind, opt)
    rates = []
    for step in range(6):
        for key in ("lr", "momentum", "betas"):
            if key in opt.defaults:
                other_opt.param_groups[0][key] = opt.param_groups[0][key]
        rates.append(opt.param_groups[0]["lr"])
        train(net, opt, step, step + 1)
        train(other, other_opt, step, step + 1)
        plan.step(1.0) if kind == "ReduceLROnPlateau" else plan.step()
    assert len(set(rates)) > 1
    assert_same_training((net, opt), (other, other_opt))


@on_machines(cpu="sgd", as_accelerator="adam", slowly_compiled="sgd")
def test_the_learning_rate_may_be_a_tensor(name):
    net = model()
    other = copy.deepcopy(net)
    rate = torch.tensor(0.05, dtype=torch.float64)
    opt = optimizer(name, net.parameters(), lr=rate)
    other_opt = optimizer(name, other.parameters(), lr=0.05)
    plan, other_plan = (lr_scheduler.ExponentialLR(o, 0.5) for o in (opt, other_opt))
    for step in range(4):
        train(net, opt, step, step + 1)
        train(other, other_opt, step, step + 1)
        plan.step()
        other_plan.step()
    assert opt.param_groups[0]["lr"] is rate
    assert float(rate) == 0.05 / 16
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    assert so.orthonormality_error(net) < 1e-5


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "rate", "dtype", "machine"),
    [
        *in_turn(
            OPTIMIZERS,
            [0.0, torch.tensor(0.0)],
            [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16],
            ["cpu", "as_accelerator", "as_accelerator"],
        ),
        pytest.param("sgd", 0.0, torch.float32, "compiled", marks=pytest.mark.slow),
    ],
    indirect=["machine"],
)
def test_learning_rate_zero_makes_all_state_and_leaves_every_bit(name, rate, dtype):
    net = so.retag(model().to(dtype))
    with torch.no_grad():
        net.q.weight.add_(0.01)  # off the manifold: only a step with lr > 0 projects
    before = copy.deepcopy(net.state_dict())
    opt = optimizer(name, net.parameters(), lr=rate)
    train(net, opt, 0, 3)
    assert_same(net.state_dict(), before)
    moved = so.retag(model().to(dtype))
    other = optimizer(name, moved.parameters())
    train(moved, other, 0, 1)
    for p, q in zip(net.parameters(), moved.parameters(), strict=True):
        assert set(opt.state[p]) == set(other.state[q])
    for group in opt.param_groups:
        group["lr"] = 0.05
    train(net, opt, 3, 4)
    assert so.orthonormality_error(net) < max(1e-5, 1.01 * torch.finfo(dtype).eps)


# ---- hooks, profiler, scaler ---------------------------------------------------------------------


@on_machines(cpu="sgd", as_accelerator="adam")
def test_hooks_fire_and_the_profiler_sees_the_step(name):
    net = model()
    opt = optimizer(name, net.parameters())
    seen = []
    handles = [
        opt.register_step_pre_hook(lambda *_: seen.append("before")),
        opt.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_post_hook(lambda *_: seen.append("global")),
    ]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(net, opt, 0, 1)
        opt.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    for handle in handles:
        handle.remove()
    train(net, opt, 1, 2)
    assert seen == ["before", "after", "global"]
    kind = type(opt).__name__
    names = [event.name for event in profile.events()]
    assert f"Optimizer.step#{kind}.step" in names
    assert f"Optimizer.zero_grad#{kind}.zero_grad" in names


def test_every_optimizer_is_under_this_contract():
    shown = [getattr(so, name) for name in so.__all__ if name in vars(so) or CLIENTS]
    public = {each for each in shown if isinstance(each, type) and hasattr(each, "rule_for")}
    rows = [*TABLE.values(), *PUBLISHED.values()]
    assert public == {row.optimizer for row in rows}


def test_adamw_is_adam_with_torchs_decay_and_has_torchs_defaults():
    moved, alike = trained("adamw"), trained("adam", weight_decay=0.01, decoupled_weight_decay=True)
    for p, q in zip(moved[0].parameters(), alike[0].parameters(), strict=True):
        assert_same(p.detach(), q.detach())
    ours = inspect.signature(so.StiefelAdamW).parameters
    for name, parameter in inspect.signature(torch.optim.AdamW).parameters.items():
        assert ours[name].default == parameter.default, name
    assert inspect.signature(so.StiefelSGD).parameters["momentum"].default == 0.9  # torch: 0
