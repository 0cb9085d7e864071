"""The vision transformer, and what programs share: smoke runs, interruptions, refused data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import assert_same

from benchmarks.common import images as image_files
from benchmarks.common import training
from benchmarks.papers.kong import orthogonal_vit, vit_methods
from benchmarks.papers.likhosherstov import copying
from benchmarks.papers.siems import state_tracking

pytestmark = pytest.mark.usefixtures("example")
METHODS = ["adamw:none", "stiefel-adam:within", "stiefel-sgd:within", "stiefel-sgd:across"]


def checkpoints(folder: Path) -> dict[str, Any]:
    """What they hold but the measured times."""

    def timeless(held: Any) -> Any:
        if isinstance(held, dict):
            return {k: timeless(v) for k, v in sorted(held.items()) if "second" not in str(k)}
        return [*map(timeless, held)] if isinstance(held, list | tuple) else held

    files = sorted((folder / "checkpoints").glob("*.pt"))
    return {path.name: timeless(torch.load(path, weights_only=True)) for path in files}


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
    assert_same(checkpoints(tmp_path / "parts"), checkpoints(tmp_path / "whole"))


# -------------------------------------------------------------------------------- the paper's table


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


# ------------------------------------------------------------------------------------- data readers


def test_the_file_of_keras_is_read_and_one_that_lacks_a_part_is_refused(tmp_path) -> None:
    generator = np.random.default_rng(1)
    train, test = (generator.integers(0, 256, (n, 8, 8), dtype=np.uint8) for n in (12, 10))
    parts = {"x_train": train, "y_train": np.arange(12) % 10, "x_test": test}
    np.savez(tmp_path / "mnist.npz", **parts, y_test=np.arange(10))
    images = image_files.load_images("mnist", tmp_path)
    np.testing.assert_array_equal(images.train_images[:, 0].numpy(), train)
    np.testing.assert_array_equal(images.test_labels.numpy(), np.arange(10))
    pixels = images.normalize(images.train_images)
    assert abs(float(pixels.mean())) < 1e-5
    assert float(pixels.std(correction=0)) == pytest.approx(1.0)
    np.savez(tmp_path / "mnist.npz", **parts)
    with pytest.raises(ValueError, match="must hold 'test_labels'"):
        image_files.load_images("mnist", tmp_path)
    np.savez(tmp_path / "mnist.npz", **parts, y_test=np.arange(9))
    with pytest.raises(ValueError, match="must be uint8 images with one label each"):
        image_files.load_images("mnist", tmp_path)
