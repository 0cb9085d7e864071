"""Laws of every pure rule: it writes to nothing, mixes no matrices, and says how long its step is.

A new rule is a row in `rule_cases.py`.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cases import in_turn
from rule_cases import RULES, SHAPES, RuleCase, by_columns, largest, problem, tensors
from torch import Tensor

from stiefel_opt.device import Fixed, Now
from stiefel_opt.functional import Length, Sums
from stiefel_opt.geometry import gram_error, random_point
from stiefel_opt.linalg import gram

READERS = [Now, Fixed]


def column(value: float, k: int) -> Tensor:
    """A number for each matrix, all alike."""
    return torch.full((k, 1, 1), value, dtype=torch.float64)


def options_as_tensors(case: RuleCase, k: int) -> dict[str, Tensor]:
    """Those options that may differ from matrix to matrix."""
    takes = ("step",) if case.rule.__name__ != "sgd" else ("step", "force")
    return {name: column(case.options[name], k) for name in takes if name in case.options}


# ---- purity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "shape", "reader", "columns", "numbers"),
    in_turn(RULES, SHAPES[:-1], READERS, [False, True, True], [True, True, True, False]),
)
def test_a_rule_writes_to_nothing_it_is_given_and_repeats_itself(
    case, shape, reader, columns, numbers, generator
):
    """A write of the same number would show in the version of a tensor."""
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
    assert {name: tensor._version for name, tensor in inputs.items()} == versions
    for name, tensor in inputs.items():
        assert torch.equal(tensor, before[name]), name
    first, second = map(tensors, found)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        assert bool(tensor.isfinite().all()), name


@pytest.mark.parametrize(("case", "shape"), in_turn(RULES, SHAPES))
def test_the_new_state_has_the_names_shapes_and_memory_order_of_the_old(case, shape, generator):
    point, grad, state = problem(case, shape, generator)
    new_X, new, _ = case(point, grad, state, lr=0.1)
    assert new.keys() <= state.keys()
    for tensor, old in [(new_X, point), *((new[name], state[name]) for name in new)]:
        assert tensor.shape == old.shape
        assert tensor.dtype == old.dtype


# ---- batches -------------------------------------------------------------------------------------

# In float64: of the longest gradient that an optimizer passes on squares are finite.
OTHERS = [0.0, 1.0, 1e6, 1e148, math.nan, math.inf]


@pytest.mark.parametrize(
    ("case", "shape", "other"),
    [
        *in_turn(RULES, SHAPES[:-1], [0.0, 1e6, 1e148]),
        *in_turn(RULES, SHAPES[1:-1], [math.nan, math.inf, 1.0]),
    ],
)
def test_every_matrix_of_a_batch_is_treated_for_itself(case, shape, other, generator):
    """Whatever the gradient of another is: none, long, as long as may be, or not finite."""
    point, grad, state = problem(case, shape, generator, k=3)
    grad[1] *= other
    found = tensors(case(point, grad, state, lr=0.1))
    lengths = largest(case(point, grad, state, lr=0.1)[2], 3)
    for index in (0, 2):
        one = slice(index, index + 1)
        alone = case(
            point[one], grad[one], {name: tensor[one] for name, tensor in state.items()}, lr=0.1
        )
        for name, tensor in tensors(alone).items():
            if name != "length":
                torch.testing.assert_close(found[name][one], tensor, rtol=0, atol=1e-12)
        torch.testing.assert_close(lengths[one], largest(alone[2], 1), rtol=1e-9, atol=1e-12)


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
            if name != "length":
                torch.testing.assert_close(found[name][rows], tensor, rtol=0, atol=1e-12)


# ---- rows on several processes -------------------------------------------------------------------


class SharedSum:
    """The sum over two threads, each of which has some of the rows."""

    def __init__(self) -> None:
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

        return Sums(row_sum)


def rows_of(tensor: Tensor, rows: slice, n: int) -> Tensor:
    """Some rows of a tall tensor; what is small is on every process."""
    return tensor[:, rows].clone() if tensor.size(-2) == n else tensor.clone()


@pytest.mark.parametrize(("case", "shape"), in_turn(RULES, [(12, 4), (9, 2), (40, 20)]))
def test_rows_may_live_on_several_processes(case, shape, generator):
    """Some rows each, with sums over both: the same step."""
    point, grad, state = problem(case, shape, generator)
    whole, n = case(point, grad, state, lr=0.3), shape[0]
    shared = SharedSum()

    def run(rank: int) -> Any:
        rows = (slice(0, n // 3), slice(n // 3, n))[rank]
        own = {name: rows_of(tensor, rows, n) for name, tensor in state.items()}
        return case(point[:, rows], grad[:, rows], own, lr=0.3, sums=shared.of(rank))

    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(run, range(2)))
    expected, parts = tensors(whole), [tensors(half) for half in halves]
    for name, tensor in expected.items():
        is_tall = name != "length" and tensor.size(-2) == n
        found = torch.cat([part[name] for part in parts], dim=1) if is_tall else parts[1][name]
        torch.testing.assert_close(found, tensor, rtol=0, atol=1e-10)
        if not is_tall:
            torch.testing.assert_close(parts[0][name], found, rtol=0, atol=0)
    assert shared.calls[0] == shared.calls[1]
    assert 1 <= shared.calls[0]


# ---- the length of a step ------------------------------------------------------------------------


def distance(point: Tensor, new_X: Tensor) -> Tensor:
    """The largest |X+ v - X v| over unit vectors v, the chord of the largest angle."""
    return torch.linalg.matrix_norm(new_X - point, 2)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("case", "shape"), [*in_turn(RULES, SHAPES[:3]), *in_turn(RULES, [(5, 5), (6, 5), (24, 24)])]
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
