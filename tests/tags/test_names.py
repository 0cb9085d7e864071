"""Several weights by one call: patterns, lists, functions; and blocks that would mix three."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import warnings_of
from torch import nn
from training import train

import stiefel_opt as so
from stiefel_opt.tags.parameter import project_untagged


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Module()
    net.gru, net.cell = nn.GRU(3, 4, num_layers=2), nn.LSTMCell(3, 4)
    net.conv, net.head = nn.Conv2d(2, 4, 3, groups=2), nn.Linear(4, 4)
    return net


GATES = ["gru.weight_hh_l0", "gru.weight_hh_l1"]
NAMES: dict[str, tuple[Any, list[str]]] = {
    "a name": ("head.weight", ["head.weight"]),
    "a pattern": ("*.weight_hh_l*", GATES),
    "a pattern of one place": ("gru.weight_?h_l0", ["gru.weight_ih_l0", "gru.weight_hh_l0"]),
    "a list": (["head.weight", "*.weight_hh*"], ["head.weight", *GATES, "cell.weight_hh"]),
    "a generator": ((each for each in GATES), GATES),
    "names twice": ([*GATES, "gru.*_hh_l0"], None),
    "a function": (lambda name, p: "conv" in name and p.ndim > 1, ["conv.weight"]),
}
NAMES["names twice"] = ([*GATES, "gru.weight_hh_l[0]"], GATES)


@pytest.mark.parametrize("kind", NAMES)
def test_several_weights_are_constrained_as_one_by_one(kind: str) -> None:
    asked, expected = NAMES[kind]
    net, twin = model(), model()
    assert so.constrain(net, asked) is net
    for name in expected:
        so.constrain(twin, name)
    assert [line.name for line in so.report(net).lines] == sorted(
        expected, key=[name for name, _ in net.named_parameters()].index
    )
    for name, p in net.named_parameters():
        assert torch.equal(p, twin.get_parameter(name))
        assert getattr(p, "manifold", None) == getattr(twin.get_parameter(name), "manifold", None)


@pytest.mark.parametrize("scale", ["keep", 2.0])
def test_options_are_for_all(scale: Any) -> None:
    net = so.constrain(model(), lambda _, p: p.ndim == 2, scale=scale, project=True)
    scales = [p.manifold.scale for p in net.parameters() if p.ndim == 2]
    assert len(scales) == 7
    assert len(set(scales)) == (1 if scale == 2.0 else 7)
    assert so.orthonormality_error(net) < 1e-5


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("*.weight_xx", ValueError, r"`name` must match a parameter of this Module, got '\*.weig"),
        (["head.weight", "no*"], ValueError, r"got 'no\*'; its parameters are: gru.weight_ih_l0"),
        ([], ValueError, r"`name` must match a parameter of this Module, got \[\]"),
        (lambda *_: False, ValueError, r"must match a parameter .*, got <lambda>; its parameters"),
        (["head.weight", "head.wait"], ValueError, r"did you mean head.weight"),
        ("*", ValueError, r"`gru.bias_ih_l0` must have at least 2 dimensions"),
        ("head", ValueError, r"did you mean head.weight"),
        (lambda _: True, TypeError, r"`name` must take the name and the parameter, got a function"),
        (torch.eye(2), TypeError, r"be the name of a parameter, got a tensor of .*; pass 'weight'"),
        (3, TypeError, "`name` must be the name of a parameter, got 3"),
    ],
)
def test_what_matches_nothing_or_too_much_changes_nothing(
    name: Any, error: Any, message: str
) -> None:
    net = model()
    before = {each: p.clone() for each, p in net.named_parameters()}
    with pytest.raises(error, match=message):
        so.constrain(net, name)
    assert not so.report(net).lines
    assert all(torch.equal(p, before[each]) for each, p in net.named_parameters())


# ---- blocks across three matrices --------------------------------------------------------------


def test_heads_that_mix_queries_keys_and_values_are_told() -> None:
    (text,) = warnings_of(lambda: so.constrain(nn.Linear(64, 192), heads=4))
    assert "if it holds queries, keys and values, 4 blocks of 48 rows mix them" in text
    assert "pass heads=12 for the heads of all three, or rows=((0, 64), (64, 128)) as well" in text
    stored = nn.Linear(192, 64)  # as GPT-2 stores it
    assert len(warnings_of(lambda: so.constrain(stored, heads=4, transposed=True))) == 1
    silent: list[dict[str, Any]] = [{"heads": 12}, {"heads": 4, "rows": ((0, 64), (64, 128))}, {}]
    silent += [{"heads": 1}, {"heads": 3}, {"heads": 4, "rows": (0, 192)}]
    for options in silent:
        assert not warnings_of(lambda: so.constrain(nn.Linear(64, 192), **options))  # noqa: B023
    assert not warnings_of(lambda: so.constrain(nn.Linear(64, 128), heads=4))  # may be queries
    assert not warnings_of(lambda: so.constrain(nn.MultiheadAttention(8, 4), "in_proj_weight"))


@pytest.mark.parametrize("name", ["kv_proj", "to_kv", "Wkv", "key_value"])
def test_heads_that_mix_keys_and_values_are_told_by_the_name(name: str) -> None:
    def layer() -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(64, 128), "qkv": nn.Linear(64, 192)})

    weight = f"{name}.weight"
    (text,) = warnings_of(lambda: so.constrain(layer(), weight, heads=4))
    assert f"`{weight}` seems to hold keys and values: 4 blocks of 32 rows mix them" in text
    assert "pass rows=((0, 64), (64, 128)) as well" in text
    rows = ((0, 64), (64, 128))
    assert not warnings_of(lambda: so.constrain(layer(), weight, heads=4, rows=rows))
    assert not warnings_of(lambda: so.constrain(layer(), "qkv.weight", heads=12))


# ---- groups of untagged weights ----------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-23, 1.0, 1e20])
def test_the_length_of_a_move_is_measured_at_every_size(size: float) -> None:
    layer = nn.Linear(4, 8)
    with torch.no_grad():
        layer.weight.copy_(size * so.random_point(8, 4))
    (line,) = so.report(so.constrain(layer)).lines
    assert line.moved == pytest.approx(abs(1 / size - 1), rel=1e-5, abs=1e-6)


def test_untagged_weights_of_a_group_are_projected() -> None:
    torch.manual_seed(0)
    tagged = so.ManifoldParameter(torch.randn(8, 4), project=False)
    plain, point = nn.Parameter(torch.randn(8, 4)), nn.Parameter(so.random_point(8, 4))
    meta = nn.Parameter(torch.empty(8, 4, device="meta"))
    kept = tagged.detach().clone(), point.detach().clone()
    project_untagged([tagged, plain, point, meta], so.Stiefel(heads=2).as_dict())
    assert torch.equal(tagged, kept[0])
    assert tagged.manifold == so.Stiefel()
    assert plain.manifold == meta.manifold == so.Stiefel(heads=2)
    assert so.orthonormality_error(plain) < 1e-5
    again = nn.Parameter(kept[1].clone())
    project_untagged([again], True)
    assert torch.equal(again, kept[1])
    for wrong in (torch.full((8, 4), float("nan")), torch.ones(4).expand(8, 4)):
        whole = [nn.Parameter(torch.randn(8, 4)), nn.Parameter(wrong)]
        before = whole[0].detach().clone()
        with pytest.raises(ValueError, match=r"`parameter of shape \(8, 4\)` must (be|not)"):
            project_untagged(whole, True)
        assert torch.equal(whole[0], before)
        assert not hasattr(whole[0], "manifold")


def test_a_group_that_a_warning_stops_leaves_its_weight_as_it_was() -> None:
    weight = nn.Parameter(torch.cat([torch.ones(63), torch.tensor([99.0])]).diag())
    opt = so.StiefelSGD([nn.Parameter(torch.ones(2))], lr=0.1, stiefel=False)
    before = weight.detach().clone()
    with pytest.raises(UserWarning, match="seems trained"):
        opt.add_param_group({"params": [weight], "stiefel": True})
    assert len(opt.param_groups) == 1
    assert torch.equal(weight, before)
    assert not hasattr(weight, "manifold")


@pytest.mark.parametrize("key", [True, so.Stiefel(heads=2), {"heads": 2, "scale": 3.0}])
def test_a_weight_of_a_group_counts_as_one_that_was_constrained(key: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2))
    groups = [
        {"params": model[0].parameters(), "stiefel": key},
        {"params": model[1].parameters(), "lr": 1e-3},
    ]
    optimizer = so.StiefelSGD(groups, lr=1.0)
    train(optimizer, lambda: (model(torch.randn(8, 8)) - 1).relu().square().mean(), 60)
    (line,) = so.report(model, optimizer).lines
    assert (line.name, line.skipped) == ("0.weight", 0)
    assert line.error < 1e-5
    so.project_(model)
    with pytest.warns(UserWarning, match="weight of shape .* would not stay orthonormal"):
        torch.optim.Adam(model.parameters()).step()
    assert so.release(model, "0.weight")[0].weight.__class__ is nn.Parameter


# ---- a table for any optimizer -----------------------------------------------------------------


def wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As accelerate has it: an optimizer with another one inside."""
    outer = torch.optim.SGD(optimizer.param_groups[0]["params"], lr=0.1)
    outer.optimizer = optimizer  # type: ignore[attr-defined]
    return outer


def test_a_report_takes_any_optimizer() -> None:
    net = so.constrain(nn.Linear(4, 4))
    own = so.StiefelSGD(net.parameters(), lr=0.1)
    net(torch.ones(1, 4)).sum().backward()
    own.step()
    table = str(so.report(net, torch.optim.Adam(net.parameters())))
    head, _, line = table.splitlines()
    assert "skipped steps" in head
    assert "last step" in head
    assert line.split().count("-") == 2
    assert so.report(net, torch.optim.Adam(net.parameters())).lines[0].skipped is None
    assert str(so.report(net, own)) == str(so.report(net, wrapped(own)))
    assert so.report(net, own).lines[0].skipped == 0
    assert "skipped" not in str(so.report(net))
    for other in (3, net, SimpleNamespace(param_groups=[])):
        with pytest.raises(TypeError, match="`optimizer` must be None or an optimizer, got "):
            so.report(net, other)  # type: ignore[arg-type]
