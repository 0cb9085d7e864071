r"""Orthogonal weight normalization: the polar factor of centred columns.

Reference: Huang et al., Orthogonal Weight Normalization (AAAI 2018).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt._checks import fail
from stiefel_opt.functional.precision import full_precision, no_autocast

__all__ = ["own"]


@full_precision
def own(free: Tensor) -> Tensor:
    r"""Return :math:`V (V'V)^{-1/2}` for the columns of ``free`` less their means.

    Every column of the result sums to zero.

    Args:
        free: Matrices ``(..., n, m)`` with m <= n - 1 whose centred columns are independent.

    Returns: Matrices with orthonormal columns, ``(..., n, m)``.
    Raises:
        ValueError: for m >= n: centred columns span at most n - 1 dimensions.
    Note: 4 n m^2 flops and an eigendecomposition of m x m, which waits for the device. Equal
        eigenvalues do no harm to the gradient.
    Reference: Huang et al. (AAAI 2018), eq. (5).
    """
    if free.ndim < 2 or not 1 <= free.size(-1) < free.size(-2):
        raise ValueError(
            fail(
                "free",
                "have more rows than columns: OWN centres the columns",
                f"shape {tuple(free.shape)}",
                "use another map for square matrices",
            )
        )
    centred = free - free.mean(dim=-2, keepdim=True)
    return centred @ _inverse_root(centred.mH @ centred)


def _inverse_root(matrix: Tensor) -> Tensor:
    result: Tensor = _InverseRoot.apply(matrix)[0]  # type: ignore[no-untyped-call]
    return result


class _InverseRoot(torch.autograd.Function):
    r"""C^{-1/2} of positive definite C by eigenvalues, gradient without their differences.

    In the eigenbasis :math:`d(C^{-1/2})_{ij} = -dC_{ij} / (s_i s_j (s_i + s_j))`, s = sqrt(lambda);
    autograd through eigh would divide by lambda_i - lambda_j.
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
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        matrix, roots, basis = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None
        with no_autocast(matrix):
            if torch.is_grad_enabled():
                values, basis = torch.linalg.eigh(matrix)
                roots = values.sqrt()
            row, column = roots.unsqueeze(-2), roots.unsqueeze(-1)
            inner = (basis.mH @ grad @ basis) / (row * column * (row + column))
            # Symmetric here, so that eigh, which reads one triangle, may be differentiated again.
            result: Tensor = -(basis @ inner @ basis.mH)
            return (result + result.mH) / 2
