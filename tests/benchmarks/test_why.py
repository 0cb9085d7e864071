"""What `accuracy/why.py` measures is what it says, and its control differs in the tag alone."""

import importlib
import itertools
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch

import stiefel_opt as so

ROOT = Path(__file__).parents[2]


@pytest.fixture
def why() -> ModuleType:
    return importlib.import_module("benchmarks.accuracy.why")


@pytest.mark.parametrize("methods", [("tagged", "free"), ("adaptive", "free-adaptive")])
@pytest.mark.parametrize("name", ["Copier", "Plain", "Reader"])
def test_the_free_network_starts_where_the_tagged_one_does(
    why: ModuleType, name: str, methods: tuple[str, str]
) -> None:
    sizes = () if name == "Copier" else (3,)
    models = []
    for method in methods:
        torch.manual_seed(1)
        models.append(getattr(why, name)(method, *sizes))
    tagged, free = models
    assert so.orthonormality_error(tagged) < 1e-5
    for key, value in free.state_dict().items():
        torch.testing.assert_close(tagged.state_dict()[key], value, rtol=0, atol=1e-5)


def test_singular_values_are_those_of_the_jacobian(why: ModuleType) -> None:
    torch.manual_seed(2)
    model = why.Plain("gaussian", 4).double()
    x = torch.randn(64, dtype=torch.float64)
    smallest, median, largest = model.jacobian(x[None])

    def last(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x).tanh()
        return x

    values = torch.linalg.svdvals(torch.autograd.functional.jacobian(last, x))
    expected = (float(values[-1]), float(values.median()), float(values[0]))
    assert (smallest, median, largest) == pytest.approx(expected, rel=1e-8)


def test_noise_is_the_spread_of_the_gradient_by_the_logits(why: ModuleType) -> None:
    torch.manual_seed(3)
    model = why.Reader("tagged", 1)
    inputs, labels = torch.randn(64, 64).repeat(16, 1), torch.randint(10, (64,)).repeat(16)
    same = why.logit_noise(model, inputs, labels)
    assert same["noise"] < 1e-4 * same["signal"]
    other = why.logit_noise(model, torch.randn(1024, 64), torch.randint(10, (1024,)))
    assert other["noise"] > 0.1 * other["signal"]


def test_a_run_is_a_file_and_is_not_repeated(
    why: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("sklearn")
    command = ["why.py", "--folder", str(tmp_path), "--seeds", "0", "--steps", "2"]
    command += ["--pictures", "deep", "--sizes", "20", "--methods", "tagged"]
    monkeypatch.setattr("sys.argv", command)
    why.main()
    why.main()
    stored = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert sorted(run["rate"] for run in stored) == why.RATES
    assert capsys.readouterr().out.count("deep-20-tagged") == len(stored) == 9
    assert all(run["steps"] == 2 and math.isfinite(run["accuracy"]) for run in stored)
    monkeypatch.setattr("sys.argv", [*command, "--steps", "3"])
    with pytest.raises(ValueError, match=r"must hold runs of {'steps': 2}, got {'steps': 3}"):
        why.main()


def test_the_unconstrained_adaptive_rule_is_that_of_stiefel_adam(why: ModuleType) -> None:
    """A column that hardly turns moves as a vector without constraint does."""
    draw, lr = torch.Generator().manual_seed(0), 1e-7
    column = so.ManifoldParameter(torch.eye(65, 1, dtype=torch.float64))
    optimizer = so.AdaptiveAdam([column], lr=lr, transport="projected")
    plain, friction = torch.zeros(64, dtype=torch.float64), why.Friction(torch.zeros(64).double())
    steady, factors = torch.randn(64, generator=draw, dtype=torch.float64), []
    for step in range(60):
        noise = torch.randn(64, generator=draw, dtype=torch.float64)
        gradient = noise + steady * (3 if step < 10 else 3 * (-1) ** (step // 3))
        column.grad = torch.cat([torch.zeros(1), gradient]).unsqueeze(-1)
        optimizer.step()
        plain = plain + lr * friction.move(gradient)
        factors.append(friction.factor)
    changes = [new / old for old, new in itertools.pairwise(factors)]
    assert min(changes) < 0.95 < 1.1 < max(changes)
    torch.testing.assert_close(column.detach()[1:, 0], plain, rtol=1e-5, atol=1e-11)


def test_tables_are_those_of_the_values(why: ModuleType) -> None:
    content = json.loads((ROOT / "benchmarks/results/why.json").read_text(encoding="utf-8"))
    assert content["setting"]["rates"] == why.RATES
    assert why.why_tables.tables(content["values"], why.RATES) == content["tables"]


def test_only_whole_seeds_count(why: ModuleType) -> None:
    def run(seed: int, rate: float) -> dict[str, object]:
        keys = {"picture": "copying", "size": 9, "method": "free", "accuracy": 0.5}
        return keys | {"seed": seed, "rate": rate}

    runs = [run(seed, rate) for seed, rate in itertools.product(range(3), why.RATES)][:-1]
    values = why.why_tables.collect(runs, why.RATES)
    kept = {why.why_tables.METHODS["free"]: {"right": [[50.0, 50.0]] * 9}}
    assert values == {"copying": {"9": kept}}


def test_the_sentences_of_the_page_hold(why: ModuleType) -> None:
    content = json.loads((ROOT / "benchmarks/results/why.json").read_text(encoding="utf-8"))

    def means(picture: str, size: str, method: str, key: str = "right") -> list[float]:
        kept = content["values"][picture][size][why.why_tables.METHODS[method]][key]
        return [why.why_tables.centre(entries, key) for entries in kept]

    def highest(picture: str, size: str, method: str) -> float:
        """The highest rate at which three of four answers are right."""
        reached = zip(why.RATES, means(picture, size, method), strict=True)
        return max(rate for rate, mean in reached if mean >= 75)

    ratio = highest("copying", "100", "tagged") / highest("copying", "100", "free")
    assert ratio == pytest.approx(10**0.5, rel=0.05)
    ratio = highest("deep", "50", "tagged") / highest("deep", "50", "free")
    assert ratio == pytest.approx(10**1.5, rel=0.05)
    assert max(means("deep", "50", "free")) > max(means("deep", "50", "tagged")) + 1
    assert max(means("copying", "100", "free")) < max(means("copying", "100", "tagged")) - 1
    assert max(means("deep", "50", "default")) < 20
    assert max(means("copying", "100", "lstm")) < 20
    tagged, free = (means("queries", "2", m, "largest logit") for m in ("tagged", "free"))
    assert free[-1] > 100 * tagged[-1]
    assert max(tagged) < 20
