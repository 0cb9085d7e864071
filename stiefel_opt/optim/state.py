"""Which state a constrained parameter has: names, shapes, first values, precision.

Each constrained range of a parameter has state of its own; that of the second range and on has the
number of the range behind its name: ``momentum_skew``, ``momentum_skew.1``. Plain rows have the
state of torch's own rule behind ``rows.``. Half-precision parameters have a float32 ``master``:
bfloat16 has 8 bits, a step of 1e-3 would vanish in its rounding, and X'X = I can hold only to that.
So the point lives in float32 in the state, and the parameter is what it rounds to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt._checks import HALF, fail
from stiefel_opt.distributed import local_part
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.sharding import Shards, placed, sharded_zeros

State = dict[str, Any]

MASTER: Final = "master"
ROWS: Final = "rows."
_SMALL: Final = ("skew", "factor", "shift", "norm")
_KEPT: Final = (*_SMALL, "normal", "base", "ambient", MASTER)  # the last words of our names
_PREFIXES: Final = ("momentum_", "exp_avg_sq_", "max_exp_avg_sq_", "deferred_")


class StateNames(NamedTuple):
    """What a rule keeps beside ``step``."""

    small: tuple[str, ...] = ()  # m x m for each matrix
    small_of_tall: tuple[str, ...] = ()  # the same, of tall matrices only
    tall: tuple[str, ...] = ()  # like the constrained range, where its matrices are tall
    norms: tuple[str, ...] = ()  # one number for each matrix
    ambient: tuple[str, ...] = ()  # like the constrained range, square matrices too


def suffix_of(index: int) -> str:
    """Return what stands behind the names of the state of range ``index``."""
    return f".{index}" if index else ""


def is_kept(name: str) -> bool:
    """Say whether a name is one of ours, not torch's or a user's."""
    word = name.partition(".")[0]
    ours = word.startswith(_PREFIXES) and word.endswith(_KEPT)
    return ours or word == MASTER or name.startswith(ROWS)


def is_small(name: str) -> bool:
    """Say whether state of this name is m x m, or one number, for each matrix."""
    return name.partition(".")[0].endswith(_SMALL)


def state_dtype(dtype: torch.dtype, name: str = "") -> torch.dtype:
    """Return the dtype of the state ``name`` of a constrained parameter of ``dtype``.

    The second moment of a complex number is that of its absolute value.
    """
    if dtype.is_complex and "exp_avg_sq" in name:
        return dtype.to_real()
    return torch.float32 if dtype in HALF else dtype


def complete_state(
    state: State,
    names: StateNames,
    parameter: Tensor,
    manifold: Stiefel,
    called: Callable[[], str],
    shards: Shards | None = None,
) -> State:
    """Make in ``state`` what is missing, and drop what the rule does not keep; raise for a shape.

    What a user has put there under a name of their own stays; the state of a plain parameter is
    started anew. ``called`` gives what a message calls the parameter.
    """
    expected = expected_shapes(names, parameter, manifold)
    for name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        if name in state:  # of a plain parameter until now
            state.clear()
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
    for name, shape in expected.items():
        dtype = state_dtype(parameter.dtype, name)
        if name not in state and name == MASTER:
            state[name] = parameter.detach().to(dtype)
        elif name not in state:
            state[name] = _zeros(name, shape, dtype, parameter, shards)
            if name.startswith("deferred_factor"):
                local_part(state[name]).diagonal(dim1=-2, dim2=-1).fill_(1.0)
        elif state[name].shape != shape:
            remedy = "load the state of a parameter of the same shape and reading"
            wanted, found = f"have shape {tuple(shape)}", f"shape {tuple(state[name].shape)}"
            raise ValueError(fail(f"{name} of {called()}", wanted, found, remedy))
        if state[name].dtype != dtype:  # the model is in another precision now
            state[name] = state[name].to(dtype)
        if shards is not None and (layout := _placements(name, shards)) is not None:
            state[name] = placed(state[name], shards.mesh, layout)
    for name in [name for name in state if is_kept(name) and name not in expected]:
        if not name.startswith(ROWS):
            del state[name]
    return state


def forget_constrained(states: Any, parameter: Tensor) -> None:
    """Clear the state of a plain parameter that was constrained until now."""
    state = states.get(parameter, {})
    if any(is_kept(name) for name in state):
        state.clear()


def expected_shapes(
    names: StateNames, parameter: Tensor, manifold: Stiefel
) -> dict[str, torch.Size]:
    """Return the shape of all state of a constrained parameter but ``step``, by name.

    No tall state where every matrix is square: nothing is normal to the point then.
    """
    expected: dict[str, torch.Size] = {}
    model = torch.empty(parameter.shape, device="meta")
    for index, (part, reading) in enumerate(manifold.blocks(model)):
        *lead, n, m = reading.matrices(part).shape
        small = names.small + names.small_of_tall if n > m else names.small
        for name in small:
            expected[name + suffix_of(index)] = torch.Size((*lead, m, m))
        for name in names.norms:
            expected[name + suffix_of(index)] = torch.Size((*lead, 1, 1))
        for name in names.ambient + (names.tall if n > m else ()):
            expected[name + suffix_of(index)] = part.shape
    if parameter.dtype in HALF:
        expected[MASTER] = parameter.shape
    return expected


def _zeros(
    name: str, shape: torch.Size, dtype: torch.dtype, parameter: Tensor, shards: Shards | None
) -> Tensor:
    if shards is None or (layout := _placements(name, shards)) is None:
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    return sharded_zeros(shape, dtype, shards.mesh, layout)


def _placements(name: str, shards: Shards) -> Any:
    """Return how state of this name is shared out; m x m sums over rows are not."""
    return shards.small if is_small(name) else shards.working


# ---- masters -----------------------------------------------------------------------------------


def point_of(parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return what a constrained parameter stands for: its master, or its own value."""
    value = state.get(MASTER, parameter.detach())
    return value.to(state_dtype(value.dtype))


def follow_(master: Tensor, found: Tensor) -> None:
    """Let masters take the values that somebody else wrote into their parameters, ``found``.

    A number that still is the rounded master leaves the master its digits.
    """
    same = master.to(found.dtype).view(torch.int16) == found.view(torch.int16)
    torch.where(same, master, found.to(master.dtype), out=master)
