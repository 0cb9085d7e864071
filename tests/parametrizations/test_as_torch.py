"""`compat.orthogonal` and `so.orthogonal_` stand where torch's functions of that name stood."""

import copy
import warnings
from typing import Any

import pytest
import torch
from cases import pairwise
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from training import train

import stiefel_opt as so
from stiefel_opt import compat

SHAPES = [(6, 6), (8, 3), (2, 3, 5), (1, 1)]
MAPS = [None, "matrix_exp", "cayley", "householder"]
CASES = [
    *pairwise(SHAPES, [torch.float32], MAPS, [True, False]),
    *pairwise(SHAPES, [torch.complex128], MAPS[:-1], [True, False]),
]


def module(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, sign: int = 1) -> nn.Module:
    found = nn.Module()
    found.weight = nn.Parameter(sign * so.random_point(*shape, dtype=dtype))
    return found


def fit(found: nn.Module, rule: Any, target: Tensor, steps: int) -> list[float]:
    return train(rule, lambda: (found.weight - target).abs().square().sum(), steps)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = 2e-5 if expected.real.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("shape", "dtype", "name", "trivialization"), CASES)
def test_a_checkpoint_of_torch_loads_and_training_goes_on(
    shape: tuple[int, ...], dtype: torch.dtype, name: str | None, trivialization: bool
) -> None:
    torch.manual_seed(0)
    options = {"orthogonal_map": name, "use_trivialization": trivialization}
    theirs = parametrizations.orthogonal(module(shape, dtype), **options)
    target = so.random_point(*shape, dtype=dtype)
    fit(theirs, torch.optim.SGD(theirs.parameters(), 0.05), target, 5)
    saved = copy.deepcopy(theirs.state_dict())
    for sign in (1, -1):
        plain = module(shape, dtype, sign)
        before = plain.weight.detach().clone()
        ours = compat.orthogonal(plain, **options)
        close(ours.weight, before)
        ours.load_state_dict(saved)
        close(ours.weight, theirs.weight)
        again = compat.orthogonal(module(shape, dtype, -sign), **options)
        again.load_state_dict(ours.state_dict(), assign=True)
        assert torch.equal(again.weight, ours.weight)
    assert all(torch.equal(value, saved[key]) for key, value in theirs.state_dict().items())
    losses = fit(ours, torch.optim.Adam(ours.parameters(), 0.02), target, 10)
    assert losses[-1] <= max(losses[0], 1e-4)
    assert so.orthonormality_error(ours) < 1e-5


@pytest.mark.parametrize("shape", [(32, 32), (48, 8)])
def test_the_learning_rate_of_torch_serves(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start = module(shape)
    near = start.weight.detach() + torch.randn(shape) / shape[0]
    target = so.project_(near)  # with the determinant of the start
    for function in (parametrizations.orthogonal, compat.orthogonal):
        found = function(copy.deepcopy(start))
        losses = fit(found, torch.optim.Adam(found.parameters(), 0.01), target, 100)
        assert losses[-1] < 0.01 * losses[0]


def test_small_where_torch_is_large() -> None:
    tall = module((300, 4))
    saved = compat.orthogonal(tall).state_dict()
    assert sum(value.numel() for value in saved.values()) <= 2 * 300 * 4
    assert next(iter(tall.state_dict())) == "parametrizations.weight.original"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MAPS)
def test_half_precision(dtype: torch.dtype, name: str | None) -> None:
    found = compat.orthogonal(nn.Linear(4, 12).to(dtype), orthogonal_map=name)
    assert found.weight.dtype == dtype
    assert so.orthonormality_error(found) <= 4 * torch.finfo(dtype).eps


def test_buffers_copies_convolutions_and_second_parametrizations() -> None:
    found = nn.Module()
    found.register_buffer("weight", so.random_point(6, 3))
    compat.orthogonal(found)
    copied = copy.deepcopy(found)
    copied.load_state_dict(found.state_dict())
    theirs = parametrizations.orthogonal(module((6, 3)))
    copied.load_state_dict(theirs.state_dict())
    close(copied.weight, theirs.weight)
    kernel = compat.orthogonal(nn.Conv2d(2, 4, 3)).weight
    torch.testing.assert_close(kernel.mT @ kernel, torch.eye(3).expand(4, 2, 3, 3))
    twice = parametrizations.weight_norm(nn.Linear(3, 6))
    compat.orthogonal(twice)
    assert so.orthonormality_error(twice) < 1e-5
    twice.load_state_dict(twice.state_dict())


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"name": "wait"}, ValueError, "`name` must be a parameter or buffer of this Linear"),
    ({"name": "bias"}, ValueError, r"`bias` must be a matrix .* got shape \(6,\)"),
    ({"name": 3}, ValueError, "`name` must"),
    ({"orthogonal_map": "expm"}, ValueError, "`orthogonal_map` must be one of"),
    ({"use_trivialization": 1}, TypeError, "`use_trivialization` must be True or False"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD)
def test_bad_input_raises_and_changes_nothing(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    layer = nn.Linear(3, 6)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=message):
        compat.orthogonal(layer, **options)
    assert not parametrize.is_parametrized(layer)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_what_torch_refuses_and_what_is_constrained_is_refused() -> None:
    with pytest.raises(ValueError, match="support complex weights"):
        compat.orthogonal(module((4, 2), torch.complex64), orthogonal_map="householder")
    with pytest.raises(ValueError, match=r"`weight` must not be tagged.*so\.release"):
        compat.orthogonal(so.constrain(nn.Linear(3, 6)))
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        compat.orthogonal(torch.eye(3))  # type: ignore[type-var]


@pytest.mark.parametrize("size", [(16, 16), (8, 16), (16, 8)])
@pytest.mark.parametrize(
    ("saved", "loaded"), [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_checkpoints_in_less_precision_are_loaded(
    size: tuple[int, int], saved: torch.dtype, loaded: torch.dtype
) -> None:
    theirs = parametrizations.orthogonal(nn.Linear(*size))
    state = {key: value.to(saved) for key, value in theirs.state_dict().items()}
    ours = compat.orthogonal(nn.Linear(*size)).to(loaded)
    ours.load_state_dict(state)
    error = 4 * torch.finfo(saved).eps
    torch.testing.assert_close(ours.weight, theirs.weight.to(loaded), rtol=0, atol=error)
    assert so.orthonormality_error(ours) < 100 * torch.finfo(loaded).eps


def test_checkpoints_that_cannot_be_loaded_say_so() -> None:
    theirs = parametrizations.orthogonal(nn.Linear(3, 6))
    saved = theirs.state_dict()
    found = compat.orthogonal(nn.Linear(3, 6))
    before = found.weight.detach().clone()
    ended_at_zero = {**saved, "parametrizations.weight.original": torch.zeros(6, 3)}
    with pytest.raises(RuntimeError, match="of torch's parametrization: `weight` must be orthon"):
        found.load_state_dict(ended_at_zero)
    assert torch.equal(found.weight, before)
    with pytest.raises(RuntimeError, match="size mismatch"):
        compat.orthogonal(nn.Linear(3, 5)).load_state_dict(saved)


@pytest.mark.parametrize("name", ["householder", "matrix_exp", "cayley", None])
@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4), (2, 5, 3)])
@pytest.mark.parametrize("source", ["torch", "torch, without base", "own"])
def test_checkpoints_are_assigned_to_the_meta_device(
    source: str, shape: tuple[int, ...], name: str | None
) -> None:
    torch.manual_seed(0)
    saved = module(shape)
    if source == "own":
        compat.orthogonal(saved, orthogonal_map=name)
    else:
        has_base = source == "torch"
        parametrizations.orthogonal(saved, orthogonal_map=name, use_trivialization=has_base)
    ours = compat.orthogonal(module(shape), orthogonal_map=name).to("meta")
    state = saved.state_dict()
    ours.load_state_dict(state, assign=True)
    close(ours.weight, saved.weight)
    assert not any(value.is_meta for value in ours.state_dict().values())
    ours.weight.square().sum().backward()
    later = compat.orthogonal(module(shape), orthogonal_map=name)
    later.load_state_dict(ours.state_dict())
    close(later.weight, saved.weight)


# ---- so.orthogonal_ ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 4), (6, 3, 2, 2), (2, 7, 3), (0, 3)])
@pytest.mark.parametrize("gain", [1, 2.5])
def test_the_numbers_are_those_of_torch(
    dtype: torch.dtype, shape: tuple[int, ...], gain: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about an empty tensor, of some versions
        theirs = nn.init.orthogonal_(
            torch.empty(shape, dtype=dtype), gain, torch.Generator().manual_seed(1)
        )
    ours = torch.empty(shape, dtype=dtype)
    assert so.orthogonal_(ours, gain, torch.Generator().manual_seed(1)) is ours
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128]
)
def test_what_torch_cannot_fill(dtype: torch.dtype) -> None:
    heads = so.orthogonal_(torch.empty(12, 5, dtype=dtype), heads=3)
    reading = so.Stiefel(heads=3)
    assert so.orthonormality_error(heads, reading) < 4 * torch.finfo(dtype).eps + 1e-6
    assert so.orthonormality_error(so.orthogonal_(torch.empty(8, 12, dtype=dtype).mT)) < 1e-2


def test_a_tag_is_the_reading_and_plain_rows_stay() -> None:
    layer = so.constrain(nn.Linear(8, 12), rows=(0, 6), scale=3.0)
    before = layer.weight.detach().clone()
    so.orthogonal_(layer.weight)
    assert so.orthonormality_error(layer) < 1e-6
    assert torch.equal(layer.weight[6:], before[6:])
    assert not torch.equal(layer.weight[:6], before[:6])
    batch = so.orthogonal_(torch.empty(3, 5, 2), manifold=so.Stiefel())
    assert so.orthonormality_error(batch) < 1e-6


def test_tensors_that_cannot_be_filled_are_refused() -> None:
    layer = so.constrain(nn.Linear(4, 4))
    for call, error, message in (
        (lambda: so.orthogonal_(torch.empty(3)), ValueError, "at least 2 dimensions"),
        (lambda: so.orthogonal_([[1.0]]), TypeError, "`tensor` must be a tensor"),
        (lambda: so.orthogonal_(torch.ones(3, 3, dtype=torch.int64)), TypeError, "floating"),
        (lambda: so.orthogonal_(torch.empty(5, 3), heads=2), ValueError, "heads of tensor"),
        (lambda: so.orthogonal_(layer.weight, 2.0), ValueError, "`gain` must be 1"),
        (lambda: so.orthogonal_(layer.weight, heads=2), ValueError, "`heads` must be None"),
    ):
        with pytest.raises(error, match=message):
            call()
