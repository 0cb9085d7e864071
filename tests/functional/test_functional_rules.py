"""Laws of every pure rule: it writes to nothing, mixes no matrices, and says how long its step is.

A new rule is a row in `optimizers.py`.
"""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import in_turn
from rule_cases import (
    NORMAL,
    RULES,
    SHAPES,
    SKEW,
    SQUARES,
    UNPROJECTED,
    RuleCase,
    by_columns,
    largest,
    problem,
    state_at,
    tensors,
)
from torch import Tensor

from stiefel_opt.functional import Length, Sums
from stiefel_opt.functional.flows import corrected
from stiefel_opt.functional.momentum import corrected_unprojected
from stiefel_opt.numerics.device import BlindReader, HostReader
from stiefel_opt.numerics.geometry import (
    gram_error,
    orthonormality_tolerance,
    polar_factor,
    random_point,
)
from stiefel_opt.numerics.linalg import LOCAL_SUMS, cross_gram, gram

READERS = [HostReader, BlindReader]


def column(value: float, k: int) -> Tensor:
    """A number for each matrix, all alike."""
    return torch.full((k, 1, 1), value, dtype=torch.float64)


def options_as_tensors(case: RuleCase, k: int) -> dict[str, Tensor]:
    """Those options that may differ from matrix to matrix."""
    return {name: column(case.options[name], k) for name in ("step",) if name in case.options}


# ---- purity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "shape", "reader", "columns", "numbers"),
    in_turn(RULES, SHAPES, READERS, [False, True, True], [True, True, True, False]),
)
def test_a_rule_writes_to_nothing_it_is_given_and_repeats_itself(
    case, shape, reader, columns, numbers, generator
):
    """A write of the same number would show in the version of a tensor; new state is as old."""
    point, grad, state = problem(case, shape, generator)
    if columns:
        point, grad = by_columns(point), by_columns(grad)
        state = {name: by_columns(tensor) for name, tensor in state.items()}
    given: dict[str, Any] = {"lr": 0.1} if numbers else {"lr": column(0.1, 2)}
    given |= {} if numbers else options_as_tensors(case, 2)
    inputs = {"point": point, "grad": grad, **state}
    inputs |= {name: value for name, value in given.items() if isinstance(value, Tensor)}
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    versions = {name: tensor._version for name, tensor in inputs.items()}
    names = list(state)
    found = [case(point, grad, state, reader=reader(), **given) for _ in range(2)]
    assert list(state) == names
    new_X, new, _ = found[0]
    assert new.keys() <= state.keys()
    for tensor, old in [(new_X, point), *((new[name], state[name]) for name in new)]:
        assert (tensor.shape, tensor.dtype) == (old.shape, old.dtype)
    assert {name: tensor._version for name, tensor in inputs.items()} == versions
    for name, tensor in inputs.items():
        assert torch.equal(tensor, before[name]), name
    first, second = map(tensors, found)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert bool(tensor.isfinite().all()), name


# ---- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "shape", "other"),
    [
        *in_turn(RULES, SHAPES[:-1], [0.0, 1e6, 1e148]),
        *in_turn(RULES, SHAPES[1:-1], [math.nan, math.inf, 1.0]),
    ],
)
def test_every_matrix_of_a_batch_is_treated_for_itself(case, shape, other, generator):
    """Whatever the gradient of another is: none, long, as long as may be, or not finite.

    Where k = m a batch of matrices could be taken for one of vectors, or the other way.
    """
    point, grad, state = problem(case, shape, generator, k=max(3, min(shape[1], 5)))
    grad[1] *= other
    found = tensors(case(point, grad, state, lr=0.1))
    for index in (0, 2):
        one = slice(index, index + 1)
        own = {name: tensor[one] for name, tensor in state.items()}
        alone = tensors(case(point[one], grad[one], own, lr=0.1))
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name][one], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("case", "shape"), in_turn(RULES, SHAPES[:4]))
def test_numbers_of_a_batch_may_differ_from_matrix_to_matrix(case, shape, generator):
    """The learning rate and the number of the step as ``(k, 1, 1)``, which accelerators get."""
    point, grad, state = problem(case, shape, generator, k=3)
    lrs, steps = [0.02, 0.1, 0.7], [1.0, 2.0, 30.0]
    each: list[dict[str, Any]] = [{"lr": lr} for lr in lrs]
    if "step" in case.options:
        each = [{"lr": lr, "step": step} for lr, step in zip(lrs, steps, strict=True)]
    together = {
        name: torch.tensor([one[name] for one in each], dtype=torch.float64).view(3, 1, 1)
        for name in each[0]
    }
    found = tensors(case(point, grad, state, **together))
    for index, one in enumerate(each):
        rows = slice(index, index + 1)
        own = {name: tensor[rows] for name, tensor in state.items()}
        alone = tensors(case(point[rows], grad[rows], own, **one))
        for name, tensor in alone.items():
            torch.testing.assert_close(found[name][rows], tensor, rtol=0, atol=1e-12)


# ---- rounding ------------------------------------------------------------------------------------

KEPT = {
    "no-state": (),
    "normal": (SKEW, NORMAL),
    "unprojected": (SKEW, *UNPROJECTED),
    "unprojected-projected": (SKEW, UNPROJECTED[0], UNPROJECTED[2]),
}
every_kept = pytest.mark.parametrize(("kept", "shape"), list(itertools.product(KEPT, SHAPES[:-1])))


def normal_of(point: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """U of the state, evaluated by its definition B L - X N."""
    if NORMAL in state or UNPROJECTED[0] not in state:
        return state.get(NORMAL)
    base, factor, shift = (state.get(name) for name in UNPROJECTED)
    return (base if factor is None else base @ factor) - point @ shift


def correct(
    kept: str, point: Tensor, state: dict[str, Tensor], sums: Sums = LOCAL_SUMS, own: Any = None
) -> tuple[Tensor, dict[str, Tensor]]:
    if kept.startswith("unprojected"):
        return corrected_unprojected(point, state, sums, own)
    return corrected(point, state, sums, own, (NORMAL,))


@every_kept
def test_corrections_remove_rounding_from_the_point_and_from_its_normal_momentum(
    kept, shape, generator
):
    """What is off by e is off by 3/4 e^2 then, and nothing else has changed."""
    point = random_point(2, *shape, generator=generator, dtype=torch.float64)
    state = state_at(point, KEPT[kept], generator)
    noise = torch.randn(point.shape, generator=generator, dtype=point.dtype)
    off = point + 1e-7 * noise
    if NORMAL in state:
        state[NORMAL] = state[NORMAL] + 1e-7 * noise
    before = {name: tensor.clone() for name, tensor in state.items()}
    fixed, changed = correct(kept, off, state)
    assert gram_error(fixed).max() < 1e-12
    torch.testing.assert_close(fixed, polar_factor(off), rtol=0, atol=1e-12)
    assert SKEW not in changed
    assert changed.keys() == state.keys() & {NORMAL, UNPROJECTED[2]}
    normal = normal_of(fixed, {**state, **changed})
    if normal is not None:
        assert cross_gram(fixed, normal).abs().max() < 1e-12
        base, factor = state.get(UNPROJECTED[0]), state.get(UNPROJECTED[1])
        whole = state.get(NORMAL) if base is None else base if factor is None else base @ factor
        expected = whole - fixed @ (fixed.mT @ whole)
        torch.testing.assert_close(normal, expected, rtol=0, atol=1e-12)
    for name, tensor in state.items():  # only read
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(off, point + 1e-7 * noise)


@every_kept
def test_corrections_leave_every_bit_of_what_is_exact(kept, shape):
    """X with ones on its diagonal and small integers for a momentum: X'X and X'U are exact."""
    n, m = shape
    point = torch.eye(n, m, dtype=torch.float64).repeat(2, 1, 1)
    base = torch.arange(2.0 * n * m, dtype=torch.float64).view(2, n, m).remainder(7) - 3
    normal = base - point @ (point.mT @ base)
    identity = torch.eye(m, dtype=torch.float64).repeat(2, 1, 1)
    values = (normal, base, 2 * identity, (1 + ("factor" in str(KEPT[kept]))) * point.mT @ base)
    every = dict(zip((NORMAL, *UNPROJECTED), values, strict=True))
    state = {name: every[name] for name in KEPT[kept] if name in every and n > m}
    fixed, changed = correct(kept, point, state)
    assert torch.equal(fixed, point)
    assert all(torch.equal(tensor, state[name]) for name, tensor in changed.items())


@every_kept
def test_a_known_gram_matrix_saves_measuring_it(kept, shape, generator):
    point = random_point(2, *shape, generator=generator, dtype=torch.float64)
    state = state_at(point, KEPT[kept], generator)
    point += 1e-7 * torch.randn(point.shape, generator=generator, dtype=point.dtype)
    known = gram(point)
    measured, given = (correct(kept, point, state, own=own) for own in (None, known))
    torch.testing.assert_close(measured, given, rtol=0, atol=1e-14)
    assert torch.equal(known, gram(point))  # only read


@every_kept
def test_corrections_treat_every_matrix_for_itself_and_add_up_rows_once(kept, shape, generator):
    point = random_point(3, *shape, generator=generator, dtype=torch.float64)
    state = state_at(point, KEPT[kept], generator)
    point += 1e-7 * torch.randn(point.shape, generator=generator, dtype=point.dtype)
    point[1, 0, 0] = math.nan
    calls: list[Tensor] = []

    def row_sum(packed: Tensor) -> Tensor:
        calls.append(packed)
        return packed

    fixed, changed = correct(kept, point, state, Sums(row_sum))
    assert len(calls) == 1
    assert fixed[1].isnan().any()
    for index in (0, 2):
        one = slice(index, index + 1)
        own = {name: tensor[one] for name, tensor in state.items()}
        alone, its = correct(kept, point[one], own)
        torch.testing.assert_close(fixed[one], alone, rtol=0, atol=1e-14)
        for name, tensor in its.items():
            torch.testing.assert_close(changed[name][one], tensor, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("case", "shape"), in_turn(RULES, SHAPES[:-1]))
def test_a_step_from_an_orthonormal_point_is_orthonormal_to_rounding(case, shape, generator):
    """And what is carried stays where it belongs: skew, normal to the new point, symmetric."""
    point, grad, state = problem(case, shape, generator)
    new_X, new, _ = case(point, grad, state, lr=0.3)
    assert gram_error(new_X).max() <= orthonormality_tolerance(torch.float64, shape[0])
    if SKEW in new:
        assert (new[SKEW] + new[SKEW].mT).abs().max() < 1e-14
    normal = normal_of(new_X, {**state, **new})
    if normal is not None:
        assert cross_gram(new_X, normal).abs().max() < 1e-13
    for name in new.keys() & {SQUARES[0], "max_" + SQUARES[0]}:
        assert torch.equal(new[name], new[name].mT)


# ---- rows on several processes -------------------------------------------------------------------


class SharedSum:
    """The sum over two threads, each of which has some of the rows."""

    def __init__(self, rows: int) -> None:
        self.row_count = rows
        self.barrier = threading.Barrier(2, timeout=30)
        self.parts: list[Tensor | None] = [None, None]
        self.calls = [0, 0]

    def of(self, rank: int) -> Sums:
        def row_sum(packed: Tensor) -> Tensor:
            self.calls[rank] += 1
            self.parts[rank] = packed.clone()
            self.barrier.wait()
            total = self.parts[0] + self.parts[1]
            self.barrier.wait()
            return total

        return Sums(row_sum, self.row_count)


def rows_of(tensor: Tensor, rows: slice, n: int) -> Tensor:
    """Some rows of a tall tensor; what is small is on every process."""
    return tensor[:, rows].clone() if tensor.size(-2) == n else tensor.clone()


@pytest.mark.parametrize(("case", "shape"), in_turn(RULES, [(12, 4), (9, 2), (40, 20)]))
def test_rows_may_live_on_several_processes(case, shape, generator):
    """Some rows each, with sums over both: the same step."""
    point, grad, state = problem(case, shape, generator)
    whole, n = case(point, grad, state, lr=0.3), shape[0]
    shared = SharedSum(n)

    def run(rank: int) -> Any:
        rows = (slice(0, n // 3), slice(n // 3, n))[rank]
        own = {name: rows_of(tensor, rows, n) for name, tensor in state.items()}
        return case(point[:, rows], grad[:, rows], own, lr=0.3, sums=shared.of(rank))

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(run, range(2)))
    expected, parts = tensors(whole), [tensors(half) for half in halves]
    for name, tensor in expected.items():
        is_tall = tensor.ndim == 3 and tensor.size(-2) == n
        found = torch.cat([part[name] for part in parts], dim=1) if is_tall else parts[1][name]
        torch.testing.assert_close(found, tensor, rtol=0, atol=1e-10)
        if not is_tall:
            torch.testing.assert_close(parts[0][name], found, rtol=0, atol=0)
    assert shared.calls[0] == shared.calls[1]
    assert shared.calls[0] <= case.most_sums


# ---- the length of a step ------------------------------------------------------------------------


def distance(point: Tensor, new_X: Tensor) -> Tensor:
    """The largest |X+ v - X v| over unit vectors v, the chord of the largest angle."""
    return torch.linalg.matrix_norm(new_X - point, 2)


@pytest.mark.parametrize(
    ("case", "shape", "reader"),
    [
        *in_turn(RULES, SHAPES[:3], READERS),
        *in_turn(RULES, [(5, 5), (6, 5), (24, 24)], READERS[::-1]),
    ],
)
def test_the_length_is_that_of_the_tangent_vector_of_the_step(case, shape, reader, generator):
    """To first order a step moves X v by xi v, and turns it by the arc tangent of |xi v|."""
    point, grad, state = problem(case, shape, generator, k=3)
    grad[1] *= 0.1
    first = case(point, grad, state, lr=1e-3, reader=reader())
    unit = float(distance(point, first[0]).max()) / 1e-3  # of the step per learning rate
    for angle, tolerance in [(1e-4, 1e-3), (0.1, 0.02)]:
        new_X, _, length = case(point, grad, state, lr=angle / unit, reader=reader())
        found = torch.arctan(largest(length, 3))
        expected = 2 * torch.arcsin(distance(point, new_X) / 2)
        assert expected.max() > angle / 3
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


def is_by_a_cayley_map(case: RuleCase) -> bool:
    return case.options.get("exact", False) or case.options.get("retraction") == "cayley"


# An iterated map is none: it has steps.
CLOSED = [case for case in RULES if is_by_a_cayley_map(case) or not case.has("steps")]


@pytest.mark.parametrize(("case", "lr", "n"), in_turn(CLOSED, [0.1, 1.0, 30.0, 1e6], [2, 7, 7]))
def test_one_column_turns_by_an_arc_tangent_of_the_length_however_long_it_is(
    case, lr, n, generator
):
    """A circle: also where a step saturates, the length is that of what was done."""
    point, grad, state = problem(case, (n, 1), generator)
    new_X, _, length = case(point, grad, state, lr=lr)
    found = largest(length, 2)
    found = 2 * torch.arctan(found / 2) if is_by_a_cayley_map(case) else torch.arctan(found)
    torch.testing.assert_close(2 * torch.arcsin(distance(point, new_X) / 2), found)


@pytest.mark.parametrize("size", [65, 130])
@pytest.mark.parametrize("case", RULES[::9])
def test_the_length_of_a_large_square_step_is_estimated_from_below(case, size, generator):
    """Or exact. By four steps of the power method: an m x m like the parameter is not kept."""
    point, grad, state = problem(case, (size, size), generator)
    new_X, _, length = case(point, grad, state, lr=1e-3)
    ratio = largest(length, 2) / distance(point, new_X)
    assert ratio.min() > 0.85
    assert ratio.max() < 1.001


@pytest.mark.parametrize(
    ("case", "shape", "lr"), in_turn(RULES, SHAPES[:-1], [1e-3, 0.1, 1.0, 30.0])
)
def test_the_limit_bounds_both_parts_of_the_length(case, shape, lr, generator):
    """Of the turn and of the move; with it the optimizer decides what it need not look at."""
    point, grad, state = problem(case, shape, generator)
    *_, length = case(point, grad, state, lr=lr)
    assert isinstance(length, Length)
    parts = torch.linalg.eigvalsh(length.squares).amax() * length.scale
    assert parts <= length.limit * (1 + 1e-9)
    assert largest(length, 2).square().max() <= 2 * length.limit


def test_a_length_that_is_not_finite_is_told_as_nan():
    squares = torch.eye(3).repeat(6, 1, 1)
    squares[1, 0, 2] = math.inf
    squares[5, 1, 1] = math.nan
    found = Length(squares, 4.0).tangents(3)  # two parts of three matrices
    assert found.isnan().tolist() == [False, True, True]
    assert found[0] == math.sqrt(8.0)
