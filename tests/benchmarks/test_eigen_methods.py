"""The race of methods for eigenvalues: who is repeated, and whose time counts."""

from __future__ import annotations

import itertools
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the rivals, about torch
    pytest.importorskip("geoopt")
    pytest.importorskip("pogo")
    from benchmarks.papers.kong import eigen_methods, eigen_problem
    from benchmarks.papers.kong.eigen_contestants import Method


def test_the_fastest_repeat_counts_of_every_kind_of_method() -> None:
    problems = [eigen_problem.draw_problem(6, 2, number) for number in range(2)]
    made: dict[str, int] = {}

    def method(name: str, kind: str, gap: float) -> Method:
        seconds = itertools.cycle((5.0, 3.0, 4.0))

        def run(*_: object) -> eigen_problem.Run:
            made[name] = made.get(name, 0) + 1
            return eigen_problem.Run(7, next(seconds), gap, 0.0)

        return Method(name, run, ({},), (), kind)

    kinds = ("torch", "pymanopt", "eigensolver")
    methods = [method(kind, kind, 0.0) for kind in kinds] + [method("lost", "torch", 1.0)]
    settings = {method.name: {} for method in methods}
    limit = eigen_problem.Limit(10)
    found = eigen_methods.compete(methods, settings, problems, "race", limit)
    assert all([run.time for run in found[kind]] == [3.0, 3.0] for kind in kinds)
    assert made == dict.fromkeys(kinds, 6) | {"lost": 2}


@pytest.mark.parametrize("second_order", [False, True])
def test_what_we_measure_is_not_in_the_time_of_pymanopt(
    second_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pymanopt")
    (problem, _), now = eigen_problem.draw_problem(12, 2, 0), itertools.count()
    jumps = [0.0]
    looked = eigen_problem.orthonormality_error

    def slow_look(point: object) -> float:
        jumps[0] += 1e6
        return looked(point)

    monkeypatch.setattr(eigen_problem, "clock", lambda: next(now) + jumps[0])
    monkeypatch.setattr(eigen_problem, "orthonormality_error", slow_look)
    limit = eigen_problem.Limit(1000)
    run = eigen_problem.pymanopt_run(problem, {}, limit, second_order=second_order)
    assert run.reached
    assert jumps[0] > 2e6
    assert run.seconds < 1e5
