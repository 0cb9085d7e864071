"""Free-support barycenter of clouds under the projection-robust distance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import (
    ProgressBar,
    check_flag,
    check_integer,
    check_range,
    fail,
    users_level,
)
from stiefel_opt.ot.clouds import (
    generator_of,
    read_cloud,
    read_clouds,
    read_shares,
    refuse_keywords,
    written_like,
)
from stiefel_opt.ot.exact import exact_plan
from stiefel_opt.ot.projection import projection_robust_wasserstein

_ROUGH: Final = {"max_iter": 20, "tol": 1e-2}  # of the projections on the way
_OF_POT: Final = {
    "measures_locations": "pass clouds",
    "measures_weights": "points weigh equally",
    "X_init": "pass init",
    "b": "points weigh equally",
    "numItermax": "pass max_iter",
    "stopThr": "pass tol, which is relative to the spread",
    "verbose": "pass progress=True",
    "log": "the result has values",
    "numThreads": "set torch.set_num_threads",
}


@dataclass(frozen=True, repr=False)
class BarycenterResult:
    """Result of :func:`prw_barycenter`; arrays are of the kind of the first cloud.

    Attributes:
        points: ``(points, d)``, of equal weights.
        value: Weighted sum of the squared distances to the clouds, each exact under its projection.
        projections: Of each cloud, ``(d, k)``.
        converged: Whether the points moved by ``tol`` of the spread of the clouds at last, or less.
        values: Of every iteration, under projections that are roughly the best.
    """

    points: Any
    value: float
    projections: list[Any]
    converged: bool
    values: list[float]

    @override
    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.points.shape))
        ended = f"converged={self.converged}, iterations={len(self.values)}"
        return f"BarycenterResult(value={self.value:.6g}, {ended}, points {shape})"


def prw_barycenter(
    clouds: Sequence[Any],
    weights: Any = None,
    *,
    points: int = 50,
    k: int = 2,
    reg: float | None = None,
    max_iter: int = 100,
    tol: float = 1e-3,
    init: Any = None,
    seed: int | None = None,
    progress: bool = False,
    **of_pot: Any,
) -> BarycenterResult:
    r"""Find equally weighted points that are near to all clouds in the projection-robust distance.

    .. math::
        \min_z \sum_i w_i \max_{U \in \mathrm{St}(d, k)} W(z U, X_i U)

    By turns: the projection :math:`U_i` of every cloud, from the last one, with its exact plan
    :math:`\pi_i`; then :math:`z \leftarrow z + s \sum_i w_i (m \pi_i^\top X_i - z) U_i U_i^\top`
    for m points. The step s is 1, and halved wherever the value rises.

    Args:
        clouds: Arrays, lists or tensors, ``(n_i, d)``, of equally weighted points; computed in
            float64 on their device.
        weights: Of the clouds, not negative, summing to one. Default: equal.
        points: How many to find, m. Default: 50.
        k: Dimension of the projections, 1 to d; at d the iteration is that of POT's
            ``ot.lp.free_support_barycenter``. Default: 2.
        reg: As in :func:`projection_robust_wasserstein`, in the search for projections.
        max_iter: Most iterations. Default: 100.
        tol: Stop where the points move by ``tol`` of the spread of the clouds or less, both root
            mean squares. Default: 1e-3.
        init: First points, ``(m, d)``. Default: drawn from all clouds by their weights.
        seed: For these draws. Default: another one at each call.
        progress: Show a bar; needs tqdm. Default: no.
        of_pot: None. The keywords of ``ot.lp.free_support_barycenter`` are refused with ours.

    Returns: See :class:`BarycenterResult`.
    Raises:
        ImportError: without POT; ``pip install pot``.
        ValueError, TypeError: for arrays or options that cannot be used, naming them.
    Warns: where the points still move after ``max_iter``, unless ``tol`` is 0; and as
        :func:`projection_robust_wasserstein`, of the last projections.

    Note: A local method; directions that no projection sees stay as they begin. An iteration costs
        a few steps of :func:`projection_robust_wasserstein` and an exact plan for each cloud.
    Reference: Cuturi & Doucet (ICML 2014), algorithm 2, for k = d; the step is the subgradient
        of Paty & Cuturi (ICML 2019), section 4.
    """
    refuse_keywords("prw_barycenter", of_pot, _OF_POT)
    check_flag("progress", progress)
    check_integer("max_iter", max_iter, 1)
    check_range("tol", tol, 0.0)
    with torch.inference_mode(mode=False), torch.no_grad():
        search = _Search(clouds, weights, k, reg)
        moving = _first_points(search, points, init, seed)
        step, best, share = 1.0, (math.inf, moving), math.inf
        values: list[float] = []
        with ProgressBar(max_iter, progress) as bar:
            for _ in range(max_iter):
                value, direction = search.look(moving, **_ROUGH)
                step = step if not values or value <= values[-1] else step / 2
                best = min(best, (value, moving), key=lambda pair: pair[0])
                values.append(value)
                bar.update()
                share = step * float(direction.square().sum(1).mean().sqrt()) / search.spread
                if share <= tol:
                    break
                moving = moving + step * direction
        value, _ = search.look(best[1])
    if share > tol > 0:
        steps = f"after {max_iter} iterations, tol={tol:g}"
        warnings.warn(
            f"prw_barycenter has not converged: its points move by {share:.1e} of the spread "
            f"of the clouds {steps}; raise max_iter, or begin there by init=",
            stacklevel=users_level(),
        )
    kind = clouds[0]
    projections = [written_like(kind, each) for each in search.projections if each is not None]
    found = written_like(kind, best[1] + search.centre)
    return BarycenterResult(found, value, projections, share <= tol, values)


class _Search:
    """The clouds, and the projection of each at last."""

    def __init__(self, clouds: Sequence[Any], weights: Any, k: int, reg: float | None) -> None:
        if not isinstance(clouds, Sequence) or not clouds:
            given = "none" if isinstance(clouds, Sequence) else type(clouds).__name__
            raise TypeError(fail("clouds", "be a list of at least one array", given))
        read = [read_cloud(f"clouds[{number}]", each) for number, each in enumerate(clouds)]
        size = read[0].size(1)
        for number, each in enumerate(read):
            if each.size(1) != size:
                wanted = f"have {size} columns like `clouds[0]`"
                raise ValueError(fail(f"clouds[{number}]", wanted, each))
        self.weights = read_shares("weights", weights, len(read), "clouds").tolist()
        self.k, self.reg = check_integer("k", k, 1, size), reg
        self.centre = torch.stack([each.mean(0) for each in read]).mean(0)
        self.clouds = [each - self.centre for each in read]
        squares = torch.stack([each.square().sum(1).mean() for each in self.clouds])
        self.spread = float(squares.mean().sqrt()) or 1.0
        self.projections: list[Tensor | None] = [None] * len(read)

    def look(self, points: Tensor, **options: Any) -> tuple[float, Tensor]:
        """Improve the projections; return the value, and the direction in which points move."""
        value, direction = 0.0, torch.zeros_like(points)
        for number, cloud in enumerate(self.clouds):
            projection = self._projection(number, points, options)
            pair = read_clouds(cloud, points, None, None)
            plan, cost = exact_plan(pair, projection)
            weight = self.weights[number]
            value += weight * float((plan * cost).sum())
            targets = len(points) * plan.to(points.device).mT @ cloud
            direction += weight * (targets - points) @ projection @ projection.mT
        return value, direction

    def _projection(self, number: int, points: Tensor, options: dict[str, Any]) -> Tensor:
        cloud, former = self.clouds[number], self.projections[number]
        if self.k == cloud.size(1):
            projection = torch.eye(self.k, dtype=cloud.dtype, device=cloud.device)
        else:
            with warnings.catch_warnings():
                if options:  # the next look goes on from there
                    warnings.filterwarnings("ignore", "projection_robust_wasserstein has not conv")
                projection = projection_robust_wasserstein(
                    cloud, points, k=self.k, reg=self.reg, init=former, **options
                ).projection
        self.projections[number] = projection
        return projection


def _first_points(search: _Search, points: int, init: Any, seed: int | None) -> Tensor:
    if init is not None:
        given = read_cloud("init", init)
        if given.size(1) != search.clouds[0].size(1):
            wanted = f"have {search.clouds[0].size(1)} columns like the clouds"
            raise ValueError(fail("init", wanted, given))
        return given - search.centre
    count = check_integer("points", points, 1)
    probability = [
        torch.full((len(cloud),), weight / len(cloud), dtype=torch.float64)
        for weight, cloud in zip(search.weights, search.clouds, strict=True)
    ]
    drawn = torch.cat(probability)
    again = count > int((drawn > 0).sum())
    rows = torch.multinomial(drawn, count, replacement=again, generator=generator_of(seed))
    return torch.cat(search.clouds)[rows.to(search.centre.device)]
