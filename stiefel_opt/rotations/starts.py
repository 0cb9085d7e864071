"""Initialisation of learning: random Hadamard rotations."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from stiefel_opt.errors import check_flag, check_integer
from stiefel_opt.numerics import random_point
from stiefel_opt.rotations.hadamard_matrices import hadamard_factors, largest_hadamard
from stiefel_opt.rotations.online import usable_decoder
from stiefel_opt.rotations.result import ONLINE, Rotations, check_online


def hadamard(
    model: nn.Module,
    *,
    seed: int = 0,
    residual: bool = True,
    online: tuple[str, ...] | list[str] | None = None,
) -> Rotations:
    r"""Return random Hadamard rotations of the sizes of ``model``.

    .. math:: R = \mathrm{diag}(\pm 1)\,(H_k / \sqrt{k} \otimes Q)

    with :math:`H_k` the largest Hadamard matrix (Sylvester's, Paley's and their doublings) whose
    order divides the size, and Q a Haar-distributed block of the remaining size, 1 x 1 for most
    models.

    Args:
        model: A decoder that :func:`prepare_` knows, or has prepared.
        seed: Of signs and blocks; the same rotations on every device.
        residual: Whether to rotate the residual stream. False leaves R1 out: the model needs no
            :func:`prepare_`, and its norms, embeddings and head stay as they are; for caches, and
            for weights that are rounded to nearest.
        online: Fixed rotations that stay in the forward pass: "R3" for key caches, "R4" for the
            inputs of ``down_proj``, without which 4 bits are out of reach. Default: R4, except for
            experts.

    Returns: Rotations; of a model with LayerNorms, R is the rotation of one dimension less, of the
        complement of the vector of ones.
    Raises:
        ValueError: for another family, an unknown name, a seed below 0, and R3 where no Hadamard
            matrix is as large as a head; for a folded model without its online rotations.
        TypeError: for a seed that is no integer, or a ``residual`` that is neither True nor False.
    Reference: Ashkboos et al., QuaRot (NeurIPS 2024); Paley, On orthogonal matrices (1933).
    """
    decoder = usable_decoder(model)
    check_integer("seed", seed, 0)
    check_flag("residual", residual)
    if online is None:
        online = () if decoder.description.down is None else ("R4",)
    check_online("online", online, decoder)
    generator = torch.Generator().manual_seed(seed)
    stream = _random_hadamard(decoder.width, generator)
    if decoder.description.norm == "layer":
        stream = around_ones(_random_hadamard(decoder.width - 1, generator))
    count = len(decoder.layers) if decoder.has_heads else 0
    heads = [_random_hadamard(decoder.head_size, generator) for _ in range(count)]
    device, chosen = decoder.device, tuple(name for name in ONLINE if name in online)
    return Rotations(
        stream.to(device) if residual else None, [head.to(device) for head in heads], chosen
    )


def around_ones(rotation: Tensor) -> Tensor:
    """Return the rotation of one dimension more that keeps the vector of ones: F diag(1, R) F.

    F is the reflection that exchanges the first axis and the vector of ones.
    """
    size = len(rotation) + 1
    inner = functional.pad(rotation.double(), (1, 0, 1, 0))
    corner = torch.zeros(size, size, dtype=inner.dtype, device=inner.device)
    corner[0, 0] = 1
    return _reflected(inner + corner).float().contiguous()


def inside_ones(rotation: Tensor) -> Tensor:
    """Return R of :func:`around_ones`."""
    return _reflected(rotation.double())[1:, 1:].float().contiguous()


def _reflected(matrix: Tensor) -> Tensor:
    """Return F M F."""
    size = len(matrix)
    axis = torch.full((size,), -(size**-0.5), dtype=matrix.dtype, device=matrix.device)
    axis[0] += 1
    axis = axis / torch.linalg.vector_norm(axis)
    matrix = matrix - 2 * torch.outer(axis, axis @ matrix)
    return matrix - 2 * torch.outer(matrix @ axis, axis)


def _random_hadamard(size: int, generator: torch.Generator) -> Tensor:
    order = largest_hadamard(size)
    rest = size // order
    factors = list(hadamard_factors(order))
    if rest > 1:
        factors.append(random_point(rest, rest, generator=generator, dtype=torch.float64))
    matrix = functools.reduce(torch.kron, factors, torch.ones(1, 1, dtype=torch.float64))
    signs = torch.randint(0, 2, (size, 1), generator=generator).mul(2).sub(1)
    return (signs * matrix).float().contiguous()
