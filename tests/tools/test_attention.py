"""Attention modules found by their attributes, and constrained.

The attention modules are written out with the attribute names of the packages that they stand for;
each says how a head's weights are cut out of what is stored.
"""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import in_turn
from contract import warnings_of
from torch import Tensor, nn

import stiefel_opt as so
from stiefel_opt.nn import MultiheadAttention

WIDTH, HEADS, KEY_HEADS, SIZE = 12, 4, 2, 3  # SIZE: the width of a head


def gram_error(matrix: Tensor) -> float:
    tall = matrix if matrix.size(0) >= matrix.size(1) else matrix.mT
    return float((tall.mT @ tall - torch.eye(tall.size(1), dtype=tall.dtype)).abs().max())


# ---- attention ---------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer that stores its weight (in, out), as in GPT-2."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Attention(nn.Module):
    """Attention with linear layers of these names and widths, or other layers."""

    def __init__(self, layers: dict[str, Any], **attributes: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, nn.Linear(WIDTH, layer) if isinstance(layer, int) else layer)
        for name, value in (attributes or {"num_heads": HEADS}).items():
            setattr(self, name, value)


def timm() -> Attention:
    """One weight, queries over keys over values, a head's rows next to each other."""
    return Attention({"qkv": 3 * WIDTH, "proj": WIDTH})


def bert(**attributes: Any) -> Attention:
    layers = dict.fromkeys(("query", "key", "value"), WIDTH)
    return Attention(layers, **(attributes or {"num_attention_heads": HEADS}))


def llama() -> Attention:
    """Fewer heads of keys and values than of queries; the numbers are in the config."""
    sizes = {"q": HEADS * SIZE, "k": KEY_HEADS * SIZE, "v": KEY_HEADS * SIZE, "o": WIDTH}
    config = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS)
    return Attention({f"{letter}_proj": size for letter, size in sizes.items()}, config=config)


def gpt2(**parts: int) -> Attention:
    return Attention({name: Conv1D(size, WIDTH) for name, size in parts.items()})


def thirds(weight: Tensor) -> dict[str, Tensor]:
    return dict(zip("qkv", weight.chunk(3), strict=True))


def torch_weights(m: nn.MultiheadAttention) -> dict[str, Tensor]:
    if m.in_proj_weight is not None:
        return thirds(m.in_proj_weight)
    return {"q": m.q_proj_weight, "k": m.k_proj_weight, "v": m.v_proj_weight}


# how to make the module, and (out, in) weights of its queries, keys and values
MODULES = {
    "torch": (lambda: nn.MultiheadAttention(WIDTH, HEADS), torch_weights),
    "torch-narrow": (lambda: nn.MultiheadAttention(WIDTH, HEADS, kdim=7, vdim=5), torch_weights),
    "torch-layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, HEADS, 8),
        lambda m: torch_weights(m.self_attn),
    ),
    "timm": (timm, lambda m: thirds(m.qkv.weight)),
    "lucidrains": (
        lambda: Attention({"to_qkv": 3 * WIDTH}, heads=HEADS),
        lambda m: thirds(m.to_qkv.weight),
    ),
    "bert": (
        bert,
        lambda m: {"q": m.query.weight, "k": m.key.weight, "v": m.value.weight},
    ),
    "llama": (
        llama,
        lambda m: {"q": m.q_proj.weight, "k": m.k_proj.weight, "v": m.v_proj.weight},
    ),
    "gpt2": (
        lambda: gpt2(c_attn=3 * WIDTH, c_proj=WIDTH),
        lambda m: thirds(m.c_attn.weight.T),
    ),
    "gpt2-cross": (
        lambda: gpt2(c_attn=2 * WIDTH, q_attn=WIDTH),
        lambda m: {
            "q": m.q_attn.weight.T,
            "k": m.c_attn.weight.T[:WIDTH],
            "v": m.c_attn.weight.T[WIDTH:],
        },
    ),
    "cross": (
        lambda: Attention({"to_q": WIDTH, "to_kv": 2 * WIDTH}, heads=HEADS),
        lambda m: {
            "q": m.to_q.weight,
            "k": m.to_kv.weight[:WIDTH],
            "v": m.to_kv.weight[WIDTH:],
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "which", "constraint"),
    in_turn(
        [*MODULES] * 2, ["q", "qkv", "k", "kv", "qk", "qkv", "q"], ["within", "across", "within"]
    ),
)
def test_what_was_asked_for_is_orthonormal_and_the_rest_is_untouched(name, constraint, which):
    make, weights = MODULES[name]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Sequential(make()))
    before = copy.deepcopy(model)
    found = so.constrain_attention(model, constraint, which)
    for module, old in ((model[1], before[1]), (model[2][0], before[2][0])):
        for letter, weight in weights(module).items():
            if letter not in which:
                assert torch.equal(weight, weights(old)[letter])
                continue
            for block in weight.split(SIZE if constraint == "within" else len(weight)):
                assert gram_error(block.detach()) < 1e-5
    tagged = {n for n, p in model.named_parameters() if isinstance(p, so.ManifoldParameter)}
    assert {line[0] for line in found.lines} == tagged
    assert found.skipped == ()
    for n, p in model.named_parameters():
        assert n in tagged or torch.equal(p, before.get_parameter(n))
    assert str(found).count("\n") == 2 + len(tagged)


@pytest.mark.parametrize("constraint", ["within", "across"])
def test_torch_and_ours_become_the_same(constraint):
    theirs = nn.MultiheadAttention(WIDTH, HEADS)
    ours = MultiheadAttention(WIDTH, HEADS, constraint=None)
    ours.load_state_dict(theirs.state_dict())
    so.constrain_attention(theirs, constraint)
    so.constrain_attention(ours, constraint)
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert ours.in_proj_weight.manifold == theirs.in_proj_weight.manifold
    direct = MultiheadAttention(WIDTH, HEADS, constraint=constraint)
    assert direct.in_proj_weight.manifold == theirs.in_proj_weight.manifold
    assert ours.constraint == constraint  # so that resetting its parameters projects again
    ours._reset_parameters()
    assert so.orthonormality_error(ours) < 1e-5


# ---- several projections in one weight ---------------------------------------------------------


def side_by_side(weight: Tensor, keys: int, value: int) -> dict[str, Tensor]:
    parts = weight.split([HEADS * SIZE, keys * SIZE, keys * value])
    return dict(zip("qkv", parts, strict=True))


def one_after_the_other(weight: Tensor, keys: int, value: int) -> dict[str, Tensor]:
    groups = weight.unflatten(0, (keys, -1)).split([HEADS // keys * SIZE, SIZE, value], dim=1)
    return {letter: part.flatten(0, 1) for letter, part in zip("qkv", groups, strict=True)}


# name, heads of keys, width of values, attributes, and how the rows are taken apart
FUSED = {
    "NeoX": ("query_key_value", HEADS, SIZE, {}, one_after_the_other),
    "Falcon": ("query_key_value", KEY_HEADS, SIZE, {"num_kv_heads": 2}, one_after_the_other),
    "Falcon, one key": ("query_key_value", 1, SIZE, {"num_kv_heads": 1}, one_after_the_other),
    "Phi-3": ("qkv_proj", KEY_HEADS, SIZE, {"num_key_value_heads": 2}, side_by_side),
    "StarCoder": ("c_attn", 1, SIZE, {"kv_heads": 1, "multi_query": True}, side_by_side),
    "MaxViT": ("qkv", HEADS, SIZE, {"head_first": True}, one_after_the_other),
    "LeViT": ("queries_keys_values", HEADS, 2 * SIZE, {}, one_after_the_other),
}
OUTPUT = {"qkv_proj": "o_proj", "queries_keys_values": "projection"}


class FusedAttention(Attention):
    """Attention with one weight for queries, keys and values."""

    def __init__(self, kind: str) -> None:
        name, keys, value, attributes, self.take_apart = FUSED[kind]
        rows = HEADS * SIZE + keys * (SIZE + value)
        layers = {
            name: nn.Sequential(nn.Linear(WIDTH, rows, bias=False), nn.BatchNorm1d(rows)),
            OUTPUT.get(name, "dense"): nn.Linear(HEADS * value, WIDTH),
        }
        super().__init__(layers, num_attention_heads=HEADS, **attributes)


@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "qkv"])
@pytest.mark.parametrize("kind", FUSED)
def test_rows_of_fused_weights_are_read_as_the_separate_ones_would_be(kind, which):
    name, keys, value, _, take_apart = FUSED[kind]
    fused = FusedAttention(kind)
    so.constrain_attention(fused, which=which)
    weight = dict(fused.named_children())[name][0].weight
    heads = [
        matrix
        for letter, part in take_apart(torch.arange(len(weight)), keys, value).items()
        if letter in which
        for matrix in part.split(value if letter == "v" else SIZE)
    ]
    places, found = torch.arange(len(weight))[:, None].expand(-1, WIDTH), []
    for index, part in enumerate(weight.manifold.parts(places)):
        matrices = weight.manifold.matrices(part, index)
        found += [each.unique().tolist() for each in matrices.reshape(-1, *matrices.shape[-2:])]
    assert sorted(found) == sorted(head.tolist() for head in heads)
    for head in heads:
        assert gram_error(weight.detach()[head]) < 1e-5


@pytest.mark.parametrize("order", ["qkv", "(qkv)"])
def test_names_say_the_order_of_rows(order):
    model = Attention({"all": 3 * WIDTH})
    so.constrain_attention(model, which="k", names={order: "all"})
    rows = torch.arange(3 * WIDTH)[:, None]
    keys = (side_by_side if order == "qkv" else one_after_the_other)(rows, HEADS, SIZE)["k"]
    assert torch.equal(torch.cat(model.all.weight.manifold.parts(rows)), keys)


@pytest.mark.parametrize("which", ["q", "k", "v", "kv", "qkvo"])
def test_latent_attention_is_read_by_what_its_rows_become(which):
    """Queries, keys and values made of latents, and a part of all keys that is rotated."""
    layers = {
        "q_a_proj": 9,
        "q_b_proj": nn.Linear(9, HEADS * (SIZE + 2)),
        "kv_a_proj_with_mqa": 7 + 2,
        "kv_b_proj": nn.Linear(7, HEADS * (SIZE + 4)),
        "o_proj": nn.Linear(HEADS * 4, WIDTH),
    }
    model = Attention(layers)
    so.constrain_attention(model, which=which)
    _, rotated = model.kv_a_proj_with_mqa.weight.split([7, 2])
    pairs = model.kv_b_proj.weight.unflatten(0, (HEADS, -1))
    matrices = {
        "q": model.q_b_proj.weight.split(SIZE + 2),
        "k": [rotated, *pairs[:, :SIZE]],
        "v": pairs[:, SIZE:],
        "o": model.o_proj.weight.split(4, dim=1),
    }
    for letter, own in matrices.items():
        for matrix in own:
            assert (gram_error(matrix.detach()) < 1e-5) == (letter in which)


def test_gates_beside_queries_are_no_queries():
    sizes = {"q": 2 * HEADS * SIZE, "k": KEY_HEADS * SIZE, "v": KEY_HEADS * SIZE}
    layers = {f"{letter}_proj": size for letter, size in sizes.items()}
    model = Attention(layers, num_heads=HEADS, num_kv_heads=KEY_HEADS)
    so.constrain_attention(model)
    pairs = model.q_proj.weight.detach().unflatten(0, (HEADS, 2, SIZE))
    for query, gate in pairs:
        assert gram_error(query) < 1e-5 < gram_error(gate)
    assert model.k_proj.weight.manifold == so.Stiefel(heads=KEY_HEADS)


def test_what_looks_like_attention_but_is_unknown_is_left_alone_and_named():
    unknown = Attention({"all_in_one": 3 * WIDTH})
    model = nn.Sequential(unknown, timm())
    before = unknown.all_in_one.weight.detach().clone()
    found = so.constrain_attention(model)
    assert [line[0] for line in found.lines] == ["1.qkv.weight"]
    assert found.skipped == (("0", "Attention: its parts are all_in_one"),)
    assert "takes what you name):\n  0: Attention: its parts are all_in_one" in str(found)
    assert torch.equal(unknown.all_in_one.weight, before)


def wrapped():
    module = bert()
    module.key = nn.Sequential(module.key, nn.Linear(WIDTH, WIDTH))
    return module


def not_finite():
    model = nn.Sequential(timm(), timm())
    with torch.no_grad():
        model[1].qkv.weight[0, 0] = math.nan
    return model


def computed():
    return so.orthogonal(nn.MultiheadAttention(WIDTH, HEADS), "in_proj_weight")


WIDTHS = {"to_q": WIDTH, "to_k": WIDTH, "to_v": WIDTH}
REFUSED = [
    (
        lambda: Attention({"to_q": WIDTH, "to_k": WIDTH}),
        {"which": "qkv"},
        r"it has no linear layer for \['v'\]",
    ),
    (
        lambda: Attention(WIDTHS, num_heads=HEADS, num_key_value_heads=KEY_HEADS),
        {},
        "its keys have the width of 4 heads, but it states 2",
    ),
    (lambda: Attention(WIDTHS, num_heads=5), {}, "5 heads do not divide queries of 12"),
    (
        lambda: Attention({**WIDTHS, "to_v": 13}),
        {"which": "qkv"},
        "4 heads do not divide values of 13",
    ),
    (
        lambda: Attention({"qkv": 35}),
        {},
        "qkv.weight has 35 rows, which are no 4 heads of queries and 4 of keys and values",
    ),
    (
        lambda: Attention({**WIDTHS, "to_out": nn.Linear(18, WIDTH)}),
        {"which": "o"},
        "to_out has 18 inputs, its heads 12 values",
    ),
    (computed, {}, "its in_proj_weight is computed by a parametrization"),
    (lambda: nn.Linear(3, 3), {}, "`model` must contain an attention.*are: Linear"),
    (
        lambda: Attention({"qkv": 3 * WIDTH}, num_heads=HEADS, num_key_value_heads=KEY_HEADS),
        {"constraint": "across"},
        "the model itself: Attention: its keys have the width of 4 heads, but it states 2",
    ),
    (
        lambda: Attention({"query_key_value": 3 * WIDTH}),
        {"constraint": "across"},
        "query_key_value holds one head after the other.*use 'within'",
    ),
    (
        lambda: Attention({"qkv_proj": 3 * WIDTH}),
        {},
        r"the order of the rows of qkv_proj differs.*names={'qkv': 'qkv_proj'}.*{'\(qkv\)'",
    ),
    (  # queries and gates in one weight, as in Qwen3-Next
        lambda: Attention({**WIDTHS, "to_q": 24}, num_heads=4, num_key_value_heads=4),
        {"constraint": "across"},
        "to_q holds one head after the other",
    ),
    (lambda: bert(other=1), {}, "neither it nor its config has one of num_heads"),
    (wrapped, {}, "key is a torch.Sequential, not a linear layer"),
    (not_finite, {}, "`1.qkv.weight` must be finite"),
    (timm, {"constraint": "inside"}, "`constraint` must be one of"),
    (lambda: MultiheadAttention(WIDTH, HEADS), {"which": "v"}, "it constrains 'qk' itself"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), REFUSED)
def test_what_cannot_be_constrained_is_refused_and_unchanged(make, arguments, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        so.constrain_attention(model, **arguments)
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value) or not value.isfinite().all()
    if type(model) is not MultiheadAttention:
        assert not any(isinstance(p, so.ManifoldParameter) for p in model.parameters())


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, got NoneType"):
        so.constrain_attention(None)


# ---- the projection of the joined heads --------------------------------------------------------


def joined(output: nn.Module) -> Attention:
    """Attention whose heads have together more columns than its inputs."""
    return Attention({**dict.fromkeys(WIDTHS, 16), "to_out": output})


def beside() -> nn.Module:
    """The output layer stands beside the attention."""
    layers = dict.fromkeys(("query", "key", "value"), 16)
    output = nn.ModuleDict({"dense": nn.Linear(16, WIDTH)})
    return nn.ModuleDict(
        {"attention": nn.ModuleDict({"self": Attention(layers), "output": output})}
    )


OUTPUTS_OF = {
    "linear": (lambda: joined(nn.Linear(16, WIDTH)), "to_out.weight"),
    "sequence": (
        lambda: joined(nn.Sequential(nn.Linear(16, WIDTH), nn.Dropout(0.1))),
        "to_out.0.weight",
    ),
    "beside": (beside, "attention.output.dense.weight"),
    "torch": (lambda: nn.MultiheadAttention(16, 4), "out_proj.weight"),
    "torch, other keys": (lambda: nn.MultiheadAttention(16, 4, kdim=8), "out_proj.weight"),
}


@pytest.mark.parametrize("kind", OUTPUTS_OF)
@pytest.mark.parametrize("which", ["o", "vo", "qkvo"])
@pytest.mark.parametrize("constraint", ["within", "across"])
def test_the_columns_that_read_one_head_are_a_matrix(kind, which, constraint):
    torch.manual_seed(0)
    make, name = OUTPUTS_OF[kind]
    model = make()
    found = so.constrain_attention(model, constraint, which)
    lines = {line[0]: line for line in found.lines}
    assert name in lines
    assert len(lines) == (2 if kind == "torch" and which != "o" else len(which))
    weight = model.get_parameter(name).detach()
    heads = weight.split(4, dim=1) if constraint == "within" else [weight]
    assert max(map(gram_error, heads)) < 1e-5
    assert so.orthonormality_error(model) < 1e-5


def test_an_output_that_is_missing_or_doubtful_is_named():
    model = joined(nn.Linear(16, WIDTH))
    model.proj = nn.Linear(16, 12)
    with pytest.raises(ValueError, match=r"it has proj, to_out for the output; say names="):
        so.constrain_attention(model, which="o")
    names = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "proj"}
    assert so.constrain_attention(model, which="o", names=names).lines[0][0] == "proj.weight"
    del model.proj, model.to_out
    with pytest.raises(ValueError, match=r"it has none for the output; say names="):
        so.constrain_attention(model, which="qko")
    assert not so.report(model).lines[1:]
    for which in ("oq", "qq", "", "x", 3):
        with pytest.raises(ValueError, match=r"`which` must be one or more of 'q', 'k', 'v', 'o'"):
            so.constrain_attention(model, which=which)


def test_layers_of_any_name_are_constrained() -> None:
    layers = dict.fromkeys(("ask", "give", "tell"), WIDTH)
    net = nn.ModuleList([Attention(layers, n_h=HEADS), Attention(layers, n_h=HEADS)])
    with pytest.raises(ValueError, match=r"say what it calls its lay.*, names=.*looked for the la"):
        so.constrain_attention(net)
    names = {"k": "give", "q": "ask", "v": "tell", "heads": "n_h"}
    found = so.constrain_attention(net, which="qkv", names=names)
    assert [line[0] for line in found.lines[:3]] == [
        "0.ask.weight",
        "0.give.weight",
        "0.tell.weight",
    ]
    assert net[1].tell.weight.manifold == so.Stiefel(heads=HEADS)
    with pytest.raises(ValueError, match=r"has one of num_heads, .*; say names={'heads': ...}"):
        so.constrain_attention(net, names={"q": "ask", "k": "give"})
    fused = Attention({"fused": 3 * WIDTH})
    so.constrain_attention(fused, names={"qkv": "fused"})
    assert fused.fused.weight.manifold == so.Stiefel(heads=HEADS, rows=((0, 12), (12, 24)))
    so.constrain_attention(Attention(dict.fromkeys(("w_q", "w_k", "w_v"), WIDTH), n_heads=HEADS))


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ({"q": "ask"}, ValueError, "`names` must name q, k and perhaps v, each once"),
        ({"q": "ask", "k": "give", "p": "tell"}, ValueError, "`names` must name q, k"),
        ({"q": 1, "k": "give"}, TypeError, "`names` must be a dict of names"),
        (["ask"], TypeError, "`names` must be a dict of names"),
        ({"q": "ask", "k": "lost"}, ValueError, "contain an attention module that can be read"),
    ],
)
def test_wrong_names_are_told(names: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        so.constrain_attention(Attention({"ask": WIDTH, "give": WIDTH}, heads=2), names=names)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_attention_of_every_precision_is_constrained(dtype: torch.dtype) -> None:
    net = nn.MultiheadAttention(8, 2).to(dtype)
    so.constrain_attention(net)
    assert net.in_proj_weight.dtype is dtype
    assert so.orthonormality_error(net) < 20 * torch.finfo(dtype).eps
    with pytest.raises(TypeError, match="`in_proj_weight` must be one of float32"):
        so.constrain_attention(nn.MultiheadAttention(8, 2).to(torch.float8_e4m3fn))


def test_trained_attention_keeps_its_scale_and_says_how_far_it_moved() -> None:
    net = nn.MultiheadAttention(8, 2)
    with torch.no_grad():
        net.in_proj_weight *= 5
    twin, before = copy.deepcopy(net), net.in_proj_weight.detach().clone()
    far, near = so.constrain_attention(net), so.constrain_attention(twin, scale="keep")
    norms = [w[:16].detach().norm() for w in (before, twin.in_proj_weight)]
    torch.testing.assert_close(norms[1], norms[0])
    moved = [float(found.lines[0][3].rstrip("%")) for found in (far, near)]
    assert moved[0] > 1.5 * moved[1]
    assert "moved" in str(near)
    nn.init.zeros_(twin.in_proj_weight)
    reading = twin.in_proj_weight.manifold
    with pytest.raises(ValueError, match="`in_proj_weight` must be finite and not zero"):
        so.constrain_attention(twin, scale="keep")
    assert twin.in_proj_weight.manifold is reading


def test_a_trained_attention_is_told_once() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 3)
    assert not warnings_of(lambda: so.constrain_attention(model))
    for layer in model.layers:
        so.release(layer.self_attn, "in_proj_weight")
        with torch.no_grad():  # a direction that all inputs share, as training makes
            layer.self_attn.in_proj_weight += torch.outer(torch.randn(96), torch.randn(32)) / 4
    (text,) = warnings_of(lambda: so.constrain_attention(model))
    assert "`layers.0.self_attn.in_proj_weight` and 2 more seem trained" in text
