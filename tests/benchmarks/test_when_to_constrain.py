"""When to constrain: the copies of a batch, torch's rules in it, and what its file says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from benchmarks.accuracy import when_to_constrain
from benchmarks.accuracy.small_arms import ARMS, DECIDING, begun
from benchmarks.accuracy.when_to_constrain import NETWORKS

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
