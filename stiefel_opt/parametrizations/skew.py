"""Maps of skew matrices: exponential, Cayley transform, trivialization about a moving base."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt._checks import fail
from stiefel_opt.functional.skew_maps import cayley_map, exponential_map
from stiefel_opt.manifold import Stiefel
from stiefel_opt.parametrizations.base import Free, Parametrization
from stiefel_opt.parametrizations.init import cayley_signs, logarithm

__all__ = ["MatrixExp", "ScaledCayley", "Trivialization"]


class _Based(Parametrization):
    """A map that keeps a base point as a buffer."""

    base: Tensor | None

    def __init__(
        self, *, manifold: Stiefel | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(manifold=manifold, generator=generator)
        self.register_buffer("base", None)

    @override
    def point(self, *free: Tensor) -> Tensor:
        (tangent,) = free
        if self.base is None:
            return exponential_map(tangent)
        # For half-precision weights the base is float32.
        return exponential_map(tangent.to(self.base.dtype), self.base).to(tangent.dtype)

    def move_base(self, point: Tensor) -> None:
        """Make ``point`` the base."""
        if self.base is None:
            self.base = point.clone(memory_format=torch.contiguous_format)
        else:
            self.base.copy_(point)


class MatrixExp(_Based):
    r"""Exponential of a skew matrix, :math:`\exp(P - P')` (EXPRNN).

    Free: P, of the shape of the matrices. A square matrix is reached if its determinant is 1
    (registration negates the last row otherwise), a unitary one always. A tall matrix is
    :math:`\exp(P X_0' - X_0 P') X_0` about the matrix X0 that was there on registration or
    assignment, since the exponential of a tall block has no inverse in closed form: always reached.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Note: one matrix exponential, N x N, or 3m x 3m for tall matrices; its backward has twice the
        size.
    Reference: Lezcano-Casado & Martinez-Rubio (ICML 2019).
    """

    @override
    def reach(self) -> str:
        return "orthonormal, with determinant 1 if square"

    @override
    def free(self, point: Tensor) -> Free:
        if point.size(-2) == point.size(-1):
            return logarithm(point) / 2
        self.move_base(point)
        return torch.zeros_like(point)

    @override
    def start(self, point: Tensor) -> Free:
        if point.size(-2) == point.size(-1) and not point.is_complex():
            wrong = torch.linalg.slogdet(point).sign < 0
            point = point.clone()
            point[..., -1, :] *= torch.where(wrong, -1.0, 1.0).unsqueeze(-1)
        return self.free(point)


class Trivialization(_Based):
    r"""Exponential about a base point that follows: :math:`\exp(P X_0' - X_0 P') X_0` (DTRIV).

    Free: P, of the shape of the matrices, zero at the start. Every matrix is reached. In training
    mode, each time P has changed ``every`` times between forwards, X0 moves to the current point
    and P to zero; one Newton-Schulz step keeps X0 orthonormal.

    Args:
        every: Changes of P between moves; None: never, X0 stays the start. Default: 100.
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for ``every`` below 1.
    Note: as :class:`MatrixExp`. The count of changes is not saved. A compiled forward does not
        move X0: call :meth:`rebase` in the training loop.
    Reference: Lezcano-Casado, Trivializations for gradient-based optimization on manifolds
        (NeurIPS 2019).
    """

    def __init__(
        self,
        every: int | None = 100,
        *,
        manifold: Stiefel | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(manifold=manifold, generator=generator)
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(fail("every", "be a positive integer or None", repr(every)))
        self.every = every
        self._changes = 0
        self._seen: int | None = None

    @override
    def point(self, *free: Tensor) -> Tensor:
        (tangent,) = free
        if self.every is not None and self.training and not torch.compiler.is_compiling():
            self._count(tangent)
        return super().point(tangent)

    @override
    def free(self, point: Tensor) -> Free:
        self.move_base(point)
        self._changes, self._seen = 0, None
        return torch.zeros_like(point)

    @torch.no_grad()
    def rebase(self, tangent: Tensor) -> None:
        """Move X0 to the point of the free tensor ``tangent`` and set that to zero, in place."""
        point = super().point(tangent)
        self.move_base(1.5 * point - 0.5 * point @ (point.mH @ point))
        tangent.zero_()

    def _count(self, tangent: Tensor) -> None:
        """Notice that P has changed since the last forward, and move X0 when it is time.

        Then no graph of an earlier forward can still be used, so that writing to P is safe.
        """
        version = tangent._version
        if self._seen is not None and version != self._seen and tangent.is_leaf:
            self._changes += 1
            if self.every is not None and self._changes >= self.every:
                self.rebase(tangent)
                self._changes, version = 0, tangent._version
        self._seen = version


class ScaledCayley(Parametrization):
    r"""Cayley transform with signs, :math:`(I + A/2)^{-1} (I - A/2) D`, A = P - P' (SCORNN).

    Free: P, of the shape of the matrices; for tall ones A = P E' - E P' with E the leading columns
    of I. The signs D are a buffer, chosen on registration and assignment such that A is small:
    every matrix is reached.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Note: one LU solve, N x N, or 2m x 2m for tall matrices.
    Reference: Helfrich, Willmott & Ye (ICML 2018).
    """

    signs: Tensor | None

    def __init__(
        self, *, manifold: Stiefel | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(manifold=manifold, generator=generator)
        self.register_buffer("signs", None)

    @override
    def point(self, *free: Tensor) -> Tensor:
        (tangent,) = free
        point = cayley_map(-tangent)
        return point if self.signs is None else point * self.signs.unsqueeze(-2).to(point.dtype)

    @override
    def free(self, point: Tensor) -> Free:
        m = point.size(-1)
        signs = cayley_signs(point[..., :m, :])
        signed = point * signs.unsqueeze(-2)
        eye = torch.eye(m, dtype=point.dtype, device=point.device)
        top, below = signed[..., :m, :], signed[..., m:, :]
        # X - E = B/2 (X + E) for X = cayley(B) E, B = -A, with B = [[B11, -B21'], [B21, 0]]
        lower: Tensor = 2 * torch.linalg.solve(top + eye, below, left=False)
        upper: Tensor = 2 * torch.linalg.solve(
            top + eye, top - eye + lower.mH @ below / 2, left=False
        )
        if self.signs is None:
            self.signs = signs
        else:
            self.signs.copy_(signs)
        return torch.cat([-(upper - upper.mH) / 4, -lower], dim=-2)
