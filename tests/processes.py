"""Run a function on several gloo processes of this machine and pass on what they raise."""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=60)  # a collective that waits longer is an error of the test


@functools.cache
def _prepare_server() -> None:
    """Import torch once, in a server that every process is then forked from."""
    imported = ["torch", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp"]
    multiprocessing.set_forkserver_preload([*imported, "stiefel_opt"])


def run(function: Callable[..., None], size: int, *cases: tuple[Any, ...]) -> None:
    """Call ``function(*case)`` for each case on ``size`` processes that form the default group."""
    _prepare_server()
    with tempfile.TemporaryDirectory() as folder:
        store = (Path(folder) / "store").as_uri()
        mp.start_processes(
            _work, (size, store, function, cases), nprocs=size, start_method="forkserver"
        )


def _work(
    rank: int, size: int, store: str, function: Callable[..., None], cases: Sequence[Any]
) -> None:
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store, TIMEOUT, size, rank)
    for case in cases:
        try:
            function(*case)
        except Exception as error:  # noqa: PERF203
            raise AssertionError(f"{function.__name__}{case} failed on rank {rank}") from error
    dist.barrier()
    dist.destroy_process_group()


def assert_equal_on_all(tensors: list[torch.Tensor]) -> None:
    """Raise unless every process holds the same bits."""
    mine = torch.cat([tensor.detach().flatten() for tensor in tensors])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    for rank, other in enumerate(every):
        assert torch.equal(mine, other), f"rank {dist.get_rank()} differs from rank {rank}"
