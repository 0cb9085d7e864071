"""Gradient clipping by the norm of the Riemannian gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from stiefel_opt.errors import check_flag, check_range, fail
from stiefel_opt.numerics import gathered, is_sharded, tangent_part, widened
from stiefel_opt.tags import Stiefel, tangent_part_with_scale


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,  # noqa: ARG001
) -> Tensor:
    r"""Scale all gradients by one factor so that their Riemannian norm is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, but of a tagged parameter only the part of the gradient
    counts that is tangent to the manifold, :math:`|G - X\,\mathrm{sym}(X^\top G)|_F`: the rest
    never moves it, and would shrink the steps of all others. Plain rows count in full. The only
    function of the package that writes to ``p.grad``: times the factor, in place, not projected.
    Call it between ``backward()`` and ``step()``; with a ``GradScaler``, after ``unscale_``.

    Args:
        parameters: Parameters, tagged and plain; those without gradient are skipped.
        max_norm: Largest norm, > 0; inf to get the norm only.
        norm_type: 2, the norm of tangent vectors; torch's function takes others.
        error_if_nonfinite: Raise where the norm is not finite, before anything is scaled; waits
            for the device. Default: no.
        foreach: Has no effect; here for calls of torch's function.

    Returns: The norm before clipping, a 0-dim tensor.
    Raises:
        ValueError: for max_norm <= 0, another norm, or one that is not finite, if asked.
        TypeError: for a module, and for sparse gradients of constrained parameters.
    Note: Two products of n x m by m x m for each constrained parameter; no host sync. Shards that
        cut heads or channels are gathered. As in torch
        one gradient that is not finite spoils all of them, and ``nonfinite="skip"`` then saves the
        constrained parameters only: pass ``error_if_nonfinite=True``, or clip parameters apart.
    """
    if not isinstance(max_norm, Tensor) and max_norm != math.inf:  # inf: the norm is wanted only
        check_range("max_norm", max_norm, 0.0, open_low=True)
    if isinstance(norm_type, bool) or norm_type != 2:
        remedy = "clip plain parameters by torch.nn.utils.clip_grad_norm_"
        raise ValueError(fail("norm_type", "be 2", repr(norm_type), remedy))
    check_flag("error_if_nonfinite", error_if_nonfinite)
    if isinstance(parameters, nn.Module):
        given, remedy = type(parameters).__name__, "pass model.parameters()"
        raise TypeError(fail("parameters", "be tensors", given, remedy))
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    active = [parameter for parameter in listed if parameter.grad is not None]
    if not active:
        return torch.tensor(0.0)
    norms = [norm for parameter in active for norm in _norms(parameter)]
    device = norms[0].device
    together = torch.stack([gathered(norm).to(device) for norm in norms])
    total: Tensor = torch.linalg.vector_norm(together)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        remedy = "look for the first parameter with a bad gradient, or skip the step"
        raise ValueError(fail("norm of the gradients", "be finite", float(total), remedy))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)  # as in torch
    for parameter in active:
        grad: Tensor = parameter.grad  # type: ignore[assignment]
        grad.mul_(factor.to(grad.device))
    return total


def _norms(parameter: Tensor) -> list[Tensor]:
    """Return the norm of each part of a gradient that moves its parameter."""
    grad: Tensor = parameter.grad  # type: ignore[assignment]
    reading = getattr(parameter, "manifold", None)
    if not isinstance(reading, Stiefel) or getattr(parameter, "is_plain_in_group", False):
        values = grad.coalesce().values() if grad.is_sparse else grad
        return [torch.linalg.vector_norm(values)]
    if grad.layout is not torch.strided:
        raise TypeError(fail("grad of a constrained parameter", "be dense", grad.layout))
    norms = [torch.linalg.vector_norm(part) for part in reading.plain_parts(grad)]
    pairs = zip(reading.parts(parameter), reading.parts(grad), strict=True)
    for index, (point, vector) in enumerate(pairs):
        point, vector = (_matrices(tensor, reading, index) for tensor in (point, vector))
        project = tangent_part_with_scale if reading.learn_scale else tangent_part
        tangent = project(point / reading.scale_of(point), vector)
        norms.append(torch.linalg.vector_norm(tangent))
    return norms


def _matrices(tensor: Tensor, reading: Stiefel, index: int) -> Tensor:
    """Return the matrices of a range of rows, gathered where a border of shards cuts them."""
    try:
        return widened(reading.matrices(tensor, index))
    except RuntimeError:  # DTensor has no view of them
        if not is_sharded(tensor):
            raise
        return widened(reading.matrices(gathered(tensor), index))
