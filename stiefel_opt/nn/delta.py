r"""Linear recurrences whose transition is a product of generalized Householder factors.

Each token turns and shrinks the state by factors :math:`I - b k k^\top` and writes to it. The
chunk-wise form replaces the loop over tokens by matrix products: inside a chunk all factors are
multiplied by one triangular solve (the UT transform), and only the states between chunks remain
sequential.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize
from typing_extensions import override

from stiefel_opt.errors import HALF, check_count, check_counts, check_flags, fail
from stiefel_opt.numerics import no_autocast, readable
from stiefel_opt.parametrizations import check_strengths

_FACTORS = 64  # in a chunk, by default: the triangular solves then stay small and well batched


def delta_product(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    *,
    log_gate: Tensor | None = None,
    state: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Run the delta rule with ``h`` generalized Householder factors a token, chunk by chunk.

    Token t scales the state by its gate, then applies its factors, the first key first,

    .. math::
        S \leftarrow g_t S, \qquad
        S \leftarrow (I - b_{tj} k_{tj} k_{tj}^\top) S + b_{tj} k_{tj} v_{tj}^\top,
        \quad j = 1, \dots, h, \qquad o_t = S^\top q_t .

    For keys of unit length, b in [0, 2] and gates in [0, 1] no transition enlarges the state.

    Args:
        queries: q, ``(..., T, d)``.
        keys: k, ``(..., T, h, d)``; used as they are, so normalise them before, in float32: in
            bfloat16 a length is off by up to 0.5 %, and the state may grow.
        values: v, ``(..., T, h, e)``.
        strengths: b, ``(..., T, h)``.
        log_gate: Logarithms of the gates, ``(..., T)``, not positive; -inf forgets what was before.
            Default: no gate.
        state: S before the first token, ``(..., d, e)``. Default: zero.
        chunk_size: Tokens in a chunk; the result is the same up to rounding. Default: as many as
            have 64 factors.

    Returns: The outputs o, ``(..., T, e)``, and the state after the last token, ``(..., d, e)``.
    Raises:
        ValueError: for shapes that do not fit, b outside [0, 2], or gates above 1 (both looked at
            on a CPU only).
    Note: With R factors in a chunk T h d (R + d + 2 e) + T R (d + e) + T d e multiplications in
        large products and one triangular solve for all chunks, then one product of d x d by d x e
        for each chunk in turn. Half precision is computed in float32, where the state stays. Never
        divides by b.
    Reference: Siems et al., DeltaProduct (2025), arXiv:2502.10297; Yang et al., Parallelizing
        linear transformers with the delta rule over sequence length (NeurIPS 2024), section 3.
    """
    _check(queries, keys, values, strengths, log_gate, state, chunk_size)
    with no_autocast(values):
        result_dtype = values.dtype
        if result_dtype in HALF:
            queries, keys, values, strengths = (
                tensor.float() for tensor in (queries, keys, values, strengths)
            )
            log_gate = None if log_gate is None else log_gate.float()
            state = None if state is None else state.float()
        length, factors, size = keys.shape[-3:]
        chunk = min(length, chunk_size or max(1, _FACTORS // factors))
        chunks = math.ceil(length / chunk)
        if state is None:
            state = values.new_zeros(*values.shape[:-3], size, values.size(-1), dtype=keys.dtype)

        # (..., chunks, C, d), (..., chunks, C h, d or e); b = 0 in the padding changes nothing.
        query = _in_chunks(queries, -2, chunks, chunk)
        key = _in_chunks(keys.flatten(-3, -2), -2, chunks, chunk * factors)
        value = _in_chunks(values.flatten(-3, -2), -2, chunks, chunk * factors)
        strength = _in_chunks(strengths.flatten(-2, -1), -1, chunks, chunk * factors).unsqueeze(-1)

        overlap, attention = key @ key.mT, query @ key.mT
        token = torch.arange(chunk, device=key.device)
        attention = attention * (token.unsqueeze(-1) >= token.repeat_interleave(factors))
        read_key = written_key = key
        last: Tensor | float = 1.0
        if log_gate is not None:
            gates = _in_chunks(log_gate, -1, chunks, chunk)
            between, to_token, of_token, of_factor, to_last, of_all = _decays(gates, factors)
            overlap, attention = overlap * between, attention * to_token
            query, read_key = query * of_token.unsqueeze(-1), key * of_factor.unsqueeze(-1)
            written_key, last = key * to_last.unsqueeze(-1), of_all.unsqueeze(-1)

        # The factors write u = fresh - seen @ S; (I + tril(diag(b) KK', -1)) u = diag(b) (V - K S).
        both = torch.cat([value, read_key], dim=-1) * strength
        system = strength * overlap
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        fresh, seen = solved.split([value.size(-1), size], dim=-1)

        turn = last * torch.eye(size, dtype=key.dtype, device=key.device)
        turn = turn - written_key.mT @ seen
        before, state = _states(state, turn, written_key.mT @ fresh)
        outputs = query @ before + attention @ (fresh - seen @ before)
        return outputs.flatten(-3, -2)[..., :length, :].to(result_dtype), state


def _states(state: Tensor, turns: Tensor, pushes: Tensor) -> tuple[Tensor, Tensor]:
    """Return S before each chunk, and the last S, for S <- turn S + push."""
    states = [state]
    for turn, push in zip(turns.unbind(-3), pushes.unbind(-3), strict=True):
        states.append(push + turn @ states[-1])
    return torch.stack(states[:-1], dim=-3), states[-1]


def _in_chunks(tensor: Tensor, dim: int, chunks: int, size: int) -> Tensor:
    """Split dimension ``dim`` < 0 into ``(chunks, size)``, the last chunk padded with zeros."""
    if missing := chunks * size - tensor.size(dim):
        tensor = torch.nn.functional.pad(tensor, [0, 0] * (-dim - 1) + [0, missing])
    return torch.unflatten(tensor, dim, (chunks, size))


def _decays(log_gate: Tensor, factors: int) -> tuple[Tensor, ...]:
    """Return products of gates ``(..., chunks, C)`` inside each chunk, all of them at most 1.

    In this order: between two factors, from a factor to a token, from the first token to a token,
    from the first token to a factor, from a factor to the last token, and of the whole chunk.
    """
    # Gates of 0 are counted separately: a sum that holds one says nothing about later tokens.
    shut = log_gate.exp() == 0
    values = readable(shut)
    has_resets = values is None or bool(values.any())
    token = log_gate.masked_fill(shut, 0.0).cumsum(-1), shut.cumsum(-1)
    each = tuple(total.repeat_interleave(factors, dim=-1) for total in token)
    first = tuple(torch.zeros_like(total[..., :1]) for total in token)
    last = tuple(total[..., -1:] for total in token)
    column = tuple(total.unsqueeze(-2) for total in each)

    def decay(late: tuple[Tensor, ...], early: tuple[Tensor, ...]) -> Tensor:
        # Clamped where late precedes early, which is masked: exp must not overflow there.
        product = (late[0] - early[0]).clamp(max=0.0).exp()
        return product.masked_fill(late[1] != early[1], 0.0) if has_resets else product

    return (
        decay(tuple(total.unsqueeze(-1) for total in each), column),
        decay(tuple(total.unsqueeze(-1) for total in token), column),
        decay(token, first),
        decay(each, first),
        decay(last, each),
        decay(last, first),
    )


def _check(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    strengths: Tensor,
    log_gate: Tensor | None,
    state: Tensor | None,
    chunk_size: int | None,
) -> None:
    if keys.ndim < 3 or 0 in keys.shape[-3:]:
        raise ValueError(fail("keys", "have shape (..., T, h, d), none of them 0", keys))
    *lead, length, factors, size = keys.shape
    width = values.size(-1) if values.ndim else 0
    expected = {
        "queries": (queries, (*lead, length, size)),
        "values": (values, (*lead, length, factors, width)),
        "strengths": (strengths, (*lead, length, factors)),
        "log_gate": (log_gate, (*lead, length)),
        "state": (state, (*lead, size, width)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            condition = f"have shape {shape} for keys of shape {tuple(keys.shape)}"
            raise ValueError(fail(name, condition, tensor))
    check_count("chunk_size", chunk_size, or_none=True)
    check_strengths("strengths", strengths)
    gates = None if log_gate is None else readable(log_gate)
    if gates is not None and bool((gates > 0.0).any()):
        highest = f"{float(gates.max()):g}"
        raise ValueError(fail("log_gate", "be at most 0", highest, "use logsigmoid(...)"))


# ---- the module -----------------------------------------------------------------------------

_SHORTEST_KEY = 1e-3  # shorter ones fade out instead of jumping to unit length
_OPEN = 4.0  # initial bias of the gates: sigmoid(4) = 0.98


class DeltaProduct(nn.Module):
    r"""Linear recurrence with a product of generalized Householder factors for each token.

    Every head keeps a d x e state S. Token x gives, by linear maps, a query q, factors of key k,
    value v and strength b, and with ``gate`` a factor g in (0, 1):

    .. math::
        S \leftarrow g S, \qquad S \leftarrow (I - b_j k_j k_j^\top) S + b_j k_j v_j^\top,
        \quad j = 1, \dots, h, \qquad o = S^\top q,

    with unit k and q and :math:`b = 2\,\mathrm{sigmoid}(\cdot)`. A transition has norm at most 1,
    and eigenvalue -1 for h = 1 (parity), rotations for h = 2; h factors can permute h + 1 things.

    Args:
        embed_dim: Width of a token.
        num_heads: Independent recurrences. Default: 1.
        num_factors: Factors for each token, h. The cost grows like h. Default: 2.
        head_dim: Length of a key, d. Default: ``embed_dim / num_heads``.
        value_dim: Length of a value, e. Default: d.
        gate: Whether the state also decays. Default: no.
        bias: Whether the maps to queries, keys, values and outputs have a bias. Default: no.
        chunk_size: Tokens in a chunk, see :func:`stiefel_opt.nn.delta_product`.
        device, dtype: Of the parameters.

    Raises:
        ValueError: for sizes below 1, or, without ``head_dim``, heads that do not divide
            ``embed_dim``.
    Note: In float32 under autocast. A token at a time works too: pass the state on.
    Reference: Siems et al., DeltaProduct (2025), arXiv:2502.10297.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        num_factors: int = 2,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        gate: bool = False,
        bias: bool = False,
        chunk_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_flags(gate=gate, bias=bias)
        check_counts(embed_dim=embed_dim, num_heads=num_heads, num_factors=num_factors)
        sizes = {"chunk_size": chunk_size, "head_dim": head_dim, "value_dim": value_dim}
        check_counts(or_none=True, **sizes)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                fail("num_heads", f"divide embed_dim = {embed_dim}", num_heads, "or pass head_dim")
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_factors = num_factors
        self.head_dim = head_dim or embed_dim // num_heads
        self.value_dim = value_dim or self.head_dim
        self.gate = gate
        self.chunk_size = chunk_size
        factors = num_heads * num_factors
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, device, dtype)
        self.k_proj = nn.Linear(embed_dim, factors * self.head_dim, bias, device, dtype)
        self.v_proj = nn.Linear(embed_dim, factors * self.value_dim, bias, device, dtype)
        self.b_proj = nn.Linear(embed_dim, factors, True, device, dtype)
        self.g_proj = nn.Linear(embed_dim, num_heads, True, device, dtype) if gate else None
        self.out_proj = nn.Linear(num_heads * self.value_dim, embed_dim, bias, device, dtype)
        if self.g_proj is not None:
            nn.init.constant_(self.g_proj.bias, _OPEN)

    @override
    def forward(self, input: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs and the state after the last token.

        Args:
            input: Tokens, ``(..., T, embed_dim)``.
            state: State before the first token, as an earlier call returned it,
                ``(..., num_heads, head_dim, value_dim)``. Default: zero.

        Returns: Outputs ``(..., T, embed_dim)`` and the state, shaped like ``state``.
        """
        if input.ndim < 2 or input.size(-1) != self.embed_dim or input.size(-2) == 0:
            condition = f"have shape (..., T, {self.embed_dim}) with T > 0"
            raise ValueError(fail("input", condition, input))
        queries, keys, values, strengths = (
            projection(input).unflatten(-1, shape).movedim(-len(shape), -len(shape) - 1)
            for projection, shape in (
                (self.q_proj, (self.num_heads, self.head_dim)),
                (self.k_proj, (self.num_heads, self.num_factors, self.head_dim)),
                (self.v_proj, (self.num_heads, self.num_factors, self.value_dim)),
                (self.b_proj, (self.num_heads, self.num_factors)),
            )
        )
        log_gate = None if self.g_proj is None else logsigmoid(self.g_proj(input)).mT
        if values.dtype in HALF:  # lengths must be exact
            queries, keys, strengths = queries.float(), keys.float(), strengths.float()
        outputs, state = delta_product(
            normalize(queries, dim=-1, eps=_SHORTEST_KEY),
            normalize(keys, dim=-1, eps=_SHORTEST_KEY),
            values,
            2.0 * torch.sigmoid(strengths),
            log_gate=log_gate,
            state=state,
            chunk_size=self.chunk_size,
        )
        return self.out_proj(outputs.movedim(-3, -2).flatten(-2)), state

    @override
    def extra_repr(self) -> str:
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_factors={self.num_factors}, "
            f"head_dim={self.head_dim}, value_dim={self.value_dim}, gate={self.gate}"
        )
