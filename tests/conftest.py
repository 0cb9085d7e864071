"""Fixtures shared by every test: reproducible randomness."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import IS_ON_CPU
from optimizers import PUBLISHED, TABLE

sys.path.append(str(Path(__file__).parents[1]))  # for benchmarks; behind what is installed

ADDRESS = re.compile(r" at 0x\w+")

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores
    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What is imported is no garbage: collections look only at objects that tests make."""
    gc.collect()
    gc.freeze()


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Name the rows of a table by their values, so that ``-k`` reaches them."""
    return " ".join(shown(val).split())[:60]


def shown(value: Any) -> str:
    """A value in a few characters, the same in every process."""
    if isinstance(value, dict):
        return ",".join(f"{shown(key)}={shown(item)}" for key, item in value.items()) or "default"
    if isinstance(value, torch.Tensor):
        whole = value.numel() == 1
        return f"tensor {value.item():g}" if whole else f"tensor {shown(tuple(value.shape))}"
    if isinstance(value, torch.Size | tuple | list):
        between = "x" if all(type(item) is int for item in value) else ","
        return between.join(map(shown, value)) or "none"
    if isinstance(value, set | frozenset):
        return ",".join(sorted(map(shown, value)))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | np.ndarray):
        return type(value).__name__
    if isinstance(value, functools.partial):
        return f"{shown(value.func)} {shown(value.keywords)}"
    name = getattr(value, "name", None) or getattr(value, "__name__", None)
    if name == "<lambda>":
        return " ".join(value.__code__.co_names)  # of what it calls
    return name if isinstance(name, str) else ADDRESS.sub("", str(value))


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


# ---- machines ------------------------------------------------------------------------------------

OF_THE_COMPILER = (  # its words about itself
    ".*Profiler record function",
    ".*lru_cache",
    "The .grad attribute of a Tensor",
    "Dynamo",
)


@pytest.fixture
def as_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device from which a number is read only by waiting for it."""
    monkeypatch.setattr(IS_ON_CPU, lambda _: False)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every step of every optimizer of the package is traced by `torch.compile`."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    for rule in {row.optimizer for row in (TABLE | PUBLISHED).values()}:
        traced = torch.compile(rule.step, backend=counter)

        def step(self: Any, closure: Any = None, traced: Any = traced) -> Any:
            return traced(self, closure)

        monkeypatch.setattr(rule, "step", step)
    torch._dynamo.reset()
    limits = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(**limits), warnings.catch_warnings():
        for text in OF_THE_COMPILER:
            warnings.filterwarnings("ignore", text)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch._dynamo.reset()
    assert counter.frame_count  # something was traced


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> str:
    """The machine of a test: `cpu`, `as_accelerator` or `compiled`; see `contract.on_machines`."""
    if request.param != "cpu":
        request.getfixturevalue(request.param)
    return str(request.param)
