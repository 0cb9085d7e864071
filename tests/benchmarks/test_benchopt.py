"""The benchmark of optimizers side by side: its problems, its search of a rate, its table."""

import importlib
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import stiefel_opt as so

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "benchopt_stiefel"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside these tests", allow_module_level=True)


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return importlib.import_module("benchmarks.benchopt_stiefel.run")


@pytest.fixture(scope="module")
def utilities() -> ModuleType:
    return importlib.import_module("benchmarks.benchopt_stiefel.benchmark_utils")


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


def test_a_point_off_the_manifold_does_not_arrive_by_a_loss_below_the_minimum(
    utilities: ModuleType, problem
) -> None:
    first, low = float(problem.loss(problem.constrained, [], None)), problem.minimum
    longer = [1.01 * torch.eye(8, 2, dtype=torch.float64)]
    value = float(problem.loss(longer, [], None))
    assert value < low
    found = problem.evaluate(longer, [], [first, value, value])
    assert found["orthonormality_error"] < 0.1
    assert found["value"] == value
    assert found["reached"] == math.inf
    assert found["gap"] == pytest.approx((low - value) / (first - low))
    assert not problem.solved([first, *[value] * 10])
    assert problem.solved([first, *[low - 1e-12] * 10])
    assert found["gap"] > utilities.TARGET


def at(program: ModuleType, rate: float, *values: float, **more: float) -> dict[str, dict]:
    """Runs of a rate at the seeds that choose; one value stands for all of them."""
    values = values * len(program.CHOOSING) if len(values) == 1 else values
    ends = zip(program.CHOOSING, values, strict=True)
    return {f"{rate:g} {seed}": {"value": value, **more} for seed, value in ends}


def test_the_search_ends_between_two_worse_rates(program: ModuleType) -> None:
    runs: dict[str, dict] = {}
    for rate in program.FIRST:
        runs |= at(program, rate, abs(rate - 1.0))
    for expected in (1.0, 3.0):
        assert expected in program.next_rates(runs)
        assert program.lacking(runs, program.next_rates(runs), program.CHOOSING) == (expected,)
        runs |= at(program, expected, abs(expected - 1.0))
    assert program.lacking(runs, program.next_rates(runs), program.CHOOSING) == ()
    assert program.best_rate(runs) == 1.0
    runs |= at(program, 10.0, 5.0, reached=7)  # the target, once reached, comes first
    assert program.best_rate(runs) == 10.0
    assert math.isnan(program.best_rate(at(program, math.nan, 1.0)))
