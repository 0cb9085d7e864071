"""The methods of the orthogonal vision transformer, with their published settings and results.

Settings: Kong, Wang & Tao (ICLR 2023), table 4; results: their table 1, mean and deviation of five
runs. Algorithms 1 and 2 are the published rules, with their misprints in rows "as printed" only;
``stiefel-sgd`` and ``stiefel-adam`` are ours.
``released-cayley-sgd`` loses its momentum, as the released code does; ``released-cayley-adam`` has
the learning rates of that code, which table 4 prints exchanged; Momentumless is the method of Wen &
Yin, with momentum for the plain weights only; Regularizer is X <- X - w X (X'X - I) before the
step, as in their code. Not in the paper: ``stiefel-adamw``, the default step of this package in
place of AdamW's; the penalty as a term of the loss; ``rgd``.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import stiefel_opt as so
from benchmarks.common.harness import PRINTED, PrintedAdam, PrintedSGD

SGD = {"momentum": 0.9, "weight_decay": 5e-5}
ADAM = {"betas": (0.9, 0.999), "weight_decay": 5e-5}
PLACES = {"within": " within heads", "across": " across heads", "none": ""}


class Settings(NamedTuple):
    """How one optimizer is called; ``ratio``: learning rate of constrained weights over others."""

    title: str
    kind: Callable[..., torch.optim.Optimizer]
    lr: float
    options: Mapping[str, Any]
    ratio: float = 1.0
    constrained: Mapping[str, Any] = {}  # options of the constrained weights only
    soft: str = ""  # "loss": the penalty is a term of the loss; "step": a step before the step

    @property
    def exact(self) -> bool:
        """Whether the optimizer is one of the package that keeps constrained weights so."""
        return not self.soft and self.kind not in vars(torch.optim).values()


# The rates of SGD belong to batches of 128.
OPTIMIZERS = {
    "stiefel-sgd": Settings("StiefelSGD", so.StiefelSGD, 0.15, SGD),
    "algorithm-1": Settings("Algorithm 1", so.PublishedSGD, 0.15, SGD),
    "printed-algorithm-1": Settings("Algorithm 1, as printed", PrintedSGD, 0.15, SGD),
    "momentumless": Settings(
        "Wen & Yin without momentum",
        partial(so.ProjectedRGD, metric="canonical", retraction="cayley"),
        0.1,
        SGD,
        constrained={"momentum": 0.0},
    ),
    "rgd": Settings("ProjectedRGD", so.ProjectedRGD, 0.1, SGD),
    "cayley-sgd": Settings("CayleySGD", so.CayleySGD, 0.1, SGD, ratio=10),
    "released-cayley-sgd": Settings(
        "CayleySGD as released", so.CayleySGD, 0.1, SGD, ratio=10, constrained={"momentum": 0.0}
    ),
    "regularizer-sgd": Settings("SGD, regularized", so.StiefelSGD, 0.1, SGD, soft="step"),
    "penalty-sgd": Settings("SGD with penalty", so.StiefelSGD, 0.1, SGD, soft="loss"),
    "stiefel-adam": Settings("StiefelAdam", PRINTED, 1e-3, ADAM),
    "algorithm-2": Settings("Algorithm 2", so.PublishedAdam, 1e-3, ADAM),
    "printed-algorithm-2": Settings("Algorithm 2, as printed", PrintedAdam, 1e-3, ADAM),
    "stiefel-adamw": Settings("StiefelAdamW", so.StiefelAdamW, 1e-3, ADAM | {"weight_decay": 0.2}),
    "adaptive-stiefel-adamw": Settings(
        "StiefelAdamW, adaptive",
        partial(so.AdaptiveAdam, decoupled_weight_decay=True),
        1e-3,
        ADAM | {"weight_decay": 0.2},
    ),
    "cayley-adam": Settings("CayleyAdam", so.CayleyAdam, 1e-2, ADAM, ratio=0.1),
    "released-cayley-adam": Settings("CayleyAdam as released", so.CayleyAdam, 1e-3, ADAM, ratio=10),
    "regularizer-adam": Settings("Adam, regularized", PRINTED, 1e-3, ADAM, soft="step"),
    "penalty-adam": Settings("Adam with penalty", PRINTED, 1e-3, ADAM, soft="loss"),
    "sgd": Settings("SGD", torch.optim.SGD, 0.1, SGD),
    "adam": Settings("Adam", torch.optim.Adam, 1e-3, ADAM),
    "adamw": Settings("AdamW", torch.optim.AdamW, 1e-3, ADAM | {"weight_decay": 0.2}),
}
# Whose results in the paper are those of which of our rules.
ROWS = {"algorithm-1": "stiefel-sgd", "algorithm-2": "stiefel-adam"}
ROWS |= {f"released-{name}": name for name in ("cayley-sgd", "cayley-adam")}
# Test error in per cent on CIFAR-10 and CIFAR-100, as published.
PUBLISHED: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("published.json").read_text(encoding="utf-8")
)


class Method(NamedTuple):
    """One row of the final table."""

    optimizer: str
    constraint: str
    lr: float
    constrained_lr: float
    title: str


def rows_of(preset: str) -> list[str]:
    """The rows of the paper: in its own experiment by what it ran, else by ours."""
    if preset != "paper":
        return list(PUBLISHED)
    own = {ours: name for name, ours in ROWS.items()}
    parts = (row.split(":") for row in PUBLISHED)
    return [f"{own.get(name, name)}:{place}" for name, place in parts]


def parse_method(text: str, rate: float | None = None, batch_size: int = 128) -> Method:
    """Parse ``OPTIMIZER[:CONSTRAINT[:RATE]]``.

    The default rates of SGD grow with the batch. The ratio between the rates of constrained and
    other weights is the published one.
    """
    optimizer, constraint, own_rate = (*text.split(":"), "", "")[:3]
    if optimizer not in OPTIMIZERS or constraint not in ("", *PLACES) or text.count(":") > 2:
        raise ValueError(
            "a method must be OPTIMIZER:CONSTRAINT[:RATE], got "
            f"{text!r}; optimizers: {', '.join(OPTIMIZERS)}; constraints: {', '.join(PLACES)}"
        )
    settings = OPTIMIZERS[optimizer]
    needs = settings.exact or settings.soft
    constraint = constraint or ("within" if needs else "none")
    if constraint != "none" and not needs:
        raise ValueError(
            f"{optimizer} must have the constraint none, got {constraint!r}: it would leave the "
            "manifold; use stiefel-sgd or stiefel-adam, or regularizer-sgd or regularizer-adam"
        )
    if constraint == "none" and settings.soft:
        raise ValueError(
            f"{optimizer} must have a constraint to penalise, got 'none'; use within or across"
        )
    default = settings.lr * (batch_size / 128 if "momentum" in settings.options else 1)
    lr = float(own_rate) if own_rate else rate or default
    title = settings.title + PLACES[constraint]
    if lr != default:
        title += f" at learning rate {lr:g}"
    return Method(optimizer, constraint, lr, lr * settings.ratio, title)


def build_optimizer(
    method: Method, model: nn.Module, weight: float = 1e-6
) -> torch.optim.Optimizer:
    """One optimizer for the whole model; those of the package find the constrained weights.

    ``weight``: of the regularizer, if it is a step of its own.
    """
    settings = OPTIMIZERS[method.optimizer]
    if settings.exact and method.constraint != "none":
        constrained = {"lr": method.constrained_lr, **settings.constrained}
        groups = so.param_groups(model, stiefel=constrained, lr=method.lr)
        return settings.kind(groups, **settings.options)
    own = settings.exact or settings.soft
    free = {"stiefel": False} if own else {}  # then as torch's: every weight is plain
    optimizer = settings.kind(model.parameters(), lr=method.lr, **settings.options, **free)
    if settings.soft == "step":
        optimizer.register_step_pre_hook(lambda *_: regularize(model, weight))
    return optimizer


def regularize(model: nn.Module, weight: float) -> None:
    """X <- X - w X (X'X - I) for every constrained X: a step down a quarter of the penalty."""
    parameters = list(model.parameters())
    with torch.enable_grad():
        penalty = so.orthonormality_penalty(model, weight / 4)
        steps = torch.autograd.grad(penalty, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, step in zip(parameters, steps, strict=True):
            if step is not None:
                parameter.sub_(step)
