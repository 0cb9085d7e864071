"""Dimensions that are rows and columns: each reading against a matrix permuted by hand."""

import copy
import dataclasses
import json
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import mixed
from dims_cases import ALIKE, LEGS, by_hand, layout_of, pair
from optimizers import RULES, TABLE
from torch import Tensor, nn
from training import train

import stiefel_opt as so

Stiefel = so.Stiefel


@pytest.mark.parametrize("name", LEGS)
@pytest.mark.parametrize("kind", ["contiguous", "reversed"])
def test_a_tensor_is_read_as_the_matrix_that_is_permuted_by_hand(name: str, kind: str) -> None:
    shape, options, pattern = LEGS[name]
    reading = Stiefel(**options)
    tensor = layout_of(torch.randn(shape), kind)
    expected = by_hand(tensor, pattern)
    n, m = expected.shape[-2:]
    tall = expected if n >= m else expected.mT
    reading.check(shape)
    found = reading.matrices(tensor)
    assert torch.equal(found, tall)
    assert (found.data_ptr() == tensor.data_ptr()) is (tall.data_ptr() == tensor.data_ptr())
    assert torch.equal(reading.stored(tall, tensor.shape), tensor)
    both = torch.stack([tensor, -tensor])
    read = reading.matrices(both, stacked=True)
    assert torch.equal(read, torch.stack([tall, -tall]))
    assert torch.equal(reading.stored(read, both.shape, stacked=True), both)
    assert reading.size(shape) == (n, m)
    assert reading.count(shape) == expected.shape[:-2].numel()
    in_memory = reading.stored(torch.stack([tall, tall]).contiguous()[0], tensor.shape)
    assert in_memory._is_view()  # the state of optimizers is a view on matrices


def test_a_tensor_that_is_stored_as_it_is_read_is_not_touched() -> None:
    for reading in (
        Stiefel(),
        Stiefel(flatten=True),
        Stiefel(row_dims=0),
        Stiefel(column_dims=-1),
        Stiefel(row_dims=-2, column_dims=1),
    ):
        tensor = torch.randn(5, 3)
        assert reading.matrices(tensor) is tensor


STEPS = mixed(
    60, LEGS, RULES, ["contiguous", "reversed"], [torch.float64, torch.complex64, torch.bfloat16]
)


@pytest.mark.parametrize(("name", "rule", "kind", "dtype"), STEPS)
def test_steps_have_the_bits_of_steps_of_the_matrix(
    name: str, rule: str, kind: str, dtype: torch.dtype
) -> None:
    stored, matrices, pattern = pair(name, kind, dtype)
    options = {"lr": 0.05, **TABLE[rule].options}
    optimizers = [TABLE[rule].optimizer([each], **options) for each in (stored, matrices)]
    for seed in range(4):
        torch.manual_seed(seed)
        stored.grad = layout_of(torch.randn(stored.shape, dtype=dtype), kind)
        matrices.grad = by_hand(stored.grad, pattern)
        for optimizer in optimizers:
            optimizer.step()
        if seed == 1:
            optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    assert torch.equal(by_hand(stored.detach(), pattern), matrices.detach())
    assert so.orthonormality_error(stored) == so.orthonormality_error(matrices)


@pytest.mark.parametrize("kind", ["contiguous", "reversed"])
@pytest.mark.parametrize("name", LEGS)
def test_several_equal_tensors_are_stepped_together(name: str, kind: str) -> None:
    """As many alone, up to the rounding of products of several matrices."""
    shape, options, _ = LEGS[name]
    starts = [so.random_point(*shape, manifold=Stiefel(**options)) for _ in range(3)]
    together, alone = (
        [
            so.ManifoldParameter(layout_of(start.clone(), kind), Stiefel(**options))
            for start in starts
        ]
        for _ in range(2)
    )
    optimizers = [so.StiefelAdam(together, lr=0.1)]
    optimizers += [so.StiefelAdam([each], lr=0.1) for each in alone]
    for _ in range(3):
        for one, other in zip(together, alone, strict=True):
            one.grad = torch.randn(shape)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other)
        assert not torch.equal(one, starts[0])


# ---- points ------------------------------------------------------------------------------------


Function = Callable[[Tensor, Tensor, Tensor, Stiefel | None], Tensor]

FUNCTIONS: dict[str, Function] = {
    "polar": lambda _x, _y, v, reading: so.polar(v, reading),
    "project_": lambda _x, _y, v, reading: so.project_(v.clone(), reading),
    "project_tangent": lambda x, _y, v, reading: so.project_tangent(x, v, reading),
    "retract": lambda x, _y, v, reading: so.retract(x, v, reading),
    "exp": lambda x, _y, v, reading: so.exp(x, v, reading),
    "log": lambda x, y, _v, reading: so.log(x, y, reading),
    "interpolate": lambda x, y, _v, reading: so.interpolate(x, y, 0.3, reading),
    "mean": lambda x, y, _v, reading: so.mean(torch.stack([x, y]), reading),
    "orthonormality_error": lambda _x, _y, v, reading: so.orthonormality_error(v, reading),
    "distance": lambda x, y, _v, reading: so.distance(x, y, reading),
}


@pytest.mark.parametrize(
    ("name", "function", "kind"), mixed(48, LEGS, FUNCTIONS, ["contiguous", "reversed"])
)
def test_functions_are_those_of_the_matrices(name: str, function: str, kind: str) -> None:
    shape, options, pattern = LEGS[name]
    reading, called = Stiefel(**options), FUNCTIONS[function]
    generator = torch.Generator().manual_seed(2)
    draw = {"manifold": reading, "generator": generator, "dtype": torch.float64}
    x = so.random_point(*shape, **draw)  # type: ignore[arg-type]
    assert so.orthonormality_error(by_hand(x, pattern)) < 1e-12
    v = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    y = so.retract(x, so.project_tangent(x, v, reading), reading)
    given = [layout_of(each, kind) for each in (x, y, v)]
    found = called(*given, reading)
    wanted = called(*(by_hand(each, pattern) for each in (x, y, v)), None)
    if found.shape == shape:
        found = by_hand(found, pattern)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_batch_in_front_broadcasts_where_dimensions_count_from_the_end() -> None:
    site = Stiefel(row_dims=(-3, -2), column_dims=-1)
    one, three = so.random_point(3, 2, 4, manifold=site), so.random_point(5, 3, 2, 4, manifold=site)
    found = so.distance(three, one, site)
    alone = [so.distance(each, one, Stiefel(row_dims=(0, 1))) for each in three]
    torch.testing.assert_close(found, torch.stack(alone))
    for reading, other in ((Stiefel(row_dims=(1, 2), column_dims=3), one), (site, one[0])):
        with pytest.raises(ValueError, match="`other` must be matrices as the point"):
            so.distance(three, other, reading)
    heads = Stiefel(row_dims=0, column_dims=2)
    many, single = (
        so.random_point(5, 3, 2, manifold=heads),
        so.random_point(5, 1, 2, manifold=heads),
    )
    assert so.distance(many, single, heads).shape == (3,)


def test_constrain_projects_and_initialisations_draw_the_matrix() -> None:
    for name, (shape, options, pattern) in LEGS.items():
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        nearest = so.polar(by_hand(module.weight.detach(), pattern))
        before = module.weight.detach().clone()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            so.constrain(module, **options)
        torch.testing.assert_close(by_hand(module.weight.detach(), pattern), nearest)
        tagged = so.ManifoldParameter(before, Stiefel(**options))
        assert torch.equal(tagged, module.weight), name
        so.orthogonal_(module.weight)
        assert so.orthonormality_error(by_hand(module.weight.detach(), pattern)) < 1e-12


def test_several_dimensions_of_a_square_matrix_have_a_determinant() -> None:
    shape = (2, 3, 3, 2)
    reading = Stiefel(row_dims=(0, 2), column_dims=(3, 1), determinant=1)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        drawn = so.random_point(*shape, manifold=reading, generator=generator)
        nearest = so.project_(torch.randn(shape, generator=generator), reading)
        for point in (drawn, nearest):
            assert torch.linalg.det(by_hand(point, "abcd -> (ac) (db)")) > 0
    with pytest.raises(ValueError, match="`determinant` must be None where matrices of `K` are"):
        Stiefel(row_dims=0, determinant=1).check((2, 2, 2), "K")


def test_a_learned_scale_is_one_number_for_each_matrix() -> None:
    shape, options, pattern = LEGS["batch at both ends"]
    reading = Stiefel(**options, learn_scale=True)
    parameter = so.ManifoldParameter(torch.randn(shape), reading)
    target = 3 * so.random_point(*shape, manifold=Stiefel(**options))
    optimizer = so.StiefelAdam([parameter], lr=0.1)
    train(optimizer, lambda: (parameter - target).square().sum(), 60)
    values = torch.linalg.svdvals(by_hand(parameter.detach(), pattern))
    assert values.min() > 1.2
    torch.testing.assert_close(values[..., 0], values[..., -1])


# ---- heads and rows ----------------------------------------------------------------------------


def test_heads_and_rows_count_along_the_one_dimension_of_rows() -> None:
    reading = Stiefel(rows=((0, 4), (4, 6)), heads=(2, 1), row_dims=1, column_dims=(0, 2))
    tensor = torch.randn(2, 7, 3)
    reading.check(tensor.shape)
    whole = by_hand(tensor, "abc -> b (ac)")
    first, second = reading.parts(tensor)
    assert torch.equal(reading.matrices(first, 0), whole[:4].unflatten(0, (2, 2)).mT)
    assert torch.equal(reading.matrices(second, 1), whole[4:6].mT)
    assert torch.equal(reading.plain_parts(tensor)[0], tensor[:, 6:])
    stored = reading.stored(reading.matrices(first, 0), first.shape, 0)
    assert torch.equal(stored, first)
    parameter = so.ManifoldParameter(tensor, reading)
    optimizer = so.StiefelSGD([parameter], lr=0.1, momentum=0.9)
    for _ in range(3):
        parameter.grad = torch.randn(2, 7, 3)
        optimizer.step()
    assert so.orthonormality_error(parameter) < 1e-5
    assert not torch.equal(parameter[:, 6:], tensor[:, 6:])


# ---- what cannot be ----------------------------------------------------------------------------


UNREADABLE: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((2, 3, 4), {"row_dims": 3}, r"`row_dims of K` must lie in \[-3, 2\], got 3; its shape is \("),
    ((2, 3, 4), {"column_dims": (0, -4)}, r"`column_dims of K` must lie in \[-3, 2\], got -4"),
    ((2, 3, 4), {"row_dims": (0, 0)}, r"`row_dims of K` must name each dimension once, got \(0, 0"),
    ((2, 3, 4), {"row_dims": (0, -3)}, "`row_dims of K` must name each dimension once"),
    (
        (2, 3, 4),
        {"row_dims": (0, 1), "column_dims": (-1, -2)},
        "`column_dims of K` must name each dimension once",
    ),
    ((2, 3), {"row_dims": (0, 1)}, r"`row_dims of K` must leave a dimension for columns, got \(0"),
    ((2, 3), {"column_dims": (1, 0)}, "`column_dims of K` must leave a dimension for rows"),
    (
        (2, 3, 4),
        {"row_dims": (0, 1), "heads": 2},
        r"`heads of K` must be None where several dimensions, \(0, 1\), count the rows, got 2",
    ),
    ((2, 3, 4), {"column_dims": 2, "rows": (0, 2)}, "`rows of K` must be None where several"),
    ((6, 3, 4), {"row_dims": 0, "heads": 4}, "`heads of K` must divide its 6 rows"),
    ((5,), {"row_dims": 0}, "`K` must have at least 2 dimensions"),
    ((), {"row_dims": 0}, "`K` must have at least 2 dimensions"),
    ((2, 0, 3), {"row_dims": 0}, "`K` must not be empty"),
]


@pytest.mark.parametrize(("shape", "options", "message"), UNREADABLE)
def test_tensors_that_cannot_be_read_so(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    module = nn.Module()
    module.K = nn.Parameter(torch.randn(shape))
    before = module.K.detach().clone()
    with pytest.raises(ValueError, match=message):
        so.constrain(module, "K", **options)
    assert torch.equal(module.K, before)
    with pytest.raises(
        ValueError, match=message.replace("of K", "of data").replace("`K`", "`data`")
    ):
        so.ManifoldParameter(torch.randn(shape), Stiefel(**options))


IMPOSSIBLE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"row_dims": ()}, ValueError, r"`row_dims` must name at least one dimension, got \(\)"),
    ({"column_dims": []}, ValueError, "`column_dims` must name at least one dimension"),
    ({"row_dims": 1.0}, TypeError, "`row_dims` must be a dimension or several of them, got 1.0"),
    ({"row_dims": True}, TypeError, "`row_dims` must be a dimension or several"),
    ({"column_dims": (0, "1")}, TypeError, "`column_dims` must be a dimension or several"),
    ({"flatten": True, "row_dims": 0}, ValueError, "`flatten` must be False with row_dims or col"),
    ({"transposed": True, "column_dims": 0}, ValueError, "`transposed` must be False with row_"),
]


@pytest.mark.parametrize(("options", "error", "message"), IMPOSSIBLE)
def test_readings_that_cannot_be(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Stiefel(**options)
    module = nn.Module()
    module.K = nn.Parameter(torch.randn(2, 3, 4))
    with pytest.raises(error, match=message):
        so.constrain(module, "K", **options)


# ---- as data, in groups and checkpoints --------------------------------------------------------


def test_readings_are_data_and_say_only_what_is_named() -> None:
    for _, options, _ in LEGS.values():
        reading = Stiefel(**options)
        data = json.loads(json.dumps(reading.as_dict()))
        assert set(options) == {"row_dims", "column_dims"} & set(data)
        assert Stiefel.from_dict(data) == reading == pickle.loads(pickle.dumps(reading))
        assert hash(Stiefel.from_dict(data)) == hash(reading)
    assert not {"row_dims", "column_dims"} & set(Stiefel(flatten=True).as_dict())
    assert Stiefel(row_dims=0) == Stiefel(row_dims=[0]) == Stiefel(row_dims=(0,))  # type: ignore[arg-type]


@pytest.mark.parametrize(("shape", "one", "other"), ALIKE)
def test_equal_readings_are_one_in_checkpoints_and_tied_weights(
    shape: tuple[int, ...], one: Stiefel, other: Stiefel
) -> None:
    def build(reading: Stiefel) -> tuple[Tensor, so.StiefelAdam]:
        torch.manual_seed(0)
        parameter = so.ManifoldParameter(torch.randn(shape), reading)
        optimizer = so.StiefelAdam([parameter], lr=0.1)
        return parameter, optimizer

    def step(parameter: Tensor, optimizer: so.StiefelAdam) -> None:
        torch.manual_seed(1)
        parameter.grad = torch.randn(shape)
        optimizer.step()

    runs = build(one), build(other)
    step(*runs[0])
    with torch.no_grad():
        runs[1][0].copy_(runs[0][0])
    runs[1][1].load_state_dict(copy.deepcopy(runs[0][1].state_dict()))
    for run in runs:
        step(*run)
    torch.testing.assert_close(*(parameter.detach() for parameter, _ in runs))
    model = nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    model.first.w = model.second.w = nn.Parameter(torch.randn(shape))
    so.constrain(model, "first.w", **dataclasses.asdict(one))
    so.constrain(
        model, "second.w", **dataclasses.asdict(other)
    )  # no other reading of the tied weight
    unlike = Stiefel(row_dims=(1, 0) if one != Stiefel() else (0, 1))
    with pytest.raises(ValueError, match="must be the saved one"):
        build(unlike)[1].load_state_dict(runs[0][1].state_dict())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch
@pytest.mark.parametrize("dynamic", [False, True])
def test_functions_are_traced_whole(dynamic: bool) -> None:
    reading = Stiefel(row_dims=(2, 0), column_dims=1)

    def moved(x: Tensor, v: Tensor) -> Tensor:
        return so.retract(so.polar(x, reading), so.project_tangent(x, v, reading), reading)

    compiled = torch.compile(moved, fullgraph=True, dynamic=dynamic, backend="eager")
    x, v = so.random_point(4, 2, 3, manifold=reading), torch.randn(4, 2, 3)
    torch.testing.assert_close(compiled(x, v), moved(x, v))


@pytest.mark.parametrize("rule", [so.StiefelAdam, so.StiefelSGD])
@pytest.mark.parametrize("count", [1, 2])
def test_a_large_tensor_is_stepped_in_pieces_and_written_whole(rule: Any, count: int) -> None:
    """Its matrices are a copy; each piece of a batch writes its own part of the tensor."""
    shape, pattern = (32, 8, 64, 16), "abcd -> d (ac) b"
    reading = Stiefel(row_dims=(0, 2), column_dims=1)
    starts = [so.random_point(*shape, manifold=reading) for _ in range(count)]
    stored = [so.ManifoldParameter(start, reading) for start in starts]
    matrices = [so.ManifoldParameter(by_hand(start, pattern)) for start in starts]
    optimizers = rule(stored, lr=0.01), rule(matrices, lr=0.01)
    for _ in range(2):
        for one, other in zip(stored, matrices, strict=True):
            one.grad = torch.randn(shape)
            other.grad = by_hand(one.grad, pattern)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(stored, matrices, strict=True):
        assert torch.equal(by_hand(one.detach(), pattern), other.detach())


def test_groups_carry_the_dimensions() -> None:
    model = nn.Module()
    model.K, model.b = nn.Parameter(torch.randn(3, 2, 2)), nn.Parameter(torch.randn(2))
    so.constrain(model, "K", row_dims=(0, 1))
    groups = pickle.loads(pickle.dumps(so.param_groups(model)))
    assert groups[1]["stiefel"]["row_dims"] == [0, 1]
    optimizer = so.StiefelSGD(groups, lr=0.1)
    copied = copy.deepcopy(optimizer)
    for each in (optimizer, copied):
        parameter = each.param_groups[1]["params"][0]
        parameter.grad = torch.ones(3, 2, 2)
        each.step()
        assert so.orthonormality_error(parameter, Stiefel(row_dims=(0, 1))) < 1e-6
    plain = nn.Parameter(torch.randn(3, 2, 2))
    so.StiefelSGD([plain], lr=0.1, stiefel=Stiefel(row_dims=(0, 1)))
    assert plain.manifold == Stiefel(row_dims=(0, 1))  # type: ignore[attr-defined]
    twin = copy.deepcopy(model)
    assert twin.K.manifold == model.K.manifold  # type: ignore[union-attr]


# ---- other optimizers --------------------------------------------------------------------------


# ---- what is said ------------------------------------------------------------------------------


def test_a_batch_that_nobody_asked_for_is_told_of_and_the_remedies_end_it() -> None:
    model = nn.Module()
    model.K = nn.Parameter(torch.randn(3, 4, 4))
    text = (
        r"`K` is read as 3 matrices of 4 x 4; if these legs are one matrix, pass row_dims=\(0, 1\)"
    )
    with pytest.warns(UserWarning, match=text):
        so.constrain(model, "K")
    note = "K: 3 matrices of 4 x 4; if these legs are one matrix, pass row_dims=(0, 1)"
    assert str(so.report(model)).endswith(note)
    for options in (
        {"flatten": False},
        {"flatten": True},
        {"row_dims": (0, 1)},
        {"row_dims": -2, "column_dims": -1},
    ):
        so.constrain(so.release(model, "K"), "K", **options)  # type: ignore[arg-type]
    assert so.report(model).notes == ()
    layer = so.constrain(nn.Bilinear(3, 4, 5))  # of a layer of torch it is known
    experts = nn.ParameterList([nn.Parameter(torch.randn(2, 3, 5)) for _ in range(4)])
    with pytest.warns(
        UserWarning, match="^`0` and 3 more are each read as 2 matrices of 3 x 5; if"
    ):
        so.constrain(experts, "*")
    assert str(so.report(experts)).splitlines()[-1].startswith("0 and 3 more: 2 matrices of 3 x 5")
    assert so.report(layer).notes == ()


def test_the_report_prints_the_dimensions() -> None:
    model = nn.Module()
    for name, (shape, options, _) in LEGS.items():
        model.register_parameter(name.replace(" ", "_"), nn.Parameter(torch.randn(shape)))
        so.constrain(model, name.replace(" ", "_"), **options)
    lines = so.report(model).lines
    words = {line.name: line.reading for line in lines}
    assert words["Kraus_operators"] == "1 x (8 x 2), columns, dimensions (0, 1) x (2,)"
    assert words["batch_at_both_ends"] == "4 x (6 x 2), columns, dimensions (3, 1) x (2,)"
    assert all(line.error is not None and line.error < 1e-5 for line in lines)


# ---- maps and velocities -----------------------------------------------------------------------


def test_a_convolution_whose_dimensions_are_named_is_no_kernel() -> None:
    options: dict[str, Any] = {"row_dims": (0, 2), "column_dims": (1, 3)}
    layer = so.constrain(nn.Conv2d(4, 8, 3, groups=2), **options)
    (line,) = so.report(layer).lines
    assert line.reading.startswith("1 x (24 x 6), columns, dimensions (0, 2) x (1, 3)")


@pytest.mark.parametrize("rule", [so.StiefelSGD, so.StiefelAdam])
def test_a_velocity_is_that_of_the_matrix_and_is_set(rule: Any) -> None:
    stored, matrices, pattern = pair("one matrix of heads", "contiguous", torch.float64)
    optimizers = [rule([each], lr=0.1) for each in (stored, matrices)]
    for seed in range(4):
        torch.manual_seed(seed)
        stored.grad = torch.randn(stored.shape, dtype=torch.float64)
        matrices.grad = by_hand(stored.grad, pattern)
        for optimizer in optimizers:
            optimizer.step()
        velocity, other = (
            o.velocity(p) for o, p in zip(optimizers, (stored, matrices), strict=True)
        )
        assert all(map(torch.equal, velocity, other))
        assert velocity[1].shape == matrices.shape
        for optimizer, each in zip(optimizers, (stored, matrices), strict=True):
            optimizer.set_velocity(each, *(2 * part for part in velocity))
    assert torch.equal(by_hand(stored.detach(), pattern), matrices.detach())
