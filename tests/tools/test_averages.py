"""Averages of tagged weights: projected by `so.averaged`, with a warning for others."""

import copy
import pickle
import pkgutil
from typing import Any

import pytest
import torch
from cases import pairwise
from contract import IS_ON_CPU, warnings_of
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.utils.flop_counter import FlopCounterMode
from training import train

import stiefel_opt as so


class Everything(nn.Module):
    """One weight of each reading, and plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tall, self.wide = nn.Linear(4, 8), nn.Linear(8, 4)
        self.heads, self.rows = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv, self.gates = nn.Conv2d(2, 8, 3), nn.GRU(4, 4)
        self.stored = nn.Linear(8, 8)
        so.constrain(self, "tall.weight")
        so.constrain(self, "wide.weight", scale="keep")
        so.constrain(self, "heads.weight", heads=4)
        so.constrain(self, "rows.weight", rows=((0, 4), (6, 8)), scale=0.5)
        so.constrain(self, "conv.weight")
        so.constrain(self, "gates.weight_hh_l0")
        so.constrain(self, "stored.weight", transposed=True, heads=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stored(self.rows(self.heads(self.tall(x))))
        return self.gates(self.wide(y))[0] + self.conv.weight.sum()


def net() -> nn.Module:
    torch.manual_seed(0)
    return Everything()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    train(
        optimizer,
        lambda: model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).square().sum(),
        steps,
    )


def polar(value: Tensor, reading: so.Stiefel) -> Tensor:
    """The nearest point by a decomposition of each matrix, in float64."""
    value = value.clone()
    for index, part in enumerate(reading.parts(value)):
        left, _, right = torch.linalg.svd(reading.matrices(part, index), full_matrices=False)
        part.copy_(reading.stored(reading.scale * left @ right, part.shape, index))
    return value


@pytest.mark.parametrize("decay", [None, 0.5, 0.99])
@pytest.mark.parametrize("lr", [0.03, 1.0])
def test_the_average_is_the_projected_mean_of_every_reading(decay: float | None, lr: float) -> None:
    model = net().double()
    so.project_(model)
    optimizer = so.StiefelAdam(model.parameters(), lr=lr)
    average = so.averaged(model, decay)
    expected: dict[str, Tensor] = {}
    for update in range(5):
        fit(model, optimizer)
        average.update_parameters(model)
        keep = update / (update + 1) if decay is None else decay * (update > 0)
        for name, p in model.named_parameters():
            mean = keep * expected.get(name, p.detach()) + (1 - keep) * p.detach()
            manifold = getattr(p, "manifold", None)
            expected[name] = polar(mean, manifold) if manifold else mean
    for name, p in average.module.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-9, atol=1e-9)
        assert getattr(p, "manifold", None) == getattr(model.get_parameter(name), "manifold", None)
    assert so.orthonormality_error(average) < 1e-12
    with torch.no_grad():
        assert not warnings_of(lambda: average(torch.ones(2, 4, dtype=torch.float64)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_averages_of_other_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = so.constrain(nn.Linear(4, 8, dtype=dtype))
    average = so.averaged(layer, 0.9)
    for _ in range(4):
        with torch.no_grad():
            layer.weight.copy_(so.random_point(8, 4, dtype=torch.float32).to(dtype))
        average.update_parameters(layer)
    bound = 2e-2 if dtype == torch.bfloat16 else 2e-6
    assert so.orthonormality_error(average) < bound
    assert average.module.weight.dtype == dtype


@pytest.mark.parametrize("decay", [None, 0.9])
def test_an_average_goes_on_after_saving_and_copying(decay: float | None) -> None:
    model = net()
    optimizer = so.StiefelAdam(model.parameters(), lr=0.1)
    average = so.averaged(model, decay, use_buffers=True)
    fit(model, optimizer)
    average.update_parameters(model)
    again = so.averaged(net(), decay, use_buffers=True)
    again.load_state_dict(average.state_dict())
    twins = (again, copy.deepcopy(average), pickle.loads(pickle.dumps(average)))
    fit(model, optimizer)
    average.update_parameters(model)
    for twin in twins:
        twin.update_parameters(model)
        assert so.orthonormality_error(twin) < 2e-6
        assert int(twin.n_averaged) == 2
        for name, value in average.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value), name


@pytest.mark.parametrize("decay", [None, 0.9])
def test_an_average_on_the_meta_device_is_not_projected(decay: float | None) -> None:
    with torch.device("meta"):
        model = so.constrain(nn.Linear(3, 2))
    average = so.averaged(model, decay)
    for _ in range(2):
        average.update_parameters(model)
    assert average.module.weight.is_meta
    assert average.module.weight.manifold == so.Stiefel()


def test_an_update_of_the_average_takes_ten_products() -> None:
    n, m = 40, 7
    torch.manual_seed(0)
    model = so.constrain(nn.Linear(m, n))
    average = so.averaged(model, 0.9)
    average.update_parameters(model)
    with torch.no_grad():
        step = so.project_tangent(model.weight, 0.3 * torch.randn(n, m))
        model.weight.copy_(so.retract(model.weight, step))
    with FlopCounterMode(display=False) as counter:
        average.update_parameters(model)
    assert counter.get_total_flops() == 10 * 2 * n * m * m


def test_a_map_whose_base_moves_is_not_averaged() -> None:
    model = nn.Sequential(so.orthogonal(nn.Linear(4, 4), "weight", "trivialization"))
    with pytest.raises(ValueError, match=r"`every of 0\.parametrizations.* must be None to be av"):
        so.averaged(model)
    fixed = so.orthogonal(nn.Linear(4, 4), "weight", "trivialization", every=None)
    so.averaged(fixed).update_parameters(fixed)


def test_a_model_without_tags_is_averaged_as_torch_does() -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="nothing in `model` is constrained.*call so.constrain fi"):
        average = so.averaged(model)
    plain = swa_utils.AveragedModel(model)
    for each in (average, plain, average, plain):
        with torch.no_grad():
            model.weight += 1
        each.update_parameters(model)
    assert int(average.n_averaged) == 2
    assert not warnings_of(lambda: so.averaged(so.orthogonal(nn.Linear(3, 2))))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(2, 2), 1.0), ValueError, r"`decay` must be in \(0, 1\), got 1.0"),
        ((nn.Linear(2, 2), "0.9"), TypeError, r"`decay` must be a number in \(0, 1\)"),
        ((torch.ones(2, 2),), TypeError, "`model` must be a torch.nn.Module, got Tensor"),
    ],
)
def test_what_cannot_be_averaged_is_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        so.averaged(*arguments)


# ---- other averages ----------------------------------------------------------------------------


def swa(model: nn.Module) -> Any:
    average = swa_utils.AveragedModel(model)
    return average, lambda: average.update_parameters(model)


def ema(model: nn.Module) -> Any:
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    return average, lambda: average.update_parameters(model)


def polyak(model: nn.Module) -> Any:
    """A target network, as reinforcement learning has it."""
    target = copy.deepcopy(model)

    @torch.no_grad()
    def update() -> None:
        for p, q in zip(target.parameters(), model.parameters(), strict=True):
            p.lerp_(q, 0.5)

    return target, update


AVERAGES = {"swa": swa, "ema": ema, "polyak": polyak}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("seen_before", [False, True])
def test_another_average_is_told_once_where_it_is_used(
    average: str, with_grad: bool, seen_before: bool
) -> None:
    model = net()
    optimizer = so.StiefelAdam(model.parameters(), lr=0.3)
    mean, update = AVERAGES[average](model)
    x = torch.ones(2, 4)
    if seen_before:
        with torch.no_grad():
            assert not warnings_of(lambda: mean(x))
    for _ in range(3):
        fit(model, optimizer)
        assert not warnings_of(update)
    with torch.set_grad_enabled(with_grad and not seen_before):
        texts = warnings_of(lambda: mean(x))
        assert not warnings_of(lambda: mean(x))
    assert len(texts) == 7
    assert all("is off the manifold, |X'X - I| = " in text for text in texts)
    assert all("so.averaged(model)" in text for text in texts)
    with torch.no_grad():
        assert not warnings_of(lambda: [model(x) for _ in range(20)])


def by_data(p: Tensor, q: Tensor) -> None:
    p.data.copy_(0.98 * p.data + 0.02 * q.data)  # counts no version


def by_another(p: Tensor, q: Tensor) -> None:
    p.data = 0.98 * p.data + 0.02 * q.data


@torch.no_grad()
def in_place(p: Tensor, q: Tensor) -> None:
    p.lerp_(q, 0.02)


def functional(model: nn.Module, target: nn.Module, x: Tensor) -> Tensor:
    return torch.func.functional_call(model, dict(target.state_dict()), (x,))


READS: dict[str, Any] = {
    "detached": lambda _, target, x: target(x).detach(),
    "frozen": lambda _, target, x: target.requires_grad_(False)(x),
    "functional": functional,
    "functional, evaluated": torch.no_grad()(functional),
}


@pytest.mark.parametrize(
    ("write", "read", "is_on_cpu"),
    pairwise([by_data, by_another, in_place, None], READS, [True, False]),
)
def test_a_target_network_is_told_wherever_it_is_read(
    read: str, write: Any, is_on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No optimizer steps it: also where gradients are enabled; an accelerator is read later."""
    torch.manual_seed(0)
    monkeypatch.setattr(IS_ON_CPU, lambda _: is_on_cpu)
    model = so.constrain(nn.Linear(4, 8))
    target, goal = copy.deepcopy(model), so.random_point(8, 4)
    optimizer = so.StiefelAdam(model.parameters(), lr=0.1)

    def train_both() -> None:
        for _ in range(70):
            x = torch.randn(8, 4)
            READS[read](model, target, x)
            optimizer.zero_grad()
            (model(x) - x @ goal.T).square().mean().backward()
            optimizer.step()
            for p, q in zip(target.parameters(), model.parameters(), strict=True):
                if write is not None:
                    write(p, q)

    texts = warnings_of(train_both)
    assert len(texts) == (write is not None)
    for text in texts:
        assert "`weight` of Linear is off the manifold, |X'X - I| = " in text
        assert "so.averaged(model)" in text
        assert ("so.project_(value, manifold)" in text) == ("functional" in read)


@pytest.mark.parametrize("kind", ["vmap", "make_fx"])
def test_transforms_of_a_functional_call_are_not_looked_at(kind: str) -> None:
    model, x = so.constrain(nn.Linear(4, 8)), torch.ones(2, 4)
    values = {name: 2 * value.detach() for name, value in model.named_parameters()}

    def call(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).sum()

    if kind == "vmap":
        several = {name: torch.stack([value] * 3) for name, value in values.items()}
        torch.vmap(call)(several)
    else:
        traced = torch.fx.experimental.proxy_tensor.make_fx(call)(values)
        assert sum("mm" in str(node.target) for node in traced.graph.nodes) == 1


def test_an_average_that_is_written_back_into_the_model_is_told_in_its_next_evaluation() -> None:
    """As Lightning's callback does at the end."""
    model = net()
    optimizer = so.StiefelAdam(model.parameters(), lr=0.3)
    mean, update = polyak(model)
    for _ in range(2):
        fit(model, optimizer)
        update()
        with torch.no_grad():
            assert not warnings_of(lambda: model(torch.ones(2, 4)))
    fit(model, optimizer, 20)
    for p, q in zip(model.parameters(), mean.parameters(), strict=True):
        p.detach().copy_(q.detach())
    with torch.no_grad():
        assert len(warnings_of(lambda: model(torch.ones(2, 4)))) == 7


@pytest.mark.parametrize("rule", ["penalty", "stiefel=False", "project=False"])
def test_a_weight_that_is_meant_to_be_off_is_silent(rule: str) -> None:
    model = so.constrain(nn.Linear(4, 4), project=rule != "project=False")
    if rule == "stiefel=False":
        fit(model, so.StiefelSGD(model.parameters(), lr=0.1, stiefel=False))
    elif rule == "penalty":
        so.orthonormality_penalty(model).backward()
        fit(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        assert not warnings_of(lambda: model(torch.ones(2, 4)))
        if rule != "project=False":
            assert not warnings_of(lambda: copy.deepcopy(model)(torch.ones(2, 4)))


def test_an_evaluation_of_a_trained_model_looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    checked = "stiefel_opt.tags.watch._Watched.warn_if_far"
    monkeypatch.setattr(checked, lambda *seen, **how: bool(looks.append((seen, how))))
    model = so.constrain(nn.Linear(4, 4))
    optimizer = so.StiefelSGD(model.parameters(), lr=0.1)
    for _ in range(200):
        fit(model, optimizer, 1)
        with torch.no_grad():
            model(torch.ones(2, 4))
    assert 0 < len(looks) < 30
    fit(model, optimizer, 200)
    looks.clear()
    fit(model, optimizer, 200)
    assert not looks


FAR = {  # dtype of a weight, what it was rounded to, how far it is off: whether that is told
    "float32, 2e-4": (torch.float32, None, 2e-4, True),
    "float32, 5e-3": (torch.float32, None, 5e-3, True),
    "float32, 2e-5": (torch.float32, None, 2e-5, False),
    "float64, 2e-4": (torch.float64, None, 2e-4, True),
    "complex64, 2e-3": (torch.complex64, None, 2e-3, True),
    "bfloat16, 5e-3": (torch.bfloat16, None, 5e-3, False),
    "bfloat16, 1e-1": (torch.bfloat16, None, 1e-1, True),
    "float32 of bfloat16": (torch.float32, torch.bfloat16, 0.0, False),
    "float32 of float16": (torch.float32, torch.float16, 0.0, False),
    "float32 of bfloat16, 1e-1": (torch.float32, torch.bfloat16, 1e-1, True),
}


@pytest.mark.parametrize("case", FAR)
def test_how_far_a_weight_may_be_off_depends_on_its_precision(case: str) -> None:
    dtype, rounded, error, is_told = FAR[case]
    layer = so.constrain(nn.Linear(16, 16, dtype=dtype))
    with torch.no_grad():
        layer.weight.mul_((1 + error) ** 0.5)
        if rounded is not None:
            layer.weight.copy_(layer.weight.to(rounded))
        texts = warnings_of(lambda: copy.deepcopy(layer)(torch.ones(2, 16, dtype=dtype)))
    assert len(texts) == is_told


@pytest.mark.parametrize("with_grad", [False, True])
def test_most_reads_of_a_weight_that_stays_cost_nothing(
    with_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even a call: a read of a watched 8 x 8 layer would take half as long again."""
    calls: list[str] = []
    look = "stiefel_opt.tags.watch._Watched.look"
    monkeypatch.setattr(look, counted(pkgutil.resolve_name(look.replace("._W", ":_W")), calls))
    layer = so.constrain(nn.GRU(4, 8), "weight_*")
    with torch.set_grad_enabled(with_grad):
        for _ in range(2000):
            layer.weight_hh_l0, layer.weight_ih_l0, layer.bias_hh_l0  # noqa: B018
        assert calls.count("weight_hh_l0") == 2000  # outside of a forward pass: none has passed
        calls.clear()
        layer, x = so.constrain(nn.Linear(8, 8)), torch.ones(2, 8)
        for _ in range(2000):
            layer(x)
        assert 0 < len(calls) < 120
        twin = pickle.loads(pickle.dumps(layer))
        calls.clear()
        twin(x)
        assert calls


def counted(look: Any, calls: list[str]) -> Any:
    def counting(self: Any, name: str, value: Any) -> None:
        calls.append(name)
        look(self, name, value)

    return counting


@pytest.mark.parametrize("reads", [0, 10, 100, 3000])
@pytest.mark.parametrize("write", [by_data, by_another, in_place])
def test_a_write_between_evaluations_is_told_soon(reads: int, write: Any) -> None:
    """At once in short evaluations; with a version within 64 reads, else within as many again."""
    layer, x, other = so.constrain(nn.Linear(4, 4)), torch.ones(2, 4), torch.full((4, 4), 9.0)
    with torch.no_grad():
        assert not warnings_of(lambda: [layer(x) for _ in range(reads)])
        write(layer.weight, other)
        soon = min(reads // 8, 63) + 1 if write is in_place else reads + 4
        assert len(warnings_of(lambda: [layer(x) for _ in range(soon)])) == 1


@pytest.mark.parametrize("with_grad", [False, True])
def test_copies_are_compiled_exported_and_traced(with_grad: bool) -> None:
    """Nothing that looks at a value is in a graph."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    so.constrain(model, "*.weight")
    twin, x = copy.deepcopy(model), torch.randn(2, 4)
    with torch.set_grad_enabled(with_grad):
        expected = model(x)
        compiled = torch.compile(twin, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(compiled(x), expected)
        exported = torch.export.export(copy.deepcopy(model), (x,)).module()
        torch.testing.assert_close(exported(x), expected)
    with torch.inference_mode():
        layer = so.constrain(nn.Linear(4, 4))
        assert layer(x).shape == (2, 4)


# ---- a model that changes under its average ------------------------------------------------------


def test_an_average_follows_the_scale_that_is_loaded_into_the_model() -> None:
    model = so.constrain(nn.Linear(6, 4), scale="keep")
    average = so.averaged(model, 0.5)
    model.load_state_dict({"weight": 5 * so.random_point(4, 6), "bias": torch.zeros(4)})
    for _ in range(60):
        average.update_parameters(model)
    torch.testing.assert_close(average.module.weight.detach(), model.weight.detach())
    assert average.module.weight.manifold == model.weight.manifold
    so.retag(average.module)  # the record follows, too
    assert average.module.weight.manifold == model.weight.manifold


def leave(model: nn.Module, way: str) -> None:
    if way == "released":
        so.release(model)
    elif way == "penalty":
        so.orthonormality_penalty(model).backward()
    else:
        so.StiefelSGD([{"params": model.parameters(), "stiefel": False}], lr=0.1)


@pytest.mark.parametrize("way", ["released", "penalty", "stiefel=False"])
def test_what_leaves_the_manifold_on_purpose_is_averaged_as_it_is(way: str) -> None:
    model = so.constrain(nn.Linear(6, 4))
    average = so.averaged(model)
    leave(model, way)
    with torch.no_grad():
        model.weight.mul_(3.0)
    average.update_parameters(model)  # the first one copies
    assert torch.equal(average.module.weight, model.weight)


def test_a_base_is_copied_where_buffers_are_averaged() -> None:
    model = so.orthogonal(nn.Linear(6, 6), map="trivialization", every=None)
    average = so.averaged(model, use_buffers=True)
    for _ in range(3):
        model.weight = so.random_point(6, 6)
        average.update_parameters(model)
    assert so.orthonormality_error(average.module.weight) < 1e-6
    torch.testing.assert_close(average.module.weight, model.weight)


@pytest.mark.parametrize("way", ["logged penalty", "penalty, then projected", "untagged copy"])
def test_a_weight_on_the_manifold_is_averaged_as_a_point(way: str) -> None:
    """Where a penalty was only logged, or is over; and in a replica that has lost its tags."""
    model = so.constrain(nn.Linear(6, 4))
    optimizer = so.StiefelSGD(model.parameters(), lr=0.5)
    average = so.averaged(model, 0.5)
    if way != "untagged copy":
        so.orthonormality_penalty(model)
    if way == "penalty, then projected":
        with torch.no_grad():
            model.weight.mul_(2.0)
        average.update_parameters(model)
        so.project_(model)
    for step in range(4):
        model.weight.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        source = nn.Linear(6, 4) if way == "untagged copy" else model
        source.load_state_dict(model.state_dict())
        average.update_parameters(source)
    assert so.orthonormality_error(average) < 1e-6


def test_a_copy_without_tags_is_not_taken_for_a_weight_that_was_released_and_is_gone() -> None:
    """A new parameter may lie where a released one lay."""
    for _ in range(20):
        gone = [so.constrain(nn.Linear(6, 4)) for _ in range(5)]
        for each in gone:
            so.release(each)
        model = so.constrain(nn.Linear(6, 4))
        average = so.averaged(model, 0.5)
        del gone, each
        source = nn.Linear(6, 4)
        source.load_state_dict(model.state_dict())
        average.update_parameters(source)
        assert hasattr(average.module.weight, "manifold")


def test_weights_of_a_group_without_constraint_are_averaged_as_plain_ones() -> None:
    """However near to the manifold they still are."""
    model = so.constrain(nn.Linear(6, 4, bias=False, dtype=torch.float64))
    groups = [{"params": list(model.parameters()), "stiefel": False}]
    optimizer = so.StiefelSGD(groups, lr=1e-4)
    average, plain = so.averaged(model, 0.5), model.weight.detach().clone()
    average.update_parameters(model)
    for step in range(4):
        model.weight.grad = torch.linspace(step, 3, 24, dtype=torch.float64).view(4, 6)
        optimizer.step()
        average.update_parameters(model)
        plain = (plain + model.weight.detach()) / 2
    torch.testing.assert_close(average.module.weight.detach(), plain, rtol=0, atol=1e-14)


def test_a_penalty_that_was_only_logged_lets_no_nan_into_an_average() -> None:
    model = so.constrain(nn.Linear(6, 4, bias=False))
    so.orthonormality_penalty(model)
    average = so.averaged(model)
    average.update_parameters(model)
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"`weight` must be finite"):
        average.update_parameters(model)


def test_averages_keep_it():
    layer = so.constrain(nn.Linear(3, 3, bias=False), determinant=1)
    average = so.averaged(layer)
    for seed in range(6):
        reading = so.Stiefel(determinant=1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            layer.weight.copy_(so.random_point(3, 3, manifold=reading, generator=generator))
        average.update_parameters(layer)
        weight = average.module.weight
        assert torch.linalg.det(weight).item() == pytest.approx(1)
