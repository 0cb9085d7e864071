"""What tools show, average and clip where a scale is learned."""

from __future__ import annotations

import math

import pytest
import torch
from scale_cases import (
    g_of,
    net,
    train,
    weight,
)

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


def test_averages_of_learned_scales() -> None:
    model = net()
    opt = so.StiefelSGD(model.parameters(), lr=0.1)
    average = so.averaged(model, decay=0.5)
    for step in range(6):
        train(model, opt, range(step, step + 1))
        average.update_parameters(model)
    kept = average.module[2].weight
    assert float(so.orthonormality_error(average.module)) < 1e-6
    assert kept.manifold.learn_scale
    assert min(1.0, float(g_of(model[2].weight))) < float(g_of(kept))


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
