"""What is proven of the functions that a forward pass calls: nodes of a graph, by name.

A function without a handler is refused. A handler has the parameters of its function: other
arguments are refused, too.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import math
import operator
from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn import functional
from typing_extensions import override

from stiefel_opt.errors import fail
from stiefel_opt.nn.lipschitz.graphs import (
    ADD_A_RULE,
    Opaque,
    Shape,
    Traced,
    Walk,
    check_in_place,
    fitting,
    fx_values,
    label,
    named,
)
from stiefel_opt.nn.lipschitz.norms import NEEDS_SIZE, convolution_norm, exact, spectral_norm
from stiefel_opt.nn.lipschitz.rules import (
    NAMED,
    SLOPES,
    Function,
    each,
)


class Step(NamedTuple):
    """A node that is being bounded."""

    node: fx.Node
    walk: Walk
    name: str

    def refused(self, condition: str, given: object, remedy: str = ADD_A_RULE) -> TypeError:
        """Return the error that names the node."""
        return TypeError(fail(label(self.node), condition, given, remedy))

    def needs_size(self, given: str) -> ValueError:
        """Return the error for what cannot be known without the shape of the input."""
        condition = "not change shape by broadcasting, as far as is known"
        return ValueError(fail(label(self.node), condition, given, NEEDS_SIZE))


Handler = Callable[..., Traced]
HANDLERS: Final[dict[str, Handler]] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# ---- of one tensor -------------------------------------------------------------------------------


def _times(x: Traced, factor: float, shape: Shape | None = None) -> Traced:
    return replace(x, bound=x.bound * factor, shape=x.shape if shape is None else shape)


@_handles(*SLOPES, "sin", "cos")
def _elementwise(step: Step, x: Traced, *, inplace: bool = False) -> Traced:
    return _times(x, SLOPES.get(step.name, 1.0))


@_handles("hardtanh", "softshrink")
def _clipped(step: Step, x: Traced, *numbers: float, **more: float) -> Traced:
    return x


@_handles("clamp", "clip", "clamp_min", "clamp_max")
def _clamp(step: Step, x: Traced, *bounds: float | None, **more: float | None) -> Traced:
    if any(isinstance(bound, Tensor) for bound in (*bounds, *more.values())):
        raise step.refused("be between numbers", "tensors")
    return x


@_handles("softmax")
def _softmax(_: Step, x: Traced, dim: int, **more: None) -> Traced:
    return _times(x, 0.5)


@_handles("contiguous", "clone", "detach", "float", "double")
def _same(_: Step, x: Traced) -> Traced:
    return x


def _handler_of(function: Function) -> Handler:
    """Return the handler of a function whose bound depends on its options only."""

    def handler(step: Step, x: Traced, *args: Any, **kwargs: Any) -> Traced:
        size = None if x.example is None else tuple(x.example.shape[1:])
        with named(label(step.node)):
            factor = function.of(size, *args, **kwargs)
        return _times(x, factor, None if function.keeps_shape else Shape(object()))

    of_all = (inspect.signature(each).parameters.values() for each in (_same, function.bound))
    handler.__signature__ = inspect.Signature([*itertools.chain(*of_all)])  # type: ignore[attr-defined]
    return handler


HANDLERS.update({name: _handler_of(function) for name, function in NAMED.items()})


@_handles("flatten", "view", "reshape", "permute", "transpose", "t", "squeeze", "unsqueeze")
@_handles("movedim", "moveaxis", "swapaxes", "swapdims", "ravel", "unflatten", "roll", "flip")
@_handles("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "narrow", "select")
def _moved(step: Step, x: Traced, *places: Any, **more: Any) -> Traced:
    """Entries are moved, or some of them left out."""
    if any(isinstance(place, (Tensor, torch.dtype)) for place in (*places, *more.values())):
        raise step.refused("move entries by numbers", "a tensor or dtype")
    return _times(x, 1.0, Shape(object()))


@_handles("chunk", "split", "tensor_split", "unbind")
def _pieces(step: Step, x: Traced, *places: Any, **more: Any) -> Traced:
    return replace(_moved(step, x, *places, **more), has_pieces=True)


@_handles("getitem")
def _item(step: Step, x: Traced, index: Any) -> Traced:
    """A slice: no entry twice."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or isinstance(part, (int, slice, type(...), Opaque)) for part in parts):
        raise step.refused("be taken by integers and slices", "a list or a tensor")
    return replace(x, shape=Shape(object()), has_pieces=False)


@_handles("pad")
def _pad(step: Step, x: Traced, pad: Any, mode: str = "constant", value: Any = None) -> Traced:
    if mode != "constant":
        raise step.refused("pad with a constant", repr(mode))
    return _times(x, 1.0, Shape(object()))


# ---- reductions ----------------------------------------------------------------------------------


def _count(x: Traced, dim: Any) -> int | None:
    """Return over how many entries of one input a reduction runs, if that is known."""
    if x.example is None or dim is None:
        return None
    places = [place % x.example.ndim for place in each(dim, 1)]
    return None if 0 in places else math.prod(x.example.shape[place] for place in places)


@_handles("mean")
def _mean(_: Step, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
    return _times(x, (_count(x, dim) or 1) ** -0.5, Shape(object()))


@_handles("sum")
def _sum(step: Step, x: Traced, dim: Any = None, keepdim: bool = False) -> Traced:
    count = _count(x, dim)
    if count is None:
        given = f"a sum over dimension {dim}"
        remedy = f"{NEEDS_SIZE}; a sum over the batch has no bound"
        raise ValueError(fail(label(step.node), "be over a known number of entries", given, remedy))
    return _times(x, math.sqrt(count), Shape(object()))


@_handles("amax", "amin")
def _extreme(_: Step, x: Traced, dim: Any = (), keepdim: bool = False) -> Traced:
    return _times(x, 1.0, Shape(object()))


@_handles("vector_norm", "norm")
def _norm(step: Step, x: Traced, *order: Any, **more: Any) -> Traced:
    found = order[0] if order else more.get("ord", more.get("p"))
    if found not in (None, 2, "fro"):
        raise step.refused("be a 2-norm", repr(found))
    return _times(x, 1.0, Shape(object()))


# ---- sums, products, concatenations --------------------------------------------------------------


def _stretch(step: Step, x: Traced, other: Any) -> float:
    """Return by how much broadcasting beside ``other`` enlarges the norm of a tensor."""
    if isinstance(other, Opaque) or x.has_pieces or getattr(other, "has_pieces", False):
        raise step.refused("be of tensors and constants", "a number that is not known here")
    if not isinstance(other, (Tensor, Traced)):
        return 1.0
    if x.example is not None:
        return _known_stretch(step, x.example, other)
    if isinstance(other, Traced):
        if other.shape != x.shape:
            raise step.needs_size("two tensors whose shapes may differ")
        return 1.0
    for place, size in enumerate(reversed(other.shape), 1):
        if size > 1 and other.numel() > 1 and step.walk.known_size(x.shape, place) != size:
            raise step.needs_size(f"a constant of shape {tuple(other.shape)}")
    return 1.0


def _known_stretch(step: Step, example: Tensor, other: Tensor | Traced) -> float:
    shape = (other.example if isinstance(other, Traced) else other).shape
    result = torch.Size(np.broadcast_shapes(example.shape, shape))
    is_kept = len(result) == example.ndim and (not result or result[0] == example.size(0))
    if isinstance(other, Traced):
        is_kept = is_kept and len(shape) == len(result) and shape[:1] == result[:1]
    if not is_kept:
        given = f"shapes {tuple(example.shape)} and {tuple(shape)} for a batch of 2"
        raise step.refused("keep the dimension of the batch", given)
    return math.sqrt(math.prod(result) / example.numel()) if example.numel() else 1.0


@_handles("add", "sub")
def _sum_of(step: Step, first: Any, second: Any, *, alpha: float = 1.0) -> Traced:
    bounds, some = [], first if isinstance(first, Traced) else second
    if not isinstance(some, Traced) or not isinstance(alpha, (int, float)):
        raise step.refused("be of tensors and constants", "a number that is not known here")
    for x, other, factor in ((first, second, 1.0), (second, first, abs(alpha))):
        stretch = _stretch(step, x, other) if isinstance(x, Traced) else 0.0
        if isinstance(x, Traced):
            bounds.append(x.bound * stretch * factor)
    return replace(some, bound=sum(bounds))


@_handles("mul", "truediv", "div", "divide", "multiply", "true_divide")
def _product(step: Step, first: Any, second: Any, **more: None) -> Traced:
    divides = "div" in step.name
    both = isinstance(first, Traced) and isinstance(second, Traced)
    if both or (divides and isinstance(second, Traced)) or any(more.values()):
        given = "two tensors that depend on the input" if both else "a divisor that does"
        raise step.refused("be a product with a constant", given)
    x, factor = (first, second) if isinstance(first, Traced) else (second, first)
    if not isinstance(factor, (Real, Tensor, Opaque)):
        raise step.refused("be a product with a number or a tensor", type(factor).__name__)
    stretch = _stretch(step, x, factor)
    sizes = (
        exact(factor).abs()
        if isinstance(factor, Tensor)
        else torch.tensor(abs(cast(float, factor)), dtype=torch.float64)
    )
    gain = 1.0 / float(sizes.min()) if divides and float(sizes.min()) else float(sizes.max())
    return _times(x, (math.inf if divides and not float(sizes.min()) else gain) * stretch)


@_handles("maximum", "minimum", "max", "min")
def _extreme_of(step: Step, first: Any, second: Any) -> Traced:
    """Each entry moves at most as the farther of the two: no more than both together."""
    if isinstance(second, int) and not step.name.endswith("imum"):
        raise step.refused("be of two tensors", "one tensor and a dimension", "call amax or amin")
    whole = _sum_of(step, first, second)
    pair = [
        x.bound * _stretch(step, x, other)
        for x, other in ((first, second), (second, first))
        if isinstance(x, Traced)
    ]
    return replace(whole, bound=math.hypot(*pair))


@_handles("cat", "concat", "concatenate", "stack", "hstack", "vstack")
def _concatenation(step: Step, tensors: Any, dim: int = 0) -> Traced:
    parts = tensors if isinstance(tensors, (tuple, list)) else ()
    traced = [part for part in parts if isinstance(part, Traced)]
    if not traced or any(part.has_pieces for part in traced):
        raise step.refused("be of a list of tensors", type(tensors).__name__)
    return Traced(math.hypot(*(part.bound for part in traced)), Shape(object()))


# ---- with weights --------------------------------------------------------------------------------


def _constant(step: Step, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise step.refused("have a constant weight", "one that depends on the input")
    return value


@_handles("linear")
def _linear(step: Step, x: Traced, weight: Tensor, bias: Tensor | None = None) -> Traced:
    weight = _constant(step, weight)
    if not isinstance(x, Traced) or isinstance(bias, Traced) or weight.ndim != 2:
        raise step.refused("have a constant weight, a matrix", "something else")
    shape = step.walk.with_size(x.shape, 1, weight.size(1), weight.size(0))
    return _times(x, spectral_norm(weight), shape)


@_handles("matmul", "mm", "mv")
def _matrix(step: Step, first: Any, second: Any) -> Traced:
    x, matrix = (first, second) if isinstance(first, Traced) else (second, first)
    matrix = _constant(step, matrix)
    if matrix.ndim > 2:
        raise step.refused("be a product with one matrix", f"shape {tuple(matrix.shape)}")
    return _times(x, spectral_norm(matrix if matrix.ndim == 2 else matrix[None]), Shape(object()))


@_handles("conv1d", "conv2d", "conv3d")
def _convolution(
    step: Step,
    x: Traced,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Traced:
    weight = _constant(step, weight)
    if not isinstance(x, Traced) or isinstance(bias, Traced):
        raise step.refused("have a constant weight", "something else")
    sides = weight.shape[2:]
    count = len(sides)
    strides, dilations = each(stride, count), each(dilation, count)
    reach = [d * (k - 1) for d, k in zip(dilations, sides, strict=True)]
    if padding == "same":
        pads = [(r // 2, r - r // 2) for r in reach]
    else:
        pads = [(p, p) for p in each(0 if padding == "valid" else padding, count)]
    bound = convolution_norm(
        weight,
        stride=strides,
        pads=pads,
        dilation=dilations,
        groups=groups,
        mode="zeros",
        size=None if x.example is None else x.example.shape[-count:],
    )
    shape = Shape(object())
    if [sum(pad) for pad in pads] == reach and set(strides) == {1}:
        shape = step.walk.with_size(x.shape, count + 1, weight.size(1) * groups, weight.size(0))
    return _times(x, bound, shape)


# ---- one node ------------------------------------------------------------------------------------

_OPERATORS: Final = ("add", "sub", "mul", "truediv", "floordiv", "matmul", "neg", "abs", "getitem")
_IN_PLACE: Final = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "truediv"}
_SPACES: Final = (torch.special, torch.linalg, torch._C._nn, functional, torch)
_OF_SHAPES: Final = ("ndim", "device", "dtype")
_VIEWS: Final = ("mT", "T", "H", "mH")
_ON_NUMBERS: Final = {"getitem", "add", "sub", "mul", "floordiv", "truediv", "neg"}
_EITHER: Final = {  # those whose first argument may be a constant
    *("add", "sub", "mul", "multiply", "truediv", "div", "divide", "true_divide", "matmul"),
    *("mm", "mv", "maximum", "minimum", "max", "min"),
}
FUNCTIONS: Final[dict[Any, str]] = {
    getattr(space, name): name for space in _SPACES for name in HANDLERS if hasattr(space, name)
} | {getattr(operator, name): name for name in (*_OPERATORS, *_IN_PLACE)}


def apply_function(node: fx.Node, values: dict[fx.Node, Any], walk: Walk) -> Any:
    """Return the bound of a node that calls a function or a method; a constant as it is."""
    args, kwargs = fx_values(node, values)
    if node.target is builtins.getattr:
        return _attribute(node, args, walk)
    name = node.target if node.op == "call_method" else FUNCTIONS.get(node.target)
    step = Step(node, walk, str(name or getattr(node.target, "__name__", node.target)))
    flat = _flat((args, kwargs))
    if not any(isinstance(value, Traced) for value in flat):
        return _constant_value(step, args, kwargs)
    if name == "size":
        shape = _shape_of(args[0])
        return shape[args[1]] if len(args) > 1 else shape
    if name in ("dim", "numel"):
        return Opaque(None if args[0].example is None else _called(node, _example(args), {}))
    step = _without_place(step, kwargs)
    handler = HANDLERS.get(step.name)
    if handler is None:
        wanted = "call a function with a known Lipschitz constant"
        raise step.refused(wanted, step.name, f"put it into a module, and {ADD_A_RULE}")
    try:
        inspect.signature(handler).bind(step, *args, **kwargs)
    except TypeError as error:
        raise step.refused("be called as usual", f"{step.name}: {error}") from None
    if not (args and isinstance(args[0], (Traced, list, tuple))) and step.name not in _EITHER:
        raise step.refused("act on the input", f"{step.name} of a constant")
    found = handler(step, *args, **kwargs)
    is_known = all(_has_example(value) for value in flat)
    with fitting(label(node)):
        example = _called(node, _example(args), _example(kwargs)) if is_known else None
    return replace(found, example=example)


def _constant_value(step: Step, args: Any, kwargs: Any) -> Any:
    """Return the value of a node that depends on parameters, or on the shape of the input."""
    changes = step.name.endswith("_") or step.name in _IN_PLACE or kwargs.get("inplace")
    if changes or "out" in kwargs:
        raise step.refused("change nothing in place", "a weight")
    if step.name == "getitem" and isinstance(args[0], tuple):
        return args[0][args[1]]
    flat = _flat((args, kwargs))
    if not any(isinstance(value, Opaque) for value in flat):
        return _called(step.node, args, kwargs)
    if step.name not in _ON_NUMBERS or any(isinstance(value, Tensor) for value in flat):
        raise step.refused("be of tensors", "numbers that depend on shapes")
    is_known = all(_has_example(value) for value in flat)
    return Opaque(_called(step.node, _example(args), _example(kwargs)) if is_known else None)


def _without_place(step: Step, kwargs: dict[str, Any]) -> Step:
    """Return a step that makes a new tensor in place of one in place, if nobody sees that."""
    name = _IN_PLACE.get(step.name, step.name)
    if step.node.op == "call_method" and name.endswith("_"):
        name = name[:-1]
    if name == step.name and not kwargs.get("inplace"):
        return step
    check_in_place(step.node, step.node.all_input_nodes[0], step.walk)
    return step._replace(name=name)


def _attribute(node: fx.Node, args: Any, walk: Walk) -> Any:
    value, name = args
    if isinstance(value, Traced) and name == "shape":
        return _shape_of(value)
    if isinstance(value, Traced) and name in _VIEWS:
        example = None if value.example is None else getattr(value.example, name)
        return replace(value, shape=Shape(object()), example=example)
    if isinstance(value, (Traced, Opaque)) and name in _OF_SHAPES:
        return Opaque() if value.example is None else getattr(value.example, name)
    if isinstance(value, (Traced, Opaque)):
        step = Step(node, walk, name)
        raise step.refused("have a known Lipschitz constant", f"attribute {name}")
    return getattr(value, name)


class _Unknown(tuple[Any, ...]):
    """An unknown shape."""

    @override
    def __getitem__(self, index: Any) -> Any:
        return Opaque()


def _shape_of(x: Traced) -> tuple[Any, ...]:
    """Return the shape as numbers, but for the size of the batch, which is any."""
    if x.example is None:
        return _Unknown()
    batch, *rest = x.example.shape
    return (Opaque(batch), *rest)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, slice):
        return _flat([value.start, value.stop, value.step])
    if isinstance(value, dict):
        return _flat(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [item for part in value for item in _flat(part)]
    return [value]


def _has_example(value: Any) -> bool:
    return not isinstance(value, (Traced, Opaque)) or value.example is not None


def _example(value: Any) -> Any:
    """Return nested arguments with the example of each node, in memory of its own."""
    if isinstance(value, (Traced, Opaque)):
        example = value.example
        return example.clone() if isinstance(example, Tensor) else example
    if isinstance(value, slice):
        return slice(*map(_example, (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: _example(item) for key, item in value.items()}
    return type(value)(map(_example, value)) if type(value) in (list, tuple) else value


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]
