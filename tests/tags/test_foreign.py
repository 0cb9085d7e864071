"""Optimizers and computed weights of others: each is told once, by name and with a remedy."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from contract import optimizer, warnings_of
from optimizers import OPTIMIZERS
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import stiefel_opt as so
from stiefel_opt.tags.foreign import WHILE_COMPILING
from stiefel_opt.tags.manifold import manifold_of


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> nn.Module:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    return net


# ---- optimizers that know no constraint --------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta]
)
def test_an_optimizer_of_torch_warns_once_at_its_first_step(rule: Any) -> None:
    net = model()
    so.constrain(net, "0.weight")
    optimizer = rule(net.parameters(), lr=1e-2)
    (text,) = warnings_of(lambda: train(net, optimizer))
    assert "`0.weight` would not stay orthonormal" in text
    assert f"{rule.__name__} knows no constraint" in text
    assert "so.StiefelAdamW" in text
    assert "so.on_manifold(optimizer)" in text
    so.constrain(net, "2.weight", learn_scale=True)
    (text,) = warnings_of(lambda: train(net, rule(net.parameters(), lr=1e-2)))
    assert "`0.weight` and 1 more" in text
    assert "so.on_manifold(optimizer)" not in text  # it refuses a learned scale


@pytest.mark.parametrize("scheduled", [False, True])
def test_the_warning_points_to_the_step(scheduled: bool) -> None:
    """Also where a schedule of torch has wrapped it."""
    net = so.constrain(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="`weight`") as caught:
        train(net, optimizer)
    assert caught[0].filename == __file__


def test_a_closure_a_group_added_late_and_a_late_constraint_are_seen() -> None:
    net = model()
    first, second = torch.optim.SGD(net[2].parameters(), 0.1), torch.optim.Adam(net.parameters())
    assert not warnings_of(lambda: (train(net, first), train(net, second)))
    so.constrain(net[0])
    assert not warnings_of(lambda: train(net, first))
    assert len(warnings_of(lambda: train(net, second))) == 1
    closed = torch.optim.LBFGS(net.parameters())
    loss = lambda: net(torch.ones(2, 8)).square().sum()  # noqa: E731
    assert len(warnings_of(lambda: closed.step(loss))) == 1


@pytest.mark.parametrize("late", ["group", "thaw"])
def test_a_weight_that_an_optimizer_meets_late_is_seen(late: str) -> None:
    net = so.constrain(model(), "0.weight")
    weights = (net if late == "thaw" else net[2]).parameters()
    optimizer = torch.optim.SGD(weights, 0.1)
    net[0].weight.requires_grad_(late != "thaw")
    assert not warnings_of(lambda: train(net, optimizer))
    net[0].weight.requires_grad_(True)
    if late == "group":
        optimizer.add_param_group({"params": list(net[0].parameters())})
    (text,) = warnings_of(lambda: train(net, optimizer))
    assert "`0.weight` would not stay orthonormal" in text


@pytest.mark.skipif(not WHILE_COMPILING, reason="the compiler of torch cannot call it")
def test_a_compiled_step_is_seen() -> None:
    net = so.constrain(model(), "0.weight")
    optimizer = torch.optim.AdamW(net.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    train(net, torch.optim.SGD(net[2].parameters(), 0.1), 1)  # so that there are gradients
    texts = warnings_of(lambda: (step(), step()))
    assert sum("`0.weight` would not stay orthonormal" in text for text in texts) == 1


def test_parameters_by_hand_and_copies_and_pickles_are_seen() -> None:
    weight = so.ManifoldParameter(torch.eye(3))
    weight.grad = torch.ones(3, 3)
    (text,) = warnings_of(torch.optim.SGD([weight], 0.1).step)
    assert "A weight of shape (3, 3) would not" in text
    net = so.constrain(nn.Linear(8, 8))
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert len(warnings_of(lambda: train(twin, torch.optim.SGD(twin.parameters(), 0.1)))) == 1  # noqa: B023


class Wrapper(torch.optim.Optimizer):
    """As packages for gradient accumulation, sharded state and the like have it."""

    def __init__(self, params: Any, rule: Any = so.StiefelSGD) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = rule(params)

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


OWN_RULES: list[Any] = [
    *(lambda p, name=name: optimizer(name, p) for name in OPTIMIZERS),
    lambda p: so.StiefelSGD(p, lr=0.1, stiefel=False),
    lambda p: type("Mine", (so.StiefelSGD,), {"__module__": "mine"})(p, lr=0.1),
    Wrapper,
]


@pytest.mark.parametrize("make", OWN_RULES)
def test_own_optimizers_and_wrappers_of_them_are_silent(make: Any) -> None:
    net = so.constrain(nn.Linear(8, 8))
    assert not warnings_of(lambda: train(net, make(net.parameters())))


class Retracted(torch.optim.Optimizer):
    """An optimizer of one's own that keeps tagged weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for p in self.param_groups[0]["params"]:
            p.copy_(so.retract(p, so.project_tangent(p, -0.1 * p.grad)))


@so.trust
class Trusted(Retracted):
    pass


class Derived(Trusted):
    pass


TRUSTED: dict[str, Any] = {
    "a class": Trusted,
    "derived": Derived,
    "an object": lambda params: so.trust(Retracted(params)),
    "a wrapper": lambda params: Wrapper(params, lambda own: so.trust(Retracted(own))),
}


@pytest.mark.parametrize("kind", TRUSTED)
def test_who_is_trusted_with_tags_is_silent(kind: str) -> None:
    net = so.constrain(nn.Linear(8, 8, bias=False))
    weights = list(net.parameters())
    assert not warnings_of(lambda: train(net, TRUSTED[kind](weights), 4))
    assert so.orthonormality_error(net) < 1e-5
    with pytest.warns(UserWarning, match=r"say so by so\.trust\(optimizer\)"):
        train(net, Retracted(weights))


def test_nothing_else_can_be_trusted() -> None:
    for thing in (nn.Linear(2, 2), int, None):
        with pytest.raises(TypeError, match=r"`optimizer` must be a torch.optim.Opt.* or a cl"):
            so.trust(thing)


def test_one_optimizer_for_each_matrix_of_a_constrained_model_is_silent() -> None:
    """As of a step in the backward pass; in either order, for parameters and for layers."""
    net = model()
    so.constrain(net, "0.weight")
    for each in (*net.parameters(), *reversed(list(net.parameters()))):
        assert not warnings_of(lambda each=each: so.StiefelAdam([each]))
    for layer in (net[0], net[2]):
        assert not warnings_of(lambda layer=layer: so.StiefelSGD(layer.parameters()))
    with pytest.warns(UserWarning, match="no parameter is constrained"):
        so.StiefelSGD(model().parameters())  # of several matrices, none
    so.release(net, "0.weight")
    gc.collect()
    others = [m for m in so.tags.foreign.known_modules() if so.tags.watch.records_of(m)]
    if not others:  # of another test, in use
        with pytest.warns(UserWarning, match="no parameter is constrained"):
            so.StiefelSGD([net[2].weight])


def test_frozen_and_released_and_foreign_weights_are_silent() -> None:
    net = model()
    so.constrain(net[0])
    net[0].weight.requires_grad_(False)
    assert not warnings_of(lambda: train(net, torch.optim.SGD(net.parameters(), 0.1)))
    net[0].weight.requires_grad_(True)
    assert not warnings_of(lambda: train(net, torch.optim.SGD(net[2].parameters(), 0.1)))
    so.release(net[0])
    assert not warnings_of(lambda: train(net, torch.optim.SGD(net.parameters(), 0.1)))


def test_an_optimizer_that_was_seen_is_not_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    so.constrain(nn.Linear(2, 2))
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    train(net, optimizer)
    looks: list[Any] = []
    monkeypatch.setattr("stiefel_opt.tags.foreign._tagged", lambda seen: looks.append(seen) or [])
    train(net, optimizer)
    assert not looks
    train(net, torch.optim.SGD(net.parameters(), 0.1))
    assert len(looks) == 1
    state = pickle.loads(pickle.dumps(optimizer))
    assert state.param_groups[0]["lr"] == 0.1


# ---- groups ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_constrained_after_the_groups_is_kept_from_then_on(stepped: bool) -> None:
    net = model()
    so.constrain(net[2])
    optimizer = so.StiefelAdam(so.param_groups(net), lr=0.05)
    train(net, optimizer, int(stepped))
    so.constrain(net[0], project=stepped)  # or by the next step
    train(net, optimizer)
    assert so.orthonormality_error(net) < 1e-5


def test_a_reading_that_changes_after_the_groups_is_told() -> None:
    net = so.constrain(nn.Linear(8, 8))
    so.constrain(net, heads=2)  # before: nothing to tell
    optimizer = so.StiefelAdam(so.param_groups(net), lr=0.05)
    with pytest.warns(UserWarning, match="`weight` of Linear was .* when so.param_groups was cal"):
        so.constrain(net, heads=4)
    so.constrain(net, heads=4)
    with pytest.warns(UserWarning, match="build it anew"):
        so.release(net)
    assert optimizer.param_groups[1]["stiefel"]["heads"] == 2


# ---- release -----------------------------------------------------------------------------------


def test_release_undoes_constrain() -> None:
    net = model()
    so.constrain(net, "0.weight")
    value = net[0].weight.detach().clone()
    optimizer = so.StiefelSGD(net.parameters(), lr=0.1)
    train(net, optimizer)
    weight = net[0].weight
    assert so.release(net, "0.weight") is net
    assert net[0].weight is weight
    assert type(weight) is nn.Parameter
    assert not hasattr(weight, "manifold")
    assert str(so.report(net)) == "no constrained parameters"
    train(net, optimizer)  # a plain parameter from now on
    assert so.orthonormality_error(weight) > 1e-3
    net.load_state_dict({**net.state_dict(), "0.weight": 2 * value})  # no warning
    net[0].weight = nn.Parameter(value)
    net(torch.ones(1, 8))
    so.constrain(net, "0.weight")
    assert so.orthonormality_error(net) < 1e-5


class Doubled(nn.Module):
    """Somebody's parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def doubled(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Doubled())


FOREIGN = {
    "_WeightNorm": parametrizations.weight_norm,
    "_SpectralNorm": parametrizations.spectral_norm,
    "_Orthogonal": parametrizations.orthogonal,
    "Doubled": doubled,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_release_leaves_what_others_compute(kind: str) -> None:
    layer = FOREIGN[kind](nn.Linear(4, 4))
    maps = list(layer.parametrizations.weight)
    message = f"`weight` must be constrained to be released, got one that {kind.split()[0]} comput"
    with pytest.raises(ValueError, match=f"{message}.*remove_parametrizations"):
        so.release(layer)
    assert list(layer.parametrizations.weight) == maps


# ---- factors of a weight, and parameters that an optimizer does not hold -----------------------


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "weight_orig"),
        (lambda layer: prune.custom_from_mask(layer, "weight", torch.eye(4)), "weight_orig"),
        (parametrizations.weight_norm, "parametrizations.weight.original1"),
        (parametrizations.spectral_norm, "parametrizations.weight.original"),
        (parametrizations.orthogonal, "parametrizations.weight.original"),
        (nn.utils.spectral_norm, "weight_orig"),
    ],
)
def test_a_factor_from_which_torch_computes_the_weight_is_refused(change: Any, factor: str) -> None:
    """Otherwise the factor is orthonormal, and the report says so, but not the weight in use."""
    layer = nn.Linear(4, 4)
    change(layer)
    with pytest.raises(ValueError, match=f"`{factor}` must be the weight in use, got a factor"):
        so.constrain(layer, factor)
    assert so.report(layer).lines == ()


def test_patterns_and_functions_leave_factors_out() -> None:
    net = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4)))
    so.constrain(net, lambda _, parameter: parameter.ndim > 1)
    assert [line.name for line in so.report(net).lines] == ["0.weight"]
    net = nn.Sequential(nn.Linear(4, 4), prune.identity(nn.Linear(4, 4), "weight"))
    so.constrain(net, "*weight*")
    assert [line.name for line in so.report(net).lines] == ["0.weight"]


def test_a_weight_that_was_pruned_after_its_constraint_can_be_released() -> None:
    layer = so.constrain(nn.Linear(4, 4))
    with pytest.warns(so.LostTagWarning):
        prune.l1_unstructured(layer, "weight", 0.5)
    so.release(layer, "weight_orig")
    assert manifold_of(layer.weight_orig) is None


def test_a_factor_of_an_own_parametrization_may_be_constrained() -> None:
    class Product(nn.Module):
        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return left @ right

        def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return weight, torch.eye(weight.size(1))

    layer = nn.Linear(4, 8)
    parametrize.register_parametrization(layer, "weight", Product())
    so.constrain(layer, "parametrizations.weight.original0")
    assert so.orthonormality_error(layer) < 1e-6


def test_a_misspelt_name_of_the_package_is_answered_by_python() -> None:
    with pytest.raises(AttributeError) as raised:
        so.constraint  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("constraint", so)
