"""The memory of L-BFGS: pairs of all starts of a batch, and their inner products."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.methods.minimize.product import Product

_PAIRS: Final = 30  # that are kept
_ROOM: Final = 2 * _PAIRS  # so that the last ones are moved to the front now and then only


class Pairs:
    """Pairs (s, y) of each start, and the products s'y, which a change of frames keeps."""

    def __init__(self, gradient: Tensor) -> None:
        count, size = gradient.shape
        self._steps = gradient.new_zeros(count, _ROOM, size)  # the oldest first
        self._changes = gradient.new_zeros(count, _ROOM, size)
        self._mixed = gradient.new_zeros(count, _ROOM, _ROOM)  # s'y: the upper triangle is used
        self._scale = gradient.new_ones(count, 1, 1)  # s'y / y'y of the last pair
        self._seen = gradient.new_zeros(count, 0, 1)  # s'g of the last gradient
        self._used = slice(0, 0)
        self._look()

    def learn(self, step: Tensor, change: Tensor, gradient: Tensor, is_kept: list[bool]) -> None:
        """Add a pair of each start; where its curvature is not positive, one of zeros.

        The ``gradient`` is that of the next :meth:`direction`: its products with all steps are
        formed together with those of the new pair.
        """
        kept = None if all(is_kept) else torch.tensor(is_kept, device=step.device)
        if kept is not None:
            step, change = (torch.where(kept[:, None], each, 0.0) for each in (step, change))
        used = self._used = self._next()
        last = used.stop - 1
        self._steps[:, last], self._changes[:, last] = step, change
        self._look()
        products = torch.bmm(self._views[0], torch.stack([change, gradient], dim=2))
        self._mixed[:, used, last], self._seen = products[..., 0], products[..., 1:]
        square = torch.linalg.vector_norm(change, dim=1).square()
        self._scale = (products[:, -1, 0] / square).view(-1, 1, 1)
        if kept is not None:
            self._mixed[~kept, last, last] = 1.0
            self._scale[~kept] = 1.0

    def direction(self, gradient: Tensor) -> Tensor:
        """Return -H g of the gradient of :meth:`learn`, where H starts from (s'y / y'y) I."""
        if not self._used.stop:
            return -gradient
        steps, changes, upper = self._views
        inner = torch.linalg.solve_triangular(upper, self._seen, upper=True)
        bent = torch.baddbmm(gradient.unsqueeze(1), inner.mT, changes, alpha=-1) * self._scale
        outer = upper.diagonal(dim1=1, dim2=2).unsqueeze(2) * inner
        outer = torch.baddbmm(outer, changes, bent.mT, alpha=-1)
        outer = torch.linalg.solve_triangular(upper.mT, outer, upper=False)
        return bent.baddbmm_(outer.mT, steps).neg_().squeeze(1)

    def forget(self, starts: Tensor) -> None:
        """Drop the pairs of these starts."""
        self._steps[starts], self._changes[starts], self._seen[starts] = 0.0, 0.0, 0.0
        self._mixed[starts] = torch.eye(_ROOM, dtype=self._mixed.dtype, device=starts.device)
        self._scale[starts] = 1.0

    def renew(self, product: Product, gradient: Tensor) -> Tensor:
        """Make the point the reference; return a gradient in the new coordinates."""
        old, count = product.frames, self._used.stop - self._used.start
        product.refer_here()
        steps, changes, _ = self._views
        rows = torch.cat([gradient.unsqueeze(1), steps, changes], dim=1)
        vectors = product.mapped(lbfgs.from_coordinates, rows, old)
        moved = product.mapped(lbfgs.coordinates, vectors)
        steps.copy_(moved[:, 1 : count + 1])
        changes.copy_(moved[:, count + 1 :])
        return moved[:, 0]

    def _look(self) -> None:
        """Take views of what is used: steps, changes, and their products."""
        used = self._used
        self._views = self._steps[:, used], self._changes[:, used], self._mixed[:, used, used]

    def _next(self) -> slice:
        """Return the places of pairs with the next one, after making room for it."""
        last = self._used.stop
        if last == _ROOM:
            kept, front = slice(_PAIRS + 1, last), slice(0, _PAIRS - 1)
            for each in (self._steps, self._changes):
                each[:, front] = each[:, kept].clone()
            self._mixed[:, front, front] = self._mixed[:, kept, kept].clone()
            last = _PAIRS - 1
        return slice(max(0, last + 1 - _PAIRS), last + 1)
