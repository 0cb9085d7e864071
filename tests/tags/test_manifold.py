"""How tensors are read as matrices: against readings written out by hand, and back again."""

import copy
import json
import pickle
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from contract import through_file
from optimizers import BY_CLOSURE
from torch import nn
from training import closure_of

import stiefel_opt as so
from stiefel_opt.tags.manifold import manifold_of
from stiefel_opt.tags.parameter import tag

Stiefel = so.Stiefel

# shape, reading, the matrices written out by hand for a stored tensor x, one list for each range
READINGS = [
    ((6, 4), Stiefel(), lambda x: [[x]]),
    ((4, 6), Stiefel(), lambda x: [[x.T]]),
    ((4, 4), Stiefel(), lambda x: [[x]]),
    ((3, 5, 2), Stiefel(), lambda x: [[x[0], x[1], x[2]]]),
    ((6, 4), Stiefel(heads=3), lambda x: [[x[0:2].T, x[2:4].T, x[4:6].T]]),
    ((8, 3), Stiefel(heads=2), lambda x: [[x[0:4], x[4:8]]]),
    ((6, 4), Stiefel(rows=(2, 6)), lambda x: [[x[2:6]]]),
    (
        (9, 3),
        Stiefel(rows=((6, 9), (0, 4)), heads=(3, 2)),
        lambda x: [[x[6:7].T, x[7:8].T, x[8:9].T], [x[0:2].T, x[2:4].T]],
    ),
    ((2, 6, 4), Stiefel(rows=(0, 2)), lambda x: [[x[0, :2].T, x[1, :2].T]]),
    ((4, 6), Stiefel(transposed=True), lambda x: [[x.T]]),
    ((4, 6), Stiefel(heads=3, transposed=True), lambda x: [[x[:, :2], x[:, 2:4], x[:, 4:]]]),
    (
        (4, 9),
        Stiefel(rows=((0, 3), (3, 6)), transposed=True),
        lambda x: [[x[:, 0:3]], [x[:, 3:6]]],
    ),
    ((4, 2, 3, 3), Stiefel(flatten=True), lambda x: [[x.reshape(4, 18).T]]),
    ((40, 2, 3), Stiefel(flatten=True), lambda x: [[x.reshape(40, 6)]]),
    (
        (4, 2, 3, 1, 2),
        Stiefel(flatten=True, heads=2),
        lambda x: [[x[:2].reshape(2, 12).T, x[2:].reshape(2, 12).T]],
    ),
    ((4, 2, 3), Stiefel(flatten=True, rows=(1, 3)), lambda x: [[x[1:3].reshape(2, 6).T]]),
]
by_hand_cases = pytest.mark.parametrize(("shape", "reading", "by_hand"), READINGS)
cases = pytest.mark.parametrize(("shape", "reading"), [row[:2] for row in READINGS])


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


@by_hand_cases
def test_matrices_are_those_written_by_hand(shape, reading, by_hand):
    tensor = numbered(*shape)
    reading.check(shape)
    parts = reading.parts(tensor)
    expected = by_hand(tensor)
    assert len(parts) == len(expected)
    for index, (part, matrices) in enumerate(zip(parts, expected, strict=True)):
        found = reading.matrices(part, index)
        assert found.size(-2) >= found.size(-1)
        torch.testing.assert_close(
            found.reshape(-1, *found.shape[-2:]), torch.stack(matrices), rtol=0, atol=0
        )
    assert reading.count(shape) == sum(map(len, expected))


@cases
def test_stacks_read_like_single_ones_and_parts_are_views_of_every_entry_once(shape, reading):
    first, second = numbered(*shape), -numbered(*shape)
    pairs = zip(reading.parts(first), reading.parts(second), strict=True)
    for index, (one, two) in enumerate(pairs):
        alone = reading.matrices(one, index)
        assert torch.equal(reading.stored(alone, one.shape, index), one)
        stack = torch.stack([one, two])
        matrices = reading.matrices(stack, index, stacked=True)
        assert torch.equal(matrices[0], alone)
        assert torch.equal(matrices[1], reading.matrices(two, index))
        assert torch.equal(reading.stored(matrices, stack.shape, index, stacked=True), stack)
    tensor = torch.zeros(shape)
    for index, part in enumerate(reading.parts(tensor)):
        matrices = reading.matrices(part, index)
        assert matrices.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    for part in (*reading.parts(tensor), *reading.plain_parts(tensor)):
        part += 1.0
    assert torch.equal(tensor, torch.ones(shape))


def test_channels_last_is_read_alike():
    tensor = numbered(4, 2, 3, 3)
    nhwc = tensor.to(memory_format=torch.channels_last)
    reading = Stiefel(flatten=True, heads=2)
    assert torch.equal(reading.matrices(nhwc), reading.matrices(tensor))
    nhwc.copy_(reading.stored(reading.matrices(nhwc) + 1.0, nhwc.shape))
    assert torch.equal(nhwc, tensor + 1.0)
    assert nhwc.is_contiguous(memory_format=torch.channels_last)


def test_readings_survive_json_pickle_and_hashing():
    for _, reading, _ in READINGS:
        plain = json.loads(json.dumps(reading.as_dict()))
        assert plain == reading.as_dict()
        assert Stiefel.from_dict(plain) == reading
        assert hash(Stiefel.from_dict(plain)) == hash(reading)
        assert pickle.loads(pickle.dumps(reading)) == reading
        assert through_file(reading.as_dict()) == plain


def test_data_holds_what_differs_from_the_default_and_older_data_holds_all():
    for _, reading, _ in READINGS:
        default, data = Stiefel(), reading.as_dict()
        everything = {field.name: getattr(reading, field.name) for field in fields(Stiefel)}
        assert set(data) == {key for key in everything if everything[key] != getattr(default, key)}
        assert Stiefel.from_dict(everything) == reading == Stiefel(**data)
        assert eval(repr(reading)) == reading
        assert repr(reading).count("=") == len(data)
    assert Stiefel().as_dict() == {}


@pytest.mark.parametrize("kind", BY_CLOSURE)
def test_the_default_reading_as_data_is_a_constraint_and_so_is_that_of_older_checkpoints(kind):
    layer = so.constrain(nn.Linear(6, 4))
    optimizer = BY_CLOSURE[kind](so.param_groups(nn.ModuleList([layer]))[1:])
    optimizer.step(closure_of(optimizer, lambda: layer(torch.ones(2, 6)).square().sum()))
    group = optimizer.param_groups[0]
    assert group["stiefel"] == {}
    assert so.orthonormality_error(layer) < 1e-5
    saved = copy.deepcopy(optimizer.state_dict())
    holder = saved["state"][0] if "readings" in saved["state"][0] else saved["param_groups"][0]
    assert holder["readings"] == [{}]
    older = {"heads": None, "rows": None, "flatten": False, "transposed": False}
    holder["readings"] = [older | {"scale": 1.0, "learn_scale": False}]
    optimizer.load_state_dict(saved)
    holder["readings"] = [older | {"scale": 2.0, "learn_scale": False}]
    with pytest.raises(ValueError, match="must be the saved one"):
        optimizer.load_state_dict(saved)


def test_equal_readings_are_equal_however_they_are_written():
    assert Stiefel(rows=[(4, 8), [0, 4]]) == Stiefel(rows=((4, 8), (0, 4)))
    assert Stiefel(rows=(0, 4)) == Stiefel(rows=[[0, 4]]) == Stiefel(rows=((0, 4),), scale=1)
    assert Stiefel(rows=((0, 4), (4, 8)), heads=2) == Stiefel(rows=((0, 4), (4, 8)), heads=(2, 2))
    assert Stiefel(heads=2) != Stiefel(heads=2, scale=2.0)
    assert Stiefel(heads=1) == Stiefel()
    assert Stiefel(rows=((0, 4), (4, 8)), heads=(1, 1)) == Stiefel(rows=((0, 4), (4, 8)))


WORDS = [
    ((384, 384), Stiefel(heads=12), "12 x (32 x 384), rows"),
    ((384, 32), Stiefel(), "1 x (384 x 32), columns"),
    ((5, 8, 8), Stiefel(scale=0.5), "5 x (8 x 8), square, scale 0.5"),
    ((64, 3, 3, 3), Stiefel(flatten=True), "1 x (64 x 27), columns"),
    (
        (12, 4),
        Stiefel(rows=((0, 8), (8, 12)), heads=(4, 2)),
        "4 x (2 x 4), rows of 0:8; 2 x (2 x 4), rows of 8:12",
    ),
]


def test_readings_in_words():
    for shape, reading, words in WORDS:
        assert reading.describe(shape) == words


IMPOSSIBLE = [
    ({"heads": 0}, ValueError, "`heads` must be at least 1, got 0"),
    ({"heads": 2.0}, TypeError, "`heads` must be an integer"),
    ({"heads": True}, TypeError, "`heads` must be an integer"),
    ({"heads": np.int64(2)}, TypeError, "`heads` must be an integer"),
    ({"heads": (2, 3)}, ValueError, "`heads` must have one number for each of the 1 ranges"),
    ({"heads": (2,), "rows": ((0, 2), (2, 4))}, ValueError, "each of the 2 ranges"),
    ({"rows": (0, 4, 8)}, TypeError, r"`rows` must be \(start, stop\) or several of them"),
    ({"rows": 4}, TypeError, r"`rows` must be \(start, stop\)"),
    ({"rows": ()}, TypeError, r"`rows` must be \(start, stop\)"),
    ({"rows": [(0, 2), 4]}, TypeError, r"`rows` must be \(start, stop\)"),
    ({"rows": (0.0, 4.0)}, TypeError, r"`rows` must be \(start, stop\)"),
    ({"rows": (4, 4)}, ValueError, r"`rows` must satisfy 0 <= start < stop, got \(4, 4\)"),
    ({"rows": (-4, 2)}, ValueError, "`rows` must satisfy 0 <= start < stop"),
    ({"rows": ((4, 8), (0, 5))}, ValueError, "`rows` must not overlap"),
    ({"flatten": 1}, TypeError, "`flatten` must be True or False, got 1"),
    ({"transposed": None}, TypeError, "`transposed` must be True or False"),
    ({"flatten": True, "transposed": True}, ValueError, "`transposed` must be False with"),
    ({"scale": 0.0}, ValueError, "`scale` must be positive and finite, got 0.0"),
    ({"scale": -1}, ValueError, "`scale` must be positive"),
    ({"scale": float("inf")}, ValueError, "`scale` must be positive and finite"),
    ({"scale": float("nan")}, ValueError, "`scale` must be positive and finite"),
    ({"scale": "1"}, TypeError, "`scale` must be a positive number, got '1'"),
]


def test_readings_that_cannot_be():
    for arguments, error, message in IMPOSSIBLE:
        with pytest.raises(error, match=message):
            Stiefel(**arguments)


@pytest.mark.parametrize(
    ("shape", "reading", "message"),
    [
        ((4,), Stiefel(), r"`q.weight` must have at least 2 dimensions .* shape \(4,\); leave"),
        ((), Stiefel(), "`q.weight` must have at least 2 dimensions"),
        ((4, 0), Stiefel(), r"`q.weight` must not be empty, got shape \(4, 0\); leave it untagged"),
        ((0, 4, 4), Stiefel(), "`q.weight` must not be empty"),
        (
            (6, 4),
            Stiefel(heads=4),
            r"`heads of q.weight` must divide its 6 rows, got 4; .*\(6, 4\)",
        ),
        ((6, 4), Stiefel(heads=2, rows=(0, 3)), "`heads of q.weight` must divide its 3 rows"),
        ((6, 4), Stiefel(rows=(2, 7)), r"`rows of q.weight` must lie in \[0, 6\], got \(2, 7\)"),
        ((6, 4), Stiefel(rows=(0, 5), transposed=True), r"must lie in \[0, 4\]"),
        ((6, 4), Stiefel(heads=3, transposed=True), "must divide its 4 rows"),
    ],
)
def test_tensors_that_cannot_be_read_so(shape, reading, message):
    with pytest.raises(ValueError, match=message):
        reading.check(shape, "q.weight")
    with pytest.raises(ValueError, match=message.replace("q.weight", "data")):
        so.ManifoldParameter(torch.zeros(shape), reading)


# ---- ManifoldParameter -------------------------------------------------------------------------


def test_manifold_parameter_is_a_parameter_with_a_tag():
    data = torch.cat([torch.eye(4)[:3], torch.eye(4)[1:]])
    parameter = so.ManifoldParameter(data, Stiefel(heads=2), requires_grad=False)
    assert isinstance(parameter, nn.Parameter)
    assert parameter.manifold == Stiefel(heads=2)
    assert not parameter.requires_grad
    assert parameter.data_ptr() == data.data_ptr()
    assert so.ManifoldParameter(data).manifold == Stiefel()
    assert so.ManifoldParameter(data).requires_grad
    assert so.ManifoldParameter(parameter).data_ptr() == data.data_ptr()
    assert so.ManifoldParameter(nn.Parameter(data)).is_leaf
    text = repr(parameter)
    assert text.count("arameter") == 1
    assert "heads=2" in text
    assert "tensor([[" in text
    assert "requires_grad=True" in repr(so.ManifoldParameter(data))
    assert type(parameter.detach()) is torch.Tensor
    assert type(parameter * 2) is torch.Tensor
    module = nn.Module()
    module.q = parameter
    assert dict(module.named_parameters()) == {"q": parameter}
    assert type(module.state_dict()["q"]) is torch.Tensor


WRONG = [
    ([[1.0]], None, "`data` must be a tensor, got list"),
    (torch.ones(2, 2, dtype=torch.int64), None, "`data` must have a floating-point dtype"),
    (torch.ones(2, 2), {"heads": 2}, "`manifold` must be None or a Stiefel, got {'heads': 2}"),
]


def test_manifold_parameter_refuses():
    for data, manifold, message in WRONG:
        with pytest.raises(TypeError, match=message):
            so.ManifoldParameter(data, manifold)


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.copy,
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
        through_file,
        partial(through_file, weights_only=False),
    ],
)
def test_duplicates_of_a_parameter_keep_the_tag(duplicate):
    for requires_grad in (True, False):
        parameter = so.ManifoldParameter(numbered(6, 4), Stiefel(heads=3), requires_grad)
        parameter.note = "kept by pickle, as torch does"
        twin = duplicate(parameter)
        assert isinstance(twin, so.ManifoldParameter)
        assert twin.manifold == parameter.manifold
        assert twin.requires_grad == requires_grad
        assert twin.is_leaf
        assert torch.equal(twin, parameter)
        shares = twin.data_ptr() == parameter.data_ptr()
        assert shares == (duplicate is copy.copy)
        if duplicate is not copy.deepcopy:
            assert twin.note == parameter.note


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_of_a_parameter_keeps_its_tag_and_its_memory(requires_grad):
    weight = so.ManifoldParameter(numbered(6, 4), Stiefel(heads=3))
    twin = nn.Parameter(weight, requires_grad)
    assert isinstance(twin, so.ManifoldParameter)
    assert twin is not weight
    assert twin.manifold == Stiefel(heads=3)
    assert twin.requires_grad == requires_grad
    assert twin.is_leaf
    assert twin.data_ptr() == weight.data_ptr()
    assert type(twin.detach()) is type(weight.detach()) is torch.Tensor
    assert copy.deepcopy(twin).manifold == through_file(twin).manifold == Stiefel(heads=3)
    assert so.ManifoldParameter(weight).manifold == Stiefel(heads=3)
    assert so.ManifoldParameter(weight, Stiefel()).manifold == Stiefel()


def test_detaching_in_a_compiled_function_is_one_graph():
    weight = so.ManifoldParameter(torch.eye(4))
    compiled = torch.compile(lambda p: 2 * p.detach(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(weight), 2 * torch.eye(4))


@pytest.mark.parametrize("kind", ["named_parameters", "state_dict"])
def test_parameters_with_their_tags_load_as_weights_only(kind):
    layer = so.constrain(nn.Linear(4, 4), heads=2)
    saved = dict(layer.named_parameters())
    saved = saved if kind == "named_parameters" else layer.state_dict(keep_vars=True)
    loaded = through_file(saved)
    assert loaded["weight"].manifold == Stiefel(heads=2)
    assert torch.equal(loaded["weight"], layer.weight)
    other = so.constrain(nn.Linear(4, 4), heads=2)
    for assign in (False, True):
        other.load_state_dict(loaded, assign=assign)
        assert torch.equal(other.weight, layer.weight)
        assert other.weight.manifold == Stiefel(heads=2)


def test_deepcopy_keeps_ties_and_strides():
    weight = so.ManifoldParameter(torch.randn(4, 2, 3, 3).to(memory_format=torch.channels_last))
    first, second = copy.deepcopy([weight, weight])
    assert first is second
    assert first.stride() == weight.stride()


def test_tag_keeps_the_object():
    parameter = nn.Parameter(numbered(4, 2))
    same = parameter
    assert manifold_of(parameter) is None
    assert manifold_of(None) is None
    tag(parameter, Stiefel())
    assert isinstance(same, so.ManifoldParameter)
    assert manifold_of(same) == Stiefel()
    tag(parameter, Stiefel(heads=2))
    assert manifold_of(same) == Stiefel(heads=2)


def test_tag_works_on_parameters_of_other_types():
    class TheirParameter(nn.Parameter):
        pass

    class TheirTensor(torch.Tensor):
        pass

    for parameter in (
        TheirParameter(numbered(4, 2)),
        nn.Parameter(numbered(4, 2).as_subclass(TheirTensor)),
    ):
        kind = type(parameter)
        tag(parameter, Stiefel())
        assert type(parameter) is kind
        assert manifold_of(parameter) == Stiefel()
