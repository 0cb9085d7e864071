"""A decoder with the module names of transformers' Llama family, in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, KEY_VALUE_HEADS, HEAD, INNER = 23, 12, 4, 2, 6, 20


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.5 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias)
        self.k_proj = nn.Linear(WIDTH, KEY_VALUE_HEADS * HEAD, bias)
        self.v_proj = nn.Linear(WIDTH, KEY_VALUE_HEADS * HEAD, bias)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias)
        self.head_dim = HEAD

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD)).transpose(-2, -3)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(-2, -3).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias)
        self.up_proj = nn.Linear(WIDTH, INNER, bias)
        self.down_proj = nn.Linear(INNER, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(bias), Mlp(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class TinyDecoder(nn.Module):
    """Two blocks; the stream has two loud channels, as those of real models do."""

    def __init__(self, *, bias: bool = False, tied: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.model.layers = nn.ModuleList(Block(bias) for _ in range(layers))
        self.model.norm = Norm()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            self.model.embed_tokens.weight[:, :2] *= 8
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.config = SimpleNamespace(num_attention_heads=HEADS, tie_word_embeddings=tied)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.lm_head(self.model.norm(x)))


def tokens(count: int = 3, batch: int = 2, length: int = 9, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(count)]


def logits(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(batch).logits
    return found
