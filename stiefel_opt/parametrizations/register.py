"""``orthogonal``: put a parametrization on a weight of a module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_opt.errors import (
    check_choice,
    check_dtype,
    check_module,
    check_options,
    fail,
    find_parameter,
    users_level,
)
from stiefel_opt.numerics import has_values, polar_factor
from stiefel_opt.parametrizations.base import Parametrization
from stiefel_opt.parametrizations.householder_maps import CWY, TCWY, Householder
from stiefel_opt.parametrizations.init import draw_rotation
from stiefel_opt.parametrizations.own import OWN
from stiefel_opt.parametrizations.skew import MatrixExp, ScaledCayley, Trivialization
from stiefel_opt.parametrizations.unitary import EURNN, URNN
from stiefel_opt.tags import (
    CONVOLUTIONS,
    Stiefel,
    check_start,
    check_use,
    manifold_of,
    mark_maps,
    stacked,
    turned_over,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

#: Names that ``map`` may have in :func:`stiefel_opt.orthogonal`, and the class of each.
MAPS: Final[Mapping[str, type[Parametrization]]] = MappingProxyType(
    {
        "householder": Householder,
        "cwy": CWY,
        "tcwy": TCWY,
        "matrix_exp": MatrixExp,
        "cayley": ScaledCayley,
        "trivialization": Trivialization,
        "own": OWN,
        "urnn": URNN,
        "eurnn": EURNN,
    }
)


def orthogonal(
    module: ModuleT,
    name: str = "weight",
    map: str = "tcwy",  # noqa: A002
    *,
    heads: int | None = None,
    flatten: bool | None = None,
    transposed: bool = False,
    scale: float = 1.0,
    determinant: int | None = None,
    row_dims: int | Sequence[int] | None = None,
    column_dims: int | Sequence[int] | None = None,
    start: str | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> ModuleT:
    r"""Parametrize a weight of ``module`` by unconstrained tensors such that it is orthonormal.

    For any optimizer, or for the map itself; :func:`stiefel_opt.constrain` with the optimizers of
    this package makes a step cheap and needs no second tensor. One optimizer takes both.

    A weight that is ``scale`` times an orthonormal matrix in the range of the map keeps its value.
    Otherwise it becomes the nearest such matrix: the polar factor; for "householder", "cwy", "tcwy"
    and "matrix_exp" with the last row negated if it is square with the wrong determinant; for "own"
    of the centred columns. "cwy" and "householder" with ``reflections`` < N, "urnn" and "eurnn"
    are initialised at random. Later, ``module.weight = Q`` raises where Q is not reached.

    Args:
        module: Owner of the weight, or one of its ancestors.
        name: The parameter, dotted below an ancestor: ``"encoder.weight_hh_l0"``.
        map: "tcwy", "cwy" (``reflections=``), "householder" (``reflections=``), "matrix_exp",
            "cayley" (``negative=``), "trivialization" (``every=``), "own", "urnn" or "eurnn"
            (``layers=``).
        heads, transposed, scale, row_dims, column_dims: The reading, see
            :class:`stiefel_opt.Stiefel`; heads by default those that the module stacks, as for
            :func:`stiefel_opt.constrain`.
        flatten: Read ``(C_out, C_in, *kernel)`` as ``(C_out, C_in * prod(kernel))``. Default: True
            for convolutions.
        determinant: 1 or -1, of square real matrices: the map reaches these, by a row that is
            negated where it needs one. Default: None, those of the map, and of the weight for
            "cayley" and "trivialization", which reach both. An orthonormal weight that is not
            reached warns.
        start: Initialisation: "henaff" or "helfrich", random plane rotations, for square matrices;
            not for "urnn", nor for few reflections or layers. Default: the weight.
        generator: Source of random initial values. Default: torch's global one.
        options: Options of the map.

    Returns: The module. Where the map has one free tensor, the parameter object stays the same, as
        ``module.parametrizations.weight.original``.
    Raises:
        ValueError: for an unknown name, map or start, a weight that the map has no matrices for, or
            one that is tagged by ``constrain``.
        TypeError: for an unknown option, or a dtype that the map does not have.
    Note: ``parametrize.cached()`` evaluates the map once for several uses. To every optimizer the
        free tensors are plain, weight decay included.
    Reference: Likhosherstov et al. (AISTATS 2021).
    """
    check_module("module", module)
    check_choice("map", map, MAPS)
    owner, leaf, parameter = find_parameter(module, name)
    _check_weight(name, parameter)
    check_options(map, options, kind := MAPS[map])
    is_said, has_dims = heads is not None, (row_dims, column_dims) != (None, None)
    if not (is_said or has_dims or transposed or flatten is False):
        heads = stacked(owner, leaf)[0]
    if flatten is None:
        flatten = isinstance(owner, CONVOLUTIONS) and parameter.ndim > 2 and not has_dims
    said: Any = scale, False, determinant, row_dims, column_dims
    manifold = Stiefel(heads, None, flatten, transposed, *said)
    manifold.check(parameter.shape, name)
    check_use(module, name, parameter, manifold, is_said=is_said)
    value = None if start is None else _start(start, map, manifold, parameter, generator)
    parametrization = kind(manifold=manifold, generator=generator, **options)
    columns = manifold.matrices(parameter).size(-1)
    if value is not None and parametrization.starts_at_random(columns):
        kind_of = ", ".join([repr(map), *(f"{key}={option}" for key, option in options.items())])
        raise ValueError(fail("start", f"be None for {kind_of}: it starts at random", repr(start)))
    check_point = check_start(name, parameter, manifold) if value is None else None
    turned = _turned_over(name, parameter, parametrization, map) if value is None else ""
    _register(owner, leaf, parametrization, value)
    mark_maps(owner)
    if turned:
        warnings.warn(turned, stacklevel=users_level())
    if check_point is not None:
        check_point(getattr(owner, leaf))
    return module


def _register(
    owner: nn.Module,
    leaf: str,
    parametrization: Parametrization,
    value: Tensor | None,
) -> None:
    """Register a map for a weight, or for another value of it; on an error nothing has changed."""
    parameter = owner._parameters[leaf]
    before = None if value is None else parameter.detach().clone()  # type: ignore[union-attr]
    try:
        if value is not None:
            with torch.no_grad():
                parameter.copy_(value)  # type: ignore[union-attr]
        parametrize.register_parametrization(owner, leaf, parametrization)
        if value is not None and isinstance(parametrization, EURNN):  # takes matrices by assignment
            setattr(owner, leaf, value)
    except Exception:
        if before is not None and leaf in owner._parameters:
            with torch.no_grad():
                parameter.copy_(before)  # type: ignore[union-attr]
        raise


def _turned_over(name: str, weight: Tensor, map_: Parametrization, called: str) -> str:
    """Return a warning of a weight whose determinant is not kept, or nothing."""
    manifold = map_.manifold
    n, m = manifold.matrices(weight).shape[-2:]
    reached = manifold.determinant or map_.determinant(m)
    if reached is None or n != m or weight.is_complex() or not has_values(weight):
        return ""
    turned = turned_over(name, weight, replace(manifold, determinant=reached))
    if not turned:
        return ""
    ((_, where, _),) = turned
    remedy = f"pass determinant={-reached} to keep it"
    remedy += "" if manifold.determinant else ", or map='cayley', which takes both"
    return (
        f"`{name}` has determinant {-reached:+d}{where}, and {called!r} reaches {reached:+d}: the "
        f"weight does not keep its value; {remedy}"
    )


def _check_weight(name: str, parameter: Tensor) -> None:
    """Raise for a weight that is constrained already, or has values that no map takes."""
    if manifold_of(parameter) is not None:
        given = "a parameter that so.constrain put there"
        raise ValueError(fail(name, "not be tagged", given, "so.release it first"))
    check_dtype(name, parameter.dtype)


def _start(
    start: str, map_name: str, manifold: Stiefel, weight: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Return ``scale`` times random rotations in the shape of the weight."""
    shape = manifold.matrices(weight).shape
    if shape[-2] != shape[-1]:
        raise ValueError(fail("start", "be None for matrices that are not square", repr(start)))
    through = "cayley" if map_name == "cayley" else "exponential"
    count = shape[:-2].numel()
    drawn = [draw_rotation(start, shape[-1], generator, through) for _ in range(count)]
    # drawn in torch's default dtype, and orthonormal in that of the weight
    points = polar_factor(torch.stack(drawn).reshape(shape).to(weight))
    return manifold.stored(manifold.scale * points, weight.shape)
