"""Convolutions all of whose singular values are 1."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.nn import IsometricConv2d

LAYOUTS: list[dict[str, Any]] = [
    {"channels": (8, 8)},
    {"channels": (3, 3), "kernel_size": 5},
    {"channels": (2, 5)},
    {"channels": (5, 2)},
    {"channels": (4, 6), "groups": 2},
    {"channels": (3, 8), "stride": 2},
    {"channels": (2, 16), "stride": 2},
    {"channels": (4, 6), "kernel_size": 5, "stride": 3, "groups": 2},
    {"channels": (2, 4), "stride": 3},
    {"channels": (3, 4), "kernel_size": 1},
    {"channels": (1, 1)},
    {"channels": (1, 2), "stride": 2},
]


def layer_of(layout: dict[str, Any], **options: Any) -> IsometricConv2d:
    (entering, leaving), options = layout["channels"], {**layout, **options}
    del options["channels"]
    return IsometricConv2d(entering, leaving, **options)


def values(layer: nn.Module, channels: int, size: int = 6) -> Tensor:
    """Singular values of the layer as a map of images."""
    count = channels * size * size
    basis = torch.eye(count, dtype=torch.float64).view(count, channels, size, size)
    linear = layer.double()(basis) - layer(torch.zeros_like(basis[:1]))
    return torch.linalg.svdvals(linear.detach().flatten(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_singular_values_are_one_around_the_edge(layout):
    layer = layer_of(layout)
    assert so.orthonormality_error(layer) < 1e-6
    torch.testing.assert_close(
        found := values(layer, layer.in_channels), torch.ones_like(found), rtol=0, atol=1e-5
    )
    assert layer.kernel().shape[2:] == (layer.kernel_size,) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_zeros_none_is_above_one(layout):
    layer = layer_of(layout, padding_mode="zeros", dtype=torch.float64)
    assert float(values(layer, layer.in_channels).max()) < 1 + 1e-12


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_the_plain_convolution_of_its_kernel(layout):
    layer = layer_of(layout, padding_mode="zeros", bias=False)
    options: dict[str, Any] = {"stride": layer.stride, "groups": layer.groups, "bias": False}
    pad = layer.kernel_size // 2
    channels = layer.in_channels, layer.out_channels
    plain = nn.Conv2d(*channels, layer.kernel_size, padding=pad, **options)
    plain.weight = nn.Parameter(layer.kernel().detach())
    images = torch.randn(2, channels[0], 7, 6)
    torch.testing.assert_close(layer(images), plain(images))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("kernel_size", "size"), [(3, (3, 4)), (3, (1, 2)), (3, (2, 2)), (5, (3, 4)), (5, (2, 2))]
)
def test_around_the_edge_it_is_the_plain_circular_convolution(size, kernel_size):
    layer = IsometricConv2d(3, 4, kernel_size, dtype=torch.float64)
    options: dict[str, Any] = {"padding": kernel_size // 2, "padding_mode": "circular"}
    plain = nn.Conv2d(3, 4, kernel_size, dtype=torch.float64, **options)
    plain.weight, plain.bias = nn.Parameter(layer.kernel().detach()), layer.bias
    images = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer(images), plain(images))
    (grad,) = torch.autograd.grad(layer(images).sin().sum(), images)
    torch.testing.assert_close(grad, torch.autograd.grad(plain(images).sin().sum(), images)[0])
    assert torch.autograd.gradgradcheck(layer, (images,))
    tangent = torch.func.jvp(layer, (images,), (images,))[1]
    torch.testing.assert_close(tangent, layer(images) - layer(torch.zeros_like(images)))
    torch.testing.assert_close(torch.func.vmap(layer)(images[None])[0], layer(images))


def test_gradients_are_those_of_the_composition():
    layer = IsometricConv2d(3, 4, 3, 1, dtype=torch.float64)
    weights = layer.weights()

    def composed(*tensors: Tensor) -> Tensor:
        return layer.composed(dict(zip(weights, tensors, strict=True)))

    inputs = tuple(weight.detach().clone().requires_grad_() for weight in weights.values())
    assert torch.autograd.gradcheck(composed, inputs)


def test_the_kernel_is_computed_once_in_evaluation_until_a_parameter_changes(monkeypatch):
    layer, images = IsometricConv2d(4, 4).eval(), torch.randn(1, 4, 5, 5)
    calls = []
    compute = IsometricConv2d.composed
    monkeypatch.setattr(
        IsometricConv2d, "composed", lambda *args: calls.append(1) or compute(*args)
    )
    with torch.no_grad():
        first = layer(images)
        assert torch.equal(layer(images), first)
        assert len(calls) == 1
        layer.load_state_dict(IsometricConv2d(4, 4).state_dict())
        assert not torch.equal(layer(images), first)
        assert len(calls) == 2
        layer.train()
        layer(images)
        layer(images)
        assert len(calls) == 4
        layer.eval()
        layer(images)
        assert len(calls) == 5
        double = layer.double()(images.double())
        assert double.dtype == torch.float64
    assert layer(images.double()).requires_grad  # a graph needs the factors
    assert len(calls) == 7


def test_copies_and_files_carry_no_kernel():
    layer = IsometricConv2d(4, 4).eval()
    with torch.no_grad():
        expected = layer(torch.ones(1, 4, 3, 3))
        assert layer._cached is not None
        assert copy.deepcopy(layer)._cached is None
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert torch.equal(loaded(torch.ones(1, 4, 3, 3)), expected)


def test_inference_mode_and_functional_calls():
    layer, images = IsometricConv2d(4, 4).eval(), torch.randn(1, 4, 3, 3)
    with torch.inference_mode():
        expected = layer(images)
        made = IsometricConv2d(4, 4).eval()
        assert made(images).shape == expected.shape
    with torch.no_grad():
        turned = {name: -value for name, value in layer.named_parameters() if name == "first"}
        swapped = torch.func.functional_call(layer, turned, (images,))
        torch.testing.assert_close(swapped, -expected)
        torch.testing.assert_close(layer(images), expected)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: IsometricConv2d(3, 3, 4), ValueError, "`kernel_size` must be odd, got 4"),
    (lambda: IsometricConv2d(3, 3, 3, 4), ValueError, "`stride` must be at most 3, got 4"),
    (lambda: IsometricConv2d(3, 4, groups=2), ValueError, "`groups` must divide"),
    (lambda: IsometricConv2d(3, 0), ValueError, "`out_channels` must be a positive"),
    (lambda: IsometricConv2d(3, 3, stride=0), ValueError, "`stride` must be a positive"),
    (lambda: IsometricConv2d(3, 3, padding_mode="same"), ValueError, "`padding_mode` must be"),
    (lambda: IsometricConv2d(3, 3, bias=None), TypeError, "`bias` must be True"),  # type: ignore[arg-type]
    (lambda: IsometricConv2d(3, 3)(torch.ones(3, 4, 4)), ValueError, "`input` must have shape"),
    (
        lambda: IsometricConv2d(3, 3, stride=2)(torch.ones(1, 3, 5, 4)),
        ValueError,
        "sides of at least 1 that 2 divides",
    ),
    (
        lambda: IsometricConv2d(3, 3, 5)(torch.ones(1, 3, 1, 4)),
        ValueError,
        "sides of at least 2",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_it_says_what_it_is():
    assert "kernel_size=3, stride=1, padding_mode='circular'" in repr(IsometricConv2d(2, 2))
