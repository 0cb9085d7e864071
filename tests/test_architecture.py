"""The house stands as planned: who may import whom, and what the package never does."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "stiefel_opt"
BASE = {"manifold", "geometry", "_checks"}
MAY_IMPORT = {  # room: other rooms it may see; a room sees itself, __init__ sees all
    "_checks": set(),
    "linalg": set(),
    "roots": {"linalg"},
    "distributed": set(),
    "geometry": {"linalg", "_checks"},
    "manifold": {"geometry", "_checks"},
    "constraints": BASE,
    "monitor": {*BASE, "constraints"},
    "penalty": {"constraints", "_checks"},
    "functional": {"linalg", "roots", "geometry", "_checks"},
    "optim": {*BASE, "linalg", "functional", "distributed"},
    "parametrizations": {*BASE, "functional"},
    "nn": {*BASE, "constraints", "parametrizations", "functional"},
    "ot": {"optim", *BASE},
    "rotations": {*BASE, "constraints", "optim"},
    "integrations": {*BASE, "constraints", "monitor", "nn", "parametrizations"},
    "compat": {"optim", "functional", "manifold", "_checks"},
}
PUBLIC = (
    "stiefel_opt.functional",
    "stiefel_opt.nn",
    "stiefel_opt.parametrizations",
    "stiefel_opt.rotations",
)
THIRD_PARTY = {"torch", "numpy", "typing_extensions"}  # others by importlib, where they are used


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> list[str]:
    """Every imported name, dotted from the top: ``from a.b import c`` is ``a.b.c``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("file", python_files("stiefel_opt"), ids=relative)
def test_package_file(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports(tree):
        top, *below = name.split(".")
        if top != "stiefel_opt":
            assert top in THIRD_PARTY | sys.stdlib_module_names, f"{name} is no core dependency"
        elif room != "__init__":
            assert below[0] in {room, *MAY_IMPORT[room]}, f"{room} must not see {below[0]}"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert), f"line {node.lineno}: raise a clear error instead"
        is_print = isinstance(node, ast.Name) and node.id == "print"
        assert not is_print, f"line {node.lineno}: return text instead of printing it"


@pytest.mark.parametrize(
    "file", python_files("examples") + python_files("benchmarks"), ids=relative
)
def test_examples_and_benchmarks_use_the_public_face_only(file: Path) -> None:
    for name in imports(ast.parse(file.read_text(encoding="utf-8"))):
        if name.split(".")[0] == "stiefel_opt":
            assert name == "stiefel_opt" or name.startswith(PUBLIC), name
            assert "._" not in name, name


@pytest.mark.parametrize("file", python_files("tests"), ids=relative)
def test_tests_import_no_private_names(file: Path) -> None:
    for name in imports(ast.parse(file.read_text(encoding="utf-8"))):
        assert not (name.startswith("stiefel_opt") and "._" in name), name
