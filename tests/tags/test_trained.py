"""Constraining trained weights warns, by how far they move; fresh ones are silent."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import warnings_of
from torch import Tensor, nn
from torch.nn import functional, init
from training import train

import stiefel_opt as so

FRESH: dict[str, Callable[[Tensor], Any]] = {
    "uniform": init.uniform_,
    "normal": init.normal_,
    "normal, as of language models": lambda w: init.normal_(w, std=0.02),
    "truncated normal": lambda w: init.trunc_normal_(w, std=0.02),
    "xavier uniform": init.xavier_uniform_,
    "xavier normal": init.xavier_normal_,
    "kaiming uniform": lambda w: init.kaiming_uniform_(w, a=5**0.5),
    "kaiming normal": init.kaiming_normal_,
    "orthogonal": lambda w: init.orthogonal_(w, gain=2.0),
    "one and noise": lambda w: init.normal_(w, std=0.01).fill_diagonal_(1.0),
}
SHAPES = [(4, 4), (8, 8), (8, 64), (64, 64), (96, 32), (192, 64), (300, 200)]


@pytest.mark.parametrize("name", FRESH)
def test_initialisations_are_silent(name: str) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        for _ in range(10 if shape[0] < 100 else 3):
            layer = nn.Linear(shape[1], shape[0])
            FRESH[name](layer.weight.data)
            assert not warnings_of(lambda: so.constrain(layer)), shape  # noqa: B023


@pytest.mark.parametrize(
    "make",
    [
        lambda: (nn.GRU(16, 32, num_layers=2), "*weight_*"),
        lambda: (nn.LSTM(16, 32), "*weight_*"),
        lambda: (nn.Conv2d(16, 32, 3, groups=2), "weight"),
        lambda: (nn.ConvTranspose2d(16, 32, 3), "weight"),
        lambda: (nn.Bilinear(8, 8, 4), "weight"),
        lambda: (nn.Linear(16, 32, dtype=torch.bfloat16), "weight"),
        lambda: (nn.Linear(16, 32, dtype=torch.complex64), "weight"),
        lambda: (nn.MultiheadAttention(32, 4), "in_proj_weight"),
        lambda: (nn.MultiheadAttention(32, 4, kdim=16, vdim=8), "?_proj_weight"),
        lambda: (nn.TransformerEncoderLayer(32, 4), "*proj*weight"),
    ],
)
def test_modules_of_torch_are_silent(make: Any) -> None:
    torch.manual_seed(0)
    for _ in range(5):
        module, name = make()
        assert not warnings_of(lambda: so.constrain(module, name))  # noqa: B023


@pytest.mark.parametrize("name", ["1.weight", "*.weight"])
def test_a_weight_that_is_zero_is_told_that_its_layer_is_not_any_more(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))
    init.zeros_(model[1].weight)
    (text,) = warnings_of(lambda: so.constrain(model, name))
    assert "`1.weight`, which was zero, becomes orthonormal: the layer does not return zero" in text
    assert [line.moved for line in so.report(model).lines if line.name == "1.weight"] == [None]
    assert not warnings_of(lambda: so.constrain(model, name))


RANK = "the nearest point to `{}` is not unique"
DEFICIENT: dict[str, Callable[[Tensor], Any]] = {
    "constant": lambda w: init.constant_(w, 0.3),
    "of rank two": lambda w: w.copy_(torch.randn(w.size(0), 2) @ torch.randn(2, w.size(1))),
    "with a column of zeros": lambda w: w[:, 0].zero_(),
}


@pytest.mark.parametrize("name", DEFICIENT)
@pytest.mark.parametrize("shape", [(4, 4), (64, 64), (200, 300)])
def test_a_weight_without_full_rank_is_told_that_its_point_is_one_of_many(
    name: str, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[0], shape[1])  # its columns become orthonormal, or its rows
    with torch.no_grad():
        DEFICIENT[name](layer.weight)
    value = layer.weight.detach().clone()
    others: dict[str, Callable[[], Any]] = {
        "data": lambda: so.ManifoldParameter(value),
        f"parameter of shape {shape[::-1]}": lambda: so.StiefelSGD(
            [{"params": [nn.Parameter(value.clone())], "stiefel": True}], lr=0.1
        ),
    }
    for called, act in others.items():
        assert RANK.format(called) in " ".join(warnings_of(act))
    texts = warnings_of(lambda: so.constrain(nn.Sequential(layer), "0.weight"))
    assert RANK.format("0.weight") in " ".join(texts)
    assert not warnings_of(lambda: so.constrain(layer))


def test_heads_without_full_rank_are_counted() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 12)
    with torch.no_grad():
        layer.weight[4:8] = 1.0
    texts = " ".join(warnings_of(lambda: so.constrain(layer, heads=3)))
    assert "`weight` is not unique in 1 of 3 matrices, the first at index 1" in texts


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_is_told_how_short_its_rows_become(kind: Any) -> None:
    def length(scale: Any) -> float:
        table = so.constrain(kind(64, 16), scale=scale)
        return float(table.weight.detach().square().sum(1).mean().sqrt())

    torch.manual_seed(0)
    (text,) = warnings_of(lambda: so.constrain(kind(64, 16)))
    assert "has 64 rows and 16 columns" in text
    assert "its rows 0.5 long on average" in text
    assert "scale='keep'" in text
    assert not warnings_of(lambda: so.constrain(kind(16, 64)))  # rows are orthonormal
    assert length("rms") == pytest.approx(1)
    assert length("keep") == pytest.approx(4, rel=0.1)
    with pytest.raises(ValueError, match="`max_norm of weight` must be None, got 1"):
        so.constrain(kind(64, 16, max_norm=1.0), scale="rms")


@pytest.mark.parametrize("name", ["head.weight", "table.weight", "*.weight"])
def test_a_head_that_is_tied_to_an_embedding_is_told_too(name: str) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(64, 16), "head": nn.Linear(16, 64, bias=False)})
    model["head"].weight = model["table"].weight
    (text,) = warnings_of(lambda: so.constrain(model, name))
    assert "its rows 0.5 long on average" in text
    model["table"].max_norm = 1.0
    with pytest.raises(ValueError, match="`max_norm of "):
        so.constrain(model, name)


def classifier(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "dense":
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    first = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU())
    return nn.Sequential(*first, nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


@functools.cache
def trained(kind: str) -> nn.Module:
    """Ten classes of noisy patterns, learned by Adam."""
    model = classifier(kind)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(10, 64, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        labels = torch.randint(10, (64,), generator=generator)
        x = patterns[labels] + 0.3 * torch.randn(64, 64, generator=generator)
        train(optimizer, lambda: functional.cross_entropy(model(x), labels))  # noqa: B023
    return model


@pytest.mark.parametrize(("kind", "name"), [("dense", "0.weight"), ("convolutions", "3.weight")])
@pytest.mark.parametrize("scale", [1.0, "keep"])
def test_trained_weights_are_told_with_how_far_they_moved(kind: str, name: str, scale: Any) -> None:
    model = classifier(kind)
    model.load_state_dict(trained(kind).state_dict())
    (text,) = warnings_of(lambda: so.constrain(model, name, scale=scale))
    (line,) = so.report(model).lines
    assert line.moved is not None
    assert f"`{name}` seems trained, judging by singular values and writes, and moved by " in text
    assert f"{line.moved:.0%} of its length" in text
    assert "Train it on before it is used, with scale='keep'" in text
    assert not warnings_of(lambda: so.constrain(model, name, scale=scale))  # it is a point now


DOORS: dict[str, Callable[[nn.Linear], Any]] = {
    "parameter": lambda layer: so.ManifoldParameter(layer.weight),
    "group": lambda layer: so.StiefelSGD([{"params": layer.weight, "stiefel": True}], lr=0.1),
}


@pytest.mark.parametrize("door", DOORS)
def test_trained_weights_are_told_by_whatever_door_they_come(door: str) -> None:
    torch.manual_seed(0)
    weight = trained("dense")[0].weight
    for layer in (nn.Linear(64, 64), so.constrain(nn.Linear(64, 64))):
        fresh = nn.Linear(64, 64)
        with torch.no_grad():
            fresh.weight.copy_(layer.weight)
        assert not warnings_of(lambda: DOORS[door](fresh))  # noqa: B023
    layer = nn.Linear(64, 64)
    layer.load_state_dict({"weight": weight, "bias": layer.bias})
    (text,) = warnings_of(lambda: DOORS[door](layer))
    assert "seems trained, judging by singular values and writes, and moved by" in text


@pytest.mark.parametrize("kind", ["trained", "fresh", "average", "rounded"])
def test_loading_says_where_what_was_learned_is_lost(kind: str) -> None:
    torch.manual_seed(0)
    point = so.random_point(64, 64)
    value = {
        "trained": trained("dense")[0].weight.detach(),
        "fresh": nn.Linear(64, 64).weight.detach(),
        "average": (point + so.random_point(64, 64)) / 2,
        "rounded": point.bfloat16(),
    }[kind]
    layer = so.constrain(nn.Linear(64, 64))
    (text,) = warnings_of(lambda: layer.load_state_dict({"weight": value, "bias": layer.bias}))
    assert "call so.project_(model), or the first step projects" in text
    assert ("what was learned there is lost. Train it on, with scale='keep'" in text) == (
        kind == "trained"
    )


@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.Adam, so.StiefelSGD])
def test_a_small_weight_that_was_trained_in_this_process_is_told(rule: Any) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is constrained yet
        optimizer = rule(layer.parameters(), lr=1e-3)
    train(optimizer, lambda: layer(torch.randn(8, 6)).square().mean(), 40)
    (text,) = warnings_of(lambda: so.constrain(layer))
    assert "`weight` seems trained, judging by singular values and writes, and moved by" in text
    copied = nn.Linear(6, 4)
    for row in range(4):  # written row by row, by an initialisation
        nn.init.normal_(copied.weight[row])
    assert not warnings_of(lambda: so.constrain(copied))


def test_several_trained_weights_are_told_once() -> None:
    model = classifier("dense")
    model.load_state_dict(trained("dense").state_dict())
    (text,) = warnings_of(lambda: so.constrain(model, ["0.weight", "2.weight"]))
    assert "`0.weight`" in text
    silent = classifier("dense")
    silent.load_state_dict(trained("dense").state_dict())
    assert not warnings_of(lambda: so.constrain(silent, "0.weight", project=False))


def test_a_trained_orthonormal_weight_is_silent() -> None:
    """Of a training that kept it, in another precision."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 32)
    with torch.no_grad():
        layer.weight.copy_(so.random_point(32, 64).bfloat16())
    assert not warnings_of(lambda: so.constrain(layer))
