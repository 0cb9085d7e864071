"""When to constrain: the copies of a batch, torch's rules in it, and what its file says."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from benchmarks.accuracy import small_arms, when_to_constrain
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


def test_muon_takes_heads_for_rows_of_one_matrix() -> None:
    weight, grad = torch.randn(2, 1, 1, 12, 8).unbind()
    lr, arm = torch.full((1, 1, 1, 1), 0.1), [ARMS["Muon"]]
    whole, heads = begun(weight, arm, 1), begun(weight.reshape(1, 3, 4, 8), arm, 3)
    whole.step(grad, lr)
    heads.step(grad.reshape(1, 3, 4, 8), lr)
    torch.testing.assert_close(heads.value().reshape(weight.shape), whole.value())


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


def test_jobs_of_a_stage_are_one_table_and_the_second_stage_has_its_own_file(
    tmp_path: Path,
) -> None:
    name, jobs = "perceptron, digits", []
    for seeds, rates in (((10, 11), (0.001, 0.01)), ((12,), (0.001, 0.01))):
        jobs.append(Job("stage 2", name, ("NAdam", "fixed 1"), rates, seeds, 1))
    jobs.append(Job("stage 1", name, ("NAdam",), (0.01,), (0,), 0.01))
    network = when_to_constrain.NETWORKS[name](Path())
    network.steps = 1
    for job in jobs:
        rows = train(network, job)
        head = job._asdict() | {"seconds": 1.0, "machine": {"date": ""}}
        text = "\n".join(map(json.dumps, [head, *rows]))
        (tmp_path / f"{job.name}.jsonl").write_text(text)
    files = when_to_constrain.merged(tmp_path)
    part = "stage 2, short, falling"
    stored = {file.name: [*content["parts"]] for file, content in files.items()}
    assert stored == {
        "when_to_constrain_runs.json": ["stage 1"],
        "when_to_constrain_stage_2_short_falling.json": [part],
    }
    (kept,) = (content["parts"][part] for content in files.values() if part in content["parts"])
    values = when_to_constrain.unpacked(kept)[name]["fixed 1"]
    assert values["rates"] == [0.001, 0.01]
    rows = [row for job in jobs[:2] for row in train(network, job) if row["arm"] == "fixed 1"]
    for measure in MEASURES:
        wanted = [[row[measure] for row in rows if row["rate"] == rate] for rate in (0.001, 0.01)]
        for ours, theirs in zip(values[measure], wanted, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-2)


def test_a_lost_copy_counts_as_one_that_guesses() -> None:
    network = when_to_constrain.NETWORKS["perceptron, digits"](Path())
    network.steps = 12
    lost, other = train(network, Job("", "", ("AdamW",), (1e20, 0.01), (0,)))
    assert lost["test"] == pytest.approx(math.log(10), rel=1e-3)
    assert lost["right"] == 10.0
    assert other["test"] < 2.2


def test_every_arm_runs_and_has_its_row() -> None:
    tables = when_to_constrain.quick(Path())["tables"]
    rows = tables["stage 1: arms"].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == list(ARMS)
    assert len(tables["stage 1"].splitlines()) == 2 + len(when_to_constrain.QUICK)


def test_scales_stay_where_they_are_asked_to() -> None:
    torch.manual_seed(0)
    weight, lr = torch.randn(1, 2, 6, 5), torch.full((1, 1, 1, 1), 0.03)
    for name in ("learned, pull 1", "fixed 1", "learned from initial, floor"):
        one = begun(weight, [ARMS[name]], 1)
        assert isinstance(one, small_arms.ConstrainedWeights)
        for _ in range(200):
            one.step(torch.randn(1, 2, 6, 5), lr)
        share = one.g / one.target
        assert small_arms.error(one) < 1e-5
        if name == "fixed 1":
            assert (share == 1).all()
        else:
            assert (share >= one.floor / one.target).all()
            assert (share < 2).all()


def test_the_file_holds_what_its_runs_say() -> None:
    stored = json.loads(when_to_constrain.FILE.read_text(encoding="utf-8"))
    assert stored["tables"] == when_to_constrain.stored_summary()["tables"]
    runs = json.loads(when_to_constrain.RUNS.read_text(encoding="utf-8"))["parts"]["stage 1"][
        "runs"
    ]
    assert all({*DECIDING} <= {*arms} for name, arms in runs.items() if name in NETWORKS)
    assert stored["largest orthonormality error"] < 1e-5
