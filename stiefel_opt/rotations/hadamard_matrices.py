"""Hadamard matrices: Sylvester's doubling of Paley's, as Kronecker factors for a fast product."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

WIDEST = 64  # of Sylvester's factors, and twice that with Paley's: wider ones cost another pass
SLOW = 256  # a wider factor that is one of Paley's costs more than Hartley's of the odd part


@functools.cache
def largest_hadamard(size: int) -> int:
    """Return the largest divisor of ``size`` that is the order of a Hadamard matrix known here."""
    return next(n for n in range(size, 0, -1) if size % n == 0 and _core(n))


@functools.cache
def _core(order: int) -> int:
    """The least order from which doubling leads to ``order``: 1 or one of Paley's; 0 if none."""
    found = 0
    while order:
        if order == 1 or _paley(order):
            found = order
        order = order // 2 if order % 2 == 0 else 0
    return found


def _paley(order: int) -> int:
    """The prime q of Paley's construction, of order q + 1 (q = 3 mod 4) or 2 (q + 1) (q = 1)."""
    for prime, rest in ((order - 1, 3), (order // 2 - 1, 1)):
        whole = order % 2 == 0 and prime > 2 and prime % 4 == rest
        if whole and all(prime % divisor for divisor in range(3, math.isqrt(prime) + 1, 2)):
            return prime
    return 0


@functools.cache
def hadamard_factors(order: int) -> tuple[Tensor, ...]:
    """Return orthogonal float64 factors of a Hadamard matrix / sqrt(n), n from largest_hadamard."""
    core = _core(order)
    first = torch.ones(1, 1, dtype=torch.float64) if core == 1 else _paley_matrix(core) / core**0.5
    factors: list[Tensor] = []
    rest = order // core
    while rest > 1 and (not factors or core * rest > 2 * WIDEST):
        size = min(rest, WIDEST)
        factors.append(_sylvester(size) / size**0.5)
        rest //= size
    if rest > 1:  # into the first: a pass less
        first = torch.kron(first, _sylvester(rest) / rest**0.5)
    return tuple(factors if len(first) == 1 else [first, *factors])


def _sylvester(order: int) -> Tensor:
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return functools.reduce(torch.kron, [pair] * (order.bit_length() - 1))


def _paley_matrix(order: int) -> Tensor:
    """Paley's Hadamard matrix: quadratic residues of a prime, bordered by ones."""
    prime = _paley(order)
    squares = {number * number % prime for number in range(1, prime)}
    character = [0.0] + [1.0 if number in squares else -1.0 for number in range(1, prime)]
    differences = torch.arange(prime)[:, None] - torch.arange(prime)[None]
    bordered = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    bordered[1:, 1:] = torch.tensor(character, dtype=torch.float64)[differences % prime]
    bordered[0, 1:] = 1
    identity = torch.eye(prime + 1, dtype=torch.float64)
    if order == prime + 1:
        bordered[1:, 0] = -1
        return bordered + identity
    bordered[1:, 0] = 1
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    corner = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(bordered, pair) + torch.kron(identity, corner)


@functools.cache
def fixed_rotation(size: int) -> tuple[Tensor, ...]:
    r"""Return the Kronecker factors of the fixed rotation of ``size``, in float64.

    The largest Hadamard matrix whose order divides ``size``, but for those that only a wide one of
    Paley's leads to, and for the rest k of the size Hartley's matrix
    :math:`(\cos t_{ij} + \sin t_{ij}) / \sqrt{k}`, :math:`t_{ij} = 2 \pi i j / k`, orthogonal with
    no entry above :math:`\sqrt{2 / k}`.
    """
    order = largest_hadamard(size)
    if _core(order) > SLOW:
        order = max(n for n in range(1, order) if size % n == 0 and 0 < _core(n) <= SLOW)
    rest = size // order
    if rest == 1:
        return hadamard_factors(order)
    index = torch.arange(rest, dtype=torch.float64)
    angle = index[:, None] * index * (2 * math.pi / rest)
    return (*hadamard_factors(order), (angle.cos() + angle.sin()) / rest**0.5)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _factors(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """The factors, the last first, where they are needed; constants of a compiled graph."""
    return _kept_factors(size, dtype, device)


@functools.lru_cache(maxsize=64)
def _kept_factors(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    with torch.inference_mode(mode=False):
        return tuple(factor.to(device, dtype) for factor in reversed(fixed_rotation(size)))


def rotate_fixed(x: Tensor, *, back: bool = False) -> Tensor:
    """Return x H for the fixed rotation H of the last size of ``x``, or x H' with ``back``.

    Costs size times the sum of the factors' sizes for each row, and no matrix of the whole size.
    """
    turned = x.reshape(-1, x.size(-1))
    for factor in _factors(x.size(-1), x.dtype, x.device):
        pieces = turned.reshape(-1, len(factor)) @ (factor.mT if back else factor)
        turned = pieces.view(len(turned), -1, len(factor)).mT.reshape(turned.shape)
    return turned.view(x.shape)  # each axis came last once: they are in their order again
