"""SGD on the vectors of CWY with step k^-0.5: does the gradient vanish as fast as promised?

Theorem 4 of Likhosherstov et al. (AISTATS 2021): for f with Lipschitz gradients and noise of
bounded variance, v_k = v_(k-1) - k^-0.5 (noisy gradient) from fixed nonzero vectors gives

    min over k < K of E |grad_v f(H(v_1) ... H(v_L))|^2 = o(K^(-0.5 + eps)) for any eps > 0,

on O(N) with any L, and by T-CWY on St(N, M). Here f(X) = |AX - B|^2 / 2 with Gaussian A and B (a
weighted Procrustes problem), the noise is Gaussian, and the expectation is a mean over runs. The
slope of the running minimum is fitted on the last two decades of K in logarithms, with an interval
from 200 resamplings of the runs.

    python -m benchmarks.papers.likhosherstov.convergence  # a minute; JSON and PNG in results
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from benchmarks.common import figures
from benchmarks.common.harness import (
    RESULTS,
    machine,
    markdown_table,
    orthonormality_error,
    write_json,
)
from stiefel_opt.parametrizations import cwy

RESAMPLINGS = 200
STEPS, RUNS = 6_000, 32  # that differ in the noise
NOISE = 0.3  # deviation of each entry
SEED = 0  # of the problem, start and noise


@dataclass(frozen=True)
class Case:
    """L reflections of N rows, of whose product the first M columns are the point."""

    title: str
    rows: int
    columns: int
    reflections: int


CASES = (
    Case("CWY, O(12), L = 12", 12, 12, 12),
    Case("CWY, O(12), L = 6", 12, 12, 6),
    Case("T-CWY, St(24, 6)", 24, 6, 6),
)


def descend(case: Case, runs: int, steps: int) -> tuple[NDArray[np.float64], float]:
    """Squared norms of the exact gradient, (steps, runs), and the largest |X'X - I| at the end."""
    generator = torch.Generator().manual_seed(SEED)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    left = gaussian(case.rows, case.rows) / math.sqrt(case.rows)
    right = gaussian(case.rows, case.columns) / math.sqrt(case.columns)
    start = gaussian(case.rows, case.reflections)
    vectors = start.expand(runs, -1, -1).clone().requires_grad_()
    norms = torch.empty(steps, runs, dtype=torch.float64)
    for step in tqdm(range(1, steps + 1), desc=case.title, disable=None):
        point = cwy(vectors, case.columns)
        slope = left.mT @ (left @ point.detach() - right)
        (exact,) = torch.autograd.grad(point, vectors, slope, retain_graph=True)
        pushed = slope + NOISE * gaussian(runs, case.rows, case.columns)
        (noisy,) = torch.autograd.grad(point, vectors, pushed)
        norms[step - 1] = exact.square().sum((-2, -1))
        with torch.no_grad():
            vectors -= step**-0.5 * noisy
    return norms.numpy(), orthonormality_error(cwy(vectors.detach(), case.columns))


def running_minimum(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Smallest mean over the runs up to each step."""
    return np.minimum.accumulate(norms.mean(1))


def marks(steps: int) -> NDArray[np.int64]:
    """Numbers of steps, evenly spread in logarithms over two decades, less if there are fewer."""
    return np.unique(np.geomspace(max(2, steps // 100), steps, 60).round().astype(np.int64))


def slope(norms: NDArray[np.float64]) -> float:
    """Least-squares slope of log(running minimum) against log(K)."""
    at = marks(len(norms))
    return float(np.polyfit(np.log(at), np.log(running_minimum(norms)[at - 1]), 1)[0])


def slope_interval(norms: NDArray[np.float64]) -> tuple[float, float]:
    """Between which 95 % of the slopes of resampled runs lie: a little below that of the runs."""
    random = np.random.default_rng(0)
    runs = norms.shape[1]
    slopes = [slope(norms[:, random.integers(0, runs, runs)]) for _ in range(RESAMPLINGS)]
    low, high = np.percentile(slopes, (2.5, 97.5))
    return float(low), float(high)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all cases, print the slopes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="few steps")
    parser.add_argument("--output", type=Path, default=RESULTS / "convergence.json")
    options = parser.parse_args(argv)
    steps, runs = (200, 4) if options.smoke else (STEPS, RUNS)
    torch.set_num_threads(1)
    rows, records = [], []
    for case in CASES:
        norms, error = descend(case, runs, steps)
        low, high = slope_interval(norms)
        fitted, lowest = slope(norms), running_minimum(norms)
        rows.append([case.title, f"{fitted:.3f}", f"{low:.3f} to {high:.3f}",
                     f"{lowest[0]:.3g}", f"{lowest[-1]:.3g}", f"{error:.1e}"])  # fmt: skip
        at = np.unique(np.geomspace(1, steps, 60).round().astype(int))
        record: dict[str, Any] = {"case": case.title, "slope": fitted, "slope_95": [low, high]}
        record |= {"K": at.tolist(), "running_minimum": [float(lowest[k - 1]) for k in at]}
        records.append(record | {"orthonormality_error": error})
    header = ["Case", "Slope", "of resampled runs", "First", "Last", "max abs(X'X - I)"]
    text = markdown_table(header, rows)
    print(f"\n{text}")
    content = {
        "machine": machine(),
        "settings": {"steps": steps, "runs": runs, "noise": NOISE, "seed": SEED},
        "tables": [text],
        "results": records,
    }
    write_json(options.output, content)
    figures.convergence(options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
