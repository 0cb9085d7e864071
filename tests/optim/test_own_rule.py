"""The rule that CONTRIBUTING.md prints works as it is printed, wherever the package's own do."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import itertools
import math
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import mixed
from contract import (
    IS_ON_CPU,
    Model,
    assert_same,
    model,
    through_file,
    train,
)
from optimizers import TABLE
from processes import run
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.functional import project_tangent, retract

SEARCHING = [row.optimizer for row in TABLE.values() if row.searches]  # with other plain rules
PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
SECTION = PAGE.read_text(encoding="utf-8").partition("\n## A rule in one file\n")[2]
SOURCE, SHAMPOO = re.findall(r"^```python\n(.*?)^```$", SECTION.partition("\n## ")[0], re.M | re.S)
NAME = "rule_in_contributing"  # of a module, so that its classes can be pickled
LR, BETAS, DECAY = 0.05, (0.9, 0.99), 0.1


def as_printed() -> tuple[types.ModuleType, str]:
    """The blocks, executed; and what they print."""
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()) as printed:
        torch.manual_seed(0)
        exec(compile(SOURCE, str(PAGE), "exec"), module.__dict__)
        exec(compile(SHAMPOO, str(PAGE), "exec"), module.__dict__)
    return module, printed.getvalue()


LION, PRINTED = as_printed()
Lion: Any = LION.StiefelLion
Shampoo: Any = LION.TwoSidedShampoo


def lion(params: Any, **options: Any) -> Any:
    return Lion(params, **{"lr": LR, "betas": BETAS, "weight_decay": DECAY, **options})


def wide_net(dtype: torch.dtype = torch.float64) -> Model:
    return so.retag(model().to(dtype))


# ---- what is printed -----------------------------------------------------------------------------


def test_the_block_has_at_most_sixty_lines_and_its_rule_twenty() -> None:
    lines = SOURCE.splitlines()
    (rule,) = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.FunctionDef)]
    assert 5 <= len(list(filter(str.strip, lines[rule.lineno - 1 : rule.end_lineno]))) <= 20
    assert 30 <= len(list(filter(str.strip, lines))) <= 60
    assert 20 <= len(SHAMPOO.splitlines()) <= 60


def test_it_prints_a_report_of_its_last_step() -> None:
    assert "last step" in PRINTED
    assert " rad" in PRINTED


# ---- the same as a slow loop ---------------------------------------------------------------------


class Slow:
    """Lion as its equations stand, one matrix after the other, in float64."""

    def __init__(self, parameter: Tensor, manifold: Any) -> None:
        self.value, self.manifold = parameter.detach().clone(), manifold
        self.momentum = torch.zeros_like(self.value)

    def step(self, grad: Tensor) -> None:
        direction = (BETAS[0] * self.momentum + (1 - BETAS[0]) * grad).sgn()
        moved = (1 - LR * DECAY) * self.value - LR * direction
        self.value = self.turned(direction, moved)
        self.momentum = BETAS[1] * self.momentum + (1 - BETAS[1]) * grad

    def turned(self, gradient: Tensor, plain: Tensor) -> Tensor:
        """Where plain numbers move to `plain`, and each matrix along minus its own direction."""
        if self.manifold is None:
            return plain
        parts = zip(*(self.manifold.blocks(t) for t in (self.value, plain, gradient)), strict=True)
        for number, ((part, reading), (new, _), (slope, _)) in enumerate(parts):
            X, G, scale = reading.matrices(part), reading.matrices(slope), reading.scale
            moved = torch.empty_like(X)
            for place in itertools.product(*map(range, X.shape[:-2])):
                x, d = X[place] / scale, self.direction((number, place), G[place])
                inner = x.mH @ d
                tangent = d - x @ (inner + inner.mH) / 2
                left, _, right = torch.linalg.svd(x - LR / scale * tangent, full_matrices=False)
                moved[place] = scale * (left @ right)
            new.copy_(reading.stored(moved, new.shape))
        return plain

    def direction(self, _: Any, slope: Tensor) -> Tensor:
        return slope


class SlowShampoo(Slow):
    """Two-sided Shampoo by float64 eigenvalues, SGD without a tag."""

    def __init__(self, parameter: Tensor, manifold: Any) -> None:
        super().__init__(parameter, manifold)
        self.left: dict[Any, Tensor] = {}
        self.right: dict[Any, Tensor] = {}

    def step(self, grad: Tensor) -> None:
        self.value = self.turned(grad, self.value - LR * grad)

    def direction(self, key: Any, g: Tensor) -> Tensor:
        self.left[key] = self.left.get(key, torch.eye(g.size(0))) + g @ g.mH
        self.right[key] = self.right.get(key, torch.eye(g.size(1))) + g.mH @ g
        return root(self.left[key]) @ g @ root(self.right[key])


def root(A: Tensor) -> Tensor:
    """A^(-1/4)."""
    values, vectors = torch.linalg.eigh(A)
    return vectors @ torch.diag(values**-0.25).to(A) @ vectors.mH


WEIGHTS: dict[str, tuple[tuple[int, ...], dict[str, Any] | None]] = {
    "tall": ((9, 4), {}),
    "wide": ((4, 9), {}),
    "square": ((5, 5), {}),
    "vector": ((6, 1), {}),
    "batch": ((3, 7, 2), {"flatten": False}),
    "batch inside": ((7, 3, 2), {"row_dims": 0, "column_dims": 2}),
    "heads": ((6, 8), {"heads": 2}),
    "tall heads": ((12, 2), {"heads": 3}),
    "a range of rows": ((9, 6), {"rows": (2, 6)}),
    "ranges with heads": ((14, 10), {"rows": ((0, 4), (6, 12)), "heads": (1, 2)}),
    "batch with rows": ((4, 9, 5), {"rows": (2, 6)}),
    "convolution": ((4, 3, 3, 3), {"flatten": True}),
    "transposed": ((4, 12), {"transposed": True}),
    "scaled": ((8, 3), {"scale": 2.0}),
    "plain": ((4, 3), None),
}


def weight_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    shape, reading = WEIGHTS[name]
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if dtype.is_complex:
        value = torch.complex(value, value.flip(0))
    value = value.to(dtype)
    if reading is None:
        return nn.Parameter(value)
    return so.constrain(nn.ParameterDict({"w": value}), "w", **reading)["w"]


def grad_of(parameter: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    dtype = torch.complex128 if parameter.is_complex() else torch.float64
    return torch.randn(parameter.shape, generator=generator, dtype=dtype).to(parameter.dtype)


def reloaded(weight: Any, opt: Any) -> tuple[Any, Any]:
    fresh = lion([weight], stiefel=None if hasattr(weight, "manifold") else False)
    fresh.load_state_dict(through_file(opt.state_dict()))
    return weight, fresh


def compiled(weight: Any, opt: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    opt.step = torch.compile(opt.step, backend="eager")
    return weight, opt


WAYS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "on": lambda *pair: pair,
    "loaded": reloaded,
    "copied": lambda *pair: copy.deepcopy(pair),
    "pickled": lambda *pair: pickle.loads(pickle.dumps(pair)),
    "compiled": compiled,
}


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("name", "dtype", "way", "machine"),
    [
        *mixed(
            40,
            WEIGHTS,
            [torch.float64, torch.complex128],
            list(WAYS)[:-1],
            ["cpu", "as_accelerator"],
        ),
        pytest.param(
            *("ranges with heads", torch.float64, "compiled", "cpu"),
            marks=pytest.mark.filterwarnings("ignore"),  # of the compiler about itself
        ),
    ],
    indirect=["machine"],
)
def test_it_follows_the_slow_loop(name: str, dtype: torch.dtype, way: str) -> None:
    """Whichever way it goes on after its ninth step; its report tells the true angle."""
    weight = weight_of(name, dtype)
    manifold = getattr(weight, "manifold", None)
    slow, opt = Slow(weight, manifold), lion([weight], stiefel=None if manifold else False)
    for step in range(20):
        if step == 9:
            weight, opt = WAYS[way](weight, opt)
        weight.grad = grad_of(weight, step)
        before = slow.value
        opt.step()
        slow.step(weight.grad)
    torch.testing.assert_close(weight.detach(), slow.value, rtol=0, atol=1e-12)
    if manifold is not None:
        true = max(
            true_angle(reading.matrices(old) / reading.scale, reading.matrices(new) / reading.scale)
            for (old, reading), (new, _) in zip(
                manifold.blocks(before), manifold.blocks(slow.value), strict=True
            )
        )
        assert opt.angles_of()[weight] == pytest.approx(true, rel=0.05)


CONSTRAINED = [name for name in WEIGHTS if WEIGHTS[name][1] is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", CONSTRAINED)
def test_state_of_n_x_n_follows_the_slow_loop_through_a_checkpoint(
    name: str, dtype: torch.dtype
) -> None:
    weight = weight_of(name, dtype)
    slow, opt = SlowShampoo(weight, weight.manifold), Shampoo([weight], lr=LR)
    for step in range(12):
        weight.grad = grad_of(weight, step)
        opt.step()
        slow.step(weight.grad)
        if step == 6:
            saved = through_file(opt.state_dict())
            opt = Shampoo([weight], lr=LR)
            opt.load_state_dict(saved)
    torch.testing.assert_close(weight.detach(), slow.value, rtol=0, atol=1e-10)
    for index, (part, reading) in enumerate(weight.manifold.blocks(weight.detach())):
        *lead, n, m = reading.matrices(part).shape
        shapes = {"left": (*lead, n, n), "right": (*lead, m, m)}
        for key, shape in shapes.items():
            assert opt.state[weight][f"{key}.{index}" if index else key].shape == shape
    with pytest.raises(ValueError, match="must keep its momentum as Z and U, got left, right"):
        opt.velocity(weight)


@pytest.mark.parametrize("name", CONSTRAINED)
def test_bfloat16_has_a_master_on_the_manifold(name: str) -> None:
    weight = weight_of(name, torch.bfloat16)
    opt = lion([weight])
    for step in range(20):
        weight.grad = grad_of(weight, step)
        opt.step()
    master = opt.state[weight]["master"]
    assert master.dtype == opt.state[weight]["lion_momentum"].dtype == torch.float32
    assert so.orthonormality_error(master, manifold=weight.manifold) < 5e-6
    assert torch.equal(master.bfloat16(), weight)


# ---- what every rule of the package does ---------------------------------------------------------


def test_a_checkpoint_of_torch_is_refused_and_the_reason_said() -> None:
    weight, plain = weight_of("tall"), weight_of("plain")
    opt = lion([weight, plain])
    weight.grad, plain.grad = grad_of(weight, 0), grad_of(plain, 0)
    opt.step()
    before = copy.deepcopy(opt.state_dict())
    theirs = torch.optim.SGD([weight, plain], lr=0.1).state_dict()
    reason = r"be one of StiefelLion, got one of torch\.optim, whose rules this class does not use"
    with pytest.raises(ValueError, match=reason):
        opt.load_state_dict(theirs)
    assert_same(opt.state_dict(), before)


def true_angle(before: Tensor, after: Tensor) -> float:
    """The largest angle between X v and its new place, of tall matrices ``(..., n, m)``."""
    chord = torch.linalg.matrix_norm(after - before, 2).max()
    return 2 * math.asin(min(1.0, float(chord) / 2))


# ---- rows on two processes

SHARED = {
    "tall": ("tall", 0),
    "wide": ("wide", 1),
    "square": ("square", 0),
    "vector": ("vector", 0),
    "batch": ("batch", 1),
    "scaled": ("scaled", 0),
    "transposed": ("transposed", 1),
    "heads": ("heads", 0),
    "ranges with heads": ("ranges with heads", 1),
    "batch with rows": ("batch with rows", 0),
}


def parts(name: str, dim: int) -> tuple[Any, Any, Callable[[Tensor], Any]]:
    """A weight, the same one shared by the processes, and what shares a tensor alike."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    whole = weight_of(name)

    def share(tensor: Tensor) -> Any:
        return distribute_tensor(tensor.clone(), mesh, [Shard(dim)], src_data_rank=None)

    shard = nn.Parameter(share(whole.detach()))
    shard.manifold = getattr(whole, "manifold", None)  # type: ignore[attr-defined]
    return whole, shard, share


WHOLE = {"batch": ("batch", 0), "heads": ("heads", 0)}  # matrices on each process


def follow_one_process(make: Any = lion, cases: Any = SHARED) -> None:
    for name, dim in cases.values():
        whole, shard, share = parts(name, dim)
        alone, opt = make([whole]), make([shard])
        for step in range(12):
            whole.grad = grad_of(whole, step)
            shard.grad = share(whole.grad)
            alone.step()
            opt.step()
        torch.testing.assert_close(shard.full_tensor(), whole, rtol=0, atol=1e-12, msg=name)
        angle = torch.tensor(opt.angles_of()[shard])  # of our heads, if each has its own
        dist.all_reduce(angle, dist.ReduceOp.MAX)
        assert float(angle) == pytest.approx(alone.angles_of()[whole], rel=1e-6)


class Undeclared(Lion):  # type: ignore[misc]
    """The same rule of somebody who has not thought of several processes."""

    sums_over_rows = False


class Inherited(so.StiefelSGD):
    """Another rule in a class whose own rule forms every sum over rows by ``sums``."""

    rule = "Inherited"

    def state_for(self, group: Any) -> Any:  # noqa: ARG002
        return ()

    def rule_for(self, group: Any) -> Any:  # noqa: ARG002
        return move_straight


class SummingShampoo(Shampoo):  # type: ignore[misc]
    """State of n x n whose author promises sums over rows, which are not enough for it."""

    sums_over_rows = True


def move_straight(X: Tensor, G: Tensor, state: Any, *, lr: Any, sums: Any, **_: Any) -> Any:  # noqa: ARG001
    new_X, length = retract(X, project_tangent(X, -G), lr=lr)
    return new_X, {}, length


def refuse_shared_rows(own: Any) -> None:
    _, shard, share = parts("tall", 0)
    _, other_shard, _ = parts("batch", 0)  # whole matrices: nothing is shared
    opt = own([("other", other_shard), ("mine", shard)], lr=LR)
    for parameter in (shard, other_shard):
        parameter.grad = share(grad_of(parameter, 0))
    before = shard.to_local().clone(), other_shard.to_local().clone()
    with pytest.raises(ValueError, match=f"`mine` must not have its rows .* for {own.__name__}"):
        opt.step()
    assert torch.equal(shard.to_local(), before[0])
    assert torch.equal(other_shard.to_local(), before[1])
    del opt.param_groups[0]["params"][1]
    opt.step()
    assert not torch.equal(other_shard.to_local(), before[1])


class ByNorm(Lion):  # type: ignore[misc]
    """Plain weights take steps of one length: for plain rows that needs all processes.

    It is derived from a class with an elementwise plain rule, which vouches for that rule only.
    """

    def update_plain(self, group: Any, parameters: Any, grads: Any, states: Any) -> None:  # noqa: ARG002
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.sub_(grad * (group["lr"] / torch.linalg.vector_norm(grad)))


def refuse_shared_plain_rows() -> None:
    """Wherever a border runs; plain rows of one process and plain weights go the right length."""
    for name, dim in (("ranges with heads", 0), ("ranges with heads", 1), ("batch with rows", 0)):
        whole, shard, share = parts(name, dim)
        plain, plain_shard, _ = parts("plain", 0)
        opt = ByNorm([("mine", shard), ("other", plain_shard)], lr=LR)
        shard.grad, plain_shard.grad = (share(grad_of(each, 0)) for each in (whole, plain))
        before = shard.to_local().clone(), plain_shard.to_local().clone()
        with pytest.raises(ValueError, match=r"`mine` must not have its plain rows .* for ByNorm"):
            opt.step()
        assert torch.equal(shard.to_local(), before[0])
        assert torch.equal(plain_shard.to_local(), before[1])
        shard.grad = None
        opt.step()
        grad = grad_of(plain, 0)
        wanted = plain.detach() - LR * grad / grad.norm()
        torch.testing.assert_close(plain_shard.detach().full_tensor(), wanted, rtol=0, atol=1e-12)


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no processes")
def test_two_processes_that_share_rows_follow_one() -> None:
    refused = [(refuse_shared_rows, own) for own in (Undeclared, Inherited, SummingShampoo)]
    whole_matrices = (follow_one_process, Shampoo, WHOLE)
    run(2, (follow_one_process,), whole_matrices, *refused, (refuse_shared_plain_rows,))


# ---- whatever it is called


def own(rule: Any, *states: Any) -> Any:
    """A class with this rule and state, of constrained weights only."""

    class Own(so.optim.StiefelOptimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def state_for(self, group: Any) -> Any:  # noqa: ARG002
            return states

        def rule_for(self, group: Any) -> Any:  # noqa: ARG002
            return rule

        def update_plain(self, *_: Any) -> None:
            raise AssertionError

    return Own


@pytest.mark.parametrize(
    "name",
    ["preconditioner", "shampoo_factor", "exp_avg_sq_right", "momentum_factor", "radius_growth"],
)
@pytest.mark.parametrize("shape", ["nm", "mm", "1"])
def test_state_may_have_any_name(name: str, shape: str) -> None:
    """It is the rule's own, whatever the rules of the package call theirs."""

    def rule(X: Tensor, G: Tensor, state: Any, *, lr: Any, sums: Any, **_: Any) -> Any:
        kept = state[name]
        if shape == "1":
            kept = kept + sums((G, G))[0].diagonal(dim1=-2, dim2=-1).sum(-1).view_as(kept)
        elif shape == "mm":
            kept = kept + sums((G, G))[0]
        else:
            kept = kept + G
        moved, length = retract(X, project_tangent(X, -G, sums=sums), lr=lr, sums=sums)
        return moved, {name: kept}, length

    Counting = own(rule, so.optim.State(name, shape))
    weights = [weight_of(kind) for kind in ("tall", "wide", "heads", "square")]
    opt = Counting(weights, lr=0.01)
    expected = {weight: torch.zeros_like(weight) if shape == "nm" else 0.0 for weight in weights}
    for step in range(9):
        for weight in weights:
            weight.grad = grad_of(weight, step)
            G = weight.manifold.matrices(weight.grad)
            new = {"nm": weight.grad, "mm": G.mT @ G, "1": G.square().sum((-2, -1), keepdim=True)}
            expected[weight] = expected[weight] + new[shape]
        opt.step()
        if step == 4:
            opt.load_state_dict(through_file(opt.state_dict()))
    for weight in weights:
        assert so.orthonormality_error(weight) < 1e-12
        torch.testing.assert_close(opt.state[weight][name], expected[weight])
    (line, *_) = so.report(nn.ParameterList(weights), opt).lines
    assert line.radius is line.factor is None
    if shape != "1":  # a matrix that may be a momentum: neither read as zero nor set in silence
        with pytest.raises(ValueError, match=f"must keep its momentum as Z and U, got {name}"):
            opt.velocity(weights[0])
        with pytest.raises(ValueError, match="must keep its momentum as Z and U"):
            opt.set_velocity(weights[0], torch.zeros(4, 4), torch.zeros(16, 4))


def test_two_rules_may_declare_one_name_differently() -> None:
    """Of its momentum each is told what it has declared itself."""

    def rule(X: Tensor, G: Tensor, state: Any, *, lr: Any, sums: Any, **_: Any) -> Any:
        moved, length = retract(X, project_tangent(X, -G, sums=sums), lr=lr, sums=sums)
        return moved, {"momentum_normal": state["momentum_normal"] + 1}, length

    Counting = own(rule, so.optim.State("momentum_normal", "1"))
    weights = [weight_of(kind) for kind in ("tall", "wide", "heads")]
    others = copy.deepcopy(weights)
    opt = so.StiefelSGD(weights, lr=0.01, nesterov=True)
    other = Counting(others, lr=0.01)
    for each in (opt, other):
        for weight in each.param_groups[0]["params"]:
            weight.grad = grad_of(weight, 0)
        each.step()
    for weight, stranger in zip(weights, others, strict=True):
        Z, U = opt.velocity(weight)
        X = weight.manifold.matrices(weight.detach())
        assert float((X.mT @ U).abs().max()) < 1e-12 < float(U.abs().max())
        opt.set_velocity(weight, Z, U)
        torch.testing.assert_close(opt.velocity(weight)[1], U)
        assert bool((other.state[stranger]["momentum_normal"] == 1).all())


def test_an_option_is_called_as_its_author_likes() -> None:
    """Words of the package's own options mean nothing to it in a stranger's rule."""
    words = (
        "betas",
        "momentum",
        "metric",
        "transport",
        "eps",
        "steps",
        "plain",
        "amsgrad",
        "radius",
        "nesterov",
        "rotation",
    )

    def descend(X: Tensor, G: Tensor, _: Any, *, lr: Any, sums: Any, **__: Any) -> Any:
        moved, length = retract(X, project_tangent(X, -G, sums=sums), lr=lr, sums=sums)
        return moved, {}, length

    class Plain(so.optim.StiefelOptimizer):
        def state_for(self, group: Any) -> Any:  # noqa: ARG002
            return ()

        def rule_for(self, group: Any) -> Any:
            assert [group[word] for word in words] == ["mine"] * len(words)
            return descend

        def update_plain(self, group: Any, parameters: Any, grads: Any, states: Any) -> None:
            for parameter, grad, state in zip(parameters, grads, states, strict=True):
                state["seen"] = state.get("seen", 0) + 1
                parameter.sub_(grad, alpha=group["lr"])

    net = wide_net()
    opt = Plain(net.parameters(), {"lr": 0.01, **dict.fromkeys(words, "mine")})
    assert all(f"    {word}: mine\n" in repr(opt) for word in words)
    train(net, opt, 0, 3)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(net, opt, 3, 12)
    assert so.orthonormality_error(net) < 1e-12
    assert so.report(net, opt).lines[0].angle > 0
    assert opt.state[net.out.weight] == {"seen": 12}


@pytest.mark.parametrize("base", [so.optim.SGDLike, so.optim.AdamLike, *SEARCHING])
@pytest.mark.parametrize("name", ["init_plain", "update_plain"])
@pytest.mark.parametrize("is_inherited", [False, True])
def test_a_plain_rule_that_would_be_ignored_is_refused(
    base: Any, name: str, is_inherited: bool
) -> None:
    """Torch's own rules are called by the class itself; these methods would never be."""
    ours = {name: lambda *_: None}
    bases, body = ((type("Mixin", (), ours), base), {}) if is_inherited else ((base,), ours)
    with pytest.raises(TypeError, match=f"`Mine` must .*, got {name}; derive .*StiefelOptimizer"):
        type("Mine", bases, body)


# ---- plain weights


def test_plain_state_of_the_same_name_is_neither_lost_nor_taken_for_another() -> None:
    """Its plain momentum has the name of the constrained one, and the shape."""
    weight, plain = weight_of("tall"), weight_of("plain")
    opt = lion([weight, plain])
    for step in range(3):
        weight.grad, plain.grad = grad_of(weight, step), grad_of(plain, step)
        opt.step()
    kept = opt.state[plain]["lion_momentum"].clone()
    later = weight_of("batch")
    opt.add_param_group({"params": [later]})
    opt.param_groups[0]["params"] = [plain, weight]  # as somebody may order them anew
    plain.grad, weight.grad, later.grad = None, None, grad_of(later, 0)
    opt.step()
    assert torch.equal(opt.state[plain]["lion_momentum"], kept)
    # the plain weight is constrained from now on: its momentum starts again, and the other way
    plain.requires_grad_(True)
    holder = so.constrain(nn.ParameterDict({"w": plain}), "w", rows=(0, 3))
    plain, opt.param_groups[0]["params"][0] = holder["w"], holder["w"]
    plain.grad = torch.zeros_like(plain)
    opt.step()
    assert not opt.state[plain]["lion_momentum"].any()


# ---- what a rule may not do ----------------------------------------------------------------------


def descent(X: Tensor, G: Tensor, *_: Any, lr: Any, sums: Any, reader: Any, **__: Any) -> Any:
    """A rule without state that takes any option."""
    new_X, length = retract(X, project_tangent(X, -G, sums=sums), lr=lr, sums=sums, reader=reader)
    return new_X, {}, length


def returning(change: Callable[..., Any], *states: Any, family: Any = so.optim.SGDLike) -> Any:
    """A class whose rule, `oblique`, returns what ``change`` makes of the point, G and the move."""

    def oblique(X: Tensor, G: Tensor, *given: Any, **options: Any) -> Any:
        return change(X, G, *descent(X, G, *given, **options))

    class Oblique(family):  # type: ignore[misc]
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def state_for(self, group: Any) -> Any:  # noqa: ARG002
            return states

        def rule_for(self, group: Any) -> Any:
            return self.bound(group, oblique)

    return Oblique


A = so.optim.State("a")
_SHAPE = r"must be a tensor of shape \(2, 4, 3\), got shape"
RETURNED: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "two things": (lambda *move: move[2:4], (), "`oblique` must return the point, a dict"),
    "a column": (
        lambda *move: (move[2][..., :1], *move[3:]),
        (),
        rf"`point that oblique returns` {_SHAPE} \(2, 4, 1\)",
    ),
    "state that is not declared": (
        lambda *move: (move[2], {"b": move[2]}, move[4]),
        (A,),
        r"`new state of oblique` must be a dict with names of \['a'\], got \['b'\]",
    ),
    "no state": (lambda *move: (move[2], None, move[4]), (), "must be a dict .* got NoneType"),
    "state of another shape": (
        lambda *move: (move[2], {"a": move[2][:, :1]}, move[4]),
        (A,),
        rf"`a that oblique returns` {_SHAPE} \(2, 1, 3\)",
    ),
    "a length for each matrix, without dimensions": (
        lambda *move: (move[2], {}, move[2].new_ones(2)),
        (),
        r"`length that oblique returns` must be a tensor of shape \(2, 1, 1\), got shape \(2,\)",
    ),
    "no length": (lambda *move: (*move[2:4], None), (), "`length that oblique returns` must be"),
    "whose state has a name twice": (
        lambda *move: move[2:],
        (A, so.optim.State("a", "mm")),
        r"`state_for` must return each name once, got \['a', 'a'",
    ),
}


def two_heads() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    weight = so.ManifoldParameter(torch.randn(8, 3), so.Stiefel(heads=2))
    return weight, torch.randn(8, 3)


@pytest.mark.parametrize("case", RETURNED)
def test_what_no_rule_may_return_is_refused_before_anything_is_written(case: str) -> None:
    change, states, message = RETURNED[case]
    weight, weight.grad = two_heads()
    before = weight.detach().clone()
    opt = returning(change, *states)([weight])
    with pytest.raises((ValueError, TypeError), match=message):
        opt.step()
    assert_same(weight.detach(), before)
    assert not any(opt.state[weight].get("a", torch.zeros(1)).flatten())


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("make", [so.StiefelSGD, returning(lambda *move: move[2:])])
def test_a_step_that_jumps_is_cut_where_the_host_waits_for_nothing(
    make: Any, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 0.24 or, if that is longer, to twice the length of the last one."""
    monkeypatch.setattr(IS_ON_CPU, lambda _: waits)
    weight = weight_of("tall")
    opt = make([weight])
    opt.param_groups[0].update(lr=1.0, momentum=0.0)
    for size in (0.01, 0.01, 2.0):
        before = weight.detach().clone()
        tangent = so.project_tangent(before, grad_of(weight, 0))
        weight.grad = size * tangent / torch.linalg.matrix_norm(tangent, 2)
        opt.step()
    angle = true_angle(before, weight.detach())
    assert angle > 0.9 if waits else 0.1 < angle < 0.27


DECLARED: list[dict[str, str]] = [
    {"start": "J"},
    {"start": "I"},
    {"start": "I", "shape": "1"},
    {"dtype": "float64"},
    {"symmetry": "skew"},
    {"symmetry": "symmetric"},
    {"symmetry": "normal", "shape": "mm"},
    {"symmetry": "orthogonal"},
    {"symmetry": "normal", "shape": "nn"},
    {"shape": "kk"},
    *({"name": name} for name in ("step", "exp_avg", "momentum_buffer", "master", "a.b")),
]


@pytest.mark.parametrize("options", DECLARED)
def test_state_that_no_step_could_use_is_refused_where_it_is_declared(options: Any) -> None:
    message = "`name` must be a name of its own without a dot" if "name" in options else "one of"
    with pytest.raises(ValueError, match=message):
        so.optim.State(**{"name": "a", **options})


@pytest.mark.parametrize("family", [so.optim.SGDLike, so.optim.AdamLike])
def test_the_families_have_torchs_options_where_a_rule_names_none(family: Any) -> None:
    torch.manual_seed(0)
    weight, plain = so.ManifoldParameter(torch.randn(8, 3)), nn.Parameter(torch.randn(3))
    twin = nn.Parameter(plain.detach().clone())
    torchs = {so.optim.SGDLike: torch.optim.SGD, so.optim.AdamLike: torch.optim.Adam}[family]
    bare = returning(lambda *move: move[2:], family=family)
    ours, theirs = bare([weight, plain]), torchs([twin], lr=0.1)
    for _ in range(3):
        weight.grad, plain.grad = torch.randn(8, 3), torch.randn(3)
        twin.grad = plain.grad.clone()
        ours.step()
        theirs.step()
    assert_same(plain.detach(), twin.detach())
    assert so.orthonormality_error(weight) < 1e-5


# ---- rules that go wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2, 5, 9])
def test_a_rule_that_leaves_the_manifold_in_any_step_is_told(first: int) -> None:
    def leaves(X: Tensor, G: Tensor, _: Any, *, lr: float, step: float, **__: Any) -> Any:
        return (X - lr * G if step >= first else X), {}, 0.1

    weight = weight_of("tall")
    optimizer = own(leaves)([weight], lr=0.1)
    for step in range(1, first + 1):
        weight.grad = grad_of(weight, step)
        if step < first:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match="leaves returned points that are off"):
                optimizer.step()


@pytest.mark.parametrize("written", ["point", "gradient"])
def test_a_rule_that_writes_to_what_it_is_given_is_refused(written: str) -> None:
    def writes(X: Tensor, G: Tensor, _: Any, *, lr: float, step: float, **__: Any) -> Any:
        if step >= 2:
            (X if written == "point" else G).mul_(1.0)
        return retract(X, project_tangent(X, -lr * G))[0], {}, 0.1

    weight = weight_of("tall")
    optimizer = own(writes)([weight], lr=0.1)
    weight.grad = grad_of(weight, 0)
    optimizer.step()
    with pytest.raises(ValueError, match="must write to nothing that it is given"):
        optimizer.step()


def test_symmetric_state_that_a_rule_rounds_is_copied_to_the_bit() -> None:
    def rule(X: Tensor, G: Tensor, state: Any, *, lr: float, **_: Any) -> Any:
        P = 0.9 * state["second"] + torch.einsum("kni,knj->kij", 1.3 * G, G / 1.3)
        eye = torch.eye(P.size(-1), dtype=P.dtype)
        move = project_tangent(X, -lr * torch.linalg.solve(P + eye, G.mT).mT)
        return retract(X, move)[0], {"second": P}, 0.1

    state = so.optim.State("second", "mm", symmetry="symmetric")
    torch.manual_seed(3)
    ours = so.ManifoldParameter(torch.randn(31, 14))
    optimizer = own(rule, state)([ours], lr=0.1)
    pairs = [(ours, optimizer)]
    for step in range(8):
        for weight, each in pairs:
            weight.grad = torch.randn(31, 14, generator=torch.Generator().manual_seed(step))
            each.step()
        if step == 3:
            pairs.append(copy.deepcopy((ours, optimizer)))
    assert torch.equal(pairs[0][0], pairs[1][0])
    loaded = optimizer.state_dict()
    loaded["state"][0]["second"] = loaded["state"][0]["second"].triu() * 1.0
    optimizer.load_state_dict(loaded)  # what is not rounding is made symmetric
    optimizer.step()
    kept = optimizer.state[ours]["second"]
    assert (kept - kept.mT).abs().max() < 1e-5 * kept.abs().max()
