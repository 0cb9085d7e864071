"""Ways to train a weight matrix, many copies at once: each has a learning rate of its own.

A weight is ``(copies, K, out, in)``, as in :mod:`benchmarks.accuracy.small_networks`. Arms of one
kind are one batch. Constrained matrices take the package's own step, :mod:`stiefel_opt.functional`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

import stiefel_opt as so
from stiefel_opt.functional import Sums, adam, with_radius
from stiefel_opt.functional.flows import corrected

BETAS, EPS = (0.9, 0.999), 1e-8
LARGEST = 1e4  # a scale is pulled to a value, and stays within this factor of it
OFTEN = 8  # steps from one removal of rounding to the next


@dataclass(frozen=True)
class Arm:
    r"""One way to train.

    A scaled weight is W = g V, with V of Frobenius norm sqrt(min(out, in)) at first. The scale g
    follows Adam's rule with the learning rate c = min(rate lr sqrt(max(out, in)), cap), and
    is pulled: g <- g + pull c (target - g) in each step.

    Attributes:
        kind: "Adam", "Muon", "weight norm", or, scaled: "free", "sphere", "constrained".
        decay: Decoupled weight decay, also of all plain weights of Adam.
        nesterov: Of Adam: NAdam with constant betas. Scaled weights have it always.
        orthonormal: Adam begins at the nearest orthonormal matrix.
        target: The scale that g is pulled to; None: that of the initial values of torch.
        rate: Of g; 0: it is fixed.
        first: The first g over its target.
        floor: The least g over its target.
        rows: A number for each row.
        grown: W = r g V with the virtual radius r.
        bare: V moves along the gradient of W, as in the package; else along that of V, g times it.
    """

    kind: str
    decay: float = 0.01
    nesterov: bool = False
    orthonormal: bool = False
    target: float | None = 1.0
    rate: float = 1.0
    pull: float = 0.0
    cap: float = math.inf
    first: float = 1.0
    floor: float = 0.0
    rows: bool = False
    grown: bool = False
    bare: bool = False


scaled = partial(Arm, pull=0.3, cap=0.01)
constrained = partial(scaled, "constrained")
DECIDING: dict[str, Arm] = {
    "AdamW": Arm("Adam"),
    "NAdam": Arm("Adam", nesterov=True),
    "Muon": Arm("Muon"),
    "fixed 1": constrained(rate=0.0),
    "learned, pull .3": constrained(),
    "learned, pull 1": constrained(pull=1.0),
    "free, pull .3": scaled("free"),
    "sphere, pull .3": scaled("sphere"),
}
INITIAL: dict[str, Arm] = {
    "NAdam, orthogonal initialisation": Arm("Adam", nesterov=True, orthonormal=True),
}
DECAYS: dict[str, Arm] = {
    "AdamW, decay .1": Arm("Adam", decay=0.1),
    "AdamW, decay 1": Arm("Adam", decay=1.0),
    "weight norm": Arm("weight norm"),
}
FORMS_OF_SCALE: dict[str, Arm] = {
    "sphere, fixed 1": scaled("sphere", rate=0.0),
    "fixed, initial": constrained(rate=0.0, target=None),
    "learned, no pull": constrained(pull=0.0),
    "learned, pull .1": constrained(pull=0.1),
    "learned, no pull, no cap": constrained(pull=0.0, cap=math.inf),
    "learned, pull .3, no cap": constrained(cap=math.inf),
    "learned, pull 1, no cap": constrained(pull=1.0, cap=math.inf),
    "learned from initial, pull .3": constrained(target=None),
    "learned from initial, floor": constrained(pull=0.0, cap=math.inf, target=None, floor=1.0),
}
# Tried where the constraint loses; residual branches may start small.
WAYS: dict[str, Arm] = {
    "learned by rows, pull .3": constrained(rows=True),
    "learned times radius, pull .3": constrained(grown=True),
}
BRANCHES: dict[str, Arm] = {
    "learned from .1, pull .3": constrained(first=0.1),
    "learned from .1, no pull": constrained(first=0.1, pull=0.0),
}
# What the package does, beside "learned, pull .3".
SHIPPED: dict[str, Arm] = {"learn_scale=True": constrained(bare=True)}
ARMS = DECIDING | SHIPPED | INITIAL | DECAYS | FORMS_OF_SCALE | WAYS | BRANCHES


def each(arms: Sequence[Arm], copies: int, name: str, like: Tensor) -> Tensor:
    """An option of each copy, ``(copies, 1, ...)``."""
    values = torch.tensor([float(getattr(arm, name)) for arm in arms])
    return values.repeat_interleave(copies // len(arms)).view(-1, *[1] * (like.dim() - 1))


class Direction:
    """Adam's direction; "Nesterov": torch's NAdam with constant betas; "ours": StiefelAdam's."""

    def __init__(self, like: Tensor, kind: str = "") -> None:
        self.kind, self.step = kind, 0
        self.mean, self.square = torch.zeros_like(like), torch.zeros_like(like)

    def __call__(self, grad: Tensor) -> Tensor:
        self.step += 1
        self.mean.lerp_(grad, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        root = (self.square / (1 - BETAS[1] ** self.step)).sqrt_().add_(EPS)
        now, following = (1 - BETAS[0] ** (self.step + more) for more in (0, 1))
        if not self.kind:
            return self.mean / root.mul_(now)
        weight = (1 - BETAS[0]) / (now if self.kind == "Nesterov" else following)
        return (grad * weight).add_(self.mean, alpha=BETAS[0] / following).div_(root)


class Weights(ABC):
    """Copies of a weight that arms of one kind train."""

    def __init__(self, weight: Tensor, arms: Sequence[Arm]) -> None:
        self.decay = each(arms, len(weight), "decay", weight)

    @abstractmethod
    def value(self) -> Tensor:
        """Return the weight."""

    @abstractmethod
    def step(self, grad: Tensor, lr: Tensor) -> None:
        """Take a step; ``lr (copies, 1, 1, 1)``."""

    def scale(self) -> Tensor:
        """Return the scale of each matrix, ``(copies, K)``."""
        value = self.value()
        return value.flatten(2).norm(dim=2) / min(value.shape[-2:]) ** 0.5


class AdamWeights(Weights):
    """Also of plain tensors of any shape."""

    def __init__(self, weight: Tensor, arms: Sequence[Arm]) -> None:
        super().__init__(weight, arms)
        begins = each(arms, len(weight), "orthonormal", weight) > 0
        self.weight = torch.where(begins, nearest(weight), weight) if begins.any() else weight
        (nesterov,) = {arm.nesterov for arm in arms}
        self.direction = Direction(weight, "Nesterov" if nesterov else "")

    @override
    def value(self) -> Tensor:
        return self.weight

    @override
    def step(self, grad: Tensor, lr: Tensor) -> None:
        self.weight = self.weight * (1 - lr * self.decay) - lr * self.direction(grad)


class MuonWeights(Weights):
    """torch's Muon with the learning rate of AdamW, in float32; heads are rows of one matrix."""

    def __init__(self, weight: Tensor, arms: Sequence[Arm], heads: int = 1) -> None:
        super().__init__(weight, arms)
        self.weight, self.heads, self.buffer = weight, heads, torch.zeros_like(weight)

    @override
    def value(self) -> Tensor:
        return self.weight

    @override
    def step(self, grad: Tensor, lr: Tensor) -> None:
        self.buffer.lerp_(grad, 0.05)
        X = grad.lerp(self.buffer, 0.95)
        X = X.reshape(len(X), -1, self.heads * X.size(2), X.size(3))
        factor = 0.2 * max(X.shape[2:]) ** 0.5
        is_tall = X.size(2) > X.size(3)
        X = X.mT if is_tall else X
        X = X / X.norm(dim=(2, 3), keepdim=True).clamp(min=1e-7)
        for _ in range(5):
            A = X @ X.mT
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        X = (X.mT if is_tall else X).reshape(grad.shape)
        self.weight = self.weight * (1 - lr * self.decay) - lr * factor * X


class NormedWeights(Weights):
    """Weight norm: W = g v / |v| by rows, both trained by AdamW as torch's parametrization is."""

    def __init__(self, weight: Tensor, arms: Sequence[Arm]) -> None:
        super().__init__(weight, arms)
        self.v, self.g = weight, weight.norm(dim=3, keepdim=True)
        self.direction, self.of_g = Direction(self.v), Direction(self.g)

    @override
    def value(self) -> Tensor:
        return self.v * (self.g / self.v.norm(dim=3, keepdim=True))

    @override
    def step(self, grad: Tensor, lr: Tensor) -> None:
        norm = self.v.norm(dim=3, keepdim=True)
        unit = self.v / norm
        slope = (grad * unit).sum(3, keepdim=True)
        along = (self.g / norm) * (grad - unit * slope)
        self.v = self.v * (1 - lr * self.decay) - lr * self.direction(along)
        self.g = self.g * (1 - lr * self.decay) - lr * self.of_g(slope)


class Scaled(Weights):
    """W = g V or r g V, begun at the orthonormal matrix nearest to the initial values."""

    def __init__(self, weight: Tensor, arms: Sequence[Arm]) -> None:
        super().__init__(weight, arms)
        option = partial(each, arms, len(weight), like=weight)
        rows, columns = weight.shape[2:]
        self.least = min(rows, columns)
        initial = weight.flatten(2).norm(dim=2).view(*weight.shape[:2], 1, 1) / self.least**0.5
        given = torch.tensor([math.nan if a.target is None else a.target for a in arms])
        given = given.repeat_interleave(len(weight) // len(arms)).view(-1, 1, 1, 1)
        self.target = torch.where(given.isnan(), initial, given)
        self.rate = option(name="rate") * max(rows, columns) ** 0.5
        self.pull, self.cap = option(name="pull"), option(name="cap")
        self.floor = self.target * option(name="floor").clamp(min=1 / LARGEST)
        self.by_rows, self.grown, self.bare = (
            option(name=name) > 0 for name in ("rows", "grown", "bare")
        )
        first = self.target * option(name="first")
        self.g = first.expand(-1, -1, rows if self.by_rows.any() else 1, 1).clone()
        self.of_g = Direction(self.g)
        self.begin(nearest(weight))

    @abstractmethod
    def begin(self, point: Tensor) -> None: ...

    @abstractmethod
    def shape(self) -> Tensor:
        """Return V."""

    def radius(self) -> Tensor:
        """Return r, ``(copies, K, 1, 1)``."""
        return torch.ones(())

    @abstractmethod
    def move(self, grad: Tensor, lr: Tensor) -> None:
        """Take a step of V, given its gradient; the learning rate is over the target."""

    def factor(self) -> Tensor:
        return torch.where(self.grown, self.radius(), 1.0)

    @override
    def value(self) -> Tensor:
        return self.g * self.factor() * self.shape()

    @override
    def step(self, grad: Tensor, lr: Tensor) -> None:
        factor = self.factor()
        slope = factor * (grad * self.shape()).sum(3, keepdim=True)
        if self.g.size(2) == 1:
            slope = slope.sum(2, keepdim=True)
        else:
            slope = torch.where(self.by_rows, slope, slope.sum(2, keepdim=True))
        along = torch.where(self.bare, grad, self.g * factor * grad)
        self.move(along, lr / self.target)
        each = torch.minimum(lr * self.rate, self.cap)
        pulled = self.g + (each * self.pull).clamp(max=1.0) * (self.target - self.g)
        new = pulled - each * self.of_g(slope)
        new = torch.minimum(torch.maximum(new, self.g / math.e), self.g * math.e)
        self.g = torch.minimum(torch.maximum(new, self.floor), self.target * LARGEST)


class FreeWeights(Scaled):
    """V by AdamW with Nesterov's momentum."""

    @override
    def begin(self, point: Tensor) -> None:
        self.V, self.direction = point, Direction(point, "ours")

    @override
    def shape(self) -> Tensor:
        return self.V

    @override
    def move(self, grad: Tensor, lr: Tensor) -> None:
        self.V = self.V * (1 - lr * self.decay) - lr * self.direction(grad)


class SphericalWeights(FreeWeights):
    """V on the sphere of its Frobenius norm, with the virtual radius of the constrained ones."""

    @override
    def begin(self, point: Tensor) -> None:
        super().begin(point)
        self.square = torch.ones_like(self.target)

    @override
    def radius(self) -> Tensor:
        return self.square.sqrt()

    @override
    def move(self, grad: Tensor, lr: Tensor) -> None:
        decay = (1 - lr * self.target * self.decay) ** 2
        self.square = decay * self.square + lr.square() * max(grad.shape[2:])
        along = grad - self.V * ((grad * self.V).sum((2, 3), keepdim=True) / self.least)
        V = self.V - lr / self.radius() * self.direction(along)
        self.V = V * (self.least**0.5 / V.flatten(2).norm(dim=2)[..., None, None])


class ConstrainedWeights(Scaled):
    """V orthonormal, by the rule of StiefelAdamW with its defaults."""

    @override
    def begin(self, point: Tensor) -> None:
        self.sizes, self.steps = point.shape, 0
        self.is_wide = point.size(2) < point.size(3)
        self.X = self.tall(point)
        k, n, m = self.X.shape
        square, column = self.X.new_zeros(k, m, m), self.X.new_zeros(k, 1, 1)
        self.state = {"momentum_skew": square, "exp_avg_sq_skew": square, "radius_growth": column}
        if n > m:
            normal = torch.zeros_like(self.X)
            self.state |= {"momentum_normal": normal, "exp_avg_sq_normal": normal}

    def tall(self, weight: Tensor) -> Tensor:
        return (weight.mT if self.is_wide else weight).flatten(0, 1).contiguous()

    @override
    def shape(self) -> Tensor:
        return (self.X.mT if self.is_wide else self.X).reshape(self.sizes)

    @override
    def radius(self) -> Tensor:
        return (1 + self.state["radius_growth"]).sqrt().view(*self.sizes[:2], 1, 1)

    @override
    def move(self, grad: Tensor, lr: Tensor) -> None:
        self.steps += 1
        count = self.sizes[:2]
        lr, decay = (
            number.expand(*count, 1, 1).reshape(-1, 1, 1)
            for number in (lr, self.decay * self.target)
        )
        options = {"lr": lr, "weight_decay": decay, "step": self.steps}
        rule = partial(adam, nesterov=True)
        X, new, _ = with_radius(rule, "virtual", self.X, self.tall(grad), self.state, **options)
        self.state |= new
        if self.steps % OFTEN == 0:
            X, new = corrected(X, self.state, Sums(), normal=("momentum_normal",))
            self.state |= new
        self.X = X


KINDS: dict[str, type[Weights]] = {
    "Adam": AdamWeights,
    "Muon": MuonWeights,
    "weight norm": NormedWeights,
    "free": FreeWeights,
    "sphere": SphericalWeights,
    "constrained": ConstrainedWeights,
}


def nearest(weight: Tensor) -> Tensor:
    """Return the nearest orthonormal matrix of each."""
    left, _, right = torch.linalg.svd(weight.double(), full_matrices=False)
    return (left @ right).to(weight.dtype)


def batch_of(arm: Arm) -> tuple[bool, str]:
    """What arms have in common that are one batch, also of plain weights, in its order."""
    return arm.nesterov, arm.kind


def begun(weight: Tensor, arms: Sequence[Arm], heads: int) -> Weights:
    """Return the copies of a weight that arms of one batch train."""
    if arms[0].kind == "Muon":
        return MuonWeights(weight, arms, heads)
    return KINDS[arms[0].kind](weight, arms)


def plain_weights(value: Tensor, arms: Sequence[Arm]) -> Weights:
    """Return the copies of a plain tensor: AdamW's, or NAdam's."""
    return AdamWeights(value, [replace(arm, orthonormal=False) for arm in arms])


def error(weights: Weights) -> float:
    """The largest orthonormality error of constrained weights, otherwise 0."""
    if not isinstance(weights, ConstrainedWeights):
        return 0.0
    return float(so.orthonormality_error(weights.X))
