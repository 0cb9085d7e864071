"""Whether the sums that a step works with are finite: what would spoil a parameter shows in them.

A gradient G with a NaN or an infinity makes a column of X'G not finite, on every process that
shares its rows. So a rule shows what it sums to a :class:`Watch`, first before it changes anything.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["UnsafeSumError", "Watch", "largest_safe"]


class UnsafeSumError(ArithmeticError):
    """A sum is not finite, or so large that its square might not be.

    Attributes:
        changed: Whether the momenta have changed already.
    """

    def __init__(self, *, changed: bool) -> None:
        super().__init__("a sum of this step is not finite")
        self.changed = changed


_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = (*_REAL, torch.complex64, torch.complex128)
_SAFE = {dtype: math.sqrt(torch.finfo(dtype).max) * 2.0**-20 for dtype in _DTYPES}


def largest_safe(dtype: torch.dtype) -> float:
    """Return the length up to which a gradient is safe: 2e13 in float32, 1e148 in float64.

    A millionth of the root of the largest number: room for momenta and sums of squares.
    """
    return _SAFE[dtype]


class Watch:
    """Looks at the sums of one call of a rule.

    Where reading is free (a CPU) :class:`UnsafeSumError` stops the step; elsewhere the step goes
    on, and ``finite`` says which matrices it served.

    Args:
        reads: Whether values may be read.

    Attributes:
        finite: ``(k, 1, 1)``, or None before the first sum and where values are read.
    """

    def __init__(self, *, reads: bool) -> None:
        self._reads = reads
        self.finite: Tensor | None = None

    def begin(self, sums: Tensor) -> float | None:
        """Look at sums over G, ``(k, ., .)``, before anything has changed; return their length.

        It is None where values are not read.

        Raises:
            UnsafeSumError: where values are read and some are not safe.
        """
        most = largest_safe(sums.dtype)
        if not self._reads:
            self.finite = sums.abs().amax(dim=(-2, -1), keepdim=True) <= most
            return None
        length = float(torch.linalg.vector_norm(sums))
        if not length <= most:  # NaN is not either
            raise UnsafeSumError(changed=False)
        return length

    def go_on(self, sums: Tensor, bound: float) -> None:
        """Look at sums over the new momentum; ``bound``, where values are read, bounds them.

        Raises:
            UnsafeSumError: where values are read and some are not finite.
        """
        if not self._reads and self.finite is not None:
            self.finite = self.finite & sums.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
        elif self._reads and not bound < math.inf:
            raise UnsafeSumError(changed=True)
