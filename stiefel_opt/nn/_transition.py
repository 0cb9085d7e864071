"""How a recurrent module keeps one of its weights orthonormal: by a tag, by a map, or not."""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefel_opt.errors import check_choice, check_options, fail
from stiefel_opt.numerics import random_point, widened, working_dtype
from stiefel_opt.parametrizations import CWY, MAPS, cwy_factors, draw_rotation, orthogonal
from stiefel_opt.tags import PROJECTS, Stiefel, apply_readings, constrain, project_, readings

TAGGED: Final = "tagged"
_ASSIGNED: Final = "_stiefel_assigned"  # on a module, while it loads


def check_transition(transition: str | None) -> None:
    """Raise unless ``transition`` is a map, the tag or None."""
    if transition is not None:
        check_choice("transition", transition, [*MAPS, TAGGED])


@torch.no_grad()
def draw_uniform(
    weight: Tensor, generator: torch.Generator | None, *, as_rows: bool = True
) -> None:
    """Fill ``weight``, read as rows or as matrices, with uniformly distributed orthonormal ones."""
    device = weight.device if generator is None else generator.device
    dtype = working_dtype(weight.dtype)
    shape = (len(weight), weight[0].numel()) if as_rows else weight.shape
    point = random_point(*shape, generator=generator, dtype=dtype, device=device)
    weight.copy_(point.view(weight.shape))


def set_transition(
    module: nn.Module,
    name: str,
    transition: str | None,
    *,
    start: str | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> None:
    """Constrain parameter ``name`` of ``module``; ``options`` are those of the map or the tag."""
    if transition not in (None, TAGGED):
        options |= {"start": start, "generator": generator}
        with warnings.catch_warnings():  # a row of random numbers may change its sign
            warnings.filterwarnings("ignore", ".* has determinant")
            orthogonal(module, name, map=transition, **options)
        return
    if start is not None:
        parameter = module.get_parameter(name)
        with torch.no_grad():
            parameter.copy_(draw_rotation(start, len(parameter), generator))
    if transition == TAGGED:
        check_options(TAGGED, options, constrain)
        constrain(module, name, **options)
    elif options:
        raise TypeError(fail("options", "be empty for transition=None", ", ".join(options)))


def factors_or_matrix(module: nn.Module, name: str) -> tuple[Tensor, Tensor] | Tensor:
    """Return (A, C) with Q' = I - A C for CWY with L < N, else Q; never in half precision."""
    if parametrize.is_parametrized(module, name):
        maps: Any = module.parametrizations[name]  # type: ignore[index]
        # heads, a scale or a transposed reading make another matrix of it
        is_plain = len(maps) == 1 and type(maps[0]) is CWY and maps[0].manifold == Stiefel()
        vectors = maps.original if is_plain else None
        if vectors is not None and vectors.ndim == 2 and not vectors.is_complex():
            n, count = vectors.shape
            if count < n == maps[0].columns:
                unit, triangle = cwy_factors(vectors)
                return torch.linalg.solve_triangular(triangle, unit.mT, upper=True).mT, unit.mT
    return widened(getattr(module, name))


def project_on_load(module: nn.Module) -> None:
    """Let the tagged parameters below ``module`` be projected after ``load_state_dict``."""
    module.register_load_state_dict_pre_hook(_see_assignment)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(_project_loaded)  # type: ignore[no-untyped-call]
    for owner in module.modules():
        owner.__dict__[PROJECTS] = True


def _see_assignment(module: nn.Module, _: Any, __: Any, local_metadata: Any, *___: Any) -> None:
    """Hook before ``load_state_dict``: notice that it takes over tensors instead of copying."""
    module.__dict__[_ASSIGNED] = bool(local_metadata.get("assign_to_params_buffers", False))


def _project_loaded(module: nn.Module, incompatible_keys: Any) -> None:  # noqa: ARG001
    assigned = module.__dict__.pop(_ASSIGNED, False)
    for name, (parameter, reading) in readings(module).items():
        if reading is None:
            continue
        if assigned:  # the storage is that of another model or of a file: project a copy
            path, _, leaf = name.rpartition(".")
            copied = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module.get_submodule(path), leaf, copied)
        if reading.learn_scale:  # a loaded scale is kept
            apply_readings(module, {name: reading}, project=False)
            project_(module.get_parameter(name))
        else:
            apply_readings(module, {name: reading})
