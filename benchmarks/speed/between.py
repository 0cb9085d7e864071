"""Functions between points beside roma, pymanopt and geomstats: equal up to known factors; times.

    export OMP_NUM_THREADS=1
    python -m benchmarks.speed.between

Needs roma, pymanopt and geomstats. Values: the largest difference on 1,000 random inputs in
float64, after the factor that is shown. Times: a batch of 10,000 rotations 3 x 3, medians of 15
rounds in which contestants take turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("GEOMSTATS_BACKEND", "numpy")
vars(np).setdefault("trapz", np.trapezoid)  # geomstats 2.8 imports what numpy 2.4 has renamed

import roma  # noqa: E402
import torch  # noqa: E402
from geomstats.geometry.special_orthogonal import SpecialOrthogonal  # noqa: E402
from geomstats.geometry.stiefel import Stiefel  # noqa: E402
from pymanopt.manifolds import SpecialOrthogonalGroup  # noqa: E402
from torch import Tensor  # noqa: E402

import stiefel_opt as so  # noqa: E402
from benchmarks.common.harness import RESULTS, machine, markdown_table, one_thread, write_json  # noqa: E402

F64 = torch.float64
ROOT = 2**0.5


def rotations(count: int, n: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    reading = so.Stiefel(determinant=1)
    return so.random_point(count, n, n, manifold=reading, generator=generator, dtype=dtype)


def hat(vector: Tensor) -> Tensor:
    x, y, z = vector.unbind(-1)
    zero = torch.zeros_like(x)
    return torch.stack([zero, -z, y, z, zero, -x, -y, x, zero], -1).unflatten(-1, (3, 3))


def apart(ours: Tensor, theirs: Any) -> float:
    return float((ours - torch.as_tensor(theirs)).abs().max())


def values() -> list[tuple[str, str, str, float]]:
    """Function, the other's name for it, the factor, and the largest difference."""
    rows: list[tuple[str, str, str, float]] = []

    def add(here: str, there: str, ours: Tensor, theirs: Any, factor: str = "1") -> None:
        rows.append((here, there, factor, apart(ours, theirs)))

    x, y = rotations(1000, 3, 0), rotations(1000, 3, 1)
    angle, canonical = roma.rotmat_geodesic_distance(x, y), so.distance(x, y, metric="canonical")
    name = "roma.rotmat_geodesic_distance"
    add("distance, euclidean", name, so.distance(x, y), ROOT * angle, "sqrt(2)")
    add("distance, canonical", name, canonical, angle)
    lengths = SpecialOrthogonal(3).metric.dist(x.numpy(), y.numpy())
    add("distance, canonical", "geomstats SpecialOrthogonal(3)", canonical, lengths)
    vector = roma.rotmat_to_rotvec(x.mT @ y)
    add("X' log(X, Y)", "roma.rotmat_to_rotvec, as a matrix", x.mT @ so.log(x, y), hat(vector))
    end = x @ roma.rotvec_to_rotmat(vector)
    add("exp(X, X A)", "roma.rotvec_to_rotmat", so.exp(x, x @ hat(vector)), end)
    slerp = roma.rotmat_slerp(x, y, torch.tensor(0.3, dtype=F64))
    add("interpolate", "roma.rotmat_slerp", so.interpolate(x, y, 0.3), slerp)
    mixed = x + 0.7 * y
    procrustes = roma.special_procrustes(mixed)
    add(
        "polar, determinant=1",
        "roma.special_procrustes",
        so.polar(mixed, determinant=1),
        procrustes,
    )
    for n in (3, 5, 10):
        group, one = SpecialOrthogonalGroup(n, k=1000), SpecialOrthogonalGroup(n)
        x, y = rotations(1000, n, 0), rotations(1000, n, 1)
        theirs = group.log(x.numpy(), y.numpy())
        each = [one.dist(a, b) for a, b in zip(x.numpy(), y.numpy(), strict=True)]
        name = f"pymanopt SpecialOrthogonalGroup({n})"
        add("X' log(X, Y)", name, x.mT @ so.log(x, y), theirs)
        add("distance, euclidean", name, so.distance(x, y), np.array(each))
    space, generator = Stiefel(7, 3), torch.Generator().manual_seed(0)
    x = so.random_point(1000, 7, 3, generator=generator, dtype=F64)
    noise = torch.randn(x.shape, generator=generator, dtype=F64)
    tangent = so.project_tangent(x, 0.3 * noise)
    y = so.exp(x, tangent, metric="canonical")
    space.metric.log_solver.tol = 1e-12
    name, there = "geomstats Stiefel(7, 3)", (x.numpy(), y.numpy())
    add("exp, canonical", name, y, space.metric.exp(tangent.numpy(), there[0]))
    log = so.log(x, y, metric="canonical")
    add("log, canonical", name, log, space.metric.log(there[1], there[0]))
    length = so.distance(x, y, metric="canonical")
    add("distance, canonical", name, length, space.metric.dist(*there))
    return rows


def times(rounds: int = 15) -> list[tuple[str, float, float]]:
    """Function, milliseconds of 10,000 rotations here and of roma, in float32."""
    x, y = rotations(10000, 3, 0, torch.float32), rotations(10000, 3, 1, torch.float32)
    tangent, vector = so.log(x, y), roma.rotmat_to_rotvec(x.mT @ y)
    half, mixed, logarithm = torch.tensor(0.5), x + y, so.functional.logarithm
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "log": (lambda: so.log(x, y), lambda: roma.rotmat_to_rotvec(x.mT @ y)),
        "functional.logarithm": (lambda: logarithm(x), lambda: roma.rotmat_to_rotvec(x)),
        "exp": (lambda: so.exp(x, tangent), lambda: x @ roma.rotvec_to_rotmat(vector)),
        "distance": (lambda: so.distance(x, y), lambda: roma.rotmat_geodesic_distance(x, y)),
        "interpolate": (lambda: so.interpolate(x, y, 0.5), lambda: roma.rotmat_slerp(x, y, half)),
        "polar": (
            lambda: so.polar(mixed, determinant=1),
            lambda: roma.special_procrustes(mixed),
        ),
    }
    found = []
    for name, both in pairs.items():
        spent: list[list[float]] = [[], []]
        for turn in range(rounds + 2):
            for side in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                both[side]()
                spent[side].append(1e3 * (time.perf_counter() - began))
        found.append((name, *(float(np.median(own[2:])) for own in spent)))
    return found  # type: ignore[return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "between.json")
    options = parser.parse_args()
    one_thread()
    found, spent = values(), times()
    tables = {
        "values": markdown_table(
            ["Here", "There", "Factor", "Largest difference"],
            [[*row[:3], f"{row[3]:.0e}"] for row in found],
        ),
        "times": markdown_table(
            ["10,000 rotations 3 x 3", "ms", "roma, ms", "ratio"],
            [
                [name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.1f}"]
                for name, ours, theirs in spent
            ],
        ),
    }
    for table in tables.values():
        print(table)
    packages = ("roma", "pymanopt", "geomstats")
    write_json(
        options.output,
        {"machine": machine(packages=packages), "values": found, "times": spent, "tables": tables},
    )


if __name__ == "__main__":
    main()
