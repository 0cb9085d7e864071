"""Points of a reading: parameters made by hand, tangents, retractions, and kept norms."""

import dataclasses
from typing import Any

import pytest
import torch
from cases import mixed
from contract import optimizer
from optimizers import OPTIMIZERS
from torch import nn

import stiefel_opt as so

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


@pytest.mark.parametrize(("rule", "name"), mixed(16, OPTIMIZERS, ["tall", "wide", "heads", "rows"]))
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
