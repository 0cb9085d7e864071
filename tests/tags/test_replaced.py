"""A weight put into a constrained module keeps its own reading; loading warns where it must."""

import copy
import warnings
from typing import Any

import pytest
import torch
from contract import warnings_of
from optimizers import BY_CLOSURE
from torch import nn
from training import closure_of, train

import stiefel_opt as so
from stiefel_opt import Stiefel


def test_a_parameter_with_a_reading_of_its_own_keeps_it() -> None:
    layer = so.constrain(nn.Linear(8, 16))
    layer.weight = so.ManifoldParameter(torch.randn(16, 8), Stiefel(heads=4))
    assert layer.weight.manifold == Stiefel(heads=4)
    assert so.param_groups(layer)[1]["stiefel"]["heads"] == 4
    assert so.orthonormality_error(layer) < 1e-5


def test_tying_layers_of_two_readings_keeps_that_of_the_weight() -> None:
    one, other = so.constrain(nn.Linear(8, 16), heads=4), so.constrain(nn.Linear(8, 16))
    optimizer = so.StiefelSGD(one.parameters(), lr=0.1)
    for tied in (False, True):
        if tied:
            other.weight = one.weight
        one.weight.grad = torch.randn(16, 8)
        optimizer.step()
        assert one.weight.manifold == Stiefel(heads=4)
        assert so.orthonormality_error(one) < 1e-5
    assert so.retag(nn.ModuleList([one, other]))[1].weight.manifold == Stiefel(heads=4)


@pytest.mark.parametrize("raises", [False, True])
def test_a_functional_call_leaves_both_models_as_they_were(raises: bool) -> None:
    one, other = so.constrain(nn.Linear(8, 16), heads=4), so.constrain(nn.Linear(8, 16))
    x = torch.ones(1, 3 if raises else 8)

    def call() -> None:
        torch.func.functional_call(other, dict(one.named_parameters()), (x,))

    if raises:
        with pytest.raises(RuntimeError):
            call()
    else:
        assert not warnings_of(call)
    for layer, heads in ((one, 4), (other, None)):
        assert layer.weight.manifold == Stiefel(heads=heads)
        so.retag(layer)
        assert layer.weight.manifold == Stiefel(heads=heads)


def test_parameters_of_a_functional_call_are_no_loss_and_hide_none() -> None:
    layer = so.constrain(nn.Linear(8, 4))
    values = {name: nn.Parameter(value.clone()) for name, value in layer.named_parameters()}
    x = torch.ones(1, 8)
    assert not warnings_of(lambda: torch.func.functional_call(layer, values, (x,)))
    assert layer.weight.manifold == Stiefel()
    assert not warnings_of(lambda: layer(x))
    layer.weight = nn.Parameter(torch.randn(4, 8))
    (text,) = warnings_of(lambda: layer(x))
    assert "has lost its Stiefel tag" in text
    assert not warnings_of(lambda: layer(x))
    layer.weight = so.ManifoldParameter(torch.randn(4, 8))  # tagged again, and lost again
    layer.weight = nn.Parameter(torch.randn(4, 8))
    (text,) = warnings_of(lambda: layer(x))
    assert "has lost its Stiefel tag" in text


@pytest.mark.parametrize("assigned", [False, True])
def test_a_replaced_weight_moves_again_as_the_warning_says(assigned: bool) -> None:
    """By the optimizer that is built anew; the former one steps the former parameter."""
    layer = so.constrain(nn.Linear(8, 4))
    optimizer = so.StiefelSGD(layer.parameters(), lr=0.1)
    value = {name: value.clone() for name, value in layer.state_dict().items()}
    if assigned:
        layer.load_state_dict(value, assign=True)
    else:
        layer.weight = nn.Parameter(value["weight"])
    (text,) = warnings_of(lambda: layer(torch.ones(1, 8)))
    assert "call so.retag(model), and then build the optimizer anew" in text
    before = so.retag(layer).weight.detach().clone()
    for moves in (False, True):
        if moves:
            optimizer = so.StiefelSGD(layer.parameters(), lr=0.1)
        layer(torch.ones(1, 8)).square().sum().backward()
        optimizer.step()
        assert torch.equal(layer.weight, before) != moves
    assert so.orthonormality_error(layer) < 1e-6


def test_a_kind_of_manifold_of_ones_own_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`Stiefel` must not be derived from.*got Oblique"):
        type("Oblique", (Stiefel,), {})


def test_loading_by_assignment_tells_the_truth() -> None:
    layer = so.constrain(nn.Linear(8, 4))
    state = {"weight": torch.randn(4, 8), "bias": torch.zeros(4)}
    (text,) = warnings_of(lambda: layer.load_state_dict(state))
    assert "call so.project_(model), or the first step projects" in text
    (text,) = warnings_of(lambda: layer.load_state_dict(state, assign=True))
    assert (
        "assign=True replaces the parameter: call so.retag, then so.project_(model), and " in text
    )
    assert "build the optimizer anew" in text
    so.project_(so.retag(layer))
    assert so.orthonormality_error(layer) < 1e-5
    state["weight"] = layer.weight  # a parameter stays itself
    assert not warnings_of(lambda: layer.load_state_dict(state, assign=True))
    assert not warnings_of(lambda: layer(torch.ones(1, 8)))


# ---- modules that are made of a constrained one ------------------------------------------------


@pytest.mark.parametrize("kind", BY_CLOSURE)
def test_a_weight_that_torch_swaps_stays_constrained(kind: str) -> None:
    layer = so.constrain(nn.Linear(4, 6, bias=False))
    optimizer = BY_CLOSURE[kind]([layer.weight])
    x = torch.linspace(-1, 1, 32).view(8, 4)
    closure = closure_of(optimizer, lambda: (layer(x) - 1).square().mean())
    for swaps in (True, False, True):
        if swaps:
            torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach().clone()))
        optimizer.step(closure)
    assert layer.weight.manifold == Stiefel()
    assert so.orthonormality_error(layer) < 1e-5


def test_quantising_is_told() -> None:
    model = nn.Sequential(so.constrain(nn.Linear(8, 4)), nn.ReLU(), nn.Linear(4, 2))
    texts = warnings_of(lambda: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}))
    (text,) = {text for text in texts if "constrained" in text}
    assert "`weight` of Linear is constrained, and is quantised" in text


def test_training_that_knows_of_quantising_is_not_told() -> None:
    torch.backends.quantized.engine = "fbgemm"
    model = nn.Sequential(so.constrain(nn.Linear(8, 4)), nn.ReLU()).train()
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")

    def prepared() -> nn.Module:
        return torch.ao.quantization.prepare_qat(model)

    assert not [text for text in warnings_of(prepared) if "constrained" in text]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = prepared()
        optimizer = so.StiefelAdam(trained.parameters(), lr=0.01)
        train(optimizer, lambda: trained(torch.ones(2, 8)).square().sum(), 3)
    assert so.orthonormality_error(trained) < 1e-6


def test_fusing_with_a_norm_is_told() -> None:
    conv, norm = so.constrain(nn.Conv2d(3, 8, 3)).eval(), nn.BatchNorm2d(8).eval()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(conv, norm)
    (text,) = warnings_of(lambda: fused(torch.ones(1, 3, 4, 4)))
    assert "`weight` of Conv2d has lost its Stiefel tag" in text


def test_an_adapter_that_is_merged_is_told_in_the_next_evaluation() -> None:
    """As peft does it: by `.data`, which counts no version."""
    model = so.constrain(nn.Linear(8, 8))
    with torch.no_grad():
        assert not warnings_of(lambda: model(torch.ones(1, 8)))
    model.weight.data += torch.randn(8, 8)
    with torch.no_grad():
        (text,) = warnings_of(lambda: [model(torch.ones(1, 8)) for _ in range(4)])
    assert "`weight` of Linear is off the manifold" in text
    assert "a merged adapter" in text


# ---- weights that another module reads ---------------------------------------------------------


class Reader(nn.Module):
    """Reads the weight of a module whose own forward pass never runs."""

    def __init__(self, holder: nn.Module, name: str) -> None:
        super().__init__()
        self.holder, self.name = holder, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        holder: Any = self.holder
        is_indexed = isinstance(holder, (nn.ParameterList, nn.ParameterDict))
        key = int(self.name) if isinstance(holder, nn.ParameterList) else self.name
        return x @ (holder[key] if is_indexed else getattr(holder, self.name))


def bare() -> nn.Module:
    module = nn.Module()
    module.basis = nn.Parameter(torch.randn(6, 3))
    return module


HOLDERS: dict[str, tuple[Any, str]] = {
    "list": (lambda: nn.ParameterList([torch.zeros(2), torch.randn(6, 3)]), "1"),
    "dict": (lambda: nn.ParameterDict({"down": torch.randn(6, 3)}), "down"),
    "module without forward": (bare, "basis"),
    "tied layer": (lambda: nn.Linear(3, 6), "weight"),
}


@pytest.mark.parametrize("way", ["assigned", "loaded"])
@pytest.mark.parametrize("records", [True, False])
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_replaced_weight_is_told_where_it_is_read(kind: str, records: bool, way: str) -> None:
    make, name = HOLDERS[kind]
    model = nn.Sequential(Reader(make(), name))
    so.constrain(model[0], f"holder.{name}")
    holder, new = model[0].holder, nn.Parameter(model[0].holder._parameters[name].detach().clone())
    if way == "loaded":
        holder.load_state_dict(holder.state_dict(), assign=True)
    elif isinstance(holder, nn.ParameterList):
        holder[int(name)] = new
    else:
        setattr(holder, name, new)
    assert not warnings_of(lambda: (repr(model), model.state_dict(), list(model.parameters())))
    with torch.set_grad_enabled(records):
        (text,) = warnings_of(lambda: [model(torch.ones(2, 6)) for _ in range(3)])
    assert f"`{name}` of {type(holder).__name__} has lost its Stiefel tag" in text
    so.retag(model)
    assert not warnings_of(lambda: model(torch.ones(2, 6)))
    assert so.orthonormality_error(model) < 1e-6


def test_a_list_that_no_module_reads_is_told_of_its_loss() -> None:
    weights = so.constrain(nn.ParameterList([torch.randn(6, 3)]), "0")
    weights[0] = nn.Parameter(torch.randn(6, 3))
    so.retag(weights)
    assert not warnings_of(lambda: weights[0].sum())
    weights[0] = nn.Parameter(torch.randn(6, 3))
    copied = copy.deepcopy(weights)
    for each in (weights, copied):
        with torch.no_grad():
            assert not warnings_of(lambda each=each: each[0].sum())
        (text,) = warnings_of(lambda each=each: [each[0].sum() for _ in range(2)])
        assert "`0` of ParameterList has lost its Stiefel tag" in text
