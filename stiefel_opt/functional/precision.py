"""Compute in float32 where torch would use half precision: the maps need solves and exact Grams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

__all__ = ["full_precision", "no_autocast", "readable"]

MapT = TypeVar("MapT", bound=Callable[..., Any])

_HALF = (torch.float16, torch.bfloat16)


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors like this one keep their dtype."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def full_precision(function: MapT) -> MapT:
    """Decorator: run in float32 under autocast and for half-precision tensors.

    A tensor that comes back has the dtype of the first argument.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        dtype = arguments[0].dtype
        with no_autocast(arguments[0]):
            result = function(*(_widened(argument) for argument in arguments), **options)
            return result.to(dtype) if isinstance(result, Tensor) else result

    return cast("MapT", wrapped)


def _widened(argument: Any) -> Any:
    is_half = isinstance(argument, Tensor) and argument.dtype in _HALF
    return argument.float() if is_half else argument


def readable(tensor: Tensor) -> Tensor | None:
    """Return the values of ``tensor`` where looking at them is free, else None.

    They are on the CPU in eager mode; on an accelerator a look would wait for it.
    """
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    return torch.func.debug_unwrap(tensor.detach(), recurse=True)
