"""What keeps a step from spoiling anything: safe gradients, points on the manifold, warnings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from stiefel_opt._checks import CONSTRAINABLE, users_level
from stiefel_opt.distributed import RowSums
from stiefel_opt.functional.stiefel_sgd import Deferred, velocity_in
from stiefel_opt.geometry import identity_error, orthonormality_tolerance, polar_factor
from stiefel_opt.linalg import gram, sums
from stiefel_opt.optim.state import State, state_dtype

# Up to which length a gradient is safe, 2e13 in float32 and 1e148 in float64: a millionth of the
# root of the largest number leaves room for momenta and sums of squares. Half precision is added up
# in float32.
LARGEST_SAFE: Final = {
    dtype: math.sqrt(torch.finfo(state_dtype(dtype)).max) * 2.0**-20 for dtype in CONSTRAINABLE
}


def lengths_of(grads: Sequence[Tensor]) -> Tensor:
    """Return the length of each of several gradients of one dtype and device, without waiting."""
    dtype = state_dtype(grads[0].dtype)
    wide = None if dtype == grads[0].dtype else dtype
    return torch.stack(torch._foreach_norm(list(grads), 2, wide))


# ---- before a step: is the point on the manifold, and the momentum tangent there? --------------


def settle(
    point: Tensor, state: State, row_sum: RowSums | None, n: int, due: bool
) -> tuple[Tensor, bool | Tensor]:
    """Project matrices X, of n rows in all, that are off the manifold: return X and what is to be
    corrected, or X'X; rounding in any case if that is ``due``.
    """
    (own,) = sums(row_sum, (point, point))
    error = identity_error(own)
    worst, tolerance = float(error.amax()), orthonormality_tolerance(point.dtype, n)
    if not worst <= 10 * tolerance:
        off = ~(error <= 10 * tolerance)
        if row_sum is None:  # X'X may overflow where X does not
            off &= point.isfinite().all(dim=-1).all(dim=-1)
        if bool(off.any()):
            return _projected(point, off, row_sum), True
    if due or not worst <= tolerance or _is_stale(point, velocity_in(state).normal, row_sum):
        return point, own if row_sum is None and own.size(-1) < n else True
    return point, False


def _projected(point: Tensor, off: Tensor, row_sum: RowSums | None) -> Tensor:
    """Return the matrices with those that are ``off`` replaced by their polar factors."""
    project = polar_factor if row_sum is None else partial(row_sum.with_all_rows, polar_factor)
    point = point.clone()
    point[off] = project(point[off])
    return point


def _is_stale(point: Tensor, normal: Deferred | None, row_sum: RowSums | None) -> bool:
    """Say whether X'U is more than rounding can explain: U belongs to another point."""
    if normal is None:
        return False
    base = normal.base
    overlap = gram(point, base)
    squares = torch.linalg.vector_norm(base, dim=-2, keepdim=True).square()
    if row_sum is not None:
        packed = row_sum(torch.cat([overlap, squares.to(overlap.dtype)], dim=-2))
        overlap, squares = packed[:, :-1], packed[:, -1:].real
    if normal.factor is not None:
        overlap = torch.bmm(overlap, normal.factor)
    if normal.shift is not None:
        overlap = overlap - normal.shift
    size = squares.amax(dim=-1, keepdim=True).sqrt()  # of each matrix for itself
    return bool((overlap.abs() > 1e3 * torch.finfo(overlap.dtype).eps * size).any())


# ---- after a step -------------------------------------------------------------------------------


def warn_of_skipped(names: Sequence[str], parameters: Sequence[Tensor]) -> None:
    """Say which parameters were left as they were."""
    pairs = zip(names[:8], parameters, strict=False)
    shown = ", ".join(f"{name} of shape {tuple(parameter.shape)}" for name, parameter in pairs)
    _warn(shown + (f" and {len(names) - 8} more" if len(names) > 8 else ""))


def warn_of_tallies(tallies: Mapping[str, int], told: int) -> int:
    """Say which parameters missed steps if some did since ``told`` steps; return their number."""
    total = sum(tallies.values())
    if total > told:
        _warn(", ".join(f"{name} ({count} steps)" for name, count in tallies.items()))
    return total


def _warn(who: str) -> None:
    warnings.warn(
        f"The gradient of {who}, or the step it made, was not finite: point, momentum and step "
        "stay as they were, or the momentum starts again if it overflowed. "
        "Look for its cause; nonfinite='raise' stops there, 'ignore' looks at nothing.",
        stacklevel=users_level(),
    )
