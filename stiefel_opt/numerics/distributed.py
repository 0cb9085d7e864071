"""Tensors that several processes share (DTensor): what they hold, and sums over their rows.

Importing ``torch.distributed.tensor`` takes half as long as torch itself, and a torch built without
``distributed`` has none: this file asks for it only where a tensor shows that it is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from stiefel_opt.numerics.device import address_for

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: object) -> TypeIs[DTensor]:
    """Say whether ``tensor`` is a DTensor, sharded or replicated over the processes of a mesh."""
    # Only torch.distributed.tensor makes one: where nothing has imported it, a look into a dict.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a DTensor, sharing memory; any other tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_address_for(tensors: Sequence[Tensor]) -> Callable[[Tensor], int]:
    """Return a function that gives the address of a tensor, or of our part of a sharded one."""
    address = address_for(tensors)
    if not any(map(is_sharded, tensors)):
        return address
    return lambda tensor: address(local_part(tensor))


def gathered(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered (every process must call); any other tensor as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that is the same on every process as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


@final
class RowSums:
    """The ``row_sum`` of :mod:`stiefel_opt.functional` for rows shared along dimensions of a mesh.

    Every process gets the same bits, so that choices made from a sum are the same everywhere.
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
            torch.distributed.all_reduce(packed, group=group)
        return packed

    def with_all_rows(self, function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
        """Return our rows of ``function`` of all rows; it must not depend on their order.

        Every process holds all rows of all matrices meanwhile: for initial values, not for steps.
        """
        counts = torch.zeros(self._count, dtype=torch.float64, device=point.device)
        counts[self._place] = point.size(-2)
        ends = [round(end) for end in self(counts).cumsum(0).tolist()]
        rows = slice(ends[self._place] - point.size(-2), ends[self._place])
        all_rows = point.new_zeros(*point.shape[:-2], ends[-1], point.size(-1))
        all_rows[..., rows, :] = point
        return function(self(all_rows))[..., rows, :]
