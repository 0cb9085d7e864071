"""The orthonormality error of a training as curves: TensorBoard and everything that looks alike."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stiefel_opt._checks import check_module, fail
from stiefel_opt.report import constrained, orthonormality_error


class ScalarWriter(Protocol):
    """What is needed of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one point of the curve ``tag``."""


def log_orthonormality(
    optimizer: Optimizer,
    model: nn.Module,
    writer: ScalarWriter | None,
    every: int = 100,
    *,
    first_step: int = 0,
    tag: str = "orthonormality_error",
) -> RemovableHandle:
    r"""Write :math:`\max |X^\top X - I|` of ``model`` after every so many steps of ``optimizer``.

    One curve ``tag/max`` and one ``tag/<parameter>`` for each constrained parameter and each weight
    that :func:`stiefel_opt.orthogonal` parametrizes.

    Args:
        optimizer: Any of torch, whose steps count; one that a trainer has wrapped counts as well.
        model: Whose weights are measured, as they are at that moment.
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or anything with its method
            ``add_scalar(tag, value, step)``. None: measure and write nothing, for the other
            processes of a sharded training, where all must take part.
        every: Steps from one point to the next. Default: 100.
        first_step: Number of the step before the first one, where a training is resumed.
        tag: What the curves are called.

    Returns: A handle; its ``remove()`` ends the logging.
    Raises:
        ValueError: if the model has no such weight, or for every < 1.
        TypeError: for what is no optimizer, no module or no writer.
    Note: A step that is logged costs what :func:`stiefel_opt.orthonormality_error` costs, and waits
        for the device. Copies and checkpoints of the optimizer do not log.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(fail("optimizer", "be a torch.optim.Optimizer", type(optimizer).__name__))
    check_module("model", model)
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(fail("writer", "have a method add_scalar", type(writer).__name__))
    for name, value, least in (("every", every, 1), ("first_step", first_step, 0)):
        if type(value) is not int or value < least:
            raise ValueError(fail(name, f"be an integer of at least {least}", repr(value)))
    if next(constrained(model), None) is None:
        remedy = "call so.constrain or so.orthogonal first"
        kind = f"a {type(model).__name__} of none"
        raise ValueError(fail("model", "have an orthonormal weight", kind, remedy))
    step = first_step

    @torch.no_grad()
    def log(*_: Any) -> None:
        nonlocal step
        step += 1
        if step % every:
            return
        errors = {
            name: orthonormality_error(value, reading)
            for name, value, reading, _ in constrained(model)
            if not value.is_meta
        }
        if not errors:
            return
        device = next(iter(errors.values())).device
        found = torch.stack([error.to(device) for error in errors.values()])
        if writer is not None:
            writer.add_scalar(f"{tag}/max", float(found.amax()), step)  # NaN shows
            for name, error in zip(errors, found.tolist(), strict=True):
                writer.add_scalar(f"{tag}/{name}", error, step)

    return optimizer.register_step_post_hook(log)
