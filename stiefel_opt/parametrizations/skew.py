r"""Exponential and Cayley transform of skew matrices, acting on a base point.

A free matrix P of the shape of the base point X0 gives the skew-Hermitian

    A = P X0' - X0 P' = B C',   B = [P, X0],   C = [X0, -P],

of rank 2m. Without base X0 = [I; 0], so that A = P - P' for square P. A tall result never forms an
n x n matrix: exp(A) X0 = X0 + B phi(C'B) C'X0 with phi(z) = (e^z - 1)/z, and the Cayley transform
has (I - C'B/2)^{-1} in the place of phi (Sherman-Morrison-Woodbury).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from typing_extensions import Self, Unpack, override

from stiefel_opt.errors import check_count, check_integer, fail
from stiefel_opt.numerics import (
    exponential,
    finest_dtype,
    full_precision,
    newton_schulz,
    orientation,
    principal_logarithm,
    readable,
    solution,
    untraced,
    widened,
    working_dtype,
)
from stiefel_opt.parametrizations.base import BaseOptions, Free, Parametrization
from stiefel_opt.parametrizations.init import cayley_signs
from stiefel_opt.tags import Stiefel, nearest

# eps |P| from which rounding is removed from a point, and from which nothing else is left.
_ROUNDING: Final = 1e-5
_LOST: Final = 0.12


@full_precision
def exponential_map(free: Tensor, base: Tensor | None = None) -> Tensor:
    r"""Return :math:`\exp(P X_0' - X_0 P') X_0`, the exponential map of the canonical metric.

    Args:
        free: P, any matrices ``(..., n, m)`` with n >= m.
        base: X0, orthonormal, same shape. Default: the first m columns of I.

    Returns: Matrices with orthonormal columns, ``(..., n, m)``.
    Raises:
        ValueError: for wide matrices, a base of another shape, and, where looking is free, for P
            so long that its exponential is rounding: above 1e6 in float32.
    Note: The exponential of an n x n matrix, or of a 3m x 3m one and four products n x m by m x m
        where 2m < n.
    Reference: Lezcano-Casado & Martinez-Rubio (ICML 2019); Edelman, Arias & Smith (SIMAX 1998).
    """
    _check(free, base)
    n, m = free.shape[-2:]
    if 2 * m >= n:
        return _settled(_apply(exponential(_skew(free, base)), base, m), free)
    left, core, image = _factors(free, base)
    # The upper right block of exp([[Z, Y], [0, 0]]) is phi(Z) Y.
    padded = torch.cat([core, image], dim=-1)
    padded = torch.cat([padded, torch.zeros_like(padded[..., :m, :])], dim=-2)
    phi = exponential(padded)[..., : 2 * m, 2 * m :]
    return _settled(_base(free, base) + left @ phi, free)


@full_precision
def cayley_map(free: Tensor, base: Tensor | None = None) -> Tensor:
    r"""Return :math:`(I - A/2)^{-1} (I + A/2) X_0` for :math:`A = P X_0' - X_0 P'`.

    Args:
        free, base: as in :func:`exponential_map`.

    Returns: Matrices with orthonormal columns, ``(..., n, m)``.
    Raises:
        ValueError: as :func:`exponential_map`.
    Note: One LU solve of n x n, or of 2m x 2m and four products n x m by m x m where 2m < n.
    Reference: Helfrich, Willmott & Ye (ICML 2018); Likhosherstov et al. (AISTATS 2021), Lemma 1.
    """
    _check(free, base)
    n, m = free.shape[-2:]
    if 2 * m >= n:
        half = _skew(free, base) / 2
        eye = torch.eye(n, dtype=free.dtype, device=free.device)
        return _settled(solution(eye - half, _apply(eye + half, base, m)), free)
    left, core, image = _factors(free, base)
    eye = torch.eye(2 * m, dtype=free.dtype, device=free.device)
    return _settled(_base(free, base) + left @ solution(eye - core / 2, image), free)


def _settled(point: Tensor, free: Tensor) -> Tensor:
    """Remove from X'X = I what a long P makes of rounding, about eps |P|; raise where it is all.

    Where looking costs nothing: a CPU, not traced.
    """
    values = readable(free)
    if values is None or values.is_meta:
        return point
    eps, precise = torch.finfo(free.dtype).eps, finest_dtype(values)
    rounding = eps * float(torch.linalg.vector_norm(values, dim=(-2, -1), dtype=precise).amax())
    if _LOST < rounding < math.inf:
        remedy = "take a smaller learning rate, or set it anew"
        longest = _LOST / eps
        raise ValueError(
            fail("free parameter of the map", f"be shorter than {longest:.0e}", free, remedy)
        )
    return newton_schulz(point, 2) if rounding > _ROUNDING else point


def _skew(free: Tensor, base: Tensor | None) -> Tensor:
    """Return A, n x n."""
    if base is not None:
        product = free @ base.mH
    else:
        product = torch.nn.functional.pad(free, (0, free.size(-2) - free.size(-1)))
    return product - product.mH


def _apply(matrix: Tensor, base: Tensor | None, columns: int) -> Tensor:
    return matrix[..., :columns] if base is None else matrix @ base


def _base(free: Tensor, base: Tensor | None) -> Tensor:
    if base is not None:
        return base
    return torch.eye(*free.shape[-2:], dtype=free.dtype, device=free.device).expand(free.shape)


def _factors(free: Tensor, base: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return B, C'B and C'X0 for B = [P/s, X0], C = [s X0, -P]; s near |P| balances C'B."""
    point = _base(free, base)
    m = free.size(-1)
    inner = free[..., :m, :] if base is None else base.mH @ free
    square = free.mH @ free
    norm = square.detach().abs().sum(-1, keepdim=True).amax(-2, keepdim=True).sqrt()
    size = torch.where(norm > 0, norm, 1.0)
    eye = torch.eye(m, dtype=free.dtype, device=free.device).expand(square.shape)
    top = torch.cat([inner, size * eye], dim=-1)
    bottom = torch.cat([-square / size, -inner.mH], dim=-1)
    left = torch.cat([free / size, point], dim=-1)
    image = torch.cat([size * eye, -inner.mH], dim=-2)
    return left, torch.cat([top, bottom], dim=-2), image


def _check(free: Tensor, base: Tensor | None) -> None:
    shape = tuple(free.shape)
    if free.ndim < 2 or 0 in shape[-2:] or shape[-1] > shape[-2]:
        raise ValueError(fail("free", "be tall or square matrices (..., n, m)", f"shape {shape}"))
    if base is not None and base.shape != free.shape:
        raise ValueError(fail("base", f"have the shape {shape} of free", tuple(base.shape)))


# ---- the module -----------------------------------------------------------------------------


class _Based(Parametrization):
    """A map that keeps a base point as a buffer."""

    base: Tensor | None
    buffer_names = ("base",)
    curve = staticmethod(exponential_map)

    @override
    def point(self, *free: Tensor) -> Tensor:
        (tangent,) = free
        return self._unrounded(tangent).to(tangent.dtype)

    def _unrounded(self, tangent: Tensor) -> Tensor:
        """Return the point in the dtype of the base: float32 for half-precision weights."""
        tangent = tangent if self.base is None else tangent.to(self.base.dtype)
        return self.curve(tangent, self.base)

    @override
    def free(self, point: Tensor) -> Free:
        """Make ``point`` the base."""
        self._set_buffer("base", point.clone(memory_format=torch.contiguous_format))
        return torch.zeros_like(point)

    @override
    def component(self) -> Tensor | None:
        base = self.base
        is_square = base is not None and base.size(-2) == base.size(-1) and not base.is_complex()
        return orientation(base) if is_square else None  # type: ignore[arg-type]

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Keep the base orthonormal, and in float32 at least, where its dtype changes."""
        before = self.base
        super()._apply(fn, recurse)
        if before is not None and self.base is not None and self.base.dtype != before.dtype:
            self.base = _nearest(before.to(self.base.device, working_dtype(self.base.dtype)))
        return self

    @override
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if self.base is None or (settled := _nearest(widened(self.base))) is self.base:
            return
        if local_metadata.get("assign_to_params_buffers", False):  # another's storage
            self.base = settled
        else:
            self.base.copy_(settled)


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
        square = point.size(-2) == point.size(-1)
        return principal_logarithm(point)[0] / 2 if square else super().free(point)

    @override
    def determinant(self, n: int) -> int:
        return 1


class Trivialization(_Based):
    r"""Exponential about a base point that follows: :math:`\exp(P X_0' - X_0 P') X_0` (DTRIV).

    Free: P, of the shape of the matrices, initially zero. Every matrix is reached. In training, the
    first forward after ``every`` steps of an optimizer that holds P moves X0 to the point and P to
    zero; one Newton-Schulz step keeps X0 orthonormal.

    Args:
        every: Steps between moves; None: never, X0 stays the initial value. Default: 100.
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for ``every`` below 1.
    Note: as :class:`MatrixExp`. X0 and the count of steps are in the state_dict, so that training
        resumes exactly. A compiled forward does not move X0, nor is a change of P counted that is
        no step of an optimizer: call :meth:`rebase` in the loop. Take ``every=None`` where P is
        kept outside this module: averages, L-BFGS, SAM, lookahead.
    Reference: Lezcano-Casado, Trivializations for gradient-based optimization on manifolds
        (NeurIPS 2019).
    """

    def __init__(self, every: int | None = 100, **base: Unpack[BaseOptions]) -> None:
        super().__init__(**base)
        check_count("every", every, or_none=True)
        self.every = every
        self.steps = 0  # of optimizers, since X0 has moved

    @override
    def point(self, *free: Tensor) -> Tensor:
        (tangent,) = free
        if self.every is not None and self.training and torch.is_grad_enabled():
            self._follow(tangent, self.every)
        return super().point(tangent)

    @override
    def free(self, point: Tensor) -> Free:
        self.steps = 0
        return super().free(point)

    @torch.no_grad()
    def rebase(self, tangent: Tensor) -> None:
        """Move X0 to the point of the free tensor ``tangent`` and set that to zero, in place."""
        self._set_buffer("base", newton_schulz(self._unrounded(tangent)))
        tangent.zero_()

    @untraced
    def _follow(self, tangent: Tensor, every: int) -> None:
        """Move X0 when it is time, and have the next steps counted.

        Behind a step no graph of an earlier forward can still be used: writing to P is safe.
        """
        if self.steps >= every and tangent.is_leaf:
            self.rebase(tangent)
            self.steps = 0
        if isinstance(tangent, nn.Parameter):
            _watch_optimizers()
            _watchers[id(tangent)] = self

    @override
    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.steps, device="cpu")

    @override
    def set_extra_state(self, state: Tensor) -> None:
        self.steps = int(state)


# By the identity of P: the maps that count its steps.
_watchers: WeakValueDictionary[int, Trivialization] = WeakValueDictionary()


@functools.cache
def _watch_optimizers() -> None:
    """Register :func:`_tell_watchers`, once."""
    register_optimizer_step_post_hook(_tell_watchers)


@untraced
def _tell_watchers(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    """Hook behind every step of every optimizer: count it where it has moved P."""
    if _watchers:
        params = (parameter for group in optimizer.param_groups for parameter in group["params"])
        moved = {id(parameter) for parameter in params if parameter.grad is not None}
        for key, watcher in list(_watchers.items()):
            if key in moved:
                watcher.steps += 1


class ScaledCayley(Parametrization):
    r"""Cayley transform with signs, :math:`(I + A/2)^{-1} (I - A/2) D`, A = P - P' (SCORNN).

    Free: P, of the shape of the matrices; for tall ones A = P E' - E P' with E the leading columns
    of I. Every matrix is reached: the signs D, a buffer, are chosen on registration and assignment.

    Args:
        negative: How many of the signs are -1, the last ones, for good: 0 is D = I. Then a matrix
            is reached if X D has no eigenvalue -1, so a square one if its determinant is (-1) to
            that power; registration negates the last row otherwise. Default: None, all are chosen.
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for a negative ``negative``, or one above the number of columns.
    Note: one LU solve, N x N, or 2m x 2m for tall matrices.
    Reference: Helfrich, Willmott & Ye (ICML 2018).
    """

    signs: Tensor | None
    buffer_names = ("signs",)

    def __init__(self, negative: int | None = None, **base: Unpack[BaseOptions]) -> None:
        super().__init__(**base)
        self.negative = None if negative is None else check_integer("negative", negative, 0)

    @override
    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        if self.negative is not None and self.negative > m:
            raise ValueError(fail("negative", f"be at most {m}, the columns", self.negative))

    @override
    def reach(self) -> str:
        return "orthonormal" if self.negative is None else "D times one without eigenvalue -1"

    @override
    def determinant(self, n: int) -> int | None:
        return None if self.negative is None else (-1) ** self.negative

    @override
    def component(self) -> Tensor | None:
        return None if self.signs is None else self.signs.prod(-1)

    @override
    def point(self, *free: Tensor) -> Tensor:
        (tangent,) = free
        point = cayley_map(-tangent)
        return point if self.signs is None else point * self.signs.unsqueeze(-2).to(point.dtype)

    @override
    def free(self, point: Tensor) -> Free:
        m = point.size(-1)
        if self.negative is None:
            signs = cayley_signs(point[..., :m, :])
        else:
            signs = torch.ones_like(point[..., 0, :].real)
            signs[..., m - self.negative :] = -1
        signed = point * signs.unsqueeze(-2)
        eye = torch.eye(m, dtype=point.dtype, device=point.device)
        top, below = signed[..., :m, :], signed[..., m:, :]
        # X - E = B/2 (X + E) for X = cayley(B) E, B = -A, with B = [[B11, -B21'], [B21, 0]]
        lower: Tensor = 2 * torch.linalg.solve_ex(top + eye, below, left=False).result
        right = top - eye + lower.mH @ below / 2
        upper: Tensor = 2 * torch.linalg.solve_ex(top + eye, right, left=False).result
        self._set_buffer("signs", signs)
        return torch.cat([-(upper - upper.mH) / 4, -lower], dim=-2)


@torch.no_grad()
def _nearest(base: Tensor) -> Tensor:
    """Return the nearest orthonormal matrices, ``base`` itself if it is orthonormal to rounding."""
    if base.is_meta or not bool(torch.isfinite(base).all()):
        return base
    point = nearest(base, Stiefel(), "base")
    return base if point is None else point
