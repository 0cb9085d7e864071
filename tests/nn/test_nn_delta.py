"""The chunk-wise delta product against its loop, its bounds, and what it can track exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import in_turn
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from stiefel_opt.nn import DeltaProduct, delta_product

Inputs = dict[str, Tensor]

# leading dimensions, T, h, d, e, chunk size
SHAPES = {
    "heads": ((2, 3), 37, 2, 8, 5, 8),
    "unbatched": ((), 10, 3, 4, 4, None),
    "whole-chunks": ((1,), 64, 1, 16, 16, 16),
    "one-token-chunks": ((2,), 5, 2, 6, 3, 1),
    "one-token": ((2,), 1, 4, 6, 3, None),
    "more-factors-than-a-chunk": ((), 3, 70, 5, 2, None),
}
every_gate = pytest.mark.parametrize("gate", [False, True], ids=["plain", "gate"])


def inputs(
    shape: str, gate: bool, start: bool, generator: torch.Generator, dtype=torch.float64
) -> tuple[Inputs, int | None]:
    lead, length, factors, size, width, chunk = SHAPES[shape]

    def random(*own: int) -> Tensor:
        return torch.randn(*lead, *own, generator=generator, dtype=torch.float64)

    found = {
        "queries": random(length, size),
        "keys": normalize(random(length, factors, size), dim=-1),
        "values": random(length, factors, width),
        "strengths": 2.0 * torch.sigmoid(2.0 * random(length, factors)),
    }
    if gate:
        found["log_gate"] = logsigmoid(random(length))
    if start:
        found["state"] = random(size, width)
    return {name: tensor.to(dtype) for name, tensor in found.items()}, chunk


def loop(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    log_gate: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one factor matrix I - b k k' after the other."""
    size, width = keys.size(-1), values.size(-1)
    identity = torch.eye(size, dtype=keys.dtype)
    if state is None:
        state = keys.new_zeros(*keys.shape[:-3], size, width)
    outputs = []
    for token in range(keys.size(-3)):
        if log_gate is not None:
            state = log_gate[..., token, None, None].exp() * state
        for j in range(keys.size(-2)):
            key, value = keys[..., token, j, :, None], values[..., token, j, :, None]
            strength = strengths[..., token, j, None, None]
            state = (identity - strength * key @ key.mT) @ state + strength * key @ value.mT
        outputs.append((state.mT @ queries[..., token, :, None]).squeeze(-1))
    return torch.stack(outputs, dim=-2), state


@pytest.mark.parametrize(
    ("shape", "gate", "start"),
    in_turn([*SHAPES, "heads"], [False, True, True, False], [True, False]),
)
def test_equals_the_loop_with_its_gradients(shape, gate, start, generator):
    arguments, chunk = inputs(shape, gate, start, generator)
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]
    found = delta_product(**arguments, chunk_size=chunk)
    expected = loop(**arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    weights = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in found]

    def gradients(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        loss = sum((part * weight).sum() for part, weight in zip(results, weights, strict=True))
        return torch.autograd.grad(loss, leaves)

    torch.testing.assert_close(gradients(found), gradients(expected), rtol=0, atol=1e-10)


@every_gate
def test_gradients_of_both_orders(gate, generator):
    lead, length, factors, size, width = (), 3, 2, 3, 2

    def random(*own: int) -> Tensor:
        return torch.randn(*lead, *own, generator=generator, dtype=torch.float64)

    arguments = [
        random(length, size),
        random(length, factors, size),
        random(length, factors, width),
    ]
    arguments += [torch.sigmoid(random(length, factors)), random(size, width)]
    arguments += [logsigmoid(random(length))] if gate else []

    def function(queries, keys, values, strengths, state, log_gate=None):
        return delta_product(
            queries, keys, values, strengths, log_gate=log_gate, state=state, chunk_size=2
        )

    leaves = [tensor.requires_grad_() for tensor in arguments]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_stay_close_and_keep_a_float32_state(dtype, generator):
    arguments, _ = inputs("heads", True, True, generator, dtype)
    outputs, state = delta_product(**arguments)
    exact, exact_state = delta_product(**{name: t.double() for name, t in arguments.items()})
    assert outputs.dtype == dtype
    assert state.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(outputs.double(), exact, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), exact_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [2, 5, 12])
def test_gates_of_zero_forget_and_lose_no_digit_after(chunk, generator):
    arguments, _ = inputs("heads", True, True, generator)
    gate = arguments["log_gate"]
    gate[..., 0] = gate[..., 3] = gate[..., 4] = -torch.inf
    gate[..., 7] = -1e30
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]
    found, expected = delta_product(**arguments, chunk_size=chunk), loop(**arguments)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(outputs.sum() + state.square().sum(), leaves, allow_unused=True)
        for outputs, state in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-10)


def test_extreme_gates_do_not_overflow(generator):
    arguments, _ = inputs("heads", True, True, generator, torch.float32)
    arguments["log_gate"] = 40.0 * arguments["log_gate"]  # products below the smallest float32
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]
    outputs, state = delta_product(**arguments, chunk_size=37)
    gradients = torch.autograd.grad(outputs.sum() + state.sum(), leaves)
    assert all(bool(tensor.isfinite().all()) for tensor in (outputs, state, *gradients))


def test_no_transition_enlarges_the_state(generator):
    arguments, _ = inputs("heads", True, True, generator)
    arguments["values"] = torch.zeros_like(arguments["values"])
    start, _, norms = arguments["state"], None, []
    for token in range(SHAPES["heads"][1]):
        part = {
            name: tensor.narrow(2, token, 1) if name != "state" else tensor
            for name, tensor in arguments.items()
        }
        _, arguments["state"] = delta_product(**part)
        norms.append(torch.linalg.matrix_norm(arguments["state"], ord=2))
    first = torch.linalg.matrix_norm(start, ord=2)
    for before, after in itertools.pairwise([first, *norms]):
        assert bool((after <= before * (1 + 1e-14)).all())


def test_writing_adds_at_most_the_length_of_what_is_written(generator):
    arguments, chunk = inputs("heads", True, True, generator)
    _, state = delta_product(**arguments, chunk_size=chunk)
    written = arguments["strengths"] * torch.linalg.vector_norm(arguments["values"], dim=-1)
    bound = torch.linalg.matrix_norm(arguments["state"], ord=2) + written.sum(dim=(-2, -1))
    assert bool((torch.linalg.matrix_norm(state, ord=2) <= bound).all())


def test_reflections_keep_every_singular_value_over_many_tokens(generator):
    length, size = 5000, 8
    keys = normalize(torch.randn(length, 2, size, generator=generator), dim=-1)
    start = torch.randn(size, size, generator=generator)
    _, state = delta_product(
        torch.zeros(length, size),
        keys,
        torch.zeros(length, 2, size),
        torch.full((length, 2), 2.0),
        state=start,
    )
    torch.testing.assert_close(
        torch.linalg.svdvals(state), torch.linalg.svdvals(start), rtol=1e-3, atol=1e-3
    )


# ---- the module --------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "gate": {"gate": True},
    "heads": {"num_heads": 3, "bias": True, "chunk_size": 4},
    "sizes": {"num_heads": 2, "num_factors": 3, "head_dim": 5, "value_dim": 2, "gate": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def module(options: dict[str, object]) -> DeltaProduct:
    return DeltaProduct(12, **options).double()  # type: ignore[arg-type]


@every_option
def test_module_runs_token_by_token_and_without_batch_alike(options, generator):
    layer = module(options)
    tokens = torch.randn(2, 9, 12, generator=generator, dtype=torch.float64)
    outputs, state = layer(tokens)
    assert outputs.shape == tokens.shape
    assert state.shape == (2, layer.num_heads, layer.head_dim, layer.value_dim)
    one_by_one, carried = [], None
    for token in tokens.unbind(1):
        output, carried = layer(token.unsqueeze(1), carried)
        one_by_one.append(output)
    torch.testing.assert_close(torch.cat(one_by_one, dim=1), outputs)
    torch.testing.assert_close(carried, state)
    torch.testing.assert_close(layer(tokens[1]), (outputs[1], state[1]))


@every_option
def test_module_is_causal_and_trains_every_parameter(options, generator):
    layer = module(options)
    tokens = torch.randn(2, 9, 12, generator=generator, dtype=torch.float64)
    changed = tokens.clone()
    changed[:, 5:] += 1.0
    assert torch.equal(layer(tokens)[0][:, :5], layer(changed)[0][:, :5])
    layer(tokens)[0].square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in layer.parameters())


def test_module_survives_zero_tokens():
    layer = DeltaProduct(8, 2, gate=True)
    tokens = torch.zeros(1, 4, 8, requires_grad=True)
    outputs, state = layer(tokens)
    (outputs.sum() + state.sum()).backward()
    assert bool(tokens.grad.isfinite().all())
    assert not bool(outputs.any())


def test_module_under_autocast_keeps_the_state_in_float32(generator):
    layer = DeltaProduct(8, 2)
    tokens = torch.randn(2, 6, 8, generator=generator)
    exact, exact_state = layer(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, state = layer(tokens)
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, exact_state, rtol=5e-2, atol=5e-2)
    torch.testing.assert_close(outputs.float(), exact, rtol=5e-2, atol=5e-2)


def test_state_does_not_grow_in_bfloat16(generator):
    """With keys normalised in bfloat16 it would grow by a fifth."""
    layer = DeltaProduct(8, 1)
    with torch.no_grad():
        layer.b_proj.bias.fill_(30.0)  # reflections
        layer.v_proj.weight.zero_()
    tokens = torch.randn(2000, 8, generator=generator)
    start = torch.randn(1, 8, 8, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer(tokens, start)
    torch.testing.assert_close(
        torch.linalg.svdvals(state), torch.linalg.svdvals(start), rtol=1e-3, atol=1e-3
    )


# ---- errors ------------------------------------------------------------------------------------


WRONG_INPUT = [
    ({"strengths": torch.full((4, 2), 2.5)}, r"`strengths` must lie in \[0, 2\], got \[2.5"),
    ({"strengths": torch.full((4, 2), -0.1)}, r"`strengths` must lie in \[0, 2\]"),
    ({"strengths": torch.full((4, 2), torch.nan)}, r"`strengths` must lie in \[0, 2\]"),
    ({"strengths": torch.ones(4)}, r"`strengths` must have shape \(4, 2\)"),
    ({"queries": torch.ones(4, 5)}, r"`queries` must have shape \(4, 3\)"),
    ({"values": torch.ones(4, 5)}, r"`values` must have shape \(4, 2, 5\)"),
    ({"log_gate": torch.zeros(3)}, r"`log_gate` must have shape \(4,\)"),
    ({"state": torch.zeros(3, 6)}, r"`state` must have shape \(3, 5\)"),
    ({"keys": torch.zeros(4, 3)}, r"`keys` must have shape \(..., T, h, d\)"),
    ({"keys": torch.zeros(0, 2, 3)}, r"`keys` must have shape \(..., T, h, d\), none"),
    ({"log_gate": torch.full((4,), 0.5)}, "`log_gate` must be at most 0, got 0.5"),
    ({"chunk_size": 0}, r"`chunk_size` must be a positive integer or None, got 0"),
]


def test_wrong_input_is_named():
    for change, message in WRONG_INPUT:
        good = {
            "queries": torch.ones(4, 3),
            "keys": torch.ones(4, 2, 3),
            "values": torch.ones(4, 2, 5),
            "strengths": torch.ones(4, 2),
        }
        with pytest.raises(ValueError, match=message):
            delta_product(**{**good, **change})


WRONG_OPTIONS = [
    ({"num_heads": 5}, "`num_heads` must divide embed_dim = 12, got 5"),
    ({"num_factors": 0}, "`num_factors` must be a positive integer, got 0"),
    ({"head_dim": 2.0}, "`head_dim` must be a positive integer or None, got 2.0"),
]


def test_wrong_options_are_named():
    for options, message in WRONG_OPTIONS:
        with pytest.raises(ValueError, match=message):
            DeltaProduct(12, **options)
        with pytest.raises(ValueError, match=r"`input` must have shape \(..., T, 12\) with T > 0"):
            DeltaProduct(12)(torch.zeros(3, 4))
