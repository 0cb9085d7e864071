"""Rooms of the package: the core knows no client, and a client imports what a room's face shows.

A room is a folder of the package, or `errors.py`. Its face is its `__init__.py`. A crossing is an
import of a client past another room's face, or against `MAY_SEE`.
"""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = {"errors", "numerics", "tags", "functional", "optim"}
MAY_SEE = {  # room: the rooms that it may import from
    "errors": set(),
    "numerics": {"errors"},
    "tags": {"errors", "numerics"},
    "functional": {"numerics"},
    "optim": {"errors", "numerics", "tags", "functional"},
    "parametrizations": {"errors", "numerics", "tags"},
    "nn": {"errors", "numerics", "tags", "parametrizations"},
    "tools": {"errors", "numerics", "tags"},
    "methods": CORE,
    "ot": {*CORE, "methods"},
    "rotations": {"errors", "numerics", "tags", "optim"},
}  # 33 arrows on 6 floors
FACES = {"__init__", "compat"}  # files that see all rooms and belong to none


def room_of(file: str) -> str:
    """The first part of a path below the package: a folder, or a file without its ending."""
    return file.split("/")[0].removesuffix(".py")


@functools.cache
def sources() -> dict[str, ast.Module]:
    package = ROOT / "stiefel_opt"
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def imports(tree: ast.AST) -> list[tuple[list[str], str]]:
    """(parts of the module below the package, name) of every import from the package."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "stiefel_opt":
            found += [((node.module or "").split(".")[1:], alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            parts = (alias.name.split(".") for alias in node.names)
            found += [(below, "") for top, *below in parts if top == "stiefel_opt"]
    return found


def shown(room: str, files: dict[str, ast.Module]) -> set[str]:
    """Names that a room shows: what its face, or its only file, imports or defines."""
    tree = files.get(f"{room}/__init__.py", files.get(f"{room}.py", ast.Module([], [])))
    names = {name for _, name in imports(tree)}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
    return {name for name in names if not name.startswith("_")}


def crossings(files: dict[str, ast.Module]) -> set[str]:
    """Every import over a wall, as "file -> module: name"."""
    found = set()
    faces = {room: shown(room, files) for room in MAY_SEE}
    for file, tree in files.items():
        room = room_of(file)
        if room in FACES:
            continue
        for parts, name in imports(tree):
            other = parts[0] if parts else name
            if other == room:
                continue
            past_the_face = room not in CORE and (len(parts) != 1 or name not in faces[other])
            if other not in MAY_SEE[room] or past_the_face:
                found.add(f"{file} -> {'.'.join(parts)}: {name}")
    return found


def test_every_file_stands_in_a_room() -> None:
    homeless = [file for file in sources() if room_of(file) not in MAY_SEE.keys() | FACES]
    assert not homeless


def test_no_import_goes_over_a_wall() -> None:
    found = crossings(sources())
    assert not found, "import a public name of the room's face, or show it there"


def test_every_arrow_is_walked() -> None:
    found = {room: set() for room in MAY_SEE}
    for file, tree in sources().items():
        if (room := room_of(file)) not in FACES:
            found[room] |= {parts[0] if parts else name for parts, name in imports(tree)} - {room}
    assert found == MAY_SEE


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("tags/points.py", "from stiefel_opt.ot import projected_wasserstein"),
        ("numerics/roots.py", "import stiefel_opt.tags.manifold"),
        ("nn/rnn.py", "from stiefel_opt.numerics.linalg import _hidden"),
        ("ot/exact.py", "from stiefel_opt import constrain"),
    ],
)
def test_a_planted_import_is_found(file: str, line: str) -> None:
    planted = ast.Module([*sources()[file].body, *ast.parse(line).body], [])
    assert len(crossings({**sources(), file: planted}) - crossings(sources())) == 1
