"""From the constraints of other packages to tagged parameters, values kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from stiefel_opt._checks import check_dtype, fail
from stiefel_opt.constraints import constrain

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def from_torch_orthogonal(model: ModuleT) -> ModuleT:
    """Turn every weight of ``torch.nn.utils.parametrizations.orthogonal`` into a tagged parameter.

    The weight keeps its value and its name: ``parametrizations.weight.original`` becomes ``weight``
    again, in the module and in ``state_dict``, and the n x n ``base`` is freed. The parameter
    object is the former ``original``; its gradient is dropped. As with torch, the last two
    dimensions are the matrix, for convolutions too.

    Args:
        model: A model with such weights; changed in place and returned.

    Raises:
        ValueError: if it has none, or one that further parametrizations share; nothing is changed.
        TypeError: for dtypes that :func:`stiefel_opt.constrain` refuses.

    Note: Values that are off by more than rounding become the nearest point. Build the optimizer
        afterwards: state of the former weight means nothing to the new one. To move a checkpoint,
        load it into the parametrized model first.
    """
    return _unparametrized(
        model, _is_torch_orthogonal, "torch.nn.utils.parametrizations.orthogonal"
    )


def from_geotorch(model: ModuleT) -> ModuleT:
    """Turn every weight of ``geotorch.orthogonal`` into a tagged parameter.

    As :func:`from_torch_orthogonal`, for the classes ``Stiefel`` and ``SO`` of geotorch. Weights
    under other constraints of geotorch stay as they are.

    Args:
        model: A model with such weights; changed in place and returned.

    Raises:
        ValueError: if it has none, or one that further parametrizations share; nothing is changed.
        TypeError: for dtypes that :func:`stiefel_opt.constrain` refuses.
    """
    return _unparametrized(model, _is_geotorch_stiefel, "geotorch.orthogonal")


def from_geoopt(model: ModuleT) -> ModuleT:
    """Turn every ``geoopt.ManifoldParameter`` on a Stiefel manifold into a tagged parameter.

    The parameter objects stay the same, and so do their values, where they are off by more than
    rounding up to the nearest point. Those on geoopt's Euclidean manifold become plain.

    Args:
        model: A model with such parameters; changed in place and returned.

    Raises:
        ValueError: if it has none, or one on another manifold, which this package has not; nothing
            is changed.
        TypeError: for dtypes that :func:`stiefel_opt.constrain` refuses.

    Note: The metric of geoopt, canonical by default, is an option of the optimizers here:
        ``so.StiefelSGD(..., metric="canonical")``.
    """
    _check_model(model)
    stiefel: dict[int, tuple[str, Tensor]] = {}
    plain: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        manifold = getattr(parameter, "manifold", None)
        kinds = {kind.__name__ for kind in type(manifold).__mro__ if _from(kind, "geoopt")}
        if "Stiefel" in kinds:
            check_dtype(name, parameter.dtype)
            stiefel.setdefault(id(parameter), (name, parameter))
        elif "Euclidean" in kinds:
            plain[id(parameter)] = parameter
        elif kinds:
            remedy = "replace it by an nn.Parameter, or train it with geoopt in a model of its own"
            raise ValueError(
                fail(name, "be on a Stiefel manifold to be converted", repr(manifold), remedy)
            )
    if not stiefel:
        raise ValueError(_none_found(model, "a geoopt.ManifoldParameter on a Stiefel manifold"))
    converted: list[Tensor] = [*plain.values(), *(parameter for _, parameter in stiefel.values())]
    for tensor in converted:
        del tensor.manifold  # type: ignore[attr-defined]
        tensor.__class__ = nn.Parameter  # the same object, so that tied modules keep it
    for name, _ in stiefel.values():
        constrain(model, name, flatten=False)
    return model


def _unparametrized(model: ModuleT, wanted: Callable[[nn.Module], bool], called: str) -> ModuleT:
    """Remove the wanted parametrizations, keep the values, and tag the parameters."""
    _check_model(model)
    found = []
    for path, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for leaf, listed in module.parametrizations.items():
            if not any(map(wanted, listed)):
                continue
            name = f"{path}.{leaf}" if path else leaf
            if len(listed) > 1:
                others = ", ".join(type(each).__name__ for each in listed)
                raise ValueError(
                    fail(
                        name,
                        f"have {called} as its only parametrization",
                        others,
                        "remove the others first",
                    )
                )
            check_dtype(name, listed.original.dtype)
            found.append((module, leaf))
    if not found:
        raise ValueError(_none_found(model, f"a weight of {called}"))
    for module, leaf in found:
        parametrize.remove_parametrizations(module, leaf, leave_parametrized=True)
        module.get_parameter(leaf).grad = None  # it was that of the free tensor
        constrain(module, leaf, flatten=False)
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(fail("model", "be a torch.nn.Module", type(model).__name__))


def _none_found(model: nn.Module, wanted: str) -> str:
    return fail("model", f"have {wanted}", f"a {type(model).__name__} of none")


def _is_torch_orthogonal(module: nn.Module) -> bool:
    return isinstance(module, parametrizations._Orthogonal)


def _is_geotorch_stiefel(module: nn.Module) -> bool:
    kinds = {kind.__name__ for kind in type(module).__mro__ if _from(kind, "geotorch")}
    return "SO" in kinds or "Stiefel" in kinds


def _from(kind: type, package: str) -> bool:
    return kind.__module__.partition(".")[0] == package
