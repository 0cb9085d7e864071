"""The call: what it takes, and the best of its starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from stiefel_opt.errors import ProgressBar, check_count, check_flag, check_range, fail
from stiefel_opt.methods.minimize.descent import Descent, Loss, Minimum, Options
from stiefel_opt.methods.minimize.form import Form
from stiefel_opt.methods.minimize.product import Product


def minimize(
    loss: Loss,
    start_or_shape: Any,
    manifold: Any = None,
    *,
    starts: int = 1,
    batched_loss: bool = False,
    tolerance: float | None = None,
    max_evaluations: int = 1000,
    callback: Callable[[Minimum], object] | None = None,
    progress: bool = False,
    generator: torch.Generator | None = None,
) -> Minimum:
    """Minimise a loss without noise over points on the manifold, and return the best.

    By L-BFGS with curves and frames of the canonical metric and a line search for the Wolfe
    conditions. The result of a local method: ``starts`` gives others a chance. Nothing leaves the
    component of the determinant in which a square matrix begins: two starts or more try both.

    Args:
        loss: Returns a number for a point, ``loss(x)``, differentiable by torch, the same one at
            the same point. It is given what ``start_or_shape`` is: a tensor, or a tuple or dict.
        start_or_shape: A tensor, which becomes the nearest point, the sizes of one that is drawn at
            random, or a tuple, list or dict of tensors.
        manifold: The reading. Default: the tag, else ``Stiefel()``. Of several tensors in the same
            form, with None for unconstrained ones. Default: their tags; at least one tensor needs
            a tag.
        starts: How often. The first start is the given one; the others are uniformly distributed,
            and alternate between both components of the only real square matrix, if it has no
            ``determinant``. Unconstrained tensors start as given. Default: 1.
        batched_loss: All starts at once: ``loss`` is given tensors with a leading dimension, and
            returns ``(starts,)``. Each start has a step length of its own.
        tolerance: A start ends where the norm of the Riemannian gradient is below this, times the
            largest norm of a Euclidean gradient so far. Default: the root of the rounding error of
            the dtype, 1.5e-8 in float64.
        max_evaluations: Of each start; the line search may end with one more. Default: 1000.
        callback: Called after each iteration with a :class:`Minimum` of this start; StopIteration
            ends it. Default: none.
        progress: Show a bar of tqdm, which must be installed. Default: False.
        generator: Source of random starts and moves. Default: torch's global one.

    Returns: The :class:`Minimum`. At a start whose gradient is zero, a saddle perhaps, a small
        random move is tried once, and the message says so.
    Raises:
        ValueError: for a start that is not finite or cannot be read so, keys or numbers of readings
            that do not fit, a loss that returns other shapes, and options that cannot be.
        TypeError: for tensors of half precision, of several dtypes, and arguments of other types.

    Note: An evaluation, with its backward pass, and about 12 products of n x m by m x m; an
        iteration also four products with 30 pairs, which are the memory.
    Reference: as of :class:`StiefelLBFGS`; Byrd, Nocedal & Schnabel, Representations of
        quasi-Newton matrices (1994), equation 3.1, for the direction.
    """
    check_count("starts", starts)
    check_count("max_evaluations", max_evaluations)
    check_flag("batched_loss", batched_loss)
    check_flag("progress", progress)
    if not callable(loss):
        raise TypeError(fail("loss", "be a function", type(loss).__name__))
    if tolerance is not None:
        check_range("tolerance", tolerance, 0.0)
    form = Form(start_or_shape, manifold)
    drawn = form.starts(starts, generator)
    each = torch.finfo(form.dtype).eps ** 0.5 if tolerance is None else tolerance
    batches = [drawn] if batched_loss else [[own] for own in drawn]
    results: list[Minimum] = []
    with ProgressBar(None, progress, unit="evaluation") as bar:
        for batch in batches:
            product = Product(form, [torch.stack(column) for column in zip(*batch, strict=True)])
            options = Options(loss, batched_loss, each, max_evaluations, callback, bar)
            results += Descent(product, options).results(generator)
    best = min(results, key=lambda result: math.inf if math.isnan(result.fun) else result.fun)
    return replace(
        best,
        nit=sum(result.nit for result in results),
        nfev=sum(result.nfev for result in results),
    )
