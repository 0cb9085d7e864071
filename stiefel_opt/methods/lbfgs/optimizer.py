"""StiefelLBFGS: L-BFGS for constrained and plain parameters together."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import LBFGS
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import HALF, check_choice, check_count, check_range, fail, users_level
from stiefel_opt.methods.lbfgs.line_search import LAST, PAIRS, Closure, Point, Run, as_real, places
from stiefel_opt.numerics import exact_products, is_sharded, orthonormality_tolerance
from stiefel_opt.optim import Group, TaggedOptimizer, check_state_dict
from stiefel_opt.tags import Stiefel, largest_error, nearest, recalled

_NONFINITE: Final = ("skip", "raise")
_LINE_SEARCHES: Final = ("strong_wolfe",)
_step_of_torch: Final = inspect.unwrap(LBFGS.step)  # without hooks: they belong to our step


# ---- the class -----------------------------------------------------------------------------------


class StiefelLBFGS(LBFGS, TaggedOptimizer):
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

    A square matrix keeps the sign of its determinant; :func:`minimize` may try both.
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
        self._own_defaults = {"nonfinite": nonfinite, "stiefel": stiefel}
        numbers = lr, max_iter, max_eval, tolerance_grad, tolerance_change, history_size
        super().__init__(_in_order(params), *numbers, line_search_fn)
        self.warn_if_nothing_is_constrained()

    @override
    def check_options(self, group: Group) -> None:
        """Raise for options that make no sense."""
        _check_options(group)

    @override
    def add_param_group(self, param_group: Group) -> None:
        """Raise for a second group: all parameters are one point, given to the constructor."""
        if self.param_groups:
            remedy = "pass model.parameters() to the constructor: tags say which are constrained"
            raise ValueError(fail("param_group", "be the only one", "a second one", remedy))
        self.defaults.update(self._own_defaults)
        super().add_param_group(self.admitted(param_group))
        self.readings_of(self.param_groups[0])
        self.check_memory()
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
        _check_closure(closure)
        group = self.param_groups[0]
        self.check_options(group)
        self._tags = recalled(self._params, self.__dict__.get("_tags", {}))
        readings = self.readings_of(group)
        _fit_state(self.state, self._params, readings)
        if not any(readings):
            return _step_of_torch(self, closure)
        return _step_on_manifold(self, Point(self._params, readings, self.state), closure)

    @override
    def readings_of(self, group: Group) -> list[Stiefel | None]:
        """Return how each parameter is read; raise for those that cannot be constrained here."""
        return _checked(super().readings_of(group), self.names_of(group["params"]), group)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, here or from ``torch.optim.LBFGS``.

        Of torch's the memory is taken if no parameter is constrained, else the options only.

        Raises:
            ValueError: for the state of another rule, another reading or other shapes. Nothing has
                changed then.
            TypeError: for what is no state_dict.
        """
        super().load_state_dict(_loadable(state_dict, self))

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._params, self._numel_cache = self.param_groups[0]["params"], None

    @override
    def skipped_steps_of(self) -> dict[Tensor, int]:
        """Return what :meth:`skipped_steps` does, by parameter."""
        return {p: state["skipped"] for p, state in self.state.items() if "skipped" in state}

    def angles_of(self) -> dict[Tensor, float]:
        """Return by how much, in radians, the last iteration has turned each parameter."""
        return {p: state["angle"] for p, state in self.state.items() if "angle" in state}


# ---- what the class looks after ------------------------------------------------------------------


def _in_order(params: ParamsT) -> ParamsT:
    """Return ``params``; raise for a set: they are the entries of one point."""
    if isinstance(params, set):
        raise TypeError(fail("params", "have an order", "a set", "pass a list"))
    return params


def _check_closure(closure: object) -> None:
    """Raise unless the loss can be evaluated."""
    if not callable(closure):
        remedy = "L-BFGS evaluates the loss several times in a step"
        raise TypeError(fail("closure", "be a function", type(closure).__name__, remedy))


def _check_options(group: Group) -> None:
    """Raise for options that make no sense."""
    for name in ("max_iter", "max_eval", "history_size"):
        check_count(name, group[name])
    for name in ("tolerance_grad", "tolerance_change"):
        check_range(name, group[name], -math.inf)
    if group["line_search_fn"] is not None:
        check_choice("line_search_fn", group["line_search_fn"], _LINE_SEARCHES)
    check_choice("nonfinite", group["nonfinite"], _NONFINITE)


def _checked(
    readings: list[Stiefel | None], names: Sequence[str], group: Group
) -> list[Stiefel | None]:
    """Return the readings; raise where one is tagged, for those that cannot share its memory."""
    parameters = group["params"]
    if not any(readings):
        return readings
    for called, parameter, manifold in zip(names, parameters, readings, strict=True):
        if is_sharded(parameter):
            remedy = "train it with so.StiefelSGD or so.StiefelAdam, or hold it in one process"
            raise TypeError(fail(called, "be no DTensor for StiefelLBFGS", "one", remedy))
        if manifold is not None and parameter.dtype in HALF:
            wanted = "be of float32 or float64 for StiefelLBFGS"
            remedy = "convert it: differences of its gradients would be rounding"
            raise TypeError(fail(called, wanted, parameter.dtype, remedy))
        if parameter.dtype.to_real() != (precision := parameters[0].dtype.to_real()):
            wanted = f"be as precise as the first parameter, {precision}"
            remedy = "convert all to one precision: they share one memory"
            raise TypeError(fail(called, wanted, parameter.dtype, remedy))
    return readings


def _as_data(readings: Sequence[Stiefel | None]) -> list[Any]:
    return [None if manifold is None else manifold.as_dict() for manifold in readings]


def _step_on_manifold(optimizer: StiefelLBFGS, point: Point, closure: Closure) -> Any:
    """Do what :meth:`StiefelLBFGS.step` does where a parameter is constrained."""
    group = optimizer.param_groups[0]
    _settle(optimizer, point)
    run = Run(point, group, torch.enable_grad()(closure))
    returned = run.run()
    for parameter, angle in run.line.angles().items() if run.line is not None else ():
        point.states[parameter]["angle"] = angle
    if run.failure:
        warnings.warn(run.failure, stacklevel=users_level())
    if not run.is_finite:
        _report_nonfinite(optimizer, point)
    return returned


def _fit_state(states: Any, params: list[Tensor], readings: Sequence[Stiefel | None]) -> None:
    """Forget pairs of other readings or another precision, and torch's pairs if tags are new."""
    state, data = states.get(params[0], {}), _as_data(readings) if any(readings) else None
    is_fit = not state or state.get("readings") == data
    dtypes = [state[name].dtype for name in (*PAIRS, *LAST) if name in state]
    if not is_fit or any(dtype != params[0].dtype.to_real() for dtype in dtypes):
        for parameter in params:
            states.pop(parameter, None)
    if data is not None:
        states[params[0]]["readings"] = data


def _settle(optimizer: StiefelLBFGS, point: Point) -> None:
    """Replace matrices that are off the manifold by the nearest ones, and say so."""
    off: list[Tensor] = []
    for parameter, reading in zip(point.parameters, point.readings, strict=True):
        if reading is None:
            continue
        rounding = orthonormality_tolerance(parameter.dtype, max(reading.heights(parameter.shape)))
        with exact_products(parameter):
            error = largest_error(parameter, reading)
        if error <= 10 * rounding:
            continue
        (name,) = optimizer.names_of([parameter])
        if (found := nearest(parameter, reading, name)) is not None:
            parameter.copy_(found)
            off.append(parameter)
    if off:
        point.forget()
        called = ", ".join(optimizer.names_of(off))
        warnings.warn(
            f"{called}: off the manifold where the step begins, so that the nearest orthonormal "
            "matrices were taken and the memory of pairs starts anew. "
            "so.project_(model) projects weights that were written to",
            stacklevel=users_level(),
        )
    if not any("reference" in point.states[parameter] for parameter in point.parameters):
        point.refer_here()


def _report_nonfinite(optimizer: StiefelLBFGS, point: Point) -> None:
    """Count the step as missed by those whose gradient was not finite; warn or raise."""
    bad = [p for p in point.parameters if p.grad is not None and not bool(p.grad.isfinite().all())]
    for parameter in bad or point.parameters:
        state = point.states[parameter]
        state["skipped"] = state.get("skipped", 0) + 1
    called = ", ".join(f"grad of {name}" for name in optimizer.names_of(bad)) or "loss"
    if optimizer.param_groups[0]["nonfinite"] == "raise":
        remedy = "look for its cause; the parameters are where it was finite"
        raise ValueError(fail(called, "be finite", "NaN or inf", remedy))
    warnings.warn(
        f"{called}: not finite, or too long to be squared; the parameters keep their last values "
        "with a finite loss. Look for its cause; nonfinite='raise' stops there.",
        stacklevel=users_level(),
    )


def _loadable(state_dict: Any, optimizer: StiefelLBFGS) -> dict[str, Any]:
    """Return a copy of ``state_dict`` for torch to load; raise if it is of something else."""
    check_state_dict(state_dict)
    loaded: dict[str, Any] = copy.deepcopy(dict(state_dict))
    groups = loaded["param_groups"]
    if len(groups) != 1 or "history_size" not in groups[0]:
        remedy = "load the weights only and let it start anew"
        raise ValueError(fail("state_dict", "be one of StiefelLBFGS or LBFGS", "another", remedy))
    group = optimizer.param_groups[0]
    readings = optimizer.readings_of(group)
    for name in ("nonfinite", "stiefel"):  # torch's has none
        groups[0][name] = group[name]
    saved = loaded["state"].get(0, {})
    if "readings" not in saved and any(readings):
        loaded["state"] = {}
        return loaded
    earlier = saved.get("readings", [None] * len(readings))
    for parameter, current, other in zip(group["params"], readings, earlier, strict=False):
        before = None if other is None else Stiefel.from_dict(other)
        ndim = parameter.ndim
        if current != before and not (current and before and current.on(ndim) == before.on(ndim)):
            called = f"reading of {optimizer.names_of([parameter])[0]}"
            remedy = "constrain it as it was when the checkpoint was written"
            raise ValueError(fail(called, f"be the saved one, {before}", current, remedy))
    if "readings" in saved:  # perhaps said in another way
        saved["readings"] = _as_data(readings)
    of_torch = sum(as_real(parameter).numel() for parameter in group["params"])
    own = places(group["params"])[1]
    for name in ("d", "prev_flat_grad", "steps", "last_step"):
        numel = own if name in (*PAIRS, *LAST) else of_torch
        if name in saved and saved[name] is not None and saved[name].shape[-1] != numel:
            given = f"{saved[name].shape[-1]} of {name}"
            remedy = "load the weights only and let it start anew"
            raise ValueError(fail("state_dict", f"have {numel} entries", given, remedy))
    return loaded
