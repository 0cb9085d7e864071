"""Shift, activations, pooling, unit rows and the loss: isometries, and what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import train

import stiefel_opt as so
from stiefel_opt.nn import (
    BetaAbs,
    L2Pool2d,
    MarginCrossEntropy,
    MaxMin,
    NormalizedLinear,
    ShiftConv2d,
    SpatialShift,
)

MOVES = {
    5: [(-1, 0), (0, -1), (0, 0), (0, 1), (1, 0)],
    9: [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)],
}
SIZES = [(1, 4, 5), (5, 1, 1), (8, 2, 3), (9, 1, 4), (19, 3, 1), (40, 5, 4)]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def by_rolls(images: Tensor, neighbours: int) -> Tensor:
    groups = images.tensor_split(neighbours, 1)
    moved = zip(groups, MOVES[neighbours], strict=True)
    return torch.cat([group.roll(move, (2, 3)) for group, move in moved], 1)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("neighbours", MOVES)
@pytest.mark.parametrize("size", SIZES)
def test_the_shift_rolls_groups_of_channels_and_its_gradient_rolls_them_back(neighbours, size):
    images = draw(2, *size).requires_grad_()
    shift = SpatialShift(neighbours)
    moved = shift(images)
    assert torch.equal(moved, by_rolls(images, neighbours))
    torch.testing.assert_close(moved.norm(), images.norm())
    (back,) = torch.autograd.grad(moved, images, moved.detach())
    assert torch.equal(back, images)  # the adjoint is the inverse: an isometry
    assert torch.equal(torch.func.jvp(shift, (images,), (images,))[1], moved)


def test_the_shift_in_other_modes():
    shift, images = SpatialShift(), draw(3, 2, 11, 4, 5)
    assert torch.equal(torch.func.vmap(shift)(images)[1], shift(images[1]))
    assert torch.autograd.gradgradcheck(shift, (draw(1, 9, 2, 3).requires_grad_(),))
    last = images[0].to(memory_format=torch.channels_last)
    assert shift(last).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(shift(last), shift(images[0]))
    half = images[0].bfloat16()
    assert torch.equal(shift(half), by_rolls(half, 9))


PARTS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: SpatialShift(5), (2, 12, 4, 4)),
    (lambda: ShiftConv2d(12, 8), (2, 12, 4, 4)),
    (lambda: MaxMin(), (2, 12, 4, 4)),
    (lambda: BetaAbs(0.3), (2, 12, 4, 4)),
    (lambda: L2Pool2d(), (2, 12, 4, 4)),
    (lambda: NormalizedLinear(12, 5), (2, 12)),
    (lambda: so.nn.IsometricConv2d(12, 8), (2, 12, 4, 4)),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "shape"), PARTS)
def test_parts_are_copied_saved_compiled_and_run_in_half_precision(make, shape):
    part, images = make(), draw(*shape, dtype=torch.float32)
    expected = part(images)
    copied, other = copy.deepcopy(part), make()
    other.load_state_dict(part.state_dict())
    assert torch.equal(copied(images), expected)
    assert torch.equal(other(images), expected)
    torch._dynamo.reset()
    compiled = torch.compile(part, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images), expected)
    half = copied.bfloat16()(images.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(part(images).float(), expected, rtol=0.05, atol=0.05)


def test_a_shift_convolution_is_a_tagged_1_x_1_convolution_of_a_shift():
    layer = ShiftConv2d(11, 7, dtype=torch.float64)
    images = draw(2, 11, 3, 4)
    assert torch.equal(layer(images), layer.conv(by_rolls(images, 9)))
    assert list(layer.state_dict()) == ["conv.weight", "conv.bias"]
    assert type(layer.conv) is nn.Conv2d
    assert so.orthonormality_error(layer) < 1e-12
    assert list(ShiftConv2d(3, 3, bias=False).state_dict()) == ["conv.weight"]


@pytest.mark.parametrize("channels", [(6, 6), (6, 9)])
def test_with_as_many_outputs_it_keeps_norms(channels):
    layer = ShiftConv2d(*channels, bias=False, dtype=torch.float64)
    images = draw(3, channels[0], 5, 4)
    torch.testing.assert_close(layer(images).norm(), images.norm())


def test_the_generator_decides_the_start():
    def weights(kind: Any, seed: int) -> Tensor:
        layer = kind(6, 4, generator=torch.Generator().manual_seed(seed))
        return torch.cat([p.flatten() for p in layer.parameters()])

    for kind in (ShiftConv2d, NormalizedLinear, so.nn.IsometricConv2d):
        assert torch.equal(weights(kind, 1), weights(kind, 1))
        assert not torch.equal(weights(kind, 1), weights(kind, 2))


def test_maxmin_sorts_pairs_and_a_rotation_turns_half_absolute_values_into_it():
    x = draw(5, 6)
    pairs = torch.stack(x.chunk(2, 1)).sort(0, descending=True).values
    assert torch.equal(MaxMin()(x), torch.cat(list(pairs), 1))
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
    first, second = x.chunk(2, 1)
    turned = torch.cat([first - second, first + second], 1) / math.sqrt(2)
    absolute = torch.stack(BetaAbs()(turned).chunk(2, 1))
    back = torch.einsum("ij,jbc->ibc", turn.mT.flip(0), absolute)
    torch.testing.assert_close(torch.cat([back[1], -back[0]], 1).abs(), MaxMin()(x).abs())


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.25, 1), (0.5, 3), (1.0, 7)])
def test_beta_abs_takes_the_first_channels(share, count):
    x = draw(2, 7, 3, 3)
    expected = x.clone()
    expected[:, :count] = expected[:, :count].abs()
    assert torch.equal(BetaAbs(share)(x), expected)
    assert torch.equal(BetaAbs(share, dim=-1)(x.movedim(1, -1)), expected.movedim(1, -1))


@pytest.mark.parametrize("activation", [MaxMin(), BetaAbs(), BetaAbs(1.0), MaxMin(dim=-1)])
def test_activations_keep_the_norm_of_gradients(activation):
    x = draw(4, 6, 6, 6).requires_grad_()
    weights = draw(4, 6, 6, 6)
    (gradient,) = torch.autograd.grad((activation(x) * weights).sum(), x)
    torch.testing.assert_close(gradient.norm(), weights.norm())


def test_pooling_by_norms_has_a_finite_gradient_everywhere():
    images = draw(2, 3, 4, 5)
    images[0, 0] = 0.0
    images.requires_grad_()
    pooled = L2Pool2d()(images)
    torch.testing.assert_close(pooled.square(), images.square().sum((2, 3)))
    pooled.sum().backward()
    assert bool(torch.isfinite(images.grad).all())  # type: ignore[arg-type]
    assert bool((images.grad[0, 0] == 0).all())  # type: ignore[index]


def test_unit_rows_are_stepped_on_their_spheres(generator):
    head = NormalizedLinear(12, 5, generator=generator)
    assert isinstance(head, nn.Linear)
    assert head.weight.manifold == so.Stiefel(heads=5)
    optimizer = so.StiefelAdam(head.parameters(), lr=0.1)
    before = head.weight.detach().clone()
    images = torch.randn(16, 12, generator=generator)
    labels = torch.randint(5, (16,), generator=generator)
    train(optimizer, lambda: MarginCrossEntropy()(head(images), labels), 20)
    torch.testing.assert_close(head.weight.norm(dim=1), torch.ones(5))
    assert float((head.weight.detach() - before).abs().max()) > 0.05
    assert so.orthonormality_error(head.weight.detach()) > 1e-3


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_cross_entropy_with_the_right_class_behind(reduction):
    logits, labels = draw(6, 4), torch.tensor([0, 3, 1, 1, 2, 0])
    loss = MarginCrossEntropy(0.7, 0.3, reduction)
    behind = logits.clone()
    behind[torch.arange(6), labels] -= 0.7
    plain = nn.functional.cross_entropy(behind / 0.3, labels, reduction=reduction)
    torch.testing.assert_close(loss(logits, labels), 0.3 * plain)
    assert MarginCrossEntropy().offset == pytest.approx(2 * math.sqrt(2) * 36 / 255)


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: SpatialShift(8), ValueError, "`neighbours` must be 5 or 9, got 8"),
    (lambda: SpatialShift(True), ValueError, "`neighbours` must be 5 or 9, got True"),
    (lambda: SpatialShift()(draw(3, 4, 4)), ValueError, "`input` must have shape"),
    (lambda: ShiftConv2d(0, 3), ValueError, "`in_channels` must be a positive integer"),
    (lambda: ShiftConv2d(3, 3, 4), ValueError, "`neighbours` must be 5 or 9"),
    (lambda: ShiftConv2d(3, 3, bias=1), TypeError, "`bias` must be True or False"),  # type: ignore[arg-type]
    (lambda: MaxMin()(draw(2, 3)), ValueError, "`input` must have an even number of channels"),
    (lambda: BetaAbs(1.2), ValueError, "`share` must be in"),
    (lambda: BetaAbs("half"), TypeError, "`share` must be a number"),  # type: ignore[arg-type]
    (lambda: L2Pool2d()(draw(3, 4)), ValueError, "`input` must have shape"),
    (lambda: NormalizedLinear(3, 0), ValueError, "`out_features` must be a positive integer"),
    (lambda: NormalizedLinear(3, 2, bias=None), TypeError, "`bias` must be True or False"),  # type: ignore[arg-type]
    (lambda: MarginCrossEntropy(-1.0), ValueError, "`offset` must be in"),
    (lambda: MarginCrossEntropy(temperature=0.0), ValueError, "`temperature` must be in"),
    (lambda: MarginCrossEntropy(reduction="max"), ValueError, "`reduction` must be one of"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_parts_say_what_they_are():
    parts = (SpatialShift(5), BetaAbs(0.25), MaxMin(), MarginCrossEntropy(0.5, 1.0))
    words = ("neighbours=5", "share=0.25", "dim=1", "offset=0.5, temperature=1")
    assert all(word in repr(part) for part, word in zip(parts, words, strict=True))
