r"""The Stiefel manifold itself, on batches ``(..., n, m)`` of tall matrices, n >= m.

:math:`\mathrm{St}(n, m) = \{X : X^\top X = I\}`; the tangent space at X is
:math:`\{\xi : X^\top \xi + \xi^\top X = 0\}`. For complex matrices every transpose is conjugate.
Everything here broadcasts over leading dimensions.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from stiefel_opt.errors import HALF, fail
from stiefel_opt.numerics.device import full_precision, no_autocast, widened
from stiefel_opt.numerics.linalg import add_to_diagonal_, defect, skew, solution, sym

RETRACTIONS: Final = ("cayley", "qr", "polar")
# |X'X - I| above which a weight is off the manifold: more than rounding, of bfloat16 too.
FAR: Final = 2e-2
_FAR: Final = 1e-4  # where no value was rounded to half precision


def is_far(error: float, value: Tensor) -> bool:
    """Say whether |X'X - I| of a weight is more than rounding, also of the dtype it came from."""
    if error <= _FAR or value.dtype in HALF or error > FAR:
        return error > FAR
    real = torch.view_as_real(value) if value.is_complex() else value
    return not any(torch.equal(real, real.to(dtype).to(real.dtype)) for dtype in HALF)


def orthonormality_tolerance(dtype: torch.dtype, n: int) -> float:
    """Return ``10 sqrt(n) eps``: below it, max abs of X'X - I counts as rounding.

    Each entry of X'X is a sum of n products, whose rounding grows like sqrt(n) eps. In half
    precision it is 2 eps: X'X is summed in float32, and rounding X changes an entry by up to eps.
    """
    if dtype in HALF:
        return 2.0 * torch.finfo(dtype).eps
    return 10.0 * math.sqrt(n) * torch.finfo(dtype).eps


def scale_tolerance(dtype: torch.dtype, n: int) -> float:
    """Return the relative change of a scale below which loaded values are of the same scale.

    Matrices that are orthonormal up to rounding have a scale within half of that.
    """
    return 1e-3 if dtype in HALF else orthonormality_tolerance(dtype, n)


def scale_rounding(dtype: torch.dtype, n: int) -> float:
    """Return by how much the saved scale of a weight may differ from the one it has taken since.

    Never less than :func:`scale_tolerance`, below which a weight keeps the scale that it had.
    """
    return max(1e-5, torch.finfo(dtype).eps, scale_tolerance(dtype, n))


def gram_error(point: Tensor) -> Tensor:
    """Return max abs of X'X - I for each matrix, shape ``(...)``: how far X is from orthonormal."""
    point = widened(point)
    with no_autocast(point):
        return identity_error(point.mH @ point)


def identity_error(matrix: Tensor) -> Tensor:
    """Return max abs of A - I for each matrix, shape ``(...)``."""
    error: Tensor = torch.linalg.vector_norm(defect(matrix), ord=math.inf, dim=(-2, -1))
    return error


def tangent_part(point: Tensor, vector: Tensor) -> Tensor:
    """Return the tangent vector at X = ``point`` nearest to D = ``vector``, D - X sym(X'D)."""
    with no_autocast(point):
        return vector - point @ sym(point.mH @ vector)


def riemannian_gradient(point: Tensor, grad: Tensor, *, a: float = 0.5) -> Tensor:
    r"""Return the gradient for the metric :math:`\mathrm{tr}(\xi^\top (I - a X X^\top) \zeta)`.

    :math:`X f + g` with :math:`f = (X^\top G - G^\top X) / (2 (1 - a))` and
    :math:`g = (I - X X^\top) G`; a = 1/2 is the canonical metric, 0 the Euclidean one.

    Reference: Kong, Wang & Tao (ICLR 2023), section 2.
    """
    if not a < 1:
        raise ValueError(fail("a", "be below 1", a))
    product = point.mH @ grad
    return grad + point @ (skew(product) / (1 - a) - product)


def polar_factor(matrices: Tensor, determinant: int | Tensor | None = None) -> Tensor:
    r"""Return the orthonormal matrices nearest to ``matrices`` in every unitarily invariant norm.

    For :math:`A = P \Sigma Q^\top`, tall and finite, it is :math:`P Q^\top`. Where A has not full
    rank the nearest matrix is not unique and one of them is returned. With a ``determinant`` of 1
    or -1, or a tensor of them, square real matrices only, the last column of P changes its sign
    where that is needed.

    Note: One LAPACK singular value decomposition, about 6 n m^2 + 20 m^3 flops, which waits for the
        device: for initial values, not for steps. One Newton-Schulz step at the end removes the
        rounding of the decomposition from X'X - I. Autograd would divide by differences of
        singular values: :func:`polar` has the derivative.
    """
    return _polar_factor(matrices, determinant)[0]


def polar(matrices: Tensor, determinant: int | None = None) -> tuple[Tensor, Tensor]:
    """Return :func:`polar_factor`, differentiable, and how far each is from not being unique.

    That is the smallest sum of two singular values, equal or not, by which the derivative divides,
    over the largest; the sign of one that changes it counts. Shape ``(...)``, 0 for a zero matrix.
    """
    polar, values = _Polar.apply(matrices, determinant)  # type: ignore[no-untyped-call]
    last = values[..., -1]
    if determinant is None:
        smallest = 2 * last
    elif values.size(-1) > 1:
        smallest = values[..., -2] + last
    else:
        smallest = last.new_ones(()).expand_as(last)
    largest = values.abs().amax(dim=-1)
    return polar, torch.where(largest > 0, smallest / largest, 0.0)


def _polar_factor(matrices: Tensor, determinant: int | Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the factor and the singular values, the last with the sign that it needs."""
    if matrices.size(-2) < matrices.size(-1):
        raise ValueError(fail("matrices", "be tall", matrices))
    with no_autocast(matrices):
        left, values, right = torch.linalg.svd(widened(matrices), full_matrices=False)
        if determinant is not None:
            sign = orientation(left @ right) * determinant
            signs = torch.ones_like(values)
            signs[..., -1] = sign
            left, values = left * signs.unsqueeze(-2), values * signs
        return newton_schulz(left @ right).to(matrices.dtype), values


def orientation(matrices: Tensor) -> Tensor:
    """Return the signs of the determinants of real square matrices, of 3 x 3 without LAPACK.

    By slogdet: a determinant of large matrices, a product of many pivots, may round to 0.
    """
    matrices = widened(matrices)
    if matrices.size(-1) != 3:
        sign: Tensor = torch.linalg.slogdet(matrices).sign
        return sign
    first, second, third = matrices.unbind(-2)
    triple: Tensor = (torch.linalg.cross(first, second) * third).sum(-1)
    return triple.sign()


def newton_schulz(point: Tensor, steps: int = 1) -> Tensor:
    """Return ``point``, near the manifold, on it: each Newton-Schulz step squares the error."""
    with no_autocast(point):
        for _ in range(steps):
            point = 1.5 * point - 0.5 * point @ (point.mH @ point)
    return point


def random_point(
    *shape: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return uniformly (Haar) distributed orthonormal matrices, as ``stiefel_opt.random_point``.

    The Q factor of a Gaussian matrix is uniform once the diagonal of R is positive. Complex ones
    are uniform among the complex matrices with X'X = I, X' the conjugate transpose.
    """
    if len(shape) < 2 or min(shape) < 1:
        raise ValueError(fail("shape", "be at least two positive sizes", shape))
    wide = shape[-2] < shape[-1]
    tall = (*shape[:-2], shape[-1], shape[-2]) if wide else shape
    gaussian = torch.randn(tall, generator=generator, dtype=dtype, device=device)
    orthonormal = positive_qr(gaussian)
    return orthonormal.mT.contiguous() if wide else orthonormal.contiguous()


@full_precision
def retraction(point: Tensor, tangent: Tensor, name: str) -> Tensor:
    r"""Return :math:`R_X(\xi)` for "polar", "qr" or "cayley": of tall matrices, one factorisation.

    The Cayley map in its reduced form, K^(-1) (2I - K) with K = I - T/2 + V'V/4 and xi = XT + V.
    """
    moved = point + tangent
    if name == "polar":
        return polar(moved)[0]
    if name == "qr":
        return positive_qr(moved)
    turn = skew(point.mH @ tangent)
    half = (tangent - point @ turn) / 2
    kernel = add_to_diagonal_(half.mH @ half - turn / 2, 1.0)
    moved = (point + half) @ solution(kernel, add_to_diagonal_(-kernel, 2.0)) + half
    return newton_schulz(moved)  # the reduced form multiplies an error of X'X, from step to step


def positive_qr(matrices: Tensor) -> Tensor:
    """Return the Q factor whose R has a positive diagonal."""
    orthonormal, triangular = torch.linalg.qr(widened(matrices))
    phase = torch.sgn(torch.diagonal(triangular, dim1=-2, dim2=-1)).unsqueeze(-2)
    factor: Tensor = torch.where(phase == 0, orthonormal, orthonormal * phase)
    return factor.to(matrices.dtype)


# ---- the derivative of the polar factor ----------------------------------------------------------


class _Polar(torch.autograd.Function):
    r"""Y with A = Y H, the polar factor, and its derivative, at equal singular values too.

    Of a gradient G it makes :math:`(I - Y Y^\top) G H^{-1} + 2 Y \Omega`, where
    :math:`H \Omega + \Omega H = \mathrm{skew}(Y^\top G)`. Without ``jvp``: nested forward modes
    of torch 2.13 return zeros for a function that has one.
    """

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(matrices: Tensor, determinant: int | None) -> tuple[Tensor, Tensor]:
        return _polar_factor(matrices, determinant)

    @staticmethod
    @override
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, int | None], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], output[0])

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        matrices, polar = ctx.saved_tensors
        with no_autocast(matrices):
            stretch, inner = sym(polar.mH @ matrices), polar.mH @ grads[0]
            spectrum = torch.linalg.eigh(stretch.detach())
            result = 2 * polar @ solve_lyapunov(stretch, skew(inner), spectrum)
            if polar.size(-2) > polar.size(-1):
                twice = torch.zeros_like(stretch)
                inverse = solve_lyapunov(stretch, add_to_diagonal_(twice, 2.0), spectrum)
                result = result + (grads[0] - polar @ inner) @ inverse
            return result, None


def solve_lyapunov(
    matrix: Tensor, right: Tensor, spectrum: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return X with H X + X H = Y, H Hermitian; differentiable any number of times.

    Where two eigenvalues add up to zero there is none, or many: of the smallest norm.

    ``spectrum``: eigenvalues and eigenvectors of H, where they are known already.
    """
    values, basis = spectrum or torch.linalg.eigh(matrix.detach())
    solution: Tensor = _Lyapunov.apply(matrix, right, values, basis)  # type: ignore[no-untyped-call]
    return solution


class _Lyapunov(torch.autograd.Function):
    r"""X with :math:`H X + X H = Y`, by the eigenvalues of H.

    Its derivative, :math:`H \, dX + dX \, H = dY - dH \, X - X \, dH`, is an equation of the same
    kind, so that any order of derivative divides by sums of eigenvalues only.
    """

    generate_vmap_rule = True

    @staticmethod
    @override
    def forward(matrix: Tensor, right: Tensor, values: Tensor, basis: Tensor) -> Tensor:
        sums = values.unsqueeze(-1) + values.unsqueeze(-2)
        rounding = values.size(-1) * torch.finfo(values.dtype).eps
        is_zero = sums.abs() <= rounding * values.abs().amax(-1)[..., None, None]
        inner = torch.where(is_zero, 0, basis.mH @ right @ basis / sums.masked_fill(is_zero, 1))
        return basis @ inner @ basis.mH

    @staticmethod
    @override
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        matrix, _, values, basis = inputs
        ctx.save_for_backward(matrix, values, basis, output)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        matrix, values, basis, solution = ctx.saved_tensors
        with no_autocast(matrix):
            back = solve_lyapunov(matrix, grads[0], (values, basis))
            return -(back @ solution.mH + solution.mH @ back), back, None, None
