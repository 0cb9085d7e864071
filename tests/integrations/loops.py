"""What the integrations are compared with: plain loops, bit for bit or up to rounding."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import stiefel_opt as so

STEPS, HALF, BATCH = 24, 12, 4
ROUNDING = 1e-5  # of orthonormality in float32


class InOrder(IterableDataset):
    """Items that every loader gives out in this order."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def images(size: int = 16, channels: int = 3) -> list[dict[str, Tensor]]:
    """Noise with a mean that tells the label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (STEPS * BATCH,), generator=generator)
    noise = torch.randn((len(labels), channels, size, size), generator=generator)
    values = noise + labels[:, None, None, None] - 1.5
    return [{"pixel_values": x, "labels": y} for x, y in zip(values, labels, strict=True)]


def tokens(length: int = 12, vocabulary: int = 20) -> list[dict[str, Tensor]]:
    """Sequences that count up from a random start, whose first token nobody has to predict."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(vocabulary, (STEPS * BATCH, 1), generator=generator)
    rows = (starts + torch.arange(length)) % vocabulary
    labels = rows.clone()
    labels[:, 0] = -100  # said openly, since the Trainer may count it where the model does not
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)]


def batches(items: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    groups = [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
    return [{key: torch.stack([i[key] for i in group]) for key in group[0]} for group in groups]


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    scheduler: Any = None,
) -> list[float]:
    """Train plainly; return the losses."""
    found = []
    model.train()
    for batch in data:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        found.append(float(value))
    return found


def loss_of_output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def assert_equal(model: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    """Compare all values of two models."""
    theirs = other.state_dict()
    assert list(model.state_dict()) == list(theirs)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=tolerance, msg=name)


def assert_trained(model: nn.Module, start: nn.Module) -> None:
    """Every constrained weight has moved, and is orthonormal."""
    report = so.report(model)
    assert report.lines
    before = dict(start.named_parameters())
    for line in report.lines:
        assert line.tagged
        assert line.error is not None
        assert line.error < ROUNDING
        moved = (model.get_parameter(line.name) - before[line.name]).abs().max()
        assert moved > 1e-4, line.name


def code_of(page: str) -> list[list[str]]:
    """The blocks of Python of each section of a page of the docs, behind those before the first."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    block = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block.findall(section) for section in text.split("\n## ")]
