"""The published transport as a discretisation: of its own dynamics, not of those of the metric."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from cases import Array
from dynamics import (
    GEODESICS,
    Problem,
    Stepper,
    damped_errors,
    exact,
    free_errors,
    orders,
    run_optimizer,
    run_reference,
)
from dynamics import problem as problem
from reference_momentum import PublishedSGDReference
from rows_of_methods import ROTATIONS

import stiefel_opt as so


def kappa(metric: float) -> float:
    return (3 * metric - 2) / 2


STEPPERS = pytest.mark.parametrize(
    "run",
    [
        functools.partial(run_reference, reference=PublishedSGDReference),
        functools.partial(run_optimizer, rule=so.PublishedSGD),
    ],
)


@STEPPERS
@pytest.mark.parametrize(
    ("metric", "rotation"), [(0.0, None), *((0.3, each) for each in ROTATIONS)]
)
def test_every_rotation_has_order_one(
    run: Stepper, metric: float, rotation: str | None, problem: Problem
) -> None:
    expected = exact(problem, metric, kappa(metric))
    options = {"rotation": rotation} if rotation else {}
    for errors in damped_errors(run, problem, expected, metric, **options):
        assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors


@STEPPERS
def test_the_published_transport_stays_away_from_the_dynamics_of_the_metric(
    run: Stepper, problem: Problem
) -> None:
    expected = exact(problem, 0.5, 2 * 0.5 - 1)
    positions, _ = damped_errors(run, problem, expected, 0.5)
    assert positions.min() > 0.02
    assert abs(orders(positions)[-1]) < 0.3


@STEPPERS
@GEODESICS
def test_of_the_geodesics_the_published_transport_follows_the_euclidean_one(
    run: Stepper, metric: str, geodesic: Callable[..., Array], problem: Problem
) -> None:
    expected = geodesic(problem.X, problem.Y, problem.V, 1.0)
    errors = free_errors(run, problem, expected, metric)
    if metric == "euclidean":
        assert ((orders(errors) > 0.9) & (orders(errors) < 1.1)).all(), errors
    else:
        assert errors.min() > 0.05
        assert abs(orders(errors)[-1]) < 0.3
