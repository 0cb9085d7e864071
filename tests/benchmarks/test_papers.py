"""The vision transformer, and what programs share: smoke runs, a kill, data that are refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import server

from benchmarks.common import harness, training
from benchmarks.common import images as image_files
from benchmarks.papers.kong import orthogonal_vit, vit_methods
from benchmarks.papers.likhosherstov import copying
from benchmarks.papers.siems import state_tracking

pytestmark = pytest.mark.usefixtures("example")
SPEED = "images_per_second"
METHODS = ["adamw:none", "stiefel-adam:within", "stiefel-sgd:within", "stiefel-sgd:across"]


def saved(folder: Path) -> list[Path]:
    """The checkpoints that are whole: a kill may leave one beside them that is not."""
    return sorted(p for p in (folder / "checkpoints").glob("*.pt") if ".tmp" not in p.suffixes)


def checkpoints(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=True) for path in saved(folder)}


def assert_same_bits(actual: Any, expected: Any, path: str = "") -> None:
    """Compare all that checkpoints hold but the measured times."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), path
    elif isinstance(expected, dict | list | tuple):
        assert len(actual) == len(expected), path
        keys = expected.keys() if isinstance(expected, dict) else range(len(expected))
        for key in keys:
            if "second" not in str(key):
                assert_same_bits(actual[key], expected[key], f"{path}/{key}")
    else:
        assert actual == expected, path


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


RESUMED = [  # a program, and what makes its runs short
    (orthogonal_vit, ["--methods", "stiefel-sgd:within", "--augment", "crop-flip"]),
    (orthogonal_vit, ["--methods", "penalty-sgd:within", "--limit", "128"]),
    (copying, ["--cells", "cwy"]),
    (copying, ["--cells", "dtriv"]),
    (state_tracking, ["--tasks", "S3", "--factors", "2", "--iterations", "8", "--every", "4"]),
]


@pytest.mark.parametrize(("program", "flags"), RESUMED)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    program, flags, tmp_path, monkeypatch
) -> None:
    flags = ["--smoke", *flags, "--output"]
    program.main([*flags, str(tmp_path / "whole")])
    save = training.Trainer.save

    def interrupted(trainer: training.Trainer) -> None:
        save(trainer)
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Trainer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.main([*flags, str(tmp_path / "parts"), "--resume"])
    monkeypatch.undo()
    assert checkpoints(tmp_path / "parts")
    program.main([*flags, str(tmp_path / "parts"), "--resume"])
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
