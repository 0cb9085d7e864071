"""Before a step: is the point still on the manifold, and the momentum still tangent there?"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from stiefel_opt.distributed import RowSums
from stiefel_opt.functional.flows import sum_rows
from stiefel_opt.geometry import identity_error, orthonormality_tolerance, polar_factor
from stiefel_opt.linalg import own_gram
from stiefel_opt.optim.batch import Batch

__all__ = ["settle"]


def settle(
    point: Tensor, batch: Batch, due: bool, is_stale: Callable[[Tensor, Batch], bool]
) -> tuple[Tensor, bool | Tensor]:
    """Project matrices that are off the manifold; return what is to be corrected, or X'X.

    Args:
        point: X, ``(k, n, m)``; only read.
        batch: Where it comes from.
        due: Whether rounding is to be removed in any case.
        is_stale: Says whether the momentum of a batch belongs to another point.
    """
    row_sum, n = batch.row_sum, batch.row_count
    own = sum_rows(row_sum, own_gram(point))
    error = identity_error(own)
    worst, tolerance = float(error.amax()), orthonormality_tolerance(point.dtype, n)
    if not worst <= 10 * tolerance:
        off = ~(error <= 10 * tolerance)
        if row_sum is None:  # X'X may overflow where X does not
            off &= point.isfinite().all(dim=-1).all(dim=-1)
        if bool(off.any()):
            return _projected(point, off, row_sum), True
    if due or not worst <= tolerance or is_stale(point, batch):
        return point, own if row_sum is None and own.size(-1) < n else True
    return point, False


def _projected(point: Tensor, off: Tensor, row_sum: RowSums | None) -> Tensor:
    """Return the matrices with those that are ``off`` replaced by their polar factors."""
    point = point.clone()
    found = point[off]
    if row_sum is None:
        point[off] = polar_factor(found)
    else:
        point[off] = row_sum.with_all_rows(polar_factor, found)
    return point
