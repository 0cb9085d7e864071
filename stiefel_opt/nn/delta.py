"""A linear recurrence that turns its state by Householder products chosen by the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize
from typing_extensions import override

from stiefel_opt.errors import HALF, check_counts, check_flags, fail
from stiefel_opt.functional import delta_product

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
        chunk_size: Tokens in a chunk, see :func:`stiefel_opt.functional.delta_product`.
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
