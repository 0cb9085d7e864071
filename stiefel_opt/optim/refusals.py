"""What is refused before a step or a group changes anything, and in which words."""

from __future__ import annotations

import warnings
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from stiefel_opt._checks import check_dtype, fail
from stiefel_opt.functional.finite import largest_safe
from stiefel_opt.manifold import manifold_of
from stiefel_opt.optim.faults import is_safe
from stiefel_opt.optim.master import state_dtype
from stiefel_opt.optim.readings import Group, label, name_of, reading
from stiefel_opt.optim.shards import Shards

__all__ = [
    "check_finite",
    "check_new_group",
    "refuse_gradient",
    "refuse_nonfinite",
    "refuse_sparse",
    "warn_if_nothing_is_constrained",
]


def check_new_group(group: Group, groups: list[Group]) -> None:
    """Raise for parameters that torch would accept but that cannot be constrained."""
    seen = {id(parameter) for other in groups for parameter in other["params"]}
    for index, item in enumerate(group["params"]):
        name, parameter = item if isinstance(item, tuple) else (None, item)
        if not isinstance(parameter, Tensor):
            continue  # refused by torch
        called = label(name, index, len(groups))
        if id(parameter) in seen:
            raise ValueError(
                fail(called, "appear once", "it twice", "list every parameter in one group only")
            )
        seen.add(id(parameter))
        manifold = reading(parameter, group)
        if manifold is not None:
            manifold.check(parameter.shape, called)
            check_dtype(called, parameter.dtype)
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if not (parameter.is_meta or bool(torch.isfinite(own).all())):
                raise ValueError(
                    fail(called, "be finite", "NaN or inf", "initialise it before optimizing")
                )


def warn_if_nothing_is_constrained(optimizer: str, groups: list[Group]) -> None:
    """Warn where matrices are optimized, none is tagged, and nobody said that this is intended."""
    parameters = [p for group in groups for p in group["params"]]
    if (
        all(group["stiefel"] is None for group in groups)
        and all(manifold_of(p) is None for p in parameters)
        and any(p.ndim >= 2 for p in parameters)
    ):
        warnings.warn(
            f"{optimizer}: no parameter is constrained, all of them are plain. Tag "
            "some with stiefel_opt.constrain(module, 'weight'), or pass stiefel=True for a "
            "group; stiefel=False says that this is intended.",
            stacklevel=4,
        )


def check_finite(parameter: Tensor, groups: list[Group], shards: Shards | None = None) -> None:
    """Raise for a value that cannot be projected, on every process that has some of its rows."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    bad = not bool(torch.isfinite(own).all())
    if bad if shards is None else shards.any(bad):
        raise ValueError(
            fail(
                name_of(parameter, groups),
                "be finite",
                f"NaN or inf in a tensor of shape {tuple(parameter.shape)}",
                "initialise it, or load a good checkpoint",
            )
        )


def refuse_gradient(parameter: Tensor, groups: list[Group]) -> NoReturn:
    """Raise for a gradient of another shape, which torch would broadcast, or another dtype."""
    grad = parameter.grad
    raise ValueError(
        fail(
            f"grad of {name_of(parameter, groups)}",
            f"have shape {tuple(parameter.shape)} and dtype {parameter.dtype}",
            f"shape {tuple(grad.shape)} and dtype {grad.dtype}",  # type: ignore[union-attr]
            "set it to None and run backward again",
        )
    )


def refuse_nonfinite(parameter: Tensor, groups: list[Group], shards: Shards | None = None) -> None:
    """Raise for a gradient that is not finite or safe, on every process that shares its rows."""
    grad: Tensor = parameter.grad  # type: ignore[assignment]
    own = grad.to_local() if isinstance(grad, DTensor) else grad
    bad = not is_safe(own)
    if bad if shards is None else shards.any(bad):
        most = largest_safe(state_dtype(grad.dtype))
        raise ValueError(
            fail(
                f"grad of {name_of(parameter, groups)}",
                f"be finite and shorter than {most:.0e}",
                f"NaN, inf or more in a tensor of shape {tuple(parameter.shape)}",
                "look for its cause, or choose nonfinite='skip'",
            )
        )


def refuse_sparse(parameter: Tensor, groups: list[Group]) -> NoReturn:
    """Raise for a sparse gradient."""
    raise TypeError(
        fail(
            f"grad of {name_of(parameter, groups)}",
            "be dense",
            f"one of shape {tuple(parameter.shape)} that is sparse",
            "use sparse=False in the layer that produces it",
        )
    )
