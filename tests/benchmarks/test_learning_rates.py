"""The programs that measure learning rates: their copies, their tables, and the aim they test."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stiefel_opt as so

pytest.importorskip("sklearn")
pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from benchmarks.accuracy import learning_rates, step_variants, vit_digits
from benchmarks.accuracy.small_problems import (
    Attention,
    Eigenvalues,
    FineTuned,
    Perceptron,
    Problem,
    RowByRow,
    SingularVectors,
    Tucker,
    TwoScales,
    small_images,
)
from benchmarks.accuracy.smollm2_problems import (
    PROJECTIONS,
    FineTunedDecoder,
    HeadRotations,
    LastLayer,
)
from examples import demo
from stiefel_opt.rotations import quantizers


def networks() -> dict[str, Problem]:
    digits, labels = small_images("digits", Path(), 1400, 1)
    deep = Perceptron(digits, labels, (64, *8 * [24], 10), range(1, 8), nonlinearity="tanh")
    return {
        "digits, hidden": Perceptron(digits, labels, (64, 48, 48, 10), (1,)),
        "digits, row by row": RowByRow(digits, labels),
        "digits, fine-tuned": FineTuned(digits, labels, (64, 48, 48, 10), (0, 1)),
        "digits, eight layers": deep,
    }


@pytest.mark.parametrize("method", [pytest.param("AdamW", marks=pytest.mark.slow), "StiefelAdamW"])
def test_a_copy_of_the_vision_transformer_is_that_of_the_demo(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (demo, vit_digits):
        monkeypatch.setattr(module, "TRAINED", 160)
    settings = [vit_digits.Setting(rate, 0.01, 0.0) for rate in (0.001, 0.003)]
    rows = vit_digits.train(method, settings, (3, 4), epochs=1)
    for found, setting, seed in ((rows[0][1], settings[0], 4), (rows[1][0], settings[1], 3)):
        alone = demo.train(method, setting.rate, seed, 1)
        assert math.isclose(found["loss"], alone["loss"], rel_tol=1e-4)


def test_seeds_that_are_run_later_are_those_of_one_run(tmp_path: Path) -> None:
    problem = networks()["digits, hidden"]
    problem.steps = 10
    args = problem, "StiefelAdam", [0.001, 0.01], "short", "decay"
    whole = learning_rates.run(*args, (100, 101, 0, 1))
    key = {"problem": "digits, hidden", "method": "x", "length": "short", "schedule": "decay"}
    lines = [key | learning_rates.run(*args, seeds) for seeds in ((100, 101), (0, 1))]
    path = tmp_path / "store.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    (found,) = learning_rates.read(path).values()
    assert found["seeds"] == whole["seeds"]
    for seeds in ((0,), (100, 1)):
        ours, theirs = (learning_rates.means(run, seeds) for run in (found, whole))
        assert ours == pytest.approx(theirs, rel=1e-3)
    other = key | learning_rates.run(*args[:2], [0.1], *args[3:], (0,))
    path.write_text("\n".join(map(json.dumps, [*lines, other])))
    (found,) = learning_rates.read(path).values()
    assert (found["rates"], found["seeds"]) == ([0.1], [0])  # in place of other learning rates


@pytest.mark.filterwarnings("ignore:`torch.jit")  # what the rivals import
@pytest.mark.parametrize("method", learning_rates.METHODS)
def test_every_method_runs_and_learns(method: str) -> None:
    module = {"geoopt": "geoopt", "POGO,": "pogo"}.get(method.split()[0])
    for word, package in (("Prodigy", "prodigyopt"), ("schedule-free", "schedulefree")):
        module = package if word in method else module
    if module is not None:
        pytest.importorskip(module)
    solve = Eigenvalues(torch.linspace(1, 0, 12), torch.ones(3))
    solve.target = 0.5
    cases: dict[str, Problem] = {"digits, hidden": networks()["digits, hidden"], "PCA": solve}
    if "one factor" in method:
        cases = {"digits, attention": Attention(*small_images("digits", Path(), 1400, 1), batch=20)}
    for name, problem in cases.items():
        if learning_rates.is_run(method, name):
            problem.steps, least = 20, 2.2 if name != "PCA" else 20
            rates, length = learning_rates.rates_of(method, name), "short" if least < 3 else ""
            scores = learning_rates.run(problem, method, rates, length, "constant", (0,))["scores"]
            assert min(min(row) for row in scores) < least


def decoder_problems() -> dict[str, Problem]:
    """What is made of SmolLM2, of random numbers and smaller."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shapes = dict.fromkeys(PROJECTIONS, (24, 24)) | {"k_proj": (8, 24), "v_proj": (8, 24)}
    shapes |= {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}
    weights = {name: random(*shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm", "norm"):
        weights[name] = torch.ones(24)
    angles = torch.arange(6.0).outer(torch.tensor([1.0, 0.1, 0.01, 0.001])).repeat(1, 2)
    turns = torch.stack([angles.cos(), angles.sin()])
    tokens = torch.randint(12, (8, 6), generator=generator)
    known = LastLayer(random(8, 6, 24), tokens, random(12, 24), weights, turns, 1e-5)
    values = random(2, 40, 3, 8)
    values[..., 1] *= 10
    return {
        "SmolLM2, fine-tuned": FineTunedDecoder(known, batch=4),
        "SmolLM2, rotations": HeadRotations(values),
    }


@pytest.mark.filterwarnings("ignore:`torch.jit")  # what POGO imports
@pytest.mark.parametrize("name", decoder_problems())
@pytest.mark.parametrize("method", ["StiefelAdam", "StiefelSGD", "POGO, SGD"])
def test_problems_of_a_decoder_are_learned(method: str, name: str) -> None:
    """More than at a rate that hardly moves; some factors begin with a gradient of zero."""
    if method.startswith("POGO"):
        pytest.importorskip("pogo")
    problem = decoder_problems()[name]
    rates = [1e-6, 0.01, 0.03]
    found = learning_rates.run(problem, method, rates, "short", "constant", (0, 1))
    for still, *moved in zip(*found["scores"], strict=True):
        assert min(moved) < 0.99 * still


def test_the_noise_of_heads_is_that_of_the_package() -> None:
    problem = decoder_problems()["SmolLM2, rotations"]
    assert isinstance(problem, HeadRotations)
    copies = [[p.requires_grad_() for p in problem.start(seed)[0]] for seed in (0, 1)]
    (batch,) = problem.data(0, 0)
    stacked = [torch.stack(same) for same in zip(*copies, strict=True)]
    losses = problem.loss(stacked, [], torch.stack([batch, batch]))
    for copy, loss in zip(copies, problem.measured(stacked, losses), strict=True):
        noises = [
            quantizers.noise_ratio((layer @ rotation).flatten(1), 4)
            for layer, rotation in zip(batch, copy, strict=True)
        ]
        unrotated = quantizers.noise_ratio(problem.values.flatten(2), 4)
        expected = torch.stack(noises).mean() / unrotated
        torch.testing.assert_close(loss, expected)
        for rotation, gradient in zip(copy, torch.autograd.grad(expected, copy), strict=True):
            (found,) = torch.autograd.grad(loss, rotation, retain_graph=True)
            torch.testing.assert_close(found, gradient)


def test_tables_and_figure(tmp_path: Path) -> None:
    store: learning_rates.Store = {}
    problem = networks()["digits, hidden"]
    seeds = (*learning_rates.CHOOSING, *learning_rates.SEEDS)
    problem.steps = 10
    for method in learning_rates.SHOWN:
        for length in ("short", "long"):
            problem.steps = 1 if length == "long" else 10
            key = "digits, hidden", method, length, "decay"
            line = dict(zip(("problem", "method", "length", "schedule"), key, strict=True))
            rates = learning_rates.rates_of(method, key[0])
            found = learning_rates.run(problem, *key[1:2], rates, *key[2:], seeds)
            learning_rates.add(store, line | found)
    content = learning_rates.content_of(store)
    assert content["tables"]["methods"].count("\n| ") == len(learning_rates.SHOWN)
    assert "1.00" in content["tables"]["methods"]
    learning_rates.draw(content, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size < 100_000


@pytest.mark.parametrize("problem", [SingularVectors(), Tucker(), TwoScales()])
@pytest.mark.slow
def test_problems_of_several_matrices_are_solved(problem: Problem) -> None:
    """All of them: the length that is looked at is that of the gradients together."""
    problem.steps, problem.target = 150, 0.1
    for factor in ("", ", one factor"):
        args = f"StiefelSGD, adaptive{factor}", [0.1, 0.3], "", "constant", (0, 1)
        scores = learning_rates.run(problem, *args)["scores"]
        assert max(min(row) for row in zip(*scores, strict=True)) < 150
    starts = [x.requires_grad_() for x in map(torch.clone, problem.start(0)[0])]
    batched = [x.unsqueeze(0) for x in starts]
    for x in batched:
        x.retain_grad()
    problem.loss(batched, [], *(t.unsqueeze(0) for t in problem.data(0, 0))).sum().backward()
    total = learning_rates.gradient_length(batched).square()
    parts = [learning_rates.gradient_length([x]).square() for x in batched]
    torch.testing.assert_close(total, sum(parts, torch.zeros_like(total)))


def a_store(methods: tuple[str, ...], names: tuple[str, ...]) -> learning_rates.Store:
    """Scores that are random numbers."""
    generator, store = torch.Generator().manual_seed(len(methods)), {}
    seeds = [*learning_rates.CHOOSING, *learning_rates.SEEDS]
    for method in methods:
        for name in names:
            for length, schedule in (("short", "decay"), ("long", "constant")):
                scores = torch.rand(5, len(seeds), generator=generator) + 0.1
                found = {"seeds": seeds, "scores": scores.tolist()}
                store[name, method, length, schedule] = found
    return store


def test_merged_files_are_the_file_of_one_run(tmp_path: Path) -> None:
    methods, names = learning_rates.OURS, ("digits, all", "PCA, weighted")
    store = a_store(methods, names)
    whole = learning_rates.content_of(store)
    parts = [{k: v for k, v in store.items() if k[1] == method} for method in methods]
    merged = learning_rates.content_of(parts[0])
    for part in parts[1:]:
        merged = learning_rates.content_of(part, merged)
    again = learning_rates.content_of({}, merged)
    for name in ("runs", "choosing", "compared", "tables"):
        assert merged[name] == again[name] == whole[name], name
    learning_rates.save(whole, tmp_path / "results.json")
    assert learning_rates.load(tmp_path / "results.json")["runs"] == whole["runs"]
    replaced = learning_rates.content_of(
        dict.fromkeys(parts[1], next(iter(parts[0].values()))), whole
    )
    assert replaced["runs"][methods[0]] == whole["runs"][methods[0]]
    assert replaced["runs"][methods[1]] != whole["runs"][methods[1]]


def test_runs_on_file_without_the_seeds_that_choose_have_no_common_rate() -> None:
    whole = learning_rates.content_of(a_store(learning_rates.OURS, ("digits, all", "copying")))
    pair = " / ".join(learning_rates.PAIRS[0])
    for missing, problems in ((["copying"], 1), (["copying", "digits, all"], 0)):
        for own in whole["choosing"].values():
            for name in [name for name in own if name.startswith(tuple(missing))]:
                del own[name]
        fewer = learning_rates.content_of({}, whole)
        assert fewer["runs"] == whole["runs"]
        new, old = fewer["compared"][pair], whole["compared"][pair]
        assert (new["mean"], new["problems"], new["problems, one rate"]) == (
            old["mean"],
            2,
            problems,
        )
        table = fewer["tables"][f"ratios, {pair}"]
        assert table.count(" - |") == 2 - problems


# ---- steps that the package does not have --------------------------------------------------------

SHAPES = pytest.mark.parametrize("shape", [(12, 4), (6, 6)])


def weighted(shape: tuple[int, int]) -> Any:
    """A weighted eigenvalue problem, and a start of three copies."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(3, shape[0], shape[0], generator=generator, dtype=torch.float64)
    weights = torch.arange(1.0, shape[1] + 1, dtype=torch.float64)
    start = so.random_point(*shape, generator=generator, dtype=torch.float64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return ((factor @ factor.mT @ x) * x * weights).sum()

    return loss, start.expand(3, *shape).contiguous()


def train(optimizer: Any, parameters: list[torch.Tensor], loss: Any, steps: int = 40) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum(map(loss, parameters)).backward()
        optimizer.step()


@SHAPES
@pytest.mark.parametrize("divided", [False, True])
def test_adaptive_steps_of_one_matrix_are_those_of_the_package(
    divided: bool, shape: tuple[int, int]
) -> None:
    loss, start = weighted(shape)
    ours, theirs = so.ManifoldParameter(start.clone()), torch.nn.Parameter(start.clone())
    cls = so.AdaptiveAdam if divided else so.AdaptiveSGD
    train(cls([ours], lr=0.05, transport="projected"), [ours], loss)
    own = step_variants.SharedFriction([theirs], 0.05, scope="matrix", divided=divided)
    train(own, [theirs], loss)
    assert loss(ours) < 0.6 * loss(start)
    torch.testing.assert_close(theirs.detach(), ours.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scope", ["heads", "all"])
@pytest.mark.parametrize("divided", [False, True])
def test_equal_matrices_that_share_a_factor_move_as_one(divided: bool, scope: str) -> None:
    """Another one beside them changes their steps if all share, and not if it is no head."""
    loss, start = weighted((12, 4))
    found = []
    for count in (1, 2, 3):
        starts = [start, start, start.flip(-1)][:count]
        points = [torch.nn.Parameter(point.clone()) for point in starts]
        groups = [{"params": points, "heads": min(count, 2)}]
        optimizer = step_variants.SharedFriction(groups, 0.05, scope=scope, divided=divided)
        train(optimizer, list(points), loss)
        found.append(points[0].detach())
    torch.testing.assert_close(found[1], found[0])
    assert torch.allclose(found[2], found[0]) == (scope == "heads")


@SHAPES
@pytest.mark.parametrize("name", ["RadiusSGD", "EntriesSGD", "RadiusMuon"])
def test_a_radius_divides_the_learning_rate(name: str, shape: tuple[int, int]) -> None:
    loss, start = weighted(shape)
    cls, rate = getattr(step_variants, name), 0.02
    grown, plain = (so.ManifoldParameter(start[:1].clone()) for _ in range(2))
    base = so.StiefelMuon if name == "RadiusMuon" else so.StiefelSGD

    def loss_of_one(x: torch.Tensor) -> Any:
        return loss(x.expand_as(start))

    (gradient,) = torch.autograd.grad(loss_of_one(grown), grown)
    x = start[:1]
    tangent = gradient - x @ gradient.mT @ x
    length = {
        "RadiusSGD": 10 * float(tangent.norm()) / shape[1] ** 0.5,
        "EntriesSGD": shape[0] ** 0.5,
        "RadiusMuon": 1.0,
    }[name]
    radius = math.sqrt(1 + (rate * length) ** 2)
    optimizer = cls([grown], lr=rate)
    train(optimizer, [grown], loss_of_one, 1)
    train(base([plain], lr=rate / radius), [plain], loss_of_one, 1)
    torch.testing.assert_close(grown.detach(), plain.detach())
    assert math.isclose(optimizer.state[grown]["radius_growth"].item(), radius**2 - 1)


# ---- the aim -------------------------------------------------------------------------------------

SEEDS = tuple(range(20))


def losses(rule: Any, rates: list[float], swept: str, steps: int = 50) -> list[float]:
    """Geometric means over networks and seeds; the rate of the other kind of weights is 0.02."""

    def build(rates: list[float], points: Any, plain: Any) -> learning_rates.Setup:
        if rule is not torch.optim.Adam:
            points = [[so.ManifoldParameter(p.detach()) for p in row] for row in points]
        groups = []
        for rate, tagged, others in zip(rates, points, plain, strict=True):
            for kind, parameters in (("constrained", tagged), ("plain", others)):
                own = rate if kind == swept else 0.02
                groups.append({"params": parameters, "lr": own, "first_lr": own})
        joined = learning_rates.joined
        return learning_rates.Setup([rule(groups)], joined(points), joined(plain))

    totals = torch.zeros(len(rates))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(learning_rates.METHODS, "this", build)
        for problem in networks().values():
            problem.steps = steps
            found = learning_rates.run(problem, "this", rates, "short", "decay", SEEDS)
            totals += torch.tensor(learning_rates.means(found, SEEDS)).log() / len(networks())
    return totals.exp().tolist()


def best_rate(rates: list[float], curve: list[float]) -> float:
    """The rate at the lowest point of the parabola, in logarithms, through the best three."""
    at = min(range(1, len(rates) - 1), key=curve.__getitem__)
    x, y = (np.log(numbers[at - 1 : at + 2]) for numbers in (rates, curve))
    square, slope, _ = np.polyfit(x, y, 2)
    return math.exp(min(max(-slope / (2 * square), x[0]), x[2]))


@pytest.mark.slow
def test_the_rate_of_plain_weights_serves_them_when_others_are_tagged() -> None:
    rates = [0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1]
    rules = torch.optim.Adam, so.StiefelAdam
    before, after = (best_rate(rates, losses(rule, rates, "plain")) for rule in rules)
    assert 1 / 2 < after / before < 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Each of the last")  # steps are far too long on purpose
def test_ten_times_the_best_constrained_rate_costs_little() -> None:
    """Five seeds lose 8 to 12 % of the loss, where steps as printed lose it all."""
    rates = [0.01, 0.02, 0.03]
    tenfold = [10 * rate for rate in rates]
    virtual = losses(so.StiefelAdam, [*rates, *tenfold], "constrained", steps=200)
    best = min(virtual[:3])
    assert virtual[3 + virtual.index(best)] < 1.2 * best
    as_printed = partial(so.StiefelAdam, radius=1.0, nesterov=False)
    printed = losses(as_printed, [0.02, 0.2], "constrained", steps=200)
    assert printed[1] > 2 * printed[0]
