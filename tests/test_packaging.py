"""The wheel holds what it must, installs, and works outside the checkout."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import stiefel_opt as so

ROOT = Path(__file__).parent.parent

SMOKE_TEST = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import stiefel_opt as so
assert so.__file__.startswith(sys.argv[1]), so.__file__
layer = so.constrain(torch.nn.Linear(8, 8), heads=2)
for optimizer in (so.StiefelSGD(layer.parameters(), lr=0.1), so.StiefelAdam(layer.parameters())):
    layer(torch.ones(1, 8)).square().sum().backward()
    optimizer.step()
print(so.__version__, float(so.orthonormality_error(layer)))
"""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # With the build backend at hand nothing needs to be downloaded.
    quick = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip("wheel", ROOT, "--no-deps", "--wheel-dir", folder, *quick)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_its_types_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    package = ROOT / "stiefel_opt"
    sources = {file.relative_to(ROOT).as_posix() for file in package.rglob("*.py")}
    assert sources | {"stiefel_opt/py.typed"} <= names
    assert any(name.endswith("/LICENSE") for name in names)
    assert all(
        name.startswith(("stiefel_opt/", "stiefel_opt-")) or ".dist-info/" in name for name in names
    )
    assert f"Version: {so.__version__}" in described
    assert "License-Expression: MIT" in described
    for extra in ("ot", "llm", "examples", "bench", "test", "docs", "integrations", "all"):
        assert f"Provides-Extra: {extra}" in described


def test_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    result = subprocess.run(
        [sys.executable, "-c", SMOKE_TEST, str(target)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    version, error = result.stdout.split()
    assert version == so.__version__
    assert float(error) < 1e-5
