"""Which modules of torch keep several matrices in one weight, one above the other."""

from __future__ import annotations

from torch import nn

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def stacked(owner: nn.Module, name: str) -> tuple[int, str]:
    """Return how many matrices of equal height ``name`` of ``owner`` holds, and for what each is.

    Gates of recurrent cells, groups of convolutions, and heads of attention never meet in a
    product; a matrix across them would be orthonormal without any of them being so.
    """
    if isinstance(owner, CONVOLUTIONS) and name == "weight" and owner.groups > 1:
        return owner.groups, "group"
    if isinstance(owner, nn.MultiheadAttention):
        if name == "in_proj_weight":
            return 3 * owner.num_heads, "head of queries, keys and values"
        if name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            return owner.num_heads, "head"
    if name.startswith(("weight_ih", "weight_hh")):
        if isinstance(owner, (nn.LSTM, nn.LSTMCell)):
            return 4, "gate"
        if isinstance(owner, (nn.GRU, nn.GRUCell)):
            return 3, "gate"
    return 1, ""


def is_layer(owner: nn.Module) -> bool:
    """Say whether a module is a layer of torch or of this package, whose shapes are known."""
    holders = (nn.ParameterList, nn.ParameterDict)
    if type(owner) is nn.Module or isinstance(owner, holders):
        return False
    return type(owner).__module__.startswith(("torch.nn.modules.", "stiefel_opt."))
