r"""The search for the steepest tangent direction of spectral norm 1, in m x m matrices.

The problem is that of :mod:`stiefel_opt.functional.stiefel_muon`: M = X B + N, X'N = 0, K = skew B
and Q = N'N, smoothed to Q + delta^2. With a symmetric T

    R(T) = (Q + delta^2 + (K + T)'(K + T))^(1/2)   has a trace that bounds the value from above,
    D = X A + N W,   W (Q + delta^2) W = I - A'A   is feasible for every skew A with |A| <= 1,

and has the value <K, A> + <Q, W>. At the optimum both agree, A = 2Y for R Y + Y R = K,
T = Y R - R Y and W = R^(-1).

:func:`search` minimises tr R(T), a convex function, by reweighted least squares, T <- Y R - R Y
with Y of R(T), which never raises it, and Anderson's acceleration. It ends when a feasible
direction has what the bound allows but for ``tolerance``; errors of T and A count by their squares
there.
:func:`fixed_steps` takes Newton steps by products alone.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.linalg import add_to_diagonal_, own_gram, skew, sym

_MOST: Final = 100  # iterations of the search, one decomposition each; 3 to 12 are usual
# A hard search may never meet its bound: so often, and at the end, its direction is measured all
# the same, after an iteration without acceleration, and the best is kept. Most have ended before.
_CHECKED: Final = 25
_KEPT: Final = 8  # points that the acceleration combines, beside the last
_SOLVE: Final = 3  # iterations for a Newton step by products alone
_TINY: Final = 1e-15


def search(
    turn: Tensor, own: Tensor, start: Tensor | None, floor: Tensor, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimise tr R(T), and return W, A / 2, T and D'D of a direction close enough to it."""
    results = tuple(torch.zeros_like(turn) for _ in range(4))
    active = torch.arange(turn.size(0))
    shift = torch.zeros_like(turn) if start is None else start
    unaccelerated, lowest = shift, torch.full_like(floor, math.inf)
    goal, usable = torch.full_like(floor, tolerance / 10), torch.zeros_like(floor)
    least = torch.full_like(floor.flatten(), math.inf)
    history: list[tuple[Tensor, Tensor]] = []
    for left in reversed(range(_MOST)):
        values, vectors = torch.linalg.eigh(sym(own + own_gram(turn + shift)))
        root = (values.unsqueeze(-2).clamp(min=0.0) + floor).sqrt()
        half = torch.bmm(vectors.mH, torch.bmm(turn, vectors)) / (root + root.mT)
        moved = half * (root - root.mT)
        moved = sym(torch.bmm(vectors, torch.bmm(moved, vectors.mH)))
        change = moved - shift
        bound = root.sum(dim=-1, keepdim=True)
        # by how much tr R will fall, at the least
        gain = square_norm(torch.bmm(change, vectors) / root.sqrt()) / (2 * bound)
        worse = bound > lowest * (1 + 1e-13)
        near = ((gain <= goal) & ~worse).flatten() | (left % _CHECKED == 0)
        keep = ~near
        if bool(near.any()):
            parts = (turn, own, shift, floor, root, vectors, half)
            *found, value = _direction_at(*(part[near] for part in parts))
            lack = (1.0 - value / bound[near]).flatten()
            done = (lack <= tolerance) | (left == 0)
            keep[near] = ~done
            place = active[near]
            better = lack < least[place]  # a search that does not end keeps the best it saw
            least[place[better]] = lack[better]
            for result, part in zip(results, (*found[:2], moved[near], found[2]), strict=True):
                result[place[better]] = part[better]
            goal = torch.where(near[:, None, None], torch.minimum(goal, gain) / 10, goal)
            if not bool(keep.any()):
                break
        unaccelerated = torch.where(worse, unaccelerated, moved)
        lowest = torch.minimum(lowest, bound)
        history = [*history[-_KEPT:], (shift, change)]
        plain = worse | (left % _CHECKED == 1)
        shift = torch.where(plain, unaccelerated, _accelerated(history, usable))
        usable = torch.where(worse, 0.0, usable + 1.0)
        if not bool(keep.all()):
            history = [(old[keep], its[keep]) for old, its in history]
            turn, own, floor, active = turn[keep], own[keep], floor[keep], active[keep]
            shift, unaccelerated = shift[keep], unaccelerated[keep]
            lowest, goal, usable = lowest[keep], goal[keep], usable[keep]
    inverse, half, shift, length = results
    return inverse, half, shift, length


def _accelerated(history: list[tuple[Tensor, Tensor]], usable: Tensor) -> Tensor:
    """Return T from points T and changes F(T): their combination with the least F.

    Of the points before the last the latest ``usable``, ``(k, 1, 1)``, count.

    Reference: Walker & Ni (2011), Anderson acceleration for fixed-point iterations.
    """
    *before, (shift, change) = history
    if not before:
        return shift + change
    shifts = torch.stack([old - shift for old, _ in before], dim=1)
    ages = torch.arange(len(before), 0, -1).reshape(-1, 1, 1)
    changes = torch.stack([old - change for _, old in before], dim=1)
    changes = torch.where(ages <= usable.unsqueeze(1), changes, 0.0)
    flat, target = changes, change.unsqueeze(1)
    if change.is_complex():  # the weights are real
        flat, target = torch.view_as_real(flat), torch.view_as_real(target)
    flat = flat.flatten(2)
    normal, right = torch.bmm(flat, flat.mT), torch.bmm(flat, target.flatten(2).mT)
    size = normal.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clamp(min=_TINY).rsqrt()
    normal = normal * size * size.mT
    normal.diagonal(dim1=-2, dim2=-1).add_(1e-14)
    weights: Tensor = torch.linalg.solve_ex(normal, right * size).result * size
    combined = ((shifts + changes) * weights.unsqueeze(-1)).sum(dim=1)
    return shift + change - torch.where(combined.isfinite(), combined, 0.0)


def _direction_at(
    turn: Tensor,
    own: Tensor,
    shift: Tensor,
    floor: Tensor,
    root: Tensor,
    vectors: Tensor,
    half: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W, A / 2 and D'D of D = X A + N W, D'D + delta^2 W^2 = I, and its value.

    For a skew A with |A| <= 1 the best W solves W (Q + delta^2) W = I - A'A. A = 2Y, unless that is
    too long; then the skew part of (K + T) R^(-1), which never is.
    """
    inner = skew(torch.bmm(vectors, torch.bmm(half * 2, vectors.mH)))
    squares, basis = torch.linalg.eigh(own_gram(inner))
    is_long = squares[:, -1:, None] > 1.0 + 1e-9
    if bool(is_long.any()):
        other = torch.bmm(torch.bmm(turn + shift, vectors / root), vectors.mH)
        inner = torch.where(is_long, skew(other), inner)
        squares, basis = torch.linalg.eigh(own_gram(inner))
    # C of C C' = I - A'A: no inverse of it is needed
    basis = basis * (1.0 - squares).clamp(min=_TINY).sqrt().unsqueeze(-2)
    smooth = own + torch.diag_embed(floor.expand(root.shape).squeeze(-2))
    values, vectors = torch.linalg.eigh(sym(torch.bmm(basis.mH, torch.bmm(smooth, basis))))
    values = torch.maximum(values, values[:, -1:] * _TINY).unsqueeze(-2)
    basis = torch.bmm(basis, vectors)
    inverse = torch.bmm(basis / values.sqrt(), basis.mH)
    value = inner_product(turn, inner) + inner_product(smooth, inverse)
    length = sym(own_gram(inner) + torch.bmm(inverse, torch.bmm(own, inverse)))
    return inverse, inner / 2, length, value


def fixed_steps(
    turn: Tensor, own: Tensor, start: Tensor | None, floor: Tensor, steps: int, lower: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Improve T by ``steps`` Newton steps; return R^(-1), Y, T and D'D, by products alone.

    R is that of T. The step W minimises g to second order about R,

        2 (E Y + Y E) + sym(S W (F + G)) = -G,   R E + E R = -(W Y + Y W),   S = R^(-1),

    F = S (Q + delta^2) S, G = (I - 4Y'Y - F) / 2. Then T + dT = (Y + E)(R + W) - (R + W)(Y + E).
    """
    shift = torch.zeros_like(turn) if start is None else start
    root, inverse = _roots_at(turn, own, shift, floor, lower)
    for _ in range(steps):
        shift = fits(_improved(turn, own, root, inverse, floor, lower), turn)
        root, inverse = _roots_at(turn, own, shift, floor, lower)
    half = skew(torch.bmm(turn + shift, inverse)) / 2
    length = sym(own_gram(half) * 4 + torch.bmm(inverse, torch.bmm(own, inverse)))
    # D'D = I - floor R^(-2) + E: what E adds is taken from the length of D
    excess = add_to_diagonal_(length + own_gram(inverse) * floor, -1.0)
    most = 1.0 + torch.linalg.vector_norm(own_gram(excess), dim=(-2, -1), keepdim=True).sqrt()
    return inverse * most.rsqrt(), half * most.rsqrt(), shift, length / most


def _improved(
    turn: Tensor, own: Tensor, root: Tensor, inverse: Tensor, floor: Tensor, lower: float
) -> Tensor:
    """Return T + dT of one Newton step from R."""
    factors = _smith_factors(root, inverse, lower)
    half = skew(_lyapunov(factors, turn))
    normal = torch.bmm(inverse, torch.bmm(own, inverse))
    normal = sym(normal + own_gram(inverse) * floor)
    gradient = add_to_diagonal_((own_gram(half) * 4 + normal) * -0.5, 0.5)
    outer = normal + gradient
    step, along = torch.zeros_like(turn), torch.zeros_like(turn)
    residual = -gradient
    direction, left = residual, None
    for _ in range(_SOLVE):
        scaled = torch.bmm(root, torch.bmm(residual, root))
        preconditioned = sym(_lyapunov(factors, scaled)) * 2
        new = inner_product(residual, preconditioned)
        direction = (
            preconditioned if left is None else preconditioned + direction * _ratio(new, left)
        )
        left = new
        change = torch.bmm(direction, half)
        change = _lyapunov(factors, change.mH - change)
        image = torch.bmm(change, half) * 2
        image = image + image.mH + sym(torch.bmm(inverse, torch.bmm(direction, outer)))
        advance = _ratio(new, inner_product(direction, image))
        step, along = step + direction * advance, along + change * advance
        residual = residual - image * advance
    moved = torch.bmm(half + along, root + step)
    return moved + moved.mH


def _smith_factors(root: Tensor, inverse: Tensor, lower: float) -> list[Tensor]:
    """Return what :func:`_lyapunov` needs: (2p)^(1/2) J and the powers 2^k of 2pJ - I.

    J = (R + p)^(-1), by Newton's method; p^2 is the product of the largest and smallest eigenvalue.
    """
    size = torch.linalg.vector_norm(root, dim=(-2, -1), keepdim=True)
    middle = (size / torch.linalg.vector_norm(inverse, dim=(-2, -1), keepdim=True)).sqrt()
    whole = torch.zeros_like(root)
    whole.diagonal(dim1=-2, dim2=-1).add_((middle / (size + middle)).squeeze(-1))
    whole = whole + root / (size + middle)
    spread = math.sqrt(2.0 * root.size(-1) ** 0.5 / lower)
    count = math.ceil(math.log2(spread))
    found = add_to_diagonal_(torch.zeros_like(root), 1.0)
    for _ in range(count + 4):
        found = torch.baddbmm(found, found, torch.bmm(whole, found), beta=2.0, alpha=-1.0)
    found = sym(found) / (size + middle)
    power = add_to_diagonal_(found * (2 * middle), -1.0)
    factors = [found * (2 * middle).sqrt()]
    for _ in range(min(count, 10)):
        factors.append(power)
        power = torch.bmm(power, power)
    return factors


def _lyapunov(factors: list[Tensor], right: Tensor) -> Tensor:
    """Return X with R X + X R = ``right`` by Smith's doubling X <- X + A X A, A <- A^2.

    Reference: Smith (1968), Matrix equation XA + BX = C.
    """
    first, *powers = factors
    solution = torch.bmm(first, torch.bmm(right, first))
    for power in powers:
        solution = solution + torch.bmm(power, torch.bmm(solution, power))
    return solution


def _roots_at(
    turn: Tensor, own: Tensor, shift: Tensor, floor: Tensor, lower: float
) -> tuple[Tensor, Tensor]:
    """Return R and R^(-1) for R^2 = Q + delta^2 + (T + K)'(T + K)."""
    square = sym(own + own_gram(turn + shift))
    square.diagonal(dim1=-2, dim2=-1).add_(floor.squeeze(-1))
    return _square_roots(square, lower)


def _square_roots(square: Tensor, lower: float) -> tuple[Tensor, Tensor]:
    """Return W^(1/2) and W^(-1/2) for eigenvalues from lower^2, by coupled odd polynomials."""
    bound = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True)
    root = square / bound
    inverse = add_to_diagonal_(torch.zeros_like(root), 1.0)
    # |W| <= tr W is at most 2 and a little in units of |M_T|_F
    for factor in schedule(lower / math.sqrt(3.0), torch.finfo(square.dtype).eps):
        near = torch.bmm(inverse, root).mul_(-0.5 * factor**3)
        near = add_to_diagonal_(near, 1.5 * factor)
        root, inverse = torch.bmm(root, near), torch.bmm(near, inverse)
    return sym(root) * bound.sqrt(), sym(inverse) * bound.rsqrt()


def schedule(lower: float, tolerance: float) -> list[float]:
    """Return the factors f of x <- f x (3 - f^2 x^2) / 2 that take [lower, 1] to 1.

    f^2 = 3 / (1 + l + l^2) gives both ends the same value, the next l, at the maximum 1: for small
    l 2.6 times as much, where f = 1 gives 1.5. Rounding must not take what is near 1 below zero, so
    l counts as at least 1e-3 there.

    Reference: Chen & Chow (2014), A stable scaling of Newton-Schulz.
    """
    factors = []
    while 1.0 - lower > tolerance:
        kept = max(lower, 1e-3)
        factors.append(math.sqrt(3.0 / (1.0 + kept + kept * kept)))
        end = factors[-1] * lower
        lower = end * (3.0 - end * end) / 2.0
    return factors


def fits(shift: Tensor, turn: Tensor) -> Tensor:
    """Return T, shortened to the length of K; 0 where it is not finite."""
    size, most = square_norm(shift), square_norm(turn)
    fits = torch.where(size > most, (most / size).sqrt(), 1.0)
    return torch.where(size.isfinite(), shift * fits, 0.0)


def square_norm(matrix: Tensor) -> Tensor:
    """Return |A|_F^2, ``(k, 1, 1)``."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm.square()


def trace_of(matrix: Tensor) -> Tensor:
    """Return the trace of a symmetric matrix, ``(k, 1, 1)``."""
    return matrix.diagonal(dim1=-2, dim2=-1).real.sum(dim=-1)[:, None, None]


def inner_product(left: Tensor, right: Tensor) -> Tensor:
    """Return <A, B> of symmetric matrices, ``(k, 1, 1)``."""
    return (left.conj() * right).real.sum(dim=(-2, -1), keepdim=True)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return a / b, 0 where b is not positive."""
    return torch.where(denominator > 0, numerator / denominator, 0.0)
