"""What may be wrong with a checkpoint: one clear error, and nothing has changed; or it works.

`REFUSED` is the table of what is refused. Each case gets a state_dict of StiefelSGD after three
steps and returns what is loaded into another StiefelSGD, which has done one step of its own.
"""

from __future__ import annotations

import copy
import functools
import pickle
from contextlib import nullcontext
from typing import Any

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
    every_optimizer,
    model,
    optimizer,
    snapshot,
    through_file,
    train,
    trained,
    tried_with,
    warnings_of,
)
from optimizers import CLIENTS
from torch import nn
from torch.utils._pytree import tree_leaves
from training import train as descend

import stiefel_opt as so

# Some checkpoints here come from torch's optimizers, which know no constraint and say so.
pytestmark = pytest.mark.filterwarnings("ignore:.* would not stay orthonormal")

CUTS = 20  # ends of a truncated file


def with_group(saved: Any, **values: Any) -> Any:
    saved["param_groups"][0].update(values)
    return saved


def with_state(saved: Any, of: str, name: str, change: Any) -> Any:
    (group,) = saved["param_groups"]
    state = saved["state"][group["params"][group["param_names"].index(of)]]
    state[name] = change(state[name])
    return saved


def without(saved: Any, key: str) -> Any:
    return {name: value for name, value in saved.items() if name != key}


def with_reading(saved: Any, of: str = "q.weight", **changes: Any) -> Any:
    (group,) = saved["param_groups"]
    number = group["param_names"].index(of)
    group["readings"][number] = {**(group["readings"][number] or {}), **changes}
    return saved


UNUSABLE: dict[str, dict[str, Any]] = {
    "step": {
        "NaN": lambda step: step * float("nan"),
        "negative": lambda step: -step,
        "of a shape": lambda _: torch.ones(7),
        "none": lambda _: None,
        "a text": lambda _: "3",
    },
    "momentum_skew": {
        "a list": lambda skew: skew.tolist(),
        "none": lambda _: None,
        "sparse": lambda skew: skew.to_sparse(),
        "integers": lambda skew: skew.long(),
        "NaN": lambda skew: skew * float("nan"),
    },
}
SHAPED = [  # of what, the change, and the shapes before and behind it
    ("k.weight", "momentum_skew", lambda old: old[:1], "2, 3, 3", "1, 3, 3"),
    ("up.weight", "momentum_unprojected", lambda old: old.mT, "10, 6", "6, 10"),
    ("fused.weight", "momentum_skew.1", lambda old: old[0], "2, 3, 3", "3, 3"),
    ("out.weight", "momentum_buffer", lambda old: old[:1], "2, 14", "1, 14"),
]
READ = [
    ("q.weight", "heads", 3),
    ("q.weight", "scale", 1.0004),
    ("q.weight", "transposed", True),
    ("out.weight", "scale", 2.0),  # which is plain now
]
OPTIONS = [
    ("format", 2, "`format of the state_dict` must be at most 1, got 2; a newer stiefel_opt has"),
    ("format", "two", "`format of the state_dict` must be at most 1, got two"),
    ("transport", "parallel", "`transport` must be one of .*, got 'parallel'"),
    ("lr", float("inf"), r"`lr` must be in \[0, inf\), got inf"),
]
REFUSED: dict[str, tuple[Any, Any, str]] = {
    **{
        f"shape of {name} of {of}": (
            lambda saved, of=of, name=name, change=change: with_state(saved, of, name, change),
            ValueError,
            rf"`{name} of {of}` must have shape \({wanted}\), got shape \({got}\); load",
        )
        for of, name, change, wanted, got in SHAPED
    },
    **{
        f"{option} of {of}": (
            lambda saved, of=of, change=(option, value): with_reading(saved, of, **dict([change])),
            ValueError,
            rf"`reading of {of}` must be the saved one, Stiefel\(.*{option}={value}.*; constrain",
        )
        for of, option, value in READ
    },
    **{
        f"{option} {value}": (
            lambda saved, change=(option, value): with_group(saved, **dict([change])),
            ValueError,
            message,
        )
        for option, value, message in OPTIONS
    },
    "complex state": (
        lambda saved: with_state(saved, "q.weight", "momentum_skew", lambda old: old.cfloat()),
        ValueError,
        "`momentum_skew of q.weight` must be real, got torch.complex64",
    ),
    # entries that no step could use
    **{
        f"{name}, {case}": (
            lambda saved, name=name, change=change: with_state(saved, "k.weight", name, change),
            (TypeError, ValueError),
            "of k.weight` must",
        )
        for name, changes in UNUSABLE.items()
        for case, change in changes.items()
    },
    **{
        f"readings {wrong}": (
            lambda saved, wrong=wrong: with_group(saved, readings=wrong),
            (TypeError, ValueError),
            "must",
        )
        for wrong in (["heads"], [3], [[1]], [{"heads": "two"}], 5, "heads")
    },
    # another class
    "state of StiefelAdam": (
        lambda _: trained("adam")[1].state_dict(),
        ValueError,
        "`state_dict` must be one of StiefelSGD, got one of StiefelAdam; load it into StiefelAdam, "
        "or load the weights only",
    ),
    **{
        f"state of torch.optim.{rule}": (
            lambda _, rule=rule: of_torch(rule, model(), 3)[1].state_dict(),
            ValueError,
            r"`state_dict` must be one of torch.optim.SGD, got one with .*; load the weights only",
        )
        for rule in ("Adam", "AdamW", "RMSprop", "Adagrad", "NAdam")
    },
    # no state_dict, or not all of it
    "nothing": (lambda _: None, TypeError, "`state_dict` must be a dict, got NoneType"),
    "a list": (lambda saved: [saved], TypeError, "`state_dict` must be a dict, got list"),
    "a whole checkpoint": (
        lambda saved: {"model": {}, "optimizer": saved},
        ValueError,
        r"`state_dict` must have the keys .*, got \['model', 'optimizer'\]; pass what optimizer",
    ),
    "no state": (
        lambda saved: without(saved, "state"),
        ValueError,
        r"`state_dict` must have the keys .*, got \['param_groups'\]",
    ),
    "no groups": (
        lambda saved: without(saved, "param_groups"),
        ValueError,
        r"`state_dict` must have the keys .*, got \['state'\]",
    ),
    "another number of groups": (
        lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
        ValueError,
        r"`state_dict` must have 1 groups of \[\d+\] parameters, got 2 of .*; build it as it was",
    ),
    "another number of parameters": (
        lambda saved: with_group(saved, params=saved["param_groups"][0]["params"][:-1]),
        ValueError,
        r"`state_dict` must have 1 groups of \[\d+\] parameters, got 1 of",
    ),
}


def of_torch(rule: str, net: nn.Module, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    opt = getattr(torch.optim, rule)(net.parameters(), lr=1e-3)
    train(net, opt, 0, steps)
    return net, opt


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_optimizer_untouched(case):
    spoil, error, message = REFUSED[case]
    given = spoil(through_file(trained()[1].state_dict()))
    kept = [leaf._version for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    net, opt = trained(steps=1)
    before = snapshot(net, opt)
    with pytest.raises(error, match=message):
        opt.load_state_dict(given)
    assert_same(snapshot(net, opt), before)
    leaves = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    assert [leaf._version for leaf in leaves] == kept  # only read
    other = trained(steps=4)
    train(net, opt, 1, 4)
    assert_same_training((net, opt), other)


@every_optimizer
def test_state_below_its_declared_least_is_refused(name):
    """A root of it would be NaN, or a step go uphill."""
    net, opt = trained(name)
    before = snapshot(net, opt)
    (group,) = opt.param_groups
    bounded = [kind for kind in opt.state_for(group) if kind.least > -float("inf")]
    assert bounded or not any("sq" in key for key in opt.state[net.k.weight])
    for kind in bounded:
        given = through_file(opt.state_dict())
        with_state(given, "k.weight", kind.name, lambda old, kind=kind: old * 0 + kind.least - 1)
        message = f"`{kind.name} of k.weight` must have no entry below {kind.least:g}, got "
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(given)
    assert_same(snapshot(net, opt), before)


SPOILT_ROWS: dict[str, tuple[str, Any, type[Exception], str]] = {
    "shape": (
        "exp_avg",
        lambda old: old[:1],
        ValueError,
        r"have shape \(6, 6\), got shape \(1, 6\)",
    ),
    "kind": ("exp_avg", lambda old: old.tolist(), TypeError, "be a tensor, got list"),
    "not finite": ("exp_avg", lambda old: old * float("nan"), ValueError, "be finite, got NaN"),
    "negative": ("exp_avg_sq", lambda old: -old, ValueError, "have no entry below 0, got -"),
}


def partly_constrained(rule: Any = so.StiefelAdam) -> tuple[torch.Tensor, Any]:
    """A weight with plain rows behind four constrained ones, after a step."""
    torch.manual_seed(0)
    weight = so.ManifoldParameter(torch.randn(10, 6), so.Stiefel(rows=(0, 4)))
    opt = rule([weight], lr=0.1)
    weight.grad = torch.randn(10, 6)
    opt.step()
    return weight, opt


@pytest.mark.parametrize("case", SPOILT_ROWS)
def test_the_state_of_plain_rows_is_checked_like_all_other(case):
    """A step would raise after the constrained rows have moved, or write NaN."""
    name, spoil, error, message = SPOILT_ROWS[case]
    weight, opt = partly_constrained()
    given = copy.deepcopy(opt.state_dict())
    given["state"][0]["rows." + name] = spoil(given["state"][0]["rows." + name])
    before = copy.deepcopy(opt.state_dict()), weight.detach().clone()
    with pytest.raises(error, match=f"`rows.{name} of parameter 0 of group 0` must {message}"):
        opt.load_state_dict(given)
    assert_same((opt.state_dict(), weight.detach()), before)


COUNTS = {
    "one entry": lambda old: old.reshape(1),
    "a number": float,
    "an integer": int,
    "of int64": lambda old: old.long(),
    "of float64": lambda old: old.double(),
}


@pytest.mark.parametrize(
    ("case", "name"),
    [*((case, "step") for case in COUNTS), *((case, "rows.step") for case in list(COUNTS)[:3])],
)
def test_a_number_of_steps_in_another_form_continues_bit_for_bit(name, case):
    (weight, opt), (other, reference) = partly_constrained(), partly_constrained()
    given = copy.deepcopy(opt.state_dict())
    given["state"][0][name] = COUNTS[case](given["state"][0][name])
    opt.load_state_dict(given)
    for each, rule in ((weight, opt), (other, reference)):
        each.grad = torch.ones(10, 6)
        rule.step()
    assert_same(weight.detach(), other.detach())
    assert_same(opt.state_dict(), reference.state_dict())


def test_state_that_is_no_parameters_is_left_alone():
    _, opt = partly_constrained()
    opt.state["history"], opt.state["text"], opt.state["numbers"] = [1, 2], "step", {0: 1}
    other = copy.deepcopy(opt)
    assert other.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    assert [other.state[key] for key in ("history", "text", "numbers")] == [[1, 2], "step", {0: 1}]


def test_a_learning_rate_below_zero_of_a_schedule_passes_with_other_options_and_in_a_file():
    net, opt = trained("sgd", 1)
    opt.param_groups[0].update(lr=-0.01, momentum=0.8)
    train(net, opt, 1, 2)
    other = optimizer("sgd", net.parameters())
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert other.param_groups[0]["lr"] == -0.01


def test_state_that_was_only_asked_for_is_not_saved():
    net = model()
    opt = optimizer("sgd", net.parameters())
    assert not any(opt.state[parameter] for parameter in net.parameters())
    assert opt.state_dict()["state"] == {}


@functools.cache
def saver_of(name: str) -> Any:
    return trained(name, 1)[1]


@every_optimizer
def test_every_rule_takes_its_own_state_and_no_other(name):
    for other in RULES:
        saver, opt = saver_of(other), trained(name, 1)[1]
        if saver.rule == opt.rule:
            opt.load_state_dict(saver.state_dict())
            continue
        with pytest.raises(ValueError, match=f"must be one of {opt.rule}, got one of {saver.rule}"):
            opt.load_state_dict(saver.state_dict())


def test_subclasses_share_the_state_of_their_base() -> None:
    own = type("Own", (so.StiefelSGD,), {})
    saver, loader = (
        rule([nn.Parameter(torch.eye(3))], stiefel=True) for rule in (so.StiefelSGD, own)
    )
    loader.load_state_dict(saver.state_dict())


# ---- files -------------------------------------------------------------------------------------


def test_truncated_files_are_refused_before_they_reach_an_optimizer(tmp_path):
    """By torch.load, wherever the file ends."""
    path = tmp_path / "state.pt"
    torch.save(trained()[1].state_dict(), path)
    content = path.read_bytes()
    net, opt = trained(steps=1)
    before = snapshot(net, opt)
    for part in range(CUTS):
        path.write_bytes(content[: part * len(content) // CUTS])
        with pytest.raises((RuntimeError, EOFError, OSError, pickle.UnpicklingError)):
            opt.load_state_dict(torch.load(path, weights_only=True))
    assert_same(snapshot(net, opt), before)
    path.write_bytes(content)
    opt.load_state_dict(torch.load(path, weights_only=True))


def without_state(saved: Any, opt: Any, net: nn.Module) -> None:
    (group,) = saved["param_groups"]
    del saved["state"][group["params"][group["param_names"].index("up.weight")]]
    opt.state.pop(net.up.weight)


def without_mark(saved: Any, *_: Any) -> None:
    for group in saved["param_groups"]:
        del group["rule"], group["format"]


@pytest.mark.parametrize("change", [without_state, without_mark])
@tried_with("sgd", "adam-amsgrad")
def test_state_of_one_parameter_and_the_mark_may_be_missing(name, change):
    """As in torch, of one that was frozen or added; and in files of an earlier version."""
    net, opt = trained(name)
    saved = through_file(opt.state_dict())
    change(saved, opt, net)
    fresh = copy.deepcopy(net)
    fresh_opt = optimizer(name, fresh.named_parameters())
    fresh_opt.load_state_dict(saved)
    assert (fresh.up.weight in fresh_opt.state) == (change is without_mark)
    train(net, opt, 3, 6)
    train(fresh, fresh_opt, 3, 6)
    assert_same_training((net, opt), (fresh, fresh_opt))


def test_marks_are_saved_and_stay_out_of_the_groups():
    opt = trained("adam")[1]
    (group,) = through_file(opt.state_dict())["param_groups"]
    assert (group["rule"], group["format"]) == ("StiefelAdam", 1)
    opt.load_state_dict(opt.state_dict())
    assert not {"rule", "format", "readings"} & set(opt.param_groups[0])


# ---- from torch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if TABLE[name].of_torch])
def test_from_torch_the_plain_state_is_kept_and_the_rest_starts_anew(name):
    rule, options = TABLE[name].plain, TABLE[name].plain_options
    net = model()
    theirs = rule(net.parameters(), lr=1e-3, **options)
    train(net, theirs, 0, 3)
    saved = through_file(theirs.state_dict())
    so.project_(net)
    opt = optimizer(name, net.parameters(), lr=0.05)
    opt.load_state_dict(copy.deepcopy(saved))  # torch keeps the tensors themselves
    plain = [p for p in net.parameters() if not isinstance(p, so.ManifoldParameter)]
    for p in plain:
        assert_same(dict(opt.state[p]), dict(theirs.state[p]))
    assert not any(p in opt.state for p in constrained(net).values())
    assert opt.param_groups[0]["lr"] == 1e-3
    assert {key: opt.param_groups[0][key] for key in options} == options
    own = TABLE[name].own
    other = optimizer(name, [{"params": net.parameters(), **own}])
    other.load_state_dict(copy.deepcopy(saved))
    assert {key: other.param_groups[0][key] for key in own} == own
    # the plain parameters train on as with torch, the constrained ones as at a first step
    other = copy.deepcopy(net)
    others = rule(other.parameters(), lr=1e-3, **options)
    others.load_state_dict(saved)
    fresh = copy.deepcopy(net)
    fresh_opt = optimizer(name, fresh.parameters())
    loaded = {key: value for key, value in opt.param_groups[0].items() if key != "params"}
    fresh_opt.param_groups[0].update(loaded)
    for each, its in ((net, opt), (other, others), (fresh, fresh_opt)):
        backward(each, 3)
        its.step()
    theirs_now, fresh_now = dict(other.named_parameters()), dict(fresh.named_parameters())
    for key, p in net.named_parameters():
        expected = fresh_now if isinstance(p, so.ManifoldParameter) else theirs_now
        torch.testing.assert_close(p.detach(), expected[key].detach(), rtol=1e-6, atol=1e-7)
    assert so.orthonormality_error(net) < 1e-5


@pytest.mark.parametrize(
    ("source", "options"),
    [(so.StiefelAdam, {"stiefel": False}), (torch.optim.AdamW, {}), (torch.optim.Adam, {})],
)
def test_what_adamw_loads_decays_decoupled(source: Any, options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    earlier = source(net.parameters(), lr=0.02, weight_decay=0.1, **options)
    train(net, earlier, 0, 3)
    twin, saved = copy.deepcopy((net, earlier.state_dict()))
    ours = so.StiefelAdamW(net.parameters(), stiefel=False)
    ours.load_state_dict(earlier.state_dict())
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.02, weight_decay=0.1)
    theirs.load_state_dict({**saved, "param_groups": theirs.state_dict()["param_groups"]})
    for each, its in ((net, ours), (twin, theirs)):
        train(each, its, 3, 6)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert all(group["decoupled_weight_decay"] for group in ours.param_groups)


# ---- weights -------------------------------------------------------------------------------------


LOADED = {
    "drifted": (
        lambda value: value * 1.01,
        r"values that are off the manifold, \|X'X - I\| = 2e-02",
    ),
    "bfloat16": (torch.Tensor.bfloat16, r"values in torch.bfloat16 that are off the manifold"),
    "NaN": (lambda value: value * torch.nan, r"off the manifold, \|X'X - I\| = nan"),
}


@pytest.mark.parametrize("case", LOADED)
def test_weights_off_the_manifold_are_named_at_load(case):
    change, message = LOADED[case]
    net = nn.ModuleDict({"encoder": model()})
    saved = through_file(net.state_dict())
    saved["encoder.up.weight"] = change(saved["encoder.up.weight"])
    saved["encoder.out.weight"] = change(saved["encoder.out.weight"])  # plain
    with pytest.warns(UserWarning, match=message) as found:
        net.load_state_dict(saved)
    assert found[0].filename == __file__
    (text,) = [str(each.message) for each in found]
    assert text.startswith("`encoder.up.weight` is loaded with values")
    assert "call so.project_(model), or the first step projects" in text
    if case == "NaN":
        with pytest.raises(ValueError, match=r"`encoder.up.weight` must be finite"):
            so.project_(net)
        return
    copied = copy.deepcopy(net)
    so.project_(net)
    assert so.orthonormality_error(net) < 1e-5
    opt = so.StiefelSGD(copied.parameters(), lr=0.01)
    is_far = case == "drifted"  # nobody has looked at a copy yet: it is told in a forward pass
    with pytest.warns(UserWarning, match="was written to") if is_far else nullcontext():
        backward(copied["encoder"], 0)
    opt.step()
    assert so.orthonormality_error(copied) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_of_a_training_are_loaded_in_silence(dtype):
    """Also into another precision that is no finer, by copies, and where names are missing."""
    net = model().to(dtype)
    opt = optimizer("adam", net.parameters())
    train(net, opt, 0, 20)
    for target in (dtype, torch.bfloat16):
        fresh = pickle.loads(pickle.dumps(copy.deepcopy(model().to(target))))
        fresh.load_state_dict(through_file(net.state_dict()))
        fresh.load_state_dict({"out.bias": net.out.bias.detach()}, strict=False)


def test_a_shape_that_does_not_fit_is_torch_s_error_alone():
    net = model()
    saved = net.state_dict()
    saved["up.weight"] = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        net.load_state_dict(saved)


def test_hooks_of_a_state_dict_have_torchs_places() -> None:
    """A hook sees what is saved, and may wrap it; what a hook unwraps or renames is what counts."""
    net, opt = trained("sgd")
    seen: list[Any] = []
    opt.register_state_dict_post_hook(lambda _, packed: seen.append(copy.deepcopy(packed)))
    opt.register_state_dict_post_hook(lambda _, packed: {"wrapped": packed})
    saved = copy.deepcopy(opt.state_dict())
    assert saved.keys() == {"wrapped"}
    assert saved["wrapped"]["param_groups"] == seen[0]["param_groups"]
    assert "readings" in seen[0]["param_groups"][0]
    first = opt.register_state_dict_post_hook(lambda _, packed: {"own": packed}, prepend=True)
    assert opt.state_dict()["wrapped"]["own"].keys() == {"state", "param_groups"}
    assert seen.pop().keys() == {"own"}
    first.remove()
    for group in saved["wrapped"]["param_groups"]:
        group["rule"] = "Old"
    given = copy.deepcopy(saved)

    def unwrap(_: Any, packed: dict[str, Any]) -> dict[str, Any]:
        inner = packed["wrapped"]
        groups = [{**group, "rule": "StiefelSGD"} for group in inner["param_groups"]]
        return {**inner, "param_groups": groups}

    other = copy.deepcopy(net)
    loaded = optimizer("sgd", other.parameters())
    with pytest.raises(ValueError, match="must have the keys"):
        loaded.load_state_dict(saved)
    loaded.register_load_state_dict_pre_hook(unwrap)
    loaded.load_state_dict(saved)
    assert_same(saved, given)
    train(net, opt, 3, 6)
    train(other, loaded, 3, 6)
    assert_same(list(net.parameters()), list(other.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@tried_with("sgd", "adam")
@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (16, 32)])
def test_a_kept_scale_is_the_saved_one_but_for_rounding(
    dtype: torch.dtype, name: str, shape: tuple[int, int]
) -> None:
    """It is taken from loaded values again; another process begins with other values."""

    def build(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        net = so.constrain(nn.Linear(*shape).to(dtype), scale="keep")
        return net, optimizer(name, net.parameters())

    net, opt = build(0)
    descend(opt, lambda: net(torch.ones(3, shape[0], dtype=dtype)).square().sum(), 5)
    for seed in range(1, 9):
        other, loaded = build(seed)
        if shape == (16, 32) and dtype is not torch.bfloat16:
            with pytest.raises(ValueError, match="scale"):
                loaded.load_state_dict(opt.state_dict())
        other.load_state_dict(net.state_dict())
        loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
        assert torch.equal(other.weight, net.weight)


@pytest.mark.parametrize(
    ("change", "dtype"),
    in_turn([3e-6, 1.2e-5, 3e-5, 4e-5, 4e-4, 9.9e-4, 2e-3], [torch.float64, torch.float16]),
)
def test_a_scale_that_loading_has_kept_is_no_other_one(dtype: torch.dtype, change: float) -> None:
    """Weights that differ by less than rounding keep the scale that they had."""
    one = so.constrain(nn.Linear(16, 2048).to(dtype), scale="keep")
    other = copy.deepcopy(one)
    with torch.no_grad():
        other.weight.mul_(1 + change)
    other = so.constrain(other, scale="keep")
    layers = one, other
    saver, loader = (so.StiefelSGD(layer.parameters(), lr=0.1) for layer in layers)
    other.load_state_dict(one.state_dict())
    loader.load_state_dict(saver.state_dict())


# ---- options that change between runs ------------------------------------------------------------


EVEN = (0.05, 0.05)
# Options before and after, and sizes of the gradients: equal where the momentum goes on.
SWITCHES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], tuple[float, float]]] = {
    "transport": (so.StiefelSGD, {"transport": "projected"}, {"transport": "isometric"}, EVEN),
    "transport of Adam": (
        so.StiefelAdam,
        {"transport": "isometric"},
        {"transport": "projected"},
        EVEN,
    ),
    "nesterov": (so.StiefelSGD, {"nesterov": True}, {"nesterov": False}, EVEN),
    "nesterov of Adam": (so.StiefelAdam, {"nesterov": True}, {"nesterov": False}, EVEN),
    "radius": (so.StiefelAdam, {"radius": "virtual"}, {"radius": 2.0}, EVEN),
    "metric": (so.StiefelAdam, {"metric": "canonical"}, {"metric": "euclidean"}, EVEN),
}
for client in CLIENTS:
    SWITCHES |= client.SWITCHES
WAYS = ("in one process", "after a load", "after a copy", "before a save", "before a copy", "moved")


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("case", SWITCHES)
def test_options_that_change_between_runs_act_as_in_one_process(case: str, back: bool) -> None:
    """Momentum that they measure otherwise starts again, which is told; all else stays."""
    rule, *options, sizes = SWITCHES[case]
    (earlier, size), (later, then) = sorted(
        zip(options, sizes, strict=True), key=lambda row: (row[0] is options[0]) == back
    )
    starts_again = size != then
    ends: dict[str, Any] = {}
    for way in WAYS:
        weights = [so.ManifoldParameter(torch.eye(9, 4)), so.ManifoldParameter(torch.eye(4))]
        opt: Any = rule(weights, lr=0.01, **earlier)

        def step(scale: float, own: Any) -> None:
            for index, weight in enumerate(own.param_groups[-1]["params"]):
                weight.grad = scale * torch.arange(weight.numel()).view_as(weight).sin() + index
            own.step()

        for _ in range(9):
            step(size, opt)

        def switch(own: Any) -> None:
            fresh = rule([so.ManifoldParameter(torch.eye(3))], **later).param_groups[0]
            own.param_groups[-1].update({name: fresh[name] for name in {**earlier, **later}})

        def go_on(way: str = way, opt: Any = opt) -> Any:
            if way.startswith("before"):
                switch(opt)
            if way in ("after a load", "before a save"):
                again = rule(opt.param_groups[0]["params"], lr=0.01)
                again.load_state_dict(through_file(opt.state_dict()))
                opt = again
            elif "copy" in way:
                opt = copy.deepcopy(opt)
            if way == "moved":
                params, opt.param_groups[0]["params"] = opt.param_groups[0]["params"], []
                opt.param_groups.append({**opt.param_groups[0], "params": params})
            switch(opt)
            step(then, opt)
            ends[way] = [p.detach().clone() for p in opt.param_groups[-1]["params"]]

        told = [text for text in warnings_of(go_on) if "starts again" in text]
        assert len(told) == starts_again, (way, told)
        assert all("momentum of parameter 0 of group" in text for text in told)
    for way, values in ends.items():
        for value, expected in zip(values, ends["in one process"], strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=way)


@pytest.mark.parametrize("rule", [so.StiefelSGD, so.StiefelAdam])
@pytest.mark.parametrize("ways", [("projected", "isometric"), ("isometric", "projected")])
def test_a_transport_that_changes_leaves_the_velocity(rule: Any, ways: tuple[str, str]) -> None:
    waits, moves = (so.ManifoldParameter(torch.eye(9, 4, dtype=torch.float64)) for _ in range(2))
    opt = rule([waits, moves], lr=0.01, transport=ways[0])
    for step in range(3):
        waits.grad = moves.grad = torch.arange(36.0).view(9, 4).double().sin() + step
        opt.step()
    before = opt.velocity(waits)
    opt.param_groups[0]["transport"] = ways[1]
    waits.grad = None
    opt.step()
    torch.testing.assert_close(opt.velocity(waits), before)


def test_a_reading_that_changes_before_a_save_takes_its_state_along() -> None:
    """No file has the state of one reading beside another one."""
    layer = so.constrain(nn.Linear(4, 4, bias=False))
    opt = so.StiefelAdam(layer.parameters(), lr=0.1)
    layer.weight.grad = torch.randn(4, 4)
    opt.step()
    so.constrain(layer, scale=2.0)
    assert not opt.state_dict()["state"]
    so.StiefelAdam(layer.parameters(), lr=0.1).load_state_dict(opt.state_dict())


@pytest.mark.parametrize("name", RULES)
def test_state_that_could_not_be_loaded_is_told_of_as_it_is_saved(name: str) -> None:
    net = nn.Sequential(so.constrain(nn.Linear(6, 8)), nn.Linear(8, 8))
    opt = optimizer(name, [{"params": net.parameters(), "nonfinite": "ignore"}])
    for step in range(3):
        (step * net(torch.ones(2, 6))).square().sum().backward()
        opt.step()
    assert not warnings_of(opt.state_dict)
    key = next(k for k, v in opt.state[net[0].weight].items() if k != "step" and v.numel())
    opt.state[net[0].weight][key].view(-1)[0] = torch.nan
    opt.state[net[1].weight]["mine"] = torch.full((3,), torch.nan)  # plain, and loaded as it is
    with pytest.warns(UserWarning, match=rf"{key} of parameter 0 of group 0 must be finite to be"):
        saved = opt.state_dict()
    with pytest.raises(ValueError, match=rf"`{key} of parameter 0 of group 0` must be finite"):
        opt.load_state_dict(saved)
    opt.state.pop(net[0].weight)  # as the warning says
    assert not warnings_of(lambda: opt.load_state_dict(opt.state_dict()))
