r"""Cayley SGD and Adam of Li, Li & Todorovic (ICLR 2020): an iterated Cayley map.

With the notation of :mod:`stiefel_opt.methods.descent`, the momentum M <- mu M - G and its
tangent part M - X sym(X'M) = XT + V, a step is

    W = What - What',  What = M X' - X (X'M) X' / 2,          so that W X = XT + V
    alpha = min(eta, 1 / (|W| + eps)),                        |W|^2 = |T|^2 + 2 tr V'V
    Y <- X + alpha W X,  then s times  Y <- X + alpha/2 W (X + Y),   or exactly  cay(alpha W) X.

W X is kept as momentum and projected onto the next tangent space. W maps the span of X and V to
itself, so that Y = XA + VB and a whole iteration is of m x m:

    A <- I + alpha/2 (T (I + A) - V'V B),   B <- alpha/2 (I + A).

Y'Y = A'A + B'V'VB is off I by at most about 4 t^(s+2) for t = alpha |W| / sqrt(8). It is known
without a tall product, so Y is replaced by its polar factor, where released implementations leave
that error in X and orthogonalise at random, once in a hundred steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_integer
from stiefel_opt.functional import (
    METRICS,
    NORMAL,
    PULL,
    SKEW,
    Length,
    Move,
    Scalar,
    accumulated,
    bias_correction,
    normal_force,
    shortened,
    skew_force,
)
from stiefel_opt.methods.descent import carried
from stiefel_opt.methods.retractions import move_along_cayley
from stiefel_opt.numerics import (
    LOCAL_SUMS,
    Reader,
    Sums,
    add_product_,
    add_to_diagonal_,
    cayley,
    product,
    reader_for,
    roots,
    square_norm,
    trace_of,
)
from stiefel_opt.optim import (
    U_STATE,
    Z_STATE,
    AdamLike,
    Group,
    Rule,
    SGDLike,
    State,
    StiefelOptimizer,
    options_of,
)
from stiefel_opt.tags import Stiefel

# Names of state: |G|^2, averaged, and its running maximum.
SQUARE = "exp_avg_sq_norm"
MAX_SQUARE = "max_exp_avg_sq_norm"
_TINY = 1e-8  # added to |W|


def cayley_sgd(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar = 1.0,  # noqa: ARG001
    momentum: float = 0.9,
    nesterov: bool = False,
    steps: int = 2,
    exact: bool = False,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of CayleySGD.

    Args:
        X, G, state, lr, step, sums, reader: as in
            :func:`stiefel_opt.methods.rgd`, with T and V of the momentum M <- mu M - G.
        momentum, nesterov: mu; whether X moves along mu M - G.
        steps, exact: s, the number of iterations; whether to solve for the Cayley map instead.

    Note: 8 products of n x m by m x m; with ``exact`` one fewer and one LU solve of m x m.
    Reference: Li, Li & Todorovic (2020), Algorithm 1.
    """
    reader, V = reader or reader_for(X), state.get(NORMAL)
    (S,) = sums((X, G))
    turn = skew_force(S, METRICS["euclidean"])
    new_T, turn = accumulated(turn, state[SKEW], momentum, nesterov=nesterov)
    new_V = direction = None
    if V is not None:
        minus_g = normal_force(X, S, G)
        new_V, direction = accumulated(minus_g, V, momentum, nesterov=nesterov)
    new_X, length = _transform(X, turn, direction, lr, 1.0, steps, exact, sums, reader, S)
    return new_X, carried(X, new_X, new_T, new_V, sums), length._replace(inner=S)


def cayley_adam(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    steps: int = 2,
    exact: bool = False,
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of CayleyAdam.

    M <- b1 M - (1 - b1) G and v <- b2 v + (1 - b2) |G|^2, one number for each matrix, give
    W / (c1 sqrt(v/c2 + eps)) for W, with ci = 1 - bi^t.

    Args:
        X, G, lr, steps, exact, sums, reader: as in :func:`cayley_sgd`, at its cost.
        state: As there; ``exp_avg_sq_norm`` v, ``(k, 1, 1)``; with amsgrad its running maximum,
            ``max_exp_avg_sq_norm``, which then divides.
        step: t >= 1, the number of this step, a number or ``(k, 1, 1)``.
        betas, eps: b1 and b2; what is added to v/c2 under the root.

    Reference: Li, Li & Todorovic (2020), Algorithm 2.
    """
    reader, V, (beta1, beta2) = reader or reader_for(X), state.get(NORMAL), betas
    size = sums.add(square_norm(G))
    new = {SQUARE: torch.add(state[SQUARE] * beta2, size, alpha=1 - beta2)}
    if MAX_SQUARE in state:
        new[MAX_SQUARE] = torch.maximum(state[MAX_SQUARE], new[SQUARE])
    square = new.get(MAX_SQUARE, new[SQUARE])
    (S,) = sums((X, G))
    turn = skew_force(S, METRICS["euclidean"])
    T = torch.add(turn * (1 - beta1), state[SKEW], alpha=beta1)
    if V is not None:
        V = torch.add(normal_force(X, S, G).mul_(1 - beta1), V, alpha=beta1)
    correction1, correction2 = (bias_correction(beta, step, square.dtype) for beta in betas)
    divisor = correction1 * (square / correction2 + eps).sqrt()
    divisor = torch.where(divisor > 0, divisor, 1.0)  # 0/0 is 0
    latest = S * (1 - beta1)
    new_X, length = _transform(X, T, V, lr, divisor, steps, exact, sums, reader, latest)
    length = length._replace(inner=S, step=lr * (1 - beta1) / divisor)
    return new_X, new | carried(X, new_X, T, V, sums), length


def _transform(
    X: Tensor,
    T: Tensor,
    V: Tensor | None,
    lr: Scalar,
    divisor: Scalar,
    steps: int,
    exact: bool,
    sums: Sums,
    reader: Reader,
    inner: Tensor,
) -> tuple[Tensor, Length]:
    """Return cay(alpha W / divisor) X or its iterate, made orthonormal, for xi = XT + V."""
    own = None if V is None else sums((V, V))[0]
    step, reach, length = _shortened(T, own, lr, divisor, reader, inner)
    if exact:
        if V is None or own is None:
            return product(X, cayley(T * step)), length
        return move_along_cayley(X, T, V, own, step), length
    error = 2 * (reach / math.sqrt(8)) ** (steps + 2)
    turned, along = _iterate(T, own, step / 2, steps)
    square = torch.bmm(turned.mH, turned)
    if own is not None:
        square.baddbmm_(along.mH, torch.bmm(own, along))
    low, high = (1 - error) ** 2, (1 + error) ** 2
    excess = add_to_diagonal_(square.div_(low), -1.0)
    root = roots(excess, high / low - 1).inverse_root.mul_(low**-0.5)
    new_X = product(X, torch.bmm(turned, root))
    return new_X if V is None else add_product_(new_X, V, torch.bmm(along, root)), length


def _shortened(
    T: Tensor, own: Tensor | None, lr: Scalar, divisor: Scalar, reader: Reader, inner: Tensor
) -> tuple[Tensor, float, Length]:
    """Return alpha / divisor, a bound on |alpha W / divisor|, and the length of the step."""
    norm = (square_norm(T) if own is None else square_norm(T) + 2 * trace_of(own)).sqrt()
    if reader.steepest < math.inf:
        norm = torch.maximum(norm, square_norm(inner).sqrt() / reader.steepest)
    norm = norm / divisor
    # from both sides: a schedule that is run past its end has learning rates below 0
    alpha = shortened(norm + _TINY, lr, 1.0)
    step = alpha / divisor
    # |alpha W| <= 1; eigenvalues of a skew W come in pairs, so each is below |W| / sqrt(2).
    reach = float((alpha.abs() * norm).max()) if reader.is_exact else 1.0
    if not reach < math.inf:
        reader.overflowed, reach = True, 1.0
    squares = T.mH @ T if own is None else torch.cat([T.mH @ T, own])
    repeated = step if own is None else torch.cat([step, step])
    return step, reach, Length(squares * repeated.square(), 1.0, reach * reach)


def _iterate(turn: Tensor, own: Tensor | None, half: Scalar, steps: int) -> tuple[Tensor, Tensor]:
    """Return A and B of Y = XA + VB after X -> Y_0 -> ... -> Y_steps; ``own`` is V'V or None."""
    turned = add_to_diagonal_(torch.zeros_like(turn), 1.0)
    along = torch.zeros_like(turn)
    for _ in range(steps + 1):  # Y_0 is what an iteration makes of X
        both = add_to_diagonal_(turned, 1.0)  # I + A
        turned = torch.bmm(turn, both)
        if own is not None:
            turned.baddbmm_(own, along, alpha=-1.0)
        turned = add_to_diagonal_(turned.mul_(half), 1.0)
        along = both.mul_(half)
    return turned, along


# ---- the optimizer -----------------------------------------------------------------------------

SQUARES = tuple(State(name, "1", dtype="real", least=0.0) for name in (SQUARE, MAX_SQUARE))


class _Iterated(StiefelOptimizer):
    """What both classes say of the options of their Cayley map."""

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_integer("steps", group["steps"], 0)
        check_flag("exact", group["exact"])


class CayleySGD(_Iterated, SGDLike):
    r"""Cayley SGD with momentum for constrained parameters; plain ones get torch's SGD.

    .. math::
        M \leftarrow \mu M - G,\quad
        W = \hat W - \hat W^\top,\quad \hat W = M X^\top - \tfrac12 X X^\top M X^\top,\quad
        X \leftarrow \mathrm{cay}(\alpha W) X,\quad M \leftarrow W X,

    with :math:`\alpha = \min(\eta, 1 / (|W| + 10^{-8}))` and the Cayley map by fixed-point
    iterations, or exactly. Released implementations write the momentum to a temporary, so that
    theirs stays zero, and leave the error of the iteration in X; here neither happens.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused,
            differentiable, scale_pull, nonfinite, stiefel,
            cuda_graph: As in :class:`StiefelSGD`.
        steps: Iterations of the Cayley map. Default: 2.
        exact: Solve for it instead. Default: no.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Eight products of n x m by m x m a step, batched over equal matrices; the iterations are of
        m x m. State is one tensor like the parameter and one of m x m.

    Reference:
        Li, Li & Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley
        transform (ICLR 2020), Algorithm 1.
    """

    rule = "CayleySGD"
    sums_over_rows = True
    capturable = True
    learns_scale = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        steps: int = 2,
        exact: bool = False,
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, cayley_sgd, "steps", "exact")


class CayleyAdam(_Iterated, AdamLike):
    r"""Cayley Adam for constrained parameters; plain ones get torch's Adam.

    As :class:`CayleySGD`, with one second moment v for each matrix:

    .. math::
        M \leftarrow \beta_1 M - (1 - \beta_1) G,\quad
        v \leftarrow \beta_2 v + (1 - \beta_2) |G|^2,\quad
        W = \frac{\hat W - \hat W^\top}{c_1 \sqrt{v / c_2 + \epsilon}},\quad c_i = 1 - \beta_i^t.

    Args:
        params, lr, weight_decay, amsgrad, foreach, maximize, capturable, differentiable, fused,
            decoupled_weight_decay, scale_pull, nonfinite, stiefel,
            cuda_graph: As in :class:`StiefelAdam`.
        betas, eps: As in ``torch.optim.Adam``, for both kinds; ``eps`` is under the root for
            constrained parameters. The paper has betas of 0.9 and 0.99.
        steps, exact: As in :class:`CayleySGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Cost and state are those of :class:`CayleySGD`, and one number for each matrix.

    Reference:
        Li, Li & Todorovic (ICLR 2020), Algorithm 2.
    """

    rule = "CayleyAdam"
    sums_over_rows = True
    capturable = True
    learns_scale = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        steps: int = 2,
        exact: bool = False,
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return (Z_STATE, U_STATE, *SQUARES[: 1 + group["amsgrad"]])

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, cayley_adam, "steps", "exact")
