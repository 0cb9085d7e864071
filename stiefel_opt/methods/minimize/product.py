"""All tensors of all starts as points of a product of manifolds, and curves through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.methods.minimize.form import Form
from stiefel_opt.numerics import gram, newton_schulz
from stiefel_opt.tags import Stiefel

# |X - E|_F from which another reference serves better: half of its square is at least 1 minus the
# lowest eigenvalue of the symmetric part of E'X.
_FARTHEST = math.sqrt(2 * (1 - lbfgs.FARTHEST_REFERENCE))


class Product:
    """Tensors ``(starts, *shape)``; a vector is ``(starts, N)``, real, with all of one start.

    Matrices are ``(k, n, m)`` for each constrained range, k for all starts. Where one tensor is
    one tall matrix, vectors and matrices are views of one another.

    Attributes:
        pieces: How many matrices and unconstrained tensors a start has.
    """

    def __init__(self, form: Form, tensors: list[Tensor]) -> None:
        self.form, self.tensors = form, tensors
        self.count = len(tensors[0])
        self._sizes = [flat_of(tensor).size(1) for tensor in tensors]
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
        self._distance = 0.0  # from the references, at most
        self.frames = self._frames()
        plain = sum(reading is None for reading in form.readings)
        self.pieces = sum(map(len, self.points)) // self.count + plain

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors as one vector of each start."""
        parts = [flat_of(tensor, self.count) for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def matrices(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the orthonormal matrices of each range."""
        if self._is_one:
            return [_batch(tensors[0])]
        return [
            _batch(reading.matrices(self._part(tensors[place], place, index), index, stacked=True))
            / reading.scale
            for place, index, reading in self._ranges
        ]

    def mapped(
        self,
        function: Callable[[lbfgs.Frame, Tensor], Tensor],
        flat: Tensor,
        frames: list[lbfgs.Frame] | None = None,
    ) -> Tensor:
        """Return vectors, ``(starts, ..., N)``, whose matrices went through a function of frames.

        The frames are those of the point, unless others are given.
        """
        seen = self.frames if frames is None else frames
        if flat.ndim > 2:
            seen = [_repeated(at, self.count, flat.size(1)) for at in seen]
        if self._is_one:
            return _real(function(seen[0], self._viewed(flat))).view(flat.shape)
        tensors = self._shaped(flat.flatten(0, -2))
        pairs = zip(seen, self.matrices(tensors), strict=True)
        self._write(tensors, [function(at, own) for at, own in pairs])
        whole = torch.cat([flat_of(tensor) for tensor in tensors], dim=1)
        return whole.view(flat.shape)

    def parts(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return a vector as tensors, none where they are not needed, and as matrices."""
        if self._is_one:
            return [], [self._viewed(flat)]
        tensors = self._shaped(flat)
        return tensors, self.matrices(tensors)

    def move(self, tensors: Sequence[Tensor], points: list[Tensor]) -> None:
        """Make these the point: tensors, in which matrices are missing yet, and matrices."""
        if self._is_one:
            self.tensors = [points[0].view(self.tensors[0].shape)]
        else:
            self.tensors = list(tensors)
            self._write(self.tensors, points)
        self.points = points
        self.frames = self._frames()

    def is_far(self, travelled: float) -> bool:
        """Say whether another reference would serve better; tell how far a point has moved."""
        self._distance += travelled
        if self._distance <= _FARTHEST:
            return False
        pairs = zip(self.points, self.references, strict=True)
        tall = [here - there for here, there in pairs if here.size(-2) > here.size(-1)]
        norms = [float(torch.linalg.vector_norm(each, dim=(1, 2)).max()) for each in tall]
        self._distance = max([0.0, *norms])
        return self._distance > _FARTHEST

    def polish(self) -> None:
        """Take the rounding of a root out of the point."""
        self.move(self.tensors, [newton_schulz(point) for point in self.points])

    def refer_here(self) -> None:
        """Make this point the reference."""
        self.references, self._distance = list(self.points), 0.0
        self.frames = self._frames()

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        """Return vectors as tensors like those of the point, in new memory."""
        tensors = []
        for part, like in zip(torch.split(flat, self._sizes, dim=1), self.tensors, strict=True):
            own = part.reshape(-1, *like.shape[1:], *([2] if like.is_complex() else []))
            tensors.append((torch.view_as_complex(own) if like.is_complex() else own).clone())
        return tensors

    def _write(self, tensors: Sequence[Tensor], matrices: Sequence[Tensor]) -> None:
        """Undo :meth:`matrices`, in place."""
        for (place, index, reading), own in zip(self._ranges, matrices, strict=True):
            part = self._part(tensors[place], place, index)
            seen = reading.matrices(part, index, stacked=True)
            whole = (reading.scale * own).reshape(seen.shape)
            part.copy_(reading.stored(whole, part.shape, index, stacked=True))

    def _viewed(self, flat: Tensor) -> Tensor:
        like = self.tensors[0]
        if like.is_complex():
            flat = torch.view_as_complex(flat.reshape(-1, like[0].numel(), 2))
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


class Path:
    """The curves of all starts, t a number of each: the polar factor of X + t V.

    The factor is computed from the points as they are: rounding does not grow from step to step.

    Attributes:
        speeds: Of each start, the norm of V with all matrices.
    """

    def __init__(self, product: Product, direction: Tensor) -> None:
        self._product = product
        self._tensors, self._points = product.tensors, product.points
        vector = product.mapped(lbfgs.from_coordinates, direction)
        self._moves, self._tangents = product.parts(vector)
        self.speeds: list[float] = torch.linalg.vector_norm(vector, dim=1).tolist()

    def go(self, t: Tensor) -> None:
        """Move the point to t."""
        points = []
        for point, tangent in zip(self._points, self._tangents, strict=True):
            each = len(point) // len(t)
            times = t if len(t) == 1 or each == 1 else t.repeat_interleave(each)
            moved = torch.addcmul(point, tangent, times.view(-1, 1, 1))
            values, axes = torch.linalg.eigh(gram(moved))
            root = torch.bmm(axes * values.rsqrt().unsqueeze(1), axes.mH)
            points.append(torch.bmm(moved, root))
        tensors = [
            here + t.view(-1, *[1] * (move.ndim - 1)) * move
            for here, move in zip(self._tensors, self._moves, strict=False)
        ]
        self._product.move(tensors, points)


def flat_of(tensor: Tensor, count: int | None = None) -> Tensor:
    """Return a tensor, real and flat, for each of its rows or for each of ``count``."""
    return _real(tensor).reshape(len(tensor) if count is None else count, -1)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _batch(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


def _repeated(at: lbfgs.Frame, count: int, times: int) -> lbfgs.Frame:
    """Return the frames of each start so many times, one after the other."""

    def repeated(matrices: Tensor) -> Tensor:
        own = matrices.view(count, 1, -1, *matrices.shape[1:])
        return own.expand(-1, times, -1, -1, -1).flatten(0, 2)

    return lbfgs.Frame(*(None if each is None else repeated(each) for each in at))  # type: ignore[arg-type]
