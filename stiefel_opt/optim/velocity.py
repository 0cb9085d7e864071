"""What the optimizers share: a momentum that is a velocity, which the user may read and set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from stiefel_opt._checks import fail
from stiefel_opt.functional.flows import RowSum
from stiefel_opt.linalg import gram
from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.batch import Batch
from stiefel_opt.optim.master import point_of
from stiefel_opt.optim.readings import reading

__all__ = ["VelocityOptimizer", "exceeds_rounding", "measure_overlap"]


class VelocityOptimizer(StiefelOptimizer):
    """Base of the optimizers whose momentum is a velocity X Z + U at the point."""

    @override
    def _is_stale(self, point: Tensor, batch: Batch) -> bool:
        normal = batch.state.get("momentum_normal")
        if normal is None:
            return False
        return exceeds_rounding(*measure_overlap(point, normal, batch.row_sum))

    def velocity(self, parameter: Tensor) -> tuple[Any, Any]:
        """Return the momentum (Z, U) of a constrained parameter, in the notation of its rule.

        Z, skew, has shape ``(..., m, m)``; U, normal to the point, ``(..., n, m)``, with the batch
        and head dimensions of the reading in front. U is zero for square matrices. For a reading
        with several ranges of rows each of the two is a tuple, one tensor for each range. Before
        the first step both are zero. A sharded parameter is gathered: every process must call.
        """
        skews, normals = [], []
        for suffix, point, state, window in self._ranges(parameter):
            skew = state.get("momentum_skew" + suffix)
            m = point.size(-1)
            skews.append(point.new_zeros(*point.shape[:-2], m, m) if skew is None else skew.clone())
            normals.append(self._normal_momentum(point, window, state, suffix))
        if len(skews) == 1:
            return skews[0], normals[0]
        return tuple(skews), tuple(normals)

    @torch.no_grad()
    def set_velocity(self, parameter: Tensor, skew: Any, normal: Any) -> None:
        """Set the momentum (Z, U) of a constrained parameter; shapes as :meth:`velocity` gives.

        Of Z the skew part is taken, of U the part that is normal to the point.

        Raises:
            TypeError: for sharded parameters, whose momentum can only be read, and for what is no
                tensor.
            ValueError: for tensors of another shape, and values that are not finite. Nothing has
                changed then.
        """
        if isinstance(parameter, DTensor):
            raise TypeError(fail("parameter", "not be sharded to set its velocity", "a DTensor"))
        values = [(skew, normal)]
        if isinstance(skew, tuple) and isinstance(normal, tuple):
            values = list(zip(skew, normal, strict=False))
        ranges = self._ranges(parameter, make=True)
        if len(values) != len(ranges):
            wanted = f"be tuples of {len(ranges)} tensors each"
            raise ValueError(fail("skew and normal", wanted, f"{len(values)}"))
        for (_, point, _, window), (new_skew, new_normal) in zip(ranges, values, strict=True):
            small = torch.Size((*point.shape[:-2], point.size(-1), point.size(-1)))
            _check_velocity("skew", new_skew, small)
            if window is not None:  # square matrices have no normal part
                _check_velocity("normal", new_normal, point.shape)
        for (suffix, point, state, window), (new_skew, new_normal) in zip(
            ranges, values, strict=True
        ):
            state["momentum_skew" + suffix].copy_((new_skew - new_skew.mH) / 2)
            if window is None:
                continue
            window.copy_(new_normal - point @ (point.mH @ new_normal))
            if "deferred_shift" + suffix in state:
                state["deferred_shift" + suffix].zero_()
                state["deferred_factor" + suffix].zero_().diagonal(dim1=-2, dim2=-1).fill_(1.0)

    @torch.no_grad()
    def _ranges(
        self, parameter: Tensor, make: bool = False
    ) -> list[tuple[str, Tensor, dict[str, Tensor], Tensor | None]]:
        """Return, for each range, its suffix, the point, all state, and the window on the tall."""
        for group in self.param_groups:
            manifold = reading(parameter, group)
            if manifold is not None and any(parameter is other for other in group["params"]):
                break
        else:
            raise ValueError(
                fail("parameter", "be constrained in this optimizer", "one that is not")
            )
        state = self.state.get(parameter, {})
        if make:
            state = self._init_state(parameter, manifold, group)
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole, state = _gathered(whole), {name: _gathered(t) for name, t in state.items()}
        found = []
        for index, part in enumerate(manifold.parts(point_of(whole, state))):
            point = manifold.matrices(part, index) / manifold.scale
            window = None
            if "momentum_normal" in state and point.size(-2) > point.size(-1):
                tall_part = manifold.parts(state["momentum_normal"])[index]
                window = manifold.matrices(tall_part, index)
            found.append((f".{index}" if index else "", point, state, window))
        return found

    def _normal_momentum(
        self, point: Tensor, window: Tensor | None, state: dict[str, Tensor], suffix: str
    ) -> Tensor:
        """Return U of one range: what is kept, put together with what is deferred."""
        if window is None:
            return torch.zeros_like(point)
        if "deferred_factor" + suffix not in state:
            return window.clone()
        deferred = point @ state["deferred_shift" + suffix]
        return window @ state["deferred_factor" + suffix] - deferred


def _check_velocity(name: str, value: Any, shape: torch.Size) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(fail(name, f"be a tensor of shape {tuple(shape)}", type(value).__name__))
    if value.shape != shape:
        raise ValueError(fail(name, f"have shape {tuple(shape)}", f"shape {tuple(value.shape)}"))
    if not bool(value.isfinite().all()):
        raise ValueError(fail(name, "be finite", f"NaN or inf in shape {tuple(shape)}"))


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def measure_overlap(point: Tensor, normal: Tensor, row_sum: RowSum | None) -> tuple[Tensor, Tensor]:
    """Return X'U and the length of the longest column of U, from one sum over rows."""
    overlap = gram(point, normal)
    if row_sum is None:
        return overlap, torch.linalg.vector_norm(normal, dim=-2).amax()
    squares = normal.square().sum(dim=-2, keepdim=True)
    packed = row_sum(torch.cat([overlap, squares], dim=-2))
    return packed[:, :-1], packed[:, -1].amax().sqrt()


def exceeds_rounding(overlap: Tensor, size: Tensor) -> bool:
    """Say whether X'U is more than rounding can explain for U of this size."""
    return bool(overlap.abs().amax() > 1e3 * torch.finfo(overlap.dtype).eps * size)
