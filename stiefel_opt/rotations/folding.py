"""Merge rotations into a decoder's weights, and install what stays in its forward pass."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from stiefel_opt.errors import fail
from stiefel_opt.rotations.decoder import mark, read_decoder, rows, state_of, whole
from stiefel_opt.rotations.hadamard_matrices import rotate_fixed
from stiefel_opt.rotations.online import install, usable_decoder
from stiefel_opt.rotations.quantizers import Rotation, check_prepared, turned
from stiefel_opt.rotations.result import ONLINE, Rotations, check_online, check_rotations, polished

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def fold_(model: ModelT, rotations: Rotations) -> ModelT:
    r"""Merge rotations into the weights: the same function, of activations that are turned.

    With :math:`R_1` for the stream, :math:`R_2` for the heads of a layer and H for R4,

    .. math::
        E R_1, \quad (W R_1)_{q, k, gate, up, head}, \quad (R_2^\top W R_1)_v, \quad
        (R_1^\top W R_2)_o, \quad (R_1^\top W H)_{down}, \quad R_1^\top b_{o, down}, \quad
        R_2^\top b_v

    take the place of embedding, weights and biases. What stays online, R3 and R4, becomes hooks of
    the model; ``save_pretrained`` writes their names into the config, and :func:`load_online_`
    restores them after loading. A buffer named ``online_R4_call_load_online_`` stands in the
    checkpoint, so that what loads it reports a name that it does not know. Adapters may be trained
    and merged: R4 acts outside of them.

    Args:
        model: A model that :func:`prepare_` has prepared, or any where ``rotations`` have no R1;
            changed in place.
        rotations: From :func:`learn` or :func:`hadamard`; with ``online=()`` any tool can read the
            folded model as it is.

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
    for layer in decoder.layers:
        for name, linear in layer.linears():
            whole(name, linear.weight)
    whole("model.embed_tokens", decoder.embedding.weight)
    whole("lm_head", decoder.head.weight)
    residual = None if rotations.residual is None else polished(rotations.residual)
    mark(decoder.model, "half folded")  # an interrupted model cannot be used
    _turn_rows(decoder.embedding.weight, residual)
    _turn_rows(decoder.head.weight, residual)
    for layer, given in zip(decoder.layers, rotations.heads, strict=True):
        head = polished(given)
        for linear in (layer.query, layer.key, layer.value, layer.gate, layer.up):
            _turn_rows(linear.weight, residual)
        _turn_outputs(layer.value, head)
        _turn_rows(layer.output.weight, head)
        if "R4" in rotations.online:
            _turn_rows(layer.down.weight, rotate_fixed)
        _turn_outputs(layer.output, residual)
        _turn_outputs(layer.down, residual)
    mark(decoder.model, "folded", tuple(name for name in ONLINE if name in rotations.online))
    install(decoder, rotations.online)
    return model


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
    for piece in rows(weight):
        piece.copy_(turned(piece.double(), rotation))


def _turn_outputs(linear: nn.Linear, rotation: Rotation) -> None:
    """W <- R' W and b <- R' b, R repeated along the outputs."""
    if rotation is None:
        return
    for piece in rows(linear.weight.mT):
        piece.copy_(turned(piece.double(), rotation))
    if linear.bias is not None:
        linear.bias.copy_(turned(linear.bias.double(), rotation))
