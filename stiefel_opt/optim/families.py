"""Families of optimizers by the rule of torch that moves their plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_range, fail
from stiefel_opt.functional import learned_scale
from stiefel_opt.functional.flows import Scalar
from stiefel_opt.functional.learned_scale import adam_scale, sgd_scale
from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.checkpoint import TorchRule
from stiefel_opt.optim.moves import Rule, ScaleRule
from stiefel_opt.optim.state import State, StateDict
from stiefel_opt.optim.torch_rules import (
    Group,
    init_adam,
    step_adam,
    step_sgd,
)

_NO_OPTIONS: Final = ("self", "params", "__class__")
_PULL: Final = {"scale_pull": learned_scale.PULL}
_MOMENTUM: Final = State(learned_scale.MOMENTUM, "1", dtype="real", of_scale=True)
SCALE_MOMENTS: Final = (State(learned_scale.MOMENTS, "4", dtype="real", of_scale=True),)


class SGDLike(StiefelOptimizer):
    """Base of optimizers whose plain tensors move by ``torch.optim.SGD``, by its options.

    Options that ``defaults`` lacks are torch's. Checkpoints of ``torch.optim.SGD`` can be loaded;
    constrained tensors begin without momentum.
    """

    plain_is_elementwise = True
    _options_of_torch: ClassVar[Group] = {
        "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
        "maximize": False, "foreach": None, "fused": None, **_PULL,
    }  # fmt: skip
    _sparse_allowed = True
    _torch_rule = TorchRule(
        "torch.optim.SGD",
        frozenset({"momentum_buffer"}),
        frozenset({"momentum", "dampening", "nesterov"}),
    )

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_range("momentum", group["momentum"], 0.0)
        check_range("dampening", group["dampening"], float("-inf"))
        check_flag("nesterov", group["nesterov"])
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            given = f"momentum {group['momentum']} and dampening {group['dampening']}"
            raise ValueError(fail("nesterov", "come with momentum > 0 and dampening = 0", given))

    def bound(self, group: Group, rule: Callable[..., Any], *names: str) -> Rule:
        """Return ``rule`` with ``momentum``, ``nesterov`` and more options bound.

        ``names`` are the further options. For ``maximize`` and ``dampening`` the gradient is
        multiplied before the rule sees it.
        """
        options = {name: group[name] for name in ("momentum", "nesterov", *names)}
        # of gradients from the second step on
        undampened = 1.0 - (group["dampening"] if group["momentum"] else 0.0)
        return with_factor(partial(rule, **options), group["maximize"], undampened)

    @override
    def scale_rule_for(self, group: Group) -> ScaleRule:
        rule = self.bound(group, partial(sgd_scale, pull=group["scale_pull"]))
        return ScaleRule(rule, (_MOMENTUM,) if group["momentum"] else (), is_embedded=True)

    update_plain = _step_plain = staticmethod(step_sgd)


def with_factor(rule: Callable[..., Any], maximize: bool, factor: float = 1.0) -> Rule:
    """Return a rule whose gradient changes its sign, and has a factor from the second step on."""
    if not maximize and factor == 1.0:
        return rule
    first = -1.0 if maximize else 1.0
    return partial(_scaled, rule, first, first * factor)


def _scaled(
    rule: Callable[..., Any],
    first: float,
    later: float,
    X: Tensor,
    G: Tensor,
    *given: Any,
    step: Scalar,
    **options: Any,
) -> Any:
    """Multiply the gradient by ``first`` in the first step, and by ``later`` from then on."""
    if isinstance(step, Tensor):
        G = G * torch.where(step == 1, X.new_tensor(first), X.new_tensor(later))
    else:
        G = G * (first if step == 1 else later)
    return rule(X, G, *given, step=step, **options)


class AdamLike(StiefelOptimizer):
    """Base of optimizers whose plain tensors move by ``torch.optim.Adam``, by its options.

    ``decoupled_weight_decay=True`` is AdamW. Options that ``defaults`` lacks are Adam's.
    Checkpoints of both can be loaded; constrained tensors begin without momentum.
    """

    plain_is_elementwise = True
    _options_of_torch: ClassVar[Group] = {
        "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
        "maximize": False, "foreach": None, "capturable": False, "fused": None,
        "decoupled_weight_decay": False, **_PULL,
    }  # fmt: skip
    _torch_rule = TorchRule(
        "torch.optim.Adam or AdamW",
        frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        frozenset({"betas", "eps", "amsgrad"}),
    )

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(fail("betas", "be two numbers in [0, 1)", repr(betas)))
        for index, beta in enumerate(betas):
            check_range(f"betas[{index}]", beta, 0.0, 1.0)
        check_range("eps", group["eps"], 0.0)
        for name in ("amsgrad", "capturable", "decoupled_weight_decay"):
            check_flag(name, group[name])
        if isinstance(group["lr"], Tensor) and group["foreach"] and not group["capturable"]:
            wanted = "be a number with foreach=True"
            raise ValueError(fail("lr", wanted, "a tensor", "or set capturable=True"))

    def bound(self, group: Group, rule: Callable[..., Any], *names: str) -> Rule:
        """Return ``rule`` with ``betas``, ``eps`` and more options bound.

        ``names`` are the further options. With ``maximize`` the rule sees the gradient with the
        other sign.
        """
        options = {name: group[name] for name in ("betas", "eps", *names)}
        return with_factor(partial(rule, **options), group["maximize"])

    @override
    def scale_rule_for(self, group: Group) -> ScaleRule:
        rule = self.bound(group, partial(adam_scale, pull=group["scale_pull"]))
        return ScaleRule(rule, SCALE_MOMENTS)

    @override
    def init_plain(self, group: Group, parameter: Tensor, state: StateDict) -> None:
        init_adam(group, parameter, state)

    update_plain = _step_plain = staticmethod(step_adam)


def options_of(arguments: dict[str, Any]) -> Group:
    """Return the arguments of a constructor as the defaults of its groups."""
    return {name: arguments[name] for name in arguments if name not in _NO_OPTIONS}
