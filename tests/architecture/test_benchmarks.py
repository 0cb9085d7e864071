"""The programs that measure share what they have in common, and are run as modules."""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
BENCHOPT = ROOT / "benchmarks" / "benchopt_stiefel"  # laid out as benchopt wants it


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Every program, parsed: by the tests, not while tests are collected."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def defined(tree: ast.Module) -> list[str]:
    """The functions and classes of a file, without what stands inside them."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds)]


def test_no_program_touches_the_path_of_imports() -> None:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            is_path = isinstance(node, ast.Attribute) and node.attr == "path"
            assert not (is_path and ast.unparse(node) == "sys.path"), f"{path}:{node.lineno}"


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if BENCHOPT not in path.parents)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    "name",
    ["write_json", "write_text", "atomic", "machine", "markdown_table", "orthonormality_error"],
)
def test_what_all_of_them_need_stands_once(name: str) -> None:
    places = [path.name for path, tree in trees().items() if name in defined(tree)]
    assert places == ["harness.py"]


def test_no_file_imports_one_that_lies_beside_it_by_its_bare_name() -> None:
    own = {path.stem for path in FILES if BENCHOPT not in path.parents}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            bare = own.intersection(names)
            assert not bare or BENCHOPT in path.parents, f"{path}:{node.lineno}: {bare}"
