"""Any ``torch.optim.Optimizer`` on constrained weights: hooks before and after its step.

Constrained matrices of equal shape are one batch. With X before a step and X + D behind it, the
step becomes the tangent vector nearest to D, and X its polar retraction.
"""

from __future__ import annotations

import functools
import math
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from stiefel_opt.errors import NOTHING_CONSTRAINED, check_dtype, fail, users_level
from stiefel_opt.numerics import (
    add_to_diagonal_,
    are_finite,
    exact_products,
    gram,
    infinity_norm,
    is_compiling,
    is_sharded,
    largest_bound,
    orthonormality_tolerance,
    polar,
    reader_for,
    roots,
    tangent_part,
    widened,
)
from stiefel_opt.tags import (
    Block,
    Stack,
    Stiefel,
    inner_optimizers,
    is_own,
    mark_unconstrained,
    reading_by,
    recalled,
    stacks_of,
    to_nearest_,
    trust,
)

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_KEEPER: Final = "_stiefel_keeper"  # on an optimizer
# A longer step would turn by hardly more: atan(8) is 83 degrees.
_LONGEST: Final = 64.0  # its square
_SECOND_WEIGHTS: Final = re.compile("schedulefree|lookahead|ranger|sam$|^trac$", re.IGNORECASE)


def on_manifold(optimizer: OptimizerT) -> OptimizerT:
    r"""Let any optimizer keep constrained weights orthonormal; returns the same object.

    For a constrained weight X the optimizer gets the tangent part of the gradient G. The tangent
    part of its step D is then taken by the polar retraction:

    .. math::
        G \to G - X\,\mathrm{sym}(X^\top G),\quad
        \xi = D - X\,\mathrm{sym}(X^\top D),\quad X \leftarrow (X + \xi)(I + \xi^\top\xi)^{-1/2}

    Plain weights get the optimizer's own bits. Checkpoints, schedules, closures, gradient scaling
    and groups added later work as before. ``p.grad`` of a constrained weight stays as it is.
    Momentum stays in the coordinates of the weight, while that of
    :class:`stiefel_opt.StiefelAdam` and :class:`stiefel_opt.StiefelSGD` turns with the point.

    A square matrix keeps the sign of its determinant; the other component is never tried.

    Args:
        optimizer: A ``torch.optim.Optimizer``, of torch or of another package. Constrained are
            parameters with a tag (:func:`stiefel_opt.constrain`) and parameters in groups of
            :func:`stiefel_opt.param_groups`.

    Returns: The optimizer. A second call changes nothing.
    Raises:
        TypeError: if ``optimizer`` is no optimizer, runs no step hooks, is of this package, wraps
            another optimizer, keeps second weights (schedule-free, Lookahead, Ranger, SAM), moves
            weights during the backward pass (LOMO), or takes sparse gradients only. Before a step:
            for sharded weights and sparse gradients.
        ValueError: before a step, for ``capturable`` and ``differentiable`` groups.

    Note:
        Six products of n x m by m x m a step, seven off a CPU and for long steps, batched over
        equal matrices, no factorisation; four copies of the constrained weights while it lasts.
        Decoupled weight decay, and that of SGD, does not move a constrained weight; that of Adam
        does. A weight off the manifold is projected by the next step; after a write to ``.data``,
        which leaves no trace, several steps bring it there. A matrix whose gradient is not finite
        gets a gradient of zero in this step, on a CPU with a warning. In half precision there is no
        float32 master: steps below rounding are lost. A closure is evaluated on the manifold, with
        the gradient of the loss behind the retraction. A step that raises leaves constrained
        weights, and their gradients, as they were. Copies of the optimizer (``copy.deepcopy``,
        pickle) lose all step hooks, as always in torch: call this on the copy.
    Reference: Absil, Mahony & Sepulchre, Optimization algorithms on matrix manifolds (2008), 4.1.
    """
    if not isinstance(optimizer, Optimizer):
        given = type(optimizer).__name__
        raise TypeError(fail("optimizer", "be a torch.optim.Optimizer", given))
    if _KEEPER in vars(optimizer):
        return optimizer
    _refuse(optimizer)
    keeper = _Keeper()
    keeper.recall(optimizer)
    outside: Any = functools.partial(torch.compiler.disable, reason="so.on_manifold needs values")
    optimizer.register_step_pre_hook(outside(keeper.before))
    last = optimizer.register_step_post_hook(outside(keeper.after))
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(last.id, last=False)  # all others see points of the manifold
    optimizer.register_step_post_hook(outside(keeper.behind_others))
    vars(optimizer)[_KEEPER] = keeper
    vars(optimizer)["step"] = types.MethodType(_undone_if_it_fails(optimizer, keeper), optimizer)
    trust(optimizer)
    is_open = any(group.get("stiefel") is not False for group in optimizer.param_groups)
    if is_open and not _constrained(optimizer):
        warnings.warn(NOTHING_CONSTRAINED, stacklevel=2)
    return optimizer


def _undone_if_it_fails(optimizer: Optimizer, keeper: _Keeper) -> Callable[..., Any]:
    """Return the step of an optimizer; where it raises, constrained weights go back."""
    step: Any = optimizer.step

    @functools.wraps(step)
    def guarded(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return step(*args, **kwargs)
        try:
            return step(*args, **kwargs)
        except BaseException:
            keeper.go_back()
            raise

    return guarded


def _refuse(optimizer: Optimizer) -> None:
    """Raise for optimizers whose steps hooks cannot keep on the manifold."""
    name = type(optimizer).__name__
    if is_own(optimizer):
        remedy = "it keeps constrained weights by itself"
        raise TypeError(fail("optimizer", "be of another package", name, remedy))
    kinds = [kind.__name__.replace("_", "") for kind in type(optimizer).__mro__]
    has_second_weights = any(map(_SECOND_WEIGHTS.search, kinds))
    for value in () if has_second_weights else inner_optimizers(optimizer):
        given = f"{name} around {type(value).__name__}"
        remedy = "call so.on_manifold(optimizer) first, or leave the wrapper out"
        raise TypeError(fail("optimizer", "step the weights itself", given, remedy))
    if hasattr(optimizer, "fused_backward"):
        remedy = "it moves them during the backward pass, where no hook of a step runs"
        raise TypeError(fail("optimizer", "move weights in its step", name, remedy))
    # Methods of these names swap the weights that train for their average, and back.
    if has_second_weights or all(hasattr(optimizer, method) for method in ("train", "eval")):
        wanted = "keep no second set of weights"
        remedy = "what it averages or restores is off the manifold; take so.StiefelAdamW"
        raise TypeError(fail("optimizer", wanted, name, remedy))
    if "SparseAdam" in kinds:
        raise TypeError(fail("optimizer", "take dense gradients", name))
    if not getattr(type(optimizer).step, "hooked", False):
        remedy = "its __init__ must call torch.optim.Optimizer.__init__"
        raise TypeError(fail("optimizer", "run the step hooks of torch", name, remedy))


# ---- which weights -----------------------------------------------------------------------------


class _Weight(NamedTuple):
    parameter: Tensor
    reading: Stiefel
    name: str  # as the group has it, or ""

    def called(self) -> str:
        """Return what an error calls it."""
        return self.name or f"parameter of shape {tuple(self.parameter.shape)}"


def _constrained(optimizer: Optimizer) -> list[_Weight]:
    """Return the constrained parameters of all groups."""
    weights = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [""] * len(group["params"])
        for parameter, name in zip(group["params"], names, strict=True):
            reading = reading_by(group.get("stiefel"), parameter)
            if reading is not None:
                weights.append(_Weight(parameter, reading, name))
    return weights


def _is_moved(parameter: Tensor) -> bool:
    """Say whether a parameter is trained; others may move by what an optimizer remembers."""
    return parameter.requires_grad or parameter.grad is not None


# ---- the hooks ---------------------------------------------------------------------------------


class _Keeper:
    """The two hooks of one optimizer, and what they remember between them."""

    def __init__(self) -> None:
        self._weights: list[_Weight] = []  # of the step before
        self._values: list[Tensor] = []  # of their parameters
        self._stacks: list[Stack] = []
        self._points: list[Tensor] = []  # X of each stack during a step
        self._plain: list[Tensor] = []  # rows of constrained weights that are plain
        self._kept: list[Tensor] = []  # their values of before a step
        self._grads: list[tuple[Tensor, Tensor, Tensor]] = []  # parameter, its gradient, ours
        self._written: dict[Tensor, tuple[int, int]] = {}  # memory and version behind a step
        self._tags: dict[Tensor, Any] = {}  # by parameter, as they were last seen
        self._depth = 0  # of steps that a step makes of the class it derives from
        self._is_scaled = False  # whether a GradScaler lets the optimizer judge the gradients

    def recall(self, optimizer: Optimizer) -> None:
        """Remember the tags, and put back those that are lost; mark who is unconstrained."""
        params = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for group in optimizer.param_groups:
            mark_unconstrained(group["params"], group.get("stiefel") is False)
        self._tags = recalled(params, self._tags)

    @torch.no_grad()
    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Hook before a step: make gradients tangent, now or behind the closure."""
        if self._points:  # a step that raises goes back, so that this one is within another
            self._depth += 1
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.recall(optimizer)
        weights = _constrained(optimizer)
        known = self._written
        self._written = {w.parameter: known[w.parameter] for w in weights if w.parameter in known}
        if closure is None:
            weights = [weight for weight in weights if weight.parameter.grad is not None]
        else:  # a momentum may move what is frozen
            weights = [weight for weight in weights if self._may_move(optimizer, weight.parameter)]
        self._begin(optimizer, weights)
        self._is_scaled = getattr(optimizer, "found_inf", None) is not None
        if closure is None:
            self._make_tangent()
            return None
        wrapped = self._on_points(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    @torch.no_grad()
    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook after a step: give the gradients back, and move along the tangent part."""
        if self._depth:
            self._depth -= 1
            return
        self._give_back()
        for stack, point in zip(self._stacks, self._points, strict=True):
            with exact_products(point):
                _move(stack, self._values, point, type(optimizer).__name__)
        self._points = []
        for weight in self._weights:
            self._written[weight.parameter] = _version_of(weight.parameter)

    @torch.no_grad()
    def go_back(self) -> None:
        """Undo a step that has raised: the gradients are those of before, and so are the points."""
        self._give_back()
        self._depth = 0
        points, self._points = self._points, []
        for stack, point in zip(self._stacks if points else (), points, strict=True):
            stack.write(self._values, point)
        for rows, kept in zip(self._plain, self._kept if points else (), strict=False):
            rows.copy_(kept)
        for weight in self._weights if points else ():
            self._written[weight.parameter] = _version_of(weight.parameter)

    @torch.no_grad()
    def behind_others(self, optimizer: Optimizer, *_: Any) -> None:
        """Hook after a step, behind those of others: project what they have written."""
        changed = [] if self._points else self._changed(self._weights)
        if not changed:
            return
        still = set(map(_key, _constrained(optimizer)))  # a hook may release, or read otherwise
        for weight in changed:
            if _key(weight) not in still or not bool(weight.parameter.isfinite().all()):
                continue
            self._project([weight])
            version = _version_of(weight.parameter)
            if version[0] == self._written[weight.parameter][0]:  # else the next step looks again
                self._written[weight.parameter] = version

    def _may_move(self, optimizer: Optimizer, parameter: Tensor) -> bool:
        return (
            _is_moved(parameter)
            or parameter in self._written
            or bool(optimizer.state.get(parameter))
            or any("old_dirs" in state for state in optimizer.state.values())  # LBFGS: of all
        )

    def _begin(self, optimizer: Optimizer, weights: list[_Weight]) -> None:
        """Remember the points. What is new, or written to by others, is looked at."""
        changed = self._changed(weights)
        _check(optimizer, weights, changed)
        self._project(
            [w for w in changed if _is_moved(w.parameter) or w.parameter in self._written]
        )
        if changed or list(map(_key, weights)) != list(map(_key, self._weights)):
            self._weights, self._values = weights, [w.parameter.detach() for w in weights]
            self._stacks = stacks_of(self._values, [weight.reading for weight in weights])
            pairs = zip(self._values, weights, strict=True)
            self._plain = [part for value, w in pairs for part in w.reading.plain_parts(value)]
            self._kept = list(map(torch.empty_like, self._plain))
        self._points = self._here()
        if self._plain:
            torch._foreach_copy_(self._kept, self._plain)

    def _changed(self, weights: list[_Weight]) -> list[_Weight]:
        """Return those that are new, or written to behind the step before."""
        known = self._written
        return [w for w in weights if known.get(w.parameter) != _version_of(w.parameter)]

    def _project(self, weights: list[_Weight]) -> None:
        for weight in weights:
            to_nearest_(weight.parameter, weight.reading, weight.called())

    def _here(self) -> list[Tensor]:
        """Return the values of the parameters in new memory, in float32 at least."""
        return [widened(stack.read(self._values)) for stack in self._stacks]

    def _make_tangent(self, moved: list[Tensor] | None = None) -> None:
        """Replace each gradient by its tangent part, and keep the original to give it back.

        Args:
            moved: Tangent vectors at the points. The gradients are then those at their retractions,
                and are first converted to gradients by the tangent vectors. Default: none.
        """
        ours: dict[int, Tensor] = {}
        grads = [weight.parameter.grad for weight in self._weights]
        pairs = zip(self._values, grads, strict=True)
        whole = [torch.zeros_like(value) if grad is None else grad for value, grad in pairs]
        for place, (stack, point) in enumerate(zip(self._stacks, self._points, strict=True)):
            grad = _finite(widened(stack.read(whole)), self._is_scaled)
            with exact_products(point):
                x = _unscaled(point, stack)
                if moved is not None:
                    grad = _pulled_back(x, moved[place], grad)
                tangents = tangent_part(x, grad)
            for block, piece in stack.pieces(tangents):
                if (own := grads[block.place]) is not None:
                    ours[block.place] = _given(block, piece, own, ours.get(block.place))
        for place, tangent in ours.items():
            parameter = self._weights[place].parameter
            self._grads.append((parameter, whole[place], tangent))
            parameter.grad = tangent

    def _give_back(self) -> None:
        for parameter, grad, tangent in self._grads:
            if parameter.grad is tangent:
                parameter.grad = grad
        self._grads = []

    def _on_points(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure that evaluates the model on the manifold and then makes tangent.

        Optimizers that call it several times have moved the weights by D: what they see is the loss
        at the retraction of D, and its gradient by D.
        """

        def evaluate() -> Any:
            with torch.no_grad():
                self._give_back()
                here = self._here()
                moved = None
                if not all(map(torch.equal, here, self._points)):
                    pairs = zip(self._stacks, self._points, strict=True)
                    moved = [_move(stack, self._values, point) for stack, point in pairs]
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                _check_gradients(self._weights)
                self._make_tangent(moved)
                if moved is not None:
                    for stack, matrices in zip(self._stacks, here, strict=True):
                        stack.write(self._values, matrices)
            return loss

        return evaluate


def _key(weight: _Weight) -> tuple[int, Stiefel]:
    return id(weight.parameter), weight.reading


def _version_of(parameter: Tensor) -> tuple[int, int]:
    """Return what changes where somebody writes to ``parameter``, or moves it."""
    return parameter.data_ptr(), parameter._version


def _check(optimizer: Optimizer, weights: list[_Weight], changed: list[_Weight]) -> None:
    """Raise before a step that would leave constrained weights off the manifold."""
    for option in ("capturable", "differentiable") if weights else ():
        if any(group.get(option) for group in optimizer.param_groups):
            remedy = "a replayed or differentiated step runs no hooks"
            raise ValueError(fail(option, "be False for so.on_manifold", True, remedy))
    for weight in changed:
        name = weight.called()
        weight.reading.check(weight.parameter.shape, name)
        check_dtype(name, weight.parameter.dtype)
        if weight.reading.learn_scale:
            remedy = "take so.StiefelAdamW, or constrain it without"
            wanted = "be False for so.on_manifold, whose optimizer knows no scale"
            raise ValueError(fail(f"learn_scale of {name}", wanted, True, remedy))
        if is_sharded(weight.parameter):
            remedy = "take so.StiefelAdamW"
            raise TypeError(fail(name, "not be sharded for so.on_manifold", "a DTensor", remedy))
    _check_gradients(weights)


def _check_gradients(weights: list[_Weight]) -> None:
    for weight in weights:
        grad = weight.parameter.grad
        if grad is not None and grad.layout is not torch.strided:
            wanted = "have a dense gradient to be constrained"
            raise TypeError(fail(weight.called(), wanted, str(grad.layout)))


def _given(block: Block, tangent: Tensor, grad: Tensor, ours: Tensor | None) -> Tensor:
    """Return the new gradient of a parameter, with the tangent vectors of a block."""
    if block.is_all:
        stored = block.as_stored(tangent)
        is_like = (stored.dtype, stored.stride()) == (grad.dtype, grad.stride())
        return stored if is_like else torch.empty_like(grad).copy_(stored)
    ours = grad.clone() if ours is None else ours
    block.write(ours, tangent)
    return ours


# ---- on batches --------------------------------------------------------------------------------


def _finite(grad: Tensor, is_expected: bool) -> Tensor:
    """Return gradients, zero for the matrices where they are not finite; warn if unexpected."""
    reads = reader_for(grad).is_exact
    if reads and bool(torch.isfinite(grad.sum())):
        return grad
    ok = are_finite(grad)[:, None, None]
    if reads and not is_expected and not bool(ok.all()):
        count, size = int((~ok).sum()), " x ".join(map(str, grad.shape[-2:]))
        warnings.warn(
            f"the gradients of {count} constrained matrices of {size} are not finite: zero takes "
            "their place in this step",
            stacklevel=users_level(),
        )
    return torch.where(ok, grad, 0.0)


def _unscaled(matrices: Tensor, stack: Stack) -> Tensor:
    return matrices if stack.scale == 1.0 else matrices / stack.scale


def _move(stack: Stack, values: list[Tensor], point: Tensor, rule: str = "the optimizer") -> Tensor:
    """Write the retraction of what has moved from ``point``, and return the tangent vectors.

    Matrices that have not moved keep their bits; what is not finite goes back to ``point``.
    """
    here = widened(stack.read(values))
    step = here - point
    size = step.abs().amax(dim=(-2, -1), keepdim=True)
    reads = reader_for(size).is_exact
    least, largest = map(float, torch.aminmax(size)) if reads else (0.0, math.inf)
    x, step = _unscaled(point, stack), _unscaled(_measured(step, size, largest, stack.scale), stack)
    new_point, tangent = _retracted(x, tangent_part(x, step))
    if stack.scale != 1.0:
        new_point = new_point * stack.scale
    if reads and least != 0 and bool(torch.isfinite(new_point.sum())):  # NaN has moved
        stack.write(values, new_point)
        return tangent
    ok = are_finite(new_point)[:, None, None]
    if reads and not bool(ok.all()):
        shape = " x ".join(map(str, point.shape[-2:]))
        warnings.warn(
            f"{rule} has moved constrained matrices of {shape} to values that are not finite: they "
            "stay where they were",
            stacklevel=users_level(),
        )
    stack.write(values, torch.where(size != 0, torch.where(ok, new_point, point), here))
    return tangent


def _measured(step: Tensor, size: Tensor, largest: float, scale: float) -> Tensor:
    """Return steps, shortened where rounding of X'X times their length would not be small.

    ``size`` is their largest entry, ``largest`` that of all, or inf where nothing is read. What is
    tangent in a longer step is nothing but rounding.
    """
    most = 0.1 * scale / orthonormality_tolerance(step.dtype, step.size(-2))
    most /= math.sqrt(step.size(-2) * step.size(-1))
    if largest <= most:
        return step
    return step * (most / size).clamp(max=1.0)


def _retracted(point: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Return (X + xi)(I + xi'xi)^(-1/2), and xi, shortened where its norm may exceed 8.

    The inverse root is that of the Gram matrix as it is, so that rounding does not add up.
    """
    moved = point + tangent
    excess = add_to_diagonal_(gram(moved), -1.0)
    reads = reader_for(excess).is_exact
    limit = largest_bound(excess) if reads else _LONGEST
    if not (reads and limit <= _LONGEST):
        tangent = tangent * (_LONGEST / infinity_norm(excess)).clamp(max=1.0).sqrt()
        moved = point + tangent
        # not the old one times a number: an error of X would grow from step to step
        excess, limit = add_to_diagonal_(gram(moved), -1.0), 1.01 * _LONGEST
    new_point: Tensor = moved @ roots(excess, limit, reads=reads).inverse_root
    return new_point, tangent


def _pulled_back(point: Tensor, tangent: Tensor, grad: Tensor) -> Tensor:
    r"""Return the gradient by :math:`\xi` of a function with gradient G at the retraction of xi."""
    with torch.enable_grad():
        moved = (point + tangent).requires_grad_()
        (pulled,) = torch.autograd.grad(polar(moved)[0], moved, grad)
    return pulled
