"""`so.on_manifold`: other people's optimizers on constrained weights, and the rest as before."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import IS_ON_CPU
from torch import Tensor, nn
from training import closure_of, train

import stiefel_opt as so

O = torch.optim  # noqa: E741
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: O.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "SGD, decay": lambda p: O.SGD(p, 0.1, weight_decay=0.5),
    "Adam": lambda p: O.Adam(p, 0.02),
    "Adam, fused": lambda p: O.Adam(p, 0.02, fused=True),
    "Adam, foreach": lambda p: O.Adam(p, 0.02, foreach=True, amsgrad=True),
    "AdamW": lambda p: O.AdamW(p, 0.02),
    "NAdam": lambda p: O.NAdam(p, 0.02),
    "RAdam": lambda p: O.RAdam(p, 0.02),
    "Adamax": lambda p: O.Adamax(p, 0.02),
    "Adagrad": lambda p: O.Adagrad(p, 0.05),
    "Adadelta": lambda p: O.Adadelta(p, 1.0),
    "RMSprop": lambda p: O.RMSprop(p, 0.005),
    "Rprop": lambda p: O.Rprop(p, 0.01),
    "ASGD": lambda p: O.ASGD(p, 0.1),
    "Adafactor": lambda p: O.Adafactor(p, 0.02),
}
READINGS: dict[str, tuple[tuple[int, ...], torch.dtype, dict[str, Any]]] = {
    "tall": ((12, 4), torch.float32, {}),
    "wide": ((4, 12), torch.float32, {}),
    "square, scaled": ((6, 6), torch.float64, {"scale": 2.5}),
    "batch": ((3, 5, 2), torch.float32, {}),
    "heads": ((12, 6), torch.float32, {"heads": 3}),
    "rows": ((12, 6), torch.float32, {"rows": ((0, 4), (6, 12)), "heads": (1, 2)}),
    "kernel": ((4, 3, 2, 2), torch.float32, {"flatten": True}),
    "stored transposed": ((5, 12), torch.float32, {"transposed": True, "heads": 2}),
    "complex": ((6, 3), torch.complex64, {}),
    "bfloat16": ((16, 4), torch.bfloat16, {}),
    "float16": ((16, 4), torch.float16, {"heads": 2}),
}


def weight(name: str) -> so.ManifoldParameter:
    shape, dtype, options = READINGS[name]
    reading = so.Stiefel(**options)
    torch.manual_seed(1)
    value = so.random_point(*shape, manifold=reading, dtype=dtype)
    return so.ManifoldParameter(value, reading)


def tolerance(dtype: torch.dtype) -> float:
    return 4 * torch.finfo(dtype).eps if torch.finfo(dtype).eps > 1e-4 else 2e-6


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
    return so.constrain(net, "0.weight")


def loss_of(net: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
    found: Tensor = (net(x) - x[:, :4]).square().mean()
    return found


def fit(net: nn.Module, rule: Any, steps: int = 5) -> list[float]:
    return train(rule, lambda: loss_of(net), steps)


# ---- what it does ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
def test_every_optimizer_of_torch_trains_on_the_manifold(name: str) -> None:
    net = model()
    rule = RULES[name](net.parameters())
    assert so.on_manifold(rule) is rule
    losses = fit(net, rule, 40)
    assert losses[-1] < 0.9 * losses[0]
    assert so.orthonormality_error(net) < 2e-6


@pytest.mark.parametrize("name", ["SGD", "Adam, foreach", "Rprop"])
def test_plain_weights_get_the_bits_of_the_optimizer(name: str) -> None:
    """The constrained weight is not used by the loss of the plain ones."""

    def plain() -> list[nn.Parameter]:
        torch.manual_seed(3)
        return [nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(5))]

    ours, theirs = plain(), plain()
    tagged = weight("tall")
    rules = so.on_manifold(RULES[name]([ours[0], tagged, ours[1]])), RULES[name](theirs)
    for step in range(6):
        for parameters, rule in zip((ours, theirs), rules, strict=True):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            tagged.grad = torch.randn_like(tagged)
            rule.step()
    assert all(map(torch.equal, ours, theirs))
    assert so.orthonormality_error(tagged) < 2e-6


@pytest.mark.parametrize("name", READINGS)
def test_a_step_is_the_retraction_of_the_tangent_step(name: str) -> None:
    """Beside the slow way matrix by matrix in float64, with momentum in the weight's own space."""
    parameter = weight(name)
    reading = parameter.manifold
    rule = so.on_manifold(O.SGD([parameter], 0.1, momentum=0.5))
    precise = torch.complex128 if parameter.is_complex() else torch.float64
    for seed in range(3):
        point = so.project_(parameter.detach().to(precise), reading)
        is_half = parameter.dtype in (torch.bfloat16, torch.float16)
        point = parameter.detach().to(precise) if is_half else point
        torch.manual_seed(seed)
        parameter.grad = torch.randn_like(parameter)
        kept, before = parameter.grad, parameter.grad.clone()
        tangent = so.project_tangent(point, kept.to(precise), reading)
        earlier = rule.state[parameter].get("momentum_buffer", torch.zeros_like(parameter))
        step = -0.1 * (0.5 * earlier.to(precise) + tangent)
        expected = so.retract(point, so.project_tangent(point, step, reading), reading)
        rule.step()
        assert parameter.grad is kept
        assert torch.equal(kept, before)
        limit = 4 * torch.finfo(parameter.dtype).eps if is_half else 5e-6
        torch.testing.assert_close(parameter.detach().to(precise), expected, atol=limit, rtol=limit)
        assert so.orthonormality_error(parameter) <= tolerance(parameter.dtype)


def test_weights_without_a_step_keep_their_bits() -> None:
    still, moving = weight("tall"), weight("tall")
    head = weight("heads")
    before = [still.clone(), head.clone()]
    rule = so.on_manifold(O.SGD([still, moving, head], 0.1))
    moving.grad = torch.randn_like(moving)
    head.grad = torch.zeros_like(head)
    head.grad[:4] = torch.randn(4, 6)
    rule.step()
    assert torch.equal(still, before[0])
    assert torch.equal(head[4:], before[1][4:])
    assert not torch.equal(head[:4], before[1][:4])


def test_weights_of_equal_matrices_are_one_batch() -> None:
    parameters = [weight("tall") for _ in range(20)]
    rule = so.on_manifold(O.SGD(parameters, 0.1))
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    rule.step()
    with torch.profiler.profile() as profiler:
        rule.step()
    products = [
        e for e in profiler.events() if e.name in ("aten::bmm", "aten::baddbmm", "aten::mm")
    ]
    assert 0 < len(products) <= 20
    assert not [e for e in profiler.events() if "linalg" in e.name and "norm" not in e.name]


def test_starts_off_the_manifold_and_values_from_outside_are_projected() -> None:
    parameter = so.ManifoldParameter(torch.randn(8, 3), project=False)
    rule = so.on_manifold(O.SGD([parameter], 0.0))
    for value in (None, torch.randn(8, 3)):
        if value is not None:
            parameter.data = value
        nearest = so.project_(parameter.detach().clone())
        parameter.grad = torch.randn(8, 3)
        rule.step()
        torch.testing.assert_close(parameter.detach(), nearest)


LONG: dict[str, tuple[Callable[..., torch.optim.Optimizer], Callable[[Tensor, Tensor], Tensor]]] = {
    "a quadratic": (lambda p: O.SGD(p, 2.0, momentum=0.9), lambda X, A: A @ A.mT @ X),
    "always the same": (lambda p: O.Adam(p, 5.0), lambda _, A: A),
    "in turns": (lambda p: O.SGD(p, 40.0, momentum=0.5), lambda X, A: A * X[:1, :1].sign()),
    "nearly normal": (lambda p: O.SGD(p, 30.0), lambda X, A: X + 1e-2 * A),
    "normal but for rounding": (lambda p: O.SGD(p, 1e5), lambda X, A: 1e3 * X + 1e-3 * A),
    "signs": (lambda p: O.Rprop(p, 3.0), lambda X, A: X @ X.mT @ A + A),
}


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("kind", LONG)
def test_long_steps_one_after_the_other_stay_on_the_manifold(
    kind: str, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, gradient = LONG[kind]
    monkeypatch.setattr(IS_ON_CPU, lambda _: on_cpu)
    generator = torch.Generator().manual_seed(2)
    shapes = [(40, 24), (9, 9), (70, 1)]
    weights = [so.ManifoldParameter(torch.randn(s, generator=generator)) for s in shapes]
    noise = [torch.randn(s, generator=generator) for s in shapes]
    rule = so.on_manifold(make(weights))
    for _ in range(60):
        for parameter, A in zip(weights, noise, strict=True):
            parameter.grad = gradient(parameter.detach(), A)
        rule.step()
        assert max(float(so.orthonormality_error(w)) for w in weights) < 1e-5


def test_gradients_that_are_not_finite_count_as_zero() -> None:
    good, bad = weight("tall"), weight("tall")
    before = bad.detach().clone()
    rule = so.on_manifold(O.Adam([good, bad], 0.1))
    good.grad, bad.grad = torch.randn_like(good), torch.full_like(bad, torch.nan)
    with pytest.warns(UserWarning, match="1 constrained matrices of 12 x 4 are not finite"):
        rule.step()
    assert torch.equal(bad, before)
    assert bool(bad.grad.isnan().all())
    bad.grad = torch.randn_like(bad)
    rule.step()
    assert not torch.equal(bad, before)
    assert so.orthonormality_error(bad) < 2e-6


def test_what_an_optimizer_makes_not_finite_stays_where_it_was() -> None:
    parameter = weight("tall")
    before = parameter.detach().clone()
    rule = so.on_manifold(O.SGD([parameter], float("inf")))
    parameter.grad = torch.randn_like(parameter)
    with pytest.warns(UserWarning, match="SGD has moved constrained matrices of 12 x 4"):
        rule.step()
    assert torch.equal(parameter, before)


# ---- closures ----------------------------------------------------------------------------------


def test_closures_see_points_and_lbfgs_reaches_many_digits() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64)).Q
    values = torch.linspace(2.0, 0.1, 20, dtype=torch.float64)
    matrix = (basis * values) @ basis.T
    for manifold, shape in ((so.Stiefel(), (20, 3)), (so.Stiefel(scale=2.0), (3, 20))):
        start = so.random_point(*shape, manifold=manifold, dtype=torch.float64)
        parameter = so.ManifoldParameter(start, manifold)
        rule = so.on_manifold(O.LBFGS([parameter], 1.0, line_search_fn="strong_wolfe"))
        errors = []

        def loss(parameter: Tensor = parameter, errors: Any = errors) -> Tensor:
            errors.append(so.orthonormality_error(parameter))
            point = parameter if parameter.size(0) == 20 else parameter.mT
            return -(point * (matrix @ point)).sum()

        for _ in range(6):
            rule.step(closure_of(rule, loss))
        best = -values[:3].sum() * manifold.scale**2
        assert len(errors) > 10
        assert max(errors) < 1e-12
        assert float(loss().detach() - best) < 1e-8


def test_the_gradient_behind_a_retraction_is_that_of_finite_differences() -> None:
    parameter = weight("square, scaled")
    target = torch.randn(6, 6, dtype=torch.float64)
    steps: list[tuple[Tensor, float, Tensor]] = []

    class Probe(O.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            start, generator = parameter.detach().clone(), torch.Generator().manual_seed(0)
            offset = so.project_tangent(
                start, 0.3 * torch.randn(6, 6, dtype=torch.float64, generator=generator), reading
            )
            direction = so.project_tangent(
                start, torch.randn(6, 6, dtype=torch.float64, generator=generator), reading
            )
            for shift in (0.0, 1e-6, -1e-6):
                parameter.data.copy_(start + offset + shift * direction)
                with torch.enable_grad():
                    loss = closure()
                steps.append((direction, loss.item(), parameter.grad.clone()))
            parameter.data.copy_(start)

    reading = parameter.manifold
    rule = so.on_manifold(Probe([parameter], 0.1))

    closure = closure_of(rule, lambda: ((parameter - target) ** 3).sum())

    rule.step(closure)
    (direction, _, grad), (_, above, _), (_, below, _) = steps
    assert (above - below) / 2e-6 == pytest.approx(float((grad * direction).sum()), rel=1e-6)


def test_one_call_of_a_closure_is_a_step_with_that_gradient() -> None:
    nets = model(), model()
    rules = [so.on_manifold(O.Adam(net.parameters(), 0.02)) for net in nets]
    fit(nets[0], rules[0], 4)
    for number in range(4):
        closure = closure_of(rules[1], lambda: loss_of(nets[1]))

        loss = rules[1].step(closure) if number % 2 else rules[1].step(closure=closure)
        assert loss is not None
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---- with everything around it -----------------------------------------------------------------


def test_schedules_checkpoints_and_groups_that_come_later() -> None:
    net = model()
    rule = so.on_manifold(O.AdamW(net[0].parameters(), 0.02))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(rule, 10)
    rule.add_param_group({"params": list(so.constrain(net[2]).parameters()), "lr": 0.01})
    for _ in range(3):
        fit(net, rule, 1)
        schedule.step()
    assert so.orthonormality_error(net) < 2e-6
    saved = io.BytesIO()
    torch.save([net.state_dict(), rule.state_dict(), schedule.state_dict()], saved)
    saved.seek(0)
    states = torch.load(saved)
    other = model()
    so.constrain(other[2])
    groups = [{"params": list(other[i].parameters()), "lr": lr} for i, lr in ((0, 0.02), (2, 0.01))]
    resumed = so.on_manifold(O.AdamW(groups, 0.02))
    again = torch.optim.lr_scheduler.CosineAnnealingLR(resumed, 10)
    for thing, state in zip((other, resumed, again), states, strict=True):
        thing.load_state_dict(state)
    assert fit(other, resumed, 3) == fit(net, rule, 3)


def test_groups_of_param_groups_bring_their_reading() -> None:
    net = model()
    del net[0].weight.manifold
    net[0].weight.__class__ = nn.Parameter
    rule = so.on_manifold(O.Adam(so.param_groups(net, names=True), 0.02))
    fit(net, rule)
    assert so.orthonormality_error(net) < 2e-6
    free = torch.eye(4).requires_grad_()
    whole = so.on_manifold(O.Adam([{"params": [free], "stiefel": True}], 0.1))
    free.grad = torch.randn(4, 4)
    whole.step()
    assert so.orthonormality_error(free) < 2e-6


@pytest.mark.parametrize("name", ["SGD", "Adam, fused"])
def test_the_scaler_of_gradients_works(name: str) -> None:
    net = model()
    rule = so.on_manifold(RULES[name](net.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    before = net[0].weight.detach().clone()
    for is_bad in (True, False):
        rule.zero_grad()
        scaler.scale(loss_of(net)).backward()
        if is_bad:
            net[0].weight.grad[0, 0] = torch.inf
        scaler.step(rule)
        scaler.update()
        assert torch.equal(net[0].weight, before) == is_bad
    assert so.orthonormality_error(net) < 2e-6


class Fails(O.Adam):
    """Raises behind its own step."""

    fails: type[BaseException] | None = None

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.fails is not None:
            raise self.fails
        return loss


@pytest.mark.parametrize("name", ["tall", "rows", "square, scaled", "bfloat16"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_weight_and_gradient_as_they_were(
    name: str, error: type[BaseException]
) -> None:
    parameter = weight(name)
    rule = so.on_manifold(Fails([parameter], 0.1))
    schedule = O.lr_scheduler.ExponentialLR(rule, 0.9)  # replaces the method of the object, too
    for fails in (None, error, None, error):
        grad = torch.randn_like(parameter)
        parameter.grad, given, before = grad, grad.clone(), parameter.detach().clone()
        rule.fails = fails
        if fails is None:
            rule.step()
            schedule.step()
            assert not torch.equal(parameter, before)
        else:
            with pytest.raises(error):
                rule.step()
            assert torch.equal(parameter, before)
        assert parameter.grad is grad
        assert torch.equal(grad, given)
    assert so.orthonormality_error(parameter) < tolerance(parameter.dtype)


def test_so_does_a_hook_or_a_trial_of_a_closure_that_raises() -> None:
    net, calls = model(), 0
    rule = so.on_manifold(O.LBFGS(net.parameters(), line_search_fn="strong_wolfe"))
    before = net[0].weight.detach().clone()

    def loss() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MemoryError
        return loss_of(net)

    closure = closure_of(rule, loss)
    with pytest.raises(MemoryError):
        rule.step(closure)
    assert torch.equal(net[0].weight, before)
    rule.register_step_pre_hook(lambda *_: 1 / 0)
    grad = net[0].weight.grad
    with pytest.raises(ZeroDivisionError):
        rule.step(closure)
    assert torch.equal(net[0].weight, before)
    assert net[0].weight.grad is grad


def test_a_step_that_calls_that_of_its_base_is_one_step() -> None:
    class Twice(O.SGD):
        def step(self, closure: Any = None) -> Any:
            if closure is not None:
                raise RuntimeError("interrupted")
            return super().step()

    nets = model(), model()
    kinds = O.SGD, Twice
    rules = [so.on_manifold(kinds[i](nets[i].parameters(), 0.1)) for i in range(2)]
    fit(nets[0], rules[0], 3)
    fit(nets[1], rules[1], 1)
    with pytest.raises(RuntimeError, match="interrupted"):
        rules[1].step(lambda: 0.0)
    fit(nets[1], rules[1], 2)
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert so.orthonormality_error(nets[1]) < 2e-6


def test_the_warning_of_foreign_optimizers_names_it_and_is_silent_behind_it() -> None:
    net = model()
    with pytest.warns(UserWarning, match=r"so\.on_manifold\(optimizer\)"):
        fit(net, O.SGD(net.parameters(), 0.1))
    rule = so.on_manifold(so.on_manifold(O.SGD(net.parameters(), 0.1)))
    assert len(rule._optimizer_step_pre_hooks) == 1
    fit(net, rule)
    for copied in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        for group in copied.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        with pytest.warns(UserWarning, match="would not stay orthonormal: SGD"):
            copied.step()
        so.on_manifold(copied).step()
        errors = [so.orthonormality_error(p) for p in copied.param_groups[0]["params"][:1]]
        assert max(errors) < 2e-6
    with pytest.warns(UserWarning, match="no parameter is constrained"):
        so.on_manifold(O.SGD(nn.Linear(2, 2).parameters(), 0.1))
    so.on_manifold(O.SGD([{"params": nn.Linear(2, 2).parameters(), "stiefel": False}], 0.1))


# ---- what is refused ---------------------------------------------------------------------------


def like(name: str, *methods: str) -> Any:
    """An optimizer of another package, known by its name or by its methods."""
    return type(name, (O.SGD,), {method: lambda *_: None for method in methods})


class Around(O.SGD):
    def __init__(self, params: Any, inner: Any) -> None:
        super().__init__(params, 0.1)
        self.inner = inner


REFUSED: list[tuple[Callable[[list[nn.Parameter]], Any], str]] = [
    (like("ScheduleFreeLike"), "keep no second set of weights, got ScheduleFreeLike"),
    (like("Lookahead"), "keep no second set of weights, got Lookahead"),
    (like("FriendlySAM"), "keep no second set of weights, got FriendlySAM"),
    (like("Averaging", "train", "eval"), "keep no second set of weights, got Averaging"),
    (lambda p: Around(p, O.SGD(p)), "step the weights itself, got Around around SGD"),
    (lambda p: Around(p, {p[0]: O.Adam(p)}), "step the weights itself, got Around around Adam"),
    (like("InBackward", "fused_backward"), "move weights in its step, got InBackward"),
    (lambda p: O.SparseAdam(p), "take dense gradients, got SparseAdam"),
    (lambda p: so.StiefelAdam(p), "be of another package, got StiefelAdam"),
    (lambda p: p, r"be a torch\.optim\.Optimizer, got list"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_optimizers_that_would_leave_the_manifold_are_refused(
    build: Callable[[list[nn.Parameter]], Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"`optimizer` must {message}"):
        so.on_manifold(build([weight("tall")]))


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_options_that_run_without_hooks_are_refused_before_the_step(option: str) -> None:
    parameter = weight("tall")
    before = parameter.detach().clone()
    rule = so.on_manifold(O.Adam([parameter], 0.1, **{option: True}))
    parameter.grad = torch.randn_like(parameter)
    with pytest.raises(ValueError, match=f"`{option}` must be False"):
        rule.step()
    assert torch.equal(parameter, before)


def test_sparse_gradients_of_constrained_weights_are_refused() -> None:
    layer = so.constrain(nn.Embedding(9, 3, sparse=True), scale="keep")
    rule = so.on_manifold(O.SGD(layer.named_parameters(), 0.1))
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="`weight` must have a dense gradient"):
        rule.step()


@pytest.mark.filterwarnings("ignore:.*Profiler record function", "ignore::DeprecationWarning")
def test_a_compiled_step_runs_its_hooks() -> None:
    nets = model(), model()
    rules = [so.on_manifold(O.SGD(net.parameters(), 0.1)) for net in nets]
    steps = rules[0].step, torch.compile(rules[1].step, backend="eager")
    for net, rule, step in zip(nets, rules, steps, strict=True):
        for _ in range(3):
            rule.zero_grad()
            loss_of(net).backward()
            step()
    for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert so.orthonormality_error(nets[1]) < 2e-6


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
def test_a_weight_that_is_frozen_and_still_moves_stays_on_the_manifold(name: str) -> None:
    """A momentum or a history moves it on, with a closure and without."""
    rule = RULES.get(name, lambda p: O.LBFGS(p, 0.1))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6, dtype=torch.float64), nn.Linear(6, 6, dtype=torch.float64)
    )
    so.constrain(model, "*.weight")
    optimizer = so.on_manifold(rule(model.parameters()))
    x = torch.randn(8, 6, dtype=torch.float64)

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (model(x) - x.flip(0)).square().mean()
        loss.backward()
        return loss

    for step in range(6):
        model[0].weight.requires_grad_(step < 3)
        optimizer.step(closure)
    assert so.orthonormality_error(model) < 1e-14


@pytest.mark.parametrize("make", [RULES["SGD"], lambda p: O.LBFGS(p, 0.1, max_iter=2)])
def test_a_frozen_weight_that_no_step_moves_keeps_its_bits(make: Any) -> None:
    """Also off the manifold, and where a closure is called several times."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    so.constrain(model, "*.weight")
    with torch.no_grad():
        model[1].weight.mul_(1.3)
    model[1].weight.requires_grad_(False)
    before = model[1].weight.clone()
    optimizer = so.on_manifold(make(model.parameters()))
    x, wanted = torch.randn(8, 4), torch.randn(8, 4)
    closure = closure_of(optimizer, lambda: (model(x) - wanted).square().mean())
    for _ in range(3):
        optimizer.step(closure)
        assert torch.equal(model[1].weight, before)
    assert so.orthonormality_error(model[0]) < 1e-5


@pytest.mark.parametrize("factor", [0.02, 20.0])
def test_a_weight_that_thaws_is_projected_by_the_next_step(factor: float) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    so.constrain(model, "*.weight")
    model[0].weight.requires_grad_(False)
    optimizer = so.on_manifold(O.SGD(model.parameters(), 0.1, momentum=0.9))

    closure = closure_of(optimizer, lambda: model(torch.ones(1, 4)).square().sum())

    with torch.no_grad():
        model[0].weight.mul_(factor)
    version = model[0].weight._version
    optimizer.step(closure)
    optimizer.step(closure)
    assert model[0].weight._version == version  # a graph may hold it
    model[0].weight.requires_grad_(True)
    optimizer.step(closure)
    assert so.orthonormality_error(model) < 1e-5


def test_what_a_hook_writes_behind_a_step_is_projected() -> None:
    weight, generator = so.ManifoldParameter(torch.eye(6, 3)), torch.Generator().manual_seed(0)
    optimizer, seen = torch.optim.SGD([weight], 0.1), []

    @torch.no_grad()
    def noise(*_: object) -> None:
        seen.append(float(so.orthonormality_error(weight)))
        weight.add_(0.05 * torch.randn(6, 3, generator=generator))

    optimizer.register_step_post_hook(noise)
    so.on_manifold(optimizer)
    for _ in range(3):
        weight.grad = torch.randn(6, 3, generator=generator)
        optimizer.step()
        assert so.orthonormality_error(weight) < 1e-6
    assert len(seen) == 3
    assert max(seen) < 1e-6


@pytest.mark.parametrize("way", ["replaces .data", "releases", "reads with another scale"])
def test_a_hook_may_do_what_others_may_between_steps(way: str) -> None:
    torch.manual_seed(0)
    layer, plain = (so.constrain(nn.Linear(5, 12, bias=False)) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (layer, plain)]

    def hook(*_: object) -> None:
        if way == "replaces .data":
            layer.weight.data = layer.weight.data.clone()
        elif way == "releases":
            so.release(layer)
            with torch.no_grad():
                layer.weight.mul_(3)
        elif layer.weight.manifold.scale == 1.0:
            so.release(layer)
            so.constrain(layer, scale=2.0)

    optimizers[0].register_step_post_hook(hook)
    for optimizer in optimizers:
        so.on_manifold(optimizer)
    for _ in range(4 if way != "releases" else 1):
        grad = torch.randn(12, 5)
        for model, optimizer in zip((layer, plain), optimizers, strict=True):
            model.weight.grad = grad.clone()
            optimizer.step()
        length = float(layer.weight.detach().norm()) / 5**0.5
        wanted = {"replaces .data": 1, "releases": 3, "reads with another scale": 2}[way]
        assert math.isclose(length, wanted, rel_tol=1e-6)
    if way == "replaces .data":
        assert torch.equal(layer.weight, plain.weight)
