"""The momentum of a parameter as a user reads and sets it, in whatever form a rule keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stiefel_opt._checks import fail
from stiefel_opt.distributed import is_sharded, whole
from stiefel_opt.functional.flows import Tensors
from stiefel_opt.linalg import skew as skew_part
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.blocks import Weight
from stiefel_opt.optim.checks import reading
from stiefel_opt.optim.state import (
    State,
    StateDict,
    complete_state,
    key_of,
    point_of,
)
from stiefel_opt.optim.torch_rules import Group

Read = Callable[[Tensor, Tensors], tuple[Tensor | None, Tensor | None]]
Write = Callable[[Tensor, Tensor, Tensor], Tensors]


class Range(NamedTuple):
    """A constrained range of a parameter, its rows gathered."""

    number: int
    reading: Stiefel
    point: Tensor  # X, (..., n, m)
    state: Tensors  # by name; tall state is read as X is


@torch.no_grad()
def velocity_of(
    parameter: Tensor,
    manifold: Stiefel,
    state: StateDict,
    known: Mapping[str, State],
    read: Read,
) -> tuple[Any, Any]:
    """Return (Z, U), or a tuple of each for several ranges; see ``StiefelOptimizer.velocity``."""
    skews, normals = [], []
    for _, _, point, own_state in _ranges(parameter, manifold, state, known):
        Z, U = read(point, own_state)
        none = torch.zeros_like(point)
        skews.append(none[..., : point.size(-1), :].clone() if Z is None else Z.clone())
        normals.append(none if U is None else U.clone())
    return (skews[0], normals[0]) if len(skews) == 1 else (tuple(skews), tuple(normals))


@torch.no_grad()
def set_velocity_(
    parameter: Tensor,
    manifold: Stiefel,
    called: Callable[[], str],
    states: Mapping[Tensor, StateDict],
    declared: tuple[State, ...],
    known: Mapping[str, State],
    write: Write,
    skew: Any,
    normal: Any,
) -> None:
    """Set (Z, U), after all of it is checked; see ``StiefelOptimizer.set_velocity``."""
    if is_sharded(parameter):
        raise TypeError(fail("parameter", "not be sharded to set its velocity", "a DTensor"))
    values = [(skew, normal)]
    if isinstance(skew, tuple) and isinstance(normal, tuple):
        values = list(zip(skew, normal, strict=False))
    state = complete_state(states[parameter], declared, parameter, manifold, called, known)
    ranges = _ranges(parameter, manifold, state, known)
    if len(values) != len(ranges):
        wanted = f"be tuples of {len(ranges)} tensors each"
        raise ValueError(fail("skew and normal", wanted, f"{len(values)}"))
    for (_, _, point, _), (new_skew, new_normal) in zip(ranges, values, strict=True):
        small = torch.Size((*point.shape[:-2], point.size(-1), point.size(-1)))
        _check("skew", new_skew, small)
        if point.size(-2) != point.size(-1):  # square matrices have no normal part
            _check("normal", new_normal, point.shape)
    for (number, own, point, own_state), (new_skew, new_normal) in zip(ranges, values, strict=True):
        is_square = point.size(-2) == point.size(-1)
        U = torch.zeros_like(point) if is_square else new_normal
        U = U - point @ (point.mH @ U)
        written = write(point, skew_part(new_skew), U)
        for kind in declared:
            if kind.name in own_state and kind.name in written:
                target, value = state[key_of(kind.name, number)], written[kind.name]
                target.copy_(value if kind.is_small else own.stored(value, target.shape))


@torch.no_grad()
def keep_velocity(
    weight: Weight,
    declared: tuple[State, ...],
    known: Mapping[str, State],
    names: tuple[str, ...],
    read: Read,
    write: Write,
) -> None:
    """Turn momentum of these ``names``, left by other options, into that of these options."""
    state, wanted = weight.state, {kind.name for kind in declared}
    if weight.shards is not None or not wanted:
        return
    if {key.partition(".")[0] for key in state}.intersection(names) <= wanted:
        return
    shapes = [part.shape for part in weight.manifold.parts(weight.parameter)]
    for number, own, point, own_state in _ranges(weight.parameter, weight.manifold, state, known):
        Z, U = read(point, own_state)
        if Z is None or U is None:
            continue
        written = write(point, Z, U)
        for kind in declared:
            if kind.name in written:
                value = written[kind.name]
                value = value if kind.is_small else own.stored(value, shapes[number])
                state[key_of(kind.name, number)] = value.contiguous()


def group_of(parameter: Tensor, groups: list[Group]) -> tuple[Group, Stiefel]:
    """Return the group of a constrained parameter, and its reading."""
    for group in groups:
        manifold = reading(parameter, group)
        if manifold is not None and any(parameter is other for other in group["params"]):
            return group, manifold
    raise ValueError(fail("parameter", "be constrained in this optimizer", "one that is not"))


def _ranges(
    parameter: Tensor, manifold: Stiefel, state: StateDict, known: Mapping[str, State]
) -> list[Range]:
    """Return the constrained ranges of a parameter with their state, in whatever form it is."""
    gathered = {key: whole(t) for key, t in state.items() if isinstance(t, Tensor)}
    value, ranges = point_of(whole(parameter.detach()), gathered), []
    for index, (part, own) in enumerate(manifold.blocks(value)):
        read: Tensors = {}
        for key, tensor in gathered.items():
            kind = known.get(key.partition(".")[0])
            if kind is not None and key == key_of(kind.name, index):
                read[kind.name] = tensor if kind.is_small else own.matrices(tensor)
        ranges.append(Range(index, own, own.matrices(part) / own.scale, read))
    return ranges


def _check(name: str, value: Any, shape: torch.Size) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(fail(name, f"be a tensor of shape {tuple(shape)}", type(value).__name__))
    if value.shape != shape:
        raise ValueError(fail(name, f"have shape {tuple(shape)}", f"shape {tuple(value.shape)}"))
    if not bool(value.isfinite().all()):
        raise ValueError(fail(name, "be finite", f"NaN or inf in shape {tuple(shape)}"))
