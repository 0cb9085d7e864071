"""Exported modules compute what the module does, and pass on its gradients."""

import pytest
import torch
from torch import nn

import stiefel_opt as so


@pytest.mark.parametrize(
    ("map_name", "features"), [("cwy", (8, 8)), ("cwy", (300, 300)), ("tcwy", (8, 4))]
)
def test_compact_products_are_exported_with_their_gradients(
    map_name: str, features: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    layer = so.orthogonal(nn.Linear(*features, bias=False), map=map_name)
    x = torch.randn(2, features[0])
    exported = torch.export.export(layer, (x,)).module()
    results = []
    for module in (layer, exported):
        out = module(x)
        (*_, last) = module.parameters()
        (grad,) = torch.autograd.grad(out.square().sum() + out.sum(), last)
        results.append((out.detach(), grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(exported(x), results[0][0])
