"""What an issue needs to say about a machine."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch

PACKAGES = (
    "torch", "numpy", "pot", "transformers", "peft", "accelerate", "lightning", "geoopt", "geotorch"
)  # fmt: skip


def show_versions() -> None:
    """Print the versions and the devices that an issue should name: paste them into its form.

    This package, Python, the system, accelerators, and the packages with which this one works,
    where they are installed. No name of the machine, no path, no variable of the environment.
    """
    name = __name__.partition(".")[0]  # a checkout on the path is not installed
    lines = {name: sys.modules[name].__version__, "python": platform.python_version()}
    lines["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    lines |= {name: _version(name) for name in PACKAGES}
    lines["cuda"] = str(torch.version.cuda)
    lines["device"] = _device()
    lines["threads"] = str(torch.get_num_threads())
    width = max(map(len, lines))
    sys.stdout.writelines(f"{name.ljust(width)}  {value}\n" for name, value in lines.items())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return "cpu"
    if accelerator.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name()}"
    return accelerator.type
