"""`so.on_manifold` around optimizers of other packages, and those of the Trainer by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from loops import tokens
from tiny import gpt2
from torch import nn
from transformers import Trainer, TrainingArguments

import stiefel_opt as so

RULES = {
    "pytorch_optimizer": ["Lion", "SOAP", "AdamP", "Adan", "AdEMAMix", "Prodigy", "StableAdamW"],
    "bitsandbytes.optim": ["Adam8bit", "AdamW8bit", "Lion8bit", "PagedAdamW8bit"],
}
REFUSED = {
    "pytorch_optimizer": ["ScheduleFreeAdamW", "SPlus", "Ranger", "Lookahead", "OrthoGrad", "LOMO"],
    "schedulefree": ["AdamWScheduleFree", "SGDScheduleFree"],
}


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(package, name) for package, names in table.items() for name in names]


def weights() -> tuple[so.ManifoldParameter, nn.Parameter]:
    torch.manual_seed(0)  # large enough for state of eight bits
    return so.ManifoldParameter(so.random_point(300, 20)), nn.Parameter(torch.randn(50))


@pytest.mark.parametrize(("package", "name"), cases(RULES))
def test_optimizers_of_other_packages_stay_on_the_manifold(package: str, name: str) -> None:
    module = importlib.import_module(package)
    tagged, plain = weights()
    alone = nn.Parameter(plain.detach().clone())
    target = so.random_point(300, 20)
    build = getattr(module, name)
    rule, other = so.on_manifold(build([tagged, plain], lr=0.01)), build([alone], lr=0.01)
    losses = []
    for _ in range(20):
        rule.zero_grad()
        other.zero_grad()
        loss = (tagged - target).square().sum()
        (loss + plain.square().sum()).backward()
        alone.square().sum().backward()
        rule.step()
        other.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert so.orthonormality_error(tagged) < 2e-6
    if name not in ("Prodigy",):  # whose step follows from all weights together
        assert torch.equal(plain, alone)


@pytest.mark.parametrize(("package", "name"), cases(REFUSED))
def test_optimizers_with_second_weights_or_wrappers_are_refused(package: str, name: str) -> None:
    module = importlib.import_module(package)
    tagged, _ = weights()
    inner: Any = torch.optim.Adam([tagged]) if name in ("Lookahead", "OrthoGrad") else [tagged]
    if name == "LOMO":
        inner = nn.ParameterList([tagged])
    with pytest.raises(TypeError, match=f"`optimizer` must .*got {name}"):
        so.on_manifold(getattr(module, name)(inner))


class OrthogonalTrainer(Trainer):
    def create_optimizer(self, *arguments: Any) -> Any:
        return so.on_manifold(super().create_optimizer(*arguments))


@pytest.mark.parametrize(
    "name",
    [
        *("adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adafactor", "sgd", "rmsprop"),
        *("adagrad", "adamw_bnb_8bit", "lion_8bit", "ademamix"),
    ],
)
def test_the_trainer_builds_it_by_its_name(name: str, tmp_path: Any) -> None:
    model = gpt2()
    for block in model.transformer.h:
        so.constrain(block.mlp.c_fc, transposed=True)
    before = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    arguments = TrainingArguments(
        str(tmp_path),
        optim=name,
        max_steps=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        weight_decay=0.1,
        disable_tqdm=True,
    )
    OrthogonalTrainer(model, arguments, train_dataset=tokens()).train()
    assert so.orthonormality_error(model) < 1e-5
    assert not torch.equal(model.transformer.h[0].mlp.c_fc.weight, before)
