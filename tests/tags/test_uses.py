"""Weights whose use a constraint does not suit are told: of tables, heads, fused projections."""

import copy
from typing import Any

import pytest
import torch
from contract import warnings_of
from torch import nn
from training import train

import stiefel_opt as so

# ---- rows that pad -----------------------------------------------------------------------------

PADS = {0: "rows=(1, 9) to", 8: "rows=(0, 8) to", 3: "rows=((0, 3), (4, 9)), two matrices, to"}


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("place", PADS)
def test_a_row_that_pads_is_told_and_stays_zero_as_the_remedy_says(kind: Any, place: int) -> None:
    torch.manual_seed(0)
    (text,) = warnings_of(lambda: so.constrain(kind(9, 2, padding_idx=place), scale="keep"))
    assert f"row {place} of `weight` pads, and would not stay zero" in text
    assert PADS[place] in text
    rows = eval(PADS[place].partition("rows=")[2].partition(", two")[0].removesuffix(" to"))
    table = kind(9, 2, padding_idx=place)
    assert not warnings_of(lambda: so.constrain(table, rows=rows, scale="keep"))
    optimizer = so.StiefelAdam(table.parameters(), lr=0.1)
    ids = torch.arange(9).repeat(3).view(9, 3)
    ends = torch.arange(2.0)
    train(optimizer, lambda: (table(ids).reshape(9, -1, 2).sum(1) - ends).square().sum(), 20)
    assert not table.weight[place].any()
    assert so.orthonormality_error(table) < 1e-5


# ---- several matrices one above the other ------------------------------------------------------

FUSED: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "qkv": (nn.Linear(8, 24), {"heads": 3}),
    "to_qkv": (nn.Linear(8, 36), {"heads": 6}),
    "query_key_value": (nn.Linear(8, 24), {"rows": ((0, 8), (8, 16))}),
    "Wqkv": (nn.Linear(16, 24), {"rows": ((0, 8), (8, 16), (16, 24))}),
    "c_attn": (nn.Linear(24, 8), {"heads": 3, "transposed": True}),
    "attn_in_proj": (nn.Linear(8, 24), {"heads": 1}),
    "qkv_of_images": (nn.Conv2d(8, 24, 1), {"heads": 3}),
    "gqa_qkv": (nn.Linear(8, 20), {"rows": (0, 8)}),
    "kv_proj": (nn.Linear(8, 16), {"rows": ((0, 8), (8, 16))}),
    "gate_up_proj": (nn.Linear(8, 32), {"heads": 2}),
}


@pytest.mark.parametrize("name", FUSED)
def test_one_matrix_across_fused_projections_is_told(name: str) -> None:
    layer, options = FUSED[name]
    fresh = nn.ModuleDict({name: copy.deepcopy(layer)})
    (text,) = warnings_of(lambda: so.constrain(fresh, f"{name}.weight"))
    assert f"`{name}.weight` seems to hold " in text
    assert "none of them becomes orthonormal" in text
    assert ("transposed=True" in text) == ("transposed" in options)
    so.release(fresh, f"{name}.weight")
    assert not warnings_of(lambda: so.constrain(fresh, f"{name}.weight", **options))


@pytest.mark.parametrize("name", ["in_proj", "c_attn", "q_proj", "kv_a_proj", "ssm.in_proj"])
def test_other_projections_of_such_names_are_silent(name: str) -> None:
    model = nn.Sequential()
    *path, leaf = name.split(".")
    model.add_module(path[0], owner := nn.Sequential()) if path else (owner := model)
    owner.add_module(leaf, nn.Linear(8, 20))
    assert not warnings_of(lambda: so.constrain(model, f"{name}.weight"))
    attention = nn.MultiheadAttention(8, 2)
    assert not warnings_of(lambda: so.constrain(attention, "in_proj_weight"))


# ---- heads -------------------------------------------------------------------------------------


def chain(*layers: nn.Module, **named: nn.Module) -> nn.Module:
    return nn.ModuleDict({**{f"layer{i}": each for i, each in enumerate(layers)}, **named})


TOLD: dict[str, tuple[nn.Module, str]] = {
    "by itself": (nn.Linear(48, 5000), "weight"),
    "the last": (chain(nn.Linear(16, 32), nn.Linear(32, 700)), "layer1.weight"),
    "by name": (
        chain(lm_head=nn.Linear(16, 300, bias=False), late=nn.Linear(3, 3)),
        "lm_head.weight",
    ),
    "below": (nn.Sequential(chain(classifier=nn.Linear(8, 100))), "0.classifier.weight"),
}
SILENT: dict[str, tuple[nn.Module, str]] = {
    "an adapter": (nn.Linear(16, 2048), "weight"),
    "an adapter's factor": (chain(nn.Linear(2048, 16), nn.Linear(16, 2048)), "layer1.weight"),
    "a late adapter": (chain(nn.Linear(9, 9), lora_B=nn.Linear(64, 8192)), "lora_B.weight"),
    "in the middle": (chain(nn.Linear(32, 900), nn.Linear(900, 4)), "layer0.weight"),
    "few rows": (chain(head=nn.Linear(64, 500)), "head.weight"),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_head_of_many_rows_is_told_how_short_they_become(name: str) -> None:
    model, weight = TOLD[name]
    (text,) = warnings_of(lambda: so.constrain(model, weight))
    value = model.get_parameter(weight).detach()
    mean = float(value.square().sum(1).mean().sqrt())
    assert f"`{weight}` has {len(value)} rows" in text
    assert f"its rows {mean:.2g} long on average" in text
    for scale in ("rms", "keep"):
        assert not warnings_of(lambda scale=scale: so.constrain(model, weight, scale=scale))


@pytest.mark.parametrize("name", SILENT)
def test_other_tall_layers_are_silent(name: str) -> None:
    model, weight = SILENT[name]
    assert not warnings_of(lambda: so.constrain(model, weight))


# ---- a whole model -----------------------------------------------------------------------------


class Vision(nn.Module):
    """A vision transformer with whatever is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, 16))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 10, 16))
        self.register_tokens = nn.Parameter(0.02 * torch.randn(4, 16))
        self.position = nn.Embedding(10, 16)
        self.patches = nn.Conv2d(3, 16, 4)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)
        self.head_dist = nn.Linear(16, 5)


def test_the_remedy_for_a_whole_model_takes_weights_of_layers_only() -> None:
    model = Vision()
    with pytest.raises(ValueError, match="must have at least 2 dimensions") as error:
        so.constrain(model, "norm.weight")
    code = str(error.value).partition("as ")[2].partition(" does")[0]
    assert not warnings_of(lambda: eval(code, {"so": so, "model": model, "torch": torch}))
    taken = {name for name, p in model.named_parameters() if isinstance(p, so.ManifoldParameter)}
    leaves = ("linear1", "linear2", "self_attn.out_proj")
    taken.add("blocks.layers.1.linear2.weight")  # the last, which would be a head of another name
    assert taken == {f"blocks.layers.{i}.{leaf}.weight" for i in range(2) for leaf in leaves}


@pytest.mark.parametrize("name", [lambda _, p: p.ndim > 1, "*os*"])
def test_positions_tokens_and_heads_that_a_function_takes_are_told(name: Any) -> None:
    model = Vision()
    texts = warnings_of(lambda: so.constrain(model, name))
    (text,) = [text for text in texts if "seem to be positions, tokens or heads" in text]
    wanted = {"pos_embed", "position.weight"}
    if callable(name):
        wanted |= {"cls", "register_tokens", "head.weight", "head_dist.weight"}
    assert {each for each in text.split("`") if each in dict(model.named_parameters())} == wanted
    assert not warnings_of(lambda: so.constrain(Vision(), "cls"))  # by its own name: it is meant
    assert not warnings_of(lambda: so.constrain(Vision(), ["patches.weight", "pos_embed"]))
