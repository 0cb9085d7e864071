"""`scale="keep"` follows the weights that are loaded, `scale="rms"` the shape."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stiefel_opt as so


def kept(**options: Any) -> nn.Linear:
    return so.constrain(nn.Linear(8, 4), scale="keep", **options)


def trained(scale: float = 16.5, **options: Any) -> dict[str, Tensor]:
    layer = nn.Linear(8, 4)
    with torch.no_grad():
        layer.weight.copy_(scale * so.random_point(4, 8, manifold=so.Stiefel(**options)))
    return layer.state_dict()


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"rows": (0, 2)}])
def test_weights_alone_bring_their_scale(options: dict[str, Any]) -> None:
    saved = trained(**options)
    layer = kept(**options)
    assert layer.weight.manifold.scale < 5
    layer.load_state_dict(saved)  # no warning
    assert torch.equal(layer.weight, saved["weight"])
    assert layer.weight.manifold.scale == pytest.approx(16.5)
    optimizer = so.StiefelAdam(layer.parameters(), lr=1e-9)
    layer(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(layer.weight.detach(), saved["weight"], atol=1e-4, rtol=0)
    copied = copy.deepcopy(layer)
    copied.load_state_dict(trained(2.0, **options))
    assert copied.weight.manifold.scale == pytest.approx(2.0)
    assert layer.weight.manifold.scale == pytest.approx(16.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1 + 5e-6, 1.005, 1.05, 2.0])
def test_the_norm_of_what_is_loaded_is_kept_in_every_precision(
    dtype: torch.dtype, factor: float
) -> None:
    one = kept().to(dtype)
    other = copy.deepcopy(one)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a factor that is rounded leaves the manifold
        other.load_state_dict({k: factor * v for k, v in one.state_dict().items()})
    wide = torch.promote_types(dtype, torch.float32)
    norm = other.weight.norm(dtype=wide)
    so.project_(other)
    eps = torch.finfo(dtype).eps
    limit = 1e-3 + eps / 8 if eps > 1e-4 else 30 * eps
    torch.testing.assert_close(other.weight.norm(dtype=wide), norm, rtol=limit, atol=0)


@pytest.mark.parametrize("size", [16, 2048])
def test_the_scale_of_a_large_weight_is_exact_too(size: int) -> None:
    """A sum of four million squares, one after the other in float32, would err by 1e-4."""
    layer = so.constrain(nn.Linear(size, size), scale="keep", project=False)
    exact = float(layer.weight.detach().double().norm()) / math.sqrt(size)
    assert layer.weight.manifold.scale == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("size", [1e-20, 0.7123, 1e20])
def test_the_scale_of_many_equal_columns_is_exact_too(size: float) -> None:
    """Rounding of equal numbers does not average out."""
    weight = size * so.random_point(20_000, 2, 2, manifold=so.Stiefel())
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    so.constrain(module, scale="keep", flatten=False)
    assert module.weight.manifold.scale == pytest.approx(size, rel=1e-6)
    assert torch.equal(module.weight, weight)


def test_weights_that_are_off_warn_and_the_remedy_keeps_their_norm() -> None:
    layer, saved = kept(), nn.Linear(8, 4).state_dict()
    saved["weight"] *= 30
    with pytest.warns(UserWarning, match=r"off the manifold.*so\.project_"):
        layer.load_state_dict(saved)
    so.project_(layer)
    assert float(layer.weight.detach().norm() / saved["weight"].norm()) == pytest.approx(1.0)


def test_the_same_weights_keep_the_reading_and_others_warn_behind_groups() -> None:
    layer = kept()
    reading = layer.weight.manifold
    layer.load_state_dict(layer.state_dict())
    assert layer.weight.manifold is reading
    so.param_groups(layer)
    with pytest.warns(UserWarning, match="`weight` is loaded with a scale of 16.5.*build the opt"):
        layer.load_state_dict(trained())


def test_a_number_is_a_number_and_zeros_are_no_scale() -> None:
    for layer in (so.constrain(nn.Linear(8, 4), scale=2.0), so.constrain(kept(), scale=2.0)):
        with pytest.warns(UserWarning, match="off the manifold"):
            layer.load_state_dict(trained())
        assert layer.weight.manifold.scale == 2.0
    layer = kept()
    scale = layer.weight.manifold.scale
    with pytest.warns(UserWarning, match="off the manifold"):
        layer.load_state_dict({**trained(), "weight": torch.zeros(4, 8)})
    assert layer.weight.manifold.scale == scale


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (nn.Linear(8, 2), {}, 0.5),
        (nn.Linear(2, 8), {}, 2.0),
        (nn.Linear(8, 8), {}, 1.0),
        (nn.Linear(8, 4), {"heads": 2}, 0.5),
        (nn.Linear(8, 6), {"rows": ((0, 2), (4, 6))}, 0.5),
        (nn.Linear(8, 2), {"transposed": True}, 2.0),
        (nn.Conv2d(4, 9, 1), {}, 1.5),
    ],
)
def test_rms_is_the_root_of_rows_by_columns(
    module: nn.Module, options: dict[str, Any], expected: float
) -> None:
    so.constrain(module, scale="rms", **options)
    assert module.weight.manifold.scale == pytest.approx(expected)
    assert so.orthonormality_error(module) < 1e-6
    if options or not isinstance(module, nn.Linear):
        return
    x = torch.randn(module.in_features, 1000)
    if module.in_features <= module.out_features:
        ratio = (module.weight @ x).square().mean().sqrt() / x.square().mean().sqrt()
        assert float(ratio.detach()) == pytest.approx(1.0, rel=1e-5)


def test_rms_works_without_values_and_wants_one_height() -> None:
    with torch.device("meta"):
        assert so.constrain(nn.Linear(3, 12), scale="rms").weight.manifold.scale == 2.0
    layer = nn.Linear(8, 6)
    with pytest.raises(ValueError, match="matrices of one height for scale='rms'"):
        so.constrain(layer, rows=((0, 2), (2, 6)), scale="rms")
    assert not hasattr(layer.weight, "manifold")
    assert math.isclose(so.constrain(layer, scale="rms").weight.manifold.scale, 0.75**0.5)


# ---- convolutions that enlarge no image --------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "zeros": (3, {}),
    "zeros, 5 x 5": (5, {}),
    "circular": (3, {"padding_mode": "circular"}),
    "circular, 5 x 5": (5, {"padding_mode": "circular"}),
    "replicate": (3, {"padding_mode": "replicate"}),
    "strides": (3, {"stride": 2}),
    "dilated": (3, {"dilation": 2, "padding": 2}),
    "groups": (3, {"groups": 2}),
}


def norm_of(layer: nn.Module, channels: int) -> float:
    """The norm of a linear map on images, by power iteration."""
    x = torch.randn(1, channels, 10, 10, dtype=torch.float64)
    for _ in range(100):
        x = (x / x.norm()).detach().requires_grad_()
        y = layer(x)
        size = float(y.detach().norm())
        (x,) = torch.autograd.grad(y, x, y.detach())
    return size


@pytest.mark.filterwarnings("ignore:the nearest point to")  # of rank one
@pytest.mark.parametrize("start", ["random", "constant"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_kernel_over_its_side_enlarges_no_image(name: str, start: str) -> None:
    side, options = CONVOLUTIONS[name]
    assert conv_norm(side, start, options) < 1 + 1e-6


@pytest.mark.filterwarnings("ignore:the nearest point to")  # of rank one
@pytest.mark.parametrize(("side", "mode"), [(3, "reflect"), (5, "reflect"), (5, "replicate")])
def test_padding_that_repeats_entries_enlarges_images(side: int, mode: str) -> None:
    """As the recipe says: such entries count more than k times in a row of k x k patches."""
    assert conv_norm(side, "constant", {"padding_mode": mode}) > 1.01


def conv_norm(side: int, start: str, options: dict[str, Any]) -> float:
    torch.manual_seed(0)
    made = {"padding": side // 2, "bias": False, "dtype": torch.float64} | options
    layer = nn.Conv2d(4, 6, side, **made)
    if start == "constant":
        nn.init.ones_(layer.weight)
    so.constrain(layer, scale=1 / side)
    return norm_of(layer, 4)
