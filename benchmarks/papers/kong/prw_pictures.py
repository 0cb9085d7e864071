"""A picture of what a projection-robust Wasserstein distance sees, on clouds that it must find.

    python -m benchmarks.papers.kong.prw_pictures  # a few seconds
    python -m benchmarks.papers.kong.prw_pictures --smoke  # seconds

The clouds are the fragmented hypercube (Paty & Cuturi 2019): points uniform in a cube of many
dimensions are pushed apart along two of them, and the projection has to find which. The distances
of digits and plays are measured by `prw.py`.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import stiefel_opt as so
from benchmarks.common import programs
from benchmarks.common.harness import markdown_table

PLANTED = 2
LARGEST_ANGLE = 0.05
LINES = 150  # of a plan, in a picture


def fragmented_hypercube(count: int, dimension: int, seed: int) -> np.ndarray:
    """A uniform cube, and another whose points are moved by 2 away from the centre along two axes.

    Exact transport between the two laws moves along these axes only and costs 4 for each.
    """
    clouds = np.random.default_rng(seed).uniform(-1, 1, (2, count, dimension))
    clouds[1, :, :PLANTED] += 2 * np.sign(clouds[1, :, :PLANTED])
    return clouds


def principal_angles(projection: np.ndarray, planted: np.ndarray) -> np.ndarray:
    """Angles between two subspaces, largest first; by sines, which are exact for small ones."""
    rest = projection - planted @ (planted.T @ projection)
    return np.arcsin(np.linalg.svd(rest, compute_uv=False).clip(0, 1))


def picture(x: np.ndarray, y: np.ndarray, plan: np.ndarray, cost: float, path: Path) -> None:
    """Both clouds in the projection, with the heaviest entries of the plan as lines."""
    figures = programs.figures
    figure, ((axis,),) = figures.start(1, (6.5, 4.6))
    shown = np.arange(len(x))[:: max(1, len(x) // LINES)][:LINES]  # or the lines hide each other
    for point, partner in zip(x[shown], y[plan[shown].argmax(1)], strict=True):
        axis.plot(*zip(point, partner, strict=True), color="0.6", linewidth=0.6, zorder=3)
    for name, points, colour in (("cube", x, figures.BLUE), ("pieces", y, figures.RED)):
        axis.scatter(*points.T, s=12, color=colour, label=name, alpha=0.5, linewidths=0)
    axis.set_aspect("equal", adjustable="datalim")
    axis.set(xlabel="first direction (units of the data)")
    axis.set(ylabel="second direction (units of the data)")
    title = f"cube and pieces: cost {cost:.4g}; lines: where most of a point goes"
    axis.set_title(title, fontsize=9)
    figures.legend(figure, axis)
    figures.save(figure, path)


def parse(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=programs.Help
    )
    parser.add_argument("--points", type=int, default=3000, help="of each cloud")
    parser.add_argument("--dimension", type=int, default=30, help="of the clouds")
    parser.add_argument("--restarts", type=int, default=1, help="starting points")
    programs.add_flags(parser, Path("runs") / "prw")
    options = programs.parsed(parser, argv, {"points": 200})
    if options.dimension < PLANTED or options.points < 1:
        parser.error(f"--dimension must be at least {PLANTED} and --points at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Solve, print the table, draw; the exit status is 1 if the planted subspace was missed."""
    options = parse(argv)
    clouds = fragmented_hypercube(options.points, options.dimension, options.seed)
    began = time.perf_counter()
    result = so.ot.projection_robust_wasserstein(
        *torch.from_numpy(clouds).to(options.device), k=2, reg=1.0, restarts=options.restarts,
        seed=options.seed,
    )  # fmt: skip
    seconds, steps = time.perf_counter() - began, len(result.log) - 1
    projection, plan = result.projection.cpu().numpy(), result.plan.cpu().numpy()
    angles = principal_angles(projection, np.eye(options.dimension, PLANTED))
    header = ["Points", "Dimension", "Cost", "Steps", "Seconds", "Principal angles"]
    row = [str(options.points), str(options.dimension), f"{result.value:.4f}", str(steps)]
    row += [f"{seconds:.2f}", ", ".join(f"{angle:.4f}" for angle in angles)]
    table = markdown_table(header, [row])
    found = {"value": result.value, "objective": result.objective, "converged": result.converged}
    found |= {"iterations": steps, "seconds": seconds, "principal_angles": angles.tolist()}
    print(programs.write_table(options.output, "Fragmented hypercube", table, {"result": found}))
    met = bool(angles.max() < LARGEST_ANGLE)
    side = "below" if met else "not below"
    print(f"Largest angle to the planted subspace: {angles.max():.4f} rad, {side} {LARGEST_ANGLE}.")
    if not met and options.points < 3000:
        print("So few points do not determine it better; the default is 3000.")
    picture(*(clouds @ projection), plan, result.value, options.output / "pair.png")
    print(f"Plot: {options.output / 'pair.png'}")
    return 0 if met or options.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
