"""Tags, the key `stiefel`, what the optimizer tells, and edits of parameters between steps."""

import copy

import pytest
import torch
from cases import in_turn
from contract import OPTIMIZERS, RULES, constrained, model, on_machines, optimizer, train, trained
from optimizers import CLIENTS
from torch import nn

import stiefel_opt as so

# ---- edits by the user ---------------------------------------------------------------------------

EDITS = {
    "copy_": lambda net: [
        p.copy_(q) for p, q in zip(net.parameters(), model(9).parameters(), strict=True)
    ],
    "load_state_dict": lambda net: net.load_state_dict(model(9).state_dict()),
    "noise": lambda net: [p.add_(0.01 * torch.randn(p.shape)) for p in net.parameters()],
    "one row": lambda net: net.up.weight[3].mul_(1.1),
    "other memory, the same version": lambda net: [
        setattr(p, "data", p.data + 0.01 * torch.randn(p.shape)) for p in net.parameters()
    ],
}


def assert_on_the_manifold(net, opt, tolerance=2e-6):
    assert so.orthonormality_error(net) < tolerance
    for p in constrained(net).values():
        normals = opt.velocity(p)[1]
        several = isinstance(normals, tuple)
        parts = p.manifold.parts(p.detach())
        for index, normal in enumerate(normals if several else (normals,)):
            point = p.manifold.matrices(parts[index], index) / p.manifold.scale
            size = normal.abs().max() + 10 * p.grad.abs().max()  # U gathers up to ten gradients
            assert (point.mT @ normal).abs().max() <= tolerance * size


@pytest.mark.parametrize(("name", "edit"), in_turn([*OPTIMIZERS, *RULES], EDITS))
def test_edits_between_steps_leave_the_next_step_on_the_manifold(name, edit):
    net, opt = trained(name)
    with torch.no_grad():
        EDITS[edit](net)
    train(net, opt, 3, 4)
    assert_on_the_manifold(net, opt)
    train(net, opt, 4, 14)
    assert_on_the_manifold(net, opt)


# ---- the key `stiefel` ---------------------------------------------------------------------------


def holder(*shape):
    return nn.Parameter(torch.linalg.qr(torch.randn(*shape))[0])


KEYS = [(None, 1), (True, 2), (False, 0), (so.Stiefel(heads=2), 4), ({"heads": 2}, 4)]


@pytest.mark.parametrize(
    ("key", "count", "name", "place"),
    [
        (*key, name, place)
        for key, name, place in in_turn(KEYS * 2, OPTIMIZERS, ["argument"] * 5 + ["group"] * 5)
    ],
)
def test_the_key_overrides_tags(name, key, count, place):
    tagged, plain = so.ManifoldParameter(holder(8, 3).data), holder(8, 3)
    if place == "argument":
        opt = optimizer(name, [tagged, plain], stiefel=key)
    else:
        opt = optimizer(name, [{"params": [tagged, plain], "stiefel": key}], stiefel=False)
    tensors = "1 parameter." if count == 1 else f"{min(count, 2)} parameters."
    matrices = "1 matrix" if count == 1 else f"{count} matrices"
    assert f"Constrained: {matrices} in {tensors}" in repr(opt)
    stored = opt.param_groups[0]["stiefel"]
    assert stored is None or type(stored) in (bool, dict)
    for p in (tagged, plain):
        p.grad = torch.randn(8, 3)
    opt.step()
    manifold = so.Stiefel(heads=2 if count == 4 else None)
    errors = [float(so.orthonormality_error(p, manifold)) for p in (tagged, plain)]
    assert [error < 1e-5 for error in errors] == [count > 0, count > 1]
    if count == 4:
        assert opt.velocity(plain)[0].shape == (2, 3, 3)


def test_true_reads_a_tagged_parameter_as_its_tag_says():
    tagged = so.ManifoldParameter(so.random_point(8, 4), so.Stiefel(heads=2))
    opt = so.StiefelSGD([tagged], stiefel=True)
    assert "Constrained: 2 matrices in 1 parameter." in repr(opt)


def test_repr_counts_matrices():
    net = model()
    text = repr(so.StiefelAdam(net.parameters(), weight_decay=0.1))
    # q and k: 2 heads each; up, turn, filter: 1 each; fused: 1 + 2
    assert "Constrained: 10 matrices in 6 parameters.\nUnconstrained: 7 parameters." in text
    assert text.startswith("StiefelAdam (")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_repr_shows_options_as_torch_does(name):
    opt = optimizer(name, so.param_groups(model(), names=True))
    shown = repr(opt)
    for group in opt.param_groups:
        group |= opt.resolved(group)
        key = group["stiefel"]
        group["stiefel"] = "by tags" if key is None else so.Stiefel.from_dict(key)
    assert shown.startswith(torch.optim.Optimizer.__repr__(opt))


WITH_NONE = [rule for client in CLIENTS for rule in client.WITH_NONE]


@pytest.mark.parametrize("rule", [so.StiefelAdam, so.StiefelAdamW, *WITH_NONE])
def test_repr_shows_what_none_means(rule):
    p = so.ManifoldParameter(torch.eye(6, 3))
    opt = rule([p], lr=0.1)
    kept = dict(opt.param_groups[0])
    shown = opt.resolved(kept)
    meant = {name: shown[name] for name in kept if shown[name] is not kept[name]}
    meant["stiefel"] = "by tags"
    for name, value in meant.items():
        assert kept[name] is None
        assert f"    {name}: {value}\n" in repr(opt)
    assert opt.param_groups[0] == kept
    unknown = {name for name, value in kept.items() if value is None} - set(meant)
    assert unknown == {"foreach", "fused", "cuda_graph"}  # torch decides, or the device
    del meant["stiefel"]
    given, ends = rule([p], lr=0.1, **meant), []
    for each in (opt, given):  # the value in place of None takes the same steps
        with torch.no_grad():
            p.copy_(torch.eye(6, 3))
        for seed in range(3):
            p.grad = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
            each.step()
        ends.append(p.detach().clone())
    assert torch.equal(*ends)


@on_machines(cpu="sgd", as_accelerator="adam-amsgrad")
def test_param_groups_options_by_kind(name):
    net = model()
    groups = so.param_groups(net, stiefel={"lr": 0.0}, plain={"lr": 0.5}, names=True)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    opt = optimizer(name, groups)
    train(net, opt, 0, 1)
    still = {n for n, p in net.named_parameters() if torch.equal(p, before[n])}
    assert still == set(constrained(net))


# ---- one warning ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [so.StiefelSGD, so.StiefelAdam])
def test_nothing_constrained_warns_once(rule):
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    told = r"no parameter is constrained.*so.constrain\(module, 'weight'\)"
    with pytest.warns(UserWarning, match=told) as caught:
        opt = rule(net.parameters())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    opt.add_param_group({"params": [holder(3, 3)]})
    net(torch.ones(1, 3)).sum().backward()
    opt.step()
    copy.deepcopy(opt)


@pytest.mark.parametrize(
    "build",
    [
        lambda: so.StiefelAdam([holder(3, 2)], stiefel=False),
        lambda: so.StiefelAdam([holder(3, 2)], stiefel=True),
        lambda: so.StiefelAdam([{"params": [holder(3, 2)], "stiefel": False}]),
        lambda: so.StiefelAdam([nn.Parameter(torch.ones(3))]),
        lambda: so.StiefelAdam([so.ManifoldParameter(torch.eye(3)), holder(3, 2)]),
    ],
    ids=["False", "True", "group", "vectors only", "one tag"],
)
def test_no_warning_where_the_intention_is_clear(build):
    build()  # warnings are errors


# ---- velocity ------------------------------------------------------------------------------------


@on_machines(cpu="sgd sgd-nesterov adam", as_accelerator="sgd-nesterov")
def test_velocity_has_the_shapes_of_the_reading_and_can_be_set(name):
    net = model().double()
    opt = optimizer(name, net.parameters())
    shapes = {
        net.q.weight: ((2, 3, 3), (2, 8, 3)),
        net.up.weight: ((6, 6), (10, 6)),
        net.turn.weight: ((10, 10), (10, 10)),
        net.filter.weight: ((2, 2), (3, 2)),
    }
    for p, (skew, normal) in shapes.items():
        zero = opt.velocity(p)
        assert [tuple(part.shape) for part in zero] == [skew, normal]
        assert not any(part.any() for part in zero)
    ranges = opt.velocity(net.fused.weight)
    assert [tuple(part.shape) for part in ranges[0]] == [(4, 4), (2, 3, 3)]
    assert [tuple(part.shape) for part in ranges[1]] == [(10, 4), (2, 10, 3)]
    for steps in (0, 3):
        train(net, opt, 0, steps)
        for p in constrained(net).values():
            skew, normal = opt.velocity(p)
            opt.set_velocity(p, skew, normal)
            again = opt.velocity(p)
            torch.testing.assert_close(again, (skew, normal), atol=1e-14, rtol=1e-14)
    skew, normal = torch.randn(6, 6).double(), torch.randn(10, 6).double()
    opt.set_velocity(net.up.weight, skew, normal)
    found_skew, found_normal = opt.velocity(net.up.weight)
    torch.testing.assert_close(found_skew, (skew - skew.T) / 2)
    X = net.up.weight.detach() / 2
    torch.testing.assert_close(found_normal, normal - X @ (X.T @ normal))


def test_velocity_returns_copies():
    net = model()
    opt = so.StiefelSGD(net.parameters())
    train(net, opt, 0, 1)
    for part in opt.velocity(net.q.weight):
        part.zero_()
    assert all(part.any() for part in opt.velocity(net.q.weight))


@pytest.mark.parametrize("outside", [True, False])
def test_velocity_of_what_is_not_constrained_here(outside):
    net = model()
    opt = so.StiefelSGD(net.parameters())
    p = so.ManifoldParameter(torch.eye(3)) if outside else net.out.weight
    with pytest.raises(ValueError, match="`parameter` must be constrained in this optimizer"):
        opt.velocity(p)


# ---- constrained again ---------------------------------------------------------------------------


@on_machines(cpu="adam", as_accelerator="sgd", compiled="sgd")
def test_a_parameter_tagged_between_steps_is_constrained_from_then_on(name):
    layer, other = nn.Linear(8, 8), so.constrain(nn.Linear(8, 8))
    opt = optimizer(name, [*layer.parameters(), *other.parameters()])
    for step in range(4):
        if step == 2:
            so.constrain(layer, heads=2)
        for net in (layer, other):
            net.zero_grad()
            net(torch.ones(1, 8)).square().sum().backward()
        opt.step()
    assert so.orthonormality_error(layer) < 1e-5
    assert opt.velocity(layer.weight)[1].shape == (2, 8, 4)
    assert opt.state[layer.weight]["step"] == 2
