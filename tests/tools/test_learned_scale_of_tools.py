"""What tools show, average and clip where a scale is learned."""

from __future__ import annotations

import math

import pytest
import torch
from cases import in_turn
from scale_cases import (
    LAYOUTS,
    g_of,
    net,
    scales,
    train,
    weight,
)
from torch import nn

import stiefel_opt as so


def test_curves_of_scales() -> None:
    class Writer:
        written: dict[str, float] = {}  # noqa: RUF012

        def add_scalar(self, name: str, value: float, step: int) -> None:  # noqa: ARG002
            self.written[name] = value

    model = net()
    opt = so.StiefelAdamW(model.parameters(), lr=0.01)
    so.log_orthonormality(opt, model, Writer(), every=1)
    train(model, opt, range(1))
    assert Writer.written["scale/2.weight"] == pytest.approx(float(g_of(model[2].weight)))
    assert Writer.written["orthonormality_error/max"] < 1e-6


@pytest.mark.parametrize(("layout", "decay"), in_turn(LAYOUTS, [None, 0.5, 0.98]))
def test_averages_of_learned_scales(layout: str, decay: float | None) -> None:
    """The scales are averaged as numbers are; a matrix is the polar factor of the mean."""
    source = weight(layout)
    reading = source.manifold
    holder = nn.ParameterDict({"w": source})
    average = so.averaged(holder, decay)
    mean, means = source.detach(), torch.zeros(())
    for update in range(8):
        # far away, near and as it was: every branch, up to a singular value decomposition
        with torch.no_grad():
            source.add_((1.0, 0.05, 0.0)[update % 3] * torch.randn_like(source))
            so.project_(source)
        average.update_parameters(holder)
        keep = update / (update + 1) if decay is None else decay * (update > 0)
        means = keep * means + (1 - keep) * scales(source, reading)
        mean = so.project_(keep * mean + (1 - keep) * source.detach(), reading)
        index = 0
        for number, part in enumerate(reading.parts(mean)):
            own = reading.matrices(part, number)
            count = own.shape[:-2].numel()
            wanted = means[index : index + count].reshape(*own.shape[:-2], 1, 1)
            own = own * (wanted / reading.scale_of(own))
            part.copy_(reading.stored(own.to(part.dtype), part.shape, number))
            index += count
    kept = average.module["w"]
    near = 5e-2 if kept.dtype == torch.bfloat16 else 1e-9
    torch.testing.assert_close(scales(kept, reading), means, rtol=near, atol=0)
    torch.testing.assert_close(kept.detach(), mean, rtol=0, atol=near)
    assert float(so.orthonormality_error(kept)) < near
    assert kept.manifold == reading


def test_a_norm_of_gradients_counts_what_moves_the_scale() -> None:
    parameter = weight("tall", scale=2.0)
    parameter.grad = parameter.detach().clone()  # all of it is along g
    found = so.clip_grad_norm_([parameter], math.inf)
    torch.testing.assert_close(found, torch.linalg.vector_norm(parameter.detach()))


def test_another_optimizer_that_cannot_learn_a_scale_names_the_one_that_can() -> None:
    parameter = weight("tall")
    opt = so.on_manifold(torch.optim.SGD([parameter], lr=0.1))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="StiefelAdamW"):
        opt.step()


def test_a_penalty_is_zero_at_every_scale() -> None:
    model = net(3.0)
    assert float(so.orthonormality_penalty(model, 1.0).detach()) < 1e-9
