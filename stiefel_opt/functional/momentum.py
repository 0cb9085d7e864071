r"""Momentum on the Stiefel manifold by isometric flows: the rules of StiefelSGD and StiefelAdam.

Notation of Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023, arXiv 2205.14173): X is the
point, G the Euclidean gradient, Z the skew and U the normal part of the velocity (X'U = 0), eta the
learning rate, mu the momentum, a < 1 the parameter of the metric tr(D1'(I - a XX')D2). One step is

    f = (X'G - G'X) / (2 (1 - a)),   g = (I - XX') G                 force
    U <- mu U rot((2a - 1) eta Z) - g                                phi_2, coupling
    Z <- mu Z - f,  D = rot(eta Z)                                   phi_1, turn
    R = (I + eta^2 U'U)^(-1/2)
    X <- (X D + eta U) R,  U <- (U - eta X D U'U) R                  phi_3, both by one rotation

with rot(K) = (I + K)(I - K^2)^(-1/2). The published flows are in
:mod:`stiefel_opt.methods.published`. Between steps of SGD U = B L - X N is kept as B, L, N: with

    S = X'G                                                          1
    B <- B (mu L) + X (S - mu N) - G                                 2, 3
    W = B'B,  R = (I + eta^2 W)^(-1/2)                               4
    X <- X (D R) + B (eta R),  L = R^(-1),  N = eta W                5, 6

neither the projection of G nor the transport of U is a tall product of its own: six in all. With
``transport="projected"`` each part of the momentum is projected after its own turn: U times one
more R, so that L = I and N = eta W R, five products, and Z times (I - eta^2 Z^2)^(-1/2). This is
not the projection of the whole momentum X Z + U. With Nesterov's momentum U is evaluated.

Adam has second moments p of f and q of g, elementwise; both moments are corrected for their
initialisation at zero, ci = 1 - bi^t:

    U <- b1 U rot((2a - 1) eta Zp) - (1 - b1) g,   Z <- b1 Z - (1 - b1) f
    p <- b2 p + (1 - b2) |f|^2,                    q <- b2 q + (1 - b2) |g|^2
    Zp = (Z/c1) / (sqrt(p/c2) + eps),              V = (I - XX') (U/c1) / (sqrt(q/c2) + eps)
    R = (I + eta^2 V'V)^(-1/2)
    X <- (X rot(eta Zp) + eta V) R,                U <- T U

No entry of a mean of several g can exceed what their mean square says of it (Cauchy and Schwarz):

    |U| <= (1 - b1) sum b1^s |g_s| <= h sqrt(q),   h^2 = (1 - b1)^2 / (1 - b2) sum r^s,  r = b1^2/b2

with s from 0 to t - 1. T turns U but not q, so that an entry of U may be divided by a q that was
accumulated without it. Both quotients are therefore limited to h, before the corrections c1 and c2.
With Nesterov's momentum the quotients are those of b1 U - (1 - b1) g and b1 Z - (1 - b1) f, with
the sum of their weights c1 = 1 - b1^(t+1) and the bound b1 h + (1 - b1) / sqrt(1 - b2).

Rules are pure: tensors in, new tensors out. All batches are ``(k, n, m)`` with n >= m, or
``(k, m, m)``; for complex ones ' is the conjugate transpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.functional.flows import (
    METRICS,
    Length,
    Move,
    Scalar,
    Tensors,
    corrected,
    coupling,
    rotation_of_square,
    step_factors_of,
    turned_square,
)
from stiefel_opt.numerics.device import Reader, numbers_on, reader_for
from stiefel_opt.numerics.linalg import (
    LOCAL_SUMS,
    Packed,
    Sums,
    add_product,
    add_product_,
    add_product_into,
    defect,
    is_halved,
    product,
)

# Names of state: Z and U, and B, L and N of U = B L - X N, where N = X'B L.
SKEW: Final = "momentum_skew"
NORMAL: Final = "momentum_normal"
UNPROJECTED: Final = "momentum_unprojected"
FACTOR: Final = "momentum_factor"
OVERLAP: Final = "momentum_overlap"

_SECOND: Final = ("exp_avg_sq_skew", "exp_avg_sq_normal")
_LARGEST: Final = ("max_exp_avg_sq_skew", "max_exp_avg_sq_normal")

# Below it eps may round to 0 in float32, and 0/0, on the diagonal of p, would be NaN.
_LEAST_EPS: Final = 1e-30


def sgd(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar = 1.0,  # noqa: ARG001
    momentum: float = 0.9,
    nesterov: bool = False,
    metric: str | float = "canonical",
    transport: str = "isometric",
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of StiefelSGD.

    Args:
        X: The point, orthonormal, ``(k, n, m)``.
        G: The Euclidean gradient, same shape.
        state: ``momentum_skew`` Z, and for n > m ``momentum_normal`` U, or B, L and N as
            ``momentum_unprojected``, ``momentum_factor``, which starts as I and is missing if
            "projected", and ``momentum_overlap``. Empty: no momentum.
        lr: eta, a number or ``(k, 1, 1)``.
        step: The number of this step; it makes no difference.
        momentum: mu.
        nesterov: X moves along V = mu U - g and mu Z - f. U must be evaluated.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0) or any a < 1.
        transport: "isometric" or "projected".
        sums: Products of tall matrices summed over the rows, some of which may be elsewhere.
        reader: Reads numbers of this step. Default: :func:`reader_for` its device.

    Note: 6 products of n x m by m x m, 5 if "projected", with ``nesterov`` 7 and 8; one more off
        the canonical metric, but for "isometric" without ``nesterov``.
    Reference: after Kong et al., Algorithm 1, with other maps and the geometry corrected.
    """
    reader, a, Z = reader or reader_for(X), metric_parameter(metric), state.get(SKEW)
    (S,) = sums((X, G))  # 1
    if isinstance(state, Packed) and FACTOR in state and a == METRICS["canonical"]:
        return _step_packed(X, G, S, state, state.like(), lr, momentum, sums, reader)
    new_Z, direction = accumulated(skew_force(S, a), Z, momentum, nesterov=nesterov)
    carry = None if Z is None else transport
    if UNPROJECTED not in state and NORMAL not in state and (Z is not None or sums.are_square(X)):
        return rotate_square(X, lambda: direction, new_Z, lr, carry, reader)
    mu = None if a == METRICS["canonical"] else coupling(Z, momentum, lr, a, reader)
    if UNPROJECTED in state:
        B, L, N = state[UNPROJECTED], state.get(FACTOR), state[OVERLAP]
        if mu is not None:
            L, N, momentum = mu if L is None else torch.bmm(L, mu), torch.bmm(N, mu), 1.0
        within = torch.sub(S, N, alpha=momentum)
        return _step_unprojected(
            X, G, S, B, L, {}, new_Z, lr, momentum, within, sums, reader, FACTOR in state
        )
    minus_g = normal_force(X, S, G)
    if Z is None:
        factors = step_factors_of(direction, minus_g, lr, sums, reader, S)
        within = factors.shortening.baddbmm_(factors.rotation, factors.root)  # D R - I
        new_X, eta = add_product(X, X, within), factors.step.number
        return add_product_(new_X, minus_g, factors.scaled, alpha=eta), {}, factors.length
    U = state[NORMAL]
    U = (U * momentum if mu is None else product(U, mu)).add_(minus_g)
    V = minus_g.add_(U, alpha=momentum) if nesterov else U.clone()
    return advance(X, V, U, direction, new_Z, lr, transport, S, sums, reader)


def adam(
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
    transport: str = "isometric",
    sums: Sums = LOCAL_SUMS,
    reader: Reader | None = None,
) -> Move:
    r"""Return the new point, the new state and the length of one step of StiefelAdam.

    Args:
        X, G, lr, metric, transport, sums, reader: as in :func:`sgd`.
        state: Z and p as ``momentum_skew`` and ``exp_avg_sq_skew``, ``(k, m, m)``; for n > m U and
            q as ``momentum_normal`` and ``exp_avg_sq_normal``; with amsgrad the running maxima of
            p and q behind ``max_``.
        step: t >= 1, the number of this step, a number or ``(k, 1, 1)``.
        betas: b1 and b2.
        eps: Added to the denominator; with 0, 0/0 counts as 0.
        nesterov: X moves along b1 Z - (1 - b1) f and b1 U - (1 - b1) g, divided as Z and U are.

    Note: 9 products of n x m by m x m, 8 if "projected", one more off the canonical metric.
    Reference: after Kong et al., Algorithm 2, with other maps, the geometry corrected, and both
        moments corrected for their initialisation at zero.
    """
    reader, a = reader or reader_for(X), metric_parameter(metric)
    is_plain = transport == "isometric" and a == METRICS["canonical"] and NORMAL in state
    (S,) = sums((X, G))
    root = bias_correction(betas[1], step, X.real.dtype) ** 0.5
    eta = lr * bias_correction_ratio(root, betas[0], step, X.real.dtype, nesterov=nesterov)
    most = largest_quotient(betas, step, X.real.dtype, nesterov=nesterov)
    is_one = X.size(0) == 1 or not isinstance(most, Tensor)  # number for all
    if is_plain and is_one and isinstance(state, Packed):
        room, force = state.like(), state.like(SKEW, NORMAL)
        options = betas, eps, nesterov, root, most
        judged = _moments_at_once(X, G, S, state, room, force, options, reader)
        parts = force[NORMAL], room[NORMAL], force[SKEW], room[SKEW]
        new_X, _, length = advance(
            X, *parts, eta, transport, None, sums, reader, judged=judged, memory=force
        )
        return new_X, room, length
    minus_f = skew_force(S, a)
    new = moments(state, "skew", minus_f, betas)
    divided = partial(precondition, root=root, betas=betas, eps=eps, most=most)
    direction = partial(divided, new, "skew", latest=minus_f if nesterov else None)
    if NORMAL not in state:
        turn = direction if X.size(0) == 1 else cache(direction)  # a single matrix may be large
        moved = rotate_square(X, turn, new[SKEW], eta, transport, reader, _judgement(new, reader))
        return moved[0], new | moved[1], moved[2]
    mu = _coupling_of_adam(state, lr, step, betas, eps, a, reader)
    minus_g = normal_force(X, S, G)
    of_normal = moments(state, "normal", minus_g, betas, mu)
    V = divided(of_normal, "normal", latest=minus_g if nesterov else None)
    del minus_g
    U, along, judged = of_normal.pop(NORMAL), direction(), _judgement(new | of_normal, reader)
    new_X, carried, length = advance(
        X, V, U, along, new[SKEW], eta, transport, None, sums, reader, judged
    )
    return new_X, new | of_normal | carried, length


# ---- the normal momentum of SGD, not projected ---------------------------------------------------


def _step_packed(
    X: Tensor,
    G: Tensor,
    S: Tensor,
    state: Packed,
    room: Packed,
    lr: Scalar,
    momentum: float,
    sums: Sums,
    reader: Reader,
) -> Move:
    """The same at the canonical metric, with new state in memory of one piece."""
    if reader.is_exact:
        less_Z = torch.sub(S, state[SKEW], alpha=momentum / 2)
        less_N = torch.sub(S, state[OVERLAP], alpha=momentum)
    else:  # both by one call
        weights = numbers_on(S, -momentum / 2, -momentum).view(2, 1, 1, 1)
        less_Z, less_N = torch.addcmul(S, state.runs()[0][:2], weights)
    new_Z = torch.sub(less_Z.mH, less_Z, out=room[SKEW])  # mu Z + S' - S
    old = state[UNPROJECTED], state[FACTOR]
    return _step_unprojected(X, G, S, *old, room, new_Z, lr, momentum, less_N, sums, reader)


def _step_unprojected(
    X: Tensor,
    G: Tensor,
    S: Tensor,
    B: Tensor,
    L: Tensor | None,
    room: Tensors,
    new_Z: Tensor,
    lr: Scalar,
    momentum: float,
    within: Tensor,
    sums: Sums,
    reader: Reader,
    keeps_factor: bool = True,
) -> Move:
    """The step in lines 2 to 6, ``within`` S - mu N; if projected, L = I and N = eta R W."""
    if L is None:
        new_B = add_product(B, X, within, beta=momentum).sub_(G)  # 2, 3
    else:
        new_B = add_product_into(room.get(UNPROJECTED), G, B, L, momentum)
        new_B = add_product_(new_B, X, within)
    memory = room if isinstance(room, Packed) else None
    factors = step_factors_of(new_Z, new_B, lr, sums, reader, S, memory=memory)  # 4
    rotation, shortening, R, scaled, _, step, length, _, excess = factors
    if not keeps_factor:
        new = carried_skew(new_Z, rotation, "projected")
        new[OVERLAP] = step.over(torch.bmm(R, excess), length.scale)
    else:  # R^(-1) = (I + E) R
        new = room
        new[SKEW], out = new_Z, room.get(FACTOR)
        new[OVERLAP] = step.over(excess, length.scale, room.get(OVERLAP))
        new[FACTOR] = torch.baddbmm(R, excess, R, alpha=length.scale, out=out)
    new[UNPROJECTED] = new_B
    # X + X (D R - I) rounds less than X (D R)
    new_X = add_product(X, X, shortening.baddbmm_(rotation, R))  # 5, 6
    return add_product_(new_X, new_B, scaled, alpha=step.number), new, length


def evaluated(X: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return Z and U at X; None for what is not in the state."""
    base = state.get(UNPROJECTED)
    if base is None:
        return state.get(SKEW), state.get(NORMAL)
    U = base if FACTOR not in state else base @ state[FACTOR]
    return state.get(SKEW), U - X @ state[OVERLAP]


def corrected_unprojected(
    X: Tensor, state: Mapping[str, Tensor], sums: Sums, own: Tensor | None = None
) -> tuple[Tensor, Tensors]:
    """Remove rounding from X'X = I and, by N = X'B L, from X'U = 0."""
    if UNPROJECTED not in state:
        return corrected(X, state, sums, own, (NORMAL,))
    if own is None:
        own, overlap = sums((X, X), (X, state[UNPROJECTED]))
    else:
        (overlap,) = sums((X, state[UNPROJECTED]))
    error = defect(own)
    overlap = torch.baddbmm(overlap, error, overlap, alpha=0.5)  # of the corrected point
    if FACTOR in state:
        overlap = torch.bmm(overlap, state[FACTOR])
    return add_product(X, X, error, alpha=0.5), {OVERLAP: overlap}


# ---- moves ---------------------------------------------------------------------------------------


def advance(
    X: Tensor,
    V: Tensor,
    U: Tensor,
    direction: Tensor,
    new_Z: Tensor,
    lr: Scalar,
    transport: str,
    S: Tensor | None,
    sums: Sums,
    reader: Reader,
    judged: Tensor | None = None,
    memory: Packed | None = None,
) -> tuple[Tensor, Tensors, Length]:
    r"""Turn along ``direction`` and move along V; carry Z and U. Both U and V are written to.

    With C = V'U the transport of U, for which X_new'U = eta R C, is

        isometric: U - eta (X D + X_new) R (I + R)^(-1) C,     projected: U - eta X_new R C

    where the first is the rotation of X D into X_new that changes nothing normal to both. With
    S = X'G given V is normal to X; without it a part of V along X is taken out.
    """
    if transport == "isometric" and S is None:  # this transport needs V itself to be normal
        (overlap,) = sums((X, V))
        V = add_product_(V, X, overlap, alpha=-1.0)
    factors_with = partial(step_factors_of, direction, V, lr, sums, reader, S, judged=judged)
    if transport == "isometric":
        of_pair, ahead = ((V, U),), memory is not None
        factors = factors_with(also=of_pair, companion=True, memory=memory, is_ahead=ahead)
        rotation, shortening, _, _, companion, step, length, (C,), _ = factors
        turned = add_product(X, X, rotation)  # X D
        moved = step.add_to(turned, V)
        new_X = add_product(moved, moved, shortening)
        C, base = torch.bmm(companion, C), turned.add_(new_X)  # type: ignore[arg-type]
        new = {SKEW: new_Z}
    else:
        factors = factors_with(also=((V, U), (X, V)), is_projected=True)
        rotation, shortening, R, scaled, _, step, length, (C, overlap), _ = factors
        within = shortening.baddbmm_(rotation, R)
        within.baddbmm_(overlap, scaled, alpha=-step.number)
        new_X = add_product_(add_product(X, X, within), V, scaled, alpha=step.number)
        C, base = torch.bmm(R, C), new_X
        new = carried_skew(new_Z, rotation, transport)
    new[NORMAL] = add_product_(U, base, step.times(C), alpha=-step.number)
    return new_X, new, length


def rotate_square(
    X: Tensor,
    direction: Callable[[], Tensor],
    new_Z: Tensor,
    lr: Scalar,
    transport: str | None,
    reader: Reader,
    judged: Tensor | None = None,
) -> tuple[Tensor, Tensors, Length]:
    """X <- X rot(eta ``direction()``) for square matrices; ``transport`` None: no momentum."""
    if transport != "projected" and not is_halved(X):
        new_X, length = turned_square(X, direction, lr, reader, judged)
        new = {} if transport is None else {SKEW: new_Z}
    else:  # a product of the rotation is symmetric, and large ones are cheaper then
        rotation, length = rotation_of_square(direction, lr, reader, judged)
        new_X = add_product(X, X, rotation)
        new = {} if transport is None else carried_skew(new_Z, rotation, transport)
    return new_X, new, length


def carried_skew(Z: Tensor, rotation: Tensor, transport: str) -> Tensors:
    """Return Z or, if projected, the skew part of D'Z for D = I + ``rotation``."""
    if transport == "isometric":
        return {SKEW: Z}
    projected = torch.baddbmm(Z, rotation.mH, Z)
    return {SKEW: (projected - projected.mH) / 2}


def metric_parameter(metric: str | float) -> float:
    """Return a of the metric tr(D1'(I - a XX')D2): 1/2 is canonical, 0 Euclidean."""
    return METRICS[metric] if isinstance(metric, str) else float(metric)


def skew_force(S: Tensor, a: float, out: Tensor | None = None) -> Tensor:
    """-f = (S' - S) / (2 (1 - a)) for S = X'G."""
    # in the memory order of S, which is also the faster one
    difference = torch.sub(S.mH, S, out=torch.empty_like(S) if out is None else out)
    return difference if a == METRICS["canonical"] else difference.div_(2 * (1 - a))


def normal_force(X: Tensor, S: Tensor, G: Tensor) -> Tensor:
    """-g = X S - G for S = X'G."""
    return add_product(G, X, S, beta=-1.0)


def accumulated(
    value: Tensor,
    earlier: Tensor | None,
    momentum: float,
    *,
    nesterov: bool,
) -> tuple[Tensor, Tensor]:
    """Return the momentum, mu Z - f for ``value`` = -f, and the direction along which X moves."""
    new = value if earlier is None else torch.add(value, earlier, alpha=momentum)
    return new, torch.add(value, new, alpha=momentum) if nesterov else new


def _moments_at_once(
    X: Tensor,
    G: Tensor,
    S: Tensor,
    state: Packed,
    room: Packed,
    force: Packed,
    options: tuple[tuple[float, float], float, bool, Any, Any],
    reader: Reader,
) -> Tensor | None:
    """Put the new moments into ``room``, and what they give into ``force``; return a judgement.

    As :func:`moments` and :func:`precondition`, in half as many calls.
    """
    betas, eps, nesterov = options[:3]
    root, most = options[3:]
    if isinstance(most, Tensor):
        root, most = root.view(1), most.view(1)
    judged = None
    skew_force(S, METRICS["canonical"], force[SKEW])
    add_product_into(force[NORMAL], G, X, S)
    values = force.flat
    if not reader.is_exact:
        parts = [values[None]] if X.size(0) == 1 else [part.flatten(1) for part in force.values()]
        sizes = [torch.linalg.vector_norm(part, dim=1) for part in parts]
        judged = sizes[0] if len(sizes) == 1 else sizes[0] + sizes[1]
    second = room.span(*_SECOND)
    torch.mul(state.span(*_SECOND), betas[1], out=second)
    second.addcmul_(values, values, value=1 - betas[1])
    first = torch.lerp(state.span(SKEW, NORMAL), values, 1 - betas[0], out=room.span(SKEW, NORMAL))
    if _LARGEST[0] in state:
        largest = room.span(*_LARGEST)
        second = torch.maximum(state.span(*_LARGEST), second, out=largest)
    denominator = torch.sqrt(second).add_(root, alpha=eps)
    if eps < _LEAST_EPS:
        denominator.masked_fill_(denominator == 0, 1.0)
    if nesterov:
        values.lerp_(first, betas[0]).div_(denominator)
    else:
        torch.div(first, denominator, out=values)
    values.clamp_(-most, most)
    return judged


def _judgement(state: Mapping[str, Tensor], reader: Reader) -> Tensor | None:
    """Return a number a matrix that is not finite where a second moment is not, ``(k)``.

    A second moment never forgets that, and such a force makes no long step.
    """
    if reader.is_exact:
        return None
    sizes = [state[name].amax(dim=(-2, -1)) for name in _SECOND if name in state]
    return sizes[0] if len(sizes) == 1 else sizes[0] + sizes[1]


# ---- moments -------------------------------------------------------------------------------------


def _absolute_square(tensor: Tensor) -> Tensor:
    """Return |a|^2 of every entry, real."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).square().sum(dim=-1)
    return tensor.square()


def moments(
    state: Mapping[str, Tensor],
    part: str,
    value: Tensor,
    betas: tuple[float, float],
    mu: Tensor | None = None,
) -> Tensors:
    """Return both moments of ``value``, -f or -g, and with amsgrad the maximum of the second.

    The part of the velocity is "skew" or "normal"; ``mu`` is b1 times a rotation.
    """
    first = state["momentum_" + part]
    new = second_moments(state, part, value, betas[1])
    if mu is None:
        mean = torch.lerp(first, value, 1 - betas[0])
    else:
        mean = product(first, mu).add_(value, alpha=1 - betas[0])
    return new | {"momentum_" + part: mean}


def second_moments(state: Mapping[str, Tensor], part: str, value: Tensor, beta: float) -> Tensors:
    """Return the second moment of ``value``, and with amsgrad its maximum."""
    second, largest = (state.get(name + part) for name in ("exp_avg_sq_", "max_exp_avg_sq_"))
    square = _absolute_square(value)
    torch.lerp(second, square, 1 - beta, out=square)  # type: ignore[arg-type]
    new = {"exp_avg_sq_" + part: square}
    if largest is not None:
        new["max_exp_avg_sq_" + part] = torch.maximum(largest, square)
    return new


def precondition(
    state: Mapping[str, Tensor],
    part: str,
    root: Scalar,
    betas: tuple[float, float],
    eps: float,
    most: Scalar = math.inf,
    latest: Tensor | None = None,
) -> Tensor:
    """Return D with gamma D = (Z/c1) / (sqrt(p/c2) + eps), ci = 1 - bi^step; 0/0 counts as 0.

    ``root`` is the root of c2. The learning rate takes the factor gamma, see
    :func:`bias_correction_ratio`. No entry of D exceeds ``most``. ``latest``: -f of this step, for
    Nesterov's momentum: b1 Z - (1 - b1) f takes the place of Z.
    """
    first = state["momentum_" + part]
    if latest is not None:
        first = torch.lerp(first, latest, 1 - betas[0])
    denominator = denominator_of(state, part, root, eps)
    quotient = torch.div(first, denominator, out=None if first.is_complex() else denominator)
    if quotient.is_complex():
        return quotient.mul_((most / quotient.abs()).clamp_(max=1.0))
    return quotient.clamp_(-most, most)  # type: ignore[arg-type]


def denominator_of(state: Mapping[str, Tensor], part: str, root: Scalar, eps: float) -> Tensor:
    """Return sqrt(p) + sqrt(c2) eps, and 1 where it would be 0; ``root`` is sqrt(c2)."""
    second = state.get("max_exp_avg_sq_" + part, state["exp_avg_sq_" + part])
    denominator = torch.sqrt(second)  # real
    denominator.add_(root, alpha=eps)
    if eps < _LEAST_EPS:
        denominator.masked_fill_(denominator == 0, 1.0)
    return denominator


def largest_quotient(
    betas: tuple[float, float], step: Scalar, dtype: torch.dtype, *, nesterov: bool = False
) -> Scalar:
    """Return h, the most that sum b1^s |g_s| (1 - b1) can be over the root of q.

    With ``nesterov``: that of b1 times the sum and (1 - b1) times the last |g_s|.
    """
    ratio = betas[0] ** 2 / max(betas[1], 1e-30)
    growth = math.log(ratio) if ratio > 0 else -math.inf
    last = (1 - betas[0]) / (1 - betas[1]) ** 0.5
    square = (betas[0] * last if nesterov else last) ** 2
    if ratio == 1:
        terms = step
    elif isinstance(step, Tensor):
        terms, square = torch.expm1(step.to(dtype) * growth), square / (ratio - 1)
    else:
        terms = math.expm1(min(step * growth, 700.0)) / (ratio - 1)
    most = (terms * square) ** 0.5
    most = most + last if nesterov else most
    return most if isinstance(most, Tensor) else min(most, torch.finfo(dtype).max)


def bias_correction_ratio(
    root: Scalar, beta: float, step: Scalar, dtype: torch.dtype, *, nesterov: bool = False
) -> Scalar:
    """Return gamma = sqrt(c2) / c1, with ``nesterov`` c1 of the next step, for the root of c2."""
    return root / bias_correction(beta, step + 1 if nesterov else step, dtype)


def bias_correction(beta: float, step: Scalar, dtype: torch.dtype) -> Scalar:
    """Return 1 - beta^step, without the cancellation that a step in float32 would suffer."""
    if isinstance(step, Tensor):
        return -torch.expm1(step.to(dtype) * (math.log(beta) if beta > 0 else -math.inf))
    return 1.0 - float(beta**step)


def _coupling_of_adam(
    state: Mapping[str, Tensor],
    lr: Scalar,
    step: Scalar,
    betas: tuple[float, float],
    eps: float,
    a: float,
    reader: Reader,
) -> Tensor | None:
    """Return b1 rot((2a - 1) eta Zp) for Zp of the step before; 0 at the first."""
    if a == METRICS["canonical"]:
        return None
    before = step - 1.0
    counted = before.clamp(min=1.0) if isinstance(before, Tensor) else max(before, 1.0)
    dtype = state[SKEW].real.dtype
    root = bias_correction(betas[1], counted, dtype) ** 0.5
    most = largest_quotient(betas, counted, dtype)
    earlier = precondition(state, "skew", root, betas, eps, most)
    earlier_lr = lr * bias_correction_ratio(root, betas[0], counted, dtype) * (before > 0)
    return coupling(earlier, betas[0], earlier_lr, a, reader)
