"""The curves of `so.log_orthonormality`, read back from the file that TensorBoard writes."""

from __future__ import annotations

import pytest
import torch
from loops import STEPS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from training import train

import stiefel_opt as so


@pytest.mark.filterwarnings("ignore:.* would not stay orthonormal")
@pytest.mark.parametrize("rule", [so.StiefelAdam, torch.optim.Adam])
def test_curves_in_a_file(rule, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        so.orthogonal(nn.Linear(8, 6)), nn.Tanh(), so.constrain(nn.Linear(6, 6)), nn.Linear(6, 2)
    )
    opt = rule(model.parameters(), lr=0.01)
    with SummaryWriter(tmp_path) as writer:
        so.log_orthonormality(opt, model, writer, every=8)
        train(opt, lambda: model(torch.randn(5, 8)).square().sum(), STEPS)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = {f"orthonormality_error/{name}" for name in ("max", "0.weight", "2.weight")}
    assert set(events.Tags()["scalars"]) == tags
    points = events.Scalars("orthonormality_error/max")
    assert [point.step for point in points] == [8, 16, 24]
    assert points[-1].value == pytest.approx(
        float(max(so.orthonormality_error(model), so.orthonormality_error(model[0].weight))),
        rel=1e-5,
    )
    left = rule is torch.optim.Adam  # it knows no manifold: the tagged weight leaves it
    assert (points[-1].value > 1e-3) == left
    assert events.Scalars("orthonormality_error/0.weight")[-1].value < 1e-5
