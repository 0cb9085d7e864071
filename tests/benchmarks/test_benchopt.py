"""The benchmark of optimizers side by side: its problems, its search of a rate, its table."""

import importlib
import itertools
import json
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


def test_a_rate_is_chosen_by_all_of_its_seeds_and_by_no_other(program: ModuleType) -> None:
    sure, bold = at(program, 0.1, 1.0, reached=150), at(program, 1.0, 1.0, reached=90)
    assert program.best_rate(sure | bold) == 1.0
    bold[f"1 {program.CHOOSING[-1]}"] = {"value": 1.0}  # does not arrive
    assert program.best_rate(sure | bold) == 0.1
    lucky = at(program, 1.0, 1.0, reached=200)
    lucky[f"1 {program.CHOOSING[0]}"] = {"value": 1.0, "reached": 10}
    assert program.best_rate(sure | lucky) == 0.1
    assert program.best_rate(at(program, 0.3, 5.0, 1.0, 1.0, 1.0, 1.0) | at(program, 3, 1.7)) == 3
    assert program.best_rate(at(program, 1, 1, 1, 1, 1, math.nan) | at(program, 3, 9.0)) == 3
    shown = {f"10 {seed}": {"value": 0.0} for seed in program.SEEDS}
    assert program.best_rate(sure | shown) == 0.1
    assert program.shown(sure | shown) == {}
    assert program.shown(at(program, 10, 0.5) | shown) == shown
    some = at(program, 3, 0.0)
    del some[f"3 {program.CHOOSING[0]}"]  # has not run at all of them
    assert program.best_rate(sure | some) == 0.1


def test_what_is_missing_is_run_and_nothing_else(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of each solver: the first rates and the neighbours of the best at their seeds, then it."""
    calls: list[tuple[str, float, int]] = []

    def solve(_problem, wanted, seeds):
        found: dict[str, dict] = {}
        for solver, rates in wanted.items():
            for rate, seed in itertools.product(rates, seeds):
                calls.append((solver.key, rate, seed))
                worse = 0 if math.isnan(rate) else abs(math.log(rate))
                found.setdefault(solver.key, {})[f"{rate:g} {seed}"] = {"value": worse}
        return found

    monkeypatch.setattr(program, "solve", solve)
    known = program.fill("PCA", tmp_path)
    name = program.PACKAGES["StiefelSGD"].key
    tried = {(rate, seed) for rate in (*program.FIRST, 1.0, 3.0) for seed in program.CHOOSING}
    mine = [(rate, seed) for solver, rate, seed in calls if solver == name]
    assert sorted(mine) == sorted(tried | {(1.0, seed) for seed in program.SEEDS})
    search = [seed for solver, _, seed in calls if solver == program.SEARCH.key]
    assert sorted(search) == sorted({*program.CHOOSING, *program.SEEDS})
    calls.clear()
    assert program.fill("PCA", tmp_path) == known
    assert calls == []
    del known[name][f"0.1 {program.CHOOSING[2]}"]
    (tmp_path / "PCA.json").write_text(json.dumps(known))
    program.fill("PCA", tmp_path)
    assert set(calls) == {(name, 0.1, seed) for seed in program.CHOOSING}
    monkeypatch.setattr(program, "solve", lambda *_: {})
    with pytest.raises(RuntimeError, match="has not run all"):
        program.fill("ICA", tmp_path)
