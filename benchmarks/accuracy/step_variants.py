"""Steps that the package does not have, from its public functions, to be measured beside its own.

A virtual radius in StiefelSGD and StiefelMuon, and adaptive steps whose friction and factor are
those of several matrices together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from stiefel_opt import functional

GROWTH = "radius_growth"  # r^2 - 1, as the package calls it
SCOPES = "matrix", "heads", "all"

# ---- a virtual radius ----------------------------------------------------------------------------


def with_growth(
    rule: Callable[..., Any],
    length: Callable[[Tensor, Tensor], Tensor | float],
    X: Tensor,
    G: Tensor,
    state: Any,
    *,
    lr: Any,
    **options: Any,
) -> Any:
    """The step of a rule with eta / r, where r^2 <- r^2 + (eta length)^2; r = 1 at first.

    ``length``: by which a step of eta = 1 would lengthen an unconstrained weight, across to it, as
    a part of that weight's own length.
    """
    growth = state[GROWTH] + (lr * length(X, G)) ** 2
    new_X, new, turned = rule(X, G, state, lr=lr * torch.rsqrt(1 + growth), **options)
    return new_X, {**new, GROWTH: growth}, turned


def of_gradient(X: Tensor, G: Tensor, *, momentum: float) -> Tensor:
    """That of a gradient of the canonical metric, which acts in full sooner or later."""
    tangent = G - X @ (G.mT @ X)
    length = torch.linalg.vector_norm(tangent, dim=(-2, -1), keepdim=True)
    return length / (X.size(-1) ** 0.5 * (1 - momentum))


def of_spectral_step(X: Tensor, G: Tensor) -> float:  # noqa: ARG001
    """That of a step whose singular values are all eta."""
    return 1.0


def grown(cls: Any, wrapped: Callable[[Any, Any], Any]) -> Any:
    """A subclass with one more number for each matrix; ``wrapped`` gets its rule and its group."""

    class Grown(cls):  # type: ignore[misc]
        rule = f"{cls.__name__} with a virtual radius"

        def state_for(self, group: Any) -> Any:
            growth = so.optim.State(GROWTH, "1", dtype="real", least=-1.0)
            return (*super().state_for(group), growth)

        def rule_for(self, group: Any) -> Any:
            return wrapped(super().rule_for(group), group)

    return Grown


def by_gradient(rule: Any, group: Any) -> Any:
    return partial(with_growth, rule, partial(of_gradient, momentum=group["momentum"]))


RadiusSGD = grown(so.StiefelSGD, by_gradient)
EntriesSGD = grown(so.StiefelSGD, lambda rule, _: partial(functional.with_radius, rule, "virtual"))
RadiusMuon = grown(so.StiefelMuon, lambda rule, _: partial(with_growth, rule, of_spectral_step))

# ---- one factor for several matrices -------------------------------------------------------------

MOST, LEAST, SPEED = 0.9, {"SGD": 1e-3, "Adam": 0.1}, 0.2
BETA, EPS = 0.999, 1e-8
Parts = tuple[Tensor, Tensor]  # the skew and the normal part of a vector


class SharedFriction(torch.optim.Optimizer):
    """Adaptive steps, "projected", whose sums run over several matrices.

    Args:
        scope: "matrix", as in the package; "heads", the matrices of one parameter, as many in a row
            as the key ``heads`` of the group says; "all", those of the group.
        divided: The velocity is that of the force divided by the roots of Adam's second moments.
    """

    def __init__(self, groups: Any, lr: float, *, scope: str, divided: bool = False) -> None:
        super().__init__(groups, {"lr": lr, "heads": 1})
        self.scope, self.divided = scope, divided

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            members = group["params"]
            sizes = 1, group["heads"], len(members)
            size = sizes[SCOPES.index(self.scope)]
            for first in range(0, len(members), size):
                self._move(members[first : first + size], group["lr"])

    def _move(self, members: list[Tensor], lr: float) -> None:
        shared = self.state[members[0]]
        time = shared["time"] = shared.get("time", 0) + 1
        forces = [force_of(point, point.grad) for point in members]
        taken = forces
        if self.divided:
            pairs = zip(members, forces, strict=True)
            taken = [self._divided(point, force, time) for point, force in pairs]
        square, minus_s = 0.0, 0.0
        for point, force, part in zip(members, forces, taken, strict=True):
            square = square + inner(force, part).clamp(min=0.0)
            if time > 1:
                minus_s = minus_s - inner(force, self.state[point]["velocity"])
        momentum, factor = self._friction(shared, square, minus_s)
        eta = lr * factor
        if self.divided:
            eta = eta * (1 - MOST) / (1 - MOST**time)
        else:
            own = (sum(point.size(-1) for point in members) / square.clamp(min=1e-30)).sqrt()
            shared["unit"] = torch.minimum(shared.get("unit", own), 10 * own)
            eta = eta * shared["unit"]
        for point, part in zip(members, taken, strict=True):
            self._advance(point, part, momentum, eta)

    def _friction(self, shared: Any, square: Tensor, minus_s: Any) -> tuple[Tensor, Tensor]:
        """Return mu and c, `methods/adaptive.py`."""
        slope = shared.get("slope", torch.zeros_like(square))
        minus_s = minus_s + torch.zeros_like(square)
        part = torch.where(slope > 0, minus_s / slope, 0.0).clamp(-0.7, 0.7)
        factor = shared.get("factor", 1.0) * (SPEED * part).exp()
        shared["factor"] = factor.clamp(LEAST["Adam" if self.divided else "SGD"], 1e6)
        bound = torch.where(slope > minus_s, square / (slope - minus_s), math.inf)
        momentum = bound.clamp(max=MOST)
        shared["slope"] = torch.where(bound < MOST, momentum * slope, square + momentum * minus_s)
        return momentum, shared["factor"]

    def _divided(self, point: Tensor, force: Parts, time: int) -> Parts:
        state, found = self.state[point], []
        for name, part in zip(("skew", "normal"), force, strict=True):
            known = state.get(name, torch.zeros_like(part))
            state[name] = BETA * known + (1 - BETA) * part.square()
            found.append(part / ((state[name] / (1 - BETA**time)).sqrt() + EPS))
        return found[0], found[1] - point @ (point.mT @ found[1])

    def _advance(self, point: Tensor, force: Parts, momentum: Tensor, eta: Tensor) -> None:
        """One step of StiefelSGD whose velocity has been multiplied by its friction before."""
        state, (n, m) = self.state[point], point.shape[-2:]
        skew, normal = state.get("velocity", (torch.zeros_like(force[0]), torch.zeros_like(point)))
        known = {"momentum_skew": momentum * skew}
        if n > m:
            nothing = torch.zeros_like(skew)
            known |= {"momentum_unprojected": momentum * normal, "momentum_overlap": nothing}
        gradient = point @ force[0] / 2 + force[1]
        options: dict[str, Any] = {"momentum": 1.0, "transport": "projected"}
        new, kept, _ = functional.sgd(point, gradient, known, lr=eta, **options)
        velocity = functional.evaluated(new, kept)
        new = new @ (1.5 * torch.eye(m, dtype=new.dtype) - new.mT @ new / 2)  # against rounding
        state["velocity"] = velocity[0], torch.zeros_like(point) if n == m else velocity[1]
        point.copy_(new)


def force_of(point: Tensor, gradient: Tensor) -> Parts:
    """Return f and g of the canonical metric; g of a square matrix is 0."""
    within = point.mT @ gradient
    normal = gradient - point @ within
    if point.size(-2) == point.size(-1):
        normal = torch.zeros_like(normal)
    return within - within.mT, normal


def inner(left: Parts, right: Parts) -> Tensor:
    """Return the inner product of the canonical metric, ``(k, 1, 1)``."""
    skew, normal = ((a * b).sum((-2, -1), keepdim=True) for a, b in zip(left, right, strict=True))
    return skew / 2 + normal
