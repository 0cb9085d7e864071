"""RGAS and RAGAS of Lin et al. (2020) as optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_range
from stiefel_opt.functional import Move, Scalar, Tensors, project_tangent
from stiefel_opt.methods import ProjectedRGD, retract_along
from stiefel_opt.numerics import Reader, Sums
from stiefel_opt.optim import Group, Rule, SGDLike, State


class RGAS(ProjectedRGD):
    r"""Riemannian gradient ascent with Sinkhorn: :math:`U \leftarrow \mathrm{qf}(U - \eta\,\xi)`.

    :math:`\xi` is the tangent part of the gradient of what is minimised, and qf the orthogonal
    factor with positive diagonal of R: :class:`stiefel_opt.ProjectedRGD` without momentum, with the
    Euclidean metric. Pass it to :func:`projection_robust_wasserstein` as
    ``optimizer=lambda params: RGAS(params, lr=...)``.

    Args:
        params: Matrices ``(d, k)`` with orthonormal columns; if wide, rows.
        lr: Step length; it scales with the inverse of squared distances.

    Raises:
        ValueError: for a negative learning rate.
    Note: Two products of d x k by k x k and a Cholesky factor of k x k. No state.
    Reference: Lin, Fan, Ho, Cuturi & Jordan, Projection robust Wasserstein distance and Riemannian
        optimization (NeurIPS 2020), Algorithm 1.
    """

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, lr, metric="euclidean", retraction="qr", stiefel=True)


class RAGAS(SGDLike):
    r"""RGAS with rows and columns of the gradient scaled by running second moments.

    With p, q the running maxima of exponential averages of the mean squares of the rows and the
    columns of :math:`\xi`, step t moves along the tangent part of
    :math:`\mathrm{Diag}(p)^{-1/4}\,\xi\,\mathrm{Diag}(q)^{-1/4}` by :math:`\eta / \sqrt{t}`.

    Args:
        params: As for :class:`RGAS`.
        lr: Step length of the first step.
        beta: Decay of the averages. Default: 0.8.
        floor: Smallest value of p and q. Default: 1e-6.

    Raises:
        ValueError: for a negative learning rate, beta outside [0, 1), or floor <= 0.
    Note: Six products of d x k by k x k and a Cholesky factor of k x k; state of four tensors like
        the parameter. The factor :math:`1 / \sqrt{t}` is that of the released code.
    Reference: Lin, Fan, Ho, Cuturi & Jordan, Projection robust Wasserstein distance and Riemannian
        optimization (NeurIPS 2020), Algorithm 2.
    """

    def __init__(self, params: ParamsT, lr: float, beta: float = 0.8, floor: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "floor": floor, "stiefel": True})

    @override
    def check_options(self, group: Group) -> None:
        super().check_options(group)
        check_range("beta", group["beta"], 0.0, 1.0)
        check_range("floor", group["floor"], 0.0, open_low=True)

    @override
    def state_for(self, group: Group) -> tuple[State, ...]:
        starts = {"mean": 0.0, "largest": group["floor"]}.items()
        sides = ("rows", "columns")
        return tuple(State(f"{kind}_{side}", start=at) for side in sides for kind, at in starts)

    @override
    def rule_for(self, group: Group) -> Rule:
        return partial(_ragas, beta=group["beta"])


def _ragas(
    X: Tensor,
    G: Tensor,
    state: Mapping[str, Tensor],
    *,
    lr: Scalar,
    step: Scalar,
    sums: Sums,
    reader: Reader,
    beta: float,
) -> Move:
    """Return the new point, the new state and the length of one step of RAGAS."""
    scaled = gradient = project_tangent(X, G, sums=sums)
    new: Tensors = {}
    for dim, side in ((-1, "rows"), (-2, "columns")):
        now = gradient.square().mean(dim, keepdim=True).expand_as(X)
        mean = torch.lerp(now, state[f"mean_{side}"], beta)
        largest = torch.maximum(state[f"largest_{side}"], mean)
        new |= {f"mean_{side}": mean, f"largest_{side}": largest}
        scaled = scaled * largest.pow(-0.25)
    tangent = project_tangent(X, scaled, sums=sums) / -(step**0.5)
    (turn,) = sums((X, tangent))
    new_X, length = retract_along(X, turn, tangent, lr, "qr", sums, reader)
    return new_X, new, length
