"""The moves that a step is made of, in m x m matrices; notation of momentum.py.

X turns within its span by D = rot(eta Z) and moves along a normal direction V by the polar
retraction, R = (I + eta^2 V'V)^(-1/2). Both roots are worked out together, as small differences
from I, so that X'X = I suffers one rounding of X a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.numerics.device import NO_HINT, Hint, Numbers, Reader, finest_dtype, numbers_on
from stiefel_opt.numerics.geometry import orthonormality_tolerance
from stiefel_opt.numerics.linalg import (
    MEDIUM,
    Halves,
    Packed,
    Step,
    Sums,
    add_product,
    add_skew_product_,
    add_to_diagonal_,
    are_finite,
    bounds_of,
    defect,
    gram,
    infinity_norm,
    largest_bound,
    largest_eigenvalue,
    plus_identity,
    symmetric_product,
)
from stiefel_opt.numerics.linalg import Tensors as Tensors
from stiefel_opt.numerics.roots import roots

Scalar = float | Tensor

METRICS: Final = {"canonical": 0.5, "euclidean": 0.0}

# An angle atan(eta sigma) gains nothing beyond this, while I + eta^2 U'U becomes ill-conditioned.
SATURATION: Final = 4.0
_MOST: Final = SATURATION**2
# Limits on the last step's bound, squares of tangents: below 14 degrees exact knowledge saves
# little; above, the square may grow fourfold from step to step.
_SHORT: Final = 0.06
_MARGIN: Final = 4.0
_LEAST: Final = 1e-12  # of a limit: roots cost nothing less below it


class Length(NamedTuple):
    """The length of a step: the largest singular value of its tangent vector, for each matrix.

    A rule returns products that it has anyway; singular values are computed on demand, by
    :meth:`tangents`. For square matrices with m > 64 one number is stored, a few per cent too low.

    Attributes:
        squares: ``(k, m, m)``, or two such batches one behind the other; their sum times ``scale``
            is xi'xi for the step xi.
        scale: A number, the square of the learning rate, or 1.
        limit: Upper bound on the eigenvalues of ``squares`` times ``scale``, known without waiting
            for a device. Above 1 rounding is removed after the step; at inf the new point is
            checked for values that are not finite.
        inner: X'G: its size says how far a step amplifies rounding. None: not at all.
        step: What the rule multiplies ``inner`` by, ``(k, 1, 1)``. None: the learning rate.
        bound: A number for each matrix, ``(k, 1, 1)``, which is not finite where the gradient is
            not, or where the step leaves floating point. None: nothing is known.
        steepness: Upper bound on the learning rate times ``inner``, known without waiting, which is
            not finite where a gradient is not. None: it is not known.
    """

    squares: Tensor
    scale: float = 1.0
    limit: float = 0.0
    inner: Tensor | None = None
    step: Tensor | None = None
    bound: Tensor | None = None
    steepness: float | None = None

    def tangents(self, count: int) -> Tensor:
        """Return the length of each of ``count`` steps, NaN where it is not finite."""
        squares = self.squares.reshape(-1, count, *self.squares.shape[1:]).sum(dim=0) * self.scale
        finite = are_finite(squares)
        squares = torch.where(finite[:, None, None], squares, 0.0)
        length = torch.linalg.eigvalsh(squares)[..., -1].clamp(min=0.0).sqrt()
        return torch.where(finite, length, math.nan)


def steepest(dtype: torch.dtype, n: int) -> float:
    """Return the most that eta |X'G| may be for n rows.

    A step amplifies rounding of X'X by about twice that: beyond, it would no longer be small.
    """
    return 0.1 / orthonormality_tolerance(dtype, n)


# What a rule returns: the new point, the new state, and the length of the step.
Move = tuple[Tensor, Tensors, "Length | Tensor | float"]


# ---- rounding ----------------------------------------------------------------------------------


def corrected(
    point: Tensor,
    state: Mapping[str, Tensor],
    sums: Sums,
    own: Tensor | None = None,
    normal: tuple[str, ...] = (),
) -> tuple[Tensor, Tensors]:
    """Remove rounding from X'X = I, and from X'U = 0 of the state of these names.

    X + X (I - X'X)/2 is one Newton-Schulz step, enough for rounding.

    Args:
        point: X, ``(k, n, m)``.
        state: Of the batch, by name.
        sums: Products of tall matrices.
        own: X'X, if it is known.
        normal: Names of state that is normal to the point.

    Returns: The point, and the state that has changed.
    """
    pairs = [(point, state[name]) for name in normal if name in state]
    products = sums(*([] if own is not None else [(point, point)]), *pairs)
    own = products.pop(0) if own is None else own
    new_point = add_product(point, point, defect(own), alpha=0.5)
    changed: Tensors = {}
    for name, overlap in zip([name for name in normal if name in state], products, strict=True):
        changed[name] = add_product(state[name], new_point, overlap, alpha=-1.0)
    return new_point, changed


# ---- moves -------------------------------------------------------------------------------------


class StepFactors(NamedTuple):
    """Turn and polar retraction of a step in m x m matrices, for a direction V."""

    rotation: Tensor  # D - I
    shortening: Tensor  # R - I
    root: Tensor  # R
    scaled: Tensor  # R times the factor that cuts eta
    companion: Tensor | None  # R (I + R)^(-1), if asked for
    step: Step
    length: Length  # its squares: of the turn, then of the move
    products: list[Tensor]  # that were asked for
    excess: Tensor  # E of the move, over the scale of the length


def step_factors_of(
    skew: Tensor,
    V: Tensor,
    lr: Scalar,
    sums: Sums,
    reader: Reader,
    inner: Tensor | None = None,
    *,
    also: tuple[tuple[Tensor, Tensor], ...] = (),
    is_projected: bool = False,
    companion: bool = False,
    judged: Tensor | None = None,
    memory: Packed | None = None,
    is_ahead: bool = False,
) -> StepFactors:
    """Return the turn along ``skew`` = K / eta and the retraction of V.

    Both need (I + E)^(-1/2), for E = eta^2 [K'K, V'V]: one batch of 2k does it. Where the step is
    too long, or ``inner`` = X'G makes it too steep, it is cut.

    Args:
        also: Pairs of tall matrices whose products are wanted.
        is_projected: The last of them is X, V: the part of V along X counts for nothing.
        companion: Whether R (I + R)^(-1) is wanted.
        memory: Where temporaries are kept from step to step, on a CPU.
        is_ahead: K and V lie one behind the other in ``memory``: of a single matrix both are
            multiplied by what eta is cut by, and the products are those of such a V.
        judged: Where it is not finite the bound of the step is not, ``(k)`` or ``()``.
    """
    count, reads = skew.size(0), reader.is_exact
    alpha = 1.0 if isinstance(lr, Tensor) else lr * lr
    powers, squares, *rooms = _rooms(skew, reads, memory)
    symmetric_product(skew, skew, squares.first, alpha=-alpha)
    is_scaled = is_ahead and count == 1 and sums.are_local and not reads
    pairs = () if is_scaled else also
    _, *products = sums((V, V), *pairs, into=squares.last, alpha=alpha)
    if is_projected:
        squares.last.baddbmm_(products[-1].mH, products[-1], alpha=-alpha)
    limit, steepness = math.inf, None
    if reads and not isinstance(lr, Tensor):
        limit, size = bounds_of(squares.both, inner)
        steepness = None if size is None or lr == 0 else abs(lr) * size
    length = Length(squares.both, 1.0, limit, inner, steepness=steepness)
    second, step = None, Step(lr)  # type: ignore[arg-type]
    if not limit <= _MOST:
        length, second, step = _cut(powers, count, lr, reader, inner, judged)
        squares = Halves.of(length.squares)
    if is_scaled and memory is not None and step.factor is not None:
        memory.flat.mul_(step.factor.view(1))
        step, products = Step(step.number), sums(*also)
    limit, scale, excess = length.limit, length.scale, squares.last
    last = excess if companion else None
    out = rooms[0] and rooms[0].both
    both, companions = roots(
        squares.both, limit, scale=scale, last=last, square=second, reads=reads, out=out
    )
    _, of_turn, of_move = Halves.of(both, rooms[0])
    both = plus_identity(both, rooms[1] and rooms[1].both)
    _, scaled_turn, root = Halves.of(both, rooms[1])
    scaled = root
    if step.factor is not None:
        scaled_turn, scaled = (both.view(2, *of_turn.shape) * step.factor).unbind()
    rotation = add_skew_product_(of_turn, skew, scaled_turn, step.number)
    return StepFactors(rotation, of_move, root, scaled, companions, step, length, products, excess)


def _rooms(
    skew: Tensor, reads: bool, memory: Packed | None
) -> tuple[Tensor, Halves, Halves | None, Halves | None]:
    """Return memory for E and perhaps E^2, for E alone, and where it is kept for S and R."""
    if reads and memory is not None:
        squares, differences, inverse_roots = memory.pairs(skew)
        return squares.both, squares, differences, inverse_roots
    count = 2 * skew.size(0)
    powers = skew.new_empty(count if reads else 2 * count, *skew.shape[1:])
    return powers, Halves.of(powers if reads else powers[:count]), None, None


def _cut(
    powers: Tensor,
    count: int,
    lr: Scalar,
    reader: Reader,
    inner: Tensor | None = None,
    judged: Tensor | None = None,
) -> tuple[Length, Tensor, Step]:
    """Return the length of a step, E^2 and eta, cut where the step is too long.

    Turn and move are cut by one s, by the bound |E|^2 <= |E^2|_F: s^2 E may be 4 times what the
    reader knows of the step before, at least 0.06 and at most 16. Off a CPU so they are where
    ``inner`` = X'G is too steep. The bound of a matrix whose gradient is not finite is not finite:
    nothing of it may be used. ``powers`` has E, without eta^2 if that is a tensor, and behind it
    room for E^2 unless the reader is exact; both are divided by their limit, which is the scale of
    the length.
    """
    reads = reader.is_exact
    powers = powers.view(1 if reads else 2, -1, *powers.shape[1:])
    parts = powers[0].view(-1, count, *powers.shape[2:])
    if isinstance(lr, Tensor):
        parts.mul_(lr * lr)
    unit: Scalar = 1.0
    if reads:  # squares of what is safe may leave floating point
        unit = parts.abs().amax(dim=(0, 2, 3), keepdim=True)[0].clamp_(min=1.0)
        parts.div_(unit)
        powers = torch.stack([powers[0]] * 2)
    symmetric_product(powers[0], powers[0], powers[1])
    bounds, limit = _bounds(powers[1], count, lr, reader, inner, unit, judged)
    bound, least = bounds[0], (limit / unit) ** 2
    if len(bounds) == 2:  # eta |X'G|: its fourth power compares with E^2
        steep = bounds[1].square()
        share = 1.0 if isinstance(lr, Tensor) else lr**4
        bound = torch.addcmul(bound, steep, steep, value=limit**2 * share / reader.steepest**4)
    if isinstance(least, Tensor):
        bound = torch.maximum(bound, least.view(-1))
    else:
        bound = bound.clamp(min=least)
    factors = torch.empty(3, count, dtype=powers.real.dtype, device=powers.device)
    torch.pow(bound, numbers_on(bound, -0.5, -1.0, -0.25).unsqueeze(-1), out=factors)
    factors = factors[..., None, None]
    powers.view(2, -1, *parts.shape[1:]).mul_(factors[:2].unsqueeze(1))
    factor, number = factors[2], math.sqrt(limit)
    if reads:
        factor = factor / unit.sqrt()  # type: ignore[union-attr]
    if isinstance(lr, Tensor):
        factor = factor * lr
    else:
        number *= lr
    length = Length(powers[0], limit, limit, inner, bound=bounds[0].view(-1, 1, 1))
    return length, powers[1], Step(number, factor, isinstance(lr, Tensor))


def _bounds(
    square: Tensor,
    count: int,
    lr: Scalar,
    reader: Reader,
    inner: Tensor | None,
    unit: Scalar,
    judged: Tensor | None,
) -> tuple[Tensor, float]:
    """Return |E^2|_F of turn and move and maybe |X'G|, ``(., k)``, and a limit of E."""
    is_steep = inner is not None and reader.steepest < math.inf
    fine = finest_dtype(square)  # or squares of steps above 6e4 rad would overflow
    rows = torch.empty(1 + is_steep, count, dtype=fine.to_real(), device=square.device)
    both = square.view(-1, count, *square.shape[1:])
    torch.linalg.vector_norm(both, dim=(0, 2, 3), dtype=fine, out=rows[0])
    if judged is not None:
        rows[0].add_(judged, alpha=0.0)
    share = 1.0 if isinstance(lr, Tensor) else lr * lr
    names, units = ["length"], [share**-2.0 if share * share else math.inf]
    if inner is not None and is_steep:
        torch.linalg.vector_norm(inner, dim=(-2, -1), dtype=fine, out=rows[1])
        names.append("norm")
        units.append(1.0 if isinstance(lr, Tensor) else abs(lr))
    if isinstance(lr, Tensor):
        rows[1:] *= lr.abs().flatten()
    elif units[0] == math.inf:
        return rows, _MOST
    if reader.is_exact:
        reader.overflowed |= not bool((rows < math.inf).all())
        sizes = rows * unit.view(1, -1) ** 2  # type: ignore[union-attr]
        known = reader.numbers(Numbers(("length",), sizes, (1.0,)))[0] ** 0.5
        return rows, min(max(known, _LEAST), _MOST)
    hint = Hint((_SHORT / _MARGIN) ** 2 * units[0], 4 if isinstance(lr, Tensor) else 0)
    known = reader.numbers(Numbers(tuple(names), rows, tuple(units), (hint,)))[0] ** 0.5 * share
    return rows, min(max(_MARGIN * known, _SHORT), _MOST)


def rotation_of_square(
    compute: Callable[[], Tensor], lr: Scalar, reader: Reader, judged: Tensor | None = None
) -> tuple[Tensor, Length]:
    """Return D - I for square matrices, X D being the whole move, and the length of the step.

    For a square matrix every m x m is as large as the parameter: Z is computed by ``compute``, and
    freed before the roots are worked out. ``judged`` is as in :func:`step_factors_of`.
    """
    difference, step, length = _of_square(compute, lr, reader, judged)
    root = step.times(plus_identity(difference))
    return add_skew_product_(difference, compute(), root, step.number), length


def turned_square(
    point: Tensor,
    compute: Callable[[], Tensor],
    lr: Scalar,
    reader: Reader,
    judged: Tensor | None = None,
) -> tuple[Tensor, Length]:
    """Return X D = (X + X K)(I + S), two products as D takes, and fewer passes over memory."""
    difference, step, length = _of_square(compute, lr, reader, judged)
    moved = add_product(point, point, step.times(compute()), alpha=step.number)
    return add_product(moved, moved, difference), length


def _of_square(
    compute: Callable[[], Tensor], lr: Scalar, reader: Reader, judged: Tensor | None
) -> tuple[Tensor, Step, Length]:
    """Return S = (I + K'K)^(-1/2) - I for K along ``compute()``, and the length of the step."""
    turn, reads = compute(), reader.is_exact
    count, size = turn.shape[:2]
    powers = turn.new_empty(count if reads else 2 * count, *turn.shape[1:])
    squares = gram(turn, powers[:count], 1.0 if isinstance(lr, Tensor) else lr * lr)
    del turn
    limit = largest_bound(squares) if reads and not isinstance(lr, Tensor) else math.inf
    length, second, step = Length(squares, 1.0, limit), None, Step(lr)  # type: ignore[arg-type]
    if not limit <= _MOST:
        length, second, step = _cut(powers, count, lr, reader, judged=judged)
    square, scale, limit = length[:3]
    if size > MEDIUM:  # as large as the parameter: a number is stored instead
        length = length._replace(squares=largest_eigenvalue(square))
    root = roots(square, limit, scale=scale, square=second, reads=reads)
    return root.difference, step, length


def _bound_of_finite(matrices: Tensor, reader: Reader) -> float:
    """Return a bound on the eigenvalues of the matrices of a batch that are finite."""
    bound = largest_bound(matrices)
    if not bound < math.inf:
        reader.overflowed = True
        sound = matrices[are_finite(matrices)]
        bound = largest_bound(sound) if sound.numel() else 0.0
    return bound


def coupling(
    skew: Tensor | None, momentum: float, lr: Scalar, a: float, reader: Reader
) -> Tensor | None:
    """Return M of U <- U M, momentum rot((2a - 1) eta Z); None where it is the number."""
    if skew is None or momentum == 0 or a == METRICS["canonical"]:
        return None
    rotation, _ = rotation_of_square(lambda: skew, lr * (2 * a - 1), _PrefixedReader(reader))
    return add_to_diagonal_(rotation, 1.0).mul_(momentum)


def limited(
    step: Scalar, size: Tensor, longest: float, reader: Reader, inner: Tensor | None = None
) -> tuple[Scalar, float]:
    """Return the step, shortened to at most ``longest``, and a bound on the square of its length.

    Beyond ``longest`` a step gains nothing; ``size`` is xi'xi, ``(k, m, m)``, ``inner`` X'G.
    """
    most = longest * longest
    reads = reader.is_exact
    if isinstance(step, float) and reads:
        bound = step * step * _bound_of_finite(size, reader)
        if bound <= most:
            return step, bound
    norm = infinity_norm(size)
    if not reads:
        squared = step * step if isinstance(step, Tensor) else 1.0
        most = _longest(step, reader, lambda: norm * squared, most)
        if inner is not None and reader.steepest < math.inf:
            slope = torch.linalg.vector_norm(inner, dim=(-2, -1), keepdim=True)
            step = shortened(slope, step, reader.steepest)
    shorter = (most / (norm * (step * step))).clamp(max=1.0)
    return step * shorter.sqrt(), most


class _PrefixedReader(Reader):
    """Puts a prefix before names, so that a second turn in a step has numbers of its own.

    A lagged reader remembers one number for each name.
    """

    def __init__(self, reader: Reader) -> None:
        self.is_exact, self._reader, self.steepest = reader.is_exact, reader, reader.steepest

    @override
    def number(self, name: str, value: Callable[[], Tensor], hint: Hint = NO_HINT) -> float:
        return self._reader.number("coupling " + name, value, hint)

    @override
    def numbers(self, asked: Numbers) -> Sequence[float]:
        names = tuple("coupling " + name for name in asked.names)
        return self._reader.numbers(asked._replace(names=names))


def _longest(lr: Scalar, reader: Reader, value: Callable[[], Tensor], most: float) -> float:
    """Return the eigenvalue bound for which the polynomial of the roots is planned.

    ``value()`` is the bound of this step, which the reader keeps for the next one. It is divided by
    lr^2 if lr is a number, and not if lr is a tensor.
    """
    if not isinstance(lr, Tensor) and lr == 0:
        return most
    scale = _MARGIN
    if not isinstance(lr, Tensor):  # it may be another than in the step before
        scale *= lr * lr
    hint = Hint(_SHORT / max(scale, 1e-300), 2 if isinstance(lr, Tensor) else 0)
    known = scale * reader.number("length", value, hint)
    return min(most, max(_SHORT, known)) if known == known else most


def shortened(norm: Tensor, lr: Scalar, most: float = SATURATION) -> Tensor:
    """Return eta, of the shape of ``norm``, shortened so that eta ``norm`` is at most ``most``."""
    longest = most / norm
    if isinstance(lr, Tensor):
        return torch.copysign(torch.minimum(lr.abs().to(norm.dtype), longest), lr)
    step = longest.clamp(max=abs(lr))
    return step if lr >= 0 else -step
