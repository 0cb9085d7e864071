"""Adapters of peft kept exactly orthogonal: the function stays, training works, peft loads it."""

from __future__ import annotations

import copy
import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from loops import HALF, assert_equal, code_of, tokens
from tiny import gpt2
from torch import Tensor, nn
from trainers import trainer
from training import train
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TorchAoConfig

import stiefel_opt as so

TARGETS = ["q_proj", "v_proj", "up_proj"]
WIDTH, BLOCK, RANK, STEPS = 32, 8, 4, 12


def llama(dtype: torch.dtype = torch.float32, width: int = WIDTH) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


class Convolutions(nn.Module):
    """Images in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3)
        self.second = nn.Conv2d(8, 8, 3)
        self.mixing = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> SimpleNamespace:
        y = self.mixing(self.second(self.first(x).relu()).relu()).relu()
        return SimpleNamespace(logits=self.head(y.mean((-1, -2))))


def convolutions() -> Convolutions:
    torch.manual_seed(0)
    return Convolutions().eval()


def batch(model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return torch.randn(6, 4, 9, 9, generator=generator)
    return torch.randint(20, (3, 12), generator=generator)


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(batch(model)).logits
    return found


def oft(**options: Any) -> Any:
    return peft.OFTConfig(**{"oft_block_size": BLOCK, "r": 0, "target_modules": TARGETS, **options})


def adalora(**options: Any) -> Any:
    schedule = {"total_step": 60, "tinit": 5, "tfinal": 20, "deltaT": 2}
    ranks = {"init_r": RANK, "target_r": 2, "target_modules": TARGETS}
    return peft.AdaLoraConfig(**{**ranks, **schedule, **options})


def stella(**options: Any) -> Any:
    return so.StellaConfig(**{"r": RANK, "lora_alpha": 8, "target_modules": TARGETS, **options})


CONVOLUTIONS = {"target_modules": ["first", "second"]}
TRANSPOSED = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "OFT": (llama, oft),
    "OFT, exact Cayley": (llama, lambda: oft(use_cayley_neumann=False)),
    "OFT, shared block": (llama, lambda: oft(block_share=True)),
    "OFT, smallest blocks": (llama, lambda: oft(oft_block_size=2)),
    "OFT, one block": (llama, lambda: oft(oft_block_size=WIDTH)),
    "OFT, dropout": (llama, lambda: oft(module_dropout=0.3)),
    "OFT, embedding": (llama, lambda: oft(target_modules=["embed_tokens", "q_proj"])),
    "OFT, convolutions": (convolutions, lambda: oft(oft_block_size=4, target_modules=["mixing"])),
    "AdaLoRA": (llama, adalora),
    "AdaLoRA, with an update": (llama, lambda: adalora(init_lora_weights=False)),
    "AdaLoRA, dropout": (llama, lambda: adalora(lora_dropout=0.1)),
    "AdaLoRA, transposed": (gpt2, lambda: adalora(**TRANSPOSED)),
    "AdaLoRA, convolutions": (convolutions, lambda: adalora(**CONVOLUTIONS)),
    "StelLA": (llama, stella),
    "StelLA, dropout": (llama, lambda: stella(lora_dropout=0.1)),
    "StelLA, of rank one": (llama, lambda: stella(r=1)),
    "StelLA, a head saved": (llama, lambda: stella(modules_to_save=["lm_head"])),
    "StelLA, ranks of its own": (llama, lambda: stella(rank_pattern={"v_proj": 2})),
    "StelLA, all linear": (llama, lambda: stella(target_modules="all-linear")),
    "StelLA, transposed": (gpt2, lambda: stella(**TRANSPOSED)),
}
each_case = pytest.mark.parametrize("case", CASES)
each_kind = pytest.mark.parametrize("case", ["OFT", "AdaLoRA", "StelLA"])


def adapted(case: str, *, constrained: bool = True) -> Any:
    build, config = CASES[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft, about embeddings that other layers share
        model = peft.get_peft_model(build(), config())
    if constrained and not case.startswith("StelLA"):
        so.constrain_adapters(model)
    return model


def trained(model: Any, optimizer: Any = None, steps: int = STEPS) -> Any:
    """Train towards fixed labels; AdaLoRA cuts ranks on the way."""
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or so.StiefelAdam(parameters, lr=0.02)
    allocate = getattr(model.base_model, "update_and_allocate", None)
    inputs = batch(model)
    for step in range(steps):
        optimizer.zero_grad()
        found = model(inputs).logits.flatten(0, -2)
        wanted = torch.arange(len(found)) % found.size(-1)
        nn.functional.cross_entropy(found, wanted).backward()
        optimizer.step()
        if allocate is not None:
            allocate(step + 1)
    return model.eval()


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


# ---- laws ----------------------------------------------------------------------------------------


@each_case
def test_the_function_does_not_change(case: str) -> None:
    plain = adapted(case, constrained=False)
    if not case.startswith("StelLA"):
        trained(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], 1e-3))
    before = logits(plain)
    if case.startswith("StelLA"):
        assert_close(before, logits(CASES[case][0]()), 0.0)
        return
    done = so.constrain_adapters(plain, tolerance=1e-2)
    assert_close(logits(plain), before, 1e-4)
    assert len(done.lines) == len(so.report(plain).lines) > 0
    assert all(line[0] in repr(done) for line in done.lines)


@each_case
def test_trains_on_the_manifold_and_comes_back_to_plain_peft(case: str, tmp_path: Path) -> None:
    model = adapted(case)
    start = {line.name: model.get_parameter(line.name).clone() for line in so.report(model).lines}
    first = logits(model)
    trained(model)
    found = logits(model)
    assert (found - first).abs().max() > 1e-3
    assert so.orthonormality_error(model) < 1e-5
    for name, value in start.items():
        assert (model.get_parameter(name) - value).abs().max() > 1e-3, name
    assert_close(logits(copy.deepcopy(model).merge_and_unload()), found, 1e-4)

    done = so.export_adapters(model)
    assert done.action == "exported"
    assert not so.report(model).lines
    assert_close(logits(model), found, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(CASES[case][0](), tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert stored["peft_type"] in ("OFT", "ADALORA", "LORA")
    assert_close(logits(again), found, 1e-3)
    assert_close(logits(again.merge_and_unload()), found, 1e-3)


@pytest.mark.parametrize("angle", [0.3, 1.0, 2.0, 3.0])
def test_a_block_reaches_every_angle_and_so_do_peft_s_numbers_of_it(angle: float) -> None:
    model = adapted("OFT")
    generator = torch.Generator().manual_seed(0)
    for line in so.report(model).lines:
        parameter = model.get_parameter(line.name)
        skew = torch.randn(parameter.shape, generator=generator)
        skew = skew - skew.mT
        skew *= angle / torch.linalg.matrix_norm(skew, 2)[:, None, None]
        with torch.no_grad():
            parameter.copy_(torch.matrix_exp(skew))
    found = logits(model)
    so.export_adapters(model)
    assert_close(logits(model), found, 1e-4)


def test_a_trained_adalora_keeps_its_update_and_its_cut_triplets() -> None:
    plain = adapted("AdaLoRA", constrained=False)
    trained(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], 0.05), 45)
    layers = [m for m in plain.modules() if isinstance(m, peft.tuners.adalora.AdaLoraLayer)]
    cut = [layer.lora_E["default"] == 0 for layer in layers]
    assert any(bool(each.any()) and not bool(each.all()) for each in cut)
    before, update = logits(plain), [layer.get_delta_weight("default") for layer in layers]
    so.constrain_adapters(plain)
    assert so.orthonormality_error(plain) < 1e-5
    for layer, zeros, wanted in zip(layers, cut, update, strict=True):
        assert torch.equal(layer.lora_E["default"] == 0, zeros)
        torch.testing.assert_close(layer.get_delta_weight("default"), wanted)
    assert_close(logits(plain), before, 1e-4)
    trained(plain, steps=3)
    assert so.orthonormality_error(plain) < 1e-5


def test_the_penalty_of_adalora_is_off_and_comes_back() -> None:
    model = adapted("AdaLoRA")
    x = batch(model)
    expected = nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    torch.testing.assert_close(model(input_ids=x, labels=x).loss.detach(), expected)
    assert model.peft_config["default"].orth_reg_weight == 0
    so.export_adapters(model)
    assert model.peft_config["default"].orth_reg_weight == adalora().orth_reg_weight > 0


def test_peft_s_series_is_off_where_the_block_is_not() -> None:
    """Why a block is a parameter: at one radian the series has left the rotations."""
    plain = adapted("OFT", constrained=False)
    rotation = next(m for m in plain.modules() if type(m).__name__ == "OFTRotationModule")
    with torch.no_grad():
        rotation.weight.normal_(std=0.15)
    with pytest.raises(
        ValueError, match=r"oft_R\.default\.weight` must be rotations up to 0\.0001"
    ):
        so.constrain_adapters(plain)
    assert type(rotation).__name__ == "OFTRotationModule"
    done = so.constrain_adapters(plain, tolerance=1.0)
    assert re.search(r"peft's was off by 0\.[0-9]", repr(done))
    assert so.orthonormality_error(plain) < 1e-5


# ---- several adapters, copies, resuming ----------------------------------------------------------


@each_kind
def test_one_adapter_of_several(case: str) -> None:
    model = adapted(case, constrained=False)
    config = CASES[case][1]()
    config.inference_mode = True  # AdaLoRA trains one adapter only
    model.add_adapter("other", config)
    if case != "StelLA":
        so.constrain_adapters(model, "default")
        with pytest.raises(ValueError, match=r"model` must have factors that are not constrained"):
            so.constrain_adapters(model, "default")
    with pytest.raises(
        ValueError, match=r"adapter` must be one of \['default', 'other'\], got 'x'"
    ):
        so.constrain_adapters(model, "x")
    before = {n: p.clone() for n, p in model.named_parameters() if ".other" in n}
    trained(model)
    found = logits(model)
    model.set_adapter("other")
    assert (logits(model) - found).abs().max() > 1e-4
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value), name
    model.set_adapter("default")
    assert_close(logits(model), found, 0.0)
    so.export_adapters(model, "default")
    assert_close(logits(model), found, 1e-3)
    left = {line.name.split(".")[-1] for line in so.report(model).lines}
    assert left == ({"basis", "weight"} if case == "StelLA" else set())


@each_kind
def test_copies_and_pickles_are_constrained_too(case: str) -> None:
    model = trained(adapted(case), steps=2)
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(logits(other), expected, 0.0)
        trained(other, steps=2)
        assert so.orthonormality_error(other) < 1e-5
        so.export_adapters(other)


@each_kind
def test_a_trainer_resumes_bit_for_bit(case: str, tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        model = adapted(case)
        parameters = [p for p in model.parameters() if p.requires_grad]
        return model, so.StiefelAdam(parameters, lr=0.02)

    undisturbed, optimizer = build()
    trainer(undisturbed, optimizer, tokens(), tmp_path).train()
    resumed, optimizer = build()
    again = trainer(resumed, optimizer, tokens(), tmp_path / "resumed")
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{HALF}"))
    assert_equal(resumed, undisturbed)
    assert so.orthonormality_error(resumed) < 1e-5


def test_stella_is_saved_and_loaded_by_peft(tmp_path: Path) -> None:
    model = trained(adapted("StelLA"))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "STELLA"
    for options in ({"is_trainable": True}, {}, {"low_cpu_mem_usage": True}):
        again = peft.PeftModel.from_pretrained(llama(), tmp_path, **options)
        assert type(again.peft_config["default"]) is so.StellaConfig
        assert_close(logits(again), logits(model), 1e-6)
        assert all(line.tagged for line in so.report(again).lines)
    again = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    assert_equal(trained(again, steps=1), trained(model, steps=1), 1e-5)


def test_stella_is_saved_and_loaded_by_transformers(tmp_path: Path) -> None:
    model = llama()
    model.add_adapter(so.StellaConfig(r=RANK, target_modules=TARGETS))
    model.save_pretrained(tmp_path)
    again = llama()
    again.load_adapter(str(tmp_path))
    so.retag(again)  # transformers replaces the parameters: the next forward pass would warn
    assert_close(logits(again), logits(model), 1e-6)
    assert so.orthonormality_error(again) < 1e-5


def test_stella_starts_at_a_core_of_one_where_it_is_asked_to() -> None:
    model = peft.get_peft_model(llama(), stella(init_lora_weights=False))
    cores = [value for name, value in model.named_parameters() if name.endswith("core")]
    assert cores
    assert all(torch.equal(value, torch.eye(RANK)) for value in cores)
    assert so.orthonormality_error(model) < 1e-5
    assert (logits(model) - logits(llama())).abs().max() > 1e-3


@each_kind
@pytest.mark.parametrize("widened", [True, False])
def test_a_model_in_bfloat16(case: str, widened: bool) -> None:
    build, config = CASES[case]
    assert build is llama
    base = llama(torch.bfloat16)
    model = peft.get_peft_model(base, config(), autocast_adapter_dtype=widened)
    if case != "StelLA":
        so.constrain_adapters(model)
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    assert kinds == {torch.float32 if widened else torch.bfloat16}
    trained(model, steps=4)
    assert so.orthonormality_error(model) < (1e-5 if widened else 2e-2)
    found = logits(model)
    so.export_adapters(model, tolerance=1e-3)
    assert_close(logits(model), found, 0.05)


@each_kind
def test_peft_s_own_calls_go_on(case: str) -> None:
    model = trained(adapted(case))
    found, base = logits(model), logits(llama())
    with model.disable_adapter():
        assert_close(logits(model), base, 1e-6)
    model.merge_adapter()
    assert_close(logits(model), found, 1e-4)
    model.unmerge_adapter()
    assert_close(logits(model), found, 1e-4)
    kept = copy.deepcopy(model)
    assert_close(logits(model.unload()), base, 1e-4)
    assert_close(logits(kept.merge_and_unload(safe_merge=True)), found, 1e-4)


@each_kind
def test_adapters_that_a_model_of_transformers_has_taken_itself(case: str) -> None:
    model, before = llama(), logits(llama())
    model.add_adapter(CASES[case][1]())
    if case == "AdaLoRA":  # its ranks are allocated by the model of peft
        model.train()
    if case != "StelLA":
        so.constrain_adapters(model)
    assert_close(logits(model), before, 1e-4)
    optimizer = so.StiefelAdam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    train(optimizer, lambda: model(batch(model)).logits.square().mean(), 3)
    found = logits(model)
    assert (found - before).abs().max() > 1e-4
    assert so.orthonormality_error(model) < 1e-5
    so.export_adapters(model)
    assert_close(logits(model), found, 1e-3)


@pytest.mark.parametrize("case", ["OFT", "AdaLoRA"])
def test_an_optimizer_from_before_trains_what_is_constrained(case: str) -> None:
    model = adapted(case, constrained=False)
    optimizer = so.StiefelAdam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    model(batch(model)).logits.square().mean().backward()  # with a gradient of the former shape
    so.constrain_adapters(model)
    before = logits(model)
    trained(model, optimizer, steps=3)
    assert (logits(model) - before).abs().max() > 1e-3
    assert so.orthonormality_error(model) < 1e-5


def test_only_the_exported_adapter_is_said_to_be_exact() -> None:
    """The other one still computes its series, where it is loaded, too."""
    model = adapted("OFT", constrained=False)
    model.add_adapter("other", oft())
    so.constrain_adapters(model, "default")
    so.export_adapters(model)
    found = {name: config.use_cayley_neumann for name, config in model.peft_config.items()}
    assert found == {"default": False, "other": True}


def test_what_is_not_exported_is_refused_by_plain_peft(tmp_path: Path) -> None:
    model = trained(adapted("OFT"), steps=1)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(llama(), tmp_path)


def test_an_exported_adalora_whose_ranks_were_cut_is_constrained_again(tmp_path: Path) -> None:
    model = trained(adapted("AdaLoRA"), steps=45)
    found = logits(model)
    so.export_adapters(model)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(llama(), tmp_path, is_trainable=True)
    ranks = {len(m.lora_E["default"]) for m in again.modules() if hasattr(m, "lora_E")}
    assert max(ranks) < RANK or len(ranks) > 1
    so.constrain_adapters(again)
    assert_close(logits(again), found, 1e-4)


# ---- quantised models ----------------------------------------------------------------------------


def quantised(kind: str, folder: Path) -> Any:
    """The model with weights of 8 or 4 bits."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(**{f"load_in_{kind[-1]}bit": True})
    return LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


@each_kind
@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes, 8", "bitsandbytes, 4"])
def test_a_quantised_base(case: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind.partition(",")[0])
    llama(width=64).save_pretrained(tmp_path / "base")

    def fresh() -> Any:
        return quantised(kind, tmp_path / "base")

    # In 4 bits bitsandbytes gives no gradients on a CPU once a model has run without: two of them.
    expected = logits(peft.get_peft_model(fresh(), CASES[case][1]()))
    model = peft.get_peft_model(fresh(), CASES[case][1]())
    if case != "StelLA":
        so.constrain_adapters(model)
    trained(model)
    assert so.orthonormality_error(model) < 1e-5
    found = logits(model)
    assert (found - expected).abs().max() > 1e-2
    so.export_adapters(model)
    assert_close(logits(model), found, 1e-3)
    model.save_pretrained(tmp_path / "adapter")
    assert_close(logits(peft.PeftModel.from_pretrained(fresh(), tmp_path / "adapter")), found, 1e-3)


# ---- refusals: one error, nothing changed --------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    kinds: list[Any] = [type(module) for module in model.modules()]
    return kinds + [(name, id(p), p._version) for name, p in model.named_parameters()]


def merged(case: str) -> Any:
    model = adapted(case)
    model.merge_adapter()
    return model


def on_meta() -> Any:
    return peft.get_peft_model(llama(), adalora(), low_cpu_mem_usage=True)


def not_finite() -> Any:
    model = adapted("AdaLoRA", constrained=False)
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "lora_B" in n)[0, 0] = torch.nan
    return model


def two_adapters() -> Any:
    model = adapted("OFT", constrained=False)
    model.add_adapter("second", oft())
    so.constrain_adapters(model, "second")
    return model


def scaled(factor: float) -> Any:
    model = adapted("OFT")
    with torch.no_grad():
        model.get_parameter(so.report(model).lines[0].name).mul_(factor)
    return model


def after_a_step_of_torch() -> Any:
    model = adapted("OFT")
    blocks = [p for p in model.parameters() if p.requires_grad]
    for block in blocks:
        block.grad = torch.randn_like(block)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it knows no constraint: the point here
        torch.optim.SGD(blocks, lr=0.02).step()
    return model


def reflected() -> Any:
    model = adapted("OFT")
    with torch.no_grad():
        model.get_parameter(so.report(model).lines[-1].name)[0, 0] *= -1
    return model


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "a model without adapters": (llama, so.constrain_adapters, r"model` must have blocks of OFT"),
    "plain LoRA": (
        lambda: peft.get_peft_model(llama(), peft.LoraConfig(target_modules=TARGETS)),
        so.constrain_adapters,
        r"got a PeftModel with LORA; .*so\.StellaConfig",
    ),
    "HRA": (
        lambda: peft.get_peft_model(llama(), peft.HRAConfig(target_modules=TARGETS)),
        so.constrain_adapters,
        r"got a PeftModel with HRA",
    ),
    "constrained already": (lambda: adapted("OFT"), so.constrain_adapters, r"constrained already"),
    "StelLA": (lambda: adapted("StelLA"), so.constrain_adapters, r"constrained already"),
    "merged": (
        lambda: merged("OFT"),
        so.constrain_adapters,
        r"must not be merged, .*unmerge_adapter",
    ),
    "a part of the model": (
        lambda: adapted("OFT", constrained=False).base_model.model.model.layers[0],
        so.constrain_adapters,
        r"model` must be the whole model, got a LlamaDecoderLayer without the config of 'default'",
    ),
    "merged, to export": (lambda: merged("StelLA"), so.export_adapters, r"must not be merged"),
    "a bounded angle": (
        lambda: peft.get_peft_model(llama(), oft(coft=True)),
        so.constrain_adapters,
        r"must be without coft",
    ),
    "a kernel of three by three": (
        lambda: peft.get_peft_model(convolutions(), oft(oft_block_size=9, **CONVOLUTIONS)),
        so.constrain_adapters,
        r"first` must have a kernel of one pixel for OFT, got \(3, 3\)",
    ),
    "a rank above the width": (
        lambda: peft.get_peft_model(llama(), adalora(init_r=17)),
        so.constrain_adapters,
        r"v_proj\.lora_A\.default` must have a rank of at most 16",
    ),
    "the meta device": (on_meta, so.constrain_adapters, r"must have values, got the meta device"),
    "NaN": (not_finite, so.constrain_adapters, r"lora_A\.default` must be finite"),
    "nothing to export": (
        lambda: adapted("OFT", constrained=False),
        so.export_adapters,
        r"must have constrained adapters, got a PeftModel with OFT; call",
    ),
    "plain LoRA, to export": (
        lambda: peft.get_peft_model(llama(), peft.LoraConfig(target_modules=TARGETS)),
        so.export_adapters,
        r"got a PeftModel with LORA, whose numbers are peft's own; save it by model\.save_pretr",
    ),
    "another adapter than the constrained one": (
        two_adapters,
        lambda model: so.export_adapters(model, "default"),
        r"`adapter` must be constrained, as \['second'\] is, got 'default'; pass adapter='second'",
    ),
    "a block that was scaled": (
        lambda: scaled(1.02),
        so.export_adapters,
        r"oft_R\.default\.weight` must be orthogonal, got one that is off .* so\.project_",
    ),
    "blocks after a step of torch": (
        after_a_step_of_torch,
        so.export_adapters,
        r"must be orthogonal, got one that is off the manifold by .*; call so\.project_",
    ),
    "a reflection": (reflected, so.export_adapters, r"too near to pi, or reflects"),
    "no adapter of that name": (
        llama,
        lambda model: so.constrain_adapters(model, "default"),
        r"adapter` must be an adapter of peft, got 'default'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_by_name_and_nothing_changes(case: str) -> None:
    build, call, message = REFUSED[case]
    model = build()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        call(model)
    assert state(model) == before


def test_projected_blocks_are_exported() -> None:
    for broken in (scaled(1.02), after_a_step_of_torch()):
        so.project_(broken)
        assert so.export_adapters(broken).action == "exported"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"use_dora` must be left out for StelLA"),
        ({"lora_bias": True}, r"lora_bias` must be left out"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights` must be True or False, got 'pissa'"),
        ({"target_modules": ["embed_tokens"]}, r"embed_tokens` must be a linear layer for StelLA"),
        ({"r": 17}, r"v_proj` must have a rank between 1 and 16"),
        ({"r": 2, "rank_pattern": {"v_proj": 17}}, r"v_proj` must have a rank between 1 and 16"),
    ],
    ids=str,
)
def test_stella_refuses_before_a_layer_is_replaced(options: dict[str, Any], message: str) -> None:
    model = llama()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(model, stella(**options))
    assert state(model) == before


def test_stella_is_not_summed_with_weights() -> None:
    model = adapted("StelLA")
    model.add_adapter("other", stella())
    with pytest.raises(ValueError, match=r"adapters` must be plain LoRA .*so\.export_adapters"):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "sum")
    so.export_adapters(model)
    found = logits(model)
    model.add_weighted_adapter(["default", "other"], [1.0, 1.0], "sum", combination_type="cat")
    model.set_adapter("sum")
    assert_close(logits(model), found, 1e-4)  # the other one is zero


def test_the_page_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = [exec("\n".join(s), {"__name__": "docs"}) for s in code_of("adapters.md") if s]
    assert len(ran) == 1
