"""Small problems with orthonormal matrices, many copies at once.

A copy has its own start, batches and learning rate, and all copies of a problem are one batch:
parameters are ``(k, n, m)`` with n >= m, losses ``(k,)``. So a grid of learning rates and seeds
costs little more than one run.
"""

# ruff: noqa: ARG002 - not every loss needs all that it is given
from __future__ import annotations

import gzip
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, one_hot, unfold

import stiefel_opt as so
from benchmarks.common.images import load_images

Tensors = list[Tensor]


class Problem(ABC):
    """A loss of orthonormal and of plain parameters.

    Attributes:
        kind: "solve", the same loss in every step and float64, or "train", batches and float32.
        steps: Of a short run; a long one of "train" is ten times as long.
        target: Of "solve": the length of the gradient to reach, as a part of that at the start.
        heads: How many orthonormal matrices a model keeps in one parameter.
    """

    kind = "train"
    steps = 50
    target = 1e-3
    heads = 1

    @abstractmethod
    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        """Return the orthonormal and the plain parameters of one copy, each ``(n, m)``."""

    @abstractmethod
    def data(self, seed: int, step: int) -> Tensors:
        """Return the batch of a step, or of "solve" what the loss is made of."""

    @abstractmethod
    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        """Return the losses, ``(k,)``."""

    def measured(self, points: Tensors, losses: Tensor) -> Tensor:
        """Return what is compared, ``(k,)``: here the losses of the batches."""
        return losses


def generator_of(*numbers: int) -> torch.Generator:
    """A generator of its own for each tuple of numbers."""
    return torch.Generator().manual_seed(hash(numbers) % 2**40)


def point(n: int, m: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    return so.random_point(n, m, generator=generator, dtype=torch.float64).to(dtype)


def nearest(weight: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    return left @ right


def plain_weight(n: int, m: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, m, generator=generator) / n**0.5


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each copy; logits ``(k, ..., classes)``."""
    flat = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(logits.size(0), -1).mean(1)


# ---- networks ----------------------------------------------------------------------------------


class Classification(Problem):
    """Batches without replacement, each pass in an order of its own."""

    def __init__(self, inputs: Tensor, labels: Tensor, *, batch: int = 40) -> None:
        self.inputs, self.labels, self.batch = inputs, labels, batch

    def data(self, seed: int, step: int) -> Tensors:
        each = len(self.labels) // self.batch
        order = self._order(seed, step // each)[step % each * self.batch :][: self.batch]
        return [self.inputs[order], self.labels[order]]

    @cache  # noqa: B019 - problems live as long as the program
    def _order(self, seed: int, epoch: int) -> Tensor:
        return torch.randperm(len(self.labels), generator=generator_of(seed, epoch))


class Perceptron(Classification):
    """Layers of given widths; those in ``constrained`` are orthonormal, ``gain`` learns a scale."""

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        widths: Sequence[int],
        constrained: Sequence[int],
        *,
        gain: bool = False,
        nonlinearity: str = "relu",
    ) -> None:
        super().__init__(inputs, labels)
        self.shapes = list(pairwise(widths))
        self.constrained, self.gain, self.nonlinearity = constrained, gain, nonlinearity

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator, points, plain = generator_of(seed), [], []
        for layer, (inside, outside) in enumerate(self.shapes):
            if layer in self.constrained:
                points.append(point(max(inside, outside), min(inside, outside), generator))
            else:
                plain.append(plain_weight(inside, outside, generator))
        plain += [torch.zeros(1, outside) for _, outside in self.shapes[:-1]]
        return points, plain + ([torch.full((1, 1), 3.0)] if self.gain else [])

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, labels = data
        weights, rest = iter(points), iter(plain)
        layers = []
        for layer, (inside, outside) in enumerate(self.shapes):
            if layer in self.constrained:
                weight = next(weights)
                layers.append(weight if inside >= outside else weight.mT)
            else:
                layers.append(next(rest))
        for weight in layers[:-1]:
            x = getattr(torch, self.nonlinearity)(torch.baddbmm(next(rest), x, weight))
        x = torch.bmm(x, layers[-1])
        return losses_of(x * next(rest) if self.gain else x, labels)


class FineTuned(Perceptron):
    """The same from weights that were trained without constraint on half of the classes."""

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        points, plain = super().start(seed)
        leaves = [t.unsqueeze(0).requires_grad_() for t in (*points, *plain)]
        adam = torch.optim.Adam(leaves, lr=0.003)
        kept = self.labels < 5
        inputs, labels = self.inputs[kept][None, :200], self.labels[kept][None, :200]
        for _ in range(60):
            adam.zero_grad()
            self.loss(leaves[: len(points)], leaves[len(points) :], inputs, labels).sum().backward()
            adam.step()
        trained = [leaf.detach()[0] for leaf in leaves]
        return [nearest(w) for w in trained[: len(points)]], trained[len(points) :]


class RowByRow(Classification):
    """A tanh network reads images row by row; its recurrent matrix is orthogonal."""

    hidden, rows = 40, 8

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator = generator_of(seed)
        into = plain_weight(self.inputs.size(1) // self.rows, self.hidden, generator)
        out = plain_weight(self.hidden, 10, generator)
        recurrent = point(self.hidden, self.hidden, generator)
        return [recurrent], [into, out, torch.zeros(1, self.hidden)]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, labels = data
        state = torch.zeros(*x.shape[:2], self.hidden)
        for row in x.unflatten(2, (self.rows, -1)).unbind(2):
            state = torch.tanh(
                torch.baddbmm(torch.baddbmm(plain[2], row, plain[0]), state, points[0])
            )
        return losses_of(torch.bmm(state, plain[1]), labels)


class Convolutions(Classification):
    """Two convolutions of 3 x 3 whose patches meet an orthonormal matrix, the mean, and a layer."""

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator = generator_of(seed)
        points = [point(9, 8, generator), point(72, 24, generator)]
        return points, [
            torch.zeros(1, 8),
            torch.zeros(1, 24),
            2 * plain_weight(24, 10, generator),
            torch.ones(1, 1),
        ]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, labels = data
        copies, count = x.shape[:2]
        images = x.view(copies * count, 1, 8, 8)
        for weight, bias in zip(points, plain, strict=False):
            patches = unfold(images, 3, padding=1).mT.reshape(copies, -1, weight.size(1))
            x = torch.relu(torch.baddbmm(bias, patches, weight))
            images = x.view(copies * count, 64, -1).mT.unflatten(2, (8, 8))
        means = images.flatten(2).mean(2).view(copies, count, -1)
        return losses_of(torch.bmm(means, plain[2]) * (3 * plain[3]), labels)


class Attention(Classification):
    """One layer of attention over the rows of an image; queries and keys orthonormal by heads."""

    width, heads, tokens, classes = 24, 3, 8, 10

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator = generator_of(seed)
        each, inside = self.width // self.heads, self.inputs.size(1) // self.tokens
        heads = [point(self.width, each, generator) for _ in range(2 * self.heads)]
        plain = [
            plain_weight(inside, self.width, generator),
            torch.randn(self.tokens, self.width, generator=generator) / 3,
            plain_weight(self.width, self.width, generator),
            plain_weight(self.width, 64, generator),
            plain_weight(64, self.width, generator),
            plain_weight(self.width, self.classes, generator),
            torch.zeros(1, 64),
        ]
        return heads, plain

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, labels = data
        x = self.attended(x.unflatten(2, (self.tokens, -1)), points, plain)
        return losses_of(torch.bmm(x.mean(2), plain[5]), labels)

    def attended(
        self, x: Tensor, points: Tensors, plain: Tensors, *, causal: bool = False
    ) -> Tensor:
        """Return the tokens ``(k, b, t, width)`` after attention and a perceptron."""
        x = x @ plain[0].unsqueeze(1) + plain[1].unsqueeze(1)
        y = normalised(x).unsqueeze(2)
        queries, keys = torch.stack(points, 1).unsqueeze(1).chunk(2, 2)
        scores = (y @ queries) @ (y @ keys).mT / (self.width // self.heads) ** 0.5
        if causal:
            future = torch.ones(self.tokens, self.tokens, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        values = (y @ plain[2][:, None, None]).unflatten(4, (self.heads, -1))
        mixed = scores.softmax(-1) @ values.squeeze(2).transpose(2, 3)
        x = x + mixed.transpose(2, 3).flatten(3)
        inner = torch.relu(normalised(x) @ plain[3].unsqueeze(1) + plain[6].unsqueeze(1))
        return x + inner @ plain[4].unsqueeze(1)


def normalised(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


class Characters(Attention):
    """The next character of English phrases by the same layer, causal, 12 characters at a time."""

    tokens, batch, classes = 12, 12, 28

    def __init__(self, phrases: Path) -> None:
        with gzip.open(phrases, "rt") as file:
            text = " ".join(line.partition("\t")[0].lower() for line in file)[:200_000]
        known = {letter: place for place, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
        self.codes = torch.tensor([known.get(letter, 27) for letter in text])
        self.inputs = torch.empty(0, self.tokens * self.classes)

    def data(self, seed: int, step: int) -> Tensors:
        first = torch.randint(
            len(self.codes) - 13, (self.batch, 1), generator=generator_of(seed, step)
        )
        codes = self.codes[first + torch.arange(13)]
        return [one_hot(codes[:, :-1], self.classes).float(), codes[:, 1:]]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, following = data
        x = self.attended(x, points, plain, causal=True)
        return losses_of(x @ plain[5].unsqueeze(1), following)


class Copying(Problem):
    """Five of eight letters, to be repeated after a pause of six: an orthogonal tanh network."""

    steps, hidden, batch, pause = 80, 32, 20, 6

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator = generator_of(seed)
        into = torch.randn(10, self.hidden, generator=generator) * 0.3
        out = plain_weight(self.hidden, 10, generator)
        recurrent = point(self.hidden, self.hidden, generator)
        return [recurrent], [into, out, torch.zeros(1, self.hidden), torch.zeros(1, 10)]

    def data(self, seed: int, step: int) -> Tensors:
        letters = torch.randint(1, 9, (self.batch, 5), generator=generator_of(seed, step))
        before, after = torch.zeros(self.batch, self.pause - 1), torch.zeros(self.batch, 5)
        go = torch.full((self.batch, 1), 9)
        shown = torch.cat([letters, before.long(), go, after.long()], 1)
        return [shown, torch.cat([torch.zeros(self.batch, self.pause + 5).long(), letters], 1)]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        shown, wanted = data
        inputs = one_hot(shown, 10).float() @ plain[0].unsqueeze(1) + plain[2].unsqueeze(1)
        state, states = torch.zeros_like(inputs[:, :, 0]), []
        for now in inputs.unbind(2):
            state = torch.tanh(torch.baddbmm(now, state, points[0]))
            states.append(state)
        return losses_of(torch.stack(states, 2) @ plain[1].unsqueeze(1) + plain[3][:, None], wanted)


class Autoencoder(Classification):
    """Images through 12 numbers: relu between an orthonormal encoder and an orthonormal decoder."""

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator, pixels = generator_of(seed), self.inputs.size(1)
        shapes = (pixels, 24), (24, 12), (24, 12), (pixels, 24)
        points = [point(*shape, generator) for shape in shapes]
        return points, [torch.zeros(1, 24), torch.zeros(1, 24), torch.zeros(1, pixels)]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, _ = data
        inside = torch.bmm(torch.relu(torch.baddbmm(plain[0], x, points[0])), points[1])
        outside = torch.relu(torch.baddbmm(plain[1], inside, points[2].mT))
        return (torch.baddbmm(plain[2], outside, points[3].mT) - x).square().mean((1, 2))


class StreamingPCA(Problem):
    """Five leading directions of 50 from ten new samples a step; the loss is the whole one's."""

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        return [point(50, 5, generator_of(seed))], []

    def data(self, seed: int, step: int) -> Tensors:
        samples = torch.randn(10, 50, generator=generator_of(seed, step))
        return [samples * torch.logspace(0, -1, 50)]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x = data[0]
        return (x - x @ points[0] @ points[0].mT).square().sum(2).mean(1)

    def measured(self, points: Tensors, losses: Tensor) -> Tensor:
        """The excess of the expected loss, as a part of the least one."""
        variances = torch.logspace(0, -2, 50)
        caught = (points[0].square() * variances[:, None]).sum((1, 2))
        return (variances[:5].sum() - caught) / variances[5:].sum()


class StreamingDictionary(Problem):
    """24 atoms of sparse signals, 40 new ones a step: the fourth power, maximised."""

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        return [point(24, 24, generator_of(seed))], []

    def data(self, seed: int, step: int) -> Tensors:
        generator = generator_of(seed, step)
        codes = torch.randn(40, 24, generator=generator)
        return [codes * (torch.rand(40, 24, generator=generator) < 0.2)]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        return 1 - (data[0] @ points[0]).pow(4).mean(1).sum(1) / (24 * 0.6)

    def measured(self, points: Tensors, losses: Tensor) -> Tensor:
        """The excess of the expected loss over 0.8, 0 where the columns are atoms."""
        return 1 - points[0].pow(4).sum(1).mean(1)


# ---- problems without noise --------------------------------------------------------------------


class Solve(Problem):
    """A loss without noise, divided by the length of its gradient at the start."""

    kind, steps = "solve", 300
    n, m = 64, 8

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        return [point(self.n, self.m, generator_of(seed), torch.float64)], []

    def data(self, seed: int, step: int) -> Tensors:
        return self._scaled(seed)

    @cache  # noqa: B019 - problems live as long as the program
    def _scaled(self, seed: int) -> Tensors:
        given = self.given(generator_of(seed, 1))
        points = [x.unsqueeze(0).requires_grad_() for x in self.start(seed)[0]]
        loss = self.value_of(points, *(tensor.unsqueeze(0) for tensor in given))
        gradients = torch.autograd.grad(loss.sum(), points)
        longest = max(torch.linalg.matrix_norm(gradient, 2) for gradient in gradients)
        return [1 / longest, *given]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        return data[0].view(-1) * self.value_of(points, *data[1:])

    def value_of(self, points: Tensors, *given: Tensor) -> Tensor:
        return self.value(points[0], *given)

    @abstractmethod
    def given(self, generator: torch.Generator) -> Tensors:
        """Return what the loss is made of."""

    @abstractmethod
    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        """Return the losses before they are divided."""


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


class Eigenvalues(Solve):
    """Leading eigenvalues, each weighted; ``spectrum`` descends."""

    def __init__(self, spectrum: Tensor, weights: Tensor) -> None:
        self.spectrum, self.weights = spectrum.double(), weights.double()
        self.n, self.m = len(spectrum), len(weights)

    def given(self, generator: torch.Generator) -> Tensors:
        vectors = point(self.n, self.n, generator, torch.float64)
        return [vectors * self.spectrum @ vectors.mT]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        return -((given[0] @ x) * x * self.weights).sum((1, 2))


class Procrustes(Solve):
    """|A X - A Y|^2 for a planted Y, singular values of A from 1 to 1/1000."""

    n, m, target = 100, 20, 1e-2

    def given(self, generator: torch.Generator) -> Tensors:
        values = torch.logspace(0, -3, self.n, dtype=torch.float64)
        rotation, planted = (point(self.n, m, generator, torch.float64) for m in (self.n, self.m))
        return [values[:, None] * rotation, planted]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        return (given[0] @ (x - given[1])).square().sum((1, 2))


class JointDiagonalisation(Solve):
    """Ten matrices of 20 x 20 that share eigenvectors."""

    n, m = 20, 20

    def given(self, generator: torch.Generator) -> Tensors:
        shared = point(20, 20, generator, torch.float64)
        return [shared * normal(10, 1, 20, generator=generator) @ shared.mT]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        turned = x.mT.unsqueeze(1) @ given[0] @ x.unsqueeze(1)
        diagonal = turned.diagonal(dim1=2, dim2=3)
        return turned.square().sum((1, 2, 3)) - diagonal.square().sum((1, 2))


class Components(Solve):
    """Independent components of 24 whitened principal components of digits: log cosh."""

    n, m = 24, 24

    def __init__(self, pixels: Tensor) -> None:
        left = torch.linalg.svd(pixels.double() - pixels.double().mean(0), full_matrices=False).U
        self.white = left[:, :24] * len(pixels) ** 0.5

    def given(self, generator: torch.Generator) -> Tensors:
        chosen = torch.randperm(len(self.white), generator=generator)[:600]
        return [self.white[chosen]]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        sources = given[0] @ x
        return (torch.nn.functional.softplus(-2 * sources) + sources).mean(1).sum(1)


class Dictionary(Solve):
    """A complete dictionary of 24 atoms from 600 sparse signals: the fourth power, maximised."""

    n, m = 24, 24

    def given(self, generator: torch.Generator) -> Tensors:
        codes = normal(600, 24, generator=generator)
        used = torch.rand(600, 24, generator=generator) < 0.2
        return [codes * used @ point(24, 24, generator, torch.float64)]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        return -(given[0] @ x).pow(4).mean(1).sum(1)


class Completion(Solve):
    """The column space of a 60 x 40 matrix of rank 4; half its entries are known."""

    n, m = 60, 4

    def given(self, generator: torch.Generator) -> Tensors:
        left, right = normal(60, 4, generator=generator), normal(4, 40, generator=generator)
        known = torch.rand(60, 40, generator=generator, dtype=torch.float64) < 0.5
        return [left @ right, known.double()]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        whole, known = given
        gram = torch.einsum("kni,knc,knj->kcij", x, known, x)
        right = torch.einsum("kni,knc->kci", x, known * whole)
        ridge = 1e-6 * torch.eye(4, dtype=torch.float64)
        codes = torch.linalg.solve(gram + ridge, right.unsqueeze(3)).squeeze(3)
        return (known * (x @ codes.mT - whole)).square().sum((1, 2))


class Transport(Solve):
    """Projection-robust Wasserstein distance of 40 points in 20 dimensions, 40 Sinkhorn steps."""

    n, m = 20, 2

    def given(self, generator: torch.Generator) -> Tensors:
        clouds = 2 * torch.rand(2, 40, 20, generator=generator, dtype=torch.float64) - 1
        clouds[1, :, :2] += 2 * clouds[1, :, :2].sign()
        return [clouds[0], clouds[1]]

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        cost = torch.cdist(given[0] @ x, given[1] @ x).square()
        with torch.no_grad():
            kernel, u = torch.exp(-cost / 2), torch.ones(len(x), 40, 1, dtype=x.dtype)
            for _ in range(40):
                v = 1 / (40 * kernel.mT @ u)
                u = 1 / (40 * kernel @ v)
            plan = u * kernel * v.mT
            entropy = 2 * (plan * (1600 * plan).log()).sum((1, 2))
        return -(plan * cost).sum((1, 2)) - entropy


class Several(Solve):
    """A problem of several matrices, each of its own shape."""

    shapes: tuple[tuple[int, int], ...] = ()

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator = generator_of(seed)
        return [point(n, m, generator, torch.float64) for n, m in self.shapes], []

    def value(self, x: Tensor, *given: Tensor) -> Tensor:
        return self.value_of([x], *given)


class SingularVectors(Several):
    """Six leading ones on both sides of a 60 x 40 matrix, each pair with a weight."""

    shapes = (60, 6), (40, 6)

    def given(self, generator: torch.Generator) -> Tensors:
        left, right = (point(n, 40, generator, torch.float64) for n in (60, 40))
        return [left * torch.logspace(0, -2, 40, dtype=torch.float64) @ right.mT]

    def value_of(self, points: Tensors, *given: Tensor) -> Tensor:
        left, right = points
        weights = torch.arange(6.0, 0, -1, dtype=torch.float64) / 6
        return -((given[0] @ right) * left * weights).sum((1, 2))


class Tucker(Several):
    """Three frames in which the core of a noisy 20 x 16 x 12 tensor is largest."""

    shapes = (20, 3), (16, 3), (12, 3)

    def given(self, generator: torch.Generator) -> Tensors:
        frames = [point(*shape, generator, torch.float64) for shape in self.shapes]
        core = normal(3, 3, 3, generator=generator)
        tensor = torch.einsum("abc,ia,jb,kc->ijk", core, *frames)
        return [tensor + 0.02 * normal(20, 16, 12, generator=generator)]

    def value_of(self, points: Tensors, *given: Tensor) -> Tensor:
        core = torch.einsum("sijk,sia,sjb,skc->sabc", given[0], *points)
        return -core.square().sum((1, 2, 3))


class TwoScales(Several):
    """Leading eigenvalues of two matrices, of which one counts a thirtieth."""

    shapes = (64, 8), (64, 8)

    def given(self, generator: torch.Generator) -> Tensors:
        spectrum = torch.logspace(0, -2, 64, dtype=torch.float64)
        vectors = [point(64, 64, generator, torch.float64) for _ in self.shapes]
        return [each * spectrum @ each.mT for each in vectors]

    def value_of(self, points: Tensors, *given: Tensor) -> Tensor:
        first, second = (((a @ x) * x).sum((1, 2)) for a, x in zip(given, points, strict=True))
        return -first - second / 30


FACTORS = ("singular vectors", "Tucker decomposition", "PCA, two scales")
LARGE_RATES = (
    *FACTORS,
    "streaming PCA",
    "streaming dictionary",
    "PCA",
    "PCA, weighted",
    "eigenvalues, close",
    "PCA, condition 1e4",
    "Procrustes",
    "joint diagonalisation",
    "independent components",
    "dictionary",
    "completion",
    "transport",
)
WITHOUT_PLAIN = (*LARGE_RATES, "SmolLM2, rotations")
COSTLY = (
    "digits, fine-tuned",
    "digits, convolutions",
    "digits, attention",
    "CIFAR, all",
    "characters",
    "SmolLM2, fine-tuned",
    "SmolLM2, rotations",
)
WITH_HEADS = ("digits, attention", "characters")
SEVERAL = (  # problems with several orthonormal matrices
    "digits, all",
    "digits, eight layers",
    "digits, fine-tuned",
    "digits, convolutions",
    "digits, attention",
    "pixels at 14 x 14, hidden",
    "autoencoder",
    "CIFAR, all",
    "CIFAR, hidden",
    "characters",
    "SmolLM2, fine-tuned",
    "SmolLM2, rotations",
    *FACTORS,
)

# ---- all of them -------------------------------------------------------------------------------


def problems(directory: Path) -> dict[str, Problem]:
    """Return the problems by name; ``directory`` holds MNIST, CIFAR-10 and ``eng_spa.tsv.gz``."""
    digits, labels = small_images("digits", directory, 1400, 1)
    mnist, mnist_labels = small_images("mnist", directory, 6000, 2)
    cifar, cifar_labels = small_images("cifar10", directory, 12_000, 4)
    ones, falling = torch.ones(5), torch.arange(8.0, 0, -1) / 8
    pixels = torch.linalg.svdvals(digits.double() - digits.double().mean(0)).square()
    close = torch.cat([1.15 - 0.02 * torch.arange(5), torch.linspace(1, 0, 145)])
    return {
        "digits, all": Perceptron(digits, labels, (64, 48, 48, 10), (0, 1, 2), gain=True),
        "digits, hidden": Perceptron(digits, labels, (64, 48, 48, 10), (1,)),
        "digits, eight layers": Perceptron(
            digits, labels, (64, *8 * [24], 10), range(1, 8), nonlinearity="tanh"
        ),
        "digits, fine-tuned": FineTuned(digits, labels, (64, 48, 48, 10), (0, 1)),
        "digits, row by row": RowByRow(digits, labels),
        "digits, convolutions": Convolutions(digits, labels, batch=16),
        "digits, attention": Attention(digits, labels, batch=20),
        "pixels at 14 x 14, hidden": Perceptron(mnist, mnist_labels, (196, 32, 32, 10), (0, 1)),
        "autoencoder": Autoencoder(mnist, mnist_labels),
        "CIFAR, all": Perceptron(cifar, cifar_labels, (192, 48, 48, 10), (0, 1, 2), gain=True),
        "CIFAR, hidden": Perceptron(cifar, cifar_labels, (192, 48, 48, 10), (0, 1)),
        "characters": Characters(directory / "eng_spa.tsv.gz"),
        "copying": Copying(),
        "streaming PCA": StreamingPCA(),
        "streaming dictionary": StreamingDictionary(),
        "PCA": Eigenvalues(pixels / pixels[0], torch.ones(8)),
        "PCA, weighted": Eigenvalues(pixels / pixels[0], falling),
        "eigenvalues, close": Eigenvalues(close, ones),
        "PCA, condition 1e4": Eigenvalues(torch.logspace(0, -4, 64), falling),
        "Procrustes": Procrustes(),
        "joint diagonalisation": JointDiagonalisation(),
        "independent components": Components(digits),
        "dictionary": Dictionary(),
        "completion": Completion(),
        "transport": Transport(),
        "singular vectors": SingularVectors(),
        "Tucker decomposition": Tucker(),
        "PCA, two scales": TwoScales(),
    }


def small_images(name: str, directory: Path, count: int, pool: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` images as rows of mean 0, their pixels pooled, and labels."""
    images = load_images(name, directory)
    order = torch.randperm(len(images.train_labels), generator=generator_of(9))[:count]
    pixels = avg_pool2d(images.train_images[order].float(), pool).flatten(1)
    return (pixels - pixels.mean()) / pixels.std(), images.train_labels[order].long()
