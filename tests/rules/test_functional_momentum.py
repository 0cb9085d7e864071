"""The rules of momentum: what may be handed to them, and that shortcuts change nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cases import TRANSPORTS, in_turn, mixed, pairwise
from torch import Tensor

from stiefel_opt.functional import (
    Deferred,
    Moments,
    Setting,
    Velocity,
    adam_,
    cayley_adam_,
    cayley_sgd_,
    descend_,
    sgd_,
)
from stiefel_opt.functional.descent import RETRACTIONS
from stiefel_opt.geometry import random_point
from stiefel_opt.linalg import own_gram

SHAPES = [(9, 4), (7, 1), (40, 20), (5, 5)]


def parts(kept: Any, one: slice) -> Any:
    """Nested lists and named tuples with some matrices of each batch."""
    if kept is None or isinstance(kept, Tensor):
        return kept if kept is None else kept[one].clone()
    items = [parts(item, one) for item in kept]
    return items if isinstance(kept, list) else type(kept)(*items)


def tensors(kept: Any) -> list[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(kept, (tuple, list)):
        return [tensor for part in kept for tensor in tensors(part)]
    return [] if kept is None else [kept]


class State:
    """The momenta of a batch after a few steps, for every rule."""

    def __init__(self, shape: tuple[int, int], generator: torch.Generator, k: int = 2) -> None:
        n, m = shape
        make = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.point = random_point(k, n, m, generator=generator, dtype=torch.float64)
        self.grad = make(k, n, m)
        skew = make(k, m, m) / 4
        self.skew = skew - skew.mT
        normal = make(k, n, m) / 4
        self.normal = None if n == m else normal - self.point @ (self.point.mT @ normal)
        self.square_skew = self.skew.square() + 0.01  # symmetric
        self.square_normal = None if n == m else (normal + 0.1).square()
        self.identity = torch.eye(m, dtype=torch.float64).repeat(k, 1, 1)

    def of(self, rule: Any, transport: str = "isometric", nesterov: bool = False) -> list[Any]:
        """Copies of what the rule updates, in the order of its arguments."""
        skew = self.skew.clone()
        normal = None if self.normal is None else self.normal.clone()
        if rule is sgd_:
            factor = self.identity.clone() if transport == "isometric" and not nesterov else None
            is_kept = transport == "isometric" and nesterov
            deferred = Deferred(normal, factor, None if is_kept else self.identity * 0)
            return [Velocity(skew, None if normal is None else deferred)]
        if rule is adam_:
            both = Moments(normal, None if normal is None else self.square_normal.clone())
            return [Moments(skew, self.square_skew.clone()), None if normal is None else both]
        if rule is cayley_adam_:
            return [skew, normal, skew.new_full((skew.size(0), 1, 1), 0.5)]
        return [skew, normal]


FLOWS: list[dict[str, Any]] = [
    {"transport": transport, "nesterov": nesterov}
    for transport in TRANSPORTS
    for nesterov in (False, True)
]


@pytest.mark.parametrize(
    ("shape", "rule", "flow"),
    [
        (shape, *rule)
        for shape, rule in in_turn(
            SHAPES,
            [
                *((sgd_, flow) for flow in FLOWS),
                (adam_, {}),
                (adam_, {"transport": "projected"}),
                *((rule, {}) for rule in (descend_, cayley_sgd_, cayley_adam_)),
            ],
        )
    ],
)
def test_a_known_gram_matrix_saves_measuring_it(rule, flow, shape, generator):
    state = State(shape, generator)
    state.point += 1e-7 * torch.randn(state.point.shape, generator=generator).double()
    options: dict[str, Any] = {"lr": 0.1, **flow}
    if rule in (adam_, cayley_adam_):
        options["step"] = 3.0
    found = []
    for correct in (True, own_gram(state.point)):
        kept, setting = state.of(rule, **flow), Setting(correct=correct)
        found.append([rule(state.point, state.grad, *kept, setting=setting, **options), *kept])
    for own, theirs in zip(*map(tensors, found), strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-14)
    known = own_gram(state.point)
    rule(
        state.point, state.grad, *state.of(rule, **flow), setting=Setting(correct=known), **options
    )
    torch.testing.assert_close(known, own_gram(state.point), rtol=0, atol=0)  # only read
    error = own_gram(found[0][0]) - state.identity
    assert error.abs().max() < 1e-12


MASKED: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    *((sgd_, flow, flow) for flow in FLOWS),
    (sgd_, {}, {"metric": 0.3, "force": -0.5}),
    (adam_, {}, {"step": 3.0}),
    (adam_, {}, {"step": 3.0, "transport": "projected", "metric": 0.3, "eps": 0.0}),
    *((descend_, {}, {"momentum": 0.9, "retraction": name}) for name in RETRACTIONS),
    (cayley_sgd_, {}, {"nesterov": True}),
    (cayley_adam_, {}, {"step": 3.0}),
]


@pytest.mark.parametrize(
    ("shape", "bad", "rule", "flow", "options"),
    [
        (shape, bad, *rule)
        for shape, bad, rule in mixed(24, SHAPES, [0.0, float("nan"), float("inf")], MASKED)
    ],
)
def test_a_mask_keeps_the_numbers_of_what_does_not_move(shape, bad, rule, flow, options, generator):
    """Whatever the gradient there is; the others move as if they were alone."""
    state = State(shape, generator, k=3)
    state.grad[1] = bad
    before, kept = tensors([state.point, *state.of(rule, **flow)]), state.of(rule, **flow)
    ok = torch.tensor([True, False, True]).view(3, 1, 1)
    setting = Setting(ok, correct=True)
    found = [rule(state.point, state.grad, *kept, lr=0.1, setting=setting, **options), *kept]
    for now, then in list(zip(tensors(found), before, strict=True))[1:]:
        torch.testing.assert_close(now[1], then[1], rtol=0, atol=0)
    assert all(bool(tensor[::2].isfinite().all()) for tensor in tensors(found))
    for index in (0, 2):
        one = slice(index, index + 1)
        alone = parts(state.of(rule, **flow), one)
        moved = rule(state.point[one], state.grad[one], *alone, lr=0.1, **options)
        for own, theirs in zip(tensors([moved, *alone]), tensors(found), strict=True):
            torch.testing.assert_close(own, theirs[one], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "eps", "amsgrad", "columns"),
    pairwise(SHAPES, [1e-8, 0.0], [False, True], [False, True]),
)
def test_one_pass_over_the_moments_gives_what_single_operations_give(
    shape, eps, amsgrad, columns, generator
):
    """A number as ``step`` takes torch's fused kernel, one for each matrix does not."""
    state = State(shape, generator)
    if columns:  # the memory of wide parameters
        for name in ("point", "grad", "normal", "square_normal"):
            tensor = getattr(state, name)
            if tensor is not None:
                setattr(state, name, tensor.mT.contiguous().mT)
    found = []
    for step in (3.0, torch.full((2, 1, 1), 3.0, dtype=torch.float64)):
        kept = state.of(adam_)
        if amsgrad:
            kept = [t if t is None else t._replace(largest=t.second * 1.5) for t in kept]
        moved = adam_(state.point, state.grad, *kept, lr=0.1, step=step, eps=eps)
        found.append([moved, *kept])
    for fused, single in zip(*map(tensors, found), strict=True):
        torch.testing.assert_close(fused, single, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("shape", [(3, 3), (7, 7), (20, 6), (64, 10)], ids=str)
def test_second_moments_of_the_skew_part_stay_symmetric(shape, generator):
    """A steady torque adds up whatever (i, j) and (j, i) round differently."""
    n, m = shape
    point = random_point(3, n, m, generator=generator)
    torque = torch.randn(3, m, m, generator=generator)
    torque = torque - torque.mT
    skew, square = torch.zeros(3, m, m), torch.zeros(3, m, m)
    tall = None if n == m else Moments(torch.zeros(3, n, m), torch.zeros(3, n, m))
    for step in range(1, 300):
        force = point @ torque
        point = adam_(
            point,
            force,
            Moments(skew, square),
            tall,
            lr=0.1,
            step=float(step),
            setting=Setting(correct=step % 8 == 0),
        )
    torch.testing.assert_close(square, square.mT, rtol=0, atol=0)
    torch.testing.assert_close(skew, -skew.mT, rtol=0, atol=0)
    assert (own_gram(point) - torch.eye(m)).abs().max() < 4e-6


def test_moments_of_another_order_in_memory_are_told_apart(generator):
    state = State((9, 4), generator)
    found = []
    for turned in (False, True):
        kept = state.of(adam_)
        if turned:  # second moments lie by columns, first ones by rows
            kept[1] = kept[1]._replace(second=kept[1].second.mT.contiguous().mT)
        moved = adam_(state.point, state.grad, *kept, lr=0.1, step=3.0)
        found.append([moved, *kept])
    for own, theirs in zip(*map(tensors, found), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-13, atol=1e-15)
