"""CayleySGD and CayleyAdam: momentum along an iterated Cayley map."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_integer
from stiefel_opt.functional.cayley import MAX_SQUARE, SQUARE, cayley_adam, cayley_sgd
from stiefel_opt.optim.base import StiefelOptimizer
from stiefel_opt.optim.commit import Rule
from stiefel_opt.optim.families import AdamLike, SGDLike, options_of
from stiefel_opt.optim.state import State
from stiefel_opt.optim.stiefel import U_STATE, Z_STATE
from stiefel_opt.optim.torch_rules import Group
from stiefel_opt.tags.manifold import Stiefel

SQUARES = tuple(State(name, "1", dtype="real", least=0.0) for name in (SQUARE, MAX_SQUARE))


class _Iterated(StiefelOptimizer):
    """What both classes say of the options of their Cayley map."""

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_integer("steps", group["steps"], 0)
        check_flag("exact", group["exact"])


class CayleySGD(_Iterated, SGDLike):
    r"""Cayley SGD with momentum for constrained parameters; plain ones get torch's SGD.

    .. math::
        M \leftarrow \mu M - G,\quad
        W = \hat W - \hat W^\top,\quad \hat W = M X^\top - \tfrac12 X X^\top M X^\top,\quad
        X \leftarrow \mathrm{cay}(\alpha W) X,\quad M \leftarrow W X,

    with :math:`\alpha = \min(\eta, 1 / (|W| + 10^{-8}))` and the Cayley map by fixed-point
    iterations, or exactly. Released implementations write the momentum to a temporary, so that
    theirs stays zero, and leave the error of the iteration in X; here neither happens.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, fused,
            differentiable, nonfinite, stiefel: As in :class:`StiefelSGD`.
        steps: Iterations of the Cayley map. Default: 2.
        exact: Solve for it instead. Default: no.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Eight products of n x m by m x m a step, batched over equal matrices; the iterations are of
        m x m. State is one tensor like the parameter and one of m x m.

    Reference:
        Li, Li & Todorovic, Efficient Riemannian optimization on the Stiefel manifold via the Cayley
        transform (ICLR 2020), Algorithm 1.
    """

    rule = "CayleySGD"
    sums_over_rows = True
    learns_scale = True

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
        steps: int = 2,
        exact: bool = False,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return Z_STATE, U_STATE

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, cayley_sgd, "steps", "exact")


class CayleyAdam(_Iterated, AdamLike):
    r"""Cayley Adam for constrained parameters; plain ones get torch's Adam.

    As :class:`CayleySGD`, with one second moment v for each matrix:

    .. math::
        M \leftarrow \beta_1 M - (1 - \beta_1) G,\quad
        v \leftarrow \beta_2 v + (1 - \beta_2) |G|^2,\quad
        W = \frac{\hat W - \hat W^\top}{c_1 \sqrt{v / c_2 + \epsilon}},\quad c_i = 1 - \beta_i^t.

    Args:
        params, lr, weight_decay, amsgrad, foreach, maximize, capturable, differentiable, fused,
            decoupled_weight_decay, nonfinite, stiefel: As in :class:`StiefelAdam`.
        betas, eps: As in ``torch.optim.Adam``, for both kinds; ``eps`` is under the root for
            constrained parameters. The paper has betas of 0.9 and 0.99.
        steps, exact: As in :class:`CayleySGD`.

    Raises:
        ValueError, TypeError: for options or parameters that cannot be used, naming them.

    Note:
        Cost and state are those of :class:`CayleySGD`, and one number for each matrix.

    Reference:
        Li, Li & Todorovic (ICLR 2020), Algorithm 2.
    """

    rule = "CayleyAdam"
    sums_over_rows = True
    learns_scale = True

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
        steps: int = 2,
        exact: bool = False,
        nonfinite: str = "skip",
        stiefel: Stiefel | bool | None = None,
    ) -> None:
        super().__init__(params, options_of(locals()))

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        return (Z_STATE, U_STATE, *SQUARES[: 1 + group["amsgrad"]])

    @override
    def rule_for(self, group: Group) -> Rule:
        return self.bound(group, cayley_adam, "steps", "exact")
