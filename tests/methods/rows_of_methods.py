"""Rows of `stiefel_opt.methods` for the tables that the generic tests of optimizers walk."""

from __future__ import annotations

from typing import Any

import torch
from grids import METRICS, TRANSPORTS, mixed, pairwise
from optimizers import FLOWS, SGD, Rule
from reference_descent import CayleyAdamReference, CayleySGDReference, DescentReference
from reference_momentum import (
    AdaptiveAdamReference,
    AdaptiveSGDReference,
    PublishedAdamReference,
    PublishedSGDReference,
)

import stiefel_opt as so
from stiefel_opt import methods
from stiefel_opt.numerics import RETRACTIONS

ROTATIONS = ("euler", "cayley", "expm")  # of the published flows
PROJECTED = {"transport": "projected"}

# ---- rows of `optimizers.TABLE`, and of those beside it ----

TABLE = {
    "sgd-adaptive": Rule(
        so.AdaptiveSGD,
        {"transport": "projected"},
        plain_options=SGD,
        reference=AdaptiveSGDReference,
        follows_slope=True,
        own=FLOWS,
        variant=True,
        sums=3,
        lr_is_angle=True,
    ),
    "adam-adaptive": Rule(
        so.AdaptiveAdam,
        {},
        plain=torch.optim.Adam,
        reference=AdaptiveAdamReference,
        follows_slope=True,
        own=FLOWS,
        variant=True,
        sums=4,
    ),
    "rgd": Rule(
        so.ProjectedRGD,
        {"momentum": 0.9, "weight_decay": 0.1},
        plain_options=SGD,
        reference=DescentReference,
        own={"metric": -1.0, "retraction": "qr"},
        sums=3,
        momentum=0.0,
    ),
    "cayley-sgd": Rule(
        so.CayleySGD,
        {"nesterov": True},
        plain_options={**SGD, "nesterov": True},
        reference=CayleySGDReference,
        own={"steps": 7, "exact": True},
        sums=3,
        remembers=True,
    ),
    "cayley-adam": Rule(
        so.CayleyAdam,
        {"amsgrad": True},
        plain=torch.optim.Adam,
        plain_options={"amsgrad": True},
        reference=CayleyAdamReference,
        own={"steps": 7, "exact": True},
        sums=4,
    ),
    "muon": Rule(  # its direction: methods/test_functional_muon.py
        so.StiefelMuon,
        {"weight_decay": 0.1},
        plain=torch.optim.AdamW,
        plain_options={"betas": (0.9, 0.95), "weight_decay": 0.0},
        own={"plain": "muon"},
        momentum=0.95,
        state="momentum_ambient",
        searches=True,
        sums=2,  # the second for rounding in float64
    ),
}
# They blow up where |g| lr passes about 0.02, and so stand beside the table of the generic tests.
BESIDE = {
    "published-sgd": Rule(
        so.PublishedSGD,
        {},
        plain_options=SGD,
        reference=PublishedSGDReference,
        mild_lr=0.03,
    ),
    "published-adam": Rule(
        so.PublishedAdam,
        {},
        plain=torch.optim.Adam,
        reference=PublishedAdamReference,
        mild_lr=0.01,
    ),
}

# ---- cases of `cases.py`: name, row of the table, options ----

Case = tuple[str, str, dict[str, Any]]

OPTION_GRID: list[Case] = [
    (
        f"{algorithm}-{metric}-published-{rotation}",
        f"published-{algorithm}",
        {"metric": metric, "rotation": rotation},
    )
    for algorithm, metric, rotation in pairwise(("sgd", "adam"), METRICS, ROTATIONS)
]

READING_CASES: list[Case] = [
    ("sgd-published", "published-sgd", {"metric": 0.3}),
    ("sgd-adaptive", "sgd-adaptive", {"metric": 0.3}),
    ("adam-adaptive", "adam-adaptive", {"metric": 0.3}),
    ("rgd-qr", "rgd", {"momentum": 0.9, "metric": "euclidean", "retraction": "qr"}),
]

VARIANTS: list[Case] = [
    ("sgd-momentumless-published", "published-sgd", {"momentum": 0.0}),
    ("sgd-nesterov-published", "published-sgd", {"nesterov": True, "metric": 0.3}),
    (
        "sgd-nesterov-published-cayley",
        "published-sgd",
        {"nesterov": True, "rotation": "cayley"},
    ),
    ("sgd-dampened-published", "published-sgd", {"dampening": 0.4, "metric": -1.0}),
    (
        "adam-amsgrad-published",
        "published-adam",
        {"amsgrad": True, "betas": (0.9, 0.8), "metric": 0.3},
    ),
    *(
        (
            f"sgd-adaptive-{metric}-{transport}{'-nesterov' * nesterov}",
            "sgd-adaptive",
            {"metric": metric, "transport": transport, "nesterov": nesterov},
        )
        for metric, transport, nesterov in pairwise(METRICS, TRANSPORTS, (False, True))
    ),
    *(
        (
            f"adam-adaptive-{metric}-{transport}-{radius}{'-nesterov' * nesterov}",
            "adam-adaptive",
            {
                "metric": metric,
                "transport": transport,
                "nesterov": nesterov,
                "radius": radius,
            },
        )
        for metric, transport, nesterov, radius in pairwise(
            METRICS, TRANSPORTS, (False, True), (1.0, "virtual")
        )
    ),
    ("adam-adaptive-amsgrad", "adam-adaptive", {"amsgrad": True}),
    ("sgd-adaptive-maximize", "sgd-adaptive", {"maximize": True}),
    ("adam-adaptive-maximize", "adam-adaptive", {"maximize": True}),
    ("adam-no-first-moment-published", "published-adam", {"betas": (0.0, 0.99), "metric": 0.3}),
    ("wen-yin", "rgd", {"momentum": 0.0}),
    ("rgd-dampened", "rgd", {"momentum": 0.9, "dampening": 0.4}),
    ("rgd-maximize", "rgd", {"momentum": 0.9, "maximize": True, "weight_decay": 0.3}),
    ("rgd-tensor-lr", "rgd", {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    *(
        (
            f"rgd-{retraction}-{metric}-{momentum}",
            "rgd",
            {**momentum, "retraction": retraction, "metric": metric},
        )
        for retraction, metric, momentum in mixed(
            12,
            RETRACTIONS,
            METRICS,
            [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}],
        )
    ),
    *(
        (f"{algorithm}-{steps}-iterations", algorithm, {"steps": steps})
        for algorithm in ("cayley-sgd", "cayley-adam")
        for steps in (0, 1, 5)
    ),
    ("cayley-sgd-nesterov-0.8", "cayley-sgd", {"momentum": 0.8, "nesterov": True}),
    ("cayley-sgd-momentumless", "cayley-sgd", {"momentum": 0.0}),
    ("cayley-adam-exact", "cayley-adam", {"exact": True}),
    ("cayley-adam-no-first-moment", "cayley-adam", {"betas": (0.0, 0.5), "eps": 0.1}),
    ("cayley-sgd-dampened", "cayley-sgd", {"dampening": 0.4, "exact": True}),
    ("cayley-sgd-maximize", "cayley-sgd", {"maximize": True, "nesterov": True}),
    ("cayley-adam-amsgrad", "cayley-adam", {"amsgrad": True, "betas": (0.9, 0.8)}),
    ("cayley-adam-maximize", "cayley-adam", {"maximize": True, "steps": 5}),
]

PLAIN: list[tuple[Any, Any, dict[str, Any]]] = [
    (so.ProjectedRGD, torch.optim.SGD, {"weight_decay": 0.1}),
    (so.ProjectedRGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4}),
    (so.CayleySGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (so.CayleyAdam, torch.optim.Adam, {"weight_decay": 0.1}),
    (so.CayleyAdam, torch.optim.Adam, {"fused": True, "amsgrad": True}),
]

# Of complex matrices, beside the cases above.
COMPLEX: list[Case] = [
    ("adam-published-expm", "published-adam", {"metric": "euclidean", "rotation": "expm"}),
    ("sgd-published-cayley", "published-sgd", {"metric": 0.3, "rotation": "cayley"}),
    ("adam-published-euler", "published-adam", {"metric": 0.3, "rotation": "euler"}),
    ("rgd-polar", "rgd", {"retraction": "polar"}),
]

# ---- tables of single tests ----

# Of `test_state.py`: state of m x m, of one number a matrix, of n x m.
STATE = {
    "sgd-adaptive": (
        {"momentum_skew"},
        {"slope", "step_factor", "step_momentum", "step_unit"},
        {"momentum_normal"},
    ),
    "adam-adaptive": (
        {"momentum_skew", "exp_avg_sq_skew"},
        {"slope", "step_factor", "step_momentum"},
        {"momentum_normal", "exp_avg_sq_normal"},
    ),
    "rgd": ({"momentum_skew"}, set(), {"momentum_normal"}),
    "cayley-sgd": ({"momentum_skew"}, set(), {"momentum_normal"}),
    "cayley-adam": (
        {"momentum_skew"},
        {"exp_avg_sq_norm", "max_exp_avg_sq_norm"},
        {"momentum_normal"},
    ),
}
# Of `test_steep_gradients.py`.
STEEP = {
    "adaptive": (so.AdaptiveSGD, {}),
    "adaptive steady": (so.AdaptiveSGD, {"momentum": 0.99}),
    "Adam, short memory": (so.CayleyAdam, {"betas": (0.9, 0.5)}),
}
# Of `test_errors.py`: options that are refused, and by which rules.
REFUSED: list[tuple[list[tuple[dict[str, Any], type[Exception], str]], list[Any]]] = [
    (
        [
            (
                {"rotation": "qr"},
                ValueError,
                r"must be one of \['cayley', 'euler', 'expm'\], got 'qr'",
            )
        ],
        [so.PublishedSGD, so.PublishedAdam],
    ),
    (
        [
            ({"retraction": "exp"}, ValueError, r"must be one of \['cayley', 'polar', 'qr'\]"),
            ({"retraction": 1}, ValueError, "`retraction` must be one of .*, got 1"),
        ],
        [so.ProjectedRGD],
    ),
    (
        [
            ({"steps": -1}, ValueError, "`steps` must be at least 0, got -1"),
            ({"steps": 2.0}, TypeError, "`steps` must be an integer of at least 0, got 2.0"),
            ({"steps": True}, TypeError, "`steps` must be an integer of at least 0, got True"),
            ({"exact": 1}, TypeError, "`exact` must be True or False, got 1"),
        ],
        [so.CayleySGD, so.CayleyAdam],
    ),
    (
        [
            ({"plain": "Adam"}, ValueError, r"`plain` must be one of \['adamw', 'muon'\]"),
            ({"momentum": 2.0}, ValueError, r"`momentum` must be in \[0, 1\), got 2.0"),
        ],
        [so.StiefelMuon],
    ),
    ([({"betas": (0.0, 0.9)}, ValueError, r"betas\[0\]")], [so.AdaptiveAdam]),
    (
        [
            ({"momentum": 0.0}, ValueError, "`momentum`"),
            ({"momentum": 1.0}, ValueError, "`momentum`"),
            ({"dampening": 0.1}, ValueError, "`dampening`"),
        ],
        [so.AdaptiveSGD],
    ),
]
SYNONYMS = [
    (so.CayleyAdam, "momentum", "betas"),
    (so.ProjectedRGD, "betas", "momentum"),
    (so.StiefelMuon, "learning_rate", "lr"),
    (so.CayleySGD, "heads", "stiefel"),
    (so.StiefelLBFGS, "historysize", "history_size"),
]
# Of `test_optim_tags.py`: rules with an option whose None means something.
WITH_NONE = [so.AdaptiveAdam]
# Of `test_loading.py`: options before and after, and sizes of the gradients under them,
# which are equal where the momentum goes on.
EVEN = (0.05, 0.05)


class Switching(so.StiefelAdam):
    """A rule of one's own that is adaptive at radius 1, where its momentum has no unit."""

    def state_for(self, group: Any) -> Any:
        return self.kind(group).state_for(self, group)

    def rule_for(self, group: Any) -> Any:
        return self.kind(group).rule_for(self, group)

    @staticmethod
    def kind(group: Any) -> Any:
        return so.AdaptiveAdam if group.get("radius") == 1.0 else so.StiefelAdam


SWITCHES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], tuple[float, float]]] = {
    "adaptive": (Switching, {"radius": "virtual"}, {"radius": 1.0}, (1e3, 0.05)),
    "adaptive, projected": (
        Switching,
        {"transport": "projected", "radius": "angle"},
        {"transport": "projected", "radius": 1.0},
        (1e3, 0.05),
    ),
    "rotation": (so.PublishedSGD, {"rotation": "euler"}, {"rotation": "cayley"}, EVEN),
    "amsgrad": (so.CayleyAdam, {"amsgrad": True}, {"amsgrad": False}, EVEN),
    "momentum": (so.ProjectedRGD, {"momentum": 0.9}, {"momentum": 0.0}, EVEN),
    "maximize": (so.CayleySGD, {"maximize": False}, {"maximize": True}, EVEN),
    "plain": (so.StiefelMuon, {"momentum": 0.9}, {"momentum": 0.5, "plain": "muon"}, EVEN),
}

# Of `scale_cases.py`: rules that learn a scale, and some of those that all of its tests try.
LEARNED_SCALE = {
    "published sgd": (so.PublishedSGD, {"lr": 0.02}),
    "published adam": (so.PublishedAdam, {"lr": 0.02}),
    "rgd": (so.ProjectedRGD, {"lr": 0.2, "retraction": "qr"}),
    "wen-yin": (so.ProjectedRGD, {"lr": 0.2}),
    "cayley sgd": (so.CayleySGD, {"lr": 0.05}),
    "cayley adam": (so.CayleyAdam, {"lr": 0.1}),
}
LEARNED_SCALE_TOO = {"muon": (so.StiefelMuon, {"lr": 0.05})}

# Of tests that pass a closure to a step.
BY_CLOSURE = {"lbfgs": lambda params: so.StiefelLBFGS(params, lr=0.1, max_iter=4)}

# ---- cases of `rule_cases.py`: function, options, names of its state ----

MOMENTUM, AMBIENT, FIRST = (
    ("momentum_skew", "momentum_normal"),
    ("momentum_ambient",),
    {"step": 3.0},
)
ADAM = (*MOMENTUM, "exp_avg_sq_skew", "exp_avg_sq_normal")
AMSGRAD = (*ADAM, "max_exp_avg_sq_skew", "max_exp_avg_sq_normal")
# How often processes that share the rows of tall matrices talk in a step, of functions of no row.
SUMS = {"published_sgd": 12, "published_adam": 14}
DESCENTS = [
    (methods.rgd, {"retraction": retraction, "metric": metric, **more}, keeps)
    for retraction, metric, (keeps, more) in mixed(
        9,
        RETRACTIONS,
        METRICS,
        [
            ((), {}),
            (MOMENTUM, {"momentum": 0.9}),
            (MOMENTUM, {"momentum": 0.8, "nesterov": True}),
        ],
    )
]
CAYLEY = [
    *((methods.cayley_sgd, {"steps": steps}, MOMENTUM) for steps in (0, 2, 5)),
    (methods.cayley_sgd, {"exact": True}, MOMENTUM),
    (methods.cayley_sgd, {"nesterov": True, "momentum": 0.5}, MOMENTUM),
    *(
        (methods.cayley_adam, {**FIRST, **more}, (*MOMENTUM, "exp_avg_sq_norm", *extra))
        for more, extra in [
            ({}, ()),
            ({"exact": True}, ()),
            ({"steps": 5, "eps": 0.0}, ("max_exp_avg_sq_norm",)),
        ]
    ),
]
MUON = [
    (methods.muon,),
    (methods.muon, {"nesterov": False, "momentum": 0.5}, AMBIENT),
    (methods.muon, {"tolerance": 1e-3, "smoothing": 1e-2}, AMBIENT),
]
PUBLISHED = [
    *(
        (methods.published_sgd, {"rotation": rotation, "metric": metric, **more}, keeps)
        for rotation, metric, (keeps, more) in mixed(
            6,
            ROTATIONS,
            METRICS,
            [(MOMENTUM, {}), (MOMENTUM, {"nesterov": True}), (MOMENTUM, {"momentum": 0.0})],
        )
    ),
    *(
        (methods.published_adam, {**FIRST, "rotation": rotation, "metric": metric}, keeps)
        for rotation, metric, keeps in mixed(5, ROTATIONS, METRICS, [ADAM, AMSGRAD])
    ),
]

RULES: list[Any] = [*DESCENTS, *CAYLEY, *MUON, *PUBLISHED]
VARIANTS_WITH_RULES = ("sgd-adaptive", "adam-adaptive")  # of their own, with their state
