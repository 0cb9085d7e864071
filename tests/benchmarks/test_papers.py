"""The vision transformer, and what programs share: smoke runs, a kill, data that are refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import server

from benchmarks.common import harness, training
from benchmarks.common import images as image_files
from benchmarks.papers.kong import orthogonal_vit, vit_methods, vit_results

pytestmark = pytest.mark.usefixtures("example")
SPEED = "images_per_second"
OTHERS = ["momentumless:within", "cayley-adam:within", "penalty-sgd:within"]
METHODS = ["adamw:none", "stiefel-adam:within", "stiefel-sgd:within", "stiefel-sgd:across"]


def saved(folder: Path) -> list[Path]:
    """The checkpoints that are whole: a kill may leave one beside them that is not."""
    return sorted(p for p in (folder / "checkpoints").glob("*.pt") if ".tmp" not in p.suffixes)


def checkpoints(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=True) for path in saved(folder)}


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a checkpoint but the measured seconds."""
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in items:
        if isinstance(value, dict | list | tuple):
            yield from leaves(value, f"{path}/{key}")
        elif key not in ("seconds", "images_per_second"):
            yield f"{path}/{key}", value


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = dict(leaves(actual)), dict(leaves(expected))
    assert actual.keys() == expected.keys()
    assert any(isinstance(value, torch.Tensor) for value in actual.values())
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(actual[path], value), path
        else:
            assert actual[path] == value, path


# ------------------------------------------------------------------------------------ whole program


def test_smoke_trains_every_method_and_writes_all_results(tmp_path, capsys) -> None:
    orthogonal_vit.main(["--smoke", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"Pictures: {tmp_path}" in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = (tmp_path / "table.md").read_text()
    assert table in printed
    results = json.loads((tmp_path / "results.json").read_text())
    titles = [run["title"] for run in results["runs"]]
    assert titles == [orthogonal_vit.parse_method(name).title for name in METHODS]
    for run in results["runs"]:
        assert [epoch["epoch"] for epoch in run["history"]] == [1, 2, 3]
        first, last = run["history"][0], run["history"][-1]
        assert last["train_loss"] < first["train_loss"]
        assert run["title"] in table
        constrained = run["constraint"] != "none"
        assert (last["orthonormality_error"] < 1e-5) == constrained
    assert len(checkpoints(tmp_path)) == len(METHODS)
    assert not list(tmp_path.rglob("*.tmp*"))


def test_flags_are_all_it_asks_for(tmp_path, capsys) -> None:
    flags = ["--smoke", "--methods", "sgd", "--lr", "0.05", "--seeds", "2", "--limit", "64"]
    orthogonal_vit.main([*flags, "--augment", "crop-flip", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "SGD at learning rate 0.05" in printed
    assert printed.index("; results in ") < printed.index("epoch 1")
    assert len(json.loads((tmp_path / "results.json").read_text())["runs"]) == 2


def test_the_demo_is_the_default() -> None:
    options = orthogonal_vit.parse_arguments([])
    names = [(method.optimizer, method.constraint) for method in options.methods]
    assert names == [("adamw", "none"), ("stiefel-adam", "within"), ("stiefel-sgd", "within")]
    assert options.data == "digits"
    assert len(options.seeds) >= 2


@pytest.mark.slow
def test_the_demo_reaches_95_per_cent_with_every_method(tmp_path) -> None:
    orthogonal_vit.main(["--output", str(tmp_path)])
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert len(runs) == 6
    for run in runs:
        assert run["history"][-1]["test_error"] <= 5.0, run["title"]


@pytest.mark.parametrize("method", ["adamw:none", "stiefel-sgd:within", *OTHERS[1:]])
def test_resumed_run_equals_uninterrupted_run_bit_for_bit(method, tmp_path, monkeypatch) -> None:
    flags = ["--smoke", "--methods", method, "--epochs", "3", "--augment", "crop-flip"]
    flags += ["--limit", "128"]
    orthogonal_vit.main([*flags, "--output", str(tmp_path / "whole")])
    save = training.Trainer.save

    def interrupted(trainer: training.Trainer) -> None:
        save(trainer)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", interrupted)
    for epoch in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            orthogonal_vit.main([*flags, "--output", str(tmp_path / "parts"), "--resume"])
        (state,) = checkpoints(tmp_path / "parts").values()
        assert len(state["history"]) == epoch
    monkeypatch.undo()
    orthogonal_vit.main([*flags, "--output", str(tmp_path / "parts"), "--resume"])
    assert_same_bits(checkpoints(tmp_path / "parts"), checkpoints(tmp_path / "whole"))


def test_killed_run_resumes_bit_for_bit_and_finished_runs_are_left_alone(
    tmp_path, monkeypatch
) -> None:
    methods = ["stiefel-sgd:within", "stiefel-adam:across"]
    flags = ["--smoke", "--epochs", "6", "--limit", "256", "--methods", *methods, "--output"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = server().Process(target=orthogonal_vit.main, args=([*flags, str(killed)],))
    process.start()
    while len(saved(killed)) < 2:  # the second one is that of a first epoch
        assert process.is_alive()
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    done = {len(state["history"]) for state in checkpoints(killed).values()}
    assert 6 in done
    assert done - {6}, "the second run must have been cut short"
    orthogonal_vit.main([*flags, str(killed), "--resume"])
    orthogonal_vit.main([*flags, str(whole)])
    assert_same_bits(checkpoints(killed), checkpoints(whole))

    def train(*_: object) -> None:
        raise AssertionError("a finished run must not be trained again")

    monkeypatch.setattr(training.Trainer, "train_epoch", train)
    (killed / "curves.png").unlink()
    orthogonal_vit.main([*flags, str(killed), "--resume"])
    assert (killed / "curves.png").exists()


def test_resume_refuses_another_configuration(tmp_path) -> None:
    flags = ["--smoke", "--methods", "adamw", "--epochs", "1", "--output", str(tmp_path)]
    orthogonal_vit.main(flags)
    with pytest.raises(ValueError, match=r"must keep batch_size = 32 of .*, got 16; choose"):
        orthogonal_vit.main([*flags, "--resume", "--batch-size", "16"])


WRONG_FLAGS = [
    (["--methods", "adam:within"], "it would leave the manifold"),
    (["--methods", "lion"], "a method must be OPTIMIZER:CONSTRAINT"),
    (["--methods", "adamw:across"], "use stiefel-sgd or stiefel-adam"),
    (["--methods", "penalty-sgd:none"], "use within or across"),
    (["--methods", "cayley-sgd:within:1:1:1"], "a method must be OPTIMIZER:CONSTRAINT"),
    (["--seeds", "0"], "must be at least 1, got 0"),
]


def test_wrong_flags_are_explained(capsys) -> None:
    for flags, message in WRONG_FLAGS:
        with pytest.raises(SystemExit):
            orthogonal_vit.parse_arguments(flags)
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("flags", [["--heads", "5"], ["--patch", "3"], ["--batch-size", "999"]])
def test_sizes_that_do_not_fit_are_explained(flags, tmp_path) -> None:
    with pytest.raises(ValueError, match=r"--(heads|batch-size) must"):
        orthogonal_vit.main(["--smoke", *flags, "--output", str(tmp_path)])


# -------------------------------------------------------------------------------- the paper's table


def last_epochs(folder: Path) -> dict[str, dict[str, float]]:
    """What the last epoch of each finished run gave, less its seconds."""
    found = {}
    for path in (folder / "runs").glob("*.json"):
        last = json.loads(path.read_text())["history"][-1]
        found[path.name] = {k: v for k, v in last.items() if k not in ("seconds", SPEED)}
    return found


@pytest.mark.usefixtures("drawn")
def test_the_whole_table_by_one_command(tmp_path, capsys) -> None:
    flags = ["--smoke", "--table", "--limit", "64", "--epochs", "1"]
    orthogonal_vit.main([*flags, "--output", str(tmp_path)])
    assert f"Pictures: {tmp_path}" in capsys.readouterr().out
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    rows = [line for line in results["tables"][0].splitlines() if " ± " in line]
    assert len(rows) == len(results["runs"]) == len(vit_methods.PUBLISHED) == 16
    for row, run in zip(rows, results["runs"], strict=True):
        published = vit_methods.PUBLISHED[f"{run['optimizer']}:{run['constraint']}"]
        assert [cell.strip() for cell in row.split("|")][-3:-1] == list(published)
        assert f"{run['last_epoch']['test_error']:.2f}" in row
        kept = run["last_epoch"]["orthonormality_error"] < 1e-5
        assert kept == vit_methods.OPTIMIZERS[run["optimizer"]].exact
        two = vit_methods.OPTIMIZERS[run["optimizer"]].ratio != 1
        assert ("constrained_lr" in run) == two


def test_a_table_resumes_run_by_run_without_being_asked_to(tmp_path, monkeypatch) -> None:
    flags = ["--smoke", "--table", "--limit", "64", "--epochs", "2", "--methods"]
    flags += ["stiefel-sgd", "cayley-adam", "regularizer-sgd:across", "--output"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    orthogonal_vit.main([*flags, str(whole)])
    save, epochs = training.Trainer.save, iter(range(100))

    def interrupted(trainer: training.Trainer) -> None:
        save(trainer)
        if next(epochs) == 4:  # the first epoch of the third run
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        orthogonal_vit.main([*flags, str(parts)])
    assert len(last_epochs(parts)) == 2
    assert len(checkpoints(parts)) == 1
    orthogonal_vit.main([*flags, str(parts)])
    assert next(epochs) == 6, "no epoch may be trained twice"
    assert last_epochs(parts) == last_epochs(whole)
    assert not checkpoints(parts)
    assert not list(parts.rglob("*.tmp*"))
    with pytest.raises(
        ValueError, match=r"must keep limit = 64 of StiefelSGD-within.*json, got 96"
    ):
        orthogonal_vit.main([*flags, str(parts), "--limit", "96"])


def test_the_table_has_three_seeds_and_takes_other_flags() -> None:
    options = orthogonal_vit.parse_arguments(["--table", "--preset", "cpu", "--width", "96"])
    assert [len(options.methods), options.seeds, options.width] == [16, [0, 1, 2], 96]
    assert options.output == Path("runs/orthogonal_vit/cpu-table")
    assert orthogonal_vit.parse_arguments(["--table", "--seeds", "4", "7"]).seeds == [4, 7]
    (method,) = orthogonal_vit.parse_arguments(["--table", "--methods", "cayley-sgd"]).methods
    assert method.constraint == "within"


def test_start_again_without_resume(tmp_path) -> None:
    flags = ["--smoke", "--methods", "sgd", "--epochs", "1", "--limit", "64", "--output"]
    orthogonal_vit.main([*flags, str(tmp_path)])
    orthogonal_vit.main([*flags, str(tmp_path), "--batch-size", "16"])
    assert json.loads((tmp_path / "runs" / "SGD-seed-0.json").read_text())["batch_size"] == 16


def test_at_the_published_size_the_rows_are_what_the_paper_ran() -> None:
    ran = {row.split(":")[0] for row in vit_methods.rows_of("paper")}
    assert {"algorithm-1", "algorithm-2", "released-cayley-sgd", "released-cayley-adam"} < ran
    assert not ran & {"stiefel-sgd", "stiefel-adam", "cayley-sgd", "cayley-adam"}
    assert ran <= vit_methods.OPTIMIZERS.keys()


@pytest.mark.parametrize(
    ("name", "plain", "constrained"),
    [
        ("stiefel-sgd", {"lr": 0.15, "momentum": 0.9}, {"lr": 0.15, "momentum": 0.9}),
        ("algorithm-1", {"lr": 0.15}, {"lr": 0.15, "momentum": 0.9, "rotation": "euler"}),
        ("algorithm-2", {"lr": 1e-3}, {"lr": 1e-3, "rotation": "euler"}),
        ("cayley-sgd", {"lr": 0.1, "momentum": 0.9}, {"lr": 1.0, "momentum": 0.9}),
        ("released-cayley-sgd", {"momentum": 0.9}, {"lr": 1.0, "momentum": 0.0}),
        ("momentumless", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.0}),
        ("rgd", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9}),
        ("stiefel-adam", {"lr": 1e-3, "betas": (0.9, 0.999)}, {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ("cayley-adam", {"lr": 1e-2, "betas": (0.9, 0.999)}, {"lr": 1e-3, "betas": (0.9, 0.999)}),
        ("released-cayley-adam", {"lr": 1e-3}, {"lr": 1e-2, "betas": (0.9, 0.999)}),
        ("regularizer-sgd", {"lr": 0.1, "momentum": 0.9}, None),
        ("regularizer-adam", {"lr": 1e-3, "betas": (0.9, 0.999)}, None),
        ("adamw", {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.2}, None),
    ],
)
def test_both_kinds_of_weights_get_the_published_settings(name, plain, constrained) -> None:
    options = orthogonal_vit.parse_arguments(["--preset", "smoke", "--patch", "8"])
    method = orthogonal_vit.parse_method(name)
    model = orthogonal_vit.VisionTransformer(options, cifar_like())
    orthogonal_vit.constrain_attention(model, method.constraint)
    optimizer = orthogonal_vit.build_optimizer(method, model)
    kinds = {bool(group.get("stiefel")): group for group in optimizer.param_groups}
    assert len(kinds) == len(optimizer.param_groups) == (1 if constrained is None else 2)
    for tagged, expected in ((False, plain), (True, constrained or {})):
        for key, value in ({"weight_decay": 5e-5} | expected if expected else {}).items():
            assert kinds[tagged][key] == pytest.approx(value), (tagged, key)


def test_a_rate_keeps_the_ratio() -> None:
    def parsed(text: str, batch_size: int = 128) -> tuple[float, float, str]:
        return orthogonal_vit.parse_method(text, None, batch_size)[2:]

    assert parsed("cayley-sgd", 64) == (0.05, 0.5, "CayleySGD within heads")
    assert parsed("cayley-sgd:across:0.2") == (
        0.2,
        2.0,
        "CayleySGD across heads at learning rate 0.2",
    )


def test_the_regularizer_is_a_step_of_its_own() -> None:
    options = orthogonal_vit.parse_arguments(["--preset", "smoke", "--patch", "8"])
    model = orthogonal_vit.VisionTransformer(options, cifar_like()).double()
    orthogonal_vit.constrain_attention(model, "within")
    method = orthogonal_vit.parse_method("regularizer-sgd:within:0")
    optimizer = orthogonal_vit.build_optimizer(method, model, weight=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
            parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name]
        if name.endswith(("q.weight", "k.weight")):
            heads = expected.unflatten(0, (options.heads, -1))
            gram = heads @ heads.mT - torch.eye(heads.size(1), dtype=torch.float64)
            expected = (heads - 0.1 * gram @ heads).flatten(0, 1)
            assert not torch.allclose(expected, before[name])
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("name", ["penalty-sgd", "regularizer-sgd"])
def test_the_penalty_pulls_towards_the_manifold(name, tmp_path) -> None:
    flags = ["--smoke", "--methods", f"{name}:within", "--output"]
    errors = {}
    for weight in ("1e-6", "0.1"):
        orthogonal_vit.main([*flags, str(tmp_path / weight), "--penalty", weight])
        (errors[weight],) = last_epochs(tmp_path / weight).values()
    weak, strong = (error["orthonormality_error"] for error in errors.values())
    assert weak > 3 * strong > 1e-5
    with pytest.raises(ValueError, match=r"must keep penalty = 0\.1 of"):
        orthogonal_vit.main([*flags, str(tmp_path / "0.1"), "--penalty", "1", "--resume"])


# ------------------------------------------------------------------------------------------- pieces


def cifar_like() -> image_files.Images:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 3, 4, 9])
    channels = torch.ones(3, 1, 1)
    return image_files.Images(images, labels, images, labels, 10, channels, channels)


def test_paper_preset_has_the_papers_size() -> None:
    options = orthogonal_vit.parse_arguments(["--preset", "paper"])
    model = orthogonal_vit.VisionTransformer(options, cifar_like())
    size = sum(parameter.numel() for parameter in model.parameters())
    assert round(size / 1e6, 1) == 6.3
    assert options.width // options.heads == 32


def test_rates_are_the_published_ones_at_the_published_batch() -> None:
    def rates(*flags: str) -> list[float]:
        return [method.lr for method in orthogonal_vit.parse_arguments(list(flags)).methods]

    assert rates("--preset", "paper") == [1e-3, 1e-3, 0.15, 0.15]
    assert rates("--preset", "paper", "--batch-size", "64") == [1e-3, 1e-3, 0.075, 0.075]
    assert rates("--lr", "0.5", "--methods", "sgd", "stiefel-sgd:across:0.25", "sgd") == [0.5, 0.25]


def test_stiefel_optimizer_without_constraint_is_torchs_own(tmp_path) -> None:
    flags = ["--smoke", "--output", str(tmp_path), "--lr", "0.01"]
    for name in ("sgd", "stiefel-sgd", "adam", "stiefel-adam"):
        orthogonal_vit.main([*flags, "--methods", f"{name}:none"])
    states = checkpoints(tmp_path)
    end = "-at-learning-rate-0.01-seed-0.pt"
    for name in ("SGD", "Adam"):
        ours, theirs = states[f"Stiefel{name}{end}"], states[f"{name}{end}"]
        assert_same_bits(ours["model"], theirs["model"])


def test_last_block_may_drop_what_nothing_reads() -> None:
    block = orthogonal_vit.Block(16, heads=2, feed_forward=8)
    tokens = torch.randn(3, 5, 16)
    torch.testing.assert_close(block(tokens, keep=1), block(tokens)[:, :1])


def test_schedule_warms_up_and_ends_at_one_per_cent() -> None:
    factors = [training.rate_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11)
    assert max(factors) == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.505)
    assert factors[100] == pytest.approx(0.01)
    assert factors[:11] == sorted(factors[:11])
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_crop_flip_shifts_and_mirrors_each_image() -> None:
    images = torch.randint(1, 256, (64, 3, 16, 16), dtype=torch.uint8)
    result = image_files.crop_flip(images, torch.Generator().manual_seed(3))
    assert torch.equal(result, image_files.crop_flip(images, torch.Generator().manual_seed(3)))
    seen = set()
    for image, changed in zip(images, result, strict=True):
        padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
        found = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(
                changed,
                (padded.flip(2) if mirrored else padded)[:, top : top + 16, left : left + 16],
            )
        ]
        assert len(found) == 1
        seen.update(found)
    assert {flip for *_, flip in seen} == {False, True}
    assert {top for top, *_ in seen} == {left for _, left, _ in seen} == set(range(5))


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path) -> None:
    path = tmp_path / "state.pt"
    path.write_text("old")

    def fail() -> None:
        with harness.atomic(path) as temporary:
            temporary.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_row_has_mean_deviation_and_range_of_the_last_epochs() -> None:
    last = dict.fromkeys(("train_loss", "largest_logit", "orthonormality_error"), 0.0)
    last["images_per_second"] = 1.0
    runs = [
        {"history": [{"test_error": 9.0, **last}, {"test_error": error, **last}]}
        for error in (3.0, 5.0)
    ]
    named = {"optimizer": "stiefel-sgd", "constraint": "within"}
    cells = vit_results.row("a", [run | named for run in runs])
    assert cells[:5] == ["a", "4.00", "1.41", "3.00 to 5.00", "2"]
    assert cells[-2:] == ["8.32 ± 0.39", "30.20 ± 0.55"]


# ------------------------------------------------------------------------------------- data readers


@pytest.fixture
def split() -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(1)

    def make(count: int, side: int = 32, channels: int = 3, classes: int = 10):
        pixels = generator.integers(0, 256, (count, channels, side, side), dtype=np.uint8)
        return pixels, np.arange(count) % classes

    return make


def assert_read(images: image_files.Images, train, test, classes: int) -> None:
    for actual, expected in zip(images[:4], (*train, *test), strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected)
    assert images.train_images.dtype == images.test_images.dtype == torch.uint8
    assert images.train_labels.dtype == images.test_labels.dtype == torch.int64
    assert images.classes == classes
    pixels = images.normalize(images.train_images)
    torch.testing.assert_close(
        pixels.mean((0, 2, 3)), torch.zeros(pixels.shape[1]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(pixels.std((0, 2, 3), correction=0), torch.ones(pixels.shape[1]))


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_npz(name, split, tmp_path) -> None:
    channels = 1 if name == "mnist" else 3
    train, test = split(12, 8, channels), split(10, 8, channels)
    stored = [
        part[:, 0] if name == "mnist" else part.transpose(0, 2, 3, 1) for part, _ in (train, test)
    ]
    np.savez(
        tmp_path / f"{name}_small.npz",
        train_images=stored[0],
        train_labels=train[1].astype(np.uint8),
        test_images=stored[1],
        test_labels=test[1].astype(np.uint8),
    )
    assert_read(image_files.load_images(name, tmp_path), train, test, classes=10)
    limited = image_files.load_images(name, tmp_path, limit=4)
    assert len(limited.train_images) == len(limited.train_labels) == 4
    assert len(limited.test_images) == 10


def test_a_part_of_a_file_sorted_by_class_has_all_classes(tmp_path) -> None:
    labels = np.repeat(np.arange(10), 40)
    images = np.broadcast_to(labels[:, None, None], (400, 8, 8)).astype(np.uint8)
    parts = {f"{part}_images": images for part in ("train", "test")}
    labelled = {f"{part}_labels": labels.astype(np.uint8) for part in ("train", "test")}
    np.savez(tmp_path / "mnist.npz", **parts, **labelled)
    limited = image_files.load_images("mnist", tmp_path, limit=100)
    assert set(limited.train_labels.tolist()) == set(range(10))
    assert torch.equal(limited.train_images[:, 0, 0, 0], limited.train_labels.to(torch.uint8))


class Malicious:
    """Runs a command when unpickled by ``pickle.load``."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call, self.arguments


def test_npz_with_pickled_objects_is_refused(tmp_path) -> None:
    witness = tmp_path / "executed"
    harm = np.array([Malicious(os.system, f"touch '{witness}'")], dtype=object)
    np.savez(tmp_path / "mnist.npz", train_images=harm)
    with pytest.raises(ValueError, match="allow_pickle=False"):
        image_files.load_images("mnist", tmp_path)
    assert not witness.exists()


def test_missing_files_say_what_to_put_where(tmp_path) -> None:
    with pytest.raises(SystemExit) as caught:
        orthogonal_vit.main(["--data", "cifar10", "--data-dir", str(tmp_path), "--patch", "4"])
    assert f"--data-dir must hold cifar10.npz, got '{tmp_path}' without it" in str(caught.value)


def test_the_file_of_keras_is_read_and_one_that_lacks_a_part_is_refused(split, tmp_path) -> None:
    (images, labels), test = split(12, 8, 1), split(10, 8, 1)
    parts = {"x_train": images[:, 0], "y_train": labels, "x_test": test[0][:, 0]}
    np.savez(tmp_path / "mnist.npz", **parts, y_test=test[1])
    assert_read(image_files.load_images("mnist", tmp_path), (images, labels), test, classes=10)
    np.savez(tmp_path / "mnist.npz", **parts)
    with pytest.raises(ValueError, match="must hold 'test_labels'"):
        image_files.load_images("mnist", tmp_path)
    np.savez(tmp_path / "mnist.npz", **parts, y_test=test[1][1:])
    with pytest.raises(ValueError, match="must be uint8 images with one label each"):
        image_files.load_images("mnist", tmp_path)
