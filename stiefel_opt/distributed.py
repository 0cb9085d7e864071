"""Sums over rows that several processes share: a sharded dimension of a DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RowSums"]


@final
class RowSums:
    """The ``row_sum`` of :mod:`stiefel_opt.functional` for rows shared along dimensions of a mesh.

    Every process gets the same bits, so that choices made from a sum are the same everywhere.

    Args:
        mesh: The processes.
        dims: Dimensions of the mesh along which the rows are cut.
    """

    def __init__(self, mesh: DeviceMesh, dims: Sequence[int]) -> None:
        self._groups = [mesh.get_group(dim) for dim in dims]
        self._count, self._place = 1, 0  # of the processes that share rows, and ours among them
        for dim in dims:
            self._place = self._place * mesh.size(dim) + mesh.get_local_rank(dim)
            self._count *= mesh.size(dim)

    def __call__(self, packed: Tensor) -> Tensor:
        """Return the sum of ``packed``, which may be overwritten: one all-reduce a dimension."""
        packed = packed.contiguous()
        for group in self._groups:
            dist.all_reduce(packed, group=group)
        return packed

    def with_all_rows(self, function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
        """Return our rows of ``function``, which does not mind their order, of all rows.

        All rows of all matrices are held by every process meanwhile: for starts, not for steps.
        """
        counts = torch.zeros(self._count, dtype=torch.float64, device=point.device)
        counts[self._place] = point.size(-2)
        ends = [round(end) for end in self(counts).cumsum(0).tolist()]
        rows = slice(ends[self._place] - point.size(-2), ends[self._place])
        whole = point.new_zeros(*point.shape[:-2], ends[-1], point.size(-1))
        whole[..., rows, :] = point
        return function(self(whole))[..., rows, :]
