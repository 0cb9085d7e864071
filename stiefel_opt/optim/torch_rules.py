"""Torch's own SGD and Adam, on plain parameters and on plain rows of constrained ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.optim.sgd import sgd

from stiefel_opt.numerics.device import is_cpu

Group = dict[str, Any]
PlainRule = Callable[..., None]


def step_sgd(
    group: Group,
    parameters: list[Tensor],
    grads: list[Tensor],
    states: Sequence[Group],
    found_inf: Tensor | None = None,
) -> None:
    """Apply ``torch.optim.SGD`` with the options of ``group``; ``states`` holds a dict for each.

    All stay as they are if ``found_inf`` is not 0: fused kernels do that without a host read.
    """
    buffers: list[Tensor | None] = []
    if group["momentum"] != 0:
        for state, parameter in zip(states, parameters, strict=True):
            if found_inf is not None and "momentum_buffer" not in state:  # no kernel fills it
                state["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [state.get("momentum_buffer") for state in states]
    sgd(
        parameters,
        [grad.clone() for grad in grads] if _writes_to_grads(group, parameters) else grads,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=_lr(group, found_inf),
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        has_sparse_grad=any(grad.is_sparse for grad in grads),
        foreach=group["foreach"] if found_inf is None else False,
        fused=group["fused"] if found_inf is None else True,
        found_inf=found_inf,
    )
    for state, buffer in zip(states, buffers, strict=False):
        state["momentum_buffer"] = buffer


def _lr(group: Group, found_inf: Tensor | None) -> Any:
    """Return the learning rate, a tensor in float32 for fused kernels: on a GPU they ask for it."""
    lr = group["lr"]
    is_sent = found_inf is not None and isinstance(lr, Tensor) and not is_cpu(lr)
    return lr.float() if is_sent else lr


def _writes_to_grads(group: Group, parameters: list[Tensor]) -> bool:
    """Say whether torch's foreach kernels add the momentum to the gradients in place."""
    if not group["nesterov"] or group["maximize"] or group["weight_decay"] != 0:
        return False
    foreach = group["foreach"]
    if foreach is None and group["fused"] is None:  # as torch chooses
        foreach = _default_to_fused_or_foreach(parameters, False)[1]
    return bool(foreach)


def adam_moments(group: Group) -> list[str]:
    """Return torch's names of Adam's moments."""
    return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])


def init_adam(group: Group, parameter: Tensor, state: Group, *, on_device: bool = False) -> None:
    """Make the state of ``torch.optim.Adam`` for a tensor that has none."""
    if "step" not in state:
        # as torch: float64 only where that is the default, and never for fused
        on_device = on_device or bool(group["capturable"] or group["fused"])
        wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
        state["step"] = torch.tensor(  # of which a fake tensor knows the value
            0.0,
            dtype=torch.float64 if wide else torch.float32,
            device=parameter.device if on_device else "cpu",
        )
    for name in adam_moments(group):
        if name not in state:
            state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def step_adam(
    group: Group,
    parameters: list[Tensor],
    grads: list[Tensor],
    states: Sequence[Group],
    found_inf: Tensor | None = None,
) -> None:
    """Apply ``torch.optim.Adam`` with the options of ``group``; arguments as :func:`step_sgd`."""
    for parameter, state in zip(parameters, states, strict=True):
        init_adam(group, parameter, state, on_device=found_inf is not None)
    moments = [[state[name] for state in states] for name in adam_moments(group)]
    adam(
        parameters,
        grads,
        moments[0],
        moments[1],
        moments[2] if group["amsgrad"] else [],
        [state["step"] for state in states],
        amsgrad=group["amsgrad"],
        has_complex=any(parameter.is_complex() for parameter in parameters),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=_lr(group, found_inf),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        foreach=group["foreach"] if found_inf is None else False,
        capturable=group["capturable"],
        fused=group["fused"] if found_inf is None else True,
        decoupled_weight_decay=group["decoupled_weight_decay"],
        found_inf=found_inf,
    )


def step_rows(
    rule: PlainRule,
    group: Group,
    parameters: list[Tensor],
    grads: list[Tensor],
    states: Sequence[Group],
    found_inf: Tensor | None,
) -> None:
    """Apply a rule to views on rows; fused kernels get copies that are real and without gaps."""
    if not group.get("fused") and found_inf is None:
        rule(group, parameters, grads, states)
        return
    dense = list(map(_dense, parameters))
    copies = [{name: _dense(value) for name, value in state.items()} for state in states]
    rule(group, dense, list(map(_dense, grads)), copies, found_inf)
    for parameter, copy in zip(parameters, dense, strict=True):
        _put_back(parameter, copy)
    for parameter, state, copied in zip(parameters, states, copies, strict=True):
        for name, copy in copied.items():
            is_tensor = isinstance(copy, Tensor)
            if name not in state or not is_tensor:
                state[name] = copy
                if is_tensor and parameter.is_complex() and copy.ndim > parameter.ndim:
                    state[name] = torch.view_as_complex(copy)
            else:
                _put_back(state[name], copy)


def step_unless(
    found_inf: Tensor | None,
    update: Callable[[list[Tensor], list[Tensor], Sequence[Group]], None],
    parameters: list[Tensor],
    grads: list[Tensor],
    states: Sequence[Group],
) -> None:
    """Apply a rule; to copies where there is a ``found_inf``, kept if that number is 0."""
    if found_inf is None:
        update(parameters, grads, states)
        return
    values = [parameter.clone() for parameter in parameters]
    copies = [
        {key: t.clone() if isinstance(t, Tensor) else t for key, t in state.items()}
        for state in states
    ]
    update(values, grads, copies)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(torch.where(found_inf != 0, parameter, value))
    for state, copy in zip(states, copies, strict=True):
        for key, value in copy.items():
            if isinstance(value, Tensor) and value.device == found_inf.device:
                earlier = state.get(key, torch.zeros_like(value))
                state[key] = torch.where(found_inf != 0, earlier, value)
            else:
                state[key] = value


def _dense(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous()


def _put_back(tensor: Tensor, copy: Tensor) -> None:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    real.copy_(copy)
