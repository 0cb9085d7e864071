"""RGAS and RAGAS of Lin et al. (2020), as torch optimizers for one projection."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from stiefel_opt.errors import check_range, check_type, fail
from stiefel_opt.numerics import retraction, tangent_part


class _Ascent(Optimizer):
    """U <- qf(U - lr D) with a direction D that a subclass chooses."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._check_options(defaults)
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as ``torch.optim.Optimizer``; a refused group leaves no trace."""
        check_type("param_group", param_group, dict, "be a dict")
        group = dict(param_group)
        params = group["params"]
        if not isinstance(params, (Tensor, set)):  # torch refuses a set
            group["params"] = params = list(params)
        self._check_options({**self.defaults, **group})
        for each in [params] if isinstance(params, Tensor) else params:
            parameter = each[-1] if isinstance(each, tuple) else each  # with its name
            is_tensor = isinstance(parameter, Tensor)  # torch refuses others
            if is_tensor and (parameter.ndim != 2 or parameter.size(0) < parameter.size(1)):
                shape = f"shape {tuple(parameter.shape)}"
                raise ValueError(fail("params", "be tall matrices", shape))
        super().add_param_group(group)

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise for options that cannot be."""
        check_range("lr", group["lr"], 0.0)

    @abstractmethod
    def _direction(self, point: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the tangent vector to move along, from the descending Riemannian gradient."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient; ``closure`` as in torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for point in group["params"]:
                if point.grad is None:
                    continue
                gradient = tangent_part(point, point.grad)
                step = -group["lr"] * self._direction(point, gradient, group)
                point.copy_(retraction(point, step, "qr"))
        return loss


class RGAS(_Ascent):
    r"""Riemannian gradient ascent with Sinkhorn: :math:`U \leftarrow \mathrm{qf}(U - \eta\,\xi)`.

    :math:`\xi` is the tangent part of the gradient of what is minimised, and qf the orthogonal
    factor with positive diagonal of R. Pass it to :func:`projection_robust_wasserstein` as
    ``optimizer=lambda params: RGAS(params, lr=...)``.

    Args:
        params: Matrices ``(d, k)`` with orthonormal columns, d >= k.
        lr: Step length; it scales with the inverse of squared distances.

    Raises:
        ValueError: for a negative learning rate, or matrices that are wide.
    Note: Two products of d x k by k x k and a QR factorisation. No state.
    Reference: Lin, Fan, Ho, Cuturi & Jordan, Projection robust Wasserstein distance and Riemannian
        optimization (NeurIPS 2020), Algorithm 1.
    """

    def __init__(self, params: ParamsT, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @override
    def _direction(self, point: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient


class RAGAS(_Ascent):
    r"""RGAS with rows and columns of the gradient scaled by running second moments.

    With p, q the running maxima of exponential averages of the mean squares of the rows and the
    columns of :math:`\xi`, step t moves along the tangent part of
    :math:`\mathrm{Diag}(p)^{-1/4}\,\xi\,\mathrm{Diag}(q)^{-1/4}` by :math:`\eta / \sqrt{t}`.

    Args:
        params: Matrices ``(d, k)`` with orthonormal columns, d >= k.
        lr: Step length of the first step.
        beta: Decay of the averages. Default: 0.8.
        floor: Smallest value of p and q. Default: 1e-6.

    Raises:
        ValueError: for a negative learning rate, beta outside [0, 1), floor <= 0, or wide matrices.
    Note: Four products of d x k by k x k and a QR factorisation; state of d and of k numbers,
        twice. The factor :math:`1 / \sqrt{t}` is that of the released code.
    Reference: Lin, Fan, Ho, Cuturi & Jordan, Projection robust Wasserstein distance and Riemannian
        optimization (NeurIPS 2020), Algorithm 2.
    """

    def __init__(self, params: ParamsT, lr: float, beta: float = 0.8, floor: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "floor": floor})

    @override
    def _check_options(self, group: dict[str, Any]) -> None:
        super()._check_options(group)
        check_range("beta", group["beta"], 0.0, 1.0)
        check_range("floor", group["floor"], 0.0, open_low=True)

    @override
    def _direction(self, point: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state, squares, scaled = self.state[point], gradient.square(), gradient
        step = state.setdefault("step", torch.zeros((), dtype=torch.float32)).add_(1)
        for dim, name in ((1, "rows"), (0, "columns")):
            now = squares.mean(dim)
            mean = state.setdefault(f"mean_{name}", torch.zeros_like(now))
            largest = state.setdefault(f"largest_{name}", torch.full_like(now, group["floor"]))
            torch.maximum(largest, mean.lerp_(now, 1 - group["beta"]), out=largest)
            scaled = scaled * largest.pow(-0.25).unsqueeze(dim)
        return tangent_part(point, scaled) / math.sqrt(float(step))
