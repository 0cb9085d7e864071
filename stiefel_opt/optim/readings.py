"""How a group reads its parameters, in memory and in checkpoints, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stiefel_opt._checks import fail
from stiefel_opt.manifold import Stiefel, manifold_of

__all__ = ["Group", "as_plain_data", "check_saved_readings", "label", "name_of", "reading"]

Group = dict[str, Any]


def reading(parameter: Tensor, group: Group) -> Stiefel | None:
    """Return how a group reads a parameter: the group's key if it has one, else the tag."""
    key = group["stiefel"]
    if key is None:
        return manifold_of(parameter)
    if key is False:
        return None
    if key is True:
        return manifold_of(parameter) or Stiefel()
    if isinstance(key, Stiefel):  # put there by hand
        return key
    return Stiefel.from_dict(key)


def as_plain_data(stiefel: Any) -> Any:
    """Return the option ``stiefel`` as None, a bool, or a dict of numbers and lists."""
    if stiefel is None or isinstance(stiefel, bool):
        return stiefel
    if isinstance(stiefel, Stiefel):
        return stiefel.as_dict()
    if isinstance(stiefel, Mapping):
        return Stiefel.from_dict(stiefel).as_dict()
    raise TypeError(fail("stiefel", "be None, True, False or a Stiefel", repr(stiefel)))


def label(name: str | None, index: int, group_number: int) -> str:
    """Return what a message calls a parameter: its name, or its place in the groups."""
    return f"parameter {index} of group {group_number}" if name is None else name


def name_of(parameter: Tensor, groups: list[Group]) -> str:
    """Return the label of a parameter of ``groups``."""
    for number, group in enumerate(groups):
        for index, other in enumerate(group["params"]):
            if other is parameter:
                names = group.get("param_names")
                return label(names[index] if names else None, index, number)
    raise ValueError(fail("parameter", "belong to this optimizer", "one of no group"))


def check_saved_readings(groups: list[Group], saved_groups: list[Group]) -> None:
    """Take the readings out of ``saved_groups``; raise where one differs from that of today.

    Raises:
        ValueError: naming the parameter and the reading that it was saved under.
    """
    for number, (group, saved) in enumerate(
        zip(groups, saved_groups, strict=False)  # torch checks the numbers
    ):
        names = group.get("param_names")
        for index, (parameter, earlier) in enumerate(
            zip(group["params"], _saved_readings(saved), strict=False)
        ):
            current = reading(parameter, group)
            if earlier is not None and (current is None or current.as_dict() != earlier):
                raise ValueError(
                    fail(
                        f"reading of {label(names[index] if names else None, index, number)}",
                        f"be the saved one, {Stiefel.from_dict(earlier)}",
                        current,
                        "constrain it as it was when the checkpoint was written",
                    )
                )


def _saved_readings(saved: Group) -> list[Any]:
    """Take the readings out of a saved group, in the order of its ``params``.

    ``torch.distributed.checkpoint`` replaces numbers by names and may reorder ``params``, but not
    what else is listed; a reading whose parameter cannot be told any more is not compared.
    """
    readings: list[Any] = saved.pop("readings", [])
    if all(isinstance(number, int) for number in saved["params"]):
        return readings
    named = dict(zip(saved.pop("param_names", ()), readings, strict=False))
    return [named.get(name) for name in saved["params"]]
