"""Which options make sense, and what those shared by several rules mean."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from stiefel_opt._checks import check_choice, check_flag, check_range, fail
from stiefel_opt.functional.momentum import METRICS
from stiefel_opt.optim.batch import Batch
from stiefel_opt.optim.readings import Group

__all__ = ["check_adam", "check_common", "check_metric", "check_sgd", "force_of"]


NONFINITE: Final = ("skip", "raise", "ignore")


def check_common(group: Group) -> None:
    """Raise unless the options that all optimizers share make sense."""
    check_choice("nonfinite", group["nonfinite"], NONFINITE)
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(fail("lr", "have one element", f"shape {tuple(lr.shape)}"))
        if lr.device.type == "cpu":
            check_range("lr", float(lr), 0.0)
    else:
        check_range("lr", lr, 0.0)
    check_range("weight_decay", group["weight_decay"], 0.0)
    check_flag("maximize", group["maximize"])
    if group["differentiable"] is not False:
        raise ValueError(
            fail(
                "differentiable",
                "be False",
                group["differentiable"],
                "differentiate through a parametrization, stiefel_opt.orthogonal, instead",
            )
        )
    for name in ("foreach", "fused"):
        if group[name] is not None:
            check_flag(name, group[name])
    if group["foreach"] and group["fused"]:
        raise ValueError(fail("fused", "not be True together with foreach", True))


def check_metric(group: Group) -> None:
    """Raise unless the metric is one."""
    if isinstance(group["metric"], str):
        check_choice("metric", group["metric"], METRICS)
    else:
        check_range("metric", group["metric"], -math.inf, 1.0, open_low=True)


def check_sgd(group: Group) -> None:
    """Raise unless the options of SGD make sense, the common ones included."""
    check_common(group)
    check_range("momentum", group["momentum"], 0.0)
    check_range("dampening", group["dampening"], -math.inf)
    check_flag("nesterov", group["nesterov"])
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        given = f"momentum {group['momentum']} and dampening {group['dampening']}"
        raise ValueError(fail("nesterov", "come with momentum > 0 and dampening = 0", given))


def check_adam(group: Group) -> None:
    """Raise unless the options of Adam make sense, the common ones included."""
    check_common(group)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(fail("betas", "be two numbers in [0, 1)", repr(betas)))
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, 0.0, 1.0)
    check_range("eps", group["eps"], 0.0)
    for name in ("amsgrad", "capturable", "decoupled_weight_decay"):
        check_flag(name, group[name])
    if isinstance(group["lr"], Tensor) and group["foreach"] and not group["capturable"]:
        raise ValueError(
            fail("lr", "be a number with foreach=True", "a tensor", "or set capturable=True")
        )


def force_of(group: Group, batch: Batch) -> float | Tensor:
    """Return the factor on the gradient in SGD: dampening from the second step on, and the sign."""
    sign = -1.0 if group["maximize"] else 1.0
    if group["dampening"] == 0 or group["momentum"] == 0:
        return sign
    number, damped = batch.step_number(), sign * (1.0 - group["dampening"])
    if isinstance(number, Tensor):
        return torch.where(number == 1, sign, damped).to(batch.state["momentum_skew"].dtype)
    return sign if number == 1 else damped
