"""From node to node of a model's graph: the factors of its bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from stiefel_opt.errors import fail, type_name
from stiefel_opt.nn.lipschitz.functions import apply_function
from stiefel_opt.nn.lipschitz.graphs import (
    ADD_A_RULE,
    Shape,
    Traced,
    Walk,
    check_in_place,
    check_weight,
    checked,
    fitting,
    fx_values,
    graph_of,
    is_leaf,
    label,
    module_bound,
    module_shape,
)
from stiefel_opt.nn.lipschitz.rules import Size


@torch.no_grad()
def walk_graph(model: nn.Module, size: Size) -> dict[str, float]:
    """Return the factors of the bound of a model, by name; they multiply to it."""
    if is_leaf(model):
        return {type(model).__name__: module_bound(model, type(model).__name__, size)}
    graph, constants = graph_of(model)
    walk, values = Walk(model), dict[fx.Node, Any]()
    users = {node: len(node.users) for node in graph.nodes}
    live: set[fx.Node] = set()
    *steps, output = graph.nodes
    for node in steps:
        if node.op == "placeholder":
            values[node] = _placeholder(model, node, values, size)
        elif node.op == "get_attr":
            values[node] = _attribute(model, node.target, constants)
        elif node.op == "call_module":
            values[node] = _call_module(node, values, walk)
        else:
            values[node] = apply_function(node, values, walk)
        for used in node.all_input_nodes:
            users[used] -= 1
            if not users[used]:
                live.discard(used)
        value = values[node]
        if isinstance(value, Traced) and users[node]:
            live.add(node)
            if live == {node} and node.op != "placeholder":  # all paths pass here
                _note(walk, node, value.bound)
                values[node] = replace(value, bound=1.0)
    return _end(walk, values, output)


def _note(walk: Walk, node: fx.Node, factor: float) -> None:
    name = label(node)
    while name in walk.factors:  # a module that is used twice
        name += "'"
    walk.factors[name] = checked(factor, name)


def _end(walk: Walk, values: dict[fx.Node, Any], node: fx.Node) -> dict[str, float]:
    result = node.args[0]
    value = values.get(result) if isinstance(result, fx.Node) else None
    if isinstance(value, Traced) and not value.has_pieces:
        if value.bound != 1.0:
            _note(walk, node, value.bound)
        return walk.factors
    if isinstance(value, Tensor):
        return {"output": 0.0}
    raise TypeError(fail("model", "return one tensor", str(result), ADD_A_RULE))


def _placeholder(model: nn.Module, node: fx.Node, values: dict[fx.Node, Any], size: Size) -> Any:
    is_first = not any(isinstance(value, Traced) for value in values.values())
    if node.args:
        return node.args[0]
    if not is_first or str(node.target).startswith("*"):
        remedy = f"give it one argument, or {ADD_A_RULE}"
        raise TypeError(fail("model", "take one tensor", f"{node.target!s}", remedy))
    example = None
    if size is not None:
        floating = (p for p in model.parameters() if p.is_floating_point())
        some = next(floating, torch.zeros(()))
        example = torch.zeros((2, *size), dtype=some.dtype, device=some.device)
    return Traced(1.0, Shape(object()), example)


def _attribute(model: nn.Module, target: Any, constants: dict[str, Any]) -> Any:
    if target in constants:
        return constants[target]
    owner, _, leaf = target.rpartition(".")
    value = getattr(model.get_submodule(owner), leaf)
    if isinstance(value, Tensor):
        check_weight(target, value)
    return value


def _call_module(node: fx.Node, values: dict[fx.Node, Any], walk: Walk) -> Any:
    name, module = str(node.target), walk.model.get_submodule(str(node.target))
    arguments = [values[given] for given in node.all_input_nodes]
    if not any(isinstance(given, Traced) for given in arguments):
        args, kwargs = fx_values(node, values)
        return module(*args, **kwargs)
    if len(arguments) != 1 or len(node.args) + len(node.kwargs) != 1 or arguments[0].has_pieces:
        given = f"{type_name(module)} called with several arguments"
        raise TypeError(fail(name, "take one tensor", given, ADD_A_RULE))
    (entering,) = arguments
    if getattr(module, "inplace", False):
        check_in_place(node, node.all_input_nodes[0], walk)
    size = None if entering.example is None else tuple(entering.example.shape[1:])
    bound, example = module_bound(module, name, size), None
    if entering.example is not None:
        with fitting(name):
            example = module(entering.example)
        if not isinstance(example, Tensor):
            given = type(example).__name__
            raise TypeError(fail(name, "return one tensor", given, ADD_A_RULE))
    return Traced(entering.bound * bound, module_shape(module, entering.shape, walk), example)
