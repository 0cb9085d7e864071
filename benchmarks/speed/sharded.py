"""What a sharded step sends: bytes counted on real processes, and a model of many more.

    python -m benchmarks.speed.sharded            # all rows, with JSON into benchmarks/results
    python -m benchmarks.speed.sharded --smoke    # a few rows, to see that it runs

Every collective of a step passes through a counter, so the payloads are those of the step and not
an estimate. Bytes on the wire are for a ring: an all-reduce of b bytes sends 2 (p - 1) / p b from
each of p processes, a gather of b bytes in all (p - 1) / p b. The error beside each row is the
distance of the new points from the manifold; "off" that from the points of one process, in float32.
"moved B" is what a process hands to redistributions, for which DTensor gathers on gloo.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import stiefel_opt as so
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json

# With steps so short that rounding need not be taken out of them by a sum of its own.
RULES = {"StiefelSGD": (so.StiefelSGD, 0.05), "StiefelAdam": (so.StiefelAdam, 1e-3)}
SIZES = [(1024, 16), (4096, 16), (16384, 16), (4096, 64)]
PROCESSES = (1, 2, 4)
STEPS = 10  # the eighth corrects rounding


class Counter(TorchDispatchMode):
    """Bytes handed to each kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function.name().split("::")[1].split(".")[0]
        sends = name == "allreduce_" if function.namespace == "c10d" else name != "wait_tensor"
        if sends and function.namespace in ("c10d", "_c10d_functional") and name[0] != "_":
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.calls.append((name, sum(tensor.nbytes for tensor in tensors)))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def measure(rank: int, size: int, store: str, sizes: list[tuple[int, int]], path: str) -> None:
    """Count one step of each kind on ``size`` processes; rank 0 leaves the rows in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    mesh = dist.init_device_mesh("cpu", (size,))
    rows = []
    for name, (rule, lr) in RULES.items():
        for n, m in sizes:
            dims = (0, 1) if (n, m) == sizes[0] else (0,)
            rows += [one(name, rule, lr, n, m, dim, mesh) for dim in dims]
    if rank == 0:
        torch.save(rows, path)
    dist.barrier()
    dist.destroy_process_group()


def one(name: str, rule: Any, lr: float, n: int, m: int, dim: int, mesh: Any) -> dict[str, Any]:
    """Return the row of one optimizer, shape and sharded dimension."""
    generator = torch.Generator().manual_seed(0)
    start, _ = torch.linalg.qr(torch.randn(n, m, generator=generator))
    grads = [torch.randn(n, m, generator=generator) / n**0.5 for _ in range(STEPS)]
    alone = so.ManifoldParameter(start.clone())
    shard = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(dim)]))
    shard.manifold = so.Stiefel()
    alone_opt, opt = rule([alone], lr=lr), rule([shard], lr=lr)
    counts = []
    for grad in grads:
        alone.grad, shard.grad = grad.clone(), distribute_tensor(grad, mesh, [Shard(dim)])
        alone_opt.step()
        with Counter() as counter:
            opt.step()
        counts.append(counter.calls)
    usual = counts[STEPS - 1]
    processes = mesh.size()
    sums = sum(size for kind, size in usual if "reduce" in kind)
    others = sum(size for kind, size in usual if "reduce" not in kind)
    whole = shard.full_tensor()
    return {
        "optimizer": name, "n": n, "m": m, "sharded": ("rows", "columns")[dim],
        "processes": processes,
        "collectives": [list(call) for call in usual],
        "most_collectives_in_a_step": max(map(len, counts[1:])),
        "summed_bytes": sums,
        "summed_bytes_correcting_step": sum(size for _, size in counts[7]),
        "moved_bytes": others,
        "wire_bytes": round(2 * sums * (processes - 1) / processes) + others * (processes - 1),
        "gather_bytes": 2 * n * m * start.element_size() * (processes - 1) // processes,
        "error": float(so.orthonormality_error(whole, so.Stiefel())),
        "off": float((whole - alone).abs().max()),
    }  # fmt: skip


def short_table(rows: list[dict[str, Any]]) -> str:
    """Bytes sent by each process in a usual step, for n, m and processes; beside it a gather."""
    found: dict[tuple[str, int, int], dict[int, tuple[int, int]]] = {}
    for row in rows:
        if row["sharded"] == "rows" and row["processes"] > 1:
            shape = (row["optimizer"], row["n"], row["m"])
            sent = (row["wire_bytes"], row["gather_bytes"])
            found.setdefault(shape, {})[row["processes"]] = sent
    counts = sorted({ranks for sent in found.values() for ranks in sent})
    header = [f"{what}, {ranks} processes" for ranks in counts for what in ("sums", "gather")]
    lines = []
    for (name, n, m), sent in found.items():
        cells = [f"{number:,}" for ranks in counts for number in sent[ranks]]
        lines.append([f"{name}, {n} x {m}", *cells])
    return markdown_table(("bytes a process sends in a step", *header), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="few rows, nothing written")
    smoke = parser.parse_args().smoke
    sizes, processes = (SIZES[:1], (2,)) if smoke else (SIZES, PROCESSES)
    rows: list[dict[str, Any]] = []
    for size in processes:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/rows.pt"
            store = (Path(folder) / "store").as_uri()
            mp.spawn(measure, (size, store, sizes, path), nprocs=size)
            rows += torch.load(path)
    tables = {"short": short_table(rows)}
    print(tables["short"])
    if not smoke:
        content = {"machine": machine(), "tables": tables, "rows": rows}
        write_json(RESULTS / "sharded.json", content)


if __name__ == "__main__":
    main()
