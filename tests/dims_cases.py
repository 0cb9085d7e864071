"""Tensors whose dimensions form the rows and the columns of matrices, and these by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt import Stiefel

# what the tensor is, its shape, the reading, and rows, columns and batch written out
LEGS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "Kraus operators": ((4, 2, 2), {"row_dims": (0, 1)}, "kij -> (ki) j"),
    "left canonical site": ((3, 2, 4), {"row_dims": (0, 1), "column_dims": 2}, "lsr -> (ls) r"),
    "right canonical site": ((3, 2, 4), {"row_dims": 0}, "lsr -> l (sr)"),
    "rows from the columns": ((3, 4, 2, 5), {"column_dims": (-3, 2)}, "abcd -> (ad) (bc)"),
    "isometry of a MERA": ((5, 2, 3), {"column_dims": 0}, "aij -> (ij) a"),
    "heads": ((3, 6, 2), {"row_dims": 1, "column_dims": 2}, "hwd -> h w d"),
    "one matrix of heads": ((3, 2, 4), {"row_dims": (0, 2), "column_dims": 1}, "hwd -> (hd) w"),
    "interleaved rows": ((5, 3, 4), {"row_dims": 0, "column_dims": 2}, "nkm -> k n m"),
    "slowest last": ((2, 3, 4), {"row_dims": (2, 0), "column_dims": (1,)}, "abc -> (ca) b"),
    "square, a batch inside": ((2, 3, 2), {"row_dims": (0,), "column_dims": (-1,)}, "aib -> i a b"),
    "two legs each": (
        (2, 3, 3, 2),
        {"row_dims": (0, 2), "column_dims": (3, 1)},
        "abcd -> (ac) (db)",
    ),
    "batch at both ends": (
        (2, 3, 2, 2, 2),
        {"row_dims": (-2, 1), "column_dims": 2},
        "abcde -> ae (db) c",
    ),
    "one row": ((1, 3, 2), {"row_dims": 0}, "abc -> a (bc)"),
    "one column": ((2, 3, 1), {"row_dims": (0, 1)}, "abc -> (ab) c"),
    "transposed": ((3, 5), {"row_dims": 1, "column_dims": 0}, "ab -> b a"),
    "as it is stored": ((4, 3), {"row_dims": (-2,), "column_dims": (-1,)}, "ab -> a b"),
}


def by_hand(tensor: Tensor, pattern: str) -> Tensor:
    """Permute and reshape as the pattern says, of einops' kind."""
    given, wanted = pattern.split(" -> ")
    parts, inside = [], False
    for letter in wanted.replace(" ", ""):
        if letter in "()":
            inside = letter == "("
            parts += [""] if inside else []
        elif inside:
            parts[-1] += letter
        else:
            parts.append(letter)
    order = [given.index(letter) for letter in itertools.chain(*parts)]
    sizes = [math.prod(tensor.size(given.index(letter)) for letter in part) for part in parts]
    return tensor.permute(order).reshape(sizes)


def pair(name: str, kind: str, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter, str]:
    """Return a point as it is stored, the same as matrices of equal strides, and the pattern."""
    shape, options, pattern = LEGS[name]
    generator = torch.Generator().manual_seed(1)
    reading = Stiefel(**options)
    point = so.random_point(*shape, manifold=reading, generator=generator, dtype=dtype)
    stored = layout_of(point, kind)
    matrices = by_hand(layout_of(point.clone(), kind), pattern)
    return so.ManifoldParameter(stored, reading), so.ManifoldParameter(matrices), pattern


ALIKE: list[tuple[tuple[int, ...], Stiefel, Stiefel]] = [
    ((3, 2, 4), Stiefel(row_dims=(0, 1)), Stiefel(column_dims=-1)),
    ((3, 2, 4), Stiefel(row_dims=0), Stiefel(flatten=True)),
    ((3, 2, 4), Stiefel(transposed=True), Stiefel(row_dims=2, column_dims=1)),
    ((3, 2, 4), Stiefel(), Stiefel(row_dims=(-2,), column_dims=2)),
]


def layout_of(tensor: Tensor, kind: str) -> Tensor:
    """Return an equal tensor whose memory is in another order."""
    if kind == "contiguous":
        return tensor
    order = list(range(tensor.ndim))[::-1]
    return tensor.permute(order).contiguous().permute(order)
