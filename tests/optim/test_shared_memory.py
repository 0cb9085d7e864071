"""Parameters that share memory: refused where one of them is constrained, and accepted as views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import in_turn
from contract import RULES, tried_with, warnings_of
from contract import optimizer as make
from torch import Tensor, nn
from training import train

import stiefel_opt as so


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Two tensors of one buffer."""
    buffer = so.random_point(12, 12, dtype=dtype).contiguous()
    flat = buffer.flatten()
    return {
        "the same": lambda: (buffer, buffer.view(12, 12)),
        "transposed": lambda: (buffer, buffer.T),
        "rows of it": lambda: (buffer, buffer[3:7]),
        "columns of it": lambda: (buffer[:, ::2], buffer[:, 4:7]),
        "behind, by one entry": lambda: (flat[:72].view(8, 9), flat[71:143].view(9, 8)),
        "as real numbers": lambda: (buffer, torch.view_as_real(buffer).flatten(1)),
    }[kind]()


SHARED = ("the same", "transposed", "rows of it", "columns of it", "behind, by one entry")


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("second_is_tagged", [False, True])
@tried_with("sgd", "adam")
def test_shared_memory_is_refused(kind: str, second_is_tagged: bool, name: str) -> None:
    one, other = map(nn.Parameter, pair(kind))
    tagged, plain = (other, one) if second_is_tagged else (one, other)
    tagged.__class__ = type(so.ManifoldParameter(torch.eye(2)))
    tagged.manifold = so.Stiefel()  # type: ignore[attr-defined]
    before = one.detach().clone(), other.detach().clone()
    for params in ([tagged, plain], [plain, tagged]):
        with pytest.raises(ValueError, match="must have memory of its own: it shares some with"):
            make(name, params)
    with pytest.raises(ValueError, match=r"shares some with parameter 0 of group [01]"):
        make(name, [{"params": [tagged]}, {"params": [plain]}])
    opt = make(name, [tagged])
    with pytest.raises(ValueError, match=r"second[.]weight = first[.]weight"):
        opt.add_param_group({"params": [plain]})
    assert len(opt.param_groups) == 1
    assert torch.equal(before[0], one)
    assert torch.equal(before[1], other)


def test_complex_numbers_beside_their_real_parts_are_refused() -> None:
    tagged, plain = map(nn.Parameter, pair("as real numbers", torch.complex64))
    with pytest.raises(ValueError, match="memory of its own"):
        so.StiefelAdam([tagged, plain], stiefel=True)


DISJOINT: dict[str, Any] = {
    "halves": lambda b: (b[:6], b[6:]),
    "columns, interleaved": lambda b: (b[:, ::2], b[:, 1::2]),
    "columns side by side": lambda b: (b[:, :5], b[:, 5:]),
    "a corner and its row": lambda b: (b[:6, :6], b[:6, 6:]),
    "every third": lambda b: (b.flatten()[::3].view(8, 6), b.flatten()[1::3].view(6, 8)),
    "copies": lambda b: (b, b.clone()),
    "empty": lambda b: (b, b[:0]),
}


@pytest.mark.parametrize(("case", "name"), in_turn(DISJOINT, RULES))
def test_views_that_share_no_entry_are_accepted(case: str, name: str) -> None:
    one, other = DISJOINT[case](torch.randn(12, 12))
    params = [nn.Parameter(one), nn.Parameter(other)]
    tagged = params if other.numel() else params[:1]
    for p in tagged:
        layer = nn.Module()
        layer.weight = p
        so.constrain(layer)
    opt = make(name, params)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape)
        opt.step()
    assert all(float(so.orthonormality_error(p)) < 1e-5 for p in tagged)


@pytest.mark.parametrize("cell", [nn.GRU, nn.LSTM])
def test_weights_that_are_flattened_as_cudnn_does_are_accepted(cell: Any) -> None:
    """Views behind each other on one buffer, as ``flatten_parameters`` makes them on a GPU."""
    net = cell(6, 6, num_layers=2)
    weights = net._flat_weights
    buffer = torch.cat([p.detach().flatten() for p in weights])
    pieces = buffer.split([p.numel() for p in weights])
    for p, piece in zip(weights, pieces, strict=True):
        p.data = piece.view(p.shape)
    so.constrain(net, "weight_hh_*")
    opt = so.StiefelAdam(net.parameters(), lr=0.1)
    train(opt, lambda: net(torch.randn(5, 2, 6))[0].square().sum(), 3)
    assert so.orthonormality_error(net) < 1e-5
    assert weights[0].untyped_storage().data_ptr() == weights[-1].untyped_storage().data_ptr()


def test_plain_parameters_may_share_memory_as_in_torch() -> None:
    one, other = map(nn.Parameter, pair("transposed"))
    assert not warnings_of(lambda: so.StiefelSGD([one, other], stiefel=False))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_late_constraint_is_refused_too(stepped: bool) -> None:
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(one.weight.data.T)
    third = so.ManifoldParameter(torch.eye(3, 2))
    opt = so.StiefelSGD([third, one.weight, other.weight], lr=0.1)
    for p in (third, one.weight, other.weight):
        p.grad = torch.zeros_like(p)
    if stepped:
        opt.step()
    so.constrain(one)
    with pytest.raises(ValueError, match="memory of its own"):
        opt.step()
