"""Conversion of constraints of other packages to tagged parameters with the same values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from stiefel_opt.errors import check_dtype, check_flag, check_module, classes_of, fail, none_found
from stiefel_opt.tags import Stiefel, check_value, constrain

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def from_torch_orthogonal(model: ModuleT) -> ModuleT:
    """Turn every weight of ``torch.nn.utils.parametrizations.orthogonal`` into a tagged parameter.

    The weight keeps its value and its name: ``parametrizations.weight.original`` becomes ``weight``
    again, the same parameter without its gradient, and the n x n ``base`` is freed. As with torch,
    the last two dimensions are the matrix, for convolutions too.

    Args:
        model: A model with such weights; changed in place and returned.

    Raises:
        ValueError: if it has none, one that further parametrizations share, or one that is not
            finite; nothing is changed.
        TypeError: for dtypes that :func:`stiefel_opt.constrain` refuses.
    Note: Values that are off by more than rounding become the nearest point. Build the optimizer
        afterwards: state of the former weight means nothing to the new one. To move a checkpoint,
        load it into the parametrized model first.
    """
    kind, called = parametrizations._Orthogonal, "torch.nn.utils.parametrizations.orthogonal"
    return _unparametrized(model, lambda module: isinstance(module, kind), called)


def from_geotorch(model: ModuleT) -> ModuleT:
    """Turn every weight of ``geotorch.orthogonal`` into a tagged parameter.

    As :func:`from_torch_orthogonal`, with its errors, for the classes ``Stiefel`` and ``SO`` of
    geotorch. Weights under other constraints of geotorch stay as they are.

    Args:
        model: A model with such weights; changed in place and returned.
    """
    kinds, called = {"SO", "Stiefel"}, "geotorch.orthogonal"
    return _unparametrized(
        model, lambda module: bool(kinds & classes_of(module, "geotorch")), called
    )


def from_geoopt(model: ModuleT, *, strict: bool = False) -> ModuleT:
    """Turn every ``geoopt.ManifoldParameter`` on a Stiefel manifold into a tagged parameter.

    The parameter objects stay the same, and so do their values, where they are off by more than
    rounding up to the nearest point. Those on geoopt's Euclidean manifold become plain. Those on
    other manifolds stay geoopt's, and a warning and :func:`stiefel_opt.report` name them:
    :func:`stiefel_opt.param_groups` leaves them out, an optimizer of geoopt trains them.

    Args:
        model: A model with such parameters; changed in place and returned.
        strict: Raise for a parameter on another manifold. Default: no.

    Raises:
        ValueError: if it has none, or with ``strict`` one on another manifold; nothing is changed.
        TypeError: for dtypes that :func:`stiefel_opt.constrain` refuses.
    Note: The metric of geoopt, canonical by default, is an option of the optimizers here:
        ``so.StiefelSGD(..., metric="canonical")``.
    """
    check_module("model", model)
    stiefel: dict[int, tuple[str, Tensor]] = {}
    plain: dict[int, Tensor] = {}
    left: dict[int, str] = {}
    check_flag("strict", strict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        manifold = getattr(parameter, "manifold", None)
        kinds = classes_of(manifold, "geoopt")
        if "Stiefel" in kinds:
            check_dtype(name, parameter.dtype)
            stiefel.setdefault(id(parameter), (name, parameter))
        elif "Euclidean" in kinds:
            plain[id(parameter)] = parameter
        elif kinds and strict:
            remedy = "replace it by an nn.Parameter, or pass strict=False: it stays geoopt's"
            condition = "be on a Stiefel manifold to be converted"
            raise ValueError(fail(name, condition, repr(manifold), remedy))
        elif kinds:
            left.setdefault(id(parameter), f"`{name}` ({type(manifold).__name__})")
    if not stiefel:
        wanted = "a geoopt.ManifoldParameter on a Stiefel manifold"
        raise ValueError(none_found("model", wanted, model))
    converted: list[Tensor] = [*plain.values(), *(parameter for _, parameter in stiefel.values())]
    for tensor in converted:
        del tensor.manifold  # type: ignore[attr-defined]
        tensor.__class__ = nn.Parameter  # the same object, so that tied modules keep it
    for name, _ in stiefel.values():
        constrain(model, name, flatten=False)
    if left:
        warnings.warn(
            f"{', '.join(left.values())} stay geoopt's: train these by an optimizer of geoopt, and "
            "so.param_groups(model) by one of this package",
            stacklevel=2,
        )
    return model


def _unparametrized(model: ModuleT, wanted: Callable[[nn.Module], bool], called: str) -> ModuleT:
    """Remove the wanted parametrizations, keep the values, and tag the parameters."""
    check_module("model", model)
    weights = []
    for path, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for leaf, listed in module.parametrizations.items():
            if not any(map(wanted, listed)):
                continue
            name = f"{path}.{leaf}" if path else leaf
            if len(listed) > 1:
                others = ", ".join(type(each).__name__ for each in listed)
                condition = f"have {called} as its only parametrization"
                raise ValueError(fail(name, condition, others, "remove the others first"))
            check_dtype(name, listed.original.dtype)
            with torch.no_grad():
                value = getattr(module, leaf)
                check_value(value, Stiefel(), name, remedy="initialise it first")
            weights.append((module, leaf))
    if not weights:
        raise ValueError(none_found("model", f"a weight of {called}", model))
    for module, leaf in weights:
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=True)
        module.get_parameter(leaf).grad = None  # of the unconstrained tensor
        constrain(module, leaf, flatten=False)
    return model
