"""Mistakes that used to be silent warn once, by name and with a remedy."""

import copy
import dataclasses
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
    so.constrain(net, "2.weight")
    with pytest.warns(UserWarning, match=r"`0\.weight` and 1 more"):
        train(net, rule(net.parameters(), lr=1e-2))


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


def test_groups_of_a_model_without_constraint_warn() -> None:
    for action in (lambda: so.param_groups(model()), lambda: so.StiefelAdam(model().parameters())):
        (text,) = warnings_of(action)
        assert "no parameter is constrained" in text
        assert "so.constrain(module, 'weight')" in text


@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_constrained_after_the_groups_is_kept_from_then_on(stepped: bool) -> None:
    net = model()
    so.constrain(net[2])
    optimizer = so.StiefelAdam(so.param_groups(net), lr=0.05)
    train(net, optimizer, int(stepped))
    so.constrain(net[0])
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


def test_another_layout_of_groups_is_named_when_state_is_loaded() -> None:
    net = so.constrain(nn.Linear(8, 8))
    one = train_state(so.StiefelSGD(net.parameters(), lr=0.1), net)
    with pytest.raises(ValueError, match=r"have 2 groups of \[1, 1\] .*, got 1 of \[2\]; build"):
        so.StiefelSGD(so.param_groups(net), lr=0.1).load_state_dict(one)


def train_state(optimizer: Any, net: nn.Module) -> Any:
    train(net, optimizer)
    return optimizer.state_dict()


# ---- parameters by hand, points and tangents ---------------------------------------------------

READINGS = {
    "tall": ((6, 3), None),
    "wide": ((3, 6), None),
    "square, batch": ((2, 4, 4), None),
    "heads": ((8, 3), so.Stiefel(heads=2, scale=2.0)),
    "rows": ((10, 4), so.Stiefel(heads=(2, 1), rows=((0, 4), (6, 9)), scale=0.5)),
    "convolution": ((6, 2, 3, 3), so.Stiefel(flatten=True)),
    "stored transposed": ((4, 6), so.Stiefel(heads=2, transposed=True)),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_parameter_by_hand_is_a_point(name: str) -> None:
    shape, reading = READINGS[name]
    data = torch.randn(shape, dtype=torch.float64)
    before = data.clone()
    weight = so.ManifoldParameter(data, reading)
    assert so.orthonormality_error(weight) < 1e-12
    assert torch.equal(data, before)
    assert so.project_(data, reading) is data
    assert torch.equal(data, weight.detach())
    again = so.ManifoldParameter(data, reading)
    assert again.data_ptr() == data.data_ptr()
    assert torch.equal(again, data)
    left = so.ManifoldParameter(before, reading, project=False)
    assert torch.equal(left, before)
    assert left.data_ptr() == before.data_ptr()
    assert torch.equal(type(weight)(before), before)  # as torch and accelerate make parameters


def test_a_parameter_by_hand_says_what_it_cannot_project() -> None:
    with pytest.raises(ValueError, match=r"`data` must be finite to be projected, .*project=False"):
        so.ManifoldParameter(torch.full((3, 2), float("nan")))
    assert so.ManifoldParameter(torch.zeros(3, 2, device="meta")).is_meta


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_points_tangents_and_retractions_of_any_reading(name: str, dtype: torch.dtype) -> None:
    shape, reading = READINGS[name]
    generator = torch.Generator().manual_seed(0)
    point = so.random_point(*shape, manifold=reading, generator=generator, dtype=dtype)
    same = so.random_point(
        *shape, manifold=reading, generator=generator.manual_seed(0), dtype=dtype
    )
    assert torch.equal(point, same)
    assert so.orthonormality_error(point, reading) < 1e-13
    vector = torch.randn(shape, dtype=dtype, generator=generator)
    tangent = so.project_tangent(point, vector, reading)
    torch.testing.assert_close(so.project_tangent(point, tangent, reading), tangent)
    tag = reading or so.Stiefel()
    for part, normal in zip(tag.parts(point), tag.parts(vector - tangent), strict=True):
        size = (part.conj() * normal).sum()  # a normal vector that is symmetric along X
        assert abs(size.imag if size.is_complex() else 0.0) < 1e-12
    for retraction in ("polar", "qr", "cayley"):
        errors = []
        for step in (1e-2, 1e-3):
            end = so.retract(point, step * tangent, reading, retraction=retraction)
            assert so.orthonormality_error(end, reading) < 1e-13
            errors.append(float((end - point - step * tangent).norm()))
        assert errors[1] < 0.02 * errors[0]  # of second order
    for rest in tag.plain_parts(so.retract(point, vector, reading) - point - vector):
        assert not rest.any()


WRONG = [
    (
        lambda: so.retract(torch.eye(3), torch.eye(2)),
        ValueError,
        r"`vector` must be of shape",
    ),
    (lambda: so.retract(torch.eye(3), torch.eye(3), retraction="exp"), ValueError, "`retraction`"),
    (lambda: so.project_tangent([1.0], torch.eye(3)), TypeError, "`point` must be a tensor"),
    (lambda: so.project_tangent(torch.eye(3), torch.eye(3), "wide"), TypeError, "`manifold` must"),
    (
        lambda: so.report(nn.Linear(2, 2), nn.Linear(2, 2)),
        TypeError,
        "`optimizer` must be None or an optimizer, got Linear",
    ),
    (lambda: so.random_point(3), ValueError, "`shape` must be at least two positive sizes"),
    (lambda: so.random_point(3, 2, manifold=4), TypeError, "`manifold` must be None or a Stiefel"),
    (lambda: so.random_point(3, 2, manifold=so.Stiefel(heads=2)), ValueError, "heads of shape"),
    (lambda: so.project_(torch.ones(3)), ValueError, "`x` must have at least 2 dimensions"),
    (lambda: so.project_(torch.ones(3, 3, dtype=torch.int64)), TypeError, "`x` must have a float"),
    (lambda: so.project_([1]), TypeError, "`model` must be a torch.nn.Module, got list"),
    (lambda: so.project_(nn.Linear(2, 2), so.Stiefel()), ValueError, "`manifold` must be None for"),
    (
        lambda: so.constrain(nn.Linear(2, 2).weight),
        TypeError,
        r"call so.constrain\(layer, ",
    ),
    (
        lambda: so.constrain(nn.Linear(2, 2), scale="kept"),
        ValueError,
        "`scale` must be a positive number, 'keep' or 'rms', got 'kept'",
    ),
    (
        lambda: so.release(nn.Linear(2, 2)),
        ValueError,
        "`weight` must be constrained to be",
    ),
    (lambda: so.release(torch.eye(2)), TypeError, "`module` must be a torch.nn.Module, got Tensor"),
    (
        lambda: so.constrain(nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))),
        ValueError,
        r"`weight` must be an unconstrained parameter, got one that _Orthogonal computes; call so",
    ),
    (
        lambda: so.constrain(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))),
        ValueError,
        "got one that _SpectralNorm computes; remove that",
    ),
    (
        lambda: so.constrain(nn.TransformerEncoderLayer(8, 2), "*.weight"),
        ValueError,
        r"leave it untagged, as so.constrain\(model, \[f.*torch.nn.Linear\).*\]\[:-1\]\) does",
    ),
]


@pytest.mark.parametrize(("action", "error", "message"), WRONG)
def test_errors_name_the_remedy(action: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        action()


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


# ---- pretrained weights ------------------------------------------------------------------------


def test_the_report_says_how_far_a_weight_moved() -> None:
    net = nn.Linear(8, 8)
    before = net.weight.detach().clone()
    after = so.constrain(net).weight.detach()
    (line,) = so.report(net).lines
    assert line.moved == pytest.approx(float((after - before).norm() / before.norm()))
    assert f"{line.moved:.0%}" in str(so.report(net))
    so.constrain(net)
    assert so.report(net).lines[0].moved == 0
    assert so.report(so.constrain(nn.Linear(8, 8), project=False)).lines[0].moved is None


@pytest.mark.parametrize("name", READINGS)
def test_keep_takes_the_scale_that_keeps_the_norm(name: str) -> None:
    shape, reading = READINGS[name]
    options = dataclasses.asdict(reading or so.Stiefel())
    module = nn.Module()
    module.weight = nn.Parameter(0.2 * torch.randn(shape, dtype=torch.float64))
    norm = module.weight.detach().norm()
    so.constrain(module, **{**options, "scale": "keep"})
    assert so.report(module).lines[0].moved > 0
    torch.testing.assert_close(module.weight.detach().norm(), norm)
    scale = module.weight.manifold.scale
    so.constrain(module, **{**options, "scale": "keep"})
    assert module.weight.manifold.scale == pytest.approx(scale)
    assert so.report(module).lines[0].moved == 0


def test_keep_needs_a_value() -> None:
    module = nn.Linear(2, 2)
    nn.init.zeros_(module.weight)
    with pytest.raises(ValueError, match="`weight` must be finite and not zero for scale='keep'"):
        so.constrain(module, scale="keep")
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device"):
        so.constrain(nn.Linear(2, 2), scale="keep")


# ---- reports -----------------------------------------------------------------------------------


def test_the_report_flags_what_is_off() -> None:
    net = so.constrain(nn.Linear(8, 8))
    assert "off" not in str(so.report(net))
    nn.init.xavier_uniform_(net.weight)
    assert "off: so.project_(model), or the next Stiefel step" in str(so.report(net))
    assert "off" not in str(so.report(so.project_(net)))


@pytest.mark.parametrize("name", ["tall", "wide", "heads", "rows"])
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_the_report_says_how_far_the_last_step_turned(rule: str, name: str) -> None:
    shape, reading = READINGS[name]
    net = nn.Module()
    net.weight = so.ManifoldParameter(torch.randn(shape, dtype=torch.float64), reading)
    opt = optimizer(rule, net.parameters(), lr=1e-3)
    assert so.report(net, opt).lines[0].angle is None
    target, mixed = torch.randn_like(net.weight), torch.randn(shape[-1], shape[-1]).double()
    before = net.weight.detach().clone()
    for _ in range(10):
        before = net.weight.detach().clone()
        net.weight.grad = target + before @ (mixed + mixed.T)
        opt.step()
    (line,) = so.report(net, opt).lines
    assert line.angle == pytest.approx(turned(net.weight, before), rel=0.1)
    assert f"{line.angle:.1e} rad" in str(so.report(net, opt))


def turned(weight: Any, before: torch.Tensor) -> float:
    """The largest angle between X v and where it was: its chord is the norm of the difference."""
    reading = weight.manifold
    pairs = zip(reading.parts(weight.detach()), reading.parts(before), strict=True)
    chords = [
        torch.linalg.matrix_norm(reading.matrices(new - old, index) / reading.scale, 2).amax()
        for index, (new, old) in enumerate(pairs)
    ]
    return float(2 * torch.asin(torch.stack(chords).amax() / 2))


def test_momentum_is_a_default_where_torch_has_none() -> None:
    weight = so.ManifoldParameter(torch.eye(3))
    assert so.StiefelSGD([weight], lr=0.1).defaults["momentum"] == 0.9
    assert torch.optim.SGD([weight], lr=0.1).defaults["momentum"] == 0.0


def test_a_parameter_is_printed_once() -> None:
    text = repr(so.constrain(nn.Linear(2, 2), heads=2).weight)
    assert text.count("arameter") == 1
    assert "heads=2" in text
    assert "tensor([[" in text
    assert "requires_grad=True" in text


# ---- attention ---------------------------------------------------------------------------------


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


def test_the_report_says_which_parameter_the_optimizer_does_not_hold() -> None:
    net = so.constrain(model(), ["0.weight", "2.weight"])
    first = so.StiefelSGD(net[0].parameters(), lr=0.1)
    lines = {line.name: line for line in so.report(net, first).lines}
    assert lines["0.weight"].held
    assert not lines["2.weight"].held
    assert str(so.report(net, first)).count("not in this optimizer") == 1
    assert all(line.held for line in so.report(net).lines)
    other = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)  # as one of copies
    assert all(line.held for line in so.report(net, other).lines)


def test_a_misspelt_name_of_the_package_is_answered_by_python() -> None:
    with pytest.raises(AttributeError) as raised:
        so.constraint  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("constraint", so)
