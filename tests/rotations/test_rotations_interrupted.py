"""Rotations that were stopped half way are gone on with rightly, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import in_turn
from tiny_decoder import WIDTH, TinyDecoder, tokens
from torch import nn

import stiefel_opt as so
from stiefel_opt import rotations
from stiefel_opt.rotations import folding, preparation

OPTIONS: dict[str, Any] = {"steps": 3, "progress": False}
OTHERS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "lr": lambda _: {"lr": 0.3},
    "start": lambda model: {"start": rotations.hadamard(model, seed=5)},
    "batches": lambda _: {"batches": tokens()[::-1]},
    "optimizer": lambda _: {"optimizer": lambda p: so.StiefelSGD(p, lr=0.01)},
    "symmetric=True": lambda _: {"symmetric": True},
    "the same model, .* another path": lambda model: moved(model, "lm_head.weight"),
    "the same model": lambda model: moved(model, "model.layers.1.mlp.down_proj.weight"),
}


def moved(model: nn.Module, name: str) -> dict[str, Any]:
    with torch.no_grad():
        model.get_parameter(name)[0, 0] += 1e-3
    return {}


@pytest.mark.parametrize(("name", "loss"), in_turn([*OTHERS] * 2, ["noise", "kl", "kl"]))
def test_a_checkpoint_of_another_training_is_refused(name: str, loss: str, tmp_path: Path) -> None:
    model, data, path = rotations.prepare_(TinyDecoder()), tokens(), tmp_path / "learning.pt"
    given = {"batches": data, "checkpoint": path, "loss": loss, **OPTIONS}
    first = rotations.learn(model, **given)
    again = rotations.learn(rotations.prepare_(TinyDecoder()), **given)  # of the same weights
    assert torch.equal(again.residual, first.residual)
    with pytest.raises(ValueError, match=f"`checkpoint` must be of a training with .*{name}"):
        rotations.learn(model, **{**given, **OTHERS[name](model)})


def test_the_options_of_ones_own_optimizer_are_compared(tmp_path: Path) -> None:
    model, data, path = rotations.prepare_(TinyDecoder()), tokens(), tmp_path / "learning.pt"

    def learn(lr: float) -> Any:
        rule = lambda p: so.StiefelSGD(p, lr=lr)  # noqa: E731
        return rotations.learn(model, data, optimizer=rule, checkpoint=path, **OPTIONS)

    assert torch.equal(learn(0.1).residual, learn(0.1).residual)
    with pytest.raises(
        ValueError, match=r"with (initial_)?lr of group 0='0.2', got one with '0.1'"
    ):
        learn(0.2)


@pytest.mark.parametrize("calls", [1, 4, 6])
def test_a_model_that_is_half_folded_is_refused(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rotations.prepare_(TinyDecoder())
    found, turn, count = rotations.hadamard(model), folding._turn_outputs, 0

    def stop(*arguments: Any) -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise KeyboardInterrupt
        turn(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(folding, "_turn_outputs", stop)
        with pytest.raises(KeyboardInterrupt):
            rotations.fold_(model, found)
    text = "`model` must be prepared, got one that is half folded; load the original"
    with pytest.raises(ValueError, match=text):
        rotations.fold_(model, found)
    with pytest.raises(ValueError, match=text):
        rotations.learn(model, tokens(), **OPTIONS)
    with pytest.raises(ValueError, match=r"must not be prepared yet, .*half folded; load the orig"):
        rotations.prepare_(model)
    with pytest.raises(ValueError, match="must be folded, got one that is half folded"):
        rotations.load_online_(model)


def test_a_model_that_is_half_prepared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyDecoder(tied=True)

    def stop(_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(preparation, "_untie", stop)
        with pytest.raises(KeyboardInterrupt):
            rotations.prepare_(model)
    with pytest.raises(
        ValueError, match=r"must not be prepared yet, .*half prepared; load the ori"
    ):
        rotations.prepare_(model)
    with pytest.raises(ValueError, match="must be prepared, got one that is half prepared; load"):
        rotations.fold_(model, rotations.hadamard(model))


@pytest.mark.parametrize("owner", ["model", ""])
def test_what_else_reads_or_feeds_the_stream_is_refused(owner: str) -> None:
    """Learned positions beside the embedding, a head beside the head."""
    model = TinyDecoder()
    model.get_submodule(owner).more = nn.Embedding(64, WIDTH)
    name = owner or "the model"
    for action in (rotations.prepare_, rotations.hadamard):
        with pytest.raises(ValueError, match=f"`{name}` must have no modules but .*, got more"):
            action(model)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_contexts_may_end_in_any_order(order: tuple[int, ...]) -> None:
    model, ids = TinyDecoder(), tokens()[0]
    plain = model(ids).logits
    bits = ({"weight_bits": 4}, {"weight_bits": 3}, {"weight_bits": 8, "kv_bits": None})
    contexts = [rotations.quantized(model, activation_bits=None, **each) for each in bits]
    alone = []
    for each in bits:
        with rotations.quantized(model, activation_bits=None, **each):
            alone.append(model(ids).logits)
    for context in contexts:
        context.__enter__()
    left = [0, 1, 2]
    for number in order:
        assert torch.equal(model(ids).logits, alone[max(left)])  # the latest counts
        contexts[number].__exit__(None, None, None)
        left.remove(number)
    assert torch.equal(model(ids).logits, plain)
    assert not any("forward" in module.__dict__ for module in model.modules())
