"""The iteration: directions, line searches, and when a start ends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.errors import ProgressBar, fail
from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.methods.minimize.bracket import Bracket
from stiefel_opt.methods.minimize.pairs import Pairs
from stiefel_opt.methods.minimize.product import Path, Product
from stiefel_opt.numerics import exact_products, tangent_part

Loss = Callable[[Any], Tensor]

_TRIALS: Final = 25  # of one line search
_FIRST: Final = 0.4  # radians of the first trial of all, a mean over matrices
_NUDGE: Final = 1e-2  # length of the random move at a stationary start
_CONVERGED: Final = "the Riemannian gradient is small"
_ROUNDING: Final = "no lower loss was found along the negative gradient: rounding, or a kink"
_SPENT: Final = "max_evaluations is reached"
_STOPPED: Final = "the callback stopped it"
_LOST: Final = "the loss or its gradient is not finite at the start"
_LATER: Final = "the loss or its gradient is not finite any more, even at the best point"


@dataclass(frozen=True)
class Minimum:
    """Result of :func:`minimize`, with the names of scipy's ``OptimizeResult``.

    Attributes:
        x: The best point, in the form of the start.
        fun: The loss there.
        grad_norm: Norm of the Riemannian gradient there, for the canonical metric.
        nit: Iterations, of all starts together.
        nfev: Evaluations of loss and gradient, of all starts together.
        success: Whether the best start has converged.
        message: Why it ended, and what else has happened.
        component: Determinant, 1 or -1, of the only real square matrix; None of others.
    """

    x: Any
    fun: float
    grad_norm: float
    nit: int
    nfev: int
    success: bool
    message: str
    component: int | None = None


class Options(NamedTuple):
    """What :func:`minimize` was given."""

    loss: Loss
    batched: bool
    tolerance: float
    most: int
    callback: Callable[[Minimum], object] | None
    bar: ProgressBar


class Descent:
    """L-BFGS of all starts of a batch; those that have ended stay where they are."""

    def __init__(self, product: Product, options: Options) -> None:
        self._product, self._options = product, options
        count, like = product.count, product.flat(product.tensors)
        self._eps = torch.finfo(like.dtype).eps
        self._norms, self._largest = [0.0] * count, [0.0] * count
        self._evaluations, self._iterations = [0] * count, [0] * count
        self._messages = [""] * count
        self._loss: list[float] = []
        self._slope: list[float] = []
        self._gradient = like
        self._evaluate(range(count))

    def results(self, generator: torch.Generator | None) -> list[Minimum]:
        """Iterate; return the end of each start."""
        for index, (loss, norm) in enumerate(zip(self._loss, self._norms, strict=True)):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._messages[index] = _LOST
        flat = [index for index in self._active() if self._is_small(index)]
        if flat:
            self._nudged(flat, generator)
        else:
            self._iterate()
        return [self._result(index) for index in range(self._product.count)]

    def _nudged(self, flat: Sequence[int], generator: torch.Generator | None) -> None:
        """Iterate after a random move of stationary starts; take it back where it led nowhere."""
        product, gradient = self._product, self._gradient
        before = product.tensors, self._loss, self._norms
        device = None if generator is None else generator.device
        drawn = torch.randn(
            gradient.shape, generator=generator, dtype=gradient.dtype, device=device
        ).to(gradient.device)
        vector = product.mapped(_tangent_coordinates, drawn)
        vector = vector * (_NUDGE / vector.norm(dim=1, keepdim=True).clamp(min=1e-30))
        with self._exact():
            moves = [float(index in flat) for index in range(product.count)]
            Path(product, vector).go(gradient.new_tensor(moves))
        self._evaluate(flat)
        self._iterate()
        tensors, losses, norms = before
        for index in flat:
            led = "led to a lower loss"
            if not self._loss[index] < losses[index] - 100 * self._eps * abs(losses[index]):
                led = "led back"
                product.tensors = [
                    torch.cat([new[:index], old[index : index + 1], new[index + 1 :]])
                    for old, new in zip(tensors, product.tensors, strict=True)
                ]
                self._loss[index], self._norms[index] = losses[index], norms[index]
            self._messages[index] += f"; the start was stationary, and a small random move {led}"

    def _iterate(self) -> None:
        product, pairs, travelled = self._product, Pairs(self._gradient), 0.0
        spread = math.sqrt(product.pieces)
        longest = spread * _FIRST
        while self._goes_on():
            with self._exact():
                if product.is_far(travelled):
                    self._gradient = pairs.renew(product, self._gradient)
                gradient = self._gradient
                direction = pairs.direction(gradient)
                slopes = (direction * gradient).sum(1)
                falls = slopes.tolist()
                if not all(slope < 0 for slope in falls):
                    bad = ~(slopes < 0)
                    pairs.forget(bad)
                    direction = torch.where(bad.unsqueeze(1), -gradient, direction)
                    falls = (direction * gradient).sum(1).tolist()
                path = Path(product, direction)
            losses, norms = self._loss, self._norms
            t, longest = self._search(path, direction, falls, longest), spread * math.pi
            self._end_lost(t, losses, norms)
            travelled = max(abs(own * speed) for own, speed in zip(t, path.speeds, strict=True))
            with self._exact():
                step = direction.new_tensor(t).unsqueeze(1) * direction
                bent = [  # by more than rounding
                    own > 0 and after - before > -100 * self._eps * before
                    for own, before, after in zip(t, falls, self._slope, strict=True)
                ]
                pairs.learn(step, self._gradient - gradient, self._gradient, bent)
            stuck = [index for index in self._active() if not t[index] > 0]
            if stuck:
                self._unstick(stuck, pairs, torch.eq(direction, -gradient).all(1).tolist(), falls)
            self._call_back()
        with self._exact():
            product.polish()

    def _end_lost(
        self, t: Sequence[float], losses: Sequence[float], norms: Sequence[float]
    ) -> None:
        """End starts whose loss was a number where they are, and is none any more."""
        for index in self._active():
            if not math.isfinite(self._loss[index] + self._norms[index]):
                self._messages[index] = _LATER
                if not t[index] > 0:
                    self._loss[index], self._norms[index] = losses[index], norms[index]

    def _unstick(
        self,
        stuck: Sequence[int],
        pairs: Pairs,
        is_steepest: Sequence[bool],
        slopes: Sequence[float],
    ) -> None:
        """End starts without a lower loss, or forget their pairs where these may be to blame."""
        for index in stuck:
            rounding = 100 * self._eps * abs(self._loss[index])
            if is_steepest[index] or -slopes[index] <= rounding:
                self._messages[index] = _ROUNDING
        is_stuck = [index in stuck for index in range(len(slopes))]
        pairs.forget(torch.tensor(is_stuck, device=self._gradient.device))

    def _search(
        self, path: Path, direction: Tensor, slopes: Sequence[float], longest: float
    ) -> list[float]:
        """Move along the direction to where the Wolfe conditions hold; return t, 0 for nowhere."""
        active = self._active()
        brackets = {
            index: Bracket(self._loss[index], slopes[index], path.speeds[index], longest, self._eps)
            for index in active
        }
        seen = [0.0] * len(slopes)
        for index in active:
            self._iterations[index] += 1
        for _ in range(_TRIALS):
            trying = [index for index, one in brackets.items() if not one.is_done]
            if not trying:
                break
            for index in active:
                seen[index] = brackets[index].t
            self._go(path, seen, trying, direction)
            for index in trying:
                spent = self._evaluations[index] >= self._options.most
                brackets[index].narrow(self._loss[index], self._slope[index], spent)
        chosen = list(seen)
        for index in active:
            chosen[index] = brackets[index].chosen()
        changed = [index for index in active if chosen[index] != seen[index]]
        if changed:
            self._go(path, chosen, [index for index in changed if chosen[index] > 0], direction)
        return chosen

    def _go(
        self, path: Path, t: Sequence[float], counted: Sequence[int], direction: Tensor
    ) -> None:
        with self._exact():
            path.go(direction.new_tensor(t))
        self._evaluate(counted, direction)

    def _exact(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for products; float64 is neither cast nor rounded by any setting."""
        is_double = self._gradient.dtype == torch.float64
        return contextlib.nullcontext() if is_double else exact_products(self._gradient)

    def _evaluate(self, counted: Iterable[int], direction: Tensor | None = None) -> None:
        """Read the losses, the coordinates of their gradients, and the slopes along a direction."""
        product, options = self._product, self._options
        batches = product.tensors
        given = [each.detach() if options.batched else each.detach()[0] for each in batches]
        for leaf in given:
            leaf.requires_grad_()
        with torch.enable_grad():
            values = _checked(options.loss(product.form.loss_argument(given)), options, product)
            total = values if values.numel() == 1 else values.sum()
            grads = torch.autograd.grad(total, given, allow_unused=True)
        pairs = zip(grads, given, strict=True)
        flat = product.flat([torch.zeros_like(x) if g is None else g for g, x in pairs])
        with self._exact():
            gradient = self._gradient = product.mapped(lbfgs.coordinates_of_gradient, flat)
        losses = values.detach().to(flat.dtype).view(-1)
        slopes = losses if direction is None else (gradient * direction).sum(1)
        norms = [torch.linalg.vector_norm(each, dim=1) for each in (gradient, flat)]
        numbers = torch.stack([losses, slopes, *norms])
        self._loss, self._slope, self._norms, largest = numbers.tolist()
        if not all(map(math.isfinite, self._norms)):  # 0 times NaN would move other starts
            self._gradient = gradient.masked_fill(~norms[0].isfinite().unsqueeze(1), 0.0)
        for index in counted:
            self._evaluations[index] += 1
        self._largest = [
            max(old, new) if new < math.inf else old
            for old, new in zip(self._largest, largest, strict=True)
        ]
        options.bar.update()

    def _active(self) -> list[int]:
        return [index for index, message in enumerate(self._messages) if not message]

    def _goes_on(self) -> bool:
        """End starts that have converged or spent their evaluations; say whether some go on."""
        for index in self._active():
            if self._is_small(index):
                self._messages[index] = _CONVERGED
            elif self._evaluations[index] >= self._options.most:
                self._messages[index] = _SPENT
        return bool(self._active())

    def _is_small(self, index: int) -> bool:
        return self._norms[index] <= self._options.tolerance * self._largest[index]

    def _call_back(self) -> None:
        if self._options.callback is None:
            return
        for index in self._active():
            with contextlib.suppress(StopIteration):
                self._options.callback(self._result(index))
                continue
            self._messages[index] = _STOPPED

    def _result(self, index: int) -> Minimum:
        product, message = self._product, self._messages[index]
        tensors = [tensor[index].clone() for tensor in product.tensors]
        is_near = self._norms[index] <= 100 * self._options.tolerance * self._largest[index]
        return Minimum(
            x=product.form.loss_argument(tensors),
            fun=self._loss[index],
            grad_norm=self._norms[index],
            nit=self._iterations[index],
            nfev=self._evaluations[index],
            success=message.startswith(_CONVERGED) or (message.startswith(_ROUNDING) and is_near),
            message=message,
            component=product.form.component(tensors),
        )


def _checked(values: Any, options: Options, product: Product) -> Tensor:
    """Return what the loss has returned; raise for what it must not return."""
    if not isinstance(values, Tensor) or values.is_complex():
        raise TypeError(fail("loss", "return a real tensor", type(values).__name__))
    wanted = (product.count,) if options.batched else ()
    if values.shape != wanted and not (not options.batched and values.numel() == 1):
        raise ValueError(fail("loss", f"return a tensor of shape {wanted}", values))
    if not values.requires_grad:
        remedy = "write it with operations of torch on its argument"
        raise ValueError(fail("loss", "depend on the point", "one without gradient", remedy))
    return values


def _tangent_coordinates(at: lbfgs.Frame, vector: Tensor) -> Tensor:
    return lbfgs.coordinates(at, tangent_part(at.point, vector))
