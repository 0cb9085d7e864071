"""By how much the last step turned each weight, told by the state that it left behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stiefel_opt.distributed import whole
from stiefel_opt.functional.flows import metric_parameter
from stiefel_opt.geometry import widened
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.checks import reading
from stiefel_opt.optim.plain import Group
from stiefel_opt.optim.state import suffix_of

if TYPE_CHECKING:
    from stiefel_opt.optim.base import StiefelOptimizer

Parts = tuple[Tensor, Tensor]  # Z, skew, and U, normal to the point


@torch.no_grad()
def angles_of(optimizer: StiefelOptimizer) -> dict[Tensor, float]:
    r"""Return the largest angle between a vector X v and its place before the step, in radians.

    For a step along eta (X Z + U) it is the arc tangent of eta times the largest singular value, to
    first order in eta. Left out are parameters that have not moved, and those without momentum
    whose gradient is gone: there is no other trace of a step. Left out is also what is not finite:
    the angle of a skipped gradient, where there is no momentum, or of a momentum that it spoiled.
    """
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            manifold, state = reading(parameter, group), optimizer.state.get(parameter)
            if manifold is None or not state or parameter.is_meta or float(state["step"]) < 1:
                continue
            longest = optimizer._longest_step(group, parameter, manifold)
            if longest is not None:
                found[parameter] = math.atan(longest)
    return found


def longest_step(
    optimizer: StiefelOptimizer, group: Group, parameter: Tensor, manifold: Stiefel
) -> float | None:
    """Return the largest singular value of eta (X Z + U); None if nothing is left to tell it."""
    if "momentum_skew" in optimizer.state[parameter]:
        parts = _by_momentum(optimizer, group, parameter, manifold)
    elif parameter.grad is not None:
        parts = _by_gradient(group, parameter, manifold)
    else:
        return None
    longest = 0.0
    for skew, normal in parts:
        inner, size = skew.mH @ skew, normal.mH @ normal
        step = optimizer._step_along(float(group["lr"]) / manifold.scale, inner, size)
        square = (inner + size) * step * step
        if not bool(square.isfinite().all()):
            return None
        longest = max(longest, float(torch.linalg.eigvalsh(square).amax()))
    return math.sqrt(longest)


def _by_gradient(group: Group, parameter: Tensor, manifold: Stiefel) -> list[Parts]:
    a = metric_parameter(group["metric"])
    value = widened(whole(parameter.detach()))
    grad = widened(whole(parameter.grad))  # type: ignore[arg-type]
    parts = []
    for index, (part, own) in enumerate(manifold.blocks(value)):
        point, force = own.matrices(part) / own.scale, own.matrices(manifold.parts(grad)[index])
        inner = point.mH @ force
        parts.append(((inner - inner.mH) / (2 * (1 - a)), force - point @ inner))
    return parts


def _by_momentum(
    optimizer: StiefelOptimizer, group: Group, parameter: Tensor, manifold: Stiefel
) -> list[Parts]:
    """Return (Z, U) of each range; of rules with second moments, divided as the step did."""
    state, velocity = optimizer.state[parameter], optimizer.velocity(parameter)
    pairs = [velocity] if isinstance(velocity[0], Tensor) else zip(*velocity, strict=True)
    if "betas" not in group:
        return list(pairs)
    parts = []
    first, second = (1 - beta ** float(state["step"]) for beta in group["betas"])
    blocks = manifold.blocks(whole(parameter.detach()))
    for index, ((skew, normal), (part, own)) in enumerate(zip(pairs, blocks, strict=True)):
        prefix = "max_exp_avg_sq_" if group["amsgrad"] else "exp_avg_sq_"
        squares = {
            kind: whole(state[name]) / second
            for kind in ("skew", "normal", "norm")
            if (name := prefix + kind + suffix_of(index)) in state
        }
        if "norm" in squares:  # one number for each matrix
            root = (squares["norm"] + group["eps"]).sqrt().reshape(*skew.shape[:-2], 1, 1)
            skew, normal = skew / root, normal / root
        else:
            skew = skew / (squares["skew"].reshape(skew.shape).sqrt() + group["eps"])
            if "normal" in squares:
                normal = normal / (own.matrices(squares["normal"]).sqrt() + group["eps"])
                point = own.matrices(part).to(normal.dtype) / own.scale
                normal = normal - point @ (point.mH @ normal)
        parts.append((skew / first, normal / first))
    return parts
