"""Decoders of any names are rotated by a description, and a wrong one changes nothing."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_decoder import TinyDecoder, logits, tokens
from torch import Tensor, nn
from torch.nn import functional

from stiefel_opt import rotations
from stiefel_opt.rotations import Rotations
from stiefel_opt.rotations.starts import around_ones, inside_ones

VOCABULARY, WIDTH, HEADS, INNER = 23, 15, 3, 8


class Block(nn.Module):
    """LayerNorms with biases, one layer for queries, keys and values, a plain MLP beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.ModuleDict(
            {"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)}
        )
        self.wide, self.narrow = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix["qkv"](self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        y = functional.scaled_dot_product_attention(
            *(each.transpose(-2, -3) for each in (q, k, v)), is_causal=True
        )
        x = x + self.mix["out"](y.transpose(-2, -3).flatten(-2))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Odd(nn.Module):
    """A decoder whose every name is its own, with learned positions."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.3)
        if tied:
            self.out.weight = self.words.weight
        self.config = SimpleNamespace(num_attention_heads=HEADS, tie_word_embeddings=tied)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        x = self.words(input_ids) + self.places.weight[: input_ids.size(-1)]
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.out(self.last(x)))


NAMES: dict[str, Any] = {
    "layers": "blocks",
    "embeddings": ["words", "places"],
    "final": "last",
    "head": "out",
    "norms": {"before": ["mix.qkv"], "between": ["wide"]},
    "writers": ["mix.out", "narrow"],
    "norm": "layer",
    "down": "narrow",
}


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert float((found - expected).abs().max() / expected.abs().max()) <= tolerance


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-6), (torch.float64, 1e-6)])
def test_a_described_decoder_keeps_its_function(tied, dtype, tolerance) -> None:
    model, (ids, *_) = Odd(tied=tied).to(dtype), tokens()
    expected = logits(model, ids)
    assert rotations.prepare_(model, description=rotations.describe(**NAMES), verify=ids) is model
    assert_close(logits(model, ids), expected, tolerance)
    assert torch.equal(model.last.weight, torch.ones_like(model.last.weight))
    start = rotations.hadamard(model)
    assert start.online == ("R4",)
    assert not start.heads
    bits = {"activation_bits": 4, "weight_bits": 4, "weight_group": None}
    with rotations.quantized(model, rotations=start, **bits):
        rounded = logits(model, ids)
    rotations.fold_(model, start, verify=ids)
    assert_close(logits(model, ids), expected, tolerance)
    with rotations.quantized(model, **bits):
        assert_close(rounded, logits(model, ids), 1e-4)

    loaded = Odd()
    missing, unexpected = loaded.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert unexpected == [f"blocks.{i}.online_R4_call_load_online_" for i in range(2)]
    loaded.config = copy.deepcopy(model.config)
    assert_close(logits(rotations.load_online_(loaded.to(dtype)), ids), expected, tolerance)


@pytest.mark.parametrize("loss", ["noise", "kl"])
def test_rotations_of_layer_norms_are_learned_around_the_ones(loss: str) -> None:
    model = Odd()
    with torch.no_grad():
        model.words.weight[:, 2] *= 8  # a loud channel
    rotations.prepare_(model, description=rotations.describe(**NAMES))
    start = Rotations(around_ones(torch.eye(WIDTH - 1)), [])
    options = {"steps": 60, "loss": loss, "progress": False, "start": start}
    found = rotations.learn(model, tokens(1), **options)
    assert len({entry["loss"] for entry in found.log}) > 50
    assert float((found.residual.sum(1) - 1).abs().max()) < 1e-5
    if loss == "noise":
        assert found.log[-1]["loss"] < 0.9 * found.log[0]["loss"]
        assert not torch.equal(found.residual, start.residual)
    rotations.fold_(model, found, verify=tokens()[0])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_rotation_around_the_ones_and_back(size: int) -> None:
    inner = torch.linalg.qr(torch.randn(size, size))[0]
    whole = around_ones(inner)
    torch.testing.assert_close(whole @ whole.mT, torch.eye(size + 1))
    torch.testing.assert_close(whole.sum(1), torch.ones(size + 1))
    torch.testing.assert_close(inside_ones(whole), inner)


def test_noise_has_the_gradient_of_what_is_trained() -> None:
    inner = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0].requires_grad_()
    torch.autograd.gradcheck(lambda r: around_ones(r).double(), inner, atol=1e-3, eps=1e-3)


def everything(model: nn.Module) -> tuple[Any, ...]:
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [list(module._forward_pre_hooks.values()) for module in model.modules()]
    tied = model.out.weight is model.words.weight
    return weights, hooks, vars(copy.deepcopy(model.config)), tied


WRONG: dict[str, dict[str, Any]] = {
    "a reader left out": {"norms": {"before": ["mix.qkv"], "between": ["narrow_in"]}},
    "a norm left out": {"norms": {"before": ["mix.qkv"]}},
    "a writer left out": {"writers": ["mix.out"], "down": None},
    "positions left out": {"embeddings": ["words"]},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", ["a norm left out", "a writer left out", "positions left out"])
def test_a_wrong_description_changes_nothing(case: str, tied: bool) -> None:
    model, (ids, *_) = Odd(tied=tied), tokens()
    description = rotations.describe(**NAMES | WRONG[case])
    before = everything(model)
    rotations.prepare_(model, description=description)
    kept = everything(model)
    with pytest.raises(ValueError, match=r"keep its function when it is folded, .* as they were"):
        rotations.fold_(model, rotations.hadamard(model), verify=ids)
    for (weights, *rest), (expected, *others) in ((everything(model), kept),):
        assert rest == others
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert before[3] == tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_no_wrong_description(dtype: torch.dtype) -> None:
    """A writer of small numbers: without it logits move by less than rounding moves them."""
    model, (ids, *_) = Odd().to(dtype), tokens()
    for block in model.blocks:
        block.narrow.weight.data *= 0.02
        block.narrow.bias.data *= 0.02
    expected, right = logits(model, ids), copy.deepcopy(model)
    rotations.prepare_(right, description=rotations.describe(**NAMES), verify=ids)
    rotations.fold_(right, rotations.hadamard(right), verify=ids)
    assert right.blocks[0].narrow.weight.dtype == dtype
    assert_close(logits(right, ids), expected, 0.03)
    wrong = rotations.describe(**NAMES | WRONG["a writer left out"])
    rotations.prepare_(model, description=wrong, verify=ids)
    with pytest.raises(ValueError, match=r"keep its function when it is folded"):
        rotations.fold_(model, rotations.hadamard(model), verify=ids)
    assert_close(logits(model, ids), expected, 0.03)


def test_a_wrong_gain_is_found_while_preparing() -> None:
    model, (ids, *_) = Odd(tied=True), tokens()
    before = everything(model)
    hidden = nn.Linear(WIDTH, WIDTH)  # reads the norm, and is in no description
    plain = Block.forward
    model.blocks[0].more = hidden
    model.blocks[0].forward = lambda x: (
        plain(model.blocks[0], x) + hidden(model.blocks[0].before(x))
    )
    expected = logits(model, ids)
    with pytest.raises(ValueError, match="keep its function when it is prepared"):
        rotations.prepare_(model, description=rotations.describe(**NAMES), verify=ids)
    assert torch.equal(logits(model, ids), expected)
    assert model.out.weight is model.words.weight
    assert vars(model.config) == before[2]


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"norm": "batch"}, ValueError, "`norm` must be one of"),
        ({"writers": "mix.out"}, TypeError, "`writers` must be a list of names, got 'mix.out'"),
        ({"norms": {"before": []}}, TypeError, r"`norms\['before'\]` must be a list of names"),
        ({"values": "mix.v"}, ValueError, "`output` must be given together with values"),
        (
            {"down": "wide"},
            ValueError,
            r"`down` must be one of the writers \['mix.out', 'narr",
        ),
        ({"gain_offset": "1"}, TypeError, "`gain_offset` must be a number"),
        ({"norms": ["before"]}, TypeError, "`norms` must be a dict, got list; pass {norm: "),
        ({"layers": 3}, TypeError, "`layers` must be the name of a module, got 3"),
        ({"final": None}, TypeError, "`final` must be the name of a module, got None"),
        ({"head": 7}, TypeError, "`head` must be the name of a module, got 7"),
        ({"values": 1, "output": "mix.out"}, TypeError, "`values` must be the name of a module"),
    ],
)
def test_descriptions_are_checked(changed, kind, message) -> None:
    with pytest.raises(kind, match=message):
        rotations.describe(**NAMES | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"final": "lost"}, "`model` must have the module lost, got a Odd without lost"),
        (WRONG["a reader left out"], "`description` must name modules .* got narrow_in"),
        (
            {"norms": {"before": ["narrow"], "between": ["wide"]}},
            "`blocks.0.narrow` must have 15 in",
        ),
        (
            {"writers": ["wide"], "down": None},
            "wide` must have 15 outputs, as wide",
        ),
        ({"norm": "rms"}, "`blocks.0.before` must be an RMSNorm with one weight"),
        (
            {"norms": {"wide": ["mix.qkv"], "between": ["wide"]}},
            "`blocks.0.wide` must be a norm with 15 gains, got a torch.Linear",
        ),
        ({"gain_offset": 1.0}, r"must multiply by its weight \+ 1 and be \(x - mean"),
    ],
)
def test_what_a_model_lacks_is_named(changed, message) -> None:
    model = Odd()
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        rotations.prepare_(model, description=rotations.describe(**NAMES | changed))
    assert everything(model)[2:] == before[2:]


def test_what_a_described_model_cannot_do_is_named() -> None:
    model, (ids, *_) = Odd(), tokens()
    rotations.prepare_(model, description=rotations.describe(**NAMES | {"down": None}))
    with pytest.raises(ValueError, match="must name what the model has a place for, got R4"):
        rotations.hadamard(model, online=("R4",))
    start = rotations.hadamard(model)
    assert start.online == ()
    with pytest.raises(ValueError, match="`kv_bits` must be None for keys and values in one layer"):
        rotations.quantized(model, rotations=start, activation_bits=8, kv_bits=4)
    haar = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
    with pytest.raises(ValueError, match="residual` must keep the vector of ones"):
        rotations.fold_(model, Rotations(haar, [], ()))
    for wrong in ("text", torch.zeros(0, 3, dtype=torch.long)):
        with pytest.raises(TypeError, match=r"`verify` must be token ids .*, not empty, got "):
            rotations.fold_(model, start, verify=wrong)
    zero = Odd()
    zero.last.weight.data[3] = 0
    with pytest.raises(ValueError, match="no gain of 0 in front of a bias"):
        rotations.prepare_(zero, description=rotations.describe(**NAMES))
    llama = rotations.prepare_(TinyDecoder(), verify=ids)  # needs no description
    rotations.fold_(llama, rotations.hadamard(llama), verify=ids)
