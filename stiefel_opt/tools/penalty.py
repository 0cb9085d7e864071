"""The soft constraint: a term of the loss instead of an optimizer that keeps X orthonormal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stiefel_opt.errors import check_range, none_found
from stiefel_opt.numerics import add_to_diagonal_, no_autocast, widened
from stiefel_opt.tools.report import constrained


def orthonormality_penalty(model: nn.Module, weight: float = 1e-6) -> Tensor:
    r"""Return :math:`\lambda \sum |X^\top X - I|_F^2` over the constrained matrices of a model.

    A term to be added to the loss, with gradient :math:`4 \lambda X (X^\top X - I)`; use it with an
    optimizer of torch, or with ``stiefel=False``.

    Args:
        model: A model with constrained parameters.
        weight: lambda >= 0. Default: 1e-6.

    Returns: The penalty, a 0-dim tensor that is differentiable.
    Raises:
        ValueError: for a negative weight, or if nothing in the model is constrained.
        TypeError: if ``model`` is not a module.
    Note: One product of m x n by n x m for each matrix, and two of that cost backwards.
    """
    check_range("weight", weight, 0.0)
    terms: list[Tensor] = []
    for _, parameter, reading, _ in constrained(model, computed=False):
        if torch.is_grad_enabled() and parameter.requires_grad:  # else it is a number for a log
            parameter.is_unconstrained = True  # type: ignore[attr-defined]  # to leave it is meant
        terms += map(_square_gram_error, reading.points(parameter))
    if not terms:
        remedy = "call so.constrain first"
        raise ValueError(none_found("model", "a constrained parameter", model, remedy))
    return weight * torch.stack([term.to(terms[0].device) for term in terms]).sum()


def _square_gram_error(point: Tensor) -> Tensor:
    """Return the sum of |X'X - I|_F^2, in float32 for half precision; of any order of derivative.

    Not by absolute values, whose derivative torch sets to 0 at 0.
    """
    point = widened(point)
    with no_autocast(point):
        difference = add_to_diagonal_(point.mH @ point, -1.0)
        return (difference.conj() * difference).real.sum()
