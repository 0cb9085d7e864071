"""The methods of `eigen_methods.py`, and the grids on which all of them are tuned alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import geoopt
import torch

import stiefel_opt as so
from benchmarks.common.harness import PRINTED
from benchmarks.papers.kong.eigen_loops import PublishedLoop, WenYinLoop
from benchmarks.papers.kong.eigen_problem import (
    Limit,
    Options,
    Problem,
    Run,
    eigensolver_run,
    optimize,
    pymanopt_run,
)
from benchmarks.speed.contestants import pogo_sgd

# One grid for everybody: rates times momenta, plain and Nesterov's; betas for the Adams.
SGD_RATES = (0.2, 0.4, 0.1, 0.3, 0.5, 0.6, 0.65, 0.25, 0.15, 0.05)  # the likely ones first
ADAM_RATES = (0.01, 0.02, 0.005, 0.05, 0.1, 0.002, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
MOMENTA = (0.9, 0.85, 0.8, 0.95)
HEAVY = tuple({"momentum": mu, "nesterov": ahead} for mu, ahead in product(MOMENTA, (False, True)))
BETAS = tuple({"betas": (mu, decay)} for mu, decay in product(MOMENTA, (0.999, 0.99)))
TOLERANCES = (1e-3, 1e-4, 1e-5, 1e-6)
NOTHING: tuple[dict[str, Any], ...] = ({},)


@dataclass(frozen=True)
class Method:
    """A way to run a problem, and what is tuned; ``kind`` says whom it is compared with.

    Attributes:
        families: Options beside the rate.
        rates: Learning rates; empty: there is none.
        elementwise: Whether it depends on the basis. If not, it is tuned in that of the
            eigenvectors, where the iterations are the same and cost less.
    """

    name: str
    run: Callable[[Problem, Options, Limit], Run]
    families: tuple[dict[str, Any], ...] = HEAVY
    rates: tuple[float, ...] = SGD_RATES
    kind: str = "torch"  # or "pymanopt", "eigensolver"
    elementwise: bool = False

    @property
    def settings(self) -> list[dict[str, Any]]:
        if not self.rates:
            return list(self.families)
        return [{"lr": lr, **family} for family in self.families for lr in self.rates]


def ours(rule: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Run]:
    return partial(optimize, tag=so.ManifoldParameter, build=partial(rule, **options))


def loop(rule: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Run]:
    return partial(optimize, tag=torch.nn.Parameter, build=partial(rule, **options))


def geoopt_method(rule: Callable[..., torch.optim.Optimizer]) -> Callable[..., Run]:
    tag = partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel(canonical=False))
    return partial(optimize, tag=tag, build=rule)


PUBLISHED_FAMILY, PUBLISHED_RATE = ({"momentum": 0.9},), (0.1,)
STIEFEL_SGD = Method("StiefelSGD", ours(so.StiefelSGD))
MOMENTUMLESS = Method("RGD-C-C (ours)", ours(so.ProjectedRGD), NOTHING)
CAYLEY = Method("CayleySGD", ours(so.CayleySGD))
GEOOPT = Method("geoopt SGD", geoopt_method(geoopt.optim.RiemannianSGD))
POGO = Method("POGO", partial(optimize, tag=torch.nn.Parameter, build=pogo_sgd, wide=True))

METHODS = (
    STIEFEL_SGD,
    Method("StiefelSGD, published flows", ours(so.PublishedSGD)),
    Method("StiefelAdam", ours(PRINTED), BETAS, ADAM_RATES, elementwise=True),
    MOMENTUMLESS,
    Method("ProjectedRGD, cayley", ours(so.ProjectedRGD)),
    Method("ProjectedRGD, qr", ours(so.ProjectedRGD, retraction="qr")),
    CAYLEY,
    Method("CayleyAdam", ours(so.CayleyAdam), BETAS, ADAM_RATES),
    GEOOPT,
    Method("geoopt Adam", geoopt_method(geoopt.optim.RiemannianAdam), BETAS, ADAM_RATES),
    POGO,
    Method(
        "pymanopt conjugate gradient", partial(pymanopt_run, second_order=False),
        NOTHING, (), "pymanopt",
    ),
    Method(
        "pymanopt trust regions", partial(pymanopt_run, second_order=True), NOTHING, (), "pymanopt"
    ),
    Method(
        "scipy lobpcg", partial(eigensolver_run, iterative=True),
        tuple({"tolerance": t} for t in TOLERANCES), (), "eigensolver",
    ),
    Method(
        "scipy eigsh", partial(eigensolver_run, iterative=False),
        tuple({"tolerance": t} for t in TOLERANCES), (), "eigensolver",
    ),
)  # fmt: skip

# Table 5: the published learning rates and momenta. "As released": the code of Li et al. (2020)
# writes the momentum to a temporary, where it stays zero.
TABLE_5 = (
    Method(STIEFEL_SGD.name, ours(so.StiefelSGD), PUBLISHED_FAMILY, PUBLISHED_RATE),
    Method("algorithm 1", ours(so.PublishedSGD), PUBLISHED_FAMILY, PUBLISHED_RATE),
    Method(
        "algorithm 1, as printed", loop(PublishedLoop, printed=True, iterations=8),
        PUBLISHED_FAMILY, PUBLISHED_RATE,
    ),
    Method("projected Stiefel SGD", ours(so.CayleySGD), PUBLISHED_FAMILY, (0.2,)),
    Method("the same, as released", ours(so.CayleySGD), ({"momentum": 0.0},), (0.2,)),
    Method("Wen & Yin", loop(WenYinLoop), NOTHING, PUBLISHED_RATE),
    Method("StiefelAdam", ours(PRINTED), NOTHING, (1e-3,), elementwise=True),
    Method("algorithm 2", ours(so.PublishedAdam), NOTHING, (1e-3,), elementwise=True),
)  # fmt: skip

GROUPS = {
    "methods": METHODS,
    "published": TABLE_5,
}
