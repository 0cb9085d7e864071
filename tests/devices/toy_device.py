"""Builds and registers the device "toy", where a machine has no accelerator."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("g++")


@functools.cache
def register() -> Callable[[], int]:
    """Give torch the device; return the function that counts how often somebody waited for it."""
    torch.utils.rename_privateuse1_backend("toy")
    extension = _built()
    module: Any = types.ModuleType("torch.toy")
    module.is_available = module.is_initialized = lambda: True
    module.current_device = lambda: 0
    module.device_count = lambda: 1
    module.device = lambda _: contextlib.nullcontext()
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda _: None
    module.get_rng_state = lambda _: torch.get_rng_state()
    module.set_rng_state = lambda state, _: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("toy", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    waits: Callable[[], int] = extension.waits
    return waits


def _built() -> Any:
    """Compile the extension, half a minute, and import it."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "toy_device.so"
        include = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        (place,) = {
            path for path in cpp_extension.library_paths() if (Path(path) / "libc10.so").exists()
        }
        subprocess.run(
            [
                COMPILER or "g++",
                *(
                    "-std=c++20",
                    "-O0",
                    "-fPIC",
                    "-shared",
                    "-w",
                    "-DTORCH_EXTENSION_NAME=toy_device",
                ),
                *(f"-I{path}" for path in include),
                str(SOURCE),
                *("-o", str(library)),
                *(f"-L{place}", f"-Wl,-rpath,{place}"),
                *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
            ],
            check=True,
        )
        spec = importlib.util.spec_from_file_location("toy_device", library)
        if spec is None or spec.loader is None:
            raise ImportError(library)
        extension = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(extension)
        return extension
