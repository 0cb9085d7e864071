"""The contestants of `step_time.py`: every optimizer with its own copy of the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import stiefel_opt as so
from benchmarks.common.harness import Contestant

try:
    import geoopt
    import pogo
    import pogo.base
except ImportError as error:
    raise SystemExit(f"{error}; run: pip install geoopt pogo-torch") from error

MOMENTUM = 0.9
BETAS = (0.9, 0.999)
LR = 0.1
STEP_SIZE = 0.1

SGD, ADAM = "StiefelSGD", "StiefelAdam"
POGO, GEOOPT_SGD, GEOOPT_ADAM = "POGO, SGD", "geoopt SGD", "geoopt Adam"
POGO_ADAM = "POGO, Adam"
SIX = "six products"


@dataclass(frozen=True)
class Row:
    """``parameters`` parameters holding ``batch`` matrices of shape n x m each."""

    name: str
    parameters: int
    batch: int
    n: int
    m: int
    heads: bool = False  # the batch is the heads of one (batch * m, n) weight

    @property
    def matrices(self) -> int:
        return self.parameters * self.batch

    @property
    def label(self) -> str:
        if self.heads:
            side = f"{self.batch * self.m} x {self.n}"
            return f"{self.parameters} parameters of {side}, {self.batch} heads"
        if self.batch > 1:
            return f"one batch of {self.batch} x {self.n} x {self.m}"
        count = f"{self.parameters} separate" if self.parameters > 1 else "one"
        return f"{count} {self.n} x {self.m}"


@dataclass(frozen=True)
class Entry:
    """One optimizer with its own parameters: what is timed, and how its matrices are read."""

    contestant: Contestant
    parameters: list[Tensor]
    matrices: Callable[[], Tensor]  # (k, n, m), tall
    optimizer: torch.optim.Optimizer


Build = Callable[[list[Tensor]], torch.optim.Optimizer]
Layout = Callable[[Tensor], Tensor]  # (batch, n, m) -> the tensor a parameter holds


def tall_batch(values: Tensor) -> Tensor:
    return values


def single(values: Tensor) -> Tensor:
    return values[0]


def wide_batch(values: Tensor) -> Tensor:
    return values.mT


def stacked_heads(values: Tensor) -> Tensor:
    batch, n, m = values.shape
    return values.mT.reshape(batch * m, n)


def start(row: Row, device: torch.device) -> tuple[Tensor, Tensor]:
    """Orthonormal X and Gaussian G, (parameters, batch, n, m): the same for every contestant."""
    generator = torch.Generator().manual_seed(7)
    shape = (row.parameters, row.batch, row.n, row.m)
    gaussian = torch.randn(shape, generator=generator, dtype=torch.float64)
    points = torch.linalg.qr(gaussian).Q.float().contiguous()
    gradients = torch.randn(shape, generator=generator)
    # Largest singular value of a Gaussian n x m matrix: sqrt(n) + sqrt(m), to a few per cent.
    gradients *= STEP_SIZE * (1 + MOMENTUM) / LR / (math.sqrt(row.n) + math.sqrt(row.m))
    return points.to(device), gradients.to(device)


def adam_lr(row: Row) -> float:
    """Rate at which a step with direction (1 - b1)/(1 + b1) sign(G) has size `STEP_SIZE`."""
    direction = (1 - BETAS[0]) / (1 + BETAS[0]) * (math.sqrt(row.n) + math.sqrt(row.m))
    return STEP_SIZE / direction


def read_matrices(parameters: list[Tensor], row: Row, layout: Layout) -> Tensor:
    """The matrices of all parameters, tall, (k, n, m), in float64."""
    stack = torch.stack([parameter.detach() for parameter in parameters]).double()
    if layout is wide_batch or layout is stacked_heads:
        return stack.reshape(row.matrices, row.m, row.n).mT
    return stack.reshape(row.matrices, row.n, row.m)


def flip_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.neg_()


def enter(
    name: str, row: Row, device: torch.device, layout: Layout, tag: Callable[[Tensor], Tensor],
    build: Build,
) -> Entry:  # fmt: skip
    """Copy the row's start into the layout of one contestant and build its optimizer."""
    points, gradients = start(row, device)
    parameters = [tag(layout(point).contiguous().clone()) for point in points]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = layout(gradient).contiguous().clone()
    optimizer = build(parameters)
    step: Callable[[], object] = optimizer.step
    contestant = Contestant(name, step, partial(flip_gradients, parameters))
    matrices = partial(read_matrices, parameters, row, layout)
    return Entry(contestant, parameters, matrices, optimizer)


def ours(
    row: Row, device: torch.device, *, cuda_graph: bool | None = None, suffix: str = ""
) -> Iterator[Entry]:
    as_in_model = stacked_heads if row.heads else (tall_batch if row.batch > 1 else single)
    manifold = so.Stiefel(heads=row.batch) if row.heads else so.Stiefel()
    tag = partial(so.ManifoldParameter, manifold=manifold)
    sgd = partial(so.StiefelSGD, lr=LR, momentum=MOMENTUM, cuda_graph=cuda_graph)
    adam = partial(so.StiefelAdam, lr=adam_lr(row), cuda_graph=cuda_graph)
    yield enter(SGD + suffix, row, device, as_in_model, tag, sgd)
    yield enter(ADAM + suffix, row, device, as_in_model, tag, adam)


def pogo_sgd(parameters: list[Tensor], lr: float, **options: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = pogo.POGO(parameters, pogo.base.SGD(**options), lr)
    return optimizer


def pogo_adam(row: Row, device: torch.device) -> Entry:
    def build(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return pogo.POGO(parameters, pogo.base.VectorAdam(BETAS), LR)

    return enter(POGO_ADAM, row, device, wide_batch, torch.nn.Parameter, build)


def rivals(row: Row, device: torch.device) -> Iterator[Entry]:
    tall = tall_batch if row.batch > 1 else single
    plain = torch.nn.Parameter
    euclidean = partial(geoopt.ManifoldParameter, manifold=geoopt.Stiefel(canonical=False))
    geoopt_sgd = partial(geoopt.optim.RiemannianSGD, lr=LR, momentum=MOMENTUM)
    geoopt_adam = partial(geoopt.optim.RiemannianAdam, lr=adam_lr(row), betas=BETAS)
    pogo_momentum = partial(pogo_sgd, lr=LR, momentum=MOMENTUM)
    yield enter(POGO, row, device, wide_batch, plain, pogo_momentum)
    yield enter(GEOOPT_SGD, row, device, tall, euclidean, geoopt_sgd)
    yield enter(GEOOPT_ADAM, row, device, tall, euclidean, geoopt_adam)


def products(row: Row, device: torch.device) -> Contestant:
    """Six products n x m by m x m for every matrix, as one batch."""
    points, gradients = start(row, device)
    tall, factor = points.flatten(0, 1), gradients[..., : row.m, :].contiguous().flatten(0, 1)
    result = torch.empty_like(tall)

    def six() -> None:
        for _ in range(6):
            torch.bmm(tall, factor, out=result)

    return Contestant(SIX, six)
