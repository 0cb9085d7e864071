"""Reading weighted clouds: numpy or torch in, centred float64 tensors inside, the same kind out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stiefel_opt.errors import check_integer, fail
from stiefel_opt.numerics import gram_error

_WEIGHT_TOLERANCE = 1e-5  # float32 weights of some thousand points sum to one that well
_SMALLEST_WEIGHT = 1e-30  # a point of less weight is no part of the plan
_SIZES = 1e-70, 1e70  # of the largest coordinate: its fourth power is a number


@dataclass(frozen=True)
class Clouds:
    """Two weighted clouds without their weightless points, moved so that both centre near zero."""

    x: Tensor  # (n, d), float64
    y: Tensor  # (m, d)
    a: Tensor  # positive weights, summing to one
    b: Tensor
    in_x: Tensor  # which of all points these are
    in_y: Tensor
    without_x: Tensor  # the weightless points, moved alike
    without_y: Tensor
    model: Any  # the first cloud as it was given, for the kind of the results

    @property
    def dimension(self) -> int:
        return self.x.size(1)

    def mean_distance(self, projection: Tensor) -> float:
        """Return the mean square of U'(x_i - y_j), U the projection, i and j independent."""
        x, y = self.x @ projection, self.y @ projection
        squares = self.a @ x.square().sum(1) + self.b @ y.square().sum(1)
        return float((squares - 2 * (self.a @ x) @ (self.b @ y)).clamp_min(0.0))

    def in_kind(self, values: Tensor) -> Any:
        """Return ``values`` as the first cloud was given: numpy or torch, its dtype."""
        return written_like(self.model, values)

    def full_plan(self, plan: Tensor) -> Tensor:
        """Return a plan between the points with weight as one between all points."""
        sizes = len(self.in_x), len(self.in_y)
        if plan.shape == sizes:
            return plan
        whole = plan.new_zeros(sizes)
        whole[self.in_x.nonzero(), self.in_y] = plan
        return whole

    def full_potentials(
        self, f: Tensor, g: Tensor, projection: Tensor, reg: float
    ) -> tuple[Tensor, Tensor]:
        """Return potentials of all points: those without weight get what a weight would give."""
        full = []
        for inside, own, without, others, weights, potential in (
            (self.in_x, f, self.without_x, self.y, self.b, g),
            (self.in_y, g, self.without_y, self.x, self.a, f),
        ):
            cost = torch.cdist(without @ projection, others @ projection).square()
            whole = own.new_empty(len(inside))
            whole[inside] = own
            whole[~inside] = -reg * torch.logsumexp((potential - cost) / reg + weights.log(), 1)
            full.append(whole)
        return full[0], full[1]


def written_like(model: Any, values: Tensor) -> Any:
    """Return ``values`` as ``model`` was given: numpy or torch, its dtype if that is floating."""
    if isinstance(model, Tensor):
        return values.to(model.dtype if model.is_floating_point() else torch.float64)
    dtype = getattr(model, "dtype", np.dtype(float))  # a list has none
    floating = np.issubdtype(dtype, np.floating)
    return values.cpu().numpy().astype(dtype if floating else float, copy=False)


def refuse_keywords(
    function: str, given: Mapping[str, object], remedies: Mapping[str, str]
) -> None:
    """Raise for keywords that ``function`` does not have; for POT's with what to pass instead."""
    for name in given:
        if name not in remedies:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        raise TypeError(fail(name, "be left out", "a keyword of POT", remedies[name]))


def generator_of(seed: int | None) -> torch.Generator:
    """Return a generator with this seed; None: with one that the system draws."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
        return generator
    return generator.manual_seed(check_integer("seed", seed, 0, 2**63 - 1))


def read_clouds(x: Any, y: Any, a: Any, b: Any) -> Clouds:
    """Check and read two clouds and their weights; None stands for equal weights."""
    first, second = read_cloud("x", x), read_cloud("y", y)
    if isinstance(x, Tensor) != isinstance(y, Tensor):
        raise TypeError(fail("y", f"be a {type(x).__name__} like `x`", type(y).__name__))
    if first.device != second.device:
        raise ValueError(fail("y", f"be on {first.device} like `x`", f"one on {second.device}"))
    if first.size(1) != second.size(1):
        condition, shape = f"have {first.size(1)} columns like `x`", second
        raise ValueError(fail("y", condition, shape, "rows are points"))
    left, in_x = _read_weights("a", a, first, "x")
    right, in_y = _read_weights("b", b, second, "y")
    centre = (left @ first[in_x] + right @ second[in_y]) / 2
    first, second = first - centre, second - centre
    points = first[in_x], second[in_y]
    return Clouds(*points, left, right, in_x, in_y, first[~in_x], second[~in_y], model=x)


def read_projection(name: str, projection: Any, dimension: int, k: int | None = None) -> Tensor:
    """Check and read a projection, ``(dimension, k)`` with orthonormal columns; None: any k."""
    point = read_cloud(name, projection)
    rows, columns = point.shape
    if rows != dimension or columns != (k or columns) or columns > rows:
        wanted = f"({dimension}, {'k' if k is None else k})"
        raise ValueError(fail(name, f"have shape {wanted}", point))
    error = float(gram_error(point))
    if error > 1e-4:
        given = f"|U'U - I| = {error:.1e}"
        raise ValueError(fail(name, "have orthonormal columns", given, "take a Q factor"))
    return point


def read_cloud(name: str, values: Any, dims: int = 2) -> Tensor:
    """Return points, or with ``dims=1`` numbers, as a float64 tensor; raise unless finite."""
    if isinstance(values, list | tuple):
        try:
            values = np.array(values)
        except ValueError as error:
            raise ValueError(fail(name, "have rows of one length", "several")) from error
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "fiu":
            raise TypeError(fail(name, "hold real numbers", values.dtype))
        tensor = torch.from_numpy(values.astype(np.float64))
    elif isinstance(values, Tensor):
        if values.is_complex() or values.dtype == torch.bool:
            raise TypeError(fail(name, "hold real numbers", values.dtype))
        tensor = values.detach().to(torch.float64, copy=True)
    else:
        raise TypeError(fail(name, "be an array, a list or a tensor", type(values).__name__))
    if tensor.ndim != dims or 0 in tensor.shape:
        shape = "(points, dimension)" if dims == 2 else "(points,)"
        raise ValueError(
            fail(name, f"have shape {shape}, not empty", f"shape {tuple(tensor.shape)}")
        )
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(fail(name, "be finite", "NaN or inf", "remove such points"))
    least, most = _SIZES
    if dims == 2 and (size := float(tensor.abs().max())) and not least <= size <= most:
        wanted = f"have a largest coordinate from {least:g} to {most:g}"
        remedy = "divide all clouds by it, and reg by its square"
        raise ValueError(fail(name, wanted, f"{size:.1e}", remedy))
    return tensor


def read_shares(name: str, weights: Any, count: int, of: str) -> Tensor:
    """Check and read weights that sum to one; None stands for equal ones."""
    if weights is None:
        return torch.full((count,), 1.0 / count, dtype=torch.float64)
    values = read_cloud(name, weights, dims=1)
    if len(values) != count:
        raise ValueError(fail(name, f"have one weight for each of the {count} {of}", len(values)))
    smallest, total = float(values.min()), float(values.sum())
    if smallest < 0:
        raise ValueError(fail(name, "not be negative", f"a weight of {smallest:g}"))
    if abs(total - 1) > _WEIGHT_TOLERANCE:
        remedy = f"divide it by `{name}.sum()`"
        raise ValueError(fail(name, "sum to one", f"a sum of {total:.9g}", remedy))
    return values


def _read_weights(name: str, weights: Any, cloud: Tensor, of: str) -> tuple[Tensor, Tensor]:
    """Return the positive weights of a cloud, summing to one, and which of its points have one."""
    values = read_shares(name, weights, len(cloud), f"points of `{of}`").to(cloud.device)
    inside = values > _SMALLEST_WEIGHT
    values = values[inside]
    return values / values.sum(), inside
