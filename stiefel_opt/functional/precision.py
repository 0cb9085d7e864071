"""Compute in float32 where torch would use half precision: the maps need solves and exact Grams."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from stiefel_opt._checks import fail

__all__ = ["exact_products", "full_precision", "no_autocast", "readable"]

MapT = TypeVar("MapT", bound=Callable[..., Any])

_MKLDNN: Any = torch.backends.mkldnn
_BACKENDS: Any = (torch.backends.cuda.matmul, _MKLDNN.matmul)
_EXACT = ("none", "ieee")  # nobody has asked for less, or somebody for all digits
_HALF = (torch.float16, torch.bfloat16)


def no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors like this one keep their dtype."""
    kind = "cpu" if tensor.is_cpu else tensor.device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    if known and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return contextlib.nullcontext()


def exact_products(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context in which products of tensors like this one keep all digits of their dtype.

    Neither autocast nor ``torch.set_float32_matmul_precision`` (TF32, bfloat16) acts; X'X = I would
    hold to 1e-3 only.
    """
    if torch.compiler.is_compiling():  # the precision is set once, outside
        return no_autocast(tensor)
    if all(backend.fp32_precision in _EXACT for backend in _BACKENDS):
        return no_autocast(tensor)
    return _suspended(tensor)


def _legacy_precision() -> str | None:
    """Return the precision by its older name; None if the newer ones were used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns once of the older name
        try:
            return torch.get_float32_matmul_precision()
        except RuntimeError:  # set for some backends only
            return None


@contextlib.contextmanager
def _suspended(tensor: Tensor) -> Iterator[None]:
    """Set the precision of products to the highest, by the older name if that was used."""
    legacy = _legacy_precision()
    earlier = [] if legacy else [backend.fp32_precision for backend in _BACKENDS]
    try:
        if legacy:
            torch.set_float32_matmul_precision("highest")
        else:
            for backend in _BACKENDS:
                backend.fp32_precision = "ieee"
        with no_autocast(tensor):
            yield
    finally:
        if legacy:
            torch.set_float32_matmul_precision(legacy)
        for backend, value in zip(_BACKENDS, earlier, strict=False):
            backend.fp32_precision = "none"  # what a more general setting says
            if backend.fp32_precision != value:
                backend.fp32_precision = value


def full_precision(function: MapT) -> MapT:
    """Decorator: run in float32 under autocast and for half-precision tensors.

    A tensor that comes back has the dtype of the first argument, which must be one with a fraction.
    """
    leading = next(iter(inspect.signature(function).parameters))

    @functools.wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if not arguments and leading not in options:
            return function(**options)  # raises, and says what is missing
        first = arguments[0] if arguments else options[leading]
        if not isinstance(first, Tensor):
            raise TypeError(fail(leading, "be a tensor", type(first).__name__))
        if not (first.is_floating_point() or first.is_complex()):
            raise TypeError(fail(leading, "have a floating-point dtype", first.dtype))
        with no_autocast(first):
            wide = {name: _widened(value) for name, value in options.items()}
            result = function(*(_widened(argument) for argument in arguments), **wide)
            return result.to(first.dtype) if isinstance(result, Tensor) else result

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
