"""The determinant of square matrices: one choice where a point is made, kept, loaded or shown."""

import copy
import io
import warnings

import pytest
import torch
from optimizers import PUBLISHED, TABLE
from torch import nn
from training import train

import stiefel_opt as so

SQUARE_RULES = [*{row.optimizer: row for row in (TABLE | PUBLISHED).values()}]
SIGNS = [1, -1]
F64 = torch.float64
READINGS = [  # stored shape, reading: several square matrices each
    ((4, 4), {}),
    ((3, 2, 5, 5), {}),
    ((6, 3), {"heads": 2}),
    ((7, 3), {"rows": (0, 6), "heads": 2}),
    ((3, 6), {"transposed": True, "heads": 2, "scale": 2.0}),
    ((8, 2, 2, 2), {"flatten": True}),
]


def gaussian(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def determinants(tensor, reading):
    tensor = tensor.detach().double()
    matrices = [reading.matrices(part, i) for i, part in enumerate(reading.parts(tensor))]
    return torch.cat([torch.linalg.det(each / reading.scale).reshape(-1) for each in matrices])


def layer_of(weight):
    layer = nn.Linear(weight.size(1), weight.size(0), bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return layer


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(("shape", "options"), READINGS)
def test_points_that_are_projected_and_drawn_have_it(shape, options, sign):
    reading = so.Stiefel(**options, determinant=sign)
    value = gaussian(*shape)
    projected = so.project_(value.clone(), reading)
    drawn = so.random_point(*shape, manifold=reading, dtype=F64)
    filled = so.orthogonal_(torch.ones(shape, dtype=F64), manifold=reading)
    parameter = so.ManifoldParameter(value.clone(), reading)
    for tensor in (projected, drawn, filled, parameter, so.polar(value, reading)):
        assert so.orthonormality_error(tensor, reading) < 1e-14
        dets = determinants(tensor, reading)
        torch.testing.assert_close(dets, torch.full_like(dets, sign))
    assert torch.equal(so.project_(projected.clone(), reading), projected)
    torch.testing.assert_close(projected, so.polar(value, reading), rtol=0, atol=1e-14)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize(
    ("size", "dtype"), [(2, torch.float16), (4, torch.bfloat16), (400, torch.float32)]
)
def test_large_and_half_precision_points_have_it(size, dtype, sign):
    """The product of the pivots of a large matrix is below the smallest number."""
    reading = so.Stiefel(determinant=sign)
    drawn = so.random_point(size, size, manifold=reading, dtype=dtype)
    wrong = torch.cat([-drawn[:1], drawn[1:]])
    points = [
        drawn,
        so.orthogonal_(torch.ones(size, size, dtype=dtype), manifold=reading),
        so.polar(gaussian(size, size).to(dtype), reading),
        so.polar(gaussian(size, size, seed=1).to(dtype), reading),
    ]
    for point in points:
        assert point.dtype == dtype
        assert so.orthonormality_error(point) < 10 * torch.finfo(dtype).eps
        assert float(torch.linalg.slogdet(point.float()).sign) == sign
    with pytest.warns(UserWarning, match="had the other determinant"):
        layer = so.constrain(layer_of(wrong), determinant=sign)
    assert float(torch.linalg.slogdet(layer.weight.detach().float()).sign) == sign
    assert so.report(layer).lines[0].determinant == f"{sign:+d}"


def test_drawn_rotations_are_uniform():
    """Moments of the trace on SO(3): 0, 1, 1 for tr Q, its square and its cube."""
    reading = so.Stiefel(determinant=1)
    points = so.random_point(
        20000, 3, 3, manifold=reading, generator=torch.Generator().manual_seed(1), dtype=F64
    )
    trace = points.diagonal(dim1=-2, dim2=-1).sum(-1)
    for values, expected in [(trace, 0.0), (trace**2, 1.0), (trace**3, 1.0)]:
        assert abs(values.mean().item() - expected) < 4 * values.std().item() / 20000**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sign", SIGNS)
def test_tagged_layers_have_it_and_every_optimizer_keeps_it(sign, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False, dtype=dtype) for _ in range(10)))
    so.constrain(model, "*", determinant=sign)
    reading = so.Stiefel(determinant=sign)
    optimizer = so.StiefelAdam(so.param_groups(model), lr=0.3)
    train(optimizer, lambda: model(torch.randn(8, 3, dtype=dtype)).sum(), 20)
    for layer in model:
        assert layer.weight.manifold == reading
        assert determinants(layer.weight, reading).item() == pytest.approx(sign, abs=0.1)


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("kind", SQUARE_RULES, ids=lambda kind: kind.__name__)
def test_the_first_step_projects_to_it(kind, sign):
    value = torch.diag(torch.tensor([2.0, 2.0, -2.0 * sign]))
    parameter = so.ManifoldParameter(value, so.Stiefel(determinant=sign), project=False)
    layer = so.constrain(layer_of(value), determinant=sign, project=False)
    optimizer = kind([parameter, layer.weight], lr=0.01)
    for weight in (parameter, layer.weight):
        weight.grad = gaussian(3, 3, dtype=torch.float32)
    optimizer.step()
    for weight in (parameter, layer.weight):
        assert float(torch.linalg.det(weight.detach())) == pytest.approx(sign, abs=1e-5)


def test_a_step_tells_of_orthonormal_weights_of_the_other_sign():
    """No module has a record of it, so that loading passes unseen."""
    module = nn.Module()
    module.weight = so.ManifoldParameter(torch.eye(3), so.Stiefel(determinant=1))
    optimizer = so.StiefelAdam(module.parameters(), lr=0.01)
    module.load_state_dict({"weight": -torch.eye(3)})
    module.weight.grad = gaussian(3, 3, dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"other determinant than \+1.*project_"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # once


# ---- what is said --------------------------------------------------------------------------------


def test_a_change_of_component_is_told_of_but_not_for_random_weights():
    rotation = so.random_point(5, 5, manifold=so.Stiefel(determinant=1), dtype=F64)
    with pytest.warns(UserWarning, match="`weight` had the other determinant, and becomes .* -1"):
        so.constrain(layer_of(rotation), determinant=-1)
    with pytest.warns(UserWarning, match="`data` had the other determinant"):
        so.ManifoldParameter(rotation, so.Stiefel(determinant=-1))
    several = so.random_point(3, 5, 5, manifold=so.Stiefel(determinant=1))
    several[1, 0] *= -1
    with pytest.warns(UserWarning, match="other determinant in 1 of 3 matrices"):
        so.ManifoldParameter(several, so.Stiefel(determinant=1))
    group = {"params": [nn.Parameter(rotation.clone())], "stiefel": {"determinant": -1}}
    with pytest.warns(UserWarning, match="parameter of shape"):
        so.StiefelSGD([group], lr=0.1)
    so.constrain(layer_of(rotation), determinant=1)
    for size in (3, 5, 16):
        for seed in range(10):  # of either sign
            torch.manual_seed(seed)
            so.constrain(nn.Linear(size, size), determinant=1)


def test_loaded_values_of_the_other_sign_are_told_of():
    layer = so.constrain(nn.Linear(4, 4), determinant=1)
    saved = layer.state_dict()
    other = {**saved, "weight": torch.cat([-saved["weight"][:1], saved["weight"][1:]])}
    with pytest.warns(UserWarning, match=r"loaded with the other determinant.*project_"):
        layer.load_state_dict(other)
    with pytest.warns(
        UserWarning, match="nearest point to `weight` is not unique"
    ):  # all values are 1
        so.project_(layer)
    assert determinants(layer.weight, layer.weight.manifold).item() == pytest.approx(1)
    layer.load_state_dict(saved)


def test_the_report_shows_it():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 12), nn.Linear(3, 5))
    so.constrain(model, "0.weight", determinant=-1)
    so.constrain(model, "1.weight", heads=4)
    so.constrain(model, "2.weight")
    with torch.no_grad():
        heads = model[1].weight.view(4, 3, 3)
        heads[:, 0] *= torch.linalg.det(heads)[:, None]
        heads[2, 0] *= -1
    report = so.report(model)
    assert [line.determinant for line in report.lines] == ["-1", "1 of 4 are -1", None]
    assert "determinant" in str(report)
    assert "square, determinant -1" in str(report)
    assert "determinant" not in str(so.report(so.constrain(nn.Linear(3, 5))))
    rows = so.constrain(nn.Linear(3, 7), rows=(0, 6), heads=2)
    assert so.report(rows).lines[0].determinant.endswith("of 2 are -1")


def test_the_report_flags_the_other_sign():
    layer = so.constrain(nn.Linear(3, 3), determinant=1)
    assert not so.report(layer).lines[0].mirrored
    assert "the other determinant" not in str(so.report(layer))
    with torch.no_grad():
        layer.weight[0] *= -1
    assert so.report(layer).lines[0].mirrored
    assert "the other determinant: so.project_(model)" in str(so.report(layer))


@pytest.mark.parametrize("kind", [so.StiefelSGD, so.StiefelAdam])
def test_the_documentation_says_that_the_other_one_is_not_tried(kind):
    assert "the other component is never tried" in kind.__doc__


# ---- data, copies, refusals ----------------------------------------------------------------------


def test_it_survives_groups_copies_and_checkpoints():
    reading = so.Stiefel(heads=2, determinant=-1)
    assert so.Stiefel.from_dict(reading.as_dict()) == reading
    layer = so.constrain(nn.Linear(3, 6), heads=2, determinant=-1)
    for other in (copy.deepcopy(layer), so.retag(copy.deepcopy(layer))):
        assert other.weight.manifold == reading
    buffer = io.BytesIO()
    torch.save(layer.weight, buffer)
    buffer.seek(0)
    assert torch.load(buffer).manifold == reading
    optimizer = so.StiefelSGD(so.param_groups(layer), lr=0.1)
    layer(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    again = so.StiefelSGD(so.param_groups(layer), lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    saved = [group["stiefel"] for group in again.param_groups if group["stiefel"]]
    assert [reading["determinant"] for reading in saved] == [-1]


@pytest.mark.parametrize("value", [0, 2, 1.0, True, "+1"])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="`determinant` must be 1, -1 or None"):
        so.Stiefel(determinant=value)


COMPLEX = torch.ones(3, 3, dtype=torch.complex64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: so.constrain(nn.Linear(3, 4), determinant=1),
        lambda: so.ManifoldParameter(torch.ones(4, 3), so.Stiefel(determinant=1)),
        lambda: so.random_point(4, 3, manifold=so.Stiefel(determinant=1)),
        lambda: so.orthogonal_(torch.ones(4, 3), manifold=so.Stiefel(determinant=1)),
        lambda: so.project_(torch.ones(4, 3), so.Stiefel(determinant=1)),
        lambda: so.constrain(nn.Linear(3, 9), heads=1, determinant=1),
    ],
)
def test_rectangles_are_refused_by_name(call):
    with pytest.raises(ValueError, match=r"must be None where matrices of `.*` are not"):
        call()


def test_complex_matrices_are_refused_in_words():
    reading = so.Stiefel(determinant=1)
    layer = nn.Linear(3, 3, dtype=torch.complex64)
    for call in (
        lambda: so.constrain(layer, determinant=1),
        lambda: so.constrain(layer, determinant=1, project=False),
        lambda: so.ManifoldParameter(COMPLEX, reading),
        lambda: so.random_point(3, 3, manifold=reading, dtype=torch.complex64),
        lambda: so.orthogonal_(COMPLEX.clone(), manifold=reading),
        lambda: so.project_(COMPLEX.clone(), reading),
        lambda: so.polar(COMPLEX, reading),
    ):
        with pytest.raises(ValueError, match=r"for the complex matrices of .* theirs is a phase"):
            call()


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("kind", [so.StiefelSGD, so.StiefelAdam, so.StiefelAdamW])
def test_complex_parameters_of_a_group_with_a_determinant_are_refused_in_words(kind):
    group = {"params": [nn.Parameter(COMPLEX.clone())], "stiefel": so.Stiefel(determinant=1)}
    with pytest.raises(ValueError, match=r"for the complex matrices of .* theirs is a phase"):
        kind([group], lr=0.1)
    layer = so.constrain(nn.Linear(3, 3), determinant=1).to(torch.complex64)
    assert "determinant +1" in str(so.report(layer))
    optimizer = kind(layer.parameters(), lr=0.1)
    layer(COMPLEX[:2]).abs().sum().backward()
    with pytest.raises(ValueError, match=r"for the complex matrices of .* theirs is a phase"):
        optimizer.step()


def test_none_stays_as_it_comes():
    weight = gaussian(3, 20, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        point = so.ManifoldParameter(weight).detach()
    assert torch.equal(torch.linalg.det(point).sign(), torch.linalg.det(weight).sign())
    assert 0 < int((torch.linalg.det(point) < 0).sum()) < 60
