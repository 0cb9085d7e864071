"""Weights in which torch stacks several matrices: constrain sees the module and reads each one."""

import pytest
import torch
from torch import nn

import stiefel_opt as so

STACKED = {  # module, parameter, blocks, words of the report
    "LSTM": (lambda: nn.LSTM(6, 8), "weight_hh_l0", 4, "one for each gate"),
    "LSTM, input": (lambda: nn.LSTM(6, 8), "weight_ih_l0", 4, "one for each gate"),
    "LSTM, second layer": (lambda: nn.LSTM(6, 8, 2), "weight_hh_l1", 4, "gate"),
    "LSTM, backwards": (lambda: nn.LSTM(6, 8, bidirectional=True), "weight_hh_l0_reverse", 4, "g"),
    "LSTM, projected": (lambda: nn.LSTM(6, 8, proj_size=3), "weight_hh_l0", 4, "gate"),
    "LSTM, projection": (lambda: nn.LSTM(6, 8, proj_size=3), "weight_hr_l0", 1, ""),
    "LSTMCell": (lambda: nn.LSTMCell(6, 8), "weight_hh", 4, "gate"),
    "GRU": (lambda: nn.GRU(6, 8), "weight_hh_l0", 3, "one for each gate"),
    "GRUCell": (lambda: nn.GRUCell(6, 8), "weight_ih", 3, "gate"),
    "RNN": (lambda: nn.RNN(6, 8), "weight_hh_l0", 1, ""),
    "grouped": (lambda: nn.Conv2d(8, 12, 3, groups=4), "weight", 4, "one for each group"),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), "weight", 8, "one for each group"),
    "depthwise, 1d": (lambda: nn.Conv1d(8, 16, 5, groups=8), "weight", 8, "group"),
    "transposed": (lambda: nn.ConvTranspose2d(8, 12, 3, groups=4), "weight", 4, "group"),
    "one group": (lambda: nn.Conv2d(8, 12, 3), "weight", 1, ""),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", 6, "one for each head of"),
    "attention, keys": (lambda: nn.MultiheadAttention(8, 2, kdim=6), "k_proj_weight", 2, "head"),
    "attention, output": (lambda: nn.MultiheadAttention(8, 2), "out_proj.weight", 1, ""),
    "linear": (lambda: nn.Linear(8, 8), "weight", 1, ""),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3), "weight", 1, ""),
}


def blocks(weight: torch.Tensor, count: int) -> torch.Tensor:
    """The stacked matrices of a weight, each tall."""
    flat = weight.detach() if weight.ndim < 4 and count == 1 else weight.detach().flatten(1)
    found = flat.unflatten(-2, (count, -1))
    return found if found.size(-2) >= found.size(-1) else found.mT


@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("inside", [False, True])
def test_each_block_is_a_matrix_of_its_own(name: str, inside: bool) -> None:
    make, leaf, count, words = STACKED[name]
    module = make()
    if inside:
        so.constrain(nn.ModuleDict({"inner": module}), f"inner.{leaf}")
    else:
        so.constrain(module, leaf)
    weight = module.get_parameter(leaf)
    gram = (found := blocks(weight, count)).mT @ found
    torch.testing.assert_close(gram, torch.eye(gram.size(-1)).expand_as(gram))
    (line,) = so.report(module).lines
    assert words in line.reading
    assert ("one for each" in line.reading) == (count > 1)
    assert line.error < 1e-5


@pytest.mark.parametrize("options", [{"heads": 1}, {"rows": (0, 32)}])
def test_what_is_asked_for_overrides(options: dict[str, object]) -> None:
    lstm = so.constrain(nn.LSTM(6, 8), "weight_hh_l0", **options)
    torch.testing.assert_close(lstm.weight_hh_l0.T @ lstm.weight_hh_l0, torch.eye(8))
    assert "gate" not in str(so.report(lstm))


def test_kernels_one_by_one_are_read_as_asked() -> None:
    conv = so.constrain(nn.Conv2d(8, 8, 3, groups=8), flatten=False)
    assert conv.weight.manifold == so.Stiefel()
