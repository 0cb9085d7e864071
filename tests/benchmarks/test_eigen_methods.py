"""The race of methods for eigenvalues: who is repeated, and whose time counts."""

from __future__ import annotations

import itertools
import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the rivals, about torch
    pytest.importorskip("geoopt")
    pytest.importorskip("pogo")
    from benchmarks.papers.kong import eigen_problem


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
