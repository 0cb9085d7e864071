"""The momentum of a parameter as a user reads and sets it, in whatever form a rule keeps it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.errors import check_type, fail
from stiefel_opt.functional.flows import Tensors
from stiefel_opt.numerics.distributed import gathered, is_sharded
from stiefel_opt.numerics.linalg import skew as skew_part
from stiefel_opt.optim.blocks import ConstrainedParameter
from stiefel_opt.optim.checks import name_of, reading
from stiefel_opt.optim.state import State, complete_state, key_of, point_of
from stiefel_opt.tags.manifold import Stiefel


class Range(NamedTuple):
    """A constrained range of a parameter, its rows gathered."""

    number: int
    reading: Stiefel
    shape: torch.Size  # as it is stored
    point: Tensor  # X, (..., n, m)
    state: Tensors  # by name; tall state is read as X is

    def written(
        self, optimizer: Any, declared: tuple[State, ...], Z: Tensor, U: Tensor
    ) -> dict[str, Tensor]:
        """Return the ``declared`` state that keeps Z and U, as ``optimizer.state`` has it."""
        written, state = optimizer.state_of_velocity(self.point, Z, U), {}
        for declaration in declared:
            if declaration.name in written and declaration.exists_for(*self.point.shape[-2:]):
                value = written[declaration.name]
                value = self.reading.stored(value, self.shape) if declaration.is_tall else value
                state[key_of(declaration.name, self.number)] = value
        return state


@torch.no_grad()
def velocity_of(optimizer: Any, parameter: Tensor) -> tuple[Any, Any]:
    """Return (Z, U), or a tuple of each for several ranges; see ``StiefelOptimizer.velocity``."""
    manifold, _ = _reading_and_state(optimizer, parameter)
    skews, normals = [], []
    for own in _ranges(optimizer, parameter, manifold):
        Z, U = optimizer.velocity_in(own.point, own.state)
        none = torch.zeros_like(own.point)
        skews.append(none[..., : none.size(-1), :].clone() if Z is None else Z.clone())
        normals.append(none if U is None else U.clone())
    return (skews[0], normals[0]) if len(skews) == 1 else (tuple(skews), tuple(normals))


@torch.no_grad()
def set_velocity_(optimizer: Any, parameter: Tensor, skew: Any, normal: Any) -> None:
    """Set (Z, U), after all of it is checked; see ``StiefelOptimizer.set_velocity``."""
    manifold, declared = _reading_and_state(optimizer, parameter)
    if is_sharded(parameter):
        raise TypeError(fail("parameter", "not be sharded to set its velocity", "a DTensor"))
    if not any(declaration.is_matrix for declaration in declared):
        wanted, remedy = "keep a momentum to set a velocity", "set its momentum"
        raise ValueError(fail("optimizer", wanted, "a rule without state", remedy))
    values = [(skew, normal)]
    if isinstance(skew, tuple) and isinstance(normal, tuple):
        values = list(zip(skew, normal, strict=False))
    state, known = optimizer.state[parameter], optimizer._declared
    called = partial(name_of, parameter, optimizer.param_groups)
    complete_state(state, declared, parameter, manifold, called, known)
    ranges = _ranges(optimizer, parameter, manifold)
    if len(values) != len(ranges):
        wanted = f"be tuples of {len(ranges)} tensors each"
        raise ValueError(fail("skew and normal", wanted, f"{len(values)}"))
    for own, (new_skew, new_normal) in zip(ranges, values, strict=True):
        X = own.point
        _check("skew", new_skew, torch.Size((*X.shape[:-2], X.size(-1), X.size(-1))))
        if X.size(-2) != X.size(-1):  # square matrices have no normal part
            _check("normal", new_normal, X.shape)
    for own, (new_skew, new_normal) in zip(ranges, values, strict=True):
        X = own.point
        U = torch.zeros_like(X) if X.size(-2) == X.size(-1) else new_normal
        U = U - X @ (X.mH @ U)
        for key, value in own.written(optimizer, declared, skew_part(new_skew), U).items():
            state[key].copy_(value)


@torch.no_grad()
def keep_velocity(
    optimizer: Any, weight: ConstrainedParameter, declared: tuple[State, ...]
) -> None:
    """Turn momentum that other options have left into that of these options."""
    state, wanted = weight.state, {declaration.name for declaration in declared}
    found = {key.partition(".")[0] for key in state}.intersection(optimizer.velocity_names)
    if not wanted or found <= wanted:
        return
    for own in _ranges(optimizer, weight.parameter, weight.manifold):
        Z, U = optimizer.velocity_in(own.point, own.state)
        if Z is not None and U is not None:
            for key, value in own.written(optimizer, declared, Z, U).items():
                state[key] = value.contiguous()


def _reading_and_state(optimizer: Any, parameter: Tensor) -> tuple[Stiefel, tuple[State, ...]]:
    """Return the reading of a constrained parameter, and the state that its rule declares.

    Raise if that has matrices, and none of them is a momentum with parts Z and U.
    """
    for group in optimizer.param_groups:
        manifold = reading(parameter, group)
        if manifold is not None and any(parameter is other for other in group["params"]):
            declared: tuple[State, ...] = optimizer.declared_for(group)
            names = [declaration.name for declaration in declared if declaration.is_matrix]
            if names and not set(names) & set(optimizer.velocity_names):
                condition, remedy = "keep its momentum as Z and U", "read optimizer.state"
                raise ValueError(fail(optimizer.rule, condition, ", ".join(names), remedy))
            return manifold, declared
    raise ValueError(fail("parameter", "be constrained in this optimizer", "one that is not"))


def _ranges(optimizer: Any, parameter: Tensor, manifold: Stiefel) -> list[Range]:
    """Return the constrained ranges of a parameter with their state, in whatever form it is."""
    state = optimizer.state.get(parameter, {})
    values = {key: gathered(t) for key, t in state.items() if isinstance(t, Tensor)}
    value, ranges = point_of(gathered(parameter.detach()), values), []
    for index, (part, own) in enumerate(manifold.blocks(value)):
        read: Tensors = {}
        for key, tensor in values.items():
            declaration = optimizer._declared.get(key.partition(".")[0])
            if declaration is not None and key == key_of(declaration.name, index):
                read[declaration.name] = own.matrices(tensor) if declaration.is_tall else tensor
        matrices = own.matrices(part)
        point = matrices / own.scale_of(matrices)
        ranges.append(Range(index, own, part.shape, point, read))
    return ranges


def _check(name: str, value: Any, shape: torch.Size) -> None:
    check_type(name, value, Tensor, f"be a tensor of shape {tuple(shape)}")
    if value.shape != shape:
        raise ValueError(fail(name, f"have shape {tuple(shape)}", f"shape {tuple(value.shape)}"))
    if not bool(value.isfinite().all()):
        raise ValueError(fail(name, "be finite", f"NaN or inf in shape {tuple(shape)}"))
