"""The methods of the orthogonal vision transformer, with their published settings and results.

Settings: Kong, Wang & Tao (ICLR 2023), table 4; results: their table 1, mean and deviation of five
runs. The package's names for its rows: Projected Stiefel SGD and Adam are ``CayleySGD`` and
``CayleyAdam`` (with the momentum that the released implementations lose), Regularizer is the
penalty in the loss, Momentumless is ``StiefelSGD`` with momentum for the plain weights only.
``ProjectedRGD`` is not in their tables; it takes the settings of SGD.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import stiefel_opt as so

SGD = {"momentum": 0.9, "weight_decay": 5e-5}
ADAM = {"betas": (0.9, 0.999), "weight_decay": 5e-5}
PLACES = {"within": " within heads", "across": " across heads", "none": ""}


class Settings(NamedTuple):
    """How one optimizer is called; ``ratio`` is the constrained weights' rate over the others'."""

    title: str
    kind: type[torch.optim.Optimizer]
    lr: float
    options: Mapping[str, Any]
    ratio: float = 1.0
    constrained: Mapping[str, Any] = {}  # options of the constrained weights only
    penalty: bool = False

    @property
    def exact(self) -> bool:
        """Whether the optimizer is one of the package, which keeps constrained weights so."""
        return not self.kind.__module__.startswith("torch.")


# The rates of SGD belong to batches of 128.
OPTIMIZERS = {
    "stiefel-sgd": Settings("StiefelSGD", so.StiefelSGD, 0.15, SGD),
    "momentumless": Settings(
        "StiefelSGD without momentum", so.StiefelSGD, 0.1, SGD, constrained={"momentum": 0.0}
    ),
    "rgd": Settings("ProjectedRGD", so.ProjectedRGD, 0.1, SGD),
    "cayley-sgd": Settings("CayleySGD", so.CayleySGD, 0.1, SGD, ratio=10),
    "penalty-sgd": Settings("SGD with penalty", torch.optim.SGD, 0.1, SGD, penalty=True),
    "stiefel-adam": Settings("StiefelAdam", so.StiefelAdam, 1e-3, ADAM),
    "cayley-adam": Settings("CayleyAdam", so.CayleyAdam, 1e-2, ADAM, ratio=0.1),
    "penalty-adam": Settings("Adam with penalty", torch.optim.Adam, 1e-3, ADAM, penalty=True),
    "sgd": Settings("SGD", torch.optim.SGD, 0.1, SGD),
    "adam": Settings("Adam", torch.optim.Adam, 1e-3, ADAM),
    "adamw": Settings("AdamW", torch.optim.AdamW, 1e-3, ADAM | {"weight_decay": 0.2}),
}
# Test error in per cent on CIFAR-10 and CIFAR-100, as published.
PUBLISHED = {
    "stiefel-sgd:within": ("8.32 ± 0.39", "30.20 ± 0.55"),
    "cayley-sgd:within": ("8.90 ± 0.18", "31.71 ± 0.26"),
    "penalty-sgd:within": ("9.78 ± 0.14", "33.08 ± 0.42"),
    "momentumless:within": ("12.90 ± 0.22", "34.84 ± 0.24"),
    "stiefel-adam:within": ("8.46 ± 0.20", "31.04 ± 0.35"),
    "cayley-adam:within": ("10.77 ± 0.30", "33.73 ± 0.54"),
    "penalty-adam:within": ("11.53 ± 0.28", "34.72 ± 0.67"),
    "stiefel-sgd:across": ("8.85 ± 0.35", "31.51 ± 0.39"),
    "cayley-sgd:across": ("9.65 ± 0.23", "32.14 ± 0.48"),
    "penalty-sgd:across": ("9.58 ± 0.21", "32.77 ± 0.23"),
    "stiefel-adam:across": ("8.81 ± 0.22", "32.48 ± 0.24"),
    "cayley-adam:across": ("11.58 ± 0.24", "33.98 ± 0.12"),
    "penalty-adam:across": ("11.09 ± 0.26", "33.90 ± 0.24"),
    "sgd:none": ("9.75 ± 0.37", "32.61 ± 0.30"),
    "adam:none": ("9.52 ± 0.32", "33.15 ± 0.50"),
    "adamw:none": ("9.05 ± 0.43", "33.11 ± 0.47"),
}


class Method(NamedTuple):
    """One row of the final table."""

    optimizer: str
    constraint: str
    lr: float
    constrained_lr: float
    title: str


def parse_method(text: str, rate: float | None = None, batch_size: int = 128) -> Method:
    """Parse ``OPTIMIZER[:CONSTRAINT[:RATE[:CONSTRAINED_RATE]]]``.

    The default rates of SGD grow with the batch. A rate alone keeps the published ratio between
    the rates of constrained and other weights.
    """
    optimizer, constraint, own_rate, constrained_rate = (*text.split(":"), "", "", "")[:4]
    if optimizer not in OPTIMIZERS or constraint not in ("", *PLACES) or text.count(":") > 3:
        raise ValueError(
            "a method must be OPTIMIZER:CONSTRAINT[:RATE[:CONSTRAINED_RATE]], got "
            f"{text!r}; optimizers: {', '.join(OPTIMIZERS)}; constraints: {', '.join(PLACES)}"
        )
    settings = OPTIMIZERS[optimizer]
    needs = settings.exact or settings.penalty
    constraint = constraint or ("within" if needs else "none")
    if constraint != "none" and not needs:
        raise ValueError(
            f"{optimizer} must have the constraint none, got {constraint!r}: it would leave the "
            "manifold; use stiefel-sgd or stiefel-adam, or penalty-sgd or penalty-adam"
        )
    if constraint == "none" and settings.penalty:
        raise ValueError(
            f"{optimizer} must have a constraint to penalise, got 'none'; use within or across"
        )
    default = settings.lr * (batch_size / 128 if "momentum" in settings.options else 1)
    lr = float(own_rate) if own_rate else rate or default
    constrained_lr = float(constrained_rate) if constrained_rate else lr * settings.ratio
    title = settings.title + PLACES[constraint]
    if constrained_lr != lr * settings.ratio:
        title += f" at rates {lr:g} and {constrained_lr:g}"
    elif lr != default:
        title += f" at rate {lr:g}"
    return Method(optimizer, constraint, lr, constrained_lr, title)


def build_optimizer(method: Method, model: nn.Module) -> torch.optim.Optimizer:
    """One optimizer for the whole model; those of the package find the constrained weights."""
    settings = OPTIMIZERS[method.optimizer]
    if not settings.exact:
        return settings.kind(model.parameters(), lr=method.lr, **settings.options)
    if method.constraint == "none":
        return settings.kind(model.parameters(), lr=method.lr, stiefel=False, **settings.options)
    constrained = {"lr": method.constrained_lr, **settings.constrained}
    groups = so.param_groups(model, stiefel=constrained, lr=method.lr)
    return settings.kind(groups, **settings.options)
