"""Rotations of a decoder change nothing but its rounding, and learning makes that smaller."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import in_turn, mixed
from surrogate import assert_its_gradients
from tiny_decoder import HEAD, WIDTH, TinyDecoder, logits, tokens
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt import rotations
from stiefel_opt.compat import SGDG
from stiefel_opt.numerics.geometry import random_point
from stiefel_opt.rotations import Rotations, learning, quantizers
from stiefel_opt.rotations.hadamard_matrices import (
    fixed_rotation,
    hadamard_factors,
    largest_hadamard,
    rotate_fixed,
)

MODELS = [{}, {"bias": True}, {"tied": True}, {"bias": True, "tied": True}]


def assert_close_to_the_largest(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error <= tolerance


def prepared(dtype: torch.dtype = torch.float32, **options: Any) -> TinyDecoder:
    return rotations.prepare_(TinyDecoder(**options).to(dtype))


def haar(model: nn.Module, seed: int = 0) -> Rotations:
    start = rotations.hadamard(model)
    generator = torch.Generator().manual_seed(seed)
    heads = [random_point(HEAD, HEAD, generator=generator) for _ in start.heads]
    return Rotations(random_point(WIDTH, WIDTH, generator=generator), heads)


def assert_same(one: Rotations, other: Rotations) -> None:
    for left, right in zip((one.residual, *one.heads), (other.residual, *other.heads), strict=True):
        assert torch.equal(left, right)


def identity(model: nn.Module) -> Rotations:
    return Rotations(torch.eye(WIDTH), [torch.eye(HEAD) for _ in model.model.layers])


# ---- Hadamard matrices ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, 2, 12, 20, 28, 36, 60, 576])
def test_hadamard_matrices_have_flat_orthogonal_entries(order: int) -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    matrix = functools.reduce(torch.kron, hadamard_factors(order), one)
    assert matrix.shape == (order, order)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, order**-0.5))
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize(("size", "order"), [(3, 1), (30, 2), (92, 4), (11008, 11008)])
def test_largest_hadamard_order_that_divides(size: int, order: int) -> None:
    assert largest_hadamard(size) == order


@pytest.mark.parametrize("size", [1536, 2048, 8192, 11008, 14336])
def test_fixed_rotations_are_products_of_small_matrices(size: int) -> None:
    factors = fixed_rotation(size)
    assert math.prod(len(factor) for factor in factors) == size
    assert max(len(factor) for factor in factors) <= 128
    x = torch.zeros(1, size)
    x[0, 3] = 1
    assert float(rotate_fixed(x).abs().max()) <= (2.001 / size) ** 0.5
    torch.testing.assert_close(rotate_fixed(rotate_fixed(x), back=True), x)


@pytest.mark.parametrize("size", [1, 45, 96])
def test_fixed_rotation_is_its_matrix_and_back(size: int) -> None:
    x = torch.randn(2, 3, size, dtype=torch.float64)
    matrix = functools.reduce(torch.kron, fixed_rotation(size), torch.ones(1, 1).double())
    torch.testing.assert_close(rotate_fixed(x), x @ matrix)
    torch.testing.assert_close(rotate_fixed(rotate_fixed(x), back=True), x)


def test_start_is_random_orthogonal_and_repeats() -> None:
    model = TinyDecoder()
    start, again, other = (rotations.hadamard(model, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(start.residual, again.residual)
    assert not torch.equal(start.residual, other.residual)
    assert not torch.equal(start.heads[0], start.heads[1])
    for matrix in (start.residual, *start.heads):
        torch.testing.assert_close(matrix.mT @ matrix, torch.eye(len(matrix)))
    torch.testing.assert_close(start.residual.abs(), torch.full((WIDTH, WIDTH), WIDTH**-0.5))


# ---- the function stays --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        (options, *precision)
        for options, precision in in_turn(MODELS, [(torch.float32, 1e-4), (torch.float64, 1e-12)])
    ],
)
def test_preparing_and_folding_leave_the_logits(options, dtype, tolerance) -> None:
    model, (batch, *_) = TinyDecoder(**options).to(dtype), tokens()
    expected = logits(model, batch)
    assert rotations.prepare_(model) is model
    assert_close_to_the_largest(logits(model, batch), expected, tolerance)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings
    for norm in (model.model.norm, model.model.layers[1].post_attention_layernorm):
        assert torch.equal(norm.weight, torch.ones_like(norm.weight))
    rotations.fold_(model, haar(model))
    assert_close_to_the_largest(logits(model, batch), expected, tolerance)
    assert model.config.stiefel_rotations == {"state": "folded", "online": ["R4"]}


@pytest.mark.parametrize(
    ("options", "symmetric", "bits"),
    mixed(
        8,
        MODELS,
        [False, True],
        [
            {},
            {"weight_bits": 4},
            {"weight_bits": 3, "activation_bits": None},
            {"weight_bits": 3, "weight_group": 4},
        ],
    ),
    ids=str,
)
def test_quantized_is_what_folding_gives(options, symmetric, bits) -> None:
    model, (batch, *_) = prepared(torch.float64, **options), tokens()
    exact, found = logits(model, batch), haar(model)
    folded = rotations.fold_(copy.deepcopy(model), found)
    with rotations.quantized(model, rotations=found, symmetric=symmetric, **bits):
        rounded = logits(model, batch)
    with rotations.quantized(folded, symmetric=symmetric, **bits):
        expected = logits(folded, batch)
    assert float((rounded - exact).abs().max()) > 1e-2
    assert_close_to_the_largest(rounded, expected, 1e-5)  # rotations are float32, folding polishes
    assert torch.equal(logits(model, batch), exact)  # nothing stays behind


def loaded_anew(model: TinyDecoder) -> TinyDecoder:
    """What ``from_pretrained`` gives: weights and config, and a word about names left over."""
    loaded = TinyDecoder()
    missing, unexpected = loaded.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert all("call_load_online_" in name for name in unexpected)
    loaded.config = copy.deepcopy(model.config)
    return loaded


def test_folded_model_needs_its_online_rotations_after_loading() -> None:
    model, (batch, *_) = prepared(), tokens()
    rotations.fold_(model, rotations.hadamard(model))
    expected = logits(model, batch)
    loaded = loaded_anew(model)
    assert float((logits(loaded, batch) - expected).abs().max()) > 1e-3
    for _ in range(2):  # the second call adds nothing
        assert rotations.load_online_(loaded) is loaded
        assert torch.equal(logits(loaded, batch), expected)
    assert torch.equal(logits(copy.deepcopy(loaded), batch), expected)
    loaded.load_state_dict(model.state_dict())  # the notes are expected now


def test_a_folded_checkpoint_names_the_call_that_is_missing() -> None:
    model = prepared()
    start = rotations.hadamard(model)
    rotations.fold_(model, start)
    with pytest.raises(RuntimeError, match=r"mlp\.online_R4_call_load_online_"):
        TinyDecoder().load_state_dict(model.state_dict())
    loaded = loaded_anew(model)
    for call in (
        lambda: rotations.hadamard(loaded),
        lambda: rotations.quantized(loaded, activation_bits=8),
        lambda: rotations.learn(loaded, tokens(), progress=False),
        lambda: rotations.fold_(loaded, start),
    ):
        with pytest.raises(ValueError, match=r"online R4, .* call rotations.load_online_\(model\)"):
            call()
    rotations.load_online_(loaded)
    rotations.hadamard(loaded)
    with rotations.quantized(loaded, activation_bits=8):
        pass


@pytest.mark.parametrize("tied", [False, True])
def test_models_of_one_config_do_not_know_of_each_other(tied: bool) -> None:
    first, second = TinyDecoder(tied=tied), TinyDecoder(tied=tied)
    second.config = first.config
    second.model.config = second.config  # as modules of transformers have it
    rotations.prepare_(first)
    assert vars(second.config) == vars(TinyDecoder(tied=tied).config)
    rotations.prepare_(second)
    assert second.model.config is second.config is not first.config
    rotations.fold_(first, rotations.hadamard(first))
    assert rotations.learn(second, tokens(), steps=1, progress=False).log
    copied = copy.deepcopy(first)
    assert copied.config is not first.config
    copied.config.stiefel_rotations["online"] = []
    assert first.config.stiefel_rotations == {"state": "folded", "online": ["R4"]}


@pytest.mark.parametrize("bits", [None, 2, 4, 5])
def test_few_bits_without_r4_warn(bits) -> None:
    model = prepared()
    bare = rotations.hadamard(model, online=())
    folded = rotations.fold_(prepared(), bare)
    options = {"activation_bits": bits, "weight_bits": 8}
    for call in (
        lambda: rotations.quantized(model, rotations=bare, **options),
        lambda: rotations.quantized(folded, **options),
        lambda: rotations.learn(model, tokens(), start=bare, steps=1, progress=False, **options),
    ):
        warns = pytest.warns(UserWarning, match="without R4: the inputs of down_proj keep")
        with warns if bits in (2, 4) else contextlib.nullcontext():
            call()
    with (
        rotations.quantized(model, **options),  # nothing is rotated
        rotations.quantized(model, rotations=rotations.hadamard(model), **options),
    ):
        pass


class Int8Linear(nn.Module):
    """What a quantiser puts in the place of a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax(-1, keepdim=True) / 127
        self.register_buffer(
            "qweight", (linear.weight.detach() / self.scale).round().to(torch.int8)
        )

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.qweight * self.scale)


def test_online_rotations_return_to_a_model_that_was_quantised_after_folding() -> None:
    model, (batch, *_) = prepared(), tokens()
    expected = logits(model, batch)
    rotations.fold_(model, rotations.hadamard(model))
    quantised = loaded_anew(model)
    quantised.config.quantization_config = {"quant_method": "some"}
    for layer in quantised.model.layers:
        layer.mlp.down_proj = Int8Linear(layer.mlp.down_proj)
    without = logits(quantised, batch)
    rotations.load_online_(quantised)
    assert_close_to_the_largest(logits(quantised, batch), expected, 0.02)
    assert float((without - expected).abs().max()) > 0.1 * float(expected.abs().max())
    with pytest.raises(TypeError, match=r"must be a torch Linear, got test_rotations\.Int8L"):
        rotations.prepare_(quantised)


def test_without_online_rotations_a_folded_model_is_plain() -> None:
    model, (batch, *_) = prepared(), tokens()
    rotations.fold_(model, rotations.hadamard(model, online=()))
    loaded = TinyDecoder()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(logits(loaded, batch), logits(model, batch))
    assert not model.model.layers[0].mlp.down_proj._forward_pre_hooks


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_without_r1_a_model_is_folded_as_it_was_loaded(options, tmp_path: Path) -> None:
    model, (batch, *_) = TinyDecoder(**options).double(), tokens()
    expected = logits(model, batch)
    before = copy.deepcopy(model.state_dict())
    start = rotations.hadamard(model, residual=False)
    assert start.residual is None
    assert torch.equal(start.heads[1], rotations.hadamard(model).heads[1])
    start.save(tmp_path / "start.pt")
    start = Rotations.load(tmp_path / "start.pt")
    bits = {"activation_bits": 4, "weight_bits": 4, "weight_group": 4}
    folded = rotations.fold_(copy.deepcopy(model), start)
    assert_close_to_the_largest(logits(folded, batch), expected, 1e-6)
    assert folded.config.tie_word_embeddings == options.get("tied", False)
    with rotations.quantized(model, rotations=start, **bits):
        rounded = logits(model, batch)
    with rotations.quantized(folded, **bits):
        assert_close_to_the_largest(rounded, logits(folded, batch), 1e-5)
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(folded.state_dict()[name], before[name])
    found = rotations.learn(model, tokens(), start=start, steps=20, progress=False)
    assert found.residual is None
    assert not torch.equal(found.heads[0], start.heads[0])
    assert_close_to_the_largest(logits(rotations.fold_(model, found), batch), expected, 1e-6)
    with pytest.raises(ValueError, match="must be prepared, got one that is folded"):
        rotations.fold_(folded, start)


def test_without_r1_nothing_may_be_shared_either() -> None:
    model = edited(*SHARED, tied=True)()
    start = rotations.hadamard(model, residual=False)
    for call in (
        lambda: rotations.fold_(model, start),
        lambda: rotations.quantized(model, rotations=start),
        lambda: rotations.learn(model, tokens(), start=start, steps=1, progress=False),
    ):
        with pytest.raises(ValueError, match="must not be shared"):
            call()


@pytest.mark.parametrize("group", [2, 4])
def test_groups_of_weights_have_grids_of_their_own(group: int) -> None:
    model, (batch, *_) = TinyDecoder(), tokens()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            for part in (*layer.self_attn.children(), *layer.mlp.children()):
                rows = part.weight.view(len(part.weight), -1, group)
                step = rows.abs().amax(-1, keepdim=True) / 3  # of 3 bits
                rows.copy_((rows / step).round() * step)
    bits = {"activation_bits": None, "weight_bits": 3, "weight_group": group}
    with rotations.quantized(model, **bits):
        found = logits(model, batch)
    assert_close_to_the_largest(found, logits(other, batch), 1e-6)
    with rotations.quantized(other, **bits):  # on the grid already
        assert_close_to_the_largest(logits(other, batch), found, 1e-6)


# ---- rounding and its gradient -------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "symmetric"), in_turn([2, 4, 8, 8], [False, True]))
def test_rounding_uses_so_many_levels_and_no_more_than_half_a_step(bits, symmetric) -> None:
    x = torch.randn(5, 400, dtype=torch.float64)
    rounded = quantizers.fake_quantize(x, bits, symmetric)
    span = (
        2 * x.abs().amax(-1) / (2**bits - 2)
        if symmetric
        else (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
    )
    assert ((rounded - x).abs().amax(-1) <= span / 2 + 1e-12).all()
    for row in rounded:
        assert len(row.mul(1e9).round().unique()) <= 2**bits
    constant = torch.full((2, 3), 0.7)
    torch.testing.assert_close(quantizers.fake_quantize(constant, bits, symmetric), constant)
    assert torch.equal(quantizers.fake_quantize(0 * constant, bits, symmetric), 0 * constant)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("weight_bits", [None, 4])
def test_gradients_are_those_of_the_surrogate_without_rounding(
    symmetric: bool, weight_bits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (batch, *_) = prepared(torch.float64, bias=True), tokens()
    model.requires_grad_(False)
    wanted = logits(model, batch).log_softmax(-1)
    start = haar(model)
    matrices = [m.double().requires_grad_() for m in (start.residual, *start.heads)]
    found = Rotations(matrices[0], matrices[1:])
    options = {"rotations": found, "weight_bits": weight_bits, "symmetric": symmetric}

    def loss() -> Tensor:
        with rotations.quantized(model, **options):
            value = model(batch).logits.log_softmax(-1)
        return (wanted.exp() * (wanted - value)).sum(-1).mean()

    assert_its_gradients(loss, matrices, monkeypatch, rel=1e-5)


# ---- learning ------------------------------------------------------------------------------------


TRAININGS: list[dict[str, Any]] = [
    {},
    {"symmetric": True, "weight_bits": 4},
    {"loss": "ce"},
    {"loss": "kl"},
    {"loss": "kl", "top_k": 5},
    {"loss": "kl", "symmetric": True},
    {"loss": "kl", "weight_bits": 4},
]


@pytest.mark.parametrize(
    ("start", "options"), in_turn([rotations.hadamard, haar, identity], TRAININGS)
)
def test_every_start_trains_and_none_ends_worse(start: Callable[..., Rotations], options) -> None:
    model, data = prepared(), tokens(2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    begun = start(model)
    found = rotations.learn(
        model, data, start=begun, steps=12, lr=0.1, activation_bits=3, progress=False, **options
    )
    assert len(found.log) == 12
    assert max(entry["orthonormality"] for entry in found.log) < 1e-6
    assert mean_loss(model, data, found, options) <= mean_loss(model, data, begun, options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert all("forward" not in module.__dict__ for module in model.modules())


def mean_loss(model: nn.Module, data: list[Tensor], found: Rotations, options: dict) -> float:
    """The loss of `learn`, from its definition."""
    if options.get("loss", "noise") == "noise":
        once = {**options, "activation_bits": 3, "steps": 1, "progress": False}
        return float(rotations.learn(model, data, start=found, lr=1e-12, **once).log[0]["loss"])
    losses = []
    bits = {name: options[name] for name in ("symmetric", "weight_bits") if name in options}
    for batch in data:
        exact = logits(model, batch)
        with rotations.quantized(model, rotations=found, activation_bits=3, **bits):
            rounded = logits(model, batch)
        if options.get("loss") == "ce":
            flat = rounded[:, :-1].flatten(0, 1)
            losses.append(nn.functional.cross_entropy(flat, batch[:, 1:].flatten()))
            continue
        if "top_k" in options:
            index = exact.topk(options["top_k"]).indices
            exact, rounded = exact.gather(-1, index), rounded.gather(-1, index)
        p, q = exact.log_softmax(-1), rounded.log_softmax(-1)
        losses.append((p.exp() * (p - q)).sum(-1).mean())
    return float(torch.stack(losses).mean())


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_learning_learns_where_no_graph_is_recorded(context: Any) -> None:
    model, data = prepared(), tokens()
    expected = rotations.learn(model, data, steps=4, progress=False)
    with context():
        found = rotations.learn(model, data, steps=4, progress=False)
    assert [entry["loss"] for entry in found.log] == [entry["loss"] for entry in expected.log]


def test_learning_narrows_the_rounding_of_loud_channels() -> None:
    model, data = prepared(), tokens(4, batch=4)
    begun = identity(model)
    for loss in ("noise", "kl"):
        found = rotations.learn(
            model, data, start=begun, steps=60, lr=0.1, loss=loss, progress=False
        )
        divergence = {"loss": "kl"}
        before, after = (mean_loss(model, data, given, divergence) for given in (begun, found))
        assert after < 0.75 * before


def test_noise_is_what_rounding_adds_to_many_rows_and_has_its_gradient() -> None:
    x = torch.randn(2000, 64, dtype=torch.float64)
    for symmetric in (False, True):
        rounded = quantizers.fake_quantize(x, 4, symmetric)
        added = ((rounded - x).square().mean(-1) / x.square().mean(-1)).mean()
        expected = quantizers.noise_ratio(x, 4, symmetric)
        torch.testing.assert_close(added, expected, rtol=0.05, atol=0)
    model, data = prepared(torch.float64), tokens(1)
    start = haar(model)
    slopes: list[Tensor] = []

    class Recorder(so.StiefelSGD):
        def step(self, closure: Any = None) -> None:  # noqa: ARG002
            slopes.extend(p.grad.clone() for group in self.param_groups for p in group["params"])

    def noise(begun: Rotations) -> float:
        options = {"loss": "noise", "steps": 1, "progress": False}
        found = rotations.learn(
            model, data, start=begun, optimizer=lambda given: Recorder(given, lr=1.0), **options
        )
        return found.log[0]["loss"]

    noise(start)
    gradient = slopes[0].double()
    skew = torch.randn(WIDTH, WIDTH)
    skew = skew - skew.mT
    turns = [torch.linalg.matrix_exp(sign * 1e-3 * skew) for sign in (1, -1)]
    values = [noise(dataclasses.replace(start, residual=start.residual @ turn)) for turn in turns]
    slope = float((gradient * (start.residual @ skew).double()).sum())
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(slope, rel=0.02, abs=1e-4)


@pytest.mark.parametrize(
    "method", [so.StiefelSGD, so.StiefelMuon, so.CayleyAdam, so.ProjectedRGD, SGDG]
)
def test_other_optimizers_are_a_function_of_the_rotations(method: Any) -> None:
    model, data = prepared(), tokens()
    found = rotations.learn(
        model, data, steps=30, progress=False, optimizer=lambda given: method(given, lr=0.1)
    )
    assert len(found.log) == 30
    assert max(entry["orthonormality"] for entry in found.log) < 1e-6
    assert not torch.equal(found.residual, rotations.hadamard(model).residual)


def test_what_gets_worse_is_not_returned() -> None:
    model, data = prepared(), tokens()
    begun = rotations.hadamard(model)
    found = rotations.learn(
        model,
        data,
        start=begun,
        steps=len(data) + 1,
        progress=False,
        optimizer=lambda given: so.StiefelSGD(given, lr=10.0, maximize=True),
    )
    assert found.log[-1]["loss"] > found.log[0]["loss"]
    assert_same(found, begun)


def test_checkpointed_layers_and_dicts_with_masks_give_the_same_steps() -> None:
    model, data = prepared(), tokens()
    masked = [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in data]
    options = {"steps": 4, "loss": "kl", "progress": False}
    plain = rotations.learn(model, data, **options)
    other = rotations.learn(model, masked, **options, gradient_checkpointing=True)
    torch.testing.assert_close(other.residual, plain.residual)
    assert [e["loss"] for e in other.log] == pytest.approx([e["loss"] for e in plain.log])


def test_half_precision_models_have_float32_rotations() -> None:
    model, data = prepared(torch.bfloat16), tokens()
    found = rotations.learn(model, data, steps=3, progress=False)
    assert found.residual.dtype == torch.float32
    assert max(entry["orthonormality"] for entry in found.log) < 1e-6
    rotations.fold_(model, found)
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("loss", "passes"), [("kl", 60), ("noise", 20)])
def test_stopped_training_goes_on_bit_for_bit(loss: str, passes: int, tmp_path: Path) -> None:
    data = tokens()
    options = {"steps": 25, "progress": False, "loss": loss}
    whole = rotations.learn(prepared(), data, checkpoint=tmp_path / "whole.pt", **options)

    model, count = prepared(), 0

    def stop(*_: object) -> None:
        nonlocal count
        count += 1
        if count > passes:
            raise InterruptedError

    handle = model.register_forward_hook(stop)
    with pytest.raises(InterruptedError):
        rotations.learn(model, data, checkpoint=tmp_path / "stopped.pt", **options)
    handle.remove()
    resumed = rotations.learn(model, data, checkpoint=tmp_path / "stopped.pt", **options)
    assert count == passes + 1
    assert_same(resumed, whole)
    assert [e["loss"] for e in resumed.log] == [e["loss"] for e in whole.log]


@pytest.mark.parametrize(
    "options", [{}, {"symmetric": True}, {"weight_bits": 4, "weight_group": 4}], ids=str
)
def test_noise_of_tokens_that_the_mask_leaves_out_does_not_count(options) -> None:
    model = prepared()
    start = Rotations(torch.eye(WIDTH), [torch.eye(HEAD)] * 2)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = mask[1, 2:] = 0
    found = []
    for padding in (0, 5):
        (ids,) = tokens(1)
        batch = {"input_ids": ids.where(mask.bool(), padding), "attention_mask": mask}
        options = {"start": start, "steps": 5, "progress": False, **options}
        found.append(rotations.learn(model, [batch], **options))
    torch.testing.assert_close(found[0].residual, found[1].residual)
    torch.testing.assert_close(found[0].heads[0], found[1].heads[0])
    assert found[0].log[0]["loss"] == pytest.approx(found[1].log[0]["loss"])


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(2, 9), "must select at least one token, got zeros; leave the batch out"),
        (torch.ones(9), r"must be a tensor \(2, 9\), as input_ids, got shape \(9,\)"),
        ([[1] * 9] * 2, r"must be a tensor \(2, 9\), as input_ids, got list"),
    ],
)
def test_masks_are_checked(mask, message) -> None:
    first, second = tokens(2)
    batches = [first, {"input_ids": second, "attention_mask": mask}]
    with pytest.raises(ValueError, match=r"`batches\[1\]\['attention_mask'\]` " + message):
        rotations.learn(prepared(), batches, progress=False)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield tokens(1)[0]


@pytest.mark.parametrize(
    "endless",
    [
        lambda: itertools.cycle(tokens()),
        lambda: itertools.repeat({"input_ids": tokens()[0]}),
        Stream,
        lambda: torch.utils.data.DataLoader(Stream(), batch_size=None),
    ],
)
def test_endless_batches_need_steps(endless, monkeypatch) -> None:
    monkeypatch.setattr(learning, "MOST", 40)
    model = prepared()
    assert len(rotations.learn(model, endless(), steps=2, progress=False).log) == 2
    with pytest.raises(ValueError, match=r"must come to an end, got more than 40 .* pass steps"):
        rotations.learn(model, endless(), progress=False)


def test_a_long_list_needs_no_steps(monkeypatch) -> None:
    monkeypatch.setattr(learning, "MOST", 4)
    monkeypatch.setattr(learning, "STEPS", 1)
    data = tokens(2) * 3
    assert len(rotations.learn(prepared(), data, progress=False).log) == 6
    assert len(rotations.learn(prepared(), iter(data[:4]), progress=False).log) == 4


def test_rotations_are_plain_data(tmp_path: Path) -> None:
    model = prepared()
    found = rotations.learn(model, tokens(), steps=2, progress=False)
    found.save(tmp_path / "found.pt")
    assert isinstance(torch.load(tmp_path / "found.pt", weights_only=True), dict)
    again = Rotations.load(tmp_path / "found.pt")
    assert_same(again, found)
    assert again.online == found.online == ("R4",)
    assert list(again.log) == list(found.log)
    torch.save({"other": 1}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="must hold rotations"):
        Rotations.load(tmp_path / "other.pt")


# ---- errors --------------------------------------------------------------------------------------


class Shifted(type(TinyDecoder().model.norm)):  # type: ignore[misc]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


def edited(path: str, name: str, value: Callable[[Any], Any], **options: Any) -> Any:
    """What makes a decoder of which one attribute is another."""

    def make() -> TinyDecoder:
        model = TinyDecoder(**options)
        setattr(operator.attrgetter(path)(model), name, value(model))
        return model

    return make


integers = nn.Parameter(torch.ones(WIDTH // 2, WIDTH, dtype=torch.int8), requires_grad=False)
SHARED = "model.layers.1.mlp.up_proj", "weight", lambda m: m.model.layers[0].mlp.up_proj.weight


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: nn.Linear(2, 2),
            ValueError,
            "Llama-like decoder with .* got a Linear without model.embed_tokens",
        ),
        (lambda: "model", TypeError, "`model` must be a torch.nn.Module"),
        (
            edited("model.layers.1.mlp", "gate_proj", lambda _: None),
            ValueError,
            "without model.layers.1.mlp.gate_proj",
        ),
        (
            edited("model.layers.0.self_attn", "sub_norm", lambda _: nn.LayerNorm(WIDTH)),
            ValueError,
            "`model.layers.0.self_attn` must have no modules but .* got sub_norm",
        ),
        (
            edited(*SHARED),
            ValueError,
            "`model.layers.0.mlp.up_proj.weight` must not be shared",
        ),
        (
            edited(*SHARED, tied=True),
            ValueError,
            "must not be shared, got shared with model.layers.1.mlp.up_proj.weight",
        ),
        (
            edited("model", "norm", lambda _: nn.LayerNorm(WIDTH)),
            ValueError,
            "`model.norm` must be an RMSNorm",
        ),
        (
            edited("model", "norm", lambda _: Shifted()),
            ValueError,
            "`model.norm` must multiply by its weight",
        ),
        (
            edited("model.layers.0.self_attn.k_proj", "weight", lambda _: integers),
            TypeError,
            r"`model.layers.0.self_attn.k_proj.weight` must not be quantised",
        ),
        (
            edited("config", "quantization_config", lambda _: {"quant_method": "gptq"}),
            TypeError,
            "must not be quantised, got config.quantization_config of gptq",
        ),
        (prepared, ValueError, "must not be prepared yet, got a model that is prepared"),
    ],
)
def test_preparing_names_the_module_and_changes_nothing(make, kind, message) -> None:
    model = make()
    before = copy.deepcopy(model.state_dict()) if isinstance(model, nn.Module) else {}
    with pytest.raises(kind, match=message):
        rotations.prepare_(model)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"activation_bits": 1}, ValueError, r"`activation_bits` must be in \[2, 16\], got 1"),
        ({"weight_bits": 17}, ValueError, r"`weight_bits` must be in \[2, 16\], got 17"),
        ({"kv_bits": 4.0}, TypeError, r"`kv_bits` must be an integer in \[2, 16\], got 4.0"),
        (
            {"weight_group": 4},
            ValueError,
            "`weight_group` must be None where weight_bits is, got 4",
        ),
        (
            {"weight_bits": 4, "weight_group": 8},
            ValueError,
            "`weight_group` must divide the 12 inputs of model.layers.0.self_attn.q_proj, got 8",
        ),
        ({"weight_bits": 4, "weight_group": 1}, ValueError, "`weight_group` must be at least 2"),
        ({"activation_bits": None}, ValueError, "`activation_bits` must be given"),
        ({"symmetric": 1}, TypeError, "`symmetric` must be True or False"),
        ({"loss": "mse"}, ValueError, "`loss` must be one of"),
        ({"loss": "kl", "top_k": 0}, ValueError, "`top_k` must be a positive integer or None"),
        ({"loss": "ce", "top_k": 3}, ValueError, "`top_k` must be None"),
        ({"steps": 0}, ValueError, "`steps` must be a positive integer or None"),
        ({"lr": -1.0}, ValueError, "`lr` must be in"),
        ({"optimizer": 3}, TypeError, "`optimizer` must be a function"),
        ({"optimizer": lambda _: 3}, TypeError, "`optimizer` must return .*Optimizer, got int; "),
        ({"lr": 0.1, "optimizer": so.StiefelAdam}, ValueError, "`lr` must be None where"),
        (
            {"batches": torch.zeros(2, 3).long()},
            TypeError,
            "`batches` must be an iterable .* got Tensor",
        ),
        ({"batches": []}, ValueError, "`batches` must hold at least one batch"),
        ({"batches": ["text"]}, TypeError, r"`batches\[0\]` must be token ids .* got str"),
        (
            {"batches": [*tokens(1), torch.zeros(2, 3)]},
            TypeError,
            r"`batches\[1\]` must be token ids .* got \(2, 3\) of torch.float32",
        ),
        ({"start": torch.eye(WIDTH)}, TypeError, "`start` must be Rotations"),
        (
            {"start": Rotations(torch.eye(WIDTH), [])},
            ValueError,
            "`start.heads` must have one matrix",
        ),
        (
            {"start": Rotations(torch.eye(3), [torch.eye(HEAD)] * 2)},
            ValueError,
            "`start.residual` must be 12 x 12",
        ),
        (
            {"start": Rotations(2 * torch.eye(WIDTH), [torch.eye(HEAD)] * 2)},
            ValueError,
            "`start.residual` must be orthogonal",
        ),
        (
            {"start": Rotations(torch.eye(WIDTH), [torch.eye(HEAD)] * 2, ("R5",))},
            ValueError,
            r"`start.online` must be among \['R3', 'R4'\]",
        ),
        (
            {"kv_bits": 4},
            ValueError,
            "`model.layers.0.self_attn` must have heads of a size .* for R3, got 6",
        ),
    ],
)
def test_learning_names_what_is_wrong(options, kind, message) -> None:
    model = prepared()
    options = {"batches": tokens(), "progress": False, **options}
    with pytest.raises(kind, match=message):
        rotations.learn(model, **options)
    assert all(not module._forward_hooks for module in model.modules())


def test_key_caches_need_the_attention_of_transformers() -> None:
    model = prepared()
    start = rotations.hadamard(model)
    with (
        pytest.raises(ValueError, match="choose its attention by its config, got a TinyDecoder"),
        rotations.quantized(model, rotations=start, kv_bits=4),
    ):
        pass
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_states_out_of_order_are_refused() -> None:
    model = TinyDecoder()
    start = rotations.hadamard(model)
    for call in (
        lambda: rotations.learn(model, tokens(), progress=False),
        lambda: rotations.fold_(model, start),
        lambda: rotations.quantized(model, rotations=start).__enter__(),
    ):
        with pytest.raises(ValueError, match=r"must be prepared, .* call rotations.prepare_"):
            call()
    with pytest.raises(ValueError, match=r"must be folded, got one that is without"):
        rotations.load_online_(model)
    rotations.fold_(rotations.prepare_(model), start)
    with pytest.raises(ValueError, match="must be prepared, got one that is folded"):
        rotations.fold_(model, start)
    model.config.stiefel_rotations["online"] = ["R7"]
    with pytest.raises(ValueError, match=r"must be among \['R3', 'R4'\]"):
        rotations.load_online_(model)
    for given, message in (({"seed": -1}, "`seed` must be"), ({"online": "R4"}, "`online` must")):
        with pytest.raises(ValueError, match=message):
            rotations.hadamard(TinyDecoder(), **given)
    with pytest.raises(TypeError, match="`residual` must be True or False, got None"):
        rotations.hadamard(TinyDecoder(), residual=None)
