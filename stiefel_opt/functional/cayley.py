r"""Cayley SGD and Adam of Li, Li & Todorovic (ICLR 2020): an iterated Cayley map.

With the notation of :mod:`stiefel_opt.functional.descent`, the momentum M <- mu M - G (in the
paper with the opposite sign) and its tangent part M - X sym(X'M) = XT + V, a step is

    W = What - What',  What = M X' - X (X'M) X' / 2,          so that W X = XT + V
    alpha = min(eta, 1 / (|W| + eps)),                        |W|^2 = |T|^2 + 2 tr V'V
    Y <- X + alpha W X,  then s times  Y <- X + alpha/2 W (X + Y),   or exactly  cay(alpha W) X.

W X is kept as momentum and projected onto the next tangent space. W maps the span of X and V to
itself, so that Y = XA + VB and a whole iteration is of m x m:

    A <- I + alpha/2 (T (I + A) - V'V B),   B <- alpha/2 (I + A).

Y'Y = A'A + B'V'VB is off I by about 4 t^(s+2) for t = alpha |W| / sqrt(8). It is known without a
tall product, so Y is replaced by its polar factor, where released implementations leave that error
in X and orthogonalise at random, once in a hundred steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stiefel_opt.device import reader_for
from stiefel_opt.functional.descent import carry_, measure, move_along_cayley
from stiefel_opt.functional.flows import METRICS, Scalar, Setting, mend_point, passes_after
from stiefel_opt.functional.stiefel_adam import bias_correction
from stiefel_opt.functional.stiefel_sgd import accumulate_, normal_force, torque_of
from stiefel_opt.linalg import (
    absolute_square,
    add_product_,
    add_to_diagonal_,
    cayley,
    keep_,
    product,
    sums,
)
from stiefel_opt.roots import roots

_TINY = 1e-8  # added to |W|


def cayley_sgd_(
    point: Tensor,
    grad: Tensor,
    skew: Tensor,
    normal: Tensor | None = None,
    *,
    lr: Scalar,
    momentum: float = 0.9,
    force: Scalar = 1.0,
    nesterov: bool = False,
    steps: int = 2,
    exact: bool = False,
    setting: Setting = Setting(),  # noqa: B008 - it is immutable
) -> Tensor:
    r"""One step of CayleySGD; returns the new point and updates the momentum in place.

    Args:
        point, grad, skew, normal, lr, force, setting: as in
            :func:`stiefel_opt.functional.descend_`, with T and V of the momentum M <- mu M - G.
        momentum, nesterov: mu; whether X moves along mu M - G.
        steps, exact: s, the number of iterations; whether to solve for the Cayley map instead.

    Returns: The new point, ``(k, n, m)``.
    Note: 8 products of n x m by m x m, with ``setting.correct`` 11; with ``exact`` one fewer and
        one LU solve of m x m.
    Reference: Li, Li & Todorovic (2020), Algorithm 1.
    """
    ok = setting.ok
    point, inner = measure(point, grad, normal, setting)
    passes = passes_after(inner, lr * (1 + momentum * nesterov), setting)
    turn = torque_of(inner, METRICS["euclidean"], force)
    accumulate_(turn, skew, momentum, skew, ok)
    ahead, direction = torch.add(turn, skew, alpha=momentum) if nesterov else skew, normal
    if normal is not None:
        own = normal_force(point, inner * force, grad, force, ok)
        accumulate_(own, normal, momentum, normal, ok)
        direction = own.add_(normal, alpha=momentum) if nesterov else normal
    new_point = _transform(point, ahead, direction, lr, 1.0, steps, exact, setting)
    new_point = mend_point(new_point, setting.row_sum, passes)
    carry_(point, new_point, skew, normal, setting)
    return new_point


def cayley_adam_(
    point: Tensor,
    grad: Tensor,
    skew: Tensor,
    normal: Tensor | None,
    square: Tensor,
    max_square: Tensor | None = None,
    *,
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    force: float = 1.0,
    steps: int = 2,
    exact: bool = False,
    setting: Setting = Setting(),  # noqa: B008 - it is immutable
) -> Tensor:
    r"""One step of CayleyAdam; returns the new point and updates the momenta in place.

    M <- b1 M - (1 - b1) G and v <- b2 v + (1 - b2) |G|^2, one number for each matrix, give
    W / (c1 sqrt(v/c2 + eps)) for W, with ci = 1 - bi^t.

    Args:
        point, grad, skew, normal, lr, steps, exact, setting: as in :func:`cayley_sgd_`, at its
            cost.
        square: v, ``(k, 1, 1)``, updated.
        max_square: Running maximum of v, which then divides (amsgrad), updated. None: off.
        step: t >= 1, this step's number, a number or ``(k, 1, 1)``.
        betas, eps: b1 and b2; what is added to v/c2 under the root.
        force: Sign of the gradient: 1, or -1 to maximise.

    Returns: The new point, ``(k, n, m)``.
    Reference: Li, Li & Todorovic (2020), Algorithm 2.
    """
    (beta1, beta2), ok = betas, setting.ok
    size = absolute_square(grad).sum(dim=(-2, -1), keepdim=True)
    if setting.row_sum is not None:
        size = setting.row_sum(size)
    point, inner = measure(point, grad, normal, setting)
    keep_(square, torch.add(square * beta2, size, alpha=1 - beta2), ok)
    if max_square is not None:
        square = torch.maximum(max_square, square, out=max_square)
    turn = torque_of(inner, METRICS["euclidean"], force)
    accumulate_(turn * (1 - beta1), skew, beta1, skew, ok)
    if normal is not None:
        own = normal_force(point, inner * force, grad, force, ok)
        accumulate_(own.mul_(1 - beta1), normal, beta1, normal, ok)
    correction1, correction2 = (bias_correction(beta, step, square.dtype) for beta in betas)
    divisor = correction1 * (square / correction2 + eps).sqrt()
    divisor = divisor.clamp(min=torch.finfo(divisor.dtype).tiny)  # 0/0 is 0
    new_point = _transform(point, skew, normal, lr, divisor, steps, exact, setting)
    carry_(point, new_point, skew, normal, setting)
    return new_point


def _transform(
    point: Tensor,
    turn: Tensor,
    normal: Tensor | None,
    lr: Scalar,
    divisor: Scalar,
    steps: int,
    exact: bool,
    setting: Setting,
) -> Tensor:
    """Return cay(alpha W / divisor) X or its iterate, made orthonormal, for xi = XT + V."""
    size = absolute_square(turn).sum(dim=(-2, -1), keepdim=True)
    own = None
    if normal is not None:
        (own,) = sums(setting.row_sum, (normal, normal))
        size = size + 2 * own.diagonal(dim1=-2, dim2=-1).real.sum(dim=-1)[..., None, None]
    norm = size.sqrt() / divisor
    alpha = torch.clamp(1 / (norm + _TINY), max=lr)
    step = alpha / divisor
    if exact:
        if normal is None or own is None:
            return product(point, cayley(turn * step))
        return move_along_cayley(point, turn, normal, own, step)

    # |alpha W| <= 1; eigenvalues of a skew W come in pairs, so each is below |W| / sqrt(2).
    reader = setting.reader or reader_for(point)
    reach = float((alpha * norm).max()) if reader.is_exact else 1.0
    if not reach < math.inf:
        reader.is_lost, reach = True, 1.0
    error = 2 * (reach / math.sqrt(8)) ** (steps + 2)
    turned, along = _iterate(turn, own, step / 2, steps)
    square = torch.bmm(turned.mH, turned)
    if own is not None:
        square.baddbmm_(along.mH, torch.bmm(own, along))
    low, high = (1 - error) ** 2, (1 + error) ** 2
    excess = add_to_diagonal_(square.div_(low), -1.0)
    root = roots(excess, high / low - 1).inverse_root.mul_(low**-0.5)
    new_point = product(point, torch.bmm(turned, root))
    if normal is None:
        return new_point
    return add_product_(new_point, normal, torch.bmm(along, root))


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
