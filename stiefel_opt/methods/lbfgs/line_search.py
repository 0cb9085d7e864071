"""One call of StiefelLBFGS.step: all parameters as one point, lines from it, pairs, iterations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.lbfgs import _strong_wolfe  # torch's line search is what is meant

from stiefel_opt.errors import fail
from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.numerics import exact_products, finest_dtype, gram
from stiefel_opt.optim import Group
from stiefel_opt.tags import Stack, Stiefel, stacks_of

Closure = Callable[[], Any]

PAIRS: Final = ("steps", "changes")
LAST: Final = ("last_step", "last_gradient")
_MOST_TRIALS: Final = 25  # of one line search
_LONGEST_TURN: Final = 2 * math.pi
_PROBES: Final = 3  # of the rounding of a loss, at least


# ---- all parameters as one point, vectors there as flat tensors ----------------------------------


class Point:
    """The parameters as one point of a product of manifolds.

    A vector of the product is one flat real tensor in the order of the parameters, as in torch's
    class; its coordinates, with respect to the frames at the point, are another one.
    """

    def __init__(
        self, parameters: Sequence[Tensor], readings: Sequence[Stiefel | None], states: Any
    ) -> None:
        self.parameters, self.readings = list(parameters), list(readings)
        self.states = states
        self._starts, self._length = places(self.parameters)
        self._frames: list[lbfgs.Frame] | None = None  # at this point
        self.stacks = stacks_of([parameter.detach() for parameter in parameters], readings)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat vector, shaped like the parameters."""
        views = []
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            shape = tuple(as_real(parameter).shape)
            view = flat[start : start + math.prod(shape)].view(shape)
            views.append(torch.view_as_complex(view) if parameter.is_complex() else view)
        return views

    def points(self, stack: Stack) -> Tensor:
        """Return the orthonormal matrices of a stack."""
        return stack.read(self.parameters) / stack.scale

    def refer_here(self) -> None:
        """Make this point the reference of the frames."""
        self.leave()
        for parameter, manifold in zip(self.parameters, self.readings, strict=True):
            if manifold is not None:
                self.states[parameter]["reference"] = parameter.detach().clone()

    def forget(self) -> None:
        """Forget all pairs and the reference."""
        self.leave()
        for parameter in self.parameters:
            self.states[parameter].pop("reference", None)
        _forget(self.states[self.parameters[0]])

    def leave(self) -> None:
        """Forget the frames: the parameters move, or another reference is chosen."""
        self._frames = None

    def frames(self) -> list[lbfgs.Frame]:
        """Return the frames of all stacks at this point."""
        if self._frames is None:
            # a parameter without one is its own
            references = [self.states[p].get("reference", p) for p in self.parameters]
            self._frames = [
                lbfgs.frame(self.points(stack), stack.read(references) / stack.scale)
                for stack in self.stacks
            ]
        return self._frames

    def is_far(self) -> bool:
        """Say whether another reference would serve better."""
        return any(lbfgs.is_ill_conditioned(at) for at in self.frames())

    def mapped(self, function: Callable[[lbfgs.Frame, Tensor], Tensor], flat: Tensor) -> Tensor:
        """Return a flat vector whose matrices went through a function of the frames."""
        result = flat.clone()
        tensors = self.shaped(result)
        for stack, at in zip(self.stacks, self.frames(), strict=True):
            stack.write(tensors, function(at, stack.read(tensors)))
        return result

    def gradient(self) -> Tensor:
        """Return the coordinates of the Riemannian gradient; what is missing is zero."""
        flat = self.parameters[0].real.new_zeros(self._length)
        for view, parameter in zip(self.shaped(flat), self.parameters, strict=True):
            if parameter.grad is not None:
                view.copy_(parameter.grad.to_dense())
        return self.mapped(lbfgs.coordinates_of_gradient, flat)

    def values(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def restore(self, values: Sequence[Tensor]) -> None:
        """Go back to where :meth:`values` were read."""
        self.leave()
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def _forget(state: dict[str, Any]) -> None:
    """Drop all pairs from the state of the first parameter."""
    for name in (*PAIRS, *LAST):
        state.pop(name, None)


def places(parameters: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each parameter begins in a flat vector, and the length of the vector."""
    starts, end = [], 0
    for parameter in parameters:
        end += end % 2 if parameter.is_complex() else 0  # where torch can view pairs as complex
        starts.append(end)
        end += as_real(parameter).numel()
    return starts, end


def as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Line:
    """The curve of all parameters along a direction, and the transport that belongs to it.

    Loss, gradient and slope are those at its start, vectors are coordinates there.
    """

    def __init__(
        self, point: Point, direction: Tensor, loss: float, gradient: Tensor, slope: Tensor
    ) -> None:
        self.point, self.start = point, point.values()
        self.direction, self.loss, self.gradient, self.slope = direction, loss, gradient, slope
        self.t = 0.0
        with exact_products(direction):
            self.vector = point.mapped(lbfgs.from_coordinates, direction)
            self._length = torch.linalg.vector_norm(direction, dtype=finest_dtype(direction))
            self.before = self.after = direction / self._length
            tensors = point.shaped(self.vector)
            self._curves: list[lbfgs.Curve] = [
                lbfgs.curve(at.point, stack.read(tensors) / stack.scale)
                for stack, at in zip(point.stacks, point.frames(), strict=True)
            ]

    def go(self, t: float) -> None:
        """Move the parameters to t."""
        point, velocity = self.point, self.vector.clone()
        moves, velocities = point.shaped(self.vector), point.shaped(velocity)
        with exact_products(velocity):
            for parameter, value, move in zip(point.parameters, self.start, moves, strict=True):
                parameter.copy_(torch.add(value, move, alpha=t))
            for stack, path in zip(point.stacks, self._curves, strict=True):
                matrices, speeds = lbfgs.along(path, t)
                stack.write(point.parameters, stack.scale * matrices)
                stack.write(velocities, stack.scale * speeds)
            point.leave()
            self.after = point.mapped(lbfgs.coordinates, velocity) / self._length
        self.t = t

    def longest(self) -> float:
        """Return the longest t of a first trial: beyond it matrices only turn around again."""
        speed = max(lbfgs.largest_speed(path) for path in self._curves)
        return _LONGEST_TURN / speed if speed > 0 else math.inf

    def longest_move(self) -> float:
        """Return the largest entry of t times the direction."""
        return self.t * float(self.vector.abs().max())

    def is_rounding(self, eps: float) -> bool:
        """Say whether the whole direction is no more than rounding of the parameters."""
        largest = max(float(value.abs().max()) for value in self.start if value.numel())
        return float(self.vector.abs().max()) <= eps * largest

    def stay(self) -> None:
        """Go back to the start, to the bit."""
        self.point.restore(self.start)
        self.t, self.after = 0.0, self.before

    def carried_(self, vectors: Tensor) -> Tensor:
        """Carry coordinates from the start to where the parameters are, in place."""
        with exact_products(vectors):
            return lbfgs.rotated_(vectors, self.before, self.after)

    def brought_back_(self, vectors: Tensor) -> Tensor:
        """Undo :meth:`carried_`."""
        with exact_products(vectors):
            return lbfgs.rotated_(vectors, self.after, self.before)

    def angles(self) -> dict[Tensor, float]:
        """Return by how much each constrained parameter was turned at most, in radians."""
        largest: dict[Tensor, float] = {}
        for stack in self.point.stacks:
            vectors = stack.read(self.point.shaped(self.vector)) / stack.scale
            with exact_products(vectors):
                squares = torch.linalg.eigvalsh(gram(vectors))[..., -1].clamp(min=0.0)
            for block, angles in stack.pieces(squares.sqrt() * self.t):
                parameter = self.point.parameters[block.place]
                largest[parameter] = max(largest.get(parameter, 0.0), float(angles.max()))
        return largest


# ---- the memory of pairs -------------------------------------------------------------------------


class _Memory:
    """The pairs (s, y) in the state of the first parameter, as coordinates at the point.

    ``steps`` and ``changes`` have a pair in each row, the oldest first. ``last_step`` and
    ``last_gradient`` are of the last iteration, whose pair needs the gradient of the next one.
    """

    def __init__(self, state: dict[str, Any], history_size: int) -> None:
        self._state, self._size = state, history_size

    def __bool__(self) -> bool:
        return "steps" in self._state

    def forget(self) -> None:
        """Start anew."""
        _forget(self._state)

    def note(self, step: Tensor, gradient: Tensor) -> None:
        """Keep the step of this iteration, and the gradient before it."""
        self._state["last_step"], self._state["last_gradient"] = step, gradient.clone()

    def learn(self, gradient: Tensor) -> None:
        """Make a pair of the last iteration, if the curvature along its step is positive."""
        step, before = (self._state.pop(name, None) for name in LAST)
        if step is None:
            return
        change = gradient - before
        rounding = torch.finfo(step.dtype).eps * step.norm() * change.norm()
        if torch.dot(step, change) > rounding:
            for name, vector in zip(PAIRS, (step, change), strict=True):
                rows = self._state.get(name, vector.new_empty(0, vector.numel()))
                kept = rows[max(0, len(rows) + 1 - self._size) :]
                self._state[name] = torch.cat([kept, vector.unsqueeze(0)])

    def direction(self, gradient: Tensor) -> Tensor:
        """Return -H g."""
        rows = (self._state[name].unbind() if self else () for name in PAIRS)
        return lbfgs.quasi_newton_direction(gradient, *rows)

    def tensors(self) -> list[Tensor]:
        """Return all coordinates, rows of pairs as one tensor."""
        return [self._state[name] for name in (*PAIRS, *LAST) if name in self._state]


# ---- one call of step ----------------------------------------------------------------------------


class Run:
    """One call of :meth:`StiefelLBFGS.step`: the iterations of torch's class, on the manifold."""

    def __init__(self, point: Point, group: Group, closure: Closure) -> None:
        self._group, self._point, self._closure = group, point, closure
        self._state = point.states[point.parameters[0]]
        self._state.setdefault("func_evals", 0)
        self._state.setdefault("n_iter", 0)
        self._memory = _Memory(self._state, group["history_size"])
        self._evaluations = 0
        self.line: _Line | None = None  # of the last iteration
        self.failure = ""  # text of a warning
        self.is_finite = True

    def run(self) -> Any:
        """Iterate until a tolerance or a budget is reached; return the first loss."""
        returned, loss, gradient = self._evaluate()
        if not _is_finite(loss, gradient):
            self.is_finite = False
            return returned
        if float(self._group["lr"]) == 0.0:  # torch's line search would divide by it
            return returned
        try:
            self._iterate(loss, gradient)
        except BaseException:
            if self.line is not None:
                self.line.stay()
            raise
        return returned

    def _iterate(self, loss: float, gradient: Tensor) -> None:
        group, tolerance = self._group, self._group["tolerance_change"]
        for iteration in range(1, group["max_iter"] + 1):
            is_last = iteration == group["max_iter"]
            if self._is_small(gradient):
                return
            self._state["n_iter"] += 1
            if self._point.is_far():
                gradient = self._refer_here(gradient)
            self._memory.learn(gradient)
            direction, slope = self._direction(gradient)
            if slope >= 0 or slope > -tolerance:
                return
            self.line = _Line(self._point, direction, loss, gradient, slope)
            reached = self._move(self.line, is_last)
            if reached is None:
                if self._is_over(self.line):
                    return
                self._memory.forget()
                continue
            change, (loss, gradient) = loss - reached[0], reached
            if (
                is_last
                or self._evaluations >= group["max_eval"]
                or self.line.longest_move() <= tolerance
                or abs(change) < tolerance
            ):
                return

    def _evaluate(self) -> tuple[Any, float, Tensor]:
        """Return what the closure returned, the loss, and the coordinates of the gradient."""
        self._evaluations += 1
        self._state["func_evals"] += 1
        returned = self._closure()
        try:
            loss = float(returned.detach() if isinstance(returned, Tensor) else returned)
        except (TypeError, ValueError, RuntimeError) as error:
            given, remedy = type(returned).__name__, "let it return the loss, one number"
            raise TypeError(fail("closure", "return a number", given, remedy)) from error
        if all(parameter.grad is None for parameter in self._point.parameters):
            remedy = "call loss.backward() in it, on a loss that depends on the parameters"
            raise ValueError(fail("closure", "leave a gradient", "none", remedy))
        with exact_products(self._point.parameters[0]):
            gradient = self._point.gradient()
        return returned, loss, gradient

    def _is_small(self, gradient: Tensor) -> bool:
        """Say whether no entry of the Riemannian gradient exceeds the tolerance."""
        with exact_products(gradient):
            vector = self._point.mapped(lbfgs.from_coordinates, gradient)
        return bool(vector.abs().max() <= self._group["tolerance_grad"])

    def _refer_here(self, gradient: Tensor) -> Tensor:
        """Change the reference of the frames, and all coordinates with it."""
        point, tensors = self._point, [*self._memory.tensors(), gradient.clone()]
        vectors = [row for tensor in tensors for row in tensor.view(-1, gradient.numel())]
        with exact_products(gradient):
            for vector in vectors:
                vector.copy_(point.mapped(lbfgs.from_coordinates, vector))
            point.refer_here()
            for vector in vectors:
                vector.copy_(point.mapped(lbfgs.coordinates, vector))
        return tensors[-1]

    def _direction(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the direction and the slope along it."""
        direction = self._memory.direction(gradient)
        slope = torch.dot(gradient, direction)
        if not slope < 0:  # the pairs have drowned in rounding
            self._memory.forget()
            direction = gradient.neg()
            slope = torch.dot(gradient, direction)
        return direction, slope

    def _move(self, line: _Line, is_last: bool) -> tuple[float, Tensor] | None:
        """Move the parameters; return loss and gradient there, or None if they had to stay."""
        t = self._first_trial(line)
        if self._group["line_search_fn"] is None:
            line.go(t)
            reached = (line.loss, line.gradient) if is_last else self._evaluate()[1:]
            if not _is_finite(*reached):
                line.stay()
                self.is_finite = False
                return None
        else:
            new_loss, brought, length, _ = _strong_wolfe(  # type: ignore[no-untyped-call]
                lambda _, t, __: self._trial(line, float(t)),
                None,
                t,
                line.direction,
                line.loss,
                line.gradient,
                line.slope,
                tolerance_change=self._group["tolerance_change"],
                max_ls=min(_MOST_TRIALS, self._group["max_eval"] - self._evaluations),
            )
            t = float(length)
            if not 0 < t < math.inf or new_loss > line.loss:
                line.stay()
                return None
            if line.t != t:
                line.go(t)
            reached = new_loss, line.carried_(brought.clone())
        self._memory.note(t * line.direction, line.gradient)
        for vectors in self._memory.tensors():
            line.carried_(vectors)
        return reached

    def _first_trial(self, line: _Line) -> float:
        """Return the step length that a line search tries first."""
        lr = float(self._group["lr"])
        t = lr if self._memory else lr * min(1.0, 1.0 / float(line.vector.abs().sum()))
        return min(t, line.longest())

    def _trial(self, line: _Line, t: float) -> tuple[float, Tensor]:
        """Return the loss at t, and the gradient there brought back to the start."""
        if not math.isfinite(t):  # torch's interpolation may divide by 0
            return math.nan, -line.gradient
        line.go(t)
        _, new_loss, there = self._evaluate()
        if not _is_finite(new_loss, there):  # uphill, so that the search turns back
            return line.loss - float(line.slope) * t, -line.gradient
        return new_loss, line.brought_back_(there)

    def _is_over(self, line: _Line) -> bool:
        """Say whether a line search without success is the end, and why."""
        eps = torch.finfo(line.slope.dtype).eps
        if not self.is_finite or self._evaluations >= self._group["max_eval"]:
            return True
        if -float(line.slope) <= 10 * eps * abs(line.loss) or line.is_rounding(100 * eps):
            return True  # converged: nothing but rounding could be gained
        if self._memory:
            return False
        if self._is_flat(line):
            return True
        self.failure = (
            "The line search found no lower loss along the negative gradient: the parameters stay "
            "as they were. The closure must return the same loss at the same point (no dropout, no "
            "new batch), call zero_grad() before backward(), and be differentiable there."
        )
        return True

    def _is_flat(self, line: _Line) -> bool:
        """Say whether nothing but rounding of the loss could be gained, by some evaluations.

        The loss may be a small difference of large sums: how far it rounds is seen in moves that
        are rounding themselves, and in the first change of the loss behind them. What could be
        gained is what a parabola through the first trial says.
        """
        eps, start = torch.finfo(line.slope.dtype).eps, line.loss
        largest = max(float(value.abs().max()) for value in line.start if value.numel())
        first, rounding = self._first_trial(line), 0.0
        drop = -float(line.slope) * first
        rise = self._trial(line, first)[0] - start + drop
        t = 8 * eps * largest / float(line.vector.abs().max())
        count = 0
        while t < first and (count < _PROBES or rounding == 0):
            rounding = max(rounding, abs(self._trial(line, t)[0] - start))
            t, count = 6 * t, count + 1
        line.stay()
        again, gradient = self._evaluate()[1:]  # at last: gradients are those of this point
        difference = torch.linalg.vector_norm(gradient - line.gradient)
        is_same = again == start and difference <= 0.1 * torch.linalg.vector_norm(line.gradient)
        return bool(is_same) and rise > 0 and drop * drop <= 16 * rise * rounding


def _is_finite(loss: float, gradient: Tensor) -> bool:
    """Say whether both are, and the gradient can be squared."""
    return math.isfinite(loss) and math.isfinite(float(torch.dot(gradient, gradient)))
