"""Radii within which a network cannot change its answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stiefel_opt.errors import check_module, check_range, fail, type_name
from stiefel_opt.nn.lipschitz.bounds import lipschitz_table
from stiefel_opt.nn.lipschitz.graphs import unwrapped
from stiefel_opt.nn.lipschitz.rules import rule_for
from stiefel_opt.numerics import finest_dtype


@torch.no_grad()
def certified_radius(
    logits: Tensor, bound: float, head: nn.Linear | Tensor | None = None
) -> Tensor:
    r"""Return for each input a radius in the 2-norm within which the answer c cannot change.

    .. math::
        r = \min_{j \ne c} \frac{z_c - z_j}{\sqrt 2\, L}, \qquad\text{with a head}\quad
        r = \min_{j \ne c} \frac{z_c - z_j}{L\, |w_c - w_j|}

    Args:
        logits: z, ``(batch, classes)``.
        bound: L of the whole model, as of :func:`lipschitz_bound`; with a ``head`` that of the
            layers before it.
        head: The last layer, or its weight ``(classes, features)``, w. The difference of two rows
            is often shorter than what :math:`\sqrt 2` times the norm of the weight allows.

    Returns: Radii ``(batch,)``, 0 at a tie; in float64 for float64, else in float32.
    Raises:
        ValueError: for fewer than two classes, a bound that is not positive and finite, logits or a
            head that are not finite or do not fit.
        TypeError: for logits that are not of float32 or float64, and another head.
    Note: The radius is that of the input of the model. If pixels are normalised outside it, divide
        by nothing: multiply the radius by the least deviation to have it in pixels. It proves what
        exact arithmetic would return; rounding moves logits by some units in their last digit.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        given = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(fail("logits", "be a tensor of floating-point numbers", given))
    if logits.dtype not in (torch.float32, torch.float64):
        remedy = "evaluate the model in float32, without autocast: small margins are rounding"
        raise TypeError(fail("logits", "be of float32 or float64", logits.dtype, remedy))
    if logits.ndim != 2 or logits.size(1) < 2:
        wanted = "have shape (batch, classes) of at least two classes"
        raise ValueError(fail("logits", wanted, logits))
    check_range("bound", bound, 0.0, open_low=True)
    if not bool(torch.isfinite(logits).all()):
        raise ValueError(fail("logits", "be finite", "nan or inf", "look at the model's weights"))
    z = logits.to(finest_dtype(logits))
    best, answer = z.max(1, keepdim=True)
    if head is None:
        distances = torch.full_like(z, math.sqrt(2.0))
    else:
        weight = _rows(head, logits).to(z)
        distances = torch.linalg.vector_norm(weight[answer] - weight, dim=2)
    margins = best - z
    radii = margins / (distances * bound)  # of equal rows inf, as nothing changes their order
    radii = torch.where(margins == 0, 0.0, radii).scatter(1, answer, math.inf)
    least = radii.amin(1)
    rounded = least.to(logits.dtype)
    return torch.where(rounded > least, rounded.nextafter(torch.zeros_like(rounded)), rounded)


def _rows(head: nn.Linear | Tensor, logits: Tensor) -> Tensor:
    """Return the weight of a head, one row for each class."""
    weight = head.weight if isinstance(head, nn.Linear) and is_linear(head) else head
    if not isinstance(weight, Tensor):
        wanted = "be an nn.Linear or its weight"
        raise TypeError(fail("head", wanted, type_name(head), "leave it out"))
    if weight.ndim != 2 or len(weight) != logits.size(1):
        raise ValueError(fail("head", f"have {logits.size(1)} rows, one for each class", weight))
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(fail("head", "be finite", "nan or inf", "look at its weight"))
    return weight


def is_linear(module: nn.Module) -> bool:
    """Say whether a module computes what an ``nn.Linear`` does."""
    rule = rule_for(module)
    return rule is not None and rule.kind is nn.Linear


@torch.no_grad()
def certified_accuracy(
    model: nn.Module, loader: Iterable[Any], radii: Sequence[float]
) -> dict[float, float]:
    """Return the share of inputs that are classified right, by proof, within each radius.

    At radius 0 that is the accuracy. The bound is that of the model in evaluation mode for inputs
    of this shape; where its last layer is an ``nn.Linear``, the distances of its rows count.

    Args:
        model: A classifier; see :func:`lipschitz_bound`. Its mode is restored at the end.
        loader: Batches ``(inputs, labels)``, as of a ``DataLoader``; they are moved to the device
            of the model.
        radii: In the 2-norm over an input, in its units: 36/255 where pixels are from 0 to 1.

    Returns: Shares from 0 to 1 by radius.
    Raises:
        ValueError: for no radius or one below 0, a loader without batches, labels that are no
            numbers of classes, and as :func:`certified_radius` and :func:`lipschitz_bound`.
        TypeError: for radii that are no list, batches that are no pairs of tensors, labels that are
            no integers, and as above.
    """
    check_module("model", model)
    if not isinstance(radii, Sequence):
        raise TypeError(fail("radii", "be a list of numbers", type(radii).__name__))
    if not radii:
        raise ValueError(fail("radii", "have at least one radius", radii))
    for radius in radii:
        check_range("radii", radius, 0.0)
    right = dict.fromkeys(radii, 0)
    count, known = 0, dict[tuple[int, ...], _Certificate]()
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    with _evaluation(model):
        for batch in loader:
            is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
            if not is_pair or not all(isinstance(part, Tensor) for part in batch):
                wanted, given = "yield (inputs, labels)", type(batch).__name__
                raise TypeError(fail("loader", wanted, given, "pass pairs of tensors"))
            inputs, labels = (part.to(device) for part in batch)
            if labels.shape != inputs.shape[:1]:
                wanted = "yield labels of shape (batch,), the numbers of classes"
                raise ValueError(fail("loader", wanted, labels))
            shape = tuple(inputs.shape[1:])
            if shape not in known:
                known[shape] = _certificate(model, shape)
            logits = model(inputs)
            proven = known[shape].radius(logits)
            _check_labels(labels, logits)
            is_right = logits.argmax(1) == labels
            for radius in right:
                right[radius] += int((is_right & (proven > radius)).sum())
            count += len(labels)
    if not count:
        raise ValueError(fail("loader", "have batches", "none", "a generator runs only once"))
    return {radius: number / count for radius, number in right.items()}


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    wanted = f"yield labels from 0 to {logits.size(1) - 1}"
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(fail("loader", wanted, labels.dtype))
    outside = labels[(labels < 0) | (labels >= logits.size(1))]
    if len(outside):
        raise ValueError(fail("loader", wanted, int(outside[0])))


class _Certificate(NamedTuple):
    """The bound of a model, and that before its last layer, if that is linear."""

    whole: float
    body: float = 1.0
    head: nn.Module | None = None

    def radius(self, logits: Tensor) -> Tensor:
        """Return the larger one: both are proven."""
        radii = certified_radius(logits, self.whole)
        if isinstance(self.head, nn.Linear):
            radii = torch.maximum(radii, certified_radius(logits, self.body, self.head))
        return radii


def _certificate(model: nn.Module, shape: tuple[int, ...]) -> _Certificate:
    table, inner = lipschitz_table(model, shape), unwrapped(model)
    *before, last = table
    head = inner if is_linear(inner) else dict(inner.named_modules()).get(last)
    body = math.prod(table[name] for name in before)
    whole = math.prod(table.values())
    if head is None or not is_linear(head) or body == 0.0:
        return _Certificate(whole)
    return _Certificate(whole, body, head)


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode for a while."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
