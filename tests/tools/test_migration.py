"""Weights of torch's parametrization, geotorch and geoopt become tagged parameters."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from contract import warnings_of
from torch import nn
from torch.nn.utils import parametrizations

import stiefel_opt as so


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


SAVED = {
    "geotorch": geotorch_orthogonal,
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
