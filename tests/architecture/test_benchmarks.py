"""The programs that measure share what they have in common, and are run as modules."""

import ast
import functools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
RESULTS = ROOT / "benchmarks" / "results"
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


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_run_once_names_its_program_and_a_commit(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert ("program" in content) == ("commit" in content)
    if "program" in content:
        assert re.fullmatch(r"benchmarks(\.\w+)+", content["program"])
        assert re.fullmatch(r"[0-9a-f]{7,40}", content["commit"])


def test_pages_call_programs_that_are_here() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "Makefile"]
    for page in (page for page in pages if page.name != "CHANGELOG.md"):
        for line in page.read_text(encoding="utf-8").splitlines():
            for program in re.findall(r"-m (benchmarks[.\w]+)", line):
                path = ROOT / program.replace(".", "/")
                here = path.with_suffix(".py").exists()
                assert here or "git worktree add" in line, f"{page.name}: {program}"
