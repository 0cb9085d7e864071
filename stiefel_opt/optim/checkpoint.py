"""Checks of a state_dict, before anything has changed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.errors import HALF, check_range, check_type, fail, users_level
from stiefel_opt.numerics.device import has_values
from stiefel_opt.numerics.distributed import local_part
from stiefel_opt.optim.checks import check_saved_lr, in_short, label, reading
from stiefel_opt.optim.state import (
    LIKE_POINT,
    MOMENTS_OF_TORCH,
    ROWS,
    START,
    State,
    expected_state,
    key_of,
)
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.manifold import Stiefel
from stiefel_opt.tags.points import is_alike

FORMAT: Final = 1  # of what state_dict() returns; one more when older code would misread it

_RULE, _FORMAT = "rule", "format"  # keys of saved groups, and of no others


class TorchRule(NamedTuple):
    """A rule of torch whose checkpoints can be loaded: its name, state and options."""

    name: str
    state: frozenset[str]
    options: frozenset[str]


def complete(optimizer: Any, packed: Group) -> None:
    """Write into a state_dict the rule, the version of the format and the readings."""
    packed["state"] = {key: values for key, values in packed["state"].items() if values}
    for saved, group in zip(packed["param_groups"], optimizer.param_groups, strict=True):
        saved[_RULE], saved[_FORMAT] = optimizer.rule, FORMAT
        readings = [reading(parameter, group) for parameter in group["params"]]
        if any(manifold is not None for manifold in readings):
            saved["readings"] = [r if r is None else r.as_dict() for r in readings]


def warn_if_nonfinite(optimizer: Any) -> None:
    """Warn of state that :func:`check_states` would refuse; waits for an accelerator."""
    found: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter)
            if not state or reading(parameter, group) is None:
                continue
            for name, value in state.items():
                own = local_part(value) if isinstance(value, Tensor) else None
                if own is not None and own.numel() and has_values(own) and own.is_floating_point():
                    called = f"{name} of {label(group, index, number)}"
                    found.setdefault(own.device, []).append((called, own))
    lost: list[str] = []
    for pairs in found.values():
        sizes = torch.stack([s.double() for s in torch._foreach_norm([t for _, t in pairs], 1)])
        finite = zip(pairs, sizes.isfinite().tolist(), strict=True)
        lost += [called for (called, _), is_finite in finite if not is_finite]
    if lost:
        warnings.warn(
            f"{in_short(lost, 4)} must be finite to be loaded again: what is saved "
            "now will be refused. Go back to an earlier one, or drop this state by "
            "optimizer.state.pop(parameter); nonfinite='skip' keeps NaN out",
            stacklevel=users_level(),
        )


def check_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Raise unless this has the parts of a state_dict."""
    check_type("state_dict", state_dict, Mapping, "be a dict")
    keys = sorted(map(str, state_dict))
    if not {"state", "param_groups"} <= set(keys):
        remedy = "pass what optimizer.state_dict() returned"
        condition = "have the keys ['param_groups', 'state']"
        raise ValueError(fail("state_dict", condition, keys[:8], remedy))


def examined(given: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return what torch may load of a state_dict; raise for what no step could use."""
    check_state_dict(given)
    saved_groups, state = [dict(saved) for saved in given["param_groups"]], dict(given["state"])
    groups = optimizer.param_groups
    of_torch = take_marks(saved_groups, optimizer.rule)
    if of_torch:
        check_plain_rule(state, saved_groups, optimizer)
    check_saved_readings(groups, saved_groups, state)
    for group, saved in zip(groups, saved_groups, strict=True):
        for name in optimizer.defaults:
            saved.setdefault(name, group[name])
        # readings agree; graphs are of this machine, not of a training
        saved.update(stiefel=group["stiefel"], cuda_graph=group["cuda_graph"])
        check_saved_lr(saved["lr"])
        optimizer.check_options({**group, **saved})
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if of_torch and reading(parameter, group) is not None:
                state.pop(key, None)  # torch's means nothing to a constrained parameter
    check_states(state, saved_groups, optimizer)
    return {**given, "param_groups": saved_groups, "state": state}


def take_marks(saved_groups: list[Group], rule: str) -> bool:
    """Take the marks out of saved groups; return whether they come from an optimizer of torch."""
    of_torch = all("stiefel" not in saved for saved in saved_groups)
    for saved in saved_groups:
        number = saved.pop(_FORMAT, FORMAT)
        other = of_today(saved, saved.pop(_RULE, rule))
        if not isinstance(number, int) or number > FORMAT:
            condition = f"be at most {FORMAT}"
            remedy = "a newer stiefel_opt has written it: update the package"
            raise ValueError(fail("format of the state_dict", condition, number, remedy))
        if other != rule:
            remedy = f"load it into {other}, or load the weights only and let {rule} start anew"
            raise ValueError(fail("state_dict", f"be one of {rule}", f"one of {other}", remedy))
    return of_torch


def of_today(saved: Group, rule: str) -> str:
    """Take options that are classes of their own now out of a saved group; return its class.

    The state of ``adaptive=True`` and of ``transport="published"`` is that of these classes.
    """
    if rule not in ("StiefelSGD", "StiefelAdam") or "adaptive" not in saved:
        return rule
    family = rule.removeprefix("Stiefel")
    is_adaptive, rotation = saved.pop("adaptive"), saved.pop("rotation")
    if saved["transport"] == "published":
        for name in ("transport", "radius", *(["nesterov"] if family == "Adam" else [])):
            saved.pop(name, None)
        saved["rotation"] = rotation or "euler"
        return f"Published{family}"
    return f"Adaptive{family}" if is_adaptive else rule


def check_plain_rule(state: Mapping[Any, Any], saved_groups: list[Group], optimizer: Any) -> None:
    """Raise unless a state_dict of torch belongs to the rule that plain parameters follow here."""
    torch_rule: TorchRule | None = optimizer._torch_rule
    if torch_rule is None:
        given = "one of torch.optim, whose rules this class does not use for plain parameters"
        remedy = "load the weights only and start anew"
        raise ValueError(fail("state_dict", f"be one of {optimizer.rule}", given, remedy))
    names = {name for values in state.values() for name in values}
    strange = sorted(names - torch_rule.state)
    for saved in saved_groups:
        strange += [f"no {option}" for option in sorted(torch_rule.options - saved.keys())]
    if strange:
        given, remedy = f"one with {', '.join(strange)}", "load the weights only and start anew"
        raise ValueError(fail("state_dict", f"be one of {torch_rule.name}", given, remedy))


def check_states(state: Mapping[Any, Any], saved_groups: list[Group], optimizer: Any) -> None:
    """Raise for ``state``, by number or name, that a step would refuse, naming the parameter.

    That of plain rows is known if they move by a rule of torch.
    """
    rows_by_torch = optimizer._torch_rule is not None
    groups = zip(optimizer.param_groups, saved_groups, strict=True)
    for number, (group, saved) in enumerate(groups):
        declared = optimizer.declared_for({**group, **saved, "params": group["params"]})
        pairs = zip(group["params"], saved["params"], strict=True)
        for index, (parameter, key) in enumerate(pairs):
            if not (values := state.get(key)):
                continue
            called = label(group, index, number)
            check_type(f"state of {called}", values, Mapping, "be a dict", _AS_SAVED)
            manifold = reading(parameter, group)
            expected = dict.fromkeys(MOMENTS_OF_TORCH, (LIKE_POINT, parameter.shape))
            if manifold is not None:
                expected = expected_state(declared, parameter, manifold)
                expected |= _expected_rows(parameter, manifold) if rows_by_torch else {}
            for name, value in values.items():
                if _counts_steps(name):
                    _check_number(f"{name} of {called}", value)
                elif name == START:
                    start = abs(value) if isinstance(value, float) else value
                    check_range(f"{name} of {called}", start, 0.0, open_low=True)
                elif name in expected:
                    is_ours, (declaration, shape) = manifold is not None, expected[name]
                    _check_value(
                        f"{name} of {called}", value, shape, declaration, parameter, is_ours
                    )


_AS_SAVED: Final = "load what optimizer.state_dict() returned"


def _counts_steps(name: str) -> bool:
    """Say whether this is the number of steps, of a parameter or of its plain rows."""
    return name in ("step", ROWS + "step") or str(name).startswith(ROWS + "step.")


def count_by_tensors(states: Iterable[dict[str, Any]]) -> None:
    """Make numbers of steps tensors, as torch does: old checkpoints count in integers."""
    for values in states:
        for name, value in values.items() if isinstance(values, dict) else ():
            if _counts_steps(name) and isinstance(value, (int, float)):
                values[name] = torch.tensor(float(value))


def _expected_rows(parameter: Tensor, manifold: Stiefel) -> dict[str, tuple[State, torch.Size]]:
    """Return the moments of torch that each range of plain rows may have, with their shapes."""
    parts = manifold.plain_parts(torch.empty(parameter.shape, device="meta"))
    return {
        key_of(ROWS + name, index): (_SQUARES if name.endswith("_sq") else LIKE_POINT, part.shape)
        for index, part in enumerate(parts)
        for name in MOMENTS_OF_TORCH
    }


_SQUARES: Final = State("squares", least=0.0)  # how second moments of torch are checked


def _check_number(called: str, value: Any) -> None:
    """Raise unless a count of steps is one."""
    if not isinstance(value, (int, float, Tensor)) or isinstance(value, bool):
        raise TypeError(fail(called, "be a number", type(value).__name__, _AS_SAVED))
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_sparse):
        given = "a sparse tensor" if value.is_sparse else f"shape {tuple(value.shape)}"
        raise ValueError(fail(called, "be one number", given, _AS_SAVED))
    if not (0 <= float(value) < math.inf):
        raise ValueError(fail(called, "be finite and not negative", float(value), _AS_SAVED))


def _check_value(
    called: str,
    value: Any,
    shape: torch.Size,
    declaration: State,
    parameter: Tensor,
    is_ours: bool,
) -> None:
    """Raise unless a moment is a finite tensor like its parameter, as far as it is declared."""
    if value is None and not is_ours:  # a momentum buffer of torch before its first step
        return
    check_type(called, value, Tensor, "be a tensor", _AS_SAVED)
    if value.shape != shape:
        remedy = "load the state of a parameter of the same shape and reading"
        given = f"shape {tuple(value.shape)}"
        raise ValueError(fail(called, f"have shape {tuple(shape)}", given, remedy))
    if value.is_complex() and not parameter.is_complex():
        remedy = "load the state of a real parameter"
        raise ValueError(fail(called, "be real", value.dtype, remedy))
    if not is_ours:
        return
    if value.layout is not torch.strided:
        raise ValueError(fail(called, "be dense", value.layout, _AS_SAVED))
    if not (value.is_floating_point() or value.is_complex()):
        raise ValueError(fail(called, "have a floating-point dtype", value.dtype, _AS_SAVED))
    if not has_values(value):
        return
    own, remedy = local_part(value), "load an earlier checkpoint, or the weights only"
    if not bool(torch.isfinite(own).all()):
        raise ValueError(fail(called, "be finite", "NaN or inf", remedy))
    if declaration.least == -math.inf or not own.numel():
        return
    least = float((torch.view_as_real(own.resolve_conj()) if own.is_complex() else own).min())
    if least < declaration.least:
        raise ValueError(fail(called, f"have no entry below {declaration.least:g}", least, remedy))


def check_saved_readings(
    groups: list[Group], saved_groups: list[Group], state: dict[Any, Any]
) -> None:
    """Take the readings out of ``saved_groups``; raise where one has changed since.

    The start of a learned scale goes into ``state`` where that lacks it: before the first step.
    """
    own, given = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if own != given:
        remedy = "build it as it was saved, from model.parameters() or from so.param_groups(model)"
        wanted = f"have {len(own)} groups of {own} parameters"
        raise ValueError(fail("state_dict", wanted, f"{len(given)} of {given}", remedy))
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        pairs = zip(group["params"], _saved_readings(saved), strict=False)
        for index, (parameter, earlier) in enumerate(pairs):
            current = reading(parameter, group)
            if earlier is not None and earlier.get("learn_scale"):
                start = {START: -earlier.get("scale", 1.0)}
                state[saved["params"][index]] = state.get(saved["params"][index]) or start
            if earlier is not None and not _agree(current, earlier, parameter):
                called = f"reading of {label(group, index, number)}"
                condition = f"be the saved one, {Stiefel.from_dict(earlier)}"
                found = f"{current}, shape {tuple(parameter.shape)}"
                remedy = "constrain it as it was when the checkpoint was written"
                raise ValueError(fail(called, condition, found, remedy))


def _agree(current: Stiefel | None, saved: Mapping[str, Any], parameter: Tensor) -> bool:
    """Say whether readings are equal, but for the rounding of a scale that a weight kept."""
    if current is None:
        return False
    earlier = Stiefel.from_dict(saved)
    if current.learn_scale:  # its start is in the state; from a run without it, it begins
        earlier = replace(earlier, scale=current.scale, learn_scale=True)
    return is_alike(earlier, current, parameter)


def _saved_readings(saved: Group) -> list[Any]:
    """Take the readings out of a saved group, in the order of its ``params``.

    ``torch.distributed.checkpoint`` replaces numbers by names and may reorder ``params``, but not
    what else is listed; a reading whose parameter is not known any more is not compared.
    """
    readings: Any = saved.pop("readings", [])
    called = "readings of the state_dict"
    check_type(called, readings, (list, tuple), "be a list", _AS_SAVED)
    for each in readings:
        check_type(called, each, (Mapping, type(None)), "be dicts or None", _AS_SAVED)
    if all(isinstance(number, int) for number in saved["params"]):
        return list(readings)
    named = dict(zip(saved.pop("param_names", ()), readings, strict=False))
    return [named.get(name) for name in saved["params"]]


def keep_precision(state: Any, groups: list[Group], saved: Mapping[str, Any]) -> None:
    """Undo in ``state`` what torch does on load: it casts to the dtype of the parameter.

    In half precision the state of constrained parameters is of float32, and the steps of their
    plain rows are numbers of float32 on the device of the parameter.
    """
    for group, saved_group in zip(groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], saved_group["params"], strict=True):
            values = saved["state"].get(number)
            if values is None or reading(parameter, group) is None:
                continue
            for name, value in values.items():
                if _counts_steps(name):
                    count = torch.as_tensor(value).detach().clone().reshape(())
                    count = count.to(parameter.device)  # saved on a CPU, perhaps
                    is_narrow = name == "step" or not count.is_floating_point()
                    state[parameter][name] = count.float() if is_narrow else count
                elif isinstance(value, Tensor) and parameter.dtype in HALF:
                    state[parameter][name] = value.to(parameter.device, torch.float32)
