"""Rotations: plain data that learning returns, evaluation reads and folding merges."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefel_opt.errors import fail
from stiefel_opt.numerics import gram_error, newton_schulz
from stiefel_opt.rotations.attention import chooses_attention
from stiefel_opt.rotations.decoder import Decoder
from stiefel_opt.rotations.hadamard_matrices import largest_hadamard

ONLINE = ("R3", "R4")  # fixed rotations: of queries and keys, of the inputs of down_proj
FORMAT = 1
LARGEST_ERROR = 1e-3  # of R'R: more is no rounding
POLISHING = 3  # Newton-Schulz steps


@dataclasses.dataclass(frozen=True)
class Rotations:
    """The rotations of one decoder.

    Attributes:
        residual: R1, ``(d, d)``: the residual stream x, a row, becomes x R1. None leaves the stream
            as it is, and then the model needs no :func:`stiefel_opt.rotations.prepare_`.
        heads: R2, one ``(h, h)`` for each layer: the values v of every head become v R2. Empty
            where queries, keys and values are one layer.
        online: Names of fixed rotations that stay in the forward pass: "R3" turns queries and keys
            behind the rotary embedding, "R4" the input of ``down_proj``.
        log: One dict for each step of :func:`stiefel_opt.rotations.learn`: step, loss,
            orthonormality, seconds.
    """

    residual: Tensor | None
    heads: Sequence[Tensor]
    online: tuple[str, ...] = ("R4",)
    log: Sequence[Mapping[str, float]] = ()

    def matrices(self) -> list[Tensor]:
        """R1, if there is one, and R2 of each layer."""
        return [*([] if self.residual is None else [self.residual]), *self.heads]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file that ``torch.load(path, weights_only=True)`` reads as a dict."""
        content = {
            "format": FORMAT,
            "residual": None if self.residual is None else self.residual.detach().cpu(),
            "heads": [head.detach().cpu() for head in self.heads],
            "online": list(self.online),
            "log": [dict(entry) for entry in self.log],
        }
        torch.save(content, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Rotations:
        """Read what :meth:`save` wrote; executes nothing.

        Raises:
            ValueError: for a file of something else, or of a newer format.
        """
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict) or not {"residual", "heads", "online"} <= content.keys():
            raise ValueError(fail("path", "hold rotations", f"{os.fspath(path)!r}"))
        if content.get("format") != FORMAT:
            remedy = "update stiefel_opt"
            raise ValueError(fail("path", f"be of format {FORMAT}", content.get("format"), remedy))
        online, log = tuple(content["online"]), content.get("log", [])
        return cls(content["residual"], content["heads"], online, log)


def check_rotations(name: str, rotations: object, decoder: Decoder) -> None:
    """Raise unless ``rotations`` are orthogonal matrices of the sizes of ``decoder``."""
    if not isinstance(rotations, Rotations):
        remedy = "call rotations.learn or rotations.hadamard"
        raise TypeError(fail(name, "be Rotations", type(rotations).__name__, remedy))
    check_online(f"{name}.online", rotations.online, decoder)
    count = len(decoder.layers) if decoder.has_heads else 0
    if len(rotations.heads) != count:
        wanted = f"have one matrix for each of {count} layers" if count else "be empty"
        raise ValueError(fail(f"{name}.heads", wanted, len(rotations.heads)))
    named = [(f"heads[{i}]", head, decoder.head_size) for i, head in enumerate(rotations.heads)]
    if rotations.residual is not None:
        named.insert(0, ("residual", rotations.residual, decoder.width))
    for part, matrix, size in named:
        if tuple(matrix.shape) != (size, size):
            wanted = f"be {size} x {size}, as in the model"
            raise ValueError(fail(f"{name}.{part}", wanted, matrix))
        if not matrix.is_floating_point():
            raise TypeError(fail(f"{name}.{part}", "be floating-point", matrix.dtype))
        if not float(gram_error(matrix.detach().float())) <= LARGEST_ERROR:
            raise ValueError(fail(f"{name}.{part}", "be orthogonal", "another matrix"))
    if rotations.residual is not None and decoder.description.norm == "layer":
        ones = rotations.residual.detach().float().sum(1)  # R 1
        if not float((ones - 1).abs().max()) <= LARGEST_ERROR:
            wanted = "keep the vector of ones, which LayerNorm projects out"
            remedy = "call rotations.hadamard(model)"
            raise ValueError(fail(f"{name}.residual", wanted, "another rotation", remedy))


def check_online(name: str, online: Sequence[str], decoder: Decoder) -> None:
    """Raise unless these are names of fixed rotations, and R3 has a Hadamard matrix of a head."""
    if isinstance(online, str) or not all(each in ONLINE for each in online):
        raise ValueError(fail(name, f"be among {list(ONLINE)}", repr(online)))
    if "R4" in online and decoder.description.down is None:
        remedy = "leave R4 out: online=()"
        given = f"R4 for a {type(decoder.model).__name__} of experts, or described without down"
        raise ValueError(fail(name, "name what the model has a place for", given, remedy))
    size = decoder.head_size  # 0 where a quantised layer does not tell it
    if "R3" in online and size and largest_hadamard(size) != size:
        name = f"{decoder.layers[0].name}.self_attn"
        remedy = 'leave R3 out: start=rotations.hadamard(model, online=("R4",))'
        wanted = "have heads of a size with a Hadamard matrix for R3"
        raise ValueError(fail(name, wanted, decoder.head_size, remedy))
    if "R3" in online and not chooses_attention(decoder):
        remedy = "leave R3 out, and take rotations.TurnedCache for few bits"
        given = f"R3 for a {type(decoder.model).__name__} that does not"
        raise ValueError(fail(name, "be for a model with transformers' attention", given, remedy))


def polished(rotation: Tensor) -> Tensor:
    """Return the nearest orthogonal matrix, in float64."""
    return newton_schulz(rotation.detach().double(), POLISHING)
