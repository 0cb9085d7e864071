r"""A learned scale: W = g Q with Q on the manifold and one number g > 0 for each matrix.

A weight without constraint grows, and with it what its layer returns; a point of the manifold
cannot. So g is trained beside Q, and pulled back to its first value g0. Nothing is stored for it:
g is read from the weight, |W|_F / sqrt(m). With the slope s = <G, Q> of the loss along g,

    Adam:  g <- g + a p (g0 - g) - a g0 u,   a = min(eta sqrt(max(n, m)) / g0, 0.01)

where u = s_1 / (sqrt(s_2) + eps) is the quotient of both averages of s: where all entries of W move
by eta along Q, g moves by about eta sqrt(n). eta is the learning rate of W, that of Q is eta / g0.
Muon's learning rate is a spectral norm, and g moves by it without sqrt(max(n, m)). In SGD

    SGD:   v <- mu v + s,   g <- g + eta p (g0 - g) - eta v / m,   and Q moves along G / g,

so that to first order W moves by -eta times its Riemannian gradient on the set of all g Q: in the
Euclidean metric, the part of the gradient that is tangent to this set.

g changes by at most a factor e in a step, and stays between g0 / 10,000 and 10,000 g0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.functional.flows import Move, Scalar, Tensors
from stiefel_opt.numerics.device import Reader, is_cpu, numbers_on
from stiefel_opt.numerics.linalg import (
    LOCAL_SUMS,
    Packed,
    Sums,
    dot,
    frobenius_norm,
    inner_product,
    square_norm,
)

PULL: Final = 0.3  # p, by default
CAP: Final = 0.01  # the most that a may be
_LIMIT: Final = 1e4  # of g over its first value, and of its inverse

# Names of state: both averages of the slope in Adam, each with the sum of its weights, 1 - beta^t
# since they began; and the momentum of the slope in SGD.
MOMENTS: Final = "scale_moments"
MOMENTUM: Final = "scale_momentum"
SCALE: Final = "scale"  # the new g itself, which is not kept


def norm_of(W: Tensor, sums: Sums) -> Tensor:
    """Return |W|_F of each matrix, ``(k, 1, 1)``, wherever its rows are."""
    return frobenius_norm(W) if sums.are_local else sums.add(square_norm(W)).sqrt()


def over_scale(tensor: Tensor, norm: Tensor, columns: int, factor: float = 1.0) -> Tensor:
    """Return ``factor`` times a tensor over g."""
    if is_cpu(tensor):  # where one call more costs less than its memory
        return tensor / (norm * (1 / (factor * math.sqrt(columns))))
    value = factor * math.sqrt(columns)
    return torch.addcdiv(numbers_on(tensor, 0.0), tensor, norm, value=value)


def factors_of(W: Tensor, sums: Sums, *, looks: bool) -> tuple[Tensor, Tensor]:
    """Return Q and |W|_F; ``looks``: the values may come from outside, and may be zeros."""
    norm, finite = norm_of(W, sums), torch.finfo(W.dtype)
    norm = norm.clamp(finite.tiny, finite.max) if looks else norm
    return over_scale(W, norm, W.size(-1)), norm


def limited(norm: Tensor, columns: int, start: float) -> Tensor:
    """Return a norm for which g is within its limits."""
    unit = start * math.sqrt(columns)
    return norm.clamp(unit / _LIMIT, unit * _LIMIT)


def norm_at(
    X: Tensor, unscaled: Tensor, norm: Tensor, sums: Sums, start: float, starts: Tensor
) -> Tensor:
    """Return the norm of projected points: g is the mean singular value, or its start."""
    mean = sums.add(inner_product(X, unscaled)) / X.size(-1)
    norm = torch.where(starts, start * math.sqrt(X.size(-1)), norm * mean)
    return limited(norm, X.size(-1), start)


def with_learned_scale(
    rule: Callable[..., Move],
    step_scale: Callable[..., tuple[Tensor, Tensors]],
    norm: Tensor,
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
    is_embedded: bool = False,
) -> Move:
    """Return what a rule returns for Q, with the new g as ``scale``, ``(k, 1, 1)``, in the state.

    Args:
        rule: As :func:`stiefel_opt.functional.adam`: moves Q.
        step_scale: Moves g: :func:`sgd_scale` or :func:`adam_scale`.
        norm: |W|_F, ``(k, 1, 1)``.
        X: Q, orthonormal, ``(k, n, m)``.
        G: The gradient of W, same shape.
        state: That of both rules.
        lr: eta / g0, the learning rate of Q.
        step, reader: as in :func:`stiefel_opt.functional.adam`.
        sums: Products of tall matrices summed over the rows; ``scale`` is g0.
        is_embedded: Q moves along G g0 / g; else along G, whose length is of no account to Adam.
    """
    m, start = X.size(-1), sums.scale
    size = {"rows": X.size(-2) if sums.rows is None else sums.rows, "columns": m, "start": start}
    slope = sums.add(dot(G, X))
    if is_embedded:
        G = over_scale(G, norm, m, start)
    new_X, new, length = rule(X, G, state, lr=lr, step=step, sums=sums, reader=reader)
    room: Tensors = new if isinstance(new, Packed) else {}
    scale, of_scale = step_scale(norm, slope, state, lr=lr * start, step=step, room=room, **size)
    new = new if isinstance(new, Packed) else dict(new)
    new |= {**of_scale, SCALE: scale}
    return new_X, new, length


def sgd_scale(
    norm: Tensor,
    slope: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    columns: int,
    start: float = 1.0,
    rows: int = 0,  # noqa: ARG001 - every rule is given them
    step: Scalar = 1,  # noqa: ARG001
    momentum: float = 0.9,
    nesterov: bool = False,
    pull: float = PULL,
    room: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, Tensors]:
    """Return the new g and its new state after a step of SGD.

    Args:
        norm: |W|_F = sqrt(m) g, ``(k, 1, 1)``.
        slope: s, same shape.
        state: v as ``scale_momentum``, same shape. Empty: no momentum.
        lr: eta, a number or a tensor.
        columns, rows: m and n of the whole matrices.
        start: g0.
        momentum, nesterov: as in ``torch.optim.SGD``.
        pull: p.
        room: Memory for the new state, by name.
    """
    new: Tensors = {}
    if MOMENTUM in state:
        out = room.get(MOMENTUM)
        new[MOMENTUM] = torch.add(slope, state[MOMENTUM], alpha=momentum, out=out)
        slope = torch.add(slope, new[MOMENTUM], alpha=momentum) if nesterov else new[MOMENTUM]
    pulled = _pulled(norm, lr * pull, columns, start)
    if isinstance(lr, Tensor):
        moved = pulled - slope * (lr / columns)
    else:
        moved = torch.sub(pulled, slope, alpha=lr / columns)
    return _bounded(moved, norm, columns, start), new


def adam_scale(
    norm: Tensor,
    slope: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    rows: int,
    columns: int,
    start: float = 1.0,
    step: Scalar = 1,  # noqa: ARG001 - the state knows how long its averages are
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    spectral: bool = False,
    pull: float = PULL,
    room: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, Tensors]:
    """Return the new g and its new state after a step of Adam.

    Args:
        norm, slope, columns, rows, start, pull, room: as in :func:`sgd_scale`.
        state: Averages of s and s^2 and the sums of their weights as ``scale_moments``,
            ``(k, 1, 4)``.
        lr: eta, a number or a tensor.
        betas, eps: as in ``torch.optim.Adam``, eps under the root.
        spectral: eta is a spectral norm: no root of the size.
    """
    powers = slope.pow(numbers_on(slope, 1.0, 2.0, 0.0, 0.0))
    weights = numbers_on(slope, *(1 - betas[0], 1 - betas[1]) * 2)
    moments = torch.lerp(state[MOMENTS], powers, weights, out=room.get(MOMENTS))
    least = max(eps * eps, torch.finfo(slope.dtype).tiny)
    means = torch.addcdiv(numbers_on(slope, 0.0, least), moments[..., :2], moments[..., 2:])
    mean, root = means[..., :1], means[..., 1:].rsqrt()
    rate = lr * (1.0 if spectral else math.sqrt(max(rows, columns)))
    most = CAP * start
    if isinstance(rate, Tensor):
        rate = rate.clamp(max=most)
        moved = _pulled(norm, rate * (pull / start), columns, start) - rate * (mean * root)
    else:
        rate = min(rate, most)
        pulled = _pulled(norm, rate * (pull / start), columns, start)
        moved = torch.addcmul(pulled, mean, root, value=-rate)
    return _bounded(moved, norm, columns, start), {MOMENTS: moments}


def _pulled(norm: Tensor, share: Scalar, columns: int, start: float) -> Tensor:
    """Return g, moved towards its start by a share of the way."""
    unit = 1 / math.sqrt(columns)
    if isinstance(share, Tensor):
        share = share.clamp(max=1.0)
        return norm * unit * (1 - share) + share * start
    share = min(share, 1.0)
    return torch.rsub(norm, share * start, alpha=(share - 1) * unit)


def _bounded(scale: Tensor, norm: Tensor, columns: int, start: float) -> Tensor:
    """Return a new g within a factor e of g, and within its limits."""
    unit = 1 / math.sqrt(columns)
    bounds = norm * numbers_on(norm, unit / math.e, unit * math.e)
    bounds = bounds.clamp(start / _LIMIT, start * _LIMIT)
    return torch.clamp(scale, bounds[..., :1], bounds[..., 1:])
