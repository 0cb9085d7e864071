"""peft: LoRA with one factor on the Stiefel manifold, trained by the Trainer of transformers.

Of the update B A the rows of A are kept orthonormal, so that A is a basis of the inputs that count
and B alone carries the size, as in StelLA.
"""

from __future__ import annotations

import copy

import torch
from loops import batches, loop, loss_of_output, tokens
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import gpt2

import stiefel_opt as so

RATES = {"stiefel": {"lr": 0.02}, "plain": {"lr": 0.02}}


def adapted():
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(gpt2(), config)
    return constrained(model)


def constrained(model):
    for name, _ in list(model.named_parameters()):
        if ".lora_A." in name:
            so.constrain(model, name)
    return model


def test_a_saved_adapter_is_orthonormal_where_it_is_loaded_and_merges(tmp_path):
    model = adapted()
    opt = so.StiefelAdam(so.param_groups(model, **RATES))
    loop(model, opt, batches(tokens()), loss_of_output)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path, is_trainable=True)
    before = copy.deepcopy(loaded.state_dict())
    constrained(loaded)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, before[name]), name
    batch = batches(tokens())[0]
    model.eval()
    loaded.eval()
    expected = model(**batch).logits
    torch.testing.assert_close(loaded(**batch).logits, expected)
    torch.testing.assert_close(
        loaded.merge_and_unload()(**batch).logits, expected, atol=1e-4, rtol=0
    )
