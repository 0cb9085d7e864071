"""`so.constrain_transformer`: every matrix of the blocks, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training import train

import stiefel_opt as so


class Classifier(nn.Module):
    """An embedding, torch's own blocks and a last head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.blocks(self.table(words)).mean(1))


class Attention(nn.Module):
    """Attention in the style of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = 2
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.distances = nn.Embedding(4, 2)


class Gated(nn.Module):
    """A feed-forward part whose first layer holds a gate beside what is gated."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 24), nn.Linear(12, 8)


class Sublayers(nn.Module):
    """A block that is a list of layers of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Attention(), Gated()])


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList([Sublayers(), Sublayers()])
        self.pooler = nn.Linear(8, 8)


def test_torchs_own_blocks() -> None:
    model = Classifier()
    report = so.constrain_transformer(model)
    expected = {"self_attn.in_proj_weight": 12, "self_attn.out_proj.weight": 4}
    expected |= {"linear1.weight": 1, "linear2.weight": 1}
    assert [line[0] for line in report.lines] == [
        f"blocks.layers.{block}.{name}" for block in range(2) for name in expected
    ]
    for name, parameter in model.named_parameters():
        leaf = name.partition("layers.")[2].partition(".")[2]
        if leaf in expected:
            assert parameter.manifold.count(parameter.shape) == expected[leaf]
        else:
            assert not hasattr(parameter, "manifold"), name
    assert float(so.orthonormality_error(model)) < 1e-6
    assert "12 x (4 x 16), rows, one for each head" in str(report)
    assert not report.skipped


def test_its_scales_are_learned_and_it_trains() -> None:
    model = Classifier()
    so.constrain_transformer(model, learn_scale=True)
    opt = so.StiefelAdamW(model.parameters(), lr=3e-3)
    words, labels = torch.randint(0, 11, (24, 6)), torch.arange(24) % 3
    losses = train(opt, lambda: nn.functional.cross_entropy(model(words), labels), 15)
    assert losses[-1] < 0.9 * losses[0]
    scales = [line.scale for line in so.report(model).lines]
    assert len(scales) == 8
    assert all(scale is not None and scale[0] != 1.0 for scale in scales)
    assert float(so.orthonormality_error(model)) < 1e-5


def test_a_block_of_several_lists_and_a_gate() -> None:
    model = Encoder()
    report = so.constrain_transformer(model, scale="keep")
    counts = {
        name: model.get_parameter(name).manifold.count(model.get_parameter(name).shape)
        for name, *_ in report.lines
    }
    expected = {f"layer.0.{name}.weight": 2 for name in "qkvo"}
    expected |= {"layer.1.wi.weight": 2, "layer.1.wo.weight": 1}
    assert counts == {f"block.{n}.{name}": c for n in range(2) for name, c in expected.items()}


def test_one_block_is_a_model_of_its_own() -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16)
    report = so.constrain_transformer(layer, scale="rms")
    assert len(report.lines) == 6
    assert layer.linear1.weight.manifold.scale == pytest.approx(2**0.5)


class TwoLayerTransformer(nn.Module):
    """Blocks without a list, between an embedding and a head."""

    def __init__(self, **blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        for name, block in blocks.items():
            self.add_module(name, block)


@pytest.mark.parametrize("wrap", [dict, nn.ModuleDict])
def test_blocks_outside_of_a_list_are_known_by_the_name_of_their_class(wrap: type) -> None:
    first, last = (nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
    blocks = wrap({"first": first, "last": last})
    model = TwoLayerTransformer(**(blocks if wrap is dict else {"blocks": blocks}))
    taken = {name.partition("first.")[2] for name, *_ in so.constrain_transformer(model).lines}
    names = "self_attn.in_proj_weight", "self_attn.out_proj.weight"
    assert taken == {"", *names, "linear1.weight", "linear2.weight"}
    assert not any(hasattr(p, "manifold") for p in (model.embedding.weight, model.head.weight))


def test_what_cannot_be_read_is_listed_and_left() -> None:
    model = Encoder()
    model.block[1].layer[0].n_heads = 3
    nn.utils.parametrizations.weight_norm(model.block[0].layer[1].wo)
    report = so.constrain_transformer(model)
    reasons = dict(report.skipped)
    assert "3 heads do not divide" in reasons["block.1.layer.0"]
    assert "computed" in reasons["block.0.layer.1.wo"]
    names = [line[0] for line in report.lines]
    assert not any(name.startswith("block.1.layer.0") for name in names)
    assert "block.1.layer.1.wo.weight" in names
    assert "not constrained" in str(report)


def test_parts_of_attention_that_are_no_projections_and_convolutions_stay() -> None:
    model = Encoder()
    for sublayers in model.block:
        sublayers.layer[0].mix = nn.Linear(2, 2)
        sublayers.layer[1].near = nn.Conv1d(8, 8, 3)
        sublayers.layer[1].temperature = nn.Parameter(torch.ones(2, 1, 1))
    report = so.constrain_transformer(model)
    assert [path for path, _ in report.skipped] == [
        f"block.{place}.layer.{name}" for place in range(2) for name in ("0.mix", "1.near")
    ]
    assert len(report.lines) == 2 * 6


class Experts(nn.Module):
    """Two experts with a gate beside what is gated; as (in, out), or both in turn."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        first, last = (torch.randn(2, 24, 8), torch.randn(2, 8, 12))
        is_transposed, self.is_concatenated = kind == "transposed", kind != "in turn"
        self.gate_up_proj = nn.Parameter(first.mT.clone() if is_transposed else first)
        self.down_proj = nn.Parameter(last.mT.clone() if is_transposed else last)
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 24))


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8))


class Mixture(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention, self.gate, self.experts = Attention(), TopKRouter(), Experts(kind)


@pytest.mark.parametrize("kind", ["plain", "transposed", "in turn"])
def test_experts_are_a_batch_with_two_matrices_where_there_is_a_gate(kind: str) -> None:
    model = nn.ModuleList([Mixture(kind) for _ in range(2)])
    report = so.constrain_transformer(model)
    experts = model[1].experts
    halves = list(
        (experts.gate_up_proj.mT if kind == "transposed" else experts.gate_up_proj).chunk(2, 1)
    )
    for batch in [experts.down_proj, model[1].gate.weight, *(halves if kind != "in turn" else [])]:
        tall = batch if batch.size(-2) >= batch.size(-1) else batch.mT
        torch.testing.assert_close(
            tall.mT @ tall, torch.eye(tall.size(-1)).expand(*tall.shape[:-2], -1, -1)
        )
    named = [f"{place}.experts.gate_up_proj" for place in range(2)]
    assert [path for path, _ in report.skipped] == (named if kind == "in turn" else [])
    fit(model, lambda: sum(weight.square().mean() for weight in model.parameters()))


def fit(model: nn.Module, loss_of) -> None:
    opt = so.StiefelAdamW(model.parameters(), lr=0.1)
    train(opt, loss_of, 3)
    assert float(so.orthonormality_error(model)) < 1e-5


class Recurrence(nn.Module):
    """What holds several matrices in one weight, beside a convolution over time."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(8, 40), nn.Linear(16, 8)
        self.conv = nn.Conv1d(24, 24, 4, groups=24)


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.up, self.down = mixer, nn.Linear(8, 20), nn.Linear(20, 8)


class RecurrentLayer(Layer):
    """Of another class than its neighbours."""


@pytest.mark.parametrize("kind", [Layer, RecurrentLayer])
def test_layers_without_attention_beside_those_with_it_are_blocks(kind: type[Layer]) -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([Layer(Attention()), kind(Recurrence())])
    model.head = nn.Linear(8, 2)
    report = so.constrain_transformer(model)
    names = [line[0] for line in report.lines if line[0].startswith("layers.1")]
    assert names == [f"layers.1.{name}.weight" for name in ("mixer.out_proj", "up", "down")]
    assert [path for path, _ in report.skipped] == ["layers.1.mixer.in_proj", "layers.1.mixer.conv"]


def test_a_list_of_attention_modules_has_its_blocks_beside_it() -> None:
    model = nn.Module()
    model.attentions = nn.ModuleList([Attention() for _ in range(3)])
    model.mlps = nn.ModuleList([Gated() for _ in range(3)])
    model.heads = nn.ModuleList([nn.Linear(8, 2)])
    names = [line[0] for line in so.constrain_transformer(model).lines]
    assert len(names) == 3 * (4 + 2)
    assert not any(name.startswith("heads") for name in names)


def test_refusals_change_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match="contain an attention module"):
        so.constrain_transformer(model)
    with pytest.raises(ValueError, match="scale"):
        so.constrain_transformer(Encoder(), scale="free")  # type: ignore[arg-type]
    assert torch.equal(model[0].weight, before)


def test_trained_weights_warn() -> None:
    model = Encoder()
    with torch.no_grad():
        for parameter in model.block.parameters():
            if parameter.ndim == 2:
                parameter += 3.0 * torch.outer(*(torch.randn(size) for size in parameter.shape))
    with pytest.warns(UserWarning, match="trained"):
        so.constrain_transformer(model)
