"""A training run that writes checkpoints and may be killed at any moment; see `test_kill.py`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from contract import backward, model, optimizer


def save(value: Any, path: Path) -> None:
    """Write a file that is there completely or not at all, whenever the process dies."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def run(name: str, steps: int, folder: str) -> None:
    """Train up to step number `steps`, from the checkpoint in `folder` if there is one."""
    torch.set_num_threads(1)
    path = Path(folder) / "checkpoint.pt"
    net = model()
    opt = optimizer(name, net.parameters(), lr=0.005)
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["model"])
        opt.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, steps):
        backward(net, step)
        opt.step()
        checkpoint = {
            "step": step + 1,
            "model": net.state_dict(),
            "optimizer": opt.state_dict(),
        }
        save(checkpoint, path)
        (Path(folder) / "begun").touch()
