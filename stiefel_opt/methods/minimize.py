"""One call that minimises a loss over points: L-BFGS, one start after the other or all at once.

The frames are those of :class:`StiefelLBFGS`. Pairs are not rotated: a slope along a line is that
of the coordinates of the direction, so that its Wolfe condition is s'y > 0. Inner products of pairs
are computed once, and a direction takes two products with all pairs and two triangular solves.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.errors import HALF, check_count, check_flag, check_range, fail
from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.numerics import (
    exact_products,
    newton_schulz,
    orientation,
    own_gram,
    project_tangent,
    riemannian_gradient,
)
from stiefel_opt.tags import Stiefel, manifold_of, nearest, random_point, reading_of

Loss = Callable[[Any], Tensor]
_End = tuple[float, float, float]  # t, loss and slope

_ARMIJO: Final = 1e-4  # of the slope: a sufficient decrease
_CURVATURE: Final = 0.9  # of the slope: a step that is long enough
_TRIALS: Final = 25  # of one line search
_PAIRS: Final = 30  # that are kept
_FIRST: Final = 0.4  # radians of the first trial of all
_NUDGE: Final = 1e-2  # length of the random move at a stationary start
_CONVERGED: Final = "the Riemannian gradient is small"
_ROUNDING: Final = "no lower loss was found along the negative gradient: rounding, or a kink"
_SPENT: Final = "max_evaluations is reached"
_STOPPED: Final = "the callback stopped it"
_LOST: Final = "the loss or its gradient is not finite at the start"


@dataclass(frozen=True)
class Minimum:
    """Result of :func:`minimize`, with the names of scipy's ``OptimizeResult``.

    Attributes:
        x: The best point, in the form of the start.
        fun: The loss there.
        grad_norm: Norm of the Riemannian gradient there, for the canonical metric.
        nit: Iterations, of all starts together.
        nfev: Evaluations of loss and gradient, of all starts together.
        success: Whether the best start has converged.
        message: Why it ended, and what else has happened.
        component: Determinant of ``x``, 1 or -1, of one real square matrix; None of others.
    """

    x: Any
    fun: float
    grad_norm: float
    nit: int
    nfev: int
    success: bool
    message: str
    component: int | None = None


def minimize(
    loss: Loss,
    start_or_shape: Any,
    manifold: Any = None,
    *,
    starts: int = 1,
    batched_loss: bool = False,
    tolerance: float | None = None,
    max_evaluations: int = 1000,
    callback: Callable[[Minimum], object] | None = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> Minimum:
    """Minimise a loss without noise over points on the manifold, and return the best.

    By L-BFGS with curves and frames of the canonical metric and a line search for the Wolfe
    conditions. The result of a local method: ``starts`` gives others a chance. Nothing leaves the
    component of the determinant in which a square matrix begins: two starts or more try both.

    Args:
        loss: Returns a number for a point, ``loss(x)``, differentiable by torch, the same one at
            the same point. It is given what ``start_or_shape`` is: a tensor, or a tuple or dict.
        start_or_shape: A tensor, which becomes the nearest point, the sizes of one that is drawn at
            random, or a tuple, list or dict of tensors.
        manifold: The reading. Default: the tag, else ``Stiefel()``. Of several tensors in the same
            form, with None for unconstrained ones. Default: their tags.
        starts: How often. The first start is the given one; the others are uniformly distributed,
            and alternate between both components of a real square matrix without a
            ``determinant``. Unconstrained tensors start as given. Default: 1.
        batched_loss: All starts at once: ``loss`` is given tensors with a leading dimension, and
            returns ``(starts,)``. Each start has a step length of its own.
        tolerance: A start ends where the norm of the Riemannian gradient is below this, times the
            largest norm of a Euclidean gradient so far. Default: the root of the rounding error of
            the dtype, 1.5e-8 in float64.
        max_evaluations: Of each start. Default: 1000.
        callback: Called after each iteration with a :class:`Minimum` of this start; StopIteration
            ends it. Default: none.
        progress: Show a bar of tqdm, which must be installed. Default: False.
        generator: Source of random starts and moves. Default: torch's global one.

    Returns: The :class:`Minimum`. At a start whose gradient is zero, a saddle perhaps, a small
        random move is tried once, and the message says so.
    Raises:
        ValueError: for a start that is not finite or cannot be read so, a loss that returns other
            shapes, and options that cannot be.
        TypeError: for tensors of half precision, of several dtypes, and arguments of other types.

    Note: An evaluation, with its backward pass, and about 12 products of n x m by m x m; an
        iteration also four products with 30 pairs, which are the memory.
    Reference: as of :class:`StiefelLBFGS`; Byrd, Nocedal & Schnabel, Representations of
        quasi-Newton matrices (1994), equation 3.1, for the direction.
    """
    check_count("starts", starts)
    check_count("max_evaluations", max_evaluations)
    check_flag("batched_loss", batched_loss)
    check_flag("progress", progress)
    if not callable(loss):
        raise TypeError(fail("loss", "be a function", type(loss).__name__))
    if tolerance is not None:
        check_range("tolerance", tolerance, 0.0)
    form = _Form(start_or_shape, manifold)
    drawn = form.starts(starts, generator)
    each = torch.finfo(form.dtype).eps ** 0.5 if tolerance is None else tolerance
    batches = [drawn] if batched_loss else [[own] for own in drawn]
    results: list[Minimum] = []
    bar = importlib.import_module("tqdm").tqdm(unit="evaluation") if progress else None
    for batch in batches:
        product = _Product(form, [torch.stack(column) for column in zip(*batch, strict=True)])
        options = _Options(loss, batched_loss, each, max_evaluations, callback, bar)
        results += _Descent(product, options).results(generator)
    if bar is not None:
        bar.close()
    best = min(results, key=lambda result: math.inf if math.isnan(result.fun) else result.fun)
    return replace(
        best,
        nit=sum(result.nit for result in results),
        nfev=sum(result.nfev for result in results),
    )


# ---- starts --------------------------------------------------------------------------------------


class _Form:
    """The form of the arguments of a loss: one tensor, a tuple or a dict; and how each is read."""

    def __init__(self, given: Any, manifold: Any) -> None:
        self.keys: list[Any] | None = None
        self.kind: Any = None
        if isinstance(given, Mapping):
            self.keys, self.kind = list(given), dict
            tensors = list(given.values())
            chosen = [None if manifold is None else manifold.get(key) for key in self.keys]
        elif isinstance(given, (tuple, list)) and any(isinstance(it, Tensor) for it in given):
            self.kind, tensors = tuple, list(given)
            chosen = [None] * len(tensors) if manifold is None else list(manifold)
            if len(chosen) != len(tensors):
                wanted = f"have one reading for each of {len(tensors)} tensors"
                raise ValueError(fail("manifold", wanted, len(chosen)))
        else:
            tensors, chosen = [given], [manifold]
        self.readings: list[Stiefel | None] = []
        self.tensors: list[Tensor | None] = []
        self.shapes: list[torch.Size] = []
        dtypes = []
        for index, (tensor, own) in enumerate(zip(tensors, chosen, strict=True)):
            name = "start" if self.kind is None else f"start {self.keys or index!r}"
            if not isinstance(tensor, Tensor):
                tensor = self._drawn_later(tensor, name)
            reading = own if own is not None else manifold_of(tensor)
            if reading is not None or self.kind is None:
                reading = reading_of(tensor, reading, name)
                if reading.learn_scale:
                    remedy = "let the loss multiply by a tensor of its own"
                    raise ValueError(fail("manifold", "have a fixed scale", reading, remedy))
            self.readings.append(reading)
            self.shapes.append(tensor.shape)
            self.tensors.append(None if tensor.is_meta else _start(tensor, reading, name))
            dtypes.append(tensor.dtype)
        self.dtype = dtypes[0]
        if len({dtype.to_real() for dtype in dtypes}) > 1 or self.dtype in HALF:
            wanted, remedy = "be of one precision, float32 or float64", "convert them"
            raise TypeError(fail("start", wanted, dtypes, remedy))

    def _drawn_later(self, sizes: Any, name: str) -> Tensor:
        if not isinstance(sizes, (tuple, list)) or not all(type(size) is int for size in sizes):
            wanted = "be a tensor, sizes of one, or a tuple or dict of tensors"
            raise TypeError(fail(name, wanted, type(sizes).__name__))
        return torch.empty(tuple(sizes), device="meta")

    def starts(self, count: int, generator: torch.Generator | None) -> list[list[Tensor]]:
        """Return so many starts; those of a real square matrix alternate between components."""
        drawn: list[list[Tensor]] = []
        first = self.readings[0]
        is_free = self.has_components() and first is not None and first.determinant is None
        for index in range(count):
            values = []
            for tensor, reading, shape in zip(
                self.tensors, self.readings, self.shapes, strict=True
            ):
                if tensor is not None and (index == 0 or reading is None):
                    values.append(tensor)
                    continue
                device = None if tensor is None else tensor.device
                options = {"generator": generator, "dtype": self.dtype, "device": device}
                values.append(random_point(*shape, manifold=reading, **options))  # type: ignore[arg-type]
            if index and is_free and self.component(values) == self.component(drawn[-1]):
                row = values[0]
                for dim in sorted(first.dims(row.ndim).rows, reverse=True):  # type: ignore[union-attr]
                    row = row.select(dim, 0)
                row.neg_()
            drawn.append(values)
        return drawn

    def has_components(self) -> bool:
        """Say whether there is one real square matrix, whose determinant has two signs."""
        shape, reading = self.shapes[0], self.readings[0]
        if len(self.shapes) > 1 or reading is None or self.dtype.is_complex:
            return False
        matrix = reading.matrices(torch.empty(shape, device="meta"))
        is_one = reading.rows is None and matrix.shape[:-2].numel() == 1
        return is_one and matrix.size(-2) == matrix.size(-1)

    def component(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the determinant of the one matrix, or None."""
        reading = self.readings[0]
        if reading is None or not self.has_components():
            return None
        matrix = reading.matrices(tensors[0]) / reading.scale
        return 1 if float(orientation(matrix).reshape(())) > 0 else -1

    def loss_argument(self, tensors: Sequence[Tensor]) -> Any:
        """Return the tensors in the form of the start."""
        if self.kind is None:
            return tensors[0]
        return dict(zip(self.keys or (), tensors, strict=True)) if self.keys else tuple(tensors)


def _start(tensor: Tensor, reading: Stiefel | None, name: str) -> Tensor:
    """Return the nearest point to a given start, in memory of its own."""
    value = tensor.detach().clone(memory_format=torch.contiguous_format)
    if reading is None:
        return value
    point = nearest(value, reading, name)
    return value if point is None else point


class _Options(NamedTuple):
    """What :func:`minimize` was given."""

    loss: Loss
    batched: bool
    tolerance: float
    most: int
    callback: Callable[[Minimum], object] | None
    bar: Any


# ---- all tensors of all starts as points of a product --------------------------------------------


class _Product:
    """Tensors ``(starts, *shape)``; a vector is ``(starts, N)``, real, with all of one start.

    Matrices are ``(k, n, m)`` for each constrained range, k for all starts. Where one tensor is
    one tall matrix, vectors and matrices are views of one another.
    """

    def __init__(self, form: _Form, tensors: list[Tensor]) -> None:
        self.form, self.tensors = form, tensors
        self.count = len(tensors[0])
        self._sizes = [_flat(tensor).size(1) for tensor in tensors]
        self._ranges = [
            (place, index, reading)
            for place, reading in enumerate(form.readings)
            if reading is not None
            for index in range(1 if reading.rows is None else len(reading.rows))
        ]
        only = tensors[0]
        self._is_one = (
            len(tensors) == 1
            and form.readings[0] in (Stiefel(), Stiefel(determinant=1), Stiefel(determinant=-1))
            and only.size(-2) >= only.size(-1)
        )
        self.points = self.matrices(tensors)
        self.references = [point.clone() for point in self.points]
        self.frames = self._frames()

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors as one vector of each start."""
        parts = [_flat(tensor) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Return a vector as tensors like those of the point, in new memory."""
        tensors = []
        for part, like in zip(torch.split(flat, self._sizes, dim=1), self.tensors, strict=True):
            own = part.reshape(*like.shape, 2) if like.is_complex() else part.reshape(like.shape)
            tensors.append((torch.view_as_complex(own) if like.is_complex() else own).clone())
        return tensors

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthonormal matrices of each range."""
        if self._is_one:
            return [_batch(tensors[0])]
        return [
            _batch(reading.matrices(self._part(tensors[place], place, index), index, stacked=True))
            / reading.scale
            for place, index, reading in self._ranges
        ]

    def write(self, tensors: Sequence[Tensor], matrices: Sequence[Tensor]) -> None:
        """Undo :meth:`matrices`, in place."""
        for (place, index, reading), own in zip(self._ranges, matrices, strict=True):
            part = self._part(tensors[place], place, index)
            seen = reading.matrices(part, index, stacked=True)
            whole = (reading.scale * own).reshape(seen.shape)
            part.copy_(reading.stored(whole, part.shape, index, stacked=True))

    def mapped(self, function: Callable[[lbfgs.Frame, Tensor], Tensor], flat: Tensor) -> Tensor:
        """Return a vector whose matrices went through a function of the frames."""
        if self._is_one:
            return _flat(function(self.frames[0], self._viewed(flat)), self.count)
        tensors = self.shaped(flat)
        pairs = zip(self.frames, self.matrices(tensors), strict=True)
        self.write(tensors, [function(at, own) for at, own in pairs])
        return self.flat(tensors)

    def parts(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return a vector as tensors, none where they are not needed, and as matrices."""
        if self._is_one:
            return [], [self._viewed(flat)]
        tensors = self.shaped(flat)
        return tensors, self.matrices(tensors)

    def move(self, tensors: Sequence[Tensor], points: list[Tensor]) -> None:
        """Make these the point: tensors, in which matrices are missing yet, and matrices."""
        if self._is_one:
            self.tensors = [points[0].reshape(self.tensors[0].shape)]
        else:
            self.tensors = list(tensors)
            self.write(self.tensors, points)
        self.points, self.frames = points, []
        self.frames = self._frames()

    def is_far(self) -> bool:
        """Say whether another reference would serve better."""
        return any(lbfgs.is_ill_conditioned(at) for at in self.frames)

    def refer_here(self) -> None:
        """Make this point the reference."""
        self.references = list(self.points)
        self.frames = self._frames()

    def per_matrix(self, t: Tensor, point: Tensor) -> Tensor:
        """Repeat a number of each start for the matrices of a range."""
        return t if len(point) == len(t) else t.repeat_interleave(len(point) // self.count)

    def _viewed(self, flat: Tensor) -> Tensor:
        like = self.tensors[0]
        if like.is_complex():
            flat = torch.view_as_complex(flat.reshape(*like.shape, 2))
        return flat.reshape(-1, *like.shape[-2:])

    def _frames(self) -> list[lbfgs.Frame]:
        pairs = zip(self.points, self.references, strict=True)
        return [lbfgs.frame(here, there) for here, there in pairs]

    def _part(self, tensor: Tensor, place: int, index: int) -> Tensor:
        reading = self.form.readings[place]
        if reading is None or reading.rows is None:
            return tensor
        one = self.form.shapes[place]
        dim = reading.dims(len(one)).rows[0] - len(one)
        start, stop = reading.rows[index]  # type: ignore[misc]
        return tensor.narrow(dim, start, stop - start)


def _flat(tensor: Tensor, count: int | None = None) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(len(tensor) if count is None else count, -1)


def _batch(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


class _Path:
    r"""The curves :math:`(X + tV)(I + t^2 V'V)^{-1/2}` of all starts, t a number of each.

    The polar retraction, by one eigendecomposition of m x m for all t.
    """

    def __init__(self, product: _Product, direction: Tensor) -> None:
        self._product = product
        self._tensors, self._points = product.tensors, product.points
        vector = product.mapped(lbfgs.from_coordinates, direction)
        self._moves, self._tangents = product.parts(vector)
        self._spectra = [torch.linalg.eigh(own_gram(each)) for each in self._tangents]
        speeds = [
            values[:, -1].clamp(min=0.0).reshape(product.count, -1).amax(1)
            for values, _ in self._spectra
        ]
        plain = [_flat(move).square().sum(1) for move in self._moves]
        self.speed = torch.stack([*speeds, *plain]).amax(0).sqrt()

    def go(self, t: Tensor) -> None:
        """Move the point to t."""
        product, points = self._product, []
        for point, tangent, (values, axes) in zip(
            self._points, self._tangents, self._spectra, strict=True
        ):
            times = product.per_matrix(t, point)[:, None]
            root = (axes * (1 + times.square() * values).rsqrt().unsqueeze(-2)) @ axes.mH
            moved = torch.addcmul(point, tangent, times.unsqueeze(-1)) @ root
            points.append(newton_schulz(moved))
        tensors = [
            here + t.reshape(-1, *[1] * (move.ndim - 1)) * move
            for here, move in zip(self._tensors, self._moves, strict=False)
        ]
        product.move(tensors, points)


# ---- the memory ----------------------------------------------------------------------------------


class _Pairs:
    """Pairs (s, y) of each start, and their inner products, which a change of frames keeps."""

    def __init__(self, like: Tensor) -> None:
        count, size = like.shape
        room = 2 * _PAIRS  # so that the last ones are moved to the front now and then only
        self._pairs = like.new_zeros(count, 2, room, size)  # all s, all y, the oldest first
        self._mixed = like.new_zeros(count, room, room)  # s'y: the upper triangle is used
        self._own = like.new_zeros(count, room, room)  # y'y
        self._used = slice(0, 0)

    def learn(self, step: Tensor, change: Tensor) -> None:
        """Add a pair of each start; where its curvature is not positive, one of zeros."""
        product = (step * change).sum(1)
        is_kept = product > 1e-12 * step.norm(dim=1) * change.norm(dim=1)
        if not bool(is_kept.all()):
            step, change = (torch.where(is_kept.unsqueeze(1), each, 0.0) for each in (step, change))
        last = self._used.stop
        if last == 2 * _PAIRS:
            kept, front = slice(_PAIRS + 1, last), slice(0, _PAIRS - 1)
            self._pairs[:, :, front] = self._pairs[:, :, kept].clone()
            for each in (self._mixed, self._own):
                each[:, front, front] = each[:, kept, kept].clone()
            last = _PAIRS - 1
        used = self._used = slice(max(0, last + 1 - _PAIRS), last + 1)
        self._pairs[:, 0, last], self._pairs[:, 1, last] = step, change
        both = self._pairs[:, :, used] @ change[:, None, :, None]
        self._mixed[:, used, last] = both[:, 0, :, 0]
        self._mixed[:, last, last] = torch.where(is_kept, product, 1.0)
        self._own[:, used, last] = self._own[:, last, used] = both[:, 1, :, 0]

    def direction(self, gradient: Tensor) -> Tensor:
        """Return -H g, where H starts from (s'y / y'y) I of the last pair."""
        used = self._used
        if not used.stop:
            return -gradient
        column, pairs = gradient.unsqueeze(2), self._pairs[:, :, used]
        upper, own = self._mixed[:, used, used], self._own[:, used, used]
        last = own[:, -1:, -1:]
        scale = torch.where(last > 0, upper[:, -1:, -1:] / last, 1.0)
        seen = pairs @ column.unsqueeze(1)
        inner = torch.linalg.solve_triangular(upper, seen[:, 0], upper=True)
        diagonal = upper.diagonal(dim1=1, dim2=2).unsqueeze(2)
        middle = diagonal * inner + scale * (own @ inner - seen[:, 1])
        outer = torch.linalg.solve_triangular(upper.mT, middle, upper=False)
        whole = scale * column + pairs[:, 0].mT @ outer - scale * (pairs[:, 1].mT @ inner)
        direction: Tensor = -whole.squeeze(2)
        return direction

    def forget(self, starts: Tensor) -> None:
        """Drop the pairs of these starts."""
        keep = (~starts).to(self._own.dtype)[:, None, None]
        eye = torch.eye(2 * _PAIRS, dtype=keep.dtype, device=keep.device)
        self._pairs = self._pairs * keep.unsqueeze(3)
        self._own, self._mixed = self._own * keep, self._mixed * keep + eye * (1 - keep)

    def renew(self, product: _Product, gradient: Tensor) -> Tensor:
        """Make the point the reference; return a gradient in the new coordinates."""
        old = product.frames
        product.refer_here()
        new, moved = product.frames, []
        pairs = self._pairs[:, :, self._used]
        for row in [gradient, *pairs.flatten(1, 2).unbind(1)]:
            product.frames = old
            vector = product.mapped(lbfgs.from_coordinates, row)
            product.frames = new
            moved.append(product.mapped(lbfgs.coordinates, vector))
        if len(moved) > 1:
            pairs.copy_(torch.stack(moved[1:], 1).reshape(pairs.shape))
        return moved[0]


# ---- the iteration -------------------------------------------------------------------------------


class _Descent:
    """L-BFGS of all starts of a batch; those that have ended stay where they are."""

    def __init__(self, product: _Product, options: _Options) -> None:
        self._product, self._options = product, options
        count, like = product.count, product.flat(product.tensors)
        self._eps = torch.finfo(like.dtype).eps
        self._norms, self._largest = [0.0] * count, [0.0] * count
        self._evaluations, self._iterations = [0] * count, [0] * count
        self._messages = [""] * count
        self._loss: list[float] = []
        self._slope: list[float] = []
        self._gradient = like
        self._evaluate(range(count))

    def results(self, generator: torch.Generator | None) -> list[Minimum]:
        """Iterate; return the end of each start."""
        for index, (loss, norm) in enumerate(zip(self._loss, self._norms, strict=True)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._messages[index] = _LOST
        flat = [index for index in self._active() if self._is_small(index)]
        if flat:
            self._nudged(flat, generator)
        else:
            self._iterate()
        return [self._result(index) for index in range(self._product.count)]

    def _nudged(self, flat: Sequence[int], generator: torch.Generator | None) -> None:
        """Iterate after a random move of stationary starts; take it back where it led nowhere."""
        product, gradient = self._product, self._gradient
        before = product.tensors, self._loss, self._norms
        device = None if generator is None else generator.device
        drawn = torch.randn(
            gradient.shape, generator=generator, dtype=gradient.dtype, device=device
        ).to(gradient.device)
        vector = product.mapped(_tangent_coordinates, drawn)
        vector = vector * (_NUDGE / vector.norm(dim=1, keepdim=True).clamp(min=1e-30))
        with exact_products(vector):
            moves = [float(index in flat) for index in range(product.count)]
            _Path(product, vector).go(gradient.new_tensor(moves))
        self._evaluate(flat)
        self._iterate()
        tensors, losses, norms = before
        for index in flat:
            led = "led to a lower loss"
            if not self._loss[index] < losses[index] - 100 * self._eps * abs(losses[index]):
                led = "led back"
                product.tensors = [
                    torch.cat([new[:index], old[index : index + 1], new[index + 1 :]])
                    for old, new in zip(tensors, product.tensors, strict=True)
                ]
                self._loss[index], self._norms[index] = losses[index], norms[index]
            self._messages[index] += f"; the start was stationary, and a small random move {led}"

    def _iterate(self) -> None:
        product, pairs, start = self._product, _Pairs(self._gradient), -1
        while self._goes_on():
            start += 1
            if product.is_far():
                with exact_products(self._gradient):
                    self._gradient = pairs.renew(product, self._gradient)
            gradient = self._gradient
            direction = pairs.direction(gradient)
            slopes = (direction * gradient).sum(1)
            bad = ~(slopes < 0)
            if bool(bad.any()):
                pairs.forget(bad)
                direction = torch.where(bad.unsqueeze(1), -gradient, direction)
                slopes = (direction * gradient).sum(1)
            t = self._search(direction, slopes, is_first=start == 0)
            pairs.learn(t.unsqueeze(1) * direction, self._gradient - gradient)
            stuck = [index for index in self._active() if not t[index] > 0]
            if stuck:
                self._unstick(stuck, pairs, direction, gradient, slopes)
            self._call_back()

    def _unstick(
        self,
        stuck: Sequence[int],
        pairs: _Pairs,
        direction: Tensor,
        gradient: Tensor,
        slopes: Tensor,
    ) -> None:
        """End starts without a lower loss, or forget their pairs where these may be to blame."""
        for index in stuck:
            is_steepest = torch.equal(direction[index], -gradient[index])
            rounding = 100 * self._eps * abs(self._loss[index])
            if is_steepest or -float(slopes[index]) <= rounding:
                self._messages[index] = _ROUNDING
        starts = torch.zeros(len(t := slopes), dtype=torch.bool, device=t.device)
        starts[list(stuck)] = True
        pairs.forget(starts)

    def _search(self, direction: Tensor, slopes: Tensor, *, is_first: bool) -> Tensor:
        """Move along the direction to where the Wolfe conditions hold; return t, 0 for nowhere."""
        with exact_products(direction):
            path = _Path(self._product, direction)
        active = set(self._active())
        speeds = path.speed.tolist()
        brackets = [
            _Bracket(loss, slope, speed, _FIRST if is_first else math.pi, self._eps)
            if index in active
            else None
            for index, (loss, slope, speed) in enumerate(
                zip(self._loss, slopes.tolist(), speeds, strict=True)
            )
        ]
        for index in active:
            self._iterations[index] += 1
        seen = [0.0] * len(brackets)
        for _ in range(_TRIALS):
            trying = [index for index, one in enumerate(brackets) if one and not one.is_done]
            if not trying:
                break
            seen = [one.t if one else 0.0 for one in brackets]
            self._go(path, seen, trying, direction)
            for index in trying:
                spent = self._evaluations[index] >= self._options.most
                brackets[index].narrow(self._loss[index], self._slope[index], spent)  # type: ignore[union-attr]
        chosen = [one.chosen() if one else 0.0 for one in brackets]
        changed = [index for index in active if chosen[index] != seen[index]]
        if changed:
            self._go(path, chosen, [index for index in changed if chosen[index] > 0], direction)
        return direction.new_tensor(chosen)

    def _go(
        self, path: _Path, t: Sequence[float], counted: Sequence[int], direction: Tensor
    ) -> None:
        with exact_products(direction):
            path.go(direction.new_tensor(t))
        self._evaluate(counted, direction)

    def _evaluate(self, counted: Iterable[int], direction: Tensor | None = None) -> None:
        """Read the losses, the coordinates of their gradients, and the slopes along a direction."""
        product, options = self._product, self._options
        leaves = [tensor.detach().requires_grad_() for tensor in product.tensors]
        with torch.enable_grad():
            given = leaves if options.batched else [leaf[0] for leaf in leaves]
            values = _checked(options.loss(product.form.loss_argument(given)), options, product)
            grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        pairs = zip(grads, leaves, strict=True)
        flat = product.flat([torch.zeros_like(x) if g is None else g for g, x in pairs])
        with exact_products(flat):
            self._gradient = product.mapped(_coordinates_of_gradient, flat)
        slopes = self._gradient[:, 0] if direction is None else (self._gradient * direction).sum(1)
        losses = values.detach().reshape(product.count).to(flat.dtype)
        numbers = [losses, slopes, self._gradient.norm(dim=1), flat.norm(dim=1)]
        self._loss, self._slope, self._norms, norms = torch.stack(numbers).tolist()
        for index in counted:
            self._evaluations[index] += 1
        self._largest = [
            max(old, new) if new < math.inf else old
            for old, new in zip(self._largest, norms, strict=True)
        ]
        if options.bar is not None:
            options.bar.update(1)

    def _active(self) -> list[int]:
        return [index for index, message in enumerate(self._messages) if not message]

    def _goes_on(self) -> bool:
        """End starts that have converged or spent their evaluations; say whether some go on."""
        for index in self._active():
            if self._is_small(index):
                self._messages[index] = _CONVERGED
            elif self._evaluations[index] >= self._options.most:
                self._messages[index] = _SPENT
        return bool(self._active())

    def _is_small(self, index: int) -> bool:
        return self._norms[index] <= self._options.tolerance * self._largest[index]

    def _call_back(self) -> None:
        if self._options.callback is None:
            return
        for index in self._active():
            with contextlib.suppress(StopIteration):
                self._options.callback(self._result(index))
                continue
            self._messages[index] = _STOPPED

    def _result(self, index: int) -> Minimum:
        product, message = self._product, self._messages[index]
        tensors = [tensor[index].clone() for tensor in product.tensors]
        is_near = self._norms[index] <= 100 * self._options.tolerance * self._largest[index]
        return Minimum(
            x=product.form.loss_argument(tensors),
            fun=self._loss[index],
            grad_norm=self._norms[index],
            nit=self._iterations[index],
            nfev=self._evaluations[index],
            success=message.startswith(_CONVERGED) or (message.startswith(_ROUNDING) and is_near),
            message=message,
            component=product.form.component(tensors),
        )


def _checked(values: Any, options: _Options, product: _Product) -> Tensor:
    """Return what the loss has returned; raise for what it must not return."""
    if not isinstance(values, Tensor) or values.is_complex():
        raise TypeError(fail("loss", "return a real tensor", type(values).__name__))
    wanted = (product.count,) if options.batched else ()
    if values.shape != wanted and not (not options.batched and values.numel() == 1):
        raise ValueError(fail("loss", f"return a tensor of shape {wanted}", values))
    if not values.requires_grad:
        remedy = "write it with operations of torch on its argument"
        raise ValueError(fail("loss", "depend on the point", "one without gradient", remedy))
    return values


def _coordinates_of_gradient(at: lbfgs.Frame, grad: Tensor) -> Tensor:
    return lbfgs.coordinates(at, riemannian_gradient(at.point, grad))


def _tangent_coordinates(at: lbfgs.Frame, vector: Tensor) -> Tensor:
    return lbfgs.coordinates(at, project_tangent(at.point, vector))


# ---- the line search of one start ----------------------------------------------------------------


class _Bracket:
    """A step length between one that is too short and one that is too long.

    For the weak Wolfe conditions, the approximate ones within rounding of the loss; by the minimum
    of the cubic through both ends, and a secant of the slope while no end is too long.

    Args:
        loss, slope: At the start.
        speed: Radians in a unit of t.
        longest: Radians of the first trial, t = 1, at most.
        eps: Rounding of numbers around 1.

    Reference: Nocedal & Wright (2006), 3.5; Hager & Zhang (2005), section 2.
    """

    def __init__(self, loss: float, slope: float, speed: float, longest: float, eps: float) -> None:
        self._loss, self._slope, self._rounding = loss, slope, 10 * eps * abs(loss)
        self.t = min(1.0, longest / speed) if speed > 0 else 1.0
        self.is_done, self._is_accepted = False, False
        self._low, self._high = (0.0, loss, slope), (math.inf, loss, slope)

    def narrow(self, loss: float, slope: float, is_last: bool) -> None:
        """Judge loss and slope at t, and choose the next t."""
        t, start = self.t, self._slope
        falls = loss <= self._loss + _ARMIJO * t * start or (
            loss <= self._loss + self._rounding and slope <= (2 * _ARMIJO - 1) * start
        )
        before = self._low
        if not (math.isfinite(loss) and math.isfinite(slope) and falls):
            self._high = t, loss, slope
        elif slope < _CURVATURE * start:
            self._low = t, loss, slope
        else:
            self._is_accepted = True
        self.is_done = self._is_accepted or is_last
        if self.is_done:
            return
        if self._high[0] < math.inf:
            self.t = _minimum_of_cubic(self._low, self._high)
        else:
            self.t = _secant(before, self._low)
        self.is_done = self._high[0] - self._low[0] <= 1e-14 * self._high[0]

    def chosen(self) -> float:
        """Return t if it was accepted, else the longest with a sufficient decrease."""
        return self.t if self._is_accepted else self._low[0]


def _minimum_of_cubic(low: _End, high: _End) -> float:
    """Return where the cubic through both ends is least, not within a tenth of them."""
    (a, at_a, slope_a), (b, at_b, slope_b) = low, high
    width = b - a
    t = a + 0.5 * width
    if math.isfinite(at_b) and math.isfinite(slope_b):
        first = slope_a + slope_b - 3 * (at_b - at_a) / width
        second = math.sqrt(max(first * first - slope_a * slope_b, 0.0))
        below = slope_b - slope_a + 2 * second
        if below:
            t = b - width * (slope_b + second - first) / below
    return min(max(t, a + 0.1 * width), b - 0.1 * width)


def _secant(before: _End, low: _End) -> float:
    """Return where the slope would vanish, from 1.5 to 10 times the last step length."""
    fall = before[2] - low[2]
    t = low[0] + (low[0] - before[0]) * low[2] / fall if fall else 2 * low[0]
    return min(max(t, 1.5 * low[0]), 10 * low[0])
