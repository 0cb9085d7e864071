"""What the report says of each constrained weight."""

import pytest
import torch
from torch import nn

import stiefel_opt as so


def test_the_report_says_how_far_a_weight_moved() -> None:
    net = nn.Linear(8, 8)
    before = net.weight.detach().clone()
    after = so.constrain(net).weight.detach()
    (line,) = so.report(net).lines
    assert line.moved == pytest.approx(float((after - before).norm() / before.norm()))
    assert f"{line.moved:.0%}" in str(so.report(net))
    so.constrain(net)
    assert so.report(net).lines[0].moved == 0
    assert so.report(so.constrain(nn.Linear(8, 8), project=False)).lines[0].moved is None


def test_the_report_says_which_parameter_the_optimizer_does_not_hold() -> None:
    net = so.constrain(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), ["0.weight", "1.weight"])
    first = so.StiefelSGD(net[0].parameters(), lr=0.1)
    lines = {line.name: line for line in so.report(net, first).lines}
    assert lines["0.weight"].held
    assert not lines["1.weight"].held
    assert str(so.report(net, first)).count("not in this optimizer") == 1
    assert all(line.held for line in so.report(net).lines)
    other = torch.optim.SGD(nn.Linear(4, 4).parameters(), lr=0.1)  # as one of copies
    assert all(line.held for line in so.report(net, other).lines)
