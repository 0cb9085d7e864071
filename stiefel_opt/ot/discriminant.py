"""Wasserstein discriminant analysis: classes near themselves and far from each other."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_integer, check_range, fail, users_level
from stiefel_opt.methods import Minimum, minimize
from stiefel_opt.numerics import random_point
from stiefel_opt.ot.clouds import (
    generator_of,
    read_cloud,
    read_projection,
    refuse_keywords,
    written_like,
)

_NOTHING: Final = 1e-300  # added to the sums of points that pad a class, which are zero
_SMALLEST_SUM: Final = 1e-50  # of a row of the kernel: below it gradients may overflow
_ABSENT: Final = -1e30  # logarithm of the weight of a point that pads a class
_NO_RATIO: Final = 1e-6  # below it the points of a class stay where they are
_OF_POT: Final = {
    "p": "pass k",
    "solver": "it is L-BFGS",
    "sinkhorn_method": "logarithms are taken where reg asks for them",
    "maxiter": "pass max_evaluations",
    "verbose": "pass progress=True",
    "P0": "pass init",
    "normalize": "standardise X",
}


@dataclass(frozen=True, repr=False)
class DiscriminantResult:
    """Result of :func:`wasserstein_discriminant`; the projection is of the kind of ``X``.

    Attributes:
        ratio: Transport within classes over transport between them, the minimised quantity.
        projection: P, ``(d, k)`` with orthonormal columns.
        converged: Whether the relative gradient fell to ``tol``.
        evaluations: Evaluations of ratio and gradient, of all starting points.
    """

    ratio: float
    projection: Any
    converged: bool
    evaluations: int

    @override
    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.projection.shape))
        ended = f"converged={self.converged}, evaluations={self.evaluations}"
        return f"DiscriminantResult(ratio={self.ratio:.6g}, {ended}, projection {shape})"


def wasserstein_discriminant(
    X: Any,
    y: Any,
    *,
    k: int = 2,
    reg: float = 1.0,
    sinkhorn_iterations: int = 10,
    max_evaluations: int = 200,
    tol: float = 1e-4,
    restarts: int = 1,
    init: Any = None,
    seed: int | None = None,
    progress: bool = False,
    **of_pot: Any,
) -> DiscriminantResult:
    r"""Find the projection under which classes are close to themselves and far from each other.

    .. math::
        \min_{P \in \mathrm{St}(d, k)} \sum_c W(X_c P, X_c P)
        \,\big/\, \sum_{c < c'} W(X_c P, X_{c'} P), \quad W = \langle T, M \rangle

    with squared distances M and the plan T of so many Sinkhorn iterations from ones, through which
    the gradient is taken.

    Args:
        X: Points, ``(n, d)``, array, list or tensor; computed in float64 on its device. Standardise
            features that have different units.
        y: Labels, ``(n,)``, of two classes or more.
        k: Dimension of the projection, 1 to d. Default: 2.
        reg: Regularization, in units of squared distance: large values compare means, small ones
            the nearest points, until points of a class stay where they are. Default: 1, for
            standardised features.
        sinkhorn_iterations: Default: 10.
        max_evaluations: Most evaluations from one starting point. Default: 200.
        tol: Stop where the Riemannian gradient is ``tol`` times the largest Euclidean one so far.
            Default: 1e-4.
        restarts: Starting points; the best end is returned. Default: 1.
        init: First starting point, ``(d, k)`` with orthonormal columns. Default: a random one.
        seed: For random starting points. Default: another one at each call.
        progress: Show a bar; needs tqdm. Default: no.
        of_pot: None. The keywords of ``ot.dr.wda`` are refused with ours.

    Returns: See :class:`DiscriminantResult`.
    Raises:
        ValueError, TypeError: for arrays or options that cannot be used, naming them.
    Warns: where the gradient has not fallen to ``tol``, unless that is 0; where the ratio is below
        a millionth.

    Note: L-BFGS, by :func:`stiefel_opt.minimize`. An evaluation costs C (C + 1) / 2 plans of C
        classes, in one batch as wide as the largest class; their exponentials and those of the
        gradient are in memory at once. The lowest ratio need not classify best: compare values of
        ``reg`` on other points.
    Reference: Flamary, Cuturi, Courty & Rakotomamonjy, Wasserstein discriminant analysis (2018),
        equation 3.
    """
    refuse_keywords("wasserstein_discriminant", of_pot, _OF_POT)
    check_range("reg", reg, 0.0, open_low=True)
    check_integer("sinkhorn_iterations", sinkhorn_iterations, 1)
    check_integer("max_evaluations", max_evaluations, 1)
    check_range("tol", tol, 0.0)
    check_integer("restarts", restarts, 1)
    check_flag("progress", progress)
    with torch.inference_mode(mode=False), torch.enable_grad():
        points = read_cloud("X", X)
        points = points - points.mean(0)
        shape = points.size(1), check_integer("k", k, 1, points.size(1))
        classes = _Classes(points, y, reg, sinkhorn_iterations)
        generator = generator_of(seed)
        draw = partial(random_point, *shape, generator=generator, dtype=torch.float64)
        start = draw() if init is None else read_projection("init", init, *shape)
        found = minimize(
            classes.ratio,
            start.to(points.device),
            starts=restarts,
            tolerance=tol,
            max_evaluations=max_evaluations,
            progress=progress,
            generator=generator,
        )
    if (tol > 0 and not found.success) or not found.fun > _NO_RATIO:
        _warn(found, points, reg)
    return DiscriminantResult(found.fun, written_like(X, found.x), found.success, found.nfev)


def _warn(found: Minimum, points: Tensor, reg: float) -> None:
    projected = points @ found.x.to(points)
    spread = 2 * float(projected.square().sum(1).mean())
    reason = "has not converged" if found.fun > _NO_RATIO else "leaves classes where they are"
    warnings.warn(
        f"wasserstein_discriminant {reason}: ratio {found.fun:.2g} after {found.nfev} evaluations, "
        f"{found.message}; reg={reg:g} is {reg / (spread or 1.0):.1e} of the mean squared distance "
        "of the projected points: standardise X, raise reg or max_evaluations",
        stacklevel=users_level(),
    )


class _Classes:
    """Points of each class, padded to one size by points without weight, and all pairs of them."""

    def __init__(self, points: Tensor, labels: Any, reg: float, iterations: int) -> None:
        names = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if names.shape != (len(points),):
            wanted = f"have one label for each of the {len(points)} points of `X`"
            raise ValueError(fail("y", wanted, f"shape {names.shape}"))
        if bool((names != names).any()) or any(name is None for name in names.tolist()):
            raise ValueError(fail("y", "hold no missing labels", "NaN or None"))
        if not bool(points.any()):
            raise ValueError(fail("X", "hold points that differ", "equal ones"))
        classes = np.unique(names)
        if len(classes) < 2:
            raise ValueError(fail("y", "hold two classes or more", "1 class"))
        parts = [points[torch.from_numpy(names == each).to(points.device)] for each in classes]
        weights = [points.new_full((len(part),), 1 / len(part)) for part in parts]
        pad = torch.nn.utils.rnn.pad_sequence
        self.points = pad(parts, batch_first=True)  # (C, n, d)
        self.weights = pad(weights, batch_first=True)  # (C, n)
        self.first, self.second = torch.triu_indices(len(parts), len(parts), device=points.device)
        self.within = self.first == self.second
        self.reg, self.iterations = reg, iterations

    def ratio(self, projection: Tensor) -> Tensor:
        """Transport within classes over transport between them."""
        projected = self.points @ projection
        squares = projected.square().sum(2)
        left, right = projected[self.first], projected[self.second]
        cost = squares[self.first, :, None] + squares[self.second, None] - 2 * left @ right.mT
        transported = (self._plans(cost) * cost).sum((1, 2))
        return transported[self.within].sum() / transported[~self.within].sum()

    def _plans(self, cost: Tensor) -> Tensor:
        """Plans after Sinkhorn iterations from ones: columns are balanced first, then rows.

        The first columns are balanced with their least cost taken off, so that no sum underflows.
        Where a sum of the first rows nearly does, as for a small `reg`, logarithms are balanced.
        """
        a, b = self.weights[self.first], self.weights[self.second]
        absent = (a == 0)[:, :, None]
        least = cost.detach().masked_fill(absent, torch.inf).amin(1, keepdim=True)
        kernel = ((least - cost) / self.reg).exp().masked_fill(absent, 0.0)
        kernel = kernel * (b / kernel.sum(1))[:, None]
        sums = kernel.sum(2).masked_fill(a == 0, 1.0)
        if not float(sums.detach().amin()) > _SMALLEST_SUM:
            return self._plans_of_logarithms((-cost / self.reg).masked_fill(absent, _ABSENT))
        u, v = a / sums, None
        for _ in range(self.iterations - 1):
            v = b / ((kernel.mT @ u[:, :, None])[:, :, 0] + _NOTHING)
            u = a / ((kernel @ v[:, :, None])[:, :, 0] + _NOTHING)
        plan = u[:, :, None] * kernel
        return plan if v is None else plan * v[:, None]

    def _plans_of_logarithms(self, exponent: Tensor) -> Tensor:
        """The same plans by sums of exponentials without overflow, several times slower."""
        logs = self.weights.log().clamp_min(_ABSENT)
        f = torch.zeros_like(exponent[:, :, 0])
        g = torch.zeros_like(exponent[:, 0])
        for _ in range(self.iterations):
            g = logs[self.second] - (exponent + f[:, :, None]).logsumexp(1)
            f = logs[self.first] - (exponent + g[:, None]).logsumexp(2)
        return (exponent + f[:, :, None] + g[:, None]).exp()
