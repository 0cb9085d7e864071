"""Functions between points of tensors as they are stored: exponential, logarithm, distance, mean.

Differentiable also off the manifold: a point is read as the nearest one, whose derivative is the
projection onto the tangent space.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from stiefel_opt.errors import check_choice, check_type, counted, fail
from stiefel_opt.numerics import geodesics
from stiefel_opt.numerics.device import exact_products, values_of, widened
from stiefel_opt.numerics.geometry import (
    FAR,
    gram_error,
    newton_schulz,
    orientation,
    tangent_part,
)
from stiefel_opt.tags.manifold import Stiefel
from stiefel_opt.tags.points import matrix_wise, reading_of, with_parts

_NEAR: Final = 1e-4  # an error of X'X up to which one Newton-Schulz step reaches rounding


def exp(
    point: Tensor,
    tangent: Tensor,
    manifold: Stiefel | None = None,
    *,
    metric: str = "euclidean",
) -> Tensor:
    r"""Return the end of the geodesic that leaves ``point`` with the velocity ``tangent``.

    With :math:`A = X^\top \xi`, Q and B from :math:`\xi = X A + Q B`, and :math:`\beta` = 1 for the
    Euclidean, 1/2 for the canonical metric,

    .. math:: \exp_X \xi = [X \; Q] \exp \begin{pmatrix} 2 \beta A & -B^\top \\ B & 0 \end{pmatrix}
        \begin{pmatrix} I \\ 0 \end{pmatrix} e^{(1 - 2 \beta) A};

    :math:`X e^A` of square matrices.

    Args:
        point: A point, a tensor or a parameter.
        tangent: A tangent vector; of another vector the tangent part counts. Shapes broadcast.
            Plain rows are added.
        manifold: The reading. Default: the tag of ``point``, else ``Stiefel()``.
        metric: ``"euclidean"``, tr(xi' zeta), or ``"canonical"``, tr(xi' (I - XX'/2) zeta).

    Returns: The point.
    Raises:
        ValueError: for another metric, shapes that do not fit, and a point that is off the
            manifold, naming the first matrix and how many there are.
        TypeError: for arguments that are no tensor.

    Note: One exponential of 2m x 2m, of m x m if square; in float32 for half precision.
        Differentiable any number of times, at a tangent of zero too.
    Reference: Edelman, Arias & Smith (1998), 2.2.2 and 2.4.2; Zimmermann & Hueper (2022).
    """
    beta = _beta(metric)

    def move(point: Tensor, tangent: Tensor) -> Tensor:
        return geodesics.shoot(point, tangent_part(point, tangent), beta)

    return _map(move, *_read(point, tangent, manifold), torch.add, is_vector=True)


def log(
    point: Tensor, other: Tensor, manifold: Stiefel | None = None, *, metric: str = "euclidean"
) -> Tensor:
    r"""Return the velocity at ``point`` of the geodesic that is at ``other`` after time 1.

    The inverse of :func:`exp`; of square matrices :math:`X \log(X^\top Y)`.

    Args:
        point, other: Points. Shapes broadcast. Of plain rows the difference is returned.
        manifold: The reading. Default: the tag of ``point``, else ``Stiefel()``.
        metric: As in :func:`exp`. Square matrices have the same for both.

    Returns: The tangent vector. Half a turn apart it is one of several, and this warns.
    Raises:
        ValueError: as :func:`exp`, and for real square matrices of different determinants, naming
            the first and how many there are.
        RuntimeError: where no geodesic is found: between tall matrices further apart than about 4.

    Note: Of square matrices one eigendecomposition, of 3 x 3 none, a quaternion. Of tall ones an
        iteration on 2m x 2m matrices, in float64: some 5 to 50 eigendecompositions for
        "canonical", then up to 200 exponentials for "euclidean". The geodesic is the shortest up to
        a distance of pi for "euclidean", .89 pi for "canonical"; beyond it a shorter one may exist.
        Differentiable once; at half a turn along the one that is returned.
    Reference: Zimmermann & Hueper, Computing the Riemannian logarithm on the Stiefel manifold
        (SIAM J. Matrix Anal. Appl. 2022).
    """
    beta = _beta(metric)

    def difference(point: Tensor, other: Tensor) -> Tensor:
        _check_component(point, other)
        return geodesics.lift(point, other, beta)

    return _map(difference, *_read(point, other, manifold), lambda here, there: there - here)


def distance(
    point: Tensor, other: Tensor, manifold: Stiefel | None = None, *, metric: str = "euclidean"
) -> Tensor:
    r"""Return the length of the geodesic from ``point`` to ``other``, one for each matrix.

    Of square matrices :math:`|\log X^\top Y|_F` for "euclidean", that over :math:`\sqrt 2` for
    "canonical": the angle, of 3 x 3 rotations. ``scale`` of a reading is a factor.

    Args:
        point, other, manifold, metric: As in :func:`log`. Plain rows do not count.

    Returns: The distances ``(...)``, those of heads in a last dimension, of several ranges of rows
        one after the other. Infinite between real square matrices of different determinants.
    Raises:
        ValueError, TypeError, RuntimeError: as :func:`log`.

    Note: Cost as of :func:`log`; the gradient, a unit vector, costs nothing more, and is 0 at
        distance 0.
    """
    beta = _beta(metric)
    point, other, reading = _read(point, other, manifold)
    lengths = []
    for index, (own, theirs) in enumerate(
        zip(reading.parts(point), reading.parts(other), strict=True)
    ):
        pairs = ("point", own), ("other", theirs)
        here, there = (_points(part, reading, index, name) for name, part in pairs)
        with exact_products(here):
            length = geodesics.separation(here, there, beta) * reading.scale
        lengths.append(length.to(own.dtype.to_real()))
    if len(lengths) == 1:
        return lengths[0]
    lead = [point.size(dim) for dim in reading.dims(point.ndim).batch]
    return torch.cat([each.reshape(*lead, -1) for each in lengths], dim=-1)


def interpolate(
    point: Tensor,
    other: Tensor,
    t: float | Tensor,
    manifold: Stiefel | None = None,
    *,
    metric: str = "euclidean",
) -> Tensor:
    """Return the points at ``t`` on the geodesic from ``point``, t = 0, to ``other``, t = 1.

    Args:
        point, other, manifold, metric: As in :func:`log`. Plain rows move along a line.
        t: A number, or a tensor of them; other numbers than those of [0, 1] extrapolate.

    Returns: The points, of shape ``(*t.shape, *point.shape)``.
    Raises:
        ValueError, TypeError, RuntimeError: as :func:`log`; half a turn apart it warns.

    Note: :func:`log` once and :func:`exp` for each number; differentiable once, by ``t`` too.
    """
    beta = _beta(metric)
    point, other, reading = _read(point, other, manifold)
    times = torch.as_tensor(t, dtype=point.dtype.to_real(), device=point.device)
    flat = times.reshape(-1)

    def along(point: Tensor, other: Tensor) -> Tensor:
        _check_component(point, other)
        tangent = geodesics.lift(point, other, beta)
        steps = flat.to(tangent.dtype).reshape(-1, *[1] * tangent.ndim)
        return geodesics.shoot(point.expand(len(flat), *point.shape), steps * tangent, beta)

    def line(here: Tensor, there: Tensor) -> Tensor:
        steps = flat.to(here.dtype).reshape(-1, *[1] * here.ndim)
        return here + steps * (there - here)

    path = _map(along, point, other, reading, line, count=len(flat))
    return path.reshape(*times.shape, *point.shape)


def mean(
    points: Tensor | Sequence[Tensor],
    manifold: Stiefel | None = None,
    *,
    weights: Sequence[float] | None = None,
    metric: str = "euclidean",
) -> Tensor:
    r"""Return the mean of several points, the one of the least sum of square distances.

    Where :math:`\sum_i w_i \log_M(Y_i) = 0`, also known as Karcher or Frechet mean.
    ``so.polar(points.mean(0))`` minimises the square distances in the space around the manifold
    instead: without an iteration, and close to it for points that are close together.

    Args:
        points: ``(k, ...)``, or k tensors. Of plain rows the mean is that of the numbers.
        manifold: The reading of one point. Default: the tag of ``points`` or of the first, else
            ``Stiefel()``.
        weights: k numbers that are not negative, divided by their sum. Default: equal ones.
        metric: As in :func:`exp`.

    Returns: The mean, of the shape of one point.
    Raises:
        ValueError: as :func:`log`, also for weights that cannot be.
        RuntimeError: where the iteration does not converge: the points are spread too far.

    Note: Each iteration takes :func:`log` of all points; close together, about ten. Unique within
        a ball of a quarter of the shortest closed geodesic. Differentiable once, by ``points``.
    Reference: Karcher (1977); Afsari (2011).
    """
    beta = _beta(metric)
    given = points
    listed = list(points.unbind(0)) if isinstance(points, Tensor) and points.ndim else points
    if not isinstance(listed, (list, tuple)) or not listed:
        raise TypeError(fail("points", "be a tensor (k, ...), or k tensors", type(given).__name__))
    if not all(isinstance(each, Tensor) for each in listed):
        raise TypeError(fail("points", "be tensors", [type(each).__name__ for each in listed]))
    if len({each.shape for each in listed}) > 1:
        raise ValueError(fail("points", "have one shape", [tuple(each.shape) for each in listed]))
    tagged = manifold or getattr(
        given if isinstance(given, Tensor) else listed[0], "manifold", None
    )
    reading = reading_of(listed[0], tagged, "points")
    _check_scale(reading)
    shares = _shares(weights, len(listed), listed[0])
    parts = [reading.parts(each) for each in listed]
    values = []
    for index, own in enumerate(zip(*parts, strict=True)):
        matrices = [widened(reading.matrices(each, index)) for each in own]
        stack = _on_manifold(torch.stack(matrices) / reading.scale, "points")
        _check_component(stack[:1].expand_as(stack), stack)
        with exact_products(stack):
            found = geodesics.barycentre(stack, shares.to(stack.dtype), beta)
        found = (reading.scale * found).to(own[0].dtype)
        values.append(reading.stored(found, own[0].shape, index))
    if reading.rows is None:
        return values[0].contiguous()
    result = sum(share * each for share, each in zip(shares.tolist(), listed, strict=True))
    return with_parts(result, reading, values)


# ---- readings ------------------------------------------------------------------------------------


def _beta(metric: str) -> float:
    check_choice("metric", metric, geodesics.METRICS)
    return geodesics.METRICS[metric]


def _read(point: Tensor, other: Tensor, manifold: Stiefel | None) -> tuple[Tensor, Tensor, Stiefel]:
    """Return both of one shape, and how they are read."""
    for name, tensor in (("point", point), ("other", other)):
        check_type(name, tensor, Tensor, "be a tensor")
    if other.dtype != point.dtype:
        raise TypeError(fail("other", f"be of {point.dtype}, as the point", other.dtype))
    reading = reading_of(point, manifold, "point")
    if other.ndim < 2 or not reading.is_alike(point.shape, other.shape):
        wanted = f"be matrices as the point, of shape {tuple(point.shape)}"
        raise ValueError(fail("other", wanted, f"shape {tuple(other.shape)}"))
    try:
        shape = torch.broadcast_shapes(point.shape, other.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        wanted = f"broadcast with the point, of shape {tuple(point.shape)}"
        raise ValueError(fail("other", wanted, f"shape {tuple(other.shape)}")) from None
    reading.check(shape, "point")
    _check_scale(reading)
    return point.expand(shape), other.expand(shape), reading


def _check_scale(reading: Stiefel) -> None:
    """Refuse a scale that is learned: these are functions of orthonormal matrices."""
    if reading.learn_scale:
        remedy = "divide by the scale, and read it by so.Stiefel()"
        raise ValueError(fail("manifold", "have a fixed scale", reading, remedy))


def _points(part: Tensor, reading: Stiefel, index: int, name: str) -> Tensor:
    """Return the tall matrices of a part, without scale, on the manifold; raise if they are off."""
    return _on_manifold(widened(reading.matrices(part, index)) / reading.scale, name)


def _on_manifold(matrices: Tensor, name: str) -> Tensor:
    """Return the nearest points without rounding; raise for matrices that are off."""
    error = values_of(gram_error(matrices.detach()))
    is_near = error is not None and bool((error <= _NEAR).all())
    if error is not None and not is_near and bool((off := ~(error <= FAR)).any()):
        given = f"matrices with an error of X'X of {float(error.nan_to_num(math.inf).max()):.1e}"
        remedy = "so.polar or so.project_ gives the nearest point"
        raise ValueError(fail(name, "be on the manifold", given + counted(off), remedy))
    with exact_products(matrices):
        return newton_schulz(matrices, 1 if is_near else 4)


def _check_component(point: Tensor, other: Tensor) -> None:
    """Raise for real square matrices of different determinants."""
    if point.size(-2) != point.size(-1) or point.is_complex():
        return
    signs = values_of(orientation(point.detach()) * orientation(other.detach()))
    if signs is not None and bool((signs < 0).any()):
        given = f"the other one{counted(signs < 0)}"
        remedy = "no path leads from rotations to reflections"
        raise ValueError(fail("determinant of other", "be that of the point", given, remedy))


def _map(
    function: Callable[[Tensor, Tensor], Tensor],
    point: Tensor,
    other: Tensor,
    reading: Stiefel,
    plain: Callable[[Tensor, Tensor], Tensor],
    *,
    is_vector: bool = False,
    count: int | None = None,
) -> Tensor:
    """Return ``function`` of the points, or of one and a vector; ``plain`` of the rows between."""

    def on_points(here: Tensor, there: Tensor, scale: float) -> Tensor:
        here, there = _on_manifold(here, "point"), there / scale
        there = there if is_vector else _on_manifold(there, "other")
        with exact_products(here):
            return scale * function(here, there)

    wide = widened(point), widened(other)
    return matrix_wise(on_points, reading, *wide, plain, count).to(point.dtype)


def _shares(weights: Sequence[float] | None, count: int, like: Tensor) -> Tensor:
    """Return the weights of a mean, divided by their sum."""
    given = [1.0] * count if weights is None else [float(weight) for weight in weights]
    if len(given) != count:
        raise ValueError(fail("weights", f"have one number for each of {count} points", len(given)))
    total = sum(given)
    if not (min(given) >= 0 and 0 < total < math.inf):
        raise ValueError(fail("weights", "be finite, not negative, and not all zero", given))
    return torch.tensor(given, device=like.device, dtype=torch.float64) / total
