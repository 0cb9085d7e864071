"""The steps that every training loop of the tests takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def closure_of(optimizer: Any, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What LBFGS asks for: fresh gradients, and the loss."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def train(optimizer: Any, loss: Callable[[], Tensor], steps: int = 1) -> list[float]:
    """The losses before so many steps."""
    losses = []
    for _ in range(steps):
        losses.append(float(closure_of(optimizer, loss)().detach()))
        optimizer.step()
    return losses
