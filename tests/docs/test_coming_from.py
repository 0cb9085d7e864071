"""Tables of docs/porting.md: the right side of a row runs, the left one exists where installed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stiefel_opt as so

PAGE = (Path(__file__).parents[2] / "docs" / "porting.md").read_text(encoding="utf-8")
PACKAGES = ("torch", "geotorch", "geoopt", "pymanopt", "POGO", "roma", "POT")
MODULES = ("torch", "geotorch", "geoopt", "pymanopt", "pogo", "roma", "ot")
SECTION = re.compile(r"^## From (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(rf"\b(?:{'|'.join(MODULES)})(?:\.\w+)+")


def rows() -> Iterator[Any]:
    for package, text in SECTION.findall(PAGE):
        lines = [line for line in text.splitlines() if line.startswith("|")][2:]
        for line in lines if package in PACKAGES else ():
            theirs, ours = line[1:-1].split(" | ")
            yield pytest.param(theirs, ours, id=f"{package}: {theirs.strip(' `')}")


def given() -> dict[str, Any]:
    """What the rows take as given."""
    generator = torch.Generator().manual_seed(0)
    double = torch.float64

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=double)

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3))
    layer, square = torch.nn.Linear(8, 3), torch.nn.Linear(6, 6)
    so.constrain(model[1])
    A = drawn(8, 3)
    X = so.polar(A)
    R = so.polar(drawn(3, 3), determinant=1)
    v = 0.5 * torch.nn.functional.normalize(drawn(3), dim=0)
    K = torch.linalg.cross(v.expand(3, 3), torch.eye(3, dtype=double)).mT
    weights = torch.full((12,), 1 / 12, dtype=double)
    return {
        "torch": torch, "so": so, "model": model, "layer": layer, "square": square,
        "weight": torch.empty(8, 3), "parameters": list(model.parameters()),
        "A": A, "X": X, "V": so.project_tangent(X, 0.1 * drawn(8, 3)),
        "M": drawn(3, 3), "R": R, "S": so.exp(R, R @ K), "v": v, "K": K,
        "I": torch.eye(3, dtype=double), "P": so.polar(A[:5]),
        "loss": lambda x: -(A.to(x).mT @ x).square().sum(),
        "pair_loss": lambda pair: (pair[0] - pair[1]).square().sum(),
        "x": drawn(12, 5), "y": drawn(12, 5) + 1, "a": weights, "b": weights, "tau": 0.01,
        "labels": torch.arange(12) % 3, "z": drawn(6, 5),
    }  # fmt: skip


def test_there_is_one_table_for_each_package() -> None:
    found = [row.id.split(":")[0] for row in rows()]
    assert sorted(set(found)) == sorted(PACKAGES)
    assert len(found) > 35


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("theirs", "ours"), rows())
def test_a_row(theirs: str, ours: str) -> None:
    codes = [code for code in CODE.findall(ours) if "(" in code and not code.startswith("(")]
    assert codes
    for code in codes:
        names = given()
        if code.startswith("so.from_"):
            names["model"] = had(code)
        exec(code, names)
    for code in CODE.findall(theirs):
        for name in NAME.findall(code):
            assert_exists(name)


def had(code: str) -> torch.nn.Module:
    """A model to convert; of geoopt or geotorch, where it is installed."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 3))
    if "from_geoopt" in code:
        geoopt = pytest.importorskip("geoopt")
        manifold = geoopt.Stiefel()
        model[0].weight = geoopt.ManifoldParameter(manifold.random(8, 3), manifold=manifold)
    elif "from_geotorch" in code:
        pytest.importorskip("geotorch").orthogonal(model[0], "weight")
    else:
        torch.nn.utils.parametrizations.orthogonal(model[0])
    return model


def assert_exists(name: str) -> None:
    """Look ``name`` up in its package, if that is installed."""
    module, *path = name.split(".")
    if name.startswith("ot.dr"):
        pytest.importorskip("autograd")  # which this part of POT needs
    value: Any = pytest.importorskip(module)
    for number, part in enumerate(path):
        if not hasattr(value, part):
            value = importlib.import_module(".".join([module, *path[: number + 1]]))
        else:
            value = getattr(value, part)
