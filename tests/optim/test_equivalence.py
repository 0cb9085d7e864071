"""Every optimizer against slow loops, and its plain parameters against torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    OPTION_GRID,
    PLAIN,
    READING_CASES,
    READINGS,
    VARIANTS,
    Array,
    OptimizerCase,
    Reading,
    in_turn,
    mixed,
    of_clients,
)
from contract import PUBLISHED
from optimizers import OF_CLASS

import stiefel_opt as so

STEPS = 18  # past two steps that remove rounding
TOLERANCE = 1e-12
SHAPES = ("square", "batch-wide")


def batch(array: Array) -> Array:
    return array.reshape(-1, *array.shape[-2:])


def gaussian(rng: np.random.Generator, shape: tuple[int, ...], is_complex: bool) -> Array:
    real = rng.standard_normal(shape)
    return (real + 1j * rng.standard_normal(shape)) / math.sqrt(2) if is_complex else real


class Field:
    """Noisy gradients of -tr(X'AX)/2 + <C, X>; the quadratic part keeps two runs together."""

    def __init__(self, rng: np.random.Generator, matrices: Array) -> None:
        k, n, m = batch(matrices).shape
        is_complex = np.iscomplexobj(matrices)
        factors = gaussian(rng, (k, n, n), is_complex) / math.sqrt(n)
        self.cost = factors @ factors.conj().swapaxes(-1, -2) / 2
        self.linear = 0.3 * gaussian(rng, (k, n, m), is_complex)
        self.noise = 0.2 * gaussian(rng, (STEPS, k, n, m), is_complex)

    def __call__(self, points: Array, step: int) -> Array:
        return self.linear - self.cost @ points + (1 + math.sin(step)) * self.noise[step]


class Run:
    """One parameter beside its reference loops, each following its own gradients."""

    def __init__(
        self,
        case: OptimizerCase,
        reading: Reading,
        rng: np.random.Generator,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        start = reading.on_the_manifold(gaussian(rng, reading.shape, dtype.is_complex))
        self.reading = reading
        self.param = reading.parameter(start, dtype)
        points = batch(reading.matrices(start)) / reading.scale
        self.references: list[Any] = [case.reference(point, reading.scale) for point in points]
        momentum = case.options.get("momentum", case.row.momentum)
        self.has_velocity = momentum > 0 and hasattr(self.references[0], "Z")
        self.field = Field(rng, points)
        self.rest = 0.1 * gaussian(rng, reading.shape, dtype.is_complex)

    def points(self) -> Array:
        value = self.param.detach().numpy()
        return batch(self.reading.matrices(value)) / self.reading.scale

    def set_grad(self, step: int) -> None:
        grad = self.rest.copy()
        matrices = self.reading.matrices(grad)
        matrices[...] = self.field(self.points(), step).reshape(matrices.shape)
        self.param.grad = torch.tensor(grad, dtype=self.param.dtype)

    def step_references(self, step: int) -> None:
        grads = self.field(np.stack([reference.X for reference in self.references]), step)
        for reference, grad in zip(self.references, grads, strict=True):
            reference.step(grad)

    def is_square(self) -> bool:
        return self.references[0].n == self.references[0].m

    def compare(self, optimizer: Any, tolerance: float = TOLERANCE) -> None:
        expected = np.stack([reference.X for reference in self.references])
        assert np.abs(self.points() - expected).max() < tolerance
        if self.has_velocity:
            Z, U = optimizer.velocity(self.param)
            expected = np.stack([reference.Z for reference in self.references])
            assert np.abs(batch(Z.detach().numpy()) - expected).max() < tolerance
            if not self.is_square():
                expected = np.stack([reference.U for reference in self.references])
                size = max(1.0, np.abs(expected).max())
                assert np.abs(batch(U.detach().numpy()) - expected).max() < tolerance * size


# Others do to numbers of the optimizer what they do to real matrices, too.
OTHERS = ("tensor-lr", "maximize", "decay", "decoupled", "eps", "short-memory")
COMPLEX = [
    OptimizerCase("-".join((algorithm, *map(str, options.values()))), algorithm, options)
    for algorithm, options in (
        ("adam", {"metric": "canonical", "transport": "isometric"}),
        ("sgd", {"metric": -1.0, "transport": "isometric"}),
        ("adam", {"metric": "euclidean", "transport": "projected"}),
        ("sgd", {"metric": 0.3, "transport": "projected"}),
    )
] + of_clients("COMPLEX")
COMPLEX_KINDS = (
    *("tall", "wide", "square", "vector"),
    *("batch-tall", "heads-wide", "transposed", "scaled"),
)


def gentle(case: OptimizerCase) -> OptimizerCase:
    """Steps so short that an accelerator, which knows the one before, holds none that is longer."""
    published = case.algorithm in PUBLISHED
    rate = case.lr if published else 0.02
    return OptimizerCase(case.name, case.algorithm, {**case.options, "lr": rate})


REAL, COMPLEX_TOO, EVERY = (torch.float64, "cpu"), (torch.complex128, "cpu"), tuple(READINGS)
GENTLE, TRACED = (torch.float64, "as_accelerator"), (torch.float64, "compiled")
FOLLOWED = [
    *((case, SHAPES, *REAL) for case in (*OPTION_GRID, *VARIANTS)),
    *((case, EVERY, *REAL) for case in READING_CASES),
    *(pytest.param(case, EVERY, *REAL, marks=pytest.mark.slow) for case in OPTION_GRID),
    *((case, COMPLEX_KINDS, *COMPLEX_TOO) for case in READING_CASES),
    *((case, ("tall", "square"), *COMPLEX_TOO) for case in COMPLEX),
    *((case, SHAPES, *COMPLEX_TOO) for case in VARIANTS[::2] if not case.name.endswith(OTHERS)),
    *((gentle(case), SHAPES, *GENTLE) for case in (*OPTION_GRID[::5], *VARIANTS[2::6])),
    *((gentle(case), EVERY, *GENTLE) for case in READING_CASES[::2]),
    *((case, SHAPES, *TRACED) for case in (OPTION_GRID[0], OPTION_GRID[-1], VARIANTS[3])),
    (READING_CASES[-1], EVERY, *TRACED),
]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("case", "names", "dtype", "machine"),
    FOLLOWED,
    ids=lambda value: getattr(value, "name", None),
    indirect=["machine"],
)
def test_every_option_reading_and_machine_follows_the_textbook_loop(
    case: OptimizerCase, names: tuple[str, ...], dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """Complex matrices with conjugate transposes."""
    runs = [Run(case, READINGS[name], rng, dtype) for name in names]
    optimizer = case.optimizer([run.param for run in runs])
    for step in range(STEPS):
        for run in runs:
            run.set_grad(step)
            run.step_references(step)
        optimizer.step()
        if step in (0, 1, 7, 8, STEPS - 1):
            for run in runs:
                run.compare(optimizer)


@pytest.mark.parametrize(
    ("name", "algorithm", "transport"),
    [
        *in_turn(["tall", "square", "heads-wide", "scaled"], ["sgd", "adam"], ["isometric"]),
        *in_turn(["tall", "heads-wide", "square", "wide"], ["sgd", "adam"], ["projected"]),
        *((reading, name, None) for reading, name in zip(("tall", "square"), PUBLISHED)),  # noqa: B905
    ],
)
def test_a_start_in_motion_follows_the_textbook_loop(
    name: str, algorithm: str, transport: str | None, rng: np.random.Generator
) -> None:
    options = {"metric": 0.3, **({"transport": transport} if transport else {})}
    case = OptimizerCase("", algorithm, options)
    run = Run(case, READINGS[name], rng)
    optimizer: Any = case.optimizer([run.param])
    for reference in run.references:
        K = 0.3 * rng.standard_normal(reference.Z.shape)
        V = 0.3 * rng.standard_normal(reference.U.shape)
        reference.Z = (K - K.T) / 2
        reference.U = V - reference.X @ (reference.X.T @ V)
    leading = READINGS[name].matrices(run.rest).shape[:-2]
    Z = np.stack([reference.Z for reference in run.references])
    U = np.stack([reference.U for reference in run.references])
    optimizer.set_velocity(
        run.param,
        torch.tensor(Z.reshape(*leading, *Z.shape[1:])),
        None if run.is_square() else torch.tensor(U.reshape(*leading, *U.shape[1:])),
    )
    run.compare(optimizer)
    for step in range(12):
        run.set_grad(step)
        run.step_references(step)
        optimizer.step()
        run.compare(optimizer)
        if step % 2:  # what is read may be set back
            optimizer.set_velocity(run.param, *optimizer.velocity(run.param))


def moments(tensor: torch.Tensor, reading: Reading, references: list[Any]) -> Array:
    """A second moment as one matrix per reference, whichever way it is stored."""
    array = tensor.numpy()
    if array.shape == reading.shape:
        return batch(reading.matrices(array))
    return array.reshape(len(references), *array.shape[-2:])


SATURATED = [
    OptimizerCase(
        f"{algorithm}-{transport}-{metric}",
        algorithm,
        {"lr": lr, "metric": metric, "transport": transport},
    )
    for algorithm, lr in (("sgd", 20.0), ("adam", 30.0))
    for metric, transport in (
        ("canonical", "isometric"),
        ("canonical", "projected"),
        (0.3, "projected"),
        (-1.0, "isometric"),
    )
] + [
    OptimizerCase(
        f"sgd-nesterov-{transport}",
        "sgd",
        {"lr": 20.0, "nesterov": True, "metric": -1.0, "transport": transport},
    )
    for transport in ("isometric", "projected")
]


@pytest.mark.parametrize(
    ("case", "name"),
    in_turn([*SATURATED, SATURATED[0]], ["tall", "wide", "square", "batch-tall", "nearly-square"]),
    ids=lambda value: getattr(value, "name", value),
)
def test_saturated_steps_equal_the_textbook_step(
    case: OptimizerCase, name: str, rng: np.random.Generator
) -> None:
    """Long steps are chaotic, so the loop starts anew from the optimizer's state at every step."""
    run = Run(case, READINGS[name], rng)
    optimizer: Any = case.optimizer([run.param])
    for step in range(12):
        if step > 0:
            Z, U = optimizer.velocity(run.param)
            state = optimizer.state[run.param]
            for index, reference in enumerate(run.references):
                reference.X = run.points()[index]
                reference.Z = batch(Z.numpy())[index]
                if not run.is_square():
                    reference.U = batch(U.numpy())[index]
                if "exp_avg_sq_skew" in state:
                    second = moments(state["exp_avg_sq_skew"], run.reading, run.references)
                    reference.p = second[index]
                if "exp_avg_sq_normal" in state:
                    second = moments(state["exp_avg_sq_normal"], run.reading, run.references)
                    reference.q = second[index]
        run.set_grad(step)
        run.step_references(step)
        optimizer.step()
        run.compare(optimizer, tolerance=2e-12)


@pytest.mark.parametrize("case", READING_CASES, ids=lambda case: case.name)
def test_float32_stays_beside_the_float64_loop(
    case: OptimizerCase, rng: np.random.Generator
) -> None:
    run = Run(case, READINGS["heads-wide"], rng)
    run.param = run.reading.parameter(run.param.detach().numpy(), torch.float32)
    optimizer = case.optimizer([run.param])
    for step in range(STEPS):
        run.set_grad(step)
        run.step_references(step)
        optimizer.step()
    run.compare(optimizer, tolerance=2e-4)


# ---- plain parameters ---------------------------------------------------------------------------


SHAPES_OF_PLAIN = ((5, 3), (4,), (2, 3, 3, 3), ())


def build(rule: Any, torch_rule: Any, options: dict[str, Any], params: Any) -> Any:
    options = {"lr": 0.02, **options}
    row = OF_CLASS.get(rule)
    if torch_rule is torch.optim.AdamW and row and not row.decay_is_decoupled:
        options["decoupled_weight_decay"] = True
    return rule(params, **copy.deepcopy(options))


def plain_params(generator: torch.Generator) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES_OF_PLAIN
    ]


def set_plain_grads(
    ours: list[torch.nn.Parameter],
    theirs: list[torch.nn.Parameter],
    step: int,
    options: dict[str, Any],
    generator: torch.Generator,
) -> None:
    # torch's fused SGD fails by itself where a gradient arrives later than the others
    may_be_late = not options.get("fused")
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        late = may_be_late and index == 1 and step < 3
        grad = torch.randn(mine.shape, generator=generator)
        mine.grad = None if late else grad.clone()
        other.grad = None if late else grad.clone()


@pytest.mark.parametrize(("rule", "torch_rule", "options"), PLAIN)
def test_plain_parameters_get_bit_for_bit_what_torch_gives(
    rule: Any, torch_rule: Any, options: dict[str, Any], generator: torch.Generator
) -> None:
    ours = plain_params(generator)
    theirs = copy.deepcopy(ours)
    tagged = so.ManifoldParameter(torch.eye(4, 2))
    optimizer = build(rule, torch_rule, options, [tagged, *ours])
    torch_optimizer = build(torch_rule, torch_rule, options, theirs)
    for step in range(12):
        set_plain_grads(ours, theirs, step, options, generator)
        tagged.grad = torch.randn(4, 2, generator=generator)
        optimizer.step()
        torch_optimizer.step()
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
    for mine, other in zip(ours, theirs, strict=True):
        state, torch_state = optimizer.state[mine], torch_optimizer.state[other]
        assert set(state) == set(torch_state)
        for key, value in torch_state.items():
            same = torch.equal(state[key], value) if torch.is_tensor(value) else state[key] == value
            assert same, key


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"amsgrad": True}], ids=str)
def test_the_state_of_adam_has_torchs_dtypes_under_any_default(
    options: dict[str, Any], default: torch.dtype, generator: torch.Generator
) -> None:
    ours, rows = plain_params(generator)[0], so.Stiefel(rows=(0, 3))
    fused = so.ManifoldParameter(torch.randn(5, 3, generator=generator), rows)
    theirs = torch.nn.Parameter(ours.detach().clone())
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        opt, other = so.StiefelAdam([ours, fused], **options), torch.optim.Adam([theirs], **options)
        for parameter in (ours, fused, theirs):
            parameter.grad = torch.ones_like(parameter)
        opt.step()
        other.step()
    finally:
        torch.set_default_dtype(before)
    wanted = {key: value.dtype for key, value in other.state[theirs].items()}
    assert {key: value.dtype for key, value in opt.state[ours].items()} == wanted
    assert opt.state[fused]["rows.step"].dtype == wanted["step"]


@pytest.mark.parametrize(
    ("rule", "torch_rule", "options", "direction"),
    [
        (*case, direction)
        for case, direction in in_turn(PLAIN[::3], ["ours-to-torch", "torch-to-ours"])
    ],
)
def test_checkpoints_of_plain_parameters_exchange_with_torch(
    rule: Any, torch_rule: Any, options: dict[str, Any], direction: str, generator: torch.Generator
) -> None:
    first = plain_params(generator)
    extra = {"stiefel": False}
    ours = {"rule": rule, "options": {**options, **extra}}
    theirs = {"rule": torch_rule, "options": options}
    source, target = (ours, theirs) if direction == "ours-to-torch" else (theirs, ours)
    optimizer = build(source["rule"], torch_rule, source["options"], first)
    for step in range(5):
        set_plain_grads(first, first, step, options, generator)
        optimizer.step()
    second = copy.deepcopy(first)
    other = build(target["rule"], torch_rule, target["options"], second)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(5, 15):
        set_plain_grads(first, second, step, options, generator)
        optimizer.step()
        other.step()
    for mine, copied in zip(first, second, strict=True):
        assert torch.equal(mine, copied)


# ---- rows that a reading leaves plain ----------------------------------------------------------

BESIDE = {
    "one range": (so.Stiefel(rows=(2, 8), heads=2), [(0, 2), (8, 11)], 0),
    "two ranges": (so.Stiefel(rows=((6, 10), (0, 3))), [(3, 6), (10, 11)], 0),
    "columns": (so.Stiefel(rows=(0, 8), transposed=True), [(8, 11)], 1),
    "square, no rows of U": (so.Stiefel(rows=(0, 7)), [(7, 11)], 0),
}


@pytest.mark.parametrize(
    ("rule", "torch_rule", "options", "case"),
    [(*row, case) for row, case in mixed(20, PLAIN, BESIDE)],
)
def test_plain_rows_take_the_steps_of_torch(rule, torch_rule, options, case, generator):
    manifold, plain, dim = BESIDE[case]
    shape = (11, 7) if dim == 0 else (7, 11)
    fused = so.ManifoldParameter(torch.randn(shape, generator=generator), manifold)
    twin = torch.nn.Parameter(fused.detach().clone())
    parts = [torch.nn.Parameter(part.detach().clone()) for part in manifold.plain_parts(fused)]
    assert [part.size(dim) for part in parts] == [high - low for low, high in plain]
    opt = build(rule, torch_rule, options, [fused])
    torch_opt = build(torch_rule, torch_rule, options, parts)
    for step in range(9):
        grad = torch.randn(shape, generator=generator)
        if step == 3:  # a late or missing gradient counts no step
            fused.grad = None
            opt.step()
        fused.grad = grad
        for part, (low, high) in zip(parts, plain, strict=True):
            part.grad = grad.narrow(dim, low, high - low).clone()
        if step == 6:  # and a checkpoint in between changes nothing
            saved = copy.deepcopy(opt.state_dict())
            opt = build(rule, torch_rule, options, [fused])
            opt.load_state_dict(saved)
        opt.step()
        torch_opt.step()
        for part, (low, high) in zip(parts, plain, strict=True):
            assert torch.equal(fused.narrow(dim, low, high - low), part)
    assert so.orthonormality_error(fused) < 1e-5
    assert not torch.equal(fused, twin)
