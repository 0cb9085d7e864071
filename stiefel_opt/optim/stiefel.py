"""StiefelSGD and StiefelAdam: momentum by isometric flows, torch's own rules for plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.functional.flows import mend_point
from stiefel_opt.functional.published import published_adam_, published_sgd_
from stiefel_opt.functional.stiefel_adam import Moments, adam_
from stiefel_opt.functional.stiefel_sgd import sgd_, velocity_in
from stiefel_opt.linalg import keep_, sums, zeroed
from stiefel_opt.manifold import Stiefel
from stiefel_opt.optim.blocks import Owner
from stiefel_opt.optim.constrained import Given
from stiefel_opt.optim.families import AdamLike, SGDLike, options_of
from stiefel_opt.optim.plain import Group
from stiefel_opt.optim.state import State, StateNames, suffix_of

_NORMAL: Final = ("momentum_normal", "deferred_base", "deferred_factor", "deferred_shift")


class StiefelSGD(SGDLike):
    r"""SGD with momentum that keeps constrained parameters orthonormal; plain ones get torch's SGD.

    With f, g the skew and normal part of the Riemannian gradient, a step with momentum mu is

    .. math::
        U \leftarrow \mu U - g,\quad Z \leftarrow \mu Z - f,\quad
        R = (I + \eta^2 U^\top U)^{-1/2},\\
        X \leftarrow (X\,\mathrm{rot}(\eta Z) + \eta U) R,\quad
        U \leftarrow (U - \eta X\,\mathrm{rot}(\eta Z)\, U^\top U) R

    for the canonical metric; see :func:`stiefel_opt.functional.sgd_` for all variants. Constrained
    are parameters with a tag (:func:`stiefel_opt.constrain`, :class:`ManifoldParameter`), or those
    of groups with ``stiefel``. One learning rate serves both kinds.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor, which on an accelerator is never read: NaN passes.
        momentum, dampening, nesterov, maximize: As in ``torch.optim.SGD``, for both kinds.
        weight_decay: For plain parameters. It cannot move a constrained one: X is normal to the
            manifold at X.
        foreach, fused: For plain parameters, as in torch.
        differentiable: Must be False.
        metric: "canonical" (a = 1/2), "euclidean" (a = 0), or any float a < 1.
        transport: How the momentum is carried to the new point: "isometric" turns it with the point
            and keeps its length, "projected" takes what orthogonal projection onto the new tangent
            space leaves. Neither can blow up. "published" takes the published flows, which can;
            :mod:`stiefel_opt.functional.published` says where they differ from the print.
        rotation: Of published flows only, how X turns within its span: "euler", "cayley" or "expm".
            Default: None, which is "euler" there.
        nonfinite: What becomes of a constrained parameter whose gradient is not finite, or so large
            that its square would not be (2e13 in float32): "skip" keeps its point, momentum and
            step while the others move, warns, and counts in :meth:`skipped_steps`; "raise" stops
            before anything has moved, and waits for the device; "ignore" looks at nothing. On an
            accelerator the warning of "skip" waits for :meth:`state_dict`. A matrix whose step
            overflows although its gradient is safe, as with a momentum of 1 or more, stays and
            starts its momentum again while the others move; then "skip" warns and "raise" raises.
            Unless published, that is seen on a CPU only.
        stiefel: Default of the groups: None reads the tags, True constrains every parameter, False
            none, a :class:`Stiefel` reads every parameter so. A group's own key overrides it.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        A step costs six products of n x m by m x m, five if "projected", batched over equal
        matrices, and no factorisation; state is one tensor like the parameter and three of m x m,
        and none without momentum. A start off the
        manifold is projected by the first step with lr > 0. The first step and one after an
        outside change of a parameter may wait for an accelerator.

    Reference:
        After Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 1: other maps of
        the same splitting, with the geometry corrected.
    """

    rule = "StiefelSGD"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
        metric: str | float = "canonical",
        transport: str = "isometric",
        rotation: str | None = None,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def _state_names(self, group: Group) -> StateNames:
        if group["transport"] == "published":
            return StateNames(("momentum_skew",), (), ("momentum_normal",))
        if group["momentum"] == 0:
            return StateNames()
        if group["transport"] == "projected":
            return StateNames(("momentum_skew",), ("deferred_shift",), ("deferred_base",))
        if group["nesterov"]:
            return StateNames(("momentum_skew",), (), ("momentum_normal",))
        deferred = ("deferred_factor", "deferred_shift")
        return StateNames(("momentum_skew",), deferred, ("deferred_base",))

    @override
    def _move(self, group: Group, given: Given) -> Tensor:
        options = given.of_sgd(group, "metric", "transport")
        if group["transport"] == "published":
            kept = given.state["momentum_skew"], given.state.get("momentum_normal")
            return _published(group, given, published_sgd_, kept, options)
        return sgd_(given.point, given.grad, velocity_in(given.state), **options)

    @override
    def _adapt(self, owner: Owner, names: StateNames) -> None:
        _undefer(owner, names)


class StiefelAdam(AdamLike):
    r"""Adam that keeps constrained parameters orthonormal; plain ones get torch's Adam.

    First moments are the skew part Z and the normal part U of a velocity, second moments p and q
    those of the two parts of the Riemannian gradient. X turns by rot(eta Zp) and moves along V,

    .. math::
        Z_p = \frac{Z/c_1}{\sqrt{p/c_2} + \epsilon},\quad
        V = (I - XX^\top) \frac{U/c_1}{\sqrt{q/c_2} + \epsilon},\quad c_i = 1 - \beta_i^t,

    and U is carried by the rotation that V makes; see :func:`stiefel_opt.functional.adam_`. A
    constant factor on the loss changes nothing (it does with published transport).

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor.
        betas, eps, amsgrad, maximize: As in ``torch.optim.Adam``, for both kinds.
        weight_decay, decoupled_weight_decay: For plain parameters: ``torch.optim.Adam`` or, with
            ``decoupled_weight_decay=True``, ``AdamW``. Constrained ones cannot be moved by it.
        foreach, fused, capturable: For plain parameters, as in torch.
        differentiable: Must be False.
        metric, transport, rotation, nonfinite, stiefel: As in :class:`StiefelSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Ten products of n x m by m x m a step, batched over equal matrices, and no factorisation;
        state is two tensors like the parameter and two of m x m, with ``amsgrad`` three each.

    Reference:
        After Kong, Wang & Tao, Momentum Stiefel Optimizer (ICLR 2023), Algorithm 2: other maps of
        the same splitting, with the geometry corrected, and both moments for their start at zero.
    """

    rule = "StiefelAdam"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        metric: str | float = "canonical",
        transport: str = "isometric",
        rotation: str | None = None,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def _state_names(self, group: Group) -> StateNames:
        largest = ("max_",) if group["amsgrad"] else ()
        words = ("momentum_", "exp_avg_sq_", *(word + "exp_avg_sq_" for word in largest))
        small, tall = (tuple(word + kind for word in words) for kind in ("skew", "normal"))
        return StateNames(small, (), tall)

    @override
    def _move(self, group: Group, given: Given) -> Tensor:
        state, options = given.state, given.of_adam(group, "metric", "transport")
        normal = _moments(state, "normal") if "momentum_normal" in state else None
        kept = _moments(state, "skew"), normal
        if group["transport"] == "published":
            return _published(group, given, published_adam_, kept, options)
        return adam_(given.point, given.grad, *kept, **options)


class StiefelAdamW(StiefelAdam):
    """:class:`StiefelAdam` whose plain parameters get ``torch.optim.AdamW``, with its defaults.

    Args:
        params, lr, betas, eps, amsgrad, maximize, foreach, capturable, differentiable, fused: As in
            ``torch.optim.AdamW``.
        weight_decay: Decoupled, for plain parameters. Default: 0.01.
        metric, transport, rotation, nonfinite, stiefel: As in :class:`StiefelSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Checkpoints are those of :class:`StiefelAdam`; what is loaded here decays decoupled.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        metric: str | float = "canonical",
        transport: str = "isometric",
        rotation: str | None = None,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        super().__init__(**options_of(locals()), params=params, decoupled_weight_decay=True)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _published(
    group: Group,
    given: Given,
    rule: Callable[..., Tensor],
    kept: tuple[Any, Any],
    options: dict[str, Any],
) -> Tensor:
    """Return the new point of the flows as printed, which know nothing of masks and corrections.

    What they let overflow stays where it was, and its momentum starts again.
    """
    ok, row_sum = given.setting.ok, given.setting.row_sum
    point, grad = given.point, zeroed(given.grad, ok)
    if given.setting.correct is not False:
        point = mend_point(point, row_sum)
    moments = list(given.state.values())
    earlier = [tensor.clone() for tensor in moments] if ok is not None else []
    del options["setting"], options["transport"]
    options["rotation"] = group["rotation"] or "euler"
    options["sums"] = lambda left, right: sums(row_sum, (left, right))[0]
    new_point = rule(point, grad, *kept, **options)
    if not given.is_judged:
        return new_point
    (own,) = sums(row_sum, (new_point, new_point))
    overflowed = ~own.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    if ok is not None:
        overflowed = overflowed & ok
    given.overflowed = overflowed
    for tensor in moments:
        tensor.masked_fill_(overflowed, 0.0)
    for tensor, before in zip(moments, earlier, strict=False):
        keep_(tensor, before, ~ok)  # type: ignore[operator]
    return torch.where(overflowed, given.point, new_point)


def _moments(state: State, part: str) -> Moments:
    """Return the moments of one part of the velocity."""
    first, second = state["momentum_" + part], state["exp_avg_sq_" + part]
    return Moments(first, second, state.get("max_exp_avg_sq_" + part))


@torch.no_grad()
def _undefer(owner: Owner, names: StateNames) -> None:
    """Turn a momentum that other options have left behind into what ``names`` says is kept."""
    state, kept = owner.state, {*names.tall, *names.small_of_tall}
    name = "deferred_base" if "deferred_base" in kept else "momentum_normal"
    if owner.shards is not None or not kept:
        return
    for index, (part, reading) in enumerate(owner.manifold.blocks(owner.parameter)):
        suffix = suffix_of(index)
        known = {word: state[word + suffix] for word in _NORMAL if word + suffix in state}
        base, gone = known.get("deferred_base", known.get("momentum_normal")), known.keys() - kept
        if base is None or not gone:
            continue
        value = reading.matrices(base)
        if "deferred_factor" in gone:
            value = value @ known["deferred_factor"]
        if "deferred_shift" in gone:
            point = reading.matrices(part).to(value.dtype) / reading.scale
            value = value - point @ known["deferred_shift"]
        state[name + suffix] = reading.stored(value, base.shape).contiguous()
        for word in gone:
            del state[word + suffix]
