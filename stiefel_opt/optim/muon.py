"""StiefelMuon: steepest descent under the spectral norm, AdamW or Muon for plain tensors."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_flag, check_range
from stiefel_opt.functional.flows import Tensors
from stiefel_opt.functional.learned_scale import PULL, adam_scale
from stiefel_opt.functional.muon import AMBIENT, muon
from stiefel_opt.optim.commit import Rule, ScaleRule
from stiefel_opt.optim.families import SCALE_MOMENTS, MuonLike, options_of, with_factor
from stiefel_opt.optim.state import State
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.manifold import Stiefel

PLAIN: Final = ("adamw", "muon")


class StiefelMuon(MuonLike):
    r"""Muon that keeps constrained parameters orthonormal; plain ones get torch's AdamW or Muon.

    The steepest tangent direction of spectral norm 1 for the mean B of the gradients,

    .. math::
        B \leftarrow \mu B + (1 - \mu) G,\quad
        D = \arg\max \{\langle M, D\rangle : |D|_2 \le 1,\ X^\top D \text{ skew}\},\quad
        X \leftarrow (X - \eta D)(I + \eta^2 D^\top D)^{-1/2},

    with M = mu B + (1 - mu) G, or B without ``nesterov``. Where D'D = I, as is usual, the angle
    between X v and the new X v is atan eta for every v, so that the learning rate needs no scaling
    by shape or by the size of the gradient; see :func:`stiefel_opt.functional.muon`.

    Args:
        params: Parameters, named parameters or groups, as in torch.
        lr: Learning rate, a number or a tensor. Constrained parameters turn by at most
            atan(lr / scale) and 76 degrees; plain ones usually want another learning rate.
        momentum, nesterov: As in ``torch.optim.Muon``, for constrained parameters and those that
            follow Muon. ``OneCycleLR`` and ``CyclicLR`` change ``betas`` instead.
        weight_decay: For plain parameters, decoupled. It cannot move a constrained one.
        betas, eps: As in ``torch.optim.AdamW``, for the others.
        plain: Rule of plain parameters: "adamw", or "muon" for those that are real and have two
            dimensions, at the other defaults of ``torch.optim.Muon``; the others, and plain rows of
            constrained parameters, get AdamW. Groups may differ.
        maximize: Ascend.
        foreach, fused, capturable: For AdamW, as in torch.
        differentiable: Must be False.
        scale_pull, nonfinite, stiefel: As in :class:`StiefelSGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Five products of n x m by m x m a step, and for n > m a Cholesky factor of m x m in float64
        and 12 to 43 products of 2m x 2m, for n = m about as many of m x m. State is one tensor like
        the parameter. Rows shared by several processes are added up once, 2 m^2 numbers for each
        matrix.

    Reference:
        Bernstein, Modular Manifolds (Thinking Machines, 2025), for the problem; Jordan et al., Muon
        (2024).
    """

    rule = "StiefelMuon"
    sums_over_rows = True
    learns_scale = True
    velocity_names = (AMBIENT,)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        plain: str = "adamw",
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        scale_pull: float = PULL,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        options = options_of(locals())
        super().__init__(params, {**options, "amsgrad": False, "decoupled_weight_decay": True})

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_range("momentum", group["momentum"], 0.0, 1.0)
        check_flag("nesterov", group["nesterov"])
        check_choice("plain", group["plain"], PLAIN)

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return () if group["momentum"] == 0 else (State(AMBIENT),)

    @override
    def rule_for(self, group: Group) -> Rule:
        rule = partial(muon, momentum=group["momentum"], nesterov=group["nesterov"])
        return with_factor(rule, group["maximize"])

    @override
    def scale_rule_for(self, group: Group) -> ScaleRule:
        betas = group["momentum"], group["betas"][1]
        options = {"betas": betas, "eps": group["eps"], "pull": group["scale_pull"]}
        rule: Any = partial(adam_scale, spectral=True, **options)
        rule = with_factor(rule, group["maximize"])
        return ScaleRule(rule, SCALE_MOMENTS)

    @override
    def velocity_in(self, X: Tensor, state: Tensors) -> tuple[Tensor | None, Tensor | None]:
        if (B := state.get(AMBIENT)) is None:  # -(X Z + U)
            return None, None
        inner = X.mH @ B
        return (inner.mH - inner) / 2, X @ inner - B

    @override
    def state_of_velocity(self, X: Tensor, Z: Tensor, U: Tensor) -> Tensors:
        return {AMBIENT: -(X @ Z + U)}
