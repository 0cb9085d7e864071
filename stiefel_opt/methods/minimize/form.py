"""The arguments of a loss: which tensors, how each is read, and where they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.errors import HALF, fail
from stiefel_opt.numerics import orientation
from stiefel_opt.tags import (
    Stiefel,
    manifold_of,
    nearest,
    random_point,
    reading_of,
    turned_over,
    warn_of_component,
)


class Form:
    """The form of the arguments of a loss: one tensor, a tuple or a dict; and how each is read."""

    def __init__(self, given: Any, manifold: Any) -> None:
        self.keys: list[Any] | None = None
        self.kind: Any = None
        if isinstance(given, Mapping):
            self.keys, self.kind = list(given), dict
            tensors = list(given.values())
        elif isinstance(given, (tuple, list)) and any(isinstance(it, Tensor) for it in given):
            self.kind, tensors = tuple, list(given)
        else:
            tensors = [given]
        if not tensors:
            raise ValueError(fail("start", "have at least one tensor", "an empty dict"))
        chosen = self._chosen(manifold, len(tensors))
        self.readings: list[Stiefel | None] = []
        self.tensors: list[Tensor | None] = []
        self.shapes: list[torch.Size] = []
        dtypes = []
        for index, (tensor, own) in enumerate(zip(tensors, chosen, strict=True)):
            key = index if self.keys is None else self.keys[index]
            name = "start" if self.kind is None else f"start {key!r}"
            if not isinstance(tensor, Tensor):
                tensor = self._drawn_later(tensor, name)
            reading = own if own is not None else manifold_of(tensor)
            if reading is not None or self.kind is None:
                reading = reading_of(tensor, reading, name)
                if reading.learn_scale:
                    remedy = "let the loss multiply by a tensor of its own"
                    raise ValueError(fail("manifold", "have a fixed scale", reading, remedy))
            elif tensor.is_meta:
                wanted = "be a tensor where it is unconstrained: only points are drawn"
                raise ValueError(fail(name, wanted, f"sizes {tuple(tensor.shape)}"))
            elif not (tensor.is_floating_point() or tensor.is_complex()):
                raise TypeError(fail(name, "have a floating-point dtype", tensor.dtype))
            self.readings.append(reading)
            self.shapes.append(tensor.shape)
            self.tensors.append(None if tensor.is_meta else _start(tensor, reading, name))
            dtypes.append(tensor.dtype)
        if manifold is None and not any(self.readings):
            remedy = "pass one for each, None for those without, in the form of the start"
            wanted = "be given for several tensors of which none is tagged"
            raise ValueError(fail("manifold", wanted, None, remedy))
        self.dtype = dtypes[0]
        if len({dtype.to_real() for dtype in dtypes}) > 1 or self.dtype in HALF:
            wanted, remedy = "be of one precision, float32 or float64", "convert them"
            raise TypeError(fail("start", wanted, dtypes, remedy))

    def _chosen(self, manifold: Any, count: int) -> list[Any]:
        """Return the reading that is given for each tensor, None where there is none."""
        if self.kind is None or manifold is None:
            return [manifold] * count
        is_alike = isinstance(manifold, (tuple, list) if self.keys is None else Mapping)
        if not is_alike:
            condition = f"be a {self.kind.__name__} of readings, as the start is of tensors"
            remedy = "None in it is for unconstrained tensors"
            raise TypeError(fail("manifold", condition, type(manifold).__name__, remedy))
        if self.keys is not None:
            if unknown := [key for key in manifold if key not in self.keys]:
                raise ValueError(fail("manifold", f"have keys of {self.keys}", unknown))
            return [manifold.get(key) for key in self.keys]
        if len(manifold) != count:
            wanted = f"have one reading for each of {count} tensors"
            raise ValueError(fail("manifold", wanted, len(manifold)))
        return list(manifold)

    def _drawn_later(self, sizes: Any, name: str) -> Tensor:
        if not isinstance(sizes, (tuple, list)) or not all(type(size) is int for size in sizes):
            wanted = "be a tensor, sizes of one, or a tuple or dict of tensors"
            raise TypeError(fail(name, wanted, type(sizes).__name__))
        return torch.empty(tuple(sizes), device="meta")

    def starts(self, count: int, generator: torch.Generator | None) -> list[list[Tensor]]:
        """Return so many starts; those of a real square matrix alternate between components."""
        drawn: list[list[Tensor]] = []
        square = self.square()
        turnable = None if square is None else self.readings[square]
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
            is_free = turnable is not None and turnable.determinant is None
            if index and is_free and self.component(values) == self.component(drawn[-1]):
                row = values[square]  # type: ignore[index]
                for dim in sorted(turnable.dims(row.ndim).rows, reverse=True):  # type: ignore[union-attr]
                    row = row.select(dim, 0)
                row.neg_()
            drawn.append(values)
        return drawn

    def square(self) -> int | None:
        """Return the index of the only real square matrix, whose determinant has two signs."""
        found = []
        for index, (shape, reading) in enumerate(zip(self.shapes, self.readings, strict=True)):
            if reading is None or self.dtype.is_complex:
                continue
            matrices = reading.matrices(torch.empty(shape, device="meta"))
            if matrices.size(-2) == matrices.size(-1):
                is_one = reading.rows is None and matrices.shape[:-2].numel() == 1
                found.append(index if is_one else None)
        return found[0] if len(found) == 1 else None

    def component(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the determinant of the only real square matrix, or None."""
        square = self.square()
        if square is None:
            return None
        reading: Any = self.readings[square]
        matrix = reading.matrices(tensors[square]) / reading.scale
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
    turned = turned_over(name, tensor, reading)
    point = nearest(value, reading, name, tells=not turned)
    warn_of_component(turned)
    return value if point is None else point
