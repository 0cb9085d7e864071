"""Dimensions that are rows and columns: each reading against a matrix permuted by hand."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from cases import mixed
from optimizers import RULES, TABLE
from torch import Tensor, nn

import stiefel_opt as so

Stiefel = so.Stiefel

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


def back(matrices: Tensor, pattern: str, shape: tuple[int, ...]) -> Tensor:
    """Undo :func:`by_hand`, entry by entry."""
    places = by_hand(torch.arange(math.prod(shape)).reshape(shape), pattern)
    tensor = matrices.new_empty(math.prod(shape))
    tensor[places.reshape(-1)] = matrices.reshape(-1)
    return tensor.reshape(shape)


def layout_of(tensor: Tensor, kind: str) -> Tensor:
    """Return an equal tensor whose memory is in another order."""
    if kind == "contiguous":
        return tensor
    order = list(range(tensor.ndim))[::-1]
    return tensor.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("name", LEGS)
@pytest.mark.parametrize("kind", ["contiguous", "reversed"])
def test_a_tensor_is_read_as_the_matrix_that_is_permuted_by_hand(name: str, kind: str) -> None:
    shape, options, pattern = LEGS[name]
    reading = Stiefel(**options)
    tensor = layout_of(torch.randn(shape), kind)
    expected = by_hand(tensor, pattern)
    n, m = expected.shape[-2:]
    tall = expected if n >= m else expected.mT
    reading.check(shape)
    assert torch.equal(reading.matrices(tensor), tall)
    assert torch.equal(reading.stored(tall, tensor.shape), tensor)
    both = torch.stack([tensor, -tensor])
    read = reading.matrices(both, stacked=True)
    assert torch.equal(read, torch.stack([tall, -tall]))
    assert torch.equal(reading.stored(read, both.shape, stacked=True), both)
    assert reading.size(shape) == (n, m)
    assert reading.count(shape) == expected.shape[:-2].numel()
    in_memory = reading.stored(torch.stack([tall, tall]).contiguous()[0], tensor.shape)
    assert in_memory._is_view()  # the state of optimizers is a view on matrices


def pair(name: str, kind: str, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter, str]:
    """Return a point as it is stored, the same as matrices of equal strides, and the pattern."""
    shape, options, pattern = LEGS[name]
    generator = torch.Generator().manual_seed(1)
    reading = Stiefel(**options)
    point = so.random_point(*shape, manifold=reading, generator=generator, dtype=dtype)
    stored = layout_of(point, kind)
    matrices = by_hand(layout_of(point.clone(), kind), pattern)
    return so.ManifoldParameter(stored, reading), so.ManifoldParameter(matrices), pattern


STEPS = mixed(
    60, LEGS, RULES, ["contiguous", "reversed"], [torch.float64, torch.complex64, torch.bfloat16]
)


@pytest.mark.parametrize(("name", "rule", "kind", "dtype"), STEPS)
def test_steps_have_the_bits_of_steps_of_the_matrix(
    name: str, rule: str, kind: str, dtype: torch.dtype
) -> None:
    stored, matrices, pattern = pair(name, kind, dtype)
    options = {"lr": 0.05, **TABLE[rule].options}
    optimizers = [TABLE[rule].optimizer([each], **options) for each in (stored, matrices)]
    for seed in range(4):
        torch.manual_seed(seed)
        stored.grad = layout_of(torch.randn(stored.shape, dtype=dtype), kind)
        matrices.grad = by_hand(stored.grad, pattern)
        for optimizer in optimizers:
            optimizer.step()
        if seed == 1:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert torch.equal(by_hand(stored.detach(), pattern), matrices.detach())
    assert so.orthonormality_error(stored) == so.orthonormality_error(matrices)


@pytest.mark.parametrize("kind", ["contiguous", "reversed"])
@pytest.mark.parametrize("name", LEGS)
def test_several_equal_tensors_are_stepped_together(name: str, kind: str) -> None:
    """As many alone, up to the rounding of products of several matrices."""
    shape, options, _ = LEGS[name]
    starts = [so.random_point(*shape, manifold=Stiefel(**options)) for _ in range(3)]
    together, alone = (
        [
            so.ManifoldParameter(layout_of(start.clone(), kind), Stiefel(**options))
            for start in starts
        ]
        for _ in range(2)
    )
    optimizers = [so.StiefelAdam(together, lr=0.1)]
    optimizers += [so.StiefelAdam([each], lr=0.1) for each in alone]
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn(shape)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
        assert not torch.equal(one, starts[0])
