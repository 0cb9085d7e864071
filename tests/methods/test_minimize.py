"""so.minimize: known minima, several starts and points, saddles, and what it refuses."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dims_cases import LEGS, by_hand, pair
from torch import Tensor
from training import closure_of

import stiefel_opt as so
from stiefel_opt import Stiefel
from stiefel_opt.methods.lbfgs import rule as lbfgs
from stiefel_opt.methods.minimize.form import Form
from stiefel_opt.methods.minimize.pairs import Pairs
from stiefel_opt.methods.minimize.product import Product

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def gaussian(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


def symmetric(n, dtype=F64):
    matrix = gaussian(n, n, dtype=dtype)
    return (matrix + matrix.mH) / 2


@pytest.mark.parametrize("dtype", [F64, torch.complex128, torch.float32])
@pytest.mark.parametrize(
    ("shape", "manifold"),
    [
        ((20, 3), None),
        ((3, 20), None),
        ((20, 3), so.Stiefel(scale=2.0)),
        ((3, 5, 2, 2), so.Stiefel(flatten=True)),
        ((20, 3), so.Stiefel(transposed=True)),
    ],
)
def test_leading_eigenvalues(shape, manifold, dtype):
    """Of a reading that makes the matrix wide or tall, 20 by 3."""
    matrix = symmetric(20, dtype)
    reading = manifold or so.Stiefel()

    def loss(x):
        tall = reading.matrices(x)
        tall = tall if tall.size(-2) == 20 else tall.mT
        return -(tall.conj() * (matrix @ tall)).real.sum() / reading.scale**2

    start = so.random_point(*shape, manifold=reading, generator=generator(1), dtype=dtype)
    result = so.minimize(loss, start, manifold)
    best = -float(torch.linalg.eigvalsh(matrix)[-3:].sum())
    tolerance = 1e-4 if dtype == torch.float32 else 1e-10
    assert result.success, result.message
    assert result.fun == pytest.approx(best, abs=tolerance)
    assert so.orthonormality_error(result.x, reading) < 10 * torch.finfo(dtype).eps
    assert result.x.shape == shape
    assert result.component is None
    assert 0 < result.nit <= result.nfev


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_two_starts_try_both_components(sign, batched):
    target = so.random_point(4, 4, generator=generator(), dtype=F64)
    start = so.random_point(4, 4, generator=generator(1), dtype=F64)
    start[0] *= sign * torch.linalg.det(start) * torch.linalg.det(target)

    def loss(x):
        return (x - target).square().sum((-2, -1))

    one = so.minimize(loss, start)
    assert (one.fun < 1e-12) == (sign == 1)
    assert one.component == round(float(torch.linalg.det(start)))
    two = so.minimize(loss, start, starts=2, batched_loss=batched, generator=generator())
    assert two.fun < 1e-12
    assert two.component == round(float(torch.linalg.det(target)))
    assert two.nfev > one.nfev - (0 if sign == 1 else one.nfev)


@pytest.mark.parametrize("seed", range(4))
def test_two_starts_try_both_components_of_the_only_square_matrix_among_several(seed):
    target = so.random_point(3, 3, generator=generator(), dtype=F64)
    start = {
        "R": so.random_point(3, 3, generator=generator(1), dtype=F64),
        "t": torch.zeros(3, dtype=F64),
    }
    start["R"][0] *= -torch.linalg.det(start["R"]) * torch.linalg.det(target)

    def loss(x):
        return (x["R"] - target).square().sum() + (x["t"] - 1).square().sum()

    manifold = {"R": so.Stiefel(), "t": None}
    result = so.minimize(loss, start, manifold, starts=2, generator=generator(seed))
    assert result.fun < 1e-12
    assert result.component == round(float(torch.linalg.det(target)))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_starts_keep_to_a_determinant_that_is_asked_for(sign, batched):
    def loss(x):
        return -x.diagonal(dim1=-2, dim2=-1).sum(-1)

    reading = so.Stiefel(determinant=sign)
    options = {"starts": 4, "batched_loss": batched, "generator": generator()}
    result = so.minimize(loss, (3, 3), reading, **options)
    assert result.component == sign
    assert result.fun == pytest.approx(-3.0 if sign == 1 else -1.0, abs=1e-5)


def test_a_start_of_the_other_component_is_told_of():
    reflection = so.random_point(4, 4, manifold=so.Stiefel(determinant=-1), dtype=F64)
    with pytest.warns(UserWarning, match="`start` had the other determinant"):
        result = so.minimize(linear, reflection, so.Stiefel(determinant=1))
    assert result.component == 1


def test_starts_at_once_are_those_one_after_the_other():
    """Of a loss with local minima: each start has a step length of its own."""
    weights = gaussian(6, 6, 3)

    def loss(x):
        return torch.einsum("...ik,ijk,...jk->...", x, weights, x) + x.pow(4).sum((-2, -1))

    shape = (6, 3)
    single = [
        so.minimize(loss, so.random_point(*shape, generator=generator(s), dtype=F64))
        for s in range(6)
    ]
    results = []
    for count in (1, 6):
        first = so.random_point(*shape, generator=generator(0), dtype=F64)
        results.append(
            so.minimize(loss, first, starts=count, batched_loss=True, generator=generator(7))
        )
    assert results[0].fun == pytest.approx(single[0].fun, abs=1e-10)
    assert results[0].nfev == single[0].nfev
    one_by_one = so.minimize(loss, first, starts=6, generator=generator(7))
    assert results[1].fun == pytest.approx(one_by_one.fun, abs=1e-10)
    assert results[1].nfev == pytest.approx(one_by_one.nfev, rel=0.1)
    assert results[1].fun <= single[0].fun + 1e-10


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_several_points_and_unconstrained_tensors(form):
    """A low-rank approximation U diag(s) V', all three found together."""
    matrix = gaussian(8, 6)
    left, right = so.random_point(8, 2, dtype=F64), so.random_point(6, 2, dtype=F64)
    values = torch.ones(2, dtype=F64)

    def error(u, s, v):
        return ((u * s) @ v.mT - matrix).square().sum()

    if form == "tuple":
        readings = (so.Stiefel(), None, so.Stiefel())
        result = so.minimize(lambda x: error(*x), (left, values, right), readings)
        found = result.x
        assert isinstance(found, tuple)
    else:
        start = {"u": so.ManifoldParameter(left), "s": values, "v": so.ManifoldParameter(right)}
        result = so.minimize(lambda x: error(x["u"], x["s"], x["v"]), start, tolerance=1e-9)
        found = tuple(result.x[name] for name in ("u", "s", "v"))
        assert torch.equal(start["u"].detach(), left)
    singular = torch.linalg.svdvals(matrix)
    assert result.fun == pytest.approx(float(singular[2:].square().sum()), abs=1e-9)
    assert so.orthonormality_error(found[0]) < 1e-13
    assert so.orthonormality_error(found[2]) < 1e-13
    assert result.component is None


def test_rows_that_are_left_plain_are_unconstrained():
    target = gaussian(5, 2)
    reading = so.Stiefel(rows=(0, 3))
    start = torch.zeros(5, 2, dtype=F64)
    start[:3] = so.random_point(3, 2, dtype=F64)
    result = so.minimize(lambda x: (x - target).square().sum(), start, reading)
    torch.testing.assert_close(result.x[3:], target[3:], rtol=0, atol=1e-7)
    torch.testing.assert_close(result.x[:3], so.polar(target[:3]), rtol=0, atol=1e-7)


def test_a_stationary_start_is_left_by_a_random_move_and_that_is_said():
    matrix = symmetric(12)
    vectors = torch.linalg.eigh(matrix).eigenvectors
    best = -float(torch.linalg.eigvalsh(matrix)[-2:].sum())

    def loss(x):
        return -(x * (matrix @ x)).sum()

    saddle = so.minimize(loss, vectors[:, 4:6], generator=generator())
    assert saddle.fun == pytest.approx(best, abs=1e-10)
    assert "stationary, and a small random move led to a lower loss" in saddle.message
    top = so.minimize(loss, vectors[:, -2:], generator=generator())
    assert "led back" in top.message
    torch.testing.assert_close(top.x, vectors[:, -2:], rtol=0, atol=0)
    assert top.success
    constant = so.minimize(lambda x: (x * x).sum(), vectors[:, :2])
    assert "led back" in constant.message


def test_the_result_is_frozen_and_the_budget_is_kept():
    matrix = symmetric(30).float()
    calls = []

    def loss(x):
        calls.append(x)
        return -(x * (matrix @ x)).sum()

    result = so.minimize(loss, (30, 3), max_evaluations=7, generator=generator())
    assert not result.success
    assert "max_evaluations" in result.message
    assert result.nfev in (7, 8)  # one more to return to a longer step
    assert len(calls) == result.nfev
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.fun = 0.0


def test_a_callback_sees_each_iteration_and_may_stop():
    matrix = symmetric(30).float()
    seen = []

    def callback(state):
        seen.append(state.fun)
        if len(seen) == 4:
            raise StopIteration

    result = so.minimize(lambda x: -(x * (matrix @ x)).sum(), (30, 3), callback=callback)
    assert result.message == "the callback stopped it"
    assert result.nit == 4
    assert seen == sorted(seen, reverse=True)


def test_a_bar_shows_the_evaluations(capsys):
    so.minimize(lambda x: x.sum(), (3, 1), progress=True)
    assert "evaluation" in capsys.readouterr().err


def test_trials_that_are_not_finite_count_as_uphill():
    target = so.random_point(5, 2, generator=generator(3), dtype=F64)

    def loss(x):
        away = (x - target).square().sum()
        return torch.where(away < 8.0, -(8.0 - away).log(), torch.nan)

    result = so.minimize(loss, so.random_point(5, 2, generator=generator(4), dtype=F64))
    assert result.fun == pytest.approx(-torch.tensor(8.0).log().item(), abs=1e-8)
    lost = so.minimize(lambda x: x.sum() * torch.nan, (3, 2))
    assert not lost.success
    assert "not finite at the start" in lost.message


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("from_call", [2, 4, 10])
def test_a_loss_that_is_lost_on_the_way_leaves_the_best_point(from_call, batched):
    matrix, calls = symmetric(8), 0

    def loss(x):
        nonlocal calls
        calls += 1
        return -(x * (matrix @ x)).sum((-2, -1)) * (torch.nan if calls >= from_call else 1.0)

    options = {"batched_loss": batched, "generator": generator()}
    start = so.random_point(8, 2, generator=generator(1), dtype=F64)
    result = so.minimize(loss, start, **options)
    assert not result.success
    assert "not finite any more" in result.message
    assert math.isfinite(result.fun)
    assert result.fun == pytest.approx(-float((result.x * (matrix @ result.x)).sum()))
    assert so.orthonormality_error(result.x) < 1e-14


def test_a_start_whose_loss_is_not_finite_leaves_the_others_alone():
    def loss(x):
        values = (x - torch.eye(3, 2, dtype=F64)).square().sum((-2, -1))
        return torch.cat([values[:1] * torch.nan, values[1:]])

    shape, options = (3, 2), {"generator": generator()}
    start = so.random_point(*shape, generator=generator(1), dtype=F64)
    result = so.minimize(loss, start, starts=3, batched_loss=True, **options)
    assert result.success
    assert result.fun < 1e-12


def test_it_takes_about_as_many_evaluations_as_the_optimizer():
    matrix = symmetric(100)
    best = -float(torch.linalg.eigvalsh(matrix)[-4:].sum())
    start = so.random_point(100, 4, generator=generator(), dtype=F64)
    result = so.minimize(lambda x: -(x * (matrix @ x)).sum(), start)
    weight = so.ManifoldParameter(start)
    optimizer = so.StiefelLBFGS([weight], max_iter=500, tolerance_grad=1e-7, tolerance_change=0)
    calls = []

    def loss():
        calls.append(1)
        return -(weight * (matrix @ weight)).sum()

    closure = closure_of(optimizer, loss)
    optimizer.step(closure)
    count = len(calls)
    assert result.fun == pytest.approx(best, abs=1e-9)
    assert float(closure().detach()) == pytest.approx(best, abs=1e-9)
    assert result.nfev < 1.3 * count


@pytest.mark.parametrize("count", [0, 1, 29, 30, 31, 59, 60, 61, 95])
def test_the_direction_is_that_of_two_loops_over_the_last_thirty_pairs(count):
    """Of two starts; the second one has lost its pairs on the way, and has skipped one."""
    curvature = torch.linspace(1, 5, 40, dtype=F64)
    gradient = gaussian(2, 40)
    pairs, kept = Pairs(gradient), ([], [])
    for index in range(count):
        step = gaussian(2, 40, seed=index + 1)
        skips = index == count - 3
        gradient = gaussian(2, 40, seed=-index - 1)
        pairs.learn(step, curvature * step, gradient, [True, not skips])
        for start in range(2):
            kept[start].append(None if start and skips else (step[start], curvature * step[start]))
        if index == 20:
            pairs.forget(torch.tensor([False, True]))
            kept[1][:] = [None] * len(kept[1])
    found = pairs.direction(gradient)
    for start in range(2):
        last = [pair for pair in kept[start][-30:] if pair is not None]
        steps, changes = zip(*last, strict=True) if last else ((), ())
        wanted = lbfgs.quasi_newton_direction(gradient[start], steps, changes)
        torch.testing.assert_close(found[start], wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [F64, torch.complex128])
@pytest.mark.parametrize("reading", [so.Stiefel(), so.Stiefel(heads=2, scale=2.0)])
def test_vectors_are_carried_at_once_as_one_by_one(reading, dtype):
    tensors = so.random_point(3, 12, 2, manifold=reading, generator=generator(), dtype=dtype)
    product = Product(Form(tensors[0], reading), [tensors])
    product.references = [point.roll(1, -2) for point in product.points]
    product.move([tensors.clone()], product.points)
    vectors = gaussian(3, 5, product.flat(product.tensors).size(1))
    for function in (lbfgs.from_coordinates, lbfgs.coordinates):
        carried = product.mapped(function, vectors)
        for index in range(5):
            alone = product.mapped(function, vectors[:, index])
            torch.testing.assert_close(carried[:, index], alone, rtol=1e-12, atol=1e-12)


EYE = torch.eye(3, 2)


def linear(x):
    return x.sum()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: so.minimize(1, (3, 2)), TypeError, "`loss` must be a function"),
        (lambda: so.minimize(linear, 3), TypeError, "`start` must be a tensor, sizes of one"),
        (lambda: so.minimize(linear, (3,)), ValueError, "`start` must have at least 2"),
        (lambda: so.minimize(linear, torch.ones(3, 2) * torch.nan), ValueError, "must be finite"),
        (lambda: so.minimize(linear, torch.eye(3, 2).bfloat16()), TypeError, "of one precision"),
        (lambda: so.minimize(linear, (3, 2), starts=0), ValueError, "`starts` must be a positive"),
        (lambda: so.minimize(linear, (3, 2), tolerance=-1.0), ValueError, "`tolerance` must be"),
        (lambda: so.minimize(linear, (3, 2), progress=1), TypeError, "`progress` must be"),
        (lambda: so.minimize(lambda x: x, (3, 2)), ValueError, "`loss` must return a tensor of"),
        (lambda: so.minimize(lambda _: 1.0, (3, 2)), TypeError, "`loss` must return a real"),
        (lambda: so.minimize(lambda _: torch.ones(()), (3, 2)), ValueError, "depend on the point"),
        (
            lambda: so.minimize(linear, (3, 2), starts=2, batched_loss=True),
            ValueError,
            r"return a tensor of shape \(2,\)",
        ),
        (
            lambda: so.minimize(linear, (torch.ones(2, 2), torch.ones(2)), (None,)),
            ValueError,
            "one reading for each of 2 tensors",
        ),
        (
            lambda: so.minimize(linear, {"left": EYE}, {"lfet": so.Stiefel()}),
            ValueError,
            r"`manifold` must have keys of \['left'\], got \['lfet'\]",
        ),
        (
            lambda: so.minimize(linear, (EYE, EYE)),
            ValueError,
            "`manifold` must be given for several tensors of which none is tagged",
        ),
        (
            lambda: so.minimize(linear, (EYE, EYE), so.Stiefel()),
            TypeError,
            "`manifold` must be a tuple of readings, as the start is of tensors, got Stiefel",
        ),
        (
            lambda: so.minimize(linear, {"a": EYE}, (so.Stiefel(),)),
            TypeError,
            "`manifold` must be a dict of readings",
        ),
        (lambda: so.minimize(linear, {}), ValueError, "`start` must have at least one tensor"),
        (
            lambda: so.minimize(linear, (EYE, EYE.long()), (so.Stiefel(), None)),
            TypeError,
            "`start 1` must have a floating-point dtype",
        ),
        (
            lambda: so.minimize(linear, {"a": EYE, "b": (3,)}, {"a": so.Stiefel()}),
            ValueError,
            "`start 'b'` must be a tensor where it is unconstrained",
        ),
        (
            lambda: so.minimize(linear, {"a": EYE, "b": 3}, {"a": so.Stiefel()}),
            TypeError,
            "`start 'b'` must be a tensor, sizes of one",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", LEGS)
def test_lbfgs_minimize_and_on_manifold_do_as_with_the_matrix(name: str) -> None:
    stored, matrices, pattern = pair(name, "contiguous", torch.float64)
    shape = stored.shape
    target = torch.randn(shape, dtype=torch.float64)
    whole = by_hand(target, pattern)

    def train(optimizer: torch.optim.Optimizer, parameter: Tensor, wanted: Tensor) -> None:
        closure = closure_of(optimizer, lambda: (parameter - wanted).square().sum())

        for _ in range(3):
            optimizer.step(closure)  # type: ignore[arg-type]

    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: so.on_manifold(torch.optim.Adam(p, 0.05)),
        lambda p: so.StiefelLBFGS(p, max_iter=3),
    ]
    for make in makers:
        for parameter, wanted in ((stored, target), (matrices, whole)):
            train(make([parameter]), parameter, wanted)
        torch.testing.assert_close(
            by_hand(stored.detach(), pattern), matrices.detach(), rtol=1e-8, atol=1e-8
        )
    reading = stored.manifold  # type: ignore[attr-defined]
    found = so.minimize(lambda x: (x - target).square().sum(), stored.detach(), reading)
    best = by_hand(so.polar(target, reading), pattern)
    other = so.minimize(lambda x: (x - whole).square().sum(), matrices.detach())
    torch.testing.assert_close(by_hand(found.x, pattern), other.x, rtol=1e-5, atol=1e-5)
    assert found.fun >= float((best - whole).square().sum()) - 1e-9


def test_starts_of_a_square_matrix_with_several_dimensions_try_both_determinants() -> None:
    reading = Stiefel(row_dims=(0, 2), column_dims=(1, 3))
    target = so.random_point(2, 3, 3, 2, manifold=reading, dtype=torch.float64)
    with torch.no_grad():
        target[0, :, 0] *= torch.linalg.det(by_hand(target, "abcd -> (ac) (bd)")).sign()
        for sign in (1, -1):
            target[0, :, 0] *= sign
            found = so.minimize(
                lambda x: (x - target).square().sum(), target.shape, reading, starts=2
            )
            assert found.fun < 1e-5
            assert found.component == sign


def test_a_start_without_full_rank_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"the nearest point to `start` is not unique"):
        so.minimize(lambda x: x.sum(), torch.ones(4, 3), max_evaluations=1)
