"""The house stands as planned: who may import whom, and what the package never does."""

import ast
import functools
import gc
import inspect
import io
import itertools
import operator
import sys
import tokenize
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import stiefel_opt as so
from stiefel_opt import compat

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "stiefel_opt.compat",
    "stiefel_opt.functional",
    "stiefel_opt.methods",
    "stiefel_opt.nn",
    "stiefel_opt.parametrizations",
    "stiefel_opt.rotations",
)
THIRD_PARTY = {"torch", "numpy", "typing_extensions"}  # others by importlib, where they are used


@functools.cache
def trees(*folders: str) -> list[tuple[str, ast.Module]]:
    """Every file below the folders, by its path from the root, parsed."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    names = (file.relative_to(ROOT).as_posix() for file in files)
    texts = (file.read_text(encoding="utf-8") for file in files)
    return [(name, ast.parse(text)) for name, text in zip(names, texts, strict=True)]


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


def test_a_file_of_the_package_imports_dependencies_only() -> None:
    for place, tree in trees("stiefel_opt"):
        for name in imports(tree):
            known = name.split(".")[0] in {"stiefel_opt"} | THIRD_PARTY | sys.stdlib_module_names
            assert known, f"{place}: {name} is no core dependency"


def test_nothing_is_imported_in_a_circle() -> None:
    """By files, with what only a type checker imports; not what a function imports when called."""
    files = {
        place.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for place, tree in trees("stiefel_opt")
    }
    sees = {
        name: {file_of(found, files) for found in imports(ast.Module(at_import(tree.body), []))}
        for name, tree in files.items()
    }
    while free := {name for name, others in sees.items() if not others & sees.keys() - {name}}:
        sees = {name: others for name, others in sees.items() if name not in free}
    assert not sees, f"a circle among {sorted(sees)}"


def file_of(name: str, files: dict[str, ast.Module]) -> str:
    """The file that ``name`` is or is a name of."""
    return name if name in files else name.rpartition(".")[0]


def at_import(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that run when a file is imported, those of conditions and classes too."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            parts = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            found += [own for part in parts for own in at_import(part)]
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            found.append(statement)
    return found


METHODS = [
    found
    for face in (so, compat)
    for found in (getattr(face, name) for name in face.__all__)
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
]
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT}


def lines_of_code(text: str) -> set[int]:
    """The numbers of its lines of code: no docstrings, comments and blank lines."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.NEWLINE:
            statement += [token] if token.type not in NOT_CODE else []
            continue
        if {part.type for part in statement} != {tokenize.STRING}:
            lines |= {row for part in statement for row in range(part.start[0], part.end[0] + 1)}
        statement = []
    return lines


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_a_declaration_of_sixty_lines(method: type) -> None:
    assert 0 < len(lines_of_code(inspect.getsource(method))) <= 60


@pytest.mark.parametrize(("kind", "most"), [(ast.FunctionDef, 50), (ast.ClassDef, 300)])
def test_functions_have_fifty_lines_of_code_and_classes_three_hundred(
    kind: type[ast.FunctionDef | ast.ClassDef], most: int
) -> None:
    """At most, with their signatures."""
    for place, tree in trees("stiefel_opt"):
        code = lines_of_code((ROOT / place).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, kind):
                size = len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
                assert 0 < size <= most, f"{place}:{node.lineno}: {node.name} has {size}"


@pytest.mark.parametrize(
    ("method", "files", "changes"),
    [(so.StiefelSGD, 8, 14), (so.StiefelAdam, 9, 17), (so.StiefelMuon, 7, 32)],
)
def test_a_gradient_passes_few_files(
    method: Any, files: int, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steady step of one tall weight, without the hooks that torch calls around it."""
    layer = so.constrain(torch.nn.Linear(64, 128, bias=False))
    # after the first weight, which registers a hook of ours
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        monkeypatch.setattr(sys.modules[Optimizer.__module__], name, OrderedDict())
    optimizer = method(layer.parameters(), lr=0.01)
    path: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        place = frame.f_code.co_filename
        if event == "call" and place.startswith(so.__path__[0]):
            path.append(place)

    for step in range(10):  # the eighth, and every eighth after it, removes rounding
        layer(torch.randn(32, 64)).square().mean().backward()
        before = sys.getprofile()
        gc.collect()  # or what other tests have left is finalized in between
        sys.setprofile(note if step == 9 else before)
        try:
            optimizer.step()
        finally:
            sys.setprofile(before)
        optimizer.zero_grad()
    assert len(path) > 20
    assert len(set(path)) <= files, sorted(set(path))
    assert sum(itertools.starmap(operator.ne, itertools.pairwise(path))) <= changes


def test_one_file_asks_for_the_device_and_for_the_compiler() -> None:
    """Called `is_compiling` of any module but ours, `.is_cpu`, `.is_cuda` or `.device.type`."""
    for place, tree in trees("stiefel_opt"):
        if place == "stiefel_opt/numerics/device.py":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            asks = node.attr in {"is_compiling", "is_cpu", "is_cuda", "is_mps"}
            asks |= node.attr == "type" and ast.unparse(node).endswith(".device.type")
            assert not asks, f"{place}:{node.lineno}: {ast.unparse(node)} belongs into device.py"


def test_the_package_asserts_and_prints_nothing() -> None:
    for place, tree in trees("stiefel_opt"):
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), f"{place}:{node.lineno}: raise a clear error"
            is_print = isinstance(node, ast.Name) and node.id == "print"
            assert not is_print, f"{place}:{node.lineno}: return text instead of printing it"


def test_examples_and_benchmarks_use_the_public_face_only() -> None:
    for place, tree in trees("examples", "benchmarks"):
        for name in imports(tree):
            if name.split(".")[0] == "stiefel_opt":
                assert name == "stiefel_opt" or name.startswith(PUBLIC), f"{place}: {name}"
                assert "._" not in name, f"{place}: {name}"


def test_tests_import_no_private_names() -> None:
    for place, tree in trees("tests"):
        for name in imports(tree):
            assert not (name.startswith("stiefel_opt") and "._" in name), f"{place}: {name}"
