"""Projection-robust Wasserstein distances, and pictures of what the projection sees.

    python -m benchmarks.papers.kong.prw_pictures  # synthetic, a few seconds
    python -m benchmarks.papers.kong.prw_pictures --data mnist \\
        --data-dir DIR  # all 45 pairs of digits
    python -m benchmarks.papers.kong.prw_pictures --data shakespeare \\
        --data-dir DIR  # all 66 pairs of plays
    python -m benchmarks.papers.kong.prw_pictures --smoke  # seconds

Synthetic is the fragmented hypercube (Paty & Cuturi 2019): points uniform in a cube of many
dimensions are pushed apart along two of them, and the projection has to find which. `mnist` reads
DIR/mnist_features.npz (digit_0 ... digit_9: points x features), `shakespeare`
DIR/shakespeare_w2v.npz (for each play NAME_x: words x features, NAME_w: weights summing to one).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stiefel_opt as so
from benchmarks.common.harness import machine, markdown_table, write_text
from benchmarks.common.programs import (
    figures,
    require,
)

PLANTED = 2
LARGEST_ANGLE = 0.05
REG = {"synthetic": 1.0, "mnist": 8.0, "shakespeare": 0.2}
FILES = {"mnist": "mnist_features.npz", "shakespeare": "shakespeare_w2v.npz"}
LINES = 150  # of a plan, in a picture


@dataclasses.dataclass(frozen=True)
class Cloud:
    """Points with weights."""

    name: str
    points: np.ndarray
    weights: np.ndarray


def fragmented_hypercube(count: int, dimension: int, seed: int) -> tuple[Cloud, Cloud]:
    """A uniform cube, and another whose points are moved by 2 away from the centre along two axes.

    Exact transport between the two laws moves along these axes only and costs 4 for each.
    """
    rng = np.random.default_rng(seed)
    cube, pieces = rng.uniform(-1, 1, (2, count, dimension))
    pieces[:, :PLANTED] += 2 * np.sign(pieces[:, :PLANTED])
    weights = np.full(count, 1 / count)
    return Cloud("cube", cube, weights), Cloud("pieces", pieces, weights)


def read_clouds(data: str, folder: Path | None) -> list[Cloud]:
    """The digits, or the plays divided by the root mean square of their words' norms."""
    wanted = f"--data-dir must be a folder with {FILES[data]} for --data {data}"
    if folder is None or not (folder / FILES[data]).is_file():
        raise SystemExit(
            f"{wanted}, got {str(folder)!r}; see the top of benchmarks/papers/kong/prw_pictures.py"
        )
    with np.load(folder / FILES[data], allow_pickle=False) as file:
        arrays = {key: file[key].astype(float) for key in file.files}
    prefix, suffix = ("digit_", "") if data == "mnist" else ("", "_x")
    clouds = []
    for key in sorted(arrays):
        if key.startswith(prefix) and key.endswith(suffix):
            name = key.removeprefix(prefix).removesuffix(suffix)
            points = arrays[key]
            weights = arrays.get(f"{name}_w", np.ones(len(points)))
            clouds.append(Cloud(name, points, weights / weights.sum()))
    if len(clouds) < 2:
        raise SystemExit(f"{wanted}, got one with {len(clouds)} cloud(s) in it")
    if data == "mnist":
        return clouds
    scale = np.mean([np.square(cloud.points).sum(1).mean() for cloud in clouds]) ** 0.5
    return [Cloud(cloud.name, cloud.points / scale, cloud.weights) for cloud in clouds]


def solve(left: Cloud, right: Cloud, options: argparse.Namespace) -> so.ot.PRWResult:
    """Solve on the device; the projection and the plan come back as arrays."""
    result = so.ot.projection_robust_wasserstein(
        *(
            torch.from_numpy(array).to(options.device)
            for array in (left.points, right.points, left.weights, right.weights)
        ),
        k=2,
        reg=REG[options.data] if options.reg is None else options.reg,
        restarts=options.restarts,
        seed=options.seed,
    )
    return dataclasses.replace(
        result, projection=result.projection.cpu().numpy(), plan=result.plan.cpu().numpy()
    )


def principal_angles(projection: np.ndarray, planted: np.ndarray) -> np.ndarray:
    """Angles between two subspaces, largest first; by sines, which are exact for small ones."""
    rest = projection - planted @ (planted.T @ projection)
    return np.arcsin(np.linalg.svd(rest, compute_uv=False).clip(0, 1))


# ---- pictures ----


def picture(left: Cloud, right: Cloud, result: so.ot.PRWResult, path: Path) -> None:
    """Both clouds in the projection, with the heaviest entries of the plan as lines."""
    require("matplotlib")
    from matplotlib.collections import LineCollection

    x, y = left.points @ result.projection, right.points @ result.projection
    figure, axes = figures.start(1, (6.5, 4.6))
    axis = axes[0][0]
    # Every so many-th point, or the lines hide each other; of each, its heaviest entry.
    shown = np.argsort(-left.weights, kind="stable")[:: max(1, len(x) // LINES)][:LINES]
    partners = result.plan[shown].argmax(1)
    segments = np.stack((x[shown], y[partners]), 1)
    axis.add_collection(LineCollection(list(segments), colors="0.6", linewidths=0.6, zorder=3))
    for cloud, points, colour in ((left, x, figures.BLUE), (right, y, figures.RED)):
        sizes = (12 * cloud.weights * len(points)).clip(2, 120)
        axis.scatter(*points.T, s=sizes, color=colour, label=cloud.name, alpha=0.5, linewidths=0)
    axis.set_aspect("equal", adjustable="datalim")
    axis.set(xlabel="first direction (units of the data)")
    axis.set(ylabel="second direction (units of the data)")
    title = (
        f"{left.name} and {right.name}: cost {result.value:.4g}; lines: where most of a point goes"
    )
    axis.set_title(title, fontsize=9)
    figures.legend(figure, axis)
    figures.save(figure, path)


def heat_map(names: Sequence[str], distances: np.ndarray, path: Path) -> None:
    """All distances, with the names of the clouds."""
    require("matplotlib")
    size = 2.5 + 0.45 * len(names)
    figure, axes = figures.start(1, (size + 0.8, size))
    shown = np.where(np.eye(len(names)) > 0, np.nan, distances)
    figures.heat_map(figure, axes[0][0], names, shown)
    axes[0][0].set_title("Projection-robust Wasserstein", fontsize=10)
    figures.save(figure, path)


# ---- main ----


def run_synthetic(options: argparse.Namespace) -> tuple[str, dict[str, Any], bool]:
    """Find the planted subspace; the table, the record, and whether it was found."""
    left, right = fragmented_hypercube(options.points, options.dimension, options.seed)
    began = time.perf_counter()
    result = solve(left, right, options)
    seconds = time.perf_counter() - began
    planted = np.eye(options.dimension, PLANTED)
    angles = principal_angles(result.projection, planted)
    met = bool(angles.max() < LARGEST_ANGLE)
    record = {
        "value": result.value,
        "objective": result.objective,
        "converged": result.converged,
        "iterations": len(result.log) - 1,
        "seconds": seconds,
        "principal_angles": angles.tolist(),
    }
    table = markdown_table(
        ["Points", "Dimension", "Cost", "Steps", "Seconds", "Principal angles"],
        [[
            str(options.points), str(options.dimension), f"{result.value:.4f}",
            str(record["iterations"]), f"{seconds:.2f}", ", ".join(f"{a:.4f}" for a in angles),
        ]],
    )  # fmt: skip
    picture(left, right, result, options.output / "pair.png")
    return table, record, met


def run_pairs(options: argparse.Namespace) -> tuple[str, dict[str, Any], bool]:
    """All pairs of a data set; the table of distances, the record, whether all converged."""
    tqdm = require("tqdm").tqdm
    clouds = read_clouds(options.data, options.data_dir)
    distances, seconds, converged = np.zeros((len(clouds), len(clouds))), [], []
    closest: tuple[float, Any] = (np.inf, None)
    for i, j in tqdm(list(combinations(range(len(clouds)), 2)), desc="pairs", unit="pair"):
        began = time.perf_counter()
        result = solve(clouds[i], clouds[j], options)
        seconds.append(time.perf_counter() - began)
        converged.append(result.converged)
        distances[i, j] = distances[j, i] = result.value
        closest = min(closest, (result.value, (clouds[i], clouds[j], result)), key=lambda p: p[0])
    names = [cloud.name for cloud in clouds]
    table = markdown_table(
        ["", *names],
        [[name, *(f"{v:.4g}" for v in row)] for name, row in zip(names, distances, strict=True)],
    )
    record = {
        "names": names,
        "distances": distances.tolist(),
        "converged": sum(converged),
        "pairs": len(converged),
        "median_seconds": float(np.median(seconds)),
    }
    heat_map(names, distances, options.output / "distances.png")
    picture(*closest[1], options.output / "pair.png")
    return table, record, all(converged)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--data", choices=sorted(REG), default="synthetic", help="synthetic needs no files"
    )
    parser.add_argument("--data-dir", type=Path, help="folder of the file that --data needs")
    parser.add_argument("--points", type=int, default=3000, help="of each synthetic cloud")
    parser.add_argument("--dimension", type=int, default=30, help="of the synthetic clouds")
    parser.add_argument("--reg", type=float, help="default: 1, 8 (mnist) or 0.2 (shakespeare)")
    parser.add_argument("--restarts", type=int, default=1, help="starting points")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default="cpu", help="float64 throughout")
    parser.add_argument(
        "--smoke", action="store_true", help="few points; exit status 0 whatever is found"
    )
    parser.add_argument("--output", type=Path, default=Path("runs") / "prw")
    options = parser.parse_args(argv)
    if options.smoke:
        options.points = min(options.points, 200)
    if options.dimension < PLANTED:
        raise SystemExit(f"--dimension must be at least {PLANTED}, got {options.dimension}")
    if options.points < 1:
        raise SystemExit(f"--points must be at least 1, got {options.points}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Solve, print the table, draw; the exit status is 1 if the planted subspace was missed."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    run = run_synthetic if options.data == "synthetic" else run_pairs
    table, record, met = run(options)
    print(f"{table}\n")
    if options.data == "synthetic":
        largest = max(record["principal_angles"])
        side = "below" if met else "not below"
        print(f"Largest angle to the planted subspace: {largest:.4f} rad, {side} {LARGEST_ANGLE}.")
        if not met and options.points < 3000:
            print("So few points do not determine it better; the default is 3000.")
    content = {"machine": machine(), "data": options.data, "tables": [table], "result": record}
    write_text(options.output / "results.json", json.dumps(content, indent=1) + "\n")
    write_text(options.output / "table.md", f"{table}\n")
    for path in sorted(options.output.glob("*.png")):
        print(f"Plot: {path}")
    return 0 if met or options.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
