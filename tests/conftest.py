"""Fixtures shared by every test: reproducible randomness."""

from __future__ import annotations

import os

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
def as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device from which a number is read only by waiting for it."""
    monkeypatch.setattr("stiefel_opt.device.is_cpu", lambda _: False)
