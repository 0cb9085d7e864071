"""Tests walk one table of optimizers, and ask a row for what it declares."""

import ast
from pathlib import Path

from optimizers import TABLE

TESTS = Path(__file__).parents[1]
FOLDERS = ("rules", "step", "state", "tags", "distributed")


def test_no_test_asks_for_a_rule_by_its_name() -> None:
    for path in (path for folder in FOLDERS for path in sorted((TESTS / folder).glob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name):
                parts = (part for side in (node.left, *node.comparators) for part in ast.walk(side))
                named = {part.value for part in parts if isinstance(part, ast.Constant)}
                found = {name for name in named if isinstance(name, str)} & TABLE.keys()
                assert not found, f"{path}:{node.lineno}: {found} should be a property in the table"


def test_no_table_is_folded_into_one_test() -> None:
    """A loop over rows hides those behind the first that fails."""
    for path in sorted(TESTS.rglob("test_*.py")):
        assert "in_one_" + "test" not in path.read_text(encoding="utf-8"), path
