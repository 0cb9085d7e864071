"""Averages of a training (EMA, SWA) whose tagged weights stay on the manifold."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from typing_extensions import override

from stiefel_opt.errors import check_flag, check_module, check_range, fail
from stiefel_opt.numerics import (
    gram_error,
    has_values,
    is_sharded,
    newton_schulz,
    orthonormality_tolerance,
    widened,
)
from stiefel_opt.tags import (
    Stiefel,
    has_left,
    maps_of,
    mark_maps,
    readings,
    reread,
    to_nearest_,
    was_released,
)

_CORRECTIONS: Final = 4  # Newton-Schulz steps
_NEAR: Final = 0.1  # spectral norm of X'X - I from which they reach rounding


class ProjectedAverage(swa_utils.AveragedModel):
    """``torch.optim.swa_utils.AveragedModel`` that projects tagged weights after each update."""

    @override
    def update_parameters(self, model: nn.Module) -> None:
        """Average with the parameters of ``model``, and project those that are constrained there.

        Raises:
            ValueError: for values that are not finite, naming the parameter.
        """
        averages: list[tuple[Tensor, Stiefel, str, list[Tensor]]] = []
        pairs = zip(readings(self.module).items(), readings(model).values(), strict=False)
        for (name, (parameter, known)), (source, reading) in pairs:
            if reading is None and not was_released(source):  # a copy without tags, perhaps
                reading = known
            if known != reading:  # another scale was loaded, or the weight released
                reread([self.module], parameter, reading)
            vars(parameter).pop("is_unconstrained", None)
            if reading and has_left(source, reading):
                parameter.is_unconstrained = True  # type: ignore[attr-defined]
            elif reading and has_values(parameter):
                means = self._mean_scales(parameter, source, reading)
                averages.append((parameter, reading, name, means))
        super().update_parameters(model)
        for average, other in zip(maps_of(self.module), maps_of(model), strict=False):
            for old, new in zip(average.buffers(), other.buffers(), strict=False):
                old.copy_(new)  # of a base there is no mean
        _settle(averages)

    @torch.no_grad()
    def _mean_scales(self, average: Tensor, source: Tensor, reading: Stiefel) -> list[Tensor]:
        """Return the averages of the learned scales of each range; none of a fixed one."""
        if not reading.learn_scale:
            return []
        means, new = (
            [
                reading.scale_of(widened(reading.matrices(part, index)))
                for index, part in enumerate(reading.parts(tensor))
            ]
            for tensor in (average, source.to(average))
        )
        if self.n_averaged == 0:
            return new
        count = self.n_averaged.to(average.device)
        if self.multi_avg_fn is None:
            return [mean + (own - mean) / (count + 1) for mean, own in zip(means, new, strict=True)]
        self.multi_avg_fn(means, new, count)
        return means


def averaged(
    model: nn.Module,
    decay: float | None = None,
    *,
    device: torch.device | str | None = None,
    use_buffers: bool = False,
) -> ProjectedAverage:
    r"""Return a running average of ``model`` whose tagged weights are points of the manifold.

    After each ``update_parameters(model)``, which follows a step of the optimizer,

    .. math:: \bar X \leftarrow \mathrm{polar}(d \bar X + (1 - d) X)

    with d = ``decay``, or :math:`d = t / (t + 1)` in update t. Plain weights, and scales that are
    learned, are averaged as torch does it. Use the result as any ``AveragedModel``: call it, or
    take its ``module``.

    Args:
        model: The model, copied here. Tags, heads, ranges of rows, convolutions and scales are
            preserved; weights that :func:`stiefel_opt.orthogonal` computes are averaged by their
            free tensors, and are orthonormal anyway. A weight that leaves the manifold on purpose
            (``stiefel=False``, a penalty) is averaged as a plain one.
        decay: d of an exponential moving average, in (0, 1). Default: the mean of all updates
            (stochastic weight averaging).
        device: Device of the average. Default: that of the model.
        use_buffers: Whether buffers are averaged, too. Default: no.

    Raises:
        TypeError: if ``model`` is no module, or one of its tagged weights is sharded.
        ValueError: for a decay out of range, or a ``Trivialization`` whose base moves.
    Warns: if nothing is constrained yet: tags are copied with the model.
    Note: Up to ten products of n x m by m x m for each tagged matrix and update; a singular value
        decomposition only where the average is far from orthonormal. Weights on the meta device
        have no values and are not projected. The result can be pickled.
    Reference: Moakher, Means and averaging in the group of rotations (2002): of points, the
        projected arithmetic mean is nearest in the least-squares sense.
    """
    check_module("model", model)
    check_flag("use_buffers", use_buffers)
    if decay is not None:
        check_range("decay", decay, 0.0, 1.0, open_low=True)
    tagged = [
        (name, parameter) for name, (parameter, reading) in readings(model).items() if reading
    ]
    for name, parameter in tagged:
        if is_sharded(parameter):
            remedy = "gather the weights into a model that is not sharded, and average that"
            raise TypeError(fail(name, "not be sharded to be averaged", "a DTensor", remedy))
    for name, module in model.named_modules():
        if hasattr(module, "rebase") and getattr(module, "every", None) is not None:
            remedy = "its base moves, and with it what its free tensor means"
            raise ValueError(
                fail(f"every of {name}", "be None to be averaged", module.every, remedy)
            )
    if not (tagged or mark_maps(model)):
        warnings.warn(
            "nothing in `model` is constrained, and its average will be torch's; call so.constrain "
            "first, or build the optimizer whose group constrains it",
            stacklevel=2,
        )
    function = None if decay is None else partial(_moving_average, decay)
    place = None if device is None else torch.device(device)
    return ProjectedAverage(model, place, multi_avg_fn=function, use_buffers=use_buffers)


def _moving_average(
    decay: float, averages: Sequence[Tensor], values: Sequence[Tensor], count: Tensor | int
) -> None:
    """torch's exponential moving average; its own function is a closure, which no pickle takes."""
    swa_utils.get_ema_multi_avg_fn(decay)(averages, values, count)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _settle(averages: Sequence[tuple[Tensor, Stiefel, str, list[Tensor]]]) -> None:
    """Bring averages onto the manifold, with their scales if learned. The host waits once."""
    errors = [_corrected(average, reading) for average, reading, _, _ in averages]
    together = torch.stack([error.to(errors[0].device) for error in errors]) if errors else None
    worst: list[float] = [] if together is None else together.tolist()
    for (average, reading, name, scales), error in zip(averages, worst, strict=True):
        if not error < _NEAR:
            to_nearest_(average, reading, name)  # decomposes matrices that are still off
        for index, mean in enumerate(scales):
            part = reading.parts(average)[index]
            matrices = widened(reading.matrices(part, index))
            settled = matrices * (mean / reading.scale_of(matrices))
            part.copy_(reading.stored(settled, part.shape, index))


def _corrected(average: Tensor, reading: Stiefel) -> Tensor:
    """Remove from an average what Newton-Schulz can; return a bound on |X'X - I| of before."""
    bounds = []
    for index, part in enumerate(reading.parts(average)):
        matrices = widened(reading.matrices(part, index))
        scale = reading.scale_of(matrices)
        point = matrices / scale
        error = gram_error(point)[..., None, None]
        is_off = error > orthonormality_tolerance(average.dtype, point.size(-2))
        factor = scale * newton_schulz(point, _CORRECTIONS)  # that of near points is near them
        settled = torch.where(is_off & (error < 1), factor, matrices)
        part.copy_(reading.stored(settled, part.shape, index))
        bounds.append(error.amax().float() * point.size(-1))
    return torch.stack(bounds).amax()
