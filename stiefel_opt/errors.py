"""One grammar for every error message: "`name` must <condition>, got <value>; <remedy>".

Also the checks that all rooms share, and packages that may be missing.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import Self

NOTHING_CONSTRAINED = (
    "no parameter is constrained. Constrain some by so.constrain(module, 'weight'), or pass "
    "stiefel=True for a group; stiefel=False says that this is intended. What torch or geotorch "
    "parametrizes is converted by so.from_torch_orthogonal or so.from_geotorch."
)

CONSTRAINABLE = (
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bfloat16,
    torch.float16,
)

HALF = (torch.bfloat16, torch.float16)


def fail(name: str, condition: str, value: object, remedy: str = "") -> str:
    """Return the text of an error in the grammar above; the caller raises it.

    A batch, matrix or vector is shown by its shape.
    """
    if isinstance(value, torch.Tensor) and value.ndim:
        value = f"shape {tuple(value.shape)}"
    return f"`{name}` must {condition}, got {value}" + (f"; {remedy}" if remedy else "")


def none_found(name: str, wanted: str, model: nn.Module, remedy: str = "") -> str:
    """Return the error message for a model that lacks what ``wanted`` names."""
    return fail(name, f"have {wanted}", f"a {type(model).__name__} of none", remedy)


def how_many(bad: torch.Tensor) -> str:
    """Return how many matrices of a batch are bad, in words: " in 2 of 9 matrices"."""
    return f" in {int(bad.sum())} of {bad.numel()} matrices"


def counted(bad: torch.Tensor) -> str:
    """Return how many of a batch are bad, and which is the first: " in 2 of 9 matrices, ..."."""
    if not bad.ndim:
        return ""
    first = bad.nonzero()[0].tolist()
    index = tuple(first) if len(first) > 1 else first[0]
    return f"{how_many(bad)}, the first at index {index}"


# Of a checkpoint whose keys are those of a parametrization: torch's and geotorch's are the same.
PARAMETRIZED = (
    "load it into the parametrized model that it was saved from, convert that by "
    "so.from_torch_orthogonal(model) or so.from_geotorch(model), and load its state_dict"
)


def users_level() -> int:
    """Return the ``stacklevel`` with which the caller's warning shows the user's own line."""
    frame, level, inner = sys._getframe(1), 1, ("stiefel_opt", "torch")
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        frame, level = frame.f_back, level + 1
    return level


def check_range(
    name: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False
) -> None:
    """Raise unless ``value`` is a number in [low, high), or in (low, high) with ``open_low``."""
    interval = f"{'(' if open_low else '['}{low:g}, {high:g})"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(fail(name, f"be a number in {interval}", repr(value)))
    number = float(value)
    if not low <= number < high or (open_low and number == low):
        raise ValueError(fail(name, f"be in {interval}", value))


def check_integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return ``value``, an integer in [low, high], or raise."""
    interval = f"of at least {low}" if high is None else f"in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(fail(name, f"be an integer {interval}", repr(value)))
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(fail(name, f"be {interval.removeprefix('of ')}", value))
    return number


def check_count(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless ``value`` is a positive integer, or None where that is allowed."""
    if not (or_none and value is None) and (type(value) is not int or value < 1):
        condition = "be a positive integer" + (" or None" if or_none else "")
        raise ValueError(fail(name, condition, repr(value)))


def check_counts(*, or_none: bool = False, **values: object) -> None:
    """Raise unless every value is a positive integer, or None where that is allowed."""
    for name, value in values.items():
        check_count(name, value, or_none=or_none)


def check_options(name: str, options: Collection[str], make: Callable[..., object]) -> None:
    """Raise unless all ``options`` are parameters of ``make``."""
    of_base = {"base", "generator", "manifold", "module", "name"}
    allowed = set(inspect.signature(make).parameters) - of_base
    if unknown := sorted(set(options) - allowed):
        is_torch = {"orthogonal_map", "use_trivialization"} & set(unknown)
        remedy = "choose the map by map=, or take compat.orthogonal; " if is_torch else ""
        remedy += f"its options are: {', '.join(sorted(allowed)) or 'none'}"
        raise TypeError(fail(f"options of {name!r}", "be known", ", ".join(unknown), remedy))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless ``value`` is one of the strings in ``choices``."""
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else ""
        raise ValueError(fail(name, f"be one of {sorted(choices)}", repr(value), remedy))


def check_flag(name: str, value: object) -> None:
    """Raise unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(fail(name, "be True or False", repr(value)))


def check_flags(**values: object) -> None:
    """Raise unless every value is True or False."""
    for name, value in values.items():
        check_flag(name, value)


def check_type(name: str, value: object, kind: Any, condition: str, remedy: str = "") -> None:
    """Raise unless ``value`` is of this type, or of one of several: "be a tensor"."""
    if not isinstance(value, kind):
        raise TypeError(fail(name, condition, type(value).__name__, remedy))


def check_module(name: str, value: object, remedy: str = "") -> None:
    """Raise unless ``value`` is a module."""
    check_type(name, value, nn.Module, "be a torch.nn.Module", remedy)


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise unless matrices of ``dtype`` can be constrained."""
    if dtype not in CONSTRAINABLE:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in CONSTRAINABLE)
        raise TypeError(fail(name, f"be one of {listed} to be constrained", dtype, "convert it"))


def check_writable(name: str, tensor: Tensor) -> None:
    """Raise for a tensor whose elements share memory, as after ``expand``."""
    if 0 in [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]:
        given = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(fail(name, "not repeat elements to be projected", given, "clone it first"))


def type_name(value: object) -> str:
    """Return the name of a type with its package: ``peft.Linear`` is not ``torch.Linear``."""
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"


def classes_of(value: object, package: str) -> set[str]:
    """Return the names of the classes of a package from which the type of ``value`` derives."""
    bases = type(value).__mro__
    return {kind.__name__ for kind in bases if kind.__module__.partition(".")[0] == package}


def listing(names: Sequence[str]) -> str:
    """Return the first twelve names as words of an error message."""
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def find_parameter(module: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter]:
    """Return the owner, the last part of ``name`` and the parameter itself."""
    if not isinstance(name, str):
        given, remedy = repr(name), ""
        if isinstance(name, Tensor):
            named = module.named_parameters(remove_duplicate=False)
            own = next((each for each, parameter in named if parameter is name), "weight")
            given, remedy = f"a tensor of shape {tuple(name.shape)}", f"pass {own!r}"
        raise TypeError(fail("name", "be the name of a parameter", given, remedy))
    path, _, leaf = name.rpartition(".")
    owner = dict(module.named_modules(remove_duplicate=False)).get(path)
    parameter = None if owner is None else owner._parameters.get(leaf)
    if owner is not None and parametrize.is_parametrized(owner, leaf):
        (*_, last) = owner.parametrizations[leaf]
        given = f"one that {type(last).__name__} computes"
        remedy = "remove that (torch.nn.utils.parametrize.remove_parametrizations, so.release)"
        if isinstance(last, parametrizations._Orthogonal):
            remedy = "call so.from_torch_orthogonal(model)"
        elif classes_of(last, "geotorch"):
            remedy = "call so.from_geotorch(model)"
        raise ValueError(fail(name, "be an unconstrained parameter", given, remedy))
    if owner is None or parameter is None:
        names = [each for each, _ in module.named_parameters(remove_duplicate=False)]
        below = [each for each in names if each.startswith(f"{name}.")]  # a module was named
        near = below[:1] or difflib.get_close_matches(name, names, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        listed = f"{hint}its parameters are: {listing(names)}" if names else "it has no parameters"
        kind = type(module).__name__
        raise ValueError(fail("name", f"be a parameter of this {kind}", repr(name), listed))
    if is_lazy(parameter):
        remedy = "run one batch through the lazy module first"
        raise ValueError(fail(name, "have a shape", "an uninitialized parameter", remedy))
    return owner, leaf, parameter


def is_factor(module: nn.Module, name: str) -> bool:
    """Whether a parametrization of torch, or pruning, computes a weight from this parameter."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, parametrize.ParametrizationList):
        return any(type(each).__module__ == parametrizations.__name__ for each in owner)
    weight, _, kind = leaf.rpartition("_")
    computed = [
        hook.name
        if isinstance(hook, (SpectralNorm, WeightNorm))
        else getattr(hook, "_tensor_name", None)  # of pruning, whose module is not imported
        for hook in owner._forward_pre_hooks.values()
    ]
    return kind in ("orig", "g", "v") and weight in computed


# ---- packages that may be missing ----------------------------------------------------------------


def imported(module: str, package: str, otherwise: str = "") -> Any:
    """Return ``module`` of ``package``, or raise an ImportError that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        remedy = f"run: pip install {package}{otherwise}"
        raise ImportError(f"{name} must be installed, got {error}; {remedy}") from error


class ProgressBar:
    """A bar of tqdm if ``shown``; with ``silent`` tqdm is required but nothing appears."""

    def __init__(
        self, total: int | None, shown: bool, *, silent: bool = False, unit: str = "step"
    ) -> None:
        tqdm = imported("tqdm", "tqdm", ", or pass progress=False") if shown else None
        self._bar = None if tqdm is None else tqdm.tqdm(total=total, unit=unit, disable=silent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, steps: int = 1, note: str = "") -> None:
        """Count steps, with a note behind the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(steps)
