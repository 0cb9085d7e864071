"""The orthonormality error of a training: a number for each weight, and curves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from stiefel_opt.errors import check_integer, check_module, fail, none_found
from stiefel_opt.numerics import has_values
from stiefel_opt.tools.report import constrained, orthonormality_error, scales_of

TAG = "orthonormality_error"
Write = Callable[[dict[str, float], int], None]


@torch.no_grad()
def orthonormality_errors(model: nn.Module, tag: str = TAG) -> dict[str, float]:
    r"""Return :math:`\max |X^\top X - I|` of every orthonormal weight of ``model``, by name.

    Args:
        model: A model; weights on the meta device are skipped.
        tag: Prefix of the names. Default: ``"orthonormality_error"``.

    Returns: ``tag/max``, then ``tag/<parameter>`` for each weight of :func:`stiefel_opt.report`;
        a learned scale counts as no error. Empty for a model without such weights. ``wandb.log``,
        ``Trainer.log`` of transformers and ``self.log_dict`` of Lightning take it as it is.
    Raises:
        TypeError: if ``model`` is not a module.
    Note: All numbers are read from the device at once. A sharded model is gathered, one weight at
        a time: every process must call.
    """
    check_module("model", model)
    errors = {
        name: orthonormality_error(value, reading)
        for name, value, reading, _ in constrained(model)
        if has_values(value)
    }
    if not errors:
        return {}
    device = next(iter(errors.values())).device
    measured = torch.stack([error.to(device) for error in errors.values()])
    values = torch.cat([measured.amax()[None], measured]).tolist()  # NaN shows in the maximum
    return dict(zip([f"{tag}/{name}" for name in ("max", *errors)], values, strict=True))


def log_orthonormality(
    optimizer: Optimizer,
    model: nn.Module,
    writer: Any,
    every: int = 100,
    *,
    first_step: int = 0,
    tag: str = TAG,
) -> RemovableHandle:
    r"""Write :func:`orthonormality_errors` of ``model`` after every so many steps of ``optimizer``.

    And the largest learned scale of each weight that has one, as ``scale/<parameter>``.

    Args:
        optimizer: Any of torch, whose steps count; one that a trainer has wrapped counts as well.
        model: Whose weights are measured, as they are at that moment.
        writer: A ``torch.utils.tensorboard.SummaryWriter``, or anything with its method
            ``add_scalar(tag, value, step)``. A run of W&B, or ``wandb`` itself: a row for each
            measurement, with the step as ``tag/step``, the x axis of these curves; numbers that
            you log yourself keep their own steps. None: measure and write nothing, for the other
            processes of a sharded training, where all must take part.
        every: Steps from one point to the next. Default: 100.
        first_step: Number of the step before the first one, where a training is resumed.
        tag: Prefix of the names of the curves. Default: ``"orthonormality_error"``.

    Returns: A handle; its ``remove()`` ends the logging.
    Raises:
        ValueError: if the model has no such weight, or for every < 1.
        TypeError: for arguments that are no optimizer, module, writer or integer.
    Note: A step that is logged costs what :func:`orthonormality_errors` costs, and waits once for
        the device. Copies and checkpoints of the optimizer do not log.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(fail("optimizer", "be a torch.optim.Optimizer", type(optimizer).__name__))
    check_module("model", model)
    check_integer("every", every, 1)
    check_integer("first_step", first_step, 0)
    if next(constrained(model), None) is None:
        remedy = "call so.constrain or so.orthogonal first"
        raise ValueError(none_found("model", "an orthonormal weight", model, remedy))
    write = None if writer is None else _write_to(writer, tag, bool(_scales(model)))
    step = first_step

    def log(*_: Any) -> None:
        nonlocal step
        step += 1
        errors = {} if step % every else orthonormality_errors(model, tag) | _scales(model)
        if errors and write is not None:
            write(errors, step)

    return optimizer.register_step_post_hook(log)


def _scales(model: nn.Module) -> dict[str, float]:
    """Return the largest learned scale of each weight that has one."""
    tagged = constrained(model, computed=False)
    scales = {name: scales_of(value, reading) for name, value, reading, _ in tagged}
    return {f"scale/{name}": each[1] for name, each in scales.items() if each is not None}


def _write_to(writer: Any, tag: str, has_scales: bool) -> Write:
    if callable(getattr(writer, "add_scalar", None)):

        def write(errors: dict[str, float], step: int) -> None:
            for name, error in errors.items():
                writer.add_scalar(name, error, step)

        return write
    if not all(callable(getattr(writer, name, None)) for name in ("define_metric", "log")):
        needed = "have a method add_scalar (TensorBoard), or log and define_metric (W&B)"
        raise TypeError(fail("writer", needed, type(writer).__name__))
    writer.define_metric(f"{tag}/step")
    for each in (tag, "scale") if has_scales else (tag,):
        writer.define_metric(f"{each}/*", step_metric=f"{tag}/step")
    return lambda errors, step: writer.log({**errors, f"{tag}/step": step})
