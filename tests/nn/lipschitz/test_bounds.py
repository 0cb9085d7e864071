# ruff: noqa: ARG005 - functions of a table have the same arguments
"""What is proven of each layer, of sums and concatenations, and the table of factors."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import stiefel_opt as so
from stiefel_opt.nn.lipschitz import norms, rules
from stiefel_opt.nn.lipschitz.norms import most_copies, spectral_norm

SIZE = (4, 6, 6)


def norm_of(layer: nn.Module, size: tuple[int, ...]) -> float:
    """The exact norm of a linear layer on inputs of this size."""
    count = math.prod(size)
    basis = torch.eye(count, dtype=torch.float64).view(count, *size)
    linear = layer(basis) - layer(torch.zeros_like(basis[:1]))
    return float(torch.linalg.matrix_norm(linear.detach().flatten(1), 2))


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).double().eval()


# ---- matrices ------------------------------------------------------------------------------------

MATRICES = [(5, 3), (3, 5), (4, 4), (1, 7), (2, 40)]


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("scale", [1.0, 1e-180, 1e180, 0.0])
def test_the_norm_of_a_matrix_is_an_upper_bound_and_close(shape, scale):
    matrix = scale * torch.randn(3, *shape, dtype=torch.float64)
    exact = float(torch.linalg.matrix_norm(matrix, 2).max())
    assert exact <= spectral_norm(matrix) <= exact * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_of_orthonormal_matrices_it_is_one(dtype):
    point = so.random_point(64, 24, dtype=dtype)
    exact = float(torch.linalg.matrix_norm(point.double(), 2))
    found = spectral_norm(point)
    assert exact <= found <= exact * (1 + 1e-9)
    assert abs(found - 1) < {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 2e-2)


def test_of_complex_matrices():
    matrix = torch.randn(4, 3, dtype=torch.complex128)
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert exact <= spectral_norm(matrix) <= exact * (1 + 1e-12)


LAYOUTS = [  # size, kernel, stride, dilation, padding
    (size, kernel, stride, dilation, pad)
    for size, kernel, stride, dilation, pad in itertools.product(
        [5, 6], [1, 2, 3], [1, 2, 3], [1, 2], [0, 2]
    )
    if size + 2 * pad > dilation * (kernel - 1)
]


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_of_a_pixel_are_those_that_a_convolution_of_ones_finds(mode, layout):
    size, kernel, stride, dilation, pad = layout
    layer = nn.Conv1d(1, 1, kernel, stride, pad, dilation, 1, False, mode, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    pixels = torch.zeros(1, 1, size, dtype=torch.float64, requires_grad=True)
    (count,) = torch.autograd.grad(layer(pixels).sum(), pixels)
    assert most_copies(size, kernel, stride, dilation, (pad, pad), mode) == int(count.max())


# ---- layers --------------------------------------------------------------------------------------

CONVOLUTIONS: list[tuple[dict[str, Any], bool]] = [  # and whether the size must be known
    ({"kernel_size": 1}, False),
    ({"kernel_size": 2, "stride": 2}, False),
    ({"kernel_size": 3, "padding": 1}, False),
    ({"kernel_size": 3, "padding": 1, "stride": 2, "groups": 2}, False),
    ({"kernel_size": 3, "padding": 2, "dilation": 2}, False),
    ({"kernel_size": 3, "padding": "same", "padding_mode": "circular"}, False),
    ({"kernel_size": 3, "padding": 1, "padding_mode": "circular", "stride": 2}, False),
    ({"kernel_size": 1, "padding": 1, "padding_mode": "circular"}, True),
    ({"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, True),
    ({"kernel_size": 3, "padding": 1, "padding_mode": "replicate"}, True),
]


@pytest.mark.parametrize(("options", "needs_size"), CONVOLUTIONS)
@pytest.mark.parametrize("fill", ["random", "ones", "scaled"])
def test_convolutions_are_bounded_from_above(options, needs_size, fill):
    layer = nn.Conv2d(4, 6, **options)
    if fill == "ones":
        nn.init.ones_(layer.weight)
    if fill == "scaled":
        so.constrain(layer, scale=1 / layer.kernel_size[0])
    model = chain(layer)
    exact = norm_of(model, SIZE)
    bound = so.lipschitz_bound(model, SIZE)
    assert exact <= bound * (1 + 1e-12)
    if needs_size:
        with pytest.raises(ValueError, match=r"`0`: `input_size` must be given.*pass input_size"):
            so.lipschitz_bound(model)
    else:
        assert bound <= so.lipschitz_bound(model) * (1 + 1e-12)
        if fill == "scaled" and layer.stride == (1, 1):
            assert so.lipschitz_bound(model) == pytest.approx(1.0, abs=1e-6)


def test_a_circular_kernel_as_wide_as_its_stride_may_hold_a_pixel_twice():
    """Four pixels around the edge, kernels of three every three: the count of zeros would be 1."""
    layer = nn.Conv1d(1, 1, 3, 3, 1, padding_mode="circular", bias=False, dtype=torch.float64)
    nn.init.ones_(layer.weight)
    exact = norm_of(layer, (1, 4))
    assert exact > spectral_norm(layer.weight.flatten(1)) * 1.2
    assert exact <= so.lipschitz_bound(layer, (1, 4)) <= so.lipschitz_bound(layer)


def test_around_the_edge_the_norm_over_all_frequencies_is_exact():
    layer = nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular", dtype=torch.float64)
    assert so.lipschitz_bound(layer, (3, 6, 5)) == pytest.approx(
        norm_of(layer, (3, 6, 5)), rel=1e-9
    )


def test_frequencies_are_taken_up_to_a_cost(monkeypatch):
    layer = nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="circular", dtype=torch.float64)
    cost = math.prod(SIZE[1:]) * 2 * 2**2 * 3  # two groups of matrices of 3 x 2
    bounds = []
    for most in (cost, cost - 1):
        monkeypatch.setattr(norms, "_MOST", most)
        bounds.append(so.lipschitz_bound(layer, SIZE))
    assert norm_of(layer, SIZE) <= bounds[0] < bounds[1]


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2}])
def test_transposed_convolutions(kind, options):
    layer = kind(4, 6, 3, dtype=torch.float64, **options)
    size = (4, 5) if kind is nn.ConvTranspose1d else (4, 5, 5)
    assert norm_of(layer, size) <= so.lipschitz_bound(layer) * (1 + 1e-12)


SLOPES = [
    *((kind(), value) for kind, value in ((nn.ReLU, 1), (nn.Tanh, 1), (nn.Sigmoid, 0.25))),
    *((nn.GELU(), 1.1289), (nn.GELU("tanh"), 1.12899), (nn.SiLU(), 1.0998), (nn.Mish(), 1.0885)),
    *((nn.LeakyReLU(-3.0), 3), (nn.ELU(2.0), 2), (nn.PReLU(init=-0.5), 1), (nn.SELU(), 1.758)),
    *((nn.Hardswish(), 1.5), (nn.Hardsigmoid(), 1 / 6), (nn.CELU(), 1), (nn.Softplus(), 1)),
    *((nn.RReLU(1.0, 3.0), 2.0), (nn.Softshrink(), 1), (nn.Softsign(), 1), (nn.LogSigmoid(), 1)),
]


@pytest.mark.parametrize(("activation", "slope"), SLOPES)
def test_slopes_of_activations(activation, slope):
    x = torch.linspace(-6, 6, 200_001, dtype=torch.float64, requires_grad=True)
    activation = activation.double().eval()
    (slopes,) = torch.autograd.grad(activation(x).sum(), x)
    bound = so.lipschitz_bound(activation)
    assert float(slopes.abs().max()) <= bound
    assert bound == pytest.approx(slope, rel=1e-3)


POOLS: list[tuple[nn.Module, float]] = [
    (nn.MaxPool2d(2), 1.0),
    (nn.MaxPool2d(3, 2), 2.0),
    (nn.AvgPool2d(2), 0.5),
    (nn.AvgPool2d(3, 1, 1), 1.0),
    (nn.AvgPool2d(2, divisor_override=1), 2.0),
    (nn.AvgPool2d(2, 2, 1, count_include_pad=False), 1.0),
    (nn.LPPool2d(2, 2), 1.0),
    (nn.AdaptiveAvgPool2d(1), 1 / 6),
    (nn.AdaptiveAvgPool2d((3, 2)), 1 / math.sqrt(6)),
    (nn.AdaptiveMaxPool2d((None, 3)), 1.0),
    (so.nn.L2Pool2d(), 1.0),
    (nn.PixelUnshuffle(2), 1.0),
    (nn.ChannelShuffle(2), 1.0),
    (nn.ZeroPad2d(1), 1.0),
    (nn.Softmax(1), 0.5),
]


@pytest.mark.parametrize(("pool", "bound"), POOLS)
def test_pools_and_moves(pool, bound):
    assert so.lipschitz_bound(pool, SIZE) == pytest.approx(bound)
    x = torch.randn(SIZE, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: pool(v[None]).flatten(), x)
    assert float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)) <= bound * (1 + 1e-12)


@pytest.mark.parametrize(
    "pool", [nn.AvgPool1d(2), nn.MaxPool3d(2), nn.AvgPool3d(2), nn.MaxPool1d(2)]
)
def test_pools_of_other_dimensions(pool):
    expected = {nn.AvgPool1d: math.sqrt(0.5), nn.AvgPool3d: math.sqrt(0.125)}.get(type(pool), 1.0)
    assert so.lipschitz_bound(pool) == pytest.approx(expected)


def test_batch_normalisation_is_the_largest_gain_over_deviation():
    norm = nn.BatchNorm2d(3).double().eval()
    norm.running_var.copy_(torch.tensor([0.25, 4.0, 1.0]))  # type: ignore[union-attr]
    nn.init.constant_(norm.weight, -3.0)
    exact = norm_of(norm, (3, 2, 2))
    assert exact <= so.lipschitz_bound(norm) <= exact * (1 + 1e-9)
    assert so.lipschitz_bound(nn.BatchNorm2d(3, affine=False).eval()) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"padding_mode": "zeros", "stride": 2}, {"groups": 2}])
def test_isometric_convolutions_are_bounded_by_their_factors(options):
    layer = so.nn.IsometricConv2d(4, 8, **options)
    assert 1 <= so.lipschitz_bound(layer) < 1 + 2e-5
    assert 1 - 1e-5 < so.lipschitz_bound(layer, SIZE) < 1 + 5e-6
    with torch.no_grad():
        for weight in layer.weights().values():
            weight.mul_(1.1)
    assert norm_of(layer.double(), SIZE) <= so.lipschitz_bound(layer)
    assert 1 < so.lipschitz_bound(layer.bfloat16()) < 6


# ---- weights as they are -------------------------------------------------------------------------


def test_a_scale_a_parametrization_and_rounding_count():
    layer = nn.Linear(12, 8)
    assert so.lipschitz_bound(so.constrain(copy.deepcopy(layer), scale=0.3)) == pytest.approx(0.3)
    assert so.lipschitz_bound(so.orthogonal(copy.deepcopy(layer))) == pytest.approx(1, abs=1e-6)
    halved = so.constrain(copy.deepcopy(layer)).bfloat16()
    exact = float(torch.linalg.matrix_norm(halved.weight.detach().double(), 2))
    assert so.lipschitz_bound(halved) == pytest.approx(exact, rel=1e-9)
    normed = parametrizations.spectral_norm(copy.deepcopy(layer)).eval()
    exact = float(torch.linalg.matrix_norm(normed.weight.detach().double(), 2))
    assert so.lipschitz_bound(normed) == pytest.approx(exact, rel=1e-9)


def test_averaged_and_compiled_models_are_those_inside():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    expected = so.lipschitz_bound(model)
    assert so.lipschitz_bound(torch.optim.swa_utils.AveragedModel(model)) == expected
    assert so.lipschitz_bound(torch.compile(model, backend="eager")) == expected  # type: ignore[arg-type]


def test_nothing_changes_by_being_looked_at():
    model = Normalised(3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(vars(model))
    so.lipschitz_bound(model, (3, 4, 4))
    assert set(vars(model)) == attributes
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# ---- graphs --------------------------------------------------------------------------------------


class Normalised(nn.Module):
    """(x - m) / s, a number for each channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(channels, 1, 1))
        self.register_buffer("deviation", torch.linspace(0.2, 1, channels).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


class Function(nn.Module):
    """Any function of a tensor, with two square layers and a bias to call."""

    def __init__(self, function: Any, width: int = 4) -> None:
        super().__init__()
        self.function = function
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self, x)
        return result


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.first(x)
    y += x
    y *= 2.0
    return functional.relu(y, inplace=True)


# A function, and its bound from the norms a and b of the two layers.
GRAPHS: list[tuple[Any, Any]] = [
    (lambda m, x: x + m.first(x), lambda a, b: 1 + a),
    (lambda m, x: m.second(x - m.first(x).relu()), lambda a, b: b * (1 + a)),
    (lambda m, x: torch.add(x, m.first(x), alpha=-3.0), lambda a, b: 1 + 3 * a),
    (lambda m, x: torch.cat([m.first(x), m.second(x)], 1), lambda a, b: math.hypot(a, b)),
    (lambda m, x: torch.stack([x, x]), lambda a, b: math.sqrt(2)),
    (lambda m, x: 3 * m.first(x) / -2.0, lambda a, b: 1.5 * a),
    (lambda m, x: 1.0 - m.first(x).abs(), lambda a, b: a),
    (lambda m, x: torch.maximum(m.first(x), x), lambda a, b: math.hypot(a, 1)),
    (
        lambda m, x: functional.gelu(m.first(x)).flatten(1).view(x.size(0), -1),
        lambda a, b: 1.12905 * a,
    ),
    (lambda m, x: functional.leaky_relu(x, 2.0).T[:3, None], lambda a, b: 2.0),
    (lambda m, x: functional.linear(x, m.first.weight, m.shift), lambda a, b: a),
    (lambda m, x: x @ m.first.weight.t(), lambda a, b: a),
    (lambda m, x: m.first.weight @ x.mT, lambda a, b: a),
    (lambda m, x: functional.dropout(x, 0.5, m.training), lambda a, b: 1.0),
    (lambda m, x: torch.linalg.vector_norm(m.first(x), dim=1), lambda a, b: a),
    (lambda m, x: functional.softplus(functional.elu(x, 3.0)).clamp(0, 1), lambda a, b: 3.0),
    (lambda m, x: torch.tanh(x).sigmoid().softmax(1), lambda a, b: 0.125),
    (lambda m, x: m.first(x).chunk(2, 1)[0].reshape(-1, x.shape[0]), lambda a, b: a),
    (lambda m, x: functional.pad(x, (1, 1)).mean(1), lambda a, b: 1.0),
    (lambda m, x: m.first(x + m.first(x)), lambda a, b: a * (1 + a)),
    (lambda m, x: m.first(x) + m.shift, lambda a, b: a),
    (lambda m, x: functional.hardtanh(functional.celu(x)) + 1, lambda a, b: 1.0),
    (lambda m, x: functional.prelu(x, 2.0 * m.shift[:1].clamp(1, 1)).clone(), lambda a, b: 2.0),
    (lambda m, x: x.unflatten(0, (x.shape[0] + 0, 1)).flatten(x.dim() - 1), lambda a, b: 1.0),
    (in_place, lambda a, b: 2 * (1 + a)),
    (lambda m, x: m.shift * 2, lambda a, b: 0.0),
]


@pytest.mark.parametrize(("function", "bound"), GRAPHS)
@pytest.mark.parametrize("size", [None, (4,)])
def test_graphs(function, bound, size):
    model = Function(function).double().eval()
    norms = [so.lipschitz_bound(layer) for layer in (model.first, model.second)]
    found = so.lipschitz_bound(model, size)
    assert found <= bound(*norms) * (1 + 1e-12)
    if size is None:
        assert found == pytest.approx(bound(*norms))
    x = torch.randn(3, 4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda v: model(v.clone()).flatten(), x)
    assert float(torch.linalg.matrix_norm(jacobian.flatten(1), 2)) <= found * (1 + 1e-12)


IMAGES: list[Any] = [
    lambda m, x: x + functional.adaptive_avg_pool2d(x, 1),
    lambda m, x: x - x.mean((2, 3), keepdim=True) * 2.0,
    lambda m, x: x.sum(1),
    lambda m, x: x.amax((2, 3)) / x.shape[1],
    lambda m, x: functional.max_pool2d(x, 3, 2, 1) + functional.avg_pool2d(x, 2),
    lambda m, x: functional.conv2d(x, torch.ones(2, 4, 3, 3, dtype=x.dtype), padding=1),
    lambda m, x: functional.pixel_shuffle(x.roll(1, 2), 2).flip(3),
    lambda m, x: m.shift.view(4, 1, 1) * x,
]


@pytest.mark.parametrize("function", IMAGES)
def test_graphs_that_need_the_size(function):
    model = Function(function).double().eval()
    bound = so.lipschitz_bound(model, SIZE)
    for batch in (1, 3):  # the bound is that of any batch
        x = torch.randn(batch, *SIZE, dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(lambda v: model(v).flatten(), x)
        exact = float(torch.linalg.matrix_norm(jacobian.flatten(1).view(len(jacobian), -1), 2))
        assert exact <= bound * (1 + 1e-12)


def test_normalisation_inside_the_model_counts():
    model = nn.Sequential(Normalised(3), nn.Flatten())
    assert so.lipschitz_bound(model, (3, 4, 4)) == pytest.approx(5.0)
    one = so.lipschitz_bound(model, (1, 4, 4))  # a grey image, that becomes three
    assert one == pytest.approx(5.0 * math.sqrt(3))
    assert one >= norm_of(model.double(), (1, 4, 4))


def test_residual_blocks_need_no_size_where_shapes_cannot_differ():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.wide(torch.relu(self.narrow(x)))

    block = Block()
    narrow, wide = so.lipschitz_bound(block.narrow), so.lipschitz_bound(block.wide)
    assert so.lipschitz_bound(block) == pytest.approx(1 + narrow * wide)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledConvolution(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


def test_of_a_subclass_that_changes_the_forward_pass_the_graph_counts():
    doubled = Doubled(4, 3)
    assert so.lipschitz_bound(doubled) == pytest.approx(2 * spectral_norm(doubled.weight))
    convolution = nn.Sequential(DoubledConvolution(4, 3, 1))
    exact = 2 * spectral_norm(convolution[0].weight.flatten(1))  # type: ignore[operator]
    assert so.lipschitz_bound(convolution) == pytest.approx(exact)
    unchanged = so.nn.NormalizedLinear(4, 3)
    assert list(so.lipschitz_table(nn.Sequential(unchanged))) == ["0"]


# ---- the table -----------------------------------------------------------------------------------


def test_the_table_names_layers_and_its_factors_multiply_to_the_bound():
    residual = Function(lambda m, x: x + m.first(x))
    model = nn.Sequential(
        nn.Linear(4, 4), residual, nn.ReLU(), Function(lambda m, x: m.first(x) * 2)
    )
    table = so.lipschitz_table(model)
    assert list(table) == ["0", "1.add", "2", "3.first", "3.mul"]
    assert math.prod(table.values()) == so.lipschitz_bound(model)
    assert table["1.add"] == pytest.approx(1 + so.lipschitz_bound(residual.first))
    twice = nn.Sequential(model[0], model[0])
    assert list(so.lipschitz_table(twice)) == ["0", "0'"]
    assert list(so.lipschitz_table(model[0])) == ["Linear"]


# ---- rules of others -----------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if self.factor == 0 else self.factor * x


class Tripled(Scale):
    def lipschitz_bound(self) -> float:
        return 3.0


class TripledTwice(Tripled):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Renamed(Tripled):
    def extra_repr(self) -> str:
        return "three"


def test_a_method_counts_for_the_forward_pass_that_it_was_written_for():
    assert so.lipschitz_bound(nn.Sequential(Renamed(3.0))) == 3.0
    assert so.lipschitz_bound(nn.Sequential(TripledTwice(3.0))) == 6.0  # traced


def test_a_rule_of_ones_own(monkeypatch):
    monkeypatch.setattr(rules, "RULES", rules.RULES.copy())
    with pytest.raises(TypeError, match=r"`0.exp` must call a function with a known"):
        so.lipschitz_bound(nn.Sequential(Scale(0)))
    assert so.lipschitz_bound(nn.Sequential(Tripled(3.0))) == 3.0

    @so.lipschitz_rule(Scale)
    def bound(module: Scale) -> float:
        return abs(module.factor) + 1

    assert so.lipschitz_bound(nn.Sequential(Scale(-2.0))) == 3.0
    assert bound(Scale(1.0)) == 2.0

    class Plain(Scale):
        pass

    class Other(Scale):
        def forward(self, x: Tensor) -> Tensor:
            return 5 * x

    assert so.lipschitz_bound(Plain(4.0)) == 5.0
    assert so.lipschitz_bound(Other(4.0)) == 5.0  # traced: the rule is not about this one


def test_modules_of_other_packages_are_known_by_name():
    """The rules read what the packages' classes hold; tests/integrations runs the packages."""
    sort = type("GroupSort2", (nn.Module,), {"__module__": "deel.torchlip.modules"})()
    sort._coefficient_lip = 0.5
    assert so.lipschitz_bound(sort) == 0.5
    made = type("Normalize", (nn.Module,), {"__module__": "torchvision.transforms"})()
    made.std = [0.5, 0.25]
    assert so.lipschitz_bound(made) == 4.0
    pool = type("ScaledL2NormPool2d", (nn.Module,), {"__module__": "deel.torchlip"})()
    vars(pool).update(kernel_size=2, stride=None, ceil_mode=False, _coefficient_lip=1.0)
    assert so.lipschitz_bound(pool) == 1.0
    assert so.lipschitz_bound(type("MaxMin", (nn.Module,), {"__module__": "orthogonium"})()) == 1.0
