"""Gradients that are all but normal, or far too long, leave no point off the manifold."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import CLIENTS, OPTIMIZERS
from torch import Tensor, nn

import stiefel_opt as so

# A tall, a wide and a square one, and a single column.
SHAPES = [(48, 20), (6, 30), (12, 12), (90, 1)]
RATES = (0.03, 15.0)
ROUNDS = 8
Gradient = Callable[[Tensor, Tensor, int, torch.Generator], Tensor]


def _radial(X: Tensor, A: Tensor, step: int, _: Any) -> Tensor:
    return X + 10.0 ** -(1 + step % 8) * A


def _symmetric(X: Tensor, A: Tensor, step: int, generator: torch.Generator) -> Tensor:
    S = torch.randn(X.size(1), X.size(1), generator=generator)
    return 10.0 ** (step % 7) * X @ (S + S.mT) + A


def _spikes(X: Tensor, _: Tensor, step: int, generator: torch.Generator) -> Tensor:
    return torch.randn(X.shape, generator=generator) * (1e9 if step % 4 == 3 else 1e-6)


def _halved(X: Tensor, A: Tensor, step: int, _: Any) -> Tensor:
    return X if step < ROUNDS else A


def _one_column(X: Tensor, A: Tensor, step: int, _: Any) -> Tensor:
    return 1e3 * X + A * (torch.arange(X.size(1)) == step % X.size(1))


KINDS = (_radial, _symmetric, _spikes, _halved, _one_column)
CASES = dict(OPTIMIZERS)
for client in CLIENTS:
    CASES |= client.STEEP


def _largest_error(make: Any, options: dict[str, Any], gradient: Gradient, lr: float) -> float:
    generator = torch.Generator().manual_seed(5)
    holder = nn.ParameterList()
    for shape in SHAPES:
        holder.append(so.ManifoldParameter(torch.randn(shape, generator=generator)))
    noise = [torch.randn(max(s), min(s), generator=generator) for s in SHAPES]
    optimizer = make(holder.parameters(), **{**options, "lr": lr})
    worst = 0.0
    for step in range(2 * ROUNDS):
        for weight, A in zip(holder, noise, strict=True):
            is_wide = weight.size(0) < weight.size(1)
            X = weight.detach().mT if is_wide else weight.detach()
            grad = gradient(X, A / A.norm(), step, generator)
            weight.grad = (grad.mT if is_wide else grad).contiguous()
        optimizer.step()
        worst = max(worst, *(float(so.orthonormality_error(weight)) for weight in holder))
    return worst


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("machine", ["cpu", "as_accelerator"], indirect=True)
@pytest.mark.parametrize("gradient", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_every_point_is_orthonormal(name: str, gradient: Gradient) -> None:
    """Also where the length of a step is known too late, and for rules that choose it."""
    rule, options = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of long steps
        assert max(_largest_error(rule, options, gradient, lr) for lr in RATES) < 1e-4
