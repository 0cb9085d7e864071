"""How a tensor is read as a batch of matrices.

This is the only file that knows shapes. Every rule behind it sees tall batches ``(..., n, m)``,
``n >= m``, with orthonormal columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import Self, override

from stiefel_opt.errors import check_flag, classes_of, fail
from stiefel_opt.numerics.linalg import frobenius_norm

# The weights of a whole model, to be pasted: neither positions, tokens nor heads.
HIDDEN: Final = (
    '[f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, '
    'torch.nn.Linear) and not name.startswith("head")][:-1]'
)

Ranges = tuple[tuple[int, int], ...]


class Dims(NamedTuple):
    """The dimensions of a stored tensor, counted from the front, by what they are."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


@final
@dataclass(frozen=True, repr=False)
class Stiefel:
    r"""How a tensor is read as a batch of matrices on the Stiefel manifold.

    :math:`\mathrm{St}(n, m) = \{X \in \mathbb{R}^{n \times m} : X^\top X = I\}`. The last two
    dimensions are a matrix, leading dimensions a batch, unless ``row_dims`` and ``column_dims`` say
    otherwise. A tall matrix gets orthonormal columns, a wide one orthonormal rows, a square one
    both.

    Args:
        heads: The rows are this many equal blocks, each a matrix of its own. It may be a tuple, one
            number for each range of ``rows``. Default: one block.
        rows: ``(start, stop)``, or several of them: only these rows are constrained, the others
            follow the plain rule. Default: all rows.
        flatten: Short for ``row_dims=0``: ``(C_out, C_in, *kernel)`` is read as
            ``(C_out, C_in * prod(kernel))``.
        transposed: Short for ``row_dims=-1, column_dims=-2``: the tensor is stored
            ``(..., in, out)`` as in GPT-2's ``Conv1D``.
        scale: The tensor is ``scale`` times an orthonormal matrix. To first order a step moves the
            tensor by -lr times its tangent gradient whatever the scale.
        learn_scale: Each matrix is g > 0 times an orthonormal one, and optimizers train the number
            g; ``scale`` is its first value, to which they pull it back. Default: no.
        determinant: 1 (rotations) or -1, of square real matrices: what is projected, drawn or
            loaded belongs to that component, and no step leaves it. Default: None, as it comes.
        row_dims: The dimension of the rows, or several in any order, joined as by ``reshape``, the
            last one fastest; negative ones count from the end. With ``row_dims=(0, 1)`` Kraus
            operators ``(k, d, d)`` are one matrix ``(k d, d)``. Default: all that ``column_dims``
            leaves; -2 without it.
        column_dims: The same of the columns. Default: all that ``row_dims`` leaves; -1 without it.
            Dimensions that neither names are a batch.

    Raises:
        ValueError: for heads, rows or dimensions that cannot be, overlapping ones, scale <= 0, or a
            learned scale outside of [1e-10, 1e10].
            With a tensor, where several dimensions count the rows, for ``heads`` and ``rows``.
        TypeError: for heads, rows or dimensions that are no ``int``, such as numpy's, flags that
            are no ``bool``, and a scale that is neither ``int`` nor ``float``.
    """

    heads: int | tuple[int, ...] | None = None
    rows: tuple[int, int] | Ranges | None = None
    flatten: bool = False
    transposed: bool = False
    scale: float = 1.0
    learn_scale: bool = False
    determinant: int | None = None
    row_dims: int | tuple[int, ...] | None = None
    column_dims: int | tuple[int, ...] | None = None

    @override
    def __init_subclass__(cls) -> None:
        wanted = "not be derived from: only Stiefel's own constraint would be kept"
        remedy = (
            "write a projection for your manifold, and call it after each step of any optimizer"
        )
        raise TypeError(fail("Stiefel", wanted, cls.__name__, remedy))

    def __post_init__(self) -> None:
        rows = _normal_ranges(self.rows)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "heads", _normal_heads(self.heads, rows))
        for name in ("flatten", "transposed", "learn_scale"):
            check_flag(name, getattr(self, name))
        for name in ("row_dims", "column_dims"):
            object.__setattr__(self, name, _normal_dims(name, getattr(self, name)))
        if self.flatten and self.transposed:
            wanted = "be False with flatten=True"
            raise ValueError(fail("transposed", wanted, True, "use one of the two"))
        for name in ("flatten", "transposed"):
            if getattr(self, name) and self._names_dims():
                wanted, remedy = "be False with row_dims or column_dims", "use one of the two"
                raise ValueError(fail(name, wanted, True, remedy))
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float)):
            raise TypeError(fail("scale", "be a positive number", repr(self.scale)))
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(fail("scale", "be positive and finite", self.scale))
        if self.learn_scale and not 1e-10 <= self.scale <= 1e10:  # float32 squares g and slopes
            remedy = "constrain it without learn_scale"
            raise ValueError(fail("scale", "be in [1e-10, 1e10] to be learned", self.scale, remedy))
        object.__setattr__(self, "scale", float(self.scale))
        check_determinant(self.determinant)

    # ---- as plain data -------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the reading as numbers, booleans and lists, for param groups and state_dicts.

        Fields at their default are left out.
        """
        return {name: _as_list(value) for name, value in self._said()}

    @override
    def __repr__(self) -> str:
        return f"Stiefel({', '.join(f'{name}={value!r}' for name, value in self._said())})"

    def _said(self) -> list[tuple[str, Any]]:
        """Return names and values of the fields that differ from their default."""
        values = [(each, getattr(self, each.name)) for each in fields(self)]
        return [(each.name, value) for each, value in values if value != each.default]

    @classmethod
    def from_dict(cls, reading: Mapping[str, Any]) -> Self:
        """Return the reading that :meth:`as_dict` described."""
        names = {field.name for field in fields(cls)}
        if not names >= reading.keys():
            wanted = f"have no other keys than {sorted(names)}"
            raise ValueError(fail("stiefel", wanted, dict(reading)))
        return cls(**reading)

    # ---- as shapes -----------------------------------------------------------------------------

    def check(self, shape: torch.Size | tuple[int, ...], name: str = "parameter") -> None:
        """Raise ``ValueError`` naming ``name`` unless a tensor of ``shape`` can be read so."""
        size = tuple(shape)
        if len(size) < 2:
            remedy = (
                f"leave it untagged, as so.constrain(model, {HIDDEN}) does, and out of groups with "
                "stiefel=True"
            )
            wanted = "have at least 2 dimensions to be constrained"
            raise ValueError(fail(name, wanted, f"shape {size}", remedy))
        if math.prod(size) == 0:
            raise ValueError(fail(name, "not be empty", f"shape {size}", "leave it untagged"))
        if self._names_dims():
            self._check_dims(size, name)
        row_count = self.size(size)[0]
        for start, stop, heads in self._spans(row_count):
            if stop > row_count:
                wanted, remedy = f"lie in [0, {row_count}]", f"its shape is {size}"
                raise ValueError(fail(f"rows of {name}", wanted, (start, stop), remedy))
            if (stop - start) % heads:
                remedy = f"its shape is {size}; change heads or rows"
                wanted = f"divide its {stop - start} rows"
                raise ValueError(fail(f"heads of {name}", wanted, heads, remedy))
            height, width = (stop - start) // heads, self.size(size)[1]
            if self.determinant is not None and height != width:
                remedy = f"they are {height} x {width}, and no rectangle has a determinant"
                wanted = f"be None where matrices of `{name}` are not square"
                raise ValueError(fail("determinant", wanted, self.determinant, remedy))

    def _check_dims(self, size: tuple[int, ...], name: str) -> None:
        """Raise for dimensions that a tensor lacks or that are named twice, and for none."""
        ndim, remedy = len(size), f"its shape is {size}"
        seen: set[int] = set()
        said: list[tuple[str, Any]]
        said = [("row_dims", self.row_dims), ("column_dims", self.column_dims)]
        for called, dims in said:
            for dim in dims or ():
                if not -ndim <= dim < ndim:
                    wanted = f"lie in [{-ndim}, {ndim - 1}]"
                    raise ValueError(fail(f"{called} of {name}", wanted, dim, remedy))
                if dim % ndim in seen:
                    wanted = "name each dimension once"
                    raise ValueError(fail(f"{called} of {name}", wanted, dims, remedy))
                seen.add(dim % ndim)
        _, rows, columns = self.dims(ndim)
        if not (rows and columns):
            (called, dims), of = said[not rows], "columns" if rows else "rows"
            raise ValueError(
                fail(f"{called} of {name}", f"leave a dimension for {of}", dims, remedy)
            )
        for called, value in (("heads", self.heads), ("rows", self.rows)):
            if value is not None and len(rows) > 1:
                wanted = f"be None where several dimensions, {rows}, count the rows"
                remedy = "leave out of row_dims and column_dims the one that counts matrices"
                raise ValueError(fail(f"{called} of {name}", wanted, value, remedy))

    def parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one view of the stored ``tensor`` for each constrained range of rows."""
        if self.rows is None:
            return (tensor,)
        dim = self.dims(tensor.ndim).rows[0]
        return tuple(tensor.narrow(dim, start, stop - start) for start, stop in self._ranges())

    def blocks(self, tensor: Tensor) -> list[tuple[Tensor, Stiefel]]:
        """Return for each constrained range a view of the stored ``tensor``, and its own reading.

        Equal views with equal readings are one kind, whatever tensor they are part of.
        """
        heads = self._heads()
        return [
            (part, replace(self, rows=None, heads=heads[index]))
            for index, part in enumerate(self.parts(tensor))
        ]

    def plain_parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return one view of the stored ``tensor`` for each range of rows that is left plain."""
        if self.rows is None:
            return ()
        dim = self.dims(tensor.ndim).rows[0]
        edges = [0, *(edge for pair in sorted(self._ranges()) for edge in pair), tensor.size(dim)]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return tuple(tensor.narrow(dim, low, high - low) for low, high in gaps if high > low)

    def matrices(
        self, part: Tensor, index: int = 0, *, stacked: bool = False, wide: bool | None = None
    ) -> Tensor:
        """Read range ``index`` as tall matrices ``(..., n, m)``: a view where strides allow.

        With ``stacked`` the first dimension of ``part`` counts parameters. ``wide`` says whether
        the whole matrices of a shard are wide, which its own shape does not show.
        """
        if not self._is_plain():
            part = self._unfolded(part, int(stacked))
        heads = self._heads()[index]
        if heads > 1:
            part = torch.unflatten(part, -2, (heads, part.size(-2) // heads))
        if wide is None:
            return tall(part)
        return part.mT if wide else part

    def stored(
        self,
        matrices: Tensor,
        shape: torch.Size,
        index: int = 0,
        *,
        stacked: bool = False,
        wide: bool | None = None,
    ) -> Tensor:
        """Undo :meth:`matrices` for a part of ``shape``."""
        if self.is_wide(shape[1:] if stacked else shape, index) if wide is None else wide:
            matrices = matrices.mT
        if self._heads()[index] > 1:
            matrices = matrices.flatten(-3, -2)
        if self._is_plain():
            return matrices.reshape(shape)
        return self._folded(matrices, shape, int(stacked))

    def points(self, tensor: Tensor) -> list[Tensor]:
        """Return the tall matrices of each range over their scale: orthonormal if it is a point."""
        listed = [self.matrices(part, index) for index, part in enumerate(self.parts(tensor))]
        return [matrices / self.scale_of(matrices) for matrices in listed]

    def _unfolded(self, part: Tensor, lead: int) -> Tensor:
        """Return ``(..., n, m)``: the batch first, rows and columns joined; a view if it can be."""
        dims, order = self._order(part.ndim, lead)
        if order != list(range(part.ndim)):
            part = part.permute(order)
        if len(dims.rows) == len(dims.columns) == 1:
            return part
        size, first = part.shape, lead + len(dims.batch)
        middle = first + len(dims.rows)
        return part.reshape(*size[:first], math.prod(size[first:middle]), math.prod(size[middle:]))

    def _folded(self, matrices: Tensor, shape: torch.Size, lead: int) -> Tensor:
        """Undo :meth:`_unfolded`: a view of contiguous matrices, always."""
        _, order = self._order(len(shape), lead)
        tensor = matrices.reshape([shape[dim] for dim in order])
        if order == list(range(len(shape))):
            return tensor
        return tensor.permute([order.index(dim) for dim in range(len(shape))])

    def _order(self, ndim: int, lead: int) -> tuple[Dims, list[int]]:
        """Return the dimensions behind the first ``lead`` ones, and the order that joins them."""
        dims = self.dims(ndim - lead)
        return dims, [*range(lead), *(lead + dim for dim in itertools.chain(*dims))]

    def scale_of(self, matrices: Tensor) -> Any:
        """Return the scale: a number, or that of each matrix, ``(..., 1, 1)``, if it is learned.

        That is the root mean square of the singular values, and 1 for a matrix of zeros.
        """
        if not self.learn_scale:
            return self.scale
        scale = frobenius_norm(matrices) / math.sqrt(min(matrices.shape[-2:]))
        return torch.where(scale > 0, scale, 1.0)

    def dims(self, ndim: int) -> Dims:
        """Return what the dimensions of a stored tensor are."""
        rows: Any = self.row_dims
        columns: Any = self.column_dims
        if self.flatten:
            rows = (0,)
        elif self.transposed:
            rows, columns = (-1,), (-2,)
        elif rows is None and columns is None:
            rows, columns = (-2,), (-1,)
        named = {dim % ndim for dim in (*(rows or ()), *(columns or ()))}
        others = tuple(dim for dim in range(ndim) if dim not in named)
        if rows is None:
            return Dims((), others, tuple(dim % ndim for dim in columns))
        if columns is None:
            return Dims((), tuple(dim % ndim for dim in rows), others)
        return Dims(others, *(tuple(dim % ndim for dim in each) for each in (rows, columns)))

    def is_in_order(self, ndim: int) -> bool:
        """Say whether a contiguous tensor has one matrix behind the other in memory, as stored."""
        return self._order(ndim, 0)[1] == list(range(ndim))

    def is_alike(self, shape: torch.Size, other: torch.Size) -> bool:
        """Say whether tensors of both shapes have equal matrices, where the batch may broadcast."""
        said: tuple[Any, Any] = self.row_dims, self.column_dims
        dims = [dim for each in said for dim in each or (0,)]
        is_from_end = self._is_plain() or self.transposed or max(dims) < 0
        if len(shape) != len(other) and not (is_from_end and len(other) >= -min(dims)):
            return False
        named = [self.dims(len(each))[1:] for each in (shape, other)]
        sizes = [
            [each[dim] for dim in itertools.chain(*own)]
            for each, own in zip((shape, other), named, strict=True)
        ]
        return sizes[0] == sizes[1]

    def on(self, ndim: int) -> Stiefel:
        """Return the one reading that equals all that read tensors of ``ndim`` dimensions alike."""
        _, rows, columns = self.dims(ndim)
        return replace(self, flatten=False, transposed=False, row_dims=rows, column_dims=columns)

    def is_wide(self, shape: torch.Size, index: int = 0) -> bool:
        """Say whether the matrices of range ``index``, all rows of ``shape``, are wide."""
        row_count, column_count = self.size(shape)
        return row_count // self._heads()[index] < column_count

    def heights(self, shape: torch.Size | tuple[int, ...]) -> list[int]:
        """Return n of the tall n x m matrices of each range of a tensor of ``shape``."""
        row_count, column_count = self.size(shape)
        spans = self._spans(row_count)
        return [max((stop - start) // heads, column_count) for start, stop, heads in spans]

    def describe(self, shape: torch.Size | tuple[int, ...]) -> str:
        """Return the reading of a tensor of ``shape`` in words: ``12 x (32 x 384), rows``."""
        row_count, column_count = self.size(shape)
        dims = self.dims(len(shape))
        lead = math.prod([shape[dim] for dim in dims.batch])
        kinds: dict[str, list[tuple[int, str]]] = {}
        for start, stop, heads in self._spans(row_count):
            height = (stop - start) // heads
            kind = "rows" if height < column_count else "columns"
            kind = "square" if height == column_count else kind
            kind = f"({height} x {column_count}), {kind}"
            kinds.setdefault(kind, []).append((lead * heads, f"{start}:{stop}"))
        words = []
        for kind, spans in kinds.items():
            if len(spans) > 3:  # one for each head
                spans = [(sum(number for number, _ in spans), f"{len(spans)} ranges")]
            for number, span in spans:
                words.append(f"{number} x {kind}" + ("" if self.rows is None else f" of {span}"))
        scale = f", scale {self.scale:g}" if self.scale != 1.0 else ""
        if self.learn_scale:
            scale = f", scale learned from {self.scale:g}"
        sign = "" if self.determinant is None else f", determinant {self.determinant:+d}"
        legs = f", dimensions {dims.rows} x {dims.columns}" if self._names_dims() else ""
        return "; ".join(words) + legs + scale + sign

    def unsaid_batch(self, shape: torch.Size | tuple[int, ...]) -> str:
        """Return in words what to do if ``shape``, read as a batch by default, is one matrix."""
        is_default = self._is_plain() and self.heads is None and self.rows is None
        if not is_default or (count := self.count(shape)) == 1:
            return ""
        rows = tuple(range(len(shape) - 1))
        size = f"{count} matrices of {shape[-2]} x {shape[-1]}"
        return f"{size}; if these legs are one matrix, pass row_dims={rows}"

    def count(self, shape: torch.Size | tuple[int, ...]) -> int:
        """Return how many matrices a tensor of ``shape`` holds."""
        lead = math.prod([shape[dim] for dim in self.dims(len(shape)).batch])
        return lead * sum(self._heads())

    def _ranges(self) -> Ranges:
        return self.rows or ()  # type: ignore[return-value]  # __post_init__ normalised it

    def _spans(self, row_count: int) -> list[tuple[int, int, int]]:
        """Return start, stop and heads of each range."""
        ranges = self._ranges() or ((0, row_count),)
        return [(*pair, heads) for pair, heads in zip(ranges, self._heads(), strict=True)]

    def _heads(self) -> tuple[int, ...]:
        number = max(1, len(self._ranges()))
        return self.heads if isinstance(self.heads, tuple) else (self.heads or 1,) * number

    def size(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows and columns a tensor of ``shape`` has, heads one above the other."""
        if self._is_plain():
            return shape[-2], shape[-1]
        _, rows, columns = self.dims(len(shape))
        # lists: torch.compile does not trace a product over a generator
        return math.prod([shape[dim] for dim in rows]), math.prod([shape[dim] for dim in columns])

    def _names_dims(self) -> bool:
        return self.row_dims is not None or self.column_dims is not None

    def _is_plain(self) -> bool:
        """Say whether the last two dimensions are rows and columns."""
        return not (self.flatten or self.transposed or self._names_dims())


def check_determinant(determinant: object) -> None:
    """Raise unless a determinant is 1, -1 or None."""
    if not (determinant is None or (type(determinant) is int and determinant in (1, -1))):
        raise ValueError(fail("determinant", "be 1, -1 or None", repr(determinant)))


def tall(matrix: Tensor) -> Tensor:
    """View of shape ``(..., n, m)`` with n >= m that shares storage with ``matrix``."""
    return matrix if matrix.size(-2) >= matrix.size(-1) else matrix.mT


def _as_list(value: Any) -> Any:
    """Return tuples, and tuples in them, as lists, as JSON does."""
    return [_as_list(each) for each in value] if isinstance(value, tuple) else value


def _normal_ranges(rows: object) -> Ranges | None:
    if rows is None:
        return None
    is_several = isinstance(rows, (tuple, list)) and rows and isinstance(rows[0], (tuple, list))
    pairs: Any = rows if is_several else [rows]
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(type(edge) is int for edge in pair):
            raise TypeError(fail("rows", "be (start, stop) or several of them", repr(rows)))
        if not 0 <= pair[0] < pair[1]:
            raise ValueError(fail("rows", "satisfy 0 <= start < stop", tuple(pair)))
    ranges = tuple((start, stop) for start, stop in pairs)
    for before, after in itertools.pairwise(sorted(ranges)):
        if before[1] > after[0]:
            raise ValueError(fail("rows", "not overlap", (before, after)))
    return ranges


def _normal_dims(name: str, dims: Any) -> tuple[int, ...] | None:
    if dims is None:
        return None
    values = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
    if not all(type(value) is int for value in values):
        raise TypeError(fail(name, "be a dimension or several of them", repr(dims)))
    if not values:
        raise ValueError(fail(name, "name at least one dimension", dims, "leave it out"))
    return values


def _normal_heads(heads: Any, rows: Ranges | None) -> int | tuple[int, ...] | None:
    if heads is None:
        return None
    number = len(rows) if rows is not None else 1
    values = tuple(heads) if isinstance(heads, (tuple, list)) else (heads,) * number
    if not all(type(value) is int for value in values):
        raise TypeError(fail("heads", "be an integer, or one for each range of rows", repr(heads)))
    if not all(value >= 1 for value in values):
        raise ValueError(fail("heads", "be at least 1", heads))
    if len(values) != number:
        wanted = f"have one number for each of the {number} ranges of rows"
        raise ValueError(fail("heads", wanted, heads))
    if len(set(values)) > 1:
        return values
    return None if values[0] == 1 else values[0]  # one head is none


def said_by(key: Any) -> Stiefel | bool | None:
    """Return what the key ``stiefel`` of a group says: a reading, True, False, or None: by tags."""
    if isinstance(key, Mapping):
        return Stiefel.from_dict(key)
    if not (key is None or isinstance(key, (bool, Stiefel))):
        raise TypeError(fail("stiefel", "be None, True, False or a Stiefel", repr(key)))
    return key


def reading_by(key: Any, parameter: Tensor) -> Stiefel | None:
    """Return how a parameter is read by the key ``stiefel`` of its group; None if it is plain."""
    said = said_by(key)
    if isinstance(said, Stiefel):
        return said
    if said is False:
        return None
    return manifold_of(parameter) or (Stiefel() if said else None)


def manifold_of(parameter: Tensor | None, name: str = "") -> Stiefel | None:
    """Return the tag of ``parameter``, or None; raise if its ``.manifold`` is another's."""
    manifold = getattr(parameter, "manifold", None)
    if manifold is None or isinstance(manifold, Stiefel):
        return manifold
    shape = "" if parameter is None else f" of shape {tuple(parameter.shape)}"
    called = f"{name or 'parameter' + shape}.manifold"
    given = f"{type(manifold).__module__}.{type(manifold).__qualname__}"
    remedy = "convert the model with so.from_geoopt, or delete the attribute"
    if is_others(parameter):
        remedy = "leave it to an optimizer of geoopt, and pass the others, so.param_groups(model)"
    raise TypeError(fail(called, "be a so.Stiefel", given, remedy))


def is_others(parameter: Tensor | None) -> bool:
    """Say whether geoopt keeps a parameter on another than a Stiefel manifold."""
    of_geoopt = classes_of(getattr(parameter, "manifold", None), "geoopt")
    return bool(of_geoopt) and not of_geoopt & {"Stiefel", "Euclidean"}
