"""Laws of the pure maps: definition, orthonormality, gradients, batches, precision, errors."""

import functools

import numpy as np
import pytest
import scipy.linalg
import torch
from cases import in_turn, pairwise
from map_cases import FUNCTIONS, error_of, gaussian, orthonormal
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import stiefel_opt as so
from stiefel_opt.parametrizations import (
    cayley_map,
    cwy,
    cwy_factors,
    eurnn,
    exponential_map,
    generalized_householder,
    householder,
    own_map,
    tcwy,
    urnn,
)

SHAPES = [(5, 5), (2, 3, 6, 4), (40, 40), (6, 2), (1, 1), (4, 4), (3, 1)]
DTYPES = [torch.float64, torch.complex128]
shapes_and_dtypes = pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES, DTYPES))


def eye(size):
    return torch.eye(size, dtype=torch.float64)


def reflection(vector, beta=2.0):
    """H(v), written out."""
    length = vector.abs().square().sum()
    return eye(len(vector)) - beta * torch.outer(vector, vector.conj()) / length


# ---- what every map is ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)
def test_columns_are_orthonormal_and_both_derivatives_right(case):
    point = case.function(*case.free())
    if case.orthonormal:
        assert error_of(point) < 1e-14
    else:
        assert torch.linalg.matrix_norm(point, 2) <= 1 + 1e-14
    assert gradcheck(case.function, case.free())
    assert gradgradcheck(case.function, case.free(), fast_mode=True)


FREE = {name: case for name, case in FUNCTIONS.items() if "based" not in name}  # one matrix


@pytest.mark.parametrize("case", FREE.values())
def test_a_batch_is_its_matrices(case):
    free = case.free(lead=(2, 3))
    together = case.function(*free)
    for i, j in np.ndindex(2, 3):
        alone = case.function(*(tensor[i, j] for tensor in free))
        torch.testing.assert_close(together[i, j], alone, rtol=1e-13, atol=1e-13)


# ---- reflections ---------------------------------------------------------------------------------


@shapes_and_dtypes
def test_householder_is_the_product_of_its_reflections(shape, dtype):
    vectors = gaussian(*shape, dtype=dtype)
    found = householder(vectors)
    for index in np.ndindex(shape[:-2]):
        matrices = [reflection(column).to(dtype) for column in vectors[index].unbind(-1)]
        expected = functools.reduce(torch.matmul, matrices)
        torch.testing.assert_close(found[index], expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*in_turn(SHAPES, DTYPES), *(((290, 260), dtype) for dtype in DTYPES)]
)
def test_compact_form_is_the_sequential_product_value_and_gradient(shape, dtype):
    """From 256 on triangles of products are formed by panels, the last of them narrower here."""
    vectors = gaussian(*shape, dtype=dtype).requires_grad_()
    pairs = [
        (cwy, householder),
        (tcwy, lambda v: householder(v)[..., : v.size(-1)]),
        (lambda v: cwy(v, 1), lambda v: householder(v, 1)),
    ]
    for compact, sequential in pairs:
        found, expected = compact(vectors), sequential(vectors)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        weight = gaussian(*expected.shape, seed=1, dtype=dtype)
        gradients = [torch.autograd.grad(q, vectors, weight)[0] for q in (found, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@shapes_and_dtypes
def test_factors_apply_the_product_without_forming_it(shape, dtype):
    vectors = gaussian(*shape, dtype=dtype)
    unit, half_gram = cwy_factors(vectors)
    lengths = torch.linalg.vector_norm(unit, dim=-2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    torch.testing.assert_close(half_gram, half_gram.triu())
    torch.testing.assert_close(half_gram + half_gram.mH, unit.mH @ unit, rtol=0, atol=1e-14)
    rows = gaussian(*shape[:-2], 3, shape[-2], seed=1, dtype=dtype)
    inner = (rows @ unit.conj()).mT
    turned = rows - torch.linalg.solve_triangular(half_gram, inner, upper=True).mT @ unit.mT
    torch.testing.assert_close(turned, rows @ cwy(vectors).mT, rtol=0, atol=1e-13)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_lengths_do_not_matter(factor):
    vectors = gaussian(8, 5, dtype=torch.float32)
    torch.testing.assert_close(cwy(vectors * factor), cwy(vectors), rtol=0, atol=1e-6)
    spread = vectors * torch.logspace(-8, 8, 5)
    torch.testing.assert_close(cwy(spread), cwy(vectors), rtol=0, atol=1e-6)


# ---- generalized products ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "beta", "dtype"),
    in_turn([(5, 3), (3, 7), (4, 1)] * 2, [None, 2.0, 0.0, 1.0], DTYPES),
)
def test_generalized_product_is_its_factors_first_key_first(shape, beta, dtype):
    size, count = shape
    keys = gaussian(size, count, dtype=dtype)
    random = 2 * torch.rand(count, dtype=torch.float64)
    betas = random if beta is None else torch.full((count,), beta, dtype=torch.float64)
    expected = eye(size).to(dtype)
    for key, b in zip(keys.unbind(-1), betas, strict=True):
        expected = reflection(key, b).to(dtype) @ expected
    found = generalized_householder(keys, betas)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    if beta == 2.0 and count <= size:
        torch.testing.assert_close(found, cwy(keys.flip(-1)), rtol=0, atol=1e-13)


# ---- skew maps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype", "based"),
    pairwise([(5, 5), (9, 3), (5, 3), (2, 7, 2), (4, 1)], DTYPES, [False, True]),
)
def test_skew_maps_are_those_of_the_full_skew_matrix(shape, dtype, based):
    free = gaussian(*shape, dtype=dtype)
    base = orthonormal(*shape, seed=2, dtype=dtype) if based else None
    point = base if based else eye(shape[-2])[:, : shape[-1]].to(dtype).expand(shape)
    exponential, transform = exponential_map(free, base), cayley_map(free, base)
    for index in np.ndindex(shape[:-2]):
        x, p = point[index].numpy(), free[index].numpy()
        skew = p @ x.conj().T - x @ p.conj().T
        expected = scipy.linalg.expm(skew) @ x
        np.testing.assert_allclose(exponential[index].numpy(), expected, atol=1e-13)
        identity = np.eye(len(skew))
        expected = np.linalg.solve(identity - skew / 2, (identity + skew / 2) @ x)
        np.testing.assert_allclose(transform[index].numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("size", [1e-8, 1.0, 30.0])
def test_tall_exponential_stays_orthonormal_for_long_steps(size):
    assert error_of(exponential_map(gaussian(50, 4) * size)) < 1e-12 * max(1.0, size)
    assert error_of(exponential_map(torch.zeros(50, 4, dtype=torch.float64))) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_reflections_have_curvature_where_entries_are_zero(dtype):
    vectors = torch.tril(torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert gradgradcheck(householder, (vectors.requires_grad_(),))
    if dtype.is_complex:
        phases, order = torch.randn(3, 4, dtype=torch.float64), torch.randperm(4)
        pair = torch.eye(4, 2, dtype=dtype, requires_grad=True)
        assert gradgradcheck(lambda v: urnn(phases, v, order), (pair,))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_map_of_its_shape_alone_is_traced():
    vectors = torch.randn(5, 3)
    traced = torch.jit.trace(tcwy, (vectors,), check_trace=False)
    torch.testing.assert_close(traced(vectors), tcwy(vectors))


# ---- OWN, URNN, EURNN ----------------------------------------------------------------------------


def test_own_is_the_polar_factor_of_centred_columns():
    free = gaussian(3, 8, 4)
    found = own_map(free)
    assert found.sum(-2).abs().max() < 1e-14
    for matrix, point in zip(free, found, strict=True):
        expected, _ = scipy.linalg.polar((matrix - matrix.mean(0)).numpy())
        np.testing.assert_allclose(point.numpy(), expected, atol=1e-13)


def test_own_is_orthonormal_in_float32_where_vectors_are_nearly_dependent():
    free = gaussian(50, 33, 32, seed=0).float()  # conditions up to 1e4
    found = own_map(free)
    assert (found.mT @ found - torch.eye(32)).abs().max() < 1e-5
    torch.testing.assert_close(found, own_map(free.double()).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "start", [torch.ones(7, 4), torch.zeros(7, 4), torch.ones(8, 1) * torch.tensor([1.0, 1, -1, 1])]
)
def test_own_starts_from_dependent_columns(start):
    module = nn.Module()
    module.weight = nn.Parameter(start.clone())
    with pytest.warns(UserWarning, match="the nearest point to `weight` is not unique"):
        so.orthogonal(module, "weight", "own")
    weight = module.weight.detach()
    torch.testing.assert_close(weight.T @ weight, torch.eye(4), rtol=0, atol=1e-5)
    assert weight.sum(0).abs().max() < 1e-5


def test_own_has_a_gradient_at_equal_eigenvalues():
    """Autograd through eigh divides by their difference."""
    free = orthonormal(6, 3)
    free = (free - free.mean(0)) @ torch.eye(3, dtype=torch.float64)
    free = torch.linalg.qr(free).Q.requires_grad_()  # centred, V'V = I
    assert gradcheck(own_map, (free,))
    for scale in (1.0, 3.0):
        assert gradgradcheck(own_map, ((scale * free.detach()).requires_grad_(),))


def test_own_has_derivatives_of_any_order_at_equal_eigenvalues():
    """Of third order too, against those where the eigenvalues differ by little."""
    free = orthonormal(7, 3) - orthonormal(7, 3).mean(0)
    free = torch.linalg.qr(free).Q
    direction = gaussian(7, 3, seed=1)

    def third(at):
        t = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = (own_map(at + t * direction) * gaussian(7, 3, seed=2)).sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value, t, create_graph=True)
        return value.item()

    near = free * torch.tensor([1.0, 1.0 + 1e-6, 1.0 - 1e-6], dtype=torch.float64)
    assert third(free) == pytest.approx(third(near), rel=1e-4)


def test_urnn_is_the_product_of_its_factors():
    size = 6
    phases, vectors = gaussian(3, size), gaussian(size, 2, dtype=torch.complex128)
    permutation = torch.randperm(size)
    fourier = torch.fft.fft(torch.eye(size, dtype=torch.complex128), dim=0, norm="ortho")
    d1, d2, d3 = (torch.diag(torch.exp(1j * angle)) for angle in phases)
    h1, h2 = (reflection(column) for column in vectors.unbind(-1))
    swap = torch.eye(size, dtype=torch.complex128)[permutation]
    expected = d3 @ h2 @ fourier.mH @ d2 @ swap @ h1 @ fourier @ d1
    torch.testing.assert_close(urnn(phases, vectors, permutation), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("size", [2, 5, 6])
def test_eurnn_is_the_product_of_its_layers(size):
    phases, angles = gaussian(size), gaussian(4, 2, size // 2, seed=1)
    expected = torch.diag(torch.exp(1j * phases))
    for number, (turns, twists) in enumerate(angles):
        layer = torch.eye(size, dtype=torch.complex128)
        firsts = range(number % 2, size - 1, 2)
        for first, turn, twist in zip(firsts, turns, twists, strict=False):
            factor = torch.exp(1j * twist)
            block = [[factor * turn.cos(), -turn.sin()], [factor * turn.sin(), turn.cos()]]
            for row, column in np.ndindex(2, 2):
                layer[first + row, first + column] = block[row][column]
        expected = expected @ layer
    torch.testing.assert_close(eurnn(phases, angles), expected, rtol=0, atol=1e-14)


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "dtype"),
    in_turn(
        [householder, cwy, tcwy, exponential_map, cayley_map, own_map],
        [torch.bfloat16, torch.float16],
    ),
)
def test_half_precision_and_autocast_compute_in_float32(function, dtype):
    half = gaussian(8, 3, dtype=torch.float32).to(dtype)
    assert {tensor.dtype for tensor in cwy_factors(half)} == {torch.float32}
    found = function(half)
    assert found.dtype == dtype
    torch.testing.assert_close(found, function(half.float()).to(dtype), rtol=0, atol=0)
    free = half.float().requires_grad_()
    function(free).square().sum().backward()
    again = half.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        point = function(again)
        assert point.dtype == torch.float32
    point.square().sum().backward()
    assert torch.equal(point, function(half.float()))
    torch.testing.assert_close(again.grad, free.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_arguments_by_name(dtype):
    vectors, base = gaussian(6, 3).to(dtype), orthonormal(6, 3).to(dtype)
    assert torch.equal(cwy(vectors=vectors, columns=2), cwy(vectors, 2))
    based = exponential_map(free=vectors, base=base)
    assert torch.equal(based, exponential_map(vectors, base))
    assert torch.equal(exponential_map(vectors, base=base), based)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        cwy(columns=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_unitary_maps_of_angles_that_were_converted(dtype):
    """module.double() and .bfloat16() change the angles and not the complex vectors."""
    phases, vectors = gaussian(3, 4).float(), gaussian(4, 2, dtype=torch.complex64)
    order, angles = torch.arange(4), gaussian(4, 2, 2, seed=1).float()
    for angle in (phases, angles):
        angle.copy_(angle.bfloat16())  # so that the conversion rounds nothing
    found = urnn(phases.to(dtype), vectors, order)
    torch.testing.assert_close(found, urnn(phases, vectors, order), rtol=0, atol=0)
    found = eurnn(phases[0].to(dtype), angles.to(dtype))
    assert error_of(found) < 1e-6
    torch.testing.assert_close(found.to(torch.complex64), eurnn(phases[0], angles))


@pytest.mark.parametrize(("count", "shift"), [(16, 1.0), (128, 0.0), (256, 1.0)])
def test_float32_error_does_not_grow_with_the_number_of_reflections(count, shift):
    """One reflection after the other adds a rounding each; the compact form solves once.

    ``shift`` turns all vectors towards one another, so that the Gram matrix is far from I.
    """
    vectors = gaussian(256, count, dtype=torch.float32) + shift
    for function in (cwy, tcwy):
        assert error_of(function(vectors).double()) < 2.5e-6


def test_functional_transforms():
    vectors = gaussian(4, 6, 3)

    def loss(v):
        return tcwy(v).pow(3).sum() + cwy(v).pow(3).sum()

    each = torch.vmap(torch.func.grad(loss))(vectors)
    alone = torch.stack([torch.func.grad(loss)(v) for v in vectors])
    torch.testing.assert_close(each, alone, rtol=1e-13, atol=1e-13)


# ---- errors --------------------------------------------------------------------------------------


WRONG = [
    (lambda: cwy(torch.ones(3, 4)), ValueError, "`vectors` must be at most N columns"),
    (lambda: tcwy(torch.ones(3, 4)), ValueError, "`vectors` must be at most N columns"),
    (lambda: householder(torch.ones(3)), ValueError, "`vectors` must be the columns"),
    (
        lambda: cwy(torch.ones(3, 2, dtype=torch.long)),
        TypeError,
        "`vectors` must have a floating-point dtype, got torch.int64",
    ),
    (lambda: own_map([1.0]), TypeError, "`free` must be a tensor, got list"),
    (lambda: cwy(torch.ones(3, 0)), ValueError, "`vectors` must be the columns"),
    (lambda: cwy(torch.ones(3, 2), 4), ValueError, r"`columns` must lie in \[1, 3\], got 4"),
    (
        lambda: generalized_householder(torch.zeros(3, 1), torch.ones(1)),
        ValueError,
        "`keys` must be nonzero columns",
    ),
    (
        lambda: generalized_householder(torch.ones(3, 1), torch.tensor([2.5])),
        ValueError,
        r"`betas` must lie in \[0, 2\], got \[2.5, 2.5\]",
    ),
    (
        lambda: generalized_householder(torch.ones(3, 2), torch.ones(3)),
        ValueError,
        "`betas` must have one number for each of 2 keys",
    ),
    (lambda: exponential_map(torch.ones(2, 3)), ValueError, "`free` must be tall or square"),
    (
        lambda: cayley_map(torch.ones(3, 2), torch.eye(3)),
        ValueError,
        r"`base` must have the shape \(3, 2\) of free",
    ),
    (lambda: own_map(torch.eye(3)), ValueError, "`free` must have more rows than columns"),
    (
        lambda: urnn(torch.ones(3, 4), torch.ones(4, 2), torch.arange(4)),
        TypeError,
        "`vectors` must be complex",
    ),
    (
        lambda: urnn(torch.ones(3, 4), torch.zeros(4, 2) * 1j, torch.arange(4)),
        ValueError,
        "nonzero columns",
    ),
    (
        lambda: urnn(torch.ones(2, 4), torch.ones(4, 2) * 1j, torch.arange(4)),
        ValueError,
        "`phases, vectors, permutation` must be",
    ),
    (lambda: eurnn(torch.ones(4), torch.ones(4, 2, 3)), ValueError, "`phases, angles` must"),
]


def test_wrong_input_is_named():
    for call, error, message in WRONG:
        with pytest.raises(error, match=message):
            call()


# ---- vectors that are zero ---------------------------------------------------------------------

PRODUCTS = {
    "householder": householder,
    "cwy": cwy,
    "cwy, columns": functools.partial(cwy, columns=2),
    "tcwy": tcwy,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", PRODUCTS)
def test_zero_vectors_are_left_out_on_request(name, dtype, generator):
    """Each is a factor of identity: the product is that of the others, and so is its gradient."""
    function = PRODUCTS[name]
    vectors = torch.randn(2, 3, 6, 4, dtype=dtype, generator=generator)
    vectors[0, 2, :, 1] = 0
    vectors[1, 1] = 0
    vectors.requires_grad_()
    found = function(vectors, skip_zeros=True)
    others = vectors[0, 2][:, [0, 2, 3]]
    columns = found.size(-1)
    torch.testing.assert_close(found[0, 2], cwy(others, columns))
    torch.testing.assert_close(found[1, 1], torch.eye(6, columns, dtype=dtype))
    torch.testing.assert_close(found[0, 1], function(vectors[0, 1]))
    weights = torch.randn(found.shape, dtype=dtype, generator=generator)
    (grad,) = torch.autograd.grad((found * weights).real.sum(), vectors)
    one = (cwy(others, columns) * weights[0, 2]).real.sum()
    (wanted,) = torch.autograd.grad(one, vectors)
    assert not wanted[0, 2, :, 1].any()
    torch.testing.assert_close(grad[0, 2], wanted[0, 2])
    assert not grad[1, 1].any()


@pytest.mark.parametrize("name", [*PRODUCTS, "cwy_factors"])
def test_the_first_matrix_with_a_zero_vector_is_named(name):
    function = PRODUCTS.get(name, cwy_factors)
    vectors = torch.ones(5, 4, 6, 3).tril()
    vectors[2, 3, :, 1] = 0
    vectors[4, 0] = 0
    message = r"got a zero vector in 2 of 20 matrices, the first at index \(2, 3\)"
    with pytest.raises(ValueError, match=message):
        function(vectors)
    with pytest.raises(ValueError, match=r"in 2 of 4 matrices, the first at index 1"):
        generalized_householder(vectors[[0, 2, 0, 4], [0, 3, 0, 0]], torch.ones(4, 3))
