"""StiefelLBFGS: equal to a slow reference, equal to torch's on plain parameters, exact, fast."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases import in_turn
from reference_lbfgs import LBFGSReference
from torch import Tensor, nn
from training import closure_of

import stiefel_opt as so

EXACT = {"tolerance_grad": 0.0, "tolerance_change": 0.0}


# ---- the reference -------------------------------------------------------------------------------


def quartic(points: Sequence[Tensor]) -> Tensor:
    """A loss without symmetry that couples all tensors."""
    generator = torch.Generator().manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for x in points:
        a = torch.randn(x.shape[0], x.shape[0], generator=generator, dtype=torch.float64)
        b = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        total = total + ((a @ x) ** 2).sum() / 4 + (b * x).sum() + (x**4).sum()
    return total + 0.1 * torch.stack([x.sum() for x in points]).prod()


@pytest.mark.parametrize("search", ["strong_wolfe", None])
@pytest.mark.parametrize("history", [2, 100])
@pytest.mark.parametrize(
    "shapes",
    [[(7, 2)], [(4, 4)], [(6, 1)], [(6, 2), (3, 2)], [(6, 2), (5, 4), (3, 3)]],
    ids=str,
)
def test_steps_are_those_of_the_reference(
    shapes: list[tuple[int, int]], history: int, search: str | None
) -> None:
    """The second of several tensors is plain."""
    is_plain = [index == 1 for index in range(len(shapes))]
    start = [
        torch.randn(*shape, dtype=torch.float64) / 4
        if plain
        else so.random_point(*shape, dtype=torch.float64)
        for shape, plain in zip(shapes, is_plain, strict=True)
    ]
    lr = 1.0 if search else 0.05
    reference = LBFGSReference(quartic, start, is_plain)
    reference.run(8, history, search, lr)
    parameters = [
        nn.Parameter(x.clone()) if plain else so.ManifoldParameter(x.clone())
        for x, plain in zip(start, is_plain, strict=True)
    ]
    options = {"lr": lr, "history_size": history, "line_search_fn": search, **EXACT}
    optimizer = so.StiefelLBFGS(parameters, max_iter=8, max_eval=1000, **options)
    optimizer.step(closure_of(optimizer, lambda: quartic(parameters)))
    for found, wanted in zip(parameters, reference.points, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-7, atol=1e-7)


# ---- torch's, on plain parameters ----------------------------------------------------------------

TABLE = [
    {},
    {"line_search_fn": None, "lr": 0.1},
    {"line_search_fn": None, "lr": torch.tensor(0.05), "max_iter": 3},
    {"line_search_fn": "strong_wolfe", "history_size": 2},
    {"history_size": 1, "max_iter": 1},
    {"max_eval": 3},
    {"max_iter": 50, "max_eval": 7, "lr": 0.5},
    {"tolerance_grad": 1e-2},
    {"tolerance_change": 1e-2},
    {"tolerance_grad": -1.0, "tolerance_change": -1.0, "max_iter": 30},
]


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # torch's class does
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("options", TABLE, ids=str)
def test_plain_parameters_alone_are_torchs_to_the_bit(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    start = [torch.randn(4, 3, dtype=dtype), torch.randn(5, dtype=dtype)]
    target = [torch.randn_like(x) for x in start]
    found = []
    for kind, extra in (
        (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"}),
        (so.StiefelLBFGS, {"stiefel": False}),
    ):
        parameters = [nn.Parameter(x.clone()) for x in start]
        optimizer = kind(parameters, **{**extra, **options})

        def loss(parameters: list[nn.Parameter] = parameters) -> Tensor:
            gaps = [(p - t).abs() for p, t in zip(parameters, target, strict=True)]
            return sum(((g**2).sum() + (g**4).sum() for g in gaps), torch.zeros(()))

        values = [optimizer.step(closure_of(optimizer, loss)) for _ in range(4)]
        state = optimizer.state[parameters[0]]
        found.append([*parameters, *values, torch.tensor([state["func_evals"], state["n_iter"]])])
    for ours, torchs in zip(*found, strict=True):
        assert torch.equal(ours, torchs)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_hooks_run_once_a_step() -> None:
    torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])  # torch patches its class when it is made
    for stiefel in (False, True):
        parameter = nn.Parameter(so.random_point(4, 2))
        optimizer = so.StiefelLBFGS([parameter], stiefel=stiefel)
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        optimizer.step(closure_of(optimizer, lambda p=parameter: p[0].sum()))
        assert calls == ["before", "after"]


# ---- exact in every shape and dtype --------------------------------------------------------------

READINGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tall": ((9, 4), {}),
    "wide": ((3, 8), {}),
    "square": ((5, 5), {}),
    "row": ((1, 6), {}),
    "batch": ((2, 3, 7, 2), {}),
    "heads": ((6, 8), {"heads": 3}),
    "square heads": ((6, 3), {"heads": 2}),
    "rows": ((9, 5), {"rows": (2, 6)}),
    "ranges": ((12, 4), {"rows": ((0, 6), (8, 10)), "heads": (3, 1)}),
    "convolution": ((4, 2, 3, 3), {"flatten": True}),
    "transposed": ((4, 12), {"transposed": True, "heads": 2}),
    "scale": ((8, 3), {"scale": 3.0}),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *in_turn(READINGS, [torch.float64, torch.float32, torch.complex128, torch.complex64]),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name, dtype in in_turn(READINGS, [torch.complex64, torch.float64])
        ),
    ],
)
def test_a_matrix_is_found_to_all_digits(name: str, dtype: torch.dtype) -> None:
    """The one from which a weighted distance is measured, beside a plain parameter."""
    shape, manifold = READINGS[name]
    reading = so.Stiefel(**manifold)
    solution = so.random_point(*shape, manifold=reading, dtype=dtype)
    offset = so.project_tangent(solution, torch.randn_like(solution), reading) / 2
    parameter = so.ManifoldParameter(so.retract(solution, offset, reading), reading)
    plain = nn.Parameter(torch.randn(3, dtype=dtype.to_real()))  # an odd number of entries
    optimizer = so.StiefelLBFGS([plain, parameter], max_iter=60, **EXACT)
    weights = torch.rand(shape, dtype=dtype.to_real()) + 0.5

    def loss() -> Tensor:
        gap = (weights * (parameter - solution).abs().square()).sum()
        return gap + (plain - 1).abs().square().sum() * 3

    optimizer.step(closure_of(optimizer, loss))
    eps = torch.finfo(dtype).eps
    assert (parameter - solution).abs().max() < 100 * eps * reading.scale
    assert (plain - 1).abs().max() < 100 * eps
    assert so.orthonormality_error(parameter) <= 10 * max(shape) ** 0.5 * eps


def test_equal_shapes_are_one_batch_and_the_same_as_one_by_one() -> None:
    """Equal matrices in several parameters or as heads of one: the same problem."""
    start = so.random_point(3, 6, 2, dtype=torch.float64)
    target = torch.randn(3, 6, 2, dtype=torch.float64)
    ends = []
    for split in (True, False):
        parameters = [so.ManifoldParameter(x.clone()) for x in (start if split else [start])]
        optimizer = so.StiefelLBFGS(parameters, max_iter=10)

        def loss(parameters: list[Any] = parameters, split: bool = split) -> Tensor:
            x = torch.stack(parameters) if split else parameters[0]
            return ((x - target) ** 4).sum()

        optimizer.step(closure_of(optimizer, loss))
        ends.append((torch.stack(parameters) if split else parameters[0]).detach())
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


# ---- how fast ------------------------------------------------------------------------------------


def evaluations(
    loss: Callable[[Tensor], Tensor], start: Tensor, minimum: float, scale: float, most: int
) -> list[int]:
    """How many it took to 1e-2, 1e-4, ..., 1e-12 of ``scale``, of at most ``most``."""
    parameter = so.ManifoldParameter(start.clone())
    optimizer = so.StiefelLBFGS([parameter], max_iter=most, max_eval=most, **EXACT)
    gaps: list[float] = []

    def value() -> Tensor:
        found = loss(parameter)
        gaps.append((float(found.detach()) - minimum) / scale)
        return found

    optimizer.step(closure_of(optimizer, value))
    assert so.orthonormality_error(parameter) < 1e-14
    return [
        next(i for i, gap in enumerate(gaps, start=1) if gap < 10.0**-k) for k in range(2, 13, 2)
    ]


def leading_eigenvalues(n: int, m: int, seed: int, most: int, factor: float = 1.0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    a = factor * (a + a.T)
    values = torch.linalg.eigvalsh(a)
    best = -float(values[-m:].sum())
    start = so.random_point(n, m, generator=generator, dtype=torch.float64)
    return evaluations(lambda x: -(x * (a @ x)).sum(), start, best, abs(best), most)


def procrustes(n: int, m: int, seed: int, most: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(400, n, generator=generator, dtype=torch.float64)
    a = a * torch.logspace(0, -1.5, n, dtype=torch.float64)
    b = a @ so.random_point(n, m, generator=generator, dtype=torch.float64)
    start = so.random_point(n, m, generator=generator, dtype=torch.float64)
    scale = float(((a @ start - b) ** 2).sum())
    return evaluations(lambda x: ((a @ x - b) ** 2).sum(), start, 0.0, scale, most)


BARS = [
    (leading_eigenvalues, 300, 5, 100),
    (procrustes, 40, 8, 150),
    pytest.param(leading_eigenvalues, 1000, 10, 170, marks=pytest.mark.slow),
    pytest.param(procrustes, 100, 20, 240, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("problem", "n", "m", "most"), BARS)
def test_few_evaluations_to_many_digits(
    problem: Callable[[int, int, int, int], list[int]], n: int, m: int, most: int
) -> None:
    """At most so many to a relative gap of 1e-8, and 1.7 times as many to 1e-12."""
    spent = problem(n, m, 0, round(1.7 * most))
    assert spent[3] <= most


def test_convergence_is_superlinear_where_pairs_span_the_tangent_space() -> None:
    """Each two digits of the gap cost fewer evaluations than linear convergence would."""
    spent = leading_eigenvalues(8, 2, 3, 40)
    costs = [after - before for before, after in itertools.pairwise(spent)]
    assert max(costs[-2:]) <= 3
    assert sum(costs[-2:]) < sum(costs[:2]) + 2


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_a_scaled_loss_is_as_easy(factor: float) -> None:
    assert leading_eigenvalues(40, 3, 0, 120, factor)[-1] < 120


@pytest.mark.parametrize("seed", range(3))
def test_a_search_that_drowns_in_rounding_leaves_the_parameters_finite(seed: int) -> None:
    """The trials of torch's search may then have one length, which its interpolation divides by."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(30, 8, generator=generator) * torch.logspace(0, -2, 8)
    b = torch.randn(30, 3, generator=generator)
    weight = so.ManifoldParameter(torch.randn(8, 3, generator=generator))
    plain = nn.Parameter(torch.zeros(3))
    optimizer = so.StiefelLBFGS([weight, plain], max_iter=100, **EXACT)
    closure = closure_of(
        optimizer, lambda: (a @ weight - b).square().sum() + (plain - 1).square().sum()
    )
    losses = [float(optimizer.step(closure).detach()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert weight.isfinite().all()
    assert plain.isfinite().all()
