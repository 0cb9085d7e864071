"""Exact transport under a given projection, by POT's network simplex."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import torch
from torch import Tensor

from stiefel_opt.errors import check_integer, fail, imported
from stiefel_opt.ot.clouds import Clouds, read_clouds, read_projection

PIVOTS: Final = 1_000_000


def projected_wasserstein(
    x: Any, y: Any, projection: Any, a: Any = None, b: Any = None, *, max_iter: int = PIVOTS
) -> float:
    r"""Return the exact squared Wasserstein distance of two projected clouds, without entropy.

    :math:`\min_{\pi \in \Pi(a, b)} \sum_{ij} \pi_{ij} |U^\top (x_i - y_j)|^2`. The value of an
    entropic plan is larger, the more so the larger its regularization.

    Args:
        x, y, a, b: Clouds and weights, as in :func:`projection_robust_wasserstein`.
        projection: U, ``(d, k)`` with orthonormal columns.
        max_iter: Most pivots of the network simplex. Default: a million.

    Returns: The squared distance.
    Raises:
        ImportError: without POT; ``pip install pot``.
        RuntimeError: if ``max_iter`` is too small.
        ValueError, TypeError: for arrays that cannot be used, naming them.

    Note: About cubic in the number of points, on the CPU; two n x m arrays.
    """
    clouds = read_clouds(x, y, a, b)
    point = read_projection("projection", projection, clouds.dimension).to(clouds.x.device)
    check_integer("max_iter", max_iter, 1)
    plan, cost = exact_plan(clouds, point, max_iter)
    return float((plan * cost).sum())


def exact_plan(clouds: Clouds, point: Tensor, max_iter: int = PIVOTS) -> tuple[Tensor, Tensor]:
    """Return plan and cost under ``point`` between the points with weight, on the CPU."""
    transport = imported("ot", "pot")
    cost = torch.cdist(clouds.x @ point, clouds.y @ point).square().cpu()
    unit = 2.0 ** math.frexp(float(cost.max()))[1]  # POT's tolerances are absolute
    weights = clouds.a.cpu().numpy(), clouds.b.cpu().numpy()
    with warnings.catch_warnings():  # what it warns of is an error here
        warnings.simplefilter("ignore")
        plan, log = transport.emd(*weights, cost.numpy() / unit, numItermax=max_iter, log=True)
    if log["result_code"] != 1:  # POT's code for an optimal plan
        raise RuntimeError(fail("max_iter", "be enough pivots", max_iter, f"POT: {log['warning']}"))
    return torch.from_numpy(plan), cost
