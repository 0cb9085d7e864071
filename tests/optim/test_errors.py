"""Bad input gets one clear error with name, shape and remedy, and leaves everything untouched."""

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import in_turn, pairwise
from contract import (
    OPTIMIZERS,
    RULES,
    assert_same,
    backward,
    model,
    optimizer,
    snapshot,
    through_file,
)
from optimizers import CLIENTS, OF_CLASS
from torch import nn
from training import train

import stiefel_opt as so

SGD, ADAM = so.StiefelSGD, so.StiefelAdam
# Beside them those of clients: by what they have in common with torch's, and by their options.
RULES_OF = [row for row in OF_CLASS.values() if not (row.searches or row.follows_slope)]
ALL_RULES = [row.optimizer for row in RULES_OF if not row.decay_is_decoupled]


def tagged(*shape, manifold=None, dtype=torch.float32):
    """A tagged parameter that no constructor of ours has checked."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=dtype.is_floating_point)
    parameter.manifold = manifold or so.Stiefel()
    return parameter


def not_finite(value):
    parameter = tagged(3, 2)
    parameter.data[1, 1] = value
    return parameter


# ---- options -------------------------------------------------------------------------------------

ALL = [
    ({"lr": -0.1}, ValueError, r"`lr` must be in \[0, inf\), got -0.1"),
    ({"lr": math.nan}, ValueError, r"`lr` must be in \[0, inf\), got nan"),
    ({"lr": "0.1"}, TypeError, r"`lr` must be a number in \[0, inf\), got '0.1'"),
    ({"lr": torch.tensor(-0.1)}, ValueError, r"`lr` must be in \[0, inf\), got -0.1"),
    ({"lr": torch.ones(2)}, ValueError, r"`lr` must have one element, got shape \(2,\)"),
    ({"weight_decay": -1.0}, ValueError, r"`weight_decay` must be in \[0, inf\), got -1.0"),
    ({"maximize": 1}, TypeError, "`maximize` must be True or False, got 1"),
    ({"foreach": "yes"}, TypeError, "`foreach` must be True or False, got 'yes'"),
    ({"foreach": True, "fused": True}, ValueError, "`fused` must not be True together with"),
    (
        {"differentiable": True},
        ValueError,
        "`differentiable` must be False, got True; .*orthogonal",
    ),
    ({"stiefel": "yes"}, TypeError, "`stiefel` must be None, True, False or a Stiefel, got 'yes'"),
    ({"stiefel": {"heads": 0}}, ValueError, "`heads` must be at least 1, got 0"),
    ({"stiefel": {"foo": 2}}, ValueError, "`stiefel` must have no other keys than"),
]
METRICS = [
    ({"metric": 1.0}, ValueError, r"`metric` must be in \(-inf, 1\), got 1.0"),
    ({"metric": 7}, ValueError, r"`metric` must be in \(-inf, 1\), got 7"),
    ({"metric": math.nan}, ValueError, r"`metric` must be in \(-inf, 1\), got nan"),
    ({"metric": "riemannian"}, ValueError, r"`metric` must be one of \['canonical', 'euclidean'\]"),
]
FLOWS = [
    ({"transport": "parallel"}, ValueError, r"`transport` must be one of \['isometric', 'proj"),
    ({"transport": "published"}, TypeError, "take so.PublishedSGD or so.PublishedAdam"),
]
SGD_ONLY = [
    ({"momentum": -0.1}, ValueError, r"`momentum` must be in \[0, inf\), got -0.1"),
    ({"dampening": "0"}, TypeError, "`dampening` must be a number"),
    ({"nesterov": True, "momentum": 0.0}, ValueError, "`nesterov` must come with momentum > 0"),
    ({"nesterov": True, "dampening": 0.1}, ValueError, "`nesterov` must come with momentum > 0"),
]
ADAM_ONLY = [
    ({"betas": (1.0, 0.9)}, ValueError, r"`betas\[0\]` must be in \[0, 1\), got 1.0"),
    ({"betas": (0.9, -0.1)}, ValueError, r"`betas\[1\]` must be in \[0, 1\), got -0.1"),
    ({"betas": 0.9}, TypeError, r"`betas` must be two numbers in \[0, 1\), got 0.9"),
    ({"eps": -1e-8}, ValueError, r"`eps` must be in \[0, inf\), got -1e-08"),
    ({"amsgrad": None}, TypeError, "`amsgrad` must be True or False, got None"),
    ({"lr": torch.tensor(0.1), "foreach": True}, ValueError, "`lr` must be a number with foreach"),
]
RADII = [
    ({"radius": "virtuel"}, ValueError, r"`radius` must be one of \['angle', 'virtual'\]"),
    ({"radius": 0}, ValueError, r"`radius` must be in \(0, inf\), got 0"),
    ({"radius": -1}, ValueError, "`radius`"),
    ({"nesterov": 1}, TypeError, "`nesterov`"),
]
TABLES = [
    (ALL, ALL_RULES),
    (RADII, [ADAM, so.StiefelAdamW]),
    (METRICS, [rule for rule in ALL_RULES if "metric" in OF_CLASS[rule].own]),
    (FLOWS, [rule for rule in ALL_RULES if "transport" in OF_CLASS[rule].own]),
    (SGD_ONLY, [rule for rule in ALL_RULES if OF_CLASS[rule].proportional]),
    (ADAM_ONLY, [rule for rule in ALL_RULES if OF_CLASS[rule].adaptive]),
    *(row for client in CLIENTS for row in client.REFUSED),
]
OPTIONS = [(rule, *row) for table, rules in TABLES for row, rule in in_turn(table, rules)]


def assert_refused(opt, net, group, error, message):
    before = snapshot(net, opt)
    given = {key: value for key, value in group.items() if key != "params"}
    copied = dict(given)
    with pytest.raises(error, match=message):
        opt.add_param_group({"params": group["params"], **given})
    assert given == copied
    assert_same(snapshot(net, opt), before)
    backward(net, 1)
    opt.step()


BAD_GROUPS = {
    "named": (lambda q: {"params": [("named", q)]}, ValueError),
    "no leaf": (lambda q: {"params": [q, torch.ones(4, 2, requires_grad=True) * 2]}, ValueError),
    "set": (lambda q: {"params": {q}}, TypeError),
    "no tensor": (lambda q: {"params": [q, "bias"]}, TypeError),
    "inf": (lambda q: {"params": [q, nn.Parameter(torch.full((4, 2), torch.inf))]}, ValueError),
    "vector": (lambda q: {"params": [q, nn.Parameter(torch.ones(3))]}, ValueError),
    "synonym": (lambda q: {"params": [q], "wd": 0.1}, TypeError),
    "option": (lambda q: {"params": [q], "lr": -1.0}, ValueError),
    "reading": (lambda q: {"params": [q], "stiefel": so.Stiefel(heads=3)}, ValueError),
    "twice": (lambda q: {"params": [q, q]}, ValueError),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("case", "rule"), in_turn(BAD_GROUPS, ALL_RULES))
def test_a_refused_group_leaves_every_parameter_as_it_was(rule, case, late):
    build, error = BAD_GROUPS[case]
    first, q = (nn.Parameter(torch.randn(4, 2)) for _ in range(2))
    before = [first.detach().clone(), q.detach().clone()]
    bad = {"stiefel": True, **build(q)}
    if late:
        opt = rule([so.ManifoldParameter(torch.eye(3))], lr=0.1)
        with pytest.raises(error):
            opt.add_param_group(bad)
        assert len(opt.param_groups) == 1
    else:
        with pytest.raises(error):
            rule([{"params": [first], "stiefel": True}, bad], lr=0.1)
    assert all(torch.equal(p, value) for p, value in zip((first, q), before, strict=True))
    assert not hasattr(first, "manifold")
    assert not hasattr(q, "manifold")


@pytest.mark.parametrize("rule", sorted({r for _, rules in TABLES for r in rules}, key=str))
def test_every_rule_checks_all_its_options(rule):
    for options, error, message in [
        row for table, rules in TABLES if rule in rules for row in table
    ]:
        with pytest.raises(error, match=message):
            rule([so.ManifoldParameter(torch.eye(3, 2))], **options)


@pytest.mark.parametrize(("rule", "options", "error", "message"), OPTIONS)
def test_options_are_checked_for_late_groups(rule, options, error, message):
    p = so.ManifoldParameter(torch.eye(3, 2))
    net = nn.Sequential(so.constrain(nn.Linear(8, 8)))
    opt = rule(net.parameters())
    backward(net, 0)
    opt.step()
    assert_refused(opt, net, {"params": [p], **options}, error, message)


LATER = [
    (rule, options, error, message)
    for rule, options, error, message in OPTIONS
    if "stiefel" not in options
    and not ("lr" in options and error is ValueError)
    and not ("steps" in options and error is TypeError)
] + [
    (SGD, {"lr": None}, TypeError, r"`lr` must be a number in \[0, inf\), got None"),
    *(
        (rule, {"lr": lr}, ValueError, "`lr` must be finite, got (nan|inf); look at its schedule")
        for rule, lr in in_turn(
            [ADAM, SGD], [math.inf, math.nan, torch.tensor(math.inf), torch.tensor(math.nan)]
        )
    ),
    (SGD, {"lr": torch.ones(2)}, ValueError, r"`lr` must have one element, got shape \(2,\)"),
    (ADAM, {"nonfinite": "drop"}, ValueError, "`nonfinite` must be one of"),
]


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize(("rule", "options", "error", "message"), LATER)
def test_options_that_a_group_is_given_later_are_checked_before_anything_moves(
    rule, options, error, message, taken
):
    """Before the first step and behind it, and again by a second try."""
    net = nn.Sequential(so.constrain(nn.Linear(8, 8)), nn.Linear(8, 8))
    opt = rule(so.param_groups(net))
    for step in range(taken):
        backward(net, step)
        opt.step()
    backward(net, 1)
    group, earlier = opt.param_groups[-1], dict(opt.param_groups[-1])
    group.update(options)
    before = snapshot(net, opt)
    for _ in range(2):
        with pytest.raises(error, match=message):
            opt.step()
        assert_same(snapshot(net, opt)[0], before[0])
    group.update(earlier)
    opt.step()
    assert not torch.equal(net[1].weight, before[0][2][0])


MISSPELLED = {
    "weightdecay": "weight_decay",
    "weight-decay": "weight_decay",
    "LR": "lr",
    "learning_rate": "lr",
    "non_finite": "nonfinite",
    "Maximise": "maximize",
    "maximise": "maximize",
    "step_size": "lr",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "heads": "stiefel",
    "blocks": "stiefel",
    "manifold": "stiefel",
    "orthogonal": "stiefel",
    "constrained": "stiefel",
    "scale": "stiefel",
}
# Keys that torch writes into groups: options of its optimizers, and what schedules store there.
OF_TORCH = {
    key
    for file in Path(torch.optim.__file__).parent.rglob("*.py")
    for key in re.findall(r'group(?:\[|\.setdefault\()"(\w+)"', file.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize(("key", "name"), in_turn(MISSPELLED, RULES))
def test_a_misspelled_option_of_a_group_is_refused(name, key):
    net = nn.Sequential(so.constrain(nn.Linear(8, 8)))
    meant = rf"did you mean {MISSPELLED[key]}\? The options are: "
    message = rf"`{key}` must be an option of \w+, got 3; {meant}"
    with pytest.raises(TypeError, match=message):
        optimizer(name, so.param_groups(net, stiefel={key: 3}))
    opt = optimizer(name, net.parameters())
    group = {"params": [so.ManifoldParameter(torch.eye(3, 2))], key: 3}
    assert_refused(opt, net, group, TypeError, message)


@pytest.mark.parametrize(
    ("rule", "key", "option"),
    [
        (so.StiefelAdam, "epsilon", "eps"),
        (so.StiefelSGD, "beta", "momentum"),
        (so.StiefelSGD, "momentums", "momentum"),
        (so.StiefelAdamW, "beta", "betas"),
        (so.StiefelAdam, "momentum", "betas"),
        (so.StiefelAdam, "row_dims", "stiefel"),
        *(row for client in CLIENTS for row in client.SYNONYMS),
    ],
)
@pytest.mark.parametrize("place", ["group", "constructor"])
def test_a_synonym_of_an_option_is_refused(rule, key, option, place):
    weight = so.ManifoldParameter(torch.eye(3, 2))
    with pytest.raises(TypeError, match=rf"`{key}` must .* did you mean {option}\?"):
        rule([{"params": [weight], key: 0.1}]) if place == "group" else rule([weight], **{key: 0.1})


def test_a_word_that_means_no_option_is_python_s_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        so.StiefelAdam([so.ManifoldParameter(torch.eye(3, 2))], colour=1)
    options = list(inspect.signature(so.StiefelAdam).parameters)
    assert options[:3] == ["params", "lr", "betas"]


@pytest.mark.parametrize("given", [lambda net: net, lambda net: [{"params": net}]])
@pytest.mark.parametrize("name", RULES)
def test_a_module_in_place_of_parameters_is_refused(name, given):
    net = nn.Sequential(so.constrain(nn.Linear(8, 8)))
    rule = type(optimizer(name, net.parameters()))
    message = r"`params` must be parameters, got a Sequential; pass model.parameters\(\)"
    with pytest.raises(TypeError, match=message):
        rule(given(net), lr=0.1)


def test_no_word_that_is_refused_is_a_key_of_torch():
    assert {"initial_lr", "betas", "swa_lr", "max_momentum"} <= OF_TORCH
    assert not OF_TORCH & MISSPELLED.keys()


# Keys of schedules, of torch's other optimizers, of timm and of users.
FOREIGN = "initial_lr min_lr max_lr swa_lr lr_scale lr_mult base_momentum max_momentum name "
FOREIGN += "group_name layer_decay initial_wd weight_decouple rho centered alpha lambd use_muon "
FOREIGN += "fixed_decay"


@pytest.mark.parametrize("name", RULES)
def test_other_keys_of_a_group_pass(name):
    keys = dict.fromkeys(FOREIGN.split(), 1)
    groups = so.param_groups(so.constrain(nn.Linear(8, 8)), **keys)
    opt = optimizer(name, groups)
    assert all(keys.items() <= group.items() for group in opt.param_groups)
    again = type(opt)(opt.param_groups)  # all options, and what torch adds
    assert [*again.param_groups[0]] == [*opt.param_groups[0]]


# ---- parameters ----------------------------------------------------------------------------------

ROWS = so.Stiefel(rows=(2, 9))
PARAMETERS = {
    "1-D": (lambda: tagged(3), ValueError, r"at least 2 dim.* got shape \(3,\); leave it untagged"),
    "0-D": (tagged, ValueError, r"must have at least 2 dimensions"),
    "heads": (
        lambda: tagged(6, 3, manifold=so.Stiefel(heads=4)),
        ValueError,
        r"divide its 6 rows, got 4; its shape is \(6, 3\); change heads or rows",
    ),
    "rows": (
        lambda: tagged(6, 3, manifold=ROWS),
        ValueError,
        r"lie in \[0, 6\], got \(2, 9\); its shape is \(6, 3\)",
    ),
    "integer": (
        lambda: tagged(3, 2, dtype=torch.int64),
        TypeError,
        "must be one of float32, float64, .* to be constrained, got torch.int64; convert it",
    ),
    "float8": (
        lambda: tagged(3, 2, dtype=torch.float8_e4m3fn),
        TypeError,
        "got torch.float8_e4m3fn; convert it",
    ),
    "empty": (lambda: tagged(0, 3), ValueError, r"must not be empty, got shape \(0, 3\); leave it"),
    "NaN": (lambda: not_finite(math.nan), ValueError, "must be finite, got NaN or inf; initialise"),
    "inf": (lambda: not_finite(math.inf), ValueError, "must be finite, got NaN or inf; initialise"),
}


@pytest.mark.parametrize(
    ("case", "name", "named"),
    in_turn([*PARAMETERS, "heads"], ["sgd", "adam"], [False, False, True, True]),
)
def test_parameters_that_cannot_be_constrained_are_named(name, named, case):
    build, error, message = PARAMETERS[case]
    pairs = [("good", so.ManifoldParameter(torch.eye(4, 2))), ("layer.bad", build())]
    listed = pairs if named else [parameter for _, parameter in pairs]
    label = "layer.bad" if named else "parameter 1 of group {}"
    of = r"`((heads|rows) of )?" + label.format(0) + "` .*"
    with pytest.raises(error, match=of + message):
        optimizer(name, listed)
    net = nn.Sequential(so.constrain(nn.Linear(8, 8)))
    opt = optimizer(name, net.named_parameters() if named else net.parameters())
    backward(net, 0)
    opt.step()
    of = r"`((heads|rows) of )?" + label.format(1) + "` .*"
    assert_refused(opt, net, {"params": listed}, error, of + message)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["constrained", "plain"])
def test_a_parameter_listed_twice_is_named(name, kind):
    net = model()
    p = net.q.weight if kind == "constrained" else net.out.bias
    twice = "must appear once, got it twice; list every parameter in one group only"
    with pytest.raises(ValueError, match=f"`parameter 1 of group 0` {twice}"):
        optimizer(name, [p, p])
    with pytest.raises(ValueError, match=f"`b` {twice}"):
        optimizer(name, [("a", p), ("b", p)])
    with pytest.raises(ValueError, match=f"`parameter 0 of group 1` {twice}"):
        optimizer(name, [{"params": [p]}, {"params": [p]}])
    opt = optimizer(name, net.parameters())
    assert_refused(opt, net, {"params": [p]}, ValueError, f"`parameter 0 of group 1` {twice}")


@pytest.mark.parametrize("rule", ALL_RULES)
def test_what_torch_refuses_is_refused(rule):
    for params, error in (
        ([], ValueError),
        (torch.ones(3, 3, requires_grad=True), TypeError),
        ([1.0], TypeError),
        ([{"params": {torch.ones(3, 3, requires_grad=True)}}], TypeError),  # a set
        ([torch.ones(3, requires_grad=True) * 2], ValueError),  # no leaf
        ([("a", tagged(2, 2)), tagged(2, 2)], ValueError),  # half of them named
        ([[tagged(2, 2)]], TypeError),
    ):
        with pytest.raises(error):
            torch.optim.SGD(params, lr=0.1)
        with pytest.raises(error):
            rule(params)


# ---- gradients and values at a step --------------------------------------------------------------


def sparse(p):
    p.grad = torch.eye(*p.shape).to_sparse()


def other_shape(p):
    p.grad.data = torch.ones(1, *p.shape[1:])


def other_dtype(p):
    p.grad.data = p.grad.double()


def value_nan(p):
    with torch.no_grad():
        p.view(-1)[0] = math.nan


BAD_AT_A_STEP = {
    "sparse": (sparse, TypeError, r"`grad of {}` must be dense, got .*shape {} .*sparse=False"),
    "shape": (
        other_shape,
        ValueError,
        r"`grad of {}` must have shape {} .*, got shape \(1, .*; set it to None and run backward",
    ),
    "dtype": (
        other_dtype,
        ValueError,
        r"`grad of {}` must have shape {} .* and dtype torch.float64",
    ),
    "NaN": (value_nan, ValueError, r"`{}` must be finite, got NaN or inf in a tensor of shape {}"),
}


@pytest.mark.parametrize(
    ("case", "name", "steps"), pairwise(BAD_AT_A_STEP, ["sgd", "adam"], [0, 1])
)
def test_a_bad_gradient_or_value_is_named_before_anything_moves(case, name, steps):
    """The last of two equal constrained parameters is bad: the first must not have moved."""
    named = steps == 0
    spoil, error, message = BAD_AT_A_STEP[case]
    net = model()
    opt = optimizer(name, net.named_parameters() if named else net.parameters())
    for step in range(steps):
        backward(net, step)
        opt.step()
    backward(net, steps)
    kept = net.k.weight.detach().clone(), net.k.weight.grad
    spoil(net.k.weight)
    values = {n: p.detach().clone() for n, p in net.named_parameters()}
    states = {n: {k: t.clone() for k, t in opt.state[p].items()} for n, p in states_of(net, opt)}
    label = "k.weight" if named else "parameter 2 of group 0"
    with pytest.raises(error, match=message.format(label, re.escape("(6, 8)"))):
        opt.step()
    for n, p in net.named_parameters():
        assert torch.equal(p.nan_to_num(7.0), values[n].nan_to_num(7.0)), n
    found = {n: dict(opt.state[p]) for n, p in states_of(net, opt)}
    assert_same({n: found[n] for n in states}, states)
    for n in found.keys() - states.keys():  # as before a first step
        assert found[n]["step"] == 0
        assert not any(found[n][key].any() for key in found[n] if "factor" not in key)
    net.k.weight.data.copy_(kept[0])
    net.k.weight.grad = None
    opt.step()
    assert torch.isfinite(net.q.weight).all()
    assert so.orthonormality_error(net) < 1e-5


def states_of(net, opt):
    return [(n, p) for n, p in net.named_parameters() if p in opt.state]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_gradient_of_another_shape_is_named(name):
    """torch would broadcast it."""
    net = model()
    opt = optimizer(name, net.named_parameters())
    backward(net, 0)
    net.out.weight.grad.data = torch.ones(1, 14)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with pytest.raises(ValueError, match=r"`grad of out.weight` must have shape \(2, 14\)"):
        opt.step()
    assert_same({n: p.detach() for n, p in net.named_parameters()}, before)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_a_gradient_of_another_dtype_says_who_makes_one():
    weight = so.ManifoldParameter(torch.eye(8, 3, dtype=torch.bfloat16))
    opt = so.StiefelSGD([("w", weight)], lr=0.1)
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(8, 3)
    with pytest.raises(ValueError, match=r"`grad of w` must .* again with no other grad_dtype"):
        opt.step()


def test_sparse_gradients_of_plain_parameters():
    """As in torch: SGD takes them, Adam refuses."""
    table = nn.Embedding(4, 3, sparse=True)
    other = nn.Embedding(4, 3, sparse=True)
    other.load_state_dict(table.state_dict())
    opts = [SGD(table.parameters(), stiefel=False), torch.optim.SGD(other.parameters(), 1e-3, 0.9)]
    for net, opt in zip((table, other), opts, strict=True):
        train(opt, lambda net=net: net(torch.tensor([1, 1, 3])).sum(), 3)
    assert torch.equal(table.weight, other.weight)
    adam = ADAM([("table", table.weight)], stiefel=False)
    before = table.weight.detach().clone()
    with pytest.raises(TypeError, match=r"`grad of table` must be dense, got .*shape \(4, 3\)"):
        adam.step()
    assert torch.equal(table.weight, before)


def test_numbers_of_numpy_become_plain_ones() -> None:
    weight = so.ManifoldParameter(torch.eye(6, 3))
    opt = so.StiefelSGD([weight], lr=np.float32(0.5), momentum=np.float64(0.5))
    assert type(opt.param_groups[0]["lr"]) is type(opt.param_groups[0]["momentum"]) is float
    weight.grad = torch.ones_like(weight)
    opt.step()
    through_file(opt.state_dict())
