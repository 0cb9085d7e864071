"""Archive and wheel hold what they must, and the wheel works outside the checkout."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import stiefel_opt as so

ROOT = Path(__file__).parents[2]

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
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, by the build backend itself: nothing is downloaded."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("archive")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the archive as an installer would."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", archive, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (built,) = folder.glob("*.whl")
    return built


def files(*patterns: str) -> set[str]:
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    assert found
    return {path.relative_to(ROOT).as_posix() for path in found}


def test_archive_holds_what_the_tests_read(archive: Path) -> None:
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    scripts = files("*/*.py", "stiefel_opt/**/*.py", "benchmarks/**/*.py", "tests/**/*.py")
    scripts |= files(".github/**/*.*", ".readthedocs.yaml", "conda/**/*.yaml", "examples/*.ipynb")
    assert scripts | files("[!.]*.*", "Makefile", "docs/**/*.md", "benchmarks/results/*") <= names
    assert not [name for name in names if re.search(r"(^|/)(\.venv|__pycache__|build|runs)/", name)]


def test_wheel_holds_the_package_its_types_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        described = packed.read(metadata).decode()
    assert files("stiefel_opt/**/*.py", "stiefel_opt/py.typed") <= names
    assert any(name.endswith("/LICENSE") for name in names)
    assert all(
        name.startswith(("stiefel_opt/", "stiefel_opt-")) or ".dist-info/" in name for name in names
    )
    assert f"Version: {so.__version__}" in described
    assert "License-Expression: MIT" in described
    for extra in ("ot", "llm", "examples", "bench", "test", "docs", "integrations", "all"):
        assert f"Provides-Extra: {extra}" in described
    named = set(re.findall(r"^Classifier: .* :: 3\.(\d+)$", described, re.MULTILINE))
    assert named == {"10", "11", "12", "13"}


def test_citation_names_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {so.__version__}\n" in citation


def test_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as packed:  # pure Python: to install it is to unpack it
        packed.extractall(target)
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
