"""What an issue needs to say about a machine."""

from __future__ import annotations

import platform
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
    lines = {"stiefel_opt": _version("stiefel_opt"), "python": platform.python_version()}
    lines["system"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    lines |= {name: _version(name) for name in PACKAGES}
    lines["cuda"] = str(torch.version.cuda)
    lines["device"] = _device()
    lines["threads"] = str(torch.get_num_threads())
    width = max(map(len, lines))
    print("\n".join(f"{name.ljust(width)}  {value}" for name, value in lines.items()))  # noqa: T201


def _version(name: str) -> str:
    if name == "stiefel_opt":  # a checkout on the path is not installed
        import stiefel_opt

        return stiefel_opt.__version__
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
