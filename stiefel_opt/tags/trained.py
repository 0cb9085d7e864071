"""Weights that look trained and move far to be orthonormal: what they had learned is lost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from stiefel_opt.errors import how_many, users_level
from stiefel_opt.numerics.device import finest_dtype, has_values, widened
from stiefel_opt.numerics.geometry import is_far
from stiefel_opt.tags.manifold import Stiefel
from stiefel_opt.tags.points import largest_error, nearest, wrong_signs

# Independent entries have no singular value above (sqrt(n) + sqrt(m)) times their standard
# deviation but for fluctuations: at most 1.1 times it in 100 draws of each initialisation of torch.
# Training adds some: 1.5 times it in a classifier of digits after a few epochs, 1.4 to 5 times it
# in queries and keys of a language model.
_OUTLIER: Final = 1.25
# In-place writes to a fresh weight: at most 12 in modules of torch and in 44 models of torchvision,
# timm and transformers. An optimizer writes in each step (fused ones unseen), which shows small
# matrices that were trained in this process.
_WRITES: Final = 32
_SMALL: Final = 64  # n below which random matrices may have any singular value
LARGE_MOVE: Final = 0.1  # of the length: a shorter move does little harm to a trained weight


@torch.no_grad()
def relative_move(tensor: Tensor, point: Tensor | None) -> float:
    """Return the distance from ``tensor`` to ``point``, or None for itself, over its norm."""
    if point is None:
        return 0.0
    precise = finest_dtype(tensor)  # float32 cannot square 1e20
    moved = torch.linalg.vector_norm(widened(point) - widened(tensor), dtype=precise)
    return float(moved / torch.linalg.vector_norm(tensor, dtype=precise))


def looks_trained(value: Tensor, reading: Stiefel) -> bool:
    """Say whether a weight was written to often, or has singular values that chance has not."""
    return (
        _is_written(value)
        or _outlier(value, reading) > _OUTLIER
        or (reading.learn_scale and _is_multiple(value.detach(), reading))
    )


def _is_multiple(value: Tensor, reading: Stiefel) -> bool:
    """Say whether all matrices are multiples of orthonormal ones, but not orthonormal themselves.

    A column by itself always is one, and what is orthonormal may be an initialisation.
    """
    if max(points.size(-1) for points in reading.points(value)) == 1:
        return False
    readings = reading, replace(reading, scale=1.0, learn_scale=False)
    errors = (float(largest_error(widened(value), each)) for each in readings)
    return [is_far(error, value) for error in errors] == [False, True]


def _is_written(value: Tensor) -> bool:
    counts = isinstance(value, nn.Parameter) and not value.is_inference()
    return counts and value._version > _WRITES


def loses_training(value: Tensor, reading: Stiefel, share: float) -> bool:
    """Say whether a move by this share of its length loses what ``value`` has learned."""
    return share > LARGE_MOVE and looks_trained(value, reading)


def check_start(name: str, value: Tensor, reading: Stiefel) -> Callable[[Tensor], None]:
    """Inspect a weight before it is made orthonormal; return a function that inspects its point.

    It warns if the weight looks trained and the point is far: what was learned is lost.
    """
    if not (has_values(value) and looks_trained(value, reading)):
        return lambda point: None  # noqa: ARG005
    before = value.detach().clone()

    def check(point: Tensor) -> None:
        if (share := relative_move(before, point)) > LARGE_MOVE:
            warn_of_lost([(name, share)])

    return check


def warn_of_lost(shares: Sequence[tuple[str, float]]) -> None:
    """Warn of trained weights, by name, that have moved by these shares; of none, do not."""
    if shares:
        most = f"{max(share for _, share in shares):.0%}"
        more, moved = " seems", f"{most} of its length"
        if len(shares) > 1:
            more, moved = f" and {len(shares) - 1} more seem", f"up to {most} of their lengths"
        warnings.warn(
            f"`{shares[0][0]}`{more} trained, judging by singular values and writes, and moved by "
            f"{moved} to be orthonormal: what the model had learned there is lost. Train it on "
            "before it is used, with scale='keep' if the norm of these weights matters; or "
            "constrain a model that is not trained yet",
            stacklevel=users_level(),
        )


@torch.no_grad()
def turned_over(name: str, value: Tensor, reading: Stiefel) -> list[tuple[str, str, int]]:
    """Return name, place and new determinant of a value whose determinant changes, else nothing.

    Only of a value that was orthonormal or looks trained: half of all random matrices change.
    """
    bad = wrong_signs(value, reading)
    if reading.determinant is None or not bool(bad.any()):
        return []
    error = float(largest_error(widened(value.detach()), reading))
    if is_far(error, value.detach()):
        # singular values of a few numbers are no evidence
        is_small = max(reading.heights(value.shape)) < _SMALL
        if not (_is_written(value) if is_small else looks_trained(value, reading)):
            return []
    where = "" if bad.numel() == 1 else how_many(bad)
    return [(name, where, reading.determinant)]


def warn_of_component(turned: Sequence[tuple[str, str, int]]) -> None:
    """Warn of weights, by name, whose determinant changes: where, and to what."""
    for name, where, determinant in turned:
        warnings.warn(
            f"`{name}` had the other determinant{where}, and becomes the nearest point with "
            f"determinant {determinant:+d}: in that direction it is reflected. Pass determinant="
            f"{-determinant} to keep its sign, or negate a row before",
            stacklevel=users_level(),
        )


class FirstPoints:
    """The points of values that become constrained, and a warning of all that is lost by that."""

    def __init__(self) -> None:
        self._lost: list[tuple[str, float]] = []
        self._turned: list[tuple[str, str, int]] = []

    def nearest(
        self,
        name: str,
        value: Tensor,
        reading: Stiefel,
        remedy: str = "initialise it first",
        *,
        tells: bool = True,
        keeps: bool = False,
    ) -> tuple[Tensor | None, float]:
        """Return :func:`nearest` and the :func:`relative_move` to it, inf from zero.

        A learned scale becomes its start; with ``keeps`` only that of matrices off the manifold.
        """
        turned = turned_over(name, value, reading)
        own = reading if keeps else replace(reading, learn_scale=False)
        tells = tells and not turned
        point = nearest(value, own, name, remedy, tells=tells, starts=True)
        share = relative_move(value, point)
        if share < math.inf and loses_training(value, reading, share):
            self._lost.append((name, share))
        self._turned += turned
        return point, share

    def warn(self) -> None:
        """Warn of trained weights that have moved far, and of determinants that change."""
        warn_of_lost(self._lost)
        warn_of_component(self._turned)


@torch.no_grad()
def _outlier(parameter: Tensor, reading: Stiefel) -> float:
    """Return the largest singular value over the one that independent entries would have."""
    largest_ratio = 0.0
    whole = replace(reading, heads=None)  # blocks have one initialisation
    for index, part in enumerate(whole.parts(parameter)):
        matrices = widened(whole.matrices(part, index))
        mean = matrices.mean((-2, -1), keepdim=True)
        n, m = matrices.shape[-2:]
        spread = (matrices - mean).abs().square().mean((-2, -1)).sqrt()
        gram = (matrices - mean).mH @ (matrices - mean)
        if bool(torch.isfinite(gram).all()):
            largest = torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt()
            ratio = largest / (spread * (math.sqrt(n) + math.sqrt(m)))
            is_constant = spread <= 1e-4 * mean[..., 0, 0].abs()
            ratio = ratio.masked_fill(is_constant, 0.0).amax()
            largest_ratio = max(largest_ratio, float(ratio))
    return largest_ratio
