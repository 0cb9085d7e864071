"""The families of rules: which function of torch moves plain tensors, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.plain import Group, init_adam, init_muon, step_adam, step_muon, step_sgd

_NO_OPTIONS = ("self", "params", "__class__")


class SGDLike(StiefelOptimizer):
    """Plain tensors move by ``torch.optim.SGD``: momentum, dampening, weight decay, Nesterov."""

    _sparse_allowed = True

    @override
    def _step_plain(self, *arguments: Any, **options: Any) -> None:
        step_sgd(*arguments, **options)


class AdamLike(StiefelOptimizer):
    """Plain tensors move by ``torch.optim.Adam``, or AdamW with ``decoupled_weight_decay``."""

    @override
    def _init_plain(self, group: Group, parameter: Tensor) -> None:
        init_adam(group, parameter, self.state[parameter])

    @override
    def _step_plain(self, *arguments: Any, **options: Any) -> None:
        step_adam(*arguments, **options)


class MuonLike(AdamLike):
    """Those with two dimensions move by ``torch.optim.Muon`` where ``plain`` says so."""

    @override
    def _init_plain(self, group: Group, parameter: Tensor) -> None:
        if _follows_muon(group, parameter):
            init_muon(parameter, self.state[parameter])
        else:
            super()._init_plain(group, parameter)

    @override
    def _step_plain(
        self,
        group: Group,
        parameters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[Group],
        left: Tensor | None = None,
    ) -> None:
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for item in zip(parameters, grads, states, strict=True):
            is_whole = item[0] in self.state  # rows of a constrained parameter are not
            kinds[is_whole and _follows_muon(group, item[0])].append(item)
        by_adam, by_muon = (list(map(list, zip(*kind, strict=True))) for kind in kinds)
        if by_adam:
            super()._step_plain(group, *by_adam, left)
        if by_muon:
            step_muon(group, *by_muon)


def _follows_muon(group: Group, parameter: Tensor) -> bool:
    """Say whether a plain parameter of this kind moves by Muon."""
    return group["plain"] == "muon" and parameter.ndim == 2 and not parameter.is_complex()


def options_of(arguments: dict[str, Any]) -> Group:
    """Return the arguments of a constructor as the defaults of its groups."""
    return {name: arguments[name] for name in arguments if name not in _NO_OPTIONS}
