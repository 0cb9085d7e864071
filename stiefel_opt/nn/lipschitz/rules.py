"""What is proven of each type of module: a table from types to rules.

Slopes of activations are rounded up in the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_opt.errors import fail, type_name
from stiefel_opt.nn import (
    BetaAbs,
    IsometricConv2d,
    L2Pool2d,
    MaxMin,
    ShiftConv2d,
    SpatialShift,
)
from stiefel_opt.nn.lipschitz.norms import (
    NEEDS_SIZE,
    convolution_norm,
    exact,
    pool_counts,
    spectral_norm,
)
from stiefel_opt.tags import ManifoldParameter

Size = tuple[int, ...] | None  # of one input of a module, without the batch
FunctionT = TypeVar("FunctionT", bound=Callable[..., float])


class Rule(NamedTuple):
    """A proven bound: of the module, and of the size of its input if it asks for that."""

    bound: Callable[..., float]
    asks_size: bool = False
    kind: type[nn.Module] | None = None  # whose forward pass it is about


RULES: Final[dict[type[nn.Module], Rule]] = {}


def lipschitz_rule(kind: type[nn.Module]) -> Callable[[FunctionT], FunctionT]:
    r"""Decorator: the function returns a proven Lipschitz constant of a module of this type.

    .. code-block:: python

        @so.lipschitz_rule(Scale)
        def bound(module: Scale) -> float:
            return abs(float(module.factor))

    The constant is that in the 2-norm over all entries, for all inputs, of the weights as they are
    now. The rule also counts for subclasses that override nothing of the type; it replaces an
    earlier one. A class of your own may have a method ``lipschitz_bound(self)`` instead.

    Args:
        kind: A subclass of ``torch.nn.Module``.

    Raises:
        TypeError: for anything else, and for what is no function.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(fail("kind", "be a subclass of torch.nn.Module", repr(kind)))

    def register(function: FunctionT) -> FunctionT:
        if not callable(function):
            raise TypeError(fail("rule", "be a function of the module", repr(function)))
        RULES[kind] = Rule(function, kind=kind)
        return function

    return register


def rule_for(module: nn.Module) -> Rule | None:
    """Return the rule for the type of ``module``, or None."""
    kind = parametrize.type_before_parametrizations(module)
    if kind in RULES:
        return RULES[kind]
    own = getattr(module, "lipschitz_bound", None)
    if callable(own):
        return Rule(lambda _: own())
    if named := FOREIGN.get(type_name(module)):
        return Rule(named)
    for place, base in enumerate(kind.__mro__):
        if base in RULES:
            return None if _overrides(module, kind.__mro__[:place], base) else RULES[base]
    return None


_HARMLESS: Final = {
    *("__init__", "__module__", "__doc__", "__annotations__", "__dict__", "__weakref__"),
    *("__qualname__", "__firstlineno__", "__static_attributes__", "__annotate_func__"),
    *("__annotate__", "__annotations_cache__", "__repr__", "extra_repr", "reset_parameters"),
    *("__constants__", "__parameters__", "__orig_bases__", "__setstate__"),
}


def _overrides(module: nn.Module, above: Sequence[type], base: type) -> bool:
    """Say whether a subclass changes anything by which ``base`` computes."""
    kept = {*vars(module), *module._parameters, *module._buffers, *module._modules}
    names = {name for kind in above for name in vars(kind)} - _HARMLESS
    return any(hasattr(base, name) or name in kept for name in names)


# ---- products ------------------------------------------------------------------------------------


def _rule(*kinds: type[nn.Module], asks_size: bool = False) -> Callable[[FunctionT], FunctionT]:
    def register(function: FunctionT) -> FunctionT:
        RULES.update({kind: Rule(function, asks_size, kind) for kind in kinds})
        return function

    return register


@_rule(nn.Linear)
def _linear(module: nn.Linear) -> float:
    return spectral_norm(module.weight)


@_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, asks_size=True)
def _convolution(module: Any, size: Size) -> float:
    twice = module._reversed_padding_repeated_twice
    pads = list(zip(twice[::2], twice[1::2], strict=True))[::-1]
    return convolution_norm(
        module.weight,
        stride=module.stride,
        pads=pads,
        dilation=module.dilation,
        groups=module.groups,
        mode=module.padding_mode,
        size=_sides(size, len(module.stride)),
    )


def _sides(size: Size, count: int) -> Size:
    """Return the sides of an image of channels, if its size is known."""
    if size is not None and len(size) != count + 1:
        wanted = f"have {count + 1} numbers here, channels and sides"
        raise ValueError(fail("input_size", wanted, size, NEEDS_SIZE))
    return None if size is None else size[1:]


@_rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _transposed(module: Any) -> float:
    """The norm of the convolution whose adjoint it is, with zeros around the image."""
    return convolution_norm(
        module.weight,
        stride=module.stride,
        pads=[(0, 0)] * len(module.stride),
        dilation=module.dilation,
        groups=module.groups,
        mode="zeros",
        size=None,
    )


@_rule(ShiftConv2d)
def _shift(module: ShiftConv2d) -> float:
    return spectral_norm(module.conv.weight.flatten(1))


@_rule(IsometricConv2d, asks_size=True)
def _isometric(module: IsometricConv2d, size: Size) -> float:
    """Of the factors: |V V' + z (I - V V')| <= max(1, 2 |V|^2 - 1); and what rounding adds."""
    weights = {name: exact(weight) for name, weight in module.weights().items()}
    bound = 1.0
    for name, weight in weights.items():
        if name == "factors":
            for factor in weight.unbind(1):
                bound *= max(1.0, 2.0 * spectral_norm(factor) ** 2 - 1.0)
        else:
            bound *= spectral_norm(weight)
    rounding = exact(module.kernel()) - module.composed(weights)
    matrices = torch.unflatten(rounding, 0, (module.groups, -1)).flatten(2)
    bound += module.kernel_size * spectral_norm(matrices)
    if size is None:
        return bound
    pad = module.kernel_size // 2
    plain = convolution_norm(
        module.kernel(),
        stride=(module.stride,) * 2,
        pads=[(pad, pad)] * 2,
        dilation=(1, 1),
        groups=module.groups,
        mode=module.padding_mode,
        size=_sides(size, 2),
    )
    return min(bound, plain)


# ---- without weights -----------------------------------------------------------------------------


def _constant(value: float, *kinds: type[nn.Module]) -> None:
    RULES.update({kind: Rule(lambda _: value, kind=kind) for kind in kinds})


SLOPES: Final[dict[str, float]] = {  # of functions without a parameter, by their names in torch
    **dict.fromkeys(("relu", "relu6", "tanh", "softsign", "logsigmoid", "tanhshrink"), 1.0),
    **dict.fromkeys(("abs", "neg"), 1.0),
    "sigmoid": 0.25,
    "hardsigmoid": 0.16667,
    "hardswish": 1.5,
    "selu": 1.7581,
    "silu": 1.09984,
    "mish": 1.08850,
}
GELU: Final = 1.12905  # exact and by tanh

_constant(1.0, nn.ReLU, nn.ReLU6, nn.Tanh, nn.Hardtanh, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink)
_constant(1.0, nn.Softshrink, nn.Identity, nn.Flatten, nn.Unflatten)
_constant(1.0, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
_constant(0.5, nn.Softmax, nn.Softmin)
_constant(1.0, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_constant(1.0, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_constant(1.0, SpatialShift, MaxMin, BetaAbs, L2Pool2d)
_constant(SLOPES["sigmoid"], nn.Sigmoid)
_constant(SLOPES["hardsigmoid"], nn.Hardsigmoid)
_constant(SLOPES["hardswish"], nn.Hardswish)
_constant(SLOPES["selu"], nn.SELU)
_constant(SLOPES["silu"], nn.SiLU)
_constant(SLOPES["mish"], nn.Mish)
_constant(GELU, nn.GELU)


def steepest(*slopes: float) -> float:
    """Return the largest absolute slope, of pieces of 1 and these."""
    return max(1.0, *map(abs, slopes))


@_rule(nn.LeakyReLU)
def _leaky(module: nn.LeakyReLU) -> float:
    return steepest(module.negative_slope)


@_rule(nn.ELU)
def _elu(module: nn.ELU) -> float:
    return steepest(module.alpha)


@_rule(nn.PReLU)
def _prelu(module: nn.PReLU) -> float:
    return steepest(float(module.weight.detach().abs().max()))


@_rule(nn.RReLU)
def _random_relu(module: nn.RReLU) -> float:
    _in_evaluation(module)
    return steepest((module.lower + module.upper) / 2.0)


@_rule(nn.CELU)
def _celu(module: nn.CELU) -> float:
    return 1.0 if module.alpha > 0 else math.inf


@_rule(nn.Softplus)
def _softplus(module: nn.Softplus) -> float:
    return softplus(module.threshold)


def softplus(threshold: float) -> float:
    """Return 1, unless the jump to the identity is above rounding."""
    return 1.0 if threshold >= 20 else math.inf


def _in_evaluation(module: nn.Module) -> None:
    if module.training:
        wanted, given = "be in evaluation mode", "training mode"
        raise ValueError(fail(type(module).__name__, wanted, given, "call model.eval()"))


@_rule(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
@_rule(nn.FeatureAlphaDropout)
def _dropout(module: nn.Module) -> float:
    _in_evaluation(module)
    return 1.0


@_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(module: Any) -> float:
    """The largest gain over deviation, of the statistics that are kept."""
    _in_evaluation(module)
    if module.running_var is None:
        wanted, given = "have running statistics", "none"
        raise ValueError(fail(type(module).__name__, wanted, given, "track_running_stats=True"))
    gain = exact(module.running_var).add(module.eps).rsqrt()
    gain = gain if module.weight is None else gain * exact(module.weight).abs()
    return float(gain.max())


# ---- pools ---------------------------------------------------------------------------------------


def each(value: Any, count: int) -> tuple[int, ...]:
    """Return one number for each direction."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * count


def max_pool(kernel: Any, stride: Any, dilation: Any, count: int) -> float:
    """Return the bound of a pooling by maxima: the root of how many windows hold one pixel."""
    stride = kernel if stride is None or stride == [] else stride
    shape = each(kernel, count), each(stride, count), each(dilation, count)
    return math.sqrt(pool_counts(*shape))


def average_pool(
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    include_pad: bool,
    divisor: int | None,
    count: int,
) -> float:
    """Return the bound of a pooling by means of n pixels: the root of the windows, over n."""
    stride = kernel if stride is None or stride == [] else stride
    sides = each(kernel, count)
    windows = pool_counts(sides, each(stride, count))
    pixels = math.prod(sides)
    if divisor is not None:
        return math.sqrt(windows * pixels) / abs(divisor)
    cut = ceil_mode or (any(each(padding, count)) and not include_pad)
    return math.sqrt(windows if cut else windows / pixels)  # windows at the edge divide by less


def power_pool(kernel: Any, stride: Any, ceil_mode: bool, count: int) -> float:
    """Return the bound of a pooling by 2-norms; windows cut at the edge count as whole ones."""
    windows = max_pool(kernel, stride, 1, count)
    return windows * (math.sqrt(math.prod(each(kernel, count))) if ceil_mode else 1.0)


def _directions(module: nn.Module) -> int:
    names = [kind.__name__ for kind in type(module).__mro__]
    return next(n for n in (1, 2, 3) if any(name.endswith(f"{n}d") for name in names))


def _without_indices(module: Any) -> None:
    if module.return_indices:
        raise ValueError(fail("return_indices", "be False", True))


@_rule(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
def _max_pool(module: Any) -> float:
    _without_indices(module)
    options = module.kernel_size, module.stride, module.dilation
    return max_pool(*options, _directions(module))


@_rule(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _average_pool(module: Any) -> float:
    divisor = getattr(module, "divisor_override", None)
    options = module.padding, module.ceil_mode, module.count_include_pad, divisor
    return average_pool(module.kernel_size, module.stride, *options, _directions(module))


@_rule(nn.LPPool1d, nn.LPPool2d, nn.LPPool3d)
def _power_pool(module: Any) -> float:
    if module.norm_type != 2:
        raise ValueError(fail("norm_type", "be 2", module.norm_type))
    return power_pool(module.kernel_size, module.stride, module.ceil_mode, _directions(module))


def adaptive_pool(output: tuple[int | None, ...], size: Size, *, is_mean: bool) -> float:
    """Return the bound of pooling to ``output`` sides, of windows that do not overlap."""
    sides = _sides(size, len(output))
    if sides is None and any(side != 1 for side in output):
        raise ValueError(fail("input_size", "be given", f"pooling to {output}", NEEDS_SIZE))
    if sides is None:
        return 1.0
    wanted = [n if side is None else side for side, n in zip(output, sides, strict=True)]
    if any(n % side for side, n in zip(wanted, sides, strict=True)):
        condition = f"divide the sides {tuple(sides)} of the image"
        raise ValueError(fail("output_size", condition, output, "windows overlap otherwise"))
    return math.sqrt(math.prod(wanted) / math.prod(sides)) if is_mean else 1.0


@_rule(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, asks_size=True)
def _adaptive_average(module: Any, size: Size) -> float:
    return adaptive_pool(_outputs(module), size, is_mean=True)


@_rule(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, asks_size=True)
def _adaptive_max(module: Any, size: Size) -> float:
    _without_indices(module)
    return adaptive_pool(_outputs(module), size, is_mean=False)


def _outputs(module: Any) -> tuple[int | None, ...]:
    return each(module.output_size, _directions(module))


# ---- other packages ------------------------------------------------------------------------------


def _normalize(module: Any) -> float:
    """``torchvision.transforms.Normalize``, which refuses images of other channels."""
    return 1.0 / min(abs(float(deviation)) for deviation in module.std)


def _one(_: nn.Module) -> float:
    return 1.0


def _scaled(module: Any) -> float:
    return abs(float(module._coefficient_lip))


def _scaled_norms(module: Any) -> float:
    return _scaled(module) * power_pool(module.kernel_size, module.stride, module.ceil_mode, 2)


# By package and class, as none of them is imported here.
FOREIGN: Final[dict[str, Callable[[Any], float]]] = {
    "torchvision.Normalize": _normalize,
    "orthogonium.MaxMin": _one,
    "orthogonium.Abs": _one,
    **dict.fromkeys(("deel.MaxMin", "deel.GroupSort", "deel.GroupSort2", "deel.FullSort"), _scaled),
    "deel.ScaledL2NormPool2d": _scaled_norms,
}


def is_plain(value: Tensor) -> bool:
    """Say whether a weight holds its numbers as they are, unlike quantised and sharded ones."""
    known = type(value) in (Tensor, nn.Parameter) or isinstance(value, ManifoldParameter)
    has_fraction = value.is_floating_point() or value.is_complex() or value.dtype == torch.long
    return known and value.layout == torch.strided and has_fraction
