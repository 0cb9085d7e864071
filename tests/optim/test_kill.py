"""A run that is killed again and again ends with the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from contract import OPTIMIZERS, assert_same
from killable import run
from processes import server

PATIENCE = 300.0  # seconds
KILLS = 20


def start(name: str, steps: int, folder: Path) -> multiprocessing.process.BaseProcess:
    (folder / "begun").unlink(missing_ok=True)
    process = server().Process(target=run, args=(name, steps, str(folder)))
    process.start()
    return process


def finish(name: str, steps: int, folder: Path) -> dict:
    process = start(name, steps, folder)
    process.join(PATIENCE)
    assert process.exitcode == 0
    return load(folder)


def load(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def kill_at_random(name: str, steps: int, folder: Path, longest: float) -> None:
    """Start the run, and kill it some time after its first step."""
    process = start(name, steps, folder)
    waited_until = time.monotonic() + PATIENCE
    while not (folder / "begun").exists():
        assert time.monotonic() < waited_until
        time.sleep(0.001)
    time.sleep(random.uniform(0.0, longest))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL  # it had not finished


def check(name: str, steps: int, kills: int, longest: float, tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    undisturbed.mkdir()
    killed.mkdir()
    expected = finish(name, steps, undisturbed)
    assert all(value.isfinite().all() for value in expected["model"].values())
    reached = set()
    for _ in range(kills):
        kill_at_random(name, steps, killed, longest)
        reached.add(load(killed)["step"])
    assert len(reached) == kills  # each time further on
    assert max(reached) < steps
    found = finish(name, steps, killed)
    assert_same(found["model"], expected["model"])
    assert_same(found["optimizer"]["state"], expected["optimizer"]["state"])


def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    check("adam", steps=80, kills=2, longest=0.1, tmp_path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_killed_twenty_times_ends_as_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    check(name, steps=600, kills=KILLS, longest=0.15, tmp_path=tmp_path)
