"""The moves that a step is made of, in m x m matrices; notation of momentum.py.

X turns within its span by D = rot(eta Z) and moves along a normal direction V by the polar
retraction, R = (I + eta^2 V'V)^(-1/2). Both roots are worked out together, as small differences
from I, so that X'X = I suffers one rounding of X a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.numerics.device import Reader
from stiefel_opt.numerics.geometry import orthonormality_tolerance
from stiefel_opt.numerics.linalg import (
    MEDIUM,
    Sums,
    add_product,
    add_to_diagonal_,
    are_finite,
    half_error_,
    infinity_norm,
    largest_bound,
    largest_eigenvalue,
    own_gram,
    polar_rotation,
    symmetric_product,
)
from stiefel_opt.numerics.roots import roots

Scalar = float | Tensor
Tensors = dict[str, Tensor]

METRICS: Final = {"canonical": 0.5, "euclidean": 0.0}

# An angle atan(eta sigma) gains nothing beyond this, while I + eta^2 U'U becomes ill-conditioned.
SATURATION: Final = 4.0
# Limits on the last step's bound, squares of tangents: below 14 degrees exact knowledge saves
# little; above, the square may grow fourfold from step to step.
_SHORT: Final = 0.06
_MARGIN: Final = 4.0
# Squares of numbers beyond this may overflow.
_LARGE: Final = 2.0**60


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
    """

    squares: Tensor
    scale: float = 1.0
    limit: float = 0.0
    inner: Tensor | None = None
    step: Tensor | None = None

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


def size_of(inner: Tensor) -> Tensor:
    """Return |S| of each X'G, ``(k, 1, 1)``."""
    size: Tensor = torch.linalg.vector_norm(inner, dim=(-2, -1), keepdim=True)
    return size


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
    half = half_error_(products.pop(0) if own is None else own.clone())
    new_point = add_product(point, point, half)
    changed: Tensors = {}
    for name, overlap in zip([name for name in normal if name in state], products, strict=True):
        inner = torch.baddbmm(overlap, half, overlap)
        changed[name] = add_product(state[name], new_point, inner, alpha=-1.0)
    return new_point, changed


# ---- moves -------------------------------------------------------------------------------------


class StepFactors(NamedTuple):
    """Turn and polar retraction of a step in m x m matrices, for a direction V with W = V'V."""

    rotation: Tensor  # D - I
    shortening: Tensor  # R - I
    companion: Tensor | None  # R (I + R)^(-1), if asked for
    step: Scalar  # eta, shortened where it saturates
    length: Length  # its squares: of the turn, then of the move


def step_factors_of(
    skew: Tensor,
    gram_normal: Tensor,
    lr: Scalar,
    reader: Reader,
    inner: Tensor | None = None,
    *,
    companion: bool = False,
) -> StepFactors:
    """Return the turn along ``skew`` = K / eta and the retraction of V, where W = V'V.

    Both need (I + E)^(-1/2), for E = K'K and for E = eta^2 W: one batch of 2k does it. Where a
    norm that bounds eta sigma exceeds 4, or what the reader allows, the step is shortened, and the
    move where ``inner`` = X'G makes it too steep. ``companion``: also R (I + R)^(-1).
    """
    length, second, turn_step, step = _spectra(skew, gram_normal, lr, reader, inner)
    squares, scale, limit = length[:3]
    companions, reads = skew.size(0) if companion else 0, reader.is_exact
    both = roots(squares, limit, scale=scale, companions=companions, square=second, reads=reads)
    of_turn, of_move = both.difference.unsafe_chunk(2)
    rotation = polar_rotation(skew, of_turn, turn_step)
    return StepFactors(rotation, of_move, both.companion, step, Length(*length[:3], inner))


def rotation_of_square(
    compute: Callable[[], Tensor], lr: Scalar, reader: Reader
) -> tuple[Tensor, Length]:
    """Return D - I for square matrices, X D being the whole move, and the length of the step.

    For a square matrix every m x m is as large as the parameter: Z is computed by ``compute``, and
    freed before the roots are worked out.
    """
    difference, step, length = _of_square(compute, lr, reader)
    return polar_rotation(compute(), difference, step), length


def turned_square(
    point: Tensor, compute: Callable[[], Tensor], lr: Scalar, reader: Reader
) -> tuple[Tensor, Length]:
    """Return X D = (X + X K)(I + S), two products as D takes, and fewer passes over memory."""
    difference, step, length = _of_square(compute, lr, reader)
    turn, step = (compute() * step, 1.0) if isinstance(step, Tensor) else (compute(), step)
    moved = add_product(point, point, turn, alpha=step)
    del turn
    return add_product(moved, moved, difference), length


def _of_square(
    compute: Callable[[], Tensor], lr: Scalar, reader: Reader
) -> tuple[Tensor, Scalar, Length]:
    """Return S = (I + K'K)^(-1/2) - I for K along ``compute()``, and the length of the step."""
    length, second, step, _ = _spectra(compute(), None, lr, reader)
    square, scale, limit = length[:3]
    is_large = square.size(-1) > MEDIUM  # as large as the parameter: a number is stored instead
    length = length._replace(squares=largest_eigenvalue(square)) if is_large else length
    root = roots(
        square, limit, scale=scale, overwrite=is_large, square=second, reads=reader.is_exact
    )
    return root.difference, step, length


def _spectra(
    skew: Tensor,
    normal: Tensor | None,
    lr: Scalar,
    reader: Reader,
    inner: Tensor | None = None,
) -> tuple[Length, Tensor | None, Scalar, Scalar]:
    """Measure a step, and shorten it where it saturates or outgrows what the reader knows.

    Returns: The length, of K'K and then, if there is a W, of eta^2 W; the products of its squares
        with themselves, or None; eta of the turn; eta of the move.
    """
    count, size, most = skew.size(0), skew.size(-1), SATURATION**2
    squares = own_gram(skew)  # -Z^2: its bound is the sharper one
    if normal is not None:
        squares = torch.cat([squares, normal])
    scale, limit = 1.0, math.inf
    if reader.is_exact and isinstance(lr, float):
        scale = lr * lr
        limit = scale * largest_bound(squares)
    # Infinity norms saturate, at most m times the eigenvalue of K'K and sqrt(m) times that of W.
    is_short = size * limit <= most or (
        limit < math.inf
        and (normal is None or math.sqrt(size) * limit <= most)
        and scale * float(infinity_norm(skew).max()) ** 2 <= most
    )
    if is_short:
        if limit > _LARGE * scale:  # their squares would overflow
            squares, scale = squares * scale, 1.0
        return Length(squares, scale, limit), None, lr, lr
    norms = infinity_norm(skew)
    if normal is not None:
        of_move = infinity_norm(normal).sqrt()
        if inner is not None and reader.steepest < math.inf:
            of_move = torch.maximum(of_move, size_of(inner) * (SATURATION / reader.steepest))
        norms = torch.cat([norms, of_move])
    step, second = shortened(norms.view(-1, count, 1, 1), lr).view(-1, 1, 1), None
    squares.mul_(step * step)
    if reader.is_exact:
        limit = min(_bound_of_finite(squares, reader), most)
    else:
        second = symmetric_product(squares, squares)
        bound = infinity_norm(second).sqrt()  # |E|^2 <= |E^2|
        limit = _longest(lr, reader, lambda: bound if isinstance(lr, Tensor) else bound / (lr * lr))
        shorter = (limit / bound).clamp(max=1.0)
        squares, second, step = squares * shorter, second * shorter.square(), step * shorter.sqrt()
    return Length(squares, 1.0, limit), second, step[:count], step[count:]


def _bound_of_finite(matrices: Tensor, reader: Reader) -> float:
    """Return a bound on the eigenvalues of the matrices of a batch that are finite."""
    bound = largest_bound(matrices)
    if not bound < math.inf:
        reader.is_lost = True
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
    """Return the step, shortened so that step^2 xi'xi is at most ``longest``^2, and a bound on it.

    Beyond ``longest`` a step gains nothing; ``size`` is xi'xi, ``(k, m, m)``, ``inner`` X'G.
    """
    bound = most = longest * longest
    if isinstance(step, float) and reader.is_exact:
        bound = step * step * _bound_of_finite(size, reader)
        if bound <= most:
            return step, bound
    norm = infinity_norm(size)
    if not reader.is_exact:
        squared = step * step if isinstance(step, Tensor) else 1.0
        most = _longest(step, reader, lambda: norm * squared, most)
        if inner is not None and reader.steepest < math.inf:
            step = shortened(size_of(inner), step, reader.steepest)
    shorter = (most / (norm * (step * step))).clamp(max=1.0)
    return step * shorter.sqrt(), most


class _PrefixedReader(Reader):
    """Puts a prefix before names, so that a second turn in a step has numbers of its own.

    A lagged reader remembers one number for each name.
    """

    def __init__(self, reader: Reader) -> None:
        self.is_exact, self._reader, self.steepest = reader.is_exact, reader, reader.steepest

    @override
    def number(
        self, name: str, value: Callable[[], Tensor], *, least: float = 0.0, power: int = 0
    ) -> float:
        return self._reader.number("coupling " + name, value, least=least, power=power)


def _longest(
    lr: Scalar, reader: Reader, value: Callable[[], Tensor], most: float = SATURATION**2
) -> float:
    """Return the eigenvalue bound for which the polynomial of the roots is planned.

    ``value()`` is the bound of this step, which the reader keeps for the next one. It is divided by
    lr^2 if lr is a number, and not if lr is a tensor.
    """
    if reader.is_exact or (not isinstance(lr, Tensor) and lr == 0):
        return most
    scale = _MARGIN
    if not isinstance(lr, Tensor):  # it may be another than in the step before
        scale *= lr * lr
    least, power = _SHORT / max(scale, 1e-300), 2 if isinstance(lr, Tensor) else 0
    known = scale * reader.number("length", value, least=least, power=power)
    return min(most, max(_SHORT, known)) if known == known else most


def shortened(norm: Tensor, lr: Scalar, most: float = SATURATION) -> Tensor:
    """Return eta, of the shape of ``norm``, shortened so that eta ``norm`` is at most ``most``."""
    longest = most / norm
    if isinstance(lr, Tensor):
        return torch.copysign(torch.minimum(lr.abs().to(norm.dtype), longest), lr)
    step = longest.clamp(max=abs(lr))
    return step if lr >= 0 else -step
