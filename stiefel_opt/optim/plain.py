"""Torch's own SGD and Adam, on plain parameters and on the plain rows of constrained ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from stiefel_opt.optim.readings import Group
from stiefel_opt.optim.stack import Stack

__all__ = ["adam_moments", "step_adam", "step_adam_rows", "step_rows", "step_sgd", "step_sgd_rows"]


def step_sgd(group: Group, parameters: list[Tensor], state: Any) -> None:
    """Apply ``torch.optim.SGD`` with the options of ``group``; ``state[p]`` is that of each p."""
    grads = [p.grad for p in parameters if p.grad is not None]
    buffers = []
    if group["momentum"] != 0:
        buffers = [state[p].get("momentum_buffer") for p in parameters]
    _torch_sgd(group, parameters, grads, buffers)
    if group["momentum"] != 0:
        for parameter, buffer in zip(parameters, buffers, strict=True):
            state[parameter]["momentum_buffer"] = buffer


def step_sgd_rows(
    group: Group,
    parameters: list[Tensor],
    grads: list[Tensor],
    states: list[Group],
    name: str = "momentum_normal",
) -> None:
    """Apply ``torch.optim.SGD`` to rows; their momentum lies in the state ``name``."""
    buffers: list[Tensor | None] = []
    if group["momentum"] != 0:
        # The first momentum is the gradient, undamped: with dampening zeros would not do.
        begun = group["dampening"] == 0 or torch.compiler.is_compiling()
        buffers = [state[name] if begun or bool(state["step"] > 0) else None for state in states]
    _torch_sgd(group, parameters, grads, buffers)
    for buffer, state in zip(buffers, states, strict=False):
        if buffer is not None and buffer is not state[name]:
            state[name].copy_(buffer)


def adam_moments(group: Group) -> list[str]:
    """Return torch's names of Adam's moments."""
    return ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])


def step_adam(group: Group, parameters: list[Tensor], state: Any) -> None:
    """Apply ``torch.optim.Adam`` with the options of ``group``; ``state[p]`` is that of each p."""
    for parameter in parameters:
        own = state[parameter]
        if not own:
            # as torch: float64 only where that is the default, and never for fused
            wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
            own["step"] = torch.zeros(
                (),
                dtype=torch.float64 if wide else torch.float32,
                device=parameter.device if group["capturable"] or group["fused"] else "cpu",
            )
            for name in adam_moments(group):
                own[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    grads = [p.grad for p in parameters if p.grad is not None]
    _torch_adam(group, parameters, grads, [state[p] for p in parameters])


def step_adam_rows(
    group: Group,
    parameters: list[Tensor],
    grads: list[Tensor],
    states: list[Group],
    names: list[str],
) -> None:
    """Apply ``torch.optim.Adam`` to rows; their moments lie in the states ``names``."""
    on_device = group["capturable"] or group["fused"]
    plain = []
    for state in states:
        moments = zip(adam_moments(group), names, strict=True)
        plain.append({torch_name: state[name] for torch_name, name in moments})
        plain[-1]["step"] = state["step"] if on_device else state["step"].cpu()
    _torch_adam(group, parameters, grads, plain)


def step_rows(
    stack: Stack,
    rule: Callable[[Group, list[Tensor], list[Tensor], list[Group]], None],
    group: Group,
) -> None:
    """Move the plain rows of parameters that are constrained in part, by ``rule``."""
    split = stack.manifold.plain_parts
    parameters = [part for p in stack.parameters for part in split(p)]
    dtype = parameters[0].dtype
    grads = [part.to(dtype).resolve_conj() for grad in stack.grads for part in split(grad)]
    states = []
    for state, step, parameter in zip(stack.states, stack.steps, stack.parameters, strict=True):
        own = {n: t for n, t in state.items() if t is not parameter}  # a master is no state here
        rows = {n: split(t) for n, t in own.items() if t.shape == parameter.shape}
        for index in range(len(split(parameter))):
            states.append({n: parts[index] for n, parts in rows.items()})
            states[-1]["step"] = step - 1  # torch counts this step itself
    if parameters and not group["fused"]:
        rule(group, parameters, grads, states)
    elif parameters:  # fused kernels read memory straight through, also where rows are columns
        dense = [part.contiguous() for part in parameters]
        dense_states = [{n: t.contiguous() for n, t in state.items()} for state in states]
        dense_grads = [grad.contiguous() for grad in grads]
        rule(group, dense, dense_grads, dense_states)
        for state, dense_state in zip(states, dense_states, strict=True):
            parameters, dense = [*parameters, *state.values()], [*dense, *dense_state.values()]
        for part, copy in zip(parameters, dense, strict=True):
            if part is not copy:
                part.copy_(copy)


def _torch_sgd(
    group: Group, parameters: list[Tensor], grads: list[Tensor], buffers: list[Any]
) -> None:
    sgd(
        parameters,
        grads,
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        has_sparse_grad=any(grad.is_sparse for grad in grads),
        foreach=group["foreach"],
        fused=group["fused"],
    )


def _torch_adam(
    group: Group, parameters: list[Tensor], grads: list[Tensor], states: list[Group]
) -> None:
    adam(
        parameters,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
        [state["step"] for state in states],
        amsgrad=group["amsgrad"],
        has_complex=any(parameter.is_complex() for parameter in parameters),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        foreach=group["foreach"],
        capturable=group["capturable"],
        fused=group["fused"],
        decoupled_weight_decay=group["decoupled_weight_decay"],
    )
