"""Adapters where peft is not installed: what can be done without it, and one clear error."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import stiefel_opt as so

WITHOUT_PEFT = """
import sys
sys.modules["peft"] = None  # an import raises
import torch
import stiefel_opt as so

assert "StellaConfig" not in vars(so)
try:
    so.StellaConfig
except ImportError as error:
    print(error)
try:
    so.constrain_adapters(torch.nn.Linear(3, 3))
except ValueError as error:
    print(error)
"""


def test_what_is_missing_is_said() -> None:
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_PEFT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    missing, nothing = result.stdout.strip().splitlines()
    assert missing.startswith("peft must be installed, got ")
    assert missing.endswith("pip install 'peft>=0.21'")
    assert nothing.startswith("`model` must have blocks of OFT, P and Q of AdaLoRA, or ")
    assert "got a Linear without adapters" in nothing


class LoReFT(nn.Module):
    """h + R'(W h + b - R h), R from torch's parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = nn.utils.parametrizations.orthogonal(nn.Linear(6, 2, bias=False))
        self.source = nn.Linear(6, 2)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + (self.source(h) - self.rotate(h)) @ self.rotate.weight


def test_a_rotation_of_torch_there_and_back() -> None:
    model, x = LoReFT(), torch.randn(4, 6)
    keys, before = list(model.state_dict()), model(x)
    done = so.constrain_adapters(model)
    assert repr(done).startswith("parameters of adapters constrained: 1\n")
    assert done.lines == (
        ("rotate.weight", "rotation", "2 x 6", "a parameter; torch's parametrization is gone"),
    )
    torch.testing.assert_close(model(x), before)
    with pytest.raises(ValueError, match="`model` must have blocks of OFT"):
        so.constrain_adapters(model)
    assert so.export_adapters(model).action == "exported"
    assert list(model.state_dict()) == keys
    torch.testing.assert_close(model(x), before)
    with pytest.raises(ValueError, match="`model` must have constrained adapters"):
        so.export_adapters(model)


def test_a_rotation_that_left_the_manifold_is_not_exported() -> None:
    model = LoReFT()
    so.constrain_adapters(model)
    with torch.no_grad():
        model.rotate.weight[0] *= 1.01
    with pytest.raises(ValueError, match=r"`rotate.weight` must be orthogonal, .*off the manifold"):
        so.export_adapters(model)
    so.project_(model)
    assert so.export_adapters(model).action == "exported"


@pytest.mark.parametrize("call", [so.constrain_adapters, so.export_adapters])
def test_bad_arguments(call) -> None:
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module"):
        call("model")
    with pytest.raises(ValueError, match="`tolerance` must be in"):
        call(LoReFT(), tolerance=-1.0)
    with pytest.raises(ValueError, match="`adapter` must be an adapter of peft, got 'default'"):
        call(LoReFT(), "default")
