"""Spectral steepest descent: optimal, tangent, continuous, certified; and the rule on top of it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import in_turn, mixed
from held import Calls
from torch import Tensor

from stiefel_opt.functional.flows import corrected
from stiefel_opt.methods import muon, spectral_direction, spectral_gap
from stiefel_opt.numerics.device import BlindReader
from stiefel_opt.numerics.geometry import gram_error, orthonormality_tolerance, random_point
from stiefel_opt.numerics.linalg import LOCAL_SUMS

AMBIENT = "momentum_ambient"
DOUBLE = torch.float64
DTYPES = (torch.float32, DOUBLE, torch.complex64)
SHAPES = [
    (1, 64, 4),
    (5, 40, 8),
    (1, 128, 32),
    (2, 24, 24),
    (1, 33, 33),
    (2, 20, 17),
    (3, 6, 1),
    (3, 9, 8),
]


def _spectrum(gaussian: Tensor, values: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(gaussian, full_matrices=False)
    return (left * values.to(gaussian.dtype)) @ right


def _low_rank(gaussian: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(gaussian, full_matrices=False)
    return (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda g: g,
    "tiny": lambda g: g * 1e-30,
    "ill-conditioned": lambda g: _spectrum(g, torch.logspace(0, -6, g.size(-1), dtype=DOUBLE)),
    "rank-1": lambda g: _low_rank(g, 1),
    "rank-m-1": lambda g: _low_rank(g, max(g.size(-1) - 1, 1)),
    "rank-8-and-noise": lambda g: _low_rank(g, 8) + 1e-2 * g,
    "repeated": lambda g: _spectrum(g, 1.0 + (torch.arange(g.size(-1)) < g.size(-1) // 2).double()),
    "zero": lambda g: g * 0,
}


def problem(
    shape: tuple[int, int, int], kind: str, generator: torch.Generator, dtype: torch.dtype = DOUBLE
) -> tuple[Tensor, Tensor]:
    """A point and a gradient."""
    wide = torch.complex128 if dtype.is_complex else DOUBLE
    point = random_point(*shape, generator=generator, dtype=wide)
    gaussian = torch.randn(shape, generator=generator, dtype=wide)
    return point.to(dtype), GRADIENTS[kind](gaussian).to(dtype)


def stepped(point: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The new point of a first step with momentum."""
    return muon(point, grad, {AMBIENT: torch.zeros_like(grad)}, **options)[0]


def value_of(grad: Tensor, direction: Tensor) -> Tensor:
    """<M, D>."""
    return (grad.conj() * direction).sum(dim=(-2, -1)).real


def assert_feasible(point: Tensor, direction: Tensor) -> None:
    """D is tangent and its spectral norm at most 1."""
    single = direction.dtype in (torch.float32, torch.complex64)
    point, direction = (tensor.to(torch.complex128) for tensor in (point, direction))
    inner = point.mH @ direction
    tangency = torch.linalg.matrix_norm(inner + inner.mH) / point.size(-1)
    assert tangency.max() <= (1e-5 if single else 1e-6)
    assert torch.linalg.matrix_norm(direction, 2).max() <= 1 + 1e-4


def assert_optimal(point: Tensor, grad: Tensor, direction: Tensor) -> None:
    """No feasible direction has more than 1 / 0.9999 of the value, the nuclear norm of n x n."""
    gap = spectral_gap(point, grad, direction)
    assert gap.max() <= 1e-4
    assert gap.min() >= -1e-6
    best = torch.linalg.svdvals(turned(point, grad)).sum(dim=-1)
    value = value_of(grad, direction) / best
    assert value.min() >= 0.9999
    assert value.max() <= 1 + 1e-4


@pytest.mark.parametrize(("kind", "shape", "dtype"), mixed(24, GRADIENTS, SHAPES, DTYPES))
def test_the_direction_is_optimal_tangent_and_of_norm_one(shape, kind, dtype, generator):
    point, grad = problem(shape, kind, generator, dtype)
    direction = spectral_direction(point, grad)
    wide = torch.complex128 if dtype.is_complex else DOUBLE
    tensors = [tensor.to(wide) for tensor in (point, grad, direction)]
    assert_feasible(point, direction)
    if kind == "zero":
        assert not direction.any()
        return
    assert_optimal(*tensors)


def nuclear_norm(point: Tensor, grad: Tensor, multiplier: Tensor) -> Tensor:
    """|M_T - X L|_*, which no feasible direction exceeds whatever the symmetric L is."""
    inner = point.mT @ grad
    normal = (inner + inner.mT) / 2 + multiplier
    return torch.linalg.svdvals(grad - point @ normal).sum(dim=-1)


@pytest.mark.parametrize("shape", [(1, 30, 6), (1, 6, 6), (1, 9, 7)], ids=str)
def test_the_gap_is_that_to_the_least_dual_value(shape, generator):
    """L = -sym(A R) attains it, for A = X'D and R = D'(M_T - X L), which is K = skew(A R)."""
    point, grad = problem(shape, "gaussian", generator)
    direction = spectral_direction(point, grad, tolerance=1e-12, smoothing=1e-7)
    value = value_of(grad, direction)
    worse = spectral_gap(point, grad, 0.7 * direction)
    torch.testing.assert_close(worse, torch.full_like(worse, 0.3), rtol=0, atol=1e-6)
    assert (spectral_gap(point, grad, 3 * direction) <= 1e-6).all()  # longer, no better
    assert (spectral_gap(point, 0 * grad, direction) == 0).all()
    for size in (0.0, 0.1, 1.0):
        other = size * torch.randn(*point.mT.shape[:2], shape[-1], generator=generator).double()
        assert (nuclear_norm(point, grad, other + other.mT) >= value * (1 - 1e-9)).all()


def turned(point: Tensor, grad: Tensor) -> Tensor:
    """W = X K X' + (N X' - X N') / 2 with all n rows, whose nuclear norm is the optimal value."""
    inner = point.mH @ grad
    half = (grad - point @ inner) @ point.mH / 2
    return point @ (inner - inner.mH) @ point.mH / 2 + half - half.mH


@pytest.mark.parametrize("shape", [(1, 30, 6), (1, 8, 8), (2, 9, 8), (1, 10, 7)], ids=str)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.complex128], ids=str)
def test_the_direction_is_a_polar_factor_of_n_by_n_times_the_point(shape, dtype, generator):
    point, grad = problem(shape, "gaussian", generator, dtype)
    left, values, right = torch.linalg.svd(turned(point, grad))
    kept = values > 1e-9 * values[..., :1]
    direction = spectral_direction(point, grad, tolerance=1e-12, smoothing=1e-8)
    expected = (left * kept[..., None, :]) @ right @ point
    torch.testing.assert_close(direction, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE], ids=str)
@pytest.mark.parametrize("shape", [(50, 5, 4), (50, 9, 8), (9, 20, 17), (9, 24, 16), (9, 40, 8)])
def test_rounding_of_the_gradient_changes_the_direction_by_little_more(shape, dtype, generator):
    """Also with a row more than columns, where the multipliers are all but arbitrary."""
    point, grad = problem(shape, "gaussian", generator, dtype)
    eps = torch.finfo(dtype).eps
    noise = torch.randn(shape, generator=generator).to(dtype)
    moved = spectral_direction(point, grad * (1 + eps * noise)) - spectral_direction(point, grad)
    assert moved.abs().max() <= 1e-4 * (eps / 1e-7) ** 0.5


def test_scale_sign_and_rotations_carry_over(generator):
    point, grad = problem((2, 30, 6), "gaussian", generator)
    frame = random_point(30, 30, generator=generator, dtype=DOUBLE)
    columns = random_point(6, 6, generator=generator, dtype=DOUBLE)
    direction = spectral_direction(point, grad)
    for factor in (1e-120, 1e120, -3.0):
        scaled = spectral_direction(point, factor * grad)
        torch.testing.assert_close(scaled, math.copysign(1.0, factor) * direction)
    turned = spectral_direction(frame @ point @ columns, frame @ grad @ columns)
    torch.testing.assert_close(turned, frame @ direction @ columns, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("rank", "shape"), in_turn([0, 1, 5, 5], [(1, 30, 6), (1, 8, 8)]))
def test_a_small_change_near_a_loss_of_rank_changes_the_direction_little(shape, rank, generator):
    """With smoothing s the direction changes by about |dM| / (s |M| / m) at the most."""
    point, gaussian = problem(shape, "gaussian", generator)
    grad = _low_rank(gaussian, rank) if rank else 0 * gaussian
    smoothing, m = 1e-2, shape[-1]
    found = []
    for change in (0.0, 1e-9, 1e-7):
        moved = grad + change * torch.linalg.matrix_norm(grad)[:, None, None] * gaussian
        found.append(spectral_direction(point, moved, smoothing=smoothing, tolerance=1e-10))
    for direction, change in zip(found[1:], (1e-9, 1e-7), strict=True):
        moved = torch.linalg.matrix_norm(direction - found[0]).max()
        assert moved <= 20 * change * math.sqrt(gaussian.numel()) * m / smoothing


@pytest.fixture
def unreadable(monkeypatch):
    """As on an accelerator: nothing may be read."""
    module = importlib.import_module("stiefel_opt.methods.muon")  # the name is the rule's, too
    monkeypatch.setattr(module, "reader_for", lambda _: BlindReader())


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize(("kind", "shape"), mixed(12, GRADIENTS, SHAPES))
def test_where_nothing_may_be_read_the_direction_is_as_good(shape, kind, generator):
    test_the_direction_is_optimal_tangent_and_of_norm_one(shape, kind, DOUBLE, generator)


@pytest.mark.parametrize(
    ("dtype", "share"), [(DOUBLE, 1e-3), (DOUBLE, 1e-6), (torch.float32, 1e-2)], ids=str
)
@pytest.mark.parametrize("shape", [(2, 40, 8), (1, 9, 7), (1, 3, 2), (1, 8, 8)], ids=str)
def test_a_small_tangent_part_counts_beside_a_large_radial_one(shape, dtype, share, generator):
    """As near the end of a training, where X'M is symmetric and far from small."""
    point, gaussian = problem(shape, "gaussian", generator)
    inner = point.mT @ gaussian
    radial = point @ (inner + inner.mT) / 2
    tangent = gaussian - radial
    point, grad = point.to(dtype), (radial + share * tangent).to(dtype)
    direction = spectral_direction(point, grad)
    assert_feasible(point, direction)
    best = spectral_direction(point.double(), tangent)
    assert_optimal(point.double(), tangent, best)
    value = value_of(tangent, direction.double()) / value_of(tangent, best)
    assert value.min() >= 0.9995
    new = stepped(point, grad, lr=0.3)
    assert gram_error(new).max() <= 2 * orthonormality_tolerance(dtype, shape[-2])
    radial = radial.to(dtype)  # nothing but rounding is tangent
    assert torch.linalg.matrix_norm(spectral_direction(point, radial), 2).max() < 0.9


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(4, 17, 16), (4, 40, 8), (4, 4, 3), (4, 9, 9), (4, 9, 1)], ids=str
)
def test_the_point_itself_as_a_gradient_has_hardly_a_direction(shape, dtype, generator):
    """As of |X|^2: of its tangent part nothing but rounding is left, or less."""
    point, gaussian = problem(shape, "gaussian", generator, dtype)
    direction = spectral_direction(point, torch.cat([point[:3], gaussian[3:]]))
    assert torch.linalg.matrix_norm(direction[:3].to(torch.complex128), 2).max() < 0.05
    alone = spectral_direction(point[3:], gaussian[3:])
    torch.testing.assert_close(direction[3:], alone, rtol=0, atol=1e-2)


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize("m", [16, 100])
def test_the_products_where_nothing_may_be_read_are_counted(m, generator):
    """About 40 of 2m x 2m, whatever the gradient is; seven have n rows."""
    point, grad = problem((1, 4 * m, m), "gaussian", generator, torch.float32)
    with Calls() as counted:
        stepped(point, grad, lr=0.02)
    small = [left[-2] == left[-1] == right[-1] for left, right in counted.products]
    assert small.count(False) == 7
    assert 35 <= sum(small) <= 60


@pytest.mark.usefixtures("unreadable")
def test_what_was_written_unseen_comes_back_where_nothing_may_be_read(generator):
    """From a point that is 0.7 off in X'X."""
    for _ in range(40):
        point, grad = problem((1, 24, 8), "gaussian", generator, torch.float32)
        point, errors = 1.3 * point, []
        for _ in range(4):
            point = stepped(point, grad, lr=0.05)
            errors.append(float(gram_error(point)))
        assert max(errors) < 1.0
        assert errors[-1] < 1e-5


@pytest.mark.parametrize(
    ("lr", "dtype", "shape"),
    mixed(8, [0.02, 0.5, 3.0, torch.tensor(0.1)], DTYPES, [(2, 40, 8), (1, 24, 24)]),
)
def test_every_direction_turns_by_the_arc_tangent_of_lr(shape, lr, dtype, generator):
    point, grad = problem(shape, "gaussian", generator, dtype)
    new = stepped(point, grad, lr=lr)
    cosines = torch.linalg.svdvals(point.mH @ new)
    expected = torch.full_like(cosines, math.cos(math.atan(float(lr))))
    if shape[-2] > 2 * shape[-1]:
        inner = point.mH @ new  # X'X+ = (I - eta X'D) cos: its symmetric part is all cosine
        symmetric = (inner + inner.mH) / 2
        identity = torch.eye(shape[-1], dtype=dtype).expand_as(symmetric)
        torch.testing.assert_close(symmetric, identity * expected[0, 0], rtol=0, atol=2e-5)
    distance = torch.linalg.svdvals(new - point)
    chord = torch.full_like(distance, 2 * math.sin(math.atan(float(lr)) / 2))
    torch.testing.assert_close(distance, chord, rtol=2e-4, atol=0)


@pytest.mark.parametrize(("kind", "dtype"), mixed(10, GRADIENTS, DTYPES))
def test_one_step_stays_on_the_manifold(kind, dtype, generator):
    for shape in SHAPES:
        point, grad = problem(shape, kind, generator, dtype)
        before = point.clone(), grad.clone()
        off = point + 1e-6 * torch.ones_like(point)  # as after many steps in float32
        for start in (point, off):
            # of square matrices nothing is measured: an optimizer corrects them now and then
            given = corrected(start, {}, LOCAL_SUMS)[0] if shape[-2] == shape[-1] else start
            new = stepped(given, grad, lr=0.3)
            tolerance = orthonormality_tolerance(dtype, shape[-2])
            # what is off by e is mended to 3/4 e^2
            assert gram_error(new).max() <= tolerance + shape[-1] * gram_error(start).max().square()
        torch.testing.assert_close((point, grad), before, rtol=0, atol=0, equal_nan=True)
        if kind == "zero":
            torch.testing.assert_close(stepped(point, grad, lr=0.3), point)


@pytest.mark.parametrize(("dtype", "powers"), [(torch.float32, (-38, -45)), (DOUBLE, (-120, -170))])
def test_a_gradient_that_fades_away_leaves_finite_numbers(dtype, powers, generator):
    point, grad = problem((1, 20, 5), "gaussian", generator, dtype)
    scales = torch.logspace(*powers, 26, dtype=DOUBLE).reshape(-1, 1, 1)
    many, faded = point.expand(26, -1, -1), (grad.double() * scales).to(dtype)
    direction = spectral_direction(many, faded)
    assert direction.isfinite().all()
    assert direction[0].any()
    assert not direction[-1].any()
    new = muon(many, faded, {}, lr=0.5)[0]
    assert gram_error(new).max() <= orthonormality_tolerance(dtype, 20)


def test_a_half_precision_point_does_not_overflow(generator):
    point, grad = problem((2, 20, 5), "gaussian", generator, torch.float32)
    expected = spectral_direction(point.half(), grad.half())
    for scale in (1e-3, 1.0, 1e3):
        direction = spectral_direction(point.half(), (grad * scale).half())
        torch.testing.assert_close(direction, expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("shape", [(0, 5, 3), (0, 3, 3), (2, 5, 0), (2, 0, 0)], ids=str)
def test_nothing_has_an_empty_direction(shape):
    point = torch.zeros(shape)
    direction = spectral_direction(point, point)
    assert direction.shape == shape
    assert spectral_gap(point, point, direction).shape == shape[:1]
    assert muon(point, point, {}, lr=0.1)[0].shape == shape


def test_the_gap_of_what_cannot_be_improved_is_zero_and_of_what_is_not_finite_nan(generator):
    point, grad = problem((3, 40, 6), "gaussian", generator)
    grad[1] = point[1] @ (grad[1, :6] + grad[1, :6].mT)  # no tangent part
    grad[2, 0, 0] = math.inf
    gap = spectral_gap(point, grad, spectral_direction(point, grad))
    assert gap[0].abs() <= 1e-4
    assert gap[1] == 0
    assert gap[2].isnan()


def test_rank_one_in_float64_stays_to_rounding(generator):
    """Where Q is singular rounding of M'M is amplified 1e9 times."""
    point, grad = problem((60, 64, 16), "rank-1", generator)
    new = muon(point, grad, {}, lr=0.3)[0]
    assert gram_error(new).max() <= orthonormality_tolerance(DOUBLE, 64)


@pytest.mark.parametrize("shape", [(1, 12, 4), (1, 4, 4)], ids=str)
def test_a_compiled_graph_gives_the_same_without_reading(shape, generator):
    point, grad = problem(shape, "gaussian", generator)
    torch._dynamo.reset()
    options = {"smoothing": 1e-3, "tolerance": 1e-3}
    compiled = torch.compile(spectral_direction, fullgraph=True, backend="aot_eager")
    direction = compiled(point, grad, **options)
    expected = spectral_direction(point, grad, **options)
    torch.testing.assert_close(direction, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"point": torch.zeros(1, 3, 5)}, "`point` must be tall matrices"),
        ({"point": torch.zeros(5, 3)}, "`point` must be tall matrices"),
        ({"grad": torch.zeros(1, 5, 2)}, "`grad` must have the shape"),
        ({"grad": torch.zeros(1, 5, 3) * 1j}, "`grad` must fit into the dtype of `point`"),
        ({"point": torch.zeros(1, 5, 3, dtype=torch.int64)}, "`grad` must fit into the dtype"),
        ({"tolerance": -1.0}, "`tolerance` must be in"),
        ({"smoothing": 0.0}, "`smoothing` must be in"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    arguments: dict[str, Any] = {"point": torch.zeros(1, 5, 3), "grad": torch.zeros(1, 5, 3)}
    with pytest.raises((ValueError, TypeError), match=message):
        spectral_direction(**{**arguments, **change})
