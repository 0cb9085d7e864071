"""Upper bounds on singular values of matrices and convolutions, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from stiefel_opt.errors import fail

_EPS: Final = torch.finfo(torch.float64).eps
_NEARLY: Final = 1e-7  # a relative distance from orthonormal below which no eigenvalue is computed
_MOST: Final = 2e10  # products of numbers that the norms at all frequencies may take
_PADDED: Final = {"zeros": "constant", "circular": "wrap", "reflect": "reflect"} | {
    "replicate": "edge"
}
NEEDS_SIZE: Final = "pass input_size, the shape of one input without the batch"


def exact(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor in float64 or complex128, on the CPU."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to("cpu", dtype)


def spectral_norm(matrices: Tensor) -> float:
    r"""Return an upper bound on the largest singular value of all matrices ``(..., n, m)``.

    The root of the largest eigenvalue of the smaller Gram matrix, times 1 + n m eps for its
    rounding. Of nearly orthonormal matrices :math:`\sqrt{t + |G - t I|_F}`, t the mean of the
    diagonal, is as close.
    """
    matrices = exact(matrices)
    largest = float(matrices.abs().amax()) if matrices.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    matrices = matrices / largest  # so that no square overflows
    tall = matrices if matrices.size(-2) >= matrices.size(-1) else matrices.mT
    gram = tall.mH @ tall
    rounding = 1.0 + tall.size(-2) * tall.size(-1) * _EPS
    mean = gram.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    off = gram - mean[..., None, None] * torch.eye(gram.size(-1), dtype=gram.dtype)
    distance = torch.linalg.matrix_norm(off)
    if bool((distance <= _NEARLY * mean).all()):
        square = float((mean + distance).amax())
    else:
        square = max(0.0, float(torch.linalg.eigvalsh(gram).amax()))
    return largest * math.sqrt(square) * rounding


def patches(kernel: int, stride: int, dilation: int) -> int:
    """Return how many positions of a kernel hold one pixel, of one direction and no copies."""
    return math.ceil(kernel * math.gcd(stride, dilation) / stride)


def most_copies(
    size: int, kernel: int, stride: int, dilation: int, pad: tuple[int, int], mode: str
) -> int:
    """Return in how many places of all patches together one of ``size`` pixels stands at most."""
    constant = {"constant_values": -1} if mode == "zeros" else {}
    index = np.pad(np.arange(size), pad, mode=_PADDED[mode], **constant)  # type: ignore[call-overload]
    starts = np.arange(0, max(0, len(index) - dilation * (kernel - 1)), stride)
    taken = index[starts[:, None] + dilation * np.arange(kernel)]
    taken = taken[taken >= 0]
    return int(np.bincount(taken).max()) if taken.size else 0


def convolution_norm(
    weight: Tensor,
    *,
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    mode: str,
    size: Sequence[int] | None,
) -> float:
    """Return an upper bound on the norm of a convolution of ``weight (out, in / groups, *kernel)``.

    That of the kernel as a matrix times the root of the number of places where a pixel stands; and,
    where the ``size`` of the images is known, the largest over all frequencies.
    """
    kernel = weight.shape[2:]
    counts = []
    for place, (k, s, d, pad) in enumerate(zip(kernel, stride, dilation, pads, strict=True)):
        if size is not None:
            counts.append(most_copies(size[place], k, s, d, pad, mode))
        elif mode == "zeros" or pad == (0, 0):
            counts.append(patches(k, s, d))
        elif mode == "circular" and sum(pad) <= d * (k - 1):
            counts.append(k)  # one for each offset: as many positions as pixels, at most
        else:
            given = f"padding_mode={mode!r} and padding {pad} of a kernel of {k}"
            raise ValueError(fail("input_size", "be given", given, NEEDS_SIZE))
    matrices = torch.unflatten(weight, 0, (groups, -1)).flatten(2)
    bound = spectral_norm(matrices) * math.sqrt(math.prod(counts))
    if size is not None and math.prod(kernel) > 1 and mode in ("zeros", "circular"):
        bound = min(bound, _over_frequencies(weight, dilation, pads, groups, mode, size))
    return bound


def _over_frequencies(
    weight: Tensor,
    dilation: Sequence[int],
    pads: Sequence[tuple[int, int]],
    groups: int,
    mode: str,
    size: Sequence[int],
) -> float:
    """Return the norm of the circular convolution of stride 1 of which this one is a part.

    Images with zeros around them are circular ones of a larger size.
    """
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    grid = [n + (r if mode == "zeros" else 0) for n, r in zip(size, reach, strict=True)]
    overlaps = any(r >= n for r, n in zip(reach, grid, strict=True))
    wraps = mode == "circular" and any(sum(p) > r for p, r in zip(pads, reach, strict=True))
    low, high = sorted((weight.size(0) // groups, weight.size(1)))
    if overlaps or wraps or math.prod(grid) * groups * low * low * high > _MOST:
        return math.inf
    spread = weight.new_zeros(*weight.shape[:2], *(r + 1 for r in reach))
    places = (slice(None), slice(None), *(slice(None, None, d) for d in dilation))
    spread[places] = weight.detach()
    dims = tuple(range(2, weight.ndim))
    spectrum = torch.fft.fftn(exact(spread), s=grid, dim=dims)
    matrices = torch.unflatten(spectrum, 0, (groups, -1)).flatten(3).movedim(-1, 0)
    rounding = 8 * _EPS * math.log2(2 + math.prod(grid)) * math.sqrt(weight.numel())
    return spectral_norm(matrices) * (1.0 + rounding)


def pool_counts(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int] | None = None
) -> int:
    """Return how many windows of a pooling hold one pixel."""
    dilation = [1] * len(kernel) if dilation is None else dilation
    return math.prod(itertools.starmap(patches, zip(kernel, stride, dilation, strict=True)))
