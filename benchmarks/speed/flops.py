"""What one optimizer step really costs in flops, beside the published counts and beside its time.

`torch.utils.flop_counter` sees every product; factorisations, solves and in-place products it
counts as zero, so their formulas are given here. Counted are eight consecutive steps of one float32
parameter n x m, divided by eight, with the gradient in place: that includes the correction of
rounding that our optimizers make once in eight steps. Rivals in the same run: geoopt (canonical and
Euclidean metric) and pogo-torch.

The published counts are those of Likhosherstov et al. (AISTATS 2021), Table 2, for gradient descent
without momentum and for the forward pass of T-CWY and OWN. Steps called "as published" follow the
formulas of that paper; our gradient descent solves smaller systems. Times are medians over
interleaved rounds, beside their ratio to the bare product n x m by m x m and the error
max |X'X - I|.

    python -m benchmarks.speed.flops                      # a few minutes
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import stiefel_opt as so
from benchmarks.common import harness
from benchmarks.speed.contestants import flip_gradients, geoopt, pogo_sgd

SIZES = ((1000, 10), (2000, 50), (512, 128), (384, 384))
STEPS = 8  # counted, and the period of the correction of rounding
STEP_SIZE = 0.1
SQUARE_SOLVE_LIMIT = 1024  # geoopt's canonical metric solves n x n systems: only up to here
PRODUCT = "one product n x m by m x m"
CPU = torch.device("cpu")

Shape = Sequence[int]


# ---- flops of what torch's counter does not know ------------------------------------------------


def batch(shape: Shape) -> int:
    return math.prod(shape[:-2])


def known(tall: float, small: float) -> Callable[..., int]:
    """``tall`` n m^2 + ``small`` m^3 for each matrix with n rows and m <= n columns."""

    def flops(matrix: Shape, *_: Any, **__: Any) -> int:
        n, m = max(matrix[-2:]), min(matrix[-2:])
        return round(batch(matrix) * (tall * n * m**2 + small * m**3))

    return flops


def solve_flops(matrix: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """LU and two triangular solves: 2 m^3 / 3 + 2 m^2 r."""
    m = matrix[-1]
    return round(batch(matrix) * (2 * m**3 / 3 + 2 * m * math.prod(right[-2:])))


def triangular_flops(matrix: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """m^2 r, whether the matrix stands left or right."""
    return batch(matrix) * matrix[-1] * math.prod(right[-2:])


def added_product_flops(_: Shape, left: Shape, right: Shape, *__: Any, **___: Any) -> int:
    return 2 * batch(left) * left[-2] * left[-1] * right[-1]


aten = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = {
    aten.linalg_qr: known(4, -4 / 3),  # R, and as much to form Q
    aten._linalg_solve_ex: solve_flops,
    aten.linalg_inv_ex: known(0, 2),
    aten.linalg_cholesky_ex: known(0, 1 / 3),
    aten.linalg_solve_triangular: triangular_flops,
    aten._linalg_eigh: known(0, 9),  # about
    aten._linalg_svd: known(6, 20),
    # Five products for the longest series that torch uses; squarings are not known.
    aten.linalg_matrix_exp: known(0, 10),
    aten.baddbmm_: added_product_flops,
    aten.addmm_: added_product_flops,
}


def count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        call()
    return int(counter.get_total_flops())


# ---- the methods ---------------------------------------------------------------------------------

Published = Callable[[int, int], float]
Build = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Method:
    """An optimizer, how a parameter is tagged for it, and its published count if there is one."""

    name: str
    build: Build
    tag: Callable[[Tensor], Tensor] = so.ManifoldParameter
    published: Published | None = None
    wide: bool = False
    solves_n: bool = False


# Published counts by n and m.
COUNTS: dict[str, Published] = {
    "C-QR": lambda n, m: 10 * n * m**2 - 2 * m**3 / 3,
    "E-QR": lambda n, m: 14 * n * m**2 - 2 * m**3 / 3,
    "C-C": lambda n, m: 28 * n * m**2 + 16 * m**3,
    "E-C": lambda n, m: 72 * n * m**2 + 25 * m**3,
}
# Forward passes: free numbers to orthonormal matrix, beside the published counts.
MAPS: dict[str, tuple[Callable[[Tensor], Tensor], Published]] = {
    "T-CWY, forward": (so.parametrizations.tcwy, lambda n, m: 4 * n * m**2 + 7 * m**3 / 3),
    "OWN, forward": (so.parametrizations.own_map, lambda n, m: 4 * n * m**2 + 14 * m**3 / 3),
}


def published_step(X: Tensor, G: Tensor, *, euclidean: bool, cayley: bool) -> Tensor:
    """A step of descent by the formulas of section 2.2.2 and of appendix A, lemma 1."""
    if not cayley:
        tangent = G @ (X.mT @ X) - X @ (G.mT @ X)
        if euclidean:
            tangent = tangent - X @ (X.mT @ tangent) / 2
        return torch.linalg.qr(X - STEP_SIZE * tangent).Q
    left, right = [G, X], [X, -G]
    if euclidean:
        E = G.mT @ X - X.mT @ G
        left, right = [*left, X @ E / 2], [*right, X]
    B, C = STEP_SIZE * torch.cat(left, dim=1), torch.cat(right, dim=1)
    inverse = torch.linalg.inv(torch.eye(B.shape[1], dtype=X.dtype) + C.mT @ B / 2)
    return X - B @ (inverse @ (C.mT @ X))


# Steps without an optimizer, by the names of their published counts.
STEPS_AS_PUBLISHED = {
    name: partial(published_step, euclidean=name[0] == "E", cayley=name[-1] == "C")
    for name in COUNTS
}


def descent(**options: Any) -> Build:
    return partial(so.ProjectedRGD, lr=0.1, **options)


def geoopt_tag(canonical: bool) -> Callable[[Tensor], Tensor]:
    return partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel(canonical=canonical))


def pogo_momentum(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return pogo_sgd(parameters, 0.1, momentum=0.9)


def geoopt_sgd(momentum: float) -> Build:
    return partial(geoopt.optim.RiemannianSGD, lr=0.1, momentum=momentum)


METHODS = (
    Method("RGD-C-QR", descent(retraction="qr"), published=COUNTS["C-QR"]),
    Method("RGD-E-QR", descent(retraction="qr", metric="euclidean"), published=COUNTS["E-QR"]),
    Method("RGD-C-C", descent(), published=COUNTS["C-C"]),
    Method("RGD-E-C", descent(metric="euclidean"), published=COUNTS["E-C"]),
    Method("RGD-E-polar", descent(retraction="polar", metric="euclidean")),
    Method("RGD-C-QR, momentum", descent(retraction="qr", momentum=0.9)),
    Method("RGD-C-C, momentum", descent(momentum=0.9)),
    Method("CayleySGD", partial(so.CayleySGD, lr=0.1)),
    Method("CayleySGD, exact", partial(so.CayleySGD, lr=0.1, exact=True)),
    Method("CayleyAdam", partial(so.CayleyAdam, lr=0.1)),
    Method("StiefelSGD", partial(so.StiefelSGD, lr=0.1)),
    Method("StiefelAdam", partial(so.StiefelAdam, lr=1e-3)),
    Method("geoopt SGD (RGD-E-QR)", geoopt_sgd(0.0), geoopt_tag(False), COUNTS["E-QR"]),
    Method(
        "geoopt SGD, canonical (RGD-C-C)", geoopt_sgd(0.0), geoopt_tag(True), COUNTS["C-C"],
        solves_n=True,
    ),
    Method("geoopt SGD, momentum", geoopt_sgd(0.9), geoopt_tag(False)),
    Method("POGO, momentum", pogo_momentum, torch.nn.Parameter, wide=True),
)  # fmt: skip


def start(n: int, m: int, method: Method) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """One parameter with a Gaussian gradient in place, and its optimizer."""
    generator = torch.Generator().manual_seed(7)
    value = torch.linalg.qr(torch.randn(n, m, generator=generator, dtype=torch.float64)).Q.float()
    # The largest singular value of a Gaussian matrix is close to sqrt(n) + sqrt(m).
    grad = torch.randn(n, m, generator=generator) * (10 * STEP_SIZE / (n**0.5 + m**0.5))
    if method.wide:
        value, grad = value.mT.unsqueeze(0), grad.mT.unsqueeze(0)
    parameter = method.tag(value.contiguous().clone())
    parameter.grad = grad.contiguous().clone()
    return [parameter], method.build([parameter])


def steps_of(parameters: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Eight steps with a gradient of changing sign, so that the point does not go far."""
    for _ in range(STEPS):
        optimizer.step()
        flip_gradients(parameters)


def measure(n: int, m: int, rounds: int) -> list[dict[str, Any]]:
    """Flops, time and error of every method at one size."""
    methods = [method for method in METHODS if not method.solves_n or n <= SQUARE_SOLVE_LIMIT]
    contestants, entries, flops = [], {}, {}
    for method in methods:
        parameters, optimizer = start(n, m, method)
        steps_of(parameters, optimizer)  # the first step makes state and measures the start
        flops[method.name] = count(partial(steps_of, parameters, optimizer)) / STEPS
        parameters, optimizer = start(n, m, method)
        entries[method.name] = parameters
        prepare = partial(flip_gradients, parameters)
        step: Callable[[], object] = optimizer.step
        contestants.append(harness.Contestant(method.name, step, prepare))
    outcomes: dict[str, Tensor] = {}

    def evaluate(name: str, function: Callable[[], Tensor]) -> None:
        outcomes[name] = function()

    (point,), _ = start(n, m, METHODS[0])
    functions = {
        f"RGD-{name}, as published": partial(step, point.detach(), point.grad)
        for name, step in STEPS_AS_PUBLISHED.items()
    }
    if m < n:  # both maps need fewer columns than rows
        functions |= {name: partial(f, torch.randn(n, m)) for name, (f, _) in MAPS.items()}
    for name, function in functions.items():
        call = partial(evaluate, name, function)
        flops[name] = count(call)
        contestants.append(harness.Contestant(name, call))
    tall, small = torch.randn(1, n, m), torch.randn(1, m, m)
    result = torch.empty_like(tall)
    contestants.append(harness.Contestant(PRODUCT, lambda: torch.bmm(tall, small, out=result)))
    timings = harness.interleave(contestants, rounds=rounds, device=CPU)
    points = {
        method.name: parameter.detach().mT if method.wide else parameter.detach()
        for method in methods
        for parameter in entries[method.name]
    }
    published = {method.name: method.published for method in methods}
    published |= {f"RGD-{name}, as published": formula for name, formula in COUNTS.items()}
    published |= {name: formula for name, (_, formula) in MAPS.items()}
    rows = []
    for name, point in (points | outcomes).items():
        formula = published[name]
        rows.append({
            "n": n, "m": m, "method": name,
            "flops": flops[name],
            "published_flops": formula(n, m) if formula else None,
            "time_over_product": timings.ratio(name, PRODUCT),
            "orthonormality_error": harness.orthonormality_error(point.double().reshape(n, m)),
            **timings.summary(name),
        })  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Flops in units of 2 n m^2, one product n x m by m x m."""
    lines = []
    for row in rows:
        product = 2 * row["n"] * row["m"] ** 2
        published = row["published_flops"]
        low, high = row["quartiles_ms"]
        lines.append([
            row["method"],
            f"{row['flops'] / product:.1f}",
            f"{published / product:.1f}" if published else "",
            f"{row['flops'] / published:.2f}" if published else "",
            f"{row['median_ms']:.2f} ({low:.2f} - {high:.2f})",
            f"{row['time_over_product']:.1f}",
            f"{row['orthonormality_error']:.0e}",
        ])  # fmt: skip
    header = (
        "step", "flops / 2nm^2", "published", "counted / published", "ms (quartiles)",
        "time / product", "error",
    )  # fmt: skip
    return harness.markdown_table(header, lines)


def size(text: str) -> tuple[int, int]:
    n, m = (int(part) for part in text.split(","))
    if n < m or m < 1:
        raise argparse.ArgumentTypeError(f"expected n,m with n >= m >= 1, got {text}")
    return n, m


def main(argv: Sequence[str] | None = None) -> None:
    """Count, time, print and write."""
    parser = harness.flags(__doc__, "flops", rounds=11, device=False)
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES, help="n,m ...")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    about = harness.machine()
    began = time.perf_counter()
    results: list[dict[str, Any]] = []
    tables = {}
    for n, m in arguments.sizes:
        rows = measure(n, m, arguments.rounds)
        results += rows
        tables[f"{n} x {m}"] = table(rows)
        print(f"\n{n} x {m}\n{tables[f'{n} x {m}']}", flush=True)
    settings = {"dtype": "float32", "threads": arguments.threads, "rounds": arguments.rounds}
    content = {"machine": about, "settings": settings, "tables": tables, "results": results}
    harness.write_json(arguments.output, content)
    print(f"\n{(time.perf_counter() - began) / 60:.1f} minutes in all.")


if __name__ == "__main__":
    main()
