"""StiefelLBFGS: L-BFGS for constrained and plain parameters together."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.lbfgs import _strong_wolfe  # torch's line search is what is meant
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt._checks import (
    HALF,
    check_choice,
    check_count,
    check_range,
    fail,
    users_level,
)
from stiefel_opt.batches import Stack, stacks_of
from stiefel_opt.device import exact_products, finest_dtype
from stiefel_opt.distributed import is_sharded
from stiefel_opt.functional import lbfgs
from stiefel_opt.geometry import (
    gram_error,
    orthonormality_tolerance,
    polar_factor,
    riemannian_gradient,
)
from stiefel_opt.linalg import own_gram
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim import checks
from stiefel_opt.optim.checkpoint import check_state_dict
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.parameter import recalled

Closure = Callable[[], Any]

_NONFINITE: Final = ("skip", "raise")
_LINE_SEARCHES: Final = ("strong_wolfe",)
_MOST_TRIALS: Final = 25  # of one line search
_LONGEST_TURN: Final = 2 * math.pi
_PAIRS: Final = ("steps", "changes")
_LAST: Final = ("last_step", "last_gradient")
_step_of_torch: Final = inspect.unwrap(LBFGS.step)  # without hooks: they belong to our step


# ---- all parameters as one point, vectors there as flat tensors ----------------------------------


class _Point:
    """The parameters as one point of a product of manifolds.

    A vector of the product is one flat real tensor in the order of the parameters, as in torch's
    class; its coordinates, with respect to the frames at the point, are another one.
    """

    def __init__(
        self, parameters: Sequence[Tensor], readings: Sequence[Stiefel | None], states: Any
    ) -> None:
        self.parameters, self.readings = list(parameters), list(readings)
        self.states = states
        self._starts = _places(self.parameters)[0]
        self._frames: list[lbfgs.Frame] | None = None  # at this point
        self.stacks = stacks_of([parameter.detach() for parameter in parameters], readings)

    def shaped(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat vector, shaped like the parameters."""
        views = []
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            shape = tuple(_real(parameter).shape)
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
        pieces, end = [], 0
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            piece = _real(grad.to_dense() if grad.is_sparse else grad).reshape(-1)
            pieces += [piece.new_zeros(start - end), piece] if start > end else [piece]
            end = start + piece.numel()
        flat = torch.cat(pieces)
        return self.mapped(_coordinates_of_gradient, flat)

    def values(self) -> list[Tensor]:
        """Return copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.parameters]

    def restore(self, values: Sequence[Tensor]) -> None:
        """Go back to where :meth:`values` were read."""
        self.leave()
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)


def _coordinates_of_gradient(at: lbfgs.Frame, grad: Tensor) -> Tensor:
    return lbfgs.coordinates(at, riemannian_gradient(at.point, grad))


def _forget(state: dict[str, Any]) -> None:
    """Drop all pairs from the state of the first parameter."""
    for name in (*_PAIRS, *_LAST):
        state.pop(name, None)
    state["order"] = []


def _places(parameters: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each parameter begins in a flat vector, and the length of the vector."""
    starts, end = [], 0
    for parameter in parameters:
        end += end % 2 if parameter.is_complex() else 0  # where torch can view pairs as complex
        starts.append(end)
        end += _real(parameter).numel()
    return starts, end


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


class _Line:
    """The curve of all parameters along a direction, and the transport that belongs to it.

    Loss, gradient and slope are those at its start, vectors are coordinates there.
    """

    def __init__(
        self, point: _Point, direction: Tensor, loss: float, gradient: Tensor, slope: Tensor
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
                squares = torch.linalg.eigvalsh(own_gram(vectors))[..., -1].clamp(min=0.0)
            for block, angles in stack.pieces(squares.sqrt() * self.t):
                parameter = self.point.parameters[block.place]
                largest[parameter] = max(largest.get(parameter, 0.0), float(angles.max()))
        return largest


# ---- the memory of pairs -------------------------------------------------------------------------


class _Memory:
    """The pairs (s, y) in the state of the first parameter, as coordinates at the point.

    ``steps`` and ``changes`` have a pair in each row; ``order`` lists the rows in use, oldest
    first. ``last_step`` and ``last_gradient`` are of the last iteration, whose pair needs the
    gradient of the next one.
    """

    def __init__(self, state: dict[str, Any], history_size: int) -> None:
        self._state, self._size = state, history_size
        state.setdefault("order", [])

    def __bool__(self) -> bool:
        return bool(self._state["order"])

    def forget(self) -> None:
        """Start anew."""
        _forget(self._state)

    def note(self, step: Tensor, gradient: Tensor) -> None:
        """Keep the step of this iteration, and the gradient before it."""
        self._state["last_step"], self._state["last_gradient"] = step, gradient.clone()

    def learn(self, gradient: Tensor) -> None:
        """Make a pair of the last iteration, if the curvature along its step is positive."""
        step, before = (self._state.pop(name, None) for name in _LAST)
        if step is None:
            return
        change = gradient - before
        rounding = torch.finfo(step.dtype).eps * step.norm() * change.norm()
        if torch.dot(step, change) > rounding:
            row = self._free_row(step)
            self._state["steps"][row], self._state["changes"][row] = step, change
            self._state["order"].append(row)

    def _free_row(self, like: Tensor) -> int:
        """Return a row for the next pair: a new one, or that of the oldest."""
        state = self._state
        rows = len(state["steps"]) if "steps" in state else 0
        del state["order"][: max(0, len(state["order"]) + 1 - self._size)]
        free = set(range(rows)).difference(state["order"])
        if not free:
            more = like.new_zeros(max(1, min(rows, self._size - rows)), like.numel())
            for name in _PAIRS:
                state[name] = torch.cat([state[name], more]) if rows else more.clone()
        return min(free, default=rows)

    def direction(self, gradient: Tensor) -> Tensor:
        """Return -H g."""
        rows = ([self._state[name][row] for row in self._state["order"]] for name in _PAIRS)
        return lbfgs.quasi_newton_direction(gradient, *rows)

    def tensors(self) -> list[Tensor]:
        """Return all coordinates, rows of pairs as one tensor."""
        return [self._state[name] for name in (*_PAIRS, *_LAST) if name in self._state]


# ---- one call of step ----------------------------------------------------------------------------


class _Run:
    """One call of :meth:`StiefelLBFGS.step`: the iterations of torch's class, on the manifold."""

    def __init__(self, point: _Point, group: Group, closure: Closure) -> None:
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
        lr = float(self._group["lr"])
        t = lr if self._memory else lr * min(1.0, 1.0 / float(line.vector.abs().sum()))
        t = min(t, line.longest())
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
            # torch's interpolation may divide by 0
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

    def _trial(self, line: _Line, t: float) -> tuple[float, Tensor]:
        """Return the loss at t, and the gradient there brought back to the start."""
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
        self.failure = (
            "The line search found no lower loss along the negative gradient: the parameters stay "
            "as they were. The closure must return the same loss at the same point (no dropout, no "
            "new batch), call zero_grad() before backward(), and be differentiable there."
        )
        return True


def _is_finite(loss: float, gradient: Tensor) -> bool:
    """Say whether both are, and the gradient can be squared."""
    return math.isfinite(loss) and math.isfinite(float(torch.dot(gradient, gradient)))


# ---- the class -----------------------------------------------------------------------------------


class StiefelLBFGS(LBFGS):
    r"""L-BFGS with a line search; without constrained parameters ``torch.optim.LBFGS`` itself.

    .. math::
        X_+ = X(t),\quad X'(0) = d = -H\,\mathrm{grad} f(X),\quad
        s = T\,t d,\quad y = \mathrm{grad} f(X_+) - T\,\mathrm{grad} f(X)

    All parameters together are one point; H follows by the two-loop recursion from the last pairs
    (s, y). A matrix moves along the curve

    .. math:: X(t) = \big(X \cos(t \sqrt{N^\top N})
        + N (N^\top N)^{-1/2} \sin(t \sqrt{N^\top N})\big)\, e^{tA},\quad d = X A + N,

    :math:`A = -A^\top, X^\top N = 0`, and the gradient is that of the canonical metric. The
    transport T is an isometry with :math:`T d = X'(t)`, the locking condition: positive curvature
    along the curve, which the line search provides, is s'y > 0. In the coordinates in which pairs
    are kept T is a rotation in one plane, so that keeping many pairs costs little.

    For losses that are the same at the same point: all data in every step, no dropout.

    Args:
        params: Parameters, one group; all of one precision.
        lr: The first step length that each line search tries, or the only one. Default: 1.
        max_iter: Most iterations a step. Default: 20.
        max_eval: Most evaluations a step. Default: 1.25 times ``max_iter``.
        tolerance_grad: A step ends where no entry of the Riemannian gradient exceeds this.
            Default: 1e-7.
        tolerance_change: A step ends where the loss, or every entry of the parameters, changes by
            less, and where the slope is above its negative. Default: 1e-9; set it to 0 for more
            digits.
        history_size: How many pairs are kept. Default: 100.
        line_search_fn: ``"strong_wolfe"``, torch's search, or None: every step has length ``lr``.
            Default: ``"strong_wolfe"``.
        nonfinite: Where the loss or a gradient is not finite as a step begins: ``"skip"`` leaves
            everything as it is and warns, ``"raise"`` raises. Trials of a line search that are not
            finite count as uphill in any case. Default: ``"skip"``.
        stiefel: As in :class:`StiefelSGD`: None, the tags decide; True, False or a
            :class:`Stiefel`, for all parameters.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them:
            constrained ones of half precision, DTensors, several groups.

    Note:
        An iteration with one trial: about 30 products of n x m by m x m, one symmetric
        eigendecomposition of m x m, and some eight passes over the pairs; two vectors of
        memory for each pair and one copy of each constrained parameter. Reads the loss, so that it
        waits for an accelerator, as torch's class does. What a closure raises passes through, the
        parameters at the start of the line search under way. A line search that finds no lower
        loss drops the pairs; if the negative gradient fails too, it warns.

    Reference:
        Huang, Gallivan & Absil, A Broyden class of quasi-Newton methods for Riemannian optimization
        (SIAM J. Optim. 2015); Huang, Absil & Gallivan, Intrinsic representation of tangent vectors
        and vector transports on matrix manifolds (Numer. Math. 2017); Nocedal & Wright, Numerical
        optimization (2006), chapter 7.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: str | None = "strong_wolfe",
        *,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        if isinstance(params, set):
            raise TypeError(fail("params", "have an order", "a set", "pass a list"))
        self._own_defaults = {"nonfinite": nonfinite, "stiefel": checks.as_plain_data(stiefel)}
        numbers = lr, max_iter, max_eval, tolerance_grad, tolerance_change, history_size
        super().__init__(checks.listed(params), *numbers, line_search_fn)
        checks.warn_if_nothing_is_constrained(self.param_groups)

    @override
    def __repr__(self) -> str:
        return checks.described(type(self).__name__, self.param_groups, dict)

    @override
    def add_param_group(self, param_group: Group) -> None:
        """Raise for a second group: all parameters are one point, given to the constructor."""
        if self.param_groups:
            remedy = "pass model.parameters() to the constructor: tags say which are constrained"
            raise ValueError(fail("param_group", "be the only one", "a second one", remedy))
        self.defaults.update(self._own_defaults)
        super().add_param_group(_checked(param_group, self.defaults))
        _readings(self.param_groups[0])
        self._tags = recalled(self.param_groups[0]["params"], {})

    @override
    @torch.no_grad()
    def step(self, closure: Closure) -> Any:  # type: ignore[override]
        """Iterate until a tolerance or a budget is reached.

        Args:
            closure: Clears the gradients, evaluates the loss, calls ``backward`` and returns the
                loss, the same one at the same point. Called several times, with grad enabled.

        Returns: What the closure returned first.
        Raises:
            TypeError: without a closure, or if it returns no number.
            ValueError: if it leaves no gradient, and for parameters that are not finite.
        """
        if not callable(closure):
            remedy = "L-BFGS evaluates the loss several times in a step"
            raise TypeError(fail("closure", "be a function", type(closure).__name__, remedy))
        group = self.param_groups[0]
        _check_options(group)
        self._tags = recalled(self._params, self.__dict__.get("_tags", {}))
        readings = _readings(group)
        _fit_state(self.state, self._params, readings)
        if not any(readings):
            return _step_of_torch(self, closure)
        return _step_on_manifold(_Point(self._params, readings, self.state), group, closure)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, here or from ``torch.optim.LBFGS``.

        Of torch's the memory is taken if no parameter is constrained, else the options only.

        Raises:
            ValueError: for the state of another rule, another reading or other shapes. Nothing has
                changed then.
            TypeError: for what is no state_dict.
        """
        super().load_state_dict(_loadable(state_dict, self.param_groups[0]))

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._params, self._numel_cache = self.param_groups[0]["params"], None

    def skipped_steps(self) -> dict[str, int]:
        """Return how many steps each parameter has missed because its gradient was not finite."""
        return checks.by_name(self.skipped_steps_of(), self.param_groups)

    def skipped_steps_of(self) -> dict[Tensor, int]:
        """Return what :meth:`skipped_steps` does, by parameter."""
        return {p: state["skipped"] for p, state in self.state.items() if "skipped" in state}

    def angles_of(self) -> dict[Tensor, float]:
        """Return by how much, in radians, the last iteration has turned each parameter."""
        return {p: state["angle"] for p, state in self.state.items() if "angle" in state}


# ---- what the class looks after ------------------------------------------------------------------


def _checked(param_group: Group, defaults: Group) -> Group:
    """Return a group with all options; raise for those and for parameters that make no sense."""
    checks.check_option_names(param_group, defaults, StiefelLBFGS.__name__)
    group = checks.completed(param_group, defaults)
    _check_options(group)
    checks.check_new_group(group, [])
    return group


def _check_options(group: Group) -> None:
    """Raise for options that make no sense."""
    for name in ("max_iter", "max_eval", "history_size"):
        check_count(name, group[name])
    for name in ("tolerance_grad", "tolerance_change"):
        check_range(name, group[name], -math.inf)
    if group["line_search_fn"] is not None:
        check_choice("line_search_fn", group["line_search_fn"], _LINE_SEARCHES)
    check_choice("nonfinite", group["nonfinite"], _NONFINITE)


def _readings(group: Group) -> list[Stiefel | None]:
    """Return how each parameter is read; raise for those that cannot be constrained here."""
    params = group["params"]
    readings = [checks.reading(parameter, group) for parameter in params]
    if not any(readings):
        return readings
    precision = params[0].dtype.to_real()
    for parameter, manifold in zip(params, readings, strict=True):
        called = checks.name_of(parameter, [group])
        if is_sharded(parameter):
            remedy = "train it with so.StiefelSGD or so.StiefelAdam, or hold it in one process"
            raise TypeError(fail(called, "be no DTensor for StiefelLBFGS", "one", remedy))
        if manifold is not None and parameter.dtype in HALF:
            wanted = "be of float32 or float64 for StiefelLBFGS"
            remedy = "convert it: differences of its gradients would be rounding"
            raise TypeError(fail(called, wanted, parameter.dtype, remedy))
        if parameter.dtype.to_real() != precision:
            wanted = f"be as precise as the first parameter, {precision}"
            remedy = "convert all to one precision: they share one memory"
            raise TypeError(fail(called, wanted, parameter.dtype, remedy))
    return readings


def _as_data(readings: Sequence[Stiefel | None]) -> list[Any]:
    return [None if manifold is None else manifold.as_dict() for manifold in readings]


def _step_on_manifold(point: _Point, group: Group, closure: Closure) -> Any:
    """Do what :meth:`StiefelLBFGS.step` does where a parameter is constrained."""
    _settle(point, group)
    run = _Run(point, group, torch.enable_grad()(closure))
    returned = run.run()
    for parameter, angle in run.line.angles().items() if run.line is not None else ():
        point.states[parameter]["angle"] = angle
    if run.failure:
        warnings.warn(run.failure, stacklevel=users_level())
    if not run.is_finite:
        _report_nonfinite(point, group)
    return returned


def _fit_state(states: Any, params: list[Tensor], readings: Sequence[Stiefel | None]) -> None:
    """Forget pairs of other readings or another precision, and torch's pairs if tags are new."""
    state, data = states.get(params[0], {}), _as_data(readings) if any(readings) else None
    is_fit = not state or state.get("readings") == data
    dtypes = [state[name].dtype for name in (*_PAIRS, *_LAST) if name in state]
    if not is_fit or any(dtype != params[0].dtype.to_real() for dtype in dtypes):
        for parameter in params:
            states.pop(parameter, None)
    if data is not None:
        states[params[0]]["readings"] = data


def _settle(point: _Point, group: Group) -> None:
    """Replace matrices that are off the manifold by the nearest ones, and say so."""
    off: list[Tensor] = []
    for stack in point.stacks:
        matrices = point.points(stack)
        with exact_products(matrices):
            error = gram_error(matrices)
        right = error <= 10 * orthonormality_tolerance(matrices.dtype, matrices.size(-2))
        if not bool(right.all()):
            pieces = stack.pieces(right)
            wrong = [point.parameters[block.place] for block, mine in pieces if not mine.all()]
            checks.check_finite(wrong, [group])
            matrices[~right] = polar_factor(matrices[~right])
            stack.write(point.parameters, stack.scale * matrices)
            off += wrong
    if off:
        point.forget()
        called = ", ".join(checks.names_of(off, [group]))
        warnings.warn(
            f"{called}: off the manifold where the step begins, so that the nearest orthonormal "
            "matrices were taken and the memory of pairs starts anew. "
            "so.project_(model) projects weights that were written to",
            stacklevel=users_level(),
        )
    if not any("reference" in point.states[parameter] for parameter in point.parameters):
        point.refer_here()


def _report_nonfinite(point: _Point, group: Group) -> None:
    """Count the step as missed by those whose gradient was not finite; warn or raise."""
    bad = [p for p in point.parameters if p.grad is not None and not bool(p.grad.isfinite().all())]
    for parameter in bad or point.parameters:
        state = point.states[parameter]
        state["skipped"] = state.get("skipped", 0) + 1
    called = ", ".join(f"grad of {name}" for name in checks.names_of(bad, [group])) or "loss"
    if group["nonfinite"] == "raise":
        remedy = "look for its cause; the parameters are where it was finite"
        raise ValueError(fail(called, "be finite", "NaN or inf", remedy))
    warnings.warn(
        f"{called}: not finite, or too long to be squared; the parameters keep their last values "
        "with a finite loss. Look for its cause; nonfinite='raise' stops there.",
        stacklevel=users_level(),
    )


def _loadable(state_dict: Any, group: Group) -> dict[str, Any]:
    """Return a copy of ``state_dict`` for torch to load; raise if it is of something else."""
    check_state_dict(state_dict)
    loaded: dict[str, Any] = copy.deepcopy(dict(state_dict))
    groups = loaded["param_groups"]
    if len(groups) != 1 or "history_size" not in groups[0]:
        remedy = "load the weights only and let it start anew"
        raise ValueError(fail("state_dict", "be one of StiefelLBFGS or LBFGS", "another", remedy))
    readings = _readings(group)
    for name in ("nonfinite", "stiefel"):  # torch's has none
        groups[0][name] = group[name]
    saved = loaded["state"].get(0, {})
    if "readings" not in saved and any(readings):
        loaded["state"] = {}
        return loaded
    earlier = saved.get("readings", [None] * len(readings))
    for parameter, current, other in zip(group["params"], readings, earlier, strict=False):
        if _as_data([current]) != [other]:
            called = f"reading of {checks.name_of(parameter, [group])}"
            condition = f"be the saved one, {other and Stiefel.from_dict(other)}"
            remedy = "constrain it as it was when the checkpoint was written"
            raise ValueError(fail(called, condition, current, remedy))
    of_torch = sum(_real(parameter).numel() for parameter in group["params"])
    own = _places(group["params"])[1]
    for name in ("d", "prev_flat_grad", "steps", "last_step"):
        numel = own if name in (*_PAIRS, *_LAST) else of_torch
        if name in saved and saved[name] is not None and saved[name].shape[-1] != numel:
            given = f"{saved[name].shape[-1]} of {name}"
            remedy = "load the weights only and let it start anew"
            raise ValueError(fail("state_dict", f"have {numel} entries", given, remedy))
    return loaded
