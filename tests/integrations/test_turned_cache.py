"""Caches of few bits in a turned basis: nearer to the exact model, a token rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, QuantizedLayer

from stiefel_opt import rotations
from stiefel_opt.rotations.turned_cache import (
    FITS,
    Codes,
    TurnedLayer,
    levels_of,
    matrix_of,
    rounded_rows,
)

VOCABULARY = 53
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FULL = {"head_dim": 32, "layer_types": ["full_attention"] * 3}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {},
    "gemma2": FULL,
    "gpt_neox": {},
    "gemma3_text": {**FULL, "sliding_window": 8},
}


def build(name: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model with loud channels of keys, as trained ones have."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **SIZES | MODELS.get(name, {}) | options)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if ".k_proj.weight" in parameter:
                value[::16] *= 20
            if "query_key_value.weight" in parameter:
                value.view(4, 3, 32, -1)[:, 1, ::16] *= 20
            elif value.ndim == 2 and "embed" not in parameter:
                value *= 3
    return model


def tokens(length: int = 60, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


class Plain(TurnedLayer):
    """Rounded on a grid of the same kind, and once, but not turned."""

    fits = FITS

    def _rounded(self, _: int, x: Tensor) -> Codes:
        return rounded_rows(x.float(), self.bits, x.dtype, self.fits)

    def _restore(self, _: int, codes: Codes, out: Tensor) -> None:
        packed, middle, step = codes
        levels = out.new_empty(out.shape)
        for piece, half in zip(levels.chunk(2, -1), levels_of(packed, self.bits), strict=True):
            piece.copy_(half)
        torch.mul(levels, step, out=out).add_(middle)


class Usual(QuantizedLayer):
    """The cache of transformers, from least to largest: every token is rounded again and again."""

    def __init__(self, bits: int) -> None:
        super().__init__(nbits=bits, residual_length=1)
        self.once = Plain(bits, 0)
        self.once.fits = 0

    def _quantize(self, tensor: Tensor, axis: int) -> Any:  # noqa: ARG002
        return self.once._rounded(0, tensor), tensor

    def _dequantize(self, quantized: Any) -> Tensor:
        codes, like = quantized
        out = torch.empty_like(like)
        self.once._restore(0, codes, out)
        return out


def plain(config: Any, **options: Any) -> Any:
    cache = rotations.TurnedCache(config, **options)
    for layer in cache.layers:
        if isinstance(layer, TurnedLayer):
            layer.__class__ = Plain
    return cache


def usual(config: Any, bits: int = 4) -> Any:
    return Cache(layers=[Usual(bits) for _ in range(config.num_hidden_layers)])


@torch.no_grad()
def token_by_token(model: PreTrainedModel, ids: Tensor, cache: Any, prompt: int) -> Tensor:
    """Log probabilities behind the prompt."""
    model(ids[:, :prompt], past_key_values=cache, use_cache=True)
    found = [
        model(ids[:, place : place + 1], past_key_values=cache, use_cache=True).logits
        for place in range(prompt, ids.size(1))
    ]
    return torch.cat(found, 1).float().log_softmax(-1)


def divergence(found: Tensor, exact: Tensor) -> float:
    return float(kl_div(found, exact, log_target=True, reduction="none").sum(-1).mean())


def divergences(name: str, bits: int) -> list[float]:
    """KL to the exact model, summed over models: turned, of transformers, and rounded once."""
    found, ids = [0.0, 0.0, 0.0], tokens()
    for seed in range(3):
        model = build(name, seed)
        exact = token_by_token(model, ids, DynamicCache(), 40)
        turned = rotations.TurnedCache(model.config, bits=bits, residual_length=1)
        once = plain(model.config, bits=bits, residual_length=1)
        for place, cache in enumerate((turned, usual(model.config, bits), once)):
            found[place] += divergence(token_by_token(model, ids, cache, 40), exact)
    return found


@pytest.mark.parametrize(("name", "share"), [("llama", 0.2), ("phi", 0.2), ("gemma2", 1 / 3)])
def test_turned_keys_are_nearer_to_the_exact_model(name: str, share: float) -> None:
    turned, usual, once = divergences(name, 4)
    assert 0 < turned <= share * usual
    assert turned <= 0.45 * once  # whose grids are fitted, too


@pytest.mark.parametrize("name", MODELS)
def test_four_bits_are_never_further_away_and_eight_are_near(name: str) -> None:
    turned, usual, _ = divergences(name, 4)
    assert turned <= usual
    assert divergences(name, 8)[0] <= 1e-4


@pytest.mark.parametrize("length", [0, 3, 200])
def test_a_token_is_rounded_once(length: int) -> None:
    layer = TurnedLayer(4, length)
    first = torch.randn(2, 3, 10, 16)
    layer.update(first, first + 1)
    while layer.get_seq_length() < 11 + 1.25 * length:
        layer.update(*torch.randn(2, 2, 3, 1, 16))
    early = [[part[..., :10, :].clone() for part in codes] for codes in layer.codes]
    for _ in range(1000):
        keys, values = layer.update(*torch.randn(2, 2, 3, 1, 16))
    assert layer.get_seq_length() == keys.size(-2) == values.size(-2) > 1010 + length
    for codes, old in zip(layer.codes, early, strict=True):
        for part, before in zip(codes, old, strict=True):
            assert torch.equal(part[..., :10, :], before)
    assert length <= layer.keys.size(-2) <= 1.25 * length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_entries_are_off_by_half_a_step_and_bytes_are_as_said(bits: int, dtype: Any) -> None:
    layer = TurnedLayer(bits, 0)
    keys = torch.randn(2, 3, 50, 32).to(dtype)
    values = (5 + 3 * torch.randn(2, 3, 50, 32)).to(dtype)
    layer.update(keys, values)
    for place, states in enumerate((keys, values)):
        codes = layer.codes[place]
        found = torch.empty_like(states)
        layer._restore(place, codes, found)
        scale, step = layer.scales[place].double(), codes[2].double()
        rounding = 40 * torch.finfo(dtype).eps * (states.double() / scale).abs().amax()
        bound = 0.5 * step * 32**0.5 + rounding  # in the turned basis each is off by half a step
        off = torch.linalg.vector_norm((found.double() - states.double()) / scale, dim=-1)
        assert bool((off <= bound[..., 0] * 1.01).all())
        used = sum(part.numel() * part.element_size() for part in codes)
        assert used == 2 * 3 * 50 * (32 * bits / 8 + 2 * dtype.itemsize)


@pytest.mark.parametrize("size", [4, 8, 12, 20, 64])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_stand_for_integers_in_a_scaled_hadamard_basis(bits: int, size: int) -> None:
    layer, matrix = TurnedLayer(bits, 0), matrix_of(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(size))
    torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5))
    keys = torch.randn(2, 3, 30, size)
    keys[..., 1] *= 20
    layer.update(keys, keys + 0)
    packed, middle, step = layer.codes[0]
    out = torch.empty_like(keys)
    layer._restore(0, layer.codes[0], out)
    levels = torch.cat(levels_of(packed, bits), -1)
    expected = (middle + step * levels) @ matrix.mT * layer.scales[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    power = keys.square().mean((0, -2))
    torch.testing.assert_close(layer.scales[0][:, 0], power.pow(0.25), rtol=0.5, atol=0)


@pytest.mark.parametrize(("bits", "share"), [(2, 0.65), (4, 0.93), (8, 1.0)])
def test_fitted_grids_are_off_by_less(bits: int, share: float) -> None:
    y, errors = torch.randn(500, 64), []
    for fits in (0, FITS):
        packed, middle, step = rounded_rows(y, bits, torch.float32, fits)
        levels = torch.cat(levels_of(packed, bits), -1)
        errors.append(float((middle + step * levels - y).square().mean()))
    assert errors[1] <= share * errors[0]


def test_generation_beams_and_a_prompt_in_pieces() -> None:
    model, ids = build("llama"), tokens(20)
    exact = {"residual_length": 400}
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    options["attention_mask"] = torch.ones_like(ids)
    for more in ({}, {"num_beams": 3}):
        wanted = model.generate(ids, **options, **more)
        for settings, is_exact in ((exact, True), ({"residual_length": 4, "bits": 8}, False)):
            cache = rotations.TurnedCache(model.config, **settings)
            found = model.generate(ids, past_key_values=cache, **options, **more)
            assert found.shape == wanted.shape
            assert not is_exact or torch.equal(found, wanted)
    whole = rotations.TurnedCache(model.config, **exact)
    with torch.no_grad():
        for piece in ids.split(7, dim=1):
            found = model(piece, past_key_values=whole, use_cache=True).logits
        wanted = model(ids).logits[:, -found.size(1) :]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [0, 5, 100])
def test_cropped_and_reordered_caches_are_those_of_what_is_left(length: int) -> None:
    keys, values = torch.randn(2, 3, 2, 30, 16)
    new = torch.randn(2, 3, 2, 1, 16)
    layer, order = TurnedLayer(8, length), torch.tensor([2, 0, 0])
    layer.update(keys, values)
    for removed in (0, 3, 9):
        layer.crop(-removed)
    assert layer.get_seq_length() == 18
    layer.reorder_cache(order)
    found = layer.update(*new)
    for got, states, last in zip(found, (keys, values), new, strict=True):
        expected = torch.cat((states[order][..., :18, :], last), -2)
        torch.testing.assert_close(got, expected, rtol=0, atol=0.05)
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 5]))
    assert layer.update(*torch.randn(2, 2, 2, 1, 16))[0].shape == (2, 2, 20, 16)
    layer.crop(4)  # of older transformers: what is kept
    assert layer.get_seq_length() == 4
    layer.reset()
    assert layer.get_seq_length() == 0
    torch.testing.assert_close(layer.update(keys, values)[0], keys)


def test_layers_with_windows_beside_full_ones_stay() -> None:
    model = build(
        "gemma2",
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        sliding_window=16,
    )
    cache = rotations.TurnedCache(model.config, residual_length=200)
    kinds = [type(layer).__name__ for layer in cache.layers]
    assert kinds == ["DynamicSlidingWindowLayer", "TurnedLayer"] * 2
    exact = token_by_token(model, tokens(), DynamicCache(config=model.config), 48)
    torch.testing.assert_close(token_by_token(model, tokens(), cache, 48), exact)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"head_dim": 40}, None),
        ("llama", {"head_dim": 22}, r"`config.head_dim` must be a size with a Hadamard .* got 22"),
        ("mistral", {"sliding_window": 8}, r"full attention, got sliding windows only; take Dyn"),
        ("mamba2", {}, r"`config` must have keys and values in every layer, got LinearAttention"),
        ("phi", {"num_attention_heads": 16}, r"size of the heads of keys` must be .* got 6; take"),
    ],
)
def test_other_layers_are_refused_by_name(name: str, options: Any, message: str | None) -> None:
    config = AutoConfig.for_model(name, **({} if name == "mamba2" else SIZES) | options)

    def fill() -> None:
        cache = rotations.TurnedCache(config)
        if name == "phi":
            cache.layers[0].update(*torch.randn(2, 1, 1, 1, 6))

    if message is None:
        fill()
        return
    with pytest.raises(ValueError, match=message):
        fill()


def test_bad_arguments_and_values_that_are_a_view_of_the_keys() -> None:
    config = build("llama").config
    with pytest.raises(ValueError, match="`bits` must be one of"):
        rotations.TurnedCache(config, bits=3)
    with pytest.raises(ValueError, match="`residual_length` must be at least 0"):
        rotations.TurnedCache(config, residual_length=-1)
    keys = torch.randn(1, 1, 2, 16)
    with pytest.raises(ValueError, match="tensor of their own, got values that are a view"):
        TurnedLayer(4, 8).update(keys, keys[..., :8])
    with pytest.raises(AttributeError, match="no attribute 'TurnedCaches'"):
        _ = rotations.TurnedCaches
