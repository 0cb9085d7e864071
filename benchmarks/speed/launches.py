"""Operations of a steady step that launch a kernel, as an accelerator without reads sees them.

They are counted below autograd, and no accelerator is needed: the package is told that the CPU is
one. Views and bare allocations launch nothing; a product that is added to another tensor out of
place copies it first, and counts twice; a call on a list counts once for 64 tensors. An average
over 16 steps, so that work done now and then counts in part.

    python -m benchmarks.speed.launches
"""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stiefel_opt as so

ROWS = {  # name: parameters, matrices of each, n, m
    "128x2": (1, 1, 128, 2),
    "64x8": (1, 1, 64, 8),
    "4096x512": (1, 1, 4096, 512),
    "2000x16x16": (1, 2000, 16, 16),
    "168 of 384x32": (168, 1, 384, 32),
}
OPTIMIZERS: dict[str, Any] = {
    "StiefelSGD": lambda params: so.StiefelSGD(params, lr=1e-2),
    "StiefelAdam": lambda params: so.StiefelAdam(params, lr=1e-3),
}
FREE = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "alias"),
    *("lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_", "unsafe_split"),
    *("_record_function_enter_new", "_record_function_exit"),
}
COPIES_FIRST = {"baddbmm", "addmm", "addbmm", "addmv"}
READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero"}
AT_A_TIME = 64  # tensors of a call on lists
SETTLING, STEPS = 26, 16


class Launches(TorchDispatchMode):
    """Counts launches, and reads that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[-1]
        if func._can_decompose():
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.reads += name in READS
        if not is_view and name not in FREE:
            number = 1 + (name in COPIES_FIRST and kwargs.get("beta", 1) != 0)
            if name.startswith("_foreach") or name in ("cat", "stack", "unbind_copy"):
                lists = [arg for arg in args if isinstance(arg, (list, tuple))]
                number = -(-max(1, *map(len, lists)) // AT_A_TIME) + ("norm" in name)
            self.count += number
        return func(*args, **kwargs)


def _parameters(row: str) -> list[Tensor]:
    """Parameters with gradients, for steps of about 0.02 rad."""
    count, batch, n, m = ROWS[row]
    generator = torch.Generator().manual_seed(3)
    params: list[Tensor] = []
    for _ in range(count):
        shape = (batch, n, m) if batch > 1 else (n, m)
        point = torch.linalg.qr(torch.randn(shape, generator=generator)).Q.contiguous()
        params.append(so.ManifoldParameter(point))
        params[-1].grad = torch.randn(shape, generator=generator) * (2 / (n**0.5 + m**0.5))
    return params


def launches(row: str, optimizer: str) -> tuple[float, int]:
    """Return launches of a step of an optimizer, and reads in all of the steps counted."""
    count = reads = 0
    with mock.patch("stiefel_opt.numerics.device._is_on_cpu", return_value=False):
        params = _parameters(row)
        opt = OPTIMIZERS[optimizer](params)
        for step in range(SETTLING + STEPS):
            seen = Launches()
            with seen if step >= SETTLING else contextlib.nullcontext():
                opt.step()
            count, reads = count + seen.count, reads + seen.reads
            torch._foreach_neg_([param.grad for param in params])  # type: ignore[arg-type]
    return count / STEPS, reads


def main() -> None:
    """Print a line for each row and optimizer."""
    torch.set_num_threads(1)
    for row in ROWS:
        for optimizer in OPTIMIZERS:
            count, reads = launches(row, optimizer)
            print(f"{row:14s} {optimizer:12s} {count:5.1f} launches a step, {reads} reads")


if __name__ == "__main__":
    main()
