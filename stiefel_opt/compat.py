"""Constructors under the names and signatures of torch and of other packages.

:func:`orthogonal` is torch's own parametrization by the maps of this package.

Code that imports ``SGDG`` or ``AdamG`` as released with Li, Li & Todorovic (ICLR 2020) and in
SpinQuant, or ``CaileySGD`` of Brevitas, runs after changing the import. Groups that set ``stiefel``
are read as there: a tensor (C_out, ...) is one matrix of C_out rows, which become orthonormal where
they are at most as many as the columns; the rest moves by SGD with momentum. Three things differ:
the momentum of constrained parameters acts, where there it stays zero; X stays orthonormal to
rounding; steps are bounded by the Frobenius norm of W, not by its 1-norm, which needs n x n.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_range, fail
from stiefel_opt.methods.cayley import SQUARES, CayleySGD, cayley_adam
from stiefel_opt.numerics.device import working_dtype
from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.checks import listed
from stiefel_opt.optim.families import SGDLike, with_factor
from stiefel_opt.optim.moves import Rule
from stiefel_opt.optim.state import State
from stiefel_opt.optim.stiefel import U_STATE, Z_STATE
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.parametrizations.as_torch import orthogonal
from stiefel_opt.tags.manifold import Stiefel, manifold_of

__all__ = ["SGDG", "AdamG", "CaileySGD", "orthogonal"]

_STEPS = 5  # fixed-point iterations of the released code


class _Splitting(StiefelOptimizer):
    """Groups that are read as in the released code."""

    @override
    def _parts(self, group: Group) -> list[Group]:
        return _split(group, self.defaults)


class SGDG(_Splitting, CayleySGD):
    """:class:`stiefel_opt.CayleySGD` with the signature of Li et al. and of SpinQuant.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov: As in :class:`CayleySGD`; dampening
            acts on both kinds.
        stiefel: Whether a group is constrained; parameters with a tag then keep its reading.
            Default: those with a tag.
        omega, grad_clip: Must be 0 and None: the released code never used them.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.
    Note: Cost and state are those of :class:`stiefel_opt.CayleySGD` with ``steps=5``.
    Reference: Li, Li & Todorovic (ICLR 2020), Algorithm 1; Liu et al., SpinQuant (ICLR 2025).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        stiefel: bool | None = None,
        omega: float = 0,
        grad_clip: float | None = None,
    ) -> None:
        _refuse_what_was_ignored(omega, grad_clip)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov, steps=_STEPS, stiefel=stiefel
        )


class CaileySGD(SGDG):
    """:class:`SGDG` with the signature of Brevitas.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, stiefel, grad_clip: As in
            :class:`SGDG`.
        iters: Fixed-point iterations of the Cayley map.
        dtype: Must be None, "float32", or the dtype of the parameters. Constrained parameters in
            half precision are moved in float32 in any case: their masters are part of the state.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-1,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        stiefel: bool | None = None,
        iters: int = 5,
        grad_clip: float | None = None,
        dtype: str | None = None,
    ) -> None:
        _refuse_what_was_ignored(0, grad_clip)
        self._dtype = dtype
        super(SGDG, self).__init__(  # not that of SGDG, whose iterations are fixed
            params, lr, momentum, dampening, weight_decay, nesterov, steps=iters, stiefel=stiefel
        )

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        for dtype in {p.dtype for p in map(_tensor_of, group["params"]) if p is not None}:
            moving = working_dtype(dtype)
            if getattr(torch, str(self._dtype), self._dtype) not in (None, moving, dtype):
                name = str(moving).removeprefix("torch.")
                wanted = f"be None or {name!r} for parameters of {dtype}"
                remedy = "convert the parameters to move them in another precision"
                raise ValueError(fail("dtype", wanted, repr(self._dtype), remedy))

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dtype": self._dtype}


class AdamG(_Splitting, SGDLike):
    """:class:`stiefel_opt.CayleyAdam` with the signature of Li et al.; the rest moves by SGD.

    Args:
        params, lr, weight_decay, omega, grad_clip: As in :class:`SGDG`.
        momentum: First beta, and the momentum of plain parameters.
        dampening, nesterov: For plain parameters.
        grassmann: Must be False: it has no effect in the released code.
        beta2, epsilon: Second beta and eps.
        stiefel: As in :class:`SGDG`; in the released code only groups can say so.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.
    Note: Cost and state are those of :class:`stiefel_opt.CayleyAdam` with ``steps=5``.
    Reference: Li, Li & Todorovic (ICLR 2020), Algorithm 2.
    """

    rule = "AdamG"
    sums_over_rows = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        grassmann: bool = False,
        beta2: float = 0.99,
        epsilon: float = 1e-8,
        omega: float = 0,
        grad_clip: float | None = None,
        *,
        stiefel: bool | None = None,
    ) -> None:
        _refuse_what_was_ignored(omega, grad_clip)
        if grassmann:
            raise ValueError(fail("grassmann", "be False", grassmann, "set stiefel=True instead"))
        defaults: Group = {"lr": lr, "momentum": momentum, "dampening": dampening}
        defaults |= {"weight_decay": weight_decay, "nesterov": nesterov, "stiefel": stiefel}
        defaults |= {"beta2": beta2, "epsilon": epsilon, "maximize": False, "foreach": None}
        defaults |= {"fused": None, "differentiable": False, "nonfinite": "skip"}
        super().__init__(params, defaults)

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_range("momentum", group["momentum"], 0.0, 1.0)
        check_range("beta2", group["beta2"], 0.0, 1.0)
        check_range("epsilon", group["epsilon"], 0.0)

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE, SQUARES[0]

    @override
    def rule_for(self, group: Group) -> Rule:
        betas = group["momentum"], group["beta2"]
        rule = partial(cayley_adam, betas=betas, eps=group["epsilon"], steps=_STEPS)
        return with_factor(rule, group["maximize"])


def _refuse_what_was_ignored(omega: float, grad_clip: float | None) -> None:
    if omega != 0:
        remedy = "it was never used; add so.orthonormality_penalty(model, omega) to the loss"
        raise ValueError(fail("omega", "be 0", omega, remedy))
    if grad_clip is not None:
        remedy = "it was never used; call torch.nn.utils.clip_grad_norm_ before the step"
        raise ValueError(fail("grad_clip", "be None", grad_clip, remedy))


def _split(group: Group, defaults: Group) -> list[Group]:
    """Return up to three groups for one: read as in the released code, by tags, and plain.

    ``stiefel=True`` constrains matrices of few rows; parameters with a tag keep its reading, as in
    every optimizer here. ``stiefel=None`` constrains only those.
    """
    wanted, params = group.get("stiefel", defaults["stiefel"]), listed(group["params"])
    group = {**group, "params": params}  # not what was read from, which may be empty now
    if isinstance(params, set) or not (wanted is None or wanted is True):
        return [group]
    flat: list[Any] = []
    tagged: list[Any] = []
    plain: list[Any] = []
    for item in params:
        parameter = _tensor_of(item)
        if parameter is not None and manifold_of(parameter) is not None:
            tagged.append(item)
        elif wanted and parameter is not None and _has_few_rows(parameter):
            flat.append(item)
        else:
            plain.append(item)
    kinds = (flat, Stiefel(flatten=True)), (tagged, None), (plain, False)
    parts = [{**group, "params": kind, "stiefel": reading} for kind, reading in kinds if kind]
    return parts or [group]


def _has_few_rows(parameter: Tensor) -> bool:
    return parameter.ndim > 1 and parameter.size(0) ** 2 <= parameter.numel()


def _tensor_of(item: object) -> Tensor | None:
    """Return the tensor of an item, itself or a pair (name, tensor); None for anything else."""
    parameter = item[1] if isinstance(item, tuple) else item
    return parameter if isinstance(parameter, Tensor) else None
