"""Laws of the parametrized weights: registration, assignment, training, state, errors."""

import copy
import io

import pytest
import torch
from cases import in_turn, mixed
from map_cases import C128, MAPS, MapCase, gaussian, orthonormal, with_determinant
from torch import nn
from torch.nn.utils import parametrize

import stiefel_opt as so
from stiefel_opt.parametrizations import (
    CWY,
    EURNN,
    OWN,
    TCWY,
    GeneralizedHouseholder,
    Householder,
    MatrixExp,
    ScaledCayley,
    Trivialization,
    helfrich,
    henaff,
    householder_vectors,
)
from stiefel_opt.parametrizations import MAPS as NAMES

FORM = TCWY()
# One case of each map, and one of its real and one of its complex matrices.
EACH = {case.map: case for case in MAPS.values()}
FIRST = {case.map: case for case in reversed(MAPS.values())}
BOTH = {f"{case.map}-{case.dtype}": case for case in MAPS.values()}


def over(cases):
    return pytest.mark.parametrize("case", cases.values())


def invertible(cases, but=()):
    keep = {name: case for name, case in cases.items() if case.invertible}
    return {name: case for name, case in keep.items() if not name.startswith(but)}


def move(module, size=0.3, seed=5):
    """Add noise to all free tensors."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += size * noise


def reachable(case: MapCase):
    """A weight that is on the manifold, and off the centre of the map."""
    module = case.registered(seed=7)
    move(module)
    return module.weight.detach().clone()


def deviation(module, case):
    return so.orthonormality_error(module.weight, case.manifold).item()


# ---- every map -----------------------------------------------------------------------------------


def test_every_name_is_in_the_table():
    assert {case.map for case in MAPS.values()} == set(NAMES)


@over(MAPS)
def test_the_weight_is_orthonormal_wherever_the_free_tensors_are(case):
    module = case.registered()
    assert module.weight.shape == case.shape
    assert module.weight.dtype == case.dtype
    assert deviation(module, case) < 1e-13
    move(module, 1.0)
    assert deviation(module, case) < 1e-13


@over(invertible(FIRST, but=("eurnn",)))  # it starts at random
def test_registration_keeps_a_weight_that_the_map_reaches(case):
    weight = reachable(case)
    module = nn.Module()
    module.weight = nn.Parameter(weight.clone())
    so.orthogonal(module, "weight", case.map, **case.options)
    torch.testing.assert_close(module.weight, weight, rtol=0, atol=1e-12)


@over(invertible(MAPS))
def test_assignment_is_exact(case):
    weight = reachable(case)
    module = case.registered(seed=1)
    move(module, seed=8)
    assert (module.weight - weight).abs().max() > 1e-3
    module.weight = weight
    torch.testing.assert_close(module.weight, weight, rtol=0, atol=1e-12)


@over({name: EACH[name] for name in ("cwy", "matrix_exp", "cayley", "own")})
def test_assignment_in_float32(case):
    dtype = torch.complex64 if case.dtype.is_complex else torch.float32
    module = case.registered(dtype)
    weight = reachable(case).to(dtype)
    module.weight = weight
    torch.testing.assert_close(module.weight, weight, rtol=0, atol=1e-5)


@over(
    {name: EACH[name] for name in ("householder", "matrix_exp", "trivialization", "own", "eurnn")}
)
def test_assignment_of_what_is_not_orthonormal_is_an_error(case):
    module = case.registered()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"`weight` must be .*orthonormal to be assigned"):
        module.weight = 1.1 * module.weight.detach()
    with pytest.raises(ValueError, match="`weight` must be finite"):
        module.weight = torch.full(case.shape, torch.nan, dtype=case.dtype)
    with pytest.raises(ValueError, match="`weight` must have shape"):
        module.weight = torch.ones(7, 8, dtype=case.dtype)
    torch.testing.assert_close(module.state_dict(), before)


@over(invertible(EACH))
def test_assignment_of_another_dtype_is_an_error_and_changes_nothing(case):
    module = case.registered()
    move(module)
    before, weight = copy.deepcopy(module.state_dict()), reachable(case)
    for dtype in {torch.float32, torch.bfloat16, torch.complex64, C128} - {case.dtype}:
        value = weight if dtype.is_complex or not weight.is_complex() else weight.real
        with pytest.raises(TypeError, match=r"`weight` must have dtype .* to be assigned"):
            module.weight = value.to(dtype)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_assignment_follows_the_dtype_of_the_module():
    layer = so.orthogonal(nn.Linear(3, 6), map="trivialization")
    point = orthonormal(6, 3)
    layer.double().weight = point
    torch.testing.assert_close(layer.weight, point, rtol=0, atol=1e-12)
    state = {name: value.float() for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    layer(torch.ones(3))
    layer.weight = point.float()
    torch.testing.assert_close(layer.weight, point.float(), rtol=0, atol=1e-6)
    with pytest.raises(TypeError, match=r"`weight` must have dtype torch\.float32"):
        layer.weight = point


@over(invertible(BOTH, but=("eurnn", "householder", "tcwy")))  # angles are real; others as cwy
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_the_weight_stays_orthonormal_when_its_dtype_changes(case):
    """The base of a trivialization and the phases of complex reflections are tensors too."""
    down, up = (torch.complex64, C128) if case.dtype.is_complex else (torch.bfloat16, torch.float32)
    module = case.registered(None if case.dtype.is_complex else torch.float32)
    module.weight = reachable(case).to(module.weight.dtype)
    before = module.weight.detach().clone()
    module.to(down).to(up)
    assert module.weight.dtype == up
    assert deviation(module, case) < (1e-13 if case.dtype.is_complex else 3e-6)
    near = 1e-5 if case.dtype.is_complex else 0.2
    torch.testing.assert_close(module.weight, before, rtol=0, atol=near)


def test_a_state_dict_written_under_another_default_device_has_values():
    layer = so.orthogonal(nn.Linear(3, 3), map="trivialization")
    with torch.device("meta"):
        state = layer.state_dict()
    assert not any(value.is_meta for value in state.values())
    layer.load_state_dict(state)


@pytest.mark.parametrize("name", ["matrix_exp", "trivialization"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_base_of_a_half_precision_checkpoint_is_made_orthonormal(name, assign):
    layer = so.orthogonal(nn.Linear(12, 40), map=name)
    weight = layer.weight.detach().clone()
    state = {
        key: value.bfloat16() if value.is_floating_point() else value
        for key, value in layer.state_dict().items()
    }
    kept = {key: value.clone() for key, value in state.items()}
    other = so.orthogonal(nn.Linear(12, 40), map=name)
    other.load_state_dict(state, assign=assign)
    torch.testing.assert_close(state, kept, rtol=0, atol=0)
    assert so.orthonormality_error(other.float().weight) < 3e-6
    torch.testing.assert_close(other.weight, weight, rtol=0, atol=1e-2)


def test_a_base_that_moves_in_half_precision_stays_orthonormal():
    layer = so.orthogonal(nn.Linear(12, 40), map="trivialization", every=1).bfloat16()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for seed in range(5):
        layer(gaussian(12, seed=seed).bfloat16()).square().sum().backward()
        optimizer.step()
        layer(torch.ones(12, dtype=torch.bfloat16))
        assert layer.parametrizations.weight[0].base.dtype == torch.float32
        assert so.orthonormality_error(layer.parametrizations.weight[0].base) < 3e-6


@over(EACH)
def test_state_dict_copy_and_removal(case):
    module = case.registered()
    move(module)
    weight = module.weight.detach().clone()
    torch.testing.assert_close(copy.deepcopy(module).weight, weight)

    other = case.registered(seed=2)
    move(other, seed=11)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.weight, weight)

    parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module.weight, weight)
    assert type(module.weight) is nn.Parameter


@over(EACH)
def test_starts_are_reproducible_and_one_free_tensor_is_the_old_parameter(case):
    """A new optimizer is not needed for it."""
    first, second = case.registered(seed=4), case.registered(seed=4)
    assert torch.equal(first.weight, second.weight)
    with parametrize.cached():
        assert first.weight is first.weight
    module = case.module()
    parameter = module.weight
    so.orthogonal(module, "weight", case.map, **case.options)
    if len(list(module.parameters())) == 1:
        assert module.parametrizations.weight.original is parameter


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_turn(sorted(set(NAMES) - {"urnn", "eurnn"}), [torch.bfloat16, torch.float16]),
)
def test_half_precision_weights_and_autocast(name, dtype):
    layer = so.orthogonal(nn.Linear(4, 9, dtype=dtype), "weight", name)
    assert layer.weight.dtype == dtype
    assert so.orthonormality_error(layer.weight) < 0.02
    layer(torch.ones(2, 4, dtype=dtype)).sum().backward()
    assert layer.parametrizations.weight.original.grad.dtype == dtype
    layer = so.orthogonal(nn.Linear(4, 9), "weight", name)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.weight.dtype == torch.float32
        assert so.orthonormality_error(layer.weight) < 2e-6
        layer(torch.ones(2, 4)).sum().backward()


# ---- reach ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"), in_turn(["householder", "cwy", "tcwy", "matrix_exp", "matrix_exp"], [4, 5])
)
def test_a_square_weight_of_the_wrong_determinant_loses_the_sign_of_a_row(name, size):
    right = 1.0 if name == "matrix_exp" else (-1.0) ** size
    weight = with_determinant(orthonormal(size, size), -right)
    module = nn.Module()
    module.weight = nn.Parameter(weight.clone())
    with pytest.warns(UserWarning, match=f"pass determinant={-right:.0f} to keep it, or map="):
        so.orthogonal(module, map=name)
    torch.testing.assert_close(module.weight[:-1], weight[:-1], rtol=0, atol=1e-12)
    torch.testing.assert_close(module.weight[-1], -weight[-1], rtol=0, atol=1e-12)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=r"determinant.*to be assigned to .*got another matrix"):
        module.weight = weight
    torch.testing.assert_close(module.state_dict(), before)


@pytest.mark.parametrize("name", ["cayley", "trivialization"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_cayley_and_trivialization_reach_both_determinants(name, sign):
    layer = so.orthogonal(nn.Linear(6, 6, dtype=torch.float64), map=name)
    for weight in (
        with_determinant(orthonormal(6, 6, seed=3), sign),
        sign * torch.eye(6, dtype=torch.float64),
    ):
        layer.weight = weight
        torch.testing.assert_close(layer.weight, weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("near", "shape", "sign"),
    mixed(8, [0.0, 1e-30, 1e-16, 1e-9, 1e-4, 1.0], [(9, 4), (100, 70), (6, 6)], [-1.0, 1.0]),
)
def test_vectors_of_any_matrix(near, shape, sign):
    """Also close to the identity, where q - e_1 would cancel, and for columns -e_j."""
    noise = gaussian(*shape)
    point = torch.eye(*shape, dtype=torch.float64)
    point[:, 0] *= sign
    basis, triangular = torch.linalg.qr(point + near * noise)
    point = basis * triangular.diagonal().sign()
    if shape[0] == shape[1]:
        point = with_determinant(point, 1.0)
    vectors = householder_vectors(point)
    lengths = torch.linalg.vector_norm(vectors, dim=-2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    torch.testing.assert_close(FORM(vectors), point, rtol=0, atol=1e-13)
    single = FORM(vectors.float())
    torch.testing.assert_close(single.double(), point, rtol=0, atol=1e-5)


PI = torch.pi


@pytest.mark.parametrize(
    ("angles", "size"),
    [
        ([0.0, 0.0, 0.0, 0.5], 8),
        ([PI, 1.0, 1.0, 0.5], 8),
        ([3.1415926, -3.1415926, -3.1415926, 0.5], 8),
        *(
            ([PI - gap, PI - 2 * gap], size)
            for gap, size in in_turn([0.0, 1e-10, 3e-8, 1e-6, 1e-2], [4, 9])
        ),
    ],
)
def test_matrix_exp_takes_half_turns_repeated_angles_and_those_nearby(angles, size):
    c, s = (
        function(torch.tensor(angles, dtype=torch.float64)) for function in (torch.cos, torch.sin)
    )
    rotation = torch.eye(size, dtype=torch.float64)
    first, second = range(0, 2 * len(angles), 2), range(1, 2 * len(angles), 2)
    rotation[first, first] = rotation[second, second] = c
    rotation[first, second], rotation[second, first] = -s, s
    basis = orthonormal(size, size)
    weight = basis @ rotation @ basis.mT
    layer = so.orthogonal(nn.Linear(size, size, dtype=torch.float64), map="matrix_exp")
    layer.weight = weight
    gap = min(PI - abs(angle) for angle in angles)
    near = 1.5e-7 if 0 < gap < 1e-7 else 1e-12  # closer ones become half turns
    torch.testing.assert_close(layer.weight, weight, rtol=0, atol=near)


def test_few_reflections_are_found_again_and_others_refused():
    case = MAPS["cwy-few"]
    module = case.registered()
    rotation = with_determinant(orthonormal(6, 6), 1.0)
    with pytest.raises(ValueError, match=r"a product of 2 reflections.*assigned to CWY"):
        module.weight = rotation
    module.weight = torch.eye(6, dtype=torch.float64)
    torch.testing.assert_close(module.weight, torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 3, 6])
def test_eurnn_takes_any_unitary_matrix(size):
    points = orthonormal(3, size, size, dtype=torch.complex128)
    points[1] = torch.eye(size)
    points[2] = torch.eye(size)[torch.arange(size).roll(1)]
    module = nn.Module()
    module.weight = nn.Parameter(gaussian(3, size, size, dtype=torch.complex128))
    so.orthogonal(module, map="eurnn").weight = points
    torch.testing.assert_close(module.weight, points, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["urnn-batch", "eurnn-few"])
def test_some_unitary_products_have_no_way_back(name):
    module = MAPS[name].registered()
    with pytest.raises(ValueError, match="`weight` must be set through the free tensors"):
        module.weight = module.weight.detach()


def test_own_refuses_columns_with_a_mean():
    module = MAPS["own-tall"].registered()
    with pytest.raises(ValueError, match="that sum to zero to be assigned to OWN"):
        module.weight = orthonormal(6, 3)


def test_trivialization_moves_its_base_and_not_its_point():
    module = MAPS["trivialization-often"].registered()
    (map_,) = module.parametrizations.weight
    original = module.parametrizations.weight.original
    optimizer = torch.optim.SGD([original], lr=0.1)
    bases = [map_.base.clone()]
    for step in range(1, 7):
        module.weight.pow(3).sum().backward()
        optimizer.step()
        with torch.no_grad():
            expected = module.eval().weight.clone()
        found = module.train().weight
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        assert (original.abs().max() == 0) == (step % 2 == 0)
        bases.append(map_.base.clone())
    changed = [not torch.equal(*pair) for pair in zip(bases[1:], bases[:-1], strict=True)]
    assert changed == [False, True] * 3


@pytest.mark.parametrize(("stop", "way"), in_turn(range(1, 7), ["state_dict", "copy"]))
def test_trivialization_resumes_exactly(stop, way):
    """Saved between a step and the next forward, at any count of changes."""

    def steps(module, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            target = gaussian(6, 3, seed=number)
            (module.weight - target).square().sum().backward()
            optimizer.step()

    def build():
        generator = torch.Generator().manual_seed(0)
        layer = nn.Linear(3, 6, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(gaussian(6, 3))
        layer = so.orthogonal(layer, map="trivialization", every=3, generator=generator)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9)

    module, optimizer = build()
    steps(module, optimizer, range(stop))
    if way == "copy":
        other = copy.deepcopy(module)
        resumed = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    else:
        other, resumed = build()
        steps(other, resumed, range(2))  # a count of its own, to be forgotten
        other.load_state_dict(module.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((module, optimizer), (other, resumed)):
        steps(*pair, range(stop, 12))
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_base_moves_alike_whatever_kernels_an_optimizer_takes(kind):
    """Fused kernels do not raise the version of what they move."""

    def moves(**options):
        generator = torch.Generator().manual_seed(0)
        layer = nn.Linear(4, 7, bias=False)
        nn.init.orthogonal_(layer.weight, generator=generator)
        so.orthogonal(layer, map="trivialization", every=3)
        (free,), (tangent_map,) = layer.parameters(), layer.parametrizations.weight
        optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.05, **options)
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        bases, target = [], so.random_point(7, 4, generator=generator)
        for step in range(17):
            for _ in range(1 + step % 2):  # reading it twice is no change, nor are other steps
                (layer.weight - target).square().sum().backward()
                bases.append(tangent_map.base.clone())
                other.param_groups[0]["params"][0].grad = torch.ones(1)
                other.step()
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(bases), free.detach()

    slow, fused = moves(foreach=False), moves(fused=True)
    assert len(slow[0].unique(dim=0)) == 1 + 5
    for ours, theirs in zip(slow, fused, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_generalized_householder_is_a_contraction():
    layer = nn.Linear(6, 6, bias=False, dtype=torch.float64)
    parametrize.register_parametrization(layer, "weight", GeneralizedHouseholder(4))
    assert torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-14
    layer(torch.ones(6, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())
    with pytest.raises(ValueError, match="must be"):
        layer.weight = torch.eye(6, dtype=torch.float64)


def test_modules_map_free_tensors_before_they_are_registered():
    vectors = gaussian(6, 4)
    torch.testing.assert_close(Householder()(vectors), CWY()(vectors), rtol=0, atol=1e-14)
    torch.testing.assert_close(TCWY()(vectors), CWY()(vectors)[:, :4], rtol=0, atol=1e-14)
    assert OWN()(vectors).shape == MatrixExp()(vectors).shape == (6, 4)


# ---- starts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_random_rotations(size, generator):
    draws = {
        "henaff": henaff(size, generator=generator, dtype=torch.float64),
        "exponential": helfrich(size, generator=generator, dtype=torch.float64),
        "cayley": helfrich(size, through="cayley", generator=generator, dtype=torch.float64),
    }
    limits = {"henaff": torch.pi, "exponential": 1.0, "cayley": torch.pi / 2}
    for name, rotation in draws.items():
        torch.testing.assert_close(rotation.mT @ rotation, torch.eye(size, dtype=torch.float64))
        assert torch.linalg.det(rotation).item() == pytest.approx(1.0)
        angles = torch.atan2(rotation.diagonal(-1)[::2], rotation.diagonal()[: size // 2 * 2 : 2])
        assert (angles.abs() <= limits[name]).all()
        assert size < 2 or name == "henaff" or (angles > 0).all()


@pytest.mark.parametrize(
    ("name", "start", "size"),
    in_turn(["cwy", "tcwy", "matrix_exp", "cayley"], ["henaff", "helfrich"], [6, 7, 7, 6]),
)
def test_starts_as_in_the_literature(name, start, size):
    def layer(seed):
        generator = torch.Generator().manual_seed(seed)
        return so.orthogonal(nn.Linear(size, size), map=name, start=start, generator=generator)

    weight = layer(0).weight
    assert so.orthonormality_error(weight) < 1e-5
    assert torch.equal(weight, layer(0).weight)
    assert not torch.equal(weight, layer(1).weight)
    beyond_blocks = weight.detach().clone()
    for first in range(0, size, 2):
        beyond_blocks[first : first + 2, first : first + 2] = 0
    assert beyond_blocks.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("start", "dtype"), [("henaff", torch.complex64), ("helfrich", torch.complex128)]
)
def test_eurnn_takes_a_start(start, dtype):
    def weight(map_, seed=0):
        layer = nn.Linear(6, 6, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        return so.orthogonal(layer, map=map_, start=start, generator=generator).weight

    found = weight("eurnn")
    assert so.orthonormality_error(found) < 1e-5
    torch.testing.assert_close(found, weight("trivialization"), rtol=0, atol=1e-5)


def test_a_start_that_fails_leaves_the_weight():
    layer = nn.Linear(6, 6)
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match="must not be square"):
        so.orthogonal(layer, map="own", start="henaff")
    assert torch.equal(layer.weight, before)


# ---- reports -------------------------------------------------------------------------------------


def test_reports_include_parametrized_weights():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 9))
    so.orthogonal(model[0], map="tcwy", scale=2.0)
    so.orthogonal(model[1], map="cayley")
    so.constrain(model[2], heads=3)
    lines = {line.name: line for line in so.report(model).lines}
    assert list(lines) == ["2.weight", "0.weight", "1.weight"]
    assert [line.map for line in lines.values()] == ["", "TCWY", "ScaledCayley"]
    assert lines["0.weight"].shape == (6, 4)
    errors = [
        so.orthonormality_error(model[0].weight, so.Stiefel(scale=2.0)).item(),
        so.orthonormality_error(model[1].weight).item(),
        so.orthonormality_error(model[2].weight).item(),
    ]
    assert [lines[f"{k}.weight"].error for k in range(3)] == errors
    assert so.orthonormality_error(model).item() == max(errors)
    text = str(so.report(model))
    assert "by TCWY" in text
    assert "tag lost" not in text


@over({name: EACH[name] for name in ("tcwy", "own", "urnn")})
def test_a_report_reads_a_weight_as_its_map_does(case):
    module = case.registered()
    move(module)
    (line,) = so.report(module).lines
    assert line.error == deviation(module, case) == so.orthonormality_error(module).item()


def test_reports_leave_out_what_is_not_meant_to_be_orthonormal():
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", GeneralizedHouseholder())
    assert so.report(layer).lines == ()
    chained = so.orthogonal(nn.Linear(4, 6))
    parametrize.register_parametrization(chained, "weight", nn.Softplus())
    assert so.report(chained).lines == ()
    with pytest.raises(ValueError, match=r"call so.constrain or so.orthogonal first"):
        so.orthonormality_error(chained)


def test_a_report_between_steps_changes_nothing():
    """Also for the map that counts its forwards."""
    modules = [MAPS["trivialization-often"].registered() for _ in range(2)]
    for step in range(5):
        for module in modules:
            module.weight.square().sum()
            move(module, 0.1, seed=step)
        so.report(modules[0])
    states = [module.state_dict() for module in modules]
    for module in modules:
        module.weight.sum()
    torch.testing.assert_close(*states, rtol=0, atol=1e-15)
    assert torch.equal(*(module.parametrizations.weight[0].get_extra_state() for module in modules))


# ---- errors --------------------------------------------------------------------------------------


# Shape of the weight, dtype, options.
WRONG_OPTIONS = [
    ((3, 3), None, {"map": "qr"}, ValueError, "`map` must be one of"),
    ((3, 3), None, {"name": "wait"}, ValueError, "did you mean weight"),
    ((3, 3), None, {"name": "bias"}, ValueError, "at least 2 dimensions"),
    (
        (2, 2), None, {"orthogonal_map": "cayley"}, TypeError,
        "got orthogonal_map; choose the map by map=, or take compat.orthogonal; its options are",
    ),
    (
        (2, 2), None, {"map": "cwy", "reflexions": 1}, TypeError,
        "got reflexions; its options are: reflections",
    ),
    (
        (3, 3), None, {"reflections": 2}, TypeError,
        "`options of 'tcwy'` must be known, got reflections; its options are: none",
    ),
    ((3, 3), None, {"map": "cwy", "reflections": 4}, ValueError, "`reflections` must be at most 3"),
    (
        (3, 5), None, {"map": "cwy", "reflections": 2}, ValueError,
        "`reflections` must be at least 3, the columns of a tall matrix",
    ),
    (
        (3, 3), None, {"map": "cwy", "reflections": 0}, ValueError,
        "`reflections` must be a positive integer",
    ),
    ((3, 3), None, {"map": "own"}, ValueError, "`weight` must not be square: OWN"),
    ((3, 3), None, {"map": "eurnn"}, TypeError, "`weight` must be complex"),
    ((3, 4), torch.complex64, {"map": "urnn"}, ValueError, "`weight` must be square"),
    (
        (3, 4), None, {"start": "henaff"}, ValueError,
        "`start` must be None for matrices that are not square",
    ),
    (
        (3, 3), None, {"map": "cwy", "reflections": 2, "start": "henaff"}, ValueError,
        "`start` must be None for .cwy., reflections=2: it starts at random, got .henaff.",
    ),
    (
        (3, 3), torch.complex64, {"map": "urnn", "start": "henaff"}, ValueError,
        "`start` must be None for .urnn.: it starts at random",
    ),
    ((3, 3), None, {"start": "zeros"}, ValueError, "`start` must be one of"),
    ((3, 4), None, {"heads": 3}, ValueError, "`heads of weight` must divide its 4 rows"),
    (
        (4, 4), None, {"map": "cayley", "negative": 5}, ValueError,
        "`negative` must be at most 4, the columns, got 5",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "options", "error", "message"), WRONG_OPTIONS)
def test_wrong_options_are_named(shape, dtype, options, error, message):
    with pytest.raises(error, match=message):
        so.orthogonal(nn.Linear(*shape, dtype=dtype), **options)


WRONG = [
    (lambda: so.orthogonal([]), TypeError, "`module` must be a torch.nn.Module"),
    (
        lambda: so.orthogonal(so.constrain(nn.Linear(3, 3))),
        ValueError,
        "`weight` must not be tagged",
    ),
    (
        lambda: so.orthogonal(so.orthogonal(nn.Linear(3, 3))),
        ValueError,
        "`weight` must be an unconstrained parameter, got one that TCWY computes; remove that",
    ),
    (
        lambda: so.orthogonal(nn.Linear(3, 3, device="meta")),
        ValueError,
        "`weight` must have values",
    ),
    (lambda: Trivialization(every=0), ValueError, "`every` must be a positive integer or None"),
    (lambda: ScaledCayley(-1), ValueError, "`negative` must be at least 0, got -1"),
    (lambda: EURNN(layers=0), ValueError, "`layers` must be a positive integer"),
    (lambda: TCWY(manifold=3), TypeError, "`manifold` must be a Stiefel"),
    (lambda: TCWY(manifold=so.Stiefel(rows=(0, 2))), ValueError, "`manifold` must have no rows"),
    (lambda: henaff(0), ValueError, "`size` must be a positive integer"),
    (lambda: helfrich(4, through="qr"), ValueError, "`through` must be one of"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_that_no_map_has_is_refused(dtype, name):
    layer = nn.Linear(4, 4)
    value = layer.weight.detach().to(dtype)
    layer.weight = nn.Parameter(value, requires_grad=False)
    with pytest.raises(TypeError, match=f"`weight` must be one of .* got {dtype}"):
        so.orthogonal(layer, map=name)
    assert layer.weight.data_ptr() == value.data_ptr()
    assert not parametrize.is_parametrized(layer)


@pytest.mark.filterwarnings("ignore:.* has determinant .*, and 'cayley' reaches:UserWarning")
@pytest.mark.parametrize("negative", [0, 3])
def test_the_signs_of_a_cayley_map_can_be_given(negative):
    generator = torch.Generator().manual_seed(5)
    signs = torch.tensor([1.0] * (6 - negative) + [-1.0] * negative, dtype=torch.float64)
    for shape in ((6, 6), (9, 6)):
        for _ in range(4):
            layer = nn.Linear(*reversed(shape), bias=False, dtype=torch.float64)
            nn.init.orthogonal_(layer.weight, generator=generator)
            drawn = layer.weight.detach().clone()
            so.orthogonal(layer, map="cayley", negative=negative)
            (parametrization,) = layer.parametrizations.weight
            assert torch.equal(parametrization.signs, signs)
            begun = layer.weight.detach()
            if shape[0] == shape[1]:
                assert float(torch.linalg.det(begun)) == pytest.approx((-1) ** negative)
                torch.testing.assert_close(begun[:-1], drawn[:-1])
                with pytest.raises(ValueError, match="must be D times one without eigenvalue -1"):
                    layer.weight = torch.cat([-begun[:1], begun[1:]])
            else:
                torch.testing.assert_close(begun, drawn)


@pytest.mark.parametrize("name", ["matrix_exp", "trivialization", "cayley"])
@pytest.mark.parametrize("shape", [(12, 12), (20, 9), (31, 4)])
@pytest.mark.parametrize("length", [1e2, 1e4, 3e5, 1e8, 1e20])
def test_a_long_parameter_is_mapped_to_the_manifold_or_refused(name, shape, length):
    layer = so.orthogonal(nn.Linear(shape[1], shape[0], bias=False), map=name)
    (free,) = layer.parameters()
    noise = gaussian(*shape, dtype=torch.float32)
    with torch.no_grad():
        free.copy_(noise * (length / noise.norm()))
    if length < 1e6:
        weight = layer.weight
        assert so.orthonormality_error(weight) < 1e-4
        weight.sum().backward()
        assert free.grad.isfinite().all()
    else:
        with pytest.raises(ValueError, match="must be shorter than"):
            _ = layer.weight


@pytest.mark.parametrize("kind", ["zero", "constant", "equal", "a dependent one"])
def test_own_refuses_columns_that_are_dependent(kind):
    layer = so.orthogonal(nn.Linear(5, 9, bias=False), map="own")
    (free,) = layer.parameters()
    with torch.no_grad():
        if kind == "a dependent one":
            free[:, 0] = 2 * free[:, 1] - free[:, 3] + 0.7
        else:
            free[:, :2] = {"zero": 0.0, "constant": 0.3, "equal": free[:, 2:3]}[kind]
    with pytest.raises(ValueError, match="must have independent columns"):
        _ = layer.weight
