"""Run functions and scripts in processes that find torch imported, and pass on what they raise."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Call = tuple[Any, ...]  # a function of a module and its arguments
TIMEOUT = timedelta(seconds=300)  # a collective that waits longer is an error of the test
ROOT = Path(__file__).parents[1]
HIDDEN = str(ROOT / "tests")


@functools.cache
def server() -> multiprocessing.context.ForkServerContext:
    """Import what takes seconds once, in a server that every process is then forked from."""
    imported = ["pytest", "torch", "torch._dynamo", "torch.distributed.fsdp", "stiefel_opt"]
    imported += ["torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.debug"]
    imported += ["sklearn.datasets", "matplotlib.pyplot"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(imported)
    return context


def run(size: int, *calls: Call) -> None:
    """Make each call ``(function, *arguments)`` on ``size`` gloo processes of one group."""
    server()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        mp.start_processes(_work, (size, store, calls), nprocs=size, start_method="forkserver")


def _work(rank: int, size: int, store: str, calls: Sequence[Call]) -> None:
    faulthandler.enable()  # a crash shows where
    warnings.simplefilter("error", UserWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # checkpoints of torch 2.9
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, TIMEOUT, size, rank)
    for function, *arguments in calls:
        torch.manual_seed(0)
        try:
            function(*arguments)
        except Exception as error:
            case = f"{function.__name__}{tuple(arguments)}"
            raise AssertionError(f"{case} failed on rank {rank} of {size}") from error
    dist.barrier()
    dist.destroy_process_group()


def run_script(size: int, path: Path) -> None:
    """Run a script in its folder on ``size`` processes, in the environment torchrun gives them."""
    server()
    # A port that is looked for, left and bound again may meanwhile be another process's.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(_script, (size, store.port, path), nprocs=size, start_method="forkserver")


def _script(rank: int, size: int, port: int, path: Path) -> None:
    faulthandler.enable()
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    _as_main(path)


def output_of(path: Path) -> subprocess.CompletedProcess[str]:
    """What ``python path`` prints and returns, in the folder of the script."""
    files = [path.with_suffix(suffix) for suffix in (".stdout", ".stderr")]
    process = server().Process(target=_printing, args=(path, files))
    process.start()
    process.join(600)
    printed = [file.read_text(encoding="utf-8") for file in files]
    for file in files:
        file.unlink()
    assert process.exitcode is not None
    return subprocess.CompletedProcess([str(path)], process.exitcode, *printed)


def _printing(path: Path, files: Sequence[Path]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    _as_main(path)


def _as_main(path: Path) -> None:
    """Run a script as ``python`` does: in its folder, and it sees no other of this checkout."""
    os.chdir(path.parent)
    sys.argv = [path.name]
    sys.path[:] = [str(path.parent), *(place for place in sys.path if not place.startswith(HIDDEN))]
    torch.set_num_threads(1)
    runpy.run_path(str(path), run_name="__main__")


def assert_equal_on_all(tensors: list[torch.Tensor]) -> None:
    """Raise unless every process holds the same bits."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    for rank, other in enumerate(every):
        assert torch.equal(mine, other), f"rank {dist.get_rank()} differs from rank {rank}"


def part(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Our share of a tensor that every process has; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    # torch 2.9 gives a view of the whole tensor
    return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
