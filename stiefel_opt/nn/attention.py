"""Multi-head attention whose query and key weights are orthonormal."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from typing_extensions import override

from stiefel_opt.errors import check_choice, check_counts, fail
from stiefel_opt.nn._transition import project_on_load
from stiefel_opt.tags import constrain


class MultiheadAttention(nn.MultiheadAttention):
    r"""``nn.MultiheadAttention`` with the query and key weights on the Stiefel manifold.

    For embedding width E and H heads of width d = E / H:

    - ``"within"``: each head's weights :math:`W_Q^h, W_K^h` are in St(E, d), so that no head
      measures the same direction twice;
    - ``"across"``: the heads side by side, :math:`W_Q, W_K`, are in St(E, E), so that no two heads
      do either.

    Values, outputs and biases are plain. Train the weights with an optimizer of this package:
    they are tagged as by :func:`stiefel_opt.constrain`.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first,
            device, dtype: As in ``nn.MultiheadAttention``.
        constraint: ``"within"``, ``"across"`` or None for none. Default: ``"within"``.
        learn_scale: As in :func:`stiefel_opt.constrain`; "within", one number for each head.

    Raises:
        ValueError: for any other constraint, sizes below 1, or heads that do not divide
            ``embed_dim``.

    Note:
        Parameters and results are those of ``nn.MultiheadAttention``, so its state_dict loads. The
        initial value, and a loaded one, is replaced by the nearest orthonormal matrices; an
        orthonormal value keeps its bits, in half precision too: there, what is orthonormal up to
        its rounding, as a module of this class that was converted for inference.

    Reference:
        Kong, Wang & Tao (ICLR 2023), table 1.
    """

    constraint: str | None = None  # while the base class draws the initial value
    learn_scale: bool = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Literal["within", "across"] | None = "within",
        learn_scale: bool = False,
    ) -> None:
        if constraint is not None:
            check_choice("constraint", constraint, ("within", "across"))
        check_counts(embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ValueError(fail("num_heads", f"divide embed_dim = {embed_dim}", num_heads))
        others = add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        super().__init__(embed_dim, num_heads, dropout, bias, *others)
        self.constraint, self.learn_scale = constraint, learn_scale
        self._constrain()
        project_on_load(self)

    @override
    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        self._constrain()

    def _constrain(self) -> None:
        """Tag the query and key weights, and project those off the manifold."""
        if self.constraint is None:
            return
        heads = self.num_heads if self.constraint == "within" else 1
        if self.in_proj_weight is not None:
            rows = ((0, self.embed_dim), (self.embed_dim, 2 * self.embed_dim))
            constrain(self, "in_proj_weight", rows=rows, heads=heads, learn_scale=self.learn_scale)
        else:
            constrain(self, "q_proj_weight", heads=heads, learn_scale=self.learn_scale)
            constrain(self, "k_proj_weight", heads=heads, learn_scale=self.learn_scale)
