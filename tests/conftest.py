"""Fixtures shared by every test: reproducible randomness."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Layers draw their start values from the global generator; each test gets the same ones."""
    torch.manual_seed(0)


@pytest.fixture
def rng() -> np.random.Generator:
    """A numpy generator with a fixed seed."""
    return np.random.default_rng(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A torch generator with a fixed seed."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def drawn() -> None:
    """Asked for by a test of an example whose pictures are to be real ones."""


def _save_nothing(_: object, path: Path, **__: object) -> None:
    from PIL import Image

    Image.new("P", (1, 1)).save(path, format="PNG")


@pytest.fixture
def example(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs set the threads of the whole process, and most of their time goes into pictures."""
    from matplotlib.figure import Figure

    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        if "drawn" not in request.fixturenames:
            patch.setattr(Figure, "savefig", _save_nothing)
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device from which a number is read only by waiting for it."""
    monkeypatch.setattr("stiefel_opt.device._is_on_cpu", lambda _: False)
