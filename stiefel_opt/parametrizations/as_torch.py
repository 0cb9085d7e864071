"""``torch.nn.utils.parametrizations.orthogonal`` by the maps of this package."""

from __future__ import annotations

import copy
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_flag, check_module, fail
from stiefel_opt.numerics import (
    finest_dtype,
    gram_error,
    has_values,
    orientation,
    orthonormality_tolerance,
    polar_factor,
)
from stiefel_opt.parametrizations.base import Free, Parametrization
from stiefel_opt.parametrizations.householder_maps import TCWY
from stiefel_opt.parametrizations.init import householder_vectors
from stiefel_opt.parametrizations.skew import Trivialization, cayley_map
from stiefel_opt.tags import Stiefel, manifold_of, mark_maps

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MARK: Final = "0._extra_state"  # in checkpoints of these maps, and in none of torch's


class Reflections(TCWY):
    """:class:`TCWY` for every initial weight: a sign corrects the determinant of a square one."""

    @override
    def free(self, point: Tensor) -> Free:
        if point.is_complex() or point.size(-2) != point.size(-1):
            return super().free(point)
        signs = torch.ones_like(point[..., 0, :])
        signs[..., -1] = orientation(point) * (-1) ** point.size(-1)
        self._set_buffer("phases", signs)
        return householder_vectors(point * signs.unsqueeze(-2))

    @override
    def determinant(self, n: int) -> None:
        """Return None: the sign of the last column makes up for it."""

    @override
    def component(self) -> Tensor | None:
        phases: Tensor | None = self.phases
        if phases is None or phases.is_complex():
            return None
        signs: Tensor = phases.prod(-1) * (-1) ** phases.size(-1)
        return signs

    @override
    def get_extra_state(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device="cpu")

    @override
    def set_extra_state(self, state: Tensor) -> None:
        """Do nothing: the key itself marks a checkpoint of these maps."""


class Exponential(Trivialization):
    """:class:`Trivialization` about the initial weight."""

    def __init__(self) -> None:
        super().__init__(every=None)


class Cayley(Exponential):
    r"""Cayley transform: :math:`(I - A/2)^{-1} (I + A/2) X_0`, :math:`A = P X_0' - X_0 P'`.

    The unconstrained parameter is P, initially zero; X0 is the initial weight. Rotations of X0 with
    an eigenvalue -1 are not reached.
    """

    curve = staticmethod(cayley_map)


_MAPS: Final[dict[str, type[Parametrization]]] = {
    "matrix_exp": Exponential,
    "cayley": Cayley,
    "householder": Reflections,
}


def orthogonal(
    module: ModuleT,
    name: str = "weight",
    orthogonal_map: str | None = None,
    *,
    use_trivialization: bool = True,
    determinant: int | None = None,
) -> ModuleT:
    r"""Parametrize a weight as ``torch.nn.utils.parametrizations.orthogonal`` does, without n x n.

    As in torch are the signature, the shapes (the last two dimensions are a matrix n x m, all
    others a batch) and the name of the parameter, ``module.parametrizations.weight.original``. The
    maps are those of this package; X0 is the initial weight:

    - ``"householder"``: the map "tcwy" of :func:`stiefel_opt.orthogonal`, m reflections;
    - ``"matrix_exp"``: the map "trivialization", :math:`\exp(P X_0' - X_0 P') X_0`;
    - ``"cayley"``: the Cayley transform in place of the exponential;
    - None: "householder"; "matrix_exp" for complex weights. (torch: "matrix_exp" for square and
      for complex weights.)

    Args:
        module: Owner of the weight.
        name: A parameter, a buffer, or a weight with another parametrization. Default: "weight".
        orthogonal_map: See above. Default: None.
        use_trivialization: Has no effect: the initial weight is kept in any case. In torch True
            adds a base of n x n, and False loses the initial weight. Default: True.

        determinant: 1 or -1, of square real matrices. Default: None, that of the weight. (torch:
            that of the map.)

    Returns: The module. A weight that is orthonormal keeps its value, any other one becomes the
        nearest point (torch: the Q factor).
    Raises:
        ValueError: for a name that is no tensor of the module, a weight of fewer than two
            dimensions, tagged, or not finite, another map, and "householder" for complex weights.
        TypeError: if ``module`` is not a module, or for dtypes without fraction.

    Note: ``load_state_dict`` takes its own checkpoints, and those of torch's parametrization with
        the same ``orthogonal_map``, with or without base. The parameter has other coordinates than
        torch's, so that the state of an optimizer does not carry over. Half precision is computed
        in float32.
    Reference: Likhosherstov et al. (AISTATS 2021); Lezcano-Casado (NeurIPS 2019).
    """
    check_module("module", module)
    check_flag("use_trivialization", use_trivialization)
    weight = getattr(module, name, None) if isinstance(name, str) else None
    if not isinstance(weight, Tensor):
        wanted = f"be a parameter or buffer of this {type(module).__name__}"
        raise ValueError(fail("name", wanted, repr(name)))
    if weight.ndim < 2:
        given = f"shape {tuple(weight.shape)}"  # of no or one dimension
        raise ValueError(fail(name, "be a matrix or a batch of matrices", given))
    if orthogonal_map is not None:
        check_choice("orthogonal_map", orthogonal_map, _MAPS)
    if manifold_of(weight, name) is not None:
        given = "a parameter that so.constrain put there"
        raise ValueError(fail(name, "not be tagged", given, "so.release it first"))
    if weight.is_complex() and orthogonal_map == "householder":
        remedy = "choose 'matrix_exp' or 'cayley'"
        raise ValueError(fail("orthogonal_map", "support complex weights", "'householder'", remedy))
    chosen = orthogonal_map or ("matrix_exp" if weight.is_complex() else "householder")
    rule = _MAPS[chosen]()
    rule.manifold = Stiefel(determinant=determinant)
    rule.manifold.check(weight.shape, name)
    parametrize.register_parametrization(module, name, rule)
    maps: Any = module.parametrizations[name]  # type: ignore[index]
    if len(maps) == 1:
        is_square = weight.size(-2) == weight.size(-1)
        theirs = orthogonal_map or ("matrix_exp" if is_square or weight.is_complex() else chosen)
        maps.orthogonal_map = theirs
        maps.register_load_state_dict_pre_hook(_translate)
    mark_maps(module)
    return module


@torch.no_grad()
def _translate(
    maps: parametrize.ParametrizationList, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Hook before ``load_state_dict``: turn what torch's parametrization saved into ours."""
    free, base = (state_dict.get(prefix + leaf) for leaf in ("original", "0.base"))
    if free is None or not has_values(free) or prefix + _MARK in state_dict:
        return
    ours: Any = copy.deepcopy(maps[0])
    if any(buffer.is_meta for buffer in ours.buffers()):
        ours.to_empty(device=free.device)
    if len(maps) != 1 or free.shape != ours.shape:
        return  # not what torch saves, or torch refuses the shape
    theirs = parametrizations._Orthogonal(
        free,
        parametrizations._OrthMaps[maps.orthogonal_map],  # type: ignore[misc]
        use_trivialization=base is not None,
    )
    precise = finest_dtype(free)
    if base is not None:
        theirs.base = base.to(free.device, precise)
    weight = theirs(free.to(precise))
    tall = weight if weight.size(-2) >= weight.size(-1) else weight.mH
    if bool((gram_error(tall) <= orthonormality_tolerance(free.dtype, tall.size(-2))).all()):
        tall = polar_factor(tall)  # as exact as it was saved, not as it is loaded
    weight = (tall if tall.shape == weight.shape else tall.mH).to(ours.dtype)
    try:
        state_dict[prefix + "original"] = ours.right_inverse(weight)
    except ValueError as error:
        (*_, error_messages) = others
        error_messages.append(f"{prefix}original: of torch's parametrization: {error}")
        state_dict[prefix + "original"] = maps.original.detach()  # nothing is loaded
    state_dict.pop(prefix + "0.base", None)
    state_dict.update(ours.state_dict(prefix=prefix + "0."))
