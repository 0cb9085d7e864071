"""What is proven of each type of module: a table from types to rules.

Slopes of activations are rounded up in the last digit.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
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
    keeps_shape: bool = False  # whether outputs are of the shape of inputs


RULES: Final[dict[type[nn.Module], Rule]] = {}


def lipschitz_rule(kind: type[nn.Module]) -> Callable[[FunctionT], FunctionT]:
    r"""Decorator: the function returns a proven Lipschitz constant of a module of this type.

    .. code-block:: python

        @so.lipschitz_rule(Scale)
        def bound(module: Scale) -> float:
            return abs(float(module.factor))

    The constant is that in the 2-norm over all entries, for all inputs, of the weights as they are
    now. It replaces an earlier one. A class of your own may have a method ``lipschitz_bound(self)``
    instead. Either also counts for subclasses that override nothing else of the type.

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
        keeps_shape = kind in RULES and RULES[kind].keeps_shape
        RULES[kind] = Rule(function, False, kind, keeps_shape)
        return function

    return register


def rule_for(module: nn.Module) -> Rule | None:
    """Return the rule for the type of ``module``, or None."""
    kind = parametrize.type_before_parametrizations(module)
    if kind in RULES:
        return RULES[kind]
    if named := FOREIGN.get(type_name(module)):
        return Rule(named)
    for place, base in enumerate(kind.__mro__):
        if base in RULES or callable(vars(base).get("lipschitz_bound")):
            if _overrides(module, kind.__mro__[:place], base):
                return None
            return RULES.get(base) or Rule(_by_method)
    return None


def _by_method(module: Any) -> Any:
    return module.lipschitz_bound()


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
    if getattr(base, "forward", None) is nn.Module.forward:
        names.discard("forward")  # the method is about that of subclasses
    return any(hasattr(base, name) or name in kept for name in names)


# ---- products ------------------------------------------------------------------------------------


def _rule(
    *kinds: type[nn.Module], asks_size: bool = False, keeps_shape: bool = False
) -> Callable[[FunctionT], FunctionT]:
    def register(function: FunctionT) -> FunctionT:
        RULES.update({kind: Rule(function, asks_size, kind, keeps_shape) for kind in kinds})
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


def _constant(value: float, *kinds: type[nn.Module], keeps_shape: bool = False) -> None:
    RULES.update({kind: Rule(lambda _: value, False, kind, keeps_shape) for kind in kinds})


SLOPES: Final[dict[str, float]] = {  # of functions without options, by their names in torch
    **dict.fromkeys(("relu", "relu6", "tanh", "softsign", "logsigmoid", "tanhshrink"), 1.0),
    **dict.fromkeys(("abs", "neg"), 1.0),
    "sigmoid": 0.25,
    "hardsigmoid": 0.16667,
    "hardswish": 1.5,
    "selu": 1.7581,
    "silu": 1.09984,
    "mish": 1.08850,
}

for _kind in (
    *(nn.ReLU, nn.ReLU6, nn.Tanh, nn.Softsign, nn.LogSigmoid, nn.Tanhshrink),
    *(nn.Sigmoid, nn.Hardsigmoid, nn.Hardswish, nn.SELU, nn.SiLU, nn.Mish),
):
    _constant(SLOPES[_kind.__name__.lower()], _kind, keeps_shape=True)
_constant(1.0, nn.Hardtanh, nn.Softshrink, nn.Identity, nn.ChannelShuffle, keeps_shape=True)
_constant(1.0, SpatialShift, MaxMin, BetaAbs, keeps_shape=True)
_constant(0.5, nn.Softmax, nn.Softmin, keeps_shape=True)
_constant(1.0, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, L2Pool2d)
_constant(1.0, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_constant(1.0, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)


def _in_evaluation(name: str, training: bool) -> None:
    if training:
        given = "training mode"
        raise ValueError(fail(name, "be in evaluation mode", given, "call model.eval()"))


@_rule(nn.RReLU, keeps_shape=True)
def _random_relu(module: nn.RReLU) -> float:
    _in_evaluation("RReLU", module.training)
    return steepest((module.lower + module.upper) / 2.0)


@_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, keeps_shape=True)
def _batch_norm(module: Any) -> float:
    """The largest gain over deviation, of the statistics that are kept."""
    _in_evaluation(type(module).__name__, module.training)
    if module.running_var is None:
        wanted, given = "have running statistics", "none"
        raise ValueError(fail(type(module).__name__, wanted, given, "track_running_stats=True"))
    gain = exact(module.running_var).add(module.eps).rsqrt()
    gain = gain if module.weight is None else gain * exact(module.weight).abs()
    return float(gain.max())


# ---- functions of torch, and the modules that have their options ---------------------------------


class Function(NamedTuple):
    """The bound of a function of torch by its options, by ``size`` if it asks for that."""

    bound: Callable[..., float]
    keeps_shape: bool

    def of(self, size: Size, *args: Any, **kwargs: Any) -> float:
        """Return the bound for an input of this size and these options."""
        more = {"size": size} if "size" in inspect.signature(self.bound).parameters else {}
        return self.bound(*args, **kwargs, **more)

    def of_module(self, module: nn.Module, size: Size) -> float:
        """Return the bound of a module whose attributes are called as the options are."""
        names = inspect.signature(self.bound).parameters
        return self.of(size, **{n: getattr(module, n) for n in names if hasattr(module, n)})


NAMED: Final[dict[str, Function]] = {}


def _function(
    kinds: Mapping[str, type[nn.Module]], *, keeps_shape: bool = True, is_named: bool = True
) -> Callable[[FunctionT], FunctionT]:
    """Decorator: the bound of functions by their names, and of the modules that call them.

    Without ``is_named`` of modules only: a function of that name returns more than one tensor.
    """

    def register(bound: FunctionT) -> FunctionT:
        counts = "count" in inspect.signature(bound).parameters  # directions: "max_pool2d"
        for name, kind in kinds.items():
            own = functools.partial(bound, count=int(name[-2])) if counts else bound
            function = Function(own, keeps_shape)
            RULES[kind] = Rule(function.of_module, True, kind, keeps_shape)
            NAMED.update({name: function} if is_named else {})
        return bound

    return register


def _by_directions(name: str, kind: str) -> dict[str, type[nn.Module]]:
    return {name.format(n): getattr(nn, kind.format(n)) for n in (1, 2, 3)}


def steepest(*slopes: float) -> float:
    """Return the largest absolute slope, of pieces of 1 and these."""
    return max(1.0, *map(abs, slopes))


@_function({"leaky_relu": nn.LeakyReLU})
def _leaky(negative_slope: float = 0.01, inplace: bool = False) -> float:
    return steepest(negative_slope)


@_function({"elu": nn.ELU})
def _elu(alpha: float = 1.0, inplace: bool = False) -> float:
    return steepest(alpha)


@_function({"celu": nn.CELU})
def _celu(alpha: float = 1.0, inplace: bool = False) -> float:
    return 1.0 if alpha > 0 else math.inf


@_function({"prelu": nn.PReLU})
def _prelu(weight: Tensor) -> float:
    return steepest(float(weight.detach().abs().max()))


@_function({"gelu": nn.GELU})
def _gelu(approximate: str = "none") -> float:
    return 1.12905  # exact and by tanh


@_function({"softplus": nn.Softplus})
def _softplus(beta: float = 1.0, threshold: float = 20.0) -> float:
    """1, unless the jump to the identity is above rounding."""
    return 1.0 if threshold >= 20 else math.inf


@_function(_by_directions("dropout{}d", "Dropout{}d"))
@_function({"dropout": nn.Dropout, "alpha_dropout": nn.AlphaDropout})
@_function({"feature_alpha_dropout": nn.FeatureAlphaDropout})
def _dropout(p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
    _in_evaluation("dropout", training)
    return 1.0


# ---- pools ---------------------------------------------------------------------------------------


def each(value: Any, count: int) -> tuple[int, ...]:
    """Return one number for each direction."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * count


def _without_indices(return_indices: bool) -> None:
    if return_indices:
        raise ValueError(fail("return_indices", "be False", True))


@_function(_by_directions("max_pool{}d", "MaxPool{}d"), keeps_shape=False)
def _max_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    count: int,
) -> float:
    """Return the bound of a pooling by maxima: the root of how many windows hold one pixel."""
    _without_indices(return_indices)
    stride = kernel_size if stride is None or stride == [] else stride
    shape = each(kernel_size, count), each(stride, count), each(dilation, count)
    return math.sqrt(pool_counts(*shape))


@_function(_by_directions("avg_pool{}d", "AvgPool{}d"), keeps_shape=False)
def _average_pool(
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    count: int,
) -> float:
    """Return the bound of a pooling by means of n pixels: the root of the windows, over n."""
    stride = kernel_size if stride is None or stride == [] else stride
    sides = each(kernel_size, count)
    windows = pool_counts(sides, each(stride, count))
    pixels = math.prod(sides)
    if divisor_override is not None:
        return math.sqrt(windows * pixels) / abs(divisor_override)
    cut = ceil_mode or (any(each(padding, count)) and not count_include_pad)
    return math.sqrt(windows if cut else windows / pixels)  # windows at the edge divide by less


@_function(_by_directions("lp_pool{}d", "LPPool{}d"), keeps_shape=False)
def _power_pool(
    norm_type: float,
    kernel_size: Any,
    stride: Any = None,
    ceil_mode: bool = False,
    *,
    count: int,
) -> float:
    """Return the bound of a pooling by 2-norms; windows cut at the edge count as whole ones."""
    if norm_type != 2:
        raise ValueError(fail("norm_type", "be 2", norm_type))
    windows = _max_pool(kernel_size, stride, count=count)
    return windows * (math.sqrt(math.prod(each(kernel_size, count))) if ceil_mode else 1.0)


@_function(_by_directions("adaptive_avg_pool{}d", "AdaptiveAvgPool{}d"), keeps_shape=False)
def _adaptive_average(output_size: Any, *, size: Size = None, count: int) -> float:
    """Return the bound of means over windows that do not overlap."""
    sides, output = _sides(size, count), each(output_size, count)
    if sides is None and any(side != 1 for side in output):
        raise ValueError(fail("input_size", "be given", f"pooling to {output}", NEEDS_SIZE))
    if sides is None:
        return 1.0
    wanted = [n if side is None else side for side, n in zip(output, sides, strict=True)]
    if any(n % side for side, n in zip(wanted, sides, strict=True)):
        condition = f"divide the sides {tuple(sides)} of the image"
        raise ValueError(fail("output_size", condition, output, "windows overlap otherwise"))
    return math.sqrt(math.prod(wanted) / math.prod(sides))


@_function(
    _by_directions("adaptive_max_pool{}d", "AdaptiveMaxPool{}d"), keeps_shape=False, is_named=False
)
def _adaptive_max(
    output_size: Any, return_indices: bool = False, *, size: Size = None, count: int
) -> float:
    _without_indices(return_indices)
    _adaptive_average(output_size, size=size, count=count)  # its checks
    return 1.0


# ---- other packages ------------------------------------------------------------------------------


def _normalize(module: Any) -> float:
    """``torchvision.transforms.Normalize``, which refuses images of other channels."""
    return 1.0 / min(abs(float(deviation)) for deviation in module.std)


def _one(_: nn.Module) -> float:
    return 1.0


def _scaled(module: Any) -> float:
    return abs(float(module._coefficient_lip))


def _scaled_norms(module: Any) -> float:
    return _scaled(module) * _power_pool(
        2, module.kernel_size, module.stride, module.ceil_mode, count=2
    )


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
