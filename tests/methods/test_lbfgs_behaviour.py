"""What StiefelLBFGS tells, refuses, keeps and resumes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dims_cases import ALIKE
from torch import Tensor, nn
from training import closure_of

import stiefel_opt as so
from stiefel_opt import Stiefel

F64 = torch.float64


def unspoilt(_: int, loss: Tensor) -> Tensor:
    return loss


class Problem:
    """A tall weight with heads, a square one and a plain vector under one optimizer."""

    def __init__(self, **options: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        heads = so.Stiefel(heads=2)
        self.tall = so.ManifoldParameter(
            so.random_point(12, 3, manifold=heads, generator=generator, dtype=F64), heads
        )
        self.square = so.ManifoldParameter(so.random_point(4, 4, generator=generator, dtype=F64))
        self.plain = nn.Parameter(torch.zeros(5, dtype=F64))
        self.parameters = [self.plain, self.tall, self.square]
        self.targets = [
            torch.randn(p.shape, generator=generator, dtype=F64) for p in self.parameters
        ]
        self.optimizer = so.StiefelLBFGS(self.parameters, **{"max_iter": 3, **options})
        self.losses: list[float] = []
        self.spoilt: Callable[[int, Tensor], Tensor] = unspoilt  # by the number of the call

    def loss(self) -> Tensor:
        pairs = zip(self.parameters, self.targets, strict=True)
        return sum(((p - t) ** 4).sum() for p, t in pairs)  # type: ignore[return-value]

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        self.losses.append(loss.item())
        return self.spoilt(len(self.losses), loss)

    def step(self) -> Any:
        return self.optimizer.step(self.closure)

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.parameters]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.equal, left, right))


# ---- state ---------------------------------------------------------------------------------------


def by_file(problem: Problem) -> Problem:
    file = io.BytesIO()
    torch.save([problem.optimizer.state_dict(), problem.values()], file)
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    fresh = Problem()
    with torch.no_grad():
        for parameter, value in zip(fresh.parameters, values, strict=True):
            parameter.copy_(value)
    fresh.optimizer.load_state_dict(state)
    return fresh


def by_pickle(problem: Problem) -> Problem:
    return pickle.loads(pickle.dumps(problem))  # type: ignore[no-any-return]


WAYS = {"torch.save": by_file, "deepcopy": copy.deepcopy, "pickle": by_pickle}


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("way", WAYS)
def test_resumes_to_the_bit(way: str, search: str | None) -> None:
    problem = Problem(line_search_fn=search, lr=1.0 if search else 0.02)
    problem.step()
    problem.step()
    resumed = WAYS[way](problem)
    for each in (problem, resumed):
        each.step()
        each.step()
    assert equal(problem.values(), resumed.values())
    assert problem.losses[-1] == resumed.losses[-1] < problem.losses[0]


def test_what_was_loaded_is_a_copy() -> None:
    problem = Problem()
    problem.step()
    problem.step()
    saved = problem.optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = Problem()
    other.optimizer.load_state_dict(saved)
    other.step()
    assert torch.equal(saved["state"][0]["steps"], kept["state"][0]["steps"])


def test_torchs_state_serves_plain_parameters_alone() -> None:
    start, ends = torch.randn(6, dtype=F64), []
    first = nn.Parameter(start.clone())
    torchs = torch.optim.LBFGS([first], max_iter=3, line_search_fn="strong_wolfe")
    second = nn.Parameter(start.clone())
    ours = so.StiefelLBFGS([second])

    def run(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        closure = closure_of(optimizer, lambda: (parameter**4).sum() + parameter.sum())

        optimizer.step(closure)  # type: ignore[arg-type]

    run(torchs, first)
    second.data.copy_(first.data)
    ours.load_state_dict(torchs.state_dict())
    for optimizer, parameter in ((torchs, first), (ours, second)):
        run(optimizer, parameter)
        ends.append(parameter.detach())
    assert torch.equal(*ends)


def test_a_new_tag_or_release_starts_the_memory_anew() -> None:
    layer, head = nn.Linear(3, 6, dtype=F64), nn.Linear(6, 6, dtype=F64)
    with pytest.warns(UserWarning, match="no parameter is constrained"):
        optimizer = so.StiefelLBFGS([*layer.parameters(), *head.parameters()], max_iter=4)
    x = torch.randn(9, 3, dtype=F64)
    closure = closure_of(optimizer, lambda: (head(layer(x)) ** 2 - 1).square().mean())
    for change in (lambda: None, lambda: so.constrain(layer), lambda: so.release(layer)):
        change()
        assert float(optimizer.step(closure).detach()) > float(closure().detach())


@pytest.mark.parametrize("history", [1, 2, 3])
def test_the_history_is_bounded_and_may_change(history: int) -> None:
    problem = Problem(history_size=3, max_iter=7)
    problem.step()
    problem.optimizer.param_groups[0]["history_size"] = history
    problem.step()
    state = problem.optimizer.state[problem.plain]
    assert len(state["steps"]) == len(state["changes"]) == history
    assert problem.losses[-1] < problem.losses[0]


# ---- budgets and tolerances ----------------------------------------------------------------------


def test_budgets_and_tolerances_end_a_step() -> None:
    state: Callable[[Problem], Any] = lambda problem: problem.optimizer.state[problem.plain]  # noqa: E731
    for options, iterations, evaluations in (
        ({"max_iter": 1}, 1, 25),
        ({"max_iter": 50, "max_eval": 4}, 4, 5),
        ({"tolerance_grad": 1e9}, 0, 1),
        ({"tolerance_change": 1e9}, 1, 1),
        ({"max_iter": 4, "line_search_fn": None, "lr": 1e-3}, 4, 4),
    ):
        problem = Problem(**options)
        problem.step()
        assert state(problem)["n_iter"] <= iterations
        assert len(problem.losses) == state(problem)["func_evals"] <= evaluations


def test_a_stationary_start_stays() -> None:
    problem = Problem()
    problem.targets = problem.values()
    before = problem.values()
    assert problem.step().item() == 0.0
    assert equal(problem.values(), before)


def test_frozen_parameters_keep_their_bits() -> None:
    problem = Problem()
    problem.tall.requires_grad_(False)
    before = problem.values()
    problem.step()
    problem.step()
    assert torch.equal(problem.tall, before[1])
    assert not torch.equal(problem.square, before[2])


# ---- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_start_that_is_not_finite_changes_nothing(what: str, nonfinite: str) -> None:
    problem = Problem(nonfinite=nonfinite)
    problem.step()
    before, memory = problem.values(), problem.optimizer.state[problem.plain]
    last = memory["last_step"].clone()

    def spoilt(_: int, loss: Tensor) -> Tensor:
        if what == "gradient":
            problem.tall.grad[0, 0] = torch.nan  # type: ignore[index]
        return loss if what == "gradient" else loss * torch.nan

    problem.spoilt = spoilt
    named = "grad of parameter 1 of group 0" if what == "gradient" else "loss"
    if nonfinite == "skip":
        with pytest.warns(UserWarning, match=f"{named}: not finite"):
            problem.step()
    else:
        with pytest.raises(ValueError, match=f"`{named}` must be finite"):
            problem.step()
    assert equal(problem.values(), before)
    assert torch.equal(memory["last_step"], last)
    skipped = problem.optimizer.skipped_steps()
    assert what == "loss" or skipped == {"parameter 1 of group 0": 1}
    problem.spoilt = unspoilt
    problem.step()
    assert problem.losses[-1] < problem.losses[0]


def test_trials_that_are_not_finite_count_as_uphill() -> None:
    problem = Problem(max_iter=10)
    problem.spoilt = lambda call, loss: loss * (torch.nan if call in (2, 5) else 1.0)
    problem.step()
    assert problem.losses[-1] < problem.losses[0]
    assert all(bool(value.isfinite().all()) for value in problem.values())


@pytest.mark.parametrize("options", [{"line_search_fn": None, "lr": 0.01}, {}])
def test_a_second_call_that_fails_leaves_the_start(options: dict[str, Any]) -> None:
    """A step of fixed length into NaN is taken back, as a line search that an exception ends."""
    problem = Problem(**options)
    before = problem.values()

    def spoilt(call: int, loss: Tensor) -> Tensor:
        if call == 2 and not options:
            raise KeyboardInterrupt
        return loss * (torch.nan if call == 2 else 1.0)

    problem.spoilt = spoilt
    told = pytest.warns(UserWarning, match="loss: not finite")
    with told if options else pytest.raises(KeyboardInterrupt):  # type: ignore[attr-defined]
        problem.step()
    assert equal(problem.values(), before)
    problem.step()
    assert problem.losses[-1] < problem.losses[0]


@pytest.mark.parametrize("kind", ["a gradient of the wrong sign", "another loss in every call"])
def test_a_line_search_without_success_is_told(kind: str) -> None:
    """As that of dropout is: no rounding."""
    problem = Problem(max_iter=10, max_eval=200)
    before, has_wrong_sign = problem.values(), kind.startswith("a gradient")

    def closure() -> Tensor:
        problem.optimizer.zero_grad()
        loss = problem.loss() * (1 if has_wrong_sign else 1 + 0.1 * len(problem.losses))
        problem.losses.append(loss.item())
        (-loss if has_wrong_sign else loss).backward()
        return loss

    with pytest.warns(UserWarning, match="line search found no lower loss"):
        problem.optimizer.step(closure)
    assert not has_wrong_sign or equal(problem.values(), before)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", ["plain", "projector", "shifted"])
def test_a_loss_that_is_a_small_difference_of_large_sums_ends_without_a_warning(
    kind: str, dtype: torch.dtype
) -> None:
    """Its rounding is that of the sums; what is left in the gradients is finite."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        basis = so.random_point(9, 3, generator=generator, dtype=F64)
        data = torch.randn(60, 3, generator=generator, dtype=F64) @ basis.mT
        data = data + 0.02 * torch.randn(60, 9, generator=generator, dtype=F64)
        A = (data.mT @ data).to(dtype)
        X = so.ManifoldParameter(so.random_point(9, 3, generator=generator, dtype=dtype))
        optimizer = so.StiefelLBFGS([X], max_iter=50, tolerance_change=0.0, tolerance_grad=0.0)
        losses: dict[str, Callable[..., Tensor]] = {
            "plain": lambda A, X: A.trace() - (X * (A @ X)).sum(),
            "projector": lambda A, X: (A @ (torch.eye(9, dtype=A.dtype) - X @ X.mT)).trace(),
            "shifted": lambda A, X: (1e4 - (X * (A @ X)).sum()) - (1e4 - A.trace()),
        }
        for _ in range(3):
            optimizer.step(closure_of(optimizer, partial(losses[kind], A, X)))
        assert X.grad is not None
        assert bool(X.grad.isfinite().all())
        values = torch.linalg.eigvalsh(A.double())
        precise = X.detach().double()
        lost = float(values[-3:].sum() - (precise * (A.double() @ precise)).sum())
        assert lost < 1e3 * torch.finfo(dtype).eps * float(values.sum())


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("lr", [0.0, -0.0, torch.tensor(0.0)])
def test_with_a_learning_rate_of_zero_nothing_moves(search: str | None, lr: Any) -> None:
    """As a schedule begins; the step that follows is the first."""
    problems = Problem(line_search_fn=search), Problem(line_search_fn=search)
    before = problems[0].values()
    problems[0].optimizer.param_groups[0]["lr"] = lr
    returned = problems[0].step()
    assert float(returned.detach()) == problems[0].losses[0]
    assert equal(problems[0].values(), before)
    problems[0].optimizer.param_groups[0]["lr"] = 1e-2
    problems[1].optimizer.param_groups[0]["lr"] = 1e-2
    for problem in problems:
        problem.step()
    assert equal(*(problem.values() for problem in problems))
    assert problems[0].losses[-1] < problems[0].losses[0]


def test_report_shows_angles_and_missed_steps() -> None:
    layer = so.constrain(nn.Linear(3, 6, dtype=F64))
    optimizer = so.StiefelLBFGS(layer.parameters(), max_iter=2)

    closure = closure_of(
        optimizer, lambda: (layer(torch.ones(1, 3, dtype=F64)) ** 2 - 1).square().sum()
    )

    optimizer.step(closure)
    (line,) = so.report(layer, optimizer).lines
    assert line.angle is not None
    assert 0 < line.angle < 3
    assert line.skipped == 0


# ---- messages ------------------------------------------------------------------------------------

POINT, SHARED = so.random_point(4, 2), torch.eye(12)
NOT_CREATED: list[tuple[Any, dict[str, Any], str]] = [
    ([POINT], {"lr": -1}, "Invalid learning rate"),
    ([POINT], {"max_iter": 0}, "`max_iter` must"),
    ([POINT], {"max_eval": 1.5}, "`max_eval` must"),
    ([POINT], {"history_size": 0}, "`history_size` must"),
    ([POINT], {"tolerance_grad": "x"}, "`tolerance_grad`"),
    ([POINT], {"line_search_fn": "armijo"}, "line_search"),
    ([POINT], {"nonfinite": "ignore"}, "`nonfinite` must"),
    ([POINT], {"stiefel": "yes"}, "`stiefel` must"),
    ([("a", POINT), ("b", POINT)], {}, "`b` must appear once, got it twice"),
    ({POINT}, {}, "`params` must have an order"),
    ([{"params": [POINT]}, {"params": []}], {}, "`param_group` must be the only one"),
    ([torch.zeros(3)], {}, "at least 2 dimensions"),
    ([POINT.bfloat16()], {}, "float32 or float64 for StiefelLBFGS"),
    ([POINT.half()], {}, "float32 or float64 for StiefelLBFGS"),
    ([nn.Parameter(SHARED), nn.Parameter(SHARED.T)], {}, "memory of its own"),
    ([("a", POINT), ("b", POINT.double())], {}, "`b` must be as precise as the first parameter"),
]


@pytest.mark.parametrize(("params", "options", "words"), NOT_CREATED)
def test_what_cannot_be_created_is_refused(
    params: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        so.StiefelLBFGS(params, **{"stiefel": True, **options})
    assert not hasattr(POINT, "manifold")


NOT_DONE: list[tuple[Callable[[so.StiefelLBFGS], Any], str]] = [
    (lambda optimizer: optimizer.step(None), "`closure` must be a function"),  # type: ignore[arg-type]
    (lambda optimizer: optimizer.step(lambda: 1.0), "`closure` must leave a gradient"),
    (lambda optimizer: optimizer.step(lambda: "a"), "`closure` must return a number"),
    (lambda optimizer: optimizer.add_param_group({"params": [POINT]}), "`param_group` must be the"),
    (lambda optimizer: optimizer.load_state_dict({}), "`state_dict` must have the keys"),
    (
        lambda optimizer: optimizer.load_state_dict(OF_TORCH.state_dict()),
        "`state_dict` must be one of",
    ),
]
OF_TORCH = torch.optim.SGD([torch.zeros(1)], lr=1.0)


@pytest.mark.parametrize(("act", "words"), NOT_DONE)
def test_what_cannot_be_done_is_refused(act: Callable[[so.StiefelLBFGS], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        act(Problem().optimizer)


def test_state_of_another_reading_is_refused() -> None:
    problem = Problem()
    problem.step()
    other = Problem()
    other.tall.manifold = so.Stiefel(heads=4)
    with pytest.raises(ValueError, match="reading of parameter 1 of group 0"):
        other.optimizer.load_state_dict(problem.optimizer.state_dict())


def test_weights_that_are_not_finite_are_refused() -> None:
    problem = Problem()
    with torch.no_grad():
        problem.square[0, 0] = float("nan")
    with pytest.raises(ValueError, match="`parameter 2 of group 0` must be finite"):
        problem.step()


# ---- extremes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"lr": 1e6}, {"lr": 50.0, "line_search_fn": None}], ids=str)
def test_no_length_leaves_the_manifold(options: dict[str, Any]) -> None:
    parameter = so.ManifoldParameter(so.random_point(6, 2))
    optimizer = so.StiefelLBFGS([parameter], max_iter=30, **options)

    closure = closure_of(optimizer, lambda: 3 * parameter[0].sum())

    optimizer.step(closure)
    assert so.orthonormality_error(parameter) < 1e-6


@pytest.mark.parametrize("size", [(5, 4), (4, 4), (6, 1)], ids=str)
def test_a_solution_on_the_far_side_is_found(size: tuple[int, int]) -> None:
    """The reference of the frames is left behind, and replaced."""
    start = so.random_point(*size, dtype=F64)
    aside = so.project_tangent(start, 0.2 * torch.randn(*size, dtype=F64))
    solution = -so.retract(start, aside)
    parameter = so.ManifoldParameter(start.clone())
    optimizer = so.StiefelLBFGS([parameter], max_iter=200, tolerance_grad=0, tolerance_change=0)
    weights = torch.rand(size, dtype=F64) + 0.5

    closure = closure_of(optimizer, lambda: (weights * (parameter - solution) ** 2).sum())

    optimizer.step(closure)
    assert (parameter - solution).abs().max() < 1e-13
    moved = optimizer.state[parameter]["reference"] - start
    assert size[0] == size[1] or moved.abs().max() > 0.1


def test_autocast_does_not_reach_the_step() -> None:
    """Nothing of the step is worked out in half precision."""
    problem, same = Problem(), Problem()
    for each in (problem, same):
        for parameter in each.parameters:
            parameter.data = parameter.data.float()
        each.targets = [target.float() for target in each.targets]
    so.project_(nn.ParameterList(problem.parameters))
    so.project_(nn.ParameterList(same.parameters))
    problem.step()
    with torch.autocast("cpu", torch.bfloat16):
        same.step()
    assert equal(problem.values(), same.values())


def test_another_precision_starts_the_memory_anew() -> None:
    layer = so.constrain(nn.Linear(3, 6, dtype=F64))
    optimizer = so.StiefelLBFGS(layer.parameters(), max_iter=3)
    closure = closure_of(
        optimizer, lambda: (layer(torch.ones(1, 3).to(layer.weight)) ** 2 - 1).square().sum()
    )
    first = optimizer.step(closure)
    layer.float()
    optimizer.step(closure)
    assert closure() < first


@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_step_of_lbfgs_projects_to_it(sign):
    """Beside a weight of another reading and the same shape."""
    value = torch.diag(torch.tensor([2.0, 2.0, -2.0 * sign]))
    weights = [
        so.ManifoldParameter(value * one, so.Stiefel(determinant=each), project=False)
        for one, each in ((1, sign), (-1, -sign))
    ]
    optimizer = so.StiefelLBFGS(weights, lr=0.1)

    closure = closure_of(
        optimizer,
        lambda: sum(
            (weight * torch.linspace(-1, 1, 9).view(3, 3).sin()).sum() for weight in weights
        ),
    )

    with pytest.warns(UserWarning, match="off the manifold"):
        optimizer.step(closure)
    dets = [float(torch.linalg.det(weight.detach())) for weight in weights]
    assert dets == pytest.approx([sign, -sign], abs=1e-5)


@pytest.mark.parametrize(("shape", "one", "other"), ALIKE)
def test_pairs_of_lbfgs_are_kept_by_an_equal_reading(
    shape: tuple[int, ...], one: Stiefel, other: Stiefel
) -> None:
    torch.manual_seed(0)
    start, weight = torch.randn(shape, dtype=torch.float64), torch.randn(shape)
    parameters = [so.ManifoldParameter(start, reading) for reading in (one, other)]

    def step(parameter: Tensor, optimizer: so.StiefelLBFGS) -> None:
        closure = closure_of(
            optimizer, lambda: (weight * parameter).square().sum() + parameter.sum()
        )

        optimizer.step(closure)

    optimizers = [so.StiefelLBFGS([each], max_iter=3) for each in parameters]
    step(parameters[0], optimizers[0])
    with torch.no_grad():
        parameters[1].copy_(parameters[0])
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for each, optimizer in zip(parameters, optimizers, strict=True):
        step(each, optimizer)
    torch.testing.assert_close(parameters[0].detach(), parameters[1].detach())
