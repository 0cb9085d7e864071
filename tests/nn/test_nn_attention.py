"""Attention with orthonormal queries and keys: torch's module in everything else."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from cases import in_turn, pairwise
from contract import assert_same
from scale_cases import (
    scales,
)
from torch import nn
from training import train

import stiefel_opt as so
from stiefel_opt.nn import MultiheadAttention

WIDTH, HEADS = 12, 3
# options, and the width of the input that becomes keys
OPTIONS = {
    "packed": {},
    "batch-first": {"batch_first": True, "bias": False},
    "key-value-bias": {"add_bias_kv": True, "add_zero_attn": True},
    "narrow-keys": {"kdim": 7, "vdim": 5, "batch_first": True},
    "keys-below-a-head": {"kdim": 2},
}


def attention(constraint: str | None, **options) -> MultiheadAttention:
    return MultiheadAttention(WIDTH, HEADS, constraint=constraint, **options)


def inputs(options, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    lengths, lead = (4, 6, 6), (2,)
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    first = options.get("batch_first", False)
    return tuple(
        torch.randn(*((*lead, length) if first else (length, *lead)), width, generator=generator)
        for length, width in zip(lengths, widths, strict=True)
    )


def query_and_key(module: nn.MultiheadAttention) -> tuple[torch.Tensor, torch.Tensor]:
    if module.in_proj_weight is None:
        return module.q_proj_weight.detach(), module.k_proj_weight.detach()
    return tuple(module.in_proj_weight.detach()[: 2 * WIDTH].split(WIDTH))  # type: ignore[return-value]


def largest_error(module: MultiheadAttention) -> float:
    """Largest |W W' - I| (|W'W - I| of a tall one) over the blocks that must be orthonormal."""
    blocks = HEADS if module.constraint == "within" else 1
    found = []
    for weight in query_and_key(module):
        for block in weight.chunk(blocks):
            wide = block if block.size(0) <= block.size(1) else block.mT
            found.append((wide @ wide.mT - torch.eye(len(wide))).abs().max())
    return float(max(found))


@pytest.mark.parametrize(
    ("options", "constraint", "training"),
    in_turn([*OPTIONS.values()] * 2, ["within", "across", None], [True, False]),
)
def test_results_are_those_of_torch(options, constraint, training, generator):
    ours = attention(constraint, **options).train(training)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options).train(training)
    theirs.load_state_dict(ours.state_dict())
    query, key, value = inputs(options, generator)
    mask = torch.randn(4, 6, generator=generator) > 0.5
    mask[:, 0] = False
    for arguments in ({}, {"attn_mask": mask}, {"need_weights": False}):
        found = ours(query, key, value, **arguments)
        expected = theirs(query, key, value, **arguments)
        assert torch.equal(found[0], expected[0])
        if arguments.get("need_weights", True):
            assert torch.equal(found[1], expected[1])
        else:
            assert found[1] is expected[1] is None


@pytest.mark.parametrize(
    ("options", "constraint"), in_turn([*OPTIONS.values(), {}], ["within", "across"])
)
def test_start_and_training_stay_on_the_manifold_and_the_rest_moves(options, constraint, generator):
    module = attention(constraint, **options)
    assert largest_error(module) < 1e-5
    assert largest_error(attention(constraint, dtype=torch.float64, **options)) < 1e-14
    before = copy.deepcopy(module.state_dict())
    optimizer = so.StiefelAdam(module.parameters(), lr=0.05)
    train(optimizer, lambda: module(*inputs(options, generator))[0].square().sum(), 5)
    assert largest_error(module) < 1e-5
    for name, value in module.state_dict().items():
        assert not torch.equal(value, before[name]), name


def test_what_is_tagged():
    within = attention("within").in_proj_weight.manifold
    assert within == so.Stiefel(rows=((0, WIDTH), (WIDTH, 2 * WIDTH)), heads=HEADS)
    across = attention("across").in_proj_weight.manifold
    assert across == so.Stiefel(rows=((0, WIDTH), (WIDTH, 2 * WIDTH)), heads=1)
    assert type(attention(None).in_proj_weight) is nn.Parameter
    separate = attention("within", kdim=7)
    assert separate.q_proj_weight.manifold == separate.k_proj_weight.manifold
    assert type(separate.v_proj_weight) is nn.Parameter


@pytest.mark.parametrize(
    ("options", "constraint", "assign"),
    pairwise(OPTIONS.values(), ["within", "across"], [False, True]),
)
def test_state_of_torch_loads_as_its_nearest_point(options, constraint, assign):
    theirs = nn.MultiheadAttention(WIDTH, HEADS, **options)
    ours = attention(constraint, **options)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()), assign=assign)
    assert largest_error(ours) < 1e-5
    blocks = HEADS if constraint == "within" else 1
    for found, loaded in zip(query_and_key(ours), query_and_key(theirs), strict=True):
        for mine, yours in zip(found.chunk(blocks), loaded.chunk(blocks), strict=True):
            left, _, right = torch.linalg.svd(yours, full_matrices=False)
            torch.testing.assert_close(mine, left @ right, rtol=1e-4, atol=1e-4)
    changed = {"in_proj_weight", "q_proj_weight", "k_proj_weight"}
    for name, value in theirs.state_dict().items():
        assert name in changed or torch.equal(ours.state_dict()[name], value)
    if ours.in_proj_weight is not None:
        values = slice(2 * WIDTH, 3 * WIDTH)
        assert torch.equal(ours.in_proj_weight[values], theirs.in_proj_weight[values])
    ours(*inputs(options, torch.Generator().manual_seed(0)))  # nothing has lost its tag
    again = nn.Sequential(attention(constraint, **options))
    again.load_state_dict(nn.Sequential(ours).state_dict())
    assert_same(dict(again[0].state_dict()), dict(ours.state_dict()))


def test_copies_keep_the_constraint():
    module = attention("across")
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.in_proj_weight.manifold == module.in_proj_weight.manifold
        copied.load_state_dict(nn.MultiheadAttention(WIDTH, HEADS).state_dict())
        assert largest_error(copied) < 1e-5


def test_reset_parameters_projects_again():
    module = attention("within")
    before = module.in_proj_weight.detach().clone()
    module._reset_parameters()
    assert not torch.equal(module.in_proj_weight, before)
    assert largest_error(module) < 1e-5


def test_half_precision_loads_for_inference():
    """Orthonormal values as they are rounded; others are projected."""
    module = attention("within")
    half = attention("within").to(torch.bfloat16)
    half.load_state_dict(module.state_dict())
    assert torch.equal(half.in_proj_weight, module.in_proj_weight.to(torch.bfloat16))
    theirs = nn.MultiheadAttention(WIDTH, HEADS).to(torch.bfloat16)
    half.load_state_dict(theirs.state_dict())
    assert not torch.equal(half.in_proj_weight, theirs.in_proj_weight)
    assert largest_error(half) < 2e-2


WRONG_OPTIONS = [
    ((WIDTH, HEADS, "inside"), r"`constraint` must be one of \['across', 'within'\], got"),
    ((WIDTH, 5, "within"), "`num_heads` must divide embed_dim = 12, got 5"),
    ((WIDTH, 0, "within"), "`num_heads` must be a positive integer, got 0"),
    ((12.0, 3, None), "`embed_dim` must be a positive integer, got 12.0"),
]


def test_wrong_options_are_named():
    for arguments, message in WRONG_OPTIONS:
        width, heads, constraint = arguments
        with pytest.raises(ValueError, match=message):
            MultiheadAttention(width, heads, constraint=constraint)


def test_an_attention_layer_learns_a_number_for_each_head() -> None:
    layer = so.nn.MultiheadAttention(16, 4, learn_scale=True)
    opt = so.StiefelAdamW(layer.parameters(), lr=0.01)
    for step in range(5):
        inputs = torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        layer(inputs, inputs, inputs)[0].sum().backward()
        opt.step()
    reading = layer.in_proj_weight.manifold
    found = scales(layer.in_proj_weight, reading)
    assert len(found) == 8
    assert float(found.std()) > 0
    other = so.nn.MultiheadAttention(16, 4, learn_scale=True)
    other.load_state_dict(layer.state_dict())
    assert_same(other.in_proj_weight.detach(), layer.in_proj_weight.detach())
    plain = nn.MultiheadAttention(16, 4)
    so.constrain_attention(plain, learn_scale=True)
    assert plain.in_proj_weight.manifold == reading
