"""What a state_dict must be to be loaded: told apart before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from stiefel_opt._checks import fail
from stiefel_opt.optim.readings import Group, label, reading
from stiefel_opt.optim.state import StateNames, expected_shapes

__all__ = [
    "check_plain_rule",
    "check_state_dict",
    "check_states",
    "mark",
    "rule_of",
    "take_marks",
    "without_plain",
]

FORMAT: Final = 1  # of what state_dict() returns; one more when older code would misread it

_RULE, _FORMAT = "rule", "format"  # keys of saved groups, and of no others
_OF_SGD: Final = frozenset({"momentum_buffer"})
_OF_ADAM: Final = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def rule_of(kind: type) -> str:
    """Return the name of the class whose state ``kind`` keeps: its own, or that of a base."""
    return next(base.__name__ for base in kind.__mro__ if "_step_plain" in vars(base))


def mark(saved_groups: list[Group], rule: str) -> None:
    """Write into saved groups which rule has saved them, and how."""
    for saved in saved_groups:
        saved[_RULE], saved[_FORMAT] = rule, FORMAT


def check_state_dict(state_dict: object) -> None:
    """Raise unless this has the parts of a state_dict."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(fail("state_dict", "be a dict", type(state_dict).__name__))
    found = sorted(map(str, state_dict))
    if not {"state", "param_groups"} <= set(found):
        remedy = "pass what optimizer.state_dict() returned"
        raise ValueError(
            fail("state_dict", "have the keys ['param_groups', 'state']", found[:8], remedy)
        )


def take_marks(saved_groups: list[Group], kind: type) -> bool:
    """Take the marks out of saved groups; return whether an optimizer of torch has saved them.

    Raises:
        ValueError: for a format that is newer than this code, and for the state of another rule.
    """
    rule = rule_of(kind)
    of_torch = all("stiefel" not in saved for saved in saved_groups)
    for saved in saved_groups:
        number, found = saved.pop(_FORMAT, FORMAT), saved.pop(_RULE, rule)
        if not isinstance(number, int) or number > FORMAT:
            remedy = "a newer stiefel_opt has written it: update the package"
            raise ValueError(
                fail("format of the state_dict", f"be at most {FORMAT}", number, remedy)
            )
        if found != rule:
            remedy = f"load it into {found}, or load the weights only and let {rule} start anew"
            raise ValueError(fail("state_dict", f"be one of {rule}", f"one of {found}", remedy))
    return of_torch


def check_plain_rule(state: Mapping[Any, Any], saved_groups: list[Group], defaults: Group) -> None:
    """Raise unless a state_dict of torch belongs to the rule that plain parameters follow here."""
    adam = "betas" in defaults
    names = {name for values in state.values() for name in values}
    strange = sorted(names - (_OF_ADAM if adam else _OF_SGD))
    options = {"betas", "eps", "amsgrad"} if adam else {"momentum", "dampening", "nesterov"}
    for saved in saved_groups:
        strange += [f"no {option}" for option in sorted(options - saved.keys())]
    if strange:
        known = "torch.optim.Adam or AdamW" if adam else "torch.optim.SGD"
        remedy = "load the weights only and start anew"
        raise ValueError(
            fail("state_dict", f"be one of {known}", f"one with {', '.join(strange)}", remedy)
        )


def without_plain(
    state: Mapping[Any, Any], groups: list[Group], saved_groups: list[Group]
) -> dict[Any, Any]:
    """Return ``state`` without that of constrained parameters: torch's means nothing to them."""
    constrained = {
        number
        for group, saved in zip(groups, saved_groups, strict=False)  # torch checks the numbers
        for parameter, number in zip(group["params"], saved["params"], strict=False)
        if reading(parameter, group) is not None
    }
    return {number: values for number, values in state.items() if number not in constrained}


def check_states(
    state: Mapping[Any, Any],
    groups: list[Group],
    saved_groups: list[Group],
    names_of: Callable[[Group], StateNames],
) -> None:
    """Raise for state that a step would refuse, naming the parameter.

    Args:
        state: The state that is about to be loaded, by number or name.
        groups: Those of the optimizer.
        saved_groups: Those about to be loaded, complete.
        names_of: Which state a group keeps.

    Raises:
        ValueError: for state of another shape, or complex state of a real parameter.
    """
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=False)):
        labels = group.get("param_names")
        kept = names_of({**group, **saved, "params": group["params"]})
        for index, (parameter, key) in enumerate(
            zip(group["params"], saved["params"], strict=False)
        ):
            values = state.get(key)
            if not values:
                continue
            manifold = reading(parameter, group)
            if manifold is None:
                shapes = dict.fromkeys(_OF_SGD | _OF_ADAM - {"step"}, parameter.shape)
            else:
                shapes = expected_shapes(kept, parameter, manifold)
            for name, value in values.items():
                if name not in shapes or not isinstance(value, Tensor):
                    continue
                called = f"{name} of {label(labels[index] if labels else None, index, number)}"
                if value.shape != shapes[name]:
                    raise ValueError(
                        fail(
                            called,
                            f"have shape {tuple(shapes[name])}",
                            f"shape {tuple(value.shape)}",
                            "load the state of a parameter of the same shape and reading",
                        )
                    )
                if value.is_complex() and not parameter.is_complex():
                    remedy = "load the state of a real parameter"
                    raise ValueError(fail(called, "be real", value.dtype, remedy))
