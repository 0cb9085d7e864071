"""`so.constrain_transformer`: every matrix of the blocks, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

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
    losses = []
    for _ in range(15):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(words), labels)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
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
