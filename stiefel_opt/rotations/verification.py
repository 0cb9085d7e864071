"""Outputs before and after a change of the weights, and the way back to the bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stiefel_opt.errors import HALF, fail
from stiefel_opt.rotations.decoder import own_config

TOLERANCE = 1e-4  # of the largest logit
HALF_TOLERANCE = 0.1  # of a model whose float32 copy has passed: an overflow
STRUCTURE = ("_parameters", "_buffers", "_forward_pre_hooks", "_non_persistent_buffers_set")


ModelT = TypeVar("ModelT", bound=nn.Module)


def float32_copy(model: ModelT, ids: object) -> ModelT | None:
    """Return a copy to verify first, if that is wanted; None for a model that is no half one.

    In half precision rounding changes the logits as much as a wrong description does.
    """
    if ids is None or not _has_halves(model):
        return None
    return copy.deepcopy(model).float()


def _has_halves(model: nn.Module) -> bool:
    return any(each.dtype in HALF for each in model.parameters())


@contextlib.contextmanager
def verified(model: nn.Module, ids: object, done: str) -> Iterator[None]:
    """Context: where it fails, or the logits of ``ids`` differ afterwards, nothing has changed."""
    if ids is None:
        yield
        return
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or 0 in ids.shape:
        given = ids if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(fail("verify", "be token ids (batch, tokens), not empty", given))
    before, restore = _logits(model, ids), _snapshot(model)
    try:
        yield
        after = _logits(model, ids)
        error = float((after - before).abs().max() / before.abs().max())
        if not error <= (HALF_TOLERANCE if _has_halves(model) else TOLERANCE):
            remedy = (
                "the weights are as they were; look for a reader or writer of the stream that is "
                "not in the description, or for another kind of norm"
            )
            given = f"one whose logits change by {error:.1g} of the largest"
            raise ValueError(fail("model", f"keep its function when it is {done}", given, remedy))
    except BaseException:
        restore()
        raise


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        found: Tensor = model(ids.to(next(model.parameters()).device), use_cache=False).logits
    finally:
        for module in training:
            module.training = True
    return found.double()


def _snapshot(model: nn.Module) -> Any:
    """Return a function that puts weights, hooks and config back."""
    config = own_config(model)
    settings = {} if config is None else dict(vars(config))
    attributes = {name: value for name, value in vars(model).items() if name not in STRUCTURE}
    values = [(each, each.detach().clone()) for each in model.parameters()]
    modules = []
    for module in model.modules():
        kept = {name: vars(module)[name].copy() for name in STRUCTURE}
        own = {name: value for name, value in vars(module).items() if name.startswith("_stiefel")}
        modules.append((module, kept, {name: _copied(value) for name, value in own.items()}))

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in values:
            parameter.copy_(value)
        for name in [name for name in vars(model) if name not in {*attributes, *STRUCTURE}]:
            del vars(model)[name]
        vars(model).update(attributes)
        for module, kept, own in modules:
            for name, content in kept.items():
                vars(module)[name].clear()
                vars(module)[name].update(content)
            for name in [name for name in vars(module) if name.startswith("_stiefel")]:
                del vars(module)[name]
            vars(module).update(own)
        if config is not None:
            vars(config).clear()
            vars(config).update(settings)

    return restore


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value
