"""Small networks, many copies at once, each with weights of its own.

A weight matrix is ``(copies, K, out, in)``: K equal ones, such as layers, gates or heads. These are
the matrices that an optimizer may constrain; all else is plain: biases, norms, embeddings, the last
layer. Outputs are ``(copies, examples, classes)``. Initial values are those of torch's layers.
"""

from __future__ import annotations

import gzip
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import (
    avg_pool2d,
    conv2d,
    cross_entropy,
    gelu,
    layer_norm,
    pixel_unshuffle,
    rms_norm,
    scaled_dot_product_attention,
)

from benchmarks.common.images import load_images

Tensors = dict[str, Tensor]
Examples = tuple[Tensor, Tensor]  # inputs and what is wanted
MANY = 1000  # examples that are evaluated, of training and of test, at most


def uniform(generator: torch.Generator, *shape: int, inputs: int) -> Tensor:
    """The initial values of torch's layers."""
    return (2 * torch.rand(*shape, generator=generator) - 1) / inputs**0.5


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x (copies, n, in)``, ``weight (copies, out, in)``."""
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


def flat(x: Tensor) -> Tensor:
    """``(copies, ..., features)`` as ``(copies, n, features)``."""
    return x.flatten(1, -2)


class Data(ABC):
    """Batches of a seed, and examples of training and of test."""

    classes: int

    @abstractmethod
    def batch(self, seed: int, step: int, size: int) -> Examples:
        """Return the batch of a step."""

    @abstractmethod
    def examples(self, *, test: bool) -> Examples:
        """Return what is evaluated."""


class Pixels(Data):
    """Images as rows of pixels; batches without replacement, each pass in an order of its own."""

    classes = 10

    def __init__(self, train: Examples, test: Examples) -> None:
        self.train, self.test = train, test

    def batch(self, seed: int, step: int, size: int) -> Examples:
        each = len(self.train[1]) // size
        order = self._order(seed, step // each)[step % each * size :][:size]
        return self.train[0][order], self.train[1][order]

    @cache  # noqa: B019 - data live as long as the program
    def _order(self, seed: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        return torch.randperm(len(self.train[1]), generator=generator)

    def examples(self, *, test: bool) -> Examples:
        inputs, labels = self.test if test else self.train
        return inputs[:MANY], labels[:MANY]


@cache
def pixels(name: str, directory: Path, count: int, pool: int) -> Pixels:
    """``count`` training images and up to ``MANY`` test images, pooled and normalised."""
    images, generator = load_images(name, directory), torch.Generator().manual_seed(9)
    parts = []
    for inputs, labels, most in (
        (images.train_images, images.train_labels, count),
        (images.test_images, images.test_labels, MANY),
    ):
        order = torch.randperm(len(labels), generator=generator)[:most]
        pooled = avg_pool2d(inputs[order].float(), pool)
        parts.append((pooled, labels[order].long()))
    mean = parts[0][0].mean((0, 2, 3), keepdim=True)
    deviation = parts[0][0].std((0, 2, 3), keepdim=True)
    train, test = (((x - mean).div(deviation).flatten(1), y) for x, y in parts)
    return Pixels(train, test)


class Text(Data):
    """Windows of a text: the next character is wanted."""

    length = 24

    def __init__(self, text: str) -> None:
        letters = sorted(set(text))
        known = {letter: place for place, letter in enumerate(letters)}
        codes = torch.tensor([known[letter] for letter in text])
        cut = len(codes) * 9 // 10
        self.classes, self.train, self.test = len(letters), codes[:cut], codes[cut:]

    def batch(self, seed: int, step: int, size: int) -> Examples:
        return self._windows(self.train, 7919 * seed + step, size)

    def _windows(self, codes: Tensor, seed: int, size: int) -> Examples:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(len(codes) - self.length - 1, (size, 1), generator=generator)
        windows = codes[first + torch.arange(self.length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def examples(self, *, test: bool) -> Examples:
        return self._windows(self.test if test else self.train, 2**40, MANY // 5)


@cache
def sentences(directory: Path, column: int) -> Text:
    """English (0) or Spanish (1) sentences of ``eng_spa.tsv.gz``, in a random order."""
    with gzip.open(directory / "eng_spa.tsv.gz", "rt", encoding="utf-8") as file:
        lines = list(dict.fromkeys(line.lower().split("\t")[column].strip() for line in file))
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(9))[:12_000]
    plain = "abcdefghijklmnopqrstuvwxyzáéíñóúü .,?!'\n"
    text = "\n".join(lines[place] for place in order)
    return Text("".join(letter for letter in text if letter in plain))


class Letters(Data):
    """Five of eight letters, to be repeated after a pause."""

    classes, pause = 10, 8

    def batch(self, seed: int, step: int, size: int) -> Examples:
        generator = torch.Generator().manual_seed(7919 * seed + step)
        letters = torch.randint(1, 9, (size, 5), generator=generator)
        zeros = torch.zeros(size, self.pause + 5, dtype=torch.long)
        go = torch.full((size, 1), 9)
        shown = torch.cat([letters, zeros[:, : self.pause - 1], go, zeros[:, :5]], 1)
        return shown, torch.cat([zeros, letters], 1)

    def examples(self, *, test: bool) -> Examples:
        return self.batch(2**30 + test, 0, MANY // 5)


class Network(ABC):
    """A network and what it learns.

    Attributes:
        steps: Of a short run.
        size: Of a batch.
        heads: How many matrices of each kind are rows of one in torch, for Muon: by name.
    """

    size = 40
    heads: Mapping[str, int] = {}

    def __init__(self, data: Data, steps: int, size: int | None = None) -> None:
        self.data, self.steps = data, steps
        self.size = size or self.size

    @abstractmethod
    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return matrices ``(K, out, in)`` and plain tensors of one copy."""

    @abstractmethod
    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        """Return ``(copies, n, classes)``."""

    def head(self, generator: torch.Generator, width: int) -> Tensors:
        shape = self.data.classes, width
        return {
            "head": uniform(generator, *shape, inputs=width),
            "head bias": uniform(generator, shape[0], inputs=width),
        }

    def losses(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """Return the loss of each copy."""
        each = cross_entropy(outputs.flatten(0, 1), wanted.flatten(), reduction="none")
        return each.view(outputs.size(0), -1).mean(1)

    def right(self, outputs: Tensor, wanted: Tensor) -> Tensor:
        """Return the share of right answers in per cent."""
        return 100 * (outputs.argmax(-1) == wanted.flatten(1)).float().mean(1)

    @property
    def guess(self) -> float:
        """The loss of a network that knows nothing."""
        return math.log(self.data.classes)


class Perceptron(Network):
    """Layers of one width; all but the last are matrices."""

    def __init__(
        self,
        data: Data,
        steps: int,
        layers: int,
        width: int,
        inputs: int,
        nonlinearity: Callable[[Tensor], Tensor] = torch.relu,
        size: int | None = None,
    ) -> None:
        super().__init__(data, steps, size)
        self.layers, self.width, self.inputs = layers, width, inputs
        self.nonlinearity = nonlinearity

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        layers, width, inputs = self.layers, self.width, self.inputs
        matrices = {"first": uniform(generator, 1, width, inputs, inputs=inputs)}
        if layers > 1:
            matrices["hidden"] = uniform(generator, layers - 1, width, width, inputs=width)
        bias = uniform(generator, layers, width, inputs=width)
        return matrices, {"bias": bias, **self.head(generator, width)}

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        x = inputs
        for layer in range(self.layers):
            weight = matrices["hidden"][:, layer - 1] if layer else matrices["first"][:, 0]
            x = self.nonlinearity(linear(x, weight, plain["bias"][:, layer]))
        return linear(x, plain["head"], plain["head bias"])


class Residual(Perceptron):
    """x + relu(W norm(x) + b) / sqrt(layers), the norm before W, behind it, or none."""

    def __init__(self, *args: int | Data, norm: str | None = None) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.norm = norm

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        matrices, plain = super().initial(generator)
        hidden = uniform(generator, self.layers, self.width, self.width, inputs=self.width)
        into = uniform(generator, self.width, inputs=self.inputs)
        return {"hidden": hidden}, {**plain, "into": matrices["first"][0], "into bias": into}

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        x, width = linear(inputs, plain["into"], plain["into bias"]), (self.width,)
        for layer in range(self.layers):
            weight, bias = matrices["hidden"][:, layer], plain["bias"][:, layer]
            if self.norm == "post":
                branch = rms_norm(linear(x, weight), width) + bias.unsqueeze(1)
            else:
                before = rms_norm(x, width) if self.norm == "pre" else x
                branch = linear(before, weight, bias)
            x = x + torch.relu(branch) / self.layers**0.5
        return linear(x, plain["head"], plain["head bias"])


class Autoencoder(Network):
    """Images through few numbers and back; the loss is the mean square error."""

    widths = (196, 32, 12)

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        matrices, plain = {}, {}
        shapes = [*pairwise(self.widths), *pairwise(self.widths[::-1])]
        for layer, (inside, outside) in enumerate(shapes):
            matrices[f"{layer}"] = uniform(generator, 1, outside, inside, inputs=inside)
            plain[f"{layer}"] = uniform(generator, outside, inputs=inside)
        return matrices, plain

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        x = inputs
        for name, bias in plain.items():
            x = linear(x, matrices[name][:, 0], bias)
            x = torch.relu(x) if name in "02" else x
        return torch.stack([x, inputs], -1)

    def losses(self, outputs: Tensor, wanted: Tensor) -> Tensor:  # noqa: ARG002
        return (outputs[..., 0] - outputs[..., 1]).square().mean((1, 2))

    def right(self, outputs: Tensor, wanted: Tensor) -> Tensor:  # noqa: ARG002
        return torch.full((len(outputs),), math.nan)

    @property
    def guess(self) -> float:
        return 1.0


class Convolutions(Network):
    """Three convolutions of 3 x 3, the last two of stride 2, and a layer."""

    channels = (12, 16, 24)

    def __init__(self, data: Data, steps: int, colours: int, side: int) -> None:
        super().__init__(data, steps)
        self.colours, self.side = colours, side

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        matrices, plain = {}, {}
        for layer, (inside, outside) in enumerate(pairwise((self.colours, *self.channels))):
            matrices[f"{layer}"] = uniform(generator, 1, outside, 9 * inside, inputs=9 * inside)
            plain[f"{layer}"] = uniform(generator, outside, inputs=9 * inside)
        last = -(-self.side // 4)
        return matrices, plain | self.head(generator, self.channels[-1] * last**2)

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        copies, count = inputs.shape[:2]
        side, inside = self.side, self.colours
        x = inputs.view(copies, count, inside, side, side).transpose(0, 1)
        for layer, outside in enumerate(self.channels):
            kernels = matrices[f"{layer}"].reshape(copies * outside, inside, 3, 3)
            bias, stride = plain[f"{layer}"].flatten(), 1 if layer == 0 else 2
            x = x.reshape(count, copies * inside, *x.shape[-2:])
            x = torch.relu(conv2d(x, kernels, bias, stride, padding=1, groups=copies))
            inside = outside
        features = x.unflatten(1, (copies, -1)).transpose(0, 1).flatten(2)
        return linear(features, plain["head"], plain["head bias"])


class Shifts(Network):
    """Layers that shift channels by a pixel in nine directions and mix them, as so.nn.ShiftConv2d.

    Squares of 2 x 2 pixels are channels, each nine times, so that the first layer is a full 3 x 3
    convolution. Images are closed to a torus: a shift is an isometry, and so is a whole layer with
    an orthonormal matrix, unlike a convolution whose kernel is orthonormal as a matrix.
    """

    def __init__(self, data: Data, steps: int, layers: int, side: int) -> None:
        super().__init__(data, steps)
        self.layers, self.side, self.width = layers, side // 2, 36
        places = torch.arange(self.side**2).view(self.side, self.side)
        moves = [(down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
        rolled = [places.roll(moves[channel % 9], (0, 1)).flatten() for channel in range(36)]
        self.places = torch.stack(rolled)

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        layers, width = self.layers, self.width
        matrices = {"mix": uniform(generator, layers, width, width, inputs=width)}
        bias = uniform(generator, layers, width, inputs=width)
        return matrices, {"bias": bias, **self.head(generator, width * self.side**2)}

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        copies, count = inputs.shape[:2]
        side = 2 * self.side
        x = pixel_unshuffle(inputs.reshape(copies * count, 1, side, side), 2)
        x = x.flatten(2).repeat_interleave(9, 1)
        for layer in range(self.layers):
            shifted = x.gather(2, self.places.expand(len(x), -1, -1))
            weight = matrices["mix"][:, layer].unsqueeze(1)
            bias = plain["bias"][:, layer].view(copies, 1, -1, 1)
            x = torch.relu(weight @ shifted.unflatten(0, (copies, count)) + bias).flatten(0, 1)
        return linear(x.flatten(1).unflatten(0, (copies, count)), plain["head"], plain["head bias"])


class Recurrent(Network):
    """A tanh network, GRU or LSTM over rows of an image, letters, or characters.

    Of a tanh network the recurrent matrix may be constrained, of the others all matrices of gates.
    """

    gates: Mapping[str, int] = {"tanh": 1, "GRU": 3, "LSTM": 4}

    def __init__(
        self, data: Data, steps: int, kind: str, width: int, inputs: int, size: int | None = None
    ) -> None:
        super().__init__(data, steps, size)
        self.kind, self.width, self.inputs = kind, width, inputs
        self.reads_rows = isinstance(data, Pixels)

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        count, width, inputs = self.gates[self.kind], self.width, self.inputs
        matrices = {"recurrent": uniform(generator, count, width, width, inputs=width)}
        into = uniform(generator, count, width, inputs, inputs=width)
        plain = {"bias": uniform(generator, 2, count * width, inputs=width)}
        if self.kind == "tanh":
            plain["into"] = into
        else:
            matrices["into"] = into
        if not self.reads_rows:
            plain["embedding"] = torch.randn(self.data.classes, inputs, generator=generator)
        return matrices, plain | self.head(generator, width)

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        if self.reads_rows:
            x = inputs.unflatten(-1, (-1, self.inputs))
        else:
            x = embedded(plain["embedding"], inputs)
        copies, count, length, _ = x.shape
        into = matrices.get("into", plain.get("into")).flatten(1, 2)  # type: ignore[union-attr]
        x = linear(flat(x), into, plain["bias"][:, 0]).view(copies, count, length, -1)
        recurrent = matrices["recurrent"].flatten(1, 2).mT.contiguous()
        cell, bias = getattr(self, self.kind), plain["bias"][:, 1].unsqueeze(1)
        state = (x.new_zeros(copies, count, self.width),) * 2
        states = []
        for now in x.unbind(2):
            state = cell(now, torch.baddbmm(bias, state[0], recurrent), state)
            states.append(state[0])
        read = states[-1] if self.reads_rows else flat(torch.stack(states, 2))
        return linear(read, plain["head"], plain["head bias"])

    @staticmethod
    def tanh(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(x + h), state[1]

    @staticmethod
    def GRU(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # noqa: N802
        (r, z, n), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        candidate = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        return torch.lerp(candidate, state[0], torch.sigmoid(z + hz)), state[1]

    @staticmethod
    def LSTM(x: Tensor, h: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, Tensor]:  # noqa: N802
        i, f, g, o = (x + h).chunk(4, -1)
        cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * cell.tanh(), cell


def embedded(table: Tensor, codes: Tensor) -> Tensor:
    """``table (copies, letters, width)`` at ``codes (copies, n, length)``."""
    rows = codes.flatten(1).unsqueeze(-1).expand(-1, -1, table.size(-1))
    return table.gather(1, rows).view(*codes.shape, -1)


class Transformer(Network):
    """Pre-norm blocks over patches of an image, or causal over characters.

    All matrices of the blocks may be constrained, queries, keys, values and outputs by heads, or
    queries and keys only. Outputs are stored as their transpose.
    """

    def __init__(
        self,
        data: Data,
        steps: int,
        layers: int,
        width: int,
        heads: int,
        size: int,
        tokens: tuple[int, int],
        *,
        taken: str = "all",
    ) -> None:
        super().__init__(data, steps, size)
        self.layers, self.width, self.count, self.taken = layers, width, heads, taken
        self.tokens, self.causal = tokens, isinstance(data, Text)
        self.heads = {"queries and keys": heads, "values and outputs": heads}

    def initial(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        layers, width, heads = self.layers, self.width, self.count
        inner, (tokens, features) = (4 if self.causal else 2) * width, self.tokens
        shape = 2 * layers * heads, width // heads, width
        matrices = {
            "queries and keys": uniform(generator, *shape, inputs=width),
            "values and outputs": uniform(generator, *shape, inputs=width),
            "up": uniform(generator, layers, inner, width, inputs=width),
            "down": uniform(generator, layers, width, inner, inputs=inner),
        }
        plain = {
            "norms": torch.ones(2 * layers + 1, width),
            "biases": torch.zeros(2 * layers, width),
            "inner bias": torch.zeros(layers, inner),
            "position": 0.02 * torch.randn(tokens, width, generator=generator),
        }
        if self.causal:
            embedding = torch.randn(self.data.classes, width, generator=generator)
            plain["embedding"] = 0.3 * embedding
        else:
            plain["into"] = uniform(generator, width, features, inputs=features)
        plain |= self.head(generator, width)
        if self.taken != "all":
            plain |= {name: matrices.pop(name) for name in list(matrices) if name != self.taken}
        return matrices, plain

    def outputs(self, matrices: Tensors, plain: Tensors, inputs: Tensor) -> Tensor:
        copies, count = inputs.shape[:2]
        tokens, width, heads = self.tokens[0], self.width, self.count
        weights, position = plain | matrices, plain["position"]
        if self.causal:
            x = embedded(plain["embedding"], inputs)
        else:
            patches = inputs.view(copies, -1, self.tokens[1])
            x = linear(patches, plain["into"]).view(copies, count, tokens, width)
        x = flat(x + position.unsqueeze(1))
        pairs = (self.layers, 2, width, width)
        queries, values = (
            weights[name].reshape(copies, *pairs)
            for name in ("queries and keys", "values and outputs")
        )

        def by_heads(x: Tensor) -> Tensor:
            each = x.reshape(copies * count, tokens, heads, width // heads)
            return each.transpose(1, 2)

        def normalised(x: Tensor, place: int) -> Tensor:
            return layer_norm(x, (width,)) * plain["norms"][:, place].unsqueeze(1)

        for layer in range(self.layers):
            y = normalised(x, 2 * layer)
            q, k = (by_heads(linear(y, queries[:, layer, part])) for part in (0, 1))
            v = by_heads(linear(y, values[:, layer, 0]))
            mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            mixed = mixed.transpose(1, 2).reshape(copies, count * tokens, width)
            outputs, bias = values[:, layer, 1], plain["biases"]
            x = x + linear(mixed, outputs.mT, bias[:, 2 * layer])
            y = normalised(x, 2 * layer + 1)
            y = gelu(linear(y, weights["up"][:, layer], plain["inner bias"][:, layer]))
            x = x + linear(y, weights["down"][:, layer], bias[:, 2 * layer + 1])
        x = normalised(x, 2 * self.layers)
        if not self.causal:
            x = x.view(copies, count, tokens, width).mean(2)
        return linear(x, plain["head"], plain["head bias"])
