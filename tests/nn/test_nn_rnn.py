"""The orthogonal RNN: torch's module with any transition, and the laws of an orthogonal one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cases import in_turn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from training import train

import stiefel_opt as so
from stiefel_opt.nn import OrthogonalRNN
from stiefel_opt.nn.recurrence import NONLINEARITIES, rollout

INPUT, HIDDEN, STEPS, BATCH = 3, 6, 7, 4

TRANSITIONS: dict[str, dict[str, Any]] = {
    "tagged": {"transition": "tagged"},
    "tagged-henaff": {"transition": "tagged", "start": "henaff"},
    "cwy": {"transition": "cwy"},
    "cwy-short": {"transition": "cwy", "reflections": 2},
    "householder": {"transition": "householder", "start": "helfrich"},
    "tcwy": {"transition": "tcwy"},
    "matrix_exp": {"transition": "matrix_exp", "start": "henaff"},
    "cayley": {"transition": "cayley", "start": "helfrich"},
    "trivialization": {"transition": "trivialization"},
}
some_transitions = pytest.mark.parametrize(
    "options",
    [TRANSITIONS[name] for name in ("tagged", "cwy-short", "matrix_exp", "trivialization")],
)


CONVENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"nonlinearity": "relu", "bias": False},
    "batch-first": {"batch_first": True},
    "layers": {"num_layers": 3},
    "both-ways": {"num_layers": 2, "bidirectional": True, "batch_first": True},
}
every_convention = pytest.mark.parametrize("options", CONVENTIONS.values())


def twins(**options: Any) -> tuple[OrthogonalRNN, nn.RNN]:
    """A network without constraint and torch's with the same weights."""
    theirs = nn.RNN(INPUT, HIDDEN, **options).double()
    ours = OrthogonalRNN(INPUT, HIDDEN, transition=None, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def start(module: nn.RNN, generator: torch.Generator, *batch: int) -> Tensor:
    count = module.num_layers * (2 if module.bidirectional else 1)
    return torch.randn(count, *batch, HIDDEN, generator=generator, dtype=torch.float64)


def assert_same_training(ours: nn.Module, theirs: nn.Module, ours_out: Any, theirs_out: Any):
    """Same results, and same gradients of a loss of both of them."""
    torch.testing.assert_close(ours_out, theirs_out, rtol=0, atol=1e-12)
    for out in (ours_out, theirs_out):
        sum(
            (part * torch.arange(part.numel()).view_as(part).cos()).sum() for part in out
        ).backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, named[name].grad, rtol=0, atol=1e-12)


# ---- the conventions of nn.RNN -----------------------------------------------------------------


@pytest.mark.parametrize(("options", "given"), in_turn([*CONVENTIONS.values(), {}], [True, False]))
def test_results_and_gradients_are_those_of_torch(options, given, generator):
    ours, theirs = twins(**options)
    shape = (BATCH, STEPS) if options.get("batch_first") else (STEPS, BATCH)
    inputs = torch.randn(*shape, INPUT, generator=generator, dtype=torch.float64)
    hx = start(theirs, generator, BATCH) if given else None
    assert_same_training(ours, theirs, ours(inputs, hx), theirs(inputs, hx))


@every_convention
def test_without_batch_as_torch(options, generator):
    ours, theirs = twins(**options)
    inputs = torch.randn(STEPS, INPUT, generator=generator, dtype=torch.float64)
    hx = start(theirs, generator)
    assert_same_training(ours, theirs, ours(inputs, hx), theirs(inputs, hx))
    torch.testing.assert_close(ours(inputs), theirs(inputs))


@pytest.mark.parametrize(
    ("options", "enforce_sorted", "given"),
    in_turn([*CONVENTIONS.values(), {}], [True, False], [True, True, False]),
)
def test_packed_sequences_as_torch(options, enforce_sorted, given, generator):
    ours, theirs = twins(**options)
    lengths = (7, 5, 5, 1) if enforce_sorted else (2, 7, 1, 4)
    sequences = [torch.randn(n, INPUT, generator=generator, dtype=torch.float64) for n in lengths]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    hx = start(theirs, generator, len(lengths)) if given else None
    found, expected = ours(packed, hx), theirs(packed, hx)
    assert type(found[0]) is type(expected[0])
    for mine, yours in zip(found[0][1:], expected[0][1:], strict=True):
        assert (mine is None and yours is None) or torch.equal(mine, yours)
    assert_same_training(ours, theirs, (found[0].data, found[1]), (expected[0].data, expected[1]))


def test_packed_sequences_in_a_compiled_module(generator):
    module = so.nn.OrthogonalRNN(INPUT, HIDDEN)
    packed = pack_sequence([torch.randn(n, INPUT, generator=generator) for n in (5, 3, 2)])
    torch._dynamo.reset()
    found, expected = torch.compile(module, backend="eager")(packed), module(packed)
    torch.testing.assert_close(found[0].data, expected[0].data)
    torch.testing.assert_close(found[1], expected[1])


def test_packed_sequences_under_another_default_device(generator):
    ours, _ = twins(bidirectional=True)
    sequences = [torch.randn(n, INPUT, generator=generator, dtype=torch.float64) for n in (4, 2)]
    packed = pack_sequence(sequences)
    expected, _ = ours(packed)
    with torch.device("meta"):
        found, _ = ours(packed)
    assert torch.equal(found.data, expected.data)


def test_dropout_between_layers_only_in_training(generator):
    ours, theirs = twins(num_layers=2, dropout=0.5)
    inputs = torch.randn(STEPS, BATCH, INPUT, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(ours.eval()(inputs), theirs.eval()(inputs))
    ours.train()
    first, second = ours(inputs), ours(inputs)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1][0], second[1][0])  # the first layer comes before the dropout
    always, _ = twins(num_layers=2, dropout=1.0)
    expected = copy.deepcopy(always)
    expected.weight_ih_l1.data.zero_()
    torch.testing.assert_close(always(inputs), expected.eval()(inputs))
    with pytest.warns(UserWarning, match="dropout acts between layers"):
        OrthogonalRNN(INPUT, HIDDEN, dropout=0.5, transition=None)


def test_parameters_are_called_and_start_as_in_torch():
    options = {"num_layers": 2, "bidirectional": True}
    ours = OrthogonalRNN(INPUT, HIDDEN, transition="tagged", **options)
    theirs = nn.RNN(INPUT, HIDDEN, **options)
    shapes = {name: p.shape for name, p in ours.named_parameters()}
    assert shapes == {name: p.shape for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert "weight_hh" in name or parameter.abs().max().item() <= HIDDEN**-0.5 * (1 + 1e-6)


# ---- the loop ----------------------------------------------------------------------------------


def plain(inputs, hidden, left, right, nonlinearity, threshold):
    """The definition, step by step."""
    function = {
        "tanh": torch.tanh,
        "relu": torch.relu,
        "abs": torch.abs,
        "modrelu": lambda z: z.sgn() * (z.abs() + threshold).relu(),
    }[nonlinearity]
    outputs = []
    for entering in inputs:
        turn = left if right is None else torch.eye(len(left)) - right.mT @ left.mT
        hidden = function(entering + hidden @ turn.mT)
        outputs.append(hidden)
    return torch.stack(outputs)


def arguments(
    factors: bool,
    nonlinearity: str,
    generator: torch.Generator,
    dtype=torch.float64,
    steps=5,
    batch=3,
) -> list[Tensor | None]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    left = random(4, 2 if factors else 4)
    right = random(2, 4) if factors else None
    threshold = None
    if nonlinearity == "modrelu":
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        threshold = torch.randn(4, generator=generator, dtype=real).requires_grad_()
    return [random(steps, batch, 4), random(batch, 4), left, right, threshold]


def ours(inputs, hidden, left, right, threshold, nonlinearity):
    transition = left if right is None else (left, right)
    return rollout(inputs, hidden, transition, nonlinearity=nonlinearity, threshold=threshold)


@pytest.mark.parametrize(
    ("nonlinearity", "factors", "steps"),
    in_turn([*NONLINEARITIES, "tanh"], [False, True], [5, 1, 5]),
)
def test_rollout_equals_its_loop_with_gradients(nonlinearity, factors, steps, generator):
    given = arguments(factors, nonlinearity, generator, steps=steps)
    found = ours(*given, nonlinearity)
    inputs, hidden, left, right, threshold = given
    expected = plain(inputs, hidden, left, right, nonlinearity, threshold)
    torch.testing.assert_close(found, expected)
    leaves = [tensor for tensor in given if tensor is not None]
    weights = torch.randn(found.shape, generator=generator, dtype=found.dtype)
    torch.testing.assert_close(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
    )


@pytest.mark.parametrize(
    ("nonlinearity", "factors"), in_turn([*NONLINEARITIES, "tanh"], [False, True])
)
def test_rollout_has_gradients_of_both_orders(nonlinearity, factors, generator):
    given = arguments(factors, nonlinearity, generator, steps=2, batch=1)

    def function(*leaves: Tensor) -> Tensor:
        rest = iter(leaves)
        full = [None if tensor is None else 0.5 * next(rest) for tensor in given]
        return ours(*full, nonlinearity)

    leaves = [tensor for tensor in given if tensor is not None]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("nonlinearity", ["tanh", "modrelu"])
def test_rollout_of_complex_tensors(nonlinearity, generator):
    given = arguments(False, nonlinearity, generator, torch.complex128, steps=3)
    inputs, hidden, left, right, threshold = given
    found = ours(*given, nonlinearity)
    torch.testing.assert_close(found, plain(inputs, hidden, left, right, nonlinearity, threshold))
    found.abs().sum().backward()
    assert bool(left.grad.abs().isfinite().all())


def test_gradients_only_where_asked_for(generator):
    inputs, hidden, left, right, _ = arguments(True, "tanh", generator)
    found = ours(inputs.detach(), hidden.detach(), left, right.detach(), None, "tanh")
    found.sum().backward()
    assert left.grad is not None
    assert inputs.grad is hidden.grad is right.grad is None


# ---- an orthogonal transition ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        *TRANSITIONS.values(),
        *(
            {"transition": name, "dtype": torch.complex64, "nonlinearity": "modrelu"}
            for name in ("urnn", "eurnn", "cwy", "matrix_exp")
        ),
    ],
    ids=str,
)
def test_norm_is_kept_without_input(options, generator):
    """With |.|, or a threshold of zero, and nothing entering every step only turns the state."""
    options = {"nonlinearity": "abs", "bias": False, **options}
    module = OrthogonalRNN(INPUT, HIDDEN, **options)
    if options["nonlinearity"] == "modrelu":
        module.threshold_l0.data.zero_()
    first = torch.randn(1, BATCH, HIDDEN, generator=generator, dtype=options.get("dtype"))
    with torch.no_grad():
        outputs, last = module(torch.zeros(500, BATCH, INPUT), first)
    norms = torch.linalg.vector_norm(outputs, dim=-1)
    expected = torch.linalg.vector_norm(first, dim=-1).expand_as(norms)
    torch.testing.assert_close(norms, expected, rtol=1e-4, atol=0)
    assert torch.equal(outputs[-1], last[0])


@pytest.mark.parametrize(("options", "nonlinearity"), in_turn(TRANSITIONS.values(), NONLINEARITIES))
def test_gradient_does_not_grow_backwards(options, nonlinearity, generator):
    options = {"nonlinearity": nonlinearity, "dtype": torch.float64, **options}
    module = OrthogonalRNN(INPUT, HIDDEN, **options)
    if nonlinearity == "modrelu":
        module.threshold_l0.data.abs_().neg_()
    first = torch.randn(1, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    first.requires_grad_()
    inputs = torch.randn(200, BATCH, INPUT, generator=generator, dtype=torch.float64)
    weights = torch.randn(1, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    (back,) = torch.autograd.grad((module(inputs, first)[1] * weights).sum(), first)
    bound = torch.linalg.vector_norm(weights, dim=-1) * (1 + 1e-10)
    assert bool((torch.linalg.vector_norm(back, dim=-1) <= bound).all())


@pytest.mark.parametrize(
    ("options", "bidirectional"), in_turn([*TRANSITIONS.values()][::2], [False, True])
)
def test_training_lowers_the_loss_and_keeps_the_transition(options, bidirectional, generator):
    """Remember the first of eight random numbers."""
    module = OrthogonalRNN(1, 12, bidirectional=bidirectional, **options)
    model = nn.ModuleList([module, nn.Linear(24 if bidirectional else 12, 1)])
    rule = so.StiefelAdam if options["transition"] == "tagged" else torch.optim.Adam
    optimizer = rule(model.parameters(), lr=2e-2)

    def loss() -> Tensor:
        inputs = torch.randn(8, 32, 1, generator=generator)
        return (model[1](model[0](inputs)[0][-1]) - inputs[0]).square().mean()

    losses = train(optimizer, loss, 100)
    bound = 0.9 if "reflections" in options else 0.4  # few reflections reach little
    assert sum(losses[-10:]) < bound * sum(losses[:10])
    for suffix in ("_l0", "_l0_reverse")[: 1 + bidirectional]:
        weight = getattr(module, f"weight_hh{suffix}").detach()
        torch.testing.assert_close(weight.mT @ weight, torch.eye(12), rtol=0, atol=1e-5)


@some_transitions
def test_copies_checkpoints_and_the_generator(options, generator):
    module, same, other = (
        OrthogonalRNN(
            INPUT, HIDDEN, num_layers=2, generator=torch.Generator().manual_seed(seed), **options
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(module.weight_hh_l0, same.weight_hh_l0)
    assert not torch.allclose(module.weight_hh_l0, other.weight_hh_l0)
    inputs = torch.randn(STEPS, BATCH, INPUT, generator=generator)
    other.load_state_dict(module.state_dict())
    for twin in (copy.deepcopy(module), other):
        torch.testing.assert_close(twin(inputs), module(inputs), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "dtype"), in_turn([*TRANSITIONS.values()][::2], [torch.bfloat16, torch.float64])
)
def test_other_precisions_and_autocast(options, dtype, generator):
    module = OrthogonalRNN(INPUT, HIDDEN, **options)
    inputs = torch.randn(STEPS, BATCH, INPUT, generator=generator)
    expected, _ = module(inputs)
    outputs, last = copy.deepcopy(module).to(dtype)(inputs.to(dtype))
    assert outputs.dtype == last.dtype == dtype
    torch.testing.assert_close(outputs.float(), expected, rtol=5e-2, atol=5e-2)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, _ = module(inputs)
    assert outputs.dtype == torch.float32
    torch.testing.assert_close(outputs, expected, rtol=5e-2, atol=5e-2)


def test_state_of_torch_loads_as_its_nearest_point():
    theirs = nn.RNN(INPUT, HIDDEN)
    module = OrthogonalRNN(INPUT, HIDDEN, transition="tagged")
    module.load_state_dict(theirs.state_dict())
    left, _, right = torch.linalg.svd(theirs.weight_hh_l0.detach())
    torch.testing.assert_close(module.weight_hh_l0.detach(), left @ right, rtol=1e-4, atol=1e-4)
    assert torch.equal(module.weight_ih_l0, theirs.weight_ih_l0)


@pytest.mark.parametrize(
    ("dtype", "assign"),
    in_turn([torch.complex64, torch.complex128, torch.bfloat16], [False, True]),
)
def test_any_dtype_loads_as_its_nearest_point(dtype, assign):
    module = OrthogonalRNN(INPUT, HIDDEN, transition="tagged", dtype=dtype)
    state = copy.deepcopy(module.state_dict())
    state["weight_hh_l0"] = torch.randn(HIDDEN, HIDDEN, dtype=dtype)
    module.load_state_dict(state, assign=assign)
    assert so.orthonormality_error(module) < 3 * torch.finfo(dtype).eps * HIDDEN**0.5
    before = copy.deepcopy(module.state_dict())
    module.load_state_dict(before)  # what is there stays
    torch.testing.assert_close(dict(module.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("keep_vars", [False, True])
def test_a_state_that_is_taken_over_is_not_changed(keep_vars):
    theirs = nn.RNN(INPUT, HIDDEN)
    state = theirs.state_dict(keep_vars=keep_vars)
    before = {name: value.detach().clone() for name, value in state.items()}
    module = OrthogonalRNN(INPUT, HIDDEN, transition="tagged")
    module.load_state_dict(state, assign=True)
    torch.testing.assert_close(dict(theirs.state_dict()), before, rtol=0, atol=0)
    assert so.orthonormality_error(module).item() < 1e-5
    assert type(theirs.weight_hh_l0) is nn.Parameter
    assert so.param_groups(module)[1]["params"][0] is module.weight_hh_l0
    parameter = module.weight_hh_l0
    module.load_state_dict(before)  # copied: the same object stays
    assert module.weight_hh_l0 is parameter
    assert so.orthonormality_error(module).item() < 1e-5


READINGS = [{}, {"scale": 0.5}, {"transposed": True}, {"heads": 2}, {"scale": 0.5, "heads": 3}]


@pytest.mark.parametrize("reading", READINGS, ids=str)
def test_short_products_of_reflections_are_their_transition(reading, generator, monkeypatch):
    """Which is never formed, but where it is read in another way."""
    options = {"nonlinearity": "abs", "num_layers": 2, "dtype": torch.float64}
    module = OrthogonalRNN(INPUT, HIDDEN, transition="cwy", reflections=4, **options, **reading)
    formed = OrthogonalRNN(INPUT, HIDDEN, transition=None, **options)
    named = dict(module.named_parameters())
    for name, parameter in formed.named_parameters():
        transition = getattr(module, name) if "weight_hh" in name else named[name]
        parameter.data.copy_(transition.detach())
    inputs = torch.randn(STEPS, BATCH, INPUT, generator=generator, dtype=torch.float64)
    expected = formed(inputs)

    def forbidden(*_: Any) -> None:
        pytest.fail("the transition was formed")

    if not reading:
        monkeypatch.setattr(type(module.parametrizations.weight_hh_l0[0]), "forward", forbidden)
    torch.testing.assert_close(module(inputs), expected)
    module(inputs)[0].sum().backward()
    assert bool(module.parametrizations.weight_hh_l0.original.grad.any())


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Chain(TorchDispatchMode):
    """The longest chain of matrix products and solves, each of which needs the one before."""

    PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "linalg_solve_triangular")

    def __init__(self) -> None:
        super().__init__()
        self.length: dict[int, int] = {}  # by storage, which a tensor shares with its views
        self.alive: list[Any] = []  # a storage that is freed would give its address to another

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        product = func.overloadpacket.__name__.removesuffix("_") in self.PRODUCTS
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        length = max((self.length.get(address(t), 0) for t in given), default=0) + product
        for made in pytree.tree_leaves(result):
            if isinstance(made, Tensor):
                self.length[address(made)] = max(length, self.length.get(address(made), 0))
                self.alive.append(made)
        return result


@pytest.mark.parametrize("steps", [4, 32])
@pytest.mark.parametrize("count", [1, 3, 15])
def test_products_one_after_the_other_do_not_grow_with_the_number_of_reflections(steps, count):
    """Products and solves in a chain, the T and L of table 1 of Likhosherstov et al. (2021).

    CWY has two a step, one if L = N, after a preparation that knows no L; one by one, L
    reflections are 2 L more.
    """

    def chain(transition: str, reflections: int) -> int:
        options = {"transition": transition, "reflections": reflections, "dtype": torch.float64}
        module = OrthogonalRNN(1, 16, nonlinearity="abs", **options)
        with torch.no_grad(), Chain() as mode:
            out = module(torch.ones(steps, BATCH, 1, dtype=torch.float64))[0]
        return mode.length[address(out)]

    assert chain("cwy", count) == 2 * steps + 2
    assert chain("cwy", 16) == steps + 3
    assert chain("householder", count) == steps + 2 * count


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}], ids=str)
def test_packed_complex_sequences_are_their_sequences(options, generator):
    options = {"nonlinearity": "modrelu", "dtype": torch.complex128, **options}
    module = OrthogonalRNN(INPUT, HIDDEN, transition="cwy", **options)
    lengths = (2, 7, 1, 4)
    sequences = [
        torch.randn(n, INPUT, generator=generator, dtype=torch.complex128) for n in lengths
    ]
    for given in (sequences, [sequence.real for sequence in sequences]):
        outputs, last = module(pack_sequence(given, enforce_sorted=False))
        for index, outputs_alone in enumerate(unpack_sequence(outputs)):
            alone, last_alone = module(given[index])
            torch.testing.assert_close(outputs_alone, alone)
            torch.testing.assert_close(last[:, index], last_alone)


@pytest.mark.parametrize(
    ("transition", "dtype"), in_turn(["urnn", "eurnn"], [torch.float64, torch.bfloat16])
)
def test_complex_transitions_after_a_conversion_of_the_real_parameters(transition, dtype):
    module = OrthogonalRNN(2, 4, dtype=torch.complex64, transition=transition)
    weight = module.weight_hh_l0.detach().clone()
    module = module.double() if dtype == torch.float64 else module.bfloat16()
    near = 1e-6 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(module.weight_hh_l0.to(weight.dtype), weight, rtol=0, atol=near)
    outputs, _ = module(torch.ones(3, 2, 2, dtype=torch.complex64))
    outputs.abs().sum().backward()
    assert so.orthonormality_error(module.weight_hh_l0) < 1e-6


# ---- errors ------------------------------------------------------------------------------------


WRONG_OPTIONS = [
    ({"nonlinearity": "gelu"}, ValueError, "`nonlinearity` must be one of"),
    ({"hidden_size": 0}, ValueError, "`hidden_size` must be a positive integer, got 0"),
    ({"num_layers": 1.0}, ValueError, "`num_layers` must be a positive integer, got 1.0"),
    ({"batch_first": 1}, TypeError, "`batch_first` must be True or False, got 1"),
    ({"dropout": 1.5}, ValueError, "`dropout` must be in"),
    ({"transition": "cwyy"}, ValueError, "`transition` must be one of"),
    ({"reflections": 7}, ValueError, "`reflections` must be at most 6"),
    ({"transition": "own"}, ValueError, "`weight`"),
    ({"transition": "urnn"}, TypeError, "`weight` must be complex for URNN"),
    ({"transition": "tagged", "start": "haar"}, ValueError, "`start` must be one of"),
    ({"transition": None, "reflections": 2}, TypeError, "`options` must be empty"),
    (
        {"transition": "tagged", "reflections": 2},
        TypeError,
        "`options of .tagged.` must be known, got reflections",
    ),
    ({"reflections": 2, "start": "henaff"}, ValueError, "`start` must be None for .cwy., refl"),
    (
        {"dtype": torch.complex64, "nonlinearity": "abs"},
        ValueError,
        "`nonlinearity` must be modrelu or tanh",
    ),
]


def test_wrong_options_are_named():
    for options, error, message in WRONG_OPTIONS:
        with pytest.raises(error, match=message):
            OrthogonalRNN(**{"input_size": INPUT, "hidden_size": HIDDEN, **options})


def test_wrong_input_is_named(generator):
    module = OrthogonalRNN(INPUT, HIDDEN, transition="tagged", generator=generator)
    for shape in ((STEPS, BATCH, INPUT + 1), (INPUT,), (0, BATCH, INPUT)):
        with pytest.raises(ValueError, match="`input` must have 2 or 3 dimensions"):
            module(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"`hx` must have shape \(1, 4, 6\), got shape \(4, 6\)"):
        module(torch.zeros(STEPS, BATCH, INPUT), torch.zeros(BATCH, HIDDEN))
    packed = pack_sequence([torch.zeros(2, INPUT + 1)])
    with pytest.raises(ValueError, match="`input` must have 3 columns"):
        module(packed)


WRONG_INPUT = [
    ({"nonlinearity": "sin"}, "`nonlinearity` must be one of"),
    ({"inputs": torch.zeros(0, 2, 3)}, r"`inputs` must have shape \(T, batch, N\) with T > 0"),
    ({"inputs": torch.zeros(2, 3)}, r"`inputs` must have shape \(T, batch, N\) with T > 0"),
    (
        {"start": torch.zeros(3)},
        r"`start` must have shape \(2, 3\) for inputs of",
    ),
    ({"inputs": torch.zeros(4, 2, 3, dtype=torch.complex64), "nonlinearity": "relu"}, "one of"),
    ({"transition": torch.eye(4)}, r"`transition` must have shape \(3, 3\) for inputs of sha"),
    (
        {"transition": (torch.zeros(3, 2), torch.zeros(3, 2))},
        r"`transition` must have shape \(2, 3\) for inputs",
    ),
    ({"threshold": torch.zeros(2)}, r"`threshold` must have shape \(3,\)"),
]


def test_wrong_input_of_the_rollout_is_named():
    for change, message in WRONG_INPUT:
        good = {"inputs": torch.zeros(4, 2, 3), "start": torch.zeros(2, 3)}
        with pytest.raises(ValueError, match=message):
            rollout(**{**good, "transition": torch.eye(3), **change})


def test_the_rollout_takes_one_dtype():
    inputs, start = torch.zeros(4, 2, 3), torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"`transition` must have dtype torch\.float32"):
        rollout(inputs, start, torch.eye(3, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"`start` must have dtype torch\.float32 for inputs"):
        rollout(inputs, start.double(), torch.eye(3))
