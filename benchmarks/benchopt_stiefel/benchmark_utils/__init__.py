"""Problems, and the loop that every solver with a step shares."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so

RATES = (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # for everybody
FIRST = (0.03, 0.1, 0.3)  # the search among them begins here
MOMENTUM = 0.9
TARGET = 1e-6  # of the gap at the start


@dataclass
class Problem:
    """A loss of tall orthonormal matrices and of plain parameters, with their start.

    ``loss(constrained, plain, step)`` is that of batch ``step``; ``step`` None is all of the data.
    It is divided by the norm of its gradient at the start, so that one grid of rates suits all.
    ``minimum`` is None where it is not known.
    """

    loss: Callable[[Sequence[Tensor], Sequence[Tensor], int | None], Tensor]
    constrained: list[Tensor]
    plain: list[Tensor] = field(default_factory=list)
    steps: int = 200
    minimum: float | None = None
    scaled: bool = True

    def __post_init__(self) -> None:
        if self.scaled:
            points = [point.clone().requires_grad_() for point in self.constrained]
            gradients = torch.autograd.grad(self.loss(points, self.plain, None), points)
            largest = max(float(torch.linalg.matrix_norm(g, 2)) for g in gradients)
            scale, loss = 1 / largest, self.loss
            self.loss = lambda *arguments: scale * loss(*arguments)
            self.minimum = None if self.minimum is None else scale * self.minimum

    def solved(self, losses: Sequence[float]) -> bool:
        """Whether ten losses in a row are a thousand times nearer than the target."""
        if self.minimum is None or len(losses) < 10:
            return False
        gap = max(abs(loss - self.minimum) for loss in losses[-10:])
        return gap < 1e-3 * TARGET * (losses[0] - self.minimum)

    def evaluate(
        self, constrained: Sequence[Tensor], plain: Sequence[Tensor], losses: Sequence[float]
    ) -> dict[str, Any]:
        """Value, error, the step from which on the gap is below the target, and the last gap.

        A loss below the minimum, which only a point off the manifold has, is as far from it.
        """
        with torch.no_grad():
            value = float(self.loss(constrained, plain, None))
            first = float(self.loss(self.constrained, self.plain, None))
            error = max(float(so.orthonormality_error(point)) for point in constrained)
        value = value if math.isfinite(value) and error < 0.1 else math.inf
        found = {"value": value, "orthonormality_error": error, "reached": math.inf}
        if self.minimum is not None:
            start = first - self.minimum
            gaps = [abs(loss - self.minimum) / start for loss in [*losses, value]]
            away = [step for step, gap in enumerate(gaps) if not gap < TARGET]
            reached = away[-1] + 1 if away else 0
            found |= {"reached": reached if reached < len(gaps) else math.inf}
            found |= {"gap": gaps[-1] if math.isfinite(value) else math.inf}
        return found


def descend(
    problem: Problem,
    make: Callable[[list[Tensor], list[Tensor]], list[torch.optim.Optimizer]],
    tag: Callable[[Tensor], Tensor] = torch.nn.Parameter,
    wide: bool = False,
) -> dict[str, Any]:
    """Train with the optimizers that ``make`` returns; ``wide`` ones want batches of rows."""
    turned = [p.mT[None].clone() if wide else p.clone() for p in problem.constrained]
    parameters = [tag(point) for point in turned]
    plain = [torch.nn.Parameter(free.clone()) for free in problem.plain]
    optimizers, losses = make(parameters, plain), []
    points: Sequence[Tensor] = parameters
    for step in range(problem.steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        points = [parameter[0].mT if wide else parameter for parameter in parameters]
        loss = problem.loss(points, plain, step)
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]) or abs(losses[-1]) > 1e6 * (1 + abs(losses[0])):
            break
        if problem.solved(losses):
            break
        loss.backward()
        try:
            for optimizer in optimizers:
                optimizer.step()
        except (torch.linalg.LinAlgError, AssertionError):  # what overflowed cannot be solved for
            break
    final = [p.detach()[0].mT if wide else p.detach() for p in parameters]
    return {"constrained": final, "plain": [p.detach() for p in plain], "losses": losses}


def orthonormal(n: int, m: int, generator: torch.Generator, dtype=torch.float64) -> Tensor:
    return so.random_point(n, m, generator=generator, dtype=torch.float64).to(dtype)


def batch_of(count: int, size: int, step: int, seed: int) -> Tensor:
    """The examples of a step: each pass over the data is in an order of its own."""
    each = count // size
    generator = torch.Generator().manual_seed(1000 * seed + step // each)
    order = torch.randperm(count, generator=generator)
    return order[step % each * size :][:size]
