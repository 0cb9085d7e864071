"""The two families of rules: which function of torch moves plain tensors, and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.checks import check_adam, check_sgd
from stiefel_opt.optim.plain import Group, init_adam, step_adam, step_sgd

_NO_OPTIONS = ("self", "params", "__class__")


class SGDLike(StiefelOptimizer):
    """Plain tensors move by ``torch.optim.SGD``: momentum, dampening, weight decay, Nesterov."""

    _sparse_allowed = True

    @override
    def _check_options(self, group: Group) -> None:
        check_sgd(group)

    @override
    def _step_plain(
        self,
        group: Group,
        parameters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[Group],
        left: Tensor | None = None,
    ) -> None:
        step_sgd(group, parameters, grads, states, left)


class AdamLike(StiefelOptimizer):
    """Plain tensors move by ``torch.optim.Adam``, or AdamW with ``decoupled_weight_decay``."""

    @override
    def _check_options(self, group: Group) -> None:
        check_adam(group)

    @override
    def _init_plain(self, group: Group, parameter: Tensor) -> None:
        init_adam(group, parameter, self.state[parameter])

    @override
    def _step_plain(
        self,
        group: Group,
        parameters: list[Tensor],
        grads: list[Tensor],
        states: Sequence[Group],
        left: Tensor | None = None,
    ) -> None:
        step_adam(group, parameters, grads, states, left)


def options_of(arguments: dict[str, Any]) -> Group:
    """Return the arguments of a constructor as the defaults of its groups."""
    return {name: arguments[name] for name in arguments if name not in _NO_OPTIONS}
