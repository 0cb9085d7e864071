"""Which parameters have a gradient may change in every step: no cost in memory, no other step."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType

import pytest
import torch
from cases import in_turn, mixed
from contract import (
    OPTIMIZERS,
    RULES,
    TABLE,
    every_rule,
    on_machines,
    optimizer,
    tried_with,
)
from held import Calls, bytes_of, counted_memory
from torch import Tensor, nn

import stiefel_opt as so

MANIFOLDS = {
    "tall": ((9, 4), {}),
    "wide": ((4, 9), {}),
    "square": ((4, 4), {}),
    "heads": ((6, 9), {"heads": 2}),
    "scaled": ((6, 3), {"scale": 2.5}),
    "rows": ((12, 5), {"rows": ((0, 4), (6, 10)), "heads": (1, 2)}),
}


def parameters(dtype: torch.dtype, copies: int = 3) -> list[nn.Parameter]:
    """Several of every reading, and two plain ones."""
    found: list[nn.Parameter] = []
    generator = torch.Generator().manual_seed(0)
    for shape, options in MANIFOLDS.values():
        manifold = so.Stiefel(**options)
        for _ in range(copies):
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            found.append(so.ManifoldParameter(value.to(dtype), manifold, project=False))
    plain = torch.randn(2, 5, generator=generator, dtype=torch.float64).to(dtype)
    return [*found, nn.Parameter(plain[0].clone()), nn.Parameter(plain[1].clone())]


def fill(params: Iterable[Tensor], step: int, chosen: Callable[[int], bool]) -> None:
    """Give each chosen parameter the gradient of this step, all others None."""
    generator = torch.Generator().manual_seed(1000 + step)
    for number, parameter in enumerate(params):
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype) if chosen(number) else None


def drawn(number: int, step: int) -> float:
    """A number in [0, 1) for a parameter in a step."""
    return float(torch.rand((), generator=torch.Generator().manual_seed(7919 * step + number)))


# Whether parameter `i` of `k` has a gradient in step `t`.
SCHEDULES: dict[str, Callable[[int, int, int], bool]] = {
    "dropped at random": lambda i, t, _: drawn(i, t) < 0.6,
    "one missing": lambda i, t, k: i != int(k * drawn(0, t)),
    "two halves": lambda i, t, _: i % 2 == t % 2,
    "one is late": lambda i, t, _: i not in (1, 5, 12) or t >= 5,
    "thawed from the end": lambda i, t, k: i >= k - 1 - 2 * t,
    "frozen from the front": lambda i, t, _: i > t,
    "now and then none": lambda _, t, __: t % 3 != 1,
}


# ---- the same steps ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "name", "dtype"),
    [
        *((*row, torch.float64) for row in mixed(14, SCHEDULES, RULES)),
        *in_turn(["dropped at random", "one is late"], RULES, [torch.bfloat16]),
    ],
)
def test_each_parameter_moves_as_in_an_optimizer_of_its_own(
    name: str, schedule: str, dtype: torch.dtype
) -> None:
    chosen, together, alone = SCHEDULES[schedule], parameters(dtype, copies=2), []
    if half := dtype is torch.bfloat16:
        together = together[:-2]  # torch's own steps round what they write
    late = (
        [together[i] for i in (1, 5)] if schedule == "one is late" else []
    )  # a group of their own
    opt = optimizer(name, [p for p in together if all(p is not own for own in late)])
    for parameter in together:
        own = copy.deepcopy(parameter)
        alone.append((own, optimizer(name, [own])))
    counts = [0] * len(together)
    for step in range(9):  # past one that corrects rounding
        if late and step == 5:
            opt.add_param_group({"params": late})
        fill(together, step, lambda i, step=step: chosen(i, step, len(together)))
        before = [p.detach().clone() for p in together]
        opt.step()
        for index, (parameter, (own, own_opt)) in enumerate(zip(together, alone, strict=True)):
            if parameter.grad is None:
                assert torch.equal(parameter, before[index])
                assert counts[index] or not opt.state.get(parameter)
            else:
                own.grad = parameter.grad.clone()
                own_opt.step()
                counts[index] += 1
    atol = 2e-4 if half else max(TABLE[name].rounding, 1e-11)
    for index, (parameter, (own, own_opt)) in enumerate(zip(together, alone, strict=True)):
        state = opt.state.get(parameter, {})
        if half and counts[index]:
            master, expected = state["master"], own_opt.state[own]["master"]
            torch.testing.assert_close(master, expected, rtol=0, atol=atol, msg=f"{index}")
            assert torch.equal(master.to(dtype), parameter)
            assert so.orthonormality_error(master, parameter.manifold) < 1e-5
            continue
        torch.testing.assert_close(parameter, own, rtol=0, atol=atol, msg=f"{index}")
        if isinstance(parameter, so.ManifoldParameter):
            assert float(state.get("step", 0)) == counts[index]
            for now, expected in zip(
                torch.utils._pytree.tree_leaves(opt.velocity(parameter)),
                torch.utils._pytree.tree_leaves(own_opt.velocity(own)),
                strict=True,
            ):
                torch.testing.assert_close(now, expected, rtol=0, atol=10 * atol, msg=f"{index}")
            assert not counts[index] or so.orthonormality_error(parameter) < 1e-13


@tried_with("sgd", "adam")
def test_skipped_steps_are_counted_through_all_changes(name: str) -> None:
    params = parameters(torch.float32)
    opt = optimizer(name, params)
    expected: dict[int, int] = {}
    for step in range(8):
        fill(params, step, lambda i, step=step: drawn(i, step) < 0.7)
        for index in range(0, len(params) - 2, 4):
            if params[index].grad is not None and (index + step) % 3 == 0:
                params[index].grad.view(-1)[1] = torch.nan
                expected[index] = expected.get(index, 0) + 1
        bad = any(p.grad is not None and not p.grad.isfinite().all() for p in params)
        with pytest.warns(UserWarning, match="not finite") if bad else torch.no_grad():
            opt.step()
    positions = {id(p): index for index, p in enumerate(params)}
    assert {positions[id(p)]: n for p, n in opt.skipped_steps_of().items()} == expected


# ---- memory --------------------------------------------------------------------------------------


def reachable(root: object) -> int:
    """The number of objects that an object holds, itself or through others."""
    seen, left = {id(root)}, [root]
    while left:
        for found in gc.get_referents(left.pop()):
            if id(found) not in seen and not isinstance(found, (type, ModuleType, FunctionType)):
                seen.add(id(found))
                left.append(found)
    return len(seen)


def large(count: int) -> list[nn.Parameter]:
    value = torch.zeros(2048, 16)
    value.view(-1)[:: 16 + 1][:16] = 1.0
    return [so.ManifoldParameter(value.clone()) for _ in range(count)]


@tried_with("sgd", "adam")
def test_freezing_layers_one_by_one_holds_the_state_and_no_more(name: str) -> None:
    params = large(10)
    opt = optimizer(name, params)
    generator = torch.Generator().manual_seed(0)
    grad = 1e-2 * torch.randn(params[0].shape, generator=generator)
    for parameter in params:
        parameter.grad = grad
    with counted_memory() as held:
        for layer in range(len(params)):
            opt.step()
            params[layer].grad = None
    state = bytes_of(t for p in params for t in opt.state[p].values())
    assert state <= held.bytes * 1.05  # the memory is counted
    assert held.bytes <= 1.2 * state + bytes_of(params), held.bytes / state


@tried_with("sgd", "adam")
def test_a_set_that_changes_in_every_step_holds_nothing_that_it_has_left(name: str) -> None:
    params = large(4)
    opt = optimizer(name, params)
    grad = 1e-2 * torch.randn(params[0].shape)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            for index, parameter in enumerate(params):
                parameter.grad = grad if (step + index) % 3 else None
            opt.step()

    steps(0, 4)  # each has had its first gradient
    state = bytes_of(t for p in params for t in opt.state[p].values())
    with counted_memory() as held:
        steps(4, 24)
    assert held.bytes <= 0.2 * state + bytes_of(params), held.bytes / state


@tried_with("sgd", "adam")
def test_dropped_layers_leave_nothing_behind(name: str) -> None:
    """Nearly every step has a set of its own; nothing may grow with the number of sets."""
    params = [so.ManifoldParameter(torch.eye(8, 4)) for _ in range(12)]
    opt = optimizer(name, params)

    def run(first: int, last: int) -> tuple[int, int]:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            kept = torch.rand(len(params), generator=generator).tolist()
            for parameter, number in zip(params, kept, strict=True):
                parameter.grad = torch.ones_like(parameter).cumsum(0) if number < 0.5 else None
            opt.step()
        for parameter in params:
            parameter.grad = None
        gc.collect()
        return reachable(opt), len(pickle.dumps(opt))

    objects, size = run(0, 40)
    later_objects, later_size = run(40, 100)
    assert later_objects - objects < 30
    assert later_size <= 1.02 * size


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_parameter_that_was_removed_is_not_kept_alive(name: str) -> None:
    params = parameters(torch.float32)
    opt = optimizer(name, params)
    for step in range(4):
        fill(params, step, lambda i, step=step: (i + step) % 4 > 0)
        opt.step()
    removed = params[:10:3]
    kept = [p for p in params if not any(p is other for other in removed)]
    opt.param_groups[0]["params"] = kept
    for parameter in removed:
        del opt.state[parameter]
    references = [weakref.ref(parameter) for parameter in removed]
    del removed, params, parameter
    fill(kept, 9, lambda _: True)
    opt.step()
    gc.collect()
    assert [reference() is not None for reference in references] == [False] * len(references)
    for weight in kept:
        assert float(opt.state[weight].get("step", 4)) >= 3


@every_rule
def test_an_optimizer_is_freed_without_the_cyclic_collector(name: str) -> None:
    """A large state must not wait for it: long trainings switch it off."""
    with counted_memory() as held:
        params = large(4)
        opt = optimizer(name, params)
        for step in range(3):
            for index, parameter in enumerate(params):
                parameter.grad = 1e-2 * torch.ones_like(parameter) if index != step else None
            opt.step()
        del opt, params, parameter
    assert held.bytes < 200_000, held.bytes  # one state alone is 524,288


@on_machines(cpu="sgd adam", as_accelerator="adam-amsgrad")
def test_a_missing_gradient_moves_no_state_to_other_memory(name: str) -> None:
    params = parameters(torch.float32)
    opt = optimizer(name, params)

    def places() -> list[tuple[int, str, int, int]]:
        return [
            (index, key, id(tensor), tensor.data_ptr())
            for index, parameter in enumerate(params)
            for key, tensor in opt.state[parameter].items()
        ]

    for step in range(2):
        fill(params, step, lambda _: True)
        opt.step()
    before = places()
    for step in range(2, 12):
        fill(params, step, lambda i, step=step: drawn(i, step) < 0.8)
        opt.step()
        assert places() == before


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_one_missing_gradient_costs_about_what_a_full_step_does(name: str) -> None:
    """Counted in calls of torch: stacking anew would show in them."""
    params = [so.ManifoldParameter(torch.eye(16, 4)) for _ in range(40)]
    opt = optimizer(name, params)

    counts = {}
    for kind in ("full", "missing", "half"):
        found = []
        for step in range(24):
            left_out = {"full": (), "missing": (step * 7 % 40,), "half": range(step % 2, 40, 2)}
            fill(params, step, lambda i, out=left_out[kind]: i not in out)
            with Calls() as calls:
                opt.step()
            found.append(calls.views + calls.others)
        counts[kind] = sum(found[8:])
    assert counts["missing"] <= 2 * counts["full"] + 24 * 40
    assert counts["half"] <= 2 * counts["full"] + 24 * 40


def test_every_rule_is_tried() -> None:
    tried = tuple(OPTIMIZERS[name][0] for name in RULES)  # StiefelAdamW is a StiefelAdam
    assert all(issubclass(rule, tried) for rule, _ in OPTIMIZERS.values())
