"""Merge rotations into a decoder's weights, and install what stays in its forward pass."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.decoder import (
    Decoder,
    Linear,
    mark,
    read_decoder,
    require_values,
    rows,
    state_of,
)
from stiefel_opt.rotations.hadamard_matrices import rotate_fixed
from stiefel_opt.rotations.online import install, usable_decoder
from stiefel_opt.rotations.quantizers import Rotation, check_prepared, turned
from stiefel_opt.rotations.result import ONLINE, Rotations, check_online, check_rotations, polished
from stiefel_opt.rotations.verification import float32_copy, verified

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def fold_(model: ModelT, rotations: Rotations, *, verify: Tensor | None = None) -> ModelT:
    r"""Merge rotations into the weights: the same function, of activations that are turned.

    With :math:`R_1` for the stream, :math:`R_2` for the heads of a layer and H for R4,

    .. math::
        E R_1, \quad (W R_1)_{q, k, gate, up, head}, \quad (R_2^\top W R_1)_v, \quad
        (R_1^\top W R_2)_o, \quad (R_1^\top W H)_{down}, \quad R_1^\top b_{o, down}, \quad
        R_2^\top b_v

    take the place of embedding, weights and biases; the bias of a LayerNorm becomes b R1. What is
    online, R3 and R4, becomes hooks of the model; ``save_pretrained`` writes their names into the
    config, and :func:`load_online_` restores them after loading. ``online_R4_call_load_online_``
    stands in the checkpoint as a buffer and in the config as a method of quantisation, so that
    what loads them reports a name that it does not know; the latter survives a model that is saved
    without the call. Adapters may be trained and merged: R4 acts outside of them.

    Args:
        model: A model that :func:`prepare_` has prepared, or any where ``rotations`` have no R1;
            changed in place.
        rotations: From :func:`learn` or :func:`hadamard`; with ``online=()`` any tool can read the
            folded model as it is.
        verify: As in :func:`prepare_`.

    Returns: The model.
    Raises:
        ValueError: for a model that is not prepared or is folded already, and for rotations of
            other sizes or that are not orthogonal.
        TypeError: for weights that are sharded or quantised.
    Note: Two products for a weight in float64, rounded once: in float32 no logit moves by more than
        1e-4 of the largest. Beside the model a copy of 128 MB at a time.
    """
    decoder = usable_decoder(model)
    check_rotations("rotations", rotations, decoder)
    check_prepared(decoder, rotations)
    for linear in decoder.linears():
        require_values(linear.name, linear.parameter)
    for name, embedding in decoder.embeddings:
        require_values(name, embedding.weight)
    if (wide := float32_copy(decoder.model, verify)) is not None:
        fold_(wide, rotations, verify=verify)
    with verified(decoder.model, verify, "folded"):
        mark(decoder.model, "half folded")  # an interrupted model cannot be used
        _turn(decoder, rotations)
        online = tuple(name for name in ONLINE if name in rotations.online)
        mark(decoder.model, "folded", online)
        install(decoder, online)
    return model


def _turn(decoder: Decoder, rotations: Rotations) -> None:
    """Merge the rotations into embeddings, weights and biases."""
    residual = None if rotations.residual is None else polished(rotations.residual)
    none: list[Tensor | None] = [None] * len(decoder.layers)
    heads = [polished(head) for head in rotations.heads] or none
    for _, embedding in decoder.embeddings:
        _turn_rows(embedding.weight, residual)
    for norm in decoder.norms():
        for reader in norm.readers:
            _turn_rows(reader.weight, residual)
        bias = getattr(norm.module, "bias", None)
        if isinstance(bias, Tensor):
            bias.copy_(turned(bias.double(), residual))
    for layer, head in zip(decoder.layers, heads, strict=True):
        if layer.value is not None and layer.output is not None:
            _turn_outputs(layer.value, head)
            _turn_rows(layer.output.weight, head)
        if layer.down is not None and "R4" in rotations.online:
            _turn_rows(layer.down.weight, rotate_fixed)
        for writer in layer.writers:
            _turn_outputs(writer, residual)


def load_online_(model: ModelT) -> ModelT:
    """Install the fixed rotations that a folded model was saved with; needed after loading it.

    Args:
        model: From ``from_pretrained``; its ``config.stiefel_rotations`` names what is online. It
            may have been quantised after folding.

    Returns: The model. Calling this twice changes nothing.
    Raises:
        ValueError: for a model that was not folded, and for names that are not known.
    """
    decoder = read_decoder(model, quantised=True)
    state = state_of(decoder.model)
    if state.get("state") != "folded":
        current = state.get("state", "without config.stiefel_rotations")
        remedy = "call rotations.fold_, or load the folded model"
        raise ValueError(fail("model", "be folded", f"one that is {current}", remedy))
    check_online("config.stiefel_rotations", state["online"], decoder)
    install(decoder, tuple(state["online"]))
    return model


# ---- weights -------------------------------------------------------------------------------------


def _turn_rows(weight: Tensor, rotation: Rotation) -> None:
    """W <- W R, R repeated along the rows."""
    if rotation is None:
        return
    for matrix in (weight,) if weight.ndim == 2 else weight:  # one of each expert
        for piece in rows(matrix):
            piece.copy_(turned(piece.double(), rotation))


def _turn_outputs(linear: Linear, rotation: Rotation) -> None:
    """W <- R' W and b <- R' b, R repeated along the outputs."""
    _turn_rows(linear.weight.mT, rotation)
    if linear.bias is not None:
        linear.bias.copy_(turned(linear.bias.double(), rotation))
