"""The laws of `laws.py` in a process of their own: torch keeps a device for good."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_device import COMPILER

LAWS = Path(__file__).with_name("laws.py")


@pytest.mark.slow
@pytest.mark.skipif(
    COMPILER is None and not torch.accelerator.is_available(), reason="no accelerator and no g++"
)
def test_what_holds_on_every_device() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(LAWS)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=LAWS.parents[2], check=False)
    assert run.returncode == 0, run.stdout[-8000:]
