"""A model as a graph of modules and functions, and the bound of each of its nodes.

Bounds are relative to the last node through which everything passes: from one to the next they
multiply.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from typing_extensions import override

from stiefel_opt.errors import fail, type_name
from stiefel_opt.nn import IsometricConv2d, ShiftConv2d
from stiefel_opt.nn.lipschitz.rules import Size, is_plain, rule_for

ADD_A_RULE: Final = "write a rule with @so.lipschitz_rule(Type), or a method lipschitz_bound(self)"
_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_WRAPPERS: Final = {  # around a model whose own forward pass is unchanged
    "torch.OptimizedModule": "_orig_mod",
    "torch.AveragedModel": "module",
    "torch.DataParallel": "module",
    "torch.DistributedDataParallel": "module",
}
# Those whose output is a tensor of its own, which a step in place may overwrite.
_FRESH: Final = (nn.Linear, *_CONVOLUTIONS, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Shape:
    """An unknown shape, but for sizes of some dimensions: equal ones are equal shapes."""

    origin: object
    changed: frozenset[tuple[int, int]] = frozenset()  # (dimension from the end, size)


@dataclass(frozen=True)
class Traced:
    """A node that depends on the input: its bound, its shape, and an example of it if given."""

    bound: float
    shape: Shape
    example: Any = None
    has_pieces: bool = False  # a tuple of disjoint parts


@dataclass(frozen=True)
class Opaque:
    """A number that depends on the shape of the input only, or on the size of the batch."""

    example: Any = None


@dataclass
class Walk:
    """A pass over the graph; what it knows of shapes, and what it has found."""

    model: nn.Module
    factors: dict[str, float] = field(default_factory=dict)
    sizes: dict[tuple[object, int], int] = field(default_factory=dict)

    def known_size(self, shape: Shape, place: int) -> int | None:
        """Return the size of a dimension, counted from the end, if known."""
        return dict(shape.changed).get(place, self.sizes.get((shape.origin, place)))

    def with_size(self, shape: Shape, place: int, before: int, after: int) -> Shape:
        """Return the shape after a layer that accepts only ``before`` in one dimension."""
        changed = dict(shape.changed)
        if place not in changed:
            self.sizes[shape.origin, place] = before
        changed[place] = after
        if self.sizes.get((shape.origin, place)) == after:
            del changed[place]
        return replace(shape, changed=frozenset(changed.items()))


# ---- tracing -------------------------------------------------------------------------------------


def _in_place(name: str) -> Any:
    function = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


class _Steps:
    """``x += y`` as itself, which fx reads as ``x = x + y``."""

    __iadd__, __isub__ = _in_place("iadd"), _in_place("isub")
    __imul__, __itruediv__ = _in_place("imul"), _in_place("itruediv")


class _Attribute(_Steps, fx.proxy.Attribute):
    pass


class _Proxy(_Steps, fx.Proxy):
    @override
    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)


class _Tracer(fx.Tracer):
    """Stops at modules with a rule, and at those of torch."""

    @override
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_leaf(m)

    @override
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def is_leaf(module: nn.Module) -> bool:
    """Say whether a module is bounded as a whole, not by what its forward pass calls."""
    is_torchs = type(module).__module__.startswith("torch.nn") and type(module) is not nn.Sequential
    if is_torchs and parametrize.is_parametrized(module):
        is_torchs = parametrize.type_before_parametrizations(module) is not nn.Sequential
    return is_torchs or rule_for(module) is not None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``torch.compile``, an average or a wrapper for several devices."""
    while (name := _WRAPPERS.get(type_name(model))) is not None:
        _check_hooks(model, "model")
        model = getattr(model, name)
    return model


def check_modules(model: nn.Module) -> None:
    """Refuse what changes a forward pass from outside: hooks, methods of a single instance.

    And weights that have no shape yet.
    """
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            remedy = "run one batch through the lazy module first"
            raise ValueError(fail(name, "have a shape", "an uninitialized parameter", remedy))
    if any(getattr(nn.modules.module, f"_global{hooks}") for hooks in _HOOKS):
        raise TypeError(fail("model", "have no hooks of all modules", "some", "remove them"))
    for path, module in model.named_modules():
        name = path or "model"
        _check_hooks(module, name)
        has_buffers = any(True for child in module.children() for _ in child.buffers())
        if isinstance(module, parametrize.ParametrizationList) and module.training and has_buffers:
            wanted, given = "stay as it is", "a weight that each forward pass may move"
            raise ValueError(fail(name, wanted, given, "call model.eval()"))
        kind, is_whole = type(module), is_leaf(module)
        own = [key for key in vars(module) if callable(getattr(kind, key, None))]
        own = [key for key in own if key == "forward" or is_whole]
        if own:
            given = f"{own[0]} of this {type_name(module)}"
            raise TypeError(fail(name, "have the methods of its class", given, "undo that"))


def _check_hooks(module: nn.Module, name: str) -> None:
    if any(getattr(module, hooks) for hooks in _HOOKS):
        remedy = "remove them (of weight_norm and spectral_norm: take parametrizations)"
        raise TypeError(fail(name, "have no forward hooks", type_name(module), remedy))


@torch.no_grad()
def graph_of(model: nn.Module) -> tuple[fx.Graph, dict[str, Any]]:
    """Return the graph of a model and the tensors in it that are no parameters of the model."""
    before = set(vars(model))
    tracer = _Tracer()
    try:
        graph = tracer.trace(model)
        added = {name: vars(model)[name] for name in set(vars(model)) - before}
    except Exception as error:
        given = f"a forward pass of {type_name(model)} that cannot be traced ({error})"
        remedy = f"take branches out of it, or {ADD_A_RULE}"
        raise TypeError(fail("model", "be a graph of modules", given, remedy)) from error
    finally:
        for name in set(vars(model)) - before:
            delattr(model, name)
    return graph, added


# ---- modules -------------------------------------------------------------------------------------


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say whose error it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"`{name}`: {error}") from error


@contextmanager
def fitting(name: str) -> Iterator[None]:
    """Say that a node does not take what comes of ``input_size``."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        wanted, given = "be the shape of one input, without the batch", f"one that {name} refuses"
        raise ValueError(fail("input_size", wanted, f"{given} ({error})")) from error


@torch.no_grad()
def module_bound(module: nn.Module, name: str, size: Size) -> float:
    """Return the proven bound of a module, or raise with its name."""
    rule = rule_for(module)
    if rule is None:
        given = type_name(module)
        raise TypeError(fail(name, "have a known Lipschitz constant", given, ADD_A_RULE))
    for leaf, value in [*module.named_parameters(), *module.named_buffers()]:
        check_weight(f"{name}.{leaf}", value)
    with named(name):
        found = rule.bound(module, size) if rule.asks_size else rule.bound(module)
    return checked(found, name)


def checked(bound: Any, name: str) -> float:
    """Return a finite bound as a float."""
    if not isinstance(bound, (Real, Tensor)) or (isinstance(bound, Tensor) and bound.numel() != 1):
        given = tuple(bound.shape) if isinstance(bound, Tensor) else type(bound).__name__
        raise TypeError(fail(name, "have a rule that returns one number", given))
    number = float(bound)
    if not 0.0 <= number < math.inf:
        wanted = "have a finite Lipschitz constant"
        raise ValueError(fail(name, wanted, number, "look at its weights and options"))
    return number


def check_weight(name: str, value: Tensor) -> None:
    if not is_plain(value):
        given, remedy = f"{type_name(value)} of {value.dtype}", "convert it to floating point"
        raise TypeError(fail(name, "be a plain tensor of numbers", given, remedy))
    if value.is_meta:
        raise ValueError(fail(name, "have values", "the meta device", "load them first"))
    if not bool(torch.isfinite(value).all()):
        remedy = "it holds nan or inf: go back to a checkpoint"
        raise ValueError(fail(name, "be finite", f"shape {tuple(value.shape)}", remedy))


def module_shape(module: Any, shape: Shape, walk: Walk) -> Shape:
    """Return the shape of a module's output, as far as it is known."""
    rule = rule_for(module)
    kind = None if rule is None else rule.kind
    if rule is not None and rule.keeps_shape:
        return shape
    if kind is nn.Linear:
        return walk.with_size(shape, 1, module.in_features, module.out_features)
    if kind in _CONVOLUTIONS:
        twice = module._reversed_padding_repeated_twice
        sums = [low + high for low, high in zip(twice[::2], twice[1::2], strict=True)][::-1]
        reach = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        if sums == reach and set(module.stride) == {1}:
            channels = module.in_channels, module.out_channels
            return walk.with_size(shape, len(reach) + 1, *channels)
    if kind is ShiftConv2d:
        return walk.with_size(shape, 3, module.conv.in_channels, module.conv.out_channels)
    if kind is IsometricConv2d and module.stride == 1:
        return walk.with_size(shape, 3, module.in_channels, module.out_channels)
    return Shape(object())


# ---- nodes --------------------------------------------------------------------------------------


def check_in_place(node: fx.Node, changed: fx.Node, walk: Walk) -> None:
    """Refuse a step in place on what, or on a view of what, anything else uses."""
    pending = [changed]
    while pending:
        each = pending.pop()
        if len(each.users) > 1 or each.op == "get_attr":
            wanted = "not change in place what others use"
            raise TypeError(fail(label(node), wanted, each.name, "write it without in place"))
        if is_fresh(each, walk):
            continue
        first = each.args[0] if each.args else None  # of which functions may return a view
        is_function = each.op != "call_module"
        pending += [first] if is_function and isinstance(first, fx.Node) else each.all_input_nodes


def is_fresh(node: fx.Node, walk: Walk) -> bool:
    """Say whether a node makes a tensor of its own."""
    if node.op != "call_module":
        return node.op == "call_function" and getattr(node.target, "__name__", "") in FRESH
    rule = rule_for(walk.model.get_submodule(str(node.target)))
    return rule is not None and rule.kind in _FRESH


FRESH: Final = frozenset(
    {"add", "sub", "mul", "truediv", "div", "cat", "matmul", "linear", "conv1d", "conv2d"}
)


def label(node: fx.Node) -> str:
    """Return the dotted name of a module that is called, or of a node with its module."""
    if node.op == "call_module":
        return str(node.target)
    path = ["", *node.meta.get("nn_module_stack", {})][-1]
    return f"{path}.{node.name}" if path else node.name


def fx_values(node: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, Any]:
    """Return the arguments of a node with the values of the nodes before it."""
    found: tuple[Any, Any] = _mapped((tuple(node.args), dict(node.kwargs)), values)
    return found


def _mapped(value: Any, values: dict[fx.Node, Any]) -> Any:
    """Return nested arguments with nodes replaced; fx's own map changes lists to its own type."""
    if isinstance(value, fx.Node):
        return values[value]
    if isinstance(value, slice):
        return slice(*(_mapped(each, values) for each in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {key: _mapped(item, values) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_mapped(item, values) for item in value)
    return [_mapped(item, values) for item in value] if isinstance(value, list) else value
