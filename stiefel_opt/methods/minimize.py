"""One call that minimises a loss over points: L-BFGS, one start after the other or all at once.

The geometry is that of :class:`StiefelLBFGS` without the rotation of pairs: coordinates of the
frames stay what they are, so that inner products of pairs are computed once, and a direction takes
four products with the pairs and one triangular solve.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.errors import HALF, check_count, check_flag, check_range, fail
from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.numerics import exact_products, orientation, project_tangent, riemannian_gradient
from stiefel_opt.tags import Stiefel, manifold_of, nearest, random_point, reading_of

Loss = Callable[[Any], Tensor]
_End = tuple[Tensor, Tensor, Tensor]  # t, loss and slope

_ARMIJO: Final = 1e-4  # of the slope: a sufficient decrease
_CURVATURE: Final = 0.9  # of the slope: a step that is long enough
_TRIALS: Final = 25  # of one line search
_PAIRS: Final = 30  # that are kept
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
        is_square = self.has_components()
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
            if index and is_square and self.component(values) == self.component(drawn[-1]):
                dim = self.readings[0].dimensions(values[0].ndim)[0]  # type: ignore[union-attr]
                values[0].select(dim, 0).neg_()
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
    """Tensors ``(starts, *shape)``; a vector is ``(starts, N)``, real, with all of one start."""

    def __init__(self, form: _Form, tensors: list[Tensor]) -> None:
        self.form, self.tensors = form, tensors
        self.count = len(tensors[0])
        self.references = [tensor.clone() for tensor in tensors]
        self._sizes = [_flat(tensor).size(1) for tensor in tensors]
        self._ranges = [
            (place, index, reading)
            for place, reading in enumerate(form.readings)
            if reading is not None
            for index in range(1 if reading.rows is None else len(reading.rows))
        ]
        self.frames = self._frames()

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors as one vector of each start."""
        return torch.cat([_flat(tensor) for tensor in tensors], dim=1)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Return a vector as tensors like those of the point, in new memory."""
        parts = torch.split(flat, self._sizes, dim=1)
        tensors = []
        for part, tensor in zip(parts, self.tensors, strict=True):
            if tensor.is_complex():
                part = torch.view_as_complex(part.reshape(*tensor.shape, 2))
            tensors.append(part.reshape(tensor.shape).clone())
        return tensors

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthonormal matrices of each range, ``(k, n, m)``, k for all starts."""
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
        tensors = self.shaped(flat)
        # vectors in units of the tensors: the factor of a scale is linear and cancels
        pairs = zip(self.frames, self.matrices(tensors), strict=True)
        self.write(tensors, [function(at, own) for at, own in pairs])
        return self.flat(tensors)

    def move(self, tensors: list[Tensor]) -> None:
        """Make the tensors the point."""
        self.tensors = tensors
        self.frames = self._frames()

    def refer_here(self) -> bool:
        """Make this point the reference where it is far from it; say whether it was."""
        if not any(lbfgs.is_ill_conditioned(at) for at in self.frames):
            return False
        self.references = [tensor.clone() for tensor in self.tensors]
        self.frames = self._frames()
        return True

    def per_matrix(self, values: Tensor) -> list[Tensor]:
        """Repeat a number of each start, ``(starts,)``, for the matrices of each range."""
        return [values.repeat_interleave(len(at.point) // self.count) for at in self.frames]

    def _frames(self) -> list[lbfgs.Frame]:
        pairs = zip(self.matrices(self.tensors), self.matrices(self.references), strict=True)
        return [lbfgs.frame(here, there) for here, there in pairs]

    def _part(self, tensor: Tensor, place: int, index: int) -> Tensor:
        reading = self.form.readings[place]
        if reading is None or reading.rows is None:
            return tensor
        one = self.form.shapes[place]
        dim = reading.dimensions(len(one))[0] - len(one)
        start, stop = reading.rows[index]  # type: ignore[misc]
        return tensor.narrow(dim, start, stop - start)


def _flat(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.reshape(len(tensor), -1)


def _batch(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


class _Path:
    """The curves of all starts along their directions; t is a number of each start."""

    def __init__(self, product: _Product, direction: Tensor) -> None:
        self._product, self._from = product, product.tensors
        self.vector = product.mapped(lbfgs.from_coordinates, direction)
        self._moves = product.shaped(self.vector)
        self._curves = [
            lbfgs.curve(at.point, own)
            for at, own in zip(product.frames, product.matrices(self._moves), strict=True)
        ]

    def longest(self) -> Tensor:
        """Return the longest t of a first trial: beyond it matrices turn around again."""
        speeds = [
            (each.values[..., -1].sqrt() + torch.linalg.matrix_norm(each.turn))
            .reshape(self._product.count, -1)
            .amax(1)
            for each in self._curves
        ]
        if not speeds:
            return torch.full_like(self.vector[:, 0], math.inf)
        return 2 * math.pi / torch.stack(speeds).amax(0)

    def go(self, t: Tensor) -> Tensor:
        """Move the point to t; return the coordinates of the velocity there."""
        product = self._product
        steps = [t.reshape(-1, *[1] * (move.ndim - 1)) for move in self._moves]
        tensors = [
            here + step * move
            for here, step, move in zip(self._from, steps, self._moves, strict=True)
        ]
        velocities = [move.clone() for move in self._moves]
        ends = [
            lbfgs.along(path, own)
            for path, own in zip(self._curves, product.per_matrix(t), strict=True)
        ]
        product.write(tensors, [end for end, _ in ends])
        product.write(velocities, [speed for _, speed in ends])
        product.move(tensors)
        return product.mapped(lbfgs.coordinates, product.flat(velocities))


# ---- the iteration -------------------------------------------------------------------------------


class _Pairs:
    """Pairs (s, y) of each start, and their inner products, which a change of frames keeps."""

    def __init__(self) -> None:
        self._steps: Tensor | None = None  # (starts, h, N)
        self._changes: Tensor
        self._mixed: Tensor  # s'y, (starts, h, h)
        self._own: Tensor  # y'y

    def learn(self, step: Tensor, change: Tensor) -> None:
        """Add a pair of each start; where its curvature is not positive, one of zeros."""
        product = (step * change).sum(1)
        rounding = 1e-12 * step.norm(dim=1) * change.norm(dim=1)
        is_kept = (product > rounding).unsqueeze(1)
        step, change = torch.where(is_kept, step, 0.0), torch.where(is_kept, change, 0.0)
        if self._steps is None:
            self._steps, self._changes = step.unsqueeze(1), change.unsqueeze(1)
            self._mixed = torch.where(is_kept, product.unsqueeze(1), 1.0).unsqueeze(1)
            self._own = change.square().sum(1)[:, None, None]
            return
        first = 1 if self._steps.size(1) == _PAIRS else 0
        self._steps = torch.cat([self._steps[:, first:], step.unsqueeze(1)], 1)
        self._changes = torch.cat([self._changes[:, first:], change.unsqueeze(1)], 1)
        both = torch.cat([self._steps, self._changes], 1) @ change.unsqueeze(2)
        column, own = both.chunk(2, dim=1)  # s_i'y and y_i'y
        column = column.clone()
        column[:, -1] = torch.where(is_kept, column[:, -1], 1.0)
        # of s'y only the upper triangle is used
        self._mixed = _bordered(self._mixed[:, first:, first:], column, torch.zeros_like(column))
        self._own = _bordered(self._own[:, first:, first:], own, own)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return -H g, H = c I + ..., c = s'y / y'y of the last pair."""
        if self._steps is None:
            return -gradient
        last = self._own[:, -1:, -1:]
        scale = torch.where(last > 0, self._mixed[:, -1:, -1:] / last.clamp(min=1e-300), 1.0)
        column = gradient.unsqueeze(2)
        by_step, by_change = self._steps @ column, self._changes @ column
        upper = self._mixed
        inner = torch.linalg.solve_triangular(upper, by_step, upper=True)
        diagonal = upper.diagonal(dim1=1, dim2=2).unsqueeze(2)
        middle = diagonal * inner + scale * (self._own @ inner - by_change)
        outer = torch.linalg.solve_triangular(upper.mT, middle, upper=False)
        whole = scale * column + self._steps.mT @ outer - scale * (self._changes.mT @ inner)
        direction: Tensor = -whole.squeeze(2)
        return direction

    def forget(self, starts: Tensor) -> None:
        """Drop the pairs of these starts."""
        if self._steps is None:
            return
        keep = (~starts).to(self._steps.dtype)[:, None, None]
        eye = torch.eye(self._mixed.size(1), dtype=keep.dtype, device=keep.device)
        self._steps, self._changes = self._steps * keep, self._changes * keep
        self._own = self._own * keep
        self._mixed = self._mixed * keep + eye * (1 - keep)

    def renew(self, product: _Product, gradient: Tensor) -> Tensor:
        """Give pairs and a gradient the coordinates of another reference, if that serves."""
        old = list(product.frames)
        if not product.refer_here():
            return gradient
        new, rows = product.frames, [gradient]
        if self._steps is not None:
            rows += [*self._steps.unbind(1), *self._changes.unbind(1)]
        moved = []
        for row in rows:
            product.frames = old
            vector = product.mapped(lbfgs.from_coordinates, row)
            product.frames = new
            moved.append(product.mapped(lbfgs.coordinates, vector))
        if self._steps is not None:
            half = len(moved) // 2
            self._steps = torch.stack(moved[1 : half + 1], 1)
            self._changes = torch.stack(moved[half + 1 :], 1)
        return moved[0]


def _bordered(matrix: Tensor, column: Tensor, row: Tensor) -> Tensor:
    """Return a matrix with one more column and row, ``(starts, h + 1, 1)`` each."""
    below = torch.cat([matrix, row[:, :-1].mT], 1)
    return torch.cat([below, column], 2)


class _Descent:
    """L-BFGS of all starts of a batch; those that have ended stay where they are."""

    def __init__(self, product: _Product, options: _Options) -> None:
        self._product, self._options = product, options
        count, like = product.count, product.flat(product.tensors)
        self._largest = like.new_zeros(count)  # Euclidean gradient so far
        self._evaluations = torch.zeros(count, dtype=torch.long)
        self._iterations = torch.zeros(count, dtype=torch.long)
        self._messages = [""] * count
        self._velocity = like
        self._active = torch.ones(count, dtype=torch.bool, device=like.device)
        self._loss, self._gradient = self._evaluate()

    def results(self, generator: torch.Generator | None) -> list[Minimum]:
        """Iterate; return the end of each start."""
        lost = ~(self._loss.isfinite() & self._gradient.isfinite().all(1))
        self._end(lost, _LOST)
        flat = self._active & self._is_small()
        if bool(flat.any()):
            self._nudged(flat, generator)
        else:
            self._iterate()
        return [self._result(index) for index in range(self._product.count)]

    def _nudged(self, flat: Tensor, generator: torch.Generator | None) -> None:
        """Iterate after a random move of stationary starts; take it back where it led nowhere."""
        product, before, loss = self._product, self._product.tensors, self._loss
        gradient = self._gradient
        device = None if generator is None else generator.device
        drawn = torch.randn(
            gradient.shape, generator=generator, dtype=gradient.dtype, device=device
        ).to(gradient.device)
        vector = product.mapped(_tangent_coordinates, drawn)
        vector = vector * (_NUDGE / vector.norm(dim=1, keepdim=True).clamp(min=1e-30))
        with exact_products(vector):
            _Path(product, vector).go(flat.to(vector.dtype))
        self._loss, self._gradient = self._evaluate()
        self._iterate()
        rounding = 100 * torch.finfo(loss.dtype).eps * loss.abs().clamp(min=1e-30)
        back = flat & ~(self._loss < loss - rounding)
        tensors = [
            torch.where(back.reshape(-1, *[1] * (new.ndim - 1)), old, new)
            for old, new in zip(before, product.tensors, strict=True)
        ]
        product.move(tensors)
        self._loss = torch.where(back, loss, self._loss)
        self._gradient = torch.where(back.unsqueeze(1), gradient, self._gradient)
        for index in flat.nonzero().flatten().tolist():
            led = "led back" if bool(back[index]) else "led to a lower loss"
            self._messages[index] += f"; the start was stationary, and a small random move {led}"

    def _iterate(self) -> None:
        pairs = _Pairs()
        while bool(self._active.any()):
            self._end(self._is_small(), _CONVERGED)
            self._end(self._spent(), _SPENT)
            if not bool(self._active.any()):
                return
            gradient = pairs.renew(self._product, self._gradient)
            self._gradient = gradient
            direction = pairs.direction(gradient)
            slope = (direction * gradient).sum(1)
            bad = ~(slope < 0)
            if bool((bad & self._active).any()):
                pairs.forget(bad)
                direction = torch.where(bad.unsqueeze(1), -gradient, direction)
                slope = (direction * gradient).sum(1)
            is_first = self._iterations.to(slope.device) == 0
            self._iterations += self._active.cpu()
            t, found = self._search(direction, slope, is_first)
            step = t.unsqueeze(1) * direction
            pairs.learn(step, torch.where(found.unsqueeze(1), self._gradient - gradient, 0.0))
            stuck = self._active & ~found
            steepest = (direction + gradient).norm(dim=1) <= 1e-12 * gradient.norm(dim=1)
            self._end(stuck & (steepest | self._is_flat(slope)), _ROUNDING)
            if bool((stuck & self._active).any()):
                pairs.forget(stuck)
            self._call_back()

    def _is_flat(self, slope: Tensor) -> Tensor:
        """Say whether nothing but rounding of the loss can be gained along a slope."""
        return -slope <= 100 * torch.finfo(slope.dtype).eps * self._loss.abs()

    def _search(self, direction: Tensor, slope: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Move along the direction to where the Wolfe conditions hold; return t, and where."""
        with exact_products(direction):
            path = _Path(self._product, direction)
        size = path.vector.abs().sum(1).clamp(min=1e-30)
        t = torch.where(first, (1 / size).clamp(max=1.0), 1.0)
        bracket = _Bracket(self._loss, slope, torch.minimum(t, path.longest()), self._active)
        seen = bracket.t
        for _ in range(_TRIALS):
            seen = bracket.t
            self._go(path, seen, ~bracket.done)
            bracket.narrow(self._loss, (self._gradient * self._velocity).sum(1), self._spent())
            if bool(bracket.done.all()):
                break
        t = bracket.chosen()
        if not torch.equal(t, seen):
            self._go(path, t, self._active & (t > 0) & (t != seen))
        return t, t > 0

    def _go(self, path: _Path, t: Tensor, counted: Tensor) -> None:
        with exact_products(t):
            self._velocity = path.go(t)
        self._loss, self._gradient = self._evaluate(counted)

    def _evaluate(self, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the losses, and the coordinates of their Riemannian gradients."""
        product, options = self._product, self._options
        leaves = [tensor.detach().requires_grad_() for tensor in product.tensors]
        with torch.enable_grad():
            given = leaves if options.batched else [leaf[0] for leaf in leaves]
            values = options.loss(product.form.loss_argument(given))
            wanted = (product.count,) if options.batched else ()
            if not isinstance(values, Tensor) or values.is_complex():
                kind = type(values).__name__
                raise TypeError(fail("loss", "return a real tensor", kind))
            if values.shape != wanted and not (not options.batched and values.numel() == 1):
                raise ValueError(fail("loss", f"return a tensor of shape {wanted}", values))
            if not values.requires_grad:
                remedy = "write it with operations of torch on its argument"
                raise ValueError(
                    fail("loss", "depend on the point", "one without gradient", remedy)
                )
            grads = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        pairs = zip(grads, leaves, strict=True)
        flat = product.flat([torch.zeros_like(x) if g is None else g for g, x in pairs])
        norms = torch.linalg.vector_norm(flat, dim=1)
        self._largest = torch.fmax(self._largest, norms)
        self._evaluations += 1 if counted is None else counted.cpu()
        if options.bar is not None:
            options.bar.update(1)
        with exact_products(flat):
            gradient = product.mapped(_coordinates_of_gradient, flat)
        return values.detach().reshape(product.count).to(flat.dtype), gradient

    def _is_small(self) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self._gradient, dim=1)
        return norms <= self._options.tolerance * self._largest

    def _spent(self) -> Tensor:
        return (self._evaluations >= self._options.most).to(self._active.device)

    def _end(self, ended: Tensor, message: str) -> None:
        """End these starts, if they have not ended yet."""
        for index in (ended & self._active).nonzero().flatten().tolist():
            self._messages[index] = message
        self._active = self._active & ~ended

    def _call_back(self) -> None:
        if self._options.callback is None:
            return
        ended = torch.zeros_like(self._active)
        for index in self._active.nonzero().flatten().tolist():
            with contextlib.suppress(StopIteration):
                self._options.callback(self._result(index))
                continue
            ended[index] = True
        self._end(ended, _STOPPED)

    def _result(self, index: int) -> Minimum:
        product = self._product
        tensors = [tensor[index].clone() for tensor in product.tensors]
        norm, message = float(self._gradient[index].norm()), self._messages[index]
        is_near = norm <= 100 * self._options.tolerance * float(self._largest[index])
        return Minimum(
            x=product.form.loss_argument(tensors),
            fun=float(self._loss[index]),
            grad_norm=norm,
            nit=int(self._iterations[index]),
            nfev=int(self._evaluations[index]),
            success=message.startswith(_CONVERGED) or (message.startswith(_ROUNDING) and is_near),
            message=message,
            component=product.form.component(tensors),
        )


def _coordinates_of_gradient(at: lbfgs.Frame, grad: Tensor) -> Tensor:
    return lbfgs.coordinates(at, riemannian_gradient(at.point, grad))


def _tangent_coordinates(at: lbfgs.Frame, vector: Tensor) -> Tensor:
    return lbfgs.coordinates(at, project_tangent(at.point, vector))


class _Bracket:
    """Step lengths of all starts between one that is too short and one that is too long.

    For the weak Wolfe conditions, the approximate ones within rounding of the loss; by the minimum
    of the cubic through both ends, and a secant of the slope while no end is too long.

    Reference: Nocedal & Wright (2006), 3.5; Hager & Zhang (2005), section 2.
    """

    def __init__(self, loss: Tensor, slope: Tensor, t: Tensor, active: Tensor) -> None:
        self._loss, self._slope = loss, slope
        self.t, self.done = torch.where(active, t, 0.0), ~active
        self._accepted = torch.zeros_like(active)
        self._low = (torch.zeros_like(t), loss, slope)
        self._high = (torch.full_like(t, math.inf), loss, slope)

    def narrow(self, loss: Tensor, slope: Tensor, spent: Tensor) -> None:
        """Judge loss and slope at t, and choose the next t of those that go on."""
        t = self.t
        finite = loss.isfinite() & slope.isfinite()
        rounding = 10 * torch.finfo(t.dtype).eps * self._loss.abs()
        falls = loss <= self._loss + _ARMIJO * t * self._slope
        falls |= (loss <= self._loss + rounding) & (slope <= (2 * _ARMIJO - 1) * self._slope)
        far = ~(falls & finite)
        short = ~far & (slope < _CURVATURE * self._slope)
        self._accepted |= ~self.done & ~far & ~short
        self.done = self.done | self._accepted | spent
        before = self._low
        here = t, loss.nan_to_num(math.inf, math.inf, math.inf), slope.nan_to_num(0.0, 0.0, 0.0)
        self._low = _chosen(short & ~self.done, here, self._low)
        self._high = _chosen(far & ~self.done, here, self._high)
        # one that is spent keeps what it has
        self._low = _chosen(short & spent & ~self._accepted, here, self._low)
        inside = _minimum_of_cubic(self._low, self._high)
        beyond = _secant(before, self._low)
        following = torch.where(self._high[0].isfinite(), inside, beyond)
        self.t = torch.where(self.done, t, following)
        self.done = self.done | (self._high[0] - self._low[0] <= 1e-14 * self._high[0])

    def chosen(self) -> Tensor:
        """Return t where it was accepted; elsewhere the longest with a sufficient decrease."""
        return torch.where(self._accepted, self.t, self._low[0])


def _chosen(where: Tensor, new: _End, old: _End) -> _End:
    t, loss, slope = (torch.where(where, a, b) for a, b in zip(new, old, strict=True))
    return t, loss, slope


def _minimum_of_cubic(low: _End, high: _End) -> Tensor:
    """Return where the cubic through both ends is least, not within a tenth of them."""
    (a, at_a, slope_a), (b, at_b, slope_b) = low, high
    width = b - a
    first = slope_a + slope_b - 3 * (at_b - at_a) / width
    second = (first.square() - slope_a * slope_b).clamp(min=0.0).sqrt()
    t = b - width * (slope_b + second - first) / (slope_b - slope_a + 2 * second)
    middle = a + 0.5 * width
    t = torch.where(t.isfinite() & at_b.isfinite(), t, middle)
    return torch.minimum(torch.maximum(t, a + 0.1 * width), b - 0.1 * width)


def _secant(before: _End, low: _End) -> Tensor:
    """Return where the slope would vanish, from 1.5 to 10 times the last step length."""
    t = low[0] + (low[0] - before[0]) * low[2] / (before[2] - low[2])
    t = torch.where(t.isfinite(), t, 2 * low[0])
    return torch.minimum(torch.maximum(t, 1.5 * low[0]), 10 * low[0])
