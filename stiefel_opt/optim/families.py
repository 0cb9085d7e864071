"""The two families of rules: which function of torch moves plain tensors, and its options."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.plain import Group, init_adam, step_adam, step_sgd

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


def options_of(arguments: dict[str, Any]) -> Group:
    """Return the arguments of a constructor as the defaults of its groups."""
    return {name: arguments[name] for name in arguments if name not in _NO_OPTIONS}
