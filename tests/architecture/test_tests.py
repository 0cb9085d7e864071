"""Tests walk one table of optimizers, and ask a row for what it declares."""

import ast
from pathlib import Path

import pytest
from optimizers import OF_CORE, PUBLISHED, TABLE

import stiefel_opt as so

TESTS = Path(__file__).parents[1]
FOLDERS = ("functional", "optim", "tags", "methods", "distributed")
FILES = [path for folder in FOLDERS for path in sorted((TESTS / folder).glob("*.py"))]
FILES += [path for path in sorted(TESTS.glob("*.py")) if path.name != "optimizers.py"]
ASK = {"startswith": str.startswith, "endswith": str.endswith}
CLASSES = {rule.optimizer.__name__ for rule in TABLE.values()}


def texts_in(node: ast.AST) -> set[str]:
    """The strings that are written below a node."""
    values = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {value for value in values if isinstance(value, str)}


def asked_for(node: ast.AST) -> set[str]:
    """The rules that a comparison names, or whose names begin or end as a call asks."""
    if isinstance(node, ast.Compare):
        return texts_in(node) & TABLE.keys()
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return set()
    texts = {text for each in node.args for text in texts_in(each)}
    is_asked = ASK.get(node.func.attr)
    return {name for name in TABLE for text in texts if is_asked and is_asked(name, text)}


def classes_in(node: ast.AST) -> set[str]:
    """The optimizer classes that an expression names; one that it calls makes an object."""
    if isinstance(node, (ast.Call, ast.Subscript)):
        return set()
    if isinstance(node, ast.Attribute):  # not what an attribute of a class is asked for
        return CLASSES & {node.attr}
    return (CLASSES & {getattr(node, "id", "")}).union(*map(classes_in, ast.iter_child_nodes(node)))


def compared_with(node: ast.AST) -> set[str]:
    """The optimizer classes with which a comparison, isinstance or issubclass compares."""
    if isinstance(node, ast.Compare):
        return classes_in(node)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return set()
    operands = node.args if node.func.id in ("isinstance", "issubclass") else []
    return {name for each in operands for name in classes_in(each)}


def test_a_folder_is_a_room_or_what_all_rooms_share() -> None:
    """That of `ot` has another name: it would hide the missing package POT, which is called so."""
    rooms = {path.stem for path in (TESTS.parent / "stiefel_opt").iterdir() if path.stem[0] != "_"}
    shared = {"architecture", "benchmarks", "devices", "distributed", "docs", "integrations"}
    folders = {path.parent.name for path in TESTS.glob("*/*.py")}
    assert folders <= rooms - {"ot"} | {"transport"} | shared


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_test_asks_for_a_rule_by_its_name_or_class(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = asked_for(node) | compared_with(node)
        assert not found, f"line {node.lineno}: {found} should be a property in the table"  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "distributed"])
def test_a_test_on_several_processes_names_no_rule(path: Path) -> None:
    """It takes any, one of each kind, or those with a property of the table."""
    found = texts_in(ast.parse(path.read_text(encoding="utf-8"))) & TABLE.keys()
    assert not found, f"{path}: {found}"


# ---- the core's tests need the core only ---------------------------------------------------------

OF_THE_CORE = [
    path
    for place in (TESTS, *(TESTS / room for room in ("functional", "numerics", "optim", "tags")))
    for path in sorted(place.glob("*.py"))
    if path.name != "conftest.py"
]
ROOMS = set(so._ROOMS)
LOOKS = {"orthonormality_error", "report"}  # of tools: what any test looks with
OF_CLIENTS = (ROOMS | so._HOMES.keys() | {"Rotations", "GeneralizedHouseholder"}) - LOOKS
ROWS = TABLE.keys() | PUBLISHED.keys()


def clients_in(node: ast.AST) -> set[str]:
    """The clients that an import, an attribute of the package or a row's name names."""
    if isinstance(node, ast.ImportFrom):
        module, names = (node.module or "").split("."), {alias.name for alias in node.names}
        return (OF_CLIENTS & {*names, *module}) if module[0] == "stiefel_opt" else set()
    if isinstance(node, ast.Attribute):
        return OF_CLIENTS & {node.attr} if ast.unparse(node.value) == "so" else set()
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return (ROWS - OF_CORE) & {node.value} if is_text else set()


@pytest.mark.parametrize("path", OF_THE_CORE, ids=lambda path: path.stem)
def test_tests_of_the_core_name_no_client(path: Path) -> None:
    """Each client brings its rows, references and tests in a folder of its own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = clients_in(node)
        assert not found, f"line {node.lineno}: {found} belongs to the tests of its client"  # type: ignore[attr-defined]
