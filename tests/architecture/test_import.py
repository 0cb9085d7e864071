"""What ``import stiefel_opt`` costs beside torch, and that it works where torch has no DTensor."""

import ast
import inspect
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import stiefel_opt as so
from stiefel_opt.numerics.distributed import gathered, is_sharded, local_part

BESIDE_TORCH = """
import sys
calls = 0
def count(*_):
    global calls
    calls += 1
sys.setprofile(count)
import torch
of_torch, before = calls, set(sys.modules)
import stiefel_opt
sys.setprofile(None)
others = [name for name in set(sys.modules) - before if name.split(".")[0] != "stiefel_opt"]
assert not others, sorted(others)
known = {name.split(".")[1] for name in sys.modules if name.startswith("stiefel_opt.")}
assert known == {"errors", "numerics", "tags", "functional", "optim"}, known
print((calls - of_torch) / of_torch)
"""

WITHOUT_DISTRIBUTED = """
import sys
import torch

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch.distributed.tensor", "torch.distributed.fsdp")):
            raise ModuleNotFoundError(name)

torch.distributed.is_available = lambda: False
sys.meta_path.insert(0, Missing())

import copy
import stiefel_opt as so
from stiefel_opt.numerics.distributed import gathered, is_sharded, local_part

model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 4))
so.constrain(model[0])
so.orthogonal(model[1])
assert local_part(model[0].weight) is gathered(model[0].weight) is model[0].weight
for make in (so.StiefelSGD, so.StiefelAdam, so.ProjectedRGD, so.CayleySGD, so.CayleyAdam):
    optimizer = make(so.param_groups(model), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).square().sum().backward()
        so.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copy.deepcopy(model).load_state_dict(model.state_dict())
    so.report(model, optimizer)
print(float(so.orthonormality_error(model)))
"""


def printed(script: str) -> float:
    """Run a script in a process of its own; return the number that it prints."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return float(result.stdout)


def test_importing_makes_three_hundredths_of_torch_s_calls_at_most() -> None:
    """And imports no client, nor what torch does not. Calls are counted, as times vary."""
    assert printed(BESIDE_TORCH) < 0.03


def for_type_checkers() -> dict[str, str]:
    """The module of every name that `stiefel_opt` imports under TYPE_CHECKING only."""
    tree = ast.parse(inspect.getsource(so))
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_a_type_checker_sees_what_is_imported_at_its_first_use() -> None:
    rooms = dict.fromkeys(so._ROOMS, "stiefel_opt")
    assert for_type_checkers() == rooms | {n: f"stiefel_opt.{h}" for n, h in so._HOMES.items()}


def test_every_name_of_the_face_is_there() -> None:
    """But for that of peft, which a star does not import."""
    assert {*so._HOMES} - {*so.__all__} == {"StellaConfig"}
    assert {*so.__all__, "StellaConfig"} <= {*dir(so)}
    for name in so.__all__:
        value = getattr(so, name)
        assert getattr(so, name) is value
        if inspect.isclass(value):
            assert pickle.loads(pickle.dumps(value)) is value
    with pytest.raises(AttributeError, match="module 'stiefel_opt' has no attribute 'StiefelSDG'"):
        _ = so.StiefelSDG


def test_works_where_torch_has_no_distributed() -> None:
    assert printed(WITHOUT_DISTRIBUTED) < 1e-5


@pytest.mark.parametrize("value", [torch.ones(2), nn.Parameter(torch.ones(2)), None, "text"])
def test_what_is_not_sharded_is_as_it_is(value: object) -> None:
    assert not is_sharded(value)
    if isinstance(value, torch.Tensor):
        assert local_part(value) is gathered(value) is value


def test_asking_in_a_compiled_function_is_one_graph() -> None:
    weight = so.ManifoldParameter(torch.eye(3))
    compiled = torch.compile(lambda p: local_part(p) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(weight), 2 * torch.eye(3))
