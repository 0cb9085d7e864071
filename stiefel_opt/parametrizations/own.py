r"""Orthogonal weight normalization: the polar factor of centred columns.

Reference: Huang et al., Orthogonal Weight Normalization (AAAI 2018).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from stiefel_opt.errors import fail
from stiefel_opt.numerics import (
    finest_dtype,
    full_precision,
    no_autocast,
    polar_factor,
    readable,
    solve_lyapunov,
)
from stiefel_opt.parametrizations.base import Free, Parametrization

# A singular value of the centred columns below this share of the largest, or of V, is rounding.
_LEAST: Final = 1e-6
_CENTRED: Final = 1e-9


@full_precision
def own_map(free: Tensor) -> Tensor:
    r"""Return :math:`V (V'V)^{-1/2}` for the columns of ``free`` less their means.

    Args:
        free: Matrices ``(..., n, m)`` with m <= n - 1 whose centred columns are independent.

    Returns: Matrices with orthonormal columns that sum to zero, ``(..., n, m)``.
    Raises:
        ValueError: for m >= n: centred columns span at most n - 1 dimensions; on a CPU, for
            centred columns that are dependent.
    Note: 4 n m^2 flops and an eigendecomposition of m x m, in float64 where the device has it, and
        which waits for the device. Equal eigenvalues do no harm to derivatives of any order.
    Reference: Huang et al. (AAAI 2018), eq. (5).
    """
    if free.ndim < 2 or not 1 <= free.size(-1) < free.size(-2):
        condition = "have more rows than columns: OWN centres the columns"
        remedy = "use another map for square matrices"
        raise ValueError(fail("free", condition, free, remedy))
    precise = free.to(finest_dtype(free))  # C has the square of the condition of V
    centred = precise - precise.mean(dim=-2, keepdim=True)
    root, roots, _ = _InverseRoot.apply(centred.mH @ centred)  # type: ignore[no-untyped-call]
    _check_rank(roots, precise)
    point: Tensor = centred @ root
    return point.to(free.dtype)


def _check_rank(roots: Tensor, free: Tensor) -> None:
    """Raise where the centred columns are dependent, if looking costs nothing: on a CPU."""
    values, free_values = readable(roots), readable(free)
    if values is None or free_values is None or values.is_meta:
        return
    size = torch.linalg.vector_norm(free_values, dim=(-2, -1))
    least = torch.maximum(_LEAST * values[..., -1], _CENTRED * size)
    if not bool((values[..., 0] > least).all()) and bool(free_values.isfinite().all()):
        wanted = "have independent columns that are not constant"
        remedy = "set it anew, or take another map: map='tcwy'"
        raise ValueError(fail("free parameter of the map 'own'", wanted, "dependent ones", remedy))


class _InverseRoot(torch.autograd.Function):
    r"""R = C^{-1/2} of positive definite C by eigenvalues, gradient without their differences.

    It solves :math:`R \, dR + dR \, R = -R^2 \, dC \, R^2`; autograd through eigh would divide by
    differences of eigenvalues.
    """

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, basis = torch.linalg.eigh(matrix)
        roots = values.sqrt()
        return (basis / roots.unsqueeze(-2)) @ basis.mH, roots, basis

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        root, roots, basis = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None
        with no_autocast(root):
            inner = solve_lyapunov(root, grad, (1 / roots, basis))
            result: Tensor = -(root @ (root @ inner @ root) @ root)
            return (result + result.mH) / 2


# ---- the module -----------------------------------------------------------------------------


class OWN(Parametrization):
    r"""Polar factor of centred columns, :math:`V (V'V)^{-1/2}`: columns that sum to zero.

    Free: V, of the shape of the matrices. Reached are the matrices whose columns sum to zero;
    registration centres the columns and takes the polar factor.

    Args:
        manifold, generator: as in :class:`Parametrization`.
    Raises:
        ValueError: for a square weight: centred columns are dependent.
    Note: 4 n m^2 flops and an eigendecomposition of m x m.
    Reference: Huang et al. (AAAI 2018).
    """

    @override
    def reach(self) -> str:
        return "orthonormal with columns (wide: rows) that sum to zero"

    @override
    def check(self, n: int, m: int, dtype: torch.dtype) -> None:
        if n == m:
            condition = "not be square: OWN centres the columns, which makes them dependent"
            raise ValueError(fail("weight", condition, f"{n} x {m}", "use 'tcwy'"))

    @override
    def point(self, *free: Tensor) -> Tensor:
        return own_map(*free)

    @override
    def free(self, point: Tensor) -> Free:
        return point

    @override
    def start(self, point: Tensor) -> Free:
        # In a basis that a reflection takes (1, ..., 1) out of: columns of zero may be completed.
        n = point.size(-2)
        mirror = point.new_full((n, 1), n**-0.5)
        mirror[0] += 1
        mirror = mirror / torch.linalg.vector_norm(mirror)

        def reflected(matrices: Tensor) -> Tensor:
            image: Tensor = matrices - 2 * mirror @ (mirror.mH @ matrices)
            return image

        with no_autocast(point):
            centred = polar_factor(reflected(point)[..., 1:, :])
            return reflected(nn.functional.pad(centred, (0, 0, 1, 0)))
