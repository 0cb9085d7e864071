"""Rotations learned as in SpinQuant: its way to call `SGDG`, with the class of `compat`.

R1 turns the residual stream, one R2 for each layer the values of every head. Weights are multiplied
by them before they are rounded to four bits; without rounding the model would not change, so the
gradient of the rotations is that of the rounding error. Everything else is frozen.
"""

from __future__ import annotations

import torch
from loops import HALF, ROUNDING, assert_equal, batches, loop, loss_of_output, tokens
from torch import Tensor, nn
from trainers import linear, trainer
from transformers import LlamaConfig, LlamaForCausalLM

import stiefel_opt as so
from stiefel_opt.compat import SGDG

WIDTH, HEADS = 32, 4


class Rotation(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        hadamard = torch.ones(1, 1)
        while len(hadamard) < size:
            hadamard = torch.cat(
                [torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)]
            )
        self.weight = nn.Parameter(hadamard / size**0.5)


class RotatedLinear(nn.Module):
    """A frozen layer whose weight is turned, rounded to four bits, and turned back."""

    def __init__(self, layer: nn.Linear, ahead: nn.Module | None, behind: nn.Module | None) -> None:
        super().__init__()
        self.layer = layer
        self.rotations = [ahead, behind]  # a list, so that each rotation is registered once

    def forward(self, x: Tensor) -> Tensor:
        ahead, behind = self.rotations
        weight = self.layer.weight
        if ahead is not None:
            weight = weight @ ahead.weight
            x = x @ ahead.weight
        if behind is not None:
            blocks = weight.unflatten(0, (-1, len(behind.weight)))
            weight = (behind.weight.mT @ blocks).flatten(0, 1)
        step = weight.detach().abs().amax(1, keepdim=True) / 7
        rounded = weight + (torch.round(weight / step) * step - weight).detach()
        y = x @ rounded.mT
        if behind is not None:
            y = (y.unflatten(-1, (-1, len(behind.weight))) @ behind.weight.mT).flatten(-2)
        return y


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    model.R1 = Rotation(WIDTH)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.R2 = Rotation(WIDTH // HEADS)
        attention.q_proj = RotatedLinear(attention.q_proj, model.R1, None)
        attention.k_proj = RotatedLinear(attention.k_proj, model.R1, None)
        attention.v_proj = RotatedLinear(attention.v_proj, model.R1, attention.R2)
        mlp.gate_proj = RotatedLinear(mlp.gate_proj, model.R1, None)
        mlp.up_proj = RotatedLinear(mlp.up_proj, model.R1, None)
    return model


def rotations(model: LlamaForCausalLM) -> list[nn.Parameter]:
    layers = model.model.layers
    return [model.R1.weight] + [layer.self_attn.R2.weight for layer in layers]


def test_rotations_of_spinquant_train_and_resume(tmp_path):
    plain = build()
    optimizer = SGDG(rotations(plain), lr=1.5, stiefel=True)
    losses = loop(plain, optimizer, batches(tokens()), loss_of_output, linear(optimizer))
    for found, start in zip(rotations(plain), rotations(build()), strict=True):
        assert (found - start).abs().max() > 1e-4
        assert so.orthonormality_error(found) < ROUNDING
    assert all(torch.isfinite(torch.tensor(losses)))

    undisturbed = build()
    optimizer = SGDG(rotations(undisturbed), lr=1.5, stiefel=True)
    trainer(undisturbed, optimizer, tokens(), tmp_path).train()
    for found, expected in zip(rotations(undisturbed), rotations(plain), strict=True):
        assert so.orthonormality_error(found) < ROUNDING
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)  # rounding is not continuous

    resumed = build()
    optimizer = SGDG(rotations(resumed), lr=1.5, stiefel=True)
    again = trainer(resumed, optimizer, tokens(), tmp_path / "resumed")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_equal(resumed, undisturbed)
