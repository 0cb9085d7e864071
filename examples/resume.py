"""Kill a training process in the middle and go on: the result has the same bits as if nothing
had happened.

    python examples/resume.py       # seconds; needs nothing but torch
"""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import stiefel_opt as so

STEPS = 400


def train(path: Path) -> torch.Tensor:
    """Train to the end, from the checkpoint at ``path`` if there is one; return the weight."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    so.constrain(model[0])  # before loading: tags are code, not part of a checkpoint
    optimizer = so.StiefelAdam(model.parameters(), lr=1e-2)
    generator, step = torch.Generator().manual_seed(1), 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        generator.set_state(saved["generator"])  # the data go on where they were
        step = saved["step"]
        print(f"  goes on at step {step}")
    while step < STEPS:
        inputs = torch.randn(64, 16, generator=generator)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
        optimizer.step()
        step += 1
        if step % 10 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"generator": generator.get_state(), "step": step}
            torch.save(saved, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)  # the old file or the new one, never half
    print(f"  orthonormality error {so.orthonormality_error(model):.1e}")
    return model[0].weight.detach()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("Without a break:")
        whole = train(folder / "whole.pt")
        print("In a process that is killed once it has written a checkpoint:")
        killed = multiprocessing.get_context("spawn").Process(
            target=train, args=(folder / "killed.pt",)
        )
        killed.start()
        while killed.is_alive() and not (folder / "killed.pt").exists():
            time.sleep(0.001)
        killed.kill()
        killed.join()
        print(f"  killed (exit code {killed.exitcode}); the same call again:")
        resumed = train(folder / "killed.pt")
    print(f"\nWhat to see: the same bits in both weights: {torch.equal(whole, resumed)}")


if __name__ == "__main__":
    main()
