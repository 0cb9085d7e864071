"""Laws of the curves, frames and directions of L-BFGS: isometry, locking, order, exactness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import stiefel_opt as so
from stiefel_opt.methods.lbfgs import rule as lbfgs

SHAPES = ((7, 1), (9, 4), (5, 4), (4, 4), (1, 1))
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def point(shape: tuple[int, int], dtype: torch.dtype, count: int = 3) -> Tensor:
    return so.random_point(count, *shape, dtype=dtype)


def tangent(at: Tensor) -> Tensor:
    return so.project_tangent(at, torch.randn_like(at))


def inner(at: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The canonical metric, tr left'(I - XX'/2) right, real."""
    across = right - at @ (at.mH @ right) / 2
    return (left.conj() * across).sum((-2, -1)).real


def tolerance(dtype: torch.dtype) -> float:
    return 200 * torch.finfo(dtype).eps


@dtypes
@shapes
def test_a_curve_stays_on_the_manifold_at_constant_speed(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    start = point(shape, dtype)
    direction = tangent(start)
    path = lbfgs.curve(start, direction)
    speed = inner(start, direction, direction)
    for t in (0.0, 1e-3, 0.5, 1.0, 10.0):
        there, velocity = lbfgs.along(path, t)
        assert float(so.orthonormality_error(there)) <= tolerance(dtype)
        assert so.project_tangent(there, velocity).sub(velocity).abs().max() < tolerance(dtype) * (
            1 + t
        )
        torch.testing.assert_close(
            inner(there, velocity, velocity), speed, rtol=tolerance(dtype) * (1 + t), atol=1e-5
        )


def test_a_matrix_that_does_not_move_keeps_its_bits() -> None:
    start = point((8, 3), torch.float32)
    direction = tangent(start)
    direction[1] = 0
    there, velocity = lbfgs.along(lbfgs.curve(start, direction), 1.0)
    assert torch.equal(there[1], start[1])
    assert not velocity[1].any()
    assert not torch.equal(there[0], start[0])


@dtypes
@shapes
def test_coordinates_are_an_isometry_onto_their_image(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    start, reference = point(shape, dtype), point(shape, dtype)
    at = lbfgs.frame(start, reference)
    if lbfgs.is_ill_conditioned(at):
        at = lbfgs.frame(start, start)
    left, right = tangent(start), tangent(start)
    a, b = lbfgs.coordinates(at, left), lbfgs.coordinates(at, right)
    dots = (a.conj() * b).sum((-2, -1)).real
    torch.testing.assert_close(dots, inner(start, left, right), rtol=1e-4, atol=tolerance(dtype))
    torch.testing.assert_close(lbfgs.from_coordinates(at, a), left, rtol=0, atol=tolerance(dtype))


@pytest.mark.parametrize("angle", [0.0, 1e-9, 0.3, 1.5, 1.7, 3.0, 3.14159265])
def test_the_rotation_is_an_isometry_that_takes_a_to_b(angle: float) -> None:
    before, other = torch.linalg.qr(torch.randn(40, 2, dtype=torch.float64))[0].mT
    after = torch.cos(torch.tensor(angle)) * before + torch.sin(torch.tensor(angle)) * other
    after = after / after.norm()
    vectors = torch.randn(6, 40, dtype=torch.float64)
    carried = lbfgs.rotated_(vectors.clone(), before, after)
    torch.testing.assert_close(carried @ carried.mT, vectors @ vectors.mT)
    torch.testing.assert_close(lbfgs.rotated_(before.clone(), before, after), after)
    torch.testing.assert_close(lbfgs.rotated_(carried, after, before), vectors)


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("t", [0.1, 1.0, 3.0])
def test_the_locking_condition(shape: tuple[int, int], t: float) -> None:
    """T d = X'(t), for the transport as steps use it, and T is an isometry of the metric."""
    start = point(shape, torch.float64, 1)
    direction, other = tangent(start), tangent(start)
    there, velocity = lbfgs.along(lbfgs.curve(start, direction), t)
    frames = lbfgs.frame(start, start), lbfgs.frame(there, start)
    length = inner(start, direction, direction).sqrt()
    before = lbfgs.coordinates(frames[0], direction).flatten() / length
    after = lbfgs.coordinates(frames[1], velocity).flatten() / length
    flat = torch.cat([lbfgs.coordinates(frames[0], each) for each in (direction, other)]).flatten(1)
    carried = lbfgs.rotated_(flat, before, after).view(2, *direction.shape)
    along, aside = (lbfgs.from_coordinates(frames[1], each) for each in carried)
    torch.testing.assert_close(along, velocity)
    torch.testing.assert_close(inner(there, aside, along), inner(start, other, direction))
    torch.testing.assert_close(inner(there, aside, aside), inner(start, other, other))
