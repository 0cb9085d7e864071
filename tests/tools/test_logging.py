"""Curves of orthonormality; loggers of other packages: tests/integrations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from training import train

import stiefel_opt as so


class Writer:
    """What is asked of a SummaryWriter."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))


def logged_model():
    torch.manual_seed(0)
    return nn.Sequential(
        so.constrain(nn.Linear(6, 5), heads=5),
        nn.Sequential(so.orthogonal(nn.Linear(5, 6), map="trivialization", every=2, scale=2.0)),
        so.orthogonal(nn.Linear(6, 4)),
        nn.Linear(4, 2),
    )


def trained_with(writer, generator, **options):
    model = logged_model()
    opt = so.StiefelAdam(model.parameters(), lr=0.01)
    handle = so.log_orthonormality(opt, model, writer, **options)
    train(opt, lambda: model(torch.randn(3, 6, generator=generator)).square().sum(), 7)
    return model, opt, handle


def test_errors_are_logged_every_so_many_steps_under_their_names(generator):
    writer = Writer()
    model, opt, handle = trained_with(writer, generator, every=3, first_step=2)
    tags = ["orthonormality_error/max"]
    tags += [f"orthonormality_error/{name}.weight" for name in ("0", "1.0", "2")]
    assert [(tag, step) for tag, _, step in writer.points] == [
        (tag, step) for step in (3, 6, 9) for tag in tags
    ]
    values = {tag: value for tag, value, step in writer.points if step == 9}
    weights = model[0].weight, model[1][0].weight / 2, model[2].weight
    expected = [
        float(so.orthonormality_error(weight, reading))
        for weight, reading in zip(weights, (so.Stiefel(heads=5), None, None), strict=True)
    ]
    assert list(values.values()) == pytest.approx([max(expected), *expected], rel=1e-3, abs=1e-8)
    assert 0 < max(values.values()) < 1e-5
    handle.remove()
    opt.step()
    assert len(writer.points) == 12


def test_errors_by_name_are_floats_of_the_lines_of_the_report_and_their_largest():
    model = logged_model()
    errors = so.orthonormality_errors(model)
    lines = {f"orthonormality_error/{line.name}": line.error for line in so.report(model).lines}
    assert errors == {"orthonormality_error/max": max(lines.values()), **lines}
    assert all(type(value) is float for value in errors.values())
    assert so.orthonormality_errors(nn.Linear(2, 2)) == {}
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    assert math.isnan(so.orthonormality_errors(model)["orthonormality_error/max"])
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got list"):
        so.orthonormality_errors([])


@pytest.mark.usefixtures("as_accelerator")
def test_all_errors_are_read_from_the_device_at_once(monkeypatch):
    model, reads = logged_model(), []
    for name in ("item", "tolist", "__float__", "__bool__", "__int__", "__index__"):
        read = getattr(torch.Tensor, name)

        def counted(self, read=read, name=name):
            reads.append(name)
            return read(self)

        monkeypatch.setattr(torch.Tensor, name, counted)
    so.orthonormality_errors(model)
    assert reads == ["tolist"]


def test_logging_changes_nothing_in_the_training():
    states = []
    for options in ({"every": 1}, {"every": 1000}):
        generator = torch.Generator().manual_seed(0)
        states.append(trained_with(Writer(), generator, **options)[0].state_dict())
    for value, other in zip(states[0].values(), states[1].values(), strict=True):
        assert torch.equal(value, other)


def test_a_process_without_writer_takes_part_and_an_error_shows(generator):
    trained_with(None, generator, every=1)
    model = nn.Sequential(so.constrain(nn.Linear(4, 4)), nn.Linear(4, 4))
    writer, opt = Writer(), so.StiefelSGD(model.parameters(), lr=0.1, stiefel=False)
    so.log_orthonormality(opt, model, writer, every=1, tag="error")
    model(torch.ones(2, 4)).square().sum().backward()
    opt.step()
    assert [tag for tag, _, _ in writer.points] == ["error/max", "error/0.weight"]
    assert writer.points[0][1] == float(so.orthonormality_error(model)) > 1e-3


def test_nothing_is_logged_of_a_model_without_values():
    with torch.device("meta"):
        model = so.constrain(nn.Linear(2, 2))
    writer, opt = Writer(), so.StiefelSGD(model.parameters(), lr=0.1)
    so.log_orthonormality(opt, model, writer, every=1)
    opt.step()
    assert not writer.points


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"optimizer": None}, TypeError, "`optimizer` must be a torch.optim.Optimizer, got None"),
        ({"model": []}, TypeError, "`model` must be a torch.nn.Module, got list"),
        ({"model": nn.Linear(2, 2)}, ValueError, "`model` must have an orthonormal weight, got a"),
        ({"writer": 3}, TypeError, r"`writer` must have a method add_scalar \(.* got int"),
        ({"every": 0}, ValueError, "`every` must be at least 1, got 0"),
        ({"first_step": -1}, ValueError, "`first_step` must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_logged_is_an_error(change, error, message):
    model = so.constrain(nn.Linear(2, 2))
    opt = so.StiefelSGD(model.parameters(), lr=0.1)
    given = {"optimizer": opt, "model": model, "writer": Writer(), **change}
    with pytest.raises(error, match=message):
        so.log_orthonormality(**given)
