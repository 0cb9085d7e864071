r"""The virtual radius: one number for each matrix, by which its learning rate is divided.

The steps of Adam have entries of about eta, whatever the gradient is. An unconstrained weight grows
by them, as most of a step is across to the weight, and turns less and less; a point of the manifold
cannot grow. So one number for each matrix, r, grows in its place, and X takes the step of length
eta / r:

    r^2 <- (1 - eta d)^2 r^2 + (eta sqrt(n))^2,      r = 1 at first

with d the decoupled weight decay. Without decay the angle of a step falls as 1 / sqrt(t) in the
end, at every learning rate; with it the angle tends to sqrt(2 eta d). Kept is r^2 - 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.functional.flows import Move, Scalar
from stiefel_opt.numerics.device import Reader, reader_for
from stiefel_opt.numerics.linalg import LOCAL_SUMS, Sums

# The name of r^2 - 1 in the state.
GROWTH: Final = "radius_growth"


def with_radius(
    rule: Callable[..., Move],
    radius: str | float,
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    weight_decay: float = 0.0,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
    **options: Any,
) -> Move:
    r"""Return the step of a rule whose steps have entries of about eta, with learning rate eta / r.

    Args:
        rule: As :func:`stiefel_opt.functional.adam`.
        radius: "virtual", as above; "angle", r = sqrt(n), so that eta is about the angle of a step;
            or r, a number that stays.
        state: That of the rule, and for "virtual" r^2 - 1 as ``radius_growth``, ``(k, 1, 1)``,
            which starts as 0.
        weight_decay: d, decoupled.
        sums: Its ``scale`` s has divided eta: the decay is of eta s, as is the angle of "angle".

    Note: What r grows by is the nominal length of a step, eta sqrt(n), and not that of the step
        itself: gradients that are independent of each other act in full, sooner or later, and equal
        ones do so at once.
    """
    reader, n = reader or reader_for(X), X.size(-2) if sums.rows is None else sums.rows
    if radius != "virtual":
        divided = lr / (math.sqrt(n) / sums.scale if isinstance(radius, str) else radius)
        return rule(X, G, state, lr=divided, sums=sums, reader=reader, **options)
    decay = (1 - lr * sums.scale * weight_decay) ** 2
    growth, divided, largest = state[GROWTH], lr, torch.finfo(state[GROWTH].dtype).max / 2
    # a number costs the rule less
    number: float | None = None
    is_one = reader.is_exact and growth.numel() == 1
    if not isinstance(lr, Tensor):
        number = growth.item() if is_one else reader.same(GROWTH, growth)
    if number is not None:
        number = min(float(number * decay + (lr * lr * n - (1 - decay))), largest)
        divided = lr / math.sqrt(1 + number)
        if not is_one:
            reader.keep(GROWTH, number)
    else:
        growth = (growth * decay + (lr * lr * n - (1 - decay))).clamp(max=largest)
        divided = lr * torch.rsqrt(1 + growth)
    new_X, new, length = rule(X, G, state, lr=divided, sums=sums, reader=reader, **options)
    if number is None:
        return new_X, {**new, GROWTH: growth}, length
    if GROWTH not in new:  # there may be memory for it
        new = {**new, GROWTH: torch.empty_like(growth)}
    new[GROWTH].fill_(number)
    return new_X, new, length
