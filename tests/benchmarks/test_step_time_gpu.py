"""The check of captured steps, where a double takes the place of CUDA graphs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from graph_double import doubled

import stiefel_opt as so

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what the rivals import
    pytest.importorskip("geoopt")
    pytest.importorskip("pogo.base")

gpu = pytest.importorskip("benchmarks.speed.step_time_gpu")
CPU = torch.device("cpu")


@pytest.mark.usefixtures("as_accelerator")
@pytest.mark.parametrize("rule", [so.StiefelSGD, so.StiefelAdam])
def test_captured_steps_are_compared_with_eager_ones(rule: Any) -> None:
    with doubled("cpu"):
        eager, first = gpu.moved(rule, 1e-2, CPU, cuda_graph=False)
        captured, second = gpu.moved(rule, 1e-2, CPU, cuda_graph=True)
    assert first == "eager, cuda_graph=False"
    assert second.startswith("captured")
    assert 0 <= float((eager - captured).abs().max()) < gpu.NEAR
