"""Which state a constrained parameter has: names, shapes, first values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import zeros as sharded_zeros

from stiefel_opt._checks import fail
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.master import HALF, MASTER, state_dtype
from stiefel_opt.optim.shards import Shards, placed

__all__ = [
    "State",
    "StateNames",
    "complete_state",
    "expected_shapes",
    "forget_constrained",
    "is_small",
    "state_shapes",
]

State = dict[str, Tensor]


class StateNames(NamedTuple):
    """What a rule keeps beside ``step``: m x m for each matrix, the same of tall matrices only,
    of the shape of the parameter, one number for each matrix, and of the shape of the parameter
    where some of its rows are plain."""

    small: list[str]
    small_of_tall: list[str]
    tall: list[str]
    norms: Sequence[str] = ()
    rows: Sequence[str] = ()


def complete_state(
    state: State,
    names: StateNames,
    parameter: Tensor,
    manifold: Stiefel,
    called: Callable[[], str],
    shards: Shards | None = None,
) -> State:
    """Make in ``state`` what is missing, and drop what the rule does not keep.

    Args:
        state: State of one parameter; that of a plain one is started anew.
        names: What the rule keeps.
        parameter: The parameter.
        manifold: How it is read.
        called: Gives what a message calls it.
        shards: How it is shared out; its state is shared out alike.

    Raises:
        ValueError: for state of another shape.
    """
    expected = expected_shapes(names, parameter, manifold)
    if "step" not in state or (expected and not expected.keys() & state.keys()):
        state.clear()
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    for name, shape in expected.items():
        shared = manifold.rows is not None and shape == parameter.shape  # by torch's own rule
        dtype = state_dtype(parameter.dtype, "" if shared else name)
        if name not in state and name == MASTER:
            state[name] = parameter.detach().to(dtype)
        elif name not in state:
            state[name] = _zeros(name, shape, dtype, parameter, shards)
            if name.startswith("deferred_factor"):
                made = state[name]
                own = made.to_local() if isinstance(made, DTensor) else made
                own.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        elif state[name].shape != shape:
            raise ValueError(
                fail(
                    f"{name} of {called()}",
                    f"have shape {tuple(shape)}",
                    f"shape {tuple(state[name].shape)}",
                    "load the state of a parameter of the same shape and reading",
                )
            )
        if state[name].dtype != dtype:  # the model is in another precision now
            state[name] = state[name].to(dtype)
        if shards is not None and (placements := _placements(name, shards)) is not None:
            state[name] = placed(state[name], shards.mesh, placements)
    for name in state.keys() - expected.keys() - {"step"}:
        del state[name]
    return state


def forget_constrained(states: Any, parameter: Tensor, names: StateNames) -> None:
    """Clear the state of a plain parameter that was constrained until now."""
    state = states.get(parameter, {})
    constrained = {*names.small, *names.small_of_tall, MASTER}
    if any(name.partition(".")[0] in constrained for name in state):
        state.clear()


def expected_shapes(
    names: StateNames, parameter: Tensor, manifold: Stiefel
) -> dict[str, torch.Size]:
    """Return the shape of all state of a constrained parameter but ``step``, by name."""
    ranges, needs_tall = state_shapes(manifold, parameter.shape)
    expected: dict[str, torch.Size] = {}
    for index, (shape, is_tall) in enumerate(ranges):
        suffix = f".{index}" if index else ""
        small = names.small + names.small_of_tall if is_tall else names.small
        expected.update({name + suffix: shape for name in small})
        single = torch.Size((*shape[:-2], 1, 1))
        expected.update({name + suffix: single for name in names.norms})
    if needs_tall:
        expected.update(dict.fromkeys(names.tall, parameter.shape))
    if manifold.rows is not None:
        expected.update(dict.fromkeys(names.rows, parameter.shape))
    if parameter.dtype in HALF:
        expected[MASTER] = parameter.shape
    return expected


def _placements(name: str, shards: Shards) -> tuple[Placement, ...] | None:
    return shards.small if is_small(name) else shards.working


def _zeros(
    name: str, shape: torch.Size, dtype: torch.dtype, parameter: Tensor, shards: Shards | None
) -> Tensor:
    """Return state of zeros; m x m sums over rows are no DTensor, the same everywhere."""
    placements = None if shards is None else _placements(name, shards)
    if shards is None or placements is None:
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    return sharded_zeros(shape, dtype=dtype, device_mesh=shards.mesh, placements=placements)


def state_shapes(
    manifold: Stiefel, shape: torch.Size
) -> tuple[list[tuple[torch.Size, bool]], bool]:
    """Return, for each range, the shape of its m x m state and whether it is tall; then whether
    tall state, of the parameter's shape, is needed.

    It is not where every matrix is square and no row is plain: nothing is normal to the point then.
    """
    model = torch.empty(shape, device="meta")
    ranges = []
    for index, part in enumerate(manifold.parts(model)):
        size = manifold.matrices(part, index).shape
        ranges.append((torch.Size((*size[:-2], size[-1], size[-1])), size[-2] > size[-1]))
    return ranges, any(high for _, high in ranges) or bool(manifold.plain_parts(model))


def is_small(name: str) -> bool:
    """Say whether state of this name is m x m, or one number, for each matrix, by its last word."""
    return name.partition(".")[0].endswith(("skew", "factor", "shift", "norm"))
