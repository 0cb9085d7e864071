"""Exported modules compute what the module does, and pass on its gradients."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import in_turn
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import stiefel_opt as so

# torch's own: it exports and differentiates forwards through what it deprecates
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


@pytest.mark.parametrize(
    ("map_name", "features"), [("cwy", (8, 8)), ("cwy", (300, 300)), ("tcwy", (8, 4))]
)
@pytest.mark.parametrize("strict", [False, True])
def test_compact_products_are_exported_with_their_gradients(
    map_name: str, features: tuple[int, int], strict: bool
) -> None:
    torch.manual_seed(0)
    layer = so.orthogonal(nn.Linear(*features, bias=False), map=map_name)
    x = torch.randn(2, features[0])
    exported = torch.export.export(layer, (x,), strict=strict).module()
    results = []
    for module in (layer, exported):
        out = module(x)
        (*_, last) = module.parameters()
        (grad,) = torch.autograd.grad(out.square().sum() + out.sum(), last)
        results.append((out.detach(), grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(exported(x), results[0][0])


# ---- the recurrent network ---------------------------------------------------------------------

NETWORKS: dict[str, dict[str, Any]] = {
    "tagged": {"transition": "tagged", "batch_first": True},
    "cwy of few reflections": {"reflections": 2, "nonlinearity": "relu"},
    "householder, both ways": {"transition": "householder", "bidirectional": True},
    "trivialization, two layers": {"transition": "trivialization", "num_layers": 2},
    "modrelu": {"nonlinearity": "modrelu", "bias": False},
    "abs": {"nonlinearity": "abs", "transition": "cayley"},
    "complex": {"transition": "urnn", "nonlinearity": "modrelu", "dtype": torch.complex64},
}


def network(name: str) -> tuple[so.nn.OrthogonalRNN, torch.Tensor]:
    torch.manual_seed(0)
    options = dict(NETWORKS[name])
    dtype = options.pop("dtype", torch.float64)
    module = so.nn.OrthogonalRNN(3, 6, dtype=dtype, **options)
    return module, torch.randn(4, 2, 3, dtype=torch.float64 if dtype.is_floating_point else None)


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "export": lambda module, x: torch.export.export(module, (x,)).module(),
    "strict export": lambda module, x: torch.export.export(module, (x,), strict=True).module(),
    "fullgraph": lambda module, _: torch.compile(module, fullgraph=True, backend="aot_eager"),
    "trace": lambda module, x: torch.jit.trace(module, (x,)),
}


@pytest.mark.parametrize(
    ("name", "way"), [*itertools.product(["tagged", "modrelu"], WAYS), *in_turn(NETWORKS, WAYS)]
)
def test_recurrent_networks_are_traced_with_their_gradients(name: str, way: str) -> None:
    module, x = network(name)
    torch._dynamo.reset()
    made = WAYS[way](module, x)
    results = []
    for each in (module, made):
        out = each(x)[0]
        weights = [p for _, p in sorted(each.named_parameters())]
        grads = torch.autograd.grad(out.abs().square().sum(), weights)
        results.append([out.detach(), *grads])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_recurrent_networks_are_transformed(name: str) -> None:
    """By the gradient, forward derivatives, and vmap over inputs and over models."""
    module, x = network(name)
    weights = dict(module.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
        return functional_call(module, values, (x,))[0].abs().square().sum()

    found = grad(loss)(weights)
    wanted = torch.autograd.grad(loss(weights), list(weights.values()))
    torch.testing.assert_close(list(found.values()), list(wanted))
    direction = torch.randn_like(x)
    through = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(weights, through), through)
    slope = (slope * direction).sum()
    torch.testing.assert_close(jvp(lambda x: loss(weights, x), (x,), (direction,))[1], slope)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        torch.testing.assert_close(forward_ad.unpack_dual(loss(weights, dual)).tangent, slope)
    torch.testing.assert_close(vmap(module)(torch.stack([x, 2 * x]))[0][1], module(2 * x)[0])
    other = {key: value.detach() + 0.1 for key, value in weights.items() if "weight_ih" in key}
    models = [weights, {**weights, **other}]
    stacked = {key: torch.stack([each[key] for each in models]) for key in weights}
    torch.testing.assert_close(vmap(loss)(stacked), torch.stack([loss(each) for each in models]))
