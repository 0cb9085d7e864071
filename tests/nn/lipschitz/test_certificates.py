"""Radii and certified accuracy; no attack inside a radius succeeds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import train

import stiefel_opt as so


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), dtype=weight.dtype)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


def test_the_radius_is_the_margin_over_sqrt_2_times_the_bound():
    logits = torch.tensor([[1.0, 3.0, 2.0], [4.0, 4.0, 0.0], [0.0, -1.0, 9.0]])
    expected = torch.tensor([1.0, 0.0, 9.0]) / (math.sqrt(2) * 2.0)
    torch.testing.assert_close(so.certified_radius(logits, 2.0), expected)


def test_with_a_head_it_is_the_distance_to_the_nearest_plane(generator):
    """Of a linear classifier the radius is exact."""
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    head = linear(weight, torch.randn(4, generator=generator, dtype=torch.float64))
    points = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        radii = so.certified_radius(head(points), 1.0, head)
        assert torch.equal(radii, so.certified_radius(head(points), 1.0, weight))
        whole = so.certified_radius(head(points), so.lipschitz_bound(head))
        answers = head(points).argmax(1)
        for factor, changes in ((1 - 1e-9, False), (1 + 1e-9, True)):
            moved = torch.zeros(len(points), dtype=torch.bool)
            for other in range(4):
                across = weight[other] - weight[answers]
                step = factor * radii[:, None] * nn.functional.normalize(across, dim=1)
                moved |= head(points + step).argmax(1) != answers
            assert bool(moved.all() if changes else not moved.any())
    assert bool((radii >= whole).all())


def test_equal_rows_never_change_places():
    head = linear(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0.5, 0.0]))
    logits = torch.tensor([[1.5, 1.0], [1.0, 1.0]])
    assert so.certified_radius(logits, 1.0, head).tolist() == [math.inf, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_radius_is_rounded_down(dtype):
    logits = torch.randn(500, 5).to(dtype)
    radii = so.certified_radius(logits, 0.7)
    assert radii.dtype == dtype
    two = logits.double().topk(2).values
    exact = (two[:, 0] - two[:, 1]) / (math.sqrt(2) * 0.7)
    assert bool((radii.double() <= exact * (1 + 1e-15)).all())
    torch.testing.assert_close(radii.double(), exact, rtol=1e-6, atol=0)


class Shifted(nn.Module):
    """A body with a learned position, and a linear layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4, 4, 4))
        self.body = nn.Sequential(so.nn.ShiftConv2d(4, 4), so.nn.BetaAbs(), nn.Flatten())
        self.head = so.nn.NormalizedLinear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x + self.position))
        return logits


def batches(count: int = 3, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    images = torch.randn(count, 8, 4, 4, 4, dtype=dtype)
    return [(each, torch.randint(3, (8,))) for each in images]


def test_accuracy_is_the_share_that_is_right_beyond_each_radius():
    model, data = Shifted(), batches()
    radii = (0.0, 0.05, 0.2, 0.2, 0)
    found = so.certified_accuracy(model, data, radii)
    images, labels = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        logits = model(images)
    bound = math.prod(list(so.lipschitz_table(model, (4, 4, 4)).values())[:-1])
    proven = so.certified_radius(logits, bound, model.head)
    right = logits.argmax(1) == labels
    expected = {radius: float((right & (proven > radius)).float().mean()) for radius in radii}
    assert found == pytest.approx(expected)
    assert found[0.0] > found[0.2]


def test_without_a_linear_head_the_whole_bound_counts():
    model = nn.Sequential(Shifted(), so.nn.BetaAbs(1.0))
    (images, labels), *_ = data = batches(1)
    with torch.no_grad():
        logits = model(images)
    proven = so.certified_radius(logits, so.lipschitz_bound(model, (4, 4, 4)))
    right = logits.argmax(1) == labels
    expected = float((right & (proven > 0.1)).float().mean())
    assert so.certified_accuracy(model, data, [0.1]) == {0.1: pytest.approx(expected)}


def test_a_linear_model_alone_and_one_that_is_constant():
    head = so.nn.NormalizedLinear(6, 3)
    inputs = torch.randn(10, 6)
    right = (head(inputs).argmax(1) == 0).float().mean()
    data = [(inputs, torch.zeros(10, dtype=torch.long))]
    assert so.certified_accuracy(head, data, [0]) == {0: pytest.approx(float(right))}
    dead = nn.Linear(6, 3)
    nn.init.zeros_(dead.weight)
    with pytest.raises(ValueError, match="`bound` must be in"):
        so.certified_accuracy(dead, data, [0.1])


def test_the_mode_of_each_module_is_restored():
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 3))
    model[1].eval()
    model.register_module("unused", nn.Dropout())
    before = [module.training for module in model.modules()]
    with pytest.raises(TypeError, match="yield"):
        so.certified_accuracy(model, [3], [0.1])  # type: ignore[list-item]
    assert [module.training for module in model.modules()] == before


def fooled(model: nn.Module, images: Tensor, answers: Tensor, radii: Tensor, steps: int) -> Tensor:
    """Projected gradient descent on the margin, in a ball of the 2-norm around each image."""
    radii = radii.view(-1, 1, 1, 1)

    def unit(v: Tensor) -> Tensor:
        return nn.functional.normalize(v.flatten(1), dim=1).view_as(v)

    move = 0.5 * radii * unit(torch.randn_like(images))
    changed = torch.zeros(len(images), dtype=torch.bool)
    for _ in range(steps):
        move.requires_grad_()
        logits = model(images + move)
        changed |= logits.argmax(1) != answers
        others = logits.scatter(1, answers[:, None], -math.inf).amax(1)
        margin = logits.gather(1, answers[:, None]).squeeze(1) - others
        (slope,) = torch.autograd.grad(margin.sum(), move)
        move = (move - 0.25 * radii * unit(slope)).detach()
        length = move.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        move = move * (radii / length).clamp_max(1.0)
    return changed | (model(images + move).argmax(1) != answers)


def test_no_attack_inside_the_radius_succeeds_and_some_beyond_do(generator):
    model = Shifted()
    optimizer = so.StiefelAdam(model.parameters(), lr=0.02)
    centres = torch.randn(3, 4, 4, 4, generator=generator)
    for _ in range(60):
        labels = torch.randint(3, (32,), generator=generator)
        images = centres[labels] + 0.3 * torch.randn(32, 4, 4, 4, generator=generator)
        train(optimizer, lambda: so.nn.MarginCrossEntropy()(model(images), labels))  # noqa: B023
    model = model.double()
    labels = torch.randint(3, (200,), generator=generator)
    images = (centres[labels] + 0.3 * torch.randn(200, 4, 4, 4, generator=generator)).double()
    bound = math.prod(list(so.lipschitz_table(model, (4, 4, 4)).values())[:-1])
    with torch.no_grad():
        logits = model(images)
    answers, radii = logits.argmax(1), so.certified_radius(logits, bound, model.head)
    assert float((answers == labels).double().mean()) > 0.95
    assert not bool(fooled(model, images, answers, 0.9999 * radii, 30).any())
    assert float(fooled(model, images, answers, 2.0 * radii, 30).double().mean()) > 0.5


TWO = torch.zeros(2, 3)


def labelled(*labels: float) -> dict[float, float]:
    return so.certified_accuracy(nn.Linear(3, 2), [(TWO, torch.tensor(labels))], [0])


REFUSED: list[tuple[Any, type[Exception], str]] = [
    (lambda: so.certified_radius(TWO[:, :1], 1.0), ValueError, "`logits` must have shape.*two"),
    (lambda: so.certified_radius(TWO[0], 1.0), ValueError, "`logits` must have shape"),
    (lambda: so.certified_radius(TWO.long(), 1.0), TypeError, "`logits` must be a tensor of fl"),
    (lambda: so.certified_radius(TWO.bfloat16(), 1.0), TypeError, "of float32 or float64.*autoca"),
    (lambda: so.certified_radius(TWO.half(), 1.0), TypeError, "of float32 or float64"),
    (lambda: labelled(0, 2), ValueError, "labels from 0 to 1, got 2"),
    (lambda: labelled(-100, 0), ValueError, "labels from 0 to 1, got -100"),
    (lambda: labelled(0.0, 1.0), TypeError, "labels from 0 to 1, got torch.float32"),
    (lambda: labelled(False, True), TypeError, "labels from 0 to 1, got torch.bool"),
    (lambda: so.certified_radius([1.0], 1.0), TypeError, "`logits` must be a tensor of fl"),  # type: ignore[arg-type]
    (lambda: so.certified_radius(TWO, 0.0), ValueError, "`bound` must be in"),
    (lambda: so.certified_radius(TWO, math.nan), ValueError, "`bound` must be in"),
    (lambda: so.certified_radius(TWO / 0, 1.0), ValueError, "`logits` must be finite"),
    (lambda: so.certified_radius(TWO, 1.0, nn.Linear(4, 2)), ValueError, "`head` must have 3 rows"),
    (lambda: so.certified_radius(TWO, 1.0, torch.ones(3)), ValueError, "`head` must have 3 rows"),
    (lambda: so.certified_radius(TWO, 1.0, torch.ones(3, 2) / 0), ValueError, "`head` must be fin"),
    (lambda: so.certified_radius(TWO, 1.0, nn.ReLU()), TypeError, "`head` must be an nn.Linear"),  # type: ignore[arg-type]
    (lambda: so.certified_accuracy(nn.ReLU(), [], [0.1]), ValueError, "`loader` must have batch"),
    (lambda: so.certified_accuracy(nn.ReLU(), [TWO], [0.1]), TypeError, "`loader` must yield"),
    (lambda: so.certified_accuracy(nn.ReLU(), [(1, 2)], [0.1]), TypeError, "`loader` must yield"),
    (
        lambda: so.certified_accuracy(nn.Linear(3, 2), [(TWO, TWO[:, :1])], [0]),
        ValueError,
        "labels of",
    ),
    (lambda: so.certified_accuracy(nn.ReLU(), [], 0.1), TypeError, "`radii` must be a list of num"),  # type: ignore[arg-type]
    (lambda: so.certified_accuracy(nn.ReLU(), [], []), ValueError, "`radii` must have at least"),
    (lambda: so.certified_accuracy(nn.ReLU(), [], [-1]), ValueError, "`radii` must be in"),
    (lambda: so.certified_accuracy(None, [], [1]), TypeError, "`model` must be a torch.nn.Mod"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
