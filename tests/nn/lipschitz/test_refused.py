# ruff: noqa: ARG005 - functions of a table have the same arguments
"""What cannot be proven is refused, by name and with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import stiefel_opt as so


class Function(nn.Module):
    """Any function of a tensor, with a layer, a bias and a buffer to call."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def hooked(kind: str) -> nn.Module:
    layer = nn.Linear(4, 4)
    getattr(layer, kind)(lambda *_: None)
    return nn.Sequential(layer)


def patched(name: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 1))
    setattr(model[0], name, lambda *_: None)
    return model


def bad_weight(value: float) -> nn.Module:
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
    nn.init.constant_(model[1].weight, value)
    return model


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Given(nn.Module):
    def __init__(self, bound: Any) -> None:
        super().__init__()
        self.bound = bound

    def lipschitz_bound(self) -> Any:
        return self.bound


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)))


def half_integer() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    return model


class Traced(nn.Module):
    """Its forward pass is traced; its weight is moved by each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, 2.0 * self.layer.weight)


MODULES: list[tuple[Any, type[Exception], str]] = [
    (lambda: nn.Sequential(nn.LayerNorm(4)), TypeError, "`0` must have a known.*torch.LayerNorm"),
    (lambda: nn.Sequential(nn.Sequential(nn.GLU())), TypeError, r"`0.0` must have a known"),
    (lambda: nn.MultiheadAttention(4, 2), TypeError, "`MultiheadAttention` must have a known"),
    (lambda: hooked("register_forward_hook"), TypeError, "`0` must have no forward hooks"),
    (lambda: hooked("register_forward_pre_hook"), TypeError, "`0` must have no forward hooks"),
    (lambda: patched("forward"), TypeError, "`0` must have the methods of its class, got forward"),
    (lambda: patched("_conv_forward"), TypeError, "`0` must have the methods of its class"),
    (lambda: nn.Sequential(nn.BatchNorm2d(4)), ValueError, "`0`.*evaluation mode.*model.eval"),
    (lambda: nn.Sequential(nn.Dropout()), ValueError, "`0`.*evaluation mode.*model.eval"),
    (lambda: nn.Sequential(nn.RReLU()), ValueError, "`0`.*evaluation mode"),
    (lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(), ValueError, "running statistics"),
    (spectral, ValueError, r"`0.parametrizations.weight` must stay as it is.*model.eval"),
    (Traced, ValueError, "must stay as it is.*model.eval"),
    (lambda: bad_weight(float("nan")), ValueError, r"`1.weight` must be finite"),
    (lambda: bad_weight(2e38).double(), ValueError, None),  # finite in float64: no error
    (half_integer, TypeError, r"`0.weight` must be a plain tensor of numbers"),
    (
        lambda: nn.Sequential(nn.LazyLinear(4)),
        ValueError,
        "`0.weight` must have a shape.*one batch",
    ),
    (lambda: nn.Sequential(nn.Linear(4, 4, device="meta")), ValueError, "must have values"),
    (lambda: nn.MaxPool2d(2, return_indices=True), ValueError, "`return_indices` must be False"),
    (lambda: nn.AdaptiveMaxPool2d(2, return_indices=True), ValueError, "`return_indices`"),
    (lambda: nn.AdaptiveAvgPool2d(2), ValueError, "`input_size` must be given.*pass input_size"),
    (lambda: nn.LPPool2d(3, 2), ValueError, "`norm_type` must be 2"),
    (lambda: nn.CELU(-1.0), ValueError, "must have a finite Lipschitz constant"),
    (lambda: nn.Softplus(threshold=1.0), ValueError, "must have a finite Lipschitz constant"),
    (lambda: Given(float("nan")), ValueError, "`Given` must have a finite Lipschitz constant"),
    (lambda: Given(-1.0), ValueError, "`Given` must have a finite Lipschitz constant"),
    (lambda: Given(None), TypeError, "`Given` must have a rule that returns one number, got None"),
    (lambda: Given(torch.ones(3)), TypeError, r"rule that returns one number, got \(3,\)"),
    (lambda: Given("3"), TypeError, "`Given` must have a rule that returns one number, got str"),
    (TwoInputs, TypeError, "`model` must take one tensor, got y"),
    (Branching, TypeError, "`model` must be a graph of modules.*be traced.*take branches out"),
]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(("make", "error", "message"), MODULES)
def test_modules(make, error, message):
    if message is None:
        assert so.lipschitz_bound(make()) > 1e38
        return
    with pytest.raises(error, match=message):
        so.lipschitz_bound(make())


def test_hooks_of_all_modules():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(TypeError, match="`model` must have no hooks of all modules"):
            so.lipschitz_bound(nn.Sequential(nn.ReLU()))
    finally:
        handle.remove()


def aliased(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    z = y
    z *= 3
    return y


def viewed(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    z = y.view(-1)
    z += 1.0
    return y


def transposed(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    z = y.T
    z -= 1.0
    return y + x


def assigned(m: Any, x: Tensor) -> Tensor:
    y = m.layer(x)
    y[0] = 1.0
    return y


KNOWN = "must call a function with a known Lipschitz constant"
FUNCTIONS: list[tuple[Any, type[Exception], str]] = [
    (lambda m, x: m.layer(x).exp(), TypeError, f"`exp` {KNOWN}, got exp"),
    (lambda m, x: torch.adaptive_max_pool1d(x, 1)[1], TypeError, f"adaptive_max_pool1d` {KNOWN}"),
    (lambda m, x: functional.normalize(x), TypeError, f"`normalize` {KNOWN}"),
    (lambda m, x: torch.where(x > 0, x, -x), TypeError, KNOWN),
    (lambda m, x: x.to(torch.int), TypeError, f"`to` {KNOWN}"),
    (lambda m, x: x.grad, TypeError, "got attribute grad"),
    (lambda m, x: x * x, TypeError, "`mul` must be a product with a constant"),
    (lambda m, x: 1.0 / x, TypeError, "`truediv` must be a product with a constant"),
    (lambda m, x: torch.div(x, 2.0, rounding_mode="floor"), TypeError, "product with a constant"),
    (lambda m, x: x @ x.T, TypeError, "`matmul` must have a constant weight"),
    (lambda m, x: x @ torch.ones(2, 4, 4), TypeError, "product with one matrix"),
    (lambda m, x: functional.linear(m.shift, x), TypeError, "`linear` must act on the input"),
    (lambda m, x: functional.linear(x, m.layer.weight, x), TypeError, "constant weight, a matrix"),
    (lambda m, x: functional.conv1d(x, x), TypeError, "`conv1d` must have a constant weight"),
    (lambda m, x: functional.conv1d(x, m.shift.view(4, 1, 1), x), TypeError, "got something else"),
    (lambda m, x: functional.max_pool1d(x, 2, return_indices=True), TypeError, f"indices` {KNOWN}"),
    (lambda m, x: x + m.shift * x.shape[0], TypeError, "numbers that depend on shapes"),
    (lambda m, x: torch.add(x, x, alpha=x.shape[0]), TypeError, "`add` must be of tensors and con"),
    (lambda m, x: x[[0, 1]], TypeError, "`getitem` must be taken by integers and slices"),
    (lambda m, x: x.view(torch.int32), TypeError, "`view` must move entries by numbers"),
    (lambda m, x: x.sum(), ValueError, "`sum_1` must be over a known number of entries"),
    (lambda m, x: x.norm(1), TypeError, "`norm` must be a 2-norm"),
    (lambda m, x: x * x.shape[0], TypeError, "a number that is not known here"),
    (lambda m, x: x.clamp(m.shift, None), TypeError, "`clamp` must be between numbers"),
    (lambda m, x: torch.max(x, 1), TypeError, "`max_1` must be of two tensors.*amax"),
    (lambda m, x: x.abs(2), TypeError, "`abs_1` must be called as usual"),
    (lambda m, x: functional.pad(x, (1, 1), mode="circular"), TypeError, "pad with a constant"),
    (lambda m, x: functional.dropout(x), ValueError, "`dropout` must be in evaluation mode"),
    (lambda m, x: functional.softplus(x, 1.0, 1.0), ValueError, "must have a finite"),
    (lambda m, x: x / torch.zeros(()), ValueError, "must have a finite"),
    (lambda m, x: torch.cat([x.chunk(2, 1), x]), TypeError, "must"),
    (lambda m, x: torch.cat(x.split(1, 1), 1), TypeError, "`cat` must be of a list of tensors"),
    (lambda m, x: x * None, TypeError, "`mul` must be a product with a number or a tensor, got No"),
    (lambda m, x: x.chunk(2, 1) + 1, TypeError, "must"),
    (lambda m, x: m.layer(x.chunk(2, 1)), TypeError, "`layer` must take one tensor"),
    (lambda m, x: (x, x), TypeError, "`model` must return one tensor"),
    (lambda m, x: x.chunk(2, 1), TypeError, "`model` must return one tensor"),
    (lambda m, x: x + m.mean, ValueError, "`add` must not change shape by broadcasting"),
    (lambda m, x: x + x.mean(1), ValueError, "`add` must not change shape.*pass input_size"),
    (lambda m, x: x + x.flatten(0), ValueError, "two tensors whose shapes may differ"),
    (lambda m, x: x * torch.rand(1), TypeError, "draws random numbers"),
    (lambda m, x: x + torch.rand_like(m.shift).sum(), TypeError, "draws random numbers"),
    (lambda m, x: x + m.shift.relu_(), TypeError, "`relu_` must change nothing in place"),
    (aliased, TypeError, "`imul` must not change in place what others use, got layer"),
    (viewed, TypeError, "`iadd` must not change in place what others use"),
    (transposed, TypeError, "`isub` must not change in place what others use"),
    (assigned, TypeError, "cannot be traced"),
    (lambda m, x: m.layer(x) + functional.relu(x, inplace=True), TypeError, "in place what others"),
    (lambda m, x: m.layer(x) + x.relu_(), TypeError, "`relu_` must not change in place"),
    (lambda m, x: next(iter(x.unbind())), TypeError, "cannot be traced"),
]


@pytest.mark.parametrize(("function", "error", "message"), FUNCTIONS)
def test_functions(function, error, message):
    with pytest.raises(error, match=message):
        so.lipschitz_bound(Function(function).train())


def test_a_module_in_place_on_what_others_use():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.relu(x)

    with pytest.raises(TypeError, match="`relu` must not change in place what others use, got x"):
        so.lipschitz_bound(Block())


SHAPES: list[Any] = [
    lambda m, x: x - x.mean(0),
    lambda m, x: x.T + x[0, :1],
    lambda m, x: x + m.shift.view(4, 1, 1),
]


@pytest.mark.parametrize("function", SHAPES)
def test_the_dimension_of_the_batch_is_not_broadcast(function):
    with pytest.raises(TypeError, match="must keep the dimension of the batch"):
        so.lipschitz_bound(Function(function), (4,))


class Pair(Given):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_a_module_with_a_rule_that_returns_no_tensor():
    with pytest.raises(TypeError, match="`0` must return one tensor, got tuple"):
        so.lipschitz_bound(nn.Sequential(Pair(1.0)), (4,))


def test_a_sum_over_the_batch():
    with pytest.raises(ValueError, match="a sum over the batch has no bound"):
        so.lipschitz_bound(Function(lambda m, x: x.sum(0)), (4,))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.pixel_unshuffle(self.layer(x), 2)


ARGUMENTS: list[tuple[Any, type[Exception], str]] = [
    (lambda: so.lipschitz_bound("model"), TypeError, "`model` must be a torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: so.lipschitz_bound(nn.ReLU(), 3), TypeError, "`input_size` must be the shape"),  # type: ignore[arg-type]
    (lambda: so.lipschitz_bound(nn.ReLU(), (3, -1)), ValueError, "`input_size` must be a positive"),
    (lambda: so.lipschitz_rule(3), TypeError, "`kind` must be a subclass of torch.nn.Module"),  # type: ignore[arg-type]
    (lambda: so.lipschitz_rule(TwoInputs)(1.0), TypeError, "`rule` must be a function"),  # type: ignore[type-var]
    *(
        (lambda size=size: so.lipschitz_bound(Images(), size), ValueError, f"`input_size` .*{text}")
        for size, text in (
            ((2, 3, 6, 6), "must have 3 numbers here, channels and sides"),
            ((6, 6), "must have 3 numbers"),
            ((4, 6, 6), "must be the shape of one input, without the batch, got.*layer refuses"),
            ((3, 5, 5), "must be the shape of one input, without the batch, got.*unshuffle refus"),
        )
    ),
    (
        lambda: so.lipschitz_bound(nn.AdaptiveAvgPool2d(4), (3, 6, 6)),
        ValueError,
        "`output_size` must divide the sides",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ARGUMENTS)
def test_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
