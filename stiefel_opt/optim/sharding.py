"""How parameters are divided among processes (DTensor), and what the processes send in a step.

A step works on local shards. What is sent depends on the sharded dimension:

- batch dimensions, and heads that no border cuts: each process has whole matrices, nothing is sent;
- the long one, rows of tall matrices and columns of wide ones: sums of m x m over the processes;
- the short one, or heads and ranges of rows cut by borders: point and gradient are redistributed
  to the first of these two that the reading allows, by one all-to-all each, and the new point comes
  back by another: 3 n m / processes numbers sent by each, where a gather would receive n m. State
  stays in the working layout and is never sent. Gloo has no all-to-all, and DTensor gathers there.
  Where the reading allows neither (tall heads, mixed ranges) every process gets everything and
  takes the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stiefel_opt.numerics.distributed import RowSums, is_sharded, replicated
from stiefel_opt.tags.manifold import Stiefel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_WHOLE, _ROWS = "whole matrices", "rows of matrices"


@dataclass(frozen=True, eq=False)
class Shards:
    """The layout of one kind of sharded parameter."""

    mesh: DeviceMesh
    stored: tuple[Placement, ...]  # of the parameters
    working: tuple[Placement, ...]  # that a step works in, those of tall state
    small: tuple[Placement, ...] | None  # of m x m state; None: every process has all of it
    manifold: Stiefel  # by which a local shard is read
    wide: tuple[bool, ...]  # whether the matrices of each range of rows are
    row_sum: RowSums | None  # over the processes that share rows; None: matrices are whole
    shared: tuple[int, ...]  # dimensions of the mesh along which anything is cut

    def local(self, tensor: Any) -> Tensor:
        """Return our shard of a parameter or gradient, in the working layout."""
        if tuple(tensor.placements) != self.working:
            tensor = tensor.redistribute(self.mesh, self.working)
        shard: Tensor = tensor.to_local()
        return shard

    def write(self, parameter: Any, shard: Tensor) -> None:
        """Put a shard in the working layout, of any dtype, into a parameter.

        One of its own dtype and layout is there already: the step works on the parameter itself.
        """
        own: Tensor = parameter.to_local()
        if self.working != self.stored:
            whole = self.as_dtensor(shard.to(own.dtype), parameter, self.working)
            own.copy_(whole.redistribute(self.mesh, self.stored).to_local())
        elif shard.dtype != own.dtype:
            own.copy_(shard)

    def like(self, shard: Tensor, tensor: Tensor) -> Tensor:
        """Return ``shard`` as part of a DTensor if ``tensor`` is one, else as it is."""
        if not is_sharded(tensor):
            return shard
        return self.as_dtensor(shard, tensor, tensor.placements)

    def as_dtensor(self, shard: Tensor, like: Tensor, placements: Sequence[Placement]) -> DTensor:
        """Return ``shard`` as part of a DTensor of the shape of ``like``."""
        from torch.distributed.tensor import DTensor

        shape, stride = like.shape, like.stride()
        return DTensor.from_local(
            shard, self.mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def placed(self, tensor: Tensor, placements: Sequence[Placement]) -> Tensor:
        """Return a state tensor in this layout; a plain tensor is the same on every process."""
        shared = tensor if is_sharded(tensor) else replicated(tensor, self.mesh)
        return shared.redistribute(self.mesh, placements)

    def zeros(
        self, shape: torch.Size, dtype: torch.dtype, placements: Sequence[Placement]
    ) -> Tensor:
        """Return zeros in this layout."""
        from torch.distributed.tensor import zeros

        return zeros(shape, dtype=dtype, device_mesh=self.mesh, placements=placements)

    def agree(self, ok: Tensor) -> Tensor:
        """Return where ``ok`` holds on every process that has a part of the parameters."""
        return self.largest((~ok).to(torch.float32)) == 0

    def largest(self, values: Tensor) -> Tensor:
        """Return the largest of each of ``values`` over those processes."""
        import torch.distributed as dist

        for dim in self.shared:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.mesh.get_group(dim))
        return values


def shards_of(parameter: Tensor, manifold: Stiefel) -> Shards | None:
    """Return the layout of a parameter over processes; None for one that is not a DTensor."""
    if not is_sharded(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard

    mesh, stored, shape = parameter.device_mesh, tuple(parameter.placements), parameter.shape
    working = _working_placements(stored, manifold, shape, mesh)
    kinds = [_kind(p, manifold, shape, mesh.size(i)) for i, p in enumerate(working)]
    by_rows = [index for index, kind in enumerate(kinds) if kind == _ROWS]
    small: list[Placement] = []
    local_manifold = manifold
    dims = manifold.dims(len(shape))
    for index, (placement, kind) in enumerate(zip(working, kinds, strict=True)):
        if not isinstance(placement, Shard) or kind == _ROWS:
            small.append(Replicate())
        elif placement.dim in dims.rows:  # whole heads
            small.append(Shard(len(dims.batch)))
            heads: int = manifold.heads  # type: ignore[assignment]
            size, place = mesh.size(index), mesh.get_local_rank(index)
            each = -(-heads // size)
            mine = max(1, min(each, heads - each * place))
            local_manifold = replace(manifold, heads=mine)
        else:
            place = dims.batch.index(placement.dim)
            small.append(placement if place == placement.dim else Shard(place))
    return Shards(
        mesh,
        stored,
        working,
        tuple(small) if any(isinstance(p, Shard) for p in small) else None,
        local_manifold,
        _wide(manifold, shape),
        RowSums(mesh, by_rows) if by_rows else None,
        tuple(i for i, placement in enumerate(stored) if not isinstance(placement, Replicate)),
    )


def _working_placements(
    stored: tuple[Placement, ...], manifold: Stiefel, shape: torch.Size, mesh: DeviceMesh
) -> tuple[Placement, ...]:
    """Return the placements nearest to ``stored`` in which a step can work."""
    from torch.distributed.tensor import Replicate, Shard

    replicated = (Replicate(),) * mesh.ndim
    sharded = [i for i, placement in enumerate(stored) if not isinstance(placement, Replicate)]
    dims = manifold.dims(len(shape))
    on_rows = [i for i in sharded if getattr(stored[i], "dim", None) in dims.rows]
    kinds = [_kind(stored[i], manifold, shape, mesh.size(i)) for i in sharded]
    # Heads that are shared out along two dimensions of a mesh lie in no simple order.
    if None not in kinds and (len(on_rows) < 2 or (manifold.heads or 1) == 1):
        return stored
    if len(sharded) != 1:
        return replicated
    (index,) = sharded
    size = mesh.size(index)
    even = [dim for dim in dims.batch if not shape[dim] % size]
    candidates = [Shard(dim) for dim in (*even, *dims.rows[:1], *dims.columns[:1])]
    for wanted in (_WHOLE, _ROWS):
        for candidate in candidates:
            if _kind(candidate, manifold, shape, size) == wanted:
                return (*replicated[:index], candidate, *replicated[index + 1 :])
    return replicated


def _kind(placement: Placement, manifold: Stiefel, shape: torch.Size, size: int) -> str | None:
    """Return what a placement over ``size`` processes gives to each: whole matrices, or some rows.

    None if a step cannot work on the part that a process would have.
    """
    from torch.distributed.tensor import Replicate, Shard

    if isinstance(placement, Replicate):
        return _WHOLE
    dim = getattr(placement, "dim", None)
    if dim is None:  # Partial
        return None
    dims = manifold.dims(len(shape))
    wide = _wide(manifold, shape)
    if dim in dims.columns:
        return _ROWS if all(wide) else None
    if dim in dims.batch:
        return _WHOLE if type(placement) is Shard or dims.batch.index(dim) == dim else None
    if manifold.rows is not None:
        return None
    heads: int = manifold.heads or 1  # type: ignore[assignment]
    if heads == 1:
        return None if wide[0] else _ROWS
    length = -(-shape[dim] // size)
    whole = type(placement) is Shard and length % (shape[dim] // heads) == 0
    return _WHOLE if whole else None


def _wide(manifold: Stiefel, shape: torch.Size) -> tuple[bool, ...]:
    """Say of each range of rows of a tensor of ``shape`` whether its matrices are wide."""
    parts = manifold.parts(torch.empty(shape, device="meta"))
    return tuple(manifold.is_wide(part.shape, index) for index, part in enumerate(parts))
