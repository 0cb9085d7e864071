"""Advice on constraining a layer: its table says what the files of results hold."""

import json

import pytest

from benchmarks.accuracy import own_models
from stiefel_opt import ManifoldParameter


def test_the_file_holds_what_its_runs_say() -> None:
    stored = json.loads(own_models.FILE.read_text(encoding="utf-8"))
    tables = own_models.tables(stored["runs"], stored["seeds"])
    assert all(stored["tables"][name] == table for name, table in tables.items())
    assert stored["tables"]["decisions"] == own_models.decisions(tables["best"])


@pytest.mark.parametrize("name", own_models.MODELS)
def test_only_the_weights_that_are_named_are_constrained(name: str) -> None:
    for method in (*own_models.METHODS, own_models.MODELS[name][3]):
        model = own_models.build(name, method)
        tagged = [n for n, p in model.named_parameters() if isinstance(p, ManifoldParameter)]
        assert bool(tagged) != method.startswith("unconstrained"), method
        assert all("weight_hh" in n or name == "CNN" for n in tagged)
