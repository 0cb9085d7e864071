"""Points, tangent vectors and retractions of tensors as they are stored, for any reading."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, overload

import torch
from torch import Tensor

from stiefel_opt.errors import check_choice, check_flag, check_type, counted, fail, users_level
from stiefel_opt.numerics import geometry
from stiefel_opt.numerics.device import (
    finest_dtype,
    has_values,
    no_autocast,
    values_of,
    widened,
    working_dtype,
)
from stiefel_opt.numerics.distributed import is_sharded
from stiefel_opt.numerics.geometry import (
    gram_error,
    orientation,
    orthonormality_tolerance,
    scale_rounding,
)
from stiefel_opt.numerics.linalg import are_finite, inner_product, sym
from stiefel_opt.tags.manifold import Stiefel, check_determinant, manifold_of

# Singular values of products without full rank reach 4 times the rounding of the largest, for up to
# 2048 rows. Of random n x n matrices one in 1 / (4 n eps) has so small a one: 1000 in float32.
_SEVERAL: Final = 8


def reading_of(tensor: Tensor, manifold: Stiefel | None, name: str) -> Stiefel:
    """Return ``manifold``, or the tag of ``tensor``, or ``Stiefel()``; raise if it does not fit."""
    if not (manifold is None or isinstance(manifold, Stiefel)):
        raise TypeError(fail("manifold", "be None or a Stiefel", repr(manifold)))
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(fail(name, "have a floating-point dtype", tensor.dtype))
    reading = manifold or manifold_of(tensor) or Stiefel()
    reading.check(tensor.shape, name)
    check_phase(reading.determinant, tensor, name)
    return reading


def largest_error(tensor: Tensor, reading: Stiefel) -> Tensor:
    """Return the largest entry of abs(X'X - I) over all matrices X; NaN if one is not finite."""
    return torch.stack([gram_error(points).amax() for points in reading.points(tensor)]).amax()


@torch.no_grad()
def nearest(
    tensor: Tensor,
    reading: Stiefel,
    name: str,
    remedy: str = "initialise it first",
    *,
    tells: bool = False,
    starts: bool = False,
) -> Tensor | None:
    """Return a copy of ``tensor`` with every matrix off the manifold replaced by the nearest point.

    None if all are on it up to rounding; those that are keep their bits. A scale that is learned
    becomes the mean singular value; with ``starts`` that of the reading.

    Raises:
        ValueError: for values that are not finite, naming ``name``.
    """
    check_phase(reading.determinant, tensor, name)
    check_projectable(tensor, reading, name, remedy)
    result = None
    for index, part in enumerate(reading.parts(tensor)):
        matrices = widened(reading.matrices(part, index))
        tolerance = orthonormality_tolerance(tensor.dtype, matrices.size(-2))
        off = ~(gram_error(matrices / reading.scale_of(matrices)) <= tolerance)  # overflows count
        if reading.determinant is not None:
            off |= orientation(matrices / reading.scale_of(matrices)) * reading.determinant < 0
        if bool(off.any()):
            result = tensor.detach().clone() if result is None else result
            projected = matrices.clone()
            factor, gap = geometry.polar(matrices[off], reading.determinant)
            if tells:
                gaps = torch.ones(off.shape, dtype=gap.dtype, device=gap.device)
                gaps[off] = gap
                warn_if_not_unique(name, gaps)
            scale: Any = reading.scale
            if reading.learn_scale and not starts:
                scale = mean_singular_value(matrices[off], factor)
            projected[off] = scale * factor
            reading.parts(result)[index].copy_(reading.stored(projected, part.shape, index))
    return result


def mean_singular_value(matrices: Tensor, factor: Tensor) -> Tensor:
    """Return the mean singular value of matrices with this polar factor; 1 for zero matrices."""
    sizes = inner_product(factor, matrices) / matrices.size(-1)
    return torch.where(sizes > 0, sizes, 1.0)


def check_projectable(tensor: Tensor, reading: Stiefel, name: str, remedy: str) -> None:
    """Raise unless what ``reading`` reads of ``tensor`` is finite."""
    for index, part in enumerate(reading.parts(tensor.detach())):
        if not bool(torch.isfinite(part).all()):
            bad = ~are_finite(reading.matrices(part, index))
            given = f"shape {tuple(tensor.shape)} with infinities or NaN{counted(bad)}"
            raise ValueError(fail(name, "be finite to be projected", given, remedy))


@torch.no_grad()
def kept_scale(value: Tensor, reading: Stiefel, name: str) -> float:
    """Return the root mean square of the singular values: points of that scale have its norm."""
    if not has_values(value):
        wanted = "be a number on the meta device, and for fake tensors"
        raise ValueError(fail("scale", wanted, "'keep'"))
    matrices = [reading.matrices(part, index) for index, part in enumerate(reading.parts(value))]
    # float32 adds the squares of a large weight, or of equal entries, one after the other
    norms = [torch.linalg.vector_norm(each, dtype=finest_dtype(each)) for each in matrices]
    count = sum(matrix.numel() // matrix.size(-2) for matrix in matrices)  # of singular values
    mean = float(torch.linalg.vector_norm(torch.stack(norms))) / math.sqrt(count)
    if not 0 < mean < float("inf"):
        raise ValueError(fail(name, "be finite and not zero for scale='keep'", f"a mean of {mean}"))
    return mean


def is_alike(reading: Stiefel, other: Stiefel, tensor: Tensor) -> bool:
    """Say whether readings of a tensor are equal, but for the rounding of a scale that it kept."""
    rounding = scale_rounding(tensor.dtype, max(other.heights(tensor.shape)))
    is_close = math.isclose(reading.scale, other.scale, rel_tol=rounding)
    ndim = tensor.ndim
    return is_close and replace(reading, scale=other.scale).on(ndim) == other.on(ndim)


def rms_scale(value: Tensor, reading: Stiefel, name: str) -> float:
    """Return sqrt(rows / columns) of the matrices, which all ranges of rows must share."""
    ratios = set()
    for index, part in enumerate(reading.parts(value)):
        n, m = reading.matrices(part, index).shape[-2:]
        ratios.add(m / n if reading.is_wide(part.shape, index) else n / m)
    if len(ratios) > 1:
        remedy = "constrain the ranges of rows with a number"
        raise ValueError(fail(name, "have matrices of one height for scale='rms'", ratios, remedy))
    return math.sqrt(ratios.pop())


def random_point(
    *shape: int,
    manifold: Stiefel | None = None,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a uniformly (Haar) distributed point on the manifold, a tensor of ``shape``.

    Args:
        shape: At least two positive sizes.
        manifold: The reading. Default: ``Stiefel()``, by which the last two dimensions are one
            matrix: a tall one gets orthonormal columns, a wide one orthonormal rows. Rows that a
            reading leaves plain are zero.
        generator: Source of the random numbers. Default: torch's global one.
        dtype, device: Default: those of torch.

    Returns: The point.
    Raises:
        ValueError: for sizes that cannot be, or that ``manifold`` does not fit.
        TypeError: if ``manifold`` is not a :class:`Stiefel`.

    Note: One QR decomposition for each matrix.
    Reference: Mezzadri, How to generate random matrices from the classical compact groups (2007).
    """
    if len(shape) < 2 or any(type(size) is not int or size < 1 for size in shape):
        raise ValueError(fail("shape", "be at least two positive sizes", shape))
    point = torch.zeros(shape, dtype=dtype, device=device)
    reading = reading_of(point, manifold, "shape")
    for index, part in enumerate(reading.parts(point)):
        size = reading.matrices(part, index).shape
        drawn = geometry.random_point(*size, generator=generator, dtype=dtype, device=device)
        drawn = _of_component(drawn, reading)
        part.copy_(reading.stored(reading.scale * drawn, part.shape, index))
    return point


def _of_component(points: Tensor, reading: Stiefel) -> Tensor:
    """Negate the last column of random points with the other determinant: the rest is uniform."""
    if reading.determinant is None:
        return points
    signs = (orientation(points) * reading.determinant).to(points.dtype)
    return torch.cat([points[..., :-1], points[..., -1:] * signs[..., None, None]], dim=-1)


@torch.no_grad()
def orthogonal_(
    tensor: Tensor,
    gain: float = 1.0,
    generator: torch.Generator | None = None,
    *,
    heads: int | None = None,
    manifold: Stiefel | None = None,
) -> Tensor:
    """Fill ``tensor`` with a uniformly (Haar) distributed point, as ``torch.nn.init.orthogonal_``.

    A tensor of more than two dimensions is read as ``(C_out, C_in * prod(kernel))``. In float32 and
    float64 the numbers are torch's own for the same seed; bfloat16, float16 and complex work too.

    Args:
        tensor: At least two dimensions; one without entries stays as it is.
        gain: Factor of the values. Default: 1.
        generator: Source of the random numbers. Default: torch's global one.
        heads: The rows are this many equal blocks, each a matrix of its own. Default: one block.
        manifold: Another reading; its ``scale`` is a factor too, and rows that it leaves plain stay
            as they are. Default: the tag of ``tensor``, else as above.

    Returns: The tensor.
    Raises:
        ValueError: for fewer than two dimensions, a reading that does not fit, both ``heads`` and a
            reading, or a gain other than 1 for a tagged tensor, which has its scale.
        TypeError: if ``tensor`` is no tensor, has an integer dtype, or is sharded.

    Note: One QR decomposition for each matrix, in float32 for half precision.
    Reference: Saxe, McClelland & Ganguli (ICLR 2014); Mezzadri (2007).
    """
    check_type("tensor", tensor, Tensor, "be a tensor")
    if is_sharded(tensor):
        remedy = "initialise it before it is sharded"
        raise TypeError(fail("tensor", "not be sharded", "a DTensor", remedy))
    tagged = manifold_of(tensor, "tensor")
    if heads is not None and (manifold or tagged) is not None:
        remedy = "the reading says it"
        raise ValueError(fail("heads", "be None for a manifold or a tag", heads, remedy))
    if tagged is not None and gain != 1:
        remedy = "pass scale= to so.constrain"
        raise ValueError(fail("gain", "be 1 for a tagged tensor", gain, remedy))
    if tensor.ndim >= 2 and tensor.numel() == 0:
        return tensor
    manifold = manifold or tagged or Stiefel(heads=heads, flatten=tensor.ndim > 2)
    reading = reading_of(tensor, manifold, "tensor")
    for index, part in enumerate(reading.parts(tensor)):
        dtype = working_dtype(part.dtype)
        drawn = torch.empty_like(part, dtype=dtype, memory_format=torch.contiguous_format)
        gaussian = reading.matrices(drawn.normal_(generator=generator), index)
        point = _of_component(geometry.positive_qr(gaussian), reading) * (reading.scale * gain)
        part.copy_(reading.stored(point, part.shape, index))
    return tensor


@overload
def polar(
    tensor: Tensor,
    manifold: Stiefel | None = None,
    *,
    determinant: Literal[1, -1] | None = None,
    return_factor: Literal[False] = False,
) -> Tensor: ...
@overload
def polar(
    tensor: Tensor,
    manifold: Stiefel | None = None,
    *,
    determinant: Literal[1, -1] | None = None,
    return_factor: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def polar(
    tensor: Tensor,
    manifold: Stiefel | None = None,
    *,
    determinant: Literal[1, -1] | None = None,
    return_factor: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Return the point nearest to ``tensor``, with its derivative.

    The polar factor Q of each matrix A = QH, H symmetric and positive semidefinite; of a wide one
    A = HQ. By the singular value decomposition :math:`A = P \Sigma R^\top` it is
    :math:`Q = P R^\top`. With ``determinant=1`` the nearest rotation,
    :math:`P \, \mathrm{diag}(1, \dots, 1, \det P R^\top) R^\top`, also known as the solution of
    Kabsch and of the special orthogonal Procrustes problem.

    Args:
        tensor: Any tensor, an activation too. It is not written to.
        manifold: The reading; the point is ``scale`` times Q, or, where the scale is learned, the
            mean singular value times Q. Default: the tag of ``tensor``, else
            ``Stiefel()``. Rows that it leaves plain are returned as they are.
        determinant: 1 or -1, of square real matrices. Default: that of the reading, None: the
            nearest of both kinds.
        return_factor: Return H, too, ``(..., m, m)``, m the smaller size; with another determinant
            than that of the nearest point its last eigenvalue is negative. Default: False.

    Returns: The point, or the point and H.
    Raises:
        ValueError: for values that are not finite, naming the first matrix and how many there are,
            shapes that do not fit, and a determinant of matrices that are rectangles or complex.
        TypeError: for what is no tensor of numbers with a fraction.

    Note: One singular value decomposition and one Newton-Schulz step, in float32 for half
        precision; the derivative, of any order in reverse mode, one eigendecomposition of m x m.
        It divides by sums of two singular values, one negative if ``determinant`` has changed its
        sign: singular values that are equal do no harm. Where such a sum is zero, as of a zero
        matrix, the nearest point is not unique: this warns, returns one of them, and the derivative
        in the direction of the others is zero. On an accelerator nothing is read, and nothing said.
    Reference: Higham, Functions of matrices (2008), chapter 8; Kabsch (1976); Umeyama (1991).
    """
    check_type("tensor", tensor, Tensor, "be a tensor")
    check_flag("return_factor", return_factor)
    check_determinant(determinant)
    reading = reading_of(tensor, manifold, "tensor")
    if determinant is not None:
        reading = replace(reading, determinant=determinant)
        reading = reading_of(tensor, reading, "tensor")
    if return_factor and reading.rows is not None:
        remedy = "call it for each range of rows"
        raise ValueError(fail("return_factor", "be False for a reading with rows", True, remedy))
    factors: list[Tensor] = []

    def nearest_of(matrices: Tensor, _: Tensor, scale: Any) -> Tensor:
        wide = widened(matrices)
        with no_autocast(wide):
            _check_finite(wide, tensor)
            points, gap = geometry.polar(wide, reading.determinant)
            warn_if_not_unique("tensor", gap)
            if reading.learn_scale:
                mean = mean_singular_value(wide, points)
                wide, scale = wide / mean, scale * mean
            if return_factor:
                factors.append(sym(points.mH @ wide).to(matrices.dtype))
            point: Tensor = scale * points
            return point.to(matrices.dtype)

    point = matrix_wise(nearest_of, reading, tensor, tensor, lambda given, _: given.clone())
    if return_factor:
        is_wide = reading.is_wide(tensor.shape)
        return point, factors[0].mT if is_wide else factors[0]
    return point


def check_phase(determinant: int | None, tensor: Tensor, name: str) -> None:
    """Raise for a determinant of complex matrices."""
    if determinant is not None and tensor.is_complex():
        wanted = f"be None for the complex matrices of `{name}`"
        remedy = "theirs is a phase, which each step of an optimizer moves"
        raise ValueError(fail("determinant", wanted, determinant, remedy))


def wrong_signs(tensor: Tensor, reading: Stiefel) -> Tensor:
    """Return a mask of the matrices with the other determinant than the reading, in one row."""
    if reading.determinant is None or tensor.is_complex():  # refused in words elsewhere
        return torch.zeros(0, dtype=torch.bool)
    signs = [orientation(each).flatten() for each in reading.points(widened(tensor.detach()))]
    return torch.cat(signs) * reading.determinant < 0


def _check_finite(matrices: Tensor, tensor: Tensor, name: str = "tensor") -> None:
    """Raise for values that are not finite, if they may be looked at."""
    values = values_of(matrices)
    if values is not None and not bool((finite := are_finite(values)).all()):
        given = f"shape {tuple(tensor.shape)} with infinities or NaN{counted(~finite)}"
        raise ValueError(fail(name, "be finite", given))


def warn_if_not_unique(name: str, gap: Tensor, dtype: torch.dtype | None = None) -> None:
    """Warn of matrices, known to this dtype, whose polar factor, by its gap, is one of several."""
    values = values_of(gap)
    if values is None:
        return
    several = values <= _SEVERAL * torch.finfo(dtype or values.dtype).eps
    if bool(several.any()):
        warnings.warn(
            f"the nearest point to `{name}` is not unique{counted(several)}: it lacks full rank, "
            "or is a multiple of a point with the other determinant; one of the nearest is taken",
            stacklevel=users_level(),
        )


def project_tangent(point: Tensor, vector: Tensor, manifold: Stiefel | None = None) -> Tensor:
    r"""Return the tangent vector at ``point`` that is nearest to ``vector``.

    :math:`D - X \, \mathrm{sym}(X^\top D)` for each matrix X. Of a Euclidean gradient it is the
    Riemannian gradient of the Euclidean metric. Where the scale is learned, what changes it is
    tangent, too: :math:`X \, \mathrm{tr}(X^\top D) / m` is added.

    Args:
        point: A point, a tensor or a parameter.
        vector: A tensor of the same shape. Plain rows of a reading stay as they are.
        manifold: The reading. Default: the tag of ``point``, else ``Stiefel()``.

    Returns: The tangent vector.
    Raises:
        ValueError: for shapes that differ, or that ``manifold`` does not fit.
        TypeError: for arguments that are no tensor, or no :class:`Stiefel`.

    Note: Two products of size n x m by m x m. Differentiable.
    """
    reading = _reading(point, manifold, vector)
    project = tangent_part_with_scale if reading.learn_scale else geometry.tangent_part
    return matrix_wise(
        lambda X, D, _: project(X, D), reading, point, vector, lambda _, given: given.clone()
    )


def tangent_part_with_scale(X: Tensor, D: Tensor) -> Tensor:
    """Return the part of D that is tangent to all multiples of orthonormal matrices at one of X."""
    return geometry.tangent_part(X, D) + X * (inner_product(X, D) / X.size(-1))


def retract(
    point: Tensor, tangent: Tensor, manifold: Stiefel | None = None, *, retraction: str = "polar"
) -> Tensor:
    r"""Return the point at which a step from ``point`` along ``tangent`` ends.

    With X and :math:`\xi` the matrices, both divided by the scale of the reading, or their own if
    it is learned; that then changes by :math:`\mathrm{tr}(X^\top \xi) / m` times itself:

    - ``"polar"``: :math:`(X + \xi)(I + \xi^\top \xi)^{-1/2}`, the point nearest to X + xi;
    - ``"qr"``: the Q factor of X + xi, R with a positive diagonal;
    - ``"cayley"``: :math:`(I - W/2)^{-1} (I + W/2) X` with W = P xi X' - X xi' P, P = I - XX'/2.

    All agree with the geodesic to first order; "polar" and "cayley" to second, of the Euclidean and
    of the canonical metric.

    Args:
        point: A point, a tensor or a parameter.
        tangent: A tangent vector, as :func:`project_tangent` returns it. Plain rows are added.
        manifold: The reading. Default: the tag of ``point``, else ``Stiefel()``.
        retraction: ``"polar"``, ``"qr"`` or ``"cayley"``.

    Returns: The new point; ``point`` is not written to.
    Raises:
        ValueError: for another retraction, shapes that differ or that ``manifold`` does not fit,
            and for "polar" on a CPU values that are not finite.
        TypeError: for arguments that are no tensor, or no :class:`Stiefel`.

    Note: One factorisation for each matrix, in float32 for half precision. Differentiable any
        number of times, at a tangent of zero too; "polar" in reverse mode only, with an
        eigendecomposition of m x m. An optimizer of this package needs none of it: see
        :class:`ProjectedRGD`.
    Reference: Absil, Mahony & Sepulchre, Optimization algorithms on matrix manifolds (2008), 4.1;
        Wen & Yin (2013).
    """
    check_choice("retraction", retraction, geometry.RETRACTIONS)
    reading = _reading(point, manifold, tangent)

    def move(matrices: Tensor, tangents: Tensor, scale: Any) -> Tensor:
        if reading.learn_scale:
            along = inner_product(matrices, tangents) / matrices.size(-1)
            new_scale, tangents = scale + along, tangents - along * matrices
        else:
            new_scale = scale
        try:
            moved: Tensor = new_scale * geometry.retraction(matrices, tangents / scale, retraction)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            _check_finite(matrices + tangents, point, "point + tangent")
            raise
        return moved

    return matrix_wise(move, reading, point, tangent, torch.add)


def matrix_wise(
    function: Callable[[Tensor, Tensor, Any], Tensor],
    reading: Stiefel,
    point: Tensor,
    vector: Tensor,
    plain: Callable[[Tensor, Tensor], Tensor],
    count: int | None = None,
) -> Tensor:
    """Return ``function`` of the matrices, without scale, of the vectors and of the scale.

    ``plain`` is the value of the rows between. With ``count`` both return so many tensors, along a
    first dimension.
    """
    values = []
    for index, (part, own) in enumerate(
        zip(reading.parts(point), reading.parts(vector), strict=True)
    ):
        matrices = reading.matrices(part, index)
        scale = reading.scale_of(matrices)
        value = function(matrices / scale, reading.matrices(own, index), scale)
        shape = part.shape if count is None else torch.Size((count, *part.shape))
        values.append(reading.stored(value, shape, index, stacked=count is not None))
    if reading.rows is None:
        return values[0].contiguous()
    return with_parts(plain(point, vector), reading, values)


def with_parts(result: Tensor, reading: Stiefel, values: Sequence[Tensor]) -> Tensor:
    """Write the constrained ranges of rows into ``result``."""
    for part, value in zip(reading.parts(result), values, strict=True):
        part.copy_(value)
    return result


def _reading(point: Tensor, manifold: Stiefel | None, vector: Tensor) -> Stiefel:
    """Return how ``point`` is read; raise unless ``vector`` is of the same kind."""
    for name, tensor in (("point", point), ("vector", vector)):
        check_type(name, tensor, Tensor, "be a tensor")
    reading = reading_of(point, manifold, "point")
    if vector.shape != point.shape or vector.dtype != point.dtype:
        wanted = f"be of shape {tuple(point.shape)} and {point.dtype}, as the point"
        given = f"shape {tuple(vector.shape)} and {vector.dtype}"
        raise ValueError(fail("vector", wanted, given))
    return reading
