"""Orthonormality error of a tensor or model, and a table of its constrained weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.optim import Optimizer
from typing_extensions import override

from stiefel_opt.errors import fail, none_found
from stiefel_opt.numerics import (
    finest_dtype,
    gathered,
    has_values,
    orientation,
    orthonormality_tolerance,
    widened,
)
from stiefel_opt.tags import (
    MOVED,
    Stiefel,
    is_others,
    largest_error,
    manifold_of,
    reading_of,
    readings,
    stacked,
    unsaid_batches,
    wrong_signs,
)


@torch.no_grad()
def orthonormality_error(x: Tensor | nn.Module, manifold: Stiefel | None = None) -> Tensor:
    r"""Return the largest entry of :math:`|X^\top X - I|` as a 0-dim tensor, without host sync.

    Args:
        x: A tensor, a parameter, or a model, of which all constrained parameters count, and all
            weights that :func:`stiefel_opt.orthogonal` computes. A tensor without tag is read as
            ``Stiefel()``; with ``scale=s`` X is the tensor divided by s, and where the scale is
            learned each matrix is divided by its own.
        manifold: Another reading of a tensor.

    Raises:
        ValueError: if a tensor cannot be read so, or a model has no constrained weight.
        TypeError: for integer tensors.

    Note:
        Evaluated in float64 (on mps in float32) on the device of ``x``, so that the answer is the
        error of the matrices and not of this sum. A sharded parameter is gathered for it, one at a
        time: every process must call.
    """
    if isinstance(x, nn.Module):
        if manifold is not None:
            raise ValueError(fail("manifold", "be None for a model", manifold))
        errors = [_error(weight, reading) for _, weight, reading, _ in constrained(x)]
        if not errors:
            remedy = "call so.constrain or so.orthogonal first"
            raise ValueError(none_found("x", "a constrained parameter", x, remedy))
        return torch.stack([error.to(errors[0].device) for error in errors]).amax()
    if not isinstance(x, Tensor):
        raise TypeError(fail("x", "be a tensor or a torch.nn.Module", type(x).__name__))
    return _error(x, reading_of(x, manifold, "x"))


def constrained(
    model: nn.Module, *, computed: bool = True
) -> Iterator[tuple[str, Tensor, Stiefel, str]]:
    """Yield name, value, reading and map of every orthonormal weight of ``model``.

    Tagged parameters come first, their map is ``""``; then, unless ``computed`` is False, what
    :func:`stiefel_opt.orthogonal` computes. The reading of a map is its attribute ``manifold``, and
    ``orthonormal`` says that it keeps to it; of several parametrizations of one weight only the
    last decides.
    """
    for name, (parameter, reading) in readings(model).items():
        if reading is not None:
            yield name, parameter, reading, ""
    for prefix, module in model.named_modules():
        if not (computed and parametrize.is_parametrized(module)):
            continue
        maps: dict[str, nn.ModuleList] = dict(module.parametrizations.named_children())
        for leaf, listed in maps.items():
            last = listed[-1]
            manifold = getattr(last, "manifold", None)
            if isinstance(manifold, Stiefel) and getattr(last, "orthonormal", False):
                name = f"{prefix}.{leaf}" if prefix else leaf
                yield name, getattr(module, leaf), manifold, type(last).__name__


def _error(tensor: Tensor, reading: Stiefel) -> Tensor:
    return largest_error(gathered(tensor.detach()).to(finest_dtype(tensor)), reading)


@torch.no_grad()
def scales_of(tensor: Tensor, reading: Stiefel) -> tuple[float, float] | None:
    """Return the smallest and the largest learned scale of a weight; None if it is not learned."""
    if tensor.is_meta or not reading.learn_scale:
        return None
    value = gathered(tensor.detach()).to(finest_dtype(tensor))
    parts = enumerate(reading.parts(value))
    scales = [reading.scale_of(reading.matrices(part, index)).flatten() for index, part in parts]
    least, largest = torch.aminmax(torch.cat(scales))
    return float(least), float(largest)


@dataclass(frozen=True)
class Line:
    """One constrained weight in a :class:`Report`.

    Attributes:
        name: As in ``model.named_parameters()``, or module and name of a parametrized weight.
        shape: Of the weight.
        reading: How it is read as matrices, in words.
        error: Largest entry of X'X - I; None on the meta device.
        tagged: Whether the parameter has its tag; without it, an optimizer treats it as plain.
        map: Class of the parametrization that computes the weight; empty for a parameter.
        skipped: Steps missed because a gradient was not finite; None where no optimizer knows.
        off: Whether the error is more than rounding: the weight was written to, or not projected.
        moved: How far :func:`stiefel_opt.constrain` moved the value to project it, as a part of its
            length |W|; None if it did not project.
        angle: Largest angle of the last step, to first order, in radians; None where it is not
            known, as after a gradient that was not finite without momentum.
        radius: Virtual radius, by which the learning rate is divided; None if there is none.
        factor: On the learning rate, of an adaptive optimizer; None if there is none.
        momentum: Of the last step, which an adaptive optimizer chooses; None if there is none.
        scale: Smallest and largest learned scale of its matrices; None if it is not learned.
        start: To which the optimizer pulls it back, if a checkpoint may have brought it.
        determinant: Sign of the determinant of real square matrices, "+1" or "-1"; of several, how
            many are -1; None of others.
        mirrored: Whether a matrix has the other determinant than the reading says.
        held: Whether the optimizer of the report holds the parameter; True without an optimizer,
            and for a weight that a map computes.
    """

    name: str
    shape: tuple[int, ...]
    reading: str
    error: float | None
    tagged: bool
    map: str = ""
    skipped: int | None = None
    off: bool = False
    moved: float | None = None
    angle: float | None = None
    radius: float | None = None
    factor: float | None = None
    momentum: float | None = None
    scale: tuple[float, float] | None = None
    start: float | None = None
    held: bool = True
    determinant: str | None = None
    mirrored: bool = False


_COLUMNS: Final = {  # title: attribute of a line, and its form
    "determinant": ("determinant", "{}"),
    "moved": ("moved", "{:.0%}"),
    "scale": ("scale", "{}"),
    "skipped steps": ("skipped", "{}"),
    "last step": ("angle", "{:.1e} rad"),
    "radius": ("radius", "{:.3g}"),
    "factor": ("factor", "{:.3g}"),
    "momentum": ("momentum", "{:.2f}"),
}


# Attribute of a line: the method of this package's optimizers that returns it by parameter.
_METHODS: Final = {
    "skipped": "skipped_steps_of",
    "angle": "angles_of",
    "start": "starts_of",
    "radius": "radii_of",
    "factor": "factors_of",
    "momentum": "momenta_of",
}


@dataclass(frozen=True, repr=False)
class Report:
    """Result of :func:`report`; printing it shows a table.

    Attributes:
        lines: One :class:`Line` for each constrained parameter.
        with_steps: Whether the table has columns for the steps of an optimizer.
        others: Name and manifold of each parameter that is geoopt's, as it is on another manifold.
        notes: What to look at: tensors of several dimensions that are read as a batch.
        how_stepped: How the last step of an optimizer was taken on an accelerator: captured as CUDA
            graphs, or eager and why; else empty.
    """

    lines: tuple[Line, ...]
    with_steps: bool = False
    others: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    how_stepped: str = ""

    @override
    def __str__(self) -> str:
        if not self.lines:
            return "no constrained parameters"
        columns = {}
        for title, (name, form) in _COLUMNS.items():
            values = [_shown(getattr(line, name)) for line in self.lines]
            is_known = any(value is not None for value in values)
            if is_known or (self.with_steps and name in ("skipped", "angle")):
                columns[title] = ["-" if value is None else form.format(value) for value in values]
        rows = [("parameter", "shape", "reading", *columns, "error")]
        for line, *extra in zip(self.lines, *columns.values(), strict=True):
            error = "meta" if line.error is None else f"{line.error:.1e}"
            if not (line.tagged or line.map):
                error += "  tag lost: so.retag(model)"
            elif line.off:
                error += "  off: so.project_(model), or the next Stiefel step"
            elif line.mirrored:
                error += "  the other determinant: so.project_(model)"
            if not line.held:
                error += "  not in this optimizer"
            shape = " x ".join(map(str, line.shape))
            reading = f"{line.reading}, by {line.map}" if line.map else line.reading
            rows.append((line.name, shape, reading, *extra, error))
        left = ", ".join(f"{name} ({manifold})" for name, manifold in self.others)
        notes = [*self.notes, f"left to geoopt: {left}"] if left else [*self.notes]
        notes += [f"last step: {self.how_stepped}"] if self.how_stepped else []
        return "\n".join([table(rows), *notes])

    @override
    def __repr__(self) -> str:
        return str(self)


def _signs(weight: Tensor, reading: Stiefel) -> str | None:
    """Return the determinant of real square matrices in words."""
    points = reading.points(widened(gathered(weight.detach())))
    square = [each for each in points if each.size(-2) == each.size(-1)]
    if not square or weight.is_complex():
        return None
    signs = torch.cat([orientation(each).reshape(-1) for each in square])
    count = int((signs < 0).sum())
    if signs.numel() == 1:
        return "-1" if count else "+1"
    return f"{count} of {signs.numel()} are -1"


def _is_mirrored(weight: Tensor, reading: Stiefel) -> bool:
    """Say whether a matrix has the other determinant than the reading says."""
    if reading.determinant is None or not has_values(weight):
        return False
    return bool(wrong_signs(gathered(weight.detach()), reading).any())


def _shown(value: Any) -> Any:
    """Return a number, or a range of numbers in words."""
    if not isinstance(value, tuple):
        return value
    least, largest = (f"{number:.3g}" for number in value)
    return least if least == largest else f"{least} to {largest}"


def table(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of text in columns, the first one underlined."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)


def in_words(model: nn.Module, name: str, shape: tuple[int, ...], reading: Stiefel) -> str:
    """Return the reading of a weight of ``model``, and what its blocks are for."""
    path, _, leaf = name.rpartition(".")
    count, each = stacked(model.get_submodule(path), leaf)
    fits = count > 1 and (reading.heads, reading.rows) == (count, None)
    return reading.describe(shape) + (f", one for each {each}" if fits else "")


@torch.no_grad()
def report(model: nn.Module, optimizer: Optimizer | None = None) -> Report:
    """Return a table of every constrained weight: name, shape, reading, orthonormality error.

    Args:
        model: A model; without constrained weights the table says so.
        optimizer: An optimizer, also in the wrapper of accelerate: adds for each parameter the
            number of skipped steps, the largest angle of the last step, and the virtual radius, or
            the factor on the learning rate and the momentum, if there is one; "-" where the
            optimizer, as one of torch, does not know. A parameter that it does not hold is marked.
            Default: none.

    Returns: The table, as a :class:`Report`: ``print`` it, or read its ``lines``.
    Raises:
        TypeError: if ``model`` is not a module.
    Note: Tagged parameters come first, then the weights that :func:`stiefel_opt.orthogonal`
        computes. The errors are those of :func:`orthonormality_error`; reading them waits for the
        device.
    """
    inmost = optimizer
    while isinstance(inner := getattr(inmost, "optimizer", None), Optimizer):
        inmost = inner  # the optimizer that a wrapper holds
    if not (inmost is None or isinstance(inmost, Optimizer)):
        raise TypeError(fail("optimizer", "be None or an optimizer", type(inmost).__name__))
    known = {name: getattr(inmost, how)() for name, how in _METHODS.items() if hasattr(inmost, how)}
    groups = getattr(inmost, "param_groups", ())
    held = {id(parameter) for group in groups for parameter in group["params"]}
    found = list(constrained(model))
    # Another package's optimizer may hold copies. Which weights it steps is then not known.
    is_known = bool(known) or any(id(weight) in held for _, weight, _, _ in found)
    lines = []
    for name, weight, reading, kind in found:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        shape = tuple(weight.shape)
        error = _error(weight, reading).item() if has_values(weight) else None
        rounding = max(orthonormality_tolerance(weight.dtype, n) for n in reading.heights(shape))
        numbers = {attribute: values.get(weight) for attribute, values in known.items()}
        if "skipped" in numbers:  # the method leaves out weights without skipped steps
            numbers["skipped"] = numbers["skipped"] or 0
        read = replace(reading, scale=numbers.get("start") or reading.scale)
        line = Line(
            name,
            shape,
            in_words(model, name, shape, read),
            error,
            tagged=manifold_of(weight) is not None,
            map=kind,
            off=error is not None and not kind and not error <= rounding,
            moved=owner.__dict__.get(MOVED, {}).get(leaf),
            scale=scales_of(weight, reading),
            determinant=_signs(weight, reading) if has_values(weight) else None,
            mirrored=_is_mirrored(weight, reading),
            held=bool(kind) or not is_known or id(weight) in held,
            **numbers,
        )
        lines.append(line)
    others = tuple(
        (name, type(parameter.manifold).__name__)  # type: ignore[attr-defined]
        for name, parameter in model.named_parameters()
        if is_others(parameter)
    )
    batches = unsaid_batches(model, ((name, w.shape, reading) for name, w, reading, _ in found))
    notes = tuple(
        f"{name}{f' and {len(more)} more' if more else ''}: {note}"
        for note, (name, *more) in batches.items()
    )
    how = getattr(inmost, "how_stepped", str)()
    return Report(tuple(lines), optimizer is not None, others, notes, how)
