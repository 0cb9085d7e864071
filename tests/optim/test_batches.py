"""Matrices of one batch move as each for itself: ranges of one weight, any strides, any number."""

from __future__ import annotations

import pytest
import torch
from contract import (
    every_rule,
    fill,
    optimizer,
    tried_with,
)
from held import Calls
from torch import nn

import stiefel_opt as so

LAYERS, WIDTH, HEADS = 12, 16, 4
Ranges = tuple[tuple[int, int], ...]


def fused_weights() -> list[nn.Parameter]:
    found = []
    for _ in range(LAYERS):
        layer = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64)
        so.constrain(layer, "in_proj_weight", rows=[(0, WIDTH), (WIDTH, 2 * WIDTH)], heads=HEADS)
        found.append(layer.in_proj_weight)
    return found


def parts_of(weight: nn.Parameter, ranges: Ranges, heads: int) -> list[nn.Parameter]:
    """The same rows as parameters of their own: constrained ones first, then the plain ones."""
    found, last = [], 0
    plain = []
    for low, high in ranges:
        tag = so.Stiefel(heads=heads)
        found.append(so.ManifoldParameter(weight.detach()[low:high].clone(), tag))
        if last < low:
            plain.append(nn.Parameter(weight.detach()[last:low].clone()))
        last = high
    if last < weight.size(0):
        plain.append(nn.Parameter(weight.detach()[last:].clone()))
    return [*found, *plain]


def fill_parts(weight: nn.Parameter, ranges: Ranges, parts: list[nn.Parameter]) -> None:
    grad = weight.grad
    assert grad is not None
    rest = torch.ones(weight.size(0), dtype=torch.bool)
    for (low, high), part in zip(ranges, parts, strict=False):
        part.grad = grad[low:high].clone()
        rest[low:high] = False
    start = 0
    for part in parts[len(ranges) :]:
        part.grad = grad[rest][start : start + part.size(0)].clone()
        start += part.size(0)


@tried_with("sgd", "adam")
def test_fused_weights_cost_about_the_calls_of_separate_ones(name: str) -> None:
    fused = fused_weights()
    ranges = ((0, WIDTH), (WIDTH, 2 * WIDTH))
    separate = [parts_of(weight, ranges, HEADS) for weight in fused]
    flat = [part for parts in separate for part in parts]
    opts = [optimizer(name, members, weight_decay=0) for members in (fused, flat)]
    counts = [[0, 0], [0, 0]]
    for step in range(10):
        fill(fused, step)
        for weight, parts in zip(fused, separate, strict=True):
            fill_parts(weight, ranges, parts)
        for index, opt in enumerate(opts):
            with Calls() as counted:
                opt.step()
            if step > 1:
                counts[index][0] += len(counted.products)
                counts[index][1] += counted.views + counted.others
    (products, calls), (bar, other_calls) = counts
    assert products <= 1.3 * bar
    # Views of each range, torch's own rule for the rows that are plain, and nothing else.
    assert calls <= 1.3 * other_calls + 8 * 30 * LAYERS
    for weight, parts in zip(fused, separate, strict=True):
        torch.testing.assert_close(weight, torch.cat(parts), rtol=0, atol=1e-11)


SEVERAL: list[tuple[Ranges, int]] = [
    (((0, 8), (8, 16)), 2),
    (((0, 8), (12, 20)), 2),
    (((4, 12),), 2),
    (((0, 4), (8, 16), (20, 24)), 1),
    (((2, 14),), 3),
]


@every_rule
def test_unequal_ranges_move_as_parameters_of_their_own(name: str) -> None:
    """Fourteen weights of which some ranges are alike and others not."""
    generator = torch.Generator().manual_seed(0)
    fused, cuts = [], []
    for number in range(14):
        ranges, heads = SEVERAL[number % len(SEVERAL)]
        holder = nn.ParameterDict()
        holder["w"] = torch.randn(24, 9, generator=generator, dtype=torch.float64)
        so.constrain(holder, "w", rows=ranges, heads=heads)
        fused.append(holder["w"])
        cuts.append((ranges, heads))
    separate = [parts_of(w, *cut) for w, cut in zip(fused, cuts, strict=True)]
    opt = optimizer(name, fused, weight_decay=0)
    other = optimizer(name, [part for parts in separate for part in parts], weight_decay=0)
    for step in range(6):
        fill(fused, step)
        if step == 3:
            fused[2].grad = None
        for index, weight in enumerate(fused):
            if weight.grad is None:
                for part in separate[index]:
                    part.grad = None
            else:
                fill_parts(weight, cuts[index][0], separate[index])
        opt.step()
        other.step()
    for number, (weight, (ranges, _), parts) in enumerate(zip(fused, cuts, separate, strict=True)):
        rest = torch.ones(weight.size(0), dtype=torch.bool)
        for (low, high), part in zip(ranges, parts, strict=False):
            torch.testing.assert_close(weight[low:high], part, rtol=0, atol=1e-11, msg=f"{number}")
            rest[low:high] = False
        plain = parts[len(ranges) :]
        if plain:
            torch.testing.assert_close(weight[rest], torch.cat(plain), rtol=0, atol=1e-11)
        steps = {float(opt.state[weight]["step"]), float(other.state[parts[0]]["step"])}
        assert len(steps) == 1
        assert so.orthonormality_error(weight) < 1e-13


BOTH = [so.StiefelSGD, so.StiefelAdam]


@pytest.mark.parametrize("rule", BOTH)
def test_a_gradient_may_overlap_itself(rule, generator):
    """As that of a sum; other strides are drawn in `test_properties.py`."""
    value = torch.randn((4, 2, 3, 3), generator=generator, dtype=torch.float64)
    weights = [so.ManifoldParameter(value.clone(), so.Stiefel(flatten=True)) for _ in range(2)]
    weights[0].grad = torch.ones((), dtype=torch.float64).expand(value.shape)
    weights[1].grad = torch.ones_like(value)
    for weight in weights:
        rule([weight], lr=0.1).step()
    torch.testing.assert_close(*weights, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rule", BOTH)
def test_plain_rows_take_a_conjugated_gradient(rule, generator):
    """torch hands out conjugates as views that have not been worked out yet."""
    values = torch.randn(8, 6, generator=generator, dtype=torch.complex128)
    parameters = [so.ManifoldParameter(values.clone(), so.Stiefel(rows=(2, 6))) for _ in range(2)]
    grad = torch.randn(8, 6, generator=generator, dtype=torch.complex128)
    parameters[0].grad, parameters[1].grad = grad.conj(), grad.conj().resolve_conj()
    for parameter in parameters:
        rule([parameter], lr=0.1).step()
    torch.testing.assert_close(*parameters, rtol=0, atol=0)
