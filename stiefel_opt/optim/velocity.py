"""The momentum of a parameter as a user reads and sets it, in whatever form a rule keeps it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt._checks import fail
from stiefel_opt.distributed import is_sharded, whole
from stiefel_opt.functional.stiefel_sgd import velocity_in
from stiefel_opt.optim.checks import name_of, reading
from stiefel_opt.optim.state import complete_state, point_of, suffix_of

if TYPE_CHECKING:
    from stiefel_opt.optim.base import StiefelOptimizer

_TALL: Final = ("momentum_normal", "momentum_ambient", "deferred_base")


class Range(NamedTuple):
    """A constrained range of a parameter, its rows gathered.

    Attributes:
        suffix: Of the names of its state.
        point: X, ``(..., n, m)``.
        state: All state of the parameter; what is as tall as X is read as X is.
    """

    suffix: str
    point: Tensor
    state: dict[str, Tensor]


@torch.no_grad()
def ranges_of(optimizer: StiefelOptimizer, parameter: Tensor, *, make: bool = False) -> list[Range]:
    """Return the constrained ranges of a parameter; ``make``: with state that it lacks so far."""
    for group in optimizer.param_groups:
        manifold = reading(parameter, group)
        if manifold is not None and any(parameter is other for other in group["params"]):
            break
    else:
        raise ValueError(fail("parameter", "be constrained in this optimizer", "one that is not"))
    state = optimizer.state.get(parameter, {})
    if make:
        names = optimizer._state_names(group)
        called = partial(name_of, parameter, optimizer.param_groups)
        state = complete_state(optimizer.state[parameter], names, parameter, manifold, called)
    state = {n: whole(t) for n, t in state.items() if isinstance(t, Tensor)}
    found = []
    value = point_of(whole(parameter.detach()), state)
    for index, (part, own) in enumerate(manifold.blocks(value)):
        suffix = suffix_of(index)
        tall = {name + suffix for name in _TALL}.intersection(state)
        read = state | {name: own.matrices(state[name]) for name in tall}
        found.append(Range(suffix, own.matrices(part) / own.scale, read))
    return found


def velocity_of(optimizer: StiefelOptimizer, parameter: Tensor) -> tuple[Any, Any]:
    """Return (Z, U), or a tuple of each for several ranges; see ``StiefelOptimizer.velocity``."""
    skews, normals = [], []
    for suffix, point, state in ranges_of(optimizer, parameter):
        if (ambient := state.get("momentum_ambient" + suffix)) is not None:  # Muon's -(X Z + U)
            inner = point.mH @ ambient
            skews.append((inner.mH - inner) / 2)
            normals.append(point @ inner - ambient)
            continue
        skew, normal = velocity_in(state, suffix)
        none = torch.zeros_like(point)
        skews.append(none[..., : point.size(-1), :].clone() if skew is None else skew.clone())
        if normal is not None:
            flat = [t if t is None else t.reshape(-1, *t.shape[-2:]) for t in (point, *normal)]
            none = type(normal)(*flat[1:]).value(flat[0]).reshape(point.shape)  # type: ignore[arg-type]
        normals.append(none)
    return (skews[0], normals[0]) if len(skews) == 1 else (tuple(skews), tuple(normals))


@torch.no_grad()
def set_velocity_(optimizer: StiefelOptimizer, parameter: Tensor, skew: Any, normal: Any) -> None:
    """Set (Z, U), after all of it is checked; see ``StiefelOptimizer.set_velocity``."""
    if is_sharded(parameter):
        raise TypeError(fail("parameter", "not be sharded to set its velocity", "a DTensor"))
    values = [(skew, normal)]
    if isinstance(skew, tuple) and isinstance(normal, tuple):
        values = list(zip(skew, normal, strict=False))
    ranges = ranges_of(optimizer, parameter, make=True)
    if len(values) != len(ranges):
        wanted = f"be tuples of {len(ranges)} tensors each"
        raise ValueError(fail("skew and normal", wanted, f"{len(values)}"))
    for (suffix, point, state), (new_skew, new_normal) in zip(ranges, values, strict=True):
        small = torch.Size((*point.shape[:-2], point.size(-1), point.size(-1)))
        _check("skew", new_skew, small)
        if any(name + suffix in state for name in _TALL):  # square matrices have no normal part
            _check("normal", new_normal, point.shape)
    for (suffix, point, state), (new_skew, new_normal) in zip(ranges, values, strict=True):
        if "momentum_skew" + suffix in state:
            state["momentum_skew" + suffix].copy_((new_skew - new_skew.mH) / 2)
        for name in _TALL:
            if name + suffix in state:
                state[name + suffix].copy_(new_normal - point @ (point.mH @ new_normal))
        if (ambient := state.get("momentum_ambient" + suffix)) is not None:
            ambient.add_(point @ (new_skew - new_skew.mH) / 2).neg_()
        if "deferred_shift" + suffix in state:
            state["deferred_shift" + suffix].zero_()
        if "deferred_factor" + suffix in state:
            factor = state["deferred_factor" + suffix]
            factor.zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)


def _check(name: str, value: Any, shape: torch.Size) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(fail(name, f"be a tensor of shape {tuple(shape)}", type(value).__name__))
    if value.shape != shape:
        raise ValueError(fail(name, f"have shape {tuple(shape)}", f"shape {tuple(value.shape)}"))
    if not bool(value.isfinite().all()):
        raise ValueError(fail(name, "be finite", f"NaN or inf in shape {tuple(shape)}"))
