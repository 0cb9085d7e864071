r"""Friction and length of a step that follow the slope of the loss.

Notation of momentum.py. **Friction and factor** of momentum, with F = X f + g and the velocity
v = X Z + U as it was carried to X, in the inner product of the metric, <F, v> = (1 - a) tr f'Z +
tr g'U:

    b = <F, F>,  s = <F, v>
    c  <- c exp(k clip(-s / w, -0.7, 0.7))                  w is -s of the step before, at its start
    mu <- min(mu, b / (w + s))  where w + s > 0
    w  <- b - mu s > 0,   Z <- mu Z - f,   U <- mu U - g,   the step is eta c (X Z + U)

-s / w is the part of the slope that a step has left: 1 where it was too short to notice, 0 at the
minimum along it, negative behind that; s does not see the turn of the coupling. b / (w + s) is the
factor of Dai and Yuan (1999), so that without noise this is a nonlinear conjugate gradient method
without line searches; with noise mu stays what it is. At first c = sqrt(m / b): eta is the angle of
the first step.

**With Adam's second moments** the velocity is that of the divided force, entry by entry

    f~ = f / (sqrt(p/c2) + eps),  g~ = (I - XX') g / (sqrt(q/c2) + eps)
    b = <F, F~>,  s = <F, v>,  Z <- mu Z - f~,  U <- mu U - g~

and w = b - mu s > 0 as before, whatever F is divided by. The step is eta c (1 - b1) / (1 - b1^t)
times X Z + U, with c = 1 at first: eta means what it does in Adam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import fail
from stiefel_opt.functional import (
    NORMAL,
    SKEW,
    Length,
    Move,
    Scalar,
    Tensors,
    advance,
    bias_correction,
    coupling,
    denominator_of,
    metric_parameter,
    normal_force,
    rotate_square,
    second_moments,
    shortened,
    skew_force,
    steepest,
)
from stiefel_opt.numerics import (
    LOCAL_SUMS,
    NO_HINT,
    Hint,
    Numbers,
    Reader,
    Sums,
    add_product_,
    inner_product,
    product,
    reader_for,
)
from stiefel_opt.optim import (
    U_STATE,
    Z_STATE,
    Group,
    Rule,
    State,
    StiefelAdam,
    StiefelOptimizer,
    StiefelSGD,
    largest_of,
    resolved,
)

SLOPE: Final = "slope"
FACTOR: Final = "step_factor"
MOMENTUM: Final = "step_momentum"
UNIT: Final = "step_unit"

# How fast c follows, and how much of the slope counts at most: symmetric, so that noise alone has
# no drift.
_SPEED: Final = 0.2
_MOST: Final = 0.7
# c over its first value. Batches drawn without replacement have gradients that are negatively
# correlated within an epoch, which looks like steps that are too long however short they are. Those
# of Adam do not become shorter with the gradient: at a thousandth of lr they would stop.
_FACTORS_OF_SGD: Final = (1e-3, 1e6)
_FACTORS_OF_ADAM: Final = (0.1, 1e6)
Parts = tuple[Tensor, Tensor | None]  # the skew and, of tall matrices, the normal part of a vector

# A gradient counts as at most so many times as long as the first. The first is only rounding if
# training begins at a minimum, and short if another factor begins at zero; without a limit the
# steps after it would be arbitrarily long.
_SHORT_GRADIENT: Final = 10.0


def adaptive_sgd(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    momentum: float = 0.9,
    nesterov: bool = False,
    metric: str | float = "canonical",
    transport: str = "projected",
    step: Scalar = 1,  # noqa: ARG001 - every rule is given it
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of StiefelSGD, adaptive.

    Args:
        X, G, metric, transport, sums, reader: as in :func:`stiefel_opt.functional.sgd`.
        state: Z as ``momentum_skew``, for n > m U as ``momentum_normal``, and three numbers for
            each matrix, ``(k, 1, 1)``: ``slope`` w, which starts as 0, ``step_factor``, c over its
            first value, which starts as 1, and ``step_unit``, that value, which starts as 0 and
            falls where a gradient is more than 10 times as long as the first. Returned is also mu
            as ``step_momentum``.
        lr: eta, the angle of the first step, a number or ``(k, 1, 1)``.
        momentum: The most that mu may be, less than 1.
        nesterov: X moves along mu Z - f and mu U - g.

    Note: 7 products of n x m by m x m, 8 if "projected", one more off the canonical metric, and one
        more sum over rows. A constant factor on the loss changes nothing.
    Reference: Dai & Yuan, A Nonlinear Conjugate Gradient Method with a Strong Global Convergence
        Property (1999); Sato, A Dai-Yuan-type Riemannian conjugate gradient method (2016).
    """
    a = metric_parameter(metric)
    (S,) = sums((X, G))
    forces = skew_force(S, a), normal_force(X, S, G) if NORMAL in state else None
    b, mu, new = _friction(forces, forces, state, lr, momentum, _FACTORS_OF_SGD, a, sums)
    new[UNIT] = _unit(b, state[UNIT], X.size(-1) * sums.scale**2)
    unit, n = new[FACTOR] * new[UNIT], sums.rows or X.size(-2)
    # A force far below the part of G that is normal to the manifold is mostly rounding of X'X.
    norm = torch.linalg.vector_norm(S, dim=(-2, -1), keepdim=True)
    reader = reader or reader_for(X)
    eta = shortened(norm, lr * unit, min(steepest(S.dtype, n), reader.steepest))
    move = _moved(X, S, forces, state, new, mu, eta, a, nesterov, transport, sums, reader)
    return *move[:2], move[2]._replace(step=2 * eta)  # momentum adds up errors of several steps


def adaptive_adam(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    nesterov: bool = False,
    metric: str | float = "canonical",
    transport: str = "projected",
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of StiefelAdam, adaptive.

    Args:
        X, G, step, eps, metric, transport, sums, reader: as in :func:`stiefel_opt.functional.adam`.
        state: That of :func:`stiefel_opt.functional.adam`, where Z and U have no unit, and two
            numbers for each matrix, ``(k, 1, 1)``: ``slope`` w, which starts as 0, and
            ``step_factor`` c, which starts as 1. Returned is also mu as ``step_momentum``.
        lr: eta, about the size of the entries of the first step, a number or ``(k, 1, 1)``.
        betas: b1, in (0, 1), the most that mu may be, and b2.
        nesterov: X moves along mu Z - f~ and mu U - g~.

    Note: 9 products of n x m by m x m, 10 if "projected", one more off the canonical metric, and
        one more sum over rows. A constant factor on the loss changes nothing but what eps does.
    Reference: that of :func:`adaptive_sgd`.
    """
    a, dtype = metric_parameter(metric), X.real.dtype
    (S,) = sums((X, G))
    forces = skew_force(S, a), normal_force(X, S, G) if NORMAL in state else None
    root = bias_correction(betas[1], step, dtype) ** 0.5
    moments: Tensors = {}

    def divided_by_moments(part: str, force: Tensor) -> Tensor:
        moments.update(second_moments(state, part, force, betas[1]))
        denominator = denominator_of(moments, part, root, eps)
        return torch.div(force, denominator, out=None if X.is_complex() else denominator).mul_(root)

    skew, normal = divided_by_moments("skew", forces[0]), None
    if forces[1] is not None:
        normal = divided_by_moments("normal", forces[1])
        (overlap,) = sums((X, normal))
        normal = add_product_(normal, X, overlap, alpha=-1.0)
    divided = skew, normal
    _, mu, new = _friction(forces, divided, state, lr, betas[0], _FACTORS_OF_ADAM, a, sums)
    of_next = step + 1 if nesterov else step
    eta = lr * new[FACTOR] * ((1 - betas[0]) / bias_correction(betas[0], of_next, dtype))
    reader = reader or reader_for(X)
    new |= moments
    move = _moved(X, S, divided, state, new, mu, eta, a, nesterov, transport, sums, reader)
    # S is not divided; no second moment forgets a gradient that the bound of a step does not show
    return *move[:2], move[2]._replace(inner=None, bound=None)


class _FarReader(Reader):
    """Returns 16 times the number of an earlier step.

    Adaptive steps change their length, so that a bound taken from the last one needs a margin.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader  # no step is too steep any more

    @override
    def number(self, name: str, value: Callable[[], Tensor], hint: Hint = NO_HINT) -> float:
        return 16.0 * self._reader.number(name, value, hint._replace(least=hint.least / 16.0))

    @override
    def numbers(self, asked: Numbers) -> Sequence[float]:
        hints = tuple(hint._replace(least=hint.least / 256.0) for hint in asked.hints)
        known = self._reader.numbers(asked._replace(hints=hints))
        return [256.0 * number for number in known]  # squares


def _friction(
    forces: Parts,
    divided: Parts,
    state: Mapping[str, Tensor],
    lr: Scalar,
    momentum: float,
    factors: tuple[float, float],
    a: float,
    sums: Sums,
) -> tuple[Tensor, Tensor, Tensors]:
    """Return b, mu, and the new w and c, for -F and -F~.

    By induction w > 0: where the bound is active the new w is b - b s / (w + s) = b w / (w + s);
    where it is not, w + s <= 0, so that s < 0, or mu s < mu (w + s) < b.
    """
    w = state[SLOPE]
    slopes = (1 - a) * _slopes(forces[0], divided[0], state[SKEW])
    if forces[1] is not None and divided[1] is not None:
        slopes = slopes + sums.add(_slopes(forces[1], divided[1], state[NORMAL]))
    b, minus_s = slopes.unsafe_chunk(2, dim=-1)
    b = b.clamp(min=0.0)  # <F, F~> of a gradient that is only rounding may be negative
    remaining = torch.where(w > 0, minus_s / w, 0.0).clamp(-_MOST, _MOST)
    factor = (state[FACTOR] * torch.exp(_SPEED * remaining)).clamp(*factors)
    bound = torch.where(w > minus_s, b / (w - minus_s), math.inf)
    is_bound = bound < momentum
    mu = torch.where(is_bound, bound, momentum)
    slope = torch.where(is_bound, mu * w, b + mu * minus_s)  # equal where bound, never negative
    # Of a step that goes nowhere nothing is to be learned.
    return b, mu, {SLOPE: slope * (lr != 0), FACTOR: factor, MOMENTUM: mu}


def _slopes(force: Tensor, divided: Tensor, velocity: Tensor) -> Tensor:
    """Return <F, F~> and <F, v> of each matrix, ``(k, 1, 2)``."""
    return torch.cat([inner_product(force, divided), inner_product(force, velocity)], dim=-1)


def _unit(b: Tensor, unit: Tensor, m: float) -> Tensor:
    """Return the first c, less after a gradient that is far longer than the first."""
    own = (m / b).clamp(max=torch.finfo(b.dtype).max).sqrt()  # b may be hardly a number
    first = torch.where(unit > 0, torch.minimum(unit, _SHORT_GRADIENT * own), own)
    return torch.where(b > 0, first, unit)


def _moved(
    X: Tensor,
    S: Tensor,
    forces: Parts,
    state: Mapping[str, Tensor],
    new: Tensors,
    mu: Tensor,
    eta: Tensor,
    a: float,
    nesterov: bool,
    transport: str,
    sums: Sums,
    reader: Reader,
) -> tuple[Tensor, Tensors, Length]:
    """Add -F~ to mu v, and take the step; ``new`` is the rest of the new state."""
    minus_f, minus_g = forces
    if not reader.is_exact:
        reader = _FarReader(reader)
    new_Z = torch.addcmul(minus_f, mu, state[SKEW])
    direction = torch.addcmul(minus_f, mu, new_Z) if nesterov else new_Z
    if minus_g is None:
        new_X, carried, length = rotate_square(X, lambda: direction, new_Z, eta, transport, reader)
        return new_X, new | carried, length._replace(inner=S)
    turn = coupling(state[SKEW], 1.0, eta, a, reader)
    U = state[NORMAL] if turn is None else product(state[NORMAL], turn)
    new_U = torch.addcmul(minus_g, mu, U)
    V = torch.addcmul(minus_g, mu, new_U) if nesterov else new_U.clone()
    new_X, carried, length = advance(X, V, new_U, direction, new_Z, eta, transport, S, sums, reader)
    return new_X, new | carried, length


# ---- the optimizers -----------------------------------------------------------------------------

_FRICTION: Final = (
    State(SLOPE, "1", dtype="real", least=0.0),
    State(FACTOR, "1", start=1.0, dtype="real", least=0.0),
    State(MOMENTUM, "1", dtype="real"),
    State(UNIT, "1", dtype="real", least=0.0),
)
_DIVIDED: Final = tuple(replace(each, unit="divided") for each in (Z_STATE, U_STATE))


class _Adaptive(StiefelOptimizer):
    """What both classes check, and the numbers that a report shows."""

    def check_most(self, name: str, most: float) -> None:
        """Raise unless the largest momentum ``name`` can be one."""
        if not 0 < most < 1:
            wanted = "be in (0, 1): it is the most momentum that there may be"
            raise ValueError(fail(name, wanted, most))

    def factors_of(self) -> dict[Tensor, float]:
        """Return the largest factor on the learning rate of each weight that has one."""
        return largest_of(self.state, FACTOR)

    def momenta_of(self) -> dict[Tensor, float]:
        """Return the largest momentum of the last step of each weight that chooses it."""
        return largest_of(self.state, MOMENTUM)


class AdaptiveSGD(_Adaptive, StiefelSGD):
    """:class:`StiefelSGD` whose momentum and length of a step follow the slope of the loss.

    They follow the slope along the last step: ``lr`` is the first step's angle, root mean square,
    and ``momentum`` the most that there may be; see :func:`stiefel_opt.methods.adaptive_sgd`. For
    losses without noise; with ``transport="projected"`` it needs fewer steps. A closure must
    evaluate one loss.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params, lr, weight_decay, nesterov, maximize, foreach, fused, differentiable, metric,
            transport, nonfinite, stiefel, cuda_graph: As in :class:`StiefelSGD`.
        momentum: In (0, 1).
        dampening: Must be 0.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Seven products of n x m by m x m a step, eight if "projected", one more off the canonical
        metric; state is one tensor like the parameter, one of m x m and four numbers a matrix.

    Reference:
        Dai & Yuan (1999); Sato, A Dai-Yuan-type Riemannian conjugate gradient method (2016).
    """

    rule = "AdaptiveSGD"
    sums_over_rows = True
    capturable = True

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        self.check_most("momentum", group["momentum"])
        if group["dampening"] != 0:
            raise ValueError(fail("dampening", "be 0", group["dampening"]))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE, *_FRICTION

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, adaptive_sgd, "metric", "transport")


class AdaptiveAdam(_Adaptive, StiefelAdam):
    """:class:`StiefelAdam` whose momentum and length of a step follow the slope of the loss.

    They follow the slope along the last step: entries of the first steps are about ``lr``, and
    ``betas[0]`` is the most momentum that there may be; see
    :func:`stiefel_opt.methods.adaptive_adam`. For losses without noise; with
    ``transport="projected"`` it needs fewer steps. A closure must evaluate one loss.

    Args:
        params, lr, eps, weight_decay, amsgrad, foreach, maximize, capturable, differentiable,
            fused, decoupled_weight_decay, metric, transport, nonfinite, stiefel, cuda_graph: As in
            :class:`StiefelAdam`.
        betas: The first in (0, 1).
        nesterov, radius: As in :class:`StiefelAdam`. Default: None, which is False and 1.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Nine products of n x m by m x m a step, ten if "projected", one more off the canonical
        metric; state is that of :class:`StiefelAdam` and three numbers a matrix.

    Reference:
        That of :class:`AdaptiveSGD`.
    """

    rule = "AdaptiveAdam"
    sums_over_rows = True
    capturable = True

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        self.check_most("betas[0]", group["betas"][0])

    @override
    def resolved(self, group: Group) -> Group:
        return super().resolved(resolved(group, radius=1.0, nesterov=False))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return *_DIVIDED, *self.moments_for(group), *_FRICTION[:3]

    @override
    def rule_for(self, group: Group) -> Rule:
        options = ("nesterov", "metric", "transport")
        return self.by_radius(group, self.bound(self.resolved(group), adaptive_adam, *options))
