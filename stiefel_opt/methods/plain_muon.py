"""Torch's own Muon on plain tensors of two dimensions, AdamW on the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, muon
from typing_extensions import override

from stiefel_opt.optim import AdamLike, Group, StateDict, step_adam


def init_muon(parameter: Tensor, state: Group) -> None:
    """Make the state of ``torch.optim.Muon`` for a tensor that has none."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def step_muon(
    group: Group, parameters: list[Tensor], grads: list[Tensor], states: Sequence[Group]
) -> None:
    """Apply ``torch.optim.Muon`` with the options of ``group``; arguments as :func:`step_sgd`."""
    for parameter, state in zip(parameters, states, strict=True):
        init_muon(parameter, state)
    muon(
        parameters,
        [-grad for grad in grads] if group["maximize"] else grads,
        [state["momentum_buffer"] for state in states],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        ns_coefficients=(DEFAULT_A, DEFAULT_B, DEFAULT_C),
        ns_steps=DEFAULT_NS_STEPS,
        eps=EPS,
        adjust_lr_fn=None,
        has_complex=False,
    )


class MuonLike(AdamLike):
    """Plain tensors of two dimensions move by ``torch.optim.Muon`` where ``plain`` says so."""

    @override
    def init_plain(self, group: Group, parameter: Tensor, state: StateDict) -> None:
        if _follows_muon(group, parameter):
            init_muon(parameter, state)
        else:
            super().init_plain(group, parameter, state)

    @override
    def _step_plain(
        self,
        group: Group,
        parameters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[StateDict],
        found_inf: Tensor | None = None,
    ) -> None:
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for item in zip(parameters, grads, states, strict=True):
            is_whole = item[0] in self.state  # rows of a constrained parameter are not
            kinds[is_whole and _follows_muon(group, item[0])].append(item)
        by_adam, by_muon = (list(map(list, zip(*kind, strict=True))) for kind in kinds)
        if by_adam:
            step_adam(group, by_adam[0], by_adam[1], by_adam[2], found_inf)
        if by_muon:
            step_muon(group, *by_muon)


def _follows_muon(group: Group, parameter: Tensor) -> bool:
    """Say whether a plain parameter of this kind moves by Muon."""
    return group["plain"] == "muon" and parameter.ndim == 2 and not parameter.is_complex()
