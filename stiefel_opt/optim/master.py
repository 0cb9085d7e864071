"""Half-precision parameters: a float32 master point and float32 state beside them.

bfloat16 has 8 bits: a step of 1e-3 would vanish in the rounding of the parameter, and X'X = I can
hold only to that rounding. So the point lives in float32, under the name ``master`` in the state,
and the parameter is what it rounds to. A sharded parameter has a master that is sharded like the
rest of its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.optim.readings import Group, reading

__all__ = ["HALF", "MASTER", "follow_", "keep_precision", "point_of", "state_dtype"]

HALF: Final = (torch.bfloat16, torch.float16)
MASTER: Final = "master"


def state_dtype(dtype: torch.dtype, name: str = "") -> torch.dtype:
    """Return the dtype of the state ``name`` of a constrained parameter of ``dtype``.

    The second moment of a complex number is that of its absolute value.
    """
    if dtype.is_complex and "exp_avg_sq" in name:
        return dtype.to_real()
    return torch.float32 if dtype in HALF else dtype


def point_of(parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return what a constrained parameter stands for: its master, or its own value."""
    value = state.get(MASTER, parameter.detach())
    return value.to(state_dtype(value.dtype))


def follow_(masters: Tensor, found: Tensor) -> None:
    """Let masters take the values that somebody else wrote into their parameters, ``found``.

    A number that still is the rounded master leaves the master its digits. Bits are compared: a
    compiler may drop the rounding in front of a comparison of numbers.
    """
    same = masters.to(found.dtype).view(torch.int16) == found.view(torch.int16)
    torch.where(same, masters, found.to(masters.dtype), out=masters)


def keep_precision(state: Any, groups: list[Group], saved: Mapping[str, Any]) -> None:
    """Undo in ``state`` what torch does on load: it casts to the dtype of the parameter.

    Only for constrained half-precision parameters; plain ones have the state of torch.
    """
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            values = saved["state"].get(number)
            if parameter.dtype not in HALF or values is None or reading(parameter, group) is None:
                continue
            for name, value in values.items():
                if isinstance(value, Tensor) and name != "step":
                    state[parameter][name] = value.to(parameter.device, torch.float32)
