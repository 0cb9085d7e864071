"""Parametrizations read weights as tags do: blocks, dimensions, determinants, rows that pad."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
from cases import mixed
from contract import warnings_of
from dims_cases import LEGS, by_hand
from torch import nn
from torch.nn.utils import parametrize

import stiefel_opt as so
from stiefel_opt import Stiefel, compat

STACKED = {  # module, parameter, blocks, words of the report
    "LSTM": (lambda: nn.LSTM(6, 8), "weight_hh_l0", 4, "one for each gate"),
    "grouped": (lambda: nn.Conv2d(8, 12, 3, groups=4), "weight", 4, "one for each group"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", 6, "one for each head of"),
}


@pytest.mark.parametrize("name", STACKED)
def test_parametrizations_read_the_same(name: str) -> None:
    make, leaf, count, words = STACKED[name]
    module = so.orthogonal(make(), leaf)
    for block in getattr(module, leaf).detach().flatten(1).chunk(count):
        assert so.orthonormality_error(block) < 1e-5
    assert words in str(so.report(module))
    so.release(module, leaf)
    assert not parametrize.is_parametrized(module)


OURS = {
    "map": so.orthogonal,
    "compat": compat.orthogonal,
    "two": lambda layer: so.orthogonal(layer) and compat.orthogonal(layer),
}


@pytest.mark.parametrize("kind", OURS)
def test_release_ends_the_maps_of_this_package(kind: str) -> None:
    """By any name of the owner."""
    layer = OURS[kind](nn.Linear(4, 6))
    value = layer.weight.detach().clone()
    so.release(nn.ModuleList([layer, layer]), "1.weight")
    assert type(layer._parameters["weight"]) is nn.Parameter
    assert torch.equal(layer.weight, value)


SIGNS = [1, -1]


F64 = torch.float64


REGISTERED = {
    **{
        name: functools.partial(so.orthogonal, map=name)
        for name in ("tcwy", "cwy", "householder", "matrix_exp", "cayley", "trivialization")
    },
    **{
        f"{name} of torch": functools.partial(compat.orthogonal, orthogonal_map=name)
        for name in ("householder", "matrix_exp", "cayley")
    },
}


def gaussian(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer_of(weight):
    layer = nn.Linear(weight.size(1), weight.size(0), bias=False, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    return layer


@pytest.mark.parametrize(
    ("size", "sign", "name"), mixed(18, [4, 5], SIGNS, [*REGISTERED, *REGISTERED])
)
def test_every_map_has_it_and_keeps_a_matrix_of_that_sign(name, size, sign):
    register = REGISTERED[name]
    weight = so.random_point(size, size, manifold=so.Stiefel(determinant=sign), dtype=F64)
    layer = register(layer_of(weight), determinant=sign)
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-12)
    (layer.weight * gaussian(size, size)).sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(0.1 * parameter.grad)
    assert float(torch.linalg.det(layer.weight.detach())) == pytest.approx(sign)
    layer.weight = weight
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"the other one|orthonormal"):
        layer.weight = torch.cat([-weight[:1], weight[1:]])
    same, other = (register(layer_of(gaussian(size, size)), determinant=s) for s in (sign, -sign))
    same.load_state_dict(layer.state_dict())
    torch.testing.assert_close(same.weight, layer.weight)
    assert float(torch.linalg.det(copy.deepcopy(same).weight.detach())) == pytest.approx(sign)
    message = rf"must have the determinant of this map, determinant={-sign}, .* the other one"
    with pytest.raises(RuntimeError, match=message):
        other.load_state_dict(layer.state_dict())


def test_few_reflections_have_it():
    for count in (1, 2):
        for sign in SIGNS:
            layer = so.orthogonal(
                layer_of(gaussian(4, 4)), map="cwy", reflections=count, determinant=sign
            )
            assert float(torch.linalg.det(layer.weight.detach())) == pytest.approx(sign)


@pytest.mark.parametrize(("size", "saved", "into"), [(4, -1, None), (3, None, 1)])
def test_a_state_of_no_stated_determinant_is_refused_by_its_own(size, saved, into):
    state = so.orthogonal(layer_of(gaussian(size, size)), determinant=saved).state_dict()
    with pytest.raises(RuntimeError, match=f"determinant={into}, .* the other one"):
        so.orthogonal(layer_of(gaussian(size, size)), determinant=into).load_state_dict(state)
    so.orthogonal(layer_of(gaussian(size, size)), determinant=saved).load_state_dict(state)


def test_an_orthonormal_weight_that_a_map_does_not_reach_is_told_of():
    rotation = so.random_point(5, 5, manifold=so.Stiefel(determinant=1), dtype=F64)
    with pytest.warns(UserWarning, match=r"pass determinant=1 to keep it, or map='cayley'"):
        so.orthogonal(layer_of(rotation))
    with pytest.warns(UserWarning, match=r"pass determinant=1 to keep it$"):
        so.orthogonal(layer_of(rotation), determinant=-1)


@pytest.mark.parametrize(
    ("name", "map_"), mixed(len(LEGS), LEGS, ["tcwy", "cayley", "householder"])
)
def test_a_map_computes_the_tensor_of_its_matrices(name: str, map_: str) -> None:
    shape, options, pattern = LEGS[name]
    module = nn.Module()
    start = so.random_point(*shape, manifold=Stiefel(**options), dtype=torch.float64)
    module.weight = nn.Parameter(start.clone())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`weight` has determinant")
        so.orthogonal(module, map=map_, **options)
    matrices = by_hand(module.weight.detach(), pattern)
    assert so.orthonormality_error(matrices) < 1e-12
    is_square = matrices.size(-2) == matrices.size(-1)
    if not is_square:
        torch.testing.assert_close(module.weight.detach(), start)


@pytest.mark.parametrize("shape", [(9, 2), (2, 9)])
def test_maps_compute_the_row_that_pads_too(shape: tuple[int, int]) -> None:
    texts = warnings_of(lambda: so.orthogonal(nn.Embedding(*shape, padding_idx=1)))
    assert "row 1 of `weight` pads" in " ".join(texts)


@pytest.mark.parametrize("name", REGISTERED)
def test_a_determinant_of_what_has_none_is_refused(name):
    with pytest.raises(ValueError, match=r"must be None where matrices of `.*` are not"):
        REGISTERED[name](nn.Linear(3, 4), determinant=1)
    complex_too = r"for the complex matrices of .* theirs is a phase|must support complex weights"
    with pytest.raises(ValueError, match=complex_too):
        REGISTERED[name](nn.Linear(3, 3, dtype=torch.complex64), determinant=1)


@pytest.mark.parametrize("name", ["tcwy", "matrix_exp", "trivialization"])
def test_a_weight_without_full_rank_is_told_of(name):
    layer = nn.Linear(6, 4)
    nn.init.constant_(layer.weight, 0.3)
    assert "the nearest point to `weight` is not unique" in " ".join(
        warnings_of(lambda: so.orthogonal(layer, map=name))
    )
