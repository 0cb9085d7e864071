"""The benchmark of optimizers side by side: its problems, its search of a rate, its table."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import stiefel_opt as so

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "benchopt_stiefel"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("optimizers_side_by_side", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def utilities(program: ModuleType) -> ModuleType:
    assert program.FIRST
    return sys.modules["benchmark_utils"]


@pytest.fixture(scope="module")
def problem(utilities: ModuleType):
    generator = torch.Generator().manual_seed(0)
    start = utilities.orthonormal(8, 2, generator)
    values = torch.arange(8.0, 0, -1).double()

    def loss(constrained, _plain, _step):
        return -(values[:, None] * constrained[0].square()).sum()

    return utilities.Problem(loss, [start], steps=300, minimum=-15.0)


def test_a_problem_is_scaled_and_left_as_it_was(utilities: ModuleType, problem) -> None:
    (start,) = problem.constrained
    point = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.loss([point], [], None), point)
    assert float(torch.linalg.matrix_norm(gradient, 2)) == pytest.approx(1.0)
    before = start.clone()

    def make(constrained, _plain):
        return [so.StiefelSGD(constrained, lr=0.1)]

    found = problem.evaluate(**utilities.descend(problem, make, so.ManifoldParameter))
    assert torch.equal(start, before)
    assert found["gap"] < 1e-6
    assert 5 < found["reached"] < 300
    assert found["orthonormality_error"] < 1e-13


def test_reached_is_for_good(problem) -> None:
    """Steps near the optimum do not count if the loss leaves it again."""
    first, low = float(problem.loss(problem.constrained, [], None)), problem.minimum
    solution = [torch.eye(8, 2, dtype=torch.float64)]
    near = low + 1e-8 * (first - low)
    assert problem.evaluate(solution, [], [first, near, first, near, near])["reached"] == 3
    assert problem.evaluate(problem.constrained, [], [first, near])["reached"] == math.inf
    assert problem.evaluate([2 * solution[0]], [], [near])["value"] == math.inf


def test_batches_go_through_the_data(utilities: ModuleType) -> None:
    batch_of = utilities.batch_of
    one_pass = torch.cat([batch_of(12, 4, step, 0) for step in range(3)])
    assert one_pass.sort().values.tolist() == list(range(12))
    assert not torch.equal(batch_of(12, 4, 0, 0), batch_of(12, 4, 3, 0))
    assert not torch.equal(batch_of(12, 4, 0, 0), batch_of(12, 4, 0, 1))


def test_the_search_ends_between_two_worse_rates(program: ModuleType) -> None:
    runs = {f"{rate:g} 0": {"value": abs(rate - 1.0)} for rate in program.FIRST}
    for expected in (1.0, 3.0):
        assert program.next_rate(runs) == (expected,)
        runs[f"{expected:g} 0"] = {"value": abs(expected - 1.0)}
    assert program.next_rate(runs) == ()
    assert program.best_rate(runs) == 1.0
    runs["10 0"] = {"value": 5.0, "reached": 7}  # the target, once reached, comes first
    assert program.best_rate(runs) == 10.0


def test_three_seeds_choose_a_rate_by_their_middle_and_are_not_shown(program: ModuleType) -> None:
    ends = {"0.1": (1.0, 1.0, 9.0), "0.3": (0.5, 2.0, 2.0), "1": (math.nan, 0.1, math.nan)}
    runs = {
        f"{rate} {seed}": {"value": value}
        for rate, values in ends.items()
        for seed, value in zip(program.CHOOSING, values, strict=True)
    }
    runs["0.3 1"] = {"value": 0.0}  # a seed that is shown chooses nothing
    assert program.best_rate(runs) == 0.1
    assert program.shown(runs | {"0.1 2": {"value": 7.0}}) == {"0.1 2": {"value": 7.0}}
    assert program.middle(runs, "0.1")["value"] == 1.0
    assert program.middle(runs, "10") == {}


@pytest.mark.parametrize(
    ("kind", "runs", "shown"),
    [
        ("steps", {"1 1": {"reached": 5}, "1 2": {"reached": 9}, "1 3": {}}, "9"),
        ("steps", {"1 1": {"reached": 5}, "1 2": {}}, "-"),
        ("excess", {"1 1": {"value": -1.0}, "1 2": {"value": -1.5}, "1 3": {"value": -1.8}}, "25"),
        ("gap", {"1 1": {"gap": 2e-9}, "1 2": {"gap": 3e-5}, "1 3": {"gap": 0.5}}, "3.0e-05"),
        ("gap", {"1 1": {"gap": 0.02, "value": 7.0}, "1 2": {"gap": 0.04}}, "0.03"),
        ("gap", {"1 1": {"gap": 2e-9}, "1 2": {"value": 1.0}}, "-"),  # it has left the manifold
        ("loss", {"1 1": {"value": 0.12345}, "1 2": {"value": math.nan}}, "-"),
        ("loss", {}, ""),
    ],
)
def test_cells(program: ModuleType, kind: str, runs, shown: str) -> None:
    assert program.cell(runs, kind, {"1": -2.0, "2": -2.0, "3": -2.0}) == shown


@pytest.mark.parametrize(
    ("run", "shown"),
    [
        ({"reached": 12.0, "value": -1.0}, "12 steps"),
        ({"reached": math.inf, "value": 0.123456}, "0.1235"),
        ({"value": -20.0}, "-20"),
        ({"reached": math.inf, "value": math.nan}, "-"),
        ({}, "-"),
    ],
)
def test_outcomes(program: ModuleType, run: dict[str, float], shown: str) -> None:
    assert program.outcome(run) == shown


def test_the_rate_that_suits_the_others_is_tried_where_another_is_best(program: ModuleType) -> None:
    """Only at the seeds of the choice, and among problems of the kind: with noise, or without."""

    def store(**runs):
        solver = ",".join(program.PACKAGES["StiefelAdam"])
        found = {name: {solver: runs.get(name, {})} for name in ("PCA", "ICA", "Procrustes")}
        return found | {"RNN": {solver: {"0.3 0": {"value": 0.5}}}}

    problems = ["PCA", "ICA", "Procrustes", "RNN"]
    full = {
        "PCA": {"0.1 0": {"reached": 40, "value": -1.0}, "3 0": {"value": 2.5}},
        "ICA": {"1 0": {"value": -2.0}, "3 0": {"value": math.nan}, "3 1": {"reached": 1}},
        "Procrustes": {"3 0": {"value": 0.25}, "1 0": {"value": 0.75}},
    }
    assert program.rate_rows(store(**full), problems) == [
        ["StiefelAdam", "PCA", "0.1", "40 steps", "3", "2.5"],
        ["StiefelAdam", "ICA", "1", "-2", "3", "-"],
        ["StiefelAdam", "Procrustes", "3", "0.25", "1", "0.75"],
    ]
    assert program.rate_rows(store(PCA=full["PCA"]), problems) == []  # the others are to come
