"""Words that were given up stay away, and files stay short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_architecture import ROOT, lines_of_code, trees

# Identifiers that had another meaning elsewhere, or none to a reader, and what stands for them.
RETIRED = {
    "Fixed": "BlindReader",
    "HARMFUL": "LARGE_MOVE",
    "Lagged": "LaggedReader",
    "Now": "HostReader",
    "Weight": "ConstrainedParameter",
    "WeightGroup": "DeviceGroup",
    "_Looks": "_CheckSchedule",
    "_staying": "_skipped",
    "_unreported": "_pending_overflows",
    "by_name": "TaggedOptimizer.names_of",
    "descend": "rgd",
    "is_lost": "overflowed of a reader, loses_training of a move",
    "note_whole": "mark_unconstrained",
    "own_gram": "gram, and cross_gram of two",
    "staying": "skipped",
    "takes_whole_gradient": "is_plain_in_group",
    "tallies": "skip_counts",
    "turn_square": "rotate_square",
    "unreported": "pending_overflows",
    "weight_groups": "device_groups",
}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "stiefel_opt").rglob("*.py"))


def identifiers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name of a definition, an attribute, a parameter or a variable, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno


def test_no_identifier_is_a_retired_word() -> None:
    found = [
        f"{place}:{line}: {name}, say {RETIRED[name]}"
        for place, tree in trees("stiefel_opt")
        for name, line in identifiers(tree)
        if name in RETIRED
    ]
    assert not found


@pytest.mark.parametrize("place", FILES)
def test_a_file_has_five_hundred_lines_of_code_at_most(place: str) -> None:
    text = Path(ROOT / place).read_text(encoding="utf-8")
    assert len(lines_of_code(text)) <= 500


def test_the_picture_of_the_house_names_every_file_of_the_core() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    picture = page[page.index("floor by floor") : page.index("Who may import whom")]
    named = set(re.findall(r"\w+", picture))
    rooms = ("numerics", "tags", "functional", "optim")
    files = {path.stem for room in rooms for path in (ROOT / "stiefel_opt" / room).glob("[!_]*.py")}
    assert files <= named, files - named


def test_what_the_page_says_is_where_stands_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page[page.index("## Where is what") : page.index("## A rule in one file")]
    found = re.findall(r"((?:`\w+` and )?`\w+`) in `([\w/]+\.py)`", table)
    assert len(found) > 20
    for names, place in found:
        tree = ast.parse((ROOT / "stiefel_opt" / place).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
        assert set(re.findall(r"\w+", names.replace(" and ", " "))) <= defined, (
            f"{names} in {place}"
        )
