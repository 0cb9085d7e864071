"""Migration from other packages, projection, and clipping by the Riemannian norm."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from contract import warnings_of
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training import train

import stiefel_opt as so

# ---- migration ---------------------------------------------------------------------------------


def torch_orthogonal(layer):
    return parametrizations.orthogonal(layer)


def geotorch_orthogonal(layer):
    geotorch = pytest.importorskip("geotorch")
    geotorch.orthogonal(layer, "weight")
    return layer


SOURCES = {
    "torch": (torch_orthogonal, so.from_torch_orthogonal),
    "geotorch": (geotorch_orthogonal, so.from_geotorch),
}
every_source = pytest.mark.parametrize("source", SOURCES)


@every_source
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parametrized_weights_keep_their_values_and_train_on(source, dtype, generator):
    orthogonal, convert = SOURCES[source]
    layers = [nn.Linear(5, 3), nn.Linear(3, 7), nn.Linear(7, 7), nn.Conv2d(2, 4, 3)]
    model = nn.Sequential(*(orthogonal(layer.to(dtype)) for layer in layers), nn.Linear(7, 2))
    x = torch.randn(6, 5, generator=generator, dtype=dtype)
    model[:3](x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # so that the value is not the start value
    values = [layer.weight.detach().clone() for layer in model[:4]]
    originals = [layer.parametrizations.weight.original for layer in model[:4]]
    outputs = model[:3](x).detach()
    assert convert(model) is model
    for layer, value, original in zip(model[:4], values, originals, strict=True):
        assert layer.weight is original
        assert layer.weight.manifold == so.Stiefel()  # of a convolution, too
        assert layer.weight.grad is None
        tolerance = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(layer.weight.detach(), value, rtol=0, atol=tolerance)
    assert [type(layer) for layer in model[:4]] == [type(layer) for layer in layers]
    assert list(model[0].state_dict()) == ["bias", "weight"]
    torch.testing.assert_close(model[:3](x).detach(), outputs)
    opt = so.StiefelSGD(model.parameters(), lr=0.1)
    before = so.report(model)
    model[:3](x).square().sum().backward()
    opt.step()
    assert len(before.lines) == 4
    assert not torch.equal(model[1].weight, values[1])
    assert so.orthonormality_error(model) < 200 * torch.finfo(dtype).eps


@every_source
def test_a_weight_below_a_further_parametrization_is_refused(source):
    orthogonal, convert = SOURCES[source]
    model = nn.Sequential(orthogonal(nn.Linear(4, 4)), orthogonal(nn.Linear(4, 4)))
    torch.nn.utils.parametrize.register_parametrization(model[1], "weight", nn.Identity())
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=r"`1.weight` must have .* as its only parametrization"):
        convert(model)
    assert list(model.state_dict()) == keys


def test_other_constraints_of_geotorch_stay():
    model = nn.Sequential(geotorch_orthogonal(nn.Linear(4, 3)), nn.Linear(3, 3))
    pytest.importorskip("geotorch").skew(model[1], "weight")
    so.from_geotorch(model)
    weight = model[1].weight
    torch.testing.assert_close(weight, -weight.mT)
    assert isinstance(model[0].weight, so.ManifoldParameter)


def geoopt_model():
    geoopt = pytest.importorskip("geoopt")
    model = nn.Module()
    model.tall = geoopt.ManifoldParameter(torch.randn(6, 3), manifold=geoopt.Stiefel())
    model.batch = geoopt.ManifoldParameter(
        torch.randn(2, 5, 2), manifold=geoopt.EuclideanStiefelExact()
    )
    model.free = geoopt.ManifoldParameter(torch.randn(3, 3), manifold=geoopt.Euclidean())
    model.again = model.tall
    with torch.no_grad():
        model.tall.proj_()
        model.batch.proj_()
    return model


def test_parameters_of_geoopt_stay_the_same_objects():
    model = geoopt_model()
    objects = dict(model.named_parameters(remove_duplicate=False))
    values = {name: parameter.detach().clone() for name, parameter in objects.items()}
    assert so.from_geoopt(model) is model
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is objects[name]
        torch.testing.assert_close(parameter.data, torch.Tensor(values[name]), rtol=0, atol=1e-6)
    assert type(model.free) is nn.Parameter
    assert not hasattr(model.free, "manifold")
    assert model.again is model.tall
    assert model.tall.manifold == model.batch.manifold == so.Stiefel()
    opt = so.StiefelAdam(model.parameters(), lr=0.1)
    sum((p * torch.randn(p.shape)).sum() for p in model.parameters()).backward()
    opt.step()
    assert so.orthonormality_error(model) < 1e-5
    assert torch.equal(copy.deepcopy(model).tall, model.tall)


def test_other_manifolds_of_geoopt_are_refused_on_request():
    geoopt = pytest.importorskip("geoopt")
    model = geoopt_model()
    model.ball = geoopt.ManifoldParameter(torch.zeros(3), manifold=geoopt.PoincareBall())
    with pytest.raises(ValueError, match="`ball` must be on a Stiefel manifold to be converted"):
        so.from_geoopt(model, strict=True)
    assert type(model.tall) is geoopt.ManifoldParameter


@pytest.mark.parametrize(
    ("convert", "wanted"),
    [
        (so.from_torch_orthogonal, "a weight of torch.nn.utils.parametrizations.orthogonal"),
        (so.from_geotorch, "a weight of geotorch.orthogonal"),
        (so.from_geoopt, "a geoopt.ManifoldParameter on a Stiefel manifold"),
        (so.project_, "a constrained parameter"),
    ],
)
def test_nothing_to_do_is_an_error(convert, wanted):
    with pytest.raises(ValueError, match=f"`model` must have {wanted}, got a Linear of none"):
        convert(nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got list"):
        convert([])


# ---- projection --------------------------------------------------------------------------------


def constrained_model():
    return nn.Sequential(
        so.constrain(nn.Linear(6, 4)),
        so.constrain(nn.Linear(4, 8), heads=2, scale=2.0),
        so.constrain(nn.Linear(8, 10), rows=((0, 4), (5, 7))),
        so.constrain(nn.Conv2d(2, 3, 2)),
        nn.Linear(3, 2),
    )


def test_project_leaves_good_values_and_plain_ones_bit_for_bit():
    model = constrained_model()
    before = copy.deepcopy(model.state_dict())
    assert so.project_(model) is model
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_project_gives_the_nearest_points_and_spares_plain_rows():
    model = constrained_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    before = copy.deepcopy(model)
    objects = list(model.parameters())
    so.project_(model)
    assert all(p is q for p, q in zip(model.parameters(), objects, strict=True))
    left, _, right = torch.linalg.svd(before[0].weight, full_matrices=False)
    torch.testing.assert_close(model[0].weight, left @ right)
    left, _, right = torch.linalg.svd(before[1].weight[:4], full_matrices=False)
    torch.testing.assert_close(model[1].weight[:4], 2 * left @ right)
    plain = [4, 7, 8, 9]
    assert torch.equal(model[2].weight[plain], before[2].weight[plain])
    assert torch.equal(model[4].weight, before[4].weight)
    assert so.orthonormality_error(model) < 1e-5


# ---- clipping ----------------------------------------------------------------------------------


def filled(model: nn.Module, generator: torch.Generator) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def tangent_norm(point: Tensor, grad: Tensor) -> Tensor:
    """By a basis of the tangent space: the gradient minus its part along X S, S symmetric."""
    X, G = (point, grad) if point.size(0) >= point.size(1) else (point.T, grad.T)
    overlap = X.T @ G
    return (G - X @ (overlap + overlap.T) / 2).norm()


def expected_norm(model: nn.Sequential) -> Tensor:
    first, heads, rows, conv = (layer.weight.detach() for layer in model[:4])
    grads = [layer.weight.grad for layer in model]
    norms = [tangent_norm(first, grads[0])]
    norms += [tangent_norm(heads[i : i + 4] / 2, grads[1][i : i + 4]) for i in (0, 4)]
    norms += [tangent_norm(rows[i:j], grads[2][i:j]) for i, j in ((0, 4), (5, 7))]
    norms += [grads[2][[4, 7, 8, 9]].norm()]
    norms += [tangent_norm(conv.flatten(1), grads[3].flatten(1)), grads[4].norm()]
    norms += [layer.bias.grad.norm() for layer in model]
    return torch.stack(norms).norm()


def test_norm_is_that_of_the_tangent_parts_and_all_gradients_get_one_factor(generator):
    model = filled(constrained_model().double(), generator)
    expected = expected_norm(model)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    objects = [parameter.grad for parameter in model.parameters()]
    found = so.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(found, expected)
    for parameter, grad, old in zip(model.parameters(), objects, before, strict=True):
        assert parameter.grad is grad
        torch.testing.assert_close(grad, old * (0.5 / (expected + 1e-6)))
    torch.testing.assert_close(expected_norm(model), torch.tensor(0.5).double())


def test_gradients_below_the_bound_keep_their_bits(generator):
    model = filled(constrained_model(), generator)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    so.clip_grad_norm_(model.parameters(), 1e6)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, old)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_in_half_precision_is_that_of_exact_products(dtype, generator):
    weight = so.constrain(nn.Linear(64, 256, bias=False, dtype=dtype)).weight
    normal = torch.randn(64, 64, generator=generator)
    skewed = 1e-2 * torch.randn(256, 64, generator=generator)
    weight.grad = (weight.detach().float() @ (normal + normal.T) + skewed).to(dtype)
    point, grad = weight.detach().double(), weight.grad.double()
    expected = tangent_norm(point, grad)
    torch.testing.assert_close(
        so.clip_grad_norm_(weight, 1e9).double(), expected, rtol=0.01, atol=0
    )


def test_a_call_of_torchs_function_needs_no_change(generator):
    model = filled(constrained_model(), generator)
    norm = so.clip_grad_norm_(model.parameters(), 1e9, 2.0, False, foreach=None)
    torch.testing.assert_close(norm, expected_norm(model))
    for wrong in (1.0, math.inf, True):
        with pytest.raises(ValueError, match="`norm_type` must be 2, got"):
            so.clip_grad_norm_(model.parameters(), 1.0, norm_type=wrong)


WAYS = ["on_manifold", "on_manifold, off", "edited on", "edited off", "copied"]


@pytest.mark.parametrize("way", WAYS)
def test_what_clipping_counts_is_what_the_latest_group_says(way: str) -> None:
    layer = so.constrain(nn.Linear(4, 4, bias=False))
    key = None if way == "edited off" else False
    if way != "on_manifold, off":
        optimizer = so.StiefelSGD([{"params": [layer.weight], "stiefel": key}], lr=1e-3)
    if way == "on_manifold":
        so.on_manifold(torch.optim.SGD(layer.parameters(), lr=1.0))
    elif way == "on_manifold, off":
        so.on_manifold(torch.optim.SGD([{"params": [layer.weight], "stiefel": False}], lr=1.0))
    elif way == "copied":
        layer = copy.deepcopy(layer)
    else:
        for now in (key, False if key is None else None):
            optimizer.param_groups[0]["stiefel"] = now
            layer.weight.grad = layer.weight.detach().clone()
            optimizer.step()
    layer.weight.grad = layer.weight.detach().clone()
    is_tangent = way in ("on_manifold", "edited on")
    wanted = 0.0 if is_tangent else float(layer.weight.grad.norm())
    norm = float(so.clip_grad_norm_(layer.parameters(), math.inf))
    assert norm == pytest.approx(wanted, abs=1e-5)


def test_plain_parameters_are_clipped_as_by_torch(generator):
    ours, theirs = filled(nn.Linear(5, 3), generator), nn.Linear(5, 3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        q.grad = p.grad.clone()
    found = so.clip_grad_norm_(ours.parameters(), 0.1)
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_sparse_plain_gradients_and_missing_ones():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    unused = so.constrain(nn.Linear(3, 3)).weight
    found = so.clip_grad_norm_([unused, *table.parameters()], 1.0)
    torch.testing.assert_close(found, torch.tensor(12.0).sqrt())
    assert unused.grad is None
    torch.testing.assert_close(table.weight.grad.to_dense().norm(), torch.tensor(1.0))
    assert so.clip_grad_norm_([unused], 1.0) == 0


def test_bad_norms():
    weight = so.constrain(nn.Linear(3, 3)).weight
    weight.grad = torch.full((3, 3), math.inf)
    with pytest.raises(ValueError, match="`norm of the gradients` must be finite"):
        so.clip_grad_norm_(weight, 1.0, error_if_nonfinite=True)
    assert weight.grad.isinf().all()
    assert not so.clip_grad_norm_(weight, 1.0).isfinite()
    with pytest.raises(ValueError, match=r"`max_norm` must be in \(0, inf\), got 0"):
        so.clip_grad_norm_(weight, 0)
    with pytest.raises(TypeError, match=r"got Linear; pass model\.parameters"):
        so.clip_grad_norm_(nn.Linear(2, 2), 1.0)


# ---- logging -----------------------------------------------------------------------------------


class Writer:
    """What is asked of a SummaryWriter."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))


def logged_model():
    torch.manual_seed(0)
    return nn.Sequential(
        so.constrain(nn.Linear(6, 5), heads=5),
        nn.Sequential(so.orthogonal(nn.Linear(5, 6), map="trivialization", every=2, scale=2.0)),
        so.orthogonal(nn.Linear(6, 4)),
        nn.Linear(4, 2),
    )


def trained_with(writer, generator, **options):
    model = logged_model()
    opt = so.StiefelAdam(model.parameters(), lr=0.01)
    handle = so.log_orthonormality(opt, model, writer, **options)
    train(opt, lambda: model(torch.randn(3, 6, generator=generator)).square().sum(), 7)
    return model, opt, handle


def test_errors_are_logged_every_so_many_steps_under_their_names(generator):
    writer = Writer()
    model, opt, handle = trained_with(writer, generator, every=3, first_step=2)
    tags = ["orthonormality_error/max"]
    tags += [f"orthonormality_error/{name}.weight" for name in ("0", "1.0", "2")]
    assert [(tag, step) for tag, _, step in writer.points] == [
        (tag, step) for step in (3, 6, 9) for tag in tags
    ]
    values = {tag: value for tag, value, step in writer.points if step == 9}
    weights = model[0].weight, model[1][0].weight / 2, model[2].weight
    expected = [
        float(so.orthonormality_error(weight, reading))
        for weight, reading in zip(weights, (so.Stiefel(heads=5), None, None), strict=True)
    ]
    assert list(values.values()) == pytest.approx([max(expected), *expected], rel=1e-3, abs=1e-8)
    assert 0 < max(values.values()) < 1e-5
    handle.remove()
    opt.step()
    assert len(writer.points) == 12


def test_errors_by_name_are_floats_of_the_lines_of_the_report_and_their_largest():
    model = logged_model()
    errors = so.orthonormality_errors(model)
    lines = {f"orthonormality_error/{line.name}": line.error for line in so.report(model).lines}
    assert errors == {"orthonormality_error/max": max(lines.values()), **lines}
    assert all(type(value) is float for value in errors.values())
    assert so.orthonormality_errors(nn.Linear(2, 2)) == {}
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert math.isnan(so.orthonormality_errors(model)["orthonormality_error/max"])
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got list"):
        so.orthonormality_errors([])


@pytest.mark.usefixtures("as_accelerator")
def test_all_errors_are_read_from_the_device_at_once(monkeypatch):
    model, reads = logged_model(), []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__"):
        read = getattr(torch.Tensor, name)

        def counted(self, read=read, name=name):
            reads.append(name)
            return read(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    so.orthonormality_errors(model)
    assert reads == ["tolist"]


def test_logging_changes_nothing_in_the_training():
    states = []
    for options in ({"every": 1}, {"every": 1000}):
        generator = torch.Generator().manual_seed(0)
        states.append(trained_with(Writer(), generator, **options)[0].state_dict())
    for value, other in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.equal(value, other)


def test_a_process_without_writer_takes_part_and_an_error_shows(generator):
    trained_with(None, generator, every=1)
    model = nn.Sequential(so.constrain(nn.Linear(4, 4)), nn.Linear(4, 4))
    writer, opt = Writer(), so.StiefelSGD(model.parameters(), lr=0.1, stiefel=False)
    so.log_orthonormality(opt, model, writer, every=1, tag="error")
    model(torch.ones(2, 4)).square().sum().backward()
    opt.step()
    assert [tag for tag, _, _ in writer.points] == ["error/max", "error/0.weight"]
    assert writer.points[0][1] == float(so.orthonormality_error(model)) > 1e-3


def test_nothing_is_logged_of_a_model_without_values():
    with torch.device("meta"):
        model = so.constrain(nn.Linear(2, 2))
    writer, opt = Writer(), so.StiefelSGD(model.parameters(), lr=0.1)
    so.log_orthonormality(opt, model, writer, every=1)
    opt.step()
    assert not writer.points


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"optimizer": None}, TypeError, "`optimizer` must be a torch.optim.Optimizer, got None"),
        ({"model": []}, TypeError, "`model` must be a torch.nn.Module, got list"),
        ({"model": nn.Linear(2, 2)}, ValueError, "`model` must have an orthonormal weight, got a"),
        ({"writer": 3}, TypeError, r"`writer` must have a method add_scalar \(.* got int"),
        ({"every": 0}, ValueError, "`every` must be at least 1, got 0"),
        ({"first_step": -1}, ValueError, "`first_step` must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_logged_is_an_error(change, error, message):
    model = so.constrain(nn.Linear(2, 2))
    opt = so.StiefelSGD(model.parameters(), lr=0.1)
    given = {"optimizer": opt, "model": model, "writer": Writer(), **change}
    with pytest.raises(error, match=message):
        so.log_orthonormality(**given)


# ---- models with other constraints, and their checkpoints --------------------------------------


def mixed_model():
    geoopt = pytest.importorskip("geoopt")
    model = geoopt_model()
    model.ball = geoopt.ManifoldParameter(torch.full((3,), 0.1), manifold=geoopt.PoincareBall())
    model.unit = geoopt.ManifoldParameter(torch.eye(4)[0].clone(), manifold=geoopt.Sphere())
    return model, geoopt


def test_a_model_of_several_manifolds_is_trained_by_two_optimizers():
    model, geoopt = mixed_model()
    (text,) = warnings_of(lambda: so.from_geoopt(model))
    assert "`ball` (PoincareBall), `unit` (Sphere) stay geoopt's" in text
    assert type(model.ball) is type(model.unit) is geoopt.ManifoldParameter
    others = [model.ball, model.unit]
    ours = so.StiefelAdam(so.param_groups(model), lr=0.05)
    theirs = geoopt.optim.RiemannianAdam(others, lr=0.05)
    held = [p for group in ours.param_groups for p in group["params"]]
    assert not {id(p) for p in others} & {id(p) for p in held}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(5):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        sum((p - 1).square().sum() for p in model.parameters()).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert so.orthonormality_error(so.project_(so.retag(model))) < 1e-5
    assert float(model.unit.detach().norm()) == pytest.approx(1, abs=1e-5)
    assert str(so.report(model)).endswith("left to geoopt: ball (PoincareBall), unit (Sphere)")
    with pytest.raises(TypeError, match="leave it to an optimizer of geoopt, and pass the others"):
        so.StiefelAdam(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"`unit\.manifold` must be a so\.Stiefel"):
        so.constrain(model, "unit")


def test_what_stays_a_constraint_of_geoopt_is_refused_until_it_is_converted():
    model, _ = mixed_model()
    for use in (so.report, so.param_groups, so.orthonormality_error):
        with pytest.raises(TypeError, match=r"convert the model with so\.from_geoopt"):
            use(model)


def by_geotorch(layer):
    pytest.importorskip("geotorch").orthogonal(layer, "weight")


SAVED = {
    "geotorch": by_geotorch,
    "torch": nn.utils.parametrizations.orthogonal,
    "torch, without base": partial(nn.utils.parametrizations.orthogonal, use_trivialization=False),
    "weight norm": nn.utils.parametrizations.weight_norm,
}


@pytest.mark.parametrize("size", [(6, 6), (6, 3)])
@pytest.mark.parametrize("name", SAVED)
def test_checkpoints_of_a_parametrization_name_what_converts_them(name, size):
    saved = nn.Sequential(nn.Linear(2, size[0]), nn.Linear(*size))
    SAVED[name](saved[1])
    loaded = so.constrain(nn.Sequential(nn.Linear(2, size[0]), nn.Linear(*size)), "1.weight")
    text = r"`1\.weight` is saved as a parametrization, .*so\.from_torch_orthogonal.*from_geotorch"
    with pytest.raises(RuntimeError, match=text):
        loaded.load_state_dict(saved.state_dict())
    with pytest.warns(UserWarning, match=text):
        loaded.load_state_dict(saved.state_dict(), strict=False)
    if name != "weight norm":
        convert = so.from_geotorch if name == "geotorch" else so.from_torch_orthogonal
        with pytest.raises(ValueError, match=f"call so.{convert.__name__}"):
            so.constrain(saved[1])
        with pytest.warns(UserWarning, match=convert.__name__):
            so.StiefelAdam(saved.parameters(), lr=0.1)
        weight = saved[1].weight.detach().clone()
        loaded.load_state_dict(convert(saved).state_dict())
        torch.testing.assert_close(loaded[1].weight.detach(), weight)


@pytest.mark.parametrize("size", [(6, 6), (6, 3)])
@pytest.mark.parametrize("name", ["geotorch", "torch"])
@pytest.mark.parametrize(
    "map_name", ["tcwy", "householder", "cayley", "matrix_exp", "trivialization"]
)
def test_maps_name_what_converts_checkpoints_of_another(map_name, name, size):
    saved = nn.Linear(*size)
    SAVED[name](saved)
    ours = so.orthogonal(nn.Linear(*size), map=map_name)
    with pytest.raises(RuntimeError, match=r"of another parametrization than .*from_geotorch"):
        ours.load_state_dict(saved.state_dict())
    own = so.orthogonal(nn.Linear(*size), map=map_name)
    own.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("flat", [True, False])
def test_flat_shards_are_named(flat, tmp_path):
    """By FSDP1, once: not again where views stand in for the parameters in a forward pass."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(so.constrain(nn.Linear(4, 8)), nn.Linear(8, 2))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:

        def wrapped():
            return FullyShardedDataParallel(
                model, device_id=torch.device("cpu"), use_orig_params=not flat
            )

        found = []
        texts = warnings_of(lambda: found.append(wrapped()))
        (text,) = [text for text in texts if "`weight`" in text]
        assert "FullyShardedDataParallel (FSDP1)" in text
        assert "fully_shard (FSDP2)" in text
        for _ in range(2):
            texts = warnings_of(lambda: found[0](torch.ones(2, 4)).sum().backward())
            assert not [text for text in texts if "constrain" in text]
        if flat:
            with pytest.raises(ValueError, match="FSDP1"):
                so.report(found[0])
    finally:
        torch.distributed.destroy_process_group()


def test_converting_a_torch_parametrization_keeps_its_one_matrix() -> None:
    lstm = nn.utils.parametrizations.orthogonal(nn.LSTM(6, 8), "weight_hh_l0")
    value = lstm.weight_hh_l0.detach().clone()
    so.from_torch_orthogonal(lstm)
    torch.testing.assert_close(lstm.weight_hh_l0.detach(), value)
