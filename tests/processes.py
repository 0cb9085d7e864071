"""Run functions on several gloo processes of this machine and pass on what they raise."""

from __future__ import annotations

import functools
import multiprocessing
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
TIMEOUT = timedelta(seconds=60)  # a collective that waits longer is an error of the test


@functools.cache
def _prepare_server() -> None:
    """Import torch once, in a server that every process is then forked from."""
    imported = ["pytest", "torch", "torch.distributed.fsdp"]
    imported += ["torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.debug"]
    multiprocessing.set_forkserver_preload([*imported, "stiefel_opt"])


def run(size: int, *calls: Call) -> None:
    """Make each call ``(function, *arguments)`` on ``size`` processes of one default group."""
    _prepare_server()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        mp.start_processes(_work, (size, store, calls), nprocs=size, start_method="forkserver")


def _work(rank: int, size: int, store: str, calls: Sequence[Call]) -> None:
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


def assert_equal_on_all(tensors: list[torch.Tensor]) -> None:
    """Raise unless every process holds the same bits."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    for rank, other in enumerate(every):
        assert torch.equal(mine, other), f"rank {dist.get_rank()} differs from rank {rank}"
