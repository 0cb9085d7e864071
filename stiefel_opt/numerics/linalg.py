"""Products of tall and small matrices, bounds, and rotations.

Everything broadcasts over leading dimensions. ``tall`` means ``(..., n, m)`` with n >= m, ``small``
means ``(..., m, m)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from stiefel_opt.numerics.device import (
    finest_dtype,
    for_device,
    has_no_owner,
    is_compiling,
    is_cpu,
    numbers_on,
)

RowSum = Callable[[Tensor], Tensor]
Tensors = dict[str, Tensor]


FEW: Final = 1024  # entries of a batch up to which calls cost more than arithmetic
MEDIUM: Final = 64  # m up to which sums of squares give the best bound on eigenvalues
_LONG: Final = 2**14  # entries from which a float32 sum of squares on a CPU loses digits
_SHORT: Final = 4096  # entries of a matrix up to which a product of rows and columns is slower
_LARGE: Final = 256  # m from which norms of rows are computed without a temporary on a CPU
_KEPT_ELSEWHERE: Final = 1024  # m up to which identities are stored off a CPU
BLOCKED: Final = 256  # m from which only half of a symmetric product is computed
_BLOCKED_ELSEWHERE: Final = 2048  # the same off a CPU, where eight calls cost more than one
# Up to this width float32 products sum their rows naively, with an error of 2e-3 at 3e6 rows. Sums
# in chunks of this many rows have an error of 3e-7.
_FEW_COLUMNS: Final = 11
_ROWS_AT_A_TIME: Final = 4096


def sym(matrix: Tensor) -> Tensor:
    """Return (A + A') / 2; A' is the conjugate transpose, here and everywhere."""
    return (matrix + matrix.mH) / 2


def skew(matrix: Tensor) -> Tensor:
    """Return (A - A') / 2."""
    return (matrix - matrix.mH) / 2


def trace_of(matrix: Tensor) -> Tensor:
    """Return the trace of a Hermitian matrix, ``(k, 1, 1)``."""
    return matrix.diagonal(dim1=-2, dim2=-1).real.sum(dim=-1)[:, None, None]


def square_norm(matrix: Tensor) -> Tensor:
    """Return |A|_F^2, ``(k, 1, 1)``."""
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm.square()


def frobenius_norm(matrix: Tensor) -> Tensor:
    """Return |A|_F, ``(..., 1, 1)``, to rounding: float32 adds long sums one by one on a CPU."""
    if matrix.shape[-2:].numel() > for_device(matrix, _LONG, math.inf):
        inner = -1 if matrix.stride(-1) == 1 else -2
        matrix = torch.linalg.vector_norm(matrix, dim=inner, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    return norm


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the real part of <A, B>, ``(k, 1, 1)``, by one call where memory is in one order."""
    if left.stride(-1) != 1:
        left, right = left.mT, right.mT
    # on a CPU the product is fast for one long matrix only
    is_slow = is_cpu(left) and (left.size(0) > 1 or left.numel() < _SHORT)
    in_order = left.is_contiguous() and right.is_contiguous()
    if left.is_complex() or not in_order:
        return inner_product(left, right)
    left, right = left.flatten(1), right.flatten(1)
    if is_slow:  # a sum over one dimension takes half the time of one over two
        return (left * right).sum(dim=1)[:, None, None]
    return torch.bmm(left.unsqueeze(1), right.unsqueeze(2))


def inner_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the real part of <A, B>, ``(k, 1, 1)``."""
    return (left.conj() * right).real.sum(dim=(-2, -1), keepdim=True)


def are_finite(matrices: Tensor) -> Tensor:
    """Say of each matrix whether all of it is finite, shape ``(...)``."""
    return matrices.isfinite().all(dim=-1).all(dim=-1)


def cross_gram(left: Tensor, right: Tensor) -> Tensor:
    """Return left' right, small, for two tall batches ``(k, n, m)``."""
    rows = right.size(-2)
    if rows <= _ROWS_AT_A_TIME or right.size(-1) > _FEW_COLUMNS:
        return torch.bmm(left.mH, right)
    most, size = rows - rows % _ROWS_AT_A_TIME, (-1, _ROWS_AT_A_TIME)
    first, second = (torch.unflatten(t[:, :most], 1, size) for t in (left, right))
    total: Tensor = (first.mH @ second).sum(dim=1)
    return total.baddbmm_(left[:, most:].mH, right[:, most:])


def gram(tall: Tensor, into: Tensor | None = None, alpha: float = 1.0) -> Tensor:
    """Return alpha A'A for a tall batch ``(k, n, m)``, in the memory ``into`` if there is some."""
    if is_halved(tall):
        return symmetric_product(tall.mH, tall, into, alpha=alpha)
    if into is None:
        return cross_gram(tall, tall) if alpha == 1 else cross_gram(tall, tall).mul_(alpha)
    if tall.size(-2) > _ROWS_AT_A_TIME and tall.size(-1) <= _FEW_COLUMNS:
        return torch.mul(cross_gram(tall, tall), alpha, out=into)
    return into.baddbmm_(tall.mH, tall, beta=0.0, alpha=alpha)


def is_halved(columns: Tensor) -> bool:
    """Say whether only half of a symmetric product of this many columns is worth computing."""
    size = columns.size(-1)
    return size >= BLOCKED and size >= for_device(columns, BLOCKED, _BLOCKED_ELSEWHERE)


class Sums:
    """Products A'B of tall matrices, summed over all rows, wherever they are.

    Args:
        row_sum: Sum over the processes that share the rows. None: all rows are here.
        rows: How many rows a matrix has, with those elsewhere. None: as many as are here.
        scale: s in parameter = s X; the learning rate of X is lr / s.

    Attributes:
        are_local: Whether all rows are here.
    """

    def __init__(
        self, row_sum: RowSum | None = None, rows: int | None = None, scale: float = 1.0
    ) -> None:
        self.row_sum, self.rows, self.scale = row_sum, rows, scale
        self.are_local = row_sum is None

    def __call__(
        self, *pairs: tuple[Tensor, Tensor], into: Tensor | None = None, alpha: float = 1.0
    ) -> list[Tensor]:
        """Return A'B, ``(k, m, m)``, for each pair, by one exchange between processes.

        With ``into`` the first pair is a tall matrix twice, and alpha A'A is put there.
        """
        rest = pairs if into is None or self.row_sum is not None else pairs[1:]
        products = [
            gram(left) if left is right else cross_gram(left, right) for left, right in rest
        ]
        if self.row_sum is None or not products:
            return products if into is None else [gram(pairs[0][0], into, alpha), *products]
        packed = self.row_sum(torch.cat(products, dim=-1))
        products = list(torch.split(packed, products[0].size(-1), dim=-1))
        if into is not None:
            products[0] = torch.mul(products[0], alpha, out=into)
        return products

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum of ``tensor`` over the processes that share the rows."""
        return tensor if self.row_sum is None else self.row_sum(tensor)

    def are_square(self, tall: Tensor) -> bool:
        """Say whether the matrices are square, and all of their rows here."""
        return self.are_local and tall.size(-2) == tall.size(-1)


LOCAL_SUMS: Final = Sums()


def symmetric_product(
    left: Tensor,
    right: Tensor,
    into: Tensor | None = None,
    *,
    beta: float = 0.0,
    alpha: float = 1.0,
    sign: int = 1,
) -> Tensor:
    """Return left @ right, ``(k, m, n)`` by ``(k, n, m)``, where it is known to be symmetric.

    If it is large only the blocks on and above the diagonal are worked out: with four blocks a side
    5/8 of the flops. With ``into``, symmetric: beta into + alpha left @ right, in its memory;
    ``sign`` is -1 if both are skew.
    """
    size = right.size(-1)
    if not is_halved(right):
        if into is None:
            return torch.bmm(left, right)
        return into.baddbmm_(left, right, beta=beta, alpha=alpha)
    result = right.new_empty(right.size(0), size, size) if into is None else into
    width = max(-(-size // 4), BLOCKED // 2)
    for start in range(0, size, width):
        stop = min(start + width, size)
        rows = result[:, start:stop, start:]
        rows.baddbmm_(left[:, start:stop], right[..., start:], beta=beta, alpha=alpha)
        below = rows[..., stop - start :].mH
        result[:, stop:, start:stop] = below if sign > 0 else -below
    return result


def add_skew_product_(target: Tensor, left: Tensor, right: Tensor, alpha: float) -> Tensor:
    """Add alpha left @ right, known to be skew, to ``target`` in place; return ``target``."""
    if is_halved(right):
        return target.add_(symmetric_product(left, right, sign=-1), alpha=alpha)
    return target.baddbmm_(left, right, alpha=alpha)


def add_product_into(
    out: Tensor | None, target: Tensor, tall: Tensor, small: Tensor, alpha: float = 1.0
) -> Tensor:
    """Return alpha tall @ small - ``target``, in the memory ``out`` if there is some."""
    if out is None:
        return add_product(target, tall, small, beta=-1.0, alpha=alpha)
    if out.stride(-1) == 1:
        return torch.baddbmm(target, tall, small, beta=-1.0, alpha=alpha, out=out)
    return torch.baddbmm(target.mT, small.mT, tall.mT, beta=-1.0, alpha=alpha, out=out.mT).mT


def product(tall: Tensor, small: Tensor) -> Tensor:
    """Return tall @ small in the memory order of ``tall``, all ``(k, ., .)``."""
    if tall.stride(-1) == 1:
        return torch.bmm(tall, small)
    return torch.bmm(small.mT, tall.mT).mT


def add_product(
    target: Tensor, tall: Tensor, small: Tensor, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return beta target + alpha tall @ small in the memory order of ``target``."""
    if target.stride(-1) == 1:
        return torch.baddbmm(target, tall, small, beta=beta, alpha=alpha)
    return torch.baddbmm(target.mT, small.mT, tall.mT, beta=beta, alpha=alpha).mT


def add_product_(
    target: Tensor, tall: Tensor, small: Tensor, *, alpha: float | Tensor = 1.0
) -> Tensor:
    """Add alpha tall @ small to ``target`` in place, all ``(k, ., .)``; return ``target``."""
    if isinstance(alpha, Tensor):
        small, alpha = small * alpha, 1.0
    if target.stride(-1) == 1:
        return target.baddbmm_(tall, small, alpha=alpha)
    return target.mT.baddbmm_(small.mT, tall.mT, alpha=alpha).mT


class Halves(NamedTuple):
    """A batch, and its two halves."""

    both: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, both: Tensor, kept: Halves | None = None) -> Halves:
        """Divide a batch, unless that has been done."""
        is_known = kept is not None and both is kept.both
        return kept if is_known else cls(both, *both.unsafe_chunk(2))  # type: ignore[return-value]


class Packed(dict[str, Tensor]):
    """Batches by name that lie one behind the other in one tensor: a call may work on several.

    On a CPU views of a few numbers cost more than their arithmetic: with ``is_kept`` they are made
    once, and what :meth:`like` returns is the same memory every time.
    """

    def __init__(self, flat: Tensor, parts: Mapping[str, Tensor], *, is_kept: bool = False) -> None:
        super().__init__(parts)
        self.flat, self._is_kept = flat, is_kept
        self._made: dict[Any, Any] = {}

    def like(self, first: str = "", last: str = "") -> Packed:
        """Return memory for the same batches, or for those between two names."""
        made: Packed | None = self._made.get(("like", first, last))
        if made is not None:
            return made
        flat = self.flat if not first else self.span(first, last)
        begin, room = int(flat.storage_offset()), torch.empty_like(flat)
        parts = {}
        for name, part in self.items():
            offset = int(part.storage_offset()) - begin
            if 0 <= offset <= room.numel() - part.numel():  # a part may be empty
                parts[name] = room.as_strided(part.size(), part.stride(), offset)
        made = Packed(room, parts, is_kept=self._is_kept)
        if self._is_kept:
            self._made["like", first, last] = made
        return made

    def span(self, first: str, last: str) -> Tensor:
        """Return the entries of the batches between two names, as one dimension."""
        entries: Tensor | None = self._made.get(("span", first, last))
        if entries is None:
            begin, end = self[first], self[last]
            entries = self.flat[begin.storage_offset() : end.storage_offset() + end.numel()]
            if self._is_kept:
                self._made["span", first, last] = entries
        return entries

    def pairs(self, like: Tensor) -> tuple[Halves, Halves, Halves]:
        """Return memory for three times two batches like one of these."""
        made: tuple[Halves, Halves, Halves] | None = self._made.get("pairs")
        if made is None:
            rooms = like.new_empty(3, 2 * like.size(0), *like.shape[1:])
            made = Halves.of(rooms[0]), Halves.of(rooms[1]), Halves.of(rooms[2])
            if self._is_kept:
                self._made["pairs"] = made
        return made

    def runs(self) -> list[Tensor]:
        """Return neighbours of one shape as one batch ``(., k, n, m)``, in the order of memory."""
        groups: list[list[Tensor]] = []
        for part in self.values():
            if groups and groups[-1][0].shape == part.shape and part.is_contiguous():
                groups[-1].append(part)
            else:
                groups.append([part])
        return [
            first.as_strided((count, *first.shape), (first.numel(), *first.stride()))
            for first, count in ((group[0], len(group)) for group in groups)
        ]


class Step(NamedTuple):
    """The learning rate of a step that may be cut: eta = number * factor, where None is 1."""

    number: float
    factor: Tensor | None = None  # ``(k, 1, 1)``
    may_vanish: bool = False  # a factor may be 0

    def times(self, small: Tensor) -> Tensor:
        """Return A times the factor."""
        return small if self.factor is None else small * self.factor

    def add_to(self, base: Tensor, tensor: Tensor) -> Tensor:
        """Return base + eta A, in the memory of A."""
        if self.factor is None:
            return torch.add(base, tensor, alpha=self.number, out=tensor)
        return torch.addcmul(base, tensor, self.factor, value=self.number, out=tensor)

    def over(self, small: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Return scale A / eta, 0 where eta is."""
        share = scale / self.number if self.number else 0.0
        if self.factor is None:
            return torch.mul(small, share, out=out)
        factor = self.factor + (self.factor == 0) if self.may_vanish else self.factor
        return torch.addcdiv(numbers_on(small, 0.0), small, factor, value=share, out=out)


def infinity_norm(matrix: Tensor) -> Tensor:
    """Return the largest absolute row sum, ``(..., 1, 1)``: a bound on the spectral norm.

    Symmetric and skew matrices only, whose columns have the same sums.
    """
    if matrix.size(-1) > for_device(matrix, _LARGE, 0):  # one call less; slow for short rows
        rows: Tensor = torch.linalg.vector_norm(matrix, ord=1, dim=-1, keepdim=True)
        return rows.amax(dim=-2, keepdim=True)
    return matrix.abs().sum(dim=-2, keepdim=True).amax(dim=-1, keepdim=True)


def largest_bound(matrix: Tensor) -> float:
    """Return a bound on the eigenvalues of a batch, which is read.

    Positive semidefinite matrices only, symmetric or Hermitian. With the mean c and the deviation s
    of the eigenvalues, both from sums of entries, none exceeds c + s sqrt(m - 1); for large m the
    largest infinity norm is sharper. For a few numbers, where calls cost more than the products
    that a sharper bound saves, m times the largest entry, or the norm of one or two matrices.

    Reference: Wolkowicz & Styan (1980), Bounds for eigenvalues using traces, Theorem 2.1.
    """
    size = matrix.size(-1)
    if matrix.numel() <= FEW:
        if matrix.size(0) <= 2:
            return float(torch.linalg.vector_norm(matrix))
        return size * float(matrix.real.max())
    if size > MEDIUM:
        return float(infinity_norm(matrix).max())
    mean = matrix.diagonal(dim1=-2, dim2=-1).real.mean(dim=-1)
    square = torch.linalg.vector_norm(matrix.flatten(1), dim=-1).square_().div_(size)
    deviation = square.addcmul_(mean, mean, value=-1.0).clamp_(min=0.0).sqrt_()
    # 1 % for the rounding of the difference
    bound = 1.01 * float(mean.add_(deviation, alpha=math.sqrt(size - 1)).max())
    # the squares may overflow where the entries do not
    return bound if bound < math.inf else float(infinity_norm(matrix).max())


def bounds_of(squares: Tensor, inner: Tensor | None) -> tuple[float, float | None]:
    """Return a bound on the eigenvalues of a batch, and one on |S| of another; both are read."""
    if inner is None:
        return largest_bound(squares), None
    if squares.numel() > FEW or inner.size(0) > 1:
        sizes = torch.linalg.vector_norm(inner, dim=(-2, -1))
        return largest_bound(squares), float(sizes.max())
    size, of_inner = torch._foreach_norm([squares, inner])
    return size.item(), of_inner.item()


def largest_stretch(matrix: Tensor) -> Tensor:
    """Return about the largest singular value of each of ``(k, m, m)``, ``(k, 1, 1)``; too low.

    Two steps of the power method from a vector that has no structure to be orthogonal to. For a few
    numbers, where calls cost more than arithmetic, a bound, at most m^(1/4) times the value.
    """
    if matrix.numel() <= FEW:
        norm: Tensor = torch.linalg.vector_norm(gram(matrix), dim=(-2, -1), keepdim=True)
        return norm.sqrt()
    size: Tensor = torch.linalg.vector_norm(matrix, ord=math.inf, dim=(-2, -1), keepdim=True)
    matrix = matrix / size.clamp(min=1e-30)  # powers must not overflow
    image = matrix @ (matrix.mH @ _kept(_without_structure, matrix))
    before: Tensor = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
    after: Tensor = torch.linalg.vector_norm(matrix.mH @ image, dim=-2, keepdim=True)
    return after / before.clamp(min=1e-30) * size


def largest_eigenvalue(matrix: Tensor) -> Tensor:
    """Return about the largest eigenvalue of each symmetric matrix, ``(k, 1, 1)``.

    Four steps of the power method and a Rayleigh quotient: at most the eigenvalue.
    """
    vector = _kept(_without_structure, matrix).expand(*matrix.shape[:-1], 1)
    tiny = torch.finfo(matrix.dtype).tiny
    for _ in range(4):
        image = matrix @ vector
        vector = image / torch.linalg.vector_norm(image, dim=-2, keepdim=True).clamp(min=tiny)
    return (vector.mH @ (matrix @ vector)).real


def add_to_diagonal_(matrix: Tensor, value: float) -> Tensor:
    """matrix += value I in place."""
    if matrix.size(-1) > MEDIUM:
        matrix.diagonal(dim1=-2, dim2=-1).add_(value)
        return matrix
    return matrix.add_(identity_for(matrix), alpha=value)


def defect(own: Tensor) -> Tensor:
    """Return D = I - X'X from X'X: X + X D/2 is orthonormal up to D^2."""
    if _is_large(own):
        return add_to_diagonal_(own.neg(), 1.0)
    return torch.sub(_kept(_identity, own), own)


def plus_identity(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Return A + I, for small A in the memory ``out`` if there is some."""
    if _is_large(matrix):
        return add_to_diagonal_(matrix.clone(), 1.0)
    return torch.add(matrix, _kept(_identity, matrix), out=out)


def identity_for(matrix: Tensor) -> Tensor:
    """Return I like the matrices of a batch, ``(m, m)``; small ones are stored and shared."""
    return _identity(matrix) if _is_large(matrix) else _kept(_identity, matrix)


def _is_large(matrix: Tensor) -> bool:
    size = matrix.size(-1)
    return size > MEDIUM and size > for_device(matrix, MEDIUM, _KEPT_ELSEWHERE)


def _identity(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)


def _without_structure(matrix: Tensor) -> Tensor:
    """Return a vector ``(m, 1)`` for the power method."""
    count = torch.arange(matrix.size(-1), dtype=finest_dtype(matrix.real), device=matrix.device)
    return count.square_().cos_().to(matrix.dtype).unsqueeze(-1)


_KEPT: dict[tuple[Callable[[Tensor], Tensor], int, torch.dtype, torch.device], Tensor] = {}
_MOST_KEPT: Final = 256


def _kept(make: Callable[[Tensor], Tensor], matrix: Tensor) -> Tensor:
    """Return a constant that depends on width, dtype and device alone; it is stored and shared."""
    if is_compiling() or type(matrix) is not Tensor:
        return make(matrix)
    key = (make, matrix.size(-1), matrix.dtype, matrix.device)
    constant = _KEPT.get(key)
    if constant is None:
        with torch.inference_mode(mode=False):  # every caller shares it
            constant = make(matrix)
        is_plain = type(constant) is Tensor and not torch._is_functional_tensor(constant)
        if is_plain and len(_KEPT) < _MOST_KEPT and has_no_owner(matrix.device):
            _KEPT[key] = constant  # for good: captured graphs read it
    return constant


def solution(matrix: Tensor, right: Tensor) -> Tensor:
    """Return A^(-1) B, without waiting, for A with real part near I, singular only by rounding.

    Raises:
        LinAlgError: for a matrix that is singular by rounding, where looking is free; else NaN.
    """
    looks = is_cpu(matrix)
    solved: Tensor = torch.linalg.solve_ex(matrix, right, check_errors=looks).result
    return solved


def polar_rotation(matrix: Tensor, difference: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return rot(K) - I for rot(K) = (I + K)(I - K^2)^(-1/2), the polar factor of I + K, K skew.

    It is S + K + K S for ``matrix`` = K / scale and ``difference`` S = (I + K'K)^(-1/2) - I, from
    :func:`roots`; rot(K) is orthogonal and equal to exp(K) to second order.
    """
    if isinstance(scale, Tensor):
        matrix, scale = matrix * scale, 1.0
    return torch.baddbmm(matrix, matrix, difference, beta=scale, alpha=scale).add_(difference)


def exponential(step: Tensor) -> Tensor:
    """Return expm(K) for ``(..., m, m)``, orthogonal for skew K."""
    batch = step.reshape(-1, *step.shape[-2:])
    # For a single matrix torch 2.13 stops the series early: at 1e-11 in float64, and small ones at
    # 1e-5 in float32.
    is_precise = step.dtype in (torch.float64, torch.complex128)
    is_cut = batch.size(0) == 1 and (is_precise or step.size(-1) < 8)
    rotation: Tensor = torch.linalg.matrix_exp(batch.expand(2, -1, -1) if is_cut else batch)
    return rotation[: batch.size(0)].reshape(step.shape)


def cayley(step: Tensor) -> Tensor:
    """Return (I - K/2)^(-1) (I + K/2), orthogonal for skew K; one LU solve without host sync."""
    half = step / 2
    left = add_to_diagonal_(-half, 1.0)
    rotation: Tensor = torch.linalg.solve_ex(left, add_to_diagonal_(half, 1.0)).result
    return rotation
