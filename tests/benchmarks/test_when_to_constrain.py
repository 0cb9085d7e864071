"""When to constrain: the copies of a batch, torch's rules in it, and what its file says."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from benchmarks.accuracy import when_to_constrain
from benchmarks.accuracy.small_arms import ARMS, DECIDING, begun
from benchmarks.accuracy.small_networks import Pixels, Text
from benchmarks.accuracy.when_to_constrain import MEASURES, NETWORKS, Job, train

Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
CONSTANT = {"momentum_decay": 1e4, "decoupled_weight_decay": True, "weight_decay": 0.01}
RULES: dict[str, tuple[Optimizer, float]] = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01), 1e-6),
    "AdamW, decay 1": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=1.0), 1e-6),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.01, **CONSTANT), 1e-6),
    "Muon": (  # torch's works in bfloat16
        lambda p: torch.optim.Muon(
            p, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        ),
        2e-3,
    ),
    "weight norm": (lambda p: torch.optim.AdamW(p, lr=0.01), 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_the_rules_are_those_of_torch(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, slope = torch.randn(12, 7, generator=generator) / 3, torch.randn(12, 12)
    layer = torch.nn.Linear(7, 12, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    if name == "weight norm":
        torch.nn.utils.parametrizations.weight_norm(layer)
    make, tolerance = RULES[name]
    optimizer, ours = make([*layer.parameters()]), begun(weight[None, None], [ARMS[name]], 1)
    for _ in range(20):
        grad = slope @ layer.weight.detach() + torch.randn(12, 7, generator=generator)
        optimizer.zero_grad()
        (layer.weight * grad).sum().backward()
        optimizer.step()
        ours.step(grad[None, None], torch.full((1, 1, 1, 1), 0.01))
    assert (ours.value()[0, 0] - layer.weight).abs().max() < tolerance


def test_a_scaled_copy_trains_as_the_package_does() -> None:
    assert when_to_constrain.check() < 1e-5


def random_pixels(name: str, _: Path, count: int, pool: int) -> Pixels:
    """As many pixels as the data have."""
    size = {"digits": 64, "mnist": 196, "cifar10": 192}[name]
    generator = torch.Generator().manual_seed(count + pool)
    inputs, labels = torch.randn(80, size, generator=generator), torch.arange(80) % 10
    return Pixels((inputs, labels), (inputs[:40], labels[:40]))


@pytest.fixture
def without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(when_to_constrain, "pixels", random_pixels)
    monkeypatch.setattr(
        when_to_constrain, "sentences", lambda *_: Text("to be or not to be? " * 99)
    )


SMALL = [name for name in when_to_constrain.EVERY if "width" not in name]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("without_data")
def test_a_copy_trains_as_it_does_alone(name: str) -> None:
    network = when_to_constrain.EVERY[name](Path())
    network.steps = 3
    arms = ("NAdam", "Muon", "learned, pull .3")
    several = train(network, Job("", name, arms, (0.01, 0.03), (0, 1)))
    for row in several[1::5]:
        (alone,) = train(network, Job("", name, (row["arm"],), (row["rate"],), (row["seed"],)))
        for key in ("train", "test"):
            assert math.isclose(row[key], alone[key], rel_tol=2e-3), row


@pytest.mark.usefixtures("without_data")
def test_finished_jobs_are_not_run_again(tmp_path: Path) -> None:
    jobs = [Job("stage 1", "perceptron, digits", ("NAdam",), (0.01,), (0,), 0.01)]
    when_to_constrain.run(jobs, Path(), tmp_path)
    (path,) = tmp_path.iterdir()
    before = path.stat().st_mtime_ns
    when_to_constrain.run(jobs, Path(), tmp_path)
    assert path.stat().st_mtime_ns == before
    (file,) = when_to_constrain.merged(tmp_path).values()
    runs = when_to_constrain.unpacked(file["parts"]["stage 1"])
    (row,) = map(json.loads, path.read_text().splitlines()[1:])
    values = runs["perceptron, digits"]["NAdam"]
    assert values["rates"] == [0.01]
    assert [values[name][0][0] for name in MEASURES] == pytest.approx(
        [row[name] for name in MEASURES], rel=1e-2
    )


def test_every_arm_runs_and_has_its_row() -> None:
    tables = when_to_constrain.quick(Path())["tables"]
    rows = tables["stage 1: arms"].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(ARMS)
    assert len(tables["stage 1"].splitlines()) == 2 + len(when_to_constrain.QUICK)


def test_the_file_holds_what_its_runs_say() -> None:
    stored = json.loads(when_to_constrain.FILE.read_text(encoding="utf-8"))
    assert stored["tables"] == when_to_constrain.stored_summary()["tables"]
    runs = json.loads(when_to_constrain.RUNS.read_text(encoding="utf-8"))["parts"]["stage 1"][
        "runs"
    ]
    assert all({*DECIDING} <= {*arms} for name, arms in runs.items() if name in NETWORKS)
    assert stored["largest orthonormality error"] < 1e-5
