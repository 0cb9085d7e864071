"""The Lipschitz constant of a model, proven from its weights as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from stiefel_opt.errors import check_count, check_module, fail, type_name
from stiefel_opt.nn.lipschitz.graphs import ADD_A_RULE, check_modules, unwrapped
from stiefel_opt.nn.lipschitz.walk import walk_graph


def lipschitz_bound(model: nn.Module, input_size: Sequence[int] | None = None) -> float:
    r"""Return a proven bound L on :math:`|f(x) - f(y)| / |x - y|`, in 2-norms, for all x and y.

    The product of a bound of each layer, in float64, from the weights as they are now: loaded,
    averaged, rounded ones, with their scale, and the present value of a parametrized one. A sum
    adds, a concatenation is :math:`\sqrt{a^2 + b^2}`.

    Args:
        model: An ``nn.Sequential``, or any module whose forward pass ``torch.fx`` can trace and
            that takes and returns one tensor. In evaluation mode, if it has dropout or batch
            normalisation.
        input_size: Shape of one input without the batch, as ``(3, 32, 32)``. With it bounds of
            convolutions are closer, and what depends on shapes can be bounded: padding by
            ``"reflect"`` and ``"replicate"``, sums over dimensions, tensors that are broadcast,
            such as a mean of three channels.

    Returns: L, of exact arithmetic: the rounding of a forward pass is not in it.
    Raises:
        TypeError: for what has no known bound, by its dotted name or the name of its node: another
            type, a function that is not listed, a forward pass that cannot be traced, forward
            hooks, a changed method, in-place steps on what others use, several inputs or outputs,
            quantised weights. Add a bound by :func:`lipschitz_rule`.
        ValueError: for batch normalisation, dropout and spectral normalisation in training mode,
            weights that are not finite, and what needs ``input_size``.
    Note: Of a k x k convolution it takes the norm of the kernel as a matrix times the root of the
        number of its positions that hold a pixel; with ``input_size`` and zeros or circular padding
        also the largest norm over all frequencies. Of a matrix, the largest eigenvalue of its
        smaller Gram matrix. An ``input_size`` costs a forward pass of two inputs.
    """
    return math.prod(lipschitz_table(model, input_size).values())


def lipschitz_table(model: nn.Module, input_size: Sequence[int] | None = None) -> dict[str, float]:
    """Return the factors of :func:`lipschitz_bound` by the names of layers; they multiply to it.

    What lies between two points through which everything passes is one factor, named after the
    node where it ends: "add" for a residual block, "cat".

    Args:
        model, input_size: As in :func:`lipschitz_bound`.

    Returns: Names and factors, in the order of the forward pass.
    Raises: As :func:`lipschitz_bound`.
    """
    check_module("model", model)
    if input_size is not None:
        if isinstance(input_size, int) or not isinstance(input_size, Sequence):
            wanted = "be the shape of one input, a tuple of integers"
            raise TypeError(fail("input_size", wanted, repr(input_size)))
        for size in input_size:
            check_count("input_size", size)
    inner = unwrapped(model)
    check_modules(inner)
    state = torch.get_rng_state()
    factors = walk_graph(inner, None if input_size is None else tuple(input_size))
    if not torch.equal(state, torch.get_rng_state()):
        torch.set_rng_state(state)
        given = f"a forward pass of {type_name(inner)} that draws random numbers"
        raise TypeError(fail("model", "be a function of its input", given, ADD_A_RULE))
    return factors
