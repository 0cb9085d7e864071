"""A warning where an optimizer of another package is about to step weights that carry a tag."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from stiefel_opt.errors import classes_of, fail, users_level
from stiefel_opt.numerics.device import is_compiling

_LOOKED: Final = "_stiefel_looked"  # on an optimizer: tags and groups when it was seen
_TRUSTED: Final = "_stiefel_trusted"  # on an optimizer or its class: it keeps constrained weights
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # for the names of weights
_tags = 0

OptimizerT = TypeVar("OptimizerT", bound="Optimizer | type[Optimizer]")


def note_tag() -> None:
    """Count a new tag: every optimizer is looked at once more, before its next step."""
    global _tags
    if not _tags:
        register_optimizer_step_pre_hook(_look)
    _tags += 1


def note_module(module: nn.Module) -> None:
    """Remember a module, weakly, for the names of tagged weights below it."""
    _modules[id(module)] = module


def known_modules() -> list[nn.Module]:
    """Return the modules that live and in which something was constrained."""
    return list(_modules.values())


def trust(optimizer: OptimizerT) -> OptimizerT:
    """Say that an optimizer of your own keeps constrained weights orthonormal: none warns of it.

    A weight says by its attribute ``manifold`` how it is constrained. Nothing is checked here: see
    :func:`stiefel_opt.orthonormality_error`.

    Args:
        optimizer: An optimizer, or a class of optimizers, as by the decorator ``@so.trust``.

    Returns: The same.
    Raises:
        TypeError: if it is neither.
    """
    is_class = isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    if not (is_class or isinstance(optimizer, Optimizer)):
        given = type(optimizer).__name__
        raise TypeError(fail("optimizer", "be a torch.optim.Optimizer or a class of them", given))
    setattr(optimizer, _TRUSTED, True)
    return optimizer


def _look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    """Hook before every step of every optimizer."""
    if WHILE_COMPILING or not is_compiling():
        _look_at(optimizer)


def _look_at(optimizer: Optimizer) -> None:
    """Warn of tagged weights of another package's optimizer, if tags or groups are new."""
    seen = _tags + len(optimizer.param_groups)  # both only grow
    if optimizer.__dict__.get(_LOOKED, -1) >= seen:
        return
    keeps = any(map(_keeps, (optimizer, *inner_optimizers(optimizer))))
    tagged = _tagged(optimizer)
    for parameter in tagged:
        parameter.is_stepped = True
    at_risk = [p for p in tagged if p.requires_grad and not keeps]
    if keeps or at_risk:
        optimizer.__dict__[_LOOKED] = math.inf
    elif not tagged:  # a frozen weight may thaw: it is looked at before every step
        optimizer.__dict__[_LOOKED] = seen
    for group in optimizer.param_groups if keeps else ():
        for parameter in group["params"] if group.get("stiefel") is False else ():
            parameter.is_unconstrained = True  # the tags are to be ignored
    if at_risk:
        others = f" and {len(at_risk) - 1} more" if len(at_risk) > 1 else ""
        is_learned = any(parameter.manifold.learn_scale for parameter in at_risk)
        kept = "" if is_learned else "keep this one by so.on_manifold(optimizer); or "
        warnings.warn(
            f"{_name_of(at_risk[0])}{others} would not stay orthonormal: "
            f"{type(optimizer).__name__} knows no constraint. Train with an optimizer of this "
            f"package, such as so.StiefelAdamW; or {kept}"
            "parametrize the weight by so.orthogonal; or so.release it. If this one keeps the "
            "constraint by itself, say so by so.trust(optimizer)",
            stacklevel=users_level(),
        )


# While a step is compiled, it is called instead of traced. This is what the decorator
# torch.compiler.assume_constant_result does, which imports the compiler; only since torch 2.13
# such a function may take an optimizer.
WHILE_COMPILING: Final = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
_look_at._dynamo_marked_constant = True  # type: ignore[attr-defined]


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that one wraps, each by itself or in a list or dictionary."""
    held: list[Any] = []
    for value in vars(optimizer).values():
        values = value.values() if isinstance(value, dict) else value
        held += values if isinstance(value, (dict, list, tuple)) else (value,)
    return [each for each in held if isinstance(each, Optimizer)]


def is_own(thing: object) -> bool:
    """Say whether the class of ``thing``, or one that it derives from, is of this package."""
    return bool(classes_of(thing, __name__.partition(".")[0]))


def _keeps(optimizer: Optimizer) -> bool:
    return is_own(optimizer) or hasattr(optimizer, _TRUSTED)


def _tagged(optimizer: Optimizer) -> list[Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tagged = [p for p in parameters if is_own(getattr(p, "manifold", None))]
    return [p for p in tagged if not hasattr(p, "is_unconstrained")]


def _name_of(parameter: Tensor) -> str:
    """Return the longest name that a parameter has below a module that is known."""
    names = [
        name
        for module in known_modules()
        for name, other in module.named_parameters(remove_duplicate=False)
        if other is parameter
    ]
    return f"`{max(names, key=len)}`" if names else f"A weight of shape {tuple(parameter.shape)}"
